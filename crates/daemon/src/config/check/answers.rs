//! Answers of a thread that asks filesystems, which may hang.
//!
//! The wait is limited to a number of turns ([`TURN`]). A pause of this process (SIGSTOP, a
//! suspended VM, a host without a free processor) uses up only one turn.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// Longest wait of one turn.
const TURN: Duration = Duration::from_millis(50);

/// Iterator over answers. It ends when the thread ends, or when the time for all answers is over.
#[derive(Debug)]
pub(super) struct Answers<T> {
    receiver: Receiver<T>,
    turns_left: u128,
}

impl<T> Answers<T> {
    /// Returns the answers that arrive within `limit`.
    pub(super) fn within(receiver: Receiver<T>, limit: Duration) -> Self {
        Self { receiver, turns_left: limit.as_millis() / TURN.as_millis() }
    }
}

impl<T> Iterator for Answers<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        loop {
            match self.receiver.recv_timeout(TURN) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if self.turns_left > 0 => self.turns_left -= 1,
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn answers_end_with_their_thread_or_with_the_time() {
        let (sender, receiver) = mpsc::channel();
        let mut answers = Answers::within(receiver, 2 * TURN);
        sender.send(1).unwrap();
        // Time that passes outside of the wait does not count.
        std::thread::sleep(4 * TURN);
        sender.send(2).unwrap();
        assert_eq!((answers.next(), answers.next()), (Some(1), Some(2)));
        assert_eq!(answers.next(), None, "the sender is silent");
        sender.send(3).unwrap();
        assert_eq!(answers.next(), Some(3), "an answer that is there needs no time");
        drop(sender);
        assert_eq!(answers.next(), None);
    }
}
