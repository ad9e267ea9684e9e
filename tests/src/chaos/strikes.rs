//! What is done to workers in a chaotic run.

use std::time::{Duration, Instant};

use anyhow::Result;
use hotcell_client::{Client, v1};
use rustix::process::Signal;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::{Chance, GRACE, Run};
use crate::{cluster::signal_pid, fault::Fault};

/// One way to break a worker.
#[derive(Clone, Copy, Debug)]
enum Strike {
    /// A signal from outside.
    Signal(&'static str, Signal),
    /// Stopped, and let go on before it counts as hung.
    Pause,
    /// By itself.
    Fault(&'static str, Fault),
}

/// Twice what shall come twice as often.
const STRIKES: [Strike; 20] = [
    Strike::Signal("sigkill", Signal::KILL),
    Strike::Signal("sigkill", Signal::KILL),
    Strike::Signal("sigsegv", Signal::SEGV),
    Strike::Signal("sigabrt", Signal::ABORT),
    Strike::Signal("sigstop for good", Signal::STOP),
    Strike::Pause,
    Strike::Pause,
    Strike::Fault("segfault", Fault::Segfault),
    Strike::Fault("segfault", Fault::Segfault),
    Strike::Fault("abort", Fault::Abort),
    Strike::Fault("exit 0", Fault::ExitZero),
    Strike::Fault("panic", Fault::Panic),
    Strike::Fault("hang in a kernel", Fault::HangInKernel),
    Strike::Fault("black box scribbled over", Fault::ScribbleBlackBox),
    Strike::Fault("garbage on tokens", Fault::GarbageOnTokens),
    Strike::Fault("garbage on control", Fault::GarbageOnControl),
    Strike::Fault("tokens closed", Fault::CloseTokens),
    Strike::Fault("late", Fault::Late),
    Strike::Fault("late", Fault::Late),
    Strike::Fault("fork", Fault::Fork),
];

impl Strike {
    fn name(self) -> &'static str {
        match self {
            Strike::Signal(name, _) | Strike::Fault(name, _) => name,
            Strike::Pause => "sigstop for a while",
        }
    }
}

/// Breaks workers for a while.
pub(super) async fn strike(
    run: &Run,
    client: &Client,
    chance: &mut Chance,
    time: Duration,
    every: Duration,
) -> Result<()> {
    let start = Instant::now();
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while start.elapsed() < time {
        ticks.tick().await;
        let asked = Instant::now();
        let workers = match timeout(GRACE, client.workers()).await {
            Ok(workers) => workers?,
            Err(_) => {
                run.wrong(format!("the scheduler does not answer for {GRACE:?}"));
                continue;
            }
        };
        let answered = asked.elapsed().as_secs_f64() * 1e3;
        {
            let mut outcome = run.outcome();
            outcome.slowest_answer = outcome.slowest_answer.max(answered);
        }
        // Those that serve; one that is only being started would take an order for its death.
        let serving: Vec<u32> = workers
            .iter()
            .filter(|w| w.state() == v1::WorkerState::Ready && !w.id.contains(".solo"))
            .map(|w| w.pid)
            .collect();
        let (Some(&pid), Some(&strike)) = (chance.pick(&serving), chance.pick(&STRIKES)) else {
            continue;
        };
        let pause = chance.ms(20, 300);
        // It may be gone meanwhile.
        let struck = match strike {
            Strike::Signal(_, signal) => signal_pid(pid, signal).is_ok(),
            Strike::Fault(_, fault) => fault.order(pid).is_ok(),
            Strike::Pause => {
                tokio::spawn(async move {
                    sleep(pause).await;
                    let _ = signal_pid(pid, Signal::CONT);
                });
                signal_pid(pid, Signal::STOP).is_ok()
            }
        };
        if struck {
            *run.outcome().faults.entry(strike.name()).or_default() += 1;
        }
    }
    Ok(())
}
