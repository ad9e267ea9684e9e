//! Guards: conditions on nodes' values in every row of every step.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hotcell_kernels::backend::DeviceError;
use hotcell_proto::error::{Error, Reason};
use tokio::sync::mpsc;

use super::{Batch, compute::Outcome};
use crate::model::run::RowSize;

/// What must not be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Condition {
    /// A value is NaN.
    Nan,
    /// A value is infinite, and none NaN.
    Infinite,
    /// An absolute value is above.
    Above(f32),
    /// The root of the mean square is outside.
    RmsOutside(f32, f32),
    /// All values are zero.
    Zero,
}

impl Condition {
    /// Whether it holds for a row's values.
    pub fn holds(self, size: RowSize) -> bool {
        match self {
            Self::Nan => size.peak.is_nan(),
            Self::Infinite => size.peak.is_infinite(),
            Self::Above(most) => size.peak > most,
            Self::RmsOutside(least, most) => !(least..=most).contains(&size.mean_square.sqrt()),
            Self::Zero => size.peak == 0.0,
        }
    }
}

/// The one request that a guard is for, which waits until each hit is on its way to who wants to know: its next step may end
/// this process.
#[derive(Clone, Debug)]
pub struct Own {
    /// The request's id.
    pub request: String,
    /// Hits that are not on their way yet.
    pub untold: Arc<AtomicUsize>,
}

/// Looks at the values of some nodes in every row of every step.
pub struct Guard {
    /// Nodes, by their numbers among the points.
    pub points: Vec<usize>,
    /// What must not be.
    pub conditions: Vec<Condition>,
    /// Whether a request ends for which it is.
    pub ends: bool,
    /// Where it is told; what has no room is counted instead.
    pub to: mpsc::Sender<Hit>,
    /// Whether it is for one request alone.
    pub own: Option<Own>,
    missed: u64,
}

impl Guard {
    /// One for these conditions.
    pub fn new(points: Vec<usize>, conditions: Vec<Condition>, to: mpsc::Sender<Hit>) -> Self {
        Self {
            points,
            conditions,
            ends: false,
            to,
            own: None,
            missed: 0,
        }
    }

    /// Whether it looks at a request.
    fn is_for(&self, request: &str) -> bool {
        self.own.as_ref().is_none_or(|own| own.request == request)
    }

    /// Whether a request has to wait until hits are told.
    pub(super) fn holds_up(&self, request: &str) -> bool {
        let own = self.own.as_ref().filter(|own| own.request == request);
        own.is_some_and(|own| own.untold.load(Ordering::Acquire) > 0) && !self.to.is_closed()
    }

    /// Tells a hit, or counts it where there is no room.
    fn tell(&mut self, mut hit: Hit) {
        hit.missed = self.missed;
        let untold = self.own.as_ref().map(|own| &own.untold);
        // Before it is there: whoever takes it counts it out again.
        if let Some(untold) = untold {
            untold.fetch_add(1, Ordering::AcqRel);
        }
        let told = self.to.try_send(hit).is_ok();
        if let (Some(untold), false) = (untold, told) {
            untold.fetch_sub(1, Ordering::AcqRel);
        }
        self.missed = if told {
            0
        } else {
            self.missed.saturating_add(1)
        };
    }
}

/// The first node at which a request met a condition in a step.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The request; empty for an embedding.
    pub request: String,
    /// The node, by its number among the points.
    pub point: usize,
    /// Which of the conditions.
    pub condition: usize,
    /// The position of the row.
    pub position: u64,
    /// Tokens of the request's prompt.
    pub prompt: u64,
    /// What the device said of the row.
    pub size: RowSize,
    /// Further nodes of the same row at which a condition holds.
    pub further: u32,
    /// Whether the request ended for it.
    pub ended: bool,
    /// Hits that were left out before this one.
    pub missed: u64,
}

impl Batch {
    /// Whether conditions hold for all that is computed.
    pub(super) fn is_guarded(&self) -> bool {
        !self.lookers.guards.is_empty()
    }

    /// After a step: tells where conditions hold, and ends the requests that end for it. Guesses from one on at which a
    /// condition holds are given up: if it was right, its token is computed by itself next, and told of then.
    pub(super) fn guard(
        &mut self,
        rows: usize,
        ended: &mut Vec<(usize, Outcome)>,
    ) -> Result<(), DeviceError> {
        let mut given_up = Vec::new();
        // The head has rows of those that draw, and of their guesses.
        let of_body = self.runner.points_of_body().len();
        let ends = self.parts.iter().filter_map(|part| {
            let guesses = self.running[part.at].guesses.len();
            part.pick.map(|pick| pick + 1 + guesses)
        });
        let picks = ends.max().unwrap_or(0);
        for guard in &mut self.lookers.guards {
            let mut sizes = Vec::with_capacity(guard.points.len());
            for &point in &guard.points {
                let rows = if point < of_body { rows } else { picks };
                sizes.push((point, self.runner.tapped_sizes(point, rows)?));
            }
            let mut hits = Vec::new();
            for part in &self.parts {
                let running = &self.running[part.at];
                let task = &running.member.task;
                if !guard.is_for(task.id()) {
                    continue;
                }
                let last = part.first + part.rows - 1;
                let holds = |&(point, ref of): &(usize, Vec<RowSize>), row: usize| {
                    let place = match point < of_body {
                        true => row,
                        false => part.pick? + row.checked_sub(last)?,
                    };
                    let size = *of.get(place)?;
                    let mut all = guard.conditions.iter();
                    let condition = all.position(|condition| condition.holds(size))?;
                    Some((point, condition, size))
                };
                let own = part.first..part.first + part.rows;
                let mut guessed = own.end..own.end + running.guesses.len();
                let caught = |row: usize| sizes.iter().any(|point| holds(point, row).is_some());
                given_up.extend(guessed.position(caught).map(|right| (part.at, right)));
                let first = own.clone().find_map(|row| {
                    let mut hits = sizes.iter().filter_map(|point| holds(point, row));
                    let first = hits.next()?;
                    Some((row, first, hits.count()))
                });
                let Some((row, (point, condition, size), further)) = first else {
                    continue;
                };
                let hit = Hit {
                    request: task.id().to_owned(),
                    point,
                    condition,
                    position: (running.computed + row - part.first) as u64,
                    prompt: task.prompt_len() as u64,
                    size,
                    further: u32::try_from(further).unwrap_or(u32::MAX),
                    ended: guard.ends,
                    missed: 0,
                };
                hits.push(hit);
                if guard.ends && !ended.iter().any(|(at, _)| *at == part.at) {
                    let name = self.runner.points().get(point).map(|p| p.name.as_str());
                    let what = format!(
                        "a watchpoint ended this request at node {}",
                        name.unwrap_or_default()
                    );
                    let error = Error::new(Reason::NumericsFailed, what);
                    let error = error.with("node", name.unwrap_or_default());
                    ended.push((part.at, Outcome::Failed(error)));
                }
            }
            for hit in hits {
                guard.tell(hit);
            }
        }
        for (at, right) in given_up {
            let running = &mut self.running[at];
            // Another watchpoint may have left fewer of them.
            let given_up = running.guesses.len().saturating_sub(right);
            running.given_up += given_up;
            running.guesses.truncate(right);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_hold_for_what_they_name_and_nothing_else() {
        let size = |peak: f32, mean_square: f32| RowSize { peak, mean_square };
        let all = [
            Condition::Nan,
            Condition::Infinite,
            Condition::Above(10.0),
            Condition::RmsOutside(0.5, 2.0),
            Condition::Zero,
        ];
        let held = |size| all.map(|condition| condition.holds(size));
        assert_eq!(held(size(3.0, 1.0)), [false; 5]);
        let nan = size(f32::NAN, f32::NAN);
        assert_eq!(held(nan), [true, false, false, true, false]);
        let infinite = size(f32::INFINITY, f32::INFINITY);
        assert_eq!(held(infinite), [false, true, true, true, false]);
        assert_eq!(held(size(11.0, 4.0)), [false, false, true, false, false]);
        assert_eq!(held(size(11.0, 4.1)), [false, false, true, true, false]);
        assert_eq!(held(size(0.0, 0.0)), [false, false, false, true, true]);
    }
}
