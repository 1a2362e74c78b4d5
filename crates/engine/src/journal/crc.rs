//! CRC-32C of a journal page: Castagnoli's polynomial, reflected, as in iSCSI. Eight tables process
//! eight bytes at a time. Gopal et al. describe this method in "Fast CRC Computation for iSCSI
//! Polynomial Using CRC32 Instruction" (Intel, 2011).
//!
//! Storage computes checksums of data with the CPU's instruction. The engine computes checksums of
//! journal pages only, without `unsafe` or a dependency. Tables are fast enough for journal pages.

const POLYNOMIAL: u32 = 0x82F6_3B78;

const TABLES: [[u32; 256]; 8] = {
    let mut tables = [[0u32; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xFF) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
};

/// A checksum in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crc(u32);

impl Crc {
    pub(super) fn new() -> Crc {
        Crc(u32::MAX)
    }

    pub(super) fn add(mut self, bytes: &[u8]) -> Crc {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            let word = u64::from_le_bytes(*word) ^ u64::from(self.0);
            let mut crc = 0;
            for (i, table) in TABLES.iter().rev().enumerate() {
                crc ^= table[(word >> (8 * i) & 0xFF) as usize];
            }
            self.0 = crc;
        }
        for byte in rest {
            self.0 = self.0 >> 8 ^ TABLES[0][((self.0 ^ u32::from(*byte)) & 0xFF) as usize];
        }
        self
    }

    pub(super) fn finish(self) -> u32 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares checksums with the examples in RFC 3720, appendix B.4.
    #[test]
    fn known_checksums() {
        let crc = |bytes: &[u8]| Crc::new().add(bytes).finish();
        assert_eq!(crc(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc(&[0xFF; 32]), 0x62A8_AB43);
        let up: Vec<u8> = (0..32).collect();
        assert_eq!(crc(&up), 0x46DD_794E);
        assert_eq!(crc(b"123456789"), 0xE306_9283);
        assert_eq!(Crc::new().add(b"1234").add(b"56789").finish(), 0xE306_9283);
    }
}
