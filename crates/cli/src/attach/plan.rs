//! The plan of `hob attach` and `hob detach` (docs/decisions/0054): the next step for a disk in a
//! given state.
//!
//! No list of steps is saved. [`next`] examines the state of the VM, of hob and of the record, and
//! returns the one step that leads towards the goal. So the user can repeat an interrupted command,
//! and a repeated step is harmless. To roll back an attachment, hob takes the steps towards
//! [`Goal::Detached`].

use std::fmt;

/// The intended result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// The VM uses hob's disk, which has a cache.
    Attached,
    /// The VM uses its image directly, and hob has no disk of it.
    Detached,
}

/// State of hob's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum HobDisk {
    /// The daemon does not answer.
    Unknown,
    /// The daemon has no disk of this name.
    Absent,
    /// The disk's backing is not locked, and it has no cache.
    Unlocked,
    /// The disk's backing is locked, and it has no cache.
    Locked,
    /// The disk's backing is locked, and it has a cache.
    Cached,
}

/// Target of the VM's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Path {
    /// The VM's requests go to the image file.
    Image,
    /// The VM's requests go to hob.
    Hob,
}

/// State of the image's nodes in QEMU that the VM does not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Spare {
    None,
    /// QEMU has some of the nodes, but not all.
    Part,
    All,
}

/// Disk that the VM uses after its next start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Definition {
    /// hob does not change the VM's definition.
    None,
    Image,
    Hob,
}

/// State on which the next step depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    /// True if the record file of this disk exists (`record.rs`).
    pub(super) recorded: bool,
    pub(super) disk: HobDisk,
    /// True if QEMU has a node that is connected to hob.
    pub(super) node: bool,
    pub(super) path: Path,
    /// Block nodes of QEMU that the VM does not use while its requests go to hob ([`Path::Hob`]).
    pub(super) spare: Spare,
    /// True if the VM's CPUs run.
    pub(super) running: bool,
    /// True if QEMU has the object that marks a pause of the VM by hob. hob creates the object
    /// before the pause and deletes it after the pause.
    pub(super) marked: bool,
    /// True while a block job of hob runs in QEMU.
    pub(super) job: bool,
    pub(super) definition: Definition,
}

impl State {
    /// Returns the state after the removal of hob's disk and of the attachment's record. QEMU does
    /// not use the disk.
    pub(super) fn without_hob(self) -> State {
        State { recorded: false, disk: HobDisk::Absent, ..self }
    }
}

/// Defines the steps, with their descriptions for the plan and for messages.
macro_rules! steps {
    ($($Step:ident $words:literal)+) => {
        /// A step. Each is atomic for the VM, and repeating it is harmless.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Step {
            $($Step,)+
        }

        impl fmt::Display for Step {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Step::$Step => $words,)+
                })
            }
        }
    };
}

steps! {
    Record "record the attachment"
    AddDisk "add the disk to hob, without a cache and without the image's lock"
    AddNode "connect QEMU to hob (blockdev-add)"
    Mark "mark in QEMU that hob pauses the VM (object-add)"
    Pause "pause the VM (stop)"
    ToHob "send the VM's requests to hob"
    DeleteSpare "close the image in QEMU (blockdev-del)"
    Lock "lock the image for hob"
    Continue "continue the VM (cont)"
    Unmark "remove the mark (object-del)"
    EnableCache "enable the cache"
    Define "define the VM with hob's disk, for its next start"
    CancelJob "cancel hob's block job (block-job-cancel)"
    DisableCache "write dirty data to the image, and disable the cache"
    Unlock "release the image's lock"
    AddSpare "open the image in QEMU (blockdev-add)"
    ToImage "send the VM's requests to the image"
    DeleteNode "disconnect QEMU from hob (blockdev-del)"
    Undefine "define the VM with its image, for its next start"
    RemoveDisk "remove the disk from hob"
    Forget "delete the record"
}

/// Returns the next step towards `goal`, or `None` if it is reached.
///
/// # Errors
/// Returns [`NoDaemon`] if the next step depends on the state of hob's disk, and the daemon does
/// not answer.
pub(super) fn next(goal: Goal, state: State) -> Result<Option<Step>, NoDaemon> {
    if state.job {
        return Ok(Some(Step::CancelJob));
    }
    let step = match (goal, state.path) {
        (Goal::Attached, Path::Image) => match state {
            State { recorded: false, .. } => Step::Record,
            State { disk: HobDisk::Unknown, .. } => return Err(NoDaemon),
            State { disk: HobDisk::Cached, .. } => Step::DisableCache,
            State { disk: HobDisk::Locked, .. } => Step::Unlock,
            State { disk: HobDisk::Absent, .. } => Step::AddDisk,
            State { node: false, .. } => Step::AddNode,
            State { running: true, marked: false, .. } => Step::Mark,
            State { running: true, .. } => Step::Pause,
            _ => Step::ToHob,
        },
        (Goal::Attached, Path::Hob) => match state {
            State { disk: HobDisk::Unknown, .. } => return Err(NoDaemon),
            State { disk: HobDisk::Absent, .. } => Step::AddDisk,
            State { spare: Spare::Part | Spare::All, .. } => Step::DeleteSpare,
            State { disk: HobDisk::Unlocked, .. } => Step::Lock,
            State { running: false, marked: true, .. } => Step::Continue,
            State { marked: true, .. } => Step::Unmark,
            State { disk: HobDisk::Locked, .. } => Step::EnableCache,
            State { definition: Definition::Image, .. } => Step::Define,
            _ => return Ok(None),
        },
        (Goal::Detached, Path::Hob) => match state {
            State { disk: HobDisk::Unknown, .. } => return Err(NoDaemon),
            State { disk: HobDisk::Absent, .. } => Step::AddDisk,
            // An earlier command paused the VM for another disk, and was killed before the VM
            // continued. The VM continues before the drain of this disk, which can take long.
            State { disk: HobDisk::Cached, running: false, marked: true, .. } => Step::Continue,
            State { disk: HobDisk::Cached, .. } => Step::DisableCache,
            State { running: true, marked: false, .. } => Step::Mark,
            State { running: true, .. } => Step::Pause,
            State { disk: HobDisk::Locked, .. } => Step::Unlock,
            State { spare: Spare::None | Spare::Part, .. } => Step::AddSpare,
            _ => Step::ToImage,
        },
        // The VM continues first: it must not wait for steps that are possible while it runs, or
        // for a daemon that does not answer. The VM's definition names the image only after the
        // image has all data. A disk that was unplugged from the VM also has `Path::Image`, and hob
        // may still have dirty data of it.
        (Goal::Detached, Path::Image) => match state {
            State { running: false, marked: true, .. } => Step::Continue,
            State { marked: true, .. } => Step::Unmark,
            State { node: true, .. } => Step::DeleteNode,
            State { disk: HobDisk::Unknown, .. } => return Err(NoDaemon),
            State { disk: HobDisk::Cached, .. } => Step::DisableCache,
            State { definition: Definition::Hob, .. } => Step::Undefine,
            State { disk: HobDisk::Locked | HobDisk::Unlocked, .. } => Step::RemoveDisk,
            State { recorded: true, .. } => Step::Forget,
            _ => return Ok(None),
        },
    };
    Ok(Some(step))
}

/// The next step needs the daemon, which does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoDaemon;

/// Returns the expected state after a step. `--dry-run` uses this to print the plan.
pub(super) fn after(step: Step, state: State) -> State {
    match step {
        Step::Record => State { recorded: true, ..state },
        Step::AddDisk => State { disk: HobDisk::Unlocked, ..state },
        Step::AddNode => State { node: true, ..state },
        Step::Mark => State { marked: true, ..state },
        Step::Pause => State { running: false, ..state },
        Step::ToHob => State { path: Path::Hob, spare: Spare::All, ..state },
        Step::DeleteSpare => State { spare: Spare::None, ..state },
        Step::Lock => State { disk: HobDisk::Locked, ..state },
        Step::Continue => State { running: true, ..state },
        Step::Unmark => State { marked: false, ..state },
        Step::EnableCache => State { disk: HobDisk::Cached, ..state },
        Step::Define => State { definition: Definition::Hob, ..state },
        Step::Undefine => State { definition: Definition::Image, ..state },
        Step::CancelJob => State { job: false, ..state },
        Step::DisableCache => State { disk: HobDisk::Locked, ..state },
        Step::Unlock => State { disk: HobDisk::Unlocked, ..state },
        Step::AddSpare => State { spare: Spare::All, ..state },
        Step::ToImage => State { path: Path::Image, spare: Spare::None, ..state },
        Step::DeleteNode => State { node: false, ..state },
        Step::RemoveDisk => State { disk: HobDisk::Absent, ..state },
        Step::Forget => State { recorded: false, ..state },
    }
}

/// Returns all steps from `state` to `goal`.
pub(super) fn steps(goal: Goal, mut state: State) -> Result<Vec<Step>, NoDaemon> {
    let mut steps = Vec::new();
    while let Some(step) = next(goal, state)? {
        steps.push(step);
        state = after(step, state);
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Limit for the test: no plan may have more steps.
    const STEPS_MAX: usize = 20;

    const START: State = State {
        recorded: false,
        disk: HobDisk::Absent,
        node: false,
        path: Path::Image,
        spare: Spare::None,
        running: true,
        marked: false,
        job: false,
        definition: Definition::Image,
    };

    /// Returns the states that an interrupted step may leave, besides the states before and after
    /// the step.
    fn half_done(step: Step, state: State) -> Vec<State> {
        match step {
            // QEMU deletes a node of the VM's start together with its last user.
            Step::ToImage => vec![State { job: true, ..state }, State { node: false, ..after(step, state) }],
            Step::ToHob => vec![State { job: true, ..state }],
            Step::DeleteSpare | Step::AddSpare => vec![State { spare: Spare::Part, ..state }],
            _ => Vec::new(),
        }
    }

    /// Returns all states that commands can leave if they are killed after any step, and if the
    /// goal changes between commands.
    fn reachable() -> HashSet<State> {
        let mut states = HashSet::new();
        let plain = State { definition: Definition::None, ..START };
        let mut todo = vec![START, State { running: false, ..START }, plain];
        while let Some(state) = todo.pop() {
            if !states.insert(state) {
                continue;
            }
            for goal in [Goal::Attached, Goal::Detached] {
                if let Some(step) = next(goal, state).unwrap() {
                    todo.push(after(step, state));
                    todo.extend(half_done(step, state));
                }
            }
            // An operator continues the VM by hand.
            todo.push(State { running: true, ..state });
            // The disk is unplugged from the VM.
            todo.push(State { path: Path::Image, spare: Spare::None, ..state });
        }
        states
    }

    #[test]
    fn every_state_leads_to_either_goal() {
        for state in reachable() {
            for goal in [Goal::Attached, Goal::Detached] {
                let mut now = state;
                let mut count = 0;
                while let Some(step) = next(goal, now).unwrap() {
                    now = after(step, now);
                    count += 1;
                    assert!(count <= STEPS_MAX, "{goal:?} is never reached from {state:?}");
                }
                assert!(!now.marked && !now.job, "{state:?} ends as {now:?}");
                match goal {
                    Goal::Attached => {
                        assert_eq!((now.path, now.disk), (Path::Hob, HobDisk::Cached), "{state:?}");
                        assert!(now.recorded && now.node && now.spare == Spare::None, "{state:?}: {now:?}");
                        assert_ne!(now.definition, Definition::Image, "{state:?}");
                    }
                    Goal::Detached => {
                        assert_eq!((now.path, now.disk), (Path::Image, HobDisk::Absent), "{state:?}");
                        assert!(!now.recorded && !now.node, "{state:?}: {now:?}");
                        assert_ne!(now.definition, Definition::Hob, "{state:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn no_step_endangers_data() {
        for state in reachable() {
            for goal in [Goal::Attached, Goal::Detached] {
                let Some(step) = next(goal, state).unwrap() else { continue };
                let said = format!("{step:?} towards {goal:?} in {state:?}");
                match step {
                    // Both QEMU and hob have the image open, so neither may write to it during this
                    // step.
                    Step::ToHob | Step::ToImage => {
                        assert!(!state.running, "{said}");
                        assert_eq!(state.disk, HobDisk::Unlocked, "{said}");
                        assert!(state.node && state.recorded, "{said}");
                    }
                    // QEMU's lock would prevent hob from opening the image.
                    Step::Lock => assert_eq!((state.path, state.spare), (Path::Hob, Spare::None), "{said}"),
                    // hob's lock would prevent QEMU from opening the image.
                    Step::AddSpare => assert_eq!(state.disk, HobDisk::Unlocked, "{said}"),
                    // While the VM runs on hob, hob must hold the lock of the image.
                    Step::Continue if state.path == Path::Hob => {
                        assert!(matches!(state.disk, HobDisk::Locked | HobDisk::Cached), "{said}");
                    }
                    Step::EnableCache => {
                        assert_eq!((state.disk, state.path), (HobDisk::Locked, Path::Hob), "{said}");
                    }
                    // After its next start, the VM would not see the dirty data.
                    Step::Undefine => assert_ne!(state.disk, HobDisk::Cached, "{said}"),
                    Step::DeleteNode | Step::RemoveDisk | Step::Forget => {
                        assert_eq!(state.path, Path::Image, "{said}");
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn a_vm_that_was_paused_stays_paused() {
        let paused = State { running: false, ..START };
        for goal in [Goal::Attached, Goal::Detached] {
            let begun = steps(Goal::Attached, paused).unwrap();
            let state = begun.into_iter().fold(paused, |state, step| after(step, state));
            assert!(!steps(goal, state).unwrap().contains(&Step::Continue));
        }
    }

    #[test]
    fn a_drain_does_not_keep_the_vm_paused() {
        let mut state = State {
            recorded: true,
            disk: HobDisk::Cached,
            node: true,
            path: Path::Hob,
            running: false,
            marked: true,
            ..START
        };
        for expected in [Step::Continue, Step::DisableCache, Step::Pause] {
            assert_eq!(next(Goal::Detached, state), Ok(Some(expected)));
            state = after(expected, state);
        }
        // hob has not paused this VM.
        let paused = State { disk: HobDisk::Cached, running: false, marked: false, ..state };
        assert_eq!(next(Goal::Detached, paused), Ok(Some(Step::DisableCache)));
    }

    /// While the guest is paused, only steps that would be unsafe in a running VM are carried out.
    #[test]
    fn the_pause_has_no_other_steps() {
        let attached = State {
            recorded: true,
            disk: HobDisk::Cached,
            node: true,
            path: Path::Hob,
            definition: Definition::Hob,
            ..START
        };
        for (goal, state, expected) in [
            (Goal::Attached, START, [Step::ToHob, Step::DeleteSpare, Step::Lock]),
            (Goal::Detached, attached, [Step::Unlock, Step::AddSpare, Step::ToImage]),
        ] {
            let steps = steps(goal, state).unwrap();
            let after_pause = steps.into_iter().skip_while(|step| *step != Step::Pause).skip(1);
            let paused: Vec<Step> = after_pause.take_while(|step| *step != Step::Continue).collect();
            assert_eq!(paused, expected, "{goal:?}");
        }
    }

    #[test]
    fn without_the_daemon_a_guest_that_uses_its_image_continues() {
        let state = State {
            recorded: true,
            disk: HobDisk::Unknown,
            node: true,
            running: false,
            marked: true,
            ..START
        };
        let mut now = state;
        let mut done = Vec::new();
        while let Ok(Some(step)) = next(Goal::Detached, now) {
            done.push(step);
            now = after(step, now);
        }
        assert_eq!(done, [Step::Continue, Step::Unmark, Step::DeleteNode]);
        assert_eq!(next(Goal::Detached, now), Err(NoDaemon));
    }
}
