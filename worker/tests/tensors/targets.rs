//! What may be written into: not a model's weights, and nothing of another size; what is refused leaves every byte as it was.

use hotcell_graph::{DType, GraphBuilder, wire};
use hotcell_ipc::memory::Mapping;
use hotcell_proto::{
    error::Reason,
    limits,
    session::HandleId,
    v1::{self, output_wish, upload_target::Kind},
};
use hotcell_worker::{host::Host, weights::ModelFile};
use tokio::sync::mpsc;

use crate::support::*;

const MIB: u64 = 1 << 20;

/// A worker that has a model, and of its weights the smallest of f32.
async fn with_model() -> (Host, v1::GetWeightRequest, usize) {
    let host = worker(64 * MIB);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/qwen2");
    let files = ["config.json", "model.safetensors", "tokenizer.json"].map(|name| {
        let file = std::fs::File::open(format!("{folder}/{name}")).unwrap();
        ModelFile {
            name: name.to_owned(),
            mapping: Mapping::of_file(file).unwrap(),
        }
    });
    let loaded = host.load("m".to_owned(), files.into(), mpsc::channel(1).0);
    loaded.await.unwrap();
    let client = Client::open(&host).await;
    let model = "m".to_owned();
    let request = client.of(v1::ListWeightsRequest { model });
    let listed = client.raw.clone().list_weights(request).await.unwrap();
    let mut weights = listed.into_inner().weights;
    weights.retain(|w| w.spec.as_ref().unwrap().dtype == "f32");
    weights.sort_by_key(|w| w.bytes);
    let weight = weights.swap_remove(0);
    let get = v1::GetWeightRequest {
        model: "m".to_owned(),
        name: weight.name,
    };
    (host, get, weight.bytes as usize / 4)
}

async fn get(client: &Client, weight: &v1::GetWeightRequest) -> v1::Handle {
    let request = client.of(weight.clone());
    let made = client.raw.clone().get_weight(request).await.unwrap();
    made.into_inner().handle.unwrap()
}

/// Makes a call by either way of making one.
async fn refused(client: &Client, request: v1::ExecuteRequest) -> Reason {
    let alone = reason(client.execute(request.clone()).await);
    let many = client.of(tokio_stream::once(request));
    let answers = client.raw.clone().execute_many(many).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap();
    assert_eq!(answer.error.unwrap().reason, alone.name());
    assert!(answer.outputs.is_empty());
    alone
}

#[tokio::test]
async fn a_weight_is_never_written_by_whatever_call() {
    let (host, request, n) = with_model().await;
    let client = Client::open(&host).await;
    let weight = get(&client, &request).await;
    let before = client.download(&weight).await;
    assert!(before.iter().any(|v| *v != 0.0));
    let plan = client.compile(&add_graph(&[n])).await;
    let ones = client.upload(&[n], &vec![1.0; n]).await;
    for detached in [false, true] {
        let into = wish(output_wish::Kind::Into(weight.clone()));
        let mut request = call(&plan, vec![tensor(&ones), tensor(&ones)], vec![into]);
        request.detached = detached;
        assert_eq!(refused(&client, request).await, Reason::InvalidArgument);
    }
    // Two names of one weight are one weight.
    let again = get(&client, &request).await;
    let into = wish(output_wish::Kind::Into(again.clone()));
    let own = call(&plan, vec![tensor(&weight), tensor(&weight)], vec![into]);
    assert_eq!(refused(&client, own).await, Reason::InvalidArgument);
    for (offset, bytes) in [(0, 4 * n), (0, 4), (4, 4), (0, 0), (4 * n as u64, 0)] {
        let over = upload_chunk(Kind::Tensor(weight.clone()), offset, vec![0xff; bytes]);
        let why = reason(client.try_upload(vec![over]).await);
        assert_eq!(why, Reason::InvalidArgument, "{bytes} at {offset}");
    }
    // Nor made anew under its id.
    let mut over = upload_chunk(Kind::Create(wire_spec(&[n])), 0, vec![0xff; 4 * n]);
    over.target.as_mut().unwrap().id = weight.id.clone();
    let why = reason(client.try_upload(vec![over]).await);
    assert_eq!(why, Reason::InvalidArgument);
    let taken = keep(HandleId::from_wire(&weight.id).unwrap());
    let taken = call(&plan, vec![tensor(&ones), tensor(&ones)], vec![taken]);
    assert_eq!(refused(&client, taken).await, Reason::InvalidArgument);
    // As another session sees it, too.
    let other = Client::open(&host).await;
    let theirs = get(&other, &request).await;
    for (client, handle) in [(&client, &weight), (&client, &again), (&other, &theirs)] {
        assert_eq!(client.download(handle).await, before);
    }
    // It is as good as any tensor to compute with.
    let sum = call(&plan, vec![tensor(&weight), tensor(&ones)], vec![inline()]);
    let sum = client.execute(sum).await.unwrap();
    let expected: Vec<f32> = before.iter().map(|v| v + 1.0).collect();
    assert_eq!(read_f32s(&sent(&sum, 0)), expected);
}

#[tokio::test]
async fn what_does_not_fit_writes_nothing_of_itself() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let plan = client.compile(&add_graph(&[4])).await;
    let ones = client.upload(&[4], &[1.0; 4]).await;
    let both = || vec![tensor(&ones), tensor(&ones)];
    // Of fewer and of more bytes than the result.
    for n in [0, 3, 5, 1000] {
        let values: Vec<f32> = (0..n).map(|v| v as f32).collect();
        let target = client.upload(&[n], &values).await;
        let into = wish(output_wish::Kind::Into(target.clone()));
        let why = refused(&client, call(&plan, both(), vec![into])).await;
        assert_eq!(why, Reason::InvalidArgument, "into {n}");
        assert_eq!(client.download(&target).await, values);
    }
    // One output of two that cannot be stored: the other is not, either.
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[4])).unwrap();
    let (y, s) = (g.square(x).unwrap(), g.reduce_sum(x, &[0], false).unwrap());
    let two = client.try_compile(wire::encode(&g.finish(&[y, s]).unwrap()));
    let two = two.await.unwrap().plan.unwrap();
    let (good, bad) = (
        client.upload(&[4], &[7.0; 4]).await,
        client.upload(&[2], &[7.0; 2]).await,
    );
    let into = [&good, &bad].map(|h| wish(output_wish::Kind::Into(h.clone())));
    let why = refused(&client, call(&two, vec![tensor(&ones)], into.into())).await;
    assert_eq!(why, Reason::InvalidArgument);
    // Nor one of a plan's results twice into one place.
    let into = [&good, &good].map(|h| wish(output_wish::Kind::Into(h.clone())));
    let why = refused(&client, call(&two, vec![tensor(&ones)], into.into())).await;
    assert_eq!(why, Reason::InvalidArgument);
    assert_eq!(client.download(&good).await, [7.0; 4]);
    assert_eq!(client.download(&bad).await, [7.0; 2]);

    // A new tensor that more bytes come for than it has never is one.
    let n = limits::TENSOR_CHUNK / 4;
    let mut chunks = vec![upload_chunk(
        Kind::Create(wire_spec(&[n])),
        0,
        vec![0; 4 * n],
    )];
    chunks.push(v1::UploadChunk {
        target: None,
        data: vec![1; 4].into(),
    });
    let held = client.list().await.tensors.len();
    assert_eq!(
        reason(client.try_upload(chunks).await),
        Reason::InvalidArgument
    );
    let uploading = |t: &v1::TensorInfo| t.state() == v1::TensorState::Uploading;
    let left = client.list().await.tensors;
    let (ready, unfinished): (Vec<_>, Vec<_>) = left.into_iter().partition(|t| !uploading(t));
    assert_eq!(ready.len(), held);
    for tensor in unfinished {
        let handle = tensor.handle.unwrap();
        let read = client.try_download(&handle, 0, 0).await;
        assert_eq!(reason(read), Reason::TensorNotReady);
    }
    // One chunk that is too long for where it goes.
    let target = client.upload(&[4], &[1.0, 2.0, 3.0, 4.0]).await;
    for (offset, bytes) in [(0, 17), (12, 8), (16, 1)] {
        let over = upload_chunk(Kind::Tensor(target.clone()), offset, vec![9; bytes]);
        let why = reason(client.try_upload(vec![over]).await);
        assert_eq!(why, Reason::InvalidArgument, "{bytes} at {offset}");
        assert_eq!(client.download(&target).await, [1.0, 2.0, 3.0, 4.0]);
    }
}
