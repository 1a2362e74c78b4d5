//! The address of an RBD image: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:OPTION=VALUE]…`, as in
//! QEMU.
//!
//! The option `conf` is the path of the cluster's configuration, and `id` the user's name without
//! `client.`. All other options are passed to librados. A backslash escapes the next character.

/// The parsed address of an RBD image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) pool: String,
    pub(super) namespace: String,
    pub(super) image: String,
    pub(super) snapshot: Option<String>,
    pub(super) conf: Option<String>,
    pub(super) user: Option<String>,
    pub(super) options: Vec<(String, String)>,
}

impl Spec {
    /// Parses the text after `rbd:`. The error is a text for users.
    pub(super) fn parse(text: &str) -> Result<Spec, String> {
        if text.contains('\0') {
            return Err("the name contains a NUL".into());
        }
        let mut parts = split(text, ':').into_iter();
        let place = parts.next().unwrap_or_default();
        let mut place = split(&place, '@').into_iter();
        let name = place.next().unwrap_or_default();
        let snapshot = place.next().map(|snapshot| unescape(&snapshot));
        if place.next().is_some() {
            return Err("the name contains more than one '@'".into());
        }
        let names: Vec<String> = split(&name, '/').iter().map(|part| unescape(part)).collect();
        let (pool, namespace, image) = match names.as_slice() {
            [pool, image] => (pool.clone(), String::new(), image.clone()),
            [pool, namespace, image] => (pool.clone(), namespace.clone(), image.clone()),
            _ => return Err("the name must contain a pool and an image: rbd:POOL/IMAGE".into()),
        };
        if pool.is_empty() || image.is_empty() || snapshot.as_deref() == Some("") {
            return Err("the pool and the image must not be empty: rbd:POOL/IMAGE".into());
        }
        let mut spec = Spec { pool, namespace, image, snapshot, ..Spec::default() };
        for part in parts {
            let sides = split(&part, '=');
            let (option, values) = sides.split_first().expect("split returns at least one part");
            if values.is_empty() {
                return Err(format!("{part:?} does not have the form OPTION=VALUE"));
            }
            let (option, value) = (unescape(option), unescape(&values.join("=")));
            match option.as_str() {
                "conf" => spec.conf = Some(value),
                "id" => spec.user = Some(value),
                "" => return Err("an option has no name".into()),
                _ => spec.options.push((option, value)),
            }
        }
        Ok(spec)
    }

    /// Returns the name of the image for users, without options.
    pub(super) fn name(&self) -> String {
        let namespace =
            if self.namespace.is_empty() { String::new() } else { format!("{}/", self.namespace) };
        let snapshot = self.snapshot.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
        format!("{}/{namespace}{}{snapshot}", self.pool, self.image)
    }
}

impl std::fmt::Display for Spec {
    /// Writes a text that [`Spec::parse`] parses to an equal value.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/", escape(&self.pool))?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", escape(&self.namespace))?;
        }
        f.write_str(&escape(&self.image))?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{}", escape(snapshot))?;
        }
        let known = [("conf", &self.conf), ("id", &self.user)];
        let known = known.into_iter().filter_map(|(option, value)| Some((option, value.as_ref()?)));
        let options = self.options.iter().map(|(option, value)| (option.as_str(), value));
        known.chain(options).try_for_each(|(option, value)| {
            let option = escape_each(option, &['\\', ':', '=']);
            write!(f, ":{option}={}", escape_each(value, &['\\', ':']))
        })
    }
}

fn escape(text: &str) -> String {
    escape_each(text, &[':', '@', '/', '\\'])
}

/// Writes a backslash before each of the characters `special` in the text.
fn escape_each(text: &str, special: &[char]) -> String {
    let escaped = |character| special.contains(&character).then_some('\\').into_iter().chain([character]);
    text.chars().flat_map(escaped).collect()
}

/// Splits the text at each unescaped `at`. Returns at least one part. Backslashes stay in the
/// parts.
fn split(text: &str, at: char) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut escaped = false;
    for character in text.chars() {
        if character == at && !escaped {
            parts.push(String::new());
            continue;
        }
        escaped = character == '\\' && !escaped;
        parts.last_mut().expect("one at least").push(character);
    }
    parts
}

fn unescape(text: &str) -> String {
    let mut characters = text.chars();
    let mut plain = String::new();
    while let Some(character) = characters.next() {
        plain.push(if character == '\\' { characters.next().unwrap_or('\\') } else { character });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specifications_are_qemus() {
        let spec =
            Spec::parse("vms/disk 1@before:id=hob:conf=/etc/ceph/a.conf:mon_host=[v2\\:127.0.0.1\\:3300]")
                .unwrap();
        assert_eq!((spec.pool.as_str(), spec.image.as_str()), ("vms", "disk 1"));
        assert_eq!(spec.snapshot.as_deref(), Some("before"));
        assert_eq!((spec.user.as_deref(), spec.conf.as_deref()), (Some("hob"), Some("/etc/ceph/a.conf")));
        assert_eq!(spec.options, [("mon_host".to_owned(), "[v2:127.0.0.1:3300]".to_owned())]);
        assert_eq!(spec.name(), "vms/disk 1@before");
        assert_eq!(Spec::parse("p/ns/a\\@b\\/c").unwrap().name(), "p/ns/a@b/c");
    }

    #[test]
    fn a_printed_name_is_parsed_as_the_same() {
        for text in [
            "vms/golden",
            "vms/team/golden@base:conf=/etc/ceph/a.conf:id=hob",
            "a\\:b/c\\@d@e\\/f\\\\g:conf=/c:id=x:mon_host=[v2\\:127.0.0.1\\:3300]:key=AQ==",
            "p/i:a\\:b=c",
            "p/i:a\\=b=c\\\\d=e",
        ] {
            let spec = Spec::parse(text).unwrap();
            assert_eq!(spec.to_string(), text);
        }
    }

    #[test]
    fn a_backslash_makes_an_equals_sign_a_part_of_an_option_name() {
        let spec = Spec::parse("p/i:a\\=b\\\\=c\\=d=e").unwrap();
        assert_eq!(spec.options, [("a=b\\".to_owned(), "c=d=e".to_owned())]);
        assert!(Spec::parse("p/i:a\\=b").is_err());
        assert!(Spec::parse("p/i:a=b").is_ok());
    }

    #[test]
    fn invalid_input_is_reported() {
        for text in
            ["", "image", "/image", "pool/", "a/b/c/d", "a/b@", "a/b@c@d", "a/b:id", "a/b:=x", "a/b\0"]
        {
            assert!(Spec::parse(text).is_err(), "{text:?}");
        }
    }
}
