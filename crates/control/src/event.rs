//! Events in the life of a VM that concern the caches of its disks.
//!
//! The table [`EVENTS`] defines their names and effects. The daemon, the command line and the docs
//! use it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An event in the life of a VM. The variants are the rows of [`EVENTS`], in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LifeEvent {
    /// The VM is stopped, and its memory is saved.
    Suspend,
    /// The VM resumes.
    Resume,
    /// A snapshot of the VM's disk is about to be taken.
    SnapshotCreate,
    /// The VM's disk was reverted to a snapshot.
    SnapshotRevert,
    /// A snapshot was merged into the VM's disk.
    SnapshotConsolidate,
    /// The VM was switched off and on.
    ColdRestart,
}

/// Effect of a VM event on a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The cache does not change.
    Nothing,
    /// Dirty data is written to the backing; clean data stays.
    Drain,
    /// All cached data is dropped. The cache must have no dirty data.
    Empty,
    /// All cached data is discarded, dirty data too.
    Discard,
}

/// A row of [`EVENTS`].
#[derive(Debug)]
pub struct EventInfo {
    /// The event.
    pub event: LifeEvent,
    /// Name of the event.
    pub name: &'static str,
    /// Effect on a volatile cache (preset `vfrc`).
    pub of_volatile: Effect,
    /// Effect on a persistent cache (all other presets).
    pub of_persistent: Effect,
    /// One sentence: when to report the event to hob, and why the event has its effect.
    pub sentence: &'static str,
}

macro_rules! events {
    ($($event:ident $name:literal $volatile:ident $persistent:ident $sentence:literal)*) => {
        /// All VM events, indexed by `LifeEvent as usize`.
        pub const EVENTS: &[EventInfo] = &[$(EventInfo {
            event: LifeEvent::$event,
            name: $name,
            of_volatile: Effect::$volatile,
            of_persistent: Effect::$persistent,
            sentence: $sentence,
        }),*];
    };
}

events! {
    Suspend "suspend" Nothing Drain
        "after the VM is stopped: another host may resume it from the backing"
    Resume "resume" Empty Nothing
        "before the VM continues: vFRC begins empty, a persistent cache is still valid"
    SnapshotCreate "snapshot-create" Nothing Drain
        "while the VM is frozen, before the snapshot: the backing must have all data"
    SnapshotRevert "snapshot-revert" Empty Discard
        "after the backing is reverted, before the VM continues: all cached data is outdated; drain the \
         disk before the revert (below)"
    SnapshotConsolidate "snapshot-consolidate" Empty Drain
        "before the merge: the backing must have all data; vFRC begins empty"
    ColdRestart "cold-restart" Empty Nothing
        "while the VM is off: vFRC begins empty, a persistent cache is warm for the boot"
}

impl LifeEvent {
    /// Returns the event's row of [`EVENTS`].
    pub fn info(self) -> &'static EventInfo {
        &EVENTS[self as usize]
    }

    /// Returns the event with this name.
    pub fn from_name(name: &str) -> Option<LifeEvent> {
        EVENTS.iter().find(|row| row.name == name).map(|row| row.event)
    }
}

impl Effect {
    /// Returns the effect in words, for the docs.
    pub fn words(self) -> &'static str {
        match self {
            Effect::Nothing => "unchanged",
            Effect::Drain => "drained; stays warm",
            Effect::Empty => "emptied",
            Effect::Discard => "emptied; dirty data is lost",
        }
    }
}

/// `POST /v1/disks/{disk}/events`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EventReport {
    /// The event.
    pub event: LifeEvent,
    /// Discard dirty data if the event requires it. Without this flag the daemon refuses the event
    /// while the cache is dirty.
    #[serde(default)]
    pub discard_dirty: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_has_its_row_and_its_name_in_json() {
        for (index, row) in EVENTS.iter().enumerate() {
            assert_eq!(row.event as usize, index);
            assert_eq!(LifeEvent::from_name(row.name), Some(row.event));
            assert_eq!(serde_json::to_string(&row.event).unwrap(), format!("\"{}\"", row.name));
        }
        assert_eq!(LifeEvent::from_name("birth"), None);
    }
}
