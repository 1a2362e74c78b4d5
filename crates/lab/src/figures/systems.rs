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
    /// Empty for a complete figure.
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
    missing("§1 decision support by query type", "the generator has one type of query"),
    built("§1 DVD Store, orders per minute", "dvdstore"),
    built("§1 Oracle I/O calibration", "calibration"),
    built("§1 numBlocks, and sizing by numBlocksCurrentlyCached", "statistics"),
    built("§1 memory for metadata by block size", "metadata-memory"),
    missing(
        "§1 time of a migration with the cache, by reserved size",
        "no figure; hob sends only valid blocks",
    ),
    missing("§1 ratings of the PCIe card and the SATA SSD", "no figure; tests of the flash model check them"),
    built("§2 promotion at the third access", "fast-cache-promotion"),
    partial("§2 VMmark tiles before QoS fails", "fast-cache-tiles", "the load of the third LUN"),
    partial("§2 share of I/O that DRAM and flash serve", "fast-cache-share", "DRAM above the flash"),
    missing("§2 knee of the working set between three and four tiles", "the tiles have no such knee"),
    built("§2 read latency by cache size and disks, constant write latency", "fast-cache-share"),
    missing("§2 VMmark score at one and two tiles", "the score needs VMmark's applications"),
    partial("§2 200 virtual desktops", "fast-cache-desktops", "12 GB of DRAM above the flash; utilisation"),
    built("§2 comfort limit of virtual desktops", "fast-cache-desktops"),
    missing("§2 write-heavy neighbour that gains because the array is relieved", "no workload yet"),
    built("§3 split of the flash, 70 % and 30 %", "vsan-split"),
    built("§4 flash per group: 620.6 GB for reads and 268.3 GB for writes", "vsan-split"),
    partial("§4 256 KB sequential writes", "zbs-sequential", "three nodes with a network"),
    partial("§4 4 KB random writes", "zbs-random", "three nodes with a network"),
    missing("§4 two-level LRU against LRU", "no figure; `hob lab sim` compares policies"),
    missing("§5 shares, limits and reservations", "no figure; `hob lab scale` compares entitlements"),
    missing("§1–§5 current flash devices, and Ceph, NFS and cloud volumes as backings", "no models yet"),
];

#[cfg(test)]
mod tests {
    use super::super::FIGURES;
    use super::*;

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
}
