//! Disks of objects in a store that fails, forgets, answers late, and becomes unavailable between
//! any two changes.
//!
//! Time is virtual, so a store that does not answer costs no time. Disks and their memory are
//! small, so that layers are written out early.

mod crashes;
mod fake;
mod full;
mod golden;
mod model;
mod owners;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hob_engine::io::IoError;

use super::disk::{Disk, Kept};
use super::format::{Name, Shape};
use super::opening::{Trouble, create, newest, open_as, open_to_read};
use super::owner::{Here, Owner};
use super::store::{RetryingStore, StoreError};
use crate::pool::Uuid;
use fake::{Client, Shop};

const KIB: u64 = 1 << 10;
const OBJECT: u64 = 64 * KIB;
/// Size of the test disk, bytes: five objects, of which the last is shorter.
const SIZE: u64 = 4 * OBJECT + 20 * KIB;

fn shape(size_bytes: u64) -> Shape {
    Shape { uuid: Uuid([3; 16]), size_bytes, object_bytes: OBJECT }
}

fn patient(client: Client) -> Arc<RetryingStore> {
    Arc::new(RetryingStore::new(Box::new(client), Duration::from_secs(30)))
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    // The runtime would be compiled once for each type of future.
    let future: Pin<Box<dyn Future<Output = T> + '_>> = Box::pin(future);
    runtime.block_on(future)
}

/// Returns a store with a disk.
async fn shop_of(size_bytes: u64) -> Shop {
    let shop = Shop::default();
    create(&patient(shop.client()), shape(size_bytes)).await.unwrap();
    shop
}

async fn open(client: Client, owner: &Owner) -> Result<Arc<Disk>, Trouble> {
    let disk = open_as(patient(client), owner.clone(), Here::elsewhere()).await?;
    Ok(Arc::new(disk.narrow(3, 4)))
}

/// Returns this owner, the same for each start.
fn me() -> Owner {
    Owner::default()
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|at| ((at ^ seed << 3).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1).collect()
}

async fn write(disk: &Arc<Disk>, offset: u64, data: &[u8]) -> Result<(), IoError> {
    disk.write(offset, Bytes::copy_from_slice(data)).await
}

/// Returns the content in the object store, as a client reads it that opens the disk now.
async fn content(shop: &Shop) -> Vec<u8> {
    let disk = Arc::new(open_to_read(patient(shop.client())).await.unwrap());
    disk.read(0, disk.shape.size_bytes).await.unwrap()
}

#[test]
fn written_data_is_read_before_and_after_its_flush() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        let mut model = vec![0; SIZE as usize];
        assert_eq!(disk.read(0, SIZE).await.unwrap(), model);
        // Inside an object, over a boundary, over everything, and up to the end; without alignment.
        for (offset, len, seed) in
            [(4096, 4096, 1), (OBJECT - 512, 1024, 2), (10, 2 * OBJECT, 3), (SIZE - 1, 1, 4), (777, 5, 5)]
        {
            let data = pattern(len, seed);
            write(&disk, offset, &data).await.unwrap();
            model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
            assert_eq!(disk.read(0, SIZE).await.unwrap(), model, "{offset}");
            assert_eq!(disk.read(offset, len).await.unwrap(), data);
        }
        disk.flush().await.unwrap();
        assert_eq!(disk.read(0, SIZE).await.unwrap(), model);
        assert_eq!(content(&shop).await, model);
        assert_eq!(write(&disk, SIZE - 1, &[1, 2]).await, Err(IoError::Invalid));
        assert_eq!(disk.read(u64::MAX, 2).await, Err(IoError::Invalid));
        disk.close().await.unwrap();
        let found = newest(&patient(shop.client())).await.unwrap().unwrap();
        assert!(found.closed && !found.leftovers);
    });
}

#[test]
fn zeroed_objects_go_and_kept_ones_stay() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        let data = pattern(SIZE, 1);
        write(&disk, 0, &data[..2 * OBJECT as usize]).await.unwrap();
        write(&disk, 2 * OBJECT, &data[2 * OBJECT as usize..]).await.unwrap();
        disk.flush().await.unwrap();
        assert_eq!(shop.count("data"), 5);
        // Whole objects are deleted. Written zeroes make an object unnecessary. Discards of parts
        // of objects are ignored.
        disk.discard(0, OBJECT + 4096).await.unwrap();
        write(&disk, 2 * OBJECT, &[0; OBJECT as usize]).await.unwrap();
        disk.zero(3 * OBJECT, OBJECT, Kept::Yes).await.unwrap();
        disk.zero(4 * OBJECT + 1, 5, Kept::No).await.unwrap();
        disk.flush().await.unwrap();
        disk.close().await.unwrap();
        let mut model = data;
        model[..OBJECT as usize].fill(0);
        model[2 * OBJECT as usize..4 * OBJECT as usize].fill(0);
        model[4 * OBJECT as usize + 1..4 * OBJECT as usize + 6].fill(0);
        assert!(content(&shop).await == model);
        assert_eq!(shop.count("data"), 3, "of 1, 3 and 4");
        let extents = disk.status(0, SIZE).unwrap();
        let seen: Vec<_> = extents.iter().map(|extent| (extent.len, extent.hole, extent.zero)).collect();
        assert_eq!(
            seen,
            [
                (OBJECT, true, true),
                (OBJECT, false, false),
                (OBJECT, true, true),
                (OBJECT + 20 * KIB, false, false)
            ]
        );
    });
}

#[test]
fn a_flush_costs_two_puts_and_small_writes_are_gathered() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        let before = shop.puts();
        for at in 0..100 {
            write(&disk, OBJECT + at * 512, &pattern(512, at)).await.unwrap();
        }
        disk.flush().await.unwrap();
        assert_eq!(shop.puts() - before, 2, "an object and a manifest");
        disk.flush().await.unwrap();
        assert_eq!(shop.puts() - before, 2, "nothing has changed");
        // Full objects are written without waiting for the flush.
        write(&disk, 0, &pattern(OBJECT, 7)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(shop.puts() - before, 3);
        assert!(disk.state().dirty.is_empty() && disk.state().writing.is_empty());
    });
}

#[test]
fn flushes_that_wait_together_are_one() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        write(&disk, 0, &[1; 512]).await.unwrap();
        let before = shop.puts();
        let mut flushes = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let disk = disk.clone();
            flushes.spawn(async move { disk.flush().await });
        }
        assert!(flushes.join_all().await.into_iter().all(|result| result.is_ok()));
        assert_eq!(shop.puts() - before, 2);
    });
}

#[test]
fn unflushed_data_is_flushed_after_a_while() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        write(&disk, 0, &[9; 512]).await.unwrap();
        let seen = disk.look_after(0).await;
        assert_eq!(content(&shop).await[0], 0, "it is seen for the first time");
        disk.look_after(seen).await;
        assert_eq!(content(&shop).await[0], 9);
    });
}

/// The pages are written again when a manifest would have too many changes, and the old pages are
/// deleted.
#[test]
fn many_changes_go_into_pages() {
    block_on(async {
        let size = 9000 * OBJECT;
        let shop = shop_of(size).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        for round in 1..4u8 {
            for index in [0, 1, 4095, 4096, 8191, 8999] {
                write(&disk, index * OBJECT, &[round; 512]).await.unwrap();
            }
            disk.flush().await.unwrap();
            write(&disk, 3 * OBJECT, &[round; 512]).await.unwrap();
            disk.flush().await.unwrap();
        }
        disk.discard(4096 * OBJECT, 4096 * OBJECT).await.unwrap();
        disk.flush().await.unwrap();
        disk.close().await.unwrap();
        let manifest = newest(&patient(shop.client())).await.unwrap().unwrap();
        assert!(manifest.changes.len() <= 4, "{manifest:?}");
        assert!(!manifest.pages[0].is_absent() && !manifest.pages[2].is_absent());
        shop.check_nothing_is_left(&manifest).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        for (index, byte) in [(0, 3), (1, 3), (2, 0), (3, 3), (4095, 3), (4096, 0), (8191, 0), (8999, 3)] {
            assert_eq!(disk.read(index * OBJECT, 512).await.unwrap(), [byte; 512], "{index}");
        }
    });
}

#[test]
fn content_has_a_number_that_changes_with_it() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        let first = disk.mark().unwrap();
        write(&disk, 0, &[1; 512]).await.unwrap();
        assert_eq!(disk.mark(), None, "more is there than was flushed");
        disk.flush().await.unwrap();
        let second = disk.mark().unwrap();
        assert_ne!(first, second);
        disk.close().await.unwrap();
        drop(disk);
        let disk = open(shop.client(), &me()).await.unwrap();
        assert_eq!(disk.mark(), Some(second), "taking a disk changes nothing");
    });
}

#[test]
fn an_unavailable_store_fails_waiting_requests_and_nothing_is_lost() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let client = shop.client();
        let disk = open(client.clone(), &me()).await.unwrap();
        write(&disk, 0, &pattern(4096, 1)).await.unwrap();
        disk.flush().await.unwrap();
        client.hang(true);
        write(&disk, 8192, &pattern(4096, 2)).await.unwrap();
        assert_eq!(disk.read(8192, 4096).await.unwrap(), pattern(4096, 2), "memory needs no store");
        let begun = tokio::time::Instant::now();
        assert_eq!(disk.flush().await, Err(IoError::Failed));
        assert_eq!(disk.read(0, 4096).await, Err(IoError::Failed));
        assert!(begun.elapsed() < Duration::from_secs(61), "{:?}", begun.elapsed());
        // The wait for space ends after a limit.
        let mut failed = 0;
        for index in 0..5 {
            failed += usize::from(write(&disk, index * OBJECT, &[5; 512]).await.is_err());
        }
        assert_eq!(failed, 2, "three layers are all there are");
        client.hang(false);
        disk.flush().await.unwrap();
        let content = content(&shop).await;
        assert_eq!(content[8192..8192 + 4096], pattern(4096, 2));
        assert_eq!(content[512..4096], pattern(4096, 1)[512..]);
    });
}

#[test]
fn a_full_store_is_reported_and_the_next_flush_has_everything() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let client = shop.client();
        let disk = open(client.clone(), &me()).await.unwrap();
        write(&disk, 100 * 512, &pattern(512, 3)).await.unwrap();
        client.refuse(Some(StoreError::NoSpace("no room".into())));
        assert_eq!(disk.flush().await, Err(IoError::NoSpace));
        write(&disk, 101 * 512, &pattern(512, 4)).await.unwrap();
        assert_eq!(disk.read(100 * 512, 512).await.unwrap(), pattern(512, 3));
        client.refuse(None);
        disk.flush().await.unwrap();
        let content = content(&shop).await;
        assert_eq!(content[100 * 512..101 * 512], pattern(512, 3));
        assert_eq!(content[101 * 512..102 * 512], pattern(512, 4));
    });
}

#[test]
fn stores_that_heed_no_condition_are_refused() {
    block_on(async {
        let shop = Shop::default();
        let client = shop.client();
        client.heed_nothing(true);
        let made = create(&patient(client.clone()), shape(SIZE)).await;
        assert!(matches!(&made, Err(Trouble::Unfit(reason)) if reason.contains("If-None-Match")), "{made:?}");
        assert!(matches!(open(client, &me()).await, Err(Trouble::Unfit(_))));
    });
}

#[test]
fn a_disk_is_made_once_and_only_where_there_is_none() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let again = create(&patient(shop.client()), shape(2 * SIZE)).await;
        assert!(matches!(&again, Err(Trouble::Unfit(reason)) if reason.contains("already")), "{again:?}");
        let empty = open(Shop::default().client(), &me()).await;
        assert!(
            matches!(&empty.err(), Some(Trouble::Unfit(reason)) if reason.contains("hob objects create"))
        );
    });
}

/// Promise 5: any invalid content of the object store results in an error.
#[test]
fn damaged_stores_are_detected() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        shop.spoil(Name::Manifest(1), |bytes| bytes[0x40] ^= 1);
        assert!(matches!(open(shop.client(), &me()).await.err(), Some(Trouble::Unfit(_))));
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        write(&disk, 0, &[7; 512]).await.unwrap();
        disk.flush().await.unwrap();
        let name = shop.names("data")[0];
        shop.spoil(name, |bytes| bytes.truncate(1000));
        assert_eq!(disk.read(4096, 512).await, Err(IoError::Failed), "a short object");
        shop.remove(name);
        assert_eq!(disk.read(4096, 512).await, Err(IoError::Failed), "an object that is gone");
        write(&disk, 512, &[8; 512]).await.unwrap();
        assert_eq!(disk.flush().await, Err(IoError::Failed), "nothing is made up for what is gone");
        assert_eq!(disk.read(512, 512).await.unwrap(), [8; 512]);
    });
}

/// A disk that cannot be loaded is retried every few seconds: the attempts must leave nothing
/// behind.
#[test]
fn an_opening_that_fails_leaves_nothing() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        // More changes than a manifest may have in this test.
        for index in 0..5 {
            write(&disk, index * OBJECT, &[7; 512]).await.unwrap();
        }
        disk.flush().await.unwrap();
        let page = shop.names("pages")[0];
        // A manifest that took the disk from an owner that did not close it is kept permanently.
        for closes in [false, true] {
            if closes {
                disk.close().await.unwrap();
            }
            let newest = shop.names("manifest").pop();
            shop.spoil(page, |bytes| bytes[100] ^= 1);
            assert!(matches!(open(shop.client(), &me()).await.err(), Some(Trouble::Store(_))));
            shop.spoil(page, |bytes| bytes[100] ^= 1);
            let whole = shop.remove(page);
            assert!(matches!(open(shop.client(), &me()).await.err(), Some(Trouble::Store(_))));
            assert_eq!(shop.names("manifest").pop(), newest, "somebody has taken it");
            shop.insert(page, whole.to_vec());
        }
        let disk = open(shop.client(), &me()).await.unwrap();
        assert_eq!(disk.read(4 * OBJECT, 512).await.unwrap(), [7; 512]);
    });
}
