//! Tests that every picture is well-formed and small for all data, and escapes text.

use super::*;
use crate::markup::judge::flaw;

const HOSTILE: &str = "<script>&\"'\u{0}\u{202e}]]>";
const ODD: [f64; 14] = [
    0.0,
    -0.0,
    1.0,
    -7.5,
    0.3,
    1e-30,
    1e24,
    -1e24,
    1e300,
    -1e300,
    f64::MIN_POSITIVE,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

/// Checks that every number in position attributes, and the document's own attributes, are valid.
fn sound(svg: &str) {
    assert_eq!(flaw(svg), None);
    assert!(!svg.contains("NaN") && !svg.contains("inf\""), "{svg}");
    for attribute in [" x=\"", " y=\"", " width=\"", " height=\"", " points=\"", " cx=\"", " cy=\""] {
        for part in svg.split(attribute).skip(1) {
            let value = part.split('"').next().unwrap();
            for number in value.split([' ', ',']).filter(|number| !number.is_empty()) {
                let number: f64 = number.parse().unwrap_or_else(|_| panic!("{attribute}{value}"));
                assert!((-60.0..=9_000.0).contains(&number), "{attribute}{value}");
            }
        }
    }
    assert!(!svg.contains("width=\"-") && !svg.contains("height=\"-"), "{svg}");
}

fn axes() -> Vec<Axis> {
    let units = [Unit::Count, Unit::Percent, Unit::Bytes, Unit::Seconds];
    let kinds = |unit| [Axis::new("a", unit), Axis::new("a", unit).log(), Axis::new("a", unit).fitted()];
    units.into_iter().flat_map(kinds).collect()
}

#[test]
fn curves_are_sound_whatever_the_points() {
    let pairs = ODD.iter().flat_map(|&x| ODD.iter().map(move |&y| (x, y)));
    let mut inputs: Vec<Vec<(f64, f64)>> = pairs.map(|pair| vec![pair]).collect();
    inputs.push(vec![]);
    inputs.push(ODD.iter().flat_map(|&x| ODD.iter().map(move |&y| (x, y))).collect());
    inputs.push(vec![(1.0, 5.0), (1.0, 5.0), (1.0, 5.0)]);
    for (i, x) in axes().into_iter().enumerate() {
        for (j, y) in axes().into_iter().enumerate() {
            // Every axis is combined with every input, but not with every other axis.
            for points in inputs.iter().skip((i + j) % 12).step_by(12) {
                let curve = Curve::new("one", points.clone()).steps().area().dots();
                let chart = CurveChart::new("t", x.clone(), y.clone()).curve(curve);
                let marked = ODD.into_iter().fold(chart, |chart, value| {
                    let both = [Marker::X(value, "here".to_owned()), Marker::Y(value, "there".to_owned())];
                    both.into_iter().fold(chart, CurveChart::marker)
                });
                sound(&curves(&marked));
            }
        }
    }
}

#[test]
fn bars_are_sound_whatever_the_values() {
    for upright in [false, true] {
        for unit in [Unit::Count, Unit::Percent, Unit::Times, Unit::Bytes, Unit::Seconds] {
            for &low in &ODD {
                let spans = ODD.map(|high| BarGroup::new("g", [Bar::Value(low), Bar::Span(low, high)]));
                for groups in [vec![spans[0].clone()], spans.to_vec()] {
                    let empty = BarChart::new("t", "v", unit).series("a").series("b");
                    let chart = groups.into_iter().fold(empty, BarChart::group);
                    sound(&bars(&if upright { chart.upright() } else { chart }));
                }
            }
        }
    }
}

#[test]
fn an_empty_picture_has_a_note() {
    let axis = || Axis::new("a", Unit::Count);
    let none = CurveChart::new("t", axis(), axis());
    let gaps = none.clone().curve(Curve::new("c", vec![(f64::NAN, 1.0), (1.0, f64::INFINITY)]));
    let below =
        CurveChart::new("t", axis().log(), axis()).curve(Curve::new("c", vec![(0.0, 1.0), (-2.0, 1.0)]));
    for chart in [none, gaps, below] {
        let svg = curves(&chart);
        sound(&svg);
        assert!(svg.contains("no data"));
    }
    let none = BarChart::new("t", "v", Unit::Count);
    let missing = none.clone().series("a").group(BarGroup::new("g", [Bar::Missing, Bar::Value(f64::NAN)]));
    for chart in [none, missing] {
        for chart in [chart.clone(), chart.upright()] {
            let svg = bars(&chart);
            sound(&svg);
            assert!(svg.contains("no data"));
        }
    }
    let some = CurveChart::new("t", axis(), axis()).curve(Curve::new("c", vec![(1.0, 1.0)]));
    assert!(!curves(&some).contains("no data") && curves(&some).contains("<circle"));
}

#[test]
fn foreign_words_stay_words_and_keep_to_their_room() {
    let long = HOSTILE.repeat(3000);
    for word in [HOSTILE, &long, "", "\n\n", "漢字の名前".repeat(90).as_str()] {
        let axis = || Axis::new(word, Unit::Count);
        let chart = CurveChart::new(word, axis(), axis()).subtitle(word);
        let chart = chart.marker(Marker::X(1.0, word.to_owned())).marker(Marker::Y(1.5, word.to_owned()));
        let chart =
            (0..40).fold(chart, |chart, _| chart.curve(Curve::new(word, vec![(1.0, 1.0), (2.0, 2.0)])));
        sound(&curves(&chart));
        let chart = BarChart::new(word, word, Unit::Count).subtitle(word).series(word).series(word);
        let chart = chart.group(BarGroup::new(word, [Bar::Value(3.0), Bar::Missing]));
        sound(&bars(&chart));
        sound(&bars(&chart.upright()));
    }
}

#[test]
fn a_picture_does_not_grow_with_its_points() {
    let points =
        |n: u32| (0..n).map(|i| (f64::from(i), f64::from(i.wrapping_mul(2_654_435_761) >> 8))).collect();
    let axis = || Axis::new("", Unit::Count);
    let drawn =
        |n| curves(&CurveChart::new("t", axis(), axis()).curve(Curve::new("c", points(n)).steps().area()));
    let (some, many) = (drawn(10_000), drawn(300_000));
    sound(&many);
    assert!(many.len() < 200_000 && many.len() < some.len() * 11 / 10, "{} {}", some.len(), many.len());
}
