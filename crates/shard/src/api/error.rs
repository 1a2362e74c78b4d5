//! Errors of calls to shards, with their messages.

use hob_engine::command::CommandError;

/// Why a shard did not execute a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// The engine refused the command and changed nothing.
    #[error("{}", explain_error(*.0))]
    Command(CommandError),
    /// The shard could not execute the call. The text says why.
    #[error("{0}")]
    Unusable(String),
    /// The shard did not answer in time. A change continues in the background.
    #[error("the shard did not finish in time; the change continues in the background")]
    Busy,
    /// The shard's thread has ended.
    #[error("the thread that serves this disk has ended")]
    Gone,
}

fn explain_error(error: CommandError) -> &'static str {
    match error {
        CommandError::NoSuchDisk => "the shard does not know this disk",
        CommandError::DiskExists => "the shard has this disk already",
        CommandError::NoCache => "the disk has no cache",
        CommandError::CacheExists => "the disk has a cache already",
        CommandError::Removing => "the disk is being removed",
        CommandError::TooSmall => "a cache must have at least one segment",
        CommandError::Dirty => {
            "the cache has dirty data: drain it with 'hob drain', or discard the data with 'hob \
            cache discard-dirty'"
        }
        CommandError::NoJournal => {
            "the cache has no journal, which this change needs; make the cache persistent first"
        }
        CommandError::Lost => {
            "some of the dirty data cannot be read from flash; the rest is on the backing. Discard \
            the unreadable data with 'hob cache discard-dirty'"
        }
        CommandError::BackingFailed => "the backing cannot be flushed; try again when it works",
        CommandError::WrongRole => "the disk is being handed over to another host, or another host owns it",
        CommandError::Shrinks => "a disk cannot shrink",
        CommandError::Recovering => "the cache is being recovered; try again when it is recovered",
        CommandError::NoSuchBitmap => "the disk has no bitmap of that name",
        CommandError::BitmapExists => "the disk has a bitmap of that name already",
        CommandError::BitmapFrozen => "the bitmap is frozen: it does not record changes",
        CommandError::Stopped => {
            "the operation was stopped before its end; repeat the command to start it again"
        }
        CommandError::JournalFailed => {
            "the journal of the cache cannot be written; 'hob pool show' shows which device fails"
        }
        CommandError::Unworkable => {
            "these settings do not fit together: a cache block is a power of two from 4K to 1M and \
            at most a segment, and a disk or cache has less than 2^32 blocks; use a larger block"
        }
    }
}
