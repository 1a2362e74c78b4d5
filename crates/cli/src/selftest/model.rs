//! A model of a disk: the versions of each unit of 512 bytes that a read may return. Each write to
//! a unit creates a version.
//!
//! The versions of a unit are numbered in the order of their requests; writes to one unit never
//! overlap in time. Before a cut, a read must return the version that was acknowledged last. After
//! a cut, a read may return one of these versions:
//!
//! * the *floor*: the newest version that a flush or FUA write made durable, or that a read has
//!   returned since a cut
//! * any version requested after the floor, acknowledged or not
//!
//! After a read has returned one of these versions, later reads must return the same version. Each
//! word of a version's content states the unit and the version, so a mixed or misplaced unit, or
//! one of an earlier run, is recognised.

use std::collections::VecDeque;
use std::fmt;

/// Number of bytes that a disk writes atomically.
pub(super) const UNIT_BYTES: usize = 512;

/// A version of one unit. The lowest bit tells whether the version is all zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(u32);

impl Version {
    /// The content of a new disk.
    const NONE: Version = Version(1);

    fn is_zero(self) -> bool {
        self.0 & 1 == 1
    }

    fn next(self, content: Content) -> Version {
        Version((self.0 & !1) + 2 + u32::from(content == Content::Zeroes))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0 >> 1)?;
        if self.is_zero() { f.write_str(" (zeroes)") } else { Ok(()) }
    }
}

/// Data of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Bytes that contain their position and version.
    Stamps,
    /// Nothing but zeroes.
    Zeroes,
}

#[derive(Clone, Copy, Debug)]
struct Unit {
    floor: Version,
    /// Versions below this one, except the floor, are known to be lost.
    from: Version,
    /// The newest requested version.
    asked: Version,
    /// The newest requested version of zeroes.
    zeroes: Version,
    /// The version that a read must return; `None` after a cut.
    current: Option<Version>,
}

/// A requested write.
#[derive(Clone, Debug)]
pub(super) struct Write {
    /// First unit that is written.
    pub(super) first: u64,
    versions: Vec<Version>,
}

/// A unit with wrong content.
#[derive(Debug)]
pub(super) struct Wrong {
    unit: u64,
    found: Found,
    floor: Version,
    asked: Version,
    current: Option<Version>,
}

#[derive(Debug, PartialEq, Eq)]
enum Found {
    Zeroes,
    Stamp { unit: u64, version: Version },
    Garbage([u8; 16]),
}

/// The model of a disk; see the module's text.
pub(super) struct Model {
    seed: u64,
    units: Vec<Unit>,
    /// Acknowledged but unflushed writes, numbered in the order of their replies.
    unflushed: VecDeque<(u64, Write)>,
    answers: u64,
}

impl Model {
    /// Creates a model of a disk of zeroes.
    pub(super) fn new(seed: u64, units: u64) -> Model {
        let none = Version::NONE;
        let unit = Unit { floor: none, from: none, asked: none, zeroes: none, current: Some(none) };
        Model { seed, units: vec![unit; units as usize], unflushed: VecDeque::new(), answers: 0 }
    }

    pub(super) fn units(&self) -> u64 {
        self.units.len() as u64
    }

    /// Records the request of a write; none of its units may be in flight.
    pub(super) fn ask(&mut self, first: u64, count: u64, content: Content) -> Write {
        let units = &mut self.units[first as usize..(first + count) as usize];
        let versions = units.iter_mut().map(|unit| {
            unit.asked = unit.asked.next(content);
            if content == Content::Zeroes {
                unit.zeroes = unit.asked;
            }
            unit.asked
        });
        Write { first, versions: versions.collect() }
    }

    /// Returns the data of a write of [`Content::Stamps`].
    pub(super) fn bytes(&self, write: &Write) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(write.versions.len() * UNIT_BYTES);
        for (unit, version) in (write.first..).zip(&write.versions) {
            bytes.extend_from_slice(&self.stamp(unit, *version));
        }
        bytes
    }

    /// Records the reply to a write. `durable` is true if the write must be durable from then on.
    pub(super) fn answered(&mut self, write: Write, durable: bool) {
        for (unit, version) in (write.first..).zip(&write.versions) {
            self.units[unit as usize].current = Some(*version);
        }
        self.answers += 1;
        match durable {
            true => self.promise(&write),
            false => self.unflushed.push_back((self.answers, write)),
        }
    }

    /// Starts a flush. When the flush is acknowledged, pass the result to [`Model::flushed`].
    pub(super) fn flush(&self) -> u64 {
        self.answers
    }

    /// Records the reply to a flush.
    pub(super) fn flushed(&mut self, answers: u64) {
        while self.unflushed.front().is_some_and(|(number, _)| *number <= answers) {
            let (_, write) = self.unflushed.pop_front().expect("there is a first one");
            self.promise(&write);
        }
    }

    fn promise(&mut self, write: &Write) {
        for (unit, version) in (write.first..).zip(&write.versions) {
            let unit = &mut self.units[unit as usize];
            unit.floor = unit.floor.max(*version);
        }
    }

    /// Records a power cut.
    pub(super) fn cut(&mut self) {
        self.unflushed.clear();
        self.units.iter_mut().for_each(|unit| unit.current = None);
    }

    /// Checks data that was read from unit `first` on while no write to it was in flight.
    pub(super) fn check(&mut self, first: u64, bytes: &[u8]) -> Result<(), Wrong> {
        for (unit, bytes) in (first..).zip(bytes.chunks_exact(UNIT_BYTES)) {
            let found = self.identify(bytes);
            let state = self.units[unit as usize];
            let version = match found {
                Found::Zeroes => state.zeroes_now(),
                Found::Stamp { unit: at, version } if at == unit => Some(version),
                _ => None,
            };
            let Some(version) = version.filter(|version| state.may_hold(*version)) else {
                let Unit { floor, asked, current, .. } = state;
                return Err(Wrong { unit, found, floor, asked, current });
            };
            if state.current.is_none() {
                // A version that was read after a cut must stay.
                let unit = &mut self.units[unit as usize];
                (unit.current, unit.floor) = (Some(version), version);
                unit.from = Version(unit.asked.0 + 1);
            }
        }
        Ok(())
    }

    fn stamp(&self, unit: u64, version: Version) -> [u8; UNIT_BYTES] {
        let mut bytes = [0; UNIT_BYTES];
        let head = [self.seed ^ MAGIC, unit, u64::from(version.0)];
        let seed = self.seed ^ unit << 32 ^ u64::from(version.0) << 8;
        let (words, _) = bytes.as_chunks_mut::<8>();
        // In a build without optimization, an index takes a third of the time of an iterator.
        let mut at = 0;
        while at < words.len() {
            let value = if at < head.len() { head[at] } else { scatter(seed ^ at as u64) };
            words[at] = value.to_le_bytes();
            at += 1;
        }
        bytes
    }

    fn identify(&self, bytes: &[u8]) -> Found {
        if *bytes == [0; UNIT_BYTES] {
            return Found::Zeroes;
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at * 8..][..8].try_into().expect("eight bytes"));
        let (unit, version) = (word(1), Version(word(2) as u32));
        match word(0) == self.seed ^ MAGIC && bytes == self.stamp(unit, version) {
            true => Found::Stamp { unit, version },
            false => Found::Garbage(bytes[..16].try_into().expect("sixteen bytes")),
        }
    }
}

impl Unit {
    fn may_hold(&self, version: Version) -> bool {
        match self.current {
            Some(current) => version == current,
            None => version == self.floor || self.is_open(version),
        }
    }

    /// Returns the version number of zeroes, if the unit may contain zeroes.
    fn zeroes_now(&self) -> Option<Version> {
        match self.current {
            Some(current) => Some(current).filter(|current| current.is_zero()),
            None if self.is_open(self.zeroes) => Some(self.zeroes),
            None => Some(self.floor).filter(|floor| floor.is_zero()),
        }
    }

    /// Returns true if the version was requested, is not older than the floor, and is not known to
    /// be lost.
    fn is_open(&self, version: Version) -> bool {
        version > self.floor && version >= self.from && version <= self.asked
    }
}

/// The text "hob test" as a number.
const MAGIC: u64 = 0x7473_6574_2062_6f68;

/// Performs the last step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
fn scatter(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wrong { unit, found, floor, asked, current } = self;
        write!(f, "byte {} of the disk ", unit * UNIT_BYTES as u64)?;
        match found {
            Found::Zeroes => f.write_str("holds zeroes")?,
            Found::Stamp { unit: at, version } if at == unit => write!(f, "holds version {version}")?,
            Found::Stamp { unit: at, version } => {
                write!(f, "has the content of byte {} (version {version})", at * UNIT_BYTES as u64)?;
            }
            Found::Garbage(bytes) => write!(f, "has content that was never written, beginning {bytes:02x?}")?,
        }
        match current {
            Some(current) => write!(f, " instead of version {current}, which was read or acknowledged last"),
            None if floor == asked => write!(f, " and not version {floor}, which was durable"),
            None => write!(f, "; version {floor} was durable, {asked} was written last"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(model: &mut Model, first: u64, count: u64) -> (Write, Vec<u8>) {
        let write = model.ask(first, count, Content::Stamps);
        let bytes = model.bytes(&write);
        (write, bytes)
    }

    #[test]
    fn before_a_cut_only_the_last_answer_will_do() {
        let mut model = Model::new(1, 16);
        model.check(0, &[0; 16 * UNIT_BYTES]).unwrap();
        let (one, one_bytes) = written(&mut model, 2, 4);
        model.answered(one, false);
        let (two, two_bytes) = written(&mut model, 3, 1);
        model.answered(two, false);
        model.check(3, &two_bytes).unwrap();
        model.check(4, &one_bytes[2 * UNIT_BYTES..]).unwrap();
        let wrong = model.check(2, &one_bytes).unwrap_err().to_string();
        assert!(wrong.contains("byte 1536 of the disk holds version 1 instead of version 2"), "{wrong}");
        let wrong = model.check(4, &[0; UNIT_BYTES]).unwrap_err().to_string();
        assert!(wrong.contains("holds zeroes"), "{wrong}");
    }

    #[test]
    fn after_a_cut_everything_from_the_floor_on_will_do_once() {
        let mut model = Model::new(2, 4);
        let bytes_of_all: Vec<Vec<u8>> = (0..5)
            .map(|number| {
                let (write, bytes) = written(&mut model, 1, 1);
                match number {
                    0 => model.answered(write, false),
                    1 => model.answered(write, true),
                    2 | 3 => model.answered(write, false),
                    _ => {}
                }
                bytes
            })
            .collect();
        for (number, bytes) in bytes_of_all.iter().enumerate() {
            let mut model = Model { units: model.units.clone(), unflushed: VecDeque::new(), ..model };
            model.cut();
            let checked = model.check(1, bytes);
            assert_eq!(checked.is_ok(), number >= 1, "{number}: {checked:?}");
            if number == 2 {
                // A version that was read stays, also through the next cut.
                model.check(1, bytes).unwrap();
                model.cut();
                for other in bytes_of_all.iter().filter(|other| other != &bytes) {
                    model.cut();
                    assert!(model.check(1, other).is_err());
                }
                model.check(1, bytes).unwrap();
            }
        }
        model.cut();
        let lost = model.check(1, &[0; UNIT_BYTES]).unwrap_err().to_string();
        assert!(lost.contains("version 2 was durable, 5 was written last"), "{lost}");
    }

    #[test]
    fn a_flush_covers_writes_answered_before_it_was_sent() {
        let mut model = Model::new(3, 4);
        let (early, early_bytes) = written(&mut model, 0, 1);
        let (flying, flying_bytes) = written(&mut model, 1, 1);
        model.answered(early, false);
        let flush = model.flush();
        model.answered(flying, false);
        model.flushed(flush);
        model.cut();
        assert!(model.check(0, &[0; UNIT_BYTES]).is_err(), "it was flushed");
        model.check(0, &early_bytes).unwrap();
        model.check(1, &[0; UNIT_BYTES]).unwrap();
        assert!(model.check(1, &flying_bytes).is_err(), "it was seen to be lost");
    }

    #[test]
    fn zeroes_are_a_version_like_any_other() {
        let mut model = Model::new(4, 1);
        let (write, bytes) = written(&mut model, 0, 1);
        model.answered(write, true);
        let zeroes = model.ask(0, 1, Content::Zeroes);
        model.answered(zeroes, false);
        model.check(0, &[0; UNIT_BYTES]).unwrap();
        assert!(model.check(0, &bytes).is_err());
        model.cut();
        model.check(0, &bytes).unwrap();
        model.cut();
        assert!(model.check(0, &[0; UNIT_BYTES]).is_err(), "they were seen to be lost");
    }

    #[test]
    fn torn_and_misplaced_units_are_recognised() {
        let mut model = Model::new(5, 8);
        let (write, bytes) = written(&mut model, 0, 2);
        model.answered(write, false);
        model.cut();
        let wrong = model.check(0, &bytes[UNIT_BYTES..]).unwrap_err().to_string();
        assert!(wrong.contains("has the content of byte 512"), "{wrong}");
        let mut torn = bytes[..UNIT_BYTES].to_vec();
        torn[300] ^= 1;
        let wrong = model.check(0, &torn).unwrap_err().to_string();
        assert!(wrong.contains("was never written"), "{wrong}");
        let other = Model::new(6, 8).bytes(&Write { first: 0, versions: vec![Version(2)] });
        assert!(model.check(0, &other).is_err(), "that is another run's");
    }
}
