//! Tests of flash devices that one shard opens and another shard refuses: all shards close the
//! device again, and the device becomes usable only when all shards accept it.

use super::*;

/// Services with two shards, of which the second accepts no devices until the test allows it.
fn half_way(test: impl AsyncFnOnce(Bench, FakeShard)) {
    run(async |bench| {
        let ((first, shard), (second, sick)) = (FakeShard::start(), FakeShard::start());
        sick.set_refuses_devices(true);
        let shards = vec![first, second];
        let services = Services::new(shards, Exports::default(), BackingOptions::default(), Store::Memory);
        test(Bench { services, shard, ..bench }, sick).await;
    });
}

impl Bench {
    fn state_of(&self, device: &str) -> Option<DeviceState> {
        let path = self.path(device);
        let pool = self.services.observe.pool("p").unwrap();
        pool.devices.iter().find(|it| it.path == path).map(|it| it.state)
    }

    async fn add(&self, device: &str) -> Result<()> {
        let size = Some(Size(hob_storage::pool::device_bytes_for(4 * MIB, SEGMENT)));
        let add = DeviceAdd { path: self.path(device), size, peer: None, force: false };
        self.services.pools.device_add("p".into(), add, OnDirty::Drain).await.map(drop)
    }
}

#[test]
fn a_device_that_was_opened_is_closed_again_and_is_there_when_it_works() {
    half_way(async |bench, sick| {
        bench.pool(&["a"], 4).await;
        assert_eq!(bench.state_of("a"), Some(DeviceState::Offline));
        assert_eq!(bench.shard.devices(), [], "no shard has it");
        // The device fails once more, and then works.
        bench.services.pools.retry_devices("p").await;
        assert_eq!((bench.state_of("a"), bench.shard.devices()), (Some(DeviceState::Offline), vec![]));
        sick.set_refuses_devices(false);
        bench.services.pools.retry_devices("p").await;
        assert_eq!((bench.state_of("a"), bench.free()), (Some(DeviceState::Online), 4));
        assert_eq!(bench.shard.devices(), sick.devices());
    });
}

#[test]
fn a_device_that_was_formatted_is_taken_out_again() {
    half_way(async |bench, sick| {
        sick.set_refuses_devices(false);
        bench.pool(&["a"], 4).await;
        sick.set_refuses_devices(true);
        bench.add("b").await.unwrap_err();
        assert_eq!((bench.state_of("b"), bench.free()), (None, 4));
        assert_eq!(bench.shard.devices(), sick.devices());
        sick.set_refuses_devices(false);
        bench.add("b").await.unwrap();
        assert_eq!((bench.state_of("b"), bench.free()), (Some(DeviceState::Online), 8));
    });
}
