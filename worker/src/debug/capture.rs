//! What is computed for the tokens of one request, as it is told: statistics and a hash of each row, and values within a
//! budget.

use std::{
    io,
    sync::{Arc, atomic::AtomicUsize},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_graph::{DType, Value, wire};
use hotcell_ipc::background::LOWEST_NICE;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    plan_part::PlanPart,
    v1::{self, captured::Kind},
};
use prost::Message;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::{
    guard::{Guarded, conditions, wire as hit_on_wire},
    pieces::all_pieces,
    watched::Watched,
};
use crate::{
    engine::Inside,
    generate::batch::{Aim, Guard, Hit, Look, Looker, Own, Probe},
    host::{Host, Loaded},
    model::points::{Graphs, LOGITS, Point, Step, select},
};

/// Until a message that was taken for a connection has left the process.
const FLUSH: Duration = Duration::from_millis(50);

/// The same of a hit, of which there may be one in each step.
const HIT_FLUSH: Duration = Duration::from_millis(2);

/// Checks what nodes are asked for.
///
/// # Errors
/// [`Reason::LimitExceeded`].
pub fn check_selection(nodes: &[String], layers: &[u32]) -> Result<(), Error> {
    let over = |what: &str, count: usize, limit: usize| match count > limit {
        true => Err(Error::new(
            Reason::LimitExceeded,
            format!("{count} {what}; the limit is {limit}"),
        )),
        false => Ok(()),
    };
    over("patterns of nodes", nodes.len(), limits::MAX_NODE_PATTERNS)?;
    over("layers", layers.len(), limits::MAX_NAMED_LAYERS)?;
    let longest = nodes.iter().map(String::len).max().unwrap_or(0);
    over("bytes in a pattern", longest, limits::MAX_NODE_PATTERN)
}

/// The nodes that were meant.
///
/// # Errors
/// [`Reason::InvalidArgument`] when there are none, naming some.
pub fn selected(points: &[Point], nodes: &[String], layers: &[u32]) -> Result<Vec<usize>, Error> {
    let chosen = select(points, nodes, layers);
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let some: Vec<&str> = points.iter().take(4).map(|p| p.name.as_str()).collect();
    let what = format!(
        "no node is of these patterns and layers; there are {} nodes, such as {}",
        points.len(),
        some.join(", ")
    );
    Err(Error::new(Reason::InvalidArgument, what))
}

/// A node as it is told.
pub fn told(point: &Point) -> v1::CapturedNode {
    v1::CapturedNode {
        name: point.name.clone(),
        op: point.op.to_owned(),
        layer: point.layer,
        weight: point.weight.clone(),
        dtype: point.spec.dtype.name().to_owned(),
        dims: point.row_dims(),
        place: match (point.value, point.graph) {
            (Value::Node { node, .. }, Graphs::Body) => Some(node),
            _ => None,
        },
        output: match (point.value, point.graph) {
            (Value::Node { output, .. }, Graphs::Body) => output,
            _ => 0,
        },
    }
}

/// Tokens that are looked at: as many as are asked for (0: all), or as many as a capture holds of so many nodes.
fn most_tokens(asked: u64, nodes: usize) -> u64 {
    let rows = limits::MAX_CAPTURED_ROWS / (nodes as u64).max(1);
    let most = rows.clamp(1, limits::MAX_CAPTURED_TOKENS);
    match asked {
        0 => most,
        asked => asked.min(most),
    }
}

/// Tokens of so many bytes that may wait to be told. A request that waits for its reader is not to run far ahead.
fn buffer(waits: bool, bytes: usize) -> usize {
    let range = limits::CAPTURE_BUFFERS;
    match waits {
        true => *range.start(),
        false => (limits::CAPTURE_WAITING / bytes.max(1)).clamp(*range.start(), *range.end()),
    }
}

/// A capture that is about to be told.
pub struct Capture {
    options: v1::CaptureOptions,
    nodes: Vec<v1::CapturedNode>,
    /// Whether each node's rows tell the token.
    telling: Vec<bool>,
    /// Tokens at most.
    tokens: u64,
    /// The model's body on the wire, and what makes logits of its output.
    graphs: [Vec<u8>; 2],
    model: String,
    numerics: v1::NumericsClass,
    /// Tokens of the answer, from the first one on.
    expected: Vec<u32>,
    looks: mpsc::Receiver<Look>,
    /// How the plan's steps are named, if that is to be told.
    plan: Option<v1::CapturedPlan>,
    watched: Option<Watched>,
}

/// A step of a plan as it is told.
fn told_step(step: &Step) -> v1::CapturedNode {
    v1::CapturedNode {
        name: step.name.clone(),
        op: step.op.to_owned(),
        layer: step.layer,
        weight: step.weight.clone(),
        ..v1::CapturedNode::default()
    }
}

impl Capture {
    /// Has a model's requests looked at: from the next step on.
    ///
    /// # Errors
    /// When the options are out of range, no node is meant, or so much cannot be looked at.
    pub async fn begin(
        host: &Host,
        model: &Loaded,
        aim: Aim,
        waits: bool,
        options: v1::CaptureOptions,
    ) -> Result<Self, Error> {
        check_selection(&options.nodes, &options.layers)?;
        if options.max_bytes > limits::MAX_CAPTURE_BYTES {
            let most = limits::MAX_CAPTURE_BYTES;
            let what = format!("a capture has at most {most} bytes of values");
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        let (name, wanted) = (model.name.clone(), options.clone());
        let logits = (model.vocab as usize).saturating_mul(DType::F32.block_bytes());
        let arm = move |inside: &mut Inside<'_>| {
            let gone = || Error::new(Reason::ModelNotFound, format!("model {name} is gone"));
            let batch = inside.models.get_mut(&name).ok_or_else(gone)?;
            let points = match wanted.only_logits {
                true => Vec::new(),
                false => selected(batch.points_of_body(), &wanted.nodes, &wanted.layers)?,
            };
            let looked = || points.iter().filter_map(|&n| batch.points().get(n));
            let nodes: Vec<v1::CapturedNode> = looked().map(told).collect();
            let telling: Vec<bool> = looked().map(|point| point.is_of_token).collect();
            let sizes = looked().map(|point| point.row_bytes().unwrap_or(usize::MAX));
            let size = sizes.fold(logits, usize::saturating_add);
            let tokens = most_tokens(wanted.tokens, nodes.len() + 1);
            let (to, looks) = mpsc::channel(buffer(waits, size));
            let mut probe = Probe::new(aim, points, tokens, to);
            probe.waits = waits;
            probe.prefix = wanted.prefix;
            batch.look(inside.device, Looker::Probe(probe))?;
            let graphs = [batch.graph(), batch.head_graph()];
            let graphs = graphs.map(|graph| wire::encode(graph).encode_to_vec());
            Ok::<_, Error>((nodes, telling, graphs, tokens, looks))
        };
        let armed = host.engine().inside(arm).await??;
        let (mut nodes, mut telling, graphs, tokens, looks) = armed;
        telling.push(false);
        nodes.push(v1::CapturedNode {
            name: LOGITS.to_owned(),
            op: LOGITS.to_owned(),
            layer: None,
            weight: String::new(),
            dtype: DType::F32.name().to_owned(),
            dims: vec![model.vocab.into()],
            place: None,
            output: 0,
        });
        Ok(Self {
            options,
            nodes,
            telling,
            tokens,
            graphs,
            model: model.name.clone(),
            numerics: model.numerics.clone(),
            expected: Vec::new(),
            looks,
            plan: None,
            watched: None,
        })
    }

    /// Has all nodes looked at under these conditions, too, and tells where one holds for this request.
    ///
    /// # Errors
    /// When the conditions are odd, or so much cannot be looked at.
    pub async fn watch(
        &mut self,
        host: &Host,
        request: &str,
        wanted: &[v1::Condition],
    ) -> Result<(), Error> {
        let conditions = conditions(wanted)?;
        let (to, hits) = mpsc::channel(limits::HIT_BUFFER);
        let untold = Arc::new(AtomicUsize::new(0));
        let own = Own {
            request: request.to_owned(),
            untold: Arc::clone(&untold),
        };
        let (name, reveal) = (self.model.clone(), self.options.reveal);
        let arm = move |inside: &mut Inside<'_>| {
            let gone = || Error::new(Reason::ModelNotFound, format!("model {name} is gone"));
            let batch = inside.models.get_mut(&name).ok_or_else(gone)?;
            let nodes = Guarded::all(batch.points(), reveal);
            let points = (0..nodes.len()).collect();
            let mut guard = Guard::new(points, conditions, to);
            guard.own = Some(own);
            batch.look(inside.device, Looker::Guard(guard))?;
            Ok::<_, Error>(nodes)
        };
        let nodes = host.engine().inside(arm).await??;
        self.watched = Some(Watched {
            hits,
            nodes,
            untold,
        });
        Ok(())
    }

    /// Tells first how the plans' steps are named.
    ///
    /// # Errors
    /// When the model is gone.
    pub async fn follow(&mut self, host: &Host) -> Result<(), Error> {
        let name = self.model.clone();
        let ask = move |inside: &mut Inside<'_>| {
            let gone = || Error::new(Reason::ModelNotFound, format!("model {name} is gone"));
            let batch = inside.models.get_mut(&name).ok_or_else(gone)?;
            let of = |part| batch.plan_steps(part).iter().map(told_step).collect();
            Ok::<_, Error>(v1::CapturedPlan {
                steps: of(PlanPart::Body),
                logits_steps: of(PlanPart::Logits),
                looked_steps: of(PlanPart::Looked),
                looked_logits_steps: of(PlanPart::LookedLogits),
            })
        };
        self.plan = Some(host.engine().inside(ask).await??);
        Ok(())
    }

    /// Says of each token whether it is the one of these, which begin with the answer's first.
    pub fn expect(&mut self, tokens: Vec<u32>) {
        self.expected = tokens;
    }

    fn head(&self, host: &Host, mut request: v1::GenerateRequest) -> v1::CaptureHead {
        let revealed = self.options.reveal;
        if !revealed {
            (request.prompt, request.resume) = (None, None);
            (request.grammar, request.stop) = (None, Vec::new());
        }
        let (worker, epoch) = host.identity();
        let [graph, logits_graph] = self.graphs.clone();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        v1::CaptureHead {
            worker,
            epoch: epoch.0,
            model: self.model.clone(),
            numerics: Some(self.numerics.clone()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            request: Some(request),
            revealed,
            nodes: self.nodes.clone(),
            graph,
            logits_graph,
            time_ms: since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// Tells how the plan's steps are named, if that is to be told, and has it on its way: the request that comes next may
    /// kill this process, and what waits here then is lost.
    ///
    /// # Errors
    /// When nobody reads.
    pub async fn tell_plan(
        &mut self,
        to: &mpsc::Sender<Result<v1::Captured, Status>>,
    ) -> Result<(), mpsc::error::SendError<()>> {
        let Some(plan) = self.plan.take() else {
            return Ok(());
        };
        to.reserve().await?.send(Ok(say(Kind::Plan(plan))));
        leaves(to, FLUSH).await
    }

    /// Tells it until the request ends, all tokens are told, or nobody reads. Once `over` says how the request ended,
    /// nothing more comes.
    pub async fn tell(
        self,
        host: Host,
        to: mpsc::Sender<Result<v1::Captured, Status>>,
        over: impl Future<Output = Option<Status>>,
    ) {
        let engine = host.engine().clone();
        self.tell_all(host, to, over).await;
        engine.leave_alone().await;
    }

    async fn tell_all(
        mut self,
        host: Host,
        to: mpsc::Sender<Result<v1::Captured, Status>>,
        over: impl Future<Output = Option<Status>>,
    ) {
        let mut over = std::pin::pin!(over);
        let aside = match aside() {
            Ok(aside) => aside,
            Err(error) => {
                let why = Status::resource_exhausted(format!("no thread for a capture: {error}"));
                let _ = to.send(Err(why)).await;
                return;
            }
        };
        let (mut is_over, mut failed) = (false, None);
        let mut watched = self.watched.take();
        let (worker, epoch) = host.identity();
        let model = self.model.clone();
        let of_hit = |hit: Hit, nodes: &[Guarded]| {
            let hit = hit_on_wire(hit, nodes, &model, (&worker, epoch.0));
            Ok(say(Kind::Hit(hit)))
        };
        let mut end = v1::CaptureEnd::default();
        let mut left = match self.options.max_bytes {
            0 => limits::CAPTURE_BYTES,
            bytes => bytes,
        };
        let dtypes = self.nodes.iter().map(|node| DType::from_name(&node.dtype));
        let dtypes = dtypes.map(|d| d.unwrap_or(DType::F32));
        let revealed = self.options.reveal;
        let telling = self.telling.iter().map(|tells| *tells && !revealed);
        let kinds: Vec<(DType, bool)> = dtypes.zip(telling).collect();
        loop {
            let look = tokio::select! {
                look = self.looks.recv() => look,
                Some(hit) = next_hit(&mut watched) => {
                    let nodes = watched.as_ref().map_or(&[][..], |watched| &watched.nodes);
                    if to.send(of_hit(hit, nodes)).await.is_err() || leaves(&to, HIT_FLUSH).await.is_err() {
                        return;
                    }
                    watched.iter().for_each(Watched::told);
                    host.engine().wake();
                    continue;
                }
                status = &mut over, if !is_over => {
                    (is_over, failed) = (true, status);
                    // What was seen before is there already.
                    self.looks.close();
                    continue;
                }
                () = to.closed() => return,
            };
            let Some(mut look) = look else { break };
            // A request that waits for us may go on.
            host.engine().wake();
            if let Some(request) = look.request.take() {
                let head = Kind::Head(self.head(&host, *request));
                if to.send(Ok(say(head))).await.is_err() {
                    return;
                }
            }
            let at = usize::try_from(look.index).unwrap_or(usize::MAX);
            let drawn = !look.logits.is_empty();
            let expected = self.expected.get(at).filter(|_| drawn);
            let as_expected = expected.map(|want| look.token == Some(*want));
            end.tokens += u64::from(drawn);
            match as_expected {
                Some(true) => end.as_expected += 1,
                Some(false) => {
                    end.differs_at.get_or_insert(look.index);
                }
                None => {}
            }
            let token = v1::CapturedToken {
                index: look.index,
                position: look.position,
                token: look.token.filter(|_| self.options.reveal),
                as_expected,
                missed: look.missed,
                ..v1::CapturedToken::default()
            };
            let (values, own) = (self.options.values as usize, kinds.clone());
            // Beside the event loop: hashing large rows takes its time.
            let (answer, answered) = oneshot::channel();
            let work = move || drop(answer.send(all_pieces(token, look, &own, values, left)));
            if aside.send(Box::new(work)).is_err() {
                return;
            }
            let Ok(told) = answered.await else { return };
            left = left.saturating_sub(told.bytes);
            end.left_out += told.left_out;
            end.left_out_bytes += told.left_out_bytes;
            for piece in told.pieces {
                if to.send(Ok(say(Kind::Token(piece)))).await.is_err() {
                    return;
                }
            }
        }
        if let Some(mut watched) = watched {
            while let Ok(hit) = watched.hits.try_recv() {
                if to.send(of_hit(hit, &watched.nodes)).await.is_err() {
                    return;
                }
            }
        }
        let last = match failed {
            Some(status) if end.tokens == 0 => Err(status),
            failed => {
                end.full = failed.is_none()
                    && end.tokens >= self.tokens
                    && (self.options.tokens == 0 || self.options.tokens > self.tokens);
                // What it failed of is what one wants to see.
                end.failed = failed.map_or_else(String::new, |status| status.message().to_owned());
                Ok(say(Kind::End(end)))
            }
        };
        // To one who left this goes nowhere.
        let _ = to.send(last).await;
    }
}

/// Waits until what was sent last has left the process, as far as that can be known: once there is room again it was taken,
/// and the connection's task, which was woken by that, writes it before this one is woken by the clock.
async fn leaves(
    to: &mpsc::Sender<Result<v1::Captured, Status>>,
    flush: Duration,
) -> Result<(), mpsc::error::SendError<()>> {
    drop(to.reserve().await?);
    tokio::time::sleep(flush).await;
    Ok(())
}

/// The next hit, if anybody looks for one.
async fn next_hit(watched: &mut Option<Watched>) -> Option<Hit> {
    match watched {
        Some(watched) => watched.hits.recv().await,
        None => None,
    }
}

/// Something to be done by another thread.
type Work = Box<dyn FnOnce() + Send>;

/// A thread that does what it is sent when those who serve leave it the processor; until nobody can send any more.
fn aside() -> io::Result<std::sync::mpsc::Sender<Work>> {
    let (send, receive) = std::sync::mpsc::channel::<Work>();
    let run = move || {
        // Where it is refused, it takes its share.
        // SAFETY: takes numbers only, and 0 is this thread.
        let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, LOWEST_NICE) };
        for work in receive {
            work();
        }
    };
    let thread = std::thread::Builder::new().name("capture".to_owned());
    thread.spawn(run)?;
    Ok(send)
}

fn say(kind: Kind) -> v1::Captured {
    v1::Captured { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_ends_where_its_header_would_be_too_long() {
        assert_eq!((most_tokens(7, 100), most_tokens(0, 100)), (7, 2621));
        assert_eq!(most_tokens(u64::MAX, 1), limits::MAX_CAPTURED_ROWS);
        assert_eq!(most_tokens(0, usize::MAX), 1);
    }

    #[test]
    fn small_tokens_wait_in_numbers_and_large_ones_do_not() {
        assert_eq!(buffer(false, 16 << 10), 1024);
        assert_eq!(buffer(false, 1 << 20), 64);
        assert_eq!((buffer(false, usize::MAX), buffer(false, 0)), (4, 1024));
        assert_eq!(buffer(true, 1), 4);
    }
}
