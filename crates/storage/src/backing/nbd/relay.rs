//! A thread that encrypts and decrypts an NBD connection, so that a shard needs to know nothing of
//! TLS.
//!
//! The shard has one end of a Unix socket pair and the thread the other. The thread passes bytes
//! between its end and the encrypted stream. Each direction has one buffer, and waits while it is
//! full.
//!
//! # Late writes
//! A shard that closes a connection after a failure must know that no more data of the connection
//! reaches the server. So the shard itself shuts down the socket to the server (its `wire`), and
//! does not rely on this thread. If the shard only closes its end of the pair, the thread drops
//! unsent data, unless the shard ended the connection politely, with NBD_CMD_DISC. If the process
//! was stopped for [`STOPPED_MAX`] or longer, the thread ends the connection, because another host
//! may own the disk now. The socket to the server has the gate of the disk's lease, and checks it
//! before each system call that sends.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use hob_nbd::client::request;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::tls::Session;
use crate::ring::Gate;

/// Length of the buffer of each direction, bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Longest time between two rounds of the loop. A longer time means that the process was stopped.
const STOPPED_MAX: Duration = Duration::from_secs(2);

/// Longest wait for a socket; well below [`STOPPED_MAX`].
const WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// Interval at which a closed gate is checked.
const GATE_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Starts the thread. Returns the shard's end of the socket pair.
pub(super) fn start(session: Session) -> io::Result<UnixStream> {
    let (ours, shards) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    session.socket().set_nonblocking()?;
    std::thread::Builder::new().name("hob-nbd-tls".into()).spawn(move || {
        let mut relay = Relay { session, shard: ours, received: Buffer::new(), sent: Buffer::new() };
        if let End::Polite = relay.run() {
            let _ = rustix::net::sockopt::set_socket_linger(relay.session.as_fd(), None);
            relay.session.close();
        }
    })?;
    Ok(shards)
}

struct Relay {
    session: Session,
    shard: UnixStream,
    /// Bytes from the server that are not sent to the shard yet.
    received: Buffer,
    /// Bytes from the shard that are not sent to the server yet.
    sent: Buffer,
}

/// How a connection ended.
enum End {
    /// The shard ended the connection with NBD_CMD_DISC, which was sent to the server.
    Polite,
    /// The connection ended in any other way.
    Cut,
}

/// Whether one call passed any bytes on.
type Passed = io::Result<bool>;

impl Relay {
    fn run(&mut self) -> End {
        let mut round = Instant::now();
        loop {
            let received = self.receive();
            // Checked before each step that sends, because the process may have been stopped
            // anywhere.
            if round.elapsed() > STOPPED_MAX {
                return End::Cut;
            }
            round = Instant::now();
            match received.and_then(|received| Ok(self.send()? | received)) {
                Ok(true) => {}
                Ok(false) => {
                    if self.wait().is_err() {
                        return End::Cut;
                    }
                }
                Err(_) if self.sent.ends_with(&request::disconnect()) => return End::Polite,
                Err(_) => return End::Cut,
            }
        }
    }

    /// Passes bytes from the server to the shard.
    fn receive(&mut self) -> Passed {
        let mut passed = false;
        if self.received.is_empty() {
            passed |= self.received.fill(&mut self.session)?;
        }
        Ok(passed | self.received.drain(&mut self.shard)?)
    }

    /// Passes bytes from the shard to the server.
    fn send(&mut self) -> Passed {
        let mut passed = false;
        if !self.sent.is_empty() {
            passed |= self.sent.drain(&mut self.session)?;
        }
        match self.session.flush() {
            Ok(()) if self.sent.is_empty() => {}
            Ok(()) => return Ok(passed),
            Err(error) if is_blocked(&error) => return Ok(passed),
            Err(error) => return Err(error),
        }
        passed |= self.sent.fill(&mut self.shard)?;
        Ok(passed)
    }

    /// Waits until one of the sockets can be read or written, so that bytes can be passed on.
    fn wait(&self) -> io::Result<()> {
        let (mut of_server, mut of_shard) = (PollFlags::empty(), PollFlags::empty());
        match self.received.is_empty() {
            true => of_server |= PollFlags::IN,
            false => of_shard |= PollFlags::OUT,
        }
        let is_open = self.session.socket().gate().is_open();
        match self.sent.is_empty() && !self.session.wants_write() {
            true => of_shard |= PollFlags::IN,
            false if is_open => of_server |= PollFlags::OUT,
            false => {}
        }
        let mut both =
            [PollFd::from_borrowed_fd(self.session.as_fd(), of_server), PollFd::new(&self.shard, of_shard)];
        match poll(&mut both, Some(if is_open { &WAIT } else { &GATE_WAIT })) {
            // The shard has closed its end. The server must not receive the shard's last bytes,
            // because the lease has ended.
            Ok(_) if !is_open && both[1].revents().contains(PollFlags::HUP) => {
                Err(io::ErrorKind::ConnectionAborted.into())
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn is_blocked(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Bytes that were read on one side and are not written to the other side yet.
struct Buffer {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

impl Buffer {
    fn new() -> Buffer {
        Buffer { bytes: vec![0; BUFFER_BYTES].into_boxed_slice(), from: 0, to: 0 }
    }

    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Returns true if the bytes that were read last end with the bytes `end`.
    fn ends_with(&self, end: &[u8]) -> bool {
        self.is_empty() && self.bytes[..self.to].ends_with(end)
    }

    /// Reads into the empty buffer. The end of the stream is an error.
    fn fill(&mut self, from: &mut impl Read) -> Passed {
        match from.read(&mut self.bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                (self.from, self.to) = (0, count);
                Ok(true)
            }
            Err(error) if is_blocked(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes as much as possible.
    fn drain(&mut self, to: &mut impl Write) -> Passed {
        let mut passed = false;
        while !self.is_empty() {
            match to.write(&self.bytes[self.from..self.to]) {
                Ok(0) => break,
                Ok(count) => {
                    self.from += count;
                    passed = true;
                }
                Err(error) if is_blocked(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(passed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use hob_nbd::uri::{Address, Credentials, NbdUri, UriTls};
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use rustls::pki_types::PrivatePkcs8KeyDer;
    use rustls::{ServerConfig, ServerConnection, StreamOwned};

    use super::super::connect::Wire;
    use super::*;

    type Server = StreamOwned<ServerConnection, UnixStream>;

    /// Returns the shard's end, the socket to the server, and the server, which has accepted TLS.
    fn connected() -> (UnixStream, Wire, Server) {
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["array".to_owned()]).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ca-cert.pem"), cert.pem()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ServerConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(vec![cert.into()], key.into())
                .unwrap();
            let mut server = StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), theirs);
            server.conn.complete_io(&mut server.sock).unwrap();
            server
        });
        let tls = UriTls {
            credentials: Credentials::Certificates(directory.path().to_owned()),
            hostname: Some("array".to_owned()),
        };
        let uri = NbdUri::new(Address::Unix { path: "unused".into() }, "");
        let deadline = Instant::now() + Duration::from_secs(60);
        let session = Session::start(ours.into(), &uri, &tls, deadline).unwrap();
        let wire = Wire::new(&session).unwrap();
        (start(session).unwrap(), wire, server.join().unwrap())
    }

    #[test]
    fn bytes_pass_in_both_directions() {
        let (mut shard, wire, mut server) = connected();
        let sent: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        let copy = sent.clone();
        let echo = std::thread::spawn(move || {
            let mut received = vec![0; copy.len()];
            server.read_exact(&mut received).unwrap();
            assert!(received == copy, "the server received something else");
            server.write_all(&received).unwrap();
            server.flush().unwrap();
            server
        });
        let mut writer = shard.try_clone().unwrap();
        let mut received = vec![0; sent.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&sent).unwrap());
            shard.read_exact(&mut received).unwrap();
        });
        assert!(received == sent, "the shard received something else");
        drop((echo.join().unwrap(), wire));
        assert_eq!(shard.read(&mut [0]).unwrap(), 0, "the end of the server's stream");
    }

    #[test]
    fn nothing_is_sent_after_the_wire_is_cut() {
        let (mut shard, wire, mut server) = connected();
        shard.set_nonblocking(true).unwrap();
        // More than both buffers and the kernel's queues take while the server does not read.
        let (mut accepted, mut refused) = (0, 0);
        while refused < 100 {
            match shard.write(&[7; 65536]) {
                Ok(count) => (accepted, refused) = (accepted + count, 0),
                Err(_) => {
                    refused += 1;
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
        }
        wire.cut();
        drop(shard);
        let mut received = Vec::new();
        let _ = server.read_to_end(&mut received);
        assert!(received.len() < accepted, "{} of {accepted} bytes", received.len());
    }

    #[derive(Debug, Default)]
    struct TestGate(AtomicBool);

    impl Gate for TestGate {
        fn is_open(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn nothing_is_sent_while_the_gate_is_closed() {
        let (mut shard, wire, mut server) = connected();
        let gate = Arc::new(TestGate::default());
        wire.set_gate(gate.clone());
        shard.write_all(&[7; 100_000]).unwrap();
        server.sock.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let error = server.read(&mut [0]).unwrap_err();
        assert!(is_blocked(&error), "{error}");
        server.sock.set_read_timeout(None).unwrap();
        gate.0.store(true, Ordering::SeqCst);
        let mut received = vec![0; 100_000];
        server.read_exact(&mut received).unwrap();
        assert!(received.iter().all(|byte| *byte == 7));
        // The thread ends with the shard's connection, although it may not send what it has.
        gate.0.store(false, Ordering::SeqCst);
        shard.write_all(&[8; 100_000]).unwrap();
        drop((shard, wire));
        let error = server.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_a_polite_end_is_a_regular_end_of_tls() {
        let (mut shard, wire, mut server) = connected();
        shard.write_all(&request::disconnect()).unwrap();
        drop((shard, wire));
        let mut received = Vec::new();
        server.read_to_end(&mut received).expect("a regular end");
        assert_eq!(received, request::disconnect());

        let (shard, wire, mut server) = connected();
        drop((shard, wire));
        assert_eq!(server.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
