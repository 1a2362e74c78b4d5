//! Tasks that run in the background.

use std::pin::Pin;

use tokio::task::JoinHandle;

/// A future of any type with this output.
pub(crate) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Starts a task of the runtime, like `tokio::spawn`. The work is boxed, so that the compiler makes
/// the runtime's code for tasks only once for each type of output.
pub(crate) fn spawn<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    let work: Boxed<T> = Box::pin(work);
    tokio::spawn(work)
}
