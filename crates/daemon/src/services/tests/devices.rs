//! Tests of flash devices that one shard opens and another shard refuses: all shards close the
//! device again, and it becomes usable only when all shards accept it.

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

/// The content of a fenced device is never used again. A device that was not removed may fail again.
#[test]
fn a_fenced_device_that_was_removed_and_is_back_starts_empty() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 4).await.unwrap();
        let (disk, sick, segments, path) = {
            let mut inner = bench.services.registry.inner();
            let disk = &inner.disks["vm"];
            let (id, sick) = (disk.id, disk.held[0].device);
            let segments: Vec<_> = disk.held.iter().copied().filter(|it| it.device == sick).collect();
            let path = inner.device_on_shards(sick).unwrap().1.path.clone();
            (id, sick, segments, path)
        };
        bench.services.events.handle(ShardEvent::Fenced { device: sick, errors: 16 });
        bench.services.events.handle(ShardEvent::Lost { disk, segments });
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let name = path.file_name().unwrap().to_str().unwrap();
        let reuse = async || {
            bench.services.pools.reuse_replugged("p").await;
            bench.state_of(name)
        };
        assert_eq!(reuse().await, Some(DeviceState::Fenced), "it was not removed");
        let pulled = bench.path("pulled");
        std::fs::rename(&path, &pulled).unwrap();
        assert_eq!(reuse().await, Some(DeviceState::Fenced), "it is not back");
        std::fs::write(&path, vec![7; 4 << 20]).unwrap();
        assert_eq!(reuse().await, Some(DeviceState::Fenced), "it is another device");
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; 4 << 20]);
        std::fs::copy(&pulled, bench.path("copy")).unwrap();
        std::fs::rename(bench.path("copy"), &path).unwrap();
        let before = hob_storage::pool::superblock_uuid(&path).unwrap();
        assert_eq!(reuse().await, Some(DeviceState::Online));
        assert_ne!(hob_storage::pool::superblock_uuid(&path).unwrap(), before, "it was formatted");
        assert_eq!((bench.room("vm"), bench.free()), (4, 4));
        assert_eq!(bench.shard.devices().len(), 2);
        assert!(!bench.shard.devices().contains(&sick), "it has another id");
    });
}
