//! Simulated network between the hosts. The network loses, delays, repeats and reorders packets,
//! and is sometimes partitioned.

use hob_engine::migration::{Answer, Message, Refusal, Session, Ticket};

use super::plan::MS;
use super::{Event, Simulation, trace};
use crate::Violation;
use crate::content::Tag;

/// A packet between two hosts.
#[derive(Clone, Debug)]
pub(super) enum Packet {
    /// A call of the source's state machine to the destination.
    Call { from: Sender, message: Message },
    /// The destination's answer to a call.
    Answer { life: u32, number: u64, answer: Answer },
    /// A read of the disk's data on the other host.
    Ask { from: Sender, session: Session, kind: Kind, offset: u64, len: u64 },
    /// The data that answers a read.
    Data { life: u32, number: u64, data: Option<Vec<Tag>> },
    /// A request for one page of the list of cached data.
    AskList { from: Sender, session: Session, page: usize },
    /// One page of the list of cached data, with the hottest data first. An empty page marks the
    /// end of the list. `None` means that the source refused to send the page.
    List { life: u32, session: Session, page: usize, ranges: Option<Vec<u8>> },
}

/// Sender of a packet: host, process number of the host, and request number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    pub(super) host: usize,
    pub(super) life: u32,
    pub(super) number: u64,
}

/// Kind of read that another host answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A guest read in standby, which the owner answers in any migration attempt. The reader does
    /// not cache the data.
    Owner,
    /// A pull of cached data by the destination, which caches the data. The owner answers a pull
    /// only if the pull's session is that of the owner's present migration attempt, because only in
    /// this attempt the owner reports changes of the disk to the destination.
    Teller,
    /// A read or pull after the hand-over. The former owner answers it, because the data has not
    /// changed since the hand-over.
    Former,
}

/// The state of the network's connections.
#[derive(Debug)]
pub(super) struct Network {
    /// True if packets from one host to another are lost, indexed by sender and receiver.
    cut: Vec<Vec<bool>>,
}

impl Network {
    pub(super) fn new(hosts: usize) -> Network {
        Network { cut: vec![vec![false; hosts]; hosts] }
    }

    pub(super) fn heal(&mut self) {
        self.cut.iter_mut().flatten().for_each(|cut| *cut = false);
    }
}

impl Simulation<'_> {
    /// Cuts all connections of a random host for `ns` nanoseconds, in both directions or only for
    /// packets that this host sends.
    pub(super) fn part(&mut self, ns: u64) -> Result<(), Violation> {
        let hosts = self.hosts.len();
        let from = self.rng.below(hosts as u64) as usize;
        let both = self.rng.chance(600);
        for other in 0..hosts {
            self.network.cut[from][other] = true;
            self.network.cut[other][from] |= both;
        }
        trace!(self, "the network is parted at {from}, both ways: {both}, for {ns} ns");
        if !self.ending {
            self.queue.push(self.now + ns, Event::Heal);
        }
        Ok(())
    }

    pub(super) fn sender(&mut self, host: usize) -> Sender {
        let life = self.hosts[host].life;
        let number = self.hosts[host].ram.as_mut().expect("the host is up").number();
        Sender { host, life, number }
    }

    /// Sends a packet. The packet may arrive late, several times or not at all.
    pub(super) fn send(&mut self, from: usize, to: usize, packet: Packet) {
        let times = match () {
            () if self.ending => 1,
            () if self.network.cut[from][to] || self.rng.chance(self.plan.lost) => 0,
            () => 1 + u32::from(self.rng.chance(self.plan.repeated)),
        };
        trace!(self, "host {from} sends to {to}, {times} times: {packet:?}");
        self.report.lost += u64::from(times == 0);
        self.report.repeated += u64::from(times == 2);
        for _ in 0..times {
            let mut takes = self.rng.latency(self.plan.network_ns);
            if !self.ending && self.rng.chance(self.plan.late) {
                takes += self.rng.below(30_000 * MS);
                self.report.late += 1;
            }
            self.queue.push(self.now + takes, Event::Arrives(to, packet.clone()));
        }
    }

    /// Sends a call of the source's state machine.
    pub(super) fn call(&mut self, host: usize, ticket: Ticket, message: Message) -> Result<(), Violation> {
        if !self.step(host)? {
            return Ok(());
        }
        let to = self.hosts[host].order.expect("the order has a destination").to;
        let from = self.sender(host);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.calls.insert(from.number, ticket);
        // Sometimes the connection breaks before the answer, and the call still arrives.
        let breaks = !self.ending && self.rng.chance(self.plan.lost / 4);
        let waits = if breaks { self.rng.below(self.plan.call_ns) } else { self.plan.call_ns };
        self.queue.push(self.now + waits, Event::Unanswered(host, from.life, from.number));
        self.send(host, to, Packet::Call { from, message });
        self.step(host).map(|_| ())
    }

    /// Sends the destination's answer to a call.
    pub(super) fn answer(&mut self, host: usize, ticket: Ticket, answer: Answer) -> Result<(), Violation> {
        if !self.step(host)? {
            return Ok(());
        }
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let heard = ram.heard.remove(&ticket);
        let (to, life, number) =
            heard.ok_or_else(|| Violation(format!("host {host} answers {ticket:?} twice: {answer:?}")))?;
        self.send(host, to, Packet::Answer { life, number, answer });
        self.step(host).map(|_| ())
    }

    pub(super) fn arrives(&mut self, host: usize, packet: Packet) -> Result<(), Violation> {
        if self.hosts[host].ram.is_none() {
            self.report.lost += 1;
            return Ok(());
        }
        trace!(self, "host {host} gets {packet:?}");
        let life = self.hosts[host].life;
        match packet {
            Packet::Call { from, message } => self.called(host, from, message),
            Packet::Answer { life: of, number, answer } if of == life => {
                self.answered(host, number, Some(answer))
            }
            Packet::Ask { from, session, kind, offset, len } => {
                self.asked(host, from, session, kind, (offset, len))
            }
            Packet::Data { life: of, number, data } if of == life => self.data(host, number, data),
            Packet::AskList { from, session, page } => self.asked_for_list(host, from, session, page),
            Packet::List { life: of, session, page, ranges } if of == life => {
                self.listed(host, session, page, ranges)
            }
            // The packet is for a process that has ended.
            _ => Ok(()),
        }
    }

    fn called(&mut self, host: usize, from: Sender, message: Message) -> Result<(), Violation> {
        if !self.step(host)? {
            return Ok(());
        }
        let (now, departs) = (self.now, self.has_departed(host));
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let ticket = Ticket(ram.number());
        ram.heard.insert(ticket, (from.host, from.life, from.number));
        if departs {
            // The host has one record, which the unfinished source state machine still needs.
            return self.answer(host, ticket, Err(Refusal::Failed));
        }
        ram.destination.handle_call(now, ticket, message);
        self.drain(host)
    }

    /// Handles the answer to a call, or the loss of the call.
    pub(super) fn answered(
        &mut self,
        host: usize,
        number: u64,
        answer: Option<Answer>,
    ) -> Result<(), Violation> {
        let now = self.now;
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let Some(ticket) = ram.calls.remove(&number) else { return Ok(()) };
        if !self.step(host)? {
            return Ok(());
        }
        self.report.unanswered += u64::from(answer.is_none());
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        if let Some(source) = &mut ram.source {
            source.handle_answer(now, ticket, answer);
        }
        self.drain(host)
    }
}
