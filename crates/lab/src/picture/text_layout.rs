//! Layout of text in charts: the width of a text, cutting a text, and moving labels apart.
//!
//! No font is measured, because the viewer chooses the font. The module assumes the widths of
//! DejaVu Sans, with one width for each kind of character. DejaVu Sans is the widest of the
//! requested fonts, so widths are rarely too small.

/// Returns the approximate width of a text at this font size, pixels.
pub(super) fn width(text: &str, size: f64) -> f64 {
    text.chars().map(share).sum::<f64>() * size
}

/// Returns the approximate width of a bold text, pixels.
pub(super) fn bold_width(text: &str, size: f64) -> f64 {
    width(text, size) * 1.1
}

/// Returns a character's width as a share of the font size.
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

/// Returns the text, cut with an ellipsis if it is wider than `room`.
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

/// Returns positions for labels at which no labels overlap. If there is enough room, the labels are
/// inside the borders. `middles` must be in ascending order. The sum of the squared distances
/// between the given and the returned positions is minimal.
///
/// The function uses the pool-adjacent-violators algorithm of isotonic regression. After
/// subtracting the widths of earlier labels, positions must not decrease. Labels that collide share
/// the mean of their positions.
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
    fn long_text_is_truncated() {
        assert_eq!(cut("short", 16.0, 100.0), "short");
        let long = "a name that users made very, very long ".repeat(5000);
        let kept = cut(&long, 16.0, 200.0);
        assert!(
            kept.ends_with('…') && kept.starts_with("a name that") && width(&kept, 16.0) <= 200.0,
            "{kept}"
        );
        assert_eq!(cut("abc", 16.0, 0.0), "…");
    }
}
