//! Tests of two clients that want one disk: one is fenced or refused. Also tests a client that
//! wrongly assumes that it owns the disk.

use std::sync::Arc;

use tokio::sync::Notify;

use super::super::opening::unlock;
use super::super::owner::await_leaving;
use super::super::worker::{CLOSE_MAX, Worker};
use super::*;
use crate::backing::BackingOptions;

fn a() -> Owner {
    Owner::test("a", 1)
}

fn b() -> Owner {
    Owner::test("b", 100)
}

/// Runs the operator's command that releases the disk.
async fn release(shop: &Shop) {
    unlock(&patient(shop.client())).await.unwrap();
}

#[test]
fn a_disk_that_another_host_has_is_refused_until_it_is_closed_or_unlocked() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        assert!(
            matches!(unlock(&patient(shop.client())).await, Err(Trouble::Unfit(_))),
            "no host has the disk open"
        );
        let first = open(shop.client(), &a()).await.unwrap();
        let refused = open(shop.client(), &b()).await.err();
        assert!(
            matches!(&refused, Some(Trouble::Unfit(reason)) if reason.contains("host a") && reason.contains("hob objects unlock")),
            "{refused:?}"
        );
        first.close().await.unwrap();
        let second = open(shop.client(), &b()).await.unwrap();
        second.close().await.unwrap();
        let _third = open(shop.client(), &a()).await.unwrap();
        release(&shop).await;
        open(shop.client(), &b()).await.unwrap();
    });
}

/// Two writers: all flushes of the older writer fail, and none of its data reaches the disk.
#[test]
fn of_two_writers_the_older_is_fenced() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let old = open(shop.client(), &a()).await.unwrap();
        write(&old, 0, &[1; 1024]).await.unwrap();
        old.flush().await.unwrap();
        write(&old, 512, &[2; 512]).await.unwrap();
        release(&shop).await;
        let new = open(shop.client(), &b()).await.unwrap();
        write(&new, 512, &[3; 512]).await.unwrap();
        new.flush().await.unwrap();
        assert_eq!(old.flush().await, Err(IoError::Failed));
        assert!(old.state().lost);
        old.lost.notified().await;
        assert_eq!(old.read(0, 512).await, Err(IoError::Failed));
        assert_eq!(write(&old, 0, &[4; 512]).await, Err(IoError::Failed));
        assert_eq!(old.discard(0, OBJECT).await, Err(IoError::Failed));
        assert_eq!(old.flush().await, Err(IoError::Failed));
        assert_eq!(old.close().await, Ok(()), "there is nothing to close");
        let content = content(&shop).await;
        assert_eq!((content[0], content[512]), (1, 3));
        assert_eq!(new.read(0, 512).await.unwrap(), [1; 512]);
    });
}

#[test]
fn an_idle_owner_detects_its_loss_too() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let old = open(shop.client(), &a()).await.unwrap();
        old.look_after(0).await;
        assert!(!old.state().lost);
        release(&shop).await;
        old.look_after(0).await;
        assert!(old.state().lost);
    });
}

/// A proxy answers with a page of its own in place of the store. The owner keeps the disk, and stores
/// its data when the store answers again.
#[test]
fn a_reply_that_is_no_manifest_takes_no_disk() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let disk = open(shop.client(), &a()).await.unwrap();
        write(&disk, 0, &[1; 512]).await.unwrap();
        let next = Name::Manifest(disk.state().sequence + 1);
        shop.insert(next, b"<html>Please log in</html>".to_vec());
        disk.look_after(0).await;
        assert!(!disk.state().lost);
        assert_eq!(disk.flush().await, Err(IoError::Failed), "the number is taken");
        assert!(!disk.state().lost);
        shop.remove(next);
        disk.flush().await.unwrap();
        assert_eq!(content(&shop).await[0], 1);
    });
}

/// The owner is paused while others take the disk, write many manifests and delete the old ones.
/// The manifest with the paused owner's next number is kept, so that the owner stays fenced.
#[test]
fn an_owner_that_was_paused_for_long_is_fenced_still() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let old = open(shop.client(), &a()).await.unwrap();
        write(&old, 0, &[1; 512]).await.unwrap();
        old.flush().await.unwrap();
        write(&old, 0, &[2; 512]).await.unwrap();
        release(&shop).await;
        for life in 0..5u8 {
            let new = open(shop.client(), &b()).await.unwrap();
            new.sweep().await;
            for round in 0..20 {
                write(&new, OBJECT, &[life * 20 + round + 1; 512]).await.unwrap();
                new.flush().await.unwrap();
            }
            new.close().await.unwrap();
        }
        assert_eq!(shop.count("manifest"), 2, "the newest, and the one that fences");
        assert_eq!(old.flush().await, Err(IoError::Failed));
        let content = content(&shop).await;
        assert_eq!((content[0], content[OBJECT as usize]), (1, 100));
    });
}

/// A client that is about to take the disk is paused until its number was used, released and
/// deleted. The client then gets the number, but not the disk.
#[test]
fn a_client_that_takes_an_outdated_number_does_not_own_the_disk() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let (late, gate) = (shop.client(), Arc::new(Notify::new()));
        late.wait_at(gate.clone());
        let (client, owner) = (late.clone(), b());
        let opening = tokio::spawn(async move { open(client, &owner).await });
        while !late.is_waiting() {
            tokio::task::yield_now().await;
        }
        let first = open(shop.client(), &a()).await.unwrap();
        for round in 1..4 {
            write(&first, 0, &[round; 512]).await.unwrap();
            first.flush().await.unwrap();
        }
        while shop.count("manifest") > 1 {
            tokio::task::yield_now().await;
        }
        gate.notify_one();
        let refused = opening.await.unwrap().err();
        assert!(matches!(&refused, Some(Trouble::Unfit(reason)) if reason.contains("host a")), "{refused:?}");
        write(&first, 0, &[9; 512]).await.unwrap();
        first.flush().await.unwrap();
        assert_eq!(content(&shop).await[0], 9);
        assert!(!first.state().lost);
        first.close().await.unwrap();
        let next = open(shop.client(), &b()).await.unwrap();
        next.sweep().await;
        assert_eq!(shop.count("manifest"), 1, "it is cleared away, too");
    });
}

#[test]
fn a_reader_disturbs_no_writer_and_sees_a_fixed_state() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let writer = open(shop.client(), &a()).await.unwrap();
        write(&writer, 0, &[1; 512]).await.unwrap();
        writer.flush().await.unwrap();
        let reader = Arc::new(open_to_read(patient(shop.client())).await.unwrap());
        assert_eq!(reader.read(0, 512).await.unwrap(), [1; 512]);
        assert_eq!(write(&reader, 0, &[5; 512]).await, Err(IoError::ReadOnly));
        assert_eq!(reader.flush().await, Ok(()));
        reader.close().await.unwrap();
        write(&writer, OBJECT, &[2; 512]).await.unwrap();
        writer.flush().await.unwrap();
        assert_eq!(reader.read(OBJECT, 512).await.unwrap(), [0; 512]);
        write(&writer, 0, &[3; 512]).await.unwrap();
        writer.flush().await.unwrap();
        writer.close().await.unwrap();
        assert_eq!(
            reader.read(0, 512).await,
            Err(IoError::Failed),
            "what it knew of is gone, and it says so"
        );
    });
}

/// The objects of an owner that died are deleted. Objects of a live owner, and names that are not
/// hob's, stay.
#[test]
fn leftovers_go_and_nothing_else_does() {
    block_on(async {
        let shop = shop_of(SIZE).await;
        let client = shop.client();
        {
            let dead = open(client.clone(), &me()).await.unwrap();
            write(&dead, 0, &pattern(OBJECT, 1)).await.unwrap();
            dead.flush().await.unwrap();
            // The object is full, so it is put at once, and no manifest names it.
            write(&dead, OBJECT, &pattern(OBJECT, 2)).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            client.hang(true);
        }
        assert_eq!(shop.count("data"), 2);
        let disk = open(shop.client(), &me()).await.unwrap();
        write(&disk, 2 * OBJECT, &pattern(OBJECT, 3)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        disk.sweep().await;
        assert_eq!(shop.count("data"), 2, "the dead one's went, the living one's did not");
        disk.flush().await.unwrap();
        assert!(!disk.state().inherited && !disk.state().leftovers);
        assert_eq!(disk.read(2 * OBJECT, OBJECT).await.unwrap(), pattern(OBJECT, 3));
        assert_eq!(disk.read(0, OBJECT).await.unwrap(), pattern(OBJECT, 1));
    });
}

/// A disk that was opened and is not served is closed in the background, because its owner may be a
/// thread that must never wait. The next client that opens the disk waits until the disk is closed.
#[test]
fn only_the_next_opening_waits_for_the_close_of_an_unused_disk() {
    let (shop, gate) = (Shop::default(), Arc::new(Notify::new()));
    let newest = || block_on(async { newest(&patient(shop.client())).await.unwrap().unwrap() });
    let shape = Shape { uuid: Uuid([4; 16]), ..shape(SIZE) };
    block_on(async { create(&patient(shop.client()), shape).await }).unwrap();
    let start = |client: Client| {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let options = BackingOptions::default();
        let store = RetryingStore::new(Box::new(client), options.connect_max);
        Worker::start(store, true, &options, Arc::new(event)).unwrap()
    };
    let client = shop.client();
    let worker = start(client.clone());
    client.wait_at(gate.clone());
    drop(worker);
    assert!(!newest().closed, "the store has not answered");
    std::thread::scope(|scope| {
        let next = scope.spawn(|| start(shop.client()));
        gate.notify_one();
        let worker = next.join().unwrap();
        assert!(!newest().stays, "it was closed before it was taken");
        drop(worker);
    });
    await_leaving(CLOSE_MAX);
    assert!(newest().closed);
}
