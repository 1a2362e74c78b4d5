//! One `qemu-nbd` at a time for an image, always at the same socket.
//!
//! One that had the image and ends by itself (somebody kills it, memory runs out) is replaced when somebody wants to connect again. Meanwhile nobody
//! here has the image locked: whoever else has opened it by then may have changed it, and has it from then on.
//!
//! The child ends with its [`Server`], and with hob, even when hob is killed: it asks the kernel for SIGTERM when its parent thread dies,
//! and that thread does nothing but wait for the end.
#![allow(unsafe_code)]

use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Clock};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::super::identity::ChangeMark;
use super::node::Image;
use super::sandbox::Sandbox;

/// How long a child may take to end by itself.
const END_MAX: Duration = Duration::from_secs(5);

/// Children that end by themselves are replaced that often at most.
const REVIVAL_PAUSE: Duration = Duration::from_secs(1);

/// In what a child says when somebody else has the image open.
const LOCKED: &str = "\" lock";

/// Longest complaint of a child that is passed on, bytes.
const COMPLAINT_BYTES_MAX: u64 = 4096;

/// What a child may do with the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opens {
    /// Everything; nobody else may open it.
    ReadWrite,
    /// Read it; nobody may write it.
    ReadOnly,
    /// Tell how large it is. Another host may be writing it: what is read is nothing to rely on.
    Unlocked,
}

/// What children open, and where they listen; dropping it ends the child and removes its directory.
pub(super) struct Server {
    image: Image,
    /// How they access it.
    modes: &'static [&'static str],
    start_max: Duration,
    directory: PathBuf,
    child: Mutex<Place>,
    is_released: AtomicBool,
    is_taken: AtomicBool,
}

/// Where the child is, or one is to be.
#[derive(Default)]
struct Place {
    running: Option<Running>,
    /// The last one had the image, to do this with it: one like it is to be there.
    wanted: Option<Opens>,
    /// When the last one was started.
    since: Option<Clock>,
    /// The image as the last one left it.
    left: Option<ChangeMark>,
}

/// A child, and the thread that waits for it.
struct Running {
    pid: Pid,
    opens: Opens,
    /// Dropped when its number may be another process's.
    end: mpsc::Sender<()>,
    keeper: JoinHandle<Ended>,
}

/// What there is to know of a child that ended.
#[derive(Default)]
struct Ended {
    /// Its complaint.
    said: String,
    /// The image as it left it.
    left: Option<ChangeMark>,
}

impl Running {
    fn has_ended(&self) -> bool {
        has_ended(self.pid)
    }

    fn stop(self) -> Ended {
        let by_itself = end_child(self.pid);
        drop(self.end);
        let ended = self.keeper.join().unwrap_or_default();
        if by_itself { ended } else { Ended::default() }
    }
}

impl Server {
    /// No child is started yet.
    pub(super) fn new(
        image: Image,
        modes: &'static [&'static str],
        start_max: Duration,
    ) -> io::Result<Server> {
        let (directory, child) = (private_directory()?, Mutex::default());
        let [is_released, is_taken] = [(); 2].map(|()| AtomicBool::new(false));
        Ok(Server { image, modes, start_max, directory, child, is_released, is_taken })
    }

    /// Where children listen.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Starts a child in place of the one before, and waits until it listens. That is before it looks at the image: say so when it proves to
    /// have it ([`Server::has_image`]). `NotFound` means that the program is missing.
    pub(super) fn start(&self, opens: Opens) -> io::Result<()> {
        let mut place = self.place();
        self.stop_at(&mut place);
        self.start_at(&mut place, opens)
    }

    /// The child has the image.
    pub(super) fn has_image(&self) {
        let mut place = self.place();
        place.wanted = place.running.as_ref().map(|child| child.opens);
    }

    /// Starts a child in place of one that had the image and ended by itself. To be called before each attempt to connect.
    pub(super) fn revive(&self) -> Result<(), String> {
        let mut place = self.place();
        if place.running.as_ref().is_some_and(|child| !child.has_ended()) {
            return Ok(());
        }
        let opens = place.wanted.ok_or("no qemu-nbd is to have its image")?;
        let mark = Some(mark_of(&self.image.path).map_err(|error| error.to_string())?);
        if let Some(Ended { said, left }) = place.running.take().map(Running::stop) {
            if said.contains(LOCKED) {
                return Err(self.lose(said));
            }
            tracing::warn!(image = %self.image.path.display(), said, "its qemu-nbd ended by itself; another one is started");
            place.left = left;
        }
        if place.left != mark {
            return Err(self.lose("it was changed since".to_owned()));
        }
        if place.since.is_some_and(|since| since.elapsed() < REVIVAL_PAUSE) {
            return Err("its qemu-nbd ended as soon as it had begun".to_owned());
        }
        self.start_at(&mut place, opens).map_err(|error| error.to_string())
    }

    fn lose(&self, why: String) -> String {
        tracing::error!(
            image = %self.image.path.display(),
            why,
            "somebody else has opened the image since its qemu-nbd ended by itself"
        );
        self.is_taken.store(true, Ordering::Release);
        why
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_at(&self, place: &mut Place) -> String {
        let Place { running, .. } = std::mem::take(place);
        running.map(Running::stop).unwrap_or_default().said
    }

    fn start_at(&self, place: &mut Place, opens: Opens) -> io::Result<()> {
        place.since = Some(Clock::now());
        let socket = self.socket();
        // One that was killed leaves it.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-nbd");
        command.arg("--socket").arg(&socket);
        command.args(["--persistent", "--shared=0", "--discard=unmap"]).args(self.modes);
        if opens != Opens::ReadWrite {
            command.arg("--read-only");
        }
        command.arg("--").arg(self.image.node(opens == Opens::Unlocked)?);
        let sandbox = Sandbox::of_server(&self.image, opens == Opens::ReadWrite, &self.directory)?;
        place.running =
            Some(spawn(command, sandbox, opens, self.image.path.clone(), socket, self.start_max)?);
        Ok(())
    }

    /// Ends the child; returns its complaint if it had ended by itself.
    pub(super) fn stop(&self) -> String {
        self.stop_at(&mut self.place())
    }

    /// Ends the child: the image is closed, and stays so for this backing.
    pub(super) fn release(&self) {
        self.is_released.store(true, Ordering::Release);
        self.stop();
    }

    /// Has somebody else opened the image, after the child ended by itself? For good.
    pub(super) fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Acquire)
    }

    /// Is there no child any more, and never will be?
    pub(super) fn is_over(&self) -> bool {
        self.is_released.load(Ordering::Acquire) || self.is_taken()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn mark_of(image: &Path) -> io::Result<ChangeMark> {
    std::fs::metadata(image).map(|metadata| ChangeMark::of(&metadata))
}

/// Starts a child and waits until it listens.
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
    // SAFETY: between fork and exec only two system calls are made and nothing is allocated, which is
    // what a multi-threaded program may do there. It is needed because only the child itself can
    // ask to be told of its parent's death.
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
    // The kernel signals when the thread ends that made the child, so that thread must stay.
    let (end, ended) = mpsc::channel::<()>();
    let (report, started) = mpsc::channel();
    let keeper = std::thread::Builder::new().name("hob-qemu-nbd".into()).spawn(move || {
        let mut child = match command.spawn() {
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
        // Now, before anybody else can have opened it and changed something.
        let left = mark_of(&image).ok();
        let _ = ended.recv();
        let _ = child.wait();
        Ended { said: complaint(&mut child), left }
    })?;
    match started.recv().unwrap_or_else(|_| Err(io::Error::other("its keeper ended"))) {
        Ok(pid) => Ok(Running { pid, opens, end, keeper }),
        Err(error) => {
            drop(end);
            let _ = keeper.join();
            Err(error)
        }
    }
}

/// A new directory that nobody else can enter.
fn private_directory() -> io::Result<PathBuf> {
    let mut rng = [0; 8];
    rustix::rand::getrandom(&mut rng, rustix::rand::GetRandomFlags::empty())?;
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_dir());
    let name = format!("hob-{:016x}", u64::from_ne_bytes(rng));
    let directory = base.unwrap_or_else(std::env::temp_dir).join(name);
    std::fs::DirBuilder::new().mode(0o700).create(&directory)?;
    Ok(directory)
}

fn wait_for_socket(child: &mut Child, socket: &Path, limit: Duration) -> io::Result<()> {
    let deadline = Clock::now() + limit;
    while !socket.exists() {
        if child.try_wait()?.is_some() {
            return Err(io::Error::other(complaint(child)));
        }
        if Clock::now() > deadline {
            return Err(io::Error::other("qemu-nbd does not open its socket"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// What an ended child said.
fn complaint(child: &mut Child) -> String {
    let mut words = String::new();
    if let Some(stderr) = child.stderr.take() {
        let _ = stderr.take(COMPLAINT_BYTES_MAX).read_to_string(&mut words);
    }
    words.trim().to_owned()
}

/// Has a child ended? It stays there until its keeper asks for it, so that nobody else has its number.
fn has_ended(pid: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(None))
}

fn wait_for_end(pid: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while matches!(rustix::process::waitid(WaitId::Pid(pid), options), Err(Errno::INTR)) {}
}

/// Ends a child, if it has not ended by itself. Had it?
fn end_child(pid: Pid) -> bool {
    // A connection that breaks may be the first sign of a child that is about to end.
    for _ in 0..10 {
        if has_ended(pid) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // SIGTERM lets it flush its metadata.
    let _ = rustix::process::kill_process(pid, Signal::TERM);
    let deadline = Clock::now() + END_MAX;
    while !has_ended(pid) {
        if Clock::now() > deadline {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            wait_for_end(pid);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::super::Format;
    use super::*;

    #[test]
    fn an_image_that_changes_while_no_child_has_it_is_somebody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let image_of = Image { path: image.clone(), format: Format::Raw, files: Vec::new() };
        let server = Server::new(image_of, &["--cache=writeback"], Duration::from_secs(10)).unwrap();
        server.start(Opens::ReadWrite).unwrap();
        server.has_image();
        let kill = || {
            let pid = server.place().running.as_ref().unwrap().pid;
            rustix::process::kill_process(pid, Signal::KILL).unwrap();
            // Its keeper looks at the image then.
            std::thread::sleep(Duration::from_millis(200));
        };
        kill();
        while let Err(why) = server.revive() {
            assert!(why.contains("as soon as it had begun"), "{why}");
            std::thread::sleep(Duration::from_millis(50));
        }
        kill();
        assert!(!server.is_over());
        let changed = std::time::SystemTime::UNIX_EPOCH;
        File::options().write(true).open(&image).unwrap().set_modified(changed).unwrap();
        server.revive().unwrap_err();
        assert!(server.is_taken() && server.is_over());
    }
}
