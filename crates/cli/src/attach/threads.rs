//! Waits for other programs in threads. The runtime waits for its own threads at the end of a
//! command, so a program that hangs, such as `virsh` if libvirt hangs, would keep the command from
//! ending.

use anyhow::Context;
use tokio::sync::oneshot;

/// Runs a function that may block in a separate thread, and returns its result.
pub(super) async fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<T> {
    let (done, result) = oneshot::channel();
    std::thread::spawn(move || {
        // A command that has stopped waiting ignores the result.
        let _ = done.send(work());
    });
    result.await.context("a thread of hob ended too early")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_program_that_hangs_does_not_keep_a_command_from_ending() {
        let (hung, work) = mpsc::channel::<()>();
        let (ended, end) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let result = runtime.block_on(async {
                let hangs = in_thread(move || work.recv().is_err());
                tokio::time::timeout(Duration::from_millis(10), hangs).await.is_err()
            });
            drop(runtime);
            ended.send(result).unwrap();
        });
        assert_eq!(end.recv_timeout(Duration::from_secs(60)), Ok(true));
        drop(hung);
    }

    #[test]
    fn the_result_of_the_thread_is_returned() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        assert_eq!(runtime.block_on(in_thread(|| 7)).unwrap(), 7);
    }
}
