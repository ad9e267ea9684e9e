//! llama.cpp's own benchmark on the same file and as many threads, if there is one.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, ensure};

/// The program `llama-bench`.
pub struct Llama {
    program: PathBuf,
    threads: usize,
}

impl Llama {
    /// The one that `LLAMA_BENCH` names.
    pub fn from_environment() -> Option<Self> {
        Some(Self {
            program: std::env::var_os("LLAMA_BENCH")?.into(),
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
        })
    }

    fn run(&self, model: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
        let mut command = Command::new(&self.program);
        command
            .arg("-m")
            .arg(model)
            .args(["-t", &self.threads.to_string(), "-r", "1", "-o", "json"])
            .args(arguments);
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "{}; it said {:?}",
            output.status,
            said.trim()
        );
        Ok(output.stdout)
    }

    /// Tokens per second of reading a prompt of so many tokens (`-p`), or of drawing so many after none (`-n`).
    fn rate(&self, model: &Path, prompt: usize, tokens: usize) -> Option<f64> {
        let (prompt, tokens) = (prompt.to_string(), tokens.to_string());
        let rate = || {
            let json = self.run(model, &["-p", &prompt, "-n", &tokens])?;
            let tests: serde_json::Value = serde_json::from_slice(&json)?;
            let rate = tests.get(0).and_then(|test| test.get("avg_ts")?.as_f64());
            rate.context("it says no avg_ts")
        };
        self.or_without(rate())
    }

    /// Nothing where it failed, as its builds with AMX do with a prompt: the other figures are still worth having.
    fn or_without(&self, measured: Result<f64>) -> Option<f64> {
        measured
            .inspect_err(|e| {
                eprintln!(
                    "{}: {e}; nothing is compared with it",
                    self.program.display()
                )
            })
            .ok()
    }

    /// Tokens per second of reading a prompt of so many tokens; nothing where it fails.
    pub fn prefill(&self, model: &Path, tokens: usize) -> Option<f64> {
        self.rate(model, tokens, 0)
    }

    /// Tokens per second of drawing so many, one after another; nothing where it fails.
    pub fn decode(&self, model: &Path, tokens: usize) -> Option<f64> {
        self.rate(model, 0, tokens)
    }

    /// Seconds of a whole run that loads the model and computes one token; nothing where it fails.
    pub fn load(&self, model: &Path) -> Option<f64> {
        let start = Instant::now();
        let run = self.run(model, &["-p", "0", "-n", "1", "--no-warmup"]);
        self.or_without(run.map(|_| start.elapsed().as_secs_f64()))
    }
}
