//! The stream of `GET /v1/disks/{disk}/trace`: frames of records, until the disk is removed or the
//! client disconnects.
//!
//! All numbers are little-endian. A frame is a head of 24 bytes and `count` records of 24 bytes
//! each:
//!
//! | offset | head | record |
//! |---|---|---|
//! | 0 | u64 nanoseconds for which the recording has lasted | u64 nanoseconds from its start to the request |
//! | 8 | u64 requests dropped so far | u64 first byte |
//! | 16 | u32 count of the records that follow | u32 bytes |
//! | 20 | u8 1 for the last frame of all, else 0 | u8 0 read, 1 write, 2 discard or zeroes, 3 flush |
//! | 21 | zeroes | zeroes |
//!
//! Frames are sent many times a second, with or without records. A frame that reports a duration of
//! t is sent after the records of all requests that arrived before t, except dropped requests.

/// Size in bytes of a frame's head, and also of a record.
const UNIT_BYTES: usize = 24;

/// Largest number of records in one frame.
pub const FRAME_RECORDS_MAX: usize = 16 << 10;

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TraceOp {
    /// The guest read data.
    Read,
    /// The guest wrote data.
    Write,
    /// The guest discarded a range, or wrote zeroes to it.
    Discard,
    /// The guest flushed the disk. A flush has no range.
    Flush,
}

impl TraceOp {
    /// Returns the operation's number in the stream.
    pub const fn to_wire(self) -> u8 {
        match self {
            TraceOp::Read => 0,
            TraceOp::Write => 1,
            TraceOp::Discard => 2,
            TraceOp::Flush => 3,
        }
    }

    /// Returns the operation with this number.
    pub const fn from_wire(number: u8) -> Option<TraceOp> {
        match number {
            0 => Some(TraceOp::Read),
            1 => Some(TraceOp::Write),
            2 => Some(TraceOp::Discard),
            3 => Some(TraceOp::Flush),
            _ => None,
        }
    }
}

/// One recorded request of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceRecord {
    /// Arrival time of the request, nanoseconds from the start of the recording.
    pub at_ns: u64,
    /// First byte of the request; 0 for a flush.
    pub offset: u64,
    /// Length of the request, bytes; 0 for a flush only.
    pub len: u32,
    /// Kind of request.
    pub op: TraceOp,
}

/// A frame of the stream: records of requests, and the duration of the recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceFrame {
    /// Duration of the recording so far.
    pub elapsed_ns: u64,
    /// Number of requests since the start of the recording that are missing, because the client was
    /// too slow.
    pub dropped: u64,
    /// Whether the disk was removed and this frame is the last.
    pub is_last: bool,
    /// Requests since the previous frame, in order of arrival.
    pub records: Vec<TraceRecord>,
}

impl TraceFrame {
    /// Encodes the frame, which has at most [`FRAME_RECORDS_MAX`] records.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.records.len() <= FRAME_RECORDS_MAX, "a frame of {} records", self.records.len());
        let mut bytes = Vec::with_capacity(UNIT_BYTES * (1 + self.records.len()));
        let mut unit = |a: u64, b: u64, c: u32, d: u8| {
            bytes.extend_from_slice(&a.to_le_bytes());
            bytes.extend_from_slice(&b.to_le_bytes());
            bytes.extend_from_slice(&c.to_le_bytes());
            bytes.extend_from_slice(&[d, 0, 0, 0]);
        };
        unit(self.elapsed_ns, self.dropped, self.records.len() as u32, u8::from(self.is_last));
        for record in &self.records {
            unit(record.at_ns, record.offset, record.len, record.op.to_wire());
        }
        bytes
    }
}

/// The received bytes are not a valid trace stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trace stream is malformed: it has {0}")]
pub struct TraceStreamError(&'static str);

/// Decodes bytes into frames. Call [`handle_input`](Self::handle_input) with received bytes, then
/// [`poll_frame`](Self::poll_frame) until it returns `None`.
#[derive(Debug, Default)]
pub struct TraceDecoder {
    held: Vec<u8>,
    /// Number of bytes at the start of `held` that were decoded. `held` contains the bytes received
    /// so far.
    used: usize,
}

impl TraceDecoder {
    /// Adds received bytes to the decoder.
    pub fn handle_input(&mut self, bytes: &[u8]) {
        self.held.drain(..std::mem::take(&mut self.used));
        self.held.extend_from_slice(bytes);
    }

    /// Returns the next complete frame.
    ///
    /// # Errors
    /// Returns an error if the received bytes are not a trace stream.
    pub fn poll_frame(&mut self) -> Result<Option<TraceFrame>, TraceStreamError> {
        let Some((head, rest)) = self.held[self.used..].split_first_chunk::<UNIT_BYTES>() else {
            return Ok(None);
        };
        let (elapsed_ns, dropped, count, end) = parts(head)?;
        let count = count as usize;
        if count > FRAME_RECORDS_MAX {
            return Err(TraceStreamError("a frame that is too long"));
        }
        if end > 1 {
            return Err(TraceStreamError("an unknown frame type"));
        }
        let Some(units) = rest.get(..count * UNIT_BYTES) else { return Ok(None) };
        let mut records = Vec::with_capacity(count);
        for unit in units.as_chunks::<UNIT_BYTES>().0 {
            let (at_ns, offset, len, op) = parts(unit)?;
            let op = TraceOp::from_wire(op).ok_or(TraceStreamError("an unknown operation"))?;
            records.push(TraceRecord { at_ns, offset, len, op });
        }
        self.used += UNIT_BYTES * (1 + count);
        Ok(Some(TraceFrame { elapsed_ns, dropped, is_last: end == 1, records }))
    }
}

fn parts(unit: &[u8; UNIT_BYTES]) -> Result<(u64, u64, u32, u8), TraceStreamError> {
    let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| unit[at + i]));
    let short = u32::from_le_bytes(std::array::from_fn(|i| unit[16 + i]));
    if unit[21..] != [0; 3] {
        return Err(TraceStreamError("reserved bytes that are not zero"));
    }
    Ok((long(0), long(8), short, unit[20]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Vec<TraceFrame> {
        let record = |i: u64, op| TraceRecord { at_ns: i * 1000, offset: i << 40, len: 512 << i, op };
        let flush = TraceRecord { at_ns: 9, offset: 0, len: 0, op: TraceOp::Flush };
        vec![
            TraceFrame::default(),
            TraceFrame {
                elapsed_ns: 77,
                dropped: 3,
                is_last: false,
                records: vec![
                    record(1, TraceOp::Read),
                    record(2, TraceOp::Write),
                    record(3, TraceOp::Discard),
                    flush,
                ],
            },
            TraceFrame { elapsed_ns: u64::MAX, dropped: u64::MAX, is_last: true, records: vec![] },
        ]
    }

    #[test]
    fn frames_come_back_however_they_are_cut() {
        let bytes: Vec<u8> = frames().iter().flat_map(TraceFrame::encode).collect();
        for cut in 1..=bytes.len() {
            let mut decoder = TraceDecoder::default();
            let mut found = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.handle_input(piece);
                while let Some(frame) = decoder.poll_frame().unwrap() {
                    found.push(frame);
                }
            }
            assert_eq!(found, frames(), "cut into {cut}");
        }
    }

    #[test]
    fn the_layout_is_as_written() {
        let record = TraceRecord { at_ns: 1, offset: 0x0203, len: 0x0405, op: TraceOp::Discard };
        let frame = TraceFrame { elapsed_ns: 6, dropped: 7, is_last: true, records: vec![record] };
        let mut expected = vec![0; 48];
        for (at, byte) in
            [(0, 6), (8, 7), (16, 1), (20, 1), (24, 1), (32, 3), (33, 2), (40, 5), (41, 4), (44, 2)]
        {
            expected[at] = byte;
        }
        assert_eq!(frame.encode(), expected);
    }

    #[test]
    fn an_invalid_stream_is_an_error() {
        let good = frames()[1].encode();
        for (at, byte) in [(18, 1), (20, 2), (21, 1), (44, 4), (47, 1)] {
            let mut bad = good.clone();
            bad[at] = byte;
            let mut decoder = TraceDecoder::default();
            decoder.handle_input(&bad);
            assert!(decoder.poll_frame().is_err(), "byte {at} set to {byte}");
        }
    }
}
