//! Builds the page docs/metrics.md, which documents all metrics.

use std::fmt::Write as _;

use super::{BOUNDS, DISKS_FINE_MAX, Kind, METRICS, bounds_ns};

/// Text of the page above the table.
const ABOVE: &str = "\
# Metrics

For operators who monitor hob with Prometheus or OpenMetrics.

`GET /metrics` of the control API returns these metrics as Prometheus text (format 0.0.4), or as OpenMetrics 1.0 if the client
asks for that format. The answer is compressed if the client accepts gzip, as Prometheus does. Over TCP, the client needs TLS, and
a token or certificate of the role `read-only`.
[`dashboard/prometheus`](../dashboard/prometheus) has an example configuration and alert rules for Prometheus.
[`dashboard/grafana`](../dashboard/grafana) has a Grafana dashboard.

The counters of a disk start at 0 when the disk comes online: after a restart of the daemon, and after the backing could not be
opened. The counters of a flash device start at 0 when hob opens the device.
";

/// Text of the page below the table.
const BELOW: &str = "
## Example queries

| question | PromQL |
|---|---|
| share of reads that flash served | `rate(hob_disk_read_hits_total[5m]) / rate(hob_disk_reads_total[5m])` |
| requests per second, by outcome | `sum by (disk, class, reason) (rate(hob_disk_requests_total[1m]))` |
| latency below which 99 % of the requests are | `histogram_quantile(0.99, sum by (disk, le) (rate(hob_disk_request_duration_seconds_bucket[5m])))` |
| mean latency of the backing | `rate(hob_disk_backing_io_seconds_total[5m]) / rate(hob_disk_backing_ios_total[5m])` |
| bytes per second written to each flash device, for its wear | `sum by (device) (rate(hob_device_written_bytes_total[1h]))` |
| disks whose backing is not connected | `hob_disk_backing_state{state!=\"connected\"} == 1` |
| seconds until all dirty data is destaged | `hob_cache_dirty_bytes / rate(hob_cache_destaged_bytes_total[1m])` |

## Health

`GET /healthz` returns status 200 and `ok`, or status 503, `degraded` and one line for each problem. `GET /v1/health` returns the
same as JSON, and `hob health` prints it as a table. Do not restart a degraded daemon automatically: it still serves all disks that
it can serve. If the daemon hangs, systemd's watchdog restarts it ([`packaging/hob.service`](../packaging/hob.service)): hob notifies the
watchdog only while every shard answers.

## Logs

Each request to the control API has an id: that of its header `X-Request-Id`, or a new one. The response has the same header. Each
log line that the request causes has the id too, even if the daemon logs the line after the response. With `--log-format json`, each
log line is a JSON object.
";

/// Returns the text of docs/metrics.md without the page's first line.
pub fn page() -> String {
    let mut page = ABOVE.to_owned();
    let first = bounds_ns().next().unwrap_or(0);
    let last = bounds_ns().last().unwrap_or(0);
    let _ = write!(
        page,
        "A histogram has {BOUNDS} bounds from {first} ns to {:.1} s; each bound is twice the one before. These are the bounds of the \
         engine's own buckets, so all counts are exact. Each disk has one histogram for each outcome that occurred. With \
         `/metrics?latency=disk`, or with more than {DISKS_FINE_MAX} disks, each disk has only one histogram, with the label \
         `class=\"all\"`, and none before its first request. Then the metrics for each outcome leave out outcomes that have not \
         occurred, except failures (classes `flash-error`, `backing-error` and `refused`). With `?latency=outcome`, each disk has \
         all outcomes even then.\n\nA metric of a feature has no value for a disk that does not use the feature, such as the metrics \
         of the memory tier.\n\n| name | kind | labels | one for each | meaning |\n|---|---|---|---|---|\n",
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
