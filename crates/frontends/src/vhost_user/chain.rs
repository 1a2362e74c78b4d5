//! Descriptor chains: a driver's requests in guest memory.
//!
//! The device reads a chain once and copies it, so that later changes by the guest have no effect.
//! The device reads at most as many descriptors as the queue, or the indirect table, has entries.
//!
//! # Refused chains
//! [`Fault`] lists the reasons. If only one part of a chain is invalid and the device can follow
//! the rest, the device records the fault. Then it continues to the end of the chain. The status
//! byte then reports the fault to the driver. All lengths are in bytes.

use super::memory::{GuestMap, Part};
use super::queue::DESCRIPTOR_BYTES;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Maximum number of descriptors in an indirect descriptor table.
const INDIRECT_MAX: u32 = 1024;

/// Maximum length of a descriptor chain, bytes: the longest request with its header and status.
const BYTES_MAX: u64 = hob_engine::REQUEST_BYTES_MAX + 4096;

/// Why a descriptor chain is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The chain has more descriptors than its table, so it contains a loop.
    #[error("contains a loop")]
    Loop,
    /// A descriptor's next index is outside its table.
    #[error("continues outside its descriptor table")]
    Next,
    /// A descriptor of the chain points outside guest memory.
    #[error("points outside guest memory")]
    Memory,
    /// A writable descriptor precedes a readable one, which virtio forbids.
    #[error("has a readable descriptor after a writable one")]
    Order,
    /// An indirect table is inside another one, is not the chain's last descriptor, or has an
    /// invalid length.
    #[error("has an invalid indirect descriptor table")]
    Table,
    /// The chain is longer than any valid request.
    #[error("is longer than any valid request")]
    Long,
    /// The chain has no writable byte for the status.
    #[error("has no writable byte for its status")]
    NoStatus,
}

/// A contiguous range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) len: u32,
}

/// A descriptor chain that was read from guest memory.
#[derive(Debug, Default)]
pub(super) struct Chain {
    /// Segments that the device reads, in order.
    pub(super) readable: Vec<Segment>,
    pub(super) writable: Vec<Segment>,
    /// The reason why the device answers the chain with an error and does not execute it.
    pub(super) fault: Option<Fault>,
    /// Number of descriptors in the chain that were read.
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
    /// Reads the descriptor chain that starts at `head` of a table of `size` descriptors. The
    /// result replaces the contents of `self`.
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

    /// Removes the last writable byte, which receives the status, and returns its guest address.
    pub(super) fn take_status(&mut self, map: &GuestMap) -> Result<u64, Fault> {
        let last = self.writable.last_mut().ok_or(Fault::NoStatus)?;
        last.len -= 1;
        let address = last.address.checked_add(u64::from(last.len)).ok_or(Fault::Memory)?;
        if last.len == 0 {
            self.writable.pop();
        }
        if map.contains(address, 1) { Ok(address) } else { Err(Fault::Memory) }
    }

    /// Removes the first readable bytes of the chain and copies them to `header`. Returns false if
    /// the chain has too few bytes.
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

/// Returns the total length of the segments, bytes.
pub(super) fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// Copies the first bytes of the segments to `bytes`. Returns false if they are too short or
/// outside guest memory.
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

/// Copies `bytes` to the start of the segments. Returns false if the segments are too short or outside
/// guest memory.
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
