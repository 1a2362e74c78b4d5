//! Relays NBD connections that use TLS: decrypts requests for the shard, and encrypts replies for
//! the client, on separate threads.
//!
//! A shard serves sockets that its I/O ring reads and writes. TLS needs a relay: a task with the
//! TLS session and one end of a Unix socket pair, whose other end the shard serves like a client.
//! Relay tasks have their own threads, so that encryption delays neither unencrypted I/O nor the
//! control API.
//!
//! Memory per connection is limited: a buffer of [`BUFFER_BYTES`] in each direction, the buffers of
//! the TLS session, and the buffers of the socket pair. If a client does not read, the pair fills
//! up, and the shard handles the connection like that of any client that does not read.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

/// Buffer size per direction and connection, in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Maximum time for sending the end of the session to a client.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// The relay threads, which end when this value is dropped.
#[derive(Debug)]
pub(crate) struct Relays {
    threads: Vec<Thread>,
    /// Sender that each relay task has a clone of. The channel closes when the last task has ended.
    alive: mpsc::Sender<()>,
    ended: mpsc::Receiver<()>,
}

#[derive(Debug)]
struct Thread {
    handle: Handle,
    /// Dropping this sender ends the thread.
    _stop: oneshot::Sender<()>,
}

impl Relays {
    /// Starts `threads` relay threads, but at least one.
    pub(crate) fn start(threads: usize) -> io::Result<Relays> {
        let (alive, ended) = mpsc::channel(1);
        let threads = (0..threads.max(1)).map(Thread::start).collect::<io::Result<_>>()?;
        Ok(Relays { threads, alive, ended })
    }

    /// Returns a handle that runs tasks on the relay threads.
    pub(crate) fn spawner(&self) -> Spawner {
        let handles = self.threads.iter().map(|thread| thread.handle.clone()).collect();
        Spawner { handles, next: 0, alive: self.alive.clone() }
    }

    /// Waits for a limited time for the tasks to end, after all spawners were dropped and the
    /// shards have closed their sockets.
    pub(crate) async fn finish(self, time_max: Duration) {
        let Relays { threads, alive, mut ended } = self;
        drop(alive);
        if tokio::time::timeout(time_max, ended.recv()).await.is_err() {
            tracing::info!(
                "some TLS clients did not receive their last replies before the connection was closed"
            );
        }
        drop(threads);
    }
}

impl Thread {
    fn start(number: usize) -> io::Result<Thread> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let run = move || {
            // An error means that the sender was dropped, which is the normal end.
            let _ = runtime.block_on(stopped);
        };
        std::thread::Builder::new().name(format!("hob-tls-{number}")).spawn(run)?;
        Ok(Thread { handle, _stop: stop })
    }
}

/// Distributes tasks over the threads in turn.
#[derive(Clone, Debug)]
pub(crate) struct Spawner {
    handles: Vec<Handle>,
    next: usize,
    alive: mpsc::Sender<()>,
}

impl Spawner {
    /// Runs a task on the next relay thread in turn.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        let alive = self.alive.clone();
        self.next = (self.next + 1) % self.handles.len();
        self.handles[self.next].spawn(async move {
            task.await;
            drop(alive);
        });
    }
}

/// Moves bytes between a client and its shard until the shard closes its end, and then ends the TLS
/// session. If the client closes first, the shard sees the end of the stream, and its remaining
/// replies are still sent.
pub(crate) async fn relay(client: impl AsyncRead + AsyncWrite, shard: UnixStream) {
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_shard, mut to_shard) = shard.into_split();
    let up = async {
        if let Err(error) = copy(&mut from_client, &mut to_shard, BUFFER_BYTES).await {
            // Most clients close the connection without ending the TLS session first.
            tracing::debug!("a TLS connection ended with an error: {error}");
        }
        let _ = to_shard.shutdown().await;
    };
    let down = async {
        match copy(&mut from_shard, &mut to_client, BUFFER_BYTES).await {
            Ok(()) => drop(tokio::time::timeout(FAREWELL_MAX, to_client.shutdown()).await),
            Err(error) => tracing::debug!("a TLS client disconnected: {error}"),
        }
    };
    tokio::pin!(down);
    tokio::select! {
        () = &mut down => {}
        () = up => down.await,
    }
}

/// Copies data from `from` to `to` until `from` ends. All data that was read is sent before more is
/// read, so that no data waits inside a TLS session.
pub(crate) async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    buffer_bytes: usize,
) -> io::Result<()> {
    let mut buffer = vec![0; buffer_bytes];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the client's end and the shard's end of a relayed connection.
    fn relayed(spawner: &mut Spawner) -> (UnixStream, UnixStream) {
        let pair = || {
            let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
            a.set_nonblocking(true).unwrap();
            b.set_nonblocking(true).unwrap();
            (a, b)
        };
        let ((client, near_client), (near_shard, shard)) = (pair(), pair());
        spawner.spawn(async move {
            let [client, shard] = [near_client, near_shard].map(|end| UnixStream::from_std(end).unwrap());
            relay(client, shard).await;
        });
        (UnixStream::from_std(client).unwrap(), UnixStream::from_std(shard).unwrap())
    }

    #[tokio::test]
    async fn bytes_go_both_ways_and_so_does_the_end() {
        let relays = Relays::start(2).unwrap();
        let mut spawner = relays.spawner();
        let mut text = String::new();
        // The client closes its sending side first, and must still receive the reply.
        let (mut client, mut shard) = relayed(&mut spawner);
        client.write_all(b"a request").await.unwrap();
        client.shutdown().await.unwrap();
        shard.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "a request");
        shard.write_all(b"an answer").await.unwrap();
        drop(shard);
        text.clear();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "an answer");
        // The shard closes first.
        let (mut client, mut shard) = relayed(&mut spawner);
        shard.write_all(b"farewell").await.unwrap();
        drop(shard);
        text.clear();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "farewell");
        drop(spawner);
        let start = std::time::Instant::now();
        relays.finish(Duration::from_secs(60)).await;
        assert!(start.elapsed() < Duration::from_secs(30), "all tasks had ended");
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_stops_its_shard_and_takes_little_memory() {
        let relays = Relays::start(1).unwrap();
        let mut spawner = relays.spawner();
        let (mut client, mut shard) = relayed(&mut spawner);
        let mut sent = 0;
        let piece = [7; 1 << 16];
        while let Ok(written) = tokio::time::timeout(Duration::from_millis(300), shard.write(&piece)).await {
            sent += written.unwrap();
            assert!(sent < 4 << 20, "{sent} bytes went in, and the client read none");
        }
        drop(shard);
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, vec![7; sent], "and none was lost");
        drop(spawner);
        relays.finish(Duration::from_secs(60)).await;
    }

    #[tokio::test]
    async fn the_end_is_not_waited_for_for_ever() {
        let relays = Relays::start(1).unwrap();
        let mut spawner = relays.spawner();
        let (_client, _shard) = relayed(&mut spawner);
        drop(spawner);
        relays.finish(Duration::from_millis(50)).await;
    }
}
