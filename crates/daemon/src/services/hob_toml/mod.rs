//! The hob.toml service: compares the file with the running configuration, and applies it
//! ([0036](../../../../../docs/decisions/0036-config-apply.md)).
//!
//! Disks and pools that were added by command are not in the file and do not count as differences.
//! The service saves the file's definitions at each reload. So it can recognise entries that were
//! changed or deleted after that reload. [`differences`] finds them, and [`changes`] resolves them
//! through the services that commands use.

mod changes;
mod differences;
mod new_pool;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hob_control::{ConfigApplied, ConfigDiff, ConfigDifference, ConfigRemedy};

use super::disks::Disks;
use super::flash::blocking;
use super::pools::Pools;
use super::qos::QosService;
use super::registry::{Registry, StatePart};
use super::tasks::Tasks;
use crate::api_error::ApiError;
use crate::config::Config;
use crate::state::State;
use crate::watchdog::contained;
use differences::{Found, definitions_of, differences};

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

    /// Takes the definitions of the last reload from the state file.
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

    /// Saves the configuration at the daemon's start, for later comparisons.
    pub(crate) fn set(&self, config: Box<Config>) {
        self.registry.inner().config_refused = config.refused().map(str::to_owned);
        let _ = self.running.set(config);
    }

    /// Compares the present hob.toml with the running configuration.
    pub(crate) async fn diff(&self) -> Result<ConfigDiff, ApiError> {
        let (running, config) = self.read_config().await?;
        let found = self.found(running, &config);
        Ok(ConfigDiff {
            file: config.file_name(),
            differences: found.into_iter().map(|it| it.difference).collect(),
        })
    }

    /// Applies hob.toml to the running configuration. Changes that empty a cache or remove an
    /// object need `yes`.
    pub(crate) async fn apply(&self, yes: bool) -> Result<ConfigApplied, ApiError> {
        let (running, config) = self.read_config().await?;
        let service = self.clone();
        let found = self.found(running, &config);
        self.tasks
            .run("config apply", String::new(), async move {
                let applied = service.make_all(found, yes).await;
                service.note_definitions(&config);
                service.registry.save().await?;
                Ok(applied)
            })
            .await
    }

    /// Applies the changes in hob.toml since the last reload, except those that empty a cache or
    /// remove an object. Logs the remaining changes.
    pub(super) async fn apply_changed(&self, config: &Config) {
        let before = self.definitions().0.clone();
        let now = definitions_of(config);
        let refused = self.registry.inner().caches_refused.clone();
        // A new entry was already created at the start.
        let is_meant = |it: &ConfigDifference| {
            let is_changed = before.get(&it.subject).is_some_and(|text| Some(text) != now.get(&it.subject));
            let disk = it.subject.strip_prefix("disk ").filter(|_| it.key == "cache");
            is_changed || disk.is_some_and(|disk| refused.contains_key(disk))
        };
        let found = self.found(config, config);
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
        let ConfigApplied { done, failed, left } = self.make_all(changed, false).await;
        done.iter().for_each(|what| tracing::info!("hob.toml was changed; applied: {what}"));
        failed.iter().for_each(|what| tracing::error!("hob.toml was changed, and this failed: {what}"));
        left.iter().for_each(|what| {
            tracing::warn!("hob.toml was changed, and this change is not applied yet: {what}")
        });
        self.note_definitions(config);
    }

    async fn read_config(&self) -> Result<(&Config, Config), ApiError> {
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

    fn found(&self, running: &Config, config: &Config) -> Vec<Found> {
        let before = self.definitions().0.clone();
        differences(&self.registry, &self.qos, running, config, &before)
    }

    async fn make_all(&self, found: Vec<Found>, yes: bool) -> ConfigApplied {
        let mut applied = ConfigApplied::default();
        for Found { difference, change } in found {
            let what = difference.what();
            match change {
                Some(change) if yes || difference.by == ConfigRemedy::Apply => {
                    match self.make(change).await {
                        Ok(()) => applied.done.push(format!("{what}: {}", difference.action)),
                        Err(error) => applied.failed.push(format!("{what}: {error}")),
                    }
                }
                Some(_) => applied.left.push(format!(
                    "{what}: {}; 'hob config apply --yes' makes this change",
                    difference.action
                )),
                None => applied.left.push(format!("{what}: {}", difference.action)),
            }
        }
        applied
    }

    /// Saves the definitions of the file. Deleted entries are kept until their objects are removed.
    fn note_definitions(&self, config: &Config) {
        let policies: BTreeSet<String> = self.qos.policies().into_iter().map(|policy| policy.name).collect();
        let mut definitions = self.definitions();
        let inner = self.registry.inner();
        let mut now = definitions_of(config);
        for (subject, text) in std::mem::take(&mut definitions.0) {
            if !now.contains_key(&subject) && inner.is_served(&subject, &policies) {
                now.insert(subject, text);
            }
        }
        definitions.0 = now;
    }
}
