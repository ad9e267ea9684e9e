//! Random programs of a client's: what is still in use keeps its value, what is not leaves nothing, and nobody sees another
//! session's bytes.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_client::{
    Address,
    tensor::{Compiled, DType, HostTensor, Lease, Memory, Session, SessionOptions, Stream, Tensor},
};
use hotcell_tests::cluster::Cluster;
use proptest::{prelude::*, test_runner::TestRunner};

/// Which worker is tested.
const WORKER: &[&str] = hotcell_tests::worker_tested!();

/// Elements of the tensors, by which those that fit one another are told: one, some, more than travel inside of a call.
const SIZES: [usize; 3] = [1, 100, 40_000];

/// One step of a program; numbers choose among the tensors, leases and streams that there are.
#[derive(Clone, Debug)]
enum Step {
    /// In this process.
    Host(usize, u32),
    /// Sent.
    Upload(usize, u32),
    /// To be computed.
    Full(usize, u32),
    /// Memory that nobody has written.
    Empty(usize),
    Add(usize, usize),
    Call(usize, usize),
    Eval(usize, usize),
    Later(usize),
    OnStream(usize, usize),
    Keep(usize, usize),
    Release(usize),
    Clone(usize),
    Drop(usize),
    Read(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let one = || 0usize..100;
    let value = any::<u32>;
    prop_oneof![
        1 => (one(), value()).prop_map(|(n, v)| Step::Host(n, v)),
        1 => (one(), value()).prop_map(|(n, v)| Step::Upload(n, v)),
        2 => (one(), value()).prop_map(|(n, v)| Step::Full(n, v)),
        1 => one().prop_map(Step::Empty),
        5 => (one(), one()).prop_map(|(a, b)| Step::Add(a, b)),
        3 => (one(), one()).prop_map(|(a, b)| Step::Call(a, b)),
        3 => (one(), one()).prop_map(|(a, b)| Step::Eval(a, b)),
        2 => one().prop_map(Step::Later),
        2 => (one(), one()).prop_map(|(a, s)| Step::OnStream(a, s)),
        2 => (one(), one()).prop_map(|(a, b)| Step::Keep(a, b)),
        2 => one().prop_map(Step::Release),
        2 => one().prop_map(Step::Clone),
        5 => one().prop_map(Step::Drop),
        2 => one().prop_map(Step::Read),
    ]
}

/// A tensor, how many elements it has, and what each of them is.
type Known = (Tensor, usize, u32);

/// A client: a session, and what programs share.
struct Client {
    session: Session,
    sum: Compiled,
    streams: [Stream; 2],
}

impl Client {
    async fn open(cluster: &Cluster, relayed: bool) -> Self {
        let address: Address = format!("unix:{}", cluster.socket.display())
            .parse()
            .unwrap();
        let options = SessionOptions {
            relayed,
            ..Default::default()
        };
        let session = Session::open(&address, options).await.unwrap();
        assert_eq!(session.is_direct(), !relayed);
        Self {
            sum: session.compile(|args| vec![&args[0] + &args[1]]),
            streams: [session.stream(), session.stream()],
            session,
        }
    }

    /// Runs a program and forgets all it made. Each tensor is remembered with its size and the value of all its elements.
    async fn run(&self, steps: &[Step]) -> Memory {
        let session = &self.session;
        let mut there: Vec<Known> = Vec::new();
        let mut leases: Vec<(Lease, Vec<Known>)> = Vec::new();
        for step in steps {
            let len = there.len();
            // A second one of the same size: at worst the first.
            let pair = |a: usize, b: usize| {
                let first = a % len;
                let fits = |i: &usize| there[*i].1 == there[first].1;
                let second = (0..len).map(|i| (b + i) % len).find(fits);
                (first, second.unwrap_or(first))
            };
            match *step {
                Step::Host(size, value) => {
                    let n = SIZES[size % SIZES.len()];
                    let tensor = session.tensor(&vec![value; n], &[n]).unwrap();
                    there.push((tensor, n, value));
                }
                Step::Upload(size, value) => {
                    let n = SIZES[size % SIZES.len()];
                    let data = HostTensor::from_slice(&vec![value; n], &[n]).unwrap();
                    there.push((session.upload(&data).await.unwrap(), n, value));
                }
                Step::Full(size, value) => {
                    let n = SIZES[size % SIZES.len()];
                    there.push((session.full(value, &[n]), n, value));
                }
                Step::Empty(size) => {
                    let n = SIZES[size % SIZES.len()];
                    let empty = session.empty(DType::U32, &[n]).await.unwrap();
                    there.push((empty, n, 0));
                }
                Step::Release(lease) if !leases.is_empty() => {
                    let (lease, kept) = leases.swap_remove(lease % leases.len());
                    for (tensor, n, value) in &kept {
                        check(tensor, *n, *value).await;
                    }
                    drop(kept);
                    lease.release();
                }
                _ if len == 0 => {}
                Step::Add(a, b) => {
                    let (a, b) = pair(a, b);
                    let sum = &there[a].0 + &there[b].0;
                    there.push((sum, there[a].1, there[a].2.wrapping_add(there[b].2)));
                }
                Step::Call(a, b) => {
                    let (a, b) = pair(a, b);
                    let arguments = [there[a].0.clone(), there[b].0.clone()];
                    let made = self.sum.call_eval(&arguments).await.unwrap();
                    let value = there[a].2.wrapping_add(there[b].2);
                    there.push((made[0].clone(), there[a].1, value));
                }
                Step::Eval(a, b) => {
                    let both = [there[a % len].0.clone(), there[b % len].0.clone()];
                    session.eval(&both).await.unwrap();
                }
                Step::Later(a) => {
                    let one = std::slice::from_ref(&there[a % len].0);
                    session.async_eval(one).await.unwrap();
                }
                Step::OnStream(a, stream) => {
                    let one = std::slice::from_ref(&there[a % len].0);
                    let stream = &self.streams[stream % self.streams.len()];
                    stream.async_eval(one).await.unwrap();
                }
                Step::Keep(a, b) => {
                    let some = [there[a % len].clone(), there[b % len].clone()];
                    let tensors = some.each_ref().map(|(tensor, ..)| tensor.clone());
                    let lease = session.keep(&tensors).await.unwrap();
                    leases.push((lease, some.into()));
                }
                Step::Release(_) => {}
                Step::Clone(a) => there.push(there[a % len].clone()),
                Step::Drop(a) => drop(there.swap_remove(a % len)),
                Step::Read(a) => {
                    let (tensor, n, value) = &there[a % len];
                    check(tensor, *n, *value).await;
                }
            }
        }
        // All that is left is still right.
        for (tensor, n, value) in &there {
            check(tensor, *n, *value).await;
        }
        drop((there, leases));
        session.synchronize().await.unwrap();
        // What was dropped is freed when this returns, whoever reported it.
        session.flush().await.unwrap();
        session.memory().await.unwrap()
    }
}

async fn check(tensor: &Tensor, n: usize, value: u32) {
    let values = tensor.to_vec::<u32>().await.unwrap();
    let wrong = values.iter().position(|v| *v != value);
    assert_eq!(
        (values.len(), wrong),
        (n, None),
        "all of it must be {value}"
    );
}

#[test]
fn programs_leave_nothing_and_lose_nothing_and_see_nobody_else() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (_cluster, one, two) = runtime.block_on(async {
        let cluster = Cluster::ready_with(WORKER).await.unwrap();
        // Both on one worker: memory that one gives back may be the other's next.
        let one = Client::open(&cluster, false).await;
        let two = Client::open(&cluster, true).await;
        (cluster, one, two)
    });
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let program = || prop::collection::vec(step(), 0..50);
    runner
        .run(&(program(), program()), |(first, second)| {
            runtime.block_on(async {
                // At once, and twice: what stays after the first time are plans, which the second time uses.
                let (a, b) = tokio::join!(one.run(&first), two.run(&second));
                let (c, d) = tokio::join!(one.run(&first), two.run(&second));
                for (before, after) in [(a, c), (b, d)] {
                    prop_assert_eq!(before.tensors, 0);
                    prop_assert_eq!(after.tensors, 0);
                    prop_assert_eq!((after.active, after.plans), (before.active, before.plans));
                }
                // What it keeps of memory for later it gives back when it is told to.
                for client in [&one, &two] {
                    client.session.clear_cache().await.unwrap();
                    prop_assert_eq!(client.session.memory().await.unwrap().cache, 0);
                }
                Ok(())
            })
        })
        .unwrap();
}
