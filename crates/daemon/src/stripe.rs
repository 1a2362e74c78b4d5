//! The stripe size of a disk: chosen by the operator, or detected when the backing was opened.

use hob_control::Size;
use hob_storage::backing::{STRIPE_BYTES_MAX, STRIPE_BYTES_STEP};

use crate::hardware::BackingInfo;

/// Checks a stripe size of an operator. Returns `None` for 0, which selects the detected size.
pub(crate) fn chosen(stripe: Option<Size>) -> Result<Option<Size>, String> {
    let Some(size) = stripe.filter(|size| *size != Size(0)) else { return Ok(None) };
    if size.bytes() > STRIPE_BYTES_MAX || !size.bytes().is_multiple_of(STRIPE_BYTES_STEP) {
        return Err(format!(
            "stripe = {size}: the value must be a multiple of {} up to {}, or 0 for the detected size",
            Size(STRIPE_BYTES_STEP),
            Size(STRIPE_BYTES_MAX)
        ));
    }
    Ok(Some(size))
}

/// Returns the stripe size that is in effect for a disk with this choice. `None` if it is unknown.
pub(crate) fn in_effect(chosen: Option<Size>, info: &BackingInfo) -> Option<Size> {
    chosen.or(info.stripe_bytes.map(|bytes| Size(bytes.into())))
}

/// Returns the stripe size in effect in the form that shards expect: in bytes, 0 if unknown.
pub(crate) fn for_shard(chosen: Option<Size>, info: &BackingInfo) -> u32 {
    in_effect(chosen, info).map_or(0, |size| u32::try_from(size.bytes()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_whole_pages_up_to_16_mib() {
        assert_eq!((chosen(None), chosen(Some(Size(0)))), (Ok(None), Ok(None)));
        for size in [4 << 10, 192 << 10, 256 << 10, 16 << 20].map(Size) {
            assert_eq!(chosen(Some(size)), Ok(Some(size)));
        }
        for size in [1, 4095, 6 << 10, (16 << 20) + 4096].map(Size) {
            let refused = chosen(Some(size)).unwrap_err();
            assert!(refused.contains("must be a multiple of 4K up to 16M"), "{refused}");
        }
    }

    #[test]
    fn an_operators_choice_counts_before_the_detected_size() {
        let info = BackingInfo { stripe_bytes: Some(65_536), ..BackingInfo::default() };
        assert_eq!(for_shard(None, &BackingInfo::default()), 0);
        assert_eq!(for_shard(None, &info), 65_536);
        assert_eq!(for_shard(Some(Size(192 << 10)), &info), 192 << 10);
    }
}
