//! Traces: what a disk was asked, and when.

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Bytes are asked for.
    Read,
    /// Bytes are handed over.
    Write,
    /// The range's content is no longer wanted, or becomes zeroes.
    Discard,
    /// What was written before is made durable. Offset and length are 0.
    Flush,
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// Nanoseconds since the trace's start.
    pub at_ns: u64,
    /// First byte on the disk; below 2⁶³.
    pub offset: u64,
    /// Bytes; 1 or more, but for a flush.
    pub len: u32,
    /// What it does.
    pub op: Op,
    /// Which of the trace's disks it went to; 0 when there is only one.
    pub disk: u16,
}
