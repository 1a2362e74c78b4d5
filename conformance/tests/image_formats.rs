//! The content that a guest writes to its disk never decides how the disk is opened. QEMU and hob
//! prevent each other from writing to an image.

use std::path::Path;

use conformance::data::empty_file;
use conformance::nbd_client::{Address, Client};
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch, Serve, Tool};

const SIZE: u64 = 4 * MIB;

const SECRET: &[u8] = b"a file of the host";

/// A name, and a guest's write: the offset and the bytes.
type Header = (&'static str, u64, Vec<u8>);

/// Returns headers of every format, some of which would give a guest access to the file `secret`.
fn headers(scratch: &Scratch) -> Vec<Header> {
    let create = |args: &[&str]| {
        let image = scratch.text("made");
        Tool::new("qemu-img").args(["create", "-q", "-f"]).args(args).arg(&image).arg("1M").run();
        scratch.read("made")
    };
    let secret = scratch.text("secret");
    let backed = create(&["qcow2", "-F", "raw", "-b", &secret]);
    // qemu-img would create the data file again, so the header first names another file of the same
    // length.
    let other = format!("{}X", &secret[..secret.len() - 1]);
    let external = create(&["qcow2", "-o", &format!("data_file={other},data_file_raw=on")]);
    let external = replaced(&external, other.as_bytes(), secret.as_bytes());
    let descriptor = format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
         RW 2048 FLAT \"{secret}\" 0\nddb.virtualHWVersion = \"4\"\n"
    );
    let mut text = descriptor.into_bytes();
    text.resize(1024, 0);
    let footer = create(&["vpc", "-o", "subformat=fixed,force_size=on"]).split_off(MIB as usize);
    let mut headers = vec![
        ("backed", 0, backed),
        ("external", 0, external),
        ("descriptor", 0, text),
        ("vmdk", 0, create(&["vmdk"])),
        ("vdi", 0, create(&["vdi"])),
        ("vhdx", 0, create(&["vhdx"])),
        ("vpc", 0, create(&["vpc"])),
        ("footer", SIZE - 512, footer),
        ("luks", 0, [&b"LUKS\xba\xbe\0\x01"[..], &[0; 504]].concat()),
    ];
    // The metadata is at the beginning, and an empty VHDX is larger than the disk.
    headers.iter_mut().for_each(|(_, _, bytes)| bytes.truncate(MIB as usize));
    headers
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = bytes.to_vec();
    let at: Vec<usize> = (0..bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from)).collect();
    assert!(!at.is_empty(), "the image names its data file");
    at.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
    bytes
}

fn write_all(client: &mut Client, offset: u64, bytes: &[u8]) {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(512), 0);
    padded.chunks(65536).zip(0..).for_each(|(chunk, n)| client.write(offset + n * 65536, chunk).unwrap());
    client.flush().unwrap();
}

/// Checks that every disk reads as its guest wrote it, without other data.
#[track_caller]
fn are_all_raw(address: &Address, headers: &[Header], scratch: &Scratch) {
    for (name, offset, bytes) in headers {
        let mut client = Client::connect(address, name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(client.size(), SIZE, "{name}");
        let found = client.read(*offset, 512).unwrap();
        assert!(found == bytes[..512], "{name}");
        client.write(*offset, &found).unwrap();
        client.flush().unwrap();
    }
    assert_eq!(scratch.read("secret")[..SECRET.len()], *SECRET);
}

fn start(scratch: &Scratch) -> (Daemon, Address) {
    scratch.configure("");
    let daemon = scratch.start_daemon();
    daemon.ctl(&["disk", "list"]);
    (daemon, scratch.nbd())
}

#[test]
fn raw_disks_stay_raw_whatever_their_guests_write() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("secret"), MIB);
    let secret = std::fs::OpenOptions::new().write(true).open(scratch.path("secret")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&secret, SECRET, 0).unwrap();
    let headers = headers(&scratch);
    let (daemon, address) = start(&scratch);
    for (name, offset, bytes) in &headers {
        empty_file(&scratch.path(name), SIZE);
        daemon.ctl(&["disk", "add", name, "--backing", &scratch.text(name)]);
        write_all(&mut Client::connect(&address, name).unwrap(), *offset, bytes);
    }
    are_all_raw(&address, &headers, &scratch);
    // After a kill and a restart.
    daemon.kill();
    let (mut daemon, address) = start(&scratch);
    are_all_raw(&address, &headers, &scratch);
    assert!(daemon.process.stderr().contains("looks like a qcow2 image"), "it is logged");
    // After an upgrade.
    let begun = daemon.process.stderr().len();
    daemon.upgrade();
    let is_back = || daemon.process.stderr()[begun..].matches("is online").count() >= headers.len();
    wait_for("the next program", is_back);
    are_all_raw(&address, &headers, &scratch);
    // A copy of a disk is added: hob reports what its content looks like, and treats it as raw.
    let copy = scratch.text("copy");
    std::fs::copy(scratch.path("external"), &copy).unwrap();
    let refused = daemon.try_ctl(&["disk", "add", "copy", "--backing", &copy]);
    assert!(!refused.success() && refused.stderr.contains("--format"), "{}", refused.all());
    daemon.ctl(&["disk", "add", "copy", "--backing", &copy, "--format", "raw"]);
    let of_copy = [("copy", 0, headers[1].2.clone())];
    are_all_raw(&address, &of_copy, &scratch);
    daemon.stop();
}

/// A guest may have written the header, or the operator gives an image. `hob serve` cannot know
/// this, and asks the operator for the format.
#[test]
fn serve_asks_for_the_format_of_a_file_that_looks_like_an_image() {
    let scratch = Scratch::new();
    let disk = scratch.text("vm.disk");
    Tool::new("qemu-img").args(["create", "-q", "-f", "qcow2", &disk, "4M"]).run();
    let file = std::fs::OpenOptions::new().write(true).open(&disk).unwrap();
    file.set_len(SIZE).unwrap();
    let image = std::fs::read(&disk).unwrap();
    let refused = Serve::disk(&disk).refused(&scratch);
    assert_eq!(refused.status.and_then(|status| status.code()), Some(1), "{}", refused.all());
    assert_eq!(refused.stderr.trim().lines().count(), 1, "{}", refused.all());
    assert!(refused.stderr.contains("--format=qcow2") && refused.stderr.contains(&disk), "{}", refused.all());
    assert!(std::fs::read(&disk).unwrap() == image, "nothing was written");
    // As raw, the file is a disk that begins with this header. As qcow2, the file is an empty disk
    // of 4 MiB.
    let hob = Serve::disk(&disk).arg("--format", "raw").start(&scratch);
    assert!(hob.connect().read(0, 65536).unwrap() == image[..65536]);
    hob.stop();
    let hob = Serve::disk(&disk).arg("--format", "qcow2").start(&scratch);
    assert_eq!(hob.connect().read(0, 65536).unwrap(), [0; 65536]);
    hob.stop();
}

#[test]
fn a_changed_chain_is_refused_by_name_and_the_helper_reads_no_other_file() {
    let scratch = Scratch::new();
    let qemu_img = |args: &[&str]| Tool::new("qemu-img").args(args).run();
    let [base, other, image] = ["base", "other", "disk.img"].map(|name| scratch.text(name));
    for path in [&base, &other] {
        empty_file(Path::new(path), SIZE);
    }
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base, &image]);
    let (daemon, address) = start(&scratch);
    let refused = daemon.try_ctl(&["disk", "add", "vm", "--backing", &image]);
    assert!(!refused.success() && refused.stderr.contains("--format=qcow2"), "{}", refused.all());
    daemon.ctl(&["disk", "add", "vm", "--backing", &image, "--format", "qcow2"]);
    write_all(&mut Client::connect(&address, "vm").unwrap(), 0, &[7; 4096]);
    // QEMU's own lock, which `qemu-nbd` takes.
    let locked = Tool::new("qemu-io").args(["-f", "qcow2", "-c", "write 0 4k", &image]).run_failing();
    assert!(locked.all().contains("lock"), "{}", locked.all());
    daemon.stop();
    qemu_img(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", &other, &image]);
    let (daemon, _) = start(&scratch);
    let shown = daemon.ctl(&["disk", "show", "vm"]);
    assert!(shown.contains(&base) && shown.contains(&other) && shown.contains("offline"), "{shown}");
    daemon.stop();
    qemu_img(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", &base, &image]);
    let (daemon, address) = start(&scratch);
    assert_eq!(Client::connect(&address, "vm").unwrap().read(0, 4096).unwrap(), [7; 4096]);
    daemon.stop();
    // Another file takes the path of the recorded one.
    std::fs::rename(&other, &base).unwrap();
    let (daemon, address) = start(&scratch);
    let shown = daemon.ctl(&["disk", "show", "vm"]);
    assert!(shown.contains(&base) && shown.contains("was replaced") && shown.contains("offline"), "{shown}");
    daemon.ctl(&["disk", "remove", "vm"]);
    daemon.ctl(&["disk", "add", "vm", "--backing", &image, "--format", "qcow2"]);
    assert_eq!(Client::connect(&address, "vm").unwrap().read(0, 4096).unwrap(), [7; 4096]);
    daemon.stop();
}

#[test]
fn qemu_io_and_hob_refuse_images_that_the_other_uses() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("vm.raw"), SIZE);
    let disk = scratch.text("vm.raw");
    let hob = Serve::disk(&disk).start(&scratch);
    let write = ["-f", "raw", "-c", "write 0 4k", &disk];
    let refused = Tool::new("qemu-io").args(write).run_failing();
    assert!(refused.all().contains("lock"), "{}", refused.all());
    hob.stop();
    Tool::new("qemu-io").args(write).run();
}
