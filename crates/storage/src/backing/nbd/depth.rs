//! Asks `qemu-nbd` which layer of an image has the data of each range, before the image is served.
//!
//! QEMU's metadata context `qemu:allocation-depth` has a number for each range: 1 if the image
//! itself has the data, 2 or more if a layer below has it, and 0 if no layer has it. A zeroed or
//! discarded range of the image counts as data of the image. `qemu-nbd` has the context since QEMU
//! 5.2, if it was started with `--allocation-depth`.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hob_nbd::uri::NbdUri;
use hob_nbd::wire::QEMU_ALLOCATION_DEPTH;

use super::connect::{connect_for, end_politely};
use super::sample::{SampleError, block_status};
use crate::backing::NotShared;

/// Longest range of one query, bytes; a multiple of every block size.
const QUERY_BYTES_MAX: u64 = 1 << 30;

/// Depth of ranges that the image has itself.
const OWN: u32 = 1;

/// Calls `note` with offset and length of each range that the image has itself, in order, within
/// `limit`. Uses its own connection. The image must not change meanwhile.
pub(crate) fn for_each_own_range(
    uri: &NbdUri,
    size_bytes: u64,
    limit: Duration,
    note: &mut dyn FnMut(u64, u64),
) -> Result<(), NotShared> {
    let deadline = Instant::now() + limit;
    let link = connect_for(uri, QEMU_ALLOCATION_DEPTH, limit, limit).map_err(NotShared::Unknown)?;
    if link.negotiated.meta_context_id.is_none() {
        return Err(NotShared::Unsuitable(format!(
            "qemu-nbd does not report which blocks an image has itself ({QEMU_ALLOCATION_DEPTH}); QEMU 5.2 and newer do"
        )));
    }
    if link.negotiated.size_bytes != size_bytes {
        return Err(NotShared::Unknown("the size of the image has changed".to_owned()));
    }
    let mut at = 0;
    while at < size_bytes {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NotShared::Unknown(format!(
                "qemu-nbd did not report within {} s which blocks the image has itself",
                limit.as_secs()
            )));
        }
        let len = (size_bytes - at).min(QUERY_BYTES_MAX) as u32;
        let extents = block_status(&link, at, len, left).map_err(|error| {
            NotShared::Unknown(match error {
                SampleError::Refused(error) => {
                    format!("qemu-nbd cannot tell which blocks the image has itself: {error:?}")
                }
                SampleError::Broken(why) => why,
            })
        })?;
        let before = at;
        for extent in extents {
            let bytes = u64::from(extent.length);
            if extent.state == OWN {
                note(at, bytes);
            }
            at = at.saturating_add(bytes);
        }
        if at == before {
            return Err(NotShared::Unknown("qemu-nbd reported no blocks".to_owned()));
        }
    }
    end_politely(link.socket.as_fd());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::{Child, Command};

    use hob_nbd::uri::Address;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    struct Server(Child);

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn start(socket: &Path, image: &Path, options: &[&str]) -> Server {
        // A killed qemu-nbd leaves its socket file.
        let _ = std::fs::remove_file(socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=0", "--format=raw", "--socket"]).arg(socket).args(options);
        let server = Server(command.arg(image).spawn().expect("qemu-nbd is installed"));
        let deadline = Instant::now() + LIMIT;
        while UnixStream::connect(socket).is_err() {
            assert!(Instant::now() < deadline, "qemu-nbd does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        server
    }

    /// A raw image has all blocks itself. QEMU before 5.2 cannot tell, as if the option were missing.
    #[test]
    fn a_server_that_does_not_report_depths_is_named_as_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, image) = (dir.path().join("socket"), dir.path().join("image"));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let uri = NbdUri::new(Address::Unix { path: socket.clone() }, "");
        for (options, is_known) in [(&["--allocation-depth"][..], true), (&[][..], false)] {
            let _server = start(&socket, &image, options);
            let mut own = 0;
            let asked = for_each_own_range(&uri, 1 << 20, LIMIT, &mut |_, bytes| own += bytes);
            match asked {
                Ok(()) => assert!(is_known && own == 1 << 20, "{own}"),
                Err(NotShared::Unsuitable(why)) => {
                    assert!(!is_known && why.contains(QEMU_ALLOCATION_DEPTH), "{why}");
                }
                Err(NotShared::Unknown(why)) => panic!("{why}"),
            }
            let other = for_each_own_range(&uri, 2 << 20, LIMIT, &mut |_, _| ());
            assert!(other.is_err(), "it has another size");
        }
    }
}
