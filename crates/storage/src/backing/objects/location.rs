//! The location of a disk's objects: parses the address of the backing, and accesses its store
//! through the `object_store` crate.
//!
//! Addresses are `objects+file:///DIRECTORY`. The program may install a function that opens
//! `s3://BUCKET/PREFIX`, `gs://` and `az://` too ([`install_clouds`]).

use std::error::Error as _;
use std::io;
use std::ops::Range;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions};

use super::format::{FOLDERS, MANIFEST_BYTES_MAX, Name, PAGE_BYTES};
use super::store::{Boxed, Objects, Put, StoreError};

const FILE: &str = "objects+file://";
const CLOUDS: [&str; 3] = ["s3://", "gs://", "az://"];

/// Maximum size of objects that are fetched completely without knowing their length, bytes.
const WHOLE_BYTES_MAX: u64 =
    if MANIFEST_BYTES_MAX > PAGE_BYTES { MANIFEST_BYTES_MAX } else { PAGE_BYTES } as u64;

/// Permissions of new directories.
const DIRECTORY_MODE: u32 = 0o700;

/// Whether the directory of a disk must exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Directory {
    /// The directory must exist.
    Exists,
    /// The directory is created if it does not exist.
    Make,
}

pub(super) fn recognise(spec: &str) -> bool {
    spec.starts_with(FILE) || CLOUDS.iter().any(|scheme| spec.starts_with(scheme))
}

/// Parses the address of an object disk, and returns its location. The error is a text for users.
pub(super) fn find(spec: &str, directory: Directory) -> Result<DiskLocation, String> {
    if let Some(path) = spec.strip_prefix(FILE) {
        return DiskLocation::files(FilePath::new(path), directory);
    }
    let open = OPEN_CLOUD.get().ok_or(
        "this hob was built without the feature objects-cloud (cargo build --features objects-cloud)",
    )?;
    let (store, prefix) = open(spec)?;
    Ok(DiskLocation { store, prefix, directory: None, sync: sync_folder })
}

/// Opens the store of a cloud address. Returns the store, and the path of the disk in it. The error
/// is a text for users.
pub type OpenCloud = fn(&str) -> Result<(Arc<dyn ObjectStore>, Path), String>;

static OPEN_CLOUD: OnceLock<OpenCloud> = OnceLock::new();

/// Installs the function that opens the stores of cloud providers. Later calls have no effect.
pub fn install_clouds(open: OpenCloud) {
    let _ = OPEN_CLOUD.set(open);
}

/// The location of one disk in an object store.
pub(super) struct DiskLocation {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    /// Path of the directory, if the object store is a directory.
    directory: Option<PathBuf>,
    /// Syncs a subdirectory of `directory`, so that new file names in it are durable.
    sync: fn(&FilePath) -> io::Result<()>,
}

impl DiskLocation {
    fn files(path: &FilePath, directory: Directory) -> Result<DiskLocation, String> {
        if !path.is_absolute() {
            return Err(format!("the path must be absolute: {FILE}/DIRECTORY"));
        }
        if directory == Directory::Make {
            make_directory(path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        }
        let path = path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))?;
        if !path.is_dir() {
            return Err(format!("{} is not a directory", path.display()));
        }
        let store = LocalFileSystem::new_with_prefix(&path).map_err(|error| error.to_string())?;
        // Without this sync, written objects are only in the page cache.
        let store = Arc::new(store.with_fsync(true));
        Ok(DiskLocation { store, prefix: Path::default(), directory: Some(path), sync: sync_folder })
    }

    /// Syncs the folder of an existing object, so that the object's name is durable. An earlier put
    /// may have created the object, and failed before it synced the folder.
    async fn sync_names_beside(&self, name: Name) -> Result<(), StoreError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let (file, sync) = (directory.join(name.to_string()), self.sync);
        let synced = tokio::task::spawn_blocking(move || file.parent().map_or(Ok(()), sync)).await;
        synced.map_err(io::Error::other).and_then(|result| result).map_err(|error| {
            StoreError::Failed(format!("{name} exists, but its directory cannot be synced: {error}"))
        })
    }

    /// Creates the folder of an object, which other users cannot read. If the folder cannot be
    /// created, the put reports the reason.
    async fn make_folder(&self, name: Name) {
        let Some(directory) = &self.directory else { return };
        let file = directory.join(name.to_string());
        let make = move || match file.parent() {
            Some(folder) if !folder.exists() => make_directory(folder),
            _ => Ok(()),
        };
        if let Ok(Err(error)) = tokio::task::spawn_blocking(make).await {
            tracing::debug!("cannot create the folder of {name}: {error}");
        }
    }

    /// Fails if the disk is not in the directory, for example because the filesystem of the
    /// directory was unmounted. Otherwise a put would create the object below the mount point, where
    /// it is lost when the filesystem is mounted again. A disk always has a folder of manifests.
    async fn check_presence(&self) -> Result<(), StoreError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let folder = directory.join(FOLDERS[0]);
        let exists = tokio::task::spawn_blocking(move || folder.try_exists()).await;
        match exists.map_err(io::Error::other).and_then(|result| result) {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::Failed(format!(
                "the disk is not in {}; is its filesystem mounted?",
                directory.display()
            ))),
            Err(error) => Err(StoreError::Failed(error.to_string())),
        }
    }

    /// Reads an object, or a range of it.
    async fn fetch(&self, name: Name, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let path = self.path(name);
        if let Some(range) = range {
            return self.store.get_range(&path, range).await.map_err(|error| understand(&error));
        }
        let found = self.store.get(&path).await.map_err(|error| understand(&error))?;
        if found.meta.size > WHOLE_BYTES_MAX {
            return Err(StoreError::Refused(format!("{name} has {} bytes", found.meta.size)));
        }
        found.bytes().await.map_err(|error| understand(&error))
    }

    fn path(&self, name: Name) -> Path {
        let name = name.to_string();
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }
}

impl Objects for DiskLocation {
    fn get(&self, name: Name, range: Option<Range<u64>>) -> Boxed<'_, Bytes> {
        Box::pin(async move {
            let found = self.fetch(name, range).await;
            if found == Err(StoreError::Absent) && !matches!(name, Name::Manifest(_)) {
                self.check_presence().await?;
            }
            found
        })
    }

    fn put(&self, name: Name, bytes: Bytes, how: Put) -> Boxed<'_, ()> {
        Box::pin(async move {
            let mode = match how {
                Put::Always => PutMode::Overwrite,
                Put::IfAbsent => PutMode::Create,
            };
            let options = PutOptions { mode, ..PutOptions::default() };
            // The first manifest creates the disk.
            let is_first = name == Name::Manifest(1);
            if !is_first {
                self.check_presence().await?;
            }
            self.make_folder(name).await;
            let put = self.store.put_opts(&self.path(name), bytes.into(), options).await;
            let put = put.map(drop).map_err(|error| understand(&error));
            if !is_first {
                // The filesystem may have been unmounted during the put.
                self.check_presence().await?;
            }
            if put == Err(StoreError::Present) {
                self.sync_names_beside(name).await?;
            }
            put
        })
    }

    fn delete(&self, name: Name) -> Boxed<'_, ()> {
        Box::pin(async move {
            match self.store.delete(&self.path(name)).await.map_err(|error| understand(&error)) {
                Err(StoreError::Absent) => Ok(()),
                result => result,
            }
        })
    }

    fn list<'a>(&'a self, folder: &'a str, each: &'a mut (dyn FnMut(Name) + Send)) -> Boxed<'a, ()> {
        Box::pin(async move {
            let at = self.prefix.clone().join(folder);
            let below = if self.prefix.as_ref().is_empty() { 0 } else { self.prefix.as_ref().len() + 1 };
            let mut found = self.store.list(Some(&at));
            while let Some(object) = std::future::poll_fn(|context| found.as_mut().poll_next(context)).await {
                match object.map_err(|error| understand(&error)) {
                    Ok(object) => {
                        object
                            .location
                            .as_ref()
                            .get(below..)
                            .and_then(Name::parse)
                            .into_iter()
                            .for_each(&mut *each);
                    }
                    // The entry is a directory without any stored object, or a file that was
                    // deleted during the listing.
                    Err(StoreError::Absent) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }

    fn tidy(&self) -> Boxed<'_, ()> {
        let directory = self.directory.clone();
        Box::pin(async move {
            let Some(directory) = directory else { return Ok(()) };
            let tidied = tokio::task::spawn_blocking(move || tidy(&directory)).await;
            tidied
                .map_err(io::Error::other)
                .and_then(|result| result)
                .map_err(|error| StoreError::Failed(error.to_string()))
        })
    }
}

/// Creates a directory and its missing parents, durably. Only this user has access to them, because
/// they have the data of guests.
fn make_directory(path: &FilePath) -> io::Result<()> {
    let missing: Vec<&FilePath> = path.ancestors().take_while(|path| !path.exists()).collect();
    std::fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path)?;
    for made in missing {
        if let Some(parent) = made.parent() {
            sync_folder(parent)?;
        }
    }
    Ok(())
}

fn sync_folder(path: &FilePath) -> io::Result<()> {
    std::fs::File::open(path)?.sync_all()
}

/// Removes files that `object_store` was writing when the process was killed. The names of such
/// files are the object's name, `#` and a number.
fn tidy(directory: &FilePath) -> io::Result<()> {
    for folder in FOLDERS {
        let entries = match std::fs::read_dir(directory.join(folder)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let file = entry.file_name();
            let Some((name, number)) = file.to_str().and_then(|file| file.split_once('#')) else { continue };
            let is_staged = Name::parse(&format!("{folder}/{name}")).is_some()
                && !number.is_empty()
                && number.bytes().all(|byte| byte.is_ascii_digit());
            if is_staged {
                std::fs::remove_file(entry.path())?;
            }
        }
    }
    Ok(())
}

/// Returns true if the store replied that the whole bucket or container does not exist. A server
/// whose storage is not mounted yet gives this reply too, so no object counts as lost.
fn says_no_bucket(reply: &str) -> bool {
    ["NoSuchBucket", "ContainerNotFound"].iter().any(|code| reply.contains(&format!("<Code>{code}</Code>")))
}

/// Returns true if the store refused the credentials. The `object_store` crate reports that as a
/// generic error if the request was a listing.
fn says_denied(reply: &str) -> bool {
    ["401 Unauthorized", "403 Forbidden"].iter().any(|it| reply.contains(&format!("status code: {it}")))
}

/// Returns true if the store refused an object because its space or a quota is used up. The codes
/// are those of Ceph's RADOS Gateway and of MinIO.
fn says_full(reply: &str) -> bool {
    let codes = ["QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"];
    reply.contains("status code: 507 Insufficient Storage")
        || codes.iter().any(|code| reply.contains(&format!("<Code>{code}</Code>")))
}

/// Converts an error of the `object_store` crate to a [`StoreError`].
fn understand(error: &Error) -> StoreError {
    let mut cause = error.source();
    while let Some(inner) = cause {
        match inner.downcast_ref::<io::Error>().map(io::Error::kind) {
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                return StoreError::NoSpace(error.to_string());
            }
            Some(io::ErrorKind::NotFound) => return StoreError::Absent,
            Some(io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) => {
                return StoreError::Refused(error.to_string());
            }
            _ => cause = inner.source(),
        }
    }
    match error {
        _ if says_full(&error.to_string()) => StoreError::Full(error.to_string()),
        Error::NotFound { .. } if says_no_bucket(&error.to_string()) => {
            StoreError::Failed(format!("the bucket does not exist, or its storage is not mounted: {error}"))
        }
        Error::NotFound { .. } => StoreError::Absent,
        Error::AlreadyExists { .. } | Error::Precondition { .. } => StoreError::Present,
        Error::Generic { .. } if says_denied(&error.to_string()) => StoreError::Denied(error.to_string()),
        Error::Generic { .. } | Error::JoinError { .. } => StoreError::Failed(error.to_string()),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            StoreError::Denied(error.to_string())
        }
        _ => StoreError::Refused(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::format::Generation;
    use super::super::store::RetryingStore;
    use super::*;

    /// Checks that other users have no access to a directory.
    #[track_caller]
    fn assert_private(directory: &FilePath) {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(directory).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, DIRECTORY_MODE, "{}", directory.display());
    }

    #[test]
    fn replies_of_full_stores_are_recognized() {
        let reply = |text: &str| Error::Generic { store: "S3", source: text.to_owned().into() };
        for full in [
            "Server returned non-2xx status code: 507 Insufficient Storage: ",
            "Server returned non-2xx status code: 403 Forbidden: <Error><Code>QuotaExceeded</Code></Error>",
        ] {
            assert!(matches!(understand(&reply(full)), StoreError::Full(_)), "{full}");
        }
        let busy = "Server returned non-2xx status code: 503 Service Unavailable: <Code>SlowDown</Code>";
        assert!(matches!(understand(&reply(busy)), StoreError::Failed(_)));
    }

    #[test]
    fn directories_are_found_or_made() {
        let dir = tempfile::tempdir().unwrap();
        let spec = format!("{FILE}{}/new/one", dir.path().display());
        assert!(
            recognise(&spec)
                && recognise("s3://b/p")
                && !recognise("/srv/objects")
                && !recognise("nbd://h/e")
        );
        assert!(find(&spec, Directory::Exists).is_err());
        assert!(find(&spec, Directory::Make).is_ok() && find(&spec, Directory::Exists).is_ok());
        assert_private(&dir.path().join("new"));
        assert_private(&dir.path().join("new/one"));
        assert!(find("objects+file://relative", Directory::Make).is_err());
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert!(find(&format!("{FILE}{}/file", dir.path().display()), Directory::Exists).is_err());
    }

    #[tokio::test]
    async fn files_are_put_listed_and_tidied() {
        let dir = tempfile::tempdir().unwrap();
        let place = DiskLocation::files(dir.path(), Directory::Exists).unwrap();
        let (one, two) = (Name::Manifest(1), Name::Manifest(2));
        assert_eq!(place.get(one, None).await, Err(StoreError::Absent));
        place.put(one, Bytes::from_static(b"abc"), Put::IfAbsent).await.unwrap();
        assert_private(&dir.path().join("manifest"));
        place.put(two, Bytes::from_static(b"x"), Put::Always).await.unwrap();
        assert_eq!(place.put(one, Bytes::from_static(b"def"), Put::IfAbsent).await, Err(StoreError::Present));
        assert_eq!(place.get(one, Some(1..3)).await.unwrap(), Bytes::from_static(b"bc"));
        let staged = dir.path().join("manifest/0000000000000003#1");
        let foreign = dir.path().join("manifest/notes#1");
        std::fs::write(&staged, "half").unwrap();
        std::fs::write(&foreign, "mine").unwrap();
        place.tidy().await.unwrap();
        assert!(!staged.exists() && foreign.exists());
        place.delete(two).await.unwrap();
        place.delete(two).await.unwrap();
        let mut found = Vec::new();
        place.list("manifest", &mut |name| found.push(name)).await.unwrap();
        place.list("data", &mut |name| found.push(name)).await.unwrap();
        assert_eq!(found, [one]);
    }

    /// The filesystem of the directory is unmounted, and mounted again later.
    #[tokio::test]
    async fn nothing_is_put_where_the_disk_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (path, away) = (dir.path().join("disk"), dir.path().join("away"));
        std::fs::create_dir(&path).unwrap();
        let place = DiskLocation::files(&path, Directory::Exists).unwrap();
        let (data, bytes) = (Name::Data(1, Generation(1)), Bytes::from_static(b"abc"));
        place.put(Name::Manifest(1), bytes.clone(), Put::IfAbsent).await.unwrap();
        assert_eq!(place.get(data, None).await, Err(StoreError::Absent));
        std::fs::rename(&path, &away).unwrap();
        for has_mount_point in [false, true] {
            if has_mount_point {
                std::fs::create_dir(&path).unwrap();
            }
            for name in [Name::Manifest(2), data] {
                let put = place.put(name, bytes.clone(), Put::Always).await;
                assert!(matches!(&put, Err(StoreError::Failed(why)) if why.contains("mounted")), "{put:?}");
            }
            let get = place.get(data, None).await;
            assert!(matches!(&get, Err(StoreError::Failed(_))), "it is not lost: {get:?}");
            assert!(!path.join("data").exists() && !path.join("manifest").exists());
        }
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&away, &path).unwrap();
        place.put(data, bytes.clone(), Put::Always).await.unwrap();
        assert_eq!(place.get(data, None).await, Ok(bytes));
    }

    /// An earlier attempt has created the object, and has not synced the object's folder
    /// successfully.
    #[tokio::test]
    async fn an_existing_file_counts_after_its_folder_is_synced() {
        let dir = tempfile::tempdir().unwrap();
        let mut place = DiskLocation::files(dir.path(), Directory::Exists).unwrap();
        let (one, bytes) = (Name::Manifest(1), Bytes::from_static(b"abc"));
        place.put(one, bytes.clone(), Put::IfAbsent).await.unwrap();
        place.sync = |folder| {
            assert!(folder.ends_with("manifest"), "{}", folder.display());
            Err(io::ErrorKind::Other.into())
        };
        let again = place.put(one, bytes.clone(), Put::IfAbsent).await;
        assert!(matches!(&again, Err(StoreError::Failed(_))), "{again:?}");
        let place = DiskLocation::files(dir.path(), Directory::Exists).unwrap();
        assert_eq!(place.put(one, bytes.clone(), Put::IfAbsent).await, Err(StoreError::Present));
        RetryingStore::new(Box::new(place), Duration::from_secs(60)).create(one, bytes).await.unwrap();
    }
}
