//! The flash devices of one shard: the engine's flash I/O, with checksums.
//!
//! One operation of the ring per I/O and one slot of a table; the sums of a completed transfer go
//! into one vector that is used again. A flash device forgets nothing and zeroes nothing: discards
//! are acknowledged, because a thick pool keeps its room, and zeroing is not supported.

use hob_engine::io::{Io, IoError, IoOp, Target};
use hob_engine::units::{DeviceId, IoId};

use crate::checksum::sector_sums;
use crate::pool::FlashFile;
use crate::ring::{Completion, Fd, Ring};
use crate::token::{Token, TokenSpace};

/// The shard's end of the pool.
#[derive(Debug)]
pub struct Flash {
    tokens: TokenSpace,
    /// By device id.
    devices: Vec<Option<Fd>>,
    ios: Vec<Io>,
    free: Vec<u32>,
    sums: Vec<u32>,
}

/// A flash I/O that ended.
#[derive(Debug, PartialEq, Eq)]
pub struct FlashDone<'a> {
    /// Which.
    pub io: IoId,
    /// How.
    pub result: Result<(), IoError>,
    /// Checksums of the sectors that were read or written; empty after other operations and errors.
    pub sums: &'a [u32],
}

impl Flash {
    /// No devices yet. Completions will carry tokens of kind [`Token::FLASH`] and this owner.
    pub fn new(owner: u16) -> Flash {
        Flash {
            tokens: TokenSpace::new(Token::FLASH, owner),
            devices: Vec::new(),
            ios: Vec::new(),
            free: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// Makes a device usable.
    pub fn attach(&mut self, ring: &mut Ring, device: DeviceId, file: FlashFile) {
        let index = usize::from(device.0);
        if self.devices.len() <= index {
            self.devices.resize(index + 1, None);
        }
        assert!(self.devices[index].is_none(), "device {device} is attached already");
        self.devices[index] = Some(ring.attach(file.file, file.class));
    }

    /// Gives a device up; I/O in flight still completes.
    pub fn detach(&mut self, ring: &mut Ring, device: DeviceId) {
        if let Some(fd) = self.devices.get_mut(usize::from(device.0)).and_then(Option::take) {
            ring.detach(fd);
        }
    }

    /// Starts an I/O whose target is a flash device. On one that is not attached it fails.
    pub fn submit(&mut self, ring: &mut Ring, io: &Io) {
        let Target::Flash(device) = io.target else { unreachable!("not for flash: {io:?}") };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.ios[slot as usize] = *io;
                slot
            }
            None => {
                self.ios.push(*io);
                self.ios.len() as u32 - 1
            }
        };
        let token = self.tokens.token(slot);
        let Some(&Some(fd)) = self.devices.get(usize::from(device.0)) else {
            return ring.post(token, -libc::ENODEV);
        };
        match (io.op, io.slice) {
            (IoOp::Read, Some(slice)) => ring.read(token, fd, io.offset, slice),
            (IoOp::Write(durability), Some(slice)) => ring.write(token, fd, io.offset, slice, durability),
            (IoOp::Flush, _) => ring.fsync(token, fd),
            (IoOp::Discard, _) => ring.post(token, 0),
            (IoOp::WriteZeroes(_), _) => ring.post(token, -libc::EOPNOTSUPP),
            (IoOp::WriteJournal, _) => unimplemented!(),
            (IoOp::Read | IoOp::Write(_), None) => unreachable!("a transfer has a slice"),
        }
    }

    /// Takes a completion whose token is of kind [`Token::FLASH`].
    pub fn handle_completion(&mut self, ring: &Ring, completion: &Completion) -> FlashDone<'_> {
        let slot = completion.token.index();
        let io = self.ios[slot as usize];
        self.free.push(slot);
        self.sums.clear();
        let result = match completion.result {
            0.. => Ok(()),
            error if error == -libc::EOPNOTSUPP => Err(IoError::Unsupported),
            _ => Err(IoError::Failed),
        };
        if let (Ok(()), Some(slice)) = (result, io.slice) {
            sector_sums(ring.arena().slice(slice), &mut self.sums);
        }
        FlashDone { io: io.id, result, sums: &self.sums }
    }
}
