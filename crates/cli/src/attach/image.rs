//! The image of a VM's disk: its name as QEMU knows it, and a name for hob that is still right after
//! a restart of the host.
//!
//! Links in the name are not resolved. `/dev/vg/vm` still leads to the same volume if the kernel
//! numbers its devices differently, but `/dev/dm-6` may lead to another volume.
//!
//! QEMU's answers are not trusted: a malicious guest may control QEMU. hob opens the image as root,
//! so hob requires that QEMU's process also has the image open for writing.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hob_control::Disk;
use hob_storage::device_name::DeviceName;
use tokio::time::timeout;

use super::execution::tell;
use super::threads::in_thread;

/// Maximum time for the comparison of an image with the backings of hob's disks.
const BACKINGS_MAX: Duration = Duration::from_secs(2);
/// Mask of the access mode in the flags of an open file, and the modes that allow writing.
const ACCESS_MODE: u32 = 0o3;
const WRITE_MODES: [u32; 2] = [0o1, 0o2];

/// The name of an image.
pub(super) struct Image {
    /// Absolute path of the image, by which QEMU opens it.
    pub(super) given: PathBuf,
    /// Absolute path of the image for hob's records.
    pub(super) stored: PathBuf,
}

impl Image {
    /// Returns the names of an image that QEMU opened as `file` in its working directory.
    pub(super) fn find(file: &str, directory: Option<&Path>) -> anyhow::Result<Image> {
        let path = match directory {
            Some(directory) => directory.join(file),
            None => PathBuf::from(file),
        };
        let given = std::path::absolute(&path).with_context(|| format!("cannot find {}", path.display()))?;
        // Under these names, each process sees its own open files.
        let is_own = ["/dev/fd", "/dev/fdset", "/proc"].iter().any(|own| given.starts_with(own));
        ensure!(!is_own, "QEMU was given the image as an open file, so hob does not know its path");
        fs::metadata(&given).with_context(|| match Path::new(file).is_relative() {
            true => format!(
                "QEMU opened the image as '{file}', and there is no {}: QEMU changed its directory afterwards, for \
                 example with -daemonize. Start the VM with the absolute path of the image, and repeat the command",
                given.display()
            ),
            false => format!("cannot find {}", given.display()),
        })?;
        let name = DeviceName::of(&given);
        if let Some(note) = name.note(&given) {
            match name {
                DeviceName::Link(_) => tell(&format!("note: {note}, and hob uses it")),
                _ => tell(&format!("warning: {note}. After a restart, check the disk before the VM starts")),
            }
        }
        let stored = match name {
            DeviceName::Link(link) => link,
            DeviceName::Stable | DeviceName::Numbered => given.clone(),
        };
        Ok(Image { given, stored })
    }

    /// Refuses an image that a process does not have open for writing.
    ///
    /// # Errors
    /// Returns the reason why hob does not trust the name of the image.
    pub(super) fn check_opened_by(&self, pid: i32) -> anyhow::Result<()> {
        let at = self.given.display();
        let image = fs::metadata(&self.given).with_context(|| format!("cannot find {at}"))?;
        let stored = fs::metadata(&self.stored)?;
        ensure!(is_same(&image, &stored), "{at} and {} are different files", self.stored.display());
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let cannot = || {
            format!(
                "cannot check that QEMU (process {pid}) has {at} open; run 'hob attach' as root on QEMU's host"
            )
        };
        for entry in fs::read_dir(directory.join("fd")).with_context(cannot)?.flatten() {
            // The process may close a file meanwhile.
            let is_image = fs::metadata(entry.path()).is_ok_and(|file| is_same(&file, &image));
            if !is_image {
                continue;
            }
            let info = directory.join("fdinfo").join(entry.file_name());
            if fs::read_to_string(info).is_ok_and(|info| is_writable(&info)) {
                return Ok(());
            }
        }
        bail!(
            "QEMU says that the disk's image is {at}, but the process at its QMP socket (process {pid}) does \
             not have this file open for writing; hob does not attach it. Use QEMU's own socket, not that \
             of a proxy"
        )
    }
}

/// Returns true if both paths lead to the same file or the same block device, also through symbolic
/// links and hard links.
pub(super) fn is_same_file(one: &Path, other: &Path) -> bool {
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(one), Ok(other)) => is_same(&one, &other),
        _ => one == other,
    }
}

/// Returns the disk that serves an image. Returns `None` if the filesystem of a backing does not
/// answer.
pub(super) async fn disk_of_image<'a>(disks: impl Iterator<Item = &'a Disk>, image: &Path) -> Option<String> {
    let paths = disks.filter(|disk| disk.backing.starts_with('/'));
    let paths: Vec<(String, PathBuf)> =
        paths.map(|disk| (disk.name.clone(), PathBuf::from(&disk.backing))).collect();
    let image = image.to_owned();
    let found = in_thread(move || paths.into_iter().find(|(_, path)| is_same_file(path, &image)));
    let (disk, _) = timeout(BACKINGS_MAX, found).await.ok()?.ok()??;
    Some(disk)
}

/// Returns true if both metadata describe the same file or the same block device.
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    match (one.file_type().is_block_device(), other.file_type().is_block_device()) {
        (true, true) => one.rdev() == other.rdev(),
        (false, false) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

/// Returns true if the description of an open file in `/proc/PID/fdinfo` allows writing.
fn is_writable(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| WRITE_MODES.contains(&(flags & ACCESS_MODE)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_are_kept_and_relative_names_belong_to_the_directory_of_qemu() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("image"), "x").unwrap();
        symlink("image", dir.path().join("link")).unwrap();
        let image = Image::find("link", Some(dir.path())).unwrap();
        assert_eq!(image.given, dir.path().join("link"));
        assert_eq!(image.stored, image.given);
        let error = Image::find("missing", Some(dir.path())).err().unwrap().to_string();
        assert!(error.contains("'missing'") && error.contains("-daemonize"), "{error}");
        let error = Image::find("/nowhere/image", Some(dir.path())).err().unwrap().to_string();
        assert_eq!(error, "cannot find /nowhere/image");
        for own in ["/proc/self/fd/0", "/dev/fd/0", "/dev/fdset/1"] {
            let error = Image::find(own, None).err().unwrap().to_string();
            assert!(error.contains("open file"), "{own}: {error}");
        }
    }

    #[test]
    fn a_file_is_the_same_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let [file, soft, hard, other] = ["file", "soft", "hard", "other"].map(|name| dir.path().join(name));
        fs::write(&file, "x").unwrap();
        fs::write(&other, "x").unwrap();
        symlink(&file, &soft).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        assert!(is_same_file(&file, &soft) && is_same_file(&hard, &soft));
        assert!(!is_same_file(&file, &other) && !is_same_file(&file, &dir.path().join("missing")));
    }

    #[test]
    fn an_image_must_be_open_for_writing_in_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, "x").unwrap();
        symlink("image", dir.path().join("link")).unwrap();
        let image = Image::find("link", Some(dir.path())).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let refused = |why: &str| {
            let error = image.check_opened_by(me).unwrap_err().to_string();
            assert!(error.contains("open for writing"), "{why}: {error}");
        };
        refused("no process has it open");
        let reader = fs::File::open(&path).unwrap();
        refused("it is open for reading");
        let writer = fs::File::options().read(true).write(true).open(&path).unwrap();
        image.check_opened_by(me).unwrap();
        drop((reader, writer));
        refused("it is closed");
        let _other = fs::File::create(dir.path().join("other")).unwrap();
        refused("another file is open");
    }

    #[test]
    fn the_access_mode_is_in_the_flags() {
        for (flags, writable) in
            [("0100000", false), ("0140002", true), ("02100001", true), ("010000000", false)]
        {
            assert_eq!(is_writable(&format!("pos:\t0\nflags:\t{flags}\nmnt_id:\t1\n")), writable, "{flags}");
        }
        assert!(!is_writable(""));
    }

    #[test]
    fn an_image_that_hob_serves_already_is_found() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let [image, link] = ["image", "link"].map(|name| dir.path().join(name));
        fs::write(&image, "x").unwrap();
        symlink(&image, &link).unwrap();
        let disk = |name: &str, backing: &Path| Disk {
            name: name.to_owned(),
            backing: backing.display().to_string(),
            ..Disk::default()
        };
        let disks = [disk("nbd", Path::new("nbd://host/image")), disk("web", &link)];
        let found = |disks: &[Disk]| runtime.block_on(disk_of_image(disks.iter(), &image));
        assert_eq!(found(&disks).as_deref(), Some("web"));
        assert_eq!(found(&disks[..1]), None);
    }
}
