//! The interface to an object store, with retries.
//!
//! [`Objects`] accesses one disk's objects in a store. [`RetryingStore`] retries failed calls for a
//! limited time, and reports outages. The duration of each attempt is limited too. A call that
//! timed out may still take effect in the object store later, so callers must not assume that it
//! had no effect.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep, timeout};

use super::format::{Name, is_intact_manifest};
use super::outage::{CallKind, StoreOutage};

/// Result of a call to the object store.
pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Reason why an object store failed a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreError {
    /// The object does not exist.
    #[error("the object does not exist")]
    Absent,
    /// The object exists already.
    #[error("the object exists already")]
    Present,
    /// The object store has no space left. The text is the store's own reason.
    #[error("the object store is full: {0}")]
    NoSpace(String),
    /// The object store refused a put, because its space or a quota is used up. A retry succeeds
    /// when objects were deleted.
    #[error("the object store is full: {0}")]
    Full(String),
    /// The object store refused the call, and retrying is useless.
    #[error("the object store refused the request: {0}")]
    Refused(String),
    /// The object store refused the credentials. If the store accepted them before, they may have
    /// expired, and new credentials may arrive later.
    #[error("the object store denied access: {0}")]
    Denied(String),
    /// The call failed, and may succeed if retried. The failed call may also have taken effect.
    #[error("the object store failed: {0}")]
    Failed(String),
}

/// Whether a put may replace an existing object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// The put replaces an existing object.
    Always,
    /// The put of an existing object fails with [`StoreError::Present`].
    IfAbsent,
}

/// One disk's objects in a store, named relative to the disk's prefix.
pub(super) trait Objects: Send + Sync {
    /// Reads an object, or a range of it.
    fn get(&self, name: Name, range: Option<Range<u64>>) -> Boxed<'_, Bytes>;
    /// Creates an object atomically. The object is durable when the call returns.
    fn put(&self, name: Name, bytes: Bytes, how: Put) -> Boxed<'_, ()>;
    /// Deletes an object. A missing object is not an error.
    fn delete(&self, name: Name) -> Boxed<'_, ()>;
    /// Calls `each` for every object in the folder, in any order. Objects that hob did not create
    /// are skipped.
    fn list<'a>(&'a self, folder: &'a str, each: &'a mut (dyn FnMut(Name) + Send)) -> Boxed<'a, ()>;
    /// Removes what interrupted puts left in the object store. Call it while no other call is in
    /// progress.
    fn tidy(&self) -> Boxed<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// Minimum time before an attempt is aborted.
const ATTEMPT_MIN: Duration = Duration::from_secs(10);

/// Transfer rate below which an attempt is aborted, bytes per second.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;

/// Shortest and longest pause between two attempts of a call.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Longest time for listing all objects.
const LIST_MAX: Duration = Duration::from_secs(1800);

/// Maximum number of attempts to list all objects.
const LIST_ATTEMPTS_MAX: u32 = 8;

/// Maximum number of gets in flight.
const GETS_MAX: usize = 64;

/// An object store with retries of failed calls.
pub(super) struct RetryingStore {
    objects: Box<dyn Objects>,
    wait_ms: AtomicU64,
    gets: Semaphore,
    /// Whether the object store has accepted the credentials before.
    has_worked: AtomicBool,
    /// Notified when the object store refuses a put because it is full.
    full: Notify,
    /// Reports outages of the object store; `None` if the disk is not a backing.
    outage: Option<StoreOutage>,
}

impl RetryingStore {
    pub(super) fn new(objects: Box<dyn Objects>, wait_max: Duration) -> RetryingStore {
        let patient = RetryingStore {
            objects,
            wait_ms: AtomicU64::new(0),
            gets: Semaphore::new(GETS_MAX),
            has_worked: AtomicBool::new(false),
            full: Notify::new(),
            outage: None,
        };
        patient.set_wait(wait_max);
        patient
    }

    /// Returns this object store, with `outage` set as the object that reports its outages.
    pub(super) fn reporting(self, outage: StoreOutage) -> RetryingStore {
        RetryingStore { outage: Some(outage), ..self }
    }

    /// Returns true if the object store has an outage, which was reported.
    pub(super) fn has_outage(&self) -> bool {
        self.outage.as_ref().is_some_and(StoreOutage::is_reported)
    }

    /// Reports the result of one attempt of a call that began at `began`.
    fn report<T>(&self, kind: CallKind, began: Instant, result: &Result<T, StoreError>) {
        let Some(outage) = &self.outage else { return };
        match result {
            Err(StoreError::Failed(error) | StoreError::Denied(error) | StoreError::Full(error)) => {
                outage.note_failure(kind, began, error);
            }
            _ => outage.note_answer(kind),
        }
    }

    /// Waits until the object store refuses a put because it is full. hob repeats this put.
    pub(super) async fn filled(&self) {
        self.full.notified().await;
    }

    /// Sets how long calls wait for a store that does not answer, including calls in progress.
    pub(super) fn set_wait(&self, wait_max: Duration) {
        self.wait_ms.store(wait_max.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) async fn get(&self, name: Name, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let _place = self.gets.acquire().await.expect("it is never closed");
        let len = range.as_ref().map_or(0, |range| range.end - range.start);
        let bytes = self.repeat(CallKind::Read, name, len, || self.objects.get(name, range.clone())).await?;
        match range {
            Some(_) if bytes.len() as u64 != len => {
                Err(StoreError::Failed(format!("{name} is shorter than it was")))
            }
            _ => Ok(bytes),
        }
    }

    /// Writes an object, and replaces it if it exists.
    pub(super) async fn put(&self, name: Name, bytes: Bytes) -> Result<(), StoreError> {
        let put = || self.objects.put(name, bytes.clone(), Put::Always);
        self.repeat(CallKind::Write, name, bytes.len() as u64, put).await
    }

    /// Creates an object that must not exist. If it exists with the same bytes, an earlier attempt
    /// whose reply was lost created it.
    pub(super) async fn create(&self, name: Name, bytes: Bytes) -> Result<(), StoreError> {
        match self.create_again(name, bytes.clone()).await {
            Err(StoreError::Present) if self.get(name, None).await.is_ok_and(|there| there == bytes) => {
                Ok(())
            }
            result => result,
        }
    }

    /// Creates an object, or confirms that it exists with the same bytes.
    pub(super) async fn create_again(&self, name: Name, bytes: Bytes) -> Result<(), StoreError> {
        let put = || self.objects.put(name, bytes.clone(), Put::IfAbsent);
        self.repeat(CallKind::Write, name, bytes.len() as u64, put).await
    }

    /// Calls `each` for every object in a folder. If an attempt to list the folder fails, the next
    /// attempt calls `each` again for objects that were listed already. Listing takes long if there
    /// are many objects.
    pub(super) async fn list(
        &self,
        folder: &str,
        each: &mut (dyn FnMut(Name) + Send),
    ) -> Result<(), StoreError> {
        let deadline = Instant::now() + LIST_MAX;
        let mut pause = PAUSE_MIN;
        let mut attempts_left = LIST_ATTEMPTS_MAX;
        loop {
            attempts_left -= 1;
            let left = deadline.saturating_duration_since(Instant::now());
            match timeout(left, self.objects.list(folder, &mut *each)).await {
                Ok(Err(StoreError::Failed(error) | StoreError::Denied(error))) if attempts_left > 0 => {
                    tracing::debug!("listing {folder} failed; retrying: {error}");
                }
                Ok(result) => return result,
                Err(_) => return Err(StoreError::Failed(format!("listing {folder} takes too long"))),
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// See [`Objects::tidy`].
    pub(super) async fn tidy(&self) -> Result<(), StoreError> {
        self.repeat(CallKind::Cleanup, "its directory", 0, || self.objects.tidy()).await
    }

    /// Reads a manifest once, without retries. A reply that is no manifest is a failure, as in
    /// [`get_manifest`](Self::get_manifest).
    pub(super) async fn peek_manifest(&self, sequence: u64) -> Result<Bytes, StoreError> {
        let began = Instant::now();
        let look = timeout(ATTEMPT_MIN, self.attempt_manifest(sequence)).await;
        let result = look.unwrap_or_else(|_| Err(no_answer()));
        self.report(CallKind::Read, began, &result);
        result
    }

    /// Reads a manifest. A reply that is no undamaged manifest is retried like any failure, because
    /// a proxy between hob and the store can answer with a page of its own and the status 200.
    pub(super) async fn get_manifest(&self, sequence: u64) -> Result<Bytes, StoreError> {
        let attempt = || -> Boxed<'_, Bytes> { Box::pin(self.attempt_manifest(sequence)) };
        self.repeat(CallKind::Read, Name::Manifest(sequence), 0, attempt).await
    }

    async fn attempt_manifest(&self, sequence: u64) -> Result<Bytes, StoreError> {
        let name = Name::Manifest(sequence);
        let bytes = self.objects.get(name, None).await?;
        if is_intact_manifest(&bytes) {
            return Ok(bytes);
        }
        Err(StoreError::Failed(format!(
            "the reply to a read of {name} is not a manifest that hob wrote; does a proxy answer in \
            place of the store?"
        )))
    }

    pub(super) async fn delete(&self, name: Name) -> Result<(), StoreError> {
        self.repeat(CallKind::Cleanup, name, 0, || self.objects.delete(name)).await
    }

    pub(super) async fn manifests(&self) -> Result<Vec<u64>, StoreError> {
        let list = || -> Boxed<'_, Vec<u64>> {
            Box::pin(async {
                let mut numbers = Vec::new();
                let mut note = |name| {
                    if let Name::Manifest(number) = name {
                        numbers.push(number);
                    }
                };
                self.objects.list("manifest", &mut note).await?;
                Ok(numbers)
            })
        };
        self.repeat(CallKind::Read, "manifests", 0, list).await
    }

    async fn repeat<'a, T>(
        &'a self,
        kind: CallKind,
        what: impl std::fmt::Display,
        bytes: u64,
        attempt: impl Fn() -> Boxed<'a, T>,
    ) -> Result<T, StoreError> {
        let moving = Duration::from_secs(bytes / BYTES_PER_SECOND_MIN);
        let begun = Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            // The maximum wait may change during the loop, so it is read for each attempt.
            let wait = Duration::from_millis(self.wait_ms.load(Ordering::Relaxed)) + moving;
            let deadline = begun + wait;
            let left = deadline.saturating_duration_since(Instant::now());
            let result = timeout((ATTEMPT_MIN + moving).min(left), attempt()).await;
            let result = result.unwrap_or_else(|_| Err(no_answer()));
            self.report(kind, begun, &result);
            let is_full = matches!(result, Err(StoreError::Full(_)));
            let error = match result {
                Err(StoreError::Failed(error)) => error,
                Err(StoreError::Full(error)) => {
                    self.full.notify_one();
                    error
                }
                Err(StoreError::Denied(error)) if self.has_worked.load(Ordering::Relaxed) => error,
                result => {
                    self.has_worked.fetch_or(result.is_ok(), Ordering::Relaxed);
                    return result;
                }
            };
            if Instant::now() + pause >= deadline {
                tracing::warn!("{what}: the object store failed, and hob stops retrying: {error}");
                return Err(if is_full { StoreError::NoSpace(error) } else { StoreError::Failed(error) });
            }
            tracing::debug!("{what}: the object store failed; retrying: {error}");
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

fn no_answer() -> StoreError {
    StoreError::Failed("the object store does not answer".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Lets `works` calls succeed, and then denies access to `denies` calls. The first
    /// `failed_lists` listings fail.
    struct Expiring {
        works: AtomicUsize,
        denies: AtomicUsize,
        failed_lists: AtomicUsize,
    }

    impl Expiring {
        fn patient(works: usize, denies: usize) -> RetryingStore {
            let objects =
                Expiring { works: works.into(), denies: denies.into(), failed_lists: denies.into() };
            RetryingStore::new(Box::new(objects), Duration::from_secs(5))
        }

        fn take(left: &AtomicUsize) -> bool {
            left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
        }
    }

    impl Objects for Expiring {
        fn get(&self, _: Name, _: Option<Range<u64>>) -> Boxed<'_, Bytes> {
            Box::pin(async { Ok(Bytes::new()) })
        }
        fn put(&self, _: Name, _: Bytes, _: Put) -> Boxed<'_, ()> {
            let is_denied = !Self::take(&self.works) && Self::take(&self.denies);
            Box::pin(async move {
                if is_denied { Err(StoreError::Denied("ExpiredToken".into())) } else { Ok(()) }
            })
        }
        fn delete(&self, _: Name) -> Boxed<'_, ()> {
            Box::pin(async { Ok(()) })
        }
        fn list<'a>(&'a self, _: &'a str, each: &'a mut (dyn FnMut(Name) + Send)) -> Boxed<'a, ()> {
            Box::pin(async move {
                each(Name::Manifest(1));
                let is_failed = Self::take(&self.failed_lists);
                if is_failed { Err(StoreError::Failed("503 SlowDown".into())) } else { Ok(()) }
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_listing_is_retried_a_limited_number_of_times() {
        for (failures, is_listed) in [(0, true), (7, true), (8, false)] {
            let store = Expiring::patient(0, failures);
            let mut count = 0;
            let result = store.list("data", &mut |_| count += 1).await;
            assert_eq!((result.is_ok(), count), (is_listed, (failures + 1).min(8)), "{failures}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn credentials_that_expire_are_waited_for_and_wrong_ones_are_not() {
        let put = async |patient: &RetryingStore| patient.put(Name::Manifest(1), Bytes::new()).await;
        let expiring = Expiring::patient(1, 3);
        put(&expiring).await.unwrap();
        put(&expiring).await.unwrap();
        let expired = Expiring::patient(1, usize::MAX);
        put(&expired).await.unwrap();
        let begun = Instant::now();
        assert!(matches!(put(&expired).await, Err(StoreError::Failed(why)) if why == "ExpiredToken"));
        assert!(begun.elapsed() >= Duration::from_secs(2) && begun.elapsed() <= Duration::from_secs(6));
        let wrong = Expiring::patient(0, 1);
        assert_eq!(put(&wrong).await, Err(StoreError::Denied("ExpiredToken".into())), "at once");
    }
}
