//! `qemu-img` with an export, and images of other formats as backings.

use std::path::Path;

use conformance::data::{Noise, assert_same_file, empty_file, noise_file};
use conformance::process::{alive, descendants};
use conformance::scratch::wait_for;
use conformance::{Hob, MIB, Scratch, Serve, Tool};

const SIZE: u64 = 32 * MIB;
const FORMATS: [&str; 4] = ["qcow2", "vmdk", "vdi", "vhdx"];

#[track_caller]
fn compare(format: &str, image: &str, hob: &Hob) {
    // The image that hob serves is locked; it does not change here.
    Tool::new("qemu-img").args(["compare", "-U", "-f", format, "-F", "raw", image, &hob.uri()]).run();
}

fn convert(args: &[&str]) {
    Tool::new("qemu-img").arg("convert").args(args).run();
}

#[test]
fn compare_and_convert_agree_with_the_backing_file() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 6);
    let disk = scratch.text("disk.img");
    let hob = Serve::disk(&disk).cached(&scratch.path("pool"), "64M", "4K").start(&scratch);
    compare("raw", &disk, &hob);
    compare("raw", &disk, &hob);
    convert(&["-f", "raw", "-O", "qcow2", &hob.uri(), &scratch.text("out.qcow2")]);
    compare("qcow2", &scratch.text("out.qcow2"), &hob);
    // Copy in the other direction, over cached data.
    noise_file(&scratch.path("other"), SIZE, 7);
    convert(&["-n", "-f", "raw", "-O", "raw", &scratch.text("other"), &hob.uri()]);
    compare("raw", &scratch.text("other"), &hob);
    hob.stop();
    assert_same_file(&scratch.path("other"), &scratch.path("disk.img"));
}

/// Starts hob on an image of `format` with noise; the file `raw` has the same noise.
#[track_caller]
fn on_image(scratch: &Scratch, format: &str) -> (Serve, String) {
    noise_file(&scratch.path("raw"), SIZE, 8);
    let image = scratch.text(&format!("disk.{format}"));
    convert(&["-f", "raw", "-O", format, &scratch.text("raw"), &image]);
    (Serve::disk(&image).cached(&scratch.path("pool"), "64M", "4K"), image)
}

#[track_caller]
fn qemu_nbd_of(hob: &Hob) -> u32 {
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let helper = descendants(hob.process.pid()).into_iter().find(|&pid| name(pid).trim() == "qemu-nbd");
    helper.expect("hob opens such an image through a qemu-nbd of its own")
}

#[track_caller]
fn format_is_served(format: &str) {
    let scratch = Scratch::new();
    let (serve, image) = on_image(&scratch, format);
    let hob = serve.start(&scratch);
    let helper = qemu_nbd_of(&hob);
    Tool::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &scratch.text("raw"), &hob.uri()]).run();
    let data = Noise::new(9).bytes(MIB as usize);
    let mut client = hob.connect();
    client.write(5 * MIB + 512, &data).unwrap();
    client.flush().unwrap();
    drop(client);
    let raw = std::fs::OpenOptions::new().write(true).open(scratch.path("raw")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&raw, &data, 5 * MIB + 512).unwrap();
    hob.stop();
    wait_for("qemu-nbd to end with its server", || !alive(helper));
    Tool::new("qemu-img").args(["compare", "-f", "raw", "-F", format, &scratch.text("raw"), &image]).run();
}

#[test]
fn qcow2_is_served_and_its_helper_ends() {
    format_is_served(FORMATS[0]);
}

#[test]
fn vmdk_is_served_and_its_helper_ends() {
    format_is_served(FORMATS[1]);
}

#[test]
fn vdi_is_served_and_its_helper_ends() {
    format_is_served(FORMATS[2]);
}

#[test]
fn vhdx_is_served_and_its_helper_ends() {
    format_is_served(FORMATS[3]);
}

#[test]
fn kill_9_leaves_no_helper_that_locks_the_image() {
    let scratch = Scratch::new();
    let (serve, _) = on_image(&scratch, "qcow2");
    let hob = serve.start(&scratch);
    let helper = qemu_nbd_of(&hob);
    hob.kill();
    wait_for("qemu-nbd to end with its server", || !alive(helper));
    serve.start(&scratch).stop();
}

#[test]
fn without_qemu_nbd_the_message_names_it() {
    let scratch = Scratch::new();
    let (serve, image) = on_image(&scratch, "qcow2");
    std::fs::create_dir(scratch.path("nothing")).unwrap();
    let before = std::fs::read(&image).unwrap();
    let output = serve.env("PATH", &scratch.text("nothing")).refused(&scratch);
    assert!(output.stderr.contains("qemu-nbd"), "{}", output.stderr);
    assert!(!output.stderr.contains("panicked"), "{}", output.stderr);
    assert_eq!(std::fs::read(&image).unwrap(), before);
}

#[test]
fn an_image_that_is_damaged_is_refused_with_a_message() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    empty_file(&image, MIB);
    std::fs::write(&image, b"QFI\xfb\0\0\0\x63 no such version").unwrap();
    let output = Serve::disk(&scratch.text("disk.qcow2")).refused(&scratch);
    assert!(output.stderr.contains("disk.qcow2"), "{}", output.stderr);
    assert!(Path::new(&image).exists());
}
