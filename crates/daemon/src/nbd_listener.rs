//! NBD listeners: accept connections, negotiate, and hand each socket to the shard of its disk.
//!
//! Negotiation runs on the control thread, so that it takes no time of a shard. Clients that
//! connect and send nothing are disconnected after [`HALF_OPEN_TIME_MAX`]. TLS connections run on
//! separate threads ([`relay`]), also after the negotiation.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hob_control::Endpoint;
use hob_nbd::server::handshake::{self, Handshake, HandshakeLimits, HandshakeOutcome, Negotiated};
use hob_nbd::{ExportDirectory, ExportInfo};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::allow::{AllowList, Peer, Visible};
use super::descriptors;
use super::exports::{Export, Exports};
use super::half_open::{HALF_OPEN_TIME_MAX, HalfOpenConnections, HalfOpenGuard};
use super::listening_sockets::{self, ListeningSockets};
use super::relay::{self, Spawner};
use super::shard_api::{ConnectionPermit, Transport};
use super::socket_access::{MissingDirectory, SocketAccess, bind_socket};
use super::tls::{PeerCertificate, Tls};
use super::watchdog::contained_task;
use crate::background::spawn;

/// Maximum time to wait for the end of a connection whose client disconnects.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// Maximum time that a client waits for a disk that is being opened at the daemon's start. It
/// equals systemd's time limit for the start.
const OPENING_MAX: Duration = Duration::from_secs(300);

/// Maximum number of half-open connections of a listener, so that all VMs of a host can start at the
/// same time.
const HALF_OPEN_MAX: usize = 256;

/// An address at which NBD clients connect.
#[derive(Clone, Debug)]
pub(crate) struct ListenAddress {
    /// Unix path, or host and port.
    pub(crate) endpoint: Endpoint,
    /// TLS settings; `None` without TLS.
    pub(crate) tls: Option<NbdTls>,
}

/// TLS settings of an NBD listener.
#[derive(Clone, Debug)]
pub(crate) struct NbdTls {
    /// Certificates or keys.
    pub(crate) session: NbdSession,
    /// True if clients that do not start TLS are refused.
    pub(crate) required: bool,
}

/// How a TLS session is authenticated.
#[derive(Clone, Debug)]
pub(crate) enum NbdSession {
    /// X.509 certificates.
    Certificates(Arc<Tls>),
    /// Pre-shared keys.
    Keys(Arc<super::psk::Keys>),
}

/// State that all NBD listeners share.
#[derive(Clone, Debug)]
pub(crate) struct ListenerContext {
    /// The exports that clients can request by name.
    pub(crate) exports: Exports,
    /// Which clients may see which exports.
    pub(crate) allow: AllowList,
    /// Maximum number of connections of each listener.
    pub(crate) connections_max: usize,
}

/// A bound socket. Dropping this value removes the file of a Unix socket, unless the socket stays
/// open for the next program.
pub(crate) struct Listener {
    socket: Socket,
    /// Address for clients, with the actual port if the configured port is 0.
    endpoint: Endpoint,
    /// Name of the socket in `listening`.
    name: String,
    listening: ListeningSockets,
    tls: Option<NbdTls>,
}

enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// Returns the maximum number of half-open connections: at most half of all connections, so that
/// unauthenticated clients cannot use up all of them.
fn half_open_max(connections_max: usize) -> usize {
    HALF_OPEN_MAX.min(connections_max.div_ceil(2))
}

impl Listener {
    /// Binds the address, or takes the socket that the previous program left open. Replaces a
    /// socket file that no process listens on.
    pub(crate) async fn bind(
        address: &ListenAddress,
        access: SocketAccess,
        missing: MissingDirectory,
        listening: &ListeningSockets,
    ) -> io::Result<Listener> {
        let ListenAddress { endpoint, tls } = address;
        let name = listening_sockets::name("nbd", endpoint);
        let open = listening.take_inherited(&name);
        let (socket, endpoint) = match endpoint {
            Endpoint::Unix(path) => {
                let listener = match open {
                    // The previous program may have had other access rights.
                    Some(socket) => access.apply(path).map(|()| socket.into()),
                    None => missing.prepare(path).and_then(|()| bind_socket(path, access)),
                }?;
                listening.add(name.clone(), &listener);
                (Socket::Unix(UnixListener::from_std(listener)?), endpoint.clone())
            }
            Endpoint::Tcp { .. } => {
                let address = endpoint.to_string();
                let address = address.strip_prefix("tcp:").unwrap_or(&address);
                let socket = match open {
                    Some(socket) => TcpListener::from_std(socket.into())?,
                    None => TcpListener::bind(address).await?,
                };
                listening.add(name.clone(), &socket);
                let endpoint = listening_sockets::for_clients(endpoint, socket.local_addr());
                if tls.is_none() && !socket.local_addr()?.ip().is_loopback() {
                    tracing::warn!(
                        "{endpoint} serves NBD without TLS: every host that can reach this port can read and write disks"
                    );
                }
                (Socket::Tcp(socket), endpoint)
            }
        };
        Ok(Listener { socket, endpoint, name, listening: listening.clone(), tls: tls.clone() })
    }

    /// Returns the address for clients, with the actual port if the configured port is 0.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Accepts clients until the task is dropped. TLS connections run on `relays`.
    pub(crate) async fn run(self, context: ListenerContext, mut relays: Option<Spawner>) {
        // Each listener has its own limit, so that clients of one listener cannot use up the
        // connections of another listener.
        let permits = Arc::new(Semaphore::new(context.connections_max));
        let half_open = HalfOpenConnections::new(half_open_max(context.connections_max));
        loop {
            let permit = Arc::new(Arc::clone(&permits).acquire_owned().await.expect("never closed"));
            self.listening.until_resumed().await;
            let accepted = tokio::select! {
                biased;
                // This branch is checked first, so that the listener accepts no connection after it
                // was paused.
                () = self.listening.until_paused() => continue,
                accepted = self.accept(&context, permit) => accepted,
            };
            match accepted {
                Ok(connection) => {
                    // TLS connections are not handed over at an upgrade.
                    let handshake = self.tls.is_none().then(|| self.listening.begin_handshake());
                    let (half_open_guard, eviction) = half_open.enter();
                    let served = contained_task(true, async move {
                        let peer = connection.peer.clone();
                        let served = tokio::select! {
                            served = connection.serve(half_open_guard) => served,
                            () = eviction.wait() => Err(io::Error::other("no export was chosen in time")),
                        };
                        if let Err(error) = served {
                            tracing::info!("{peer}: connection closed before an export was chosen: {error}");
                        }
                        drop(handshake);
                    });
                    match &mut relays {
                        Some(relays) if self.tls.is_some() => relays.spawn(served),
                        _ => drop(spawn(served)),
                    }
                }
                Err(error) => {
                    // The usual reason for this error is a lack of descriptors. So the listener
                    // waits until connections are closed.
                    tracing::warn!(%error, "cannot accept an NBD client");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn accept(
        &self,
        context: &ListenerContext,
        permit: ConnectionPermit,
    ) -> io::Result<PendingConnection> {
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
        descriptors::check_client(&socket)?;
        let peer = Peer { address, ..Peer::default() };
        Ok(PendingConnection { socket, peer, context: context.clone(), tls: self.tls.clone(), permit })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.listening.remove(&self.name);
    }
}

/// An accepted connection that has not chosen an export.
struct PendingConnection {
    socket: OwnedFd,
    peer: Peer,
    context: ListenerContext,
    tls: Option<NbdTls>,
    permit: ConnectionPermit,
}

impl PendingConnection {
    async fn serve(self, half_open_guard: HalfOpenGuard) -> io::Result<()> {
        let PendingConnection { socket, peer, context, tls, permit } = self;
        let is_unix = peer.address.is_none();
        let visible = Visible { exports: context.exports, allow: context.allow, peer };
        if is_unix {
            serve(UnixStream::from_std(socket.into())?, visible, tls, (Some(half_open_guard), permit)).await
        } else {
            serve(TcpStream::from_std(socket.into())?, visible, tls, (Some(half_open_guard), permit)).await
        }
    }
}

/// A stream whose socket a shard can serve.
trait IntoSocket: AsyncRead + AsyncWrite + Unpin + Send + 'static {
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
    (mut half_open_guard, permit): (Option<HalfOpenGuard>, ConnectionPermit),
) -> io::Result<()> {
    let offer = match &tls {
        None => handshake::Tls::Absent,
        Some(NbdTls { required: false, .. }) => handshake::Tls::Offered,
        Some(NbdTls { required: true, .. }) => handshake::Tls::Required,
    };
    let hello = Handshake::with_tls(HandshakeLimits::default(), offer);
    let inside = match negotiate_in_time(hello, &mut stream, &visible, &mut half_open_guard).await? {
        Step::Disconnect => return Ok(()),
        Step::Done(negotiated, leftover) => {
            return attach(
                stream.into_socket()?,
                &visible,
                negotiated,
                leftover,
                (Transport::Direct, permit),
            );
        }
        Step::StartTls(inside) => inside,
        Step::Opening(..) => unreachable!("it was waited for"),
    };
    match tls.expect("TLS is started where it was offered").session {
        NbdSession::Certificates(tls) => {
            let stream = tls.accept(stream).await?;
            visible.peer.certificate = PeerCertificate::of(&stream);
            serve_inside(stream, inside, &visible, (half_open_guard, permit)).await
        }
        NbdSession::Keys(keys) => {
            let (stream, name) = keys.accept(stream).await?;
            visible.peer.key = Some(name);
            serve_inside(stream, inside, &visible, (half_open_guard, permit)).await
        }
    }
}

/// Negotiates inside TLS, and relays between the TLS stream and the shard.
async fn serve_inside(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    hello: Handshake,
    visible: &Visible,
    (mut half_open_guard, permit): (Option<HalfOpenGuard>, ConnectionPermit),
) -> io::Result<()> {
    match negotiate_in_time(hello, &mut stream, visible, &mut half_open_guard).await? {
        Step::Disconnect => {
            let _ = tokio::time::timeout(FAREWELL_MAX, stream.shutdown()).await;
        }
        Step::Done(negotiated, leftover) => {
            let (near, far) = UnixStream::pair()?;
            descriptors::check_client(&near).and_then(|()| descriptors::check_client(&far))?;
            let attachment = (Transport::Relayed, Arc::clone(&permit));
            attach(far.into_socket()?, visible, negotiated, leftover, attachment)?;
            drop(half_open_guard);
            relay::relay(stream, near).await;
        }
        Step::StartTls(_) => unreachable!("TLS is not started twice"),
        Step::Opening(..) => unreachable!("it was waited for"),
    }
    drop(permit);
    Ok(())
}

fn too_long(_: tokio::time::error::Elapsed) -> io::Error {
    io::Error::other("the client did not answer for too long")
}

/// Hands a client to the shard of its disk.
fn attach(
    socket: OwnedFd,
    visible: &Visible,
    negotiated: Negotiated,
    leftover: Vec<u8>,
    attachment: (Transport, ConnectionPermit),
) -> io::Result<()> {
    // The export may have been removed during the negotiation, or replaced by another one.
    let export = visible.get(&negotiated.export).filter(|export| permits(&export.info, &negotiated.info));
    let Some(export) = export else { return Ok(()) };
    let Export { disk, shard, promote, .. } = export;
    shard.attach(disk, socket, negotiated, leftover, promote, attachment).map_err(io::Error::other)
}

/// Returns true if an export has the size and the rights that were announced to a client.
fn permits(present: &ExportInfo, announced: &ExportInfo) -> bool {
    present.size_bytes >= announced.size_bytes && (announced.read_only || !present.read_only)
}

/// The result of a negotiation.
enum Step {
    /// The client chose an export. Includes the bytes received after the negotiation.
    Done(Negotiated, Vec<u8>),
    /// The client starts TLS.
    StartTls(Handshake),
    /// The client chose a disk that is being opened. Includes the name of the export, the handshake
    /// before that request, and the bytes to process again.
    Opening(String, Box<Handshake>, Vec<u8>),
    /// The client sent ABORT or closed the connection.
    Disconnect,
}

/// The export directory of one negotiation. Records the requested name if its disk is being opened.
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

/// Negotiates with a client. A client that asks for a disk which is being opened waits until the
/// disk is open. While a client waits, its connection does not count as half-open.
async fn negotiate_in_time(
    hello: Handshake,
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    exports: &Visible,
    half_open_guard: &mut Option<HalfOpenGuard>,
) -> io::Result<Step> {
    let (mut handshake, mut received) = (hello, Vec::with_capacity(4096));
    loop {
        let negotiating = negotiate(handshake, received, stream, exports);
        match tokio::time::timeout(HALF_OPEN_TIME_MAX, negotiating).await.map_err(too_long)?? {
            Step::Opening(name, before, unread) => {
                tracing::info!("{} waits for export '{name}', whose disk is being opened", exports.peer);
                drop(half_open_guard.take());
                let opened = exports.exports.until_opened(|| !exports.is_opening(&name));
                tokio::time::timeout(OPENING_MAX, opened).await.map_err(|_| {
                    io::Error::other(format!("the disk of export '{name}' could not be opened in time"))
                })?;
                (handshake, received) = (*before, unread);
            }
            step => return Ok(step),
        }
    }
}

/// Negotiates with another host over a connection that this host opened, without a time limit.
/// Returns `None` if the peer disconnects.
pub(crate) async fn negotiate_with_peer(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    exports: &Visible,
) -> io::Result<Option<(Negotiated, Vec<u8>)>> {
    let hello = Handshake::with_tls(HandshakeLimits::default(), handshake::Tls::Absent);
    match negotiate(hello, Vec::new(), stream, exports).await? {
        Step::Done(negotiated, leftover) => Ok(Some((negotiated, leftover))),
        Step::Disconnect | Step::StartTls(_) | Step::Opening(..) => Ok(None),
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
                return Err(io::Error::other("the client sent bytes before the TLS handshake"));
            }
            Some(HandshakeOutcome::Aborted) => return Ok(Step::Disconnect),
            Some(HandshakeOutcome::Failed(error)) => return Err(io::Error::other(error)),
            None if used > 0 => continue,
            None => {}
        }
        if stream.read_buf(&mut received).await? == 0 {
            return Ok(Step::Disconnect);
        }
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::io::Promote;
    use hob_engine::units::DiskId;

    use super::*;
    use crate::allow::AllowEntry;
    use crate::shard_api::ShardHandle;

    /// Returns the bytes with which a client asks for an export: the client's flags, and
    /// NBD_OPT_GO.
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

    /// Returns the result of the negotiation with a client that asks for an export; `None` if the
    /// negotiation takes longer than a second. `meanwhile` runs while the client waits.
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
        assert!(matches!(ask(&exports, &all, "db", || ()).await, Some(Step::Disconnect)));
        let entry = AllowEntry { disks: vec!["*".to_owned()], clients: vec!["10.0.0.1".parse().unwrap()] };
        let nobody = AllowList::new(vec![entry]);
        assert!(
            matches!(ask(&exports, &nobody, "web", || ()).await, Some(Step::Disconnect)),
            "it may not see it"
        );
        let found = ask(&exports, &all, "web", || {
            exports.insert("web", export.clone());
            drop(opening);
        });
        assert!(matches!(found.await, Some(Step::Done(negotiated, _)) if negotiated.export == "web"));
        // A disk that could not be opened has no export.
        let opening = exports.begin_opening("db", ["db".to_owned()]);
        assert!(matches!(ask(&exports, &all, "db", || drop(opening)).await, Some(Step::Disconnect)));
    }

    /// The shard enforces the rights that were announced to the client. So the export must still
    /// have these rights when the shard gets the client.
    #[test]
    fn a_client_gets_no_more_rights_than_the_export_has_after_the_negotiation() {
        let writable = ExportInfo::new(8192);
        let read_only = ExportInfo { read_only: true, ..writable.clone() };
        assert!(permits(&writable, &writable) && permits(&read_only, &read_only));
        assert!(permits(&writable, &read_only), "the client does not write");
        assert!(!permits(&read_only, &writable));
        assert!(permits(&ExportInfo::new(12288), &writable), "the disk has grown");
        assert!(!permits(&ExportInfo::new(4096), &writable));
    }

    async fn bind(address: &ListenAddress, missing: MissingDirectory) -> io::Result<Listener> {
        Listener::bind(address, SocketAccess::default(), missing, &ListeningSockets::default()).await
    }

    /// `hob serve` refuses such a socket, and a daemon creates the directory.
    #[tokio::test]
    async fn a_socket_in_a_missing_directory_is_refused_or_gets_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/nbd.sock");
        let address = ListenAddress { endpoint: Endpoint::Unix(path.clone()), tls: None };
        let refused = bind(&address, MissingDirectory::Refuse).await.err().unwrap();
        assert!(refused.to_string().starts_with("create the directory "), "{refused}");
        assert!(!dir.path().join("new").exists());
        let _listener = bind(&address, MissingDirectory::Create).await.unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn a_socket_that_is_there_answers_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        let address = ListenAddress { endpoint: Endpoint::Unix(path.clone()), tls: None };
        let listener = bind(&address, MissingDirectory::Refuse).await.unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        let again = bind(&address, MissingDirectory::Refuse).await;
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "a file of somebody's").unwrap();
        let again = bind(&address, MissingDirectory::Refuse).await;
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file of somebody's");
    }

    #[tokio::test]
    async fn a_listener_names_the_port_that_the_system_chose() {
        let address = ListenAddress { endpoint: "tcp:127.0.0.1:0".parse().unwrap(), tls: None };
        let listener = bind(&address, MissingDirectory::Refuse).await.unwrap();
        let Endpoint::Tcp { host, port } = listener.endpoint() else { panic!("{}", listener.endpoint()) };
        assert_ne!(*port, 0);
        std::net::TcpStream::connect((host.as_str(), *port)).unwrap();
    }
}
