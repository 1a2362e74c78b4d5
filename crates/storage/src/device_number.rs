//! Device numbers of block devices, as the kernel writes them in `/sys`: `254:1`.

use rustix::fs::{major, makedev, minor};

/// Returns a device number as text, such as `254:1`. The text is also the name of the device's
/// directory in `/sys/dev/block`.
pub fn text(number: u64) -> String {
    format!("{}:{}", major(number), minor(number))
}

/// Parses a device number such as `254:1`.
pub fn parse(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_are_read() {
        assert_eq!(parse("254:1\n"), Some(makedev(254, 1)));
        assert_eq!(parse("254"), None);
        assert_eq!(text(makedev(254, 1)), "254:1");
    }
}
