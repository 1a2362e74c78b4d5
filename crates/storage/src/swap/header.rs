//! Encodes the first page of a swap area in Linux's format (`union swap_header` in `linux/swap.h`,
//! version 1).
//!
//! The page has the byte order and page size of this host, because no other host uses the swap
//! area.

use crate::pool::Uuid;

/// Maximum length of a label in bytes; longer labels are cut.
const LABEL_BYTES_MAX: usize = 16;

/// Signature at the end of the first page.
const MAGIC: &[u8; 10] = b"SWAPSPACE2";

/// Offsets in the page. The space before them is for a boot loader.
mod at {
    pub(super) const VERSION: usize = 1024;
    pub(super) const LAST_PAGE: usize = 1028;
    pub(super) const UUID: usize = 1036;
    pub(super) const LABEL: usize = 1052;
    pub(super) const LABEL_END: usize = 1068;
}

/// Encodes the first page of an area of `bytes`, a multiple of `page_bytes` and at most 2³² pages.
pub(super) fn encode(bytes: u64, page_bytes: usize, uuid: Uuid, label: &str) -> Vec<u8> {
    let pages = bytes / page_bytes as u64;
    let last_page = u32::try_from(pages - 1).expect("the caller bounds the area");
    let mut page = vec![0; page_bytes];
    page[at::VERSION..at::LAST_PAGE].copy_from_slice(&1u32.to_ne_bytes());
    page[at::LAST_PAGE..at::LAST_PAGE + 4].copy_from_slice(&last_page.to_ne_bytes());
    page[at::UUID..at::LABEL].copy_from_slice(&uuid.0);
    let mut cut = label.len().min(LABEL_BYTES_MAX);
    while !label.is_char_boundary(cut) {
        cut -= 1;
    }
    page[at::LABEL..at::LABEL + cut].copy_from_slice(&label.as_bytes()[..cut]);
    page[page_bytes - MAGIC.len()..].copy_from_slice(MAGIC);
    page
}

/// Returns true if `page` is the first page of this swap area, with any label.
pub(super) fn is_of(page: &[u8], bytes: u64, uuid: Uuid) -> bool {
    let wanted = encode(bytes, page.len(), uuid, "");
    page[..at::LABEL] == wanted[..at::LABEL] && page[at::LABEL_END..] == wanted[at::LABEL_END..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: Uuid = Uuid([7; 16]);

    #[test]
    fn a_header_is_known_by_its_area() {
        let page = encode(1 << 20, 4096, UUID, "a label that is far too long");
        assert_eq!(&page[4086..], b"SWAPSPACE2");
        assert_eq!(&page[1052..1068], b"a label that is ");
        assert_eq!(u32::from_ne_bytes(page[1028..1032].try_into().unwrap()), 255);
        assert!(is_of(&page, 1 << 20, UUID));
        assert!(!is_of(&page, 2 << 20, UUID));
        assert!(!is_of(&page, 1 << 20, Uuid([8; 16])));
        assert!(!is_of(&[0; 4096], 1 << 20, UUID));
        // On hosts with larger pages the signature is elsewhere.
        let page = encode(1 << 20, 65536, UUID, "ä");
        assert!(is_of(&page, 1 << 20, UUID) && page.len() == 65536 && page.ends_with(MAGIC));
    }

    #[test]
    fn a_label_is_cut_between_characters() {
        let page = encode(1 << 20, 4096, UUID, "fifteen bytes..ä");
        assert_eq!(&page[1052..1068], b"fifteen bytes..\0");
    }
}
