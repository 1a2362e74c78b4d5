//! The constants of one drive model and where they come from.
//!
//! The figures of the 7.2K drive are typical of the data sheets of 3.5-inch 7200 rpm enterprise SATA drives of
//! the years around 2010 (Seagate Constellation ES, WD RE4): average latency 4.16 ms, average read seek 8.5 ms,
//! track to track below 1 ms, sustained media rate 120–150 MB/s at the outer edge and half that at the inner.
//! The SAS drives are of the same years. 10K: average latency 3 ms, average read seek 3.8 ms (Seagate Savvio 10K.2
//! to 10K.4: 3.8–4.1 ms). 15K: average latency 2 ms, average read seek 3.4 ms, 122–204 MB/s (Seagate Cheetah 15K.7;
//! the Hitachi Ultrastar 15K450 gives 3.1–3.3 ms). Their usual ratings, 110–150 and 175–210 random reads a second, are
//! what these figures add up to.
//!
//! The form of the seek curve, a square root for short distances and a line for long ones, is that of Ruemmler
//! and Wilkes, "An introduction to disk drive modeling" (IEEE Computer, 1994).

/// Time to move the arm, by distance as a fraction `d` of the full stroke.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeekCurve {
    /// Start and settle time of the shortest seek.
    pub base_ns: f64,
    /// Factor of `sqrt(d)` up to the knee.
    pub root_ns: f64,
    /// Distance at which the curve turns into its own tangent.
    pub knee: f64,
}

impl SeekCurve {
    /// Nanoseconds to move by `distance`, 0 to 1; no distance, no time.
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

/// One drive, apart from its speed of rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveConfig {
    /// Arm movement.
    pub seek: SeekCurve,
    /// Bytes per second in the outermost zone, where addresses begin.
    pub outer_bytes_per_s: u64,
    /// Bytes per second in the innermost zone; equal to the outer rate on a drive without zones.
    pub inner_bytes_per_s: u64,
    /// Number of zones between them.
    pub zones: u64,
    /// A read that begins at most this far behind the end of the last access is part of a stream: the drive reads
    /// on over the gap instead of positioning again.
    pub read_ahead_bytes: u64,
}

impl DriveConfig {
    /// A 7200 rpm enterprise SATA drive. With these constants the average seek between uniform addresses is
    /// 8.5 ms and the full stroke 17.3 ms.
    pub const fn enterprise_sata_7200() -> Self {
        DriveConfig {
            seek: SeekCurve { base_ns: 800_000.0, root_ns: 13_940_000.0, knee: 0.3 },
            outer_bytes_per_s: 130_000_000,
            inner_bytes_per_s: 65_000_000,
            zones: 16,
            read_ahead_bytes: 256 << 10,
        }
    }

    /// A 10 000 rpm SAS drive: the average seek is 3.8 ms, the full stroke 7.7 ms.
    pub const fn sas_10k() -> Self {
        DriveConfig {
            seek: SeekCurve { base_ns: 400_000.0, root_ns: 6_155_000.0, knee: 0.3 },
            outer_bytes_per_s: 130_000_000,
            inner_bytes_per_s: 75_000_000,
            zones: 16,
            read_ahead_bytes: 256 << 10,
        }
    }

    /// A 15 000 rpm SAS drive: the average seek is 3.4 ms, the full stroke 7.0 ms.
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
        assert!(self.zones > 0, "a drive has at least one zone");
        assert!(self.inner_bytes_per_s > 0, "a drive transfers something");
        assert!(self.outer_bytes_per_s >= self.inner_bytes_per_s, "outer tracks are the longer ones");
        assert!(self.seek.knee > 0.0 && self.seek.knee <= 1.0, "the knee is a fraction of the stroke");
        assert!(self.seek.base_ns >= 0.0 && self.seek.root_ns >= 0.0, "seeks take time");
    }
}

/// How much of the positioning time is left when a disk may choose among the requests in its queue.
///
/// A disk that serves the request it can reach soonest needs less time per request the more it can choose from.
/// Seltzer, Chen and Ousterhout ("Disk scheduling revisited", USENIX 1990) and Jacobson and Wilkes ("Disk
/// scheduling algorithms based on rotational position", HPL 1991) measured the effect. The model does not reorder,
/// since it answers at submission; it charges the expected gain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueGain {
    /// Thousandths of the positioning time that remain with 1, 2, … 8 requests at the disk; deeper queues gain
    /// no more than eight do.
    pub remaining_permille: [u16; 8],
}

impl QueueGain {
    /// First come, first served: nothing is gained.
    pub const FCFS: QueueGain = QueueGain { remaining_permille: [1000; 8] };

    /// Shortest positioning first: depth to the power of −0.33, which puts four 7.2K disks at 576–608 IOPS.
    pub const SHORTEST_POSITIONING: QueueGain =
        QueueGain { remaining_permille: [1000, 796, 696, 633, 588, 554, 526, 503] };

    pub(super) fn remaining(&self, depth: usize) -> u64 {
        let index = depth.clamp(1, self.remaining_permille.len()) - 1;
        u64::from(self.remaining_permille[index])
    }

    pub(super) fn check(&self) {
        assert!(self.remaining_permille.is_sorted_by(|a, b| a >= b), "a deeper queue is never slower");
        assert!(self.remaining_permille[0] <= 1000, "positioning never grows");
    }
}
