//! Caches that a session makes: effects in order, bounds, quotas, and what is left of them.

use std::time::{Duration, Instant};

use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder};
use hotcell_proto::{
    error::Reason,
    v1::{self, output_wish, upload_target::Kind},
};

use crate::support::*;

const MIB: u64 = 1 << 20;

/// Two blocks of two tokens, one head of two numbers: 64 bytes.
const SPEC: CacheSpec = CacheSpec {
    dtype: DType::F32,
    blocks: 2,
    block_len: 2,
    kv_heads: 1,
    head_dim: 2,
};

fn create(spec: CacheSpec) -> v1::CreateRequest {
    v1::CreateRequest {
        spec: Some(v1::create_request::Spec::Cache(v1::CacheSpec {
            dtype: spec.dtype.name().to_owned(),
            blocks: spec.blocks as u64,
            block_len: spec.block_len as u64,
            kv_heads: spec.kv_heads as u64,
            head_dim: spec.head_dim as u64,
        })),
        id: vec![],
    }
}

async fn cache(client: &Client) -> v1::Handle {
    let made = client.raw.clone().create(client.of(create(SPEC))).await;
    let info = made.unwrap().into_inner();
    assert_eq!(info.bytes, 64);
    assert_eq!(info.state(), v1::TensorState::Ready);
    info.handle.unwrap()
}

/// Writes one token, attends, writes another one, attends again: inputs cache, keys, values, slots and the same of the second
/// write, queries, tables, sequences, positions.
fn graph() -> Graph {
    let mut g = GraphBuilder::new(0);
    let cache = g.cache("cache", SPEC).unwrap();
    let mut writes = Vec::new();
    for _ in 0..2 {
        let keys = g.tensor("keys", spec(DType::F32, &[1, 1, 2])).unwrap();
        let values = g.tensor("values", spec(DType::F32, &[1, 1, 2])).unwrap();
        let slots = g.tensor("slots", spec(DType::I32, &[1])).unwrap();
        writes.push((keys, values, slots));
    }
    let queries = g.tensor("queries", spec(DType::F32, &[1, 1, 2])).unwrap();
    let tables = g.tensor("tables", spec(DType::I32, &[1, 2])).unwrap();
    let sequences = g.tensor("sequences", spec(DType::I32, &[1])).unwrap();
    let positions = g.tensor("positions", spec(DType::I32, &[1])).unwrap();
    let mut outputs = Vec::new();
    for (keys, values, slots) in writes {
        g.cache_write(cache, keys, values, slots).unwrap();
        let seen = g.paged_attention(queries, cache, tables, sequences, positions, 1.0, 0, 0.0);
        outputs.push(seen.unwrap());
    }
    g.finish(&outputs).unwrap()
}

fn i32s(values: &[i32]) -> v1::Operand {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    data(bytes)
}

/// A call of [`graph`]: what two writes put where, and which tokens the query `[1, 0]` sees.
struct Ask {
    writes: [([f32; 2], [f32; 2], i32); 2],
    table: [i32; 2],
    sequence: i32,
    position: i32,
}

impl Ask {
    fn of(&self, plan: &v1::Handle, cache: &v1::Handle) -> v1::ExecuteRequest {
        let mut inputs = vec![tensor(cache)];
        for (keys, values, slot) in &self.writes {
            inputs.extend([data(f32s(keys)), data(f32s(values)), i32s(&[*slot])]);
        }
        inputs.extend([
            data(f32s(&[1.0, 0.0])),
            i32s(&self.table),
            i32s(&[self.sequence]),
            i32s(&[self.position]),
        ]);
        call(plan, inputs, vec![inline(), inline()])
    }
}

/// Writes two tokens into one slot, and sees that slot alone.
const SAME: Ask = Ask {
    writes: [([1.0, 2.0], [3.0, 4.0], 2), ([5.0, 6.0], [7.0, 8.0], 2)],
    table: [1, 0],
    sequence: 0,
    position: 0,
};

#[tokio::test]
async fn effects_take_place_in_the_order_of_the_graph() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let (plan, cache) = (client.compile(&graph()).await, cache(&client).await);
    assert_eq!(client.download(&cache).await, [0.0; 16]);
    for _ in 0..3 {
        let seen = client.execute(SAME.of(&plan, &cache)).await.unwrap();
        // One token is seen, so attention is its value: of the first write, then of the second.
        assert_eq!(read_f32s(&sent(&seen, 0)), [3.0, 4.0]);
        assert_eq!(read_f32s(&sent(&seen, 1)), [7.0, 8.0]);
    }
    // Slot 2 is the first of block 1; keys are the first half.
    let mut expected = [0.0; 16];
    expected[4..6].copy_from_slice(&[5.0, 6.0]);
    expected[12..14].copy_from_slice(&[7.0, 8.0]);
    assert_eq!(client.download(&cache).await, expected);
    // Two tokens: softmax of the scores 1 and 5, by hand.
    let both = Ask {
        writes: [([1.0, 0.0], [0.0, 1.0], 0), ([5.0, 0.0], [1.0, 0.0], 1)],
        table: [0, -1],
        position: 1,
        ..SAME
    };
    let seen = client.execute(both.of(&plan, &cache)).await.unwrap();
    let weight = 1.0 / (1.0 + (-4.0f64).exp());
    let got = read_f32s(&sent(&seen, 1));
    for (got, expected) in got.iter().zip([weight, 1.0 - weight]) {
        assert!((f64::from(*got) - expected).abs() < 1e-6, "{got:?}");
    }
}

#[tokio::test]
async fn slots_and_blocks_that_are_not_there_are_errors_of_the_call() {
    let host = worker(64 * MIB);
    let client = Client::open(&host).await;
    let plan = client.compile(&graph()).await;
    let (one, other) = (cache(&client).await, cache(&client).await);
    client.execute(SAME.of(&plan, &other)).await.unwrap();
    let before = client.download(&other).await;
    let slot = |slot| Ask {
        writes: [SAME.writes[0], ([9.0; 2], [9.0; 2], slot)],
        ..SAME
    };
    let place = |table, sequence, position| Ask {
        table,
        sequence,
        position,
        ..SAME
    };
    for ask in [
        slot(4),
        slot(-2),
        slot(i32::MAX),
        slot(i32::MIN),
        place([2, 0], 0, 0),
        place([-1, 0], 0, 0),
        place([i32::MAX, 0], 0, 0),
        place([0, 2], 0, 3),
        place([0, 1], 1, 0),
        place([0, 1], -1, 0),
        place([0, 1], 0, 4),
        place([0, 1], 0, i32::MAX),
        place([0, 1], 0, -2),
    ] {
        let answer = client.execute(ask.of(&plan, &one)).await;
        let Ask {
            writes: [_, (_, _, slot)],
            table,
            sequence,
            position,
        } = ask;
        let words = format!("slot {slot}, table {table:?}, {sequence}, {position}");
        match answer {
            Ok(seen) => panic!("{words}: {:?}", read_f32s(&sent(&seen, 1))),
            Err(status) => assert_eq!(
                reason::<()>(Err(status)),
                Reason::IndexOutOfRange,
                "{words}"
            ),
        }
    }
    assert_eq!(client.download(&other).await, before);
    // The cache is none the worse for it.
    let seen = client.execute(SAME.of(&plan, &one)).await.unwrap();
    assert_eq!(read_f32s(&sent(&seen, 1)), [7.0, 8.0]);
}

#[tokio::test]
async fn a_cache_that_is_not_the_sessions_is_refused() {
    let host = worker(64 * MIB);
    let (client, other) = (Client::open(&host).await, Client::open(&host).await);
    let plan = client.compile(&graph()).await;
    let (freed, foreign, mut stale, mine) = (
        cache(&client).await,
        cache(&other).await,
        cache(&client).await,
        cache(&client).await,
    );
    client.free(std::slice::from_ref(&freed)).await.unwrap();
    stale.epoch -= 1;
    for (handle, why) in [
        (&freed, Reason::HandleNotFound),
        (&foreign, Reason::HandleNotFound),
        (&stale, Reason::HandleStale),
        // A plan is no cache.
        (&plan, Reason::InvalidArgument),
    ] {
        let answer = client.execute(SAME.of(&plan, handle)).await;
        assert_eq!(reason(answer), why);
    }
    assert_eq!(other.download(&foreign).await, [0.0; 16]);
    // Nor is a tensor of as many bytes, a cache of another shape, or bytes.
    let flat = client.upload(&[16], &[0.0; 16]).await;
    let wide = CacheSpec {
        blocks: 1,
        block_len: 4,
        ..SPEC
    };
    let wide = client.raw.clone().create(client.of(create(wide))).await;
    let wide = wide.unwrap().into_inner().handle.unwrap();
    for operand in [tensor(&flat), tensor(&wide), data(vec![0; 64])] {
        let mut request = SAME.of(&plan, &mine);
        request.inputs[0] = operand;
        assert_eq!(reason(client.execute(request).await), Reason::GraphInvalid);
    }
    // A cache is no result's place and no tensor.
    let add = client.compile(&add_graph(&[16])).await;
    let into = wish(output_wish::Kind::Into(mine.clone()));
    let over = call(&add, vec![tensor(&flat), tensor(&flat)], vec![into]);
    assert_eq!(reason(client.execute(over).await), Reason::InvalidArgument);
    let read = call(&add, vec![tensor(&mine), tensor(&flat)], vec![]);
    assert_eq!(reason(client.execute(read).await), Reason::GraphInvalid);
    assert_eq!(client.download(&mine).await, [0.0; 16]);
}

/// A few of a cache's numbers: of its beginning and, from there on, of its end.
async fn ends(client: &Client, cache: &v1::Handle, bytes: u64) -> Vec<f32> {
    let mut all = Vec::new();
    for offset in [0, bytes - 4096] {
        // What is read of a cache is copied, which the session has to have room for.
        let part = client.try_download(cache, offset, 4096).await;
        all.extend(read_f32s(&part.unwrap().0));
    }
    all
}

#[tokio::test]
async fn caches_count_as_tensors_do_and_end_with_their_session() {
    const BYTES: u64 = 480 << 10;
    let host = worker(MIB);
    let large = CacheSpec {
        blocks: 15 * 1024,
        ..SPEC
    };
    // Half of the worker's memory is the session's: 512 KiB.
    let client = Client::open(&host).await;
    for _ in 0..3 {
        let made = client.raw.clone().create(client.of(create(large))).await;
        let made = made.unwrap().into_inner();
        assert_eq!(made.bytes, BYTES);
        assert_eq!(client.memory().await.active, BYTES);
        let more = client.raw.clone().create(client.of(create(large))).await;
        assert_eq!(reason(more), Reason::QuotaExceeded);
        let handle = made.handle.unwrap();
        // What was freed and is taken again is zeros.
        assert_eq!(ends(&client, &handle, BYTES).await, [0.0; 2048]);
        let ones = upload_chunk(Kind::Tensor(handle.clone()), 0, f32s(&[1.0; 120 << 10]));
        client.try_upload(vec![ones]).await.unwrap();
        assert_eq!(ends(&client, &handle, BYTES).await, [1.0; 2048]);
        client.free(&[handle]).await.unwrap();
        assert_eq!(client.memory().await.active, 0);
    }
    let kept = client.raw.clone().create(client.of(create(large))).await;
    let kept = kept.unwrap().into_inner().handle.unwrap();
    let options = v1::OpenSessionRequest {
        max_bytes: MIB,
        ..v1::OpenSessionRequest::default()
    };
    let next = Client::open_with(&host, options).await;
    let foreign = next.try_download(&kept, 0, 4).await;
    assert_eq!(reason(foreign), Reason::HandleNotFound);
    // Its memory is there for others once the session is over.
    drop(client);
    let whole = CacheSpec {
        blocks: 2 * large.blocks,
        ..SPEC
    };
    let start = Instant::now();
    let taken = loop {
        match next.raw.clone().create(next.of(create(whole))).await {
            Ok(made) => break made.into_inner().handle.unwrap(),
            Err(status) => {
                let waited = start.elapsed() < Duration::from_secs(60);
                assert!(waited, "it still holds its cache: {status:?}");
            }
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(ends(&next, &taken, 2 * BYTES).await, [0.0; 2048]);
}
