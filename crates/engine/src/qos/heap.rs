//! A heap of flows ordered by tag, smallest first. A flow is the waiting I/O of one disk, or the
//! background I/O of all disks. Each flow's position in the heap is known. So changing a tag and
//! removing a flow take O(log n) without allocation.

/// Entry of `places` for a flow that is not in the heap.
const OUT: u32 = u32::MAX;

/// A heap that has each flow at most once.
#[derive(Debug, Default)]
pub(super) struct TagHeap<Tag> {
    /// Tags and flows. Flows with equal tags are ordered by number, so that every run gives the
    /// same result.
    order: Vec<(Tag, u32)>,
    /// Position in `order` of each flow, by flow number. [`OUT`] if the flow is not in the heap.
    places: Vec<u32>,
}

impl<Tag: Copy + Ord> TagHeap<Tag> {
    /// Returns the smallest tag and its flow; `None` if the heap is empty.
    pub(super) fn first(&self) -> Option<(Tag, u32)> {
        self.order.first().copied()
    }

    /// Adds a flow, or changes its tag.
    pub(super) fn set(&mut self, flow: u32, tag: Tag) {
        if self.places.len() <= flow as usize {
            self.places.resize(flow as usize + 1, OUT);
        }
        let place = match self.places[flow as usize] {
            OUT => {
                self.order.push((tag, flow));
                self.order.len() - 1
            }
            place => {
                self.order[place as usize].0 = tag;
                place as usize
            }
        };
        self.places[flow as usize] = place as u32;
        let place = self.rise(place);
        self.sink(place);
    }

    /// Removes a flow, if it is in the heap.
    pub(super) fn remove(&mut self, flow: u32) {
        let Some(&place) = self.places.get(flow as usize).filter(|place| **place != OUT) else { return };
        self.places[flow as usize] = OUT;
        let last = self.order.pop().expect("the heap has this flow");
        if last.1 != flow {
            self.order[place as usize] = last;
            self.places[last.1 as usize] = place;
            let place = self.rise(place as usize);
            self.sink(place);
        }
    }

    fn rise(&mut self, mut place: usize) -> usize {
        while place > 0 {
            let above = (place - 1) / 2;
            if self.order[above] <= self.order[place] {
                break;
            }
            self.swap(above, place);
            place = above;
        }
        place
    }

    fn sink(&mut self, mut place: usize) {
        loop {
            let left = 2 * place + 1;
            let below = (left..(left + 2).min(self.order.len())).min_by_key(|below| self.order[*below]);
            match below.filter(|below| self.order[*below] < self.order[place]) {
                Some(below) => {
                    self.swap(below, place);
                    place = below;
                }
                None => return,
            }
        }
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.order.swap(one, other);
        self.places[self.order[one].1 as usize] = one as u32;
        self.places[self.order[other].1 as usize] = other as u32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn it_matches_a_sorted_map() {
        let (mut heap, mut map) = (TagHeap::default(), BTreeMap::new());
        let mut rng = 1_u64;
        for _ in 0..20_000 {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (flow, tag) = ((rng >> 33) as u32 % 50, (rng >> 40) % 100);
            if rng >> 60 < 10 {
                heap.set(flow, tag);
                map.insert(flow, tag);
            } else {
                heap.remove(flow);
                map.remove(&flow);
            }
            assert_eq!(heap.first(), map.iter().map(|(flow, tag)| (*tag, *flow)).min());
        }
    }
}
