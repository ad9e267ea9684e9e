//! One request through each door, and when its tokens came.

use std::{collections::HashMap, time::Instant};

use anyhow::{Context, Result, ensure};
use hotcell_gateways::{
    inference::{
        ModelInferRequest, grpc_inference_service_client::GrpcInferenceServiceClient,
        infer_parameter::ParameterChoice, model_infer_request::InferInputTensor,
    },
    vllm::{
        self, SamplingParams, TokenizedInput, generate_request::Input, generate_response::Response,
        vllm_engine_client::VllmEngineClient,
    },
};
use hotcell_proto::v1::{
    self, GenerateRequest, generate_event::Event, prompt::Kind, tokens_client::TokensClient,
};
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::{House, http::Connection};

const PROMPT: &str = "In the beginning";
/// Where a door lets one say.
const TEMPERATURE: f32 = 0.8;

/// What a prompt is given as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Text,
    Ids,
    Chat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// Hotcell's own protocol.
    Native(Form),
    OpenAi,
    OpenAiCompletions,
    Ollama,
    OpenAiResponses,
    Anthropic,
    Oip,
    /// The same over HTTP.
    OipRest,
    Vllm,
}

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    Greedy,
    Seeded(u32),
}

impl Drawn {
    fn temperature(self) -> f32 {
        match self {
            Self::Greedy => 0.0,
            Self::Seeded(_) => TEMPERATURE,
        }
    }

    fn seed(self) -> u32 {
        match self {
            // None is used.
            Self::Greedy => 1,
            Self::Seeded(seed) => seed,
        }
    }
}

/// What came, and when.
pub struct Told {
    start: Instant,
    arrivals: Vec<Instant>,
    pub text: String,
    pub ids: Vec<u32>,
    /// As the model read it; Hotcell's own protocol tells it.
    pub prompt_ids: Vec<u32>,
    /// Tokens of the answer, where the protocol tells.
    pub tokens: Option<u64>,
}

impl Told {
    fn begin() -> Self {
        Self {
            start: Instant::now(),
            arrivals: Vec::new(),
            text: String::new(),
            ids: Vec::new(),
            prompt_ids: Vec::new(),
            tokens: None,
        }
    }

    fn text(&mut self, text: &str) {
        if !text.is_empty() {
            self.arrivals.push(Instant::now());
            self.text.push_str(text);
        }
    }

    /// Pieces that it came in.
    pub fn pieces(&self) -> usize {
        self.arrivals.len()
    }

    /// Microseconds until the first token.
    pub fn until_first(&self) -> Result<f64> {
        let first = self.arrivals.first().context("no token")?;
        Ok((*first - self.start).as_secs_f64() * 1e6)
    }

    /// Microseconds from one token to the next, of so many.
    pub fn per_token(&self, tokens: u32) -> Result<f64> {
        let (first, last) = (self.arrivals.first(), self.arrivals.last());
        let took = *last.context("no token")? - *first.context("no token")?;
        Ok(took.as_secs_f64() * 1e6 / f64::from(tokens.max(2) - 1))
    }
}

/// Connections to all doors; each is kept from request to request.
pub struct Doors {
    http: Connection,
    channel: Channel,
}

impl Doors {
    pub async fn connect(to: &House) -> Result<Self> {
        let channel = Channel::from_shared(format!("http://{}", to.grpc))?;
        Ok(Self {
            http: Connection::new(to.http).await?,
            channel: channel.tcp_nodelay(true).connect().await?,
        })
    }

    /// Asks for so many tokens, and reads them as they come. `ids` are the prompt's, for those who send no text.
    pub async fn ask(
        &mut self,
        door: Door,
        drawn: Drawn,
        tokens: u32,
        ids: &[u32],
    ) -> Result<Told> {
        let (temperature, seed) = (drawn.temperature(), drawn.seed());
        let chat = json!([{"role": "user", "content": PROMPT}]);
        match door {
            Door::Native(form) => self.native(form, drawn, tokens, ids).await,
            Door::OpenAi => {
                let body = json!({
                    "model": "kjv", "messages": chat, "stream": true, "temperature": temperature, "seed": seed,
                    "max_completion_tokens": tokens, "stream_options": {"include_usage": true},
                });
                let places = ("/choices/0/delta/content", "/usage/completion_tokens");
                self.events("/v1/chat/completions", &body, places).await
            }
            Door::OpenAiCompletions => {
                let body = json!({
                    "model": "kjv", "prompt": PROMPT, "stream": true, "temperature": temperature, "seed": seed,
                    "max_tokens": tokens, "stream_options": {"include_usage": true},
                });
                let places = ("/choices/0/text", "/usage/completion_tokens");
                self.events("/v1/completions", &body, places).await
            }
            Door::OpenAiResponses => {
                let body = json!({
                    "model": "kjv", "input": PROMPT, "stream": true, "temperature": temperature, "store": false,
                    "max_output_tokens": tokens,
                });
                // Other events tell all of the text again, under another name.
                let places = ("/delta", "/response/usage/output_tokens");
                self.events("/v1/responses", &body, places).await
            }
            Door::Ollama => {
                let body = json!({
                    "model": "kjv", "messages": chat, "stream": true,
                    "options": {
                        "temperature": temperature, "seed": seed, "num_predict": tokens, "top_k": 0, "top_p": 1.0,
                    },
                });
                let places = ("/message/content", "/eval_count");
                self.events("/api/chat", &body, places).await
            }
            Door::Anthropic => {
                let body = json!({
                    "model": "kjv", "messages": chat, "stream": true, "temperature": temperature, "max_tokens": tokens,
                });
                let places = ("/delta/text", "/usage/output_tokens");
                self.events("/v1/messages", &body, places).await
            }
            Door::Oip => self.oip(drawn, tokens).await,
            Door::OipRest => {
                let body = json!({
                    "text_input": PROMPT, "stream": true, "exclude_input_in_output": true,
                    "sampling_parameters": {"temperature": temperature, "seed": seed, "max_tokens": tokens},
                });
                let path = "/v2/models/kjv/generate_stream";
                self.events(path, &body, ("/text_output", "")).await
            }
            Door::Vllm => self.vllm(drawn, tokens, ids).await,
        }
    }

    /// A prompt's vector by Hotcell's own protocol, and by OpenAI's; and the microseconds that each took.
    pub async fn embed(&mut self, by_openai: bool) -> Result<(Vec<f32>, f64)> {
        let begun = Instant::now();
        let vector = match by_openai {
            true => {
                let body = json!({"model": "kjv", "input": PROMPT, "encoding_format": "float"});
                let kind = self.http.post("/v1/embeddings", &body).await?;
                let told: Value = serde_json::from_slice(&self.http.rest(kind).await?)?;
                let vector = told.pointer("/data/0/embedding").cloned();
                serde_json::from_value(vector.with_context(|| told.to_string())?)?
            }
            false => {
                let kind = Some(Kind::Text(PROMPT.to_owned()));
                let request = v1::EmbedRequest {
                    model: "kjv".to_owned(),
                    prompts: vec![v1::Prompt { kind }],
                    ..v1::EmbedRequest::default()
                };
                let mut client = TokensClient::new(self.channel.clone());
                let told = client.embed(request).await?.into_inner();
                let first = told.embeddings.into_iter().next();
                first.context("no vector")?.values
            }
        };
        Ok((vector, begun.elapsed().as_secs_f64() * 1e6))
    }

    async fn native(&self, form: Form, drawn: Drawn, tokens: u32, ids: &[u32]) -> Result<Told> {
        let kind = match form {
            Form::Text => Kind::Text(PROMPT.to_owned()),
            Form::Ids => Kind::Ids(v1::TokenIds { ids: ids.to_vec() }),
            Form::Chat => Kind::Chat(v1::Chat {
                messages: vec![v1::ChatMessage {
                    role: "user".to_owned(),
                    content: PROMPT.to_owned(),
                    ..v1::ChatMessage::default()
                }],
                ..v1::Chat::default()
            }),
        };
        let request = GenerateRequest {
            model: "kjv".to_owned(),
            prompt: Some(v1::Prompt { kind: Some(kind) }),
            sampling: Some(v1::Sampling {
                temperature: Some(drawn.temperature()),
                ..v1::Sampling::default()
            }),
            max_tokens: tokens,
            seed: Some(drawn.seed().into()),
            ..GenerateRequest::default()
        };
        let mut client = TokensClient::new(self.channel.clone());
        let mut told = Told::begin();
        let mut stream = client.generate(request).await?.into_inner();
        while let Some(event) = stream.message().await? {
            match event.event {
                Some(Event::Accepted(accepted)) => told.prompt_ids = accepted.prompt_ids,
                Some(Event::Delta(delta)) => {
                    told.text(&delta.text);
                    told.ids.extend(delta.token_ids);
                }
                Some(Event::Finished(finished)) => {
                    told.tokens = finished.usage.map(|usage| usage.generated_tokens.into());
                }
                None => {}
            }
        }
        Ok(told)
    }

    /// Server-sent events, or lines: of each, the JSON after `data: `, or all of it. Where in it more of the text is, and
    /// the number of all tokens.
    async fn events(
        &mut self,
        path: &str,
        body: &Value,
        (text, count): (&str, &str),
    ) -> Result<Told> {
        let mut told = Told::begin();
        self.http.post(path, body).await?;
        let mut piece = Vec::new();
        while self.http.piece(&mut piece).await? {
            // A piece is an event, so none is cut in two.
            for line in std::str::from_utf8(&piece)?.lines() {
                let line = line.strip_prefix("data: ").unwrap_or(line);
                if !line.starts_with('{') {
                    continue;
                }
                let value: Value = serde_json::from_str(line)?;
                ensure!(value.get("error").is_none(), "{value}");
                told.text(word(&value, text));
                told.tokens = number(&value, count).or(told.tokens);
            }
        }
        Ok(told)
    }

    async fn oip(&self, drawn: Drawn, tokens: u32) -> Result<Told> {
        let sampling = json!({
            "temperature": drawn.temperature(), "seed": drawn.seed(), "max_tokens": tokens,
        });
        let tensors = [
            ("text_input", "BYTES", framed(PROMPT)),
            (
                "sampling_parameters",
                "BYTES",
                framed(&sampling.to_string()),
            ),
            ("stream", "BOOL", vec![1]),
            ("exclude_input_in_output", "BOOL", vec![1]),
        ];
        let inputs = tensors.iter().map(|(name, datatype, _)| InferInputTensor {
            name: (*name).to_owned(),
            datatype: (*datatype).to_owned(),
            shape: vec![1],
            ..InferInputTensor::default()
        });
        let request = ModelInferRequest {
            model_name: "kjv".to_owned(),
            inputs: inputs.collect(),
            raw_input_contents: tensors
                .iter()
                .map(|(.., data)| data.clone().into())
                .collect(),
            ..ModelInferRequest::default()
        };
        let mut client = GrpcInferenceServiceClient::new(self.channel.clone());
        let mut told = Told::begin();
        let mut stream = client
            .model_stream_infer(tokio_stream::once(request))
            .await?
            .into_inner();
        while let Some(message) = stream.message().await? {
            ensure!(
                message.error_message.is_empty(),
                "{}",
                message.error_message
            );
            let response = message.infer_response.context("no response")?;
            let output = response.raw_output_contents.first();
            if let Some((_, text)) = output.and_then(|o| o.split_first_chunk::<4>()) {
                told.text(std::str::from_utf8(text)?);
            }
            if is_last(&response.parameters) {
                return Ok(told);
            }
        }
        Ok(told)
    }

    async fn vllm(&self, drawn: Drawn, tokens: u32, ids: &[u32]) -> Result<Told> {
        let request = vllm::GenerateRequest {
            input: Some(Input::Tokenized(TokenizedInput {
                original_text: PROMPT.to_owned(),
                input_ids: ids.to_vec(),
            })),
            sampling_params: Some(SamplingParams {
                temperature: Some(drawn.temperature()),
                seed: Some(i32::try_from(drawn.seed())?),
                max_tokens: Some(tokens),
                ..SamplingParams::default()
            }),
            stream: true,
            ..vllm::GenerateRequest::default()
        };
        let mut client = VllmEngineClient::new(self.channel.clone());
        let mut told = Told::begin();
        let mut stream = client.generate(request).await?.into_inner();
        while let Some(message) = stream.message().await? {
            match message.response {
                Some(Response::Chunk(chunk)) if !chunk.token_ids.is_empty() => {
                    told.arrivals.push(Instant::now());
                    told.ids.extend(chunk.token_ids);
                }
                Some(Response::Complete(end)) => told.tokens = Some(end.completion_tokens.into()),
                _ => {}
            }
        }
        Ok(told)
    }
}

fn word<'a>(value: &'a Value, at: &str) -> &'a str {
    value
        .pointer(at)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn number(value: &Value, at: &str) -> Option<u64> {
    value.pointer(at).and_then(Value::as_u64)
}

/// One string as a tensor of type BYTES has it.
fn framed(text: &str) -> Vec<u8> {
    let length = text.len() as u32;
    [&length.to_le_bytes()[..], text.as_bytes()].concat()
}

fn is_last(parameters: &HashMap<String, hotcell_gateways::inference::InferParameter>) -> bool {
    let last = parameters.get("triton_final_response");
    last.is_some_and(|last| last.parameter_choice == Some(ParameterChoice::BoolParam(true)))
}
