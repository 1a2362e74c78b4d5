//! The thread of an open image, for what waits for the cluster and starts nothing.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::image::Image;

/// How often it is looked whether the lock is still ours.
const LOCK_CHECK: Duration = Duration::from_secs(1);

/// A thread that does what waits for the cluster: it looks whether the lock is still ours, and closes the image in the end.
pub(super) struct LockMonitor {
    pub(super) closing: mpsc::Sender<Arc<Image>>,
    /// The image is closed.
    pub(super) closed: Arc<AtomicBool>,
}

impl LockMonitor {
    /// Whoever awaits `event` hears of the lock's loss, and of the end. That the image has another size than these bytes is logged, and known to
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
                    // librbd watches the image, and knows without asking the cluster unless something has changed.
                    if let Ok(now) = image.size_bytes() {
                        let before = std::mem::replace(&mut size_bytes, now);
                        if now > before {
                            tracing::info!(
                                image = name,
                                bytes = now,
                                "the image is larger now; 'hob disk resize' lets its disk have what is new"
                            );
                        } else if now < before {
                            tracing::error!(
                                image = name,
                                bytes = now,
                                "the image was made smaller: what its disk had past that is lost, and I/O there fails"
                            );
                        }
                    }
                    let looks = image.locked.load(Ordering::Relaxed) && !image.lost.load(Ordering::Acquire);
                    // One that was let go meanwhile is not lost.
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
