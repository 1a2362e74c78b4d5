//! The tags of mClock (Gulati, Merchant, Varman, OSDI 2010): reservation, limit and proportional
//! share, together on one resource. The expected rates are computed by hand. SYSTEMS is the project's
//! description of other systems, outside this repository.

use hob_engine::qos::{Entitlement, FlowId, Scheduler};
use hob_engine::units::Instant;

const SECOND: u64 = 1_000_000_000;
const SECONDS: u64 = 11;
/// Number of I/Os of each flow that always wait.
const WAITING: u32 = 32;

/// Returns the I/Os per second of each flow after the first second, on a resource that serves
/// `capacity` I/Os per second.
fn rates(flows: &[Entitlement], capacity: u64) -> Vec<f64> {
    let mut scheduler = Scheduler::default();
    for (flow, entitlement) in (0..).map(FlowId).zip(flows) {
        scheduler.set(Instant(0), flow, *entitlement);
        (0..WAITING).for_each(|item| scheduler.push(Instant(0), flow, 1, 4096, item));
    }
    let mut served = vec![0_u32; flows.len()];
    for turn in 0..capacity * SECONDS {
        let now = Instant(turn * SECOND / capacity);
        let (flow, units, item) = scheduler.pop(now).expect("a flow without a limit waits");
        scheduler.push(now, flow, units, 4096, item);
        if now.0 >= SECOND {
            served[flow.0 as usize] += 1;
        }
    }
    served.into_iter().map(|served| f64::from(served) / (SECONDS - 1) as f64).collect()
}

/// SYSTEMS §5: "The published scheduler with these semantics is mClock (reservation, limit and
/// proportional tags)".
#[test]
fn reservation_limit_and_proportional_tags_hold_together() {
    let reserved = Entitlement { shares: 200, reservation: 250, ..Entitlement::default() };
    let limited = Entitlement { shares: 100, limit: Some(300), ..Entitlement::default() };
    for (capacity, wanted) in [
        // Shares decide.
        (1000, [400.0, 400.0, 200.0]),
        // The reservations decide, and the third gets the rest.
        (550, [250.0, 250.0, 50.0]),
        // The limit of the third decides, and the first two share the rest.
        (2000, [850.0, 850.0, 300.0]),
    ] {
        let rates = rates(&[reserved, reserved, limited], capacity);
        for (rate, wanted) in rates.iter().zip(wanted) {
            assert!((rate - wanted).abs() <= wanted * 0.05 + 5.0, "{capacity} I/Os per second: {rates:?}");
        }
    }
}
