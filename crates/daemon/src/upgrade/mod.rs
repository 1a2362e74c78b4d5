//! Upgrade without closing clients' connections: the process executes the new program with
//! `execve`. Clients notice a pause.
//!
//! # Order
//! 1. The new program is started with `--check` and reports whether it can start and take over
//!    ([`check`]). If it cannot, nothing changes.
//! 2. Changes are refused, and each backing is flushed while guests are still served ([`prepare`]).
//!    If a backing does not answer, the daemon continues as before: the new program could not open
//!    the disk, although the cache of this program serves it.
//! 3. New connections are refused, and every request in flight is finished. If that takes too long
//!    because a backing does not answer, the daemon resumes as before. Then each backing is flushed
//!    again, because the new program does not know which writes were not flushed.
//! 4. Caches are closed as at every exit. Connections, mounts and listening sockets stay open
//!    ([`HandOff`]).
//! 5. The new program starts in this process ([`become_next`]). If that fails, the old program
//!    restarts. The program that starts takes the state that was handed over ([`InheritedState`]),
//!    and attaches each client when the client's disk is open. If a backing has stopped answering
//!    after step 3, its disk is offline until the backing answers; the program retries.
//!
//! Not kept: TLS connections, whose sessions cannot be moved; vhost-user connections, because
//! guests reconnect by themselves; connections to the control API.

mod inherited;
mod message;
mod record;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hob_frontends::fuse::Attributes;
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::descriptors;
use super::listening_sockets::{self, ListeningSockets};
use super::services::{InheritedFile, Services};
use super::shard_api::{AtRest, FileRights, ShardHandle};
pub(crate) use inherited::{InheritedState, WaitingClients};
use record::{ClientEntry, FileEntry, Record, Table};

/// Text that `--check` prints if the program can take over. The version of its hand-over record
/// follows.
const CAN_TAKE_OVER: &str = "can start, and takes over hand-overs of version ";

/// The option that makes a program check whether it can start, and exit.
const CHECK: &str = "--check";

/// Maximum run time of `--check`.
const CHECK_MAX: Duration = Duration::from_secs(20);

/// Maximum time to wait for a change in progress. A drain, for example, can take hours.
const CHANGE_MAX: Duration = Duration::from_secs(5);

/// Interval between two checks for changes in progress.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Maximum time to wait for handshakes of clients in progress.
const CLEAR_MAX: Duration = Duration::from_secs(1);

/// Maximum time to wait for requests in flight; longer than a client may take to send the rest of a
/// request.
const REST_MAX: Duration = Duration::from_secs(8);

/// Maximum time to flush all backings: once while guests are served, and once while their requests
/// wait.
const FLUSH_MAX: Duration = Duration::from_secs(20);

/// Maximum output of `--check` that is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 16 << 10;

/// Output of `--check` if this program can start and take over.
pub fn can_take_over() -> String {
    format!("{CAN_TAKE_OVER}{}", record::VERSION)
}

/// Returns true if this program takes over from an earlier program, which has run this program's
/// check.
pub(super) fn is_takeover() -> bool {
    message::is_announced()
}

/// Checks that the program at this path can start, and can take over from this program.
/// `listening` has the sockets that the program takes over.
pub(super) async fn check(program: PathBuf, listening: &ListeningSockets) -> Result<(), String> {
    let named = program.display().to_string();
    let sockets = listening.names();
    let (answer, asked) = oneshot::channel();
    tokio::task::spawn_blocking(move || {
        let asked = ask(&program, &sockets, || answer.is_closed());
        // The caller may have stopped waiting.
        let _ = answer.send(asked);
    });
    match asked.await.unwrap_or_else(|e| Err(io::Error::other(e))) {
        Err(error) => Err(format!("{named} cannot be started: {error}")),
        Ok(Asked { ended_well: None, .. }) => {
            Err(format!("{named} did not report within {} s whether it can start", CHECK_MAX.as_secs()))
        }
        Ok(Asked { ended_well: Some(false), said }) => Err(format!("{named} could not start: {said}")),
        Ok(Asked { said, .. }) if said != can_take_over() => {
            Err(format!("{named} cannot take over from this hob; restart the daemon instead: {said}"))
        }
        Ok(_) => Ok(()),
    }
}

/// Result of running the new program with [`CHECK`].
struct Asked {
    /// True if the program exited successfully; `None` if it is still running.
    ended_well: Option<bool>,
    /// Last line of the program's output.
    said: String,
}

/// Runs the program's check, with the names of this program's listening sockets. Ends the check
/// early when `is_cancelled` returns true.
fn ask(program: &PathBuf, sockets: &str, is_cancelled: impl Fn() -> bool) -> io::Result<Asked> {
    let mut words = File::from(memfd_create("hob-check", MemfdFlags::CLOEXEC)?);
    let mut command = Command::new(program);
    command.args(arguments()).arg(CHECK).env_remove(message::VARIABLE).env_remove("NOTIFY_SOCKET");
    command.env(listening_sockets::VARIABLE, sockets);
    let mut child =
        command.stdin(Stdio::null()).stdout(words.try_clone()?).stderr(words.try_clone()?).spawn()?;
    let end = Instant::now() + CHECK_MAX;
    let ended_well = loop {
        match child.try_wait()? {
            Some(status) => break Some(status.success()),
            None if is_cancelled() || Instant::now() >= end => {
                child.kill()?;
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    words.rewind()?;
    let mut said = Vec::new();
    words.take(ANSWER_BYTES_MAX).read_to_end(&mut said)?;
    let said = String::from_utf8_lossy(&said);
    let line = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("nothing");
    Ok(Asked { ended_well, said: line.trim_start_matches("hob: ").to_owned() })
}

/// Returns the arguments with which this program was started.
fn arguments() -> impl Iterator<Item = OsString> {
    std::env::args_os().skip(1)
}

/// Quiesces the whole daemon. After a failure the daemon resumes, and the error gives the reason.
pub(super) async fn prepare(
    services: &Arc<Services>,
    shards: &[ShardHandle],
    listening: &ListeningSockets,
) -> Result<(), String> {
    let end = Instant::now() + CHANGE_MAX;
    while let Err(error) = services.shutdown.begin() {
        if Instant::now() >= end {
            return Err(error.to_string());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    if let Err(why) = services.shutdown.check_backings(FLUSH_MAX).await {
        services.shutdown.cancel();
        return Err(why);
    }
    listening.pause();
    listening.until_handshakes_end(CLEAR_MAX).await;
    // From here on, no client connects.
    if let Err(why) = descriptors::check_hand_over() {
        resume(services, shards, listening);
        return Err(why);
    }
    let mut resting = JoinSet::new();
    for shard in shards {
        let shard = shard.clone();
        resting.spawn(async move { shard.rest().await.is_ok() });
    }
    let all = async {
        while let Some(rested) = resting.join_next().await {
            if !rested.unwrap_or(false) {
                return false;
            }
        }
        true
    };
    let result = match tokio::time::timeout(REST_MAX, all).await {
        Ok(true) => services.shutdown.flush_all(FLUSH_MAX).await,
        _ => Err(format!(
            "some requests were not answered within {} s; check the backings ('hob health')",
            REST_MAX.as_secs()
        )),
    };
    if result.is_err() {
        resume(services, shards, listening);
    }
    result
}

/// Lets shards, services and listening sockets accept work again after [`prepare`].
fn resume(services: &Arc<Services>, shards: &[ShardHandle], listening: &ListeningSockets) {
    shards.iter().for_each(ShardHandle::resume);
    listening.resume();
    services.shutdown.cancel();
}

/// Closes the descriptors that the previous program left in this process, because this program
/// cannot take over.
pub fn abandon() {
    let mut inherited = InheritedState::take();
    drop(inherited.files());
    inherited.listening().close_inherited();
}

/// Descriptors that stay open for the next program.
#[derive(Debug)]
pub(super) struct HandOff {
    program: PathBuf,
    record: Record,
    fds: Vec<OwnedFd>,
}

impl HandOff {
    /// Collects what the next program takes over from the shards, the services and the listening
    /// sockets.
    pub(super) async fn collect(
        program: PathBuf,
        services: &Arc<Services>,
        shards: &[ShardHandle],
        listening: &ListeningSockets,
        waiting: &WaitingClients,
    ) -> HandOff {
        let mut at_rest = AtRest::default();
        for shard in shards {
            match shard.hand_over().await {
                Ok(AtRest { clients, files }) => {
                    at_rest.clients.extend(clients);
                    at_rest.files.extend(files);
                }
                Err(error) => tracing::warn!("the NBD clients of a shard must reconnect: {error}"),
            }
        }
        let mut leaving = HandOff { program: program.clone(), record: Record::default(), fds: Vec::new() };
        leaving.record.table.program = program;
        for (name, socket) in listening.take_kept_open() {
            leaving.record.table.listening.push(name);
            leaving.fds.push(socket);
        }
        leaving.add_files(services, at_rest.files);
        leaving.add_clients(at_rest.clients);
        leaving.add_waiting(waiting);
        leaving
    }

    fn add_files(&mut self, services: &Arc<Services>, files: Vec<super::shard_api::FileAtRest>) {
        let mut mounts = services.exports.leave_mounts();
        for file in files {
            let FileRights { export, read_only, .. } = file.rights;
            let Some(at) = mounts.iter().position(|(of, ..)| *of == export) else { continue };
            let (_, path, made) = mounts.swap_remove(at);
            self.record.table.files.push(file_entry(export, (path, made), file.file, read_only));
            self.fds.push(file.device);
        }
        for (export, left) in services.exports.leave_left_files() {
            let InheritedFile { path, device, mount, attributes, read_only } = left;
            let (_, made) = mount.leave();
            self.record.table.files.push(file_entry(export, (path, made), attributes, read_only));
            self.fds.push(device);
        }
        // No shard serves these files any more. The next program finds their mounts and removes
        // them as stale mounts.
        for (export, path, _) in mounts {
            tracing::warn!(
                "export {export}: its file {} cannot be handed over and is unmounted",
                path.display()
            );
        }
    }

    fn add_clients(&mut self, clients: Vec<super::shard_api::ClientAtRest>) {
        for client in clients {
            let negotiated = client.negotiated;
            self.record.table.clients.push(ClientEntry {
                flags: negotiated.transmission_flags().0,
                export: negotiated.export,
                size: negotiated.info.size_bytes,
                block_min: negotiated.info.block_size_min,
                block_max: negotiated.info.block_size_max,
                structured_replies: negotiated.structured_replies,
                base_allocation: negotiated.base_allocation,
                contexts: negotiated.contexts,
                received: client.received.len() as u32,
                is_kernel: client.is_kernel,
            });
            self.record.received.push(client.received);
            self.fds.push(client.socket);
        }
    }

    /// Adds inherited clients whose disks are not open yet.
    fn add_waiting(&mut self, waiting: &WaitingClients) {
        for (entry, socket, received) in waiting.leave() {
            self.record.table.clients.push(entry);
            self.record.received.push(received);
            self.fds.push(socket);
        }
    }

    /// Returns the numbers of descriptors of each kind in one line, for the log.
    pub(super) fn summary(&self) -> String {
        self.record.table.summary()
    }
}

fn file_entry(export: String, (path, made): (PathBuf, bool), file: Attributes, read_only: bool) -> FileEntry {
    let Attributes { size, mode, uid, gid, time_ns } = file;
    let seconds = FileEntry::seconds_of(time_ns);
    FileEntry { disk: export, path, made, read_only, size, mode, uid, gid, seconds }
}

impl Table {
    fn summary(&self) -> String {
        let Table { listening, files, clients, .. } = self;
        format!("{} listening sockets, {} files, {} NBD clients", listening.len(), files.len(), clients.len())
    }
}

/// Starts the next program in this process. Returns only if no program could be started.
pub(super) fn become_next(leaving: HandOff) -> anyhow::Error {
    let own = PathBuf::from("/proc/self/exe");
    let mut error = anyhow::anyhow!("the new program does not exist");
    for program in [&leaving.program, &own] {
        error = match message::pack(&leaving.record, &leaving.fds) {
            Ok(message) => {
                let mut command = Command::new(program);
                command.args(arguments()).env(message::VARIABLE, message::sign()).stdin(Stdio::from(message));
                command.exec().into()
            }
            Err(error) => error.into(),
        };
        tracing::error!("cannot start {}: {error}", program.display());
    }
    error.context("the daemon has closed its caches and cannot continue")
}
