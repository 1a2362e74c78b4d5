//! A hob.toml with many disks whose backings do not answer.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use super::config::{Filed, text};
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
