//! A store in memory, and clients of it that simulate the faults of stores.

use std::collections::BTreeMap;
use std::future::pending;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use tokio::sync::Notify;

use super::super::format::{Manifest, Name, decode_page};
use super::super::store::{Boxed, Objects, Put, StoreError};

/// The object store itself, which all clients share.
#[derive(Clone, Default)]
pub(super) struct Shop(Arc<Mutex<Stock>>);

#[derive(Default)]
struct Stock {
    objects: BTreeMap<Name, Bytes>,
    puts: u64,
    /// Maximum number of objects with data, and the error for puts of further ones.
    data_max: Option<(usize, StoreError)>,
    /// Maximum number of objects, and the error for puts of further ones.
    objects_max: Option<(usize, StoreError)>,
}

/// When a client fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crash {
    /// The change was not made.
    Before,
    /// The change was made, and its reply was lost.
    After,
}

#[derive(Default)]
struct Mood {
    /// Number of changes before the client fails.
    changes_left: Option<(u64, Option<Crash>)>,
    crashed: bool,
    hangs: bool,
    refuses: Option<StoreError>,
    heeds_nothing: bool,
    /// Every n-th change is made, and its reply is lost.
    loses_each: Option<u64>,
    changes: u64,
    /// True if puts of manifests are delayed. The caller gets no reply.
    delays_manifests: bool,
    delayed: Vec<(Name, Bytes, Put)>,
    /// Notification for which the next conditional put waits.
    gate: Option<Arc<Notify>>,
    waits: bool,
}

/// One process's access to the object store.
#[derive(Clone)]
pub(super) struct Client {
    shop: Shop,
    mood: Arc<Mutex<Mood>>,
}

impl Shop {
    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.0.lock().unwrap()
    }

    pub(super) fn client(&self) -> Client {
        Client { shop: self.clone(), mood: Arc::default() }
    }

    pub(super) fn puts(&self) -> u64 {
        self.stock().puts
    }

    pub(super) fn names(&self, folder: &str) -> Vec<Name> {
        let names = self.stock().objects.keys().copied().collect::<Vec<_>>();
        names.into_iter().filter(|name| name.to_string().starts_with(folder)).collect()
    }

    pub(super) fn count(&self, folder: &str) -> usize {
        self.names(folder).len()
    }

    pub(super) fn spoil(&self, name: Name, how: impl Fn(&mut Vec<u8>)) {
        let mut stock = self.stock();
        let mut bytes = stock.objects[&name].to_vec();
        how(&mut bytes);
        stock.objects.insert(name, bytes.into());
    }

    pub(super) fn insert(&self, name: Name, bytes: Vec<u8>) {
        self.stock().objects.insert(name, bytes.into());
    }

    /// Refuses puts of data with this error while the store has this number of objects with data.
    pub(super) fn limit_data(&self, objects: usize, error: StoreError) {
        self.stock().data_max = Some((objects, error));
    }

    /// Refuses puts with this error while the store has this number of objects.
    pub(super) fn limit_objects(&self, objects: usize, error: StoreError) {
        self.stock().objects_max = Some((objects, error));
    }

    pub(super) fn remove(&self, name: Name) -> Bytes {
        self.stock().objects.remove(&name).expect("it was there")
    }

    /// Checks that this manifest names everything in the object store, except fencing manifests.
    pub(super) async fn check_nothing_is_left(&self, manifest: &Manifest) {
        let objects = self.stock().objects.clone();
        let mut named: Vec<Name> = Vec::new();
        let mut generations = BTreeMap::new();
        for (page, generation) in manifest.pages.iter().enumerate().filter(|(_, page)| !page.is_absent()) {
            let name = Name::Page(page as u32, *generation);
            let entries = decode_page(&objects[&name], &manifest.shape, page, *generation).unwrap();
            named.push(name);
            generations
                .extend(entries.iter().enumerate().map(|(at, entry)| ((page * 4096 + at) as u64, *entry)));
        }
        generations.extend(manifest.changes.iter().copied());
        named.extend(
            generations
                .into_iter()
                .filter(|(_, made)| !made.is_absent())
                .map(|(index, made)| Name::Data(index, made)),
        );
        for (name, bytes) in &objects {
            match *name {
                Name::Manifest(number) if number == manifest.sequence => {}
                Name::Manifest(number) => {
                    assert!(Manifest::decode(bytes, number).unwrap().stays, "{name} is needless");
                }
                name => assert!(named.contains(&name), "{name} is left"),
            }
        }
        for name in named {
            assert!(objects.contains_key(&name), "{name} is missing");
        }
    }

    fn put(&self, name: Name, bytes: Bytes, how: Put) -> Result<(), StoreError> {
        let mut stock = self.stock();
        stock.puts += 1;
        if how == Put::IfAbsent && stock.objects.contains_key(&name) {
            return Err(StoreError::Present);
        }
        if let (Name::Data(..), Some((most, error))) = (name, &stock.data_max)
            && stock.objects.keys().filter(|name| matches!(name, Name::Data(..))).count() >= *most
        {
            return Err(error.clone());
        }
        if let Some((most, error)) = &stock.objects_max
            && stock.objects.len() >= *most
        {
            return Err(error.clone());
        }
        stock.objects.insert(name, bytes);
        Ok(())
    }
}

impl Client {
    fn mood(&self) -> MutexGuard<'_, Mood> {
        self.mood.lock().unwrap()
    }

    /// Makes the client fail after this number of changes.
    pub(super) fn crash_after(&self, changes: u64, crash: Crash) {
        self.mood().changes_left = Some((changes, Some(crash)));
    }

    pub(super) fn has_crashed(&self) -> bool {
        self.mood().crashed
    }

    pub(super) fn hang(&self, hangs: bool) {
        self.mood().hangs = hangs;
    }

    pub(super) fn refuse(&self, error: Option<StoreError>) {
        self.mood().refuses = error;
    }

    pub(super) fn heed_nothing(&self, heeds_nothing: bool) {
        self.mood().heeds_nothing = heeds_nothing;
    }

    pub(super) fn lose_each(&self, each: u64) {
        self.mood().loses_each = Some(each);
    }

    pub(super) fn delay_manifests(&self, delays: bool) {
        self.mood().delays_manifests = delays;
    }

    /// Makes the delayed changes now, and returns their number.
    pub(super) fn let_go(&self) -> usize {
        let delayed = std::mem::take(&mut self.mood().delayed);
        delayed
            .into_iter()
            .filter(|(name, bytes, how)| self.shop.put(*name, bytes.clone(), *how).is_ok())
            .count()
    }

    /// The next conditional put that creates something waits until the gate is notified.
    pub(super) fn wait_at(&self, gate: Arc<Notify>) {
        self.mood().gate = Some(gate);
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.mood().waits
    }

    /// Checks whether a call succeeds.
    async fn enter(&self) -> Result<(), StoreError> {
        tokio::task::yield_now().await;
        let (hangs, refuses) = {
            let mood = self.mood();
            (mood.hangs || mood.crashed, mood.refuses.clone())
        };
        if hangs {
            pending::<()>().await;
        }
        refuses.map_or(Ok(()), Err)
    }

    /// Makes a change, or simulates a fault.
    async fn change<T>(&self, make: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
        self.enter().await?;
        let crash = {
            let mut mood = self.mood();
            mood.changes += 1;
            match &mut mood.changes_left {
                Some((0, crash)) => {
                    let crash = *crash;
                    mood.crashed = true;
                    crash
                }
                Some((left, _)) => {
                    *left -= 1;
                    None
                }
                None => None,
            }
        };
        if crash == Some(Crash::Before) {
            return pending().await;
        }
        let result = make();
        if crash == Some(Crash::After) {
            return pending().await;
        }
        let lost = {
            let mood = self.mood();
            mood.loses_each.is_some_and(|each| mood.changes.is_multiple_of(each))
        };
        if lost { Err(StoreError::Failed("the answer is lost".into())) } else { result }
    }
}

impl Objects for Client {
    fn get(&self, name: Name, range: Option<Range<u64>>) -> Boxed<'_, Bytes> {
        Box::pin(async move {
            self.enter().await?;
            let found = self.shop.stock().objects.get(&name).cloned().ok_or(StoreError::Absent)?;
            let Some(range) = range else { return Ok(found) };
            let end = range.end.min(found.len() as u64);
            Ok(found.slice(range.start.min(end) as usize..end as usize))
        })
    }

    fn put(&self, name: Name, bytes: Bytes, how: Put) -> Boxed<'_, ()> {
        Box::pin(async move {
            let (how, delays, gate) = {
                let mut mood = self.mood();
                let how = if mood.heeds_nothing { Put::Always } else { how };
                let is_new = !self.shop.stock().objects.contains_key(&name);
                let gate = if how == Put::IfAbsent && is_new { mood.gate.take() } else { None };
                mood.waits |= gate.is_some();
                (how, mood.delays_manifests && matches!(name, Name::Manifest(_)), gate)
            };
            if let Some(gate) = gate {
                gate.notified().await;
            }
            if delays {
                self.mood().delayed.push((name, bytes, how));
                return pending().await;
            }
            self.change(|| self.shop.put(name, bytes, how)).await
        })
    }

    fn delete(&self, name: Name) -> Boxed<'_, ()> {
        Box::pin(self.change(move || {
            self.shop.stock().objects.remove(&name);
            Ok(())
        }))
    }

    fn list<'a>(&'a self, folder: &'a str, each: &'a mut (dyn FnMut(Name) + Send)) -> Boxed<'a, ()> {
        Box::pin(async move {
            self.enter().await?;
            self.shop.names(folder).into_iter().for_each(each);
            Ok(())
        })
    }
}
