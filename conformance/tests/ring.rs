//! Both I/O drivers, selected explicitly. `HOB_RING=threads` runs any other test of this suite with
//! threads; `cargo xtask test` does this for the tests that move data.

use conformance::data::{Noise, assert_same};
use conformance::{Hob, MIB, Scratch, Serve, Tool};

const SIZE: u64 = 32 * MIB;

#[track_caller]
fn moves_data(ring: &str) -> (Scratch, Hob) {
    let scratch = Scratch::new();
    let mut image = scratch.noise("disk.img", SIZE, 70);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "4K").ring(ring);
    let hob = serve.start(&scratch);
    let mut client = hob.connect();
    let data = Noise::new(71).bytes(MIB as usize);
    client.write(3 * MIB + 512, &data).unwrap();
    client.flush().unwrap();
    image[3 * MIB as usize + 512..][..data.len()].copy_from_slice(&data);
    for _ in 0..2 {
        assert_same(&client.read(0, SIZE as u32).unwrap(), &image, 0, "the disk and the client's memory");
    }
    Tool::new("qemu-img")
        .args(["compare", "-U", "-f", "raw", "-F", "raw", &scratch.text("disk.img"), &hob.uri()])
        .run();
    (scratch, hob)
}

#[test]
fn threads_move_data() {
    let (_scratch, hob) = moves_data("threads");
    hob.stop();
}

#[test]
fn io_uring_moves_data() {
    let (_scratch, hob) = moves_data("io_uring");
    hob.stop();
}

#[test]
fn auto_moves_data() {
    let (_scratch, hob) = moves_data("auto");
    hob.stop();
}
