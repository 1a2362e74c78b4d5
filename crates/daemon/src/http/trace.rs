//! A recording as a response body: frames, as long as the client reads them.
//!
//! The connection asks for the next frame when the connection has space for one. A slow client
//! therefore fills the recorder's buffer, which has a fixed size, and not the daemon's memory.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hob_control::{FRAME_RECORDS_MAX, TraceFrame};
use hyper::body::{Body, Bytes, Frame};
use tokio::time::{Interval, MissedTickBehavior};

use crate::services::Recording;

/// Interval between two frames. After a full frame, the next frame follows at once.
const FRAME_EVERY: Duration = Duration::from_millis(50);

/// The response body of a recording; see the module.
#[derive(Debug)]
pub(super) struct TraceBody {
    recording: Recording,
    ticks: Interval,
    /// True if the previous frame was full.
    behind: bool,
    over: bool,
}

impl TraceBody {
    pub(super) fn new(recording: Recording) -> TraceBody {
        let mut ticks = tokio::time::interval(FRAME_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        TraceBody { recording, ticks, behind: false, over: false }
    }

    fn next(&mut self) -> TraceFrame {
        let reader = &mut self.recording.reader;
        // These values are read before the records, so that no record between them is missed.
        let (has_ended, elapsed_ns) = (reader.has_ended(), reader.elapsed_ns());
        let records = reader.take(FRAME_RECORDS_MAX);
        self.behind = records.len() == FRAME_RECORDS_MAX;
        let elapsed_ns = match records.last() {
            Some(last) if self.behind => last.at_ns,
            _ => elapsed_ns,
        };
        self.over = has_ended && !self.behind;
        TraceFrame { elapsed_ns, dropped: reader.dropped(), is_last: self.over, records }
    }
}

impl Body for TraceBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.over {
            return Poll::Ready(None);
        }
        if !self.behind {
            ready!(self.ticks.poll_tick(context));
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(self.next().encode())))))
    }
}
