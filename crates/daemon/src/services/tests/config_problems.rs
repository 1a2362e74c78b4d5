//! Health problems about hob.toml that end without a reload.

use super::config::{CACHE, Filed, RETURNED, text};
use super::*;

/// At a reload, the recovery of a persistent cache is such an operation.
#[test]
fn a_reload_makes_a_change_when_another_operation_on_the_disk_has_ended() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        let opening = filed.bench.services.registry.guard_disk("vm", "opened").unwrap();
        let changed = text(&filed.bench, "cache = { pool = \"p\", size = \"6M\" }", "");
        filed.reload(&changed).await;
        tokio::time::sleep(RETURNED).await;
        let pending = filed.pending().await;
        let why = "not applied: vm is being opened; hob tries again by itself when disk vm is available";
        assert!(pending.len() == 1 && pending[0].contains(why), "{pending:?}");
        drop(opening);
        tokio::time::sleep(RETURNED).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
        assert_eq!(filed.bench.room("vm"), 6);
    });
}

#[test]
fn a_corrected_file_that_is_applied_is_no_longer_reported_as_refused() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        filed.bench.services.registry.inner().config_refused = Some("unknown key foo".to_owned());
        let kinds = async || {
            let problems = filed.bench.services.observe.health().await.problems;
            problems.into_iter().map(|it| it.kind).collect::<Vec<_>>()
        };
        filed.write(&format!("{first}foo = 1\n"));
        filed.bench.services.hob_toml.apply(false).await.unwrap_err();
        assert_eq!(kinds().await, [hob_control::ProblemKind::ConfigRefused]);
        filed.write(&first);
        filed.apply(false).await;
        assert_eq!(kinds().await, []);
    });
}
