//! Protects the daemon when the file of guest memory is truncated while the daemon accesses it.
//!
//! A memfd can be sealed against truncation, but a hugetlbfs file or a plain tmpfs file cannot. The
//! guest's process may shorten such a file, or huge pages may run out. The next access would then
//! raise SIGBUS and end a daemon that serves other guests too. The signal handler in this module
//! replaces the whole mapping with empty memory, and the access continues. Reads then return
//! zeroes, so the queue becomes invalid, and writes are lost. Faults outside guest memory are
//! passed to the previous handler.
//!
//! The handler uses only a table of atomics and two system calls, which are safe in a signal
//! handler.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of protected mappings of guest memory, over all vhost-user clients.
const GUARDED_MAX: usize = 4096;

/// Address range of a protected mapping: first address (0 for a free entry), and length in bytes.
struct Range {
    start: AtomicUsize,
    len: AtomicUsize,
}

static RANGES: [Range; GUARDED_MAX] =
    [const { Range { start: AtomicUsize::new(0), len: AtomicUsize::new(0) } }; GUARDED_MAX];

/// The SIGBUS handler that was set before hob's.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Protects the daemon against SIGBUS in one mapping of guest memory. Dropping this value ends the
/// protection; drop it before the mapping.
#[derive(Debug)]
pub(super) struct Guard(usize);

impl Guard {
    /// Protects a mapping. Returns `None` if too many mappings are protected, or the signal handler
    /// cannot be set.
    pub(super) fn new(start: *mut u8, len: usize) -> Option<Guard> {
        install()?;
        let free = |range: &Range| {
            let taken = range.start.compare_exchange(0, usize::MAX, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        };
        let place = RANGES.iter().position(free)?;
        RANGES[place].len.store(len, Ordering::Release);
        RANGES[place].start.store(start as usize, Ordering::Release);
        Some(Guard(place))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        RANGES[self.0].start.store(0, Ordering::Release);
    }
}

fn install() -> Option<()> {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the call reads the present action into `before`, which has the right size.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) } != 0 {
            return false;
        }
        // SAFETY: the successful call above initialized `before`.
        BEFORE.get_or_init(|| unsafe { before.assume_init() });
        // SAFETY: a zeroed sigaction is valid, and all needed fields are set here. The handler does
        // only what a signal handler may do (see above).
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) == 0
        }
    });
    installed.then_some(())
}

extern "C" fn handle(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler with SA_SIGINFO; for SIGBUS it has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    for range in &RANGES {
        let start = range.start.load(Ordering::Acquire);
        if start == 0 || start == usize::MAX || address < start {
            continue;
        }
        let len = range.len.load(Ordering::Acquire);
        if address - start >= len {
            continue;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the range is one of hob's mappings, valid as long as its guard, and accessed only
        // with volatile operations. Guest memory may change at any time, so new contents are
        // allowed.
        let put = unsafe { libc::mmap(start as *mut libc::c_void, len, protection, flags, -1, 0) };
        if put != libc::MAP_FAILED {
            return;
        }
    }
    // The fault is outside guest memory. The access faults again, in the previous handler.
    let before = BEFORE.get().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `before` is a sigaction that the system returned. This handler is set only after
    // `BEFORE`, so it is not null and the fault is not repeated for ever.
    unsafe { libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::MemfdFlags;
    use vhost::vhost_user::message::VhostUserMemoryRegion;

    use super::super::memory::GuestMap;

    #[test]
    fn memory_that_is_cut_off_reads_as_zeroes_and_ends_nothing() {
        // Without the flag ALLOW_SEALING, the memfd cannot be sealed.
        let file = File::from(rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(8 << 20).unwrap();
        let region = VhostUserMemoryRegion::new(0, 4 << 20, 0x1000_0000, 4 << 20);
        let map = GuestMap::map(&[region], vec![file.try_clone().unwrap()]).unwrap();
        assert!(map.write(12_345, &[7; 100]));
        let mut bytes = [1; 100];
        assert!(map.read(12_345, &mut bytes) && bytes == [7; 100]);
        file.set_len(4096).unwrap();
        assert!(map.read(12_345, &mut bytes) && bytes == [0; 100]);
        assert!(map.write((4 << 20) - 100, &[7; 100]));
        drop(map);
        assert_eq!(file.metadata().unwrap().len(), 4096);
    }
}
