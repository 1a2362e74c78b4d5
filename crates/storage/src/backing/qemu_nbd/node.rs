//! Describes an image as a QEMU block node. The node names every file and its format, so that QEMU
//! probes nothing.

use std::fmt::Write;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::super::{Format, ImageFile, Role};

/// An image and the other files that it consists of.
#[derive(Clone, Debug)]
pub(super) struct Image {
    /// Absolute path of the image file.
    pub(super) path: PathBuf,
    pub(super) format: Format,
    /// Files below the image, from the top down. The data files of a layer follow the layer.
    pub(super) files: Vec<ImageFile>,
}

impl Image {
    /// Returns the image's backing file, and the files below the backing file; `None` if the image
    /// has no backing file.
    pub(super) fn parent(&self) -> Option<(&ImageFile, &[ImageFile])> {
        let at = self.files.iter().position(|file| file.role == Role::Backing)?;
        Some((&self.files[at], &self.files[at + 1..]))
    }

    /// Returns the `json:` file name of the image's node. With `unlocked`, QEMU takes no locks and
    /// may read while another process writes.
    pub(super) fn node(&self, unlocked: bool) -> io::Result<String> {
        let how = if unlocked { "\"force-share\":true,\"read-only\":true," } else { "" };
        Ok(format!("json:{{{how}{}}}", layer(&self.path, self.format, &self.files)?))
    }
}

/// Returns the members of a layer's node. `below` contains its data files and the layers below it.
fn layer(path: &Path, format: Format, below: &[ImageFile]) -> io::Result<String> {
    let mut node = format!("\"driver\":\"{}\",\"file\":{}", format.name(), file(path)?);
    let next = below.iter().position(|file| file.role == Role::Backing).unwrap_or(below.len());
    let (data, rest) = below.split_at(next);
    if let (Format::Qcow2, [data, ..]) = (format, data) {
        // The files of a VMDK cannot be listed here: its descriptor names them, and they are never
        // probed.
        let _ = write!(node, ",\"data-file\":{}", file(&data.path)?);
    }
    match rest.split_first() {
        Some((backing, rest)) => {
            let _ = write!(node, ",\"backing\":{{{}}}", layer(&backing.path, backing.format, rest)?);
        }
        None if format != Format::Raw => node.push_str(",\"backing\":null"),
        None => {}
    }
    Ok(node)
}

/// Returns the node of a file or a block device.
fn file(path: &Path) -> io::Result<String> {
    let is_device = std::fs::metadata(path)?.file_type().is_block_device();
    let driver = if is_device { "host_device" } else { "file" };
    let text = path
        .to_str()
        .ok_or_else(|| io::Error::other(format!("{}: the path is not UTF-8", path.display())))?;
    Ok(format!("{{\"driver\":\"{driver}\",\"filename\":{}}}", quoted(text)))
}

/// Returns the text as a JSON string, with quotes and escapes.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_is_named_with_its_format_and_strings_are_escaped() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, b"").unwrap();
            path
        };
        let part = |name, format, role| ImageFile { path: file(name), format, role };
        let image = Image {
            path: file("top"),
            format: Format::Qcow2,
            files: vec![
                part("top.data", Format::Raw, Role::Data),
                part("mid\"\\\n", Format::Qcow2, Role::Backing),
                part("base", Format::Raw, Role::Backing),
            ],
        };
        let node = image.node(true).unwrap().replace(dir.path().to_str().unwrap(), "");
        let named = |name: &str| format!("{{\"driver\":\"file\",\"filename\":\"/{name}\"}}");
        let expected = format!(
            "json:{{\"force-share\":true,\"read-only\":true,\"driver\":\"qcow2\",\"file\":{},\"data-file\":{},\
             \"backing\":{{\"driver\":\"qcow2\",\"file\":{},\"backing\":{{\"driver\":\"raw\",\"file\":{}}}}}}}",
            named("top"),
            named("top.data"),
            named("mid\\\"\\\\\\u000a"),
            named("base")
        );
        assert_eq!(node, expected);
        let (parent, below) = image.parent().unwrap();
        assert!(parent.path.ends_with("mid\"\\\n") && below.len() == 1 && below[0].path.ends_with("base"));
        let alone = Image { files: Vec::new(), ..image };
        assert!(alone.parent().is_none());
        assert!(alone.node(false).unwrap().ends_with(",\"backing\":null}"));
    }
}
