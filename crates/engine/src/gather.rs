//! A list of bytes to send in order: protocol headers interleaved with parts of payload buffers.
//!
//! Front ends and the NBD backing build the list, and the I/O ring sends it. No payload is copied.

use crate::io::BufferSlice;

/// One contiguous part of a [`Gather`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatherPart {
    /// Bytes of [`Gather::head`] from `start` to `end`.
    Head {
        /// Position of the first byte in [`Gather::head`].
        start: u32,
        /// Position after the last byte in [`Gather::head`].
        end: u32,
    },
    /// Payload, sent from the buffer itself.
    Payload(BufferSlice),
}

impl GatherPart {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match self {
            GatherPart::Head { start, end } => (end - start) as usize,
            GatherPart::Payload(slice) => slice.len as usize,
        }
    }

    /// Returns true if there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An ordered list of header bytes and payload slices.
#[derive(Clone, Debug, Default)]
pub struct Gather {
    /// All header bytes, concatenated.
    pub head: Vec<u8>,
    /// The parts to send, in order.
    pub pieces: Vec<GatherPart>,
}

impl Gather {
    /// Lets `write` append header bytes, which become the next part. Adjacent header parts are
    /// joined.
    pub fn push_head(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.head.len() as u32;
        write(&mut self.head);
        let end = self.head.len() as u32;
        match self.pieces.last_mut() {
            Some(GatherPart::Head { end: last, .. }) if *last == start => *last = end,
            _ if start == end => {}
            _ => self.pieces.push(GatherPart::Head { start, end }),
        }
    }

    /// Appends payload.
    pub fn push_payload(&mut self, slice: BufferSlice) {
        if slice.len > 0 {
            self.pieces.push(GatherPart::Payload(slice));
        }
    }

    /// Returns the total length in bytes.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(GatherPart::len).sum()
    }

    /// Returns true if there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Removes all parts and keeps the memory.
    pub fn clear(&mut self) {
        self.head.clear();
        self.pieces.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::BufferId;

    #[test]
    fn heads_merge_and_payload_separates_them() {
        let mut gather = Gather::default();
        gather.push_head(|head| head.extend_from_slice(b"ab"));
        gather.push_head(|head| head.extend_from_slice(b"c"));
        gather.push_payload(BufferSlice { id: BufferId(1), offset: 4, len: 10 });
        gather.push_head(|head| head.push(b'd'));
        gather.push_head(|_| {});
        assert_eq!(gather.pieces.len(), 3);
        assert_eq!(gather.len(), 14);
        assert_eq!(gather.pieces[0], GatherPart::Head { start: 0, end: 3 });
    }
}
