//! Errors for caches that hob refuses, with what an operator can do.

use super::flash_content::Lack;
use crate::api_error::{ApiError, conflict};

/// Returns the error for a cache that may have had dirty data, and whose data or journal on flash
/// is not complete.
pub(super) fn refused_content(
    name: &str,
    pool: &str,
    lack: Lack,
    missing: &[String],
    damage: &str,
) -> ApiError {
    let why = lack.reason(pool, missing, damage);
    if lack == Lack::Device {
        return refused_until(name, &why, "the device");
    }
    if !lack.may_return() {
        return refused(name, &why);
    }
    ApiError::conflict(why).hint(format!(
        "restore the device with the newest data, or discard the data of the cache with 'hob \
         cache discard-dirty {name} --yes'"
    ))
}

/// Returns the error for a cache in a pool without any present device.
pub(super) fn refused_without_devices(pool: &str, missing: &[String]) -> ApiError {
    let why = format!("its cache cannot be read: no device of pool {pool} is there");
    let (devices, first) = (missing.join(", "), missing.first().map_or("PATH", String::as_str));
    ApiError::conflict(why).hint(format!(
        "restore {devices}, which hob looks for every few seconds, or remove a device and lose its \
         dirty data with 'hob pool remove-device {pool} {first} --yes'"
    ))
}

pub(super) fn refused(name: &str, why: &str) -> ApiError {
    refused_until(name, why, "the backing")
}

/// Returns the error for a cache whose backing was changed after hob served it last. The change may
/// be the restore of a backup, so hob does not write dirty data over it.
pub(super) fn refused_later(name: &str, why: &str) -> ApiError {
    ApiError::conflict(why).hint(format!(
        "save the dirty data with 'hob cache export-dirty {name} FILE' and discard it with 'hob cache discard-dirty \
         {name} --yes'; or, if the backing still has the content that hob left there, accept it with 'hob cache set \
         {name} --verify trust', and hob writes the dirty data to it"
    ))
}

/// Returns the error for a cache that hob refuses until an operator restores `what`, for example a
/// device.
fn refused_until(name: &str, why: &str, what: &str) -> ApiError {
    ApiError::conflict(why).hint(format!(
        "restore {what}, or save the dirty data with 'hob cache export-dirty {name} FILE' and discard it with 'hob cache discard-dirty {name} --yes'"
    ))
}

/// Returns the error for a saved cache whose index does not fit in memory.
pub(super) fn no_memory(name: &str, error: &ApiError) -> ApiError {
    conflict!("its cache cannot be opened: {}", error.problem.error).hint(format!(
        "free memory, and hob opens the disk; or save the dirty data with 'hob cache export-dirty {name} FILE' and \
         discard it with 'hob cache discard-dirty {name} --yes'"
    ))
}
