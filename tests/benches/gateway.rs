//! What the doors for others' protocols cost over Hotcell's own, and how many streams the scheduler bears.
//!
//! `cargo bench -p hotcell-tests --bench gateway -- [sections…] [--quick]`; the sections are `latency`, `streams`, `oip`
//! and `rps`, all when none is named. `--quick` runs each of them few times: it shows that they work, and no figure of it means
//! anything. With `HOTCELL_LLAMA_SERVER=path/to/llama-server` llama.cpp's server answers the same short requests with the
//! bundled model as `rps` asks of Hotcell.
//!
//! All clients are on this host and come over TCP, those of Hotcell's own protocol as well.

#[path = "gateway/doors.rs"]
mod doors;
#[path = "gateway/http.rs"]
mod http;
#[path = "gateway/latency.rs"]
mod latency;
#[path = "gateway/llama.rs"]
mod llama;
#[path = "gateway/oip.rs"]
mod oip;
#[path = "gateway/rps.rs"]
mod rps;
#[path = "gateway/streams.rs"]
mod streams;

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use hotcell_tests::{
    bench::{self, Goal},
    cluster::{Cluster, all_have, free_address, kjv},
};

const SECTIONS: [&str; 4] = ["latency", "streams", "oip", "rps"];

/// What all sections share.
struct Bench {
    quick: bool,
}

impl Bench {
    fn figure(&self, name: &str, value: f64, unit: &str, goal: Goal) {
        match self.quick {
            true => bench::figure(&format!("quick_{name}"), value, unit, Goal::None),
            false => bench::figure(name, value, unit, goal),
        }
    }
}

/// The bundled model behind all doors.
struct House {
    _cluster: Cluster,
    grpc: SocketAddr,
    http: SocketAddr,
}

impl House {
    async fn start() -> Result<Self> {
        let (grpc, http) = (free_address()?, free_address()?);
        let doors = [grpc.to_string(), http.to_string()];
        let [listen, serve] = &doors;
        // Idle workers are not examined meanwhile.
        let flags = ["--listen", listen, "--http", serve, "--check-interval", "0"];
        let cluster = Cluster::with_model("kjv", &kjv(), &flags).await?;
        cluster.workers(all_have("kjv")).await?;
        Ok(Self {
            _cluster: cluster,
            grpc,
            http,
        })
    }
}

async fn run(bench: &Bench, sections: &[String]) -> Result<()> {
    let wanted = |section: &str| sections.is_empty() || sections.iter().any(|s| s == section);
    if wanted("latency") {
        latency::run(bench).await?;
    }
    if wanted("streams") {
        streams::run(bench).await?;
    }
    if wanted("oip") {
        oip::run(bench).await?;
    }
    if wanted("rps") {
        rps::run(bench).await?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test` runs benches with --test; there is nothing to check here.
    if arguments.iter().any(|a| a == "--test") {
        return Ok(());
    }
    let (flags, sections): (Vec<_>, Vec<_>) =
        arguments.into_iter().partition(|a| a.starts_with('-'));
    for section in &sections {
        let known = SECTIONS.contains(&section.as_str());
        ensure!(known, "{section:?} is none of {}", SECTIONS.join(", "));
    }
    let bench = Bench {
        quick: flags.iter().any(|flag| flag == "--quick"),
    };
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(run(&bench, &sections))
}
