//! What is known, what of it is looked at, and what keys do.

use std::collections::{BTreeMap, VecDeque};

use hotcell_proto::v1;
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};

use super::feed::{Lists, Update};
use crate::cli::operate::event_line;

/// Samples of which the tokens are kept, for the curve.
const KEPT: usize = 240;
/// Events that are kept.
const EVENTS: usize = 200;

/// What a key asks for. Times are milliseconds since 1970, as the server counts them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Quit,
    /// The report of this worker's last death.
    Crash(String),
    /// A timeline of it.
    Trace(String, u64),
    /// What it computes for the next request.
    Capture(String, u64),
    /// Out of quarantine, or drained no more.
    Release(String),
    /// No new requests for it.
    Drain(String),
    /// Another process in its place.
    Restart(String),
}

/// What fills the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Page {
    Overview,
    Help,
    /// A text, from this line on.
    Report(String, u16),
}

/// What a worker told of itself.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) sample: v1::WatchSample,
    /// Tokens per second, the newest last.
    pub(super) tokens: VecDeque<u64>,
    /// Why there is nothing newer.
    pub(super) blind: Option<String>,
}

/// All of it.
pub(super) struct State {
    /// Whom it asks.
    pub(super) peer: String,
    pub(super) workers: Vec<v1::WorkerInfo>,
    pub(super) models: Vec<v1::ModelInfo>,
    pub(super) devices: Vec<v1::Device>,
    /// By worker.
    pub(super) seen: BTreeMap<String, Seen>,
    /// The newest last.
    pub(super) events: VecDeque<String>,
    /// The worker that is looked at.
    pub(super) chosen: String,
    pub(super) page: Page,
    /// How the last thing that was asked for went.
    pub(super) said: String,
    /// Why the server does not answer.
    pub(super) lost: Option<String>,
    /// The server's time as last heard.
    pub(super) now: u64,
}

/// Tokens per second in a sample.
pub(super) fn rate(sample: &v1::WatchSample) -> f64 {
    let drawn = sample.steps.as_ref().map_or(0, |s| s.drawn) as f64;
    match sample.span_ms > 0.0 {
        true => drawn * 1e3 / sample.span_ms,
        false => 0.0,
    }
}

impl State {
    pub(super) fn new(peer: &str) -> Self {
        Self {
            peer: peer.to_owned(),
            workers: Vec::new(),
            models: Vec::new(),
            devices: Vec::new(),
            seen: BTreeMap::new(),
            events: VecDeque::new(),
            chosen: String::new(),
            page: Page::Overview,
            said: String::new(),
            lost: None,
            now: 0,
        }
    }

    pub(super) fn take(&mut self, update: Update) {
        match update {
            Update::Lists(lists) => self.lists(lists),
            Update::Lost(why) => self.lost = Some(why),
            Update::Sample(sample) => {
                self.now = self.now.max(sample.time_ms);
                let seen = self.seen.entry(sample.worker.clone()).or_default();
                seen.blind = None;
                seen.tokens.push_back(rate(&sample).round() as u64);
                if seen.tokens.len() > KEPT {
                    seen.tokens.pop_front();
                }
                seen.sample = *sample;
            }
            Update::Blind(worker, why) => {
                let seen = self.seen.entry(worker).or_default();
                // Nothing runs in one that is not there.
                seen.sample = v1::WatchSample::default();
                seen.blind = Some(why);
            }
            Update::Event(event) => {
                self.now = self.now.max(event.time_ms);
                self.events.push_back(event_line(&event));
                if self.events.len() > EVENTS {
                    self.events.pop_front();
                }
            }
            Update::Report(text) => self.page = Page::Report(text, 0),
            Update::Said(text) => self.said = text,
        }
    }

    fn lists(&mut self, lists: Lists) {
        self.lost = None;
        self.workers = lists.workers;
        self.models = lists.models;
        self.devices = lists.devices;
        let there = |id: &str| self.workers.iter().any(|w| w.id == id);
        self.seen.retain(|id, _| there(id));
        if !there(&self.chosen) {
            let first = self.workers.first().map(|w| w.id.clone());
            self.chosen = first.unwrap_or_default();
        }
    }

    /// Which of the workers is looked at.
    pub(super) fn row(&self) -> Option<usize> {
        self.workers.iter().position(|w| w.id == self.chosen)
    }

    fn choose(&mut self, step: isize) {
        let row = self.row().unwrap_or(0).saturating_add_signed(step);
        let row = row.min(self.workers.len().saturating_sub(1));
        if let Some(worker) = self.workers.get(row) {
            self.chosen.clone_from(&worker.id);
        }
    }

    /// What a key or a new size does; other things are not listened to.
    pub(super) fn event(&mut self, event: &Event) -> Option<Action> {
        let Event::Key(key) = event else {
            return None;
        };
        if key.kind == KeyEventKind::Release {
            return None;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return Some(Action::Quit);
        }
        let page = std::mem::replace(&mut self.page, Page::Overview);
        match page {
            Page::Overview => return self.key(key.code),
            Page::Help => {}
            Page::Report(text, line) => {
                let last = text.lines().count().saturating_sub(1);
                let last = u16::try_from(last).unwrap_or(u16::MAX);
                let line = match key.code {
                    KeyCode::Up | KeyCode::Char('k') => line.saturating_sub(1),
                    KeyCode::Down | KeyCode::Char('j') => line.saturating_add(1).min(last),
                    KeyCode::PageUp => line.saturating_sub(20),
                    KeyCode::PageDown | KeyCode::Char(' ') => line.saturating_add(20).min(last),
                    KeyCode::Home => 0,
                    KeyCode::End => last,
                    _ => return None,
                };
                self.page = Page::Report(text, line);
            }
        }
        None
    }

    fn key(&mut self, code: KeyCode) -> Option<Action> {
        self.said.clear();
        let worker = self.chosen.clone();
        let of_worker = |action: Action| (!worker.is_empty()).then_some(action);
        match code {
            KeyCode::Char('q') | KeyCode::Esc => Some(Action::Quit),
            KeyCode::Up | KeyCode::Char('k') => {
                self.choose(-1);
                None
            }
            KeyCode::Down | KeyCode::Char('j') => {
                self.choose(1);
                None
            }
            KeyCode::Char('?' | 'h') => {
                self.page = Page::Help;
                None
            }
            KeyCode::Enter => of_worker(Action::Crash(worker.clone())),
            KeyCode::Char('t') => {
                self.said = format!("tracing {worker} for a second");
                of_worker(Action::Trace(worker.clone(), self.now))
            }
            KeyCode::Char('c') => {
                self.said = format!("waiting for the next request on {worker}");
                of_worker(Action::Capture(worker.clone(), self.now))
            }
            KeyCode::Char('r') => of_worker(Action::Release(worker.clone())),
            KeyCode::Char('d') => of_worker(Action::Drain(worker.clone())),
            KeyCode::Char('R') => of_worker(Action::Restart(worker.clone())),
            _ => None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    pub(in crate::cli::top) fn press(state: &mut State, code: KeyCode) -> Option<Action> {
        state.event(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)))
    }

    /// Two workers, of which the first is at work.
    pub(in crate::cli::top) fn host() -> State {
        let mut state = State::new("unix:/run/hotcell.sock");
        let worker = |id: &str| v1::WorkerInfo {
            id: id.into(),
            pid: 7,
            epoch: 2,
            state: v1::WorkerState::Ready.into(),
            lease: Some(v1::Lease {
                device: "cpu:0".into(),
                ..v1::Lease::default()
            }),
            models: vec!["kjv".into()],
            deaths: 1,
            ..v1::WorkerInfo::default()
        };
        state.take(Update::Lists(Lists {
            workers: vec![worker("w0"), worker("w1")],
            models: vec![v1::ModelInfo {
                name: "kjv\u{1b}[2J".into(),
                ..v1::ModelInfo::default()
            }],
            devices: vec![v1::Device::default()],
        }));
        state.take(Update::Sample(Box::new(v1::WatchSample {
            worker: "w0".into(),
            time_ms: 3_723_004,
            span_ms: 500.0,
            doing: "stepping".into(),
            steps: Some(v1::WatchedSteps {
                count: 10,
                drawn: 20,
                busy_ms: 250.0,
                p50_ms: 2.5,
                ..v1::WatchedSteps::default()
            }),
            requests: vec![v1::WatchedRequest {
                request_id: "moses".into(),
                state: v1::WatchedState::Drawing.into(),
                tokens: 12,
                ..v1::WatchedRequest::default()
            }],
            ..v1::WatchSample::default()
        })));
        state
    }

    #[test]
    fn keys_are_for_the_worker_that_is_chosen() {
        let mut state = host();
        assert_eq!(state.chosen, "w0");
        press(&mut state, KeyCode::Down);
        press(&mut state, KeyCode::Down);
        assert_eq!(state.chosen, "w1");
        let asked = press(&mut state, KeyCode::Enter);
        assert_eq!(asked, Some(Action::Crash("w1".into())));
        press(&mut state, KeyCode::Char('k'));
        let asked = press(&mut state, KeyCode::Char('t'));
        assert_eq!(asked, Some(Action::Trace("w0".into(), 3_723_004)));
        // A text is scrolled and left without another key's doing.
        state.take(Update::Report("a\nb\nc\n".into()));
        press(&mut state, KeyCode::End);
        assert_eq!(state.page, Page::Report("a\nb\nc\n".into(), 2));
        assert_eq!(press(&mut state, KeyCode::Char('q')), None);
        assert_eq!(state.page, Page::Overview);
        assert_eq!(press(&mut state, KeyCode::Char('q')), Some(Action::Quit));
        // Who is gone is not looked at any more.
        state.chosen = "w9".into();
        let (workers, models, devices) = (Vec::new(), Vec::new(), Vec::new());
        state.take(Update::Lists(Lists {
            workers,
            models,
            devices,
        }));
        assert_eq!((state.chosen.as_str(), state.seen.len()), ("", 0));
        for code in [KeyCode::Enter, KeyCode::Char('c'), KeyCode::Char('r')] {
            assert_eq!(press(&mut state, code), None);
        }
    }

    #[test]
    fn what_comes_is_kept_for_a_while() {
        let mut state = host();
        for n in 0..1000 {
            state.take(Update::Sample(Box::new(v1::WatchSample {
                worker: "w0".into(),
                ..v1::WatchSample::default()
            })));
            state.take(Update::Event(v1::Event {
                message: n.to_string(),
                ..v1::Event::default()
            }));
        }
        assert_eq!(state.seen["w0"].tokens.len(), KEPT);
        assert_eq!(state.events.len(), EVENTS);
        assert!(state.events[EVENTS - 1].ends_with("999"));
        state.take(Update::Blind("w0".into(), "gone".into()));
        assert!(state.seen["w0"].sample.requests.is_empty());
    }
}
