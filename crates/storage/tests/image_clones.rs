//! Clones of images: which blocks a clone has itself, and which its parent has. The images are made
//! by qemu-img and read through qemu-nbd.

mod common;

use std::path::Path;
use std::process::Command;

use common::{Rig, image_options, options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoError, IoOp};
use hob_storage::backing::{
    Backing, BackingOptions, BlockOrigin, Format, ImageFile, NotShared, OwnMap, Role,
};
use hob_storage::ring::RingKind;

const MIB: u64 = 1 << 20;
/// The unit of the map of own blocks.
const OBJECT: u64 = 64 << 10;
const SIZE: u64 = 8 * MIB;

fn run(program: &str, args: &[&str]) {
    let status = Command::new(program).args(args).stdout(std::process::Stdio::null()).status();
    assert!(status.unwrap_or_else(|error| panic!("{program}: {error}")).success(), "{program} {args:?}");
}

/// A golden image with noise, and a clone of it. The clone's own data is 4 KiB at offset 1 MiB, and
/// 64 KiB of zeroes at offset 3 MiB.
struct Images {
    dir: tempfile::TempDir,
    base: ImageFile,
    clone: String,
    clone_format: &'static str,
    /// Content of the clone, as far as the golden image reaches.
    content: Vec<u8>,
}

impl Images {
    /// Creates both images. `size` is the clone's size; `None` means the size of the golden image.
    fn new(base_format: &str, clone_format: &'static str, size: Option<&str>) -> Images {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let mut content = pattern(SIZE as usize, 3);
        std::fs::write(at("raw"), &content).unwrap();
        let (base, clone) = (at("base"), at("clone"));
        run("qemu-img", &["convert", "-f", "raw", "-O", base_format, &at("raw"), &base]);
        let create: [&str; 9] = ["create", "-q", "-f", clone_format, "-F", base_format, "-b", &base, &clone];
        run("qemu-img", &create.into_iter().chain(size).collect::<Vec<_>>());
        run("qemu-io", &["-f", clone_format, "-c", "write -P 7 1M 4k", "-c", "write -z 3M 64k", &clone]);
        content[MIB as usize..][..4096].fill(7);
        content[3 * MIB as usize..][..OBJECT as usize].fill(0);
        let format = Format::from_name(base_format).unwrap();
        let base = ImageFile { path: base.into(), format, role: Role::Backing };
        Images { dir, base, clone, clone_format, content }
    }

    fn options(&self) -> BackingOptions {
        let files = vec![self.base.clone()];
        BackingOptions { files, shares_parent: true, ..image_options(self.clone_format) }
    }

    fn open(&self, options: &BackingOptions) -> Backing {
        Backing::open(&self.clone, Access::ReadWrite, options).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Opens the golden image as the disk of its clones does.
    fn open_base(&self) -> Backing {
        let options = BackingOptions { format: Some(self.base.format), ..options() };
        let path = self.base.path.to_str().unwrap();
        Backing::open(path, Access::ReadOnly, &options).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Returns the ranges of a disk that are the parent's, as first byte and end.
fn ranges_of_parent(own: &OwnMap, size_bytes: u64) -> Vec<(u64, u64)> {
    let parts = own.split(0, size_bytes).filter(|part| part.whose == BlockOrigin::Parent);
    parts.map(|part| (part.offset, part.offset + part.len)).collect()
}

#[test]
fn an_images_own_blocks_are_known_when_it_is_opened() {
    for (base_format, clone_format, size) in [
        ("qcow2", "qcow2", Some("10M")),
        ("raw", "qcow2", None),
        ("vmdk", "vmdk", None),
        ("vmdk", "qcow2", None),
    ] {
        let images = Images::new(base_format, clone_format, size);
        let (backing, parent) = images.open(&images.options()).share_parent();
        let parent = parent.unwrap_or_else(|why| panic!("{base_format}, {clone_format}: {why}"));
        assert_eq!(Path::new(&parent.spec), images.base.path);
        assert_eq!((parent.format, parent.files.len()), (Some(images.base.format), 0));
        let size_bytes = backing.info().size_bytes;
        assert_eq!(size_bytes, if size.is_some() { 10 * MIB } else { SIZE });
        let expected = [(0, MIB), (MIB + OBJECT, 3 * MIB), (3 * MIB + OBJECT, size_bytes)];
        assert_eq!(ranges_of_parent(&parent.own, size_bytes), expected, "{base_format}, {clone_format}");
        // Clone and golden image can be open at the same time, and name the same content.
        let base = images.open_base();
        assert_eq!(base.constant(), Some(parent.constant.as_str()), "{base_format}");
        drop(base);

        // Without a disk for the parent, the clone reads everything itself.
        let mut rig = Rig::of(RingKind::IoUring, backing);
        assert!(rig.read(0, SIZE as usize).unwrap() == images.content, "{base_format}, {clone_format}");
        // With one, it reads what the parent's disk cannot.
        rig.backing.link_parent(Some(SIZE));
        let id = rig.start(IoOp::Read, MIB - 4096, 2 * 4096, None);
        let read = rig.backing.poll_parent_read().expect("the first half is the parent's");
        assert_eq!((read.offset, read.len), (MIB - 4096, 4096));
        let now = rig.now();
        rig.backing.handle_parent_read(&mut rig.ring, now, read.number, Err(IoError::Failed));
        rig.wait(id).unwrap();
        assert!(rig.take(id, MIB - 4096, 8192) == images.content[MIB as usize - 4096..][..8192]);
        // The clone reads the data that was written to it from its own image, not from the parent.
        rig.write(IoOp::Write(Durability::Volatile), 5 * MIB, &[9; 4096]).unwrap();
        assert_eq!(rig.read(5 * MIB, 4096).unwrap(), [9; 4096]);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        rig.close();
        drop(rig);
        // The same holds when the image is opened again.
        let (_backing, parent) = images.open(&images.options()).share_parent();
        let expected =
            [expected[0], expected[1], (3 * MIB + OBJECT, 5 * MIB), (5 * MIB + OBJECT, size_bytes)];
        assert_eq!(ranges_of_parent(&parent.unwrap().own, size_bytes), expected);
    }
}

/// QEMU needs about a second for each TiB to tell which blocks an image has itself. The clone is
/// served before that, and shares what is known.
#[test]
fn a_large_clone_is_opened_before_all_of_its_own_blocks_are_known() {
    const SIZE: &str = "16T";
    let dir = tempfile::tempdir().unwrap();
    let [base, clone] = ["base", "clone"].map(|name| dir.path().join(name));
    let [base_text, clone_text] = [&base, &clone].map(|path| path.to_str().unwrap());
    run("qemu-img", &["create", "-q", "-f", "qcow2", base_text, SIZE]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base_text, clone_text, SIZE]);
    let files = vec![ImageFile { path: base.clone(), format: Format::Qcow2, role: Role::Backing }];
    let clone_options = BackingOptions { files, shares_parent: true, ..image_options("qcow2") };
    let backing = Backing::open(clone_text, Access::ReadWrite, &clone_options).unwrap();
    let (backing, parent) = backing.share_parent();
    let own = parent.unwrap_or_else(|why| panic!("{why}")).own;
    let first = own.parent_bytes();
    assert!(first > 0, "nothing is shared");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !own.is_complete() && own.parent_bytes() == first {
        assert!(std::time::Instant::now() < deadline, "the rest is not asked for");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // The thread that asks QEMU for the rest ends when the backing is dropped.
    drop(backing);
}

/// Unless it is certain that the parent does not change, a clone reads everything itself.
#[test]
fn an_image_that_cannot_share_says_why() {
    let images = Images::new("raw", "qcow2", None);
    let why = |options: &BackingOptions, change: &dyn Fn()| {
        let backing = images.open(options);
        change();
        let (mut backing, parent) = backing.share_parent();
        let mut bytes = [0; 4096];
        backing.read_before_attach(4 * MIB, &mut bytes).unwrap();
        assert!(bytes == images.content[4 * MIB as usize..][..4096]);
        match parent.unwrap_err() {
            NotShared::Unsuitable(why) => (why, false),
            NotShared::Unknown(why) => (why, true),
        }
    };
    let unlocked = BackingOptions { locked: false, ..images.options() };
    let (why_unlocked, may_be_shared_later) = why(&unlocked, &|| ());
    assert!(why_unlocked.contains("not locked") && !may_be_shared_later);
    // The state of the parent is read only for disks that share it.
    let unshared = BackingOptions { shares_parent: false, ..images.options() };
    assert!(why(&unshared, &|| ()).0.contains("opened without its parent"));
    let replace = || {
        let other = images.dir.path().join("other");
        std::fs::copy(&images.base.path, &other).unwrap();
        std::fs::rename(&other, &images.base.path).unwrap();
    };
    let (changed, may_be_shared_later) = why(&images.options(), &replace);
    assert!(changed.contains("changed or replaced while the image was opened"), "{changed}");
    assert!(!may_be_shared_later);
    let remove = || std::fs::remove_file(&images.base.path).unwrap();
    let (missing, may_be_shared_later) = why(&images.options(), &remove);
    assert!(missing.contains("the state of its parent is unknown"), "{missing}");
    assert!(may_be_shared_later);
    let images = Images::new("raw", "qcow2", None);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 8M", &images.clone]);
    let (_backing, parent) = images.open(&images.options()).share_parent();
    assert!(parent.unwrap_err().to_string().contains("it has all blocks itself"));
    let alone = images.dir.path().join("alone");
    run("qemu-img", &["create", "-q", "-f", "qcow2", alone.to_str().unwrap(), "8M"]);
    let alone_options = BackingOptions { shares_parent: true, ..image_options("qcow2") };
    let backing = Backing::open(alone.to_str().unwrap(), Access::ReadWrite, &alone_options).unwrap();
    let why = NotShared::Unsuitable("it has no parent".to_owned());
    assert_eq!(backing.share_parent().1.unwrap_err(), why);
}

/// The content of a file gets a name only if the file is locked against writers.
#[test]
fn images_that_can_change_name_no_content() {
    let images = Images::new("raw", "qcow2", None);
    let path = images.base.path.to_str().unwrap();
    let open = |access, locked| {
        Backing::open(path, access, &BackingOptions { locked, ..image_options("raw") }).unwrap()
    };
    assert!(open(Access::ReadOnly, true).constant().is_some());
    assert!(open(Access::ReadOnly, false).constant().is_none());
    assert!(open(Access::ReadWrite, true).constant().is_none());
    assert!(images.open(&images.options()).constant().is_none());
}
