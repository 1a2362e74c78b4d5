//! Asks `qemu-nbd` which layer of an image has the data of each range.
//!
//! QEMU's metadata context `qemu:allocation-depth` has a number for each range: 1 if the image
//! itself has the data, 2 or more if a layer below has it, and 0 if no layer has it. A zeroed or
//! discarded range of the image counts as data of the image. `qemu-nbd` has the context since QEMU
//! 5.2, if it was started with `--allocation-depth`.

use std::os::fd::AsFd;
use std::time::Duration;

use hob_nbd::uri::NbdUri;
use hob_nbd::wire::QEMU_ALLOCATION_DEPTH;

use super::connect::{Link, connect_for, end_politely};
use super::sample::{SampleError, block_status};
use crate::backing::NotShared;

/// Longest range of one query, bytes; a multiple of every block size.
const QUERY_BYTES_MAX: u64 = 1 << 30;

/// Depth of ranges that the image has itself.
const OWN: u32 = 1;

/// A connection on which hob asks `qemu-nbd`, from the start of the image to its end, which ranges
/// the image has itself.
pub(crate) struct OwnRanges {
    uri: NbdUri,
    link: Link,
    size_bytes: u64,
    /// Offset at which the next query starts, bytes.
    at: u64,
}

impl OwnRanges {
    /// Connects to `qemu-nbd` within `limit`.
    pub(crate) fn connect(uri: &NbdUri, size_bytes: u64, limit: Duration) -> Result<OwnRanges, NotShared> {
        let link = connect_for(uri, QEMU_ALLOCATION_DEPTH, limit, limit).map_err(NotShared::Unknown)?;
        if link.negotiated.meta_context_id.is_none() {
            return Err(NotShared::Unsuitable(format!(
                "qemu-nbd does not report which blocks an image has itself ({QEMU_ALLOCATION_DEPTH}); QEMU 5.2 and newer do"
            )));
        }
        if link.negotiated.size_bytes != size_bytes {
            return Err(NotShared::Unknown("the size of the image has changed".to_owned()));
        }
        Ok(OwnRanges { uri: uri.clone(), link, size_bytes, at: 0 })
    }

    /// Connects again, to continue after an error. The error is a sentence for users.
    pub(crate) fn reconnect(&mut self, limit: Duration) -> Result<(), String> {
        let mut again =
            OwnRanges::connect(&self.uri, self.size_bytes, limit).map_err(|error| error.to_string())?;
        again.at = self.at;
        *self = again;
        Ok(())
    }

    /// Asks `qemu-nbd` which parts of the next `bytes_max` bytes, at most, the image has itself.
    /// Waits at most `limit`. Calls `note` with the offset and length of each such part, in order.
    /// The error is a sentence for users.
    pub(crate) fn ask(
        &mut self,
        bytes_max: u64,
        limit: Duration,
        note: &mut dyn FnMut(u64, u64),
    ) -> Result<(), String> {
        let len = (self.size_bytes - self.at).min(bytes_max).min(QUERY_BYTES_MAX) as u32;
        let extents = block_status(&self.link, self.at, len, limit).map_err(|error| match error {
            SampleError::Refused(error) => {
                format!("qemu-nbd cannot tell which blocks the image has itself: {error:?}")
            }
            SampleError::Broken(why) => why,
        })?;
        let before = self.at;
        for extent in extents {
            let bytes = u64::from(extent.length);
            if extent.state == OWN {
                note(self.at, bytes);
            }
            self.at = self.at.saturating_add(bytes);
        }
        if self.at == before {
            return Err("qemu-nbd reported no blocks".to_owned());
        }
        Ok(())
    }

    /// Returns the offset at which the next query starts, bytes.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Returns true if the queries have covered the whole image.
    pub(crate) fn is_done(&self) -> bool {
        self.at >= self.size_bytes
    }
}

impl Drop for OwnRanges {
    fn drop(&mut self) {
        end_politely(self.link.socket.as_fd());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::{Child, Command};
    use std::time::Instant;

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

    /// A raw image has all blocks itself. A `qemu-nbd` without the option simulates QEMU before
    /// 5.2, which cannot report depths.
    #[test]
    fn a_server_that_does_not_report_depths_is_named_as_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, image) = (dir.path().join("socket"), dir.path().join("image"));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let uri = NbdUri::new(Address::Unix { path: socket.clone() }, "");
        for (options, is_known) in [(&["--allocation-depth"][..], true), (&[][..], false)] {
            let _server = start(&socket, &image, options);
            match OwnRanges::connect(&uri, 1 << 20, LIMIT) {
                Ok(mut ranges) => {
                    assert!(is_known);
                    let mut own = Vec::new();
                    for _ in 0..2 {
                        assert!(!ranges.is_done());
                        ranges.ask(1 << 19, LIMIT, &mut |offset, bytes| own.push((offset, bytes))).unwrap();
                        ranges.reconnect(LIMIT).unwrap();
                    }
                    assert!(ranges.is_done() && ranges.at() == 1 << 20);
                    assert_eq!(own, [(0, 1 << 19), (1 << 19, 1 << 19)]);
                }
                Err(NotShared::Unsuitable(why)) => {
                    assert!(!is_known && why.contains(QEMU_ALLOCATION_DEPTH), "{why}");
                }
                Err(NotShared::Unknown(why)) => panic!("{why}"),
            }
            assert!(OwnRanges::connect(&uri, 2 << 20, LIMIT).is_err(), "it has another size");
        }
    }
}
