//! The engine beside what bounds it: memory, the processor's multiplications, and itself without what is measured.
//!
//! `cargo bench -p hotcell-tests --bench engine -- [names…] [--quick]`; all rows when none is named, else those that begin
//! with one of the names. Models are synthetic, written once into the target folder. `--quick` runs every row with a
//! model of 15 million parameters, few times: it shows that they work, and no figure of it means anything.
//! With `LLAMA_BENCH=path/to/llama-bench` llama.cpp runs the same files on as many threads, in turns with the engine.
//!
//! Unless a row says otherwise it runs a scheduler and its worker as they are shipped, and is a client of theirs.
//! Tokens are counted as they reach the client. They are never guessed ahead: random weights repeat themselves.

#[path = "engine/direct.rs"]
mod direct;
#[path = "engine/latency.rs"]
mod latency;
#[path = "engine/limits.rs"]
mod limits;
#[path = "engine/llama.rs"]
mod llama;
#[path = "engine/models.rs"]
mod models;
#[path = "engine/processes.rs"]
mod processes;
#[path = "engine/served.rs"]
mod served;
#[path = "engine/speed.rs"]
mod speed;
#[path = "engine/together.rs"]
mod together;

use anyhow::Result;
use hotcell_tests::bench::{Goal, figure, median};

use self::{limits::Machine, llama::Llama, models::Model, served::Served};

/// A way to store weights, and how near its limits it should come.
#[derive(Clone, Copy, Debug)]
struct Stored {
    name: &'static str,
    quantised: bool,
}

const STORED: [Stored; 5] = [
    Stored {
        name: "q4_0",
        quantised: true,
    },
    Stored {
        name: "q8_0",
        quantised: true,
    },
    Stored {
        name: "q4_k_m",
        quantised: true,
    },
    Stored {
        name: "bf16",
        quantised: false,
    },
    Stored {
        name: "f16",
        quantised: false,
    },
];

/// What all rows share.
struct Bench {
    machine: Machine,
    llama: Option<Llama>,
    quick: bool,
    names: Vec<String>,
}

impl Bench {
    fn wanted(&self, row: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|name| row.starts_with(name))
    }

    /// How often something is measured, of which the median counts.
    fn rounds(&self) -> usize {
        if self.quick { 2 } else { 5 }
    }

    /// The large model, stored so.
    fn model(&self, weights: &str) -> Result<Model> {
        Model::get(if self.quick { "llama-15m" } else { "llama-1b" }, weights)
    }

    fn figure(&self, name: &str, values: Vec<f64>, unit: &str, goal: Goal) {
        let value = median(values);
        match self.quick {
            true => figure(&format!("quick_{name}"), value, unit, Goal::None),
            false => figure(name, value, unit, goal),
        }
    }

    async fn run(&self) -> Result<()> {
        self.limits();
        for stored in STORED {
            let parts = ["decode", "prefill", "batch"];
            let rows = parts.map(|part| format!("{part}_{}", stored.name));
            if !rows.iter().any(|row| self.wanted(row)) {
                continue;
            }
            let model = self.model(stored.name)?;
            let served = Served::start(&model, &[]).await?;
            if self.wanted(&rows[0]) {
                speed::decode(self, &served, &model, stored).await?;
            }
            if self.wanted(&rows[1]) {
                speed::prefill(self, &served, &model, stored).await?;
            }
            if self.wanted(&rows[2]) {
                together::batch(self, &served, stored).await?;
            }
        }
        if self.wanted("small") {
            speed::small(self).await?;
        }
        let rows = ["arrivals", "prefix", "stall", "structured"];
        if rows.iter().any(|row| self.wanted(row)) {
            let served = Served::start(&self.model("q4_0")?, &[]).await?;
            if self.wanted("arrivals") {
                together::arrivals(self, &served).await?;
            }
            if self.wanted("prefix") {
                latency::prefix(self, &served).await?;
            }
            if self.wanted("stall") {
                latency::stall(self, &served).await?;
            }
            if self.wanted("structured") {
                together::structured(self, &served).await?;
            }
        }
        if self.wanted("load") {
            latency::load(self, &self.model("q8_0")?).await?;
        }
        if self.wanted("memory") {
            processes::memory(self, &self.model("q8_0")?).await?;
        }
        if self.wanted("members") {
            processes::members(self, &self.model("q4_0")?).await?;
        }
        if self.wanted("idle") {
            processes::idle(self, &self.model("q4_0")?).await?;
        }
        if self.wanted("requests") {
            processes::requests(self, &self.model("q4_0")?).await?;
        }
        if self.wanted("late") {
            processes::late(self).await?;
        }
        Ok(())
    }

    /// What the machine can do.
    fn limits(&self) {
        let machine = &self.machine;
        println!("{} threads, {}", machine.threads(), machine.instructions());
        let giga = |values: f64| vec![values / 1e9];
        self.figure("limit_read", giga(machine.read()), "GB/s", Goal::None);
        self.figure(
            "limit_integer",
            giga(machine.integer()),
            "Gop/s",
            Goal::None,
        );
        self.figure("limit_float", giga(machine.float()), "GFLOP/s", Goal::None);
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test` runs benches with --test; there is nothing to check here.
    if arguments.iter().any(|a| a == "--test") {
        return Ok(());
    }
    let (flags, names): (Vec<_>, Vec<_>) = arguments.into_iter().partition(|a| a.starts_with('-'));
    let quick = flags.iter().any(|flag| flag == "--quick");
    let bench = Bench {
        machine: Machine::new(if quick { 1 << 26 } else { 1 << 30 }),
        llama: Llama::from_environment(),
        quick,
        names,
    };
    tokio::runtime::Runtime::new()?.block_on(bench.run())
}
