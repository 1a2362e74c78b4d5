//! I/Os of a file that may hang or whose handle becomes stale.

use std::time::Instant as Clock;

use hob_engine::io::{BufferSlice, Target};
use hob_engine::units::DiskId;

use super::*;
use crate::backing::Condition;
use crate::ring::{RingConfig, WORKERS_FOR_FILES, WORKERS_PER_FILE_MAX};
use crate::token::Token;

/// Number of changes of a file: more than may occupy worker threads.
const CHANGES: u32 = 200;

/// Number of changes of each of many files.
const CHANGES_OF_EACH: u32 = 80;

#[test]
fn sixty_four_operations_of_a_file_occupy_workers_and_the_others_wait() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let options = BackingOptions::default();
    let mut file = open_file(path.to_str().unwrap(), Access::ReadWrite, &options).unwrap();
    let mut ring = Ring::new(&RingConfig::default()).unwrap();
    let now = Instant(1);
    file.attach(&mut ring, now, TokenSpace::new(1, 0));
    start_changes(&mut file, &mut ring, now, CHANGES);
    let waiting = CHANGES as usize - WORKERS_PER_FILE_MAX;
    assert_eq!((file.working.len(), file.to_work.len()), (WORKERS_PER_FILE_MAX, waiting));
    let mut done = 0;
    while done < CHANGES {
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(100))).unwrap();
        while let Some(completion) = ring.next_completion() {
            file.handle_completion(&mut ring, now, completion);
            assert!(file.working.len() <= WORKERS_PER_FILE_MAX);
        }
        while let Some((_, result)) = file.poll_done() {
            result.unwrap();
            done += 1;
        }
    }
    assert_eq!((file.working.len(), file.to_work.len()), (0, 0));
}

/// Starts `count` discards of a file.
fn start_changes(file: &mut FileBacking, ring: &mut Ring, now: Instant, count: u32) {
    for number in 0..count {
        let (id, offset) = (IoId(number), u64::from(number) * SECTOR_BYTES);
        let target = Target::Backing(DiskId(0));
        let io = Io { id, target, op: IoOp::Discard, offset, len: SECTOR_BYTES, slice: None };
        file.submit(ring, now, &io);
    }
}

/// The test starts the operations of all files before it handles the end of any operation. This
/// simulates a filesystem that hangs.
#[test]
fn many_files_together_leave_workers_for_the_other_files() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut ring = Ring::new(&RingConfig::default()).unwrap();
    let now = Instant(1);
    let open = |ring: &mut Ring, number: u16| {
        let path = dir.path().join(format!("{number}.img"));
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let options = BackingOptions::default();
        let mut file = open_file(path.to_str().unwrap(), Access::ReadWrite, &options).unwrap();
        file.attach(ring, now, TokenSpace::new(Token::CALLER, number));
        file
    };
    let mut files: Vec<_> = (0..17).map(|number| open(&mut ring, number)).collect();
    for file in &mut files {
        start_changes(file, &mut ring, now, CHANGES_OF_EACH);
        assert!((1..=WORKERS_PER_FILE_MAX).contains(&file.working.len()));
    }
    let occupied: usize = files.iter().map(|file| file.working.len()).sum();
    assert!(occupied as u64 <= WORKERS_FOR_FILES, "{occupied} workers");
    // A file that is opened later occupies workers too.
    let mut late = open(&mut ring, 17);
    start_changes(&mut late, &mut ring, now, CHANGES_OF_EACH);
    assert!(!late.working.is_empty());
    files.push(late);
    let mut done = vec![0; files.len()];
    while done.iter().any(|done| *done < CHANGES_OF_EACH) {
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(100))).unwrap();
        while let Some(completion) = ring.next_completion() {
            let file = &mut files[usize::from(completion.token.owner())];
            file.handle_completion(&mut ring, now, completion);
        }
        for (file, done) in files.iter_mut().zip(&mut done) {
            while let Some((_, result)) = file.poll_done() {
                result.unwrap();
                *done += 1;
            }
        }
    }
    // A closed file has no part of the workers any more.
    for file in &mut files {
        file.close(&mut ring);
        assert!(file.number.is_none() && file.life == Life::Closing);
    }
}

/// Starts a read of `slice` from the same offset of a file.
fn start_read(file: &mut FileBacking, ring: &mut Ring, now: Instant, number: u32, slice: BufferSlice) {
    let (target, offset) = (Target::Backing(DiskId(0)), u64::from(slice.offset));
    let io = Io {
        id: IoId(number),
        target,
        op: IoOp::Read,
        offset,
        len: u64::from(slice.len),
        slice: Some(slice),
    };
    file.submit(ring, now, &io);
}

/// The test starts reads of two files before it handles the end of any read. This simulates a file
/// that hangs. Without io_uring, each read occupies a thread.
#[test]
fn without_io_uring_reads_of_a_file_wait_and_leave_threads_for_others() {
    const READS: u32 = 200;
    let config = RingConfig { kind: RingKind::Threads, ..RingConfig::default() };
    let mut ring = Ring::new(&config).unwrap();
    let now = Instant(1);
    let buffer = ring.arena_mut().alloc(READS as usize * 4096).unwrap();
    let images = [image(), image()];
    let mut files: Vec<_> = (0..)
        .zip(&images)
        .map(|(owner, (_dir, path))| {
            let options = BackingOptions::default();
            let mut file = open_file(path.to_str().unwrap(), Access::ReadWrite, &options).unwrap();
            // As on a local filesystem or a block device, which may hang too.
            file.class = FdClass::File;
            file.attach(&mut ring, now, TokenSpace::new(Token::CALLER, owner));
            file
        })
        .collect();
    let slice = |number: u32| BufferSlice { id: buffer, offset: number * 4096, len: 4096 };
    for number in 0..READS - 1 {
        start_read(&mut files[0], &mut ring, now, number, slice(number));
    }
    start_read(&mut files[1], &mut ring, now, 0, slice(READS - 1));
    let waiting = READS as usize - 1 - config.file_threads_max;
    assert_eq!((files[0].working.len(), files[0].to_work.len()), (config.file_threads_max, waiting));
    assert_eq!((files[1].working.len(), files[1].to_work.len()), (1, 0));
    let mut ended = Vec::new();
    while ended.len() < READS as usize {
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(100))).unwrap();
        while let Some(completion) = ring.next_completion() {
            let file = &mut files[usize::from(completion.token.owner())];
            file.handle_completion(&mut ring, now, completion);
            assert!(file.working.len() <= config.file_threads_max);
        }
        while let Some((id, result)) = files[0].poll_done() {
            result.unwrap();
            ended.push(Some(id.0));
        }
        while let Some((_, result)) = files[1].poll_done() {
            result.unwrap();
            ended.push(None);
        }
    }
    ended.sort_unstable();
    assert!(ended.into_iter().eq([None].into_iter().chain((0..READS - 1).map(Some))));
}

#[test]
fn each_operation_of_an_unaligned_read_counts() {
    const READS: u32 = 40;
    let (_dir, path) = image();
    let mut file = open_file(path.to_str().unwrap(), Access::ReadWrite, &BackingOptions::default()).unwrap();
    file.class = FdClass::Foreign;
    let mut ring = Ring::new(&RingConfig::default()).unwrap();
    let now = Instant(1);
    file.attach(&mut ring, now, TokenSpace::new(1, 0));
    let buffer = ring.arena_mut().alloc(READS as usize * 16384).unwrap();
    for number in 0..READS {
        // The first and the last sector are read separately, because only parts of them are read.
        let slice = BufferSlice { id: buffer, offset: number * 16384 + 100, len: 12288 };
        start_read(&mut file, &mut ring, now, number, slice);
    }
    let mut done = 0;
    while done < READS {
        // The last read that started may exceed the limit by two operations.
        assert!(ring.in_flight() <= WORKERS_PER_FILE_MAX + 2, "{} operations", ring.in_flight());
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(100))).unwrap();
        while let Some(completion) = ring.next_completion() {
            file.handle_completion(&mut ring, now, completion);
        }
        while let Some((_, result)) = file.poll_done() {
            result.unwrap();
            done += 1;
        }
    }
}

/// A file as on a network filesystem, with a flush that the kernel answered with ESTALE.
struct StaleFile {
    file: FileBacking,
    ring: Ring,
    start: Clock,
}

impl StaleFile {
    /// Opens a file, and calls `before` before the kernel's answer.
    fn new(path: &Path, wait_max: Duration, before: impl FnOnce(&FileBacking)) -> StaleFile {
        let options = BackingOptions { wait_max, ..BackingOptions::default() };
        let mut file = open_file(path.to_str().unwrap(), Access::ReadWrite, &options).unwrap();
        file.class = FdClass::Foreign;
        let mut ring = Ring::new(&RingConfig::default()).unwrap();
        file.attach(&mut ring, Instant(1), TokenSpace::new(1, 0));
        let target = Target::Backing(DiskId(0));
        let io = Io { id: IoId(0), target, op: IoOp::Flush, offset: 0, len: 0, slice: None };
        file.submit(&mut ring, Instant(1), &io);
        before(&file);
        let mut stale = StaleFile { file, ring, start: Clock::now() };
        let mut is_first = true;
        while is_first {
            stale.turn(|completion| {
                if std::mem::take(&mut is_first) {
                    completion.result = -libc::ESTALE;
                }
            });
        }
        stale
    }

    /// Handles completions after `change`, and timeouts.
    fn turn(&mut self, mut change: impl FnMut(&mut Completion)) {
        self.ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(20))).unwrap();
        let now = Instant(self.start.elapsed().as_nanos() as u64 + 1);
        while let Some(mut completion) = self.ring.next_completion() {
            change(&mut completion);
            self.file.handle_completion(&mut self.ring, now, completion);
        }
        if self.file.poll_timeout().is_some_and(|at| at <= now) {
            self.file.handle_timeout(&mut self.ring, now);
        }
    }

    fn result(&mut self) -> Result<(), IoError> {
        loop {
            if let Some((_, result)) = self.file.poll_done() {
                return result;
            }
            assert!(self.start.elapsed() < Duration::from_secs(120), "the flush does not end");
            self.turn(|_| {});
        }
    }

    fn condition(&self) -> Condition {
        self.file.stale.monitor.condition()
    }
}

fn image() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    (dir, path)
}

#[test]
fn a_file_with_a_stale_handle_is_opened_again() {
    let (_dir, path) = image();
    // The position belongs to the open file behind the descriptor.
    let mark = |file: &FileBacking| _ = rustix::fs::seek(file.buffered(), rustix::fs::SeekFrom::Start(7));
    let mut stale = StaleFile::new(&path, Duration::from_secs(60), mark);
    assert_eq!(stale.result(), Ok(()));
    assert_eq!(rustix::fs::tell(stale.file.buffered()), Ok(0), "another open file");
    assert!(stale.file.take_loss(), "the server may have lost unflushed writes");
    assert_eq!(stale.condition(), Condition::Connected);
    let other = open_file(path.to_str().unwrap(), Access::ReadWrite, &BackingOptions::default());
    assert!(matches!(other, Err(OpenError::InUse { .. })), "it is locked");
}

#[test]
fn another_file_at_the_path_is_not_used() {
    let (dir, path) = image();
    let other = dir.path().join("other.img");
    std::fs::write(&other, vec![2; 1 << 20]).unwrap();
    let replace = |_: &FileBacking| std::fs::rename(&other, &path).unwrap();
    let mut stale = StaleFile::new(&path, Duration::from_secs(3), replace);
    assert_eq!(stale.result(), Err(IoError::Failed));
    assert!(stale.start.elapsed() >= Duration::from_secs(2), "the flush waits");
    let Condition::Reconnecting { error, .. } = stale.condition() else { panic!("it is used") };
    assert!(error.contains("another file"), "{error}");
}
