//! Expressions over the tensors of two workers: the same bytes as on one, by whichever way their values travel, and however
//! often one of the two dies.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::time::{Duration, Instant};

use hotcell_client::{
    Address, Error, Reason,
    tensor::{
        Backend, BackendParams, Cache, CacheSpec, DType, HostTensor, PagedOptions, Pages,
        Placement, Recovery, Session, SessionOptions, Spread, Tensor,
    },
    v1,
};
use hotcell_tests::cluster::{Cluster, SOON, all_have, kjv, signal_pid};
use rustix::process::Signal;

const N: usize = 16;

fn address(cluster: &Cluster) -> Address {
    let address = format!("unix:{}", cluster.socket.display());
    address.parse().unwrap()
}

fn are_ready(workers: &[v1::WorkerInfo]) -> bool {
    workers.len() == 2 && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
}

async fn cluster() -> Cluster {
    let arguments = ["--devices", "cpu:2", "--restart-budget", "1000"];
    let cluster = Cluster::start(&arguments).await.unwrap();
    cluster.workers(are_ready).await.unwrap();
    cluster
}

async fn spread(cluster: &Cluster, options: &SessionOptions) -> Spread {
    let at = address(cluster);
    let spread = Spread::open(&at, &["cpu:1", "cpu:0"], options).await;
    spread.unwrap()
}

fn recovering() -> SessionOptions {
    SessionOptions {
        recovery: Some(Recovery {
            patience: SOON,
            ..Recovery::default()
        }),
        ..SessionOptions::default()
    }
}

/// A fixed sequence of numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % n as u64) as usize
    }

    fn matrix(&mut self) -> HostTensor {
        let data: Vec<f32> = (0..N * N)
            .map(|_| self.below(256) as f32 / 128.0 - 1.0)
            .collect();
        HostTensor::from_slice(&data, &[N, N]).unwrap()
    }
}

/// What a random program over some leaves computes.
fn program(numbers: &mut Numbers, leaves: &[Tensor]) -> Vec<Tensor> {
    let mut values = leaves.to_vec();
    for _ in 0..3 + numbers.below(20) {
        let a = values[numbers.below(values.len())].clone();
        let b = values[numbers.below(values.len())].clone();
        match numbers.below(7) {
            0 => values.push(&a + &b),
            1 => values.push(&a * &b),
            2 => values.push(a.matmul(&b)),
            3 => values.push(a.tanh()),
            4 => values.push(a.softmax(-1)),
            5 => values.push(&a.max(&[1], true) - &b),
            _ => {
                let (most, at) = a.topk(N as i64, 1, true);
                values.extend([most, at.cast(DType::F32)]);
            }
        }
    }
    let results = values.split_off(leaves.len());
    results.into_iter().rev().step_by(2).collect()
}

async fn bytes(session: &Session, tensors: &[Tensor]) -> Vec<Vec<u8>> {
    session.eval(tensors).await.unwrap();
    let mut all = vec![];
    for tensor in tensors {
        all.push(tensor.fetch().await.unwrap().bytes().to_vec());
    }
    all
}

/// Waits until a session holds so many tensors on its worker; what was dropped is reported a moment later.
async fn holds(session: &Session, tensors: u32) {
    let start = Instant::now();
    loop {
        let memory = session.memory().await.unwrap();
        if memory.tensors == tensors {
            return;
        }
        assert!(start.elapsed() < SOON, "{tensors} tensors: {memory:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn two_hundred_random_programs_compute_the_same_on_two_workers_as_on_one() {
    let cluster = cluster().await;
    let at = address(&cluster);
    let alone = Session::open(&at, SessionOptions::default()).await;
    let alone = alone.unwrap();
    let relayed = SessionOptions {
        relayed: true,
        ..SessionOptions::default()
    };
    for options in [SessionOptions::default(), relayed, recovering()] {
        let spread = spread(&cluster, &options).await;
        let ends = [spread.on("cpu:0").unwrap(), spread.on("cpu:1").unwrap()];
        // The other ways are slower, and differ in nothing but the way.
        let direct = !options.relayed && options.recovery.is_none();
        for seed in 0..if direct { 200 } else { 20 } {
            let mut numbers = Numbers(seed);
            let data: Vec<HostTensor> = (0..4).map(|_| numbers.matrix()).collect();
            let (mut here, mut there) = (vec![], vec![]);
            for (i, data) in data.iter().enumerate() {
                here.push(alone.upload(data).await.unwrap());
                // At least one on each.
                let end = ends[if i < 2 { i } else { numbers.below(2) }];
                there.push(end.upload(data).await.unwrap());
            }
            let again = numbers.0;
            let wanted = bytes(&alone, &program(&mut numbers, &here)).await;
            let got = program(&mut Numbers(again), &there);
            let got = bytes(ends[numbers.below(2)], &got).await;
            assert!(wanted == got, "program {seed} of {options:?}");
        }
        // What nobody has any more is gone, except for the memory that the next one may use.
        for (here, there) in [(ends[0], ends[1]), (ends[1], ends[0])] {
            let (a, b) = (here.memory().await.unwrap(), there.memory().await.unwrap());
            match direct {
                false => holds(here, 0).await,
                true => assert!((2..=260).contains(&a.tensors), "{a:?} {b:?}"),
            }
        }
    }
}

#[tokio::test]
async fn what_is_compiled_runs_where_its_weights_are_for_any_number_of_rows() {
    let cluster = cluster().await;
    let spread = spread(&cluster, &SessionOptions::default()).await;
    let (first, second) = (spread.on("cpu:0").unwrap(), spread.on("cpu:1").unwrap());
    let mut numbers = Numbers(7);
    let (a, b) = (numbers.matrix(), numbers.matrix());
    let weights = [
        first.upload(&a).await.unwrap(),
        second.upload(&b).await.unwrap(),
    ];
    let alone = [
        first.upload(&a).await.unwrap(),
        first.upload(&b).await.unwrap(),
    ];
    let layers = |weights: [Tensor; 2]| {
        move |x: &[Tensor]| vec![x[0].matmul(&weights[0]).tanh().matmul(&weights[1])]
    };
    let one = first.compile_shapeless(layers(alone));
    let two = first.compile_shapeless(layers(weights));
    let mut before = None;
    for round in 0..100 {
        let rows = 1 + round % 5;
        let x: Vec<f32> = (0..rows * N)
            .map(|_| numbers.below(99) as f32 / 99.0)
            .collect();
        let x = first.tensor(&x, &[rows, N]).unwrap();
        let wanted = one.call_eval(std::slice::from_ref(&x)).await.unwrap();
        let got = two.call_eval(std::slice::from_ref(&x)).await.unwrap();
        assert_eq!(got[0].shape().unwrap(), [rows, N]);
        let (wanted, got) = (bytes(first, &wanted).await, bytes(first, &got).await);
        assert!(wanted == got, "{rows} rows");
        // As an expression, too.
        let lazy = two.call(std::slice::from_ref(&x)).unwrap();
        assert!(bytes(first, &lazy).await == wanted, "{rows} rows");
        if round == 50 {
            second.flush().await.unwrap();
            before = Some(second.memory().await.unwrap());
        }
    }
    // The memory between the two is used again and again.
    holds(second, before.unwrap().tensors).await;
    // A pipeline is one worker's.
    let x = first.zeros(DType::F32, &[1, N]);
    let mut pipeline = first.pipeline().await.unwrap();
    let refused = pipeline.call(&two, &[x]).await.err().unwrap();
    assert!(refused.message().contains("another device"), "{refused:?}");
}

#[tokio::test]
async fn a_step_writes_each_layers_cache_where_it_is() {
    let cluster = cluster().await;
    let spec = CacheSpec {
        dtype: DType::F32,
        blocks: 2,
        block_len: 4,
        kv_heads: 1,
        head_dim: N,
    };
    /// Two layers of attention, each over its own cache.
    async fn run(caches: &[Cache; 2], of: &Session, data: &[HostTensor; 2]) -> Vec<Vec<u8>> {
        let mut made = vec![];
        for token in 0..4i32 {
            let row = |data: &HostTensor| {
                let row = &data.to_vec::<f32>().unwrap()[token as usize * N..][..N];
                of.tensor(row, &[1, 1, N]).unwrap()
            };
            let pages = Pages {
                tables: of.tensor(&[1i32], &[1, 1]).unwrap(),
                sequences: of.zeros(DType::I32, &[1]),
                positions: of.tensor(&[token], &[1]).unwrap(),
            };
            let slots = of.tensor(&[token + 4], &[1]).unwrap();
            let mut step = of.step();
            let mut x = row(&data[0]);
            for cache in caches {
                let keys = &x * &row(&data[1]);
                step.write(cache, &keys, &x, &slots);
                x = step.attend(&keys, cache, &pages, PagedOptions::default());
            }
            step.run(std::slice::from_ref(&x)).await.unwrap();
            made.push(x.fetch().await.unwrap().bytes().to_vec());
        }
        for cache in caches {
            made.push(cache.fetch().await.unwrap().bytes().to_vec());
        }
        made
    }
    let mut numbers = Numbers(3);
    let data = [numbers.matrix(), numbers.matrix()];
    let spread = spread(&cluster, &SessionOptions::default()).await;
    let (first, second) = (spread.on("cpu:0").unwrap(), spread.on("cpu:1").unwrap());
    let mut results = vec![];
    for (one, other) in [(first, first), (first, second), (second, first)] {
        let caches = [
            one.cache(spec).await.unwrap(),
            other.cache(spec).await.unwrap(),
        ];
        results.push(run(&caches, first, &data).await);
    }
    assert!(results[0] == results[1] && results[0] == results[2]);
    assert!(results[0].iter().flatten().any(|b| *b != 0));
}

async fn pid(cluster: &Cluster, session: &Session) -> u32 {
    let worker = session.describe().await.unwrap().worker;
    let workers = cluster.workers(|_| true).await.unwrap();
    workers.iter().find(|w| w.id == worker).unwrap().pid
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_one_worker_changes_no_byte_in_sessions_that_recover() {
    let cluster = cluster().await;
    let spread = spread(&cluster, &recovering()).await;
    let (first, second) = (spread.on("cpu:0").unwrap(), spread.on("cpu:1").unwrap());
    let mut numbers = Numbers(11);
    let w = [
        first.upload(&numbers.matrix()).await.unwrap(),
        second.upload(&numbers.matrix()).await.unwrap(),
    ];
    // Values that were made of both before the death, and values made of these after it.
    let script = async |killing: bool| {
        let mut x = w[0].clone();
        let mut made = vec![];
        for round in 0..6 {
            x = x.matmul(&w[1]).tanh().matmul(&w[0]).softmax(-1);
            x.eval().await.unwrap();
            made.push(x.clone());
            if killing && round % 2 == 1 {
                let victim = if round == 3 { first } else { second };
                signal_pid(pid(&cluster, victim).await, Signal::KILL).unwrap();
            }
        }
        let mut all = vec![];
        for tensor in &made {
            all.push(tensor.fetch().await.unwrap().bytes().to_vec());
        }
        all
    };
    let wanted = script(false).await;
    assert!(script(true).await == wanted);
    assert!(first.recoveries() >= 1 && second.recoveries() >= 1);
}

#[tokio::test]
async fn without_recovery_a_death_is_said_and_the_other_session_lives() {
    let cluster = cluster().await;
    let spread = spread(&cluster, &SessionOptions::default()).await;
    let (first, second) = (spread.on("cpu:0").unwrap(), spread.on("cpu:1").unwrap());
    let a = first.upload(&Numbers(1).matrix()).await.unwrap();
    let b = second.upload(&Numbers(2).matrix()).await.unwrap();
    let sum = a.matmul(&b);
    sum.eval().await.unwrap();
    signal_pid(pid(&cluster, second).await, Signal::KILL).unwrap();
    let start = Instant::now();
    let error: Error = loop {
        // It may take the kernel a moment.
        if let Err(error) = (a.matmul(&b) + &a).eval().await {
            break error;
        }
        assert!(start.elapsed() < SOON);
    };
    assert_eq!(error.reason(), Reason::WorkerLost, "{error:?}");
    let square = a.matmul(&a).to_vec::<f32>().await.unwrap();
    assert_eq!(square.len(), N * N);
}

#[tokio::test]
async fn sessions_that_are_not_of_one_spread_do_not_mix() {
    let cluster = cluster().await;
    let at = address(&cluster);
    let refused = |devices: &'static [&'static str]| {
        let at = at.clone();
        async move {
            let options = SessionOptions::default();
            Spread::open(&at, devices, &options).await.err().unwrap()
        }
    };
    let error = refused(&[]).await;
    assert_eq!(error.reason(), Reason::InvalidArgument, "{error:?}");
    let error = refused(&["cpu:0", "cpu:0"]).await;
    assert!(
        error.message().contains("cpu:0 is named twice"),
        "{error:?}"
    );
    let error = refused(&["cpu:0", "cpu:7"]).await;
    assert_eq!(error.reason(), Reason::NoWorker, "{error:?}");
    let spread = spread(&cluster, &SessionOptions::default()).await;
    let error = spread.on("cpu:7").err().unwrap();
    assert!(error.message().contains("cpu:1, cpu:0"), "{error:?}");
    let (one, three) = (Numbers(1).matrix(), Numbers(3).matrix());
    let own = spread.on("cpu:0").unwrap().upload(&one).await.unwrap();
    let stranger = Session::open(&at, SessionOptions::default()).await.unwrap();
    let foreign = stranger.upload(&Numbers(2).matrix()).await.unwrap();
    let error = (&own + &foreign).eval().await.err().unwrap();
    assert!(error.message().contains("Spread"), "{error:?}");
    let error = stranger.eval(&[own.neg()]).await.err().unwrap();
    assert!(error.message().contains("another session"), "{error:?}");
    // One that is gone is missed where it is needed only.
    let kept = spread.on("cpu:0").unwrap().clone();
    let other = spread.on("cpu:1").unwrap().upload(&three).await.unwrap();
    drop(spread);
    let mixed = &own + &other;
    assert_eq!(mixed.to_vec::<f32>().await.unwrap().len(), N * N);
    drop((other, mixed));
    kept.eval(&[own.neg()]).await.unwrap();
}

#[tokio::test]
async fn a_backends_layers_are_used_where_they_are_placed() {
    let two = ["--devices", "cpu:2"];
    let cluster = Cluster::with_model("kjv", &kjv(), &two).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let open = async |placement: Placement| {
        let mut params = BackendParams::at(address(&cluster));
        params.placement = placement;
        Backend::open("kjv", params).await.unwrap()
    };
    fn mul_mat(x: &Tensor, weight: &Tensor) -> Tensor {
        Tensor::apply("mul_mat", &[Some(x), Some(weight)], vec![]).remove(0)
    }
    /// The MLPs of all layers, without what is between them, over two rows of the embedding.
    async fn through(backend: &Backend) -> Vec<u8> {
        let ids = backend.session().tensor(&[5i32, 9], &[2]).unwrap();
        let embedding = backend.get("model.embed_tokens.weight").await.unwrap();
        let mut x = embedding.take(&ids, 0).cast(DType::F32);
        for layer in 0.. {
            let name = |part: &str| format!("model.layers.{layer}.mlp.{part}_proj.weight");
            if !backend.weights().iter().any(|(n, _)| *n == name("up")) {
                assert!(layer > 2);
                break;
            }
            let weight = async |part| backend.get(&name(part)).await.unwrap();
            let (up, gate) = (weight("up").await, weight("gate").await);
            let down = weight("down").await;
            let inner = &mul_mat(&x, &gate).silu() * &mul_mat(&x, &up);
            x = &x + &mul_mat(&inner, &down);
        }
        x.fetch().await.unwrap().bytes().to_vec()
    }
    let whole = open(Placement::Whole).await;
    let wanted = through(&whole).await;
    let layers = vec![("cpu:1".to_owned(), vec![1, 2])];
    let split = open(Placement::List(layers)).await;
    let memory = split.memory();
    assert!(memory.len() == 2 && memory.iter().all(|m| m.total() > 0));
    assert!(through(&split).await == wanted);
    // The last layers by their number: the output and two more to the backend's device, which is not where the rest goes.
    let counted = open(Placement::Count(3)).await;
    assert_eq!(counted.describe().device, "cpu:1");
    let last = counted.weights().iter().filter_map(|(name, _)| {
        let number = name.strip_prefix("model.layers.")?.split('.').next()?;
        number.parse::<usize>().ok()
    });
    let last = last.max().unwrap();
    let memory = counted.memory();
    let of = |device: &str| {
        let found = memory.iter().find(|m| m.device == device).unwrap();
        (
            found.input_weights > 0,
            found.weights.keys().copied().collect::<Vec<_>>(),
        )
    };
    assert_eq!(of("cpu:0"), (true, (0..last - 1).collect()));
    assert_eq!(of("cpu:1"), (false, (last - 1..=last + 1).collect()));
    assert!(through(&counted).await == wanted);
    // What a graph over both would take is counted on both.
    let mut split = split;
    let weight = async |layer: usize| {
        let name = format!("model.layers.{layer}.mlp.up_proj.weight");
        split.get(&name).await.unwrap()
    };
    let (a, b) = (weight(0).await, weight(1).await);
    let width = a.shape().unwrap()[1];
    let outputs = 2 * (a.shape().unwrap()[0] + b.shape().unwrap()[0]) * 4;
    let both = split
        .session()
        .compile(move |x| vec![mul_mat(&x[0], &a), mul_mat(&x[0], &b)]);
    let x = split.session().zeros(DType::F32, &[2, width]);
    let taken = split.reserve(&both, &[x]).await.unwrap();
    assert_eq!(taken.outputs, outputs as u64, "{taken:?}");
    assert!(
        split.memory().iter().all(|m| m.graph > 0),
        "{:?}",
        split.memory()
    );
    // From so many numbers on, weights on the CPU go to the other device, which then computes all products.
    let mut params = BackendParams::at(address(&cluster));
    params.placement = Placement::List(vec![("cpu:1".to_owned(), vec![1, 2])]);
    params.offload = Some(2 * width);
    let mut offloaded = Backend::open("kjv", params).await.unwrap();
    assert!(through(&offloaded).await == wanted);
    for (rows, devices) in [(2, &["cpu:1"][..]), (1, &["cpu:0", "cpu:1"])] {
        let a = offloaded.get("model.layers.0.mlp.up_proj.weight");
        let b = offloaded.get("model.layers.1.mlp.up_proj.weight");
        let (a, b) = (a.await.unwrap(), b.await.unwrap());
        let session = offloaded.session();
        let both = session.compile(move |x| vec![mul_mat(&x[0], &a), mul_mat(&x[0], &b)]);
        let x = session.zeros(DType::F32, &[rows, width]);
        offloaded.reserve(&both, &[x]).await.unwrap();
        let memory = offloaded.memory();
        let used = memory.iter().filter(|m| m.graph > 0);
        let used: Vec<&str> = used.map(|m| m.device.as_str()).collect();
        assert_eq!(used, devices, "{rows} rows: {memory:?}");
    }
}
