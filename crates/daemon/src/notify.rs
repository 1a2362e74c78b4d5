//! The systemd service protocol: sd_notify(3) over the datagram socket in `NOTIFY_SOCKET`.
//!
//! hob reports to systemd when its start is complete and when its shutdown begins, and sends a
//! status line. Four times in each period of `WATCHDOG_USEC`, hob reports that every shard answers.
//! Without `NOTIFY_SOCKET`, hob reports nothing. Errors are ignored.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use super::services::Services;
use super::shard_api::ShardHandle;
use crate::background::spawn;

/// Update interval of the status line without a watchdog.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The shards must answer within the watchdog's timeout divided by this number. The interval
/// between two reports is also this part of the timeout.
const WATCHDOG_SHARE: u32 = 4;

/// Sends notifications, if systemd requests them.
#[derive(Debug)]
pub(crate) struct Notifier {
    line: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
    ready: AtomicBool,
    stopping: AtomicBool,
}

impl Notifier {
    /// Creates a notifier from systemd's environment variables.
    pub(crate) fn from_env() -> Arc<Notifier> {
        let var = |name| std::env::var_os(name);
        let text = |name| var(name).and_then(|value| value.into_string().ok());
        let is_ours = text("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        let micros = text("WATCHDOG_USEC").filter(|_| is_ours).and_then(|micros| micros.parse().ok());
        Notifier::new(var("NOTIFY_SOCKET").as_deref(), micros)
    }

    fn new(socket: Option<&OsStr>, watchdog_micros: Option<u64>) -> Arc<Notifier> {
        let line = socket.and_then(|name| match open(name) {
            Ok(line) => Some(line),
            Err(error) => {
                tracing::warn!("cannot notify systemd at {}: {error}", name.display());
                None
            }
        });
        let watchdog = watchdog_micros.filter(|micros| *micros > 0).map(Duration::from_micros);
        Arc::new(Notifier { line, watchdog, ready: AtomicBool::new(false), stopping: AtomicBool::new(false) })
    }

    /// Reports that guests are served. From then on, the notifier updates the status line and the
    /// watchdog.
    pub(crate) fn ready(self: &Arc<Self>, services: &Arc<Services>) {
        self.ready.store(true, Ordering::Relaxed);
        if self.line.is_some() {
            self.say(&format!("READY=1\nSTATUS={}", services.observe.summary()));
            spawn(self.clone().watch(services.clone()));
        }
    }

    /// Reports that the shutdown has begun. The watchdog is updated until the shards have stopped.
    pub(crate) fn stopping(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.say("STOPPING=1\nSTATUS=ending");
    }

    /// Reports to systemd that another program is about to take over in this process.
    pub(crate) fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let micros = now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000;
        self.say(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=handing over"));
    }

    /// Reports to systemd that the upgrade was cancelled, with the reason as the status.
    pub(crate) fn not_reloading(&self, why: &str) {
        let why = why.replace('\n', " ");
        self.say(&format!("READY=1\nSTATUS=not upgraded: {why}"));
    }

    /// Updates the watchdog while the `shards` respond, during the start of a program that took
    /// over this process. Systemd expects these updates because the previous program sent them.
    pub(crate) fn going_on(self: &Arc<Self>, shards: Vec<ShardHandle>) {
        if let Some(pause) = self.watchdog.map(|limit| limit / WATCHDOG_SHARE) {
            let notifier = Arc::clone(self);
            spawn(async move {
                while !notifier.ready.load(Ordering::Relaxed) {
                    if respond(&shards, pause).await {
                        notifier.say("WATCHDOG=1");
                    }
                    tokio::time::sleep(pause).await;
                }
            });
        }
    }

    async fn watch(self: Arc<Self>, services: Arc<Services>) {
        let pause = self.watchdog.map_or(LOOK_EVERY, |limit| limit / WATCHDOG_SHARE);
        let mut tick = tokio::time::interval(pause.max(Duration::from_millis(1)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut said = services.observe.summary();
        loop {
            tick.tick().await;
            if self.watchdog.is_some() && services.observe.is_alive(pause).await {
                self.say("WATCHDOG=1");
            }
            let summary = services.observe.summary();
            if summary != said && !self.stopping.load(Ordering::Relaxed) {
                self.say(&format!("STATUS={summary}"));
                said = summary;
            }
        }
    }

    fn say(&self, what: &str) {
        if let Some((socket, address)) = &self.line
            && let Err(error) = socket.send_to_addr(what.as_bytes(), address)
        {
            tracing::debug!("cannot notify systemd: {error}");
        }
    }
}

async fn respond(shards: &[ShardHandle], wait_max: Duration) -> bool {
    for shard in shards {
        if !shard.responds(wait_max).await {
            return false;
        }
    }
    true
}

/// Opens a socket to `name`: a path, or `@` and a name in the abstract namespace.
fn open(name: &OsStr) -> std::io::Result<(UnixDatagram, SocketAddr)> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => return Err(std::io::Error::other("NOTIFY_SOCKET is neither a path nor an abstract name")),
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports::Exports;
    use crate::fake_shard::FakeShard;
    use crate::hardware::BackingOptions;
    use crate::state::Store;

    const WATCHDOG: Duration = Duration::from_secs(8);

    fn run(test: impl AsyncFnOnce(UnixDatagram, Arc<Notifier>, Arc<Services>, FakeShard)) {
        crate::background::run_in_virtual_time(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("notify");
            let systemd = UnixDatagram::bind(&path).unwrap();
            systemd.set_nonblocking(true).unwrap();
            let (shard, fake) = FakeShard::start();
            let services =
                Services::new(vec![shard], Exports::default(), BackingOptions::default(), Store::Memory);
            let notifier = Notifier::new(Some(path.as_os_str()), Some(WATCHDOG.as_micros() as u64));
            test(systemd, notifier, services, fake).await;
        });
    }

    /// Returns the messages that were received since the last call.
    fn heard(systemd: &UnixDatagram) -> Vec<String> {
        let mut buffer = [0; 4096];
        let next =
            || systemd.recv(&mut buffer).ok().map(|n| String::from_utf8_lossy(&buffer[..n]).into_owned());
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn ready_is_said_when_ready_and_the_end_when_it_begins() {
        run(async |systemd, notifier, services, _| {
            assert!(heard(&systemd).is_empty());
            notifier.ready(&services);
            assert_eq!(heard(&systemd), ["READY=1\nSTATUS=no disks"]);
            notifier.stopping();
            assert_eq!(heard(&systemd), ["STOPPING=1\nSTATUS=ending"]);
        });
    }

    #[test]
    fn an_upgrade_is_reported_and_the_watchdog_is_fed_until_the_next_program_is_ready() {
        run(async |systemd, notifier, services, _| {
            notifier.reloading();
            let said = heard(&systemd).concat();
            let micros =
                said.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").and_then(|rest| rest.split_once('\n'));
            assert!(micros.is_some_and(|(micros, _)| micros.parse::<u64>().is_ok_and(|m| m > 0)), "{said}");
            notifier.not_reloading("it has\ntwo lines");
            assert_eq!(heard(&systemd), ["READY=1\nSTATUS=not upgraded: it has two lines"]);
            let (handle, other) = FakeShard::start();
            notifier.going_on(vec![handle]);
            tokio::time::sleep(3 * WATCHDOG).await;
            assert!(heard(&systemd).iter().filter(|what| *what == "WATCHDOG=1").count() >= 6);
            other.set_hangs(true);
            tokio::time::sleep(WATCHDOG).await;
            heard(&systemd);
            tokio::time::sleep(3 * WATCHDOG).await;
            assert!(heard(&systemd).is_empty(), "a shard hangs while the program starts");
            other.set_hangs(false);
            tokio::time::sleep(WATCHDOG).await;
            notifier.ready(&services);
            assert!(heard(&systemd).contains(&"READY=1\nSTATUS=no disks".to_owned()));
        });
    }

    #[test]
    fn signs_of_life_come_twice_as_often_as_they_must() {
        run(async |systemd, notifier, services, _| {
            notifier.ready(&services);
            tokio::time::sleep(5 * WATCHDOG).await;
            let signs = heard(&systemd).into_iter().filter(|what| what == "WATCHDOG=1").count();
            assert!((10..=21).contains(&signs), "{signs}");
        });
    }

    #[test]
    fn while_a_shard_is_silent_there_is_no_sign_of_life() {
        run(async |systemd, notifier, services, shard| {
            notifier.ready(&services);
            tokio::time::sleep(WATCHDOG).await;
            assert!(heard(&systemd).contains(&"WATCHDOG=1".to_owned()));
            shard.set_hangs(true);
            tokio::time::sleep(WATCHDOG / WATCHDOG_SHARE).await;
            heard(&systemd);
            tokio::time::sleep(3 * WATCHDOG).await;
            assert!(!heard(&systemd).contains(&"WATCHDOG=1".to_owned()));
            shard.set_hangs(false);
            tokio::time::sleep(WATCHDOG).await;
            assert!(heard(&systemd).contains(&"WATCHDOG=1".to_owned()));
        });
    }

    #[test]
    fn without_a_socket_nothing_is_sent_and_an_invalid_one_is_ignored() {
        run(async |systemd, _, services, _| {
            for socket in [None, Some(OsStr::new("relative")), Some(OsStr::new("/nonexistent/notify"))] {
                let notifier = Notifier::new(socket, None);
                notifier.ready(&services);
                notifier.stopping();
            }
            let name = format!("@hob-test-{}", std::process::id());
            let address = SocketAddr::from_abstract_name(&name[1..]).unwrap();
            let abstracted = UnixDatagram::bind_addr(&address).unwrap();
            abstracted.set_nonblocking(true).unwrap();
            Notifier::new(Some(OsStr::new(&name)), None).stopping();
            assert_eq!(heard(&abstracted), ["STOPPING=1\nSTATUS=ending"]);
            assert!(heard(&systemd).is_empty());
        });
    }
}
