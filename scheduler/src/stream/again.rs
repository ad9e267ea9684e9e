//! What a stream was asked for and said, so that somebody can run it again.

use hotcell_proto::v1::{GenerateRequest, Prompt, Resume, TokenIds, prompt::Kind};

use super::Stream;

impl Stream {
    /// Whether it runs and no worker has accepted it yet.
    pub fn waits_for_a_worker(&self) -> bool {
        let state = self.state();
        state.end.is_none() && state.accepted.is_none()
    }

    /// The request by its token ids, with its seed and all that it drew so far as what it goes on from; one that workers died
    /// of before they accepted it, as it was asked. None if it was not accepted otherwise, or what it said is held no more.
    pub fn again(&self) -> Option<GenerateRequest> {
        let state = self.state();
        let Some(accepted) = state.accepted.as_ref() else {
            return state.asked.as_deref().cloned();
        };
        let (mut message, said) = match (&state.request, &state.asked) {
            (Some(request), _) => (request.message.clone(), request.generated.clone()),
            (None, Some(asked)) if state.dropped == 0 => {
                let said = state.deltas.iter().flat_map(|delta| &delta.token_ids);
                (GenerateRequest::clone(asked), said.copied().collect())
            }
            (None, _) => return None,
        };
        let resume = message.resume.take().unwrap_or_default();
        let generated_ids = [resume.generated_ids, said].concat();
        let ids = accepted.prompt_ids.clone();
        message.prompt = Some(Prompt {
            kind: Some(Kind::Ids(TokenIds { ids })),
        });
        message.seed = Some(accepted.seed);
        message.resume = Some(Resume {
            generated_ids,
            text_bytes_emitted: 0,
        });
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hotcell_proto::v1::{Accepted, Delta, Finished, GenerateEvent, generate_event::Event};

    use crate::stream::{Mark, Room};

    use super::*;

    fn written(stream: &Stream) {
        stream.asked(
            GenerateRequest::default(),
            None,
            crate::traces::Place::default(),
        );
        let say = |event| stream.write(GenerateEvent { event: Some(event) });
        say(Event::Accepted(Accepted {
            prompt_ids: vec![1, 2],
            seed: 7,
            ..Accepted::default()
        }));
        for token in [5, 6] {
            say(Event::Delta(Delta {
                token_ids: vec![token],
                ..Delta::default()
            }));
        }
    }

    fn told(stream: &Stream) -> Option<(Vec<u32>, Option<u64>)> {
        let again = stream.again()?;
        assert_eq!(
            again.prompt.unwrap().kind,
            Some(Kind::Ids(TokenIds { ids: vec![1, 2] }))
        );
        Some((again.resume.unwrap().generated_ids, again.seed))
    }

    #[test]
    fn a_request_that_workers_died_of_at_once_is_kept_with_its_prompt_and_one_that_was_refused_is_not()
     {
        for deaths in [0, 2] {
            let room = Arc::new(Room::default());
            let stream = Stream::new(Arc::clone(&room), true, Mark::default());
            let asked = GenerateRequest {
                prompt: Some(Prompt {
                    kind: Some(Kind::Text("poison".to_owned())),
                }),
                seed: Some(3),
                ..GenerateRequest::default()
            };
            let place = crate::traces::Place::default();
            stream.asked(asked.clone(), None, place);
            stream.suffered(deaths, &[]);
            assert_eq!(stream.again(), None);
            stream.finish(Err(tonic::Status::internal("its worker died of it")));
            assert_eq!(stream.again(), (deaths > 0).then_some(asked));
            assert_eq!(stream.state().bytes > 0, deaths > 0);
            assert!(stream.forget());
            assert_eq!((stream.again(), stream.state().bytes), (None, 0));
        }
    }

    #[test]
    fn a_stream_can_be_run_again_while_it_runs_and_as_long_as_it_is_kept() {
        for keeps in [true, false] {
            let stream = Stream::new(Arc::new(Room::default()), keeps, Mark::default());
            assert_eq!(told(&stream), None);
            assert!(stream.waits_for_a_worker());
            written(&stream);
            assert!(!stream.waits_for_a_worker());
            assert_eq!(told(&stream), Some((vec![5, 6], Some(7))));
            stream.finish(Ok(Finished::default()));
            let expected = keeps.then(|| (vec![5, 6], Some(7)));
            assert_eq!(told(&stream), expected);
        }
    }
}
