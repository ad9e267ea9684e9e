//! Every call does what it says.

use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder, wire};
use hotcell_proto::{
    error::{Error, Reason},
    session::HandleId,
    v1::{self, TensorState, output_wish, upload_target::Kind},
};

use crate::support::*;

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn tensors_go_up_through_a_plan_and_down_and_nothing_is_left() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let a = client
        .upload(&[2, 4], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        .await;
    let b = client.upload(&[2, 4], &[10.0; 8]).await;
    let plan = client.compile(&add_graph(&[2, 4])).await;
    let id = HandleId::random().unwrap();
    let mut request = call(&plan, vec![tensor(&a), tensor(&b)], vec![keep(id)]);
    request.tag = 5;
    let response = client.execute(request).await.unwrap();
    assert_eq!(response.tag, 5);
    assert_eq!(
        response.fence,
        Some(v1::Fence {
            stream: 0,
            value: 1
        })
    );
    let c = kept(&response, 0);
    assert_eq!(c.handle, Some(id.handle(EPOCH)));
    assert_eq!((c.bytes, c.state()), (32, TensorState::Ready));
    let sum = vec![11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0];
    assert_eq!(client.download(&id.handle(EPOCH)).await, sum);
    // Inline in and out, and the plan of the same arena once more.
    let one = call(
        &plan,
        vec![tensor(c.handle.as_ref().unwrap()), data(f32s(&[-1.0; 8]))],
        vec![inline()],
    );
    let response = client.execute(one).await.unwrap();
    let less: Vec<f32> = sum.iter().map(|x| x - 1.0).collect();
    assert_eq!(read_f32s(&sent(&response, 0)), less);

    let list = client.list().await;
    assert_eq!((list.tensors.len(), list.plans.len()), (3, 1));
    assert_eq!(list.plans[0].executions, 2);
    let memory = client.memory().await;
    assert_eq!((memory.tensors, memory.plans), (3, 1));
    assert!(memory.active >= 96 && memory.peak >= memory.active);
    client.free(&[a, b, plan, id.handle(EPOCH)]).await.unwrap();
    let memory = client.memory().await;
    assert_eq!((memory.active, memory.tensors, memory.plans), (0, 0, 0));
    assert!(memory.cache > 0);
    let clear = v1::MemoryRequest {
        clear_cache: true,
        ..v1::MemoryRequest::default()
    };
    client.set_memory(clear).await;
    assert_eq!(client.memory().await.cache, 0);
}

#[tokio::test]
async fn results_have_the_size_of_the_rows_they_are_for() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let plan = client.compile(&rows_graph()).await;
    let zero = f32s(&[0.0; 12]);
    let values: Vec<f32> = (0..12).map(|x| x as f32).collect();
    let mut request = call(&plan, vec![data(zero.clone()), data(f32s(&values))], vec![]);
    request.rows = 3;
    let response = client.execute(request.clone()).await.unwrap();
    let info = kept(&response, 0);
    assert_eq!(info.bytes, 48);
    assert_eq!(
        info.spec,
        Some(v1::tensor_info::Spec::Tensor(wire_spec(&[3, 4])))
    );
    assert_eq!(client.download(info.handle.as_ref().unwrap()).await, values);
    for rows in [0, 2, 4, 1025, u64::MAX] {
        request.rows = rows;
        assert_eq!(
            reason(client.execute(request.clone()).await),
            Reason::GraphInvalid,
            "{rows}"
        );
    }
}

#[tokio::test]
async fn a_broken_upload_is_resumed_and_its_checksum_compared() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let values: Vec<f32> = (0..1_000_000).map(|i| i as f32).collect();
    let bytes = f32s(&values);
    let id = HandleId::random().unwrap();
    let handle = id.handle(EPOCH);
    let mut first = upload_chunk(
        Kind::Create(wire_spec(&[1_000_000])),
        0,
        bytes[..MIB as usize].to_vec(),
    );
    first.target.as_mut().unwrap().id = id.to_wire();
    // It ends early.
    let info = client.try_upload(vec![first]).await.unwrap();
    assert_eq!((info.state(), info.uploaded), (TensorState::Uploading, MIB));
    assert_eq!(
        reason(client.try_download(&handle, 0, 0).await),
        Reason::TensorNotReady
    );
    let plan = client.compile(&add_graph(&[1_000_000])).await;
    let early = call(&plan, vec![tensor(&handle), tensor(&handle)], vec![]);
    assert_eq!(reason(client.execute(early).await), Reason::TensorNotReady);
    assert_eq!(client.list().await.tensors[0].uploaded, MIB);
    // A gap is refused.
    let gap = upload_chunk(Kind::Tensor(handle.clone()), MIB + 1, vec![0; 8]);
    assert_eq!(
        reason(client.try_upload(vec![gap]).await),
        Reason::InvalidArgument
    );
    // A wrong sum begins again.
    let chunks = |sum: [u8; 32]| {
        let mut chunks: Vec<v1::UploadChunk> = bytes[MIB as usize..]
            .chunks(MIB as usize)
            .map(|c| v1::UploadChunk {
                target: None,
                data: c.to_vec().into(),
            })
            .collect();
        chunks[0].target = Some(v1::UploadTarget {
            kind: Some(Kind::Tensor(handle.clone())),
            offset: MIB,
            id: vec![],
            sha256: sum.to_vec(),
        });
        chunks
    };
    assert_eq!(
        reason(client.try_upload(chunks([1; 32])).await),
        Reason::ChecksumMismatch
    );
    assert_eq!(client.list().await.tensors[0].uploaded, 0);
    let again = upload_chunk(
        Kind::Tensor(handle.clone()),
        0,
        bytes[..MIB as usize].to_vec(),
    );
    client.try_upload(vec![again]).await.unwrap();
    // python3 -c 'import hashlib,struct; print(hashlib.sha256(struct.pack("<1000000f", *range(1000000))).hexdigest())'
    let sum = "174592c75d2a6a734d9679f6351472dc4d98389173c6ece140f271ab57f077ae";
    let sum: Vec<u8> = (0..32)
        .map(|i| u8::from_str_radix(&sum[2 * i..2 * i + 2], 16).unwrap())
        .collect();
    let info = client
        .try_upload(chunks(sum.clone().try_into().unwrap()))
        .await
        .unwrap();
    assert_eq!(info.state(), TensorState::Ready);
    let (all, found) = client.try_download(&handle, 0, 0).await.unwrap();
    assert!(all == bytes);
    assert_eq!(found, sum);
    let (part, _) = client.try_download(&handle, 4, 8).await.unwrap();
    assert_eq!(read_f32s(&part), [1.0, 2.0]);
}

#[tokio::test]
async fn a_tensor_is_overwritten_in_part_and_queued_work_sees_what_was_there() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let a = client.upload(&[4], &[1.0, 2.0, 3.0, 4.0]).await;
    let over = upload_chunk(Kind::Tensor(a.clone()), 4, f32s(&[9.0, 8.0]));
    client.try_upload(vec![over]).await.unwrap();
    assert_eq!(client.download(&a).await, [1.0, 9.0, 8.0, 4.0]);
    // A result over a tensor that is also read.
    let plan = client.compile(&add_graph(&[4])).await;
    let into = wish(output_wish::Kind::Into(a.clone()));
    let twice = call(&plan, vec![tensor(&a), tensor(&a)], vec![into]);
    client.execute(twice).await.unwrap();
    assert_eq!(client.download(&a).await, [2.0, 18.0, 16.0, 8.0]);
    // Nothing is left of what was overwritten.
    client.free(&[a, plan]).await.unwrap();
    assert_eq!(client.memory().await.active, 0);
}

#[tokio::test]
async fn a_dry_run_counts_without_memory() {
    let host = worker(1 << 40);
    let dry = v1::OpenSessionRequest {
        dry_run: true,
        ..v1::OpenSessionRequest::default()
    };
    let client = Client::open_with(&host, dry).await;
    // 256 GiB, which this machine has not.
    let request = client.of(v1::CreateRequest {
        spec: Some(v1::create_request::Spec::Tensor(wire_spec(&[1 << 36]))),
        id: vec![],
    });
    let info = client
        .raw
        .clone()
        .create(request)
        .await
        .unwrap()
        .into_inner();
    let plan = client.compile(&add_graph(&[1 << 36])).await;
    let a = info.handle.unwrap();
    let response = client
        .execute(call(&plan, vec![tensor(&a), tensor(&a)], vec![]))
        .await
        .unwrap();
    assert_eq!(kept(&response, 0).bytes, 1 << 38);
    assert!(client.memory().await.active >= 2 << 38);
    // Of which nothing is taken from others.
    let taken = host.engine().tensors(|plane| Ok(plane.bytes())).await;
    assert!(taken.unwrap() < 1 << 20);
    assert_eq!(
        reason(client.try_download(&a, 0, 0).await),
        Reason::TensorNotReady
    );
}

#[tokio::test]
async fn a_plan_says_what_it_takes_before_it_is_made() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let request = client.of(v1::CompileRequest {
        graph: Some(wire::encode(&chain(&[1 << 20], 3))),
        dry_run: true,
        no_fusion: true,
        encoded: Vec::new(),
    });
    let made = client
        .raw
        .clone()
        .compile(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(made.plan, None);
    let memory = made.memory.unwrap();
    assert_eq!((memory.inputs, memory.outputs), (8 * MIB, 4 * MIB));
    assert_eq!(made.outputs, [wire_spec(&[1 << 20])]);
    assert_eq!(client.memory().await.active, 0);
}

/// `x + y` and one write to a cache of `spec`, whose slots are data.
fn writes(spec_of_cache: CacheSpec) -> Graph {
    let mut g = GraphBuilder::new(0);
    let cache = g.cache("cache", spec_of_cache).unwrap();
    let heads = [3, spec_of_cache.kv_heads, spec_of_cache.head_dim];
    let x = g.tensor("x", spec(DType::F32, &heads)).unwrap();
    let slots = g.tensor("slots", spec(DType::I32, &[3])).unwrap();
    let keys = g.exp(x).unwrap();
    g.cache_write(cache, keys, x, slots).unwrap();
    g.finish(&[keys]).unwrap()
}

#[tokio::test]
async fn caches_are_counted_by_themselves_as_they_are_when_they_are_made() {
    let host = worker(64 * MIB);
    let cache = CacheSpec {
        dtype: DType::F16,
        blocks: 32,
        block_len: 16,
        kv_heads: 2,
        head_dim: 64,
    };
    let small = v1::OpenSessionRequest {
        max_bytes: 2 * MIB,
        ..v1::OpenSessionRequest::default()
    };
    let client = Client::open_with(&host, small).await;
    let compile = |dry_run: bool, graph: &Graph| {
        let request = client.of(v1::CompileRequest {
            graph: Some(wire::encode(graph)),
            dry_run,
            ..v1::CompileRequest::default()
        });
        let mut raw = client.raw.clone();
        async move { raw.compile(request).await.map(|made| made.into_inner()) }
    };
    let told = compile(true, &writes(cache)).await.unwrap().memory.unwrap();
    assert_eq!(client.memory().await.active, 0);
    // What it is in truth: the counter before and after.
    let request = client.of(v1::CreateRequest {
        spec: Some(v1::create_request::Spec::Cache(v1::CacheSpec {
            dtype: "f16".to_owned(),
            blocks: 32,
            block_len: 16,
            kv_heads: 2,
            head_dim: 64,
        })),
        id: vec![],
    });
    client.raw.clone().create(request).await.unwrap();
    let caches = client.memory().await.active;
    assert_eq!((told.caches, told.inputs), (caches, 3 * 2 * 64 * 4 + 12));
    let made = compile(false, &writes(cache)).await.unwrap();
    assert_eq!(made.memory.unwrap(), told);
    let plan = client.memory().await.active - caches;
    let parts = plan - told.arena;
    assert!(parts > 0 && parts < 64 << 10, "{plan} of {told:?}");

    // A cache that could never be beside the plan is refused, and said.
    let large = CacheSpec {
        blocks: 512,
        ..cache
    };
    let status = compile(true, &writes(large)).await.unwrap_err();
    let error = Error::typed(&status).unwrap();
    assert_eq!(error.reason(), Reason::QuotaExceeded);
    assert_eq!(error.get("caches"), Some("4194304"));
}
