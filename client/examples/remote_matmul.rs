//! Multiplies two matrices on a worker.
//!
//! Start `hotcell serve`, then run this with `cargo run -p hotcell-client --example remote_matmul`. `HOTCELL_ADDRESS` names
//! another scheduler, or a worker run alone.

use std::process::ExitCode;

use hotcell_client::{
    Address, Error,
    tensor::{DType, DumpOptions, Session, SessionOptions},
};

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remote_matmul: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    let address = Address::from_environment()?;
    let session = Session::open(&address, SessionOptions::default()).await?;
    println!("computing on {}", session.describe().await?.device);

    // Nothing happens yet: these are expressions.
    let a = session.arange(0.0, 6.0, 1.0, DType::F32);
    let a = a.reshape(&[2, 3]);
    let b = session.tensor(&[1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0], &[3, 2])?;
    let c = a.matmul(&b);

    // Reading a value computes it there and fetches it.
    println!("a @ b =\n{}", c.dump(DumpOptions::default()).await?);
    println!("sum of all: {}", c.sum(&[], false).item::<f32>().await?);
    Ok(())
}
