//! Short answers a second, asked for by several clients at once: over OpenAI's protocol, over Hotcell's own, and of
//! llama.cpp's server with the same model. Over HTTP an answer comes whole; Hotcell's own protocol has streams only, so there
//! it comes token by token.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_proto::v1::{
    self, GenerateRequest, generate_event::Event, prompt::Kind, tokens_client::TokensClient,
};
use hotcell_tests::bench::{Goal, median};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::{Bench, House, http::Connection, llama::Llama};

/// Clients, each of which asks again as soon as it is answered.
pub const CLIENTS: usize = 16;
const TOKENS: u32 = 16;
/// Turns that each takes.
const ROUNDS: usize = 5;

/// A prompt that nobody has seen.
fn prompt(round: usize, client: usize, number: usize) -> String {
    format!("And it came to pass in the year {round} {client} {number}, that")
}

/// Asks for whole answers over OpenAI's protocol, until `end`; how many came.
async fn openai(to: SocketAddr, round: usize, client: usize, end: Instant) -> Result<usize> {
    let mut connection = Connection::new(to).await?;
    let mut answers = 0;
    while Instant::now() < end {
        let body = json!({
            "model": "kjv", "prompt": prompt(round, client, answers), "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": true,
        });
        let kind = connection.post("/v1/completions", &body).await?;
        let answer: Value = serde_json::from_slice(&connection.rest(kind).await?)?;
        let tokens = answer
            .pointer("/usage/completion_tokens")
            .and_then(Value::as_u64);
        ensure!(tokens == Some(TOKENS.into()), "{answer}");
        answers += 1;
    }
    Ok(answers)
}

/// The same over Hotcell's own.
async fn native(to: SocketAddr, round: usize, client: usize, end: Instant) -> Result<usize> {
    let channel = Channel::from_shared(format!("http://{to}"))?;
    let mut tokens = TokensClient::new(channel.tcp_nodelay(true).connect().await?);
    let mut answers = 0;
    while Instant::now() < end {
        let request = GenerateRequest {
            model: "kjv".to_owned(),
            prompt: Some(v1::Prompt {
                kind: Some(Kind::Text(prompt(round, client, answers))),
            }),
            max_tokens: TOKENS,
            ignore_eos: true,
            ..GenerateRequest::default()
        };
        let mut stream = tokens.generate(request).await?.into_inner();
        let mut usage = None;
        while let Some(event) = stream.message().await? {
            if let Some(Event::Finished(finished)) = event.event {
                usage = finished.usage;
            }
        }
        let generated = usage.context("no usage")?.generated_tokens;
        ensure!(generated == TOKENS, "{generated} tokens");
        answers += 1;
    }
    Ok(answers)
}

/// Who is asked.
#[derive(Clone, Copy, Debug)]
enum Of {
    OpenAi(SocketAddr),
    Native(SocketAddr),
}

/// Answers a second.
async fn round(of: Of, round: usize, length: Duration) -> Result<f64> {
    let start = Instant::now();
    let end = start + length;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        match of {
            Of::OpenAi(to) => clients.spawn(openai(to, round, client, end)),
            Of::Native(to) => clients.spawn(native(to, round, client, end)),
        };
    }
    let mut answers = 0;
    for client in clients.join_all().await {
        answers += client?;
    }
    Ok(answers as f64 / start.elapsed().as_secs_f64())
}

pub async fn run(bench: &Bench) -> Result<()> {
    let house = House::start().await?;
    let llama = Llama::from_environment().await?;
    if llama.is_none() {
        println!("llama.cpp's server is left out: HOTCELL_LLAMA_SERVER names none");
    }
    let mut all = vec![
        ("rps_native", Of::Native(house.grpc), Vec::new()),
        ("rps_openai", Of::OpenAi(house.http), Vec::new()),
    ];
    if let Some(llama) = &llama {
        all.push(("rps_llama", Of::OpenAi(llama.address), Vec::new()));
    }
    let (rounds, length) = match bench.quick {
        true => (1, Duration::from_secs(1)),
        false => (ROUNDS, Duration::from_secs(6)),
    };
    // The first round is there to warm up.
    for number in 0..=rounds {
        for (_, of, rates) in &mut all {
            let rate = round(*of, number, length).await?;
            if number > 0 {
                rates.push(rate);
            }
        }
    }
    let mut medians = Vec::new();
    for (name, _, rates) in all {
        let rate = median(rates);
        bench.figure(name, rate, "requests/s", Goal::None);
        medians.push(rate);
    }
    let [native, openai, ..] = medians[..] else {
        anyhow::bail!("two rates");
    };
    let unit = "of native's requests/s";
    bench.figure("rps_openai_of_native", openai / native, unit, Goal::None);
    if let [_, openai, llama] = medians[..] {
        let unit = "of llama.cpp's requests/s";
        bench.figure("rps_openai_of_llama", openai / llama, unit, Goal::None);
    }
    Ok(())
}
