//! A device's segment table, in memory and on the device: the owner of each segment.
//!
//! A changed page is written over its older copy, with the next generation number. The newer copy
//! stays intact until that write is durable. So a torn write loses only the changes that it should
//! have written.

use std::io;

use super::format::{
    ENTRIES_PER_PAGE, Entry, Layout, PAGE_BYTES, PageHeader, Uuid, decode_page, encode_page,
};
use crate::volatile::ControlFile;

/// State of a table page on the device.
#[derive(Clone, Copy, Debug)]
struct Page {
    generation: u64,
    /// Number (0 or 1) of the copy that has the page's present state.
    copy: u8,
    dirty: bool,
}

/// The segment table of a device.
#[derive(Debug)]
pub(super) struct Table {
    device_uuid: Uuid,
    layout: Layout,
    entries: Vec<Entry>,
    pages: Vec<Page>,
    free: u64,
    /// Index below which no segment is free.
    lowest_free: usize,
}

impl Table {
    /// Creates a table of free segments. All its pages must be written.
    pub(super) fn new(device_uuid: Uuid, layout: Layout) -> Table {
        Table {
            device_uuid,
            layout,
            entries: vec![Entry::Free; layout.segments as usize],
            pages: vec![Page { generation: 0, copy: 0, dirty: true }; layout.table_pages as usize],
            free: layout.segments,
            lowest_free: 0,
        }
    }

    /// Reads a segment table.
    ///
    /// # Errors
    /// Returns a system error, or `InvalidData` if both copies of a page are damaged.
    pub(super) fn load(file: &ControlFile, device_uuid: Uuid, layout: Layout) -> io::Result<Table> {
        let mut table = Table::new(device_uuid, layout);
        table.entries.clear();
        let mut copies = [vec![0; PAGE_BYTES], vec![0; PAGE_BYTES]];
        for index in 0..layout.table_pages {
            let count = (layout.segments - index * ENTRIES_PER_PAGE).min(ENTRIES_PER_PAGE) as u32;
            let mut best: Option<(PageHeader, Vec<Entry>, u8)> = None;
            for (copy, bytes) in (0u8..).zip(&mut copies) {
                // An unreadable copy is treated like a torn one.
                if let Err(error) = file.read_exact_at(bytes, layout.page_offset(index, copy)) {
                    tracing::warn!(%error, page = index, copy, "a copy of a segment table page is unreadable");
                    continue;
                }
                if let Some((header, entries)) = decode_page(bytes, device_uuid, index as u32, count)
                    && best.as_ref().is_none_or(|(other, ..)| other.generation < header.generation)
                {
                    best = Some((header, entries, copy));
                }
            }
            let Some((header, entries, copy)) = best else {
                let what = format!("both copies of page {index} of the segment table are unreadable");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            };
            table.pages[index as usize] = Page { generation: header.generation, copy, dirty: false };
            table.entries.extend(entries);
        }
        table.free = table.entries.iter().filter(|entry| **entry == Entry::Free).count() as u64;
        Ok(table)
    }

    /// Writes changed pages and makes them durable.
    ///
    /// # Errors
    /// Returns a system error. The pages stay marked as changed, and the next call writes them
    /// again.
    pub(super) fn store(&mut self, file: &ControlFile) -> io::Result<()> {
        if !self.pages.iter().any(|page| page.dirty) {
            return Ok(());
        }
        let chunks = self.entries.chunks(ENTRIES_PER_PAGE as usize);
        for (index, (page, entries)) in self.pages.iter().zip(chunks).enumerate() {
            if !page.dirty {
                continue;
            }
            let header = PageHeader {
                generation: page.generation + 1,
                device_uuid: self.device_uuid,
                index: index as u32,
            };
            let bytes = encode_page(header, entries);
            file.write_all_at(&bytes, self.layout.page_offset(index as u64, 1 - page.copy))?;
        }
        file.sync_data()?;
        for page in self.pages.iter_mut().filter(|page| page.dirty) {
            *page = Page { generation: page.generation + 1, copy: 1 - page.copy, dirty: false };
        }
        Ok(())
    }

    /// Writes both copies of every page, for a new device.
    pub(super) fn format(&mut self, file: &ControlFile) -> io::Result<()> {
        self.store(file)?;
        self.pages.iter_mut().for_each(|page| page.dirty = true);
        self.store(file)
    }

    /// Returns the index of the lowest free segment; `None` if no segment is free.
    pub(super) fn find_free(&mut self) -> Option<usize> {
        let found = self.entries[self.lowest_free..].iter().position(|entry| *entry == Entry::Free)?;
        self.lowest_free += found;
        Some(self.lowest_free)
    }

    /// Changes the table entry of one segment in memory. [`store`](Self::store) writes it to the
    /// device.
    pub(super) fn set(&mut self, segment: usize, entry: Entry) {
        let old = std::mem::replace(&mut self.entries[segment], entry);
        self.pages[segment / ENTRIES_PER_PAGE as usize].dirty = true;
        self.free -= u64::from(old == Entry::Free);
        if entry == Entry::Free {
            self.free += 1;
            self.lowest_free = self.lowest_free.min(segment);
        }
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn free(&self) -> u64 {
        self.free
    }
}
