//! What happens, told to whoever watches.

use std::time::{SystemTime, UNIX_EPOCH};

use hotcell_proto::{
    limits,
    v1::{Event, EventKind},
};
use tokio::sync::broadcast;

use crate::death::Death;

/// Where events are told and heard.
#[derive(Clone, Debug)]
pub struct Events(broadcast::Sender<Event>);

impl Default for Events {
    fn default() -> Self {
        Self(broadcast::Sender::new(limits::WATCH_BUFFER))
    }
}

/// What an event is about; empty parts are left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct About<'a> {
    /// A worker's name.
    pub worker: &'a str,
    /// Its epoch.
    pub epoch: u64,
    /// A model's name.
    pub model: &'a str,
}

impl Events {
    /// Tells all watchers. One that does not keep up loses the oldest, and learns how many.
    pub fn tell(&self, kind: EventKind, about: About<'_>, message: impl Into<String>) {
        // An error means that nobody watches.
        let _ = self.0.send(event(kind, about, message.into()));
    }

    /// Tells all watchers that a worker died.
    pub fn tell_death(&self, about: About<'_>, death: &Death) {
        let told = event(EventKind::WorkerDied, about, death.to_string());
        let _ = self.0.send(Event {
            exit_kind: death.kind.name().to_owned(),
            ..told
        });
    }

    /// Hears what happens from now on.
    pub fn watch(&self) -> broadcast::Receiver<Event> {
        self.0.subscribe()
    }
}

fn event(kind: EventKind, about: About<'_>, message: String) -> Event {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    Event {
        kind: kind.into(),
        time_ms: since.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
        worker: about.worker.to_owned(),
        epoch: about.epoch,
        model: about.model.to_owned(),
        message,
        exit_kind: String::new(),
    }
}

/// The event for a watcher that missed `count` others.
pub fn missed(count: u64) -> Event {
    event(
        EventKind::Missed,
        About::default(),
        format!("{count} events were missed"),
    )
}
