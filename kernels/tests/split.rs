//! Graphs that are split over devices compute what they compute on one.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::collections::HashMap;

use common::{Numbers, Tensor};
use hotcell_graph::{
    DType, Graph, GraphBuilder, Value,
    graph::Node,
    op::ValueSpec,
    split::{Part, Placed, assign, cut},
};
use hotcell_kernels::{
    backend::{Buffer, Device},
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

const ROWS: usize = 5;
const N: usize = 8;

/// A graph of up to 40 nodes over some inputs, with rows or without, whose every third value is returned.
fn random(numbers: &mut Numbers) -> (Graph, Vec<Tensor>) {
    let rows = numbers.below(2) == 0;
    let mut g = GraphBuilder::new(if rows { ROWS } else { 0 });
    let mut tensors = vec![];
    let mut values = vec![];
    for i in 0..2 + numbers.below(4) {
        // With rows, the first input has them, and constants have not.
        let activation = i == 0 || numbers.below(3) == 0;
        let dims = if activation { [ROWS, N] } else { [N, N] };
        let count = dims[0] * N;
        let data: Vec<f64> = (0..count)
            .map(|_| numbers.below(64) as f64 / 32.0 - 1.0)
            .collect();
        let tensor = Tensor::of(DType::F32, &dims, &data);
        let spec = tensor.spec(rows && activation);
        let value = match activation {
            true => g.tensor(format!("x{i}"), spec),
            false => g.constant(format!("w{i}"), spec),
        };
        values.push(value.unwrap());
        tensors.push(tensor);
    }
    for _ in 0..1 + numbers.below(40) {
        let a = values[numbers.below(values.len())];
        let b = values[numbers.below(values.len())];
        let made = match numbers.below(9) {
            0 => g.add(a, b).ok(),
            1 => g.mul(a, b).ok(),
            2 | 3 => g.matmul(a, b).ok(),
            4 => g.tanh(a).ok(),
            5 => g.softmax(a, 1).ok(),
            6 => g.reduce_sum(a, &[1], true).ok(),
            7 => g.transpose(a, &[1, 0]).ok(),
            // Two results, of which both, one or none is read.
            _ => match g.topk(a, N as i64, 1, true) {
                Ok((most, at)) => {
                    values.push(most);
                    g.cast(at, DType::F32).ok()
                }
                Err(_) => None,
            },
        };
        values.extend(made);
    }
    let mut outputs: Vec<Value> = values.iter().copied().skip(2).step_by(3).collect();
    // An input is returned as it is, and a value twice.
    outputs.extend([
        values[0],
        values[values.len() - 1],
        values[values.len() - 1],
    ]);
    (g.finish(&outputs).unwrap(), tensors)
}

fn bytes(graph: &Graph, value: Value) -> usize {
    match graph.spec(value).unwrap() {
        ValueSpec::Tensor(t) => t.bytes(ROWS).unwrap(),
        other => panic!("{other}"),
    }
}

/// The outputs of a graph on a device of its own.
fn execute(graph: &Graph, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut plan = device.plan(graph, &PlanHints::default()).unwrap();
    let buffer = |bytes: &[u8]| -> Buffer {
        let buffer = device.allocate("in", bytes.len()).unwrap();
        buffer.write(0, bytes).unwrap();
        buffer
    };
    for (i, bytes) in inputs.iter().enumerate() {
        plan.bind(Slot::Input(i), &buffer(bytes), 0).unwrap();
    }
    let mut outs = vec![];
    for (i, value) in graph.outputs().iter().enumerate() {
        let size = bytes(graph, *value);
        let out = device.allocate("out", size).unwrap();
        plan.bind(Slot::Output(i), &out, 0).unwrap();
        outs.push((out, size));
    }
    plan.execute(graph.max_rows().min(ROWS)).unwrap();
    let read = |(out, size): &(Buffer, usize)| {
        let mut bytes = vec![0; *size];
        out.read(0, &mut bytes).unwrap();
        bytes
    };
    outs.iter().map(read).collect()
}

/// Executes the parts, each with what it was given only, and checks what they promise on the way.
fn execute_parts(graph: &Graph, parts: &[Part], inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    // By value and device: what did not travel is not there.
    let mut there: HashMap<(Value, usize), Vec<u8>> = HashMap::new();
    let mut all: HashMap<Value, Vec<u8>> = HashMap::new();
    for part in parts {
        assert_eq!(part.graph.inputs().len(), part.inputs.len());
        let operands: Vec<Vec<u8>> = part
            .inputs
            .iter()
            .map(|value| match value {
                Value::Input(i) => inputs[*i as usize].clone(),
                value => there[&(*value, part.device)].clone(),
            })
            .collect();
        let made = execute(&part.graph, &operands);
        assert_eq!(made.len(), part.kept.len() + part.sent.len());
        let (kept, sent) = made.split_at(part.kept.len());
        for (value, bytes) in part.kept.iter().zip(kept) {
            there.insert((*value, part.device), bytes.clone());
            all.insert(*value, bytes.clone());
        }
        for ((value, to), bytes) in part.sent.iter().zip(sent) {
            assert_ne!(*to, part.device, "sent to itself");
            there.insert((*value, *to), bytes.clone());
        }
    }
    let output = |value: &Value| match value {
        Value::Input(i) => inputs[*i as usize].clone(),
        value => all[value].clone(),
    };
    graph.outputs().iter().map(output).collect()
}

#[test]
fn two_hundred_random_graphs_compute_the_same_on_one_device_and_on_many() {
    let mut cuts = 0;
    for seed in 0..200 {
        let mut numbers = Numbers::new(seed);
        let (graph, tensors) = random(&mut numbers);
        let inputs: Vec<Vec<u8>> = tensors.iter().map(|t| t.bytes.clone()).collect();
        let whole = execute(&graph, &inputs);
        for devices in 1..=4 {
            let at: Vec<Option<usize>> = inputs
                .iter()
                .map(|_| Some(numbers.below(devices + 1)).filter(|d| *d < devices))
                .collect();
            let unable = numbers.below(3);
            let computes = |device: usize, node: &Node| {
                device + 1 == devices || node.op.name != ["matmul", "softmax", "add"][unable]
            };
            let placed = Placed {
                devices,
                inputs: &at,
                computes: &computes,
                weights: &|input| input % 2 == 0,
                offload: Some(ROWS * N).filter(|_| numbers.below(2) == 0),
            };
            let on = assign(&graph, &placed).unwrap();
            for (node, device) in graph.nodes().iter().zip(&on) {
                assert!(computes(*device, node), "{} on {device}", node.op.name);
            }
            let parts = cut(&graph, &on).unwrap();
            let nodes: usize = parts.iter().map(|p| p.graph.nodes().len()).sum();
            assert_eq!(nodes, graph.nodes().len());
            assert!(
                execute_parts(&graph, &parts, &inputs) == whole,
                "seed {seed}"
            );
            cuts += parts.len().saturating_sub(1);
        }
    }
    assert!(cuts > 500, "only {cuts} cuts: nothing was tried");
}
