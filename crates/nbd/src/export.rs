//! Exports: their properties, their features, and how the server finds them by name.
//!
//! Negotiation announces an [`ExportInfo`] to the client, and
//! [`validate`](crate::server::request::validate) checks every request against it.
//! [`ExportInfo::check`] refuses block sizes that the protocol does not allow. Sizes are in bytes.

use crate::wire::{DEFAULT_PAYLOAD_BYTES_MAX, STRING_BYTES_MAX, TransmissionFlags};

/// Properties of an export, as announced to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size of the disk, bytes.
    pub size_bytes: u64,
    /// True if the server refuses writes with EPERM.
    pub read_only: bool,
    /// True if the server accepts FLUSH.
    pub can_flush: bool,
    /// True if the server makes writes with the FUA flag durable before it replies.
    pub can_fua: bool,
    /// True if the server accepts TRIM.
    pub can_trim: bool,
    /// True if the server accepts WRITE_ZEROES.
    pub can_write_zeroes: bool,
    /// True if a WRITE_ZEROES with FAST_ZERO is fast or fails at once; needs `can_write_zeroes`.
    pub can_fast_zero: bool,
    /// True if the server accepts CACHE.
    pub can_cache: bool,
    /// True if several connections see one coherent disk. A FLUSH on one connection makes the
    /// completed writes of all connections durable.
    pub can_multi_conn: bool,
    /// True if the disk has seek times; a hint for the client's scheduler.
    pub rotational: bool,
    /// Description of the export; clipped to 4096 bytes on the wire.
    pub description: String,
    /// Offsets and lengths of requests must be multiples of this number of bytes, a power of two
    /// from 1 to 65536.
    pub block_size_min: u32,
    /// Preferred request size; a power of two, at least 512 and `block_size_min`, at most 32 MiB,
    /// bytes.
    pub block_size_preferred: u32,
    /// Maximum length of a READ or WRITE, bytes; a multiple of `block_size_min`.
    pub block_size_max: u32,
    /// Names of metadata contexts in addition to `base:allocation`, each `NAMESPACE:…`; at most
    /// [`CONTEXTS_MAX`].
    pub contexts: Vec<String>,
}

/// Maximum number of an export's metadata contexts in addition to `base:allocation`.
pub const CONTEXTS_MAX: usize = 64;

impl ExportInfo {
    /// Creates a writable export of `size_bytes` with all features, and with 1 B / 4 KiB / 32 MiB
    /// block sizes.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            size_bytes,
            read_only: false,
            can_flush: true,
            can_fua: true,
            can_trim: true,
            can_write_zeroes: true,
            can_fast_zero: true,
            can_cache: true,
            can_multi_conn: true,
            rotational: false,
            description: String::new(),
            block_size_min: 1,
            block_size_preferred: 4096,
            block_size_max: DEFAULT_PAYLOAD_BYTES_MAX,
            contexts: Vec::new(),
        }
    }

    /// Checks the block sizes and the size against the protocol ("Block size constraints").
    ///
    /// # Errors
    /// Returns the rule that the export breaks. Negotiation refuses an invalid export with
    /// ERR_PLATFORM.
    pub fn check(&self) -> Result<(), ExportInfoError> {
        if self.size_bytes > i64::MAX as u64 {
            return Err(ExportInfoError::Size(self.size_bytes));
        }
        let (min, preferred, max) = (self.block_size_min, self.block_size_preferred, self.block_size_max);
        check_block_sizes(min, preferred, max)?;
        // The maximum must not be below the preferred size, except for small disks. Only hob's own
        // exports must follow this rule, because hob can use a server that breaks it.
        if u64::from(max) < u64::from(preferred).min(self.size_bytes) {
            return Err(ExportInfoError::BlockSizes { min, preferred, max });
        }
        Ok(())
    }

    /// Returns the flags to announce. A read-only export announces no write commands. DF is
    /// announced only if structured replies were negotiated.
    pub fn transmission_flags(&self, structured_replies: bool) -> TransmissionFlags {
        let writable = !self.read_only;
        let table = [
            (true, TransmissionFlags::HAS_FLAGS),
            (self.read_only, TransmissionFlags::READ_ONLY),
            (self.can_flush, TransmissionFlags::SEND_FLUSH),
            (self.can_fua && writable, TransmissionFlags::SEND_FUA),
            (self.rotational, TransmissionFlags::ROTATIONAL),
            (self.can_trim && writable, TransmissionFlags::SEND_TRIM),
            (self.can_write_zeroes && writable, TransmissionFlags::SEND_WRITE_ZEROES),
            (structured_replies, TransmissionFlags::SEND_DF),
            (self.can_multi_conn, TransmissionFlags::CAN_MULTI_CONN),
            (self.can_cache, TransmissionFlags::SEND_CACHE),
            (self.can_fast_zero && self.can_write_zeroes && writable, TransmissionFlags::SEND_FAST_ZERO),
        ];
        table.into_iter().filter(|(on, _)| *on).fold(TransmissionFlags(0), |all, (_, flag)| all | flag)
    }
}

/// Checks the protocol's rules for the three block sizes, for hob's exports and for exports of
/// other servers.
pub(crate) fn check_block_sizes(min: u32, preferred: u32, max: u32) -> Result<(), ExportInfoError> {
    let min_fits = min.is_power_of_two() && min <= 64 << 10;
    let preferred_fits = preferred.is_power_of_two() && preferred >= min.max(512) && preferred <= 32 << 20;
    // A maximum with all bits set means "no limit". It is the only maximum that need not be a
    // multiple of the minimum.
    let max_fits = min_fits && max >= min && (max.is_multiple_of(min) || max == u32::MAX);
    if min_fits && preferred_fits && max_fits {
        return Ok(());
    }
    Err(ExportInfoError::BlockSizes { min, preferred, max })
}

/// Why an export cannot be announced to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ExportInfoError {
    /// The export's size does not fit a file offset.
    #[error("an export of {0} bytes does not fit a file offset; the maximum is 2^63 - 1")]
    Size(u64),
    /// The block sizes break the protocol's rules.
    #[error(
        "block sizes {min}/{preferred}/{max} (minimum/preferred/maximum) are not allowed: the minimum must be a power \
         of two up to 65536, the preferred one a power of two from 512 (and the minimum) to 33554432, the maximum a \
         multiple of the minimum, and no less than the preferred one unless the export is smaller"
    )]
    BlockSizes {
        /// Minimum block size of the export, bytes.
        min: u32,
        /// Preferred block size of the export, bytes.
        preferred: u32,
        /// Maximum block size of the export, bytes.
        max: u32,
    },
}

/// Finds exports during negotiation. The front end implements this trait. The functions must return
/// immediately.
pub trait ExportDirectory {
    /// Returns the export with this name. The empty name means the default export, if there is one.
    fn find(&self, name: &str) -> Option<ExportInfo>;

    /// Returns the name and description of all exports that a client may see. Names over 4096 bytes
    /// are left out, because no client can request them.
    fn list(&self) -> Vec<(String, String)>;
}

/// Maximum length of an export name in bytes.
pub const EXPORT_NAME_BYTES_MAX: usize = STRING_BYTES_MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_size_rules() {
        for (min, preferred, max, fits) in [
            (1, 4096, 32 << 20, true),
            (512, 512, 512, true),
            (4096, 4096, u32::MAX, true),
            (65536, 1 << 25, 1 << 25, true),
            (0, 4096, 4096, false),
            (3, 4096, 4098, false),
            (131_072, 131_072, 131_072, false),
            (1, 256, 4096, false),
            (4096, 512, 4096, false),
            (1, 1 << 26, 1 << 26, false),
            (4096, 4096, 4097, false),
            (4096, 4096, 0, false),
        ] {
            assert_eq!(check_block_sizes(min, preferred, max).is_ok(), fits, "{min}/{preferred}/{max}");
        }
        assert!(ExportInfo::new(1 << 63).check().is_err());
        assert!(ExportInfo::new((1 << 63) - 1).check().is_ok());
    }

    #[test]
    fn flags_follow_abilities() {
        let all = ExportInfo::new(0);
        assert_eq!(all.transmission_flags(false).0, 0x0d6d);
        assert_eq!(all.transmission_flags(true).0, 0x0ded);
        let read_only = ExportInfo { read_only: true, rotational: true, ..ExportInfo::new(0) };
        assert_eq!(read_only.transmission_flags(false).0, 0x0517);
        let no_zeroes = ExportInfo { can_write_zeroes: false, ..ExportInfo::new(0) };
        assert_eq!(no_zeroes.transmission_flags(false).0, 0x052d);
    }
}
