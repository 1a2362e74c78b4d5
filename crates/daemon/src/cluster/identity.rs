//! This host's identity, by which the cluster distinguishes hosts with the same name.

use std::fs;
use std::path::Path;

use anyhow::Context;

use crate::state::CacheOwner;

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
                fs::write(&temporary, format!("{id}\n"))?;
                fs::File::open(&temporary)?.sync_all()?;
                fs::rename(&temporary, &path)?;
                fs::File::open(directory)?.sync_all()
            };
            written().with_context(|| format!("cannot write {}", path.display()))?;
            Ok(id)
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}
