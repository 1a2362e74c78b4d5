//! Reads a whole trace before its replay, and checks whether the requests fit a target.

use anyhow::{Result, bail, ensure};

use super::{Changes, Options, TargetInfo};
use crate::workload::Access;
use hob_trace::Record;

/// Properties of a trace's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Properties of reads, writes, discards and flushes.
    pub kinds: [Kind; 4],
    /// Time from the first request to the last, nanoseconds.
    pub span_ns: u64,
}

/// Properties of the requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kind {
    /// Number of requests.
    pub requests: u64,
    /// Start and end of the request that ends at the highest offset, bytes.
    pub farthest: (u64, u64),
    /// Maximum length, bytes.
    pub len_max: u32,
    /// Bitwise OR of all offsets and lengths, whose lowest set bit is their common alignment.
    mixed: u64,
}

impl Survey {
    /// Reads the whole trace.
    ///
    /// # Errors
    /// Returns the errors of the trace.
    pub fn of(records: impl IntoIterator<Item = Result<Record>>) -> Result<Survey> {
        let mut survey = Survey::default();
        let mut first_ns = None;
        for record in records {
            let Record { at_ns, offset, len, op, .. } = record?;
            survey.span_ns = survey.span_ns.max(at_ns.saturating_sub(*first_ns.get_or_insert(at_ns)));
            let kind = &mut survey.kinds[op as usize];
            kind.requests += 1;
            kind.mixed |= offset | u64::from(len);
            kind.len_max = kind.len_max.max(len);
            // Trace readers refuse requests whose end overflows.
            let end = offset + u64::from(len);
            if end > kind.farthest.1 {
                kind.farthest = (offset, end);
            }
        }
        Ok(survey)
    }

    /// Returns the number of all requests.
    pub fn requests(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.requests).sum()
    }
}

/// Mapping of a trace to a target: which requests are sent, and to which offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    sends: [bool; 4],
    size_bytes: u64,
    unit_bytes: u64,
}

impl Fit {
    /// Checks before the first request that the trace fits the target.
    pub(super) fn new(survey: &Survey, info: &TargetInfo, options: &Options) -> Result<Fit> {
        let name = &info.name;
        let sends = match options.changes {
            Changes::LeaveOut => [true, false, false, false],
            Changes::Refuse | Changes::Allow => [true, true, info.can_discard, info.can_flush],
        };
        let [_, writes, discards, _] = survey.kinds.map(|kind| kind.requests);
        if writes + discards > 0 {
            match options.changes {
                Changes::Refuse => bail!(
                    "the trace has {writes} writes and {discards} discards, which would change {name}; allow that \
                     with --allow-writes, or leave them out with --reads-only"
                ),
                Changes::Allow if info.read_only => {
                    bail!(
                        "{name} is read-only, and the trace has writes; leave the writes out with --reads-only"
                    )
                }
                Changes::Allow | Changes::LeaveOut => {}
            }
        }
        let sent = || survey.kinds.iter().zip(sends).filter(|(_, sends)| *sends).map(|(kind, _)| kind);
        let unit_bytes = u64::from(info.unit_bytes);
        let mixed = sent().fold(0, |mixed, kind| mixed | kind.mixed);
        ensure!(
            mixed.is_multiple_of(unit_bytes),
            "{name} needs requests in units of {unit_bytes} bytes, and the trace has requests in units of {}",
            1u64 << mixed.trailing_zeros().min(63)
        );
        let payloads = survey.kinds.iter().zip(sends).take(2).filter(|(_, sends)| *sends);
        let payload_bytes_max = payloads.map(|(kind, _)| kind.len_max).max().unwrap_or(0);
        ensure!(
            payload_bytes_max <= info.payload_bytes_max,
            "the trace has a request of {payload_bytes_max} bytes, and {name} accepts at most {} bytes a request",
            info.payload_bytes_max
        );
        let (offset, end) = sent().map(|kind| kind.farthest).max_by_key(|(_, end)| *end).unwrap_or_default();
        ensure!(
            options.wrap || end <= info.size_bytes,
            "the trace has a request of {} bytes at offset {offset}, beyond the end of {name} at {} bytes; \
             --wrap maps it to an offset inside {name}",
            end - offset,
            info.size_bytes
        );
        let size_bytes = info.size_bytes / unit_bytes * unit_bytes;
        let len_max = sent().map(|kind| kind.len_max).max().unwrap_or(0);
        ensure!(
            u64::from(len_max) <= size_bytes,
            "the trace has a request of {len_max} bytes, and the whole {name} has only {size_bytes}"
        );
        // If the size is 0, the trace has only flushes, which have no offset.
        let size_bytes = if options.wrap { size_bytes.max(1) } else { u64::MAX };
        Ok(Fit { sends, size_bytes, unit_bytes })
    }

    /// Returns the number of requests that the replay sends.
    pub(super) fn count(&self, survey: &Survey) -> u64 {
        let sent = survey.kinds.iter().zip(self.sends).filter(|(_, sends)| *sends);
        sent.map(|(kind, _)| kind.requests).sum()
    }

    /// Returns the access for a record, or `None` for a record that is not sent. Offsets beyond the
    /// target are reduced modulo its size. A request that would cross the target's end is moved
    /// back, so that it ends at or just before the target's end.
    pub(super) fn place(&self, record: &Record) -> Option<Access> {
        if !self.sends[record.op as usize] {
            return None;
        }
        let (mut offset, len) = (record.offset % self.size_bytes, u64::from(record.len));
        if offset + len > self.size_bytes {
            offset = (self.size_bytes - len) / self.unit_bytes * self.unit_bytes;
        }
        Some(Access { offset, len: record.len, op: record.op })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Pace;
    use hob_trace::Op;

    fn record(op: Op, offset: u64, len: u32) -> Record {
        Record { at_ns: offset, offset, len, op, disk: 0 }
    }

    fn survey(records: &[Record]) -> Survey {
        Survey::of(records.iter().copied().map(Ok)).unwrap()
    }

    fn target() -> TargetInfo {
        TargetInfo {
            name: "T".to_owned(),
            size_bytes: 1 << 20,
            unit_bytes: 512,
            payload_bytes_max: 1 << 16,
            read_only: false,
            can_discard: true,
            can_flush: true,
        }
    }

    const ALLOW: Options = Options { pace: Pace::Asap, depth: 1, changes: Changes::Allow, wrap: false };

    #[track_caller]
    fn refused(records: &[Record], info: &TargetInfo, options: &Options) -> String {
        Fit::new(&survey(records), info, options).unwrap_err().to_string()
    }

    #[test]
    fn a_survey_counts_the_requests() {
        let all = [
            record(Op::Read, 512, 1024),
            record(Op::Discard, 4096, 1 << 20),
            record(Op::Write, 8192, 2048),
            record(Op::Flush, 0, 0),
        ];
        let survey = survey(&all);
        assert_eq!((survey.requests(), survey.kinds.map(|kind| kind.requests)), (4, [1; 4]));
        let [read, write, discard, flush] = survey.kinds;
        assert_eq!([read, write, discard].map(|kind| kind.len_max), [1024, 2048, 1 << 20]);
        assert_eq!((discard.farthest, flush.farthest), ((4096, 4096 + (1 << 20)), (0, 0)));
        assert_eq!(survey.span_ns, 7680);
        assert!(Survey::of([Err(anyhow::anyhow!("torn"))]).is_err());
    }

    #[test]
    fn changes_are_made_when_allowed_only() {
        let all = [record(Op::Read, 0, 512), record(Op::Write, 0, 512), record(Op::Flush, 0, 0)];
        let refuse = Options { changes: Changes::Refuse, ..ALLOW };
        let said = refused(&all, &target(), &refuse);
        assert!(said.contains("1 writes and 0 discards") && said.contains("--allow-writes"), "{said}");
        assert!(refused(&all[..], &TargetInfo { read_only: true, ..target() }, &ALLOW).contains("read-only"));
        let leave = Options { changes: Changes::LeaveOut, ..ALLOW };
        let fit = Fit::new(&survey(&all), &TargetInfo { read_only: true, ..target() }, &leave).unwrap();
        assert_eq!(fit.count(&survey(&all)), 1);
        assert_eq!(all.map(|record| fit.place(&record).is_some()), [true, false, false]);
        let harmless = [all[0], all[2]];
        assert_eq!(Fit::new(&survey(&harmless), &target(), &refuse).unwrap().count(&survey(&harmless)), 2);
    }

    #[test]
    fn unsupported_requests_are_left_out() {
        let all = [record(Op::Discard, 0, 512), record(Op::Write, 0, 512), record(Op::Flush, 0, 0)];
        let info = TargetInfo { can_discard: false, can_flush: false, ..target() };
        let fit = Fit::new(&survey(&all), &info, &ALLOW).unwrap();
        assert_eq!((fit.count(&survey(&all)), fit.place(&all[1]).is_some()), (1, true));
        // Requests that are not sent need not fit the target.
        let far = [record(Op::Read, 0, 512), record(Op::Write, 1 << 40, 1 << 30), record(Op::Discard, 3, 7)];
        let leave = Options { changes: Changes::LeaveOut, ..ALLOW };
        assert_eq!(Fit::new(&survey(&far), &info, &leave).unwrap().count(&survey(&far)), 1);
    }

    #[test]
    fn requests_beyond_the_target_are_reported_with_numbers() {
        let said = refused(&[record(Op::Read, 0, 512), record(Op::Read, 1 << 20, 512)], &target(), &ALLOW);
        assert!(said.contains("1048576") && said.contains("--wrap"), "{said}");
        let said = refused(&[record(Op::Read, 512, 700)], &target(), &ALLOW);
        assert!(said.contains("units of 512") && said.contains("units of 4"), "{said}");
        let said = refused(&[record(Op::Read, 0, 1 << 17)], &target(), &ALLOW);
        assert!(said.contains("131072") && said.contains("65536"), "{said}");
        let wrap = Options { wrap: true, ..ALLOW };
        let said = refused(&[record(Op::Discard, 0, 1 << 21)], &target(), &wrap);
        assert!(said.contains("2097152"), "{said}");
    }

    #[test]
    fn wrapping_stays_inside_and_aligned() {
        let info = TargetInfo { size_bytes: 1_000_000, ..target() };
        let records: Vec<Record> =
            (0..4000).map(|i| record(Op::Read, i * 7 * 512, 512 * (1 + i as u32 % 60))).collect();
        let fit = Fit::new(&survey(&records), &info, &Options { wrap: true, ..ALLOW }).unwrap();
        for record in &records {
            let access = fit.place(record).unwrap();
            assert!(access.offset + u64::from(access.len) <= 1_000_000 && access.offset.is_multiple_of(512));
            if record.offset + u64::from(record.len) <= 999_936 {
                assert_eq!(access.offset, record.offset, "what fits stays where it is");
            }
        }
        let far = record(Op::Write, (1 << 63) - 512, 512);
        assert!(fit.place(&far).unwrap().offset <= 1_000_000 - 512);
    }
}
