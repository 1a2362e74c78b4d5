//! Half-open connections of a listener: their clients have not chosen an export or sent an accepted
//! request yet.
//!
//! A listener allows few half-open connections. When the limit is reached, the listener closes the
//! oldest half-open connection, because a real client completes its first exchange within
//! milliseconds. So clients that connect and send nothing cannot keep other clients waiting.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

/// Maximum number of half-open connections of a control listener.
const HALF_OPEN_MAX: usize = 32;

/// Maximum time until a new connection has chosen an export (NBD) or sent an authorized request
/// (HTTP).
pub(crate) const HALF_OPEN_TIME_MAX: Duration = Duration::from_secs(5);

/// The half-open connections of one listener; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct HalfOpenConnections {
    table: Arc<Mutex<Table>>,
    max: usize,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    /// Connections by age. Sending to a channel closes its connection.
    connections: BTreeMap<u64, oneshot::Sender<()>>,
}

/// A half-open connection. Dropping this value removes the connection from the table.
#[derive(Debug)]
pub(crate) struct HalfOpenGuard {
    table: Arc<Mutex<Table>>,
    number: u64,
}

/// Signals that a half-open connection must be closed in favour of a newer one.
#[derive(Debug)]
pub(crate) struct Eviction(oneshot::Receiver<()>);

impl Default for HalfOpenConnections {
    fn default() -> HalfOpenConnections {
        HalfOpenConnections::new(HALF_OPEN_MAX)
    }
}

impl HalfOpenConnections {
    /// Creates a table for `max` connections, at least one.
    pub(crate) fn new(max: usize) -> HalfOpenConnections {
        HalfOpenConnections { table: Arc::default(), max: max.max(1) }
    }

    /// Adds a connection. Closes the oldest half-open connection if there are more than the
    /// maximum.
    pub(crate) fn enter(&self) -> (HalfOpenGuard, Eviction) {
        let (evict, evicted) = oneshot::channel();
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.connections.len() >= self.max
            && let Some((_, oldest)) = table.connections.pop_first()
        {
            let _ = oldest.send(());
        }
        table.last += 1;
        let number = table.last;
        table.connections.insert(number, evict);
        (HalfOpenGuard { table: self.table.clone(), number }, Eviction(evicted))
    }
}

impl Eviction {
    /// Returns when the connection is evicted or has been half-open for too long. For an
    /// established connection, this function never returns.
    pub(crate) async fn wait(self) {
        match tokio::time::timeout(HALF_OPEN_TIME_MAX, self.0).await {
            Ok(Ok(())) | Err(_) => {}
            Ok(Err(_)) => std::future::pending().await,
        }
    }
}

/// Marks an HTTP connection as established. Each request of the connection carries this value.
#[derive(Clone, Debug)]
pub(crate) struct Establish(Arc<Mutex<Option<HalfOpenGuard>>>);

impl Establish {
    /// Creates the marker of a half-open connection.
    pub(crate) fn new(half_open_guard: HalfOpenGuard) -> Establish {
        Establish(Arc::new(Mutex::new(Some(half_open_guard))))
    }

    /// Marks the connection as established, because the sender of the request is authorized.
    pub(crate) fn now(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Drop for HalfOpenGuard {
    fn drop(&mut self) {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).connections.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_over(eviction: Eviction, patience: Duration) -> bool {
        tokio::time::timeout(patience, eviction.wait()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_makes_room_and_the_established_stay() {
        let half_open = HalfOpenConnections::new(2);
        let (established, first) = half_open.enter();
        drop(established);
        let (_second, second) = half_open.enter();
        let (_third, third) = half_open.enter();
        let (_fourth, _eviction) = half_open.enter();
        assert!(is_over(second, Duration::ZERO).await, "the oldest");
        assert!(!is_over(first, HALF_OPEN_TIME_MAX * 2).await, "it is no longer half-open");
        assert!(is_over(third, HALF_OPEN_TIME_MAX).await, "it was silent for too long");
    }
}
