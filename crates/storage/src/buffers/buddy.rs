//! A buddy allocator of pages: free pages form aligned blocks of powers of two.
//!
//! Free blocks of one order form a doubly linked list in arrays, so that any block can be removed
//! in O(1). The allocator handles only page numbers, no memory.

/// Page number that means "no page".
const NONE: u32 = u32::MAX;

/// Value of `free_order` for a page that is not the first of a free block.
const NOT_FREE: u8 = u8::MAX;

/// The free pages of an arena.
#[derive(Debug)]
pub(super) struct Buddy {
    pages: u32,
    /// First block in the list of each order.
    heads: Vec<u32>,
    /// Bit `n` is set while the list of order `n` has a block.
    orders: u32,
    next: Vec<u32>,
    previous: Vec<u32>,
    /// For each page: the order of the free block that starts there, or `NOT_FREE`.
    free_order: Vec<u8>,
    free_pages: u32,
}

impl Buddy {
    /// Creates an allocator of `pages` pages, all free.
    pub(super) fn new(pages: u32) -> Buddy {
        let orders = 32 - pages.leading_zeros();
        let mut buddy = Buddy {
            pages,
            heads: vec![NONE; orders as usize],
            orders: 0,
            next: vec![NONE; pages as usize],
            previous: vec![NONE; pages as usize],
            free_order: vec![NOT_FREE; pages as usize],
            free_pages: 0,
        };
        buddy.free(0, pages);
        buddy
    }

    /// Allocates a run of `pages` pages from the smallest block that is large enough. The rest of
    /// the block stays free.
    pub(super) fn alloc(&mut self, pages: u32) -> Option<u32> {
        let order = order_for(pages);
        let fitting = self.orders.checked_shr(order).unwrap_or(0);
        if fitting == 0 {
            return None;
        }
        let order = order + fitting.trailing_zeros();
        let page = self.heads[order as usize];
        self.unlink(page, order);
        self.link_run(page + pages, page + (1 << order));
        Some(page)
    }

    /// Allocates a run of `pages` pages, also across adjacent blocks. The search scans all free
    /// blocks.
    pub(super) fn alloc_anywhere(&mut self, pages: u32) -> Option<u32> {
        if pages > self.free_pages {
            return None;
        }
        let (mut start, mut page) = (0, 0);
        while page < self.pages {
            let order = self.free_order[page as usize];
            page += if order == NOT_FREE { 1 } else { 1 << order };
            if order == NOT_FREE {
                start = page;
            } else if page - start >= pages {
                self.unlink_run(start, page);
                self.link_run(start + pages, page);
                return Some(start);
            }
        }
        None
    }

    /// Frees a run of pages and joins it with its free neighbours.
    pub(super) fn free(&mut self, page: u32, pages: u32) {
        let (mut at, end) = (page, page + pages);
        while at < end {
            let order = largest_block(at, end);
            self.free_block(at, order);
            at += 1 << order;
        }
    }

    fn free_block(&mut self, page: u32, order: u32) {
        assert_eq!(self.free_order[page as usize], NOT_FREE, "page {page} is free already");
        let (mut page, mut order) = (page, order);
        loop {
            let buddy = page ^ (1 << order);
            let joins = (order as usize) + 1 < self.heads.len()
                && buddy < self.pages
                && u32::from(self.free_order[buddy as usize]) == order;
            if !joins {
                break;
            }
            self.unlink(buddy, order);
            page = page.min(buddy);
            order += 1;
        }
        self.link(page, order);
    }

    fn link_run(&mut self, from: u32, to: u32) {
        let mut at = from;
        while at < to {
            let order = largest_block(at, to);
            self.link(at, order);
            at += 1 << order;
        }
    }

    fn unlink_run(&mut self, from: u32, to: u32) {
        let mut at = from;
        while at < to {
            let order = u32::from(self.free_order[at as usize]);
            self.unlink(at, order);
            at += 1 << order;
        }
    }

    fn link(&mut self, page: u32, order: u32) {
        let head = self.heads[order as usize];
        self.next[page as usize] = head;
        self.previous[page as usize] = NONE;
        if head != NONE {
            self.previous[head as usize] = page;
        }
        self.heads[order as usize] = page;
        self.orders |= 1 << order;
        self.free_order[page as usize] = order as u8;
        self.free_pages += 1 << order;
    }

    fn unlink(&mut self, page: u32, order: u32) {
        let (next, previous) = (self.next[page as usize], self.previous[page as usize]);
        if next != NONE {
            self.previous[next as usize] = previous;
        }
        if previous != NONE {
            self.next[previous as usize] = next;
        } else {
            self.heads[order as usize] = next;
            if next == NONE {
                self.orders &= !(1 << order);
            }
        }
        self.free_order[page as usize] = NOT_FREE;
        self.free_pages -= 1 << order;
    }

    #[cfg(test)]
    pub(super) fn free_pages(&self) -> u32 {
        self.free_pages
    }
}

/// Returns the order of the smallest block that has `pages` pages.
fn order_for(pages: u32) -> u32 {
    pages.next_power_of_two().trailing_zeros()
}

/// Returns the order of the largest block that starts at `at` and ends by `end`.
fn largest_block(at: u32, end: u32) -> u32 {
    at.trailing_zeros().min((end - at).ilog2())
}
