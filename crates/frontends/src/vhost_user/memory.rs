//! The guest memory that a vhost-user client shares with the daemon.
//!
//! # Rules
//! The guest and the client write to this memory at any time. So no code borrows guest memory:
//! everything is copied out, and read once. All accesses use `vm-memory`, which checks their
//! bounds.
//!
//! Only regular files on tmpfs (a memfd is one) and hugetlbfs can be mapped. On other filesystems,
//! such as FUSE, the filesystem's server could block an access for ever. A file must be as long as
//! the memory table says. Where possible, the file is sealed against shrinking. If it cannot be
//! sealed, [`guard`](super::guard) makes a truncation harmless.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::bitmap::BS;
use vm_memory::{
    AtomicAccess, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
    VolatileSlice,
};

use super::chain::{Segment, total};
use super::guard::Guard;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58F6;

/// Maximum size of one region in bytes. No guest has more memory.
const REGION_BYTES_MAX: u64 = 1 << 47;

/// Why shared guest memory cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The memory's file is neither on tmpfs nor on hugetlbfs.
    #[error("guest memory must be shared memory: a memfd, or a file on tmpfs or hugetlbfs")]
    Kind,
    /// The memory's file is shorter than the region.
    #[error("the file of a guest memory region is shorter than the region")]
    TooShort,
    /// Too many memory regions are mapped already.
    #[error("too many regions of guest memory are mapped")]
    Unguarded,
    /// The memory regions overlap or are invalid.
    #[error("the regions of guest memory overlap or are invalid")]
    Layout,
    /// A system call failed.
    #[error("guest memory cannot be mapped: {0}")]
    System(#[from] rustix::io::Errno),
}

/// One mapping of a guest memory file. The mapping may start before the memory region, because
/// hugetlbfs maps only whole huge pages.
#[derive(Debug)]
pub(super) struct Mapping {
    /// The mapping's protection against truncation, dropped before the mapping.
    guard: Option<Guard>,
    base: *mut u8,
    len: usize,
}

// SAFETY: any thread may use the mapping, because its bytes are accessed only with `vm-memory`'s
// volatile operations.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: this object owns the mapping, and every user of the memory holds the `GuestMap`
        // that owns this object.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Addresses of a memory region: the guest's and the client's.
#[derive(Clone, Copy, Debug)]
struct RegionAddresses {
    guest: u64,
    user: u64,
    len: u64,
}

/// The memory of a guest, mapped into the daemon.
#[derive(Debug)]
pub struct GuestMap {
    memory: GuestMemoryMmap,
    places: Vec<RegionAddresses>,
    /// The mappings of the regions; `memory` points into them, so they are dropped later.
    _mappings: Vec<Mapping>,
}

impl GuestMap {
    /// Maps the regions that the vhost-user client shares, one file each.
    ///
    /// # Errors
    /// Returns a [`MapError`] if a region cannot be mapped. Then no region stays mapped.
    pub fn map(regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<GuestMap, MapError> {
        if regions.len() != files.len() {
            return Err(MapError::Layout);
        }
        let mut mapped = Vec::new();
        let mut places = Vec::new();
        let mut mappings = Vec::new();
        for (region, file) in regions.iter().zip(&files) {
            let (guest, user) = (region.guest_phys_addr, region.user_addr);
            let (len, offset) = (region.memory_size, region.mmap_offset);
            let (mapping, region) = map_region(file, guest, offset, len)?;
            places.push(RegionAddresses { guest, user, len });
            mappings.push(mapping);
            mapped.push(region);
        }
        mapped.sort_by_key(vm_memory::GuestMemoryRegion::start_addr);
        let memory = GuestMemoryMmap::from_regions(mapped).map_err(|_| MapError::Layout)?;
        Ok(GuestMap { memory, places, _mappings: mappings })
    }

    /// Wraps existing memory with guest addresses, for tests.
    pub fn from_memory(memory: GuestMemoryMmap) -> GuestMap {
        let place = |region: &GuestRegionMmap| {
            let (start, len) =
                (vm_memory::GuestMemoryRegion::start_addr(region), vm_memory::GuestMemoryRegion::len(region));
            RegionAddresses { guest: start.0, user: start.0, len }
        };
        let places = memory.iter().map(place).collect();
        GuestMap { memory, places, _mappings: Vec::new() }
    }

    /// Returns the guest address of the client's address `user`; `None` if no region has this
    /// address.
    pub fn guest_address(&self, user: u64) -> Option<u64> {
        let place = self.places.iter().find(|place| user >= place.user && user - place.user < place.len)?;
        Some(place.guest + (user - place.user))
    }

    /// Returns true if the whole range is guest memory.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        usize::try_from(len).is_ok_and(|len| self.memory.check_range(GuestAddress(address), len))
    }

    /// Copies guest memory to `bytes`. Returns false, with undefined `bytes`, if the range is not
    /// guest memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.memory.read_slice(bytes, GuestAddress(address)).is_ok()
    }

    /// Copies `bytes` to guest memory. Returns false if the range is not guest memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.memory.write_slice(bytes, GuestAddress(address)).is_ok()
    }

    /// Returns the slices of guest memory in a range. The iterator ends early at an address that is
    /// not guest memory.
    fn slices(&self, address: u64, len: usize) -> impl Iterator<Item = VolatileSlice<'_>> {
        self.memory.get_slices(GuestAddress(address), len).map_while(Result::ok)
    }

    /// Returns a range of guest memory for repeated access; `None` if the range is not inside one
    /// memory region.
    pub(super) fn part(self: &Arc<Self>, address: u64, len: usize) -> Option<Part> {
        let slice = self.memory.get_slice(GuestAddress(address), len).ok()?;
        // SAFETY: the slice points into a mapping that `memory` owns, and the part holds `memory`.
        // Only the lifetime changes.
        let slice =
            unsafe { std::mem::transmute::<VolatileSlice<'_, BS<'_, ()>>, VolatileSlice<'static>>(slice) };
        Some(Part { slice, _map: Arc::clone(self) })
    }
}

/// A list of ranges of guest memory.
#[derive(Clone, Copy, Debug)]
pub struct GuestRun<'a> {
    map: &'a Arc<GuestMap>,
    segments: &'a [Segment],
    len: u64,
}

impl<'a> GuestRun<'a> {
    pub(super) fn new(map: &'a Arc<GuestMap>, segments: &'a [Segment]) -> GuestRun<'a> {
        GuestRun { map, segments, len: total(segments) }
    }

    /// Returns the total length of the ranges, bytes.
    #[allow(clippy::len_without_is_empty)] // An empty offer is not sent.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the guest memory that the ranges belong to.
    pub fn map(&self) -> &'a Arc<GuestMap> {
        self.map
    }

    /// Calls `tell` for each slice of guest memory in the ranges.
    pub fn for_each<'m>(&self, map: &'m GuestMap, mut tell: impl FnMut(VolatileSlice<'m>)) {
        for segment in self.segments {
            map.slices(segment.address, segment.len as usize).for_each(&mut tell);
        }
    }
}

fn map_region(
    file: &File,
    guest: u64,
    offset: u64,
    len: u64,
) -> Result<(Mapping, GuestRegionMmap), MapError> {
    // The length can be any number: libblkio shares memory of exactly the size of its rings.
    if !(offset | guest).is_multiple_of(4096) {
        return Err(MapError::Layout);
    }
    let (mapping, region) = map_file(file, offset, len)?;
    let region = GuestRegionMmap::new(region, GuestAddress(guest)).ok_or(MapError::Layout)?;
    Ok((mapping, region))
}

/// Maps a part of a file; `offset` is at a page boundary.
pub(super) fn map_file(file: &File, offset: u64, len: u64) -> Result<(Mapping, MmapRegion), MapError> {
    let stat = rustix::fs::fstat(file)?;
    let system = rustix::fs::fstatfs(file)?;
    let magic = system.f_type as u64 & 0xFFFF_FFFF;
    let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_regular || !matches!(magic, TMPFS_MAGIC | HUGETLBFS_MAGIC) {
        return Err(MapError::Kind);
    }
    let end = offset.checked_add(len).ok_or(MapError::Layout)?;
    if len == 0 || end > REGION_BYTES_MAX || !offset.is_multiple_of(4096) {
        return Err(MapError::Layout);
    }
    // A sealed file cannot be truncated while a shard accesses it. hugetlbfs, and files created
    // without support for sealing, refuse the seal and are used without it.
    let _ = rustix::fs::fcntl_add_seals(file.as_fd(), SealFlags::SHRINK);
    if rustix::fs::fstat(file)?.st_size < end as i64 {
        return Err(MapError::TooShort);
    }
    let page = if magic == HUGETLBFS_MAGIC { (system.f_bsize as u64).max(4096) } else { 4096 };
    let first = offset / page * page;
    let map_len = usize::try_from((end - first).next_multiple_of(page)).map_err(|_| MapError::Layout)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses the address of the new mapping, so no existing memory is affected.
    let base = unsafe { mmap(std::ptr::null_mut(), map_len, protection, flags, file, first)? };
    let mut mapping = Mapping { guard: None, base: base.cast(), len: map_len };
    mapping.guard = Some(Guard::new(mapping.base, map_len).ok_or(MapError::Unguarded)?);
    // Child processes do not need guest memory, and core dumps should not contain it. SAFETY:
    // neither advice changes the contents of this mapping for the daemon.
    unsafe {
        let _ = madvise(base, map_len, Advice::LinuxDontFork);
        let _ = madvise(base, map_len, Advice::LinuxDontDump);
    }
    let start = mapping.base.wrapping_add((offset - first) as usize);
    // SAFETY: `start` and `len` are inside the mapping made above. `GuestMap` owns the mapping as
    // long as the region.
    let region =
        unsafe { MmapRegion::build_raw(start, len as usize, protection.bits() as i32, flags.bits() as i32) };
    Ok((mapping, region.map_err(|_| MapError::Layout)?))
}

/// A range of guest memory that stays mapped while this value exists.
#[derive(Debug)]
pub(super) struct Part {
    slice: VolatileSlice<'static>,
    _map: Arc<GuestMap>,
}

impl Part {
    /// Loads the value at byte offset `at` of this part.
    ///
    /// # Panics
    /// Panics if the value is unaligned or outside the range. The daemon computes all offsets, so
    /// such a value is a bug of the daemon.
    #[inline]
    pub(super) fn load<T: AtomicAccess>(&self, at: usize, order: Ordering) -> T {
        self.slice.load(at, order).expect("inside its part and aligned")
    }

    /// Stores a value at byte offset `at` of this part.
    ///
    /// # Panics
    /// Panics in the same cases as `load`.
    #[inline]
    pub(super) fn store<T: AtomicAccess>(&self, at: usize, value: T, order: Ordering) {
        self.slice.store(value, at, order).expect("inside its part and aligned");
    }

    /// Copies bytes of the range to `bytes`.
    ///
    /// # Panics
    /// Panics if the bytes are outside the range.
    #[inline]
    pub(super) fn read(&self, at: usize, bytes: &mut [u8]) {
        self.slice.read_slice(bytes, at).expect("inside its part");
    }

    /// Returns true if the range's first byte is aligned to `to` in the daemon's address space.
    pub(super) fn is_aligned(&self, to: usize) -> bool {
        (self.slice.ptr_guard().as_ptr() as usize).is_multiple_of(to)
    }
}
