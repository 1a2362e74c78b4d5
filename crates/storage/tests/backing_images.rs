//! Disk images in formats that the qemu-nbd of hob reads. qemu-nbd and qemu-img must be installed.

mod common;

use std::process::Command;

use common::process::{children_of_qemu, kill_qemu};
use common::{Rig, both_kinds, image_options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoError, IoOp};
use hob_storage::backing::{Backing, BackingInfo, BackingOptions, OpenError};
use hob_storage::ring::RingKind;

const WRITE: IoOp = IoOp::Write(Durability::Volatile);
const MIB: u64 = 1 << 20;

/// Creates an image of 8 MiB.
fn create(image: &str, format: &str) {
    let made = Command::new("qemu-img").args(["create", "-q", "-f", format, image, "8M"]).status();
    assert!(made.expect("qemu-img is installed").success());
}

#[test]
fn images_are_read_through_a_qemu_nbd_of_our_own() {
    for (format, shown) in [("qcow2", "qcow2"), ("vmdk", "VMDK"), ("vdi", "VDI"), ("vhdx", "VHDX")] {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let image = image.to_str().unwrap();
        create(image, format);
        let mut rig = Rig::open_image(RingKind::IoUring, image, format, Access::ReadWrite);
        let info = rig.backing.info().clone();
        assert!(info.description.contains(shown) && info.size_bytes == 8 * MIB, "{info:?}");
        rig.exercise();
        rig.run(IoOp::Flush, 0, 0).unwrap();
        let expected = rig.read(0, 7 << 20).unwrap();
        rig.close();
        assert_eq!(children_of_qemu(image).len(), 1);
        drop(rig);
        assert_eq!(children_of_qemu(image).len(), 0);
        let raw = dir.path().join("raw");
        let raw_text = raw.to_str().unwrap();
        let converted = Command::new("qemu-img").args(["convert", "-O", "raw", image, raw_text]).status();
        assert!(converted.unwrap().success());
        assert!(std::fs::read(&raw).unwrap()[..7 << 20] == expected);
    }
}

#[test]
fn an_image_changes_hands() {
    for (format, kind) in [("qcow2", RingKind::IoUring), ("vmdk", RingKind::Threads)] {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("an, image");
        let image = image.to_str().unwrap();
        create(image, format);
        let mut owner = Rig::open_image(kind, image, format, Access::ReadWrite);
        let data = pattern(MIB as usize, 5);
        owner.write(WRITE, MIB, &data).unwrap();
        // Another host looks at it meanwhile; it may write as soon as the owner has let go.
        let unlocked = BackingOptions { locked: false, ..image_options(format) };
        let mut next = Rig::of(kind, Backing::open(image, Access::ReadWrite, &unlocked).unwrap());
        // How it is accessed is what worked first; that may be another way each time.
        let [info, of] = [&next, &owner]
            .map(|rig| BackingInfo { description: String::new(), ..rig.backing.info().clone() });
        assert_eq!(info, of);
        let lock = next.backing.lock().unwrap();
        let refused = lock.take().unwrap_err().to_string();
        assert!(refused.contains("lock"), "{refused}");
        owner.run(IoOp::Flush, 0, 0).unwrap();
        owner.backing.lock().unwrap().release().unwrap();
        lock.take().unwrap();
        assert!(next.read(MIB, MIB as usize).unwrap() == data, "{format}");
        next.exercise();
        next.run(IoOp::Flush, 0, 0).unwrap();
        assert!(owner.read(MIB, 4096).is_err(), "the owner goes on");
        assert_eq!(children_of_qemu(image).len(), 1);
        let expected = next.read(0, 7 << 20).unwrap();
        owner.close();
        next.close();
        drop((owner, next));
        assert_eq!(children_of_qemu(image).len(), 0);
        let mut again = Rig::open_image(kind, image, format, Access::ReadOnly);
        assert!(again.read(0, 7 << 20).unwrap() == expected, "{format}");
        again.close();
    }
}

#[test]
fn a_killed_qemu_nbd_is_replaced_unless_another_program_has_its_image() {
    both_kinds(|kind| {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let image = image.to_str().unwrap();
        create(image, "qcow2");
        let mut rig = Rig::open_image(kind, image, "qcow2", Access::ReadWrite);
        let data = pattern(MIB as usize, 5);
        rig.write(WRITE, MIB, &data).unwrap();
        rig.run(IoOp::Flush, 0, 0).unwrap();
        kill_qemu(image);
        assert!(rig.read(MIB, MIB as usize).unwrap() == data);
        rig.exercise();
        // Data that the killed qemu-nbd had acknowledged but not flushed may be lost.
        rig.write(WRITE, 0, &data).unwrap();
        kill_qemu(image);
        assert!(rig.read(0, MIB as usize).unwrap() == data && !rig.backing.take_loss());
        rig.write(WRITE, 0, &data).unwrap();
        rig.run(IoOp::Flush, 0, 0).unwrap();
        assert!(rig.read(0, MIB as usize).unwrap() == data && !rig.backing.is_lost());
        assert_eq!(children_of_qemu(image).len(), 1);
        // A qemu-nbd that was killed just after its start is replaced only after a delay, in which
        // another process opens the image.
        kill_qemu(image);
        let mut other = Rig::open_image(kind, image, "qcow2", Access::ReadWrite);
        other.write(WRITE, 0, &data).unwrap();
        assert_eq!(rig.read(0, 4096), Err(IoError::ShuttingDown));
        assert!(rig.backing.is_lost() && !other.backing.is_lost());
        assert!(other.read(0, MIB as usize).unwrap() == data);
        other.close();
        drop(other);
        assert!(rig.write(WRITE, 0, &data).is_err(), "it comes back to an image that was another's");
        rig.close();
    });
}

#[test]
fn a_damaged_image_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let mut bytes = b"QFI\xfb\0\0\0\x63".to_vec();
    bytes.resize(65536, 0);
    std::fs::write(&image, bytes).unwrap();
    let refused = Backing::open(image.to_str().unwrap(), Access::ReadWrite, &image_options("qcow2"));
    let error = refused.unwrap_err();
    assert!(matches!(error, OpenError::Unfit { .. }), "{error}");
}

#[test]
fn an_image_is_known_again_when_it_has_grown() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let image = image.to_str().unwrap();
    create(image, "qcow2");
    let mut rig = Rig::open_image(RingKind::IoUring, image, "qcow2", Access::ReadWrite);
    let first = rig.backing.info().clone();
    assert!(first.identity_text.starts_with("qcow2 image with inode "), "{}", first.identity_text);
    let data = pattern(MIB as usize, 5);
    rig.write(WRITE, 4096, &data).unwrap();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    rig.close();
    drop(rig);
    let mut again = Backing::open(image, Access::ReadWrite, &image_options("qcow2")).unwrap();
    assert_eq!(again.info().identity, first.identity);
    let mut sample = vec![0; 8192];
    again.read_before_attach(4096, &mut sample).unwrap();
    assert!(sample == data[..8192]);
}
