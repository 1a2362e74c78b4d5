//! Handles the requests in flight on one connection: sends requests at their times, matches
//! replies, and measures latencies.
//!
//! An iterator on the sending thread provides the requests, and a callback on the receiving thread
//! gets the results. The threads share one slot per possible request in flight, so memory does not
//! grow with the number of requests.

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::client::request;
use hob_nbd::{Command, CommandFlags, ErrorCode};

use super::connection::{Connection, Stream};
use super::{Done, Fault, Timed};
use crate::clock::{Clock, RealClock, STOP_POLL, wait_until};
use crate::prng::noise;
use crate::workload::{Access, Op};

/// Maximum time to wait for requests in flight after a stop.
const DRAIN_MAX: Duration = Duration::from_secs(5);
const RECEIVE_BYTES: usize = 256 << 10;
const SEND_BYTES_MAX: usize = 128 << 10;

/// Sends the requests of `source`, each at its own time, with up to `depth` requests in flight.
/// `done` is called for every reply.
///
/// When the function returns, `done` has been called for every reply, also after an error or a
/// stop. The requests must fit the export.
pub(super) fn fly(
    connection: Connection,
    source: impl Iterator<Item = Result<Timed>> + Send,
    depth: usize,
    stop: &AtomicBool,
    done: impl FnMut(&Done),
) -> Result<()> {
    let Connection { stream, negotiated, early } = connection;
    let flight = Flight {
        clock: RealClock::start(),
        slots: (0..depth).map(|_| Slot::default()).collect(),
        sent: AtomicU64::new(0),
        sent_all: AtomicBool::new(false),
        received_all: AtomicBool::new(false),
    };
    let (free, freed) = mpsc::channel();
    for slot in 0..depth {
        free.send(slot)?;
    }
    let decoder = ReplyDecoder::new(&negotiated, ReplyLimits::default());
    let mut receiver = Receiver { flight: &flight, decoder, answered: 0, done };
    let sending = stream.try_clone()?;
    let (received, sent) = thread::scope(|scope| {
        let sender = scope.spawn(|| flight.send(&sending, freed, source, stop));
        let received = receiver.receive(&stream, &early, free, stop);
        flight.received_all.store(true, Ordering::Release);
        if !matches!(received, Ok(Drained::Yes)) {
            stream.shutdown();
        }
        (received, sender.join())
    });
    let sent = sent.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    if received? == Drained::Yes {
        sent.socket.context("cannot send to the NBD server")?;
        // Sending is optional: the run is complete even if the server does not receive the command.
        let _ = (&stream).write_all(&request::disconnect());
    }
    sent.source
}

/// A slot for a request in flight. The slot's index is the NBD cookie. The sender fills a slot
/// before it sends the request, and the receiver returns the slot through a channel after the
/// reply. So neither thread reads a slot that the other thread is still writing.
#[derive(Default)]
struct Slot {
    /// Number of the request plus one; zero while the slot is free.
    number: AtomicU64,
    offset: AtomicU64,
    len: AtomicU32,
    op: AtomicU32,
    due_ns: AtomicU64,
    sent_ns: AtomicU64,
}

impl Slot {
    fn access(&self) -> Access {
        let op = match self.op.load(Ordering::Relaxed) {
            0 => Op::Read,
            1 => Op::Write,
            2 => Op::Discard,
            _ => Op::Flush,
        };
        Access { offset: self.offset.load(Ordering::Relaxed), len: self.len.load(Ordering::Relaxed), op }
    }

    fn fill(&self, number: u64, timed: &Timed, sent_ns: u64) {
        self.offset.store(timed.access.offset, Ordering::Relaxed);
        self.len.store(timed.access.len, Ordering::Relaxed);
        self.op.store(timed.access.op as u32, Ordering::Relaxed);
        self.due_ns.store(timed.due_ns, Ordering::Relaxed);
        self.sent_ns.store(sent_ns, Ordering::Relaxed);
        self.number.store(number + 1, Ordering::Release);
    }
}

/// Result of the sending thread.
struct Sent {
    source: Result<()>,
    socket: std::io::Result<()>,
}

/// State that both threads share.
struct Flight {
    clock: RealClock,
    slots: Vec<Slot>,
    sent: AtomicU64,
    sent_all: AtomicBool,
    /// True if the receiving thread has stopped waiting for replies.
    received_all: AtomicBool,
}

impl Flight {
    /// Returns the number of the request in flight with this cookie, and its slot.
    fn find(&self, cookie: u64) -> Option<(u64, &Slot)> {
        let slot = self.slots.get(usize::try_from(cookie).ok()?)?;
        let number = slot.number.load(Ordering::Acquire).checked_sub(1)?;
        Some((number, slot))
    }

    fn send(
        &self,
        stream: &Stream,
        freed: mpsc::Receiver<usize>,
        source: impl Iterator<Item = Result<Timed>>,
        stop: &AtomicBool,
    ) -> Sent {
        let mut failure = Ok(());
        let requests = source.map_while(|timed| match timed {
            Ok(timed) => Some(timed),
            Err(error) => {
                failure = Err(error);
                None
            }
        });
        let socket = self.send_each(stream, &freed, requests, stop);
        self.sent_all.store(true, Ordering::Release);
        if socket.is_err() {
            stream.shutdown();
        }
        Sent { source: failure, socket }
    }

    /// Sends the next requests in free slots. Several requests are sent together if several slots
    /// are free and several requests are due.
    fn send_each(
        &self,
        mut stream: &Stream,
        freed: &mpsc::Receiver<usize>,
        requests: impl Iterator<Item = Timed>,
        stop: &AtomicBool,
    ) -> std::io::Result<()> {
        let halted = || stop.load(Ordering::Relaxed) || self.received_all.load(Ordering::Acquire);
        let mut requests = requests.fuse().peekable();
        let mut payload = Vec::new();
        let (mut bytes, mut batch) = (Vec::new(), Vec::new());
        let mut number = 0;
        while !halted()
            && let Some(&Timed { due_ns, .. }) = requests.peek()
        {
            let mut slot = match freed.recv_timeout(STOP_POLL) {
                Ok(slot) => Some(slot),
                Err(mpsc::RecvTimeoutError::Timeout) => continue,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            };
            if !wait_until(&self.clock, due_ns, &halted) {
                break;
            }
            bytes.clear();
            let now_ns = self.clock.now_ns();
            while let Some(cookie) = slot
                && let Some(timed) = requests.next_if(|timed| timed.due_ns <= now_ns)
            {
                encode(&mut bytes, cookie as u64, &timed.access, &mut payload);
                batch.push((cookie, timed));
                let more = bytes.len() < SEND_BYTES_MAX
                    && requests.peek().is_some_and(|timed| timed.due_ns <= now_ns);
                slot = if more { freed.try_recv().ok() } else { None };
            }
            // The count is increased before the request is sent, so that the receiving thread does
            // not stop too early.
            self.sent.fetch_add(batch.len() as u64, Ordering::Release);
            // The sending time is taken after the whole batch is encoded, because the last slot of
            // the batch may have become free after the first request was encoded.
            let now_ns = self.clock.now_ns();
            for (cookie, timed) in batch.drain(..) {
                self.slots[cookie].fill(number, &timed, now_ns);
                number += 1;
            }
            stream.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// Encodes an NBD request. `payload` has the bytes to write and grows if needed.
fn encode(bytes: &mut Vec<u8>, cookie: u64, access: &Access, payload: &mut Vec<u8>) {
    match access.op {
        Op::Read => {
            bytes.extend_from_slice(&request::read(cookie, access.offset, access.len, CommandFlags::NONE));
        }
        Op::Write => {
            let (len, flags) = (access.len as usize, CommandFlags::NONE);
            if payload.len() < len {
                *payload = noise(len.next_power_of_two());
            }
            bytes.extend_from_slice(&request::write_header(cookie, access.offset, access.len, flags));
            bytes.extend_from_slice(&payload[..len]);
        }
        Op::Discard => {
            bytes.extend_from_slice(&request::trim(cookie, access.offset, access.len, CommandFlags::NONE));
        }
        Op::Flush => bytes.extend_from_slice(&request::flush(cookie)),
    }
}

/// Answer to the question whether the server replied to all sent requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drained {
    Yes,
    /// The timeout after a stop expired before all replies arrived.
    No,
}

struct Receiver<'a, F> {
    flight: &'a Flight,
    decoder: ReplyDecoder,
    answered: u64,
    done: F,
}

impl<F: FnMut(&Done)> Receiver<'_, F> {
    /// Receives replies until the run ends. The function owns the channel of free slots, so that
    /// its end unblocks a sender that waits for a slot.
    fn receive(
        &mut self,
        mut stream: &Stream,
        early: &[u8],
        free: mpsc::Sender<usize>,
        stop: &AtomicBool,
    ) -> Result<Drained> {
        stream.set_read_timeout(Some(STOP_POLL))?;
        self.take(early, &free)?;
        let mut bytes = vec![0; RECEIVE_BYTES];
        let mut give_up_at = None;
        loop {
            if self.is_complete() {
                return Ok(Drained::Yes);
            }
            if stop.load(Ordering::Relaxed)
                && Instant::now() > *give_up_at.get_or_insert(Instant::now() + DRAIN_MAX)
            {
                return Ok(Drained::No);
            }
            match stream.read(&mut bytes) {
                Ok(0) => bail!("the NBD server closed the connection"),
                Ok(count) => self.take(&bytes[..count], &free)?,
                Err(error) if is_timeout(error.kind()) => {}
                Err(error) => return Err(error).context("cannot receive from the NBD server"),
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.flight.sent_all.load(Ordering::Acquire)
            && self.answered == self.flight.sent.load(Ordering::Acquire)
    }

    fn take(&mut self, mut bytes: &[u8], free: &mpsc::Sender<usize>) -> Result<()> {
        let flight = self.flight;
        let in_flight = |cookie| {
            let (_, slot) = flight.find(cookie)?;
            let access = slot.access();
            let command = match access.op {
                Op::Read => Command::Read,
                Op::Write => Command::Write,
                Op::Discard => Command::Trim,
                Op::Flush => Command::Flush,
            };
            Some(Expected { command, offset: access.offset, length: access.len })
        };
        loop {
            let used = self.decoder.handle_input(bytes, &in_flight)?;
            bytes = &bytes[used..];
            let mut progressed = used > 0;
            while let Some(event) = self.decoder.poll_event() {
                progressed = true;
                if let ReplyEvent::Done { cookie, error } = event {
                    self.complete(cookie, error, free);
                }
            }
            let payload = (self.decoder.payload_pending() as usize).min(bytes.len());
            self.decoder.payload_received(payload as u32);
            bytes = &bytes[payload..];
            if !progressed && payload == 0 {
                return Ok(());
            }
        }
    }

    fn complete(&mut self, cookie: u64, error: Option<ErrorCode>, free: &mpsc::Sender<usize>) {
        let (number, slot) = self.flight.find(cookie).expect("the decoder answers only what is in flight");
        let sent_ns = slot.sent_ns.load(Ordering::Relaxed);
        let done = Done {
            number,
            timed: Timed { due_ns: slot.due_ns.load(Ordering::Relaxed), access: slot.access() },
            sent_ns,
            latency_ns: self.flight.clock.now_ns() - sent_ns,
            fault: error.map(Fault::Server),
        };
        self.answered += 1;
        slot.number.store(0, Ordering::Release);
        // A sender that has ended needs no slot.
        let _ = free.send(cookie as usize);
        (self.done)(&done);
    }
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
