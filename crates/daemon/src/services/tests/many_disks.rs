//! A hob.toml with several new disks, some of whose backings do not answer.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use super::config::{CACHE, Filed, text};
use super::*;

/// Number of disks without an answer: more than hob adds at the same time.
const HUNG: usize = 20;

/// Time after which hob stops waiting for the first answer of an NBD server.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Longest wait for an event that must happen.
const PATIENCE_OF_TEST: Duration = Duration::from_secs(120);

/// Waits until `is_so` returns true.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE_OF_TEST, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A server that accepts connections and sends nothing is the slowest of all backings.
#[test]
fn disks_of_a_changed_hob_toml_do_not_wait_for_backings_that_hang() {
    crate::background::run_in_real_time(async {
        let bench = Bench::new();
        bench.image("vm.img", 8);
        bench.image("healthy.img", 8);
        let first = text(&bench, "", "");
        let filed = Filed::start(bench, &first).await;
        let socket = filed.bench.path("silent.sock");
        let silent = UnixListener::bind(&socket).unwrap();
        let hung = |number: usize| {
            let name = format!("hung{number:02}");
            format!("[[disk]]\nname = \"{name}\"\nbacking = \"nbd+unix:///{name}?socket={socket}\"\n")
        };
        let missing = format!("[[disk]]\nname = \"missing\"\nbacking = \"{}\"\n", filed.bench.path("none"));
        let healthy =
            format!("[[disk]]\nname = \"healthy\"\nbacking = \"{}\"\n", filed.bench.path("healthy.img"));
        let all: String = (0..HUNG).map(hung).chain([missing, healthy]).collect();
        filed.write(&format!("{first}{all}"));
        let services = filed.bench.services.clone();
        let begun = Instant::now();
        let applying = tokio::spawn(async move { services.hob_toml.apply(false).await });
        let observe = &filed.bench.services.observe;
        let is_online = || observe.disk("healthy").is_ok_and(|disk| disk.state == DiskLife::Online);
        until("the healthy disk", is_online).await;
        assert!(begun.elapsed() < CONNECT_MAX, "{:?}: no hung disk has had its answer", begun.elapsed());
        drop(silent);
        let registry = &filed.bench.services.registry;
        until("the end", || !registry.inner().config_pending.is_empty()).await;
        // The failures are in the order of the file, not in the order in which they happened.
        let names = (0..HUNG).map(|number| format!("disk hung{number:02}"));
        let expected: Vec<String> = names.chain(["disk missing".to_owned()]).collect();
        let pending = registry.inner().config_pending.clone();
        let subjects: Vec<String> = pending.into_iter().map(|it| it.difference.subject).collect();
        assert_eq!(subjects, expected);
        // The command may have ended before its changes.
        drop(applying.await.unwrap());
    });
}

/// The pool is too small for the caches of both disks. The first disk has many exports, so that it
/// is added later than the second one.
#[test]
fn caches_of_new_disks_are_created_in_the_order_of_the_file() {
    run(async |bench| {
        for name in ["vm.img", "first.img", "second.img"] {
            bench.image(name, 64);
        }
        let old = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &old).await;
        let disk = |name: &str, exports: &str| {
            let backing = filed.bench.path(&format!("{name}.img"));
            format!(
                "[[disk]]\nname = \"{name}\"\nbacking = \"{backing}\"\n\
                 cache = {{ pool = \"p\", size = \"12M\" }}\n{exports}"
            )
        };
        let export = |number| format!("[[disk.export]]\nname = \"export{number}\"\nread_only = true\n");
        let exports: String = (0..16).map(export).collect();
        filed.write(&format!("{old}{}{}", disk("first", &exports), disk("second", "")));
        let applied = filed.apply(false).await;
        assert_eq!(filed.bench.room("first"), 12, "{applied:?}");
        assert!(applied.failed.len() == 1 && applied.failed[0].starts_with("disk second: "), "{applied:?}");
    });
}

/// The backing of a new disk may be the file of another new disk.
#[test]
fn a_disk_whose_backing_appears_while_others_are_added_is_added() {
    crate::background::run_in_real_time(async {
        let (handle, shard) = FakeShard::start();
        let options = BackingOptions { connect_max: Duration::from_secs(2), ..BackingOptions::default() };
        let services = Services::new(vec![handle], Exports::default(), options, Store::Memory);
        let bench = Bench { dir: tempfile::tempdir().unwrap(), services, shard };
        bench.image("vm.img", 8);
        bench.image("healthy.img", 8);
        let old = text(&bench, "", "");
        let filed = Filed::start(bench, &old).await;
        let socket = filed.bench.path("silent.sock");
        let _silent = UnixListener::bind(&socket).unwrap();
        let disk =
            |name: &str, backing: &str| format!("[[disk]]\nname = \"{name}\"\nbacking = \"{backing}\"\n");
        let later = disk("later", &filed.bench.path("later.img"));
        let healthy = disk("healthy", &filed.bench.path("healthy.img"));
        // Other disks are not tried again before this one has failed.
        let hung = disk("hung", &format!("nbd+unix:///hung?socket={socket}"));
        filed.write(&format!("{old}{later}{healthy}{hung}"));
        let services = filed.bench.services.clone();
        let applying = tokio::spawn(async move { services.hob_toml.apply(false).await });
        let observe = &filed.bench.services.observe;
        let is_online = |name: &str| observe.disk(name).is_ok_and(|disk| disk.state == DiskLife::Online);
        until("the healthy disk", || is_online("healthy")).await;
        filed.bench.image("later.img", 8);
        let applied = applying.await.unwrap().unwrap();
        assert!(applied.failed.len() == 1 && applied.failed[0].starts_with("disk hung: "), "{applied:?}");
        assert!(is_online("later"));
    });
}
