//! Sessions on several devices that compute one expression: each node where its greatest input lies, what travels on the way.
//!
//! The sessions of a [`Spread`] may be mixed in expressions. Where one is computed, its graph is split
//! ([`hotcell_graph::split`]), the parts are executed one after the other, and a value that a part of another device reads
//! goes there: through memory that both workers share, or, where they cannot (no scheduler's socket on this host, or a
//! session that recovers), through this process. Nobody reads that memory before the call that writes it is answered.

mod carry;

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use hotcell_graph::{
    Graph, Shape, TensorSpec, Value,
    graph::Node,
    op::{Effect, ValueSpec},
    split::{Part, Placed, assign, cut},
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::PlanMemory,
};

pub(super) use self::carry::carried;
use self::carry::{Lane, Lanes};
use super::{
    array::{State, Tensor, invalid, of_graph},
    program::Program,
    recover::again,
    session::{Inner, Session, SessionOptions},
    stream::Order,
};
use crate::connect::Address;

/// Tensors of this process up to this size go wherever they are read.
const SMALL: usize = 64 << 10;

/// Sessions on several devices of one host, mixed freely in expressions. Clones share them.
#[derive(Clone)]
pub struct Spread(Arc<[(String, Session)]>);

/// What the sessions of a spread know of each other.
pub(super) struct Group {
    members: Vec<Member>,
    lanes: Lanes,
    /// From so many elements on a weight of the last one goes to the first; [`NEVER`] is none.
    offload: AtomicUsize,
}

const NEVER: usize = usize::MAX;

struct Member {
    /// The session keeps the group, not the other way round.
    session: Weak<Inner>,
    /// Ops the device has kernels for.
    ops: BTreeSet<String>,
}

impl Spread {
    /// Opens a session on each of these devices, for example `["cuda:0", "cpu:0"]`. The first is preferred for what lies
    /// nowhere, the last one computes what the others cannot. Each recovers by itself if the options say so; what went from
    /// one to the other is then kept by this process.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for no device, more than [`limits::MAX_SPLIT_DEVICES`] or one named twice; what
    /// [`Session::open`] says.
    pub async fn open(
        address: &Address,
        devices: &[&str],
        options: &SessionOptions,
    ) -> Result<Self, Error> {
        if !(1..=limits::MAX_SPLIT_DEVICES).contains(&devices.len()) {
            return Err(invalid(format!(
                "a spread has 1 to {} devices, not {}",
                limits::MAX_SPLIT_DEVICES,
                devices.len()
            )));
        }
        let mut sessions: Vec<(String, Session)> = Vec::with_capacity(devices.len());
        for device in devices {
            if sessions.iter().any(|(known, _)| known == device) {
                return Err(invalid(format!("device {device} is named twice")));
            }
            let options = SessionOptions {
                device: Some((*device).to_owned()),
                worker: None,
                ..options.clone()
            };
            let session = Session::open(address, options).await?;
            sessions.push(((*device).to_owned(), session));
        }
        Self::of(sessions).await
    }

    /// Makes a spread of open sessions that are in none.
    pub(super) async fn of(sessions: Vec<(String, Session)>) -> Result<Self, Error> {
        let mut members = Vec::with_capacity(sessions.len());
        for (_, session) in &sessions {
            members.push(Member {
                session: session.downgrade(),
                ops: session.describe().await?.ops.into_iter().collect(),
            });
        }
        let group = Arc::new(Group {
            members,
            lanes: Lanes::default(),
            offload: AtomicUsize::new(NEVER),
        });
        for (_, session) in &sessions {
            session.join(&group)?;
        }
        Ok(Self(sessions.into()))
    }

    /// The session on a device.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] naming the devices that there are.
    pub fn on(&self, device: &str) -> Result<&Session, Error> {
        let found = self.0.iter().find(|(known, _)| known == device);
        found.map(|(_, session)| session).ok_or_else(|| {
            let there: Vec<&str> = self.devices().collect();
            invalid(format!(
                "the spread has no device {device:?}; it has {}",
                there.join(", ")
            ))
        })
    }

    /// Sets from how many elements on, which an op reads besides, a model's weight on the last device is worth being sent to
    /// the first device that has the op (ggml's `offload_op`, there for 32 rows and more); `None`, as at first: never, the
    /// op is computed where the weight lies. A weight that is sent is sent anew each time.
    pub fn set_offload(&self, least: Option<usize>) {
        if let Some(group) = self.0.first().and_then(|(_, session)| session.group()) {
            group
                .offload
                .store(least.unwrap_or(NEVER), Ordering::Relaxed);
        }
    }

    /// Its devices, the preferred one first.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(device, _)| device.as_str())
    }
}

impl Group {
    /// Its sessions that somebody still has, and of each the ops that its device has.
    fn present(&self) -> Vec<(Session, &BTreeSet<String>)> {
        let there = self.members.iter();
        there
            .filter_map(|m| Some((Session::upgrade(&m.session)?, &m.ops)))
            .collect()
    }
}

fn place_of(sessions: &[(Session, &BTreeSet<String>)], session: &Session) -> Option<usize> {
    sessions
        .iter()
        .position(|(known, _)| known.is_same(session))
}

/// One program that is computed on several devices.
struct Journey<'a> {
    group: &'a Group,
    sessions: &'a [Session],
    /// The program's inputs, as its graph has them.
    inputs: &'a [Tensor],
    rows: usize,
    /// Values by device: where they were made and where they went.
    there: HashMap<(Value, usize), Tensor>,
    /// By how many parts, and as what results, a value on a device is still needed.
    needed: HashMap<(Value, usize), usize>,
    /// Memory that calls of this program wrote. When all of them are answered, others may use it; if not, nobody should.
    lanes: Vec<Lane>,
}

impl Session {
    /// Whether a program with these inputs, whose results are these tensors', is computed by this session alone.
    pub(super) fn alone<'a>(&self, mut tensors: impl Iterator<Item = &'a Tensor>) -> bool {
        self.group().is_none()
            || tensors.all(|t| t.0.session.as_ref().is_none_or(|s| s.is_same(self)))
    }

    /// How a program of several sessions of this one's spread is computed.
    fn route(
        &self,
        program: &Program,
        inputs: &[Tensor],
        homes: &[Option<Session>],
    ) -> Result<Route, Error> {
        let alone = || invalid("tensors of several sessions are computed in a spread only");
        let group = self.group().ok_or_else(alone)?;
        let present = group.present();
        let gone = || {
            invalid("a session of the spread is gone; keep the spread while its tensors are used")
        };
        let home = |session: &Session| place_of(&present, session).ok_or_else(gone);
        let mut at = Vec::with_capacity(inputs.len());
        for tensor in inputs {
            at.push(match (tensor.state(), &tensor.0.session) {
                (State::Host { data, .. }, _) if data.bytes().len() <= SMALL => None,
                (_, Some(session)) => Some(home(session)?),
                (_, None) => None,
            });
        }
        let computes = |device: usize, node: &Node| {
            let has = |ops: &BTreeSet<String>| {
                ops.contains(node.op.name)
                    || (node.op.decompose.is_some() && node.op.effect == Effect::None)
            };
            // The last one is asked anyway: its refusal says more than ours could.
            device + 1 == present.len() || present.get(device).is_some_and(|(_, ops)| has(ops))
        };
        let placed = Placed {
            devices: present.len(),
            inputs: &at,
            computes: &computes,
            weights: &|input| match inputs.get(input).map(Tensor::state) {
                Some(State::Remote(remote)) => remote.is_weight,
                _ => false,
            },
            offload: Some(group.offload.load(Ordering::Relaxed)).filter(|least| *least != NEVER),
        };
        let on = assign(&program.graph, &placed).map_err(|e| of_graph(&e))?;
        let parts = cut(&program.graph, &on).map_err(|e| of_graph(&e))?;
        let homes = homes
            .iter()
            .map(|session| home(session.as_ref().unwrap_or(self)))
            .collect::<Result<Vec<usize>, Error>>()?;
        let sessions = present.into_iter().map(|(session, _)| session).collect();
        Ok(Route {
            sessions,
            parts,
            on,
            homes,
            group,
        })
    }

    /// Computes a program of several sessions of this one's spread; its results are each on the session of `homes`.
    ///
    /// # Errors
    /// As [`Session::eval`], and [`Reason::InvalidArgument`] when a session of the spread that is needed is gone.
    pub(super) async fn compute_spread(
        &self,
        program: &Program,
        inputs: &[Tensor],
        rows: usize,
        homes: &[Option<Session>],
        order: &Order,
    ) -> Result<Vec<Tensor>, Error> {
        if self.is_dry_run() {
            return Ok(vec![]);
        }
        let route = self.route(program, inputs, homes)?;
        let mut journey = Journey {
            group: &route.group,
            sessions: &route.sessions,
            inputs,
            rows,
            there: HashMap::new(),
            needed: HashMap::new(),
            lanes: vec![],
        };
        let results = journey.results(&program.graph, &route);
        for part in &route.parts {
            let own = journey.session(part.device)?.is_same(self);
            let order = if own {
                order.waited()
            } else {
                Order::default()
            };
            journey.run(part, &order).await?;
        }
        let arrived = journey.arrive(&results).await?;
        journey.lanes.into_iter().for_each(Lane::give_back);
        Ok(arrived)
    }

    /// What a program with these inputs, whose results are these tensors', would take by session: of this one, or of each that
    /// computes a part of it. Nothing is computed.
    ///
    /// # Errors
    /// As [`Compiled::reserve`](super::Compiled::reserve).
    pub(super) async fn reserve_program(
        &self,
        program: &Program,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<Vec<(Session, PlanMemory)>, Error> {
        if !self.alone(inputs.iter().chain(outputs)) {
            return self.reserve_spread(program, inputs).await;
        }
        Ok(vec![(self.clone(), self.measured(program).await?)])
    }

    /// What the plan of a program would take, by a dry run.
    async fn measured(&self, program: &Program) -> Result<PlanMemory, Error> {
        let (graph, key) = program.encode()?;
        let made = again!(self, at => at.compile(graph.clone(), key.clone(), true));
        Ok(made?.1)
    }

    async fn reserve_spread(
        &self,
        program: &Program,
        inputs: &[Tensor],
    ) -> Result<Vec<(Session, PlanMemory)>, Error> {
        let route = self.route(program, inputs, &vec![None; program.graph.outputs().len()])?;
        let mut taken = Vec::with_capacity(route.parts.len());
        for part in &route.parts {
            let none = || Error::new(Reason::Internal, "a part of a graph is on no device");
            let session = route.sessions.get(part.device).ok_or_else(none)?;
            let program = Program {
                graph: part.graph.clone(),
                inputs: vec![],
            };
            taken.push((session.clone(), session.measured(&program).await?));
        }
        Ok(taken)
    }
}

/// How a program is computed: by whom, in which parts.
struct Route {
    sessions: Vec<Session>,
    parts: Vec<Part>,
    /// The device of each node.
    on: Vec<usize>,
    /// Where each result belongs.
    homes: Vec<usize>,
    group: Arc<Group>,
}

/// A result of the whole: its value, the device that has it and the one where it belongs.
struct Arrival {
    value: Value,
    from: usize,
    to: usize,
}

impl Journey<'_> {
    fn session(&self, device: usize) -> Result<&Session, Error> {
        let none = || Error::new(Reason::Internal, "a part of a graph is on no device");
        self.sessions.get(device).ok_or_else(none)
    }

    /// Counts what is needed where, and says where the results come from.
    fn results(&mut self, graph: &Graph, route: &Route) -> Vec<Arrival> {
        for part in &route.parts {
            for value in &part.inputs {
                *self.needed.entry((*value, part.device)).or_default() += 1;
            }
        }
        let outputs = graph.outputs().iter().zip(&route.homes);
        let arrivals = outputs.map(|(value, to)| {
            let from = match value {
                Value::Node { node, .. } => route.on.get(*node as usize).copied(),
                _ => None,
            };
            let from = from.unwrap_or(*to);
            *self.needed.entry((*value, from)).or_default() += 1;
            Arrival {
                value: *value,
                from,
                to: *to,
            }
        });
        arrivals.collect()
    }

    /// A value for one of those who need it on a device; the last one takes it.
    fn take(&mut self, value: Value, device: usize) -> Option<Tensor> {
        let left = self.needed.entry((value, device)).or_default();
        *left = left.saturating_sub(1);
        match *left {
            0 => self.there.remove(&(value, device)),
            _ => self.there.get(&(value, device)).cloned(),
        }
    }

    /// An input of the whole graph on a device.
    async fn input(&mut self, value: Value, index: u32, device: usize) -> Result<Tensor, Error> {
        if let Some(there) = self.take(value, device) {
            return Ok(there);
        }
        let none = || Error::new(Reason::Internal, "a graph has another input");
        let tensor = self.inputs.get(index as usize).ok_or_else(none)?.clone();
        let session = self.session(device)?.clone();
        let there = carried(&tensor, &session).await?;
        if self.needed.get(&(value, device)).is_some_and(|n| *n > 0) {
            self.there.insert((value, device), there.clone());
        }
        Ok(there)
    }

    /// Executes a part, and sends on what others read of it.
    async fn run(&mut self, part: &Part, order: &Order) -> Result<(), Error> {
        let session = self.session(part.device)?.clone();
        let mut inputs = Vec::with_capacity(part.inputs.len());
        for value in &part.inputs {
            inputs.push(match value {
                Value::Input(index) => self.input(*value, *index, part.device).await?,
                value => {
                    let lost = || Error::new(Reason::Internal, "a value did not arrive");
                    self.take(*value, part.device).ok_or_else(lost)?
                }
            });
        }
        let program = Program {
            graph: part.graph.clone(),
            inputs,
        };
        let mut sent = Vec::with_capacity(part.sent.len());
        for (value, to) in &part.sent {
            let spec = self.spec(&part.graph, part.kept.len() + sent.len())?;
            let lane = self.group.lanes.take(&session, self.session(*to)?, &spec);
            let lane = lane.await;
            sent.push((*value, *to, spec, lane));
        }
        let results = again!(&session, at => async {
            let Some(plan) = session.plan(&at, &program).await? else {
                return Err(invalid("a dry run computes nothing, and splits no graph"));
            };
            let lanes: Vec<_> = sent.iter().map(|(.., lane)| lane.as_ref().map(Lane::written)).collect();
            let counts = (part.kept.len(), &lanes[..]);
            session.call_into(&at, &plan, self.rows, &program.inputs, counts, order).await
        })?;
        let mut results = results.into_iter();
        let missing = || Error::new(Reason::Internal, "a call had fewer results than wishes");
        for (i, value) in part.kept.iter().enumerate() {
            let remote = results.next().flatten().ok_or_else(missing)?;
            let spec = self.spec(&part.graph, i)?;
            let made = session.tensor_at(remote, spec, "a part of a split graph");
            if self
                .needed
                .get(&(*value, part.device))
                .is_some_and(|n| *n > 0)
            {
                self.there.insert((*value, part.device), made);
            }
        }
        for (value, to, spec, lane) in sent {
            let made = results.next().ok_or_else(missing)?;
            let target = self.session(to)?;
            let arrived = match (lane, made) {
                (Some(lane), _) => {
                    let read = target.tensor_at(lane.read(), spec, "a part of a split graph");
                    self.lanes.push(lane);
                    read
                }
                (None, Some(remote)) => {
                    let made = session.tensor_at(remote, spec, "a part of a split graph");
                    carried(&made, target).await?
                }
                (None, None) => return Err(missing()),
            };
            self.there.insert((value, to), arrived);
        }
        Ok(())
    }

    /// What output `i` of a part is, at this call's rows.
    fn spec(&self, graph: &Graph, i: usize) -> Result<TensorSpec, Error> {
        let odd = || Error::new(Reason::Internal, "a part of a graph has no such result");
        let value = graph.outputs().get(i).ok_or_else(odd)?;
        let ValueSpec::Tensor(spec) = graph.spec(*value).map_err(|e| of_graph(&e))? else {
            return Err(odd());
        };
        let dims = spec.shape.dims().iter().map(|d| d.at(self.rows));
        let dims: Vec<usize> = dims.collect();
        let shape = Shape::fixed(&dims).map_err(|e| of_graph(&e))?;
        TensorSpec::new(spec.dtype, shape).map_err(|e| of_graph(&e))
    }

    /// The results where they belong.
    async fn arrive(&mut self, results: &[Arrival]) -> Result<Vec<Tensor>, Error> {
        let mut arrived = Vec::with_capacity(results.len());
        for Arrival { value, from, to } in results {
            let made = match value {
                Value::Input(index) => self.input(*value, *index, *to).await?,
                value => {
                    let lost = || Error::new(Reason::Internal, "a result was not computed");
                    self.take(*value, *from).ok_or_else(lost)?
                }
            };
            arrived.push(carried(&made, self.session(*to)?).await?);
        }
        Ok(arrived)
    }
}
