//! The thread of an open RBD image for calls that wait for the cluster but start no I/O.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::image::Image;

/// Interval of the check that this client still has the lock.
const LOCK_CHECK: Duration = Duration::from_secs(1);

/// Thread that checks that this client still has the lock, and finally closes the image.
pub(super) struct LockMonitor {
    pub(super) closing: mpsc::Sender<Arc<Image>>,
    /// Whether the image is closed.
    pub(super) closed: Arc<AtomicBool>,
}

impl LockMonitor {
    /// Starts the thread. `event` is signalled when the lock is lost and when the image is closed.
    /// If the image's size differs from `size_bytes`, the thread logs that and stores the size in
    /// the image.
    pub(super) fn start(
        image: Arc<Image>,
        event: Arc<OwnedFd>,
        name: String,
        size_bytes: u64,
    ) -> LockMonitor {
        let (closing, wishes) = mpsc::channel::<Arc<Image>>();
        let closed = Arc::new(AtomicBool::new(false));
        let ended = closed.clone();
        let tell = move || _ = rustix::io::write(&event, &1u64.to_ne_bytes());
        let mut size_bytes = size_bytes;
        let keep = move || loop {
            match wishes.recv_timeout(LOCK_CHECK) {
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    // librbd watches the image, so this asks the cluster only if something has
                    // changed.
                    if let Ok(now) = image.size_bytes() {
                        let before = std::mem::replace(&mut size_bytes, now);
                        if now > before {
                            tracing::info!(
                                image = name,
                                bytes = now,
                                "the image has grown; run 'hob disk resize' to grow its disk"
                            );
                        } else if now < before {
                            tracing::error!(
                                image = name,
                                bytes = now,
                                "the image was shrunk: its disk's data past the new end is lost, and I/O there fails"
                            );
                        }
                    }
                    let looks = image.locked.load(Ordering::Relaxed) && !image.lost.load(Ordering::Acquire);
                    // If this host itself has released the image's lock in the meantime, the image
                    // is not lost.
                    if looks && !image.holds_lock() && image.locked.load(Ordering::SeqCst) {
                        image.lost.store(true, Ordering::Release);
                        tell();
                    } else if looks {
                        image.look_at_parent();
                    }
                }
                last => {
                    drop((last, image));
                    ended.store(true, Ordering::Release);
                    return tell();
                }
            }
        };
        std::thread::Builder::new().name("hob-rbd".into()).spawn(keep).expect("threads can be started");
        LockMonitor { closing, closed }
    }
}
