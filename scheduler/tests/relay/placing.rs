//! A request goes where the beginning of its prompt was read, unless that worker is the busier by more than that saves.

use std::{sync::atomic::Ordering, time::Duration};

use hotcell_proto::{
    limits,
    v1::{GenerateRequest, Prompt, prompt::Kind},
};

use crate::{Act, House, prompt, request, until};

/// A prompt of `shared` tokens that all have, and ten of its own.
fn beginning(shared: u32, own: u32) -> GenerateRequest {
    let own = (0..10).map(|i| 500 + own + i);
    let ids: Vec<u32> = (0..shared).map(|i| i % 500).chain(own).collect();
    GenerateRequest {
        prompt: prompt(&ids),
        ..request(4)
    }
}

/// Two workers, told apart by their classes.
async fn house() -> House {
    let house = House::with(2, |stage, config| {
        let mut classes = stage.classes.lock().unwrap();
        classes.insert("w0".into(), "fake/a".into());
        classes.insert("w1".into(), "fake/b".into());
        config.timeouts.reattach = Duration::ZERO;
    })
    .await;
    house.ready(2).await;
    house
}

async fn served(house: &House, request: GenerateRequest) -> String {
    let said = house.generate(request).await.unwrap();
    said.finished[0].numerics.clone().unwrap().id
}

/// Streams of which nothing comes, `tokens` to compute in each.
async fn stalled(house: &House, tokens: u32) -> tonic::Streaming<hotcell_proto::v1::GenerateEvent> {
    let before = house.stage.running.load(Ordering::SeqCst);
    house.stage.act(Act::Stall);
    let stalls = GenerateRequest {
        prompt: prompt(&[7, 7, 7]),
        ..request(tokens)
    };
    let stream = house.tokens().generate(stalls).await.unwrap().into_inner();
    until(|| house.stage.running.load(Ordering::SeqCst) > before).await;
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_goes_to_the_worker_that_knows_its_beginning() {
    let house = house().await;
    // The first is busy, so the second reads it.
    let busy = stalled(&house, 100).await;
    assert_eq!(served(&house, beginning(640, 0)).await, "fake/b");
    drop(busy);
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;
    // Both are idle: the first would have it, but for the beginning.
    assert_eq!(served(&house, beginning(640, 100)).await, "fake/b");
    assert_eq!(served(&house, beginning(64, 200)).await, "fake/b");
    assert_eq!(
        served(&house, beginning(63, 300)).await,
        "fake/a",
        "no block"
    );
    let foreign = GenerateRequest {
        tenant: "another".into(),
        ..beginning(640, 400)
    };
    assert_eq!(served(&house, foreign).await, "fake/a", "not its tenant's");
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_worker_is_not_worth_waiting_for() {
    let house = house().await;
    assert_eq!(served(&house, beginning(320, 0)).await, "fake/a");
    let less = stalled(&house, 200).await;
    assert_eq!(served(&house, beginning(320, 100)).await, "fake/a");
    let more = stalled(&house, 400).await;
    // That one went to the other worker, which has 400 to compute now, this one 200.
    assert_eq!(served(&house, beginning(320, 200)).await, "fake/a");
    drop(more);
    until(|| house.stage.running.load(Ordering::SeqCst) == 1).await;
    // 200 against nothing, and a block of 64 that is known.
    assert_eq!(served(&house, beginning(64, 300)).await, "fake/b");
    drop(less);
    house.end().await;
}

fn of(tenant: &str, id: u32) -> GenerateRequest {
    GenerateRequest {
        tenant: tenant.into(),
        prompt: prompt(&[id]),
        ..request(4)
    }
}

/// A worker whose places all have requests of one tenant, which do nothing. These arrive one by one and wait; then one
/// place after another is theirs, and that is the order they have it in.
async fn order_behind_a_full_worker(arriving: Vec<GenerateRequest>) -> Vec<GenerateRequest> {
    let house = House::with(1, |_, config| config.timeouts.reattach = Duration::ZERO).await;
    house.ready(1).await;
    let mut held = Vec::new();
    for id in 0..limits::MAX_WORKER_REQUESTS as u32 {
        house.stage.act(Act::Stall);
        let generate = house.tokens().generate(of("many", id)).await;
        held.push(generate.unwrap().into_inner());
        // Each has its place before the next one comes.
        let running = held.len();
        until(|| house.stage.running.load(Ordering::SeqCst) == running).await;
    }
    let mut waiting = Vec::new();
    for request in arriving {
        let mut tokens = house.tokens();
        let said = async move {
            let mut stream = tokens.generate(request).await.unwrap().into_inner();
            while stream.message().await.unwrap().is_some() {}
        };
        waiting.push(tokio::spawn(said));
        let count = waiting.len();
        until(|| house.fleet.waiting() == count).await;
    }
    // One goes, and one after another has its place.
    held.pop();
    for said in waiting {
        tokio::time::timeout(Duration::from_secs(20), said)
            .await
            .expect("it has a place at last")
            .unwrap();
    }
    let seen = house.stage.seen.lock().unwrap().clone();
    house.end().await;
    seen[limits::MAX_WORKER_REQUESTS..].to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_that_fills_a_worker_does_not_shut_others_out() {
    // The tenant's own come before the others'.
    let arriving = [("many", 300), ("many", 301), ("few", 302), ("few", 303)];
    let arriving = arriving.map(|(tenant, id)| of(tenant, id)).into();
    let seen = order_behind_a_full_worker(arriving).await;
    let order: Vec<&str> = seen.iter().map(|r| r.tenant.as_str()).collect();
    assert_eq!(order, ["few", "few", "many", "many"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_that_was_tokenised_does_not_wait_anew() {
    let text = |text: &str| GenerateRequest {
        prompt: Some(Prompt {
            kind: Some(Kind::Text(text.into())),
        }),
        ..of("many", 0)
    };
    let arriving = vec![text("A"), of("many", 300), text("B"), of("many", 301)];
    let seen = order_behind_a_full_worker(arriving).await;
    let order: Vec<_> = seen.iter().map(|r| r.prompt.clone()).collect();
    let a = |id: u8| prompt(&[id.into()]);
    assert_eq!(order, [a(b'A'), prompt(&[300]), a(b'B'), prompt(&[301])]);
}
