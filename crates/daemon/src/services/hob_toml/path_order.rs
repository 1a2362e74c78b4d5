//! Order of changes of sockets and files. A disk gets a path only after the disk that has it now
//! has released it. Disks that swap their paths need an additional step: one of them releases its
//! path before the others get new paths.

use hob_control::{ConfigDifference, DiskPatch};

use super::changes::Change;
use super::differences::Found;

/// Settings of a disk that are paths of this host.
const KEYS: [&str; 2] = ["vhost_user", "fuse"];

/// One step of applying hob.toml.
pub(super) enum Step {
    /// Makes a change.
    Make(Found),
    /// Takes a path from a disk, which gets its new path in a later step. Has the name of the
    /// difference that the later step resolves.
    Release(String, Change),
}

/// A change of a path.
struct Move {
    found: Found,
    /// True if the disk has released its present path.
    is_released: bool,
}

/// Returns the changes as steps in an order in which they succeed. Only changes that give a disk
/// the path of another disk are reordered.
pub(super) fn in_order(found: Vec<Found>) -> Vec<Step> {
    let has = |path: &str| found.iter().any(|other| old_path(other) == Some(path));
    if !found.iter().filter_map(new_path).any(has) {
        return found.into_iter().map(Step::Make).collect();
    }
    let (moves, others): (Vec<Found>, Vec<Found>) = found.into_iter().partition(is_move);
    let mut moves: Vec<Move> = moves.into_iter().map(|found| Move { found, is_released: false }).collect();
    let mut steps = Vec::new();
    while !moves.is_empty() {
        if let Some(at) = first_free(&moves) {
            steps.push(Step::Make(moves.remove(at).found));
        } else if let Some(first) = moves.iter_mut().find(|it| !it.is_released) {
            first.is_released = true;
            let difference = &first.found.difference;
            steps.extend(set_path(difference, None).map(|change| Step::Release(difference.what(), change)));
        }
    }
    steps.extend(others.into_iter().map(Step::Make));
    steps
}

/// Returns true if a change gives a disk a path that one of the other changes releases.
pub(super) fn takes_path(it: &Found, others: &[Found]) -> bool {
    new_path(it).is_some_and(|path| others.iter().any(|other| old_path(other) == Some(path)))
}

/// Returns the change that gives a disk a path, or takes its path; `None` if the difference is not
/// one of a path.
pub(super) fn set_path(difference: &ConfigDifference, path: Option<&str>) -> Option<Change> {
    let disk = difference.subject.strip_prefix("disk ")?.to_owned();
    let path = Some(path.unwrap_or_default().to_owned());
    let patch = match difference.key.as_str() {
        "vhost_user" => DiskPatch { vhost_user: path, ..DiskPatch::default() },
        "fuse" => DiskPatch { fuse: path, ..DiskPatch::default() },
        _ => return None,
    };
    Some(Change::PatchDisk(disk, patch))
}

/// Returns the index of the first change whose new path no disk of another change has now; `None`
/// if there is none.
fn first_free(moves: &[Move]) -> Option<usize> {
    let is_taken = |path: &str| moves.iter().any(|it| !it.is_released && old_path(&it.found) == Some(path));
    moves.iter().position(|it| !new_path(&it.found).is_some_and(is_taken))
}

fn is_move(it: &Found) -> bool {
    KEYS.contains(&it.difference.key.as_str()) && matches!(it.change, Some(Change::PatchDisk(..)))
}

fn old_path(it: &Found) -> Option<&str> {
    it.difference.running.as_deref().filter(|_| is_move(it))
}

fn new_path(it: &Found) -> Option<&str> {
    it.difference.file.as_deref().filter(|_| is_move(it))
}

#[cfg(test)]
mod tests {
    use hob_control::ConfigRemedy;

    use super::*;

    fn found(disk: &str, key: &str, running: &str, file: &str) -> Found {
        let path = |path: &str| Some(path.to_owned()).filter(|path| !path.is_empty());
        let difference = ConfigDifference {
            subject: format!("disk {disk}"),
            key: key.to_owned(),
            file: path(file),
            running: path(running),
            by: ConfigRemedy::Apply,
            action: String::new(),
        };
        Found { difference, change: Some(Change::PatchDisk(disk.to_owned(), DiskPatch::default())) }
    }

    /// Returns the steps as the names of disks, and `-` before a release.
    fn steps(found: Vec<Found>) -> Vec<String> {
        let name = |what: &str| what.split([' ', ':']).nth(1).unwrap_or_default().to_owned();
        let steps = in_order(found).into_iter().map(|step| match step {
            Step::Make(found) => name(&found.difference.what()),
            Step::Release(what, _) => format!("-{}", name(&what)),
        });
        steps.collect()
    }

    #[test]
    fn a_path_is_free_before_another_disk_takes_it() {
        let fuse = |disk, running, file| found(disk, "fuse", running, file);
        // Nothing is taken.
        let plain = vec![found("b", "datastore", "x", "1"), fuse("a", "1", "2"), fuse("c", "", "3")];
        assert_eq!(steps(plain), ["b", "a", "c"]);
        // A chain.
        let chain = vec![fuse("a", "1", "2"), fuse("b", "2", "3"), found("c", "read_only", "", "true")];
        assert_eq!(steps(chain), ["b", "a", "c"]);
        let given_up = vec![fuse("a", "", "2"), fuse("b", "2", "")];
        assert_eq!(steps(given_up), ["b", "a"]);
    }

    #[test]
    fn one_disk_of_a_cycle_gives_its_path_up_first() {
        for key in KEYS {
            let one = |disk, running, file| found(disk, key, running, file);
            assert_eq!(steps(vec![one("a", "1", "2"), one("b", "2", "1")]), ["-a", "b", "a"]);
            let three = vec![one("a", "1", "2"), one("b", "2", "3"), one("c", "3", "1")];
            assert_eq!(steps(three), ["-a", "c", "b", "a"]);
            let two = vec![one("a", "1", "2"), one("b", "2", "1"), one("c", "3", "4"), one("d", "4", "3")];
            assert_eq!(steps(two), ["-a", "b", "a", "-c", "d", "c"]);
        }
    }
}
