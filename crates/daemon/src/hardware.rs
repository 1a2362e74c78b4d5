//! Re-exports the types and constants of the storage crate that several modules of this crate use.

pub(crate) use hob_storage::area::Area;
pub(crate) use hob_storage::backing::{
    Backing, BackingInfo, BackingOptions, ChangeDetector, ChangeMark, ChangeTimes, ChangeToken, Condition,
    Lock, Monitor, Reader, SizeProbe,
};
pub(crate) use hob_storage::buffers::{ARENA_BYTES_DEFAULT, ARENA_BYTES_MAX};
pub(crate) use hob_storage::flash::DeviceCounts;
pub(crate) use hob_storage::pool::{FlashFile as FlashDevice, LocalFlash};
pub(crate) use hob_storage::ring::RingKind;
pub(crate) use hob_storage::{FileNumber, file_number};
