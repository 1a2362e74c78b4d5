//! Limits the number of worker threads that I/Os of a hanging file occupy.

use hob_engine::io::Target;
use hob_engine::units::DiskId;

use super::*;
use crate::ring::RingConfig;

/// More than may occupy worker threads.
const CHANGES: u32 = 200;

#[test]
fn sixty_four_operations_of_a_file_occupy_workers_and_the_others_wait() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let options = BackingOptions::default();
    let mut file = open_file(path.to_str().unwrap(), Access::ReadWrite, &options).unwrap();
    let mut ring = Ring::new(&RingConfig::default()).unwrap();
    let now = Instant(1);
    file.attach(&mut ring, now, TokenSpace::new(1, 0));
    for number in 0..CHANGES {
        let (id, offset) = (IoId(number), u64::from(number) * SECTOR_BYTES);
        let target = Target::Backing(DiskId(0));
        let io = Io { id, target, op: IoOp::Discard, offset, len: SECTOR_BYTES, slice: None };
        file.submit(&mut ring, now, &io);
    }
    assert_eq!((file.working.len(), file.to_work.len()), (WORKERS_MAX, CHANGES as usize - WORKERS_MAX));
    let mut done = 0;
    while done < CHANGES {
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(100))).unwrap();
        while let Some(completion) = ring.next_completion() {
            file.handle_completion(&mut ring, now, completion);
            assert!(file.working.len() <= WORKERS_MAX);
        }
        while let Some((_, result)) = file.poll_done() {
            result.unwrap();
            done += 1;
        }
    }
    assert_eq!((file.working.len(), file.to_work.len()), (0, 0));
}
