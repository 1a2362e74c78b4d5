//! The report of `nbdinfo` (libnbd) about an export: size, features, block sizes, names,
//! allocation.

use conformance::data::{Noise, empty_file, noise_file};
use conformance::nbd_client::{Address, CMD_WRITE, Client, EPERM};
use conformance::scratch::{free_port, wait_for};
use conformance::{Hob, MIB, Scratch, Serve, Tool};
use serde_json::Value;

const SIZE: u64 = 64 * MIB;

fn serve(scratch: &Scratch) -> Serve {
    noise_file(&scratch.path("disk.img"), SIZE, 2);
    Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "4K")
}

#[track_caller]
fn export(hob: &Hob) -> Value {
    let text = Tool::new("nbdinfo").args(["--json", &hob.uri()]).run();
    let info: Value = serde_json::from_str(&text).expect("nbdinfo prints JSON");
    assert_eq!(info["protocol"], "newstyle-fixed", "{text}");
    assert_eq!(info["structured"], true, "{text}");
    info["exports"][0].clone()
}

#[test]
fn the_size_is_the_backing_files_size() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let size = Tool::new("nbdinfo").args(["--size", &hob.uri()]).run();
    assert_eq!(size.trim(), SIZE.to_string());
}

#[test]
fn a_size_that_is_no_multiple_of_4_kib_is_kept() {
    let scratch = Scratch::new();
    let odd = 3 * MIB + 512;
    noise_file(&scratch.path("disk.img"), odd, 2);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "4K").start(&scratch);
    assert_eq!(Tool::new("nbdinfo").args(["--size", &hob.uri()]).run().trim(), odd.to_string());
    let tail = hob.connect().read(odd - 512, 512).expect("the last sector");
    let file = scratch.read("disk.img");
    conformance::data::assert_same(&tail, &file[file.len() - 512..], odd - 512, "disk and backing");
}

#[test]
fn every_ability_is_announced() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let export = export(&hob);
    assert_eq!(export["is_read_only"], false);
    for ability in [
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_fast_zero",
        "can_df",
        "can_cache",
        "can_multi_conn",
    ] {
        assert_eq!(export[ability], true, "{ability} in {export}");
    }
    let contexts = export["contexts"].as_array().expect("a list of contexts");
    assert!(contexts.iter().any(|c| c == "base:allocation"), "{export}");
}

#[test]
fn block_sizes_make_sense() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let export = export(&hob);
    let size = |name: &str| export[name].as_u64().unwrap_or_else(|| panic!("{name} in {export}"));
    let (minimum, preferred, maximum) =
        (size("block_size_minimum"), size("block_size_preferred"), size("block_size_maximum"));
    assert!(minimum <= 512, "guests with 512-byte sectors must be served; minimum {minimum}");
    assert!(preferred.is_power_of_two() && preferred >= 4096, "preferred {preferred}");
    assert!(maximum >= 32 * MIB, "requests up to 32 MiB; maximum {maximum}");
}

#[test]
fn the_list_names_the_export_and_the_empty_name_is_the_same_disk() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).arg("--name", "disk").start(&scratch);
    let list = Tool::new("nbdinfo").args(["--list", "--json", &hob.address().uri("")]).run();
    let list: Value = serde_json::from_str(&list).expect("nbdinfo prints JSON");
    let names: Vec<&str> =
        list["exports"].as_array().unwrap().iter().filter_map(|e| e["export-name"].as_str()).collect();
    assert!(names.contains(&"disk"), "{names:?}");
    let size = Tool::new("nbdinfo").args(["--size", &hob.address().uri("")]).run();
    assert_eq!(size.trim(), SIZE.to_string());
}

#[test]
fn an_unknown_export_name_is_refused_without_side_effects() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    Tool::new("nbdinfo").args(["--size", &hob.address().uri("nobody")]).run_failing();
    let refused = Tool::new("qemu-img").args(["info", &hob.address().uri("nobody")]).run_failing().stderr;
    assert!(refused.contains(r#"there is no export "nobody"; this server has "disk""#), "{refused}");
    Tool::new("nbdinfo").args(["--size", &hob.uri()]).run();
}

#[test]
fn a_read_only_export_is_announced_as_such_and_refuses_writes() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).flag("--read-only").start(&scratch);
    assert_eq!(export(&hob)["is_read_only"], true);
    let mut client = hob.connect();
    let data = Noise::new(1).bytes(4096);
    assert_eq!(client.call(0, CMD_WRITE, 0, 4096, &data).unwrap(), EPERM);
    client.read(0, 4096).expect("the connection goes on");
}

#[test]
fn tcp_serves_as_well() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).tcp().start(&scratch);
    assert_eq!(Tool::new("nbdinfo").args(["--size", &hob.uri()]).run().trim(), SIZE.to_string());
    assert!(matches!(hob.address(), Address::Tcp(port) if *port != free_port()));
}

#[test]
fn the_map_covers_the_disk_finds_the_hole_and_never_calls_data_a_hole() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk.img");
    empty_file(&disk, SIZE);
    let data = 8 * MIB..9 * MIB;
    let file = std::fs::OpenOptions::new().write(true).open(&disk).unwrap();
    let noise = Noise::new(3).bytes(MIB as usize);
    std::os::unix::fs::FileExt::write_all_at(&file, &noise, data.start).unwrap();
    file.sync_all().unwrap();
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "4K").start(&scratch);
    let map = Tool::new("nbdinfo").args(["--map", "--json", &hob.uri()]).run();
    let map: Value = serde_json::from_str(&map).expect("nbdinfo prints JSON");
    let (mut next, mut holes) = (0, 0);
    for extent in map.as_array().expect("a list of extents") {
        let (offset, length) = (extent["offset"].as_u64().unwrap(), extent["length"].as_u64().unwrap());
        assert_eq!(offset, next, "gap in {map}");
        next += length;
        if extent["type"].as_u64().unwrap() != 0 {
            holes += length;
            let meets_data = offset < data.end && data.start < offset + length;
            assert!(!meets_data, "data called a hole: {extent}");
        }
    }
    assert_eq!(next, SIZE);
    assert!(holes >= SIZE / 2, "only {holes} of {} bytes of hole were found", SIZE - MIB);
}

/// The system chooses a port instead of port 0. Only the log names the port.
#[test]
fn the_log_names_the_port_that_the_system_chose() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).arg("--listen", "tcp:127.0.0.1:0").start(&scratch);
    let port = || {
        let log = hob.process.stderr();
        let (_, rest) = log.split_once("NBD clients connect to tcp:127.0.0.1:")?;
        rest.split_whitespace().next()?.parse::<u16>().ok()
    };
    wait_for("the port in the log", || port().is_some());
    let port = port().expect("the log names it");
    Client::connect(&Address::Tcp(port), "disk").expect("clients can connect to the port");
    hob.stop();
}
