//! The worker's engine in this process: no scheduler, no other process, no gRPC.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use hotcell_graph::DType;
use hotcell_ipc::memory::{Mapping, sealed_memory};
use hotcell_kernels::{cpu::pack::pack, registry::Registry};
use hotcell_proto::v1::{
    GenerateRequest, Prompt, TokenIds, generate_event, prompt, tokens_server::Tokens,
};
use hotcell_worker::{
    engine::{Engine, EngineConfig},
    host::Host,
    packing::is_packable,
    service::TokensService,
    weights::{Weight, Weights},
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
    /// Loads a model, and computes from packed weights as a worker of a scheduler does.
    pub async fn load(model: &Model) -> Result<Self> {
        let engine = Engine::start(EngineConfig {
            device: "cpu:0".to_owned(),
            cores: vec![],
            cache_dtype: DType::F16,
            model_memory: None,
            max_context: None,
            tensor_memory: None,
            blackbox: None,
            follow: false,
            gives_way: false,
            pins: false,
            registry: Registry::default(),
        })?;
        let host = Host::new(engine.clone(), hotcell_worker::confine::Report::default());
        let files = hotcell_tests::model::files(model.path())?;
        let loaded = host
            .load(NAME.to_owned(), files, mpsc::channel(1).0)
            .await
            .context("loading in this process")?;
        let packed = packed(&loaded.weights)?;
        engine.use_packed(NAME.to_owned(), packed).await?;
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

/// All weights that have a packed form, in memory of their own.
fn packed(weights: &Weights) -> Result<BTreeMap<String, Weight>> {
    let mut all = BTreeMap::new();
    for (name, weight) in weights.iter().filter(|(_, weight)| is_packable(weight)) {
        let columns = *weight.shape.last().context("no matrix")?;
        let mut bytes = vec![0; weight.range.len()];
        pack(weight.dtype, columns, weight.bytes(), &mut bytes);
        let packed = Weight {
            mapping: Mapping::of_file(sealed_memory("packed", &bytes)?)?,
            range: 0..bytes.len(),
            ..weight.clone()
        };
        all.insert(name.to_owned(), packed);
    }
    Ok(all)
}
