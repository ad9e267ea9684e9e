//! Compiled functions: they give what their ops give one by one, for every arity, dtype, rank and size, and leave nothing.
//!
//! `HOTCELL_SEED=n` begins the random programs there.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    borrow::Cow,
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hotcell_client::{
    Address, Reason,
    tensor::{Compiled, DType, HostTensor, Session, SessionOptions, Shape, Tensor, TensorSpec},
};
use hotcell_graph::{
    Graph, Value,
    op::{Attribute, ValueSpec},
};
use hotcell_tests::{
    cluster::Cluster,
    conformance::{Check, difference},
    fuzz::{case_seed, program},
};

/// Which worker is tested.
const WORKER: &[&str] = hotcell_tests::worker_tested!();

/// Random programs that have to be compared.
const PROGRAMS: usize = 300;
/// Elements of all tensors of one of them.
const ELEMENTS: u128 = 1 << 14;

async fn cluster() -> (Cluster, Address) {
    let cluster = Cluster::ready_with(WORKER).await.unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    (cluster, address.parse().unwrap())
}

async fn open(address: &Address) -> Session {
    let options = SessionOptions::default();
    Session::open(address, options).await.unwrap()
}

/// A graph's operations on tensors, by the methods' own way. Results of all nodes, in order.
fn nodes(graph: &Graph, arguments: &[Tensor]) -> Vec<Vec<Tensor>> {
    let mut made: Vec<Vec<Tensor>> = Vec::new();
    for node in graph.nodes() {
        let inputs = node
            .inputs
            .iter()
            .map(|&input| value(input, arguments, &made));
        let inputs: Vec<Option<Tensor>> = inputs.collect();
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        made.push(Tensor::apply(
            node.op.name,
            &inputs,
            node.attributes.clone(),
        ));
    }
    made
}

fn value(value: Value, arguments: &[Tensor], made: &[Vec<Tensor>]) -> Option<Tensor> {
    match value {
        Value::Absent => None,
        Value::Input(i) => Some(arguments[i as usize].clone()),
        Value::Node { node, output } => Some(made[node as usize][output as usize].clone()),
    }
}

fn outputs(graph: &Graph, arguments: &[Tensor]) -> Vec<Tensor> {
    let made = nodes(graph, arguments);
    let outputs = graph.outputs().iter();
    outputs
        .filter_map(|&output| value(output, arguments, &made))
        .collect()
}

/// Nodes that values need, and whether one of the graph's inputs is needed as well.
fn needed(graph: &Graph, values: &[Value]) -> (HashSet<usize>, bool) {
    let (mut needed, mut input) = (HashSet::new(), false);
    let mut open: Vec<Value> = values.to_vec();
    while let Some(value) = open.pop() {
        match value {
            Value::Node { node, .. } if needed.insert(node as usize) => {
                open.extend(&graph.nodes()[node as usize].inputs);
            }
            Value::Input(_) => input = true,
            _ => {}
        }
    }
    (needed, input)
}

/// Inputs of a graph as tensors; none if it has some that are not plain, sizes that are not known, or results that are
/// made of nothing, which belong to no session.
fn arguments(session: &Session, graph: &Graph, bytes: Vec<Vec<u8>>) -> Option<Vec<Tensor>> {
    let symbolic = |a: &Attribute| matches!(a, Attribute::Shape(s) if s.is_symbolic());
    let mut attributes = graph.nodes().iter().flat_map(|n| &n.attributes);
    let mut outputs = graph.outputs().iter();
    if attributes.any(symbolic) || !outputs.all(|&o| needed(graph, &[o]).1) {
        return None;
    }
    let rows = graph.max_rows();
    let inputs = graph.inputs().iter().zip(bytes);
    inputs
        .map(|(input, bytes)| match &input.spec {
            ValueSpec::Tensor(t) => {
                let dims: Vec<usize> = t.shape.dims().iter().map(|d| d.at(rows)).collect();
                let spec = TensorSpec::new(t.dtype, Shape::fixed(&dims).ok()?).ok()?;
                Some(session.host(HostTensor::new(spec, bytes).ok()?))
            }
            _ => None,
        })
        .collect()
}

async fn bytes(tensors: &[Tensor]) -> Result<Vec<HostTensor>, hotcell_client::Error> {
    let mut all = Vec::new();
    for tensor in tensors {
        all.push(tensor.fetch().await?);
    }
    Ok(all)
}

/// A tensor's bytes. Every byte but zero is true: MLX makes a one of what a copy elsewhere keeps.
fn numbers(array: &HostTensor) -> Cow<'_, [u8]> {
    match array.spec().dtype {
        DType::Bool => array.bytes().iter().map(|&b| u8::from(b != 0)).collect(),
        _ => array.bytes().as_ref().into(),
    }
}

// Programs are grown beside the connection's own tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compiled_programs_give_what_their_ops_give_one_by_one() {
    let (_cluster, address) = cluster().await;
    let session = open(&address).await;
    let seed = std::env::var("HOTCELL_SEED").map_or(3, |s| s.parse().unwrap());
    let (mut compared, mut failed) = (0, 0);
    for index in 0.. {
        if compared >= PROGRAMS {
            break;
        }
        assert!(
            index < 5000,
            "{compared} programs compared, {failed} failed"
        );
        let Some((graph, inputs)) = program(case_seed(seed, index), ELEMENTS) else {
            continue;
        };
        let Some(arguments) = arguments(&session, &graph, inputs) else {
            continue;
        };
        // One by one: nothing that one op gives is known to the next but its value.
        let (needed, _) = needed(&graph, graph.outputs());
        let mut eager: Result<(), _> = Ok(());
        let made = nodes(&graph, &arguments);
        for (_, results) in made.iter().enumerate().filter(|(n, _)| needed.contains(n)) {
            eager = session.eval(results).await;
            if eager.is_err() {
                break;
            }
        }
        let wanted = graph.outputs().iter();
        let wanted: Vec<Tensor> = wanted
            .filter_map(|&o| value(o, &arguments, &made))
            .collect();
        let expected = match eager {
            Ok(()) => bytes(&wanted).await,
            Err(error) => Err(error),
        };
        let graph = Arc::new(graph);
        let of = |shapeless: bool| -> Compiled {
            let graph = Arc::clone(&graph);
            let function = move |arguments: &[Tensor]| outputs(&graph, arguments);
            match shapeless {
                true => session.compile_shapeless(function),
                false => session.compile(function),
            }
        };
        for shapeless in [false, true] {
            let called = of(shapeless).call_eval(&arguments).await;
            let got = match called {
                Ok(results) => bytes(&results).await,
                Err(error) => Err(error),
            };
            match (&expected, got) {
                (Ok(expected), Ok(got)) => {
                    assert_eq!(expected.len(), got.len());
                    for (a, b) in expected.iter().zip(&got) {
                        assert_eq!(a.spec(), b.spec(), "program {index} of {seed}");
                        let dtype = a.spec().dtype;
                        let (a, b) = (numbers(a), numbers(b));
                        let same = difference(dtype, Check::Exact, 0.0, &b, &a);
                        same.unwrap_or_else(|e| {
                            panic!("program {index} of {seed}, shapeless {shapeless}, {dtype}: {e}")
                        });
                    }
                    // Both ways.
                    compared += usize::from(shapeless);
                }
                // An index out of range, say: for one reason and in one op, whichever of several wrong numbers is named.
                (Err(a), Err(b)) => {
                    let of =
                        |e: &hotcell_client::Error| (e.reason(), e.get("op").map(str::to_owned));
                    assert_eq!(of(a), of(&b), "program {index} of {seed}: {a}; and {b}");
                    failed += 1;
                }
                (Err(e), Ok(_)) => panic!("program {index} of {seed} fails one by one: {e}"),
                (Ok(_), Err(e)) => panic!("program {index} of {seed} fails compiled: {e}"),
            }
        }
    }
    println!("{compared} compared, {failed} failed in both ways");
}

#[tokio::test]
async fn another_arity_dtype_or_rank_is_another_trace() {
    let (_cluster, address) = cluster().await;
    let session = open(&address).await;
    let f = |values: &[f32], shape: &[usize]| session.tensor(values, shape).unwrap();
    let calls = [
        (vec![f(&[1.0, 2.0], &[2])], 3.0),
        (vec![f(&[1.0, 2.0], &[2]), f(&[4.0, 8.0], &[2])], 15.0),
        (vec![f(&[1.0, 2.0], &[1, 2])], 3.0),
        (vec![f(&[1.0, 2.0], &[2]).cast(DType::BF16)], 3.0),
        (vec![f(&[1.0, 2.0], &[2]).cast(DType::I32)], 3.0),
        (vec![f(&[1.0, 2.0], &[2, 1]), f(&[4.0], &[1])], 7.0),
    ];
    for shapeless in [false, true] {
        let traced = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&traced);
        let sum = move |arguments: &[Tensor]| {
            count.fetch_add(1, Ordering::Relaxed);
            let sums = arguments.iter().map(|a| a.sum(&[], false));
            let all = sums.reduce(|a, b| a + b).unwrap();
            vec![all.cast(DType::F32)]
        };
        let function = match shapeless {
            true => session.compile_shapeless(sum),
            false => session.compile(sum),
        };
        // The second time round nothing is traced.
        for _ in 0..2 {
            for (arguments, expected) in &calls {
                let result = function.call_eval(arguments).await.unwrap();
                assert_eq!(result[0].item::<f32>().await.unwrap(), *expected);
            }
        }
        assert_eq!(traced.load(Ordering::Relaxed), calls.len());
        // Another size is another trace only where sizes count.
        let three = f(&[1.0, 2.0, 3.0], &[3]);
        let result = function.call_eval(&[three]).await.unwrap();
        assert_eq!(result[0].item::<f32>().await.unwrap(), 6.0);
        let more = usize::from(!shapeless);
        assert_eq!(traced.load(Ordering::Relaxed), calls.len() + more);
    }
}

#[tokio::test]
async fn no_size_of_the_first_trace_stays_in_a_shapeless_function() {
    let (_cluster, address) = cluster().await;
    let session = open(&address).await;
    let key = session.random_key(5);
    type Function = fn(&[Tensor]) -> Vec<Tensor>;
    // What MLX refuses or gets wrong: mlx#3201, #4460, and sizes that a trace baked in.
    let functions: [(&str, Function); 13] = [
        ("split columns", |a| a[0].split(&[1, 2], 1)),
        ("split rows", |a| {
            let n = a[0].shape().unwrap()[0] as i64;
            a[0].split(&[1, n - 1], 0)
        }),
        ("running sum over the rows", |a| {
            vec![a[0].cumsum(0, Default::default())]
        }),
        ("running sum over the columns", |a| {
            vec![a[0].cumsum(1, Default::default())]
        }),
        ("running product", |a| {
            vec![a[0].cumprod(0, Default::default())]
        }),
        ("random numbers of its shape", |a| {
            let shape = a[0].shape().unwrap();
            vec![&a[0] + &a[1].random_uniform(&shape, 0.0, 1.0)]
        }),
        ("random numbers beside it", |a| {
            vec![&a[0] + &a[1].random_normal(&[3], 0.0, 1.0)]
        }),
        ("sum over the rows", |a| vec![a[0].sum(&[0], true)]),
        ("greatest of the rows", |a| vec![a[0].max(&[0], false)]),
        ("mean over all", |a| vec![a[0].mean(&[], false)]),
        ("variance over the rows", |a| {
            vec![a[0].variance(&[0], false, 0)]
        }),
        ("without axes of one", |a| {
            vec![a[0].narrow(1, 0, 1).squeeze(&[]) * 2.0, &a[0] + 1.0]
        }),
        ("take the greatest", |a| {
            vec![a[0].take(&a[0].argmax(0, false), 0)]
        }),
    ];
    for (name, function) in functions {
        // First traced at one row, at many, and at as many as the key has numbers.
        for sizes in [[1, 4, 2, 7], [7, 1, 2, 3], [2, 1, 3, 100]] {
            let compiled = session.compile_shapeless(function);
            for n in sizes {
                let values: Vec<f32> = (0..n * 3).map(|v| (v % 7) as f32 * 0.25 - 0.5).collect();
                let x = session.tensor(&values, &[n, 3]).unwrap();
                let arguments = [x, key.clone()];
                let eager = function(&arguments);
                let called = compiled.call_eval(&arguments).await.unwrap();
                assert_eq!(called.len(), eager.len());
                for (called, eager) in called.iter().zip(&eager) {
                    let (a, b) = (called.fetch().await.unwrap(), eager.fetch().await.unwrap());
                    assert_eq!(a, b, "{name} of {n} rows, of {sizes:?}");
                }
            }
        }
    }
}

#[tokio::test]
async fn an_op_that_a_device_has_for_known_sizes_only_is_planned_for_each() {
    let (_cluster, address) = cluster().await;
    let session = open(&address).await;
    let traced = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&traced);
    let pick = session.compile_shapeless(move |a| {
        count.fetch_add(1, Ordering::Relaxed);
        vec![a[0].get_rows(&a[1]) * 2.0]
    });
    // A q8_0 block is a scale, here 0.5, and 32 numbers, here the row's own.
    let table = |rows: usize| {
        let spec = TensorSpec::new(DType::Q8_0, Shape::fixed(&[rows, 32]).unwrap()).unwrap();
        let row = |r: usize| [&half::f16::from_f32(0.5).to_le_bytes()[..], &[r as u8; 32]].concat();
        let bytes: Vec<u8> = (0..rows).flat_map(row).collect();
        session.host(HostTensor::new(spec, bytes).unwrap())
    };
    let at = session.tensor(&[2i32, 0], &[2]).unwrap();
    let expected = [[2.0f32; 32], [0.0; 32]].concat();
    let mut pipeline = session.pipeline().await.unwrap();
    for (n, rows) in [3, 5, 3].into_iter().enumerate() {
        let arguments = [table(rows), at.clone()];
        pick.reserve(&arguments).await.unwrap();
        let called = pick.call_eval(&arguments).await.unwrap();
        assert_eq!(called[0].to_vec::<f32>().await.unwrap(), expected);
        let call = pipeline.call(&pick, &arguments).await.unwrap();
        let results = call.wait().await.unwrap();
        assert_eq!(results[0].to_vec::<f32>().await.unwrap(), expected);
        // Once in vain, and once for each size.
        assert_eq!(traced.load(Ordering::Relaxed), 2 + n.min(1), "{rows} rows");
    }
    // What is wrong is said as of any function.
    let far = session.tensor(&[3i32], &[1]).unwrap();
    let error = pick.call_eval(&[table(3), far]).await.unwrap_err();
    assert_eq!(error.reason(), Reason::IndexOutOfRange, "{error:?}");
}

#[tokio::test]
async fn nothing_is_left_of_a_read_a_trace_or_a_dropped_function() {
    let (_cluster, address) = cluster().await;
    let session = open(&address).await;
    let half = session
        .tensor(&[1.5f32, -2.0], &[2])
        .unwrap()
        .cast(DType::F16);
    half.eval().await.unwrap();
    let held = session.memory().await.unwrap();
    for _ in 0..3 {
        // No cast of it is kept anywhere, and reading frees nothing that is in use.
        let read = half.to_vec::<half::f16>().await.unwrap();
        assert_eq!(
            read.iter().map(|v| v.to_f32()).collect::<Vec<_>>(),
            [1.5, -2.0]
        );
        half.dump(Default::default()).await.unwrap();
        half.fetch().await.unwrap();
        let now = session.memory().await.unwrap();
        assert_eq!(
            (now.tensors, now.active, now.plans),
            (held.tensors, held.active, held.plans)
        );
    }
    assert_eq!(
        half.cast(DType::F32).to_vec::<f32>().await.unwrap(),
        [1.5, -2.0]
    );
    assert_eq!(session.memory().await.unwrap().tensors, held.tensors);

    // A function that cannot be traced leaves nothing, one that can no tensor.
    for n in 0..200 {
        let function = session.compile(move |a| {
            assert!(n % 2 == 0, "an odd one");
            vec![&a[0] * f64::from(n) + 1.0]
        });
        let result = function.call_eval(std::slice::from_ref(&half)).await;
        assert_eq!(result.is_ok(), n % 2 == 0);
        let lazy = function.call(std::slice::from_ref(&half));
        assert_eq!(lazy.is_ok(), n % 2 == 0);
    }
    let left = session.memory().await.unwrap();
    assert_eq!(left.tensors, held.tensors);
    // Plans are kept for whoever writes the same expression again, and not more than so many.
    assert!(left.plans <= 64, "{} plans", left.plans);
}
