//! Tests the positions of points, names and markers in line charts.

use super::*;
use crate::picture::Unit;

fn axis() -> Axis {
    Axis::new("", Unit::Count)
}

/// Returns the numbers of the n-th element with this attribute.
fn numbers(svg: &str, element: &str, attribute: &str, n: usize) -> Vec<f64> {
    let tag = svg.split(&format!("<{element} ")).nth(n + 1).unwrap();
    let value = tag.split(&format!("{attribute}=\"")).nth(1).unwrap().split('"').next().unwrap();
    value.split([' ', ',']).filter(|text| !text.is_empty()).map(|text| text.parse().unwrap()).collect()
}

/// Returns the words of the picture with their positions.
fn words_of(svg: &str) -> Vec<(String, f64, f64)> {
    let texts = svg.split("<text ").skip(1);
    texts
        .map(|text| {
            let part =
                |name: &str| text.split(&format!("{name}=\"")).nth(1).unwrap().split('"').next().unwrap();
            let word = text.split(">\n").nth(1).unwrap().split("\n<").next().unwrap();
            (word.to_owned(), part("x").parse().unwrap(), part("y").parse().unwrap())
        })
        .collect()
}

fn place(svg: &str, word: &str) -> Option<(f64, f64)> {
    words_of(svg).into_iter().find(|(text, ..)| text == word).map(|(_, x, y)| (x, y))
}

#[test]
fn points_lie_where_the_labels_say() {
    let points = vec![(100.0, 50.0), (0.0, 100.0), (50.0, 25.0)];
    let svg = curves(&CurveChart::new("t", axis(), axis()).curve(Curve::new("", points).dots()));
    let dot = |i: usize| (numbers(&svg, "circle", "cx", 2 * i)[0], numbers(&svg, "circle", "cy", 2 * i)[0]);
    let labels = words_of(&svg);
    let below = |label: &str| labels.iter().find(|(text, _, y)| text == label && *y > 460.0).unwrap().1;
    let beside = |label: &str| labels.iter().find(|(text, _, y)| text == label && *y < 460.0).unwrap().2;
    assert_eq!(dot(0), (below("0"), beside("100")));
    assert_eq!(dot(2), (below("100"), (beside("40") + beside("60")) / 2.0));
    assert_eq!(dot(1).0, (below("40") + below("60")) / 2.0);
}

#[test]
fn steps_hold_their_value_until_the_next() {
    assert_eq!(
        traced(&[(0.0, 5.0), (10.0, 7.0), (20.0, 6.0)], true),
        [(0.0, 5.0), (10.0, 5.0), (10.0, 7.0), (20.0, 7.0), (20.0, 6.0)]
    );
    assert_eq!(traced(&[(0.0, 5.0), (10.0, 7.0)], false).len(), 2);
}

#[test]
fn a_missing_number_interrupts_the_line() {
    let points = vec![(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 2.0), (4.0, 1.0)];
    let chart = CurveChart::new("t", axis(), axis()).curve(Curve::new("", points));
    let drawing = Drawing::new(&chart);
    assert_eq!(drawing.runs[0].iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn fourteen_names_stand_apart_at_the_ends_of_their_lines() {
    let level = |i: u32| f64::from(i / 5) * 3.0 + 0.1 * f64::from(i % 5);
    let empty = CurveChart::new("t", axis(), axis());
    let chart = (0..14).fold(empty, |chart, i| {
        chart.curve(Curve::new(format!("policy {i}"), vec![(0.0, 1.0), (9.0, level(i))]))
    });
    let svg = curves(&chart);
    let mut heights: Vec<(f64, u32)> =
        (0..14).map(|i| (place(&svg, &format!("policy {i}")).unwrap().1, i)).collect();
    heights.sort_by(|a, b| b.0.total_cmp(&a.0));
    assert_eq!(
        heights.iter().map(|h| h.1).collect::<Vec<_>>(),
        (0..14).collect::<Vec<_>>(),
        "in the order of the ends"
    );
    assert!(heights.windows(2).all(|pair| pair[0].0 - pair[1].0 >= f64::from(ROW) - 1.0), "{heights:?}");
}

#[test]
fn more_names_than_fit_stand_below() {
    let empty = CurveChart::new("t", axis(), axis());
    let chart = (0..30)
        .fold(empty, |chart, i| chart.curve(Curve::new(format!("s{i}"), vec![(0.0, 1.0), (9.0, 2.0)])));
    let svg = curves(&chart);
    let places: Vec<(f64, f64)> = (0..30).map(|i| place(&svg, &format!("s{i}")).unwrap()).collect();
    assert!(places.iter().all(|place| place.1 >= f64::from(HEIGHT)));
    let bottom = numbers(&svg, "rect", "height", 0)[0];
    assert!(places.iter().all(|place| place.1 < bottom - 8.0));
}

#[test]
fn series_differ_in_colour_or_dashes() {
    let marks: Vec<_> = (0..28).map(series).collect();
    for (index, mark) in marks.iter().enumerate() {
        assert!(!marks[..index].contains(mark), "{index}");
    }
}

#[test]
fn markers_beyond_the_axis_point_to_where_they_would_be() {
    let points = vec![(1.0, 1.0), (100.0, 2.0)];
    let chart = CurveChart::new("t", axis().log(), axis()).curve(Curve::new("", points));
    let x = |value, label: &str| Marker::X(value, label.to_owned());
    let chart = chart.marker(x(10.0, "knee")).marker(x(1e6, "your cache")).marker(x(0.01, "tiny"));
    let svg = curves(&chart.marker(Marker::Y(9.0, "goal".to_owned())));
    for word in ["knee", "your cache →", "← tiny", "goal ↑"] {
        assert!(place(&svg, word).is_some(), "{word}");
    }
    let below = |label: &str| words_of(&svg).into_iter().find(|w| w.0 == label && w.2 > 460.0).unwrap().1;
    let middle = (below("1") + below("100")) / 2.0;
    assert!((place(&svg, "knee").unwrap().0 - middle).abs() < 1.0);
}

#[test]
fn the_accessible_text_has_the_end_values() {
    let points = vec![(4096.0, 0.9), (8192.0, 0.25)];
    let chart =
        CurveChart::new("Misses", Axis::new("size", Unit::Bytes).log(), Axis::new("misses", Unit::Percent));
    let svg = curves(&chart.subtitle("a disk").curve(Curve::new("lru", points)));
    assert!(svg.contains("role=\"img\" aria-label=\"Misses. a disk\""));
    assert!(svg.contains("<desc>lru: 90 % at 4 KiB, 25 % at 8 KiB.</desc>"));
}
