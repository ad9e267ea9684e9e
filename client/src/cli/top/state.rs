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
/// Samples that a request's tokens per second are taken from.
const PACED: usize = 8;
/// Lines that a key for a page goes on by.
const LEAF: usize = 20;

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
    /// From this line on.
    Help(usize),
    /// A text, from this line on.
    Report(String, usize),
    /// Of which this one is looked at.
    Devices(usize),
    /// The requests of all workers, from this one on.
    Streams(usize),
}

impl Page {
    /// What a key opens.
    fn opened(code: KeyCode) -> Option<Self> {
        match code {
            KeyCode::Char('?' | 'h') => Some(Self::Help(0)),
            KeyCode::Char('v') => Some(Self::Devices(0)),
            KeyCode::Char('s') => Some(Self::Streams(0)),
            _ => None,
        }
    }
}

/// Where a key leads to in a list whose last line is this one.
fn moved(code: KeyCode, at: usize, last: usize) -> Option<usize> {
    let to = match code {
        KeyCode::Up | KeyCode::Char('k') => at.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => at.saturating_add(1),
        KeyCode::PageUp => at.saturating_sub(LEAF),
        KeyCode::PageDown | KeyCode::Char(' ') => at.saturating_add(LEAF),
        KeyCode::Home => 0,
        KeyCode::End => last,
        _ => return None,
    };
    Some(to.min(last))
}

/// What a worker told of itself.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) sample: v1::WatchSample,
    /// Tokens per second, the newest last.
    pub(super) tokens: VecDeque<u64>,
    /// Why there is nothing newer.
    pub(super) blind: Option<String>,
    /// By request: when it was told of, in milliseconds, and the tokens that it had then; the newest last.
    paces: BTreeMap<String, VecDeque<(u64, u64)>>,
}

impl Seen {
    /// Nothing runs in one that is not there.
    fn forget(&mut self) {
        self.sample = v1::WatchSample::default();
        self.paces.clear();
    }

    fn take(&mut self, mut sample: v1::WatchSample) {
        self.blind = None;
        self.tokens.push_back(rate(&sample).round() as u64);
        if self.tokens.len() > KEPT {
            self.tokens.pop_front();
        }
        if sample.epoch != self.sample.epoch {
            self.paces.clear();
        } else if sample.busy {
            // In a long step it cannot tell: it is as it was, and the lists do not come and go.
            sample.caches = std::mem::take(&mut self.sample.caches);
            sample.requests = std::mem::take(&mut self.sample.requests);
            sample.memory = std::mem::take(&mut self.sample.memory);
            sample.tensors = self.sample.tensors.take();
        }
        if !sample.busy {
            self.pace(&sample);
        }
        self.sample = sample;
    }

    fn pace(&mut self, sample: &v1::WatchSample) {
        // Embeddings have no id, and draw nothing.
        let named = sample.requests.iter().filter(|r| !r.request_id.is_empty());
        let mut paces = BTreeMap::new();
        for request in named {
            let told = self.paces.remove(&request.request_id);
            let mut told: VecDeque<(u64, u64)> = told.unwrap_or_default();
            told.push_back((sample.time_ms, request.tokens));
            if told.len() > PACED {
                told.pop_front();
            }
            paces.insert(request.request_id.clone(), told);
        }
        self.paces = paces;
    }

    /// Tokens per second that a request has drawn lately.
    fn pace_of(&self, request: &str) -> Option<f64> {
        let told = self.paces.get(request)?;
        let (&(from, before), &(to, after)) = (told.front()?, told.back()?);
        let time = to.checked_sub(from).filter(|&time| time > 0)?;
        Some(after.saturating_sub(before) as f64 * 1e3 / time as f64)
    }
}

/// A request, and the worker that has it.
pub(super) struct Stream<'a> {
    pub(super) worker: &'a str,
    pub(super) request: &'a v1::WatchedRequest,
    /// Tokens per second that it has drawn lately; missing before it was told of twice.
    pub(super) pace: Option<f64>,
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
                seen.take(*sample);
            }
            Update::Blind(worker, why) => {
                let seen = self.seen.entry(worker).or_default();
                seen.forget();
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
        for worker in self.workers.iter().filter(|w| w.pid == 0) {
            if let Some(seen) = self.seen.get_mut(&worker.id) {
                seen.forget();
            }
        }
        if !there(&self.chosen) {
            let first = self.workers.first().map(|w| w.id.clone());
            self.chosen = first.unwrap_or_default();
        }
    }

    /// Which of the workers is looked at.
    pub(super) fn row(&self) -> Option<usize> {
        self.workers.iter().position(|w| w.id == self.chosen)
    }

    /// The requests of all workers: those that draw, those that read, those that wait. Among these they are in the order
    /// of the workers, and the oldest first, so that they stay where they are from one sample to the next.
    pub(super) fn streams(&self) -> Vec<Stream<'_>> {
        let mut streams = Vec::new();
        for worker in &self.workers {
            let Some(seen) = self.seen.get(&worker.id) else {
                continue;
            };
            let first = streams.len();
            streams.extend(seen.sample.requests.iter().map(|request| Stream {
                worker: &worker.id,
                request,
                pace: seen.pace_of(&request.request_id),
            }));
            streams[first..].sort_by(|a, b| b.request.age_ms.total_cmp(&a.request.age_ms));
        }
        streams.sort_by_key(|stream| match stream.request.state() {
            v1::WatchedState::Drawing => 0,
            v1::WatchedState::Reading => 1,
            v1::WatchedState::Waiting => 2,
            v1::WatchedState::Unspecified => 3,
        });
        streams
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
        let (code, devices) = (key.code, self.devices.len());
        let page = match std::mem::replace(&mut self.page, Page::Overview) {
            Page::Overview => return self.key(code),
            // How many lines there are is known where they are drawn.
            Page::Help(line) => moved(code, line, usize::MAX).map(Page::Help),
            Page::Streams(line) => moved(code, line, usize::MAX).map(Page::Streams),
            Page::Devices(row) => moved(code, row, devices.saturating_sub(1)).map(Page::Devices),
            Page::Report(text, line) => {
                let last = text.lines().count().saturating_sub(1);
                moved(code, line, last).map(|line| Page::Report(text, line))
            }
        };
        // Every other key goes back.
        self.page = page
            .or_else(|| Page::opened(code))
            .unwrap_or(Page::Overview);
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
            _ => {
                self.page = Page::opened(code).unwrap_or(Page::Overview);
                None
            }
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
