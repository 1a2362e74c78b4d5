//! Unix sockets: functions that listen on them and serve connections, and the owner, group and mode
//! of disks' sockets.
//!
//! QEMU often runs as a separate user (`libvirt-qemu`, `qemu`), which needs write permission to
//! connect.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// Owner, group and mode of sockets, as texts of hob.toml and the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketSettings {
    /// User, by name or number.
    pub owner: Option<String>,
    /// Group, by name or number.
    pub group: Option<String>,
    /// Permission bits, octal digits.
    pub mode: Option<String>,
}

impl SocketSettings {
    /// Fills in missing settings from `other`.
    pub(crate) fn or(self, other: SocketSettings) -> SocketSettings {
        SocketSettings {
            owner: self.owner.or(other.owner),
            group: self.group.or(other.group),
            mode: self.mode.or(other.mode),
        }
    }
}

/// Owner, group and mode of each new socket. Absent values are the system's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SocketAccess {
    owner: Option<u32>,
    group: Option<u32>,
    mode: Option<u32>,
}

/// Why settings cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {what}")]
pub(crate) struct SocketSettingError {
    /// The setting.
    pub(crate) key: &'static str,
    what: String,
}

impl SocketAccess {
    /// Looks up names in /etc/passwd and /etc/group.
    pub(crate) fn of(settings: &SocketSettings) -> Result<SocketAccess, SocketSettingError> {
        let id = |key, table: &str, name: &Option<String>| {
            let name = name.as_deref();
            let missing = |name| SocketSettingError { key, what: format!("there is no '{name}' in {table}") };
            name.map(|name| number_in(table, name).ok_or_else(|| missing(name))).transpose()
        };
        let mode = |digits: &str| {
            let mode = u32::from_str_radix(digits.strip_prefix("0o").unwrap_or(digits), 8).ok();
            mode.filter(|mode| *mode <= 0o777).ok_or_else(|| SocketSettingError {
                key: "socket_mode",
                what: format!("'{digits}' is not a file mode; write octal digits, such as \"0660\""),
            })
        };
        Ok(SocketAccess {
            owner: id("socket_owner", "/etc/passwd", &settings.owner)?,
            group: id("socket_group", "/etc/group", &settings.group)?,
            mode: settings.mode.as_deref().map(mode).transpose()?,
        })
    }

    /// Applies the settings to a socket.
    pub(crate) fn apply(self, path: &Path) -> io::Result<()> {
        if self.owner.is_some() || self.group.is_some() {
            std::os::unix::fs::chown(path, self.owner, self.group)?;
        }
        match self.mode {
            Some(mode) => std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)),
            None => Ok(()),
        }
    }
}

/// Returns the id of a user or group from its number or its name.
pub(crate) fn number_in(table: &str, name: &str) -> Option<u32> {
    name.parse().ok().or_else(|| in_table(&std::fs::read_to_string(table).unwrap_or_default(), name))
}

pub(crate) fn in_table(table: &str, name: &str) -> Option<u32> {
    let mut rows = table.lines().map(|line| line.split(':'));
    rows.find_map(|mut row| (row.next() == Some(name)).then(|| row.nth(1)?.parse().ok())?)
}

/// Deserializes a mode: octal digits in a string, or a number. `"0660"` and `0o660` are equal.
pub(crate) fn mode_of<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "socket_mode is octal digits, such as \"0660\"")]
    enum Mode {
        Digits(String),
        Number(u32),
    }
    Ok(Option::<Mode>::deserialize(deserializer)?.map(|mode| match mode {
        Mode::Digits(digits) => digits,
        Mode::Number(number) => format!("{number:o}"),
    }))
}

/// Reaction to a new Unix socket whose directory does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MissingDirectory {
    /// hob creates the directory.
    Create,
    /// hob refuses the socket. A wrong path on a command line is more likely to be a mistake than
    /// one in hob.toml. hob creates only [`OWN_DIRECTORY`].
    Refuse,
}

/// hob's own directory of sockets. It is missing after the host has started, until a unit runs hob.
const OWN_DIRECTORY: &str = "/run/hob";

impl MissingDirectory {
    /// Creates or checks the directory of a Unix socket.
    pub(crate) fn prepare(self, socket: &Path) -> io::Result<()> {
        let directory = socket.parent().filter(|directory| !directory.as_os_str().is_empty());
        let Some(directory) = directory else { return Ok(()) };
        match self {
            MissingDirectory::Create => std::fs::create_dir_all(directory),
            MissingDirectory::Refuse if directory.try_exists()? => Ok(()),
            MissingDirectory::Refuse if is_own(directory) => std::fs::create_dir_all(directory),
            MissingDirectory::Refuse => {
                let what = format!("create the directory {}, which does not exist", directory.display());
                Err(io::Error::new(io::ErrorKind::NotFound, what))
            }
        }
    }
}

fn is_own(directory: &Path) -> bool {
    directory == Path::new(OWN_DIRECTORY)
}

/// Listens on a Unix socket, non-blocking. Replaces a socket file without a listener.
pub(crate) fn bind_socket(path: &Path, access: SocketAccess) -> io::Result<std::os::unix::net::UnixListener> {
    remove_stale(path)?;
    let listener = bind_ready(path, access)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves each connection to a local socket until this task ends, which also ends the connections.
/// `what` names the owner of the socket in messages.
pub(crate) async fn serve_each<F>(
    listener: tokio::net::UnixListener,
    what: &'static str,
    serve: impl Fn(tokio::net::UnixStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = tokio::task::JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => drop(connections.spawn(serve(stream))),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection on the socket of a {what}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Listens under a temporary name and then links the socket file to `path`, so that clients never
/// find the file without a listener. If the temporary name is too long for a socket, listens on
/// `path` directly. Fails if `path` exists.
fn bind_ready(path: &Path, access: SocketAccess) -> io::Result<std::os::unix::net::UnixListener> {
    use std::os::unix::net::UnixListener;
    let mut other = path.as_os_str().to_owned();
    other.push(format!(".{}", std::process::id()));
    let _ = std::fs::remove_file(&other);
    let listener = match UnixListener::bind(&other) {
        // The temporary name is longer, and may exceed the limit for socket paths.
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

/// Removes a socket file without a listener. Leaves any other file, so that binding fails.
fn remove_stale(path: &Path) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn settings(owner: &str, group: &str, mode: &str) -> SocketSettings {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        SocketSettings { owner: text(owner), group: text(group), mode: text(mode) }
    }

    #[test]
    fn a_missing_directory_is_created_or_refused() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("new/sub/a.sock");
        let error = MissingDirectory::Refuse.prepare(&socket).unwrap_err();
        let expected = format!("create the directory {}, which", socket.parent().unwrap().display());
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert!(!dir.path().join("new").exists());
        MissingDirectory::Create.prepare(&socket).unwrap();
        assert!(socket.parent().unwrap().is_dir());
        MissingDirectory::Refuse.prepare(&socket).unwrap();
        // A socket in the working directory.
        MissingDirectory::Refuse.prepare(Path::new("a.sock")).unwrap();
    }

    #[test]
    fn hob_creates_its_own_directory() {
        assert_eq!(Path::new(crate::config::CONTROL_SOCKET).parent(), Some(Path::new(OWN_DIRECTORY)));
        assert!(is_own(Path::new("/run/hob")) && is_own(Path::new("/run/hob/")));
        assert!(!is_own(Path::new("/run")) && !is_own(Path::new("/run/hob/more")));
    }

    #[test]
    fn names_are_looked_up_and_modes_are_octal() {
        let access = SocketAccess::of(&settings("root", "0", "0660")).unwrap();
        assert_eq!(access, SocketAccess { owner: Some(0), group: Some(0), mode: Some(0o660) });
        for (wrong, key) in [
            (settings("nobody knows", "", ""), "socket_owner"),
            (settings("", "nobody knows", ""), "socket_group"),
            (settings("", "", "rw"), "socket_mode"),
            (settings("", "", "0999"), "socket_mode"),
            (settings("", "", "7777"), "socket_mode"),
        ] {
            let error = SocketAccess::of(&wrong).unwrap_err();
            assert_eq!(error.key, key);
            assert!(error.to_string().starts_with(key), "{error}");
        }
        assert_eq!(in_table("a:x:1:\nqemu:x:107:\n", "qemu"), Some(107));
        assert_eq!(in_table("a:x:1:\n", "qemu"), None);
    }

    #[test]
    fn configured_permissions_are_applied_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "").unwrap();
        let own = std::fs::metadata(&path).unwrap();
        SocketAccess::of(&settings("", &own.gid().to_string(), "0640")).unwrap().apply(&path).unwrap();
        let now = std::fs::metadata(&path).unwrap();
        assert_eq!((now.mode() & 0o777, now.uid(), now.gid()), (0o640, own.uid(), own.gid()));
        SocketAccess::default().apply(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    }
}
