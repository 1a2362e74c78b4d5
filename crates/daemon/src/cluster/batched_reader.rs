//! Batched reads of ownership keys. A host that starts, or whose lease has expired, reads the keys
//! of hundreds of disks.
//!
//! A caller adds its disk to a list and waits for its turn. The caller whose turn it is reads the
//! keys of all listed disks, and sends the results to the other callers.

use std::sync::Mutex;
use std::time::Duration;

use hob_control::etcd::{Etcd, EtcdError};
use hob_engine::cluster::OwnershipSnapshot;
use tokio::sync::{Semaphore, oneshot};

use super::lock;
use super::store::{Names, StoreError};

/// Maximum number of concurrent reads.
const TURNS: usize = 2;

/// Maximum number of disks per read: etcd accepts 128 operations per request, and each disk has two
/// keys.
const DISKS_MAX: usize = 60;

/// A disk, and the channel for the result.
type Pending = (String, oneshot::Sender<Result<OwnershipSnapshot, StoreError>>);

/// Reads ownership keys in batches; see the module's text.
#[derive(Debug)]
pub(super) struct BatchedReader {
    pending: Mutex<Vec<Pending>>,
    turns: Semaphore,
}

impl Default for BatchedReader {
    fn default() -> Self {
        BatchedReader { pending: Mutex::default(), turns: Semaphore::new(TURNS) }
    }
}

impl BatchedReader {
    /// Returns a disk's keys in etcd, read after the call began.
    pub(super) async fn look(
        &self,
        names: &Names,
        etcd: &Etcd,
        disk: &str,
        wait_max: Duration,
    ) -> Result<OwnershipSnapshot, StoreError> {
        let (answer, mut answered) = oneshot::channel();
        lock(&self.pending).push((disk.to_owned(), answer));
        loop {
            let turn = tokio::select! {
                biased;
                told = &mut answered => return understood(told),
                turn = self.turns.acquire() => turn,
            };
            let batch: Vec<Pending> = {
                let mut pending = lock(&self.pending);
                let count = pending.len().min(DISKS_MAX);
                pending.drain(..count).collect()
            };
            if batch.is_empty() {
                // Another caller is reading this disk already.
                drop(turn);
                return understood(answered.await);
            }
            let (disks, askers): (Vec<String>, Vec<_>) = batch.into_iter().unzip();
            match names.looks(etcd, &disks, wait_max).await {
                Ok(looks) => {
                    for (asker, look) in askers.into_iter().zip(looks) {
                        let _ = asker.send(look);
                    }
                }
                Err(error) => {
                    for asker in askers {
                        let _ = asker.send(Err(error.clone().into()));
                    }
                }
            }
        }
    }
}

/// Converts a cancelled read into an error. The caller that performed the read may have been
/// cancelled.
fn understood(
    told: Result<Result<OwnershipSnapshot, StoreError>, oneshot::error::RecvError>,
) -> Result<OwnershipSnapshot, StoreError> {
    told.unwrap_or_else(|_| {
        let why = "the read was cancelled".to_owned();
        Err(EtcdError::Lost { endpoint: "etcd".to_owned(), why }.into())
    })
}
