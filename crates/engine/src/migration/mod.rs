//! Hand-over of a disk with its cache from one host to another: the state machines of the source
//! and the destination (docs/decisions/0013-migration.md).
//!
//! [`Source`] runs on the host that has the disk, [`Destination`] on the host that will get it. The
//! source calls, and the destination answers. Calls and answers may be lost, repeated, late and
//! reordered. A *session* is one attempt to hand the disk over. Each call names its session, and
//! the destination refuses calls of earlier sessions. Both state machines request actions from
//! their caller, the daemon ([`Source::poll_act`], [`Destination::poll_act`]), and get the results.
//! Each host relies only on facts that the other host has reported, and reports a fact only after
//! it is durable.
//!
//! [`Puller`] selects the data that the destination reads from the source next. [`heat`] is the
//! list of blocks, hottest first, that [`Puller`] starts with. [`RemainingRanges`] is the list of
//! the source's cached data that the destination may still read from the source after the
//! hand-over.

mod destination;
pub mod heat;
mod puller;
mod remaining_ranges;
mod source;
#[cfg(test)]
mod tests;

pub use destination::{Destination, DestinationAct};
pub use puller::{Pull, Pulled, Puller};
pub use remaining_ranges::RemainingRanges;
pub use source::{Order, Phase, Source, SourceAct, SourceOptions};

/// One attempt to hand a disk over. Sessions are ordered: a later attempt of the same owner is
/// greater, and every attempt of a later owner is greater too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session {
    /// Generation of the disk's owner, which grows by one with each hand-over.
    pub generation: u64,
    /// Number of the attempt of the disk's owner to hand the disk over.
    pub attempt: u32,
}

/// A host's durable record of a disk. A host without a record of a disk does not have the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// This host owns the disk.
    Owner {
        /// Number of hand-overs so far.
        generation: u64,
        /// Number of attempts to hand the disk over so far.
        attempts: u32,
    },
    /// This host owns the disk and is handing it over. After a restart, the next attempt begins.
    Leaving(Session),
    /// The disk was handed over, or may have been, and this host never serves it again by itself.
    Away {
        /// The session of the hand-over. The other host owns the disk with the next generation.
        session: Session,
        /// True if the other host confirmed that it has the disk.
        taken: bool,
    },
    /// The disk will arrive. This host serves the disk if the session's owner hands it over. If the
    /// daemon restarts in this state, it adds the disk again with an empty cache, and does not use
    /// data that it pulled before the restart.
    Awaiting(Session),
    /// The disk did not arrive in this session.
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

/// A call that the source sends to the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Prepare for the arrival of the disk.
    Arrive,
    /// Invalidate cached data of these ranges of sectors, `first..end`, because the source changed
    /// them.
    Changed(Vec<(u64, u64)>),
    /// The disk is handed over.
    Yours,
    /// The hand-over is cancelled.
    Cancel,
    /// Report the progress of the destination ([`View`]). Changes nothing.
    Look,
}

/// A call that the source sends to the destination, with its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The attempt to hand the disk over that the call is part of.
    pub session: Session,
    /// The call.
    pub call: Call,
}

/// Progress of the destination, as reported to the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// True if a write or other change of the guest waits at the destination, because the guest
    /// runs there now.
    pub wants: bool,
    /// True if the destination has pulled all data that it currently needs.
    pub done: bool,
    /// Number of bytes that the destination has pulled.
    pub pulled_bytes: u64,
    /// Number of bytes left to pull.
    pub left_bytes: u64,
}

/// Reason why the destination refuses a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The destination awaits the disk in another session, or not at all.
    NotAwaited,
    /// The destination owns the disk, with this generation. Or the destination has a record of an
    /// owner with a later generation than the source's.
    Owner(u64),
    /// An action of the destination failed; the same call may succeed later.
    Failed,
    /// The destination has another disk of that name, or cannot take this one. The source need not
    /// send the call again.
    Never,
}

/// The destination's answer to a call.
pub type Answer = Result<View, Refusal>;

/// Identifies a call of the source to the destination, or an action that one of the two state
/// machines requests of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);
