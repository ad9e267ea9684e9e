//! Workers without a process: each epoch is a runtime of its own that serves the real protocol over socketpairs
//! and can be dropped at any moment, as a kill would.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use hotcell_ipc::{
    socket::{DescriptorReceiver, descriptor_pair, stream_pair},
    spawn::ExitStatus,
    transport::{Windows, incoming_once},
};
use hotcell_proto::{
    PROTOCOL_VERSION,
    error::{Error, Reason},
    v1::{
        Accepted, AttachRequest, CancelStreamRequest, CancelStreamResponse, CheckRequest,
        CheckResponse, Delta, DetokenizeRequest, DetokenizeResponse, DrainRequest, DrainResponse,
        FinishReason, Finished, GenerateEvent, GenerateRequest, HandshakeRequest,
        HandshakeResponse, JoinRequest, JoinResponse, LoadProgress, LoadRequest, Loaded,
        ModelSummary, NumericsClass, OpenTensorsRequest, OpenTensorsResponse, PackPiece,
        PackRequest, Prompt, Timings, TokenizeRequest, TokenizeResponse, UnloadRequest,
        UnloadResponse, UsePackedRequest, UsePackedResponse,
        generate_event::Event,
        prompt::Kind,
        tokens_server::{Tokens, TokensServer},
        worker_server::{Worker, WorkerServer},
    },
};
use hotcell_scheduler::{
    death::Ended,
    fleet::{Boxed, Launch, Launched, Order, Process},
    stream::Room,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

pub const VOCABULARY: u32 = 1000;
pub const CONTEXT: u32 = 4096;

/// How the next stream behaves.
#[derive(Clone, Debug)]
pub enum Act {
    /// Dies once this many tokens of the whole stream were said, having given them `flush` to get out.
    DieAt(usize, Duration),
    /// Dies before it accepts.
    DieAtOnce,
    /// Answers with this reason.
    Refuse(Reason),
    /// Says a token that does not exist, after so many that do.
    LieAfter(usize),
    /// Ends the stream without Finished.
    Stop,
    /// Says nothing after Accepted.
    Stall,
}

/// What all fake workers share with the test.
#[derive(Default)]
pub struct Stage {
    /// Acts of the streams to come, in order; none left: they behave.
    pub acts: Mutex<VecDeque<Act>>,
    /// Streams that run now.
    pub running: AtomicUsize,
    /// Deltas handed to the transport.
    pub said: AtomicU64,
    /// Requests as they came.
    pub seen: Mutex<Vec<GenerateRequest>>,
    /// Numerics class by worker.
    pub classes: Mutex<HashMap<String, String>>,
    /// Why models of this name do not load.
    pub unloadable: Mutex<HashMap<String, Reason>>,
    /// What streams may hold, if not what a scheduler's may.
    pub room: Mutex<Option<Room>>,
    /// Whether tokens have no text, so that their events are as small as they get.
    pub terse: AtomicBool,
    /// Steps of progress that a load takes, 50 ms each.
    pub load_steps: AtomicUsize,
    /// Whether all of them say the same.
    pub load_stands: AtomicBool,
    /// Whether unloading never ends.
    pub holds_on: AtomicBool,
    /// Prompts that begin with this id kill their worker once so many tokens of the stream were said.
    pub poison: Mutex<Option<(u32, usize)>>,
    /// The `traceparent` of each request, as it came.
    pub parents: Mutex<Vec<String>>,
    /// Which worker was asked to run which request.
    pub ran: Mutex<Vec<(String, String)>>,
    /// With which exit code workers die, if not by SIGKILL.
    pub exit_code: Mutex<Option<i32>>,
    /// Models, or `MODEL@WORKER`, that kill who loads them.
    pub deadly: Mutex<Vec<String>>,
    /// What workers answer when they are checked, by worker or `WORKER.EPOCH`: wrong numbers. Others answer 0.
    pub wrong: Mutex<HashMap<String, u8>>,
    /// Devices, by their workers' names, on which every stream kills its process at the first token.
    pub killers: Mutex<Vec<String>>,
    /// Streams that have to run before any of them gets its first token; 0 once they did.
    pub company: AtomicUsize,
    /// The token before which every stream waits, as long as this is not 0.
    pub hold_at: AtomicUsize,
    /// Processes, `WORKER.EPOCH`, that do not answer calls for text.
    pub deaf: Mutex<Vec<String>>,
    /// Whether checks are not answered for now.
    pub holds_answers: AtomicBool,
    /// How many checks to come are refused, because the worker is full.
    pub full_for: AtomicUsize,
    /// Whether a check kills its worker.
    pub dies_of_checks: AtomicBool,
    /// Checks made.
    pub checks: Mutex<Vec<(String, CheckRequest)>>,
    /// What workers that are to pack a model send, after which each says that this was all; none: they like models as they are.
    pub pieces: Mutex<Vec<PackPiece>>,
    /// Why they do not take packed copies.
    pub declines: Mutex<Option<Reason>>,
    /// Copies that they were asked to take.
    pub offered: AtomicUsize,
    pids: AtomicU64,
}

impl Stage {
    pub fn act(&self, act: Act) {
        self.acts.lock().unwrap().push_back(act);
    }
}

pub struct Fakes(pub Arc<Stage>);

struct FakeProcess {
    pid: u32,
    runtime: Option<tokio::runtime::Runtime>,
    die: CancellationToken,
    stage: Arc<Stage>,
}

impl Process for FakeProcess {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn terminate(&self) {
        self.die.cancel();
    }

    fn kill(&self) {
        self.die.cancel();
    }

    fn wait(&mut self) -> Boxed<'_, Ended> {
        Box::pin(async {
            self.die.cancelled().await;
            if let Some(runtime) = self.runtime.take() {
                runtime.shutdown_background();
            }
            Ended::from(match *self.stage.exit_code.lock().unwrap() {
                Some(code) => ExitStatus::Code(code),
                None => ExitStatus::Signal {
                    signal: 9,
                    core: false,
                },
            })
        })
    }
}

impl Drop for FakeProcess {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Launch for Fakes {
    fn launch<'a>(&'a self, order: Order<'a>) -> Boxed<'a, io::Result<Launched>> {
        Box::pin(async move { self.start(order) })
    }
}

impl Fakes {
    fn start(&self, order: Order<'_>) -> io::Result<Launched> {
        let (control, its_control) = stream_pair()?;
        let (tokens, its_tokens) = stream_pair()?;
        let (tensors, its_tensors) = stream_pair()?;
        let (descriptors, its_descriptors) = descriptor_pair()?;
        std::thread::spawn(move || {
            let receiver = DescriptorReceiver::new(its_descriptors).unwrap();
            while receiver.recv().is_ok() {}
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let class = self.0.classes.lock().unwrap().get(order.worker).cloned();
        let worker = FakeWorker {
            stage: Arc::clone(&self.0),
            die: CancellationToken::new(),
            name: order.worker.to_owned(),
            epoch: order.epoch,
            class: class.unwrap_or_else(|| "fake/r1".to_owned()),
        };
        let serve = |fd: OwnedFd| {
            let worker = worker.clone();
            runtime.spawn(async move {
                let (incoming, _end) = incoming_once(fd);
                let router = Windows::default()
                    .server()
                    .max_concurrent_streams(512)
                    .add_service(WorkerServer::new(worker.clone()))
                    .add_service(TokensServer::new(worker));
                let _ = router.serve_with_incoming(incoming).await;
            });
        };
        serve(its_control);
        serve(its_tokens);
        serve(its_tensors);
        let pid = 1_000_000 + self.0.pids.fetch_add(1, Ordering::Relaxed) as u32;
        Ok(Launched {
            process: Box::new(FakeProcess {
                pid,
                runtime: Some(runtime),
                die: worker.die,
                stage: Arc::clone(&self.0),
            }),
            control: control.into(),
            tokens: tokens.into(),
            tensors: tensors.into(),
            descriptors,
        })
    }
}

#[derive(Clone)]
struct FakeWorker {
    stage: Arc<Stage>,
    die: CancellationToken,
    name: String,
    epoch: u64,
    class: String,
}

impl FakeWorker {
    fn layout(&self) -> String {
        match self.stage.pieces.lock().unwrap().is_empty() {
            true => String::new(),
            false => "fake-1".to_owned(),
        }
    }

    fn numerics(&self) -> NumericsClass {
        NumericsClass {
            id: self.class.clone(),
            reproducible: true,
            model_hash: "h".into(),
        }
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Worker for FakeWorker {
    type LoadStream = ReceiverStream<Result<LoadProgress, Status>>;

    async fn handshake(&self, request: Request<HandshakeRequest>) -> Answer<HandshakeResponse> {
        assert_eq!(request.get_ref().protocol_version, PROTOCOL_VERSION);
        Ok(Response::new(HandshakeResponse {
            protocol_version: PROTOCOL_VERSION,
            confinement: "none".into(),
            packing: self.layout(),
            ..HandshakeResponse::default()
        }))
    }

    async fn load(&self, request: Request<LoadRequest>) -> Answer<Self::LoadStream> {
        let request = request.into_inner();
        let here = format!("{}@{}", request.model, self.name);
        let deadly = |d: &String| *d == request.model || *d == here;
        if self.stage.deadly.lock().unwrap().iter().any(deadly) {
            self.die.cancel();
            std::future::pending::<()>().await;
        }
        if let Some(&reason) = self.stage.unloadable.lock().unwrap().get(&request.model) {
            return Err(Error::new(reason, "cannot load it").into());
        }
        let declines = self.stage.declines.lock().unwrap().is_some();
        let has_copy = request.packed.is_some();
        self.stage
            .offered
            .fetch_add(usize::from(has_copy), Ordering::SeqCst);
        let (sender, receiver) = mpsc::channel(4);
        let step = LoadProgress {
            bytes_done: 1,
            bytes_total: 1 << 20,
            ..LoadProgress::default()
        };
        let done = LoadProgress {
            loaded: Some(Loaded {
                summary: Some(ModelSummary {
                    architecture: "fake".into(),
                    vocabulary: VOCABULARY,
                    context_length: CONTEXT,
                    ..ModelSummary::default()
                }),
                numerics: Some(self.numerics()),
                cache_tokens: 1,
                packing: self.layout(),
                packing_files: vec![0; usize::from(!self.layout().is_empty())],
                packed: has_copy && !declines,
                ..Loaded::default()
            }),
            ..LoadProgress::default()
        };
        let steps = self.stage.load_steps.load(Ordering::Relaxed);
        let stands = self.stage.load_stands.load(Ordering::Relaxed);
        tokio::spawn(async move {
            let mut step = step;
            let _ = sender.send(Ok(step.clone())).await;
            for _ in 0..steps {
                tokio::time::sleep(Duration::from_millis(50)).await;
                step.bytes_done += u64::from(!stands);
                if sender.send(Ok(step.clone())).await.is_err() {
                    return;
                }
            }
            let _ = sender.send(Ok(done)).await;
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn inspect(
        &self,
        _: Request<hotcell_proto::v1::InspectRequest>,
    ) -> Answer<hotcell_proto::v1::Inspected> {
        Err(Status::unimplemented("nothing is in no files"))
    }

    type PackStream = ReceiverStream<Result<PackPiece, Status>>;

    async fn pack(&self, _: Request<Streaming<PackRequest>>) -> Answer<Self::PackStream> {
        let mut pieces = self.stage.pieces.lock().unwrap().clone();
        pieces.push(PackPiece::default());
        let (sender, receiver) = mpsc::channel(pieces.len());
        for piece in pieces {
            let _ = sender.try_send(Ok(piece));
        }
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn use_packed(&self, _: Request<UsePackedRequest>) -> Answer<UsePackedResponse> {
        self.stage.offered.fetch_add(1, Ordering::SeqCst);
        match *self.stage.declines.lock().unwrap() {
            Some(reason) => Err(Error::new(reason, "it does not like it").into()),
            None => Ok(Response::new(UsePackedResponse {})),
        }
    }

    async fn unload(&self, _: Request<UnloadRequest>) -> Answer<UnloadResponse> {
        if self.stage.holds_on.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(UnloadResponse {}))
    }

    async fn open_tensors(&self, _: Request<OpenTensorsRequest>) -> Answer<OpenTensorsResponse> {
        Err(Status::unimplemented("a fake has no tensors"))
    }

    async fn join(&self, _: Request<JoinRequest>) -> Answer<JoinResponse> {
        Err(Status::unimplemented("a fake has one scheduler"))
    }

    async fn check(&self, request: Request<CheckRequest>) -> Answer<CheckResponse> {
        let request = request.into_inner();
        while self.stage.holds_answers.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if self.stage.dies_of_checks.load(Ordering::Relaxed) {
            self.die.cancel();
            std::future::pending::<()>().await;
        }
        let less = |left: usize| left.checked_sub(1);
        let full = &self.stage.full_for;
        if full
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
            .is_ok()
        {
            return Err(Error::new(Reason::Overloaded, "no room for it").into());
        }
        let process = format!("{}.{}", self.name, self.epoch);
        let value = {
            let wrong = self.stage.wrong.lock().unwrap();
            *wrong.get(&process).or(wrong.get(&self.name)).unwrap_or(&0)
        };
        let answers = (0..request.steps).map(|_| vec![value; 32]).collect();
        let mut checks = self.stage.checks.lock().unwrap();
        checks.push((process, request));
        Ok(Response::new(CheckResponse {
            answers,
            ..CheckResponse::default()
        }))
    }

    async fn status(
        &self,
        _: Request<hotcell_proto::v1::StatusRequest>,
    ) -> Answer<hotcell_proto::v1::StatusResponse> {
        Ok(Response::new(hotcell_proto::v1::StatusResponse::default()))
    }

    type WatchBlocksStream = tokio_stream::Empty<Result<hotcell_proto::v1::BlocksChanged, Status>>;

    async fn watch_blocks(
        &self,
        _: Request<hotcell_proto::v1::WatchBlocksRequest>,
    ) -> Answer<Self::WatchBlocksStream> {
        Ok(Response::new(tokio_stream::empty()))
    }

    type ReadTokenizerStream =
        tokio_stream::Empty<Result<hotcell_proto::v1::TokenizerPiece, Status>>;

    async fn read_tokenizer(
        &self,
        _: Request<hotcell_proto::v1::ReadTokenizerRequest>,
    ) -> Answer<Self::ReadTokenizerStream> {
        Ok(Response::new(tokio_stream::empty()))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Answer<DrainResponse> {
        Ok(Response::new(DrainResponse {}))
    }
}

/// Token `index` of the continuation of a prompt.
pub fn token(prompt: &[u32], seed: u64, index: usize) -> u32 {
    let sum: u64 = prompt.iter().map(|&id| u64::from(id)).sum();
    ((sum + seed + index as u64 * 7) % u64::from(VOCABULARY)) as u32
}

/// Its text: long, so that streams which nobody reads fill every buffer on the way.
pub fn text(id: u32) -> String {
    format!("<{id}>{:-<300}", "")
}

struct Running(Arc<Stage>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

fn event(event: Event) -> Result<GenerateEvent, Status> {
    Ok(GenerateEvent { event: Some(event) })
}

fn ids(prompt: Option<Prompt>) -> Vec<u32> {
    match prompt.and_then(|p| p.kind) {
        Some(Kind::Ids(ids)) => ids.ids,
        other => panic!("the scheduler must send ids, not {other:?}"),
    }
}

#[tonic::async_trait]
impl Tokens for FakeWorker {
    type GenerateStream = ReceiverStream<Result<GenerateEvent, Status>>;
    type AttachStream = Self::GenerateStream;

    async fn attach(&self, _: Request<AttachRequest>) -> Answer<Self::AttachStream> {
        Err(Status::unimplemented("a fake keeps no streams"))
    }

    async fn cancel(&self, _: Request<CancelStreamRequest>) -> Answer<CancelStreamResponse> {
        Err(Status::unimplemented("a fake keeps no streams"))
    }

    async fn generate(&self, request: Request<GenerateRequest>) -> Answer<Self::GenerateStream> {
        if let Some(parent) = request.metadata().get("traceparent") {
            let parent = parent.to_str().unwrap().to_owned();
            self.stage.parents.lock().unwrap().push(parent);
        }
        let request = request.into_inner();
        self.stage.seen.lock().unwrap().push(request.clone());
        let ran = (self.name.clone(), request.request_id.clone());
        self.stage.ran.lock().unwrap().push(ran);
        let act = self.stage.acts.lock().unwrap().pop_front();
        match act {
            Some(Act::DieAtOnce) => {
                self.die.cancel();
                std::future::pending::<()>().await;
            }
            Some(Act::Refuse(reason)) => return Err(Error::new(reason, "I refuse").into()),
            _ => {}
        }
        let (sender, receiver) = mpsc::channel(1);
        self.stage.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(Arc::clone(&self.stage));
        let worker = self.clone();
        tokio::spawn(async move {
            let stage = Arc::clone(&running.0);
            let prompt = ids(request.prompt);
            let seed = request.seed.unwrap();
            let resume = request.resume.unwrap_or_default();
            let mut emitted = 0;
            for (index, &id) in resume.generated_ids.iter().enumerate() {
                assert_eq!(id, token(&prompt, seed, index));
                emitted += text(id).len() as u64;
            }
            assert_eq!(emitted, resume.text_bytes_emitted);
            let accepted = Accepted {
                request_id: request.request_id,
                model: request.model,
                prompt_ids: prompt.clone(),
                seed,
                numerics: Some(worker.numerics()),
            };
            if sender.send(event(Event::Accepted(accepted))).await.is_err() {
                return;
            }
            loop {
                let company = stage.company.load(Ordering::SeqCst);
                if stage.running.load(Ordering::SeqCst) >= company {
                    stage.company.store(0, Ordering::SeqCst);
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let home = worker.name.split('.').next().unwrap_or_default();
            if stage.killers.lock().unwrap().iter().any(|k| k == home) {
                // What was said gets out first.
                tokio::time::sleep(Duration::from_millis(2)).await;
                worker.die.cancel();
                return std::future::pending().await;
            }
            for index in resume.generated_ids.len()..request.max_tokens as usize {
                let held = |at: usize| at > 0 && at <= index;
                while held(stage.hold_at.load(Ordering::SeqCst)) && !sender.is_closed() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                match act {
                    Some(Act::DieAt(at, flush)) if index == at => {
                        tokio::time::sleep(flush).await;
                        worker.die.cancel();
                        return std::future::pending().await;
                    }
                    Some(Act::LieAfter(after)) if index == after => {
                        let lie = Delta {
                            token_ids: vec![VOCABULARY],
                            ..Delta::default()
                        };
                        let _ = sender.send(event(Event::Delta(lie))).await;
                    }
                    Some(Act::Stop) => return,
                    Some(Act::Stall) => {
                        sender.closed().await;
                        return;
                    }
                    _ => {}
                }
                let poison = *stage.poison.lock().unwrap();
                if poison.is_some_and(|(id, at)| prompt.first() == Some(&id) && index >= at) {
                    // What was said gets out first.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    worker.die.cancel();
                    return std::future::pending().await;
                }
                let id = token(&prompt, seed, index);
                let terse = stage.terse.load(Ordering::Relaxed);
                let delta = Delta {
                    text: if terse { String::new() } else { text(id) },
                    token_ids: vec![id],
                    ..Delta::default()
                };
                if sender.send(event(Event::Delta(delta))).await.is_err() {
                    return;
                }
                stage.said.fetch_add(1, Ordering::SeqCst);
            }
            if let Some(Act::DieAt(_, flush)) = act {
                tokio::time::sleep(flush).await;
                worker.die.cancel();
                return std::future::pending().await;
            }
            let finished = Finished {
                reason: FinishReason::MaxTokens.into(),
                seed,
                numerics: Some(worker.numerics()),
                // The last one is longer than it can have been.
                timings: Some(Timings {
                    queue_ms: 0.01,
                    prefill_ms: 0.02,
                    decode_ms: 1e9,
                }),
                ..Finished::default()
            };
            let _ = sender.send(event(Event::Finished(finished))).await;
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn tokenize(&self, request: Request<TokenizeRequest>) -> Answer<TokenizeResponse> {
        let Some(Kind::Text(text)) = request.into_inner().prompt.and_then(|p| p.kind) else {
            return Err(Error::new(Reason::TemplateFailed, "no template").into());
        };
        let once = || self.stage.acts.lock().unwrap().pop_front().is_some();
        if text == "always die" || text == "die" && once() {
            self.die.cancel();
            std::future::pending::<()>().await;
        }
        Ok(Response::new(TokenizeResponse {
            model: String::new(),
            ids: text.bytes().map(u32::from).collect(),
            text,
        }))
    }

    async fn embed(
        &self,
        _: Request<hotcell_proto::v1::EmbedRequest>,
    ) -> Answer<hotcell_proto::v1::EmbedResponse> {
        Err(Status::unimplemented("no embeddings here"))
    }

    async fn detokenize(&self, request: Request<DetokenizeRequest>) -> Answer<DetokenizeResponse> {
        let ids = request.into_inner().ids;
        let process = format!("{}.{}", self.name, self.epoch);
        if self.stage.deaf.lock().unwrap().contains(&process) {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(DetokenizeResponse {
            model: String::new(),
            text: ids.into_iter().map(text).collect(),
        }))
    }
}
