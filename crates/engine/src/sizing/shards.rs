//! SHARDS: an LRU miss-ratio curve from a sample of the blocks (Waldspurger, Park, Garthwaite and
//! Ahmad, "Efficient MRC construction with SHARDS", FAST 2015).
//!
//! Each block has a position from 0 to 2⁶⁴ that depends only on its number. A block is sampled if
//! its position is not above a threshold. The LRU stack distance among the samples, divided by the
//! sampling rate, estimates the distance among all blocks. At a fixed rate the threshold is
//! constant. At a fixed number of samples, the threshold falls whenever there is one sample too
//! many, and the samples above it are removed. An access is weighted by the inverse of the sampling
//! rate at its time. These weights are equivalent to rescaling the histogram at every fall of the
//! threshold.
//!
//! Two differences from the paper reduce the error at the same number of samples:
//!
//! * Positions are evenly spread instead of random. The positions of consecutive blocks are a
//!   golden-ratio sequence (Kronecker), so almost exactly the sampling rate of any run of blocks is
//!   sampled. Extents with equal use are common on disks, and a random sample of them would have
//!   more variance. Each region of 4096 blocks starts its sequence at a different position, so that
//!   no stride of the workload can follow the sequence for long.
//! * The number of accesses N is known, while the samples give an estimate N′. The paper's
//!   SHARDS-adj counts the difference as hits at any size. SHARDS-adj is right if very hot blocks
//!   are missing among the samples, and wrong if the samples include too many blocks that are used
//!   once. Here the difference is distributed like the accesses of the sampled blocks, each
//!   weighted by its block's number of accesses. This distribution is the regression estimator of
//!   sampling theory (Särndal, Swensson and Wretman, "Model assisted survey sampling", 1992,
//!   chapter 6). A deficit beyond one standard deviation of N′ is attributed to a hot block, as in
//!   SHARDS-adj.
//!
//! One sample stands for 1 / (sampling rate) blocks. The samples say nothing about caches that are
//! smaller than this number. For smaller caches, the miss ratio is assumed to fall by the same
//! amount with each doubling of the cache size.

use std::ops::Range;

use super::buckets::{Bucket, BucketNo, Buckets};
use super::curve::{Builder, Curve};
use super::samples::{Sample, Samples};
use super::timeline::Timeline;

/// Maximum number of samples of a fixed-size [`Shards`], which then takes less than 1 MiB.
pub const SAMPLES_MAX: u32 = 16 << 10;

/// Initial capacity in samples of a [`Shards`] that may grow.
const SAMPLES_FIRST: u32 = 64;

/// Bits of a block's number within its region.
const REGION_BITS: u32 = 12;
/// Step from the position of one block to the next in its region: 2⁶⁴ / φ.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Step from the position of one region to the next: 2⁶⁴ (√3 − 1). Among the numbers that are usual
/// for such sequences (badly approximable ones), this number combines best with the step between
/// blocks.
const REGION_STEP: u64 = 0xbb67_ae85_84ca_a73b;

/// Result of the search for a block among the samples.
#[derive(Clone, Copy, Debug)]
pub(super) enum Found {
    /// The position of the block is above the threshold.
    NotSampled,
    /// The block is to be sampled, but has no sample yet.
    New { place: u64 },
    /// The number of the block's sample.
    Sample { number: u32 },
}

/// Estimates the miss-ratio curve of accesses to whole blocks.
pub type Shards = Sampler<0>;

/// Estimates the miss-ratio curve of its accesses, deterministically. A sampler with a fixed rate
/// doubles its memory if there is no room for a new sample. A sampler of fixed size allocates all
/// memory at its creation.
///
/// With `SECTORS` (a power of two) above 0, the sectors of each sample are tracked. An access hits
/// if all sectors that it touches are valid, as in the engine's caches. A sector becomes valid when
/// it is completely read or written. From then on the sector is valid in caches that are at least
/// as large as the largest reuse distance of its block since that access.
#[derive(Clone, Debug)]
pub struct Sampler<const SECTORS: usize> {
    /// A block is sampled if its position is not above this threshold.
    threshold: u64,
    /// The inverse of the sampling rate.
    blocks_per_sample: f64,
    /// Lower bound of the threshold. The threshold falls if there are more samples than
    /// `falling_max`.
    threshold_min: u64,
    falling_max: u32,
    /// Number that is added to the position of each block; it selects the samples.
    seed: u64,
    /// Maximum number of samples at the lowest threshold.
    samples_max: u32,
    samples: Samples<SECTORS>,
    timeline: Timeline,
    buckets: Buckets,
    /// Sum of the leverages of first accesses.
    cold_leverage: f64,
    /// Total weight of all accesses.
    weight: u64,
    /// Total weight of all accesses, as estimated from the samples.
    estimated: f64,
    /// Part of `estimated` that was estimated from the first access of each block.
    first: f64,
}

impl<const SECTORS: usize> Sampler<SECTORS> {
    /// Creates a sampler that samples this share of the blocks (0 < `rate` ≤ 1), for the curve of
    /// caches of up to `blocks_max` blocks. Memory use grows with the number of accessed blocks, up
    /// to about `54 × rate × blocks_max` bytes.
    ///
    /// # Panics
    /// Panics if `rate` is out of range.
    pub fn fixed_rate(rate: f64, blocks_max: u64) -> Self {
        assert!(rate > 0.0 && rate <= 1.0, "a rate is a share of the blocks");
        let samples_max = (rate * blocks_max as f64).ceil().clamp(1.0, f64::from(1u32 << 29)) as u32;
        let threshold = (rate * 2f64.powi(64)) as u64;
        Self::new(threshold, threshold, 0, samples_max)
    }

    /// Creates a sampler that samples every block while there are at most `samples_max` samples (1
    /// to [`SAMPLES_MAX`]). After that, the sampler uses the highest rate that this number of
    /// samples permits. All memory is allocated here.
    ///
    /// # Panics
    /// Panics if `samples_max` is out of range.
    pub fn fixed_size(samples_max: u32) -> Self {
        assert!((1..=SAMPLES_MAX).contains(&samples_max), "the number of samples is out of range");
        Self::new(u64::MAX, 0, samples_max, samples_max)
    }

    /// Samples at a higher rate while the fixed rate gives fewer than about `samples_min` samples
    /// (1 to [`SAMPLES_MAX`]). The error is inversely proportional to the square root of the number
    /// of samples, and a low sampling rate gives few samples if a trace has few blocks.
    ///
    /// # Panics
    /// Panics if `samples_min` is out of range, or an access was recorded already.
    pub fn with_samples_min(self, samples_min: u32) -> Self {
        assert!((1..=SAMPLES_MAX).contains(&samples_min), "the number of samples is out of range");
        assert!(self.samples.len() == 0, "the sampler has no access yet");
        let samples_max = self.samples_max.max(samples_min);
        Sampler { seed: self.seed, ..Self::new(u64::MAX, self.threshold_min, samples_min, samples_max) }
    }

    fn new(threshold: u64, threshold_min: u64, falling_max: u32, samples_max: u32) -> Self {
        let room = samples_max.min(falling_max.max(SAMPLES_FIRST));
        Sampler {
            threshold,
            threshold_min,
            falling_max,
            blocks_per_sample: blocks_per_sample(threshold),
            seed: 0,
            samples_max,
            samples: Samples::new(room),
            timeline: Timeline::new(room),
            buckets: Buckets::new(),
            cold_leverage: 0.0,
            weight: 0,
            estimated: 0.0,
            first: 0.0,
        }
    }

    /// Selects other blocks as samples. The differences between the curves of several seeds show
    /// the error of the curves.
    ///
    /// # Panics
    /// Panics if an access was recorded already.
    pub fn with_seed(mut self, seed: u64) -> Self {
        assert!(self.samples.len() == 0, "the sampler has no access yet");
        self.seed = scatter(seed);
        self
    }

    /// Records an access to a block. `weight` is 1 for the ratio of accesses, and the number of
    /// bytes for the ratio of bytes. With weight 0, the block is used without being counted, as by
    /// a write if the curve counts only reads.
    #[inline]
    pub fn access(&mut self, block: u64, weight: u32) {
        self.access_sectors(block, 0..SECTORS, weight);
    }

    /// Records an access to these sectors of a block, as [`access`](Self::access) does for a whole
    /// block.
    ///
    /// # Panics
    /// Panics if the range extends beyond the sectors of a block.
    #[inline]
    pub fn access_sectors(&mut self, block: u64, sectors: Range<usize>, weight: u32) {
        let found = self.find(block);
        self.access_found(block, found, sectors, weight);
    }

    /// Looks up a block for [`access_found`](Self::access_found).
    #[inline]
    pub(super) fn find(&self, block: u64) -> Found {
        let place = self.place(block);
        match place <= self.threshold {
            false => Found::NotSampled,
            true => self.samples.find(block).map_or(Found::New { place }, |number| Found::Sample { number }),
        }
    }

    /// Records an access as [`access_sectors`](Self::access_sectors) does. `found` is the result of
    /// [`find`](Self::find), with no access in between.
    #[inline]
    pub(super) fn access_found(&mut self, block: u64, found: Found, sectors: Range<usize>, weight: u32) {
        self.weight += u64::from(weight);
        match found {
            Found::NotSampled => {}
            Found::New { place } => self.access_new(block, place, sectors, weight),
            Found::Sample { number } => self.access_again(number, sectors, weight),
        }
    }

    /// Invalidates these sectors of a block. The invalidation does not count as a use.
    ///
    /// # Panics
    /// Panics if the range extends beyond the sectors of a block.
    #[inline]
    pub fn invalidate(&mut self, block: u64, sectors: Range<usize>) {
        if self.place(block) <= self.threshold
            && let Some(number) = self.samples.find(block)
        {
            self.samples.get_mut(number).valid_from[sectors].fill(None);
        }
    }

    /// Returns the curve of the accesses so far.
    pub fn curve(&self) -> Curve {
        let total = self.weight as f64;
        let leverage =
            self.cold_leverage + self.buckets.iter().map(|(_, _, bucket)| bucket.leverage).sum::<f64>();
        let off = total - self.estimated;
        let deviation = (leverage * self.blocks_per_sample).sqrt();
        let hot = (off - deviation).max(0.0);
        let per_leverage = if leverage > 0.0 { (off - hot) / leverage } else { 0.0 };

        let mut hits = hot;
        let mut builder = Builder::new();
        let resolution = self.blocks_per_sample.round() as u64;
        if hot > 0.0 && self.buckets.iter().next().is_none_or(|(lowest, ..)| lowest > resolution) {
            builder.drop_by_logarithm(resolution, 1.0 - hits / total);
        }
        for (lowest, highest, bucket) in self.buckets.iter() {
            hits += bucket.weight + per_leverage * bucket.leverage;
            let miss_ratio = 1.0 - hits / total;
            match highest.saturating_sub(resolution.max(highest - lowest + 1)) {
                0 => builder.drop_by_logarithm(highest, miss_ratio),
                from => builder.drop_to(from, highest, miss_ratio),
            }
        }
        builder.finish()
    }

    /// Returns the current sampling rate.
    pub fn rate(&self) -> f64 {
        1.0 / self.blocks_per_sample
    }

    /// Returns the current number of samples.
    pub fn samples(&self) -> u32 {
        self.samples.len()
    }

    /// Returns the estimated number of different blocks that were used.
    pub fn blocks(&self) -> u64 {
        (f64::from(self.samples.len()) * self.blocks_per_sample).round() as u64
    }

    /// Returns the weight of all accesses so far.
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Returns the estimated total weight of the first accesses to blocks.
    pub fn first_weight(&self) -> f64 {
        self.first
    }

    /// Returns the memory used, in bytes.
    pub fn bytes(&self) -> u64 {
        size_of::<Self>() as u64 + self.samples.bytes() + self.timeline.bytes() + self.buckets.bytes()
    }

    #[inline]
    fn place(&self, block: u64) -> u64 {
        place(self.seed, block)
    }

    fn access_new(&mut self, block: u64, place: u64, sectors: Range<usize>, weight: u32) {
        let weight = f64::from(weight);
        self.estimated += weight * self.blocks_per_sample;
        self.first += weight * self.blocks_per_sample;
        self.cold_leverage += weight * weight * self.blocks_per_sample;
        let mut valid_from = [None; SECTORS];
        valid_from[sectors].fill(Some(BucketNo::FIRST));
        let sample = Sample { block, used: weight, slot: 0, bucket: None, valid_from };
        if let Some(number) = self.admit(sample, place) {
            self.make_youngest(number);
        }
    }

    /// Records another access to a sample. The sample's leverage is the square of its weight, so it
    /// grows by `weight` times the sum of the weights before and after. Each part of this growth is
    /// added to the bucket of the accesses that contributed the weight. For the accesses between
    /// the first and the last access, the distance of the last access is assumed.
    fn access_again(&mut self, number: u32, sectors: Range<usize>, weight: u32) {
        let Sample { slot, .. } = *self.samples.get(number);
        let distance = f64::from(self.timeline.younger(slot) + 1);
        self.timeline.remove(slot);
        self.make_youngest(number);

        // Truncation after the addition of 0.5 rounds to the nearest integer, without a call of the
        // system's library.
        let distance = Buckets::bucket_of((distance * self.blocks_per_sample + 0.5) as u64);
        let sample = self.samples.get_mut(number);
        let hit_from = use_sectors(&mut sample.valid_from, sectors, distance);
        if weight == 0 {
            // The sums count only accesses with a weight.
            sample.bucket = hit_from.or(sample.bucket);
            return;
        }
        let weight = f64::from(weight);
        self.estimated += weight * self.blocks_per_sample;
        let first = weight.min(sample.used);
        self.cold_leverage += weight * first * self.blocks_per_sample;
        let between = weight * (sample.used - first) * self.blocks_per_sample;
        match sample.bucket {
            Some(last) => self.buckets.add(last, Bucket { weight: 0.0, leverage: between }),
            None => self.cold_leverage += between,
        }
        let used = sample.used + weight;
        let (counts, leverage) = (weight * self.blocks_per_sample, weight * used * self.blocks_per_sample);
        match hit_from {
            Some(bucket) => self.buckets.add(bucket, Bucket { weight: counts, leverage }),
            // The access misses at every size, as a first access does.
            None => self.cold_leverage += leverage,
        }
        sample.used = used;
        sample.bucket = hit_from;
    }

    /// Adds a new sample. Returns `None` if the threshold had to fall below the sample's position.
    /// If there is no room even at the lowest threshold, the least recently used sample is removed,
    /// because it is beyond the largest cache of interest.
    fn admit(&mut self, sample: Sample<SECTORS>, place: u64) -> Option<u32> {
        while self.threshold > self.threshold_min && self.samples.len() >= self.falling_max {
            self.lower_threshold();
        }
        if place > self.threshold {
            return None;
        }
        if self.samples.len() == self.samples_max {
            let (number, slot) = self.timeline.oldest().expect("it is full");
            self.timeline.remove(slot);
            self.samples.replace(number, sample);
            return Some(number);
        }
        if self.samples.len() == self.samples.room() {
            self.grow();
        }
        Some(self.samples.add(sample))
    }

    /// Removes the eighth of the samples with the highest positions. To remove a single sample, all
    /// samples would have to be scanned or kept in order of position, which costs too much.
    #[cold]
    fn lower_threshold(&mut self) {
        self.threshold = (self.threshold - (self.threshold / 8).max(1)).max(self.threshold_min);
        self.blocks_per_sample = blocks_per_sample(self.threshold);
        let mut kept = 0;
        for number in 0..self.samples.len() {
            let sample = self.samples.get(number);
            if self.place(sample.block) > self.threshold {
                self.timeline.remove(sample.slot);
            } else {
                self.timeline.rename(sample.slot, kept);
                kept += 1;
            }
        }
        let (threshold, seed) = (self.threshold, self.seed);
        self.samples.retain(|sample| place(seed, sample.block) <= threshold);
    }

    fn make_youngest(&mut self, number: u32) {
        let samples = &mut self.samples;
        let slot = self.timeline.push(number, |number, slot| samples.get_mut(number).slot = slot);
        samples.get_mut(number).slot = slot;
    }

    #[cold]
    fn grow(&mut self) {
        let room = self.samples.len().saturating_mul(2).min(self.samples_max);
        let mut samples = self.samples.with_room(room);
        self.timeline = self.timeline.with_room(room, |number, slot| samples.get_mut(number).slot = slot);
        self.samples = samples;
    }
}

/// Records a use of these sectors of a block, at a stack distance in the bucket `distance`. Returns
/// the smallest distance from which on all these sectors were valid. Afterwards the sectors are
/// valid at every cache size.
fn use_sectors(
    valid_from: &mut [Option<BucketNo>],
    sectors: Range<usize>,
    distance: BucketNo,
) -> Option<BucketNo> {
    // Caches that are too small to hold the block have lost its sectors.
    valid_from.iter_mut().for_each(|from| *from = from.map(|from| distance.max(from)));
    let mut hit_from = Some(distance);
    for sector in &mut valid_from[sectors] {
        hit_from = hit_from.zip(*sector).map(|(hit, sector)| hit.max(sector));
        *sector = Some(BucketNo::FIRST);
    }
    hit_from
}

#[inline]
fn place(seed: u64, block: u64) -> u64 {
    let inside = (block & ((1 << REGION_BITS) - 1)).wrapping_mul(STEP);
    let region = (block >> REGION_BITS).wrapping_mul(REGION_STEP);
    inside.wrapping_add(region).wrapping_add(seed)
}

fn blocks_per_sample(threshold: u64) -> f64 {
    2f64.powi(64) / (threshold as f64 + 1.0)
}

/// Hashes numbers to 64 bits (the finalizer of SplitMix64).
#[inline]
pub(super) fn scatter(x: u64) -> u64 {
    let mut x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
