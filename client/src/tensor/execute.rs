//! Computing expressions.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    session::HandleId,
    v1,
};

use super::{
    array::{State, Tensor, invalid},
    connection::{Connection, Remote, RemotePlan},
    host::{Element, HostTensor},
    program::{self, Program, Scope},
    recipe::note_call,
    recover::again,
    session::Session,
    spread::carried,
    stream::Order,
};

/// Tensors of this process up to this size travel inside the call that needs them; larger ones are uploaded once.
const INLINE: usize = 64 << 10;
/// All of a call's together.
const INLINE_ALL: usize = 1 << 20;

impl Session {
    /// Computes tensors. Each is then a handle on the worker's memory and forgets how it was made.
    ///
    /// # Errors
    /// What is wrong with an expression; [`Reason::QuotaExceeded`], [`Reason::IndexOutOfRange`], [`Reason::WorkerLost`] and
    /// what else happens where it is computed. Nothing is computed by halves: no tensor has changed then.
    pub async fn eval(&self, tensors: &[Tensor]) -> Result<(), Error> {
        self.compute(tensors, &Order::default()).await
    }

    /// Queues the computation of tensors and returns. Whoever reads one of them waits for it, and hears what went wrong.
    ///
    /// # Errors
    /// What is wrong with an expression, or the queue is full.
    pub async fn async_eval(&self, tensors: &[Tensor]) -> Result<(), Error> {
        self.compute(tensors, &Order::detached()).await
    }

    /// Checks that tensors can be computed here, so far as can be known.
    pub(super) fn owns(&self, tensors: &[Tensor]) -> Result<(), Error> {
        for tensor in tensors {
            tensor.check()?;
            if matches!(&tensor.0.session, Some(other) if !other.mixes_with(self)) {
                return Err(invalid("the tensor belongs to another session"));
            }
        }
        Ok(())
    }

    pub(super) async fn compute(&self, tensors: &[Tensor], order: &Order) -> Result<(), Error> {
        self.owns(tensors)?;
        match self.shorten(tensors, order).await? {
            Some(lazy) if !lazy.is_empty() => self.compute_graph(&lazy, order).await,
            _ => Ok(()),
        }
    }

    /// Computes pieces of expressions until one graph can compute the rest: those of them that have no value yet.
    /// `None`: they are longer than a graph, and this is a dry run, which keeps no value that the next piece could
    /// begin with. Their shapes and dtypes were checked when they were written.
    async fn shorten(
        &self,
        tensors: &[Tensor],
        order: &Order,
    ) -> Result<Option<Vec<Tensor>>, Error> {
        loop {
            let lazy = tensors.iter().filter(|t| !t.is_evaluated());
            let lazy: Vec<Tensor> = lazy.cloned().collect();
            match program::first_piece(&program::order(&lazy), &lazy) {
                None => return Ok(Some(lazy)),
                Some(_) if self.is_dry_run() => return Ok(None),
                Some(piece) => self.compute_graph(&piece, order).await?,
            }
        }
    }

    /// Computes what one graph can.
    async fn compute_graph(&self, outputs: &[Tensor], order: &Order) -> Result<(), Error> {
        let program = program::build(outputs, &Scope::Plain, 0)?;
        self.compute_program(&program, outputs, order).await
    }

    /// Executes a program, whose results are these tensors' values.
    pub(super) async fn compute_program(
        &self,
        program: &Program,
        outputs: &[Tensor],
        order: &Order,
    ) -> Result<(), Error> {
        if !self.alone(program.inputs.iter().chain(outputs)) {
            let homes: Vec<_> = outputs.iter().map(|o| o.0.session.clone()).collect();
            let work = self.compute_spread(program, &program.inputs, 0, &homes, order);
            for (output, result) in outputs.iter().zip(work.await?) {
                match result.state() {
                    State::Remote(remote) => output.computed(remote),
                    state => output.set(state),
                }
            }
            return Ok(());
        }
        let results = again!(self, at => async {
            let Some(plan) = self.plan(&at, program).await? else {
                return Ok(vec![]); // a dry run computes nothing
            };
            let (inputs, count) = (&program.inputs, outputs.len());
            self.call(&at, &plan, 0, inputs, count, order).await
        })?;
        for (output, result) in outputs.iter().zip(results) {
            output.computed(result);
        }
        Ok(())
    }

    /// Computes one tensor into the memory of another.
    pub(super) async fn compute_into(&self, value: &Tensor, into: &Tensor) -> Result<(), Error> {
        let State::Remote(target) = into.state() else {
            return Err(invalid("only a computed tensor has memory to store into"));
        };
        let order = Order::default();
        let value = std::slice::from_ref(value);
        if self.shorten(value, &order).await?.is_none() {
            return Ok(());
        }
        let program = program::build(value, &Scope::Plain, 0)?;
        if !self.alone(program.inputs.iter()) {
            self.compute(value, &order).await?;
            for value in value {
                let here = carried(value, self).await?;
                Box::pin(self.compute_into(&here, into)).await?;
            }
            return Ok(());
        }
        again!(self, at => async {
            let Some(plan) = self.plan(&at, &program).await? else {
                return Ok(());
            };
            self.restore(&at, std::slice::from_ref(&target)).await?;
            let ready = self.request_for(&at, &plan, 0, &program.inputs, 0, &order);
            let Ready {
                mut request, held, ..
            } = ready.await?;
            request.outputs = vec![v1::OutputWish {
                kind: Some(v1::output_wish::Kind::Into(target.handle_for(&at)?)),
            }];
            let answer = at.answer(at.rpc().execute(at.request(request)).await);
            drop(held);
            answer.map(|_| ())
        })
    }

    /// The plan of a program; `None` in a dry run.
    pub(super) async fn plan(
        &self,
        at: &Connection,
        program: &Program,
    ) -> Result<Option<Arc<RemotePlan>>, Error> {
        let (graph, key) = program.encode()?;
        if let Some(plan) = at.kept_plan(&key) {
            return Ok(Some(plan));
        }
        let (plan, _) = at.compile(graph, key, self.is_dry_run()).await?;
        if let Some(plan) = &plan {
            at.keep_plan(plan);
        } else if !self.is_dry_run() {
            return Err(Error::new(
                Reason::ProtocolViolation,
                "the worker made no plan",
            ));
        }
        Ok(plan)
    }

    /// Executes a plan; its results stay on the worker.
    pub(super) async fn call(
        &self,
        at: &Connection,
        plan: &RemotePlan,
        rows: usize,
        inputs: &[Tensor],
        outputs: usize,
        order: &Order,
    ) -> Result<Vec<Arc<Remote>>, Error> {
        let ready = self.request_for(at, plan, rows, inputs, outputs, order);
        let ready = ready.await?;
        let answer = at.answer(at.rpc().execute(at.request(ready.request)).await)?;
        drop(ready.held);
        order.done(at, answer.fence);
        Ok(ready.results)
    }

    /// Executes a plan whose first `kept` results stay on the worker, as do those after them that are written into no tensor.
    pub(super) async fn call_into(
        &self,
        at: &Connection,
        plan: &RemotePlan,
        rows: usize,
        inputs: &[Tensor],
        (kept, into): (usize, &[Option<Arc<Remote>>]),
        order: &Order,
    ) -> Result<Vec<Option<Arc<Remote>>>, Error> {
        let own = kept + into.iter().filter(|target| target.is_none()).count();
        let ready = self.request_for(at, plan, rows, inputs, own, order).await?;
        let mut request = ready.request;
        let mut made = ready.results.into_iter();
        let mut results: Vec<_> = made.by_ref().take(kept).map(Some).collect();
        for (i, target) in into.iter().enumerate() {
            if let Some(target) = target {
                let wish = v1::OutputWish {
                    kind: Some(v1::output_wish::Kind::Into(target.handle_for(at)?)),
                };
                request.outputs.insert(kept + i, wish);
            }
            results.push(match target {
                Some(_) => None,
                None => made.next(),
            });
        }
        let answer = at.answer(at.rpc().execute(at.request(request)).await)?;
        drop(ready.held);
        order.done(at, answer.fence);
        Ok(results)
    }

    /// The message of a call, and the handles its results will have.
    pub(super) async fn request_for(
        &self,
        at: &Connection,
        plan: &RemotePlan,
        rows: usize,
        inputs: &[Tensor],
        outputs: usize,
        order: &Order,
    ) -> Result<Ready, Error> {
        let (operands, held) = self.operands(at, inputs).await?;
        let ids = (0..outputs)
            .map(|_| HandleId::random())
            .collect::<Result<Vec<_>, _>>()?;
        let wish = |id: &HandleId| v1::OutputWish {
            kind: Some(v1::output_wish::Kind::Id(id.to_wire())),
        };
        let request = v1::ExecuteRequest {
            plan: Some(plan.handle.clone()),
            rows: rows as u64,
            inputs: operands,
            outputs: ids.iter().map(wish).collect(),
            stream: order.stream,
            wait: order.wait(at),
            detached: order.detached,
            tag: 0,
        };
        let results: Vec<_> = ids.into_iter().map(|id| at.named(id)).collect();
        if let Some(recovering) = self.recovering() {
            note_call(&recovering.ledger, plan, rows, inputs, &results);
        }
        Ok(Ready {
            request,
            results,
            held,
        })
    }

    /// Inputs as a call names them: small ones inline, large ones uploaded first.
    async fn operands(
        &self,
        at: &Connection,
        inputs: &[Tensor],
    ) -> Result<(Vec<v1::Operand>, Vec<Arc<Remote>>), Error> {
        let mut inline = 0usize;
        let mut large = Vec::new();
        for tensor in inputs {
            if matches!(&tensor.0.session, Some(other) if !other.is_same(self)) {
                return Err(invalid(
                    "an input is on another device of the spread; Session::eval and Compiled::call_eval compute with several",
                ));
            }
            if let State::Host { data, .. } = tensor.state() {
                let size = data.bytes().len();
                if size > INLINE || inline + size > INLINE_ALL {
                    large.push(tensor);
                } else {
                    inline += size;
                }
            }
        }
        // In turn: they share one connection, and each fills it.
        for tensor in large {
            tensor.place(self, at).await?;
        }
        if self.recovering().is_some() {
            let there = inputs.iter().filter_map(|tensor| match tensor.state() {
                State::Remote(remote) => Some(remote),
                _ => None,
            });
            self.restore(at, &there.collect::<Vec<_>>()).await?;
        }
        let mut held = Vec::new();
        let operands = inputs.iter().map(|tensor| operand(at, tensor, &mut held));
        Ok((operands.collect::<Result<_, _>>()?, held))
    }
}

/// A call that is ready to be sent.
pub(super) struct Ready {
    pub request: v1::ExecuteRequest,
    pub results: Vec<Arc<Remote>>,
    /// What the call names, to be kept until it is answered: a handle that is freed earlier may be gone before the call comes.
    pub held: Vec<Arc<Remote>>,
}

fn operand(
    at: &Connection,
    tensor: &Tensor,
    held: &mut Vec<Arc<Remote>>,
) -> Result<v1::Operand, Error> {
    use v1::operand::Kind;
    let kind = match tensor.state() {
        State::Remote(remote) => {
            let handle = remote.handle_for(at)?;
            held.push(remote);
            Kind::Tensor(handle)
        }
        State::Host { data, .. } => Kind::Data(data.bytes().clone()),
        State::Wrong(error) => return Err(error),
        State::Lazy { .. } | State::Argument { .. } => {
            return Err(Error::new(Reason::Internal, "an input has no value"));
        }
    };
    Ok(v1::Operand { kind: Some(kind) })
}

impl Tensor {
    /// The session it can be computed in.
    pub(super) fn session(&self) -> Result<&Session, Error> {
        self.check()?;
        match &self.0.session {
            Some(session) => Ok(session),
            None => Err(invalid(
                "a constant alone belongs to no session; combine it with a tensor of one",
            )),
        }
    }

    /// Computes it; see [`Session::eval`].
    ///
    /// # Errors
    /// As [`Session::eval`].
    pub async fn eval(&self) -> Result<&Self, Error> {
        if let State::Host { .. } = self.state() {
            return Ok(self);
        }
        self.session()?.eval(std::slice::from_ref(self)).await?;
        Ok(self)
    }

    /// Computes it and fetches its value. It stays on the worker.
    ///
    /// # Errors
    /// As [`Session::eval`].
    pub async fn fetch(&self) -> Result<HostTensor, Error> {
        self.eval().await?;
        match self.state() {
            State::Host { data, .. } => Ok(data),
            State::Remote(remote) => self.session()?.download(&remote, self.spec()?).await,
            _ => Err(Error::new(
                Reason::Internal,
                "an evaluated tensor has no value",
            )),
        }
    }

    /// Computes it and returns its elements, row-major.
    ///
    /// # Errors
    /// As [`Session::eval`], and [`Reason::InvalidArgument`] when the dtype is not `T`'s; cast first.
    pub async fn to_vec<T: Element>(&self) -> Result<Vec<T>, Error> {
        let dtype = self.dtype()?;
        if dtype != T::DTYPE {
            return Err(invalid(format!(
                "the tensor is {dtype}, not {}; cast it first",
                T::DTYPE
            )));
        }
        self.fetch().await?.to_vec()
    }

    /// Computes it and returns its only element.
    ///
    /// # Errors
    /// As [`Tensor::to_vec`], and [`Reason::InvalidArgument`] when it has more or fewer than one element.
    pub async fn item<T: Element>(&self) -> Result<T, Error> {
        if self.size()? != 1 {
            return Err(invalid(format!("{} has not one element", self.spec()?)));
        }
        let values = self.to_vec::<T>().await?;
        values
            .first()
            .copied()
            .ok_or_else(|| invalid("the tensor has no element"))
    }
}
