//! The state file: written completely, read again, and refused if it is invalid.

use hob_control::{Export, Qos};
use hob_engine::command::{Copies, Layout, Mode};
use hob_engine::granularity::Fill;
use hob_engine::preset::Verify;
use hob_storage::backing::{ChangeToken, Role};

use super::*;

fn example() -> State {
    State {
        pools: vec![PoolState {
            name: "default".into(),
            devices: vec!["/nvme/a".into(), "/nvme/b".into()],
            devices_out: vec!["/nvme/b".into()],
            peers: vec![],
            segment_size: Size(16 << 20),
            uuid: Some("01234567-89ab-4cde-8f01-23456789abcd".into()),
            device_ids: Some(2),
            flash_writes: None,
            is_unseen: true,
        }],
        disks: vec![DiskState {
            flush_failures_owed: 1,
            in_memory: Some("0000000000000000000000000000002a".parse().unwrap()),
            is_new: true,
            backing_timeout: Some("90s".parse().expect("it is a duration")),
            stripe: Some(Size(192 << 10)),
            generation: Some(7),
            share_parent: Some(ShareSpec { cache: Some(Size(1 << 30)), disk: Some("golden".into()) }),
            for_clones: false,
            migration: None,
            name: "vm".into(),
            backing: "/vm.img".into(),
            backing_device: Some("device-mapper LVM-abc".into()),
            image: Some(ImageSpec {
                format: Some(FormatName(Format::Qcow2)),
                files: Some(vec![FileSpec {
                    path: "/base.raw".into(),
                    format: FormatName(Format::Raw),
                    role: Role::Backing,
                    identity: Some("inode 7 created at 1.000000002".into()),
                }]),
            }),
            read_only: false,
            unlocked: true,
            vhost_user: Some("/run/vm.sock".into()),
            exports: vec![Export {
                name: "vm-backup".into(),
                read_only: true,
                no_promote: true,
                fuse: Some("/run/vm-backup.img".into()),
                vhost_user: Some("/run/vm-backup.sock".into()),
            }],
            bitmaps: vec![BitmapSpec {
                name: "daily".to_owned(),
                granularity: Size(65536),
                frozen: true,
                everything: Some("it was lost".to_owned()),
            }],
            fuse: Some("/run/vm.img".into()),
            device: true,
            cache: Some(CacheSpec {
                pool: "default".into(),
                size: Size(64 << 20),
                block_size: Size(4096),
                policy: "s3-fifo".into(),
                mode: Mode::WriteBack,
                layout: Layout::Split { read_permille: 700 },
                admission: "nth-access:3+not-sequential:512K".parse().unwrap(),
                fill: Fill::Auto,
                destage: DestageSpec { dirty_start: 24, ordered: true, ..DestageSpec::default() },
                copies: Copies::TwoOfDirty,
                ram: Size(8 << 20),
                verify: Verify::Trust,
                journal: Some(JournalSpec {
                    owner: CacheOwner(0xF123_4567_89AB_CDEF_0123_4567_89AB_CDEF),
                    ring: 7,
                    lost_ring: 6,
                    discarded_ring: 5,
                    clean_ring: 7,
                    closed: Some(Closed { size_bytes: 512, modified_ns: -1 }),
                    evidence: Some(ChangeToken(0x0123_4567_89AB_CDEF_0123_4567_89AB_CDEF)),
                    used: None,
                    foreign: true,
                    written: 1,
                    unused: 3,
                    ended: false,
                    mode_unknown: false,
                }),
                shared: Some(SharedSize { min: Size(1 << 30), pin: true, ..SharedSize::default() }),
            }),
            datastore: Some("array1".into()),
            qos: Some(DiskQosSpec { policy: Some("gold".into()), own: Qos::default() }),
        }],
        policies: vec![PolicyState { name: "gold".into(), qos: Qos { shares: 2000, ..Qos::default() } }],
        failed_tasks: vec![FailedTask {
            what: "disk resize".into(),
            subject: "vm".into(),
            error: "no luck".into(),
        }],
        datastores: vec![DatastoreState { control: ControlSpec::Auto, ..DatastoreState::new("array1") }],
        disks_removed: vec!["old".into()],
        ..State::default()
    }
}

#[test]
fn what_is_saved_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let (store, state) = Store::open(&dir.path().join("new/sub")).unwrap();
    assert_eq!(state, State::default());
    store.save(&example()).unwrap();
    drop(store);
    let (_store, state) = Store::open(&dir.path().join("new/sub")).unwrap();
    assert_eq!(state, example());
}

/// A killed daemon may keep its lock for a moment, as between the fork and the exec of a child
/// process.
#[test]
fn a_daemon_that_is_just_ending_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path()).unwrap();
    assert!(Store::open_now(dir.path()).unwrap_err().to_string().contains("another hob daemon"));
    let ends = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(store);
    });
    Store::open(dir.path()).unwrap();
    ends.join().unwrap();
}

#[test]
fn a_file_without_devices_out_has_none() {
    let new = serde_json::to_string(&example()).unwrap();
    let old = new.replace(r#""devices_out":["/nvme/b"],"#, "");
    assert_ne!(old, new);
    assert!(parse(old.as_bytes()).unwrap().pools[0].devices_out.is_empty());
}

#[test]
fn a_cache_of_an_older_file_is_volatile_and_writes_through() {
    let old = r#"{"version":1,"pools":[],"disks":[{"name":"vm","backing":"/vm.img","read_only":false,
        "cache":{"pool":"p","size":1048576,"block_size":4096,"policy":"lru"}}]}"#;
    let spec = parse(old.as_bytes()).unwrap().disks[0].cache.clone().unwrap();
    assert_eq!((spec.mode, spec.layout, spec.copies), (Mode::WriteThrough, Layout::Unified, Copies::One));
    assert_eq!((spec.admission, spec.journal), (hob_engine::admission::Admission::default(), None));
    assert_eq!((spec.destage, spec.fill), (DestageSpec::default(), Fill::Sectors));
}

#[test]
fn a_persistent_cache_without_its_mode_is_refused() {
    let mut file = serde_json::to_value(example()).unwrap();
    let cache = file["disks"][0]["cache"].as_object_mut().unwrap();
    assert!(cache.remove("mode").is_some());
    let error = parse(file.to_string().as_bytes()).unwrap_err();
    assert!(error.contains("disk vm: its persistent cache has no mode"), "{error}");
    let cache = file["disks"][0]["cache"].as_object_mut().unwrap();
    assert!(cache.remove("journal").is_some());
    let state = parse(file.to_string().as_bytes()).unwrap();
    assert_eq!(state.disks[0].cache.as_ref().unwrap().mode, Mode::WriteThrough);
}

#[test]
fn a_name_that_appears_twice_is_refused() {
    for (list, part) in
        [("pools", "the pool 'default' appears twice"), ("disks", "the disk 'vm' appears twice")]
    {
        let mut file = serde_json::to_value(example()).unwrap();
        let entry = file[list][0].clone();
        file[list].as_array_mut().unwrap().push(entry);
        let error = parse(file.to_string().as_bytes()).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_users_can_say_of_destaging_survives_the_engines_units() {
    for row in hob_engine::preset::PRESETS {
        assert_eq!(DestageSpec::of(&row.destage).engine(), row.destage, "{}", row.name);
    }
}

#[test]
fn an_owner_is_32_digits() {
    let owner = CacheOwner::random();
    assert_eq!(owner.to_string().parse(), Ok(owner));
    assert_ne!(owner, CacheOwner::random());
    for wrong in ["", "12", "+0123456789abcdef0123456789abcde", "0123456789abcdef0123456789abcdeg"] {
        assert!(wrong.parse::<CacheOwner>().unwrap_err().contains("32 hexadecimal"), "{wrong}");
    }
}

#[test]
fn a_broken_file_is_an_error_and_stays_as_it_is() {
    let good = serde_json::to_string(&example()).unwrap();
    let cut = &good[..good.len() / 2];
    let newer = good.replace("\"version\":1", "\"version\":2,\"new\":true");
    let strange = good.replace("\"read_only\"", "\"readonly\"");
    for broken in ["", "{}", "not json", cut, &newer, &strange, "\u{0}\u{0}"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("state.json");
        fs::write(&file, broken).unwrap();
        let error = Store::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("state.json") && error.contains("is malformed"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), broken);
    }
}

/// Promise 5: a state file is refused if it has numbers that would end a shard with all of its
/// disks.
#[test]
fn numbers_that_no_shard_takes_are_a_broken_file() {
    let own = |qos: Qos| State {
        disks: vec![DiskState {
            qos: Some(DiskQosSpec { policy: None, own: qos }),
            ..DiskState::new("vm".into(), "/vm.img".into(), false)
        }],
        ..State::default()
    };
    let policy =
        |qos: Qos| State { policies: vec![PolicyState { name: "gold".into(), qos }], ..State::default() };
    for (qos, what) in [
        (Qos { shares: 0, ..Qos::default() }, "not '0'"),
        (Qos { shares: 1_000_001, ..Qos::default() }, "1 to 1000000"),
        (Qos { limit: Some(0), ..Qos::default() }, "would permit no I/O"),
        (Qos { flash_limit: Some(0), ..Qos::default() }, "would permit no I/O"),
        (Qos { bytes_limit: Some(Size(0)), ..Qos::default() }, "would permit no I/O"),
        (Qos { reservation: 100_000_001, ..Qos::default() }, "more than 100000000"),
        (Qos { limit: Some(100_000_001), ..Qos::default() }, "more than 100000000"),
        (Qos { limit: Some(5), reservation: 6, ..Qos::default() }, "below the reservation"),
    ] {
        for (state, of) in [(own(qos), "disk vm"), (policy(qos), "storage policy gold")] {
            let error = parse(&serde_json::to_vec(&state).unwrap()).unwrap_err();
            assert!(error.contains(what) && error.contains(of), "{qos:?}: {error}");
        }
    }
    let store = |store: DatastoreState| State { datastores: vec![store], ..State::default() };
    for (wrong, what) in [
        (DatastoreState { control: ControlSpec::Depth(0), ..DatastoreState::new("array") }, "depth"),
        (DatastoreState { latency_ms: 0, ..DatastoreState::new("array") }, "latency"),
    ] {
        let error = parse(&serde_json::to_vec(&store(wrong)).unwrap()).unwrap_err();
        assert!(error.contains(what) && error.contains("datastore array"), "{error}");
    }
    let shares = |dirty_start, dirty_stop, dirty_full| DestageSpec {
        dirty_start,
        dirty_stop,
        dirty_full,
        ..DestageSpec::default()
    };
    for (block_size, destage, what) in [
        (12_288, DestageSpec::default(), "power of two"),
        (2 << 20, DestageSpec::default(), "power of two"),
        (4096, shares(20, 30, 80), "dirty_stop (30)"),
        (4096, shares(90, 30, 80), "dirty_start (90)"),
        (4096, shares(0, 0, 0), "1 to 100 percent"),
    ] {
        let mut state = example();
        let spec = state.disks[0].cache.as_mut().unwrap();
        (spec.block_size, spec.destage) = (Size(block_size), destage);
        let error = parse(&serde_json::to_vec(&state).unwrap()).unwrap_err();
        assert!(error.contains(what) && error.contains("disk vm"), "{error}");
    }
}

#[test]
fn a_save_that_stops_half_way_leaves_the_old_state() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path()).unwrap();
    store.save(&example()).unwrap();
    // The power failed while the next state was being written.
    fs::write(dir.path().join("state.json.new"), b"{\"version\":1,\"po").unwrap();
    drop(store);
    let (store, state) = Store::open(dir.path()).unwrap();
    assert_eq!(state, example());
    store.save(&State::default()).unwrap();
    drop(store);
    assert_eq!(Store::open(dir.path()).unwrap().1, State::default());
}

#[test]
fn a_save_that_fails_says_so_and_leaves_the_old_state() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path()).unwrap();
    store.save(&example()).unwrap();
    fs::remove_file(dir.path().join("state.json.new")).unwrap();
    fs::create_dir(dir.path().join("state.json.new")).unwrap();
    assert!(matches!(store.save(&State::default()), Err(StateError::Io { doing: "save", .. })));
    drop(store);
    assert_eq!(Store::open(dir.path()).unwrap().1, example());
}

#[test]
fn one_daemon_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let (_store, _) = Store::open(dir.path()).unwrap();
    let error = Store::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("another hob daemon"), "{error}");
}

#[test]
fn the_next_state_takes_the_space_of_the_one_before_the_last() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let (store, mut state) = Store::open(dir.path()).unwrap();
    let inode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().ino();
    store.save(&state).unwrap();
    let (first, spare) = (inode("state.json"), inode("state.json.new"));
    let bytes = fs::metadata(dir.path().join("state.json")).unwrap().len();
    for round in 1..4 {
        state.disks.push(DiskState::new(format!("disk{round}"), "/backing".to_owned(), false));
        store.save(&state).unwrap();
        let expected = if round % 2 == 1 { (spare, first) } else { (first, spare) };
        assert_eq!((inode("state.json"), inode("state.json.new")), expected);
        assert_eq!(fs::metadata(dir.path().join("state.json")).unwrap().len(), bytes);
        assert_eq!(State::read(dir.path()).unwrap(), state);
    }
    // A shorter state that overwrites a longer one is read correctly.
    state.disks.truncate(1);
    store.save(&state).unwrap();
    assert_eq!(State::read(dir.path()).unwrap(), state);
    Store::check_writable(dir.path()).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "state, spare and lock");
}

#[test]
fn only_its_owner_reads_the_state() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    // As earlier versions wrote it.
    fs::write(at("lock"), b"").unwrap();
    fs::set_permissions(at("lock"), fs::Permissions::from_mode(0o644)).unwrap();
    let (store, _) = Store::open(directory.path()).unwrap();
    store.save(&example()).unwrap();
    for name in ["lock", "state.json"] {
        assert_eq!(fs::metadata(at(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
}

#[test]
fn the_format_of_an_image_is_kept_and_states_of_earlier_versions_have_none() {
    let mut text = serde_json::to_value(example()).unwrap();
    assert_eq!(text["disks"][0]["image"]["format"], "qcow2");
    assert_eq!(text["disks"][0]["image"]["files"][0]["role"], "backing");
    text["disks"][0]["image"]["format"] = "luks".into();
    assert!(parse(text.to_string().as_bytes()).unwrap_err().contains("luks"));
    text["disks"][0].as_object_mut().unwrap().remove("image");
    let state = parse(text.to_string().as_bytes()).unwrap();
    assert_eq!(state.disks[0].image, None);
    assert_eq!(DiskState::new("vm".into(), "/vm.img".into(), false).image, Some(ImageSpec::default()));
}

#[test]
fn another_host_is_told_a_format_that_the_name_does_not_say() {
    let disk = |backing: &str, format| DiskState {
        image: Some(ImageSpec::of(format)),
        ..DiskState::new("vm".into(), backing.into(), false)
    };
    let told = |backing, format, elsewhere| disk(backing, Some(format)).format_to_say(elsewhere);
    assert_eq!(told("/vm.qcow2", Format::Qcow2, None), None);
    assert_eq!(told("/vm.img", Format::Raw, None), None);
    assert_eq!(told("/vm.img", Format::Qcow2, None).as_deref(), Some("qcow2"));
    assert_eq!(told("/vm.qcow2", Format::Raw, None).as_deref(), Some("raw"));
    assert_eq!(told("/vm.qcow2", Format::Qcow2, Some("/elsewhere")).as_deref(), Some("qcow2"));
    assert_eq!(disk("nbd://h/e", None).format_to_say(None), None);
}
