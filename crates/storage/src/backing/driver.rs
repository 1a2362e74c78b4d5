//! The interface of a kind of backing.
//!
//! A driver that wraps another one passes methods on with `delegate`.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::io::{Io, IoError};
use hob_engine::units::{Instant, IoId};

use super::{
    BackingInfo, ChangeDetector, ChangeMark, Lock, NotShared, Parent, ParentRead, SizeProbe, Status, WaitMax,
};
use crate::ring::{Completion, Gate, Ring};
use crate::token::TokenSpace;

/// The interface of a kind of backing. The module [`backing`](super) has the call order. The
/// methods of [`Backing`](super::Backing) with the same names check their arguments.
pub trait Driver: Send {
    /// Returns the properties of the backing.
    fn info(&self) -> &BackingInfo;
    /// Attaches the backing to the I/O ring (io_uring or a thread pool) of the shard that serves
    /// its disk.
    fn attach(&mut self, ring: &mut Ring, now: Instant, tokens: TokenSpace);
    /// Submits an I/O to this backing.
    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io);
    /// Handles a completion with one of the backing's tokens.
    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion);
    /// Returns the next I/O that has ended, with its result; `None` if there is none.
    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)>;
    /// Returns true if a restarted server may have lost acknowledged writes that no successful
    /// flush covers. Each loss of writes is reported once. Call this method before
    /// [`poll_done`](Self::poll_done): the caller must know of the loss before it handles the
    /// results of requests that were sent before the loss.
    fn take_loss(&mut self) -> bool {
        false
    }
    /// Returns whether a kill of this process would lose acknowledged changes: no flush covers
    /// them, and only this process's memory has them. Returns `None` if the result has not changed
    /// since the last call.
    fn poll_exposure(&mut self) -> Option<bool> {
        None
    }
    /// Returns the time at which to call `handle_timeout`; `None` if no time is planned.
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
    /// Handles the timeout that `poll_timeout` returned.
    fn handle_timeout(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// Queries the allocation of a range of at least one byte.
    fn submit_status(&mut self, ring: &mut Ring, now: Instant, id: u64, offset: u64, len: u64);
    /// Returns the reply to a `submit_status`, with the id of the query; `None` if no reply has
    /// arrived.
    fn poll_status(&mut self) -> Option<(u64, Status)>;
    /// Closes the backing. Waiting I/O fails with `ShuttingDown`. I/O in the kernel ends before the
    /// backing is closed. Submit nothing afterwards. Flush first if acknowledged writes must be
    /// durable.
    fn close(&mut self, ring: &mut Ring);
    /// Returns true if the I/O ring has no operation of the backing, so that the backing can be
    /// dropped.
    fn is_closed(&self) -> bool;
    /// Reads `bytes` from `offset` synchronously, before the backing is attached.
    fn read_before_attach(&mut self, _offset: u64, _bytes: &mut [u8]) -> Result<(), IoError> {
        Err(IoError::Unsupported)
    }
    /// Returns a reader for the attached backing, if it supports one. The reader is used to compare
    /// cached data with the backing while the disk is served. Backings with only one connection
    /// have no such reader.
    fn reader(&self) -> Option<Box<dyn Reader>> {
        None
    }
    /// Returns the time of the last change by any writer; `None` if unknown. Call it after the last
    /// I/O. Compare the result with [`BackingInfo::changed`] at the next opening.
    fn change_mark(&self) -> Option<ChangeMark> {
        None
    }
    /// Returns the backing's change detector, if it has one.
    fn witness(&self) -> Option<ChangeDetector> {
        None
    }
    /// Returns true if the backing was closed and could not store all acknowledged changes that it
    /// had in memory.
    fn has_lost(&self) -> bool {
        false
    }
    /// Returns the id of a writable backing that keeps unflushed changes in the memory of this
    /// process or of its child process, so that a kill of these processes loses them. `None` if
    /// these processes can be killed without loss.
    fn memory_id(&self) -> Option<[u8; 16]> {
        None
    }
    /// Returns the backing's lock, if it has one.
    fn lock(&self) -> Option<Lock> {
        None
    }
    /// Returns the probe of the backing's size, if the size can be read while the disk is served.
    fn size_probe(&self) -> Option<SizeProbe> {
        None
    }
    /// Grows the disk to `size_bytes`, which the [size probe](Self::size_probe) has reported.
    fn grow(&mut self, _size_bytes: u64) {}
    /// For a [handover](super::Backing::handover): records that the peer has the sectors
    /// `first..end` in flash.
    fn peer_has(&mut self, _first: u64, _end: u64) {}
    /// For the backing of a migrating disk, after `attach`: connects the owner or former owner of
    /// the disk as a source of reads. The peer stays connected until
    /// [`leave_peer`](Self::leave_peer).
    fn set_peer(&mut self, _ring: &mut Ring, _now: Instant, _peer: Box<dyn Driver>) {}
    /// For a handover: makes this host the owner. The peer is disconnected, and
    /// [`set_peer`](Self::set_peer) may connect another one.
    fn take_over(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// For a handover: disconnects the peer host.
    fn leave_peer(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// For a handover: returns true if another host is connected as the source of reads.
    fn has_peer(&self) -> bool {
        false
    }
    /// Returns the parent of a clone, or why the clone cannot share its parent's blocks.
    fn parent(&self) -> Result<Option<Parent>, NotShared> {
        Ok(None)
    }
    /// Returns the name of the content of a backing that does not change. Clones use this name for
    /// their [parent](Parent). If the backing has changed, it has a different name when it is
    /// opened again.
    fn constant(&self) -> Option<&str> {
        None
    }
    /// For a clone: returns the length of the range at the disk's start in which the disk can still
    /// have its parent's data, bytes. The length never increases.
    fn common_bytes(&self) -> u64 {
        0
    }
    /// Returns the next read for the parent's disk. Call it after every submit.
    fn poll_parent_read(&mut self) -> Option<ParentRead> {
        None
    }
    /// Handles the end of a read that was sent to the disk of the parent, successful or not.
    fn handle_parent_read(&mut self, _: &mut Ring, _: Instant, _number: u32, _: Result<(), IoError>) {}
    /// Returns the sectors (`first..end`) that the parent's disk served for a read that just
    /// succeeded. Call it once per read.
    fn take_shared(&mut self, _io: IoId) -> Vec<(u64, u64)> {
        Vec::new()
    }
    /// Sets the size of the parent's disk, bytes; `None` if that disk is not available. Before the
    /// first call of this method, the driver sends no read to the parent's disk.
    fn link_parent(&mut self, _parent_bytes: Option<u64>) {}
    /// Sets a gate. Changes of the attached backing begin only while the gate is open. While the
    /// gate is closed, changes wait, and fail after a time limit. Backings that fence other writers
    /// themselves ignore the gate.
    fn set_gate(&mut self, _ring: &mut Ring, _gate: Arc<dyn Gate>) {}
    /// Suspends changes, because another host may be about to write the disk. Cancels changes that
    /// the server has not answered, and sends them again after [`resume`](Self::resume). Submit no
    /// changes before `resume`. Backings that fence other writers, or cannot cancel changes, ignore
    /// the call.
    fn suspend(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// Ends [`suspend`](Self::suspend) if no other host has written the disk: sends the kept
    /// changes again.
    fn resume(&mut self) {}
    /// Returns true if changes that the server may have lost are being sent again, and the server
    /// has not answered all of them.
    fn is_repeating(&self) -> bool {
        false
    }
    /// Cancels changes that the server has not answered. The cancelled changes fail, and are not
    /// sent again as after [`suspend`](Self::suspend).
    fn revoke(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// Changes how long requests wait for a disconnected backing, including requests that already
    /// wait. Backings that do not reconnect by themselves ignore this setting.
    fn set_wait_max(&mut self, _now: Instant, _wait_max: WaitMax) {}
    /// Returns how long requests wait for a disconnected backing; `None` if the driver does not
    /// know.
    fn wait_max(&self) -> Option<Duration> {
        None
    }
    /// Returns true if another host has taken the disk over, and this backing will serve no I/O any
    /// more. If the result is true, this host's cached data of the disk is invalid.
    fn is_lost(&self) -> bool {
        false
    }
    /// Returns the reason why the disk [is lost](Self::is_lost), or `None` if the reason is that
    /// another program has opened it. The text is a sentence without a period.
    fn loss_reason(&self) -> Option<String> {
        None
    }
}

/// Reads a backing synchronously, in addition to the I/O ring that serves it.
pub trait Reader: Send {
    /// Reads bytes of the backing, and waits for them. The range has the same limits as in
    /// [`Backing::read_before_attach`](super::Backing::read_before_attach).
    ///
    /// # Errors
    /// Returns an [`IoError`] of the backing.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError>;
}

/// Implements methods of [`Driver`] that call the same method of the driver in a field. The types
/// of their parameters and results must be in scope.
macro_rules! delegate {
    ($own:ident: $($method:ident)+) => {
        $($crate::backing::driver::delegate! { @$method $own })+
    };
    ($own:ident ref $method:ident() $(-> $Result:ty)?) => {
        fn $method(&self) $(-> $Result)? {
            self.$own.$method()
        }
    };
    ($own:ident mut $method:ident($($argument:ident: $Argument:ty),*) $(-> $Result:ty)?) => {
        fn $method(&mut self, $($argument: $Argument),*) $(-> $Result)? {
            self.$own.$method($($argument),*)
        }
    };
    (@info $own:ident) => { delegate! { $own ref info() -> &BackingInfo } };
    (@attach $own:ident) => {
        delegate! { $own mut attach(ring: &mut Ring, now: Instant, tokens: TokenSpace) }
    };
    (@submit $own:ident) => { delegate! { $own mut submit(ring: &mut Ring, now: Instant, io: &Io) } };
    (@handle_completion $own:ident) => {
        delegate! { $own mut handle_completion(ring: &mut Ring, now: Instant, completion: Completion) }
    };
    (@poll_done $own:ident) => {
        delegate! { $own mut poll_done() -> Option<(IoId, Result<(), IoError>)> }
    };
    (@take_loss $own:ident) => { delegate! { $own mut take_loss() -> bool } };
    (@poll_exposure $own:ident) => { delegate! { $own mut poll_exposure() -> Option<bool> } };
    (@poll_timeout $own:ident) => { delegate! { $own ref poll_timeout() -> Option<Instant> } };
    (@handle_timeout $own:ident) => {
        delegate! { $own mut handle_timeout(ring: &mut Ring, now: Instant) }
    };
    (@submit_status $own:ident) => {
        delegate! { $own mut submit_status(ring: &mut Ring, now: Instant, id: u64, offset: u64, len: u64) }
    };
    (@poll_status $own:ident) => { delegate! { $own mut poll_status() -> Option<(u64, Status)> } };
    (@close $own:ident) => { delegate! { $own mut close(ring: &mut Ring) } };
    (@is_closed $own:ident) => { delegate! { $own ref is_closed() -> bool } };
    (@read_before_attach $own:ident) => {
        delegate! { $own mut read_before_attach(offset: u64, bytes: &mut [u8]) -> Result<(), IoError> }
    };
    (@reader $own:ident) => { delegate! { $own ref reader() -> Option<Box<dyn Reader>> } };
    (@change_mark $own:ident) => { delegate! { $own ref change_mark() -> Option<ChangeMark> } };
    (@witness $own:ident) => { delegate! { $own ref witness() -> Option<ChangeDetector> } };
    (@has_lost $own:ident) => { delegate! { $own ref has_lost() -> bool } };
    (@memory_id $own:ident) => { delegate! { $own ref memory_id() -> Option<[u8; 16]> } };
    (@lock $own:ident) => { delegate! { $own ref lock() -> Option<Lock> } };
    (@size_probe $own:ident) => { delegate! { $own ref size_probe() -> Option<SizeProbe> } };
    (@grow $own:ident) => { delegate! { $own mut grow(size_bytes: u64) } };
    (@constant $own:ident) => { delegate! { $own ref constant() -> Option<&str> } };
    (@common_bytes $own:ident) => { delegate! { $own ref common_bytes() -> u64 } };
    (@set_gate $own:ident) => { delegate! { $own mut set_gate(ring: &mut Ring, gate: Arc<dyn Gate>) } };
    (@suspend $own:ident) => { delegate! { $own mut suspend(ring: &mut Ring, now: Instant) } };
    (@is_repeating $own:ident) => { delegate! { $own ref is_repeating() -> bool } };
    (@resume $own:ident) => { delegate! { $own mut resume() } };
    (@revoke $own:ident) => { delegate! { $own mut revoke(ring: &mut Ring, now: Instant) } };
    (@set_wait_max $own:ident) => { delegate! { $own mut set_wait_max(now: Instant, wait_max: WaitMax) } };
    (@wait_max $own:ident) => { delegate! { $own ref wait_max() -> Option<Duration> } };
    (@is_lost $own:ident) => { delegate! { $own ref is_lost() -> bool } };
    (@loss_reason $own:ident) => { delegate! { $own ref loss_reason() -> Option<String> } };
}
pub(super) use delegate;
