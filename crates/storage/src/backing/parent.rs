//! Functions of [`Backing`] for clones. A clone reads data that was never written in it from its
//! parent, another disk of this host. The module [`overlay`](super::overlay) implements the
//! functions.

use hob_engine::io::BufferSlice;
use hob_engine::units::IoId;

use super::overlay::Overlay;
use super::{Backing, Format, ImageFile, OwnMap};

/// The parent of a clone. The parent's data is visible where the clone was not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Address that opens the parent read-only.
    pub spec: String,
    /// Format of the parent, if its address is a path.
    pub format: Option<Format>,
    /// Files below the parent, if its address is a path.
    pub files: Vec<ImageFile>,
    /// Name of the parent's content ([`Driver::constant`](super::Driver::constant)).
    pub constant: String,
    /// Objects that are the clone's own.
    pub own: OwnMap,
}

/// Why a clone does not share its parent's blocks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotShared {
    /// The backing has no parent, or its parent must not be shared.
    #[error("{0}")]
    Unsuitable(String),
    /// A server or filesystem failed or did not answer in time. A later attempt may succeed.
    #[error("{0}")]
    Unknown(String),
}

/// A part of a read, in whole sectors, for the parent's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParentRead {
    /// Number of the read, for [`Driver::handle_parent_read`](super::Driver::handle_parent_read).
    pub number: u32,
    /// The clone's read of which this is a part.
    pub io: IoId,
    /// First byte of the part, the same on parent and clone.
    pub offset: u64,
    /// Length of the part, bytes.
    pub len: u64,
    /// Buffer for the data that is read.
    pub slice: BufferSlice,
}

impl Backing {
    /// Finds out which data is the clone's own and which is its parent's. Afterwards parent data is
    /// read from the parent's disk once it is [linked](super::Driver::link_parent). Returns the
    /// parent, or the reason why nothing is shared. In the second case the backing is unchanged.
    /// The disk must be open for its only writer, or have no writer. May take seconds, so do not
    /// call it on the shard's thread.
    pub fn share_parent(self) -> (Backing, Result<Parent, NotShared>) {
        assert!(self.tokens.is_none(), "it is not attached yet");
        match self.driver.parent() {
            Ok(Some(parent)) => {
                let overlay = Overlay::new(self.driver, parent.own.clone());
                (Backing::monitored(Box::new(overlay), self.monitor), Ok(parent))
            }
            Ok(None) => (self, Err(NotShared::Unsuitable("it has no parent".to_owned()))),
            Err(why) => (self, Err(why)),
        }
    }
}
