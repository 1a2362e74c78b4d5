//! The hob.toml service: compares the file with the running configuration, and applies the file
//! ([0036](../../../../../docs/decisions/0036-config-apply.md)).
//!
//! Disks and pools that were added by command are not in the file and do not count as differences.
//! The service saves the file's definitions at each reload. So it can recognise entries that were
//! changed or deleted after that reload. [`differences`] finds the differences, and [`changes`]
//! resolves them through the services that commands use.

mod additions;
mod changes;
mod differences;
mod disk_differences;
mod new_pool;
mod path_order;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use hob_control::{ConfigApplied, ConfigDiff, ConfigDifference, ConfigRemedy};
use tokio::time::Instant;

use super::disks::Disks;
use super::flash::blocking;
use super::pools::Pools;
use super::qos::QosService;
use super::registry::{Inner, PendingChange, Registry, StatePart};
use super::tasks::Tasks;
use crate::Plan;
use crate::api_error::{ApiError, Result};
use crate::background::spawn;
use crate::config::{Accepted, Config};
use crate::shard_api::in_time;
use crate::state::State;
use crate::watchdog::contained;
use additions::{Additions, first_additions};
use changes::Change;
use differences::{Found, definitions_of, differences, dropped_device, tuned_by};
use path_order::{Step, in_order, takes_path};

/// Time after the daemon's start in which guests connect again. Changes that would close the
/// guests' sockets or disks wait this long.
const GUESTS_RETURN: Duration = Duration::from_secs(10);

/// Interval between two checks whether changes that wait can be made.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// Maximum time that the daemon's start waits for the changes of hob.toml. After this time, the
/// start ends and the changes continue in the background. Otherwise a change that waits for a drain
/// would delay the control API and clients that connect.
const START_MAX: Duration = Duration::from_secs(15);

/// Prefix of the keys in the saved definitions for changes that the last reload did not make.
const UNAPPLIED: &str = "unapplied ";

/// Maximum time for finding out which devices of pools are regular files.
const LOOK_MAX: Duration = Duration::from_secs(1);

service! {
    /// The hob.toml service; see the module.
    #[derive(Clone, Debug)]
    pub(crate) struct HobToml {
        registry: Arc<Registry>,
        tasks: Tasks,
        qos: QosService,
        pools: Pools,
        disks: Disks,
    } with {
        /// Configuration at the daemon's start.
        running: Arc<OnceLock<Box<Config>>>,
        definitions: Arc<Mutex<Definitions>>,
        /// Locked while the file is applied: at the start, when guests have had time to connect
        /// again, or by command.
        applying: Arc<tokio::sync::Mutex<()>>,
        /// True if `hob config apply` has saved a copy of its hob.toml since the daemon's start.
        /// The hob.toml of the start then does not replace this copy. Locked while hob writes the
        /// copy.
        is_copy_applied: Arc<Mutex<bool>>,
    }
}

/// Definitions of hob.toml when it was last read, by kind and name.
#[derive(Debug, Default)]
struct Definitions(BTreeMap<String, String>);

impl StatePart for Mutex<Definitions> {
    fn add_to(&self, state: &mut State) {
        state.definitions = self.lock().unwrap_or_else(PoisonError::into_inner).0.clone();
    }
}

impl HobToml {
    pub(super) fn state_part(&self) -> Arc<dyn StatePart> {
        self.definitions.clone()
    }

    /// Reads the definitions of the last reload from the saved state.
    pub(super) fn restore(&self, state: &State) {
        self.definitions().0 = state.definitions.clone();
    }

    /// Returns the definition of an object when hob.toml was last read.
    #[cfg(test)]
    pub(super) fn definition(&self, subject: &str) -> Option<String> {
        self.definitions().0.get(subject).cloned()
    }

    fn definitions(&self) -> MutexGuard<'_, Definitions> {
        self.definitions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the configuration at the daemon's start in memory, for later comparisons.
    pub(crate) fn set(&self, config: Box<Config>) {
        self.registry.inner().config_refused = config.refused().map(str::to_owned);
        let _ = self.running.set(config);
    }

    /// Reports in health that a reload or `hob config apply` failed as a whole, until one succeeds.
    pub(crate) fn note_failed_reload(&self, why: &str) {
        // Without a configuration file, a reload replaces only the running program.
        if self.running.get().is_none_or(|running| running.path().is_none()) {
            return;
        }
        let why = why.lines().collect::<Vec<_>>().join("; ");
        self.registry.inner().config_refused = Some(format!(
            "the last reload or 'hob config apply' failed, so the daemon does not use the present hob.toml: {why}. Remove \
             the cause, and reload again or use 'hob config apply'"
        ));
    }

    /// Compares the present hob.toml with the running configuration.
    pub(crate) async fn diff(&self) -> Result<ConfigDiff> {
        let (running, config) = self.read_config().await?;
        let found = self.found(running, &config).await;
        self.keep_pending(&found);
        Ok(ConfigDiff {
            file: config.file_name(),
            differences: found.into_iter().map(|it| it.difference).collect(),
        })
    }

    /// Applies hob.toml to the running configuration. Changes that empty a cache or remove an
    /// object need `yes`.
    pub(crate) async fn apply(&self, yes: bool) -> Result<ConfigApplied> {
        let turn = self.applying.clone().try_lock_owned().map_err(|_| {
            ApiError::conflict("hob.toml is being applied already")
                .hint("'hob tasks' shows the changes in progress; repeat the command when they have ended")
        })?;
        let (running, config) =
            self.read_config().await.inspect_err(|error| self.note_failed_reload(&error.problem.error))?;
        let service = self.clone();
        let found = self.found(running, &config).await;
        self.tasks
            .run("config apply", String::new(), async move {
                let (applied, mut unmade) = service.make_all(found, yes).await;
                // The operator sees which changes failed and decides whether to try again, so hob
                // does not retry them.
                unmade.iter_mut().for_each(|it| it.is_delayed = false);
                {
                    let mut inner = service.registry.inner();
                    inner.config_pending = unmade;
                    // The daemon uses this version of the file, which has no mistakes, from now on.
                    inner.config_refused = None;
                }
                service.note_definitions(&config);
                service.keep_applied(config).await;
                drop(turn);
                service.registry.save().await?;
                Ok(applied)
            })
            .await
    }

    /// Saves a copy of the hob.toml with which the daemon started, unless a newer file was applied
    /// in the meantime.
    pub(crate) async fn keep_started(self, accepted: Accepted) {
        let is_copy_applied = self.is_copy_applied.clone();
        let keep = move || {
            let is_applied = is_copy_applied.lock().unwrap_or_else(PoisonError::into_inner);
            if !*is_applied {
                accepted.keep();
            }
        };
        if let Err(error) = blocking(move || contained(keep)).await {
            tracing::warn!("hob.toml: {error}");
        }
    }

    /// Saves a copy of a hob.toml that was applied. If hob.toml is invalid at the next start, the
    /// daemon uses the saved copy. Without this call, that copy would be the hob.toml before the
    /// apply.
    async fn keep_applied(&self, config: Config) {
        let has_same_state = self.running.get().is_some_and(|running| running.state_dir == config.state_dir);
        let Some(accepted) = config.to_keep().filter(|_| has_same_state) else { return };
        let is_copy_applied = self.is_copy_applied.clone();
        let keep = move || {
            if let Err(error) = Plan::check_names(&config) {
                tracing::warn!(
                    "the applied hob.toml is not saved for a start with an invalid hob.toml: {error:#}"
                );
                return;
            }
            let mut is_applied = is_copy_applied.lock().unwrap_or_else(PoisonError::into_inner);
            *is_applied = true;
            accepted.keep();
        };
        if let Err(error) = blocking(move || contained(keep)).await {
            tracing::warn!("hob.toml: {error}");
        }
    }

    /// At the daemon's start, applies the changes that were made in hob.toml since the last reload,
    /// and saves the state. Changes that take longer than [`START_MAX`] continue in the background.
    pub(super) async fn apply_at_start(&self, config: &Config) {
        let (service, config) = (self.clone(), config.clone());
        let applying = spawn(async move {
            let turn = service.applying.lock().await;
            service.apply_changed(&config).await;
            drop(turn);
            service.save_at_start().await;
        });
        match tokio::time::timeout(START_MAX, applying).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("hob.toml: its changes were not applied: {error}"),
            Err(_) => {
                tracing::warn!(
                    "hob.toml was changed, and its changes are not applied after {} s; hob continues with them \
                     ('hob tasks')",
                    START_MAX.as_secs()
                );
                self.save_at_start().await;
            }
        }
    }

    /// Saves the state. A failure does not end the start, because the state in memory is intact and
    /// guests need their disks; health reports the failure.
    async fn save_at_start(&self) {
        if let Err(error) = self.registry.save().await {
            tracing::error!("cannot save the state: {error}; the daemon continues with the state in memory");
        }
    }

    /// Applies the changes in hob.toml since the last reload, except those that empty a cache or
    /// remove an object. Differences that were made by command are logged and not resolved. Changes
    /// for which guests must be disconnected are made later, because guests are about to connect
    /// again.
    pub(super) async fn apply_changed(&self, config: &Config) {
        let before = self.definitions().0.clone();
        let now = definitions_of(config);
        let refused = self.registry.inner().caches_refused.clone();
        let is_refused = |it: &ConfigDifference| {
            let disk = it.subject.strip_prefix("disk ").filter(|_| it.key == "cache");
            disk.is_some_and(|disk| refused.contains_key(disk))
        };
        // A new entry was already created at the start.
        let is_meant = |it: &ConfigDifference| {
            let is_changed = before.get(&it.subject).is_some_and(|text| Some(text) != now.get(&it.subject));
            let is_dropped = dropped_by(it).is_some_and(|device| before.contains_key(&device));
            is_changed || is_dropped || before.contains_key(&unapplied_key(it)) || is_refused(it)
        };
        let mut found = self.found(config, config).await;
        // The start has just tried to create the pools that are new in hob.toml, except those whose
        // creation needs '--yes'.
        found.retain(|it| {
            let is_tried = it.difference.is_added() && it.difference.by == ConfigRemedy::Apply;
            let pool = it.difference.subject.strip_prefix("pool ").filter(|_| is_tried);
            pool.is_none_or(|pool| !self.registry.inner().pools.contains_key(pool))
        });
        let (changed, other): (Vec<Found>, Vec<Found>) =
            found.into_iter().partition(|found| is_meant(&found.difference));
        for found in &other {
            let ConfigDifference { file, running, .. } = &found.difference;
            let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
            tracing::info!(
                "{} was changed by command: hob.toml has {}, the daemon has {}; 'hob config diff' shows all differences",
                found.difference.what(),
                value(file),
                value(running)
            );
        }
        let dropped: Vec<String> = changed.iter().filter_map(|it| dropped_by(&it.difference)).collect();
        let (mut later, changed): (Vec<Found>, Vec<Found>) = changed.into_iter().partition(waits_for_guests);
        // A change that takes a path is delayed together with the change that releases the path.
        let mut changed = changed;
        loop {
            let (with_them, others): (Vec<Found>, Vec<Found>) =
                changed.into_iter().partition(|found| takes_path(found, &later));
            changed = others;
            if with_them.is_empty() {
                break;
            }
            later.extend(with_them);
        }
        let (mut applied, mut pending) = self.make_all(changed, false).await;
        // A start also reports settings without effect that were not changed.
        applied.notes = self.qos.without_effect();
        applied.notes.extend(self.disks.timeouts_without_effect());
        log(&applied, &pending);
        // Health reports the disk of a cache that cannot be created.
        pending.retain(|it| !is_refused(&it.difference));
        let waiting =
            |it: Found| PendingChange { difference: it.difference, failure: None, is_delayed: false };
        pending.extend(later.into_iter().map(waiting));
        let has_later = pending.iter().any(|it| it.is_delayed || it.waits_for_guests());
        self.registry.inner().config_pending = pending;
        self.note_definitions(config);
        self.definitions().0.extend(dropped.into_iter().map(|device| (device, "dropped".to_owned())));
        if has_later {
            spawn(self.clone().apply_later(config.clone()));
        }
    }

    /// Makes the changes that could not be made at once. Some wait until guests have had the time
    /// [`GUESTS_RETURN`] to connect again after the daemon's start. Others wait for the end of
    /// another operation, such as the recovery of a cache.
    async fn apply_later(self, config: Config) {
        let start = Instant::now();
        loop {
            tokio::time::sleep(RETRY_EVERY).await;
            let guests_had_time = start.elapsed() >= GUESTS_RETURN;
            {
                let inner = self.registry.inner();
                let pending = &inner.config_pending;
                if !pending.iter().any(|it| it.is_delayed || it.waits_for_guests()) {
                    return;
                }
                if !pending.iter().any(|it| is_due(&inner, it, guests_had_time)) {
                    continue;
                }
            }
            self.apply_due(&config, guests_had_time).await;
        }
    }

    /// Makes the waiting changes that are possible now.
    async fn apply_due(&self, config: &Config, guests_had_time: bool) {
        // Wait for a command that is applying a newer file, because that file may withdraw the
        // changes.
        let turn = self.applying.lock().await;
        let found = self.found(config, config).await;
        // The changes stay in the list until they are made, which may take long.
        let waiting: Vec<PendingChange> = {
            let inner = self.registry.inner();
            let due = inner.config_pending.iter().filter(|it| is_due(&inner, it, guests_had_time));
            due.cloned().collect()
        };
        // An operator may have made or withdrawn a waiting change in the meantime.
        let is_waiting = |found: &Found| waiting.iter().any(|it| it.is_same(&found.difference));
        let (applied, unmade) = self.make_all(found.into_iter().filter(is_waiting).collect(), false).await;
        log(&applied, &unmade);
        {
            let mut inner = self.registry.inner();
            let is_in = |list: &[PendingChange], it: &PendingChange| {
                list.iter().any(|other| other.is_same(&it.difference))
            };
            inner.config_pending.retain(|it| !is_in(&waiting, it) && !is_in(&unmade, it));
            inner.config_pending.extend(unmade);
        }
        self.note_unapplied();
        drop(turn);
        if let Err(error) = self.registry.save().await {
            tracing::warn!("hob.toml: {error}");
        }
    }

    async fn read_config(&self) -> Result<(&Config, Config)> {
        let no_file = || {
            ApiError::conflict(
                "this daemon has no configuration file: 'hob serve' is configured by its command line",
            )
        };
        let running = self.running.get().ok_or_else(no_file)?;
        let path = running.path().ok_or_else(no_file)?.to_owned();
        let read = blocking(move || contained(|| Config::load(&path))).await?;
        let config = read.map_err(|error| {
            let what = error.to_string().lines().collect::<Vec<_>>().join("; ");
            ApiError::invalid(what).hint("correct the file; nothing was changed")
        })?;
        Ok((running, config))
    }

    async fn found(&self, running: &Config, config: &Config) -> Vec<Found> {
        let files = files_of(config).await;
        let before = self.definitions().0.clone();
        differences(&self.registry, &self.qos, running, config, &before, &files)
    }

    /// Removes the pending changes whose differences no longer exist.
    fn keep_pending(&self, found: &[Found]) {
        let is_found = |it: &PendingChange| found.iter().any(|found| it.is_same(&found.difference));
        self.registry.inner().config_pending.retain(is_found);
    }

    /// Makes the changes, and returns those that were not made. Changes that empty a cache or
    /// remove an object need `yes`.
    async fn make_all(&self, found: Vec<Found>, yes: bool) -> (ConfigApplied, Vec<PendingChange>) {
        let (mut applied, mut unmade) = (ConfigApplied::default(), Vec::new());
        let is_made = |difference: &ConfigDifference| yes || difference.by == ConfigRemedy::Apply;
        let mut releases: BTreeMap<usize, Result<()>> = BTreeMap::new();
        let (mut has_qos_changed, mut has_timeout_changed) = (false, false);
        let mut steps: VecDeque<Step> =
            in_order(found, |it| it.change.is_some() && is_made(&it.difference)).into();
        let mut additions = Additions::default();
        while !steps.is_empty() {
            if additions.is_empty() {
                additions = self.begin_additions(first_additions(steps.iter(), is_made));
            }
            let Some(step) = steps.pop_front() else { break };
            let (Found { difference, change }, released) = match step {
                Step::Make(found) => (found, None),
                Step::Release(number, release) => {
                    releases.insert(number, self.make(release).await);
                    continue;
                }
                Step::Move { number, found, back } => {
                    let released = releases.remove(&number).unwrap_or(Ok(()));
                    (found, Some(released.map(|()| back)))
                }
            };
            let what = difference.what();
            let (mut failure, mut is_delayed) = (None, false);
            match change {
                Some(change) if is_made(&difference) => {
                    let (changes_qos, changes_timeout) = (change.changes_qos(), change.changes_timeout());
                    let added = match change {
                        Change::AddDisk(_) => self.next_added(&mut additions).await,
                        _ => None,
                    };
                    let made = match added {
                        Some(added) => added,
                        None => self.make_step(change, released, &difference).await,
                    };
                    match made {
                        Ok(()) => {
                            has_qos_changed |= changes_qos;
                            has_timeout_changed |= changes_timeout;
                            applied.done.push(format!("{what}: {}", effect_of(&difference.action)));
                            continue;
                        }
                        Err(failed) => {
                            applied.failed.push(format!("{what}: {}", failed.error));
                            is_delayed = failed.is_delayed;
                            failure = Some(failed.reason());
                        }
                    }
                }
                Some(_) => applied.left.push(format!(
                    "{what}: {}; 'hob config apply --yes' makes this change",
                    difference.action
                )),
                None => applied.left.push(format!("{what}: {}", difference.action)),
            }
            unmade.push(PendingChange { difference, failure, is_delayed });
        }
        if has_qos_changed {
            applied.notes = self.qos.without_effect();
        }
        if has_timeout_changed {
            applied.notes.extend(self.disks.timeouts_without_effect());
        }
        (applied, unmade)
    }

    /// Makes a change. `released` is the result of the step that released the present paths of the
    /// object, if there was one: the change that restores these paths, or an error.
    async fn make_step(
        &self,
        change: Change,
        released: Option<Result<Box<Change>>>,
        difference: &ConfigDifference,
    ) -> Result<(), Failure> {
        let made = async move {
            match released {
                None => self.make(change).await,
                Some(Err(error)) => Err(error),
                Some(Ok(back)) => self.move_released(change, *back, difference).await,
            }
        };
        self.attempt(difference, made).await
    }

    /// Waits for a change that resolves a difference.
    async fn attempt(
        &self,
        difference: &ConfigDifference,
        change: impl Future<Output = Result<()>>,
    ) -> Result<(), Failure> {
        let is_unavailable = || self.registry.inner().is_unavailable(difference);
        let was_unavailable = is_unavailable();
        change.await.map_err(|error| Failure { error, is_delayed: was_unavailable || is_unavailable() })
    }

    /// Gives a new path to a disk or an export that has released its former path. If that fails,
    /// restores the former path with the change `back`, unless another object has this path now.
    async fn move_released(&self, change: Change, back: Change, difference: &ConfigDifference) -> Result<()> {
        let Err(error) = self.make(change).await else { return Ok(()) };
        let key = match &back {
            Change::AddExport(_, export) => format!("export '{}'", export.name),
            _ => difference.key.clone(),
        };
        let Err(lost) = self.make(back).await else { return Err(error) };
        let what = difference.what();
        tracing::error!("{what}: the disk has no {key} now: {lost}");
        Err(error.hint(format!("the disk has no {key} now, because it cannot use its former path: {lost}")))
    }

    /// Saves the definitions of the file. The definition of a deleted entry is kept until its
    /// object is removed.
    fn note_definitions(&self, config: &Config) {
        let tuned = tuned_by(&self.qos);
        let listed: BTreeSet<String> = config
            .pools
            .iter()
            .flat_map(|pool| pool.devices.iter().map(move |path| dropped_device(&pool.name, path)))
            .collect();
        let mut definitions = self.definitions();
        let inner = self.registry.inner();
        let mut now = definitions_of(config);
        for (subject, text) in std::mem::take(&mut definitions.0) {
            let is_kept = !now.contains_key(&subject) && !listed.contains(&subject);
            if is_kept && inner.is_served(&subject, &tuned) {
                now.insert(subject, text);
            }
        }
        definitions.0 = now;
        drop((inner, definitions));
        self.note_unapplied();
    }

    /// Saves which changes were not made. Otherwise the next reload would assume that a command had
    /// made the present settings.
    fn note_unapplied(&self) {
        let mut definitions = self.definitions();
        let inner = self.registry.inner();
        definitions.0.retain(|key, _| !key.starts_with(UNAPPLIED));
        let pending = inner.config_pending.iter().map(|it| (unapplied_key(&it.difference), String::new()));
        definitions.0.extend(pending);
    }
}

/// Why a change was not made.
struct Failure {
    error: ApiError,
    /// True if hob tries again when the object of the change is available.
    is_delayed: bool,
}

impl Failure {
    /// Returns the reason for `hob health`, without the hint for operators if hob tries again.
    fn reason(self) -> String {
        if self.is_delayed { self.error.problem.error } else { self.error.to_string() }
    }
}

/// Returns the text of an action without its condition: the part from ", unless" on.
fn effect_of(action: &str) -> &str {
    action.split_once(", unless ").map_or(action, |(effect, _)| effect)
}

/// Returns true if a change ends a socket or closes a disk that guests may have used before the
/// daemon's start.
fn waits_for_guests(found: &Found) -> bool {
    let it = &found.difference;
    let is_used = ["read_only", "datastore"].contains(&it.key.as_str())
        || it.key == "vhost_user" && it.running.is_some();
    it.subject.starts_with("disk ") && is_used && it.by == ConfigRemedy::Apply
}

/// Returns true if a change that waits can be made now.
fn is_due(inner: &Inner, it: &PendingChange, guests_had_time: bool) -> bool {
    it.is_delayed && !inner.is_unavailable(&it.difference) || guests_had_time && it.waits_for_guests()
}

/// Logs the changes of hob.toml that were made, and those that were not.
fn log(applied: &ConfigApplied, unmade: &[PendingChange]) {
    let ConfigApplied { done, failed, left, notes } = applied;
    done.iter().for_each(|what| tracing::info!("hob.toml was changed; applied: {what}"));
    let delayed: Vec<&PendingChange> = unmade.iter().filter(|it| it.is_delayed).collect();
    delayed.iter().for_each(|it| tracing::info!("hob.toml was changed: {}", it.reason()));
    let is_delayed =
        |what: &&String| delayed.iter().any(|it| what.starts_with(&format!("{}: ", it.difference.what())));
    failed.iter().filter(|what| !is_delayed(what)).for_each(|what| {
        tracing::error!("hob.toml was changed, and this is not applied: {what}");
    });
    left.iter().for_each(|what| {
        tracing::warn!("hob.toml was changed, and this change is not applied yet: {what}");
    });
    notes.iter().for_each(|note| tracing::warn!("{note}"));
}

/// Returns the key in the saved definitions of a change that was not made.
fn unapplied_key(difference: &ConfigDifference) -> String {
    format!("{UNAPPLIED}{}", difference.what())
}

/// Returns the key in the saved definitions of a device that the file does not list any more.
fn dropped_by(difference: &ConfigDifference) -> Option<String> {
    let pool = difference.subject.strip_prefix("pool ").filter(|_| difference.key == "devices")?;
    let path = difference.running.as_ref().filter(|_| difference.file.is_none())?;
    Some(dropped_device(pool, path))
}

/// Returns the devices of pools with a `size` that are regular files. If a device does not answer,
/// the result is empty.
async fn files_of(config: &Config) -> BTreeSet<String> {
    let sized = config.pools.iter().filter(|pool| pool.size.is_some());
    let paths: Vec<String> = sized.flat_map(|pool| pool.devices.clone()).collect();
    let is_file = |path: &String| std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    let look =
        blocking(move || contained(|| paths.into_iter().filter(is_file).collect::<BTreeSet<String>>()));
    match in_time(LOOK_MAX, look).await {
        Some(Ok(files)) => files,
        _ => BTreeSet::new(),
    }
}
