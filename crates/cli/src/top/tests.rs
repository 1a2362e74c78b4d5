//! Rates, order, keys, and the content of the screen.

use hob_control::{BackingState, Bucket, CacheState, DiskState, HealthProblem, ProblemKind};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::{Color, Modifier};

use super::model::HISTORY_MAX;
use super::*;

const SECOND: u64 = 1_000_000_000;

/// Returns a disk that has served `rate` reads per second for `seconds` seconds, each of 4 KiB and
/// 1 ms; half of them were hits.
fn load(disk: &str, seconds: u64, rate: u64) -> DiskLoad {
    let reads = seconds * rate;
    DiskLoad {
        disk: disk.to_owned(),
        state: DiskState::Online,
        cache: CacheState::Active,
        mode: "write-back".to_owned(),
        is_counted: true,
        elapsed_ns: seconds * SECOND,
        requests: reads,
        reads,
        read_bytes: reads * 4096,
        read_hits: reads / 2,
        latency_sum_ns: reads * 1_000_000,
        latency: vec![Bucket { up_to_ns: 1_048_575, count: reads }],
        cache_bytes: 1 << 30,
        used_bytes: 1 << 28,
        dirty_bytes: 3 << 20,
        ..DiskLoad::default()
    }
}

/// Returns the model after `looks` responses about disks with these rates.
fn model(looks: u64, disks: &[(&str, u64)]) -> Model {
    let mut model = Model::new(column("iops").unwrap());
    for second in 1..=looks {
        model.take(disks.iter().map(|(name, rate)| load(name, second, *rate)).collect());
    }
    model
}

fn names(model: &Model) -> Vec<&str> {
    model.rows().iter().map(|row| row.load.disk.as_str()).collect()
}

fn screen(theme: Theme) -> Screen {
    let mut screen = Screen::new("unix:/c.sock".to_owned(), theme);
    screen.health = Ok(Vec::new().into());
    screen
}

/// Returns the screen as lines of text.
fn drawn(screen: &Screen, model: &Model, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen.draw(frame, model)).unwrap();
    let buffer = terminal.backend().buffer();
    if screen.theme == Theme::Plain {
        let coloured =
            buffer.content().iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset);
        assert_eq!(coloured.count(), 0, "there is colour");
    }
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

fn key(code: KeyCode) -> KeyEvent {
    KeyEvent::new(code, KeyModifiers::NONE)
}

#[test]
fn rates_are_differences_between_two_responses() {
    let model = model(2, &[("web", 100)]);
    let rates = model.rows()[0].rates.unwrap();
    assert_eq!((rates.iops, rates.read_bytes, rates.write_bytes), (100.0, 409_600.0, 0.0));
    assert_eq!((rates.hit_percent, rates.memory_hit_percent), (Some(50.0), Some(0.0)));
    assert_eq!((rates.mean_ns, rates.p99_ns), (Some(1_000_000), Some(1_048_575)));
}

#[test]
fn the_99th_percentile_covers_only_new_requests() {
    let mut before = load("web", 1, 100);
    before.latency.push(Bucket { up_to_ns: 8_388_607, count: 5_000 });
    let mut now = load("web", 2, 100);
    now.latency = vec![
        Bucket { up_to_ns: 4_095, count: 98 },
        Bucket { up_to_ns: 1_048_575, count: 100 },
        Bucket { up_to_ns: 8_388_607, count: 5_001 },
        Bucket { up_to_ns: u64::MAX, count: 1 },
    ];
    // In the interval, 98 requests took up to 4 µs, one took up to 8 ms, and one took longer. The
    // 99th of these 100 requests is the one of up to 8 ms.
    assert_eq!(model::Rates::between(&before, &now).unwrap().p99_ns, Some(8_388_607));
}

#[test]
fn no_rate_is_shown_after_a_reset() {
    let counted = load("web", 5, 100);
    for now in [load("web", 1, 1_000), DiskLoad { requests: 0, ..load("web", 6, 100) }, DiskLoad::default()] {
        assert_eq!(model::Rates::between(&counted, &now), None, "{now:?}");
    }
    let idle = DiskLoad { elapsed_ns: 6 * SECOND, ..counted.clone() };
    let rates = model::Rates::between(&counted, &idle).unwrap();
    assert_eq!((rates.iops, rates.hit_percent, rates.mean_ns, rates.p99_ns), (0.0, None, None, None));
}

#[test]
fn a_backing_that_does_not_work_stands_in_place_of_the_cache() {
    let mut model = model(1, &[("web", 100)]);
    for (state, shown) in [
        (BackingState::Connected, "write-back"),
        (BackingState::Slow { oldest_request_ms: 2001, waiting_requests: 1 }, "slow backing"),
        (
            BackingState::Failing { since_seconds: 1, failed_last_minute: 2, last_error: "x".into() },
            "backing errors",
        ),
        (
            BackingState::Reconnecting { since_seconds: 1, last_error: "x".into(), waiting_requests: 0 },
            "reconnecting",
        ),
        (BackingState::Failed { since_seconds: 1, last_error: "x".into() }, "backing failed"),
    ] {
        model.take(vec![DiskLoad { backing_state: Some(state), ..load("web", 2, 100) }]);
        let lines = drawn(&screen(Theme::Plain), &model, 120, 20);
        assert!(lines.iter().any(|line| line.starts_with("web") && line.contains(shown)), "{lines:#?}");
    }
}

#[test]
fn order_follows_keys_and_the_selection_its_disk() {
    let mut model = model(2, &[("a", 10), ("b", 30), ("c", 20)]);
    let mut screen = screen(Theme::Plain);
    assert_eq!(names(&model), ["b", "c", "a"]);
    press(key(KeyCode::Down), &mut model, &mut screen);
    assert_eq!(model.selected(), 1);
    press(key(KeyCode::Char('i')), &mut model, &mut screen);
    assert_eq!((names(&model), model.selected()), (vec!["a", "c", "b"], 1));
    press(key(KeyCode::Char('n')), &mut model, &mut screen);
    assert_eq!((names(&model), model.selected()), (vec!["a", "b", "c"], 2));
    press(key(KeyCode::End), &mut model, &mut screen);
    press(key(KeyCode::Down), &mut model, &mut screen);
    assert_eq!(model.selected(), 2);
    press(key(KeyCode::Home), &mut model, &mut screen);
    press(key(KeyCode::Up), &mut model, &mut screen);
    assert_eq!(model.selected(), 0);
    model.take(vec![load("b", 3, 30)]);
    assert_eq!((names(&model), model.selected()), (vec!["b"], 0));
}

#[test]
fn every_column_has_a_key_of_its_own_that_does_nothing_else() {
    for (at, column) in COLUMNS.iter().enumerate() {
        let mut model = model(2, &[("a", 1)]);
        let before = model.order();
        assert_eq!(press(key(KeyCode::Char(column.key)), &mut model, &mut screen(Theme::Plain)), Next::Stay);
        assert_eq!(model.order().0, at, "{}", column.heading);
        assert_ne!(model.order(), before);
    }
}

#[test]
fn these_keys_end_it() {
    let mut model = model(1, &[]);
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    for key in [key(KeyCode::Char('q')), key(KeyCode::Esc), control_c] {
        assert_eq!(press(key, &mut model, &mut screen(Theme::Plain)), Next::End);
    }
    assert_eq!(press(key(KeyCode::Char('x')), &mut model, &mut screen(Theme::Plain)), Next::Stay);
}

#[test]
fn the_screen_shows_disks_and_the_past_of_one() {
    let mut model = model(4, &[("web", 100), ("database", 2_000)]);
    let mut loads: Vec<DiskLoad> = vec![load("web", 5, 100), load("database", 5, 2_000)];
    loads.push(DiskLoad { disk: "gone".to_owned(), state: DiskState::Offline, ..DiskLoad::default() });
    model.take(loads);
    let lines = drawn(&screen(Theme::Plain), &model, 140, 20);
    assert!(
        lines[0].starts_with("hob  2 of 3 disks  2100 IOPS  8.20 MiB/s read  0 B/s written"),
        "{lines:#?}"
    );
    assert_eq!(lines[1], "no problems");
    assert!(lines[2].starts_with("DISK      STATE") && lines[2].contains("IOPS↓"), "{lines:#?}");
    let cells: Vec<&str> = lines[3].split_whitespace().collect();
    let expected = [
        "database",
        "write-back",
        "2000",
        "7.81",
        "MiB",
        "0",
        "B",
        "50",
        "%",
        "1.00",
        "ms",
        "1.05",
        "ms",
        "3",
        "MiB",
    ];
    assert_eq!(cells[..expected.len()], expected);
    assert!(lines[3].ends_with("████"), "{}", lines[3]);
    assert!(lines[4].starts_with("web "), "{lines:#?}");
    assert!(lines[5].starts_with("gone      offline") && !lines[5].contains("0 B"), "{lines:#?}");
    assert!(lines[13].starts_with("database: IOPS 2000"), "{lines:#?}");
    assert!(lines[13].contains("mean latency 1.00 ms") && lines[13].contains("reads served 50 %"));
    assert!(lines[14..19].iter().any(|line| line.contains('█')), "{lines:#?}");
    assert!(lines[19].starts_with("q quit"));
}

#[test]
fn problems_are_shown_in_words() {
    let model = model(2, &[("web", 1)]);
    let mut screen = screen(Theme::Plain);
    let problem = |subject: &str| HealthProblem {
        kind: ProblemKind::DiskOffline,
        subject: subject.to_owned(),
        reason: "no such file".to_owned(),
    };
    screen.health = Ok(vec![problem("db"), problem("mail")].into());
    let line = drawn(&screen, &model, 100, 20)[1].clone();
    assert!(line.starts_with("DEGRADED  db: no such file  (and 1 more"), "{line}");
    screen.health = Err("cannot reach the daemon".to_owned());
    screen.paused = true;
    let lines = drawn(&screen, &model, 100, 20);
    assert!(lines[0].starts_with("PAUSED") && lines[1].starts_with("NO ANSWER  cannot reach"), "{lines:#?}");
}

#[test]
fn any_size_will_do() {
    let many: Vec<String> = (0..60).map(|n| format!("disk-with-a-long-name-{n:04}")).collect();
    let disks: Vec<(&str, u64)> = many.iter().map(|name| (name.as_str(), 7)).collect();
    let mut model = model(3, &disks);
    let wide = screen(Theme::Colours);
    for (width, height) in [(1, 1), (2, 40), (10, 3), (40, 10), (80, 24), (300, 100)] {
        drawn(&wide, &model, width, height);
    }
    let lines = drawn(&wide, &model, 60, 24);
    assert!(lines[2].contains("IOPS") && !lines[2].contains("DIRTY"), "{lines:#?}");
    // The selected disk is on the screen, wherever it is in the list.
    model.select(isize::MAX);
    let lines = drawn(&wide, &model, 80, 24);
    assert!(lines.iter().any(|line| line.starts_with(many.last().unwrap())), "{lines:#?}");
    drawn(&wide, &Model::new(0), 80, 24);
}

#[test]
fn the_selected_disk_is_seen_without_colours() {
    let model = model(2, &[("a", 1), ("b", 2)]);
    let mut terminal = Terminal::new(TestBackend::new(80, 20)).unwrap();
    terminal.draw(|frame| screen(Theme::Plain).draw(frame, &model)).unwrap();
    let reversed = |y| terminal.backend().buffer()[(0, y)].modifier.contains(Modifier::REVERSED);
    assert_eq!((reversed(2), reversed(3), reversed(4)), (false, true, false));
}

#[test]
fn the_past_has_an_end() {
    let model = model(HISTORY_MAX as u64 + 50, &[("a", 1)]);
    assert_eq!(model.rows()[0].history.len(), HISTORY_MAX);
}

#[test]
fn columns_and_intervals_are_checked() {
    assert_eq!(column("IOPS"), column("i"));
    assert!(column("colour").unwrap_err().contains("iops"));
    for wrong in ["0", "61", "-1", "x", "NaN", ""] {
        assert!(interval(wrong).is_err(), "{wrong}");
    }
    assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
}
