//! The library against a scripted scheduler.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use std::time::{Duration, Instant};

use hotcell_client::{
    Address, Client, Event, GenerateOptions, Grammar, Reason, connect::is_unreachable, v1,
};

async fn client(running: &fake::Running) -> Client {
    Client::connect(&running.address).await.unwrap()
}

fn within(ms: u64) -> GenerateOptions {
    GenerateOptions {
        deadline: Some(Duration::from_millis(ms)),
        ..GenerateOptions::default()
    }
}

#[tokio::test]
async fn a_stream_is_accepted_then_deltas_then_finished() {
    let running = fake::start().await;
    let client = client(&running).await;
    let mut stream = client
        .generate("In the beginning", GenerateOptions::default())
        .await
        .unwrap();
    let mut kinds = Vec::new();
    while let Some(event) = stream.next().await {
        kinds.push(match event.unwrap() {
            Event::Accepted(a) => format!("accepted {}", a.request_id),
            Event::Delta(d) => format!("delta {}", d.text),
            Event::Finished(f) => format!("finished {}", f.usage.unwrap().generated_tokens),
        });
    }
    assert_eq!(
        kinds,
        [
            "accepted r-1",
            "delta In ",
            "delta the ",
            "delta beginning",
            "finished 3"
        ]
    );
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_trace_goes_along_and_comes_back() {
    let running = fake::start().await;
    let client = client(&running).await;
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let ask = async |traceparent: &str| {
        let options = GenerateOptions {
            traceparent: traceparent.into(),
            ..GenerateOptions::default()
        };
        client.generate("a", options).await
    };
    assert_eq!(ask(parent).await.unwrap().traceparent(), Some(parent));
    assert_eq!(ask("").await.unwrap().traceparent(), None);
    let odd = ask("00-\n").await.unwrap_err();
    assert_eq!(odd.reason(), Reason::InvalidArgument);
}

#[tokio::test]
async fn a_whole_answer_is_put_together() {
    let running = fake::start().await;
    let stream = client(&running)
        .await
        .generate("a b c", GenerateOptions::default())
        .await
        .unwrap();
    let whole = stream.complete().await.unwrap();
    assert_eq!(whole.text, "a b c");
    assert_eq!(whole.token_ids, [10, 11, 12]);
    assert_eq!(whole.accepted.seed, u64::MAX);
    assert_eq!(whole.finished.reason(), v1::FinishReason::MaxTokens);
}

#[tokio::test]
async fn a_deadline_goes_along_and_is_kept_over_the_whole_stream() {
    let running = fake::start().await;
    let client = client(&running).await;
    let start = Instant::now();
    let mut stream = client.generate("stall", within(300)).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Event::Accepted(_)))));
    assert!(matches!(stream.next().await, Some(Ok(Event::Delta(_)))));
    let error = stream.next().await.unwrap().unwrap_err();
    assert_eq!(error.reason(), Reason::DeadlineExceeded, "{error}");
    assert!(start.elapsed() >= Duration::from_millis(290));
    assert!(stream.next().await.is_none());
    assert!(running.cancelled(1).await, "the server must learn of it");
    assert!(running.fake.seen.lock().unwrap().timeouts[0].is_some());
}

#[tokio::test]
async fn a_deadline_is_kept_before_the_first_event_too() {
    let running = fake::start().await;
    let error = client(&running)
        .await
        .generate("mute", within(200))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::DeadlineExceeded, "{error}");
    assert_eq!(error.get("deadline_ms"), Some("200"));
}

#[tokio::test]
async fn dropping_a_stream_cancels_it_at_the_server() {
    let running = fake::start().await;
    let client = client(&running).await;
    let mut stream = client
        .generate("stall", GenerateOptions::default())
        .await
        .unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Event::Accepted(_)))));
    drop(stream);
    assert!(running.cancelled(1).await);
    // The connection lives on.
    assert_eq!(
        client.detokenize("", vec![104, 105], false).await.unwrap(),
        "hi"
    );
}

#[tokio::test]
async fn reasons_cross_the_wire() {
    let running = fake::start().await;
    let client = client(&running).await;
    for &reason in Reason::ALL {
        let prompt = format!("refuse {}", reason.name());
        let error = client
            .generate(prompt, GenerateOptions::default())
            .await
            .unwrap_err();
        assert_eq!(error.reason(), reason);
        assert!(!is_unreachable(&error));
    }
    let error = client.unload("missing").await.unwrap_err();
    assert_eq!(
        (error.reason(), error.get("model")),
        (Reason::ModelNotFound, Some("missing"))
    );
}

#[tokio::test]
async fn a_lost_worker_ends_the_stream_with_its_reason() {
    let running = fake::start().await;
    let stream = client(&running)
        .await
        .generate("die", GenerateOptions::default())
        .await
        .unwrap();
    let error = stream.complete().await.unwrap_err();
    assert_eq!(error.reason(), Reason::WorkerLost);
    assert_eq!(error.message(), "the worker cpu:0 died");
}

#[tokio::test]
async fn a_stream_out_of_order_or_cut_short_is_a_violation() {
    let running = fake::start().await;
    let client = client(&running).await;
    for prompt in ["unordered", "torn"] {
        let stream = client
            .generate(prompt, GenerateOptions::default())
            .await
            .unwrap();
        let error = stream.complete().await.unwrap_err();
        assert_eq!(
            error.reason(),
            Reason::ProtocolViolation,
            "{prompt}: {error}"
        );
    }
}

#[tokio::test]
async fn all_options_reach_the_server() {
    let running = fake::start().await;
    let options = GenerateOptions {
        model: "kjv".to_owned(),
        sampling: v1::Sampling {
            temperature: Some(0.5),
            ..v1::Sampling::default()
        },
        max_tokens: 7,
        stop: vec![".".to_owned()],
        stop_tokens: vec![3],
        ignore_eos: true,
        seed: Some(9),
        branch: 2,
        logprobs: true,
        top_logprobs: 4,
        request_id: "mine".to_owned(),
        resume: Some(v1::Resume {
            generated_ids: vec![1],
            text_bytes_emitted: 1,
        }),
        reattach: None,
        continue_across: true,
        tenant: "us".to_owned(),
        priority: 3,
        no_speculation: true,
        grammar: Some(Grammar::Regex("a+".to_owned())),
        parse_output: true,
        deadline: None,
        // Told by another test: it is no part of the message.
        traceparent: String::new(),
    };
    let stream = client(&running)
        .await
        .generate("x", options.clone())
        .await
        .unwrap();
    stream.complete().await.unwrap();
    let seen = running.fake.seen.lock().unwrap();
    let request = &seen.requests[0];
    assert_eq!(request.sampling, Some(options.sampling));
    assert_eq!(
        (request.max_tokens, request.seed, request.branch),
        (7, Some(9), 2)
    );
    assert_eq!(
        (request.ignore_eos, request.logprobs, request.top_logprobs),
        (true, true, 4)
    );
    assert_eq!(
        (&request.stop, &request.stop_tokens),
        (&options.stop, &options.stop_tokens)
    );
    assert_eq!(
        (&*request.request_id, &request.resume),
        ("mine", &options.resume)
    );
    assert!(request.continue_across && request.no_speculation && request.parse_output);
    assert_eq!((&*request.tenant, request.priority), ("us", 3));
    let grammar = request.grammar.clone().and_then(|g| g.kind);
    assert_eq!(grammar, options.grammar);
    assert_eq!(seen.timeouts, [None]);
}

#[tokio::test]
async fn models_are_loaded_with_progress() {
    let running = fake::start().await;
    let client = client(&running).await;
    let info = client.load("mine", "/models/mine").await.unwrap();
    assert_eq!(info.name, "mine");
    let mut progress = client.load_progress("mine", "").await.unwrap();
    let first = progress.next().await.unwrap().unwrap();
    assert_eq!((first.bytes_done, first.done), (1 << 20, false));
}

#[tokio::test]
async fn nobody_listening_is_one_sentence_with_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.sock");
    let missing = Client::connect(&Address::Unix(path.clone()))
        .await
        .unwrap_err();
    assert!(is_unreachable(&missing));
    assert!(
        missing
            .message()
            .starts_with("no scheduler listens on unix:"),
        "{missing}"
    );
    assert!(
        missing
            .message()
            .ends_with(&format!("`hotcell serve --socket {}`", path.display())),
        "{missing}"
    );

    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let stale = Client::connect(&Address::Unix(path)).await.unwrap_err();
    assert!(is_unreachable(&stale));
    assert!(
        stale.message().contains("left its socket behind"),
        "{stale}"
    );

    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let refused = Client::connect(&port.to_string().parse().unwrap())
        .await
        .unwrap_err();
    assert!(is_unreachable(&refused));
    assert!(
        refused.message().contains(&format!("--listen {port}")),
        "{refused}"
    );
}

#[tokio::test]
async fn a_socketpair_carries_calls_and_its_end_is_told() {
    let (ours, theirs) = hotcell_ipc::socket::stream_pair().unwrap();
    let (incoming, _end) = hotcell_ipc::transport::incoming_once(theirs);
    let service = v1::tokens_server::TokensServer::new(fake::Fake::default());
    // A runtime of its own, so that the other side can go as a process goes: all at once.
    let other = tokio::runtime::Runtime::new().unwrap();
    other.spawn(async move {
        let server = tonic::transport::Server::builder().add_service(service);
        server.serve_with_incoming(incoming).await
    });
    let client = Client::over(ours).await.unwrap();
    assert_eq!(client.detokenize("", vec![104], false).await.unwrap(), "h");
    let mut stream = client
        .generate("stall", GenerateOptions::default())
        .await
        .unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    assert!(stream.next().await.unwrap().is_ok());
    other.shutdown_background();
    let error = stream.next().await.unwrap().unwrap_err();
    assert!(is_unreachable(&error), "{error:?}");
    let again = client.detokenize("", vec![104], false).await;
    assert!(is_unreachable(&again.unwrap_err()));
}

#[tokio::test]
async fn streams_that_nobody_reads_do_not_end_the_connection() {
    let running = fake::start().await;
    let client = client(&running).await;
    let mut unread = Vec::new();
    for _ in 0..16 {
        let stream = client.generate("flood", GenerateOptions::default()).await;
        unread.push(stream.unwrap());
    }
    // Until they stand still: much of it is on this side now.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let read = client.generate("a b", GenerateOptions::default()).await;
    assert_eq!(read.unwrap().complete().await.unwrap().text, "a b");
    let late = unread.remove(0).complete().await.unwrap();
    assert_eq!(late.token_ids.len(), fake::FLOOD as usize);
}
