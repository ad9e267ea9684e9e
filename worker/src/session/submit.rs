//! Queueing a call: everything about it is checked, and its memory taken, before anything is changed.

use std::{collections::HashSet, rc::Rc, time::Duration};

use hotcell_graph::op::ValueSpec;
use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use super::{
    call::{Answer, CallRequest, Operand, Submitted, Wish},
    invalid,
    plan::PlanEntry,
    quota,
    state::Session,
    tensor::{Tensor, at_rows},
    value::{State, Value, not_ready},
    work::{Goal, Job, Output},
};

/// Bytes that a call takes for each of its inputs and outputs, about.
const SLOT_BYTES: usize = 256;

/// Inputs and outputs of a short call at most: checking each takes its time too.
const SHORT_SLOTS: usize = 64;

impl Session {
    /// Whether a call takes but microseconds: those before it of the same plan did, and could with any data.
    pub fn is_short(&self, request: &CallRequest) -> bool {
        let is_small = |p: &Rc<PlanEntry>| p.plan.try_borrow().is_ok_and(|plan| plan.is_small());
        let is_short =
            |p: &Rc<PlanEntry>| p.inputs.len() + p.outputs.len() <= SHORT_SLOTS && is_small(p);
        let plan = self.plans.get(&request.plan);
        !request.detached && plan.is_some_and(|p| p.is_quick.get() && is_short(p))
    }

    /// Queues a call. Returns its fence and, as they are now, the tensors it will write.
    ///
    /// # Errors
    /// When it does not fit the plan, or quotas or memory are short. Nothing is changed then.
    pub fn submit(&mut self, submitted: Submitted) -> Result<Answer, Error> {
        let Submitted {
            request,
            reply,
            cancelled,
        } = submitted;
        if self.streams.calls >= limits::MAX_SESSION_CALLS {
            return Err(quota("calls that wait or run", limits::MAX_SESSION_CALLS));
        }
        let streams = &self.streams.streams;
        if !streams.contains_key(&request.stream) && streams.len() >= limits::MAX_SESSION_STREAMS {
            return Err(quota("streams", limits::MAX_SESSION_STREAMS));
        }
        if let Some((stream, value)) = request.wait.iter().find(|f| !self.streams.was_issued(**f)) {
            let what = format!("stream {stream} has no fence {value} yet; queue its work first");
            return Err(invalid(what));
        }
        let plan = Rc::clone(self.plan(request.plan)?);
        let rows = request.rows;
        if rows > plan.max_rows {
            let what = format!("{rows} rows, and the plan takes {} at most", plan.max_rows);
            return Err(Error::new(Reason::GraphInvalid, what));
        }
        let slots = request.inputs.len() + plan.outputs.len();
        let charge = self.pool.charge_held("the call", slots * SLOT_BYTES)?;
        let inputs = self.operands(&plan, rows, request.inputs)?;
        let outputs = self.goals(&plan, rows, request.outputs)?;
        // From here on nothing fails.
        for output in &outputs {
            if let Goal::Keep(id, tensor) | Goal::Into(id, tensor, _) = &output.goal {
                self.tensors.insert(*id, tensor.clone());
            }
        }
        let infos = outputs.iter().map(|o| self.answer(o, None)).collect();
        let stream = self.streams.streams.entry(request.stream).or_default();
        stream.issued += 1;
        self.streams.calls += 1;
        let fence = stream.issued;
        stream.queue.push_back(Job {
            fence,
            plan,
            rows,
            inputs,
            outputs,
            wait: request.wait,
            cancelled,
            stopped: false,
            reply,
            settled: 0.into(),
            at: None,
            compute: Duration::ZERO,
            copies: Vec::new(),
            _charge: charge,
        });
        Ok(Answer {
            outputs: infos,
            fence: v1::Fence {
                stream: request.stream,
                value: fence,
            },
            compute_ns: 0,
        })
    }

    fn operands(
        &self,
        plan: &PlanEntry,
        rows: usize,
        operands: Vec<Operand>,
    ) -> Result<Vec<Rc<Value>>, Error> {
        let misfit = |i: usize, what: String| {
            Error::new(Reason::GraphInvalid, format!("input {i} {what}")).with("input", i)
        };
        if operands.len() != plan.inputs.len() {
            let (given, due) = (operands.len(), plan.inputs.len());
            let what = format!("{given} inputs, and the plan takes {due}");
            return Err(Error::new(Reason::GraphInvalid, what));
        }
        let mut values = Vec::with_capacity(operands.len());
        for (i, (operand, spec)) in operands.into_iter().zip(&plan.inputs).enumerate() {
            let fixed = match spec {
                ValueSpec::Tensor(t) => ValueSpec::Tensor(at_rows(t, rows)?.0),
                other => other.clone(),
            };
            values.push(match (operand, &fixed) {
                (Operand::Tensor(id), _) => {
                    let tensor = self.tensor(id)?;
                    if tensor.spec != fixed {
                        return Err(misfit(i, format!("is {fixed}, not {}", tensor.spec)));
                    }
                    if let State::Uploading(_) = &*tensor.value.state() {
                        return Err(not_ready(&tensor.value.state()));
                    }
                    Rc::clone(&tensor.value)
                }
                (Operand::Data(data), ValueSpec::Tensor(t)) => {
                    let bytes = t.bytes(rows).unwrap_or(usize::MAX);
                    if data.len() != bytes {
                        let what = format!("({t}) takes {bytes} bytes, not {}", data.len());
                        return Err(misfit(i, what));
                    }
                    let storage = self.pool.allocate("an inline input", bytes)?;
                    if !self.pool.dry_run() {
                        storage.write(0, &data)?;
                    }
                    Value::new(State::Ready(storage))
                }
                (Operand::Data(_), other) => {
                    return Err(misfit(
                        i,
                        format!("is a {other}, which cannot be sent as bytes"),
                    ));
                }
            });
        }
        let caches = plan.inputs.iter().zip(&values);
        let caches: Vec<_> = caches
            .filter(|(spec, _)| matches!(spec, ValueSpec::Cache(_)))
            .map(|(_, value)| Rc::as_ptr(value))
            .collect();
        let distinct: HashSet<_> = caches.iter().collect();
        if distinct.len() != caches.len() {
            return Err(invalid("one cache is given as two inputs"));
        }
        Ok(values)
    }

    fn goals(
        &self,
        plan: &PlanEntry,
        rows: usize,
        mut wishes: Vec<Wish>,
    ) -> Result<Vec<Output>, Error> {
        if wishes.len() > plan.outputs.len() {
            let (given, due) = (wishes.len(), plan.outputs.len());
            return Err(invalid(format!("{given} outputs, and the plan has {due}")));
        }
        wishes.resize_with(plan.outputs.len(), || Wish::Keep(None));
        let kept = wishes.iter().filter(|w| matches!(w, Wish::Keep(_))).count();
        self.room_for(kept)?;
        let mut inline = 0usize;
        let mut outputs = Vec::with_capacity(wishes.len());
        for (wish, spec) in wishes.into_iter().zip(&plan.outputs) {
            let (spec, bytes) = at_rows(spec, rows)?;
            let pending = |spec| Tensor {
                spec,
                bytes,
                value: Value::new(State::Pending),
                weight: None,
                shared: None,
            };
            let goal = match wish {
                Wish::Keep(id) => Goal::Keep(self.fresh(id)?, pending(ValueSpec::Tensor(spec))),
                Wish::Into(id) => {
                    let tensor = self.tensor(id)?;
                    if tensor.weight.is_some() || matches!(tensor.spec, ValueSpec::Cache(_)) {
                        return Err(invalid("weights and caches cannot be overwritten"));
                    }
                    if tensor.bytes != bytes {
                        let have = tensor.bytes;
                        let what = format!("a result of {bytes} bytes cannot overwrite {have}");
                        return Err(invalid(what));
                    }
                    if let State::Uploading(_) = &*tensor.value.state() {
                        return Err(not_ready(&tensor.value.state()));
                    }
                    let before = Rc::clone(&tensor.value);
                    let shared = tensor.shared.clone();
                    let pending = pending(tensor.spec.clone());
                    Goal::Into(id, Tensor { shared, ..pending }, before)
                }
                Wish::Inline => {
                    inline = inline.saturating_add(bytes);
                    Goal::Inline
                }
                Wish::Drop => Goal::Drop,
            };
            if inline > limits::MAX_INLINE_BYTES {
                let limit = limits::MAX_INLINE_BYTES;
                let what = format!(
                    "results of more than {limit} bytes in one answer; keep them and download"
                );
                return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
            }
            let storage = match goal {
                Goal::Into(..) => None,
                _ => Some(self.pool.allocate("a result", bytes)?),
            };
            outputs.push(Output {
                bytes,
                goal,
                storage,
            });
        }
        Ok(outputs)
    }
}
