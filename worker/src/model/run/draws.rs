//! Tokens that the device draws, where the host would have to fetch whole rows of logits to do it.

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    cpu::draw::{Limits, MOST_ON_DEVICES, halves},
    plan::{Plan, PlanHints, Slot},
};

use super::{RunError, RunShape, Runner};
use crate::model::weave::BuildError;

/// Bytes for each row of logits: a temperature, four numbers of noise, three limits, and a token.
pub(super) const ROW_BYTES: usize = 36;

/// How a token is drawn of a row of logits that nobody changes: what the sampler draws by these.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// 0: the largest.
    pub temperature: f32,
    /// Which tokens are left.
    pub limits: Limits,
    /// Keys the noise.
    pub seed: u64,
    /// Keys the noise: which of a request's several answers this is.
    pub branch: u32,
    /// Keys the noise: the token's place in its sequence.
    pub position: u32,
}

/// The plan that draws, and what it works with.
pub(super) struct Draws {
    pub plan: Box<dyn Plan>,
    temperatures: Buffer,
    noise: Buffer,
    limits: Buffer,
    tokens: Buffer,
    /// What is to be drawn in the next step.
    wanted: Vec<Option<Draw>>,
    /// What was in the last one; nothing of rows of which nothing was wanted.
    drawn: Vec<Option<u32>>,
    scratch: Vec<i32>,
    read: Vec<u8>,
}

/// Whether tokens are drawn on the device: where the host does not see its memory, and rows are no longer than it takes.
pub(super) fn draws_on(device: &dyn Device, vocab: usize) -> bool {
    let is_apart = device.buffer_types().first().is_some_and(|t| !t.is_host);
    is_apart && vocab <= MOST_ON_DEVICES && device.ops().contains(&"draw")
}

impl Draws {
    /// For rows of logits that lie in a buffer.
    pub fn new(
        device: &dyn Device,
        shape: &RunShape,
        vocab: usize,
        logits: &Buffer,
        hints: &PlanHints,
    ) -> Result<Self, RunError> {
        let rows = shape.max_sequences;
        let mut plan = device.plan(&graph(rows, vocab).map_err(BuildError::from)?, hints)?;
        let temperatures = device.allocate("temperatures", rows * 4)?;
        let noise = device.allocate("noise", rows * 16)?;
        let limits = device.allocate("limits of draws", rows * 12)?;
        let tokens = device.allocate("drawn tokens", rows * 4)?;
        for (i, buffer) in [logits, &temperatures, &noise, &limits]
            .into_iter()
            .enumerate()
        {
            plan.bind(Slot::Input(i), buffer, 0)?;
        }
        plan.bind(Slot::Output(0), &tokens, 0)?;
        Ok(Self {
            plan,
            temperatures,
            noise,
            limits,
            tokens,
            wanted: Vec::with_capacity(rows),
            drawn: Vec::with_capacity(rows),
            scratch: Vec::with_capacity(rows * 4),
            read: vec![0; rows * 4],
        })
    }

    /// Puts down what is wanted of the logits of a step with so many rows of them. Says whether anything is.
    pub fn prepare(&mut self, rows: usize) -> Result<bool, DeviceError> {
        self.drawn.clear();
        if self.wanted.len() != rows || self.wanted.iter().all(Option::is_none) {
            self.wanted.clear();
            return Ok(false);
        }
        let bits = |x: u32| x.cast_signed();
        let wanted = self.wanted.iter();
        self.scratch.clear();
        let temperature = |draw: &Option<Draw>| draw.map_or(0.0, |draw| draw.temperature);
        self.scratch
            .extend(wanted.map(|draw| bits(temperature(draw).to_bits())));
        self.temperatures.write_i32(0, &self.scratch)?;
        self.scratch.clear();
        for draw in &self.wanted {
            let noise = draw.map_or([0; 4], |draw| {
                let [low, high] = halves(draw.seed);
                [low, high, draw.branch, draw.position]
            });
            self.scratch.extend(noise.map(bits));
        }
        self.noise.write_i32(0, &self.scratch)?;
        self.scratch.clear();
        for draw in &self.wanted {
            let limits = draw.map_or(Limits::NONE, |draw| draw.limits);
            let numbers = [limits.top_k, limits.top_p, limits.min_p];
            self.scratch.extend(numbers.map(|x| bits(x.to_bits())));
        }
        self.limits.write_i32(0, &self.scratch)?;
        Ok(true)
    }

    /// Reads what was drawn, once it was.
    pub fn finish(&mut self) -> Result<(), DeviceError> {
        let count = self.wanted.len();
        let read = self.read.get_mut(..count * 4).unwrap_or_default();
        self.tokens.read(0, read)?;
        let (tokens, _) = read.as_chunks::<4>();
        let tokens = tokens.iter().map(|token| i32::from_le_bytes(*token));
        let drawn = self.wanted.drain(..).zip(tokens);
        // None is drawn of logits that are broken, or where too many tokens may be left: whoever reads the row says how, or draws.
        let drawn = drawn.map(|(wanted, token)| wanted.and_then(|_| u32::try_from(token).ok()));
        self.drawn.extend(drawn);
        Ok(())
    }
}

/// Rows of logits, their temperatures, noise and limits to tokens.
pub(super) fn graph(rows: usize, vocab: usize) -> Result<Graph, GraphError> {
    let mut builder = GraphBuilder::new(rows);
    let spec = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::rows(dims)?);
    let logits = builder.tensor("logits", spec(DType::F32, &[vocab])?)?;
    let temperatures = builder.tensor("temperatures", spec(DType::F32, &[])?)?;
    let noise = builder.tensor("noise", spec(DType::U32, &[4])?)?;
    let limits = builder.tensor("limits", spec(DType::F32, &[3])?)?;
    let tokens = builder.draw(logits, temperatures, noise, Some(limits))?;
    builder.finish(&[tokens])
}

impl Runner {
    /// Whether the device draws tokens.
    pub fn draws(&self) -> bool {
        self.draws.is_some()
    }

    /// Says what to draw of each row of logits of the next step, if the device does.
    pub fn want_drawn(&mut self, wanted: impl IntoIterator<Item = Option<Draw>>) {
        if let Some(draws) = &mut self.draws {
            draws.wanted.clear();
            draws.wanted.extend(wanted);
        }
    }

    /// What was drawn of the `i`-th row of logits of the last step. `None`: nothing, for nothing was to be, or the logits are
    /// broken.
    pub fn drawn(&self, i: usize) -> Option<u32> {
        *self.draws.as_ref()?.drawn.get(i)?
    }
}
