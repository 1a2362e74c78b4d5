//! A pool device on another host: a socket with an NBD server. The device has only replicas of
//! data, and its I/Os fail only when hob abandons the device.

mod common;

use std::path::PathBuf;
use std::time::{Duration, Instant as Clock};

use common::server::Server;
use hob_engine::command::Segment;
use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp, Target};
use hob_engine::units::{BufferId, DeviceId, Instant, IoId};
use hob_nbd::{Command, ExportInfo};
use hob_storage::flash::Flash;
use hob_storage::pool::recovery::recover;
use hob_storage::pool::{
    DeviceSpec, Overwrite, OwnerId, Pool, PoolError, SectorCopy, SectorReader, device_bytes_for,
};
use hob_storage::ring::{Ring, RingConfig, RingKind};
use hob_storage::token::Token;

const MIB: u64 = 1 << 20;

/// Time that the shard waits for a server that does not answer.
const WAIT: Duration = Duration::from_millis(1500);

/// Time that the shard waits for a server that answers, and time until something must happen. A
/// busy host may pause the server's threads for many seconds.
const PATIENT: Duration = Duration::from_secs(60);

struct Rig {
    pool: Pool,
    far: DeviceId,
    server: Server,
    paths: Vec<PathBuf>,
    _dir: tempfile::TempDir,
}

/// Creates a pool of a file and of the server's data.
fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let bytes = device_bytes_for(16 * MIB, MIB);
    let server = Server::start(ExportInfo::new(bytes));
    let here = dir.path().join("here");
    let spec = DeviceSpec { path: here.clone(), size_bytes: Some(bytes) };
    let mut pool = Pool::create("p", &[spec], MIB, Overwrite::Refuse).unwrap();
    let far = DeviceSpec { path: server.socket.clone(), size_bytes: None };
    let far = pool.add_device(&far, Overwrite::Refuse).unwrap();
    let paths = vec![here, server.socket.clone()];
    Rig { pool, far, server, paths, _dir: dir }
}

#[test]
fn it_takes_second_copies_only_and_is_found_again() {
    let Rig { mut pool, far, server, paths, _dir } = rig();
    let owner = OwnerId(7);
    assert_eq!(pool.devices()[1].access, "remote");
    assert_eq!(pool.free_segments(), 16, "those of the file");
    let data = pool.allocate_data(owner, 10, 0).unwrap();
    assert!(data.iter().all(|segment| segment.place.device != far && !segment.seconds_only));
    let seconds = pool.allocate_seconds(owner, 12, 6).unwrap();
    assert_eq!(seconds.len(), 10, "six stay free");
    assert!(seconds.iter().all(|segment| segment.place.device == far && segment.seconds_only));
    let here = pool.allocate_ring(owner, 1, 2, 1, &[]);
    assert!(matches!(here, Err(PoolError::TooFewDevices { .. })), "{here:?}");
    let ring = pool.allocate_ring_far(owner, 1, 2, 2, &[]).unwrap();
    assert_eq!(ring.iter().map(|copy| copy[0].device == far).collect::<Vec<_>>(), [false, true]);
    let swap = pool.allocate_swap(OwnerId(8), 1, Some(far), &[]);
    assert!(swap.is_err(), "{swap:?}");
    let before = (pool.data_of(owner), pool.rings_of(owner));
    drop(pool);
    let pool = Pool::open(&paths).unwrap();
    assert_eq!((pool.data_of(owner), pool.rings_of(owner)), before);
    // The device by itself is also a pool: the pool of a host whose own flash is lost.
    drop(pool);
    let pool = Pool::open(&paths[1..]).unwrap();
    assert_eq!(pool.data_of(owner), seconds);
    assert_eq!(pool.rings_of(owner).len(), 1);
    drop(pool);
    // The same bytes in a file are a normal device.
    let file = paths[0].with_file_name("lent");
    std::fs::write(&file, &server.script.lock().unwrap().data).unwrap();
    let pool = Pool::open(&[file]).unwrap();
    assert_eq!(pool.data_of(owner).len(), 10);
    assert!(pool.data_of(owner).iter().all(|segment| !segment.seconds_only));
}

#[test]
fn a_table_that_cannot_be_written_is_an_error_and_not_for_ever() {
    let Rig { mut pool, far, server, .. } = rig();
    server.set(|script| script.sick = true);
    let refused = pool.allocate_seconds(OwnerId(7), 2, 0).unwrap_err();
    assert!(refused.to_string().contains("cannot write its"), "{refused}");
    server.set(|script| script.sick = false);
    assert_eq!(pool.allocate_seconds(OwnerId(7), 2, 0).unwrap().len(), 2);
    // The connection is interrupted, and the next one is new.
    server.set(|script| script.answers_left = Some(0));
    let _ = pool.allocate_seconds(OwnerId(7), 1, 0);
    assert_eq!(pool.allocate_seconds(OwnerId(7), 1, 0).unwrap().len(), 1);
    // I/Os of an abandoned device fail without delay.
    server.set(|script| script.silent = true);
    pool.give_up(far).unwrap();
    let asked = || server.script.lock().unwrap().seen.len();
    let before = asked();
    assert!(pool.allocate_seconds(OwnerId(7), 1, 0).unwrap().is_empty());
    assert_eq!(asked(), before, "an abandoned device is not asked");
}

/// Recovery reads thousands of pages of a peer that does not answer: only the first read waits for
/// the timeout.
#[test]
fn silence_is_waited_for_once() {
    let Rig { mut pool, far, server, .. } = rig();
    let owner = OwnerId(7);
    pool.allocate_ring_far(owner, 1, 2, 1, &[]).unwrap();
    let unread = || recover(&pool, owner, |_, _| ()).unwrap().remains().unread.clone();
    assert_eq!(unread(), []);
    let mut reader = SectorReader::new(&pool).unwrap();
    let place = Segment { device: far, offset: 4 * MIB };
    let mut is_read = || reader.read(&[SectorCopy { place, sector: 0, sum: None }]).is_ok();
    assert!(is_read());
    // An interrupted connection is re-established at once.
    server.set(|script| script.answers_left = Some(0));
    assert!(!is_read() && is_read());
    server.set(|script| script.silent = true);
    assert!(!is_read());
    let asked = server.count(Command::Read);
    server.set(|script| script.silent = false);
    assert!((0..1000).all(|_| !is_read()), "none is asked for");
    assert_eq!(unread(), [far], "whoever recovers a cache is told that it may miss something");
    assert_eq!(server.count(Command::Read), asked);
}

/// A shard with one buffer, and the device.
struct Shard {
    ring: Ring,
    flash: Flash,
    buffer: BufferId,
    device: DeviceId,
    start: Clock,
    ended: Vec<(IoId, Result<(), IoError>, Vec<u32>)>,
    silent: Vec<DeviceId>,
}

impl Shard {
    fn new(rig: &Rig, kind: RingKind, wait: Duration) -> Shard {
        let mut ring = Ring::new(&RingConfig { kind, ..RingConfig::default() }).unwrap();
        let mut flash = Flash::new(0);
        flash.set_remote_wait(wait);
        flash.attach(&mut ring, rig.far, rig.pool.file(rig.far).unwrap());
        let buffer = ring.arena_mut().alloc(64 << 10).unwrap();
        let (ended, silent) = (Vec::new(), Vec::new());
        Shard { ring, flash, buffer, device: rig.far, start: Clock::now(), ended, silent }
    }

    fn submit(&mut self, id: u32, op: IoOp) {
        self.flash.set_now(Instant(self.start.elapsed().as_nanos() as u64));
        let slice = matches!(op, IoOp::Read | IoOp::Write(_));
        let slice = slice.then_some(BufferSlice { id: self.buffer, offset: 0, len: 8192 });
        let (offset, len) = if op == IoOp::Flush { (0, 0) } else { (4 * MIB, 8192) };
        let io = Io { id: IoId(id), target: Target::Flash(self.device), op, offset, len, slice };
        let pages = if op == IoOp::WriteJournal { vec![9; 8192] } else { Vec::new() };
        self.flash.submit(&mut self.ring, &io, &pages);
    }

    /// Runs the loop for that time, or until `count` I/Os have ended.
    fn run(&mut self, limit: Duration, count: usize) {
        let end = Clock::now() + limit;
        while Clock::now() < end && self.ended.len() < count {
            let now = Instant(self.start.elapsed().as_nanos() as u64);
            self.flash.set_now(now);
            while let Some(completion) = self.ring.next_completion() {
                match completion.token.kind() {
                    Token::FLASH_REMOTE => self.flash.handle_remote_completion(&mut self.ring, completion),
                    _ => {
                        let done = self.flash.handle_completion(&mut self.ring, &completion);
                        let done = done.expect("another device has no earlier flushes");
                        self.ended.push((done.io, done.result, done.sums.to_vec()));
                    }
                }
            }
            if self.flash.poll_timeout().is_some_and(|at| at <= now) {
                self.flash.handle_timeout(&mut self.ring);
            }
            while let Some(done) = self.flash.poll_remote(&mut self.ring) {
                self.ended.push((done.io, done.result, done.sums.to_vec()));
            }
            self.silent.extend(std::iter::from_fn(|| self.flash.poll_silent()));
            self.ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(5))).unwrap();
        }
    }

    /// Runs the loop until the shard is notified that the server does not answer.
    #[track_caller]
    fn run_until_silent(&mut self) {
        let end = Clock::now() + PATIENT;
        while self.silent.is_empty() {
            assert!(Clock::now() < end, "the shard is not notified");
            self.run(Duration::from_millis(50), usize::MAX);
        }
    }

    #[track_caller]
    fn all_end(&mut self, count: usize) {
        self.run(PATIENT, count);
        assert_eq!(self.ended.len(), count, "{:?}", self.ended);
    }
}

const WRITE: IoOp = IoOp::Write(Durability::Volatile);

#[test]
fn transfers_bring_their_checksums_and_breaks_cost_nothing() {
    for kind in [RingKind::IoUring, RingKind::Threads] {
        let rig = rig();
        let mut shard = Shard::new(&rig, kind, PATIENT);
        shard.ring.arena_mut().bytes_mut(shard.buffer).fill(5);
        let sum = crc32c::crc32c(&[5; 4096]);
        shard.submit(1, WRITE);
        shard.all_end(1);
        assert_eq!(shard.ended[0], (IoId(1), Ok(()), vec![sum; 2]));
        shard.submit(2, IoOp::Flush);
        shard.all_end(2);
        shard.ring.arena_mut().bytes_mut(shard.buffer).fill(0);
        shard.submit(3, IoOp::Read);
        shard.all_end(3);
        assert_eq!(shard.ended[2], (IoId(3), Ok(()), vec![sum; 2]));
        // A connection fails after an acknowledged, unflushed write. The next flush is valid,
        // because the server has not restarted.
        rig.server.set(|script| script.answers_left = Some(1));
        shard.submit(4, WRITE);
        shard.all_end(4);
        shard.submit(5, IoOp::Flush);
        shard.submit(6, IoOp::WriteJournal);
        shard.all_end(6);
        assert!(shard.ended.iter().all(|(_, result, _)| result.is_ok()), "{:?}", shard.ended);
        assert!(shard.silent.is_empty());
        let written = rig.server.script.lock().unwrap().data[4 << 20..][..8192].to_vec();
        assert!(written == [9; 8192], "the journal's pages came last");
        let counts = shard.flash.counts().next().unwrap().1;
        assert_eq!((counts.ios, counts.errors, counts.in_flight), (6, 0, 0));
    }
}

/// I/Os that the server does not answer neither complete nor fail. The shard is notified once, and
/// they fail when the device is abandoned.
#[test]
fn unanswered_ios_wait_until_the_device_is_abandoned() {
    let rig = rig();
    let mut shard = Shard::new(&rig, RingKind::IoUring, WAIT);
    rig.server.set(|script| (script.silent, script.refuse) = (true, true));
    (1..4).for_each(|id| shard.submit(id, WRITE));
    shard.submit(4, IoOp::WriteJournal);
    shard.submit(5, IoOp::Flush);
    shard.run(Duration::from_millis(200), 1);
    let is_early = shard.silent.is_empty() || shard.start.elapsed() >= WAIT;
    assert!(is_early && shard.ended.is_empty(), "not yet");
    shard.run_until_silent();
    shard.run(WAIT, 1);
    assert_eq!((shard.silent.as_slice(), shard.ended.len()), (&[rig.far][..], 0), "said once, and held");
    shard.flash.give_up(&mut shard.ring, rig.far);
    shard.all_end(5);
    assert!(shard.ended.iter().all(|(_, result, _)| result.is_err()), "{:?}", shard.ended);
    shard.submit(6, WRITE);
    shard.all_end(6);
    assert!(shard.ended[5].1.is_err());
    shard.flash.detach(&mut shard.ring, rig.far);
    shard.submit(7, WRITE);
    shard.all_end(7);
    assert!(shard.ended[6].1.is_err());
    assert_eq!(shard.silent.len(), 1);
}

/// If the server returns an error for an I/O, the I/O waits like an I/O without a reply.
#[test]
fn an_error_is_held_too() {
    let rig = rig();
    let mut shard = Shard::new(&rig, RingKind::Threads, WAIT);
    rig.server.set(|script| script.sick = true);
    shard.submit(1, WRITE);
    shard.run_until_silent();
    shard.run(WAIT, 1);
    assert_eq!((shard.silent.as_slice(), shard.ended.len()), (&[rig.far][..], 0));
    rig.server.set(|script| script.sick = false);
    // Other I/Os may continue meanwhile; failed I/Os have failed.
    shard.submit(2, WRITE);
    shard.all_end(1);
    assert_eq!((shard.ended[0].0, shard.ended[0].1), (IoId(2), Ok(())));
    shard.flash.give_up(&mut shard.ring, rig.far);
    shard.all_end(2);
    assert_eq!((shard.ended[1].0, shard.ended[1].1), (IoId(1), Err(IoError::Failed)));
}
