//! The client's examples do what they say.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{fs::File, io::BufReader, path::Path, process::Command};

use hotcell_client::v1;
use hotcell_tests::cluster::{Cluster, examples, repository};
use safetensors::SafeTensors;

#[tokio::test]
async fn the_examples_run_to_their_ends() {
    let folder = examples().unwrap();
    let cluster = Cluster::start(&["--devices", "cpu:2"]).await.unwrap();
    let ready = |workers: &[v1::WorkerInfo]| {
        workers.len() == 2 && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
    };
    cluster.workers(ready).await.unwrap();
    let run_with = |name: &str, arguments: &[&Path]| {
        let output = Command::new(folder.join(name))
            .args(arguments)
            .env(
                "HOTCELL_ADDRESS",
                format!("unix:{}", cluster.socket.display()),
            )
            .output()
            .unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {said}{error}");
        said
    };
    let run = |name: &str| run_with(name, &[]);
    // [[0, 1, 2], [3, 4, 5]] @ [[1, 0], [0, 1], [1, 1]] by hand.
    let said = run("remote_matmul");
    let product = "[[ 2.0000,  3.0000],\n [ 8.0000,  9.0000]]";
    assert!(
        said.contains(product) && said.contains("sum of all: 22"),
        "{said}"
    );

    let said = run("convnet");
    let scores = said.lines().map(|line| {
        let (_, score) = line.split_once(": ").unwrap();
        score.parse::<f64>().unwrap()
    });
    let scores: Vec<f64> = scores.collect();
    assert_eq!(scores.len(), 10, "{said}");
    assert!((scores.iter().sum::<f64>() - 1.0).abs() < 1e-3, "{said}");

    let said = run("attention");
    assert!(said.contains("1000 calls, "), "{said}");
    let last = said.lines().last().unwrap().rsplit(' ').next().unwrap();
    assert!(last.parse::<f64>().unwrap() > 0.0, "{said}");

    // Twice: the second one takes the first one's place.
    for _ in 0..2 {
        let said = run("saved_function");
        assert!(
            said.starts_with("layer: ") && said.ends_with(" bytes, 64 rows at most\n"),
            "{said}"
        );
    }

    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("image.png");
    let said = run_with("diffusion", &[&file]);
    assert!(said.ends_with("64 × 64 after 20 steps\n"), "{said}");
    is_the_golden_image(&file);

    let said = run("compare_workers");
    assert!(said.ends_with("w0 and w1 agree\n"), "{said}");
    assert!(
        said.contains("probabilities on w1: cosine 1.000000"),
        "{said}"
    );
}

/// The image that PyTorch makes with the same weights in f64 (`tests/golden/diffusion/make.py`): f32 may round a colour the other way.
fn is_the_golden_image(file: &Path) {
    let decoder = png::Decoder::new(BufReader::new(File::open(file).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut colours = vec![0; reader.output_buffer_size().unwrap()];
    let frame = reader.next_frame(&mut colours).unwrap();
    assert_eq!((frame.width, frame.height), (64, 64));
    assert_eq!(frame.color_type, png::ColorType::Rgb);
    let golden = repository().join("tests/golden/diffusion/image.safetensors");
    let golden = std::fs::read(golden).unwrap();
    let golden = SafeTensors::deserialize(&golden).unwrap();
    let image = golden.tensor("image").unwrap();
    assert_eq!(image.shape(), [64, 64, 3]);
    let values = image.data().chunks_exact(4);
    let values = values.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    assert_eq!(values.len(), colours.len());
    for (i, (value, colour)) in values.zip(&colours).enumerate() {
        // Half of it is the rounding to a byte.
        let error = (value - f32::from(*colour)).abs();
        assert!(error <= 0.51, "{i}: {colour}, not {value}");
    }
}
