//! What an engine is asked for, in Hotcell's words.
//!
//! Fields that would change what comes out are done or refused by name; those that are only about text
//! (`skip_special_tokens` and its like) are left unread, since ids go out and whoever asks makes text of them.

use hotcell_gateways::vllm::{self, generate_request::Input, sampling_params::Constraint};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{
        GenerateRequest, Grammar, LogitBias, Prompt, Sampling, TokenIds, grammar::Kind as Follow,
        prompt::Kind,
    },
};

use super::ebnf;
use crate::gateway::openai::one_of;

/// A request, and of how many continuations.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Asked {
    pub request: GenerateRequest,
    pub n: u32,
}

fn refused(field: &str, why: &str) -> Error {
    Error::new(Reason::InvalidArgument, format!("{field}: {why}")).with("field", field)
}

/// Reads a request.
///
/// # Errors
/// [`Reason::InvalidArgument`], [`Reason::LimitExceeded`] or [`Reason::GrammarInvalid`], naming the field.
pub(super) fn read(asked: vllm::GenerateRequest) -> Result<Asked, Error> {
    let pictures = asked.mm_inputs.is_some() || asked.media_refs.is_some();
    if pictures || !asked.extra_mm_inputs.is_empty() {
        let why = "models here read text; send no pictures or sound";
        return Err(refused("mm_inputs", why));
    }
    if asked.kv_transfer_params.is_some() || asked.kv_transfer_params_json.is_some() {
        let why = "this engine computes prompts itself; leave it out";
        return Err(refused("kv_transfer_params", why));
    }
    if asked.data_parallel_rank.is_some_and(|rank| rank > 0) {
        let why = "this host is one engine, whose only rank is 0";
        return Err(refused("data_parallel_rank", why));
    }
    let params = asked.sampling_params.unwrap_or_default();
    let kind = match asked.input {
        Some(Input::Tokenized(input)) => {
            let mut ids = input.input_ids;
            if let Some(most) = params.truncate_prompt_tokens {
                keep_last(&mut ids, most)?;
            }
            Kind::Ids(TokenIds { ids })
        }
        Some(Input::Text(_)) if params.truncate_prompt_tokens.is_some() => {
            let why = "can be done to token ids only";
            return Err(refused("truncate_prompt_tokens", why));
        }
        Some(Input::Text(text)) => Kind::Text(text),
        None => return Err(refused("input", "there is neither text nor token ids")),
    };
    let n = params.n.max(1);
    let request = options(params)?;
    let request = GenerateRequest {
        prompt: Some(Prompt { kind: Some(kind) }),
        ..request
    };
    Ok(Asked { request, n })
}

/// Leaves the last `most` of a prompt's tokens.
fn keep_last(ids: &mut Vec<u32>, most: i32) -> Result<(), Error> {
    let most = usize::try_from(most).ok().filter(|&most| most > 0);
    let most = most.ok_or_else(|| refused("truncate_prompt_tokens", "it has to be 1 or more"))?;
    ids.drain(..ids.len().saturating_sub(most));
    Ok(())
}

fn options(params: vllm::SamplingParams) -> Result<GenerateRequest, Error> {
    if params.min_tokens > 0 {
        let why = "a least number of tokens cannot be asked for; leave it out";
        return Err(refused("min_tokens", why));
    }
    if params.prompt_logprobs.is_some() {
        let why = "log probabilities are computed for what is generated only";
        return Err(refused("prompt_logprobs", why));
    }
    if params.max_tokens == Some(0) {
        return Err(refused("max_tokens", "it has to be 1 or more"));
    }
    let top = params.logprobs.map(|top| {
        u32::try_from(top).map_err(|_| refused("logprobs", "not of the whole vocabulary"))
    });
    let top = top.transpose()?;
    let sampling = sampling(&params)?;
    let grammar = params.constraint.map(follow).transpose()?.flatten();
    Ok(GenerateRequest {
        sampling: Some(sampling),
        max_tokens: params.max_tokens.unwrap_or(0),
        stop: params.stop,
        stop_tokens: params.stop_token_ids,
        ignore_eos: params.ignore_eos,
        // Negative ones are seeds, too.
        seed: params.seed.map(|seed| i64::from(seed).cast_unsigned()),
        logprobs: top.is_some(),
        top_logprobs: top.unwrap_or(0),
        grammar: grammar.map(|kind| Grammar { kind: Some(kind) }),
        ..GenerateRequest::default()
    })
}

/// How tokens are drawn. What the protocol cannot leave out is neutral at 0; without a temperature it is vLLM's own.
fn sampling(params: &vllm::SamplingParams) -> Result<Sampling, Error> {
    let given = |value: f32| (value != 0.0).then_some(value);
    let bias = |(&token, &bias): (&i32, &f32)| {
        let token = u32::try_from(token);
        let token = token.map_err(|_| refused("logit_bias", "a token's id is not negative"))?;
        Ok(LogitBias { token, bias })
    };
    let logit_bias = params.logit_bias.iter().map(bias);
    let mut logit_bias = logit_bias.collect::<Result<Vec<_>, Error>>()?;
    // In one order, so that equal requests are equal bytes.
    logit_bias.sort_by_key(|bias| bias.token);
    Ok(Sampling {
        temperature: Some(params.temperature.unwrap_or(1.0)),
        top_k: (params.top_k > 0).then_some(params.top_k),
        top_p: given(params.top_p),
        min_p: given(params.min_p),
        repetition_penalty: given(params.repetition_penalty),
        presence_penalty: given(params.presence_penalty),
        frequency_penalty: given(params.frequency_penalty),
        logit_bias,
    })
}

/// What a text has to follow, if anything.
fn follow(constraint: Constraint) -> Result<Option<Follow>, Error> {
    Ok(match constraint {
        Constraint::JsonSchema(schema) => Some(Follow::JsonSchema(schema)),
        Constraint::Regex(regex) => Some(Follow::Regex(regex)),
        Constraint::Grammar(text) if text.len() > limits::MAX_GRAMMAR_BYTES => {
            let (size, most) = (text.len(), limits::MAX_GRAMMAR_BYTES);
            let what = format!("grammar: {size} bytes are more than the limit of {most}");
            return Err(Error::new(Reason::LimitExceeded, what).with("field", "grammar"));
        }
        Constraint::Grammar(text) => Some(Follow::Lark(ebnf::to_lark(&text)?)),
        Constraint::JsonObject(true) => Some(Follow::JsonObject(true)),
        Constraint::JsonObject(false) => None,
        Constraint::Choice(choice) if choice.choices.is_empty() => {
            return Err(refused("choice", "there is none to choose"));
        }
        Constraint::Choice(choice) => Some(one_of(&choice.choices)),
        Constraint::StructuralTag(_) => {
            let why = "texts that follow a grammar only in places cannot be made; use json_schema, regex or grammar";
            return Err(refused("structural_tag", why));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use hotcell_gateways::vllm::{
        ChoiceConstraint, KvTransferParams, MediaRefs, MultimodalInputs, SamplingParams,
        TokenizedInput,
    };

    use super::*;

    fn with(params: SamplingParams) -> vllm::GenerateRequest {
        let input = TokenizedInput {
            original_text: String::new(),
            input_ids: vec![1, 2, 3, 4],
        };
        vllm::GenerateRequest {
            request_id: "r".into(),
            input: Some(Input::Tokenized(input)),
            sampling_params: Some(params),
            ..vllm::GenerateRequest::default()
        }
    }

    fn ids(asked: &Asked) -> Vec<u32> {
        match asked.request.prompt.clone().and_then(|p| p.kind) {
            Some(Kind::Ids(ids)) => ids.ids,
            other => panic!("{other:?}"),
        }
    }

    fn grammar(constraint: Constraint) -> Option<Follow> {
        let asked = read(with(SamplingParams {
            constraint: Some(constraint),
            ..SamplingParams::default()
        }));
        asked.unwrap().request.grammar.and_then(|g| g.kind)
    }

    #[test]
    fn what_the_protocol_cannot_leave_out_is_neutral_at_zero() {
        let asked = read(with(SamplingParams::default())).unwrap();
        let sampling = asked.request.sampling.clone().unwrap();
        let neutral = Sampling {
            temperature: Some(1.0),
            ..Sampling::default()
        };
        assert_eq!(sampling, neutral);
        assert_eq!((asked.n, asked.request.max_tokens), (1, 0));
        assert_eq!(asked.request.seed, None);
        assert!(!asked.request.logprobs && asked.request.grammar.is_none());
        assert_eq!(ids(&asked), [1, 2, 3, 4]);
    }

    #[test]
    fn every_parameter_finds_its_place() {
        let asked = read(with(SamplingParams {
            temperature: Some(0.0),
            top_p: 0.9,
            top_k: 7,
            min_p: 0.1,
            frequency_penalty: 0.2,
            presence_penalty: 0.3,
            repetition_penalty: 1.1,
            max_tokens: Some(5),
            stop: vec!["x".into()],
            stop_token_ids: vec![9],
            ignore_eos: true,
            n: 3,
            logprobs: Some(2),
            seed: Some(-1),
            logit_bias: HashMap::from([(8, 1.5), (4, -2.0)]),
            truncate_prompt_tokens: Some(2),
            ..SamplingParams::default()
        }))
        .unwrap();
        assert_eq!(ids(&asked), [3, 4]);
        assert_eq!(asked.n, 3);
        let request = asked.request;
        let bias = |token, bias| LogitBias { token, bias };
        assert_eq!(
            request.sampling,
            Some(Sampling {
                temperature: Some(0.0),
                top_k: Some(7),
                top_p: Some(0.9),
                min_p: Some(0.1),
                repetition_penalty: Some(1.1),
                presence_penalty: Some(0.3),
                frequency_penalty: Some(0.2),
                logit_bias: vec![bias(4, -2.0), bias(8, 1.5)],
            })
        );
        assert_eq!((request.max_tokens, request.ignore_eos), (5, true));
        assert_eq!(
            (request.stop, request.stop_tokens),
            (vec!["x".into()], vec![9])
        );
        assert_eq!((request.logprobs, request.top_logprobs), (true, 2));
        assert_eq!(request.seed, Some(u64::MAX));
    }

    #[test]
    fn constraints_become_grammars() {
        let choice = Constraint::Choice(ChoiceConstraint {
            choices: vec!["a.b".into(), "c".into()],
        });
        assert_eq!(grammar(choice), Some(Follow::Regex(r"a\.b|c".into())));
        let schema = Constraint::JsonSchema("{}".into());
        assert_eq!(grammar(schema), Some(Follow::JsonSchema("{}".into())));
        assert_eq!(
            grammar(Constraint::JsonObject(true)),
            Some(Follow::JsonObject(true))
        );
        assert_eq!(grammar(Constraint::JsonObject(false)), None);
        let lark = Constraint::Grammar("start: \"a\"".into());
        assert_eq!(grammar(lark), Some(Follow::Lark("start: \"a\"".into())));
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        let of = |params| read(with(params)).unwrap_err();
        let constraint = |constraint| SamplingParams {
            constraint: Some(constraint),
            ..SamplingParams::default()
        };
        let some = SamplingParams::default;
        let params = [
            (
                "min_tokens",
                SamplingParams {
                    min_tokens: 1,
                    ..some()
                },
            ),
            (
                "prompt_logprobs",
                SamplingParams {
                    prompt_logprobs: Some(0),
                    ..some()
                },
            ),
            (
                "max_tokens",
                SamplingParams {
                    max_tokens: Some(0),
                    ..some()
                },
            ),
            (
                "logprobs",
                SamplingParams {
                    logprobs: Some(-1),
                    ..some()
                },
            ),
            (
                "logit_bias",
                SamplingParams {
                    logit_bias: HashMap::from([(-1, 0.0)]),
                    ..some()
                },
            ),
            (
                "truncate_prompt_tokens",
                SamplingParams {
                    truncate_prompt_tokens: Some(-1),
                    ..some()
                },
            ),
            (
                "structural_tag",
                constraint(Constraint::StructuralTag("{}".into())),
            ),
            (
                "choice",
                constraint(Constraint::Choice(ChoiceConstraint::default())),
            ),
        ];
        for (field, params) in params {
            let error = of(params);
            assert_eq!(error.reason(), Reason::InvalidArgument, "{field}");
            assert_eq!(error.get("field"), Some(field));
        }
        let whole = with(some());
        let requests = [
            (
                "input",
                vllm::GenerateRequest {
                    input: None,
                    ..whole.clone()
                },
            ),
            (
                "mm_inputs",
                vllm::GenerateRequest {
                    mm_inputs: Some(MultimodalInputs {}),
                    ..whole.clone()
                },
            ),
            (
                "mm_inputs",
                vllm::GenerateRequest {
                    media_refs: Some(MediaRefs {}),
                    ..whole.clone()
                },
            ),
            (
                "data_parallel_rank",
                vllm::GenerateRequest {
                    data_parallel_rank: Some(1),
                    ..whole.clone()
                },
            ),
            (
                "kv_transfer_params",
                vllm::GenerateRequest {
                    kv_transfer_params: Some(KvTransferParams::default()),
                    ..whole
                },
            ),
        ];
        for (field, request) in requests {
            assert_eq!(read(request).unwrap_err().get("field"), Some(field));
        }
        let long = Constraint::Grammar("x".repeat(limits::MAX_GRAMMAR_BYTES + 1));
        assert_eq!(of(constraint(long)).reason(), Reason::LimitExceeded);
    }
}
