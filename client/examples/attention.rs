//! An attention block that is compiled once and called a thousand times.
//!
//! Start `hotcell serve`, then run this with `cargo run --release -p hotcell-client --example attention`.

use std::{process::ExitCode, time::Instant};

use hotcell_client::{
    Address, Error,
    tensor::{AttentionOptions, Session, SessionOptions, Tensor},
};

const TOKENS: usize = 16;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const CALLS: u32 = 1000;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("attention: {error}");
            ExitCode::FAILURE
        }
    }
}

/// `x` `[tokens, width]` plus causal attention over its norm.
fn block(x: &Tensor, [query, key, value, output]: &[Tensor; 4]) -> Tensor {
    let (tokens, heads, each) = (TOKENS as i64, HEADS as i64, (WIDTH / HEADS) as i64);
    let normal = x.rms_norm(None, 1e-5);
    // [tokens, width] → [1, heads, tokens, width / heads]
    let split = |weight: &Tensor| {
        let projected = normal.matmul(weight).reshape(&[1, tokens, heads, each]);
        projected.transpose(&[0, 2, 1, 3])
    };
    let scale = 1.0 / (each as f64).sqrt();
    let options = AttentionOptions {
        scale,
        causal: true,
        ..AttentionOptions::default()
    };
    let seen = split(query).attention(&split(key), &split(value), &options);
    let joined = seen
        .transpose(&[0, 2, 1, 3])
        .reshape(&[tokens, WIDTH as i64]);
    x + joined.matmul(output)
}

async fn run() -> Result<(), Error> {
    let address = Address::from_environment()?;
    let session = Session::open(&address, SessionOptions::default()).await?;

    let keys = session.random_key(1).random_split(4);
    let weights = [0, 1, 2, 3].map(|i| {
        let key = keys.narrow(0, i, i + 1).reshape(&[2]);
        key.random_normal(&[WIDTH, WIDTH], 0.0, 1.0 / (WIDTH as f64).sqrt())
    });
    let mut x = session
        .random_key(2)
        .random_normal(&[TOKENS, WIDTH], 0.0, 1.0);
    // Weights stay on the worker; the function refers to them there.
    session.eval(&weights).await?;
    x.eval().await?;

    let function = session.compile(move |x| x.iter().map(|x| block(x, &weights)).collect());
    let mut start = Instant::now();
    for call in 0..=CALLS {
        if call == 1 {
            // The first call traced the function and made its plan.
            println!("compiled and called in {:?}", start.elapsed());
            start = Instant::now();
        }
        // Each result is the next argument, and never leaves the worker. The norm keeps it from growing.
        let results = function.call_eval(&[x.rms_norm(None, 1e-5)]).await?;
        x = results.into_iter().next().unwrap_or(x);
    }
    let each = start.elapsed() / CALLS;
    println!("{CALLS} calls, {:.1} us each", each.as_secs_f64() * 1e6);
    let size = x.square().mean(&[], false).item::<f32>().await?;
    println!("mean square of the last result: {size:.4}");
    Ok(())
}
