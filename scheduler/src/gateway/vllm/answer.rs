//! What comes of a request, in the engine's words.

use hotcell_gateways::vllm::{
    GenerateComplete, GenerateResponse, GenerateStreamChunk, OutputLogProbs, TopLogProbs,
    generate_complete::MatchedStop, generate_response::Response,
};
use hotcell_proto::v1::{Delta, FinishReason, Finished, TokenLogprob, generate_event::Event};

/// One continuation so far.
#[derive(Clone, Debug, Default)]
struct Branch {
    prompt: u32,
    generated: u32,
    /// All of it, unless it is told as it comes.
    ids: Vec<u32>,
    logprobs: OutputLogProbs,
    complete: bool,
}

/// The continuations of a request, as they are told: chunk by chunk and then a `complete`, or all of it in that.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    branches: Vec<Branch>,
    stream: bool,
    logprobs: bool,
    /// Those that the request named to end at.
    stop_tokens: Vec<u32>,
}

impl Answers {
    /// Of `n` continuations of which nothing came yet.
    pub(super) fn new(n: u32, stream: bool, logprobs: bool, stop_tokens: Vec<u32>) -> Self {
        Self {
            branches: vec![Branch::default(); n as usize],
            stream,
            logprobs,
            stop_tokens,
        }
    }

    /// What is to be said about what came, if anything.
    pub(super) fn take(&mut self, index: u32, event: Event) -> Option<GenerateResponse> {
        let (stream, logprobs) = (self.stream, self.logprobs);
        let branch = self.branches.get_mut(index as usize)?;
        match event {
            Event::Accepted(accepted) => {
                branch.prompt = count(accepted.prompt_ids.len());
                None
            }
            // Text alone is nothing to whoever reads ids.
            Event::Delta(delta) if delta.token_ids.is_empty() => None,
            Event::Delta(delta) => {
                let tokens = count(delta.token_ids.len());
                branch.generated = branch.generated.saturating_add(tokens);
                if stream {
                    return Some(answer(Response::Chunk(
                        branch.chunk(index, delta, logprobs),
                    )));
                }
                add(&mut branch.logprobs, delta.logprobs);
                branch.ids.extend(delta.token_ids);
                None
            }
            Event::Finished(finished) => {
                branch.complete = true;
                let mut complete = branch.complete(index, logprobs && !stream);
                let usage = finished.usage.unwrap_or_default();
                complete.cached_tokens = usage.cached_tokens;
                complete.finish_reason = reason(finished.reason()).into();
                complete.matched_stop = self.matched(finished);
                Some(answer(Response::Complete(complete)))
            }
        }
    }

    /// What is said of those that are not complete when the request was aborted.
    pub(super) fn aborted(&mut self) -> impl Iterator<Item = GenerateResponse> {
        let logprobs = self.logprobs && !self.stream;
        let open = (0u32..)
            .zip(&mut self.branches)
            .filter(|(_, b)| !b.complete);
        open.map(move |(index, branch)| {
            branch.complete = true;
            let complete = branch.complete(index, logprobs);
            answer(Response::Complete(GenerateComplete {
                finish_reason: "abort".into(),
                ..complete
            }))
        })
    }

    /// What of the request's own ends it was that the text came to.
    fn matched(&self, finished: Finished) -> Option<MatchedStop> {
        match finished.reason() {
            FinishReason::StopString => Some(MatchedStop::MatchedStopStr(finished.matched_stop)),
            FinishReason::EndToken => {
                let token = finished.matched_stop.parse().ok();
                let token = token.filter(|token| self.stop_tokens.contains(token));
                token.map(MatchedStop::MatchedTokenId)
            }
            _ => None,
        }
    }
}

impl Branch {
    fn chunk(&self, index: u32, delta: Delta, logprobs: bool) -> GenerateStreamChunk {
        let logprobs = logprobs.then(|| {
            let mut own = OutputLogProbs::default();
            add(&mut own, delta.logprobs);
            own
        });
        GenerateStreamChunk {
            token_ids: delta.token_ids,
            prompt_tokens: self.prompt,
            completion_tokens: self.generated,
            output_logprobs: logprobs,
            index,
            ..GenerateStreamChunk::default()
        }
    }

    /// What is left to say of it.
    fn complete(&mut self, index: u32, logprobs: bool) -> GenerateComplete {
        let own = std::mem::take(&mut self.logprobs);
        GenerateComplete {
            output_ids: std::mem::take(&mut self.ids),
            prompt_tokens: self.prompt,
            completion_tokens: self.generated,
            output_logprobs: logprobs.then_some(own),
            index,
            ..GenerateComplete::default()
        }
    }
}

fn answer(response: Response) -> GenerateResponse {
    GenerateResponse {
        response: Some(response),
    }
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

fn add(all: &mut OutputLogProbs, more: Vec<TokenLogprob>) {
    for one in more {
        all.token_logprobs.push(one.logprob);
        all.token_ids.push(one.token);
        all.top_logprobs.push(TopLogProbs {
            values: one.top.iter().map(|c| c.logprob).collect(),
            token_ids: one.top.iter().map(|c| c.token).collect(),
        });
    }
}

fn reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::EndToken | FinishReason::StopString => "stop",
        FinishReason::MaxTokens | FinishReason::ContextFull => "length",
        FinishReason::Unspecified => "error",
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{Accepted, Candidate, Usage};

    use super::*;

    fn accepted() -> Event {
        Event::Accepted(Accepted {
            prompt_ids: vec![1, 2],
            ..Accepted::default()
        })
    }

    fn token(token: u32) -> Event {
        let top = Candidate {
            token,
            logprob: -0.5,
            ..Candidate::default()
        };
        Event::Delta(Delta {
            token_ids: vec![token],
            logprobs: vec![TokenLogprob {
                token,
                logprob: -0.5,
                top: vec![top],
                ..TokenLogprob::default()
            }],
            ..Delta::default()
        })
    }

    fn end(reason: FinishReason, matched: &str) -> Event {
        Event::Finished(Finished {
            reason: reason.into(),
            matched_stop: matched.into(),
            usage: Some(Usage {
                prompt_tokens: 2,
                generated_tokens: 2,
                cached_tokens: 1,
            }),
            ..Finished::default()
        })
    }

    fn chunk(answer: Option<GenerateResponse>) -> GenerateStreamChunk {
        match answer.and_then(|a| a.response) {
            Some(Response::Chunk(chunk)) => chunk,
            other => panic!("{other:?}"),
        }
    }

    fn complete(answer: Option<GenerateResponse>) -> GenerateComplete {
        match answer.and_then(|a| a.response) {
            Some(Response::Complete(complete)) => complete,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_stream_is_told_chunk_by_chunk_and_ends_with_complete() {
        let mut answers = Answers::new(2, true, true, vec![8]);
        assert_eq!(answers.take(1, accepted()), None);
        let first = chunk(answers.take(1, token(7)));
        assert_eq!(
            (first.index, first.token_ids, first.prompt_tokens),
            (1, vec![7], 2)
        );
        let logprobs = first.output_logprobs.unwrap();
        assert_eq!(logprobs.token_logprobs, [-0.5]);
        assert_eq!(logprobs.top_logprobs[0].token_ids, [7]);
        assert_eq!(chunk(answers.take(1, token(8))).completion_tokens, 2);
        let text = Event::Delta(Delta {
            text: "x".into(),
            ..Delta::default()
        });
        assert_eq!(answers.take(1, text), None);
        let last = complete(answers.take(1, end(FinishReason::EndToken, "8")));
        assert_eq!(
            (last.index, last.completion_tokens, last.cached_tokens),
            (1, 2, 1)
        );
        assert_eq!(last.finish_reason, "stop");
        assert_eq!(last.matched_stop, Some(MatchedStop::MatchedTokenId(8)));
        assert!(last.output_ids.is_empty() && last.output_logprobs.is_none());
        assert_eq!(answers.take(2, token(1)), None, "there is no such branch");
    }

    #[test]
    fn what_is_not_streamed_is_all_in_complete() {
        let mut answers = Answers::new(1, false, true, vec![]);
        for event in [accepted(), token(7), token(8)] {
            assert_eq!(answers.take(0, event), None);
        }
        let all = complete(answers.take(0, end(FinishReason::StopString, "and")));
        assert_eq!(all.output_ids, [7, 8]);
        assert_eq!((all.prompt_tokens, all.completion_tokens), (2, 2));
        assert_eq!(all.output_logprobs.unwrap().token_ids, [7, 8]);
        assert_eq!(
            all.matched_stop,
            Some(MatchedStop::MatchedStopStr("and".into()))
        );
    }

    #[test]
    fn ends_have_the_engines_names() {
        for (reason, matched, name) in [
            (FinishReason::MaxTokens, "", "length"),
            (FinishReason::ContextFull, "", "length"),
            // The model's own end token is nothing that the request named.
            (FinishReason::EndToken, "1", "stop"),
            (FinishReason::Unspecified, "", "error"),
        ] {
            let mut answers = Answers::new(1, true, false, vec![8]);
            let end = complete(answers.take(0, end(reason, matched)));
            assert_eq!((end.finish_reason.as_str(), end.matched_stop), (name, None));
        }
    }

    #[test]
    fn what_was_aborted_is_complete_so_far() {
        let mut answers = Answers::new(2, false, false, vec![]);
        answers.take(0, token(7));
        answers.take(0, end(FinishReason::MaxTokens, ""));
        answers.take(1, token(9));
        let rest: Vec<_> = answers.aborted().collect();
        assert_eq!(rest.len(), 1);
        let one = complete(rest.into_iter().next());
        assert_eq!((one.index, one.output_ids), (1, vec![9]));
        assert_eq!(one.finish_reason, "abort");
        assert_eq!(answers.aborted().count(), 0);
    }
}
