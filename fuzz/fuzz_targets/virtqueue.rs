//! Fuzzes guest memory, including rings and descriptors, and lets the device serve it. Every engine
//! request is inside the disk and has a buffer of its size. No buffer leaks.
#![no_main]

use std::sync::Arc;

use hob_engine::io::{IoError, Reply};
use hob_engine::outcome::Outcome;
use hob_engine::units::DiskId;
use hob_frontends::{Payload, PlainBuffers};
use hob_frontends::vhost_user::block::{Features, Info};
use hob_frontends::vhost_user::memory::GuestMap;
use hob_frontends::vhost_user::queue::Layout;
use hob_frontends::vhost_user::{Budget, Device, Start};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Size of each of two memory regions, and of the hole between them, bytes.
const REGION: usize = 1 << 15;

const DISK_BYTES: u64 = 1 << 20;

fuzz_target!(|input: (u8, u16, bool, &[u8])| {
    let (log_size, base, event_idx, image) = input;
    let regions = [(GuestAddress(0), REGION), (GuestAddress(2 * REGION as u64), REGION)];
    let memory = GuestMemoryMmap::from_ranges(&regions).expect("two small regions");
    let (low, high) = image.split_at(image.len().min(REGION));
    memory.write_slice(low, regions[0].0).expect("it fits");
    memory.write_slice(&high[..high.len().min(REGION)], regions[1].0).expect("it fits");
    let info =
        Info { size_bytes: DISK_BYTES, read_only: false, block_bytes: 512, can_discard: true, name: "fuzz".into() };
    let all = info.features();
    let features = if event_idx { all } else { Features(all.0 & !Features::EVENT_IDX.0) };
    let mut device = Device::new(info, DiskId(0), 1);
    let layout = Layout { size: 1 << (log_size % 8), descriptors: 0, available: 0x1000, used: 0x2000 };
    let start = Start::new(0, Arc::new(GuestMap::from_memory(memory)), layout, base, features);
    if device.start(start).is_err() {
        return;
    }
    let mut payload = PlainBuffers::default();
    for round in 0..64 {
        let taken = device.take(0, &mut Budget::default(), &mut payload);
        while let Some(request) = device.poll_request() {
            assert!(request.offset + request.len <= DISK_BYTES);
            if let Some(id) = request.buffer {
                assert!(payload.buffers[&id.0].0.len() as u64 >= request.len);
            }
            let result = if round % 2 == 0 { Ok(()) } else { Err(IoError::Failed) };
            let reply = Reply { id: request.id, disk: request.disk, result, outcome: Outcome::Hit };
            device.handle_reply(&reply, &mut payload);
            request.buffer.into_iter().for_each(|id| payload.release(id));
        }
        while device.poll_signal().is_some() {}
        if !matches!(taken, Ok(1..)) {
            break;
        }
    }
    device.stop(0);
    assert!(device.poll_stopped(0).is_some() && payload.buffers.is_empty());
});
