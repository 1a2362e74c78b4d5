//! A check that files can be created in a directory, for `hob daemon --check`.

use std::fs::{File, remove_file};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Checks that a file can be created in a directory, or in the nearest existing directory above a
/// directory that does not exist. Creates an empty file, and removes the file.
pub(crate) fn check(directory: &Path) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let path = existing.join(format!(".hob-check.{}.{number}", std::process::id()));
    File::options().write(true).create_new(true).mode(0o600).open(&path)?;
    remove_file(&path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_cannot_be_created_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        check(dir.path()).unwrap();
        check(&dir.path().join("missing/more")).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the check leaves nothing");
        File::create(dir.path().join("file")).unwrap();
        for directory in [dir.path().join("file"), dir.path().join("file/more"), "/proc/missing".into()] {
            check(&directory).unwrap_err();
        }
    }
}
