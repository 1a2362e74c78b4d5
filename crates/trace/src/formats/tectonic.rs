//! Parses Meta's traces of its file system Tectonic. The header line names the columns:
//! `op_time,block_id,block_id_size,io_size,io_offset,user_name,user_namespace,op_name,op_count,host_name,rs_shard_id`.
//!
//! Times are in seconds. Sizes and offsets are bytes within a block of up to 16 MiB.
//! `getChunkData…` is a read, `putChunk…` is a write, and other operations are ignored. `op_count`
//! is the number of equal requests in that second. A block is identified by `block_id` and
//! `rs_shard_id`. The parser places each block on its host's disk, at an offset that a hash of the
//! block's names determines. So the parser needs no table of blocks, but neighbouring blocks on
//! this disk are unrelated. Source: CacheLib, "Evaluating SSD hardware", block traces, and the
//! cacheMon/cache_dataset README.

use std::io;

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{More, Reason, columns, number, time_ns};
use super::super::input::Input;
use super::{Entry, FormatInfo, Lines, Parse, ParseLine, Raw, Step, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "tectonic",
    summary: "Meta Tectonic CSV: op_time, block_id, …, io_size, io_offset, …, op_name, …; blocks placed by a hash",
    source: "CacheLib, block traces; cacheMon/cache_dataset, README",
    hints: &["tectonic", "block_traces"],
    detect: |head| lines_like(head, Tectonic::default()),
    parser: |_, _| Ok(Box::new(Repeating { lines: Lines(Tectonic::default()), again: None })),
};

const BLOCK_BITS: u32 = 24;
const PLACE_BITS: u32 = 39;
const COUNT_MAX: u64 = 1 << 20;

#[derive(Default)]
struct Tectonic {
    /// Number of equal requests that the last parsed line stands for.
    count: u64,
}

impl ParseLine for Tectonic {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        let [time, block, _, size, offset, _, _, op, count, host, shard] = columns(line, ',', More::Allowed)?;
        if time == "op_time" {
            return Ok(Entry::Text);
        }
        let at_ns = time_ns(time, 1_000_000_000)?;
        let len = number(size, "the size")?;
        let offset = number(offset, "the offset")?;
        let count = number(count, "the count")?;
        let op = match op.split('.').next() {
            Some("getChunkData") => Op::Read,
            Some("putChunk") => Op::Write,
            Some("") | None => return Err("the operation is missing".into()),
            Some(_) => return Ok(Entry::Event),
        };
        if offset.checked_add(len).is_none_or(|end| end > 1 << BLOCK_BITS) {
            return Err("the request ends beyond 16 MiB of its block".into());
        }
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(format!("the count is not 1 to {COUNT_MAX}: {count}").into());
        }
        self.count = count;
        let offset = place(block, shard) << BLOCK_BITS | offset;
        Ok(Entry::Request(Raw { at_ns, offset, len, op, disk: disks.named(host)? }))
    }
}

/// Returns the position of a block on its host's disk: the upper bits of a mixed FNV-1a hash of the
/// block's names.
fn place(block: &str, shard: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in block.bytes().chain([b'/']).chain(shard.bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash >> (64 - PLACE_BITS)
}

/// Parser that returns the request of a line as many times as the column `op_count` says.
struct Repeating {
    lines: Lines<Tectonic>,
    again: Option<(Raw, u64)>,
}

impl Parse for Repeating {
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step> {
        if let Some((raw, times)) = self.again {
            self.again = Some((raw, times - 1)).filter(|_| times > 1);
            return Ok(Step::Request(raw));
        }
        let step = self.lines.next(input, disks)?;
        if let Step::Request(raw) = &step {
            self.again = Some((*raw, self.lines.0.count - 1)).filter(|(_, times)| *times > 0);
        }
        Ok(step)
    }
}
