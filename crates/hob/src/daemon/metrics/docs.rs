//! The documentation of all metrics, as in docs/metrics.md.

use std::fmt::Write as _;

use super::{BOUNDS, DISKS_FINE_MAX, Kind, METRICS, bounds_ns};

/// Text of the page above the table.
const ABOVE: &str = "\
# Metrics

`GET /metrics` on the control API gives these, for Prometheus (text format 0.0.4) or, to who asks for it, as OpenMetrics 1.0.
Over TCP it wants TLS and a token or certificate like everything else, of the role read-only; [`dashboard/prometheus`](../dashboard/prometheus) has an example of what
Prometheus must be told, and rules for alerts, [`dashboard/grafana`](../dashboard/grafana) a dashboard.

Counters of a disk begin at 0 when the disk comes online: after a restart of the daemon, and after its backing was away.
Those of a flash device begin at 0 when it is opened.
";

/// Text of the page below the table.
const BELOW: &str = "
## What to ask

| question | PromQL |
|---|---|
| share of reads that flash served | `rate(hob_disk_read_hits_total[5m]) / rate(hob_disk_reads_total[5m])` |
| requests per second, by what became of them | `sum by (disk, class, reason) (rate(hob_disk_requests_total[1m]))` |
| 99 % of all requests take at most | `histogram_quantile(0.99, sum by (disk, le) (rate(hob_disk_request_duration_seconds_bucket[5m])))` |
| mean latency of the backing | `rate(hob_disk_backing_io_seconds_total[5m]) / rate(hob_disk_backing_ios_total[5m])` |
| what goes to each flash device, for its wear | `sum by (device) (rate(hob_device_written_bytes_total[1h]))` |
| disks whose backing does not answer | `hob_disk_backing_state{state!=\"connected\"} == 1` |
| how long until nothing is dirty | `hob_cache_dirty_bytes / rate(hob_cache_destaged_bytes_total[1m])` |

## Health

`GET /healthz` answers 200 and `ok`, or 503, `degraded` and a line for each problem; `GET /v1/health` says the same in JSON, `hob
health` in a table. A
degraded daemon serves what it can: nobody should restart it for that. A daemon that hangs is the matter of systemd's watchdog
([`packaging/hob.service`](../packaging/hob.service)), which hob answers only while every shard does.

## Logs

Each request to the control API has a name: the `X-Request-Id` it came with, or a new one. The answer carries it, and so does
every line of the log that the request caused, also what goes on in the background after the answer. `--log-format json` makes
each line of the log a JSON object.
";

/// Returns the page without its first line.
pub(crate) fn page() -> String {
    let mut page = ABOVE.to_owned();
    let first = bounds_ns().next().unwrap_or(0);
    let last = bounds_ns().last().unwrap_or(0);
    let _ = write!(
        page,
        "A histogram has {BOUNDS} bounds, from {first} ns to {:.1} s, each twice the one before. They are bounds of the engine's own \
         buckets, so every count is exact. Each outcome of a disk that has happened has a histogram; with `/metrics?latency=disk`, and with \
         more than {DISKS_FINE_MAX} disks unless `?latency=outcome` says otherwise, there is one for each disk, whose class is `all`.\n\n| name | kind | labels | one for each | meaning |\n|---|---|---|---|---|\n",
        last as f64 / 1e9
    );
    for metric in METRICS {
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Info => "info",
            Kind::Histogram => "histogram",
        };
        let labels: Vec<String> = metric.source.labels().iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(
            page,
            "| `{}` | {kind} | {} | {} | {} |",
            metric.sample_name(),
            labels.join(", "),
            metric.source.of_each(),
            metric.help
        );
    }
    page.push_str(BELOW);
    page
}
