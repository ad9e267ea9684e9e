//! Two schedulers: one drains, and its streams go on at the other one.

use std::{path::PathBuf, sync::atomic::AtomicBool};

use hotcell_proto::{
    ids::RequestId,
    v1::{
        CancelStreamRequest, GenerateEvent,
        tokens_server::{Tokens, TokensServer},
    },
};
use hotcell_scheduler::{access::Caller, elsewhere::DrainTo};
use tempfile::TempDir;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::Streaming;

use super::{
    readers::{attach, hear, named, rest, start},
    *,
};

/// The other host, which listens in a folder of its own.
struct Other {
    house: House,
    dir: TempDir,
}

impl Other {
    async fn new(workers: usize) -> Other {
        Other::with(workers, |_, _| {}).await
    }

    async fn with(workers: usize, change: impl FnOnce(&Stage, &mut Config)) -> Other {
        let dir = tempfile::Builder::new()
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .tempdir()
            .unwrap();
        let path = dir.path().join("s.sock");
        let house = House::with(workers, |stage, config| {
            config.socket = Some(path);
            change(stage, config);
        })
        .await;
        let mut doors = Doors::open(&house.config, None).unwrap();
        let (routes, shared) = (house.routes.clone(), house.shared.clone());
        let stop = house.stop.clone();
        tokio::spawn(async move {
            let _sockets = doors.guards();
            service::serve(doors, (routes, &[][..]), shared, stop).await
        });
        house.ready(workers).await;
        Other { house, dir }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s.sock")
    }

    fn running(&self) -> usize {
        self.house.stage.running.load(Ordering::SeqCst)
    }
}

/// What SIGTERM does first.
pub(super) fn drain(house: &House, to: PathBuf) {
    let to = DrainTo {
        address: format!("unix:{}", to.display()).parse().unwrap(),
        token: None,
        ca: None,
    };
    house.shared.admission.close();
    house.shared.streams.leave_to(Arc::new(to.open().unwrap()));
}

pub(super) fn taken(house: &House) -> u64 {
    house.shared.streams.handed().0
}

pub(super) fn refused(house: &House) -> u64 {
    house.shared.streams.handed().1
}

/// A host with a worker, whose streams wait before this token.
pub(super) async fn held_at(token: usize) -> House {
    let house = House::new(1).await;
    house.ready(1).await;
    house.stage.hold_at.store(token, Ordering::SeqCst);
    house
}

/// A stream that has said as much as it may say so far.
pub(super) async fn begun(house: &House, request: GenerateRequest, tokens: usize) -> Reading {
    let mut stream = start(house, request).await;
    let mut said = Said::default();
    hear(&mut stream, &mut said, tokens).await;
    Reading { stream, said }
}

pub(super) struct Reading {
    stream: Streaming<GenerateEvent>,
    said: Said,
}

impl Reading {
    pub(super) async fn end(mut self) -> Said {
        hear(&mut self.stream, &mut self.said, usize::MAX).await;
        self.said
    }
}

/// All of a receipt but the deaths.
fn receipt(said: &Said) -> v1::Receipt {
    said.finished[0].receipt.clone().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_streams_go_on_elsewhere_and_their_clients_do_not_notice() {
    let other = Other::new(1).await;
    let house = House::new(1).await;
    let undisturbed = house.generate(request(64)).await.unwrap();
    house.stage.hold_at.store(10, Ordering::SeqCst);
    let mut events = house.fleet.events.watch();
    let mut running = Vec::new();
    for i in 0..100 {
        let request = match i % 2 {
            0 => request(64),
            _ => named(&format!("own-{i}"), 64),
        };
        running.push(begun(&house, request, 10).await);
    }
    other.house.stage.seen.lock().unwrap().clear();
    drain(&house, other.socket());
    // None of them can end here: whatever comes, comes from there.
    for reading in running {
        let said = reading.end().await;
        said.check(&[1, 2, 3], 5, 64, 0);
        assert_eq!(receipt(&said), receipt(&undisturbed));
    }
    assert_eq!(taken(&house), 100);
    until(|| house.shared.admission.count() == 0).await;
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;
    let told = events.try_recv().unwrap();
    assert_eq!(told.kind(), EventKind::StreamContinued);
    assert!(told.message.contains("goes on at unix:"), "{told:?}");
    {
        let seen = other.house.stage.seen.lock().unwrap();
        assert_eq!(seen.len(), 100);
        let resumed = |r: &GenerateRequest| r.resume.as_ref().map(|r| r.generated_ids.len());
        assert!(seen.iter().all(|r| resumed(r) == Some(10)));
        assert!(seen.iter().any(|r| r.request_id == "own-1"));
    }
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_to_be_accepted_is_sent_as_it_came() {
    let other = Other::new(1).await;
    // Its worker is not ready before the test is over.
    let house = House::with(1, |stage, _| {
        stage.load_steps.store(100_000, Ordering::Relaxed);
    })
    .await;
    let text = Some(Prompt {
        kind: Some(Kind::Text("abc".into())),
    });
    let asked = [
        request(8),
        GenerateRequest {
            prompt: text,
            ..named("mine", 8)
        },
    ];
    let asked = asked.map(|request| {
        let mut tokens = house.tokens();
        tokio::spawn(async move {
            let mut stream = tokens.generate(request).await.unwrap().into_inner();
            let mut said = Said::default();
            hear(&mut stream, &mut said, usize::MAX).await;
            said
        })
    });
    until(|| house.shared.admission.count() == 2).await;
    drain(&house, other.socket());
    let [ids, text] = asked;
    ids.await.unwrap().check(&[1, 2, 3], 5, 8, 0);
    text.await.unwrap().check(&[97, 98, 99], 5, 8, 0);
    assert_eq!(taken(&house), 2);
    house.stage.load_steps.store(0, Ordering::Relaxed);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_takes_goes_on_here() {
    let house = held_at(10).await;
    let running = begun(&house, named("mine", 32), 10).await;
    drain(&house, "/nowhere/s.sock".into());
    until(|| refused(&house) > 0).await;
    house.stage.hold_at.store(0, Ordering::SeqCst);
    running.end().await.check(&[1, 2, 3], 5, 32, 0);
    assert_eq!(taken(&house), 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_without_the_model_takes_nothing_and_is_asked_twice() {
    let other = Other::new(1).await;
    let mut control = other.house.control();
    let unload = v1::UnloadModelRequest { name: "m".into() };
    control.unload_model(unload).await.unwrap();
    let house = held_at(10).await;
    let running = begun(&house, named("mine", 32), 10).await;
    drain(&house, other.socket());
    until(|| refused(&house) == 2).await;
    house.stage.hold_at.store(0, Ordering::SeqCst);
    running.end().await.check(&[1, 2, 3], 5, 32, 0);
    assert_eq!((taken(&house), refused(&house)), (0, 2));
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_class_goes_on_only_if_the_request_lets_it_and_says_so() {
    let other = Other::with(1, |stage, _| {
        let mut classes = stage.classes.lock().unwrap();
        classes.insert("w0".into(), "fake/other".into());
    })
    .await;
    let house = held_at(10).await;
    let stays = begun(&house, named("stays", 32), 10).await;
    let crossing = GenerateRequest {
        continue_across: true,
        ..named("crosses", 32)
    };
    let mut crosses = begun(&house, crossing, 10).await;
    drain(&house, other.socket());
    let next = crosses.stream.message().await.unwrap().unwrap();
    let Some(Event::Delta(delta)) = next.event.clone() else {
        panic!("{next:?}");
    };
    assert_eq!(delta.numerics.unwrap().id, "fake/other");
    crosses.said.hear(next.event.unwrap());
    let crossed = crosses.end().await;
    crossed.check(&[1, 2, 3], 5, 32, 0);
    assert!(receipt(&crossed).continued_across);
    until(|| refused(&house) > 0).await;
    house.stage.hold_at.store(0, Ordering::SeqCst);
    let stayed = stays.end().await;
    stayed.check(&[1, 2, 3], 5, 32, 0);
    assert!(!receipt(&stayed).continued_across);
    assert_eq!(taken(&house), 1);
    // What was not wanted there does not go on there.
    until(|| other.running() == 0).await;
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_at_the_other_host_is_survived_and_told() {
    let other = Other::new(2).await;
    let house = held_at(10).await;
    let running = begun(&house, request(32), 10).await;
    let act = Act::DieAt(20, Duration::from_millis(5));
    other.house.stage.act(act);
    drain(&house, other.socket());
    running.end().await.check(&[1, 2, 3], 5, 32, 1);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_comes_back_when_the_other_host_cannot_go_on() {
    let other = Other::new(1).await;
    other.house.stage.hold_at.store(20, Ordering::SeqCst);
    let house = held_at(10).await;
    let mut running = begun(&house, named("mine", 32), 10).await;
    drain(&house, other.socket());
    hear(&mut running.stream, &mut running.said, 20).await;
    house.stage.hold_at.store(0, Ordering::SeqCst);
    other.house.shared.abort.cancel();
    running.end().await.check(&[1, 2, 3], 5, 32, 0);
    assert!(taken(&house) == 1 && refused(&house) > 0);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_host_is_asked_until_it_has_room() {
    let other = Other::new(1).await;
    let full: Vec<_> = (0..limits::MAX_SCHEDULER_REQUESTS)
        .map(|_| other.house.shared.admission.admit(0).unwrap())
        .collect();
    let house = held_at(10).await;
    let running = begun(&house, named("mine", 32), 10).await;
    drain(&house, other.socket());
    until(|| refused(&house) == 3).await;
    drop(full);
    running.end().await.check(&[1, 2, 3], 5, 32, 0);
    assert_eq!(taken(&house), 1);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_away_finds_all_of_its_stream_at_the_other_host() {
    let other = Other::new(1).await;
    let house = held_at(10).await;
    let running = begun(&house, named("mine", 32), 4).await;
    drop(running.stream);
    let id = RequestId::new("mine").unwrap();
    let stream = house.shared.streams.find(&id, &Caller::own()).unwrap();
    until(|| !stream.is_attached()).await;
    drain(&house, other.socket());
    until(|| taken(&house) == 1).await;
    // Nothing is left here that anybody would wait for.
    until(|| house.shared.admission.count() == 0).await;
    let status = attach(&house, "mine", &running.said).await;
    let status = match status {
        Ok(stream) => rest(stream, &mut Said::default()).await.unwrap_err(),
        Err(status) => status,
    };
    let error = Error::typed(&status).unwrap();
    assert_eq!(error.reason(), Reason::Draining);
    let to = format!("unix:{}", other.socket().display());
    assert_eq!(error.get("continues_at"), Some(&to[..]));
    // It has less than was said here, and gets the rest there.
    let mut said = running.said;
    let stream = attach(&other.house, "mine", &said).await.unwrap();
    rest(stream, &mut said).await.unwrap();
    said.check(&[1, 2, 3], 5, 32, 0);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_client_that_is_away_heard_is_not_said_again_in_another_class() {
    let other = Other::with(1, |stage, _| {
        let mut classes = stage.classes.lock().unwrap();
        classes.insert("w0".into(), "fake/other".into());
    })
    .await;
    let house = held_at(10).await;
    let crossing = GenerateRequest {
        continue_across: true,
        ..named("mine", 32)
    };
    let running = begun(&house, crossing, 4).await;
    drop(running.stream);
    let id = RequestId::new("mine").unwrap();
    let stream = house.shared.streams.find(&id, &Caller::own()).unwrap();
    until(|| !stream.is_attached()).await;
    drain(&house, other.socket());
    until(|| refused(&house) == 2).await;
    assert_eq!(taken(&house), 0);
    // What was not wanted there does not go on there.
    until(|| other.running() == 0).await;
    house.stage.hold_at.store(0, Ordering::SeqCst);
    let mut said = running.said;
    let stream = attach(&house, "mine", &said).await.unwrap();
    rest(stream, &mut said).await.unwrap();
    said.check(&[1, 2, 3], 5, 32, 0);
    assert!(!receipt(&said).continued_across);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_wants_no_more_ends_its_stream_there_too() {
    let other = Other::new(1).await;
    other.house.stage.hold_at.store(20, Ordering::SeqCst);
    let house = held_at(10).await;
    let mut leaves = begun(&house, request(32), 10).await;
    let mut cancels = begun(&house, named("mine", 32), 10).await;
    drain(&house, other.socket());
    hear(&mut leaves.stream, &mut leaves.said, 20).await;
    hear(&mut cancels.stream, &mut cancels.said, 20).await;
    assert_eq!(other.running(), 2);
    drop(leaves);
    until(|| other.running() == 1).await;
    let request_id = "mine".to_owned();
    let cancel = CancelStreamRequest { request_id };
    house.tokens().cancel(cancel).await.unwrap();
    until(|| other.running() == 0).await;
    let end = cancels.stream.message().await;
    assert_eq!(reason(end), Reason::Cancelled);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_does_not_matter_when_the_drain_comes_or_what_dies_meanwhile() {
    let other = Other::new(2).await;
    let mut went = 0;
    for round in 0..12u64 {
        let house = House::new(2).await;
        house.ready(2).await;
        // None of them ends before all have begun.
        house.stage.hold_at.store(1, Ordering::SeqCst);
        if round % 3 == 2 {
            let act = Act::DieAt(40 + round as usize, Duration::from_millis(1));
            house.stage.act(act.clone());
            other.house.stage.act(act);
        }
        let running: Vec<_> = (0..24u32)
            .map(|i| {
                let mut tokens = house.tokens();
                let request = GenerateRequest {
                    prompt: prompt(&[i]),
                    ..match i % 2 {
                        0 => request(300),
                        _ => named(&format!("own-{round}-{i}"), 300),
                    }
                };
                let said = tokio::spawn(async move {
                    let mut stream = tokens.generate(request).await.unwrap().into_inner();
                    let mut said = Said::default();
                    hear(&mut stream, &mut said, usize::MAX).await;
                    said
                });
                (i, said)
            })
            .collect();
        until(|| house.shared.admission.count() == 24).await;
        house.stage.hold_at.store(0, Ordering::SeqCst);
        until(|| house.stage.said.load(Ordering::SeqCst) >= round * 300).await;
        drain(&house, other.socket());
        for (i, said) in running {
            let said = said.await.unwrap();
            said.check(&[i], 5, 300, said.survived.len() as u32);
        }
        went += taken(&house);
        house.end().await;
    }
    assert!(went > 12, "{went}");
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_the_end_of_the_drain_a_client_is_told_where_its_stream_goes_on() {
    let other = Other::new(1).await;
    other.house.stage.hold_at.store(20, Ordering::SeqCst);
    let house = held_at(10).await;
    let mut named = begun(&house, named("mine", 32), 10).await;
    let mut nameless = begun(&house, request(32), 10).await;
    drain(&house, other.socket());
    hear(&mut named.stream, &mut named.said, 20).await;
    hear(&mut nameless.stream, &mut nameless.said, 20).await;
    house.shared.abort.cancel();
    let ended = async |stream: &mut Streaming<GenerateEvent>| {
        let status = stream.message().await.unwrap_err();
        Error::typed(&status).unwrap()
    };
    let error = ended(&mut named.stream).await;
    assert_eq!(error.reason(), Reason::Draining);
    let to = format!("unix:{}", other.socket().display());
    assert_eq!(error.get("continues_at"), Some(&to[..]));
    // One whose id nobody chose cannot be found there, and ends there too.
    let error = ended(&mut nameless.stream).await;
    assert_eq!(error.reason(), Reason::Draining);
    assert_eq!(error.get("continues_at"), None);
    until(|| other.running() == 1).await;
    other.house.stage.hold_at.store(0, Ordering::SeqCst);
    let mut said = named.said;
    let stream = attach(&other.house, "mine", &said).await.unwrap();
    rest(stream, &mut said).await.unwrap();
    said.check(&[1, 2, 3], 5, 32, 0);
    house.end().await;
    other.house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_goes_there_whole_keeps_to_the_limits_that_its_model_has_here() {
    let other = Other::new(1).await;
    // Its worker is not ready before the test is over.
    let house = House::with(1, |stage, _| {
        stage.load_steps.store(100_000, Ordering::Relaxed);
    })
    .await;
    let serving = v1::Serving {
        max_context: 20,
        ..v1::Serving::default()
    };
    let load = LoadModelRequest {
        name: "m".into(),
        serving: Some(serving),
        ..LoadModelRequest::default()
    };
    let mut control = house.control();
    let loading = tokio::spawn(async move { control.load_model(load).await });
    let model = ModelName::new("m").unwrap();
    until(|| house.fleet.most_tokens(&model, 3, 0).ok() == Some(17)).await;
    let spoken = |text: &str| {
        Some(Prompt {
            kind: Some(Kind::Text(text.into())),
        })
    };
    let told = [
        request(0),
        request(1000),
        request(5),
        GenerateRequest {
            prompt: spoken("abc"),
            ..named("text", 0)
        },
        GenerateRequest {
            prompt: spoken("longer than that is allowed"),
            ..named("long", 0)
        },
    ];
    let told = told.map(|request| {
        let mut tokens = house.tokens();
        tokio::spawn(async move {
            let mut stream = tokens.generate(request).await?.into_inner();
            let mut said = Said::default();
            while let Some(event) = stream.message().await? {
                said.hear(event.event.unwrap());
            }
            Ok::<_, Status>(said)
        })
    });
    until(|| house.shared.admission.count() == 5).await;
    drain(&house, other.socket());
    let [all, more, less, text, long] = told;
    all.await.unwrap().unwrap().check(&[1, 2, 3], 5, 17, 0);
    more.await.unwrap().unwrap().check(&[1, 2, 3], 5, 17, 0);
    less.await.unwrap().unwrap().check(&[1, 2, 3], 5, 5, 0);
    let text = text.await.unwrap().unwrap();
    text.check(&[97, 98, 99], 5, 17, 0);
    assert_eq!(reason(long.await.unwrap()), Reason::LimitExceeded);
    until(|| other.running() == 0).await;
    loading.abort();
    house.stage.load_steps.store(0, Ordering::Relaxed);
    house.end().await;
    other.house.end().await;
}

/// Another host that accepts a stream and says no more of it. While it is `deaf` it answers nothing.
#[derive(Clone, Default)]
struct Silent {
    deaf: Arc<AtomicBool>,
}

type Answer<T> = Result<tonic::Response<T>, Status>;

#[tonic::async_trait]
impl Tokens for Silent {
    type GenerateStream = ReceiverStream<Result<GenerateEvent, Status>>;
    type AttachStream = Self::GenerateStream;

    async fn generate(&self, request: Request<GenerateRequest>) -> Answer<Self::GenerateStream> {
        let request = request.into_inner();
        let Some(Kind::Ids(ids)) = request.prompt.and_then(|p| p.kind) else {
            panic!("not a running stream");
        };
        let accepted = v1::Accepted {
            request_id: request.request_id,
            model: request.model,
            prompt_ids: ids.ids,
            seed: request.seed.unwrap(),
            numerics: Some(v1::NumericsClass {
                id: "fake/r1".into(),
                reproducible: true,
                model_hash: "h".into(),
            }),
        };
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            let event = Some(Event::Accepted(accepted));
            sender.send(Ok(GenerateEvent { event })).await.unwrap();
            sender.closed().await;
        });
        let mut answer = tonic::Response::new(ReceiverStream::new(receiver));
        let nobodys = "".parse().unwrap();
        answer.metadata_mut().insert("hotcell-tenant", nobodys);
        Ok(answer)
    }

    async fn attach(&self, _: Request<v1::AttachRequest>) -> Answer<Self::AttachStream> {
        Err(Status::unimplemented("it keeps none"))
    }

    async fn cancel(&self, _: Request<CancelStreamRequest>) -> Answer<v1::CancelStreamResponse> {
        std::future::pending().await
    }

    async fn tokenize(&self, _: Request<v1::TokenizeRequest>) -> Answer<v1::TokenizeResponse> {
        Err(Status::unimplemented("it has no text"))
    }

    async fn detokenize(
        &self,
        _: Request<v1::DetokenizeRequest>,
    ) -> Answer<v1::DetokenizeResponse> {
        match self.deaf.load(Ordering::SeqCst) {
            true => std::future::pending().await,
            false => Err(Error::new(Reason::ModelNotFound, "none").into()),
        }
    }

    async fn embed(&self, _: Request<v1::EmbedRequest>) -> Answer<v1::EmbedResponse> {
        Err(Status::unimplemented("it embeds nothing"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_says_nothing_is_left_once_it_does_not_answer_either() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s.sock");
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let silent = Silent::default();
    let server = tonic::transport::Server::builder().add_service(TokensServer::new(silent.clone()));
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    let house = House::with(1, |_, config| {
        config.patience.engine = Duration::from_millis(50);
        config.patience.events = Duration::from_millis(50);
    })
    .await;
    house.ready(1).await;
    house.stage.hold_at.store(10, Ordering::SeqCst);
    let running = begun(&house, named("mine", 32), 10).await;
    drain(&house, socket);
    until(|| taken(&house) == 1).await;
    // It thinks for long, many times as long as it may be silent.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(refused(&house), 0);
    silent.deaf.store(true, Ordering::SeqCst);
    until(|| refused(&house) > 0).await;
    house.stage.hold_at.store(0, Ordering::SeqCst);
    running.end().await.check(&[1, 2, 3], 5, 32, 0);
    house.end().await;
}
