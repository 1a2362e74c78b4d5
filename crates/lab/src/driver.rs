//! Drives a list of accesses through a real NBD connection and notes how long each took.
//!
//! One connection, blocking sockets, two threads: one sends as long as fewer than the wanted number of requests are
//! in flight, the caller's own receives. Two, because a server that waits for us to take replies must not find us
//! waiting for it to take writes. A request's time runs from just before it is handed to the socket until its
//! whole reply has been read. What the bytes are is not checked, and written bytes mean nothing.
//!
//! Refused before anything is sent: a depth of zero, accesses outside the export or against its block sizes, and
//! writes to a read-only export.

mod connection;
#[cfg(test)]
mod tests;

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hob_nbd::client::handshake::Negotiated;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::client::request;
use hob_nbd::{Command, CommandFlags, ErrorCode, NbdUri, TransmissionFlags};

use crate::prng::Prng;
use crate::summary::Sample;
use crate::workload::{Access, Op};
use connection::{Connection, Stream};

/// Most requests in flight.
pub const DEPTH_MAX: usize = 4096;
/// How soon a stop is noticed while nothing happens.
const STOP_POLL: Duration = Duration::from_millis(50);
/// How long requests in flight are waited for after a stop.
const DRAIN_MAX: Duration = Duration::from_secs(5);
const RECEIVE_BYTES: usize = 256 << 10;
const SEND_BYTES_MAX: usize = 128 << 10;

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Requests that succeeded, in the order of the accesses; times from the run's start, hits unknown.
    pub samples: Vec<Sample>,
    /// Requests the server answered with an error.
    pub errors: u64,
    /// The first of those errors.
    pub first_error: Option<ErrorCode>,
    /// Whether the stop flag ended the run before every access was answered.
    pub stopped: bool,
    /// From the first request until the last answer.
    pub elapsed_ns: u64,
}

/// Runs `accesses` against an NBD export with up to `depth` of them in flight, in order of sending.
///
/// `progress` is called on this thread for every answer with (answered, all). When `stop` becomes true nothing
/// more is sent, what is in flight is waited for a few seconds, and the run so far is returned.
///
/// # Errors
/// The server cannot be reached, refuses the export, breaks the protocol or goes away; or the accesses do not fit
/// the export. A request that the server answers with an error is counted, not fatal.
pub fn drive(
    target: &NbdUri,
    accesses: &[Access],
    depth: usize,
    stop: &AtomicBool,
    progress: impl FnMut(u64, u64),
) -> Result<Run> {
    ensure!((1..=DEPTH_MAX).contains(&depth), "the depth must lie between 1 and {DEPTH_MAX}, not {depth}");
    let Connection { stream, negotiated, early } = connection::open(target)?;
    check(accesses, &negotiated)?;

    let flight = Flight {
        accesses,
        start: Instant::now(),
        slots: (0..depth).map(|_| Slot::default()).collect(),
        sent: AtomicU64::new(0),
        sent_all: AtomicBool::new(false),
    };
    let (free, freed) = mpsc::channel();
    for slot in 0..depth {
        free.send(slot)?;
    }
    let mut receiver = Receiver {
        flight: &flight,
        decoder: ReplyDecoder::new(&negotiated, ReplyLimits::default()),
        latencies: vec![None; accesses.len()],
        run: Run::default(),
        answered: 0,
        progress,
    };
    let sending = stream.try_clone()?;
    let (received, sent) = thread::scope(|scope| {
        let sender = scope.spawn(|| flight.send(&sending, freed, stop));
        let received = receiver.receive(&stream, &early, free, stop);
        if !matches!(received, Ok(Drained::Yes)) {
            stream.shutdown();
        }
        (received, sender.join())
    });
    let sent = sent.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let answered = receiver.answered;
    if received.with_context(|| format!("after {answered} of {} requests", accesses.len()))? == Drained::Yes {
        sent.context("cannot send to the NBD server")?;
        // A courtesy: the run is complete whether or not the server still hears it.
        let _ = (&stream).write_all(&request::disconnect());
    }
    Ok(receiver.finish())
}

fn check(accesses: &[Access], negotiated: &Negotiated) -> Result<()> {
    let (size, unit) = (negotiated.size_bytes, u64::from(negotiated.block_size_min));
    let read_only = negotiated.flags.contains(TransmissionFlags::READ_ONLY);
    for (index, access) in accesses.iter().enumerate() {
        let Access { offset, len, op } = *access;
        if op == Op::Flush {
            continue;
        }
        let end = offset.checked_add(u64::from(len)).filter(|&end| end <= size);
        ensure!(end.is_some(), "access {index} ({offset}+{len}) is beyond the export's {size} bytes");
        ensure!(len > 0 && len <= negotiated.block_size_max, "access {index} has a length of {len} bytes");
        let aligned = offset.is_multiple_of(unit) && u64::from(len).is_multiple_of(unit);
        ensure!(aligned, "access {index} ({offset}+{len}) is not made of the export's {unit}-byte units");
        ensure!(op == Op::Read || !read_only, "access {index} changes the disk, and the export is read-only");
    }
    Ok(())
}

/// A request in flight; its number is the cookie. The sender fills a slot before the request leaves, and the
/// receiver hands it back through the channel after the answer, so neither sees half of the other's work.
#[derive(Default)]
struct Slot {
    /// Index of the access plus one; zero when the slot is free.
    access: AtomicU64,
    sent_ns: AtomicU64,
}

/// What both threads see.
struct Flight<'a> {
    accesses: &'a [Access],
    start: Instant,
    slots: Vec<Slot>,
    sent: AtomicU64,
    sent_all: AtomicBool,
}

impl Flight<'_> {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn find(&self, cookie: u64) -> Option<usize> {
        let slot = self.slots.get(usize::try_from(cookie).ok()?)?;
        slot.access.load(Ordering::Acquire).checked_sub(1).map(|index| index as usize)
    }

    fn send(&self, stream: &Stream, freed: mpsc::Receiver<usize>, stop: &AtomicBool) -> Result<()> {
        let result = self.send_each(stream, &freed, stop);
        self.sent_all.store(true, Ordering::Release);
        if result.is_err() {
            stream.shutdown();
        }
        result
    }

    /// Takes free slots, several at a time when several are free, and sends the next accesses in them.
    fn send_each(&self, mut stream: &Stream, freed: &mpsc::Receiver<usize>, stop: &AtomicBool) -> Result<()> {
        let longest = self.accesses.iter().filter(|access| access.op == Op::Write).map(|access| access.len);
        let payload = noise(longest.max().unwrap_or(0) as usize);
        let mut pending = self.accesses.iter().zip(1u64..).peekable();
        let (mut bytes, mut batch) = (Vec::new(), Vec::new());
        while pending.peek().is_some() && !stop.load(Ordering::Relaxed) {
            let mut slot = match freed.recv_timeout(STOP_POLL) {
                Ok(slot) => Some(slot),
                Err(mpsc::RecvTimeoutError::Timeout) => continue,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            };
            bytes.clear();
            while let Some(cookie) = slot
                && let Some((access, number)) = pending.next()
            {
                encode(&mut bytes, cookie as u64, access, &payload);
                batch.push((cookie, number));
                slot = if bytes.len() < SEND_BYTES_MAX { freed.try_recv().ok() } else { None };
            }
            // Counted first: the receiver must not believe that it has seen everything.
            self.sent.fetch_add(batch.len() as u64, Ordering::Release);
            // Stamped last: the slot of a batch's last request may have become free after its first was encoded.
            let now_ns = self.now_ns();
            for (cookie, number) in batch.drain(..) {
                self.slots[cookie].sent_ns.store(now_ns, Ordering::Relaxed);
                self.slots[cookie].access.store(number, Ordering::Release);
            }
            stream.write_all(&bytes)?;
        }
        Ok(())
    }
}

fn encode(bytes: &mut Vec<u8>, cookie: u64, access: &Access, payload: &[u8]) {
    match access.op {
        Op::Read => {
            bytes.extend_from_slice(&request::read(cookie, access.offset, access.len, CommandFlags::NONE));
        }
        Op::Write => {
            let flags = CommandFlags::NONE;
            bytes.extend_from_slice(&request::write_header(cookie, access.offset, access.len, flags));
            bytes.extend_from_slice(&payload[..access.len as usize]);
        }
        Op::Discard => {
            bytes.extend_from_slice(&request::trim(cookie, access.offset, access.len, CommandFlags::NONE));
        }
        Op::Flush => bytes.extend_from_slice(&request::flush(cookie)),
    }
}

/// Bytes that neither compress nor repeat.
fn noise(len: usize) -> Vec<u8> {
    let mut dice = Prng::new(0);
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

/// Whether every request that was sent has been answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drained {
    Yes,
    /// A stopped run gave up waiting.
    No,
}

struct Receiver<'a, P> {
    flight: &'a Flight<'a>,
    decoder: ReplyDecoder,
    latencies: Vec<Option<Sample>>,
    run: Run,
    answered: u64,
    progress: P,
}

impl<P: FnMut(u64, u64)> Receiver<'_, P> {
    /// Owns the channel of free slots, so that its end, however it comes, ends a sender that waits for one.
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
            let access = flight.accesses[flight.find(cookie)?];
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
        let index = self.flight.find(cookie).expect("the decoder answers only what is in flight");
        let slot = &self.flight.slots[cookie as usize];
        let (at_ns, now_ns) = (slot.sent_ns.load(Ordering::Relaxed), self.flight.now_ns());
        match error {
            None => {
                self.latencies[index] = Some(Sample { at_ns, latency_ns: now_ns - at_ns, hit: None });
            }
            Some(_) => {
                self.run.errors += 1;
                self.run.first_error = self.run.first_error.or(error);
            }
        }
        self.run.elapsed_ns = now_ns;
        self.answered += 1;
        slot.access.store(0, Ordering::Release);
        // A sender that has ended needs no slot.
        let _ = free.send(cookie as usize);
        (self.progress)(self.answered, self.flight.accesses.len() as u64);
    }

    fn finish(self) -> Run {
        let stopped = self.answered < self.flight.accesses.len() as u64;
        Run { samples: self.latencies.into_iter().flatten().collect(), stopped, ..self.run }
    }
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
