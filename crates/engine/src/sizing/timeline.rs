//! Who was used when: members in the order of their last use, with the number of members used since any one of them
//! in O(log n).
//!
//! Each use takes the next slot of a line of slots; a member holds the slot of its last use. Which slots are held is
//! a bitmap, and a Fenwick tree (Fenwick, "A new data structure for cumulative frequency tables", 1994) counts the
//! held slots in its 64-bit words. The word that is being filled is not in the tree yet, so that most uses do not
//! touch it. At the end of the line the held slots move together. Memory: 8.5 bytes per member that fits.

const WORD_BITS: u32 = 64;

/// Members in the order of their last use.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// Per slot: is it held?
    held: Vec<u64>,
    /// Fenwick tree over the full words of `held`: entry i counts the words (i & (i + 1)) ..= i.
    counts: Vec<u32>,
    /// Per slot: who took it. Means something only while it is held.
    member: Vec<u32>,
    /// The next slot.
    now: u32,
    members: u32,
    /// No slot below is held.
    oldest: u32,
}

impl Timeline {
    /// An empty line for up to `members_max` (below 2³⁰) members.
    pub fn new(members_max: u32) -> Self {
        assert!(members_max < 1 << 30, "slots are numbered with 32 bits");
        // As many free slots as held ones, so that moving together costs each use a bounded share.
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

    /// The same members in the same order, with room for `members_max`. Each takes a new slot, told to `moved`.
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

    /// Members.
    pub fn len(&self) -> u32 {
        self.members
    }

    /// Has it no member?
    pub fn is_empty(&self) -> bool {
        self.members == 0
    }

    /// Members whose last use is later than that of the one that holds `slot`.
    #[inline]
    pub fn younger(&self, slot: u32) -> u32 {
        let word = (slot / WORD_BITS) as usize;
        let upto = u64::MAX >> (WORD_BITS - 1 - slot % WORD_BITS);
        self.members - self.before(word) - (self.held[word] & upto).count_ones()
    }

    /// A member is used that holds no slot: it gets the youngest. Where slots move, `moved` is told each member and
    /// its new slot.
    ///
    /// # Panics
    /// When more members hold slots than the line was made for.
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

    /// The holder of `slot` gives it up.
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

    /// The member that holds `slot` is called `member` from here on.
    pub fn rename(&mut self, slot: u32, member: u32) {
        self.member[slot as usize] = member;
    }

    /// The member whose last use is the longest ago, and its slot.
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

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        (self.held.capacity() * 8 + self.counts.capacity() * 4 + self.member.capacity() * 4) as u64
    }

    /// Held slots in the words below `word`.
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
