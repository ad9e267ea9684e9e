//! The screen: a function of what is known.

use hotcell_proto::v1;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Paragraph, Row, Sparkline, Table, TableState},
};

use super::{
    devices,
    state::{Page, Seen, State, rate},
    streams,
};
use crate::cli::{
    debug::watch::{place, share},
    json::{model_state, watched_state},
    operate,
    table::{bytes, span, time_of_day},
    ui::{harmless, one_line},
};

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
pub(super) const DIM: Style = Style::new().add_modifier(Modifier::DIM);
pub(super) const CHOSEN: Style = Style::new().add_modifier(Modifier::REVERSED);

/// What is told of the keys, as far as there is room.
const KEYS: [&str; 11] = [
    "q quit",
    "? help",
    "s streams",
    "v devices",
    "⏎ death",
    "t trace",
    "c capture",
    "d drain",
    "R restart",
    "r release",
    "↑↓ choose",
];

const HELP: &str = "\
Keys
  ↑ ↓       choose a worker
  Enter     the report of its last death
  s         the streams of all workers
  v         all devices
  t         trace it for a second, into a file for https://ui.perfetto.dev
  c         capture what it computes for the next request, into a .hotcell file
  d         give it no new requests; those that it has have a minute, then they go on elsewhere
  r         let it out of quarantine, or give it requests again
  R         have another process take its place
  q         leave

Workers
  STATE     ready, busy with requests, or why not
  BUSY      share of the time in steps
  TOKENS/S  tokens drawn; the curve below has the last minutes
  STEP      half of the steps took no longer
  CACHE     share of its blocks in use
  RUN WAIT  requests in the batch, and waiting for it

Streams
  STATE     drawing tokens, reading the prompt, or waiting for a place in the batch
  DRAWN     tokens that it has besides its prompt's
  TOKENS/S  over the last eight samples
  SINCE     how long it has been on this worker
  PUT BACK  times that it made room for others

Devices
  USED      memory in use by all programs, as the driver tells; of a CPU what its workers have
  HEALTH    ok, what went wrong, or why it cannot be used

Requests, tokens and steps are seen with the role debug only.";

/// Draws it.
pub(super) fn draw(frame: &mut Frame<'_>, state: &mut State) {
    let [head, body, said, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(heading(state)), head);
    match &state.page {
        Page::Overview => overview(frame, body, state),
        Page::Help(line) => {
            let room = usize::from(body.height.saturating_sub(1));
            let line = *line.min(&HELP.lines().count().saturating_sub(room));
            text(frame, body, ("Help", HELP), line);
            state.page = Page::Help(line);
        }
        Page::Report(report, line) => text(frame, body, ("Last death", report), *line),
        Page::Devices(row) => state.page = Page::Devices(devices::draw(frame, body, state, *row)),
        Page::Streams(from) => state.page = Page::Streams(streams::draw(frame, body, state, *from)),
    }
    frame.render_widget(Line::styled(one_line(&state.said), BOLD), said);
    let pressed = match &state.page {
        Page::Overview => hints(keys.width),
        Page::Help(_) | Page::Report(..) => "↑↓ scroll  any other key goes back".to_owned(),
        Page::Devices(_) => "↑↓ choose  s streams  ? help  any other key goes back".to_owned(),
        Page::Streams(_) => "↑↓ scroll  v devices  ? help  any other key goes back".to_owned(),
    };
    frame.render_widget(Line::styled(pressed, DIM), keys);
}

/// The keys that there is room for.
fn hints(width: u16) -> String {
    let mut line = String::new();
    for hint in KEYS {
        if line.chars().count() + 1 + hint.chars().count() > width.into() {
            break;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(hint);
    }
    line
}

/// A text from a line on.
fn text(frame: &mut Frame<'_>, area: Rect, (title, text): (&str, &str), line: usize) {
    let line = u16::try_from(line).unwrap_or(u16::MAX);
    let text = Paragraph::new(harmless(text)).scroll((line, 0));
    frame.render_widget(text.block(titled(title)), area);
}

pub(super) fn titled(title: &str) -> Block<'_> {
    let title = Span::styled(format!(" {title} "), BOLD);
    Block::new().borders(Borders::TOP).title(title)
}

fn heading(state: &State) -> Line<'static> {
    if let Some(why) = &state.lost {
        let text = format!("{} does not answer: {why}", state.peer);
        return Line::styled(one_line(&text), BOLD);
    }
    let running: u64 = state
        .workers
        .iter()
        .map(|w| u64::from(w.running_requests))
        .sum();
    let tokens: f64 = state.seen.values().map(|seen| rate(&seen.sample)).sum();
    let broken = state.devices.iter().filter(|d| !d.problem.is_empty());
    let broken = match broken.count() {
        0 => String::new(),
        some => format!(" ({some} cannot be used)"),
    };
    let text = format!(
        "{}  {}  {} devices{broken}, {} workers, {} models, {running} requests, {tokens:.0} tokens/s",
        state.peer,
        match state.now {
            0 => "-".to_owned(),
            now => time_of_day(now),
        },
        state.devices.len(),
        state.workers.len(),
        state.models.len(),
    );
    Line::styled(one_line(&text), BOLD)
}

fn overview(frame: &mut Frame<'_>, area: Rect, state: &mut State) {
    let count = |n: usize, most: u16| u16::try_from(n).unwrap_or(u16::MAX).min(most);
    let workers = count(state.workers.len(), 12) + 2;
    let models = count(state.models.len(), 6) + 2;
    let [top, middle, curve, low, events] = Layout::vertical([
        Constraint::Length(workers),
        Constraint::Min(4),
        Constraint::Length(4),
        Constraint::Length(models),
        Constraint::Length(6),
    ])
    .areas(area);
    table_of_workers(frame, top, state);
    let [left, right] =
        Layout::horizontal([Constraint::Min(30), Constraint::Percentage(30)]).areas(middle);
    let nobody = Seen::default();
    let seen = state.seen.get(&state.chosen).unwrap_or(&nobody);
    requests(frame, left, &state.chosen, seen);
    where_and_memory(frame, right, seen);
    let tokens: Vec<u64> = seen.tokens.iter().copied().collect();
    let shown = tokens.len().saturating_sub(curve.width.into());
    let most = tokens.iter().max().copied().unwrap_or(0);
    let title = format!("Tokens/s of {}, at most {most}", one_line(&state.chosen));
    let spark = Sparkline::default().data(tokens.get(shown..).unwrap_or_default());
    frame.render_widget(spark.block(titled(&title)), curve);
    table_of_models(frame, low, state);
    let room = usize::from(events.height.saturating_sub(1));
    let skipped = state.events.len().saturating_sub(room);
    let lines = state.events.iter().skip(skipped);
    let lines: Vec<Line<'_>> = lines.map(|e| Line::raw(one_line(e))).collect();
    frame.render_widget(Paragraph::new(lines).block(titled("Events")), events);
}

fn row<const N: usize>(cells: [String; N]) -> Row<'static> {
    Row::new(cells.map(|cell| one_line(&cell)))
}

/// A column of a table of these.
pub(super) struct Column<T> {
    heading: &'static str,
    width: Constraint,
    from: u16,
    cell: fn(&T) -> String,
}

impl<T> Column<T> {
    /// With this heading and width. It is left out where the table is narrower than `from`.
    pub(super) fn new(
        heading: &'static str,
        width: Constraint,
        from: u16,
        cell: fn(&T) -> String,
    ) -> Self {
        Self {
            heading,
            width,
            from,
            cell,
        }
    }
}

/// A table of those columns that there is room for in this width.
pub(super) fn table<T>(columns: &[Column<T>], items: &[T], width: u16) -> Table<'static> {
    let shown: Vec<&Column<T>> = columns.iter().filter(|c| width >= c.from).collect();
    let rows = items.iter().map(|item| {
        let cells = shown.iter().map(|column| one_line(&(column.cell)(item)));
        Row::new(cells.collect::<Vec<_>>())
    });
    let widths = shown.iter().map(|column| column.width);
    let heading = Row::new(shown.iter().map(|column| column.heading));
    Table::new(rows, widths).header(heading.style(DIM))
}

/// A request's id.
pub(super) fn request_name(request: &v1::WatchedRequest) -> String {
    match request.request_id.as_str() {
        "" => "(embedding)".to_owned(),
        id => id.to_owned(),
    }
}

/// A worker, and what it told of itself last.
type Worked<'a> = (&'a v1::WorkerInfo, Option<&'a v1::WatchSample>);

fn table_of_workers(frame: &mut Frame<'_>, area: Rect, state: &mut State) {
    let workers = state.workers.iter().map(|worker| {
        let seen = state.seen.get(&worker.id);
        let sample = seen.map(|s| &s.sample).filter(|s| s.span_ms > 0.0);
        (worker, sample)
    });
    let workers: Vec<Worked<'_>> = workers.collect();
    let rows = table(&columns_of_workers(), &workers, area.width)
        .row_highlight_style(CHOSEN)
        .block(titled("Workers"));
    let mut chosen = TableState::default();
    chosen.select(state.row());
    frame.render_stateful_widget(rows, area, &mut chosen);
}

fn columns_of_workers<'a>() -> [Column<Worked<'a>>; 14] {
    /// Without a process there is nothing to measure.
    fn alive(worker: &v1::WorkerInfo, text: String) -> String {
        match worker.pid {
            0 => "-".to_owned(),
            _ => text,
        }
    }
    fn of((_, sample): &Worked<'_>, part: fn(&v1::WatchSample) -> String) -> String {
        sample.map_or_else(|| "-".to_owned(), part)
    }
    let wide = Constraint::Length;
    [
        Column::new("WORKER", wide(10), 0, |(w, _)| w.id.clone()),
        Column::new("STATE", wide(11), 0, |(w, _)| operate::state(w)),
        Column::new("DEVICE", wide(7), 76, |(w, _)| {
            let device = w.lease.as_ref().map(|lease| lease.device.clone());
            device.unwrap_or_default()
        }),
        Column::new("PID", wide(8), 111, |(w, _)| alive(w, w.pid.to_string())),
        Column::new("UP", wide(8), 111, |(w, _)| alive(w, span(w.uptime_ms))),
        Column::new("RSS", wide(10), 93, |(w, _)| {
            alive(w, bytes(w.resident_bytes))
        }),
        Column::new("DEATHS", wide(6), 76, |(w, _)| w.deaths.to_string()),
        Column::new("BUSY", wide(5), 33, |w| {
            of(w, |s| {
                let busy = s.steps.as_ref().map_or(0.0, |steps| steps.busy_ms);
                share(busy, s.span_ms)
            })
        }),
        Column::new("TOKENS/S", wide(8), 42, |w| {
            of(w, |s| format!("{:.0}", rate(s)))
        }),
        Column::new("STEP", wide(7), 60, |w| {
            of(w, |s| match s.steps.as_ref().filter(|s| s.count > 0) {
                Some(steps) => format!("{:.2}ms", steps.p50_ms),
                None => "-".to_owned(),
            })
        }),
        Column::new("CACHE", wide(5), 76, |w| {
            of(w, |s| {
                let used: u64 = s.caches.iter().map(|c| c.used_blocks).sum();
                let all: u64 = s.caches.iter().map(|c| c.blocks).sum();
                share(used as f64, all as f64)
            })
        }),
        Column::new("RUN", wide(4), 60, |w| {
            of(w, |s| {
                s.caches.iter().map(|c| c.running).sum::<u64>().to_string()
            })
        }),
        Column::new("WAIT", wide(4), 60, |w| {
            of(w, |s| {
                s.caches.iter().map(|c| c.waiting).sum::<u64>().to_string()
            })
        }),
        Column::new("MODELS", Constraint::Min(5), 82, |(w, _)| {
            w.models.join(",")
        }),
    ]
}

fn requests(frame: &mut Frame<'_>, area: Rect, worker: &str, seen: &Seen) {
    let title = format!("Requests on {}", one_line(worker));
    if let Some(why) = &seen.blind {
        let said = Paragraph::new(one_line(why)).style(DIM);
        return frame.render_widget(said.block(titled(&title)), area);
    }
    let rows = seen.sample.requests.iter().map(|request| {
        row([
            request_name(request),
            request.model.clone(),
            watched_state(request.state),
            format!("{}/{}", request.computed, request.tokens),
            span(request.age_ms.max(0.0) as u64),
        ])
    });
    let widths = [
        Constraint::Min(12),
        Constraint::Length(12),
        Constraint::Length(8),
        Constraint::Length(11),
        Constraint::Length(8),
    ];
    let heading = Row::new(["REQUEST", "MODEL", "STATE", "TOKENS", "AGE"]).style(DIM);
    let table = Table::new(rows, widths).header(heading);
    frame.render_widget(table.block(titled(&title)), area);
}

fn where_and_memory(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    let sample = &seen.sample;
    let nodes = sample.nodes.iter().take(5).map(|node| {
        let share = share(f64::from(node.seen), f64::from(sample.looks));
        format!("{share:>5} {:>7.1} ms  at {}", node.ms, place(node))
    });
    let memory = sample.memory.iter().map(|part| {
        let kind = match part.model.as_str() {
            "" => part.kind.clone(),
            model => format!("{} of {model}", part.kind),
        };
        format!("{:>10}  {kind}", bytes(part.bytes))
    });
    let lines = nodes.chain(memory).map(|line| Line::raw(one_line(&line)));
    let lines = Paragraph::new(lines.collect::<Vec<_>>());
    frame.render_widget(lines.block(titled("Where, and memory")), area);
}

fn table_of_models(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let rows = state.models.iter().map(|model| {
        let problem = match model.problem.as_str() {
            "" => model.workers.join(","),
            problem => problem.to_owned(),
        };
        row([
            model.name.clone(),
            model_state(model.state),
            bytes(model.file_bytes),
            model.running_requests.to_string(),
            problem,
        ])
    });
    let widths = [
        Constraint::Min(12),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(8),
        Constraint::Min(10),
    ];
    let heading = Row::new(["MODEL", "STATE", "SIZE", "REQUESTS", "WORKERS"]).style(DIM);
    let table = Table::new(rows, widths).header(heading);
    frame.render_widget(table.block(titled("Models")), area);
}

#[cfg(test)]
pub(super) mod tests {
    use ratatui::{Terminal, backend::TestBackend, crossterm::event::KeyCode};

    use super::{
        super::{
            feed::Update,
            state::tests::{host, press},
        },
        *,
    };

    pub(in crate::cli::top) fn shown(state: &mut State, (width, height): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state)).unwrap();
        terminal.backend().to_string()
    }

    /// The words of the line that begins so.
    pub(in crate::cli::top) fn line<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
        let mut lines = text.lines().map(|l| l.trim_matches('"').trim());
        let found = lines.find(|l| l.starts_with(start));
        let found = found.unwrap_or_else(|| panic!("no {start} in\n{text}"));
        found.split_whitespace().collect()
    }

    #[test]
    fn a_host_is_shown_and_nothing_steers_the_terminal() {
        let mut state = host();
        let text = shown(&mut state, (140, 40));
        let w0 = line(&text, "w0");
        assert_eq!(w0[..4], ["w0", "ready", "cpu:0", "7"]);
        // Deaths, busy, tokens, step; no cache.
        assert_eq!(
            w0[w0.len() - 8..],
            ["1", "50%", "40", "2.50ms", "-", "0", "0", "kjv"]
        );
        assert_eq!(
            line(&text, "w1")[7..],
            ["1", "-", "-", "-", "-", "-", "-", "kjv"]
        );
        assert_eq!(line(&text, "moses")[1..], ["drawing", "0/12", "0ms"]);
        assert!(
            text.contains("40 tokens/s") && text.contains("01:02:03.004"),
            "{text}"
        );
        assert!(
            text.contains("kjv\u{fffd}[2J") && !text.contains('\u{1b}'),
            "{text}"
        );
        // Where there is little room, columns are left out whole.
        let text = shown(&mut state, (80, 24));
        let words = ["ready", "cpu:0", "1", "50%", "40", "2.50ms", "-", "0", "0"];
        assert_eq!(line(&text, "w0")[1..], words, "{text}");
        let text = shown(&mut state, (44, 24));
        let words = ["ready", "50%", "40"];
        assert_eq!(line(&text, "w0")[1..], words, "{text}");
        state.take(Update::Blind(
            "w0".into(),
            "the role debug is wanted".into(),
        ));
        state.take(Update::Lost("connection refused".into()));
        let text = shown(&mut state, (140, 40));
        assert!(text.contains("the role debug is wanted"), "{text}");
        assert!(
            text.contains("does not answer: connection refused"),
            "{text}"
        );
        state.take(Update::Report(
            "crash  w0.3\u{1b}[2J\nreason  SIGSEGV".into(),
        ));
        let text = shown(&mut state, (140, 40));
        assert!(
            text.contains("reason  SIGSEGV") && !text.contains('\u{1b}'),
            "{text}"
        );
    }

    #[test]
    fn every_size_is_drawn() {
        let mut state = host();
        for key in ['x', 's', 'v', '?'] {
            press(&mut state, KeyCode::Char(key));
            for width in 1..40 {
                for height in 1..30 {
                    shown(&mut state, (width * 5, height));
                }
            }
        }
    }

    #[test]
    fn keys_are_told_whole_or_not_at_all_and_help_is_scrolled() {
        assert_eq!(hints(3), "");
        assert_eq!(hints(13), "q quit ? help");
        assert!(hints(80).ends_with("R restart"), "{}", hints(80));
        assert_eq!(hints(200), KEYS.join(" "));
        let mut state = host();
        press(&mut state, KeyCode::Char('?'));
        let text = shown(&mut state, (100, 20));
        assert!(text.contains("report of its last death") && !text.contains("HEALTH"));
        press(&mut state, KeyCode::End);
        let text = shown(&mut state, (100, 20));
        assert!(text.contains("with the role debug only"), "{text}");
        press(&mut state, KeyCode::Up);
        let above = shown(&mut state, (100, 20));
        assert!(above != text && above.contains("HEALTH"), "{above}");
    }
}
