//! A disk that an earlier version wrote, kept permanently. Each line of the image is a name, a
//! length, and bytes in hexadecimal; zeroes at the end are left out.

use super::super::format::{Generation, Manifest, PAGE_ENTRIES, encode_page};
use super::*;

const IMAGE: &str = include_str!("../../../../tests/golden/objects-v1.txt");

/// Returns two objects, and a third of 512 bytes. A page names the first, and the manifest names
/// the last, which takes precedence over the page.
fn objects() -> Vec<(Name, Vec<u8>)> {
    let shape = shape(2 * OBJECT + 512);
    let [first, old, page, last] =
        [(1, 1), (1, 2), (1, 3), (2, 1)].map(|(epoch, count)| Generation::new(epoch, count));
    let mut entries = [Generation::ABSENT; PAGE_ENTRIES];
    (entries[0], entries[2]) = (first, old);
    let manifest = Manifest {
        shape,
        sequence: 9,
        epoch: 2,
        content: 5,
        closed: true,
        leftovers: false,
        stays: false,
        owner: Owner::test("golden", 0x1234),
        pages: vec![page],
        changes: vec![(2, last)],
    };
    let mut data = vec![0; OBJECT as usize];
    data[..6].copy_from_slice(b"golden");
    vec![
        (Name::Manifest(9), manifest.encode()),
        (Name::Page(0, page), encode_page(&shape, 0, page, &entries)),
        (Name::Data(0, first), data),
        (Name::Data(2, last), pattern(512, 1)),
    ]
}

fn lines() -> String {
    let mut text =
        "# A disk of objects of format version 1; see src/backing/objects/tests/golden.rs.\n".to_owned();
    for (name, bytes) in objects() {
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let hex: String = bytes[..used].iter().map(|byte| format!("{byte:02x}")).collect();
        text.push_str(&format!("{name} {} {hex}\n", bytes.len()));
    }
    text
}

#[test]
fn version_1_opens_and_is_still_written() {
    let shop = Shop::default();
    for line in IMAGE.lines().filter(|line| !line.starts_with('#')) {
        let mut fields = line.split(' ');
        let (name, len, hex) =
            (fields.next().unwrap(), fields.next().unwrap(), fields.next().unwrap_or_default());
        let digits = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
        let mut bytes: Vec<u8> = hex.as_bytes().chunks(2).map(digits).collect();
        bytes.resize(len.parse().unwrap(), 0);
        shop.insert(Name::parse(name).unwrap(), bytes);
    }
    block_on(async {
        let found = content(&shop).await;
        assert_eq!(found.len() as u64, 2 * OBJECT + 512);
        assert_eq!(&found[..8], b"golden\0\0");
        assert!(found[8..2 * OBJECT as usize].iter().all(|byte| *byte == 0));
        assert_eq!(found[2 * OBJECT as usize..], pattern(512, 1));
        let disk = open(shop.client(), &me()).await.unwrap();
        assert_eq!((disk.epoch, disk.mark()), (3, Some(5)));
    });
    assert_eq!(lines(), IMAGE, "the same disk is written in the same bytes");
}

/// Writes the image into the source tree: once for each version.
#[test]
#[ignore = "it makes the image that the test above keeps"]
fn keep() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/objects-v1.txt");
    std::fs::write(path, lines()).unwrap();
}
