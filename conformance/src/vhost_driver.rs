//! A virtio-blk driver without a guest: it speaks vhost-user to a server and drives one queue itself.
//!
//! The driver produces load that an emulated guest could not produce, and acts as a hostile driver.
//! The driver shares no code with hob.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Number of entries of the queue.
pub const QUEUE: u16 = 256;
/// Maximum number of requests in flight: each has three descriptors.
pub const SLOTS: u16 = QUEUE / 3;
/// Maximum data size of a request in bytes.
pub const DATA_BYTES: u64 = 64 << 10;

/// Address of the descriptor table in the simulated guest memory.
pub const DESCRIPTORS: u64 = 0;
/// Address of the available ring in the simulated guest memory.
pub const AVAILABLE: u64 = 0x2000;
/// Address of the used ring in the simulated guest memory.
pub const USED: u64 = 0x3000;
/// Address of the request headers in the simulated guest memory, 16 bytes for each slot.
pub const HEADERS: u64 = 0x4000;
/// Address of the status bytes in the simulated guest memory, 16 bytes apart.
pub const STATUS: u64 = 0x6000;
/// Address of the data in the simulated guest memory, [`DATA_BYTES`] for each slot.
pub const DATA: u64 = 1 << 20;

const FLUSH: u64 = 1 << 9;
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;

/// Kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Fill the slot's data from the disk.
    Read,
    /// Write the slot's data to the disk.
    Write,
    /// Flush earlier writes.
    Flush,
}

/// A driver with one queue.
pub struct Driver {
    frontend: Frontend,
    memory: GuestMemoryMmap,
    kick: EventFd,
    call: EventFd,
    epoll: Epoll,
    available: u16,
    used: u16,
    /// The server's in-flight memory.
    pub inflight: Option<(VhostUserInflight, File)>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("available", &self.available).finish_non_exhaustive()
    }
}

fn failed(error: impl std::fmt::Debug) -> io::Error {
    io::Error::other(format!("{error:?}"))
}

/// Describes a memory region for the server. The region has the same address in the guest and in
/// this process.
fn slot((address, size, file): &(u64, u64, File)) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: *address,
        memory_size: *size,
        userspace_addr: *address,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

/// Permission of the server to seal the memory's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealing {
    /// The file can be sealed, like QEMU's memfds.
    Possible,
    /// The file cannot be sealed, like files on hugetlbfs.
    Impossible,
}

/// Creates `bytes` of shareable memory.
fn shared_memory(bytes: u64, sealing: Sealing) -> io::Result<GuestMemoryMmap> {
    use rustix::fs::MemfdFlags;
    let flags = match sealing {
        Sealing::Possible => MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        Sealing::Impossible => MemfdFlags::CLOEXEC,
    };
    let file = File::from(rustix::fs::memfd_create("guest", flags)?);
    file.set_len(bytes)?;
    let range = (GuestAddress(0), bytes as usize, Some(FileOffset::new(file, 0)));
    GuestMemoryMmap::from_ranges_with_files([range]).map_err(failed)
}

/// Connects, and negotiates everything that both sides support.
fn agree(socket: &Path) -> io::Result<(Frontend, VhostUserProtocolFeatures)> {
    let mut frontend = Frontend::from_stream(UnixStream::connect(socket)?, 1);
    frontend.set_owner().map_err(failed)?;
    let offered = frontend.get_features().map_err(failed)?;
    let protocol = frontend.get_protocol_features().map_err(failed)?;
    let wanted = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
    frontend.set_protocol_features(protocol & wanted).map_err(failed)?;
    let features = VERSION_1 | INDIRECT_DESC | EVENT_IDX | PROTOCOL | FLUSH;
    frontend.set_features(offered & features).map_err(failed)?;
    Ok((frontend, protocol))
}

impl Driver {
    /// Connects to the server at `socket` and starts the queue.
    ///
    /// # Errors
    /// Returns an error of the server or of the system.
    pub fn connect(socket: &Path) -> io::Result<Driver> {
        Driver::prepared(socket, Sealing::Possible)?.start()
    }

    /// Like `connect`, but does not start the queue, so that the caller can prepare the queue's content.
    ///
    /// # Errors
    /// Returns the same errors as `connect`.
    pub fn prepared(socket: &Path, sealing: Sealing) -> io::Result<Driver> {
        let (mut frontend, protocol) = agree(socket)?;
        let memory = shared_memory(DATA + u64::from(SLOTS) * DATA_BYTES, sealing)?;
        let inflight = protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD).then(|| {
            let wanted = VhostUserInflight::new(0, 0, 1, QUEUE);
            frontend.get_inflight_fd(&wanted).map_err(failed)
        });
        let inflight = inflight.transpose()?;
        let kick = EventFd::new(EFD_NONBLOCK)?;
        let call = EventFd::new(EFD_NONBLOCK)?;
        let epoll = Epoll::new()?;
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        Ok(Driver { frontend, memory, kick, call, epoll, available: 0, used: 0, inflight })
    }

    /// Starts the queue.
    ///
    /// # Errors
    /// Returns the error of the server.
    pub fn start(mut self) -> io::Result<Driver> {
        self.set_up()?;
        Ok(self)
    }

    /// Connects to the server at `socket` after the earlier server has ended, as a VM does, with
    /// the same memory.
    ///
    /// # Errors
    /// Returns an error of the server or of the system.
    pub fn reconnect(&mut self, socket: &Path) -> io::Result<()> {
        (self.frontend, _) = agree(socket)?;
        self.set_up()
    }

    /// Starts the queue. The driver adds its memory and the regions `more` one by one. A region has a
    /// guest address, a size and a file.
    ///
    /// # Errors
    /// Returns the error of the server.
    pub fn start_in_slots(mut self, more: &[(u64, u64, File)]) -> io::Result<Driver> {
        let regions = std::iter::once(self.region()?).chain(more.iter().map(slot));
        for region in regions {
            self.frontend.add_mem_region(&region).map_err(failed)?;
        }
        self.set_up_queue()?;
        Ok(self)
    }

    /// Removes a region that was added.
    ///
    /// # Errors
    /// Returns the error of the server.
    pub fn remove_slot(&mut self, region: &(u64, u64, File)) -> io::Result<()> {
        self.frontend.remove_mem_region(&slot(region)).map_err(failed)
    }

    fn region(&self) -> io::Result<VhostUserMemoryRegionInfo> {
        let region = self.memory.iter().next().expect("one region");
        VhostUserMemoryRegionInfo::from_guest_region(region).map_err(failed)
    }

    fn set_up(&mut self) -> io::Result<()> {
        if let Some((inflight, file)) = &self.inflight {
            self.frontend.set_inflight_fd(inflight, file.as_raw_fd()).map_err(failed)?;
        }
        let region = self.region()?;
        self.frontend.set_mem_table(&[region]).map_err(failed)?;
        self.set_up_queue()
    }

    fn set_up_queue(&mut self) -> io::Result<()> {
        self.frontend.set_vring_num(0, QUEUE).map_err(failed)?;
        self.frontend.set_vring_base(0, self.used).map_err(failed)?;
        let at = |address| self.memory.get_host_address(GuestAddress(address)).map(|host| host as u64);
        let config = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: at(DESCRIPTORS).map_err(failed)?,
            used_ring_addr: at(USED).map_err(failed)?,
            avail_ring_addr: at(AVAILABLE).map_err(failed)?,
            log_addr: None,
        };
        self.frontend.set_vring_addr(0, &config).map_err(failed)?;
        self.frontend.set_vring_call(0, &self.call).map_err(failed)?;
        self.frontend.set_vring_kick(0, &self.kick).map_err(failed)?;
        self.frontend.set_vring_enable(0, true).map_err(failed)
    }

    /// Returns the simulated guest memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Truncates the file of the memory.
    ///
    /// # Errors
    /// Returns the error of the system if the file is sealed.
    pub fn cut_memory(&self, bytes: u64) -> io::Result<()> {
        let region = self.memory.iter().next().expect("one region");
        vm_memory::GuestMemoryRegion::file_offset(region).expect("it has a file").file().set_len(bytes)
    }

    /// Returns the protocol connection, for unusual messages.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// Returns true if the server has closed the connection.
    ///
    /// # Errors
    /// Returns the error of the system.
    pub fn hung_up(&self) -> io::Result<bool> {
        let epoll = Epoll::new()?;
        let ends = EpollEvent::new(EventSet::READ_HANG_UP | EventSet::HANG_UP, 0);
        epoll.ctl(ControlOperation::Add, self.frontend.as_raw_fd(), ends)?;
        Ok(epoll.wait(0, &mut [EpollEvent::default()])? > 0)
    }

    /// Returns the disk's size in bytes.
    ///
    /// # Errors
    /// Returns the error of the server.
    pub fn size_bytes(&mut self) -> io::Result<u64> {
        let (_, config) =
            self.frontend.get_config(0, 8, VhostUserConfigFlags::empty(), &[0; 8]).map_err(failed)?;
        Ok(u64::from_le_bytes(config.try_into().map_err(failed)?) * 512)
    }

    fn put<T: vm_memory::ByteValued>(&self, at: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(at)).expect("inside the memory");
    }

    /// Writes a descriptor of the table at `table`.
    pub fn descriptor(&self, table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let at = table + u64::from(index) * 16;
        self.put(at, address.to_le());
        self.put(at + 8, len.to_le());
        self.put(at + 12, flags.to_le());
        self.put(at + 14, next.to_le());
    }

    /// Submits the request of a slot: `len` bytes at `offset` of the disk.
    pub fn submit(&mut self, slot: u16, kind: Kind, offset: u64, len: u32) {
        let header = HEADERS + u64::from(slot) * 16;
        let (number, data_flags) = match kind {
            Kind::Read => (0u32, 1 | 2),
            Kind::Write => (1, 1),
            Kind::Flush => (4, 1),
        };
        self.put(header, number.to_le());
        self.put(header + 8, (offset / 512).to_le());
        let (status, data) = (STATUS + u64::from(slot) * 16, DATA + u64::from(slot) * DATA_BYTES);
        self.put(status, 0xFFu8);
        let first = slot * 3;
        let next = if kind == Kind::Flush { first + 2 } else { first + 1 };
        self.descriptor(DESCRIPTORS, first, header, 16, 1, next);
        self.descriptor(DESCRIPTORS, first + 1, data, len, data_flags, first + 2);
        self.descriptor(DESCRIPTORS, first + 2, status, 1, 2, 0);
        self.offer(first);
    }

    /// Offers the chain that starts at `head`; `kick` notifies the server.
    pub fn offer(&mut self, head: u16) {
        self.put(AVAILABLE + 4 + 2 * u64::from(self.available % QUEUE), head.to_le());
        self.available = self.available.wrapping_add(1);
    }

    /// Publishes the offered chains, and kicks the server if the server requests kicks.
    pub fn kick(&mut self) {
        let at = GuestAddress(AVAILABLE + 2);
        let old: u16 = self.memory.load(at, Ordering::Relaxed).expect("inside the memory");
        self.memory.store(self.available.to_le(), at, Ordering::Release).expect("inside the memory");
        fence(Ordering::SeqCst);
        let event = GuestAddress(USED + 4 + 8 * u64::from(QUEUE));
        let event: u16 = self.memory.load(event, Ordering::Relaxed).expect("inside the memory");
        if self.available.wrapping_sub(event).wrapping_sub(1) < self.available.wrapping_sub(old) {
            self.kick_anyway();
        }
    }

    /// Kicks the server in any case.
    pub fn kick_anyway(&self) {
        self.kick.write(1).expect("an eventfd takes a one");
    }

    /// Makes the server signal another eventfd for answers, or the driver's own eventfd again.
    ///
    /// # Errors
    /// Returns the error of the server.
    pub fn be_told_by(&mut self, other: Option<&EventFd>) -> io::Result<()> {
        self.frontend.set_vring_call(0, other.unwrap_or(&self.call)).map_err(failed)
    }

    /// Returns true if the server signals the driver within `patience`, even if its rings have no
    /// answer.
    pub fn is_told(&mut self, patience: std::time::Duration) -> bool {
        let mut events = [EpollEvent::default()];
        let ready = self.epoll.wait(patience.as_millis() as i32, &mut events);
        let _ = self.call.read();
        ready.is_ok_and(|ready| ready > 0)
    }

    /// Returns the next answered slot, with its status; `None` if there is none.
    pub fn reap(&mut self) -> Option<(u16, u8)> {
        let index: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).expect("inside");
        if u16::from_le(index) == self.used {
            return None;
        }
        let at = GuestAddress(USED + 4 + 8 * u64::from(self.used % QUEUE));
        let head: u32 = self.memory.read_obj(at).expect("inside the memory");
        self.used = self.used.wrapping_add(1);
        let slot = u32::from_le(head) as u16 / 3;
        let status = GuestAddress(STATUS + u64::from(slot) * 16);
        Some((slot, self.memory.read_obj(status).expect("inside the memory")))
    }

    /// Waits for an answer for at most `patience`. Returns false if no answer arrives.
    pub fn wait(&mut self, patience: std::time::Duration) -> bool {
        let at = GuestAddress(AVAILABLE + 4 + 2 * u64::from(QUEUE));
        self.memory.store(self.used.to_le(), at, Ordering::Relaxed).expect("inside the memory");
        fence(Ordering::SeqCst);
        let index: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).expect("inside");
        if u16::from_le(index) != self.used {
            return true;
        }
        self.is_told(patience)
    }

    /// Runs one request; returns its status, or `None` if there is no answer in time.
    pub fn run(&mut self, kind: Kind, offset: u64, len: u32) -> Option<u8> {
        self.submit(0, kind, offset, len);
        self.kick();
        let patience = std::time::Duration::from_secs(60);
        loop {
            if let Some((_, status)) = self.reap() {
                return Some(status);
            }
            if !self.wait(patience) && self.reap().is_none() {
                return None;
            }
        }
    }

    /// Returns the data of a slot.
    #[must_use]
    pub fn data(&self, slot: u16, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let at = DATA + u64::from(slot) * DATA_BYTES;
        self.memory.read_slice(&mut bytes, GuestAddress(at)).expect("inside the memory");
        bytes
    }

    /// Sets the data of a slot.
    pub fn set_data(&self, slot: u16, bytes: &[u8]) {
        let at = DATA + u64::from(slot) * DATA_BYTES;
        self.memory.write_slice(bytes, GuestAddress(at)).expect("inside the memory");
    }
}
