//! The flushes of one flash device by all shards.
//!
//! A failed flush may lose all data that is not durable yet, including data that other shards
//! wrote. The device and Linux report the failure only once, and a later flush then succeeds
//! although the data is lost. So each shard compares the number of failures of the device with the
//! number at its previous flush. A successful flush also waits for the flushes that were in flight
//! when it ended: one of these flushes may have failed before, and its shard may not have handled
//! the failure yet.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::flush_order::FlushOrder;

use crate::ring::Waker;

/// The flushes of one device. All clones share one state.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceFlushes {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Serial number of the next flush.
    next: u64,
    /// Number of failed flushes of the device, by all shards.
    failures: u64,
    /// The flushes, by serial number. A flush whose success is held back has the waker of its
    /// shard's ring.
    order: FlushOrder<u64, Waker>,
}

impl State {
    fn wake_released(&mut self) {
        while let Some((_, waker)) = self.order.poll_released() {
            waker.wake();
        }
    }
}

impl DeviceFlushes {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the start of a flush, and returns its serial number.
    pub(crate) fn begin(&self) -> u64 {
        let mut state = self.state();
        let serial = state.next;
        state.next += 1;
        state.order.begin(serial);
        serial
    }

    /// Records the end of a flush that is not held back.
    pub(crate) fn end(&self, serial: u64, has_failed: bool) {
        let mut state = self.state();
        state.failures += u64::from(has_failed);
        state.order.end(serial);
        state.wake_released();
    }

    /// Records the success of a flush. Returns true if other flushes are in flight. The success is
    /// then held back, and `waker` wakes the shard's ring once [`is_held`](Self::is_held) returns
    /// false.
    pub(crate) fn end_or_hold(&self, serial: u64, waker: Waker) -> bool {
        let mut state = self.state();
        let is_held = state.order.end(serial);
        if is_held {
            state.order.hold(serial, waker);
        }
        state.wake_released();
        is_held
    }

    /// Executes the function `flush`, which flushes the device, on this thread. An error of `flush`
    /// counts as a failed flush.
    pub(crate) fn run<T, E>(&self, flush: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let serial = self.begin();
        let result = flush();
        self.end(serial, result.is_err());
        result
    }

    pub(crate) fn failures(&self) -> u64 {
        self.state().failures
    }

    /// Returns true if the success of this flush is held back.
    pub(crate) fn is_held(&self, serial: u64) -> bool {
        self.state().order.is_held(serial)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hob_engine::io::{Io, IoError, IoOp, Target};
    use hob_engine::units::{DeviceId, IoId};

    use super::super::{DeviceSpec, Overwrite, Pool, device_bytes_for};
    use super::DeviceFlushes;
    use crate::flash::Flash;
    use crate::ring::{Ring, RingConfig, RingKind};

    /// A shard with one flash device, and the flushes of another shard.
    struct Rig {
        ring: Ring,
        flash: Flash,
        device: DeviceId,
        others: DeviceFlushes,
        _pool: Pool,
    }

    impl Rig {
        fn new(dir: &std::path::Path, kind: RingKind) -> Rig {
            let size_bytes = Some(device_bytes_for(4 << 20, 1 << 20));
            let spec = DeviceSpec { path: dir.join("pool"), size_bytes };
            let pool = Pool::create("p", &[spec], 1 << 20, Overwrite::Refuse).unwrap();
            let device = pool.devices()[0].id;
            let mut ring = Ring::new(&RingConfig { kind, ..RingConfig::default() }).unwrap();
            let mut flash = Flash::new(0);
            let others = pool.file(device).unwrap().here().unwrap().flushes;
            flash.attach(&mut ring, device, pool.file(device).unwrap());
            Rig { ring, flash, device, others, _pool: pool }
        }

        fn submit(&mut self) {
            let target = Target::Flash(self.device);
            let io = Io { id: IoId(1), target, op: IoOp::Flush, offset: 0, len: 0, slice: None };
            self.flash.submit(&mut self.ring, &io, &[]);
        }

        /// Handles the completion of a flush. Returns `None` if the flush must wait for another
        /// flush.
        fn complete(&mut self) -> Option<Result<(), IoError>> {
            let completion = loop {
                if let Some(completion) = self.ring.next_completion() {
                    break completion;
                }
                self.ring.submit_and_wait(Duration::ZERO, Some(Duration::from_secs(5))).unwrap();
            };
            self.flash.handle_completion(&mut self.ring, &completion).map(|done| done.result)
        }

        fn flush(&mut self) -> Option<Result<(), IoError>> {
            self.submit();
            self.complete()
        }

        fn poll(&mut self) -> Option<Result<(), IoError>> {
            self.flash.poll_flushed(&mut self.ring).map(|done| done.result)
        }
    }

    #[test]
    fn a_failed_flush_of_another_shard_fails_the_next_flush_once() {
        for kind in [RingKind::IoUring, RingKind::Threads] {
            let dir = tempfile::tempdir().unwrap();
            let mut rig = Rig::new(dir.path(), kind);
            assert_eq!(rig.flush(), Some(Ok(())));
            let other = rig.others.begin();
            rig.others.end(other, true);
            assert_eq!(rig.flush(), Some(Err(IoError::Failed)));
            assert_eq!(rig.flush(), Some(Ok(())));
            // A flush that began before the failure covers nothing.
            rig.submit();
            let other = rig.others.begin();
            rig.others.end(other, true);
            assert_eq!(rig.complete(), Some(Err(IoError::Failed)));
            assert!(rig.others.run(|| Err::<(), ()>(())).is_err());
            assert_eq!(rig.flush(), Some(Err(IoError::Failed)));
        }
    }

    #[test]
    fn a_flush_waits_for_flushes_of_other_shards_that_were_in_flight_when_it_ended() {
        let results = [(false, Ok(())), (true, Err(IoError::Failed))];
        for ((has_failed, result), began_before) in
            results.into_iter().flat_map(|it| [(it, true), (it, false)])
        {
            let dir = tempfile::tempdir().unwrap();
            let mut rig = Rig::new(dir.path(), RingKind::IoUring);
            let before = began_before.then(|| rig.others.begin());
            rig.submit();
            let other = before.unwrap_or_else(|| rig.others.begin());
            assert_eq!(rig.complete(), None);
            let later = rig.others.begin();
            assert_eq!(rig.poll(), None);
            // The end of the other flush wakes this shard.
            let others = rig.others.clone();
            let ends = std::thread::spawn(move || others.end(other, has_failed));
            rig.ring.submit_and_wait(Duration::ZERO, Some(Duration::from_secs(60))).unwrap();
            ends.join().unwrap();
            assert_eq!(rig.poll(), Some(result));
            assert_eq!(rig.poll(), None);
            rig.others.end(later, false);
        }
    }
}
