//! One call of a tiny compiled function, beside a bare unary call.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use hotcell_client::tensor::{Compiled, Session, Tensor};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::cpu::{CpuDevice, path::CpuPath};
use hotcell_proto::v1::{self, tensors_client::TensorsClient};
use hotcell_tests::bench::{Goal, figure};
use tonic::{Streaming, transport::Channel};

use crate::{Bound, bare::Bare, typical};

const ROUNDS: usize = 15;
const CALLS: usize = 200;

/// Prints the figures.
pub async fn measure() -> Result<()> {
    let cluster = crate::cluster().await?;
    let relayed = Tiny::new(crate::session(&cluster, true).await?).await?;
    let direct = Tiny::new(crate::session(&cluster, false).await?).await?;
    let bare = Bare::start().await?;
    let mut client = bare.client().await?;
    let mut plan = plan()?;
    plan.run()?;
    let mut alone = Vec::new();
    let (mut of_bare, mut of_relay, mut of_direct, mut freeing) = (vec![], vec![], vec![], vec![]);
    let slow = crate::session(&cluster, true).await?;
    let big = slow.empty(DType::U8, &[64 << 20]).await?;
    let (mut of_idle, mut of_beside) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        of_idle.extend(relayed.calls(true).await?);
        let held = unread(&slow).await?;
        of_beside.extend(relayed.calls(true).await?);
        drop(held);
        of_bare.extend(bare_calls(&mut client).await?);
        of_relay.extend(relayed.calls(true).await?);
        of_direct.extend(direct.calls(true).await?);
        freeing.extend(direct.calls(false).await?);
        for _ in 0..CALLS {
            alone.push(plan.run()? * 1e6);
        }
    }
    let [bare, relay, direct, freeing] = [of_bare, of_relay, of_direct, freeing].map(typical);
    println!(
        "a call: bare {bare:.1} us, relay {relay:.1}, direct {direct:.1}, direct with results dropped at once {freeing:.1}; the plan alone, in this process, {:.1}",
        typical(alone)
    );
    let unit = "of a bare call's time";
    figure("call_relay", relay / bare, unit, Goal::AtMost(2.5));
    figure("call_direct", direct / bare, unit, Goal::AtMost(1.3));
    figure("call_direct_freeing", freeing / bare, unit, Goal::None);
    drop(big);
    let (idle, beside) = (typical(of_idle), typical(of_beside));
    println!(
        "a call through the relay: {idle:.1} us, beside another session's unread download {beside:.1}"
    );
    figure(
        "call_beside_unread",
        beside / idle,
        "of the time without it",
        Goal::AtMost(1.2),
    );
    Ok(())
}

/// A download of the session's only tensor, begun and not read.
async fn unread(session: &Session) -> Result<Streaming<v1::DownloadChunk>> {
    let list = session.list().await?;
    let only = list.tensors.first().context("no tensor")?;
    let request = v1::DownloadRequest {
        tensor: only.handle.clone(),
        ..v1::DownloadRequest::default()
    };
    let mut chunks = session.raw_download(request).await?;
    chunks.message().await?.context("an empty download")?;
    Ok(chunks)
}

/// The same plan on a device of this process.
fn plan() -> Result<Bound> {
    let device = CpuDevice::with_path(crate::threads() as u32, CpuPath::detect())?;
    let mut graph = GraphBuilder::new(0);
    let spec = TensorSpec::new(DType::F32, Shape::fixed(&[4])?)?;
    let (x, one) = (graph.tensor("x", spec)?, 1.0f32.to_le_bytes().to_vec());
    let one = graph.literal(DType::F32, Shape::default(), &one)?;
    let sum = graph.add(x, one)?;
    Bound::new(&device, &graph.finish(&[sum])?)
}

/// `x + 1` of four numbers that are on the worker.
struct Tiny {
    session: Session,
    function: Compiled,
    x: Tensor,
}

impl Tiny {
    async fn new(session: Session) -> Result<Self> {
        let function = session.compile(|x| x.iter().map(|x| x + 1.0).collect());
        let x = session.tensor(&[1.0f32, 2.0, 3.0, 4.0], &[4])? * 1.0;
        x.eval().await?;
        let results = function.call_eval(std::slice::from_ref(&x)).await?;
        let values = results[0].to_vec::<f32>().await?;
        ensure!(values == [2.0, 3.0, 4.0, 5.0], "x + 1 is not x + 1");
        Ok(Self {
            session,
            function,
            x,
        })
    }

    /// Microseconds of each call. Results that are dropped at once are freed by calls of their own, beside the next.
    async fn calls(&self, keep: bool) -> Result<Vec<f64>> {
        let arguments = [self.x.clone()];
        let (mut times, mut kept) = (Vec::new(), Vec::new());
        for _ in 0..CALLS {
            let start = Instant::now();
            let results = self.function.call_eval(&arguments).await?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            if keep {
                kept.push(results);
            }
        }
        drop(kept);
        self.session.flush().await?;
        Ok(times)
    }
}

async fn bare_calls(client: &mut TensorsClient<Channel>) -> Result<Vec<f64>> {
    let handle = || v1::Handle {
        epoch: 1,
        id: vec![7; 16],
    };
    let mut times = Vec::new();
    for _ in 0..CALLS {
        let start = Instant::now();
        let request = v1::ExecuteRequest {
            plan: Some(handle()),
            inputs: vec![v1::Operand {
                kind: Some(v1::operand::Kind::Tensor(handle())),
            }],
            outputs: vec![v1::OutputWish {
                kind: Some(v1::output_wish::Kind::Id(vec![7; 16])),
            }],
            ..v1::ExecuteRequest::default()
        };
        let answer = client.execute(request).await?.into_inner();
        times.push(start.elapsed().as_secs_f64() * 1e6);
        ensure!(answer.outputs.len() == 1, "no answer");
    }
    Ok(times)
}
