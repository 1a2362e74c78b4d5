//! Test NBD server with a volatile write cache. On request, the server loses unflushed data, hangs,
//! delays or fails requests, and disconnects with or without an error.
//!
//! The server follows the NBD protocol specification. Several threads serve the requests of a
//! connection, in any order. When a connection ends, its requests are dropped before another
//! connection begins, so no request takes effect late.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use conformance::nbd_client::{
    CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, EINVAL, FLAG_FUA, REQUEST_MAGIC,
};

use crate::behaviour::{Behaviour, Operation};
use crate::lateness::{Lateness, Task};
use crate::medium::Medium;
use crate::stamp::UNIT;

/// Number of threads that serve the requests of a connection.
const WORKERS: usize = 3;

/// NBD error number: the server is shutting down.
pub const ESHUTDOWN: u32 = 108;

/// Current faults that affect all requests and connections of the server.
#[derive(Debug, Default)]
struct Absence {
    /// Time until which the server accepts no connection.
    away_until: Option<Instant>,
    /// Time until which the server refuses every request with ESHUTDOWN.
    shutting_down_until: Option<Instant>,
}

struct State {
    medium: Mutex<Medium>,
    behaviour: Behaviour,
    absence: Mutex<Absence>,
    connection: Mutex<Option<UnixStream>>,
    stop: AtomicBool,
    /// Number of requests that the server has executed and not yet answered.
    unanswered: AtomicUsize,
    loses_at_close: AtomicBool,
    flags: u16,
}

/// A running test NBD server. Dropping this value stops the server.
pub struct Server {
    path: PathBuf,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Serves `medium` at the Unix socket `path`. If `fua` is false, the server does not offer FUA.
    ///
    /// # Errors
    /// Returns errors of the operating system.
    pub fn start(path: &Path, medium: Medium, fua: bool) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let state = Arc::new(State {
            medium: Mutex::new(medium),
            behaviour: Behaviour::default(),
            absence: Mutex::default(),
            connection: Mutex::new(None),
            stop: AtomicBool::new(false),
            unanswered: AtomicUsize::new(0),
            loses_at_close: AtomicBool::new(false),
            // Transmission flags: HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM and SEND_WRITE_ZEROES.
            flags: 1 | 4 | (u16::from(fua) * 8) | 32 | 64,
        });
        let served = Arc::clone(&state);
        let thread =
            std::thread::Builder::new().name("backing".to_owned()).spawn(move || served.listen(&listener))?;
        Ok(Self { path: path.to_owned(), state, thread: Some(thread) })
    }

    /// Returns the path of the server's socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the server's NBD URI.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("nbd+unix:///x?socket={}", self.path.display())
    }

    /// Returns the current faults of the backing.
    #[must_use]
    pub fn behaviour(&self) -> &Behaviour {
        &self.state.behaviour
    }

    /// Returns the server's medium. No request is served while the guard lives.
    pub fn medium(&self) -> MutexGuard<'_, Medium> {
        lock(&self.state.medium)
    }

    /// Returns true if the server has answered every request that it executed.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.state.unanswered.load(Ordering::SeqCst) == 0
    }

    /// Makes the server lose unflushed data at the end of each connection, like a server that keeps
    /// its write cache in a process for each connection.
    pub fn lose_at_close(&self) {
        self.state.loses_at_close.store(true, Ordering::Relaxed);
    }

    /// Loses unflushed data and closes the connection, as after a power failure. No client can
    /// connect for `away`. Returns the number of lost units.
    pub fn crash(&self, away: Duration) -> usize {
        self.set_away(away);
        let mut medium = self.medium();
        // The connection is closed while the medium is locked, so requests that wait for the medium
        // are dropped.
        self.disconnect();
        medium.lose()
    }

    /// Closes the connection without losing data. No client can connect for `away`.
    pub fn cut(&self, away: Duration) {
        self.set_away(away);
        let _serving = self.medium();
        self.disconnect();
    }

    fn set_away(&self, away: Duration) {
        lock(&self.state.absence).away_until = Some(Instant::now() + away);
    }

    fn disconnect(&self) {
        if let Some(stream) = lock(&self.state.connection).take() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Shuts the server down cleanly: refuses every request with ESHUTDOWN for `time`, makes all
    /// data durable, and closes the connection. No client can connect for `away`.
    pub fn shut_down(&self, time: Duration, away: Duration) {
        lock(&self.state.absence).shutting_down_until = Some(Instant::now() + time);
        std::thread::sleep(time);
        self.medium().flush();
        self.cut(away);
    }

    /// Ends all faults of the server.
    pub fn heal(&self) {
        self.state.behaviour.heal();
        *lock(&self.state.absence) = Absence::default();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        self.heal();
        self.disconnect();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

impl State {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn listen(self: &Arc<Self>, listener: &UnixListener) {
        while !self.stopped() {
            let away = lock(&self.absence).away_until.is_some_and(|until| until > Instant::now());
            match listener.accept() {
                // While the server is absent, clients can still connect to its listening socket.
                // Their connections are closed immediately.
                Ok((stream, _)) if away => drop(stream),
                Ok((stream, _)) => {
                    // The server serves one connection at a time, so its requests end before the
                    // next connection begins.
                    let _ = self.serve(stream);
                    if self.loses_at_close.load(Ordering::Relaxed) {
                        lock(&self.medium).lose();
                    }
                }
                Err(_) => self.behaviour.lateness().sleep(Duration::from_millis(5)),
            }
        }
    }

    fn serve(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        *lock(&self.connection) = Some(stream.try_clone()?);
        let mut reader = stream.try_clone()?;
        if !self.negotiate(&mut reader)? {
            return Ok(());
        }
        let connection = Arc::new(Connection {
            writer: stream.try_clone()?,
            turns: Turns::default(),
            queue: Mutex::new(VecDeque::new()),
            ready: Condvar::new(),
            ended: AtomicBool::new(false),
        });
        std::thread::scope(|scope| {
            for _ in 0..WORKERS {
                scope.spawn(|| self.work(&connection));
            }
            let result = read_requests(&mut reader, &connection, self.behaviour.lateness());
            connection.end();
            let _ = stream.shutdown(std::net::Shutdown::Both);
            result
        })
    }

    /// Performs the fixed newstyle handshake. Returns false if the client only sent queries.
    fn negotiate(&self, stream: &mut UnixStream) -> io::Result<bool> {
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        let mut flags = [0; 4];
        stream.read_exact(&mut flags)?;
        loop {
            let mut head = [0; 16];
            stream.read_exact(&mut head)?;
            let option = u32::from_be_bytes(head[8..12].try_into().expect("four"));
            let length = u32::from_be_bytes(head[12..].try_into().expect("four"));
            if length > 4096 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut data = vec![0; length as usize];
            stream.read_exact(&mut data)?;
            let mut reply = |kind: u32, data: &[u8]| {
                let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
                bytes.extend(option.to_be_bytes());
                bytes.extend(kind.to_be_bytes());
                bytes.extend((data.len() as u32).to_be_bytes());
                bytes.extend(data);
                stream.write_all(&bytes)
            };
            match option {
                6 | 7 => {
                    let mut info = vec![0, 0];
                    info.extend(lock(&self.medium).len().to_be_bytes());
                    info.extend(self.flags.to_be_bytes());
                    reply(3, &info)?;
                    reply(1, &[])?;
                    if option == 7 {
                        return Ok(true);
                    }
                }
                2 => {
                    reply(1, &[])?;
                    return Ok(false);
                }
                _ => reply(0x8000_0001, &[])?,
            }
        }
    }

    fn work(&self, connection: &Connection) {
        while let Some(request) = connection.next() {
            self.unanswered.fetch_add(1, Ordering::SeqCst);
            let answer = self.execute(&request, connection);
            let Request { cookie, task, .. } = request;
            if let Some((error, data)) = answer {
                let mut bytes = 0x6744_6698_u32.to_be_bytes().to_vec();
                bytes.extend(error.to_be_bytes());
                bytes.extend(cookie);
                bytes.extend(data);
                let mut writer = &connection.writer;
                connection.turns.run(|| {
                    drop(task);
                    let _ = self.behaviour.lateness().reply(|| writer.write_all(&bytes));
                });
            }
            self.unanswered.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Executes a request. Returns the error number and the data of the reply, or `None` if the
    /// connection has ended.
    fn execute(&self, request: &Request, connection: &Connection) -> Option<(u32, Vec<u8>)> {
        if !self.behaviour.wait(|| connection.ended.load(Ordering::Relaxed) || self.stopped()) {
            return None;
        }
        let mut medium = lock(&self.medium);
        if connection.ended.load(Ordering::Relaxed) || lock(&self.connection).is_none() {
            return None;
        }
        if let Some(error) = self.refusal(request, &mut medium) {
            return Some((error, Vec::new()));
        }
        let (offset, length) = (request.offset, u64::from(request.length));
        let unit = UNIT as u64;
        let inside = offset.checked_add(length).is_some_and(|end| end <= medium.len());
        if !inside || offset % unit != 0 || length % unit != 0 {
            return Some((EINVAL, Vec::new()));
        }
        let fua = request.flags & FLAG_FUA != 0;
        let mut data = Vec::new();
        match request.command {
            CMD_READ => data = medium.read(offset, length as usize),
            CMD_WRITE => medium.write(offset, &request.data, fua),
            CMD_WRITE_ZEROES | CMD_TRIM => medium.write(offset, &vec![0; length as usize], fua),
            CMD_FLUSH => medium.flush(),
            _ => return Some((EINVAL, data)),
        }
        Some((0, data))
    }

    /// Returns the error number that the current faults require for a request, if any.
    fn refusal(&self, request: &Request, medium: &mut Medium) -> Option<u32> {
        if lock(&self.absence).shutting_down_until.is_some_and(|until| until > Instant::now()) {
            return Some(ESHUTDOWN);
        }
        let operation = match request.command {
            CMD_READ => Operation::Read,
            CMD_FLUSH => Operation::Flush,
            CMD_TRIM => Operation::Trim,
            _ => Operation::Write,
        };
        let range = request.offset..request.offset + u64::from(request.length);
        self.behaviour.error(operation, &range, medium)
    }
}

struct Request {
    flags: u16,
    command: u16,
    cookie: [u8; 8],
    offset: u64,
    length: u32,
    data: Vec<u8>,
    /// Measures the time from the receipt of the request to its answer.
    task: Task,
}

struct Connection {
    writer: UnixStream,
    /// Order of the replies.
    turns: Turns,
    queue: Mutex<VecDeque<Request>>,
    ready: Condvar,
    ended: AtomicBool,
}

/// Lets threads do something one at a time, in the order in which they ask. With a mutex, a thread
/// that asks again at once overtakes those that wait, and can keep a finished reply from its client
/// for seconds.
#[derive(Debug, Default)]
struct Turns {
    inner: Mutex<TurnCounts>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct TurnCounts {
    taken: u64,
    ended: u64,
}

impl Turns {
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let mut counts = lock(&self.inner);
        let own = counts.taken;
        counts.taken += 1;
        while counts.ended != own {
            counts = self.ended.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
        drop(counts);
        let result = work();
        lock(&self.inner).ended += 1;
        self.ended.notify_all();
        result
    }
}

impl Connection {
    fn next(&self) -> Option<Request> {
        let mut queue = lock(&self.queue);
        loop {
            if self.ended.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(request) = queue.pop_front() {
                return Some(request);
            }
            queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end(&self) {
        let _queue = lock(&self.queue);
        self.ended.store(true, Ordering::Relaxed);
        self.ready.notify_all();
    }
}

fn read_requests(
    stream: &mut UnixStream,
    connection: &Connection,
    lateness: &Arc<Lateness>,
) -> io::Result<()> {
    loop {
        let mut head = [0; 28];
        stream.read_exact(&mut head)?;
        if head[..4] != REQUEST_MAGIC.to_be_bytes() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let command = u16::from_be_bytes([head[6], head[7]]);
        let length = u32::from_be_bytes(head[24..].try_into().expect("four"));
        let mut data = Vec::new();
        match command {
            CMD_DISC => return Ok(()),
            CMD_WRITE => {
                data = vec![0; length as usize];
                stream.read_exact(&mut data)?;
            }
            _ => {}
        }
        let request = Request {
            flags: u16::from_be_bytes([head[4], head[5]]),
            command,
            cookie: head[8..16].try_into().expect("eight"),
            offset: u64::from_be_bytes(head[16..24].try_into().expect("eight")),
            length,
            data,
            task: lateness.task(Instant::now()),
        };
        lock(&connection.queue).push_back(request);
        connection.ready.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_asks_again_does_not_overtake_the_others() {
        let turns = Turns::default();
        let order = Mutex::new(Vec::new());
        let wait_for_taken = |taken| {
            while lock(&turns.inner).taken < taken {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                turns.run(|| wait_for_taken(3));
                turns.run(|| lock(&order).push(1));
            });
            scope.spawn(|| {
                wait_for_taken(1);
                turns.run(|| lock(&order).push(2));
            });
            scope.spawn(|| {
                wait_for_taken(2);
                turns.run(|| lock(&order).push(3));
            });
        });
        assert_eq!(*lock(&order), [2, 3, 1]);
    }
}
