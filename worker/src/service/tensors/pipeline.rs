//! ExecuteMany: calls are queued as they come, and answered in the order in which they end.

use std::{
    pin::Pin,
    sync::{Arc, atomic::AtomicBool},
    task::{Context, Poll, ready},
};

use hotcell_proto::{error::Error, session::SessionId, v1};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::{TensorsService, Wanted, failed, response, submit};
use crate::session::call::{Answer, CallRequest, Submitted};

/// Calls of one pipeline that wait, run or have an unread answer; further ones wait in the connection.
const PLACES: usize = 64;

/// A call that ended, and its place until the answer is read.
struct Ended {
    tag: u64,
    result: Result<Answer, Error>,
    _place: OwnedSemaphorePermit,
}

/// The answers. Dropping them cancels what is not done.
pub struct Answers {
    ended: mpsc::Receiver<Result<Ended, Status>>,
    _wanted: Wanted,
}

impl Stream for Answers {
    type Item = Result<v1::ExecuteResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(ready!(self.ended.poll_recv(cx)).map(|ended| {
            ended.map(|Ended { tag, result, .. }| match result {
                Ok(answer) => response(answer, tag),
                Err(error) => failed(&error, tag),
            })
        }))
    }
}

impl TensorsService {
    /// Serves a pipeline.
    pub(super) fn pipeline(
        &self,
        session: SessionId,
        mut requests: Streaming<v1::ExecuteRequest>,
    ) -> Answers {
        // One more than there are places: a broken stream is told, too.
        let (answers, ended) = mpsc::channel(PLACES + 1);
        let wanted = Wanted::new(self.host.engine());
        let cancelled = Arc::clone(&wanted.cancelled);
        let service = self.clone();
        let places = Arc::new(Semaphore::new(PLACES));
        tokio::spawn(async move {
            loop {
                let next = async {
                    let place = Arc::clone(&places).acquire_owned().await;
                    (place, requests.message().await)
                };
                let (place, request) = tokio::select! {
                    next = next => next,
                    () = answers.closed() => return,
                };
                let (Ok(place), Ok(Some(request))) = (place, &request) else {
                    if let Err(status) = request {
                        let _ = answers.send(Err(status)).await;
                    }
                    return;
                };
                let end = End {
                    tag: request.tag,
                    place,
                    answers: answers.clone(),
                };
                let flag = match request.detached {
                    true => Arc::default(),
                    false => Arc::clone(&cancelled),
                };
                service
                    .queue(session.clone(), request.clone(), flag, end)
                    .await;
            }
        });
        Answers {
            ended,
            _wanted: wanted,
        }
    }

    async fn queue(
        &self,
        session: SessionId,
        request: v1::ExecuteRequest,
        cancelled: Arc<AtomicBool>,
        end: End,
    ) {
        let request = match CallRequest::read(request, self.epoch()) {
            Ok(request) => request,
            Err(error) => {
                end.with(Err(error));
                return;
            }
        };
        let detached = request.detached;
        // Whichever comes first takes it: a refusal, or the end.
        let end = Arc::new(std::sync::Mutex::new(Some(end)));
        let tell = {
            let end = Arc::clone(&end);
            move |result| {
                let end = end.lock().unwrap_or_else(|e| e.into_inner()).take();
                end.is_some_and(|end| end.with(result))
            }
        };
        let reply = (!detached).then(|| Box::new(tell.clone()) as _);
        let submitted = Submitted {
            request,
            reply,
            cancelled,
        };
        match submit(self.host.engine(), session, submitted).await {
            Ok(at_once) if detached => {
                tell(Ok(at_once));
            }
            Ok(_) => {}
            Err(error) => {
                tell(Err(error));
            }
        }
    }
}

/// Where a call's end goes.
struct End {
    tag: u64,
    place: OwnedSemaphorePermit,
    answers: mpsc::Sender<Result<Ended, Status>>,
}

impl End {
    /// Returns whether the reader is still there.
    fn with(self, result: Result<Answer, Error>) -> bool {
        let ended = Ended {
            tag: self.tag,
            result,
            _place: self.place,
        };
        // Every place has room in the channel; a reader that left misses the answer.
        self.answers.try_send(Ok(ended)).is_ok()
    }
}
