//! How near to memory's and the processor's limits one stream comes.

use anyhow::Result;
use hotcell_kernels::cpu::path::CpuPath;
use hotcell_tests::bench::Goal;

use crate::{
    Bench, Stored,
    direct::Direct,
    models::Model,
    served::{SHORT, Served, options, prompt, rate},
};

/// Tokens that are drawn.
const TOKENS: usize = 128;
/// Tokens of the prompt that is read.
const PROMPT: usize = 512;
/// What reads memory as fast as this is one of the newer machines, on which llama.cpp is further from the limit.
const NEWER: f64 = 28e9;

/// One stream of a model, as a share of what it takes to read its weights once per token (without the cache of keys and
/// values, which is less than a hundredth here).
pub async fn decode(bench: &Bench, served: &Served, model: &Model, stored: Stored) -> Result<()> {
    let (mut shares, mut rates, mut beside) = (Vec::new(), Vec::new(), Vec::new());
    let mut read = 0f64;
    for _ in 0..bench.rounds() {
        // Before and after: machines have faster and slower moments.
        let before = bench.machine.read();
        let rate = served.together(1, options(TOKENS)).await?;
        let limit = (before + bench.machine.read()) / 2.0;
        read = read.max(limit);
        shares.push(rate * model.size.bytes_per_token as f64 / limit);
        rates.push(rate);
        let llama = bench.llama.as_ref();
        beside.extend(llama.and_then(|l| Some(rate / l.decode(model.path(), TOKENS)?)));
    }
    let name = format!("decode_{}", stored.name);
    let unit = "of reading the weights";
    bench.figure(&name, shares, unit, Goal::AtLeast(0.88));
    bench.figure(&format!("{name}_rate"), rates, "tokens/s", Goal::None);
    if !beside.is_empty() {
        let goal = match (read > NEWER, stored.quantised) {
            (false, true) => 1.4,
            (false, false) => 1.15,
            (true, true) => 2.0,
            (true, false) => 1.5,
        };
        let name = format!("{name}_llama");
        bench.figure(&name, beside, "of llama.cpp's", Goal::AtLeast(goal));
    }
    Ok(())
}

/// A prompt until the first token, as a share of what the processor multiplies and adds at most: 8-bit integers, and
/// `f32` for weights that are not quantised. Attention is not counted as work.
pub async fn prefill(bench: &Bench, served: &Served, model: &Model, stored: Stored) -> Result<()> {
    let peak = || match stored.quantised {
        true => bench.machine.integer(),
        false => bench.machine.float(),
    };
    let operations = 2.0 * (model.size.body as f64 * PROMPT as f64 + model.size.head as f64);
    let (mut shares, mut rates, mut beside) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..bench.rounds() {
        let before = peak();
        let seconds = served.until_first(served.prompt(PROMPT)).await?;
        let limit = (before + peak()) / 2.0;
        let rate = PROMPT as f64 / seconds;
        shares.push(operations / seconds / limit);
        rates.push(rate);
        let llama = bench.llama.as_ref();
        beside.extend(llama.and_then(|l| Some(rate / l.prefill(model.path(), PROMPT)?)));
    }
    let name = format!("prefill_{}", stored.name);
    let (unit, goal) = match stored.quantised {
        true => ("of the integer peak", 0.55),
        // Tiles multiply these, beside whose peak that of floats is little.
        false if stored.name == "bf16" && CpuPath::Amx.is_available() => ("of the float peak", 2.0),
        false => ("of the float peak", 0.75),
    };
    bench.figure(&name, shares, unit, Goal::AtLeast(goal));
    bench.figure(&format!("{name}_rate"), rates, "tokens/s", Goal::None);
    if !beside.is_empty() {
        let name = format!("{name}_llama");
        bench.figure(&name, beside, "of llama.cpp's", Goal::AtLeast(3.0));
    }
    Ok(())
}

/// A model of which a step takes so little that everything around it counts: by processes, and by the engine in this
/// process, which is what llama.cpp's benchmark runs.
pub async fn small(bench: &Bench) -> Result<()> {
    let model = Model::get("llama-15m", "q4_0")?;
    let (mut whole, mut engine) = (Vec::new(), Vec::new());
    let (mut whole_beside, mut beside) = (Vec::new(), Vec::new());
    let served = Served::start(&model, &[]).await?;
    let direct = Direct::load(&model).await?;
    for round in 0..bench.rounds() as u64 {
        let rate_whole = served.together(1, options(2 * TOKENS)).await?;
        let prompt = prompt(round, SHORT, model.vocabulary);
        let rate = rate(&[direct.stream(prompt, 2 * TOKENS).await?])?;
        let llama = bench.llama.as_ref();
        if let Some(peer) = llama.and_then(|l| l.decode(model.path(), 2 * TOKENS)) {
            whole_beside.push(rate_whole / peer);
            beside.push(rate / peer);
        }
        whole.push(rate_whole);
        engine.push(rate);
    }
    bench.figure("small_decode", whole, "tokens/s", Goal::None);
    bench.figure("small_decode_engine", engine, "tokens/s", Goal::None);
    if !beside.is_empty() {
        let (unit, goal) = ("of llama.cpp's", Goal::AtLeast(1.25));
        bench.figure("small_decode_llama", whole_beside, unit, Goal::None);
        bench.figure("small_decode_engine_llama", beside, unit, goal);
    }
    Ok(())
}
