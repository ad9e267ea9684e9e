//! Clients that read slowly, break off and come back.

use hotcell_proto::v1::{AttachRequest, CancelStreamRequest, GenerateEvent};
use hotcell_scheduler::stream::Room;
use tonic::Streaming;

use super::*;

pub(super) fn named(id: &str, tokens: u32) -> GenerateRequest {
    GenerateRequest {
        request_id: id.into(),
        ..request(tokens)
    }
}

pub(super) async fn start(house: &House, request: GenerateRequest) -> Streaming<GenerateEvent> {
    let stream = house.tokens().generate(request).await;
    stream.unwrap().into_inner()
}

/// Reads until so many tokens have come, or to the end.
pub(super) async fn hear(stream: &mut Streaming<GenerateEvent>, said: &mut Said, tokens: usize) {
    while said.ids.len() < tokens {
        let Some(event) = stream.message().await.unwrap() else {
            return;
        };
        said.hear(event.event.unwrap());
    }
}

pub(super) async fn attach(
    house: &House,
    id: &str,
    said: &Said,
) -> Result<Streaming<GenerateEvent>, Status> {
    let request = AttachRequest {
        request_id: id.into(),
        next_token: said.ids.len() as u64,
        text_bytes: Some(said.text.len() as u64),
    };
    let mut tokens = TokensClient::new(house.connect().await);
    Ok(tokens.attach(request).await?.into_inner())
}

/// What comes after an attachment: Accepted again, then the rest.
pub(super) async fn rest(
    mut stream: Streaming<GenerateEvent>,
    said: &mut Said,
) -> Result<(), Status> {
    let first = stream.message().await?.unwrap().event;
    assert!(matches!(first, Some(Event::Accepted(_))), "{first:?}");
    while let Some(event) = stream.message().await? {
        said.hear(event.event.unwrap());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_do_not_read_hold_up_no_worker() {
    let house = House::new(1).await;
    house.ready(1).await;
    let mut unread = Vec::new();
    for _ in 0..20 {
        unread.push(start(&house, request(2000)).await);
    }
    // All is said, and the worker free, before anybody reads.
    until(|| house.stage.said.load(Ordering::SeqCst) == 20 * 2000).await;
    until(|| house.shared.admission.count() == 0).await;
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;
    let read = house.generate(request(200)).await.unwrap();
    read.check(&[1, 2, 3], 5, 200, 0);
    unread.truncate(3);
    for stream in &mut unread {
        let mut said = Said::default();
        hear(stream, &mut said, usize::MAX).await;
        said.check(&[1, 2, 3], 5, 2000, 0);
    }
    drop(unread);
    until(|| house.shared.streams.room().held() == 0).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_reads_is_bounded_for_each_and_for_all_and_nothing_is_lost() {
    const SHARE: usize = 8 << 10;
    for (total, each) in [(1 << 30, 64 << 10), (100 << 10, 64 << 10)] {
        let house = House::with(1, |stage, _| {
            *stage.room.lock().unwrap() = Some(Room::new(total, each, SHARE));
        })
        .await;
        house.ready(1).await;
        let mut unread = Vec::new();
        for i in 0..8 {
            // Whether or not it is kept for later, what was not read bounds it.
            let request = match i % 2 {
                0 => request(2000),
                _ => named(&format!("own-{i}"), 2000),
            };
            unread.push(start(&house, request).await);
        }
        let said = || house.stage.said.load(Ordering::SeqCst);
        let mut before = u64::MAX;
        while before != said() {
            before = said();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        assert!(before < 8 * 2000);
        let event = 1 << 10;
        let held = house.shared.streams.room().held();
        assert!(held > 8 * SHARE, "{held}");
        assert!(
            held <= 8 * (each + event) && held <= total + 8 * (SHARE + event),
            "{held}"
        );
        // It costs nobody else anything, and goes on when it is read.
        let read = house.generate(request(200)).await.unwrap();
        read.check(&[1, 2, 3], 5, 200, 0);
        for mut stream in unread {
            let mut said = Said::default();
            hear(&mut stream, &mut said, usize::MAX).await;
            said.check(&[1, 2, 3], 5, 2000, 0);
        }
        house.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_comes_back_gets_the_rest_once_wherever_it_broke_off() {
    let house = House::new(2).await;
    house.ready(2).await;
    for broke_off in 0..=12 {
        let id = format!("mine-{broke_off}");
        house
            .stage
            .act(Act::DieAt(broke_off, Duration::from_millis(1)));
        let mut stream = start(&house, named(&id, 12)).await;
        let mut said = Said::default();
        said.hear(stream.message().await.unwrap().unwrap().event.unwrap());
        hear(&mut stream, &mut said, broke_off).await;
        drop(stream);
        let stream = attach(&house, &id, &said).await.unwrap();
        rest(stream, &mut said).await.unwrap();
        said.check(&[1, 2, 3], 5, 12, 1);
    }
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_run_once_under_its_id() {
    let house = House::new(1).await;
    let seen = || house.stage.seen.lock().unwrap().len();
    house.stage.act(Act::Stall);
    let mut first = start(&house, named("mine", 4)).await;
    first.message().await.unwrap().unwrap();
    let other = named("mine", 5);
    assert_eq!(reason(house.generate(other).await), Reason::RequestExists);
    // The same again takes the stream over, from its beginning.
    let mut second = start(&house, named("mine", 4)).await;
    second.message().await.unwrap().unwrap();
    assert_eq!(reason(first.message().await), Reason::TakenOver);
    assert_eq!(seen(), 1);
    let cancel = || CancelStreamRequest {
        request_id: "mine".into(),
    };
    house.tokens().cancel(cancel()).await.unwrap();
    assert_eq!(reason(second.message().await), Reason::Cancelled);
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;
    until(|| house.shared.streams.count() == 0).await;
    assert_eq!(
        reason(house.tokens().cancel(cancel()).await),
        Reason::RequestNotFound
    );

    // Finished, it is there for a while, however often it is asked for.
    for _ in 0..20 {
        let said = house.generate(named("mine", 4)).await.unwrap();
        said.check(&[1, 2, 3], 5, 4, 0);
    }
    assert_eq!(seen(), 2);
    assert_eq!(house.shared.admission.count(), 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_waits_for_its_client_only_so_long() {
    let house = House::with(1, |_, config| {
        config.timeouts.reattach = Duration::from_millis(300);
    })
    .await;
    house.stage.act(Act::Stall);
    let mut stream = start(&house, named("mine", 4)).await;
    stream.message().await.unwrap().unwrap();
    drop(stream);
    assert_eq!(house.stage.running.load(Ordering::SeqCst), 1);
    until(|| house.stage.running.load(Ordering::SeqCst) == 0).await;
    until(|| house.shared.streams.count() == 0).await;
    let late = attach(&house, "mine", &Said::default()).await;
    assert_eq!(reason(late), Reason::RequestNotFound);
    // The same for one that finished.
    house.generate(named("mine", 4)).await.unwrap();
    assert_eq!(house.shared.streams.count(), 1);
    until(|| house.shared.streams.count() == 0).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_reads_on_from_where_no_event_ends_or_from_what_is_forgotten() {
    let house = House::with(1, |stage, _| {
        *stage.room.lock().unwrap() = Some(Room::new(1 << 30, 16 << 10, 1 << 10));
    })
    .await;
    house.generate(named("short", 4)).await.unwrap();
    for (tokens, text) in [(5, None), (2, Some(1)), (u64::MAX, Some(u64::MAX))] {
        let request = AttachRequest {
            request_id: "short".into(),
            next_token: tokens,
            text_bytes: text,
        };
        assert_eq!(
            reason(house.tokens().attach(request).await),
            Reason::InvalidArgument
        );
    }
    // What was read and is too much is forgotten; what comes last is there.
    let all = house.generate(named("long", 400)).await.unwrap();
    let from = |tokens: usize| Said {
        ids: all.ids[..tokens].to_vec(),
        text: all.ids[..tokens].iter().map(|&id| fake::text(id)).collect(),
        ..Said::default()
    };
    let early = attach(&house, "long", &from(100)).await;
    assert_eq!(reason(early), Reason::TokensForgotten);
    let mut said = from(395);
    let late = attach(&house, "long", &said).await.unwrap();
    rest(late, &mut said).await.unwrap();
    said.accepted = 1;
    said.check(&[1, 2, 3], 5, 400, 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_streams_make_room_for_others() {
    let house = House::with(1, |stage, _| {
        *stage.room.lock().unwrap() = Some(Room::new(64 << 10, 32 << 10, 1 << 10));
    })
    .await;
    for i in 0..20 {
        let said = house.generate(named(&format!("r{i}"), 20)).await.unwrap();
        said.check(&[1, 2, 3], 5, 20, 0);
        assert!(house.shared.streams.room().held() <= 64 << 10);
    }
    let count = house.shared.streams.count();
    assert!((1..20).contains(&count), "{count}");
    house.end().await;
}
