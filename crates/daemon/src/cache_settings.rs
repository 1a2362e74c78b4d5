//! Computes cache settings: takes those of a preset or of the present cache, applies the request's
//! changes, and checks that the result is consistent. Error messages say what the operator can do
//! next.

use hob_control::{CacheSettings, Size};
use hob_engine::admission::Popularity;
use hob_engine::command::{CacheConfig, Copies, Mode};
use hob_engine::policy::{POLICIES, PolicyKind};
use hob_engine::preset::{OneDevice, PRESETS, Preset, Verify, preset};

use crate::api_error::{ApiError, Result, conflict, failed, invalid};
use crate::state::{CacheSpec, DestageSpec, JournalSpec, SharedSize};

/// Maximum size of a cache in bytes.
const SIZE_MAX: u64 = 1 << 60;

/// Maximum shares of a shared cache.
const SHARES_MAX: u32 = 1_000_000;

/// Number of flash devices that a cache with two copies of its data needs.
pub(crate) const DEVICES_FOR_COPIES: usize = 2;

/// Properties of a pool (the flash devices that caches share) that restrict the settings of its
/// caches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheContext {
    /// Segment size in bytes.
    pub(crate) segment_bytes: u64,
    /// Number of devices on this host that allow allocation.
    pub(crate) devices: usize,
    /// Number of the pool's devices that are on other hosts.
    pub(crate) peers: usize,
}

/// Returns the configuration of a new cache, and notes for the operator.
pub(crate) fn new_spec(
    pool: String,
    size: Option<Size>,
    settings: &CacheSettings,
    context: CacheContext,
) -> Result<(CacheSpec, Vec<String>)> {
    let mut spec = of_preset(&PRESETS[0]);
    spec.pool = pool;
    let mut notes = apply(&mut spec, settings, context)?;
    match size {
        Some(size) => spec.size = size,
        None if settings.shared == Some(false) => {
            return Err(ApiError::invalid("a cache that is not shared needs a size")
                .hint("pass a size, or leave out 'shared'"));
        }
        None if settings.preset.as_deref() == Some(PRESETS[0].name) => {
            return Err(ApiError::invalid("the preset vfrc reserves its flash, so the cache needs a size")
                .hint("pass a size, or leave out the preset"));
        }
        None => spec.shared = Some(SharedSize::default()),
    }
    apply_shared(&mut spec, size, settings, context.segment_bytes)?;
    notes.extend(round_up(&mut spec, context.segment_bytes)?);
    Ok((spec, notes))
}

/// Returns the engine's settings for a simulated cache in a pool of two devices, and whether it has
/// a journal.
///
/// # Errors
/// Returns an error if the settings contradict each other or need a second host.
pub fn simulated(
    size: Size,
    settings: &CacheSettings,
    segment_bytes: u64,
) -> anyhow::Result<(CacheConfig, bool)> {
    let context = CacheContext { segment_bytes, devices: DEVICES_FOR_COPIES, peers: 1 };
    let refused = |error: ApiError| anyhow::anyhow!("{error}");
    let (spec, _) = new_spec(String::new(), Some(size), settings, context).map_err(refused)?;
    if spec.copies == Copies::Peer {
        anyhow::bail!(
            "the simulation has only one host; use 2-dirty, which writes as much as a replica on a peer"
        );
    }
    Ok((engine_config(&spec, segment_bytes).map_err(refused)?, spec.journal.is_some()))
}

/// Returns the changed configuration of a cache, and notes for the operator.
pub(crate) fn changed_spec(
    before: &CacheSpec,
    size: Option<Size>,
    settings: &CacheSettings,
    context: CacheContext,
) -> Result<(CacheSpec, Vec<String>)> {
    let mut spec = before.clone();
    let mut notes = apply(&mut spec, settings, context)?;
    if let Some(size) = size {
        spec.size = size;
        spec.shared = None;
    } else if settings.shared == Some(false) {
        spec.shared = None;
    } else if settings.shared == Some(true) && spec.shared.is_none() {
        spec.shared = Some(SharedSize::default());
    }
    apply_shared(&mut spec, size, settings, context.segment_bytes)?;
    if before.shared.is_some() && spec.shared.is_none() {
        notes.push(format!("the cache has a fixed size of {} from now on", spec.size));
    }
    if size.is_some() {
        notes.extend(round_up(&mut spec, context.segment_bytes)?);
    }
    Ok((spec, notes))
}

/// Applies the settings of a shared cache.
fn apply_shared(
    spec: &mut CacheSpec,
    size: Option<Size>,
    settings: &CacheSettings,
    segment_bytes: u64,
) -> Result<()> {
    let CacheSettings { shared, min, max, shares, pin, .. } = settings;
    if size.is_some() && *shared == Some(true) {
        return Err(ApiError::invalid("a shared cache has no size of its own")
            .hint("leave out the size; 'min' and 'max' limit the size that hob chooses"));
    }
    let Some(limits) = &mut spec.shared else {
        if min.is_some() || max.is_some() || shares.is_some() || pin.is_some() {
            return Err(ApiError::invalid("min, max, shares and pin are for shared caches")
                .hint("leave out the size, so that the cache shares the rest of its pool"));
        }
        return Ok(());
    };
    set(&mut limits.min, min);
    set(&mut limits.max, max);
    set(&mut limits.shares, shares);
    set(&mut limits.pin, pin);
    let SharedSize { min, max, shares, .. } = *limits;
    if !(1..=SHARES_MAX).contains(&shares) {
        return Err(invalid!("shares are 1 to {SHARES_MAX}, not {shares}"));
    }
    if max.bytes() > 0 && max < min {
        return Err(invalid!("the minimum of {min} is above the maximum of {max}"));
    }
    // hob later chooses the size within these limits.
    let segments = limits.in_segments(segment_bytes);
    let least = segments.min.checked_mul(segment_bytes).filter(|bytes| *bytes <= SIZE_MAX);
    let least = least.ok_or_else(|| invalid!("a cache of {min} is too large"))?;
    let most = segments.max.saturating_mul(segment_bytes);
    spec.size = Size(spec.size.bytes().max(least).min(most));
    Ok(())
}

/// Converts a cache's configuration into the engine's settings.
pub(crate) fn engine_config(spec: &CacheSpec, segment_bytes: u64) -> Result<CacheConfig> {
    let unknown = || failed!("this hob has no policy '{}'", spec.policy);
    Ok(CacheConfig {
        block_bytes: u32::try_from(spec.block_size.bytes()).unwrap_or(u32::MAX),
        segment_bytes,
        policy: PolicyKind::from_name(&spec.policy).ok_or_else(unknown)?,
        admission: spec.admission,
        fill: spec.fill,
        mode: spec.mode,
        layout: spec.layout,
        destage: spec.destage.engine(),
        copies: spec.copies,
    })
}

/// Returns the settings that give a cache this configuration, without a preset.
pub(crate) fn whole_settings(spec: &CacheSpec) -> CacheSettings {
    CacheSettings {
        preset: None,
        block_size: Some(spec.block_size),
        policy: Some(spec.policy.clone()),
        mode: Some(spec.mode.to_string()),
        persistent: Some(spec.journal.is_some()),
        layout: Some(spec.layout.to_string()),
        admission: Some(spec.admission.to_string()),
        fill: Some(spec.fill.to_string()),
        destage_order: Some(spec.destage.order.to_string()),
        dirty_start: Some(spec.destage.dirty_start),
        dirty_stop: Some(spec.destage.dirty_stop),
        dirty_full: Some(spec.destage.dirty_full),
        dirty_age_max: Some(spec.destage.dirty_age_max),
        copies: Some(spec.copies.to_string()),
        ordered: Some(spec.destage.ordered),
        ram: Some(spec.ram),
        verify: Some(spec.verify.to_string()),
        shared: Some(spec.shared.is_some()),
        min: spec.shared.map(|limits| limits.min),
        max: spec.shared.map(|limits| limits.max),
        shares: spec.shared.map(|limits| limits.shares),
        pin: spec.shared.map(|limits| limits.pin),
    }
}

/// Returns the name of the preset that matches a cache.
pub(crate) fn preset_of(spec: &CacheSpec) -> Option<&'static str> {
    let is_like = |row: &&Preset| {
        let other = of_preset(row);
        let copies =
            spec.copies == row.copies || (spec.copies == Copies::One && row.one_device == OneDevice::OneCopy);
        let place = CacheSpec {
            pool: spec.pool.clone(),
            size: spec.size,
            ram: spec.ram,
            verify: spec.verify,
            copies: spec.copies,
            shared: spec.shared,
            journal: None,
            ..other
        };
        copies
            && row.persistent == spec.journal.is_some()
            && place == CacheSpec { journal: None, ..spec.clone() }
    };
    PRESETS.iter().find(is_like).map(|row| row.name)
}

fn of_preset(row: &Preset) -> CacheSpec {
    CacheSpec {
        pool: String::new(),
        size: Size(0),
        block_size: Size(u64::from(row.block_bytes)),
        policy: row.policy.to_owned(),
        mode: row.mode,
        layout: row.layout,
        admission: row.admission,
        fill: row.fill,
        destage: DestageSpec::of(&row.destage),
        copies: row.copies,
        verify: Verify::default(),
        ram: Size(0),
        journal: row.persistent.then(JournalSpec::new),
        shared: None,
    }
}

/// Applies the settings that the request sets; the others stay. Returns notes for the operator
/// about results that the operator may not expect.
fn apply(spec: &mut CacheSpec, settings: &CacheSettings, context: CacheContext) -> Result<Vec<String>> {
    let CacheSettings {
        preset: preset_name,
        block_size,
        policy,
        mode,
        persistent,
        layout,
        admission,
        fill,
        destage_order,
        dirty_start,
        dirty_stop,
        dirty_full,
        dirty_age_max,
        copies,
        ordered,
        verify,
        ram,
        shared: _,
        min: _,
        max: _,
        shares: _,
        pin: _,
    } = settings;
    let mut notes = Vec::new();
    let row = preset_name.as_deref().map(preset).transpose().map_err(no_word)?;
    if let Some(row) = row {
        let journal = spec.journal.take();
        *spec = CacheSpec {
            pool: spec.pool.clone(),
            size: spec.size,
            ram: spec.ram,
            verify: spec.verify,
            shared: spec.shared,
            ..of_preset(row)
        };
        // A persistent cache keeps its journal.
        spec.journal = spec.journal.take().map(|new| journal.unwrap_or(new));
    }
    let before = spec.mode;
    set_word(&mut spec.mode, mode)?;
    set_word(&mut spec.layout, layout)?;
    set_word(&mut spec.admission, admission)?;
    set_word(&mut spec.fill, fill)?;
    let refuses_writes = matches!(spec.admission.popularity, Popularity::Ghost | Popularity::NthAccess(_))
        || spec.admission.sequential_bytes_max.is_some();
    if spec.mode == Mode::WriteBack && before != Mode::WriteBack && row.is_none() && refuses_writes {
        notes.push(format!(
            "with the admission {}, some writes wait for the backing; 'hob cache set --admission auto' \
            lets flash take all writes",
            spec.admission
        ));
    }
    set_word(&mut spec.destage.order, destage_order)?;
    set_word(&mut spec.copies, copies)?;
    set_word(&mut spec.verify, verify)?;
    set(&mut spec.block_size, block_size);
    set(&mut spec.destage.dirty_start, dirty_start);
    set(&mut spec.destage.dirty_stop, dirty_stop);
    set(&mut spec.destage.dirty_full, dirty_full);
    set(&mut spec.destage.dirty_age_max, dirty_age_max);
    set(&mut spec.destage.ordered, ordered);
    set(&mut spec.ram, ram);
    if let Some(name) = policy {
        spec.policy = policy_name(name)?;
    }
    spec.check().map_err(ApiError::invalid)?;
    set_persistent(spec, *persistent, row)?;
    if copies.is_none()
        && row.is_some_and(|row| row.one_device == OneDevice::OneCopy)
        && spec.copies != Copies::One
        && context.devices < DEVICES_FOR_COPIES
    {
        spec.copies = Copies::One;
        notes.push(format!(
            "pool {} has one device, so there is one copy of dirty data: if that device fails, dirty data is \
            lost; with another device, 'hob cache set --copies 2-dirty' creates a second copy",
            spec.pool
        ));
    }
    check_copies(spec, context)?;
    Ok(notes)
}

/// Applies the persistence setting. Write-back implies a journal. The preset vfrc is volatile by
/// definition.
fn set_persistent(spec: &mut CacheSpec, asked: Option<bool>, row: Option<&'static Preset>) -> Result<()> {
    let is_vfrc = row.is_some_and(|row| row.name == PRESETS[0].name);
    let wanted = match (asked, spec.mode) {
        (Some(false), Mode::WriteBack) => {
            return Err(ApiError::invalid(
                "write-back needs a persistent cache: without a journal a crash would lose acknowledged writes",
            )
            .hint("leave persistence as it is, or choose another mode"));
        }
        (_, Mode::WriteBack) => true,
        (Some(asked), _) => asked,
        (None, _) => spec.journal.is_some(),
    };
    if wanted && is_vfrc {
        return Err(ApiError::invalid("the preset vfrc requires a volatile write-through cache")
            .hint("omit the preset, and pass mode and persistence instead"));
    }
    match wanted {
        false => spec.journal = None,
        true if spec.journal.is_none() => {
            spec.journal = Some(JournalSpec::new());
        }
        true => {}
    }
    Ok(())
}

fn check_copies(spec: &CacheSpec, context: CacheContext) -> Result<()> {
    if spec.copies == Copies::One {
        return Ok(());
    }
    if spec.journal.is_none() {
        return Err(ApiError::invalid(
            "a volatile cache has one copy of its data, because the backing has all of it",
        )
        .hint("make the cache persistent, or use one copy"));
    }
    if spec.copies == Copies::Peer {
        return check_peer(spec, context);
    }
    if context.devices < DEVICES_FOR_COPIES {
        return Err(conflict!(
            "two copies need two flash devices with allocation on, and pool {} has {}",
            spec.pool,
            context.devices
        )
        .hint("add one with 'hob pool add-device', or pass --copies 1"));
    }
    Ok(())
}

fn check_peer(spec: &CacheSpec, context: CacheContext) -> Result<()> {
    if spec.mode != Mode::WriteBack {
        return Err(ApiError::invalid("a replica on a peer contains dirty data, which only write-back has")
            .hint("also pass --mode write-back, or use one copy"));
    }
    if context.peers == 0 {
        return Err(conflict!("pool {} has no flash on a peer", spec.pool)
            .hint("add remote flash with 'hob pool add-device POOL --peer HOST:PORT --size SIZE'"));
    }
    Ok(())
}

pub(crate) fn policy_name(name: &str) -> Result<String> {
    match PolicyKind::from_name(name).map(PolicyKind::info) {
        Some(info) if info.serves => Ok(info.name.to_owned()),
        known => {
            let why = if known.is_some() { "is only for the lab" } else { "does not exist" };
            let names: Vec<_> = POLICIES.iter().filter(|row| row.serves).map(|row| row.name).collect();
            let names = names.join(", ");
            Err(invalid!("the policy '{name}' {why}; there are {names}"))
        }
    }
}

/// Rounds the size up to whole segments.
fn round_up(spec: &mut CacheSpec, segment_bytes: u64) -> Result<Option<String>> {
    let size = spec.size;
    if size.bytes() == 0 {
        return Err(ApiError::invalid("a cache cannot have size 0").hint("'hob cache disable' removes it"));
    }
    let whole =
        size.bytes().div_ceil(segment_bytes).checked_mul(segment_bytes).filter(|bytes| *bytes <= SIZE_MAX);
    spec.size = Size(whole.ok_or_else(|| invalid!("a cache of {size} is too large"))?);
    let (whole, segment) = (spec.size, Size(segment_bytes));
    Ok((whole != size).then(|| format!("{size} is rounded up to {whole}, whole segments of {segment}")))
}

fn set<T: Copy>(part: &mut T, asked: &Option<T>) {
    if let Some(asked) = asked {
        *part = *asked;
    }
}

fn set_word<T>(part: &mut T, asked: &Option<String>) -> Result<()>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    if let Some(asked) = asked {
        *part = asked.parse().map_err(no_word)?;
    }
    Ok(())
}

fn no_word(error: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(error.to_string())
}

#[cfg(test)]
mod tests;
