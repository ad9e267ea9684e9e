//! Backends opened with parameters: what each of them does, refuses and counts; and that planning holds up no tokens.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Error, Event, GenerateOptions, Reason,
    tensor::{
        AttentionOptions, Backend, BackendParams, CacheSpec, DType, FlashAttention, PagedOptions,
        Pages, Placement, Session, SessionOptions, Step, Tensor, TensorFile,
    },
};
use hotcell_graph::{Graph, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
    plan::PlanHints,
};
use hotcell_tests::cluster::{Cluster, all_have, kjv};

fn address(cluster: &Cluster) -> Address {
    format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap()
}

async fn cluster() -> Cluster {
    Cluster::ready().await.unwrap()
}

async fn open(
    cluster: &Cluster,
    name: &str,
    change: impl FnOnce(&mut BackendParams),
) -> Result<Backend, Error> {
    let mut params = BackendParams::at(address(cluster));
    change(&mut params);
    Backend::open(name, params).await
}

const CACHE: CacheSpec = CacheSpec {
    dtype: DType::F16,
    blocks: 16,
    block_len: 16,
    kv_heads: 2,
    head_dim: 32,
};

#[tokio::test]
async fn each_quota_that_a_backend_is_opened_with_holds() {
    let cluster = cluster().await;
    let small = open(&cluster, "cpu", |p| p.memory_limit = 1 << 20).await;
    let small = small.unwrap();
    let refused = |error: Error, limit: Option<&str>| {
        assert_eq!(error.reason(), Reason::QuotaExceeded, "{error:?}");
        if limit.is_some() {
            assert_eq!(error.get("limit"), limit, "{error:?}");
        }
    };
    let session = small.session();
    session.full(1.0f32, &[1 << 16]).eval().await.unwrap();
    refused(
        session.full(1.0f32, &[1 << 19]).eval().await.unwrap_err(),
        None,
    );

    let few = open(&cluster, "cpu", |p| p.max_tensors = 3).await;
    let mut few = few.unwrap();
    let mut held = Vec::new();
    for layer in 0..3 {
        held.push(few.cache(layer, CACHE).await.unwrap());
    }
    refused(few.cache(3, CACHE).await.err().unwrap(), Some("3"));
    drop(held);

    let two = open(&cluster, "cpu", |p| p.max_plans = 2).await.unwrap();
    let session = two.session();
    let made = |n: usize| {
        let own = session.clone();
        session.compile(move |_| vec![own.full(n as f32, &[n]) + 1.0])
    };
    let functions = [made(1), made(2), made(3)];
    for function in &functions[..2] {
        function.call_eval(&[]).await.unwrap();
    }
    let more = functions[2].call_eval(&[]).await;
    refused(more.err().unwrap(), Some("2"));
}

#[tokio::test]
async fn attention_is_taken_apart_where_it_is_asked_for_and_said_to_be() {
    let cluster = cluster().await;
    let mut seen = Vec::new();
    for choice in [FlashAttention::Auto, FlashAttention::Off] {
        let backend = open(&cluster, "cpu", |p| p.flash_attention = choice).await;
        let backend = backend.unwrap();
        let session = backend.session();
        let x = session.arange(0.0, 96.0, 1.0, DType::F32).sin();
        let x = x.reshape(&[1, 2, 6, 8]);
        let y = x.attention(&x, &x, &AttentionOptions::default());
        seen.push((session.numerics(), y.to_vec::<f32>().await.unwrap()));
    }
    let class = &seen[0].0;
    assert!(class.starts_with("cpu/"), "{class}");
    assert_eq!(seen[1].0, format!("{class}/attention:parts"));
    // The processor has no kernel for it: both are the same sums.
    assert_eq!(seen[0].1, seen[1].1);
    let error = open(&cluster, "cpu", |p| p.flash_attention = FlashAttention::On).await;
    let error = error.err().unwrap();
    assert_eq!(error.reason(), Reason::OpUnsupported, "{error:?}");
    assert!(error.message().contains("auto or off"), "{error:?}");
}

#[tokio::test]
async fn layers_are_placed_only_on_devices_that_are_there() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let own = open(&cluster, "kjv", |_| {}).await.unwrap();
    let device = own.describe().device.clone();
    let on = |device: &str| Placement::List(vec![(device.to_owned(), vec![0])]);
    for (name, placement) in [
        ("kjv", on("cuda:7")),
        ("kjv", on("GPU")),
        ("cpu", on("mlx:3")),
    ] {
        let Placement::List(list) = &placement else {
            unreachable!()
        };
        let device = list[0].0.clone();
        let error = open(&cluster, name, |p| p.placement = placement).await;
        let error = error.err().unwrap();
        assert_eq!(error.reason(), Reason::NoWorker, "{error:?}");
        assert_eq!(error.get("device"), Some(device.as_str()));
        assert!(error.message().contains("there are cpu:0"), "{error:?}");
    }
    for placement in [on(&device), Placement::Count(1), Placement::Whole] {
        let placed = open(&cluster, "kjv", |p| p.placement = placement).await;
        let memory = placed.unwrap().memory();
        assert!(memory.iter().map(|m| m.total()).sum::<u64>() > 9_000_000);
    }
}

#[tokio::test]
async fn what_is_placed_on_two_devices_is_counted_on_the_one_it_is_placed_on() {
    let two = ["--devices", "cpu:2"];
    let cluster = Cluster::with_model("kjv", &kjv(), &two).await.unwrap();
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    assert_eq!(workers.len(), 2);
    // The sizes as the model's file has them.
    let file = TensorFile::open(&kjv().join("model.safetensors")).unwrap();
    let names: Vec<String> = file.names().map(str::to_owned).collect();
    let bytes = |wanted: &dyn Fn(&str) -> bool| -> u64 {
        let wanted = names.iter().filter(|name| wanted(name));
        let size = |name: &String| file.get(name).unwrap().unwrap().bytes().len() as u64;
        wanted.map(size).sum()
    };
    let layer = |n: usize| bytes(&|name| name.starts_with(&format!("model.layers.{n}.")));
    let layers = (0..).take_while(|n| layer(*n) > 0).count();
    assert!(layers >= 3, "{layers}");
    let embedding = bytes(&|name| name.contains("embed"));
    let output = bytes(&|name| !name.contains("embed") && !name.contains(".layers."));
    let cache = CACHE.bytes().unwrap() as u64;
    let all: Vec<usize> = (0..=layers).collect();

    // Which device has which layers, `layers` being the output; what is left over is the first device's.
    for split in [
        vec![("cpu:0", vec![0]), ("cpu:1", all[1..].to_vec())],
        vec![("cpu:1", vec![1, layers])],
        vec![("cpu:1", all.clone())],
        vec![("cpu:0", all.clone()), ("cpu:1", vec![])],
    ] {
        let list = split.iter().map(|(d, l)| ((*d).to_owned(), l.clone()));
        let placement = Placement::List(list.collect());
        let backend = open(&cluster, "kjv", |p| p.placement = placement).await;
        let mut backend = backend.unwrap();
        let own = backend.describe().device.clone();
        let mut caches = Vec::new();
        for n in [0, 1, 1] {
            caches.push(backend.cache(n, CACHE).await.unwrap());
        }
        let square = backend.session().compile(|a| vec![a[0].matmul(&a[0])]);
        let x = backend.session().zeros(DType::F32, &[64, 64]);
        let graph = backend.reserve(&square, &[x]).await.unwrap();
        let memory = backend.memory();
        let of = |device: &str| {
            let found = memory.iter().find(|m| m.device == device);
            found.cloned().unwrap_or_default()
        };
        for device in ["cpu:0", "cpu:1"] {
            let is_here = |n: &usize| {
                let named = split.iter().find(|(_, layers)| layers.contains(n));
                named.map_or("cpu:0", |(device, _)| device) == device
            };
            let here: Vec<usize> = all.iter().copied().filter(is_here).collect();
            let size = |n: &usize| match *n == layers {
                true => output,
                false => layer(*n),
            };
            let got = of(device);
            let weights: Vec<(usize, u64)> = here.iter().map(|n| (*n, size(n))).collect();
            let told: Vec<(usize, u64)> = got.weights.into_iter().collect();
            assert_eq!(told, weights, "{device} of {split:?}");
            let held: Vec<(usize, u64)> = got.caches.into_iter().collect();
            let caches = [(0, cache), (1, 2 * cache)];
            let caches: Vec<_> = caches.into_iter().filter(|(n, _)| is_here(n)).collect();
            assert_eq!(held, caches, "{device} of {split:?}");
            let first = if device == "cpu:0" { embedding } else { 0 };
            assert_eq!(got.input_weights, first, "{device} of {split:?}");
            let computed = if device == own {
                graph.inputs + graph.outputs + graph.arena
            } else {
                0
            };
            assert_eq!(got.graph, computed, "{device} of {split:?}");
        }
        assert!(graph.inputs > 0 && graph.outputs > 0);
        let total: u64 = memory.iter().map(|m| m.total()).sum();
        let taken = graph.inputs + graph.outputs + graph.arena;
        let weights = embedding + output + (0..layers).map(layer).sum::<u64>();
        assert_eq!(total, weights + 3 * cache + taken);
    }
    // There is no third one.
    for (device, beside) in [("cpu:2", 0), ("cpu:2", 1), ("cpu:1,", 0), ("", 0)] {
        let list = vec![
            ("cpu:1".to_owned(), vec![beside]),
            (device.to_owned(), vec![2]),
        ];
        let error = open(&cluster, "kjv", |p| p.placement = Placement::List(list)).await;
        let error = error.err().unwrap();
        assert_eq!(error.reason(), Reason::NoWorker, "{error:?}");
        assert_eq!(error.get("device"), Some(device));
        let say = "there are cpu:0, cpu:1";
        assert!(error.message().contains(say), "{error:?}");
    }
}

/// A step that writes two tokens to each cache and looks at them.
fn step(session: &Session, caches: &[hotcell_client::tensor::Cache]) -> (Step, Vec<Tensor>) {
    let mut step = session.step();
    let places = session.arange(0.0, 2.0, 1.0, DType::I32);
    let rows = session.full(0.5f32, &[2, CACHE.kv_heads, CACHE.head_dim]);
    let pages = Pages {
        tables: session.zeros(DType::I32, &[1, 1]),
        sequences: session.zeros(DType::I32, &[2]),
        positions: places.clone(),
    };
    let attended = caches.iter().map(|cache| {
        step.write(cache, &rows, &rows, &places);
        step.attend(&rows, cache, &pages, PagedOptions::default())
    });
    let attended: Vec<Tensor> = attended.collect();
    (step, attended)
}

#[tokio::test]
async fn a_dry_run_tells_weights_caches_and_graphs_as_they_are_in_truth() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let size = CACHE.bytes().unwrap() as u64;
    let mut told = Vec::new();
    for allocate in [false, true] {
        let backend = open(&cluster, "kjv", |p| p.allocate = allocate).await;
        let mut backend = backend.unwrap();
        let session = backend.session().clone();
        let mut caches = Vec::new();
        for layer in [0, 1, 1] {
            caches.push(backend.cache(layer, CACHE).await.unwrap());
        }
        // The counters of a session that has memory, and of one that has none.
        assert_eq!(session.memory().await.unwrap().active, 3 * size);
        let (first, results) = step(&session, &caches);
        let taken = backend.reserve_step(first, &results).await.unwrap();
        assert_eq!((taken.caches, taken.constants), (3 * size, 0));
        if allocate {
            let (again, results) = step(&session, &caches);
            again.run(&results).await.unwrap();
            let active = session.memory().await.unwrap().active;
            let graph = active - 3 * size;
            let least = taken.arena + taken.outputs;
            assert!(
                (least..least + (64 << 10)).contains(&graph),
                "{graph} and {taken:?}"
            );
            drop(results);
        }
        told.push(backend.memory());
    }
    assert_eq!(told[0], told[1]);
    let own = &told[0][0];
    assert_eq!(own.caches, [(0, size), (1, 2 * size)].into());
    assert!(
        own.graph > 0 && own.total() > 9_000_000 + 3 * size,
        "{own:?}"
    );
}

#[tokio::test]
async fn what_a_step_over_two_devices_would_take_is_counted_and_limited_on_each() {
    let two = ["--devices", "cpu:2"];
    let cluster = Cluster::with_model("kjv", &kjv(), &two).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let size = CACHE.bytes().unwrap() as u64;
    let placed = async |allocate: bool, limit: u64| {
        let backend = open(&cluster, "kjv", |p| {
            p.allocate = allocate;
            p.memory_limit = limit;
            p.placement = Placement::List(vec![
                ("cpu:0".to_owned(), vec![0, 2]),
                ("cpu:1".to_owned(), vec![1]),
            ]);
        });
        let mut backend = backend.await.unwrap();
        let mut caches = Vec::new();
        for layer in 0..3 {
            caches.push(backend.cache(layer, CACHE).await.unwrap());
        }
        (backend, caches)
    };
    let mut told = Vec::new();
    // What is on one device keeps within this; all together would not.
    let enough = size * 7 / 2;
    for (allocate, limit) in [(false, 0), (true, 0), (false, enough)] {
        let (mut backend, caches) = placed(allocate, limit).await;
        let (whole, results) = step(backend.session(), &caches);
        let taken = backend.reserve_step(whole, &results).await.unwrap();
        assert_eq!(taken.caches, 3 * size);
        let memory = backend.memory();
        let of = |device: &str| memory.iter().find(|m| m.device == device).unwrap().graph;
        assert!(of("cpu:0") > 0 && of("cpu:1") > 0, "{memory:?}");
        assert_eq!(
            of("cpu:0") + of("cpu:1"),
            taken.arena + taken.inputs + taken.outputs
        );
        told.push(memory);
    }
    assert_eq!(told[0], told[1]);
    assert_eq!(told[0], told[2]);
    // What is too much for one of them is refused, and counted nowhere.
    let (mut backend, caches) = placed(false, enough).await;
    let session = backend.session().clone();
    for cache in &caches {
        let pages = Pages {
            tables: session.zeros(DType::I32, &[1, 1]),
            sequences: session.zeros(DType::I32, &[1024]),
            positions: session.zeros(DType::I32, &[1024]),
        };
        let queries = session.full(0.5f32, &[1024, CACHE.kv_heads, CACHE.head_dim]);
        let mut large = session.step();
        let attended = large.attend(&queries, cache, &pages, PagedOptions::default());
        let error = backend.reserve_step(large, &[attended]).await.unwrap_err();
        assert_eq!(error.reason(), Reason::QuotaExceeded, "{error:?}");
    }
    assert!(backend.memory().iter().all(|m| m.graph == 0));
}

/// So many attentions, one of the other.
fn tower(layers: usize) -> Graph {
    let mut g = GraphBuilder::new(0);
    let shape = Shape::fixed(&[1, 2, 4, 8]).unwrap();
    let x = g.tensor("x", TensorSpec::new(DType::F32, shape).unwrap());
    let y = (0..layers).fold(x.unwrap(), |y, _| {
        let y = g.scaled_dot_product_attention(y, y, y, None, None, 1.0, false, 0, 0.0);
        y.unwrap()
    });
    g.finish(&[y]).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn tokens_come_while_a_large_graph_is_planned() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    // One that takes long enough to be noticed, by what it takes here.
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let (mut layers, mut planning) = (500, Duration::ZERO);
    while planning < Duration::from_millis(600) && layers <= 4000 {
        let graph = tower(layers);
        let begun = Instant::now();
        let planner = device.planner().unwrap();
        planner.prepare(&graph, &PlanHints::default()).unwrap();
        planning = begun.elapsed();
        layers *= 2;
    }
    let layers = layers / 2;
    let address = address(&cluster);
    let session = Session::open(&address, SessionOptions::default()).await;
    let session = session.unwrap();
    let options = AttentionOptions::default();
    let tower = session.compile(move |x| {
        let first = x[0].clone();
        vec![(0..layers).fold(first, |y, _| y.attention(&y, &y, &options))]
    });
    let x = [session.zeros(DType::F32, &[1, 2, 4, 8])];
    // Traced once; from then on little of it is this process's.
    tower.reserve(&x).await.unwrap();

    let came = Arc::new(Mutex::new(Vec::new()));
    let client = cluster.client().await.unwrap();
    let noted = Arc::clone(&came);
    let reading = tokio::spawn(async move {
        loop {
            let options = GenerateOptions {
                max_tokens: 100,
                ignore_eos: true,
                ..GenerateOptions::default()
            };
            let mut stream = client.generate("In the beginning", options).await.unwrap();
            while let Some(event) = stream.next().await {
                if let Event::Delta(_) = event.unwrap() {
                    noted.lock().unwrap().push(Instant::now());
                }
            }
        }
    });
    while came.lock().unwrap().len() < 10 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let begun = Instant::now();
    tower.reserve(&x).await.unwrap();
    let ended = Instant::now();
    reading.abort();
    let took = ended - begun;
    let mut times = vec![begun];
    times.extend(
        came.lock()
            .unwrap()
            .iter()
            .filter(|t| (begun..ended).contains(t)),
    );
    times.push(ended);
    let longest = times.windows(2).map(|t| t[1] - t[0]).max().unwrap();
    println!(
        "{layers} layers: planned in {planning:?} here, in {took:?} there; {} tokens meanwhile, {longest:?} apart at most",
        times.len() - 2
    );
    assert!(
        longest < planning * 2 / 3,
        "no token for {longest:?} beside a plan that takes {planning:?} here"
    );
}
