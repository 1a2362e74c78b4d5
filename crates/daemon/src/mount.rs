//! A disk as a regular file through FUSE: the mount, its removal, and the cleanup after a crashed
//! daemon.
//!
//! The mount covers one file. If this file does not exist, hob creates an empty file, and removes
//! it when the disk is unmounted. The mount shows the owner and the permissions of the covered
//! file, so the same users may open it. Code of this module must not access the mounted file,
//! because the shard, which would have to answer, does not serve this file yet.

use std::ffi::{CString, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use hob_frontends::fuse::{Attributes, TRANSFER_BYTES_MAX};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

/// Maximum length of a path in bytes.
const PATH_BYTES_MAX: usize = 4095;

/// Filesystem type of these mounts in /proc/mounts.
const KIND: &str = "fuse.hob";

/// Maximum number of stale mounts on one path.
const STALE_MAX: usize = 64;

/// Why a file cannot be mounted or unmounted. Each variant requires a different reaction of the
/// caller.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    /// The path is unsuitable for a disk's file.
    #[error("{path} cannot be a disk's file: {what}")]
    Unfit {
        path: PathBuf,
        /// Why hob cannot mount the file at this path.
        what: String,
    },
    /// A program or a mount uses the path.
    #[error("{path} is in use: {what}")]
    InUse {
        path: PathBuf,
        /// The user of the path: a program or a mount.
        what: &'static str,
    },
    /// A system call failed.
    #[error("cannot {doing} {path}: {what}")]
    System {
        /// The failed action.
        doing: &'static str,
        path: PathBuf,
        /// Error text of the system.
        what: String,
    },
}

/// A file with data that hob uses.
#[derive(Debug)]
pub(crate) struct UsedFile {
    /// Description of the file for messages, for example "the backing of the disk web".
    pub(crate) what: String,
    /// Path of the file, or an address of a backing that is no path.
    pub(crate) path: PathBuf,
}

/// A mounted file. Dropping this value detaches the file, even if programs have it open.
#[derive(Debug)]
pub(crate) struct Mount {
    path: PathBuf,
    /// True if hob created the covered file for this mount.
    made: bool,
    mounted: bool,
    identity: Arc<MountIdentity>,
}

/// Identifies a mount in the table of mounts. Each [`Mount`] has its own `Arc`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MountIdentity(Option<FileSystem>);

/// A mounted file system, as the table of mounts shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileSystem {
    /// Device number, for example "0:39". The kernel gives the number to another file system after
    /// an unmount.
    device: Vec<u8>,
    /// Type of the file system.
    kind: Vec<u8>,
    /// Source of the mount. Files of different exports have different sources.
    source: Vec<u8>,
}

/// State of the mount of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum MountState {
    /// The path shows the file.
    #[default]
    AtPath,
    /// The file is at another path, because a directory above it was renamed.
    Moved(PathBuf),
    /// The path shows another file system.
    Covered,
    /// The file is not mounted.
    Unmounted,
}

impl MountState {
    /// Returns what another program has done to `file`, a text that names the file; `None` if the
    /// path shows the file.
    pub(crate) fn problem(&self, file: &str) -> Option<String> {
        match self {
            MountState::AtPath => None,
            MountState::Moved(to) => Some(format!("another program has moved {file} to {}", to.display())),
            MountState::Covered => Some(format!("another program has mounted a file system over {file}")),
            MountState::Unmounted => Some(format!("another program has unmounted {file}")),
        }
    }
}

/// The connection to the kernel's FUSE, for the shard that serves the mounted file.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Open descriptor of /dev/fuse.
    pub(crate) device: OwnedFd,
    /// Attributes of the mounted file that programs see.
    pub(crate) file: Attributes,
}

impl Mount {
    /// Mounts a file of `size` bytes on `path`. `name` appears in the table of mounts. A file in
    /// `used` has data that hob reads and writes, so the mount must not hide it.
    pub(crate) fn new(
        path: &Path,
        name: &str,
        size: u64,
        read_only: bool,
        used: &[UsedFile],
    ) -> Result<(Mount, Connection), MountError> {
        let path = checked(path)?;
        clear(&path)?;
        let unfit = |what: &str| MountError::Unfit { path: path.clone(), what: what.to_owned() };
        let (below, made) = placeholder(&path)?;
        // From here on dropping the mount removes the file after an error.
        let mut mount = Mount { path: path.clone(), made, mounted: false, identity: Arc::default() };
        if !below.is_file() {
            return Err(unfit("a file that is not a regular file exists there"));
        }
        let is_below = |of: Metadata| (of.dev(), of.ino()) == (below.dev(), below.ino());
        // A covered file that hob has just created is not in `used`. Then no file of `used` is
        // examined, because its filesystem may hang.
        let mut candidates = used.iter().filter(|_| !made);
        if let Some(file) = candidates.find(|file| fs::metadata(&file.path).is_ok_and(is_below)) {
            return Err(unfit(&format!("it is {}", file.what)));
        }
        let device = connect(&path, name, read_only)?;
        mount.mounted = true;
        mount.identity = identify(&path);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let time_ns = since.map_or(0, |since| since.as_nanos() as u64);
        let file =
            Attributes { size, mode: below.mode() & 0o7777, uid: below.uid(), gid: below.gid(), time_ns };
        Ok((mount, Connection { device, file }))
    }

    /// Returns the path of the mount, with resolved directories.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes over a mount of the previous daemon process.
    pub(crate) fn left(path: PathBuf, made: bool) -> Mount {
        let identity = identify(&path);
        Mount { path, made, mounted: true, identity }
    }

    /// Returns the identity of the mount in the table of mounts.
    pub(crate) fn identity(&self) -> &Arc<MountIdentity> {
        &self.identity
    }

    /// Keeps the mount for the next daemon process. Returns the path of the mount, and whether hob
    /// created the covered file for this mount.
    pub(crate) fn leave(mut self) -> (PathBuf, bool) {
        self.mounted = false;
        (std::mem::take(&mut self.path), std::mem::take(&mut self.made))
    }

    /// Unmounts the file, unless a program has it open.
    pub(crate) fn unmount(&mut self) -> Result<(), MountError> {
        match rustix::mount::unmount(&self.path, UnmountFlags::NOFOLLOW) {
            // Another process has already unmounted the file.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {
                self.mounted = false;
                self.remove_placeholder();
                Ok(())
            }
            Err(Errno::BUSY) => Err(MountError::InUse {
                path: self.path.clone(),
                what: "a program or a loop device has it open",
            }),
            Err(errno) => Err(system("unmount", &self.path)(errno)),
        }
    }

    /// Detaches the file immediately. Programs that have the file open can use it as long as hob
    /// serves it.
    pub(crate) fn detach(&mut self) {
        if std::mem::take(&mut self.mounted)
            && let Err(errno) = detach(&self.path)
            && errno != Errno::INVAL
        {
            tracing::warn!("cannot unmount {}: {errno}", self.path.display());
        }
        self.remove_placeholder();
    }

    fn remove_placeholder(&mut self) {
        // Another process may have replaced the file.
        let is_ours = |found: Metadata| found.is_file() && found.len() == 0;
        if std::mem::take(&mut self.made) && fs::symlink_metadata(&self.path).is_ok_and(is_ours) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Removes the mounts that a crashed daemon left on `path`.
pub(crate) fn clear_stale(path: &Path) {
    match checked(path).and_then(|path| clear(&path)) {
        Ok(()) | Err(MountError::Unfit { .. } | MountError::InUse { .. }) => {}
        Err(error) => tracing::warn!("{error}"),
    }
}

/// Checks that a file can be mounted on that path, without accessing it.
pub(crate) fn check_path(path: &str) -> Result<(), String> {
    match Path::new(path) {
        at if !at.is_absolute() => Err("the path is not absolute".to_owned()),
        _ if path.len() > PATH_BYTES_MAX || path.contains('\0') => Err("it is not a valid path".to_owned()),
        at if at.file_name().is_none() || path.ends_with('/') => {
            Err("the path does not name a file".to_owned())
        }
        _ => Ok(()),
    }
}

/// Returns the path with resolved directories, as the kernel knows it.
fn checked(path: &Path) -> Result<PathBuf, MountError> {
    let unfit = |what: String| MountError::Unfit { path: path.to_owned(), what };
    check_path(&path.to_string_lossy()).map_err(unfit)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(unfit("the path does not name a file".to_owned()));
    };
    let parent = fs::canonicalize(parent).map_err(|error| unfit(format!("{}: {error}", parent.display())))?;
    Ok(parent.join(name))
}

/// Unmounts files that no daemon serves any more.
fn clear(path: &Path) -> Result<(), MountError> {
    for _ in 0..STALE_MAX {
        if !is_mount_point(path) {
            return Ok(());
        }
        // The kernel can return cached attributes even if no process serves the file any more. The
        // flag `STATX_FORCE_SYNC` forces a request to the serving process.
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
        match rustix::fs::statx(rustix::fs::CWD, path, flags, StatxFlags::BASIC_STATS) {
            Err(Errno::NOTCONN) => {
                tracing::info!("{}: unmounted a stale mount of a daemon that has ended", path.display());
                detach(path).map_err(system("unmount", path))?;
            }
            _ => {
                let what = "another file system is mounted there and in use";
                return Err(MountError::InUse { path: path.to_owned(), what });
            }
        }
    }
    Err(MountError::InUse { path: path.to_owned(), what: "too many file systems are mounted there" })
}

/// Returns true if exactly this path is a mount point.
fn is_mount_point(path: &Path) -> bool {
    MountTable::read().is_ok_and(|table| table.at(path).next().is_some())
}

/// Returns the identity of hob's mount at `path`.
fn identify(path: &Path) -> Arc<MountIdentity> {
    let table = MountTable::read().unwrap_or_else(|error| {
        tracing::debug!("cannot read the table of mounts: {error}");
        MountTable(Vec::new())
    });
    Arc::new(table.identity(path))
}

/// The file systems that are mounted, each with its path, in the order of the mounts.
#[derive(Debug)]
pub(crate) struct MountTable(Vec<(PathBuf, FileSystem)>);

impl MountTable {
    /// Reads the table of mounts. The kernel does not ask the file systems.
    pub(crate) fn read() -> io::Result<MountTable> {
        fs::read("/proc/self/mountinfo").map(|table| MountTable::parse(&table))
    }

    fn parse(table: &[u8]) -> MountTable {
        let mount = |line: &[u8]| {
            let mut fields = line.split(|byte| *byte == b' ');
            let (device, path) = (fields.nth(2)?, fields.nth(1)?);
            // The number of fields before the separator varies.
            let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
            let (kind, source) = (fields.next()?, fields.next()?);
            let (device, kind, source) = (device.to_vec(), kind.to_vec(), source.to_vec());
            let path = PathBuf::from(OsString::from_vec(unescaped(path)));
            Some((path, FileSystem { device, kind, source }))
        };
        MountTable(table.split(|byte| *byte == b'\n').filter_map(mount).collect())
    }

    /// Returns the file systems that are mounted at `path`. The last one covers the others.
    fn at(&self, path: &Path) -> impl DoubleEndedIterator<Item = &FileSystem> {
        self.0.iter().filter(move |(at, _)| at == path).map(|(_, found)| found)
    }

    fn identity(&self, path: &Path) -> MountIdentity {
        let of_hob = |found: &&FileSystem| found.kind == KIND.as_bytes();
        MountIdentity(self.at(path).rev().find(of_hob).cloned())
    }

    /// Returns the state of the mount of a file that hob has mounted at `path`.
    pub(crate) fn state(&self, path: &Path, identity: &MountIdentity) -> MountState {
        let own = identity.0.as_ref();
        match self.at(path).next_back() {
            Some(shown) if own.is_none_or(|own| own == shown) => return MountState::AtPath,
            Some(_) if self.at(path).any(|found| Some(found) == own) => return MountState::Covered,
            _ => {}
        }
        match self.0.iter().find(|(_, found)| Some(found) == own) {
            Some((to, _)) => MountState::Moved(to.clone()),
            None if self.at(path).next().is_some() => MountState::Covered,
            None => MountState::Unmounted,
        }
    }
}

/// Undoes the octal escapes of /proc/self/mountinfo.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, others)) = rest.split_first() {
        let code =
            others.get(..3).filter(|code| *first == b'\\' && code.iter().all(|c| (b'0'..b'8').contains(c)));
        match code {
            Some(code) => {
                let value = code.iter().fold(0u32, |value, c| value * 8 + u32::from(c - b'0'));
                plain.push(value as u8);
                rest = &others[3..];
            }
            None => {
                plain.push(*first);
                rest = others;
            }
        }
    }
    plain
}

/// Returns the file to mount on, which is created if it does not exist.
fn placeholder(path: &Path) -> Result<(Metadata, bool), MountError> {
    let failed = |error: io::Error| MountError::System {
        doing: "make",
        path: path.to_owned(),
        what: error.to_string(),
    };
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok((metadata, false)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
            Ok((made.metadata().map_err(failed)?, true))
        }
        Err(error) => {
            Err(MountError::System { doing: "look at", path: path.to_owned(), what: error.to_string() })
        }
    }
}

fn connect(path: &Path, name: &str, read_only: bool) -> Result<OwnedFd, MountError> {
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let device = OpenOptions::new().read(true).write(true).custom_flags(nonblock).open("/dev/fuse");
    let device: File = device.map_err(|error| MountError::System {
        doing: "open",
        path: "/dev/fuse".into(),
        what: format!("{error}; is the module loaded (modprobe fuse)?"),
    })?;
    let options = format!(
        "fd={},rootmode=100000,user_id=0,group_id=0,default_permissions,allow_other,max_read={TRANSFER_BYTES_MAX}",
        device.as_raw_fd()
    );
    let options = CString::new(options).expect("numbers and commas");
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    flags.set(MountFlags::RDONLY, read_only);
    match rustix::mount::mount(format!("hob:{name}"), path, KIND, flags, Some(options.as_c_str())) {
        Ok(()) => Ok(device.into()),
        Err(Errno::PERM | Errno::ACCESS) => Err(MountError::System {
            doing: "mount",
            path: path.to_owned(),
            what: "hob needs the capability CAP_SYS_ADMIN to mount files: run hob as root".to_owned(),
        }),
        Err(Errno::NODEV) => Err(MountError::System {
            doing: "mount",
            path: path.to_owned(),
            what: "the kernel has no FUSE (modprobe fuse)".to_owned(),
        }),
        Err(errno) => Err(system("mount", path)(errno)),
    }
}

fn detach(path: &Path) -> Result<(), Errno> {
    rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
}

fn system(doing: &'static str, path: &Path) -> impl FnOnce(Errno) -> MountError {
    let path = path.to_owned();
    move |errno| MountError::System { doing, path, what: errno.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_looked_at_before_anything_is_done() {
        for (path, wrong) in [
            ("vm.img", "absolute"),
            ("/", "name a file"),
            ("/dir/..", "name a file"),
            ("/dir/", "name a file"),
            ("/a\0b", "not a valid path"),
        ] {
            let said = check_path(path).unwrap_err();
            assert!(said.contains(wrong), "{path:?}: {said}");
        }
        assert_eq!(check_path("/dir/vm.img"), Ok(()));
    }

    #[test]
    fn escapes_of_the_table_of_mounts_are_undone() {
        for (text, plain) in [
            ("/plain", "/plain"),
            ("/a\\040b\\134c", "/a b\\c"),
            ("\\", "\\"),
            ("\\04", "\\04"),
            ("\\049", "\\049"),
        ] {
            assert_eq!(unescaped(text.as_bytes()), plain.as_bytes(), "{text}");
        }
        assert!(is_mount_point(Path::new("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self")));
    }

    #[test]
    fn the_table_of_mounts_shows_where_a_file_is() {
        let line = |id: u32, device: &str, path: &str, of: &str| {
            format!("{id} 27 {device} / {path} rw,nosuid shared:{id} master:1 - {of} rw,user_id=0\n")
        };
        let table = |lines: &[(&str, &str, &str)]| {
            let lines = lines.iter().zip(30..).map(|((device, path, of), id)| line(id, device, path, of));
            MountTable::parse(lines.collect::<String>().as_bytes())
        };
        let path = Path::new("/srv/a b/vm.img");
        let root = ("254:0", "/", "ext4 /dev/vda");
        let own = ("0:39", "/srv/a\\040b/vm.img", "fuse.hob hob:vm");
        let other = ("0:40", "/srv/a\\040b/vm.img", "tmpfs none");
        let covered = table(&[root, own, other]);
        let identity = covered.identity(path);
        assert_eq!(identity, table(&[root, own]).identity(path));
        let state = |lines: &[(&str, &str, &str)]| table(lines).state(path, &identity);
        assert_eq!(state(&[root, own]), MountState::AtPath);
        assert_eq!(state(&[other, root, own]), MountState::AtPath);
        assert_eq!(state(&[root, own, other]), MountState::Covered);
        assert_eq!(state(&[root, other]), MountState::Covered);
        assert_eq!(state(&[root]), MountState::Unmounted);
        let moved = ("0:39", "/srv/c/vm.img", "fuse.hob hob:vm");
        assert_eq!(state(&[root, moved]), MountState::Moved("/srv/c/vm.img".into()));
        assert_eq!(state(&[root, moved, other]), MountState::Moved("/srv/c/vm.img".into()));
        // After an unmount, the kernel gives the device number to another file system.
        let reused = ("0:39", "/srv/c/db.img", "fuse.hob hob:db");
        assert_eq!(state(&[root, reused]), MountState::Unmounted);
        assert_eq!(state(&[root, ("0:39", own.1, reused.2)]), MountState::Covered);
        // Without an identity, any mount at the path may be the file.
        let unknown = table(&[root, other]).identity(path);
        assert_eq!(unknown, MountIdentity::default());
        assert_eq!(table(&[root, own]).state(path, &unknown), MountState::AtPath);
        assert_eq!(table(&[root, moved]).state(path, &unknown), MountState::Unmounted);
    }

    #[test]
    fn a_directory_and_the_backing_itself_are_refused_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("backing"), [0; 4096]).unwrap();
        fs::create_dir(at("dir")).unwrap();
        let used = [UsedFile { what: "the backing of the disk vm".to_owned(), path: at("backing") }];
        for (name, wrong) in [("dir", "not a regular file"), ("backing", "backing")] {
            let error = Mount::new(&at(name), "vm", 4096, false, &used).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
        assert!(Mount::new(&at("none/vm"), "vm", 4096, false, &used).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
