//! How the backing of a disk is read, and of which files it consists: decided and recorded when the operator adds the disk.

use std::path::PathBuf;

use hob_storage::backing::{Format, ImageFile, Role};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The image of a disk whose backing is a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageSpec {
    /// Its format; absent until the disk is opened for the first time, unless it was configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) format: Option<FormatName>,
    /// The files that it consists of besides its own, from the top down; absent until they were recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) files: Option<Vec<FileSpec>>,
}

/// A format, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FormatName(pub(crate) Format);

/// One more file of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileSpec {
    /// Absolute.
    pub(crate) path: PathBuf,
    /// Its format.
    pub(crate) format: FormatName,
    /// Its role.
    pub(crate) role: RoleName,
}

/// [`Role`] in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RoleName {
    /// It has the data that is not in the layers above it.
    Backing,
    /// The data of the layer before it.
    Data,
}

impl ImageSpec {
    /// For a configured format, whose files are to be recorded.
    pub(crate) fn of(format: Option<Format>) -> ImageSpec {
        ImageSpec { format: format.map(FormatName), files: None }
    }
}

impl FileSpec {
    /// For the state.
    pub(crate) fn of(file: &ImageFile) -> FileSpec {
        let role = match file.role {
            Role::Backing => RoleName::Backing,
            Role::Data => RoleName::Data,
        };
        FileSpec { path: file.path.clone(), format: FormatName(file.format), role }
    }

    /// In storage's types.
    pub(crate) fn file(&self) -> ImageFile {
        let role = match self.role {
            RoleName::Backing => Role::Backing,
            RoleName::Data => Role::Data,
        };
        ImageFile { path: self.path.clone(), format: self.format.0, role }
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
