//! Colours and dash patterns of the pictures.
//!
//! Series take the colours of Okabe and Ito ("Color universal design", 2008), which people with any kind of colour
//! vision can tell apart. Their yellow is left out: on white paper it cannot be seen. When the seven are used up they
//! return dashed, then dotted, so fourteen series need two patterns.

/// A colour, eight bits each of red, green and blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Colour(pub(super) u8, pub(super) u8, pub(super) u8);

/// Text and whatever matters most.
pub(super) const INK: Colour = Colour(0x1f, 0x23, 0x28);
/// Text and lines that stand back.
pub(super) const FAINT: Colour = Colour(0x5f, 0x67, 0x70);
/// Lines of the grid.
pub(super) const GRID: Colour = Colour(0xd8, 0xdc, 0xe0);
/// What everything is drawn on.
pub(super) const PAPER: Colour = Colour(0xff, 0xff, 0xff);
/// Two shades of paper, for neighbouring phases.
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

/// Colour and dash pattern of the series with this number; after 28 they repeat.
pub(super) fn series(index: usize) -> (Colour, Option<&'static str>) {
    (SERIES[index % SERIES.len()], DASHES[index / SERIES.len() % DASHES.len()])
}
