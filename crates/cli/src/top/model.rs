//! Data of `hob top`: the last response for each disk, the rates since the previous one, and
//! earlier rates.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

use hob_control::{BackingState, CacheState, DiskLoad, DiskState, Size};

use crate::output::{duration, word};

/// Maximum number of remembered responses.
pub(super) const HISTORY_MAX: usize = 300;

const NS: f64 = 1e9;

/// Shown for an unknown value.
const NOTHING: &str = "–";

/// Load of a disk between two responses, per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    /// Requests per second.
    pub(super) iops: f64,
    /// Bytes read per second.
    pub(super) read_bytes: f64,
    /// Bytes written per second.
    pub(super) write_bytes: f64,
    /// Percentage of reads served from flash; `None` without reads.
    pub(super) hit_percent: Option<f64>,
    /// Percentage of reads served from the RAM tier; `None` without reads.
    pub(super) memory_hit_percent: Option<f64>,
    /// Mean latency; `None` without requests.
    pub(super) mean_ns: Option<u64>,
    /// Upper bound of the latency of 99 % of the requests; `None` without requests.
    pub(super) p99_ns: Option<u64>,
}

impl Rates {
    /// Rates between two responses; `None` if the counters were reset in between.
    pub(super) fn between(before: &DiskLoad, now: &DiskLoad) -> Option<Rates> {
        if !before.is_counted || !now.is_counted || now.elapsed_ns <= before.elapsed_ns {
            return None;
        }
        let seconds = (now.elapsed_ns - before.elapsed_ns) as f64 / NS;
        let requests = now.requests.checked_sub(before.requests)?;
        let reads = now.reads.checked_sub(before.reads)?;
        let per_second = |now: u64, before: u64| Some(now.checked_sub(before)? as f64 / seconds);
        let share = |now: u64, before: u64| {
            let part = now.checked_sub(before)?;
            (reads > 0).then(|| 100.0 * part as f64 / reads as f64)
        };
        Some(Rates {
            iops: requests as f64 / seconds,
            read_bytes: per_second(now.read_bytes, before.read_bytes)?,
            write_bytes: per_second(now.write_bytes, before.write_bytes)?,
            hit_percent: share(now.read_hits, before.read_hits),
            memory_hit_percent: share(now.memory_hits, before.memory_hits),
            mean_ns: now.latency_sum_ns.checked_sub(before.latency_sum_ns)?.checked_div(requests),
            p99_ns: quantile_between(before, now, 0.99),
        })
    }
}

/// Returns an upper bound of the latency that this fraction of the requests between two responses
/// did not exceed.
fn quantile_between(before: &DiskLoad, now: &DiskLoad, share: f64) -> Option<u64> {
    let earlier: BTreeMap<u64, u64> =
        before.latency.iter().map(|bucket| (bucket.up_to_ns, bucket.count)).collect();
    let counts: Vec<(u64, u64)> = now
        .latency
        .iter()
        .map(|bucket| {
            let known = earlier.get(&bucket.up_to_ns).copied().unwrap_or(0);
            (bucket.up_to_ns, bucket.count.saturating_sub(known))
        })
        .collect();
    let all: u64 = counts.iter().map(|(_, count)| count).sum();
    let rank = ((share * all as f64).ceil() as u64).max(1);
    let mut seen = 0;
    counts.into_iter().find_map(|(up_to_ns, count)| {
        seen += count;
        (seen >= rank).then_some(up_to_ns)
    })
}

/// A row of the table: one disk.
#[derive(Debug)]
pub(super) struct Row {
    /// Counters in the last response.
    pub(super) load: DiskLoad,
    /// Rates since the previous response; `None` after the first response and for an offline disk.
    pub(super) rates: Option<Rates>,
    /// Rates of earlier responses, oldest first, including the last one.
    pub(super) history: VecDeque<Option<Rates>>,
}

impl Row {
    /// Returns the state of the backing if it fails, otherwise the state of the disk and its cache.
    pub(super) fn state(&self) -> String {
        match &self.load.backing_state {
            None | Some(BackingState::Connected) => {}
            Some(BackingState::Slow { .. }) => return "slow backing".to_owned(),
            Some(BackingState::Failing { .. }) => return "backing errors".to_owned(),
            Some(BackingState::Reconnecting { .. }) => return "reconnecting".to_owned(),
            Some(BackingState::Failed { .. }) => return "backing failed".to_owned(),
        }
        match (self.load.state, self.load.cache) {
            (DiskState::Online, _) if !self.load.is_counted => "silent".to_owned(),
            (DiskState::Online, CacheState::None) => "no cache".to_owned(),
            (DiskState::Online, _) if self.load.is_draining => "draining".to_owned(),
            (DiskState::Online, CacheState::Active) => self.load.mode.clone(),
            (DiskState::Online, state) => word(&state),
            (state, _) => word(&state),
        }
    }

    fn used_percent(&self) -> Option<f64> {
        let all = self.load.cache_bytes;
        (all > 0).then(|| 100.0 * self.load.used_bytes as f64 / all as f64)
    }

    /// Returns `value` if the disk has statistics, otherwise `None`.
    fn counted(&self, value: u64) -> Option<f64> {
        self.load.is_counted.then_some(value as f64)
    }

    fn rate(&self, value: impl FnOnce(Rates) -> f64) -> Option<f64> {
        self.rates.map(value)
    }
}

/// A column of the screen and of the table.
pub(super) struct Column {
    /// Heading of the column.
    pub(super) heading: &'static str,
    /// The key that sorts the table by this column.
    pub(super) key: char,
    /// Width on the screen in characters.
    pub(super) width: u16,
    /// Returns the text of a row in this column.
    pub(super) cell: fn(&Row) -> String,
    /// Returns the value of a row by which the table is sorted. Names are sorted as text.
    rank: fn(&Row) -> f64,
}

impl Column {
    /// Returns the heading for [`table`](crate::output::table).
    pub(super) fn of_table(&self) -> String {
        let is_text = self.width == 0 || self.heading == "STATE";
        format!("{}{}", self.heading, if is_text { "" } else { ":" })
    }
}

/// All columns. The first is as wide as its names. On a narrow screen, columns are omitted from the
/// right.
#[rustfmt::skip]
pub(super) const COLUMNS: &[Column] = &[
    Column { heading: "DISK", key: 'n', width: 0, cell: |row| row.load.disk.clone(), rank: |_| 0.0 },
    Column { heading: "STATE", key: 's', width: 14, cell: Row::state, rank: |row| f64::from(row.load.state as u8) * 10.0 + f64::from(row.load.cache as u8) },
    Column { heading: "IOPS", key: 'i', width: 7, cell: |row| count(row.rate(|rates| rates.iops)), rank: |row| row.rate(|rates| rates.iops).unwrap_or(-1.0) },
    Column { heading: "READ/S", key: 'r', width: 9, cell: |row| bytes(row.rate(|rates| rates.read_bytes)), rank: |row| row.rate(|rates| rates.read_bytes).unwrap_or(-1.0) },
    Column { heading: "WRITE/S", key: 'w', width: 9, cell: |row| bytes(row.rate(|rates| rates.write_bytes)), rank: |row| row.rate(|rates| rates.write_bytes).unwrap_or(-1.0) },
    Column { heading: "HIT", key: 'h', width: 6, cell: |row| percent(row.rates.and_then(|rates| rates.hit_percent)), rank: |row| row.rates.and_then(|rates| rates.hit_percent).unwrap_or(-1.0) },
    Column { heading: "MEAN", key: 'l', width: 8, cell: |row| time(row.rates.and_then(|rates| rates.mean_ns)), rank: |row| row.rates.and_then(|rates| rates.mean_ns).map_or(-1.0, |ns| ns as f64) },
    Column { heading: "P99", key: 'p', width: 8, cell: |row| time(row.rates.and_then(|rates| rates.p99_ns)), rank: |row| row.rates.and_then(|rates| rates.p99_ns).map_or(-1.0, |ns| ns as f64) },
    Column { heading: "DIRTY", key: 'd', width: 9, cell: |row| bytes(row.counted(row.load.dirty_bytes)), rank: |row| row.counted(row.load.dirty_bytes).unwrap_or(-1.0) },
    Column { heading: "USED", key: 'u', width: 6, cell: |row| percent(row.used_percent()), rank: |row| row.used_percent().unwrap_or(-1.0) },
    Column { heading: "MEMORY", key: 'm', width: 6, cell: |row| percent(row.rates.and_then(|rates| rates.memory_hit_percent)), rank: |row| row.rates.and_then(|rates| rates.memory_hit_percent).unwrap_or(-1.0) },
    Column { heading: "BUSY", key: 'b', width: 5, cell: |row| row.counted(row.load.in_flight).map_or(NOTHING.to_owned(), |count| count.to_string()), rank: |row| row.counted(row.load.in_flight).unwrap_or(-1.0) },
];

fn count(value: Option<f64>) -> String {
    match value {
        None => NOTHING.to_owned(),
        Some(value) if value < 9.95 => format!("{value:.1}"),
        Some(value) if value < 99_999.5 => format!("{value:.0}"),
        Some(value) => format!("{:.0}k", value / 1e3),
    }
}

/// Formats requests per second in few characters.
pub(super) fn iops(value: f64) -> String {
    count(Some(value))
}

fn bytes(value: Option<f64>) -> String {
    value.map_or(NOTHING.to_owned(), |value| Size(value.round() as u64).human())
}

fn percent(value: Option<f64>) -> String {
    value.map_or(NOTHING.to_owned(), |value| format!("{value:.0} %"))
}

fn time(value: Option<u64>) -> String {
    match value {
        // The latency exceeds the engine's last bound.
        Some(u64::MAX) => "> 2 min".to_owned(),
        Some(nanos) => duration(nanos),
        None => NOTHING.to_owned(),
    }
}

/// All disks in the selected order.
#[derive(Debug)]
pub(super) struct Model {
    rows: Vec<Row>,
    column: usize,
    ascending: bool,
    /// Name of the selected disk, which stays selected when the order changes.
    selected: Option<String>,
}

impl Model {
    /// Creates a model without disks, sorted by a column.
    pub(super) fn new(column: usize) -> Model {
        Model { rows: Vec::new(), column, ascending: ascends(column), selected: None }
    }

    /// Adds the next response.
    pub(super) fn take(&mut self, loads: Vec<DiskLoad>) {
        let mut known: BTreeMap<String, Row> =
            self.rows.drain(..).map(|row| (row.load.disk.clone(), row)).collect();
        for load in loads {
            let mut row = known.remove(&load.disk).unwrap_or_else(|| Row {
                load: DiskLoad::default(),
                rates: None,
                history: VecDeque::new(),
            });
            row.rates = Rates::between(&row.load, &load);
            row.load = load;
            if row.history.len() == HISTORY_MAX {
                row.history.pop_front();
            }
            row.history.push_back(row.rates);
            self.rows.push(row);
        }
        self.sort();
    }

    /// Sorts by a column; reverses the order if it is already the sorted column.
    pub(super) fn sort_by(&mut self, column: usize) {
        self.ascending = if column == self.column { !self.ascending } else { ascends(column) };
        self.column = column;
        self.sort();
    }

    fn sort(&mut self) {
        let (rank, is_by_name, ascending) = (COLUMNS[self.column].rank, self.column == 0, self.ascending);
        self.rows.sort_by(|a, b| {
            let by_name = a.load.disk.cmp(&b.load.disk);
            let order = if is_by_name { by_name } else { rank(a).total_cmp(&rank(b)) };
            let order = if ascending { order } else { order.reverse() };
            if order == Ordering::Equal { by_name } else { order }
        });
    }

    /// Returns the rows in order.
    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns the column to sort by, and whether the order is ascending.
    pub(super) fn order(&self) -> (usize, bool) {
        (self.column, self.ascending)
    }

    /// Returns the row of the selected disk: the first one until another is selected, or after the
    /// disk was removed.
    pub(super) fn selected(&self) -> usize {
        let chosen = self.selected.as_ref();
        chosen.and_then(|name| self.rows.iter().position(|row| row.load.disk == *name)).unwrap_or(0)
    }

    /// Selects a disk `down` rows below.
    pub(super) fn select(&mut self, down: isize) {
        let last = self.rows.len().saturating_sub(1);
        let at = self.selected().saturating_add_signed(down).min(last);
        self.selected = self.rows.get(at).map(|row| row.load.disk.clone());
    }

    /// Total of all disks: requests, bytes read, bytes written, per second.
    pub(super) fn totals(&self) -> (f64, f64, f64) {
        let rates = self.rows.iter().filter_map(|row| row.rates);
        rates.fold((0.0, 0.0, 0.0), |(iops, read, written), rates| {
            (iops + rates.iops, read + rates.read_bytes, written + rates.write_bytes)
        })
    }
}

/// Returns true for columns that sort ascending first: names and states, but not numbers.
fn ascends(column: usize) -> bool {
    column < 2
}
