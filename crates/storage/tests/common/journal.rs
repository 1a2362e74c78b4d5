//! Journals according to docs/FORMAT.md, written without hob's own code; only blocks of one sector.
#![allow(dead_code, unreachable_pub)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use hob_engine::command::Segment;
use hob_storage::pool::Pool;

pub const PAGE: u64 = 4096;

/// A page's record of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    Empty,
    Clean { block: u32, sum: u32 },
    Dirty { block: u32, sum: u32 },
}

/// A change record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Set { frame: u32, block: u32, sum: u32, dirty: bool },
    Clean { frame: u32, block: u32 },
    Drop { frame: u32, block: u32 },
}

/// State of a ring that is being written.
#[derive(Clone, Debug)]
pub struct Journal {
    pub cache: u128,
    pub ring: u32,
    /// Number of pages of each copy.
    pub pages: u64,
    pub disk_bytes: u64,
    pub identity: [u8; 32],
    pub segment_frames: u32,
    pub clean: bool,
    pub sequence: u64,
    pub committed: u64,
    pub dump_begin: u64,
    pub dump_end: u64,
}

impl Journal {
    pub fn new(cache: u128, ring: u32, pages: u64, segment_frames: u32) -> Journal {
        Journal {
            cache,
            ring,
            pages,
            disk_bytes: 1 << 40,
            identity: [9; 32],
            segment_frames,
            clean: false,
            sequence: 0,
            committed: 0,
            dump_begin: 0,
            dump_end: 0,
        }
    }

    /// Returns the next page: its number in the ring, and its bytes. A dump consists of runs of
    /// frames, each in one segment.
    pub fn page(&mut self, changes: &[Change], dump: &[(u32, &[Frame])]) -> (u64, Vec<u8>) {
        self.sequence += 1;
        let mut page = Vec::with_capacity(PAGE as usize);
        page.extend(b"hobJ");
        page.extend([0; 4]);
        page.extend(self.sequence.to_le_bytes());
        page.extend(self.cache.to_le_bytes());
        page.extend(self.ring.to_le_bytes());
        page.extend([0, u8::from(self.clean)]);
        page.extend((changes.len() as u16).to_le_bytes());
        page.extend(self.committed.to_le_bytes());
        page.extend(self.dump_begin.to_le_bytes());
        page.extend(self.disk_bytes.to_le_bytes());
        page.extend(self.identity);
        page.extend(self.segment_frames.to_le_bytes());
        page.extend((dump.len() as u16).to_le_bytes());
        page.extend([0; 2]);
        page.extend(self.dump_end.to_le_bytes());
        page.resize(0x280, 0);
        assert!(changes.len() <= 54);
        for change in changes {
            let (kind, flags, frame, block, sum) = match *change {
                Change::Set { frame, block, sum, dirty } => (1, u8::from(dirty), frame, block, sum),
                Change::Clean { frame, block } => (2, 0, frame, block, 0),
                Change::Drop { frame, block } => (3, 0, frame, block, 0),
            };
            page.extend([kind, flags, 0, 0]);
            [frame, block, sum].iter().for_each(|word| page.extend(word.to_le_bytes()));
        }
        for (first, frames) in dump {
            page.extend(first.to_le_bytes());
            page.extend((frames.len() as u32).to_le_bytes());
            for frame in *frames {
                let (block, state, sum) = match *frame {
                    Frame::Empty => {
                        page.extend([0xFF; 4]);
                        continue;
                    }
                    Frame::Clean { block, sum } => (block, 1, sum),
                    Frame::Dirty { block, sum } => (block, 3, sum),
                };
                page.extend(block.to_le_bytes());
                page.push(state);
                page.extend(sum.to_le_bytes());
            }
        }
        assert!(page.len() as u64 <= PAGE, "{} bytes", page.len());
        page.resize(PAGE as usize, 0);
        let crc = crc32c::crc32c(&page);
        page[4..8].copy_from_slice(&crc.to_le_bytes());
        (self.sequence % self.pages, page)
    }
}

/// Opens a device's file directly.
pub fn device_file(pool: &Pool, segment: Segment) -> File {
    let devices = pool.devices();
    let device = devices.iter().find(|device| device.id == segment.device).expect("a device of the pool");
    OpenOptions::new().read(true).write(true).open(&device.path).unwrap()
}

/// Overwrites a page of one copy.
pub fn put_page(pool: &Pool, copy: &[Segment], number: u64, page: &[u8]) {
    let at = number * PAGE;
    let segment = copy[(at / pool.segment_bytes()) as usize];
    device_file(pool, segment).write_all_at(page, segment.offset + at % pool.segment_bytes()).unwrap();
}

/// Overwrites a sector of a data segment.
pub fn put_sector(pool: &Pool, place: Segment, sector: u64, bytes: &[u8]) {
    device_file(pool, place).write_all_at(bytes, place.offset + sector * PAGE).unwrap();
}
