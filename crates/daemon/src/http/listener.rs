//! Control listeners: bind, accept and serve the sockets of the control API.
//!
//! A Unix socket is open to its owner, and to a group if one is configured. TCP requires TLS and at
//! least one way to authenticate; neither requirement can be switched off.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware;
use hob_control::Endpoint;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::auth::{self, Access};
use super::browser::{self, Names};
use super::request_id;
use crate::background::spawn;
use crate::config::ControlConfig;
use crate::half_open::{Establish, Eviction, HalfOpenConnections, HalfOpenGuard};
use crate::listening_sockets::{self, ListeningSockets};
use crate::socket_access::{MissingDirectory, number_in};
use crate::tls::{PeerCertificate, Tls, WithoutCertificate};
use crate::watchdog::contained_task;

/// Maximum number of connections of each socket; further connections wait in the kernel's queue.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// Maximum time to wait for the head of a request, in seconds. Idle connections are closed after
/// the same time.
const HEAD_SECONDS_MAX: u64 = 60;

/// Interval and number of TCP keepalive probes.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TRIES: u32 = 3;

/// Maximum number of names that are tried for a private directory.
const PRIVATE_NAMES_MAX: u32 = 8;

/// Why a control socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// The address is on TCP, and no TLS is configured.
    #[error(
        "the control socket {0} is on TCP and needs TLS; give --cert and --key, or control.tls in hob.toml"
    )]
    NoTls(Endpoint),
    /// The address is on TCP, and no token or client certificate is configured.
    #[error(
        "no client could authenticate at the control socket {0}; give --token-file, or control.token or control.client in hob.toml"
    )]
    Nobody(Endpoint),
    /// Another process listens on the socket.
    #[error("another process listens on {0}; stop that daemon or choose another socket")]
    InUse(Endpoint),
    /// The path is a file that is not a socket. hob does not replace the file.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The system call failed.
    #[error("cannot listen on {endpoint}: {source}")]
    System {
        /// The address at which the daemon cannot listen.
        endpoint: Endpoint,
        source: io::Error,
    },
}

/// Access rules of the control API.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guard {
    /// TLS settings for TCP.
    tls: Option<Arc<Tls>>,
    /// Access rules for TCP.
    access: Arc<Access>,
    /// Id of the group that may open the Unix sockets, too.
    group: Option<u32>,
}

impl Guard {
    /// Loads the rules of the configuration and the files that it names.
    pub(crate) fn of_config(config: &ControlConfig) -> anyhow::Result<Guard> {
        let load = |files: &_| Tls::load(Clone::clone(files), WithoutCertificate::Welcome).map(Arc::new);
        Ok(Guard {
            tls: config.tls.as_ref().map(load).transpose()?,
            access: Arc::new(Access::of_config(config)?),
            group: config.socket_group.as_deref().map(group_number).transpose()?,
        })
    }
}

/// A bound control socket. Dropping this value removes the socket's file, unless the socket stays
/// open for the next program.
#[derive(Debug)]
pub(crate) struct ControlListener {
    socket: Socket,
    endpoint: Endpoint,
    /// Name of the socket in `listening`.
    name: String,
    listening: ListeningSockets,
}

#[derive(Debug)]
enum Socket {
    Unix(UnixListener),
    Tcp { socket: TcpListener, tls: Arc<Tls>, access: Arc<Access> },
}

impl ControlListener {
    /// Binds the socket. A Unix socket is accessible to its owner only (mode 0600), or also to a
    /// group (0660). A stale socket file without a listener is replaced.
    pub(crate) async fn bind(
        endpoint: Endpoint,
        guard: &Guard,
        listening: &ListeningSockets,
    ) -> Result<ControlListener, ListenError> {
        let system = |source| ListenError::System { endpoint: endpoint.clone(), source };
        let name = listening_sockets::name("control", &endpoint);
        let open = listening.take_inherited(&name);
        let socket = match &endpoint {
            Endpoint::Unix(path) => {
                let socket = match open {
                    Some(socket) => {
                        // The configured group may have changed.
                        make_private(path, guard.group).map_err(system)?;
                        UnixListener::from_std(socket.into()).map_err(system)?
                    }
                    None => {
                        clear_stale(path, &endpoint)?;
                        bind_private(path, guard.group).map_err(system)?
                    }
                };
                listening.add(name.clone(), &socket);
                Socket::Unix(socket)
            }
            Endpoint::Tcp { host, port } => {
                let Some(tls) = guard.tls.clone() else { return Err(ListenError::NoTls(endpoint)) };
                let access = Arc::clone(&guard.access);
                if access.is_empty() {
                    return Err(ListenError::Nobody(endpoint));
                }
                let socket = match open {
                    Some(socket) => TcpListener::from_std(socket.into()),
                    None => TcpListener::bind((host.as_str(), *port)).await,
                };
                let socket = socket.map_err(system)?;
                listening.add(name.clone(), &socket);
                Socket::Tcp { socket, tls, access }
            }
        };
        Ok(ControlListener { socket, endpoint, name, listening: listening.clone() })
    }

    /// Returns the address for clients, with the actual port if port 0 was requested.
    pub(crate) fn endpoint(&self) -> Endpoint {
        match &self.socket {
            Socket::Tcp { socket, .. } => listening_sockets::for_clients(&self.endpoint, socket.local_addr()),
            Socket::Unix(_) => self.endpoint.clone(),
        }
    }

    /// Accepts connections and serves their requests until dropped.
    pub(crate) async fn serve(self, router: Router) {
        let router = self.guarded(router);
        // This layer is outermost, so that the log names refused requests too.
        let router = router.layer(middleware::from_fn(request_id::name));
        let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let half_open = HalfOpenConnections::default();
        loop {
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            self.listening.until_resumed().await;
            let accept = async {
                match &self.socket {
                    Socket::Unix(socket) => socket.accept().await.map(|(stream, _)| {
                        let served = connection(stream, router.clone(), None, permit, half_open.enter());
                        spawn(contained_task(true, served));
                    }),
                    Socket::Tcp { socket, tls, .. } => socket.accept().await.map(|(stream, _)| {
                        let half_open = half_open.enter();
                        let served =
                            tls_connection(stream, Arc::clone(tls), router.clone(), permit, half_open);
                        spawn(contained_task(true, served));
                    }),
                }
            };
            let accepted = tokio::select! {
                biased;
                // This branch is first, so that no connection is accepted after a pause.
                () = self.listening.until_paused() => continue,
                accepted = accept => accepted,
            };
            if let Err(error) = accepted {
                tracing::warn!("control socket {}: {error}", self.endpoint);
                // The usual error is EMFILE: wait until connections are closed.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    /// Adds the checks of this socket: first the origin of a request, then its authentication.
    fn guarded(&self, router: Router) -> Router {
        let (router, names) = match &self.socket {
            // The file's permissions decide which users may connect; every request is then
            // permitted.
            Socket::Unix(_) => (router.layer(middleware::from_fn(auth::accept)), Names::Any),
            Socket::Tcp { tls, access, .. } => {
                let listen = match &self.endpoint {
                    Endpoint::Tcp { host, .. } => host.clone(),
                    Endpoint::Unix(_) => String::new(),
                };
                let router = router.layer(middleware::from_fn_with_state(Arc::clone(access), auth::check));
                (router, Names::Ours { tls: Arc::clone(tls), listen })
            }
        };
        router.layer(middleware::from_fn_with_state(names, browser::check))
    }
}

impl Drop for ControlListener {
    fn drop(&mut self) {
        self.listening.remove(&self.name);
    }
}

async fn tls_connection(
    stream: TcpStream,
    tls: Arc<Tls>,
    router: Router,
    permit: OwnedSemaphorePermit,
    (half_open_guard, eviction): (HalfOpenGuard, Eviction),
) {
    // Replies are short and should not wait for more data.
    let _ = stream.set_nodelay(true);
    set_keepalive(&stream);
    let mut eviction = Box::pin(eviction.wait());
    let accepted = tokio::select! {
        accepted = tls.accept(stream) => accepted,
        () = &mut eviction => return tracing::info!("control connection closed: the client did not start TLS in time"),
    };
    match accepted {
        Ok(stream) => {
            let certificate = PeerCertificate::of(&stream);
            serve_connection(Box::new(stream), router, certificate, permit, (half_open_guard, eviction))
                .await;
        }
        Err(error) => tracing::info!("control connection closed: TLS handshake failed: {error}"),
    }
}

/// Turns on TCP keepalive, so that an idle connection ends after the client's host has lost its
/// power or its network.
fn set_keepalive(stream: &TcpStream) {
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_EVERY);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_TRIES);
}

/// Closes the connection of a request. Each request has this value as an extension.
#[derive(Clone, Debug, Default)]
pub(super) struct HangUp(Arc<Notify>);

impl HangUp {
    /// Closes the connection immediately, for clients that no longer read.
    pub(super) fn now(&self) {
        self.0.notify_one();
    }
}

/// A connected socket, with or without TLS. Each connection uses a boxed `Stream`. Otherwise the
/// compiler would generate hyper's server once for each type of socket.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// Serves one connection until it ends.
pub(super) async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    certificate: Option<PeerCertificate>,
    permit: OwnedSemaphorePermit,
    (half_open_guard, eviction): (HalfOpenGuard, Eviction),
) {
    let half_open = (half_open_guard, Box::pin(eviction.wait()));
    serve_connection(Box::new(stream), router, certificate, permit, half_open).await;
}

/// Serves one connection. The future `eviction` completes when this connection must be closed
/// because it is half-open. The first authorized request ends the half-open state.
async fn serve_connection(
    stream: Box<dyn Stream>,
    router: Router,
    certificate: Option<PeerCertificate>,
    permit: OwnedSemaphorePermit,
    (half_open_guard, eviction): (HalfOpenGuard, impl Future<Output = ()>),
) {
    let router = TowerToHyperService::new(router);
    let hang_up = HangUp::default();
    let establish = Establish::new(half_open_guard);
    let service = service_fn(|mut request: hyper::Request<Incoming>| {
        if let Some(certificate) = &certificate {
            request.extensions_mut().insert(certificate.clone());
        }
        request.extensions_mut().insert(hang_up.clone());
        request.extensions_mut().insert(establish.clone());
        router.call(request)
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(HEAD_SECONDS_MAX))
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let served = tokio::select! {
        served = serving => served,
        () = hang_up.0.notified() => Ok(()),
        () = eviction => return tracing::debug!("control connection: no request was accepted in time"),
    };
    if let Err(error) = served {
        tracing::debug!("control connection: {error}");
    }
    drop(permit);
}

/// Returns the id of a group, given as a number or as a name in /etc/group.
fn group_number(group: &str) -> anyhow::Result<u32> {
    number_in("/etc/group", group)
        .ok_or_else(|| anyhow::anyhow!("control.socket_group: there is no group '{group}' in /etc/group"))
}

fn clear_stale(path: &Path, endpoint: &Endpoint) -> Result<(), ListenError> {
    use std::os::unix::fs::FileTypeExt;

    let system = |source| ListenError::System { endpoint: endpoint.clone(), source };
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(none) if none.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(system)
        }
        // A process listens on the socket, or this process may not connect to it.
        _ => Err(ListenError::InUse(endpoint.clone())),
    }
}

/// Binds a Unix socket whose file has the right permissions from the start. The socket is bound in a
/// private directory, and its file is moved to `path` after its permissions are set. The file has its
/// final name from the start, because SELinux derives the label of a new file from its name
/// (packaging/selinux).
fn bind_private(path: &Path, group: Option<u32>) -> io::Result<UnixListener> {
    MissingDirectory::Create.prepare(path)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let directory = create_private_directory(path, random_name)?;
    let temporary = directory.join(name);
    let bind = || -> io::Result<UnixListener> {
        let socket = UnixListener::bind(&temporary)?;
        make_private(&temporary, group)?;
        std::fs::rename(&temporary, path)?;
        Ok(socket)
    };
    let bound = bind();
    // The file is still there after an error.
    let _ = std::fs::remove_file(&temporary);
    let _ = std::fs::remove_dir(&directory);
    bound
}

/// Creates a directory beside `path` that only this user may access, under one of `names`. Other
/// users may write to the directory of `path`, for example /tmp, so an existing file or symbolic
/// link is never used.
fn create_private_directory(
    path: &Path,
    mut names: impl FnMut() -> io::Result<String>,
) -> io::Result<PathBuf> {
    for _ in 0..PRIVATE_NAMES_MAX {
        let directory = path.with_file_name(names()?);
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|()| directory),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Returns a random file name. It is short, because the length of a socket's path is limited.
fn random_name() -> io::Result<String> {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut bytes = [0u8; 6];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| char::from(LETTERS[usize::from(byte % 32)])).collect())
}

/// Sets the permissions of a socket's file: owner only, or owner and group.
fn make_private(path: &Path, group: Option<u32>) -> io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket_access::in_table;
    use crate::tls::tests::{Authority, write_secret};

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn a_socket_is_private_and_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/c.sock");
        block_on(async {
            let listener = ControlListener::bind(
                Endpoint::Unix(path.clone()),
                &Guard::default(),
                &ListeningSockets::default(),
            )
            .await
            .unwrap();
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
            drop(listener);
        });
        assert!(!path.exists());
    }

    /// SELinux gives the label of a control socket to a file that is created with its name.
    #[test]
    fn a_socket_is_created_with_its_own_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        block_on(async {
            let socket = bind_private(&path, None).unwrap();
            let address = socket.local_addr().unwrap();
            assert_eq!(address.as_pathname().and_then(Path::file_name), path.file_name());
            std::os::unix::net::UnixStream::connect(&path).unwrap();
            let files = std::fs::read_dir(dir.path()).unwrap();
            assert_eq!(files.count(), 1, "the private directory is removed");
        });
    }

    /// In /tmp, another user can create files and symbolic links with any name.
    #[test]
    fn files_of_other_users_do_not_become_the_private_directory() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("target")).unwrap();
        std::fs::write(at("target/c.sock"), "precious").unwrap();
        let pid = std::process::id().to_string();
        for link in [pid.as_str(), "link"] {
            std::os::unix::fs::symlink(at("target"), at(link)).unwrap();
        }
        block_on(async { drop(bind_private(&at("c.sock"), None).unwrap()) });
        assert_eq!(std::fs::read_to_string(at("target/c.sock")).unwrap(), "precious");
        let mut names = ["link", "target", "free"].into_iter();
        let made = create_private_directory(&at("c.sock"), || Ok(names.next().unwrap().to_owned()));
        assert_eq!(made.unwrap(), at("free"));
        assert_eq!(std::fs::metadata(at("free")).unwrap().permissions().mode() & 0o777, 0o700);
        let taken = create_private_directory(&at("c.sock"), || Ok("link".to_owned()));
        assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_ne!(random_name().unwrap(), random_name().unwrap());
    }

    #[test]
    fn the_private_directory_is_removed_after_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("c.sock");
        std::fs::create_dir(&directory).unwrap();
        block_on(async {
            assert!(bind_private(&directory, None).is_err(), "a file cannot replace a directory");
            assert!(bind_private(&dir.path().join("x".repeat(108)), None).is_err(), "the path is too long");
        });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn stale_sockets_are_replaced_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let endpoint = Endpoint::Unix(path.clone());
        block_on(async {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            assert!(path.exists());
            let living =
                ControlListener::bind(endpoint.clone(), &Guard::default(), &ListeningSockets::default())
                    .await
                    .unwrap();
            let second =
                ControlListener::bind(endpoint.clone(), &Guard::default(), &ListeningSockets::default())
                    .await;
            assert!(matches!(second, Err(ListenError::InUse(_))));
            assert!(path.exists());
            drop(living);
            std::fs::write(&path, "precious").unwrap();
            let third =
                ControlListener::bind(endpoint.clone(), &Guard::default(), &ListeningSockets::default())
                    .await;
            assert!(matches!(third, Err(ListenError::NotASocket(_))));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        });
    }

    #[test]
    fn keepalive_probes_detect_a_client_whose_host_is_gone() {
        block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            set_keepalive(&stream);
            assert!(sockopt::socket_keepalive(&stream).unwrap());
            let pauses = [sockopt::tcp_keepidle(&stream).unwrap(), sockopt::tcp_keepintvl(&stream).unwrap()];
            assert_eq!(pauses, [KEEP_ALIVE_EVERY; 2]);
            assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), KEEP_ALIVE_TRIES);
        });
    }

    #[test]
    fn a_group_may_be_let_in() {
        use std::os::unix::fs::MetadataExt;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let own = std::fs::metadata(dir.path()).unwrap().gid();
        let config = ControlConfig { socket_group: Some(own.to_string()), ..ControlConfig::default() };
        let guard = Guard::of_config(&config).unwrap();
        block_on(async {
            let _listener =
                ControlListener::bind(Endpoint::Unix(path.clone()), &guard, &ListeningSockets::default())
                    .await
                    .unwrap();
            let metadata = std::fs::metadata(&path).unwrap();
            assert_eq!((metadata.permissions().mode() & 0o777, metadata.gid()), (0o660, own));
        });
        let table = "root:x:0:\nhobs:x:12:\nhob:x:998:a,b\nodd:x\nodder";
        assert_eq!(in_table(table, "hob"), Some(998));
        assert_eq!(in_table(table, "odd"), None);
        assert_eq!(in_table(table, "odder"), None);
        let none = ControlConfig { socket_group: Some("no such group".into()), ..ControlConfig::default() };
        assert!(Guard::of_config(&none).unwrap_err().to_string().contains("no such group"));
    }

    #[test]
    fn tcp_needs_tls_and_an_admitted_client() {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
        let refused = |config: &ControlConfig| {
            let guard = Guard::of_config(config).unwrap();
            block_on(ControlListener::bind(endpoint.clone(), &guard, &ListeningSockets::default()))
                .unwrap_err()
        };
        assert!(matches!(refused(&ControlConfig::default()), ListenError::NoTls(_)));
        let token = dir.path().join("token");
        write_secret(&token, "0123456789abcdef");
        let only_token = ControlConfig { token_file: Some(token), ..ControlConfig::default() };
        assert!(matches!(refused(&only_token), ListenError::NoTls(_)));
        let tls = Some(Authority::new().server_files(dir.path()));
        let only_tls = ControlConfig { tls, ..ControlConfig::default() };
        assert!(matches!(refused(&only_tls), ListenError::Nobody(_)));
    }
}
