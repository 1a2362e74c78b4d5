//! Image format and files of a disk's backing, decided and recorded when the operator adds the
//! disk.

use std::path::PathBuf;

use hob_storage::backing::{Format, ImageFile, Role};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The image of a disk whose backing is a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageSpec {
    /// Image format; absent until the disk is opened for the first time, unless it was configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) format: Option<FormatName>,
    /// The other files that the image refers to, from the top down; absent until they were
    /// recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) files: Option<Vec<FileSpec>>,
}

/// An image format, serialized by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FormatName(pub(crate) Format);

/// A file that an image refers to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileSpec {
    /// Absolute path of the file.
    pub(crate) path: PathBuf,
    pub(crate) format: FormatName,
    #[serde(with = "RoleName")]
    pub(crate) role: Role,
    /// Distinguishes the file from another file that replaces it at its path. Absent if the file's
    /// filesystem has no permanent names, and in state files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) identity: Option<String>,
}

/// [`Role`] in the state file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Role", rename_all = "kebab-case")]
enum RoleName {
    /// A lower layer with the data that the layers above it lack.
    Backing,
    /// External data file of the previous layer.
    Data,
}

impl ImageSpec {
    /// Creates the settings of a configured format, whose files are not recorded yet.
    pub(crate) fn of(format: Option<Format>) -> ImageSpec {
        ImageSpec { format: format.map(FormatName), files: None }
    }
}

impl FileSpec {
    /// Converts the storage crate's type into the form of the state file, without an identity.
    pub(crate) fn of(file: &ImageFile) -> FileSpec {
        let ImageFile { path, format, role } = file.clone();
        FileSpec { path, format: FormatName(format), role, identity: None }
    }

    /// Converts the file into the storage crate's type.
    pub(crate) fn file(&self) -> ImageFile {
        ImageFile { path: self.path.clone(), format: self.format.0, role: self.role }
    }
}

impl Serialize for FormatName {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.0.name())
    }
}

impl<'de> Deserialize<'de> for FormatName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<FormatName, D::Error> {
        let name = String::deserialize(from)?;
        let format = Format::from_name(&name);
        format
            .map(FormatName)
            .ok_or_else(|| serde::de::Error::custom(format!("there is no image format '{name}'")))
    }
}
