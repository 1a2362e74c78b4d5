//! A model of a volume behind a network: a cluster, a file server, or a cloud volume.
//!
//! A request takes the latency of an idle volume, plus the transfer time of its bytes. A provider
//! or a server limits I/Os and bytes per second. Requests beyond a limit wait, and are served in
//! order of arrival. There is no burst credit and no variation of latencies: the sources publish
//! only means and limits.
//!
//! Units: bytes and nanoseconds.

use crate::disk_model::Access;

const NS_PER_S: u128 = 1_000_000_000;

/// Configuration of a modelled remote volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// Latency of a small read of an idle volume, nanoseconds.
    pub read_ns: u64,
    /// Latency of a small write of an idle volume, nanoseconds.
    pub write_ns: u64,
    /// Maximum number of reads per second.
    pub reads_per_s: u64,
    /// Maximum number of writes per second. Reads and writes share one limit if `is_one_limit` is
    /// set; then this number is not used.
    pub writes_per_s: u64,
    /// True if reads and writes share the limit `reads_per_s`.
    pub is_one_limit: bool,
    /// Maximum number of bytes per second, of reads and writes together.
    pub bytes_per_s: u64,
}

impl RemoteConfig {
    /// Returns a disk on a Ceph cluster of SATA SSDs: 0.57 ms for a read and 1 ms for a write, one
    /// at a time (measured by the author of Vitastor, yourcmc.ru/wiki/Ceph_performance). The limits
    /// are those of one client with a network of 10 Gbit/s and 64 requests in flight. With 64
    /// requests in flight, the latencies are assumed to be twice as long.
    pub const fn ceph() -> Self {
        RemoteConfig {
            read_ns: 570_000,
            write_ns: 1_000_000,
            reads_per_s: 56_000,
            writes_per_s: 32_000,
            is_one_limit: false,
            bytes_per_s: 1_250_000_000,
        }
    }

    /// Returns a file on a managed NFS service, Amazon EFS: 0.25 ms for a read, 2.7 ms for a write,
    /// 55 000 reads and 25 000 writes per second, 500 MiB/s per client (the service's performance
    /// page).
    pub const fn nfs() -> Self {
        RemoteConfig {
            read_ns: 250_000,
            write_ns: 2_700_000,
            reads_per_s: 55_000,
            writes_per_s: 25_000,
            is_one_limit: false,
            bytes_per_s: 500 << 20,
        }
    }

    /// Returns a general-purpose cloud volume, Amazon EBS gp3 without extra charge: 3000 I/Os and
    /// 125 MiB per second (the service's page of volume types). The page promises a latency of less
    /// than 10 ms; 1 ms is assumed.
    pub const fn cloud_general() -> Self {
        RemoteConfig {
            read_ns: 1_000_000,
            write_ns: 1_000_000,
            reads_per_s: 3_000,
            writes_per_s: 3_000,
            is_one_limit: true,
            bytes_per_s: 125 << 20,
        }
    }

    /// Returns a fast cloud volume, Amazon EBS io2 Block Express with 16 000 I/Os per second and
    /// 4000 MiB/s: a mean below 0.5 ms for 16 KiB (the service's pages).
    pub const fn cloud_provisioned() -> Self {
        RemoteConfig {
            read_ns: 500_000,
            write_ns: 500_000,
            reads_per_s: 16_000,
            writes_per_s: 16_000,
            is_one_limit: true,
            bytes_per_s: 4000 << 20,
        }
    }

    fn check(&self) {
        assert!(
            self.reads_per_s > 0 && self.writes_per_s > 0,
            "the limits of reads and writes must not be 0"
        );
        assert!(self.bytes_per_s > 0, "the limit of bytes per second must not be 0");
    }
}

/// Model of a remote volume. Call [`RemoteModel::submit`] for each request, in the order of arrival.
#[derive(Clone, Debug)]
pub struct RemoteModel {
    config: RemoteConfig,
    /// Time at which the limit of reads permits the next read. `next_write` is the same time for
    /// writes.
    next_read: u64,
    next_write: u64,
    /// Time at which all bytes so far are transferred.
    transferred: u64,
}

impl RemoteModel {
    /// Creates an idle volume.
    ///
    /// # Panics
    /// Panics if a limit is zero.
    pub fn new(config: RemoteConfig) -> Self {
        config.check();
        RemoteModel { config, next_read: 0, next_write: 0, transferred: 0 }
    }

    /// Returns the configuration of the volume.
    pub fn config(&self) -> &RemoteConfig {
        &self.config
    }

    /// Submits a request that arrives at `now_ns` and returns its completion time, both in
    /// nanoseconds of virtual time. A flush takes the latency of a write, and no limit applies to
    /// it.
    pub fn submit(&mut self, now_ns: u64, op: Access, len: u64) -> u64 {
        let config = &self.config;
        let (next, rate, latency) = match op {
            Access::Flush => return now_ns + config.write_ns,
            Access::Read => (&mut self.next_read, config.reads_per_s, config.read_ns),
            Access::Write if config.is_one_limit => {
                (&mut self.next_read, config.reads_per_s, config.write_ns)
            }
            Access::Write => (&mut self.next_write, config.writes_per_s, config.write_ns),
        };
        let start = now_ns.max(*next);
        *next = start + (NS_PER_S / u128::from(rate)) as u64;
        let transfer = (u128::from(len) * NS_PER_S / u128::from(config.bytes_per_s)) as u64;
        self.transferred = self.transferred.max(start) + transfer;
        self.transferred + latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [RemoteConfig; 4] = [
        RemoteConfig::ceph(),
        RemoteConfig::nfs(),
        RemoteConfig::cloud_general(),
        RemoteConfig::cloud_provisioned(),
    ];

    /// Returns the completion time of `count` simultaneous requests, seconds.
    fn seconds(config: RemoteConfig, op: Access, count: u64, len: u64) -> f64 {
        let mut volume = RemoteModel::new(config);
        let ends = (0..count).map(|_| volume.submit(0, op, len));
        ends.fold(0, u64::max) as f64 / 1e9
    }

    #[test]
    fn an_idle_volume_answers_in_the_published_latency() {
        for config in ALL {
            let read = seconds(config, Access::Read, 1, 4096) * 1e9;
            assert!((read / config.read_ns as f64 - 1.0).abs() < 0.05, "{config:?}: {read}");
            let write = seconds(config, Access::Write, 1, 4096) * 1e9;
            assert!((write / config.write_ns as f64 - 1.0).abs() < 0.05, "{config:?}: {write}");
        }
    }

    #[test]
    fn more_requests_than_the_limit_wait_for_their_turn() {
        for config in ALL {
            let rate = 100_000.0 / seconds(config, Access::Read, 100_000, 512);
            let limit = config.reads_per_s as f64;
            assert!((0.95..=1.0).contains(&(rate / limit)), "{config:?}: {rate}");
        }
    }

    #[test]
    fn large_requests_reach_the_limit_of_bytes() {
        for config in ALL {
            let rate = 2048.0 * 1_048_576.0 / seconds(config, Access::Write, 2048, 1 << 20);
            let limit = config.bytes_per_s as f64;
            assert!((0.9..=1.0).contains(&(rate / limit)), "{config:?}: {rate}");
        }
    }

    #[test]
    fn one_limit_counts_reads_and_writes_together_and_two_do_not() {
        let mixed = |config| {
            let mut volume = RemoteModel::new(config);
            let op = |n: u64| if n.is_multiple_of(2) { Access::Read } else { Access::Write };
            (0..20_000).map(|n| volume.submit(0, op(n), 512)).fold(0, u64::max) as f64 / 1e9
        };
        let one = mixed(RemoteConfig::cloud_general());
        assert!((20_000.0 / one / 3000.0 - 1.0).abs() < 0.01, "{one}");
        let two = mixed(RemoteConfig::nfs());
        assert!((10_000.0 / two / 25_000.0 - 1.0).abs() < 0.02, "{two}");
    }
}
