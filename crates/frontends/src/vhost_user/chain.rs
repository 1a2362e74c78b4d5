//! Chains of descriptors: what a driver hands over in one go.
//!
//! A chain is walked once and copied; what the guest does to its descriptors afterwards has no effect. Walking takes at
//! most as many steps as the queue, or the indirect table, has entries.
//!
//! # Refuses
//! [`Fault`]. Where a chain can be followed to its end, a fault of a part of it is only noted: the driver can be told in the
//! status byte. Bytes are the unit of all lengths.

use super::memory::{GuestMap, Part};
use super::queue::DESCRIPTOR_BYTES;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Most descriptors of an indirect table.
const INDIRECT_MAX: u32 = 1024;

/// Most bytes of a chain: the longest request, with its header and status.
const BYTES_MAX: u64 = hob_engine::REQUEST_BYTES_MAX + 4096;

/// What is wrong with a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It has more descriptors than its table.
    #[error("runs in a loop")]
    Loop,
    /// A descriptor names one that does not exist.
    #[error("goes on outside its table")]
    Next,
    /// Some of its memory is not the guest's.
    #[error("names memory that is not the guest's")]
    Memory,
    /// The device would have to write before it has read everything.
    #[error("has something to be read behind something to be written")]
    Order,
    /// The indirect table is inside another, in the middle of a chain, or of an impossible length.
    #[error("has an indirect table where or as none can be")]
    Table,
    /// It is longer than any request.
    #[error("has more bytes than any request")]
    Long,
    /// No byte that the device may write.
    #[error("has no place for its status")]
    NoStatus,
}

/// A run of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) len: u32,
}

/// A chain, walked.
#[derive(Debug, Default)]
pub(super) struct Chain {
    /// What the device reads, in order, and writes afterwards.
    pub(super) readable: Vec<Segment>,
    pub(super) writable: Vec<Segment>,
    /// It can be answered, but not be carried out.
    pub(super) fault: Option<Fault>,
    /// Descriptors that were looked at.
    pub(super) steps: u32,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn decode(bytes: [u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let (address, rest) = bytes.split_first_chunk::<8>().expect("sixteen bytes");
        let (len, rest) = rest.split_first_chunk::<4>().expect("eight bytes");
        let (flags, next) = rest.split_first_chunk::<2>().expect("four bytes");
        Descriptor {
            address: u64::from_le_bytes(*address),
            len: u32::from_le_bytes(*len),
            flags: u16::from_le_bytes(*flags),
            next: u16::from_le_bytes([next[0], next[1]]),
        }
    }
}

impl Chain {
    /// Takes the place of what this held with the chain at `head` of a table of `size` descriptors.
    pub(super) fn walk(&mut self, map: &GuestMap, table: &Part, size: u16, head: u16) -> Result<(), Fault> {
        self.readable.clear();
        self.writable.clear();
        self.fault = None;
        (self.steps, self.bytes) = (0, 0);
        let mut index = head;
        for step in 0..size {
            let mut bytes = [0; DESCRIPTOR_BYTES];
            table.read(usize::from(index) * DESCRIPTOR_BYTES, &mut bytes);
            let descriptor = Descriptor::decode(bytes);
            if descriptor.flags & INDIRECT != 0 {
                if step > 0 || descriptor.flags & NEXT != 0 {
                    return Err(Fault::Table);
                }
                return self.walk_indirect(map, descriptor);
            }
            self.take(map, &descriptor);
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
            if index >= size {
                return Err(Fault::Next);
            }
        }
        Err(Fault::Loop)
    }

    fn walk_indirect(&mut self, map: &GuestMap, table: Descriptor) -> Result<(), Fault> {
        let count = table.len / DESCRIPTOR_BYTES as u32;
        if count == 0 || count > INDIRECT_MAX || !table.len.is_multiple_of(DESCRIPTOR_BYTES as u32) {
            return Err(Fault::Table);
        }
        let mut index = 0;
        for _ in 0..count {
            let mut bytes = [0; DESCRIPTOR_BYTES];
            let address = table.address.checked_add(u64::from(index) * DESCRIPTOR_BYTES as u64);
            if !address.is_some_and(|address| map.read(address, &mut bytes)) {
                return Err(Fault::Memory);
            }
            let descriptor = Descriptor::decode(bytes);
            if descriptor.flags & INDIRECT != 0 {
                return Err(Fault::Table);
            }
            self.take(map, &descriptor);
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = u32::from(descriptor.next);
            if index >= count {
                return Err(Fault::Next);
            }
        }
        Err(Fault::Loop)
    }

    fn take(&mut self, map: &GuestMap, descriptor: &Descriptor) {
        self.steps += 1;
        if descriptor.len == 0 {
            return;
        }
        self.bytes += u64::from(descriptor.len);
        if self.bytes > BYTES_MAX {
            self.fault.get_or_insert(Fault::Long);
        }
        if !map.contains(descriptor.address, u64::from(descriptor.len)) {
            self.fault.get_or_insert(Fault::Memory);
        }
        let segment = Segment { address: descriptor.address, len: descriptor.len };
        if descriptor.flags & WRITE != 0 {
            self.writable.push(segment);
            return;
        }
        if !self.writable.is_empty() {
            self.fault.get_or_insert(Fault::Order);
        }
        self.readable.push(segment);
    }

    /// Takes the last byte that may be written away from the chain: there goes the status.
    pub(super) fn take_status(&mut self, map: &GuestMap) -> Result<u64, Fault> {
        let last = self.writable.last_mut().ok_or(Fault::NoStatus)?;
        last.len -= 1;
        let address = last.address.checked_add(u64::from(last.len)).ok_or(Fault::Memory)?;
        if last.len == 0 {
            self.writable.pop();
        }
        if map.contains(address, 1) { Ok(address) } else { Err(Fault::Memory) }
    }

    /// Takes the first bytes that may be read away from the chain. False if there are fewer.
    pub(super) fn take_header(&mut self, map: &GuestMap, header: &mut [u8]) -> bool {
        let mut at = 0;
        let mut used = 0;
        for segment in &mut self.readable {
            let count = (segment.len as usize).min(header.len() - at);
            if !map.read(segment.address, &mut header[at..at + count]) {
                return false;
            }
            at += count;
            segment.len -= count as u32;
            segment.address += count as u64;
            if segment.len > 0 {
                break;
            }
            used += 1;
            if at == header.len() {
                break;
            }
        }
        self.readable.drain(..used);
        at == header.len()
    }
}

/// Bytes of some segments.
pub(super) fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// Copies the first bytes of some segments out. False if that is not possible.
pub(super) fn gather(map: &GuestMap, segments: &[Segment], mut bytes: &mut [u8]) -> bool {
    for segment in segments {
        let count = bytes.len().min(segment.len as usize);
        let (here, rest) = bytes.split_at_mut(count);
        if !map.read(segment.address, here) {
            return false;
        }
        bytes = rest;
    }
    bytes.is_empty()
}

/// Copies bytes into the first ones of some segments. False if that is not possible.
pub(super) fn scatter(map: &GuestMap, segments: &[Segment], mut bytes: &[u8]) -> bool {
    for segment in segments {
        let (here, rest) = bytes.split_at(bytes.len().min(segment.len as usize));
        if !map.write(segment.address, here) {
            return false;
        }
        bytes = rest;
    }
    bytes.is_empty()
}
