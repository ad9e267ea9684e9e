//! 256 MiB to a worker and back: through the relay, by a connection of one's own, and by a descriptor.

use std::{hint::black_box, time::Instant};

use anyhow::{Context, Result, ensure};
use bytes::{Bytes, BytesMut};
use hotcell_client::tensor::{Compiled, HostTensor, Session, SharedTensor, Tensor};
use hotcell_graph::{DType, Shape, TensorSpec};
use hotcell_proto::{
    limits,
    v1::{self, tensors_client::TensorsClient, upload_target},
};
use hotcell_tests::bench::{Goal, figure};
use tonic::transport::Channel;

use crate::{bare::Bare, typical};

/// Bytes of a transfer.
pub const SIZE: usize = 256 << 20;
const ROUNDS: usize = 9;

/// Seconds of transfers.
#[derive(Default)]
struct Times {
    up: Vec<f64>,
    down: Vec<f64>,
    /// Into memory that was there before.
    into: Vec<f64>,
}

impl Times {
    /// GB/s.
    fn speeds(self) -> (f64, f64) {
        (speed(self.up), speed(self.down))
    }
}

/// GB/s.
fn speed(times: Vec<f64>) -> f64 {
    SIZE as f64 / typical(times) / 1e9
}

/// Prints the figures.
pub async fn measure() -> Result<()> {
    let cluster = crate::cluster().await?;
    let relayed = crate::session(&cluster, true).await?;
    let direct = crate::session(&cluster, false).await?;
    let bare = Bare::start().await?;
    let mut client = bare.client().await?;
    let spec = TensorSpec::new(DType::U8, Shape::fixed(&[SIZE])?)?;
    let byte = |i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8;
    let bytes: Vec<u8> = (0..SIZE as u32).map(byte).collect();
    let data = HostTensor::new(spec, bytes)?;
    let there = [relayed.upload(&data).await?, direct.upload(&data).await?];
    for tensor in &there {
        ensure!(tensor.fetch().await? == data, "the bytes came back changed");
    }
    let shared = direct.shared(DType::U8, &[SIZE]).await?;
    shared.write(0, data.bytes())?;
    ensure!(
        shared.tensor().fetch().await? == data,
        "the worker sees other bytes"
    );
    let mut own = vec![0u8; SIZE];
    let in_place = InPlace::new(&direct, &shared, &there[1]).await?;

    let (mut by_relay, mut by_own, mut by_descriptor) = Default::default();
    let (mut kept, mut drained, mut copied) = Default::default();
    let mut in_worker = InWorker::default();
    for _ in 0..ROUNDS {
        for (keep, times) in [(true, &mut kept), (false, &mut drained)] {
            let times: &mut Times = times;
            times
                .up
                .push(bare_upload(&mut client, data.bytes(), keep).await?);
            times.down.push(bare_download(&mut client, keep).await?);
        }
        let roads = [(&relayed, &mut by_relay), (&direct, &mut by_own)];
        for ((session, times), tensor) in roads.into_iter().zip(&there) {
            let times: &mut Times = times;
            times.up.push(upload(session, &data).await?);
            times.down.push(download(tensor).await?);
            times.into.push(download_into(tensor, &mut own).await?);
        }
        copy(
            &shared,
            data.bytes(),
            &mut own,
            &mut by_descriptor,
            &mut copied,
        )?;
        in_place.measure(&mut in_worker).await?;
    }
    let (kept, drained) = (kept.speeds(), drained.speeds());
    println!(
        "bare tonic stream: {:.2} GB/s up, {:.2} down; that keeps nothing: {:.2} up, {:.2} down",
        kept.0, kept.1, drained.0, drained.1
    );
    for (name, mut times, least) in [("relay", by_relay, 0.5), ("direct", by_own, 0.9)] {
        let into = speed(std::mem::take(&mut times.into));
        let (up, down) = times.speeds();
        println!("{name}: {up:.2} GB/s up, {down:.2} down, {into:.2} into the caller's memory");
        let (unit, draining) = ("of bare tonic", "of bare tonic that keeps nothing");
        figure(
            &format!("upload_{name}"),
            up / kept.0,
            unit,
            Goal::AtLeast(least),
        );
        figure(
            &format!("download_{name}"),
            down / kept.1,
            unit,
            Goal::AtLeast(least),
        );
        figure(
            &format!("upload_{name}_draining"),
            up / drained.0,
            draining,
            Goal::None,
        );
        figure(
            &format!("download_{name}_draining"),
            down / drained.1,
            draining,
            Goal::None,
        );
        figure(
            &format!("download_{name}_into"),
            into / drained.1,
            draining,
            Goal::AtLeast(least),
        );
    }
    let ((up, down), (to, from)) = (by_descriptor.speeds(), copied.speeds());
    println!(
        "descriptor, this process's part: {up:.2} GB/s up, {down:.2} down; memcpy {to:.2}, {from:.2}"
    );
    let InWorker {
        reads,
        reads_own,
        assigns,
    } = in_worker;
    let [reads, reads_own, assigns] = [reads, reads_own, assigns].map(speed);
    println!(
        "descriptor, the worker's part: a call that reads it {reads:.2} GB/s, its own memory {reads_own:.2}; an assignment {assigns:.2}"
    );
    figure(
        "execute_descriptor",
        reads / reads_own,
        "of a call that reads the worker's own memory",
        Goal::AtLeast(0.8),
    );
    // Computed privately and copied: two passes over memory.
    figure("assign_descriptor", assigns / from, "of memcpy", Goal::None);
    figure(
        "upload_descriptor",
        up / to,
        "of memcpy",
        Goal::AtLeast(0.8),
    );
    figure(
        "download_descriptor",
        down / from,
        "of memcpy",
        Goal::AtLeast(0.8),
    );
    Ok(())
}

/// Calls that read shared memory, the worker's own, and write into the shared one.
struct InPlace<'a> {
    greatest: Compiled,
    shared: &'a SharedTensor,
    own: &'a Tensor,
}

/// Seconds of such calls.
#[derive(Default)]
struct InWorker {
    reads: Vec<f64>,
    reads_own: Vec<f64>,
    assigns: Vec<f64>,
}

impl<'a> InPlace<'a> {
    async fn new(session: &Session, shared: &'a SharedTensor, own: &'a Tensor) -> Result<Self> {
        let greatest = session.compile(|x| x.iter().map(|x| x.max(&[], false)).collect());
        let made = Self {
            greatest,
            shared,
            own,
        };
        let values = [made.read(shared.tensor()).await?, made.read(own).await?];
        ensure!(values[0].1 == values[1].1, "the worker reads other bytes");
        Ok(made)
    }

    /// Seconds, and what came out.
    async fn read(&self, x: &Tensor) -> Result<(f64, u8)> {
        let start = Instant::now();
        let result = self.greatest.call_eval(std::slice::from_ref(x)).await?;
        let time = start.elapsed().as_secs_f64();
        Ok((time, result[0].item::<u8>().await?))
    }

    async fn measure(&self, times: &mut InWorker) -> Result<()> {
        times.reads.push(self.read(self.shared.tensor()).await?.0);
        times.reads_own.push(self.read(self.own).await?.0);
        let start = Instant::now();
        self.shared.assign(self.own).await?;
        times.assigns.push(start.elapsed().as_secs_f64());
        Ok(())
    }
}

async fn upload(session: &Session, data: &HostTensor) -> Result<f64> {
    let start = Instant::now();
    let tensor = session.upload(data).await?;
    let time = start.elapsed().as_secs_f64();
    drop(tensor);
    session.flush().await?;
    Ok(time)
}

async fn download(tensor: &Tensor) -> Result<f64> {
    let start = Instant::now();
    let data = tensor.fetch().await?;
    let time = start.elapsed().as_secs_f64();
    ensure!(data.bytes().len() == SIZE, "bytes are missing");
    Ok(time)
}

async fn download_into(tensor: &Tensor, own: &mut [u8]) -> Result<f64> {
    let start = Instant::now();
    tensor.fetch_into(own).await?;
    Ok(start.elapsed().as_secs_f64())
}

async fn bare_upload(
    client: &mut TensorsClient<Channel>,
    bytes: &Bytes,
    keep: bool,
) -> Result<f64> {
    let target = v1::UploadTarget {
        kind: Some(upload_target::Kind::Tensor(v1::Handle::default())),
        offset: if keep { SIZE as u64 } else { 0 },
        ..v1::UploadTarget::default()
    };
    let first = v1::UploadChunk {
        target: Some(target),
        data: Bytes::new(),
    };
    let bytes = bytes.clone();
    let chunks = (0..bytes.len())
        .step_by(limits::TENSOR_CHUNK)
        .map(move |start| {
            let end = bytes.len().min(start + limits::TENSOR_CHUNK);
            v1::UploadChunk {
                target: None,
                data: bytes.slice(start..end),
            }
        });
    let start = Instant::now();
    let chunks = tokio_stream::iter(std::iter::once(first).chain(chunks));
    let answer = client.upload(chunks).await?;
    let time = start.elapsed().as_secs_f64();
    let info = answer.into_inner().tensor.context("no answer")?;
    let expected = if keep { SIZE as u64 } else { 0 };
    ensure!(info.bytes == expected, "bytes are missing");
    Ok(time)
}

async fn bare_download(client: &mut TensorsClient<Channel>, keep: bool) -> Result<f64> {
    let start = Instant::now();
    let answer = client.download(v1::DownloadRequest::default()).await?;
    let mut chunks = answer.into_inner();
    let (mut kept, mut arrived) = (BytesMut::new(), 0);
    if keep {
        kept.reserve(SIZE);
    }
    while let Some(chunk) = chunks.message().await? {
        arrived += chunk.data.len();
        if keep {
            kept.extend_from_slice(&chunk.data);
        }
    }
    let time = start.elapsed().as_secs_f64();
    ensure!(arrived == SIZE, "bytes are missing");
    black_box(kept);
    Ok(time)
}

/// Into shared memory and out of it, and the same between two pieces of this process's own.
fn copy(
    shared: &SharedTensor,
    bytes: &[u8],
    own: &mut [u8],
    by_descriptor: &mut Times,
    copied: &mut Times,
) -> Result<()> {
    let plain =
        |own: &mut [u8]| crate::seconds(|| black_box(own).copy_from_slice(black_box(bytes)));
    let start = Instant::now();
    shared.write(0, bytes)?;
    by_descriptor.up.push(start.elapsed().as_secs_f64());
    copied.up.push(plain(own));
    let start = Instant::now();
    shared.read(0, own)?;
    by_descriptor.down.push(start.elapsed().as_secs_f64());
    copied.down.push(plain(own));
    Ok(())
}
