//! Drawing of `hob top`. Colours only repeat information that the text has too.

use hob_control::{Health, HealthStatus, Size};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, RenderDirection, Sparkline, Table, TableState};

use super::model::{COLUMNS, Model, Rates, Row, iops};
use crate::output::duration;

/// Minimum width of a trend, in characters. A trend is a row of bars that show a disk's requests
/// per second over time. The trend is not shown if there is less room.
const TREND_WIDTH_MIN: u16 = 10;

/// Maximum width of a trend, in characters.
const TREND_WIDTH_MAX: u16 = 60;

/// Height of the lower part of the screen, which shows one disk.
const DETAIL_HEIGHT: u16 = 6;

/// Minimum height of a screen with the lower part.
const HEIGHT_FOR_DETAIL: u16 = 14;

/// Maximum length of a name that is shown whole.
const NAME_WIDTH_MAX: usize = 32;

/// Characters of a trend from low to high.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Use of colours on the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Theme {
    /// Coloured text.
    Colours,
    /// Text without colours; only bold and reversed.
    Plain,
}

impl Theme {
    /// Returns the theme for the environment. `NO_COLOR` (no-color.org) and simple terminals have
    /// no colours.
    pub(super) fn of_environment() -> Theme {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let cannot = std::env::var("TERM").is_ok_and(|term| term == "dumb" || term.ends_with("-m"));
        if set("NO_COLOR") || cannot { Theme::Plain } else { Theme::Colours }
    }

    fn colour(self, colour: Color) -> Style {
        match self {
            Theme::Colours => Style::new().fg(colour),
            Theme::Plain => Style::new(),
        }
    }
}

/// State of the screen, except the disks.
pub(super) struct Screen {
    endpoint: String,
    /// Theme of the screen: with or without colours.
    pub(super) theme: Theme,
    /// True while the screen is not updated.
    pub(super) paused: bool,
    /// The daemon's last health report, or the reason for its absence.
    pub(super) health: Result<Health, String>,
}

impl Screen {
    pub(super) fn new(endpoint: String, theme: Theme) -> Screen {
        Screen { endpoint, theme, paused: false, health: Err("no response yet".to_owned()) }
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>, model: &Model) {
        let detail = if frame.area().height >= HEIGHT_FOR_DETAIL { DETAIL_HEIGHT } else { 0 };
        let parts =
            [Constraint::Length(2), Constraint::Min(1), Constraint::Length(detail), Constraint::Length(1)];
        let [head, disks, below, foot] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(Paragraph::new(vec![self.summary(model), self.verdict()]), head);
        self.draw_disks(frame, disks, model);
        if let Some(row) = model.rows().get(model.selected()).filter(|_| detail > 0) {
            self.draw_detail(frame, below, row);
        }
        frame
            .render_widget(Paragraph::new(self.keys()).style(Style::new().add_modifier(Modifier::DIM)), foot);
    }

    fn summary(&self, model: &Model) -> Line<'_> {
        let online = model.rows().iter().filter(|row| row.load.is_counted).count();
        let (requests, read, written) = model.totals();
        let human = |bytes: f64| Size(bytes.round() as u64).human();
        let paused = if self.paused { "PAUSED  " } else { "" };
        Line::from(format!(
            "{paused}hob  {online} of {} disks  {} IOPS  {}/s read  {}/s written  {}",
            model.rows().len(),
            iops(requests),
            human(read),
            human(written),
            self.endpoint
        ))
        .style(Style::new().add_modifier(Modifier::BOLD))
    }

    fn verdict(&self) -> Line<'static> {
        match &self.health {
            Ok(health) if health.status == HealthStatus::Ok => {
                Line::from("no problems").style(self.theme.colour(Color::Green))
            }
            Ok(health) => {
                let first = health.problems.first();
                let first =
                    first.map_or(String::new(), |problem| format!("{}: {}", problem.subject, problem.reason));
                let more = match health.problems.len() {
                    0 | 1 => String::new(),
                    all => format!("  (and {} more: hob health)", all - 1),
                };
                Line::from(format!("DEGRADED  {first}{more}")).style(self.theme.colour(Color::Red))
            }
            Err(why) => Line::from(format!("NO ANSWER  {why}")).style(self.theme.colour(Color::Red)),
        }
    }

    fn keys(&self) -> Line<'static> {
        let sorts: Vec<String> = COLUMNS
            .iter()
            .map(|column| format!("{} {}", column.key, column.heading.to_lowercase()))
            .collect();
        Line::from(format!("q quit  ↑↓ select  space pause  sort: {}", sorts.join(", ")))
    }

    fn draw_disks(&self, frame: &mut Frame<'_>, area: Rect, model: &Model) {
        let names = model.rows().iter().map(|row| row.load.disk.chars().count());
        let name_width = names.max().unwrap_or(0).clamp(4, NAME_WIDTH_MAX) as u16;
        let shown = columns_that_fit(area.width, name_width);
        let used: u16 = shown.iter().map(|width| width + 2).sum();
        let trend_width = area.width.saturating_sub(used).min(TREND_WIDTH_MAX);
        let has_trend = trend_width >= TREND_WIDTH_MIN && shown.len() == COLUMNS.len();
        let (sorted, ascending) = model.order();
        let heading = |(at, column): (usize, &super::model::Column)| {
            let arrow = match (at == sorted, ascending) {
                (true, true) => "↑",
                (true, false) => "↓",
                (false, _) => "",
            };
            let style =
                if at == sorted { Style::new().add_modifier(Modifier::UNDERLINED) } else { Style::new() };
            let line = Line::from(format!("{}{arrow}", column.heading)).alignment(alignment(at));
            Cell::from(line.style(style))
        };
        let mut headings: Vec<Cell<'_>> = COLUMNS.iter().enumerate().take(shown.len()).map(heading).collect();
        let mut widths: Vec<Constraint> = shown.iter().map(|width| Constraint::Length(*width)).collect();
        if has_trend {
            headings.push(Cell::from("IOPS SO FAR"));
            widths.push(Constraint::Length(trend_width));
        }
        let rows = model.rows().iter().map(|row| {
            let cells = COLUMNS.iter().enumerate().take(shown.len());
            let mut cells: Vec<Cell<'_>> = cells
                .map(|(at, column)| Cell::from(Line::from((column.cell)(row)).alignment(alignment(at))))
                .collect();
            if has_trend {
                cells.push(Cell::from(trend(row, trend_width)).style(self.theme.colour(Color::Cyan)));
            }
            ratatui::widgets::Row::new(cells)
        });
        let table = Table::new(rows, widths)
            .header(ratatui::widgets::Row::new(headings).style(Style::new().add_modifier(Modifier::BOLD)))
            .column_spacing(2)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        let selected = (!model.rows().is_empty()).then(|| model.selected());
        frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(selected));
    }

    /// Draws the history of one disk: requests, latency, hits.
    fn draw_detail(&self, frame: &mut Frame<'_>, area: Rect, row: &Row) {
        let third = Constraint::Ratio(1, 3);
        let parts: [Rect; 3] = Layout::horizontal([third; 3]).spacing(2).areas(area);
        let name = &row.load.disk;
        let now = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
        let requests = |rates: &Rates| Some(rates.iops.round() as u64);
        let latency = |rates: &Rates| rates.mean_ns;
        let hits =
            |rates: &Rates| Some(rates.hit_percent? + rates.memory_hit_percent?).map(|share| share as u64);
        let pictures = [
            (
                format!("{name}: IOPS {}", now(row.rates.map(|rates| iops(rates.iops)))),
                past(row, requests),
                None,
                Color::Cyan,
            ),
            (
                format!("mean latency {}", now(row.rates.as_ref().and_then(latency).map(duration))),
                past(row, latency),
                None,
                Color::Yellow,
            ),
            (
                format!(
                    "reads served {}",
                    now(row.rates.as_ref().and_then(hits).map(|share| format!("{share} %")))
                ),
                past(row, hits),
                Some(100),
                Color::Green,
            ),
        ];
        for (part, (title, data, max, colour)) in parts.into_iter().zip(pictures) {
            let [line, picture] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(part);
            let max = max.or_else(|| data.iter().copied().flatten().max()).unwrap_or(1).max(1);
            frame.render_widget(Paragraph::new(title).style(Style::new().add_modifier(Modifier::BOLD)), line);
            let spark = Sparkline::default().direction(RenderDirection::RightToLeft).max(max);
            frame.render_widget(spark.data(data).style(self.theme.colour(colour)), picture);
        }
    }
}

/// Returns the widths of the columns that fit, from the left.
fn columns_that_fit(width: u16, name_width: u16) -> Vec<u16> {
    let mut left = width;
    let wanted = COLUMNS.iter().map(|column| if column.width == 0 { name_width } else { column.width });
    wanted
        .take_while(|wanted| {
            let fits = *wanted <= left;
            left = left.saturating_sub(*wanted + 2);
            fits
        })
        .collect()
}

/// Returns the alignment of a column: words left, numbers right.
fn alignment(column: usize) -> Alignment {
    if column < 2 { Alignment::Left } else { Alignment::Right }
}

/// Returns the values of earlier responses, newest first.
fn past(row: &Row, value: impl Fn(&Rates) -> Option<u64>) -> Vec<Option<u64>> {
    row.history.iter().rev().map(|rates| rates.as_ref().and_then(&value)).collect()
}

/// Returns a disk's recent requests as one line, newest at the right.
fn trend(row: &Row, width: u16) -> String {
    let values: Vec<Option<f64>> = row
        .history
        .iter()
        .rev()
        .take(usize::from(width))
        .map(|rates| rates.map(|rates| rates.iops))
        .collect();
    let most = values.iter().flatten().copied().fold(0.0, f64::max);
    let bar = |value: &Option<f64>| match value {
        Some(value) if *value > 0.0 => BARS[((value / most * 8.0).ceil() as usize).clamp(1, 8) - 1],
        _ => ' ',
    };
    let bars: String = values.iter().rev().map(bar).collect();
    format!("{bars:>width$}", width = usize::from(width))
}
