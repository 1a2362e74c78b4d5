//! Names of the devices around the cache: the backing, the flash, and the flash's write endurance.

use std::fmt;
use std::str::FromStr;

use hob_world::disk_model::{ArrayConfig, ArrayModel};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::remote_model::{RemoteConfig, RemoteModel};
use hob_world::service::{FixedModel, ServiceModel};

/// Period of an endurance rating in drive writes per day, years.
pub(super) const WARRANTY_YEARS: f64 = 5.0;
pub(super) const DAYS_A_YEAR: f64 = 365.25;
/// Maximum latency of a backing with fixed latencies, milliseconds.
const FIXED_MS_MAX: f64 = 60_000.0;

/// Backing of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Backing {
    /// RAID 5 array of four 7200 rpm disks.
    #[default]
    Raid5Of7200,
    /// RAID 5 array of ten 10K disks.
    Raid5Of10K,
    /// RAID 5 array of five 15K disks.
    Raid5Of15K,
    /// Disk on a Ceph cluster of SATA SSDs.
    Ceph,
    /// File on a managed NFS service.
    Nfs,
    /// General-purpose cloud volume with 3000 I/Os per second.
    CloudGeneral,
    /// Cloud volume with 16 000 provisioned I/Os per second.
    CloudProvisioned,
    /// Device with fixed latencies.
    Fixed {
        /// Latency of a read, milliseconds.
        read_ms: f64,
        /// Latency of a write, milliseconds.
        write_ms: f64,
    },
}

impl Backing {
    /// Forms of a backing that the parser accepts, for help texts.
    pub const FORMS: &'static str = "7.2k-raid5, 10k-raid5, 15k-raid5, ceph, nfs, cloud-general, cloud-provisioned \
                                     or fixed:READ_MS,WRITE_MS";

    pub(crate) fn model(self, capacity_bytes: u64) -> ServiceModel {
        let remote = |config| RemoteModel::new(config).into();
        let array = match self {
            Backing::Ceph => return remote(RemoteConfig::ceph()),
            Backing::Nfs => return remote(RemoteConfig::nfs()),
            Backing::CloudGeneral => return remote(RemoteConfig::cloud_general()),
            Backing::CloudProvisioned => return remote(RemoteConfig::cloud_provisioned()),
            Backing::Raid5Of7200 => ArrayConfig::raid5_of_four_7200(capacity_bytes),
            Backing::Raid5Of10K => ArrayConfig::raid5_of_ten_10k(capacity_bytes),
            Backing::Raid5Of15K => ArrayConfig::raid5_of_five_15k(capacity_bytes),
            Backing::Fixed { read_ms, write_ms } => {
                let ns = |ms: f64| (ms * 1e6) as u64;
                return FixedModel::new(ns(read_ms), ns(write_ms), usize::MAX).into();
            }
        };
        ArrayModel::new(array).into()
    }

    /// Returns a description of the backing for reports.
    pub fn describe(self) -> String {
        match self {
            Backing::Raid5Of7200 => "a RAID 5 of four 7200 rpm disks".to_owned(),
            Backing::Raid5Of10K => "a RAID 5 of ten 10K disks".to_owned(),
            Backing::Raid5Of15K => "a RAID 5 of five 15K disks".to_owned(),
            Backing::Ceph => "a disk on a Ceph cluster of SATA SSDs".to_owned(),
            Backing::Nfs => "a file on a managed NFS service".to_owned(),
            Backing::CloudGeneral => "a cloud volume with 3000 I/Os a second".to_owned(),
            Backing::CloudProvisioned => "a cloud volume with 16 000 I/Os a second".to_owned(),
            Backing::Fixed { read_ms, write_ms } => {
                format!("a backing that reads in {read_ms} ms and writes in {write_ms} ms")
            }
        }
    }
}

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Backing, String> {
        let ms = |text: &str| text.parse().ok().filter(|ms| (0.0..=FIXED_MS_MAX).contains(ms));
        let fixed = |text: &str| {
            let (read, write) = text.strip_prefix("fixed:")?.split_once(',')?;
            Some(Backing::Fixed { read_ms: ms(read)?, write_ms: ms(write)? })
        };
        match text {
            "7.2k-raid5" => Ok(Backing::Raid5Of7200),
            "10k-raid5" => Ok(Backing::Raid5Of10K),
            "15k-raid5" => Ok(Backing::Raid5Of15K),
            "ceph" => Ok(Backing::Ceph),
            "nfs" => Ok(Backing::Nfs),
            "cloud-general" => Ok(Backing::CloudGeneral),
            "cloud-provisioned" => Ok(Backing::CloudProvisioned),
            _ => fixed(text).ok_or_else(|| {
                format!("there is no model of a backing '{text}'; there are {}", Backing::FORMS)
            }),
        }
    }
}

/// Flash device of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flash {
    /// SATA SSD of 2011.
    #[default]
    Sata,
    /// PCIe flash card of 2013.
    Pcie,
    /// Current SATA SSD.
    SataCurrent,
    /// Current NVMe SSD with PCIe 4.
    Nvme4,
    /// Current NVMe SSD with PCIe 5.
    Nvme5,
}

impl Flash {
    /// Names of flash devices that the parser accepts, for help texts.
    pub const FORMS: &'static str = "sata, pcie, sata-current, nvme4 or nvme5";

    pub(crate) fn model(self) -> ServiceModel {
        let config = match self {
            Flash::Sata => FlashConfig::sata_ssd(),
            Flash::Pcie => FlashConfig::pcie_card(),
            Flash::SataCurrent => FlashConfig::sata_current(),
            Flash::Nvme4 => FlashConfig::nvme_pcie4(),
            Flash::Nvme5 => FlashConfig::nvme_pcie5(),
        };
        FlashModel::new(config).into()
    }

    /// Returns a description of the flash for reports.
    pub fn describe(self) -> &'static str {
        match self {
            Flash::Sata => "a SATA SSD",
            Flash::Pcie => "a PCIe flash card",
            Flash::SataCurrent => "a current SATA SSD",
            Flash::Nvme4 => "an NVMe SSD with PCIe 4",
            Flash::Nvme5 => "an NVMe SSD with PCIe 5",
        }
    }
}

impl FromStr for Flash {
    type Err = String;

    fn from_str(text: &str) -> Result<Flash, String> {
        match text {
            "sata" => Ok(Flash::Sata),
            "pcie" => Ok(Flash::Pcie),
            "sata-current" => Ok(Flash::SataCurrent),
            "nvme4" => Ok(Flash::Nvme4),
            "nvme5" => Ok(Flash::Nvme5),
            _ => Err(format!("flash is {}", Flash::FORMS)),
        }
    }
}

/// Write endurance of the flash.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Endurance {
    /// Drive writes per day, for five years. One drive write is a write of as many bytes as the
    /// cache has, even if the cache uses only a part of the device.
    DriveWritesPerDay(f64),
    /// Total number of terabytes (10¹² bytes) that may be written.
    TerabytesWritten(f64),
}

impl Default for Endurance {
    fn default() -> Endurance {
        Endurance::DriveWritesPerDay(1.0)
    }
}

impl Endurance {
    /// Returns the total number of bytes that a cache of `cache_bytes` bytes may write.
    pub(super) fn bytes(self, cache_bytes: u64) -> f64 {
        match self {
            Endurance::DriveWritesPerDay(times) => times * cache_bytes as f64 * DAYS_A_YEAR * WARRANTY_YEARS,
            Endurance::TerabytesWritten(terabytes) => terabytes * 1e12,
        }
    }

    /// Returns the size of a device that may be written this much each day, or `None` for a rating
    /// in terabytes.
    pub(super) fn device_bytes(self, bytes_per_day: f64) -> Option<f64> {
        match self {
            Endurance::DriveWritesPerDay(times) => Some(bytes_per_day / times),
            Endurance::TerabytesWritten(_) => None,
        }
    }
}

impl FromStr for Endurance {
    type Err = String;

    fn from_str(text: &str) -> Result<Endurance, String> {
        let text = text.trim().to_ascii_uppercase();
        let number = |suffix| {
            let number = text.strip_suffix(suffix)?.trim().parse::<f64>().ok()?;
            (number > 0.0 && number <= 1e9).then_some(number)
        };
        (number("DWPD").map(Endurance::DriveWritesPerDay))
            .or_else(|| number("TBW").map(Endurance::TerabytesWritten))
            .ok_or_else(|| format!("'{text}' is not a rating of endurance; write it like 1DWPD or 600TBW"))
    }
}

impl fmt::Display for Endurance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endurance::DriveWritesPerDay(times) => {
                let s = if *times == 1.0 { "" } else { "s" };
                write!(f, "{times} drive write{s} a day over {WARRANTY_YEARS} years")
            }
            Endurance::TerabytesWritten(terabytes) => write!(f, "{terabytes} TB written"),
        }
    }
}
