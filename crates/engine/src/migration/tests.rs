//! Tests of each state machine by itself; `world` tests them with engines and a network.

use super::{heat, *};
use crate::regions::Regions;
use crate::units::{Instant, SECTOR_BYTES};

const SESSION: Session = Session { generation: 4, attempt: 1 };
const NOW: Instant = Instant(0);

fn options() -> SourceOptions {
    SourceOptions { on_demand: true, freeze_ns_max: 1_000_000_000, serves_after: false }
}

fn act(source: &mut Source, expected: SourceAct) -> Ticket {
    let (ticket, act) = source.poll_act().expect("an act");
    assert_eq!(act, expected);
    ticket
}

fn acts(source: &mut Source, now: Instant, expected: &[SourceAct]) {
    for expected in expected {
        let ticket = act(source, *expected);
        source.handle_done(now, ticket, Ok(()));
    }
}

fn call(source: &mut Source, expected: Call) -> Ticket {
    let (ticket, message) = source.poll_call().expect("a call");
    assert_eq!(message, Message { session: SESSION, call: expected });
    ticket
}

/// Returns a source whose destination has agreed.
fn copying() -> Source {
    let mut source = Source::start(SESSION, options());
    acts(&mut source, NOW, &[SourceAct::Record(Record::Leaving(SESSION)), SourceAct::Prepare]);
    let arrive = call(&mut source, Call::Arrive);
    source.handle_answer(NOW, arrive, Some(Ok(View::default())));
    source
}

/// Returns a source with a waiting guest, whose destination has received all changes.
fn frozen() -> (Source, Ticket) {
    let mut source = copying();
    acts(&mut source, NOW, &[SourceAct::TakeChanges]);
    let changed = call(&mut source, Call::Changed(vec![]));
    source.handle_answer(NOW, changed, Some(Ok(View { wants: true, ..View::default() })));
    acts(&mut source, NOW, &[SourceAct::Freeze, SourceAct::Settle]);
    let take = act(&mut source, SourceAct::TakeChanges);
    let mut regions = Regions::new(100 * SECTOR_BYTES);
    regions.insert(7, 9);
    source.handle_changes(Some(regions));
    source.handle_done(NOW, take, Ok(()));
    let last = call(&mut source, Call::Changed(vec![(7, 9)]));
    (source, last)
}

#[test]
fn a_disk_is_handed_over_when_it_is_wanted() {
    let (mut source, last) = frozen();
    source.handle_answer(NOW, last, Some(Ok(View::default())));
    let away = Record::Away { session: SESSION, taken: false };
    acts(&mut source, NOW, &[SourceAct::Record(away), SourceAct::Leave]);
    let yours = call(&mut source, Call::Yours);
    assert!(!source.handle_order(NOW, Order::Cancel), "too late");
    source.handle_answer(NOW, yours, None);
    source.handle_timeout(source.poll_timeout().unwrap());
    let yours = call(&mut source, Call::Yours);
    source.handle_answer(NOW, yours, Some(Ok(View::default())));
    let taken = Record::Away { session: SESSION, taken: true };
    acts(&mut source, NOW, &[SourceAct::Record(taken), SourceAct::GiveUp]);
    assert!(source.is_over() && source.phase() == Phase::Over);
}

#[test]
fn a_destination_that_does_not_answer_costs_a_pause() {
    let (mut source, last) = frozen();
    assert_eq!(source.poll_timeout(), Some(Instant(1_000_000_000)));
    source.handle_timeout(Instant(1_000_000_000));
    let thaw = act(&mut source, SourceAct::Thaw);
    // The answer comes too late: the guest writes again.
    source.handle_answer(NOW, last, Some(Ok(View::default())));
    assert!(source.poll_act().is_none() && source.poll_call().is_none());
    source.handle_done(NOW, thaw, Ok(()));
    assert_eq!(source.phase(), Phase::Copying);
    source.handle_timeout(source.poll_timeout().unwrap());
    acts(&mut source, NOW, &[SourceAct::TakeChanges]);
    call(&mut source, Call::Changed(vec![(7, 9)]));
}

#[test]
fn a_record_that_may_be_there_keeps_the_guest_waiting() {
    let (mut source, last) = frozen();
    source.handle_answer(NOW, last, Some(Ok(View::default())));
    let away = act(&mut source, SourceAct::Record(Record::Away { session: SESSION, taken: false }));
    source.handle_timeout(Instant(2_000_000_000));
    assert!(source.poll_act().is_none(), "no thaw while the record is being written");
    source.handle_done(NOW, away, Err(()));
    let leaving = act(&mut source, SourceAct::Record(Record::Leaving(SESSION)));
    source.handle_done(NOW, leaving, Err(()));
    acts(&mut source, NOW, &[SourceAct::Record(Record::Leaving(SESSION)), SourceAct::Thaw]);
    assert_eq!(source.phase(), Phase::Copying);
}

#[test]
fn a_cancelled_attempt_leaves_the_disk_here() {
    let (mut source, _) = frozen();
    assert!(source.handle_order(NOW, Order::Cancel));
    let owner = Record::Owner { generation: 4, attempts: 1 };
    acts(&mut source, NOW, &[SourceAct::Thaw, SourceAct::Record(owner), SourceAct::Restore]);
    let cancel = call(&mut source, Call::Cancel);
    source.handle_answer(NOW, cancel, None);
    source.handle_timeout(Instant(60_000_000_000));
    assert!(source.is_over() && source.phase() == Phase::Kept, "the source stops calling");
}

#[test]
fn a_source_that_another_host_has_overtaken_gives_way() {
    let mut source = copying();
    acts(&mut source, NOW, &[SourceAct::TakeChanges]);
    let changed = call(&mut source, Call::Changed(vec![]));
    source.handle_answer(NOW, changed, Some(Err(Refusal::Owner(5))));
    acts(&mut source, NOW, &[SourceAct::Freeze, SourceAct::Settle, SourceAct::TakeChanges]);
    let look = call(&mut source, Call::Look);
    source.handle_answer(NOW, look, Some(Err(Refusal::Owner(5))));
    act(&mut source, SourceAct::Record(Record::Away { session: SESSION, taken: false }));
}

/// A frozen source without changes sends no empty list of changes: the destination would delay its
/// answer, and the guest would wait.
#[test]
fn a_frozen_source_without_changes_sends_a_call_that_is_answered_at_once() {
    let mut source = copying();
    acts(&mut source, NOW, &[SourceAct::TakeChanges]);
    call(&mut source, Call::Changed(vec![]));
    assert!(source.handle_order(NOW, Order::Finish));
    acts(&mut source, NOW, &[SourceAct::Freeze, SourceAct::Settle, SourceAct::TakeChanges]);
    let look = call(&mut source, Call::Look);
    source.handle_answer(NOW, look, Some(Ok(View::default())));
    act(&mut source, SourceAct::Record(Record::Away { session: SESSION, taken: false }));

    let mut destination = ready();
    ask(&mut destination, 2, SESSION, Call::Look);
    assert_eq!(destination.poll_answer(), Some((Ticket(2), Ok(View::default()))));
}

/// The destination wants the disk and answers immediately, so without pauses the source would send
/// one call after the other.
#[test]
fn a_source_that_waits_for_an_order_pauses() {
    let mut source = Source::start(SESSION, SourceOptions { on_demand: false, ..options() });
    acts(&mut source, NOW, &[SourceAct::Record(Record::Leaving(SESSION)), SourceAct::Prepare]);
    let arrive = call(&mut source, Call::Arrive);
    let wanted = View { wants: true, ..View::default() };
    source.handle_answer(NOW, arrive, Some(Ok(wanted)));
    acts(&mut source, NOW, &[SourceAct::TakeChanges]);
    let changed = call(&mut source, Call::Changed(vec![]));
    source.handle_answer(NOW, changed, Some(Ok(wanted)));
    assert!(source.poll_act().is_none() && source.poll_timeout() > Some(NOW));
    assert!(source.handle_order(NOW, Order::Finish));
    acts(&mut source, NOW, &[SourceAct::Freeze]);
}

fn done(destination: &mut Destination, expected: DestinationAct) {
    let (ticket, act) = destination.poll_act().expect("an act");
    assert_eq!(act, expected);
    destination.handle_done(NOW, ticket, Ok(()));
}

fn ask(destination: &mut Destination, number: u64, session: Session, call: Call) {
    destination.handle_call(NOW, Ticket(number), Message { session, call });
}

fn ready() -> Destination {
    let mut destination = Destination::new(None);
    ask(&mut destination, 1, SESSION, Call::Arrive);
    assert_eq!(destination.poll_answer(), None);
    done(&mut destination, DestinationAct::Record(Record::Awaiting(SESSION)));
    done(&mut destination, DestinationAct::Prepare);
    assert_eq!(destination.poll_answer(), Some((Ticket(1), Ok(View::default()))));
    destination
}

#[test]
fn a_destination_serves_after_everything_is_forgotten() {
    let mut destination = ready();
    ask(&mut destination, 2, SESSION, Call::Changed(vec![(1, 2)]));
    let (forget, act) = destination.poll_act().unwrap();
    assert_eq!(act, DestinationAct::Forget(vec![(1, 2)]));
    assert_eq!(destination.poll_answer(), None);
    destination.handle_done(NOW, forget, Ok(()));
    assert_eq!(destination.poll_answer().unwrap().0, Ticket(2));
    // The call is repeated, and late: a read that waits for the disk would block it for ever.
    ask(&mut destination, 8, SESSION, Call::Changed(vec![(1, 2)]));
    let (late, _) = destination.poll_act().unwrap();
    ask(&mut destination, 3, SESSION, Call::Yours);
    done(&mut destination, DestinationAct::Activate);
    destination.handle_done(NOW, late, Err(()));
    assert_eq!(destination.poll_answer(), Some((Ticket(8), Err(Refusal::Failed))));
    done(&mut destination, DestinationAct::Commit);
    assert!(!destination.is_owner() && destination.poll_answer().is_none());
    done(&mut destination, DestinationAct::Record(Record::Owner { generation: 5, attempts: 0 }));
    assert_eq!(destination.poll_answer(), Some((Ticket(3), Ok(View::default()))));
    done(&mut destination, DestinationAct::Settle);
    ask(&mut destination, 4, SESSION, Call::Yours);
    assert_eq!(destination.poll_answer(), Some((Ticket(4), Ok(View::default()))), "asked again");
    ask(&mut destination, 5, SESSION, Call::Changed(vec![(1, 2)]));
    assert_eq!(destination.poll_answer(), Some((Ticket(5), Err(Refusal::Owner(5)))), "long on its way");
    ask(&mut destination, 6, SESSION, Call::Cancel);
    assert_eq!(destination.poll_answer(), Some((Ticket(6), Err(Refusal::Owner(5)))));
}

#[test]
fn an_empty_question_is_held_back_until_the_disk_is_wanted() {
    let mut destination = ready();
    ask(&mut destination, 2, SESSION, Call::Changed(vec![]));
    assert_eq!(destination.poll_answer(), None);
    // The same over another connection: the answer to one call is delayed; otherwise every call
    // would be answered immediately during the delay.
    ask(&mut destination, 3, SESSION, Call::Changed(vec![]));
    assert_eq!(destination.poll_answer(), Some((Ticket(2), Ok(View::default()))));
    assert_eq!(destination.poll_answer(), None);
    destination.handle_wanted();
    let view = View { wants: true, ..View::default() };
    assert_eq!(destination.poll_answer(), Some((Ticket(3), Ok(view))));
    ask(&mut destination, 4, SESSION, Call::Changed(vec![]));
    assert_eq!(destination.poll_answer(), Some((Ticket(4), Ok(view))));
}

#[test]
fn later_attempts_replace_earlier_ones_and_not_the_other_way_round() {
    let mut destination = ready();
    let next = Session { attempt: 2, ..SESSION };
    ask(&mut destination, 2, next, Call::Arrive);
    done(&mut destination, DestinationAct::Record(Record::Awaiting(next)));
    done(&mut destination, DestinationAct::Prepare);
    assert!(destination.poll_answer().unwrap().1.is_ok());
    for call in [Call::Arrive, Call::Changed(vec![]), Call::Yours, Call::Cancel, Call::Look] {
        ask(&mut destination, 3, SESSION, call);
        assert_eq!(destination.poll_answer(), Some((Ticket(3), Err(Refusal::NotAwaited))));
    }
    ask(&mut destination, 4, next, Call::Cancel);
    done(&mut destination, DestinationAct::Remove);
    done(&mut destination, DestinationAct::Record(Record::Gone(next)));
    assert!(destination.poll_answer().unwrap().1.is_ok());
    ask(&mut destination, 5, SESSION, Call::Arrive);
    assert_eq!(destination.poll_answer(), Some((Ticket(5), Err(Refusal::NotAwaited))));
}

/// After a restart of the new owner, it is unknown which ranges the new owner changed since the
/// hand-over. So the new owner may not pull data from the former owner.
#[test]
fn an_owner_that_restarted_pulls_nothing_from_whom_had_it() {
    let mut destination = Destination::new(Some(Record::Owner { generation: 5, attempts: 0 }));
    ask(&mut destination, 1, SESSION, Call::Look);
    assert_eq!(destination.poll_answer(), Some((Ticket(1), Ok(View { done: true, ..View::default() }))));
}

/// A destination that no longer waits for a disk still takes it when the call `yours` arrives. The
/// source never serves the disk again after `yours`, so otherwise no host would own the disk.
#[test]
fn a_disk_that_was_given_up_and_comes_nevertheless_is_taken() {
    let mut destination = ready();
    destination.handle_give_up();
    done(&mut destination, DestinationAct::Remove);
    done(&mut destination, DestinationAct::Record(Record::Gone(SESSION)));
    ask(&mut destination, 2, SESSION, Call::Changed(vec![]));
    assert_eq!(destination.poll_answer(), Some((Ticket(2), Err(Refusal::NotAwaited))));
    ask(&mut destination, 3, SESSION, Call::Yours);
    done(&mut destination, DestinationAct::Record(Record::Awaiting(SESSION)));
    done(&mut destination, DestinationAct::Prepare);
    done(&mut destination, DestinationAct::Activate);
}

#[test]
fn a_disk_is_given_up_after_the_action_in_progress_has_ended() {
    let mut destination = Destination::new(None);
    ask(&mut destination, 1, SESSION, Call::Arrive);
    done(&mut destination, DestinationAct::Record(Record::Awaiting(SESSION)));
    destination.handle_give_up();
    done(&mut destination, DestinationAct::Prepare);
    done(&mut destination, DestinationAct::Remove);
    done(&mut destination, DestinationAct::Record(Record::Gone(SESSION)));
    assert_eq!(destination.awaits(), None);
}

/// An earlier process may have served the disk, so a restarted destination does not trust the
/// former owner's flash.
#[test]
fn only_the_first_process_knows_the_ranges_changed_since_the_hand_over() {
    let first = ready();
    assert!(first.knows_changes());
    let mut second = Destination::new(Some(Record::Awaiting(SESSION)));
    done(&mut second, DestinationAct::Prepare);
    assert!(!second.knows_changes());
    second.handle_give_up();
    done(&mut second, DestinationAct::Remove);
    done(&mut second, DestinationAct::Record(Record::Gone(SESSION)));
    ask(&mut second, 1, SESSION, Call::Yours);
    done(&mut second, DestinationAct::Record(Record::Awaiting(SESSION)));
    done(&mut second, DestinationAct::Prepare);
    assert!(!second.knows_changes(), "an earlier process stopped waiting for the disk");
}

#[test]
fn a_call_that_takes_the_disk_back_waits_for_the_record_in_progress() {
    let mut destination = Destination::new(None);
    ask(&mut destination, 1, SESSION, Call::Arrive);
    ask(&mut destination, 2, SESSION, Call::Cancel);
    assert_eq!(destination.poll_answer(), None);
    done(&mut destination, DestinationAct::Record(Record::Awaiting(SESSION)));
    done(&mut destination, DestinationAct::Prepare);
    done(&mut destination, DestinationAct::Remove);
    done(&mut destination, DestinationAct::Record(Record::Gone(SESSION)));
    assert_eq!(destination.poll_answer(), Some((Ticket(2), Ok(View::default()))));
    assert_eq!(destination.awaits(), None);
}

/// A record whose write failed may be stored nevertheless. So the stored record may say that the
/// host awaits the later session.
#[test]
fn a_disk_that_is_gone_is_so_in_the_latest_session() {
    let mut destination = ready();
    let next = Session { attempt: 2, ..SESSION };
    ask(&mut destination, 2, next, Call::Arrive);
    let (record, _) = destination.poll_act().unwrap();
    destination.handle_done(NOW, record, Err(()));
    assert_eq!(destination.poll_answer(), Some((Ticket(2), Err(Refusal::Failed))));
    destination.handle_give_up();
    done(&mut destination, DestinationAct::Remove);
    done(&mut destination, DestinationAct::Record(Record::Gone(next)));
}

#[test]
fn an_earlier_record_does_not_replace_a_later_one() {
    let mut destination = Destination::new(None);
    ask(&mut destination, 1, SESSION, Call::Arrive);
    let (record, act) = destination.poll_act().unwrap();
    assert_eq!(act, DestinationAct::Record(Record::Awaiting(SESSION)));
    destination.handle_done(NOW, record, Err(()));
    assert_eq!(destination.poll_answer(), Some((Ticket(1), Err(Refusal::Failed))));
    // Delayed calls.
    let attempt = SESSION.attempt - 1;
    ask(&mut destination, 2, Session { attempt, ..SESSION }, Call::Arrive);
    assert_eq!(destination.poll_answer(), Some((Ticket(2), Err(Refusal::NotAwaited))));
    let generation = SESSION.generation - 1;
    ask(&mut destination, 3, Session { generation, attempt: 9 }, Call::Arrive);
    assert_eq!(destination.poll_answer(), Some((Ticket(3), Err(Refusal::Owner(SESSION.generation)))));
    ask(&mut destination, 4, SESSION, Call::Arrive);
    done(&mut destination, DestinationAct::Record(Record::Awaiting(SESSION)));
}

#[test]
fn a_disk_of_which_it_may_be_on_record_that_it_is_gone_is_recorded_as_awaited_first() {
    let mut destination = ready();
    destination.handle_give_up();
    done(&mut destination, DestinationAct::Remove);
    let (record, act) = destination.poll_act().unwrap();
    assert_eq!(act, DestinationAct::Record(Record::Gone(SESSION)));
    destination.handle_done(NOW, record, Err(()));
    ask(&mut destination, 2, SESSION, Call::Changed(vec![]));
    done(&mut destination, DestinationAct::Record(Record::Awaiting(SESSION)));
    done(&mut destination, DestinationAct::Prepare);
}

/// A destination that has taken the disk and handed it on answers with the later generation.
/// Otherwise a source whose earlier call got no answer, or that restarted, would repeat its call
/// for ever.
#[test]
fn a_source_learns_that_its_disk_was_taken_and_handed_on() {
    let past = Session { generation: 5, attempt: 2 };
    for record in [Record::Away { session: past, taken: true }, Record::Awaiting(past), Record::Gone(past)] {
        let mut destination = Destination::new(Some(record));
        ask(&mut destination, 1, SESSION, Call::Yours);
        assert_eq!(destination.poll_answer(), Some((Ticket(1), Err(Refusal::Owner(5)))), "{record:?}");
    }
    let mut source = Source::resume_away(SESSION);
    let yours = call(&mut source, Call::Yours);
    source.handle_answer(NOW, yours, Some(Err(Refusal::Owner(5))));
    act(&mut source, SourceAct::Record(Record::Away { session: SESSION, taken: true }));
}

#[test]
fn an_awaited_disk_is_prepared_again_after_a_restart() {
    let mut destination = Destination::new(Some(Record::Awaiting(SESSION)));
    ask(&mut destination, 1, SESSION, Call::Yours);
    done(&mut destination, DestinationAct::Prepare);
    done(&mut destination, DestinationAct::Activate);
    assert_eq!(destination.poll_answer(), None);
}

#[test]
fn only_changed_ranges_are_pulled_again() {
    let mut puller = Puller::new(4 * SECTOR_BYTES);
    puller.add([(10, 16), (0, 2)]);
    assert_eq!(puller.left_bytes(), 8 * SECTOR_BYTES);
    let first = puller.next().unwrap();
    assert_eq!(first, Pull { first: 10, end: 14 });
    let rest = puller.next().unwrap();
    assert_eq!(rest, Pull { first: 14, end: 16 });
    puller.ended(first, Pulled::Done);
    puller.changed(12, 15);
    puller.ended(rest, Pulled::Done);
    assert_eq!(puller.next(), Some(Pull { first: 0, end: 2 }));
    puller.ended(Pull { first: 0, end: 2 }, Pulled::Done);
    puller.changed(40, 50);
    // The range in flight is pulled again as a whole.
    assert_eq!(puller.next(), Some(Pull { first: 12, end: 16 }));
    assert!(!puller.is_done());
    puller.ended(Pull { first: 12, end: 16 }, Pulled::Again);
    let again = puller.next().unwrap();
    puller.ended(again, Pulled::Done);
    assert!(puller.is_done() && puller.next().is_none() && puller.left_bytes() == 0);
    assert_eq!(puller.pulled_bytes(), 10 * SECTOR_BYTES);
}

#[test]
fn a_heat_list_is_decoded_as_it_was_encoded() {
    let page = heat::encode(&[(300, 310), (5, 6), (310, 311), (1 << 40, (1 << 40) + 1)]);
    assert_eq!(page.len(), 1 + 2 + 3 + 7, "{page:?}");
    let ranges = heat::decode(&page, 1 << 41).unwrap();
    assert_eq!(ranges, [(5, 6), (300, 311), (1 << 40, (1 << 40) + 1)]);
    assert_eq!(heat::decode(&page, 1 << 30), Err(heat::Nonsense), "past the disk's end");
    assert_eq!(heat::decode(&page[..page.len() - 1], 1 << 41), Err(heat::Nonsense));
    assert_eq!(heat::decode(&[0, 0], 100), Err(heat::Nonsense));
    assert_eq!(heat::decode(&[0xff; 20], 100), Err(heat::Nonsense));
    assert_eq!(heat::decode(&heat::encode(&[]), 0), Ok(vec![]));
}
