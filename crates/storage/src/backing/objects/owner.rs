//! The owner of a disk according to its manifest, and whether that process has ended.
//!
//! An owner is identified by machine id, boot id, PID namespace, process id and start time. All of
//! these are known without the network. An owner counts as ended only if that is certain. The check
//! guards against mistakes. The manifest's number excludes a second writer.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::fields::{array_at, put, u32_at, u64_at};
use crate::pool::Uuid;

/// Longest stored host name, bytes.
const NAME_BYTES: usize = 64;

/// Offsets of the owner's fields in the manifest; see docs/FORMAT.md.
mod at {
    pub(super) const MACHINE: usize = 0x00;
    pub(super) const BOOT: usize = 0x10;
    pub(super) const SPACE: usize = 0x20;
    pub(super) const STARTED: usize = 0x28;
    pub(super) const PROCESS: usize = 0x30;
    pub(super) const NAME_LEN: usize = 0x34;
    pub(super) const NAME: usize = 0x38;
}

/// A process on a host. A value of zeroes with an empty host name means that there is no owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner {
    /// Machine id from `/etc/machine-id`; 0 if the host has none.
    machine: u128,
    /// The kernel's name of this boot.
    boot: u128,
    /// Id of the process's PID namespace.
    space: u64,
    process: u32,
    /// Start time of the process, in the kernel's ticks since the boot.
    started: u64,
    /// Name of the host, for users.
    host: String,
}

/// Whether an owner that did not close the disk still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnerLiveness {
    /// The owner has ended.
    Gone,
    /// The owner's process runs on this host.
    Here,
    /// The owner may run, on another host or in another container.
    Elsewhere,
}

impl Owner {
    /// Returns the description of this process as an owner.
    pub(super) fn this() -> Owner {
        let line = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let number = |text: &str| u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0);
        let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let space: String = space.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
        let process = std::process::id();
        let host = line("/proc/sys/kernel/hostname").trim().to_owned();
        let end = (0..=NAME_BYTES.min(host.len())).rfind(|end| host.is_char_boundary(*end)).unwrap_or(0);
        Owner {
            machine: number(&line("/etc/machine-id")),
            boot: number(&line("/proc/sys/kernel/random/boot_id")),
            space: space.parse().unwrap_or(0),
            process,
            started: started(process).unwrap_or(0),
            host: host[..end].to_owned(),
        }
    }

    /// Returns whether this owner, which did not close the disk, still runs. `is_open` means that
    /// this process has the disk open.
    pub(super) fn presence(&self, this: &Owner, is_open: bool) -> OwnerLiveness {
        if *self == Owner::default() {
            return OwnerLiveness::Gone;
        }
        if self.boot != this.boot || self.boot == 0 {
            let rebooted = self.machine != 0 && self.machine == this.machine && self.boot != 0;
            return if rebooted { OwnerLiveness::Gone } else { OwnerLiveness::Elsewhere };
        }
        if self.space != this.space {
            // The owner is in another container, whose processes are not visible here.
            return OwnerLiveness::Elsewhere;
        }
        let is_this = self.process == this.process && self.started == this.started;
        let lives = if is_this { is_open } else { started(self.process) == Some(self.started) };
        if lives { OwnerLiveness::Here } else { OwnerLiveness::Gone }
    }

    pub(super) fn put(&self, bytes: &mut [u8]) {
        put(bytes, at::MACHINE, &self.machine.to_le_bytes());
        put(bytes, at::BOOT, &self.boot.to_le_bytes());
        put(bytes, at::SPACE, &self.space.to_le_bytes());
        put(bytes, at::STARTED, &self.started.to_le_bytes());
        put(bytes, at::PROCESS, &self.process.to_le_bytes());
        put(bytes, at::NAME_LEN, &(self.host.len() as u32).to_le_bytes());
        put(bytes, at::NAME, self.host.as_bytes());
    }

    pub(super) fn take(bytes: &[u8]) -> Result<Owner, String> {
        let len = u32_at(bytes, at::NAME_LEN) as usize;
        let name = bytes.get(at::NAME..at::NAME + NAME_BYTES).and_then(|name| name.get(..len));
        let host = name.and_then(|name| std::str::from_utf8(name).ok());
        Ok(Owner {
            machine: u128::from_le_bytes(array_at(bytes, at::MACHINE)),
            boot: u128::from_le_bytes(array_at(bytes, at::BOOT)),
            space: u64_at(bytes, at::SPACE),
            process: u32_at(bytes, at::PROCESS),
            started: u64_at(bytes, at::STARTED),
            host: host.ok_or("its owner has no readable name")?.to_owned(),
        })
    }

    #[cfg(test)]
    pub(super) fn test(host: &str, machine: u128) -> Owner {
        Owner { machine, boot: machine + 1, space: 1, process: 1, started: 5, host: host.to_owned() }
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == Owner::default() {
            return f.write_str("another process");
        }
        // The text from the object store is not trusted, so it must not contain control characters
        // for a terminal.
        let host: String = self.host.chars().filter(|c| !c.is_control()).collect();
        write!(f, "process {} on host {host}", self.process)
    }
}

/// Returns the start time of a process in ticks since the boot; `None` if the process does not
/// exist.
fn started(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in parentheses may contain anything; the wanted field is the 20th after its end.
    let fields = stat.rsplit_once(')')?.1;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Disks that this process has open for writing.
static OPEN: Mutex<BTreeMap<[u8; 16], OpenState>> = Mutex::new(BTreeMap::new());
/// Notified when a disk was closed.
static LEFT: Condvar = Condvar::new();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenState {
    Here,
    /// The disk is being closed.
    Leaving,
}

fn open() -> MutexGuard<'static, BTreeMap<[u8; 16], OpenState>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits, at most `wait_max`, until all disks that are being closed are closed.
pub(super) fn await_leaving(wait_max: Duration) {
    let is_leaving =
        |open: &mut BTreeMap<_, OpenState>| open.values().any(|state| *state == OpenState::Leaving);
    let left = LEFT.wait_timeout_while(open(), wait_max, is_leaving);
    drop(left.unwrap_or_else(PoisonError::into_inner));
}

/// Registration of a disk that this process has open for writing.
#[derive(Debug)]
pub(super) struct Here {
    uuid: Uuid,
    is_open: AtomicBool,
}

impl Here {
    /// Registers a disk; `None` if this process has it open already. If the disk is being closed,
    /// waits at most `wait_max` until it is closed.
    pub(super) fn enter(uuid: Uuid, wait_max: Duration) -> Option<Here> {
        let is_leaving = |open: &mut BTreeMap<_, OpenState>| open.get(&uuid.0) == Some(&OpenState::Leaving);
        let left = LEFT.wait_timeout_while(open(), wait_max, is_leaving);
        let (mut open, _) = left.unwrap_or_else(PoisonError::into_inner);
        if open.contains_key(&uuid.0) {
            return None;
        }
        open.insert(uuid.0, OpenState::Here);
        Some(Here { uuid, is_open: AtomicBool::new(true) })
    }
}

#[cfg(test)]
impl Here {
    /// Returns the registration of another process, for tests.
    pub(super) fn elsewhere() -> Here {
        Here { uuid: Uuid([0xEE; 16]), is_open: AtomicBool::new(false) }
    }
}

impl Here {
    /// Marks the disk as being closed. Callers that want to open it wait.
    pub(super) fn begin_leaving(&self) {
        let mut open = open();
        if self.is_open.load(Ordering::Acquire) {
            open.insert(self.uuid.0, OpenState::Leaving);
        }
    }

    /// Removes the registration, so that the disk can be opened again.
    pub(super) fn leave(&self) {
        let mut open = open();
        if self.is_open.swap(false, Ordering::AcqRel) {
            open.remove(&self.uuid.0);
            LEFT.notify_all();
        }
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_that_certainly_ended_counts_as_ended() {
        let this = Owner::this();
        assert!(this.boot != 0 && this.space != 0 && this.started != 0, "{this:?}");
        assert_eq!(this.presence(&this, true), OwnerLiveness::Here);
        assert_eq!(this.presence(&this, false), OwnerLiveness::Gone, "it was closed badly");
        assert_eq!(Owner::default().presence(&this, false), OwnerLiveness::Gone);
        // Process 1 exists, but it was started at another time.
        let earlier = Owner { process: 1, started: u64::MAX, ..this.clone() };
        assert_eq!(earlier.presence(&this, false), OwnerLiveness::Gone);
        let first = Owner { process: 1, started: started(1).unwrap(), ..this.clone() };
        assert_eq!(first.presence(&this, false), OwnerLiveness::Here);
        let container = Owner { space: this.space + 1, ..first };
        assert_eq!(container.presence(&this, false), OwnerLiveness::Elsewhere);
        let other = Owner::test("other", 5);
        assert_eq!(other.presence(&Owner::test("this", 9), false), OwnerLiveness::Elsewhere);
        let before = Owner { boot: 77, ..other.clone() };
        assert_eq!(before.presence(&other, false), OwnerLiveness::Gone, "the host was restarted");
        let nameless = Owner { machine: 0, ..before };
        assert_eq!(nameless.presence(&Owner { machine: 0, ..other }, false), OwnerLiveness::Elsewhere);
    }

    #[test]
    fn a_disk_is_open_once() {
        let enter = |wait_max| Here::enter(Uuid([0xA5; 16]), wait_max);
        let here = enter(Duration::MAX).unwrap();
        assert!(enter(Duration::MAX).is_none(), "no thread closes the disk: there is nothing to wait for");
        here.begin_leaving();
        assert!(enter(Duration::ZERO).is_none());
        std::thread::scope(|scope| {
            let next = scope.spawn(|| enter(Duration::MAX));
            drop(here);
            assert!(next.join().unwrap().is_some());
        });
        assert!(enter(Duration::MAX).is_some());
    }

    #[test]
    fn names_of_hosts_do_no_harm() {
        let owner = Owner::test("a\u{1b}[31mb\n", 3);
        assert_eq!(owner.to_string(), "process 1 on host a[31mb");
        let mut bytes = [0; 0xA0];
        owner.put(&mut bytes);
        assert_eq!(Owner::take(&bytes), Ok(owner));
        put(&mut bytes, at::NAME_LEN, &65u32.to_le_bytes());
        assert!(Owner::take(&bytes).is_err());
    }
}
