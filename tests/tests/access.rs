//! Who may speak to a scheduler: tokens and roles, TLS and certificates, tenants and what each may have, the socket's own folder.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::BTreeSet,
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Instant,
};

use hotcell_client::{
    Address, Client, Error, Event, GenerateOptions, Identity, Reason, SaveGraph,
    connect::is_unreachable,
    tensor::{DType, Session, SessionOptions, Tensor},
    v1,
};
use hotcell_scheduler::access::{Need, Role, TABLE};
use hotcell_tests::cluster::{
    Cluster, Process, SOON, all_have, binaries, free_address, hotcell, kjv, signal_pid,
};
use http_body_util::Full;
use prost::Message;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, SanType,
};
use rustix::process::Signal;
use tempfile::TempDir;
use tonic::{body::Body, transport::Channel};
use tower::{Service, ServiceExt};

const PROMPT: &str = "In the beginning God created";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A new token of `hotcell token new`, and its lines for the file.
fn token(folder: &Path, arguments: &[&str]) -> (String, String) {
    let mut command = hotcell(folder).unwrap();
    let output = command.args(["--json", "token", "new"]).args(arguments);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let made: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let part = |name: &str| made[name].as_str().unwrap().to_owned();
    (part("token"), part("lines"))
}

/// A scheduler on TCP with tokens.
struct House {
    cluster: Cluster,
    port: u16,
    files: TempDir,
}

impl House {
    async fn with(files: TempDir, more: &[&str]) -> Self {
        let port = free_address().unwrap().port();
        let listen = format!("127.0.0.1:{port}");
        let arguments = [&["--listen", &listen, "--devices", "cpu:1"], more].concat();
        let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
            .await
            .unwrap();
        cluster.workers(all_have("kjv")).await.unwrap();
        Self {
            cluster,
            port,
            files,
        }
    }

    /// One whose file of tokens has these lines.
    async fn with_tokens(files: TempDir, lines: &str) -> Self {
        let path = files.path().join("tokens.toml");
        fs::write(&path, lines).unwrap();
        Self::with(files, &["--tokens", text(&path)]).await
    }

    fn write(&self, name: &str, content: &str) {
        let new = self.files.path().join("new");
        fs::write(&new, content).unwrap();
        fs::rename(new, self.files.path().join(name)).unwrap();
    }

    async fn client(&self, token: Option<&str>) -> Client {
        let address: Address = format!("127.0.0.1:{}", self.port).parse().unwrap();
        let identity = Identity {
            token: token.map(str::to_owned),
            ..Identity::default()
        };
        Client::connect_as(&address, &identity).await.unwrap()
    }

    /// Waits until a call is answered with this reason; none: answered well.
    async fn until(&self, token: &str, wanted: Option<Reason>) {
        let start = Instant::now();
        loop {
            let answer = self.client(Some(token)).await.models().await;
            if answer.as_ref().err().map(Error::reason) == wanted {
                return;
            }
            assert!(
                start.elapsed() < SOON,
                "{answer:?}\n{}",
                self.cluster.scheduler.log()
            );
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
}

fn reason<T: std::fmt::Debug>(answer: Result<T, Error>) -> Reason {
    answer.unwrap_err().reason()
}

fn some_tokens(count: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: count,
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

#[test]
fn every_call_has_a_row_of_its_role() {
    let all = prost_types::FileDescriptorSet::decode(v1::DESCRIPTORS).unwrap();
    // Served to the scheduler by workers only.
    let own = ["hotcell.v1.Worker"];
    let mut calls = BTreeSet::new();
    for file in &all.file {
        for service in &file.service {
            let service_name = format!("{}.{}", file.package(), service.name());
            if !own.contains(&service_name.as_str()) {
                let methods = service.method.iter();
                calls.extend(methods.map(|m| format!("/{service_name}/{}", m.name())));
            }
        }
    }
    assert!(calls.len() > 30, "{calls:?}");
    let ours = |path: &&str| path.starts_with("/hotcell.");
    let rows: Vec<_> = TABLE.iter().map(|(path, _)| *path).filter(ours).collect();
    let known: BTreeSet<_> = rows.iter().map(ToString::to_string).collect();
    assert_eq!(known, calls);
    assert_eq!(known.len(), rows.len(), "a call has two rows");
}

/// The gRPC status of an empty call.
async fn status(channel: &Channel, path: &str, token: Option<&str>) -> Option<u32> {
    let mut request = http::Request::new(Body::new(Full::new(bytes::Bytes::from_static(&[0; 5]))));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = path.parse().unwrap();
    let headers = request.headers_mut();
    headers.insert("te", "trailers".parse().unwrap());
    headers.insert("content-type", "application/grpc".parse().unwrap());
    if let Some(token) = token {
        headers.insert("authorization", token.parse().unwrap());
    }
    let mut channel = channel.clone();
    let answer = channel.ready().await.unwrap().call(request);
    let answer = tokio::time::timeout(SOON, answer).await.unwrap().unwrap();
    let status = answer.headers().get("grpc-status");
    status.map(|s| s.to_str().unwrap().parse().unwrap())
}

const PERMISSION_DENIED: Option<u32> = Some(7);
const UNIMPLEMENTED: Option<u32> = Some(12);
const UNAUTHENTICATED: Option<u32> = Some(16);

#[tokio::test]
async fn each_role_opens_its_own_calls_and_no_others() {
    let files = TempDir::new().unwrap();
    let roles = [
        (Role::Use, "use"),
        (Role::Load, "load"),
        (Role::Debug, "debug"),
        (Role::Admin, "admin"),
    ];
    let made: Vec<_> = roles
        .iter()
        .map(|(_, name)| token(files.path(), &[name, "--role", name]))
        .collect();
    let lines: String = made.iter().map(|(_, lines)| lines.as_str()).collect();
    let house = House::with_tokens(files, &lines).await;
    let door = Channel::from_shared(format!("http://127.0.0.1:{}", house.port)).unwrap();
    for (path, need) in TABLE {
        // One of its own each: a connection with many calls that come to nothing is ended.
        let channel = door.connect().await.unwrap();
        for ((role, _), (token, _)) in roles.iter().zip(&made) {
            let answer = status(&channel, path, Some(&format!("Bearer {token}"))).await;
            let may = match need {
                Need::Nobody => true,
                Need::Role(needed) => needed == role || *role == Role::Admin,
            };
            match may {
                true => assert!(
                    answer != PERMISSION_DENIED && answer != UNAUTHENTICATED,
                    "{path} as {role:?}: {answer:?}"
                ),
                false => assert_eq!(answer, PERMISSION_DENIED, "{path} as {role:?}"),
            }
        }
        let wrong = format!("Bearer use.{}", "0".repeat(64));
        let good = &made[0].0;
        for shown in [
            None,
            Some(wrong.as_str()),
            Some("Bearer"),
            Some("Bearer x"),
            Some(&format!("Basic {good}")),
            Some(good.as_str()),
        ] {
            let answer = status(&channel, path, shown).await;
            match need {
                Need::Nobody => assert_ne!(answer, UNAUTHENTICATED, "{path}"),
                Need::Role(_) => assert_eq!(answer, UNAUTHENTICATED, "{path} with {shown:?}"),
            }
        }
    }
    // What is in no row is not open to those who may use what is there.
    let bearer = format!("Bearer {}", made[0].0);
    let channel = door.connect().await.unwrap();
    let unknown = status(&channel, "/hotcell.v1.Worker/Drain", Some(&bearer)).await;
    assert_eq!(unknown, UNIMPLEMENTED);
    // The scheduler's own user needs no token.
    house
        .cluster
        .client()
        .await
        .unwrap()
        .crashes()
        .await
        .unwrap();
    let log = house.cluster.scheduler.log();
    assert!(made.iter().all(|(token, _)| !log.contains(token)), "{log}");
}

#[tokio::test]
async fn a_token_works_until_it_expires_or_is_taken_back() {
    let files = TempDir::new().unwrap();
    let (alice, alice_lines) = token(files.path(), &["alice", "--days", "1"]);
    let (bob, bob_lines) = token(files.path(), &["bob"]);
    let expired = alice_lines
        .lines()
        .map(|line| match line.starts_with("expires") {
            true => "expires = \"2020-01-01T00:00:00Z\"\n".to_owned(),
            false => format!("{line}\n"),
        });
    let expired: String = expired.collect();
    let house = House::with_tokens(files, &alice_lines).await;
    house.until(&alice, None).await;
    house.until(&bob, Some(Reason::Unauthenticated)).await;

    house.write("tokens.toml", &format!("{alice_lines}{bob_lines}"));
    house.until(&bob, None).await;
    house.until(&alice, None).await;
    house.write("tokens.toml", &format!("{expired}{bob_lines}"));
    house.until(&alice, Some(Reason::Unauthenticated)).await;
    house.until(&bob, None).await;
    // One that makes no sense changes nothing, and neither does none.
    house.write("tokens.toml", "[tokens.alice\n");
    let start = Instant::now();
    while !house
        .cluster
        .scheduler
        .log()
        .contains("cannot be read again")
    {
        assert!(start.elapsed() < SOON, "{}", house.cluster.scheduler.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    house.until(&bob, None).await;
    house.write("tokens.toml", "");
    house.until(&bob, Some(Reason::Unauthenticated)).await;

    let none = house.client(None).await;
    assert_eq!(reason(none.models().await), Reason::Unauthenticated);
    let error = none.models().await.unwrap_err();
    assert!(error.message().contains("HOTCELL_TOKEN"), "{error}");
}

#[tokio::test]
async fn a_tenant_comes_from_the_token_and_streams_are_its_own() {
    let files = TempDir::new().unwrap();
    let (alice, lines) = token(files.path(), &["alice", "--tenant", "acme"]);
    let (anna, more) = token(files.path(), &["anna", "--tenant", "acme"]);
    let (bob, other) = token(files.path(), &["bob"]);
    let house = House::with_tokens(files, &format!("{lines}{more}{other}")).await;
    let (alice, anna, bob) = (
        house.client(Some(&alice)).await,
        house.client(Some(&anna)).await,
        house.client(Some(&bob)).await,
    );
    let own = GenerateOptions {
        request_id: "mine".into(),
        ..some_tokens(8)
    };
    let said = alice.generate(PROMPT, own.clone()).await.unwrap();
    let said = said.complete().await.unwrap();
    let again = anna.attach("mine", 0, Some(0)).await.unwrap();
    assert_eq!(again.complete().await.unwrap().text, said.text);
    let theirs = bob.attach("mine", 0, Some(0)).await;
    let theirs = match theirs {
        Ok(stream) => stream.complete().await.map(|_| ()),
        Err(error) => Err(error),
    };
    assert_eq!(reason(theirs), Reason::RequestNotFound);
    // The very same request, under a tenant's name that is not the caller's to say.
    for tenant in ["", "acme"] {
        let stolen = GenerateOptions {
            tenant: tenant.into(),
            ..own.clone()
        };
        let answer = match bob.generate(PROMPT, stolen).await {
            Ok(stream) => stream.complete().await.map(|_| ()),
            Err(error) => Err(error),
        };
        assert_eq!(reason(answer), Reason::RequestExists, "{tenant}");
    }
    // What was read for one tenant is not what another finds in the cache.
    let prompt = PROMPT.repeat(8);
    let cached = async |client: &Client, tenant: &str| {
        let options = GenerateOptions {
            tenant: tenant.into(),
            ..some_tokens(1)
        };
        let stream = client.generate(prompt.as_str(), options).await.unwrap();
        let usage = stream.complete().await.unwrap().finished.usage.unwrap();
        usage.cached_tokens
    };
    assert_eq!(cached(&alice, "").await, 0);
    assert!(cached(&anna, "bob").await > 0);
    assert_eq!(cached(&bob, "acme").await, 0);
}

#[tokio::test]
async fn what_one_tenant_has_too_much_of_is_no_matter_to_another() {
    let files = TempDir::new().unwrap();
    let (alice, lines) = token(files.path(), &["alice"]);
    let (bob, more) = token(files.path(), &["bob"]);
    let (carol, and) = token(files.path(), &["carol"]);
    let limits = "[tenants.alice]\nrequests = 2\ntokens = 600\nsessions = 2\ntensor_bytes = 1048576\n\
                  [tenants.carol]\ntensor_bytes = 1048576\n";
    let house = House::with_tokens(files, &format!("{lines}{more}{and}{limits}")).await;
    let (alice_token, bob_token) = (alice, bob);
    let alice = house.client(Some(&alice_token)).await;
    let bob = house.client(Some(&bob_token)).await;

    let over =
        async |client: &Client, count: u32| match client.generate(PROMPT, some_tokens(count)).await
        {
            Ok(stream) => stream.complete().await.map(|_| ()),
            Err(error) => Err(error),
        };
    let mut first = alice.generate(PROMPT, some_tokens(200)).await.unwrap();
    let mut second = alice.generate(PROMPT, some_tokens(200)).await.unwrap();
    for stream in [&mut first, &mut second] {
        assert!(matches!(stream.next().await, Some(Ok(Event::Accepted(_)))));
    }
    let error = over(&alice, 1).await.unwrap_err();
    assert_eq!(error.reason(), Reason::QuotaExceeded);
    assert_eq!(error.get("quota"), Some("requests at once"), "{error}");
    assert_eq!(
        reason(alice.tokenize("", "word", false).await),
        Reason::QuotaExceeded
    );
    over(&bob, 4).await.unwrap();
    drop(second);
    // It is noticed that its client left, and its place is free.
    let start = Instant::now();
    while let Err(error) = over(&alice, 4).await {
        assert_eq!(error.reason(), Reason::QuotaExceeded, "{error}");
        assert!(start.elapsed() < SOON, "{error}");
    }
    let error = over(&alice, 1000).await.unwrap_err();
    assert_eq!(error.get("quota"), Some("tokens in flight"), "{error}");
    first.complete().await.unwrap();
    over(&bob, 500).await.unwrap();

    // Sessions, and what they may hold together.
    let open = async |token: &str, bytes: u64| {
        let address: Address = format!("127.0.0.1:{}", house.port).parse().unwrap();
        let options = SessionOptions {
            max_bytes: bytes,
            identity: Some(Identity {
                token: Some(token.to_owned()),
                ..Identity::default()
            }),
            ..SessionOptions::default()
        };
        Session::open(&address, options).await
    };
    let sum = async |session: &Session| {
        let tensor = session.tensor(&[1.0f32, 2.0], &[2]).unwrap();
        (&tensor + &tensor).to_vec::<f32>().await.unwrap()
    };
    let half = open(&alice_token, 0).await.unwrap();
    assert_eq!(sum(&half).await, [2.0, 4.0]);
    // More than is left, and what is larger than the session may hold.
    let error = open(&alice_token, 1 << 20).await.err().unwrap();
    assert_eq!(error.get("quota"), Some("bytes of tensors"), "{error}");
    let large = half.zeros(DType::F32, &[1 << 18]);
    assert_eq!(reason(large.to_vec::<f32>().await), Reason::QuotaExceeded);
    let quarter = open(&alice_token, 1 << 18).await.unwrap();
    let error = open(&alice_token, 1).await.err().unwrap();
    assert_eq!(error.get("quota"), Some("tensor sessions"), "{error}");
    let others = open(&bob_token, 0).await.unwrap();
    assert_eq!(sum(&others).await, [2.0, 4.0]);
    drop((half, large));
    let start = Instant::now();
    let whole = loop {
        match open(&alice_token, 3 << 18).await {
            Ok(session) => break session,
            Err(error) => assert_eq!(error.reason(), Reason::QuotaExceeded, "{error}"),
        }
        assert!(start.elapsed() < SOON);
    };
    assert_eq!(sum(&whole).await, [2.0, 4.0]);
    assert_eq!(sum(&quarter).await, [2.0, 4.0]);

    // Saved graphs: what counts is what is kept when one has taken another's place.
    let carol = house.client(Some(&carol)).await;
    let constant = others.zeros(DType::F32, &[160 << 10]);
    others.eval(std::slice::from_ref(&constant)).await.unwrap();
    let example = others.zeros(DType::F32, &[160 << 10]);
    others.eval(std::slice::from_ref(&example)).await.unwrap();
    let sum = others.compile(move |x: &[Tensor]| vec![&x[0] + &constant]);
    let save = async |name: &str, replace: bool| {
        let saving = SaveGraph {
            replace,
            ..SaveGraph::named(name)
        };
        sum.save(&carol, &saving, &[("x", &example)], None).await
    };
    let one = save("one", false).await.unwrap();
    assert!(one.bytes > 1 << 19, "{}", one.bytes);
    let error = save("two", false).await.unwrap_err();
    assert_eq!(error.get("quota"), Some("bytes of tensors"), "{error}");
    for _ in 0..3 {
        save("one", true).await.unwrap();
    }
    carol.forget_graph("one").await.unwrap();
    save("two", false).await.unwrap();
}

/// An authority of certificates.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    /// A certificate of this name and its key.
    fn issue(&self, name: &str) -> (String, String) {
        self.sign(&CertificateParams::new(vec![name.to_owned()]).unwrap())
    }

    /// One whose subject has this common name, and which has this URI.
    fn issue_to(&self, common: Option<&str>, uri: Option<&str>) -> (String, String) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = common {
            params.distinguished_name.push(DnType::CountryName, "CH");
            params.distinguished_name.push(DnType::CommonName, name);
        }
        let uri = uri.map(|uri| SanType::URI(uri.try_into().unwrap()));
        params.subject_alt_names.extend(uri);
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        (cert.pem(), key.serialize_pem())
    }
}

fn put(folder: &Path, name: &str, content: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    path
}

/// A scheduler that speaks TLS, and asks for certificates of `clients` if there is one.
async fn tls_house(authority: &Authority, clients: Option<&Authority>, more: &[&str]) -> House {
    let files = TempDir::new().unwrap();
    let (cert, key) = authority.issue("127.0.0.1");
    let cert = put(files.path(), "cert.pem", &cert);
    let key = put(files.path(), "key.pem", &key);
    put(files.path(), "ca.pem", &authority.pem);
    let (cert, key) = (text(&cert).to_owned(), text(&key).to_owned());
    let ca = clients.map(|clients| put(files.path(), "clients.pem", &clients.pem));
    let mut arguments = vec!["--tls-cert", &cert, "--tls-key", &key];
    let ca = ca.map(|path| text(&path).to_owned());
    if let Some(ca) = &ca {
        arguments.extend(["--tls-client-ca", ca]);
    }
    arguments.extend(more);
    House::with(files, &arguments).await
}

async fn over_tls(house: &House, identity: &Identity) -> Result<Vec<v1::ModelInfo>, Error> {
    let address: Address = format!("https://127.0.0.1:{}", house.port).parse().unwrap();
    Client::connect_as(&address, identity).await?.models().await
}

#[tokio::test]
async fn tls_is_spoken_with_those_who_believe_the_authority_and_goes_on_when_a_worker_is_killed() {
    let (authority, other) = (Authority::new(), Authority::new());
    let house = tls_house(&authority, None, &[]).await;
    let ca = |path: &Path| Identity {
        ca: Some(path.to_owned()),
        ..Identity::default()
    };
    let believes = ca(&house.files.path().join("ca.pem"));
    over_tls(&house, &believes).await.unwrap();
    let path = put(house.files.path(), "other.pem", &other.pem);
    let error = over_tls(&house, &ca(&path)).await.unwrap_err();
    assert!(
        is_unreachable(&error) && error.message().contains("--tls-ca"),
        "{error}"
    );
    // In clear text it is told what to write.
    let plain: Address = format!("127.0.0.1:{}", house.port).parse().unwrap();
    let error = match Client::connect_as(&plain, &Identity::default()).await {
        Ok(client) => client.models().await.unwrap_err(),
        Err(error) => error,
    };
    assert!(error.message().contains("https://127.0.0.1"), "{error}");

    let address: Address = format!("https://127.0.0.1:{}", house.port).parse().unwrap();
    let client = Client::connect_as(&address, &believes).await.unwrap();
    let calm = client.generate(PROMPT, some_tokens(40)).await.unwrap();
    let calm = calm.complete().await.unwrap();
    let mut stream = client.generate(PROMPT, some_tokens(40)).await.unwrap();
    let mut said = String::new();
    let mut struck = false;
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event.unwrap() {
            said.push_str(&delta.text);
            if !struck {
                struck = true;
                let workers = client.workers().await.unwrap();
                signal_pid(workers[0].pid, Signal::KILL).unwrap();
            }
        }
    }
    assert!(struck);
    assert_eq!(said, calm.text);

    // Another certificate, of another authority, without a restart: the key comes later.
    let (cert, key) = other.issue("127.0.0.1");
    house.write("cert.pem", &cert);
    house.write("key.pem", &key);
    let believes = ca(&path);
    let start = Instant::now();
    while let Err(error) = over_tls(&house, &believes).await {
        assert!(
            start.elapsed() < SOON,
            "{error}\n{}",
            house.cluster.scheduler.log()
        );
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // Who was connected before still is.
    client.models().await.unwrap();
}

#[tokio::test]
async fn mutual_tls_lets_in_who_has_a_certificate_and_a_token() {
    let (authority, clients, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let files = TempDir::new().unwrap();
    let (alice, lines) = token(files.path(), &["alice"]);
    let tokens = put(files.path(), "tokens.toml", &lines);
    let house = tls_house(&authority, Some(&clients), &["--tokens", text(&tokens)]).await;
    let folder = house.files.path();
    let identity = |issued: Option<(String, String)>, name: &str| Identity {
        ca: Some(folder.join("ca.pem")),
        cert: issued
            .as_ref()
            .map(|(cert, _)| put(folder, &format!("{name}.pem"), cert)),
        key: issued.map(|(_, key)| put(folder, &format!("{name}-key.pem"), &key)),
        token: Some(alice.clone()),
    };
    let known = identity(Some(clients.issue("alice")), "alice");
    over_tls(&house, &known).await.unwrap();
    for (issued, name) in [(None, "none"), (Some(strangers.issue("alice")), "stranger")] {
        let error = over_tls(&house, &identity(issued, name)).await.unwrap_err();
        assert!(is_unreachable(&error), "{name}: {error}");
    }
    let tokenless = Identity {
        token: None,
        ..known.clone()
    };
    let answer = over_tls(&house, &tokenless).await;
    assert_eq!(reason(answer), Reason::Unauthenticated);

    // The command, with flags and with the environment.
    let command = |token: bool| {
        let mut command = hotcell(folder).unwrap();
        command
            .arg("--address")
            .arg(format!("https://127.0.0.1:{}", house.port));
        for (flag, path) in [
            ("--tls-ca", &known.ca),
            ("--tls-cert", &known.cert),
            ("--tls-key", &known.key),
        ] {
            command.arg(flag).arg(path.as_ref().unwrap());
        }
        if token {
            command.env("HOTCELL_TOKEN", &alice);
        }
        command
    };
    let output = command(true).arg("models").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let output = command(false).arg("models").output().unwrap();
    assert_eq!(output.status.code(), Some(10), "{output:?}");
    let file = put(folder, "alice.token", &format!("{alice}\n"));
    let mut flagged = command(false);
    let output = flagged
        .arg("--token-file")
        .arg(file)
        .arg("models")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Somebody with a certificate and no token.
fn certified(house: &House, issued: (String, String), name: &str) -> Identity {
    let folder = house.files.path();
    Identity {
        ca: Some(folder.join("ca.pem")),
        cert: Some(put(folder, &format!("{name}.pem"), &issued.0)),
        key: Some(put(folder, &format!("{name}-key.pem"), &issued.1)),
        token: None,
    }
}

#[tokio::test]
async fn a_certificate_names_a_tenant_and_the_file_says_more_about_it() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let files = TempDir::new().unwrap();
    let lines = "[[certificate]]\nname = \"spiffe://acme/batch\"\nroles = [\"use\", \"load\"]\ntenant = \"acme\"\n\
                 [[certificate]]\nname = \"carol\"\n\
                 [tenants.acme]\nrequests = 0\n";
    let tokens = put(files.path(), "tokens.toml", lines);
    let log = files.path().join("audit.log");
    let more = ["--tokens", text(&tokens), "--audit-log", text(&log)];
    let house = tls_house(&authority, Some(&clients), &more).await;
    let address: Address = format!("https://127.0.0.1:{}", house.port).parse().unwrap();
    let batch = clients.issue_to(None, Some("spiffe://acme/batch"));
    let batch = certified(&house, batch, "batch");
    let batch = Client::connect_as(&address, &batch).await.unwrap();
    let error = batch.generate(PROMPT, some_tokens(3)).await.unwrap_err();
    assert_eq!(error.reason(), Reason::QuotaExceeded);
    assert!(error.message().contains("\"acme\""), "{error}");
    batch.load("kjv", "").await.unwrap();
    let noted = r#"certificate \"spiffe://acme/batch\""#;
    let start = Instant::now();
    while !fs::read_to_string(&log).unwrap().contains(noted) {
        let noted = fs::read_to_string(&log).unwrap();
        assert!(start.elapsed() < SOON, "not noted: {noted}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let carol = clients.issue_to(Some("carol"), Some("spiffe://acme/batch"));
    let carol = certified(&house, carol, "carol");
    let carol = Client::connect_as(&address, &carol).await.unwrap();
    let answer = carol.generate(PROMPT, some_tokens(3)).await.unwrap();
    assert_eq!(answer.complete().await.unwrap().token_ids.len(), 3);
    assert_eq!(
        reason(carol.load("new", "/nowhere").await),
        Reason::PermissionDenied
    );
    // Whom the file does not name shows a token.
    let dave = certified(&house, clients.issue_to(Some("dave"), None), "dave");
    assert_eq!(
        reason(over_tls(&house, &dave).await),
        Reason::Unauthenticated
    );
}

#[tokio::test]
async fn without_a_file_a_certificate_is_a_tenant_that_may_use_models() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let house = tls_house(&authority, Some(&clients), &[]).await;
    let dave = certified(&house, clients.issue_to(Some("dave"), None), "dave");
    over_tls(&house, &dave).await.unwrap();
    let address: Address = format!("https://127.0.0.1:{}", house.port).parse().unwrap();
    let dave = Client::connect_as(&address, &dave).await.unwrap();
    assert_eq!(
        reason(dave.load("new", "/nowhere").await),
        Reason::PermissionDenied
    );
    for (number, name) in [None, Some(""), Some(&*"x".repeat(65))]
        .into_iter()
        .enumerate()
    {
        let nobody = clients.issue_to(name, None);
        let nobody = certified(&house, nobody, &number.to_string());
        assert_eq!(
            reason(over_tls(&house, &nobody).await),
            Reason::Unauthenticated
        );
    }
}

/// A scheduler that is not expected to serve.
fn refused(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(binaries().unwrap().join("hotcell-scheduler"));
    command
        .args(arguments)
        .env_clear()
        .env("XDG_CONFIG_HOME", folder)
        .env("XDG_RUNTIME_DIR", folder)
        .env("XDG_CACHE_HOME", folder)
        .current_dir(folder);
    command.output().unwrap()
}

#[test]
fn doors_that_would_stand_open_are_not_opened() {
    let folder = TempDir::new().unwrap();
    let mode = |mode: u32| {
        let open = folder.path().join("open");
        fs::create_dir_all(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        text(&open.join("s")).to_owned()
    };
    for bits in [0o755, 0o710, 0o1777] {
        let output = refused(folder.path(), &["--socket", &mode(bits)]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{said}");
        // What is everybody's is not to be closed.
        let close = bits & 0o1000 == 0;
        assert_eq!(said.contains("chmod 700"), close, "{said}");
        assert!(said.contains("a directory of its own"), "{said}");
    }
    let said = refused(folder.path(), &["--socket", "/hotcell-s"]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.contains("chmod"), "{said}");
    let output = refused(
        folder.path(),
        &["--socket", &mode(0o777), "--allow-uid", "1"],
    );
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("chmod 711"), "{said}");
    let output = refused(folder.path(), &["--listen", "0.0.0.0:0"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--tls-cert"), "{said}");
    let missing = ["--listen", "127.0.0.1:0", "--tokens", "/nowhere"];
    let output = refused(folder.path(), &missing);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("/nowhere"), "{said}");
}

/// A scheduler that serves at this socket.
async fn serving(folder: &TempDir, socket: &Path, arguments: &[&str]) -> Process {
    let mut command = Command::new(binaries().unwrap().join("hotcell-scheduler"));
    command
        .arg("--socket")
        .arg(socket)
        .args(arguments)
        .env_clear()
        .env("XDG_CONFIG_HOME", folder.path());
    let scheduler = Process::start(&mut command).unwrap();
    let address: Address = format!("unix:{}", socket.display()).parse().unwrap();
    let start = Instant::now();
    while Client::connect(&address).await.is_err() {
        assert!(start.elapsed() < SOON, "{}", scheduler.log());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    scheduler
}

#[tokio::test]
async fn a_missing_folder_is_made_for_this_user_alone() {
    let folder = TempDir::new().unwrap();
    let made = folder.path().join("a/b");
    let socket = made.join("s");
    let _scheduler = serving(&folder, &socket, &[]).await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&made), 0o700);
    assert_eq!(mode(&socket), 0o600);
}

/// Only root can be somebody else, so elsewhere this is about the socket alone.
#[tokio::test]
async fn another_user_has_the_roles_it_was_given() {
    let folder = TempDir::new().unwrap();
    let open = folder.path().join("open");
    fs::create_dir(&open).unwrap();
    for path in [folder.path(), &open] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o711)).unwrap();
    }
    let socket = open.join("s");
    let arguments = ["--allow-uid", "65533,65532:use+debug", "--devices", "cpu:1"];
    let _scheduler = serving(&folder, &socket, &arguments).await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o666);
    assert_eq!(mode(&open.join("s.fd")), 0o600);
    if !rustix::process::geteuid().is_root() {
        return;
    }
    // Where that user can run it.
    let program = folder.path().join("hotcell");
    // By another process: one that is forked off here while the copy is written would keep it from being run.
    let mut copy = Command::new("cp");
    copy.arg(binaries().unwrap().join("hotcell")).arg(&program);
    assert!(copy.status().unwrap().success());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let run = |uid: u32, arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.env_clear().current_dir("/").uid(uid).gid(uid);
        command.arg("--address").arg(&socket).args(arguments);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let refused = Some(10);
    assert_eq!(run(65_533, &["ps"]).0, Some(0));
    assert_eq!(run(65_532, &["crashes", "list"]).0, Some(0));
    let (code, said) = run(65_533, &["crashes", "list"]);
    assert_eq!(code, refused, "{said}");
    assert!(said.contains("role debug"), "{said}");
    assert_eq!(run(65_532, &["unload", "kjv"]).0, refused);
    let (code, said) = run(65_531, &["ps"]);
    assert_eq!(code, refused, "{said}");
    assert!(said.contains("--allow-uid"), "{said}");
}
