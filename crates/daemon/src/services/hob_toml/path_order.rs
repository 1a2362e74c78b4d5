//! Orders the changes of socket and file paths. A disk or export must release a path before another
//! disk or export can get the path. Disks that exchange their paths need an additional step: one of
//! them releases its path before the others get new paths.

use hob_control::{ConfigDifference, DiskPatch, Export};

use super::changes::Change;
use super::differences::Found;

/// Keys of the disk settings whose values are paths on this host.
const KEYS: [&str; 2] = ["vhost_user", "fuse"];

/// One step of applying hob.toml.
pub(super) enum Step {
    /// Makes a change.
    Make(Found),
    /// Takes the paths from a disk or an export, which gets its new paths in the step
    /// [`Move`](Self::Move) with the same number.
    Release(usize, Change),
    /// Gives new paths to a disk or an export that has released its present paths. If that fails,
    /// `back` restores the former paths.
    Move { number: usize, found: Found, back: Box<Change> },
}

/// A change of paths.
struct Move {
    number: usize,
    found: Found,
    /// The change that restores the object's present paths. `None` until hob has released these
    /// paths for another object.
    back: Option<Change>,
}

/// Returns the changes as steps. The steps release each path before another disk or export gets it.
/// The given order is kept unless a change takes a path that a disk or an export has. Changes for
/// which `is_made` returns false come last, because they release no path.
pub(super) fn in_order(found: Vec<Found>, is_made: impl Fn(&Found) -> bool) -> Vec<Step> {
    let (made, left): (Vec<Found>, Vec<Found>) = found.into_iter().partition(is_made);
    let takes_any = (0..made.len()).any(|at| {
        let mut others = made.iter().enumerate().filter(|(other, _)| *other != at);
        others.any(|(_, other)| takes_path_of(&made[at], other))
    });
    if !takes_any {
        return made.into_iter().chain(left).map(Step::Make).collect();
    }
    let (moves, others): (Vec<Found>, Vec<Found>) = made.into_iter().partition(is_move);
    let moves = moves.into_iter().enumerate();
    let mut moves: Vec<Move> = moves.map(|(number, found)| Move { number, found, back: None }).collect();
    let mut steps = Vec::new();
    while !moves.is_empty() {
        let next = first_free(&moves).map(|at| moves.remove(at));
        match next.or_else(|| release_first(&mut moves, &mut steps)) {
            Some(Move { number, found, back: Some(back) }) => {
                steps.push(Step::Move { number, found, back: Box::new(back) });
            }
            Some(Move { found, back: None, .. }) => steps.push(Step::Make(found)),
            None => {}
        }
    }
    steps.extend(others.into_iter().chain(left).map(Step::Make));
    steps
}

/// Returns true if a change gives a disk a path that one of the other changes releases.
pub(super) fn takes_path(it: &Found, others: &[Found]) -> bool {
    others.iter().any(|other| takes_path_of(it, other))
}

fn takes_path_of(it: &Found, other: &Found) -> bool {
    let given_up = old_paths(other);
    new_paths(it).iter().any(|path| given_up.contains(path))
}

/// Finds the first change whose disk or export still has its present paths, adds a step that
/// releases these paths, and returns `None`. If there is no such change, removes and returns the
/// first change, so that the caller makes progress.
fn release_first(moves: &mut Vec<Move>, steps: &mut Vec<Step>) -> Option<Move> {
    for it in moves.iter_mut().filter(|it| it.back.is_none()) {
        if let Some((release, back)) = release(&mut it.found) {
            steps.push(Step::Release(it.number, release));
            it.back = Some(back);
            return None;
        }
    }
    Some(moves.remove(0))
}

/// Returns the change that releases the present paths, and the change that restores them; `None` if
/// there are no paths. The change of `found`, which is made later, then only sets the new paths.
fn release(found: &mut Found) -> Option<(Change, Change)> {
    if old_paths(found).is_empty() {
        return None;
    }
    match found.change.clone()? {
        Change::PatchDisk(..) => {
            let difference = &found.difference;
            Some((set_path(difference, None)?, set_path(difference, difference.running.as_deref())?))
        }
        Change::ReplaceExport { disk, before, wanted } => {
            found.change = Some(Change::AddExport(disk.clone(), wanted));
            Some((Change::RemoveExport(disk.clone(), before.clone()), Change::AddExport(disk, before)))
        }
        _ => None,
    }
}

/// Returns the change that sets or removes a path of a disk; `None` if the difference is not in a
/// path.
fn set_path(difference: &ConfigDifference, path: Option<&str>) -> Option<Change> {
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
    let is_blocked = |at: usize| {
        let mut others = moves.iter().enumerate().filter(|(other, it)| *other != at && it.back.is_none());
        others.any(|(_, other)| takes_path_of(&moves[at].found, &other.found))
    };
    (0..moves.len()).find(|at| !is_blocked(*at))
}

fn is_move(it: &Found) -> bool {
    !old_paths(it).is_empty() || !new_paths(it).is_empty()
}

/// Returns the paths that are no longer used after a change.
fn old_paths(it: &Found) -> Vec<&str> {
    match &it.change {
        Some(Change::RemoveExport(_, before) | Change::ReplaceExport { before, .. }) => paths_of(before),
        _ => path_of_disk(it, it.difference.running.as_deref()),
    }
}

/// Returns the paths that a change takes.
fn new_paths(it: &Found) -> Vec<&str> {
    match &it.change {
        Some(Change::AddExport(_, wanted) | Change::ReplaceExport { wanted, .. }) => paths_of(wanted),
        _ => path_of_disk(it, it.difference.file.as_deref()),
    }
}

fn paths_of(export: &Export) -> Vec<&str> {
    [&export.fuse, &export.vhost_user].into_iter().filter_map(Option::as_deref).collect()
}

/// Returns `path`, one side of a difference, if the difference is in a path of a disk.
fn path_of_disk<'a>(it: &Found, path: Option<&'a str>) -> Vec<&'a str> {
    let is_path = KEYS.contains(&it.difference.key.as_str());
    let is_moved = is_path && matches!(it.change, Some(Change::PatchDisk(..)));
    path.filter(|_| is_moved).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use hob_control::ConfigRemedy;

    use super::*;

    fn difference(disk: &str, key: &str, running: &str, file: &str) -> ConfigDifference {
        let path = |path: &str| Some(path.to_owned()).filter(|path| !path.is_empty());
        ConfigDifference {
            subject: format!("disk {disk}"),
            key: key.to_owned(),
            file: path(file),
            running: path(running),
            by: ConfigRemedy::Apply,
            action: String::new(),
        }
    }

    fn found(disk: &str, key: &str, running: &str, file: &str) -> Found {
        let change = Change::PatchDisk(disk.to_owned(), DiskPatch::default());
        Found { difference: difference(disk, key, running, file), change: Some(change) }
    }

    /// Returns a change of an export of the disk `vm` with these sockets. An empty text stands for
    /// an export that does not exist.
    fn export(name: &str, running: &str, file: &str) -> Found {
        let side = |path: &str| Export {
            name: name.to_owned(),
            vhost_user: Some(path.to_owned()),
            ..Export::default()
        };
        let disk = "vm".to_owned();
        let change = match (running, file) {
            ("", _) => Change::AddExport(disk, side(file)),
            (_, "") => Change::RemoveExport(disk, side(running)),
            _ => Change::ReplaceExport { disk, before: side(running), wanted: side(file) },
        };
        Found { difference: difference("vm", "export", running, file), change: Some(change) }
    }

    fn name(change: Option<&Change>) -> String {
        match change {
            Some(Change::PatchDisk(disk, _)) => disk.clone(),
            Some(Change::AddExport(_, export) | Change::RemoveExport(_, export)) => export.name.clone(),
            Some(Change::ReplaceExport { wanted, .. }) => wanted.name.clone(),
            other => format!("{other:?}"),
        }
    }

    /// Returns the steps as the names of disks and exports, and `-` before a release.
    fn steps_of(found: Vec<Found>, is_made: impl Fn(&Found) -> bool) -> Vec<String> {
        let steps = in_order(found, is_made).into_iter().map(|step| match step {
            Step::Make(found) | Step::Move { found, .. } => name(found.change.as_ref()),
            Step::Release(_, change) => format!("-{}", name(Some(&change))),
        });
        steps.collect()
    }

    fn steps(found: Vec<Found>) -> Vec<String> {
        steps_of(found, |_| true)
    }

    #[test]
    fn a_path_is_free_before_another_disk_takes_it() {
        let fuse = |disk, running, file| found(disk, "fuse", running, file);
        // No change takes a path that another object has.
        let plain = vec![found("b", "datastore", "x", "1"), fuse("a", "1", "2"), fuse("c", "", "3")];
        assert_eq!(steps(plain), ["b", "a", "c"]);
        // A chain: `a` gets the path of another object only after that object has got a new path.
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

    #[test]
    fn exports_take_paths_that_other_exports_and_disks_give_up() {
        let disk = |running, file| found("disk", "vhost_user", running, file);
        assert_eq!(steps(vec![export("a", "", "1"), export("b", "1", "")]), ["b", "a"]);
        assert_eq!(steps(vec![export("a", "1", "2"), export("b", "2", "3")]), ["b", "a"]);
        assert_eq!(steps(vec![export("a", "", "1"), disk("1", "2")]), ["disk", "a"]);
        assert_eq!(steps(vec![disk("1", "2"), export("a", "2", "")]), ["a", "disk"]);
        // An export that keeps its path takes it from no other one.
        assert_eq!(steps(vec![export("a", "1", "1"), export("b", "2", "2")]), ["a", "b"]);
    }

    #[test]
    fn an_export_of_a_cycle_is_removed_and_added_again() {
        let swap = || vec![export("a", "1", "2"), export("b", "2", "1")];
        assert_eq!(steps(swap()), ["-a", "b", "a"]);
        let mut order = in_order(swap(), |_| true);
        let Some(Step::Move { number: 0, found, back }) = order.pop() else { panic!("the last step") };
        let socket = |change: Option<&Change>| match change {
            Some(Change::AddExport(_, export)) => export.vhost_user.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(socket(found.change.as_ref()).as_deref(), Some("2"));
        assert_eq!(socket(Some(back.as_ref())).as_deref(), Some("1"));
        let with_disk = vec![export("a", "1", "2"), found_disk("2", "1")];
        assert_eq!(steps(with_disk), ["-a", "disk", "a"]);
        // No object loses a path for a change that hob does not make.
        let left = steps_of(swap(), |it| it.difference.running.as_deref() != Some("2"));
        assert_eq!(left, ["a", "b"]);
    }

    fn found_disk(running: &str, file: &str) -> Found {
        found("disk", "vhost_user", running, file)
    }
}
