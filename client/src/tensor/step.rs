//! Effects on caches in the order of the program that says them.
//!
//! Expressions are lazy and pure: when one is computed changes nothing. A cache changes, so what reads or writes it belongs to a
//! step, which keeps such ops in the order in which they were written down, whatever needs them, and computes them once.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use hotcell_graph::op::{self, Attribute, OpRow};
use hotcell_proto::{
    error::{Error, Reason},
    v1,
};

use super::{
    array::{OpNode, Tensor, Turn, checked, results},
    cache::Cache,
    compile::together,
    program::{self, Program, Scope},
    session::Session,
    stream::Order,
};

static STEPS: AtomicU64 = AtomicU64::new(1);

/// Writes to caches and attention over them, in order, with the expressions between them: one graph, which [`Step::run`] computes.
/// Steps of the same structure share one plan, so that the next tokens' step is not compiled again.
///
/// ```no_run
/// use hotcell_client::tensor::{Cache, PagedOptions, Pages, Session, Tensor};
///
/// # async fn example(session: &Session, cache: &Cache, keys: &Tensor, values: &Tensor, queries: &Tensor)
/// # -> Result<(), hotcell_client::Error> {
/// let mut step = session.step();
/// // Two tokens of one sequence, in the first slots of block 0.
/// let places = session.tensor(&[0i32, 1], &[2])?;
/// step.write(cache, keys, values, &places);
/// let pages = Pages {
///     tables: session.tensor(&[0i32], &[1, 1])?,
///     sequences: session.zeros(hotcell_client::tensor::DType::I32, &[2]),
///     positions: places,
/// };
/// let attended = step.attend(queries, cache, &pages, PagedOptions::default());
/// step.run(std::slice::from_ref(&attended)).await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a step does nothing until it is run"]
pub struct Step {
    session: Session,
    id: u64,
    last: Option<Arc<OpNode>>,
    /// What is wrong with the first write that cannot be.
    wrong: Option<Error>,
}

/// Where the tokens of sequences lie, and which of them a row of queries is.
#[derive(Clone, Debug)]
pub struct Pages {
    /// i32 `[sequences, blocks]`: token `t` of sequence `s` lies in block `tables[s, t / block_len]`.
    pub tables: Tensor,
    /// i32 `[m]`: the sequence of each row.
    pub sequences: Tensor,
    /// i32 `[m]`: its position there; it sees the tokens up to it.
    pub positions: Tensor,
}

/// How attention looks at a cache. The default scales by 1 and sees all tokens up to a row's own.
#[derive(Clone, Copy, Debug)]
pub struct PagedOptions {
    /// What scores are multiplied by, mostly `1/√d`.
    pub scale: f64,
    /// With a number above 0, only the last so many tokens are seen.
    pub window: i64,
    /// With a number c above 0, a score becomes `c · tanh(score / c)`.
    pub soft_cap: f64,
}

impl Default for PagedOptions {
    fn default() -> Self {
        Self {
            scale: 1.0,
            window: 0,
            soft_cap: 0.0,
        }
    }
}

impl Session {
    /// A step without effects so far.
    pub fn step(&self) -> Step {
        Step {
            session: self.clone(),
            id: STEPS.fetch_add(1, Ordering::Relaxed),
            last: None,
            wrong: None,
        }
    }
}

impl Step {
    /// Writes keys and values, f32 `[m, kv_heads, head_dim]`, into the cache's slots, i32 `[m]`: slot `block · block_len + place`, or −1
    /// for none. Of two rows with one slot the later one stays. What is wrong with it is said by [`Step::run`].
    pub fn write(&mut self, cache: &Cache, keys: &Tensor, values: &Tensor, slots: &Tensor) {
        let inputs = [&cache.0, keys, values, slots];
        if let Err(error) = self.effect("cache_write", &inputs, vec![]) {
            self.wrong.get_or_insert(error);
        }
    }

    /// Attention of queries, f32 `[m, heads, head_dim]`, to what the cache has after the writes above: row r to the tokens
    /// `0 ..= positions[r]` of its sequence. f32 `[m, heads, head_dim]`, for expressions of this step, and known once it has run
    /// if it, or what needs it, is among the results. What is wrong with it is in the tensor.
    pub fn attend(
        &mut self,
        queries: &Tensor,
        cache: &Cache,
        pages: &Pages,
        options: PagedOptions,
    ) -> Tensor {
        let Pages {
            tables,
            sequences,
            positions,
        } = pages;
        let inputs = [queries, &cache.0, tables, sequences, positions];
        let attributes = vec![
            Attribute::Float(options.scale),
            Attribute::Int(options.window),
            Attribute::Float(options.soft_cap),
        ];
        let made = self.effect("paged_attention", &inputs, attributes);
        let first = made.and_then(|made| {
            let none = || Error::new(Reason::Internal, "attention without a result");
            made.into_iter().next().ok_or_else(none)
        });
        first.unwrap_or_else(|error| Tensor::wrong(Some(self.session.clone()), error))
    }

    fn effect(
        &mut self,
        name: &str,
        inputs: &[&Tensor],
        attributes: Vec<Attribute>,
    ) -> Result<Vec<Tensor>, Error> {
        let none = || Error::new(Reason::Internal, format!("there is no op named {name}"));
        let row: &'static OpRow = op::find(name).ok_or_else(none)?;
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(|t| Some(*t)).collect();
        let mut owner = Some(self.session.clone());
        let specs = checked(row, &inputs, &attributes, &mut owner)?;
        let node = Arc::new(OpNode {
            row,
            inputs: inputs.into_iter().map(|t| t.cloned()).collect(),
            attributes,
            turn: Some(Turn {
                step: self.id,
                after: self.last.take(),
            }),
        });
        self.last = Some(Arc::clone(&node));
        Ok(results(&node, specs, owner.as_ref()))
    }

    /// Computes the step: its effects in their order, and these results, which may need them and are known then. What needs an effect
    /// and is not among them can no longer be computed.
    ///
    /// # Errors
    /// What is wrong with a write or a result, before anything is done. [`Reason::IndexOutOfRange`] for a slot, a sequence, a
    /// position or a block that is not there: in a run that fails, writes up to its end may have been done or not, to no slots but
    /// those they name, and no result is known. It is never run a second time: when the worker dies, so do its caches, and a
    /// session that recovers says [`Reason::TensorLost`]. [`Reason::LimitExceeded`] for a step of more than 8192 ops.
    pub async fn run(self, results: &[Tensor]) -> Result<(), Error> {
        let session = self.session.clone();
        let Some((program, lazy)) = self.program(results)? else {
            return Ok(());
        };
        let order = Order::default();
        session.compute_program(&program, &lazy, &order).await
    }

    /// Bytes that running the step would take on the worker: intermediate values, constants, inputs, caches, outputs. Of a step
    /// over tensors or caches of several sessions of a spread: all parts together. Nothing is done, and what needs its effects
    /// can no longer be computed.
    ///
    /// # Errors
    /// What is wrong with a write or a result, [`Reason::LimitExceeded`] as for [`Step::run`], and
    /// [`Reason::OutOfMemory`] or [`Reason::QuotaExceeded`] for more than could ever be held.
    pub async fn reserve(self, results: &[Tensor]) -> Result<v1::PlanMemory, Error> {
        Ok(together(&self.reserve_each(results).await?))
    }

    /// The same by session: none for a step that does nothing, one, or one for each part of a step that several run.
    pub(super) async fn reserve_each(
        self,
        results: &[Tensor],
    ) -> Result<Vec<(Session, v1::PlanMemory)>, Error> {
        let session = self.session.clone();
        let Some((program, lazy)) = self.program(results)? else {
            return Ok(vec![]);
        };
        session
            .reserve_program(&program, &program.inputs, &lazy)
            .await
    }

    /// Its graph, and the results that are not known yet; none if there is nothing to do.
    fn program(self, results: &[Tensor]) -> Result<Option<(Program, Vec<Tensor>)>, Error> {
        let Self {
            session,
            id,
            last,
            wrong,
        } = self;
        if let Some(error) = wrong {
            return Err(error);
        }
        session.owns(results)?;
        let lazy: Vec<Tensor> = results
            .iter()
            .filter(|t| !t.is_evaluated())
            .cloned()
            .collect();
        let last = last.as_ref();
        if last.is_none() && lazy.is_empty() {
            return Ok(None);
        }
        let nodes = program::order_with(&lazy, last).len();
        if nodes > program::PIECE {
            // It is not cut into pieces, as expressions are: its effects belong together.
            let most = program::PIECE;
            let what = format!("the step has {nodes} ops, and at most {most} are run at once");
            return Err(Error::new(Reason::LimitExceeded, what).with("limit", most));
        }
        let program = program::build(&lazy, &Scope::Step { id, last }, 0)?;
        Ok(Some((program, lazy)))
    }
}
