//! The result of `hob lab sim`: as a table, JSON, CSV, and a picture.

use hob_control::Size;
use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use hob_lab::sim::Simulated;
use serde::ser::Error;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::super::percent;
use crate::output::{self, table};

/// Name that selects Belady's bound instead of a policy.
pub(super) const OPTIMUM: &str = "optimum";

/// A row of the result.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Row {
    pub(super) policy: String,
    pub(super) admission: String,
    pub(super) fill: String,
    pub(super) block_bytes: u32,
    pub(super) cache_bytes: u64,
    /// Size as a fraction of the bytes that the trace accesses, if they were counted.
    pub(super) cache_share: Option<f64>,
    pub(super) reads: u64,
    /// Read requests served whole from flash.
    pub(super) read_hits: u64,
    /// Fraction of read requests served whole from flash.
    pub(super) read_hit_ratio: f64,
    /// Fraction of read bytes served from flash.
    pub(super) byte_hit_ratio: f64,
    /// Fraction of blocks that were cached when a read accessed them, including reads that missed
    /// as a whole.
    pub(super) block_hit_ratio: f64,
    pub(super) partial_misses: u64,
    pub(super) not_admitted: u64,
    pub(super) writes: u64,
    pub(super) write_hits: u64,
    pub(super) flash_write_bytes: u64,
    /// Flash write budget, bytes a day.
    pub(super) flash_budget_bytes_per_day: Option<u64>,
    /// Bytes that were not written to flash because of the budget.
    pub(super) budget_refused_bytes: u64,
    /// Bytes read from the backing in addition to those that guests requested.
    pub(super) extra_read_bytes: u64,
    pub(super) backing_ios: u64,
    pub(super) evictions: u64,
    /// Memory for metadata per block of the cache, in bytes.
    pub(super) memory_bytes_per_block: f64,
    pub(super) out_of_reach: u64,
}

/// The JSON output.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) trace: String,
    pub(super) footprint_bytes: Option<u64>,
    pub(super) requests: u64,
    pub(super) sample: f64,
    /// Time for reading and simulating in seconds, without the pass that counts the footprint.
    pub(super) seconds: f64,
    #[serde(serialize_with = "without_unknown")]
    pub(super) results: Vec<Row>,
    /// Remarks about the trace and the simulation.
    pub(super) notes: Vec<String>,
}

/// Fields that the row of the optimum has. The other fields of this row are unknown, because the
/// optimum is computed only for read hits.
const KNOWN_OF_OPTIMUM: [&str; 7] =
    ["policy", "admission", "block_bytes", "cache_bytes", "cache_share", "read_hit_ratio", "block_hit_ratio"];

/// Returns a row as JSON, with `null` for unknown values.
fn known(row: &Row) -> serde_json::Result<Value> {
    let mut json = serde_json::to_value(row)?;
    if row.policy == OPTIMUM
        && let Some(fields) = json.as_object_mut()
    {
        let unknown = fields.iter_mut().filter(|(name, _)| !KNOWN_OF_OPTIMUM.contains(&name.as_str()));
        unknown.for_each(|(_, value)| *value = Value::Null);
    }
    Ok(json)
}

fn without_unknown<S: Serializer>(rows: &[Row], serializer: S) -> Result<S::Ok, S::Error> {
    let rows: Vec<Value> = rows.iter().map(known).collect::<Result<_, _>>().map_err(S::Error::custom)?;
    rows.serialize(serializer)
}

impl Row {
    pub(super) fn new(result: &Simulated, footprint_bytes: Option<u64>) -> Row {
        let Simulated { point, stats, memory_bytes, out_of_reach } = result;
        let blocks = (point.cache_bytes / u64::from(point.block_bytes)) as f64 * point.sample_rate;
        Row {
            policy: point.policy.info().name.to_owned(),
            admission: point.admission.to_string(),
            fill: point.fill.to_string(),
            block_bytes: point.block_bytes,
            cache_bytes: point.cache_bytes,
            cache_share: footprint_bytes.map(|bytes| point.cache_bytes as f64 / bytes.max(1) as f64),
            reads: stats.reads,
            read_hits: stats.read_hits,
            read_hit_ratio: stats.read_hit_ratio(),
            byte_hit_ratio: stats.read_hit_byte_ratio(),
            block_hit_ratio: stats.read_block_hit_ratio(),
            partial_misses: stats.partial_misses,
            not_admitted: stats.not_admitted,
            writes: stats.writes,
            write_hits: stats.write_hits,
            flash_write_bytes: stats.flash_write_bytes,
            flash_budget_bytes_per_day: point.flash_writes,
            budget_refused_bytes: stats.budget_refused_bytes,
            extra_read_bytes: stats.extra_read_bytes,
            backing_ios: stats.backing_ios(),
            evictions: stats.evictions,
            memory_bytes_per_block: *memory_bytes as f64 / blocks.round().max(1.0),
            out_of_reach: *out_of_reach,
        }
    }

    /// Creates the row of the optimum from the miss ratios of reads and of their blocks.
    pub(super) fn optimum(
        block_bytes: u32,
        cache_bytes: u64,
        footprint: Option<u64>,
        (reads, blocks): (f64, f64),
    ) -> Row {
        Row {
            policy: OPTIMUM.to_owned(),
            admission: "-".to_owned(),
            fill: "-".to_owned(),
            block_bytes,
            cache_bytes,
            cache_share: footprint.map(|bytes| cache_bytes as f64 / bytes.max(1) as f64),
            read_hit_ratio: 1.0 - reads,
            block_hit_ratio: 1.0 - blocks,
            ..Row::default()
        }
    }

    /// Returns the flash write budget, or a dash.
    fn budget(&self) -> String {
        let shown = |bytes| format!("{}/day", Unit::Bytes.text(bytes as f64));
        self.flash_budget_bytes_per_day.map_or_else(|| "-".to_owned(), shown)
    }

    /// Returns `figure`, or a dash for the optimum, which does not have it.
    fn by_request(&self, figure: String) -> String {
        if self.policy == OPTIMUM { "-".to_owned() } else { figure }
    }

    /// Returns a label that distinguishes the row from rows of other settings. The label excludes the
    /// cache size.
    fn kind(&self, report: &Report) -> String {
        let differs = |of: fn(&Row) -> String| {
            report.results.iter().any(|row| row.policy != OPTIMUM && of(row) != of(&report.results[0]))
        };
        let mut kind = self.policy.clone();
        if self.policy != OPTIMUM && differs(|row| row.admission.clone()) {
            kind = format!("{kind} {}", self.admission);
        }
        if self.policy != OPTIMUM && differs(|row| row.fill.clone()) {
            kind = format!("{kind} {}", self.fill);
        }
        if self.policy != OPTIMUM && differs(Row::budget) {
            kind = format!("{kind} {}", self.budget());
        }
        if differs(|row| row.block_bytes.to_string()) {
            kind = format!("{kind} {}", Size(u64::from(self.block_bytes)));
        }
        kind
    }
}

pub(super) fn show(report: &Report) -> String {
    let columns = "POLICY|ADMISSION|FILL|BLOCK:|CACHE:|SHARE %:|READ HITS %:|BYTE HITS %:|BLOCK HITS %:|\
        BUDGET:|FLASH WRITES:|EXTRA READS:|BACKING I/O:|EVICTIONS:";
    let rows = report.results.iter().map(|row| {
        vec![
            row.policy.clone(),
            row.admission.clone(),
            row.fill.clone(),
            Size(u64::from(row.block_bytes)).to_string(),
            Unit::Bytes.text(row.cache_bytes as f64),
            row.cache_share.map_or("-".to_owned(), percent),
            percent(row.read_hit_ratio),
            row.by_request(percent(row.byte_hit_ratio)),
            percent(row.block_hit_ratio),
            row.budget(),
            row.by_request(Unit::Bytes.text(row.flash_write_bytes as f64)),
            row.by_request(Unit::Bytes.text(row.extra_read_bytes as f64)),
            row.by_request(row.backing_ios.to_string()),
            row.by_request(row.evictions.to_string()),
        ]
    });
    let mut text = table(columns, rows);
    let touched = report
        .footprint_bytes
        .map(|bytes| format!(", which touch {}", Unit::Bytes.text(bytes as f64)))
        .unwrap_or_default();
    text.push_str(&format!(
        "\n\n{} requests{touched}; simulated in {:.2} s\n",
        report.requests, report.seconds
    ));
    text
}

/// Columns of the CSV output. Each column has the name of a field of [`Row`].
const CSV_COLUMNS: &str = "policy,admission,block_bytes,cache_bytes,cache_share,reads,read_hits,read_hit_ratio,byte_hit_ratio,\
    block_hit_ratio,partial_misses,not_admitted,writes,write_hits,flash_write_bytes,backing_ios,evictions,\
    memory_bytes_per_block,fill,extra_read_bytes,flash_budget_bytes_per_day,budget_refused_bytes";

pub(super) fn csv(rows: &[Row]) -> String {
    output::csv(CSV_COLUMNS, rows.iter().map(|row| known(row).expect("rows are plain data")))
}

pub(super) fn draw(report: &Report) -> String {
    let mut kinds: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for row in &report.results {
        let kind = row.kind(report);
        let point = (row.cache_bytes as f64, row.block_hit_ratio);
        match kinds.iter_mut().find(|(name, _)| *name == kind) {
            Some((_, points)) => points.push(point),
            None => kinds.push((kind, vec![point])),
        }
    }
    let mut chart = CurveChart::new(
        "Blocks found in the cache by reads, by cache size",
        Axis::new("cache size", Unit::Bytes).log(),
        Axis::new("block hits", Unit::Percent),
    )
    .subtitle(format!("{}, {} requests", report.trace, report.requests));
    for (name, mut points) in kinds {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart = chart.curve(Curve::new(name, points).dots());
    }
    curves(&chart)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_of_the_optimum_are_null_and_empty() {
        let rows =
            [Row::optimum(4096, 1 << 20, Some(4 << 20), (0.5, 0.4)), Row { evictions: 7, ..Row::default() }];
        assert_eq!(
            csv(&rows[..1]).lines().nth(1),
            Some("optimum,-,4096,1048576,0.25,,,0.5,,0.6,,,,,,,,,,,,")
        );
        let results = rows.to_vec();
        let report = Report {
            trace: "t".into(),
            footprint_bytes: None,
            requests: 1,
            sample: 1.0,
            seconds: 0.1,
            results,
            notes: vec!["a remark".to_owned()],
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["results"][0]["read_hit_ratio"], 0.5);
        assert_eq!((&json["results"][0]["byte_hit_ratio"], &json["results"][0]["evictions"]), {
            (&Value::Null, &Value::Null)
        });
        assert_eq!(json["results"][0]["block_hit_ratio"], 0.6);
        assert_eq!(json["results"][1]["evictions"], 7);
        assert_eq!(json["notes"][0], "a remark");
    }
}
