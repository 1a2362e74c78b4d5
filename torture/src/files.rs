//! A FUSE file system for tests. The test files are in memory. A test can make them lose unflushed
//! data, fail, hang or fill up.
//!
//! The file system has one directory. Files bypass the page cache, so that readers get exactly the
//! content of the medium.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};

use crate::behaviour::{Behaviour, Operation};
use crate::medium::Medium;

/// Time for which the kernel may cache attributes.
const TTL: Duration = Duration::ZERO;
/// Number of threads that serve FUSE requests. Without io_uring, 16 threads of hob may wait for each
/// of two pool devices.
const THREADS: usize = 40;
/// Size of the file system in `statfs`, blocks of 4 KiB.
const BLOCKS: u64 = 1 << 20;
/// Flag of a write that must be durable before the reply. The flags RWF_DSYNC, O_DSYNC and O_SYNC
/// include this flag.
const O_DSYNC: i32 = 0o10_000;
/// Flag of fallocate(2): keep the file size.
const KEEP_SIZE: i32 = 1;
/// Flag of fallocate(2): make a hole.
const PUNCH_HOLE: i32 = 2;
/// Flag of fallocate(2): write zeroes.
const ZERO_RANGE: i32 = 16;

/// A file of the test file system.
#[derive(Debug)]
pub struct File {
    name: String,
    medium: Mutex<Medium>,
    size: AtomicU64,
    modified: Mutex<SystemTime>,
    behaviour: Behaviour,
    /// Handle of the file for programs that open it now. Requests with other handles fail.
    handle: AtomicU64,
    refuses_opens: AtomicBool,
}

/// A mounted test file system. Dropping this value unmounts the file system.
pub struct Files {
    dir: PathBuf,
    shared: Arc<Shared>,
    session: Option<BackgroundSession>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files").field("dir", &self.dir).finish_non_exhaustive()
    }
}

struct Shared {
    files: Mutex<Vec<Arc<File>>>,
    seed: u64,
    stopping: AtomicBool,
    hangs: AtomicBool,
    /// Number of requests that wait because the test makes the file system hang.
    waiting: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl File {
    fn new(name: &str, medium: Medium) -> Arc<Self> {
        let size = AtomicU64::new(medium.len());
        let modified = Mutex::new(SystemTime::now());
        Arc::new(Self {
            name: name.to_owned(),
            medium: Mutex::new(medium),
            size,
            modified,
            behaviour: Behaviour::default(),
            handle: AtomicU64::new(0),
            refuses_opens: AtomicBool::new(false),
        })
    }

    /// Returns the name of the file in its directory.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the medium of the file. No request is served while the guard lives.
    pub fn medium(&self) -> MutexGuard<'_, Medium> {
        lock(&self.medium)
    }

    /// Returns the current faults of the file.
    #[must_use]
    pub fn behaviour(&self) -> &Behaviour {
        &self.behaviour
    }

    /// Sets the file's modification time to now.
    pub fn touch(&self) {
        *lock(&self.modified) = SystemTime::now();
    }

    fn set_modified(&self, time: TimeOrNow) {
        *lock(&self.modified) = match time {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => SystemTime::now(),
        };
    }

    /// Makes all open handles of the file stale, as after a failover of an NFS server: requests
    /// with these handles fail with ESTALE for ever. The file cannot be opened again before
    /// [`Self::admit`].
    pub fn expire_handles(&self) {
        self.refuses_opens.store(true, Ordering::SeqCst);
        self.handle.fetch_add(1, Ordering::SeqCst);
    }

    /// Lets programs open the file again.
    pub fn admit(&self) {
        self.refuses_opens.store(false, Ordering::SeqCst);
    }

    fn resize(&self, bytes: u64) {
        self.medium().resize(bytes);
        self.size.store(bytes, Ordering::Relaxed);
        self.touch();
    }
}

impl Files {
    /// Creates the directory `dir` and mounts an empty file system on it.
    ///
    /// # Errors
    /// Returns errors of the operating system. Mounting needs root and /dev/fuse.
    pub fn mount(dir: &Path, seed: u64) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let shared = Arc::new(Shared {
            files: Mutex::default(),
            seed,
            stopping: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
        });
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("torture".to_owned()), MountOption::NoAtime];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(Served(Arc::clone(&shared)), dir, &config)?;
        Ok(Self { dir: dir.to_owned(), shared, session: Some(session) })
    }

    /// Adds a file to the file system.
    pub fn add(&self, name: &str, medium: Medium) -> Arc<File> {
        let file = File::new(name, medium);
        lock(&self.shared.files).push(Arc::clone(&file));
        file
    }

    /// Returns all files.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<File>> {
        lock(&self.shared.files).clone()
    }

    /// Returns the path of a file.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Makes all requests hang, also those for attributes and names, until [`Self::resume`]. The
    /// file system behaves like a network file system whose server does not answer.
    pub fn hang(&self) {
        self.shared.hangs.store(true, Ordering::SeqCst);
    }

    /// Ends [`Self::hang`].
    pub fn resume(&self) {
        self.shared.hangs.store(false, Ordering::SeqCst);
    }

    /// Returns the number of requests that hang now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::SeqCst)
    }

    /// Simulates a power cut while no process uses the files: unflushed data is lost. Returns the
    /// number of lost units of 512 bytes.
    #[must_use]
    pub fn lose(&self) -> usize {
        self.all().iter().map(|file| file.medium().lose()).sum()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.resume();
        self.all().iter().for_each(|file| file.behaviour.heal());
        // Unmount even if a process still uses the file system: a remaining mount would block every
        // process that accesses it.
        drop(conformance::Unmount::at(&self.dir));
        if let Some(session) = self.session.take() {
            let _ = session.umount_and_join();
        }
    }
}

struct Served(Arc<Shared>);

impl Served {
    /// Blocks the request while the test makes the file system hang ([`Files::hang`]).
    fn wait(&self) {
        let shared = &self.0;
        if !shared.hangs.load(Ordering::SeqCst) {
            return;
        }
        shared.waiting.fetch_add(1, Ordering::SeqCst);
        while shared.hangs.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        shared.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    fn file(&self, ino: INodeNo) -> Result<Arc<File>, Errno> {
        let at = u64::from(ino).checked_sub(2).ok_or(Errno::EISDIR)?;
        lock(&self.0.files).get(at as usize).cloned().ok_or(Errno::ENOENT)
    }

    fn find(&self, name: &OsStr) -> Option<u64> {
        let files = lock(&self.0.files);
        files.iter().position(|file| *file.name == *name).map(|at| at as u64 + 2)
    }

    /// Performs a request on a file: waits as long as the file's faults delay the request, and then
    /// calls `work`, unless a fault makes the request fail. A stale handle fails immediately.
    fn act<T>(
        &self,
        (ino, handle): (INodeNo, FileHandle),
        operation: Operation,
        range: &std::ops::Range<u64>,
        work: impl FnOnce(&File, &mut Medium) -> T,
    ) -> Result<T, Errno> {
        self.wait();
        let file = self.file(ino)?;
        if u64::from(handle) != file.handle.load(Ordering::SeqCst) {
            return Err(Errno::ESTALE);
        }
        let _task = file.behaviour.lateness().task(Instant::now());
        file.behaviour.wait(|| self.0.stopping.load(Ordering::Relaxed));
        let mut medium = file.medium();
        match file.behaviour.error(operation, range, &mut medium) {
            Some(error) => Err(Errno::from_i32(error as i32)),
            None => Ok(work(&file, &mut medium)),
        }
    }

    fn attributes(&self, ino: u64) -> Result<FileAttr, Errno> {
        let (size, time, kind) = match ino {
            1 => (0, SystemTime::UNIX_EPOCH, FileType::Directory),
            _ => {
                let file = self.file(INodeNo(ino))?;
                (file.size.load(Ordering::Relaxed), *lock(&file.modified), FileType::RegularFile)
            }
        };
        let perm = if ino == 1 { 0o755 } else { 0o600 };
        let blocks = size.div_ceil(512);
        let (atime, mtime, ctime, crtime) = (time, time, time, time);
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let ino = INodeNo(ino);
        Ok(FileAttr {
            ino,
            size,
            blocks,
            atime,
            mtime,
            ctime,
            crtime,
            kind,
            perm,
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

macro_rules! reply {
    ($reply:expr, $result:expr, $value:ident => $good:expr) => {
        match $result {
            Ok($value) => $good,
            Err(error) => $reply.error(error),
        }
    };
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.wait();
        let found = self.find(name).ok_or(Errno::ENOENT).and_then(|ino| self.attributes(ino));
        reply!(reply, found, attributes => reply.entry(&TTL, &attributes, Generation(0)));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.wait();
        reply!(reply, self.attributes(ino.into()), attributes => reply.attr(&TTL, &attributes));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.wait();
        if let Ok(file) = self.file(ino) {
            size.into_iter().for_each(|size| file.resize(size));
            mtime.into_iter().for_each(|time| file.set_modified(time));
        }
        reply!(reply, self.attributes(ino.into()), attributes => reply.attr(&TTL, &attributes));
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.wait();
        let handle = self.file(ino).and_then(|file| match file.refuses_opens.load(Ordering::SeqCst) {
            true => Err(Errno::ESTALE),
            false => Ok(file.handle.load(Ordering::SeqCst)),
        });
        reply!(reply, handle, handle => reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO));
    }

    fn create(&self, _: &Request, _: INodeNo, name: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        self.wait();
        let ino = self.find(name).unwrap_or_else(|| {
            let mut files = lock(&self.0.files);
            let medium = Medium::new(0, self.0.seed ^ files.len() as u64);
            files.push(File::new(&name.to_string_lossy(), medium));
            files.len() as u64 + 1
        });
        reply!(reply, self.attributes(ino), attributes => {
            reply.created(&TTL, &attributes, Generation(0), FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
        });
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let data =
            self.act((ino, handle), Operation::Read, &(offset..offset + u64::from(size)), |file, medium| {
                let left = file.size.load(Ordering::Relaxed).saturating_sub(offset);
                medium.read_bytes(offset, left.min(size.into()) as usize)
            });
        reply!(reply, data, data => reply.data(&data));
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let end = offset + data.len() as u64;
        let written = self.act((ino, handle), Operation::Write, &(offset..end), |file, medium| {
            if end > file.size.load(Ordering::Relaxed) {
                medium.resize(end);
                file.size.store(end, Ordering::Relaxed);
            }
            medium.write_bytes(offset, data, flags.0 & O_DSYNC != 0);
            file.touch();
            data.len() as u32
        });
        reply!(reply, written, written => reply.written(written));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.wait();
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        let done = self.act((ino, handle), Operation::Flush, &(0..0), |_, medium| medium.flush());
        reply!(reply, done, _done => reply.ok());
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let end = offset + length;
        let done = self.act((ino, handle), Operation::Trim, &(offset..end), |file, medium| {
            let size = file.size.load(Ordering::Relaxed);
            if mode & KEEP_SIZE == 0 && end > size {
                medium.resize(end);
                file.size.store(end, Ordering::Relaxed);
            }
            if mode & (PUNCH_HOLE | ZERO_RANGE) != 0 {
                let end = end.min(file.size.load(Ordering::Relaxed));
                medium.write_bytes(offset, &vec![0; end.saturating_sub(offset) as usize], false);
                file.touch();
            }
        });
        reply!(reply, done, _done => reply.ok());
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.wait();
        reply.statfs(BLOCKS, BLOCKS, BLOCKS, 1000, 1000, 4096, 255, 4096);
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        self.wait();
        let names: Vec<String> = lock(&self.0.files).iter().map(|file| file.name.clone()).collect();
        for (at, name) in names.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(at as u64 + 2), at as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// This test needs root and /dev/fuse.
    #[test]
    fn a_file_keeps_what_was_flushed_and_loses_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::mount(&dir.path().join("mnt"), 1).unwrap();
        let path = files.path("a");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let modified = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(5);
        file.set_modified(modified).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), modified);
        file.write_all_at(&[1; 65536], 4096).unwrap();
        file.sync_data().unwrap();
        file.write_all_at(&[2; 65536], 4096).unwrap();
        let mut seen = [0; 65536];
        file.read_exact_at(&mut seen, 4096).unwrap();
        assert_eq!(seen, [2; 65536]);
        assert!(files.lose() > 0);
        file.read_exact_at(&mut seen, 4096).unwrap();
        assert!(seen.chunks(512).all(|unit| unit == [1; 512] || unit == [2; 512]));
        assert!(seen.chunks(512).any(|unit| unit == [1; 512]));
        files.all()[0].behaviour().lose_at_flush();
        assert!(file.sync_data().is_err());
        file.sync_data().unwrap();
    }

    /// This test needs root and /dev/fuse.
    #[test]
    fn a_request_that_is_not_answered_in_time_is_late() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::mount(&dir.path().join("mnt"), 1).unwrap();
        let (file, path) = (files.add("a", Medium::new(4096, 1)), files.path("a"));
        let lateness = file.behaviour().lateness();
        let (medium, start) = (file.medium(), Instant::now());
        let reader = std::thread::spawn(move || std::fs::read(path));
        while lateness.within(start, Instant::now()) < Duration::from_millis(100) {
            assert!(start.elapsed() < Duration::from_secs(60), "no request is late");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(medium);
        assert_eq!(reader.join().unwrap().unwrap(), [0; 4096]);
        assert!(lateness.largest() >= Duration::from_millis(100), "{lateness:?}");
    }
}
