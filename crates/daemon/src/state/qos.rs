//! State of entitlements, storage policies and datastores.

use hob_control::{DatastorePatch, Qos, QosPatch, Size};
use hob_engine::qos::{RATE_MAX, SHARES_MAX};
use serde::{Deserialize, Serialize};

/// Default latency at which a datastore is throttled, milliseconds, as for Storage I/O Control.
pub(crate) const LATENCY_MS_DEFAULT: u32 = 30;

/// Maximum latency that can be configured, in milliseconds.
const LATENCY_MS_MAX: u32 = 60_000;

/// Maximum configurable number of I/Os in flight.
const DEPTH_MAX: u32 = 4096;

/// Returns an error if a value of an entitlement is out of range. Shards rely on this check, so all
/// input passes through it: commands, hob.toml, the state file, other hosts.
pub(crate) fn check_qos(qos: &Qos) -> Result<(), String> {
    let Qos { shares, reservation, limit, bytes_limit, flash_limit } = *qos;
    if !(1..=SHARES_MAX).contains(&shares) {
        return Err(format!("shares are low, normal, high or 1 to {SHARES_MAX}, not '{shares}'"));
    }
    if limit == Some(0) || flash_limit == Some(0) || bytes_limit == Some(Size(0)) {
        return Err("a limit of 0 would permit no I/O".to_owned());
    }
    let rates = [("reservation", Some(reservation)), ("limit", limit), ("limit", flash_limit)];
    for (what, rate) in rates {
        if let Some(rate) = rate.filter(|rate| *rate > RATE_MAX) {
            return Err(format!("a {what} of {rate} units a second is more than {RATE_MAX}"));
        }
    }
    match limit {
        Some(limit) if limit < reservation => {
            Err(format!("a limit of {limit} units a second is below the reservation of {reservation}"))
        }
        _ => Ok(()),
    }
}

/// Returns an entitlement changed by `patch`. A limit of 0 removes the limit.
pub(crate) fn patched_qos(before: Qos, patch: &QosPatch) -> Result<Qos, String> {
    let rate = |value: Option<u32>, before: Option<u32>| value.or(before).filter(|rate| *rate > 0);
    let shares = match patch.shares.as_deref() {
        None => before.shares,
        Some("low") => 500,
        Some("normal") => 1000,
        Some("high") => 2000,
        Some(number) => number
            .parse()
            .map_err(|_| format!("shares are low, normal, high or 1 to {SHARES_MAX}, not '{number}'"))?,
    };
    let wanted = Qos {
        shares,
        reservation: patch.reservation.unwrap_or(before.reservation),
        limit: rate(patch.limit, before.limit),
        bytes_limit: patch.bytes_limit.or(before.bytes_limit).filter(|limit| *limit > Size(0)),
        flash_limit: rate(patch.flash_limit, before.flash_limit),
    };
    check_qos(&wanted)?;
    Ok(wanted)
}

/// The entitlement of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskQosSpec {
    /// Name of the storage policy that applies; `own` is ignored then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) policy: Option<String>,
    /// The disk's own entitlement.
    pub(crate) own: Qos,
}

/// A storage policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PolicyState {
    pub(crate) name: String,
    /// The entitlement of each disk with this policy.
    pub(crate) qos: Qos,
}

/// Settings of a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DatastoreState {
    pub(crate) name: String,
    /// How hob limits the number of I/Os in flight to the datastore.
    pub(crate) control: ControlSpec,
    /// Latency in milliseconds above which the datastore is throttled. With `knee`, used until the
    /// knee is known.
    pub(crate) latency_ms: u32,
    /// Capacity in units per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) capacity: Option<u32>,
}

impl DatastoreState {
    /// Creates the default settings of a datastore.
    pub(crate) fn new(name: &str) -> DatastoreState {
        let (name, control) = (name.to_owned(), ControlSpec::Off);
        DatastoreState { name, control, latency_ms: LATENCY_MS_DEFAULT, capacity: None }
    }

    /// Returns the settings changed by `patch`.
    pub(crate) fn patched(&self, patch: &DatastorePatch) -> Result<DatastoreState, String> {
        let mut spec = self.clone();
        if let Some(control) = &patch.control {
            spec.control = control.parse().map_err(|()| {
                format!("a datastore's control is off, auto, knee or depth:1 to depth:4096, not '{control}'")
            })?;
        }
        if let Some(latency_ms) = patch.latency_ms {
            spec.latency_ms = latency_ms;
        }
        if let Some(capacity) = patch.capacity {
            spec.capacity = Some(capacity).filter(|capacity| *capacity > 0);
        }
        spec.check()?;
        Ok(spec)
    }

    /// Returns an error if a setting is out of range.
    pub(crate) fn check(&self) -> Result<(), String> {
        match (self.control, self.latency_ms) {
            (ControlSpec::Depth(depth), _) if !(1..=DEPTH_MAX).contains(&depth) => {
                Err(format!("the depth of a datastore must be 1 to {DEPTH_MAX}, not {depth}"))
            }
            (_, latency_ms) if !(1..=LATENCY_MS_MAX).contains(&latency_ms) => {
                Err(format!("the latency limit must be 1 to {LATENCY_MS_MAX} ms, not {latency_ms}"))
            }
            _ => Ok(()),
        }
    }
}

/// How the number of I/Os in flight to a datastore is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ControlSpec {
    /// No limit.
    Off,
    /// The limit depends on the datastore's latency.
    Auto,
    /// The limit depends on the datastore's latency. The threshold is the latency at the knee of
    /// the datastore's throughput.
    Knee,
    /// A fixed number of I/Os.
    Depth(u32),
}

impl ControlSpec {
    /// Returns true if the limit depends on the datastore's latency.
    pub(crate) fn is_by_latency(self) -> bool {
        matches!(self, ControlSpec::Auto | ControlSpec::Knee)
    }
}

impl std::fmt::Display for ControlSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ControlSpec::Off => f.write_str("off"),
            ControlSpec::Auto => f.write_str("auto"),
            ControlSpec::Knee => f.write_str("knee"),
            ControlSpec::Depth(depth) => write!(f, "depth:{depth}"),
        }
    }
}

impl std::str::FromStr for ControlSpec {
    type Err = ();

    fn from_str(text: &str) -> Result<ControlSpec, ()> {
        match text {
            "off" => Ok(ControlSpec::Off),
            "auto" => Ok(ControlSpec::Auto),
            "knee" => Ok(ControlSpec::Knee),
            _ => {
                let depth = text.strip_prefix("depth:").and_then(|depth| depth.parse().ok());
                depth.filter(|depth| (1..=DEPTH_MAX).contains(depth)).map(ControlSpec::Depth).ok_or(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// VMware Storage I/O Control has the levels low, normal and high: 500, 1000 and 2000 shares.
    #[test]
    fn levels_of_shares_are_those_of_storage_io_control() {
        for (level, shares) in [("low", 500), ("normal", 1000), ("high", 2000)] {
            let patch = QosPatch { shares: Some(level.to_owned()), ..QosPatch::default() };
            assert_eq!(patched_qos(Qos::default(), &patch).unwrap().shares, shares, "{level}");
        }
        assert_eq!(Qos::default().shares, 1000, "normal is the default");
    }
}
