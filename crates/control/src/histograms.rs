//! Histograms of a disk's requests, with the metrics and buckets of vscsiStats.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// All histograms of a disk's requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskHistograms {
    /// Name of the disk.
    pub disk: String,
    /// Time since the disk came online or its histograms were last reset, nanoseconds.
    pub elapsed_ns: u64,
    /// Histograms of each metric for all requests, for reads and for writes.
    pub histograms: Vec<RequestHistogram>,
}

/// Histogram of one metric: of all requests of the disk, of its reads, or of its writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RequestHistogram {
    /// `length`, `seek`, `seek-nearest`, `outstanding`, `latency` or `interarrival`.
    pub metric: String,
    /// Title of the metric, for users.
    pub title: String,
    /// Unit of the metric's values.
    pub unit: String,
    /// Class of the requests: `all` (reads and writes), `reads` or `writes`.
    pub class: String,
    /// Number of values in the histogram.
    pub count: u64,
    /// Smallest value; null if the histogram is empty.
    pub min: Option<i64>,
    /// Largest value; null if the histogram is empty.
    pub max: Option<i64>,
    /// Mean of the values; null if the histogram is empty.
    pub mean: Option<f64>,
    /// All buckets in rising order, including empty ones.
    pub buckets: Vec<RequestBucket>,
}

/// One bucket of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestBucket {
    /// Largest value of the bucket. Null for the last bucket, which counts all larger values.
    /// Values start one above the previous bucket's bound.
    pub up_to: Option<i64>,
    /// Number of values in the bucket.
    pub count: u64,
}

impl DiskHistograms {
    /// Returns the histograms as CSV: a header, and a line for each bucket. The last bucket's bound
    /// is empty.
    pub fn to_csv(&self) -> String {
        let mut text = String::from("metric,class,unit,up_to,count\n");
        for histogram in &self.histograms {
            for bucket in &histogram.buckets {
                let up_to = bucket.up_to.map_or(String::new(), |bound| bound.to_string());
                let RequestHistogram { metric, class, unit, .. } = histogram;
                text += &format!("{metric},{class},{unit},{up_to},{}\n", bucket.count);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_has_a_line_for_each_bucket() {
        let buckets = [(Some(-1), 2), (Some(5), 0), (None, 7)];
        let histogram = RequestHistogram {
            metric: "seek".into(),
            title: "distance".into(),
            unit: "sectors".into(),
            class: "reads".into(),
            count: 9,
            min: Some(-3),
            max: Some(9),
            mean: Some(4.5),
            buckets: buckets.map(|(up_to, count)| RequestBucket { up_to, count }).to_vec(),
        };
        let all = DiskHistograms { disk: "vm".into(), elapsed_ns: 1, histograms: vec![histogram] };
        let lines = ["seek,reads,sectors,-1,2", "seek,reads,sectors,5,0", "seek,reads,sectors,,7"];
        assert_eq!(all.to_csv(), format!("metric,class,unit,up_to,count\n{}\n", lines.join("\n")));
    }
}
