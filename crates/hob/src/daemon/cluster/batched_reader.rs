//! Looks at disks, many in one question: a host that starts, or whose lease has ended, has hundreds of them to look at.
//!
//! Whoever wants to look puts the disk down and waits for a turn; whoever has a turn asks for all that have been put down, and tells the others.

use std::sync::Mutex;
use std::time::Duration;

use hob_control::etcd::{Etcd, EtcdError};
use hob_engine::cluster::OwnershipSnapshot;
use tokio::sync::{Semaphore, oneshot};

use super::lock;
use super::store::{Names, StoreError};

/// Questions at a time.
const TURNS: usize = 2;

/// Disks of a question: etcd takes 128 operations in one, and each disk has two keys.
const DISKS_MAX: usize = 60;

/// A disk, and who wants to know.
type Pending = (String, oneshot::Sender<Result<OwnershipSnapshot, StoreError>>);

/// See the module's text.
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
    /// What etcd has of a disk, at some moment after this was called.
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
                // Somebody asks for this one already.
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

/// Whoever asked may have been given up together with whatever it did.
fn understood(
    told: Result<Result<OwnershipSnapshot, StoreError>, oneshot::error::RecvError>,
) -> Result<OwnershipSnapshot, StoreError> {
    told.unwrap_or_else(|_| {
        let why = "the question was given up".to_owned();
        Err(EtcdError::Lost { endpoint: "etcd".to_owned(), why }.into())
    })
}
