//! What the router SMG says to engines of vLLM: token ids in, token ids out.
//!
//! One host is one engine, however many workers it has; that they die is not the gateway's business. Requests name no
//! model, so they go to the one that requests without a name go to.

mod answer;
mod ask;
mod blocks;
mod calls;
mod ebnf;
mod load;
mod log;
mod tokenizer;
mod watch;

use std::{collections::BTreeMap, pin::Pin, sync::Arc, time::Duration};

use hotcell_gateways::{
    smg::{
        FlushCacheRequest, FlushCacheResponse, GetTokenizerChunk, GetTokenizerRequest,
        KvEventBatch, ProfileResponse, StartProfileRequest, StopProfileRequest,
        SubscribeKvEventsRequest,
    },
    vllm::{
        AbortRequest, AbortResponse, EmbedRequest, EmbedResponse, GenerateRequest,
        GenerateResponse, GetLoadsRequest, GetLoadsResponse, GetModelInfoRequest,
        GetModelInfoResponse, GetServerInfoRequest, GetServerInfoResponse, HealthCheckRequest,
        HealthCheckResponse,
        vllm_engine_server::{VllmEngine, VllmEngineServer},
    },
};
use hotcell_proto::{
    error::Error,
    limits,
    v1::{self, ModelInfo, ModelState, Prompt, TokenIds, generate_event::Event, prompt::Kind},
};
use tokio::{
    sync::{Semaphore, mpsc, watch as watch_channel},
    time::{Instant, timeout},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use self::{
    answer::Answers,
    calls::{Call, Calls},
    load::{Gauge, Load},
    tokenizer::Archive,
    watch::{Subscription, Watch},
};
use super::ask::Branches;
use crate::{
    access::Caller,
    service::{Shared, deadline},
};

/// The service's name on the wire.
pub(crate) use hotcell_gateways::vllm::vllm_engine_server::SERVICE_NAME;

/// Answers between the task that makes them and the connection that sends them. What comes while the client reads nothing
/// waits in its request's journal, which has the bound.
const AHEAD: usize = 4;
/// How long sending a tokenizer may take.
const TOKENIZER_PATIENCE: Duration = Duration::from_secs(60);

/// The service, for what a scheduler has.
pub(crate) fn server(shared: &Shared) -> VllmEngineServer<impl VllmEngine> {
    let engine = Engine {
        shared: shared.clone(),
        calls: Calls::default(),
        gauge: Gauge::new(),
        watch: Watch::new(),
        tokenizers: Arc::new(Semaphore::new(limits::MAX_TOKENIZERS_SENT)),
        began: Instant::now(),
    };
    VllmEngineServer::new(engine)
        .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
}

/// What the calls share.
struct Engine {
    shared: Shared,
    calls: Calls,
    gauge: Gauge,
    watch: Watch,
    tokenizers: Arc<Semaphore>,
    began: Instant,
}

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Engine {
    /// The model that all requests are for, if this caller may name it.
    fn model(&self, caller: &Caller) -> Result<ModelInfo, Error> {
        self.shared.may_name("", caller)?;
        self.shared.fleet.model("")
    }

    /// Whether a request would get anywhere, and if not why. Anybody may ask, so it names nothing.
    fn trouble(&self) -> Option<&'static str> {
        if self.shared.admission.is_closed() || self.shared.leaving.is_cancelled() {
            return Some("draining");
        }
        match self.model(&Caller::own()) {
            // The first request has it loaded.
            Ok(model) if model.state() == ModelState::Asleep => None,
            Ok(model) if model.workers.is_empty() => Some("no worker is ready"),
            Ok(_) if !self.shared.fleet.can_step() => Some("no worker gets on"),
            Ok(_) => None,
            Err(_) => Some("no model is ready"),
        }
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

fn not_here(what: &str) -> Status {
    Status::unimplemented(format!("{what} is not to be had here"))
}

/// Says what comes of a request until it is complete, aborted or its client left; dropping it ends the request.
async fn tell(
    mut branches: Branches,
    mut answers: Answers,
    first: Option<(u32, Event)>,
    (call, gauge, stream): (Call, Gauge, bool),
    to: mpsc::Sender<Result<GenerateResponse, Status>>,
) {
    // Not streamed, each is said whole once all are, in their order: gateways number them as they come.
    let mut whole = BTreeMap::new();
    let forward = async {
        let mut next = match first {
            Some(first) => Some(Ok(first)),
            None => branches.next().await,
        };
        while let Some(came) = next {
            // Before it is taken in: what was taken is said, even if an abort comes while the client does not read.
            let Ok(place) = to.reserve().await else {
                return;
            };
            match came {
                Ok((index, event)) => {
                    if let Event::Delta(delta) = &event {
                        gauge.went(delta.token_ids.len());
                    }
                    match answers.take(index, event) {
                        Some(answer) if stream => place.send(Ok(answer)),
                        Some(answer) => drop(whole.insert(index, answer)),
                        None => {}
                    }
                }
                Err(error) => {
                    place.send(Err(error.into()));
                    return;
                }
            }
            next = branches.next().await;
        }
    };
    let aborted = tokio::select! {
        biased;
        () = to.closed() => return,
        () = call.aborted() => true,
        () = forward => false,
    };
    // That ends what runs.
    drop(branches);
    let rest: Vec<_> = match aborted {
        true => answers.aborted().collect(),
        false => Vec::new(),
    };
    for answer in whole.into_values().chain(rest) {
        if to.send(Ok(answer)).await.is_err() {
            return;
        }
    }
}

/// Says which blocks there are and how busy the host is, as either changes, until nobody hears it.
async fn tell_events(
    mut subscribed: Subscription,
    mut loads: watch_channel::Receiver<(u64, Load)>,
    to: &mpsc::Sender<Result<KvEventBatch, Status>>,
) {
    let mut last = 0;
    while let Ok(place) = to.reserve().await {
        let batch = tokio::select! {
            // Seldom, so that the other is not kept waiting.
            biased;
            changed = loads.changed() => {
                if changed.is_err() {
                    return;
                }
                let (sample, load) = loads.borrow_and_update().clone();
                // It takes no number.
                KvEventBatch {
                    sequence_number: last,
                    timestamp: now(),
                    load: Some(load.told(sample)),
                    ..KvEventBatch::default()
                }
            }
            batch = subscribed.next() => {
                last = batch.sequence_number;
                batch
            }
        };
        place.send(Ok(batch));
    }
}

#[tonic::async_trait]
impl VllmEngine for Engine {
    type GenerateStream = ReceiverStream<Result<GenerateResponse, Status>>;
    type GetTokenizerStream = ReceiverStream<Result<GetTokenizerChunk, Status>>;
    type SubscribeKvEventsStream = Boxed<KvEventBatch>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (metadata, extensions, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        let caller = Caller::of(&extensions);
        let call = self.calls.enter(caller.tenant(""), &request.request_id)?;
        let stream = request.stream;
        let asked = ask::read(request)?;
        let answers = Answers::new(
            asked.n.min(limits::MAX_CHOICES),
            stream,
            asked.request.logprobs,
            asked.request.stop_tokens.clone(),
        );
        let shared = &self.shared;
        let mut branches = Branches::begin(shared, asked.request, asked.n, deadline, &caller)?;
        // What is refused is refused before an answer begins: gateways try those again that had none.
        let first = tokio::select! {
            biased;
            () = call.aborted() => None,
            first = branches.first() => Some(first?),
        };
        let (to, from) = mpsc::channel(AHEAD);
        let with = (call, self.gauge.clone(), stream);
        tokio::spawn(tell(branches, answers, first, with, to));
        Ok(Response::new(ReceiverStream::new(from)))
    }

    async fn embed(
        &self,
        request: Request<EmbedRequest>,
    ) -> Result<Response<EmbedResponse>, Status> {
        let (metadata, extensions, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        let caller = Caller::of(&extensions);
        let ids = request.tokenized.map(|input| input.input_ids);
        let kind = ids.map(|ids| Kind::Ids(TokenIds { ids }));
        let wanted = v1::EmbedRequest {
            prompts: vec![Prompt { kind }],
            ..v1::EmbedRequest::default()
        };
        self.shared.may_name("", &caller)?;
        let embedded = self.shared.embed(wanted, deadline, &caller).await?;
        let one = embedded.embeddings.into_iter().next().unwrap_or_default();
        Ok(Response::new(EmbedResponse {
            embedding_dim: u32::try_from(one.values.len()).unwrap_or(u32::MAX),
            prompt_tokens: one.prompt_tokens,
            embedding: one.values,
        }))
    }

    async fn health_check(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let trouble = self.trouble();
        Ok(Response::new(HealthCheckResponse {
            healthy: trouble.is_none(),
            message: trouble.unwrap_or("ready").into(),
        }))
    }

    async fn abort(
        &self,
        request: Request<AbortRequest>,
    ) -> Result<Response<AbortResponse>, Status> {
        let caller = Caller::of(request.extensions());
        for id in &request.get_ref().request_ids {
            self.calls.abort(caller.tenant(""), id);
        }
        Ok(Response::new(AbortResponse {}))
    }

    async fn get_model_info(
        &self,
        request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        self.shared
            .may_name("", &Caller::of(request.extensions()))?;
        // What there is to say of it a worker has to read first.
        let (model, _using) = self.shared.fleet.awake("").await?;
        let about = model.summary.unwrap_or_default();
        let context = i32::try_from(about.context_length).unwrap_or(i32::MAX);
        let ends = about.end_tokens.iter();
        Ok(Response::new(GetModelInfoResponse {
            // No path of the gateway's host, and no name that a hub could have: then it asks for the tokenizer here.
            tokenizer_path: format!("hotcell://{}", model.name),
            model_path: model.name.clone(),
            served_model_name: model.name,
            is_generation: true,
            max_context_length: about.context_length,
            vocab_size: about.vocabulary,
            model_type: about.architecture.clone(),
            architectures: vec![about.architecture],
            eos_token_ids: ends.filter_map(|&id| i32::try_from(id).ok()).collect(),
            max_req_input_len: context.saturating_sub(1),
            ..GetModelInfoResponse::default()
        }))
    }

    async fn get_server_info(
        &self,
        request: Request<GetServerInfoRequest>,
    ) -> Result<Response<GetServerInfoResponse>, Status> {
        // Only to those who may name it.
        let model = self.model(&Caller::of(request.extensions())).ok();
        let about = model.and_then(|model| model.summary);
        let inside = self.shared.admission.count();
        let load = self.gauge.look(&self.shared).await;
        Ok(Response::new(GetServerInfoResponse {
            active_requests: u32::try_from(inside).unwrap_or(u32::MAX),
            is_paused: self.shared.admission.is_closed(),
            last_receive_timestamp: now(),
            uptime_seconds: self.began.elapsed().as_secs_f64(),
            server_type: "hotcell".into(),
            data_parallel_size: 1,
            max_num_seqs: i32::try_from(load.most_running).unwrap_or(i32::MAX),
            block_size: i32::try_from(load.block_tokens).unwrap_or(i32::MAX),
            model_dtype: about.map(|about| about.weights_dtype).unwrap_or_default(),
            ..GetServerInfoResponse::default()
        }))
    }

    async fn get_loads(
        &self,
        _: Request<GetLoadsRequest>,
    ) -> Result<Response<GetLoadsResponse>, Status> {
        let load = self.gauge.look(&self.shared).await;
        Ok(Response::new(GetLoadsResponse {
            timestamp: format!("{:.3}", now()),
            version: env!("CARGO_PKG_VERSION").into(),
            dp_rank_count: 1,
            loads: vec![load.asked()],
        }))
    }

    async fn get_tokenizer(
        &self,
        request: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let caller = Caller::of(request.extensions());
        let fleet = &self.shared.fleet;
        let name = fleet.resolve("")?;
        self.shared.may_name(name.as_str(), &caller)?;
        // Never closed.
        let place = Arc::clone(&self.tokenizers).acquire_owned().await;
        let files = tokenizer::files(fleet, &name).await?;
        let archive = Archive::of(&name, files).await?;
        let (to, from) = mpsc::channel(AHEAD);
        let abort = self.shared.abort.clone();
        tokio::spawn(async move {
            let _place = place;
            // A client that does not read keeps its place no longer than this.
            tokio::select! {
                _ = timeout(TOKENIZER_PATIENCE, archive.send(to)) => {}
                () = abort.cancelled() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(from)))
    }

    async fn subscribe_kv_events(
        &self,
        request: Request<SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        let caller = Caller::of(request.extensions());
        let from = request.get_ref().start_sequence_number;
        // Blocks say what was asked, so that each tenant hears of its own only.
        let subscribed = self
            .watch
            .subscribe(&self.shared, caller.tenant(""), from)?;
        let loads = self.gauge.listen(&self.shared);
        let abort = self.shared.abort.clone();
        // One: of loads the newest is what counts, and blocks wait in their log.
        let (to, from) = mpsc::channel(1);
        tokio::spawn(async move {
            tokio::select! {
                () = tell_events(subscribed, loads, &to) => {}
                () = to.closed() => {}
                () = abort.cancelled() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(from))))
    }

    async fn flush_cache(
        &self,
        _: Request<FlushCacheRequest>,
    ) -> Result<Response<FlushCacheResponse>, Status> {
        Err(not_here("emptying the cache"))
    }

    async fn start_profile(
        &self,
        _: Request<StartProfileRequest>,
    ) -> Result<Response<ProfileResponse>, Status> {
        Err(not_here("profiling"))
    }

    async fn stop_profile(
        &self,
        _: Request<StopProfileRequest>,
    ) -> Result<Response<ProfileResponse>, Status> {
        Err(not_here("profiling"))
    }
}
