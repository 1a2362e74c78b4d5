//! A shard with one disk and an NBD socket, for demonstrations: no state, no control API.

use std::path::Path;
use std::thread::JoinHandle;

use anyhow::ensure;
use hob_control::Endpoint;
use hob_engine::command::{CacheChange, CacheConfig, DiskConfig, Segment};
use hob_engine::io::Promote;
use hob_engine::stats::DiskStats;
use hob_engine::units::{DeviceId, DiskId};
use hob_nbd::ExportInfo;
use hob_storage::backing::Backing;
use hob_storage::pool::FlashFile;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

use crate::allow::AllowList;
use crate::exports::{Export, Exports};
use crate::listening_sockets::ListeningSockets;
use crate::nbd_listener::{ListenAddress, Listener, ListenerContext};
use crate::shard_api::ShardHandle;
use crate::socket_access::{MissingDirectory, SocketAccess};
use hob_shard::ShardOptions;

const DISK: DiskId = DiskId(0);
const CONNECTIONS_MAX: usize = 64;

/// A disk that is served at an NBD socket, with its shard.
#[derive(Debug)]
pub struct OneDisk {
    shard: ShardHandle,
    runtime: Runtime,
    end_listener: oneshot::Sender<()>,
    listener: JoinHandle<anyhow::Result<()>>,
}

impl OneDisk {
    /// Serves `backing` as the export `name` at the Unix socket `socket`. Caches may use the flash
    /// file `flash` as the device `device`.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started, the shard refuses the disk or the flash
    /// file, or the socket cannot be created.
    pub fn serve(
        name: &str,
        socket: &Path,
        (config, backing): (DiskConfig, Backing),
        (device, flash): (DeviceId, FlashFile),
    ) -> anyhow::Result<OneDisk> {
        let (events, _) = mpsc::unbounded_channel();
        let shard = hob_shard::spawn(ShardOptions::new(0), events)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            shard.add_device(device, Box::new(flash)).await?;
            shard.add_disk(DISK, config, backing).await
        })?;
        let exports = Exports::default();
        let info = ExportInfo { block_size_min: 512, ..ExportInfo::new(config.size_bytes) };
        let export =
            Export { of: name.to_owned(), disk: DISK, shard: shard.clone(), info, promote: Promote::Usual };
        exports.insert(name, export);

        let address = ListenAddress { endpoint: Endpoint::Unix(socket.to_owned()), tls: None };
        let (end_listener, ended) = oneshot::channel();
        let (bound, is_bound) = std::sync::mpsc::channel();
        let listener = std::thread::spawn(move || {
            Builder::new_current_thread().enable_all().build()?.block_on(async {
                let (access, missing) = (SocketAccess::default(), MissingDirectory::Create);
                let listener =
                    Listener::bind(&address, access, missing, &ListeningSockets::default()).await?;
                let _ = bound.send(());
                let allow = AllowList::default();
                let context = ListenerContext { exports, allow, connections_max: CONNECTIONS_MAX };
                tokio::select! {
                    () = listener.run(context, None) => {}
                    _ = ended => {}
                }
                anyhow::Ok(())
            })
        });
        ensure!(is_bound.recv().is_ok(), "cannot listen at {}", socket.display());
        Ok(OneDisk { shard, runtime, end_listener, listener })
    }

    /// Adds a cache that does not survive the process.
    ///
    /// # Errors
    /// Returns an error if the shard refuses the cache.
    pub fn enable_cache(&self, config: CacheConfig, segments: Vec<Segment>) -> anyhow::Result<()> {
        let change = CacheChange::enable_volatile(config, segments);
        self.runtime.block_on(self.shard.change_cache(DISK, change))?;
        Ok(())
    }

    /// Returns the counters since the start.
    ///
    /// # Errors
    /// Returns an error if the shard has ended.
    pub fn stats(&self) -> anyhow::Result<Box<DiskStats>> {
        Ok(self.runtime.block_on(self.shard.stats(DISK))?)
    }

    /// Closes the disk and the socket.
    ///
    /// # Errors
    /// Returns an error if the shard or the listener failed.
    ///
    /// # Panics
    /// Panics if the listener panicked.
    pub fn end(self) -> anyhow::Result<()> {
        self.runtime.block_on(self.shard.stop())?;
        let _ = self.end_listener.send(());
        self.listener.join().expect("the listener does not panic")
    }
}
