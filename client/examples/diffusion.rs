//! Generates an image: a small diffusion transformer takes the noise out of a latent in 20 steps, and the decoder of a variational autoencoder
//! makes an image of it, which goes to a PNG. The weights are random, of a seed, so the image shows nothing; what computes it is what
//! computes a real one.
//!
//! Start `hotcell serve`, then run this with `cargo run -p hotcell-client --example diffusion -- image.png`.
//! `tests/golden/diffusion/make.py` has the same network in PyTorch.

use std::{fs::File, io::BufWriter, path::Path, process::ExitCode};

use hotcell_client::{
    Address, Error,
    tensor::{AttentionOptions, ConvOptions, Resample, Session, SessionOptions, Tensor},
};

const STEPS: usize = 20;
/// Channels, rows and columns of the latent; both sides are halved once more for the transformer.
const LATENT: [usize; 4] = [1, 4, 8, 8];
const WIDTH: usize = 64;
const HEADS: usize = 4;
const BLOCKS: usize = 3;
/// Channels of the decoder at each size.
const CHANNELS: [usize; 4] = [32, 32, 24, 16];

#[tokio::main]
async fn main() -> ExitCode {
    let path = std::env::args().nth(1);
    let path = path.unwrap_or_else(|| "diffusion.png".to_owned());
    let image = match run().await {
        Ok(image) => image,
        Err(error) => {
            eprintln!("diffusion: {error}");
            return ExitCode::FAILURE;
        }
    };
    match write(Path::new(&path), &image) {
        Ok(()) => {
            println!("{path}: 64 × 64 after {STEPS} steps");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("diffusion: {path}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Weights in the order in which they are asked for, each a number of splitmix64 in [−1, 1).
struct Weights<'a> {
    session: &'a Session,
    state: u64,
}

impl Weights<'_> {
    fn next(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 40) as f32) / 8_388_608.0 - 1.0
    }

    /// Numbers of at most `size`.
    fn take(&mut self, shape: &[usize], size: f32) -> Result<Tensor, Error> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| self.next() * size).collect();
        self.session.tensor(&values, shape)
    }

    /// Those of a layer with so many inputs: `[outputs, …]` and a bias.
    fn layer(&mut self, shape: &[usize]) -> Result<Layer, Error> {
        let inputs: usize = shape.iter().skip(1).product();
        let size = (3.0 / inputs as f32).sqrt();
        Ok(Layer {
            weight: self.take(shape, size)?,
            bias: self.take(&shape[..1], 0.1)?,
        })
    }
}

/// A linear layer or a convolution.
#[derive(Clone)]
struct Layer {
    weight: Tensor,
    bias: Tensor,
}

impl Layer {
    fn linear(&self, x: &Tensor) -> Tensor {
        &x.mul_mat(&self.weight) + &self.bias
    }

    /// Of 3 × 3, with a result as large as the image.
    fn conv(&self, x: &Tensor) -> Tensor {
        let same = ConvOptions {
            low: vec![1, 1],
            ..ConvOptions::default()
        };
        x.conv(&self.weight, Some(&self.bias), &same)
    }
}

/// A transformer's block, which the time shifts, scales and gates.
struct Block {
    modulation: Layer,
    qkv: Layer,
    out: Layer,
    up: Layer,
    down: Layer,
}

struct Transformer {
    patches: Layer,
    places: Tensor,
    time: [Layer; 2],
    blocks: Vec<Block>,
    last_modulation: Layer,
    last: Layer,
}

impl Transformer {
    fn new(weights: &mut Weights<'_>) -> Result<Self, Error> {
        let [_, channels, height, width] = LATENT;
        let patch = channels * 4;
        let mut block = || {
            Ok(Block {
                modulation: weights.layer(&[6 * WIDTH, WIDTH])?,
                qkv: weights.layer(&[3 * WIDTH, WIDTH])?,
                out: weights.layer(&[WIDTH, WIDTH])?,
                up: weights.layer(&[4 * WIDTH, WIDTH])?,
                down: weights.layer(&[WIDTH, 4 * WIDTH])?,
            })
        };
        let blocks = (0..BLOCKS).map(|_| block()).collect::<Result<_, Error>>()?;
        Ok(Self {
            blocks,
            patches: weights.layer(&[WIDTH, patch])?,
            places: weights.take(&[1, height * width / 4, WIDTH], 0.5)?,
            time: [
                weights.layer(&[WIDTH, 32])?,
                weights.layer(&[WIDTH, WIDTH])?,
            ],
            last_modulation: weights.layer(&[2 * WIDTH, WIDTH])?,
            last: weights.layer(&[patch, WIDTH])?,
        })
    }

    /// Where a latent moves at a time, f32 `[1]` in [0, 1].
    fn velocity(&self, latent: &Tensor, time: &Tensor) -> Tensor {
        let [_, channels, height, width] = LATENT.map(|n| n as i64);
        // Patches of 2 × 2 become tokens.
        let x = latent.reshape(&[1, channels, height / 2, 2, width / 2, 2]);
        let x = x.transpose(&[0, 2, 4, 1, 3, 5]);
        let x = x.reshape(&[1, height * width / 4, channels * 4]);
        let mut x = &self.patches.linear(&x) + &self.places;

        let steps = time_steps(time);
        let waves = Tensor::concat(&[steps.cos(), steps.sin()], -1);
        let [first, second] = &self.time;
        let time = second.linear(&first.linear(&waves).silu()).silu();

        for block in &self.blocks {
            let all = block
                .modulation
                .linear(&time)
                .reshape(&[1, 6, WIDTH as i64]);
            let part = |i: i64| all.narrow(1, i, i + 1);
            let seen = shifted(&x, &part(0), &part(1));
            x = &x + &(&part(2) * &attention(block, &seen));
            let seen = shifted(&x, &part(3), &part(4));
            let made = block.down.linear(&block.up.linear(&seen).gelu_tanh());
            x = &x + &(&part(5) * &made);
        }
        let all = self
            .last_modulation
            .linear(&time)
            .reshape(&[1, 2, WIDTH as i64]);
        let x = shifted(&x, &all.narrow(1, 0, 1), &all.narrow(1, 1, 2));
        let x = self.last.linear(&x);
        let x = x.reshape(&[1, height / 2, width / 2, channels, 2, 2]);
        let x = x.transpose(&[0, 3, 1, 4, 2, 5]);
        x.reshape(&[1, channels, height, width])
    }
}

/// The time at sixteen frequencies, `[1, 16]`.
fn time_steps(time: &Tensor) -> Tensor {
    let powers = Tensor::concat(&vec![time.reshape(&[1, 1]); 16], -1);
    let ones = powers
        .equal(&powers)
        .cast(hotcell_client::tensor::DType::F32);
    let counts = ones.cumsum(-1, Default::default()) - 1.0;
    let frequencies = (counts * (-(1000f64.ln()) / 16.0)).exp();
    &(powers * 100.0) * &frequencies
}

/// Normalised, scaled and shifted by what the time says.
fn shifted(x: &Tensor, shift: &Tensor, scale: &Tensor) -> Tensor {
    let normal = x.layer_norm(None, None, 1e-6);
    &(&normal * &(scale + 1.0)) + shift
}

fn attention(block: &Block, x: &Tensor) -> Tensor {
    let (heads, size) = (HEADS as i64, (WIDTH / HEADS) as i64);
    let all = block.qkv.linear(x).reshape(&[1, -1, 3, heads, size]);
    let all = all.transpose(&[2, 0, 3, 1, 4]);
    let part = |i: i64| all.narrow(0, i, i + 1).squeeze(&[0]);
    let options = AttentionOptions {
        scale: 1.0 / (size as f64).sqrt(),
        ..AttentionOptions::default()
    };
    let seen = part(0).attention(&part(1), &part(2), &options);
    let seen = seen
        .transpose(&[0, 2, 1, 3])
        .reshape(&[1, -1, WIDTH as i64]);
    block.out.linear(&seen)
}

/// Makes an image of a latent: three times twice as large.
struct Decoder {
    first: Layer,
    stages: Vec<[Layer; 3]>,
    last: Layer,
}

impl Decoder {
    fn new(weights: &mut Weights<'_>) -> Result<Self, Error> {
        let first = weights.layer(&[CHANNELS[0], LATENT[1], 3, 3])?;
        let mut stages = Vec::new();
        for pair in CHANNELS.windows(2) {
            let &[from, to] = pair else { continue };
            stages.push([
                weights.layer(&[from, from, 3, 3])?,
                weights.layer(&[from, from, 3, 3])?,
                weights.layer(&[to, from, 3, 3])?,
            ]);
        }
        let last = weights.layer(&[3, CHANNELS[3], 3, 3])?;
        Ok(Self {
            first,
            stages,
            last,
        })
    }

    /// Colours in [0, 1], `[1, 3, 64, 64]`.
    fn image(&self, latent: &Tensor) -> Tensor {
        let mut x = self.first.conv(latent);
        let mut side = LATENT[2] as i64;
        for [one, two, wider] in &self.stages {
            let y = one.conv(&x.group_norm(4, None, None, 1e-6).silu());
            let y = two.conv(&y.group_norm(4, None, None, 1e-6).silu());
            x = &x + &y;
            side *= 2;
            let large = x.interpolate(&[side, side], Resample::Nearest, false);
            x = wider.conv(&large);
        }
        let x = self.last.conv(&x.group_norm(4, None, None, 1e-6).silu());
        x.sigmoid()
    }
}

async fn run() -> Result<Vec<u8>, Error> {
    let address = Address::from_environment()?;
    let session = Session::open(&address, SessionOptions::default()).await?;
    let mut weights = Weights {
        session: &session,
        state: 20_260,
    };
    let transformer = Transformer::new(&mut weights)?;
    let decoder = Decoder::new(&mut weights)?;
    // What is denoised: as wide as a normal distribution.
    let mut latent = weights.take(&LATENT, 1.732)?;

    let step = session.compile(move |inputs| match inputs {
        [latent, time, width] => {
            let velocity = transformer.velocity(latent, time);
            vec![latent + &(&velocity * width)]
        }
        _ => vec![],
    });
    let decode = session.compile(move |inputs| inputs.iter().map(|x| decoder.image(x)).collect());
    for i in 0..STEPS {
        let time = session.tensor(&[1.0 - i as f32 / STEPS as f32], &[1])?;
        let width = session.tensor(&[-1.0 / STEPS as f32], &[1])?;
        let next = step.call_eval(&[latent.clone(), time, width]).await?;
        latent = next.into_iter().next().unwrap_or(latent);
    }
    let image = decode.call_eval(&[latent]).await?;
    let mut colours = Vec::new();
    for image in &image {
        // Rows of pixels of three colours.
        let rows = (image.squeeze(&[0]).transpose(&[1, 2, 0]) * 255.0).round();
        colours.extend(rows.to_vec::<f32>().await?.iter().map(|v| *v as u8));
    }
    Ok(colours)
}

fn write(path: &Path, colours: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    let side = (LATENT[2] * 8) as u32;
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), side, side);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(colours)?;
    Ok(())
}
