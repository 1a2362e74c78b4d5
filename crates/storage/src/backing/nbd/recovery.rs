//! A connection that broke: taking it down, connecting again, and what becomes of the jobs meanwhile.

use hob_engine::io::IoError;
use hob_engine::units::Instant;
use hob_nbd::TransmissionFlags;
use hob_nbd::client::handshake::Negotiated;

use super::connect::{self, Attempt};
use super::{CONNECT, Hold, NbdBacking, State};
use crate::ring::{FdClass, Ring, RxBuf};

impl NbdBacking {
    /// Gives the connection up.
    pub(super) fn break_connection(&mut self, ring: &mut Ring, now: Instant, why: &str) {
        let State::Connected(connection) = &self.state else { return };
        if self.hold != Hold::Lost && !self.is_provisional() {
            tracing::warn!(backing = self.info.description, why, "the connection is lost; connecting again");
        }
        let fd = connection.fd;
        ring.shutdown(fd);
        connect::drop_unsent(ring.borrow(fd));
        self.state = State::Draining(fd);
        self.go_on_drained(ring, now);
    }

    /// Once the ring has nothing of the old connection any more: decides what becomes of its requests.
    pub(super) fn go_on_drained(&mut self, ring: &mut Ring, now: Instant) {
        if self.operations > 0 {
            return;
        }
        match self.state {
            State::Draining(fd) => {
                ring.detach(fd);
                self.state = State::Pausing(now + self.next_pause());
                self.jobs.send_all_again();
                if self.changes > self.flushed && !self.options.keeps_writes {
                    self.flushed = self.changes;
                    let flushes: Vec<u32> = self.jobs.live_requests().collect();
                    let flushes: Vec<u32> =
                        flushes.into_iter().filter(|slot| self.jobs.request(*slot).is_flush()).collect();
                    self.lost = true;
                    self.fail(&flushes, IoError::Failed);
                }
                self.fail_expired(now);
                if self.hold == Hold::Lost {
                    self.fail_all(IoError::ShuttingDown);
                }
            }
            State::Closing(fd) => {
                fd.into_iter().for_each(|fd| ring.detach(fd));
                self.state = State::Closed;
                self.fail_all(IoError::ShuttingDown);
            }
            _ => {}
        }
    }

    /// Between half and all of the pause, which doubles.
    fn next_pause(&mut self) -> u64 {
        let mut dice = [0];
        let _ = rustix::rand::getrandom(&mut dice, rustix::rand::GetRandomFlags::empty());
        let nanos = self.pause.as_nanos() as u64;
        self.pause = (self.pause * 2).min(self.options.reconnect_max);
        nanos / 2 + nanos / 2 * u64::from(dice[0]) / 255
    }

    /// Ends requests that are not on any connection.
    fn fail(&mut self, slots: &[u32], error: IoError) {
        self.jobs.unqueue(slots);
        for slot in slots {
            self.end_request_unsent(*slot, error);
        }
    }

    fn end_request_unsent(&mut self, slot: u32, error: IoError) {
        let (job, is_last) = self.jobs.end_request(slot, Err(error));
        if is_last {
            self.end_or_flush(job);
        }
    }

    pub(super) fn fail_expired(&mut self, now: Instant) {
        let expired = self.jobs.expired(now);
        self.fail(&expired, IoError::Failed);
    }

    pub(super) fn fail_all(&mut self, error: IoError) {
        let all: Vec<u32> = self.jobs.live_requests().collect();
        self.fail(&all, error);
    }

    pub(super) fn start_attempt(&mut self, ring: &mut Ring, now: Instant) {
        let before = self.before_connecting.clone();
        match Attempt::start(before, &self.uri, self.options.connect_max, self.options.wait_max) {
            Ok((attempt, socket)) => {
                let fd = ring.attach(socket, FdClass::Socket);
                self.operations += 1;
                ring.recv(self.tokens().token(CONNECT), fd, RxBuf::new(1));
                self.state = State::Connecting(attempt, fd);
            }
            Err(error) => {
                tracing::warn!(%error, "no thread to connect with");
                self.state = State::Pausing(now + self.next_pause());
            }
        }
    }

    pub(super) fn end_attempt(&mut self, ring: &mut Ring, now: Instant) {
        let State::Connecting(attempt, fd) = std::mem::replace(&mut self.state, State::Dead) else {
            unreachable!("only an attempt ends an attempt")
        };
        ring.detach(fd);
        match attempt.result() {
            // It may have begun before.
            Ok(_) if self.hold != Hold::No => self.state = State::Pausing(now),
            Ok(link) if !self.is_same_disk(&link.negotiated) => {
                let (was, is) = (self.info.size_bytes, link.negotiated.size_bytes);
                tracing::error!(
                    backing = self.info.description,
                    was,
                    is,
                    "the server came back with another disk, or a smaller one; this one stays failed until it is added again"
                );
                self.fail_all(IoError::Failed);
            }
            Ok(link) => {
                let (was, is) = (self.info.size_bytes, link.negotiated.size_bytes);
                if !self.is_provisional() {
                    tracing::info!(backing = self.info.description, "connected again");
                }
                if is > was {
                    tracing::warn!(
                        backing = self.info.description,
                        was,
                        is,
                        "the export has grown; 'hob disk resize' lets the disk have all of it"
                    );
                }
                self.start_connection(ring, link);
            }
            Err(why) => {
                tracing::debug!(backing = self.info.description, why, "connecting failed");
                self.state = State::Pausing(now + self.next_pause());
            }
        }
    }

    fn is_same_disk(&self, new: &Negotiated) -> bool {
        let writable = !new.flags.contains(TransmissionFlags::READ_ONLY);
        new.size_bytes >= self.info.size_bytes
            && new.block_size_min <= self.info.block_bytes
            && new.block_size_max >= self.info.block_bytes
            && (writable || self.info.read_only)
    }
}
