//! Waiting that costs nothing while something else happens.
//!
//! A task that hears a word waits for other things too: an end, a deadline, a silence. Asking each of them at every word
//! costs more than the word does, and they almost never have an answer.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep};

/// Wakes the task, and notes for whom.
#[derive(Debug)]
struct Ring {
    rang: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl Wake for Ring {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rang.store(true, Ordering::Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        let task = task.clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// A future that is asked only when it said that there is something to ask for.
#[derive(Debug)]
pub struct Rarely<F> {
    inner: F,
    ring: Arc<Ring>,
    /// What the future wakes: `ring`.
    waker: Waker,
    /// The task that `ring` wakes, known without its lock.
    task: Option<Waker>,
}

impl<F> Rarely<F> {
    /// Has not been asked yet.
    pub fn new(inner: F) -> Self {
        let ring = Arc::new(Ring {
            rang: AtomicBool::new(true),
            task: Mutex::new(None),
        });
        Self {
            inner,
            waker: Arc::clone(&ring).into(),
            ring,
            task: None,
        }
    }

    /// The future, which is asked again next time: whoever changes it may have changed its answer.
    pub fn changed(&mut self) -> &mut F {
        self.ring.rang.store(true, Ordering::Release);
        &mut self.inner
    }
}

impl<F: Future + Unpin> Future for Rarely<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let same = this.task.as_ref().is_some_and(|t| t.will_wake(cx.waker()));
        if !same {
            this.task = Some(cx.waker().clone());
            let task = &this.ring.task;
            *task.lock().unwrap_or_else(PoisonError::into_inner) = this.task.clone();
        }
        // After the task is known: who rings from now on wakes it, and who rang before is seen here.
        // Looked at before it is taken: the memory stays shared as long as nobody rings.
        let rang = &this.ring.rang;
        if !rang.load(Ordering::Acquire) || !rang.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        Pin::new(&mut this.inner).poll(&mut Context::from_waker(&this.waker))
    }
}

/// Nothing came for as long as one has patience.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence;

/// Waits for one thing after the other, each for a bounded time, with one timer that is not touched while they come.
#[derive(Debug)]
pub struct Patience {
    bound: Duration,
    /// Since when the present wait lasts.
    since: Instant,
    timer: Rarely<Pin<Box<Sleep>>>,
}

impl Patience {
    /// Waits for `bound` at most, each time.
    pub fn new(bound: Duration) -> Self {
        Self {
            bound,
            since: Instant::now(),
            timer: Rarely::new(Box::pin(sleep(bound))),
        }
    }

    /// Waits for what `future` gives.
    ///
    /// # Errors
    /// [`Silence`], if it takes longer than the bound.
    pub async fn of<F: Future>(&mut self, future: F) -> Result<F::Output, Silence> {
        let mut future = std::pin::pin!(future);
        let mut waits = false;
        std::future::poll_fn(move |cx| {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(output));
            }
            if !std::mem::replace(&mut waits, true) {
                self.since = Instant::now();
            }
            // A timer that was set for an earlier wait is set anew when it is over, and not before.
            while Pin::new(&mut self.timer).poll(cx).is_ready() {
                let until = self.since + self.bound;
                let passed = until <= Instant::now();
                let next = match passed {
                    true => Instant::now() + self.bound,
                    false => until,
                };
                self.timer.changed().as_mut().reset(next);
                if passed {
                    return Poll::Ready(Err(Silence));
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, poll_fn},
        pin::pin,
        sync::atomic::AtomicUsize,
    };

    use tokio::{
        sync::{mpsc, oneshot},
        task::yield_now,
        time::{advance, timeout},
    };

    use super::*;

    const BOUND: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn a_future_is_asked_when_it_rang_and_not_with_its_neighbours() {
        let asked = AtomicUsize::new(0);
        let (tell, mut told) = oneshot::channel();
        let counted = pin!(poll_fn(|cx| {
            asked.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut told).poll(cx)
        }));
        let mut rare = Rarely::new(counted);
        for _ in 0..100 {
            tokio::select! {
                biased;
                _ = &mut rare => panic!("nobody told it"),
                () = yield_now() => {}
            }
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        tell.send(7).unwrap();
        assert_eq!(rare.await, Ok(7));
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_wakes_the_task_that_asked_last_from_wherever_it_rings() {
        for _ in 0..2_000 {
            let (tell, told) = oneshot::channel();
            let mut rare = Rarely::new(told);
            // Asked by this task first, and then by another.
            let now = poll_fn(|cx| Poll::Ready(Pin::new(&mut rare).poll(cx).is_ready()));
            assert!(!now.await);
            let other = tokio::spawn(rare);
            let ring = tokio::spawn(async move { tell.send(()) });
            let both = async { (other.await, ring.await) };
            let (heard, _) = timeout(BOUND, both).await.expect("it was woken");
            assert_eq!(heard.unwrap(), Ok(()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_as_long_after_the_last_word_as_after_the_first() {
        let (say, mut words) = mpsc::channel(5);
        let speaker = tokio::spawn(async move {
            for word in 0..5 {
                sleep(BOUND * 3 / 4).await;
                say.send(word).await.unwrap();
            }
            pending::<()>().await;
            drop(say);
        });
        let mut patience = Patience::new(BOUND);
        let began = Instant::now();
        for word in 0..5 {
            assert_eq!(patience.of(words.recv()).await, Ok(Some(word)));
        }
        for times in 1..4 {
            assert_eq!(patience.of(words.recv()).await, Err(Silence));
            let passed = began.elapsed();
            let due = BOUND * 3 / 4 * 5 + BOUND * times;
            assert!(
                passed.abs_diff(due) < Duration::from_millis(20),
                "{passed:?}"
            );
        }
        speaker.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn time_between_two_waits_is_not_silence() {
        let (say, mut words) = mpsc::channel::<()>(1);
        let mut patience = Patience::new(BOUND);
        advance(BOUND * 5).await;
        let began = Instant::now();
        assert_eq!(patience.of(words.recv()).await, Err(Silence));
        assert!(began.elapsed() >= BOUND);
        say.try_send(()).unwrap();
        advance(BOUND * 5).await;
        assert_eq!(patience.of(words.recv()).await, Ok(Some(())));
    }
}
