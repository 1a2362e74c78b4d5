//! `hob top`: current load of disks, on a screen that is updated or in one table.
//!
//! Rates are differences of two responses of the daemon, so the first ones appear a moment after
//! the start. While the daemon does not answer, the screen says so and shows the last known values.

mod model;
mod screen;
mod terminal;

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use hob_control::client::Client;
use hob_control::{DiskLoad, Health};
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::Global;
use super::output::{print, table};
use super::remote::{converse, explain};
use model::{COLUMNS, Model, Row};
use screen::{Screen, Theme};

/// Show current requests, latency, hits and dirty data of disks
#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Print one table and exit, for scripts
    #[arg(short = 'b', long, visible_alias = "batch")]
    once: bool,
    /// Seconds between two updates, 0.1 to 60
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Sort by this column: the letter that sorts by it on the screen, or its heading
    #[arg(long, value_name = "COLUMN", default_value = "iops", value_parser = column)]
    sort: usize,
}

fn interval(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=60.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("the value must be 0.1 to 60".to_owned()),
    }
}

fn column(text: &str) -> Result<usize, String> {
    let matches =
        |column: &model::Column| column.heading.eq_ignore_ascii_case(text) || column.key.to_string() == text;
    COLUMNS.iter().position(matches).ok_or_else(|| {
        let names: Vec<String> = COLUMNS.iter().map(|column| column.heading.to_lowercase()).collect();
        format!("the value must be {}", names.join(", "))
    })
}

pub(super) fn run(args: &Top, global: &Global) -> anyhow::Result<()> {
    if args.once {
        return print_once(args, global);
    }
    if !std::io::stdout().is_terminal() {
        bail!("standard output is no terminal; 'hob top --once' prints one table");
    }
    converse(global, async |client| {
        let client = client.with_liveness_check();
        // Errors before the screen is opened are printed normally.
        let first = Answer::of(&client).await?;
        let mut terminal = terminal::Guard::enter()?;
        follow(args, client, first, &mut terminal).await
    })
}

/// Prints one table of the rates between two responses.
fn print_once(args: &Top, global: &Global) -> anyhow::Result<()> {
    let mut model = Model::new(args.sort);
    converse(global, async |client| {
        let client = client.with_liveness_check();
        model.take(client.load().await.map_err(explain)?);
        tokio::time::sleep(args.interval).await;
        model.take(client.load().await.map_err(explain)?);
        Ok(())
    })?;
    let rows = model.rows();
    let lines: Vec<Line<'_>> = rows.iter().map(Line::of).collect();
    print(global.output, &lines, |_| {
        let columns: Vec<_> = COLUMNS.iter().map(model::Column::of_table).collect();
        table(
            &columns.join("|"),
            rows.iter().map(|row| COLUMNS.iter().map(|column| (column.cell)(row)).collect()),
        )
    })
}

/// A disk in the JSON output. Rates are per second, and absent if unknown.
#[derive(Debug, Serialize)]
struct Line<'a> {
    disk: &'a str,
    state: String,
    iops: Option<f64>,
    read_bytes: Option<f64>,
    written_bytes: Option<f64>,
    hit_percent: Option<f64>,
    memory_hit_percent: Option<f64>,
    latency_mean_ns: Option<u64>,
    latency_p99_ns: Option<u64>,
    cache_bytes: u64,
    used_bytes: u64,
    dirty_bytes: u64,
    in_flight: u64,
}

impl<'a> Line<'a> {
    fn of(row: &'a Row) -> Line<'a> {
        let (load, rates) = (&row.load, row.rates);
        Line {
            disk: &load.disk,
            state: row.state(),
            iops: rates.map(|rates| rates.iops),
            read_bytes: rates.map(|rates| rates.read_bytes),
            written_bytes: rates.map(|rates| rates.write_bytes),
            hit_percent: rates.and_then(|rates| rates.hit_percent),
            memory_hit_percent: rates.and_then(|rates| rates.memory_hit_percent),
            latency_mean_ns: rates.and_then(|rates| rates.mean_ns),
            latency_p99_ns: rates.and_then(|rates| rates.p99_ns),
            cache_bytes: load.cache_bytes,
            used_bytes: load.used_bytes,
            dirty_bytes: load.dirty_bytes,
            in_flight: load.in_flight,
        }
    }
}

/// One response of the daemon.
struct Answer {
    loads: Vec<DiskLoad>,
    health: Health,
}

impl Answer {
    async fn of(client: &Client) -> anyhow::Result<Answer> {
        let loads = client.load().await.map_err(explain)?;
        let health = client.health().await.map_err(explain)?;
        Ok(Answer { loads, health })
    }
}

/// Updates the screen until the user quits.
async fn follow(
    args: &Top,
    client: Client,
    first: Answer,
    terminal: &mut terminal::Guard,
) -> anyhow::Result<()> {
    let mut model = Model::new(args.sort);
    let mut screen = Screen::new(client.endpoint().to_string(), Theme::of_environment());
    model.take(first.loads);
    screen.health = Ok(first.health);
    let mut tick = tokio::time::interval(args.interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick.reset();
    let mut asking: Option<JoinHandle<anyhow::Result<Answer>>> = None;
    loop {
        terminal.draw(|frame| screen.draw(frame, &model))?;
        tokio::select! {
            _ = tick.tick(), if asking.is_none() => {
                let client = client.clone();
                asking = Some(tokio::spawn(async move { Answer::of(&client).await }));
            }
            answer = async { asking.as_mut().expect("checked").await }, if asking.is_some() => {
                asking = None;
                match answer? {
                    Ok(answer) => {
                        if !screen.paused {
                            model.take(answer.loads);
                        }
                        screen.health = Ok(answer.health);
                    }
                    Err(error) => screen.health = Err(error.to_string()),
                }
            }
            event = terminal.next_event() => match event? {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    if press(key, &mut model, &mut screen) == Next::End {
                        return Ok(());
                    }
                }
                // Another event may be a change of size, so the screen is drawn again.
                Some(_) => {}
                None => return Ok(()),
            },
        }
    }
}

/// Effect of a key: `hob top` continues or ends.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Stay,
    End,
}

fn press(key: KeyEvent, model: &mut Model, screen: &mut Screen) -> Next {
    let with_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c' | 'd') if with_control => return Next::End,
        KeyCode::Char('q') | KeyCode::Esc => return Next::End,
        KeyCode::Down | KeyCode::Char('j') => model.select(1),
        KeyCode::Up | KeyCode::Char('k') => model.select(-1),
        KeyCode::PageDown => model.select(10),
        KeyCode::PageUp => model.select(-10),
        KeyCode::Home => model.select(isize::MIN),
        KeyCode::End => model.select(isize::MAX),
        KeyCode::Char(' ') => screen.paused = !screen.paused,
        KeyCode::Char(letter) => {
            if let Some(column) = COLUMNS.iter().position(|column| column.key == letter) {
                model.sort_by(column);
            }
        }
        _ => {}
    }
    Next::Stay
}

#[cfg(test)]
mod tests;
