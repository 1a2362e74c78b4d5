//! Tasks that run in the background.

use std::pin::Pin;

use tokio::task::JoinHandle;

/// A boxed future of any type whose output is `T`.
pub(crate) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Starts a task of the runtime, like `tokio::spawn`. The future is boxed. So the compiler
/// generates the runtime's code for tasks once for each type of output, not once for each future.
pub(crate) fn spawn<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    let work: Boxed<T> = Box::pin(work);
    tokio::spawn(work)
}

/// Runs a test to its end in virtual time. When all tasks wait, the clock jumps to the next
/// timeout.
#[cfg(test)]
pub(crate) fn run_in_virtual_time(test: impl Future<Output = ()>) {
    run(tokio::runtime::Builder::new_current_thread().start_paused(true), test);
}

/// Runs a test to its end in real time.
#[cfg(test)]
pub(crate) fn run_in_real_time(test: impl Future<Output = ()>) {
    run(&mut tokio::runtime::Builder::new_current_thread(), test);
}

#[cfg(test)]
fn run(runtime: &mut tokio::runtime::Builder, test: impl Future<Output = ()>) {
    let test: Pin<Box<dyn Future<Output = ()> + '_>> = Box::pin(test);
    runtime.enable_all().build().unwrap().block_on(test);
}
