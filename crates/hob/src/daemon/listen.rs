//! Where NBD clients come in: accept, negotiate, and hand the socket to the shard of its disk.
//!
//! Negotiation is not worth a shard's time. It runs here, on the control thread's runtime, with a
//! time limit for clients that connect and then say nothing. Where there is TLS, all of it runs on threads of
//! its own ([`relay`]), and so does what moves the bytes afterwards.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hob_control::Endpoint;
use hob_nbd::server::handshake::{self, Handshake, HandshakeLimits, HandshakeOutcome, Negotiated};
use hob_nbd::{ExportDirectory, ExportInfo};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::allow::{AllowList, Peer, Visible};
use super::doors::{self, Doors};
use super::exports::{Export, Exports};
use super::half_open::{HALF_OPEN_MAX, HALF_OPEN_TIME_MAX, HalfOpen, Newcomer};
use super::relay::{self, Spawner};
use super::socket_access::SocketAccess;
use super::tls::{PeerCertificate, Tls};
use super::watchdog::contained_task;

/// Longest wait for the end of a connection whose client said goodbye.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// How long a client waits for a disk that is being opened when the daemon starts: as long as systemd waits for the start.
const OPENING_MAX: Duration = Duration::from_secs(300);

/// The right to be connected. There are as many as connections may be; further clients wait in the
/// kernel. Given back when the last clone is dropped: a shard may be done with a client before its relay is.
pub(crate) type Place = Arc<OwnedSemaphorePermit>;

/// Who is at the other end of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// The client.
    Direct,
    /// A thread of this process, which has the client.
    Relayed,
}

/// An address for NBD clients.
#[derive(Clone, Debug)]
pub(crate) struct Entrance {
    /// Where.
    pub(crate) endpoint: Endpoint,
    /// If TLS is spoken there.
    pub(crate) tls: Option<NbdTls>,
}

/// TLS for NBD clients.
#[derive(Clone, Debug)]
pub(crate) struct NbdTls {
    /// Speaks it.
    pub(crate) session: NbdSession,
    /// Nothing is told without it.
    pub(crate) required: bool,
}

/// How a session begins.
#[derive(Clone, Debug)]
pub(crate) enum NbdSession {
    /// With certificates.
    Certificates(Arc<Tls>),
    /// With a key that both sides have.
    #[cfg(feature = "psk")]
    Keys(Arc<super::psk::Keys>),
}

/// What all listeners share.
#[derive(Clone, Debug)]
pub(crate) struct Hall {
    /// What there is.
    pub(crate) exports: Exports,
    /// Who may see it.
    pub(crate) allow: AllowList,
    /// Most connections of each listener.
    pub(crate) connections_max: usize,
}

/// A bound socket. Dropping it removes a Unix socket's file, unless it is left open.
pub(crate) struct Listener {
    socket: Socket,
    /// Which door it is.
    name: String,
    doors: Doors,
    tls: Option<NbdTls>,
}

enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// Binds, unless it was left open. A socket file that nobody listens on any more is replaced.
    pub(crate) async fn bind(
        entrance: &Entrance,
        access: SocketAccess,
        doors: &Doors,
    ) -> io::Result<Listener> {
        let Entrance { endpoint, tls } = entrance;
        let name = doors::name("nbd", endpoint);
        let open = doors.take(&name);
        let socket = match endpoint {
            Endpoint::Unix(path) => {
                let listener = match open {
                    // It was bound with what the program before was told.
                    Some(socket) => access.apply(path).map(|()| socket.into()),
                    None => bind_socket(path, access),
                }?;
                doors.opened(name.clone(), &listener);
                Socket::Unix(UnixListener::from_std(listener)?)
            }
            Endpoint::Tcp { .. } => {
                let address = endpoint.to_string();
                let address = address.strip_prefix("tcp:").unwrap_or(&address);
                let socket = match open {
                    Some(socket) => TcpListener::from_std(socket.into())?,
                    None => TcpListener::bind(address).await?,
                };
                doors.opened(name.clone(), &socket);
                if tls.is_none() && !socket.local_addr()?.ip().is_loopback() {
                    tracing::warn!(
                        "{endpoint} serves NBD without TLS: whoever reaches it reads and writes disks"
                    );
                }
                Socket::Tcp(socket)
            }
        };
        Ok(Listener { socket, name, doors: doors.clone(), tls: tls.clone() })
    }

    /// Accepts clients until the task is dropped. Those of a listener with TLS are `relays`' work.
    pub(crate) async fn run(self, hall: Hall, mut relays: Option<Spawner>) {
        // Its own: strangers who use up those of one listener keep nobody else waiting.
        let places = Arc::new(Semaphore::new(hall.connections_max));
        // Fewer than places, so that strangers leave some to clients.
        let half_open = HalfOpen::new(HALF_OPEN_MAX.min(hall.connections_max.div_ceil(2)));
        loop {
            let place = Arc::new(Arc::clone(&places).acquire_owned().await.expect("never closed"));
            self.doors.until_open().await;
            let accepted = tokio::select! {
                biased;
                // From then on nobody comes in, not even one who was quicker.
                () = self.doors.until_shut() => continue,
                accepted = self.accept(&hall, place) => accepted,
            };
            match accepted {
                Ok(visit) => {
                    // Of those inside TLS nobody is kept.
                    let half_way = self.tls.is_none().then(|| self.doors.half_way());
                    let (newcomer, eviction) = half_open.enter();
                    let served = contained_task(true, async move {
                        let peer = visit.peer.clone();
                        let served = tokio::select! {
                            served = visit.serve(newcomer) => served,
                            () = eviction.wait() => Err(io::Error::other("it chose none in time")),
                        };
                        if let Err(error) = served {
                            tracing::info!("{peer} did not get as far as an export: {error}");
                        }
                        drop(half_way);
                    });
                    match &mut relays {
                        Some(relays) if self.tls.is_some() => relays.spawn(served),
                        _ => drop(tokio::spawn(served)),
                    }
                }
                Err(error) => {
                    // Out of descriptors, most likely: others must leave first.
                    tracing::warn!(%error, "cannot accept a client");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn accept(&self, hall: &Hall, place: Place) -> io::Result<Visit> {
        let (socket, address) = match &self.socket {
            Socket::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                (OwnedFd::from(stream.into_std()?), None)
            }
            Socket::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                stream.set_nodelay(true)?;
                (OwnedFd::from(stream.into_std()?), Some(from.ip().to_canonical()))
            }
        };
        let peer = Peer { address, ..Peer::default() };
        Ok(Visit { socket, peer, hall: hall.clone(), tls: self.tls.clone(), place })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.doors.closed(&self.name);
    }
}

/// Listens on a Unix socket, without waiting. A socket file that nobody listens on any more is replaced.
pub(crate) fn bind_socket(path: &Path, access: SocketAccess) -> io::Result<std::os::unix::net::UnixListener> {
    remove_stale(path)?;
    let listener = bind_ready(path, access)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Binds under another name first, so that a socket that is there answers. What is in its place stays, and binding fails.
fn bind_ready(path: &Path, access: SocketAccess) -> io::Result<std::os::unix::net::UnixListener> {
    use std::os::unix::net::UnixListener;
    let mut other = path.as_os_str().to_owned();
    other.push(format!(".{}", std::process::id()));
    let _ = std::fs::remove_file(&other);
    let listener = match UnixListener::bind(&other) {
        // The names of sockets have a limit, which this one may keep to and the other not.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            let listener = UnixListener::bind(path)?;
            return access.apply(path).map(|()| listener);
        }
        bound => bound?,
    };
    let linked = access.apply(Path::new(&other)).and_then(|()| std::fs::hard_link(&other, path));
    std::fs::remove_file(&other)?;
    match linked {
        Ok(()) => Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "Address already in use"))
        }
        Err(error) => Err(error),
    }
}

/// Removes a socket file that nobody listens on. Anything else in its place stays, and binding fails.
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {
            match std::os::unix::net::UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
                _ => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// A client that was let into the hall.
struct Visit {
    socket: OwnedFd,
    peer: Peer,
    hall: Hall,
    tls: Option<NbdTls>,
    place: Place,
}

impl Visit {
    async fn serve(self, newcomer: Newcomer) -> io::Result<()> {
        let Visit { socket, peer, hall, tls, place } = self;
        let is_unix = peer.address.is_none();
        let visible = Visible { exports: hall.exports, allow: hall.allow, peer };
        if is_unix {
            serve(UnixStream::from_std(socket.into())?, visible, tls, (Some(newcomer), place)).await
        } else {
            serve(TcpStream::from_std(socket.into())?, visible, tls, (Some(newcomer), place)).await
        }
    }
}

/// What a shard's ring can serve.
trait IntoSocket: AsyncRead + AsyncWrite + Unpin + Send {
    fn into_socket(self) -> io::Result<OwnedFd>;
}

impl IntoSocket for UnixStream {
    fn into_socket(self) -> io::Result<OwnedFd> {
        self.into_std().map(OwnedFd::from)
    }
}

impl IntoSocket for TcpStream {
    fn into_socket(self) -> io::Result<OwnedFd> {
        self.into_std().map(OwnedFd::from)
    }
}

async fn serve(
    mut stream: impl IntoSocket,
    mut visible: Visible,
    tls: Option<NbdTls>,
    (mut newcomer, place): (Option<Newcomer>, Place),
) -> io::Result<()> {
    let offer = match &tls {
        None => handshake::Tls::Absent,
        Some(NbdTls { required: false, .. }) => handshake::Tls::Offered,
        Some(NbdTls { required: true, .. }) => handshake::Tls::Required,
    };
    let hello = Handshake::with_tls(HandshakeLimits::default(), offer);
    let inside = match negotiate_in_time(hello, &mut stream, &visible, &mut newcomer).await? {
        Step::Goodbye => return Ok(()),
        Step::Done(negotiated, leftover) => {
            return attach(stream.into_socket()?, &visible, negotiated, leftover, (Line::Direct, place));
        }
        Step::StartTls(inside) => inside,
        Step::Opening(..) => unreachable!("it was waited for"),
    };
    match tls.expect("TLS is started where it was offered").session {
        NbdSession::Certificates(tls) => {
            let stream = tls.accept(stream).await?;
            visible.peer.certificate = PeerCertificate::of(&stream);
            serve_inside(stream, inside, &visible, (newcomer, place)).await
        }
        #[cfg(feature = "psk")]
        NbdSession::Keys(keys) => {
            let (stream, name) = keys.accept(stream).await?;
            visible.peer.key = Some(name);
            serve_inside(stream, inside, &visible, (newcomer, place)).await
        }
    }
}

/// The same inside TLS.
async fn serve_inside(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    hello: Handshake,
    visible: &Visible,
    (mut newcomer, place): (Option<Newcomer>, Place),
) -> io::Result<()> {
    match negotiate_in_time(hello, &mut stream, visible, &mut newcomer).await? {
        Step::Goodbye => {
            let _ = tokio::time::timeout(FAREWELL_MAX, stream.shutdown()).await;
        }
        Step::Done(negotiated, leftover) => {
            let (near, far) = UnixStream::pair()?;
            let seat = (Line::Relayed, Arc::clone(&place));
            attach(far.into_socket()?, visible, negotiated, leftover, seat)?;
            drop(newcomer);
            relay::relay(stream, near).await;
        }
        Step::StartTls(_) => unreachable!("TLS is not started twice"),
        Step::Opening(..) => unreachable!("it was waited for"),
    }
    drop(place);
    Ok(())
}

fn too_long(_: tokio::time::error::Elapsed) -> io::Error {
    io::Error::other("it said nothing for too long")
}

/// Hands a client to the shard of its disk.
fn attach(
    socket: OwnedFd,
    visible: &Visible,
    negotiated: Negotiated,
    leftover: Vec<u8>,
    seat: (Line, Place),
) -> io::Result<()> {
    // It may have been taken away in this moment.
    let Some(export) = visible.get(&negotiated.export) else { return Ok(()) };
    let Export { disk, shard, promote, .. } = export;
    shard.attach(disk, socket, negotiated, leftover, promote, seat).map_err(io::Error::other)
}

/// How far negotiation got.
enum Step {
    /// An export was chosen. With what the client has sent since.
    Done(Negotiated, Vec<u8>),
    /// It goes on inside TLS.
    StartTls(Handshake),
    /// The client asks for a disk that is being opened, by this name. With the handshake as it was before, and what is to be read
    /// again.
    Opening(String, Box<Handshake>, Vec<u8>),
    /// The client does not want anything.
    Goodbye,
}

/// The exports, and the one that was asked for while its disk was being opened.
struct Asked<'a> {
    visible: &'a Visible,
    opening: RefCell<Option<String>>,
}

impl ExportDirectory for Asked<'_> {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        let found = self.visible.find(name);
        if found.is_none() && self.visible.is_opening(name) {
            *self.opening.borrow_mut() = Some(name.to_owned());
        }
        found
    }

    fn list(&self) -> Vec<(String, String)> {
        self.visible.list()
    }
}

/// Negotiates. A client that asks for a disk which is being opened waits for it, and is no longer half-open.
async fn negotiate_in_time(
    hello: Handshake,
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    exports: &Visible,
    newcomer: &mut Option<Newcomer>,
) -> io::Result<Step> {
    let (mut handshake, mut received) = (hello, Vec::with_capacity(4096));
    loop {
        let negotiating = negotiate(handshake, received, stream, exports);
        match tokio::time::timeout(HALF_OPEN_TIME_MAX, negotiating).await.map_err(too_long)?? {
            Step::Opening(name, before, unread) => {
                tracing::info!("{} waits for '{name}', which is being opened", exports.peer);
                drop(newcomer.take());
                let opened = exports.exports.until_opened(|| !exports.is_opening(&name));
                tokio::time::timeout(OPENING_MAX, opened)
                    .await
                    .map_err(|_| io::Error::other(format!("'{name}' could not be opened in time")))?;
                (handshake, received) = (*before, unread);
            }
            step => return Ok(step),
        }
    }
}

/// The same with another host, over a connection that this one has opened: as long as that takes. `None` if it wants nothing.
pub(crate) async fn negotiate_with_peer(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    exports: &Visible,
) -> io::Result<Option<(Negotiated, Vec<u8>)>> {
    let hello = Handshake::with_tls(HandshakeLimits::default(), handshake::Tls::Absent);
    match negotiate(hello, Vec::new(), stream, exports).await? {
        Step::Done(negotiated, leftover) => Ok(Some((negotiated, leftover))),
        Step::Goodbye | Step::StartTls(_) | Step::Opening(..) => Ok(None),
    }
}

async fn negotiate(
    mut handshake: Handshake,
    mut received: Vec<u8>,
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    exports: &Visible,
) -> io::Result<Step> {
    loop {
        let before = handshake.clone();
        let asked = Asked { visible: exports, opening: RefCell::default() };
        let used = handshake.handle_input(&received, &asked);
        if let Some(name) = asked.opening.into_inner() {
            return Ok(Step::Opening(name, Box::new(before), received));
        }
        received.drain(..used);
        if let Some(output) = handshake.poll_output() {
            stream.write_all(&output).await?;
            stream.flush().await?;
            continue;
        }
        match handshake.poll_outcome() {
            Some(HandshakeOutcome::Done(negotiated)) => return Ok(Step::Done(negotiated, received)),
            Some(HandshakeOutcome::StartTls) if received.is_empty() => {
                return Ok(Step::StartTls(handshake.inside_tls()));
            }
            Some(HandshakeOutcome::StartTls) => {
                return Err(io::Error::other("bytes came before the TLS that was announced"));
            }
            Some(HandshakeOutcome::Aborted) => return Ok(Step::Goodbye),
            Some(HandshakeOutcome::Failed(error)) => return Err(io::Error::other(error)),
            None if used > 0 => continue,
            None => {}
        }
        if stream.read_buf(&mut received).await? == 0 {
            return Ok(Step::Goodbye);
        }
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::io::Promote;
    use hob_engine::units::DiskId;

    use super::*;
    use crate::daemon::allow::AllowEntry;
    use crate::daemon::shard_api::ShardHandle;

    /// A client's flags, and NBD_OPT_GO for an export.
    fn asks_for(export: &str) -> Vec<u8> {
        let name = export.as_bytes();
        let mut bytes = 1u32.to_be_bytes().to_vec();
        bytes.extend(b"IHAVEOPT");
        bytes.extend(7u32.to_be_bytes());
        bytes.extend((name.len() as u32 + 6).to_be_bytes());
        bytes.extend((name.len() as u32).to_be_bytes());
        bytes.extend(name);
        bytes.extend(0u16.to_be_bytes());
        bytes
    }

    /// What a client that asks for an export gets, if it gets anything within a second. `meanwhile` happens while it waits.
    async fn ask(
        exports: &Exports,
        allow: &AllowList,
        export: &str,
        meanwhile: impl FnOnce(),
    ) -> Option<Step> {
        let visible = Visible { exports: exports.clone(), allow: allow.clone(), peer: Peer::default() };
        let (mut client, mut server) = UnixStream::pair().unwrap();
        client.write_all(&asks_for(export)).await.unwrap();
        let served = async {
            let hello = Handshake::with_tls(HandshakeLimits::default(), handshake::Tls::Absent);
            tokio::time::timeout(
                Duration::from_secs(1),
                negotiate_in_time(hello, &mut server, &visible, &mut None),
            )
            .await
        };
        let (served, ()) = tokio::join!(served, async {
            tokio::task::yield_now().await;
            client.shutdown().await.unwrap();
            meanwhile();
        });
        served.ok().map(Result::unwrap)
    }

    #[tokio::test]
    async fn clients_wait_for_a_disk_that_is_being_opened_and_for_no_other() {
        let exports = Exports::default();
        let (shard, _calls) = ShardHandle::new(|| {});
        let export = Export {
            of: "web".to_owned(),
            disk: DiskId(0),
            shard,
            info: ExportInfo::new(4096),
            promote: Promote::Usual,
        };
        let all = AllowList::default();
        let opening = exports.begin_opening("web", ["web".to_owned(), "web-backup".to_owned()]);
        for name in ["web", "web-backup", ""] {
            assert!(ask(&exports, &all, name, || ()).await.is_none(), "'{name}' is being opened");
        }
        assert!(matches!(ask(&exports, &all, "db", || ()).await, Some(Step::Goodbye)));
        let entry = AllowEntry { disks: vec!["*".to_owned()], clients: vec!["10.0.0.1".parse().unwrap()] };
        let nobody = AllowList::new(vec![entry]);
        assert!(
            matches!(ask(&exports, &nobody, "web", || ()).await, Some(Step::Goodbye)),
            "it may not see it"
        );
        let found = ask(&exports, &all, "web", || {
            exports.insert("web", export.clone());
            drop(opening);
        });
        assert!(matches!(found.await, Some(Step::Done(negotiated, _)) if negotiated.export == "web"));
        // One that could not be opened is not there.
        let opening = exports.begin_opening("db", ["db".to_owned()]);
        assert!(matches!(ask(&exports, &all, "db", || drop(opening)).await, Some(Step::Goodbye)));
    }

    #[tokio::test]
    async fn a_socket_that_is_there_answers_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        let entrance = Entrance { endpoint: Endpoint::Unix(path.clone()), tls: None };
        let listener = Listener::bind(&entrance, SocketAccess::default(), &Doors::default()).await.unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        let again = Listener::bind(&entrance, SocketAccess::default(), &Doors::default()).await;
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "a file of somebody's").unwrap();
        let again = Listener::bind(&entrance, SocketAccess::default(), &Doors::default()).await;
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file of somebody's");
    }
}
