//! Sandbox of the QEMU programs that hob starts for an image whose files are recorded. The QEMU
//! programs may open the recorded files, but no other data of the host. The QEMU programs may also
//! open programs, libraries, and the settings that libraries read.
//!
//! Landlock, a function of the kernel, restricts the programs, even when hob runs as root. If the
//! header of an image names another host file, the programs cannot open that file. From Linux 6.7
//! on, the programs cannot use TCP either. Without Landlock (Linux before 5.13, or disabled), the
//! programs can open all files that hob can open. hob then only checks the recorded files, and logs
//! a warning once. With and without Landlock, the programs gain no privileges (`no_new_privs`).
//!
//! Landlock: <https://docs.kernel.org/userspace-api/landlock.html>.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use super::super::{Format, ImageFile, Role};
use super::node::Image;

/// `LANDLOCK_ACCESS_FS_*`.
mod access {
    pub(super) const EXECUTE: u64 = 1;
    pub(super) const WRITE_FILE: u64 = 1 << 1;
    pub(super) const READ_FILE: u64 = 1 << 2;
    pub(super) const READ_DIR: u64 = 1 << 3;
    pub(super) const REMOVE_FILE: u64 = 1 << 5;
    pub(super) const MAKE_SOCK: u64 = 1 << 9;
    pub(super) const TRUNCATE: u64 = 1 << 14;
    pub(super) const IOCTL_DEV: u64 = 1 << 15;
    /// Access rights that a rule for a single file may contain.
    pub(super) const OF_FILES: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
}

/// Number of file access rights that each version of Landlock supports. The supported rights are
/// the low bits.
const ACCESS_BITS: [u32; 5] = [13, 14, 15, 15, 16];

/// First version of the kernel's interface that restricts TCP.
const VERSION_OF_TCP: i64 = 4;

/// First version of the kernel's interface that restricts abstract Unix sockets and signals.
const VERSION_OF_SCOPES: i64 = 6;

/// Directories of programs and libraries.
const PROGRAMS: &[&str] = &["/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store"];

/// Files and directories that libraries read when a program starts.
const SETTINGS: &[&str] = &[
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/gnutls",
    "/etc/crypto-policies",
    "/etc/ssl/openssl.cnf",
    "/etc/libnl",
    "/dev/urandom",
    "/dev/random",
    "/proc/sys",
    "/sys/devices/system",
    "/sys/kernel/mm",
];

const RULE_PATH_BENEATH: u64 = 1;
const CREATE_RULESET_VERSION: u64 = 1;

#[repr(C)]
struct RulesetAttr {
    access_fs: u64,
    access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneathAttr {
    access: u64,
    parent: i32,
}

/// The restrictions of one program, applied when it starts.
pub(super) struct Sandbox {
    /// Rule set of Landlock; `None` if the kernel has no Landlock.
    rules: Option<OwnedFd>,
}

/// Restricts the program of `command` before it is started. Of the host's data, the program can
/// read only the image and `files`. On a kernel without Landlock, the program can read everything
/// that hob can read.
///
/// # Errors
/// Returns a system error, for example if a file is missing.
pub fn confine(command: &mut Command, image: &Path, files: &[ImageFile]) -> io::Result<()> {
    let image = Image { path: image.to_owned(), format: Format::default(), files: files.to_vec() };
    Sandbox::new(&reads_of(&image))?.enter(command);
    Ok(())
}

impl Sandbox {
    /// Creates the sandbox of a `qemu-nbd` that listens in `directory`.
    pub(super) fn of_server(image: &Image, writes: bool, directory: &Path) -> io::Result<Sandbox> {
        use access::{IOCTL_DEV, MAKE_SOCK, READ_FILE, REMOVE_FILE, TRUNCATE, WRITE_FILE};
        let mut rules = reads_of(image);
        rules.push((directory.to_owned(), MAKE_SOCK | REMOVE_FILE | READ_FILE | WRITE_FILE));
        if writes {
            let own_data = image.files.iter().take_while(|file| file.role == Role::Data);
            let written = own_data.map(|file| &file.path).chain([&image.path]);
            rules.extend(written.map(|path| (path.clone(), READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV)));
        }
        Sandbox::new(&rules)
    }

    /// Creates a sandbox that allows these accesses, in addition to what programs need to start.
    fn new(rules: &[(PathBuf, u64)]) -> io::Result<Sandbox> {
        let Some((ruleset, known)) = new_ruleset()? else {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                tracing::warn!(
                    "this kernel has no Landlock, so qemu-nbd runs with hob's rights and can open \
                    files that an image's header names"
                );
            });
            return Ok(Sandbox { rules: None });
        };
        for path in PROGRAMS.iter().chain(SETTINGS) {
            let allowed = access::READ_FILE | access::READ_DIR | access::EXECUTE;
            match allow(&ruleset, Path::new(path), allowed & known) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        // QEMU opens this file for writing, to find out whether it can lock files.
        allow(&ruleset, Path::new("/dev/null"), (access::READ_FILE | access::WRITE_FILE) & known)?;
        for (path, allowed) in rules {
            let because = |error| io::Error::other(format!("{}: {error}", path.display()));
            allow(&ruleset, path, allowed & known).map_err(because)?;
        }
        Ok(Sandbox { rules: Some(ruleset) })
    }

    /// Makes the program of `command` enter the sandbox before it starts.
    pub(super) fn enter(self, command: &mut Command) {
        let rules = self.rules;
        // SAFETY: between fork and exec only two system calls are made and nothing is allocated,
        // which is permitted in a multi-threaded program. The calls run in the child, because a
        // process can restrict only itself.
        unsafe {
            command.pre_exec(move || {
                let (on, none): (libc::c_ulong, libc::c_ulong) = (1, 0);
                if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, on, none, none, none) != 0 {
                    return Err(io::Error::last_os_error());
                }
                let Some(rules) = &rules else { return Ok(()) };
                match libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            });
        }
    }
}

/// Returns rules that allow reading all files of an image.
fn reads_of(image: &Image) -> Vec<(PathBuf, u64)> {
    let paths = image.files.iter().map(|file| &file.path).chain([&image.path]);
    paths.map(|path| (path.clone(), access::READ_FILE | access::IOCTL_DEV)).collect()
}

/// Creates an empty rule set, and returns the accesses that it restricts; `None` without Landlock.
fn new_ruleset() -> io::Result<Option<(OwnedFd, u64)>> {
    // SAFETY: with this flag the call takes no memory and returns a number.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0usize, 0usize, CREATE_RULESET_VERSION) };
    if version < 1 {
        return Ok(None);
    }
    let bits = ACCESS_BITS[(version as usize).min(ACCESS_BITS.len()) - 1];
    let access_fs = (1 << bits) - 1;
    let attr = RulesetAttr {
        access_fs,
        access_net: if version >= VERSION_OF_TCP { 0b11 } else { 0 },
        scoped: if version >= VERSION_OF_SCOPES { 0b11 } else { 0 },
    };
    // Older kernels refuse a longer structure unless the additional bytes are zeroes, which they
    // are.
    let size = size_of::<RulesetAttr>();
    // SAFETY: the call reads `size` bytes of `attr`, and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: see above.
    Ok(Some((unsafe { OwnedFd::from_raw_fd(fd as i32) }, access_fs)))
}

fn allow(ruleset: &OwnedFd, path: &Path, allowed: u64) -> io::Result<()> {
    let beneath = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
    let is_directory = beneath.metadata()?.is_dir();
    let allowed = if is_directory { allowed } else { allowed & access::OF_FILES };
    let attr = PathBeneathAttr { access: allowed, parent: beneath.as_raw_fd() };
    // SAFETY: the call reads `attr`, and uses the two descriptors, which are open.
    let added = unsafe {
        libc::syscall(libc::SYS_landlock_add_rule, ruleset.as_raw_fd(), RULE_PATH_BENEATH, &raw const attr, 0)
    };
    if added == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `cat` on a file; returns its output on success.
    fn read_by(sandbox: Option<Sandbox>, path: &Path) -> Option<Vec<u8>> {
        let mut command = Command::new("cat");
        command.arg(path);
        if let Some(sandbox) = sandbox {
            sandbox.enter(&mut command);
        }
        let output = command.output().unwrap();
        output.status.success().then_some(output.stdout)
    }

    #[test]
    fn a_confined_program_reads_the_files_of_its_image_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let [image, secret] = ["image", "secret"].map(|name| {
            let path = dir.path().join(name);
            std::fs::write(&path, name).unwrap();
            path
        });
        let of_image = || Image { path: image.clone(), format: Format::Raw, files: Vec::new() };
        let sandbox = || Sandbox::new(&reads_of(&of_image())).unwrap();
        if sandbox().rules.is_none() {
            eprintln!("this kernel has no Landlock: nothing to check");
            return;
        }
        assert_eq!(read_by(None, &secret).as_deref(), Some(&b"secret"[..]));
        assert_eq!(read_by(Some(sandbox()), &image).as_deref(), Some(&b"image"[..]));
        assert_eq!(read_by(Some(sandbox()), &secret), None);
        assert_eq!(read_by(Some(sandbox()), Path::new("/etc/shadow")), None);
        assert_eq!(read_by(Some(sandbox()), Path::new("/proc/1/environ")), None);
        // In the directory of the server's socket, other files are not visible to the child.
        let sockets = dir.path().join("sockets");
        std::fs::create_dir(&sockets).unwrap();
        let server = Sandbox::of_server(&of_image(), true, &sockets).unwrap();
        assert_eq!(read_by(Some(server), &secret), None);
        assert!(Sandbox::of_server(&of_image(), true, &dir.path().join("none")).is_err());
    }
}
