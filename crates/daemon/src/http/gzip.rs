//! Compression of long answers with gzip, for clients that accept it, such as Prometheus.

use std::io::Write as _;

use axum::http::HeaderMap;
use axum::http::header::ACCEPT_ENCODING;
use flate2::Compression;
use flate2::write::GzEncoder;

/// Length from which an answer is compressed: more than one packet of a network, bytes.
pub(super) const COMPRESSED_MIN: usize = 1400;

/// Returns true if the client accepts gzip.
pub(super) fn is_accepted(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(names_gzip)
}

/// Returns true for `gzip`, unless its weight is 0 (`gzip;q=0`), which refuses it.
fn names_gzip(coding: &str) -> bool {
    let mut words = coding.split(';').map(str::trim);
    let is_gzip = words.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
    let weight = words.find_map(|word| word.strip_prefix("q=")).map_or(Ok(1.0), str::parse::<f64>);
    is_gzip && weight.is_ok_and(|weight| weight > 0.0)
}

/// Compresses a text. A megabyte of metrics takes about ten milliseconds, so call this function on
/// a thread that may block.
pub(super) fn compress(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let written = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    written.expect("a vector accepts all bytes")
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use axum::http::HeaderValue;
    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn clients_choose_gzip() {
        for (value, expected) in [
            ("", false),
            ("gzip", true),
            ("deflate, GZIP;q=0.5", true),
            ("gzip; q=1.0, identity", true),
            ("gzip;q=0", false),
            ("gzip;q=0.000", false),
            ("gzip;q=x", false),
            ("br, x-gzip2, identity", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(value));
            assert_eq!(is_accepted(&headers), expected, "{value}");
        }
        assert!(!is_accepted(&HeaderMap::new()));
    }

    #[test]
    fn metrics_become_much_shorter() {
        let line = |number: u32| format!("hob_disk_reads_total{{disk=\"vm{number}\"}} {}\n", number * 7);
        let text: String = (0..1000).map(line).collect();
        let compressed = compress(&text);
        assert!(compressed.len() * 4 < text.len(), "{} of {}", compressed.len(), text.len());
        let mut back = String::new();
        GzDecoder::new(compressed.as_slice()).read_to_string(&mut back).unwrap();
        assert_eq!(back, text);
    }
}
