//! Synthetic models are models: every type of weights loads, computes and speaks.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_graph::DType;
use hotcell_kernels::cpu::path::CpuPath;
use hotcell_tests::{
    cluster::Cluster,
    model::{Solo, open},
    options::greedy,
    synthetic::{
        Measures,
        gguf::{Weights, size, small, write},
    },
};
use hotcell_worker::model::text::ModelText;
use tempfile::TempDir;

const TINY: Measures = Measures {
    hidden: 256,
    layers: 8,
    heads: 4,
    kv_heads: 2,
    inner: 512,
    vocab: 700,
    context: 64,
    tied: false,
};

#[test]
fn every_type_loads_and_its_logits_are_sane() {
    let folder = TempDir::new().unwrap();
    for (name, measures) in Weights::names()
        .into_iter()
        .flat_map(|name| [(name, TINY), (name, Measures { tied: true, ..TINY })])
    {
        let path = folder.path().join("model.gguf");
        let weights = Weights::from_name(name).unwrap();
        let size = write(&path, name, &measures, weights).unwrap();
        let source = open(&path).unwrap();
        assert_eq!(size.bytes as usize, source.weights.size(), "{name}");
        let elements = source.weights.iter().map(|(_, weight)| weight.elements());
        assert_eq!(size.parameters as usize, elements.sum::<usize>(), "{name}");
        let prompt = [300, 301, 450, 2, 699];
        let mut solo = Solo::new(&source, 1, CpuPath::detect(), DType::F16).unwrap();
        for logits in solo.feed(&prompt, prompt.len()).unwrap() {
            let square = logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32;
            let deviation = square.sqrt();
            assert!((1.0..16.0).contains(&deviation), "{name}: {deviation}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_in_blocks_of_four_bit_floats_are_served() {
    let folder = TempDir::new().unwrap();
    for name in ["mxfp4", "nvfp4"] {
        let path = folder.path().join(format!("{name}.gguf"));
        write(&path, name, &TINY, Weights::from_name(name).unwrap()).unwrap();
        let cluster = Cluster::with_model(name, &path, &[]).await.unwrap();
        let client = cluster.client().await.unwrap();
        let mut said = Vec::new();
        for _ in 0..2 {
            let stream = client.generate("in the beginning", greedy(24)).await;
            let whole = stream.unwrap().complete().await.unwrap();
            assert_eq!(whole.token_ids.len(), 24, "{name}");
            said.push(whole.token_ids);
        }
        assert_eq!(said[0], said[1], "{name}");
    }
}

/// The number that a code of E4M3 stands for, without its sign.
fn of_code(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3), f32::from(code & 7));
    match exponent {
        0 => fraction * 2f32.powi(-9),
        _ => (8.0 + fraction) * 2f32.powi(exponent - 10),
    }
}

/// llama.cpp's files of NVFP4 have a scale of the whole tensor beside it. One of a power of two changes no digit of what is
/// computed: the same weights with greater scales of their own give the same bits.
#[test]
fn weights_in_four_bit_floats_take_the_scales_of_their_tensors() {
    let folder = TempDir::new().unwrap();
    let logits = |name: &str, file: Vec<u8>| {
        let path = folder.path().join(name);
        std::fs::write(&path, file).unwrap();
        let mut solo = Solo::new(&open(&path).unwrap(), 1, CpuPath::detect(), DType::F16).unwrap();
        let logits = solo.feed(&[300, 301, 450, 2, 699], 5).unwrap();
        let bits = logits.iter().flatten().map(|x| x.to_bits());
        bits.collect::<Vec<_>>()
    };
    let plain = small("m", &TINY, Weights::Pure(DType::NVFP4)).unwrap();
    let (mut scaled, mut larger) = (plain.clone(), plain.clone());
    for (name, scale) in [
        ("blk.1.attn_k", 4f32),
        ("blk.2.attn_output", 2.0),
        ("blk.3.ffn_down", 8.0),
        ("output", 2.0),
    ] {
        let bytes = scale.to_le_bytes().to_vec();
        scaled = scaled.tensor(&format!("{name}.scale"), &[1], 0, bytes);
        let name = format!("{name}.weight");
        let mut tensors = larger.tensors.iter_mut();
        let tensor = tensors.find(|tensor| tensor.name == name).unwrap();
        for block in tensor.data.chunks_mut(DType::NVFP4.block_bytes()) {
            for code in &mut block[..4] {
                let wanted = of_code(*code & 127) * scale;
                let mut codes = 0..127u8;
                *code = codes.find(|code| of_code(*code) == wanted).unwrap();
            }
        }
    }
    let expected = logits("larger.gguf", larger.write());
    assert_eq!(logits("scaled.gguf", scaled.write()), expected);
    assert_ne!(logits("plain.gguf", plain.write()), expected);
}

#[test]
fn weights_whose_scales_are_not_applied_are_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    for (name, count, words) in [
        // An embedding is no product.
        ("token_embd", 1, ["token_embd.weight", "token_embd.scale"]),
        ("blk.1.attn_k", 3, ["blk.1.attn_k.scale", "has shape [3]"]),
    ] {
        let ones = [1f32; 3][..count].iter().flat_map(|v| v.to_le_bytes());
        let writer = small("m", &TINY, Weights::Pure(DType::NVFP4)).unwrap();
        let scale = format!("{name}.scale");
        let writer = writer.tensor(&scale, &[count as u64], 0, ones.collect());
        std::fs::write(&path, writer.write()).unwrap();
        let source = open(&path).unwrap();
        let refused = Solo::new(&source, 1, CpuPath::detect(), DType::F16);
        let said = format!("{:#}", refused.err().unwrap());
        for word in words {
            assert!(said.contains(word), "{said}");
        }
    }
}

#[test]
fn any_text_is_encoded_and_comes_back() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, "m", &TINY, Weights::Pure(DType::Q4_0)).unwrap();
    let text = ModelText::open(&open(&path).unwrap()).unwrap();
    for said in [
        "in the beginning",
        "{\"a\": [1, 23, null]}\n\n\t",
        "Ä日本語 🦀\u{0}\u{7f}",
    ] {
        let ids = text.tokenizer.encode(said, false).unwrap();
        assert!(ids.iter().all(|id| (*id as usize) < TINY.vocab));
        assert_eq!(text.detokenize(&ids, false).unwrap(), said);
    }
}

#[test]
fn q4_k_m_is_llama_cpps_mix() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    let weights = Weights::from_name("q4_k_m").unwrap();
    write(&path, "m", &TINY, weights).unwrap();
    let source = open(&path).unwrap();
    let better = |part: &str| -> Vec<usize> {
        let is_better = |layer: &usize| {
            let name = format!("blk.{layer}.{part}.weight");
            let dtype = source.weights.get(&name).unwrap().dtype;
            assert!(matches!(dtype, DType::Q4K | DType::Q6K), "{name}");
            dtype == DType::Q6K
        };
        (0..TINY.layers).filter(is_better).collect()
    };
    // As llama-quantize makes it of a model with 8 layers.
    for part in ["attn_v", "ffn_down"] {
        assert_eq!(better(part), [0, 3, 6, 7], "{part}");
    }
    for part in ["attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"] {
        assert!(better(part).is_empty(), "{part}");
    }
    let dtype = |name: &str| source.weights.get(name).unwrap().dtype;
    assert_eq!(dtype("output.weight"), DType::Q6K);
    assert_eq!(dtype("token_embd.weight"), DType::Q4K);
    assert_eq!(dtype("output_norm.weight"), DType::F32);
}

#[test]
fn rows_that_are_no_whole_blocks_take_llama_cpps_other_types() {
    // 288 is no multiple of 256.
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    let measures = Measures {
        layers: 1,
        vocab: 300,
        ..Measures::LLAMA_15M
    };
    write(&path, "m", &measures, Weights::Q4KM).unwrap();
    let source = open(&path).unwrap();
    let dtype = |name: &str| source.weights.get(name).unwrap().dtype;
    assert_eq!(dtype("blk.0.attn_q.weight"), DType::Q5_0);
    assert_eq!(dtype("token_embd.weight"), DType::Q8_0);
    // 768 is one.
    assert_eq!(dtype("blk.0.ffn_down.weight"), DType::Q6K);
}

#[test]
fn the_same_measures_give_the_same_bytes() {
    let folder = TempDir::new().unwrap();
    let paths = ["a.gguf", "b.gguf"].map(|name| folder.path().join(name));
    for path in &paths {
        write(path, "m", &TINY, Weights::Pure(DType::Q5K)).unwrap();
    }
    let [a, b] = paths.map(|path| std::fs::read(path).unwrap());
    assert!(a == b);
}

#[test]
fn a_token_of_the_large_model_reads_what_its_weights_take() {
    let size = size(&Measures::LLAMA_1B, Weights::Pure(DType::Q8_0)).unwrap();
    // TinyLlama 1.1B, as its card says.
    assert_eq!(size.parameters, 1_100_048_384);
    assert_eq!(size.head, 32_000 * 2048);
    // All matrices but the embedding, in blocks of 34 bytes for 32, and 45 norms of f32.
    let matrices = size.body + size.head;
    let norms = 45 * 2048 * 4;
    let row = 2048 / 32 * 34;
    assert_eq!(size.bytes_per_token, matrices / 32 * 34 + norms + row);
}
