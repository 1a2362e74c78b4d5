//! The records of a trace as a plain iterator. Errors, Ctrl-C and the limit end the iterator, and
//! are reported afterwards.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use hob_trace::Record;
use hob_trace::blocks::{Blocks, TraceBlocks};
use indicatif::{ProgressBar, ProgressStyle};

use super::{Source, remarks};

/// Creates a progress bar of `length` requests, or a counter.
pub(super) fn bar(length: Option<u64>) -> anyhow::Result<ProgressBar> {
    Ok(match length {
        Some(length) => ProgressBar::new(length).with_style(ProgressStyle::with_template(
            "{bar:40} {percent:>3} %  {human_pos} requests  {eta} left",
        )?),
        None => ProgressBar::no_length()
            .with_style(ProgressStyle::with_template("{spinner} {human_pos} requests  {msg}")?),
    })
}

/// A trace that is read once.
pub(super) struct Feed<'a> {
    blocks: TraceBlocks,
    block: Vec<Record>,
    /// Index of the next record in `block`.
    at: usize,
    /// Number of records returned so far.
    count: u64,
    /// Maximum number of records to return.
    limit: u64,
    stop: &'a AtomicBool,
    bar: ProgressBar,
    end: Option<End>,
}

/// Reason why the iterator has no more records.
enum End {
    Complete,
    Interrupted,
    Failed(anyhow::Error),
}

/// Result of reading the records.
pub(super) struct Fed {
    /// Number of records returned.
    pub(super) count: u64,
    /// True if the trace continues beyond the limit.
    pub(super) is_cut: bool,
    /// Remarks of the reader, one line each.
    pub(super) remarks: Vec<String>,
}

impl<'a> Feed<'a> {
    /// Opens a trace and reads at most `limit` records of it. `message` appears beside the progress
    /// bar, which ends at `length` requests if that is known.
    ///
    /// # Errors
    /// Returns an error if the trace cannot be opened.
    pub(super) fn open(
        source: &Source,
        limit: u64,
        length: Option<u64>,
        message: String,
        stop: &'a AtomicBool,
    ) -> anyhow::Result<Feed<'a>> {
        let (blocks, bar) = (source.open_blocks()?, bar(length)?.with_message(message));
        Ok(Feed { blocks, block: Vec::new(), at: 0, count: 0, limit, stop, bar, end: None })
    }

    /// Returns what was read, after the last record.
    ///
    /// # Errors
    /// Returns an error if the trace could not be read to its end, Ctrl-C was pressed, or the trace
    /// is empty.
    pub(super) fn finish(self) -> anyhow::Result<Fed> {
        self.bar.finish_and_clear();
        let is_cut = match self.end {
            Some(End::Failed(error)) => return Err(error),
            Some(End::Interrupted) => bail!("interrupted after {} requests", self.count),
            Some(End::Complete) => false,
            None => true,
        };
        let mut remarks = self.blocks.reader().map(remarks).unwrap_or_default();
        remarks.extend(self.blocks.truncation());
        if self.count == 0 {
            remarks.insert(0, "the trace has no requests".to_owned());
            bail!("{}", in_one_line(&remarks));
        }
        Ok(Fed { count: self.count, is_cut, remarks })
    }

    /// Reads the next block, or sets `end` to the reason why there is none.
    fn refill(&mut self) {
        self.bar.set_position(self.count);
        self.block.clear();
        self.at = 0;
        if self.stop.load(Ordering::Relaxed) {
            self.end = Some(End::Interrupted);
            return;
        }
        match self.blocks.next_block() {
            Ok([]) => self.end = Some(End::Complete),
            Ok(block) => self.block.extend_from_slice(block),
            Err(error) => self.end = Some(End::Failed(error)),
        }
    }
}

/// Joins remarks, of which some introduce a list, to one line.
fn in_one_line(remarks: &[String]) -> String {
    let parts: Vec<&str> = remarks.iter().map(|remark| remark.trim()).collect();
    parts.join("; ").replace(":; ", ": ")
}

impl Iterator for Feed<'_> {
    type Item = Record;

    #[inline]
    fn next(&mut self) -> Option<Record> {
        if self.at == self.block.len() {
            if self.end.is_some() {
                return None;
            }
            self.refill();
        }
        let record = *self.block.get(self.at)?;
        if self.count == self.limit {
            return None;
        }
        (self.at, self.count) = (self.at + 1, self.count + 1);
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::{Bad, FormatInfo};

    fn source(directory: &tempfile::TempDir, text: &str) -> Source {
        let trace = directory.path().join("t.csv");
        std::fs::write(&trace, text).unwrap();
        let format = FormatInfo::named("csv").ok();
        Source { trace, format, disk: None, on_bad: Bad::Fail, page_size: None }
    }

    /// Returns the offsets, and the result of `finish`.
    fn read(text: &str, limit: u64, stop: bool) -> (Vec<u64>, anyhow::Result<Fed>) {
        let (directory, stop) = (tempfile::tempdir().unwrap(), AtomicBool::new(stop));
        let mut feed =
            Feed::open(&source(&directory, text), limit, None, String::new(), &stop).expect("a trace");
        (feed.by_ref().map(|record| record.offset).collect(), feed.finish())
    }

    #[test]
    fn a_limit_ends_only_an_unfinished_trace() {
        let text = "ts_us,op,offset,size\n0,R,0,512\n1,R,512,512\n2,W,1024,512\n";
        for (limit, offsets, is_cut) in [
            (u64::MAX, &[0, 512, 1024][..], false),
            (3, &[0, 512, 1024], false),
            (2, &[0, 512], true),
            (1, &[0], true),
        ] {
            let (read, fed) = read(text, limit, false);
            let fed = fed.unwrap();
            assert_eq!(
                (&read[..], fed.count, fed.is_cut),
                (offsets, offsets.len() as u64, is_cut),
                "{limit}"
            );
        }
    }

    #[test]
    fn the_reason_of_an_early_end_is_reported_afterwards() {
        let broken = "ts_us,op,offset,size\n0,R,0,512\n1,R,-512,512\n";
        let said = |read: (Vec<u64>, anyhow::Result<Fed>)| format!("{:#}", read.1.err().expect("an error"));
        assert!(said(read(broken, u64::MAX, false)).contains("line 3"));
        assert!(
            said(read("ts_us,op,offset,size\n0,R,0,512\n", u64::MAX, true)).contains("interrupted after 0")
        );
        assert!(said(read("\n", u64::MAX, false)).contains("no request"));
    }

    #[test]
    fn the_remarks_about_an_empty_trace_are_one_line() {
        let remarks = ["no request", "2 were skipped:", "  line 2: no length", "  …"].map(str::to_owned);
        assert_eq!(in_one_line(&remarks), "no request; 2 were skipped: line 2: no length; …");
    }
}
