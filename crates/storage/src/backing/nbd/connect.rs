//! Connects to an NBD server and negotiates, with blocking sockets on a helper thread.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use hob_nbd::client::handshake::{Goal, Handshake, HandshakeOutcome, Negotiated};
use hob_nbd::client::request;
use hob_nbd::uri::{Address, NbdUri};
use hob_nbd::wire::BASE_ALLOCATION;

use super::gate::ReplaceableGate;
use super::relay;
use super::socket::{LATE, Socket, in_time};
use super::tls::Session;
use crate::ring::Gate;

/// Idle time after which TCP keepalive probes a connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);

/// A negotiated connection that is ready for requests.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) socket: OwnedFd,
    pub(crate) wire: Option<Wire>,
    pub(crate) negotiated: Negotiated,
}

/// The socket to the server, if a thread encrypts the connection.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: OwnedFd,
    gate: Arc<ReplaceableGate>,
}

impl Wire {
    pub(super) fn new(session: &Session) -> io::Result<Wire> {
        let socket = session.as_fd().try_clone_to_owned()?;
        Ok(Wire { socket, gate: session.socket().gate().clone() })
    }

    /// Sets the gate that must be open when the thread sends.
    pub(super) fn set_gate(&self, gate: Arc<dyn Gate>) {
        self.gate.set(gate);
    }

    /// Ends the connection to the server at once. The kernel sends no more data of the connection.
    pub(super) fn cut(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        drop_unsent(self.socket.as_fd());
    }
}

/// Connects to the server of `uri`, within `limit`. If the server's host leaves data unconfirmed
/// for `silence_max`, the kernel closes the connection. The error is a sentence for users.
pub(crate) fn connect(uri: &NbdUri, limit: Duration, silence_max: Duration) -> Result<Link, String> {
    connect_for(uri, BASE_ALLOCATION, limit, silence_max)
}

/// Connects as [`connect`] does, but requests the metadata context `context` instead of
/// `base:allocation`.
pub(super) fn connect_for(
    uri: &NbdUri,
    context: &'static str,
    limit: Duration,
    silence_max: Duration,
) -> Result<Link, String> {
    let deadline = Instant::now() + limit;
    let mut socket: Socket = match &uri.address {
        Address::Unix { path } => UnixStream::connect(path).map_err(|error| error.to_string())?.into(),
        Address::Tcp { host, port } => {
            let stream = connect_tcp(host, *port, deadline)?;
            forget_at_end(&stream, silence_max)
                .map_err(|error| format!("the socket cannot be set up: {error}"))?;
            stream.into()
        }
    };
    let goal = Goal::Connect(uri.export.clone());
    let Some(tls) = &uri.tls else {
        let mut handshake = Handshake::new(goal).for_context(context);
        let negotiated = match negotiate(&mut handshake, &mut socket, deadline)? {
            Agreed::Connected(negotiated) => negotiated,
            Agreed::StartTls => return Err("the server started TLS without a request".to_owned()),
        };
        socket.wait_forever()?;
        return Ok(Link { socket: socket.into(), wire: None, negotiated });
    };
    let mut handshake = Handshake::with_tls(goal).for_context(context);
    let Agreed::StartTls = negotiate(&mut handshake, &mut socket, deadline)? else {
        return Err("the server did not start TLS".to_owned());
    };
    let mut session = Session::start(socket, uri, tls, deadline)?;
    let Agreed::Connected(negotiated) = negotiate(&mut handshake.inside_tls(), &mut session, deadline)?
    else {
        return Err("the server started TLS inside TLS".to_owned());
    };
    let cannot = |error: io::Error| format!("TLS cannot be set up: {error}");
    let wire = Wire::new(&session).map_err(cannot)?;
    let socket = relay::start(session).map_err(cannot)?;
    Ok(Link { socket: socket.into(), wire: Some(wire), negotiated })
}

/// Connects to the first of the host's addresses that accepts.
fn connect_tcp(host: &str, port: u16, deadline: Instant) -> Result<TcpStream, String> {
    let addresses = (host, port).to_socket_addrs().map_err(|error| error.to_string())?;
    let mut last = format!("{host} has no address");
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LATE.to_owned());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                // Requests are small and must not wait for each other (TCP_NODELAY). The keep-alive
                // detects a peer that does not answer.
                let _ = stream.set_nodelay(true);
                let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
                return Ok(stream);
            }
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    Err(last)
}

/// Makes the kernel drop unsent data when the connection or this process ends. By default the
/// kernel would resend unconfirmed data for 15 minutes, and a late write could overwrite data of
/// another host that has taken over the disk. No acknowledged write is lost, because a write is
/// acknowledged only after the server's reply.
///
/// A stopped process does not close its connections. So the kernel also closes a connection on
/// which the peer has confirmed no data for `silence_max`.
fn forget_at_end(stream: &TcpStream, silence_max: Duration) -> io::Result<()> {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    let millis = u32::try_from(silence_max.as_millis()).unwrap_or(u32::MAX).max(1);
    rustix::net::sockopt::set_tcp_user_timeout(stream, millis)?;
    // Keepalive also detects a server host that received a request and then vanished. Otherwise the
    // request could wait for ever.
    let probe_after = silence_max.clamp(Duration::from_secs(1), KEEPALIVE_IDLE);
    rustix::net::sockopt::set_tcp_keepidle(stream, probe_after)?;
    rustix::net::sockopt::set_tcp_keepintvl(stream, probe_after)?;
    Ok(())
}

/// Closes a connection without requests in flight: sends NBD_CMD_DISC, and lets the kernel deliver
/// it.
pub(super) fn end_politely(socket: BorrowedFd<'_>) {
    let _ = rustix::net::sockopt::set_socket_linger(socket, None);
    let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
    // A server must keep running if the client closes the connection without this command.
    let _ = rustix::net::send(socket, &request::disconnect(), flags);
}

/// Ends the connection at once, so that no more of its requests reach the server.
pub(super) fn cut(socket: BorrowedFd<'_>, wire: Option<&Wire>) {
    match wire {
        Some(wire) => wire.cut(),
        None => drop_unsent(socket),
    }
}

/// Makes the kernel drop a connection's unsent data now. Closing may take longer, because older
/// kernels keep an I/O ring's sockets until earlier I/O of the I/O ring has ended. The connection
/// is shut down already, and no request waits for it. A server on a Unix socket still reads the
/// data that hob sent before.
fn drop_unsent(socket: BorrowedFd<'_>) {
    let _ = rustix::net::connect_unspec(socket);
}

/// Result of a negotiation.
enum Agreed {
    /// The connection is ready for requests.
    Connected(Negotiated),
    /// The TLS handshake is next.
    StartTls,
}

/// Negotiates until the server agrees or refuses.
fn negotiate(
    handshake: &mut Handshake,
    stream: &mut impl Stream,
    deadline: Instant,
) -> Result<Agreed, String> {
    let mut input = vec![0; 4096];
    let (mut from, mut to) = (0, 0);
    loop {
        stream.socket().wait_until(deadline)?;
        while let Some(bytes) = handshake.poll_output() {
            stream.write_all(&bytes).and_then(|()| stream.flush()).map_err(|error| in_time(&error))?;
        }
        match handshake.poll_outcome() {
            Some(HandshakeOutcome::Connected(_)) if from < to => {
                return Err("the server sent replies before the first request".into());
            }
            Some(HandshakeOutcome::StartTls) if from < to => {
                return Err("the server sent data before the TLS handshake".into());
            }
            Some(HandshakeOutcome::Connected(negotiated)) => return Ok(Agreed::Connected(negotiated)),
            Some(HandshakeOutcome::StartTls) => return Ok(Agreed::StartTls),
            Some(HandshakeOutcome::Failed(error)) => return Err(error.to_string()),
            Some(HandshakeOutcome::Listed(_)) => {
                return Err("the server listed its exports without a request".into());
            }
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

/// A stream to the server, encrypted or not.
trait Stream: Read + Write {
    /// The socket below the stream.
    fn socket(&self) -> &Socket;
}

impl Stream for Socket {
    fn socket(&self) -> &Socket {
        self
    }
}

impl Stream for Session {
    fn socket(&self) -> &Socket {
        Session::socket(self)
    }
}

/// Function that is called at the start of a connection attempt. An error, a text for users, ends
/// the attempt.
pub(crate) type BeforeConnecting = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// An attempt to connect, in its own thread.
#[derive(Debug)]
pub(super) struct Attempt {
    result: mpsc::Receiver<Result<Link, String>>,
}

impl Attempt {
    /// Starts an attempt to connect. The returned socket only notifies the caller: it reaches the
    /// end of file when the attempt has a result. This socket is not the connection to the NBD
    /// server.
    pub(super) fn start(
        before: Option<BeforeConnecting>,
        uri: &NbdUri,
        limit: Duration,
        silence_max: Duration,
    ) -> io::Result<(Attempt, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (sender, result) = mpsc::channel();
        let uri = uri.clone();
        std::thread::Builder::new().name("hob-nbd-connect".into()).spawn(move || {
            let ready = before.map_or(Ok(()), |before| before());
            // If the backing was closed during the attempt, no code receives the socket, and the
            // socket is dropped.
            let _ = sender.send(ready.and_then(|()| connect(&uri, limit, silence_max)));
            drop(theirs);
        })?;
        Ok((Attempt { result }, ours.into()))
    }

    /// Returns the result of this attempt to connect. Does not wait: call it after the socket that
    /// [`start`](Self::start) returned has reached the end of file.
    pub(super) fn result(self) -> Result<Link, String> {
        self.result.try_recv().unwrap_or_else(|_| Err("the attempt to connect was cancelled".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsent_data_is_dropped_with_the_socket() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let connected = || {
            let stream = connect_tcp("127.0.0.1", port, Instant::now() + Duration::from_secs(60)).unwrap();
            forget_at_end(&stream, Duration::from_secs(7)).unwrap();
            (stream, listener.accept().unwrap().0)
        };
        // If a connection is reset instead of closed, the peer receives nothing more.
        let is_reset = |peer: &mut TcpStream| {
            let mut byte = [0];
            peer.read(&mut byte).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
        };
        let (stream, mut peer) = connected();
        assert_eq!(rustix::net::sockopt::tcp_user_timeout(&stream).unwrap(), 7000);
        drop(stream);
        assert!(is_reset(&mut peer));
        let (stream, mut peer) = connected();
        stream.shutdown(std::net::Shutdown::Both).unwrap();
        drop_unsent(stream.as_fd());
        let mut all = Vec::new();
        let _ = peer.read_to_end(&mut all);
        assert!(peer.write(&[1]).is_err(), "it would be accepted if the connection were only shut down");
        let (stream, mut peer) = connected();
        end_politely(stream.as_fd());
        drop(stream);
        all.clear();
        assert_eq!(peer.read_to_end(&mut all).unwrap(), 28, "a request to end, and the end");
    }
}
