//! Parses three text formats with five columns of numbers: time, device, block, size and flags.
//!
//! - `disksim` is DiskSim's ASCII format. Times are milliseconds with a fraction, and block and
//!   size are in sectors of 512 bytes. The flags are hexadecimal, and bit 0 is set for a read.
//!   Source: the DiskSim 4.0 manual, "ascii" traces, and `disksim_iotrace.c`.
//! - `mqsim` has times in whole nanoseconds, sectors of 512 bytes, and the flags 1 for a read and 0
//!   for a write. Source: the README of MQSim (Tavakkol et al., FAST 2018).
//! - `replayer` has times in milliseconds, block and size in bytes, and the flag 1 for a read. The
//!   MSR traces of Heimdall and IODA have this format. Source: github.com/huaicheng/replayer,
//!   README.

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{More, Reason, bytes, choice, number, time_ns, words};
use super::{Entry, FormatInfo, Head, Likeness, Lines, ParseLine, Raw, lines_like};

pub(super) const DISKSIM: FormatInfo = FormatInfo {
    name: "disksim",
    summary: "DiskSim ASCII: ms, device, sector, sectors, flags (bit 0: read)",
    source: "DiskSim 4.0 manual, disksim_iotrace.c",
    hints: &["disksim", ".ascii"],
    detect: |head| likeness(head, Kind::Disksim),
    parser: |_, _| Ok(Box::new(Lines(Kind::Disksim))),
};

pub(super) const MQSIM: FormatInfo = FormatInfo {
    name: "mqsim",
    summary: "MQSim: ns, device, sector, sectors, 1 read|0 write",
    source: "Tavakkol et al., FAST 2018; MQSim README",
    hints: &["mqsim"],
    detect: |head| likeness(head, Kind::Mqsim),
    parser: |_, _| Ok(Box::new(Lines(Kind::Mqsim))),
};

pub(super) const REPLAYER: FormatInfo = FormatInfo {
    name: "replayer",
    summary: "replayer (Heimdall, IODA): ms, device, offset, bytes, 1 read|0 write",
    source: "github.com/huaicheng/replayer, README",
    hints: &["msr.cut", "replayer"],
    detect: |head| likeness(head, Kind::Replayer),
    parser: |_, _| Ok(Box::new(Lines(Kind::Replayer))),
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Disksim,
    Mqsim,
    Replayer,
}

/// Returns how well the start of a trace fits one of the three formats. Times without a fraction
/// are nanoseconds. If all blocks and sizes are multiples of the sector size, they are in bytes.
fn likeness(head: &Head<'_>, kind: Kind) -> Likeness {
    let likeness = lines_like(head, kind);
    if likeness == Likeness::No {
        return likeness;
    }
    let columns = || head.lines().filter_map(|line| words::<5>(line, More::Refused).ok());
    let whole_ns = columns().all(|[time, ..]| !time.contains('.'));
    let whole = |text: &str| text.parse::<u64>().is_ok_and(|number| number % 512 == 0);
    let in_bytes = columns().all(|[_, _, block, size, _]| whole(block) && whole(size));
    let found = match (whole_ns, in_bytes) {
        (_, true) => Kind::Replayer,
        (true, false) => Kind::Mqsim,
        (false, false) => Kind::Disksim,
    };
    if found == kind { likeness } else { Likeness::No }
}

impl ParseLine for Kind {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        let [time, device, block, size, flags] = words(line, More::Refused)?;
        let (time_unit_ns, unit) = match self {
            Kind::Disksim => (1_000_000, 512),
            Kind::Mqsim => (1, 512),
            Kind::Replayer => (1_000_000, 1),
        };
        let op = match self {
            Kind::Disksim => {
                let digits = flags.strip_prefix("0x").unwrap_or(flags);
                let flags =
                    u32::from_str_radix(digits, 16).map_err(|_| "the flags are not a hexadecimal number")?;
                if flags & 1 == 1 { Op::Read } else { Op::Write }
            }
            _ => choice(flags, "the type", &[("1", Op::Read), ("0", Op::Write)])?,
        };
        Ok(Entry::Request(Raw {
            at_ns: time_ns(time, time_unit_ns)?,
            offset: bytes(block, unit, "the offset")?,
            len: bytes(size, unit, "the size")?,
            op,
            disk: disks.dense(number(device, "the device")?)?,
        }))
    }
}
