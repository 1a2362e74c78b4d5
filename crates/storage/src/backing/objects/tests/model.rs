//! Compares random histories of a guest, with crashes, with a model: an array, and its content at
//! each flush.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::fake::Crash;
use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u64, u64),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Read(u64, u64),
    Flush,
    Reopen,
    /// The client ends without closing.
    Die,
    /// The client fails within this number of changes of the object store.
    Crash(u64),
}

/// Maximum amount that fits into memory at once.
const WRITE_MAX: u64 = 2 * OBJECT;

fn range() -> impl Strategy<Value = (u64, u64)> {
    let edge = (0..5u64, 0..3u64).prop_map(|(index, off)| (index * OBJECT + off * 512).min(SIZE - 1));
    let any = prop_oneof![0..SIZE, edge];
    let len = prop_oneof![1..2000u64, Just(4096), Just(OBJECT), Just(2 * OBJECT), 1..SIZE];
    (any, len).prop_map(|(at, len)| (at, len.min(SIZE - at)))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => range().prop_map(|(at, len)| Step::Write(at, len.min(WRITE_MAX))),
        2 => (range(), any::<bool>()).prop_map(|((at, len), kept)| Step::Zero(at, len, kept)),
        2 => range().prop_map(|(at, len)| Step::Discard(at, len)),
        4 => range().prop_map(|(at, len)| Step::Read(at, len)),
        4 => Just(Step::Flush),
        1 => Just(Step::Reopen),
        1 => Just(Step::Die),
        1 => (0..12u64).prop_map(Step::Crash),
    ]
}

/// Discards: frees whole objects, and leaves other objects unchanged.
fn discard(now: &mut [u8], at: u64, len: u64) {
    for index in 0..SIZE.div_ceil(OBJECT) {
        let (first, end) = (index * OBJECT, ((index + 1) * OBJECT).min(SIZE));
        if at <= first && end <= at + len {
            now[first as usize..end as usize].fill(0);
        }
    }
}

struct World {
    shop: Shop,
    client: Client,
    disk: Arc<Disk>,
    now: Vec<u8>,
    /// Possible contents after a crash: the last acknowledged flush point, and those begun since.
    points: Vec<Vec<u8>>,
}

impl World {
    /// Opens the disk again, and checks that it has the content of one of its flush points.
    async fn come_back(&mut self) -> Result<(), TestCaseError> {
        self.client = self.shop.client();
        self.disk =
            open(self.client.clone(), &me()).await.map_err(|e| TestCaseError::fail(format!("{e:?}")))?;
        self.now = self.disk.read(0, SIZE).await.unwrap();
        prop_assert!(self.points.contains(&self.now), "no flush point");
        self.points = vec![self.now.clone()];
        let disk = self.disk.clone();
        tokio::spawn(async move { disk.sweep().await });
        Ok(())
    }

    async fn perform(&mut self, step: Step, seed: u64) -> Result<(), TestCaseError> {
        let done = match step {
            Step::Write(at, len) => {
                let data = pattern(len, seed);
                let done = write(&self.disk, at, &data).await;
                self.now[at as usize..(at + len) as usize].copy_from_slice(&data);
                done
            }
            Step::Zero(at, len, kept) => {
                self.now[at as usize..(at + len) as usize].fill(0);
                self.disk.zero(at, len, if kept { Kept::Yes } else { Kept::No }).await
            }
            Step::Discard(at, len) => {
                discard(&mut self.now, at, len);
                self.disk.discard(at, len).await
            }
            Step::Read(at, len) => match self.disk.read(at, len).await {
                Ok(read) => {
                    prop_assert!(read == self.now[at as usize..(at + len) as usize], "another content");
                    Ok(())
                }
                Err(error) => Err(error),
            },
            Step::Flush => {
                self.points.push(self.now.clone());
                let done = self.disk.flush().await;
                if done.is_ok() {
                    self.points = vec![self.now.clone()];
                }
                done
            }
            Step::Reopen => {
                self.points.push(self.now.clone());
                let done = self.disk.close().await;
                if done.is_ok() {
                    self.points = vec![self.now.clone()];
                }
                return self.come_back().await;
            }
            Step::Die => {
                self.client.hang(true);
                return self.come_back().await;
            }
            Step::Crash(changes) => {
                self.client.crash_after(changes, Crash::After);
                Ok(())
            }
        };
        if done.is_err() || self.client.has_crashed() {
            self.come_back().await?;
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_history_is_that_of_the_model(steps in prop::collection::vec(step(), 1..60)) {
        block_on(async {
            let shop = shop_of(SIZE).await;
            let client = shop.client();
            let disk = open(client.clone(), &me()).await.unwrap();
            let zeroes = vec![0; SIZE as usize];
            let mut world = World { shop, client, disk, now: zeroes.clone(), points: vec![zeroes] };
            for (step, seed) in steps.into_iter().zip(1..) {
                world.perform(step, seed).await?;
            }
            world.perform(Step::Reopen, 0).await?;
            world.disk.sweep().await;
            world.disk.close().await.unwrap();
            let manifest = newest(&patient(world.shop.client())).await.unwrap().unwrap();
            world.shop.check_nothing_is_left(&manifest).await;
            prop_assert!(content(&world.shop).await == world.now);
            Ok::<(), TestCaseError>(())
        })?;
    }
}
