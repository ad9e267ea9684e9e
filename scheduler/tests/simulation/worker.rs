//! Simulated workers: the real protocol over connections in memory, tokens from a pure function, faults by chance.

use std::{collections::HashMap, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use hotcell_ipc::{blackbox::Reader, socket::descriptor_pair, transport::Windows};
use hotcell_proto::{
    PROTOCOL_VERSION,
    error::{Error, Reason},
    v1::{
        Accepted, CheckRequest, CheckResponse, Delta, DetokenizeRequest, DetokenizeResponse,
        DrainRequest, DrainResponse, FinishReason, Finished, GenerateEvent, GenerateRequest,
        HandshakeRequest, HandshakeResponse, JoinRequest, JoinResponse, LoadProgress, LoadRequest,
        Loaded, ModelSummary, NumericsClass, OpenTensorsRequest, OpenTensorsResponse, PackPiece,
        PackRequest, TokenizeRequest, TokenizeResponse, UnloadRequest, UnloadResponse, Usage,
        UsePackedRequest, UsePackedResponse,
        generate_event::Event,
        prompt::Kind,
        tensors_server::TensorsServer,
        tokens_server::{Tokens, TokensServer},
        worker_server::{Worker, WorkerServer},
    },
};
use hotcell_scheduler::{
    death::Ended,
    fleet::{Boxed, Launch, Launched, Order, Process, TOKENS_WINDOWS, TensorDoor, Wire},
};
use tokio::{io::duplex, sync::mpsc, time::sleep};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    chance::mix,
    wire::End,
    world::{Conversation, How, Life, World},
};

pub const VOCABULARY: u32 = 5000;
pub const CONTEXT: u32 = 4096;

/// Token `index` of the continuation of a prompt: what every worker must say.
pub fn token(prompt: &[u32], seed: u64, index: usize) -> u32 {
    let prompt = prompt.iter().fold(seed, |h, &id| mix(h ^ u64::from(id)));
    (mix(prompt ^ mix(index as u64)) % u64::from(VOCABULARY)) as u32
}

/// Its text.
pub fn text(id: u32) -> String {
    format!("{id} ")
}

/// Starts simulated workers.
pub struct Simulated {
    pub world: Arc<World>,
    /// Numerics classes by worker.
    pub classes: HashMap<String, String>,
}

/// A process, and its end of the socket for files, which nobody reads.
struct Handle {
    life: Arc<Life>,
    worker: SimulatedWorker,
    _descriptors: OwnedFd,
}

impl Process for Handle {
    fn pid(&self) -> u32 {
        self.life.pid
    }

    fn terminate(&self) {
        self.life.note("SIGTERM");
        // Some take their time, and some are deaf.
        match self.life.draw(|c| c.below(4)) {
            0 => {}
            1 => self.life.die_in(Duration::from_millis(500)),
            _ => self.life.die(How::Exit(0)),
        }
    }

    fn kill(&self) {
        self.life.note("SIGKILL");
        self.life.die(How::Kill);
    }

    fn blackbox(&self) -> Option<&Arc<Reader>> {
        self.life.blackbox()
    }

    fn tensor_door(&self) -> Option<TensorDoor> {
        let worker = self.worker.clone();
        Some(Arc::new(move || {
            worker.connect(Conversation::Tensors, Windows::default())
        }))
    }

    fn wait(&mut self) -> Boxed<'_, Ended> {
        Box::pin(async {
            self.life.token().cancelled().await;
            // The kernel frees memory first.
            sleep(self.life.draw(|c| match c.below(10) {
                0 => c.ms(0, 3000),
                _ => c.ms(0, 5),
            }))
            .await;
            self.life.reap()
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.life.die(How::Kill);
        self.life.reap();
    }
}

impl Launch for Simulated {
    fn launch<'a>(&'a self, order: Order<'a>) -> Boxed<'a, io::Result<Launched>> {
        Box::pin(async move {
            let mut chance = self
                .world
                .chance(&format!("launch {} {}", order.worker, order.epoch));
            if chance.percent(3) && self.world.fault() {
                self.world.excuse_all(Reason::NoWorker);
                self.world.note(format!("{} cannot start", order.worker));
                return Err(io::Error::other("no more processes"));
            }
            sleep(chance.ms(0, 2)).await;
            self.start(order)
        })
    }

    fn jitter(&self) -> f64 {
        0.5
    }
}

impl Simulated {
    fn start(&self, order: Order<'_>) -> io::Result<Launched> {
        let life = self.world.begin(order.worker, order.epoch);
        // A standby or a throw-away worker has the device of the worker it is named after.
        let home = order.worker.split('.').next().unwrap_or_default();
        let class = self.classes.get(home).cloned();
        let worker = SimulatedWorker {
            life: Arc::clone(&life),
            class: class.unwrap_or_default(),
        };
        let control = worker.connect(Conversation::Control, Windows::default());
        let tokens = worker.connect(Conversation::Tokens, TOKENS_WINDOWS);
        let tensors = worker.connect(Conversation::Tensors, Windows::default());
        let (descriptors, its_descriptors) = descriptor_pair()?;
        Ok(Launched {
            process: Box::new(Handle {
                life,
                worker,
                _descriptors: its_descriptors,
            }),
            control,
            tokens,
            tensors,
            descriptors,
        })
    }
}

/// A simulated worker, as it is called.
#[derive(Clone)]
pub struct SimulatedWorker {
    pub life: Arc<Life>,
    class: String,
}

/// What goes wrong with one stream, at one of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mishap {
    Die(How),
    /// Says nothing more; somebody kills the process after so long.
    Hang(Duration),
    Late(Duration),
    /// Ends the stream without Finished.
    Stop,
    /// Says something that cannot be.
    Lie(u64),
    /// Ends with a status of its own that it does not explain.
    Babble,
    /// Refuses before it begins: for want of room, or for good.
    Full,
    Refuse,
}

impl SimulatedWorker {
    fn numerics(&self) -> NumericsClass {
        NumericsClass {
            id: self.class.clone(),
            reproducible: true,
            model_hash: "h".into(),
        }
    }

    /// Serves a new connection; our end of it.
    fn connect(&self, conversation: Conversation, windows: Windows) -> Wire {
        let (ours, its) = duplex(1 << 16);
        let piece = self.life.draw(|c| match c.below(12) {
            0 => c.within(1, 40) as usize,
            _ => usize::MAX,
        });
        let end = End::new(its, Arc::clone(&self.life), conversation, piece);
        let serving = windows
            .server()
            .add_service(WorkerServer::new(self.clone()))
            .add_service(TensorsServer::new(self.clone()))
            .add_service(TokensServer::new(self.clone()));
        let life = Arc::clone(&self.life);
        tokio::spawn(async move {
            let incoming = tokio_stream::once(Ok::<_, io::Error>(end))
                .chain(tokio_stream::pending::<io::Result<End>>());
            tokio::select! {
                biased;
                () = life.token().cancelled() => {}
                _ = serving.serve_with_incoming(incoming) => {}
            }
        });
        Wire::Memory(Box::new(ours))
    }

    fn mishap(&self) -> Option<Mishap> {
        let mishap = self.life.draw(|c| {
            c.percent(50).then(|| match c.below(16) {
                0..=5 => Mishap::Die(How::draw(c)),
                6..=7 => Mishap::Hang(c.ms(10, 10_000)),
                8..=9 => Mishap::Late(c.ms(1, 5_000)),
                10 => Mishap::Stop,
                11 => Mishap::Lie(c.next()),
                12 => Mishap::Babble,
                13 => Mishap::Refuse,
                _ => Mishap::Full,
            })
        });
        mishap.filter(|_| self.life.world.fault())
    }

    /// A dead process does nothing.
    pub async fn living(&self) {
        if self.life.is_dead() {
            std::future::pending::<()>().await;
        }
    }

    async fn hang<T>(&self, time: Duration) -> T {
        self.life.die_in(time);
        std::future::pending().await
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Worker for SimulatedWorker {
    type LoadStream = ReceiverStream<Result<LoadProgress, Status>>;

    async fn handshake(&self, request: Request<HandshakeRequest>) -> Answer<HandshakeResponse> {
        assert_eq!(request.get_ref().protocol_version, PROTOCOL_VERSION);
        sleep(self.life.draw(|c| c.ms(0, 3))).await;
        self.living().await;
        Ok(Response::new(HandshakeResponse {
            protocol_version: PROTOCOL_VERSION,
            confinement: "none".into(),
            ..HandshakeResponse::default()
        }))
    }

    async fn load(&self, request: Request<LoadRequest>) -> Answer<Self::LoadStream> {
        let model = request.into_inner().model;
        let mishap = self.life.draw(|c| c.percent(10).then(|| c.below(4)));
        let mishap = mishap.filter(|_| self.life.world.fault());
        let step = self.life.draw(|c| c.ms(0, 20));
        if let Some(mishap) = mishap {
            self.life.note(format!("load of {model} fails: {mishap}"));
            // A model that nobody will load any more has failed with what went wrong last.
            self.life.world.excuse_all(Reason::NoWorker);
            self.life.world.excuse_all(Reason::WorkerLost);
        }
        match mishap {
            Some(0) => {
                self.life.die(How::Crash);
                self.living().await;
            }
            // The keeper's patience ends, not ours.
            Some(1) => self.hang(Duration::from_secs(600)).await,
            Some(2) => {
                self.life.world.excuse_all(Reason::NotAModel);
                return Err(Error::new(Reason::NotAModel, "that is no model").into());
            }
            _ => {}
        }
        let (sender, receiver) = mpsc::channel(4);
        let progress = LoadProgress {
            bytes_done: 1,
            bytes_total: 2,
            ..LoadProgress::default()
        };
        let done = LoadProgress {
            loaded: Some(Loaded {
                summary: Some(ModelSummary {
                    architecture: "simulated".into(),
                    vocabulary: VOCABULARY,
                    context_length: CONTEXT,
                    ..ModelSummary::default()
                }),
                numerics: Some(self.numerics()),
                cache_tokens: 1,
                ..Loaded::default()
            }),
            ..LoadProgress::default()
        };
        let worker = self.clone();
        tokio::spawn(async move {
            let _ = sender.send(Ok(progress)).await;
            sleep(step).await;
            if mishap == Some(3) {
                worker.life.die(How::OutOfMemory);
            }
            worker.living().await;
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
        Err(Status::unimplemented(
            "a simulated worker likes weights as they are",
        ))
    }

    async fn use_packed(&self, _: Request<UsePackedRequest>) -> Answer<UsePackedResponse> {
        Err(Status::unimplemented(
            "a simulated worker likes weights as they are",
        ))
    }

    async fn unload(&self, _: Request<UnloadRequest>) -> Answer<UnloadResponse> {
        sleep(self.life.draw(|c| c.ms(0, 10))).await;
        self.living().await;
        Ok(Response::new(UnloadResponse {}))
    }

    async fn open_tensors(&self, _: Request<OpenTensorsRequest>) -> Answer<OpenTensorsResponse> {
        Err(Status::unimplemented("no tensors here"))
    }

    async fn join(&self, _: Request<JoinRequest>) -> Answer<JoinResponse> {
        Err(Status::unimplemented("nobody takes over here"))
    }

    async fn check(&self, request: Request<CheckRequest>) -> Answer<CheckResponse> {
        sleep(self.life.draw(|c| c.ms(0, 10))).await;
        self.living().await;
        let request = request.into_inner();
        let answer = self.life.answer(&request.model, &self.class);
        let answers = (0..request.steps).map(|_| answer.to_vec()).collect();
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

type Sender = mpsc::Sender<Result<GenerateEvent, Status>>;

/// One stream of a worker.
struct Saying {
    worker: SimulatedWorker,
    request: GenerateRequest,
    prompt: Vec<u32>,
    seed: u64,
    out: Sender,
    mishap: Option<(Mishap, usize)>,
    /// Tokens that there were before.
    begun: usize,
}

impl Saying {
    async fn say(&self, event: Event) -> Option<()> {
        self.worker.living().await;
        let event = GenerateEvent { event: Some(event) };
        self.out.send(Ok(event)).await.ok()
    }

    /// What goes wrong before token `index`; none if the stream is over.
    async fn mishap(&mut self, index: usize, last: bool) -> Option<()> {
        let Some((mishap, _)) = self.mishap.take_if(|(_, at)| *at <= index || last) else {
            return Some(());
        };
        let life = Arc::clone(&self.worker.life);
        life.note(format!("{mishap:?} at {index} of {}", self.seed));
        match mishap {
            Mishap::Die(how) => life.die(how),
            Mishap::Hang(time) => {
                life.hang(time);
                std::future::pending().await
            }
            Mishap::Late(time) => sleep(time).await,
            Mishap::Stop => return None,
            Mishap::Babble => {
                let _ = self.out.send(Err(Status::unknown("bla"))).await;
                return None;
            }
            Mishap::Lie(which) => {
                // Unless it said nothing before, what it said is in doubt.
                if index > self.begun {
                    life.world.excuse(self.seed, Reason::ProtocolViolation);
                }
                let delta = |token_ids, text: &str| {
                    Event::Delta(Delta {
                        text: text.to_owned(),
                        token_ids,
                        ..Delta::default()
                    })
                };
                let lie = match which % 4 {
                    0 => delta(vec![VOCABULARY], ""),
                    1 => delta(vec![], ""),
                    2 => Event::Accepted(Accepted::default()),
                    _ => Event::Finished(Finished {
                        reason: FinishReason::MaxTokens.into(),
                        seed: !self.seed,
                        ..Finished::default()
                    }),
                };
                self.say(lie).await?;
            }
            Mishap::Full | Mishap::Refuse => {}
        }
        Some(())
    }

    async fn run(mut self) -> Option<()> {
        let resume = self.request.resume.clone().unwrap_or_default();
        let mut all = String::new();
        for (index, &id) in resume.generated_ids.iter().enumerate() {
            if id != token(&self.prompt, self.seed, index) {
                let world = &self.worker.life.world;
                world.wrong(format!(
                    "resumed with a wrong token at {index} of {}",
                    self.seed
                ));
            }
            all.push_str(&text(id));
        }
        let mut said = usize::try_from(resume.text_bytes_emitted).unwrap_or(usize::MAX);
        if said > all.len() {
            let world = &self.worker.life.world;
            world.wrong(format!(
                "resumed with {said} bytes of text said of {}",
                all.len()
            ));
            return None;
        }
        self.say(Event::Accepted(Accepted {
            request_id: self.request.request_id.clone(),
            model: self.request.model.clone(),
            prompt_ids: self.prompt.clone(),
            seed: self.seed,
            numerics: Some(self.worker.numerics()),
        }))
        .await?;
        let end = self.request.max_tokens as usize;
        let mut index = resume.generated_ids.len();
        let life = Arc::clone(&self.worker.life);
        while index < end {
            self.mishap(index, false).await?;
            sleep(life.draw(|c| c.ms(1, 20))).await;
            let count = life.draw(|c| c.within(1, 3)) as usize;
            let ids: Vec<_> = (index..end.min(index + count))
                .map(|i| token(&self.prompt, self.seed, i))
                .collect();
            index += ids.len();
            ids.iter().for_each(|&id| all.push_str(&text(id)));
            // Text lags behind its tokens, as it does while it may become a stop string.
            let until = life.draw(|c| c.within(said as u64, all.len() as u64)) as usize;
            let delta = Delta {
                text: all[said..until].to_owned(),
                token_ids: ids,
                ..Delta::default()
            };
            said = until;
            self.say(Event::Delta(delta)).await?;
        }
        if said < all.len() {
            let delta = Delta {
                text: all[said..].to_owned(),
                ..Delta::default()
            };
            self.say(Event::Delta(delta)).await?;
        }
        self.mishap(index, true).await?;
        self.say(Event::Finished(Finished {
            reason: FinishReason::MaxTokens.into(),
            seed: self.seed,
            numerics: Some(self.worker.numerics()),
            usage: Some(Usage {
                prompt_tokens: self.prompt.len() as u32,
                generated_tokens: end as u32,
                cached_tokens: 0,
            }),
            ..Finished::default()
        }))
        .await
    }
}

#[tonic::async_trait]
impl Tokens for SimulatedWorker {
    type GenerateStream = ReceiverStream<Result<GenerateEvent, Status>>;
    type AttachStream = ReceiverStream<Result<GenerateEvent, Status>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Answer<Self::GenerateStream> {
        let request = request.into_inner();
        let seed = request.seed.unwrap();
        self.life.note(format!(
            "gets {seed}, which goes on from {}",
            request.resume.as_ref().map_or(0, |r| r.generated_ids.len())
        ));
        self.life.serve(&request.model, &self.class);
        let mishap = self.mishap();
        let world = &self.life.world;
        match mishap {
            Some(Mishap::Full) => {
                return Err(Error::new(Reason::Overloaded, "no room").into());
            }
            Some(Mishap::Refuse) => {
                world.excuse(seed, Reason::LimitExceeded);
                return Err(Error::new(Reason::LimitExceeded, "I refuse").into());
            }
            Some(Mishap::Die(how)) if self.life.draw(|c| c.percent(20)) => self.life.die(how),
            _ => {}
        }
        self.living().await;
        let prompt = match request.prompt.clone().and_then(|p| p.kind) {
            Some(Kind::Ids(ids)) => ids.ids,
            _ => {
                world.wrong("a worker is sent a prompt that is not ids");
                vec![]
            }
        };
        let at = self
            .life
            .draw(|c| c.below(u64::from(request.max_tokens) + 1)) as usize;
        let (out, receiver) = mpsc::channel(1);
        let saying = Saying {
            worker: self.clone(),
            seed,
            prompt,
            out,
            mishap: mishap.map(|m| (m, at)),
            begun: request.resume.as_ref().map_or(0, |r| r.generated_ids.len()),
            request,
        };
        tokio::spawn(saying.run());
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn tokenize(&self, request: Request<TokenizeRequest>) -> Answer<TokenizeResponse> {
        let Some(Kind::Text(text)) = request.into_inner().prompt.and_then(|p| p.kind) else {
            return Err(Error::new(Reason::TemplateFailed, "no template").into());
        };
        if self.life.draw(|c| c.percent(10)) && self.life.world.fault() {
            self.life.die(How::Crash);
        }
        sleep(self.life.draw(|c| c.ms(0, 3))).await;
        self.living().await;
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
        self.living().await;
        let ids = request.into_inner().ids;
        Ok(Response::new(DetokenizeResponse {
            model: String::new(),
            text: ids.into_iter().map(text).collect(),
        }))
    }

    async fn attach(
        &self,
        _: Request<hotcell_proto::v1::AttachRequest>,
    ) -> Answer<Self::AttachStream> {
        Err(Status::unimplemented("a worker keeps no streams"))
    }

    async fn cancel(
        &self,
        _: Request<hotcell_proto::v1::CancelStreamRequest>,
    ) -> Answer<hotcell_proto::v1::CancelStreamResponse> {
        Err(Status::unimplemented("a worker keeps no streams"))
    }
}
