//! Counts of histories of several hosts.

/// Counts of what happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Attempts that the operator began.
    pub attempts: u64,
    /// Attempts that a restart began.
    pub attempts_anew: u64,
    /// Disks that became another host's, durably.
    pub handed_over: u64,
    /// Attempts that ended with the disk kept.
    pub kept: u64,
    /// Freezes that ended with the disk served again.
    pub thaws: u64,
    /// Hosts that crashed.
    pub crashes: u64,
    /// Processes that were stopped for a while.
    pub process_stops: u64,
    /// Crashes of hosts with an attempt in progress.
    pub crashes_of_sources: u64,
    /// Crashes of hosts that awaited a disk.
    pub crashes_of_destinations: u64,
    /// Crashes of hosts that served a disk before their record said so.
    pub crashes_while_taking: u64,
    /// Restarts that continued to tell another host that it has the disk.
    pub resumed_away: u64,
    /// Power cuts of all hosts.
    pub power_cuts: u64,
    /// Packets that were lost.
    pub lost: u64,
    /// Packets that were repeated.
    pub repeated: u64,
    /// Packets that took very long.
    pub late: u64,
    /// Calls without an answer.
    pub unanswered: u64,
    /// Records of which it was unknown whether they are durable.
    pub records_in_doubt: u64,
    /// Moves of the guest.
    pub moves: u64,
    /// Moves back, because it had not written anything.
    pub moves_back: u64,
    /// Reads served in standby.
    pub standby_reads: u64,
    /// Changes that waited for the hand-over.
    pub changes_waited: u64,
    /// Requests refused because the disk is another host's, or leaves.
    pub refused: u64,
    /// Requests of clients that should not be there.
    pub rogues: u64,
    /// Ranges pulled, before the hand-over.
    pub pulled_before: u64,
    /// Ranges pulled after it.
    pub pulled_after: u64,
    /// Reads served from the former owner's flash.
    pub from_former: u64,
    /// Reads for which it had nothing.
    pub former_lacks: u64,
    /// Pages of a list that arrived after the hand-over.
    pub late_pages: u64,
    /// Ranges invalidated.
    pub forgotten: u64,
    /// Hits of guests.
    pub hits: u64,
    /// Number of steps at which a host may crash, by host.
    pub steps: [u64; 3],
    /// Duration in nanoseconds of virtual time.
    pub took_ns: u64,
}

impl Report {
    /// Returns all counts with names.
    pub fn counts(&self) -> [(&'static str, u64); 30] {
        [
            ("attempts", self.attempts),
            ("attempts begun anew by a restart", self.attempts_anew),
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
            ("reads that it lacked", self.former_lacks),
            ("pages of lists after the hand-over", self.late_pages),
            ("ranges forgotten", self.forgotten),
            ("hits", self.hits),
        ]
    }

    /// Adds another history's counts.
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
