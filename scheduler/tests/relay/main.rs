//! The whole scheduler against workers that die, lie, stall and refuse on cue.

// A helper that panics fails its test, which is what it is for.
#![allow(clippy::unwrap_used)]

mod away;
mod collector;
mod fake;
mod known;
mod manager;
mod mishaps;
mod offers;
mod packing;
mod placing;
mod readers;
mod suspects;
mod traces;

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use fake::{Act, Fakes, Stage};
use hotcell_ipc::{memory::sealed_memory, socket::stream_pair, transport::channel_over};
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{
        self, Device, EventKind, GenerateRequest, ListModelsRequest, LoadModelRequest, ModelState,
        Prompt, TokenIds, WatchEventsRequest, WorkerState, control_client::ControlClient,
        generate_event::Event, prompt::Kind, tokens_client::TokensClient,
    },
};
use hotcell_scheduler::{
    config::{Cli, Config, Settings, Surroundings},
    crash::Crashes,
    fleet::{Fleet, Parts, TOKENS_WINDOWS},
    gauges::Gauges,
    packed::Packs,
    service::{self, Doors, Shared},
    streams::Streams,
    traces::Traces,
    vault::{self, Source},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status, service::Routes, transport::Channel};

struct House {
    stage: Arc<Stage>,
    fleet: Arc<Fleet>,
    shared: Shared,
    channel: Channel,
    stop: CancellationToken,
    config: Config,
    routes: Routes,
}

async fn connect(
    config: &Config,
    routes: &Routes,
    shared: &Shared,
    stop: &CancellationToken,
) -> Channel {
    let (ours, theirs) = stream_pair().unwrap();
    let doors = Doors::open(config, Some(theirs)).unwrap();
    let serve = service::serve(
        doors,
        (routes.clone(), &[][..]),
        shared.clone(),
        stop.child_token(),
    );
    tokio::spawn(serve);
    // A client that leaves little unread, so that backpressure begins early.
    channel_over(ours, TOKENS_WINDOWS).await.unwrap()
}

fn config() -> Config {
    let around = Surroundings {
        executable: Some("/x".into()),
        ..Surroundings::default()
    };
    let flags = [
        "hotcell-scheduler",
        "--restart-budget=1000",
        "--restart-backoff=1ms",
        "--restart-backoff-max=2ms",
        "--continue-timeout=2s",
    ];
    let cli: Cli = clap::Parser::try_parse_from(flags).unwrap();
    Config::resolve(cli, Settings::default(), &around).unwrap()
}

impl House {
    async fn with(workers: usize, change: impl FnOnce(&Stage, &mut Config)) -> House {
        let stage = Arc::new(Stage::default());
        let mut config = config();
        change(&stage, &mut config);
        let fleet = Fleet::new(Parts {
            launcher: Arc::new(Fakes(Arc::clone(&stage))),
            policy: config.restart,
            suspicion: config.suspicion,
            standby: config.standby,
            patience: config.patience,
            crashes: Crashes::default(),
            gauges: Gauges::default(),
            timeouts: config.timeouts,
            packs: match stage.pieces.lock().unwrap().is_empty() {
                true => Packs::off(),
                false => Packs::new(None, None),
            },
            model_roots: vec![],
            model_policy: Arc::default(),
            audit: Default::default(),
            default_model: None,
            device_memory: None,
        });
        let name = ModelName::new("m").unwrap();
        let file = sealed_memory("config.json", b"{}").unwrap();
        let files = vault::adopt(&name, vec![("config.json".into(), file)]);
        fleet.configure(name, Source::Bundled, files);
        let device = |index| Device {
            id: format!("cpu:{index}"),
            backend: "cpu".into(),
            ..Device::default()
        };
        fleet.start((0..workers).map(device).collect());
        fleet.keep_packed();
        let mut shared = Shared::new(Arc::clone(&fleet));
        if let Some(room) = stage.room.lock().unwrap().take() {
            shared.streams = Streams::new(room, config.timeouts.reattach);
        }
        if let Some(collector) = &config.traces {
            shared.traces = Traces::to(collector).unwrap();
        }
        let (routes, health) = service::routes(&shared, &[]).unwrap();
        tokio::spawn(service::report_health(shared.clone(), health));
        let stop = CancellationToken::new();
        let channel = connect(&config, &routes, &shared, &stop).await;
        House {
            stage,
            fleet,
            shared,
            channel,
            stop,
            config,
            routes,
        }
    }

    /// Another client's connection.
    async fn connect(&self) -> Channel {
        connect(&self.config, &self.routes, &self.shared, &self.stop).await
    }

    async fn new(workers: usize) -> House {
        House::with(workers, |_, _| {}).await
    }

    fn tokens(&self) -> TokensClient<Channel> {
        TokensClient::new(self.channel.clone())
    }

    fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel.clone())
    }

    async fn ready(&self, count: usize) {
        until(|| self.fleet.ready() == count).await;
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Said, Status> {
        let mut stream = self.tokens().generate(request).await?.into_inner();
        let mut said = Said::default();
        while let Some(event) = stream.message().await? {
            said.hear(event.event.unwrap());
        }
        Ok(said)
    }

    async fn end(self) {
        self.stop.cancel();
        self.fleet.stop().await;
    }
}

#[derive(Debug, Default)]
struct Said {
    accepted: usize,
    ids: Vec<u32>,
    text: String,
    survived: Vec<v1::Survived>,
    finished: Vec<v1::Finished>,
}

impl Said {
    fn hear(&mut self, event: Event) {
        assert!(self.finished.is_empty(), "an event after Finished");
        match event {
            Event::Accepted(a) => {
                assert!(self.ids.is_empty());
                assert!(!a.request_id.is_empty());
                self.accepted += 1;
            }
            Event::Delta(delta) => {
                self.ids.extend(delta.token_ids);
                self.text.push_str(&delta.text);
                self.survived.extend(delta.survived);
            }
            Event::Finished(f) => {
                self.survived.extend(f.survived.clone());
                self.finished.push(f);
            }
        }
    }

    fn check(&self, prompt: &[u32], seed: u64, tokens: usize, deaths: u32) {
        let right: Vec<u32> = (0..tokens).map(|i| fake::token(prompt, seed, i)).collect();
        assert_eq!(self.ids, right);
        let text: String = right.iter().map(|&id| fake::text(id)).collect();
        assert_eq!(self.text, text);
        assert_eq!(self.accepted, 1);
        let end = &self.finished[0];
        assert_eq!(end.deaths_survived, deaths);
        assert_eq!(self.survived.len(), deaths as usize);
        assert_eq!(end.usage.unwrap().generated_tokens as usize, tokens);
    }
}

async fn until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .expect("it did not come to pass within 20 s");
}

fn prompt(ids: &[u32]) -> Option<Prompt> {
    let ids = TokenIds { ids: ids.to_vec() };
    Some(Prompt {
        kind: Some(Kind::Ids(ids)),
    })
}

fn request(max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt(&[1, 2, 3]),
        max_tokens,
        seed: Some(5),
        ..GenerateRequest::default()
    }
}

fn reason<T: std::fmt::Debug>(result: Result<T, Status>) -> Reason {
    let status = result.unwrap_err();
    Error::typed(&status)
        .unwrap_or_else(|| panic!("not typed: {status:?}"))
        .reason()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_at_any_token_is_not_seen_by_the_client() {
    let house = House::new(2).await;
    for flush in [Duration::ZERO, Duration::from_millis(5)] {
        for at in 0..=32 {
            house.stage.act(Act::DieAt(at, flush));
            let said = house.generate(request(32)).await.unwrap();
            said.check(&[1, 2, 3], 5, 32, 1);
        }
    }
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_worker_is_respawned_and_goes_on_as_often_as_allowed() {
    let house = House::with(1, |_, config| config.suspicion.suspect_after = 100).await;
    for at in 0..limits::MAX_CONTINUATIONS as usize {
        house.stage.act(Act::DieAt(at, Duration::from_millis(2)));
    }
    let said = house.generate(request(16)).await.unwrap();
    said.check(&[1, 2, 3], 5, 16, limits::MAX_CONTINUATIONS);
    for _ in 0..=limits::MAX_CONTINUATIONS {
        house.stage.act(Act::DieAtOnce);
    }
    assert_eq!(
        reason(house.generate(request(16)).await),
        Reason::WorkerLost
    );
    house.ready(1).await;
    let said = house.generate(request(4)).await.unwrap();
    said.check(&[1, 2, 3], 5, 4, 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_streams_of_a_dying_worker_go_on_too() {
    let house = House::new(2).await;
    house.ready(2).await;
    house.stage.act(Act::DieAt(20, Duration::from_millis(1)));
    let all = (0..40u32).map(|i| {
        let request = GenerateRequest {
            prompt: prompt(&[i]),
            ..request(100)
        };
        let house = &house;
        async move { (i, house.generate(request).await.unwrap()) }
    });
    let mut deaths = 0;
    for (i, said) in futures_join(all).await {
        deaths += said.finished[0].deaths_survived;
        said.check(&[i], 5, 100, said.finished[0].deaths_survived);
    }
    assert!(deaths >= 1);
    house.end().await;
}

/// All at once, on this task.
async fn futures_join<F: Future>(all: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = all.map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|cx| {
        for (future, out) in &mut all {
            if out.is_none()
                && let std::task::Poll::Ready(done) = future.as_mut().poll(cx)
            {
                *out = Some(done);
            }
        }
        match all.iter().all(|(_, out)| out.is_some()) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    all.into_iter().filter_map(|(_, out)| out).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_stays_in_its_numerics_class() {
    let house = House::with(2, |stage, config| {
        let mut classes = stage.classes.lock().unwrap();
        classes.insert("w0".into(), "fake/a".into());
        classes.insert("w1".into(), "fake/b".into());
        config.timeouts.resume = Duration::from_millis(300);
    })
    .await;
    house.ready(2).await;
    // Goes on where it was, once that is back, although another one is ready.
    house.stage.act(Act::DieAt(3, Duration::from_millis(2)));
    let said = house.generate(request(8)).await.unwrap();
    said.check(&[1, 2, 3], 5, 8, 1);
    assert_eq!(said.finished[0].numerics.clone().unwrap().id, "fake/a");
    house.ready(2).await;
    // Comes back as another class: nobody may go on.
    let classes = &house.stage.classes;
    classes.lock().unwrap().insert("w0".into(), "fake/c".into());
    house.stage.act(Act::DieAt(3, Duration::from_millis(2)));
    assert_eq!(reason(house.generate(request(8)).await), Reason::WorkerLost);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_living_worker_says_is_passed_on() {
    let house = House::new(1).await;
    house.stage.act(Act::Refuse(Reason::PromptTooLong));
    assert_eq!(
        reason(house.generate(request(4)).await),
        Reason::PromptTooLong
    );
    let worker = &house.fleet.workers()[0];
    assert_eq!((worker.epoch, worker.deaths), (1, 0));
    assert_eq!(worker.state(), WorkerState::Ready);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_breaks_the_protocol_in_one_stream_loses_all_and_each_goes_on_elsewhere() {
    let house = House::new(1).await;
    house.ready(1).await;
    for (deaths, act) in [Act::LieAfter(0), Act::Stop].into_iter().enumerate() {
        house.stage.act(Act::Stall);
        let mut good = house.tokens().generate(request(8)).await.unwrap();
        good.get_mut().message().await.unwrap();
        house.stage.act(act);
        let said = house.generate(request(4)).await.unwrap();
        said.check(&[1, 2, 3], 5, 4, 1);
        let lost = &said.survived[0];
        let epoch = deaths as u64 + 1;
        assert_eq!((lost.worker.as_str(), lost.epoch), ("w0", epoch));
        assert_eq!(lost.exit_kind, "protocol");
        assert_eq!(lost.continued_on, "w0");
        assert!(lost.pause_ms > 0.0);
        let mut whole = Said {
            // The greeting was read.
            accepted: 1,
            ..Said::default()
        };
        while let Some(event) = good.get_mut().message().await.unwrap() {
            whole.hear(event.event.unwrap());
        }
        whole.check(&[1, 2, 3], 5, 8, 1);
        let report = house.fleet.crashes.get(&format!("w0.{epoch}")).unwrap();
        assert_eq!(report.kind, "protocol");
        assert_eq!(report.requests.len(), 2, "{report:#?}");
    }
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;
    // What was said before a lie may be one too, and cannot be taken back.
    house.stage.act(Act::LieAfter(2));
    assert_eq!(
        reason(house.generate(request(4)).await),
        Reason::ProtocolViolation
    );
    until(|| house.fleet.workers()[0].deaths == 3).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_refused_before_any_worker_hears_of_them() {
    let house = House::new(1).await;
    let bad = |change: fn(&mut GenerateRequest)| {
        let mut bad = request(4);
        change(&mut bad);
        house.generate(bad)
    };
    assert_eq!(
        reason(bad(|r| r.model = "nope".into()).await),
        Reason::ModelNotFound
    );
    assert_eq!(
        reason(bad(|r| r.prompt = None).await),
        Reason::InvalidArgument
    );
    assert_eq!(
        reason(bad(|r| r.prompt = prompt(&[fake::VOCABULARY])).await),
        Reason::InvalidArgument
    );
    assert_eq!(
        reason(bad(|r| r.request_id = "../x".into()).await),
        Reason::InvalidArgument
    );
    assert_eq!(
        reason(bad(|r| r.stop = vec!["x".into(); 99]).await),
        Reason::LimitExceeded
    );
    assert!(house.stage.seen.lock().unwrap().is_empty());
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_seed_is_drawn_and_stays_the_same_past_a_death() {
    let house = House::new(2).await;
    house.stage.act(Act::DieAt(2, Duration::from_millis(2)));
    let open = GenerateRequest {
        seed: None,
        ..request(6)
    };
    let said = house.generate(open).await.unwrap();
    said.check(&[1, 2, 3], said.finished[0].seed, 6, 1);
    let seen = house.stage.seen.lock().unwrap();
    assert_eq!(seen[0].seed, Some(said.finished[0].seed));
    assert_eq!(seen[0].seed, seen[1].seed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_or_runs_out_of_time_ends_its_stream_in_the_worker() {
    let house = House::new(1).await;
    house.stage.act(Act::Stall);
    let mut left = house
        .tokens()
        .generate(request(4))
        .await
        .unwrap()
        .into_inner();
    left.message().await.unwrap();
    assert_eq!(house.stage.running.load(Ordering::SeqCst), 1);
    drop(left);
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;

    house.stage.act(Act::Stall);
    let mut hasty = Request::new(request(4));
    // By hand: tonic's own client would end the call itself.
    let timeout = "150m".parse().unwrap();
    hasty.metadata_mut().insert("grpc-timeout", timeout);
    let mut stream = house.tokens().generate(hasty).await.unwrap().into_inner();
    let status = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("ended well"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::DeadlineExceeded);
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;
    until(|| house.shared.admission.count() == 0).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_is_tokenised_by_a_worker_and_by_another_one_if_it_dies() {
    let house = House::new(2).await;
    house.ready(2).await;
    let text = |text: &str| GenerateRequest {
        prompt: Some(Prompt {
            kind: Some(Kind::Text(text.into())),
        }),
        ..request(3)
    };
    let said = house.generate(text("ab")).await.unwrap();
    said.check(&[97, 98], 5, 3, 0);
    house.stage.act(Act::DieAtOnce);
    let said = house.generate(text("die")).await.unwrap();
    said.check(&[100, 105, 101], 5, 3, 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_happens_is_told_to_watchers() {
    let house = House::new(1).await;
    house.ready(1).await;
    let mut events = house
        .control()
        .watch_events(WatchEventsRequest {})
        .await
        .unwrap()
        .into_inner();
    house.stage.act(Act::DieAt(1, Duration::from_millis(2)));
    house.generate(request(4)).await.unwrap();
    let mut kinds = Vec::new();
    while !kinds.contains(&EventKind::StreamContinued) {
        let event = events.message().await.unwrap().unwrap();
        let kind = event.kind();
        assert_eq!(event.worker, "w0");
        let epoch = u64::from(kind != EventKind::WorkerDied) + 1;
        assert_eq!(event.epoch, epoch, "{event:?}");
        kinds.push(kind);
    }
    for kind in [
        EventKind::WorkerDied,
        EventKind::WorkerStarted,
        EventKind::StreamContinued,
    ] {
        assert!(kinds.contains(&kind), "{kind:?} in {kinds:?}");
    }
    house.end().await;
}

async fn load(house: &House, name: &str, path: &Path) -> Result<v1::ModelInfo, Status> {
    let request = LoadModelRequest {
        name: name.into(),
        path: path.to_str().unwrap().into(),
        ..LoadModelRequest::default()
    };
    let mut steps = house.control().load_model(request).await?.into_inner();
    let mut last = None;
    while let Some(step) = steps.message().await? {
        last = Some(step);
    }
    let last = last.expect("no progress at all");
    assert!(last.done);
    Ok(last.model.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_loaded_everywhere_once_and_a_bad_one_harms_nobody() {
    let house = House::new(2).await;
    house.ready(2).await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let info = load(&house, "n", dir.path()).await.unwrap();
    assert_eq!(info.workers, ["w0", "w1"]);
    assert_eq!(info.state(), ModelState::Loaded);
    // Again is no error; another source under the same name is.
    load(&house, "n", dir.path()).await.unwrap();
    let other = tempfile::tempdir().unwrap();
    std::fs::write(other.path().join("config.json"), "{}").unwrap();
    assert_eq!(
        reason(load(&house, "n", other.path()).await),
        Reason::ModelExists
    );
    assert_eq!(
        reason(load(&house, "x", &dir.path().join("no")).await),
        Reason::FileNotFound
    );

    let unloadable = &house.stage.unloadable;
    unloadable
        .lock()
        .unwrap()
        .insert("bad".into(), Reason::ModelCorrupt);
    assert_eq!(
        reason(load(&house, "bad", other.path()).await),
        Reason::ModelCorrupt
    );
    house.stage.deadly.lock().unwrap().push("deadly".into());
    assert_eq!(
        reason(load(&house, "deadly", other.path()).await),
        Reason::WorkerLost
    );
    house.ready(2).await;
    let models = house
        .control()
        .list_models(ListModelsRequest {})
        .await
        .unwrap();
    let state = |name: &str| {
        let models = &models.get_ref().models;
        models.iter().find(|m| m.name == name).unwrap().state()
    };
    assert_eq!(state("bad"), ModelState::Failed);
    assert_eq!(state("deadly"), ModelState::Failed);
    assert_eq!(state("n"), ModelState::Loaded);
    let named = GenerateRequest {
        model: "n".into(),
        ..request(4)
    };
    house.generate(named.clone()).await.unwrap();

    // The worker that comes back has it too, and forgets it with the others.
    house.stage.act(Act::DieAtOnce);
    house.generate(named.clone()).await.unwrap();
    let unload = v1::UnloadModelRequest { name: "n".into() };
    house.control().unload_model(unload).await.unwrap();
    assert_eq!(reason(house.generate(named).await), Reason::ModelNotFound);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_whose_workers_always_die_is_quarantined_and_requests_fail_promptly() {
    let house = House::with(1, |_, config| {
        config.restart.budget = 2;
        config.suspicion.suspect_after = 100;
    })
    .await;
    house.ready(1).await;
    for _ in 0..8 {
        house.stage.act(Act::DieAtOnce);
    }
    assert_eq!(reason(house.generate(request(4)).await), Reason::WorkerLost);
    assert_eq!(reason(house.generate(request(4)).await), Reason::NoWorker);
    let workers = house.fleet.workers();
    assert_eq!(workers[0].state(), WorkerState::Quarantined);
    assert_eq!(workers[0].deaths, 3);
    // Until somebody lets it out, which is for the quarantined only.
    let release = |worker: &str| {
        let request = v1::ReleaseWorkerRequest {
            worker: worker.to_owned(),
        };
        let mut control = house.control();
        async move { control.release_worker(request).await }
    };
    assert_eq!(reason(release("w9").await), Reason::NoWorker);
    house.stage.acts.lock().unwrap().clear();
    let mut events = house.fleet.events.watch();
    release("w0").await.unwrap();
    assert_eq!(reason(release("w0").await), Reason::InvalidArgument);
    let told = events.recv().await.unwrap();
    assert_eq!(told.kind(), EventKind::WorkerReleased);
    let said = house.generate(request(4)).await.unwrap();
    said.check(&[1, 2, 3], 5, 4, 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_lets_nobody_in_and_ends_what_does_not_end() {
    let house = House::new(1).await;
    house.stage.act(Act::Stall);
    let mut stalled = house
        .tokens()
        .generate(request(4))
        .await
        .unwrap()
        .into_inner();
    stalled.message().await.unwrap();
    house.shared.admission.close();
    assert_eq!(reason(house.generate(request(4)).await), Reason::Draining);
    house.shared.abort.cancel();
    assert_eq!(reason(stalled.message().await), Reason::Draining);
    house.end().await;
}
