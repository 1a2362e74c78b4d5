//! Copies bytes between the two ends of a data connection, with a counter and a bandwidth limit.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::relay;

/// Buffer size per direction and connection, in bytes.
const BUFFER_BYTES: usize = 128 << 10;

/// Maximum period whose unused bandwidth may be used later, so that short pauses do not reduce the
/// average rate.
const BURST: Duration = Duration::from_millis(50);

/// Bandwidth limit shared by all data connections of a migration.
#[derive(Debug)]
pub(super) struct Bandwidth {
    bytes_per_second: Option<u64>,
    /// Earliest time at which the next byte may be sent.
    free: Mutex<Instant>,
}

impl Bandwidth {
    pub(super) fn new(bytes_per_second: Option<u64>) -> Bandwidth {
        Bandwidth { bytes_per_second, free: Mutex::new(Instant::now()) }
    }

    /// Waits until the next `bytes` bytes may be sent.
    pub(super) async fn take(&self, bytes: usize) {
        let Some(rate) = self.bytes_per_second else { return };
        let at = {
            let mut free = self.free.lock().await;
            let from = (*free).max(Instant::now() - BURST);
            *free = from + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
            from
        };
        tokio::time::sleep_until(at).await;
    }
}

/// Copies in both directions until one end closes its connection. Counts and limits the bytes from
/// `near` to `far`.
pub(super) async fn join(
    near: impl AsyncRead + AsyncWrite,
    far: impl AsyncRead + AsyncWrite,
    bandwidth: &Bandwidth,
    counted: &AtomicU64,
) {
    let (mut from_near, mut to_near) = tokio::io::split(near);
    let (mut from_far, mut to_far) = tokio::io::split(far);
    let out = async {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let length = from_near.read(&mut buffer).await?;
            if length == 0 {
                return io::Result::Ok(());
            }
            bandwidth.take(length).await;
            to_far.write_all(&buffer[..length]).await?;
            to_far.flush().await?;
            counted.fetch_add(length as u64, Ordering::Relaxed);
        }
    };
    let back = relay::copy(&mut from_far, &mut to_near, BUFFER_BYTES);
    // When this function returns, both connections are dropped and thereby closed.
    let ended = tokio::select! {
        ended = out => ended,
        ended = back => ended,
    };
    if let Err(error) = ended {
        tracing::debug!("a data connection of a migration broke: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_bandwidth_is_kept() {
        let bandwidth = Bandwidth::new(Some(1 << 20));
        let start = Instant::now();
        for _ in 0..64 {
            bandwidth.take(64 << 10).await;
        }
        let seconds = start.elapsed().as_secs_f64();
        assert!((3.8..4.1).contains(&seconds), "4 MiB at 1 MiB a second took {seconds} s");
    }

    #[tokio::test]
    async fn bytes_pass_and_are_counted_until_one_end_closes() {
        let ((mut a, near), (far, mut b)) = (tokio::io::duplex(1 << 10), tokio::io::duplex(1 << 10));
        let (bandwidth, counted) = (Bandwidth::new(None), AtomicU64::new(0));
        let joined = async { join(near, far, &bandwidth, &counted).await };
        let talk = async {
            a.write_all(b"twelve bytes").await.unwrap();
            let mut bytes = [0; 12];
            b.read_exact(&mut bytes).await.unwrap();
            b.write_all(b"ok").await.unwrap();
            let mut answer = [0; 2];
            a.read_exact(&mut answer).await.unwrap();
            drop(b);
            assert_eq!(a.read(&mut answer).await.unwrap(), 0);
        };
        tokio::join!(joined, talk);
        assert_eq!(counted.load(Ordering::Relaxed), 12);
    }
}
