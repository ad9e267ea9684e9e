//! `proto/OPS.md`, the reference page of the op catalogue, is what the rows say.
//!
//! `HOTCELL_UPDATE=1` writes it anew.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
};

use hotcell_graph::{
    DType, Graph, GraphBuilder,
    graph::Node,
    op::{AttributeKind, Call, InputMode, OpRow, ValueSpec, catalogue},
};
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
    cuda::CudaBackend,
};
use hotcell_tests::{cluster::repository, conformance::cases};

const HEAD: &str = "# The op catalogue

Generated from the rows of `hotcell-graph` by `HOTCELL_UPDATE=1 cargo test -p hotcell-tests --test ops_page`; do not edit.

`x?` may be absent, `xs…` is one or more, and the integers of `@x` say where the op reads or writes: shared memory that leads to
such an input is copied before it is computed with. *In other ops* is what a row means in other rows (of one example); a primitive has
no other meaning, and with `cast` in the list it takes inputs of one dtype after those have been cast. *Backends* says for which
dtypes of the first input (of the result, where there is none) a backend has a kernel for at least one of the
[conformance cases](../tests/golden/README.md); the rest it runs as other ops, or on the CPU's kernels if it is not the CPU and a
primitive is left. What CUDA has is its table of kernels, which is read without a device. What MLX computes is what ran on it when
`worker/mlx/tests/conformance.rs` was run last.
";

const AS_OTHER_OPS: &str = "as other ops";

/// A node of a case, with the graph that it stands in.
type Example = (Graph, Node);

fn examples() -> BTreeMap<String, Vec<Example>> {
    let mut found: BTreeMap<String, Vec<Example>> = BTreeMap::new();
    for case in cases().unwrap() {
        let (Ok(graph), None) = (case.graph(), case.fails) else {
            continue;
        };
        let node = graph.nodes().iter().rfind(|n| n.op.name == case.op);
        if let Some(node) = node.cloned() {
            found.entry(case.op).or_default().push((graph, node));
        }
    }
    found
}

fn signature(row: &OpRow) -> String {
    let inputs = row.inputs.iter().map(|input| {
        let at = if input.is_index { "@" } else { "" };
        match input.mode {
            InputMode::One => format!("{at}{}", input.name),
            InputMode::Optional => format!("{at}{}?", input.name),
            InputMode::Many => format!("{at}{}…", input.name),
        }
    });
    let attributes = row.attributes.iter().map(|a| {
        let kind = match a.kind {
            AttributeKind::Int(lo, hi) => format!("int in [{lo}, {hi}]"),
            AttributeKind::Float(lo, hi) => format!("float in [{lo:?}, {hi:?}]"),
            AttributeKind::Bool => "bool".to_owned(),
            AttributeKind::Shape => "shape".to_owned(),
            AttributeKind::DType => "dtype".to_owned(),
            AttributeKind::Ints(i64::MIN, i64::MAX) => "ints".to_owned(),
            AttributeKind::Ints(lo, hi) => format!("ints in [{lo}, {hi}]"),
            AttributeKind::Name(names) => names.join(" | "),
            AttributeKind::Bytes(most) => format!("at most {most} bytes"),
        };
        format!("{}: {kind}", a.name)
    });
    let inputs: Vec<String> = inputs.collect();
    let attributes: Vec<String> = attributes.collect();
    match attributes.is_empty() {
        true => format!("{}({})", row.name, inputs.join(", ")),
        false => format!(
            "{}({}; {})",
            row.name,
            inputs.join(", "),
            attributes.join("; ")
        ),
    }
}

/// Names of the ops that a node is in other ops, in their order, each once.
fn parts((graph, node): &Example) -> Option<Vec<&'static str>> {
    let decompose = node.op.decompose?;
    let mut builder = GraphBuilder::new(graph.max_rows());
    let specs = graph.input_specs(node).unwrap();
    let inputs: Vec<_> = specs
        .into_iter()
        .map(|spec| match spec {
            ValueSpec::Tensor(t) => builder.tensor("x", t).unwrap(),
            ValueSpec::Cache(c) => builder.cache("x", c).unwrap(),
            ValueSpec::Absent => hotcell_graph::Value::Absent,
        })
        .collect();
    let results = decompose(&mut builder, &inputs, &node.attributes).ok()?;
    // Results that are inputs are no results of a graph, but its nodes are all there is to see.
    let results: Vec<_> = results
        .into_iter()
        .filter(|v| matches!(v, hotcell_graph::Value::Node { .. }))
        .collect();
    let mut names = Vec::new();
    for node in builder.finish(&results).ok()?.nodes() {
        if !names.contains(&node.op.name) {
            names.push(node.op.name);
        }
    }
    Some(names)
}

/// The meaning in other ops: of the first example that does not come back to the op itself.
fn meaning(row: &OpRow, examples: &[Example]) -> String {
    let all: Vec<_> = examples.iter().filter_map(parts).collect();
    let other = all.iter().find(|names| !names.contains(&row.name));
    let own = all.iter().filter(|names| names.contains(&row.name));
    let own = own.max_by_key(|names| names.len());
    let text = |names: &[&str]| format!("`{}`", names.join("` `"));
    match (other, own) {
        (_, Some(names)) => format!("primitive; otherwise {}", text(names)),
        (Some(names), None) if names.is_empty() => "its input".to_owned(),
        (Some(names), None) => text(names),
        (None, None) => "primitive".to_owned(),
    }
}

fn support(has: &dyn Fn(&Call<'_>) -> bool, without: &str, examples: &[Example]) -> String {
    let mut direct: BTreeSet<DType> = BTreeSet::new();
    let mut all: BTreeSet<DType> = BTreeSet::new();
    for (graph, node) in examples {
        let specs = graph.input_specs(node).unwrap();
        let first = specs.iter().find_map(|spec| match spec {
            ValueSpec::Tensor(t) => Some(t.dtype),
            _ => None,
        });
        let Some(dtype) = first.or_else(|| node.outputs.first().map(|t| t.dtype)) else {
            continue;
        };
        all.insert(dtype);
        let call = Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        };
        if has(&call) {
            direct.insert(dtype);
        }
    }
    let names: Vec<String> = direct.iter().map(|d| format!("`{d}`")).collect();
    match (direct.is_empty(), direct == all) {
        (true, _) => without.to_owned(),
        (_, true) => "all".to_owned(),
        _ => names.join(", "),
    }
}

/// Whether each of these is a primitive, which has no meaning in other ops.
fn are_primitive(examples: &[Example]) -> bool {
    examples.iter().all(|example| parts(example).is_none())
}

/// What ran on MLX, by the name of the row: MLX is not linked here, so its own test writes it down.
fn on_mlx() -> BTreeMap<String, String> {
    let path = repository().join("worker/mlx/tests/native.txt");
    let text = fs::read_to_string(path).unwrap();
    let pairs = text.lines().filter_map(|line| line.split_once(": "));
    pairs
        .map(|(row, said)| (row.to_owned(), said.to_owned()))
        .collect()
}

fn page() -> String {
    let examples = examples();
    let on_mlx = on_mlx();
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let cpu = |call: &Call<'_>| device.supports(call);
    let mut page = HEAD.to_owned();
    for row in catalogue() {
        let of = examples
            .get(row.name)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let without_cuda = match are_primitive(of) {
            true => "on the CPU's kernels",
            false => AS_OTHER_OPS,
        };
        let doc: Vec<&str> = row.doc.lines().map(str::trim).collect();
        write!(
            page,
            "\n## {}\n\n```text\n{}\n```\n\n{}\n\n- Shapes: {}\n- Dtypes: {}\n- In other ops: {}\n- Backends: CPU {}; CUDA {}; MLX {}\n",
            row.name,
            signature(row),
            doc.join("\n").trim(),
            row.shapes,
            row.dtypes,
            meaning(row, of),
            support(&cpu, AS_OTHER_OPS, of),
            support(&CudaBackend::has_kernel, without_cuda, of),
            on_mlx.get(row.name).map_or("unknown", String::as_str),
        )
        .unwrap();
    }
    page
}

#[test]
fn the_page_says_what_the_rows_say() {
    let path = repository().join("proto/OPS.md");
    let page = page();
    if std::env::var_os("HOTCELL_UPDATE").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    let differs = page.lines().zip(committed.lines()).find(|(a, b)| a != b);
    assert!(
        page == committed,
        "{} is not what the rows give ({differs:?}); write it with HOTCELL_UPDATE=1",
        path.display()
    );
}
