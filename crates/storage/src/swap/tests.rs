//! Tests that need no privilege to swap; conformance tests cover the rest with the real kernel.

use super::*;

const MIB: u64 = 1 << 20;
const UUID: Uuid = Uuid([9; 16]);

#[test]
fn ranges_overlap_or_not() {
    let range = |offset, bytes| Range { offset, bytes };
    assert!(range(0, 10).overlaps(range(9, 1)));
    assert!(!range(0, 10).overlaps(range(10, 1)));
    assert!(range(5, u64::MAX - 5).overlaps(range(MIB, MIB)));
    assert!(!range(5, 5).overlaps(range(0, 5)));
}

#[test]
fn lines_of_the_table_of_swap_are_found() {
    let table = b"Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
        /dev/loop1                              partition\t65532\t\t8\t\t-2\n\
        /dev/loop12\\040(deleted)                partition\t65532\t\t0\t\t5\n";
    let found = |path: &str| in_table(table, Path::new(path)).map(|active| (active.used, active.priority));
    assert_eq!(found("/dev/loop1"), Some((8192, -2)));
    assert_eq!(found("/dev/loop12"), Some((0, 5)));
    assert_eq!(found("/dev/loop"), None);
    assert_eq!(in_table(b"\xff", Path::new("/dev/loop1")), None);
}

#[test]
fn memory_is_read() {
    let text = "MemTotal:       24684084 kB\nMemFree:  1 kB\nMemAvailable:   22404252 kB\nSwapFree:  4 kB\n";
    let memory = Memory { total: 24_684_084 << 10, available: 22_404_252 << 10, swap_free: 4096 };
    assert_eq!(parse_memory(text), memory);
    assert_eq!(parse_memory("MemTotal: lots\n"), Memory::default());
}

/// A swap area in a sparse file is written completely, nothing around it changes, and the area is
/// recognized again.
#[test]
fn an_area_is_prepared_and_has_no_holes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(16 * MIB).unwrap();
    let range = Range { offset: 2 * MIB, bytes: 9 * MIB };
    let sure = |result: io::Result<Option<Lack>>| match result {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => None,
        other => Some(other.unwrap()),
    };
    // Some filesystems do not report extents, and some have no direct I/O.
    let Some(lack) = sure(mapping::lack(file.as_fd(), range)) else { return };
    assert_eq!(lack, Some(Lack::Hole));
    if reopened(file.as_fd(), libc::O_DIRECT).is_err() {
        return;
    }
    assert!(!is_prepared(&file, range, UUID).unwrap());
    let mut told = Vec::new();
    let mut stopped = |done| {
        told.push(done);
        done < 4 * MIB
    };
    assert!(matches!(prepare(&file, range, UUID, "a", &mut stopped), Err(SwapError::Stopped)));
    assert_eq!(told, [0, 4 * MIB]);
    assert!(!is_prepared(&file, range, UUID).unwrap(), "the header comes last");
    prepare(&file, range, UUID, "a", |_| true).unwrap();
    assert!(is_prepared(&file, range, UUID).unwrap());
    assert!(!is_prepared(&file, range, Uuid([1; 16])).unwrap());
    assert_eq!(sure(mapping::lack(file.as_fd(), range)), Some(None));
    assert_eq!(
        sure(mapping::lack(file.as_fd(), Range { offset: 2 * MIB, bytes: 10 * MIB })),
        Some(Some(Lack::Hole))
    );
    assert_eq!(
        sure(mapping::lack(file.as_fd(), Range { offset: MIB, bytes: 2 * MIB })),
        Some(Some(Lack::Hole))
    );
    assert_eq!(file.metadata().unwrap().len(), 16 * MIB);
}

#[test]
fn a_file_is_the_same_by_any_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a"), "").unwrap();
    std::fs::write(dir.path().join("c"), "").unwrap();
    std::fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
    let id = |name: &str| FileId::of(File::open(dir.path().join(name)).unwrap()).unwrap();
    assert!(id("a").is_same(id("b")));
    assert!(!id("a").is_same(id("c")));
}
