//! Tests that every page is well-formed, loads no external files, and escapes text.

use super::*;
use crate::markup::judge::flaw;
use crate::picture::{Axis, Curve, CurveChart, Unit, curves};

fn picture(name: &str) -> String {
    let axis = || Axis::new(name, Unit::Count);
    curves(&CurveChart::new(name, axis(), axis()).curve(Curve::new(name, vec![(1.0, 2.0), (2.0, 1.0)])))
}

/// Returns a page with all elements, whose texts are all `word`.
fn full(word: &str) -> Page {
    let row = || [Cell::text(word), Cell::number(word), Cell::check(Check::Fails), Cell::Missing];
    let table =
        Table::new([word, "number", "check", "missing"]).caption(word).row(row()).row(row()).csv(word);
    let section = |check| {
        Section::new(word)
            .check(check)
            .paragraph(word)
            .note(word)
            .command(word)
            .table(table.clone())
            .figure(Figure::new(picture(word), word).csv(word))
    };
    Page::new(word)
        .lead(word)
        .card(Card::new(word, word).note(word).check(Check::Holds))
        .card(Card::new(word, word))
        .section(section(Check::Holds))
        .section(section(Check::Open))
        .made_by(word)
}

#[test]
fn hostile_words_stay_words() {
    let hostile = "</title></style><script>alert(\"1\")</script><img src=x onerror='alert(1)'>&amp;\u{0}\u{202e}]]>--><!--";
    let html = full(hostile).render();
    assert_eq!(flaw(&html), None);
    let tags: Vec<&str> = html.split('<').skip(1).map(|tag| tag.split([' ', '>']).next().unwrap()).collect();
    assert!(!tags.contains(&"script") && !tags.contains(&"img"));
    assert_eq!(tags.iter().filter(|&&tag| tag == "/style").count(), 1);
    assert!(!html.contains('\u{0}') && !html.contains('\u{202e}'));
}

#[test]
fn pages_of_all_sizes_are_well_formed() {
    let lone = Section::new("one").table(Table::new(["a"])).figure(Figure::new(picture(""), ""));
    for page in
        [Page::new(""), Page::new("t").section(lone), full("plain"), full(""), full(&"long ".repeat(5000))]
    {
        assert_eq!(flaw(&page.render()), None);
    }
}

#[test]
fn nothing_comes_from_elsewhere() {
    let html = full("plain").render();
    let apart = html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for word in ["http:", "https:", "url(", "@import", "src=\"", "<script", " style=\"", "<link"] {
        assert!(!apart.contains(word), "{word}");
    }
    assert!(html.contains("default-src &apos;none&apos;"));
    assert!(html.contains("prefers-color-scheme: dark") && html.contains("width=device-width"));
}

#[test]
fn numbers_are_to_the_right_and_verdicts_in_words() {
    let html = full("plain").render();
    assert!(html.contains("<th scope=\"col\" class=\"number\">number</th><th scope=\"col\">check</th><th scope=\"col\">missing</th>"));
    assert!(html.contains("<th scope=\"row\">plain</th><td class=\"number\">plain</td><td><span class=\"check fails\">✘ fails</span></td><td class=\"number\">–</td>"));
    for verdict in ["✔ holds", "– not yet"] {
        assert!(html.contains(verdict), "{verdict}");
    }
    assert!(html.contains("<a href=\"./plain\">plain (CSV)</a>"));
}

#[test]
fn the_index_leads_to_every_section() {
    let html = full("plain").render();
    for number in [1, 2] {
        assert!(html.contains(&format!("<a href=\"#section-{number}\">plain</a>")));
        assert!(html.contains(&format!("<section id=\"section-{number}\">")));
    }
    assert!(!Page::new("t").section(Section::new("alone")).render().contains("<nav"));
    let ids: Vec<&str> = html.split(" id=\"").skip(1).map(|tail| tail.split('"').next().unwrap()).collect();
    assert!((1..ids.len()).all(|i| !ids[..i].contains(&ids[i])), "{ids:?}");
}

#[test]
fn scrollable_elements_can_be_focused_and_have_a_name() {
    let html = full("plain").render();
    let boxes: Vec<&str> = html.split("<div class=\"scroll\"").skip(1).collect();
    assert_eq!(boxes.len(), 4);
    assert!(boxes.iter().all(|tag| tag.starts_with(" role=\"region\" tabindex=\"0\" aria-label=\"")));
}
