//! Detects compressed files by their first bytes and decompresses them as a stream. All decoders
//! are written in Rust. The decoders limit their windows, so that a file header cannot cause large
//! allocations.

use std::error::Error;
use std::io::{self, BufRead, BufReader, Cursor, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::binary::read_whole;

/// Suffixes of the names of compressed files.
pub(super) const SUFFIXES: [&str; 5] = [".gz", ".zst", ".zstd", ".bz2", ".xz"];
/// Number of bytes from which the compression is detected.
const START_BYTES: usize = 8;
/// Maximum memory of an xz decoder, KiB. Files of `xz -9` need 64 MiB.
const XZ_MEMORY_KIB_MAX: u32 = 256 << 10;
/// Zstandard blocks are decoded until about this many bytes are available.
const ZSTD_CHUNK_BYTES: usize = 256 << 10;

/// Detects the compression of a stream. Returns the compression and a reader of the decompressed
/// content. `buffer_bytes` is the size of the buffer of compressed data.
pub(super) fn decoded(
    mut stream: impl Read + Send + 'static,
    buffer_bytes: usize,
) -> io::Result<(Compression, Box<dyn Read + Send>)> {
    let mut start = vec![0; START_BYTES];
    let got = read_whole(&mut stream, &mut start)?;
    start.truncate(got);
    let compression = Compression::of(&start);
    let input = Cursor::new(start).chain(BufReader::with_capacity(buffer_bytes, stream));
    Ok((compression, compression.decoder(input)))
}

/// Compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    None,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
    /// bzip2.
    Bzip2,
    /// xz.
    Xz,
}

impl Compression {
    /// Returns the compression of a file with these first bytes. Six bytes are sufficient.
    pub(super) fn of(start: &[u8]) -> Compression {
        match start {
            [0x1f, 0x8b, 0x08, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Compression::Bzip2,
            [0xfd, b'7', b'z', b'X', b'Z', 0x00, ..] => Compression::Xz,
            _ => Compression::None,
        }
    }

    /// Returns a reader of the decompressed content.
    fn decoder(self, input: impl BufRead + Send + 'static) -> Box<dyn Read + Send> {
        let decoder: Box<dyn Read + Send> = match self {
            Compression::None => return Box::new(input),
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
            Compression::Zstd => Box::new(Zstd { input, frame: FrameDecoder::new(), within: false }),
            Compression::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(input)),
            Compression::Xz => Box::new(lzma_rust2::XzReader::new_mem_limit(input, true, XZ_MEMORY_KIB_MAX)),
        };
        Box::new(PlainErrors { decoder, compression: self })
    }

    /// Returns the name of the compression in messages.
    fn name(self) -> &'static str {
        match self {
            Compression::None => "uncompressed",
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
            Compression::Bzip2 => "bzip2",
            Compression::Xz => "xz",
        }
    }
}

/// A decoder that replaces the error messages of another decoder by messages for users.
struct PlainErrors {
    decoder: Box<dyn Read + Send>,
    compression: Compression,
}

impl Read for PlainErrors {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.decoder.read(out).map_err(|error| plain(error, self.compression))
    }
}

/// Replaces a decoder's error by an error with a reason for users. Errors of the file itself are
/// returned unchanged.
fn plain(error: io::Error, compression: Compression) -> io::Error {
    if error.raw_os_error().is_some() || error.kind() == io::ErrorKind::Interrupted {
        return error;
    }
    let mut kind = error.kind();
    let mut source = error.get_ref().map(|inner| inner as &(dyn Error + 'static));
    while let Some(inner) = source {
        if let Some(cause) = inner.downcast_ref::<io::Error>() {
            if let Some(code) = cause.raw_os_error() {
                return io::Error::from_raw_os_error(code);
            }
            kind = cause.kind();
        }
        if let Some(FrameDecoderError::WindowSizeTooBig { .. }) = inner.downcast_ref::<FrameDecoderError>() {
            kind = io::ErrorKind::OutOfMemory;
        }
        source = inner.source();
    }
    let what = match kind {
        io::ErrorKind::UnexpectedEof => "is cut off",
        io::ErrorKind::OutOfMemory => "takes too much memory: compress it with a smaller window",
        _ => "is cut off or damaged",
    };
    io::Error::new(kind, format!("the {} data {what}", compression.name()))
}

/// Decoder of consecutive Zstandard frames. The decoder ignores skippable frames.
struct Zstd<R> {
    input: R,
    frame: FrameDecoder,
    within: bool,
}

impl<R: BufRead> Zstd<R> {
    /// Starts the next Zstandard frame. Returns `false` at the end of the file.
    fn begin(&mut self) -> io::Result<bool> {
        loop {
            if self.input.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.frame.reset(&mut self.input) {
                Ok(()) => {
                    self.within = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = io::copy(&mut (&mut self.input).take(u64::from(length)), &mut io::sink())?;
                    if skipped < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(damaged(error)),
            }
        }
    }

    fn end(&mut self) -> io::Result<()> {
        self.within = false;
        match (self.frame.get_checksum_from_data(), self.frame.get_calculated_checksum()) {
            (Some(said), Some(found)) if said != found => Err(damaged("a checksum does not match")),
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.within && !self.begin()? {
                return Ok(0);
            }
            if self.frame.can_collect() == 0 && !self.frame.is_finished() {
                let strategy = BlockDecodingStrategy::UptoBytes(ZSTD_CHUNK_BYTES);
                self.frame.decode_blocks(&mut self.input, strategy).map_err(damaged)?;
            }
            let got = self.frame.read(out)?;
            if got > 0 {
                return Ok(got);
            }
            if self.frame.is_finished() {
                self.end()?;
            }
        }
    }
}

fn damaged(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Returns 300 KB of text that compresses well and has no repetitions.
    fn text() -> Vec<u8> {
        (0..40_000_u32).flat_map(|n| format!("{}\n", n.wrapping_mul(2_654_435_761)).into_bytes()).collect()
    }

    fn compressed(how: Compression, text: &[u8]) -> Vec<u8> {
        match how {
            Compression::None => text.to_vec(),
            Compression::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(text).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Zstd => {
                ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest)
            }
            Compression::Bzip2 => {
                let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
                encoder.write_all(text).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Xz => {
                let options = lzma_rust2::XzOptions::with_preset(1);
                let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
                encoder.write_all(text).unwrap();
                encoder.finish().unwrap()
            }
        }
    }

    fn decoded(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let input = io::Cursor::new(bytes.to_vec());
        Compression::of(bytes).decoder(input).read_to_end(&mut out).map(|_| out)
    }

    const ALL: [Compression; 5] =
        [Compression::None, Compression::Gzip, Compression::Zstd, Compression::Bzip2, Compression::Xz];

    #[test]
    fn each_is_known_and_decoded_also_when_two_files_are_joined() {
        let text = text();
        for how in ALL {
            let bytes = compressed(how, &text);
            assert_eq!(Compression::of(&bytes), how);
            assert!(decoded(&bytes).unwrap() == text, "{how:?}");
            let twice = [&bytes[..], &bytes[..]].concat();
            assert!(decoded(&twice).unwrap() == text.repeat(2), "{how:?} twice");
        }
    }

    #[test]
    fn a_file_that_was_cut_off_or_changed_is_an_error() {
        let text = text();
        for how in ALL.into_iter().skip(1) {
            let bytes = compressed(how, &text);
            let cut = decoded(&bytes[..bytes.len() / 2]).unwrap_err().to_string();
            assert!(cut.starts_with(&format!("the {} data is cut off", how.name())), "{how:?} cut: {cut}");
            let mut changed = bytes.clone();
            changed[bytes.len() / 2] ^= 0x55;
            // This Zstandard encoder also writes a checksum.
            let out = decoded(&changed).unwrap_err().to_string();
            assert!(
                out.starts_with(&format!("the {} data is cut off", how.name())),
                "{how:?} changed: {out}"
            );
        }
    }

    /// A file whose reads fail, as on a defective disk.
    struct Failing;

    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(5))
        }
    }

    #[test]
    fn errors_of_the_file_stay_as_they_are() {
        for how in ALL {
            let bytes = compressed(how, &text());
            let stream = Cursor::new(bytes[..bytes.len() / 2].to_vec()).chain(Failing);
            let (found, mut decoder) = super::decoded(stream, 4096).unwrap();
            let error = decoder.read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!((found, error.raw_os_error()), (how, Some(5)), "{how:?}: {error}");
        }
    }

    #[test]
    fn frames_to_skip_are_skipped() {
        let mut bytes = vec![0x51, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        bytes.extend(compressed(Compression::Zstd, b"text"));
        assert_eq!(decoded(&bytes).unwrap(), b"text");
        assert!(decoded(&bytes[..9]).is_err());
    }
}
