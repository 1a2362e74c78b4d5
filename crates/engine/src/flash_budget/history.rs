//! Flash writes of a pool in the last 24 hours, in steps of half an hour.

use super::DAY_NS;

/// Number of steps that a day has.
const STEPS: usize = 48;

/// Length of a step, nanoseconds.
const STEP_NS: u64 = DAY_NS / STEPS as u64;

/// Flash writes of the last 24 hours. Times are nanoseconds since an origin that a restart keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Number of the current step, counted from the origin of time.
    step: u64,
    /// Bytes written in each step, starting with the current step and going back in time.
    written: Vec<u64>,
    /// Time at which the history began.
    began_ns: u64,
}

impl History {
    /// Creates an empty history.
    pub fn new(now_ns: u64) -> History {
        History { step: now_ns / STEP_NS, written: vec![0], began_ns: now_ns }
    }

    /// Creates a history from the values that [`parts`](Self::parts) returned.
    pub fn from_parts(began_ns: u64, step: u64, mut written: Vec<u64>) -> History {
        written.truncate(STEPS);
        if written.is_empty() {
            written.push(0);
        }
        History { step, written, began_ns }
    }

    /// Returns the time at which the history began, the number of the current step, and the bytes
    /// of each step, starting with the current step.
    pub fn parts(&self) -> (u64, u64, &[u64]) {
        (self.began_ns, self.step, &self.written)
    }

    /// Adds bytes that were written just before `now_ns`.
    pub fn add(&mut self, now_ns: u64, bytes: u64) {
        self.advance(now_ns);
        self.written[0] = self.written[0].saturating_add(bytes);
    }

    fn advance(&mut self, now_ns: u64) {
        let step = now_ns / STEP_NS;
        let new = step.saturating_sub(self.step).min(STEPS as u64) as usize;
        if new > 0 {
            self.written.splice(0..0, std::iter::repeat_n(0, new));
            self.written.truncate(STEPS);
            self.step = step;
        }
    }

    /// Returns the bytes written in the last 24 hours, and the time that they cover, nanoseconds.
    /// This time is shorter for a history that began later.
    pub fn last_day(&mut self, now_ns: u64) -> (u64, u64) {
        self.advance(now_ns);
        let covered = DAY_NS - STEP_NS + now_ns % STEP_NS;
        (self.written.iter().sum(), covered.min(now_ns.saturating_sub(self.began_ns)).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_leave_after_a_day() {
        let hour = DAY_NS / 24;
        let mut history = History::new(hour * 7);
        history.add(hour * 8, 5);
        history.add(hour * 9, 7);
        assert_eq!(history.last_day(hour * 9), (12, 2 * hour));
        let (began, step, written) = history.parts();
        let mut history = History::from_parts(began, step, written.to_vec());
        assert_eq!(history.last_day(hour * 31).0, 12);
        assert_eq!(history.last_day(hour * 32).0, 7);
        assert_eq!(history.last_day(hour * 33 + 1).0, 0);
        assert_eq!(history.last_day(hour * 3300).0, 0);
    }
}
