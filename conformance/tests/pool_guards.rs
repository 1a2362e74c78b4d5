//! Commands that remove a device or a cache from a pool first report what would be lost, and drop
//! dirty data only with `--yes`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use conformance::data::{Noise, empty_file};
use conformance::nbd_client::Client;
use conformance::{Daemon, MIB, Scratch};
use serde_json::Value;

/// Size of the cache's dirty data, bytes.
const DIRTY: u64 = MIB;

/// Returns the status and the body of a request to the control API.
fn api(scratch: &Scratch, method: &str, path: &str) -> String {
    api_with(scratch, method, path, "")
}

/// Sends a request with a body in JSON, like `api`.
fn api_with(scratch: &Scratch, method: &str, path: &str, body: &str) -> String {
    let mut stream = UnixStream::connect(scratch.path("ctl.sock")).unwrap();
    let about = format!("Content-Type: application/json\r\nContent-Length: {}", body.len());
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{about}");
    let request = format!("{head}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Starts a daemon with 1 MiB of dirty data in a cache on two devices.
fn prepare(scratch: &Scratch) -> Daemon {
    scratch.configure("");
    empty_file(&scratch.path("disk.img"), 16 * MIB);
    let daemon = scratch.start_daemon();
    let (one, two) = (scratch.text("flash1"), scratch.text("flash2"));
    daemon.ctl(&["pool", "create", "fast", &one, &two, "--size", "64M", "--segment-size", "1M"]);
    daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("disk.img")]);
    let lazy = ["--mode", "write-back", "--dirty-age-max", "0"];
    daemon.ctl(&[&["cache", "enable", "vm", "--pool", "fast", "--size", "16M"], &lazy[..]].concat());
    let mut client = scratch.connect("vm");
    let mut bytes = vec![0; DIRTY as usize];
    Noise::new(5).fill(&mut bytes);
    client.write(0, &bytes).unwrap();
    client.flush().unwrap();
    daemon
}

#[test]
fn a_cache_of_no_disk_is_discarded_with_its_dirty_data_only_with_yes() {
    let scratch = Scratch::new();
    prepare(&scratch).stop();
    let state = scratch.path("state").join("state.json");
    let mut saved: Value = serde_json::from_slice(&std::fs::read(&state).unwrap()).unwrap();
    saved["disks"] = serde_json::json!([]);
    std::fs::write(&state, serde_json::to_vec(&saved).unwrap()).unwrap();
    let daemon = scratch.start_daemon();
    let owner = daemon.pool("fast")["orphans"][0]["owner"].as_str().unwrap().to_owned();
    let discard = ["pool", "discard-orphan", "fast", &owner];
    let refused = daemon.try_ctl(&discard);
    assert!(
        !refused.success() && refused.stderr.contains("1 MiB of dirty data is lost"),
        "{}",
        refused.all()
    );
    assert!(refused.stderr.contains("--yes"), "{}", refused.all());
    let rehearsed = daemon.try_ctl(&[&discard[..], &["--dry-run", "--yes"]].concat());
    assert!(rehearsed.success() && rehearsed.stderr.contains("1 MiB of dirty data"), "{}", rehearsed.all());
    let path = format!("/v1/pools/fast/orphans/{owner}");
    let answer = api(&scratch, "DELETE", &path);
    assert!(answer.starts_with("HTTP/1.1 409") && answer.contains("discard_dirty=true"), "{answer}");
    assert_eq!(daemon.pool("fast")["orphans"].as_array().unwrap().len(), 1, "nothing was changed");
    let answer = api(&scratch, "DELETE", &format!("{path}?discard_dirty=true"));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(daemon.pool("fast")["orphans"].is_null(), "none is left");
    daemon.stop();
}

#[test]
fn a_device_is_removed_from_a_pool_after_its_caches_were_listed() {
    let scratch = Scratch::new();
    let daemon = prepare(&scratch);
    let (one, two) = (scratch.text("flash1"), scratch.text("flash2"));
    let remove = |device: &str, more: &[&str]| {
        daemon.try_ctl(&[&["pool", "remove-device", "fast", device], more].concat())
    };
    let refused = daemon.try_ctl(&["pool", "create", "fast", &scratch.text("flash3"), "--dry-run"]);
    assert!(!refused.success() && refused.stderr.contains("already exists"), "{}", refused.all());
    let rehearsed = remove(&one, &["--dry-run"]);
    assert!(rehearsed.success() && rehearsed.stderr.contains("vm: its cache moves"), "{}", rehearsed.all());
    assert_eq!(daemon.pool("fast")["devices"].as_array().unwrap().len(), 2, "nothing was changed");
    let removed = remove(&one, &[]);
    assert!(removed.success() && removed.stderr.contains("vm: its cache moves"), "{}", removed.all());
    let rehearsed = remove(&two, &["--dry-run"]);
    assert!(rehearsed.stderr.contains("vm: the cache is emptied"), "{}", rehearsed.all());
    drop(daemon.stop());
    // The device is missing when the daemon starts again, and no other device has its dirty data.
    std::fs::rename(&two, scratch.path("away")).unwrap();
    let daemon = scratch.start_daemon();
    let refused = daemon.try_ctl(&["pool", "remove-device", "fast", &two]);
    assert!(!refused.success() && refused.stderr.contains("dirty data of its cache"), "{}", refused.all());
    let answer = api(&scratch, "DELETE", &format!("/v1/pools/fast/devices?path={two}"));
    assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
    assert_eq!(daemon.pool("fast")["devices"].as_array().unwrap().len(), 1, "nothing was changed");
    std::fs::rename(scratch.path("away"), &two).unwrap();
    daemon.stop();
}

/// `--force` accepts other data on a device, but dirty data of another pool only with `--yes`.
#[test]
fn dirty_data_of_another_pool_is_overwritten_only_with_yes() {
    let scratch = Scratch::new();
    prepare(&scratch).stop();
    std::fs::remove_dir_all(scratch.path("state")).unwrap();
    let daemon = scratch.start_daemon();
    let devices = [scratch.text("flash1"), scratch.text("flash2")];
    let create = ["pool", "create", "new", &devices[0], &devices[1], "--segment-size", "1M", "--force"];
    let refused = daemon.try_ctl(&create);
    assert!(!refused.success() && refused.stderr.contains("1 MiB of dirty data"), "{}", refused.all());
    assert!(refused.stderr.contains("--yes"), "{}", refused.all());
    let rehearsed = daemon.try_ctl(&[&create[..], &["--dry-run", "--yes"]].concat());
    assert!(rehearsed.success() && rehearsed.stderr.contains("1 MiB of dirty data"), "{}", rehearsed.all());
    assert_eq!(daemon.ctl(&["pool", "list", "-o", "json"]).trim(), "[]", "nothing was changed");

    daemon.tell(&format!("pool create other {} --size 32M --segment-size 1M", scratch.text("flash3")));
    for device in &devices {
        let add = ["pool", "add-device", "other", device, "--force"];
        let refused = daemon.try_ctl(&add);
        assert!(!refused.success() && refused.stderr.contains("dirty data"), "{}", refused.all());
    }
    let body = format!("{{\"path\":{:?},\"force\":true}}", devices[0]);
    let answer = api_with(&scratch, "POST", "/v1/pools/other/devices", &body);
    assert!(answer.starts_with("HTTP/1.1 409") && answer.contains("discard_dirty=true"), "{answer}");

    daemon.ctl(&[&create[..], &["--yes"]].concat());
    daemon.stop();
}

/// Without its state, the daemon does not serve the backing's old data, and gives the cache back on
/// command.
#[test]
fn a_lost_state_directory_serves_no_old_data() {
    let scratch = Scratch::new();
    prepare(&scratch).kill();
    std::fs::remove_dir_all(scratch.path("state")).unwrap();
    let config = format!(
        "[[pool]]\nname = \"fast\"\ndevices = [{:?}, {:?}]\nsize = \"64M\"\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = {:?}\n",
        scratch.text("flash1"),
        scratch.text("flash2"),
        scratch.text("disk.img"),
    );
    scratch.configure(&config);
    let daemon = scratch.start_daemon();
    let address = scratch.nbd();
    assert!(Client::connect(&address, "vm").is_err(), "the backing's old data is served");
    let shown = daemon.try_ctl(&["health"]).all();
    assert!(shown.contains("orphan-dirty") && shown.contains("1 MiB of dirty data"), "{shown}");
    let owner = daemon.pool("fast")["orphans"][0]["owner"].as_str().unwrap().to_owned();
    assert!(shown.contains(&format!("hob cache adopt vm {owner}")), "{shown}");
    let refused = daemon.try_ctl(&["disk", "add", "again", "--backing", &scratch.text("disk.img")]);
    assert!(!refused.success(), "{}", refused.all());
    daemon.ctl(&["cache", "adopt", "vm", &owner]);
    let mut expected = vec![0; DIRTY as usize];
    Noise::new(5).fill(&mut expected);
    let read = Client::connect(&address, "vm").unwrap().read(0, DIRTY as u32).unwrap();
    assert!(read == expected, "the guest's flushed data is back");
    assert!(!daemon.try_ctl(&["health"]).all().contains("orphan-dirty"));
    daemon.stop();
}
