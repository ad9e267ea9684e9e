//! What strangers send is refused with a reason, and the worker goes on.

use std::collections::{BTreeMap, BTreeSet};

use hotcell_graph::{DType, Graph, GraphBuilder, wire};
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits,
    session::{HandleId, SESSION_KEY, SessionId},
    v1::{self, output_wish, upload_target::Kind},
};
use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::{Code, Request};

use crate::support::*;

const MIB: u64 = 1 << 20;

/// Every handle that is not one of this session's, and its reason.
async fn strange_handles(client: &Client, other: &Client) -> Vec<(v1::Handle, Reason)> {
    let freed = client.upload(&[4], &[0.0; 4]).await;
    client.free(std::slice::from_ref(&freed)).await.unwrap();
    let foreign = other.upload(&[4], &[5.0; 4]).await;
    let mut stale = client.upload(&[4], &[0.0; 4]).await;
    stale.epoch -= 1;
    let id = |id: Vec<u8>| v1::Handle { epoch: EPOCH.0, id };
    vec![
        (freed, Reason::HandleNotFound),
        (foreign, Reason::HandleNotFound),
        (
            HandleId::random().unwrap().handle(EPOCH),
            Reason::HandleNotFound,
        ),
        (id(vec![255; 16]), Reason::HandleNotFound),
        (stale, Reason::HandleStale),
        (
            HandleId::random().unwrap().handle(Epoch(u64::MAX)),
            Reason::HandleStale,
        ),
        (id(vec![0; 16]), Reason::InvalidArgument),
        (id(vec![1; 15]), Reason::InvalidArgument),
        (id(vec![1; 1000]), Reason::InvalidArgument),
        (v1::Handle::default(), Reason::InvalidArgument),
    ]
}

/// Every field of a call's request that holds a handle: the call, and the names on the way to the field.
fn handle_fields() -> BTreeSet<(String, String)> {
    let set = FileDescriptorSet::decode(v1::DESCRIPTORS).unwrap();
    let mut messages = BTreeMap::new();
    let mut found = BTreeSet::new();
    for file in &set.file {
        for message in &file.message_type {
            let name = format!(".{}.{}", file.package(), message.name());
            messages.insert(name, message);
        }
    }
    let services = set.file.iter().flat_map(|file| &file.service);
    let tensors = services.filter(|s| s.name() == "Tensors");
    for method in tensors.flat_map(|service| &service.method) {
        let mut ways = vec![(vec![method.input_type().to_owned()], String::new())];
        while let Some((way, path)) = ways.pop() {
            // A map's entries are messages of their own, which are not listed; no handle is in one.
            let Some(message) = messages.get(&way[way.len() - 1]) else {
                continue;
            };
            for field in &message.field {
                let path = match path.as_str() {
                    "" => field.name().to_owned(),
                    path => format!("{path}.{}", field.name()),
                };
                if field.type_name() == ".hotcell.v1.Handle" {
                    found.insert((method.name().to_owned(), path));
                } else if !way.iter().any(|name| name == field.type_name()) {
                    let further = [&way[..], &[field.type_name().to_owned()]].concat();
                    ways.push((further, path));
                }
            }
        }
    }
    found
}

/// A call in a stream of calls, and a good one behind it.
async fn one_of_many(client: &Client, bad: v1::ExecuteRequest, good: v1::ExecuteRequest) -> Reason {
    let (mut bad, mut good) = (bad, good);
    (bad.tag, good.tag) = (1, 2);
    let calls = client.of(tokio_stream::iter([bad, good]));
    let answers = client.raw.clone().execute_many(calls).await.unwrap();
    let mut answers = answers.into_inner();
    let mut why = None;
    while let Some(answer) = answers.message().await.unwrap() {
        match answer.tag {
            1 => why = Some(answer.error.unwrap().reason),
            _ => assert_eq!(answer.error, None),
        }
    }
    let why = why.expect("an answer to each");
    Reason::from_name(&why).unwrap()
}

#[tokio::test]
async fn handles_that_are_not_the_sessions_are_refused_by_every_call() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let other = Client::open(&host).await;
    let plan = client.compile(&add_graph(&[4])).await;
    let a = client.upload(&[4], &[1.0; 4]).await;
    let good = || call(&plan, vec![tensor(&a), tensor(&a)], vec![inline()]);
    let fields = handle_fields();
    assert!(fields.len() >= 9, "{fields:?}");
    for (handle, why) in strange_handles(&client, &other).await {
        for (method, field) in &fields {
            let calls = || match field.as_str() {
                "plan" => call(&handle, vec![tensor(&a), tensor(&a)], vec![]),
                "inputs.tensor" => call(&plan, vec![tensor(&handle), tensor(&a)], vec![]),
                "outputs.into" => {
                    let into = wish(output_wish::Kind::Into(handle.clone()));
                    call(&plan, vec![tensor(&a), tensor(&a)], vec![into])
                }
                _ => panic!("nothing is tried with {field} of {method}"),
            };
            let refused = match (method.as_str(), field.as_str()) {
                ("Download", "tensor") => reason(client.try_download(&handle, 0, 0).await),
                ("Upload", "target.tensor") => {
                    let over = upload_chunk(Kind::Tensor(handle.clone()), 0, vec![0; 4]);
                    reason(client.try_upload(vec![over]).await)
                }
                ("Free", "handles") => {
                    // What is there is freed all the same, if all the handles can be read.
                    let spare = client.upload(&[4], &[1.0; 4]).await;
                    let free = [handle.clone(), spare.clone()];
                    let refused = reason(client.free(&free).await);
                    let freed = client.free(&[spare]).await.is_err();
                    assert_eq!(freed, why == Reason::HandleNotFound);
                    refused
                }
                ("Execute", _) => {
                    let mut detached = calls();
                    detached.detached = true;
                    assert_eq!(reason(client.execute(detached).await), why);
                    reason(client.execute(calls()).await)
                }
                ("ExecuteMany", _) => one_of_many(&client, calls(), good()).await,
                // A new call that takes a handle comes here first.
                other => panic!("nothing is tried with {other:?}"),
            };
            assert_eq!(refused, why, "{method} {field}");
        }
    }
    // None at all is none of the session's.
    let none = client.of(v1::DownloadRequest::default());
    let none = client.raw.clone().download(none).await;
    assert_eq!(reason(none.map(|_| ())), Reason::InvalidArgument);
    let none = v1::UploadChunk {
        target: Some(v1::UploadTarget::default()),
        ..v1::UploadChunk::default()
    };
    let none = client.try_upload(vec![none]).await;
    assert_eq!(reason(none), Reason::InvalidArgument);
    for request in [
        v1::ExecuteRequest::default(),
        call(&plan, vec![v1::Operand::default(); 2], vec![]),
    ] {
        let why = one_of_many(&client, request, good()).await;
        assert_eq!(why, Reason::InvalidArgument);
    }
    // A tensor is no plan, and a plan no tensor; absent handles are none.
    let swapped = call(&a, vec![tensor(&plan), tensor(&a)], vec![]);
    assert_eq!(
        reason(client.execute(swapped).await),
        Reason::InvalidArgument
    );
    assert_eq!(
        reason(client.try_download(&plan, 0, 0).await),
        Reason::InvalidArgument
    );
    let nothing = v1::ExecuteRequest::default();
    assert_eq!(
        reason(client.execute(nothing).await),
        Reason::InvalidArgument
    );
    let empty = call(&plan, vec![v1::Operand::default(); 2], vec![]);
    assert_eq!(reason(client.execute(empty).await), Reason::InvalidArgument);
    // Everything that was refused changed nothing.
    assert_eq!(client.download(&a).await, [1.0; 4]);
    // A plan after its inputs were freed.
    client.free(std::slice::from_ref(&a)).await.unwrap();
    let late = call(&plan, vec![tensor(&a), tensor(&a)], vec![]);
    assert_eq!(reason(client.execute(late).await), Reason::HandleNotFound);
    client.free(std::slice::from_ref(&plan)).await.unwrap();
    let late = call(&plan, vec![], vec![]);
    assert_eq!(reason(client.execute(late).await), Reason::HandleNotFound);
}

#[tokio::test]
async fn ranges_and_sizes_that_do_not_fit_are_refused() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let a = client.upload(&[4], &[1.0, 2.0, 3.0, 4.0]).await;
    for (offset, length) in [
        (u64::MAX, 1),
        (1, u64::MAX),
        (u64::MAX, u64::MAX),
        (17, 0),
        (16, 1),
        (0, 17),
    ] {
        let why = reason(client.try_download(&a, offset, length).await);
        assert_eq!(why, Reason::InvalidArgument, "{offset} {length}");
    }
    for (offset, length) in [(u64::MAX, 1), (u64::MAX - 3, 8), (16, 1), (0, 17)] {
        let over = upload_chunk(Kind::Tensor(a.clone()), offset, vec![9; length]);
        let why = reason(client.try_upload(vec![over]).await);
        assert_eq!(why, Reason::InvalidArgument, "{offset} {length}");
    }
    assert_eq!(client.download(&a).await, [1.0, 2.0, 3.0, 4.0]);

    let create = |dims: &[usize]| Kind::Create(wire_spec(dims));
    let chunk = |kind, bytes: usize| vec![upload_chunk(kind, 0, vec![0; bytes])];
    let big = client.try_upload(chunk(create(&[4]), 17)).await;
    assert_eq!(reason(big), Reason::InvalidArgument);
    let chunky = limits::TENSOR_CHUNK + 4;
    let big = client.try_upload(chunk(create(&[1 << 20]), chunky)).await;
    assert_eq!(reason(big), Reason::LimitExceeded);
    assert_eq!(
        reason(client.try_upload(vec![]).await),
        Reason::InvalidArgument
    );
    let nameless = vec![v1::UploadChunk::default()];
    assert_eq!(
        reason(client.try_upload(nameless).await),
        Reason::InvalidArgument
    );
    let offset = vec![upload_chunk(create(&[4]), 4, vec![0; 4])];
    assert_eq!(
        reason(client.try_upload(offset).await),
        Reason::InvalidArgument
    );

    let spec = |dtype: &str, dims: Vec<v1::Dim>| v1::TensorSpec {
        dtype: dtype.to_owned(),
        dims,
    };
    let fixed = |n: u64| v1::Dim {
        kind: Some(v1::dim::Kind::Fixed(n)),
    };
    let rows = v1::Dim {
        kind: Some(v1::dim::Kind::Rows(true)),
    };
    for (bad, why) in [
        (spec("f33", vec![fixed(1)]), Reason::GraphInvalid),
        (spec("", vec![fixed(1)]), Reason::GraphInvalid),
        (spec("4", vec![fixed(1)]), Reason::GraphInvalid),
        (spec("f32", vec![rows, fixed(1)]), Reason::GraphInvalid),
        (spec("f32", vec![v1::Dim::default()]), Reason::GraphInvalid),
        (spec("f32", vec![fixed(u64::MAX)]), Reason::GraphInvalid),
        (spec("f32", vec![fixed(1 << 40); 2]), Reason::GraphInvalid),
        (spec("f32", vec![fixed(1); 100_000]), Reason::GraphInvalid),
        (spec("q4_0", vec![fixed(33)]), Reason::GraphInvalid),
        // 64 GiB.
        (spec("f32", vec![fixed(1 << 34)]), Reason::QuotaExceeded),
    ] {
        let shown = format!("{} {}", bad.dtype, bad.dims.len());
        let request = client.of(v1::CreateRequest {
            spec: Some(v1::create_request::Spec::Tensor(bad.clone())),
            id: vec![],
        });
        assert_eq!(
            reason(client.raw.clone().create(request).await),
            why,
            "{shown}"
        );
        let kind = Kind::Create(bad);
        assert_eq!(
            reason(client.try_upload(chunk(kind, 1)).await),
            why,
            "{shown}"
        );
    }
    let cache = |dtype: &str, blocks: u64| {
        client.of(v1::CreateRequest {
            spec: Some(v1::create_request::Spec::Cache(v1::CacheSpec {
                dtype: dtype.to_owned(),
                blocks,
                block_len: 16,
                kv_heads: 1,
                head_dim: 4,
            })),
            id: vec![],
        })
    };
    for (dtype, blocks) in [("q8_0", 1), ("f32", 0), ("f32", u64::MAX), ("f99", 1)] {
        let made = client.raw.clone().create(cache(dtype, blocks)).await;
        assert_eq!(reason(made), Reason::GraphInvalid, "{dtype} {blocks}");
    }

    let plan = client.compile(&add_graph(&[4])).await;
    let b = client.upload(&[2, 2], &[0.0; 4]).await;
    let id = HandleId::random().unwrap();
    let used = HandleId::from_wire(&a.id).unwrap();
    let good = || vec![tensor(&a), tensor(&a)];
    for (inputs, outputs, why) in [
        (vec![tensor(&a)], vec![], Reason::GraphInvalid),
        (vec![tensor(&a); 3], vec![], Reason::GraphInvalid),
        (vec![tensor(&a), tensor(&b)], vec![], Reason::GraphInvalid),
        (
            vec![tensor(&a), data(vec![0; 15])],
            vec![],
            Reason::GraphInvalid,
        ),
        (
            vec![tensor(&a), data(vec![0; 17])],
            vec![],
            Reason::GraphInvalid,
        ),
        (vec![tensor(&a), data(vec![])], vec![], Reason::GraphInvalid),
        (good(), vec![inline(), inline()], Reason::InvalidArgument),
        (good(), vec![keep(used)], Reason::InvalidArgument),
        (good(), vec![keep(id), keep(id)], Reason::InvalidArgument),
        (
            good(),
            vec![wish(output_wish::Kind::Id(vec![1; 3]))],
            Reason::InvalidArgument,
        ),
        (vec![tensor(&a); 70_000], vec![], Reason::LimitExceeded),
    ] {
        let made = client.execute(call(&plan, inputs, outputs)).await;
        assert_eq!(reason(made), why);
    }
    let mut detached = call(&plan, good(), vec![inline()]);
    detached.detached = true;
    assert_eq!(
        reason(client.execute(detached).await),
        Reason::InvalidArgument
    );
    let mut waits = call(&plan, good(), vec![]);
    waits.wait = vec![v1::Fence {
        stream: 9,
        value: 1,
    }];
    assert_eq!(
        reason(client.execute(waits.clone()).await),
        Reason::InvalidArgument
    );
    waits.wait = vec![v1::Fence::default(); limits::MAX_CALL_FENCES + 1];
    assert_eq!(reason(client.execute(waits).await), Reason::LimitExceeded);
    let never = v1::Fence {
        stream: 0,
        value: 99,
    };
    assert_eq!(
        reason(client.synchronize(Some(never)).await),
        Reason::InvalidArgument
    );
    assert_eq!(client.download(&a).await, [1.0, 2.0, 3.0, 4.0]);
}

fn node(op: &str, inputs: Vec<v1::ValueRef>) -> v1::Node {
    v1::Node {
        op: op.to_owned(),
        inputs,
        attributes: vec![],
    }
}

fn input(i: u32) -> v1::ValueRef {
    v1::ValueRef {
        kind: Some(v1::value_ref::Kind::Input(i)),
    }
}

fn result(node: u32, output: u32) -> v1::ValueRef {
    v1::ValueRef {
        kind: Some(v1::value_ref::Kind::Node(v1::NodeOutput { node, output })),
    }
}

fn graph(nodes: Vec<v1::Node>, outputs: Vec<v1::ValueRef>) -> v1::Graph {
    let x = v1::GraphInput {
        name: "x".to_owned(),
        spec: Some(v1::graph_input::Spec::Tensor(wire_spec(&[4]))),
        constant: false,
    };
    v1::Graph {
        max_rows: 0,
        inputs: vec![x],
        nodes,
        outputs,
    }
}

#[tokio::test]
async fn graphs_that_are_none_are_refused() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let attribute = |value| v1::Attribute {
        name: "eps".to_owned(),
        value: Some(value),
    };
    let mut huge = node("silu", vec![input(0)]);
    huge.attributes = vec![attribute(v1::attribute::Value::Bytes(vec![0; 1 << 20]))];
    let mut many = node("silu", vec![input(0)]);
    many.attributes = vec![attribute(v1::attribute::Value::Int(i64::MIN)); 10_000];
    let chain: Vec<v1::Node> = (0..=limits::MAX_GRAPH_NODES as u32)
        .map(|i| {
            node(
                "silu",
                vec![if i == 0 { input(0) } else { result(i - 1, 0) }],
            )
        })
        .collect();
    for (name, bad, why) in [
        (
            "unknown op",
            graph(vec![node("system", vec![input(0)])], vec![]),
            Reason::GraphInvalid,
        ),
        (
            "long op",
            graph(vec![node(&"x".repeat(1 << 20), vec![])], vec![]),
            Reason::GraphInvalid,
        ),
        (
            "itself",
            graph(vec![node("silu", vec![result(0, 0)])], vec![]),
            Reason::GraphInvalid,
        ),
        (
            "forward",
            graph(
                vec![
                    node("silu", vec![result(1, 0)]),
                    node("silu", vec![input(0)]),
                ],
                vec![],
            ),
            Reason::GraphInvalid,
        ),
        (
            "dangling",
            graph(vec![node("silu", vec![input(u32::MAX)])], vec![]),
            Reason::GraphInvalid,
        ),
        (
            "second result",
            graph(vec![node("silu", vec![input(0)])], vec![result(0, 1)]),
            Reason::GraphInvalid,
        ),
        (
            "nothing",
            graph(vec![node("silu", vec![v1::ValueRef::default()])], vec![]),
            Reason::GraphInvalid,
        ),
        (
            "arity",
            graph(vec![node("silu", vec![input(0); 300])], vec![]),
            Reason::GraphInvalid,
        ),
        ("bytes", graph(vec![huge], vec![]), Reason::GraphInvalid),
        (
            "attributes",
            graph(vec![many], vec![]),
            Reason::GraphInvalid,
        ),
        (
            "outputs",
            graph(vec![], vec![result(7, 0)]),
            Reason::GraphInvalid,
        ),
        ("deep", graph(chain, vec![]), Reason::LimitExceeded),
    ] {
        assert_eq!(reason(client.try_compile(bad).await), why, "{name}");
    }
    // A million nodes are more bytes than a graph may have: not even read.
    let deep = (0..1_000_000)
        .map(|i| node("silu", vec![result(i, 0)]))
        .collect();
    let refused = client.try_compile(graph(deep, vec![])).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange);
    let request = client.of(v1::CompileRequest::default());
    let none = client.raw.clone().compile(request).await;
    assert_eq!(reason(none), Reason::InvalidArgument);
    // More memory than there is: said before anything is allocated, with the sizes.
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[1 << 25])).unwrap();
    let y = g.softmax(x, -1).unwrap();
    let y = g.softmax(y, -1).unwrap();
    let y = g.softmax(y, -1).unwrap();
    let large = g.finish(&[y]).unwrap();
    let status = client.try_compile(wire::encode(&large)).await.unwrap_err();
    let error = Error::typed(&status).unwrap();
    assert_eq!(error.reason(), Reason::OutOfMemory);
    assert_eq!(error.get("inputs"), Some("134217728"));
    let number = |key: &str| error.get(key).unwrap().parse::<u64>().unwrap();
    assert!(number("arena") >= 1 << 27, "{error:?}");
    assert!(number("available") <= 64 * MIB, "{error:?}");
    // The worker goes on.
    let plan = client.compile(&add_graph(&[4])).await;
    let one = f32s(&[1.0; 4]);
    let request = call(&plan, vec![data(one.clone()), data(one)], vec![inline()]);
    let response = client.execute(request).await.unwrap();
    assert_eq!(read_f32s(&sent(&response, 0)), [2.0; 4]);
}

#[tokio::test]
async fn sessions_are_named_well_and_found_by_name_only() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let raw = connect(&host).await;
    let list = |name: Option<&str>| {
        let mut request = Request::new(v1::ListRequest {});
        if let Some(name) = name {
            request
                .metadata_mut()
                .insert(SESSION_KEY, name.parse().unwrap());
        }
        let mut raw = raw.clone();
        async move { raw.list(request).await }
    };
    // By another connection, too.
    list(Some(&client.name)).await.unwrap();
    let absent = SessionId::random("w3", EPOCH).unwrap().to_string();
    assert_eq!(reason(list(None).await), Reason::InvalidArgument);
    assert_eq!(reason(list(Some("w3")).await), Reason::InvalidArgument);
    assert_eq!(reason(list(Some(&absent)).await), Reason::SessionNotFound);
    let before = SessionId::random("w3", Epoch(6)).unwrap().to_string();
    assert_eq!(reason(list(Some(&before)).await), Reason::SessionNotFound);
    // A name that a scheduler chose; not twice, and not of another process.
    let open = |name: &str| {
        let mut request = Request::new(v1::OpenSessionRequest::default());
        request
            .metadata_mut()
            .insert(SESSION_KEY, name.parse().unwrap());
        let mut raw = raw.clone();
        async move { raw.open_session(request).await }
    };
    let stream = open(&absent).await.unwrap();
    list(Some(&absent)).await.unwrap();
    assert_eq!(
        reason(open(&absent).await.map(|_| ())),
        Reason::InvalidArgument
    );
    assert_eq!(
        reason(open(&before).await.map(|_| ())),
        Reason::InvalidArgument
    );
    drop(stream);
    let mut more = Vec::new();
    let refused = loop {
        match Client::open_over(connect(&host).await, v1::OpenSessionRequest::default()).await {
            Ok(client) => more.push(client),
            Err(status) => break status,
        }
        assert!(more.len() <= limits::MAX_SESSIONS);
    };
    assert_eq!(Error::typed(&refused).unwrap().reason(), Reason::Overloaded);
}

#[tokio::test]
async fn a_dry_run_refuses_what_could_never_be_held_and_says_the_sizes() {
    let host = worker(8 * MIB);
    let small = v1::OpenSessionRequest {
        max_bytes: 4 * MIB,
        ..v1::OpenSessionRequest::default()
    };
    let client = Client::open_with(&host, small).await;
    let plan = |graph: &Graph| {
        let request = client.of(v1::CompileRequest {
            graph: Some(wire::encode(graph)),
            dry_run: true,
            no_fusion: false,
            encoded: Vec::new(),
        });
        let mut raw = client.raw.clone();
        async move { raw.compile(request).await.map(|r| r.into_inner()) }
    };
    // `a + b`: three tensors of so many MiB.
    let sum = |mib: usize| add_graph(&[mib << 18]);
    let made = plan(&sum(1)).await.unwrap();
    let memory = made.memory.unwrap();
    assert_eq!((memory.inputs, memory.outputs), (2 * MIB, MIB));
    assert!(made.plan.is_none());
    for (mib, why, limit) in [
        (2, Reason::QuotaExceeded, "4194304"),
        (3, Reason::OutOfMemory, "8388608"),
        (1 << 20, Reason::OutOfMemory, "8388608"),
    ] {
        let status = plan(&sum(mib)).await.unwrap_err();
        let error = Error::typed(&status).unwrap();
        assert_eq!((error.reason(), error.get("limit")), (why, Some(limit)));
        let number = |key: &str| error.get(key).unwrap().parse::<u64>().unwrap();
        let each = mib as u64 * MIB;
        assert_eq!((number("inputs"), number("outputs")), (2 * each, each));
        assert!(number("bytes") >= 3 * each + number("arena"));
    }
    // What the session may hold is what counts, not what it was opened with.
    client
        .set_memory(v1::MemoryRequest {
            memory_limit: Some(2 * MIB),
            ..v1::MemoryRequest::default()
        })
        .await;
    assert_eq!(reason(plan(&sum(1)).await), Reason::QuotaExceeded);
    // Constants are a model's: they cost the session nothing.
    let mut g = GraphBuilder::new(0);
    let w = g.constant("w", spec(DType::F32, &[1 << 22])).unwrap();
    let s = g.reduce_sum(w, &[0], false).unwrap();
    let memory = plan(&g.finish(&[s]).unwrap()).await.unwrap().memory;
    assert_eq!(memory.unwrap().constants, 16 * MIB);
    // Nothing was made.
    assert_eq!(client.memory().await.active, 0);
    assert!(client.list().await.plans.is_empty());
}

#[tokio::test]
async fn quotas_hold_and_say_how_much_is_left() {
    let host = worker(8 * MIB);
    let small = v1::OpenSessionRequest {
        max_bytes: 4 * MIB,
        max_tensors: 3,
        max_plans: 1,
        ..v1::OpenSessionRequest::default()
    };
    let client = Client::open_with(&host, small).await;
    let create = |mib: usize| {
        let request = client.of(v1::CreateRequest {
            spec: Some(v1::create_request::Spec::Tensor(wire_spec(&[mib << 18]))),
            id: vec![],
        });
        let mut raw = client.raw.clone();
        async move { raw.create(request).await }
    };
    let a = create(3).await.unwrap().into_inner();
    let error = Error::typed(&create(2).await.unwrap_err()).unwrap();
    assert_eq!(error.reason(), Reason::QuotaExceeded);
    assert_eq!(error.get("bytes"), Some("2097152"));
    assert_eq!(error.get("available"), Some("1048576"));
    let plan = client.compile(&add_graph(&[4])).await;
    let more = client.try_compile(wire::encode(&add_graph(&[4]))).await;
    assert_eq!(reason(more), Reason::QuotaExceeded);
    create(0).await.unwrap();
    create(0).await.unwrap();
    assert_eq!(reason(create(0).await), Reason::QuotaExceeded);
    let one = f32s(&[1.0; 4]);
    let kept = call(&plan, vec![data(one.clone()), data(one)], vec![]);
    assert_eq!(reason(client.execute(kept).await), Reason::QuotaExceeded);
    // What was freed and kept makes room when it is needed.
    client.free(&[a.handle.unwrap()]).await.unwrap();
    assert!(client.memory().await.cache >= 3 * MIB);
    let b = create(2).await.unwrap().into_inner();
    // The worker's limit, over all sessions.
    let whole = v1::OpenSessionRequest {
        max_bytes: u64::MAX,
        ..v1::OpenSessionRequest::default()
    };
    let other = Client::open_with(&host, whole).await;
    assert_eq!(other.memory().await.memory_limit, 8 * MIB);
    let default = Client::open(&host).await;
    assert_eq!(default.memory().await.memory_limit, 4 * MIB);
    let large = other.of(v1::CreateRequest {
        spec: Some(v1::create_request::Spec::Tensor(wire_spec(&[7 << 18]))),
        id: vec![],
    });
    let large = other.raw.clone().create(large).await;
    assert_eq!(reason(large), Reason::OutOfMemory);
    client.free(&[b.handle.unwrap()]).await.unwrap();
    // A client may lower its limit and not raise it above its quota.
    let limit = |memory_limit| v1::MemoryRequest {
        memory_limit: Some(memory_limit),
        ..v1::MemoryRequest::default()
    };
    assert_eq!(client.set_memory(limit(MIB)).await.memory_limit, 4 * MIB);
    assert_eq!(client.set_memory(limit(u64::MAX)).await.memory_limit, MIB);
    assert_eq!(client.memory().await.memory_limit, 4 * MIB);
}
