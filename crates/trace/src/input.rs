//! Input of a parser: lines of limited length, or bytes, with the position in the file.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};

use super::binary::read_whole;
use super::fields::Reason;

const BUFFER_BYTES: usize = 256 << 10;

/// A position in a trace. Lines and records are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A line of a text format.
    Line(u64),
    /// A record of a binary format.
    Record(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(n) => write!(f, "line {n}"),
            Place::Record(n) => write!(f, "record {n}"),
        }
    }
}

/// The decompressed bytes of a trace.
pub(super) struct Input {
    reader: BufReader<Box<dyn Read + Send>>,
    line: Vec<u8>,
    line_bytes_max: usize,
    place: Place,
    /// True if the line that was read last ended with CR. An LF that follows belongs to this line
    /// end.
    after_cr: bool,
}

impl Input {
    pub(super) fn new(reader: Box<dyn Read + Send>, line_bytes_max: usize) -> Input {
        let reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        Input { reader, line: Vec::new(), line_bytes_max, place: Place::Line(0), after_cr: false }
    }

    /// Returns the position of the line or record that was read last.
    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Returns the next line without its line end: LF, CR LF or CR. Returns `None` at the end of
    /// the file.
    pub(super) fn line(&mut self) -> io::Result<Option<Result<&str, Reason>>> {
        let length = match self.read_line()? {
            None => return Ok(None),
            Some(length) => length,
        };
        let Place::Line(number) = self.place else { unreachable!("lines and records are not mixed") };
        self.place = Place::Line(number + 1);
        let text = if length > self.line_bytes_max as u64 {
            Err(format!("the line has {length} bytes, of at most {}", self.line_bytes_max).into())
        } else {
            // Some programs write a byte order mark, which is not part of the first column.
            let line = self.line.strip_prefix(b"\xef\xbb\xbf").filter(|_| number == 0).unwrap_or(&self.line);
            std::str::from_utf8(line).map_err(|_| "the line is no text".into())
        };
        Ok(Some(text))
    }

    /// Reads the start of the next line into `self.line`, up to the limit. Returns the length of
    /// the whole line.
    fn read_line(&mut self) -> io::Result<Option<u64>> {
        self.line.clear();
        let mut length = 0_u64;
        let mut ended = false;
        let mut any = false;
        while !ended {
            let mut chunk = match self.reader.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                chunk => chunk?,
            };
            if chunk.is_empty() {
                return Ok(any.then_some(length));
            }
            let mut used = 0;
            if std::mem::take(&mut self.after_cr) && chunk[0] == b'\n' {
                (chunk, used) = (&chunk[1..], 1);
            }
            let end = chunk.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let part = &chunk[..end.unwrap_or(chunk.len())];
            let room = self.line_bytes_max.saturating_sub(self.line.len());
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            length += part.len() as u64;
            any |= !chunk.is_empty();
            used += part.len();
            if let Some(end) = end {
                self.after_cr = chunk[end] == b'\r';
                used += 1;
                ended = true;
            }
            self.reader.consume(used);
        }
        Ok(Some(length))
    }

    /// Reads until `bytes` is full or the file ends. Returns the number of bytes read. The position
    /// does not change.
    pub(super) fn bytes(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        read_whole(&mut self.reader, bytes)
    }

    /// Skips up to `count` bytes and returns the number of skipped bytes.
    pub(super) fn skip(&mut self, count: u64) -> io::Result<u64> {
        io::copy(&mut (&mut self.reader).take(count), &mut io::sink())
    }

    pub(super) fn next_record(&mut self) {
        self.place = match self.place {
            Place::Line(_) => Place::Record(1),
            Place::Record(n) => Place::Record(n + 1),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that returns one byte at a time, to test every boundary.
    struct Drops(io::Cursor<Vec<u8>>);

    impl Read for Drops {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let room = out.len().min(1);
            self.0.read(&mut out[..room])
        }
    }

    fn lines(bytes: &[u8]) -> Vec<Result<String, String>> {
        let read = |reader: Box<dyn Read + Send>| {
            let mut input = Input::new(reader, 8);
            let mut lines = Vec::new();
            while let Some(line) = input.line().unwrap() {
                lines.push(line.map(str::to_owned).map_err(|reason| reason.into_owned()));
            }
            assert_eq!(input.place(), Place::Line(lines.len() as u64));
            lines
        };
        let whole = read(Box::new(io::Cursor::new(bytes.to_vec())));
        assert_eq!(whole, read(Box::new(Drops(io::Cursor::new(bytes.to_vec())))));
        whole
    }

    #[test]
    fn lines_end_in_every_way() {
        let text = |lines: &[&str]| lines.iter().map(|line| Ok((*line).to_owned())).collect::<Vec<_>>();
        assert_eq!(lines(b"a\nb\r\nc\rd\r\n\r\ne"), text(&["a", "b", "c", "d", "", "e"]));
        assert_eq!(lines(b""), []);
        assert_eq!(lines(b"\n"), text(&[""]));
        assert_eq!(lines(b"\r\n"), text(&[""]));
        assert_eq!(lines(b"\r\r\n\n"), text(&["", "", ""]));
        assert_eq!(lines(b"\xef\xbb\xbfa\n"), text(&["a"]));
    }

    #[test]
    fn long_lines_and_bytes_that_are_no_text_are_bad_and_passed() {
        let found = lines(b"12345678\n123456789\n\xff\xfe\nx\n");
        assert_eq!(found[0], Ok("12345678".into()));
        assert_eq!(found[1], Err("the line has 9 bytes, of at most 8".into()));
        assert_eq!(found[2], Err("the line is no text".into()));
        assert_eq!(found[3], Ok("x".into()));
    }
}
