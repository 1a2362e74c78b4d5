//! Disks that cannot be opened completely.

use super::recovery::reason;
use super::*;
use crate::shard_api::ShardError;
use crate::state::DiskQosSpec;

/// The shard would keep the disk otherwise, and the next opening would find the backing in use.
#[test]
fn a_disk_that_could_not_be_prepared_is_taken_from_its_shard() {
    run(async |bench| {
        let qos = Some(DiskQosSpec { policy: None, own: Qos::default() });
        let state = DiskState { qos, ..DiskState::new("vm".into(), bench.image("vm.img", 8), false) };
        drop(bench.services.disks.enter(state, None).unwrap());
        bench.shard.set_refuses_qos(true);
        for _ in 0..2 {
            bench.services.disks.bring_online("vm").await;
            assert!(reason(&bench).contains(&ShardError::Busy.to_string()), "{}", reason(&bench));
        }
        assert!(bench.services.registry.inner().abandoned.is_empty());
        bench.shard.set_refuses_qos(false);
        bench.services.disks.bring_online("vm").await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
    });
}

/// A disk that its shard keeps blocks no other disk, which would get its id.
#[test]
fn a_disk_that_its_shard_keeps_after_a_failed_opening_blocks_no_other_disk() {
    run(async |bench| {
        let qos = Some(DiskQosSpec { policy: None, own: Qos::default() });
        let state = DiskState { qos, ..DiskState::new("vm".into(), bench.image("vm.img", 8), false) };
        drop(bench.services.disks.enter(state, None).unwrap());
        bench.shard.set_refuses_qos(true);
        bench.shard.set_keeps_disks(true);
        bench.services.disks.bring_online("vm").await;
        assert!(reason(&bench).contains(&ShardError::Busy.to_string()), "{}", reason(&bench));
        bench.shard.set_refuses_qos(false);
        bench.shard.set_keeps_disks(false);
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        bench.disk("other").await;
        assert_eq!(bench.services.observe.disk("other").unwrap().state, DiskLife::Online);
    });
}
