//! A timeline: the blocks of a disk in the order of their last use. It counts the blocks that were
//! used after any given one in O(log n). The blocks in the timeline are its *members*. The caller
//! chooses the numbers of the members.
//!
//! Each use of a member takes the next slot, and the member keeps only the slot of its last use. A
//! bitmap records the slots in use, and a Fenwick tree (Fenwick, "A new data structure for
//! cumulative frequency tables", 1994) counts them in the bitmap's 64-bit words. The word that is
//! being filled is not in the tree yet, so that most uses do not touch the tree. When the last slot
//! has been used, the slots in use are compacted. Memory use is 8.5 bytes per member of the
//! capacity.

const WORD_BITS: u32 = 64;

/// Members in the order of their last use.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// For each slot, one bit that is set if the slot is in use.
    held: Vec<u64>,
    /// Fenwick tree over the complete words of `held`: entry i is the number of bits that are set in
    /// the words (i & (i + 1)) ..= i.
    counts: Vec<u32>,
    /// For each slot, its member; undefined if the slot is not in use.
    member: Vec<u32>,
    /// The slot that the next use takes.
    now: u32,
    members: u32,
    /// No slot below this one is in use.
    oldest: u32,
}

impl Timeline {
    /// Creates an empty timeline with room for `members_max` members, which must be below 2³⁰.
    pub fn new(members_max: u32) -> Self {
        assert!(members_max < 1 << 30, "slots are numbered with 32 bits");
        // There are as many free slots as held ones, so that compaction adds a bounded cost to each
        // use.
        let words = (2 * members_max).div_ceil(WORD_BITS).max(1) as usize;
        Timeline {
            held: vec![0; words],
            counts: vec![0; words],
            member: vec![0; words * WORD_BITS as usize],
            now: 0,
            members: 0,
            oldest: 0,
        }
    }

    /// Returns the same members in the same order, with room for `members_max` members. Each member
    /// gets a new slot, which `moved` reports.
    pub fn with_room(&self, members_max: u32, mut moved: impl FnMut(u32, u32)) -> Self {
        let mut wide = Timeline::new(members_max);
        for (word, held) in self.held.iter().enumerate() {
            let mut bits = *held;
            while bits != 0 {
                let member = self.member[word * WORD_BITS as usize + bits.trailing_zeros() as usize];
                let slot = wide.push(member, |_, _| unreachable!("as many slots as members are free"));
                moved(member, slot);
                bits &= bits - 1;
            }
        }
        wide
    }

    /// Returns the number of members.
    pub fn len(&self) -> u32 {
        self.members
    }

    /// Returns true if there is no member.
    pub fn is_empty(&self) -> bool {
        self.members == 0
    }

    /// Returns the number of members whose last use is later than that of the member in `slot`.
    #[inline]
    pub fn younger(&self, slot: u32) -> u32 {
        let word = (slot / WORD_BITS) as usize;
        let upto = u64::MAX >> (WORD_BITS - 1 - slot % WORD_BITS);
        self.members - self.before(word) - (self.held[word] & upto).count_ones()
    }

    /// Adds a member that holds no slot, as the most recently used one. If slots are compacted,
    /// `moved` is called with each member and its new slot.
    ///
    /// # Panics
    /// Panics if more members hold slots than the timeline has room for.
    #[inline]
    pub fn push(&mut self, member: u32, moved: impl FnMut(u32, u32)) -> u32 {
        if self.now as usize == self.member.len() {
            self.move_together(moved);
        }
        let slot = self.now;
        self.now += 1;
        self.members += 1;
        self.member[slot as usize] = member;
        let word = (slot / WORD_BITS) as usize;
        self.held[word] |= 1 << (slot % WORD_BITS);
        if self.now.is_multiple_of(WORD_BITS) {
            self.add(word, self.held[word].count_ones());
        }
        slot
    }

    /// Frees a slot.
    #[inline]
    pub fn remove(&mut self, slot: u32) {
        let word = (slot / WORD_BITS) as usize;
        let bit = 1 << (slot % WORD_BITS);
        debug_assert!(self.held[word] & bit != 0, "slot {slot} is not held");
        self.held[word] &= !bit;
        self.members -= 1;
        if word < (self.now / WORD_BITS) as usize {
            self.add(word, 1u32.wrapping_neg());
        }
    }

    /// Renames the member in `slot` to `member`.
    pub fn rename(&mut self, slot: u32, member: u32) {
        self.member[slot as usize] = member;
    }

    /// Returns the least recently used member, and its slot.
    pub fn oldest(&mut self) -> Option<(u32, u32)> {
        if self.members == 0 {
            return None;
        }
        let mut word = (self.oldest / WORD_BITS) as usize;
        while self.held[word] == 0 {
            word += 1;
        }
        self.oldest = word as u32 * WORD_BITS + self.held[word].trailing_zeros();
        Some((self.member[self.oldest as usize], self.oldest))
    }

    /// Returns the memory used, in bytes.
    pub fn bytes(&self) -> u64 {
        (self.held.capacity() * 8 + self.counts.capacity() * 4 + self.member.capacity() * 4) as u64
    }

    /// Returns the number of slots in use in the words below `word`.
    #[inline]
    fn before(&self, word: usize) -> u32 {
        let mut sum = 0u32;
        let mut i = word;
        while i > 0 {
            sum = sum.wrapping_add(self.counts[i - 1]);
            i &= i - 1;
        }
        sum
    }

    #[inline]
    fn add(&mut self, word: usize, change: u32) {
        let mut i = word;
        while i < self.counts.len() {
            self.counts[i] = self.counts[i].wrapping_add(change);
            i |= i + 1;
        }
    }

    #[cold]
    fn move_together(&mut self, mut moved: impl FnMut(u32, u32)) {
        assert!((self.members as usize) < self.member.len(), "more members than the line was made for");
        let mut next = 0u32;
        for word in 0..self.held.len() {
            let mut bits = self.held[word];
            while bits != 0 {
                let member = self.member[word * WORD_BITS as usize + bits.trailing_zeros() as usize];
                self.member[next as usize] = member;
                moved(member, next);
                next += 1;
                bits &= bits - 1;
            }
        }
        debug_assert_eq!(next, self.members);
        self.now = next;
        self.oldest = 0;
        let full = (next / WORD_BITS) as usize;
        self.held.fill(0);
        self.held[..full].fill(u64::MAX);
        if !next.is_multiple_of(WORD_BITS) {
            self.held[full] = (1 << (next % WORD_BITS)) - 1;
        }
        for (i, count) in self.counts.iter_mut().enumerate() {
            let words = (i + 1).min(full).saturating_sub(i & (i + 1));
            *count = words as u32 * WORD_BITS;
        }
    }
}
