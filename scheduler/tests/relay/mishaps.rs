//! What goes wrong around a stream: nobody reads, workers are full, models come and go.

use super::*;

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
    let said = || house.stage.said.load(Ordering::SeqCst);
    let mut before = u64::MAX;
    while before != said() {
        before = said();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
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
