//! Saved graphs computed in the memory of who asks: the same bits as through copies, and whoever takes the memory away has
//! an error of its own, and no worker.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hotcell_client::{
    Address, Client, Error, Reason, SaveGraph,
    tensor::{Session, SessionOptions, Tensor},
    v1,
};
use hotcell_gateways::inference::{
    InferParameter, ModelInferRequest, SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryUnregisterRequest,
    grpc_inference_service_client::GrpcInferenceServiceClient,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
};
use hotcell_tests::cluster::{Cluster, free_address, signal_pid};
use rustix::process::Signal;
use tonic::{Status, transport::Channel};

type Oip = GrpcInferenceServiceClient<Channel>;

/// Elements of a tensor, and its bytes.
const COUNT: usize = 2 << 20;
const SIZE: usize = 4 * COUNT;

struct Host {
    cluster: Cluster,
    client: Client,
    oip: Oip,
}

/// A scheduler that has `-x` saved as `negative`.
async fn host(more: &[&str]) -> Host {
    let free = free_address().unwrap();
    let listen = free.to_string();
    let mut arguments = vec!["--listen", &listen, "--restart-backoff", "1ms"];
    arguments.extend(more);
    let cluster = Cluster::start(&arguments).await.unwrap();
    let ready = |workers: &[v1::WorkerInfo]| {
        !workers.is_empty() && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
    };
    cluster.workers(ready).await.unwrap();
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    let client = cluster.client().await.unwrap();
    let session = Session::open(&address, SessionOptions::default())
        .await
        .unwrap();
    let example = session.tensor(&vec![0f32; COUNT], &[COUNT]).unwrap();
    let negative = session.compile(|x: &[Tensor]| vec![-&x[0]]);
    let arguments = [("x", &example)];
    let saving = SaveGraph::named("negative");
    let saved = negative.save(&client, &saving, &arguments, None);
    saved.await.unwrap();
    let oip = Oip::connect(format!("http://{free}")).await.unwrap();
    Host {
        cluster,
        client,
        oip,
    }
}

/// A file of shared memory, gone with this.
struct Memory(String);

impl Memory {
    fn new(what: &str, bytes: &[u8]) -> Self {
        let memory = Self(format!("hotcell-test-{}-{what}", std::process::id()));
        fs::write(memory.path(), bytes).unwrap();
        memory
    }

    fn path(&self) -> String {
        format!("/dev/shm/{}", self.0)
    }

    fn open(&self) -> fs::File {
        let mut options = fs::File::options();
        options.read(true).write(true).open(self.path()).unwrap()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path());
    }
}

impl Host {
    async fn register(&self, name: &str, memory: &Memory, size: usize) {
        let asked = SystemSharedMemoryRegisterRequest {
            name: name.to_owned(),
            key: format!("/{}", memory.0),
            offset: 0,
            byte_size: size as u64,
        };
        let registered = self.oip.clone().system_shared_memory_register(asked).await;
        registered.unwrap();
    }

    async fn unregister(&self, name: &str) {
        let asked = SystemSharedMemoryUnregisterRequest {
            name: name.to_owned(),
        };
        let done = self
            .oip
            .clone()
            .system_shared_memory_unregister(asked)
            .await;
        done.unwrap();
    }

    async fn pid(&self) -> u32 {
        self.client.workers().await.unwrap()[0].pid
    }

    /// How often a worker's memory maps name this file.
    async fn mapped(&self, memory: &Memory) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid().await)).unwrap();
        maps.lines().filter(|line| line.contains(&memory.0)).count()
    }
}

fn place(region: &str, offset: usize) -> HashMap<String, InferParameter> {
    let number = |n: usize| ParameterChoice::Int64Param(i64::try_from(n).unwrap());
    let region = ParameterChoice::StringParam(region.to_owned());
    let all = [
        ("shared_memory_region", region),
        ("shared_memory_offset", number(offset)),
        ("shared_memory_byte_size", number(SIZE)),
    ];
    let parameter = |choice| InferParameter {
        parameter_choice: Some(choice),
    };
    all.into_iter()
        .map(|(name, choice)| (name.to_owned(), parameter(choice)))
        .collect()
}

async fn call(oip: &Oip, from: (&str, usize), to: (&str, usize)) -> Result<(), Status> {
    let request = ModelInferRequest {
        model_name: "negative".to_owned(),
        inputs: vec![InferInputTensor {
            name: "x".to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![COUNT as i64],
            parameters: place(from.0, from.1),
            ..InferInputTensor::default()
        }],
        outputs: vec![InferRequestedOutputTensor {
            name: "output_0".to_owned(),
            parameters: place(to.0, to.1),
        }],
        ..ModelInferRequest::default()
    };
    oip.clone().model_infer(request).await.map(|_| ())
}

fn reason(status: &Status) -> Reason {
    Error::from_status(status).reason()
}

/// Bits of all kinds, NaNs among them.
fn input(seed: u32) -> Vec<u8> {
    let word = |i: u32| (i ^ seed).wrapping_mul(0x9e37_79b9).to_le_bytes();
    (0..COUNT as u32).flat_map(word).collect()
}

fn negated(input: &[u8]) -> Vec<u8> {
    let mut all = input.to_vec();
    all.iter_mut().skip(3).step_by(4).for_each(|b| *b ^= 0x80);
    all
}

fn read(memory: &Memory, at: usize) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    memory.open().read_exact_at(&mut bytes, at as u64).unwrap();
    bytes
}

#[tokio::test]
async fn in_place_and_copied_are_the_same_bits_and_only_whole_places_are_mapped() {
    let host = host(&[]).await;
    let x = input(1);
    let from = Memory::new("same-in", &[&x[..], &[0; 64]].concat());
    let to = Memory::new("same-out", &vec![9; 2 * SIZE]);
    host.register("in", &from, SIZE + 64).await;
    host.register("out", &to, 2 * SIZE).await;
    for turn in 0..3 {
        to.open().write_all_at(&vec![9; 2 * SIZE], 0).unwrap();
        call(&host.oip, ("in", 0), ("out", 64)).await.unwrap();
        assert!(read(&to, 64) == negated(&x), "turn {turn}");
        let around = fs::read(to.path()).unwrap();
        assert!(
            around[..64]
                .iter()
                .chain(&around[64 + SIZE..])
                .all(|b| *b == 9)
        );
        // One mapping each, however often.
        assert_eq!((host.mapped(&from).await, host.mapped(&to).await), (1, 1));
    }
    // Not where an element could be: copied, with no further mapping of it.
    call(&host.oip, ("in", 0), ("out", 4)).await.unwrap();
    assert!(read(&to, 4) == negated(&x));
    assert_eq!(host.mapped(&to).await, 1);
    // Over what it reads, in part or as a whole, under another name: computed elsewhere first.
    let both = Memory::new("same-both", &vec![0; SIZE + 4096]);
    host.register("a", &both, SIZE + 4096).await;
    host.register("b", &both, SIZE + 4096).await;
    for (at, to_at) in [(0, 0), (4096, 0), (0, 4096)] {
        both.open().write_all_at(&x, at as u64).unwrap();
        call(&host.oip, ("a", at), ("b", to_at)).await.unwrap();
        assert!(read(&both, to_at) == negated(&x), "{at} {to_at}");
    }
    // Side by side in one file, both in place.
    let halves = Memory::new("same-halves", &[&x[..], &vec![1; SIZE][..]].concat());
    host.register("halves", &halves, 2 * SIZE).await;
    call(&host.oip, ("halves", 0), ("halves", SIZE))
        .await
        .unwrap();
    assert!(read(&halves, SIZE) == negated(&x) && read(&halves, 0) == x);
    assert_eq!(host.mapped(&halves).await, 2);
    // A file without pages is not filled by a worker.
    let sparse = Memory::new("same-sparse", &[]);
    sparse.open().set_len(SIZE as u64).unwrap();
    host.register("sparse", &sparse, SIZE).await;
    call(&host.oip, ("sparse", 0), ("out", 64)).await.unwrap();
    assert!(read(&to, 64).chunks(4).all(|x| x == [0, 0, 0, 0x80]));
    assert_eq!(host.mapped(&sparse).await, 0);
    // Registered no more, nothing is kept.
    host.unregister("in").await;
    for _ in 0..200 {
        if host.mapped(&from).await == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the mapping stays");
}

#[tokio::test]
async fn who_shortens_its_memory_under_a_call_ends_no_worker_and_no_call_of_others() {
    let host = host(&[]).await;
    let pid = host.pid().await;
    let (x, y) = (input(2), input(3));
    let other_in = Memory::new("calm-in", &y);
    let other_out = Memory::new("calm-out", &vec![0; SIZE]);
    host.register("calm-in", &other_in, SIZE).await;
    host.register("calm-out", &other_out, SIZE).await;
    let over = Arc::new(AtomicBool::new(false));
    let (oip, stop) = (host.oip.clone(), Arc::clone(&over));
    let calm = tokio::spawn(async move {
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            call(&oip, ("calm-in", 0), ("calm-out", 0)).await.unwrap();
            count += 1;
        }
        count
    });
    let (mut right, mut changed) = (0, 0);
    for turn in 0..60u64 {
        let from = Memory::new("cut-in", &x);
        let to = Memory::new("cut-out", &vec![0; SIZE]);
        host.register("in", &from, SIZE).await;
        host.register("out", &to, SIZE).await;
        // Mapped before: the second call is struck in its computing.
        call(&host.oip, ("in", 0), ("out", 0)).await.unwrap();
        let cut = [&from, &to][turn as usize % 2].open();
        let cutting = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(100 * (turn % 40)));
            cut.set_len(0).unwrap();
        });
        match call(&host.oip, ("in", 0), ("out", 0)).await {
            Ok(()) => right += 1,
            Err(status) => {
                assert_eq!(reason(&status), Reason::RegionChanged, "{status}");
                changed += 1;
            }
        }
        cutting.join().unwrap();
        if turn % 2 == 0 && changed == 0 {
            assert!(read(&to, 0) == negated(&x));
        }
        host.unregister("in").await;
        host.unregister("out").await;
    }
    over.store(true, Ordering::Relaxed);
    assert!(calm.await.unwrap() > 0);
    assert!(read(&other_out, 0) == negated(&y));
    assert!(changed > 0, "{right} {changed}");
    assert_eq!(host.pid().await, pid);
    assert!(host.client.crashes().await.unwrap().is_empty());
    println!("{right} right, {changed} changed");
}

#[tokio::test]
async fn memory_that_is_another_or_left_under_a_call_is_told_so() {
    let host = host(&[]).await;
    let x = input(4);
    let from = Memory::new("swap-in", &x);
    let to = Memory::new("swap-out", &vec![0; SIZE]);
    host.register("in", &from, SIZE).await;
    host.register("out", &to, SIZE).await;
    call(&host.oip, ("in", 0), ("out", 0)).await.unwrap();
    fs::remove_file(from.path()).unwrap();
    fs::write(from.path(), &x).unwrap();
    let status = call(&host.oip, ("in", 0), ("out", 0)).await.unwrap_err();
    assert_eq!(reason(&status), Reason::RegionChanged, "{status}");
    host.unregister("in").await;
    host.register("in", &from, SIZE).await;
    // Left in the middle, a call ends as it would have.
    for turn in 0..10u64 {
        to.open().write_all_at(&vec![0; SIZE], 0).unwrap();
        let oip = host.oip.clone();
        let running = tokio::spawn(async move { call(&oip, ("in", 0), ("out", 0)).await });
        tokio::time::sleep(Duration::from_micros(300 * turn)).await;
        host.unregister("in").await;
        match running.await.unwrap() {
            Ok(()) => assert!(read(&to, 0) == negated(&x)),
            Err(status) => assert_eq!(reason(&status), Reason::RegionNotFound, "{status}"),
        }
        host.register("in", &from, SIZE).await;
    }
}

#[tokio::test]
async fn a_worker_that_dies_under_calls_in_place_is_not_noticed() {
    let host = host(&["--devices", "cpu:2"]).await;
    let x = input(5);
    let from = Memory::new("die-in", &x);
    let to = Memory::new("die-out", &vec![0; SIZE]);
    host.register("in", &from, SIZE).await;
    host.register("out", &to, SIZE).await;
    let mut deaths = 0;
    while deaths < 5 {
        let workers = host.client.workers().await.unwrap();
        let ready = workers
            .iter()
            .filter(|w| w.state() == v1::WorkerState::Ready && !w.id.contains('.'));
        let ready: Vec<_> = ready.map(|w| w.pid).collect();
        to.open().write_all_at(&vec![0; SIZE], 0).unwrap();
        let oip = host.oip.clone();
        let running = tokio::spawn(async move { call(&oip, ("in", 0), ("out", 0)).await });
        if let [one, _, ..] = ready[..] {
            tokio::time::sleep(Duration::from_micros(700 * deaths)).await;
            signal_pid(one, Signal::KILL).unwrap();
            deaths += 1;
        }
        running.await.unwrap().unwrap();
        assert!(read(&to, 0) == negated(&x) && read(&from, 0) == x);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    drop(host.cluster);
}
