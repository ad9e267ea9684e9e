//! What a reduction asks: what values were, and whether something small fails on the sides.

use std::collections::HashMap;

use hotcell_graph::{Graph, Shape, TensorSpec, Value, graph::Node, op::Effect};
use hotcell_proto::{
    error::{Error, Reason},
    v1::{CaptureOptions, GenerateRequest, prompt},
};

use super::Struck;
use crate::{
    cli::{
        GlobalFlags,
        debug::{
            compare::Again,
            sides::{Side, SideFlags},
        },
        exit::Failure,
        interrupt::Interrupt,
        ui::Ui,
    },
    debug::{
        Case, Recorded,
        reduce::{CacheRows, World},
    },
    local::Bundled,
    tensor::{HostTensor, Session},
};

/// Whether an error says that something cannot be computed in this form, and nothing else.
fn is_refused(error: &Error) -> bool {
    matches!(
        error.reason(),
        Reason::GraphInvalid
            | Reason::OpUnsupported
            | Reason::IndexOutOfRange
            | Reason::InvalidArgument
            | Reason::LimitExceeded
            | Reason::QuotaExceeded
            | Reason::OutOfMemory
    )
}

/// Whether an error says that a worker died over what was asked of it.
fn is_death(error: &Error) -> bool {
    matches!(error.reason(), Reason::WorkerLost | Reason::GraphPoisoned)
}

/// How it is tried.
pub(super) enum Trial<'a> {
    /// Computed on both, what the second one says being expected.
    Both(Session, Session),
    One(Session),
    /// On a scheduler of its own each time, whose worker dies.
    Thrown {
        ui: &'a mut Ui,
        global: &'a GlobalFlags,
        sides: &'a SideFlags,
        bundled: Bundled,
    },
}

/// What comes of a case: the result, and the expected one. None if it cannot be computed in this form.
pub(super) type Outcome = Option<(HostTensor, Option<HostTensor>)>;

pub(super) async fn output(session: &Session, case: &Case) -> Result<Option<HostTensor>, Error> {
    match session.run(&case.graph, &case.inputs).await {
        Ok(results) => Ok(results.into_iter().next()),
        Err(error) if is_refused(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the worker of a side dies over a case.
pub(super) async fn dies(side: Side, case: &Case) -> Result<bool, Failure> {
    let session = side.tensors().await?;
    let done = output(&session, case).await;
    drop(session);
    side.end().await;
    match done {
        Err(error) if is_death(&error) => Ok(true),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(false),
    }
}

impl Trial<'_> {
    pub(super) async fn outcome(&self, case: &Case) -> Result<Outcome, Failure> {
        let (session, reference) = match self {
            Self::Both(session, reference) => (session, Some(reference)),
            Self::One(session) => (session, None),
            Self::Thrown { .. } => return Ok(None),
        };
        let Some(found) = output(session, case).await? else {
            return Ok(None);
        };
        let expected = match reference {
            None => None,
            Some(reference) => match output(reference, case).await? {
                None => return Ok(None),
                expected => expected,
            },
        };
        Ok(Some((found, expected)))
    }
}

/// What the search asks.
pub(super) struct Lab<'a, 'b> {
    pub(super) graph: &'a Graph,
    pub(super) struck: &'a Struck,
    /// Nodes by their values in the graph.
    pub(super) numbers: HashMap<Value, usize>,
    /// The node that logits are made of, where the graph is the one that makes them.
    pub(super) hidden: Option<usize>,
    /// The request's tokens, its prompt's first.
    pub(super) tokens: Vec<u32>,
    /// Who has the model's weights.
    pub(super) weights: Session,
    /// Who runs the request again, to see what caches held.
    pub(super) again: &'a mut Again<'b>,
    pub(super) interrupt: &'a mut Interrupt,
    pub(super) trial: Trial<'a>,
    pub(super) tries: u64,
}

/// A number that a row of the step has, as the graph's input is.
fn scalar(value: u64) -> Option<HostTensor> {
    let value = i32::try_from(value).ok()?;
    HostTensor::from_slice(&[value], &[1]).ok()
}

/// One tensor of many that are its parts along the first axis; none for none, or for parts of several kinds.
fn stacked(parts: &[HostTensor]) -> Option<HostTensor> {
    let first = parts.first()?;
    if parts.iter().any(|part| part.spec() != first.spec()) {
        return None;
    }
    let dims: Vec<usize> = std::iter::once(parts.len()).chain(first.shape()).collect();
    let spec = TensorSpec::new(first.spec().dtype, Shape::fixed(&dims).ok()?).ok()?;
    let bytes: Vec<u8> = parts.iter().flat_map(|p| p.bytes().to_vec()).collect();
    HostTensor::new(spec, bytes).ok()
}

impl Lab<'_, '_> {
    /// A row of a node as it was at the token, as a step of one row has it.
    fn row_of(&self, number: usize) -> Result<Option<HostTensor>, Failure> {
        let row = self.struck.row()?;
        let values = row.nodes.get(number);
        let tensor = values.and_then(|values| self.struck.recording.tensor(number, values));
        Ok(tensor.and_then(|value| stacked(&[value])))
    }

    /// What two nodes were at every position up to the token's own.
    async fn all_rows(&mut self, names: [String; 2]) -> Result<Option<CacheRows>, Failure> {
        let options = CaptureOptions {
            nodes: names.to_vec(),
            layers: Vec::new(),
            only_logits: false,
            tokens: 1,
            prefix: true,
            ..self.again.options.clone()
        };
        let from = (&self.again.request, self.struck.token);
        let Some(side) = self.again.sides.last_mut() else {
            return Ok(None);
        };
        let told = side.replay(from, options, self.interrupt).await?;
        let rows: Vec<&Recorded> = told.prefix.iter().chain(&told.tokens).collect();
        let places = rows.iter().map(|row| row.position);
        if !places.eq(0..=self.struck.row()?.position) {
            return Ok(None);
        }
        let all = |name: &String| {
            let number = told.head.nodes.iter().position(|node| node.name == *name)?;
            let parts = rows
                .iter()
                .map(|row| told.tensor(number, row.nodes.get(number)?));
            stacked(&parts.collect::<Option<Vec<_>>>()?)
        };
        let [keys, values] = &names;
        let both = all(keys).zip(all(values));
        Ok(both.map(|(keys, values)| CacheRows { keys, values }))
    }
}

impl World for Lab<'_, '_> {
    type Error = Failure;

    async fn value(&mut self, value: Value) -> Result<Option<HostTensor>, Failure> {
        if let Value::Input(at) = value {
            let input = self.graph.inputs().get(at as usize);
            let Some(input) = input else { return Ok(None) };
            if input.constant {
                let model = &self.struck.recording.head.model;
                let weight = self.weights.weight(model, &input.name).await?;
                return Ok(Some(weight.fetch().await?));
            }
            let row = self.struck.row()?;
            let token = usize::try_from(row.position)
                .ok()
                .and_then(|at| self.tokens.get(at));
            return Ok(match input.name.as_str() {
                "hidden" => match self.hidden {
                    Some(number) => self.row_of(number)?,
                    None => None,
                },
                "picks" => scalar(0),
                "positions" => scalar(row.position),
                "tokens" => token.and_then(|token| scalar(u64::from(*token))),
                _ => None,
            });
        }
        let Some(&number) = self.numbers.get(&value) else {
            return Ok(None);
        };
        self.row_of(number)
    }

    async fn cache(&mut self, cache: Value) -> Result<Option<CacheRows>, Failure> {
        // A worker that dies at the node tells nothing of its step.
        if matches!(self.trial, Trial::Thrown { .. }) {
            return Ok(None);
        }
        let mut nodes = self.graph.nodes().iter();
        let writes = |node: &&Node| match node.op.effect {
            Effect::Writes(at) => node.inputs.get(at) == Some(&cache),
            _ => false,
        };
        let Some([_, keys, values, _]) = nodes.find(writes).map(|node| &node.inputs[..]) else {
            return Ok(None);
        };
        let known = |value: &Value| self.numbers.contains_key(value);
        match known(keys) && known(values) {
            true => self.all_rows([self.name(*keys), self.name(*values)]).await,
            false => Ok(None),
        }
    }

    fn name(&self, value: Value) -> String {
        if let Value::Input(at) = value
            && let Some(input) = self.graph.inputs().get(at as usize)
        {
            return input.name.clone();
        }
        let number = self.numbers.get(&value);
        let node = number.and_then(|at| self.struck.recording.head.nodes.get(*at));
        node.map_or_else(|| format!("{value:?}"), |node| node.name.clone())
    }

    async fn fails(&mut self, case: &Case) -> Result<bool, Failure> {
        self.tries += 1;
        if let Trial::Thrown {
            ui,
            global,
            sides,
            bundled,
        } = &mut self.trial
        {
            let side = Side::prepare(ui, global, (sides, 0), None, *bundled).await?;
            return dies(side, case).await;
        }
        Ok(match self.trial.outcome(case).await? {
            None => false,
            Some((found, expected)) => self.struck.fault.is_in(&found, expected.as_ref())?,
        })
    }
}

/// All tokens of a request up to the last one that it drew.
pub(super) fn tokens_of(request: &GenerateRequest) -> Vec<u32> {
    let prompt = request.prompt.as_ref().and_then(|p| p.kind.as_ref());
    let mut all = match prompt {
        Some(prompt::Kind::Ids(ids)) => ids.ids.clone(),
        _ => Vec::new(),
    };
    let resume = request.resume.as_ref();
    all.extend(resume.iter().flat_map(|resume| &resume.generated_ids));
    all
}
