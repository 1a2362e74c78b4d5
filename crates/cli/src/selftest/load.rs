//! The load of the disk's only client, similar to fio's. Every byte that is read is checked.
//!
//! The load consists of writes of 4 to 64 KiB, some not aligned to sectors, some with FUA, some
//! zeroes; reads of written data; and a few flushes. Half of the load goes to an eighth of the
//! disk, so that blocks are hit and overwritten before they are flushed. Requests in flight overlap
//! only if both are reads, because otherwise the result is undefined.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use hob_lab::driver::{ClientReply, ClientRequest, ConnectionError, NbdClient};
use hob_lab::prng::Prng;
use serde::Serialize;

use super::model::{Content, Model, UNIT_BYTES, Write};

/// Maximum number of requests in flight.
const DEPTH: usize = 16;

/// Number of units per sector.
const SECTOR_UNITS: u64 = 8;

/// Length of the longest request in units.
const UNITS_MAX: u64 = 16 * SECTOR_UNITS;

/// Length of one read in units when the whole disk is checked.
const CHECK_UNITS: u64 = 256;

/// Number of requests by kind.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Counts {
    /// Number of completed writes, including zeroes.
    pub(super) writes: u64,
    /// FUA writes among them.
    pub(super) fua: u64,
    /// Number of completed flushes.
    pub(super) flushes: u64,
    /// Number of bytes read and verified.
    pub(super) bytes_checked: u64,
}

/// Reason why the load cannot continue.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The connection was closed, as after a power cut.
    Cut,
    /// An error of the daemon or of its data.
    Wrong(anyhow::Error),
}

enum Flying {
    Read { first: u64, count: u64 },
    Write { write: Write, count: u64, durable: bool },
    Flush { answers: u64 },
}

/// The NBD client of the disk.
pub(super) struct Client<'a> {
    nbd: NbdClient,
    model: &'a mut Model,
    dice: &'a mut Prng,
    counts: &'a mut Counts,
    flying: BTreeMap<u64, Flying>,
}

impl<'a> Client<'a> {
    pub(super) fn new(
        nbd: NbdClient,
        model: &'a mut Model,
        dice: &'a mut Prng,
        counts: &'a mut Counts,
    ) -> Client<'a> {
        Client { nbd, model, dice, counts, flying: BTreeMap::new() }
    }

    /// Reads and checks the whole disk in random order.
    pub(super) fn check_disk(&mut self) -> Result<(), Trouble> {
        let mut starts: Vec<u64> = (0..self.model.units()).step_by(CHECK_UNITS as usize).collect();
        for at in (1..starts.len()).rev() {
            starts.swap(at, self.dice.below(at as u64 + 1) as usize);
        }
        for first in starts {
            while self.flying.len() >= DEPTH {
                self.receive()?;
            }
            self.read(first, CHECK_UNITS.min(self.model.units() - first))?;
        }
        self.finish()
    }

    /// Sends `requests` requests, or fewer if `stop` is set.
    pub(super) fn load(&mut self, requests: u64, stop: &AtomicBool) -> Result<(), Trouble> {
        // The rate varies between one flush per few requests and almost none.
        let flush_once_in = [4, 16, 64, 1024][self.dice.below(4) as usize];
        for _ in 0..requests {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            while self.flying.len() >= DEPTH {
                self.receive()?;
            }
            self.one(flush_once_in)?;
        }
        self.finish()
    }

    /// Waits for all replies.
    fn finish(&mut self) -> Result<(), Trouble> {
        while !self.flying.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    /// Sends one request.
    fn one(&mut self, flush_once_in: u64) -> Result<(), Trouble> {
        if self.dice.below(flush_once_in) == 0 {
            let answers = self.model.flush();
            let cookie = self.nbd.send(ClientRequest::Flush)?;
            self.flying.insert(cookie, Flying::Flush { answers });
            return Ok(());
        }
        let (first, count) = self.somewhere();
        if self.dice.below(5) == 0 {
            if !self.meets(first, count, |flying| matches!(flying, Flying::Write { .. })) {
                self.read(first, count)?;
            }
            return Ok(());
        }
        if self.meets(first, count, |_| true) {
            return Ok(());
        }
        let content = if self.dice.below(16) == 0 { Content::Zeroes } else { Content::Stamps };
        let (durable, offset) = (self.dice.below(10) == 0, first * UNIT_BYTES as u64);
        let write = self.model.ask(first, count, content);
        let cookie = match content {
            Content::Stamps => {
                let data = self.model.bytes(&write);
                self.nbd.send(ClientRequest::Write { offset, data: &data, fua: durable })?
            }
            Content::Zeroes => {
                let len = (count * UNIT_BYTES as u64) as u32;
                self.nbd.send(ClientRequest::WriteZeroes { offset, len, fua: durable })?
            }
        };
        self.flying.insert(cookie, Flying::Write { write, count, durable });
        Ok(())
    }

    /// Returns the first unit and the number of units of a request.
    fn somewhere(&mut self) -> (u64, u64) {
        let units = self.model.units();
        let sectors = match self.dice.below(4) {
            0 => 1 + self.dice.below(UNITS_MAX / SECTOR_UNITS),
            1 => 4,
            _ => 1,
        };
        let room = if self.dice.below(2) == 0 { units / 8 } else { units };
        let (mut first, mut count) =
            (self.dice.below(room / SECTOR_UNITS - sectors + 1) * SECTOR_UNITS, sectors * SECTOR_UNITS);
        if self.dice.below(8) == 0 {
            let cut = self.dice.below(SECTOR_UNITS);
            (first, count) = (first + cut, count - cut);
            count -= self.dice.below(count.min(SECTOR_UNITS));
        }
        (first, count)
    }

    fn meets(&self, first: u64, count: u64, concerns: impl Fn(&Flying) -> bool) -> bool {
        self.flying.values().filter(|flying| concerns(flying)).any(|flying| match *flying {
            Flying::Read { first: other, count: its } => other < first + count && first < other + its,
            Flying::Write { write: Write { first: other, .. }, count: its, .. } => {
                other < first + count && first < other + its
            }
            Flying::Flush { .. } => false,
        })
    }

    fn read(&mut self, first: u64, count: u64) -> Result<(), Trouble> {
        let (offset, len) = (first * UNIT_BYTES as u64, (count * UNIT_BYTES as u64) as u32);
        let cookie = self.nbd.send(ClientRequest::Read { offset, len })?;
        self.flying.insert(cookie, Flying::Read { first, count });
        Ok(())
    }

    fn receive(&mut self) -> Result<(), Trouble> {
        let ClientReply { cookie, error, data } = self.nbd.receive()?;
        let flying = self.flying.remove(&cookie).expect("only what was asked is answered");
        if let Some(error) = error {
            return Err(Trouble::Wrong(anyhow!(
                "a request failed although the test injected no fault: {error}"
            )));
        }
        match flying {
            Flying::Read { first, .. } => {
                self.model.check(first, &data).map_err(|wrong| Trouble::Wrong(anyhow!("{wrong}")))?;
                self.counts.bytes_checked += data.len() as u64;
            }
            Flying::Write { write, durable, .. } => {
                self.model.answered(write, durable);
                self.counts.writes += 1;
                self.counts.fua += u64::from(durable);
            }
            Flying::Flush { answers } => {
                self.model.flushed(answers);
                self.counts.flushes += 1;
            }
        }
        Ok(())
    }
}

impl From<ConnectionError> for Trouble {
    fn from(error: ConnectionError) -> Trouble {
        match error {
            ConnectionError::Closed => Trouble::Cut,
            error => Trouble::Wrong(anyhow!("{error}")),
        }
    }
}
