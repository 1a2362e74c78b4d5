//! Constants of the modelled drives, and their sources.
//!
//! The values of the 7.2K drive are typical of data sheets of 3.5-inch 7200 rpm enterprise SATA
//! drives from about 2010 (Seagate Constellation ES, WD RE4). The average rotational latency of the
//! 7.2K drive is 4.16 ms, the average read seek 8.5 ms, and a track-to-track seek takes less than 1
//! ms. The sustained media rate is 120–150 MB/s at the outer edge and half as much at the inner
//! edge. The SAS drives are from the same years. 10K: average latency 3 ms, average read seek 3.8
//! ms (Seagate Savvio 10K.2 to 10K.4: 3.8–4.1 ms). 15K: average latency 2 ms, average read seek 3.4
//! ms, 122–204 MB/s (Seagate Cheetah 15K.7; the Hitachi Ultrastar 15K450 gives 3.1–3.3 ms). The
//! values of the SAS drives match the usual ratings of 10K and 15K drives: 110–150 and 175–210
//! random reads per second.
//!
//! The seek curve is a square root for short distances and a line for long distances, as in
//! Ruemmler and Wilkes, "An introduction to disk drive modeling" (IEEE Computer, 1994).

/// Seek time of a drive, by distance as a fraction `d` of the full stroke.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeekCurve {
    /// Start and settle time of the shortest seek, nanoseconds.
    pub base_ns: f64,
    /// Coefficient of `sqrt(d)` in the seek time up to the knee, nanoseconds.
    pub root_ns: f64,
    /// Seek distance up to which the seek time grows with the square root of the distance. Beyond
    /// this distance, the curve is a line: the tangent of the square root at the knee.
    pub knee: f64,
}

impl SeekCurve {
    /// Returns the seek time in nanoseconds for a `distance` from 0 to 1. A distance of 0 takes no
    /// time.
    pub fn seek_ns(&self, distance: f64) -> u64 {
        if distance <= 0.0 {
            return 0;
        }
        let root = self.knee.sqrt();
        let reach = if distance <= self.knee {
            distance.sqrt()
        } else {
            root + (distance - self.knee) / (2.0 * root)
        };
        (self.base_ns + self.root_ns * reach) as u64
    }
}

/// Configuration of a drive model, without its rotational speed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveConfig {
    /// Seek times of the drive.
    pub seek: SeekCurve,
    /// Media rate of the outermost zone, bytes per second. Addresses start in this zone.
    pub outer_bytes_per_s: u64,
    /// Media rate of the innermost zone, bytes per second. For a drive without zones, this rate
    /// equals `outer_bytes_per_s`.
    pub inner_bytes_per_s: u64,
    /// Number of zones of the drive: rings of tracks, each with one media rate.
    pub zones: u64,
    /// Maximum gap in bytes between an access and a following read of the same stream. The drive
    /// reads over such a gap instead of seeking.
    pub read_ahead_bytes: u64,
}

impl DriveConfig {
    /// Returns a 7200 rpm enterprise SATA drive. The drive's average seek between uniform addresses
    /// is 8.5 ms, and the full-stroke seek is 17.3 ms.
    pub const fn enterprise_sata_7200() -> Self {
        DriveConfig {
            seek: SeekCurve { base_ns: 800_000.0, root_ns: 13_940_000.0, knee: 0.3 },
            outer_bytes_per_s: 130_000_000,
            inner_bytes_per_s: 65_000_000,
            zones: 16,
            read_ahead_bytes: 256 << 10,
        }
    }

    /// Returns a 10 000 rpm SAS drive. The drive's average seek is 3.8 ms, and the full-stroke seek
    /// is 7.7 ms.
    pub const fn sas_10k() -> Self {
        DriveConfig {
            seek: SeekCurve { base_ns: 400_000.0, root_ns: 6_155_000.0, knee: 0.3 },
            outer_bytes_per_s: 130_000_000,
            inner_bytes_per_s: 75_000_000,
            zones: 16,
            read_ahead_bytes: 256 << 10,
        }
    }

    /// Returns a 15 000 rpm SAS drive. The drive's average seek is 3.4 ms, and the full-stroke seek
    /// is 7.0 ms.
    pub const fn sas_15k() -> Self {
        DriveConfig {
            seek: SeekCurve { base_ns: 300_000.0, root_ns: 5_612_000.0, knee: 0.3 },
            outer_bytes_per_s: 204_000_000,
            inner_bytes_per_s: 122_000_000,
            zones: 16,
            read_ahead_bytes: 256 << 10,
        }
    }

    pub(super) fn check(&self) {
        assert!(self.zones > 0, "the number of zones must not be 0");
        assert!(self.inner_bytes_per_s > 0, "the media rates must not be 0");
        assert!(
            self.outer_bytes_per_s >= self.inner_bytes_per_s,
            "the outer media rate must not be below the inner one"
        );
        assert!(self.seek.knee > 0.0 && self.seek.knee <= 1.0, "the knee must be above 0 and at most 1");
        assert!(self.seek.base_ns >= 0.0 && self.seek.root_ns >= 0.0, "seek times must not be negative");
    }
}

/// Share of the positioning time that remains if a disk may choose the next request from its queue.
///
/// A disk that serves the nearest request first needs less positioning time with a longer queue.
/// Seltzer, Chen and Ousterhout ("Disk scheduling revisited", USENIX 1990) and Jacobson and Wilkes
/// ("Disk scheduling algorithms based on rotational position", HPL 1991) measured the effect. The
/// model returns the completion time at submission, so it cannot reorder requests and uses the
/// measured average gain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueGain {
    /// Remaining share of the positioning time with 1, 2, … 8 requests at the disk, per mille.
    /// Longer queues have the value of 8 requests.
    pub remaining_permille: [u16; 8],
}

impl QueueGain {
    /// First come, first served: the queue does not shorten the positioning time.
    pub const FCFS: QueueGain = QueueGain { remaining_permille: [1000; 8] };

    /// Shortest positioning time first: the remaining share is depth to the power of −0.33. With
    /// this exponent, four 7.2K disks reach 576–608 IOPS.
    pub const SHORTEST_POSITIONING: QueueGain =
        QueueGain { remaining_permille: [1000, 796, 696, 633, 588, 554, 526, 503] };

    pub(super) fn remaining(&self, depth: usize) -> u64 {
        let index = depth.clamp(1, self.remaining_permille.len()) - 1;
        u64::from(self.remaining_permille[index])
    }

    pub(super) fn check(&self) {
        assert!(
            self.remaining_permille.is_sorted_by(|a, b| a >= b),
            "the remaining share must not grow with the queue"
        );
        assert!(self.remaining_permille[0] <= 1000, "the remaining share must be at most 1000 permille");
    }
}
