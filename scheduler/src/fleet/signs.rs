//! Waiting for a worker that works: as long as it shows signs of life, and not longer.

use std::{pin::pin, sync::Arc, time::Duration};

use hotcell_ipc::blackbox::{Pulse, Reader};
use tokio::time::{Instant, timeout};

/// Looks while nothing comes, within the time that nothing may move.
const LOOKS: u32 = 8;

/// How long a process has stood still, by what it says and by its black box.
pub(super) struct Signs {
    blackbox: Option<Arc<Reader>>,
    pulse: Option<Pulse>,
    /// Whether movement of its engine counts.
    by_pulse: bool,
    patience: Duration,
    looked: Instant,
    stood: Duration,
}

impl Signs {
    /// Those of a process that may stand still for as long as `patience`.
    pub(super) fn new(blackbox: Option<&Arc<Reader>>, patience: Duration) -> Self {
        Self {
            blackbox: blackbox.cloned(),
            pulse: blackbox.map(|b| b.pulse()),
            by_pulse: true,
            patience,
            looked: Instant::now(),
            stood: Duration::ZERO,
        }
    }

    fn interval(&self) -> Duration {
        (self.patience / LOOKS).max(Duration::from_millis(1))
    }

    /// It said something that shows that it goes on.
    pub(super) fn shown(&mut self) {
        self.stood = Duration::ZERO;
    }

    /// Says whether movement of its engine counts, or is that of other work.
    pub(super) fn count_pulse(&mut self, counts: bool) {
        self.by_pulse = counts;
    }

    /// Whether it has stood still for too long.
    pub(super) fn is_over(&self) -> bool {
        self.stood >= self.patience
    }

    /// Takes in how things are now.
    fn look(&mut self) {
        let now = Instant::now();
        // Who overslept was stopped, or starved as much as the worker: that time says nothing about it.
        self.stood += (now - self.looked).min(2 * self.interval());
        self.looked = now;
        let pulse = self.blackbox.as_ref().map(|b| b.pulse());
        let moved = pulse
            .zip(self.pulse)
            .is_some_and(|(now, then)| now.moved_since(&then));
        self.pulse = pulse;
        if moved && self.by_pulse {
            self.shown();
        }
    }

    /// Waits for an answer; none if the process stands still for too long.
    pub(super) async fn wait<T>(&mut self, answer: impl Future<Output = T>) -> Option<T> {
        let mut answer = pin!(answer);
        loop {
            let answered = timeout(self.interval(), answer.as_mut()).await;
            self.look();
            match answered {
                Ok(answered) => return Some(answered),
                Err(_) if self.is_over() => return None,
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use hotcell_ipc::blackbox::{self, Doing, Writer};
    use tokio::time::sleep;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(8);

    fn black_box() -> (Writer, Arc<Reader>) {
        let memory = blackbox::make().unwrap();
        let writer = Writer::open(&memory, std::iter::empty()).unwrap();
        writer.doing(Doing::Loading);
        (writer, Arc::new(Reader::open(&memory).unwrap()))
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_moves_is_waited_for_and_one_that_stands_still_is_not() {
        let (writer, reader) = black_box();
        let mut signs = Signs::new(Some(&reader), PATIENCE);
        let works = async {
            for _ in 0..20 {
                sleep(PATIENCE / 2).await;
                writer.progressed();
            }
        };
        let began = Instant::now();
        assert!(signs.wait(works).await.is_some());
        assert_eq!(began.elapsed(), 10 * PATIENCE);
        // The event loop's beat is no sign that the work goes on.
        let beats = async {
            loop {
                sleep(PATIENCE / 8).await;
                writer.beat();
            }
        };
        let began = Instant::now();
        let waited = tokio::select! {
            waited = signs.wait(pending::<()>()) => waited,
            () = beats => None,
        };
        assert!(waited.is_none());
        assert!((PATIENCE..2 * PATIENCE).contains(&began.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn words_count_only_if_they_show_something() {
        let mut signs = Signs::new(None, PATIENCE);
        for _ in 0..20 {
            assert!(signs.wait(sleep(PATIENCE / 2)).await.is_some());
            signs.shown();
        }
        // It talks, and does not get on.
        let began = Instant::now();
        while signs.wait(sleep(PATIENCE / 16)).await.is_some() && !signs.is_over() {}
        assert!(began.elapsed() < 2 * PATIENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn other_work_of_the_engine_may_not_count() {
        let (writer, reader) = black_box();
        let mut signs = Signs::new(Some(&reader), PATIENCE);
        signs.count_pulse(false);
        let others = async {
            loop {
                sleep(PATIENCE / 8).await;
                writer.stepped();
            }
        };
        let waited = tokio::select! {
            waited = signs.wait(pending::<()>()) => waited,
            () = others => None,
        };
        assert!(waited.is_none());
    }
}
