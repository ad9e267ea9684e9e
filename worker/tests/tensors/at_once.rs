//! Short work on the thread that it came to, while the engine waits, and in its order all the same.

use std::{sync::mpsc, thread, time::Duration};

use hotcell_graph::{DType, Graph, GraphBuilder, Shape};
use hotcell_proto::v1::output_wish::Kind;

use crate::support::*;

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn only_an_engine_that_waits_lends_what_it_owns() {
    let host = worker(MIB);
    let engine = host.engine();
    // It may not have begun to wait yet.
    let here = async {
        loop {
            if let Some(id) = engine.tensors_at_once(|_, _| thread::current().id()) {
                return id;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert_eq!(here.await, thread::current().id());

    let (release, held) = mpsc::channel::<()>();
    let (begun, begins) = tokio::sync::oneshot::channel();
    let work = engine.tensors(move |_| {
        let _ = begun.send(thread::current().id());
        let _ = held.recv();
        Ok(())
    });
    let busy = async {
        assert_ne!(begins.await.unwrap(), thread::current().id());
        assert!(engine.tensors_at_once(|_, _| ()).is_none());
        // What waits in line goes first as well.
        let queued = engine.tensors(|_| Ok(()));
        let released = async {
            assert!(engine.tensors_at_once(|_, _| ()).is_none());
            drop(release);
        };
        let (queued, ()) = tokio::join!(queued, released);
        queued.unwrap();
    };
    let (work, ()) = tokio::join!(work, busy);
    work.unwrap();
}

/// `a + 1` or `a · 2` of four numbers.
fn step(op: &str, by: f32) -> Graph {
    let mut g = GraphBuilder::new(0);
    let a = g.tensor("a", spec(DType::F32, &[4])).unwrap();
    let by = by.to_le_bytes();
    let by = g.literal(DType::F32, Shape::default(), &by).unwrap();
    let result = match op {
        "add" => g.add(a, by),
        _ => g.mul(a, by),
    };
    g.finish(&[result.unwrap()]).unwrap()
}

#[tokio::test]
async fn short_calls_keep_their_place_among_those_that_the_engine_runs() {
    let host = worker(MIB);
    let client = Client::open(&host).await;
    let (add, twice) = (
        client.compile(&step("add", 1.0)).await,
        client.compile(&step("mul", 2.0)).await,
    );
    let x = client.upload(&[4], &[0.0; 4]).await;
    let into = || vec![wish(Kind::Into(x.clone()))];
    for n in 1..=20 {
        // Queued for the engine, which may be slow to begin; then one that can run where it comes.
        let mut first = call(&add, vec![tensor(&x)], into());
        first.detached = true;
        client.execute(first).await.unwrap();
        let second = call(&twice, vec![tensor(&x)], into());
        client.execute(second).await.unwrap();
        // x ← 2 (x + 1), from 0.
        let expected = f32::from(2u8).powi(n + 1) - 2.0;
        assert_eq!(client.download(&x).await, [expected; 4]);
    }
    // Alone, with nothing queued between them.
    for _ in 0..20 {
        let request = call(&add, vec![data(f32s(&[1.0; 4]))], vec![inline()]);
        let response = client.execute(request).await.unwrap();
        assert_eq!(read_f32s(&sent(&response, 0)), [2.0; 4]);
    }
    client.synchronize(None).await.unwrap();
    client.free(&[x, add, twice]).await.unwrap();
    assert_eq!(client.memory().await.active, 0);
}
