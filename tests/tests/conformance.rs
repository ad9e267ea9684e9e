//! Every row of the op catalogue against NumPy, SciPy, PyTorch and MLX (`tests/golden/ops/make.py`).
//!
//! `HOTCELL_CASES=text` runs only the cases whose op and note contain the text.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use hotcell_graph::{
    DType, Graph, Shape, Value,
    graph::Node,
    op::{ValueSpec, catalogue, find},
};
use hotcell_kernels::{
    backend::{Backend, Device},
    cpu::{CpuBackend, CpuDevice, matmul::sums_by_tiles, path::CpuPath},
};
use hotcell_tests::conformance::{
    Case, Executor, Local, Remote, Scope, cases, derived, dtypes, eager, elementwise, empty, forms,
    fused, moved, moves, moves_input, repeated, turned, zeros,
};

fn chosen() -> Vec<Case> {
    let text = std::env::var("HOTCELL_CASES").unwrap_or_default();
    let mut cases = cases().unwrap();
    cases.retain(|case| case.to_string().contains(&text));
    cases
}

/// Every instruction path of this processor, and one of them with another number of threads.
fn executors() -> Vec<(CpuPath, Local)> {
    let mut chosen: Vec<(u32, CpuPath)> =
        CpuPath::available().into_iter().map(|p| (2, p)).collect();
    chosen.push((3, CpuPath::Portable));
    chosen
        .into_iter()
        .map(|(threads, path)| {
            let name = format!("cpu/{path} with {threads} threads");
            let open = move || Ok(Rc::new(CpuDevice::with_path(threads, path)?) as Rc<dyn Device>);
            (path, Local::new(name, open).unwrap())
        })
        .collect()
}

#[test]
fn every_case_gives_the_reference_values_on_every_path_of_the_cpu() {
    let (cases, mut executors) = (chosen(), executors());
    let mut failures: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for case in &cases {
        let mut first = None;
        for (path, executor) in &mut executors {
            let apart = (DType::ALL.iter())
                .any(|&dtype| sums_by_tiles(*path, dtype) && case.has_weights_in(dtype));
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
                // With tiles it is another numerics class.
                Ok(_) if apart => {}
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
    // On the path that the worker takes as well.
    let open = || CpuBackend.open("cpu:0", &[]);
    let mut local = Local::new("cpu", open).unwrap();
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

/// The best path with one thread and with three, and the plainest; where some of the best one's bits are its own, the best with
/// two.
fn paths() -> [Local; 3] {
    let on = |threads: u32, path: CpuPath| {
        let open = move || Ok(Rc::new(CpuDevice::with_path(threads, path)?) as Rc<dyn Device>);
        Local::new(format!("cpu/{path} with {threads} threads"), open).unwrap()
    };
    let best = CpuPath::detect();
    let other = match best {
        CpuPath::Amx => best,
        _ => CpuPath::Portable,
    };
    [on(1, best), on(3, best), on(2, other)]
}

/// Whether only some cases are run.
fn is_part() -> bool {
    std::env::var_os("HOTCELL_CASES").is_some()
}

#[test]
fn elementwise_rows_give_an_element_the_same_in_every_shape_and_dtype() {
    let mut paths = paths();
    let mut executors = paths.each_mut().map(|path| path as &mut dyn Executor);
    let classed = forms(&chosen(), &mut executors, Scope::ALL);
    println!("{} graphs", classed.all_right().unwrap());
    if !is_part() {
        let seen = classed.rows();
        let without = elementwise().filter(|row| !seen.contains(row.name));
        let without: Vec<&str> = without.map(|row| row.name).collect();
        assert!(without.is_empty(), "no flat case of {without:?}");
    }
}

#[test]
fn elementwise_rows_give_the_same_fused_and_apart() {
    let mut paths = paths();
    let mut executors = paths.each_mut().map(|path| path as &mut dyn Executor);
    let classed = fused(&chosen(), &mut executors, Scope::ALL);
    println!("{} graphs", classed.all_right().unwrap());
    if !is_part() {
        let all: BTreeSet<&str> = elementwise().map(|row| row.name).collect();
        assert_eq!(classed.rows(), all);
    }
}

#[test]
fn graphs_give_what_their_ops_give_one_by_one() {
    let mut paths = paths();
    let mut executors = paths.each_mut().map(|path| path as &mut dyn Executor);
    let classed = eager(&chosen(), &mut executors, Scope::ALL);
    println!("{} graphs", classed.all_right().unwrap());
}

#[test]
fn of_zeros_of_both_signs_the_greatest_is_positive_and_the_least_negative() {
    for executor in &mut paths() {
        zeros(executor).unwrap();
    }
}

#[test]
fn derived_classes_give_the_same_on_a_worker_over_grpc() {
    let (mut cases, mut remote) = (chosen(), Remote::start().unwrap());
    // One of each combination of some dtypes: what a note is about, and what a dtype is, are the kernels', and are tried above.
    cases.retain(|case| case.reads_only(&[DType::Bool, DType::I32, DType::BF16, DType::F32]));
    let scope = Scope {
        every_note: false,
        ..Scope::ALL
    };
    // One dtype of each size of element.
    let sizes = [DType::Bool, DType::BF16, DType::F32, DType::C64];
    let executors: &mut [&mut dyn Executor] = &mut [&mut remote];
    derived(&cases, executors, scope, &sizes).unwrap();
    remote.check_empty().unwrap();
}

/// Rows of which no golden case can be repeated, and why.
const NOT_REPEATED: &[(&[&str], &str)] = &[
    (
        &["literal", "arange", "random_bits", "random_split"],
        "made of nothing, or of a key",
    ),
    (
        &[
            "random_uniform",
            "random_normal",
            "random_bernoulli",
            "random_categorical",
        ],
        "each number is another one",
    ),
    (
        &["all_close", "array_equal"],
        "an elementwise op and a reduction, which are here",
    ),
    (
        &[
            "reshape",
            "transpose",
            "broadcast_to",
            "slice",
            "pad",
            "expand_dims",
            "squeeze",
            "flatten",
            "tile",
            "stack",
            "scatter_nd",
        ],
        "places elements by the whole shape",
    ),
    (&["gather_mm"], "takes and matrix products, which are here"),
    (
        &[
            "bitcast",
            "tril",
            "triu",
            "diag",
            "diagonal",
            "as_strided",
            "slice_update",
            "slice_dynamic",
            "slice_update_dynamic",
        ],
        "counts its places out by the whole shape, for takes and scatters, which are here",
    ),
    (
        &[
            "einsum",
            "quantize",
            "quantize_float",
            "dequantize",
            "quantized_matmul",
            "gather_qmm",
            "to_fp8",
            "from_fp8",
        ],
        "made of bit ops, products and sums, which are here",
    ),
    (
        &["cache_write", "paged_attention"],
        "of a cache; tests/tests/engine has long ones",
    ),
];

#[test]
fn what_is_repeated_many_times_gives_the_same_many_times() {
    let mut paths = paths();
    let mut executors = paths.each_mut().map(|path| path as &mut dyn Executor);
    let classed = repeated(&chosen(), &mut executors, Scope::ALL);
    println!("{} graphs", classed.all_right().unwrap());
    if !is_part() {
        let (seen, elementwise) = (classed.rows(), elementwise());
        let elementwise: BTreeSet<&str> = elementwise.map(|row| row.name).collect();
        let mut without: BTreeSet<&str> = catalogue().map(|row| row.name).collect();
        without.retain(|row| !seen.contains(row) && !elementwise.contains(row));
        for row in NOT_REPEATED.iter().flat_map(|(rows, _)| *rows) {
            assert!(without.remove(row), "{row} is repeated");
        }
        assert!(without.is_empty(), "no case can be repeated of {without:?}");
    }
}

#[test]
fn rows_that_move_elements_move_those_of_every_dtype_alike() {
    let open = || Ok(Rc::new(CpuDevice::with_path(2, CpuPath::detect())?) as Rc<dyn Device>);
    let mut executor = Local::new("cpu".to_owned(), open).unwrap();
    let plain: Vec<DType> = DType::ALL
        .iter()
        .copied()
        .filter(|d| !d.is_block())
        .collect();
    let classed = moved(&chosen(), &mut [&mut executor], &plain);
    println!("{} graphs", classed.all_right().unwrap());
    if !is_part() {
        let moving = catalogue().filter(|row| moves(row)).map(|row| row.name);
        assert_eq!(classed.rows(), moving.collect());
    }
}

/// Rows and classes of which not every dtype has a case, and why. Those that move elements have them all by another test.
const NOT_OF_EVERY_DTYPE: &[(&[&str], &[&str], &str)] = &[
    (
        &["all_close", "array_equal", "gather_mm"],
        &["empty", "large", "odd", "non-contiguous"],
        "made of sums, comparisons, takes and products, which are here",
    ),
    (
        &["literal"],
        &["empty", "large", "scalar"],
        "bytes of the graph",
    ),
    (
        &["random_categorical"],
        &["large"],
        "each draw is another one",
    ),
    (
        &["get_rows"],
        &["non-contiguous"],
        "weights of blocks lie as they are stored",
    ),
    (
        &["scatter_nd", "slice_update_dynamic"],
        &["empty", "large"],
        "places elements by the whole shape; f32 has such cases",
    ),
    (
        &["bitcast"],
        &["empty", "large", "non-contiguous", "scalar"],
        "a copy of bytes, whatever they are; f32 has such cases",
    ),
    (
        &[
            "einsum",
            "quantize",
            "quantize_float",
            "quantized_matmul",
            "gather_qmm",
            "to_fp8",
        ],
        &["empty", "large", "odd"],
        "made of bit ops, products and sums, which are here",
    ),
];

#[test]
fn every_dtype_of_a_row_has_cases_of_every_class() {
    let open = || Ok(Rc::new(CpuDevice::with_path(2, CpuPath::detect())?) as Rc<dyn Device>);
    let mut executor = Local::new("cpu".to_owned(), open).unwrap();
    let elementwise: BTreeSet<&str> = elementwise().map(|row| row.name).collect();
    let mut seen: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    let cases = chosen();
    for case in &cases {
        let row = find(&case.op).unwrap();
        let (Some(first), None) = (case.first_dtype(), case.fails) else {
            continue;
        };
        if moves(row) || elementwise.contains(row.name) {
            continue;
        }
        let graph = case.graph().unwrap();
        let node = graph.nodes().iter().rfind(|n| n.op.name == row.name);
        let classes = seen.entry((row.name, first.name())).or_default();
        let holding = CLASSES.iter().filter(|c| (c.holds)(&graph, node.unwrap()));
        classes.extend(holding.map(|c| c.name));
        let odd = |shape: &Shape| shape.dims().iter().any(|d| d.at(0) % 2 == 1 && d.at(0) > 1);
        if shapes(&graph, node.unwrap()).iter().any(odd) {
            classes.insert("odd");
        }
    }
    for (class, classed) in [
        (
            "non-contiguous",
            turned(&cases, &mut [&mut executor], Scope::ALL),
        ),
        ("empty", empty(&cases, &mut [&mut executor])),
        ("large", repeated(&cases, &mut [&mut executor], Scope::ALL)),
    ] {
        println!("{class}: {} graphs", classed.all_right().unwrap());
        for (row, dtype) in &classed.seen {
            if let Some(classes) = seen.get_mut(&(*row, dtype.name())) {
                classes.insert(class);
            }
        }
    }
    if is_part() {
        return;
    }
    let mut lacking = Vec::new();
    let mut excused = BTreeSet::new();
    for ((row, dtype), classes) in &seen {
        // Odd is an axis here: a row works along one, whatever the others.
        for name in [
            "empty",
            "large",
            "odd",
            "scalar",
            "broadcast",
            "non-contiguous",
        ] {
            let class = CLASSES.iter().find(|c| c.name.starts_with(name)).unwrap();
            if classes.contains(name) || class.without.contains(row) {
                continue;
            }
            let excuse = NOT_OF_EVERY_DTYPE
                .iter()
                .position(|(rows, classes, _)| rows.contains(row) && classes.contains(&name));
            match excuse {
                Some(excuse) => drop(excused.insert((excuse, *row))),
                None => lacking.push(format!("{row} {dtype} {name}")),
            }
        }
    }
    assert!(
        lacking.is_empty(),
        "{}:\n{}",
        lacking.len(),
        lacking.join("\n")
    );
    let excuses = NOT_OF_EVERY_DTYPE.iter().enumerate();
    let given = excuses.flat_map(|(at, (rows, ..))| rows.iter().map(move |row| (at, *row)));
    let idle: Vec<_> = given.filter(|one| !excused.contains(one)).collect();
    assert!(idle.is_empty(), "excuses that nobody needs: {idle:?}");
}

/// Dtypes that a row takes and no case has, and why. Only ever fewer.
const WITHOUT_A_CASE: &[(&str, &str, &[&str], &str)] = &[];

#[test]
fn every_dtype_that_a_row_takes_has_a_case() {
    let (taken, seen) = dtypes(&cases().unwrap());
    let mut lacking = BTreeSet::new();
    for ((row, place), dtypes) in &taken {
        let row = find(row).unwrap();
        let have = seen.get(&(row.name, *place)).cloned().unwrap_or_default();
        for dtype in dtypes.difference(&have) {
            let plain = !DType::from_name(dtype).unwrap().is_block();
            // These have all of them by another test.
            if !(plain && moves_input(row, place.0)) {
                lacking.insert((row.name, place.0, *dtype));
            }
        }
    }
    for (row, place, dtypes, why) in WITHOUT_A_CASE {
        for dtype in *dtypes {
            let listed = lacking.remove(&(*row, *place, *dtype));
            assert!(
                listed,
                "{row} {place} {dtype} ({why}): take it from the list"
            );
        }
    }
    let lacking: Vec<String> = lacking
        .iter()
        .map(|(row, place, dtype)| format!("{row} {place} {dtype}"))
        .collect();
    assert!(
        lacking.is_empty(),
        "{}:\n{}",
        lacking.len(),
        lacking.join("\n")
    );
    // The rules are asked indeed: what they take are more than half of all there could be.
    let taken: usize = taken.values().map(BTreeSet::len).sum();
    assert!(taken > 1500, "{taken}");
}

/// A kind of case, what makes it one, and the rows that need none.
struct Class {
    name: &'static str,
    holds: fn(&Graph, &Node) -> bool,
    without: &'static [&'static str],
}

/// The different shapes among a node's inputs.
fn input_shapes(graph: &Graph, node: &Node) -> Vec<Shape> {
    let mut shapes: Vec<Shape> = Vec::new();
    for spec in graph.input_specs(node).unwrap() {
        if let ValueSpec::Tensor(t) = spec
            && !shapes.contains(&t.shape)
        {
            shapes.push(t.shape);
        }
    }
    shapes
}

/// The shapes that a node takes and gives.
fn shapes(graph: &Graph, node: &Node) -> Vec<Shape> {
    let mut shapes = input_shapes(graph, node);
    shapes.extend(node.outputs.iter().map(|t| t.shape.clone()));
    shapes
}

/// Elements of each tensor that a node takes or gives, at the most rows.
fn sizes(graph: &Graph, node: &Node) -> Vec<usize> {
    let shapes = shapes(graph, node).into_iter();
    shapes
        .map(|shape| shape.elements(graph.max_rows()).unwrap())
        .collect()
}

/// Rows whose operands are matrices, and broadcast by the axes before these.
const PRODUCTS: &[&str] = &["addmm", "einsum", "matmul"];

/// The different axes before the last two among a node's inputs.
fn batches(graph: &Graph, node: &Node) -> BTreeSet<Vec<usize>> {
    let shapes = input_shapes(graph, node).into_iter();
    let batch = |shape: Shape| {
        let dims = shape.dims().iter().map(|d| d.at(graph.max_rows()));
        let dims: Vec<usize> = dims.collect();
        dims[..dims.len().saturating_sub(2)].to_vec()
    };
    shapes.map(batch).collect()
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
        name: "scalar",
        holds: |g, n| shapes(g, n).iter().any(|s| s.rank() == 0),
        // What is along an axis needs one.
        without: &[
            "add_id",
            "all_gather",
            "arange",
            "argsort",
            "cache_write",
            "concat",
            "conv",
            "conv_transpose",
            "col2im",
            "cummax",
            "cummin",
            "cumprod",
            "cumsum",
            "dequantize",
            "diag",
            "diagonal",
            "cholesky",
            "eig",
            "eigh",
            "lu",
            "qr",
            "solve",
            "solve_triangular",
            "svd",
            "fft",
            "gated_delta",
            "gather_mm",
            "gather_qmm",
            "get_rows",
            "group_norm",
            "im2col",
            "interpolate",
            "l2_norm",
            "layer_norm",
            "log_softmax",
            "logcumsumexp",
            "mamba2_scan",
            "mul_mat",
            "mul_mat_id",
            "mul_mat_id_scaled",
            "mul_mat_scaled",
            "paged_attention",
            "pool",
            "quantize",
            "quantize_float",
            "quantized_matmul",
            "random_categorical",
            "random_split",
            "repeat",
            "rms_norm",
            "roll",
            "rope",
            "rotary_embedding",
            "scaled_dot_product_attention",
            "scatter_along_axis",
            "scatter_nd",
            "slice_update_dynamic",
            "softmax",
            "sort",
            "split",
            "ssm_conv",
            "take_along_axis",
            "topk",
            "tril",
            "triu",
        ],
    },
    Class {
        name: "broadcast",
        // Both ways, or one operand to the other; a row that does not say so needs none.
        holds: |g, n| match PRODUCTS.contains(&n.op.name) {
            true => batches(g, n).len() > 1,
            false => !n.op.shapes.contains("broadcast(") || input_shapes(g, n).len() > 1,
        },
        without: &[],
    },
    Class {
        name: "non-contiguous",
        holds: |_, n| n.inputs.iter().any(|v| matches!(v, Value::Node { .. })),
        // These take no tensor at all, or a cache.
        without: &["literal", "arange", "cache_write", "paged_attention"],
    },
];

/// Rows whose kernels work in blocks, or whose operands are found by indices, and the elements of a case that has many of them.
const TRULY_LARGE: (&[&str], usize) = (&["gather_mm", "mul_mat", "quantized_matmul"], 100_000);

#[test]
fn products_have_cases_that_are_large_and_do_not_repeat_themselves() {
    let (rows, least) = TRULY_LARGE;
    let mut found = BTreeSet::new();
    for case in cases().unwrap().iter().filter(|case| case.fails.is_none()) {
        let graph = case.graph().unwrap();
        let repeats = graph
            .nodes()
            .iter()
            .any(|n| ["tile", "repeat"].contains(&n.op.name));
        let node = graph
            .nodes()
            .iter()
            .rfind(|n| n.op.name == case.op)
            .unwrap();
        let large = sizes(&graph, node).iter().filter(|s| **s >= least).count();
        // What it reads or gives, beside the other operand.
        if !repeats && large >= 2 {
            found.insert(case.op.clone());
        }
    }
    let lacking: Vec<_> = rows.iter().filter(|row| !found.contains(**row)).collect();
    assert!(lacking.is_empty(), "{lacking:?}");
}

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
