//! Taking disks: asking etcd until the seat's verdict has come about, or cannot.

use std::sync::Arc;

use hob_engine::cluster::{
    Adopting, Found, LeaseId, Member, Refusal as Why, SecondCopy, Taking, Verdict, Wish,
};

use super::store::StoreError;
use super::{Cluster, GOES, LeaseClock, Membership, Place, lock, now};

/// The word of an operator counts no longer than settling and this, nanoseconds.
const FORCE_NS_MAX: u64 = 10_000_000_000;

/// A disk that this host holds.
#[derive(Debug)]
pub(crate) struct Taken {
    /// Kept with what flash has of the disk.
    pub(crate) generation: u64,
    /// Until when anything may be acknowledged.
    pub(crate) clock: Arc<LeaseClock>,
    /// Who had it since flash was filled: nothing there counts.
    pub(crate) foreign: Option<String>,
    /// Where it was dirty, the backing has had it since, and has newer things now: whoever saw to that.
    pub(crate) outdated_by: Option<String>,
    /// What the title said of dirty data here before.
    pub(super) dirty_before: bool,
}

/// What became of an attempt to have a disk.
#[derive(Debug)]
pub(crate) enum Took {
    /// It is this host's.
    Taken(Taken),
    /// It is held, so that its second copy, which is here, is brought to the backing first.
    ToAdopt(ToAdopt),
}

/// A disk whose owner vanished and whose dirty data has a second copy here.
#[derive(Debug)]
pub(crate) struct ToAdopt {
    /// Where.
    pub(crate) copy: SecondCopy,
    /// Whose data it is.
    pub(crate) from: Member,
    /// Until when anything may be sent to the backing.
    pub(crate) clock: Arc<LeaseClock>,
}

/// Why a disk cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeError {
    /// Another host has it, or what it has cannot be done without.
    #[error("{why}")]
    Elsewhere {
        /// In words.
        why: String,
        /// What to do.
        hint: String,
        /// What there is to it.
        how: Elsewhere,
    },
    /// Nobody knows: ask again later.
    #[error("{0}")]
    Unknown(String),
}

/// How a disk is that cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elsewhere {
    /// Another host serves it: all is well.
    Served,
    /// Its owner vanished, and what that had sent may still be on its way.
    Settling,
    /// It cannot be done without what another host has of it.
    Needed,
}

impl Cluster {
    /// A disk may be taken once, whatever is lost by it, now or when it has settled.
    pub(crate) fn force(&self, disk: &str) {
        let until = now() + self.config.settle_seconds * 1_000_000_000 + FORCE_NS_MAX;
        lock(&self.forced).insert(disk.to_owned(), until);
    }

    /// Takes a disk. `known` is the generation that is kept with what flash has of it; `dirty`: something of it may be dirty, now or soon.
    pub(crate) async fn take(&self, disk: &str, known: Option<u64>, dirty: bool) -> Result<Took, TakeError> {
        let took = self.take_as_it_is(disk, known, dirty).await;
        self.outlook.tried(disk, &took);
        took
    }

    async fn take_as_it_is(&self, disk: &str, known: Option<u64>, dirty: bool) -> Result<Took, TakeError> {
        let membership = self.member().await?;
        let place = self.place(disk);
        let mut place = place.lock().await;
        place.lost = false;
        let force = lock(&self.forced).get(disk).is_some_and(|until| now() < *until);
        let wish = Wish { known, dirty, force, keeps_copy: false };
        let taken = self.go(&membership, &mut place, disk, wish, false).await;
        if !matches!(
            taken,
            Err(TakeError::Elsewhere { how: Elsewhere::Settling, .. } | TakeError::Unknown(_))
        ) {
            lock(&self.forced).remove(disk);
        }
        taken
    }

    /// Takes a disk that is served, under the lease that there is now.
    pub(crate) async fn take_again(
        &self,
        disk: &str,
        known: Option<u64>,
        dirty: bool,
    ) -> Result<Taken, TakeError> {
        let membership = self.member().await?;
        let place = self.place(disk);
        let mut place = place.lock().await;
        let wish = Wish { known, dirty, force: false, keeps_copy: true };
        let took = match self.go(&membership, &mut place, disk, wish, true).await {
            Ok(Took::Taken(taken)) => Ok(taken),
            Ok(Took::ToAdopt(to_adopt)) => Err(elsewhere(disk, Some(&to_adopt.from), "has had it")),
            Err(error) => Err(error),
        };
        place.lost = matches!(took, Err(TakeError::Elsewhere { .. }));
        took
    }

    async fn go(
        &self,
        membership: &Membership,
        place: &mut Place,
        disk: &str,
        wish: Wish,
        goes_on: bool,
    ) -> Result<Took, TakeError> {
        let lost = |error: StoreError| TakeError::Unknown(error.to_string());
        let mut trouble = "others go at it too".to_owned();
        for _ in 0..GOES {
            let look = self.look(disk).await.map_err(lost)?;
            let before = look.title.as_ref().map(|title| title.value.clone());
            let had_it = before.as_ref().map(|title| &title.member);
            self.outlook.looked(disk, &look);
            if let Some((title_revision, at)) = self.outlook.gone(disk) {
                place.seat.saw_gone(title_revision, at);
            }
            let verdict = place.seat.decide(now(), &self.me, membership.lease, &look, wish);
            let mut outdated_by = None;
            let (title, continued) = match verdict {
                // Whatever was asked for and may still happen does not any more, once the title has been put anew.
                Verdict::Mine(title) if place.in_doubt => {
                    let txn = place.seat.mark(membership.lease, &title, title.value.dirty);
                    if let Err(error) = self.commit(place, &txn).await {
                        trouble = error.to_string();
                    }
                    continue;
                }
                Verdict::Mine(title) => {
                    let continued = wish.known == Some(title.value.generation);
                    (title, continued)
                }
                Verdict::Take(taking) if goes_on && !taking.continued => {
                    return Err(elsewhere(disk, had_it, "has had it"));
                }
                Verdict::Adopt(adopting) if goes_on => {
                    return Err(elsewhere(disk, Some(&adopting.title.value.member), "has had it"));
                }
                Verdict::Adopt(adopting) => {
                    let Adopting { txn, title, copy } = *adopting;
                    match self.commit(place, &txn).await {
                        Ok(Some(revision)) => {
                            let title = Found { revision, ..title };
                            let from = title.value.adopts.as_ref().map_or(&title.value.member, |it| &it.by);
                            let from = from.clone();
                            tracing::info!(
                                "{disk} is held for the second copy of what {} had dirty",
                                from.name
                            );
                            (place.title, place.lease) = (Some(title), membership.lease);
                            let clock = membership.clock.clone();
                            return Ok(Took::ToAdopt(ToAdopt { copy, from, clock }));
                        }
                        Ok(None) => continue,
                        Err(error) => {
                            trouble = error.to_string();
                            continue;
                        }
                    }
                }
                Verdict::Take(taking) => {
                    let Taking { txn, title, continued, lost_by, outdated_by: by } = *taking;
                    outdated_by = by.map(|by| by.name);
                    if let Some(by) = &lost_by {
                        tracing::error!(
                            "{disk} is taken by force: what {} has of it in flash and not on the backing is LOST",
                            by.name
                        );
                    }
                    let turn = self.commits.acquire().await;
                    let seen = look.title.as_ref().map_or(0, |title| title.revision);
                    if self.outlook.has_moved(disk, seen) {
                        // While others were waited for.
                        continue;
                    }
                    let committed = self.commit(place, &txn).await;
                    drop(turn);
                    match committed {
                        Ok(Some(revision)) => {
                            (Found { value: title, revision, lease: LeaseId(0) }, continued)
                        }
                        Ok(None) => continue,
                        Err(error) => {
                            // It may have happened: the next look tells.
                            trouble = error.to_string();
                            continue;
                        }
                    }
                }
                Verdict::Wait(until) => {
                    self.outlook.settles(disk, until);
                    let host = before.as_ref().map_or("?", |title| &title.member.name);
                    let seconds = self.config.settle_seconds;
                    let why =
                        format!("{host} had it and vanished; it is taken {seconds} s after that was seen");
                    return match goes_on {
                        true => Err(elsewhere(disk, had_it, "has had it")),
                        false => Err(TakeError::Elsewhere {
                            why,
                            hint: "wait".to_owned(),
                            how: Elsewhere::Settling,
                        }),
                    };
                }
                Verdict::Refused(why) => return Err(refused(disk, &why)),
            };
            if goes_on && !continued {
                return Err(elsewhere(disk, had_it, "has had it"));
            }
            let mine = before.as_ref().is_some_and(|title| title.member.id == self.me.id);
            let foreign = (!continued).then(|| match &before {
                Some(title) if title.member.id != self.me.id => format!("{} had it", title.member.name),
                _ => "other hosts may have had it".to_owned(),
            });
            let taken = Taken {
                generation: title.value.generation,
                clock: membership.clock.clone(),
                foreign,
                outdated_by,
                dirty_before: mine && before.is_some_and(|title| title.dirty),
            };
            if place.lease != membership.lease || place.title.is_none() {
                tracing::info!("{disk} is held in generation {}", taken.generation);
            }
            (place.title, place.lease) = (Some(title), membership.lease);
            return Ok(Took::Taken(taken));
        }
        Err(TakeError::Unknown(format!("it could not be taken: {trouble}")))
    }
}

fn elsewhere(disk: &str, member: Option<&Member>, what: &str) -> TakeError {
    let host = member.map_or("another host", |member| &member.name);
    TakeError::Elsewhere {
        why: format!("{host} {what} meanwhile"),
        hint: format!("'hob cluster disks' shows who has {disk}; it comes back by itself when it is free"),
        how: Elsewhere::Needed,
    }
}

fn refused(disk: &str, why: &Why) -> TakeError {
    match why {
        Why::Held(by, generation) => TakeError::Elsewhere {
            why: format!("{} has it (generation {generation})", by.name),
            hint: "it comes by itself when that host gives it back or vanishes".to_owned(),
            how: Elsewhere::Served,
        },
        Why::Dirty(by, generation) => TakeError::Elsewhere {
            why: format!(
                "data of it that is not on the backing may be in the flash of {} (generation {generation})",
                by.name
            ),
            hint: format!(
                "start that host again; if it never comes back, 'hob cluster take {disk} --force' goes on without that data"
            ),
            how: Elsewhere::Needed,
        },
    }
}
