//! Layers of Qwen3-MoE: those of Qwen3, whose feed-forward part is in some or all layers a mixture of experts.
//!
//! Source: transformers `modeling_qwen3_moe.py`. What a token's experts give is summed in the order of the experts,
//! whatever the router's order, so that a sum depends on which experts were chosen and not on which came first.

use hotcell_graph::{GraphBuilder, Shape, Value};

use super::{
    config::Experts,
    llama,
    parts::{Rows, feed_forward},
    weave::{BuildError, Matrix, Piece, Weaver},
};

/// A layer: the residual stream `[rows, hidden]` before it to that after it.
pub(super) fn layer(
    w: &mut Weaver<'_>,
    rows: &Rows,
    layer: usize,
    x: Value,
) -> Result<Value, BuildError> {
    let config = w.config;
    let x = llama::attended(w, rows, layer, x)?;
    let normed = w.norm(x, &w.names.ffn_norm(layer), config.hidden)?;
    let fed = match &config.experts {
        Some(experts) if experts.layers.get(layer) == Some(&true) => {
            mixture(w, experts, layer, normed)?
        }
        _ => feed_forward(w, layer, normed, GraphBuilder::swiglu)?,
    };
    Ok(w.builder.add(x, fed)?)
}

/// What a token's experts give `[rows, hidden]`, weighted and summed.
fn mixture(
    w: &mut Weaver<'_>,
    experts: &Experts,
    layer: usize,
    normed: Value,
) -> Result<Value, BuildError> {
    let (names, hidden) = (w.names, w.config.hidden);
    let Experts {
        count,
        used,
        intermediate,
        ..
    } = *experts;
    let scores = w.linear(normed, &names.router(layer), None, count, hidden)?;
    let (weights, ids) = route(&mut w.builder, experts, scores)?;

    // Members of a communicator have their rows of every expert, so that all of them compute whichever are chosen.
    let share = w.shape.parts.columns();
    let x = w.builder.reshape(normed, Shape::rows(&[1, hidden])?)?;
    let (gate, up) = gates(w, experts, layer, x, ids)?;
    let inner = w.builder.swiglu(gate, up)?;
    let inner = w.gathered(share, inner, intermediate)?;
    let down = names.down_experts(layer);
    let down = stacked(w, &down, count, (hidden, intermediate), |expert| {
        names.expert_down(layer, expert)
    })?;
    let given = w.product_of_experts(down, inner, ids)?;
    // Not after the sum, whose order depends on how many columns it has.
    let given = w.gathered(share, given, hidden)?;
    let weights = w.builder.reshape(weights, Shape::rows(&[used, 1])?)?;
    let weighted = w.builder.mul(given, weights)?;
    Ok(w.builder.reduce_sum(weighted, &[1], false)?)
}

/// Of scores `[rows, count]`: the experts of each row in ascending order, and their weights, both `[rows, used]`.
fn route(
    graph: &mut GraphBuilder,
    experts: &Experts,
    scores: Value,
) -> Result<(Value, Value), BuildError> {
    let shares = graph.softmax(scores, -1)?;
    let (_, best_first) = graph.topk(shares, experts.used as i64, -1, true)?;
    let ids = graph.sort(best_first, -1, false)?;
    let mut weights = graph.take_along_axis(shares, ids, -1)?;
    if experts.normalised {
        let sum = graph.reduce_sum(weights, &[-1], true)?;
        weights = graph.div(weights, sum)?;
    }
    Ok((weights, ids))
}

/// The gates and the up projections of each row's experts, both `[rows, used, share of intermediate]`.
fn gates(
    w: &mut Weaver<'_>,
    experts: &Experts,
    layer: usize,
    x: Value,
    ids: Value,
) -> Result<(Value, Value), BuildError> {
    let names = w.names;
    let Experts {
        count,
        intermediate: n,
        ..
    } = *experts;
    let k = w.config.hidden;
    let both = names.gate_up_experts(layer);
    if w.weights.contains(&both) {
        let share = w.shape.parts.columns();
        let part = share.of(n);
        let shape = [count, 2 * n, k];
        let both = match share.divides(n).then(|| share.range(n)) {
            None => w.matrix(Piece::all(&both), &shape, &shape)?,
            Some(own) => {
                // The same rows of both halves.
                let halves = (0..2 * count).map(|half| half * n);
                let piece = |first: usize| Piece {
                    name: both.clone(),
                    rows: Some(first + own.start..first + own.end),
                };
                w.stack(halves.map(piece).collect(), &shape, &[count, 2 * part, k])?
            }
        };
        let both = w.product_of_experts(both, x, ids)?;
        let halves = w.builder.split(both, &[part as i64, part as i64], -1)?;
        if let &[gate, up] = halves.as_slice() {
            return Ok((gate, up));
        }
    }
    let gate = stacked(w, &names.gate_experts(layer), count, (n, k), |expert| {
        names.expert_gate(layer, expert)
    })?;
    let up = stacked(w, &names.up_experts(layer), count, (n, k), |expert| {
        names.expert_up(layer, expert)
    })?;
    let gate = w.product_of_experts(gate, x, ids)?;
    let up = w.product_of_experts(up, x, ids)?;
    Ok((gate, up))
}

/// One matrix `[n, k]` of all experts, of which this process computes a share of the rows: the tensor that holds them
/// stacked, in place if that is all of it, or those of the single ones copied together.
fn stacked(
    w: &mut Weaver<'_>,
    name: &str,
    count: usize,
    (n, k): (usize, usize),
    single: impl Fn(usize) -> String,
) -> Result<Matrix, BuildError> {
    let share = w.shape.parts.columns();
    let own = share.divides(n).then(|| share.range(n));
    let shape = [count, share.of(n), k];
    if !w.weights.contains(name) && w.weights.contains(&single(0)) {
        let piece = |expert| Piece {
            name: single(expert),
            rows: own.clone(),
        };
        return w.stack((0..count).map(piece).collect(), &[n, k], &shape);
    }
    let Some(own) = own else {
        return w.matrix(Piece::all(name), &shape, &shape);
    };
    let piece = |expert: usize| Piece {
        name: name.to_owned(),
        rows: Some(expert * n + own.start..expert * n + own.end),
    };
    w.stack((0..count).map(piece).collect(), &[count, n, k], &shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_graph::{DType, TensorSpec};
    use hotcell_kernels::{
        backend::{Buffer, Device},
        cpu::{CpuDevice, path::CpuPath},
        plan::{PlanHints, Slot},
    };

    fn routed(experts: &Experts, scores: &[[f32; 4]]) -> (Vec<f32>, Vec<u32>) {
        let mut graph = GraphBuilder::new(scores.len());
        let shape = Shape::rows(&[4]).expect("a shape");
        let spec = TensorSpec::new(DType::F32, shape).expect("a spec");
        let input = graph.tensor("scores", spec).expect("an input");
        let (weights, ids) = route(&mut graph, experts, input).expect("a graph");
        let graph = graph.finish(&[weights, ids]).expect("a graph");

        let device = CpuDevice::with_path(1, CpuPath::detect()).expect("a device");
        let mut plan = device.plan(&graph, &PlanHints::default()).expect("a plan");
        let bytes: Vec<u8> = scores
            .iter()
            .flatten()
            .flat_map(|v| v.to_ne_bytes())
            .collect();
        let choices = scores.len() * experts.used;
        let buffer = |n: usize| -> Buffer { device.allocate("test", n).expect("memory") };
        let (x, weights, ids) = (
            buffer(bytes.len()),
            buffer(choices * 4),
            buffer(choices * 4),
        );
        x.write(0, &bytes).expect("written");
        plan.bind(Slot::Input(0), &x, 0).expect("bound");
        plan.bind(Slot::Output(0), &weights, 0).expect("bound");
        plan.bind(Slot::Output(1), &ids, 0).expect("bound");
        let mut stream = device.stream();
        stream
            .execute(plan.as_mut(), scores.len())
            .expect("computed");
        stream.synchronize().expect("computed");
        let mut values = vec![0.0; choices];
        weights.read_f32(0, &mut values).expect("read");
        let mut raw = vec![0; choices * 4];
        ids.read(0, &mut raw).expect("read");
        let ids = raw
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| u32::from_ne_bytes(*b));
        (values, ids.collect())
    }

    #[test]
    fn experts_come_in_their_own_order_with_their_own_weights() {
        let experts = |normalised| Experts {
            count: 4,
            used: 2,
            intermediate: 1,
            normalised,
            layers: vec![true],
        };
        // Logarithms of shares; the best is last, first, and in the middle.
        let shares = [
            [0.1f32, 0.3, 0.2, 0.4],
            [0.6, 0.1, 0.25, 0.05],
            [0.05, 0.2, 0.7, 0.05],
        ];
        let scores = shares.map(|row| row.map(f32::ln));
        let (weights, ids) = routed(&experts(false), &scores);
        assert_eq!(ids, [1, 3, 0, 2, 1, 2]);
        let close = |found: &[f32], expected: &[f32]| {
            assert_eq!(found.len(), expected.len());
            let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
            assert!(
                found.iter().zip(expected).all(near),
                "{found:?} {expected:?}"
            );
        };
        close(&weights, &[0.3, 0.4, 0.6, 0.25, 0.2, 0.7]);
        let (weights, ids) = routed(&experts(true), &scores);
        assert_eq!(ids, [1, 3, 0, 2, 1, 2]);
        close(
            &weights,
            &[
                3.0 / 7.0,
                4.0 / 7.0,
                0.6 / 0.85,
                0.25 / 0.85,
                2.0 / 9.0,
                7.0 / 9.0,
            ],
        );
    }
}
