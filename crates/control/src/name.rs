//! Rules for names of pools and disks. URLs, file names, NBD exports and tables contain these
//! names, so few characters are allowed.

/// Longest name, characters.
pub const NAME_CHARS_MAX: usize = 64;

/// A text is not a valid name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a name has 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' or '-', and begins with a letter or digit"
)]
pub struct NameError;

/// Checks that `name` is a valid name of a pool or a disk.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let begins_well = name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric);
    if begins_well && name.len() <= NAME_CHARS_MAX && name.bytes().all(plain) {
        Ok(())
    } else {
        Err(NameError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        for good in ["a", "vm-1.disk_0", "0", &"x".repeat(NAME_CHARS_MAX)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "-a", ".", "..", "_a", "a/b", "a b", "ä", "a\n", &"x".repeat(NAME_CHARS_MAX + 1)] {
            assert_eq!(check_name(bad), Err(NameError), "{bad}");
        }
    }
}
