//! Divides one host's flash among its disks, so that flash serves as many reads per second as
//! possible. The *hit curve* of a disk gives these reads by cache size. Its *upper hull* is the
//! lowest concave curve that is nowhere below it, and consists of straight *steps*. The steps with
//! the highest gain per byte get flash first.
//!
//! For curves that equal their hulls, this division is optimal except for steps that do not fit. A
//! curve that is below its hull (a *cliff*) gains nothing from half of a step. For each step that
//! does not fit, there are two alternatives: the step gets the rest of the flash, or later steps
//! get the rest. A further attempt gives flash to the most valuable of the steps that did not fit,
//! before all other steps. The best result is used.

use super::Disk;

/// A step of a disk's upper hull.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Step {
    /// Increase of the cache in bytes.
    pub(super) bytes: u64,
    /// Gain in hits a second.
    pub(super) hits: f64,
}

impl Step {
    /// Returns the additional hits per byte.
    pub(super) fn slope(&self) -> f64 {
        self.hits / self.bytes as f64
    }
}

/// A division of a host's flash.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Share {
    /// Disks and their cache sizes in bytes.
    pub(super) sizes: Vec<(usize, u64)>,
    /// Reads per second that this division serves from flash.
    pub(super) hits: f64,
    /// Gain of one more byte of flash; 0 if the flash suffices.
    pub(super) price: f64,
}

/// Returns the upper hull of a disk's hits over its cache size, steepest step first.
pub(super) fn hull(disk: &Disk) -> Vec<Step> {
    let mut corners: Vec<(u64, f64)> = Vec::new();
    for point in disk.curve.points() {
        let bytes = point.blocks.saturating_mul(disk.block_bytes.max(1));
        let next = (bytes, disk.reads * (1.0 - point.miss_ratio));
        // A corner below the line to the next one is removed.
        while let [.., before, last] = corners[..] {
            let rise = |from: (u64, f64), to: (u64, f64)| (to.1 - from.1) / (to.0 - from.0) as f64;
            if next.0 <= last.0 || rise(before, last) > rise(last, next) {
                break;
            }
            corners.pop();
        }
        if corners.last().is_none_or(|last| next.0 > last.0) {
            corners.push(next);
        }
    }
    let step = |pair: &[(u64, f64)]| Step { bytes: pair[1].0 - pair[0].0, hits: pair[1].1 - pair[0].1 };
    corners.windows(2).map(step).filter(|step| step.hits > 0.0).collect()
}

/// Divides `flash_bytes` among these disks.
pub(super) fn share(flash_bytes: u64, disks: &[Disk], hulls: &[Vec<Step>], on: &[usize]) -> Share {
    // Indexes into `on`, so that sizes can be counted in place.
    let mut steps: Vec<(usize, Step)> = on
        .iter()
        .enumerate()
        .flat_map(|(place, disk)| hulls[*disk].iter().map(move |step| (place, *step)))
        .collect();
    // The steps of one disk are already in order, so a stable sort keeps their order.
    steps.sort_by(|one, other| other.1.slope().total_cmp(&one.1.slope()));
    let problem = Problem { flash_bytes, disks, on, steps };
    let filled = problem.fill(None);
    // A cliff that just does not fit after steeper steps may be worth more than these steps.
    let cliff = filled.cliff.map(|cliff| problem.fill(Some(cliff)));
    let price = filled.price;
    let best = cliff.filter(|other| other.hits > filled.hits).unwrap_or(filled);
    Share { sizes: on.iter().copied().zip(best.sizes).collect(), hits: best.hits, price }
}

struct Problem<'a> {
    flash_bytes: u64,
    disks: &'a [Disk],
    on: &'a [usize],
    /// Steps with indexes into `on`, steepest first.
    steps: Vec<(usize, Step)>,
}

struct Filled {
    sizes: Vec<u64>,
    hits: f64,
    price: f64,
    /// The most valuable step that did not fit: its disk, and the disk's cache size after the step.
    cliff: Option<(usize, u64)>,
}

impl Problem<'_> {
    fn hits(&self, place: usize, size: u64) -> f64 {
        self.disks[self.on[place]].hits(size)
    }

    /// Fills the flash, steepest step first. One disk may get its cache before all others.
    fn fill(&self, first: Option<(usize, u64)>) -> Filled {
        let mut sizes = vec![0; self.on.len()];
        let mut is_full = vec![false; self.on.len()];
        let (mut left, mut price) = (self.flash_bytes, 0.0);
        if let Some((place, size)) = first {
            (sizes[place], is_full[place]) = (size, true);
            left -= size;
        }
        // Corners of hulls are on their curves, so hits can be summed on the way.
        let mut sum: f64 = (0..self.on.len()).map(|place| self.hits(place, sizes[place])).sum();
        let mut best = (f64::NEG_INFINITY, Vec::new());
        let mut cliff = (0.0, None);
        for &(place, step) in &self.steps {
            if is_full[place] {
                continue;
            }
            if step.bytes <= left {
                sizes[place] += step.bytes;
                left -= step.bytes;
                sum += step.hits;
                continue;
            }
            if price == 0.0 {
                price = step.slope();
            }
            is_full[place] = true;
            // The rest of the flash goes to this step or to the following ones.
            let with = sum + self.hits(place, sizes[place] + left) - self.hits(place, sizes[place]);
            if with > best.0 {
                let mut sizes = sizes.clone();
                sizes[place] += left;
                best = (with, sizes);
            }
            let end = sizes[place] + step.bytes;
            let alone = self.hits(place, end);
            if end <= self.flash_bytes && alone > cliff.0 {
                cliff = (alone, Some((place, end)));
            }
        }
        give_rest(left, self.disks, self.on, &mut sizes);
        let all = (0..self.on.len()).map(|place| self.hits(place, sizes[place])).sum();
        let (hits, sizes) = if best.0 > all { best } else { (all, sizes) };
        Filled { sizes, hits, price, cliff: cliff.1 }
    }
}

/// Gives the remaining flash to the disk with the largest gain.
fn give_rest(left: u64, disks: &[Disk], on: &[usize], sizes: &mut [u64]) {
    let gain = |place: usize, sizes: &[u64]| {
        let disk = &disks[on[place]];
        disk.hits(sizes[place].saturating_add(left)) - disk.hits(sizes[place])
    };
    let best = (0..on.len())
        .map(|place| (gain(place, sizes), place))
        .reduce(|best, next| if next.0 > best.0 { next } else { best });
    if let Some((_, place)) = best.filter(|(gain, _)| *gain > 0.0) {
        sizes[place] = sizes[place].saturating_add(left);
    }
}
