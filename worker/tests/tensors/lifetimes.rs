//! Random programs: values are right whatever is freed and overwritten meanwhile, and nothing is left.

use hotcell_proto::{
    session::HandleId,
    v1::{self, output_wish, upload_target::Kind},
};
use proptest::prelude::*;

use crate::support::*;

/// One step; numbers choose among the tensors there are.
#[derive(Clone, Debug)]
enum Step {
    Upload(i8),
    Add {
        a: usize,
        b: usize,
        stream: u32,
        detached: bool,
    },
    Into {
        a: usize,
        b: usize,
        into: usize,
        stream: u32,
    },
    Dropped(usize),
    Overwrite(usize, i8),
    Free(usize),
    Check(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let one = || 0usize..100;
    prop_oneof![
        3 => any::<i8>().prop_map(Step::Upload),
        5 => (one(), one(), 0u32..3, any::<bool>())
            .prop_map(|(a, b, stream, detached)| Step::Add { a, b, stream, detached }),
        3 => (one(), one(), one(), 0u32..3)
            .prop_map(|(a, b, into, stream)| Step::Into { a, b, into, stream }),
        1 => one().prop_map(Step::Dropped),
        2 => (one(), any::<i8>()).prop_map(|(t, v)| Step::Overwrite(t, v)),
        3 => one().prop_map(Step::Free),
        1 => one().prop_map(Step::Check),
    ]
}

const N: usize = 64;

async fn run(client: &Client, plan: &v1::Handle, steps: &[Step]) {
    let mut there: Vec<(v1::Handle, Vec<f32>)> = Vec::new();
    let sum = |a: &[f32], b: &[f32]| -> Vec<f32> { a.iter().zip(b).map(|(x, y)| x + y).collect() };
    for step in steps {
        let len = there.len();
        match *step {
            Step::Upload(v) => {
                let values = vec![f32::from(v); N];
                there.push((client.upload(&[N], &values).await, values));
            }
            _ if len == 0 => {}
            Step::Add {
                a,
                b,
                stream,
                detached,
            } => {
                let (a, b) = (&there[a % len], &there[b % len]);
                let id = HandleId::random().unwrap();
                let mut request = call(plan, vec![tensor(&a.0), tensor(&b.0)], vec![keep(id)]);
                (request.stream, request.detached) = (stream, detached);
                client.execute(request).await.unwrap();
                let values = sum(&a.1, &b.1);
                there.push((id.handle(EPOCH), values));
            }
            Step::Into { a, b, into, stream } => {
                let (a, b) = (&there[a % len], &there[b % len]);
                let goal = wish(output_wish::Kind::Into(there[into % len].0.clone()));
                let mut request = call(plan, vec![tensor(&a.0), tensor(&b.0)], vec![goal]);
                (request.stream, request.detached) = (stream, true);
                client.execute(request).await.unwrap();
                there[into % len].1 = sum(&a.1, &b.1);
            }
            Step::Dropped(t) => {
                let t = tensor(&there[t % len].0);
                let goal = wish(output_wish::Kind::Drop(true));
                client
                    .execute(call(plan, vec![t.clone(), t], vec![goal]))
                    .await
                    .unwrap();
            }
            Step::Overwrite(t, v) => {
                let over =
                    upload_chunk(Kind::Tensor(there[t % len].0.clone()), 4, f32s(&[v.into()]));
                client.try_upload(vec![over]).await.unwrap();
                there[t % len].1[1] = v.into();
            }
            Step::Free(t) => {
                let (handle, _) = there.swap_remove(t % len);
                client.free(&[handle]).await.unwrap();
            }
            Step::Check(t) => {
                let (handle, values) = &there[t % len];
                assert_eq!(&client.download(handle).await, values);
            }
        }
    }
    for (handle, values) in &there {
        assert_eq!(&client.download(handle).await, values);
    }
    client.synchronize(None).await.unwrap();
    let memory = client.memory().await;
    let all: Vec<_> = there.into_iter().map(|(handle, _)| handle).collect();
    assert!(memory.active >= (all.len() * N * 4) as u64);
    client.free(&all).await.unwrap();
}

#[test]
fn values_are_right_and_nothing_is_left() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (client, plan, _host) = runtime.block_on(async {
        let host = worker(64 << 20);
        let client = Client::open(&host).await;
        let plan = client.compile(&add_graph(&[N])).await;
        (client, plan, host)
    });
    let idle = runtime.block_on(client.memory()).active;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&prop::collection::vec(step(), 0..60), |steps| {
            runtime.block_on(run(&client, &plan, &steps));
            let memory = runtime.block_on(client.memory());
            prop_assert_eq!((memory.active, memory.tensors), (idle, 0));
            Ok(())
        })
        .unwrap();
}
