//! Ownership of the disk according to the hosts' durable records. Checks that only the owner serves
//! the disk.

use hob_engine::command::Role;
use hob_engine::migration::{Record, Session};

use super::{Simulation, trace};
use crate::media::Crash;
use crate::model::Loss;
use crate::{Violation, ensure};

impl Simulation<'_> {
    /// Returns true if the host owns the disk according to its own record.
    pub(super) fn owns(&self, host: usize) -> bool {
        matches!(self.hosts[host].record, Some(Record::Owner { .. } | Record::Leaving(_)))
    }

    /// Returns true if the host may write to the backing, according to the records of all hosts.
    pub(super) fn is_entitled(&self, host: usize) -> bool {
        let Some(Record::Awaiting(awaited)) = self.hosts[host].record else { return self.owns(host) };
        self.hosts.iter().any(|other| {
            matches!(other.record, Some(Record::Away { session, taken: false }) if session == awaited)
        })
    }

    pub(super) fn owner(&self) -> Option<usize> {
        (0..self.hosts.len()).find(|host| self.is_entitled(*host))
    }

    /// Makes a host's record durable.
    pub(super) fn make_durable(&mut self, host: usize, record: Record) -> Result<(), Violation> {
        let old = self.hosts[host].record;
        trace!(self, "host {host} has the record {record:?}");
        ensure!(
            Some(record.generation()) >= old.map(Record::generation),
            "host {host} writes {record:?}, although {old:?} has a higher generation"
        );
        self.hosts[host].record = Some(record);
        let owners: Vec<usize> = (0..self.hosts.len()).filter(|host| self.owns(*host)).collect();
        ensure!(owners.len() <= 1, "{owners:?} all own the disk: {}", self.state());
        if let Record::Away { session: Session { .. }, taken: false } = record {
            let late = self.backing_ios.values().find(|io| io.host == host && io.changes);
            ensure!(late.is_none(), "host {host} departs with {late:?} in flight");
        }
        if let (Some(Record::Awaiting(_)), Record::Owner { generation, .. }) = (old, record) {
            self.report.handed_over += 1;
            let highest = self.hosts.iter().filter_map(|host| host.record).map(Record::generation).max();
            ensure!(
                Some(generation) == highest,
                "host {host} takes over in generation {generation}, but the highest is {highest:?}"
            );
        }
        Ok(())
    }

    /// Checks that at most one host serves the disk, and that the records entitle this host to it.
    pub(super) fn check_roles(&self) -> Result<(), Violation> {
        let serve = |host: &usize| matches!(self.hosts[*host].role(), Some(Role::Here | Role::Frozen));
        let serving: Vec<usize> = (0..self.hosts.len()).filter(serve).collect();
        ensure!(serving.len() <= 1, "hosts {serving:?} serve the disk at once: {}", self.state());
        if let Some(host) = serving.first()
            && self.hosts[*host].role() == Some(Role::Here)
        {
            ensure!(
                self.is_entitled(*host),
                "host {host} serves the disk, which it does not own: {}",
                self.state()
            );
        }
        Ok(())
    }

    /// Cuts the power of all hosts.
    pub(super) fn cut_power(&mut self) -> Result<(), Violation> {
        trace!(self, "the power fails");
        self.report.power_cuts += 1;
        for host in 0..self.hosts.len() {
            self.crash(host)?;
        }
        self.backing.crash(Crash::PowerCut, &mut self.rng);
        self.model.check_power_cut(self.backing.now())?;
        self.model.crash(Loss::Unflushed);
        Ok(())
    }
}
