//! One device of a pool: opening, checks, reservation, locking.
//!
//! A device has two descriptors. The first descriptor is for the caches' data, with O_DIRECT if the
//! filesystem supports it. The second descriptor is for superblock and segment table, with buffered
//! I/O. The two descriptors never access the same 4 KiB. The lock is on the first descriptor.
//! Shards have duplicates of the first descriptor, so the lock lasts as long as any shard can write
//! to the device.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::error::PoolError;
use super::flushes::DeviceFlushes;
use super::format::{NotSuperblock, PAGE_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use super::other_data;
use super::remote::RemoteFile;
use super::table::Table;
use super::{AlignedBuffer, FlashFile, LocalFlash};
use crate::direct::open_direct;
use crate::filesystem::{self, FileNumber, file_number};
use crate::ring::{FdClass, read_now};
use crate::swap::{self, FileId};
use crate::volatile::ControlFile;

/// Number of bytes at the start of a device that hob searches for other data.
const HEAD_BYTES: usize = 256 << 10;

/// A device to add to a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    /// Path of a file, a block device, or a socket that connects to another host's device.
    pub path: PathBuf,
    /// Size that a new or empty file gets, bytes. hob reserves all space of the file.
    pub size_bytes: Option<u64>,
}

/// Whether hob may overwrite data that it finds on a new device of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// A device is refused if it has a superblock of hob, if it is a file with data, or if it is a
    /// block device whose first 256 KiB are not empty.
    Refuse,
    /// The data is overwritten, unless the kernel uses the device through a loop device.
    Force,
}

/// Signatures of data that hob overwrites only with --force: name, offset, bytes.
const SIGNATURES: &[(&str, usize, &[u8])] = &[
    ("a qcow2 image", 0, b"QFI\xfb"),
    ("a VMDK image", 0, b"KDMV"),
    ("a VHDX image", 0, b"vhdxfile"),
    ("a VPC image", 0, b"conectix"),
    ("a VDI image", 0x40, b"\x7f\x10\xda\xbe"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("an XFS filesystem", 0, b"XFSB"),
    ("a Ceph BlueStore volume", 0, b"bluestore block device"),
    ("a RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    ("a RAID member", 4096, b"\xfc\x4e\x2b\xa9"),
    ("an NTFS filesystem", 3, b"NTFS    "),
    ("an exFAT filesystem", 3, b"EXFAT   "),
    ("an LVM volume", 0, b"LABELONE"),
    ("an LVM volume", 512, b"LABELONE"),
    ("an LVM volume", 1024, b"LABELONE"),
    ("an LVM volume", 1536, b"LABELONE"),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("an ext2/3/4 filesystem", 1080, b"\x53\xef"),
    ("an F2FS filesystem", 1024, b"\x10\x20\xf5\xf2"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("a bcache device", 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("an ISO 9660 filesystem", 32769, b"CD001"),
    ("a btrfs filesystem", 65600, b"_BHRfS_M"),
    ("a ZFS pool member", 131_072, b"\x0c\xb1\xba\x00\x00\x00\x00\x00"),
    ("a ZFS pool member", 135_168, b"\x0c\xb1\xba\x00\x00\x00\x00\x00"),
    ("a partition table or boot sector", 510, b"\x55\xaa"),
];

/// Returns the name of the data whose signature is in the first bytes of a device.
pub(super) fn recognise(head: &[u8]) -> Option<&'static str> {
    let is_there = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|at| at.starts_with(magic));
    SIGNATURES.iter().find(|(_, offset, magic)| is_there(*offset, magic)).map(|(name, ..)| *name)
}

/// An open, locked device.
#[derive(Debug)]
pub(super) struct OpenDevice {
    pub(super) path: PathBuf,
    pub(super) control: ControlFile,
    pub(super) data: Data,
    pub(super) access: &'static str,
    pub(super) size_bytes: u64,
    /// Device and inode number of the device's regular file on this host; `None` for other devices.
    pub(super) file: Option<FileNumber>,
    /// Whether this opening created the file.
    created: bool,
}

/// Descriptor or connection for the caches' data.
#[derive(Debug)]
pub(super) enum Data {
    Here(OwnedFd, FdClass),
    Remote(Arc<RemoteFile>),
}

/// A device of a pool.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) open: OpenDevice,
    pub(super) superblock: Superblock,
    /// Generation of the last superblock that hob has tried to write. The write may have failed.
    pub(super) generation_tried: u64,
    /// Number of the superblock copy that is current.
    pub(super) copy: u8,
    pub(super) table: Table,
    pub(super) flushes: DeviceFlushes,
}

impl OpenDevice {
    pub(super) fn open(path: &Path) -> Result<OpenDevice, PoolError> {
        let system = |action, source: io::Error| PoolError::System { path: path.into(), action, source };
        if std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
            return OpenDevice::open_remote(path);
        }
        let control =
            OpenOptions::new().read(true).write(true).open(path).map_err(|e| system("open it", e))?;
        let metadata = control.metadata().map_err(|e| system("read its type", e))?;
        let (file_type, file) = (metadata.file_type(), file_number(&metadata));
        if !file_type.is_file() && !file_type.is_block_device() {
            let reason = format!("{} is neither a file nor a block device", path.display());
            return Err(PoolError::Unworkable { reason });
        }
        let memory = file_type.is_file() && filesystem::is_memory(&control);
        // O_EXCL: a mounted block device cannot be opened, nor an opened one mounted.
        let exclusive = if file_type.is_block_device() { libc::O_EXCL } else { 0 };
        let open_data = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        let (data, access) =
            open_data_file(memory, |flags| open_data(flags | exclusive)).map_err(|error| {
                match error.raw_os_error() {
                    Some(libc::EBUSY) => PoolError::InUse { path: path.into() },
                    _ => system("open it", error),
                }
            })?;
        if access == "buffered" {
            tracing::warn!(
                path = %path.display(),
                "this filesystem has no O_DIRECT; the page cache will hold a second copy of the pool's data"
            );
        }
        match crate::lock::lock_exclusive(&data) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(PoolError::InUse { path: path.into() }),
            Err(errno) => return Err(system("lock it", errno.into())),
        }
        let size_bytes = (&control).seek(SeekFrom::End(0)).map_err(|e| system("find its size", e))?;
        let control = ControlFile::new(control, path).map_err(|e| system("open it once more", e))?;
        let class = match memory {
            _ if control.is_volatile() => FdClass::Volatile,
            true => FdClass::Memory,
            false if file_type.is_file() && filesystem::may_block(&data) => FdClass::Foreign,
            false => FdClass::File,
        };
        let path = path.to_owned();
        let data = Data::Here(data.into(), class);
        Ok(OpenDevice { path, control, data, access, size_bytes, file, created: false })
    }

    /// Opens the device of another host through a socket.
    fn open_remote(path: &Path) -> Result<OpenDevice, PoolError> {
        let remote = Arc::new(RemoteFile::open(path)?);
        Ok(OpenDevice {
            path: path.to_owned(),
            control: ControlFile::Remote(remote.clone()),
            size_bytes: remote.size_bytes(),
            data: Data::Remote(remote),
            access: "remote",
            file: None,
            created: false,
        })
    }

    /// Opens a device that will be added to a pool, and creates the file if it does not exist.
    pub(super) fn create(spec: &DeviceSpec, overwrite: Overwrite) -> Result<OpenDevice, PoolError> {
        let path = &spec.path;
        let system = |action, source: io::Error| PoolError::System { path: path.into(), action, source };
        let created = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(system("create it", error)),
        };
        let opened = OpenDevice::open(path).and_then(|mut open| {
            open.created = created;
            if open.size_bytes == 0 {
                open.size_bytes = spec.size_bytes.ok_or_else(|| PoolError::Unworkable {
                    reason: format!("{} does not exist; pass a size to create it", path.display()),
                })?;
                open.resize()?;
            }
            if overwrite == Overwrite::Refuse {
                open.refuse_foreign()?;
            }
            open.reserve()?;
            Ok(open)
        });
        if opened.is_err() && created {
            let _ = std::fs::remove_file(path);
        }
        opened
    }

    fn resize(&self) -> Result<(), PoolError> {
        let file = self.control.file();
        file.map_or(Ok(()), |file| file.set_len(self.size_bytes)).map_err(|e| self.system("size it", e))
    }

    /// Reserves all bytes of a file now, so that a full filesystem cannot cause errors later. On
    /// failure, the file stays unchanged.
    pub(super) fn reserve(&self) -> Result<(), PoolError> {
        let is_file = |file: &&File| file.metadata().is_ok_and(|metadata| metadata.is_file());
        let Some(file) = self.control.file().filter(is_file) else { return Ok(()) };
        let no_space = || PoolError::NoSpace { path: self.path.clone(), bytes: self.size_bytes };
        if missing_bytes(file, self.size_bytes).is_some_and(|missing| missing > free_bytes(file)) {
            return Err(no_space());
        }
        let holes = holes(file, self.size_bytes);
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, self.size_bytes) {
            Ok(()) => Ok(()),
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                release(file, &holes);
                Err(no_space())
            }
            Err(Errno::OPNOTSUPP) => {
                tracing::warn!(path = %self.path.display(), "this filesystem cannot reserve space; the pool may run out of it");
                Ok(())
            }
            Err(errno) => Err(self.system("reserve its space", errno.into())),
        }
    }

    /// Returns the file's path if this opening created the file; `None` if the file existed before.
    pub(super) fn made(&self) -> Option<PathBuf> {
        self.created.then(|| self.path.clone())
    }

    /// Refuses a device that has a superblock of hob, a file with any data, and a block device
    /// whose first [`HEAD_BYTES`] bytes are not all zero. Data after these bytes of a block device
    /// is not detected.
    fn refuse_foreign(&self) -> Result<(), PoolError> {
        let mut head = vec![0; HEAD_BYTES.min(self.size_bytes as usize)];
        self.control.read_exact_at(&mut head, 0).map_err(|e| self.system("read it", e))?;
        let what = match self.read_superblock() {
            Ok((superblock, _)) => format!("hob pool {} ({})", superblock.name, superblock.pool_uuid),
            Err(PoolError::NotAPool { .. }) => match recognise(&head) {
                Some(name) => name.to_owned(),
                None if !other_data::is_zero(&head) => "unknown data".to_owned(),
                None => match self.data_in_file()? {
                    Some(what) => what,
                    None => return Ok(()),
                },
            },
            Err(PoolError::Damaged { .. } | PoolError::Newer { .. }) => "a hob pool".to_owned(),
            Err(error) => return Err(error),
        };
        Err(PoolError::Foreign { path: self.path.clone(), what })
    }

    /// Returns a description of the data in a file; `None` for a block device.
    fn data_in_file(&self) -> Result<Option<String>, PoolError> {
        let is_file = |file: &&File| file.metadata().is_ok_and(|metadata| metadata.is_file());
        let Some(file) = self.control.file().filter(is_file) else { return Ok(None) };
        other_data::data_in(file, self.size_bytes).map_err(|e| self.system("look for data in it", e))
    }

    /// Refuses a device that the kernel uses through a loop device, for example as a swap area. A
    /// device in use is refused even with --force.
    pub(super) fn refuse_in_use(&self) -> Result<(), PoolError> {
        let Data::Here(data, _) = &self.data else { return Ok(()) };
        let over = FileId::of(data).and_then(swap::loops_over);
        match over.map(|mut over| over.pop()) {
            Ok(None) => Ok(()),
            Ok(Some(device)) => Err(PoolError::UnderLoop { path: self.path.clone(), device }),
            // The check is skipped: a process that may not list loop devices cannot have created
            // one for a swap area.
            Err(error) => {
                tracing::debug!(%error, "cannot list the loop devices");
                Ok(())
            }
        }
    }

    /// Returns the newest valid superblock, and the number of its copy.
    pub(super) fn read_superblock(&self) -> Result<(Superblock, u8), PoolError> {
        self.newest_superblock(|offset, page| self.control.read_exact_at(page, offset))
    }

    /// Like [`read_superblock`](Self::read_superblock), with O_DIRECT if possible.
    pub(super) fn read_superblock_directly(&self) -> Result<(Superblock, u8), PoolError> {
        match &self.data {
            Data::Here(data, _) if !self.control.is_volatile() => {
                self.newest_superblock(|offset, page| Ok(read_now(data, offset, page)?))
            }
            _ => self.read_superblock(),
        }
    }

    /// Returns the newest valid superblock that `read` returns, and the number of its copy. The
    /// arguments of `read` are the offset and an aligned page.
    fn newest_superblock(
        &self,
        read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<(Superblock, u8), PoolError> {
        let mut found: Option<(Superblock, u8)> = None;
        let mut reason = NotSuperblock::Foreign;
        let mut page = AlignedBuffer::new(PAGE_BYTES);
        for (copy, offset) in (0u8..).zip(SUPERBLOCK_OFFSETS) {
            if let Err(error) = read(offset, page.bytes_mut()) {
                tracing::warn!(%error, path = %self.path.display(), copy, "a superblock is unreadable");
                continue;
            }
            match Superblock::decode(page.bytes()) {
                Ok(new) if found.as_ref().is_none_or(|(old, _)| old.generation < new.generation) => {
                    found = Some((new, copy));
                }
                Ok(_) | Err(NotSuperblock::Foreign) => {}
                Err(other) => reason = other,
            }
        }
        let path = self.path.clone();
        match (found, reason) {
            // A device that a newer hob has written must not be interpreted.
            (_, NotSuperblock::Newer(what)) => Err(PoolError::Newer { path, what }),
            (Some((superblock, _)), _) if superblock.device_bytes > self.size_bytes => {
                Err(PoolError::TooSmall { path, bytes: self.size_bytes, needed: superblock.device_bytes })
            }
            (Some(found), _) => Ok(found),
            (None, NotSuperblock::Foreign) => Err(PoolError::NotAPool { path }),
            (None, NotSuperblock::Damaged(what)) => Err(PoolError::Damaged { path, what: what.into() }),
        }
    }

    /// Empties a device that is removed from its pool, so that it can be added again. A file is
    /// emptied completely.
    pub(super) fn give_up(&self) -> Result<(), PoolError> {
        self.wipe()?;
        let is_file = |file: &&File| file.metadata().is_ok_and(|metadata| metadata.is_file());
        if let Some(file) = self.control.file().filter(is_file) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(errno) = rustix::fs::fallocate(file, flags, 0, self.size_bytes) {
                tracing::debug!(%errno, path = %self.path.display(), "cannot empty the file");
            }
        }
        Ok(())
    }

    /// Overwrites the start of the device, so that programs see it as empty.
    pub(super) fn wipe(&self) -> Result<(), PoolError> {
        let zeroes = vec![0; HEAD_BYTES.min(SUPERBLOCK_OFFSETS[1] as usize)];
        let wiped = self
            .control
            .write_all_at(&zeroes, 0)
            .and_then(|()| self.control.write_all_at(&zeroes[..PAGE_BYTES], SUPERBLOCK_OFFSETS[1]))
            .and_then(|()| self.control.sync_data());
        wiped.map_err(|e| self.system("wipe it", e))
    }

    pub(super) fn system(&self, action: &'static str, source: io::Error) -> PoolError {
        PoolError::System { path: self.path.clone(), action, source }
    }
}

impl Device {
    /// Makes an open device part of a pool. The superblock is written last: until it is complete,
    /// the device belongs to no pool.
    pub(super) fn format(open: OpenDevice, superblock: Superblock) -> Result<Device, PoolError> {
        open.wipe()?;
        let table = Table::new(superblock.device_uuid, superblock.layout);
        let generation_tried = superblock.generation;
        let flushes = DeviceFlushes::default();
        let mut device = Device { open, superblock, generation_tried, copy: 0, table, flushes };
        let formatted = device.write_first();
        if formatted.is_err() {
            // Without the wipe, the next attempt would refuse the device, which may have a
            // superblock or a segment table.
            let _ = device.open.wipe();
        }
        formatted.map(|()| device)
    }

    fn write_first(&mut self) -> Result<(), PoolError> {
        let formatted = self.table.format(&self.open.control);
        formatted.map_err(|e| self.open.system("write its segment table", e))?;
        self.store_superblock()?;
        self.store_superblock()
    }

    /// Reads the superblock and the segment table of a pool's device.
    pub(super) fn load(open: OpenDevice) -> Result<Device, PoolError> {
        let (superblock, copy) = open.read_superblock()?;
        let table = Table::load(&open.control, superblock.device_uuid, superblock.layout);
        let table = table.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                PoolError::Damaged { path: open.path.clone(), what: error.to_string() }
            }
            _ => open.system("read its segment table", error),
        })?;
        let generation_tried = superblock.generation;
        Ok(Device { open, superblock, generation_tried, copy, table, flushes: DeviceFlushes::default() })
    }

    /// Writes the superblock over its older copy.
    pub(super) fn store_superblock(&mut self) -> Result<(), PoolError> {
        let new = Superblock { generation: self.superblock.generation + 1, ..self.superblock.clone() };
        let copy = 1 - self.copy;
        self.generation_tried = self.generation_tried.max(new.generation);
        let control = &self.open.control;
        let stored = control
            .write_all_at(&new.encode(), SUPERBLOCK_OFFSETS[usize::from(copy)])
            .and_then(|()| self.flushes.run(|| control.sync_data()));
        stored.map_err(|e| self.open.system("write its superblock", e))?;
        (self.superblock, self.copy) = (new, copy);
        Ok(())
    }

    /// Writes the changed pages of the segment table.
    pub(super) fn store_table(&mut self) -> Result<(), PoolError> {
        let stored = self.flushes.run(|| self.table.store(&self.open.control));
        stored.map_err(|e| self.open.system("write its segment table", e))
    }

    /// Duplicates the descriptor or connection for the caches' data, for a shard.
    pub(super) fn clone_data(&self) -> Result<FlashFile, PoolError> {
        match &self.open.data {
            Data::Here(file, class) => {
                let file = file.as_fd().try_clone_to_owned();
                let file = file.map_err(|e| self.open.system("open it once more", e))?;
                Ok(FlashFile::Here(LocalFlash { file, class: *class, flushes: self.flushes.clone() }))
            }
            Data::Remote(remote) => remote.for_shard().map(FlashFile::Remote),
        }
    }

    /// Returns true if the device is on another host, so that it stores only replicas.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self.open.data, Data::Remote(_))
    }
}

/// Returns the UUID in a file's superblock; `None` if the file has no valid superblock. The
/// function changes nothing, and needs no lock, so another process may use the file.
pub fn superblock_uuid(path: &Path) -> Option<super::Uuid> {
    use std::os::unix::fs::FileExt;
    let file = File::open(path).ok()?;
    let copies = SUPERBLOCK_OFFSETS.iter().filter_map(|offset| {
        let mut bytes = vec![0; PAGE_BYTES];
        file.read_exact_at(&mut bytes, *offset).ok()?;
        Superblock::decode(&bytes).ok()
    });
    copies.max_by_key(|superblock| superblock.generation).map(|superblock| superblock.device_uuid)
}

/// Returns how many bytes of a file of `size_bytes` have no space on the filesystem yet; `None` if
/// the filesystem does not report that.
fn missing_bytes(file: &File, size_bytes: u64) -> Option<u64> {
    let allocated = file.metadata().ok()?.blocks() * 512;
    Some(size_bytes.saturating_sub(allocated))
}

/// Returns the free bytes of a file's filesystem for this process; `u64::MAX` if the filesystem
/// does not report them.
fn free_bytes(file: &File) -> u64 {
    let Ok(status) = rustix::fs::fstatvfs(file) else { return u64::MAX };
    let blocks = if rustix::process::geteuid().is_root() { status.f_bfree } else { status.f_bavail };
    blocks.saturating_mul(status.f_frsize)
}

/// Returns the holes of a file: offset and length, bytes.
fn holes(file: &File, size_bytes: u64) -> Vec<(u64, u64)> {
    let mut holes = Vec::new();
    let mut at = 0;
    while at < size_bytes {
        let Ok(hole) = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(at)) else { break };
        let data = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(hole)).unwrap_or(size_bytes);
        if hole >= size_bytes {
            break;
        }
        holes.push((hole, data.min(size_bytes) - hole));
        at = data;
    }
    holes
}

/// Makes these ranges of a file holes again, because a failed fallocate keeps the space that it
/// already allocated in the former holes.
fn release(file: &File, holes: &[(u64, u64)]) {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for (offset, len) in holes {
        let _ = rustix::fs::fallocate(file, punch, *offset, *len);
    }
}

/// Opens a device for the caches' data, and returns how it is accessed.
fn open_data_file(memory: bool, open: impl Fn(i32) -> io::Result<File>) -> io::Result<(File, &'static str)> {
    let direct = if memory { None } else { open_direct(&open)? };
    match direct {
        Some(file) => Ok((file, "direct")),
        None => Ok((open(0)?, if memory { "memory" } else { "buffered" })),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn sparse(dir: &tempfile::TempDir, size_bytes: u64) -> (PathBuf, File) {
        let path = dir.path().join("pool");
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        file.set_len(size_bytes).unwrap();
        (path, file)
    }

    #[test]
    fn a_device_is_buffered_only_where_there_is_no_o_direct() {
        let file = tempfile::tempfile().unwrap();
        let open = |errno: i32| {
            let file = &file;
            move |flags: i32| match flags & libc::O_DIRECT {
                0 => file.try_clone(),
                _ => Err(io::Error::from_raw_os_error(errno)),
            }
        };
        assert_eq!(open_data_file(false, open(libc::EINVAL)).unwrap().1, "buffered");
        assert_eq!(open_data_file(true, open(libc::EMFILE)).unwrap().1, "memory");
        assert_eq!(open_data_file(false, |_| file.try_clone()).unwrap().1, "direct");
        for errno in [libc::EMFILE, libc::ENFILE, libc::EBUSY, libc::EIO] {
            let refused = open_data_file(false, open(errno)).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(errno));
        }
    }

    #[test]
    fn a_sparse_file_larger_than_its_filesystem_is_refused_and_takes_no_space() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (path, file) = sparse(&dir, 1 << 20);
        let size_bytes = (2 * free_bytes(&file)).next_multiple_of(1 << 20);
        file.set_len(size_bytes).unwrap();
        let refused = OpenDevice::create(&DeviceSpec { path, size_bytes: None }, Overwrite::Force);
        assert!(matches!(refused, Err(PoolError::NoSpace { bytes, .. }) if bytes == size_bytes));
        assert_eq!(file.metadata().unwrap().blocks(), 0);
    }

    #[test]
    fn a_failed_reservation_frees_exactly_its_own_space() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (_, file) = sparse(&dir, 8 << 20);
        file.write_all_at(&[7; 4096], 1 << 20).unwrap();
        file.write_all_at(&[8; 4096], 5 << 20).unwrap();
        file.sync_all().unwrap();
        let before = file.metadata().unwrap().blocks();
        let holes = holes(&file, 8 << 20);
        assert_eq!(holes.len(), 3);
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 8 << 20).unwrap();
        assert!(file.metadata().unwrap().blocks() >= 16384);
        release(&file, &holes);
        assert!(file.metadata().unwrap().blocks() <= before + 16);
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, 5 << 20).unwrap();
        assert_eq!(bytes, [8; 4096]);
    }
}
