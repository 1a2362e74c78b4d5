//! The files of an image, as `qemu-img` finds them in the images' headers, one layer at a time.
//!
//! Each layer is examined in the format that the layer above records. Formats are never probed: a
//! layer that does not record the format of its backing file is refused. `qemu-img` may then open
//! exactly the files found in the headers.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hob_storage::backing::qemu_nbd::confine;
use hob_storage::backing::{BACKINGS, Backing, Format, ImageFile, Role};
use serde::Deserialize;

/// Maximum number of files of an image.
const FILES_MAX: usize = 256;

/// Maximum time for `qemu-img` to examine a layer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Maximum length of the output of `qemu-img`, in bytes.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// Output of `qemu-img info` for one layer.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Info {
    full_backing_filename: Option<String>,
    backing_filename: Option<String>,
    backing_filename_format: Option<String>,
    format_specific: Option<Specific>,
}

/// Format-specific part of the output.
#[derive(Debug, Default, Deserialize)]
struct Specific {
    #[serde(default)]
    data: Details,
}

/// File names in the format-specific part.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Details {
    data_file: Option<String>,
    #[serde(default)]
    extents: Vec<Extent>,
}

/// One extent of a VMDK image.
#[derive(Debug, Deserialize)]
struct Extent {
    filename: Option<String>,
    format: Option<String>,
}

/// Parses the name of an image format, and checks that the backing can have a format.
///
/// # Errors
/// Returns the reason as text if the format is unknown, or if the backing cannot have a format.
pub(crate) fn check_format(backing: &str, format: Option<&str>) -> Result<Option<Format>, String> {
    let Some(name) = format else { return Ok(None) };
    let known = || Format::all().map(Format::name).collect::<Vec<_>>().join(", ");
    let format = Format::from_name(name)
        .ok_or_else(|| format!("format '{name}' is unknown; the formats are {}", known()))?;
    if !Backing::is_path(backing) {
        return Err(format!("{backing} has no format: only files and block devices have one"));
    }
    Ok(Some(format))
}

/// Returns an error if the backing is a URI of an unknown scheme, which hob would take for a
/// relative path. The error lists the known URIs.
pub(crate) fn unknown_scheme(backing: &str) -> Option<String> {
    let (scheme, _) = backing.split_once("://")?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    if !is_scheme {
        return None;
    }
    let known: Vec<&str> = BACKINGS.iter().map(|kind| kind.syntax).collect();
    Some(format!("hob does not know {scheme}://; a backing is one of: {}", known.join("; ")))
}

/// Returns the files below an image, from the top down. If `recorded` lists files, the files found
/// must be the same.
///
/// # Errors
/// Returns a text if a file cannot be examined or differs from the record, the files form a loop,
/// or there are too many.
pub(crate) fn files_of(
    image: &Path,
    format: Format,
    recorded: Option<&[ImageFile]>,
) -> Result<Vec<ImageFile>, String> {
    let mut files: Vec<ImageFile> = Vec::new();
    let (mut layer, mut layer_format) = (image.to_owned(), format);
    loop {
        if layer_format == Format::Raw {
            break;
        }
        let info = examine(&layer, layer_format, image, recorded)?;
        files.extend(info.data_files(&layer));
        check_recorded(&layer, &files, recorded)?;
        let Some(backing) = info.backing(&layer)? else { break };
        (layer, layer_format) = (backing.path.clone(), backing.format);
        let is_known = layer == image || files.iter().any(|file| file.path == layer);
        if is_known {
            return Err(format!(
                "{}: its backing files form a loop: {} is below itself; 'qemu-img rebase' corrects the backing file of an \
                 image",
                image.display(),
                layer.display()
            ));
        }
        files.push(backing);
        check_recorded(&layer, &files, recorded)?;
        if files.len() > FILES_MAX {
            return Err(format!("{}: the image consists of more than {FILES_MAX} files", image.display()));
        }
    }
    match recorded.and_then(|recorded| recorded.get(files.len())) {
        Some(gone) => Err(format!(
            "{} was recorded below {} and does not exist any more",
            gone.path.display(),
            layer.display()
        )),
        None => Ok(files),
    }
}

/// Returns an error if the files found so far differ from the recorded ones.
fn check_recorded(layer: &Path, found: &[ImageFile], recorded: Option<&[ImageFile]>) -> Result<(), String> {
    let Some(recorded) = recorded else { return Ok(()) };
    let differs = found.iter().zip(recorded.iter().map(Some).chain(std::iter::repeat(None)));
    for (found, recorded) in differs {
        let (path, format) = (found.path.display(), found.format.name());
        match recorded {
            Some(recorded) if recorded == found => {}
            Some(recorded) => {
                let (was, was_format) = (recorded.path.display(), recorded.format.name());
                return Err(format!(
                    "{was} ({was_format}) was recorded, and {path} ({format}) has replaced it"
                ));
            }
            None => {
                return Err(format!(
                    "{} now names {path} ({format}), which was not recorded",
                    layer.display()
                ));
            }
        }
    }
    Ok(())
}

impl Info {
    fn data_files(&self, layer: &Path) -> Vec<ImageFile> {
        let Some(Specific { data }) = &self.format_specific else { return Vec::new() };
        let beside = |name: &String| layer.parent().unwrap_or(Path::new("/")).join(name);
        let external = data.data_file.iter().map(|name| (beside(name), Format::Raw));
        let extents = data.extents.iter().filter_map(|extent| {
            let is_flat = extent.format.as_deref() == Some("FLAT");
            Some((beside(extent.filename.as_ref()?), if is_flat { Format::Raw } else { Format::Vmdk }))
        });
        let files = external.chain(extents).filter(|(path, _)| path != layer);
        files.map(|(path, format)| ImageFile { path, format, role: Role::Data }).collect()
    }

    fn backing(&self, layer: &Path) -> Result<Option<ImageFile>, String> {
        let Some(name) = self.full_backing_filename.as_ref().or(self.backing_filename.as_ref()) else {
            return Ok(None);
        };
        let (layer, path) = (layer.display(), PathBuf::from(name.strip_prefix("file:").unwrap_or(name)));
        if !path.is_absolute() {
            return Err(format!(
                "{layer}: its backing file is '{name}'; backing files must be files or block devices of this host"
            ));
        }
        let Some(recorded) = &self.backing_filename_format else {
            return Err(format!(
                "{layer}: it does not record the format of its backing file {name}; \
                 'qemu-img rebase -u -F FORMAT -b {name} {layer}' records it"
            ));
        };
        match Format::from_name(recorded) {
            Some(format) => Ok(Some(ImageFile { path, format, role: Role::Backing })),
            None => Err(format!(
                "{layer}: its backing file {name} has the format {recorded}, which hob does not know"
            )),
        }
    }
}

/// Asks `qemu-img` about one layer. If the image's files are recorded, a sandbox allows `qemu-img`
/// to read only these files.
fn examine(
    layer: &Path,
    format: Format,
    image: &Path,
    recorded: Option<&[ImageFile]>,
) -> Result<Info, String> {
    let mut command = Command::new("qemu-img");
    command.args(["info", "--force-share", "--output=json", "-f", format.name(), "--"]).arg(layer);
    if let Some(recorded) = recorded {
        confine(&mut command, image, recorded).map_err(|error| error.to_string())?;
    }
    let said = run(command).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!(
            "{} images are examined and served by qemu-img and qemu-nbd, which are not installed (Debian: apt install qemu-utils)",
            format.title()
        ),
        _ => error.to_string(),
    })?;
    serde_json::from_slice(&said)
        .map_err(|error| format!("the output of qemu-img about {} is malformed: {error}", layer.display()))
}

/// Runs a program with a time limit, and returns its output.
fn run(mut command: Command) -> io::Result<Vec<u8>> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let readers = [output.map(reader), errors.map(reader)];
    let deadline = Instant::now() + ANSWER_MAX;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            // A process blocked on a filesystem may outlive this call; this call does not wait for
            // the process.
            let _ = child.kill();
            return Err(io::Error::other(format!(
                "qemu-img did not answer within {} s",
                ANSWER_MAX.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let [output, errors] =
        readers.map(|reader| reader.and_then(|reader| reader.join().ok()).unwrap_or_default());
    if status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&errors);
    Err(io::Error::other(said.trim().trim_start_matches("qemu-img: ").replace('\n', "; ")))
}

fn reader(from: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu_img(directory: &Path, args: &str) {
        let mut command = Command::new("qemu-img");
        let status = command.current_dir(directory).args(args.split(' ')).stdout(Stdio::null()).status();
        assert!(status.expect("qemu-img is installed").success(), "{args}");
    }

    #[test]
    fn chains_and_data_files_are_found_and_others_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("base"), vec![0; 1 << 20]).unwrap();
        std::fs::write(at("other"), vec![0; 1 << 20]).unwrap();
        qemu_img(dir.path(), "create -q -f qcow2 -F raw -b base mid.qcow2");
        qemu_img(dir.path(), "create -q -f qcow2 -F qcow2 -b mid.qcow2 top.qcow2");
        let found = files_of(&at("top.qcow2"), Format::Qcow2, None).unwrap();
        let file = |name, format, role| ImageFile { path: at(name), format, role };
        let expected =
            [file("mid.qcow2", Format::Qcow2, Role::Backing), file("base", Format::Raw, Role::Backing)];
        assert_eq!(found, expected);
        assert_eq!(files_of(&at("top.qcow2"), Format::Qcow2, Some(&found)).unwrap(), found);
        // In the middle of the chain, an image refers to another file.
        qemu_img(dir.path(), "rebase -u -f qcow2 -F raw -b other mid.qcow2");
        let error = files_of(&at("top.qcow2"), Format::Qcow2, Some(&found)).unwrap_err();
        assert!(error.contains("base (raw) was recorded") && error.contains("other (raw)"), "{error}");
        qemu_img(dir.path(), "rebase -u -f qcow2 -b  mid.qcow2");
        let error = files_of(&at("top.qcow2"), Format::Qcow2, Some(&found)).unwrap_err();
        assert!(
            error.contains("base was recorded below") && error.contains("does not exist any more"),
            "{error}"
        );
        // An image that had no other files gets a backing file or an external data file.
        qemu_img(dir.path(), "create -q -f qcow2 alone.qcow2 1M");
        assert_eq!(files_of(&at("alone.qcow2"), Format::Qcow2, None).unwrap(), []);
        qemu_img(dir.path(), "rebase -u -f qcow2 -F raw -b base alone.qcow2");
        let error = files_of(&at("alone.qcow2"), Format::Qcow2, Some(&[])).unwrap_err();
        assert!(error.contains("base (raw), which was not recorded"), "{error}");
        qemu_img(dir.path(), "create -q -f qcow2 -o data_file=data,data_file_raw=on alone.qcow2 1M");
        let error = files_of(&at("alone.qcow2"), Format::Qcow2, Some(&[])).unwrap_err();
        assert!(error.contains("data"), "{error}");
        let found = files_of(&at("alone.qcow2"), Format::Qcow2, None).unwrap();
        assert_eq!(found, [file("data", Format::Raw, Role::Data)]);
        assert_eq!(files_of(&at("alone.qcow2"), Format::Qcow2, Some(&found)).unwrap(), found);
    }

    #[test]
    fn a_loop_of_backing_files_is_refused_as_such() {
        let dir = tempfile::tempdir().unwrap();
        qemu_img(dir.path(), "create -q -f qcow2 low.qcow2 1M");
        qemu_img(dir.path(), "create -q -f qcow2 -F qcow2 -b low.qcow2 top.qcow2");
        for (low, repeated) in [("top.qcow2", "top.qcow2"), ("low.qcow2", "low.qcow2")] {
            qemu_img(dir.path(), &format!("rebase -u -f qcow2 -F qcow2 -b {low} low.qcow2"));
            let error = files_of(&dir.path().join("top.qcow2"), Format::Qcow2, None).unwrap_err();
            assert!(
                error.contains("form a loop") && error.contains(&format!("{repeated} is below itself")),
                "{error}"
            );
        }
    }

    #[test]
    fn the_extents_of_a_vmdk_are_its_data_files() {
        let dir = tempfile::tempdir().unwrap();
        qemu_img(dir.path(), "create -q -f vmdk -o subformat=monolithicFlat disk.vmdk 1M");
        let path = dir.path().join("disk-flat.vmdk");
        let found = files_of(&dir.path().join("disk.vmdk"), Format::Vmdk, None).unwrap();
        assert_eq!(found, [ImageFile { path, format: Format::Raw, role: Role::Data }]);
        qemu_img(dir.path(), "create -q -f vmdk whole.vmdk 1M");
        assert_eq!(files_of(&dir.path().join("whole.vmdk"), Format::Vmdk, None).unwrap(), []);
    }

    #[test]
    fn a_missing_format_is_required_and_never_probed() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("top.qcow2");
        let info = |text: &str| serde_json::from_str::<Info>(text).unwrap();
        let no_format = info(r#"{"full-backing-filename": "/base"}"#);
        assert!(no_format.backing(&image).unwrap_err().contains("qemu-img rebase"));
        let remote = info(r#"{"full-backing-filename": "nbd://h/e", "backing-filename-format": "raw"}"#);
        assert!(remote.backing(&image).unwrap_err().contains("files or block devices"));
        let odd = info(r#"{"full-backing-filename": "/base", "backing-filename-format": "luks"}"#);
        assert!(odd.backing(&image).unwrap_err().contains("luks"));
        // A raw file with an image header stays raw if it is declared so.
        qemu_img(dir.path(), "create -q -f qcow2 top.qcow2 1M");
        assert_eq!(files_of(&image, Format::Raw, None).unwrap(), []);
        assert!(files_of(&image, Format::Vmdk, None).is_err());
    }
}
