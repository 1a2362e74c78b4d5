//! Locks of `hob attach` and `hob detach`: only one command at a time changes a VM, and only one
//! command at a time uses a name of hob's disks. Commands for different VMs run in parallel.
//!
//! A lock is a file with `flock`. The kernel releases the lock when the process ends, also after
//! SIGKILL. The file has the command of its holder, for the message to other commands.

use std::fs::{DirBuilder, File, metadata, remove_file};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::options::hash;

/// Directory of root's locks of VMs, besides the directory of the records: commands with different
/// `--records` must not change the same VM either.
const RUNTIME: &str = "/run/hob-attach";
/// Maximum length of the command of a lock's holder, bytes.
const HOLDER_BYTES_MAX: u64 = 1024;

/// The locks of one command, which end with this value.
#[derive(Debug)]
pub(super) struct Locks {
    /// Directory of the records.
    records: PathBuf,
    /// The command in words, for other commands.
    command: String,
    files: Vec<(PathBuf, File)>,
}

impl Drop for Locks {
    fn drop(&mut self) {
        // The files are still locked. A command that has opened one of them sees its deletion.
        for (path, _) in &self.files {
            let _ = remove_file(path);
        }
    }
}

impl Locks {
    /// Locks the VM with these names for `command`, for example `hob attach qmp:/run/web.qmp`.
    ///
    /// # Errors
    /// Returns an error if another command works on this VM.
    pub(super) fn of_vm(records: &Path, names: &[String], command: &str) -> anyhow::Result<Locks> {
        let runtime = geteuid().is_root().then(|| PathBuf::from(RUNTIME));
        Locks::in_directories(records, runtime, names, command)
    }

    fn in_directories(
        records: &Path,
        runtime: Option<PathBuf>,
        names: &[String],
        command: &str,
    ) -> anyhow::Result<Locks> {
        let command = format!("'{command}' (process {})", std::process::id());
        let mut locks = Locks { records: records.to_owned(), command, files: Vec::new() };
        for directory in [Some(records.to_owned()), runtime].into_iter().flatten() {
            let created = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
            created.with_context(|| format!("cannot create {}", directory.display()))?;
            for name in names {
                if let Some(holder) = locks.add(file_of(&directory, name))? {
                    bail!(
                        "another command is working on this VM: {holder}; repeat the command when it has ended"
                    );
                }
            }
        }
        Ok(locks)
    }

    /// Locks a name of hob's disks. Two VMs of the same name have the same names of disks.
    ///
    /// # Errors
    /// Returns an error if another command uses this name.
    pub(super) fn add_disk(&mut self, disk: &str) -> anyhow::Result<()> {
        if let Some(holder) = self.add(self.records.join(format!("{disk}.lock")))? {
            bail!(
                "another command is working on a disk with the name {disk} in hob: {holder}; repeat the command when \
                 it has ended"
            );
        }
        Ok(())
    }

    /// Locks a file. If another command has the lock, returns that command.
    fn add(&mut self, path: PathBuf) -> anyhow::Result<Option<String>> {
        if self.files.iter().any(|(locked, _)| *locked == path) {
            return Ok(None);
        }
        let cannot = || format!("cannot lock {}", path.display());
        loop {
            let mut options = File::options();
            let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let mut file = options.open(&path).with_context(cannot)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let mut holder = String::new();
                    let _ = file.take(HOLDER_BYTES_MAX).read_to_string(&mut holder);
                    // The holder may not have written its command yet.
                    if holder.is_empty() {
                        holder.push_str("'hob attach' or 'hob detach'");
                    }
                    return Ok(Some(holder));
                }
                Err(error) => return Err(error).with_context(cannot),
            }
            if is_at(&file, &path) {
                // A killed command leaves its text.
                if file.metadata().is_ok_and(|metadata| metadata.len() > 0) {
                    file.set_len(0).with_context(cannot)?;
                }
                // The text is only for messages. A full filesystem must not prevent a detachment.
                let _ = file.write_all(self.command.as_bytes());
                self.files.push((path, file));
                return Ok(None);
            }
        }
    }
}

/// Returns the running command that has locked a VM with one of these names. This function does not
/// use the lock, because a command that starts at this moment would be refused.
pub(super) fn holder(records: &Path, names: &[String]) -> Option<String> {
    names.iter().find_map(|name| {
        let mut text = String::new();
        File::open(file_of(records, name)).ok()?.take(HOLDER_BYTES_MAX).read_to_string(&mut text).ok()?;
        let process = text.rsplit_once("(process ")?.1.strip_suffix(')')?;
        // A killed command leaves its file.
        let program = std::fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
        program.contains("hob").then_some(text)
    })
}

/// Returns the file of a VM's lock.
fn file_of(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{:016x}.vm", hash(name)))
}

/// Returns true if an open file still has this path. The last holder of the lock deletes the file.
fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(own), Ok(found)) = (file.metadata(), metadata(path)) else { return false };
    (own.dev(), own.ino()) == (found.dev(), found.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTACH: &str = "hob attach libvirt:web";

    /// Locks a VM, with the runtime directory `run` below `directory`.
    fn lock(directory: &Path, records: &str, names: &[&str]) -> anyhow::Result<Locks> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        Locks::in_directories(&directory.join(records), Some(directory.join("run")), &names, ATTACH)
    }

    #[test]
    fn only_one_command_at_a_time_changes_a_vm() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock(dir.path(), "records", &["libvirt:0b1c", "libvirt:web"]).unwrap();
        // A domain of libvirt has a name and a UUID, and an undefined one has only its name.
        let several: [&[&str]; 3] = [&["libvirt:0b1c", "libvirt:web"], &["libvirt:web"], &["libvirt:0b1c"]];
        for names in several {
            for records in ["records", "others"] {
                let error = lock(dir.path(), records, names).unwrap_err().to_string();
                let holder = format!("'{ATTACH}' (process {})", std::process::id());
                assert!(error.contains("working on this VM") && error.contains(&holder), "{error}");
                assert!(!error.contains('\n'), "{error}");
            }
        }
        let other = lock(dir.path(), "records", &["libvirt:db"]).expect("another VM has other locks");
        drop(first);
        let _second = lock(dir.path(), "records", &["libvirt:web"]).unwrap();
        drop(other);
    }

    #[test]
    fn only_one_command_at_a_time_uses_the_name_of_a_disk() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = lock(dir.path(), "records", &["qmp:/run/a.qmp"]).unwrap();
        let mut second = lock(dir.path(), "records", &["qmp:/run/b.qmp"]).unwrap();
        first.add_disk("web-vda").unwrap();
        first.add_disk("web-vda").expect("a command may use its disk twice");
        let error = second.add_disk("web-vda").unwrap_err().to_string();
        assert!(error.contains("web-vda in hob: 'hob attach"), "{error}");
        second.add_disk("web-vdb").unwrap();
        drop(first);
        second.add_disk("web-vda").unwrap();
    }

    #[test]
    fn a_command_leaves_no_file_and_a_killed_command_leaves_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let files = || {
            let files =
                ["records", "run"].map(|name| std::fs::read_dir(dir.path().join(name)).unwrap().count());
            files.iter().sum::<usize>()
        };
        let mut locks = lock(dir.path(), "records", &["qmp:/run/a.qmp"]).unwrap();
        locks.add_disk("web-vda").unwrap();
        assert_eq!(files(), 3);
        // A killed command does not delete its files.
        let kept: Vec<(PathBuf, Vec<u8>)> =
            locks.files.iter().map(|(path, _)| (path.clone(), std::fs::read(path).unwrap())).collect();
        drop(locks);
        assert_eq!(files(), 0);
        for (path, bytes) in &kept {
            std::fs::write(path, [bytes.as_slice(), b" and a longer command"].concat()).unwrap();
        }
        let locks = lock(dir.path(), "records", &["qmp:/run/a.qmp"]).unwrap();
        assert_eq!(std::fs::read(&kept[0].0).unwrap(), kept[0].1, "the command of the new holder");
        drop(locks);
    }

    #[test]
    fn a_full_filesystem_prevents_no_command() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = lock(dir.path(), "records", &["qmp:/run/a.qmp"]).unwrap();
        let mut second = lock(dir.path(), "records", &["qmp:/run/b.qmp"]).unwrap();
        // Each write to this device fails with ENOSPC.
        std::os::unix::fs::symlink("/dev/full", dir.path().join("records/web-vda.lock")).unwrap();
        first.add_disk("web-vda").unwrap();
        second.add_disk("web-vda").unwrap_err();
    }

    #[test]
    fn the_holder_of_a_lock_is_found_while_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["libvirt:web".to_owned()];
        let holder = || super::holder(&dir.path().join("records"), &names);
        let locks = lock(dir.path(), "records", &["libvirt:web"]).unwrap();
        let text = format!("'{ATTACH}' (process {})", std::process::id());
        assert_eq!(holder().unwrap(), text);
        let path = locks.files[0].0.clone();
        drop(locks);
        assert_eq!(holder(), None);
        // A process that was killed, and one of another program.
        for process in [u32::MAX, 1] {
            std::fs::write(&path, format!("'{ATTACH}' (process {process})")).unwrap();
            assert_eq!(holder(), None, "{process}");
        }
    }

    /// The holder deletes the file after another command has opened it. The other command must not
    /// take the lock of the deleted file for that of the VM.
    #[test]
    fn a_deleted_file_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.vm");
        let file = File::create(&path).unwrap();
        assert!(is_at(&file, &path));
        remove_file(&path).unwrap();
        assert!(!is_at(&file, &path));
        File::create(&path).unwrap();
        assert!(!is_at(&file, &path));
    }
}
