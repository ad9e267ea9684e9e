//! How long a connection of HTTP/1.1 may do what: wait for its next request, and send the head of one that it began.
//!
//! hyper has one timer for both, which it sets when it begins to wait for a head. Here that timer looks whether anything
//! has come since.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use hotcell_proto::limits;
use hyper::rt::{Sleep, Timer};
use hyper_util::rt::TokioTimer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::io::InspectReader;

/// The head of a request, from its first byte on, or from the connection's beginning.
const HEAD: Duration = Duration::from_secs(limits::MAX_HTTP_HEAD_SECONDS);
/// Between two requests; what hyper is told for its timer.
pub(super) const IDLE: Duration = Duration::from_secs(limits::MAX_HTTP_IDLE_SECONDS);

#[derive(Debug)]
struct Shared {
    /// Counts the reads that brought something.
    reads: AtomicU64,
    /// Whether the first head is being waited for, or was.
    begun: AtomicBool,
}

/// The timer of one connection.
#[derive(Clone, Debug)]
pub(super) struct Pace(Arc<Shared>);

impl Pace {
    /// Of a connection that has just come in, and the connection, whose reads it knows of.
    pub(super) fn over<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
        stream: S,
    ) -> (impl AsyncRead + AsyncWrite + Send + Unpin + 'static, Self) {
        let pace = Self(Arc::new(Shared {
            reads: AtomicU64::new(0),
            begun: AtomicBool::new(false),
        }));
        let shared = Arc::clone(&pace.0);
        let paced = InspectReader::new(stream, move |read| {
            if !read.is_empty() {
                shared.reads.fetch_add(1, Ordering::Relaxed);
            }
        });
        (paced, pace)
    }

    fn reads(&self) -> u64 {
        self.0.reads.load(Ordering::Relaxed)
    }

    fn wait(&self, idle: Duration) -> Wait {
        let first = !self.0.begun.swap(true, Ordering::Relaxed);
        let within = if first { HEAD } else { idle };
        Wait {
            pace: self.clone(),
            // What came before the first head is waited for is a part of it.
            before: (!first).then(|| self.reads()),
            timer: Box::pin(tokio::time::sleep(within)),
        }
    }
}

impl Timer for Pace {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(self.wait(duration))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        let left = deadline.saturating_duration_since(self.now());
        Box::pin(self.wait(left))
    }

    fn now(&self) -> Instant {
        TokioTimer::new().now()
    }
}

/// Over when a head did not come in time.
struct Wait {
    pace: Pace,
    /// Reads before it began; none once the head has begun.
    before: Option<u64>,
    timer: Pin<Box<tokio::time::Sleep>>,
}

impl Sleep for Wait {}

impl Future for Wait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self
            .before
            .is_some_and(|before| before != self.pace.reads())
        {
            self.before = None;
            let deadline = tokio::time::Instant::now() + HEAD;
            self.timer.as_mut().reset(deadline);
        }
        self.timer.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::{sleep, timeout},
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_head_has_its_time_from_its_first_byte_and_waiting_for_one_has_more() {
        let (stream, mut client) = duplex(64);
        let (mut paced, pace) = Pace::over(stream);
        let began = tokio::time::Instant::now();
        // The first one is expected at once.
        pace.sleep_until(pace.now() + IDLE).await;
        assert_eq!(began.elapsed().as_secs(), HEAD.as_secs());
        // Nothing comes for as long as a connection may wait.
        let began = tokio::time::Instant::now();
        pace.sleep(IDLE).await;
        assert_eq!(began.elapsed().as_secs(), IDLE.as_secs());
        // It begins at the last moment, and goes on slowly.
        let mut wait = pace.sleep(IDLE);
        let most = IDLE - Duration::from_secs(1);
        assert!(timeout(most, &mut wait).await.is_err());
        let began = tokio::time::Instant::now();
        for _ in 0..HEAD.as_secs() - 1 {
            client.write_all(b"G").await.unwrap();
            paced.read_u8().await.unwrap();
            assert!(timeout(Duration::from_millis(1), &mut wait).await.is_err());
            sleep(Duration::from_millis(999)).await;
        }
        wait.await;
        assert_eq!(began.elapsed().as_secs(), HEAD.as_secs());
    }
}
