//! What a service manager keeps of a scheduler that is killed, and what the next one makes of it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::{
            fs::PermissionsExt,
            net::{UnixDatagram, UnixStream},
        },
    },
    path::Path,
    time::Duration,
};

use hotcell_ipc::{
    spawn::{Child, Command, Signal, Spawner},
    transport::{Windows, channel_over},
};
use hotcell_proto::v1::{ListModelsRequest, ModelInfo, ModelState, control_client::ControlClient};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

const SOON: Duration = Duration::from_secs(30);
const PROBED: &str = r#"{"protocol":1,"devices":[{"id":"cpu:0","backend":"cpu","cores":[0]}]}"#;

/// A service manager with a store.
struct Manager {
    socket: UnixDatagram,
    store: Vec<(String, OwnedFd)>,
}

impl Manager {
    fn bind(at: &Path) -> Self {
        let socket = UnixDatagram::bind(at).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        Self {
            socket,
            store: Vec::new(),
        }
    }

    /// Takes one message; panics if none comes soon.
    fn hear(&mut self) {
        let mut text = [0; 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffers = [IoSliceMut::new(&mut text)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&self.socket, &mut buffers, &mut control, flags).unwrap();
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<OwnedFd> = fds.flatten().collect();
        let message = String::from_utf8_lossy(&text[..got.bytes]).into_owned();
        let of = |key: &str| {
            let mut lines = message.lines().filter_map(|l| l.strip_prefix(key));
            lines.next().map(str::to_owned)
        };
        match (of("FDSTORE="), of("FDSTOREREMOVE="), of("FDNAME=")) {
            (Some(_), None, Some(name)) => {
                let named = fds.into_iter().map(|fd| (name.clone(), fd));
                self.store.extend(named);
            }
            (None, Some(_), Some(name)) => self.store.retain(|(held, _)| *held != name),
            _ => assert!(fds.is_empty(), "{message}"),
        }
    }

    fn hear_until(&mut self, enough: impl Fn(&[&str]) -> bool) {
        loop {
            let names: Vec<&str> = self.store.iter().map(|(name, _)| &name[..]).collect();
            if enough(&names) {
                return;
            }
            self.hear();
        }
    }
}

/// Starts a scheduler whose worker can be probed and then is silent.
fn start(folder: &Path, store: Vec<(String, OwnedFd)>, arguments: &[&str]) -> Child {
    let worker = folder.join("worker");
    let script =
        format!("#!/bin/sh\nif [ $1 = probe ]; then echo '{PROBED}'; exit; fi\nexec sleep 100\n");
    fs::write(&worker, script).unwrap();
    fs::set_permissions(&worker, fs::Permissions::from_mode(0o755)).unwrap();
    // Only the process itself knows its id.
    let mut command = Command::new("/bin/sh")
        .arg("-c")
        .arg("LISTEN_PID=$$ exec \"$0\" \"$@\"")
        .arg(env!("CARGO_BIN_EXE_hotcell-scheduler"))
        .arg("--socket")
        .arg(folder.join("s.sock"))
        .arg("--worker-binary")
        .arg(worker)
        .env("PATH", "/usr/bin:/bin")
        .env("XDG_CONFIG_HOME", folder)
        .env("NOTIFY_SOCKET", folder.join("notify"))
        .env("LISTEN_FDS", store.len().to_string());
    command.args.extend(arguments.iter().map(Into::into));
    let names: Vec<&str> = store.iter().map(|(name, _)| &name[..]).collect();
    command = command.env("LISTEN_FDNAMES", names.join(":"));
    command.fds = store.into_iter().map(|(_, fd)| fd).zip(3..).collect();
    command.stderr = hotcell_ipc::spawn::Output::Inherit;
    Spawner::start().unwrap().spawn_blocking(command).unwrap()
}

async fn models(connection: UnixStream) -> Vec<ModelInfo> {
    let channel = channel_over(connection.into(), Windows::default()).await;
    let mut client = ControlClient::new(channel.unwrap());
    let models = client.list_models(ListModelsRequest {}).await;
    models.unwrap().into_inner().models
}

#[tokio::test]
async fn sockets_and_models_are_there_again_after_a_kill() {
    let folder = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .tempdir()
        .unwrap();
    let (at, socket) = (folder.path(), folder.path().join("s.sock"));
    let mut manager = Manager::bind(&at.join("notify"));
    let model = at.join("m");
    fs::create_dir(&model).unwrap();
    fs::write(model.join("config.json"), "{}").unwrap();
    fs::write(model.join("model.safetensors"), "12345").unwrap();
    let named = format!("m={}", model.display());
    let mut scheduler = start(at, Vec::new(), &["--models", &named]);
    let whole = |names: &[&str]| {
        let count = |name: &str| names.iter().filter(|n| **n == name).count();
        let doors = count("hotcell-unix") == 1 && count("hotcell-handout") == 1;
        doors && count("hotcell-file") == 2 && count("hotcell-state") == 1
    };
    manager.hear_until(whole);
    scheduler.kill(Signal::KILL).unwrap();
    scheduler.wait().await.unwrap();
    // What is held is not looked for again.
    fs::remove_dir_all(&model).unwrap();
    // Clients come meanwhile, and wait.
    let waiting = UnixStream::connect(&socket).unwrap();

    let mut store = std::mem::take(&mut manager.store);
    // Not one of ours, and what a scheduler of another kind kept.
    let other = fs::File::open("/dev/null").unwrap();
    store.insert(0, ("other".to_owned(), other.try_clone().unwrap().into()));
    store.push(("hotcell-file".to_owned(), other.into()));
    let mut scheduler = start(at, store, &[]);
    let found = models(waiting).await;
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0].name[..], found[0].file_bytes), ("m", 7));
    assert_eq!(found[0].state(), ModelState::Loading);
    manager.hear_until(whole);
    // Nothing is kept of one that ends in order, not even its sockets.
    scheduler.kill(Signal::TERM).unwrap();
    let ended = scheduler.wait().await.unwrap();
    assert!(ended.success(), "{ended}");
    manager.hear_until(|names| names.is_empty());
    assert!(!socket.exists());
}

#[tokio::test]
async fn what_is_no_state_is_not_believed() {
    let folder = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .tempdir()
        .unwrap();
    let at = folder.path();
    let manager = Manager::bind(&at.join("notify"));
    let (noise, listener) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let store = vec![
        ("hotcell-state".to_owned(), noise.into()),
        ("hotcell-unix".to_owned(), listener.into()),
    ];
    let mut scheduler = start(at, store, &[]);
    let start = std::time::Instant::now();
    let connection = loop {
        match UnixStream::connect(at.join("s.sock")) {
            Ok(connection) => break connection,
            Err(error) => assert!(start.elapsed() < SOON, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(models(connection).await, []);
    scheduler.kill(Signal::TERM).unwrap();
    assert!(scheduler.wait().await.unwrap().success());
    drop(manager);
}

#[tokio::test]
async fn a_port_that_was_open_before_it_is_served() {
    let folder = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .tempdir()
        .unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    // Who comes before it is served as well.
    let early = std::net::TcpStream::connect(address).unwrap();
    let another = UnixStream::pair().unwrap().0;
    let sockets = vec![
        ("hotcell-tcp".to_owned(), tcp.into()),
        ("another's".to_owned(), another.into()),
    ];
    let listen = ["--listen", &address.to_string()];
    let mut scheduler = start(folder.path(), sockets, &listen);
    early.set_nonblocking(true).unwrap();
    let early = tokio::net::TcpStream::from_std(early).unwrap();
    let channel = hotcell_ipc::transport::channel_on(early, Windows::default());
    let mut control = ControlClient::new(channel.await.unwrap());
    let listed = control.list_models(ListModelsRequest {}).await.unwrap();
    assert_eq!(listed.into_inner().models, []);
    drop(control);
    scheduler.kill(Signal::TERM).unwrap();
    assert!(scheduler.wait().await.unwrap().success());
}

/// As the shipped unit names it.
#[tokio::test]
async fn the_port_for_http_that_was_open_before_it_is_served() {
    let folder = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .tempdir()
        .unwrap();
    let unit = include_str!("../../deploy/hotcell.socket");
    let mut lines = unit.lines();
    let name = lines.find_map(|l| l.strip_prefix("FileDescriptorName="));
    let http = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = http.local_addr().unwrap();
    // Who comes before it is served as well.
    let mut early = std::net::TcpStream::connect(address).unwrap();
    early.set_read_timeout(Some(SOON)).unwrap();
    let ask = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    std::io::Write::write_all(&mut early, ask).unwrap();
    let sockets = vec![(name.unwrap().to_owned(), http.into())];
    let listen = ["--http", &address.to_string()];
    let mut scheduler = start(folder.path(), sockets, &listen);
    let read = tokio::task::spawn_blocking(move || {
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut early, &mut answer).map(|_| answer)
    });
    let answer = read.await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 "), "{answer}");
    scheduler.kill(Signal::TERM).unwrap();
    assert!(scheduler.wait().await.unwrap().success());
}
