//! Queries which parts of an image and its parents are allocated, for programs that copy the image
//! without its holes.
//!
//! librbd blocks its caller during such a query, so a separate thread executes the query. The
//! thread starts at the first query and signals the image's eventfd when a reply is ready. The
//! granularity is whole objects, because the object map has one entry for each object. If the
//! cluster does not answer in time, everything is reported as data, which is always correct.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::{Arc, mpsc};

use super::Image;
use crate::backing::{Status, StatusExtent};

/// Largest range of one query, bytes. Without an object map, librbd checks each of the range's
/// objects.
const RANGE_BYTES_MAX: u64 = 1 << 30;

/// Maximum number of extents of one reply. The caller asks again for more.
const EXTENTS_MAX: usize = 4096;

/// A query of the allocation of a range.
struct Query {
    image: Arc<Image>,
    id: u64,
    offset: u64,
    len: u64,
}

/// Channels for queries to the thread and for its replies.
type QueryChannels = (mpsc::Sender<Query>, mpsc::Receiver<(u64, Status)>);

/// Allocation queries of an image, executed by a thread.
pub(super) struct Maps {
    event: Arc<OwnedFd>,
    /// The thread's channels; `None` until it is started.
    thread: Option<QueryChannels>,
    unanswered: usize,
}

impl Maps {
    /// Creates the queue of queries. `event` is signalled when a reply is ready.
    pub(super) fn new(event: Arc<OwnedFd>) -> Maps {
        Maps { event, thread: None, unanswered: 0 }
    }

    /// Queues a query of the allocation of `len` bytes from `offset`. [`poll`](Self::poll) returns
    /// the reply with this `id`.
    pub(super) fn ask(&mut self, image: Arc<Image>, id: u64, offset: u64, len: u64) {
        let event = &self.event;
        let (queries, _) = self.thread.get_or_insert_with(|| start(event.clone()));
        queries.send(Query { image, id, offset, len }).expect("the thread lives as long as this");
        self.unanswered += 1;
    }

    /// Returns the next reply, if there is one.
    pub(super) fn poll(&mut self) -> Option<(u64, Status)> {
        let answer = self.thread.as_ref()?.1.try_recv().ok()?;
        self.unanswered -= 1;
        Some(answer)
    }

    /// Returns true if the query thread does not use the image.
    pub(super) fn is_idle(&self) -> bool {
        self.unanswered == 0
    }
}

fn start(event: Arc<OwnedFd>) -> QueryChannels {
    let (queries, received) = mpsc::channel::<Query>();
    let (answers, answered) = mpsc::channel();
    let look = move || {
        for Query { image, id, offset, len } in received {
            let status = Ok(image.allocated(offset, len));
            // The receiver of the answer may assume that the image is not used any more.
            drop(image);
            if answers.send((id, status)).is_err() {
                return;
            }
            let _ = rustix::io::write(&event, &1u64.to_ne_bytes());
        }
    };
    std::thread::Builder::new().name("hob-rbd-map".into()).spawn(look).expect("threads can be started");
    (queries, answered)
}

impl Image {
    /// Queries the allocated parts of a range. Waits for the cluster.
    fn allocated(&self, offset: u64, len: u64) -> Vec<StatusExtent> {
        let len = len.min(RANGE_BYTES_MAX);
        let mut written: Vec<(u64, u64)> = Vec::new();
        let found: *mut Vec<(u64, u64)> = &mut written;
        // SAFETY: the image is open; `note` is called before this returns, with the address of a
        // list that no other code uses until then.
        let result = unsafe {
            (self.library.rbd_diff_iterate2)(self.image, ptr::null(), offset, len, 1, 1, note, found.cast())
        };
        if result < 0 {
            tracing::debug!(result, "cannot list the allocated extents of an image");
            return vec![StatusExtent { len, hole: false, zero: false }];
        }
        extents(written, offset, len)
    }
}

/// librbd's callback for one range. The range was written if `exists`.
unsafe extern "C" fn note(offset: u64, len: usize, exists: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the argument is that of `allocated`.
    let written = unsafe { &mut *argument.cast::<Vec<(u64, u64)>>() };
    if exists != 0 {
        let end = offset.saturating_add(len as u64);
        match written.last_mut() {
            Some(last) if last.1 == offset => last.1 = end,
            _ => written.push((offset, end)),
        }
    }
    0
}

/// Returns extents for a whole range. `written` contains the written parts: first byte and end.
fn extents(mut written: Vec<(u64, u64)>, offset: u64, len: u64) -> Vec<StatusExtent> {
    let end = offset + len;
    written.sort_unstable();
    let mut extents: Vec<StatusExtent> = Vec::new();
    let mut at = offset;
    for (from, to) in written {
        let (from, to) = (from.clamp(at, end), to.clamp(at, end));
        if from == to {
            continue;
        }
        if from > at {
            extents.push(StatusExtent { len: from - at, hole: true, zero: true });
        }
        match extents.last_mut() {
            Some(last) if !last.hole => last.len += to - from,
            _ => extents.push(StatusExtent { len: to - from, hole: false, zero: false }),
        }
        at = to;
    }
    if at < end {
        extents.push(StatusExtent { len: end - at, hole: true, zero: true });
    }
    extents.truncate(EXTENTS_MAX);
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: bool = false;
    const HOLE: bool = true;

    #[track_caller]
    fn is(written: &[(u64, u64)], offset: u64, len: u64, expected: &[(u64, bool)]) {
        let extents = extents(written.to_vec(), offset, len);
        assert!(extents.iter().all(|extent| extent.hole == extent.zero));
        let extents: Vec<(u64, bool)> = extents.iter().map(|extent| (extent.len, extent.hole)).collect();
        assert_eq!(extents, expected);
    }

    #[test]
    fn unwritten_ranges_are_holes() {
        is(&[], 100, 50, &[(50, HOLE)]);
        is(&[(100, 150)], 100, 50, &[(50, DATA)]);
        is(&[(110, 120), (140, 150)], 100, 50, &[(10, HOLE), (10, DATA), (20, HOLE), (10, DATA)]);
        is(&[(100, 110), (110, 120)], 100, 50, &[(20, DATA), (30, HOLE)]);
    }

    /// librbd may answer in any order, repeatedly, and beyond the range of the query.
    #[test]
    fn odd_answers_cover_the_range_once() {
        is(&[(140, 200), (0, 110)], 100, 50, &[(10, DATA), (30, HOLE), (10, DATA)]);
        is(&[(110, 130), (120, 125), (110, 130)], 100, 50, &[(10, HOLE), (20, DATA), (20, HOLE)]);
        is(&[(0, 50), (200, 300)], 100, 50, &[(50, HOLE)]);
    }

    #[test]
    fn an_answer_has_an_end() {
        let written: Vec<(u64, u64)> = (0..5000).map(|n| (n * 10, n * 10 + 5)).collect();
        let extents = extents(written, 0, 50_000);
        assert_eq!(extents.len(), EXTENTS_MAX);
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), 5 * EXTENTS_MAX as u64);
    }
}
