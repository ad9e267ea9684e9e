//! Samples of what this worker does, one after each interval, for as long as somebody watches.

use std::{
    collections::HashMap,
    ops::RangeInclusive,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hotcell_ipc::blackbox::{Doing, Node};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    plan_part::PlanPart,
    v1,
};
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval, timeout},
};
use tonic::Status;

use super::observer::{StepNote, Watching};
use crate::{
    engine::{Look, Place, names as op_names},
    host::Host,
};

/// Time between two looks at where the plans are: a fifth of a sample's, within these. Each wakes this process, and one of the
/// threads that compute may have to wait for that, and the others for it.
const LOOKS: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_millis(20);

/// How long the engine may take to say what it has; in a longer step it is shown without.
const PATIENCE: Duration = Duration::from_millis(100);

/// The interval that is asked for.
///
/// # Errors
/// [`Reason::InvalidArgument`] if it is out of range.
pub fn checked_interval(ms: u32) -> Result<Duration, Error> {
    let ms = match ms {
        0 => limits::WATCH_INTERVAL,
        ms => ms,
    };
    let range = limits::WATCH_INTERVALS;
    match range.contains(&ms) {
        true => Ok(Duration::from_millis(ms.into())),
        false => Err(Error::new(
            Reason::InvalidArgument,
            format!(
                "an interval of {ms} ms; it must be in [{}, {}]",
                range.start(),
                range.end()
            ),
        )),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The value below which this share of the sorted ones lie, at least.
fn percentile(sorted: &[Duration], share: f64) -> f64 {
    let place = (sorted.len() as f64 * share).ceil() as usize;
    let value = sorted.get(place.saturating_sub(1));
    value.map_or(0.0, |time| ms(*time))
}

fn steps(notes: &[StepNote], missed: u64) -> v1::WatchedSteps {
    let mut times: Vec<Duration> = notes.iter().map(|step| step.whole).collect();
    times.sort_unstable();
    let sum = |of: fn(&StepNote) -> usize| notes.iter().map(|step| of(step) as u64).sum();
    v1::WatchedSteps {
        count: notes.len() as u64,
        rows: sum(|step| step.rows),
        sequences: sum(|step| step.sequences),
        drawn: sum(|step| step.drawn),
        busy_ms: ms(times.iter().sum()),
        computing_ms: ms(notes.iter().map(|step| step.computing).sum()),
        p50_ms: percentile(&times, 0.5),
        p99_ms: percentile(&times, 0.99),
        max_ms: percentile(&times, 1.0),
        missed,
    }
}

/// Where plans were found, counted.
#[derive(Default)]
struct Looks {
    places: HashMap<(Option<PlanPart>, u64), (Node, u32)>,
    count: u32,
}

/// One of the places.
struct Found {
    part: Option<PlanPart>,
    node: Node,
    op: &'static str,
    seen: u32,
}

impl Looks {
    fn look(&mut self, host: &Host) {
        if let (Doing::Stepping, Some(node)) = host.engine().blackbox().seen() {
            self.count += 1;
            let key = (host.engine().blackbox().executed(), node.packed());
            self.places.entry(key).or_insert((node, 0)).1 += 1;
        }
    }

    /// The most frequent ones.
    fn most(&self, ops: &[&'static str]) -> Vec<Found> {
        let found = |(&(part, _), &(node, seen)): (&(Option<PlanPart>, u64), &(Node, u32))| Found {
            part,
            node,
            op: ops.get(usize::from(node.op)).copied().unwrap_or_default(),
            seen,
        };
        let mut places: Vec<Found> = self.places.iter().map(found).collect();
        let order = |place: &Found| {
            let part = place.part.map_or(0, |part| part as u64);
            (std::cmp::Reverse(place.seen), place.node.step, part)
        };
        places.sort_unstable_by_key(order);
        places.truncate(limits::MAX_WATCHED_NODES);
        places
    }

    /// The same as they are told: by these names, with their share of what the device computed for so many milliseconds.
    fn told(&self, most: &[Found], names: &[String], computing_ms: f64) -> Vec<v1::NodeShare> {
        let share = |(at, found): (usize, &Found)| v1::NodeShare {
            step: found.node.step,
            op: found.op.to_owned(),
            group: found.node.group,
            seen: found.seen,
            name: names.get(at).cloned().unwrap_or_default(),
            part: found
                .part
                .map(PlanPart::name)
                .unwrap_or_default()
                .to_owned(),
            ms: f64::from(found.seen) * computing_ms / f64::from(self.count.max(1)),
        };
        most.iter().enumerate().map(share).collect()
    }
}

impl Found {
    /// Where it is.
    fn place(&self) -> Place {
        Place {
            part: self.part,
            step: self.node.step,
            op: self.op,
        }
    }
}

/// Watches a worker until nobody reads any more.
pub async fn watch(
    host: Host,
    mut watching: Watching,
    every: Duration,
    to: mpsc::Sender<Result<v1::WatchSample, Status>>,
) {
    let ops: Vec<&'static str> = op_names().collect();
    let mut looking = interval((every / 5).clamp(*LOOKS.start(), *LOOKS.end()));
    looking.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut looks, mut begun, mut missed) = (Looks::default(), Instant::now(), 0);
    loop {
        tokio::select! {
            () = to.closed() => return,
            _ = looking.tick() => {}
        }
        looks.look(&host);
        if begun.elapsed() < every {
            continue;
        }
        // Before it is asked what it has, which is something to do.
        let doing = host.engine().blackbox().seen().0.name().to_owned();
        let looked = std::mem::take(&mut looks);
        let most = looked.most(&ops);
        let places = most.iter().map(Found::place).collect();
        let look = timeout(PATIENCE, host.engine().look(places, begun)).await;
        let look = match look {
            Ok(Ok(look)) => Some(look),
            Ok(Err(error)) => {
                // To a watcher that left this goes nowhere.
                let _ = to.try_send(Err(error.into()));
                return;
            }
            Err(_) => None,
        };
        let (notes, lost) = watching.steps();
        let span = begun.elapsed();
        begun = Instant::now();
        let (worker, epoch) = host.identity();
        let busy = look.is_none();
        let Look {
            caches,
            requests,
            memory,
            tensors,
            names,
        } = look.unwrap_or_default();
        let weights = match busy {
            true => Vec::new(),
            false => host.weights_in_use(),
        };
        let steps = steps(&notes, lost);
        let nodes = looked.told(&most, &names, steps.computing_ms);
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let sample = v1::WatchSample {
            worker,
            epoch: epoch.0,
            time_ms: since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
            span_ms: ms(span),
            doing,
            steps: Some(steps),
            caches,
            requests,
            memory: weights.into_iter().chain(memory).collect(),
            queue: u32::try_from(host.engine().queued()).unwrap_or(u32::MAX),
            tensors: Some(tensors),
            nodes,
            looks: looked.count,
            missed,
            busy,
        };
        match to.try_send(Ok(sample)) {
            Ok(()) => missed = 0,
            Err(mpsc::error::TrySendError::Full(_)) => missed += 1,
            Err(mpsc::error::TrySendError::Closed(_)) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(whole: u64, rows: usize) -> StepNote {
        StepNote {
            begun: Instant::now(),
            whole: Duration::from_millis(whole),
            computing: Duration::from_millis(whole / 2),
            computing_from: Instant::now(),
            rows,
            reading: 0,
            sequences: 2,
            drawn: 1,
        }
    }

    #[test]
    fn steps_are_told_by_their_sums_and_percentiles() {
        let notes: Vec<_> = (1..=100).rev().map(|n| step(n, 3)).collect();
        let told = steps(&notes, 7);
        assert_eq!((told.count, told.rows, told.missed), (100, 300, 7));
        assert_eq!((told.sequences, told.drawn), (200, 100));
        assert_eq!((told.p50_ms, told.p99_ms, told.max_ms), (50.0, 99.0, 100.0));
        assert_eq!((told.busy_ms, told.computing_ms), (5050.0, 2500.0));
        let none = steps(&[], 0);
        assert_eq!((none.count, none.max_ms), (0, 0.0));
    }

    #[test]
    fn an_interval_is_in_range() {
        assert_eq!(checked_interval(0).unwrap(), Duration::from_secs(1));
        assert_eq!(checked_interval(50).unwrap(), Duration::from_millis(50));
        for ms in [1, 49, 60_001, u32::MAX] {
            let error = checked_interval(ms).unwrap_err();
            assert!(error.message().contains("[50, 60000]"), "{error}");
        }
    }

    #[test]
    fn the_places_that_were_seen_most_come_first() {
        let mut looks = Looks::default();
        let node = |step, op| Node {
            step,
            op,
            group: false,
        };
        let body = Some(PlanPart::Body);
        for (part, node, seen) in [
            (body, node(1, 0), 2),
            (body, node(2, 1), 5),
            (None, node(3, u16::MAX), 2),
            (Some(PlanPart::Logits), node(2, 1), 1),
        ] {
            looks.places.insert((part, node.packed()), (node, seen));
            looks.count += seen;
        }
        let most = looks.most(&["add", "mul"]);
        assert_eq!(most[0].place().part, body);
        let names = ["layers.0.mul.0".to_owned(), String::new()];
        let told = looks.told(&most, &names, 20.0);
        let told: Vec<_> = told
            .iter()
            .map(|n| {
                (
                    n.part.as_str(),
                    n.step,
                    n.op.as_str(),
                    n.seen,
                    n.ms,
                    n.name.as_str(),
                )
            })
            .collect();
        let expected = [
            ("body", 2, "mul", 5, 10.0, "layers.0.mul.0"),
            ("body", 1, "add", 2, 4.0, ""),
            ("", 3, "", 2, 4.0, ""),
            ("logits", 2, "mul", 1, 2.0, ""),
        ];
        assert_eq!(told, expected);
    }
}
