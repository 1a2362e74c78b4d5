//! Parses the default text output of `blkparse`: `device cpu sequence time pid action RWBS sector +
//! sectors [process]`.
//!
//! Times are in seconds, and sectors have 512 bytes. A request causes several actions, and the
//! parser uses actions of one kind: Q (queued) if the start of the file has any, or else I, D or C.
//! RWBS is the type of the request. A leading F is a flush before the data, followed by D, W, R or
//! N (none). A write with a leading flush counts as a write. The summary at the end is skipped.
//! Source: blkparse(1), `blkparse_fmt.c`.

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{Reason, bytes, time_ns};
use super::{Entry, FormatInfo, Head, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "blkparse",
    summary: "blkparse's default text; queue events",
    source: "blkparse(1), blkparse_fmt.c",
    hints: &["blkparse"],
    detect: |head| lines_like(head, Blkparse::new(head)),
    parser: |head, _| Ok(Box::new(Lines(Blkparse::new(head)))),
};

struct Blkparse {
    action: &'static str,
    /// True when the parser has reached the summary.
    ended: bool,
}

impl Blkparse {
    fn new(head: &Head<'_>) -> Blkparse {
        let has = |action: &&&str| head.lines().any(|line| line.split_whitespace().nth(5) == Some(action));
        let action = ["Q", "I", "D", "C"].iter().find(has).unwrap_or(&"Q");
        Blkparse { action, ended: false }
    }
}

fn is_device(word: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    word.split_once(',').is_some_and(|(major, minor)| number(major) && number(minor))
}

fn begins_summary(line: &str) -> bool {
    (line.starts_with("CPU") || line.starts_with("Total") || line.starts_with("Throughput"))
        && line.contains('(')
}

/// Returns the operation of an RWBS field. A request is a flush only if it moves no data.
fn operation(rwbs: &str, moves: bool) -> Option<Op> {
    if !moves {
        return rwbs.starts_with('F').then_some(Op::Flush);
    }
    match rwbs.strip_prefix('F').unwrap_or(rwbs).chars().next()? {
        'R' => Some(Op::Read),
        'W' => Some(Op::Write),
        'D' => Some(Op::Discard),
        _ => None,
    }
}

impl ParseLine for Blkparse {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        if self.ended || begins_summary(line) {
            self.ended = true;
            return Ok(Entry::Text);
        }
        let mut words = line.split_whitespace();
        let mut word =
            |what: &'static str| words.next().ok_or_else(|| Reason::from(format!("{what} is missing")));
        let device = word("the device")?;
        if !is_device(device) {
            return Err("the line does not begin with a device, like 8,0".into());
        }
        let (_cpu, _sequence) = (word("the processor")?, word("the sequence number")?);
        let time = time_ns(word("the time")?, 1_000_000_000)?;
        let _pid = word("the process")?;
        let action = word("the action")?;
        if action != self.action {
            return Ok(Entry::Event);
        }
        let rwbs = word("RWBS")?;
        let (sector, plus, sectors) = (words.next(), words.next(), words.next());
        let moves = plus == Some("+");
        let Some(op) = operation(rwbs, moves) else { return Ok(Entry::Event) };
        let (offset, len) = match op {
            Op::Flush => (0, 0),
            _ => {
                let offset = bytes(sector.unwrap_or_default(), 512, "the sector")?;
                (offset, bytes(sectors.unwrap_or_default(), 512, "the number of sectors")?)
            }
        };
        Ok(Entry::Request(Raw { at_ns: time, offset, len, op, disk: disks.named(device)? }))
    }
}
