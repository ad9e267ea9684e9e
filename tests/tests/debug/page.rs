//! The live page over HTTP: its files and their policy, who is told what, and the events. What a browser makes of them is
//! in `tests/gateways/check_live.py`.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, free_address, kjv, signal_pid},
    fault::Fault,
};
use rustix::process::Signal;
use serde_json::Value;

use super::{comparing::FAULTY, long};

async fn cluster(more: &[&str]) -> (Cluster, SocketAddr) {
    let address = free_address().unwrap();
    let http = address.to_string();
    let arguments = [&["--devices", "cpu:1", "--http", &http], more].concat();
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    (cluster, address)
}

fn ask(to: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)]) -> TcpStream {
    let mut stream = TcpStream::connect(to).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n"
    );
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
    stream
}

/// All of an answer: its status, and its head and body as they come.
fn call(to: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
    let mut all = String::new();
    ask(to, method, path, headers)
        .read_to_string(&mut all)
        .unwrap();
    let status = all.split(' ').nth(1).unwrap().parse().unwrap();
    (status, all)
}

/// The page's events, as they come.
struct Events(BufReader<TcpStream>);

impl Events {
    fn open(to: SocketAddr, headers: &[(&str, &str)]) -> Self {
        let mut lines = BufReader::new(ask(to, "GET", "/live/events", headers));
        let mut status = String::new();
        lines.read_line(&mut status).unwrap();
        assert!(status.contains(" 200 "), "{status}");
        Self(lines)
    }

    /// The next one of this name that is as wanted.
    fn until(&mut self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        let (mut line, mut event, mut last) = (String::new(), String::new(), Value::Null);
        while begun.elapsed() < SOON {
            line.clear();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "the events ended");
            if let Some(said) = line.trim_end().strip_prefix("event: ") {
                said.clone_into(&mut event);
            }
            if let Some(data) = line.strip_prefix("data: ").filter(|_| event == name) {
                last = serde_json::from_str(data).unwrap();
                if wanted(&last) {
                    return last;
                }
            }
        }
        panic!("no {name} as wanted; the last one: {last}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_tells_of_a_death_and_holds_nothing_from_elsewhere() {
    let (cluster, to) = cluster(&["--worker-binary", FAULTY]).await;
    let (status, page) = call(to, "GET", "/live", &[]);
    assert_eq!(status, 200, "{page}");
    let policy = page
        .lines()
        .find(|line| line.starts_with("content-security-policy: "));
    let policy = policy.unwrap();
    for part in [
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    for path in ["/live", "/live/page.js", "/live/page.css"] {
        let (status, file) = call(to, "GET", path, &[]);
        assert_eq!(status, 200, "{path}");
        assert!(file.contains("x-content-type-options: nosniff"), "{path}");
        // The one address that may stand there is a name, not a place.
        let file = file.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !file.contains("http://") && !file.contains("https://"),
            "{path}"
        );
        assert!(
            !file.contains("innerHTML") && !file.contains("eval("),
            "{path}"
        );
        assert!(
            !file.contains("style=") && !file.contains("onclick"),
            "{path}"
        );
    }
    let mut events = Events::open(to, &[]);
    let first = events.until("state", |state| state["serving"] == true);
    assert_eq!(first["workers"][0]["state"], "ready");
    assert_eq!(first["devices"][0]["id"], "cpu:0");
    let client = cluster.client().await.unwrap();
    let pid = u32::try_from(first["workers"][0]["pid"].as_u64().unwrap()).unwrap();
    // However fast this machine is, the request is there until somebody has looked.
    let slow = tokio::spawn(async move {
        loop {
            Fault::Late.order(pid).unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    let prompt = "The LORD is my shepherd";
    let stream = client.generate(prompt, long("watched")).await.unwrap();
    let stream = tokio::spawn(stream.complete());
    let sample = events.until("sample", |sample| {
        sample["requests"][0]["id"] == "watched" && sample["steps"]["count"] != 0
    });
    slow.abort();
    assert!(slow.await.unwrap_err().is_cancelled());
    // What is asked and answered is nobody's business here.
    assert!(!sample.to_string().contains("shepherd"));
    signal_pid(pid, Signal::KILL).unwrap();
    let died = events.until("event", |event| event["kind"] == "worker_died");
    assert_eq!(died["worker"], "w0");
    let after = events.until("state", |state| {
        state["crashes"][0]["requests"][0]["outcome"]
            .as_str()
            .is_some_and(|o| o.starts_with("continued"))
    });
    assert_eq!(after["crashes"][0]["requests"][0]["id"], "watched");
    stream.await.unwrap().unwrap();
    let done = events.until("state", |state| state["models"][0]["ended"]["length"] == 1);
    assert_eq!(done["models"][0]["generated_tokens"], 400);
    assert_eq!(done["models"][0]["continuations"], 1);
    assert!(!done.to_string().contains("shepherd"));
    let id = after["crashes"][0]["id"].as_str().unwrap();
    let (status, report) = call(to, "GET", &format!("/live/crashes/{id}"), &[]);
    assert!(status == 200 && report.contains("SIGKILL"), "{report}");
    let (status, _) = call(to, "GET", "/live/crashes/w7.1", &[]);
    assert_eq!(status, 404);
    let (status, traced) = call(to, "POST", "/live/trace/w0/200", &[]);
    assert!(status == 200 && traced.contains("\"spans\":["), "{traced}");
    for (path, wanted) in [
        ("/live/trace/w0/60000", 400),
        ("/live/trace/w9/100", 503),
        ("/live/nothing", 404),
    ] {
        let (status, said) = call(to, "POST", path, &[]);
        assert_eq!(status, wanted, "{path}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_for_those_with_the_role_and_for_pages_of_this_host() {
    let files = tempfile::tempdir().unwrap();
    let token = |role: &str| {
        let mut command = hotcell_tests::cluster::hotcell(files.path()).unwrap();
        command.args(["--json", "token", "new", role, "--role", role]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let made: Value = serde_json::from_slice(&output.stdout).unwrap();
        let part = |part: &str| made[part].as_str().unwrap().to_owned();
        (part("token"), part("lines"))
    };
    let (debugger, first) = token("debug");
    let (user, second) = token("use");
    let (loader, third) = token("load");
    let path = files.path().join("tokens.toml");
    std::fs::write(&path, [first, second, third].concat()).unwrap();
    let (_cluster, to) = cluster(&["--tokens", path.to_str().unwrap()]).await;
    // The page itself is no secret: it asks for the token.
    assert_eq!(call(to, "GET", "/live", &[]).0, 200);
    for (method, path) in [
        ("GET", "/live/events"),
        ("GET", "/live/crashes/w0.1"),
        ("POST", "/live/trace/w0/100"),
    ] {
        assert_eq!(call(to, method, path, &[]).0, 401, "{path}");
        for token in [&user, &loader] {
            let key = format!("Bearer {token}");
            let (status, said) = call(to, method, path, &[("authorization", &key)]);
            assert_eq!(status, 403, "{path}: {said}");
        }
    }
    let key = format!("Bearer {debugger}");
    let headers = [("authorization", key.as_str())];
    Events::open(to, &headers).until("state", |state| state["serving"] == true);
    // So many pages look at once and no more; one that is closed makes room.
    let mut open: Vec<Events> = (0..4).map(|_| Events::open(to, &headers)).collect();
    for events in &mut open {
        events.until("state", |_| true);
    }
    assert_eq!(call(to, "GET", "/live/events", &headers).0, 429);
    drop(open);
    let begun = Instant::now();
    loop {
        let mut answer = BufReader::new(ask(to, "GET", "/live/events", &headers));
        let mut status = String::new();
        answer.read_line(&mut status).unwrap();
        if status.contains(" 200 ") {
            break;
        }
        assert!(begun.elapsed() < SOON, "{status}");
        std::thread::sleep(Duration::from_millis(100));
    }

    // Without tokens, whoever sits here may look, and no page from elsewhere.
    let (_cluster, to) = self::cluster(&[]).await;
    let evil = [("origin", "https://evil.example")];
    assert_eq!(call(to, "GET", "/live/events", &evil).0, 403);
    assert_eq!(call(to, "POST", "/live/trace/w0/100", &evil).0, 403);
    let (_cluster, to) = self::cluster(&["--protocols", "openai"]).await;
    assert_eq!(call(to, "GET", "/live", &[]).0, 404);
}
