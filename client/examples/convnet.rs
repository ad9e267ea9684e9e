//! A small convolutional network with weights from a fixed key scores a made-up image.
//!
//! Start `hotcell serve`, then run this with `cargo run -p hotcell-client --example convnet`. The scores are the same on every
//! run: the weights come from a counter-based generator, and a worker computes the same bits every time.

use std::process::ExitCode;

use hotcell_client::{
    Address, Error,
    tensor::{ConvOptions, PoolKind, Session, SessionOptions, Tensor},
};

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("convnet: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Two convolutions with pooling, and one linear layer.
struct Net {
    first: Tensor,
    second: Tensor,
    linear: Tensor,
}

impl Net {
    fn new(session: &Session, seed: u64) -> Self {
        let keys = session.random_key(seed).random_split(3);
        let weight = |i: i64, shape: &[usize]| {
            let inputs: usize = shape[1..].iter().product();
            let key = keys.narrow(0, i, i + 1).reshape(&[2]);
            key.random_normal(shape, 0.0, (2.0 / inputs as f64).sqrt())
        };
        Self {
            first: weight(0, &[8, 3, 3, 3]),
            second: weight(1, &[16, 8, 3, 3]),
            linear: weight(2, &[10, 16 * 8 * 8]),
        }
    }

    /// Probabilities of ten classes for images `[n, 3, 32, 32]`.
    fn classify(&self, images: &Tensor) -> Tensor {
        let same = ConvOptions {
            low: vec![1, 1],
            ..ConvOptions::default()
        };
        let halves = ConvOptions {
            strides: vec![2, 2],
            ..ConvOptions::default()
        };
        let x = images.conv(&self.first, None, &same).relu();
        let x = x.pool(PoolKind::Max, &[2, 2], &halves);
        let x = x.conv(&self.second, None, &same).relu();
        let x = x.pool(PoolKind::Max, &[2, 2], &halves);
        let x = x.flatten(1, -1);
        x.matmul(&self.linear.transpose(&[])).softmax(-1)
    }
}

async fn run() -> Result<(), Error> {
    let address = Address::from_environment()?;
    let session = Session::open(&address, SessionOptions::default()).await?;
    let net = Net::new(&session, 42);
    let image = session
        .random_key(7)
        .random_uniform(&[1, 3, 32, 32], 0.0, 1.0);

    // One call: the worker makes the weights, runs the network and sends ten numbers.
    let scores = net.classify(&image).to_vec::<f32>().await?;
    for (class, score) in scores.iter().enumerate() {
        println!("class {class}: {score:.4}");
    }
    Ok(())
}
