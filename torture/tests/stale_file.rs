//! hob on a file of a network filesystem that answers ESTALE: the guest waits until the file can be opened again.
//! These tests need root and /dev/fuse.

use std::sync::Arc;
use std::time::{Duration, Instant};

use conformance::hob::Serve;
use conformance::nbd_client::Client;
use conformance::scratch::wait_until;
use conformance::{Hob, MIB, Scratch};
use torture::files::{File, Files};
use torture::medium::Medium;

const OUTAGE: Duration = Duration::from_secs(3);

struct Stage {
    hob: Hob,
    client: Client,
    file: Arc<File>,
    _files: Files,
    _scratch: Scratch,
}

fn stage() -> Stage {
    let scratch = Scratch::new();
    let files = Files::mount(&scratch.path("mnt"), 1).expect("this test needs root and /dev/fuse");
    let file = files.add("disk.img", Medium::new(8 * MIB, 1));
    let hob = Serve::disk(&scratch.text("mnt/disk.img")).start(&scratch);
    let mut client = hob.connect();
    client.write(0, &[1; 8192]).unwrap();
    client.flush().unwrap();
    Stage { hob, client, file, _files: files, _scratch: scratch }
}

impl Stage {
    /// Runs `request` during an outage that begins now. Returns how long it waited.
    fn during_outage<T>(&mut self, request: impl FnOnce(&mut Client) -> T) -> (T, Duration) {
        self.file.expire_handles();
        let file = Arc::clone(&self.file);
        let healer = std::thread::spawn(move || {
            std::thread::sleep(OUTAGE);
            file.admit();
        });
        let start = Instant::now();
        let result = request(&mut self.client);
        let waited = start.elapsed();
        healer.join().unwrap();
        (result, waited)
    }
}

/// Issue: "a file on NFS (ESTALE, EIO during a server restart)".
#[test]
fn reads_writes_flushes_and_discards_wait_until_the_file_is_open_again() {
    let mut stage = stage();
    let (read, waited) = stage.during_outage(|client| client.read(512, 4096));
    assert_eq!(read.unwrap(), [1; 4096]);
    assert!(waited >= OUTAGE);
    for offset in [4096, 100 * 512] {
        let (written, waited) = stage.during_outage(|client| client.write(offset, &[2; 4096]));
        written.unwrap();
        assert!(waited >= OUTAGE);
        stage.client.flush().unwrap();
    }
    let (flushed, _) = stage.during_outage(|client| client.flush());
    flushed.unwrap();
    let (trimmed, _) = stage.during_outage(|client| client.trim(MIB, 4096));
    trimmed.unwrap();
    assert_eq!(stage.client.read(0, 8192).unwrap(), [[1; 4096], [2; 4096]].concat());
    stage.hob.stop();
}

/// Writes that no flush covers may have been lost with the handle.
#[test]
fn a_flush_after_the_outage_reports_unflushed_writes_as_lost() {
    let mut stage = stage();
    stage.client.write(4096, &[3; 4096]).unwrap();
    let (read, _) = stage.during_outage(|client| client.read(0, 4096));
    read.unwrap();
    assert!(stage.client.flush().is_err(), "the first flush reports the loss");
    stage.client.flush().unwrap();
    stage.hob.stop();
}

/// The outage is a problem in health within 5 seconds, and no problem afterwards.
#[test]
fn health_reports_the_outage() {
    let mut stage = stage();
    stage.file.expire_handles();
    let reader = std::thread::scope(|scope| {
        let reader = scope.spawn(|| stage.client.read(0, 4096));
        wait_until("a problem in health", Duration::from_secs(5), || {
            let health = stage.hob.try_ctl(&["health"]).all();
            health.contains("ESTALE") || health.contains("cannot open it again")
        });
        stage.file.admit();
        reader.join().expect("a client that does not panic")
    });
    reader.unwrap();
    wait_until("no problem in health", Duration::from_secs(5), || stage.hob.try_ctl(&["health"]).success());
    stage.hob.stop();
}
