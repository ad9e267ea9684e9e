//! Workers that pack weights badly, or do not like what others packed.

use hotcell_proto::{
    limits,
    v1::{PackPiece, PackedInfo, PackedState},
};

use super::*;

/// The model's only file has two bytes.
fn piece(offset: u64, bytes: u64) -> PackPiece {
    PackPiece {
        offset,
        bytes,
        ..PackPiece::default()
    }
}

async fn house(workers: usize, pieces: Vec<PackPiece>) -> House {
    House::with(workers, |stage, _| *stage.pieces.lock().unwrap() = pieces).await
}

fn packed(house: &House) -> Option<PackedInfo> {
    house.fleet.models().remove(0).packed.pop()
}

async fn ends_as(house: &House, state: PackedState) -> PackedInfo {
    until(|| packed(house).is_some_and(|info| info.state() == state)).await;
    packed(house).unwrap()
}

async fn still_serves(house: &House, workers: usize) {
    let said = house.generate(request(4)).await.unwrap();
    said.check(&[1, 2, 3], 5, 4, 0);
    let all = house.fleet.workers();
    assert_eq!(all.len(), workers);
    assert!(all.iter().all(|w| w.deaths == 0 && w.epoch == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_made_once_and_offered_to_everyone() {
    let house = house(3, vec![piece(1, 1), piece(0, 1)]).await;
    house.ready(3).await;
    let all = ["w0", "w1", "w2"];
    until(|| packed(&house).is_some_and(|info| info.workers == all)).await;
    let info = ends_as(&house, PackedState::Ready).await;
    assert_eq!((info.packings, info.bytes_total), (1, 2));
    assert_eq!(house.stage.offered.load(Ordering::SeqCst), 3);
    still_serves(&house, 3).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_that_belong_nowhere_are_believed_nowhere() {
    let file = PackPiece {
        file: 1,
        ..piece(0, 1)
    };
    for (pieces, why) in [
        (vec![piece(2, 1)], "outside"),
        (vec![piece(u64::MAX, 2)], "outside"),
        (vec![piece(0, 2), piece(0, 1)], "more than the files hold"),
        (
            vec![piece(0, limits::PACK_PIECE as u64 + 1)],
            "more than there is room for",
        ),
        (vec![piece(0, u64::MAX)], "more than there is room for"),
        (vec![file], "not asked for"),
    ] {
        let house = house(1, pieces.clone()).await;
        house.ready(1).await;
        let info = ends_as(&house, PackedState::Failed).await;
        assert!(info.problem.contains(why), "{pieces:?}: {}", info.problem);
        assert_eq!(house.stage.offered.load(Ordering::SeqCst), 0);
        still_serves(&house, 1).await;
        house.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_none_is_made_again_a_few_times() {
    let house = House::with(1, |stage, _| {
        stage.pieces.lock().unwrap().push(piece(0, 2));
        *stage.declines.lock().unwrap() = Some(Reason::ModelChanged);
    })
    .await;
    house.ready(1).await;
    let info = ends_as(&house, PackedState::Failed).await;
    assert_eq!(info.packings, limits::PACK_ATTEMPTS);
    assert!(
        info.problem.contains("does not like it"),
        "{}",
        info.problem
    );
    assert!(info.workers.is_empty());
    still_serves(&house, 1).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_take_a_copy_for_another_reason_is_not_asked_again() {
    let house = House::with(1, |stage, _| {
        stage.pieces.lock().unwrap().push(piece(0, 2));
        *stage.declines.lock().unwrap() = Some(Reason::OutOfMemory);
    })
    .await;
    house.ready(1).await;
    ends_as(&house, PackedState::Ready).await;
    until(|| house.stage.offered.load(Ordering::SeqCst) == 1).await;
    for _ in 0..3 {
        still_serves(&house, 1).await;
    }
    assert_eq!(house.stage.offered.load(Ordering::SeqCst), 1);
    house.end().await;
}
