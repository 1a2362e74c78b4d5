//! One simulated host: its durable state, and the state that a crash loses.

use std::collections::{BTreeMap, VecDeque};

use hob_engine::command::{
    Access, CacheChange, Command, DataSegment, DiskConfig, Enable, NewRing, Role, Segment,
};
use hob_engine::io::{Io, Request};
use hob_engine::migration::{Destination, Pull, Puller, Record, RemainingRanges, Session, Source, Ticket};
use hob_engine::units::{BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, IoId, RequestId};
use hob_engine::{Engine, Limits};

use super::actions::{Act, Actor};
use super::plan::Plan;
use crate::content::{Tag, UNIT_BYTES, Written};
use crate::media::Flash;
use crate::model::Reading;

/// Id of the only disk.
pub(super) const DISK: DiskId = DiskId(0);

/// Offset of the first segment on flash, bytes.
const SEGMENTS_START: u64 = 8192;

/// Method by which a migration transfers the cache to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carry {
    /// The destination pulls cached data before the hand-over, and pulls the rest after the
    /// hand-over.
    Copy,
    /// The destination reads the cache from the former owner after the hand-over.
    Remote,
    /// The destination reads the hottest data from the backing after the hand-over.
    HeatMap,
    /// The migration does not transfer the cache.
    Drop,
}

/// The operator's migration order, which is part of the durable state.
#[derive(Clone, Copy, Debug)]
pub(super) struct MoveOrder {
    /// Destination host of the migration.
    pub(super) to: usize,
    pub(super) carry: Carry,
    pub(super) on_demand: bool,
}

/// One simulated host.
pub(super) struct Host {
    /// Number of processes that the host has started.
    pub(super) life: u32,
    pub(super) record: Option<Record>,
    pub(super) order: Option<MoveOrder>,
    /// Data that the host pulled in standby. Some sabotages use this data to answer reads.
    pub(super) shadow: BTreeMap<u64, Tag>,
    pub(super) flash: Flash,
    pub(super) written: Written,
    /// Number of journal rings that the host's caches have had.
    pub(super) rings: u32,
    /// Time until which the host's process is paused.
    pub(super) stopped_until: Instant,
    /// State that a crash of the host loses; `None` while the host is down.
    pub(super) ram: Option<Box<Ram>>,
}

impl Host {
    pub(super) fn new(plan: &Plan) -> Host {
        let segments = plan.segments + plan.ring.unwrap_or(0);
        let bytes = SEGMENTS_START + segments * plan.config.segment_bytes;
        let flash = Flash::new(bytes, plan.flash_faults, None);
        Host {
            life: 0,
            record: None,
            order: None,
            shadow: BTreeMap::new(),
            flash,
            written: Written::default(),
            rings: 0,
            stopped_until: Instant(0),
            ram: None,
        }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.ram.as_ref()?.due()
    }

    /// Returns the role of the disk in the host's engine.
    pub(super) fn role(&self) -> Option<Role> {
        self.ram.as_ref()?.engine.role(DISK)
    }

    /// Returns the source state machine of a migration attempt that is in progress or has just
    /// ended.
    pub(super) fn source(&self) -> Option<&Source> {
        self.ram.as_ref()?.source.as_ref()
    }

    /// Returns the migration session in which the host waits for the disk.
    pub(super) fn awaits(&self) -> Option<Session> {
        self.ram.as_ref()?.destination.awaits()
    }
}

/// Sender of a request to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// The guest sent the request. While the guest moves, it sends only flushes.
    Guest,
    /// A rogue client sent the request.
    Rogue,
    /// The simulation sent the request at the end of the history.
    Last,
    /// An action of the host's migration (as source or destination) sent the request.
    Act(Actor, Ticket),
    /// The pull of cached data sent the request.
    Puller(Pull),
    /// A process of another host sent the request: host, process number, request number.
    Peer(usize, u32, u64),
}

/// Token that the disk model returned when the request began. The model needs the token at the end
/// of the request.
#[derive(Debug)]
pub(super) enum Token {
    Read(Reading),
    Change(u32),
    Flush(u32),
    None,
}

/// A request that the engine has accepted and not answered yet.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) request: Request,
    pub(super) who: Who,
    pub(super) token: Token,
}

/// A payload buffer that the engine uses.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) tags: Vec<Tag>,
    pub(super) replied: bool,
    pub(super) ios: u32,
}

/// A read of the disk that is sent to another host.
#[derive(Debug)]
pub(super) struct PeerRead {
    pub(super) io: Io,
    pub(super) tries: u32,
    /// True if the destination writes the data of the read to its cache.
    pub(super) is_pull: bool,
}

/// The former owner, from which the new owner may still read.
#[derive(Debug)]
pub(super) struct Former {
    pub(super) host: usize,
    pub(super) session: Session,
}

/// State of pulling cached data from the other host.
#[derive(Debug)]
pub(super) struct Pulling {
    pub(super) session: Session,
    pub(super) carry: Carry,
    pub(super) puller: Puller,
    pub(super) left_behind: RemainingRanges,
    /// Number of the next page of the list of cached data.
    pub(super) page: usize,
    /// Number of requests for the next page of the list.
    pub(super) page_tries: u32,
    /// True if the destination has the complete list of cached data, or cannot get any more of it.
    pub(super) has_list: bool,
    pub(super) in_flight: u32,
    /// True if the next pull is scheduled.
    pub(super) is_due: bool,
    pub(super) after: bool,
}

impl Pulling {
    /// Returns true if the new owner reads from the former owner's flash after the hand-over.
    pub(super) fn reads_former(&self) -> bool {
        matches!(self.carry, Carry::Copy | Carry::Remote)
    }
}

/// An action that needs several engine requests.
#[derive(Debug, Default)]
pub(super) struct Several {
    pub(super) left: u32,
    pub(super) failed: bool,
    pub(super) ranges: Vec<(u64, u64)>,
}

/// Next step of the host when an engine command has ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum After {
    Nothing,
    /// Ends this action.
    Act(Actor, Ticket),
    /// Adds the disk again for this action, now that the command has removed the disk.
    Again(Ticket),
}

/// A durable record that is being written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writing {
    pub(super) record: Record,
    pub(super) doer: Actor,
    pub(super) ticket: Ticket,
}

/// State of a host that a crash loses.
pub(super) struct Ram {
    pub(super) engine: Engine,
    pub(super) source: Option<Source>,
    pub(super) destination: Destination,
    pub(super) requests: BTreeMap<RequestId, InFlight>,
    pub(super) made: u64,
    pub(super) buffers: BTreeMap<BufferId, Buffer>,
    pub(super) spare: Vec<BufferId>,
    pub(super) commands: BTreeMap<CommandId, After>,
    pub(super) commanded: u64,
    /// Actions that the host has not started yet, in order.
    pub(super) acts: VecDeque<Act>,
    pub(super) acts_at: Instant,
    pub(super) several: BTreeMap<(Actor, Ticket), Several>,
    pub(super) writing: VecDeque<Writing>,
    /// Calls that the host has sent and that are not answered yet.
    pub(super) calls: BTreeMap<u64, Ticket>,
    /// Calls that the host has received and not answered yet: the sender's host, process number and
    /// call number.
    pub(super) heard: BTreeMap<Ticket, (usize, u32, u64)>,
    pub(super) numbers: u64,
    /// True if an earlier process of the host may have acknowledged writes that are not durable.
    pub(super) must_flush: bool,
    /// The action in progress that prepares the disk at the destination.
    pub(super) preparing: Option<Ticket>,
    pub(super) peer_reads: BTreeMap<u64, PeerRead>,
    pub(super) pulling: Option<Pulling>,
    pub(super) former: Option<Former>,
    /// True if the disk is being removed from the host, so reads that another host does not answer
    /// are not retried.
    pub(super) hangs_up: bool,
    /// True if a guest write waits for the hand-over.
    pub(super) wanted: bool,
}

impl Ram {
    pub(super) fn new(record: Option<Record>) -> Ram {
        let limits = Limits { requests_max: 256, flash_errors_max: 1_000_000, ..Limits::default() };
        Ram {
            engine: Engine::new(limits),
            source: None,
            destination: Destination::new(record),
            requests: BTreeMap::new(),
            made: 0,
            buffers: BTreeMap::new(),
            spare: vec![],
            commands: BTreeMap::new(),
            commanded: 0,
            acts: VecDeque::new(),
            acts_at: Instant(0),
            several: BTreeMap::new(),
            writing: VecDeque::new(),
            calls: BTreeMap::new(),
            heard: BTreeMap::new(),
            numbers: 0,
            must_flush: matches!(record, Some(Record::Awaiting(_))),
            preparing: None,
            peer_reads: BTreeMap::new(),
            pulling: None,
            former: None,
            hangs_up: false,
            wanted: false,
        }
    }

    /// Returns the time at which the host's engine or state machines must be called next.
    pub(super) fn due(&self) -> Option<Instant> {
        let source = self.source.as_ref().and_then(Source::poll_timeout);
        [self.engine.poll_timeout(), source, self.destination.poll_timeout()].into_iter().flatten().min()
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.engine.handle_timeout(now);
        if let Some(source) = &mut self.source {
            source.handle_timeout(now);
        }
        self.destination.handle_timeout(now);
    }

    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn command(&mut self, now: Instant, command: Command, after: After) {
        self.commanded += 1;
        let id = CommandId(self.commanded);
        self.commands.insert(id, after);
        self.engine.handle_command(now, id, DISK, command);
    }

    pub(super) fn add_disk(&mut self, now: Instant, plan: &Plan) {
        let config = DiskConfig {
            size_bytes: u64::from(plan.units) * UNIT_BYTES,
            access: Access::ReadWrite,
            datastore: DatastoreId(0),
        };
        self.hangs_up = false;
        self.command(now, Command::AddDisk(config), After::Nothing);
    }

    /// Enables an empty cache. A cache with a journal gets a journal ring with this number.
    pub(super) fn add_cache(&mut self, now: Instant, plan: &Plan, number: u32, after: After) {
        let segment =
            |i| Segment { device: DeviceId(0), offset: SEGMENTS_START + i * plan.config.segment_bytes };
        let place = |i| DataSegment { place: segment(i), ordinal: i as u32, seconds_only: false };
        let journal = plan.ring.map(|count| {
            let copies = vec![(plan.segments..plan.segments + count).map(segment).collect()];
            NewRing { cache: [1; 16], number, identity: [2; 32], copies }
        });
        let segments = (0..plan.segments).map(place).collect();
        let enable = Enable { config: plan.config, segments, journal, recovered: None };
        self.command(now, Command::Cache(CacheChange::Enable(Box::new(enable))), after);
    }
}

impl super::Simulation<'_> {
    /// Starts a process of the host, which continues from the host's durable record.
    pub(super) fn start(&mut self, host: usize) -> Result<(), crate::Violation> {
        let (now, plan) = (self.now, &self.plan);
        let it = &mut self.hosts[host];
        if it.ram.is_some() {
            return Ok(());
        }
        it.life += 1;
        super::trace!(self, "host {host} starts: {:?}", it.record);
        let mut ram = Box::new(Ram::new(it.record));
        match it.record {
            Some(Record::Owner { .. } | Record::Leaving(_)) => {
                ram.add_disk(now, plan);
                it.rings += 1;
                ram.add_cache(now, plan, it.rings, After::Nothing);
            }
            Some(Record::Away { session, taken: false }) => {
                ram.source = Some(Source::resume_away(session));
                self.report.resumed_away += 1;
            }
            _ => {}
        }
        it.ram = Some(ram);
        if let Some(Record::Leaving(session)) = it.record {
            let next = Session { attempt: session.attempt + 1, ..session };
            self.report.attempts_anew += 1;
            self.start_source(host, next);
        }
        self.drain(host)
    }

    /// Starts a migration attempt as the source.
    pub(super) fn start_source(&mut self, host: usize, session: Session) {
        let order = self.hosts[host].order.expect("the order has a destination");
        let options = hob_engine::migration::SourceOptions {
            on_demand: order.on_demand,
            freeze_ns_max: self.plan.freeze_ns,
            serves_after: matches!(order.carry, Carry::Copy | Carry::Remote),
        };
        super::trace!(self, "host {host} begins {session:?}: {order:?}");
        self.attempts.insert(session, host);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.source = Some(Source::start(session, options));
    }

    /// Kills a host. A random part of each of its writes in flight takes effect.
    pub(super) fn crash(&mut self, host: usize) -> Result<(), crate::Violation> {
        let Some(ram) = self.hosts[host].ram.take() else { return Ok(()) };
        super::trace!(self, "host {host} crashes");
        self.count_crash(host, &ram);
        let mine: Vec<IoId> =
            self.backing_ios.iter().filter(|(_, io)| io.host == host).map(|(id, _)| *id).collect();
        for id in mine {
            self.backing_ios.remove(&id);
            self.backing.abandon(id, &mut self.rng);
        }
        self.hosts[host].flash.crash(crate::media::Crash::Kill, &mut self.rng);
        if let Some(writing) = ram.writing.front()
            && self.rng.chance(500)
        {
            self.make_durable(host, writing.record)?;
        }
        for in_flight in ram.requests.into_values() {
            self.lose(&in_flight)?;
        }
        let mean = self.rng.pick(&[10, 500, 3_000]) * super::plan::MS;
        let after = self.rng.latency(mean);
        if !self.ending {
            self.queue.push(self.now + after, super::Event::Restart(host));
        }
        Ok(())
    }

    fn count_crash(&mut self, host: usize, ram: &Ram) {
        self.report.crashes += 1;
        self.report.crashes_of_sources += u64::from(ram.source.is_some());
        self.report.crashes_of_destinations += u64::from(ram.destination.awaits().is_some());
        let serves = ram.engine.role(DISK) == Some(Role::Here);
        let awaited = matches!(self.hosts[host].record, Some(Record::Awaiting(_)));
        self.report.crashes_while_taking += u64::from(serves && awaited);
    }
}
