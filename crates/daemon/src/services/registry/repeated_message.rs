//! Limits messages about a failure that repeats.

use std::time::Duration;

use tokio::time::Instant;

/// Minimum time between two messages about the same failure.
const EVERY: Duration = Duration::from_secs(10);

/// Limits the messages about one failure that may repeat many times in a second.
#[derive(Debug, Default)]
pub(in crate::services) struct RepeatedMessage {
    last: Option<Instant>,
    withheld: u64,
}

impl RepeatedMessage {
    /// Returns the number of failures since the previous message, if a new message is due.
    pub(in crate::services) fn is_due(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now < last + EVERY) {
            self.withheld += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.withheld))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_is_due_in_ten_seconds_and_counts_the_others() {
        let (mut message, start) = (RepeatedMessage::default(), Instant::now());
        let due = [0, 1, 9, 10, 11, 30].map(|at| message.is_due(start + Duration::from_secs(at)));
        assert_eq!(due, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
