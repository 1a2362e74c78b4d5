//! Renders the advice as plain text.

use super::sentences::{bytes, ms, percent};
use super::{Advice, Trial};

/// Maximum line width of sentences, characters.
const WIDTH: usize = 100;
/// Number of policies shown in addition to the chosen one.
const POLICIES_SHOWN: usize = 4;

/// Returns the advice as plain text: about forty lines of up to 100 characters.
pub fn text(advice: &Advice) -> String {
    let mut out = filled("", &advice.summary);
    if !advice.command.is_empty() {
        out += &format!("\n  {}\n", advice.command);
    }
    section(&mut out, "Why", &advice.why);
    if let Some(advised) = &advice.recommendation {
        let chosen = &advised.write_through;
        out += &runners_up(advice, chosen);
        let of_footprint = |trial: &Trial| trial.setting.cache_bytes as f64 / footprint(advice);
        out += "\nOther sizes, each with its best policy\n";
        out += &columns(
            &["SIZE", "FOOTPRINT", "POLICY", "READ HITS", "FLASH WRITES", "INDEX"],
            advice.sizes.iter().map(|trial| {
                let own = trial.setting.cache_bytes == chosen.setting.cache_bytes;
                let policy = trial.setting.policy.info().name.to_owned();
                let numbers = [percent(of_footprint(trial)), policy, percent(trial.read_hit_ratio)];
                let costs = [bytes(trial.flash_write_bytes), bytes(trial.memory_bytes)];
                (own, [vec![bytes(trial.setting.cache_bytes)], numbers.to_vec(), costs.to_vec()].concat())
            }),
        );
        out += "\nOther policies\n";
        let is_chosen = |trial: &Trial| trial.setting.policy == chosen.setting.policy;
        let shown =
            advice.policies.iter().enumerate().filter(|(i, trial)| *i < POLICIES_SHOWN || is_chosen(trial));
        out += &columns(
            &["POLICY", "READ HITS", "FLASH WRITES", "INDEX"],
            shown.map(|(_, trial)| {
                let costs = [bytes(trial.flash_write_bytes), bytes(trial.memory_bytes)];
                let name = trial.setting.policy.info().name.to_owned();
                (is_chosen(trial), [vec![name, percent(trial.read_hit_ratio)], costs.to_vec()].concat())
            }),
        );
    }
    section(&mut out, "Mind", &advice.caveats);
    out
}

/// Returns a table of the chosen cache and the best alternative for each of its properties.
fn runners_up(advice: &Advice, chosen: &Trial) -> String {
    let mean = |ns: Option<u64>| ns.map_or("?".to_owned(), ms);
    let row = |name: String, trial: &Trial, ns| {
        vec![name, percent(trial.read_hit_ratio), mean(ns), bytes(trial.flash_write_bytes)]
    };
    let own = format!("write-through, {}", chosen.setting.admission);
    let own = (true, row(own, chosen, through_ns(advice)));
    let others = advice.runners_up.iter().map(|other| {
        (false, row(format!("{} {}", other.property, other.value), &other.trial, other.mean_ns))
    });
    let heads = ["ONE PROPERTY CHANGED", "READ HITS", "MEAN REQUEST", "FLASH WRITES"];
    format!("\nRunners-up\n{}", columns(&heads, std::iter::once(own).chain(others)))
}

/// Returns the mean latency of all requests with write-through, nanoseconds.
pub(super) fn through_ns(advice: &Advice) -> Option<u64> {
    match &advice.mode {
        Some(mode) => Some(mode.through_ns),
        None => advice.latency.as_ref().map(|latency| latency.all_with_ns),
    }
}

pub(super) fn footprint(advice: &Advice) -> f64 {
    advice.profile.footprint.bytes.max(1) as f64
}

pub(super) fn section(out: &mut String, title: &str, sentences: &[String]) {
    if sentences.is_empty() {
        return;
    }
    *out += &format!("\n{title}\n");
    sentences.iter().for_each(|sentence| *out += &filled("  - ", sentence));
}

/// Wraps text into lines. The first line starts with `lead`. The other lines are indented by the
/// length of `lead`.
pub(super) fn filled(lead: &str, words: &str) -> String {
    let mut out = String::new();
    let mut line = lead.to_owned();
    for word in words.split(' ') {
        if line.len() > lead.len() && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out += &line;
            out.push('\n');
            line = " ".repeat(lead.len());
        }
        if line.len() > lead.len() {
            line.push(' ');
        }
        line += word;
    }
    out + &line + "\n"
}

/// Formats a table. All columns except the first are right-aligned, and marked rows get an arrow.
pub(super) fn columns(heads: &[&str], rows: impl Iterator<Item = (bool, Vec<String>)>) -> String {
    let heads = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows: Vec<(bool, Vec<String>)> = std::iter::once((false, heads)).chain(rows).collect();
    let widths: Vec<usize> = (0..rows[0].1.len())
        .map(|column| rows.iter().map(|(_, cells)| cells[column].chars().count()).max().unwrap_or(0))
        .collect();
    let line = |(is_marked, cells): &(bool, Vec<String>)| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        });
        format!("{}{}\n", if *is_marked { "> " } else { "  " }, padded.collect::<String>().trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_filled_and_indented() {
        let text = filled("  - ", &"word ".repeat(40));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() > 1 && lines.iter().all(|line| line.chars().count() <= WIDTH));
        assert!(lines[0].starts_with("  - word") && lines[1].starts_with("    word"));
    }

    #[test]
    fn columns_stand_below_each_other() {
        let rows = [
            (false, vec!["a".to_owned(), "1 µs".to_owned()]),
            (true, vec!["long".to_owned(), "10".to_owned()]),
        ];
        assert_eq!(columns(&["NAME", "N"], rows.into_iter()), "  NAME     N\n  a     1 µs\n> long    10\n");
    }
}
