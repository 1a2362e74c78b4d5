//! Answers NBD block status requests about dirty bitmaps. A backup program asks in this way which
//! parts of a disk have changed. Each dirty bitmap is an NBD metadata context,
//! `qemu:dirty-bitmap:NAME`.

use hob_engine::Engine;
use hob_engine::granules::Granules;
use hob_engine::io::IoError;
use hob_engine::units::DiskId;
use hob_nbd::Extent;
use hob_nbd::wire::QEMU_DIRTY_BITMAP;

/// Maximum number of extents in one block status reply. The client asks again for the remaining
/// range.
const EXTENTS_MAX: usize = 1 << 15;

/// Returns the extents of a range in each of these NBD metadata contexts.
///
/// # Errors
/// Returns an error if a bitmap was removed after the client selected it.
pub(super) fn extents_of(
    engine: &Engine,
    disk: DiskId,
    contexts: &[String],
    (offset, len): (u64, u64),
) -> Result<Vec<Vec<Extent>>, IoError> {
    let bitmaps = engine.bitmaps(disk);
    let of = |context: &String| {
        let name = context.strip_prefix(QEMU_DIRTY_BITMAP)?;
        let bitmap = bitmaps.iter().find(|bitmap| bitmap.name == name)?;
        Some(extents(&bitmap.granules, offset, len))
    };
    contexts.iter().map(|context| of(context).ok_or(IoError::Failed)).collect()
}

fn extents(granules: &Granules, offset: u64, len: u64) -> Vec<Extent> {
    let (mut at, end) = (offset, offset + len);
    let mut extents = Vec::new();
    while at < end && extents.len() < EXTENTS_MAX {
        let (run, is_in) = granules.run(at, end - at);
        let length = u32::try_from(run).expect("no longer than what NBD can ask for");
        extents.push(Extent { length, state: if is_in { Extent::DIRTY } else { 0 } });
        at += run;
    }
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_those_of_the_range_and_bounded() {
        let mut granules = Granules::new(1 << 30, 4096).unwrap();
        granules.insert(8192, 1);
        let extent = |length, state| Extent { length, state };
        assert_eq!(extents(&granules, 512, 16384), [extent(7680, 0), extent(4096, 1), extent(4608, 0)]);
        assert_eq!(extents(&granules, 8192 + 512, 512), [extent(512, 1)]);
        for granule in (0..1 << 18).step_by(2) {
            granules.insert(granule * 4096, 1);
        }
        let many = extents(&granules, 0, 1 << 30);
        assert_eq!((many.len(), many[0], many[1]), (EXTENTS_MAX, extent(4096, 1), extent(4096, 0)));
    }
}
