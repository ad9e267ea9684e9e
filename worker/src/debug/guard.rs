//! Watchpoints: conditions on nodes' values, looked at in every step while somebody wants to know.

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use tokio::sync::mpsc;
use tonic::Status;

use super::capture::{check_selection, selected, told};
use crate::{
    engine::Inside,
    generate::batch::{Condition, Guard, Hit, Looker},
    host::{Host, Loaded},
    model::{points::Point, run::RowSize},
};

fn condition(wire: &v1::Condition) -> Result<Condition, Error> {
    use v1::condition::Kind;
    let odd = |what: &str| Err(Error::new(Reason::InvalidArgument, what));
    Ok(match &wire.kind {
        Some(Kind::Nan(true)) => Condition::Nan,
        Some(Kind::Infinite(true)) => Condition::Infinite,
        Some(Kind::Zero(true)) => Condition::Zero,
        Some(Kind::Above(most)) if most.is_finite() && *most >= 0.0 => Condition::Above(*most),
        Some(Kind::Above(_)) => return odd("a bound must be a number of at least 0"),
        Some(Kind::RmsOutside(v1::Range { least, most })) if least <= most => {
            Condition::RmsOutside(*least, *most)
        }
        Some(Kind::RmsOutside(_)) => return odd("a range's least must not be above its most"),
        _ => return odd("a condition says nothing"),
    })
}

/// What must not be.
///
/// # Errors
/// [`Reason::LimitExceeded`] for none or too many, [`Reason::InvalidArgument`] for an odd one.
pub fn conditions(wire: &[v1::Condition]) -> Result<Vec<Condition>, Error> {
    if !(1..=limits::MAX_CONDITIONS).contains(&wire.len()) {
        let most = limits::MAX_CONDITIONS;
        let what = format!("a watchpoint has 1 to {most} conditions");
        return Err(Error::new(Reason::LimitExceeded, what));
    }
    wire.iter().map(condition).collect()
}

/// Looks at a model's nodes until nobody reads any more.
///
/// # Errors
/// When the conditions are odd, no node is meant, or so much cannot be looked at.
pub async fn guard(
    host: Host,
    model: &Loaded,
    request: v1::GuardRequest,
    to: mpsc::Sender<Result<v1::GuardEvent, Status>>,
) -> Result<(), Error> {
    check_selection(&request.nodes, &request.layers)?;
    let conditions = conditions(&request.conditions)?;
    let (hits_to, mut hits) = mpsc::channel(limits::HIT_BUFFER);
    let name = model.name.clone();
    let arm = move |inside: &mut Inside<'_>| {
        let gone = || Error::new(Reason::ModelNotFound, format!("model {name} is gone"));
        let batch = inside.models.get_mut(&name).ok_or_else(gone)?;
        let points = selected(batch.points(), &request.nodes, &request.layers)?;
        let nodes = Guarded::all(batch.points(), request.reveal);
        let count = points.len();
        let mut guard = Guard::new(points, conditions, hits_to);
        guard.ends = request.end;
        batch.look(inside.device, Looker::Guard(guard))?;
        Ok::<_, Error>((nodes, count))
    };
    let (nodes, count) = host.engine().inside(arm).await??;
    let model = model.name.clone();
    tokio::spawn(async move {
        let say = |kind| v1::GuardEvent { kind: Some(kind) };
        let armed = u32::try_from(count).unwrap_or(u32::MAX);
        let mut next = say(v1::guard_event::Kind::Armed(armed));
        let (worker, epoch) = host.identity();
        loop {
            if to.send(Ok(next)).await.is_err() {
                break;
            }
            let hit = tokio::select! {
                hit = hits.recv() => hit,
                () = to.closed() => break,
            };
            let Some(hit) = hit else { break };
            next = say(v1::guard_event::Kind::Hit(wire(
                hit,
                &nodes,
                &model,
                (&worker, epoch.0),
            )));
        }
        // Closed before the engine looks who is there.
        drop(hits);
        host.engine().leave_alone().await;
    });
    Ok(())
}

/// A node as its hits are told.
pub struct Guarded {
    node: v1::CapturedNode,
    /// Whether its numbers tell of a token that is not to be revealed.
    withheld: bool,
}

impl Guarded {
    /// All of them, by their numbers.
    pub fn all(points: &[Point], reveal: bool) -> Vec<Self> {
        let guarded = points.iter().map(|point| Self {
            node: told(point),
            withheld: point.is_of_token && !reveal,
        });
        guarded.collect()
    }
}

/// A hit as it is told.
pub fn wire(
    hit: Hit,
    nodes: &[Guarded],
    model: &str,
    (worker, epoch): (&str, u64),
) -> v1::GuardHit {
    let node = nodes.get(hit.point);
    let RowSize { peak, mean_square } = hit.size;
    let tells = peak.is_finite() && mean_square.is_finite() && peak > 0.0;
    let withheld = tells && node.is_none_or(|node| node.withheld);
    let (peak, rms) = match withheld {
        true => (0.0, 0.0),
        false => (peak, mean_square.sqrt()),
    };
    v1::GuardHit {
        worker: worker.to_owned(),
        epoch,
        model: model.to_owned(),
        request_id: hit.request,
        node: node.map(|guarded| guarded.node.clone()),
        condition: u32::try_from(hit.condition).unwrap_or(u32::MAX),
        position: hit.position,
        token: (hit.position + 1).saturating_sub(hit.prompt),
        peak,
        rms,
        further: hit.further,
        ended: hit.ended,
        missed: hit.missed,
        withheld,
    }
}

#[cfg(test)]
mod tests {
    use v1::condition::Kind;

    use super::*;

    #[test]
    fn numbers_that_follow_from_one_token_are_told_to_those_who_may_know_it() {
        let nodes = |withheld| {
            let node = v1::CapturedNode::default();
            [Guarded { node, withheld }]
        };
        let told = |peak, withheld| {
            let hit = Hit {
                request: String::new(),
                point: 0,
                condition: 0,
                position: 0,
                prompt: 1,
                size: RowSize {
                    peak,
                    mean_square: 4.0,
                },
                further: 0,
                ended: false,
                missed: 0,
            };
            let hit = wire(hit, &nodes(withheld), "m", ("w", 1));
            (hit.peak, hit.rms, hit.withheld)
        };
        assert_eq!(told(3.0, false), (3.0, 2.0, false));
        assert_eq!(told(3.0, true), (0.0, 0.0, true));
        assert_eq!(told(f32::INFINITY, true), (f32::INFINITY, 2.0, false));
        assert_eq!(told(0.0, true), (0.0, 2.0, false));
    }

    #[test]
    fn odd_conditions_are_refused() {
        let of = |kind| condition(&v1::Condition { kind });
        assert_eq!(of(Some(Kind::Nan(true))).unwrap(), Condition::Nan);
        assert_eq!(of(Some(Kind::Above(2.5))).unwrap(), Condition::Above(2.5));
        let range = |least, most| Some(Kind::RmsOutside(v1::Range { least, most }));
        assert_eq!(
            of(range(0.0, 1.0)).unwrap(),
            Condition::RmsOutside(0.0, 1.0)
        );
        for odd in [
            None,
            Some(Kind::Nan(false)),
            Some(Kind::Above(f32::NAN)),
            Some(Kind::Above(-1.0)),
            range(2.0, 1.0),
            range(f32::NAN, 1.0),
        ] {
            assert_eq!(of(odd).unwrap_err().reason(), Reason::InvalidArgument);
        }
    }
}
