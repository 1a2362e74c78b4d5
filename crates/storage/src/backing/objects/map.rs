//! The newest generation of each object, in memory: 8 bytes per object, in pages that are allocated
//! on demand.

use super::format::{Generation, PAGE_ENTRIES, Shape};

type Page = Box<[Generation; PAGE_ENTRIES]>;

/// Newest generation of every object of a disk.
#[derive(Debug, Default)]
pub(super) struct Map {
    pages: Vec<Option<Page>>,
    present: u64,
}

impl Map {
    pub(super) fn new(shape: &Shape) -> Map {
        Map { pages: vec![None; shape.pages()], present: 0 }
    }

    /// Adds a page that was read from the object store.
    pub(super) fn load(&mut self, page: usize, entries: Page) {
        assert!(self.pages[page].is_none(), "a page is loaded once");
        self.present += entries.iter().filter(|entry| !entry.is_absent()).count() as u64;
        self.pages[page] = Some(entries);
    }

    pub(super) fn get(&self, index: u64) -> Generation {
        let (page, at) = place(index);
        self.pages[page].as_ref().map_or(Generation::ABSENT, |entries| entries[at])
    }

    /// Sets the generation of an object, and returns the previous one.
    pub(super) fn set(&mut self, index: u64, generation: Generation) -> Generation {
        let (page, at) = place(index);
        let entries = self.pages[page].get_or_insert_with(|| Box::new([Generation::ABSENT; PAGE_ENTRIES]));
        let before = std::mem::replace(&mut entries[at], generation);
        self.present += u64::from(before.is_absent());
        self.present -= u64::from(generation.is_absent());
        before
    }

    /// Returns a map page; `None` if no object in it exists.
    pub(super) fn page(&self, page: usize) -> Option<&[Generation; PAGE_ENTRIES]> {
        self.pages[page].as_deref().filter(|entries| entries.iter().any(|entry| !entry.is_absent()))
    }

    /// Returns the number of objects that exist.
    pub(super) fn present(&self) -> u64 {
        self.present
    }
}

/// Returns the map page that describes an object, and the object's index in it.
pub(super) fn place(index: u64) -> (usize, usize) {
    ((index / PAGE_ENTRIES as u64) as usize, (index % PAGE_ENTRIES as u64) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Uuid;

    #[test]
    fn absent_objects_take_no_memory_and_count_for_nothing() {
        let shape = Shape { uuid: Uuid([1; 16]), size_bytes: 10_000 << 16, object_bytes: 64 << 10 };
        let mut map = Map::new(&shape);
        let (first, second) = (Generation::new(1, 1), Generation::new(1, 2));
        assert_eq!(map.set(9999, first), Generation::ABSENT);
        assert_eq!(map.set(9999, second), first);
        assert_eq!((map.get(9999), map.get(0), map.present()), (second, Generation::ABSENT, 1));
        assert!(map.page(0).is_none() && map.page(2).is_some());
        map.set(9999, Generation::ABSENT);
        assert!(map.page(2).is_none());
        assert_eq!(map.present(), 0);
    }
}
