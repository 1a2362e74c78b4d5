//! Falsifies journal pages that a recovery reads, and gives them correct checksums, so that the
//! engine recovers a wrong state. Each function tests whether the simulation's checkers notice the
//! wrong state.

/// Offsets of fields in a journal page (docs/FORMAT.md).
const CRC: usize = 4;
const CHANGES: usize = 0x26;
const RECORDS: usize = 0x280;
const RECORD_BYTES: usize = 16;
/// Kinds of records, the flag of a *set* record with units, and the offset of the block number.
const SET: u8 = 1;
const UNPROVEN: u8 = 4;
const PART: u8 = 5;
const SET_UNITS: u8 = 4;
const BLOCK: usize = 8;

/// Reverses the order of a journal page's change records and corrects the page's checksum.
pub(super) fn reorder_records(page: &mut [u8]) {
    let end = end_of_records(page);
    if end < RECORDS + 2 * RECORD_BYTES {
        return;
    }
    let turned: Vec<u8> = page[RECORDS..end].chunks(RECORD_BYTES).rev().flatten().copied().collect();
    page[RECORDS..end].copy_from_slice(&turned);
    let sum = checksum(page);
    page[CRC..CRC + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Changes the block number in each *unproven* record of a journal page, so that the record has no
/// effect. Corrects the page's checksum.
pub(super) fn misplace_overwrites(page: &mut [u8]) {
    let end = end_of_records(page);
    if end == RECORDS {
        return;
    }
    for record in page[RECORDS..end].chunks_mut(RECORD_BYTES).filter(|record| record[0] == UNPROVEN) {
        record[BLOCK] ^= 1;
    }
    let sum = checksum(page);
    page[CRC..CRC + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Changes every *set* record of an incomplete sector into a record of a complete sector, and
/// changes the block number in each *part* record. Corrects the page's checksum.
pub(super) fn forget_units(page: &mut [u8]) {
    let end = end_of_records(page);
    if end == RECORDS {
        return;
    }
    for record in page[RECORDS..end].chunks_mut(RECORD_BYTES) {
        match record[0] {
            SET if record[1] & SET_UNITS != 0 => (record[1], record[3]) = (record[1] & !SET_UNITS, 0),
            PART => record[BLOCK] ^= 1,
            _ => {}
        }
    }
    let sum = checksum(page);
    page[CRC..CRC + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Returns the end of the change records of a journal page. An invalid page counts as a page
/// without change records.
fn end_of_records(page: &[u8]) -> usize {
    let changes = usize::from(u16::from_le_bytes([page[CHANGES], page[CHANGES + 1]]));
    let end = RECORDS + changes * RECORD_BYTES;
    if &page[..4] != b"hobJ" || end > page.len() || !is_valid(page) { RECORDS } else { end }
}

fn is_valid(page: &[u8]) -> bool {
    page[CRC..CRC + 4] == checksum(page).to_le_bytes()
}

/// Returns the CRC-32C of a journal page, computed with zeroes in the checksum field.
fn checksum(page: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for (at, byte) in page.iter().enumerate() {
        sum ^= u32::from(if (CRC..CRC + 4).contains(&at) { 0 } else { *byte });
        for _ in 0..8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_turned_around_and_the_page_stays_valid() {
        let mut page = vec![0; 4096];
        page[..4].copy_from_slice(b"hobJ");
        page[CHANGES] = 3;
        for n in 0..3 {
            page[RECORDS + n * RECORD_BYTES] = n as u8 + 1;
        }
        let sum = checksum(&page);
        page[CRC..CRC + 4].copy_from_slice(&sum.to_le_bytes());
        reorder_records(&mut page);
        let kinds: Vec<u8> = (0..3).map(|n| page[RECORDS + n * RECORD_BYTES]).collect();
        assert_eq!(kinds, [3, 2, 1]);
        assert!(is_valid(&page));
        let torn = {
            page[9] ^= 1;
            page.clone()
        };
        reorder_records(&mut page);
        assert_eq!(page, torn, "what is no page is left alone");
    }
}
