//! Splits text into sentences.

/// Minimum number of ordinary words in a sentence.
const WORDS_MIN: usize = 4;

/// Words whose period does not end a sentence.
const ABBREVIATIONS: [&str; 7] = ["e.g.", "i.e.", "etc.", "vs.", "cf.", "al.", "no."];

/// Splits a paragraph into sentences, each with its byte offset.
pub(super) fn split(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let (mut start, mut quoted) = (0, false);
    for (at, c) in text.char_indices() {
        quoted ^= c == '`';
        if quoted || !matches!(c, '.' | '!' | '?') {
            continue;
        }
        let after = &text[at + 1..];
        let rest = after.trim_start_matches([')', '"', '”', '*', '\'']);
        let next = rest.trim_start();
        let begins = next.chars().next().is_some_and(|c| !c.is_lowercase());
        let word = text[..=at].rsplit([' ', '(']).next().unwrap_or_default();
        let is_initial = word.len() == 2 && word.starts_with(char::is_uppercase);
        if rest.len() > next.len() && begins && !is_initial && !ABBREVIATIONS.contains(&word) {
            let end = text.len() - rest.len();
            found.push((start, &text[start..end]));
            start = text.len() - next.len();
        }
    }
    found.push((start, &text[start..]));
    found.retain(|(_, sentence)| !sentence.trim().is_empty());
    found
}

/// Returns true if the text has enough words outside code that a reader can explain it.
pub(super) fn is_one(text: &str) -> bool {
    // Every second part is between backquotes.
    let prose: String = text.split('`').step_by(2).collect::<Vec<_>>().join(" ");
    let is_word = |word: &&str| {
        let word = word.trim_matches(|c: char| c.is_ascii_punctuation() && c != '{' && c != '}');
        !word.is_empty() && word.chars().all(|c| c.is_alphabetic() || c == '-' || c == '\'')
    };
    let letters = prose.chars().any(char::is_lowercase);
    letters && prose.split_whitespace().filter(is_word).count() >= WORDS_MIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_cut_at_ends_of_sentences() {
        let text = "One is 1.5 (e.g. here). `Two. It` is so! See no. 3 for three";
        let found: Vec<&str> = split(text).into_iter().map(|(_, sentence)| sentence).collect();
        assert_eq!(found, ["One is 1.5 (e.g. here).", "`Two. It` is so!", "See no. 3 for three"]);
        assert_eq!(split("Ab. Cd.")[1], (4, "Cd."));
        assert_eq!(split("After J. Nagle.").len(), 1);
    }

    #[test]
    fn code_and_labels_are_no_sentences() {
        for text in ["The disk waits for flash.", "disk {name}: the pool is full"] {
            assert!(is_one(text), "{text}");
        }
        for text in ["The disk", "{a}: {b} {c} {d}", "`a b c d e` f", "SELECT A FROM B", "1 2 3 4"] {
            assert!(!is_one(text), "{text}");
        }
    }
}
