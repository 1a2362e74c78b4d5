//! One `qemu-nbd` at a time for an image, always at the same socket.
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
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Clock};

use rustix::process::{Pid, Signal};

/// How long a child may take to end by itself.
const END_MAX: Duration = Duration::from_secs(5);

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
    image: PathBuf,
    format: &'static str,
    /// How they access it.
    modes: &'static [&'static str],
    start_max: Duration,
    directory: PathBuf,
    running: Mutex<Option<Running>>,
    is_released: AtomicBool,
}

/// A child, and the thread that waits for it.
struct Running {
    end: mpsc::Sender<()>,
    /// Returns the child's complaint when it ended by itself.
    keeper: JoinHandle<String>,
}

impl Running {
    fn stop(self) -> String {
        drop(self.end);
        self.keeper.join().unwrap_or_default()
    }
}

impl Server {
    /// Of an image in this format of QEMU's. No child is started yet.
    pub(super) fn new(
        image: &Path,
        format: &'static str,
        modes: &'static [&'static str],
        start_max: Duration,
    ) -> io::Result<Server> {
        let (image, directory) = (image.to_owned(), private_directory()?);
        let (running, is_released) = (Mutex::new(None), AtomicBool::new(false));
        Ok(Server { image, format, modes, start_max, directory, running, is_released })
    }

    /// Where children listen.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Starts a child in place of the one before, and waits until it listens. That is before it looks at the image. `NotFound` means that
    /// the program is missing.
    pub(super) fn start(&self, opens: Opens) -> io::Result<()> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.take().map(Running::stop);
        let socket = self.socket();
        // One that was killed leaves it.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-nbd");
        command.arg("--socket").arg(&socket);
        command.args(["--persistent", "--shared=0", "--discard=unmap"]).args(self.modes);
        if opens != Opens::ReadWrite {
            command.arg("--read-only");
        }
        match opens {
            Opens::Unlocked => command.arg("--image-opts").arg(unlocked(self.format, &self.image)?),
            Opens::ReadWrite | Opens::ReadOnly => {
                command.arg("--format").arg(self.format).arg("--").arg(&self.image)
            }
        };
        *running = Some(spawn(command, socket, self.start_max)?);
        Ok(())
    }

    /// Ends the child; returns its complaint if it had ended by itself.
    pub(super) fn stop(&self) -> String {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.take().map(Running::stop).unwrap_or_default()
    }

    /// Ends the child: the image is closed, and stays so for this backing.
    pub(super) fn release(&self) {
        self.is_released.store(true, Ordering::Release);
        self.stop();
    }

    pub(super) fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// QEMU's words for an image that is looked at while another QEMU may write it.
fn unlocked(format: &str, image: &Path) -> io::Result<String> {
    let path = image.to_str().ok_or_else(|| io::Error::other("its path is no UTF-8"))?;
    let path = path.replace(',', ",,");
    Ok(format!("driver={format},force-share=on,read-only=on,file.driver=file,file.filename={path}"))
}

/// Starts a child and waits until it listens.
fn spawn(mut command: Command, socket: PathBuf, limit: Duration) -> io::Result<Running> {
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
    // The kernel signals when the thread ends that made the child, so that thread must stay.
    let (end, ended) = mpsc::channel::<()>();
    let (report, started) = mpsc::channel();
    let keeper = std::thread::Builder::new().name("hob-qemu-nbd".into()).spawn(move || {
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                let _ = report.send(Err(error));
                return String::new();
            }
        };
        let listening = wait_for_socket(&mut child, &socket, limit);
        let good = listening.is_ok();
        let _ = report.send(listening);
        if good {
            let _ = ended.recv();
        }
        end_child(&mut child)
    })?;
    let running = Running { end, keeper };
    match started.recv().unwrap_or_else(|_| Err(io::Error::other("its keeper ended"))) {
        Ok(()) => Ok(running),
        Err(error) => {
            running.stop();
            Err(error)
        }
    }
}

/// A new directory that nobody else can enter.
fn private_directory() -> io::Result<PathBuf> {
    let mut dice = [0; 8];
    rustix::rand::getrandom(&mut dice, rustix::rand::GetRandomFlags::empty())?;
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_dir());
    let name = format!("hob-{:016x}", u64::from_ne_bytes(dice));
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

/// Ends a child, if it has not ended by itself; then its complaint is returned.
fn end_child(child: &mut Child) -> String {
    // A connection that breaks may be the first sign of a child that is about to end.
    for _ in 0..10 {
        if !matches!(child.try_wait(), Ok(None)) {
            return complaint(child);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // SIGTERM lets it flush its metadata.
    let _ = rustix::process::kill_process(Pid::from_child(child), Signal::TERM);
    let deadline = Clock::now() + END_MAX;
    while matches!(child.try_wait(), Ok(None)) {
        if Clock::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    String::new()
}
