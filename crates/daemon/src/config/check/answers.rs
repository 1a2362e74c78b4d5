//! Answers of a thread that asks filesystems, which may hang.
//!
//! The wait for all answers together is limited. The wait consists of turns ([`TURN`]): a pause of
//! this process (SIGSTOP, a suspended VM, a host without a free processor) uses up at most one
//! turn.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Longest wait of one turn.
const TURN: Duration = Duration::from_millis(50);

/// Calls `query` with each item on another thread, which may hang with a filesystem. Returns the
/// results that arrive within `limit`.
pub(super) fn query_all<T: Send + 'static, R: Send + 'static>(
    items: Vec<T>,
    limit: Duration,
    query: impl Fn(&T) -> Option<R> + Send + 'static,
) -> Vec<Option<R>> {
    let mut all: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let (sender, answers) = mpsc::channel();
    let query_each = move || {
        for (index, item) in items.iter().enumerate() {
            if sender.send((index, query(item))).is_err() {
                return;
            }
        }
    };
    if std::thread::Builder::new().name("hob-check".to_owned()).spawn(query_each).is_ok() {
        for (index, found) in Answers::within(answers, limit) {
            all[index] = found;
        }
    }
    all
}

/// Iterator over answers, which ends when the thread ends or the time for all answers is over.
#[derive(Debug)]
struct Answers<T> {
    receiver: Receiver<T>,
    /// Time that is left for waiting.
    left: Duration,
}

impl<T> Answers<T> {
    /// Returns the answers that arrive within `limit`.
    fn within(receiver: Receiver<T>, limit: Duration) -> Self {
        Self { receiver, left: limit }
    }
}

impl<T> Iterator for Answers<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        loop {
            let (turn, begun) = (TURN.min(self.left), Instant::now());
            let answer = self.receiver.recv_timeout(turn);
            self.left -= begun.elapsed().min(turn);
            match answer {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if !self.left.is_zero() => {}
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
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

    /// Each of thousands of files may need a moment, but the wait for all of them is limited.
    #[test]
    fn many_slow_answers_do_not_extend_the_wait() {
        let (sender, receiver) = mpsc::channel();
        let slow = std::thread::spawn(move || {
            while sender.send(()).is_ok() {
                std::thread::sleep(TURN / 2);
            }
        });
        assert!(Answers::within(receiver, 4 * TURN).take(1000).count() < 1000);
        slow.join().unwrap();
    }
}
