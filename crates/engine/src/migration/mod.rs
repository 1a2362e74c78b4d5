//! The hand-over of a disk from one host to another, with its cache: the two machines that decide it (docs/decisions/0013).
//!
//! [`Source`] is with the host that has the disk, [`Destination`] with the one that is to have it. The source calls, the destination
//! answers; calls and answers may be lost, repeated, late and out of order. Both ask their owner to act ([`Source::poll_act`],
//! [`Destination::poll_act`]) and are told how that ended. Nothing is believed of the other host but what it says, and what a host says
//! it has made durable before, where the other relies on it.
//!
//! [`Puller`] says what the destination reads from the source next, [`heat`] is the list that it begins with, [`LeftBehind`] says what it may
//! still read there after the hand-over.

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

/// One attempt to hand a disk over. Later ones of the same owner are greater, and so are those of later owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session {
    /// The owner's generation: it grows by one with each hand-over.
    pub generation: u64,
    /// Counts the owner's attempts.
    pub attempt: u32,
}

/// What a host's state says of a disk, durably. A host of which it says nothing has no such disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// It is this host's.
    Owner {
        /// Since so many hand-overs.
        generation: u64,
        /// Attempts to hand it over so far.
        attempts: u32,
    },
    /// It is this host's, and on its way: a restart begins the next attempt.
    Leaving(Session),
    /// It was handed over, or may have been: this host never serves it again by itself.
    Away {
        /// In this session; the other host has the generation after it.
        session: Session,
        /// The other host said that it has it.
        taken: bool,
    },
    /// It is to come: this host serves it if the session's owner says so, and believes nothing that flash holds of it after a restart.
    Awaiting(Session),
    /// It was awaited in this session, and did not come.
    Gone(Session),
}

impl Record {
    /// Of which generation of the disk it speaks.
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

/// What the source asks of the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Await the disk.
    Arrive,
    /// Forget what is cached of these ranges of sectors, `first..end`: they were changed.
    Changed(Vec<(u64, u64)>),
    /// The disk is yours.
    Yours,
    /// The disk does not come.
    Cancel,
    /// Say how far you are.
    Look,
}

/// A call on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Of which attempt.
    pub session: Session,
    /// What is asked.
    pub call: Call,
}

/// How far the destination is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// A change waits for the disk: its machine runs there now.
    pub wants: bool,
    /// It has pulled everything it is going to pull, for now.
    pub done: bool,
    /// Bytes it has pulled.
    pub pulled_bytes: u64,
    /// Bytes that it still has to pull.
    pub left_bytes: u64,
}

/// Why the destination does not do what it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It awaits the disk in another session, or not at all.
    NotAwaited,
    /// It owns the disk, of this generation; or it knows of an owner of it, who is further than the caller.
    Owner(u64),
    /// It could not; the same call may succeed later.
    Failed,
    /// It has a disk of that name of its own, or cannot have this one. Nothing will change that.
    Never,
}

/// What the destination answers.
pub type Answer = Result<View, Refusal>;

/// Names a call, or an act, among those of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);
