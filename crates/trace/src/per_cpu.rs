//! Merges the per-CPU files of blktrace, `NAME.blktrace.0`, `NAME.blktrace.1` and so on, in order
//! of time. Each file may be compressed, such as `NAME.blktrace.1.gz`.
//!
//! The result is a stream of blktrace records, as if one processor had written all of them. Memory
//! is limited to a buffer of 64 KiB, a decoder and one record for each file. A trace is complete
//! only with the files of all processors, so the path of one file opens all of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::{Context, Result, ensure};

use super::binary::read_whole;
use super::decompress::{self, SUFFIXES};
use super::formats::blktrace::{self, Order, RECORD_BYTES};
use super::open::Counted;

const BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of per-CPU files of a trace. Each processor of the traced host has one such file.
const FILES_MAX: usize = 8192;

/// Returns the per-CPU files to which `path` belongs, ordered by processor. `path` is one of the
/// files, their common part `NAME.blktrace`, or `NAME`. The result is empty if `path` is a trace of
/// its own. If a processor has an uncompressed and a compressed file, the result has the
/// uncompressed one.
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(Vec::new()) };
    let stem = match processor(name) {
        Some((stem, _)) => stem.to_owned(),
        None if path.exists() => return Ok(Vec::new()),
        None if name.ends_with(".blktrace") => format!("{name}."),
        None => format!("{name}.blktrace."),
    };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(entries) = directory.read_dir() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", directory.display()))?;
        let name = entry.file_name();
        if let Some((of, number)) = name.to_str().and_then(processor)
            && of == stem
        {
            found.push((number, directory.join(&name)));
            ensure!(found.len() <= FILES_MAX, "{} has more than {FILES_MAX} per-CPU files", path.display());
        }
    }
    found.sort_unstable();
    found.dedup_by_key(|(number, _)| *number);
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Splits the name of a per-CPU file into the common part and the number of the processor. The
/// suffix of a compressed file is ignored. Returns `None` for the name of any other file.
fn processor(name: &str) -> Option<(&str, u32)> {
    let name = SUFFIXES.into_iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
    let end = name.rfind('.')?;
    let (stem, number) = name.split_at(end + 1);
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && stem.ends_with(".blktrace.")).then(|| Some((stem, number.parse().ok()?)))?
}

/// One per-CPU file and its next record.
struct Source<R> {
    name: String,
    file: R,
    /// Next record with its additional data.
    record: Vec<u8>,
    /// Number of the next record, from 1.
    number: u64,
}

impl<R: Read> Source<R> {
    /// Reads the next record. Returns its time, or `None` at the end of the file.
    fn advance(&mut self, order: &mut Option<Order>) -> io::Result<Option<u64>> {
        self.number += 1;
        self.record.resize(RECORD_BYTES, 0);
        let got = read_whole(&mut self.file, &mut self.record).map_err(|error| self.unreadable(&error))?;
        if got == 0 {
            return Ok(None);
        }
        if got < RECORD_BYTES {
            return Err(self.invalid("is cut off"));
        }
        let Some(own) = blktrace::order(&self.record) else {
            return Err(self.invalid("does not begin with blktrace's magic number"));
        };
        if *order.get_or_insert(own) != own {
            return Err(self.invalid("has another byte order than the files of other processors"));
        }
        let (at_ns, more_bytes) = blktrace::time_and_more(&self.record, own);
        self.record.resize(RECORD_BYTES + more_bytes, 0);
        let more = read_whole(&mut self.file, &mut self.record[RECORD_BYTES..]);
        if more.map_err(|error| self.unreadable(&error))? < more_bytes {
            return Err(self.invalid("is cut off"));
        }
        Ok(Some(at_ns))
    }

    fn unreadable(&self, error: &io::Error) -> io::Error {
        let (number, name) = (self.number, &self.name);
        io::Error::new(error.kind(), format!("record {number} of {name} cannot be read: {error}"))
    }

    fn invalid(&self, what: &str) -> io::Error {
        let (number, name) = (self.number, &self.name);
        let advice = "record the trace again, or move the other files to another directory";
        io::Error::new(io::ErrorKind::InvalidData, format!("record {number} of {name} {what}; {advice}"))
    }
}

/// Merged records of several per-CPU files.
pub(super) struct Merged<R> {
    sources: Vec<Source<R>>,
    /// Time of the next record of each file that has one, and the index of the file.
    next: BinaryHeap<Reverse<(u64, usize)>>,
    /// File whose record is being returned, and the number of its bytes that were returned.
    current: Option<(usize, usize)>,
    order: Option<Order>,
    failed: Option<io::Error>,
}

/// Opens per-CPU files, compressed or not. Empty files, those of idle processors, have no records.
/// The number of bytes read from all files is added to `consumed`.
///
/// # Errors
/// Returns an error if a file cannot be opened or its first record is invalid.
pub(super) fn open(paths: &[PathBuf], consumed: &Arc<AtomicU64>) -> Result<Merged<Box<dyn Read + Send>>> {
    let mut files = Vec::with_capacity(paths.len());
    for path in paths {
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| format!("cannot open the trace {name}"))?;
        let counted = Counted { stream: file, consumed: Arc::clone(consumed) };
        let (_, decoded) = decompress::decoded(counted, BUFFER_BYTES)
            .with_context(|| format!("cannot read the trace {name}"))?;
        files.push((name, decoded));
    }
    Ok(Merged::new(files)?)
}

impl<R: Read> Merged<R> {
    fn new(files: impl IntoIterator<Item = (String, R)>) -> io::Result<Merged<R>> {
        let source = |(name, file)| Source { name, file, record: Vec::new(), number: 0 };
        let sources: Vec<Source<R>> = files.into_iter().map(source).collect();
        let mut merged =
            Merged { sources, next: BinaryHeap::new(), current: None, order: None, failed: None };
        for index in 0..merged.sources.len() {
            merged.advance(index)?;
        }
        Ok(merged)
    }

    fn advance(&mut self, index: usize) -> io::Result<()> {
        if let Some(at_ns) = self.sources[index].advance(&mut self.order)? {
            self.next.push(Reverse((at_ns, index)));
        }
        Ok(())
    }
}

impl<R: Read> Read for Merged<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let Some((index, returned)) = self.current.take().or_else(|| {
            let Reverse((_, index)) = self.next.pop()?;
            Some((index, 0))
        }) else {
            return self.failed.take().map_or(Ok(0), Err);
        };
        let rest = &self.sources[index].record[returned..];
        let count = rest.len().min(out.len());
        out[..count].copy_from_slice(&rest[..count]);
        if count < rest.len() {
            self.current = Some((index, returned + count));
        } else if let Err(error) = self.advance(index) {
            // The bytes of this call are valid, so the error must wait for the next call.
            self.next.clear();
            self.failed = Some(error);
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
