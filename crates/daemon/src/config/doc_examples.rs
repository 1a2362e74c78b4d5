//! Tests that the daemon accepts each hob.toml on the pages of docs/.

use std::fs;
use std::path::Path;

use super::Config;

/// Least number of examples, so that the test cannot pass because it finds none.
const EXAMPLES_MIN: usize = 12;

/// Returns the TOML blocks of a page, with the numbers of their first lines.
fn blocks(page: &str) -> Vec<(usize, String)> {
    let mut blocks = Vec::new();
    let mut block: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(page.lines().map(str::trim)) {
        match &mut block {
            None if line == "```toml" => block = Some((number + 1, String::new())),
            Some(_) if line == "```" => blocks.extend(block.take()),
            Some((_, text)) => {
                text.push_str(line);
                text.push('\n');
            }
            None => {}
        }
    }
    blocks
}

#[test]
fn the_daemon_accepts_each_hob_toml_of_the_pages() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut refused = Vec::new();
    let mut count = 0;
    for page in fs::read_dir(docs).expect("docs/").map(|entry| entry.expect("an entry").path()) {
        if page.extension().is_none_or(|end| end != "md") {
            continue;
        }
        let blocks = blocks(&fs::read_to_string(&page).expect("a page"));
        for (index, (line, block)) in blocks.iter().enumerate() {
            count += 1;
            // This host may not have the group.
            let checked = |text: &str| Config::parse(&text.replace("\"kvm\"", "\"root\"")).map(|_| ());
            // Some blocks extend an earlier one of the page.
            let earlier = blocks[..index].iter().map(|(_, earlier)| format!("{earlier}{block}"));
            if let Err(error) = checked(block)
                && !earlier.into_iter().any(|text| checked(&text).is_ok())
            {
                refused.push(format!("{}:{line}: {error}", page.display()));
            }
        }
    }
    assert!(refused.is_empty(), "the daemon refuses examples of the pages:\n{}", refused.join("\n"));
    assert!(count >= EXAMPLES_MIN, "the pages have only {count} examples");
}

#[test]
fn blocks_of_a_page_are_found() {
    let page = "a\n```toml\nshards = 1\n```\n```console\nb\n```\n  ```toml\n  [limits]\n  ```\n";
    assert_eq!(blocks(page), [(3, "shards = 1\n".to_owned()), (9, "[limits]\n".to_owned())]);
}
