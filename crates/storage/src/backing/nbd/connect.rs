//! Connecting to an NBD server and negotiating, with blocking sockets, away from the shard's thread.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hob_nbd::client::handshake::{Goal, Handshake, HandshakeOutcome, Negotiated};
use hob_nbd::uri::{Address, NbdUri};

/// A connection that is ready for requests.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) socket: OwnedFd,
    pub(crate) negotiated: Negotiated,
}

/// Connects to what `uri` names, within `limit`. The error is a sentence for people.
pub(crate) fn connect(uri: &NbdUri, limit: Duration) -> Result<Link, String> {
    let deadline = Instant::now() + limit;
    match &uri.address {
        Address::Unix { path } => {
            let stream = UnixStream::connect(path).map_err(|error| error.to_string())?;
            let set = |stream: &UnixStream, limit| {
                stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit))
            };
            let negotiated = negotiate(&stream, uri, deadline, &|limit| set(&stream, limit))?;
            Ok(Link { socket: stream.into(), negotiated })
        }
        Address::Tcp { host, port } => {
            let stream = connect_tcp(host, *port, deadline)?;
            let set = |stream: &TcpStream, limit| {
                stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit))
            };
            let negotiated = negotiate(&stream, uri, deadline, &|limit| set(&stream, limit))?;
            Ok(Link { socket: stream.into(), negotiated })
        }
    }
}

/// The first of the host's addresses that answers.
fn connect_tcp(host: &str, port: u16, deadline: Instant) -> Result<TcpStream, String> {
    let addresses = (host, port).to_socket_addrs().map_err(|error| error.to_string())?;
    let mut last = format!("{host} has no address");
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("it does not answer in time".into());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                // Requests are small and must not wait for each other; a silent peer is to be noticed.
                let _ = stream.set_nodelay(true);
                let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
                return Ok(stream);
            }
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    Err(last)
}

/// Talks until the server agrees or refuses. `set_timeout` concerns both directions of `stream`.
fn negotiate<S>(
    stream: &S,
    uri: &NbdUri,
    deadline: Instant,
    set_timeout: &dyn Fn(Option<Duration>) -> io::Result<()>,
) -> Result<Negotiated, String>
where
    for<'a> &'a S: Read + Write,
{
    let mut stream = stream;
    let mut handshake = Handshake::new(Goal::Connect(uri.export.clone()));
    let mut input = vec![0; 4096];
    let (mut from, mut to) = (0, 0);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("it does not answer in time".into());
        }
        set_timeout(Some(left)).map_err(|error| error.to_string())?;
        while let Some(bytes) = handshake.poll_output() {
            stream.write_all(&bytes).map_err(|error| in_time(&error))?;
        }
        match handshake.poll_outcome() {
            Some(HandshakeOutcome::Connected(_)) if from < to => {
                return Err("it sent replies before there was a request".into());
            }
            Some(HandshakeOutcome::Connected(negotiated)) => {
                set_timeout(None).map_err(|error| error.to_string())?;
                return Ok(negotiated);
            }
            Some(HandshakeOutcome::Failed(error)) => return Err(error.to_string()),
            Some(HandshakeOutcome::Listed(_)) => return Err("it listed its exports unasked".into()),
            None => {}
        }
        let consumed = handshake.handle_input(&input[from..to]);
        from += consumed;
        if consumed > 0 || from < to {
            continue;
        }
        (from, to) = match stream.read(&mut input) {
            Ok(0) => {
                handshake.handle_end_of_stream();
                (0, 0)
            }
            Ok(count) => (0, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (0, 0),
            Err(error) => return Err(in_time(&error)),
        };
    }
}

fn in_time(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it does not answer in time".into(),
        _ => error.to_string(),
    }
}

/// A connection attempt in a thread of its own.
#[derive(Debug)]
pub(super) struct Attempt {
    result: mpsc::Receiver<Result<Link, String>>,
}

impl Attempt {
    /// Starts to connect. The socket that is returned reads as closed when there is a result.
    pub(super) fn start(uri: &NbdUri, limit: Duration) -> io::Result<(Attempt, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (sender, result) = mpsc::channel();
        let uri = uri.clone();
        std::thread::Builder::new().name("hob-nbd-connect".into()).spawn(move || {
            // Nobody listens any more when the backing was closed meanwhile; the socket is dropped then.
            let _ = sender.send(connect(&uri, limit));
            drop(theirs);
        })?;
        Ok((Attempt { result }, ours.into()))
    }

    /// What came of it, once the socket reads as closed.
    pub(super) fn result(self) -> Result<Link, String> {
        self.result.try_recv().unwrap_or_else(|_| Err("the attempt was given up".into()))
    }
}
