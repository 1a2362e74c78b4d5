//! Questions about the files of many disks, such as the times of their last changes. Each question
//! is a system call that takes about a microsecond, but never returns while the file's filesystem
//! hangs.
//!
//! One thread asks all questions, one after the other. While no answer arrives, the number of
//! threads is doubled, so that a file that hangs delays the other files only briefly.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time without an answer after which more threads ask the remaining questions.
const STUCK_AFTER: Duration = Duration::from_millis(50);

/// Maximum number of threads that a list of questions has at the same time. The other threads of
/// the runtime remain free for other operations.
const THREADS_MAX: usize = 64;

/// A list of questions and their answers.
struct Questions<F, T> {
    /// Questions that no thread has begun, each with its index. The last one is next.
    waiting: Vec<(usize, F)>,
    answers: Vec<Option<T>>,
    /// Number of answers.
    answered: usize,
}

/// Asks questions with few threads. Returns their answers in the same order; `None` for a question
/// without an answer after `wait_max`. A question that no thread has begun by then is dropped.
pub(super) async fn ask_all<F, T>(questions: Vec<F>, wait_max: Duration) -> Vec<Option<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let answers = questions.iter().map(|_| None).collect();
    let waiting = questions.into_iter().enumerate().rev().collect();
    let list = Arc::new(Mutex::new(Questions { waiting, answers, answered: 0 }));
    let mut threads = JoinSet::new();
    let _ = timeout(wait_max, all_ended(&list, &mut threads)).await;
    // Nothing is aborted: the end of a question that hangs shows that its filesystem answers again.
    threads.detach_all();
    let mut list = lock(&list);
    list.waiting.clear();
    std::mem::take(&mut list.answers)
}

/// Starts threads until all questions are answered.
async fn all_ended<F, T>(list: &Arc<Mutex<Questions<F, T>>>, threads: &mut JoinSet<()>)
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let mut answered_before = 0;
    loop {
        let is_stuck = {
            let list = lock(list);
            let is_stuck = !list.waiting.is_empty() && list.answered == answered_before;
            answered_before = list.answered;
            is_stuck
        };
        if is_stuck {
            let more = threads.len().max(1).min(THREADS_MAX - threads.len());
            for _ in 0..more {
                let list = list.clone();
                threads.spawn_blocking(move || ask_in_turn(&list));
            }
        }
        // A thread ends when no question is waiting; others may still wait for their last answer.
        if let Ok(None) = timeout(STUCK_AFTER, threads.join_next()).await {
            return;
        }
    }
}

/// Asks one question after the other until none is waiting.
fn ask_in_turn<F: FnOnce() -> T, T>(list: &Mutex<Questions<F, T>>) {
    loop {
        let Some((index, question)) = lock(list).waiting.pop() else { return };
        let answer = question();
        let mut list = lock(list);
        list.answered += 1;
        // The list is empty if the caller has stopped waiting.
        if let Some(place) = list.answers.get_mut(index) {
            *place = Some(answer);
        }
    }
}

fn lock<F, T>(list: &Mutex<Questions<F, T>>) -> MutexGuard<'_, Questions<F, T>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc;

    use super::*;

    type Question = Box<dyn FnOnce() -> u32 + Send>;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn one_thread_asks_about_all_files_of_a_filesystem_that_answers() {
        let ask = |number: u32| move || (number, std::thread::current().id());
        let answers = ask_all((0..1000).map(ask).collect(), PATIENCE).await;
        let numbers: Vec<u32> = answers.iter().map(|answer| answer.unwrap().0).collect();
        assert_eq!(numbers, (0..1000).collect::<Vec<u32>>());
        let threads: Vec<_> = answers.iter().map(|answer| answer.unwrap().1).collect();
        // A host without a free processor may start more threads.
        let used = threads.iter().map(|id| format!("{id:?}")).collect::<BTreeSet<_>>().len();
        assert!(used <= 8, "{used} threads");
    }

    #[tokio::test]
    async fn files_that_hang_have_no_answer_and_delay_no_other_file() {
        let (end, ends) = mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        let hangs = |_: u32| -> Question {
            let ends = ends.clone();
            Box::new(move || {
                let _ = ends.lock().map(|ends| ends.recv());
                0
            })
        };
        let says = |number: u32| -> Question { Box::new(move || number) };
        let questions = (0..5).map(hangs).chain((5..20).map(says)).collect();
        let answers = ask_all(questions, Duration::from_secs(5)).await;
        assert!(answers[..5].iter().all(Option::is_none), "{answers:?}");
        let others: Vec<u32> = answers[5..].iter().flatten().copied().collect();
        assert_eq!(others, (5..20).collect::<Vec<u32>>());
        drop(end);
    }

    #[tokio::test]
    async fn without_questions_there_are_no_answers() {
        assert!(ask_all(Vec::<Question>::new(), PATIENCE).await.is_empty());
    }
}
