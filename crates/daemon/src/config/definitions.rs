//! Checks of hob.toml definitions, by the same rules as for commands.

use std::str::FromStr;

use hob_control::{CacheEnable, Qos, QosPatch};
use hob_engine::admission::Admission;
use hob_engine::command::{Copies, DestageOrder, Layout, Mode};
use hob_engine::granularity::Fill;
use hob_engine::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};
use hob_storage::pool::SEGMENT_BYTES_MIN;

use crate::cache_settings::{CacheContext, DEVICES_FOR_COPIES, new_spec, policy_name};
use crate::state::patched_qos;

/// Numbers of a pool's devices: on this host, and on other hosts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolShape {
    pub(crate) devices: usize,
    pub(crate) peers: usize,
}

/// A pool in which every valid cache is possible.
const IDEAL: PoolShape = PoolShape { devices: DEVICES_FOR_COPIES, peers: 1 };

impl PoolShape {
    fn context(self) -> CacheContext {
        CacheContext { segment_bytes: SEGMENT_BYTES_MIN, devices: self.devices, peers: self.peers }
    }
}

/// Returns the errors in cache settings that do not depend on the pool: the setting and the reason.
pub(crate) fn cache_faults(enable: &CacheEnable) -> Vec<(&'static str, String)> {
    let settings = &enable.settings;
    let mut faults = Vec::new();
    let mut note = |key, fault: Option<String>| faults.extend(fault.map(|what| (key, what)));
    note("preset", settings.preset.as_deref().and_then(|name| fault_of(hob_engine::preset::preset(name))));
    note("mode", word::<Mode>(&settings.mode));
    note("layout", word::<Layout>(&settings.layout));
    note("admission", word::<Admission>(&settings.admission));
    note("fill", word::<Fill>(&settings.fill));
    note("destage_order", word::<DestageOrder>(&settings.destage_order));
    note("copies", word::<Copies>(&settings.copies));
    note("policy", settings.policy.as_deref().and_then(|name| fault_of(policy_name(name))));
    let bad_block = settings.block_size.filter(|size| {
        let bytes = size.bytes();
        !bytes.is_power_of_two() || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&bytes)
    });
    let why = |size| format!("block_size = {size}: the value must be a power of two from 4K to 1M");
    note("block_size", bad_block.map(why));
    for (key, percent) in [
        ("dirty_start", settings.dirty_start),
        ("dirty_stop", settings.dirty_stop),
        ("dirty_full", settings.dirty_full),
    ] {
        let beyond = percent.filter(|percent| *percent > 100);
        note(
            key,
            beyond.map(|percent| format!("{key} = {percent}: the value must be a percentage, 0 to 100")),
        );
    }
    if faults.is_empty() {
        faults.extend(fault_in_pool(enable, IDEAL).map(|what| ("", what)));
    }
    faults
}

/// Returns why a cache with valid settings cannot be created in a pool of this shape.
pub(crate) fn fault_in_pool(enable: &CacheEnable, shape: PoolShape) -> Option<String> {
    fault_of(new_spec(enable.pool.clone(), enable.size, &enable.settings, shape.context()))
}

/// Checks the entitlement of a disk.
pub(crate) fn qos_fault(patch: &QosPatch) -> Result<(), String> {
    if patch.policy.is_some() && (QosPatch { policy: None, ..patch.clone() }) != QosPatch::default() {
        return Err(
            "a disk with a storage policy cannot have its own shares, reservation or limits".to_owned()
        );
    }
    patched_qos(Qos::default(), patch).map(drop)
}

fn word<T: FromStr<Err: std::fmt::Display>>(text: &Option<String>) -> Option<String> {
    text.as_deref().and_then(|text| fault_of(text.parse::<T>()))
}

fn fault_of<T, E: std::fmt::Display>(result: Result<T, E>) -> Option<String> {
    result.err().map(|error| error.to_string())
}
