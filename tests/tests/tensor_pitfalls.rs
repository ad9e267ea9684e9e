//! What went wrong in the systems before this one (MLX's compiled functions and the bindings above them), tried on our API.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Reason,
    tensor::{
        Backend, BackendParams, DType, DumpOptions, HostTensor, Session, SessionOptions, Tensor,
        TensorFile,
    },
};
use hotcell_tests::cluster::{Cluster, all_have, kjv};

/// Which worker is tested.
const WORKER: &[&str] = hotcell_tests::worker_tested!();

fn address(cluster: &Cluster) -> Address {
    format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap()
}

async fn session(cluster: &Cluster) -> Session {
    let options = SessionOptions::default();
    Session::open(&address(cluster), options).await.unwrap()
}

async fn cluster() -> Cluster {
    Cluster::ready_with(WORKER).await.unwrap()
}

/// `[rows, columns]` of different numbers.
fn table(session: &Session, rows: usize, columns: usize) -> Tensor {
    let values: Vec<f32> = (0..rows * columns).map(|v| v as f32 * 0.5 - 3.0).collect();
    session.tensor(&values, &[rows, columns]).unwrap()
}

/// Shapes and values of results, or why there are none.
async fn outcome(results: Result<Vec<Tensor>, Reason>) -> Result<Vec<HostTensor>, Reason> {
    let mut fetched = Vec::new();
    for result in results? {
        fetched.push(result.fetch().await.map_err(|e| e.reason())?);
    }
    Ok(fetched)
}

type Function = Arc<dyn Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync>;

fn function(f: impl Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync + 'static) -> Function {
    Arc::new(f)
}

/// Calls a function as it is, compiled, and compiled for any size, with tables of these shapes in turn: all three give the same
/// values, or fail for the same reason.
async fn agree(session: &Session, name: &str, f: &Function, shapes: &[(usize, usize)]) {
    let (one, two) = (Arc::clone(f), Arc::clone(f));
    let fixed = session.compile(move |a| one(a));
    let shapeless = session.compile_shapeless(move |a| two(a));
    for &(rows, columns) in shapes {
        let x = [table(session, rows, columns)];
        let eager = outcome(Ok(f(&x))).await;
        for (compiled, kind) in [(&fixed, "compiled"), (&shapeless, "shapeless")] {
            let what = format!("{name}, {kind}, of [{rows}, {columns}]");
            let called = compiled.call_eval(&x).await.map_err(|e| e.reason());
            assert_eq!(outcome(called).await, eager, "{what}");
            let lazy = compiled.call(&x).map_err(|e| e.reason());
            assert_eq!(outcome(lazy).await, eager, "{what}, lazily");
        }
    }
}

#[tokio::test]
async fn functions_of_any_size_bake_in_no_size() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let columns = session.tensor(&[0i64, 3, -1], &[3]).unwrap();
    let rows = session.tensor(&[3i32, 0], &[2]).unwrap();
    let all = |s: &Session, n: usize| s.arange(0.0, n as f64, 1.0, DType::I32);
    let own = session.clone();
    let functions: Vec<(&str, Function)> = vec![
        // In MLX a reshape that changes nothing when it is traced is left out of the trace.
        (
            "reshape to a fixed size",
            function(|a| vec![a[0].reshape(&[4, 4]) + 1.0]),
        ),
        (
            "reshape to other fixed sizes",
            function(|a| vec![a[0].reshape(&[2, 8])]),
        ),
        (
            "reshape that keeps the rows",
            function(|a| vec![a[0].reshape(&[-1, 2, 2])]),
        ),
        ("flatten", function(|a| vec![a[0].reshape(&[-1])])),
        // In MLX these are read out of bounds when the next argument is smaller.
        (
            "take constant columns",
            function({
                let columns = columns.clone();
                move |a: &[Tensor]| vec![a[0].take(&columns, 1)]
            }),
        ),
        (
            "take constant rows",
            function({
                let rows = rows.clone();
                move |a: &[Tensor]| vec![a[0].take(&rows, 0)]
            }),
        ),
        (
            "take as many columns as there are",
            function({
                let own = own.clone();
                move |a: &[Tensor]| vec![a[0].take(&all(&own, a[0].shape().unwrap()[1]), 1)]
            }),
        ),
        (
            "take as many rows as there are",
            function({
                let own = own.clone();
                move |a: &[Tensor]| vec![a[0].take(&all(&own, a[0].shape().unwrap()[0]), 0)]
            }),
        ),
        // In MLX a reduction along an axis that is 1 when it is traced is left out.
        (
            "sum over the rows",
            function(|a| vec![a[0].sum(&[0], false)]),
        ),
        (
            "sum over the rows, kept",
            function(|a| vec![a[0].sum(&[0], true) + &a[0]]),
        ),
        ("mean of all", function(|a| vec![a[0].mean(&[], false)])),
        (
            "divide by the number of rows",
            function(|a| {
                let n = a[0].shape().unwrap()[0];
                vec![&a[0] / n as f64]
            }),
        ),
        (
            "divide by the number of elements",
            function(|a| {
                let n = a[0].size().unwrap();
                vec![&a[0] / n as f64]
            }),
        ),
        // In MLX these cannot be traced for any size, or give the size of the first call.
        (
            "a part of the rows",
            function(|a| vec![a[0].narrow(0, 1, 3)]),
        ),
        (
            "all but the last row",
            function(|a| vec![a[0].narrow(0, 0, -1)]),
        ),
        (
            "running sums of the rows",
            function(|a| vec![a[0].cumsum(0, Default::default())]),
        ),
        (
            "two halves",
            function(|a| {
                let n = a[0].shape().unwrap()[0] as i64;
                vec![a[0].narrow(0, 0, n / 2), a[0].narrow(0, n / 2, n)]
            }),
        ),
        (
            "with itself turned",
            function(|a| vec![a[0].matmul(&a[0].transpose(&[]))]),
        ),
        (
            "nothing of it",
            function({
                let own = own.clone();
                move |_: &[Tensor]| vec![own.full(2.0f32, &[3])]
            }),
        ),
        ("itself", function(|a| vec![a[0].clone()])),
    ];
    // First with one row, with some, and with most; and other columns in between.
    let from_one = [(1, 4), (4, 4), (2, 4), (7, 4), (4, 2), (4, 4), (1, 4)];
    let from_four = [(4, 4), (2, 4), (1, 4), (5, 4), (2, 2), (4, 4), (100, 4)];
    for (name, f) in &functions {
        for shapes in [from_one, from_four] {
            agree(&session, name, f, &shapes).await;
        }
    }
    // An index outside is an error of the call that meets it, whatever was traced before.
    let by_four = session.compile_shapeless(move |a| vec![a[0].take(&columns, 1)]);
    let four = by_four.call_eval(&[table(&session, 2, 4)]).await.unwrap();
    assert_eq!(four[0].shape().unwrap(), [2, 3]);
    let two = by_four.call_eval(&[table(&session, 2, 2)]).await;
    assert_eq!(two.err().unwrap().reason(), Reason::IndexOutOfRange);
}

#[tokio::test]
async fn functions_inside_functions_are_right_for_every_size() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let inner: Vec<(&str, Function)> = vec![
        ("elementwise", function(|a| vec![a[0].tanh() * 2.0])),
        (
            "over rows",
            function(|a| vec![&a[0] - a[0].mean(&[0], true)]),
        ),
        (
            "by the size",
            function(|a| {
                let n = a[0].shape().unwrap()[0];
                vec![&a[0] / n as f64]
            }),
        ),
        (
            "two results",
            function(|a| vec![a[0].square(), a[0].sum(&[1], false)]),
        ),
        ("wrong", function(|a| vec![a[0].reshape(&[4, 4])])),
    ];
    for (name, f) in &inner {
        for shapeless in [false, true] {
            let f = Arc::clone(f);
            let compiled = match shapeless {
                true => session.compile_shapeless(move |a| f(a)),
                false => session.compile(move |a| f(a)),
            };
            // Three deep: what fails inside is an error of the outermost call, as eagerly.
            let twice = session.compile_shapeless({
                let compiled = compiled.clone();
                move |a| match compiled.call(a) {
                    Ok(results) => results.iter().map(|r| r + 1.0).collect(),
                    Err(error) => panic!("{}", error.message()),
                }
            });
            let outer = function(move |a| match twice.call(&[&a[0] * 0.5]) {
                Ok(results) => results.iter().map(|r| -r).collect(),
                Err(error) => panic!("{}", error.message()),
            });
            let shapes = [(4, 4), (1, 4), (3, 2), (64, 4), (65, 4), (4, 4)];
            let plain = Arc::clone(&outer);
            let whole = session.compile_shapeless(move |a| plain(a));
            for (rows, columns) in shapes {
                let x = [table(&session, rows, columns)];
                let what = format!("{name} (shapeless: {shapeless}) of [{rows}, {columns}]");
                let fails = *name == "wrong" && rows * columns != 16;
                let called = whole.call_eval(&x).await;
                if fails {
                    let error = called.err().unwrap();
                    assert_eq!(error.reason(), Reason::InvalidArgument, "{what}: {error}");
                    continue;
                }
                let eager = outcome(Ok(outer(&x))).await.unwrap();
                let called = called.unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(outcome(Ok(called)).await.unwrap(), eager, "{what}");
            }
        }
    }
}

#[tokio::test]
async fn what_a_function_captured_is_read_at_each_call() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let bytes = |v: [f32; 2]| v.map(f32::to_le_bytes).concat();
    let x = session.tensor(&[1.0f32, 10.0], &[2]).unwrap();
    // One that is on the worker, one that is still here, and shared memory.
    let there = HostTensor::from_slice(&[2.0f32, 3.0], &[2]).unwrap();
    let there = session.upload(&there).await.unwrap();
    let here = session.tensor(&[5.0f32, 7.0], &[2]).unwrap();
    let shared = session.shared(DType::F32, &[2]).await.unwrap();
    shared.write(0, &bytes([100.0, 200.0])).unwrap();
    let captured = [there.clone(), here.clone(), shared.tensor().clone()];
    let f: Function = function(move |a| captured.iter().map(|c| c * &a[0]).collect());
    let (one, two) = (Arc::clone(&f), Arc::clone(&f));
    let fixed = session.compile(move |a| one(a));
    let any = session.compile_shapeless(move |a| two(a));
    let expect = async |expected: [[f32; 2]; 3]| {
        for results in [
            f(std::slice::from_ref(&x)),
            fixed.call_eval(std::slice::from_ref(&x)).await.unwrap(),
            any.call_eval(std::slice::from_ref(&x)).await.unwrap(),
            fixed.call(std::slice::from_ref(&x)).unwrap(),
        ] {
            for (result, expected) in results.iter().zip(expected) {
                assert_eq!(result.to_vec::<f32>().await.unwrap(), expected);
            }
        }
    };
    expect([[2.0, 30.0], [5.0, 70.0], [100.0, 2000.0]]).await;
    there.write(0, bytes([4.0, 6.0])).await.unwrap();
    expect([[4.0, 60.0], [5.0, 70.0], [100.0, 2000.0]]).await;
    here.write(4, bytes([8.0, 0.0])[..4].to_vec())
        .await
        .unwrap();
    expect([[4.0, 60.0], [5.0, 80.0], [100.0, 2000.0]]).await;
    shared.write(4, &bytes([1.0, 0.0])[..4]).unwrap();
    expect([[4.0, 60.0], [5.0, 80.0], [100.0, 10.0]]).await;
    // What was computed before keeps its value.
    let before = &there * &x;
    before.eval().await.unwrap();
    there.write(0, bytes([0.0, 0.0])).await.unwrap();
    assert_eq!(before.to_vec::<f32>().await.unwrap(), [4.0, 60.0]);
    // A scalar is in the graph itself: it cannot be overwritten behind it.
    let scalar = session.scalar(3.0f32);
    let error = scalar.write(0, 4.0f32.to_le_bytes().to_vec()).await;
    assert_eq!(error.unwrap_err().reason(), Reason::InvalidArgument);
    let times = session.compile(move |a| vec![&a[0] * &scalar]);
    let tripled = times.call_eval(std::slice::from_ref(&x)).await.unwrap();
    assert_eq!(tripled[0].to_vec::<f32>().await.unwrap(), [3.0, 30.0]);
}

#[tokio::test]
async fn a_write_that_does_not_fit_writes_nothing() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    // More than one chunk, the first of which would fit.
    let n = (3 << 20) / 4;
    let values: Vec<f32> = (0..n).map(|v| v as f32).collect();
    let data = HostTensor::from_slice(&values, &[n]).unwrap();
    let there = session.upload(&data).await.unwrap();
    for (offset, bytes) in [
        (0, 4 * n + 4),
        (4, 4 * n),
        (1 << 20, (2 << 20) + 1),
        (4 * n, 1),
        (4 * n + 1, 0),
        (usize::MAX, 4),
    ] {
        let error = there.write(offset, vec![0xff; bytes]).await.unwrap_err();
        assert_eq!(
            error.reason(),
            Reason::InvalidArgument,
            "{bytes} at {offset}"
        );
    }
    // Not as `assert_eq`, which would print megabytes.
    assert!(
        there.fetch().await.unwrap() == data,
        "some of it was written"
    );
    // Memory of another dtype or shape takes no result, even of as many bytes.
    let shared = session.shared(DType::F32, &[4]).await.unwrap();
    let ones = session.ones(DType::F32, &[4]);
    shared.assign(&ones).await.unwrap();
    for other in [
        session.zeros(DType::I32, &[4]),
        session.zeros(DType::F32, &[2, 2]),
        session.zeros(DType::F32, &[5]),
        session.zeros(DType::F64, &[4]),
    ] {
        let error = shared.assign(&other).await.unwrap_err();
        assert_eq!(error.reason(), Reason::InvalidArgument, "{other:?}");
    }
    assert_eq!(shared.to_vec::<f32>().unwrap(), [1.0; 4]);
}

#[tokio::test]
async fn a_weight_cannot_be_written() {
    let cluster = Cluster::with_model("kjv", &kjv(), WORKER).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let backend = Backend::open("kjv", BackendParams::at(address(&cluster)))
        .await
        .unwrap();
    let name = "model.embed_tokens.weight";
    let weight = backend.get(name).await.unwrap();
    let before = weight.fetch().await.unwrap();
    for bytes in [0, 4, before.bytes().len()] {
        let error = weight.write(0, vec![0xff; bytes]).await.unwrap_err();
        assert_eq!(error.reason(), Reason::InvalidArgument, "{bytes}");
    }
    assert_eq!(weight.fetch().await.unwrap(), before);
    let again = backend.get(name).await.unwrap();
    assert_eq!(again.fetch().await.unwrap(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_trace_at_once_and_disturb_nobody() {
    const THREADS: usize = 4;
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let traced = Arc::new(AtomicUsize::new(0));
    let shared = session.compile_shapeless({
        let traced = traced.clone();
        move |a| {
            traced.fetch_add(1, Ordering::SeqCst);
            // Until all threads are inside of a trace.
            let begun = Instant::now();
            while traced.load(Ordering::SeqCst) < THREADS {
                assert!(
                    begun.elapsed() < Duration::from_secs(60),
                    "nobody else traces"
                );
                std::thread::yield_now();
            }
            vec![a[0].sum(&[1], false) * 2.0]
        }
    });
    let handle = tokio::runtime::Handle::current();
    let work = |thread: usize| {
        let (session, shared, handle) = (session.clone(), shared.clone(), handle.clone());
        move || {
            // One that asks for its size, so that a neighbour's trace would be marked in its place.
            let own = session.compile_shapeless(move |a| {
                let n = a[0].shape().unwrap()[0];
                vec![&a[0] * (n * (thread + 1)) as f64]
            });
            for round in 0..20 {
                let (rows, columns) = (1 + (thread * 7 + round) % 5, 2 + thread);
                let x = table(&session, rows, columns);
                handle.block_on(async {
                    let args = std::slice::from_ref(&x);
                    let both = shared.call_eval(args).await.unwrap();
                    let expected = x.sum(&[1], false) * 2.0;
                    let values = both[0].to_vec::<f32>().await.unwrap();
                    assert_eq!(values, expected.to_vec::<f32>().await.unwrap());
                    let mine = own.call_eval(args).await.unwrap();
                    let expected = &x * (rows * (thread + 1)) as f64;
                    let values = mine[0].to_vec::<f32>().await.unwrap();
                    assert_eq!(values, expected.to_vec::<f32>().await.unwrap());
                });
            }
        }
    };
    let threads: Vec<_> = (0..THREADS).map(|t| std::thread::spawn(work(t))).collect();
    for thread in threads {
        tokio::task::spawn_blocking(move || thread.join().unwrap())
            .await
            .unwrap();
    }
    // Each thread has other columns: a trace for each, and for no number of rows another one.
    assert_eq!(traced.load(Ordering::SeqCst), THREADS);
}

#[tokio::test]
async fn random_numbers_are_the_key_s_and_nobody_else_s() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let noise = |args: &[Tensor]| vec![&args[0] + args[1].random_normal(&[1, 4], 0.0, 1.0)];
    let fixed = session.compile(noise);
    let any = session.compile_shapeless(noise);
    let mut drawn: Vec<Vec<f32>> = Vec::new();
    // As many rows as a key has numbers, too.
    for (seed, rows) in [(1, 3), (2, 3), (3, 2), (4, 2)] {
        let args = [table(&session, rows, 4), session.random_key(seed)];
        let eager = noise(&args)[0].to_vec::<f32>().await.unwrap();
        for compiled in [&fixed, &any] {
            for _ in 0..2 {
                let called = compiled.call_eval(&args).await.unwrap();
                assert_eq!(called[0].to_vec::<f32>().await.unwrap(), eager);
            }
        }
        assert!(
            !drawn.contains(&eager),
            "seed {seed} draws what another did"
        );
        drawn.push(eager);
    }
    // A state that goes from call to call: the key is split, one half drawn from and the other handed on.
    let step = session.compile(|args| {
        let keys = args[0].random_split(2);
        let [next, now] = [0, 1].map(|i| keys.narrow(0, i, i + 1).reshape(&[2]));
        vec![next, now.random_uniform(&[4], 0.0, 1.0)]
    });
    let mut key = session.random_key(9);
    let mut seen: Vec<Vec<f32>> = Vec::new();
    for _ in 0..5 {
        let results = step.call_eval(std::slice::from_ref(&key)).await.unwrap();
        let values = results[1].to_vec::<f32>().await.unwrap();
        assert!(!seen.contains(&values), "the same numbers again");
        seen.push(values);
        key = results[0].clone();
    }
    // A key that was captured and then overwritten is another key.
    let kept = HostTensor::from_slice(&[0u32, 5], &[2]).unwrap();
    let kept = session.upload(&kept).await.unwrap();
    let captured = kept.clone();
    let draw = session.compile(move |_| vec![captured.random_uniform(&[4], 0.0, 1.0)]);
    let one = draw.call_eval(&[]).await.unwrap();
    let one = one[0].to_vec::<f32>().await.unwrap();
    kept.write(4, 6u32.to_le_bytes().to_vec()).await.unwrap();
    let two = draw.call_eval(&[]).await.unwrap();
    assert_ne!(one, two[0].to_vec::<f32>().await.unwrap());
}

#[tokio::test]
async fn other_arguments_are_traced_anew() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let traced = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&traced);
    let sum = session.compile_shapeless(move |args| {
        count.fetch_add(1, Ordering::Relaxed);
        let mut sum = args[0].clone();
        for other in &args[1..] {
            sum = &sum + other;
        }
        vec![sum]
    });
    let one = |dtype: DType, shape: &[usize]| session.ones(dtype, shape);
    for (args, traces, dtype) in [
        (vec![one(DType::F32, &[3, 2])], 1, DType::F32),
        (vec![one(DType::F32, &[5, 2])], 1, DType::F32),
        // Another dtype, rank, or number of arguments.
        (vec![one(DType::I32, &[3, 2])], 2, DType::I32),
        (vec![one(DType::F32, &[3])], 3, DType::F32),
        (
            vec![one(DType::F32, &[3, 2]), one(DType::F16, &[3, 2])],
            4,
            DType::F32,
        ),
        (
            vec![one(DType::F16, &[3, 2]), one(DType::F16, &[2])],
            5,
            DType::F16,
        ),
        (vec![one(DType::F32, &[4, 2])], 5, DType::F32),
    ] {
        let n = args.len() as f64;
        let result = &sum.call_eval(&args).await.unwrap()[0];
        assert_eq!(result.dtype().unwrap(), dtype);
        assert_eq!(traced.load(Ordering::Relaxed), traces);
        let all = result.equal(&(session.ones(dtype, &result.shape().unwrap()) * n));
        assert!(all.all(&[], false).item::<bool>().await.unwrap());
    }
}

#[tokio::test]
async fn reading_frees_nothing_and_leaves_nothing() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let settled = async || {
        session.flush().await.unwrap();
        let memory = session.memory().await.unwrap();
        (memory.active, memory.tensors)
    };
    let half = table(&session, 8, 4).cast(DType::F16);
    half.eval().await.unwrap();
    let single = half.cast(DType::F32);
    single.eval().await.unwrap();
    let before = settled().await;
    for _ in 0..3 {
        // Reading evaluates, keeps what it reads, and what it makes on the way is gone afterwards.
        half.fetch().await.unwrap();
        half.dump(DumpOptions::default()).await.unwrap();
        single.to_vec::<f32>().await.unwrap();
        assert!(half.is_evaluated() && single.is_evaluated());
        assert_eq!(settled().await, before);
    }
    // A tensor whose clone is gone, whose expression is gone, and whose name is another's.
    let clone = single.clone();
    drop(single);
    assert_eq!(settled().await, before);
    assert_eq!(clone.shape().unwrap(), [8, 4]);
    let sum = clone.sum(&[], false);
    drop(clone);
    let value = sum.item::<f32>().await.unwrap();
    assert_eq!(value, (0..32).map(|v| v as f32 * 0.5 - 3.0).sum::<f32>());
    drop((sum, half));
    // Traces leave nothing but their plans, which the connection keeps for the next function like this one.
    let plans = session.memory().await.unwrap().plans;
    let compiled = session.compile(|a| vec![a[0].tanh() + a[0].sum(&[], false)]);
    for n in 1..6 {
        let results = compiled.call_eval(&[table(&session, n, 3)]).await.unwrap();
        results[0].fetch().await.unwrap();
    }
    assert_eq!(session.memory().await.unwrap().plans, plans + 5);
    assert_eq!(settled().await.1, 0);
}

#[tokio::test]
async fn nothing_at_all_is_a_tensor_too() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    for shape in [&[0][..], &[0, 3], &[3, 0], &[2, 0, 4]] {
        let none = session.tensor::<f32>(&[], shape).unwrap();
        assert_eq!(none.to_vec::<f32>().await.unwrap(), [] as [f32; 0]);
        let there = session.upload(&none.fetch().await.unwrap()).await.unwrap();
        assert_eq!(there.nbytes().unwrap(), 0);
        there.write(0, vec![]).await.unwrap();
        assert!(there.write(0, vec![1]).await.is_err());
        let more = (&there + 1.0).fetch().await.unwrap();
        assert_eq!(more.shape(), shape);
        assert_eq!(there.sum(&[], false).item::<f32>().await.unwrap(), 0.0);
        let mean = there.mean(&[], false).item::<f32>().await.unwrap();
        assert!(mean.is_nan());
        let error = there.max(&[], false).eval().await.err().unwrap();
        let why = [Reason::GraphInvalid, Reason::InvalidArgument];
        assert!(why.contains(&error.reason()), "{error}");
        there.dump(DumpOptions::default()).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none.safetensors");
        TensorFile::save(&path, &[("x", there)], None)
            .await
            .unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.get("x").unwrap().unwrap(), none.fetch().await.unwrap());
    }
    session.eval(&[]).await.unwrap();
    let nobody = session.compile(|_| vec![]);
    assert!(nobody.call_eval(&[]).await.unwrap().is_empty());
}

#[tokio::test]
async fn setters_say_what_was_before() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let at_first = session.memory().await.unwrap();
    assert!(at_first.limit > 1 << 21 && at_first.cache_limit > 1 << 20);
    assert_eq!(
        session.set_cache_limit(1 << 20).await.unwrap(),
        at_first.cache_limit
    );
    assert_eq!(session.set_cache_limit(77).await.unwrap(), 1 << 20);
    assert_eq!(session.set_cache_limit(0).await.unwrap(), 77);
    assert_eq!(
        session.set_memory_limit(1 << 21).await.unwrap(),
        at_first.limit
    );
    assert_eq!(session.set_memory_limit(1 << 20).await.unwrap(), 1 << 21);
    // Not above what it was opened with; and each leaves the other alone.
    assert_eq!(session.set_memory_limit(u64::MAX).await.unwrap(), 1 << 20);
    let now = session.memory().await.unwrap();
    assert_eq!((now.limit, now.cache_limit), (at_first.limit, 0));
    let x = session.full(1.0f32, &[1 << 18]);
    x.eval().await.unwrap();
    drop(x);
    let peak = session.memory().await.unwrap().peak;
    assert!(peak >= 1 << 20);
    assert_eq!(session.reset_peak_memory().await.unwrap(), peak);
    // The tensor is gone. Its plan is kept, and may need as much: of MLX a result is made in its own memory first.
    let left = session.reset_peak_memory().await.unwrap();
    assert!(left + (1 << 20) <= peak, "{left} of {peak}");
}
