//! The check of hob.toml against this host, for `hob daemon --check` only. A daemon that starts
//! reports the same errors itself, and serves the disks that have no errors.
//!
//! The check finds addresses and paths that are used twice under different spellings, backings and
//! devices that cannot be opened, and sizes that do not fit. A path whose filesystem does not
//! answer within a second is not examined.

use std::collections::BTreeMap;
use std::fs::FileType;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use hob_control::{Endpoint, PoolCreate, Size};
use hob_nbd::uri::NbdUri;
use hob_storage::backing::Format;
use hob_storage::pool::{NAME_BYTES_MAX, default_segment_bytes, device_bytes_for, is_segment_size};

use super::super::Config;
use super::answers::query_all;
use super::{Findings, readable};
use crate::hardware::Backing;
use crate::host_memory::{HostMemory, TIER_BYTES_MIN};
use crate::image::unknown_scheme;
use crate::state::State;

/// Maximum time for examining all paths.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// File with the kernel's setting for sockets at `::`: `1` if they accept only IPv6 connections,
/// `0` if they accept IPv4 connections too.
const BIND_V6_ONLY: &str = "/proc/sys/net/ipv6/bindv6only";

/// A path in hob.toml, and what the path is used for.
struct PathUse {
    /// Key of the path in the file.
    at: String,
    /// The object that uses the path, as messages name it, for example `vhost_user of disk web`.
    user: String,
    path: PathBuf,
    role: Role,
}

/// The use of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Socket,
    /// A device of the pool with this number.
    Device(usize),
    /// A disk's file (FUSE).
    File,
    /// A disk's data, with the format that hob.toml names.
    Backing(Option<Format>),
}

/// Properties of a path.
#[derive(Clone, Debug)]
struct PathFacts {
    /// The path without symbolic links, as far as it exists.
    canonical: PathBuf,
    /// Type and size in bytes of an existing file.
    file: Option<(FileType, u64)>,
    /// True if nothing exists at the path.
    is_missing: bool,
    /// True if the path's directory does not exist.
    lacks_directory: bool,
    /// The image format whose header the file has, if hob.toml names a format.
    content: Option<Format>,
}

/// Checks hob.toml against this host.
pub(in super::super) fn check_host(config: &Config, state: &State, found: &mut Findings<'_>) {
    check_directories(config, found);
    check_pool_names(config, found);
    check_addresses(config, found);
    check_memory(config, HostMemory::look(), found);
    check_backing_addresses(config, found);
    let uses = uses_of(config);
    let facts = examine_all(&uses);
    check_twice(&uses, &facts, found);
    check_types(config, state, &uses, &facts, found);
    check_sizes(config, state, &uses, &facts, found);
}

/// Checks the directories of the state and of lent flash.
fn check_directories(config: &Config, found: &mut Findings<'_>) {
    if config.state_dir.as_os_str().is_empty() {
        found.add("state_dir", "state_dir is empty: write the path of a directory, such as /var/lib/hob");
    }
    let Some(lend) = &config.peers.lend else { return };
    let answers = query_all(vec![lend.clone()], LOOK_MAX, |path| std::fs::metadata(path).ok());
    if answers.into_iter().flatten().any(|metadata| !metadata.is_dir()) {
        let what = format!("peers.lend = {}: the path is not a directory; use another path", lend.display());
        found.add("peers.lend", what);
    }
}

/// Checks that the names of pools fit into the superblocks of their devices.
fn check_pool_names(config: &Config, found: &mut Findings<'_>) {
    for (number, pool) in config.pools.iter().enumerate() {
        let bytes = pool.name.len();
        if bytes > NAME_BYTES_MAX {
            let what = format!(
                "[[pool]] '{}': the name has {bytes} bytes, and {NAME_BYTES_MAX} is the maximum",
                pool.name
            );
            found.add(&format!("pool.{number}.name"), what);
        }
    }
}

/// Checks that no two listeners use one TCP address.
fn check_addresses(config: &Config, found: &mut Findings<'_>) {
    let v6_takes_v4 = std::fs::read_to_string(BIND_V6_ONLY).is_ok_and(|text| text.trim() == "0");
    let mut listeners: Vec<(String, &Endpoint)> = Vec::new();
    let listen = config.listen.iter().enumerate();
    listeners.extend(listen.map(|(number, endpoint)| (format!("listen.{number}"), endpoint)));
    let control = config.control.listen.iter().enumerate();
    listeners.extend(control.map(|(number, endpoint)| (format!("control.listen.{number}"), endpoint)));
    let nbd = config.nbd.iter().enumerate();
    listeners.extend(nbd.map(|(number, entry)| (format!("nbd.{number}.listen"), &entry.listen)));
    for (index, (at, endpoint)) in listeners.iter().enumerate() {
        for (other_at, other) in &listeners[..index] {
            if is_one_address(endpoint, other, v6_takes_v4) {
                found
                    .add(at, format!("{other_at} and {at} use one address and port: {other} and {endpoint}"));
            }
        }
    }
}

/// Returns true if the kernel cannot listen at both addresses. Host names are not resolved.
/// `v6_takes_v4` is true if a socket at `::` also accepts IPv4 connections.
fn is_one_address(one: &Endpoint, other: &Endpoint, v6_takes_v4: bool) -> bool {
    let address = |endpoint: &Endpoint| match endpoint {
        Endpoint::Tcp { host, port } if *port > 0 => Some((host.parse::<IpAddr>().ok()?, *port)),
        _ => None,
    };
    let (Some((one, port)), Some((other, other_port))) = (address(one), address(other)) else { return false };
    let overlaps = match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => {
            one == other || one.is_unspecified() || other.is_unspecified()
        }
        (IpAddr::V6(one), IpAddr::V6(other)) => {
            one == other || one.is_unspecified() || other.is_unspecified()
        }
        (IpAddr::V4(_), IpAddr::V6(v6)) | (IpAddr::V6(v6), IpAddr::V4(_)) => {
            v6_takes_v4 && v6.is_unspecified()
        }
    };
    port == other_port && overlaps
}

/// Checks that each memory tier has a valid size, and at most half of this host's memory.
fn check_memory(config: &Config, memory: HostMemory, found: &mut Findings<'_>) {
    for (number, disk) in config.disks.iter().enumerate() {
        let ram = disk.cache.as_ref().and_then(|cache| cache.settings.ram).unwrap_or_default();
        if (1..TIER_BYTES_MIN).contains(&ram.bytes()) {
            let least = Size(TIER_BYTES_MIN);
            let what = format!("disk {}: ram = {ram}: the value must be 0 or at least {least}", disk.name);
            found.add(&format!("disk.{number}.cache.ram"), what);
        } else if ram.bytes() > memory.total / 2 {
            found.add(
                &format!("disk.{number}.cache.ram"),
                format!(
                    "disk {}: ram = {ram} is more than half of this host's memory of {}",
                    disk.name,
                    Size(memory.total).human()
                ),
            );
        }
    }
}

/// Checks the backings that are not paths.
fn check_backing_addresses(config: &Config, found: &mut Findings<'_>) {
    for (number, disk) in config.disks.iter().enumerate() {
        let fault = match Backing::kind(&disk.backing, Format::Raw).name {
            "nbd" => disk.backing.parse::<NbdUri>().err().map(|error| error.to_string()),
            "file" => unknown_scheme(&disk.backing),
            _ => None,
        };
        if let Some(what) = fault {
            let what = format!("disk {}: backing {}: {what}", disk.name, disk.backing);
            found.add(&format!("disk.{number}.backing"), what);
        }
    }
}

/// Returns the paths in hob.toml. Paths of sockets and devices are examined first.
fn uses_of(config: &Config) -> Vec<PathUse> {
    let mut uses = Vec::new();
    let mut add = |at: String, user: String, path: &Path, role: Role| {
        uses.push(PathUse { at, user, path: path.to_owned(), role });
    };
    let mut listen = |at: String, endpoint: &Endpoint| {
        if let Endpoint::Unix(path) = endpoint {
            add(at.clone(), at, path, Role::Socket);
        }
    };
    for (number, endpoint) in config.listen.iter().enumerate() {
        listen(format!("listen.{number}"), endpoint);
    }
    for (number, endpoint) in config.control.listen.iter().enumerate() {
        listen(format!("control.listen.{number}"), endpoint);
    }
    for (number, entry) in config.nbd.iter().enumerate() {
        listen(format!("nbd.{number}.listen"), &entry.listen);
    }
    let mut of_disk = |at: String, path: &Option<String>, role: Role| {
        if let Some(path) = path {
            add(at.clone(), readable(config, &at), Path::new(path), role);
        }
    };
    for (number, disk) in config.disks.iter().enumerate() {
        of_disk(format!("disk.{number}.vhost_user"), &disk.vhost_user, Role::Socket);
        of_disk(format!("disk.{number}.fuse"), &disk.fuse, Role::File);
        for (place, export) in disk.exports.iter().enumerate() {
            of_disk(format!("disk.{number}.export.{place}.vhost_user"), &export.vhost_user, Role::Socket);
            of_disk(format!("disk.{number}.export.{place}.fuse"), &export.fuse, Role::File);
        }
    }
    for (number, pool) in config.pools.iter().enumerate() {
        for (place, path) in pool.devices.iter().enumerate() {
            let at = format!("pool.{number}.devices.{place}");
            add(at, format!("pool '{}'", pool.name), Path::new(path), Role::Device(number));
        }
    }
    let is_path = |backing: &str| Backing::is_path(backing) && unknown_scheme(backing).is_none();
    for (number, disk) in config.disks.iter().enumerate().filter(|(_, disk)| is_path(&disk.backing)) {
        let format = disk.format.as_deref().and_then(Format::from_name);
        let (at, user) = (format!("disk.{number}.backing"), format!("disk {}", disk.name));
        add(at, user, Path::new(&disk.backing), Role::Backing(format));
    }
    uses
}

/// Returns the properties of each path; `None` for a path whose filesystem did not answer in time.
fn examine_all(uses: &[PathUse]) -> Vec<Option<PathFacts>> {
    let paths: Vec<(PathBuf, Role)> = uses.iter().map(|it| (it.path.clone(), it.role)).collect();
    query_all(paths, LOOK_MAX, |(path, role)| Some(examine(path, *role)))
}

fn examine(path: &Path, role: Role) -> PathFacts {
    let is_missing = |path: &Path| std::fs::metadata(path).is_err_and(|e| e.kind() == ErrorKind::NotFound);
    let file = std::fs::metadata(path).ok().map(|metadata| (metadata.file_type(), metadata.len()));
    let content = match role {
        // Only files and block devices are opened.
        Role::Backing(Some(_)) => Format::resembled(path).ok(),
        _ => None,
    };
    PathFacts {
        canonical: canonical(&std::path::absolute(path).unwrap_or_else(|_| path.to_owned())),
        file,
        is_missing: file.is_none() && is_missing(path),
        lacks_directory: path.parent().is_some_and(is_missing),
        content,
    }
}

/// Returns the path without symbolic links, `.` and `..`. In the part that does not exist, `..`
/// removes the name before it.
fn canonical(path: &Path) -> PathBuf {
    if let Ok(found) = std::fs::canonicalize(path) {
        return found;
    }
    let Some(parent) = path.parent() else { return path.to_owned() };
    let mut found = canonical(parent);
    match path.components().next_back() {
        Some(Component::Normal(name)) => found.push(name),
        Some(Component::ParentDir) => {
            found.pop();
        }
        _ => {}
    }
    found
}

/// Checks that each path of a socket, a disk's file and a device is used once, and that no disk's
/// file covers a backing.
fn check_twice(uses: &[PathUse], facts: &[Option<PathFacts>], found: &mut Findings<'_>) {
    let mut seen: BTreeMap<PathBuf, &PathUse> = BTreeMap::new();
    let place = |index: usize| {
        facts[index].as_ref().map_or_else(|| uses[index].path.clone(), |facts| facts.canonical.clone())
    };
    for (index, this) in uses.iter().enumerate() {
        if matches!(this.role, Role::Backing(_)) {
            // Backings that are used twice are found by their identities.
            if let Some(file) = seen.get(&place(index)).filter(|other| other.role == Role::File) {
                let path = this.path.display();
                found.add(
                    &file.at,
                    format!("{} covers the backing of {}: {path}; use another path", file.user, this.user),
                );
            }
            continue;
        }
        let place = place(index);
        let Some(other) = seen.get(&place) else {
            seen.insert(place, this);
            continue;
        };
        let what = if this.user == other.user {
            format!("{} uses {} twice, also as {}", this.user, place.display(), this.path.display())
        } else {
            format!("{} and {} both use {}", other.user, this.user, place.display())
        };
        found.add(&this.at, what);
    }
}

/// Checks that backings and devices are files or block devices, and that images have their format.
fn check_types(
    config: &Config,
    state: &State,
    uses: &[PathUse],
    facts: &[Option<PathFacts>],
    found: &mut Findings<'_>,
) {
    for (this, facts) in uses.iter().zip(facts) {
        let (Some(facts), path) = (facts, this.path.display()) else { continue };
        let unfit = facts.file.and_then(|(file_type, _)| unfit(file_type));
        match this.role {
            Role::Socket | Role::File => {}
            Role::Backing(format) => {
                if let Some(noun) = unfit {
                    let user = &this.user;
                    let what = format!("{user}: its backing {path} is {noun}, not a file or a block device");
                    found.add(&this.at, what);
                    continue;
                }
                // Only these formats have their header at a fixed offset.
                let strict = [Format::Qcow2, Format::Vdi, Format::Vhdx];
                if let Some(format) = format.filter(|format| strict.contains(format))
                    && facts.content.is_some_and(|content| content != format)
                {
                    let (name, user) = (format.name(), &this.user);
                    let what = format!("{user}: format = \"{name}\", but {path} is not a {name} image");
                    found.add(&this.at.replace(".backing", ".format"), what);
                }
            }
            Role::Device(number) => {
                let Some(pool) = config.pools.get(number) else { continue };
                // A pool that exists already can start without some of its devices.
                let is_known = state.pools.iter().any(|known| known.name == pool.name && known.was_created());
                let segment = pool.segment_size.map(Size::bytes).filter(|bytes| is_segment_size(*bytes));
                let segment = segment.unwrap_or_else(|| default_segment_bytes(pool.size.map(Size::bytes)));
                let needed = device_bytes_for(segment, segment);
                let what = match unfit {
                    // A socket in the list of devices leads to a device of another host.
                    Some("a socket") => continue,
                    Some(noun) => format!("device {path} is {noun}, not a file or a block device"),
                    None if is_known => continue,
                    None if device_bytes(pool, Some(facts)).is_some_and(|bytes| bytes < needed) => format!(
                        "device {path} is too small: at least {} are needed with segments of {}",
                        Size(needed).human(),
                        Size(segment).human()
                    ),
                    None if !facts.is_missing => continue,
                    None if facts.lacks_directory => {
                        format!("device {path} cannot be created: its directory does not exist")
                    }
                    None if pool.size.is_none() => {
                        format!("device {path} does not exist; set 'size' to create a file of that size")
                    }
                    None => continue,
                };
                found.add(&this.at, format!("[[pool]] '{}': {what}", pool.name));
            }
        }
    }
}

/// Returns the name of a file type that cannot store data.
fn unfit(file_type: FileType) -> Option<&'static str> {
    match file_type {
        _ if file_type.is_dir() => Some("a directory"),
        _ if file_type.is_fifo() => Some("a FIFO"),
        _ if file_type.is_socket() => Some("a socket"),
        _ if file_type.is_char_device() => Some("a character device"),
        _ => None,
    }
}

/// Checks that the caches in hob.toml fit into those of its pools that have a `size`.
fn check_sizes(
    config: &Config,
    state: &State,
    uses: &[PathUse],
    facts: &[Option<PathFacts>],
    found: &mut Findings<'_>,
) {
    for (number, pool) in config.pools.iter().enumerate() {
        // A command may have added devices to an existing pool.
        let devices = pool.devices.len();
        if state.pools.iter().any(|known| known.name == pool.name && known.devices.len() != devices) {
            continue;
        }
        let on_it = uses.iter().zip(facts).filter(|(this, _)| this.role == Role::Device(number));
        let mut sizes = on_it.map(|(_, facts)| device_bytes(pool, facts.as_ref()));
        let capacity = sizes.try_fold(0_u64, |sum, size| Some(sum.saturating_add(size?)));
        let Some(capacity) = capacity else { continue };
        let room = format!("pool '{}' has {}", pool.name, Size(capacity).human());
        let mut total = 0_u64;
        for (number, disk) in config.disks.iter().enumerate() {
            let Some(cache) = disk.cache.as_ref().filter(|cache| cache.pool == pool.name) else { continue };
            let size = cache.size.unwrap_or_default();
            let min = cache.settings.min.unwrap_or_default();
            total = total.saturating_add(size.bytes());
            let (key, what) = if size.bytes() > capacity {
                ("size", format!("size = {size} is too large: {room}"))
            } else if min.bytes() > capacity {
                ("min", format!("min = {min} is too large: {room}"))
            } else if size.bytes() > 0 && total > capacity {
                let all = Size(total).human();
                ("size", format!("the caches up to this one need {all}, and {room}"))
            } else {
                continue;
            };
            found.add(&format!("disk.{number}.cache.{key}"), format!("disk {}: {what}", disk.name));
        }
    }
}

/// Returns the size of a pool's device; `None` if the device is not a file, or its size is unknown.
fn device_bytes(pool: &PoolCreate, facts: Option<&PathFacts>) -> Option<u64> {
    let (size, facts) = (pool.size?.bytes(), facts?);
    match facts.file {
        None => facts.is_missing.then_some(size),
        Some((file_type, 0)) => file_type.is_file().then_some(size),
        Some((file_type, bytes)) => file_type.is_file().then_some(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Vec<String> {
        let config = Config::parse(text).unwrap();
        let mut found = Findings::new(&config.lines);
        check_host(&config, &State::default(), &mut found);
        found.finish().into_iter().map(|finding| finding.what).collect()
    }

    #[track_caller]
    fn assert_one(text: &str, parts: &[&str]) {
        let found = check(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert!(parts.iter().all(|part| found[0].contains(part)), "{text}: {found:?}");
    }

    fn disk(name: &str, backing: &str, more: &str) -> String {
        format!("[[disk]]\nname = \"{name}\"\nbacking = \"{backing}\"\n{more}\n")
    }

    fn cached(name: &str, cache: &str) -> String {
        disk(name, &format!("/none/{name}"), &format!("cache = {{ pool = \"p\", {cache} }}"))
    }

    /// Returns a temporary directory, the path of a directory inside, and the path of a link to the
    /// latter.
    fn linked() -> (tempfile::TempDir, String, String) {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let (real, link) = (real.display().to_string(), link.display().to_string());
        (dir, real, link)
    }

    #[test]
    fn one_path_is_found_under_every_spelling() {
        let (_dir, real, link) = linked();
        std::fs::create_dir(format!("{real}/x")).unwrap();
        for other in [format!("{link}/a"), format!("{real}//a"), format!("{real}/x/../a")] {
            let a = format!("{real}/a");
            assert_one(&format!("listen = [\"unix:{a}\", \"unix:{other}\"]"), &["listen.0 and listen.1"]);
            let control = format!("listen = [\"unix:{a}\"]\n[control]\nlisten = [\"unix:{other}\"]");
            assert_one(&control, &["listen.0 and control.listen.0"]);
            for key in ["vhost_user", "fuse"] {
                let (one, two) = (format!("{key} = \"{a}\""), format!("{key} = \"{other}\""));
                let disks = disk("one", "/none/1", &one) + &disk("two", "/none/2", &two);
                let expected = format!("{key} of disk one and {key} of disk two");
                assert_one(&disks, &[expected.as_str()]);
            }
            let pool = format!("[[pool]]\nname = \"p\"\ndevices = [\"{a}\", \"{other}\"]\nsize = \"1G\"\n");
            assert_one(&pool, &["pool 'p' uses", "twice"]);
            std::fs::write(&a, vec![0; 4096]).unwrap();
            assert_one(&disk("one", &a, &format!("fuse = \"{other}\"")), &["covers the backing of disk one"]);
            std::fs::remove_file(&a).unwrap();
        }
        assert_eq!(canonical(Path::new("/none/../none//b/./c")), Path::new("/none/b/c"));
    }

    #[test]
    fn addresses_overlap_with_those_of_all_interfaces() {
        let overlap = |one: &str, other: &str| {
            let (one, other): (Endpoint, Endpoint) = (one.parse().unwrap(), other.parse().unwrap());
            is_one_address(&one, &other, true) && is_one_address(&other, &one, true)
        };
        assert!(overlap("tcp:127.0.0.1:45001", "tcp:0.0.0.0:45001"));
        assert!(overlap("tcp:[::1]:45001", "tcp:[::]:45001"));
        assert!(overlap("tcp:127.0.0.1:45001", "tcp:[::]:45001"));
        assert!(!overlap("tcp:127.0.0.1:45001", "tcp:0.0.0.0:45002"));
        assert!(!overlap("tcp:127.0.0.1:45001", "tcp:127.0.0.2:45001"));
        assert!(!overlap("tcp:[::1]:45001", "tcp:0.0.0.0:45001"));
        let both = "listen = [\"tcp:127.0.0.1:45001\", \"tcp:0.0.0.0:45001\"]";
        assert_one(both, &["listen.0 and listen.1", "0.0.0.0:45001"]);
    }

    #[test]
    fn backings_that_cannot_be_opened_are_named() {
        let (_dir, real, _) = linked();
        for (backing, part) in [
            ("nbd+unix:///x", "socket"),
            ("nbd://", "host"),
            ("nbd://h:65536/x", "65536"),
            ("ftp://x/y", "does not know ftp://"),
            ("http://x/y", "does not know http://"),
            ("/dev/null", "a character device"),
            (real.as_str(), "a directory"),
        ] {
            assert_one(&disk("one", backing, ""), &["disk one", part]);
        }
        let fifo = Path::new(&real).join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_one(&disk("one", &fifo.display().to_string(), "format = \"qcow2\""), &["a FIFO"]);
        let image = format!("{real}/image");
        std::fs::write(&image, vec![0; 4096]).unwrap();
        assert_one(&disk("one", &image, "format = \"qcow2\""), &["format = \"qcow2\"", "not a qcow2 image"]);
        std::fs::write(&image, [&b"QFI\xfb"[..], &[0; 4092]].concat()).unwrap();
        assert_eq!(check(&disk("one", &image, "format = \"qcow2\"")), [""; 0]);
        assert_eq!(check(&disk("one", "/none/disk", "format = \"qcow2\"")), [""; 0]);
        assert_eq!(check(&disk("one", "nbd://h/x", "")), [""; 0]);
    }

    #[test]
    fn devices_and_sizes_are_those_that_a_pool_can_have() {
        let (_dir, real, _) = linked();
        let pool =
            |device: &str, more: &str| format!("[[pool]]\nname = \"p\"\ndevices = [\"{device}\"]\n{more}\n");
        let size = "size = \"1G\"";
        let new = format!("{real}/new");
        assert_eq!(check(&pool(&new, size)), [""; 0]);
        assert_one(&pool(&real, size), &["a directory"]);
        assert_one(&pool(&new, ""), &["does not exist", "'size'"]);
        let segments = |size: &str| format!("size = \"{size}\"\nsegment_size = \"1M\"");
        assert_one(&pool(&new, "size = \"1K\""), &["new is too small: at least 3 MiB", "1 MiB"]);
        assert_one(&pool(&new, &segments("2M")), &["new is too small: at least 3 MiB"]);
        assert_eq!(check(&pool(&new, &segments("3M"))), [""; 0]);
        assert_one(&pool(&format!("{real}/none/new"), size), &["its directory"]);
        let with = |caches: &str| pool(&new, size) + caches;
        assert_eq!(check(&with(&cached("one", "size = \"1G\""))), [""; 0]);
        assert_one(&with(&cached("one", "size = \"2G\"")), &["disk one: size = 2G", "1 GiB"]);
        assert_one(&with(&cached("one", "min = \"2G\"")), &["disk one: min = 2G"]);
        let both = cached("one", "size = \"600M\"") + &cached("two", "size = \"600M\"");
        assert_one(&with(&both), &["disk two: the caches up to this one"]);
        assert_one(&with(&cached("one", "size = \"1M\", ram = \"1E\"")), &["ram = 1E", "half"]);
    }

    #[test]
    fn directories_and_pool_names_are_checked() {
        let (_dir, real, _) = linked();
        assert_one("state_dir = \"\"", &["state_dir is empty"]);
        let lend = |path: &str| format!("[peers]\nlend = \"{path}\"\nlend_max = \"1G\"");
        assert_eq!(check(&lend(&real)), [""; 0]);
        assert_eq!(check(&lend(&format!("{real}/new"))), [""; 0]);
        let file = format!("{real}/file");
        std::fs::write(&file, "x").unwrap();
        assert_one(&lend(&file), &["peers.lend", "not a directory"]);
        let pool = |letters: usize| {
            let name = "p".repeat(letters);
            format!("[[pool]]\nname = \"{name}\"\ndevices = [\"{real}/p\"]\nsize = \"1G\"")
        };
        assert_eq!(check(&pool(63)), [""; 0]);
        assert_one(&pool(64), &["64 bytes, and 63 is the maximum"]);
        let pool = format!("[[pool]]\nname = \"p\"\ndevices = [\"{real}/p\"]\nsize = \"1G\"\n");
        let tier = |ram: &str| pool.clone() + &cached("one", &format!("size = \"1M\", ram = \"{ram}\""));
        assert_eq!(check(&tier("1M")), [""; 0]);
        assert_one(&tier("1023K"), &["ram = 1023K", "0 or at least 1M"]);
    }
}
