//! Runs the vhost-user protocol with one client: guest memory, queues, and when each queue is
//! served.
//!
//! The session has its own thread, because its messages may have to wait for requests in flight.
//! The session passes a queue to the shard only when the queue is completely configured. A queue is
//! served while all its parameters are known: memory, addresses, size, a kick descriptor, and the
//! client's message that it is enabled. To change a parameter, the session stops the queue and
//! starts it again.
//!
//! # Refused messages
//! The session refuses messages that the protocol's reference implementation (`vhost`) refuses. The
//! session also refuses features that were not offered, unusable memory
//! ([`MapError`](super::memory::MapError)), and descriptors that are not eventfds. If the protocol
//! has no reply for a refusal, the connection ends, and clients connect again.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use super::Start;
use super::block::{Features, Info, QUEUES_MAX};
use super::capacity::{Capacity, peek_channel};
use super::inflight::Inflight;
use super::log::ChangeLog;
use super::memory::GuestMap;
use super::queue::{Layout, SIZE_MAX};

/// Maximum number of memory regions that a client can add individually. Each memory region is a
/// mapping.
const MEM_SLOTS_MAX: usize = 512;

/// The shard that serves a session's queues.
pub trait Shard {
    /// Starts serving a queue. The driver signals `kick` after adding chains, and the device
    /// signals `call` after answers.
    fn start(&mut self, start: Start, kick: OwnedFd, call: Option<OwnedFd>);
    /// Replaces the descriptor with which the device notifies the driver of a served queue.
    fn set_call(&mut self, queue: u16, call: Option<OwnedFd>);
    /// Stops serving a queue. Waits until its requests are answered, and returns the index at which
    /// to start again. Returns `None` if the shard has ended.
    fn stop(&mut self, queue: u16) -> Option<u16>;
}

/// Serves one client until it disconnects or breaks the protocol, and then stops its queues. The
/// client sees the disk's size in `capacity`. Shutting down the socket from another thread ends the
/// call.
///
/// # Errors
/// Returns the reason why the connection ended, unless the client closed it.
pub fn run(
    socket: UnixStream,
    info: Info,
    capacity: &Arc<Capacity>,
    shard: impl Shard,
) -> std::result::Result<(), String> {
    let messages = socket.try_clone().map_err(|error| error.to_string())?;
    let session = Arc::new(Mutex::new(Session::new(info, Arc::clone(capacity), shard)));
    let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(&session));
    let end = loop {
        let channel = peek_channel(&messages);
        if let Err(error) = handler.handle_request() {
            break error;
        }
        if channel.is_some() {
            capacity.set_channel(channel);
        }
    };
    capacity.set_channel(None);
    let mut session = session.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    session.stop_all();
    match (end, session.refusal.take()) {
        (_, Some(why)) => Err(why),
        (Error::Disconnected | Error::PartialMessage | Error::SocketBroken(_), None) => Ok(()),
        (error, None) => Err(error.to_string()),
    }
}

/// Known parameters of one virtqueue.
#[derive(Debug, Default)]
struct Ring {
    layout: Layout,
    has_place: bool,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    enabled: bool,
    running: bool,
}

struct Session<S> {
    info: Info,
    capacity: Arc<Capacity>,
    shard: S,
    acked: Features,
    map: Option<Arc<GuestMap>>,
    /// The memory regions that the client added individually.
    slots: Vec<(VhostUserMemoryRegion, File)>,
    inflight: Option<Arc<Inflight>>,
    log: Option<Arc<ChangeLog>>,
    rings: Vec<Ring>,
    /// The last message that was refused, for the log.
    refusal: Option<String>,
}

impl<S: Shard> Session<S> {
    fn new(info: Info, capacity: Arc<Capacity>, shard: S) -> Session<S> {
        let rings = (0..QUEUES_MAX).map(|_| Ring::default()).collect();
        Session {
            info,
            capacity,
            shard,
            acked: Features::default(),
            map: None,
            slots: Vec::new(),
            inflight: None,
            log: None,
            rings,
            refusal: None,
        }
    }

    fn refuse<T>(&mut self, why: impl ToString) -> Result<T> {
        self.refusal = Some(why.to_string());
        Err(Error::InvalidParam)
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    fn stop(&mut self, index: usize) -> Result<()> {
        if std::mem::take(&mut self.rings[index].running) {
            let base = self.shard.stop(index as u16).ok_or(Error::BackendInternalError)?;
            self.rings[index].base = base;
        }
        Ok(())
    }

    fn stop_all(&mut self) {
        for index in 0..self.rings.len() {
            // An error means that the shard has ended, and it serves no queue then.
            let _ = self.stop(index);
        }
    }

    /// Stops a queue, changes a parameter, and starts the queue again if all its parameters are
    /// known.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut Ring)) -> Result<()> {
        self.ring(index)?;
        self.stop(index as usize)?;
        change(self.ring(index)?);
        self.start(index as usize)
    }

    /// Starts a queue if all its parameters are known.
    fn start(&mut self, index: usize) -> Result<()> {
        // Without the feature PROTOCOL, no message enables queues, so all queues are enabled.
        let always = !self.acked.contains(Features::PROTOCOL);
        let ring = &mut self.rings[index];
        let (Some(map), Some(kick)) = (&self.map, &ring.kick) else { return Ok(()) };
        if ring.running || !ring.has_place || ring.layout.size == 0 || !(ring.enabled || always) {
            return Ok(());
        }
        // The client has removed the memory region that contains the ring, and will add this region
        // again.
        let Layout { descriptors, used, available, .. } = ring.layout;
        let is_there = |address| map.guest_address(address).is_some();
        if !self.slots.is_empty() && ![descriptors, used, available].into_iter().all(is_there) {
            return Ok(());
        }
        let copy = |fd: &OwnedFd| fd.try_clone().map_err(Error::ReqHandlerError);
        let kick = copy(kick)?;
        let call = ring.call.as_ref().map(copy).transpose()?;
        let queue = index as u16;
        let inflight = self.inflight.as_ref().and_then(|all| all.queue(queue, ring.layout.size));
        ring.running = true;
        self.shard.start(
            Start {
                queue,
                map: Arc::clone(map),
                layout: ring.layout,
                base: ring.base,
                features: self.acked,
                inflight,
                log: self.log.clone().filter(|_| self.acked.contains(Features::LOG_ALL)),
            },
            kick,
            call,
        );
        Ok(())
    }

    fn start_all(&mut self) -> Result<()> {
        (0..self.rings.len()).try_for_each(|index| self.start(index))
    }

    /// Maps the memory regions that the client added individually.
    fn map_slots(&mut self) -> Result<()> {
        self.map = None;
        if self.slots.is_empty() {
            return Ok(());
        }
        let regions: Vec<VhostUserMemoryRegion> = self.slots.iter().map(|(region, _)| *region).collect();
        let files = self.slots.iter().map(|(_, file)| file.try_clone());
        let files = files.collect::<std::io::Result<Vec<File>>>().map_err(Error::ReqHandlerError)?;
        match GuestMap::map(&regions, files) {
            Ok(map) => self.map = Some(Arc::new(map)),
            Err(error) => return self.refuse(error),
        }
        self.start_all()
    }

    /// Resets the session to its state after connecting, except the negotiated features.
    fn reset(&mut self) {
        self.stop_all();
        for ring in &mut self.rings {
            *ring = Ring { running: ring.running, ..Ring::default() };
        }
    }
}

/// Returns true if the descriptor is an eventfd whose reads reset it to zero. Other descriptors
/// could be readable forever.
fn is_event(fd: &OwnedFd) -> bool {
    let number = fd.as_raw_fd();
    let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
    let is_event = link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]");
    let facts = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    // Old kernels do not report semaphores.
    let is_semaphore = facts.lines().any(|line| line.split_whitespace().eq(["eventfd-semaphore:", "1"]));
    is_event && !is_semaphore
}

impl<S: Shard> VhostUserBackendReqHandlerMut for Session<S> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.info.features().0)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let features = Features(features);
        if !self.info.features().contains(features) {
            let unknown = features.0 & !self.info.features().0;
            return self.refuse(format!("features {unknown:#x} were not offered"));
        }
        if features != self.acked {
            self.stop_all();
            self.acked = features;
        }
        self.start_all()
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<vhost::VhostUserMemoryRegionBase>>> {
        self.stop_all();
        self.slots.clear();
        self.map = None;
        match GuestMap::map(regions, files) {
            Ok(map) => self.map = Some(Arc::new(map)),
            Err(error) => return self.refuse(error),
        }
        self.start_all()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).unwrap_or(0);
        if !size.is_power_of_two() || size > SIZE_MAX {
            return self
                .refuse(format!("a queue of {num} entries: it must be a power of two up to {SIZE_MAX}"));
        }
        self.change(index, |ring| ring.layout.size = size)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.change(index, |ring| {
            ring.layout = Layout { descriptors, used, available, ..ring.layout };
            ring.has_place = true;
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let Ok(base) = u16::try_from(base) else { return self.refuse("a queue's base has 16 bits") };
        self.change(index, |ring| ring.base = base)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.ring(index)?;
        self.stop(index as usize)?;
        let ring = self.ring(index)?;
        // The queue starts again when the client sends a new kick descriptor.
        ring.kick = None;
        Ok(VhostUserVringState::new(index, u32::from(ring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let Some(kick) = fd.map(OwnedFd::from).filter(is_event) else {
            return self.refuse("a queue needs an eventfd for kicks");
        };
        self.change(u32::from(index), |ring| ring.kick = Some(kick))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = fd.map(OwnedFd::from);
        if call.as_ref().is_some_and(|fd| !is_event(fd)) {
            return self.refuse("a queue needs an eventfd for notifications of answers");
        }
        let copy = call.as_ref().map(OwnedFd::try_clone).transpose().map_err(Error::ReqHandlerError)?;
        let ring = self.ring(u32::from(index))?;
        ring.call = call;
        if ring.running {
            self.shard.set_call(u16::from(index), copy);
        }
        Ok(())
    }

    fn set_vring_err(&mut self, _index: u8, _fd: Option<File>) -> Result<()> {
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(QUEUES_MAX))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        if self.ring(index)?.enabled == enable {
            return Ok(());
        }
        self.change(index, |ring| ring.enabled = enable)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        self.info.size_bytes = self.capacity.bytes();
        self.info.config(offset, size).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // Drivers may write to the configuration space, but hob has no field that can change.
        Ok(())
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        self.stop_all();
        match Inflight::create(queues, size) {
            Ok((inflight, file, bytes)) => {
                self.inflight = Some(inflight);
                Ok((VhostUserInflight::new(bytes, 0, queues, size), file))
            }
            Err(error) => self.refuse(error),
        }
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, size) = (kept.num_queues, kept.queue_size);
        self.stop_all();
        match Inflight::open(file.into(), kept.mmap_offset, kept.mmap_size, queues, size) {
            Ok(inflight) => self.inflight = Some(inflight),
            Err(error) => return self.refuse(error),
        }
        self.start_all()
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a block device does not support GPU messages"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("a block device does not share objects"))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MEM_SLOTS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<vhost::VhostUserMemoryRegionBase>> {
        if self.slots.len() >= MEM_SLOTS_MAX {
            return self.refuse(format!("a client has at most {MEM_SLOTS_MAX} regions of memory"));
        }
        self.stop_all();
        self.slots.push((**region, fd));
        let mapped = self.map_slots();
        if mapped.is_err() {
            self.slots.pop();
        }
        mapped.map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let key =
            |region: &VhostUserMemoryRegion| (region.guest_phys_addr, region.user_addr, region.memory_size);
        let wanted = key(region);
        let Some(index) = self.slots.iter().position(|(slot, _)| key(slot) == wanted) else {
            return self.refuse("the region to remove was not added");
        };
        self.stop_all();
        self.slots.remove(index);
        self.map_slots()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("a disk keeps no state but its queues"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("a disk keeps no state but its queues"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("a block device has no shared memory regions"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        self.stop_all();
        match ChangeLog::map(&file, log.mmap_offset, log.mmap_size) {
            Ok(log) => self.log = Some(log),
            Err(error) => return self.refuse(error),
        }
        self.start_all()
    }
}
