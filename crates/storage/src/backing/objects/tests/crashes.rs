//! Tests a client that fails between any two changes of the object store. The disk must then have
//! the content of the last acknowledged flush point, or of a later one.

use std::sync::Mutex;

use super::fake::Crash;
use super::*;

/// A guest's action.
#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u64, u64),
    Zero(u64, u64),
    Discard(u64, u64),
    Flush,
}

use Step::{Discard, Flush, Write, Zero};

/// Changes of parts of objects, whole objects, and several objects at once, over flushed data,
/// unflushed data and zeroes. They exceed the test's limits: three layers in memory, and four
/// changes in a manifest.
const STEPS: &[Step] = &[
    Write(0, 4096),
    Write(OBJECT - 1024, 2048),
    Flush,
    Write(512, 512),
    Write(2 * OBJECT, OBJECT),
    Write(3 * OBJECT + 512, 4096),
    Write(4 * OBJECT, 20 * KIB),
    Zero(4096, 512),
    Flush,
    Discard(2 * OBJECT, OBJECT),
    Write(2 * OBJECT + 1024, 512),
    Write(0, OBJECT),
    Flush,
    Zero(0, 2 * OBJECT),
    Flush,
    Write(OBJECT, 512),
    Write(OBJECT + 5, 100),
    Flush,
];

/// Returns the disk's content after each step.
fn contents() -> Vec<Vec<u8>> {
    let mut now = vec![0; SIZE as usize];
    let after = STEPS.iter().zip(0..).map(|(step, seed)| {
        match *step {
            Write(at, len) => now[at as usize..(at + len) as usize].copy_from_slice(&pattern(len, seed)),
            Zero(at, len) | Discard(at, len) => now[at as usize..(at + len) as usize].fill(0),
            Flush => {}
        }
        now.clone()
    });
    std::iter::once(vec![0; SIZE as usize]).chain(after.collect::<Vec<_>>()).collect()
}

async fn perform(disk: &Arc<Disk>, step: Step, seed: u64) -> Result<(), IoError> {
    match step {
        Write(at, len) => write(disk, at, &pattern(len, seed)).await,
        Zero(at, len) => disk.zero(at, len, Kept::No).await,
        Discard(at, len) => disk.discard(at, len).await,
        Flush => disk.flush().await,
    }
}

/// Progress of a run: steps that were begun, and the last acknowledged flush.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    begun: usize,
    acknowledged: usize,
}

/// Runs until the end, or until the client has failed.
fn live(client: &Client, progress: &Mutex<Progress>) {
    block_on(async {
        let Ok(disk) = open(client.clone(), &me()).await else { return };
        for (number, step) in (1..).zip(STEPS) {
            progress.lock().unwrap().begun = number;
            if perform(&disk, *step, number as u64 - 1).await.is_err() || client.has_crashed() {
                return;
            }
            if matches!(step, Flush) {
                progress.lock().unwrap().acknowledged = number;
            }
        }
        let _ = disk.close().await;
    });
}

/// Opens the disk after a crash, checks it, uses it, and checks that no leftovers remain at the
/// end.
fn live_on(shop: &Shop, progress: Progress, contents: &[Vec<u8>], what: &str) {
    block_on(async {
        let disk = open(shop.client(), &me()).await.unwrap_or_else(|trouble| panic!("{what}: {trouble:?}"));
        let found = disk.read(0, SIZE).await.unwrap();
        let is_point = |number: usize| number == 0 || matches!(STEPS[number - 1], Flush);
        let points = (progress.acknowledged..=progress.begun).filter(|number| is_point(*number));
        assert!(
            points.into_iter().any(|number| contents[number] == found),
            "{what}: {progress:?}: no flush point"
        );
        disk.sweep().await;
        let data = pattern(700, 99);
        write(&disk, OBJECT - 300, &data).await.unwrap();
        disk.flush().await.unwrap();
        disk.close().await.unwrap();
        let manifest = newest(&patient(shop.client())).await.unwrap().unwrap();
        shop.check_nothing_is_left(&manifest).await;
        let mut model = found;
        model[OBJECT as usize - 300..OBJECT as usize + 400].copy_from_slice(&data);
        assert!(content(shop).await == model, "{what}");
    });
}

/// Promise 1, exactly: after a crash at any change of the object store, completed or not, the disk
/// has the content of one of its flush points, no older than the last acknowledged one.
#[test]
fn every_crash_between_two_puts_leaves_a_flush_point() {
    let contents = contents();
    for crash in [Crash::Before, Crash::After] {
        let mut changes = 0;
        loop {
            let shop = block_on(shop_of(SIZE));
            let (client, progress) = (shop.client(), Mutex::default());
            client.crash_after(changes, crash);
            live(&client, &progress);
            let progress = *progress.lock().unwrap();
            live_on(&shop, progress, &contents, &format!("{changes} changes, {crash:?}"));
            if !client.has_crashed() {
                break;
            }
            changes += 1;
        }
        assert!(changes > 30, "{changes} changes are too few to show anything");
    }
}

/// A second crash happens during the recovery from the first.
#[test]
fn crashes_while_a_crash_is_cleared_up_leave_a_flush_point() {
    let contents = contents();
    for first in (3..40).step_by(6) {
        for second in 0..8 {
            let shop = block_on(shop_of(SIZE));
            let (client, progress) = (shop.client(), Mutex::default());
            client.crash_after(first, Crash::After);
            live(&client, &progress);
            let progress = *progress.lock().unwrap();
            let client = shop.client();
            client.crash_after(second, Crash::Before);
            block_on(async {
                if let Ok(disk) = open(client.clone(), &me()).await {
                    disk.sweep().await;
                }
            });
            live_on(&shop, progress, &contents, &format!("{first} and {second} changes"));
        }
    }
}

/// The owner recognizes its own changes whose replies were lost.
#[test]
fn lost_answers_change_nothing() {
    let contents = contents();
    for each in [1, 2, 3, 5] {
        let shop = block_on(shop_of(SIZE));
        let (client, progress) = (shop.client(), Mutex::default());
        // The replies to all changes may be lost: then a change counts as done only if the owner
        // recognizes it.
        client.lose_each(if each == 1 { 2 } else { each });
        live(&client, &progress);
        let progress = *progress.lock().unwrap();
        assert_eq!(progress.acknowledged, STEPS.len(), "each {each}th answer is lost");
        live_on(&shop, progress, &contents, &format!("each {each}th answer"));
    }
}

/// A manifest that is written late, after its flush had failed, is recognized as the owner's own,
/// and the next flush continues after it.
#[test]
fn a_late_manifest_is_recognized_as_own() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let client = shop.client();
        let disk = open(client.clone(), &me()).await.unwrap();
        client.delay_manifests(true);
        write(&disk, 0, &[1; 512]).await.unwrap();
        assert_eq!(disk.flush().await, Err(IoError::Failed));
        write(&disk, 0, &[2; 512]).await.unwrap();
        client.delay_manifests(false);
        assert_eq!(client.let_go(), 1, "and its repetitions find it there");
        assert_eq!(content(&shop).await[0], 1, "a flush point, if an unacknowledged one");
        disk.flush().await.unwrap();
        assert_eq!(content(&shop).await[0], 2);
        // And a manifest that is written after its successor.
        client.delay_manifests(true);
        write(&disk, 0, &[3; 512]).await.unwrap();
        assert_eq!(disk.flush().await, Err(IoError::Failed));
        client.delay_manifests(false);
        write(&disk, 0, &[4; 512]).await.unwrap();
        disk.flush().await.unwrap();
        assert_eq!(client.let_go(), 0, "its number is taken");
        assert_eq!(content(&shop).await[0], 4);
        disk.close().await.unwrap();
        let manifest = newest(&patient(shop.client())).await.unwrap().unwrap();
        shop.check_nothing_is_left(&manifest).await;
    });
}
