//! What a collector of traces hears of requests, and what it costs them if it does not listen.

use std::{fmt::Write, net::SocketAddr};

use axum::body::Body;
use hotcell_scheduler::{
    gateway::{self, Protocol},
    traces::{self, ATTRIBUTES, Collector, EVENTS, SPANS},
};
use opentelemetry_proto::tonic::{
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{Span, span::SpanKind},
};
use tower::ServiceExt;

use super::{
    collector::{Heard, hex},
    *,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn parent(flags: &str) -> String {
    format!("00-{TRACE}-{PARENT}-{flags}")
}

fn to(address: SocketAddr) -> Option<Collector> {
    Some(Collector {
        endpoint: format!("http://{address}").parse().unwrap(),
        ca: None,
        sample: 1.0,
    })
}

/// A house with a collector.
async fn traced(workers: usize) -> (House, Heard) {
    let heard = Heard::default();
    let address = heard.listen().await;
    let house = House::with(workers, |_, config| config.traces = to(address)).await;
    house.ready(workers).await;
    (house, heard)
}

/// All that the collector was told so far, each held against the tables.
async fn told(house: &House, heard: &Heard) -> Vec<Span> {
    house.shared.traces.flush(Duration::from_secs(10)).await;
    let spans = std::mem::take(&mut *heard.spans());
    for span in &spans {
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
        let row = SPANS.iter().find(|row| row.name == span.name);
        let row = row.unwrap_or(&traces::REQUEST);
        check(&span.attributes, row.attributes);
        for event in &span.events {
            let row = EVENTS.iter().find(|row| row.name == event.name);
            check(&event.attributes, row.unwrap().attributes);
        }
    }
    spans
}

fn check(told: &[KeyValue], table: &[traces::Attribute]) {
    let mut names: Vec<_> = told.iter().map(|a| a.key.as_str()).collect();
    for name in &names {
        assert!(table.iter().any(|row| row.name == *name), "{name}");
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), told.len(), "twice in {told:?}");
}

fn value(attributes: &[KeyValue], name: &str) -> Option<Value> {
    let found = attributes.iter().find(|a| a.key == name)?;
    found.value.clone()?.value
}

fn text(attributes: &[KeyValue], name: &str) -> String {
    match value(attributes, name) {
        Some(Value::StringValue(text)) => text,
        Some(Value::ArrayValue(all)) => format!("{:?}", all.values[0].value),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        other => panic!("{name} is {other:?}"),
    }
}

/// Names of the spans within this one, by when they began.
fn within<'a>(spans: &'a [Span], of: &Span) -> Vec<&'a Span> {
    let mut all: Vec<_> = spans
        .iter()
        .filter(|span| span.parent_span_id == of.span_id)
        .collect();
    all.sort_by_key(|span| span.start_time_unix_nano);
    all
}

fn names<'a>(spans: &[&'a Span]) -> Vec<&'a str> {
    spans.iter().map(|span| span.name.as_str()).collect()
}

fn the<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let mut all = spans.iter().filter(|span| span.name == name);
    let one = all
        .next()
        .unwrap_or_else(|| panic!("no {name} in {spans:?}"));
    assert!(all.next().is_none(), "{name} twice");
    one
}

fn with_parent<T>(message: T, parent: &str) -> Request<T> {
    let mut request = Request::new(message);
    let metadata = request.metadata_mut();
    metadata.insert("traceparent", parent.parse().unwrap());
    metadata.insert("tracestate", "vendor=1".parse().unwrap());
    request
}

/// Runs a request to its end; the `traceparent` of the answer.
async fn run(house: &House, request: Request<GenerateRequest>) -> Option<String> {
    let answer = house.tokens().generate(request).await.unwrap();
    let place = answer.metadata().get("traceparent").cloned();
    let mut stream = answer.into_inner();
    while stream.message().await.unwrap().is_some() {}
    place.map(|place| place.to_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_told_as_spans_of_its_clients_trace() {
    let (house, heard) = traced(1).await;
    let asked = GenerateRequest {
        request_id: "mine".into(),
        sampling: Some(v1::Sampling {
            temperature: Some(0.8),
            ..v1::Sampling::default()
        }),
        ..request(8)
    };
    let place = run(&house, with_parent(asked, &parent("01")))
        .await
        .unwrap();
    let spans = told(&house, &heard).await;
    for span in &spans {
        assert_eq!(hex(&span.trace_id), TRACE);
        assert_eq!(span.trace_state, "vendor=1");
    }
    let server = the(&spans, "text_completion m");
    assert_eq!(server.kind(), SpanKind::Server);
    assert_eq!(hex(&server.parent_span_id), PARENT);
    assert_eq!(place, format!("00-{TRACE}-{}-01", hex(&server.span_id)));
    let of = |name: &str| text(&server.attributes, name);
    assert_eq!(of("gen_ai.operation.name"), "text_completion");
    assert_eq!(of("gen_ai.provider.name"), "hotcell");
    assert_eq!(of("gen_ai.response.model"), "m");
    assert_eq!(of("gen_ai.request.temperature"), "0.8");
    assert_eq!(of("gen_ai.request.max_tokens"), "8");
    assert_eq!(of("gen_ai.request.seed"), "5");
    assert_eq!(of("gen_ai.usage.input_tokens"), "3");
    assert_eq!(of("gen_ai.usage.output_tokens"), "8");
    assert!(of("gen_ai.response.finish_reasons").contains("length"));
    assert_eq!(of("hotcell.request_id"), "mine");
    assert_eq!(of("hotcell.deaths_survived"), "0");
    assert_eq!(of("hotcell.numerics"), "fake/r1");
    assert_eq!(value(&server.attributes, "gen_ai.request.model"), None);
    assert_eq!(server.events.len(), 1);
    assert_eq!(server.events[0].name, "first_token");
    let parts = within(&spans, server);
    assert_eq!(names(&parts), ["admission", "placement", "worker"]);
    let worker = parts[2];
    assert_eq!(worker.kind(), SpanKind::Client);
    assert_eq!(text(&worker.attributes, "hotcell.worker"), "w0");
    assert_eq!(text(&worker.attributes, "hotcell.tokens"), "8");
    let parents = house.stage.parents.lock().unwrap().clone();
    assert_eq!(parents, [format!("00-{TRACE}-{}-01", hex(&worker.span_id))]);
    // As the worker says, and no longer than it can have been.
    let times = within(&spans, worker);
    assert_eq!(names(&times), ["queue", "prefill", "decode"]);
    assert!(times[2].end_time_unix_nano <= worker.end_time_unix_nano);
    assert_eq!(spans.len(), 7);
    assert_eq!(house.shared.traces.sent(), 7);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_is_seen_as_an_event_and_another_worker() {
    let (house, heard) = traced(2).await;
    house.stage.act(Act::DieAt(3, Duration::from_millis(5)));
    run(&house, Request::new(request(8))).await;
    let spans = told(&house, &heard).await;
    let server = the(&spans, "text_completion m");
    assert!(server.parent_span_id.is_empty());
    assert_eq!(text(&server.attributes, "hotcell.deaths_survived"), "1");
    assert!(server.status.is_none());
    let parts = within(&spans, server);
    let order = ["admission", "placement", "worker", "placement", "worker"];
    assert_eq!(names(&parts), order);
    let (died, next) = (parts[2], parts[4]);
    assert_eq!(text(&died.attributes, "error.type"), "signal");
    assert_eq!(text(&died.attributes, "hotcell.tokens"), "3");
    assert_eq!(value(&next.attributes, "error.type"), None);
    assert_eq!(text(&next.attributes, "hotcell.tokens"), "5");
    assert_eq!(within(&spans, died).len(), 0);
    assert_eq!(within(&spans, next).len(), 3);
    let events: Vec<_> = server.events.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(events, ["first_token", "worker_died"]);
    let event = &server.events[1].attributes;
    let worker = text(&died.attributes, "hotcell.worker");
    assert_eq!(text(event, "hotcell.worker"), worker);
    assert_eq!(text(event, "error.type"), "signal");
    // The report of the death leads here.
    let report = house.fleet.crashes.get(&format!("{worker}.1")).unwrap();
    assert_eq!(report.requests[0].trace_id, hex(&server.trace_id));
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_record_its_trace_is_not_told_of() {
    let (house, heard) = traced(1).await;
    let place = run(&house, with_parent(request(4), &parent("00"))).await;
    let place = place.unwrap();
    assert!(place.starts_with(&format!("00-{TRACE}-")) && place.ends_with("-00"));
    assert!(!place.contains(PARENT));
    assert_eq!(*house.stage.parents.lock().unwrap(), [place]);
    // Whoever says it wrongly is as good as who says nothing.
    run(&house, with_parent(request(4), "00-1-2-3")).await;
    let spans = told(&house, &heard).await;
    let server = the(&spans, "text_completion m");
    assert_ne!(hex(&server.trace_id), TRACE);
    assert!(server.parent_span_id.is_empty() && server.trace_state.is_empty());
    assert_eq!(house.shared.traces.dropped(), 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_comes_again_is_the_one_it_was() {
    let (house, heard) = traced(1).await;
    let asked = GenerateRequest {
        request_id: "mine".into(),
        ..request(4)
    };
    assert!(run(&house, Request::new(asked.clone())).await.is_some());
    assert_eq!(run(&house, Request::new(asked)).await, None);
    let spans = told(&house, &heard).await;
    let server = the(&spans, "text_completion m");
    let admissions = spans.iter().filter(|span| span.name == "admission");
    let parents: Vec<_> = admissions.map(|span| &span.parent_span_id).collect();
    assert_eq!(parents, [&server.span_id]);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_for_text_and_vectors_are_spans_as_well() {
    let (house, heard) = traced(2).await;
    let prompt = |text: &str| Prompt {
        kind: Some(Kind::Text(text.into())),
    };
    let ask = v1::TokenizeRequest {
        prompt: Some(prompt("die")),
        ..v1::TokenizeRequest::default()
    };
    // The first worker that reads it dies.
    house.stage.act(Act::DieAtOnce);
    let ask = with_parent(ask, &parent("01"));
    let answer = house.tokens().tokenize(ask).await.unwrap();
    let place = answer.metadata().get("traceparent").unwrap();
    let place = place.to_str().unwrap().to_owned();
    let ask = v1::DetokenizeRequest {
        ids: vec![7],
        ..v1::DetokenizeRequest::default()
    };
    house.tokens().detokenize(ask).await.unwrap();
    // Which no fake can.
    let ask = v1::EmbedRequest {
        prompts: vec![prompt("a")],
        ..v1::EmbedRequest::default()
    };
    house.tokens().embed(ask).await.unwrap_err();
    let spans = told(&house, &heard).await;
    let server = the(&spans, "tokenize m");
    assert_eq!(place, format!("00-{TRACE}-{}-01", hex(&server.span_id)));
    let parts = within(&spans, server);
    let order = ["placement", "worker", "placement", "worker"];
    assert_eq!(names(&parts), order);
    assert_eq!(text(&parts[1].attributes, "error.type"), "signal");
    assert_eq!(server.events[0].name, "worker_died");
    assert!(server.status.is_none());
    let parts = within(&spans, the(&spans, "detokenize m"));
    assert_eq!(names(&parts), ["placement", "worker"]);
    let failed = the(&spans, "embeddings m");
    assert_eq!(failed.kind(), SpanKind::Server);
    assert_eq!(
        text(&failed.attributes, "error.type"),
        Reason::ProtocolViolation.name()
    );
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_refused_says_why() {
    let (house, heard) = traced(1).await;
    let unknown = GenerateRequest {
        model: "x".repeat(1 << 20),
        ..request(4)
    };
    house.generate(unknown).await.unwrap_err();
    house.stage.act(Act::Refuse(Reason::PromptTooLong));
    house.generate(request(4)).await.unwrap_err();
    let spans = told(&house, &heard).await;
    // A name that means nothing is no span's name, and told in short.
    let unknown = the(&spans, "text_completion");
    assert!(text(&unknown.attributes, "gen_ai.request.model").len() <= limits::MAX_WORD);
    assert_eq!(names(&within(&spans, unknown)), ["admission"]);
    let refused = the(&spans, "text_completion m");
    let why = Reason::PromptTooLong.name();
    assert_eq!(text(&refused.attributes, "error.type"), why);
    assert_eq!(refused.status.as_ref().unwrap().code, 2);
    assert_eq!(text(&the(&spans, "worker").attributes, "error.type"), why);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_its_spans() {
    let (house, heard) = traced(1).await;
    house.stage.act(Act::Stall);
    let stream = house.tokens().generate(request(4)).await.unwrap();
    drop(stream);
    until(|| house.shared.admission.count() == 0).await;
    until(|| house.shared.streams.count() == 0).await;
    let spans = told(&house, &heard).await;
    let server = the(&spans, "text_completion m");
    let why = Reason::Cancelled.name();
    assert_eq!(text(&server.attributes, "error.type"), why);
    let parts = within(&spans, server);
    assert_eq!(names(&parts), ["admission", "placement", "worker"]);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_http_the_answer_names_its_place_in_the_trace() {
    let (house, heard) = traced(1).await;
    let protocols = [Protocol::Openai, Protocol::Metrics];
    let router = gateway::router(&house.shared, &protocols, house.routes.clone(), &[]);
    let post = |path: &str, body: &str| {
        let request = http::Request::post(path)
            .header("content-type", "application/json")
            .header("traceparent", parent("01"))
            .body(Body::from(body.to_owned()))
            .unwrap();
        router.clone().oneshot(request)
    };
    let body = r#"{"model":"m","prompt":"secret","max_tokens":2,"n":2}"#;
    let answer = post("/v1/completions", body).await.unwrap();
    assert_eq!(answer.status(), 200);
    let place = answer.headers()["traceparent"].to_str().unwrap().to_owned();
    drop(
        http_body_util::BodyExt::collect(answer.into_body())
            .await
            .unwrap(),
    );
    let spans = told(&house, &heard).await;
    // Two continuations: the second is a child of the first.
    let both: Vec<_> = spans
        .iter()
        .filter(|s| s.name == "text_completion m")
        .collect();
    assert_eq!(both.len(), 2);
    let server = both.iter().find(|s| s.kind() == SpanKind::Server).unwrap();
    let second = both
        .iter()
        .find(|s| s.kind() == SpanKind::Internal)
        .unwrap();
    assert_eq!(hex(&server.parent_span_id), PARENT);
    assert_eq!(second.parent_span_id, server.span_id);
    assert_eq!(text(&second.attributes, "hotcell.branch"), "1");
    assert_eq!(place, format!("00-{TRACE}-{}-01", hex(&server.span_id)));
    assert_eq!(text(&server.attributes, "gen_ai.request.model"), "m");
    let parts = names(&within(&spans, second));
    assert_eq!(parts, ["admission", "tokenize", "placement", "worker"]);
    let written = format!("{spans:?}");
    assert!(
        !written.contains("secret") && !written.contains("---"),
        "{written}"
    );
    // What asks no model is no span of ours.
    let list = http::Request::get("/metrics").body(Body::empty()).unwrap();
    let answer = router.clone().oneshot(list).await.unwrap();
    assert!(!answer.headers().contains_key("traceparent"));
    let metrics = http_body_util::BodyExt::collect(answer.into_body()).await;
    let metrics = metrics.unwrap().to_bytes();
    let metrics = String::from_utf8_lossy(&metrics);
    let sent = format!("\nhotcell_spans_sent_total {}\n", spans.len());
    assert!(metrics.contains(&sent), "{metrics}");
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_costs_spans_and_nothing_else() {
    // Nobody listens there any more.
    let gone = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let house = House::with(1, |_, config| config.traces = to(gone)).await;
    house.ready(1).await;
    for _ in 0..3 {
        let said = house.generate(request(8)).await.unwrap();
        said.check(&[1, 2, 3], 5, 8, 0);
    }
    let traces = &house.shared.traces;
    until(|| traces.dropped() >= 3 * 6).await;
    assert_eq!(traces.sent(), 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_never_answers_holds_up_nobody_and_no_more_than_so_many_spans() {
    // Takes connections, and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let house = House::with(1, |_, config| config.traces = to(address)).await;
    house.ready(1).await;
    let traces = &house.shared.traces;
    for _ in 0..2 * limits::MAX_SPANS {
        drop(traces.arrive(&http::HeaderMap::new()).begin());
    }
    assert!(traces.dropped() >= limits::MAX_SPANS as u64);
    let said = house.generate(request(8)).await.unwrap();
    said.check(&[1, 2, 3], 5, 8, 0);
    // Returns although nothing is sent.
    traces.flush(Duration::from_millis(20)).await;
    assert_eq!(traces.sent(), 0);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_collector_a_clients_trace_is_passed_on() {
    let house = House::new(1).await;
    house.ready(1).await;
    house.stage.act(Act::DieAt(1, Duration::from_millis(5)));
    let place = run(&house, with_parent(request(4), &parent("01"))).await;
    assert_eq!(place, None);
    let parents = house.stage.parents.lock().unwrap().clone();
    assert_eq!(parents, [parent("01"), parent("01")]);
    let report = house.fleet.crashes.get("w0.1").unwrap();
    assert_eq!(report.requests[0].trace_id, TRACE);
    house.end().await;
}

const HEAD: &str = "# Traces

Generated from the tables of the scheduler's traces by `HOTCELL_UPDATE=1 cargo test -p hotcell-scheduler --test relay the_page`; do
not edit.

`hotcell-scheduler --otlp-endpoint http://127.0.0.1:4317` sends the spans of each request to a collector of OpenTelemetry (OTLP over
gRPC), in the trace that the client's `traceparent` names, or in a new one; a client that does not record its trace is not told of
here either, and of traces that begin here `--otlp-sample` are recorded. The answer's `traceparent` is the request's span, and the
call to the worker carries that of its `worker` span. No prompt and no answer is among it. Spans that the collector does not take
are dropped and counted (`hotcell_spans_dropped_total`).

";

fn page() -> String {
    let mut page = HEAD.to_owned();
    let names = |attributes: &[traces::Attribute]| {
        let names: Vec<_> = attributes.iter().map(|a| format!("`{}`", a.name)).collect();
        match names.is_empty() {
            true => "-".to_owned(),
            false => names.join(", "),
        }
    };
    page.push_str("| span | kind | meaning | attributes |\n|---|---|---|---|\n");
    for row in SPANS {
        let (name, kind, told) = (row.name, row.kind.name(), names(row.attributes));
        writeln!(page, "| `{name}` | {kind} | {} | {told} |", row.help).unwrap();
    }
    page.push_str("\n| event | meaning | attributes |\n|---|---|---|\n");
    for row in EVENTS {
        let (name, told) = (row.name, names(row.attributes));
        writeln!(page, "| `{name}` | {} | {told} |", row.help).unwrap();
    }
    page.push_str("\n| attribute | meaning |\n|---|---|\n");
    for row in ATTRIBUTES {
        writeln!(page, "| `{}` | {} |", row.name, row.help).unwrap();
    }
    page
}

#[test]
fn the_page_of_traces_is_what_the_tables_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/TRACES.md");
    let text = page();
    if std::env::var_os("HOTCELL_UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == text,
        "deploy/TRACES.md is not what the tables say; run with HOTCELL_UPDATE=1"
    );
}
