//! Renders reports as one self-contained HTML page without scripts, fonts and network access.
//!
//! A page is built from plain values and rendered once. The page works on a phone, in light and
//! dark mode, on paper, and with a keyboard or a screen reader. Scrolling elements can be focused,
//! and colour never carries information that the text does not have.
//!
//! All text is untrusted (users choose names of traces and disks) and is escaped. A caller cannot
//! insert HTML. The only exception is pictures, which must come from [`crate::picture`]. As a
//! second defence, the page's content security policy forbids scripts and external resources.
//!
//! ```
//! use hob_lab::page::{Card, Cell, Check, Page, Section, Table};
//! let table = Table::new(["policy", "hit ratio", "check"])
//!     .row([Cell::text("lru"), Cell::number("78.1 %"), Cell::check(Check::Holds)]);
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

/// A report page.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    lead: Vec<String>,
    cards: Vec<Card>,
    sections: Vec<Section>,
    made_by: String,
}

/// A key figure of a report: label, value and note.
#[derive(Clone, Debug)]
pub struct Card {
    label: String,
    value: String,
    note: String,
    check: Option<Check>,
}

impl Card {
    /// Creates a card with a label and a value, for example "cache size" and "3.2 GiB".
    pub fn new(label: impl Into<String>, value: impl Into<String>) -> Card {
        Card { label: label.into(), value: value.into(), note: String::new(), check: None }
    }

    /// Returns the card with a smaller line of text below the value.
    pub fn note(self, note: impl Into<String>) -> Card {
        Card { note: note.into(), ..self }
    }

    /// Returns the card with a verdict.
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
    /// Creates an empty page.
    pub fn new(title: impl Into<String>) -> Page {
        Page { title: title.into(), lead: vec![], cards: vec![], sections: vec![], made_by: String::new() }
    }

    /// Returns the page with one more paragraph below the title. These paragraphs give the most
    /// important results, before the details in the sections.
    pub fn lead(mut self, text: impl Into<String>) -> Page {
        self.lead.push(text.into());
        self
    }

    /// Returns the page with one more key figure.
    pub fn card(mut self, card: Card) -> Page {
        self.cards.push(card);
        self
    }

    /// Returns the page with one more section. The index lists the section.
    pub fn section(mut self, section: Section) -> Page {
        self.sections.push(section);
        self
    }

    /// Returns the page with a footer that tells how the page was made: command, version and date.
    pub fn made_by(self, text: impl Into<String>) -> Page {
        Page { made_by: text.into(), ..self }
    }

    /// Returns the page as HTML.
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

    /// Writes links to the sections, unless there is only one section.
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
