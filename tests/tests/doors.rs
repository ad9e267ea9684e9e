//! What a stranger's tools see: health, reflection and typed errors over plain gRPC on TCP.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::BTreeSet;

use hotcell_client::{Reason, v1};
use hotcell_tests::cluster::{Cluster, all_have, kjv};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

async fn over_tcp() -> (Cluster, Channel) {
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let cluster = Cluster::with_model("kjv", &kjv(), &["--listen", &free.to_string()])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let channel = Channel::from_shared(format!("http://{free}"))
        .unwrap()
        .connect()
        .await
        .unwrap();
    (cluster, channel)
}

#[tokio::test]
async fn health_says_serving_and_reflection_names_the_services() {
    let (_cluster, channel) = over_tcp().await;
    let mut health = HealthClient::new(channel.clone());
    for service in ["", "hotcell.v1.Tokens", "hotcell.v1.Control"] {
        let request = HealthCheckRequest {
            service: service.to_owned(),
        };
        let status = health.check(request).await.unwrap().into_inner().status();
        assert_eq!(status, ServingStatus::Serving, "{service}");
    }
    let unknown = HealthCheckRequest {
        service: "nobody".to_owned(),
    };
    assert_eq!(
        health.check(unknown).await.unwrap_err().code(),
        Code::NotFound
    );

    let mut reflection = ServerReflectionClient::new(channel);
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = reflection
        .server_reflection_info(tokio_stream::once(ask))
        .await
        .unwrap()
        .into_inner();
    let answer = answers
        .message()
        .await
        .unwrap()
        .unwrap()
        .message_response
        .unwrap();
    let MessageResponse::ListServicesResponse(list) = answer else {
        panic!("{answer:?}")
    };
    let names: BTreeSet<String> = list.service.into_iter().map(|s| s.name).collect();
    for service in ["hotcell.v1.Tokens", "hotcell.v1.Control"] {
        assert!(names.contains(service), "{names:?}");
    }
}

#[tokio::test]
async fn a_plain_grpc_client_gets_tokens_and_typed_errors() {
    let (_cluster, channel) = over_tcp().await;
    let mut tokens = v1::tokens_client::TokensClient::new(channel);
    let request = |model: &str| v1::GenerateRequest {
        model: model.to_owned(),
        prompt: Some(v1::Prompt {
            kind: Some(v1::prompt::Kind::Text("And God said".to_owned())),
        }),
        max_tokens: 5,
        ..v1::GenerateRequest::default()
    };
    let mut stream = tokens.generate(request("kjv")).await.unwrap().into_inner();
    let mut events = Vec::new();
    while let Some(event) = stream.message().await.unwrap() {
        events.push(event.event.unwrap());
    }
    use v1::generate_event::Event;
    assert!(matches!(events.first(), Some(Event::Accepted(_))));
    assert!(matches!(events.last(), Some(Event::Finished(_))));

    let status = match tokens.generate(request("nobody")).await {
        Ok(stream) => stream.into_inner().message().await.unwrap_err(),
        Err(status) => status,
    };
    assert_eq!(status.code(), Code::NotFound);
    let error = hotcell_client::Error::from_status(&status);
    assert_eq!(
        (error.reason(), error.get("model")),
        (Reason::ModelNotFound, Some("nobody"))
    );

    let mut slow = tonic::Request::new(v1::GenerateRequest {
        max_tokens: 1000,
        ignore_eos: true,
        ..request("kjv")
    });
    slow.set_timeout(std::time::Duration::from_millis(60));
    let ended = async {
        let mut stream = tokens.generate(slow).await?.into_inner();
        while stream.message().await?.is_some() {}
        Ok::<(), tonic::Status>(())
    };
    let code = ended.await.unwrap_err().code();
    assert!(
        matches!(code, Code::DeadlineExceeded | Code::Cancelled),
        "{code:?}"
    );
}
