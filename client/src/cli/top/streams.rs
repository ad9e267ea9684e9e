//! The page of streams: what all workers compute for clients, and what waits there.

use hotcell_proto::v1::WatchedState;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    text::Line,
    widgets::Paragraph,
};

use super::{
    feed::{WATCHED, can_be_looked_into},
    state::{State, Stream},
    view::{Column, DIM, request_name, table, titled},
};
use crate::cli::{json::watched_state, table::span, ui::one_line};

/// Lines at most that say of which workers nothing is known.
const NOTES: usize = 3;

/// Draws the requests from this one on, or from as far down as leaves no room empty. Where it begins.
pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, from: usize) -> usize {
    let notes = notes(state);
    let height = u16::try_from(notes.len()).unwrap_or(u16::MAX);
    let [list, low] =
        Layout::vertical([Constraint::Min(3), Constraint::Length(height)]).areas(area);
    let streams = state.streams();
    // Besides the title and the heading.
    let room = usize::from(list.height.saturating_sub(2));
    let from = from.min(streams.len().saturating_sub(room));
    let shown = streams.get(from..).unwrap_or_default();
    let shown = shown.get(..room).unwrap_or(shown);
    let title = match shown.len() {
        all if all == streams.len() => format!("Streams ({all})"),
        some => format!(
            "Streams ({}–{} of {})",
            from + 1,
            from + some,
            streams.len()
        ),
    };
    let rows = table(&columns(), shown, list.width);
    frame.render_widget(rows.block(titled(&title)), list);
    let notes: Vec<Line<'_>> = notes.into_iter().map(|n| Line::styled(n, DIM)).collect();
    frame.render_widget(Paragraph::new(notes), low);
    from
}

fn columns<'a>() -> [Column<Stream<'a>>; 9] {
    let wide = Constraint::Length;
    [
        Column::new("REQUEST", Constraint::Min(12), 0, |s| {
            request_name(s.request)
        }),
        Column::new("WORKER", wide(10), 50, |s| s.worker.to_owned()),
        Column::new("MODEL", wide(14), 100, |s| s.request.model.clone()),
        Column::new("STATE", wide(11), 0, doing),
        Column::new("PROMPT", wide(7), 76, |s| {
            s.request.prompt_tokens.to_string()
        }),
        Column::new("DRAWN", wide(7), 0, |s| drawn(s).to_string()),
        Column::new("TOKENS/S", wide(8), 60, |s| match s.request.state() {
            WatchedState::Drawing => s
                .pace
                .map_or_else(|| "-".to_owned(), |pace| format!("{pace:.1}")),
            _ => "-".to_owned(),
        }),
        Column::new("SINCE", wide(8), 76, |s| {
            span(s.request.age_ms.max(0.0) as u64)
        }),
        Column::new("PUT BACK", wide(8), 100, |s| {
            s.request.preempted.to_string()
        }),
    ]
}

/// Tokens that were drawn for it.
fn drawn(stream: &Stream<'_>) -> u64 {
    let request = stream.request;
    request.tokens.saturating_sub(request.prompt_tokens)
}

/// Its state; of one that is read, how much of it was.
fn doing(stream: &Stream<'_>) -> String {
    let request = stream.request;
    let state = watched_state(request.state);
    match request.state() {
        WatchedState::Reading if request.tokens > 0 => {
            let share = 100.0 * request.computed as f64 / request.tokens as f64;
            format!("{state} {:.0}%", share.min(100.0))
        }
        _ => state,
    }
}

/// What is under way in all, and whose requests are not known and why not.
fn notes(state: &State) -> Vec<String> {
    // Workers for each reason, in the order of the workers.
    let mut unseen: Vec<(&str, Vec<&str>)> = Vec::new();
    for worker in state.workers.iter().filter(|w| w.pid != 0) {
        let why = state.seen.get(&worker.id).and_then(|s| s.blind.as_deref());
        let Some(why) = why else { continue };
        match unseen.iter_mut().find(|(known, _)| *known == why) {
            Some((_, workers)) => workers.push(&worker.id),
            None => unseen.push((why, vec![&worker.id])),
        }
    }
    let mut lines: Vec<String> = unseen
        .iter()
        .take(NOTES)
        .map(|(why, workers)| one_line(&format!("{}: {why}", workers.join(", "))))
        .collect();
    let able = state
        .workers
        .iter()
        .filter(|w| can_be_looked_into(w))
        .count();
    if able > WATCHED {
        let rest = able - WATCHED;
        lines.push(format!(
            "{rest} workers more are not looked into: {WATCHED} are, at once"
        ));
    }
    let asked: u64 = state
        .models
        .iter()
        .map(|m| u64::from(m.running_requests))
        .sum();
    lines.push(format!(
        "{asked} requests are under way, those that wait for a worker included"
    ));
    lines
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1;
    use ratatui::crossterm::event::KeyCode;

    use super::super::{
        feed::{Lists, Update},
        state::{
            Page, State,
            tests::{host, press},
        },
        view::tests::{line, shown},
    };
    use super::*;

    fn request(id: &str, state: WatchedState, age_ms: f64) -> v1::WatchedRequest {
        v1::WatchedRequest {
            request_id: id.into(),
            model: "kjv".into(),
            state: state.into(),
            tokens: 40,
            prompt_tokens: 30,
            computed: 10,
            age_ms,
            preempted: 2,
        }
    }

    fn sample(worker: &str, time_ms: u64, requests: Vec<v1::WatchedRequest>) -> Update {
        Update::Sample(Box::new(v1::WatchSample {
            worker: worker.into(),
            time_ms,
            span_ms: 500.0,
            requests,
            ..v1::WatchSample::default()
        }))
    }

    fn ids(state: &State) -> Vec<&str> {
        let streams = state.streams();
        streams
            .iter()
            .map(|s| s.request.request_id.as_str())
            .collect()
    }

    #[test]
    fn requests_of_all_workers_are_shown_and_stay_where_they_are() {
        let mut state = host();
        let drawing = |id: &str, tokens, age_ms| v1::WatchedRequest {
            tokens,
            ..request(id, WatchedState::Drawing, age_ms)
        };
        let waiting = request("aaron\u{1b}[2J", WatchedState::Waiting, 9e3);
        let first = vec![waiting.clone(), drawing("noah", 40, 1000.0)];
        state.take(sample("w0", 4_000_000, first));
        let reading = request("miriam", WatchedState::Reading, 5.0);
        let second = vec![
            drawing("late", 31, 10.0),
            reading,
            drawing("early", 31, 20.0),
        ];
        state.take(sample("w1", 4_000_000, second));
        let order = ["noah", "early", "late", "miriam", "aaron\u{1b}[2J"];
        assert_eq!(ids(&state), order);
        state.take(sample(
            "w0",
            4_002_000,
            vec![waiting, drawing("noah", 90, 3000.0)],
        ));
        assert_eq!(ids(&state), order);
        press(&mut state, KeyCode::Char('s'));
        let text = shown(&mut state, (120, 30));
        let words = ["w0", "kjv", "drawing", "30", "60", "25.0", "3s", "2"];
        assert_eq!(line(&text, "noah")[1..], words, "{text}");
        assert_eq!(line(&text, "miriam")[3..5], ["reading", "25%"], "{text}");
        assert_eq!(line(&text, "late")[6], "-", "{text}");
        assert!(
            text.contains("Streams (5)") && !text.contains('\u{1b}'),
            "{text}"
        );
        // Where there is little room, what matters most is left.
        let text = shown(&mut state, (36, 12));
        assert_eq!(line(&text, "noah")[1..], ["drawing", "60"], "{text}");
        // A worker in a long step has what it had; one that is gone has nothing.
        state.take(Update::Sample(Box::new(v1::WatchSample {
            worker: "w0".into(),
            time_ms: 4_002_100,
            busy: true,
            ..v1::WatchSample::default()
        })));
        assert_eq!(ids(&state), order);
        let why = "the role debug is wanted";
        state.take(Update::Blind("w0".into(), why.into()));
        assert_eq!(ids(&state), ["early", "late", "miriam"]);
        state.take(Update::Blind("w1".into(), why.into()));
        let text = shown(&mut state, (120, 30));
        assert!(text.contains("w0, w1: the role debug is wanted"), "{text}");
    }

    #[test]
    fn of_whom_nothing_is_known_no_requests_stay_and_it_is_said() {
        let mut state = host();
        let drawing = request("noah", WatchedState::Drawing, 1000.0);
        state.take(sample("w0", 4_000_000, vec![drawing]));
        assert_eq!(ids(&state), ["noah"]);
        let lists = |workers: Vec<v1::WorkerInfo>| {
            Update::Lists(Lists {
                workers,
                models: Vec::new(),
                devices: Vec::new(),
            })
        };
        let mut workers = state.workers.clone();
        workers[0].pid = 0;
        state.take(lists(workers));
        assert!(ids(&state).is_empty());
        press(&mut state, KeyCode::Char('s'));
        assert!(!shown(&mut state, (120, 30)).contains("looked into"));
        // Those that stand by, or have no process, are none of them.
        let many = (0..WATCHED + 5).map(|n| v1::WorkerInfo {
            id: format!("w{n}"),
            pid: (n > 0).into(),
            state: match n {
                1 => v1::WorkerState::Standby.into(),
                _ => v1::WorkerState::Ready.into(),
            },
            ..v1::WorkerInfo::default()
        });
        state.take(lists(many.collect()));
        let text = shown(&mut state, (120, 30));
        assert!(
            text.contains("3 workers more are not looked into"),
            "{text}"
        );
    }

    #[test]
    fn a_long_list_is_scrolled_to_its_end_and_no_further() {
        let mut state = host();
        let many = (0..100).map(|n| request(&format!("r{n:02}"), WatchedState::Drawing, 0.0));
        state.take(sample("w0", 4_000_000, many.collect()));
        press(&mut state, KeyCode::Char('s'));
        let top = shown(&mut state, (100, 20));
        assert!(
            top.contains("(1–14 of 100)") && top.contains("r13"),
            "{top}"
        );
        press(&mut state, KeyCode::Down);
        press(&mut state, KeyCode::PageDown);
        let text = shown(&mut state, (100, 20));
        assert!(text.contains("(22–35 of 100)"), "{text}");
        press(&mut state, KeyCode::End);
        let text = shown(&mut state, (100, 20));
        assert!(
            text.contains("r99") && text.contains("(87–100 of 100)"),
            "{text}"
        );
        press(&mut state, KeyCode::Up);
        assert_eq!(state.page, Page::Streams(85));
        press(&mut state, KeyCode::Home);
        assert_eq!(shown(&mut state, (100, 20)), top);
        // Of fewer requests none is left out above.
        press(&mut state, KeyCode::End);
        state.take(sample("w0", 4_001_000, Vec::new()));
        assert!(shown(&mut state, (100, 20)).contains("Streams (0)"));
        assert_eq!(state.page, Page::Streams(0));
        assert_eq!(press(&mut state, KeyCode::Char('q')), None);
        assert_eq!(state.page, Page::Overview);
    }
}
