//! A bitmap, for example with one bit for each sector.

/// A sequence of bits of fixed length. The first bit has number 0.
#[derive(Clone, Debug)]
pub(crate) struct Bitmap(Vec<u64>);

impl Bitmap {
    /// Creates a bitmap of `bits` zeroes.
    pub(crate) fn new(bits: u64) -> Bitmap {
        Bitmap(vec![0; bits.div_ceil(64) as usize])
    }

    #[inline]
    pub(crate) fn get(&self, bit: u64) -> bool {
        self.0[(bit / 64) as usize] >> (bit % 64) & 1 == 1
    }

    #[inline]
    pub(crate) fn set(&mut self, bit: u64) {
        self.0[(bit / 64) as usize] |= 1 << (bit % 64);
    }

    /// Returns how many of the `count` bits from `first` on are set.
    #[inline]
    pub(super) fn count(&self, first: u64, count: u64) -> u64 {
        if count == 1 {
            return u64::from(self.get(first));
        }
        let mut total = 0;
        for_words(first, count, |word, mask| total += u64::from((self.0[word] & mask).count_ones()));
        total
    }

    /// Returns true if any of these bits is set.
    #[inline]
    pub(super) fn any(&self, first: u64, count: u64) -> bool {
        if count == 1 {
            return self.get(first);
        }
        let mut any = false;
        for_words(first, count, |word, mask| any |= self.0[word] & mask != 0);
        any
    }

    /// Clears these bits.
    #[inline]
    pub(crate) fn clear(&mut self, first: u64, count: u64) {
        let words = &mut self.0;
        for_words(first, count, |word, mask| words[word] &= !mask);
    }

    /// Returns the first set bit at or after `from`.
    pub(super) fn next_one(&self, from: u64) -> Option<u64> {
        next_one(&self.0, from)
    }

    /// Returns the first set bit in `from..end`.
    pub(crate) fn next_one_before(&self, from: u64, end: u64) -> Option<u64> {
        let words = end.div_ceil(64).min(self.0.len() as u64) as usize;
        (from < end).then(|| next_one(&self.0[..words], from)).flatten().filter(|bit| *bit < end)
    }

    /// Returns the numbers of the set bits, in ascending order.
    pub(crate) fn ones(&self) -> impl Iterator<Item = u64> {
        self.0.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(|(i, word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| i as u64 * 64 + bit)
        })
    }

    /// Returns the memory used, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.capacity() as u64 * 8
    }
}

fn next_one(words: &[u64], from: u64) -> Option<u64> {
    let (start, mask) = ((from / 64) as usize, u64::MAX << (from % 64));
    let words = words.get(start..)?.iter().enumerate();
    let mut words = words.map(|(i, word)| (i, if i == 0 { word & mask } else { *word }));
    let (i, word) = words.find(|(_, word)| *word != 0)?;
    Some((start + i) as u64 * 64 + u64::from(word.trailing_zeros()))
}

/// Calls `f` with each word that holds bits of the range, and the mask of these bits.
#[inline]
fn for_words(first: u64, count: u64, mut f: impl FnMut(usize, u64)) {
    let mut at = first;
    let end = first + count;
    while at < end {
        let bit = at % 64;
        let n = (64 - bit).min(end - at);
        let mask = if n == 64 { u64::MAX } else { ((1 << n) - 1) << bit };
        f((at / 64) as usize, mask);
        at += n;
    }
}
