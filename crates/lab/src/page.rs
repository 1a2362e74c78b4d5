//! Reports as one HTML page that needs nothing else: no script, no font, no network.
//!
//! A page is built from plain values and rendered once. It reads on a phone, in a light and a dark room, on paper, and
//! with a keyboard or a screen reader: what scrolls can be focused, colour never says anything that words do not.
//!
//! Every text is foreign (names of traces and disks are whatever somebody typed) and is escaped; there is no way to
//! hand in HTML. The one exception are pictures, which must come from [`crate::picture`]. Should a mistake slip
//! through all the same, the page's own security policy forbids scripts and everything from elsewhere.
//!
//! ```
//! use hob_lab::page::{Card, Cell, Check, Page, Section, Table};
//! let table = Table::new(["policy", "hit ratio", "check"])
//!     .row([Cell::text("lru"), Cell::number("78.1 %"), Cell::check(Check::Pass)]);
//! let html = Page::new("Advice for web.csv")
//!     .lead("A cache of 3.2 GiB serves 89 % of the reads.")
//!     .card(Card::new("cache size", "3.2 GiB"))
//!     .section(Section::new("Policies").paragraph("All at 3.2 GiB.").table(table))
//!     .made_by("hob lab advise web.csv")
//!     .render();
//! assert!(html.starts_with("<!doctype html>"));
//! ```

mod blocks;

use std::fmt::Write;

pub use blocks::{Cell, Check, Figure, Section, Table};

use crate::markup::escaped;

const STYLE: &str = include_str!("page/style.css");

/// A report.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    lead: Vec<String>,
    cards: Vec<Card>,
    sections: Vec<Section>,
    made_by: String,
}

/// A figure people look for first: what it is, its value, and what to add.
#[derive(Clone, Debug)]
pub struct Card {
    label: String,
    value: String,
    note: String,
    check: Option<Check>,
}

impl Card {
    /// A card such as "cache size", "3.2 GiB".
    pub fn new(label: impl Into<String>, value: impl Into<String>) -> Card {
        Card { label: label.into(), value: value.into(), note: String::new(), check: None }
    }

    /// With a smaller line below the value.
    pub fn note(self, note: impl Into<String>) -> Card {
        Card { note: note.into(), ..self }
    }

    /// With a verdict.
    pub fn check(self, check: Check) -> Card {
        Card { check: Some(check), ..self }
    }

    fn write(&self, out: &mut String) {
        let note = |text: &str| format!("<span class=\"note\">{text}</span>");
        let check = self.check.map(|check| note(&check.html())).unwrap_or_default();
        let words = if self.note.is_empty() { String::new() } else { note(&escaped(&self.note)) };
        let (label, value) = (escaped(&self.label), escaped(&self.value));
        let label = format!("<span class=\"label\">{label}</span>");
        line(out, format_args!("<li>{label} <span class=\"value\">{value}</span> {words}{check}</li>"));
    }
}

impl Page {
    /// An empty page.
    pub fn new(title: impl Into<String>) -> Page {
        Page { title: title.into(), lead: vec![], cards: vec![], sections: vec![], made_by: String::new() }
    }

    /// With one more paragraph below the title: the answer, before how it was found.
    pub fn lead(mut self, text: impl Into<String>) -> Page {
        self.lead.push(text.into());
        self
    }

    /// With one more key figure.
    pub fn card(mut self, card: Card) -> Page {
        self.cards.push(card);
        self
    }

    /// With one more section; the index names it.
    pub fn section(mut self, section: Section) -> Page {
        self.sections.push(section);
        self
    }

    /// What the footer says of how the page was made: command, version, date.
    pub fn made_by(self, text: impl Into<String>) -> Page {
        Page { made_by: text.into(), ..self }
    }

    /// The page as HTML.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let title = escaped(&self.title);
        line(&mut out, format_args!("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">"));
        let policy = "default-src &apos;none&apos;; style-src &apos;unsafe-inline&apos;";
        line(&mut out, format_args!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">"));
        line(
            &mut out,
            format_args!("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"),
        );
        line(&mut out, format_args!("<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>"));
        line(&mut out, format_args!("<header>\n<h1>{title}</h1>"));
        for text in &self.lead {
            line(&mut out, format_args!("<p class=\"lead\">{}</p>", escaped(text)));
        }
        if !self.cards.is_empty() {
            line(&mut out, format_args!("<ul class=\"cards\">"));
            self.cards.iter().for_each(|card| card.write(&mut out));
            line(&mut out, format_args!("</ul>"));
        }
        self.write_index(&mut out);
        line(&mut out, format_args!("</header>\n<main>"));
        for (number, section) in (1..).zip(&self.sections) {
            section.write(&mut out, number);
        }
        line(&mut out, format_args!("</main>"));
        if !self.made_by.is_empty() {
            line(&mut out, format_args!("<footer><p>{}</p></footer>", escaped(&self.made_by)));
        }
        line(&mut out, format_args!("</body>\n</html>"));
        out
    }

    /// Links to the sections; a single one needs no index.
    fn write_index(&self, out: &mut String) {
        if self.sections.len() < 2 {
            return;
        }
        line(out, format_args!("<nav aria-labelledby=\"index\">\n<h2 id=\"index\">On this page</h2>\n<ol>"));
        for (number, section) in (1..).zip(&self.sections) {
            let (title, verdict) = section.heading();
            line(out, format_args!("<li><a href=\"#section-{number}\">{title}</a>{verdict}</li>"));
        }
        line(out, format_args!("</ol>\n</nav>"));
    }
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("a string takes everything");
}

#[cfg(test)]
mod tests;
