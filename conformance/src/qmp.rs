//! QEMU's control protocol (QMP): one JSON object per line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::process::Process;
use crate::scratch::wait_until;

/// Timeout of QEMU's socket, and of one answer.
const ANSWER_MAX: Duration = Duration::from_secs(120);

/// A connection to a VM's control socket.
#[derive(Debug)]
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects to the socket at `path` when it exists.
    ///
    /// # Panics
    /// Panics if QEMU does not answer.
    #[must_use]
    #[track_caller]
    pub fn connect(path: &Path) -> Self {
        wait_until("QEMU's monitor", ANSWER_MAX, || UnixStream::connect(path).is_ok());
        let stream = UnixStream::connect(path).expect("it was there just now");
        stream.set_read_timeout(Some(ANSWER_MAX)).expect("a time limit");
        let mut monitor = Self(BufReader::new(stream));
        monitor.line();
        monitor.ask("qmp_capabilities", json!({}));
        monitor
    }

    /// Runs a command and returns its result; events are skipped.
    ///
    /// # Panics
    /// Panics if QEMU refuses the command, or does not answer.
    #[track_caller]
    pub fn ask(&mut self, what: &str, arguments: Value) -> Value {
        let question = json!({ "execute": what, "arguments": arguments });
        writeln!(self.0.get_mut(), "{question}").expect("QEMU listens");
        loop {
            let answer = self.line();
            assert!(answer.get("error").is_none(), "{what}: {answer}");
            if let Some(value) = answer.get("return") {
                return value.clone();
            }
        }
    }

    /// Migrates the VM to `uri`, where the QEMU process `arriving` waits for the VM. Returns the
    /// result of `query-migrate` after the migration.
    ///
    /// # Panics
    /// Panics if the migration fails, or lasts longer than `limit`.
    #[track_caller]
    pub fn migrate(&mut self, uri: &str, arriving: &Process, limit: Duration) -> Value {
        // Guest memory is small and rarely changes; the limit is the sender's share of two slow cores.
        self.ask("migrate-set-parameters", json!({ "max-bandwidth": 24 << 20, "downtime-limit": 3000 }));
        self.ask("migrate", json!({ "uri": uri }));
        let start = Instant::now();
        loop {
            let state = self.ask("query-migrate", json!({}));
            match state["status"].as_str() {
                Some("completed") => return state,
                Some("failed" | "cancelled") => panic!("{state}\n{}", arriving.stderr()),
                _ => assert!(start.elapsed() < limit, "the machine does not arrive: {state}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Excludes memory in shared files from the migration. Call this function on source and
    /// destination, before any other command.
    ///
    /// QEMU without hardware acceleration sometimes loses pages that the guest changes during the transfer.
    #[track_caller]
    pub fn share_memory(&mut self) {
        let wanted = [json!({ "capability": "x-ignore-shared", "state": true })];
        self.ask("migrate-set-capabilities", json!({ "capabilities": wanted }));
    }

    /// Ends the VM. It may have ended already.
    pub fn quit(mut self) {
        let _ = writeln!(self.0.get_mut(), "{}", json!({ "execute": "quit" }));
        // QEMU forgets the command if the connection closes before QEMU reads it.
        let _ = std::io::copy(&mut self.0, &mut std::io::sink());
    }

    #[track_caller]
    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("QEMU answers");
        serde_json::from_str(&line).expect("JSON")
    }
}
