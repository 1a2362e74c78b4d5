//! Event counts of histories of several hosts, which migrate a disk and its cache.
//!
//! The destination *pulls* cached data from the source, range by range. The source sends a list of
//! its cached ranges in *pages*, most used ranges first. The source *freezes* the disk before the
//! hand-over: new requests wait. If the hand-over fails, the source *thaws* the disk.

/// Event counts of histories of several hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of migration attempts that the operator started.
    pub attempts: u64,
    /// Number of migration attempts that a host began after a restart, because its durable record
    /// says that the disk is leaving.
    pub attempts_anew: u64,
    /// Number of durable hand-overs of a disk to another host.
    pub handed_over: u64,
    /// Number of migration attempts that ended without a hand-over, so that the source kept the
    /// disk.
    pub kept: u64,
    /// Number of freezes after which the source served the disk again.
    pub thaws: u64,
    /// Number of host crashes.
    pub crashes: u64,
    /// Number of pauses of processes.
    pub process_stops: u64,
    /// Number of crashes of source hosts during a migration attempt.
    pub crashes_of_sources: u64,
    /// Number of crashes of destination hosts that waited for a disk.
    pub crashes_of_destinations: u64,
    /// Number of crashes of hosts that served a disk and had not written their ownership record
    /// yet.
    pub crashes_while_taking: u64,
    /// Number of restarted hosts that continued to report the hand-over to the new owner.
    pub resumed_away: u64,
    /// Number of power cuts of all hosts.
    pub power_cuts: u64,
    /// Number of lost packets.
    pub lost: u64,
    /// Number of repeated packets.
    pub repeated: u64,
    /// Number of packets with a very long delay.
    pub late: u64,
    /// Number of calls of one host's state machine to another host that were not answered in time.
    pub unanswered: u64,
    /// Number of failed writes of a host's durable record of the disk. A failed write may have
    /// taken effect.
    pub records_in_doubt: u64,
    /// Number of guest moves between hosts.
    pub moves: u64,
    /// Number of guest moves back to the old host. A guest that has written does not move back.
    pub moves_back: u64,
    /// Number of guest reads served in standby.
    pub standby_reads: u64,
    /// Number of guest writes that waited for the hand-over.
    pub changes_waited: u64,
    /// Number of requests that a host refused because it was handing the disk over, or because
    /// another host had the disk.
    pub refused: u64,
    /// Number of requests of rogue clients.
    pub rogues: u64,
    /// Number of ranges pulled before the hand-over.
    pub pulled_before: u64,
    /// Number of ranges pulled after the hand-over.
    pub pulled_after: u64,
    /// Number of reads served from the former owner's flash.
    pub from_former: u64,
    /// Number of reads for which the former owner had no data.
    pub former_lacks: u64,
    /// Number of pages of the list of cached ranges that the destination received after the
    /// hand-over.
    pub late_pages: u64,
    /// Number of ranges invalidated at the destination.
    pub forgotten: u64,
    /// Number of cache hits of guests.
    pub hits: u64,
    /// Number of steps at which a host may crash, by host.
    pub steps: [u64; 3],
    /// Duration of the histories, nanoseconds of virtual time.
    pub took_ns: u64,
}

impl Report {
    /// Returns all counts with their names.
    pub fn counts(&self) -> [(&'static str, u64); 30] {
        [
            ("attempts", self.attempts),
            ("attempts begun again by a restart", self.attempts_anew),
            ("handed over", self.handed_over),
            ("kept", self.kept),
            ("thaws", self.thaws),
            ("crashes", self.crashes),
            ("process stops", self.process_stops),
            ("crashes of sources", self.crashes_of_sources),
            ("crashes of destinations", self.crashes_of_destinations),
            ("crashes while taking over", self.crashes_while_taking),
            ("departures resumed by a restart", self.resumed_away),
            ("power cuts", self.power_cuts),
            ("packets lost", self.lost),
            ("packets repeated", self.repeated),
            ("packets very late", self.late),
            ("calls unanswered", self.unanswered),
            ("records in doubt", self.records_in_doubt),
            ("moves", self.moves),
            ("moves back", self.moves_back),
            ("reads in standby", self.standby_reads),
            ("changes that waited", self.changes_waited),
            ("requests refused", self.refused),
            ("requests of rogues", self.rogues),
            ("ranges pulled before", self.pulled_before),
            ("ranges pulled after", self.pulled_after),
            ("reads from the former owner", self.from_former),
            ("reads that the former owner lacked", self.former_lacks),
            ("pages of lists after the hand-over", self.late_pages),
            ("ranges forgotten", self.forgotten),
            ("hits", self.hits),
        ]
    }

    /// Adds the counts of another history.
    pub fn add(&mut self, other: &Report) {
        macro_rules! sum {
            ($($field:ident)+) => { $(self.$field += other.$field;)+ };
        }
        sum!(process_stops attempts attempts_anew handed_over kept thaws crashes crashes_of_sources crashes_of_destinations);
        sum!(crashes_while_taking resumed_away power_cuts lost repeated late unanswered records_in_doubt moves);
        sum!(moves_back standby_reads changes_waited refused rogues pulled_before pulled_after from_former);
        sum!(former_lacks late_pages forgotten hits took_ns);
        self.steps.iter_mut().zip(other.steps).for_each(|(mine, more)| *mine += more);
    }
}
