//! Computes the same graph on two workers and compares the results through a safetensors file.
//!
//! Start `hotcell serve --devices cpu:2`, then run this with `cargo run -p hotcell-client --example compare_workers`. Where there is
//! one worker only, it is compared with itself.

use std::process::ExitCode;

use hotcell_client::{
    Address, Client, Error, Reason,
    tensor::{Session, SessionOptions, Tensor, TensorFile, Thresholds},
};

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("compare_workers: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The results that are compared, by name.
fn graph(session: &Session) -> Vec<(&'static str, Tensor)> {
    let x = session.random_key(3).random_normal(&[64, 128], 0.0, 1.0);
    let w = session.random_key(4).random_normal(&[128, 32], 0.0, 0.1);
    let hidden = x.layer_norm(None, None, 1e-5).matmul(&w);
    let probabilities = hidden.gelu().softmax(-1);
    vec![("hidden", hidden), ("probabilities", probabilities)]
}

async fn on(address: &Address, worker: &str) -> Result<Session, Error> {
    let options = SessionOptions {
        worker: Some(worker.to_owned()),
        ..SessionOptions::default()
    };
    Session::open(address, options).await
}

async fn run() -> Result<(), Error> {
    let address = Address::from_environment()?;
    let workers = Client::connect(&address).await?.workers().await?;
    let none = || {
        Error::new(
            Reason::NoWorker,
            "the scheduler has no worker; `hotcell ps` tells why",
        )
    };
    let first = &workers.first().ok_or_else(none)?.id;
    let second = match workers.get(1) {
        Some(worker) => &worker.id,
        None => {
            println!("there is one worker only; `hotcell serve --devices cpu:2` has two");
            first
        }
    };

    // What the first worker computes is the reference.
    let name = format!("hotcell-compare-{}.safetensors", std::process::id());
    let file = std::env::temp_dir().join(name);
    TensorFile::save(&file, &graph(&on(&address, first).await?), None).await?;
    println!("{first} wrote {}", file.display());

    let session = on(&address, second).await?;
    let limits = Thresholds::default();
    let compared = Tensor::compare_with(&graph(&session), &file, &limits, false).await;
    // The file is of no further use, whatever came out.
    let _ = std::fs::remove_file(&file);
    let compared = compared?;
    for (name, result) in &compared.by_name {
        match result {
            Ok(c) => println!(
                "{name} on {second}: cosine {:.6}, greatest difference {:e}, normalised square error {:e}",
                c.cosine, c.max_abs, c.nmse
            ),
            Err(error) => println!("{name} on {second}: {error}"),
        }
    }
    compared.check(&limits)?;
    println!("{first} and {second} agree");
    Ok(())
}
