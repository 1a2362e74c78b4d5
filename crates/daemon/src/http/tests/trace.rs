//! Recordings over a real socket, of requests that the test generates.

use hob_control::{OnClients, OnDirty, TraceOp, TraceRecord};
use hob_engine::units::DiskId;

use super::*;

/// The first disk's id.
const ID: DiskId = DiskId(0);

fn run_with_disk(test: impl AsyncFnOnce(Client, FakeShard)) {
    run_with_shard(async |dir, endpoint, fake| {
        let client = Client::new(endpoint, None);
        let backing = dir.join("vm.img");
        std::fs::File::create(&backing).unwrap().set_len(8 * MIB).unwrap();
        let backing = backing.to_string_lossy().into_owned();
        client
            .disk_add(&DiskAdd { name: "vm".into(), backing, read_only: false, ..DiskAdd::default() })
            .await
            .unwrap();
        test(client, fake).await;
    });
}

fn record(number: u64) -> TraceRecord {
    TraceRecord { at_ns: number, offset: number * 512, len: 512, op: TraceOp::Write }
}

#[test]
fn a_recording_is_one_at_a_time_and_ends_with_its_disk() {
    run_with_disk(async |client, fake| {
        assert!(!fake.request(ID, &record(0)), "no recording runs yet");
        let mut trace = client.trace("vm").await.unwrap();
        let first = trace.next().await.unwrap().unwrap();
        assert!(first.records.is_empty() && !first.is_last, "the recording has begun: {first:?}");
        assert!((0..5).all(|number| fake.request(ID, &record(number))));
        match client.trace("vm").await {
            Err(ClientError::Refused { status: 409, problem }) => {
                assert!(problem.error.contains("already"), "{problem}");
            }
            other => panic!("{other:?}"),
        }
        let recording = client.disk("vm").await.unwrap().recording.unwrap();
        assert_eq!((recording.requests, recording.dropped), (5, 0));
        client.disk_remove("vm", OnDirty::Drain, OnClients::Refuse).await.unwrap();
        let (mut records, mut last) = (Vec::new(), first);
        while let Some(frame) = trace.next().await.unwrap() {
            assert!(!last.is_last && frame.elapsed_ns >= last.elapsed_ns);
            records.extend_from_slice(&frame.records);
            last = frame;
        }
        assert!(last.is_last);
        assert_eq!(records, (0..5).map(record).collect::<Vec<_>>());
    });
}

#[test]
fn a_client_that_leaves_ends_its_recording() {
    run_with_disk(async |client, fake| {
        let mut trace = client.trace("vm").await.unwrap();
        trace.next().await.unwrap();
        assert!(fake.request(ID, &record(0)));
        drop(trace);
        while fake.request(ID, &record(1)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(client.disk("vm").await.unwrap().recording.is_none());
        let mut trace = client.trace("vm").await.unwrap();
        assert!(trace.next().await.unwrap().unwrap().records.is_empty(), "nothing of the recording before");
    });
}

#[test]
fn a_client_that_is_too_slow_learns_how_much_it_misses() {
    run_with_disk(async |client, fake| {
        const COUNT: u64 = 400_000;
        let mut trace = client.trace("vm").await.unwrap();
        trace.next().await.unwrap();
        // No task of the runtime runs meanwhile, so no data is read.
        assert!((0..COUNT).all(|number| fake.request(ID, &record(number))));
        client.disk_remove("vm", OnDirty::Drain, OnClients::Refuse).await.unwrap();
        let (mut seen, mut dropped) = (0, 0);
        while let Some(frame) = trace.next().await.unwrap() {
            for found in frame.records {
                assert_eq!(found, record(seen), "what is there is whole and in order");
                seen += 1;
            }
            dropped = frame.dropped;
        }
        assert!(dropped > 0 && seen > 0, "{seen} seen, {dropped} dropped");
        assert_eq!(seen + dropped, COUNT);
    });
}

#[test]
fn sixteen_disks_are_recorded_at_once_and_no_more() {
    run_with_disk(async |client, _| {
        let backing = client.disk("vm").await.unwrap().backing;
        for number in 0..16 {
            let (name, backing) = (format!("vm{number}"), format!("{backing}{number}"));
            std::fs::File::create(&backing).unwrap().set_len(MIB).unwrap();
            client
                .disk_add(&DiskAdd { name, backing, read_only: false, ..DiskAdd::default() })
                .await
                .unwrap();
        }
        let mut traces = Vec::new();
        for number in 0..16 {
            traces.push(client.trace(&format!("vm{number}")).await.unwrap());
        }
        match client.trace("vm").await {
            Err(ClientError::Refused { status: 409, problem }) => {
                assert!(problem.error.starts_with("16 disks"), "{problem}");
            }
            other => panic!("{other:?}"),
        }
        traces.pop();
        while client.trace("vm").await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}
