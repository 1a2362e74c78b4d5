//! Lists all published results of the reference systems, in the order of SYSTEMS (a document of the
//! project outside this repository), and the figure that reproduces each.

use serde::Serialize;

/// A published result of a reference system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Published {
    /// Section of SYSTEMS and the result.
    pub result: &'static str,
    /// Name of the figure in [`FIGURES`](super::FIGURES); `None` if no figure reproduces the
    /// result.
    pub figure: Option<&'static str>,
    /// Part of the result that the figure does not reproduce, or the reason why there is no figure.
    /// Empty if the figure reproduces the whole result.
    pub lacks: &'static str,
}

impl Published {
    /// Returns the state of the result in words: built, built in part, or missing.
    pub fn state(&self) -> String {
        match (self.figure, self.lacks) {
            (Some(_), "") => "built".to_owned(),
            (Some(_), lacks) => format!("built in part; missing: {lacks}"),
            (None, lacks) => format!("missing: {lacks}"),
        }
    }
}

const fn built(result: &'static str, figure: &'static str) -> Published {
    Published { result, figure: Some(figure), lacks: "" }
}

const fn partial(result: &'static str, figure: &'static str, lacks: &'static str) -> Published {
    Published { result, figure: Some(figure), lacks }
}

const fn missing(result: &'static str, lacks: &'static str) -> Published {
    Published { result, figure: None, lacks }
}

/// All published results, in the order of SYSTEMS.
pub const PUBLISHED: &[Published] = &[
    built("§1 hardware monitoring, mean latency", "hm-latency"),
    built("§1 web proxy, mean latency", "proxy-latency"),
    built("§1 mean latency by block size", "block-size"),
    built("§1 decision support, transactions per minute and response time", "dss"),
    partial(
        "§1 decision support by query type",
        "dss-types",
        "the source's queries; three chosen types instead",
    ),
    built("§1 DVD Store, orders per minute", "dvdstore"),
    built("§1 Oracle I/O calibration", "calibration"),
    built("§1 numBlocks, and sizing by numBlocksCurrentlyCached", "statistics"),
    built("§1 memory for metadata by block size", "metadata-memory"),
    built("§1 time of a migration with the cache, by reserved size", "migration"),
    built("§1 ratings of the PCIe card and the SATA SSD", "devices"),
    built("§2 promotion at the third access", "fast-cache-promotion"),
    built("§2 VMmark tiles before QoS fails", "fast-cache-tiles"),
    built("§2 load of four tiles: 24 % reads, 76 % writes, 1.09 TB of data", "fast-cache-share"),
    built("§2 share of I/O that DRAM and flash serve", "fast-cache-share"),
    built("§2 knee of the working set between three and four tiles", "fast-cache-share"),
    built("§2 read latency by cache size and disks, constant write latency", "fast-cache-share"),
    missing("§2 VMmark score at one and two tiles", "the score needs VMmark's applications"),
    built("§2 200 virtual desktops", "fast-cache-desktops"),
    built("§2 mean utilisation with 200 virtual desktops", "fast-cache-desktops"),
    built("§2 comfort limit of virtual desktops", "fast-cache-desktops"),
    built("§2 DRAM relieved between 100 and 200 desktops", "fast-cache-desktops"),
    built("§3 split of the flash, 70 % and 30 %", "vsan-split"),
    built("§4 flash per group: 620.6 GB for reads and 268.3 GB for writes", "vsan-split"),
    built("§4 flash of a ZBS node: 1.5 TiB, one space", "zbs-sequential"),
    partial("§4 256 KB sequential writes", "zbs-sequential", "three nodes with a network"),
    partial("§4 4 KB random writes", "zbs-random", "three nodes with a network"),
    built("§4 two-level LRU against LRU", "two-level-lru"),
    built("§5 shares, limits and reservations, with and without flash", "sioc"),
    built("write-heavy neighbour that gains because the array is relieved", "write-neighbour"),
    built("current PCIe, SATA and NVMe devices", "devices"),
    built("Ceph, NFS and cloud volumes as backings", "backings"),
];

#[cfg(test)]
mod tests {
    use super::super::FIGURES;
    use super::*;
    use crate::figures::FigureInfo;

    /// Numbers that SYSTEMS has for each figure. The text of the figure must name all of them.
    const NUMBERS: &[(&str, &[&str])] = &[
        ("hm-latency", &["600 000", "95 %", "4 GB", "1.23 ms", "0.321 ms", "85 %"]),
        ("proxy-latency", &["5 million", "67 %", "16 GB", "1.357 ms", "0.612 ms", "83 %"]),
        ("block-size", &["321", "1185", "1269"]),
        ("dss", &["15 GB", "8 GB", "8 KB", "61.7", "112.9", "20.389 s", "10.859 s", "89 %"]),
        ("dvdstore", &["15 GB", "60 %", "8802", "8937", "12 319", "10 GB"]),
        ("calibration", &["200 GB", "50 GB", "8 KB", "576–608", "268", "29 %"]),
        ("statistics", &["1 GB", "8 KB", "131072"]),
        ("metadata-memory", &["2 %", "4 KB", "512 KB"]),
        ("devices", &["750 000", "256", "39 500", "32"]),
        ("fast-cache-promotion", &["64 KB", "three times"]),
        ("fast-cache-tiles", &["4 tiles instead of 2 on 20 disks", "4 instead of 0 on 11", "26 %", "31 %"]),
        (
            "fast-cache-share",
            &["92 %", "96.5 %", "92.1 %", "92 GB", "8 %", "24 %", "76 %", "1.09 TB", "366 GB"],
        ),
        (
            "fast-cache-desktops",
            &[
                "200", "14 KB", "12 KB", "1.34", "7.58", "100 GB", "3848", "2 ms", "3.17 ms", "59.7 %",
                "10 ms", "20 ms",
            ],
        ),
        ("vsan-split", &["894 GB", "620.6 GB", "268.3 GB"]),
        ("zbs-sequential", &["280", "75 MB/s", "300 GB", "268.3 GB", "500 GB", "100 %", "1.5 TiB"]),
        ("zbs-random", &["37 176", "16 060", "300 GB", "500 GB"]),
        ("sioc", &["500", "1000", "2000", "32 KB"]),
    ];

    #[test]
    fn every_figure_is_in_the_list_and_every_name_is_a_figure() {
        let named: Vec<&str> = PUBLISHED.iter().filter_map(|published| published.figure).collect();
        for figure in FIGURES.iter().filter(|figure| figure.waits_for().is_none()) {
            assert!(named.contains(&figure.name), "{} is not listed", figure.name);
        }
        for name in named {
            assert!(FIGURES.iter().any(|figure| figure.name == name), "{name} is no figure");
        }
        for published in PUBLISHED.iter().filter(|published| published.figure.is_none()) {
            assert!(!published.lacks.is_empty(), "{}: why is it missing?", published.result);
        }
    }

    #[test]
    fn figures_name_the_numbers_of_their_sources() {
        for (name, numbers) in NUMBERS {
            let figure = FigureInfo::find(name).unwrap();
            for number in *numbers {
                assert!(figure.published.contains(number), "{name}: {number} is not in its text");
            }
        }
    }
}
