//! Writes a model of a given shape with random weights, for benchmarks that need no download:
//! `cargo run --release -p hotcell-tests --bin synth -- --shape llama-1b --type q4_0 FILE`

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, builder::PossibleValuesParser};
use hotcell_tests::synthetic::{
    Measures,
    gguf::{Weights, write},
};

fn shapes() -> PossibleValuesParser {
    PossibleValuesParser::new(Measures::NAMED.iter().map(|(name, _)| *name))
}

/// Writes a GGUF file with random weights and a byte-level tokenizer of made-up words.
#[derive(Debug, Parser)]
struct Cli {
    /// The model's measures.
    #[arg(long, value_parser = shapes())]
    shape: String,
    /// How its matrices are stored; q4_k_m is llama.cpp's mix, of the others all are alike.
    #[arg(long = "type", value_parser = PossibleValuesParser::new(Weights::names()))]
    weights: String,
    /// Where to write it.
    file: PathBuf,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let named = Measures::NAMED.iter().find(|(name, _)| *name == cli.shape);
    let (_, measures) = named.context("no such shape")?;
    let weights = Weights::from_name(&cli.weights).context("no such type")?;
    let name = format!("{} {} random", cli.shape, cli.weights);
    let size = write(&cli.file, &name, measures, weights)?;
    println!(
        "{}: {} parameters, {} bytes of weights",
        cli.file.display(),
        size.parameters,
        size.bytes
    );
    Ok(())
}
