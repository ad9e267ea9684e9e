//! The worker's engine in this process: no scheduler, no other process, no gRPC.

use anyhow::{Context, Result};
use hotcell_graph::DType;
use hotcell_kernels::registry::Registry;
use hotcell_proto::v1::{
    GenerateRequest, Prompt, TokenIds, generate_event, prompt, tokens_server::Tokens,
};
use hotcell_worker::{
    engine::{Engine, EngineConfig},
    host::Host,
    service::TokensService,
};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;

use crate::{
    models::Model,
    served::{NAME, Times},
};

/// An engine with one model.
pub struct Direct(TokensService);

impl Direct {
    /// Loads a model.
    pub async fn load(model: &Model) -> Result<Self> {
        let engine = Engine::start(EngineConfig {
            device: "cpu:0".to_owned(),
            cores: vec![],
            cache_dtype: DType::F16,
            model_memory: None,
            tensor_memory: None,
            blackbox: None,
            registry: Registry::default(),
        })?;
        let host = Host::new(engine, String::new());
        let files = hotcell_tests::model::files(model.path())?;
        host.load(NAME.to_owned(), files, mpsc::channel(1).0)
            .await
            .context("loading in this process")?;
        Ok(Self(TokensService(host)))
    }

    /// Reads a stream of so many tokens, each drawn by itself, the likeliest one.
    pub async fn stream(&self, prompt: Vec<u32>, tokens: usize) -> Result<Times> {
        let request = GenerateRequest {
            prompt: Some(Prompt {
                kind: Some(prompt::Kind::Ids(TokenIds { ids: prompt })),
            }),
            max_tokens: tokens as u32,
            ignore_eos: true,
            no_speculation: true,
            ..GenerateRequest::default()
        };
        let mut times = Times::now();
        let stream = self.0.generate(tonic::Request::new(request)).await?;
        let mut stream = stream.into_inner();
        while let Some(event) = stream.next().await {
            if let Some(generate_event::Event::Delta(delta)) = event?.event {
                times.arrived(delta.token_ids.len());
            }
        }
        Ok(times)
    }
}
