//! Saves a function of tensors under a name, so that every client of the Open Inference Protocol can call it:
//! `tritonclient.grpc.InferenceServerClient("127.0.0.1:4100").infer("layer", …)`.
//!
//! Start `hotcell serve --listen 127.0.0.1:4100`, then run this with `cargo run -p hotcell-client --example saved_function`.
//! `hotcell graphs` shows what is saved, `hotcell graphs forget layer` forgets it.

use std::process::ExitCode;

use hotcell_client::{
    Address, Client, Error, SaveGraph,
    tensor::{Session, SessionOptions},
};

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("saved_function: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    let address = Address::from_environment()?;
    let session = Session::open(&address, SessionOptions::default()).await?;

    // What the function captures is saved with it.
    let weight = session.tensor(&[1.0f32, 0.0, 0.5, 0.0, 1.0, -0.5], &[2, 3])?;
    let layer = session.compile_shapeless(move |x| vec![x[0].matmul(&weight).tanh()]);

    // An example of its argument says dtype and shape; up to 64 rows may come at once.
    let x = session.tensor(&[1.0f32, 2.0], &[1, 2])?;
    let saving = SaveGraph {
        outputs: vec!["y".to_owned()],
        replace: true,
        ..SaveGraph::named("layer")
    };
    let client = Client::connect(&address).await?;
    let saved = layer.save(&client, &saving, &[("x", &x)], Some(64)).await?;
    println!(
        "{}: {} bytes, {} rows at most",
        saved.name, saved.bytes, saved.max_rows
    );
    Ok(())
}
