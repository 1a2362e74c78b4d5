//! Reading hob.toml. The file must be a regular file of limited length, because reading a FIFO
//! could wait forever, and some devices have no end.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Maximum length of hob.toml, bytes.
const BYTES_MAX: u64 = 64 << 20;

/// Directories of objects that may be pipes: `/dev/stdin`, and `/dev/fd/63` of a shell's `<(…)`.
const OWN: [&str; 2] = ["/dev", "/proc"];

/// Reads the text of a hob.toml.
///
/// # Errors
/// Returns an error if the path leads to something other than a regular file, except for paths in
/// `/dev` and `/proc`, or if the text is longer than 64 MiB.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let may_be_pipe = OWN.iter().any(|own| path.starts_with(own));
    let file_type = fs::metadata(path)?.file_type();
    if !file_type.is_file() && !file_type.is_dir() && !may_be_pipe {
        return Err(io::Error::other("the path does not lead to a regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(BYTES_MAX + 1).read_to_string(&mut text)?;
    match text.len() as u64 > BYTES_MAX {
        true => Err(io::Error::other(format!("the text is longer than {} MiB", BYTES_MAX >> 20))),
        false => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::tests::make_fifo;

    #[test]
    fn only_regular_files_of_limited_length_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let [fifo, file, long] = ["fifo", "file", "long"].map(|name| dir.path().join(name));
        make_fifo(&fifo);
        fs::write(&file, "shards = 2\n").unwrap();
        File::create(&long).unwrap().set_len(BYTES_MAX + 1).unwrap();
        assert_eq!(read(&file).unwrap(), "shards = 2\n");
        assert_eq!(read(Path::new("/dev/null")).unwrap(), "");
        for (path, part) in [
            (fifo.as_path(), "regular file"),
            (dir.path(), "Is a directory"),
            (&dir.path().join("missing"), "No such file"),
            (&long, "longer than 64 MiB"),
            (Path::new("/dev/zero"), "longer than 64 MiB"),
        ] {
            let error = read(path).unwrap_err().to_string();
            assert!(error.contains(part), "{}: {error}", path.display());
        }
    }
}
