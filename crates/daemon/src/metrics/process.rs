//! Statistics of this process from the kernel. A missing value is 0, because an incomplete page is
//! better than none.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Statistics of the process at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Process {
    /// Start time, in seconds since 1970.
    pub(crate) started_seconds: f64,
    /// CPU time of all threads, seconds.
    pub(crate) cpu_seconds: f64,
    /// Resident memory in bytes.
    pub(crate) resident_bytes: u64,
    /// Number of open file descriptors.
    pub(crate) open_files: u64,
}

impl Process {
    /// Reads the current statistics.
    pub(crate) fn look() -> Process {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let ticks = rustix::param::clock_ticks_per_second();
        let mut process = Process::parse(&stat, &uptime, since_1970.as_secs_f64(), ticks);
        // The start time is computed from two clocks, so each computation would give a slightly
        // different value.
        static STARTED: OnceLock<f64> = OnceLock::new();
        process.started_seconds = *STARTED.get_or_init(|| process.started_seconds);
        process.resident_bytes *= rustix::param::page_size() as u64;
        process.open_files = std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64);
        process
    }

    /// Parses `/proc/self/stat` and `/proc/uptime`, which were read `now` seconds after 1970.
    /// `resident_bytes` of the result is in pages, as in `/proc/self/stat`. The caller converts it
    /// to bytes.
    fn parse(stat: &str, uptime: &str, now: f64, ticks_per_second: u64) -> Process {
        // The second field is the program's name in parentheses, which may contain any character;
        // the next field is the third.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<u64>().ok());
        let seconds = |ticks: u64| ticks as f64 / ticks_per_second.max(1) as f64;
        let up = uptime.split_whitespace().next().and_then(|text| text.parse::<f64>().ok());
        let started = up.zip(field(22)).map_or(0.0, |(up, begun)| now - up + seconds(begun));
        Process {
            started_seconds: started,
            cpu_seconds: seconds(field(14).unwrap_or(0) + field(15).unwrap_or(0)),
            resident_bytes: field(24).unwrap_or(0),
            open_files: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_name() {
        let stat =
            "7 (a b) c) S 1 7 7 0 -1 0 1 2 3 4 250 150 0 0 20 0 3 0 4200 1000000 77 18446744073709551615";
        let process = Process::parse(stat, "100.50 300.00\n", 1_000_000.0, 100);
        assert_eq!(process.cpu_seconds, 4.0);
        assert_eq!(process.started_seconds, 1_000_000.0 - 100.5 + 42.0);
        assert_eq!(process.resident_bytes, 77);
        let nothing = Process::parse("", "", 5.0, 100);
        assert_eq!((nothing.started_seconds, nothing.cpu_seconds, nothing.resident_bytes), (0.0, 0.0, 0));
    }

    #[test]
    fn the_system_knows_this_process() {
        let process = Process::look();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        assert!(process.started_seconds > 1e9 && process.started_seconds < now + 2.0, "{process:?}");
        assert!(process.resident_bytes > 1 << 20 && process.open_files > 2, "{process:?}");
    }
}
