//! What goes wrong around a stream: nobody reads, workers are full, models come and go.

use super::*;

/// Until nothing moves any more: each stream filled its buffers and stopped there.
async fn quiet(house: &House) {
    let said = || house.stage.said.load(Ordering::SeqCst);
    let mut before = u64::MAX;
    while before != said() {
        before = said();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_small_unread_events_do_not_cost_the_worker_its_connection() {
    let house = House::new(1).await;
    house.ready(1).await;
    house.stage.terse.store(true, Ordering::Relaxed);
    let mut unread = Vec::new();
    for _ in 0..64 {
        let stream = house.tokens().generate(request(2000)).await.unwrap();
        unread.push(stream.into_inner());
    }
    quiet(&house).await;
    let read = house.generate(request(2000)).await.unwrap();
    assert_eq!(read.ids.len(), 2000);
    assert_eq!(read.finished[0].deaths_survived, 0);
    for mut stream in unread {
        let mut said = Said::default();
        while let Some(event) = stream.message().await.unwrap() {
            said.hear(event.event.unwrap());
        }
        assert_eq!(said.ids.len(), 2000);
        assert_eq!(said.finished[0].deaths_survived, 0);
    }
    let worker = &house.fleet.workers()[0];
    assert_eq!((worker.epoch, worker.deaths), (1, 0));
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_clients_that_leave_does_not_cost_the_worker_its_connection() {
    let house = House::new(1).await;
    house.ready(1).await;
    for _ in 0..3 {
        let mut leaving = Vec::new();
        for _ in 0..200 {
            let stream = house.tokens().generate(request(4000)).await.unwrap();
            leaving.push(stream.into_inner());
        }
        drop(leaving);
        until(|| house.shared.admission.count() == 0).await;
        house.generate(request(20)).await.unwrap();
    }
    let worker = &house.fleet.workers()[0];
    assert_eq!((worker.epoch, worker.deaths), (1, 0));
    house.end().await;
}

fn model(house: &House, name: &str) -> v1::ModelInfo {
    let models = house.fleet.models();
    models.into_iter().find(|m| m.name == name).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_dies_while_loading_does_not_cost_the_others_their_model() {
    let house = House::with(2, |stage, config| {
        config.restart.budget = 8;
        // The other one has loaded it by the third death, after which nobody would try it any more.
        config.restart.backoff = Duration::from_millis(100);
        config.restart.backoff_max = Duration::from_millis(100);
        stage.deadly.lock().unwrap().push("m@w1".into());
    })
    .await;
    let state = |index: usize| house.fleet.workers()[index].state();
    until(|| state(1) == WorkerState::Quarantined).await;
    assert_eq!(state(0), WorkerState::Ready);
    assert_eq!(model(&house, "m").state(), ModelState::Loaded);
    assert_eq!(model(&house, "m").workers, ["w0"]);
    let said = house.generate(request(4)).await.unwrap();
    said.check(&[1, 2, 3], 5, 4, 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_nobody_will_load_any_more_has_failed_and_says_why() {
    let house = House::new(2).await;
    house.ready(2).await;
    let unloadable = &house.stage.unloadable;
    unloadable
        .lock()
        .unwrap()
        .insert("m".into(), Reason::ModelChanged);
    // The first one still has it.
    house.stage.act(Act::DieAtOnce);
    house.generate(request(4)).await.unwrap();
    house.ready(2).await;
    assert_eq!(model(&house, "m").state(), ModelState::Loaded);
    house.stage.act(Act::DieAtOnce);
    assert_eq!(
        reason(house.generate(request(4)).await),
        Reason::ModelChanged
    );
    assert_eq!(model(&house, "m").state(), ModelState::Failed);
    assert!(!model(&house, "m").problem.is_empty());
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_waits_for_a_worker_that_loads_slowly_but_surely() {
    let house = House::with(1, |_, config| {
        config.timeouts.resume = Duration::from_millis(200);
        config.restart.start_timeout = Duration::from_secs(1);
    })
    .await;
    house.ready(1).await;
    house.stage.load_steps.store(30, Ordering::Relaxed);
    house.stage.act(Act::DieAt(2, Duration::from_millis(2)));
    let said = house.generate(request(4)).await.unwrap();
    said.check(&[1, 2, 3], 5, 4, 1);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_says_the_same_for_ever_is_given_up() {
    let house = House::with(1, |_, config| {
        config.restart.start_timeout = Duration::from_secs(1);
    })
    .await;
    house.ready(1).await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    house.stage.load_stands.store(true, Ordering::Relaxed);
    house.stage.load_steps.store(100_000, Ordering::Relaxed);
    let mend = async {
        until(|| house.fleet.workers()[0].deaths == 1).await;
        house.stage.load_steps.store(0, Ordering::Relaxed);
    };
    let (loaded, ()) = tokio::join!(load(&house, "n", dir.path()), mend);
    loaded.unwrap();
    let report = house.fleet.crashes.get("w0.1").unwrap();
    assert_eq!(report.kind, "deadline");
    let why = "while loading n: no progress for 1s";
    assert!(report.reason.contains(why), "{}", report.reason);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_a_name_gets_the_model_that_is_called_default() {
    let house = House::new(1).await;
    house.ready(1).await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    assert!(model(&house, "m").is_default);
    load(&house, "n", dir.path()).await.unwrap();
    assert!(!model(&house, "m").is_default && !model(&house, "n").is_default);
    assert_eq!(
        reason(house.generate(request(4)).await),
        Reason::ModelNotFound
    );
    let unload = v1::UnloadModelRequest { name: "m".into() };
    house.control().unload_model(unload).await.unwrap();
    assert!(model(&house, "n").is_default);
    house.generate(request(4)).await.unwrap();
    let seen = house.stage.seen.lock().unwrap().pop().unwrap();
    assert_eq!(seen.model, "n");
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_does_not_let_go_of_a_model_is_replaced() {
    let house = House::with(1, |_, config| {
        config.restart.start_timeout = Duration::from_millis(300);
    })
    .await;
    house.ready(1).await;
    house.stage.holds_on.store(true, Ordering::Relaxed);
    let unload = || v1::UnloadModelRequest { name: "m".into() };
    // The caller leaves at once; it happens all the same.
    let mut hasty = Request::new(unload());
    hasty.set_timeout(Duration::from_millis(50));
    house.control().unload_model(hasty).await.unwrap_err();
    until(|| house.fleet.workers()[0].epoch >= 2).await;
    house.ready(1).await;
    assert!(house.fleet.workers()[0].models.is_empty());
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_worker_is_asked_again_until_the_queue_s_patience_ends() {
    let house = House::with(1, |_, config| {
        config.timeouts.queue = Duration::from_millis(500);
    })
    .await;
    house.ready(1).await;
    for _ in 0..4 {
        house.stage.act(Act::Refuse(Reason::Overloaded));
    }
    let said = house.generate(request(4)).await.unwrap();
    said.check(&[1, 2, 3], 5, 4, 0);
    for _ in 0..100 {
        house.stage.act(Act::Refuse(Reason::Overloaded));
    }
    assert_eq!(reason(house.generate(request(4)).await), Reason::Overloaded);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_counts_until_its_client_is_done_with_it() {
    let house = House::new(1).await;
    let readers = house.shared.streams.readers();
    let mut slow = house
        .tokens()
        .generate(request(2000))
        .await
        .unwrap()
        .into_inner();
    slow.message().await.unwrap();
    until(|| house.shared.admission.count() == 0).await;
    // Its relay is done, its client is not: what was said still waits.
    assert_eq!(readers.len(), 1);
    while slow.message().await.is_ok_and(|event| event.is_some()) {}
    until(|| readers.is_empty()).await;
    until(|| house.shared.streams.count() == 0).await;
    house.end().await;
}
