//! Writes an initramfs: a cpio archive in the format "newc", which Linux unpacks at boot.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// An archive. Directories above files are added automatically.
#[derive(Clone, Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
    entries: u32,
}

impl Archive {
    /// Adds an empty directory. Paths have no leading slash.
    pub(super) fn directory(&mut self, path: &str) {
        self.parents(path);
        if self.directories.insert(path.to_owned()) {
            self.entry(path, DIRECTORY, &[]);
        }
    }

    /// Adds an executable file.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) {
        self.parents(path);
        self.entry(path, FILE, content);
    }

    /// Adds a copy of a file of the host.
    pub(super) fn copy(&mut self, path: &str, from: &Path) -> Result<()> {
        let content = std::fs::read(from).with_context(|| format!("read {}", from.display()))?;
        self.file(path, &content);
        Ok(())
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entry(path, LINK, target.as_bytes());
    }

    /// Returns the archive with its end.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn parents(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("files of a guest are below 4 GiB");
        let name_size = path.len() as u32 + 1;
        // Inode, mode, user, group, links, time, size, device twice, name size, checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn entries_have_parents_and_alignment() {
        let mut archive = Archive::default();
        archive.file("a/b/program", b"12345");
        archive.link("a/b/name", "program");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let mut names = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + 8 * n..at + 14 + 8 * n]).expect("digits");
                usize::from_str_radix(text, 16).expect("a hexadecimal number")
            };
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = &bytes[at + 110..at + 110 + name_size - 1];
            let start = (at + 110 + name_size).next_multiple_of(4);
            let content = &bytes[start..start + size];
            names.push((String::from_utf8_lossy(name).into_owned(), mode >> 12, content.to_vec()));
            at = (start + size).next_multiple_of(4);
        }
        let expected = [
            ("a", 4, &b""[..]),
            ("a/b", 4, b""),
            ("a/b/program", 8, b"12345"),
            ("a/b/name", 10, b"program"),
            ("TRAILER!!!", 0, b""),
        ];
        assert_eq!(names, expected.map(|(name, kind, content)| (name.to_owned(), kind, content.to_vec())));
    }
}
