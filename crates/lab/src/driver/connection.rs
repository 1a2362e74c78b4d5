//! Blocking connection to an NBD server, negotiated up to the first request.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hob_nbd::NbdUri;
use hob_nbd::client::handshake::{Goal, Handshake, HandshakeOutcome, Negotiated};
use hob_nbd::uri::Address;

/// Timeout for the server's messages during negotiation.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A TCP or Unix socket.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn connect(address: &Address) -> io::Result<Stream> {
        match address {
            Address::Unix { path } => UnixStream::connect(path).map(Stream::Unix),
            Address::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port))?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
        }
    }

    pub(super) fn try_clone(&self) -> io::Result<Stream> {
        match self {
            Stream::Tcp(stream) => stream.try_clone().map(Stream::Tcp),
            Stream::Unix(stream) => stream.try_clone().map(Stream::Unix),
        }
    }

    pub(super) fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(timeout),
            Stream::Unix(stream) => stream.set_read_timeout(timeout),
        }
    }

    /// Shuts down both directions of the socket, which ends waiting reads and writes. A socket that
    /// is already shut down is not an error.
    pub(super) fn shutdown(&self) {
        let _ = match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl Read for &Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&*stream).read(bytes),
            Stream::Unix(stream) => (&*stream).read(bytes),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&*stream).write(bytes),
            Stream::Unix(stream) => (&*stream).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection to an NBD export, ready for requests.
pub struct Connection {
    pub(super) stream: Stream,
    pub(super) negotiated: Negotiated,
    /// Bytes received after the negotiation.
    pub(super) early: Vec<u8>,
}

impl Connection {
    /// Connects to the server and negotiates the export.
    ///
    /// # Errors
    /// Returns an error if the server cannot be reached, is not an NBD server, or refuses the
    /// export, and for a URI with TLS.
    pub fn open(target: &NbdUri) -> Result<Connection> {
        if target.tls.is_some() {
            bail!("{target}: a replay does not use TLS; add a listener without TLS, or a Unix socket");
        }
        let stream =
            Stream::connect(&target.address).with_context(|| format!("cannot connect to {target}"))?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        let (negotiated, early) =
            negotiate(&stream, &target.export).with_context(|| format!("cannot use {target}"))?;
        Ok(Connection { stream, negotiated, early })
    }

    /// Returns the server's description of the export.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }
}

fn negotiate(mut stream: &Stream, export: &str) -> Result<(Negotiated, Vec<u8>)> {
    let mut handshake = Handshake::new(Goal::Connect(export.to_owned()));
    let mut held: Vec<u8> = Vec::new();
    let mut bytes = [0; 4096];
    loop {
        let used = handshake.handle_input(&held);
        held.drain(..used);
        let output = handshake.poll_output();
        if let Some(output) = &output {
            stream.write_all(output).context("cannot send to the NBD server")?;
        }
        match handshake.poll_outcome() {
            Some(HandshakeOutcome::Connected(negotiated)) => return Ok((negotiated, held)),
            Some(HandshakeOutcome::Failed(error)) => return Err(error.into()),
            Some(HandshakeOutcome::Listed(_) | HandshakeOutcome::StartTls) => {
                unreachable!("neither a list nor TLS was requested")
            }
            None => {}
        }
        if used == 0 && output.is_none() {
            match stream.read(&mut bytes).context("the NBD server does not answer")? {
                0 => bail!("the NBD server closed the connection while negotiating"),
                count => held.extend_from_slice(&bytes[..count]),
            }
        }
    }
}
