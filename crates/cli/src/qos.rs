//! `hob qos …`: entitlements of disks: shares, reservations and limits.

use clap::{ArgGroup, Subcommand};
use hob_control::{DiskQos, Qos as Due, QosPatch, Size, StoragePolicy};

use super::Global;
use super::options::options;
use super::output::{print, table, with_notes};
use super::remote::ask;

/// Options that set rules; at least one is required.
const RULES: [&str; 5] = ["shares", "reservation", "limit", "bytes_limit", "flash_limit"];

/// Start of the error about a value that is no number of units.
const UNITS: &str = "write a number of units a second, such as 500";

/// Shares, limits and reservations of disks. I/O is counted in units of 32 KiB, unless hob.toml
/// sets another unit; each I/O counts as at least one unit
#[derive(Debug, Subcommand)]
pub(crate) enum Qos {
    /// Set a disk's shares, reservation and limits
    #[command(group = ArgGroup::new("rule").required(true).multiple(true).args(RULES).arg("policy"))]
    Set {
        /// The disk
        disk: String,
        /// Use this storage policy, and follow its later changes; '' to keep the present settings
        /// without a policy
        #[arg(long, value_name = "NAME", conflicts_with_all = RULES)]
        policy: Option<String>,
        #[command(flatten)]
        rules: Rules,
    },
    /// Show shares, reservations and limits of disks
    Show {
        /// Name of the disk; all disks if absent
        disk: Option<String>,
    },
    /// Manage storage policies: named sets of shares, reservation and limits
    #[command(subcommand)]
    Policy(Policy),
}

/// Storage policies.
#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Create a storage policy, or change it for all its disks
    Set {
        /// Name of the storage policy
        name: String,
        #[command(flatten)]
        rules: Rules,
    },
    /// Remove a storage policy that no disk uses
    Remove {
        /// Name of the storage policy
        name: String,
    },
    /// List all storage policies
    List,
}

options! {
    /// Shares, reservation and limits.
    #[derive(Debug, clap::Args)]
    pub(crate) struct Rules for QosPatch {
        /// Shares, the relative part of the datastore: low (500), normal (1000), high (2000) or a
        /// number
        #[arg(long)]
        shares: Option<String>,
        /// Reservation: units a second that the disk gets even under contention; 0 for none
        #[arg(long, value_name = "UNITS", value_parser = reservation_units)]
        reservation: Option<u32>,
        /// Limit on the datastore, units a second; 0 for none
        #[arg(long, value_name = "UNITS", value_parser = limit_units)]
        limit: Option<u32>,
        /// Limit on the datastore, bytes a second; 0 for none
        #[arg(long, value_name = "SIZE", value_parser = limit_bytes)]
        bytes_limit: Option<Size>,
        /// Limit on each flash device, units a second; 0 for none
        #[arg(long, value_name = "UNITS", value_parser = limit_units)]
        flash_limit: Option<u32>,
    }
}

fn reservation_units(text: &str) -> Result<u32, String> {
    units(text).ok_or_else(|| format!("{UNITS}; 0 means no reservation"))
}

fn limit_units(text: &str) -> Result<u32, String> {
    units(text).ok_or_else(|| format!("{UNITS}; 0 means no limit"))
}

fn limit_bytes(text: &str) -> Result<Size, String> {
    text.parse::<Size>().map_err(|error| format!("{error}; 0 means no limit"))
}

fn units(text: &str) -> Option<u32> {
    text.parse().ok()
}

pub(super) fn run(command: Qos, global: &Global) -> anyhow::Result<()> {
    match command {
        Qos::Set { disk, policy, rules } => {
            let patch = QosPatch { policy, ..rules.into() };
            let qos = ask(global, async |client| client.qos_set(&disk, &patch).await)?;
            print(global.output, &qos, |qos| with_notes(list(std::slice::from_ref(qos)), &qos.notes))
        }
        Qos::Show { disk: Some(disk) } => {
            let qos = ask(global, async |client| client.qos(&disk).await)?;
            print(global.output, &qos, |qos| list(std::slice::from_ref(qos)))
        }
        Qos::Show { disk: None } => {
            let all = ask(global, async |client| client.qos_list().await)?;
            print(global.output, &all, |all| list(all))
        }
        Qos::Policy(Policy::Set { name, rules }) => {
            let patch = QosPatch::from(rules);
            let policy = ask(global, async |client| client.storage_policy_set(&name, &patch).await)?;
            print(global.output, &policy, |policy| {
                with_notes(policies(std::slice::from_ref(policy)), &policy.notes)
            })
        }
        Qos::Policy(Policy::Remove { name }) => {
            let policy = ask(global, async |client| client.storage_policy_remove(&name).await)?;
            print(global.output, &policy, |policy| format!("storage policy {} is removed", policy.name))
        }
        Qos::Policy(Policy::List) => {
            let all = ask(global, async |client| client.storage_policies().await)?;
            print(global.output, &all, |all| policies(all))
        }
    }
}

fn list(disks: &[DiskQos]) -> String {
    let columns = "DISK|DATASTORE|POLICY|SHARES:|RESERVATION:|LIMIT:|BYTES/S:|FLASH LIMIT:";
    let row = |disk: &DiskQos| {
        let names = [Some(disk.disk.clone()), disk.datastore.clone(), disk.policy.clone()]
            .map(Option::unwrap_or_default);
        names.into_iter().chain(rules(&disk.qos)).collect()
    };
    table(columns, disks.iter().map(row))
}

fn policies(policies: &[StoragePolicy]) -> String {
    let columns = "POLICY|SHARES:|RESERVATION:|LIMIT:|BYTES/S:|FLASH LIMIT:|DISKS";
    let row = |policy: &StoragePolicy| {
        let name = std::iter::once(policy.name.clone());
        name.chain(rules(&policy.qos)).chain([policy.disks.join(", ")]).collect()
    };
    table(columns, policies.iter().map(row))
}

fn rules(due: &Due) -> [String; 5] {
    let rate = |rate: Option<u32>| rate.map_or_else(|| "-".to_owned(), |rate| rate.to_string());
    [
        due.shares.to_string(),
        rate(Some(due.reservation).filter(|reservation| *reservation > 0)),
        rate(due.limit),
        due.bytes_limit.map_or_else(|| "-".to_owned(), |limit| limit.human()),
        rate(due.flash_limit),
    ]
}
