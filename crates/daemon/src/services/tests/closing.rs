//! The end of a daemon while a backing fails or does not answer.

use super::recovery::{LAZY, prepare, write};
use super::*;
use crate::state::{BootId, JournalSpec};

fn with_journal<T>(bench: &Bench, f: impl FnOnce(&mut JournalSpec) -> T) -> T {
    let mut inner = bench.services.registry.inner();
    let spec = inner.disk_mut("vm").unwrap().wanted.cache.as_mut().unwrap();
    f(spec.journal.as_mut().unwrap())
}

/// The next daemon must not miss the crash log of a cache that was closed without a flush of its
/// backing: all records are on flash.
#[test]
fn a_closed_cache_has_no_crash_log_to_expect_even_if_its_backing_fails() {
    for fails in [false, true] {
        run(async |bench| {
            let bench = prepare(bench, LAZY).await;
            write(&bench, 0..20);
            // Unit tests have no crash logs.
            let boot: BootId = "1".parse().unwrap();
            with_journal(&bench, |journal| journal.note_use(Some(boot)));
            bench.shard.set_backings_fail(fails);
            bench.services.shutdown.close(Ending::Plain).await;
            assert_eq!(with_journal(&bench, |journal| journal.used.is_none()), fails);
        });
    }
}
