//! Colours and dash patterns of charts.
//!
//! Series have the colours of Okabe and Ito ("Color universal design", 2008), which people with any
//! kind of colour vision can distinguish. The yellow of this palette is left out, because yellow is
//! invisible on white. After seven series, the colours repeat with dashed lines, and then with
//! dotted lines.

/// A colour with eight bits each for red, green and blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Colour(pub(super) u8, pub(super) u8, pub(super) u8);

/// Colour of text and of important elements.
pub(super) const INK: Colour = Colour(0x1f, 0x23, 0x28);
/// Colour of less important text and lines.
pub(super) const FAINT: Colour = Colour(0x5f, 0x67, 0x70);
/// Colour of grid lines.
pub(super) const GRID: Colour = Colour(0xd8, 0xdc, 0xe0);
/// Background colour of charts.
pub(super) const PAPER: Colour = Colour(0xff, 0xff, 0xff);
/// Background colours of adjacent phases, in alternation.
pub(super) const BANDS: [Colour; 2] = [Colour(0xf4, 0xf6, 0xf8), Colour(0xfb, 0xfb, 0xfc)];

pub(super) const GREY: Colour = Colour(0x6e, 0x6e, 0x6e);
pub(super) const VERMILION: Colour = Colour(0xd5, 0x5e, 0x00);
pub(super) const BLUE: Colour = Colour(0x00, 0x72, 0xb2);
pub(super) const GREEN: Colour = Colour(0x00, 0x9e, 0x73);
pub(super) const PURPLE: Colour = Colour(0xcc, 0x79, 0xa7);
const ORANGE: Colour = Colour(0xe6, 0x9f, 0x00);
const SKY: Colour = Colour(0x56, 0xb4, 0xe9);

const SERIES: [Colour; 7] = [BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK];
const DASHES: [Option<&str>; 4] = [None, Some("9 5"), Some("2 4"), Some("12 4 2 4")];

/// Returns colour and dash pattern of the series with this number. After 28 series, they repeat.
pub(super) fn series(index: usize) -> (Colour, Option<&'static str>) {
    (SERIES[index % SERIES.len()], DASHES[index / SERIES.len() % DASHES.len()])
}
