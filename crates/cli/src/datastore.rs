//! `hob datastore …`: storage that several backings share, and its throttling.

use clap::{ArgGroup, Subcommand};
use hob_control::{Datastore as Store, DatastorePatch};

use super::Global;
use super::output::{duration, print, table};
use super::remote::ask;

/// Manage datastores: storage that several backings share, and its throttling
#[derive(Debug, Subcommand)]
pub(crate) enum Datastore {
    /// List all datastores with their state
    List,
    /// Set how a datastore is throttled, and its capacity
    #[command(group = ArgGroup::new("setting").required(true).multiple(true).args(["throttle", "latency_ms", "capacity"]))]
    Set {
        /// The datastore
        datastore: String,
        /// off; auto: throttle by shares and reservations above a latency limit; knee: like auto, with a measured latency limit; depth:N: at most N I/Os in flight
        #[arg(long, value_name = "CONTROL")]
        throttle: Option<String>,
        /// Latency limit for auto in milliseconds; for knee until hob has measured one [default: 30]
        #[arg(long, value_name = "MS")]
        latency_ms: Option<u32>,
        /// Capacity of the datastore for reservations, units a second; 0: the highest measured throughput
        #[arg(long, value_name = "UNITS")]
        capacity: Option<u32>,
    },
}

pub(super) fn run(command: Datastore, global: &Global) -> anyhow::Result<()> {
    match command {
        Datastore::List => {
            let stores = ask(global, async |client| client.datastores().await)?;
            print(global.output, &stores, |stores| list(stores))
        }
        Datastore::Set { datastore, throttle, latency_ms, capacity } => {
            let patch = DatastorePatch { control: throttle, latency_ms, capacity };
            let store = ask(global, async |client| client.datastore_set(&datastore, &patch).await)?;
            print(global.output, &store, |store| list(std::slice::from_ref(store)))
        }
    }
}

fn list(stores: &[Store]) -> String {
    let columns = "DATASTORE|CONTROL|LATE FROM:|LATENCY:|WINDOW:|IN IT:|WAITING:|RESERVED:|CAPACITY:|DISKS";
    let row = |store: &Store| {
        let is_by_latency = matches!(store.control.as_str(), "auto" | "knee");
        let or_dash = |is_known: bool, text: String| if is_known { text } else { "-".to_owned() };
        let capacity = match (store.capacity, store.peak) {
            (Some(capacity), _) => capacity.to_string(),
            (None, 0) => "-".to_owned(),
            (None, peak) => format!("{peak} seen"),
        };
        vec![
            store.name.clone(),
            store.control.clone(),
            match store.knee_ns {
                Some(knee) => format!("{} (knee)", duration(knee)),
                None => or_dash(is_by_latency, format!("{} ms", store.latency_ms)),
            },
            or_dash(store.latency_ns > 0, duration(store.latency_ns)),
            store.window.map_or_else(|| "-".to_owned(), |window| window.to_string()),
            or_dash(store.control != "off", store.in_flight.to_string()),
            store.waiting.to_string(),
            store.reserved.to_string(),
            capacity,
            store.disks.join(", "),
        ]
    };
    table(columns, stores.iter().map(row))
}
