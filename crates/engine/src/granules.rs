//! A set of parts of a disk with equal length, called *granules*, for dirty bitmaps.
//!
//! The granule size is chosen for each set, and adding a range adds all granules that it touches. A
//! disk has at most 2²⁶ granules, so a set takes at most 8 MiB. If a disk grows beyond that number,
//! the granule size doubles.
//!
//! A granule size must be a power of two from 4 KiB to 64 MiB, and large enough that the disk has
//! at most 2²⁶ granules. Offsets and lengths are bytes.

/// Minimum granule size in bytes.
pub const GRANULE_BYTES_MIN: u64 = 4096;

/// Maximum granule size in bytes.
pub const GRANULE_BYTES_MAX: u64 = 64 << 20;

/// Default granule size in bytes, unless the disk is too large for it.
pub const GRANULE_BYTES_USUAL: u64 = 64 << 10;

/// Maximum number of granules per disk.
pub const GRANULES_MAX: u64 = 1 << 26;

/// A set of granules of one disk. New sets are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granules {
    disk_bytes: u64,
    /// Base-2 logarithm of the granule size in bytes.
    shift: u32,
    words: Vec<u64>,
    /// Number of granules in the set.
    count: u64,
}

impl Granules {
    /// Creates an empty set for a disk of `disk_bytes` bytes. Returns `None` if the granule size is
    /// invalid.
    pub fn new(disk_bytes: u64, granule_bytes: u64) -> Option<Granules> {
        let fits = granule_bytes.is_power_of_two()
            && (GRANULE_BYTES_MIN..=GRANULE_BYTES_MAX).contains(&granule_bytes)
            && disk_bytes.div_ceil(granule_bytes) <= GRANULES_MAX;
        fits.then(|| {
            let words = disk_bytes.div_ceil(granule_bytes).div_ceil(64) as usize;
            Granules { disk_bytes, shift: granule_bytes.ilog2(), words: vec![0; words], count: 0 }
        })
    }

    /// Creates a set from the result of [`words`](Self::words). Returns `None` if the words are not
    /// a valid set for a disk of `disk_bytes` bytes.
    pub fn from_words(disk_bytes: u64, granule_bytes: u64, words: Vec<u64>) -> Option<Granules> {
        let empty = Granules::new(disk_bytes, granule_bytes)?;
        let tail = empty.granules() % 64;
        let spare = if tail == 0 { 0 } else { u64::MAX << tail };
        if words.len() != empty.words.len() || words.last().is_some_and(|last| last & spare != 0) {
            return None;
        }
        let count = words.iter().map(|word| u64::from(word.count_ones())).sum();
        Some(Granules { words, count, ..empty })
    }

    /// Returns the default granule size for a disk of this many bytes. Returns `None` if the disk
    /// is too large for any granule size.
    pub fn usual_bytes(disk_bytes: u64) -> Option<u64> {
        let enough = |granule: &u64| disk_bytes.div_ceil(*granule) <= GRANULES_MAX;
        (GRANULE_BYTES_USUAL.ilog2()..=GRANULE_BYTES_MAX.ilog2()).map(|shift| 1 << shift).find(enough)
    }

    /// Returns the size of the disk in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Returns the granule size in bytes.
    pub fn granule_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// Returns one bit for each granule. The lowest bit of the first word is the first granule, and
    /// bits beyond the end are clear.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the number of the disk's bytes that the set covers.
    pub fn bytes(&self) -> u64 {
        let past = (self.granules() << self.shift) - self.disk_bytes;
        let has_last = self.granules() > 0 && self.has(self.granules() - 1);
        (self.count << self.shift) - if has_last { past } else { 0 }
    }

    /// Returns the memory used, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// Adds a range. The part beyond the disk's end is ignored.
    #[inline]
    pub fn insert(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.disk_bytes);
        if offset >= end {
            return;
        }
        for granule in offset >> self.shift..=(end - 1) >> self.shift {
            let (word, bit) = (&mut self.words[(granule / 64) as usize], 1 << (granule % 64));
            self.count += u64::from(*word & bit == 0);
            *word |= bit;
        }
    }

    /// Adds the whole disk.
    pub fn insert_all(&mut self) {
        let granules = self.granules();
        self.words.fill(u64::MAX);
        if let (Some(last), 1..) = (self.words.last_mut(), granules % 64) {
            *last = (1 << (granules % 64)) - 1;
        }
        self.count = granules;
    }

    /// Removes all granules from the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.count = 0;
    }

    /// Adds all granules of `others`, up to the disk's end.
    pub fn insert_those_of(&mut self, others: &Granules) {
        let mut at = 0;
        while at < others.disk_bytes {
            let (len, is_in) = others.run(at, others.disk_bytes - at);
            if is_in {
                self.insert(at, len);
            }
            at += len;
        }
    }

    /// Returns true if the set covers a byte.
    #[inline]
    pub fn contains(&self, offset: u64) -> bool {
        offset < self.disk_bytes && self.has(offset >> self.shift)
    }

    /// Returns the number of bytes from `offset` on that are all in the set, or all outside of the
    /// set, and true if they are in the set. The number is at most `len`. Bytes beyond the disk's
    /// end are never in the set.
    pub fn run(&self, offset: u64, len: u64) -> (u64, bool) {
        let end = offset.saturating_add(len);
        let is_in = self.contains(offset);
        let granules = self.granules();
        let mut granule = offset >> self.shift;
        while granule < granules && (granule << self.shift) < end && self.has(granule) == is_in {
            // If all bits of a word are equal, the whole word is skipped in one step.
            let word = self.words[(granule / 64) as usize];
            let alike = granule.is_multiple_of(64) && word == if is_in { u64::MAX } else { 0 };
            granule += if alike { 64 } else { 1 };
        }
        let upto = if granule >= granules && !is_in { end } else { end.min(granule << self.shift) };
        let upto = if is_in { upto.min(self.disk_bytes) } else { upto };
        (upto - offset, is_in)
    }

    /// Sets the disk's size, which must not shrink. The set covers the new bytes.
    pub fn grow(&mut self, disk_bytes: u64) {
        assert!(disk_bytes >= self.disk_bytes, "disks do not shrink");
        let before = self.disk_bytes;
        while disk_bytes.div_ceil(1 << self.shift) > GRANULES_MAX {
            self.double();
        }
        self.disk_bytes = disk_bytes;
        self.words.resize(self.granules().div_ceil(64) as usize, 0);
        self.insert(before, disk_bytes - before);
    }

    /// Doubles the granule size.
    fn double(&mut self) {
        let mut double = Granules { shift: self.shift + 1, words: Vec::new(), count: 0, ..*self };
        double.words = vec![0; double.granules().div_ceil(64) as usize];
        double.insert_those_of(self);
        *self = double;
    }

    fn granules(&self) -> u64 {
        self.disk_bytes.div_ceil(1 << self.shift)
    }

    #[inline]
    fn has(&self, granule: u64) -> bool {
        self.words[(granule / 64) as usize] >> (granule % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K64: u64 = 64 << 10;

    /// Returns the runs of the whole disk, in granules.
    fn runs(set: &Granules) -> Vec<(u64, bool)> {
        let (mut at, mut found) = (0, vec![]);
        while at < set.disk_bytes() {
            let (len, is_in) = set.run(at, set.disk_bytes() - at);
            found.push((len, is_in));
            at += len;
        }
        found
    }

    #[test]
    fn ranges_touch_whole_granules() {
        let mut set = Granules::new(10 * K64 + 512, K64).unwrap();
        assert!(set.is_empty() && set.bytes() == 0);
        set.insert(K64 - 1, 2);
        set.insert(3 * K64, 0);
        set.insert(10 * K64 + 100, u64::MAX);
        assert_eq!(runs(&set), [(2 * K64, true), (8 * K64, false), (512, true)]);
        assert_eq!(set.bytes(), 2 * K64 + 512);
        assert!(set.contains(0) && set.contains(10 * K64 + 511) && !set.contains(10 * K64 + 512));
        assert_eq!(set.run(100, 50), (50, true));
        assert_eq!(set.run(K64 + 7, 4 * K64), (K64 - 7, true));
        assert_eq!(set.run(5 * K64 + 7, K64), (K64, false));
        set.insert(0, 3 * K64);
        assert_eq!(set.bytes(), 3 * K64 + 512, "what is in already counts once");
        let again = Granules::from_words(set.disk_bytes(), K64, set.words().to_vec()).unwrap();
        assert_eq!(again, set);
        set.insert_all();
        assert_eq!((set.bytes(), runs(&set).len()), (10 * K64 + 512, 1));
        set.clear();
        assert_eq!(runs(&set), [(10 * K64 + 512, false)]);
    }

    /// Compares runs with checks of single granules, over words with equal bits and others.
    #[test]
    fn runs_are_exact() {
        let mut rng = 7u64;
        let mut roll = |below: u64| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (rng >> 33) % below
        };
        for _ in 0..50 {
            let granules = 1 + roll(700);
            let mut set = Granules::new(granules * 4096 - roll(8) * 512, 4096).unwrap();
            for _ in 0..roll(6) {
                let first = roll(granules);
                set.insert(first * 4096, roll(granules - first + 1) * 4096);
            }
            let exact: u64 = (0..set.disk_bytes()).step_by(512).filter(|at| set.contains(*at)).count() as u64;
            assert_eq!(set.bytes(), exact * 512);
            let runs = runs(&set);
            assert!(runs.windows(2).all(|pair| pair[0].1 != pair[1].1), "runs alternate: {runs:?}");
            let mut at = 0;
            for (len, is_in) in runs {
                assert!((at..at + len).step_by(512).all(|at| set.contains(at) == is_in));
                at += len;
            }
            assert_eq!(at, set.disk_bytes());
        }
    }

    #[test]
    fn invalid_requests_are_refused() {
        for granule in [0, 512, 2048, 65_537, 3 * K64, 128 << 20] {
            assert_eq!(Granules::new(1 << 30, granule), None, "{granule}");
        }
        assert!(Granules::new(GRANULES_MAX * 4096, 4096).is_some());
        assert_eq!(Granules::new(GRANULES_MAX * 4096 + 512, 4096), None);
        assert_eq!(Granules::usual_bytes(1 << 40), Some(K64));
        assert_eq!(Granules::usual_bytes(5 << 40), Some(2 * K64));
        assert_eq!(Granules::usual_bytes(1 << 62), None);
        assert_eq!(Granules::from_words(65 * 4096, 4096, vec![0]), None);
        assert_eq!(Granules::from_words(65 * 4096, 4096, vec![0, 2]), None, "a bit past the end");
        assert!(Granules::from_words(65 * 4096, 4096, vec![u64::MAX, 1]).is_some());
    }

    #[test]
    fn sets_of_other_granules_and_sizes_are_put_in() {
        let mut coarse = Granules::new(K64 * 4, 2 * K64).unwrap();
        let mut fine = Granules::new(K64 * 8, 4096).unwrap();
        fine.insert(3 * K64, 1);
        fine.insert(7 * K64, 1);
        coarse.insert_those_of(&fine);
        assert_eq!(runs(&coarse), [(2 * K64, false), (2 * K64, true)]);
        let mut other = Granules::new(K64 * 8, 4096).unwrap();
        other.insert_those_of(&coarse);
        assert_eq!(other.bytes(), 2 * K64);
    }

    #[test]
    fn the_new_part_of_a_grown_disk_is_in_the_bitmap() {
        let mut set = Granules::new(K64 + 512, K64).unwrap();
        set.insert(0, 1);
        set.grow(K64 + 1024);
        assert_eq!(set.bytes(), K64 + 1024, "the granule that the old end lies in");
        set.clear();
        set.insert(0, 1);
        set.grow(200 * K64);
        assert_eq!(runs(&set), [(200 * K64, true)]);
        let mut large = Granules::new(GRANULES_MAX * 4096, 4096).unwrap();
        large.insert(8192, 1);
        large.grow(GRANULES_MAX * 4096 + 8192);
        assert_eq!(large.granule_bytes(), 8192);
        assert_eq!(runs(&large)[..3], [(8192, false), (8192, true), (GRANULES_MAX * 4096 - 16384, false)]);
        assert!(large.contains(GRANULES_MAX * 4096));
    }
}
