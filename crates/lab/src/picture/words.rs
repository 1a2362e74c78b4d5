//! Room for words: how wide a text is, how it is cut, how labels make way for each other.
//!
//! No font is measured, since the viewer chooses it. Widths are those of DejaVu Sans, the widest of the fonts asked
//! for, by kinds of characters; so they are rarely too small.

/// About the width of the text in pixels, at this height of font.
pub(super) fn width(text: &str, size: f64) -> f64 {
    text.chars().map(share).sum::<f64>() * size
}

/// About the width of the text in bold.
pub(super) fn bold_width(text: &str, size: f64) -> f64 {
    width(text, size) * 1.1
}

/// A character's width as a share of the font's height.
fn share(char: char) -> f64 {
    match char {
        'i' | 'j' | 'l' | 'I' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | ' ' | '\u{2009}' => 0.34,
        'f' | 't' | 'r' | '(' | ')' | '[' | ']' | '/' | '-' => 0.42,
        'm' | 'w' | 'M' | 'W' | '%' | '…' => 0.98,
        'A'..='Z' => 0.71,
        '\u{1100}'.. if !('\u{2000}'..='\u{2bff}').contains(&char) => 1.05,
        '→' | '←' | '×' => 0.84,
        _ => 0.63,
    }
}

/// The text, or as much of its beginning as fits with an ellipsis.
pub(super) fn cut(text: &str, size: f64, room: f64) -> String {
    if text.len() < 4096 && width(text, size) <= room {
        return text.to_owned();
    }
    let mut left = room / size - share('…');
    let fits = |char: &char| {
        left -= share(*char);
        left >= 0.0
    };
    let mut kept: String = text.chars().take_while(fits).collect();
    kept.truncate(kept.trim_end().len());
    kept + "…"
}

/// Moves labels of these widths, in order of their middles, as little as possible (by the sum of squares) so that none
/// overlap and, where they have room, all lie between the borders.
///
/// With the widths before it taken off, each label wants a place no left of its predecessor's: labels that collide pool
/// to their mean, which is the pool-adjacent-violators algorithm of isotonic regression.
pub(super) fn spread(middles: &[i32], widths: &[i32], left: i32, right: i32) -> Vec<i32> {
    let mut before = 0;
    let offsets: Vec<i32> = widths.iter().map(|width| (before + width / 2, before += width).0).collect();
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for (middle, offset) in middles.iter().zip(&offsets) {
        let mut pool = (f64::from(middle - offset), 1);
        while let Some(&(mean, count)) = pools.last().filter(|last| last.0 > pool.0) {
            let both = count + pool.1;
            pool = ((mean * count as f64 + pool.0 * pool.1 as f64) / both as f64, both);
            pools.pop();
        }
        pools.push(pool);
    }
    let last = f64::from(right - before).max(f64::from(left));
    let starts = pools.into_iter().flat_map(|(mean, count)| std::iter::repeat_n(mean, count));
    let placed =
        starts.zip(offsets).map(|(start, offset)| start.clamp(f64::from(left), last).round() as i32 + offset);
    placed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_make_room_for_each_other() {
        assert_eq!(spread(&[100, 500, 900], &[80, 80, 80], 0, 1000), [100, 500, 900]);
        assert_eq!(spread(&[400, 980, 990], &[80, 80, 80], 0, 1000), [400, 880, 960]);
        assert_eq!(spread(&[5, 10, 500], &[80, 80, 80], 0, 1000), [40, 120, 500]);
        assert_eq!(spread(&[500, 500, 500], &[80, 100, 80], 0, 1000), [410, 500, 590]);
        assert_eq!(spread(&[50, 60], &[80, 80], 0, 100), [40, 120], "no room: apart, and beyond the border");
        assert_eq!(spread(&[], &[], 0, 100), [0; 0]);
    }

    #[test]
    fn what_does_not_fit_is_cut_where_it_ends() {
        assert_eq!(cut("short", 16.0, 100.0), "short");
        let long = "a name that somebody made very, very long ".repeat(5000);
        let kept = cut(&long, 16.0, 200.0);
        assert!(
            kept.ends_with('…') && kept.starts_with("a name that") && width(&kept, 16.0) <= 200.0,
            "{kept}"
        );
        assert_eq!(cut("abc", 16.0, 0.0), "…");
    }
}
