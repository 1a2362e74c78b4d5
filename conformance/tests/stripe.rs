//! The stripe size of a disk: detected, or set by the operator. The destager writes whole stripes.

use std::fs::File;
use std::io::Read;

use conformance::data::{Noise, assert_same, empty_file};
use conformance::{Daemon, KIB, MIB, Scratch, Store};

/// Number of bytes that each round writes: whole stripes of every size in this file.
const WRITTEN: u64 = 5376 * KIB;

/// A daemon with the disk `vm`. Its cache destages nothing by itself. Its backing is an NBD server
/// that recommends blocks of 256 KiB.
struct Stage {
    daemon: Daemon,
    scratch: Scratch,
    backing: Store,
    rounds: u64,
}

impl Stage {
    fn start() -> Stage {
        let scratch = Scratch::new();
        empty_file(&scratch.path("disk.img"), 32 * MIB);
        let log = format!("logfile={}", scratch.text("backing.log"));
        let backing = Store::start(
            &scratch.path("backing.sock"),
            &[
                "--filter=log",
                "--filter=blocksize-policy",
                "file",
                &scratch.text("disk.img"),
                "blocksize-preferred=256K",
                &log,
            ],
        );
        write_config(&scratch, &backing, "");
        let daemon = scratch.start_daemon();
        Stage { daemon, scratch, backing, rounds: 0 }
    }

    /// Writes hob.toml, with these further settings of the disk.
    fn configure(&self, settings: &str) {
        write_config(&self.scratch, &self.backing, settings);
    }

    /// Applies hob.toml, in which the disk's stripe size has changed.
    #[track_caller]
    fn apply(&self) {
        let diff = self.daemon.try_ctl(&["config", "diff"]);
        assert!(!diff.success() && diff.stdout.contains("disk vm: stripe"), "{}", diff.all());
        self.daemon.ctl(&["config", "apply"]);
        self.assert_applied();
    }

    #[track_caller]
    fn assert_applied(&self) {
        let diff = self.daemon.try_ctl(&["config", "diff"]);
        assert!(diff.success(), "a difference remains: {}", diff.all());
    }

    /// Returns the offset and the length of each write that the backing has received.
    fn writes(&self) -> Vec<(u64, u64)> {
        let log = std::fs::read_to_string(self.scratch.path("backing.log")).expect("nbdkit's log");
        let number = |line: &str, key: &str| {
            let digits = line.split(key).nth(1).and_then(|rest| rest.split_whitespace().next());
            let digits = digits.unwrap_or_else(|| panic!("no {key} in: {line}"));
            u64::from_str_radix(digits, 16).unwrap_or_else(|e| panic!("{e}: {line}"))
        };
        // The reply to a write is logged as "...Write".
        let sent = log.lines().filter(|line| line.contains(" Write id="));
        sent.map(|line| (number(line, "offset=0x"), number(line, "count=0x"))).collect()
    }

    /// Writes data in sequence, and destages it. Returns the writes that the backing received.
    #[track_caller]
    fn destage(&mut self) -> Vec<(u64, u64)> {
        self.rounds += 1;
        let data = Noise::new(self.rounds).bytes(WRITTEN as usize);
        let before = self.writes().len();
        let mut client = self.scratch.connect("vm");
        for (chunk, at) in data.chunks(128 << 10).zip((0..).step_by(128 << 10)) {
            client.write(at, chunk).unwrap();
        }
        client.flush().unwrap();
        assert_eq!(self.writes().len(), before, "the cache has the data, and the backing does not");
        self.daemon.ctl(&["drain", "vm"]);
        let mut image = vec![0; WRITTEN as usize];
        File::open(self.scratch.path("disk.img")).unwrap().read_exact(&mut image).unwrap();
        assert_same(&image, &data, 0, "the backing after the drain");
        self.writes().split_off(before)
    }

    /// Checks that the destager writes whole stripes of `stripe` bytes.
    #[track_caller]
    fn destages_stripes_of(&mut self, stripe: u64) {
        let writes = self.destage();
        assert_eq!(writes.iter().map(|(_, length)| length).sum::<u64>(), WRITTEN, "{writes:?}");
        let is_whole =
            |(offset, length): &(u64, u64)| offset.is_multiple_of(stripe) && length.is_multiple_of(stripe);
        assert!(writes.iter().all(is_whole), "not whole stripes of {stripe} bytes: {writes:?}");
    }
}

/// Returns the stripe size of a disk that the operator chose, and the size in effect, in bytes.
#[track_caller]
fn stripe(daemon: &Daemon, disk: &str) -> (Option<u64>, Option<u64>) {
    let shown = daemon.disk(disk);
    (shown["stripe"].as_u64(), shown["stripe_in_effect"].as_u64())
}

fn write_config(scratch: &Scratch, backing: &Store, settings: &str) {
    let config = format!(
        "[[pool]]\nname = \"p\"\ndevices = [\"{}\"]\nsize = \"64M\"\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = \"{}\"\n{settings}\n\
         cache = {{ pool = \"p\", size = \"32M\", block_size = \"64K\", admission = \"always\", \
         mode = \"write-back\", dirty_age_max = 0, dirty_start = 90, dirty_full = 95 }}\n",
        scratch.text("pool"),
        backing.backing(""),
    );
    scratch.configure(&config);
}

#[test]
fn the_destager_writes_whole_stripes_of_the_size_in_effect() {
    let mut stage = Stage::start();
    assert_eq!(stripe(&stage.daemon, "vm"), (None, Some(256 * KIB)));
    let shown = stage.daemon.ctl(&["disk", "show", "vm"]);
    assert!(shown.contains("256 KiB (detected)"), "{shown}");
    stage.destages_stripes_of(256 * KIB);

    let refused = stage.daemon.try_ctl(&["disk", "set", "vm", "--stripe", "6K"]);
    let said = refused.all();
    assert!(!refused.success() && said.contains("a multiple of 4K up to 16M"), "{said}");
    stage.daemon.ctl(&["disk", "set", "vm", "--stripe", "192K"]);
    assert_eq!(stripe(&stage.daemon, "vm"), (Some(192 * KIB), Some(192 * KIB)));
    // hob.toml never had the setting, so the command decides.
    stage.assert_applied();
    stage.destages_stripes_of(192 * KIB);

    stage.configure("stripe = \"448K\"");
    stage.apply();
    assert_eq!(stripe(&stage.daemon, "vm"), (Some(448 * KIB), Some(448 * KIB)));
    stage.destages_stripes_of(448 * KIB);

    stage.configure("");
    stage.apply();
    assert_eq!(stripe(&stage.daemon, "vm"), (None, Some(256 * KIB)));
    stage.daemon.stop();
}

#[test]
fn a_new_disk_has_the_stripe_size_of_its_command() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), MIB);
    scratch.configure("");
    let start = || scratch.start_daemon();
    let daemon = start();
    daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("disk.img"), "--stripe", "192K"]);
    daemon.stop();
    let daemon = start();
    assert_eq!(stripe(&daemon, "vm"), (Some(192 * KIB), Some(192 * KIB)), "after a restart");
    daemon.ctl(&["disk", "set", "vm", "--stripe", "0"]);
    let (chosen, _) = stripe(&daemon, "vm");
    assert_eq!(chosen, None);
    daemon.stop();
}
