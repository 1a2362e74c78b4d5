//! Tests a full object store: hob deletes objects that no manifest names, and keeps all others.

use super::*;

/// Writes a whole object, and waits until hob has tried to put it into the store.
async fn write_object(disk: &Arc<Disk>, index: u64, seed: u64) {
    write(disk, index * OBJECT, &pattern(OBJECT, seed)).await.unwrap();
    settle().await;
}

async fn settle() {
    tokio::time::sleep(Duration::from_secs(1)).await;
}

fn no_space() -> StoreError {
    StoreError::NoSpace("no room".into())
}

/// Returns the content of an object as a client reads it that opens the disk now.
async fn object_in(shop: &Shop, index: u64) -> Vec<u8> {
    let start = (index * OBJECT) as usize;
    content(shop).await[start..start + OBJECT as usize].to_vec()
}

/// A directory is full at once, and hob repeats a put to a store whose quota is used up.
#[test]
fn a_full_store_loses_objects_that_no_manifest_names() {
    for error in [no_space(), StoreError::Full("507".into())] {
        block_on(async {
            let shop = shop_of(SIZE).await;
            let disk = open(shop.client(), &me()).await.unwrap();
            let cleaner = disk.clone();
            let freeing = tokio::spawn(async move { cleaner.free_when_full().await });
            // The second version replaces the first one before a manifest names it.
            write_object(&disk, 0, 1).await;
            write_object(&disk, 0, 2).await;
            assert_eq!(shop.count("data"), 2);
            shop.limit_data(2, error.clone());
            write_object(&disk, 1, 3).await;
            disk.flush().await.unwrap();
            assert_eq!(shop.count("data"), 2, "{error}");
            assert!(object_in(&shop, 0).await == pattern(OBJECT, 2));
            assert!(object_in(&shop, 1).await == pattern(OBJECT, 3));
            freeing.abort();
        });
    }
}

/// The store has space for the objects with data, and none for the manifest that names them.
#[test]
fn a_store_without_space_for_a_manifest_loses_objects_that_no_manifest_names() {
    for error in [no_space(), StoreError::Full("507".into())] {
        block_on(async {
            let shop = shop_of(SIZE).await;
            let disk = open(shop.client(), &me()).await.unwrap();
            write_object(&disk, 0, 1).await;
            write_object(&disk, 0, 2).await;
            assert_eq!(shop.count("data"), 2);
            shop.limit_objects(shop.count(""), error.clone());
            disk.flush().await.unwrap();
            assert_eq!(shop.count("data"), 1, "{error}");
            assert!(object_in(&shop, 0).await == pattern(OBJECT, 2));
        });
    }
}

/// The store has the last flush point until the next one is complete. A discard frees the object
/// with the next flush, which needs space for a manifest only.
#[test]
fn a_full_store_keeps_objects_that_the_manifest_names() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &me()).await.unwrap();
        write_object(&disk, 0, 1).await;
        disk.flush().await.unwrap();
        shop.limit_data(1, no_space());
        write_object(&disk, 0, 2).await;
        assert_eq!(disk.flush().await, Err(IoError::NoSpace));
        assert!(object_in(&shop, 0).await == pattern(OBJECT, 1));
        assert!(disk.read(0, OBJECT).await.unwrap() == pattern(OBJECT, 2), "it is in memory");
        disk.discard(0, OBJECT).await.unwrap();
        disk.flush().await.unwrap();
        settle().await;
        assert_eq!(shop.count("data"), 0);
    });
}

/// A manifest whose creation had no reply may appear later. Then its objects are needed.
#[test]
fn a_full_store_keeps_objects_of_a_manifest_that_may_appear_later() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let client = shop.client();
        let disk = open(client.clone(), &me()).await.unwrap();
        client.delay_manifests(true);
        write_object(&disk, 0, 1).await;
        assert_eq!(disk.flush().await, Err(IoError::Failed));
        client.delay_manifests(false);
        write_object(&disk, 0, 2).await;
        assert_eq!(shop.count("data"), 2);
        shop.limit_data(2, no_space());
        write_object(&disk, 1, 3).await;
        assert_eq!(disk.flush().await, Err(IoError::NoSpace));
        assert_eq!(client.let_go(), 1);
        assert!(object_in(&shop, 0).await == pattern(OBJECT, 1));
    });
}
