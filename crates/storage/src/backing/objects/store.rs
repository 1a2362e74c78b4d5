//! What hob asks of an object store, and the patience with which it does.
//!
//! [`Objects`] is one disk's part of a store: five calls. [`RetryingStore`] repeats what failed, for so long and not longer; each attempt has an
//! end of its own too. Whatever it gives up may still happen in the store later, which the rest knows.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use super::format::Name;

/// What a call returns.
pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Why a store did not do it. Each is one reaction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreError {
    /// There is no such object.
    #[error("there is no such object")]
    Absent,
    /// There is one already.
    #[error("there is such an object already")]
    Present,
    /// No room.
    #[error("no room is left in the store: {0}")]
    NoSpace(String),
    /// Asking again changes nothing.
    #[error("the store refuses: {0}")]
    Refused(String),
    /// The credentials are no good now. A store that took them before has perhaps not got the next ones yet.
    #[error("the store denies access: {0}")]
    Denied(String),
    /// It may go better next time; it may also have been done.
    #[error("the store fails: {0}")]
    Failed(String),
}

/// Whether an object of that name may be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// It is replaced.
    Always,
    /// It fails with [`StoreError::Present`].
    IfAbsent,
}

/// One disk's objects in a store, by their names below its prefix.
pub(super) trait Objects: Send + Sync {
    /// An object, or that part of it.
    fn get(&self, name: Name, range: Option<Range<u64>>) -> Boxed<'_, Bytes>;
    /// Makes an object, all of it or none; it is durable when this returns.
    fn put(&self, name: Name, bytes: Bytes, how: Put) -> Boxed<'_, ()>;
    /// Removes one. It is no error if there is none.
    fn delete(&self, name: Name) -> Boxed<'_, ()>;
    /// Tells `each` every object of that folder, in any order; others than hob's are passed over.
    fn list<'a>(&'a self, folder: &'a str, each: &'a mut (dyn FnMut(Name) + Send)) -> Boxed<'a, ()>;
    /// Removes what the store itself leaves behind when a put is interrupted. To be called while nothing else is.
    fn tidy(&self) -> Boxed<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// An attempt takes so long, at least, before it is given up.
const ATTEMPT_MIN: Duration = Duration::from_secs(10);

/// A store that is slower than this is taken for dead, bytes a second.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;

/// Pauses between attempts.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Listing all objects takes no longer.
const LIST_MAX: Duration = Duration::from_secs(1800);

/// Gets on their way at once.
const GETS_MAX: usize = 64;

/// A store, asked with patience.
pub(super) struct RetryingStore {
    objects: Box<dyn Objects>,
    wait_ms: AtomicU64,
    gets: Semaphore,
    /// It has done something for these credentials.
    has_worked: AtomicBool,
}

impl RetryingStore {
    pub(super) fn new(objects: Box<dyn Objects>, wait_max: Duration) -> RetryingStore {
        let patient = RetryingStore {
            objects,
            wait_ms: AtomicU64::new(0),
            gets: Semaphore::new(GETS_MAX),
            has_worked: AtomicBool::new(false),
        };
        patient.set_wait(wait_max);
        patient
    }

    /// Sets how long operations wait for a store that does not answer, also those in flight.
    pub(super) fn set_wait(&self, wait_max: Duration) {
        self.wait_ms.store(wait_max.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) async fn get(&self, name: Name, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let _place = self.gets.acquire().await.expect("it is never closed");
        let len = range.as_ref().map_or(0, |range| range.end - range.start);
        let bytes = self.repeat(name, len, || self.objects.get(name, range.clone())).await?;
        match range {
            Some(_) if bytes.len() as u64 != len => {
                Err(StoreError::Failed(format!("{name} is shorter than it was")))
            }
            _ => Ok(bytes),
        }
    }

    /// Replaces the object if it is there.
    pub(super) async fn put(&self, name: Name, bytes: Bytes) -> Result<(), StoreError> {
        self.repeat(name, bytes.len() as u64, || self.objects.put(name, bytes.clone(), Put::Always)).await
    }

    /// Makes an object that is not there. One that is there with just these bytes was made by an attempt whose answer was lost.
    pub(super) async fn create(&self, name: Name, bytes: Bytes) -> Result<(), StoreError> {
        match self.create_again(name, bytes.clone()).await {
            Err(StoreError::Present) if self.get(name, None).await.is_ok_and(|there| there == bytes) => {
                Ok(())
            }
            result => result,
        }
    }

    /// The same, though it be there with just these bytes.
    pub(super) async fn create_again(&self, name: Name, bytes: Bytes) -> Result<(), StoreError> {
        self.repeat(name, bytes.len() as u64, || self.objects.put(name, bytes.clone(), Put::IfAbsent)).await
    }

    /// Tells `each` every object of a folder. It may take long, as there may be many.
    pub(super) async fn list(
        &self,
        folder: &str,
        each: &mut (dyn FnMut(Name) + Send),
    ) -> Result<(), StoreError> {
        let list = timeout(LIST_MAX, self.objects.list(folder, each)).await;
        list.unwrap_or_else(|_| Err(StoreError::Failed(format!("listing {folder} takes too long"))))
    }

    /// See [`Objects::tidy`].
    pub(super) async fn tidy(&self) -> Result<(), StoreError> {
        self.repeat("its directory", 0, || self.objects.tidy()).await
    }

    /// One look at an object, which is not repeated.
    pub(super) async fn peek(&self, name: Name) -> Result<Bytes, StoreError> {
        let look = timeout(ATTEMPT_MIN, self.objects.get(name, None)).await;
        look.unwrap_or_else(|_| Err(StoreError::Failed("it does not answer".into())))
    }

    pub(super) async fn delete(&self, name: Name) -> Result<(), StoreError> {
        self.repeat(name, 0, || self.objects.delete(name)).await
    }

    /// The numbers of all manifests.
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
        self.repeat("manifests", 0, list).await
    }

    async fn repeat<'a, T>(
        &'a self,
        what: impl std::fmt::Display,
        bytes: u64,
        attempt: impl Fn() -> Boxed<'a, T>,
    ) -> Result<T, StoreError> {
        let moving = Duration::from_secs(bytes / BYTES_PER_SECOND_MIN);
        let begun = Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            // It may be changed meanwhile.
            let wait = Duration::from_millis(self.wait_ms.load(Ordering::Relaxed)) + moving;
            let deadline = begun + wait;
            let left = deadline.saturating_duration_since(Instant::now());
            let error = match timeout((ATTEMPT_MIN + moving).min(left), attempt()).await {
                Ok(Err(StoreError::Failed(error))) => error,
                Ok(Err(StoreError::Denied(error))) if self.has_worked.load(Ordering::Relaxed) => error,
                Ok(result) => {
                    self.has_worked.fetch_or(result.is_ok(), Ordering::Relaxed);
                    return result;
                }
                Err(_) => "it does not answer".to_owned(),
            };
            if Instant::now() + pause >= deadline {
                tracing::warn!("{what}: the object store fails, and is given up: {error}");
                return Err(StoreError::Failed(error));
            }
            tracing::debug!("{what}: the object store fails, and is asked again: {error}");
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Denies access that many times, after that many successes.
    struct Expiring {
        works: AtomicUsize,
        denies: AtomicUsize,
    }

    impl Expiring {
        fn patient(works: usize, denies: usize) -> RetryingStore {
            let objects = Expiring { works: works.into(), denies: denies.into() };
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
        fn list<'a>(&'a self, _: &'a str, _: &'a mut (dyn FnMut(Name) + Send)) -> Boxed<'a, ()> {
            Box::pin(async { Ok(()) })
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
