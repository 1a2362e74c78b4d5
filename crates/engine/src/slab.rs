//! Storage for in-flight state, addressed by index. Memory is allocated only if more slots are in
//! use than ever before. The caller limits the number of slots.

/// Slots that are addressed by index. Freed slots are reused first.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: u32,
    len: u32,
}

#[derive(Debug)]
enum Slot<T> {
    Free { next: u32 },
    Used(T),
}

const NONE: u32 = u32::MAX;

impl<T> Slab<T> {
    pub(crate) fn new(capacity: u32) -> Self {
        let slots = (0..capacity)
            .map(|i| Slot::Free { next: if i + 1 == capacity { NONE } else { i + 1 } })
            .collect();
        Slab { slots, free: if capacity == 0 { NONE } else { 0 }, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Allocates a slot.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        let index = self.free;
        if index == NONE {
            self.slots.push(Slot::Used(value));
            return self.slots.len() as u32 - 1;
        }
        let slot = &mut self.slots[index as usize];
        let Slot::Free { next } = *slot else { panic!("slot {index} is on the free list and in use") };
        self.free = next;
        *slot = Slot::Used(value);
        index
    }

    /// Frees a slot, which must be in use.
    pub(crate) fn remove(&mut self, index: u32) -> T {
        let slot = std::mem::replace(&mut self.slots[index as usize], Slot::Free { next: self.free });
        let Slot::Used(value) = slot else { panic!("slot {index} freed twice") };
        self.free = index;
        self.len -= 1;
        value
    }

    /// Frees a slot, which must be in use, and drops its value without copying it.
    pub(crate) fn free(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        assert!(matches!(slot, Slot::Used(_)), "slot {index} freed twice");
        *slot = Slot::Free { next: self.free };
        self.free = index;
        self.len -= 1;
    }

    /// Returns the values in the slots in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Used(value) => Some(value),
            Slot::Free { .. } => None,
        })
    }

    /// Returns true if the slot is in use.
    pub(crate) fn contains(&self, index: u32) -> bool {
        matches!(self.slots.get(index as usize), Some(Slot::Used(_)))
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;
    #[inline]
    fn index(&self, index: u32) -> &T {
        match &self.slots[index as usize] {
            Slot::Used(value) => value,
            Slot::Free { .. } => panic!("slot {index} is free"),
        }
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        match &mut self.slots[index as usize] {
            Slot::Used(value) => value,
            Slot::Free { .. } => panic!("slot {index} is free"),
        }
    }
}
