//! An NBD server in this process that answers each request after a fixed time, like distant storage.
//!
//! Delays do not add up, because requests in flight wait at the same time. A flush only waits and
//! syncs nothing, so the server models the speed of a storage system and not its durability. The
//! server supports fixed newstyle negotiation and simple replies.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{ErrorKind, Read, Result, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::nbd_client::{
    CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, EINVAL, EIO, REQUEST_MAGIC,
};

const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const OPT_ABORT: u32 = 2;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_UNSUPPORTED: u32 = (1 << 31) | 1;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// Transmission flags: HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES and
/// CAN_MULTI_CONN.
const EXPORT_FLAGS: u16 = 1 | 4 | 8 | 32 | 64 | 256;
/// Maximum length of an option or payload.
const LENGTH_MAX: u32 = 64 << 20;

/// Latency of each kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delays {
    /// A read.
    pub read: Duration,
    /// A write, trim or zeroing.
    pub write: Duration,
    /// A flush.
    pub flush: Duration,
}

/// A running server. Dropping it closes its socket; connections end with their clients.
#[derive(Debug)]
pub struct SlowServer {
    socket: PathBuf,
    over: Arc<AtomicBool>,
}

impl SlowServer {
    /// Serves the file `image` at the Unix socket `socket` under the empty name.
    ///
    /// # Panics
    /// Panics if the file or the socket cannot be opened.
    #[must_use]
    #[track_caller]
    pub fn start(socket: &Path, image: &Path, delays: Delays) -> Self {
        let file = File::options().read(true).write(true).open(image).expect("the image opens");
        let (file, over) = (Arc::new(file), Arc::new(AtomicBool::new(false)));
        let listener = UnixListener::bind(socket).expect("a new socket");
        let ended = Arc::clone(&over);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(SeqCst) {
                    return;
                }
                let file = Arc::clone(&file);
                thread::spawn(move || {
                    // A client that breaks the protocol or the connection ends only its own connection.
                    let _ = serve(stream, &file, delays);
                });
            }
        });
        Self { socket: socket.to_owned(), over }
    }
}

impl Drop for SlowServer {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
        let _ = UnixStream::connect(&self.socket);
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Replies, ordered by the time at which they are sent.
#[derive(Default)]
struct Replies {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    replies: BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>,
    is_closed: bool,
}

impl Replies {
    fn push(&self, due: Instant, number: u64, bytes: Vec<u8>) {
        self.queue.lock().expect("no thread panics here").replies.push(Reverse((due, number, bytes)));
        self.changed.notify_one();
    }

    fn close(&self) {
        self.queue.lock().expect("no thread panics here").is_closed = true;
        self.changed.notify_one();
    }

    /// Sends each reply at its time, until the queue is closed.
    fn send_all(&self, mut stream: UnixStream) {
        let mut queue = self.queue.lock().expect("no thread panics here");
        loop {
            let now = Instant::now();
            let wait = queue.replies.peek().map(|Reverse((due, ..))| due.saturating_duration_since(now));
            queue = match wait {
                _ if queue.is_closed => return,
                Some(Duration::ZERO) => {
                    let Some(Reverse((_, _, bytes))) = queue.replies.pop() else { continue };
                    drop(queue);
                    if stream.write_all(&bytes).is_err() {
                        return;
                    }
                    self.queue.lock().expect("no thread panics here")
                }
                Some(wait) => self.changed.wait_timeout(queue, wait).expect("no thread panics here").0,
                None => self.changed.wait(queue).expect("no thread panics here"),
            };
        }
    }
}

fn serve(mut stream: UnixStream, file: &File, delays: Delays) -> Result<()> {
    if !negotiate(&mut stream, file.metadata()?.len())? {
        return Ok(());
    }
    let replies = Arc::new(Replies::default());
    let (sender, output) = (Arc::clone(&replies), stream.try_clone()?);
    let thread = thread::spawn(move || sender.send_all(output));
    let result = answer(&mut stream, file, delays, &replies);
    replies.close();
    thread.join().expect("the sender does not panic");
    result
}

/// Returns true if the client enters transmission.
fn negotiate(stream: &mut UnixStream, size: u64) -> Result<bool> {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let (option, length) = (u32_at(&head, 8), u32_at(&head, 12));
        if u64_at(&head, 0) != OPTION_MAGIC || length > LENGTH_MAX {
            return Err(ErrorKind::InvalidData.into());
        }
        stream.read_exact(&mut vec![0; length as usize])?;
        let mut reply = |kind: u32, data: &[u8]| {
            let head = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
            stream.write_all(&[&OPTION_REPLY_MAGIC.to_be_bytes()[..], &head, data].concat())
        };
        match option {
            OPT_GO | OPT_INFO => {
                let info = [&[0, 0][..], &size.to_be_bytes(), &EXPORT_FLAGS.to_be_bytes()].concat();
                reply(REP_INFO, &info)?;
                reply(REP_ACK, &[])?;
                if option == OPT_GO {
                    return Ok(true);
                }
            }
            OPT_ABORT => return reply(REP_ACK, &[]).map(|()| false),
            _ => reply(REP_UNSUPPORTED, &[])?,
        }
    }
}

/// Performs requests as they arrive, and queues their replies.
fn answer(stream: &mut UnixStream, file: &File, delays: Delays, replies: &Replies) -> Result<()> {
    for number in 0.. {
        let mut head = [0; 28];
        stream.read_exact(&mut head)?;
        let (command, length) = (u16::from_be_bytes([head[6], head[7]]), u32_at(&head, 24));
        let (offset, arrived) = (u64_at(&head, 16), Instant::now());
        if u32_at(&head, 0) != REQUEST_MAGIC {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut payload = Vec::new();
        let too_long = matches!(command, CMD_READ | CMD_WRITE) && length > LENGTH_MAX;
        let (delay, done) = match command {
            _ if too_long => return Err(ErrorKind::InvalidData.into()),
            CMD_READ => {
                payload = vec![0; length as usize];
                (delays.read, file.read_exact_at(&mut payload, offset))
            }
            CMD_WRITE => {
                let mut data = vec![0; length as usize];
                stream.read_exact(&mut data)?;
                (delays.write, file.write_all_at(&data, offset))
            }
            CMD_FLUSH => (delays.flush, Ok(())),
            CMD_TRIM => (delays.write, Ok(())),
            CMD_WRITE_ZEROES => (delays.write, zero(file, offset, length)),
            CMD_DISC => return Ok(()),
            _ => (Duration::ZERO, Err(ErrorKind::InvalidInput.into())),
        };
        let error = done.err().map_or(0, |e| if e.kind() == ErrorKind::InvalidInput { EINVAL } else { EIO });
        let payload = if error == 0 { payload } else { Vec::new() };
        let head_reply = [REPLY_MAGIC, error].map(u32::to_be_bytes).concat();
        replies.push(arrived + delay, number, [&head_reply[..], &head[8..16], &payload].concat());
    }
    Ok(())
}

fn zero(file: &File, offset: u64, length: u32) -> Result<()> {
    static ZEROES: [u8; 65536] = [0; 65536];
    let end = offset + u64::from(length);
    let mut at = offset;
    while at < end {
        let count = (end - at).min(ZEROES.len() as u64);
        file.write_all_at(&ZEROES[..count as usize], at)?;
        at += count;
    }
    Ok(())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;
    use crate::nbd_client::{Address, Client};

    #[test]
    fn requests_take_their_time_side_by_side() {
        let (scratch, ms) = (Scratch::new(), Duration::from_millis);
        std::fs::write(scratch.path("image"), vec![7; 1 << 20]).unwrap();
        let delays = Delays { read: ms(40), write: ms(1000), flush: ms(60) };
        let socket = scratch.path("socket");
        let _server = SlowServer::start(&socket, &scratch.path("image"), delays);
        let mut client = Client::connect(&Address::Unix(socket), "").unwrap();
        let start = Instant::now();
        client.write(4096, &[9; 512]).unwrap();
        client.flush().unwrap();
        assert_eq!(client.read(4096, 513).unwrap(), [&[9; 512][..], &[7]].concat());
        assert!(start.elapsed() >= ms(1100), "{:?}", start.elapsed());
        let start = Instant::now();
        for at in 0..64 {
            client.send(0, CMD_WRITE, at * 512, 512, &[1; 512]).unwrap();
        }
        for _ in 0..64 {
            assert_eq!(client.receive().unwrap().error, 0);
        }
        // If the server handled these requests one after the other, they would take 64 s.
        assert!(start.elapsed() < ms(60_000), "{:?}: requests wait for each other", start.elapsed());
        assert!(client.read(2 << 20, 512).is_err());
    }
}
