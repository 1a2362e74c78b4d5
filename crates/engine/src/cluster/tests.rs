//! Tests of each state machine by itself; `crates/world/src/cluster` tests them together.

use super::*;

const S: u64 = 1_000_000_000;
const LEASE: u64 = 10 * S;

fn member(name: &str) -> Member {
    Member { name: name.to_owned(), id: format!("{name}-id") }
}

fn at(seconds: u64) -> Instant {
    Instant(seconds * S)
}

/// Sends the next call and delivers its answer at a later time.
#[track_caller]
fn answer(keeper: &mut LeaseManager, sent: Instant, answered: Instant, answer: Answer) -> Ask {
    let call = keeper.poll_call(sent).expect("there is a call");
    assert_eq!(keeper.poll_call(sent), None, "one at a time");
    assert_eq!(keeper.poll_timeout(), None);
    keeper.handle_answer(answered, call.number, answer);
    call.ask
}

fn joined() -> LeaseManager {
    let mut keeper = LeaseManager::new(member("a"), LEASE);
    let granted = Answer::Granted { lease: LeaseId(7), lease_ns: LEASE };
    assert_eq!(answer(&mut keeper, at(0), at(1), granted), Ask::Grant(LEASE));
    assert_eq!(answer(&mut keeper, at(1), at(1), Answer::LookedUp(None)), Ask::LookUp);
    let Ask::Register(txn) = answer(&mut keeper, at(1), at(2), Answer::Registered) else {
        panic!("registers")
    };
    assert_eq!(txn.conditions, [(Key::Host("a".to_owned()), Is::Absent)]);
    let term = LeaseTerm { lease: LeaseId(7), until: Instant(usable_ns(LEASE)) };
    assert_eq!(keeper.poll_event(), Some(Event::Joined(term)));
    keeper
}

#[test]
fn a_lease_counts_from_when_its_renewal_was_sent() {
    let mut keeper = joined();
    assert_eq!(answer(&mut keeper, at(3), at(5), Answer::Renewed(LEASE)), Ask::Renew(LeaseId(7)));
    let until = at(3) + usable_ns(LEASE);
    assert_eq!(keeper.term(), Some(LeaseTerm { lease: LeaseId(7), until }));
    assert!(usable_ns(LEASE) < LEASE - SCHEDULING_NS_MAX);
    assert!(keeper.term().unwrap().is_valid(Instant(until.0 - 1)));
    assert!(!keeper.term().unwrap().is_valid(until), "the moment itself is too late");
    assert_eq!(keeper.poll_timeout(), Some(at(3) + LEASE / 4).max(Some(at(5))));
}

#[test]
fn a_longer_granted_time_changes_nothing_and_a_shorter_one_counts() {
    let mut keeper = joined();
    answer(&mut keeper, at(3), at(3), Answer::Renewed(100 * LEASE));
    assert_eq!(keeper.term().unwrap().until, at(3) + usable_ns(LEASE));
    answer(&mut keeper, at(6), at(6), Answer::Renewed(LEASE / 2));
    assert_eq!(keeper.term().unwrap().until, at(3) + usable_ns(LEASE), "what was known stays known");
    answer(&mut keeper, at(9), at(9), Answer::Renewed(0));
    assert_eq!(keeper.term().unwrap().until, at(3) + usable_ns(LEASE));
}

#[test]
fn renewals_without_answer_are_repeated_and_extend_nothing() {
    let mut keeper = joined();
    let until = keeper.term().unwrap().until;
    for second in 3..12 {
        assert_eq!(answer(&mut keeper, at(second), at(second), Answer::Lost), Ask::Renew(LeaseId(7)));
        let again = keeper.poll_timeout().unwrap();
        assert!(again > at(second) && again < at(second + 1));
        assert_eq!(keeper.poll_call(at(second)), None, "not at once");
    }
    assert_eq!(keeper.term().unwrap().until, until);
    // The lease was valid all the time: locks under it stay valid.
    answer(&mut keeper, at(20), at(20), Answer::Renewed(LEASE));
    assert!(keeper.term().unwrap().is_valid(at(21)));
}

#[test]
fn the_end_of_a_lease_is_reported_and_a_new_lease_follows() {
    let mut keeper = joined();
    answer(&mut keeper, at(3), at(3), Answer::NoLease);
    assert_eq!(keeper.poll_event(), Some(Event::Ended(LeaseId(7))));
    assert_eq!(keeper.term(), None);
    assert_eq!(
        answer(&mut keeper, at(3), at(3), Answer::Granted { lease: LeaseId(8), lease_ns: LEASE }),
        Ask::Grant(LEASE)
    );
}

#[test]
fn the_key_of_an_earlier_life_is_taken_over_and_its_lease_ended() {
    let mut keeper = LeaseManager::new(member("a"), LEASE);
    answer(&mut keeper, at(0), at(0), Answer::Granted { lease: LeaseId(7), lease_ns: LEASE });
    answer(&mut keeper, at(0), at(0), Answer::LookedUp(Some((member("a"), 33, LeaseId(5)))));
    let Ask::Register(txn) = answer(&mut keeper, at(0), at(0), Answer::Registered) else {
        panic!("registers")
    };
    assert_eq!(txn.conditions, [(Key::Host("a".to_owned()), Is::At(33))]);
    assert!(matches!(keeper.poll_event(), Some(Event::Joined(_))));
    assert_eq!(answer(&mut keeper, at(0), at(0), Answer::Done), Ask::Revoke(LeaseId(5)));
    assert_eq!(keeper.poll_call(at(0)).map(|call| call.ask), Some(Ask::Renew(LeaseId(7))));
}

#[test]
fn a_name_that_another_host_has_is_waited_for_and_no_lease_is_kept_for_it() {
    let mut keeper = LeaseManager::new(member("a"), LEASE);
    answer(&mut keeper, at(0), at(0), Answer::Granted { lease: LeaseId(7), lease_ns: LEASE });
    let other = Member { name: "a".to_owned(), id: "another".to_owned() };
    for second in 0..20 {
        let Some(call) = keeper.poll_call(at(second)) else { continue };
        match call.ask {
            Ask::LookUp => {
                let found = Answer::LookedUp(Some((other.clone(), 3, LeaseId(1))));
                keeper.handle_answer(at(second), call.number, found);
                assert_eq!(keeper.poll_event(), Some(Event::NameTaken(other.clone())));
            }
            Ask::Grant(_) => {
                assert!(second >= 9, "the lease was good for something until then");
                return;
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("no other lease was asked for");
}

#[test]
fn answers_to_other_calls_are_ignored() {
    let mut keeper = joined();
    let call = keeper.poll_call(at(3)).unwrap();
    keeper.handle_answer(at(3), call.number - 1, Answer::NoLease);
    keeper.handle_answer(at(3), call.number + 1, Answer::NoLease);
    assert!(keeper.term().is_some());
    assert_eq!(keeper.poll_call(at(4)), None, "it is still under way");
}

// Ownership of one disk.

const SETTLE: u64 = 5 * S;
const MINE: LeaseId = LeaseId(9);

fn title(name: &str, generation: u64, taken: bool, dirty: bool) -> Option<Found<OwnershipRecord>> {
    let value = OwnershipRecord {
        member: member(name),
        generation,
        taken,
        dirty,
        copy: None,
        adopts: None,
        adopted: Vec::new(),
    };
    Some(Found { value, revision: 40 + generation, lease: LeaseId(0) })
}

fn hold(name: &str, lease: u64) -> Option<Found<Member>> {
    Some(Found { value: member(name), revision: 90, lease: LeaseId(lease) })
}

fn wish(known: Option<u64>) -> OwnershipRequest {
    OwnershipRequest { known, dirty: false, force: false, keeps_copy: false }
}

fn decide(look: &OwnershipSnapshot, wish: OwnershipRequest) -> Verdict {
    OwnershipState::new("d".to_owned(), SETTLE).decide(at(100), &member("a"), MINE, look, wish)
}

#[track_caller]
fn taken(verdict: Verdict) -> Taking {
    match verdict {
        Verdict::Take(taking) => *taking,
        other => panic!("{other:?}"),
    }
}

/// The table of the module documentation, with generations and validity of flash.
#[test]
fn the_table_of_who_may_take_a_disk() {
    // The ownership record, the lock and the generation that this host knows; then the generation
    // with which it takes the disk, and whether its flash is valid.
    let table = [
        (None, None, None, Some((1, true))),
        // The store was emptied: later changes are unknown.
        (None, None, Some(4), Some((5, false))),
        (title("b", 3, false, false), None, None, Some((4, false))),
        (title("b", 3, false, false), None, Some(3), Some((4, false))),
        (title("b", 3, true, false), None, None, None),
        (title("b", 3, false, true), None, None, None),
        (title("b", 3, true, true), None, None, None),
        (title("b", 3, true, false), hold("b", 1), None, None),
        (title("a", 3, true, true), None, Some(3), Some((3, true))),
        (title("a", 3, false, false), None, Some(3), Some((3, true))),
        (title("a", 3, true, false), None, Some(2), Some((3, false))),
        (title("a", 3, true, false), None, None, Some((3, false))),
        // The lock of an earlier process, under its own lease.
        (title("a", 3, true, false), hold("a", 1), Some(3), Some((3, true))),
    ];
    for (title, hold, known, expected) in table {
        let look = OwnershipSnapshot { title, hold };
        let verdict = decide(&look, wish(known));
        let got = match &verdict {
            Verdict::Take(taking) => Some((taking.title.generation, taking.continued)),
            _ => None,
        };
        assert_eq!(got, expected, "{look:?} {known:?}: {verdict:?}");
    }
}

#[test]
fn a_taking_binds_everything_it_was_decided_on() {
    let look = OwnershipSnapshot { title: title("b", 3, false, false), hold: None };
    let taking = taken(decide(&look, OwnershipRequest { dirty: true, ..wish(None) }));
    let key = "d".to_owned();
    assert_eq!(
        taking.txn.conditions,
        [
            (Key::Host("a".to_owned()), Is::Under(MINE)),
            (Key::OwnershipLock(key.clone()), Is::Absent),
            (Key::OwnershipRecord(key.clone()), Is::At(43)),
        ]
    );
    let title = self::title("a", 4, true, true).unwrap().value;
    assert_eq!(
        taking.txn.changes,
        [
            Change::Put(Key::OwnershipLock(key.clone()), Value::OwnershipLock(member("a")), Some(MINE)),
            Change::Put(Key::OwnershipRecord(key), Value::OwnershipRecord(title), None),
        ]
    );
}

#[test]
fn a_lock_under_this_lease_is_this_hosts() {
    let look = OwnershipSnapshot { title: title("a", 3, true, false), hold: hold("a", 9) };
    assert_eq!(decide(&look, wish(None)), Verdict::Mine(title("a", 3, true, false).unwrap()));
}

#[test]
fn the_settle_time_begins_when_the_loss_of_the_lock_is_seen() {
    let mut seat = OwnershipState::new("d".to_owned(), SETTLE);
    let me = member("a");
    let gone = OwnershipSnapshot { title: title("b", 3, true, false), hold: None };
    let held = OwnershipSnapshot { hold: hold("b", 1), ..gone.clone() };
    let mut decide = |second, look: &OwnershipSnapshot| seat.decide(at(second), &me, MINE, look, wish(None));
    assert_eq!(decide(10, &gone), Verdict::Wait(at(15)));
    assert_eq!(decide(12, &gone), Verdict::Wait(at(15)));
    // The owner returned, and failed again.
    assert_eq!(decide(13, &held), Verdict::Refused(Refusal::Held(member("b"), 3)));
    assert_eq!(decide(14, &gone), Verdict::Wait(at(19)));
    // Another host owned the disk in between, unnoticed by this host.
    let other = OwnershipSnapshot { title: title("c", 4, true, false), hold: None };
    assert_eq!(decide(18, &other), Verdict::Wait(at(23)));
    assert!(matches!(decide(23, &other), Verdict::Take(_)));
}

#[test]
fn the_settle_time_begins_at_the_notification_if_the_record_is_unchanged() {
    let me = member("a");
    let gone = OwnershipSnapshot { title: title("b", 3, true, false), hold: None };
    let decide = |seat: &mut OwnershipState, second| seat.decide(at(second), &me, MINE, &gone, wish(None));
    let new = || OwnershipState::new("d".to_owned(), SETTLE);
    // The ownership record's revision is 43.
    for (revision, heard, first_look, expected) in
        [(43, 10, 14, Some(15)), (43, 10, 15, None), (42, 10, 15, Some(20)), (44, 10, 15, Some(20))]
    {
        let mut seat = new();
        seat.saw_gone(revision, at(heard));
        match (decide(&mut seat, first_look), expected) {
            (Verdict::Wait(until), Some(expected)) => assert_eq!(until, at(expected)),
            (Verdict::Take(_), None) => {}
            other => panic!("{revision} {heard} {first_look}: {other:?}"),
        }
    }
    // Earlier observations count, also with a later record.
    let mut seat = new();
    assert_eq!(decide(&mut seat, 10), Verdict::Wait(at(15)));
    seat.saw_gone(43, at(12));
    seat.saw_gone(42, at(3));
    assert_eq!(decide(&mut seat, 13), Verdict::Wait(at(15)));
}

#[test]
fn force_overrides_dirty_data_and_never_a_valid_lock() {
    let mut seat = OwnershipState::new("d".to_owned(), SETTLE);
    let me = member("a");
    let forced = OwnershipRequest { force: true, ..wish(None) };
    let held = OwnershipSnapshot { title: title("b", 3, true, true), hold: hold("b", 1) };
    let gone = OwnershipSnapshot { hold: None, ..held.clone() };
    let mut decide = |second, look: &OwnershipSnapshot, wish| seat.decide(at(second), &me, MINE, look, wish);
    assert!(matches!(decide(0, &held, forced), Verdict::Refused(Refusal::Held(..))));
    assert_eq!(decide(10, &gone, wish(None)), Verdict::Refused(Refusal::Dirty(member("b"), 3)));
    assert_eq!(decide(11, &gone, forced), Verdict::Wait(at(15)));
    let taking = taken(decide(15, &gone, forced));
    assert_eq!((taking.lost_by, taking.title.generation, taking.continued), (Some(member("b")), 4, false));
    assert!(!taking.title.dirty, "what is lost is not dirty any more");
}

#[test]
fn a_late_release_or_mark_does_nothing() {
    let seat = OwnershipState::new("d".to_owned(), SETTLE);
    let known = title("a", 3, true, true).unwrap();
    for (txn, expected) in [
        (
            seat.give_back(MINE, &known, false),
            OwnershipRecord { taken: false, dirty: false, ..known.value.clone() },
        ),
        (seat.mark(MINE, &known, false), OwnershipRecord { dirty: false, ..known.value.clone() }),
    ] {
        assert!(txn.conditions.contains(&(Key::OwnershipLock("d".to_owned()), Is::Under(MINE))));
        assert!(txn.conditions.contains(&(Key::OwnershipRecord("d".to_owned()), Is::At(43))));
        let put = Change::Put(Key::OwnershipRecord("d".to_owned()), Value::OwnershipRecord(expected), None);
        assert_eq!(txn.changes.last(), Some(&put));
    }
}

// Replicas.

fn copy_at(name: &str) -> SecondCopy {
    SecondCopy { member: member(name), loan: "loan".to_owned(), cache: "cache".to_owned() }
}

fn with_copy(title: Option<Found<OwnershipRecord>>, name: &str) -> Option<Found<OwnershipRecord>> {
    let mut title = title.unwrap();
    title.value.copy = Some(copy_at(name));
    Some(title)
}

#[track_caller]
fn adopts(verdict: Verdict) -> Adopting {
    match verdict {
        Verdict::Adopt(adopting) => *adopting,
        other => panic!("{other:?}"),
    }
}

fn put_title(txn: &Txn) -> OwnershipRecord {
    match txn.changes.last() {
        Some(Change::Put(_, Value::OwnershipRecord(title), None)) => title.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_the_host_with_the_replica_adopts_after_the_settle_time() {
    let gone = OwnershipSnapshot { title: with_copy(title("b", 3, true, true), "a"), hold: None };
    let mut seat = OwnershipState::new("d".to_owned(), SETTLE);
    let by_c = seat.clone().decide(at(10), &member("c"), MINE, &gone, wish(None));
    assert_eq!(by_c, Verdict::Refused(Refusal::Dirty(member("b"), 3)));
    assert_eq!(seat.decide(at(10), &member("a"), MINE, &gone, wish(None)), Verdict::Wait(at(15)));
    let adopting = adopts(seat.decide(at(15), &member("a"), MINE, &gone, wish(None)));
    assert_eq!((&adopting.title, adopting.copy), (gone.title.as_ref().unwrap(), copy_at("a")));
    let key = "d".to_owned();
    let held = Change::Put(Key::OwnershipLock(key.clone()), Value::OwnershipLock(member("a")), Some(MINE));
    let same = Value::OwnershipRecord(gone.title.as_ref().unwrap().value.clone());
    let same = Change::Put(Key::OwnershipRecord(key.clone()), same, None);
    assert_eq!(adopting.txn.changes, [held, same], "the title says what it said");
    assert!(adopting.txn.conditions.contains(&(Key::OwnershipLock(key.clone()), Is::Absent)));
    assert!(adopting.txn.conditions.contains(&(Key::OwnershipRecord(key), Is::At(43))));
    // A disk without an owner needs no waiting; without dirty data there is no failover.
    let given = OwnershipSnapshot { title: with_copy(title("b", 3, false, true), "a"), hold: None };
    adopts(decide(&given, wish(None)));
    let clean = OwnershipSnapshot { title: with_copy(title("b", 3, false, false), "a"), hold: None };
    taken(decide(&clean, wish(None)));
    let held = OwnershipSnapshot { hold: hold("b", 1), ..gone.clone() };
    assert!(matches!(decide(&held, wish(None)), Verdict::Refused(Refusal::Held(..))));
    // An operator's `--force` takes precedence over the replica.
    let forced = taken(decide(&given, OwnershipRequest { force: true, ..wish(None) }));
    assert_eq!((forced.lost_by, forced.title.copy), (Some(member("b")), None));
}

#[test]
fn the_owner_may_have_the_disk_until_the_adopter_begins() {
    let seat = OwnershipState::new("d".to_owned(), SETTLE);
    let known = with_copy(title("b", 3, true, true), "a").unwrap();
    // The host reads its replica and releases the disk: for the owner, nothing has changed.
    assert_eq!(seat.leave_alone(MINE, &known).changes, [Change::Delete(Key::OwnershipLock("d".to_owned()))]);
    let mut owner = OwnershipState::new("d".to_owned(), SETTLE);
    let look = OwnershipSnapshot { title: Some(known.clone()), hold: None };
    let back = taken(owner.decide(at(1), &member("b"), MINE, &look, wish(Some(3))));
    assert!(back.continued && back.title.dirty && back.title.copy.is_none());
    // The failover has begun: the owner's flash is invalid, and the replica is still needed.
    let (txn, begun) = seat.begin_adopting(&member("a"), MINE, &known).unwrap();
    assert_eq!(put_title(&txn), begun);
    assert!(txn.conditions.contains(&(Key::OwnershipRecord("d".to_owned()), Is::At(known.revision))));
    assert!(txn.conditions.contains(&(Key::OwnershipLock("d".to_owned()), Is::Under(MINE))));
    assert_eq!((&begun.member, begun.generation, begun.dirty), (&member("a"), 4, true));
    assert_eq!(begun.copy, Some(copy_at("a")));
    let begun = Found { value: begun, revision: 50, lease: LeaseId(0) };
    assert_eq!(seat.begin_adopting(&member("a"), MINE, &begun), None, "once");
    let look = OwnershipSnapshot { title: Some(begun.clone()), hold: None };
    let refused = owner.decide(at(2), &member("b"), MINE, &look, wish(Some(3)));
    assert_eq!(refused, Verdict::Refused(Refusal::Dirty(member("a"), 4)));
    // The failover was interrupted: whatever the host knows, it starts again immediately.
    for hold in [None, hold("a", 1), hold("a", MINE.0)] {
        let look = OwnershipSnapshot { hold, ..look.clone() };
        assert_eq!(adopts(decide(&look, wish(Some(4)))).title, begun);
    }
}

#[test]
fn the_former_owners_flash_is_outdated_after_an_adoption() {
    let seat = OwnershipState::new("d".to_owned(), SETTLE);
    let mut known = with_copy(title("a", 4, true, true), "a").unwrap();
    known.value.adopts = Some(Served { by: member("b"), generation: 3 });
    let (txn, ended) = seat.end_adopting(MINE, &known, false);
    assert_eq!(put_title(&txn), ended);
    assert_eq!((ended.dirty, &ended.copy, &ended.adopts), (false, &None, &None));
    // Later owners keep the record of it.
    let mut at_c = OwnershipState::new("d".to_owned(), 0);
    let given = OwnershipSnapshot {
        title: Some(Found { value: OwnershipRecord { taken: false, ..ended }, ..known.clone() }),
        hold: None,
    };
    let by_c = taken(at_c.decide(at(1), &member("c"), MINE, &given, wish(None))).title;
    let gone = OwnershipSnapshot { title: Some(Found { value: by_c, ..known }), hold: None };
    let mut owner = OwnershipState::new("d".to_owned(), 0);
    for (generation, outdated) in
        [(Some(3), Some(member("c"))), (Some(2), None), (Some(4), None), (None, None)]
    {
        let back = taken(owner.decide(at(9), &member("b"), MINE, &gone, wish(generation)));
        assert_eq!((back.outdated_by, back.continued), (outdated, false), "{generation:?}");
        assert_eq!(back.lost_by, None);
    }
}

#[test]
fn adopted_members_are_remembered_once_and_not_without_bound() {
    let seat = OwnershipState::new("d".to_owned(), SETTLE);
    let mut known = title("a", 4, true, true).unwrap();
    for number in 0..3 * ADOPTED_MAX as u64 {
        let by = member(&format!("host-{}", number % (ADOPTED_MAX as u64 + 4)));
        known.value.adopts = Some(Served { by, generation: number });
        known.value = seat.end_adopting(MINE, &known, false).1;
    }
    let mut names: Vec<&str> = known.value.adopted.iter().map(|it| it.by.name.as_str()).collect();
    assert_eq!(known.value.adopted.last().unwrap().generation, 3 * ADOPTED_MAX as u64 - 1);
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), ADOPTED_MAX);
}

#[test]
fn the_word_of_a_copy_goes_whenever_it_may_be_wrong() {
    let seat = OwnershipState::new("d".to_owned(), SETTLE);
    let known = with_copy(title("a", 3, true, true), "b").unwrap();
    let look = OwnershipSnapshot { title: Some(known.clone()), hold: None };
    let copy_after = |wish: OwnershipRequest| taken(decide(&look, wish)).title.copy;
    assert_eq!(copy_after(wish(Some(3))), None, "the disk is opened again");
    assert_eq!(copy_after(OwnershipRequest { keeps_copy: true, ..wish(Some(3)) }), Some(copy_at("b")));
    assert_eq!(copy_after(OwnershipRequest { keeps_copy: true, ..wish(Some(2)) }), None);
    // Its lock still existed meanwhile.
    let held = OwnershipSnapshot { hold: hold("a", MINE.0), ..look.clone() };
    let anew = taken(decide(&held, wish(Some(3))));
    assert_eq!((&anew.title, anew.continued), (&title("a", 3, true, true).unwrap().value, true));
    assert!(anew.txn.conditions.contains(&(Key::OwnershipLock("d".to_owned()), Is::At(90))));
    assert_eq!(
        decide(&held, OwnershipRequest { keeps_copy: true, ..wish(Some(3)) }),
        Verdict::Mine(known.clone())
    );
    assert_eq!(put_title(&seat.mark(MINE, &known, false)).copy, None);
    assert_eq!(put_title(&seat.give_back(MINE, &known, true)).copy, Some(copy_at("b")));
    assert_eq!(put_title(&seat.give_back(MINE, &known, false)).copy, None);
    assert_eq!(put_title(&seat.say_copy(MINE, &known, None)).copy, None);
}
