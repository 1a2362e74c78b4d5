//! The hand-over of a disk with its cache from one host to another: the two state machines that decide it
//! (docs/decisions/0013).
//!
//! [`Source`] runs on the host that has the disk, [`Destination`] on the one that will get it. The source
//! calls, the destination answers; calls and answers may be lost, repeated, late and reordered. Both
//! request acts of their owner ([`Source::poll_act`], [`Destination::poll_act`]) and get the results. Each
//! side trusts only what the other host has said. A host says something on which the other relies only
//! after it is durable.
//!
//! [`Puller`] selects what the destination reads from the source next, [`heat`] is the list that it starts
//! with, and [`LeftBehind`] is what it may still read there after the hand-over.

mod destination;
pub mod heat;
mod left_behind;
mod puller;
mod source;
#[cfg(test)]
mod tests;

pub use destination::{Destination, DestinationAct};
pub use left_behind::LeftBehind;
pub use puller::{Pull, Pulled, Puller};
pub use source::{Order, Phase, Source, SourceAct, SourceOptions};

/// One attempt to hand a disk over. Later attempts of the same owner are greater, and so are those of later
/// owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session {
    /// The owner's generation: it grows by one with each hand-over.
    pub generation: u64,
    /// Number of the owner's attempt.
    pub attempt: u32,
}

/// A host's durable record of a disk. Without a record, the host has no such disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// This host owns it.
    Owner {
        /// Number of hand-overs so far.
        generation: u64,
        /// Number of attempts to hand it over so far.
        attempts: u32,
    },
    /// This host owns it and is handing it over: a restart begins the next attempt.
    Leaving(Session),
    /// It was handed over, or may have been: this host never serves it again by itself.
    Away {
        /// The session; the other host has the next generation.
        session: Session,
        /// The other host confirmed that it has it.
        taken: bool,
    },
    /// It will arrive: this host serves it if the session's owner hands it over, and trusts nothing in
    /// flash after a restart.
    Awaiting(Session),
    /// It was awaited in this session, and did not arrive.
    Gone(Session),
}

impl Record {
    /// Returns the generation of the disk that the record is about.
    pub fn generation(self) -> u64 {
        match self {
            Record::Owner { generation, .. } => generation,
            Record::Leaving(session)
            | Record::Away { session, .. }
            | Record::Awaiting(session)
            | Record::Gone(session) => session.generation,
        }
    }
}

/// A call of the source to the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Prepare for the disk.
    Arrive,
    /// Invalidate cached data of these ranges of sectors, `first..end`: they were changed.
    Changed(Vec<(u64, u64)>),
    /// The disk is handed over.
    Yours,
    /// The hand-over is cancelled.
    Cancel,
    /// Report the progress.
    Look,
}

/// A call in transit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The attempt.
    pub session: Session,
    /// The call.
    pub call: Call,
}

/// Progress of the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// A change waits for the disk: its guest runs there now.
    pub wants: bool,
    /// Everything that it intends to pull, for now, is pulled.
    pub done: bool,
    /// Bytes pulled.
    pub pulled_bytes: u64,
    /// Bytes left to pull.
    pub left_bytes: u64,
}

/// Why the destination refuses a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It awaits the disk in another session, or not at all.
    NotAwaited,
    /// It owns the disk, with this generation; or it knows of an owner with a later generation than the
    /// caller's.
    Owner(u64),
    /// An act failed; the same call may succeed later.
    Failed,
    /// It has another disk of that name, or cannot take this one. A repetition is pointless.
    Never,
}

/// The destination's answer.
pub type Answer = Result<View, Refusal>;

/// Identifies a call or an act of one state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);
