//! Directories that become a guest's file system: an initramfs, or the ext4 of a bootable disk.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::scratch::text;
use crate::tool::{Tool, find};

/// Drivers that a guest needs to use its disk.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "ext4"];

/// A kernel of the host that guests boot.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) image: PathBuf,
    version: String,
}

impl Kernel {
    /// Returns the host's newest kernel that is built for virtual machines.
    #[track_caller]
    pub(super) fn newest() -> Self {
        let mut names: Vec<String> = fs::read_dir("/boot")
            .expect("/boot is readable")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with("vmlinuz-") && name.contains("cloud"))
            .collect();
        names.sort();
        let name = names.pop().expect("no cloud kernel in /boot: install linux-image-cloud-amd64");
        let version = name.trim_start_matches("vmlinuz-").to_owned();
        Self { image: Path::new("/boot").join(name), version }
    }

    /// Returns the module files to insert, each after its dependencies; built-in drivers need none.
    #[track_caller]
    fn modules(&self, names: &[&str]) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for module in names {
            let plan = Tool::new("modprobe").args(["-S", &self.version, "--show-depends", module]).run();
            for file in plan.lines().filter_map(|line| line.strip_prefix("insmod ")) {
                let file = PathBuf::from(file.split_whitespace().next().unwrap_or(file));
                if !files.contains(&file) {
                    files.push(file);
                }
            }
        }
        files
    }
}

/// A directory with busybox as `/bin/sh`, to which programs and scripts are added.
#[derive(Debug)]
pub(super) struct Tree(PathBuf);

impl Tree {
    /// Creates the directory `root`, which must not exist yet.
    #[track_caller]
    pub(super) fn new(root: PathBuf) -> Self {
        copy(&find("busybox"), &root.join("bin/busybox"));
        symlink("busybox", root.join("bin/sh")).expect("a link in the scratch directory");
        Self(root)
    }

    /// Adds an empty directory.
    #[track_caller]
    pub(super) fn dir(self, at: &str) -> Self {
        fs::create_dir_all(self.0.join(at)).expect("a directory in the scratch directory");
        self
    }

    /// Adds a program of the host, with its libraries.
    #[track_caller]
    pub(super) fn program(self, program: &Path, at: &str) -> Self {
        copy(program, &self.0.join(at));
        let list = Tool::new("ldd").arg(text(program)).run();
        for library in list.split_whitespace().filter(|word| word.starts_with('/')) {
            copy(Path::new(library), &self.0.join(library.trim_start_matches('/')));
        }
        self
    }

    /// Adds an executable script.
    #[track_caller]
    pub(super) fn script(self, at: &str, script: &str) -> Self {
        let path = self.0.join(at);
        fs::create_dir_all(path.parent().expect("a file lies in a directory")).expect("a scratch directory");
        fs::write(&path, script).expect("write a script of the guest");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("make it executable");
        self
    }

    /// Adds the drivers to `/modules`, and their order as `/modules/order`.
    #[track_caller]
    pub(super) fn drivers(self, kernel: &Kernel) -> Self {
        self.modules(kernel, &MODULES, "order")
    }

    /// Adds drivers to `/modules`, and their order as the file `list` there.
    #[track_caller]
    pub(super) fn modules(self, kernel: &Kernel, names: &[&str], list: &str) -> Self {
        let modules = kernel.modules(names);
        let name = |module: &PathBuf| module.file_name().and_then(|n| n.to_str()).expect("ASCII").to_owned();
        let dir = self.0.join("modules");
        for module in &modules {
            copy(module, &dir.join(name(module)));
        }
        let order: Vec<String> = modules.iter().map(name).collect();
        fs::create_dir_all(&dir).expect("a scratch directory");
        fs::write(dir.join(list), order.join("\n")).expect("write the order of the modules");
        self
    }

    /// Packs the directory tree as an initramfs.
    #[track_caller]
    pub(super) fn pack(self, image: &Path) {
        let pack = r#"cd "$1" && find . | cpio --quiet -o -H newc > "$2""#;
        let _ = find("cpio");
        Tool::new("sh").args(["-c", pack, "pack", &text(&self.0), &text(image)]).run();
    }

    /// Creates the file `image` of `size` bytes with an ext4 filesystem that has the content of the
    /// directory.
    #[track_caller]
    pub(super) fn format(self, image: &Path, size: u64) {
        let kib = format!("{}k", size / 1024);
        let options = ["-q", "-F", "-t", "ext4", "-d", &text(&self.0), &text(image), &kib].map(str::to_owned);
        Tool::new("mke2fs").args(options).run();
        fs::remove_dir_all(&self.0).expect("what the image holds is not needed twice");
    }
}

#[track_caller]
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().expect("a file lies in a directory")).expect("a scratch directory");
    fs::copy(from, to).unwrap_or_else(|e| panic!("copy {} to {}: {e}", from.display(), to.display()));
}
