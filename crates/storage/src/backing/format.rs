//! Image formats: how hob decides how to read a file or block device.
//!
//! The operator or the file's extension determines the format of an image. The content never
//! determines it, because the guest writes the content. A guest could write an image header to its
//! raw disk that names host files as backing files. hob compares the content with known headers
//! when a disk is added, only to ask the operator or to warn.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{OpenError, path};

/// How the bytes of a file or block device are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// A raw image: byte N of the file is byte N of the disk.
    #[default]
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
    /// VMware's image format.
    Vmdk,
    /// VirtualBox's image format.
    Vdi,
    /// The newer image format of Hyper-V.
    Vhdx,
    /// The image format of Virtual PC and older Hyper-V versions, VHD.
    Vpc,
}

/// Properties of one image format.
struct Row {
    format: Format,
    /// Name of the format in QEMU and hob.
    name: &'static str,
    /// Name of the format in sentences for users.
    title: &'static str,
    /// Extensions of the format's file names, in lower case.
    endings: &'static [&'static str],
    /// Offset and bytes of the format's headers.
    headers: &'static [(u64, &'static [u8])],
}

/// All image formats. The first row with a matching file extension decides.
const FORMATS: &[Row] = &[
    Row {
        format: Format::Raw,
        name: "raw",
        title: "raw",
        // The data of a VMDK is a raw file beside its descriptor.
        endings: &[".raw", "-flat.vmdk", ".iso"],
        headers: &[],
    },
    Row {
        format: Format::Qcow2,
        name: "qcow2",
        title: "qcow2",
        endings: &[".qcow2"],
        headers: &[(0, b"QFI\xfb")],
    },
    Row {
        format: Format::Vmdk,
        name: "vmdk",
        title: "VMDK",
        endings: &[".vmdk"],
        headers: &[(0, b"KDMV"), (0, b"COWD"), (0, b"# Disk DescriptorFile")],
    },
    Row {
        format: Format::Vdi,
        name: "vdi",
        title: "VDI",
        endings: &[".vdi"],
        headers: &[(0x40, b"\x7f\x10\xda\xbe")],
    },
    Row {
        format: Format::Vhdx,
        name: "vhdx",
        title: "VHDX",
        endings: &[".vhdx"],
        headers: &[(0, b"vhdxfile")],
    },
    Row {
        format: Format::Vpc,
        name: "vpc",
        title: "VPC",
        endings: &[".vhd", ".vpc"],
        headers: &[(0, VPC_COOKIE)],
    },
];

/// Header of VHD images. A VHD of fixed size has this header only in its last sector.
const VPC_COOKIE: &[u8] = b"conectix";

/// Header of LUKS1 and LUKS2 volumes.
const LUKS_MAGIC: &[u8] = b"LUKS\xba\xbe";

impl Format {
    /// Returns all image formats.
    pub fn all() -> impl Iterator<Item = Format> {
        FORMATS.iter().map(|row| row.format)
    }

    /// Returns the format's name in commands, which is also QEMU's name.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the format's name for sentences.
    pub fn title(self) -> &'static str {
        self.row().title
    }

    /// Returns the format with this name.
    pub fn from_name(name: &str) -> Option<Format> {
        FORMATS.iter().find(|row| row.name == name).map(|row| row.format)
    }

    /// Returns the format for a file's extension; `None` for extensions of several formats, such as
    /// `.img`.
    pub fn of_extension(path: &Path) -> Option<Format> {
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let ends = |row: &&Row| row.endings.iter().any(|ending| name.ends_with(ending));
        FORMATS.iter().find(ends).map(|row| row.format)
    }

    /// Returns the format of a path: by its extension, otherwise raw.
    pub fn assumed(path: &Path) -> Format {
        Format::of_extension(path).unwrap_or_default()
    }

    /// Returns the format whose header the file contains at the usual place; raw if there is none.
    /// The result must not decide how the file is opened.
    ///
    /// # Errors
    /// Returns an [`OpenError`] if the path cannot be a backing.
    pub fn resembled(path: &Path) -> Result<Format, OpenError> {
        let system = |source| OpenError::System { path: path.into(), source };
        path::check(path)?;
        let file = File::open(path).map_err(system)?;
        let mut head = Vec::new();
        let mut chunk = [0; 512];
        let read = file.read_at(&mut chunk, 0).map_err(system)?;
        head.extend_from_slice(&chunk[..read]);
        let has = |row: &&Row| {
            row.headers.iter().any(|(offset, bytes)| {
                head.get(*offset as usize..).is_some_and(|rest| rest.starts_with(bytes))
            })
        };
        if let Some(row) = FORMATS.iter().find(has) {
            return Ok(row.format);
        }
        let size =
            rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(|errno| system(errno.into()))?;
        let mut cookie = [0; VPC_COOKIE.len()];
        let is_vpc =
            size >= 512 && file.read_exact_at(&mut cookie, size - 512).is_ok() && cookie == VPC_COOKIE;
        Ok(if is_vpc { Format::Vpc } else { Format::Raw })
    }

    /// Returns true if the content starts with the header of a LUKS volume. Such a disk is raw.
    ///
    /// # Errors
    /// Returns an [`OpenError`] if the path cannot be a backing.
    pub fn resembles_luks(path: &Path) -> Result<bool, OpenError> {
        let system = |source| OpenError::System { path: path.into(), source };
        path::check(path)?;
        let file = File::open(path).map_err(system)?;
        let mut head = [0; LUKS_MAGIC.len()];
        let read = file.read_at(&mut head, 0).map_err(system)?;
        Ok(head[..read] == *LUKS_MAGIC)
    }

    fn row(self) -> &'static Row {
        FORMATS.iter().find(|row| row.format == self).expect("every format has a row")
    }
}

/// A file that belongs to an image besides the image file itself. hob records these files when the
/// operator adds the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    /// Absolute path of the file.
    pub path: std::path::PathBuf,
    /// Format of the file.
    pub format: Format,
    /// Role of the file in the image.
    pub role: Role,
}

/// Role of a file in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A backing file: it has the data that the layers above it do not have, and is only read.
    Backing,
    /// A data file: it has the data of the previous layer, which contains only metadata.
    Data,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_decide_and_ambiguous_ones_do_not() {
        let of = |name| Format::of_extension(Path::new(name));
        for (name, format) in [
            ("/a/vm.raw", Format::Raw),
            ("/a/vm.QCOW2", Format::Qcow2),
            ("vm.vmdk", Format::Vmdk),
            ("vm-flat.vmdk", Format::Raw),
            ("vm.vdi", Format::Vdi),
            ("vm.vhdx", Format::Vhdx),
            ("vm.vhd", Format::Vpc),
        ] {
            assert_eq!(of(name), Some(format), "{name}");
        }
        for name in ["/dev/sdb", "vm.img", "disk", "vm.qcow2.bak", "/a.raw/disk"] {
            assert_eq!(of(name), None, "{name}");
            assert_eq!(Format::assumed(Path::new(name)), Format::Raw);
        }
    }

    #[test]
    fn every_format_has_a_row_and_a_name_of_its_own() {
        for format in Format::all() {
            assert_eq!(Format::from_name(format.name()), Some(format));
        }
        assert_eq!(Format::from_name("luks"), None);
    }

    #[test]
    fn headers_and_the_footer_of_a_vhd_are_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let with = |offset: usize, bytes: &[u8]| {
            let mut content = vec![0; 1 << 20];
            content[offset..offset + bytes.len()].copy_from_slice(bytes);
            std::fs::write(&path, content).unwrap();
            Format::resembled(&path).unwrap()
        };
        for row in FORMATS {
            for (offset, bytes) in row.headers {
                assert_eq!(with(*offset as usize, bytes), row.format);
            }
        }
        assert_eq!(with((1 << 20) - 512, b"conectix"), Format::Vpc);
        assert!(!Format::resembles_luks(&path).unwrap());
        // Guests encrypt whole disks, and a raw disk can then look like this.
        assert_eq!(with(0, b"LUKS\xba\xbe"), Format::Raw);
        assert!(Format::resembles_luks(&path).unwrap());
        std::fs::write(&path, b"QF").unwrap();
        assert_eq!(Format::resembled(&path).unwrap(), Format::Raw);
        assert!(!Format::resembles_luks(&path).unwrap());
    }
}
