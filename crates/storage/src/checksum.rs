//! Checksums: one CRC-32C (Castagnoli) per sector of 4 KiB.
//!
//! Each cache hit computes the checksums of its sectors, so the computation must be fast. The
//! function of the `crc32c` crate, for any length, defines the result and is the fallback. On CPUs
//! with SSE 4.2 and PCLMULQDQ, a faster function handles exactly one sector. This function computes
//! the three thirds of the sector in parallel, because the CRC instruction takes three cycles and
//! can start every cycle. Two carry-less multiplications join the results. See V. Gopal et al.,
//! "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction" (Intel, 2011).
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use hob_engine::units::SECTOR_BYTES;

const SECTOR_WORDS: usize = SECTOR_BYTES as usize / 8;

/// Asks the processor to load a sector into its cache. The sector's memory need not be mapped. A
/// device has just written the sector to memory, so without a prefetch the processor would wait for
/// each cache line of the sector. Measured time with and without prefetch: 0.70 and 0.97 µs for one
/// sector, 0.64 and 1.13 µs per sector for sixteen adjacent sectors.
fn prefetch(sector: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..SECTOR_BYTES as usize).step_by(64) {
        // SAFETY: a prefetch has no effect on the program, whatever the address is.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(sector.wrapping_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = sector;
}

/// Replaces the contents of `sums` with the checksums of the sectors in `bytes`. The length of
/// `bytes` is a multiple of the sector size. Allocates only if `sums` must grow.
pub fn sector_sums(bytes: &[u8], sums: &mut Vec<u32>) {
    let (sectors, rest) = bytes.as_chunks::<{ SECTOR_BYTES as usize }>();
    assert!(rest.is_empty(), "whole sectors only");
    sums.clear();
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq") {
        sums.extend(sectors.iter().map(|sector| {
            prefetch(sector.as_ptr());
            // SAFETY: the CPU has the instructions that the function uses; that is its only
            // requirement. The crate's function would take about twice the time.
            unsafe { three_way::sector_sum(words(sector)) }
        }));
        return;
    }
    sums.extend(sectors.iter().map(|sector| crc32c::crc32c(sector)));
}

/// Returns the checksum of a sector that other threads or processes may change meanwhile. The
/// function uses volatile reads, which read each byte exactly once.
///
/// # Safety
/// The sector's memory must be mapped.
pub(crate) unsafe fn shared_sector_sum(sector: *const [u64; SECTOR_WORDS]) -> u32 {
    assert!(sector.is_aligned(), "sectors are aligned");
    prefetch(sector.cast());
    // SAFETY: the address is inside the sector, which is aligned, and mapped according to the
    // caller.
    let word = |at: usize| unsafe { (&raw const (*sector)[at]).read_volatile() };
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq") {
        // SAFETY: the CPU has the instructions that the function uses.
        return unsafe { three_way::sector_sum(word) };
    }
    let bytes: [[u8; 8]; SECTOR_WORDS] = std::array::from_fn(|at| word(at).to_ne_bytes());
    crc32c::crc32c(bytes.as_flattened())
}

#[cfg(target_arch = "x86_64")]
fn words(sector: &[u8; SECTOR_BYTES as usize]) -> impl Fn(usize) -> u64 {
    let (words, _) = sector.as_chunks::<8>();
    let words: &[[u8; 8]; SECTOR_WORDS] = words.try_into().expect("a sector's words");
    |at| u64::from_le_bytes(words[at])
}

#[cfg(target_arch = "x86_64")]
mod three_way {
    use std::arch::x86_64::{_mm_clmulepi64_si128, _mm_crc32_u64, _mm_cvtsi64_si128, _mm_cvtsi128_si64};

    use super::{SECTOR_BYTES, SECTOR_WORDS};

    /// Words of 8 bytes in each third of a sector. Two words are left over.
    const THIRD_WORDS: usize = 170;

    /// Number of bytes of a sector after its first third. `BEHIND_SECOND` is the number after the
    /// second third.
    const BEHIND_FIRST: usize = SECTOR_BYTES as usize - THIRD_WORDS * 8;
    const BEHIND_SECOND: usize = BEHIND_FIRST - THIRD_WORDS * 8;

    /// Returns the factor that moves a checksum past `bytes` zero bytes: x^(8·bytes − 33) modulo
    /// the polynomial, with reflected bits. The reduction in `shift` compensates for the 33.
    const fn shift_factor(bytes: usize) -> i64 {
        let (mut power, mut left) = (0x8000_0000u32, 8 * bytes - 33);
        while left > 0 {
            power = (power >> 1) ^ (0x82F6_3B78 * (power & 1));
            left -= 1;
        }
        power as i64
    }

    #[target_feature(enable = "sse4.2,pclmulqdq")]
    fn shift(sum: u64, factor: i64) -> u64 {
        let product = _mm_clmulepi64_si128::<0>(_mm_cvtsi64_si128(sum as i64), _mm_cvtsi64_si128(factor));
        _mm_crc32_u64(0, _mm_cvtsi128_si64(product) as u64)
    }

    /// Returns the checksum of a sector. `word` returns the sector's little-endian words.
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    pub(super) fn sector_sum(word: impl Fn(usize) -> u64) -> u32 {
        let (mut a, mut b, mut c) = (u64::from(u32::MAX), 0, 0);
        for at in 0..THIRD_WORDS {
            a = _mm_crc32_u64(a, word(at));
            b = _mm_crc32_u64(b, word(THIRD_WORDS + at));
            c = _mm_crc32_u64(c, word(2 * THIRD_WORDS + at));
        }
        for at in 3 * THIRD_WORDS..SECTOR_WORDS {
            c = _mm_crc32_u64(c, word(at));
        }
        let a = shift(a, const { shift_factor(BEHIND_FIRST) });
        let b = shift(b, const { shift_factor(BEHIND_SECOND) });
        !((a ^ b ^ c) as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_published_values_come_out() {
        // RFC 3720, B.4 has the checksum of 32 bytes of zeroes; the value of a sector was computed
        // with the crate.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8A91_36AA);
        let mut sums = vec![1, 2, 3];
        sector_sums(&[0; 4096], &mut sums);
        assert_eq!(sums, [0x98F9_4189]);
        sector_sums(&[], &mut sums);
        assert!(sums.is_empty());
    }

    proptest! {
        #[test]
        fn sums_are_those_of_the_reference(seed in any::<u64>(), flip in 0usize..8192) {
            let mut bytes: Vec<u8> = (0..8192u64).map(|n| (n.wrapping_mul(seed | 1) >> 13) as u8).collect();
            bytes[flip] ^= 0x40;
            let mut sums = Vec::new();
            sector_sums(&bytes, &mut sums);
            let words: Vec<[u64; 512]> = bytes
                .chunks(4096)
                .map(|sector| std::array::from_fn(|at| u64::from_ne_bytes(sector[8 * at..][..8].try_into().unwrap())))
                .collect();
            // SAFETY: the sectors belong to a vector.
            let shared = words.iter().map(|sector| unsafe { shared_sector_sum(sector) });
            prop_assert_eq!(shared.collect::<Vec<_>>(), sums.clone());
            prop_assert_eq!(sums, bytes.chunks(4096).map(crc32c::crc32c).collect::<Vec<_>>());
        }
    }
}
