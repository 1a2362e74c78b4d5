//! Texts of system errors for people: without the numbers that Rust adds to them.

use std::borrow::Cow;
use std::io;

/// Beginning of the number in `No such file or directory (os error 2)`.
const BEGIN: &str = " (os error ";

/// Removes the numbers of system errors from a text. The function removes a number only if the
/// system's text for this error precedes it. So a file name that looks like an error number stays.
pub fn without_error_numbers(text: &str) -> Cow<'_, str> {
    if !text.contains(BEGIN) {
        return text.into();
    }
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(BEGIN) {
        let (before, suffix) = rest.split_at(at);
        kept.push_str(before);
        let end = number_end(&kept, suffix);
        // The space is kept before another search, which ends because the text gets shorter.
        let (keep, skip) = end.map_or((1, 1), |end| (0, end));
        kept.push_str(&suffix[..keep]);
        rest = &suffix[skip..];
    }
    kept.push_str(rest);
    kept.into()
}

/// Returns the length of the number at the start of `suffix` if it belongs to the system error at
/// the end of `before`.
fn number_end(before: &str, suffix: &str) -> Option<usize> {
    let digits = suffix.bytes().skip(BEGIN.len()).take_while(u8::is_ascii_digit).count();
    let end = BEGIN.len() + digits;
    let number: i32 = suffix[BEGIN.len()..end].parse().ok()?;
    let whole = io::Error::from_raw_os_error(number).to_string();
    // With the closing parenthesis.
    let words = whole.strip_suffix(suffix.get(..end + 1)?)?;
    before.ends_with(words).then_some(end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_after_the_texts_of_their_errors_are_removed() {
        let error = |number| io::Error::from_raw_os_error(number).to_string();
        let words = |number| error(number).split(BEGIN).next().unwrap().to_owned();
        for (text, kept) in [
            (format!("cannot open a.img: {}", error(2)), format!("cannot open a.img: {}", words(2))),
            (format!("{}: a; {}", error(13), error(5)), format!("{}: a; {}", words(13), words(5))),
            (format!("{{\"reason\":\"{}\"}}\n", error(111)), format!("{{\"reason\":\"{}\"}}\n", words(111))),
        ] {
            assert!(text.contains(BEGIN), "{text}");
            assert_eq!(without_error_numbers(&text), kept);
        }
    }

    #[test]
    fn other_texts_stay() {
        for text in [
            "nothing",
            "",
            "a file (os error x) and (os error 2",
            "a file (os error 2)",
            "the end is é (os error ",
            "(os error 2) (os error 2)",
            "x (os error 99999999999999999999)",
            "x (os error -1) (os error 999999)",
        ] {
            assert_eq!(without_error_numbers(text), text);
        }
    }
}
