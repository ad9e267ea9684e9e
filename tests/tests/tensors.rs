//! Remote tensors as a client sees them: through the scheduler, and by a connection of its own.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Event, GenerateOptions, Reason,
    tensor::{
        AttentionOptions, Backend, BackendParams, CacheSpec, DType, DumpOptions, HostTensor,
        PagedOptions, Pages, Session, SessionOptions, Step, Stream, Tensor, TensorFile, Thresholds,
    },
    v1::{self, tensors_client::TensorsClient},
};
use hotcell_graph::{GraphBuilder, Shape, wire};
use hotcell_proto::{limits, session::SESSION_KEY};
use hotcell_tests::{
    cluster::{Cluster, all_have, kjv, signal_pid},
    proxy::Proxy,
};

fn address(cluster: &Cluster) -> Address {
    format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap()
}

async fn session(cluster: &Cluster) -> Session {
    Session::open(&address(cluster), SessionOptions::default())
        .await
        .unwrap()
}

async fn relayed(cluster: &Cluster) -> Session {
    let options = SessionOptions {
        relayed: true,
        ..Default::default()
    };
    Session::open(&address(cluster), options).await.unwrap()
}

async fn cluster() -> Cluster {
    Cluster::ready().await.unwrap()
}

#[tokio::test]
async fn expressions_are_computed_on_the_worker_whichever_road_they_take() {
    let cluster = cluster().await;
    for (session, direct) in [
        (session(&cluster).await, true),
        (relayed(&cluster).await, false),
    ] {
        assert_eq!(session.is_direct(), direct);
        let a = session.tensor(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
        let b = session.tensor(&[10.0f32, 20.0], &[2]).unwrap();
        let c = (&a + &b) * 2.0 - a.matmul(&a);
        // By hand: a @ a = [[7, 10], [15, 22]].
        assert_eq!(c.to_vec::<f32>().await.unwrap(), [15.0, 34.0, 11.0, 26.0]);
        assert!(c.is_evaluated());
        // An evaluated tensor goes on being one.
        assert_eq!(
            (-&c).to_vec::<f32>().await.unwrap(),
            [-15.0, -34.0, -11.0, -26.0]
        );
        assert_eq!(c.sum(&[], false).item::<f32>().await.unwrap(), 86.0);
        // Integers stay integers; halves stay halves beside a number.
        let i = session.tensor(&[7i32, -7], &[2]).unwrap();
        assert_eq!((&i * 3.0).to_vec::<i32>().await.unwrap(), [21, -21]);
        let h = a.cast(DType::BF16) * 0.5;
        assert_eq!(h.dtype().unwrap(), DType::BF16);
    }
}

#[tokio::test]
async fn bytes_go_into_the_caller_s_memory_as_they_are() {
    let cluster = cluster().await;
    for session in [session(&cluster).await, relayed(&cluster).await] {
        for size in [0, 1, 1 << 20, (5 << 20) + 3] {
            let bytes: Vec<u8> = (0..size as u32)
                .map(|i| (i.wrapping_mul(i) / 7) as u8)
                .collect();
            let data = HostTensor::from_slice(&bytes, &[size]).unwrap();
            let there = session.upload(&data).await.unwrap();
            assert_eq!(there.fetch().await.unwrap(), data);
            let mut own = vec![0xee; size];
            there.fetch_into(&mut own).await.unwrap();
            assert!(own == bytes, "{size} bytes came back changed");
            // Again, over other bytes, of an expression.
            let sum = &there + &there;
            sum.fetch_into(&mut own).await.unwrap();
            let doubled = bytes.iter().map(|b| b.wrapping_mul(2));
            assert!(doubled.eq(own.iter().copied()), "{size} bytes doubled");
            own.push(0);
            let error = there.fetch_into(&mut own).await.unwrap_err();
            assert_eq!(error.reason(), Reason::InvalidArgument);
        }
    }
}

#[tokio::test]
async fn what_is_wrong_with_an_expression_is_said_by_whoever_computes_it() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let a = session.zeros(DType::F32, &[2, 3]);
    let wrong = (a.matmul(&a) + 1.0).exp();
    let error = wrong.to_vec::<f32>().await.unwrap_err();
    assert_eq!(error.reason(), Reason::GraphInvalid);
    assert!(error.message().starts_with("matmul: "), "{error:?}");
    assert!(wrong.check().is_err() && wrong.shape().is_err());
    // An index that is out of range is found where it is read.
    let table = session.tensor(&[1.0f32, 2.0, 3.0], &[3]).unwrap();
    let at = session.tensor(&[0i64, 7], &[2]).unwrap();
    let error = table.take(&at, 0).eval().await.err().unwrap();
    assert_eq!(error.reason(), Reason::IndexOutOfRange);
    let last = session.tensor(&[-1i64], &[1]).unwrap();
    assert_eq!(table.take(&last, 0).to_vec::<f32>().await.unwrap(), [3.0]);
    // Two sessions do not mix.
    let other = relayed(&cluster).await;
    let foreign = other.zeros(DType::F32, &[3]);
    assert_eq!(
        (&table + &foreign).check().unwrap_err().reason(),
        Reason::InvalidArgument
    );
    // The session is as good as before.
    assert_eq!(table.max(&[], false).item::<f32>().await.unwrap(), 3.0);
}

#[tokio::test]
async fn compiled_functions_bake_in_no_key_no_size_and_no_panic() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    // The same as eager.
    let layer = |args: &[Tensor]| vec![(args[0].matmul(&args[1]) + 1.0).tanh().mean(&[-1], false)];
    let compiled = session.compile(layer);
    let x = session.random_key(1).random_normal(&[5, 4], 0.0, 1.0);
    let w = session.random_key(2).random_normal(&[4, 3], 0.0, 1.0);
    let eager = layer(&[x.clone(), w.clone()])[0]
        .to_vec::<f32>()
        .await
        .unwrap();
    let called = compiled.call_eval(&[x.clone(), w.clone()]).await.unwrap();
    assert_eq!(called[0].to_vec::<f32>().await.unwrap(), eager);
    let lazy = compiled.call(&[x.clone(), w.clone()]).unwrap();
    assert!(!lazy[0].is_evaluated());
    assert_eq!(lazy[0].to_vec::<f32>().await.unwrap(), eager);

    // A key is an argument: every key gives numbers of its own, and the same key the same.
    let noise = session.compile(|args| vec![args[0].random_uniform(&[4], 0.0, 1.0)]);
    let draw = async |seed| {
        let drawn = noise.call_eval(&[session.random_key(seed)]).await.unwrap();
        drawn[0].to_vec::<f32>().await.unwrap()
    };
    assert_ne!(draw(1).await, draw(2).await);
    assert_eq!(draw(3).await, draw(3).await);

    // A panic is an error of that call.
    let broken = session.compile(|args| {
        assert!(args.is_empty(), "no arguments wanted");
        vec![]
    });
    let error = broken.call(std::slice::from_ref(&x)).unwrap_err();
    assert!(error.message().contains("no arguments wanted"), "{error:?}");

    // Evaluating inside is an error, not a deadlock: arguments have no value.
    let peeked = session.compile(move |args| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let argument = args[0].clone();
        let inside =
            std::thread::spawn(move || runtime.block_on(async { argument.eval().await.err() }));
        assert_eq!(
            inside.join().unwrap().unwrap().reason(),
            Reason::InvalidArgument
        );
        vec![&args[0] + 1.0]
    });
    peeked.call(std::slice::from_ref(&x)).unwrap();

    // Nested functions become part of the outer one.
    let inner = session.compile(|args| vec![args[0].square()]);
    let outer = session.compile(move |args| vec![&inner.call(args).unwrap()[0] + &args[0]]);
    let two = session.tensor(&[2.0f32], &[1]).unwrap();
    let six = outer.call_eval(&[two]).await.unwrap();
    assert_eq!(six[0].to_vec::<f32>().await.unwrap(), [6.0]);
}

#[tokio::test]
async fn shapeless_functions_are_right_for_every_size() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let rows = |n: usize| {
        let values: Vec<f32> = (0..n * 3).map(|v| v as f32).collect();
        session.tensor(&values, &[n, 3]).unwrap()
    };
    type Function = fn(&[Tensor]) -> Vec<Tensor>;
    let functions: [(&str, Function); 7] = [
        ("softmax", |a| vec![(&a[0] * 0.1).softmax(-1)]),
        ("divide by the size", |a| {
            let n = a[0].shape().unwrap()[0];
            vec![&a[0] / n as f64]
        }),
        ("sum over the rows", |a| vec![a[0].sum(&[0], false)]),
        ("reshape to itself", |a| vec![a[0].reshape(&[-1, 3]) + 1.0]),
        ("slice", |a| vec![a[0].narrow(1, 0, 2)]),
        ("slice rows", |a| vec![a[0].narrow(0, 0, 1)]),
        ("take the last", |a| {
            let last = a[0].argmax(0, false);
            vec![a[0].take(&last, 0)]
        }),
    ];
    for (name, function) in functions {
        let compiled = session.compile_shapeless(function);
        for n in [4, 2, 1, 7, 100, 3] {
            let x = rows(n);
            let eager = &function(std::slice::from_ref(&x))[0];
            let called = &compiled.call_eval(std::slice::from_ref(&x)).await.unwrap()[0];
            assert_eq!(
                called.shape().unwrap(),
                eager.shape().unwrap(),
                "{name} {n}"
            );
            let (ours, theirs) = (
                called.to_vec::<f32>().await.unwrap(),
                eager.to_vec::<f32>().await.unwrap(),
            );
            assert_eq!(ours, theirs, "{name} of {n} rows");
            let lazy = compiled.call(&[x]).unwrap()[0]
                .to_vec::<f32>()
                .await
                .unwrap();
            assert_eq!(lazy, theirs, "{name} of {n} rows, lazily");
        }
    }
    // Two arguments that are as long only once.
    let add = session.compile_shapeless(|a| vec![&a[0] + &a[1]]);
    let fixed = rows(4);
    for n in [4, 1] {
        let sum = add.call_eval(&[rows(n), fixed.clone()]).await.unwrap();
        assert_eq!(sum[0].shape().unwrap(), [4, 3]);
    }
}

#[tokio::test]
async fn nothing_leaks_and_nothing_in_use_is_freed() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    session.set_cache_limit(0).await.unwrap();
    let big = session.full(1.5f32, &[1000, 256]);
    big.eval().await.unwrap();
    let before = session.memory().await.unwrap();
    assert!(before.active >= 1000 * 256 * 4, "{before:?}");
    for _ in 0..20 {
        let copy = &big + 1.0;
        copy.eval().await.unwrap();
    }
    let after = session.memory().await.unwrap();
    // The plan of the addition is there too; none of the twenty copies is.
    assert!(
        after.active < before.active + 1000 * 256 * 4,
        "{before:?} {after:?}"
    );
    let lease = session.keep(&[&big * 2.0]).await.unwrap();
    let kept = session.memory().await.unwrap().tensors;
    lease.release();
    assert_eq!(session.memory().await.unwrap().tensors, kept - 1);
    // A clone keeps what its expression forgot.
    let sum = big.sum(&[], false);
    drop(big);
    assert_eq!(sum.item::<f32>().await.unwrap(), 384_000.0);
    assert!(session.reset_peak_memory().await.unwrap() >= before.active);
    let limit = session.memory().await.unwrap().limit;
    assert_eq!(session.set_memory_limit(1 << 20).await.unwrap(), limit);
    let error = session.full(0.0f32, &[1 << 20]).eval().await.err().unwrap();
    assert_eq!(error.reason(), Reason::QuotaExceeded, "{error:?}");
}

#[tokio::test]
async fn an_expression_may_be_deeper_than_a_graph() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let one = session.tensor(&[1.0f32, 2.0], &[2]).unwrap();
    let mut sum = one.clone();
    for _ in 0..20_000 {
        sum = &sum + &one;
    }
    assert_eq!(sum.to_vec::<f32>().await.unwrap(), [20_001.0, 40_002.0]);
    // Never computed, and dropped without a stack of its depth.
    let mut deep = one.clone();
    for _ in 0..1_000_000 {
        deep = -deep;
    }
    drop(deep);
}

/// More independent nodes than a graph has, and a chain of more.
fn wide_and_deep(x: &Tensor) -> Vec<Tensor> {
    let mut all: Vec<Tensor> = (0..8193).map(|_| -x).collect();
    all.push((0..8193).fold(x.clone(), |deep, _| -&deep));
    all
}

#[tokio::test]
async fn an_expression_may_be_wider_than_a_graph() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let x = session.tensor(&[3.0f32], &[1]).unwrap();
    let all = wide_and_deep(&x);
    // Without a piece that gets it further it would go on for ever.
    let computed = tokio::time::timeout(Duration::from_secs(120), session.eval(&all));
    computed.await.expect("it hangs").unwrap();
    for negative in [0, 1, 8191, 8192, 8193] {
        let value = all[negative].item::<f32>().await.unwrap();
        assert_eq!(value, -3.0, "{negative}");
    }
    // Each is computed once: the first piece's results are not copied by the next.
    assert_eq!(session.memory().await.unwrap().tensors, 8194);
    // Into memory that is there, too.
    let shared = session.shared(DType::F32, &[1]).await.unwrap();
    let deep = wide_and_deep(&x).pop().unwrap();
    shared.assign(&deep).await.unwrap();
    assert_eq!(shared.to_vec::<f32>().unwrap(), [-3.0]);

    let options = SessionOptions {
        dry_run: true,
        ..Default::default()
    };
    let dry = Session::open(&address(&cluster), options).await.unwrap();
    let x = dry.full(3.0f32, &[1]);
    let all = wide_and_deep(&x);
    for some in [&all[..8193], &all[8193..], &all[..]] {
        let planned = tokio::time::timeout(Duration::from_secs(120), dry.eval(some));
        planned.await.expect("it hangs").unwrap();
    }
    assert!(all.iter().all(|t| !t.is_evaluated()));
    let memory = dry.memory().await.unwrap();
    assert_eq!((memory.active, memory.tensors), (0, 0));
}

#[tokio::test]
async fn a_function_of_many_shapes_keeps_few_of_its_traces() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let traced = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&traced);
    let add = session.compile(move |a| {
        count.fetch_add(1, Ordering::Relaxed);
        vec![&a[0] + 1.0]
    });
    let call = async |n: usize| {
        let x = session.tensor(&vec![n as f32; n], &[n]).unwrap();
        let result = add.call_eval(&[x]).await.unwrap();
        let values = result[0].to_vec::<f32>().await.unwrap();
        assert_eq!(values, vec![n as f32 + 1.0; n]);
    };
    // More shapes than a session has plans.
    let shapes = limits::MAX_SESSION_PLANS + 50;
    for n in 1..=shapes {
        call(n).await;
    }
    let plans = session.memory().await.unwrap().plans;
    assert!((1..=128).contains(&plans), "{plans} plans");
    // What is used goes on being there, and what was forgotten is made again.
    assert_eq!(traced.load(Ordering::Relaxed), shapes);
    call(shapes).await;
    assert_eq!(traced.load(Ordering::Relaxed), shapes);
    call(1).await;
    assert_eq!(traced.load(Ordering::Relaxed), shapes + 1);
    drop(add);
}

#[tokio::test]
async fn a_death_ends_sessions_with_a_typed_error_and_new_ones_work() {
    let cluster = cluster().await;
    for direct in [true, false] {
        let session = match direct {
            true => session(&cluster).await,
            false => relayed(&cluster).await,
        };
        let x = session.full(1.0f32, &[4]);
        x.eval().await.unwrap();
        let worker = session.describe().await.unwrap().worker;
        let infos = cluster.workers(|_| true).await.unwrap();
        let info = infos.iter().find(|w| w.id == worker).unwrap();
        signal_pid(info.pid, rustix::process::Signal::KILL).unwrap();
        let error = (&x + 1.0).eval().await.err().unwrap();
        assert_eq!(
            error.reason(),
            Reason::WorkerLost,
            "direct: {direct}: {error:?}"
        );
        let epoch = info.epoch;
        let back = |workers: &[v1::WorkerInfo]| {
            workers
                .iter()
                .any(|w| w.id == worker && w.epoch > epoch && w.state() == v1::WorkerState::Ready)
        };
        cluster.workers(back).await.unwrap();
        // The old session is known to be old.
        let error = (&x + 2.0).eval().await.err().unwrap();
        let expected = if direct {
            Reason::WorkerLost
        } else {
            Reason::HandleStale
        };
        assert_eq!(error.reason(), expected, "{error:?}");
        let again = relayed(&cluster).await;
        assert_eq!(again.full(2.0f32, &[]).item::<f32>().await.unwrap(), 2.0);
    }
}

/// The median time of a small call of this session's, of a good number of them.
async fn latency(session: &Session, x: &Tensor) -> Duration {
    let mut times = Vec::new();
    for i in 0..60 {
        let start = Instant::now();
        let sum = (x + f64::from(i)).max(&[], false);
        assert_eq!(sum.item::<f32>().await.unwrap(), 1.0 + i as f32);
        times.push(start.elapsed());
    }
    session.flush().await.unwrap();
    times.sort_unstable();
    times[times.len() / 2]
}

/// What is begun and not read: it goes on when it is.
#[allow(clippy::large_enum_variant)] // there are nine of them
enum Unread {
    Download(Session, Tensor, tonic::Streaming<v1::DownloadChunk>, usize),
    Calls(
        tonic::Streaming<v1::SessionEvent>,
        tonic::Streaming<v1::ExecuteResponse>,
        usize,
    ),
}

impl Unread {
    const DOWNLOAD: usize = 64 << 20;
    /// Bytes of an answer, and answers.
    const ANSWER: usize = 4 << 20;
    const ANSWERS: usize = 16;

    async fn download(slow: Session) -> Self {
        let big = slow.full(1.0f32, &[Self::DOWNLOAD / 4]);
        big.eval().await.unwrap();
        let list = slow.list().await.unwrap();
        let largest = list.tensors.iter().max_by_key(|t| t.bytes).unwrap();
        let request = v1::DownloadRequest {
            tensor: largest.handle.clone(),
            ..Default::default()
        };
        let mut download = slow.raw_download(request).await.unwrap();
        let first = download.message().await.unwrap().unwrap();
        Self::Download(slow, big, download, first.data.len())
    }

    /// Calls one after the other, whose answers have their results in them. Our client reads these whether or not anybody waits for
    /// them; this one does not.
    async fn calls(to: SocketAddr) -> Self {
        let channel = tonic::transport::Channel::from_shared(format!("http://{to}"));
        let channel = channel.unwrap().connect().await.unwrap();
        let mut client = TensorsClient::new(channel)
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES);
        let opened = client.open_session(v1::OpenSessionRequest::default()).await;
        let mut lease = opened.unwrap().into_inner();
        let first = lease.message().await.unwrap().and_then(|e| e.event);
        let Some(v1::session_event::Event::Opened(opened)) = first else {
            panic!("{first:?}")
        };
        let id: tonic::metadata::AsciiMetadataValue = opened.session.parse().unwrap();
        let mut g = GraphBuilder::new(0);
        let one = g.literal(DType::F32, Shape::default(), &1f32.to_le_bytes());
        let all = Shape::fixed(&[Self::ANSWER / 4]).unwrap();
        let all = g.broadcast_to(one.unwrap(), all).unwrap();
        let graph = g.finish(&[all]).unwrap();
        let mut request = tonic::Request::new(v1::CompileRequest {
            graph: Some(wire::encode(&graph)),
            ..Default::default()
        });
        request.metadata_mut().insert(SESSION_KEY, id.clone());
        let plan = client.compile(request).await.unwrap().into_inner().plan;
        let call = v1::ExecuteRequest {
            plan,
            outputs: vec![v1::OutputWish {
                kind: Some(v1::output_wish::Kind::Inline(true)),
            }],
            ..Default::default()
        };
        let calls = tokio_stream::iter(vec![call; Self::ANSWERS]);
        let mut request = tonic::Request::new(calls);
        request.metadata_mut().insert(SESSION_KEY, id);
        let mut answers = client.execute_many(request).await.unwrap().into_inner();
        let first = answers.message().await.unwrap().unwrap();
        Self::Calls(lease, answers, bytes_of(&first))
    }

    /// Reads it to its end.
    async fn read(self) {
        match self {
            Self::Download(_session, _big, mut download, mut bytes) => {
                while let Some(chunk) = download.message().await.unwrap() {
                    bytes += chunk.data.len();
                }
                assert_eq!(bytes, Self::DOWNLOAD);
            }
            Self::Calls(_lease, mut answers, mut bytes) => {
                while let Some(answer) = answers.message().await.unwrap() {
                    bytes += bytes_of(&answer);
                }
                assert_eq!(bytes, Self::ANSWER * Self::ANSWERS);
            }
        }
    }
}

fn bytes_of(answer: &v1::ExecuteResponse) -> usize {
    assert_eq!(answer.error, None);
    let data = answer.outputs.iter().map(|output| match &output.kind {
        Some(v1::output::Kind::Data(data)) => data.len(),
        other => panic!("{other:?}"),
    });
    data.sum()
}

#[tokio::test]
async fn unread_streams_change_no_other_sessions_latency() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = free.local_addr().unwrap();
    drop(free);
    let cluster = Cluster::ready_with(&["--listen", &listen.to_string()]).await;
    let cluster = cluster.unwrap();
    let mut quick = Vec::new();
    for (road, session) in [
        ("the scheduler", relayed(&cluster).await),
        ("a connection of its own", session(&cluster).await),
    ] {
        let x = session.full(1.0f32, &[1000]);
        x.eval().await.unwrap();
        latency(&session, &x).await; // what is slow only at first
        let before = latency(&session, &x).await;
        quick.push((road, session, x, before));
    }
    // As many of each kind as it takes to fill a connection's window if it were shared.
    let mut unread = Vec::new();
    for _ in 0..3 {
        unread.push(Unread::download(relayed(&cluster).await).await);
        unread.push(Unread::download(session(&cluster).await).await);
        unread.push(Unread::calls(listen).await);
    }
    // A session that waits for those who do not read waits for ever: they are read only afterwards.
    let mut beside = Vec::new();
    for (road, session, x, _) in &quick {
        let both = async {
            latency(session, x).await; // until those that are not read have come to a halt
            latency(session, x).await
        };
        let took = tokio::time::timeout(Duration::from_secs(20), both).await;
        beside.push(took.unwrap_or_else(|_| panic!("calls through {road} are held up")));
    }
    for stream in unread {
        stream.read().await;
    }
    for ((road, session, x, before), beside) in quick.into_iter().zip(beside) {
        let after = latency(&session, &x).await;
        println!(
            "a call through {road}: {before:?}, {beside:?} beside nine unread streams, {after:?}"
        );
        // Much more than this machine's unrest, and much less than waiting for one chunk of another's.
        let most = before.max(after) * 2 + Duration::from_millis(1);
        assert!(
            beside <= most,
            "{beside:?} through {road} instead of {before:?} and {after:?}"
        );
    }
}

#[tokio::test]
async fn streams_events_and_pipelines_keep_their_order() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let (one, two) = (session.stream(), session.stream());
    let x = session.full(1.0f32, &[1000]);
    let a = &x + 1.0;
    one.async_eval(std::slice::from_ref(&a)).await.unwrap();
    two.wait(&one.record()).unwrap();
    let b = &a * 3.0;
    two.eval(std::slice::from_ref(&b)).await.unwrap();
    assert_eq!(b.max(&[], false).item::<f32>().await.unwrap(), 6.0);
    one.synchronize().await.unwrap();
    session.synchronize().await.unwrap();

    let step = session.compile(|args| vec![&args[0] * 2.0 + 1.0]);
    let mut pipeline = session.pipeline().await.unwrap();
    let mut value = session.tensor(&[0.0f32], &[1]).unwrap();
    let mut pending = Vec::new();
    for _ in 0..20 {
        let call = pipeline
            .call(&step, std::slice::from_ref(&value))
            .await
            .unwrap();
        // Used before it is computed.
        value = call.results[0].clone();
        pending.push(call);
    }
    for call in pending {
        call.wait().await.unwrap();
    }
    assert_eq!(value.item::<f32>().await.unwrap(), ((1 << 20) - 1) as f32);
}

/// Products that take a good while, node after node.
fn long(session: &Session) -> Tensor {
    let x = session.full(1.0f32 / 512.0, &[512, 512]);
    (0..200).fold(x.clone(), |product, _| product.matmul(&x))
}

#[tokio::test]
async fn a_stream_that_waits_for_an_event_overtakes_nothing_and_others_do() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let (one, two, three) = (session.stream(), session.stream(), session.stream());
    let state = async || {
        let list = session.list().await.unwrap();
        let long = list.tensors.iter().find(|t| t.bytes == 512 * 512 * 4);
        long.unwrap().state()
    };
    let product = long(&session);
    one.async_eval(std::slice::from_ref(&product))
        .await
        .unwrap();
    // Nothing in common with the product: what is read makes neither of them wait.
    let free = session.full(2.0f32, &[]) + 1.0;
    three.eval(std::slice::from_ref(&free)).await.unwrap();
    assert_eq!(state().await, v1::TensorState::Pending);
    let waits = session.full(3.0f32, &[]) + 1.0;
    two.wait(&one.record()).unwrap();
    two.eval(std::slice::from_ref(&waits)).await.unwrap();
    assert_eq!(state().await, v1::TensorState::Ready);
    assert_eq!(waits.item::<f32>().await.unwrap(), 4.0);
}

/// How many products of [`long`] are still to come.
async fn pending(session: &Session) -> usize {
    let list = session.list().await.unwrap();
    let long = list.tensors.iter().filter(|t| t.bytes == 512 * 512 * 4);
    long.filter(|t| t.state() == v1::TensorState::Pending)
        .count()
}

#[tokio::test]
async fn an_event_happens_when_its_calls_are_done_and_not_before() {
    let cluster = cluster().await;
    for session in [session(&cluster).await, relayed(&cluster).await] {
        let (slow, other) = (session.stream(), session.stream());
        let small = |value: f32| session.full(value, &[]) + 1.0;
        // Of a stream that has done nothing yet.
        slow.record().synchronize().await.unwrap();
        let before = small(1.0);
        slow.async_eval(std::slice::from_ref(&before))
            .await
            .unwrap();
        let early = slow.record();
        let product = long(&session);
        slow.async_eval(std::slice::from_ref(&product))
            .await
            .unwrap();
        let late = slow.record();
        // What its stream was given afterwards does not count, nor what other streams have.
        early.synchronize().await.unwrap();
        other.eval(&[small(2.0)]).await.unwrap();
        other.record().synchronize().await.unwrap();
        assert_eq!(pending(&session).await, 1);
        let waits = tokio::spawn(async move { late.synchronize().await });
        let mut looks = 0;
        loop {
            // Asked first: once it has happened, the product is there.
            let happened = waits.is_finished();
            let there = pending(&session).await == 0;
            assert!(there || !happened, "after {looks} looks");
            if happened {
                break;
            }
            looks += usize::from(!there);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(looks > 0);
        waits.await.unwrap().unwrap();

        // A stream waits for its own calls, a session for all.
        let again = long(&session);
        slow.async_eval(std::slice::from_ref(&again)).await.unwrap();
        other.async_eval(&[small(3.0)]).await.unwrap();
        other.synchronize().await.unwrap();
        assert_eq!(pending(&session).await, 1);
        slow.synchronize().await.unwrap();
        assert_eq!(pending(&session).await, 0);
        let both = [long(&session), long(&session)];
        slow.async_eval(&both[..1]).await.unwrap();
        other.async_eval(&both[1..]).await.unwrap();
        assert_eq!(pending(&session).await, 2);
        session.synchronize().await.unwrap();
        assert_eq!(pending(&session).await, 0);

        // An event outlives its stream.
        let last = long(&session);
        slow.async_eval(std::slice::from_ref(&last)).await.unwrap();
        let event = slow.record();
        drop(slow);
        assert_eq!(pending(&session).await, 1);
        event.synchronize().await.unwrap();
        assert_eq!(pending(&session).await, 0);
        assert_eq!(before.item::<f32>().await.unwrap(), 2.0);
    }
}

#[tokio::test]
async fn what_a_stream_had_queued_is_not_done_once_it_is_cancelled_and_the_rest_is() {
    let cluster = cluster().await;
    for session in [session(&cluster).await, relayed(&cluster).await] {
        let (one, two) = (session.stream(), session.stream());
        let (running, queued, beside) = (long(&session), long(&session), long(&session));
        for stopped in [&running, &queued] {
            one.async_eval(std::slice::from_ref(stopped)).await.unwrap();
        }
        let event = one.record();
        two.async_eval(std::slice::from_ref(&beside)).await.unwrap();
        assert_eq!(pending(&session).await, 3);
        assert_eq!(one.cancel().await.unwrap(), 2);
        // Who waits for it waits no longer; and it was not because all work had been done.
        event.synchronize().await.unwrap();
        assert_eq!(pending(&session).await, 1);
        assert_eq!(one.cancel().await.unwrap(), 0);
        for stopped in [&running, &queued] {
            let error = stopped.fetch().await.unwrap_err();
            assert_eq!(error.reason(), Reason::TensorNotReady, "{error:?}");
            assert_eq!(error.get("cause"), Some("CANCELLED"), "{error:?}");
            // So is what is made of it.
            let error = (stopped + 1.0).eval().await.unwrap_err();
            assert_eq!(error.reason(), Reason::Cancelled, "{error:?}");
        }
        // The stream takes more, and the other one goes on. Rows of 512 times 1/512 give the same matrix.
        let later = session.full(3.0f32, &[]) + 1.0;
        one.eval(std::slice::from_ref(&later)).await.unwrap();
        assert_eq!(later.item::<f32>().await.unwrap(), 4.0);
        let values = beside.to_vec::<f32>().await.unwrap();
        assert_eq!(values, [1.0 / 512.0; 512 * 512]);

        // All of a session's streams at once.
        let both = [long(&session), long(&session)];
        one.async_eval(&both[..1]).await.unwrap();
        two.async_eval(&both[1..]).await.unwrap();
        assert_eq!(session.cancel().await.unwrap(), 2);
        session.synchronize().await.unwrap();
        for stopped in &both {
            let error = stopped.fetch().await.unwrap_err();
            assert_eq!(error.get("cause"), Some("CANCELLED"), "{error:?}");
        }
        two.eval(&[&later + 1.0]).await.unwrap();
    }
}

#[tokio::test]
async fn a_session_has_so_many_streams_and_one_that_ends_makes_room() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let use_it = async |stream: &Stream, value: f32| {
        let sum = session.full(value, &[]) + 1.0;
        stream.eval(std::slice::from_ref(&sum)).await?;
        sum.item::<f32>().await
    };
    let refused = async |stream: &Stream| {
        let error = use_it(stream, 0.0).await.unwrap_err();
        assert_eq!(error.reason(), Reason::QuotaExceeded, "{error:?}");
        let limit = limits::MAX_SESSION_STREAMS.to_string();
        assert_eq!(error.get("limit"), Some(limit.as_str()), "{error:?}");
        assert!(error.message().contains("streams"), "{error:?}");
    };
    // The session's own is one of them.
    session.full(1.0f32, &[1]).eval().await.unwrap();
    let mut streams = Vec::new();
    for n in 1..limits::MAX_SESSION_STREAMS {
        let stream = session.stream();
        assert_eq!(use_it(&stream, n as f32).await.unwrap(), n as f32 + 1.0);
        streams.push(stream);
    }
    let more = session.stream();
    refused(&more).await;
    // Nobody else is worse off.
    for stream in &streams {
        assert_eq!(use_it(stream, 7.0).await.unwrap(), 8.0);
    }
    let elsewhere = relayed(&cluster).await;
    let value = (elsewhere.full(1.0f32, &[]) + 1.0).item::<f32>().await;
    assert_eq!(value.unwrap(), 2.0);
    // One that ends makes room for one, whatever became of the one that was too many.
    drop(streams.remove(20));
    drop(more);
    let fits = session.stream();
    assert_eq!(use_it(&fits, 5.0).await.unwrap(), 6.0);
    refused(&session.stream()).await;
    drop(fits);
    assert_eq!(use_it(&session.stream(), 5.0).await.unwrap(), 6.0);
}

#[tokio::test]
async fn tokens_go_before_tensors_and_both_go_on() {
    const CALLS: usize = 900;
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let session = session(&cluster).await;
    let x = session.full(1.0f32 / 1024.0, &[1024, 1024]);
    x.eval().await.unwrap();
    let product = || x.matmul(&x).sum(&[], false);
    let sum = product().item::<f32>().await.unwrap();
    assert!((sum - 1024.0).abs() < 0.01, "{sum}");
    let queued: Vec<Tensor> = (0..CALLS).map(|_| product()).collect();
    for tensor in &queued {
        session
            .async_eval(std::slice::from_ref(tensor))
            .await
            .unwrap();
    }
    let done = async || {
        let list = session.list().await.unwrap();
        let pending = list.tensors.iter();
        let pending = pending.filter(|t| t.state() == v1::TensorState::Pending);
        CALLS - pending.count()
    };
    let before = done().await;
    let options = GenerateOptions {
        max_tokens: 60,
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let mut stream = client.generate("In the beginning", options).await.unwrap();
    let mut tokens = 0;
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event.unwrap() {
            tokens += delta.token_ids.len();
        }
    }
    assert_eq!(tokens, 60);
    // Between two steps one product is computed. More of them fit only before the request came and after its end, and all
    // of them would take many times as long.
    let during = done().await - before;
    assert!((20..=CALLS / 2).contains(&during), "{during} of {CALLS}");
    session.cancel().await.unwrap();
}

#[tokio::test]
async fn results_go_into_shared_memory_and_inputs_are_read_where_they_are() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let input = session.shared(DType::F32, &[1000]).await.unwrap();
    let output = session.shared(DType::F32, &[1000]).await.unwrap();
    for round in 1..4 {
        let bytes: Vec<u8> = (0..1000)
            .flat_map(|i| (i as f32 * round as f32).to_le_bytes())
            .collect();
        input.write(0, &bytes).unwrap();
        output.assign(&(input.tensor() + 1.0)).await.unwrap();
        let result = output.to_vec::<f32>().unwrap();
        assert!(
            result
                .iter()
                .enumerate()
                .all(|(i, v)| *v == i as f32 * round as f32 + 1.0)
        );
    }
    // Indices that a client could change while they are read are copied first; a bad one is still found.
    let index = session.shared(DType::I32, &[1]).await.unwrap();
    index.write(0, &1000i32.to_le_bytes()).unwrap();
    let error = input
        .tensor()
        .take(index.tensor(), 0)
        .eval()
        .await
        .err()
        .unwrap();
    assert_eq!(error.reason(), Reason::IndexOutOfRange);
    // Through the relay there is none.
    let error = relayed(&cluster)
        .await
        .shared(DType::F32, &[1])
        .await
        .err()
        .unwrap();
    assert_eq!(error.reason(), Reason::InvalidArgument);
}

#[tokio::test]
async fn a_model_s_weights_are_tensors_of_any_graph() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let backend = Backend::open("kjv", BackendParams::at(address(&cluster)))
        .await
        .unwrap();
    let name = "model.embed_tokens.weight";
    let file = TensorFile::open(&kjv().join("model.safetensors")).unwrap();
    let reference = file.get(name).unwrap().unwrap();
    let weight = backend.get(name).await.unwrap();
    assert_eq!(weight.fetch().await.unwrap(), reference);
    let active = backend.session().memory().await.unwrap().active;
    assert_eq!(active, 0, "a weight costs its session nothing");
    let norm = (weight.cast(DType::F32).square()).sum(&[-1], false).sqrt();
    let row: f64 = reference
        .plain()
        .unwrap()
        .iter()
        .take(norm_width(&weight))
        .map(|v| v.as_f64().powi(2))
        .sum();
    assert!((f64::from(norm.to_vec::<f32>().await.unwrap()[0]) - row.sqrt()).abs() < 1e-4);
    let limits = Thresholds::default();
    let (with, without) = (kjv().join("model.safetensors"), kjv().join("model"));
    let same = [(name, weight.clone())];
    let all = Tensor::compare_with(&same, &without, &limits, true)
        .await
        .unwrap();
    assert_eq!(all.by_name[0].1.as_ref().unwrap().max_abs, 0.0);
    let negated = [(name, -&weight)];
    let off = Tensor::compare_with(&negated, &with, &limits, true).await;
    assert_eq!(off.unwrap_err().reason(), Reason::NumericsFailed);
    assert!(backend.get("nothing").await.is_err());
    let error = Backend::open("tpu", BackendParams::at(address(&cluster)))
        .await
        .err()
        .unwrap();
    assert!(
        error.message().contains("unsupported backend") && error.message().contains("cpu"),
        "{error:?}"
    );
    let memory = backend.memory();
    assert!(memory[0].total() > 9_000_000, "{memory:?}");

    // A dry run says what it would take and makes nothing.
    let mut dry = Backend::open(
        "cpu",
        BackendParams {
            allocate: false,
            ..BackendParams::at(address(&cluster))
        },
    )
    .await
    .unwrap();
    let session = dry.session().clone();
    let square = session.compile(|args| vec![args[0].matmul(&args[0]).exp()]);
    let x = session.zeros(DType::F32, &[512, 512]);
    let taken = dry.reserve(&square, &[x]).await.unwrap();
    assert!(
        taken.inputs >= 1 << 20 && taken.outputs >= 1 << 20,
        "{taken:?}"
    );
    assert_eq!(session.memory().await.unwrap().active, 0);

    // What could never be held is refused, with the sizes that were tried.
    session.set_memory_limit(2 << 20).await.unwrap();
    let x = session.zeros(DType::F32, &[512, 512]);
    let error = dry.reserve(&square, &[x]).await.unwrap_err();
    assert_eq!(error.reason(), Reason::QuotaExceeded, "{error:?}");
    for (key, least) in [("arena", 1u64), ("inputs", 1 << 20), ("outputs", 1 << 20)] {
        let tried: u64 = error.get(key).unwrap().parse().unwrap();
        assert!(tried >= least, "{key}: {error:?}");
    }
    assert_eq!(error.get("limit"), Some("2097152"));
    // A weight is there already, whatever a session may hold.
    let session = backend.session();
    let size = reference.bytes().len() as u64;
    session.set_memory_limit(size - 1).await.unwrap();
    let weight = backend.get(name).await.unwrap();
    let greatest = session.compile(move |_| vec![weight.max(&[], false)]);
    let taken = greatest.reserve(&[]).await.unwrap();
    assert_eq!((taken.constants, taken.inputs), (size, 0), "{taken:?}");
}

/// Nanoseconds that a process's compute threads have run, all together.
fn computed(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let tasks = tasks.map(|task| task.unwrap().path());
    let computing = tasks.filter(|task| {
        let name = std::fs::read_to_string(task.join("comm")).unwrap();
        name.starts_with("compute-")
    });
    let ran = |task: std::path::PathBuf| -> u64 {
        let statistics = std::fs::read_to_string(task.join("schedstat")).unwrap();
        statistics
            .split_whitespace()
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    computing.map(ran).sum()
}

#[tokio::test]
async fn a_backend_uses_no_more_threads_than_it_asks_for_and_gets_the_same_bits() {
    let cluster = cluster().await;
    let pid = cluster.workers(|w| !w.is_empty()).await.unwrap()[0].pid;
    let mut results = Vec::new();
    let mut cores = 0;
    for threads in [1, 0, 1, 2, 1000] {
        let params = BackendParams {
            threads,
            ..BackendParams::at(address(&cluster))
        };
        let backend = Backend::open("cpu", params).await.unwrap();
        cores = backend.describe().threads;
        let most = match threads {
            0 => cores,
            asked => asked.min(cores),
        };
        let session = backend.session();
        assert_eq!(session.threads(), most);
        let before = computed(pid);
        let x = session.arange(0.0, 40_000.0, 1.0, DType::F32).sin();
        let x = x.reshape(&[200, 200]);
        let y = x.matmul(&x).softmax(-1).matmul(&x).sum(&[0], false);
        results.push(y.to_vec::<f32>().await.unwrap());
        // Until those that ran have gone to sleep: what a thread has run is counted when it stops.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let ran = computed(pid) - before;
        // The engine's own thread is the first; the others sleep.
        assert_eq!(ran == 0, most == 1, "{threads} threads: {ran} ns");
    }
    assert!(results.iter().all(|r| *r == results[0]));
    assert!(cores > 0);
}

fn norm_width(weight: &Tensor) -> usize {
    weight.shape().unwrap()[1]
}

#[tokio::test]
async fn tensors_are_printed_saved_and_read_again() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let x = session.arange(0.0, 6.0, 1.0, DType::F32).reshape(&[2, 3]) * -0.5;
    let text = x.dump(DumpOptions::default()).await.unwrap();
    assert_eq!(
        text,
        "[[-0.0000, -0.5000, -1.0000],\n [-1.5000, -2.0000, -2.5000]]"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let notes = std::collections::HashMap::from([("by".to_owned(), "a test".to_owned())]);
    TensorFile::save(
        &path,
        &[("x", x.clone()), ("y", x.cast(DType::BF16))],
        Some(notes),
    )
    .await
    .unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(
        (file.count(), file.metadata()["by"].as_str()),
        (2, "a test")
    );
    let again = session
        .upload(&file.get("x").unwrap().unwrap())
        .await
        .unwrap();
    assert!(
        x.equal(&again)
            .all(&[], false)
            .item::<bool>()
            .await
            .unwrap()
    );
    let npy = folder.path().join("x.npy");
    x.fetch().await.unwrap().save_npy(&npy).unwrap();
    assert_eq!(
        HostTensor::load_npy(&npy).unwrap(),
        x.fetch().await.unwrap()
    );
}

#[tokio::test]
async fn two_sessions_never_see_each_other_s_bytes() {
    let cluster = cluster().await;
    let (secret, curious) = (session(&cluster).await, relayed(&cluster).await);
    for round in 0..8 {
        let kept = secret.full(0x5ec2e7u32, &[100_000]);
        kept.eval().await.unwrap();
        drop(kept);
        // What it freed is not cleared, and stays its own: no result of the other gets it, however much it computes.
        let freed = secret.memory().await.unwrap().cache;
        assert!(freed >= 400_000, "round {round}: {freed}");
        let ones = curious.full(1u32, &[100_000]);
        let sum = (&ones + &ones).to_vec::<u32>().await.unwrap();
        assert_eq!(sum, [2; 100_000]);
        assert_eq!(secret.memory().await.unwrap().cache, freed);
        let seen = curious.empty(DType::U32, &[100_000]).await.unwrap();
        assert!(
            seen.to_vec::<u32>().await.unwrap().iter().all(|v| *v == 0),
            "round {round}"
        );
    }
    // A handle of another session is not found, whoever asks.
    let mine = secret.full(1.0f32, &[4]);
    mine.eval().await.unwrap();
    let handle = secret.list().await.unwrap().tensors[0].handle.clone();
    let stolen = curious
        .raw_download(v1::DownloadRequest {
            tensor: handle,
            ..Default::default()
        })
        .await;
    let error = match stolen {
        Err(error) => error,
        Ok(mut stream) => curious.read_error(&stream.message().await.unwrap_err()),
    };
    assert_eq!(error.reason(), Reason::HandleNotFound, "{error:?}");
}

/// Blocks of three tokens, in no order, of which one sequence has these.
const TABLE: [i32; 3] = [4, 0, 2];
const TOKENS: usize = 7;

fn paged(dtype: DType) -> CacheSpec {
    CacheSpec {
        dtype,
        blocks: 5,
        block_len: 3,
        kv_heads: 2,
        head_dim: 32,
    }
}

/// Slots of tokens, and where to look for them.
fn pages(session: &Session, tokens: std::ops::Range<usize>) -> (Tensor, Pages) {
    let slot = |t: usize| TABLE[t / 3] * 3 + (t % 3) as i32;
    let slots: Vec<i32> = tokens.clone().map(slot).collect();
    let positions: Vec<i32> = tokens.clone().map(|t| t as i32).collect();
    let n = [tokens.len()];
    let pages = Pages {
        tables: session.tensor(&TABLE, &[1, 3]).unwrap(),
        sequences: session.zeros(DType::I32, &n),
        positions: session.tensor(&positions, &n).unwrap(),
    };
    (session.tensor(&slots, &n).unwrap(), pages)
}

const SCALED: PagedOptions = PagedOptions {
    scale: 0.25,
    window: 0,
    soft_cap: 0.0,
};

#[tokio::test]
async fn attention_over_a_cache_is_attention_over_what_was_written() {
    let cluster = cluster().await;
    for session in [session(&cluster).await, relayed(&cluster).await] {
        let keys = session.random_key(3).random_split(3);
        let [queries, keys, values] = [(0, 4), (1, 2), (2, 2)].map(|(i, heads)| {
            let key = keys.narrow(0, i, i + 1).reshape(&[2]);
            key.random_normal(&[TOKENS, heads, 32], 0.0, 1.0)
        });
        session
            .eval(&[queries.clone(), keys.clone(), values.clone()])
            .await
            .unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let cache = session.cache(paged(dtype)).await.unwrap();
            let mut step = session.step();
            let (slots, places) = pages(&session, 0..TOKENS);
            step.write(&cache, &keys, &values, &slots);
            let attended = step.attend(&queries, &cache, &places, SCALED);
            // Expressions of the step go on with it.
            let twice = &attended * 2.0;
            step.run(&[attended.clone(), twice.clone()]).await.unwrap();
            // The same without a cache, of the keys and values as it rounds them.
            let plain = |t: &Tensor| {
                let rounded = t.cast(dtype).cast(DType::F32);
                rounded.transpose(&[1, 0, 2]).expand_dims(&[0])
            };
            let options = AttentionOptions {
                scale: 0.25,
                causal: true,
                ..AttentionOptions::default()
            };
            let wide = queries.transpose(&[1, 0, 2]).expand_dims(&[0]);
            let expected = wide.attention(&plain(&keys), &plain(&values), &options);
            let expected = expected.squeeze(&[0]).transpose(&[1, 0, 2]);
            let apart = (&attended - &expected).abs().max(&[], false);
            let apart = apart.item::<f32>().await.unwrap();
            assert!(apart < 1e-5, "{dtype}: {apart}");
            let sums = [twice, &attended + &attended];
            let [a, b] = [
                sums[0].fetch().await.unwrap(),
                sums[1].fetch().await.unwrap(),
            ];
            assert_eq!(a, b);
            // Token by token: the same bits, in the cache too, and one plan for all of them.
            let slow = session.cache(paged(dtype)).await.unwrap();
            let mut rows = Vec::new();
            for t in 0..TOKENS {
                let (slots, places) = pages(&session, t..t + 1);
                let at = t as i64;
                let [q, k, v] = [&queries, &keys, &values].map(|x| x.narrow(0, at, at + 1));
                let sequences = places.sequences.clone();
                session
                    .eval(&[q.clone(), k.clone(), v.clone(), sequences])
                    .await
                    .unwrap();
                let before = session.memory().await.unwrap().plans;
                let mut step = session.step();
                step.write(&slow, &k, &v, &slots);
                let row = step.attend(&q, &slow, &places, SCALED);
                step.run(std::slice::from_ref(&row)).await.unwrap();
                rows.push(row);
                let plans = session.memory().await.unwrap().plans;
                assert_eq!(plans - before, u32::from(t == 0), "token {t}");
            }
            let rows = Tensor::concat(&rows, 0).fetch().await.unwrap();
            assert_eq!(rows, attended.fetch().await.unwrap(), "{dtype}");
            let (one, other) = (cache.fetch().await.unwrap(), slow.fetch().await.unwrap());
            assert_eq!(one, other);
            // What nobody wrote is zeros: blocks 1 and 3.
            let all = session.host(one);
            for block in [1, 3] {
                let block = all.narrow(1, block, block + 1).cast(DType::F32);
                let most = block.abs().max(&[], false);
                assert_eq!(most.item::<f32>().await.unwrap(), 0.0);
            }
            let most = all.cast(DType::F32).abs().max(&[], false);
            assert!(most.item::<f32>().await.unwrap() > 1.0);
        }
    }
}

#[tokio::test]
async fn effects_are_done_once_in_the_order_of_their_step() {
    let cluster = cluster().await;
    let session = session(&cluster).await;
    let cache = session.cache(paged(DType::Q8_0)).await.unwrap();
    let token = |x: f32| session.full(x, &[1, 2, 32]);
    let (slots, places) = pages(&session, 0..1);
    let query = session.full(1.0f32, &[1, 4, 32]);
    let value = async |tensor: &Tensor| {
        let most = tensor.max(&[], false);
        most.item::<f32>().await.unwrap()
    };
    // A q8_0 block of equal numbers is rounded by its scale alone, to f16.
    let near = |got: f32, expected: f32| (got - expected).abs() < 2e-3 * expected;
    let mut step = session.step();
    step.write(&cache, &token(1.0), &token(1.0), &slots);
    let first = step.attend(&query, &cache, &places, SCALED);
    step.write(&cache, &token(1.0), &token(2.0), &slots);
    // The third write is made of what the second read was; the read of the first is not wanted.
    let second = step.attend(&query, &cache, &places, SCALED);
    let more = second.narrow(1, 0, 2) + 1.0;
    step.write(&cache, &token(1.0), &more, &slots);
    let third = step.attend(&query, &cache, &places, SCALED);
    // Out of order, and not all.
    step.run(&[third.clone(), second.clone()]).await.unwrap();
    assert!(near(value(&second).await, 2.0));
    assert!(near(value(&third).await, 3.0));
    let refused = async |tensor: &Tensor, reason: Reason, words: &str| {
        let error = tensor.eval().await.err().unwrap();
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.message().contains(words), "{error}");
    };
    refused(&first, Reason::InvalidArgument, "effect of a step").await;
    refused(&(&first + 1.0), Reason::InvalidArgument, "effect of a step").await;
    // Nor is one done before its step is run, or by another step, or traced.
    let mut step = session.step();
    step.write(&cache, &token(1.0), &token(9.0), &slots);
    let never = step.attend(&query, &cache, &places, SCALED);
    refused(&never, Reason::InvalidArgument, "effect of a step").await;
    let other = session.step();
    let error = other.run(std::slice::from_ref(&never)).await.unwrap_err();
    assert_eq!(error.reason(), Reason::InvalidArgument, "{error}");
    let traced = never.clone();
    let function = session.compile(move |_| vec![&traced + 1.0]);
    let error = function.call_eval(&[]).await.err().unwrap();
    assert_eq!(error.reason(), Reason::InvalidArgument, "{error}");
    drop(step);
    let mut step = session.step();
    let now = step.attend(&query, &cache, &places, SCALED);
    step.run(std::slice::from_ref(&now)).await.unwrap();
    assert!(near(value(&now).await, 3.0));
    // A write without a result.
    let mut step = session.step();
    step.write(&cache, &token(1.0), &token(5.0), &slots);
    step.run(&[]).await.unwrap();
    let mut step = session.step();
    let now = step.attend(&query, &cache, &places, SCALED);
    step.run(std::slice::from_ref(&now)).await.unwrap();
    assert!(near(value(&now).await, 5.0));
}

#[tokio::test]
async fn a_step_that_cannot_be_run_says_why_and_caches_end_with_their_owners() {
    let cluster = cluster().await;
    let (session, other) = (session(&cluster).await, relayed(&cluster).await);
    for (spec, why) in [
        (
            CacheSpec {
                head_dim: 33,
                ..paged(DType::Q8_0)
            },
            Reason::GraphInvalid,
        ),
        (paged(DType::I32), Reason::GraphInvalid),
        (
            CacheSpec {
                blocks: 1 << 40,
                ..paged(DType::F32)
            },
            Reason::GraphInvalid,
        ),
        (
            CacheSpec {
                blocks: 1 << 24,
                ..paged(DType::F32)
            },
            Reason::QuotaExceeded,
        ),
    ] {
        let error = session.cache(spec).await.unwrap_err();
        assert_eq!(error.reason(), why, "{spec}: {error}");
    }
    let before = session.memory().await.unwrap().active;
    let cache = session.cache(paged(DType::F32)).await.unwrap();
    let bytes = paged(DType::F32).bytes().unwrap() as u64;
    assert_eq!(session.memory().await.unwrap().active, before + bytes);
    let (slots, places) = pages(&session, 0..1);
    let token = session.full(1.0f32, &[1, 2, 32]);
    let query = session.full(1.0f32, &[1, 4, 32]);
    let run = async |step: Step| step.run(&[]).await.unwrap_err();
    // Of another shape, or another session: known before anything is sent.
    let mut step = session.step();
    step.write(&cache, &query, &token, &slots);
    step.write(&cache, &token, &token, &slots);
    assert_eq!(run(step).await.reason(), Reason::GraphInvalid);
    let foreign = other.cache(paged(DType::F32)).await.unwrap();
    let mut step = session.step();
    step.write(&foreign, &token, &token, &slots);
    assert_eq!(run(step).await.reason(), Reason::InvalidArgument);
    let mut step = session.step();
    let stolen = step.attend(&query, &foreign, &places, SCALED);
    let error = step.run(&[stolen]).await.unwrap_err();
    assert_eq!(error.reason(), Reason::InvalidArgument);
    // Slots and blocks are known on the worker only.
    for slot in [15, -2, i32::MAX, i32::MIN] {
        let mut step = session.step();
        let slot = session.tensor(&[slot], &[1]).unwrap();
        step.write(&cache, &token, &token, &slot);
        assert_eq!(run(step).await.reason(), Reason::IndexOutOfRange);
    }
    for block in [5, -1, i32::MAX] {
        let mut step = session.step();
        let tables = session.tensor(&[block], &[1, 1]).unwrap();
        let strange = Pages {
            tables,
            ..places.clone()
        };
        let read = step.attend(&query, &cache, &strange, SCALED);
        let error = step.run(&[read]).await.unwrap_err();
        assert_eq!(error.reason(), Reason::IndexOutOfRange);
    }
    // Nothing of all this wrote anything.
    let zeros = session.host(cache.fetch().await.unwrap());
    assert!(!zeros.any(&[], false).item::<bool>().await.unwrap());
    let mut step = session.step();
    for _ in 0..10_000 {
        step.write(&cache, &token, &token, &slots);
    }
    assert_eq!(run(step).await.reason(), Reason::LimitExceeded);
    // Freed with its last clone.
    let clone = cache.clone();
    drop(cache);
    session.flush().await.unwrap();
    assert!(session.memory().await.unwrap().active >= before + bytes);
    drop(clone);
    let start = Instant::now();
    let held = async || {
        let list = session.list().await.unwrap();
        list.tensors.iter().any(|t| t.bytes == bytes)
    };
    while held().await {
        session.flush().await.unwrap();
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}

#[tokio::test]
async fn checked_transfers_go_on_where_their_connection_broke() {
    const MIB: u64 = 1 << 20;
    let cluster = cluster().await;
    let folder = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(folder.path(), &cluster.socket).unwrap();
    let address = format!("unix:{}", proxy.socket.display()).parse().unwrap();
    let options = SessionOptions {
        relayed: true,
        ..SessionOptions::default()
    };
    let session = Session::open(&address, options).await.unwrap();
    let size = 24 * MIB as usize;
    let bytes: Vec<u8> = (0..size as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let data = HostTensor::from_slice(&bytes, &[size]).unwrap();
    // No connection brings more than 7 MiB: who began anew each time would never end.
    proxy.allow_forth(7 * MIB);
    let before = proxy.connections();
    let there = session.upload_checked(&data).await.unwrap();
    let took = proxy.connections() - before;
    assert!(took >= 4, "{took} connections");
    proxy.allow_forth(u64::MAX);
    proxy.allow(7 * MIB);
    let before = proxy.connections();
    assert_eq!(there.fetch_checked().await.unwrap(), data);
    let took = proxy.connections() - before;
    assert!(took >= 4, "{took} connections");
    proxy.allow(u64::MAX);
    let part = 5_000_001..20_000_003;
    let some = there.fetch_range(part.clone()).await.unwrap();
    assert!(some == bytes[part]);
    assert!(there.fetch_range(7..7).await.unwrap().is_empty());
    for range in [0..size + 1, size + 1..size + 2] {
        let error = there.fetch_range(range).await.unwrap_err();
        assert_eq!(error.reason(), Reason::InvalidArgument);
    }
    // A bit that changed on the way is found, and what it was part of comes again.
    proxy.spoil_next(3 * MIB + 12_345);
    let again = session.upload_checked(&data).await.unwrap();
    assert!(proxy.has_spoiled());
    proxy.spoil_next(10 * MIB + 12_345);
    assert_eq!(again.fetch_checked().await.unwrap(), data);
    assert!(proxy.has_spoiled());
    // The session's own connection was none of these.
    let same = there.equal(&again).all(&[], false);
    assert!(same.item::<bool>().await.unwrap());
    assert!(session.closed().is_none());
    // One that brings nothing at all is given up.
    proxy.allow_forth(100);
    let error = session.upload_checked(&data).await.unwrap_err();
    assert!(hotcell_client::connect::is_unreachable(&error), "{error}");
    assert_eq!(again.size().unwrap(), size);
}
