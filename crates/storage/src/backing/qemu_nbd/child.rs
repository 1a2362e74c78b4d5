//! The `qemu-nbd` child process of an image: one at a time, always at the same socket.
//!
//! A child may end by itself, for example because an operator kills it or memory runs out. hob
//! starts another child when it connects again. Until then the image is not locked. So another
//! process may have opened and changed the image, and may still have it open. hob compares the
//! image with the state that it had when the child ended. If the child may have ended while hob
//! itself was paused, for example by SIGSTOP, hob treats a change since the beginning of the pause
//! as a change by another process.
//!
//! The child ends with its [`Server`], and with hob, even when hob is killed. The child asks the
//! kernel for SIGTERM when its parent thread ends. The parent thread only waits for the child's
//! end. While qemu-nbd starts, it ignores SIGTERM. So [`end_starting`] kills starting children when
//! hob ends. If hob was killed, the next hob process ends its children, and finds out whether they
//! have stored their changes ([`child_dirs`](super::child_dirs)).
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Clock, SystemTime};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::super::identity::ChangeMark;
use super::super::{OpenError, image_state};
use super::child_dirs::PrivateDirectory;
use super::node::Image;
use super::read_locks::ReadLocks;
use super::sandbox::Sandbox;
use crate::filesystem::{is_memory, may_block};
use crate::pauses::{self, Pause};
use crate::unflushed_mark;

/// Longest time that a child process has to end by itself.
const END_MAX: Duration = Duration::from_secs(5);

/// Longest time that the thread of a child needs to notice the end of the child, while this process
/// runs.
const NOTICE_MAX: Duration = Duration::from_secs(2);

/// Longest tick of the kernel's clock for timestamps of files.
const CLOCK_TICK: Duration = Duration::from_millis(10);

/// Minimum time between starts of child processes that end by themselves.
const REVIVAL_PAUSE: Duration = Duration::from_secs(1);

/// Text in a child's error message if another process has the image open.
const LOCKED: &str = "\" lock";

/// Text for users: what may have happened to an image that has changed since its child ended.
pub(super) const CHANGED: &str = "renamed, replaced or changed while its qemu-nbd did not run";

/// Why an image does not belong to this backing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    /// Another process has opened the image.
    Opened,
    /// The image's file has changed since the child ended.
    Changed,
}

/// Option that makes a child report which layer has the data of a range. QEMU before 5.2 does not
/// know it.
const REPORT_DEPTH: &str = "--allocation-depth";

/// Longest error message of a child that hob reports, bytes.
const COMPLAINT_BYTES_MAX: u64 = 4096;

/// Children that have not opened their image yet; `None` when this process is about to end.
static STARTING: Mutex<Option<BTreeSet<i32>>> = Mutex::new(Some(BTreeSet::new()));

fn starting() -> MutexGuard<'static, Option<BTreeSet<i32>>> {
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a child that [`end_starting`] kills until [`is_started`] is called.
fn start_child(command: &mut Command) -> io::Result<Child> {
    let mut starting = starting();
    let children = starting.as_mut().ok_or_else(|| io::Error::other("hob is about to end"))?;
    let child = command.spawn()?;
    children.insert(Pid::from_child(&child).as_raw_nonzero().get());
    Ok(child)
}

/// Records that a child has opened its image or has ended.
fn is_started(pid: Pid) {
    if let Some(children) = starting().as_mut() {
        children.remove(&pid.as_raw_nonzero().get());
    }
}

/// Kills the children that have not opened their image yet, and prevents the start of others. Call
/// it when this process is about to end.
pub fn end_starting() {
    let children = starting().take().unwrap_or_default();
    for pid in children.into_iter().filter_map(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// Access of a child process to the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opens {
    /// The child reads and writes the image. No other process may open the image.
    ReadWrite,
    /// The child reads the image. No other process may write the image.
    ReadOnly,
    /// The child only reports the image's size. Another host may be writing the image, so the data
    /// that the child reads is not valid.
    Unlocked,
}

/// Starts the child processes of an image, always at the same socket. Dropping the `Server` ends
/// the child and removes the socket's directory.
pub(super) struct Server {
    image: Image,
    /// Options for the child's access to the image.
    modes: &'static [&'static str],
    start_max: Duration,
    /// Id of the image's [mark](unflushed_mark); `None` if the image will not be written.
    mark: Option<[u8; 16]>,
    directory: PrivateDirectory,
    child: Mutex<ChildState>,
    /// Locks of the files of a read-only image. hob holds them also while no child runs.
    locks: Mutex<Option<ReadLocks>>,
    /// Name of the content of an image that must not change, with the files below it.
    content: OnceLock<String>,
    is_released: AtomicBool,
    taken: OnceLock<Taken>,
}

/// State of the image's child process.
#[derive(Default)]
struct ChildState {
    running: Option<Running>,
    /// Access with which hob starts another child if the present child ends by itself; `None` until
    /// the present child has opened the image.
    wanted: Option<Opens>,
    /// Time at which the last child was started.
    since: Option<Clock>,
    /// State of the image when the last child ended; `None` if it is unknown.
    left: Option<FileState>,
}

/// A running child process, and the thread that waits for it.
struct Running {
    pid: Pid,
    opens: Opens,
    /// Closing this channel lets the child's thread reap the child. Until then the kernel does not
    /// assign the child's process id again.
    end: mpsc::Sender<()>,
    keeper: JoinHandle<Ended>,
}

/// Result of a child process that ended.
#[derive(Default)]
struct Ended {
    /// Text that the process wrote to its standard error.
    said: String,
    /// State of the image when the child ended; `None` if it is unknown.
    left: Option<FileState>,
}

/// State of an image's file: its size, and the times of its last changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileState {
    mark: ChangeMark,
    /// Time of the last change of the content or of attributes, nanoseconds since 1970.
    changed_ns: i64,
}

impl FileState {
    fn of(image: &Path) -> io::Result<FileState> {
        let metadata = std::fs::metadata(image)?;
        let changed_ns = metadata.ctime().saturating_mul(1_000_000_000).saturating_add(metadata.ctime_nsec());
        Ok(FileState { mark: ChangeMark::of(&metadata), changed_ns })
    }

    /// Returns the state in which a child that has just ended left its image. `None` if it is
    /// unknown: the child may have ended during a pause of this process, and then another program
    /// may have changed the image before this process ran again. `last_pause` returns the latest
    /// pause.
    fn left_by_child(image: &Path, last_pause: impl FnOnce() -> Option<Pause>) -> Option<FileState> {
        let state = FileState::of(image).ok()?;
        // A pause may end right before the state is read, so the pause is determined afterwards.
        let Some(pause) = last_pause().filter(|pause| pause.ended.elapsed() < NOTICE_MAX) else {
            return Some(state);
        };
        // The server of a network filesystem has another clock.
        let has_our_clock = File::open(image).is_ok_and(|file| is_memory(&file) || !may_block(&file));
        (has_our_clock && !state.is_changed_since(pause.began)).then_some(state)
    }

    /// Returns true if the file may have changed at this time or later.
    fn is_changed_since(self, time: SystemTime) -> bool {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let latest = self.mark.modified_ns.max(self.changed_ns);
        i128::from(latest) + CLOCK_TICK.as_nanos() as i128 >= since.as_nanos() as i128
    }
}

impl Running {
    fn has_ended(&self) -> bool {
        has_ended(self.pid)
    }

    fn stop(self) -> Ended {
        end_child(self.pid);
        drop(self.end);
        self.keeper.join().unwrap_or_default()
    }
}

impl Server {
    /// Creates a server without starting a child.
    pub(super) fn new(
        image: Image,
        modes: &'static [&'static str],
        start_max: Duration,
        mark: Option<[u8; 16]>,
    ) -> io::Result<Server> {
        let (directory, child) = (PrivateDirectory::create()?, Mutex::default());
        let (is_released, taken) = (AtomicBool::new(false), OnceLock::new());
        pauses::watch()?;
        let (locks, content) = (Mutex::default(), OnceLock::new());
        Ok(Server { image, modes, start_max, mark, directory, child, locks, content, is_released, taken })
    }

    /// Returns the id of the image's [mark](unflushed_mark); `None` if the image will not be
    /// written.
    pub(super) fn mark(&self) -> Option<[u8; 16]> {
        self.mark
    }

    /// Returns the image that the children open.
    pub(super) fn image(&self) -> &Image {
        &self.image
    }

    /// Returns the path of the socket at which children listen.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.socket()
    }

    /// Starts a child in place of the previous one, and waits until the child listens. The child
    /// opens the image after that, and may fail. When the first NBD handshake succeeds, the image
    /// is open: call [`Server::has_image`] then. `NotFound` means that the program is missing.
    pub(super) fn start(&self, opens: Opens) -> io::Result<()> {
        let mut place = self.place();
        self.stop_at(&mut place);
        self.start_at(&mut place, opens)
    }

    /// Records that the child has opened the image, so that [`Server::revive`] may start another
    /// child.
    pub(super) fn has_image(&self) {
        let mut place = self.place();
        place.wanted = place.running.as_ref().map(|child| child.opens);
        place.running.as_ref().inspect(|child| is_started(child.pid));
        if place.wanted == Some(Opens::ReadWrite) {
            self.name_mark();
        }
    }

    /// Records which mark the next hob process reduces if this process is killed and the child then
    /// stores its changes. The numbers of an earlier process must stay, because the child does not
    /// have the changes of that process.
    fn name_mark(&self) {
        let Some(mark) = self.mark else { return };
        let kept = unflushed_mark::keep(&mark);
        let named = kept.and_then(|()| self.directory.name_mark(&unflushed_mark::path_of(&mark)));
        if let Err(error) = named {
            tracing::warn!(
                image = %self.image.path.display(),
                %error,
                "if hob is killed, guests get a report of lost writes, although no write is lost"
            );
        }
    }

    /// Locks the files of a read-only image against writers, until the server is released or
    /// dropped. The error names the file that a program has open for writing.
    pub(super) fn lock_files(&self) -> Result<(), OpenError> {
        let locks = ReadLocks::take(&self.image)?;
        *self.locks() = Some(locks);
        Ok(())
    }

    fn locks(&self) -> MutexGuard<'_, Option<ReadLocks>> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a new child if the previous one had opened the image and ended by itself. Call it
    /// before each attempt to connect.
    pub(super) fn revive(&self) -> Result<(), String> {
        let mut place = self.place();
        if place.running.as_ref().is_some_and(|child| !child.has_ended()) {
            return Ok(());
        }
        let opens = place.wanted.ok_or("the image was closed")?;
        let state = Some(FileState::of(&self.image.path).map_err(|error| self.missing(&error))?);
        if let Some(Ended { said, left }) = place.running.take().map(Running::stop) {
            if said.contains(LOCKED) {
                return Err(self.lose(Taken::Opened, said));
            }
            tracing::warn!(image = %self.image.path.display(), said, "the qemu-nbd of the image \
                exited unexpectedly; hob starts another one");
            place.left = left;
        }
        let is_same = match self.content.get() {
            Some(content) => self.has_content(content)?,
            None => place.left == state,
        };
        if !is_same {
            return Err(self.lose(Taken::Changed, format!("the image was {CHANGED}")));
        }
        if place.since.is_some_and(|since| since.elapsed() < REVIVAL_PAUSE) {
            return Err("the qemu-nbd of the image ended right after its start".to_owned());
        }
        self.start_at(&mut place, opens).map_err(|error| error.to_string())
    }

    /// Records the [name](image_state) of the content of an image that must not change.
    pub(super) fn set_content(&self, content: &str) {
        let _ = self.content.set(content.to_owned());
    }

    /// Returns true if all files of the image still have the recorded content.
    fn has_content(&self, content: &str) -> Result<bool, String> {
        match image_state(&self.image.path, self.image.format, &self.image.files) {
            Ok(now) => Ok(now == content),
            Err(error) => Err(error.to_string()),
        }
    }

    fn lose(&self, taken: Taken, why: String) -> String {
        tracing::error!(
            image = %self.image.path.display(),
            why,
            "the image is not used any more, because it may have another writer since its qemu-nbd exited \
             unexpectedly"
        );
        let _ = self.taken.set(taken);
        why
    }

    /// Returns why the image's file cannot be found.
    fn missing(&self, error: &io::Error) -> String {
        let path = self.image.path.display();
        match error.kind() {
            io::ErrorKind::NotFound => format!("{path} was renamed or removed"),
            _ => format!("{path}: {error}"),
        }
    }

    fn place(&self) -> MutexGuard<'_, ChildState> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_at(&self, place: &mut ChildState) -> String {
        let ChildState { running, .. } = std::mem::take(place);
        running.map(Running::stop).unwrap_or_default().said
    }

    fn start_at(&self, place: &mut ChildState, opens: Opens) -> io::Result<()> {
        place.since = Some(Clock::now());
        let mut options: &[&str] = if self.image.parent().is_some() { &[REPORT_DEPTH] } else { &[] };
        loop {
            match self.spawn(opens, options) {
                Ok(running) => {
                    place.running = Some(running);
                    return Ok(());
                }
                Err(error) if is_unknown(&error, options) => options = &[],
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts a child with additional options.
    fn spawn(&self, opens: Opens, options: &[&str]) -> io::Result<Running> {
        let socket = self.socket();
        // A killed qemu-nbd leaves its socket file.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-nbd");
        command.arg("--socket").arg(&socket);
        command.args(["--persistent", "--shared=0", "--discard=unmap"]).args(self.modes).args(options);
        if opens != Opens::ReadWrite {
            command.arg("--read-only");
        }
        command.arg("--").arg(self.image.node(opens == Opens::Unlocked)?);
        let sandbox = Sandbox::of_server(&self.image, opens == Opens::ReadWrite, self.directory.path())?;
        spawn(command, sandbox, opens, self.image.path.clone(), socket, self.start_max)
    }

    /// Ends the child. Returns the text that the child wrote to its standard error. If the child
    /// could not open the image, the text has the reason.
    pub(super) fn stop(&self) -> String {
        self.stop_at(&mut self.place())
    }

    /// Ends the child permanently, so that the image stays closed for this backing.
    pub(super) fn release(&self) {
        self.is_released.store(true, Ordering::Release);
        self.stop();
        *self.locks() = None;
    }

    /// Returns true if another process may have written the image after the child ended by itself.
    /// The result stays true for ever.
    pub(super) fn is_taken(&self) -> bool {
        self.taken.get().is_some()
    }

    /// Returns true if the image [is taken](Self::is_taken) because its file has changed since the
    /// child ended.
    pub(super) fn is_changed(&self) -> bool {
        self.taken.get() == Some(&Taken::Changed)
    }

    /// Returns true if there is no child and none will be started.
    pub(super) fn is_over(&self) -> bool {
        self.is_released.load(Ordering::Acquire) || self.is_taken()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns true if a child did not start because its program does not know one of the options.
fn is_unknown(error: &io::Error, options: &[&str]) -> bool {
    let said = error.to_string();
    options.iter().any(|option| said.contains(option))
}

/// Starts a child process and waits until it listens.
fn spawn(
    mut command: Command,
    sandbox: Sandbox,
    opens: Opens,
    image: PathBuf,
    socket: PathBuf,
    limit: Duration,
) -> io::Result<Running> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec only two system calls are made and nothing is allocated, which
    // is permitted in a multi-threaded program. The calls run in the child, because only the child
    // can request a signal at its parent's death.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    sandbox.enter(&mut command);
    // The kernel sends the signal when the thread that created the child ends, so that thread must
    // keep running.
    let (end, ended) = mpsc::channel::<()>();
    let (report, started) = mpsc::channel();
    let keeper = std::thread::Builder::new().name("hob-qemu-nbd".into()).spawn(move || {
        let mut child = match start_child(&mut command) {
            Ok(child) => child,
            Err(error) => {
                let _ = report.send(Err(error));
                return Ended::default();
            }
        };
        let pid = Pid::from_child(&child);
        let listening = wait_for_socket(&mut child, &socket, limit).map(|()| pid);
        let is_good = listening.is_ok();
        let _ = report.send(listening);
        if is_good {
            wait_for_end(pid);
        } else {
            end_child(pid);
        }
        // The image's state is read here, before another process can open and change the image.
        let left = FileState::left_by_child(&image, pauses::last_pause);
        let _ = ended.recv();
        is_started(pid);
        let _ = child.wait();
        Ended { said: complaint(&mut child), left }
    })?;
    match started.recv().unwrap_or_else(|_| Err(io::Error::other("the thread of the process ended"))) {
        Ok(pid) => Ok(Running { pid, opens, end, keeper }),
        Err(error) => {
            drop(end);
            let _ = keeper.join();
            Err(error)
        }
    }
}

fn wait_for_socket(child: &mut Child, socket: &Path, limit: Duration) -> io::Result<()> {
    let deadline = Clock::now() + limit;
    // The socket file appears before qemu-nbd listens, so only a connection is proof.
    while UnixStream::connect(socket).is_err() {
        if child.try_wait()?.is_some() {
            return Err(io::Error::other(complaint(child)));
        }
        if Clock::now() > deadline {
            return Err(io::Error::other("qemu-nbd does not listen at its socket"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Returns the error message of a child that has ended.
fn complaint(child: &mut Child) -> String {
    let mut words = String::new();
    if let Some(stderr) = child.stderr.take() {
        let _ = stderr.take(COMPLAINT_BYTES_MAX).read_to_string(&mut words);
    }
    words.trim().to_owned()
}

/// Returns true if a child has ended. The child stays a zombie until its thread waits for it, so
/// that no other process gets its id.
fn has_ended(pid: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(None))
}

fn wait_for_end(pid: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while matches!(rustix::process::waitid(WaitId::Pid(pid), options), Err(Errno::INTR)) {}
}

fn end_child(pid: Pid) {
    // A broken connection may be the first sign that the child is about to end by itself.
    for _ in 0..10 {
        if has_ended(pid) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // After SIGTERM, qemu-nbd flushes its metadata.
    let _ = rustix::process::kill_process(pid, Signal::TERM);
    let deadline = Clock::now() + END_MAX;
    while !has_ended(pid) {
        if Clock::now() > deadline {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            wait_for_end(pid);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::Format;
    use super::*;

    #[test]
    fn an_option_that_an_old_program_does_not_know_is_left_out() {
        let said = |text: &str| is_unknown(&io::Error::other(text.to_owned()), &[REPORT_DEPTH]);
        assert!(said("qemu-nbd: unrecognized option '--allocation-depth'"));
        assert!(!said("qemu-nbd: Failed to get \"write\" lock"));
        assert!(!is_unknown(&io::Error::other(REPORT_DEPTH), &[]));
    }

    /// The child may have ended at any time of the pause, so another program may have made a change
    /// that happened during the pause.
    #[test]
    fn a_change_during_a_pause_of_this_process_makes_the_state_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let now = SystemTime::now();
        let left = |began, ago| {
            let ended = Clock::now().checked_sub(ago).unwrap();
            FileState::left_by_child(&image, || Some(Pause { began, ended }))
        };
        let state = FileState::left_by_child(&image, || None);
        assert_eq!(state, Some(FileState::of(&image).unwrap()));
        let minute = Duration::from_secs(60);
        assert_eq!(left(now - minute, Duration::ZERO), None);
        assert_eq!(left(now - minute, minute), state, "the pause was over when the child ended");
        let file = File::open(&image).unwrap();
        if is_memory(&file) || !may_block(&file) {
            assert_eq!(left(now + minute, Duration::ZERO), state, "the last change was before the pause");
        }
    }

    /// If the pause were determined before the state is read, a pause between the two steps would
    /// remain unnoticed.
    #[test]
    fn the_state_of_an_image_is_read_before_the_latest_pause_is_determined() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let before = FileState::of(&image).unwrap();
        let left = FileState::left_by_child(&image, || {
            std::fs::write(&image, [0; 8192]).unwrap();
            None
        });
        assert_eq!(left, Some(before));
    }

    #[test]
    fn an_image_changed_without_a_child_counts_as_changed_by_others() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let image_of = Image { path: image.clone(), format: Format::Raw, files: Vec::new() };
        let server = Server::new(image_of, &["--cache=writeback"], Duration::from_secs(60), None).unwrap();
        server.start(Opens::ReadWrite).unwrap();
        server.has_image();
        let kill = || {
            let pid = server.place().running.as_ref().unwrap().pid;
            rustix::process::kill_process(pid, Signal::KILL).unwrap();
            // The parent thread then checks whether the image has changed.
            std::thread::sleep(Duration::from_secs(2));
        };
        kill();
        while let Err(why) = server.revive() {
            assert!(why.contains("right after its start"), "{why}");
            std::thread::sleep(Duration::from_millis(50));
        }
        kill();
        assert!(!server.is_over());
        let changed = std::time::SystemTime::UNIX_EPOCH;
        File::options().write(true).open(&image).unwrap().set_modified(changed).unwrap();
        let why = server.revive().unwrap_err();
        assert!(why.contains("renamed, replaced or changed"), "{why}");
        assert!(server.is_taken() && server.is_changed() && server.is_over());
    }
}
