//! Clones and their parents: what the caller sees of [`overlay`](super::overlay).

use hob_engine::io::{BufferSlice, IoError};
use hob_engine::units::{Instant, IoId};

use super::overlay::Overlay;
use super::{Backing, OwnMap};
use crate::ring::Ring;

/// What a backing shows where nothing was written to itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// What opens it, read-only.
    pub spec: String,
    /// Its [name for ever](Backing::constant).
    pub constant: String,
    /// What of the backing is its own.
    pub own: OwnMap,
}

/// A part of a read that the parent's disk is to serve: whole sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParentRead {
    /// Its name for [`Backing::handle_parent_read`].
    pub number: u32,
    /// The read.
    pub io: IoId,
    /// First byte on the parent, and on the clone.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where they are to be.
    pub slice: BufferSlice,
}

impl Backing {
    /// Looks what of it is its own and what its parent's, and reads the latter from the parent's disk once that is
    /// [linked](Self::link_parent). Says what the parent is, or why nothing is shared; then it is as it was. Takes its time; not
    /// for the shard's thread. It must be open for its only writer, or be one that nobody writes.
    pub fn share_parent(self) -> (Backing, Result<Parent, String>) {
        assert!(self.tokens.is_none(), "it is not attached yet");
        match self.driver.parent() {
            Ok(Some(parent)) => {
                let overlay = Overlay::new(self.driver, parent.own.clone());
                (Backing::monitored(Box::new(overlay), self.monitor), Ok(parent))
            }
            Ok(None) => (self, Err("it has no parent".to_owned())),
            Err(why) => (self, Err(why)),
        }
    }

    /// What a backing that can never change is called, by itself and by those whose [parent](Parent) it is.
    pub fn constant(&self) -> Option<&str> {
        self.driver.constant()
    }

    /// The parent's disk is there to be asked, or is not any more; before it was linked nothing is asked of it.
    pub fn link_parent(&mut self, linked: bool) {
        self.driver.link_parent(linked);
    }

    /// A read for the parent's disk. To be asked for after everything that was submitted.
    pub fn poll_parent_read(&mut self) -> Option<ParentRead> {
        self.driver.poll_parent_read()
    }

    /// The parent's disk has put what was asked for where it was to be; or it has not, and never will.
    pub fn handle_parent_read(
        &mut self,
        ring: &mut Ring,
        now: Instant,
        number: u32,
        result: Result<(), IoError>,
    ) {
        self.driver.handle_parent_read(ring, now, number, result);
    }

    /// What of a read that has just ended well the parent's disk has served: sectors, `first..end`. To be asked once.
    pub fn take_shared(&mut self, io: IoId) -> Vec<(u64, u64)> {
        self.driver.take_shared(io)
    }
}
