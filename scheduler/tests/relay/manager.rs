//! What a service manager hears while workers come and go.

use std::os::unix::net::UnixDatagram;

use hotcell_ipc::notify::{Environment, Manager};
use hotcell_scheduler::manager;

use super::*;

/// The next datagram that is no ping and stores nothing.
async fn hear(socket: &tokio::net::UnixDatagram) -> String {
    loop {
        let mut buffer = [0; 1024];
        let next = tokio::time::timeout(Duration::from_secs(20), socket.recv(&mut buffer));
        let bytes = next.await.expect("nothing within 20 s").unwrap();
        let heard = String::from_utf8(buffer[..bytes].to_vec()).unwrap();
        if !heard.starts_with("FDSTORE") {
            return heard;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_ready_once_a_worker_serves_and_never_again() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("notify");
    let socket = UnixDatagram::bind(&at).unwrap();
    socket.set_nonblocking(true).unwrap();
    let socket = tokio::net::UnixDatagram::from_std(socket).unwrap();
    let environment = Environment {
        socket: Some(at.as_os_str()),
        ..Environment::default()
    };
    let found = Manager::of(environment).unwrap().unwrap();
    // Long enough in loading that it is told of before.
    let house = House::with(1, |stage, _| stage.load_steps.store(20, Ordering::Relaxed)).await;
    let informed = manager::keep_informed(Arc::new(found), house.shared.clone());
    let informed = tokio::spawn(informed);
    assert_eq!(hear(&socket).await, "STATUS=0 of 1 workers ready\n");
    assert_eq!(house.fleet.ready(), 0);
    let ready = "READY=1\nSTATUS=1 of 1 workers ready\n";
    assert_eq!(hear(&socket).await, ready);
    house.stage.act(Act::DieAtOnce);
    house.generate(request(4)).await.unwrap();
    assert_eq!(hear(&socket).await, "STATUS=0 of 1 workers ready\n");
    assert_eq!(hear(&socket).await, "STATUS=1 of 1 workers ready\n");
    informed.abort();
    house.end().await;
}
