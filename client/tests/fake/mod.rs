//! A scheduler with scripted answers, served in this process on a Unix socket.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use hotcell_client::{Address, Error, Reason, v1};
use tokio::sync::mpsc;
use tokio_stream::{
    Stream,
    wrappers::{ReceiverStream, UnixListenerStream},
};
use tonic::{Request, Response, Status, transport::Server};

use v1::{control_server::*, tokens_server::*};

type Answer<T> = Result<Response<T>, Status>;
type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// How many events a flood has.
pub const FLOOD: u32 = 5000;

/// What `Generate` does, chosen by the prompt's text.
///
/// * `refuse`: fails at once; `refuse REASON`: with that reason
/// * `stall`: two events, then nothing until the client goes
/// * `mute`: not even a response's head
/// * `torn`: ends without its last event; `unordered`: begins with a delta
/// * `flood`: so many small events that nobody who does not read holds them all
/// * `die`: an event, then the status `WORKER_LOST`
/// * else: Accepted, one delta per word, Finished
#[derive(Clone, Default)]
pub struct Fake {
    pub seen: Arc<Mutex<Seen>>,
    /// Whether it lists no models.
    pub bare: bool,
}

/// What the fake was asked.
#[derive(Default)]
pub struct Seen {
    pub requests: Vec<v1::GenerateRequest>,
    pub timeouts: Vec<Option<String>>,
    pub cancelled: usize,
    pub loads: Vec<v1::LoadModelRequest>,
    pub unloads: Vec<String>,
}

/// A running fake. Its socket goes with it.
pub struct Running {
    pub fake: Fake,
    pub folder: tempfile::TempDir,
    pub address: Address,
    pub server: tokio::task::JoinHandle<()>,
}

impl Running {
    pub fn address_flag(&self) -> String {
        self.address.to_string()
    }

    /// Waits until the fake has seen `n` cancelled streams.
    pub async fn cancelled(&self, n: usize) -> bool {
        for _ in 0..200 {
            if self.fake.seen.lock().unwrap().cancelled >= n {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }
}

/// A scheduler.
pub async fn start() -> Running {
    serve(Fake::default(), true).await
}

/// A scheduler without models.
pub async fn start_bare() -> Running {
    let fake = Fake {
        bare: true,
        ..Fake::default()
    };
    serve(fake, true).await
}

/// A worker run alone: it knows no control calls.
pub async fn start_worker() -> Running {
    serve(Fake::default(), false).await
}

async fn serve(fake: Fake, control: bool) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hotcell.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let control = control.then(|| ControlServer::new(fake.clone()));
    let services = Server::builder()
        .add_service(TokensServer::new(fake.clone()))
        .add_optional_service(control);
    let server = tokio::spawn(async move {
        let _ = services
            .serve_with_incoming(UnixListenerStream::new(listener))
            .await;
    });
    Running {
        fake,
        folder,
        address: Address::Unix(path),
        server,
    }
}

pub fn numerics() -> v1::NumericsClass {
    v1::NumericsClass {
        id: "cpu/test".to_owned(),
        reproducible: true,
        model_hash: "00ff".to_owned(),
    }
}

fn accepted() -> v1::GenerateEvent {
    event(v1::generate_event::Event::Accepted(v1::Accepted {
        request_id: "r-1".to_owned(),
        model: "kjv".to_owned(),
        prompt_ids: vec![0, 5],
        seed: u64::MAX,
        numerics: Some(numerics()),
    }))
}

fn delta(text: &str, id: u32, top: u32) -> v1::GenerateEvent {
    let entry = v1::TokenLogprob {
        token: id,
        logprob: -0.1,
        top: vec![v1::Candidate {
            token: id,
            logprob: -0.1,
            ..v1::Candidate::default()
        }],
        ..v1::TokenLogprob::default()
    };
    event(v1::generate_event::Event::Delta(v1::Delta {
        text: text.to_owned(),
        token_ids: vec![id],
        logprobs: if top > 0 { vec![entry] } else { Vec::new() },
        ..v1::Delta::default()
    }))
}

fn likely(text: &str, logprob: f32, told: bool) -> v1::GenerateEvent {
    let entry = v1::TokenLogprob {
        token: 7,
        logprob,
        ..v1::TokenLogprob::default()
    };
    event(v1::generate_event::Event::Delta(v1::Delta {
        text: text.to_owned(),
        token_ids: vec![7],
        logprobs: if told { vec![entry] } else { Vec::new() },
        ..v1::Delta::default()
    }))
}

fn finished(n: u32) -> v1::GenerateEvent {
    event(v1::generate_event::Event::Finished(v1::Finished {
        reason: v1::FinishReason::MaxTokens.into(),
        usage: Some(v1::Usage {
            prompt_tokens: 2,
            generated_tokens: n,
            cached_tokens: 1,
        }),
        timings: Some(v1::Timings {
            queue_ms: 1.0,
            prefill_ms: 2.0,
            decode_ms: 3.5,
        }),
        seed: u64::MAX,
        numerics: Some(numerics()),
        ..v1::Finished::default()
    }))
}

fn event(event: v1::generate_event::Event) -> v1::GenerateEvent {
    v1::GenerateEvent { event: Some(event) }
}

fn layer(name: &str, state: v1::LayerState, detail: &str) -> v1::ConfinementLayer {
    v1::ConfinementLayer {
        layer: name.to_owned(),
        state: state.into(),
        detail: detail.to_owned(),
    }
}

fn not_found(name: &str) -> Status {
    Error::new(Reason::ModelNotFound, format!("no model {name} is loaded"))
        .with("model", name)
        .into()
}

#[tonic::async_trait]
impl Tokens for Fake {
    type GenerateStream = Replies<v1::GenerateEvent>;
    type AttachStream = Self::GenerateStream;

    async fn attach(&self, _: Request<v1::AttachRequest>) -> Answer<Self::AttachStream> {
        Err(Status::unimplemented("a fake keeps no streams"))
    }

    async fn cancel(
        &self,
        _: Request<v1::CancelStreamRequest>,
    ) -> Answer<v1::CancelStreamResponse> {
        Err(Status::unimplemented("a fake keeps no streams"))
    }

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Answer<Self::GenerateStream> {
        let timeout = request.metadata().get("grpc-timeout");
        let timeout = timeout.map(|t| t.to_str().unwrap().to_owned());
        let parent = request.metadata().get("traceparent").cloned();
        let request = request.into_inner();
        {
            let mut seen = self.seen.lock().unwrap();
            seen.requests.push(request.clone());
            seen.timeouts.push(timeout);
        }
        if request.model == "missing" {
            return Err(not_found("missing"));
        }
        let text = match request.prompt.and_then(|p| p.kind) {
            Some(v1::prompt::Kind::Text(text)) => text,
            Some(v1::prompt::Kind::Ids(ids)) => format!("{} ids", ids.ids.len()),
            Some(v1::prompt::Kind::Chat(chat)) => {
                let last = chat.messages.last().unwrap();
                format!("{}:{}", chat.messages.len(), last.content)
            }
            None => return Err(Status::invalid_argument("no prompt")),
        };
        if text == "mute" {
            let _guard = Guard(self.seen.clone());
            std::future::pending::<()>().await;
        }
        if let Some(reason) = text.strip_prefix("refuse") {
            let reason = Reason::from_name(reason.trim()).unwrap_or(Reason::InvalidSampling);
            return Err(Error::new(reason, "temperature must be at most 100").into());
        }
        let (top, branch, logprobs) = (request.top_logprobs, request.branch, request.logprobs);
        let (sender, receiver) = mpsc::channel(1);
        let seen = self.seen.clone();
        tokio::spawn(async move {
            let send = async |item| sender.send(item).await.is_ok();
            match text.as_str() {
                "unordered" => {
                    send(Ok(delta("a", 1, top))).await;
                }
                "torn" => {
                    send(Ok(accepted())).await;
                }
                "branches" => {
                    // The second one is the likeliest.
                    let logprob = -0.5 * (branch as f32 - 1.0).abs();
                    send(Ok(accepted())).await;
                    for i in 0..2 {
                        send(Ok(likely(&format!(" {branch}.{i}"), logprob, logprobs))).await;
                    }
                    send(Ok(finished(2))).await;
                }
                "flood" => {
                    send(Ok(accepted())).await;
                    for i in 0..FLOOD {
                        // Each a frame of its own: what is ready together goes into one.
                        tokio::task::yield_now().await;
                        send(Ok(delta("", i, top))).await;
                    }
                    send(Ok(finished(FLOOD))).await;
                }
                "die" => {
                    send(Ok(accepted())).await;
                    send(Ok(delta(" half", 1, top))).await;
                    let lost = Error::new(Reason::WorkerLost, "the worker cpu:0 died");
                    send(Err(lost.into())).await;
                }
                _ if text == "stall" || text.ends_with(":stall") => {
                    send(Ok(accepted())).await;
                    send(Ok(delta(" wait", 1, top))).await;
                    sender.closed().await;
                    seen.lock().unwrap().cancelled += 1;
                }
                _ => {
                    let words: Vec<_> = text.split_inclusive(' ').collect();
                    send(Ok(accepted())).await;
                    for (i, word) in (0..).zip(&words) {
                        send(Ok(delta(word, 10 + i, top))).await;
                    }
                    send(Ok(finished(words.len() as u32))).await;
                }
            }
        });
        let mut answer: Response<Self::GenerateStream> =
            Response::new(Box::pin(ReceiverStream::new(receiver)));
        if let Some(parent) = parent {
            // As one that makes traces tells its own place; here the same.
            answer.metadata_mut().insert("traceparent", parent);
        }
        Ok(answer)
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Answer<v1::TokenizeResponse> {
        let request = request.into_inner();
        let Some(v1::prompt::Kind::Text(text)) = request.prompt.and_then(|p| p.kind) else {
            return Err(Status::unimplemented("text only"));
        };
        let ids = text.bytes().map(u32::from);
        let special = (!request.without_special).then_some(0);
        Ok(Response::new(v1::TokenizeResponse {
            model: "kjv".to_owned(),
            ids: special.into_iter().chain(ids).collect(),
            text,
        }))
    }

    async fn embed(&self, request: Request<v1::EmbedRequest>) -> Answer<v1::EmbedResponse> {
        let request = request.into_inner();
        let embedding = |prompt: &v1::Prompt| v1::Embedding {
            values: vec![0.6, -0.8],
            prompt_tokens: match &prompt.kind {
                Some(v1::prompt::Kind::Text(text)) => text.len() as u32,
                _ => 0,
            },
        };
        Ok(Response::new(v1::EmbedResponse {
            model: "kjv".to_owned(),
            embeddings: request.prompts.iter().map(embedding).collect(),
            numerics: None,
        }))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Answer<v1::DetokenizeResponse> {
        let ids = request.into_inner().ids;
        Ok(Response::new(v1::DetokenizeResponse {
            model: "kjv".to_owned(),
            text: ids.iter().filter_map(|&id| char::from_u32(id)).collect(),
        }))
    }
}

struct Guard(Arc<Mutex<Seen>>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.lock().unwrap().cancelled += 1;
    }
}

pub fn model() -> v1::ModelInfo {
    v1::ModelInfo {
        serving: Some(v1::Serving {
            aliases: vec!["book".to_owned()],
            ..v1::Serving::default()
        }),
        trust_domain: "trusted".to_owned(),
        name: "kjv".to_owned(),
        state: v1::ModelState::Loaded.into(),
        source: "bundled".to_owned(),
        summary: Some(v1::ModelSummary {
            architecture: "llama".to_owned(),
            parameters: 4_726_016,
            context_length: 1024,
            vocabulary: 4096,
            weights_dtype: "bf16".to_owned(),
            model_hash: "00ff".to_owned(),
            has_chat_template: true,
            ..v1::ModelSummary::default()
        }),
        file_bytes: 9_480_648,
        workers: vec!["cpu:0".to_owned()],
        problem: String::new(),
        is_default: true,
        packed: vec![v1::PackedInfo {
            layout: "panel16-1".to_owned(),
            state: v1::PackedState::Ready.into(),
            bytes_done: 9_480_648,
            bytes_total: 9_480_648,
            packings: 1,
            workers: vec!["w0".to_owned()],
            problem: String::new(),
        }],
        ..v1::ModelInfo::default()
    }
}

fn crash() -> v1::CrashReport {
    v1::CrashReport {
        id: "w0.1".to_owned(),
        worker: "w0".to_owned(),
        epoch: 1,
        pid: 4241,
        device: "cpu:0".to_owned(),
        kind: "signal".to_owned(),
        reason: "killed by SIGSEGV".to_owned(),
        blackbox: Some(v1::BlackBox {
            doing: "stepping".to_owned(),
            model: "kjv".to_owned(),
            op: "mul_mat".to_owned(),
            node: 12,
            signal: Some(v1::SignalSite {
                signal: 11,
                name: "SIGSEGV".to_owned(),
                frames: vec![1 << 60],
                ..v1::SignalSite::default()
            }),
            ..v1::BlackBox::default()
        }),
        requests: vec![v1::AffectedRequest {
            request_id: "r1".to_owned(),
            model: "kjv".to_owned(),
            generated: 3,
            outcome: "continued on w0 (epoch 2)".to_owned(),
            trace_id: String::new(),
        }],
        log: vec!["last\x1b[2J words".to_owned()],
        ..v1::CrashReport::default()
    }
}

#[tonic::async_trait]
impl Control for Fake {
    type LoadModelStream = Replies<v1::LoadModelProgress>;
    type WatchEventsStream = Replies<v1::Event>;

    async fn list_devices(
        &self,
        _: Request<v1::ListDevicesRequest>,
    ) -> Answer<v1::ListDevicesResponse> {
        let device = v1::Device {
            id: "cpu:0".to_owned(),
            backend: "cpu".to_owned(),
            description: "A processor\x1b[2J".to_owned(),
            memory_bytes: 8 << 30,
            cores: vec![0, 1],
            path: "avx2".to_owned(),
            problem: String::new(),
            program: String::new(),
            pci_id: String::new(),
            integrated: true,
            driver: String::new(),
            gauge: None,
            members: vec![],
        };
        Ok(Response::new(v1::ListDevicesResponse {
            devices: vec![device],
            confinement: vec![layer("landlock", v1::LayerState::InForce, "ABI 7")],
        }))
    }

    async fn list_workers(
        &self,
        _: Request<v1::ListWorkersRequest>,
    ) -> Answer<v1::ListWorkersResponse> {
        let worker = |id: &str, pid, state: v1::WorkerState| v1::WorkerInfo {
            id: id.to_owned(),
            epoch: 2,
            pid,
            state: state.into(),
            lease: Some(v1::Lease {
                device: "cpu:0".to_owned(),
                trust_domain: "trusted".to_owned(),
                memory_bytes: 1 << 30,
                cores: vec![0],
            }),
            models: vec!["kjv".to_owned()],
            outstanding_tokens: 40,
            running_requests: 1,
            deaths: 1,
            last_exit: "killed by SIGKILL".to_owned(),
            uptime_ms: 61_000,
            resident_bytes: 64 << 20,
            confinement: "no-new-privs, landlock, seccomp".to_owned(),
            last_exit_kind: "signal".to_owned(),
            memory: Vec::new(),
            layers: vec![
                layer("user", v1::LayerState::NotNeeded, "root did not start it"),
                layer(
                    "landlock",
                    v1::LayerState::Missing,
                    "the kernel\x1b[2J lacks it",
                ),
            ],
            caches: vec![v1::CacheStatus {
                model: "kjv".to_owned(),
                bytes: 1 << 20,
                blocks: 64,
                used_blocks: 3,
                requests: vec![v1::RequestMemory {
                    request_id: "mine\x1b[2J".to_owned(),
                    tokens: 33,
                    blocks: 3,
                    bytes: 48 << 10,
                }],
                ..v1::CacheStatus::default()
            }],
        };
        Ok(Response::new(v1::ListWorkersResponse {
            workers: vec![
                worker("w0", 4242, v1::WorkerState::Ready),
                worker("w1", 0, v1::WorkerState::Backoff),
            ],
        }))
    }

    async fn list_crashes(
        &self,
        _: Request<v1::ListCrashesRequest>,
    ) -> Answer<v1::ListCrashesResponse> {
        let crashes = if self.bare { vec![] } else { vec![crash()] };
        Ok(Response::new(v1::ListCrashesResponse { crashes }))
    }

    async fn get_crash(&self, request: Request<v1::GetCrashRequest>) -> Answer<v1::CrashReport> {
        let found = crash();
        match request.into_inner().id == found.id {
            true => Ok(Response::new(found)),
            false => Err(Error::new(Reason::CrashNotFound, "there is no crash report").into()),
        }
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Answer<v1::ListModelsResponse> {
        if self.bare {
            return Ok(Response::new(v1::ListModelsResponse::default()));
        }
        let spare = v1::ModelInfo {
            name: "spare".to_owned(),
            state: v1::ModelState::Available.into(),
            ..v1::ModelInfo::default()
        };
        Ok(Response::new(v1::ListModelsResponse {
            models: vec![model(), spare],
        }))
    }

    async fn load_model(
        &self,
        request: Request<v1::LoadModelRequest>,
    ) -> Answer<Self::LoadModelStream> {
        let request = request.into_inner();
        self.seen.lock().unwrap().loads.push(request.clone());
        if request.name == "missing" {
            return Err(not_found("missing"));
        }
        if request.path.ends_with("broken.gguf") {
            let error = Error::new(
                Reason::ModelCorrupt,
                "broken.gguf is cut off; fetch it again",
            );
            return Err(error.into());
        }
        let step = v1::LoadModelProgress {
            name: request.name.clone(),
            worker: "cpu:0".to_owned(),
            bytes_done: 1 << 20,
            bytes_total: 2 << 20,
            stage: "mapping".to_owned(),
            ..v1::LoadModelProgress::default()
        };
        let mut info = model();
        if !request.name.is_empty() {
            info.name = request.name;
        } else {
            info.name = "from-path".to_owned();
        }
        let last = v1::LoadModelProgress {
            name: info.name.clone(),
            done: true,
            model: Some(info),
            ..v1::LoadModelProgress::default()
        };
        let steps = tokio_stream::iter([Ok(step), Ok(last)]);
        Ok(Response::new(Box::pin(steps)))
    }

    async fn inspect_model(
        &self,
        request: Request<v1::InspectModelRequest>,
    ) -> Answer<v1::Inspection> {
        let path = request.into_inner().path;
        let mut found = v1::Inspection {
            verdict: v1::Verdict::Fine.into(),
            source: path.clone(),
            files: vec![v1::InspectedFile {
                name: "m\x1b[2J.gguf".to_owned(),
                bytes: 1 << 20,
                sha256: "00ff".to_owned(),
            }],
            ..v1::Inspection::default()
        };
        if path.ends_with("odd.gguf") {
            found.verdict = v1::Verdict::Suspicious.into();
            found.findings.push(v1::Finding {
                kind: "trailing_bytes".to_owned(),
                what: "9000 bytes come after the last tensor".to_owned(),
            });
        }
        if path.ends_with("broken.gguf") {
            found.verdict = v1::Verdict::Refused.into();
            found.reason = Reason::ModelCorrupt.name().to_owned();
            found.problem = "broken.gguf is cut off; fetch it again".to_owned();
        }
        if path.ends_with("deadly.gguf") {
            found.verdict = v1::Verdict::Died.into();
            found.death = Some(crash());
        }
        Ok(Response::new(found))
    }

    async fn unload_model(
        &self,
        request: Request<v1::UnloadModelRequest>,
    ) -> Answer<v1::UnloadModelResponse> {
        let name = request.into_inner().name;
        if name == "missing" {
            return Err(not_found("missing"));
        }
        self.seen.lock().unwrap().unloads.push(name);
        Ok(Response::new(v1::UnloadModelResponse {}))
    }

    async fn release_worker(
        &self,
        request: Request<v1::ReleaseWorkerRequest>,
    ) -> Answer<v1::ReleaseWorkerResponse> {
        match request.into_inner().worker.as_str() {
            "w1" => Ok(Response::new(v1::ReleaseWorkerResponse {})),
            _ => Err(Error::new(Reason::InvalidArgument, "it is not quarantined").into()),
        }
    }

    async fn restart_worker(
        &self,
        request: Request<v1::RestartWorkerRequest>,
    ) -> Answer<v1::RestartWorkerResponse> {
        match request.into_inner().worker.as_str() {
            "w1" => Ok(Response::new(v1::RestartWorkerResponse {})),
            _ => Err(Error::new(Reason::InvalidArgument, "it is not ready").into()),
        }
    }

    async fn drain_worker(
        &self,
        request: Request<v1::DrainWorkerRequest>,
    ) -> Answer<v1::DrainWorkerResponse> {
        match request.into_inner().worker.as_str() {
            "w1" => Ok(Response::new(v1::DrainWorkerResponse {})),
            _ => Err(Error::new(Reason::InvalidArgument, "it is not ready").into()),
        }
    }

    async fn watch_events(
        &self,
        _: Request<v1::WatchEventsRequest>,
    ) -> Answer<Self::WatchEventsStream> {
        let event = v1::Event {
            kind: v1::EventKind::WorkerDied.into(),
            time_ms: 3_723_004,
            worker: "w0".to_owned(),
            epoch: 1,
            model: String::new(),
            message: "killed by SIGKILL".to_owned(),
            exit_kind: "signal".to_owned(),
        };
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(event)]))))
    }
}
