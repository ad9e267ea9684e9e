//! Every row of the op catalogue against NumPy, SciPy, PyTorch and MLX (`tests/golden/ops/make.py`).
//!
//! `HOTCELL_CASES=text` runs only the cases whose op and note contain the text.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use hotcell_graph::{
    Graph, Value,
    graph::Node,
    op::{ValueSpec, catalogue, find},
};
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
};
use hotcell_tests::conformance::{Case, Executor, Local, Remote, cases};

fn chosen() -> Vec<Case> {
    let text = std::env::var("HOTCELL_CASES").unwrap_or_default();
    let mut cases = cases().unwrap();
    cases.retain(|case| case.to_string().contains(&text));
    cases
}

/// Every instruction path of this processor, and one of them with another number of threads.
fn executors() -> Vec<Local> {
    let mut chosen: Vec<(u32, CpuPath)> =
        CpuPath::available().into_iter().map(|p| (2, p)).collect();
    chosen.push((3, CpuPath::Portable));
    chosen
        .into_iter()
        .map(|(threads, path)| {
            let name = format!("cpu/{path} with {threads} threads");
            let open = move || Ok(Rc::new(CpuDevice::with_path(threads, path)?) as Rc<dyn Device>);
            Local::new(name, open).unwrap()
        })
        .collect()
}

#[test]
fn every_case_gives_the_reference_values_on_every_path_of_the_cpu() {
    let (cases, mut executors) = (chosen(), executors());
    let mut failures: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for case in &cases {
        let mut first = None;
        for executor in &mut executors {
            let on = executor.name();
            let mut fail = |what: String| {
                let line = format!("{case} on {on}: {what}");
                failures.entry(case.op.clone()).or_default().push(line);
            };
            match case.check(executor) {
                Err(error) => {
                    fail(format!("{error:#}"));
                    break; // the other paths would say the same
                }
                // The paths' bits are one another's, or a stream could not go on elsewhere.
                Ok(Some(outcome)) if first.as_ref().is_some_and(|f| !case.same(f, &outcome)) => {
                    fail("other bits than on the first path".to_owned());
                }
                Ok(Some(outcome)) => {
                    first.get_or_insert(outcome);
                }
                Ok(None) => {}
            }
        }
    }
    for line in failures.values().flatten() {
        eprintln!("{line}");
    }
    let summary: Vec<String> = failures
        .iter()
        .map(|(op, lines)| format!("{op} {}", lines.len()))
        .collect();
    let failed: usize = failures.values().map(Vec::len).sum();
    assert!(
        failures.is_empty(),
        "{failed} of {} cases fail: {}",
        cases.len(),
        summary.join(", ")
    );
}

#[test]
fn every_case_gives_the_same_on_a_worker_over_grpc() {
    let mut remote = Remote::start().unwrap();
    let mut local = executors().swap_remove(0);
    let mut wrong = Vec::new();
    for case in &chosen() {
        // What is wrong with a value here as well is the other test's.
        let Ok(expected) = case.check(&mut local) else {
            continue;
        };
        match case.check(&mut remote) {
            Err(error) => wrong.push(format!("{case}: {error:#}")),
            Ok(outcome) if outcome != expected => {
                wrong.push(format!("{case}: other bits than in process"))
            }
            Ok(_) => {}
        }
    }
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    remote.check_empty().unwrap();
}

/// A kind of case, what makes it one, and the rows that need none.
struct Class {
    name: &'static str,
    holds: fn(&Graph, &Node) -> bool,
    without: &'static [&'static str],
}

/// Elements of each tensor that a node takes or gives, at the most rows.
fn sizes(graph: &Graph, node: &Node) -> Vec<usize> {
    let inputs = graph.input_specs(node).unwrap().into_iter();
    let inputs = inputs.filter_map(|spec| match spec {
        ValueSpec::Tensor(t) => Some(t.shape),
        _ => None,
    });
    inputs
        .chain(node.outputs.iter().map(|t| t.shape.clone()))
        .map(|shape| shape.elements(graph.max_rows()).unwrap())
        .collect()
}

static CLASSES: &[Class] = &[
    Class {
        name: "empty",
        holds: |g, n| sizes(g, n).contains(&0),
        // Nothing of a cache is empty, and these give at least one element.
        without: &[
            "cache_write",
            "paged_attention",
            "random_categorical",
            "random_split",
        ],
    },
    Class {
        name: "large",
        holds: |g, n| sizes(g, n).iter().any(|s| *s >= 300),
        without: &[],
    },
    Class {
        name: "odd size",
        holds: |g, n| sizes(g, n).iter().any(|s| s % 2 == 1 && *s > 1),
        // A key is two numbers.
        without: &["random_split"],
    },
    Class {
        name: "non-contiguous",
        holds: |_, n| n.inputs.iter().any(|v| matches!(v, Value::Node { .. })),
        // These take no tensor at all, or a cache.
        without: &["literal", "arange", "cache_write", "paged_attention"],
    },
];

#[test]
fn every_row_has_cases_of_every_class_and_every_case_a_row() {
    let mut classes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut lacking = Vec::new();
    for case in cases().unwrap() {
        let Some(row) = find(&case.op) else {
            lacking.push(format!("{case} is of no row"));
            continue;
        };
        let seen = classes.entry(row.name).or_default();
        let (Ok(graph), None) = (case.graph(), case.fails) else {
            continue;
        };
        let node = graph.nodes().iter().rfind(|n| n.op.name == row.name);
        let Some(node) = node else {
            lacking.push(format!("{case} does not use its op"));
            continue;
        };
        let holding = CLASSES.iter().filter(|c| (c.holds)(&graph, node));
        seen.extend(holding.map(|c| c.name));
    }
    for row in catalogue() {
        let Some(seen) = classes.get(row.name) else {
            lacking.push(format!("{} has no cases", row.name));
            continue;
        };
        for class in CLASSES {
            if !seen.contains(class.name) && !class.without.contains(&row.name) {
                lacking.push(format!(
                    "{} has no case of class {:?}",
                    row.name, class.name
                ));
            }
        }
    }
    assert!(lacking.is_empty(), "{}", lacking.join("\n"));
}
