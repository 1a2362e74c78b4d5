//! This host's identity, by which the cluster distinguishes hosts with the same name.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::Context;

use crate::state::{CacheOwner, create_private};

pub(crate) fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// Returns this host's random identity. The first call creates it in the file `member`.
pub(crate) fn identity(directory: &Path) -> anyhow::Result<String> {
    let path = directory.join("member");
    match fs::read_to_string(&path) {
        Ok(text) => {
            let id = text.trim();
            id.parse::<CacheOwner>().map_err(|_| {
                anyhow::anyhow!(
                    "{} has no identity in it; remove it only if no disk of the cluster has dirty data here",
                    path.display()
                )
            })?;
            Ok(id.to_owned())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let id = CacheOwner::random().to_string();
            let temporary = directory.join("member.new");
            let written = || -> std::io::Result<()> {
                let mut file = create_private(&temporary)?;
                writeln!(file, "{id}")?;
                file.sync_all()?;
                fs::rename(&temporary, &path)?;
                fs::File::open(directory)?.sync_all()
            };
            written().with_context(|| format!("cannot write {}", path.display()))?;
            Ok(id)
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_identity_is_created_once_and_only_this_user_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let id = identity(dir.path()).unwrap();
        let mode = fs::metadata(dir.path().join("member")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(identity(dir.path()).unwrap(), id);
        assert!(!dir.path().join("member.new").exists());
    }
}
