//! Maps the disks of a trace to disk numbers, in the order in which they first appear. A trace
//! names disks by volume, host or file. If a format numbers its disks from 0 without gaps, the
//! disks keep their numbers.

use std::collections::HashMap;

use super::fields::Reason;

/// Maximum number of disks, because disk numbers have 16 bits.
pub(super) const DISKS_MAX: usize = 1 << 16;
/// Maximum number of bytes of a disk name that are kept.
const NAME_BYTES_MAX: usize = 256;

/// Names and numbers of a trace's disks.
#[derive(Debug, Default)]
pub(super) struct Disks {
    names: Vec<String>,
    by_name: HashMap<String, u16>,
    by_id: HashMap<u64, u16>,
    /// Id and number of the disk that was looked up last. Successive requests mostly go to the same
    /// disk.
    last_id: Option<(u64, u16)>,
}

impl Disks {
    /// Returns the number of the disk with this name.
    pub(super) fn named(&mut self, name: &str) -> Result<u16, Reason> {
        if let Some(disk) = self.by_name.get(name) {
            return Ok(*disk);
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(
                format!("the disk's name has {} bytes, of at most {NAME_BYTES_MAX}", name.len()).into()
            );
        }
        let disk = self.add(name.to_owned())?;
        self.by_name.insert(name.to_owned(), disk);
        Ok(disk)
    }

    /// Returns the number of the disk with the trace's own number `id`.
    pub(super) fn numbered(&mut self, id: u64) -> Result<u16, Reason> {
        if let Some((last, disk)) = self.last_id
            && last == id
        {
            return Ok(disk);
        }
        let disk = match self.by_id.get(&id) {
            Some(disk) => *disk,
            None => {
                let disk = self.add(id.to_string())?;
                self.by_id.insert(id, disk);
                disk
            }
        };
        self.last_id = Some((id, disk));
        Ok(disk)
    }

    /// Adds disk numbers up to `disk`, with the numbers as names. The parsers of hob's own formats
    /// call this function.
    pub(super) fn own(&mut self, disk: u16) {
        while self.names.len() <= usize::from(disk) {
            self.names.push(self.names.len().to_string());
        }
    }

    /// Returns the number of a disk of a format that numbers its disks from 0 without gaps. The
    /// disks keep their numbers.
    pub(super) fn dense(&mut self, number: u64) -> Result<u16, Reason> {
        let disk =
            u16::try_from(number).map_err(|_| format!("the disk's number is above 65535: {number}"))?;
        self.own(disk);
        Ok(disk)
    }

    /// Returns the disk names by disk number, or an empty slice for a trace of one unnamed disk.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    fn add(&mut self, name: String) -> Result<u16, Reason> {
        let disk = u16::try_from(self.names.len()).map_err(|_| format!("more than {DISKS_MAX} disks"))?;
        self.names.push(name);
        Ok(disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_given_in_order_and_run_out() {
        let mut disks = Disks::default();
        assert_eq!(disks.named("hm_0"), Ok(0));
        assert_eq!(disks.named("hm_1"), Ok(1));
        assert_eq!(disks.named("hm_0"), Ok(0));
        assert!(disks.named(&"x".repeat(257)).unwrap_err().contains("257 bytes"));
        let mut disks = Disks::default();
        for id in 0..DISKS_MAX as u64 {
            assert_eq!(disks.numbered(id * 1000), Ok(id as u16));
        }
        assert_eq!(disks.numbered(1).unwrap_err(), "more than 65536 disks");
        assert_eq!(disks.numbered(5000), Ok(5));
        assert_eq!(disks.names()[5], "5000");
        let mut disks = Disks::default();
        disks.own(2);
        disks.own(1);
        assert_eq!(disks.names(), ["0", "1", "2"]);
        assert_eq!(disks.dense(3), Ok(3));
        assert_eq!(disks.dense(65_536).unwrap_err(), "the disk's number is above 65535: 65536");
        assert_eq!(disks.names().len(), 4);
    }
}
