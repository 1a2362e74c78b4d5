//! hob is killed while it serves an image, with or without the image's `qemu-nbd`. Guests get a
//! report of lost writes, and only then.

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use conformance::data::empty_file;
use conformance::nbd_client::Client;
use conformance::process::{Process, alive, descendants};
use conformance::scratch::wait_for;
use conformance::{Hob, MIB, Scratch, Serve, Tool};
use rustix::process::{Pid, Signal, kill_process};

/// The processes that are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Hob,
    HobAndQemuNbd,
}

/// Creates an image of 64 MiB and returns its path.
fn image(scratch: &Scratch) -> String {
    let image = scratch.text("disk.qcow2");
    Tool::new("qemu-img").args(["create", "-q", "-f", "qcow2", &image, "64M"]).run();
    image
}

/// Kills hob while its `qemu-nbd` is stopped. The kernel then sends SIGTERM to `qemu-nbd`, which a
/// stopped process does not handle. Returns the process id of `qemu-nbd`.
fn kill_with_stopped_server(hob: &mut Process) -> u32 {
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let found = descendants(hob.pid()).into_iter().find(|&pid| name(pid).trim() == "qemu-nbd");
    let server = found.expect("hob opens an image through a qemu-nbd of its own");
    send(server, Signal::STOP);
    wait_for("the stop of qemu-nbd", || {
        let stat = std::fs::read_to_string(format!("/proc/{server}/stat")).unwrap();
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
    });
    hob.kill();
    server
}

fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

fn kill(hob: &mut Process, killed: Killed) {
    match killed {
        Killed::Hob => hob.kill(),
        Killed::HobAndQemuNbd => {
            let server = kill_with_stopped_server(hob);
            send(server, Signal::KILL);
            wait_for("the end of qemu-nbd", || !alive(server));
        }
    }
}

/// Returns for two flushes in a row whether they succeed.
fn flushes(client: &mut Client) -> [bool; 2] {
    [client.flush().is_ok(), client.flush().is_ok()]
}

/// Checks that no guest gets a report, and that the disk has a block of 4 KiB of `byte` at `offset`.
/// Stops hob.
#[track_caller]
fn assert_stored(hob: Hob, offset: u64, byte: u8) {
    assert_eq!(flushes(&mut hob.connect()), [true, true], "nothing is lost");
    assert_eq!(hob.connect().read(offset, 4096).unwrap(), [byte; 4096]);
    hob.stop();
}

/// Returns the names of the files that mark disks with unflushed changes.
fn marks(scratch: &Scratch) -> Vec<String> {
    let names = std::fs::read_dir(scratch.dir()).unwrap().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("hob-unflushed-")).collect()
}

/// `hob serve` has no state file, so the mark alone keeps the report.
#[test]
fn a_kill_of_hob_and_its_qemu_nbd_is_reported_by_one_failed_flush() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let after = |killed: Killed, change: &mut dyn FnMut(&mut Client)| {
        let serve = Serve::disk(&image);
        let mut hob = serve.start(&scratch);
        change(&mut hob.connect());
        kill(&mut hob.process, killed);
        serve.start(&scratch)
    };

    let hob = after(Killed::HobAndQemuNbd, &mut |client| client.write(0, &[1; 4096]).unwrap());
    assert_eq!(flushes(&mut hob.connect()), [false, true], "the write may be lost");
    assert_eq!(flushes(&mut hob.connect()), [true, true], "one guest wrote");
    hob.stop();

    let hob = after(Killed::HobAndQemuNbd, &mut |client| {
        client.write(0, &[2; 4096]).unwrap();
        client.flush().unwrap();
    });
    assert_stored(hob, 0, 2);

    let hob = after(Killed::Hob, &mut |client| client.write(1 << 20, &[3; 4096]).unwrap());
    // qemu-nbd has stored the write.
    assert_stored(hob, 1 << 20, 3);

    // The second kill comes before a guest has received the report. The qemu-nbd of the second hob
    // stores nothing that the first one has lost.
    let mut hob = after(Killed::HobAndQemuNbd, &mut |client| client.write(2 << 20, &[4; 4096]).unwrap());
    kill(&mut hob.process, Killed::Hob);
    let hob = Serve::disk(&image).start(&scratch);
    assert_eq!(flushes(&mut hob.connect()), [false, true], "the report survives the second kill");
    hob.stop();
    assert!(marks(&scratch).is_empty(), "a disk that was closed has no mark: {:?}", marks(&scratch));
}

/// A write that is dirty data on flash is not lost together with the `qemu-nbd`.
#[test]
fn a_write_that_flash_has_is_not_reported() {
    let scratch = Scratch::new();
    let serve = Serve::disk(&image(&scratch)).cached(&scratch.path("pool"), "64M", "4K");
    let serve = serve.arg("--mode", "write-back");
    let mut hob = serve.start(&scratch);
    hob.connect().write(0, &[1; 4096]).unwrap();
    kill(&mut hob.process, Killed::HobAndQemuNbd);
    let hob = serve.start(&scratch);
    assert_stored(hob, 0, 1);
}

/// Continues a stopped `qemu-nbd` after a second.
fn resume_later(server: u32) -> JoinHandle<()> {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        send(server, Signal::CONT);
    })
}

#[test]
fn a_new_hob_waits_until_a_former_qemu_nbd_has_stored_its_changes() {
    let scratch = Scratch::new();
    let serve = Serve::disk(&image(&scratch));
    let mut hob = serve.start(&scratch);
    hob.connect().write(0, &[1; 4096]).unwrap();
    let slow = resume_later(kill_with_stopped_server(&mut hob.process));
    let hob = serve.start(&scratch);
    slow.join().unwrap();
    assert_stored(hob, 0, 1);
}

/// A hob with another disk, which starts earlier, ends the former `qemu-nbd`.
#[test]
fn a_new_hob_waits_until_another_hob_has_ended_the_former_qemu_nbd() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let serve = Serve::disk(&image(&scratch));
    let mut hob = serve.start(&scratch);
    hob.connect().write(0, &[1; 4096]).unwrap();
    let server = kill_with_stopped_server(&mut hob.process);
    let line = std::fs::read_to_string(format!("/proc/{server}/cmdline")).unwrap();
    let socket = PathBuf::from(line.split('\0').skip_while(|word| *word != "--socket").nth(1).unwrap());
    empty_file(&other.path("disk.img"), MIB);
    let _other = Serve::disk(&other.text("disk.img")).launch(&other);
    wait_for("the other hob", || socket.with_file_name("remover").symlink_metadata().is_ok());
    let slow = resume_later(server);
    let hob = serve.start(&scratch);
    slow.join().unwrap();
    assert_stored(hob, 0, 1);
}

#[test]
fn a_daemon_reports_only_what_a_killed_qemu_nbd_has_lost() {
    let scratch = Scratch::new();
    scratch.configure(&format!("[[disk]]\nname = \"vm\"\nbacking = {:?}\n", image(&scratch)));
    for (killed, content) in [(Killed::Hob, 1_u8), (Killed::HobAndQemuNbd, 2), (Killed::Hob, 3)] {
        let mut daemon = scratch.start_daemon();
        let mut guest = scratch.connect_when_served("vm");
        let offset = u64::from(content) << 20;
        guest.write(offset, &[content; 4096]).unwrap();
        kill(&mut daemon.process, killed);
        drop((guest, daemon));
        let daemon = scratch.start_daemon();
        let mut guest = scratch.connect_when_served("vm");
        assert_eq!(flushes(&mut guest), [killed == Killed::Hob, true], "{killed:?}, {content}");
        if killed == Killed::Hob {
            assert_eq!(guest.read(offset, 4096).unwrap(), [content; 4096]);
        }
        drop(guest);
        daemon.stop();
        assert!(marks(&scratch).is_empty(), "a disk that was closed has no mark: {:?}", marks(&scratch));
    }
}
