//! The last hob.toml that a start or `hob config apply` accepted, saved in the state directory. A
//! daemon whose hob.toml is invalid starts with this copy
//! ([0046](../../../../docs/decisions/0046-what-ends-the-daemon.md)).
//!
//! The first line of the copy names the original file, so that a daemon with another hob.toml does
//! not use the copy. The copy is text like the original, and has the same permissions as the state,
//! because it may name secrets.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Config, default_state_dir, file};
use crate::state::create_private;

/// Name of the copy in the state directory.
const NAME: &str = "hob.toml.accepted";

/// Beginning of the saved file's first line. The path of hob.toml follows.
const HEAD: &str = "# accepted from ";

/// A configuration to save.
#[derive(Debug)]
pub(crate) struct Accepted {
    directory: PathBuf,
    text: String,
}

impl Config {
    /// Returns the configuration to save after a successful start or apply; `None` if this is the
    /// saved copy.
    pub(crate) fn to_keep(&self) -> Option<Accepted> {
        let path = self.path.as_deref().filter(|_| self.refused.is_none())?;
        Some(Accepted { directory: self.state_dir.clone(), text: format!("{}\n{}", head(path), self.text) })
    }

    /// Loads the saved copy, after the file at `path` was refused because of `why`. The state and
    /// the files that the copy names are not checked, because they were valid when it was saved.
    pub(crate) fn load_accepted(path: &Path, why: &str) -> Option<Config> {
        let directory = file::read(path).map_or_else(|_| default_state_dir(), |text| state_dir(&text));
        let text = fs::read_to_string(directory.join(NAME)).ok()?;
        text.strip_prefix(&head(path))?;
        let config = Config::read(&text, false).ok()?;
        let why = why.lines().collect::<Vec<_>>().join("; ");
        let path = path.to_owned();
        tracing::error!("{why}; the daemon starts with the last hob.toml that it accepted");
        let refused = format!(
            "{why}; the daemon uses the last hob.toml that it accepted. Correct the file until 'hob daemon --check' accepts it, and reload or use 'hob config apply'"
        );
        Some(Config { path: Some(path), text, refused: Some(refused), ..config })
    }
}

impl Accepted {
    /// Writes the copy of the configuration. After a failure, the previous copy is kept.
    pub(crate) fn keep(self) {
        let target = self.directory.join(NAME);
        if fs::read_to_string(&target).is_ok_and(|before| before == self.text) {
            return;
        }
        let spare = self.directory.join(format!("{NAME}.new"));
        let written = || -> io::Result<()> {
            let mut file = create_private(&spare)?;
            file.write_all(self.text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&spare, &target)?;
            fs::File::open(&self.directory)?.sync_all()
        };
        if let Err(error) = written() {
            tracing::warn!("cannot keep a copy of hob.toml as {}: {error}", target.display());
        }
    }
}

fn head(path: &Path) -> String {
    format!("{HEAD}{}", std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display())
}

/// Returns the state directory that the text of a hob.toml names, even if the rest of the text is
/// invalid.
fn state_dir(text: &str) -> PathBuf {
    let named = |line: &str| {
        let table: toml::Table = toml::from_str(line).ok()?;
        table.get("state_dir")?.as_str().map(PathBuf::from)
    };
    let mut before_tables = text.lines().take_while(|line| !line.trim_start().starts_with('['));
    named(text).or_else(|| before_tables.find_map(named)).unwrap_or_else(default_state_dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_directory_is_found_in_files_that_cannot_be_read() {
        assert_eq!(state_dir("shards = \nstate_dir = \"/s\"\n[["), Path::new("/s"));
        assert_eq!(state_dir("state_dir = \"/s\"\nshards = \"many\""), Path::new("/s"));
        assert_eq!(state_dir("nonsense\n[table]\nstate_dir = \"/of-a-table\""), default_state_dir());
    }

    #[test]
    fn a_file_that_is_refused_is_replaced_by_the_one_that_was_kept_from_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            let text = format!("state_dir = \"{}\"\n{text}", directory.path().display());
            fs::write(&path, text).unwrap();
            path
        };
        let path = file("hob.toml", "shards = 2\n");
        let good = Config::load(&path).unwrap();
        good.to_keep().unwrap().keep();
        file("hob.toml", "shards = 2000\n");
        assert!(Config::load(&path).is_err());
        let config = Config::load_accepted(&path, "too many shards").unwrap();
        assert_eq!(config.shards, 2);
        assert!(config.refused().unwrap().contains("too many shards"), "{:?}", config.refused());
        assert!(config.to_keep().is_none(), "the copy is not kept as a copy of the refused file");
        let other = file("other.toml", "shards = 2000\n");
        assert!(Config::load_accepted(&other, "the same").is_none(), "it is a copy of another file");
    }
}
