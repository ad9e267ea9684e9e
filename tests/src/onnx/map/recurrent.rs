//! Recurrent cells, step after step: a graph has no loops, but a case says how many steps there are.

use anyhow::{Context, Result, bail, ensure};
use hotcell_graph::Value;

use super::Mapper;

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let cell = match op {
        "RNN" => rnn,
        "GRU" => gru,
        "LSTM" => lstm,
        _ => return Ok(None),
    };
    unroll(m, cell).map(Some)
}

/// Weights of one direction: of the input `[gates · H, I]`, of the state `[gates · H, H]`, biases `[2 · gates · H]`, peepholes
/// `[3 · H]`.
struct Weights {
    input: Value,
    state: Value,
    bias: Option<Value>,
    peepholes: Option<Value>,
    hidden: usize,
    /// A GRU resets after the product with the state's weights.
    resets_late: bool,
}

impl Weights {
    /// Rows of one gate.
    fn gate(&self, m: &Mapper<'_>, of: Value, gate: usize) -> Result<Value> {
        let (start, stop) = (gate * self.hidden, (gate + 1) * self.hidden);
        m.slice(of, 0, start as i64, stop as i64, 1)
    }

    fn product(&self, m: &Mapper<'_>, x: Value, of: Value, gate: usize) -> Result<Value> {
        let turned = m.transpose(self.gate(m, of, gate)?, &[1, 0])?;
        m.binary("matmul", x, turned)
    }

    /// Adds the bias of a gate, `second`: that of the state.
    fn biased(&self, m: &Mapper<'_>, x: Value, gate: usize, second: bool) -> Result<Value> {
        let Some(bias) = self.bias else {
            return Ok(x);
        };
        let gates = m.dims(bias)?[0] / (2 * self.hidden);
        let gate = gate + if second { gates } else { 0 };
        m.add(x, self.gate(m, bias, gate)?)
    }

    /// What a gate makes of the input and the state, before its function.
    fn sum(&self, m: &Mapper<'_>, x: Value, h: Value, gate: usize) -> Result<Value> {
        let x = self.biased(m, self.product(m, x, self.input, gate)?, gate, false)?;
        let h = self.biased(m, self.product(m, h, self.state, gate)?, gate, true)?;
        m.add(x, h)
    }

    /// Adds what a gate sees of the cell's state.
    fn seen(&self, m: &Mapper<'_>, x: Value, c: Value, gate: usize) -> Result<Value> {
        match self.peepholes {
            Some(peepholes) => m.add(x, m.mul(self.gate(m, peepholes, gate)?, c)?),
            None => Ok(x),
        }
    }
}

type Cell = fn(&Mapper<'_>, &Weights, Value, [Value; 2]) -> Result<[Value; 2]>;

fn rnn(m: &Mapper<'_>, w: &Weights, x: Value, [h, c]: [Value; 2]) -> Result<[Value; 2]> {
    Ok([m.unary("tanh", w.sum(m, x, h, 0)?)?, c])
}

fn gru(m: &Mapper<'_>, w: &Weights, x: Value, [h, c]: [Value; 2]) -> Result<[Value; 2]> {
    let update = m.unary("sigmoid", w.sum(m, x, h, 0)?)?;
    let reset = m.unary("sigmoid", w.sum(m, x, h, 1)?)?;
    let from_input = w.biased(m, w.product(m, x, w.input, 2)?, 2, false)?;
    let from_state = match w.resets_late {
        true => {
            let product = w.biased(m, w.product(m, h, w.state, 2)?, 2, true)?;
            m.mul(reset, product)?
        }
        false => w.biased(m, w.product(m, m.mul(reset, h)?, w.state, 2)?, 2, true)?,
    };
    let new = m.unary("tanh", m.add(from_input, from_state)?)?;
    let rest = m.sub(m.like(1.0, update)?, update)?;
    Ok([m.add(m.mul(rest, new)?, m.mul(update, h)?)?, c])
}

fn lstm(m: &Mapper<'_>, w: &Weights, x: Value, [h, c]: [Value; 2]) -> Result<[Value; 2]> {
    // Gates are input, output, forget, cell; peepholes input, output, forget.
    let gate = |gate: usize, c: Value| {
        let sum = w.seen(m, w.sum(m, x, h, gate)?, c, gate)?;
        m.unary("sigmoid", sum)
    };
    let new = m.unary("tanh", w.sum(m, x, h, 3)?)?;
    let kept = m.mul(gate(2, c)?, c)?;
    let c = m.add(kept, m.mul(gate(0, c)?, new)?)?;
    let h = m.mul(gate(1, c)?, m.unary("tanh", c)?)?;
    Ok([h, c])
}

/// The outputs: all steps' states, the last one, and the last of the cell.
fn unroll(m: &Mapper<'_>, cell: Cell) -> Result<Vec<Value>> {
    for name in ["activations", "clip", "input_forget"] {
        if m.attribute(name).is_some() {
            bail!("a recurrent cell with {name}");
        }
    }
    ensure!(m.text("direction", "forward") == "forward", "one direction");
    let batch_first = m.int("layout", 0) != 0;
    let turned = |x: Value, axes: &[i64]| match batch_first {
        true => m.transpose(x, axes),
        false => Ok(x),
    };
    let x = turned(m.x(0)?, &[1, 0, 2])?;
    let &[steps, batch, width] = m.dims(x)?.as_slice() else {
        bail!("an input without three axes");
    };
    let lengths = m.given_ints(4)?.unwrap_or_default();
    let whole = lengths.iter().all(|&n| n == steps as i64);
    ensure!(whole, "sequences of different lengths");
    // The one direction's, without its axis.
    let only = |i: usize| -> Result<Option<Value>> {
        let Some(x) = m.optional(i)? else {
            return Ok(None);
        };
        let dims = m.dims(x)?;
        let (first, rest) = dims.split_first().context("no axis of directions")?;
        ensure!(*first == 1, "one direction");
        m.reshape(x, rest).map(Some)
    };
    let state = only(2)?.context("no weights of the state")?;
    let hidden = m.dims(state)?[1];
    let weights = Weights {
        input: only(1)?.context("no weights of the input")?,
        state,
        bias: only(3)?,
        peepholes: only(7)?,
        hidden,
        resets_late: m.int("linear_before_reset", 0) != 0,
    };
    let initial = |i: usize| match m.optional(i)? {
        // [directions, batch, H], or [batch, directions, H]: with one direction the same order.
        Some(state) => m.reshape(state, &[batch, hidden]),
        None => m.broadcast(m.like(0.0, x)?, &[batch, hidden]),
    };
    let mut state = [initial(5)?, initial(6)?];
    let mut all = Vec::new();
    for step in 0..steps as i64 {
        let now = m.reshape(m.slice(x, 0, step, step + 1, 1)?, &[batch, width])?;
        state = cell(m, &weights, now, state)?;
        all.push(m.reshape(state[0], &[1, 1, batch, hidden])?);
    }
    let all = turned(m.concat(&all, 0)?, &[2, 0, 1, 3])?;
    let last = |state: Value| match batch_first {
        true => m.reshape(state, &[batch, 1, hidden]),
        false => m.reshape(state, &[1, batch, hidden]),
    };
    Ok(vec![all, last(state[0])?, last(state[1])?])
}
