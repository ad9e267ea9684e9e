//! How plans come to be: beside the engine, and with attention as the session asks for it.

use std::{
    rc::Rc,
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use hotcell_graph::{DType, Graph, GraphBuilder, op::Call};
use hotcell_kernels::{
    backend::{
        Backend, Buffer, BufferType, Device, DeviceError, DeviceInfo, HostRegion, SharedRegion,
        Stream, Trail,
    },
    cpu::CpuBackend,
    host::Staging,
    plan::{Plan, PlanHints, Planner, Prepared, Unfinished},
    registry::Registry,
};
use hotcell_proto::{
    error::{Error, Reason},
    v1::{self, FusedAttention},
};
use tonic::Status;

use crate::support::*;

const MIB: u64 = 1 << 20;
const ATTENTION: &str = "scaled_dot_product_attention";

/// Names of the ops of each graph that the fused device planned.
static PLANNED: Mutex<Vec<Vec<&'static str>>> = Mutex::new(Vec::new());
/// Whether those that plan at the gate may go on, and whether one came there.
static GATE: (Mutex<(bool, bool)>, Condvar) = (Mutex::new((false, false)), Condvar::new());

/// The CPU's device, and what is odd about it.
struct Odd {
    inner: Rc<dyn Device>,
    /// It says that it has attention as one kernel, for heads of 8.
    fused: bool,
}

impl Device for Odd {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn reproducible(&self) -> bool {
        self.inner.reproducible()
    }

    fn buffer_types(&self) -> &'static [BufferType] {
        self.inner.buffer_types()
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<Buffer, DeviceError> {
        self.inner.allocate(what, bytes)
    }

    fn import(&self, region: Rc<dyn HostRegion>) -> Result<Buffer, DeviceError> {
        self.inner.import(region)
    }

    fn import_shared(&self, region: Rc<dyn SharedRegion>) -> Result<Buffer, DeviceError> {
        self.inner.import_shared(region)
    }

    fn adopt(&self, what: &str, staging: Staging) -> Result<Buffer, DeviceError> {
        self.inner.adopt(what, staging)
    }

    fn ops(&self) -> Vec<&'static str> {
        let mut ops = self.inner.ops();
        ops.extend(self.fused.then_some(ATTENTION));
        ops
    }

    fn supports(&self, call: &Call<'_>) -> bool {
        let eight = |call: &Call<'_>| call.tensor(0).is_ok_and(|t| t.shape.dims()[3] == 8.into());
        match self.fused && call.op.name == ATTENTION {
            true => eight(call),
            false => self.inner.supports(call),
        }
    }

    fn plan(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Plan>, DeviceError> {
        let names = graph.nodes().iter().map(|n| n.op.name);
        PLANNED.lock().unwrap().push(names.collect());
        self.inner.plan(graph, hints)
    }

    fn planner(&self) -> Option<Arc<dyn Planner>> {
        match self.fused {
            true => None,
            false => Some(Arc::new(Gated(self.inner.planner()?))),
        }
    }

    fn finish(
        &self,
        prepared: Box<dyn Prepared>,
        hints: &PlanHints,
    ) -> Result<Box<dyn Plan>, Unfinished> {
        self.inner.finish(prepared, hints)
    }

    fn stream(&self) -> Box<dyn Stream> {
        self.inner.stream()
    }

    fn leave(&self, trail: Trail) {
        self.inner.leave(trail);
    }
}

/// Plans graphs with an input named `gated` when the gate is open.
struct Gated(Arc<dyn Planner>);

impl Planner for Gated {
    fn prepare(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Prepared>, DeviceError> {
        if graph.inputs().iter().any(|input| input.name == "gated") {
            let (state, changed) = &GATE;
            let mut state = state.lock().unwrap();
            state.1 = true;
            changed.notify_all();
            while !state.0 {
                state = changed.wait(state).unwrap();
            }
        }
        self.0.prepare(graph, hints)
    }
}

struct OddBackend {
    fused: bool,
}

impl Backend for OddBackend {
    fn name(&self) -> &'static str {
        CpuBackend.name()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        CpuBackend.devices()
    }

    fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        let inner = CpuBackend.open(id, cores)?;
        let fused = self.fused;
        Ok(Rc::new(Odd { inner, fused }))
    }
}

static FUSED: &[&dyn Backend] = &[&OddBackend { fused: true }];
static GATED: &[&dyn Backend] = &[&OddBackend { fused: false }];

fn gated(dims: &[usize]) -> Graph {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("gated", spec(DType::F32, dims)).unwrap();
    let y = g.add(x, x).unwrap();
    g.finish(&[y]).unwrap()
}

#[tokio::test]
async fn a_plan_that_takes_long_holds_up_nobody() {
    let host = worker_with(64 * MIB, Registry::of(GATED).unwrap());
    let one_plan = v1::OpenSessionRequest {
        max_plans: 2,
        ..v1::OpenSessionRequest::default()
    };
    let client = Client::open_with(&host, one_plan).await;
    let other = Client::open(&host).await;
    let slow = client.try_compile(hotcell_graph::wire::encode(&gated(&[4])));
    let beside = async {
        // Until it is being planned.
        let came = tokio::task::spawn_blocking(|| {
            let (state, changed) = &GATE;
            let mut state = state.lock().unwrap();
            while !state.1 {
                state = changed.wait(state).unwrap();
            }
        });
        came.await.unwrap();
        // The engine serves everybody meanwhile, the same session too.
        for who in [&client, &other] {
            let plan = who.compile(&add_graph(&[4])).await;
            for _ in 0..20 {
                let one = f32s(&[1.0; 4]);
                let request = call(&plan, vec![data(one.clone()), data(one)], vec![inline()]);
                who.execute(request).await.unwrap();
            }
        }
        // Nothing of it is there before it is there.
        let plans = client.list().await.plans.len();
        let (state, changed) = &GATE;
        state.lock().unwrap().0 = true;
        changed.notify_all();
        plans
    };
    let both = async { tokio::join!(slow, beside) };
    let both = tokio::time::timeout(Duration::from_secs(60), both).await;
    let (made, plans) = both.unwrap();
    assert_eq!(plans, 1);
    let made = made.unwrap();
    let request = call(
        &made.plan.unwrap(),
        vec![data(f32s(&[1.0, 2.0, 3.0, 4.0]))],
        vec![inline()],
    );
    let response = client.execute(request).await.unwrap();
    assert_eq!(read_f32s(&sent(&response, 0)), [2.0, 4.0, 6.0, 8.0]);
    // The quota is that of when the plan comes to be.
    let more = client.try_compile(hotcell_graph::wire::encode(&gated(&[5])));
    assert_eq!(reason(more.await), Reason::QuotaExceeded);
}

/// Causal attention of heads of this depth.
fn attention(depth: usize) -> Graph {
    let mut g = GraphBuilder::new(0);
    let q = g.tensor("q", spec(DType::F32, &[1, 2, 3, depth])).unwrap();
    let y = g.scaled_dot_product_attention(q, q, q, None, None, 0.5, true, 0, 0.0);
    g.finish(&[y.unwrap()]).unwrap()
}

async fn asking(
    host: &hotcell_worker::host::Host,
    attention: FusedAttention,
) -> Result<(Client, String), Status> {
    let mut request = v1::OpenSessionRequest::default();
    request.set_fused_attention(attention);
    Client::open_told(connect(host).await, request).await
}

#[tokio::test]
async fn attention_is_fused_taken_apart_or_refused_as_a_session_asks() {
    let host = worker_with(64 * MIB, Registry::of(FUSED).unwrap());
    let device = host.engine().opened().numerics.clone();
    let mut results = Vec::new();
    for (choice, fused) in [
        (FusedAttention::Auto, true),
        (FusedAttention::On, true),
        (FusedAttention::Off, false),
    ] {
        let (client, numerics) = asking(&host, choice).await.unwrap();
        match fused {
            true => assert_eq!(numerics, device),
            false => assert_eq!(numerics, format!("{device}/attention:parts")),
        }
        PLANNED.lock().unwrap().clear();
        let plan = client.compile(&attention(8)).await;
        let planned = std::mem::take(&mut *PLANNED.lock().unwrap());
        assert!(!planned.is_empty());
        for names in planned {
            assert_eq!(names.contains(&ATTENTION), fused, "{choice:?}: {names:?}");
            assert_eq!(names.contains(&"softmax"), !fused, "{choice:?}: {names:?}");
        }
        let x: Vec<f32> = (0..48).map(|i| (i as f32).sin()).collect();
        let request = call(&plan, vec![data(f32s(&x))], vec![inline()]);
        results.push(sent(&client.execute(request).await.unwrap(), 0));
        // Heads that its kernel is not made for.
        let odd = client
            .try_compile(hotcell_graph::wire::encode(&attention(16)))
            .await;
        match choice {
            FusedAttention::On => {
                let error = Error::typed(&odd.unwrap_err()).unwrap();
                assert_eq!(error.reason(), Reason::OpUnsupported);
                assert!(error.message().contains("f32[1, 2, 3, 16]"), "{error:?}");
            }
            FusedAttention::Auto | FusedAttention::Off => assert!(odd.unwrap().plan.is_some()),
        }
    }
    assert!(results.iter().all(|r| *r == results[0]));

    // Where there is no such kernel, what demands one is refused before there is a session.
    let plain = worker(64 * MIB);
    let refused = asking(&plain, FusedAttention::On).await.err().unwrap();
    let error = Error::typed(&refused).unwrap();
    assert_eq!(error.reason(), Reason::OpUnsupported);
    assert!(error.message().contains("cpu:0"), "{error:?}");
    let (client, _) = asking(&plain, FusedAttention::Off).await.unwrap();
    client.compile(&attention(16)).await;
}
