//! qcow2, VMDK, VDI, VHDX and VPC images, read through a `qemu-nbd` of our own.
//!
//! The image's format is found from its magic number; `qemu-nbd` is started for it on a Unix socket in
//! a directory that only this user can enter, and from there on the backing is an NBD export. The child
//! ends with the backing, and with hob, even when hob is killed: it asks the kernel for
//! SIGTERM when its parent thread dies, and that thread does nothing but wait for the backing's end.
//!
//! The child locks the image as QEMU does, which keeps a running guest and hob from writing it together.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Clock};

use hob_engine::command::Access;
use hob_engine::io::{Io, IoError};
use hob_engine::units::{Instant, IoId};
use hob_nbd::uri::{Address, NbdUri};
use rustix::process::{Pid, Signal};

use super::identity;
use super::nbd::{NbdBacking, open_uri};
use super::{BackingInfo, BackingOptions, Driver, OpenError, Status};
use crate::ring::{Completion, Ring};
use crate::token::TokenSpace;

/// How long a child may take to end by itself.
const END_MAX: Duration = Duration::from_secs(5);

/// Longest complaint of a child that is passed on, bytes.
const COMPLAINT_BYTES_MAX: u64 = 4096;

/// Image formats: name for people, name for QEMU, offset of the magic number, magic number.
const FORMATS: &[(&str, &str, u64, &[u8])] = &[
    ("qcow2", "qcow2", 0, b"QFI\xfb"),
    ("VMDK", "vmdk", 0, b"KDMV"),
    ("VMDK", "vmdk", 0, b"# Disk DescriptorFile"),
    ("VDI", "vdi", 0x40, b"\x7f\x10\xda\xbe"),
    ("VHDX", "vhdx", 0, b"vhdxfile"),
    ("VPC", "vpc", 0, b"conectix"),
];

/// How the child may access the image, best first; older QEMUs and some filesystems lack the first ones.
const ACCESS_MODES: &[&[&str]] = &[
    &["--cache=none", "--aio=io_uring"],
    &["--cache=none", "--aio=native"],
    &["--cache=writeback", "--aio=threads"],
];

fn format_of(path: &Path) -> Option<(&'static str, &'static str)> {
    let file = File::open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let matches = |offset: u64, magic: &[u8]| {
        let mut bytes = vec![0; magic.len()];
        file.read_exact_at(&mut bytes, offset).is_ok() && bytes == magic
    };
    let found = FORMATS.iter().find(|(.., offset, magic)| matches(*offset, magic));
    found.map(|(name, qemu_name, ..)| (*name, *qemu_name))
}

pub(super) fn recognise(spec: &str) -> bool {
    format_of(Path::new(spec)).is_some()
}

/// Starts a `qemu-nbd` for the image and connects to it.
pub(super) fn open(
    spec: &str,
    access: Access,
    options: &BackingOptions,
) -> Result<Box<dyn Driver>, OpenError> {
    let path = std::path::absolute(spec)
        .map_err(|source| OpenError::System { path: PathBuf::from(spec), source })?;
    let Some((format, qemu_format)) = format_of(&path) else {
        return Err(OpenError::Spec { spec: spec.to_owned(), reason: "not an image any more".into() });
    };
    let metadata =
        std::fs::metadata(&path).map_err(|source| OpenError::System { path: path.clone(), source })?;
    let mut complaint = String::new();
    for modes in ACCESS_MODES {
        match Server::start(&path, qemu_format, access, modes, options.connect_max) {
            Ok(mut server) => {
                let address = Address::Unix { path: server.socket() };
                let uri = NbdUri { address, export: String::new() };
                let description = format!("{format} image {spec} (qemu-nbd {})", modes.join(" "));
                let whose = |size_bytes| identity::of_file(&format!("{format} image"), &metadata, size_bytes);
                match open_uri(&uri, access, options, description, &whose) {
                    Ok(inner) => return Ok(Box::new(QemuNbd { inner, _server: server })),
                    // It listens before it looks at the image; why it gave up, it says on its way out.
                    Err(OpenError::Connect { reason, .. }) => {
                        complaint = Some(server.stop()).filter(|words| !words.is_empty()).unwrap_or(reason);
                    }
                    Err(error) => return Err(error),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let program = "qemu-nbd";
                return Err(OpenError::MissingProgram { format, program, package: "qemu-utils" });
            }
            Err(error) => complaint = error.to_string(),
        }
    }
    Err(OpenError::Unfit { what: format!("{format} image {spec}"), reason: complaint })
}

/// A running `qemu-nbd`; dropping it ends the child and removes its directory.
struct Server {
    directory: PathBuf,
    end: Option<mpsc::Sender<()>>,
    /// Returns the child's complaint when it ended by itself.
    keeper: Option<JoinHandle<String>>,
}

impl Server {
    /// Starts the child and waits until it listens. `NotFound` means that the program is missing.
    fn start(
        image: &Path,
        format: &str,
        access: Access,
        modes: &'static [&'static str],
        limit: Duration,
    ) -> io::Result<Server> {
        let directory = private_directory()?;
        let socket = directory.join("socket");
        let mut command = Command::new("qemu-nbd");
        command.arg("--socket").arg(&socket).arg("--format").arg(format);
        command.args(["--persistent", "--shared=0", "--discard=unmap"]).args(modes);
        if access == Access::ReadOnly {
            command.arg("--read-only");
        }
        command.arg("--").arg(image).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
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
        let keeper_socket = socket.clone();
        let keeper = std::thread::Builder::new().name("hob-qemu-nbd".into()).spawn(move || {
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => {
                    let _ = report.send(Err(error));
                    return String::new();
                }
            };
            let listening = wait_for_socket(&mut child, &keeper_socket, limit);
            let good = listening.is_ok();
            let _ = report.send(listening);
            if good {
                let _ = ended.recv();
            }
            end_child(&mut child)
        });
        let server = Server { directory, end: Some(end), keeper: Some(keeper?) };
        started.recv().unwrap_or_else(|_| Err(io::Error::other("its keeper ended")))?;
        Ok(server)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Ends the child; returns its complaint if it had ended by itself.
    fn stop(&mut self) -> String {
        drop(self.end.take());
        self.keeper.take().and_then(|keeper| keeper.join().ok()).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.directory);
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

/// An NBD backing whose server lives and dies with it.
struct QemuNbd {
    inner: NbdBacking,
    // Dropped after the connection to it.
    _server: Server,
}

impl Driver for QemuNbd {
    fn info(&self) -> &BackingInfo {
        self.inner.info()
    }

    fn attach(&mut self, ring: &mut Ring, now: Instant, tokens: TokenSpace) {
        self.inner.attach(ring, now, tokens);
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        self.inner.submit(ring, now, io);
    }

    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        self.inner.handle_completion(ring, now, completion);
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.inner.poll_done()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.inner.poll_timeout()
    }

    fn handle_timeout(&mut self, ring: &mut Ring, now: Instant) {
        self.inner.handle_timeout(ring, now);
    }

    fn submit_status(&mut self, ring: &mut Ring, now: Instant, id: u64, offset: u64, len: u64) {
        self.inner.submit_status(ring, now, id, offset, len);
    }

    fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.inner.poll_status()
    }

    fn hold_back(&mut self, ring: &mut Ring, now: Instant) {
        self.inner.hold_back(ring, now);
    }

    fn go_on(&mut self) {
        self.inner.go_on();
    }

    fn lose(&mut self, ring: &mut Ring, now: Instant) {
        self.inner.lose(ring, now);
    }

    fn close(&mut self, ring: &mut Ring) {
        self.inner.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        self.inner.read_before_attach(offset, bytes)
    }
}
