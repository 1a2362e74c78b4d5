//! Tests the lengths of bars, their labels, and the cases in which bars are horizontal.

use super::*;

fn published_and_measured() -> BarChart {
    BarChart::new("t", "speed-up", Unit::Times)
        .series("published")
        .series("measured")
        .group(BarGroup::new("monitor", [Bar::Span(2.0, 4.0), Bar::Value(3.1)]))
        .group(BarGroup::new("proxy", [Bar::Value(2.0), Bar::Missing]))
        .group(BarGroup::new("calibration", [Bar::Value(-0.5), Bar::Value(1.0)]))
}

/// Returns the position and size of every bar, without background and legend.
fn rects(svg: &str, legend: usize) -> Vec<[f64; 4]> {
    let part = |tag: &str, name: &str| -> f64 {
        tag.split(&format!("{name}=\"")).nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
    };
    let tags = svg.split("<rect ").skip(2 + legend);
    tags.map(|tag| ["x", "y", "width", "height"].map(|name| part(tag, name))).collect()
}

#[test]
fn lengths_are_in_the_ratio_of_the_values() {
    let svg = bars(&published_and_measured());
    let [span, measured, proxy, minus, one] = rects(&svg, 2)[..] else { panic!("five bars") };
    let unit = one[2];
    let base = one[0];
    for (bar, from, to) in [(span, 2.0, 4.0), (measured, 0.0, 3.1), (proxy, 0.0, 2.0), (minus, -0.5, 0.0)] {
        assert!((bar[0] - (base + from * unit)).abs() < 0.5, "{bar:?}");
        assert!((bar[2] - (to - from) * unit).abs() < 0.5, "{bar:?}");
    }
    for text in ["2–4 ×", "3.1 ×", "−0.5 ×", "–", "published", "monitor"] {
        assert!(svg.contains(&format!("\n{text}\n")), "{text}");
    }
}

#[test]
fn upright_bars_stand_on_zero() {
    let svg = bars(&published_and_measured().upright());
    let [span, measured, _, minus, one] = rects(&svg, 2)[..] else { panic!("five bars") };
    let foot = |bar: [f64; 4]| bar[1] + bar[3];
    assert!((foot(measured) - foot(one)).abs() < 0.2 && (minus[1] - foot(one)).abs() < 0.2);
    assert!((measured[3] - 3.1 * one[3]).abs() < 0.5 && (span[3] - 2.0 * one[3]).abs() < 0.5);
}

#[test]
fn bars_without_room_lie_down() {
    let wide = |chart: &BarChart| Upright::fitting(chart).is_some();
    let chart = published_and_measured().upright();
    assert!(wide(&chart));
    assert!(!wide(&chart.clone().group(BarGroup::new("a very long name ".repeat(9), [Bar::Missing]))));
    let many =
        (0..40).fold(chart, |chart, i| chart.group(BarGroup::new(i.to_string(), [Bar::Value(1234.0)])));
    assert!(!wide(&many));
    let svg = bars(&many);
    let height: f64 = svg.split("height=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
    assert!(rects(&svg, 2).iter().all(|bar| bar[1] + bar[3] < height - 70.0));
}

#[test]
fn the_accessible_text_has_every_value() {
    let svg = bars(&published_and_measured());
    assert!(svg.contains("monitor: published 2–4 ×, measured 3.1 ×. proxy: published 2 ×, measured –."));
}
