//! Simulates the daemon around the cluster state machines. The daemon calls the state machines,
//! sends their requests to etcd, and acquires, opens and releases disks.

use hob_engine::cluster::{
    Answer, Ask, ClusterEvent, Event as Told, Found, Is, Key, LeaseId, LeaseTerm, OwnershipRecord,
    OwnershipRequest, Refusal, Verdict,
};
use hob_engine::units::Instant;

use super::copies::{Copy, Copying};
use super::host::{From, Phase, Purpose};
use super::plan::MS;
use super::store::{Request, Response};
use super::{Event, Forced, Sabotage, Simulation, trace};
use crate::{Violation, ensure};

/// Timeout of an etcd request about a disk, nanoseconds.
const QUESTION_NS_MAX: u64 = 1_500 * MS;

impl Simulation<'_> {
    pub(super) fn is(&self, sabotage: Sabotage) -> bool {
        self.options.sabotage == Some(sabotage)
    }

    /// Starts the daemon process of a host.
    pub(super) fn start(&mut self, host: usize) {
        let life = self.hosts[host].life;
        self.hosts[host].keep_at = self.now;
        self.queue.push(self.now, Event::Keep { host, life, at: self.now });
        for disk in 0..self.plan.disks {
            let at = self.now + self.rng.below(self.plan.poll_ns);
            self.queue.push(at, Event::Poll { host, life, disk });
        }
    }

    /// Returns the time of the clock with which a host measures its etcd lease.
    pub(super) fn clock(&self, host: usize) -> Instant {
        let host = &self.hosts[host];
        let clock = host.clock(self.now);
        match self.is(Sabotage::WallClock) {
            true => Instant(clock.0.saturating_add_signed(host.wall_ahead)),
            false => clock,
        }
    }

    /// Returns true if a host may acknowledge requests of a disk according to its own clock.
    pub(super) fn may_acknowledge(&self, host: usize, disk: usize) -> bool {
        let local = &self.hosts[host].local[disk];
        let is_served = matches!(local.phase, Phase::Serving | Phase::Leaving);
        self.hosts[host].up && is_served && local.term.is_some_and(|it| it.is_valid(self.clock(host)))
    }

    /// Returns true if a host serves a disk. A host whose etcd lease has expired counts as serving
    /// for one more lease length: on a slow network the renewal may be late, and the host delays
    /// its replies until the renewal.
    pub(super) fn serves(&self, host: usize, disk: usize) -> bool {
        let local = &self.hosts[host].local[disk];
        let is_served = matches!(local.phase, Phase::Serving | Phase::Leaving);
        let lately = local.term.is_some_and(|it| self.clock(host) < it.until + self.plan.lease_ns);
        self.hosts[host].up && !self.hosts[host].is_hung && is_served && lately
    }

    // Lease handling.

    /// Handles the lease manager's events, sends its next request to etcd, and schedules the next
    /// call of this function.
    pub(super) fn keep(&mut self, host: usize) -> Result<(), Violation> {
        while let Some(told) = self.hosts[host].keeper.poll_event() {
            trace!(self, "host {host}: {told:?}");
            match told {
                Told::Joined(term) => {
                    self.hosts[host].term = Some(self.distort(term));
                    if self.is(Sabotage::ReleasesEarly) {
                        self.revive(host)?;
                    }
                }
                Told::Renewed(term) => self.renewed(host, term)?,
                Told::Ended(lease) => self.ended(host, lease),
                Told::NameTaken(member) => {
                    // A host that replaces a destroyed host may find the destroyed host's lease,
                    // because both have the same name.
                    ensure!(
                        self.hosts[host].me.id.ends_with('+'),
                        "host {host} has the name of member {}",
                        member.id
                    );
                }
            }
        }
        let clock = self.clock(host);
        let life = self.hosts[host].life;
        let name = self.hosts[host].me.name.clone();
        let keeper = &mut self.hosts[host].keeper;
        if let Some(call) = keeper.poll_call(clock) {
            let patience = keeper.call_ns_max();
            let request = match call.ask {
                Ask::Grant(lease_ns) => Request::Grant(lease_ns),
                Ask::LookUp => Request::LookUp(name),
                Ask::Register(txn) => Request::Register(txn),
                Ask::Renew(lease) => Request::Renew(lease, name),
                Ask::Revoke(lease) => Request::Revoke(lease),
            };
            self.ask(host, None, call.number, request, patience);
        }
        if let Some(at) = self.hosts[host].keeper.poll_timeout() {
            let at = self.hosts[host].true_time(at).max(self.now + MS);
            self.hosts[host].keep_at = at;
            self.queue.push(at, Event::Keep { host, life, at });
        }
        Ok(())
    }

    pub(super) fn keeper_answered(
        &mut self,
        host: usize,
        number: u64,
        response: Option<Response>,
    ) -> Result<(), Violation> {
        let answer = match response {
            Some(Response::Lease(answer)) => answer,
            _ => Answer::Lost,
        };
        let clock = self.clock(host);
        self.hosts[host].keeper.handle_answer(clock, number, answer);
        self.keep(host)
    }

    /// Distorts the term of an etcd lease as a sabotaged host does.
    fn distort(&self, term: LeaseTerm) -> LeaseTerm {
        let lease = self.plan.lease_ns;
        let margin = lease - hob_engine::cluster::usable_ns(lease);
        let until = match self.options.sabotage {
            Some(Sabotage::NoMargin) => term.until + margin,
            _ => term.until,
        };
        LeaseTerm { until, ..term }
    }

    fn renewed(&mut self, host: usize, term: LeaseTerm) -> Result<(), Violation> {
        let mut term = self.distort(term);
        if self.is(Sabotage::CountsFromAnswer) {
            term.until = self.clock(host) + hob_engine::cluster::usable_ns(self.plan.lease_ns);
        }
        self.hosts[host].term = Some(term);
        for disk in 0..self.plan.disks {
            let local = &mut self.hosts[host].local[disk];
            if local.term.is_some_and(|it| it.lease == term.lease) {
                local.term = Some(term);
                self.release(host, disk)?;
            }
        }
        Ok(())
    }

    /// Releases all disks that a host acquired under an etcd lease that has ended.
    fn ended(&mut self, host: usize, lease: LeaseId) {
        if self.is(Sabotage::IgnoresEnd) {
            return;
        }
        for local in &mut self.hosts[host].local {
            if local.term.is_some_and(|it| it.lease == lease) {
                local.term = None;
                local.phase = match local.phase {
                    Phase::Serving | Phase::Leaving => Phase::Doubted,
                    // The host opens the disk again when it has acquired the disk again.
                    Phase::Opening | Phase::Adopting => Phase::Closed,
                    other => other,
                };
            }
        }
        self.hosts[host].term = None;
    }

    /// Performs a sabotage: the host treats its new etcd lease like the lease that it lost.
    fn revive(&mut self, host: usize) -> Result<(), Violation> {
        let term = self.hosts[host].term;
        for disk in 0..self.plan.disks {
            let local = &mut self.hosts[host].local[disk];
            if local.phase == Phase::Doubted {
                (local.phase, local.term) = (Phase::Serving, term);
                self.release(host, disk)?;
                self.hosts[host].local[disk].phase = Phase::Doubted;
            }
        }
        Ok(())
    }

    // Requests to etcd.

    fn ask(&mut self, host: usize, disk: Option<usize>, number: u64, request: Request, patience_ns: u64) {
        let life = self.hosts[host].life;
        let at = self.now + self.way();
        let is_claim = matches!(request, Request::Grant(_) | Request::Renew(..));
        let keeps_silent = is_claim && self.hosts[host].is_hung && !self.is(Sabotage::RenewsWhileHung);
        let is_cut = keeps_silent || self.hosts[host].no_store_until > self.now;
        if !is_cut && !self.rng.chance(self.plan.lost) {
            self.queue.push(at, Event::ToStore { host, life, disk, number, request });
        }
        let given_up = self.hosts[host].true_time(self.hosts[host].clock(self.now) + patience_ns);
        self.queue.push(given_up, Event::FromStore { host, life, disk, number, response: None });
    }

    pub(super) fn way(&mut self) -> u64 {
        let way = self.rng.latency(self.plan.network_ns);
        if self.rng.chance(self.plan.very_late) { way + self.rng.below(2 * self.plan.lease_ns) } else { way }
    }

    pub(super) fn reach_store(
        &mut self,
        host: usize,
        life: u32,
        disk: Option<usize>,
        number: u64,
        request: Request,
    ) -> Result<(), Violation> {
        if self.store_away_until > self.now {
            return Ok(());
        }
        let before: Vec<Option<Found<OwnershipRecord>>> =
            (0..self.plan.disks).map(|disk| self.store.look(&disk.to_string()).title).collect();
        let by_deposed = matches!(request, Request::Renew(..)) && self.rng.chance(500);
        let believed = self.is(Sabotage::BelievesDeposed);
        let is_renewal = matches!(request, Request::Renew(..));
        let response = self.store.handle(self.now, request, by_deposed, believed);
        if is_renewal && matches!(response, Response::Lease(Answer::Lost)) {
            self.report.false_renewals += 1;
        }
        let at = self.now + self.way();
        let is_cut = self.hosts[host].no_store_until > self.now;
        if !is_cut && !self.rng.chance(self.plan.lost) {
            self.queue.push(at, Event::FromStore { host, life, disk, number, response: Some(response) });
        }
        self.tell(&before)
    }

    /// Delivers watch events to the hosts. Each event reaches each host after a random delay, so
    /// events may arrive in a different order. A host may also miss an event. `before` has the
    /// ownership records before etcd handled the request.
    fn tell(&mut self, before: &[Option<Found<OwnershipRecord>>]) -> Result<(), Violation> {
        for (name, revision, news) in self.store.take_news() {
            let disk: usize = name.parse().unwrap_or_else(|_| unreachable!("the names of disks are numbers"));
            match news {
                ClusterEvent::HoldGone => self.gone_at[disk] = Some(self.now),
                ClusterEvent::OwnershipRecord { .. } => {
                    self.check_settled(disk, before[disk].as_ref())?;
                    self.note_forced(disk, before[disk].as_ref());
                }
            }
            for host in 0..self.plan.hosts {
                let is_cut = self.hosts[host].no_store_until > self.now;
                if self.hosts[host].up && !is_cut && !self.rng.chance(self.plan.lost) {
                    let (life, disk) = (self.hosts[host].life, name.clone());
                    let at = self.now + self.way();
                    self.queue.push(at, Event::Watched { host, life, disk, revision, news });
                }
            }
        }
        Ok(())
    }

    /// Records a forced takeover in the model. The host may crash before it receives the result,
    /// but dirty data is lost in any case.
    fn note_forced(&mut self, disk: usize, before: Option<&Found<OwnershipRecord>>) {
        let after = self.store.look(&disk.to_string()).title;
        let (Some(before), Some(after), Some(forced)) = (before, after, &mut self.forced[disk]) else {
            return;
        };
        let OwnershipRecord { member, generation, adopts, .. } = after.value;
        let is_asked_for = member.id == self.hosts[forced.host].me.id && generation == forced.generation;
        // The host that takes the disk by force may be the one whose failover was in progress.
        let is_new = before.value.generation != generation && adopts.is_none();
        forced.happened |= is_asked_for && is_new && before.value.dirty;
    }

    /// Checks that a disk of a failed owner is taken over only when the settling time has passed
    /// after the disk's ownership lock vanished.
    fn check_settled(&self, disk: usize, before: Option<&Found<OwnershipRecord>>) -> Result<(), Violation> {
        let after = self.store.look(&disk.to_string()).title;
        let (Some(before), Some(after), Some(gone)) = (before, after, self.gone_at[disk]) else {
            return Ok(());
        };
        let is_taken_over = before.value.taken && before.value.member != after.value.member;
        let settled_ns = self.now.nanos_since(gone);
        ensure!(
            !is_taken_over || settled_ns >= self.plan.settle_ns,
            "disk {disk} is taken over {settled_ns} ns after its owner's lock vanished, before its writes have settled"
        );
        Ok(())
    }

    pub(super) fn ask_about(&mut self, host: usize, disk: usize, purpose: Purpose, request: Request) {
        let number = self.next();
        self.hosts[host].local[disk].asked = Some((number, purpose));
        self.ask(host, Some(disk), number, request, QUESTION_NS_MAX);
    }

    // Disks.

    /// Checks the state of a disk at a host, and starts the actions that this state requires.
    pub(super) fn poll(&mut self, host: usize, disk: usize) -> Result<(), Violation> {
        let life = self.hosts[host].life;
        let at = self.now + self.rng.latency(self.plan.poll_ns);
        self.queue.push(at, Event::Poll { host, life, disk });
        let clock = self.hosts[host].clock(self.now);
        let Some(term) = self.hosts[host].term.filter(|it| it.is_valid(self.clock(host))) else {
            return Ok(());
        };
        let local = &self.hosts[host].local[disk];
        if local.asked.is_some() {
            return Ok(());
        }
        match local.phase {
            Phase::Closed if clock >= local.not_before => {
                self.ask_about(
                    host,
                    disk,
                    Purpose::OwnershipSnapshot,
                    Request::OwnershipSnapshot(disk.to_string()),
                );
            }
            Phase::Doubted => self.ask_about(
                host,
                disk,
                Purpose::OwnershipSnapshot,
                Request::OwnershipSnapshot(disk.to_string()),
            ),
            Phase::Leaving if local.look_again => {
                self.ask_about(
                    host,
                    disk,
                    Purpose::OwnershipSnapshot,
                    Request::OwnershipSnapshot(disk.to_string()),
                );
            }
            Phase::Leaving if !local.ops.is_empty() || local.copy.state == Copying::Broken => {
                self.tend_copy(host, disk)?;
            }
            Phase::Leaving => {
                let dirty = self.hosts[host].kept[disk].is_dirty();
                let title = local
                    .title
                    .clone()
                    .unwrap_or_else(|| unreachable!("a served disk has an ownership record"));
                let txn = local.seat.give_back(term.lease, &title, dirty);
                // From here on another host may own the disk, whatever watch events say.
                self.hosts[host].local[disk].term = None;
                self.ask_about(host, disk, Purpose::GiveBack, Request::Txn(txn));
            }
            Phase::Serving if local.look_again => {
                self.ask_about(
                    host,
                    disk,
                    Purpose::OwnershipSnapshot,
                    Request::OwnershipSnapshot(disk.to_string()),
                );
            }
            Phase::Serving => {
                self.begin_destaging(host, disk)?;
                if !self.tend_copy(host, disk)? {
                    self.go_on_with_mode(host, disk, term);
                }
            }
            Phase::Adopting => self.go_on_adopting(host, disk)?,
            _ => {}
        }
        Ok(())
    }

    pub(super) fn change_mode(&mut self, host: usize, disk: usize) {
        let writes_back = self.hosts[host].kept[disk].writes_back;
        let local = &mut self.hosts[host].local[disk];
        if local.phase != Phase::Serving || local.mode_due || local.draining {
            return;
        }
        match writes_back {
            true => local.draining = true,
            false => {
                local.mode_due = true;
                if self.is(Sabotage::EarlyWriteBack) {
                    self.hosts[host].kept[disk].writes_back = true;
                }
            }
        }
    }

    fn go_on_with_mode(&mut self, host: usize, disk: usize, term: LeaseTerm) {
        let is_dirty = self.hosts[host].kept[disk].is_dirty();
        let local = &mut self.hosts[host].local[disk];
        let dirty = match (local.mode_due, local.draining) {
            (true, _) => true,
            (_, true) if !is_dirty && local.ops.is_empty() => false,
            _ => return,
        };
        if !dirty {
            // The host must save the new cache mode before the ownership record says that the disk
            // has no dirty data.
            local.draining = false;
            self.hosts[host].kept[disk].writes_back = false;
        }
        let local = &self.hosts[host].local[disk];
        let title =
            local.title.clone().unwrap_or_else(|| unreachable!("a served disk has an ownership record"));
        let txn = local.seat.mark(term.lease, &title, dirty);
        self.ask_about(host, disk, Purpose::Mark { dirty }, Request::Txn(txn));
    }

    pub(super) fn disk_answered(
        &mut self,
        host: usize,
        disk: usize,
        number: u64,
        response: Option<Response>,
    ) -> Result<(), Violation> {
        let asked = &mut self.hosts[host].local[disk].asked;
        let Some((_, purpose)) = asked.take_if(|(asked, _)| *asked == number) else { return Ok(()) };
        let phase = self.hosts[host].local[disk].phase;
        match (purpose, response) {
            (Purpose::OwnershipSnapshot, Some(Response::OwnershipSnapshot(look))) => {
                self.decide(host, disk, &look)?
            }
            (Purpose::Take { title, lease, continued, from }, Some(Response::Txn(Some(revision))))
                if self.hosts[host].term.is_some_and(|it| it.lease == lease) =>
            {
                let title = Found { value: title, revision, lease: LeaseId(0) };
                self.took(host, disk, title, continued, from)?;
            }
            (Purpose::Mark { dirty }, Some(Response::Txn(Some(revision)))) if phase == Phase::Serving => {
                let local = &mut self.hosts[host].local[disk];
                local.mode_due &= !dirty;
                local.copy.in_doubt = false;
                if let Some(title) = &mut local.title {
                    (title.value.dirty, title.revision) = (dirty, revision);
                    title.value.copy.take_if(|_| !dirty);
                }
                if !dirty {
                    self.go_on_alone(host, disk)?;
                }
                if dirty {
                    self.hosts[host].kept[disk].writes_back = true;
                }
            }
            (Purpose::SayCopy(copy), Some(Response::Txn(Some(revision))))
                if matches!(phase, Phase::Serving | Phase::Leaving) =>
            {
                self.copy_said(host, disk, copy, revision)?;
            }
            // The result of the request is unknown, and the request may still take effect.
            (Purpose::Mark { .. } | Purpose::SayCopy(_), response) => {
                let local = &mut self.hosts[host].local[disk];
                local.look_again = true;
                local.copy.in_doubt |= !matches!(response, Some(Response::Txn(None)));
            }
            (Purpose::Adopt { title, lease }, Some(Response::Txn(Some(revision))))
                if phase == Phase::Closed && self.hosts[host].term.is_some_and(|it| it.lease == lease) =>
            {
                self.begin_to_adopt(host, disk, Found { revision, ..title });
            }
            (Purpose::LeaveAlone, _) if phase == Phase::Adopting => self.stop_adopting(host, disk),
            (Purpose::BeginAdopting(title) | Purpose::EndAdopting(title), response)
                if phase == Phase::Adopting =>
            {
                let revision = match response {
                    Some(Response::Txn(revision)) => revision,
                    _ => None,
                };
                self.adopting_answered(host, disk, title, revision)?;
            }
            (Purpose::GiveBack, Some(Response::Txn(Some(_)))) if phase == Phase::Leaving => {
                trace!(self, "host {host} gave disk {disk} back");
                self.report.given_back += 1;
                let local = &mut self.hosts[host].local[disk];
                (local.phase, local.term, local.title) = (Phase::Closed, None, None);
            }
            (Purpose::GiveBack, Some(Response::Txn(None))) if phase == Phase::Leaving => {
                // Either an earlier request to give the disk back succeeded and the reply was lost,
                // or the lease has ended. The next snapshot of the disk's keys shows which of the
                // two happened.
                let local = &mut self.hosts[host].local[disk];
                (local.phase, local.term, local.title) = (Phase::Closed, None, None);
            }
            _ => {}
        }
        Ok(())
    }

    fn decide(
        &mut self,
        host: usize,
        disk: usize,
        look: &hob_engine::cluster::OwnershipSnapshot,
    ) -> Result<(), Violation> {
        let clock = self.hosts[host].clock(self.now);
        let Some(term) = self.hosts[host].term.filter(|it| it.is_valid(self.clock(host))) else {
            return Ok(());
        };
        let kept = &self.hosts[host].kept[disk];
        let local = &self.hosts[host].local[disk];
        let mut look = look.clone();
        let hold = look.hold.clone().filter(|_| self.is(Sabotage::TakesHeld));
        if hold.is_some() {
            look.hold = None;
        }
        if self.is(Sabotage::IgnoresDirty) {
            look.title.iter_mut().for_each(|title| title.value.dirty = false);
        }
        let is_held = look.hold.as_ref().is_some_and(|hold| hold.lease == term.lease);
        let wish = OwnershipRequest {
            known: kept.known,
            dirty: kept.writes_back && !self.is(Sabotage::EarlyWriteBack) || kept.is_dirty(),
            force: local.force && local.phase == Phase::Closed,
            keeps_copy: local.phase != Phase::Closed
                || self.is(Sabotage::KeepsWord)
                || self.is(Sabotage::KeepsWordOfHeld) && is_held,
        };
        let me = self.hosts[host].me.clone();
        let mut seat = self.hosts[host].local[disk].seat.clone();
        let (name, waiting) = (disk.to_string(), &mut self.hosts[host].waiting);
        waiting.handle_look(&name, &look);
        if let Some((revision, at)) = waiting.gone(&name) {
            seat.saw_gone(revision, at);
        }
        let mut verdict = seat.decide(clock, &me, term.lease, &look, wish);
        self.hosts[host].local[disk].seat = seat;
        if self.is(Sabotage::NoSettling)
            && let Verdict::Wait(until) = verdict
        {
            let mut seat = self.hosts[host].local[disk].seat.clone();
            verdict = seat.decide(until, &me, term.lease, &look, wish);
        }
        let phase = self.hosts[host].local[disk].phase;
        let is_doubted = phase == Phase::Doubted;
        match verdict {
            // Requests whose result is unknown cannot succeed any more after the ownership record
            // was written again.
            Verdict::Mine(title) if phase == Phase::Closed && self.hosts[host].local[disk].copy.in_doubt => {
                let continued = wish.known == Some(title.value.generation);
                let txn = self.hosts[host].local[disk].seat.mark(term.lease, &title, title.value.dirty);
                let (title, lease, from) = (title.value, term.lease, From::Itself);
                let purpose = Purpose::Take { title, lease, continued, from };
                self.ask_about(host, disk, purpose, Request::Txn(txn));
            }
            Verdict::Mine(title) => {
                // The host has locked the disk already, but the reply was lost or the backing
                // failed.
                let continued = wish.known == Some(title.value.generation);
                self.took(host, disk, title, continued, From::Itself)?;
            }
            // The lease has ended; the lease manager will report this.
            _ if !matches!(phase, Phase::Closed | Phase::Doubted) => {}
            Verdict::Take(taking) if is_doubted && !taking.continued => self.lose(host, disk),
            Verdict::Adopt(_) if is_doubted => self.lose(host, disk),
            Verdict::Adopt(adopting) => {
                let purpose = Purpose::Adopt { title: adopting.title, lease: term.lease };
                self.ask_about(host, disk, purpose, Request::Txn(adopting.txn));
            }
            Verdict::Take(taking) => {
                let title = look.title.as_ref().map(|title| &title.value);
                let from = match title {
                    None => From::Nobody,
                    Some(title) if title.member == me && title.adopts.is_none() => From::Itself,
                    Some(_) if taking.lost_by.is_some() => From::Dirty,
                    Some(title) if title.taken => From::Vanished,
                    Some(_) => From::Nobody,
                };
                let mut txn = taking.txn;
                if let Some(hold) = hold {
                    for (key, is) in &mut txn.conditions {
                        if matches!(key, Key::OwnershipLock(_)) {
                            *is = Is::At(hold.revision);
                        }
                    }
                }
                let (title, continued, lease) = (taking.title, taking.continued, term.lease);
                if from == From::Dirty {
                    let happened = self.forced[disk].as_ref().is_some_and(|it| it.happened);
                    self.forced[disk] = Some(Forced { host, generation: title.generation, happened });
                }
                let purpose = Purpose::Take { title, lease, continued, from };
                self.ask_about(host, disk, purpose, Request::Txn(txn));
            }
            Verdict::Wait(_) | Verdict::Refused(_) if is_doubted => self.lose(host, disk),
            Verdict::Refused(Refusal::Dirty(..)) => self.report.kept_dirty += 1,
            Verdict::Wait(_) | Verdict::Refused(_) => {}
        }
        Ok(())
    }

    /// Handles the acquisition of a disk's ownership lock by a host. If the host was serving the
    /// disk and no other host owned it meanwhile, the host continues to serve. Otherwise the host
    /// opens the disk.
    fn took(
        &mut self,
        host: usize,
        disk: usize,
        title: Found<OwnershipRecord>,
        continued: bool,
        from: From,
    ) -> Result<(), Violation> {
        trace!(self, "host {host} took disk {disk}: {title:?}, continued {continued}, from {from:?}");
        let is_forced = self.forced[disk].take_if(|it| it.happened).is_some();
        match if is_forced { From::Dirty } else { from } {
            From::Nobody => self.report.taken += 1,
            From::Itself => self.report.taken_again += 1,
            From::Vanished => self.report.failed_over += 1,
            From::Dirty => {
                self.report.forced += 1;
                self.checkers[disk].give_up(self.backings[disk].blocks());
            }
        }
        let term = self.hosts[host].term;
        let local = &mut self.hosts[host].local[disk];
        (local.force, local.look_again) = (false, false);
        local.title = Some(title);
        match local.phase {
            Phase::Doubted if continued => {
                (local.phase, local.term) = (Phase::Serving, term);
                self.release(host, disk)
            }
            Phase::Doubted => {
                self.lose(host, disk);
                Ok(())
            }
            Phase::Closed => {
                (local.phase, local.term) = (Phase::Opening, term);
                local.copy = Copy::default();
                local.epoch = self.backings[disk].open();
                let at = self.now + self.rng.latency(self.plan.backing_ns);
                let life = self.hosts[host].life;
                self.queue.push(at, Event::Opened { host, life, disk });
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Handles the end of a cache recovery: decides whether the cache is valid.
    pub(super) fn opened(&mut self, host: usize, disk: usize) -> Result<(), Violation> {
        let believes = self.is(Sabotage::BelievesFlash);
        let early = self.is(Sabotage::EarlyWriteBack);
        let believes_adopted = self.is(Sabotage::BelievesAdopted);
        let local = &mut self.hosts[host].local[disk];
        if local.phase != Phase::Opening {
            return Ok(());
        }
        let generation = local.generation();
        let me = &self.hosts[host].me;
        let adopted = self.hosts[host].local[disk].title.iter().flat_map(|title| &title.value.adopted);
        let was_adopted = adopted.into_iter().find(|it| it.by.id == me.id).map(|it| it.generation);
        let kept = &mut self.hosts[host].kept[disk];
        // The first host that ever opens the disk has no flash content of the disk.
        let continued = kept.known.is_none_or(|known| known == generation);
        let is_outdated = !continued && was_adopted.is_some() && was_adopted == kept.known;
        self.report.outdated += u64::from(is_outdated && kept.is_dirty());
        if !(continued || believes || is_outdated && believes_adopted) {
            // Dirty data in this cache was counted as lost when another host took the disk by
            // force.
            self.report.not_believed += u64::from(!kept.cache.is_empty());
            kept.cache.clear();
        }
        kept.known = Some(generation);
        if early {
            kept.writes_back = false;
        }
        self.hosts[host].local[disk].phase = Phase::Serving;
        Ok(())
    }

    /// Closes and reopens the disks of a host whose backings fail. The disks stay locked.
    pub(super) fn reopen(&mut self, host: usize) {
        for disk in 0..self.plan.disks {
            let local = &mut self.hosts[host].local[disk];
            if local.phase != Phase::Serving {
                continue;
            }
            // Requests to etcd that this host sent before may still take effect.
            let in_doubt = local.copy.in_doubt || local.asked.take().is_some();
            trace!(self, "host {host} lost the backing of disk {disk}");
            self.close(host, disk);
            self.hosts[host].local[disk].copy.in_doubt = in_doubt;
            self.report.reopened += 1;
        }
    }

    /// Closes a disk that another host owns now.
    fn lose(&mut self, host: usize, disk: usize) {
        trace!(self, "host {host} lost disk {disk}");
        self.report.lost += 1;
        self.close(host, disk);
    }

    fn close(&mut self, host: usize, disk: usize) {
        let local = &mut self.hosts[host].local[disk];
        self.report.refused += local.ops.len() as u64;
        local.ops.clear();
        local.busy.clear();
        local.held_changes.clear();
        local.held_answers.clear();
        (local.phase, local.title, local.term) = (Phase::Closed, None, None);
        (local.mode_due, local.draining) = (false, false);
        local.copy = Copy::default();
    }
}
