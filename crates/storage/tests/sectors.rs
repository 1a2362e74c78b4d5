//! Single sectors are read from the flash of caches that are not in use.

mod common;

use common::journal::put_sector;
use common::pattern;
use hob_storage::pool::{
    DeviceSpec, Overwrite, OwnerId, Pool, SectorCopy, SectorLost, SectorReader, device_bytes_for,
};

const MIB: u64 = 1 << 20;

#[test]
fn the_first_copy_that_is_right_counts() {
    for place in ["/tmp", "/dev/shm"] {
        let dir = tempfile::tempdir_in(place).unwrap();
        let spec = |name: &str| DeviceSpec {
            path: dir.path().join(name),
            size_bytes: Some(device_bytes_for(2 * MIB, MIB)),
        };
        let mut pool = Pool::create("p", &[spec("a"), spec("b")], MIB, Overwrite::Refuse).unwrap();
        let data = pool.allocate_data(OwnerId(1), 2, 0).unwrap();
        let (good, bad) = (pattern(4096, 1), pattern(4096, 2));
        let copy = |at: usize, sector, sum| SectorCopy { place: data[at].place, sector, sum };
        let sum = Some(crc32c::crc32c(&good));
        put_sector(&pool, data[0].place, 7, &bad);
        put_sector(&pool, data[1].place, 255, &good);
        let mut reader = SectorReader::new(&pool).unwrap();
        assert_eq!(reader.read(&[copy(0, 7, sum), copy(1, 255, sum)]), Ok(&good[..]));
        assert_eq!(reader.read(&[copy(1, 255, sum), copy(0, 7, sum)]), Ok(&good[..]));
        assert_eq!(reader.read(&[copy(0, 7, sum)]), Err(SectorLost::Wrong));
        assert_eq!(reader.read(&[copy(0, 7, None), copy(1, 255, sum)]), Ok(&bad[..]), "no checksum to go by");
        assert_eq!(reader.read(&[]), Err(SectorLost::Unreadable));
        // A truncated device, and a missing one.
        let file = common::journal::device_file(&pool, data[0].place);
        file.set_len(data[0].place.offset + 7 * 4096).unwrap();
        assert_eq!(reader.read(&[copy(0, 7, None)]), Err(SectorLost::Unreadable));
        assert_eq!(reader.read(&[copy(0, 7, sum), copy(1, 255, sum)]), Ok(&good[..]));
        pool.release(&[data[0].place]).unwrap();
        pool.remove_device(data[0].place.device).unwrap();
        let mut reader = SectorReader::new(&pool).unwrap();
        assert_eq!(reader.read(&[copy(0, 6, None)]), Err(SectorLost::Unreadable));
        assert_eq!(reader.read(&[copy(0, 6, sum), copy(1, 255, sum)]), Ok(&good[..]));
    }
}
