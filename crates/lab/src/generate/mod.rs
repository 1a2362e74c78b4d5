//! Generates the workloads of published experiments, reconstructed from the publications.
//!
//! Each generator is one file and one row of [`GENERATORS`]. The parameters of a generator default
//! to the published values. Parameters that were not published are fitted to the published results,
//! and their descriptions say so. The same parameters and seed give the same requests on every
//! host.
//!
//! A generator creates an [`Experiment`]: disks, the cache of the published set-up, and a load. In
//! an *open* load, each request has a fixed time. In a *closed* load, each client sends its next
//! request after the reply to the previous one. [`run`] runs an experiment through the engine in
//! virtual time.
//!
//! Units: bytes and nanoseconds. Names with `percent` are in per cent.

mod calibration;
mod common;
mod contenders;
mod dss;
mod dvdstore;
mod hm;
mod parameters;
mod proxy;
mod rand_write;
pub mod run;
mod seq_write;
#[cfg(test)]
mod tests;
mod vdi;
mod vmmark;
mod zipf;

use std::fmt;

pub use parameters::{Bytes, Parameter};

use hob_trace::{Op, Record};
use parameters::Parameters;

/// All workload generators.
pub const GENERATORS: &[GeneratorInfo] = &[
    row::<hm::Hm>(),
    row::<proxy::Proxy>(),
    row::<dss::Dss>(),
    row::<dvdstore::DvdStore>(),
    row::<calibration::Calibration>(),
    row::<vdi::Vdi>(),
    row::<vmmark::VmMark>(),
    row::<seq_write::SeqWrite>(),
    row::<rand_write::RandWrite>(),
    row::<zipf::ZipfLoad>(),
    row::<contenders::Contenders>(),
];

/// A workload generator.
#[derive(Debug)]
pub struct GeneratorInfo {
    /// Name of the generator that users type.
    pub name: &'static str,
    /// Summary of the generator in one line.
    pub summary: &'static str,
    /// The publication that describes the reproduced experiment.
    pub source: &'static str,
    /// Parameters of the generator with their defaults.
    pub parameters: fn() -> Vec<Parameter>,
    experiment: fn(&[Setting<'_>]) -> Result<Experiment, ParameterError>,
}

impl GeneratorInfo {
    /// Returns the generator with this name.
    pub fn find(name: &str) -> Result<&'static GeneratorInfo, ParameterError> {
        GENERATORS.iter().find(|info| info.name == name).ok_or_else(|| {
            let names: Vec<&str> = GENERATORS.iter().map(|info| info.name).collect();
            ParameterError(format!("there is no generator {name}; there are {}", names.join(", ")))
        })
    }

    /// Returns the disks and the load that the generator creates with these `key=value` settings. A
    /// later setting of the same key takes precedence.
    pub fn experiment<S: AsRef<str>>(&self, settings: &[S]) -> Result<Experiment, ParameterError> {
        let mut pairs = Vec::with_capacity(settings.len());
        for setting in settings {
            let setting = setting.as_ref();
            let pair = setting
                .split_once('=')
                .ok_or_else(|| ParameterError(format!("{}: expected key=value, not {setting}", self.name)))?;
            pairs.push((pair.0.trim(), pair.1.trim()));
        }
        (self.experiment)(&pairs)
    }
}

/// Name and value of a parameter as text.
type Setting<'a> = (&'a str, &'a str);

/// Reason why a generator, its name or one of its parameters is invalid, in one line with a correct
/// alternative.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParameterError(pub String);

/// Disks, the cache of the published set-up, and a load on the disks.
#[derive(Debug)]
pub struct Experiment {
    /// Sizes of the disks, bytes.
    pub disks: Vec<u64>,
    /// Total cache size of the published set-up after scaling, bytes; 0 without a cache.
    pub cache_bytes: u64,
    /// Cache block size of the published set-up, bytes.
    pub block_bytes: u32,
    /// Number of requests at the start that warm the cache and are not measured.
    pub warmup: u64,
    /// Requests to the disks.
    pub load: Load,
}

/// Requests to the disks of an experiment, and their times.
pub enum Load {
    /// An open load: each request has its own time.
    Open(Box<dyn Iterator<Item = Record> + Send>),
    /// A closed load: replies determine the times of further requests.
    Closed(Box<dyn Clients + Send>),
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Load::Open(_) => f.write_str("Open"),
            Load::Closed(clients) => write!(f, "Closed({})", clients.count()),
        }
    }
}

/// Clients that send their next request only after a reply (a closed load).
pub trait Clients {
    /// Returns the number of clients.
    fn count(&self) -> u32;

    /// Returns a client's next request after its last reply, or `None` if the client has ended.
    fn next(&mut self, client: u32) -> Option<Turn>;
}

/// The think time and the next request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Time between the last reply and this request, nanoseconds.
    pub think_ns: u64,
    /// Operation of the request.
    pub op: Op,
    /// Offset on the disk, bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Number of the disk.
    pub disk: u16,
    /// Number that the generator gives the request: twice the type of the transaction, plus 1 for
    /// the last request of the transaction. The generator `calibration` uses the number of the
    /// pass.
    pub tag: u32,
}

impl Experiment {
    /// Returns the requests as a trace. Clients of a closed load take turns with `turn_ns` between
    /// requests. Only a replay determines the real times of a closed load.
    pub fn into_records(self, turn_ns: u64) -> Box<dyn Iterator<Item = Record> + Send> {
        let mut clients = match self.load {
            Load::Open(records) => return records,
            Load::Closed(clients) => clients,
        };
        let count = clients.count();
        let (mut turn, mut ended) = (0u64, vec![false; count as usize]);
        Box::new(std::iter::from_fn(move || {
            while !ended.iter().all(|ended| *ended) {
                let client = (turn % u64::from(count)) as u32;
                turn += 1;
                if ended[client as usize] {
                    continue;
                }
                match clients.next(client) {
                    Some(Turn { op, offset, len, disk, .. }) => {
                        return Some(Record { at_ns: (turn - 1) * turn_ns, offset, len, op, disk });
                    }
                    None => ended[client as usize] = true,
                }
            }
            None
        }))
    }
}

/// A generator: name, parameters, and the creation of an experiment.
trait Generate: Parameters {
    const NAME: &'static str;
    const SUMMARY: &'static str;
    const SOURCE: &'static str;

    /// Returns the experiment. Each parameter is within its range. The error describes a parameter
    /// that is invalid in combination with others.
    fn experiment(&self) -> Result<Experiment, String>;
}

const fn row<G: Generate>() -> GeneratorInfo {
    GeneratorInfo {
        name: G::NAME,
        summary: G::SUMMARY,
        source: G::SOURCE,
        parameters: || G::default().list(),
        experiment: |settings| {
            let mut generator = G::default();
            let experiment = settings
                .iter()
                .try_for_each(|(name, text)| generator.set(name, text))
                .and_then(|()| generator.check())
                .and_then(|()| generator.experiment());
            experiment.map_err(|why| ParameterError(format!("{}: {why}", G::NAME)))
        },
    }
}
