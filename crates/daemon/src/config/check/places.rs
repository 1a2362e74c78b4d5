//! The check whether the sockets of hob.toml can be created, for `--check` only: a daemon that
//! starts reports each failure itself, and retries vhost-user sockets.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hob_control::Endpoint;
use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::super::Config;
use super::Findings;
use super::answers::query_all;

/// Maximum length of a socket's path in bytes.
const PATH_BYTES_MAX: usize = 107;

/// Maximum time for examining all paths.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// How hob treats the directory of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Directory {
    /// hob creates the directory if it does not exist.
    IsCreated,
    /// The directory must exist.
    MustExist,
}

/// Checks that each Unix socket of the file can be created at its path.
pub(in super::super) fn check_places(config: &Config, found: &mut Findings<'_>) {
    let mut sockets: Vec<(String, (PathBuf, Directory))> = Vec::new();
    let mut add =
        |at: String, path: &Path, directory: Directory| sockets.push((at, (path.to_owned(), directory)));
    let lists = [("listen", &config.listen), ("control.listen", &config.control.listen)];
    for (key, endpoints) in lists {
        for (number, endpoint) in endpoints.iter().enumerate() {
            if let Endpoint::Unix(path) = endpoint {
                add(format!("{key}.{number}"), path, Directory::IsCreated);
            }
        }
    }
    for (number, entry) in config.nbd.iter().enumerate() {
        if let Endpoint::Unix(path) = &entry.listen {
            add(format!("nbd.{number}.listen"), path, Directory::IsCreated);
        }
    }
    for (number, disk) in config.disks.iter().enumerate() {
        if let Some(path) = &disk.vhost_user {
            add(format!("disk.{number}.vhost_user"), Path::new(path), Directory::MustExist);
        }
        for (place, export) in disk.exports.iter().enumerate() {
            if let Some(path) = &export.vhost_user {
                let at = format!("disk.{number}.export.{place}.vhost_user");
                add(at, Path::new(path), Directory::MustExist);
            }
        }
    }
    let paths: Vec<(PathBuf, Directory)> = sockets.iter().map(|(_, place)| place.clone()).collect();
    let answers = query_all(paths, ANSWER_MAX, |(path, directory)| Some(check_place(path, *directory)));
    for ((at, (path, _)), answer) in sockets.iter().zip(answers) {
        let is_hung = answer.is_none();
        if let Err(what) = answer.unwrap_or_else(|| Err("its filesystem does not respond".to_owned())) {
            found.add(at, format!("a socket cannot be created at {}: {what}", path.display()));
        }
        if is_hung {
            return;
        }
    }
}

/// Returns why no socket can be created at this path.
fn check_place(path: &Path, treatment: Directory) -> Result<(), String> {
    let bytes = path.as_os_str().len();
    if bytes > PATH_BYTES_MAX {
        return Err(format!("the path has {bytes} bytes, and {PATH_BYTES_MAX} is the maximum"));
    }
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err("the path exists and is not a socket".to_owned());
        }
        _ => {}
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = match treatment {
        Directory::MustExist => directory,
        Directory::IsCreated => directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new(".")),
    };
    match std::fs::metadata(directory) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(format!("{} is not a directory", directory.display())),
        Err(error) => return Err(format!("the directory {}: {error}", directory.display())),
    }
    accessat(CWD, directory, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
        .map_err(|errno| format!("the directory {} is not writable: {errno}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_an_unused_name_in_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| check_place(&dir.path().join(name), Directory::MustExist);
        assert_eq!(at("a.sock"), Ok(()));
        let _listener = std::os::unix::net::UnixListener::bind(dir.path().join("used.sock")).unwrap();
        assert_eq!(at("used.sock"), Ok(()), "a running daemon has it");
        std::fs::write(dir.path().join("file"), "x").unwrap();
        assert!(at("file").unwrap_err().contains("not a socket"));
        assert!(at("file/a.sock").unwrap_err().contains("ot a directory"));
        assert!(at("none/a.sock").unwrap_err().contains("No such file"));
        assert!(at(&"x".repeat(108)).unwrap_err().contains("107 is the maximum"));
        let below = |name: &str| check_place(&dir.path().join(name), Directory::IsCreated);
        assert_eq!((below("a.sock"), below("none/more/a.sock")), (Ok(()), Ok(())), "hob creates none/more");
        assert!(below("file/more/a.sock").unwrap_err().contains("is not a directory"));
    }
}
