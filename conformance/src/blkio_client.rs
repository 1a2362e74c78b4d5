//! A vhost-user-blk client with libblkio, through its crate `blkio`.
//!
//! libblkio has its own virtqueues, and shares memory region by region. libblkio does not
//! reconnect: after the end of a connection, connect a new client. Lengths and offsets are in
//! bytes.
#![allow(unsafe_code)] // libblkio writes completions to uninitialized memory.

use std::fs::File;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use blkio::{Blkio, Blkioq, Completion, Errno, MemoryRegion, ReqFlags};

use crate::scratch::text;
use crate::vhost_driver::Kind;

/// libblkio's name of its vhost-user driver.
const DRIVER: &str = "virtio-blk-vhost-user";

/// Maximum time of a request.
const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum number of completions that are taken together.
const COMPLETIONS_MAX: usize = 128;

/// A connected client.
pub struct BlkioClient {
    /// The queues. Their memory belongs to `disk`, so they are dropped first.
    pub queues: Vec<BlkioQueue>,
    /// The connection, with the disk's properties and the memory regions.
    pub disk: Blkio,
}

impl BlkioClient {
    /// Connects to the server at `socket`, with `queues` queues of `entries` entries each.
    ///
    /// # Errors
    /// Returns an error if nothing listens at `socket`, or the server refuses the queues.
    pub fn connect(socket: &Path, queues: i32, entries: i32) -> blkio::Result<BlkioClient> {
        let mut disk = Blkio::new(DRIVER)?;
        disk.set_str("path", &text(socket))?;
        disk.connect()?;
        disk.set_i32("num-queues", queues)?;
        disk.set_i32("queue-size", entries)?;
        let started = disk.start()?;
        let queues = started.queues.into_iter().map(BlkioQueue::new).collect();
        Ok(BlkioClient { queues, disk })
    }
}

/// A memory region that the client shares with the server.
pub struct Buffer {
    region: MemoryRegion,
    /// The region's memfd.
    file: File,
}

impl Buffer {
    /// Allocates `bytes` of memory, and shares them with the server.
    ///
    /// # Errors
    /// Returns an error if the server refuses the region.
    pub fn share(disk: &mut Blkio, bytes: usize) -> blkio::Result<Buffer> {
        let region = disk.alloc_mem_region(bytes)?;
        disk.map_mem_region(&region)?;
        let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", region.fd));
        let file = file.map_err(|error| blkio::Error::from_io_error(error, Errno::IO))?;
        Ok(Buffer { region, file })
    }

    /// Stops sharing the buffer with the server. The memory itself stays until [`free`](Self::free).
    pub fn unshare(&self, disk: &mut Blkio) {
        disk.unmap_mem_region(&self.region);
    }

    /// Frees the memory of a buffer that is not shared any more.
    pub fn free(self, disk: &mut Blkio) {
        disk.free_mem_region(&self.region);
    }

    /// Returns the address of a range of the buffer, for requests.
    ///
    /// # Panics
    /// Panics if the range is not inside the buffer.
    #[must_use]
    pub fn address(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.region.len, "{range:?} is inside the buffer");
        (self.region.addr + range.start) as *mut u8
    }

    /// Copies `bytes` to the buffer, from its byte `at` on.
    ///
    /// # Panics
    /// Panics if the bytes do not fit into the buffer.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        let _ = self.address(&(at..at + bytes.len()));
        self.file.write_all_at(bytes, at as u64).expect("a memfd can be written");
    }

    /// Returns a range of the buffer.
    ///
    /// # Panics
    /// Panics if the range is not inside the buffer.
    #[must_use]
    pub fn read(&self, range: Range<usize>) -> Vec<u8> {
        let _ = self.address(&range);
        let mut bytes = vec![0; range.len()];
        self.file.read_exact_at(&mut bytes, range.start as u64).expect("a memfd can be read");
        bytes
    }
}

/// A queue of a client.
pub struct BlkioQueue {
    /// libblkio's queue, for requests that [`submit`](Self::submit) does not support.
    pub queue: Blkioq,
    completions: Vec<MaybeUninit<Completion>>,
}

impl BlkioQueue {
    fn new(queue: Blkioq) -> BlkioQueue {
        let completions = (0..COMPLETIONS_MAX).map(|_| MaybeUninit::uninit()).collect();
        BlkioQueue { queue, completions }
    }

    /// Adds a request for the disk from `offset` on, with its data in a range of `buffer`. The next
    /// [`wait`](Self::wait) sends it.
    ///
    /// # Panics
    /// Panics if the range is not inside the buffer.
    pub fn submit(&mut self, id: usize, kind: Kind, offset: u64, buffer: &Buffer, range: Range<usize>) {
        let (address, flags) = (buffer.address(&range), ReqFlags::empty());
        match kind {
            Kind::Read => self.queue.read(offset, address, range.len(), id, flags),
            Kind::Write => self.queue.write(offset, address, range.len(), id, flags),
            Kind::Flush => self.queue.flush(id, flags),
        }
    }

    /// Sends the added requests, and waits until at least one request has ended. Calls `ended` for each
    /// ended request, with its id and its result: 0, or a negative errno.
    ///
    /// # Errors
    /// Returns an error if no request ends within `patience`, or if no request is in flight.
    pub fn wait(&mut self, patience: Duration, mut ended: impl FnMut(usize, i32)) -> blkio::Result<()> {
        let mut left = patience;
        let count = self.queue.do_io(&mut self.completions, 1, Some(&mut left), None)?;
        for completion in &self.completions[..count] {
            // SAFETY: `do_io` initializes as many completions as it counts.
            let completion = unsafe { completion.assume_init_ref() };
            ended(completion.user_data, completion.ret);
        }
        Ok(())
    }

    /// Sends the only request of the queue, and returns its result: 0, or a negative errno.
    ///
    /// # Panics
    /// Panics if the request does not end within a minute.
    #[track_caller]
    pub fn run(&mut self) -> i32 {
        let mut result = None;
        let waited = self.wait(PATIENCE, |_, value| result = Some(value));
        waited.unwrap_or_else(|error| panic!("libblkio waits for a request: {error}"));
        result.expect("one request has ended")
    }
}
