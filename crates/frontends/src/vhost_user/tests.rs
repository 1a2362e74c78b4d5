//! Tests a device directly: descriptors in, requests out, replies in, used elements out. Includes
//! hostile drivers.

mod cost;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hob_engine::io::{BufferSlice, Durability, Zeroing};
use hob_engine::outcome::Outcome;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::block::ID_BYTES;
use super::inflight::Inflight;
use super::inflight::QueueInflight;
use super::queue::Layout;
use super::*;
use crate::payload::PlainBuffers;

/// The guest has two memory regions with a hole between them. The second region starts at `SECOND`.
const MIB: u64 = 1 << 20;
const SECOND: u64 = 4 * MIB;
const QUEUE: u16 = 8;

/// Addresses of the rings and of the parts of requests.
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x5000;
const DATA: u64 = 0x1_0000;
const TABLE: u64 = 0x6000;

const WRITE: u16 = 2;
const NEXT: u16 = 1;
const INDIRECT: u16 = 4;

fn info() -> Info {
    Info { size_bytes: MIB, read_only: false, block_bytes: 512, can_discard: true, name: "vm".to_owned() }
}

struct Rig {
    device: Device,
    payload: PlainBuffers,
    map: Arc<GuestMap>,
    available: u16,
}

impl Rig {
    fn new() -> Rig {
        Rig::with(info().features(), None)
    }

    fn with(features: Features, inflight: Option<QueueInflight>) -> Rig {
        let memory = [(GuestAddress(0), MIB as usize), (GuestAddress(SECOND), MIB as usize)];
        let map = Arc::new(GuestMap::from_memory(GuestMemoryMmap::from_ranges(&memory).unwrap()));
        let mut rig = Rig {
            device: Device::new(info(), DiskId(3), 7),
            payload: PlainBuffers::default(),
            map: Arc::clone(&map),
            available: 0,
        };
        let layout = Layout { size: QUEUE, descriptors: DESCRIPTORS, available: AVAILABLE, used: USED };
        rig.device.start(Start { inflight, ..Start::new(0, map, layout, 0, features) }).unwrap();
        rig
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        assert!(self.map.write(at, bytes));
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(self.map.read(at, &mut bytes));
        bytes
    }

    fn descriptor(&self, table: u64, index: u16, parts: (u64, u32, u16, u16)) {
        let (address, len, flags, next) = parts;
        let at = table + u64::from(index) * 16;
        self.put(at, &address.to_le_bytes());
        self.put(at + 8, &len.to_le_bytes());
        self.put(at + 12, &[flags.to_le_bytes(), next.to_le_bytes()].concat());
    }

    /// Writes consecutive descriptors, starting with `first`.
    fn chain(&self, table: u64, first: u16, parts: &[(u64, u32, u16)]) {
        for (step, (address, len, flags)) in parts.iter().enumerate() {
            let index = first + step as u16;
            let more = if step + 1 < parts.len() { NEXT } else { 0 };
            self.descriptor(table, index, (*address, *len, flags | more, index + 1));
        }
    }

    fn header(&self, kind: u32, sector: u64) {
        self.put(HEADER, &kind.to_le_bytes());
        self.put(HEADER + 8, &sector.to_le_bytes());
        self.put(STATUS, &[0xEE]);
    }

    fn offer(&mut self, head: u16) {
        self.put(AVAILABLE + 4 + 2 * u64::from(self.available % QUEUE), &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.put(AVAILABLE + 2, &self.available.to_le_bytes());
    }

    fn take(&mut self) -> Result<u32, Broken> {
        self.device.take(0, &mut Budget::default(), &mut self.payload)
    }

    /// Replies as the shard loop does, and drops the engine's reference to the buffer.
    fn answer(&mut self, request: &Request, result: Result<(), IoError>) {
        let reply = Reply { id: request.id, disk: request.disk, result, outcome: Outcome::Hit };
        self.device.handle_reply(&reply, &mut self.payload);
        request.buffer.into_iter().for_each(|id| self.payload.release(id));
    }

    /// Returns the used index, and head and length of the last element.
    fn used(&self) -> (u16, u32, u32) {
        let index = u16::from_le_bytes(self.get(USED + 2));
        let at = USED + 4 + 8 * u64::from(index.wrapping_sub(1) % QUEUE);
        (index, u32::from_le_bytes(self.get(at)), u32::from_le_bytes(self.get(at + 4)))
    }

    fn status(&self) -> u8 {
        self.get::<1>(STATUS)[0]
    }

    /// Returns the number of chains that were taken and not answered.
    fn taken(&self) -> u32 {
        self.device.queues[0].as_ref().unwrap().taken
    }
}

#[test]
fn a_read_is_scattered_over_the_guests_pages_and_regions() {
    let mut rig = Rig::new();
    rig.header(0, 8);
    // The last page of the second region; part of the first.
    let pages = [(DATA + 100, 1000), (SECOND + MIB - 4096, 4096), (DATA + 0x8000, 3096)];
    let parts: Vec<_> = pages.iter().map(|(at, len)| (*at, *len, WRITE)).collect();
    rig.chain(DESCRIPTORS, 2, &[&[(HEADER, 16, 0)], &parts[..], &[(STATUS, 1, WRITE)]].concat());
    rig.offer(2);
    assert_eq!(rig.take(), Ok(1));
    let request = rig.device.poll_request().expect("a request");
    assert_eq!((request.op, request.offset, request.len), (Op::Read, 4096, 8192));
    let id = request.buffer.expect("a buffer");
    let data: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
    rig.payload.bytes_mut(BufferSlice { id, offset: 0, len: 8192 }).copy_from_slice(&data);
    rig.answer(&request, Ok(()));
    assert_eq!((rig.used(), rig.status()), ((1, 2, 8193), 0));
    let mut seen = Vec::new();
    for (at, len) in pages {
        let mut bytes = vec![0; len as usize];
        assert!(rig.map.read(at, &mut bytes));
        seen.extend(bytes);
    }
    assert!(seen == data);
    assert!(rig.payload.buffers.is_empty() && rig.device.held_bytes() == 0);
    assert_eq!(rig.device.poll_signal(), Some(0));
    assert_eq!(rig.device.poll_signal(), None);
}

impl Rig {
    /// Offers a read of `len` bytes at a sector, in pages from DATA on.
    fn read(&mut self, head: u16, sector: u64, len: u32) -> Request {
        self.header(0, sector);
        self.chain(DESCRIPTORS, head, &[(HEADER, 16, 0), (DATA, len, WRITE), (STATUS, 1, WRITE)]);
        self.offer(head);
        assert_eq!(self.take(), Ok(1));
        self.device.poll_request().expect("a request")
    }

    /// Declines a read as the shard loop does for the engine.
    fn decline(&mut self, request: &Request) {
        self.device.handle_declined(request.id, &mut self.payload);
        self.payload.release(request.buffer.expect("a buffer"));
    }
}

#[test]
fn a_disk_that_has_grown_is_asked_for_more() {
    let mut rig = Rig::new();
    rig.device.grow(2 * MIB);
    let request = rig.read(0, MIB / 512, 4096);
    assert_eq!((request.offset, request.len), (MIB, 4096), "behind the end of before");
    let mut info = info();
    assert_eq!(info.config(0, 8), Some((MIB / 512).to_le_bytes().to_vec()));
    info.size_bytes = 2 * MIB;
    assert_eq!(info.config(0, 8), Some((2 * MIB / 512).to_le_bytes().to_vec()));
}

#[test]
fn a_hit_is_read_into_the_guests_memory_and_not_copied() {
    let mut rig = Rig::new();
    rig.payload.adopts = true;
    let request = rig.read(0, 8, 8192);
    assert_eq!((request.memory, rig.device.held_bytes()), (PayloadMemory::Guest, 0));
    assert_eq!(rig.device.begun_by(&request), Some((Op::Read, 4096, 8192)));
    rig.put(DATA, &[5; 8192]);
    rig.answer(&request, Ok(()));
    assert_eq!((rig.used(), rig.status(), rig.get(DATA)), ((1, 0, 8193), 0, [5; 512]));
    assert!(rig.payload.buffers.is_empty() && rig.device.is_idle());
    // Partial sectors, and requests other than reads, use the daemon's buffers as before.
    let request = rig.read(0, 9, 4096);
    assert_eq!(request.memory, PayloadMemory::Daemon);
    rig.answer(&request, Ok(()));
    assert_eq!(rig.get(DATA), [0xEE; 512]);
}

#[test]
fn a_read_that_is_declined_gets_a_buffer_as_soon_as_there_is_room() {
    let mut rig = Rig::new();
    rig.payload.adopts = true;
    let request = rig.read(3, 0, 4096);
    rig.decline(&request);
    rig.payload.full = true;
    rig.device.ask_again(&mut rig.payload);
    assert_eq!((rig.device.poll_request(), rig.used().0, rig.taken()), (None, 0, 1));
    rig.payload.full = false;
    rig.device.ask_again(&mut rig.payload);
    let again = rig.device.poll_request().expect("a request");
    assert_eq!((again.memory, again.offset, again.len), (PayloadMemory::DaemonAfterGuest, 0, 4096));
    assert_eq!((rig.device.begun_by(&again), rig.device.held_bytes()), (None, 4096));
    rig.answer(&again, Ok(()));
    assert_eq!((rig.used(), rig.status(), rig.get(DATA)), ((1, 3, 4097), 0, [0xEE; 512]));
    assert!(rig.payload.buffers.is_empty() && rig.device.is_idle() && rig.device.held_bytes() == 0);
}

#[test]
fn a_queue_whose_chain_waits_for_room_is_not_quiet() {
    let mut rig = Rig::new();
    assert!(rig.device.is_quiet(0) && rig.device.is_quiet(1), "nothing was offered");
    rig.payload.full = true;
    rig.header(0, 0);
    rig.chain(DESCRIPTORS, 3, &[(HEADER, 16, 0), (DATA, 4096, WRITE), (STATUS, 1, WRITE)]);
    rig.offer(3);
    assert_eq!(rig.take(), Ok(0));
    assert!(!rig.device.has_work(0) && !rig.device.is_quiet(0), "its driver does not tell of it again");
    rig.payload.full = false;
    rig.device.room_again(0, &mut rig.payload);
    assert_eq!(rig.take(), Ok(1));
    assert!(!rig.device.is_quiet(0), "one is in flight");
    let request = rig.device.poll_request().expect("a request");
    rig.answer(&request, Ok(()));
    assert!(rig.device.is_quiet(0));
}

#[test]
fn requests_that_wait_for_a_device_are_taken_four_at_a_time() {
    let mut rig = Rig::new();
    rig.header(0, 0);
    rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 4096, WRITE), (STATUS, 1, WRITE)]);
    let take = |rig: &mut Rig, is_device_bound| {
        rig.device.take(0, &mut Budget::of_turn(is_device_bound), &mut rig.payload).unwrap()
    };
    (0..8).for_each(|_| rig.offer(0));
    assert_eq!([true, true, true].map(|is_device_bound| take(&mut rig, is_device_bound)), [4, 4, 0]);
    (0..8).for_each(|_| rig.offer(0));
    assert_eq!(take(&mut rig, false), 8, "memory serves them all at once");
}

#[test]
fn a_driver_that_offers_without_end_is_left_when_the_budget_is_used_up() {
    let mut rig = Rig::new();
    // A chain without a header is answered immediately.
    rig.chain(DESCRIPTORS, 0, &[(STATUS, 1, WRITE)]);
    let (map, over) = (Arc::clone(&rig.map), Arc::new(AtomicBool::new(false)));
    let driver = std::thread::spawn({
        let over = Arc::clone(&over);
        move || {
            let mut index = [0; 2];
            while !over.load(Ordering::Relaxed) {
                assert!(map.read(USED + 2, &mut index));
                let more = u16::from_le_bytes(index).wrapping_add(QUEUE);
                assert!(map.write(AVAILABLE + 2, &more.to_le_bytes()));
            }
        }
    });
    let taken: Vec<_> = (0..10_000).map(|_| rig.take()).collect();
    over.store(true, Ordering::Relaxed);
    driver.join().unwrap();
    let most = taken.into_iter().map(|taken| taken.expect("no queue is broken")).max();
    assert!(most <= Some(BUDGET), "{most:?}");
}

#[test]
fn declined_reads_are_dropped_with_their_disk() {
    for declined_first in [true, false] {
        let (memory, _file, _) = Inflight::create(1, QUEUE).unwrap();
        let mut rig = Rig::with(info().features(), memory.queue(0, QUEUE));
        rig.payload.adopts = true;
        let request = rig.read(3, 0, 4096);
        if declined_first {
            rig.decline(&request);
        }
        rig.device.abandon(&mut rig.payload);
        if !declined_first {
            rig.decline(&request);
        }
        rig.device.ask_again(&mut rig.payload);
        assert_eq!((rig.device.poll_request(), rig.used().0, rig.taken()), (None, 0, 0));
        assert!(rig.payload.buffers.is_empty() && rig.device.is_idle());
    }
}

#[test]
fn a_write_is_copied_before_the_guest_can_change_its_mind() {
    let mut rig = Rig::new();
    rig.header(1, 1);
    rig.put(DATA, &[7; 512]);
    // The header in two parts, and the data in the same descriptor as the header's end, which the
    // specification allows.
    rig.put(DATA + 0x1000, &rig.get::<16>(HEADER));
    rig.put(DATA + 0x1010, &[7; 512]);
    rig.chain(DESCRIPTORS, 0, &[(DATA + 0x1000, 10, 0), (DATA + 0x100A, 518, 0), (STATUS, 1, WRITE)]);
    rig.offer(0);
    assert_eq!(rig.take(), Ok(1));
    rig.put(DATA + 0x1010, &[9; 512]);
    let request = rig.device.poll_request().expect("a request");
    assert_eq!((request.op, request.offset, request.len), (Op::Write(Durability::Volatile), 512, 512));
    let id = request.buffer.expect("a buffer");
    assert_eq!(rig.payload.bytes(BufferSlice { id, offset: 512, len: 512 }), [7; 512]);
    assert_eq!(rig.device.begun_by(&request), Some((request.op, 512, 512)));
    rig.answer(&request, Ok(()));
    assert_eq!((rig.used(), rig.status()), ((1, 0, 1), 0));
    assert!(rig.payload.buffers.is_empty());
}

#[test]
fn indirect_tables_zeroes_discards_flushes_and_names() {
    let mut rig = Rig::new();
    let ranges = (DATA, 16, 0);
    rig.put(DATA, &[8u64.to_le_bytes().to_vec(), vec![8, 0, 0, 0, 1, 0, 0, 0]].concat());
    for (kind, op) in [
        (13, Op::WriteZeroes(Durability::Volatile, Zeroing::MayUnmap)),
        (11, Op::Discard(Durability::Volatile)),
        (4, Op::Flush),
    ] {
        if kind == 11 {
            rig.put(DATA + 12, &[0; 4]);
        }
        rig.header(kind, 0);
        let (header, status) = ((HEADER, 16, 0), (STATUS, 1, WRITE));
        let all = if kind == 4 { vec![header, status] } else { vec![header, ranges, status] };
        rig.chain(TABLE, 0, &all);
        rig.descriptor(DESCRIPTORS, 5, (TABLE, all.len() as u32 * 16, INDIRECT, 0));
        rig.offer(5);
        assert_eq!(rig.take(), Ok(1));
        let request = rig.device.poll_request().expect("a request");
        assert_eq!(request.op, op);
        rig.answer(&request, Err(IoError::Unsupported));
        assert_eq!(rig.status(), 2);
    }
    rig.header(8, 0);
    rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, ID_BYTES as u32, WRITE), (STATUS, 1, WRITE)]);
    rig.offer(0);
    assert_eq!(rig.take(), Ok(1));
    assert!(rig.device.poll_request().is_none());
    assert_eq!((rig.get::<3>(DATA), rig.status(), rig.used()), (*b"vm\0", 0, (4, 0, 21)));
}

#[test]
fn a_long_discard_goes_in_pieces_and_is_answered_once() {
    let mut rig = Rig::new();
    rig.device.info.size_bytes = 1 << 40;
    rig.header(11, 0);
    rig.put(DATA, &[8u64.to_le_bytes().to_vec(), (1u32 << 20).to_le_bytes().to_vec(), vec![0; 4]].concat());
    rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 16, 0), (STATUS, 1, WRITE)]);
    rig.offer(0);
    rig.take().unwrap();
    let mut at = 4096;
    while let Some(request) = rig.device.poll_request() {
        assert_eq!(request.offset, at);
        assert_eq!(rig.device.begun_by(&request).is_some(), at == 4096);
        at += request.len;
        rig.answer(&request, Ok(()));
    }
    assert_eq!((at, rig.used()), (4096 + (1 << 29), (1, 0, 1)));
}

#[test]
fn without_room_for_a_buffer_the_chain_stays_where_it_is() {
    let mut rig = Rig::new();
    rig.payload.full = true;
    rig.header(0, 0);
    rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)]);
    rig.offer(0);
    assert!(rig.device.has_work(0));
    assert_eq!(rig.take(), Ok(0));
    assert!(!rig.device.has_work(0) && rig.device.poll_request().is_none());
    rig.payload.full = false;
    rig.device.room_again(0, &mut rig.payload);
    assert!(rig.device.has_work(0));
    assert_eq!(rig.take(), Ok(1));
    assert!(rig.device.poll_request().is_some());
}

#[test]
fn drivers_are_notified_when_they_request_it() {
    for event_idx in [false, true] {
        let features = info().features().0 & !if event_idx { 0 } else { Features::EVENT_IDX.0 };
        let mut rig = Rig::with(Features(features), None);
        rig.header(8, 0);
        rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 20, WRITE), (STATUS, 1, WRITE)]);
        let ask = |rig: &mut Rig| {
            rig.offer(0);
            rig.take().unwrap();
            rig.device.poll_signal().is_some()
        };
        // Event indexes that the driver writes, after its ring or in front of it.
        let event_at = AVAILABLE + 4 + 2 * u64::from(QUEUE);
        let not_yet = if event_idx { (event_at, [2, 0]) } else { (AVAILABLE, [1, 0]) };
        rig.put(not_yet.0, &not_yet.1);
        assert_eq!((ask(&mut rig), ask(&mut rig)), (false, false), "{event_idx}");
        if !event_idx {
            rig.put(AVAILABLE, &[0, 0]);
        }
        assert!(ask(&mut rig), "{event_idx}");
        assert_eq!(ask(&mut rig), !event_idx);
        // The device enables and disables kicks: with an event index, or with a flag.
        rig.device.set_wants_kicks(0, true);
        let at = if event_idx { USED + 4 + 8 * u64::from(QUEUE) } else { USED };
        assert_eq!(rig.get::<2>(at), if event_idx { [4, 0] } else { [0, 0] });
        rig.device.set_wants_kicks(0, false);
        assert_eq!(rig.get::<2>(at), if event_idx { [3, 0] } else { [1, 0] }, "passed already");
    }
}

/// Name of a case, the chain, and the expected result.
type Case = (&'static str, fn(&Rig), Result<(), Fault>);

/// `Ok` marks faults that the status byte can report to the driver.
const MALFORMED: &[Case] = &[
    (
        "a loop of two",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (HEADER, 16, NEXT, 1));
            rig.descriptor(DESCRIPTORS, 1, (DATA, 512, NEXT | WRITE, 0));
        },
        Err(Fault::Loop),
    ),
    ("a loop of one", |rig| rig.descriptor(DESCRIPTORS, 0, (HEADER, 16, NEXT, 0)), Err(Fault::Loop)),
    (
        "a descriptor outside the table",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (HEADER, 16, NEXT, QUEUE));
        },
        Err(Fault::Next),
    ),
    ("no status", |rig| rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 512, 0)]), Err(Fault::NoStatus)),
    ("nothing", |rig| rig.descriptor(DESCRIPTORS, 0, (0, 0, 0, 0)), Err(Fault::NoStatus)),
    (
        "a status in the hole",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (2 * MIB, 1, WRITE)]);
        },
        Err(Fault::Memory),
    ),
    (
        "a status at the end of all addresses",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (u64::MAX, u32::MAX, WRITE)]);
        },
        Err(Fault::Memory),
    ),
    (
        "an indirect table in an indirect table",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (TABLE, 16, INDIRECT, 0));
            rig.descriptor(TABLE, 0, (TABLE, 16, INDIRECT, 0));
        },
        Err(Fault::Table),
    ),
    (
        "an indirect table behind something else",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (HEADER, 16, NEXT, 1));
            rig.descriptor(DESCRIPTORS, 1, (TABLE, 16, INDIRECT, 0));
        },
        Err(Fault::Table),
    ),
    (
        "an indirect table that goes on",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (TABLE, 16, INDIRECT | NEXT, 1));
        },
        Err(Fault::Table),
    ),
    (
        "an empty indirect table",
        |rig| rig.descriptor(DESCRIPTORS, 0, (TABLE, 0, INDIRECT, 0)),
        Err(Fault::Table),
    ),
    (
        "an indirect table of a part",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (TABLE, 24, INDIRECT, 0));
        },
        Err(Fault::Table),
    ),
    (
        "a huge indirect table",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (TABLE, !15, INDIRECT, 0));
        },
        Err(Fault::Table),
    ),
    (
        "an indirect table in the hole",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (MIB - 8, 16, INDIRECT, 0));
        },
        Err(Fault::Memory),
    ),
    (
        "an indirect table at the end of all addresses",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (u64::MAX - 7, 32, INDIRECT, 0));
        },
        Err(Fault::Memory),
    ),
    (
        "a loop in an indirect table",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (TABLE, 32, INDIRECT, 0));
            rig.descriptor(TABLE, 0, (HEADER, 16, NEXT, 1));
            rig.descriptor(TABLE, 1, (DATA, 512, NEXT, 0));
        },
        Err(Fault::Loop),
    ),
    (
        "an indirect descriptor outside its table",
        |rig| {
            rig.descriptor(DESCRIPTORS, 0, (TABLE, 32, INDIRECT, 0));
            rig.descriptor(TABLE, 0, (HEADER, 16, NEXT, 2));
        },
        Err(Fault::Next),
    ),
    (
        "data in the hole",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (MIB - 8, 512, WRITE), (STATUS, 1, WRITE)]);
        },
        Ok(()),
    ),
    (
        "a header in the hole",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(MIB - 8, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)]);
        },
        Ok(()),
    ),
    (
        "a short header",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(HEADER, 15, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)]);
        },
        Ok(()),
    ),
    ("no header", |rig| rig.chain(DESCRIPTORS, 0, &[(DATA, 512, WRITE), (STATUS, 1, WRITE)]), Ok(())),
    (
        "a header behind the data",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(DATA, 512, WRITE), (HEADER, 16, 0), (STATUS, 1, WRITE)]);
        },
        Ok(()),
    ),
    (
        "more than a request may have",
        |rig| {
            let all = [(HEADER, 16, 0), (0, MIB as u32, WRITE)];
            rig.chain(TABLE, 0, &[&all[..1], &[all[1]; 60], &[(STATUS, 1, WRITE)]].concat());
            rig.descriptor(DESCRIPTORS, 0, (TABLE, 62 * 16, INDIRECT, 0));
        },
        Ok(()),
    ),
    (
        "a huge length",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, u32::MAX, WRITE), (STATUS, 1, WRITE)]);
        },
        Ok(()),
    ),
    (
        "half a sector",
        |rig| {
            rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 256, WRITE), (STATUS, 1, WRITE)]);
        },
        Ok(()),
    ),
];

#[test]
fn malformed_chains_affect_no_other_client() {
    for (what, write, expected) in MALFORMED {
        let mut rig = Rig::new();
        rig.header(0, 0);
        write(&rig);
        rig.offer(0);
        match expected {
            Ok(()) => {
                assert_eq!(rig.take(), Ok(1), "{what}");
                assert_eq!((rig.status(), rig.used()), (1, (1, 0, 1)), "{what}");
                // The queue continues.
                rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)]);
                rig.offer(0);
                assert_eq!(rig.take(), Ok(1), "{what}");
                assert!(rig.device.poll_request().is_some(), "{what}");
            }
            Err(fault) => {
                assert_eq!(rig.take(), Err(Broken::Chain(*fault)), "{what}");
                assert_eq!((rig.take(), rig.used().0), (Ok(0), 0), "{what}");
                rig.device.stop(0);
                assert_eq!(rig.device.poll_stopped(0), Some(0), "{what}");
            }
        }
        assert!(rig.device.poll_request().is_none());
    }
}

#[test]
fn an_index_that_runs_ahead_and_a_head_outside_the_table_break_the_queue() {
    let mut rig = Rig::new();
    rig.put(AVAILABLE + 2, &(QUEUE + 1).to_le_bytes());
    assert_eq!(rig.take(), Err(Broken::Runaway(QUEUE + 1)));
    let mut rig = Rig::new();
    rig.offer(QUEUE);
    assert_eq!(rig.take(), Err(Broken::Head(QUEUE)));
}

#[test]
fn queues_outside_memory_or_of_impossible_sizes_are_refused() {
    let rig = Rig::new();
    let good = Layout { size: QUEUE, descriptors: DESCRIPTORS, available: AVAILABLE, used: USED };
    for (layout, expected) in [
        (Layout { size: 0, ..good }, Broken::Size(0)),
        (Layout { size: 12, ..good }, Broken::Size(12)),
        (Layout { size: 2048, ..good }, Broken::Size(2048)),
        (Layout { descriptors: DESCRIPTORS + 8, ..good }, Broken::Rings),
        (Layout { available: AVAILABLE + 1, ..good }, Broken::Rings),
        (Layout { used: MIB - 8, ..good }, Broken::Rings),
        (Layout { used: 2 * MIB, ..good }, Broken::Rings),
        (Layout { descriptors: u64::MAX - 15, ..good }, Broken::Rings),
    ] {
        let mut device = Device::new(info(), DiskId(0), 1);
        let start = Start::new(0, Arc::clone(&rig.map), layout, 7, info().features());
        assert_eq!(device.start(start), Err(expected));
        assert_eq!(device.poll_stopped(0), Some(7), "{expected:?}: the index at which to start again");
    }
}

#[test]
fn a_device_for_backups_promotes_nothing() {
    for promote in [Promote::Usual, Promote::Never] {
        let mut rig = Rig::new();
        rig.device = rig.device.promoting(promote);
        rig.header(0, 8);
        rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 4096, WRITE), (STATUS, 1, WRITE)]);
        rig.offer(0);
        rig.take().unwrap();
        let request = rig.device.poll_request().expect("a request");
        assert_eq!((request.promote, request.passes_by()), (promote, promote == Promote::Never));
        rig.answer(&request, Ok(()));
    }
}

#[test]
fn a_queue_stops_when_everything_in_it_is_answered() {
    let mut rig = Rig::new();
    rig.header(4, 0);
    rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (STATUS, 1, WRITE)]);
    rig.offer(0);
    rig.take().unwrap();
    rig.offer(0);
    rig.device.stop(0);
    assert_eq!((rig.take(), rig.device.poll_stopped(0)), (Ok(0), None));
    let request = rig.device.poll_request().expect("the first one");
    rig.answer(&request, Ok(()));
    assert_eq!(rig.device.poll_stopped(0), Some(1));
    assert_eq!(rig.device.poll_stopped(0), Some(0), "it is forgotten");
}

#[test]
fn the_next_daemon_executes_requests_left_in_flight() {
    let (memory, _file, _) = Inflight::create(1, QUEUE).unwrap();
    let mut first = Rig::with(info().features(), memory.queue(0, QUEUE));
    first.header(1, 0);
    for head in [0, 3] {
        first.chain(DESCRIPTORS, head, &[(HEADER, 16, 0), (DATA, 512, 0), (STATUS, 1, WRITE)]);
        first.offer(head);
    }
    first.chain(DESCRIPTORS, 6, &[(HEADER, 16, 0), (STATUS, 1, WRITE)]);
    assert_eq!(first.take(), Ok(2));
    let (one, two) = (first.device.poll_request().unwrap(), first.device.poll_request().unwrap());
    first.answer(&one, Ok(()));
    // The disk is removed from this daemon: the guest gets no answer, because another daemon will
    // answer.
    first.answer(&two, Err(IoError::ShuttingDown));
    assert_eq!((first.used(), first.status()), ((1, 0, 1), 0));
    first.device.stop(0);
    assert!(first.device.poll_stopped(0).is_some());

    let mut next = Device::new(info(), DiskId(3), 8);
    let layout = Layout { size: QUEUE, descriptors: DESCRIPTORS, available: AVAILABLE, used: USED };
    let start = Start::new(0, Arc::clone(&first.map), layout, 1, info().features());
    next.start(Start { inflight: memory.queue(0, QUEUE), ..start }).unwrap();
    first.device = next;
    first.put(STATUS, &[0xEE]);
    assert_eq!(first.take(), Ok(1), "the one in flight, and none twice");
    let again = first.device.poll_request().unwrap();
    first.answer(&again, Ok(()));
    assert_eq!((first.used(), first.status()), ((2, 3, 1), 0));
    first.offer(0);
    assert_eq!(first.take(), Ok(1), "and then what is new");
}

#[test]
fn requests_that_the_engine_has_not_seen_are_given_up_at_the_end() {
    let mut rig = Rig::new();
    rig.header(0, 0);
    rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)]);
    rig.offer(0);
    rig.take().unwrap();
    rig.device.abandon(&mut rig.payload);
    assert!(rig.device.is_idle() && rig.device.held_bytes() == 0 && rig.payload.buffers.is_empty());
    assert_eq!((rig.device.poll_stopped(0), rig.used().0), (Some(1), 0));
}

/// Returns small pseudo-random numbers with frequent repetitions, without a crate.
fn dice(state: &mut u64, sides: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % sides
}

#[test]
fn whatever_a_driver_writes_only_sensible_requests_come_out() {
    let (mut requests, mut broken) = (0, 0);
    for seed in 0..4000 {
        let mut state = seed;
        let mut rig = Rig::new();
        let places =
            [DATA, HEADER, STATUS, TABLE, SECOND, MIB - 600, 2 * MIB, SECOND + MIB - 512, u64::MAX - 511];
        for table in [DESCRIPTORS, TABLE] {
            for index in 0..QUEUE {
                // Usually what a driver would send: a header, data, a status, and the same again.
                let (address, len, flags) =
                    [(HEADER, 16, NEXT), (DATA, 512, NEXT | WRITE), (STATUS, 1, WRITE)]
                        [usize::from(index % 3)];
                let odd = |state: &mut u64| dice(state, 12) == 0;
                let address = if odd(&mut state) { places[dice(&mut state, 9) as usize] } else { address };
                let lens = [0, 1, 15, 16, 512, 1024, 1 << 19, u32::MAX];
                let len = if odd(&mut state) { lens[dice(&mut state, 8) as usize] } else { len };
                let indirect = table == DESCRIPTORS && odd(&mut state);
                let flags = if odd(&mut state) { dice(&mut state, 8) as u16 } else { flags };
                let next = if odd(&mut state) { dice(&mut state, 10) as u16 } else { index + 1 };
                match indirect {
                    true => {
                        rig.descriptor(table, index, (TABLE, 16 * dice(&mut state, 9) as u32, INDIRECT, 0))
                    }
                    false => rig.descriptor(table, index, (address, len, flags, next)),
                }
            }
        }
        rig.header([0, 1, 4, 8, 11, 13, 99][dice(&mut state, 7) as usize], dice(&mut state, 2200));
        for _ in 0..dice(&mut state, u64::from(QUEUE)) {
            let head = [0, 0, 0, 3, 3, 3, 1, 7][dice(&mut state, 8) as usize];
            rig.offer(head);
        }
        broken += u32::from(rig.take().is_err());
        while let Some(request) = rig.device.poll_request() {
            requests += 1;
            assert!(request.offset + request.len <= info().size_bytes, "seed {seed}: {request:?}");
            assert_eq!(request.buffer.is_some(), request.op.has_buffer(), "seed {seed}");
            rig.answer(&request, if seed % 3 == 0 { Err(IoError::Failed) } else { Ok(()) });
        }
        rig.device.stop(0);
        assert!(rig.device.poll_stopped(0).is_some(), "seed {seed}: nothing is in flight");
        assert!(rig.payload.buffers.is_empty(), "seed {seed}");
    }
    assert!(
        requests > 500 && broken > 500,
        "{requests} requests, {broken} broken queues: the dice are loaded"
    );
}
