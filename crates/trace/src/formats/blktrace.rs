//! Parses blktrace's binary records, as the kernel writes them, in either byte order.
//!
//! A record has 48 bytes: magic and version u32, sequence u32, time u64 (ns), sector u64 (512
//! bytes), bytes u32, action u32, pid u32, device u32, cpu u32, error u16, length u16. The length
//! is that of the following data, which is skipped. The upper half of the action is the type of the
//! request, and the lower half is the event. The parser uses events of one kind, as for `blkparse`:
//! queued if the start has any, or else inserted, issued or completed. blktrace writes one file per
//! processor, which [`per_cpu`](super::super::per_cpu) merges. Version 7 is read, and version 8
//! (Linux 6.19) is refused. Source: `include/uapi/linux/blktrace_api.h`.

use std::io;

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{Reason, scaled};
use super::super::input::Input;
use super::{FormatInfo, Head, Likeness, Parse, Raw, Settings, Step, read_record};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "blktrace",
    summary: "binary blktrace, version 7; queue events",
    source: "include/uapi/linux/blktrace_api.h",
    hints: &["blktrace"],
    detect: |head| if order(head.bytes).is_some() { Likeness::Surely } else { Likeness::No },
    parser,
};

pub(in super::super) const RECORD_BYTES: usize = 48;
/// Upper three bytes of the magic number. The lowest byte is the version.
const MAGIC: u32 = 0x6561_7400;
const VERSION: u32 = 7;

/// Bits in the upper half of the action.
const WRITE: u32 = 1 << 1;
const FLUSH: u32 = 1 << 2;
const NOTIFY: u32 = 1 << 10;
const DISCARD: u32 = 1 << 13;
const PC: u32 = 1 << 9;
/// Bit in the lower half of the action that is set if a control group number follows.
const CGROUP: u32 = 1 << 8;
/// Numbers of the usable events, in order of preference: queued, inserted, issued, completed.
const EVENTS: [u32; 4] = [1, 12, 7, 8];

/// Byte order of a trace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Order {
    Little,
    Big,
}

fn u32_at(bytes: &[u8], at: usize, order: Order) -> u32 {
    let field = bytes[at..at + 4].try_into().expect("four bytes");
    if order == Order::Little { u32::from_le_bytes(field) } else { u32::from_be_bytes(field) }
}

fn u64_at(bytes: &[u8], at: usize, order: Order) -> u64 {
    let field = bytes[at..at + 8].try_into().expect("eight bytes");
    if order == Order::Little { u64::from_le_bytes(field) } else { u64::from_be_bytes(field) }
}

fn u16_at(bytes: &[u8], at: usize, order: Order) -> u16 {
    let field = [bytes[at], bytes[at + 1]];
    if order == Order::Little { u16::from_le_bytes(field) } else { u16::from_be_bytes(field) }
}

/// Returns the byte order of a record with a valid magic number.
pub(in super::super) fn order(bytes: &[u8]) -> Option<Order> {
    let start = bytes.get(..4)?;
    [Order::Little, Order::Big].into_iter().find(|order| u32_at(start, 0, *order) & !0xff == MAGIC)
}

/// Returns a record's time in nanoseconds, and the length in bytes of its additional data, which
/// follows the record.
pub(in super::super) fn time_and_more(record: &[u8], order: Order) -> (u64, usize) {
    (u64_at(record, 8, order), usize::from(u16_at(record, 46, order)))
}

/// Returns the event to use: the most preferred event at the start of the trace.
fn event(head: &[u8], order: Order) -> u32 {
    let mut found = [false; EVENTS.len()];
    let mut rest = head;
    while let Some((record, after)) = rest.split_first_chunk::<RECORD_BYTES>() {
        let action = u32_at(record, 28, order);
        if action >> 16 & NOTIFY == 0
            && let Some(n) = EVENTS.iter().position(|event| *event == action & 0xffff & !CGROUP)
        {
            found[n] = true;
        }
        let Some(next) = after.get(usize::from(u16_at(record, 46, order))..) else { break };
        rest = next;
    }
    EVENTS[found.iter().position(|found| *found).unwrap_or(0)]
}

fn parser(head: &Head<'_>, _: &Settings) -> Result<Box<dyn Parse>, Reason> {
    let order = order(head.bytes).ok_or("it does not begin with blktrace's magic number")?;
    let version = u32_at(head.bytes, 0, order) & 0xff;
    if version != VERSION {
        return Err(format!("its version is {version}; hob reads only version {VERSION}").into());
    }
    Ok(Box::new(Blktrace { order, event: event(head.bytes, order), lost: false, name: String::new() }))
}

struct Blktrace {
    order: Order,
    event: u32,
    lost: bool,
    name: String,
}

impl Parse for Blktrace {
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step> {
        if self.lost {
            return Ok(Step::End);
        }
        let mut record = [0; RECORD_BYTES];
        if let Some(step) = read_record(input, &mut record)? {
            return Ok(step);
        }
        if u32_at(&record, 0, self.order) != MAGIC | VERSION {
            self.lost = true;
            return Ok(Step::Bad("the magic number is wrong; the rest of the trace is not read".into()));
        }
        let more = u64::from(u16_at(&record, 46, self.order));
        if input.skip(more)? < more {
            return Ok(Step::Bad("the trace was cut off within the additional data of a record".into()));
        }
        Ok(match self.request(&record, disks) {
            Ok(Some(raw)) => Step::Request(raw),
            Ok(None) => Step::Event,
            Err(reason) => Step::Bad(reason),
        })
    }
}

impl Blktrace {
    fn request(&mut self, record: &[u8; RECORD_BYTES], disks: &mut Disks) -> Result<Option<Raw>, Reason> {
        use std::fmt::Write;

        let order = self.order;
        let action = u32_at(record, 28, order);
        let kind = action >> 16;
        if kind & (NOTIFY | PC) != 0 || action & 0xffff & !CGROUP != self.event {
            return Ok(None);
        }
        let len = u64::from(u32_at(record, 24, order));
        let op = match () {
            () if len == 0 && kind & FLUSH != 0 => Op::Flush,
            () if len == 0 => return Ok(None),
            () if kind & DISCARD != 0 => Op::Discard,
            () if kind & WRITE != 0 => Op::Write,
            () => Op::Read,
        };
        let offset = if op == Op::Flush { 0 } else { scaled(u64_at(record, 16, order), 512, "the sector")? };
        let device = u32_at(record, 36, order);
        self.name.clear();
        // The kernel splits a device number into twelve bits of major number and twenty bits of
        // minor number.
        write!(self.name, "{},{}", device >> 20, device & 0xf_ffff).expect("a string takes everything");
        let disk = disks.named(&self.name)?;
        Ok(Some(Raw { at_ns: u64_at(record, 8, order), offset, len, op, disk }))
    }
}
