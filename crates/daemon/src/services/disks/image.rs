//! Opens backings with the image format and the backing files that were recorded when the disk was
//! added.
//!
//! The operator names the format, or the file's extension determines it. A file with an unknown
//! extension is raw. If the content of such a file looks like an image when the disk is added, the
//! operator must name the format. The daemon never derives the format from the content later,
//! because the guest may have written it.

use std::path::Path;

use hob_storage::backing::{Format, ImageFile, Nameless, permanent_name};

use super::Disks;
use crate::api_error::{ApiError, Result, invalid, open_error};
use crate::hardware::{Backing, BackingOptions};
use crate::image::{check_format, files_of, unknown_scheme};
use crate::services::flash::blocking;
use crate::services::registry::ADDING;
use crate::state::{DiskState, FileSpec, FormatName, ImageSpec};
use crate::watchdog::contained;

/// Options for opening a backing, and the image settings to save.
struct Settled {
    image: ImageSpec,
    format: Option<Format>,
    files: Vec<ImageFile>,
    /// Notes for the log.
    notes: Vec<String>,
}

/// Returns the image settings that an operator requests for a disk.
pub(in crate::services) fn image_asked(backing: &str, format: Option<&str>) -> Result<ImageSpec> {
    check_format(backing, format).map(ImageSpec::of).map_err(ApiError::invalid)
}

impl Disks {
    /// Returns the options for opening the backing of a disk, and saves the disk's image settings
    /// if they are new.
    pub(in crate::services) async fn image_options(&self, name: &str) -> Result<BackingOptions> {
        let (wanted, is_noted, is_new) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (disk.wanted.clone(), disk.content_noted, disk.busy == Some(ADDING))
        };
        let (options, image, notes) = self.options_of(&wanted).await?;
        if !is_noted {
            notes.iter().for_each(|note| tracing::warn!("{name}: {note}"));
        }
        let is_changed = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.content_noted = true;
            let is_changed = disk.wanted.image != image;
            disk.wanted.image = image;
            is_changed
        };
        if is_changed && !is_new {
            self.registry.save().await?;
        }
        Ok(options)
    }

    /// Returns the options for opening the backing of a disk, the image settings to save, and notes
    /// for the log. The disk may not be on this host yet.
    pub(in crate::services) async fn options_of(
        &self,
        wanted: &DiskState,
    ) -> Result<(BackingOptions, Option<ImageSpec>, Vec<String>)> {
        let wait_max = self.wait_max_of(wanted.backing_timeout);
        let shares_parent = wanted.share_parent.is_some();
        let options = BackingOptions { wait_max, shares_parent, ..self.backing_options.clone() };
        if !Backing::is_path(&wanted.backing) {
            return Ok((options, wanted.image.clone(), Vec::new()));
        }
        let (backing, image) = (wanted.backing.clone(), wanted.image.clone());
        let Settled { image, format, files, notes } =
            blocking(move || contained(|| settle(&backing, image))).await??;
        Ok((BackingOptions { format, files, ..options }, Some(image), notes))
    }
}

/// Completes the recorded image description, and compares the recorded files with the present ones.
/// State files of earlier versions have no image description, because those versions detected the
/// format at every opening.
fn settle(backing: &str, image: Option<ImageSpec>) -> Result<Settled> {
    if let Some(what) = unknown_scheme(backing) {
        return Err(invalid!("backing {backing}: {what}"));
    }
    let path = std::path::absolute(backing).map_err(|error| invalid!("{backing}: {error}"))?;
    let mut notes = Vec::new();
    let is_imported = image.is_none();
    let mut image = image.unwrap_or_default();
    let format = match image.format {
        Some(FormatName(format)) => format,
        None if is_imported => assume(&path, &mut notes),
        None => decide(&path)?,
    };
    image.format = Some(FormatName(format));
    if format == Format::Raw {
        if let Ok(other) = Format::resembled(&path)
            && other != Format::Raw
        {
            notes.push(format!(
                "{backing} is served as raw, and its content looks like a {} image: the guest may have \
                written that. If the file is an image, remove the disk and add it with --format={}",
                other.title(),
                other.name()
            ));
        } else if Format::resembles_luks(&path).is_ok_and(|is_luks| is_luks) {
            notes.push(format!(
                "{backing} is served as raw, and its content looks like a LUKS volume: guests get \
                encrypted data. If this host is to decrypt it, open it with 'cryptsetup open', and \
                add the device in /dev/mapper instead"
            ));
        }
        image.files = Some(Vec::new());
        return Ok(Settled { image, format: Some(format), files: Vec::new(), notes });
    }
    let known = image.files.take();
    let recorded: Option<Vec<ImageFile>> =
        known.as_ref().map(|files| files.iter().map(FileSpec::file).collect());
    // If the path's filesystem hangs, this check refuses the path before a program is started for
    // it.
    Format::resembled(&path).map_err(|error| open_error(&error))?;
    let found = files_of(&path, format, recorded.as_deref()).and_then(|files| {
        let specs = identified(&files, known.as_deref().unwrap_or_default())?;
        Ok((files, specs))
    });
    let (files, specs) = found.map_err(|what| {
        let error = invalid!("{backing} ({} image): {what}", format.title());
        match recorded {
            Some(_) => {
                let how = "if this change is intended, remove the disk and add it again to record its files; if its cache \
                    may have dirty data, undo the change first and drain the disk with 'hob drain'";
                error.hint(how)
            }
            None => error,
        }
    })?;
    image.files = Some(specs);
    Ok(Settled { image, format: Some(format), files, notes })
}

/// Returns the backing files of an image with their present identities, which the caller saves. The
/// caller has checked that the paths are those of the `recorded` files, if any are recorded.
///
/// # Errors
/// Returns a text that names the file if its path may lead to another file than the recorded one.
fn identified(files: &[ImageFile], recorded: &[FileSpec]) -> Result<Vec<FileSpec>, String> {
    let mut specs = Vec::with_capacity(files.len());
    for (number, file) in files.iter().enumerate() {
        let before = recorded.get(number).and_then(|recorded| recorded.identity.clone());
        let identity = compared(before, permanent_name(&file.path))
            .map_err(|what| format!("{} {what}", file.path.display()))?;
        specs.push(FileSpec { identity, ..FileSpec::of(file) });
    }
    Ok(specs)
}

/// Compares the recorded identity of a file with the present one. Returns the identity to record.
///
/// # Errors
/// Returns a text about the file if it may be another file than the recorded one.
fn compared(before: Option<String>, now: Result<String, Nameless>) -> Result<Option<String>, String> {
    let Some(before) = before else { return Ok(now.ok()) };
    let is_same = match &now {
        Ok(now) => *now == before,
        // The same file has a creation time only with some versions of kernels and servers.
        Err(Nameless::NoCreationTime { start }) => before.starts_with(start),
        Err(Nameless::Other(_)) => false,
    };
    match now {
        _ if is_same => Ok(Some(before)),
        Ok(now) => Err(format!("was replaced: it is another file ({now}) than the recorded one ({before})")),
        Err(Nameless::NoCreationTime { .. }) => {
            Err(format!("was replaced: it has another inode than the recorded file ({before})"))
        }
        Err(Nameless::Other(why)) => {
            Err(format!("{why}, so hob cannot tell whether it is the recorded file ({before})"))
        }
    }
}

/// Returns the format of a disk that an earlier version of hob served.
fn assume(path: &Path, notes: &mut Vec<String>) -> Format {
    let format = Format::assumed(path);
    let why = if Format::of_extension(path).is_some() {
        "according to its name"
    } else {
        "its name shows no other format"
    };
    notes.push(format!("{} is served as {} from now on ({why})", path.display(), format.name()));
    format
}

/// Returns the format of a new disk, or an error that asks the operator to name it.
fn decide(path: &Path) -> Result<Format> {
    if let Some(format) = Format::of_extension(path) {
        return Ok(format);
    }
    match Format::resembled(path).map_err(|error| open_error(&error))? {
        Format::Raw if Format::resembles_luks(path).map_err(|error| open_error(&error))? => Err(invalid!(
            "the content of {} looks like a LUKS volume; pass --format=raw (or format = in \
                hob.toml) if guests decrypt it, or add the device that 'cryptsetup open' makes",
            path.display()
        )),
        Format::Raw => Ok(Format::Raw),
        other => Err(invalid!(
            "the content of {} looks like a {} image, but its name has another extension; pass \
            --format={} (or format = in hob.toml), or --format=raw if a guest wrote this content",
            path.display(),
            other.title(),
            other.name()
        )),
    }
}

#[cfg(test)]
mod tests {
    use hob_storage::backing::Role;

    use super::*;

    /// A file of 1 MiB that begins like a qcow2 image.
    fn looks_like_qcow2(directory: &Path, name: &str) -> String {
        let path = directory.join(name);
        let mut content = vec![0; 1 << 20];
        content[..4].copy_from_slice(b"QFI\xfb");
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }

    #[test]
    fn content_asks_when_a_disk_is_added_and_never_again() {
        let dir = tempfile::tempdir().unwrap();
        let disk = looks_like_qcow2(dir.path(), "disk");
        let asked = settle(&disk, Some(ImageSpec::default())).err().unwrap().to_string();
        assert!(asked.contains("--format=qcow2") && asked.contains("--format=raw"), "{asked}");
        assert!(!asked.contains('\n'));
        let said = settle(&disk, Some(ImageSpec::of(Some(Format::Raw)))).unwrap();
        assert_eq!((said.format, said.files.len(), said.notes.len()), (Some(Format::Raw), 0, 1));
        // The disk was empty when it was added, and the guest has written an image header since.
        std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
        let added = settle(&disk, Some(ImageSpec::default())).unwrap();
        assert_eq!((added.format, added.notes.len()), (Some(Format::Raw), 0));
        looks_like_qcow2(dir.path(), "disk");
        let again = settle(&disk, Some(added.image.clone())).unwrap();
        assert_eq!((again.format, again.image), (Some(Format::Raw), added.image));
        assert!(again.notes[0].contains("looks like a qcow2 image"), "{:?}", again.notes);
    }

    /// If hob accepted the replaced file, a guest would read the data of another image.
    #[test]
    fn a_replaced_file_below_an_image_is_refused_until_the_disk_is_added_again() {
        let dir = tempfile::tempdir().unwrap();
        let [base, other, image] = ["base", "other", "disk.qcow2"].map(|name| dir.path().join(name));
        std::fs::write(&base, vec![1; 1 << 20]).unwrap();
        let mut command = std::process::Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).args([&base, &image]);
        assert!(command.status().expect("qemu-img is installed").success());
        let image = image.to_str().unwrap();
        let added = settle(image, Some(ImageSpec::default())).unwrap().image;
        std::fs::write(&base, vec![2; 1 << 20]).unwrap();
        assert_eq!(settle(image, Some(added.clone())).unwrap().image, added, "it is the same file");
        std::fs::write(&other, vec![2; 1 << 20]).unwrap();
        std::fs::rename(&other, &base).unwrap();
        let refused = settle(image, Some(added.clone())).err().unwrap().to_string();
        let parts = [base.to_str().unwrap(), "was replaced", "remove the disk and add it again"];
        assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");
        let again = settle(image, Some(ImageSpec::default())).unwrap().image;
        // A state file of an earlier version has no identities.
        let mut older = added;
        older.files.iter_mut().flatten().for_each(|file| file.identity = None);
        assert_eq!(settle(image, Some(older)).unwrap().image, again);
    }

    #[test]
    fn a_file_whose_identity_is_unknown_is_not_the_recorded_one() {
        let recorded = "inode 7 created at 1.000000002";
        let with = |path: &str, identity: Option<&str>| {
            let file = ImageFile { path: path.into(), format: Format::Raw, role: Role::Backing };
            let known = FileSpec { identity: identity.map(str::to_owned), ..FileSpec::of(&file) };
            identified(&[file], &[known])
        };
        let missing = "/proc/self/no-such-file";
        for (path, why) in [
            ("/dev/null", "not a regular file"),
            ("/proc/version", "without permanent inode numbers"),
            (missing, "cannot be examined"),
        ] {
            let refused = with(path, Some(recorded)).unwrap_err();
            assert!(refused.starts_with(path) && refused.contains(why), "{refused}");
            assert_eq!(with(path, None).unwrap()[0].identity, None);
        }
        let undated = |inode: u64| Nameless::NoCreationTime { start: format!("inode {inode} created at ") };
        let before = || Some(recorded.to_owned());
        assert_eq!(compared(before(), Err(undated(7))), Ok(before()));
        assert!(compared(before(), Err(undated(77))).unwrap_err().contains("was replaced"));
        assert_eq!(compared(None, Err(undated(7))), Ok(None));
    }

    #[test]
    fn a_luks_volume_is_raw_with_one_warning() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        std::fs::write(&disk, [&b"LUKS\xba\xbe\0\x02"[..], &[0; 4088]].concat()).unwrap();
        let disk = disk.to_str().unwrap();
        let asked = settle(disk, Some(ImageSpec::default())).err().unwrap().to_string();
        assert!(asked.contains("LUKS") && asked.contains("--format=raw"), "{asked}");
        let said = settle(disk, Some(ImageSpec::of(Some(Format::Raw)))).unwrap();
        assert_eq!((said.format, said.notes.len()), (Some(Format::Raw), 1));
        assert!(said.notes[0].contains("looks like a LUKS volume"), "{:?}", said.notes);
    }

    #[test]
    fn the_extension_decides_whatever_the_content_is() {
        let dir = tempfile::tempdir().unwrap();
        let raw = looks_like_qcow2(dir.path(), "disk.raw");
        let settled = settle(&raw, Some(ImageSpec::default())).unwrap();
        assert_eq!((settled.format, settled.notes.len()), (Some(Format::Raw), 1));
        let image = dir.path().join("disk.qcow2");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let refused = settle(image.to_str().unwrap(), Some(ImageSpec::default())).err().unwrap().to_string();
        assert!(refused.contains("qcow2 image"), "{refused}");
    }

    #[test]
    fn disks_of_earlier_versions_are_imported_by_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let disk = looks_like_qcow2(dir.path(), "disk.img");
        let settled = settle(&disk, None).unwrap();
        assert_eq!(settled.format, Some(Format::Raw));
        assert!(settled.notes[0].contains("is served as raw from now on"), "{:?}", settled.notes);
        assert!(settled.notes[1].contains("looks like"), "{:?}", settled.notes);
        assert!(settle(&disk, Some(settled.image)).unwrap().notes.len() == 1);
    }

    #[test]
    fn formats_are_for_paths() {
        assert_eq!(image_asked("/d", Some("vdi")).unwrap(), ImageSpec::of(Some(Format::Vdi)));
        assert_eq!(image_asked("nbd://h/e", None).unwrap(), ImageSpec::default());
        assert!(image_asked("nbd://h/e", Some("raw")).unwrap_err().to_string().contains("nbd://h/e"));
        assert!(image_asked("/d", Some("luks")).unwrap_err().to_string().contains("qcow2"));
        let refused = settle("ftp://x/y", Some(ImageSpec::default())).err().unwrap().to_string();
        assert!(refused.contains("does not know ftp://") && refused.contains("nbd://HOST"), "{refused}");
    }
}
