//! Memory that client and worker share, and connections that come as descriptors.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hotcell_graph::{DType, GraphBuilder, wire};
use hotcell_ipc::{
    memory::{SharedMapping, sealed_memory, shared_memory},
    socket::{DescriptorSender, descriptor_pair, stream_pair},
    transport::{Windows, channel_over},
};
use hotcell_proto::{
    error::Reason,
    limits,
    v1::{self, output_wish, tensors_client::TensorsClient, worker_server::Worker},
};
use hotcell_worker::{host::Host, serve::Controls, service::WorkerService};
use tonic::{Request, Status};

use crate::support::*;

/// A tag as clients' shared memory has them.
fn shared_tag(n: u64) -> u64 {
    limits::FIRST_SHARED_TAG + n
}

fn descriptors(host: &Host) -> DescriptorSender {
    let (ours, theirs) = descriptor_pair().unwrap();
    host.receive_descriptors(theirs).unwrap();
    DescriptorSender::new(ours).unwrap()
}

async fn import(
    client: &Client,
    tag: u64,
    spec: v1::TensorSpec,
    offset: u64,
) -> Result<v1::TensorInfo, Status> {
    let request = client.of(v1::ImportSharedRequest {
        tag: shared_tag(tag),
        spec: Some(spec),
        offset,
    });
    Ok(client
        .raw
        .clone()
        .import_shared(request)
        .await?
        .into_inner())
}

fn put(map: &SharedMapping, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= map.len());
    // SAFETY: inside the mapping, which lives; nobody computes on it now.
    unsafe {
        map.start()
            .add(offset)
            .copy_from(bytes.as_ptr(), bytes.len())
    };
}

fn get(map: &SharedMapping, offset: usize, len: usize) -> Vec<u8> {
    assert!(offset + len <= map.len());
    let mut bytes = vec![0; len];
    // SAFETY: as in `put`.
    unsafe { map.start().add(offset).copy_to(bytes.as_mut_ptr(), len) };
    bytes
}

#[tokio::test]
async fn inputs_and_results_lie_in_shared_memory() {
    let host = worker(64 << 20);
    let sender = descriptors(&host);
    let client = Client::open(&host).await;
    let memory = shared_memory("a test", 4096).unwrap();
    let map = SharedMapping::of_memory(&memory).unwrap();
    let send = |tag: u64, fd: &OwnedFd| sender.send(shared_tag(tag), &[fd.as_fd()]).unwrap();
    send(1, &memory);
    let a = import(&client, 1, wire_spec(&[4]), 0).await.unwrap();
    send(2, &memory);
    let b = import(&client, 2, wire_spec(&[4]), 128).await.unwrap();
    // Each mapping is paid for.
    assert_eq!(client.memory().await.active, 2 * 4096);
    let (a, b) = (a.handle.unwrap(), b.handle.unwrap());
    let plan = client.compile(&add_graph(&[4])).await;
    for round in 0..3 {
        let x = round as f32;
        put(&map, 0, &f32s(&[x, 1.0, 2.0, 3.0]));
        let into = wish(output_wish::Kind::Into(b.clone()));
        let request = call(&plan, vec![tensor(&a), data(f32s(&[0.5; 4]))], vec![into]);
        client.execute(request).await.unwrap();
        assert_eq!(read_f32s(&get(&map, 128, 16)), [x + 0.5, 1.5, 2.5, 3.5]);
        assert_eq!(client.download(&b).await, [x + 0.5, 1.5, 2.5, 3.5]);
    }
    // What is read and written at once is read whole first.
    let into = wish(output_wish::Kind::Into(a.clone()));
    let both = call(&plan, vec![tensor(&a), tensor(&a)], vec![into]);
    client.execute(both).await.unwrap();
    assert_eq!(read_f32s(&get(&map, 0, 16)), [4.0, 2.0, 4.0, 6.0]);
    // A part of it.
    let part = client.try_download(&a, 4, 8).await.unwrap().0;
    assert_eq!(read_f32s(&part), [2.0, 4.0]);

    // Indices are read once, from a copy.
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[8, 4])).unwrap();
    let i = g.tensor("i", spec(DType::I32, &[2])).unwrap();
    let y = g.get_rows(x, i).unwrap();
    let pick = client.compile(&g.finish(&[y]).unwrap()).await;
    send(3, &memory);
    let spec = wire::encode_tensor_spec(&spec(DType::I32, &[2]));
    let i = import(&client, 3, spec, 256).await.unwrap().handle.unwrap();
    let table: Vec<f32> = (0..32).map(|x| x as f32).collect();
    put(&map, 256, &[2, 0, 0, 0, 0, 0, 0, 0]);
    let request = call(&pick, vec![data(f32s(&table)), tensor(&i)], vec![inline()]);
    let response = client.execute(request.clone()).await.unwrap();
    assert_eq!(
        read_f32s(&sent(&response, 0)),
        [8.0, 9.0, 10.0, 11.0, 0.0, 1.0, 2.0, 3.0]
    );
    put(&map, 256, &[255; 8]);
    assert_eq!(
        reason(client.execute(request).await),
        Reason::IndexOutOfRange
    );
}

#[tokio::test]
async fn bytes_that_lead_to_no_index_are_read_where_they_are_even_while_they_change() {
    const BYTES: usize = 1 << 20;
    // A session may have half of it: the mappings, and no copy of the larger one.
    let host = worker(3 * BYTES as u64);
    let sender = descriptors(&host);
    let client = Client::open(&host).await;
    let memory = [BYTES, 4096].map(|bytes| shared_memory("a test", bytes as u64).unwrap());
    let mut there = Vec::new();
    for (tag, dtype, dims) in [(1, DType::U8, BYTES), (2, DType::I32, 64)] {
        let fd = memory[tag as usize - 1].as_fd();
        sender.send(shared_tag(tag), &[fd]).unwrap();
        let spec = wire::encode_tensor_spec(&spec(dtype, &[dims]));
        there.push(import(&client, tag, spec, 0).await.unwrap().handle.unwrap());
    }
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::U8, &[BYTES])).unwrap();
    let most = g.reduce_max(x, &[0], false).unwrap();
    let most = client.compile(&g.finish(&[most]).unwrap()).await;
    let mut g = GraphBuilder::new(0);
    let table = g.tensor("table", spec(DType::F32, &[8])).unwrap();
    let i = g.tensor("i", spec(DType::I32, &[64])).unwrap();
    let picked = g.take(table, i, 0).unwrap();
    let pick = client.compile(&g.finish(&[picked]).unwrap()).await;

    let maps = [0, 1].map(|i| SharedMapping::of_memory(&memory[i]).unwrap());
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let flips = std::thread::spawn(move || {
        let mut round = 0u8;
        while !stop.load(Ordering::Relaxed) {
            round = round.wrapping_add(1);
            put(&maps[0], usize::from(round) * 4096, &[round % 200; 4096]);
            // Every second time all of them are outside.
            let index = i32::from(round % 8) + i32::from(round % 2) * (1 << 30);
            put(&maps[1], 0, &index.to_le_bytes().repeat(64));
        }
    });
    let (mut inside, mut outside) = (0, 0);
    let values: Vec<f32> = (0..8).map(|i| 1000.0 + i as f32).collect();
    for _ in 0..200 {
        let request = call(&most, vec![tensor(&there[0])], vec![inline()]);
        let greatest = client.execute(request).await.unwrap();
        assert!(sent(&greatest, 0)[0] < 200);
        let inputs = vec![data(f32s(&values)), tensor(&there[1])];
        match client.execute(call(&pick, inputs, vec![inline()])).await {
            Ok(picked) => {
                let picked = read_f32s(&sent(&picked, 0));
                assert!(picked.iter().all(|v| values.contains(v)), "{picked:?}");
                inside += 1;
            }
            error => {
                assert_eq!(reason(error), Reason::IndexOutOfRange);
                outside += 1;
            }
        }
    }
    over.store(true, Ordering::Relaxed);
    flips.join().unwrap();
    assert!(
        inside + outside == 200 && outside > 0,
        "{inside}, {outside}"
    );
}

#[tokio::test]
async fn a_result_that_nothing_else_touches_takes_no_memory_but_the_shared() {
    const BYTES: usize = 1 << 20;
    let dims = [BYTES / 4];
    // A session may have half of it: three mappings of two values each, and not one more value.
    let host = worker(13 * BYTES as u64);
    let sender = descriptors(&host);
    let client = Client::open(&host).await;
    let memory = [0; 2].map(|_| shared_memory("a test", 2 * BYTES as u64).unwrap());
    let map = |i: usize| SharedMapping::of_memory(&memory[i]).unwrap();
    let (first, second) = (map(0), map(1));
    let handle = async |tag: u64, i: usize, at: usize| {
        sender.send(shared_tag(tag), &[memory[i].as_fd()]).unwrap();
        let info = import(&client, tag, wire_spec(&dims), at as u64).await;
        info.unwrap().handle.unwrap()
    };
    let a = handle(1, 0, 0).await;
    let b = handle(2, 1, BYTES).await;
    // The same memory as that of `a`, mapped once more.
    let c = handle(3, 0, BYTES / 2).await;
    let values: Vec<f32> = (0..dims[0]).map(|i| i as f32).collect();
    put(&first, 0, &f32s(&values));
    let plan = client.compile(&add_graph(&dims)).await;
    let into = |handle: &v1::Handle| wish(output_wish::Kind::Into(handle.clone()));
    let sum = || vec![tensor(&a), tensor(&a)];
    let before = client.memory().await.active;
    let there = call(&plan, sum(), vec![into(&b)]);
    client.execute(there).await.unwrap();
    assert_eq!(client.memory().await.active, before);
    let seen = read_f32s(&get(&second, BYTES, BYTES));
    assert!(seen.iter().zip(&values).all(|(seen, x)| *seen == x + x));
    // Over what it reads, through whichever mapping, it would be computed elsewhere first, and there is no room.
    for over in [&a, &c] {
        let refused = client.execute(call(&plan, sum(), vec![into(over)])).await;
        assert_eq!(reason(refused), Reason::QuotaExceeded);
        assert_eq!(read_f32s(&get(&first, 0, BYTES)), values);
    }
    // So would one that a node reads again.
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &dims)).unwrap();
    let y = g.add(x, x).unwrap();
    let most = g.reduce_max(y, &[0], false).unwrap();
    let read_again = client.compile(&g.finish(&[y, most]).unwrap()).await;
    let wishes = vec![into(&b), inline()];
    let refused = client
        .execute(call(&read_again, vec![tensor(&a)], wishes))
        .await;
    assert_eq!(reason(refused), Reason::QuotaExceeded);
    // And two results in one place.
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &dims)).unwrap();
    let (y, z) = (g.add(x, x).unwrap(), g.sub(x, x).unwrap());
    let two = client.compile(&g.finish(&[y, z]).unwrap()).await;
    let both = call(&two, vec![tensor(&b)], vec![into(&a), into(&c)]);
    assert_eq!(reason(client.execute(both).await), Reason::QuotaExceeded);
}

#[tokio::test]
async fn a_tensor_stays_in_shared_memory_after_a_call_that_failed() {
    let host = worker(64 << 20);
    let sender = descriptors(&host);
    let client = Client::open(&host).await;
    let memory = shared_memory("a test", 4096).unwrap();
    let map = SharedMapping::of_memory(&memory).unwrap();
    sender.send(shared_tag(1), &[memory.as_fd()]).unwrap();
    let a = import(&client, 1, wire_spec(&[1, 4]), 0).await.unwrap();
    let a = a.handle.unwrap();
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[2, 4])).unwrap();
    let i = g.tensor("i", spec(DType::I32, &[1])).unwrap();
    let y = g.get_rows(x, i).unwrap();
    let pick = client.compile(&g.finish(&[y]).unwrap()).await;
    let row = |i: i32| {
        let table = data(f32s(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]));
        let into = wish(output_wish::Kind::Into(a.clone()));
        let inputs = vec![table, data(i.to_le_bytes().to_vec())];
        client.execute(call(&pick, inputs, vec![into]))
    };
    assert_eq!(reason(row(9).await), Reason::IndexOutOfRange);
    row(1).await.unwrap();
    assert_eq!(read_f32s(&get(&map, 0, 16)), [4.0, 5.0, 6.0, 7.0]);
    // Freed, nothing is paid any more.
    client.free(&[a, pick.clone()]).await.unwrap();
    assert_eq!(client.memory().await.active, 0);
}

#[tokio::test]
async fn memory_that_nobody_asks_for_evicts_only_its_like() {
    let host = worker(64 << 20);
    let sender = descriptors(&host);
    let (_ours, theirs) = stream_pair().unwrap();
    sender.send(9, &[theirs.as_fd()]).unwrap();
    let memory = shared_memory("a test", 4096).unwrap();
    for n in 0..300 {
        sender.send(shared_tag(n), &[memory.as_fd()]).unwrap();
    }
    let client = Client::open(&host).await;
    // The newest is there, the oldest is not waited for here: that takes seconds.
    import(&client, 299, wire_spec(&[4]), 0).await.unwrap();
    host.open_tensors(9, false).await.unwrap();
    // As many mappings as a session may have, and one more.
    for n in 300..363 {
        sender.send(shared_tag(n), &[memory.as_fd()]).unwrap();
        import(&client, n, wire_spec(&[4]), 0).await.unwrap();
    }
    sender.send(shared_tag(400), &[memory.as_fd()]).unwrap();
    let one_more = import(&client, 400, wire_spec(&[4]), 0).await;
    assert_eq!(reason(one_more), Reason::QuotaExceeded);
}

#[tokio::test]
async fn memory_that_could_shrink_or_is_too_small_is_refused() {
    let host = worker(64 << 20);
    let sender = descriptors(&host);
    let client = Client::open(&host).await;
    let good = shared_memory("a test", 4096).unwrap();
    let immutable = sealed_memory("a test", &[0; 4096]).unwrap();
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let (socket, _) = stream_pair().unwrap();
    let cases: [(&OwnedFd, usize, u64); 8] = [
        (&immutable, 4, 0),
        (&file, 4, 0),
        (&socket, 4, 0),
        (&good, 1025, 0),
        (&good, 4, 4096),
        (&good, 4, 4),
        (&good, 4, u64::MAX),
        (&good, 4, u64::MAX - 63),
    ];
    for (tag, (fd, elements, offset)) in (1..).zip(cases) {
        sender.send(shared_tag(tag), &[fd.as_fd()]).unwrap();
        let refused = import(&client, tag, wire_spec(&[elements]), offset).await;
        assert_eq!(reason(refused), Reason::InvalidArgument, "{tag}");
    }
    assert!(client.list().await.tensors.is_empty());
}

#[tokio::test]
async fn a_connection_that_comes_as_a_descriptor_is_served() {
    let host = worker(64 << 20);
    let sender = descriptors(&host);
    let (ours, theirs) = stream_pair().unwrap();
    sender.send(9, &[theirs.as_fd()]).unwrap();
    drop(theirs);
    let control = WorkerService(host.clone(), Controls::default());
    let request = Request::new(v1::OpenTensorsRequest {
        tag: 9,
        debug: false,
    });
    control.open_tensors(request).await.unwrap();
    let channel = channel_over(ours, Windows::default()).await.unwrap();
    // Who has an end for tensors does not see what others do.
    let mut debug = v1::debug_client::DebugClient::new(channel.clone());
    let refused = debug.watch(v1::WatchRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unimplemented);
    let raw = TensorsClient::new(channel);
    let about = raw
        .clone()
        .describe(v1::DescribeRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!((about.worker.as_str(), about.epoch), ("w3", EPOCH.0));
    assert!(about.ops.contains(&"add".to_owned()));
    assert!(about.buffer_types[0].is_host);
    let client = Client::open_over(raw, v1::OpenSessionRequest::default())
        .await
        .unwrap();
    let a = client.upload(&[2], &[1.0, 2.0]).await;
    assert_eq!(client.download(&a).await, [1.0, 2.0]);
    // Its end ends the session.
    drop(client);
    let bytes = || host.engine().tensors(|plane| Ok(plane.bytes()));
    while bytes().await.unwrap() > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}
