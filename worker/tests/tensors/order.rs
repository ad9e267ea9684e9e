//! The order of work, its end, and whose turn it is.

use std::time::{Duration, Instant};

use hotcell_graph::{DType, Graph, GraphBuilder, wire};
use hotcell_proto::{
    error::Reason,
    session::HandleId,
    v1::{self, TensorState, upload_target::Kind},
};

use crate::support::*;

const MIB: u64 = 1 << 20;
pub const BIG: usize = 1 << 20;

/// A call that takes a good while, in many nodes.
pub async fn long(client: &Client) -> v1::ExecuteRequest {
    long_of(client, 2000).await
}

/// The same, in so many nodes.
pub async fn long_of(client: &Client, nodes: usize) -> v1::ExecuteRequest {
    let request = client.of(v1::CompileRequest {
        graph: Some(wire::encode(&chain(&[BIG], nodes))),
        dry_run: false,
        no_fusion: true,
        encoded: Vec::new(),
    });
    let made = client.raw.clone().compile(request).await.unwrap();
    let plan = made.into_inner().plan.unwrap();
    let request = client.of(v1::CreateRequest {
        spec: Some(v1::create_request::Spec::Tensor(wire_spec(&[BIG]))),
        id: vec![],
    });
    let zero = client
        .raw
        .clone()
        .create(request)
        .await
        .unwrap()
        .into_inner();
    let zero = zero.handle.unwrap();
    call(&plan, vec![tensor(&zero), tensor(&zero)], vec![])
}

#[tokio::test]
async fn results_are_named_before_they_are_there() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let plan = client.compile(&add_graph(&[4])).await;
    let one = client.upload(&[4], &[1.0; 4]).await;
    let mut last = one.clone();
    let mut fence = None;
    for i in 0..200u32 {
        let id = HandleId::random().unwrap();
        let mut request = call(&plan, vec![tensor(&last), tensor(&one)], vec![keep(id)]);
        request.detached = true;
        // Values are waited for whatever the stream.
        request.stream = i % 3;
        fence = client.execute(request).await.unwrap().fence;
        // The handle dies at once, the value when the next call has read it.
        if last != one {
            client.free(&[last]).await.unwrap();
        }
        last = id.handle(EPOCH);
    }
    assert_eq!(client.download(&last).await, [201.0; 4]);
    client.synchronize(fence).await.unwrap();
    client.synchronize(None).await.unwrap();
    assert_eq!(client.cancel(0, true).await, 0);
    client.free(&[last, one, plan]).await.unwrap();
    assert_eq!(client.memory().await.active, 0);
}

#[tokio::test]
async fn calls_are_pipelined_and_a_failure_is_one_answer_of_many() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let plan = client.compile(&add_graph(&[4])).await;
    let requests: Vec<v1::ExecuteRequest> = (0..500u32)
        .map(|i| {
            let mut request = call(
                &plan,
                vec![data(f32s(&[i as f32; 4])), data(f32s(&[1.0; 4]))],
                vec![inline()],
            );
            if i % 10 == 3 {
                request.inputs.pop();
            }
            request.tag = i.into();
            request
        })
        .collect();
    let request = client.of(tokio_stream::iter(requests));
    let mut responses = client
        .raw
        .clone()
        .execute_many(request)
        .await
        .unwrap()
        .into_inner();
    let mut seen = std::collections::BTreeSet::new();
    let mut fences = Vec::new();
    while let Some(response) = responses.message().await.unwrap() {
        assert!(seen.insert(response.tag));
        match (&response.error, response.tag % 10) {
            (Some(error), 3) => assert_eq!(error.reason, "GRAPH_INVALID"),
            (None, _) => {
                let sum = response.tag as f32 + 1.0;
                assert_eq!(read_f32s(&sent(&response, 0)), [sum; 4]);
                fences.push(response.fence.unwrap().value);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen.len(), 500);
    assert!(fences.is_sorted(), "one stream's calls end in their order");
}

fn pick() -> Graph {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[8, 4])).unwrap();
    let i = g.tensor("i", spec(DType::I32, &[2])).unwrap();
    let y = g.get_rows(x, i).unwrap();
    g.finish(&[y]).unwrap()
}

fn i32s(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[tokio::test]
async fn a_failure_goes_to_all_that_depend_on_it() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let pick = client.compile(&pick()).await;
    let add = client.compile(&add_graph(&[2, 4])).await;
    let table = f32s(&(0..32).map(|x| x as f32).collect::<Vec<_>>());
    let good = call(
        &pick,
        vec![data(table.clone()), data(i32s(&[7, 1]))],
        vec![inline()],
    );
    let response = client.execute(good).await.unwrap();
    let rows = [28.0, 29.0, 30.0, 31.0, 4.0, 5.0, 6.0, 7.0];
    assert_eq!(read_f32s(&sent(&response, 0)), rows);
    for bad in [8, -9, i32::MAX, i32::MIN] {
        let (first, second) = (HandleId::random().unwrap(), HandleId::random().unwrap());
        let mut request = call(
            &pick,
            vec![data(table.clone()), data(i32s(&[0, bad]))],
            vec![keep(first)],
        );
        request.detached = true;
        client.execute(request).await.unwrap();
        let first = first.handle(EPOCH);
        let request = call(
            &add,
            vec![tensor(&first), tensor(&first)],
            vec![keep(second)],
        );
        assert_eq!(
            reason(client.execute(request).await),
            Reason::IndexOutOfRange,
            "{bad}"
        );
        let second = second.handle(EPOCH);
        for handle in [&first, &second] {
            assert_eq!(
                reason(client.try_download(handle, 0, 0).await),
                Reason::TensorNotReady
            );
        }
        let list = client.list().await.tensors;
        assert!(list.iter().all(|t| t.state() == TensorState::Failed));
        client.free(&[first, second]).await.unwrap();
    }
    client.free(&[pick, add]).await.unwrap();
    assert_eq!(client.memory().await.active, 0);
}

#[tokio::test]
async fn freed_tensors_that_are_kept_are_not_any_number() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let mut all = Vec::new();
    for _ in 0..1100 {
        all.push(client.upload(&[1], &[1.0]).await);
    }
    client.free(&all).await.unwrap();
    // Each takes more memory than the four bytes that are counted.
    assert_eq!(client.memory().await.cache, 1024 * 4);
    for tensor in &mut all {
        *tensor = client.upload(&[1], &[2.0]).await;
    }
    assert_eq!(client.memory().await.cache, 0);
    assert_eq!(client.download(&all[0]).await, [2.0]);
    client.free(&all).await.unwrap();
    assert_eq!(client.memory().await.cache, 1024 * 4);
    // A large one is worth more than a small one.
    let large = client.upload(&[1000], &[3.0; 1000]).await;
    client.free(&[large]).await.unwrap();
    assert_eq!(client.memory().await.cache, 1023 * 4 + 4000);
}

#[tokio::test]
async fn memory_of_one_session_is_never_seen_by_another() {
    let host = worker(256 * MIB);
    let secret: Vec<f32> = vec![12345.0; 1 << 16];
    const BYTES: u64 = 4 << 16;
    let cached = async |client: &Client| client.memory().await.cache;
    for _ in 0..5 {
        let one = Client::open(&host).await;
        let a = one.upload(&[1 << 16], &secret).await;
        one.free(&[a]).await.unwrap();
        let two = Client::open(&host).await;
        // Memory for results and uploads is not cleared before it is written. So it is never another session's: what one
        // has freed stays with it, whatever the other takes.
        assert_eq!((cached(&one).await, cached(&two).await), (BYTES, 0));
        let plan = two.compile(&add_graph(&[1 << 16])).await;
        let before = two.memory().await.active;
        let b = two.upload(&[1 << 16], &[1.0; 1 << 16]).await;
        let sum = call(&plan, vec![tensor(&b), tensor(&b)], vec![]);
        let sum = kept(&two.execute(sum).await.unwrap(), 0).handle.unwrap();
        assert_eq!(two.download(&sum).await, [2.0; 1 << 16]);
        let begun = upload_chunk(Kind::Create(wire_spec(&[1 << 16])), 0, vec![7; 4]);
        let (chunks, stream) = tokio::sync::mpsc::channel(1);
        chunks.send(begun).await.unwrap();
        let request = two.of(tokio_stream::wrappers::ReceiverStream::new(stream));
        let mut raw = two.raw.clone();
        let upload = tokio::spawn(async move { raw.upload(request).await });
        let unfinished = loop {
            let tensors = two.list().await.tensors;
            let there = tensors.iter().find(|t| t.state() == TensorState::Uploading);
            if let Some(there) = there {
                break there.handle.clone().unwrap();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        assert_eq!(cached(&one).await, BYTES);
        assert_eq!(two.memory().await.active - before, 3 * BYTES);
        // What was not written yet cannot be read.
        assert_eq!(
            reason(two.try_download(&unfinished, 0, 0).await),
            Reason::TensorNotReady
        );
        upload.abort();
        // Nor can what a failed call did not write.
        let pick = two.compile(&pick()).await;
        let table = f32s(&[1.0; 32]);
        for goal in [inline(), keep(HandleId::random().unwrap())] {
            let bad = vec![data(table.clone()), data(i32s(&[0, 8]))];
            let failed = two.execute(call(&pick, bad, vec![goal])).await;
            assert_eq!(reason(failed), Reason::IndexOutOfRange);
        }
        let states = two.list().await.tensors;
        let failed = states.iter().find(|t| t.state() == TensorState::Failed);
        let failed = failed.unwrap().handle.clone().unwrap();
        assert_eq!(
            reason(two.try_download(&failed, 0, 0).await),
            Reason::TensorNotReady
        );
        let request = two.of(v1::CreateRequest {
            spec: Some(v1::create_request::Spec::Tensor(wire_spec(&[1 << 16]))),
            id: vec![],
        });
        let info = two.raw.clone().create(request).await.unwrap().into_inner();
        let values = two.download(&info.handle.unwrap()).await;
        assert!(values.iter().all(|&v| v == 0.0));
        // And zeros are zeros where its own memory comes back.
        let request = one.of(v1::CreateRequest {
            spec: Some(v1::create_request::Spec::Tensor(wire_spec(&[1 << 16]))),
            id: vec![],
        });
        let info = one.raw.clone().create(request).await.unwrap().into_inner();
        let values = one.download(&info.handle.unwrap()).await;
        assert!(values.iter().all(|&v| v == 0.0));
    }
}

#[tokio::test]
async fn the_end_of_a_lease_frees_everything() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let mut long = long(&client).await;
    for _ in 0..3 {
        long.detached = true;
        client.execute(long.clone()).await.unwrap();
    }
    // An upload that never ends.
    let (chunks, stream) = tokio::sync::mpsc::channel(1);
    let target = upload_chunk(Kind::Create(wire_spec(&[BIG])), 0, vec![1; 64]);
    chunks.send(target).await.unwrap();
    let request = client.of(tokio_stream::wrappers::ReceiverStream::new(stream));
    let mut raw = client.raw.clone();
    let upload = tokio::spawn(async move { raw.upload(request).await });
    let bytes = || host.engine().tensors(|plane| Ok(plane.bytes()));
    while client.list().await.tensors.len() < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let held = bytes().await.unwrap();
    assert!(held > 16 * MIB, "{held}");
    drop(client.events);
    let begun = Instant::now();
    // All but the memory that the upload still writes.
    while bytes().await.unwrap() > 4 * MIB {
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            bytes().await
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(chunks);
    assert_eq!(reason(upload.await.unwrap()), Reason::SessionNotFound);
    while bytes().await.unwrap() > 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            bytes().await
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_download_keeps_the_bytes_it_reads() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let values: Vec<f32> = (0..(20 << 18)).map(|i| i as f32).collect();
    let handle = {
        let bytes = f32s(&values);
        let mut chunks: Vec<v1::UploadChunk> = bytes
            .chunks(1 << 20)
            .map(|c| v1::UploadChunk {
                target: None,
                data: c.to_vec().into(),
            })
            .collect();
        chunks[0].target = Some(v1::UploadTarget {
            kind: Some(Kind::Create(wire_spec(&[values.len()]))),
            ..v1::UploadTarget::default()
        });
        client.try_upload(chunks).await.unwrap().handle.unwrap()
    };
    let request = client.of(v1::DownloadRequest {
        tensor: Some(handle.clone()),
        ..v1::DownloadRequest::default()
    });
    let mut chunks = client
        .raw
        .clone()
        .download(request)
        .await
        .unwrap()
        .into_inner();
    let mut read = chunks.message().await.unwrap().unwrap().data.to_vec();
    // Overwritten and freed while it is read.
    let over = upload_chunk(Kind::Tensor(handle.clone()), (20 << 20) - 4, f32s(&[-1.0]));
    client.try_upload(vec![over]).await.unwrap();
    let (tail, _) = client
        .try_download(&handle, (20 << 20) - 4, 4)
        .await
        .unwrap();
    assert_eq!(read_f32s(&tail), [-1.0]);
    client.free(&[handle]).await.unwrap();
    while let Some(chunk) = chunks.message().await.unwrap() {
        read.extend_from_slice(&chunk.data);
    }
    assert!(read_f32s(&read) == values);
}
