//! The problem in health for each kind of failure.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hob_control::{Health, HealthStatus, ProblemKind};
use hob_engine::io::{IoError, IoOp};
use hob_engine::units::DeviceId;

use super::journal_lost::{lose, prepare};
use super::parents::qcow2_above;
use super::*;
use crate::metrics::Form;
use crate::services::observe::Space;

fn kinds(health: &Health) -> Vec<ProblemKind> {
    assert_eq!(health.status == HealthStatus::Ok, health.problems.is_empty());
    assert!(health.problems.iter().all(|problem| !problem.reason.is_empty()), "{health:?}");
    health.problems.iter().map(|problem| problem.kind).collect()
}

async fn metrics(bench: &Bench) -> String {
    bench.services.observe.metrics(Form::Prometheus, None).await
}

#[test]
fn nothing_is_wrong_with_a_daemon_that_works() {
    run(async |bench| {
        assert!(kinds(&bench.services.observe.health().await).is_empty());
        prepare(&bench, &["a", "b"], 20).await;
        assert!(kinds(&bench.services.observe.health().await).is_empty());
        let page = metrics(&bench).await;
        assert!(page.contains("\nhob_healthy 1\n"), "{page}");
        for line in [
            "hob_cache_dirty_bytes{disk=\"vm\"} 81920",
            "hob_disk_requests_total{disk=\"vm\",class=\"write\",reason=\"to-flash\"} 20",
            "hob_disk_request_duration_seconds_count{disk=\"vm\",class=\"write\",reason=\"to-flash\"} 20",
            "hob_cache_state{disk=\"vm\",state=\"active\"} 1",
            "hob_device_state{pool=\"p\",device=",
            "hob_pool_size_bytes{pool=\"p\"} 16777216",
            "hob_shard_up{shard=\"0\"} 1",
            "hob_scrape_disks_missing 0",
        ] {
            assert!(page.contains(&format!("\n{line}")), "{line}\n{page}");
        }
    });
}

#[test]
fn a_disk_without_its_backing_and_devices_that_fail_are_named() {
    run(async |bench| {
        bench.pool(&["a", "b"], 8).await;
        bench.disk("vm").await;
        bench.cache("vm", 4).await.unwrap();
        let device = |path: &str| {
            let inner = bench.services.registry.inner();
            let device = inner.pools["p"].devices.iter().find(|device| device.path.ends_with(path));
            device.and_then(|device| device.ids).unwrap().on_shards
        };
        bench.services.events.handle(ShardEvent::Stalled(device("a")));
        bench.services.events.handle(ShardEvent::Fenced { device: device("b"), errors: 16 });
        bench.services.registry.inner().disk_mut("vm").unwrap().phase =
            DiskPhase::Offline("no such file".to_owned());
        let health = bench.services.observe.health().await;
        let expected = [ProblemKind::DeviceStalled, ProblemKind::DeviceFenced, ProblemKind::DiskOffline];
        assert_eq!(kinds(&health), expected);
        assert_eq!(
            (health.problems[2].subject.as_str(), health.problems[2].reason.as_str()),
            ("vm", "no such file")
        );
        assert!(health.problems[1].subject.ends_with("/b"), "{health:?}");
        let page = metrics(&bench).await;
        for line in [
            "hob_healthy 0",
            "hob_health_problems{kind=\"device-fenced\"} 1",
            "hob_health_problems{kind=\"shard-silent\"} 0",
            "hob_disk_state{disk=\"vm\",state=\"offline\"} 1",
        ] {
            assert!(page.contains(&format!("\n{line}\n")), "{line}\n{page}");
        }
        assert!(!page.contains("hob_disk_reads_total"), "of a disk that is offline there are no figures");
    });
}

#[test]
fn a_lost_journal_is_named_until_it_is_elsewhere() {
    run(async |bench| {
        let sick: DeviceId = prepare(&bench, &["a", "b"], 20).await;
        lose(&bench, sick).await;
        assert!(kinds(&bench.services.observe.health().await).contains(&ProblemKind::JournalLost));
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(kinds(&bench.services.observe.health().await).is_empty());
    });
}

#[test]
fn dirty_data_that_gets_nowhere_is_named() {
    run(async |bench| {
        prepare(&bench, &["a"], 20).await;
        bench.shard.set_backings_fail(true);
        bench.services.pools.drain("vm".into()).await.unwrap();
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            bench.services.pools.look_at_dirty();
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::DestageStuck], "{health:?}");
        let waits =
            |health: &hob_control::Health| health.problems[0].reason.contains("a guest's write waits");
        assert!(!waits(&health), "{health:?}");
        let set_ordered = |ordered| {
            let mut inner = bench.services.registry.inner();
            inner.disk_mut("vm").unwrap().wanted.cache.as_mut().unwrap().destage.ordered = ordered;
        };
        set_ordered(true);
        let health = bench.services.observe.health().await;
        assert!(waits(&health), "{health:?}");
        set_ordered(false);
        bench.shard.set_backings_fail(false);
        for _ in 0..40 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            bench.services.pools.look_at_dirty();
        }
        assert!(kinds(&bench.services.observe.health().await).is_empty());
    });
}

#[test]
fn a_file_that_is_renamed_while_hob_uses_it_is_named() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        let kinds_now = async || {
            bench.services.observe.check_open_files();
            kinds(&bench.services.observe.health().await)
        };
        assert!(kinds_now().await.is_empty());
        for name in ["a", "vm.img"] {
            bench.take_away(name);
            assert_eq!(kinds_now().await, [ProblemKind::FileMissing]);
            bench.bring_back(name);
            assert!(kinds_now().await.is_empty());
        }
    });
}

#[test]
fn a_backing_file_that_is_shorter_than_its_disk_is_named() {
    run(async |bench| {
        bench.disk("vm").await;
        let file = std::fs::File::options().write(true).open(bench.path("vm.img")).unwrap();
        let full = file.metadata().unwrap().len();
        for (bytes, is_named) in [(full, false), (512, true), (full, false)] {
            file.set_len(bytes).unwrap();
            bench.services.observe.check_open_files();
            let health = bench.services.observe.health().await;
            let expected: &[ProblemKind] = if is_named { &[ProblemKind::FileMissing] } else { &[] };
            assert_eq!(kinds(&health), expected, "{health:?}");
        }
    });
}

#[test]
fn a_file_of_a_pool_that_is_truncated_while_hob_uses_it_is_named() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        let file = std::fs::File::options().write(true).open(bench.path("a")).unwrap();
        let bytes = file.metadata().unwrap().len();
        file.set_len(4096).unwrap();
        bench.services.observe.check_open_files();
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::FileMissing], "{health:?}");
        assert!(health.problems[0].reason.contains("was truncated to 4 KiB"), "{health:?}");
        file.set_len(bytes).unwrap();
        bench.services.observe.check_open_files();
        assert!(kinds(&bench.services.observe.health().await).is_empty());
    });
}

#[test]
fn a_file_that_is_renamed_before_the_first_check_is_named() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        ["a", "vm.img"].iter().for_each(|name| bench.take_away(name));
        bench.services.observe.check_open_files();
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::FileMissing; 2], "{health:?}");
    });
}

#[test]
fn a_file_below_an_image_that_is_replaced_is_named() {
    run(async |bench| {
        let base = bench.image("base.img", 8);
        let backing = qcow2_above(&bench, "vm.qcow2", "raw", "base.img");
        let add = DiskAdd { name: "vm".into(), backing, ..DiskAdd::default() };
        bench.services.disks.disk_add(add).await.unwrap();
        let missing = async || {
            bench.services.observe.check_open_files();
            let problems = bench.services.observe.health().await.problems.into_iter();
            let missing = problems.filter(|problem| problem.kind == ProblemKind::FileMissing);
            missing.map(|problem| problem.reason).collect::<Vec<String>>()
        };
        assert!(missing().await.is_empty());
        bench.take_away("base.img");
        bench.image("base.img", 8);
        let reasons = missing().await;
        assert!(reasons.len() == 1 && reasons[0].contains(&base), "{reasons:?}");
        assert!(reasons[0].contains("was replaced by another file"), "{reasons:?}");
        bench.bring_back("base.img");
        assert!(missing().await.is_empty());
    });
}

#[test]
fn a_backing_that_answers_with_errors_is_named() {
    run(async |bench| {
        bench.disk("vm").await;
        let is_logged = || {
            bench.services.observe.log_failing_backings();
            bench.services.registry.inner().disks["vm"].backing_was_failing
        };
        assert!(kinds(&bench.services.observe.health().await).is_empty() && !is_logged());
        let monitor = {
            let inner = bench.services.registry.inner();
            inner.disks["vm"].measure.as_ref().unwrap().monitor.clone()
        };
        monitor.note_failure(IoOp::Flush, IoError::Failed);
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::BackingErrors], "{health:?}");
        assert!(health.problems[0].reason.contains("last error: flush: I/O error (EIO)"), "{health:?}");
        assert_eq!(bench.services.observe.disk("vm").unwrap().backing_state.unwrap().name(), "failing");
        assert!(is_logged());
    });
}

/// A backing fails and works again between two polls of the shard, and all dirty data is destaged.
#[test]
fn a_failure_that_is_over_is_not_named() {
    run(async |bench| {
        prepare(&bench, &["a"], 20).await;
        bench.services.pools.look_at_dirty();
        tokio::time::sleep(Duration::from_secs(1)).await;
        bench.shard.set_backings_fail(true);
        bench.services.pools.drain("vm".into()).await.unwrap();
        bench.shard.set_backings_fail(false);
        tokio::time::sleep(Duration::from_secs(60)).await;
        for _ in 0..3 {
            bench.services.pools.look_at_dirty();
            tokio::time::sleep(Duration::from_secs(2)).await;
            let health = bench.services.observe.health().await;
            assert!(kinds(&health).is_empty(), "{health:?}");
        }
        let stats = bench.services.observe.stats("vm").await.unwrap();
        assert!(stats.dirty_bytes == 0 && stats.destage_errors > 0, "{stats:?}");
        let drained = bench.services.pools.drain("vm".into()).await.unwrap().disk.unwrap();
        let dirty = drained.cache.unwrap().dirty.unwrap();
        assert_eq!((dirty.draining, dirty.why), (false, None));
    });
}

/// A save of the state needs no additional space, so no save has failed yet.
#[test]
fn a_state_directory_without_space_is_a_problem_before_a_save_fails() {
    run(async |bench| {
        let note = |free_bytes| {
            let space = Space { free_bytes, total_bytes: 1 << 40 };
            bench.services.observe.note_space(Path::new("/var/lib/hob"), space);
        };
        note(16 << 20);
        assert!(kinds(&bench.services.observe.health().await).is_empty());
        note(5_000_000);
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::StateSpaceLow], "{health:?}");
        let reason = &health.problems[0].reason;
        assert!(reason.contains("/var/lib/hob") && reason.contains("5000000 bytes"), "{reason}");
        let page = metrics(&bench).await;
        assert!(page.contains("\nhob_health_problems{kind=\"state-space-low\"} 1\n"), "{page}");
        note(1 << 30);
        assert!(kinds(&bench.services.observe.health().await).is_empty());
    });
}

#[test]
fn a_backing_without_flush_is_a_problem() {
    run(async |bench| {
        bench.disk("vm").await;
        assert!(kinds(&bench.services.observe.health().await).is_empty());
        let set = |can_flush| {
            let mut inner = bench.services.registry.inner();
            inner.disk_mut("vm").unwrap().measure.as_mut().unwrap().info.can_flush = can_flush;
        };
        set(false);
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::FlushMissing], "{health:?}");
        set(true);
        assert!(kinds(&bench.services.observe.health().await).is_empty());
    });
}

#[test]
fn a_backing_that_is_not_connected_is_a_problem_and_no_shard_is_asked() {
    run(async |bench| {
        bench.disk("vm").await;
        bench.shard.set_hangs(true);
        let monitor =
            bench.services.registry.inner().disk("vm").unwrap().measure.as_ref().unwrap().monitor.clone();
        let silent = ProblemKind::ShardSilent;
        assert_eq!(kinds(&bench.services.observe.health().await), [silent]);
        monitor.note_outage(Duration::from_secs(7), "Connection refused");
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [silent, ProblemKind::BackingUnreachable], "{health:?}");
        let reason = &health.problems[1].reason;
        assert!(reason.contains("reconnecting for 7 s: Connection refused; 0 requests wait"), "{reason}");
        let page = metrics(&bench).await;
        for line in [
            "hob_disk_backing_state{disk=\"vm\",state=\"reconnecting\"} 1",
            "hob_disk_backing_state{disk=\"vm\",state=\"connected\"} 0",
            "hob_disk_backing_outage_seconds{disk=\"vm\"} 7",
            "hob_disk_backing_waiting_requests{disk=\"vm\"} 0",
            "hob_health_problems{kind=\"backing-unreachable\"} 1",
        ] {
            assert!(page.contains(&format!("\n{line}\n")), "{line}\n{page}");
        }
        let said = bench.services.observe.explain("vm").await.unwrap().sentences.join(" ");
        assert!(said.contains("reconnecting for 7 s: Connection refused"), "{said}");
        monitor.note_connected();
        assert_eq!(kinds(&bench.services.observe.health().await), [silent]);
    });
}

/// Number of disks in the tests of queries about many disks.
const MANY: usize = 24;

#[test]
fn metrics_ask_a_shard_for_several_disks_at_once() {
    run(async |bench| {
        for number in 0..MANY {
            bench.disk(&format!("vm{number}")).await;
        }
        bench.shard.take_received();
        let page = metrics(&bench).await;
        let received = bench.shard.take_received();
        assert!(received <= MANY / 2, "{received} calls for {MANY} disks");
        let of_disks = page.lines().filter(|line| line.starts_with("hob_disk_reads_total{"));
        assert_eq!(of_disks.count(), MANY, "{page}");
    });
}

#[test]
fn counts_of_mismatches_ask_a_shard_for_several_disks_at_once() {
    run(async |bench| {
        bench.pool(&["a"], 4 * MANY as u64).await;
        for number in 0..MANY {
            let name = format!("vm{number}");
            bench.disk(&name).await;
            bench.cache(&name, 1).await.unwrap();
        }
        for _ in 0..2 {
            bench.shard.take_received();
            bench.services.observe.count_mismatches();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let received = bench.shard.take_received();
            assert!((1..=MANY / 2).contains(&received), "{received} calls for {MANY} disks");
        }
    });
}

#[test]
fn dirty_data_of_several_disks_is_read_in_one_call() {
    run(async |bench| {
        bench.pool(&["a"], 8 * MANY as u64).await;
        for number in 0..MANY {
            let name = format!("vm{number}");
            bench.disk(&name).await;
            bench.cache_with(&name, 1, r#"{"persistent": true}"#).await.unwrap();
        }
        for _ in 0..2 {
            bench.shard.take_received();
            bench.services.pools.look_at_dirty();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let received = bench.shard.take_received();
            assert!((1..=MANY / 2).contains(&received), "{received} calls for {MANY} disks");
        }
        let shown = bench.services.observe.disk("vm0").unwrap().cache.unwrap().dirty.unwrap();
        assert_eq!(shown.size, Size(0));
    });
}

#[test]
fn checksum_mismatches_are_a_problem_with_their_number() {
    run(async |bench| {
        prepare(&bench, &["a"], 20).await;
        let count = |mismatches| {
            let mut inner = bench.services.registry.inner();
            inner.disk_mut("vm").unwrap().quality.count(mismatches, tokio::time::Instant::now());
        };
        count(10);
        assert!(
            kinds(&bench.services.observe.health().await).is_empty(),
            "a few are repaired without a word"
        );
        // After a crash, the journal may describe frames that were filled again.
        bench.services.registry.inner().disk_mut("vm").unwrap().quality.recovered(false);
        count(1000);
        assert!(kinds(&bench.services.observe.health().await).is_empty());
        bench.services.registry.inner().disk_mut("vm").unwrap().quality.recovered(true);
        assert_eq!(kinds(&bench.services.observe.health().await), [ProblemKind::ChecksumMismatch]);
        count(72_499);
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::ChecksumMismatch], "{health:?}");
        let reason = &health.problems[0].reason;
        assert!(
            reason.contains("72499 checksum mismatches") && reason.contains("hob pool show p"),
            "{reason}"
        );
    });
}

#[test]
fn a_silent_shard_is_named_and_holds_up_no_page() {
    run(async |bench| {
        bench.pool(&["a", "b"], 8).await;
        bench.disk("vm").await;
        let page = metrics(&bench).await;
        for (name, id) in [("a", 0), ("b", 1)] {
            let line =
                format!("hob_device_ios_total{{pool=\"p\",device=\"{}\"}} {}", bench.path(name), 1000 + id);
            assert!(page.contains(&line), "{line}\n{page}");
        }
        bench.shard.set_hangs(true);
        let began = tokio::time::Instant::now();
        let health = bench.services.observe.health().await;
        assert_eq!(kinds(&health), [ProblemKind::ShardSilent]);
        let page = metrics(&bench).await;
        assert!(page.contains("\nhob_shard_up{shard=\"0\"} 0\n"), "{page}");
        assert!(!page.contains("hob_device_ios_total"), "half a sum would look like a new beginning");
        assert!(page.contains("\nhob_scrape_disks_missing 1\n"), "{page}");
        let loads = bench.services.observe.load().await;
        assert!(loads.len() == 1 && !loads[0].is_counted, "{loads:?}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
}

/// The messages that this thread logs.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Records messages until the guard is dropped.
    fn begin(&self) -> tracing::subscriber::DefaultGuard {
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        tracing::subscriber::set_default(subscriber.finish())
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A short pause of flash has one message, with the time before hob noticed the pause. A long pause
/// has a warning while it lasts, and a message at its end.
#[test]
fn a_pause_of_flash_is_logged_with_its_whole_length() {
    run(async |bench| {
        bench.pool(&["a", "b"], 8).await;
        bench.services.pools.set_flash_stall_max(Duration::from_secs(1));
        let pause = async |device: u16, seconds| {
            let log = Log::default();
            let guard = log.begin();
            bench.services.events.handle(ShardEvent::Stalled(DeviceId(device)));
            assert_eq!(log.text(), "", "its length is not known yet");
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            bench.services.events.handle(ShardEvent::Resumed(DeviceId(device)));
            drop(guard);
            log.text().lines().filter(|line| line.contains("answer")).collect::<Vec<_>>().join("\n")
        };
        let text = pause(0, 2).await;
        assert!(text.lines().count() == 1 && text.contains("WARN"), "{text}");
        assert!(text.contains("did not answer for at least 3.0 s"), "{text}");
        let text = pause(1, 20).await;
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() == 2 && lines[0].contains("WARN") && lines[1].contains("INFO"), "{text}");
        assert!(lines[0].contains("no answer for at least 5.0 s"), "{text}");
        assert!(lines[1].contains("answers again after at least 21.0 s"), "{text}");
        assert_eq!(pause(0, 1).await, "", "a second short pause within the hour");
    });
}

/// Every failed read of lost dirty data causes an event, but not a log message.
#[test]
fn unreadable_dirty_data_is_logged_once_in_ten_seconds() {
    run(async |bench| {
        bench.disk("vm").await;
        let disk = bench.services.registry.inner().disks["vm"].id;
        let log = Log::default();
        let report = |times: u64| {
            for sectors in 1..=times {
                bench.services.events.handle(ShardEvent::DirtyLost { disk, sectors });
            }
        };
        let guard = log.begin();
        report(300);
        tokio::time::sleep(Duration::from_secs(11)).await;
        report(1);
        drop(guard);
        let text = log.text();
        let lines: Vec<&str> =
            text.lines().filter(|line| line.contains("cannot be read from flash")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[1].contains("299 times more"), "{text}");
        let reason = bench.services.registry.inner().disks["vm"].cache_reason.clone().unwrap();
        assert!(reason.contains("cannot be read from flash"), "{reason}");
    });
}
