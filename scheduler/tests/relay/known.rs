//! Known answers: workers that compute wrongly are found, replaced and taken out, and nobody is served by them.

use hotcell_proto::v1::{ModelState, PackPiece};
use hotcell_scheduler::known::Pace;

use super::*;

/// However long a check takes where the machine is busy.
const PACE: Pace = Pace {
    interval: Duration::from_millis(20),
    share: 0,
};

/// Checks of a process so far: their numbers of steps.
fn checks(house: &House, process: &str) -> Vec<u32> {
    let checks = house.stage.checks.lock().unwrap();
    let of_it = checks.iter().filter(|(by, _)| by == process);
    of_it.map(|(_, request)| request.steps).collect()
}

fn go_wrong(house: &House, who: &str, value: u8) {
    let mut wrong = house.stage.wrong.lock().unwrap();
    wrong.insert(who.to_owned(), value);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_answers_before_it_serves_and_again_when_it_is_idle() {
    let house = House::new(1).await;
    house.ready(1).await;
    assert_eq!(checks(&house, "w0.1"), [1]);
    house.fleet.check_every(PACE);
    until(|| checks(&house, "w0.1").len() > 3).await;
    // A stream waits for the worker that comes back: it is asked briefly at first.
    house.stage.act(Act::DieAt(3, Duration::from_millis(2)));
    house.generate(request(8)).await.unwrap();
    until(|| checks(&house, "w0.2").len() > 1).await;
    assert_eq!(checks(&house, "w0.2")[..2], [1, limits::MAX_CHECK_STEPS]);
    assert_eq!(house.fleet.workers()[0].deaths, 1);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_turns_wrong_is_replaced_and_its_death_says_since_when() {
    let house = House::new(1).await;
    house.ready(1).await;
    let mut events = house
        .control()
        .watch_events(WatchEventsRequest {})
        .await
        .unwrap()
        .into_inner();
    house.fleet.check_every(PACE);
    until(|| checks(&house, "w0.1").len() > 2).await;
    go_wrong(&house, "w0.1", 9);
    let died = loop {
        let event = events.message().await.unwrap().unwrap();
        if event.kind() == EventKind::WorkerDied {
            break event;
        }
    };
    assert_eq!((died.exit_kind.as_str(), died.epoch), ("corrupt", 1));
    assert!(
        died.message
            .contains("s before, and what it computed since then is in doubt"),
        "{died:?}"
    );
    until(|| house.fleet.workers()[0].epoch == 2).await;
    house.ready(1).await;
    let said = house.generate(request(4)).await.unwrap();
    said.check(&[1, 2, 3], 5, 4, 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_is_wrong_twice_is_taken_out_before_it_serves() {
    let house = House::new(1).await;
    house.ready(1).await;
    house.fleet.check_every(PACE);
    go_wrong(&house, "w0", 9);
    let quarantined = || house.fleet.workers()[0].state() == WorkerState::Quarantined;
    until(quarantined).await;
    let worker = &house.fleet.workers()[0];
    assert_eq!((worker.epoch, worker.deaths), (2, 2));
    assert_eq!(worker.last_exit_kind, "corrupt");
    assert!(
        worker.last_exit.contains("it never was right"),
        "{worker:?}"
    );
    assert_eq!(reason(house.generate(request(4)).await), Reason::NoWorker);
    assert!(house.stage.seen.lock().unwrap().is_empty());
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_on_from_a_worker_that_turned_wrong_to_one_that_did_not() {
    let house = House::new(2).await;
    house.ready(2).await;
    house.stage.act(Act::Stall);
    let stream = house.tokens().generate(request(4)).await;
    let mut stream = stream.unwrap().into_inner();
    stream.message().await.unwrap();
    let workers = house.fleet.workers();
    let holder = workers.iter().find(|w| w.running_requests == 1).unwrap();
    go_wrong(&house, &format!("{}.1", holder.id), 9);
    // Never idle, so it takes a while longer.
    house.fleet.check_every(PACE);
    let mut said = Said::default();
    while let Some(event) = stream.message().await.unwrap() {
        said.hear(event.event.unwrap());
    }
    assert_eq!(said.finished[0].deaths_survived, 1);
    assert_eq!(said.ids.len(), 4);
    house.end().await;
}

/// Which of them is right nobody can tell: the one that answered first stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_devices_that_insist_on_different_answers_only_one_serves() {
    let house = House::with(2, |stage, _| {
        stage.wrong.lock().unwrap().insert("w1".into(), 9);
    })
    .await;
    let settled = || {
        let workers = house.fleet.workers();
        let any = |state| workers.iter().any(|w| w.state() == state);
        any(WorkerState::Quarantined) && any(WorkerState::Ready)
    };
    until(settled).await;
    house.generate(request(4)).await.unwrap();
    house.end().await;
}

/// Also if it was the first to answer, so that the others were held to its word.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_was_wrong_from_its_start_is_found_out() {
    let house = House::with(2, |stage, _| {
        stage.wrong.lock().unwrap().insert("w0.1".into(), 9);
    })
    .await;
    let settled = || {
        let workers = house.fleet.workers();
        let ready = workers.iter().all(|w| w.state() == WorkerState::Ready);
        ready && workers[0].epoch == 2
    };
    until(settled).await;
    let workers = house.fleet.workers();
    assert_eq!(workers[0].last_exit_kind, "corrupt");
    assert_eq!(workers[0].deaths, 1);
    house.generate(request(4)).await.unwrap();
    house.end().await;
}

/// A model that is loaded anew: what was known of it is forgotten when it is unloaded.
async fn load_anew(house: &House) -> Result<v1::ModelInfo, Error> {
    let name = ModelName::new("m").unwrap();
    house.fleet.unload(&name).await.unwrap();
    let (progress, _) = tokio::sync::mpsc::channel(1);
    house.fleet.load(Some(name), None, progress).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_nobody_computed_is_served_first_and_no_copy_is_made_before_there_is_an_answer()
 {
    let house = House::with(1, |stage, _| {
        stage.pieces.lock().unwrap().push(PackPiece {
            bytes: 2,
            ..PackPiece::default()
        });
        stage.declines.lock().unwrap().replace(Reason::OutOfMemory);
    })
    .await;
    house.ready(1).await;
    until(|| house.stage.offered.load(Ordering::SeqCst) == 1).await;
    assert_eq!(checks(&house, "w0.1"), [1]);
    house.stage.holds_answers.store(true, Ordering::Relaxed);
    load_anew(&house).await.unwrap();
    for _ in 0..3 {
        let said = house.generate(request(4)).await.unwrap();
        said.check(&[1, 2, 3], 5, 4, 0);
    }
    // Longer than it is left alone.
    tokio::time::sleep(Duration::from_millis(400)).await;
    // What there was it did not take with the model, so that another one is to be made.
    let packings = || house.fleet.models()[0].packed[0].packings;
    assert_eq!(packings(), 1);
    house.stage.holds_answers.store(false, Ordering::Relaxed);
    until(|| checks(&house, "w0.1") == [1, 1]).await;
    until(|| packings() == 2).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_several_get_a_model_each_answers_before_it_serves() {
    let house = House::new(2).await;
    house.ready(2).await;
    house.stage.holds_answers.store(true, Ordering::Relaxed);
    let mut loaded = Box::pin(load_anew(&house));
    let soon = tokio::time::timeout(Duration::from_millis(400), &mut loaded);
    assert!(soon.await.is_err());
    house.stage.holds_answers.store(false, Ordering::Relaxed);
    loaded.as_mut().await.unwrap();
    drop(loaded);
    house.end().await;
}

/// One that served first and answers what nobody can use is replaced as any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_served_first_is_held_to_its_answer_afterwards() {
    let house = House::new(1).await;
    house.ready(1).await;
    house.fleet.check_every(PACE);
    load_anew(&house).await.unwrap();
    until(|| checks(&house, "w0.1").len() > 3).await;
    go_wrong(&house, "w0.1", 9);
    until(|| house.fleet.workers()[0].epoch == 2).await;
    house.ready(1).await;
    assert_eq!(house.fleet.workers()[0].last_exit_kind, "corrupt");
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_served_first_and_had_no_room_for_the_question_is_asked_again() {
    let house = House::new(1).await;
    house.ready(1).await;
    house.stage.full_for.store(2, Ordering::SeqCst);
    load_anew(&house).await.unwrap();
    until(|| checks(&house, "w0.1") == [1, 1]).await;
    assert_eq!(house.stage.full_for.load(Ordering::SeqCst), 0);
    house.end().await;
}

/// Or it would take its device out again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_over_whose_first_answer_workers_end_is_given_up() {
    let house = House::new(1).await;
    house.ready(1).await;
    house.stage.dies_of_checks.store(true, Ordering::Relaxed);
    load_anew(&house).await.unwrap();
    let failed = || house.fleet.models()[0].state() == ModelState::Failed;
    until(failed).await;
    house.ready(1).await;
    let worker = &house.fleet.workers()[0];
    assert_eq!((worker.deaths, worker.models.len()), (3, 0));
    house.end().await;
}
