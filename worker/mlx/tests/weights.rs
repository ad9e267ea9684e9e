//! Weights in MLX's forms: that they hold the numbers of their blocks, that they are made once, and how long they stay.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::rc::Rc;

use hotcell_graph::{DType, Graph, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Backend, Buffer, Device, DeviceError, HostRegion},
    cpu::{CpuBackend, dequant::dequantize_row},
    mlx::{MlxBackend, MlxDevice},
    plan::{Plan, PlanHints, Slot},
};

struct Owned(Vec<u8>);

// SAFETY: the vector is never changed, so its bytes stay where they are.
unsafe impl HostRegion for Owned {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

fn open() -> Rc<MlxDevice> {
    MlxBackend::open_device("mlx:0", &[]).unwrap()
}

fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

/// Numbers that look like chance.
fn noise(count: usize, seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

/// Blocks of any content, but with finite scales.
fn blocks(spec: &TensorSpec, seed: u64) -> Vec<u8> {
    let size = spec.bytes(0).unwrap();
    let mut bytes: Vec<u8> = noise(size, seed).map(|n| (n >> 24) as u8).collect();
    let scales: &[usize] = match spec.dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q6K => &[208],
        _ => &[],
    };
    for block in bytes.chunks_exact_mut(spec.dtype.block_bytes()) {
        for at in scales {
            // Between 2⁻⁸ and 2, of either sign.
            block[at + 1] = block[at + 1] & 0x83 | 0x20 | block[at + 1] & 0x1c;
        }
        match spec.dtype {
            // Between 2⁻⁸ and 2⁷.
            DType::MXFP4 => block[0] = 119 + block[0] % 16,
            // Any but the one that MLX has no number for.
            DType::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale &= 0x7f),
            _ => {}
        }
    }
    bytes
}

fn f32s(device: &dyn Device, values: &[f32]) -> Buffer {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffer = device.allocate("a test", bytes.len()).unwrap();
    buffer.write(0, &bytes).unwrap();
    buffer
}

fn read(buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    buffer.read_f32(0, &mut values).unwrap();
    values
}

/// Each row of the identity times `[n, k]` weights.
fn product(w: &TensorSpec, k: usize) -> Graph {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[k, k])).unwrap();
    let w = g.constant("w", w.clone()).unwrap();
    let y = g.mul_mat(x, w).unwrap();
    g.finish(&[y]).unwrap()
}

#[test]
fn a_form_has_the_very_numbers_of_the_blocks() {
    let device = open();
    let (n, k) = (24, 512);
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::MXFP4,
        DType::NVFP4,
    ] {
        let w = spec(dtype, &[n, k]);
        let bytes: Vec<u8> = match dtype {
            DType::F32 => noise(n * k, 3)
                .flat_map(|v| ((v >> 40) as f32 / 1e6).to_le_bytes())
                .collect(),
            // Finite: the exponent's highest bit is clear.
            DType::F16 | DType::BF16 => noise(n * k, 5)
                .flat_map(|v| ((v >> 32) as u16 & 0xbfff).to_le_bytes())
                .collect(),
            _ => blocks(&w, 7),
        };
        let mut expected = vec![0f32; n * k];
        let stride = dtype.row_bytes(k).unwrap();
        for (row, out) in bytes.chunks_exact(stride).zip(expected.chunks_exact_mut(k)) {
            dequantize_row(dtype, row, out);
        }
        assert!(expected.iter().all(|v| v.is_finite()), "{dtype}");
        let mut plan = device.plan(&product(&w, k), &PlanHints::default()).unwrap();
        let mut identity = vec![0f32; k * k];
        identity.iter_mut().step_by(k + 1).for_each(|v| *v = 1.0);
        let (x, y) = (f32s(&*device, &identity), f32s(&*device, &vec![0.0; n * k]));
        plan.bind(Slot::Input(0), &x, 0).unwrap();
        let w = device.import(Rc::new(Owned(bytes))).unwrap();
        plan.bind(Slot::Input(1), &w, 0).unwrap();
        plan.bind(Slot::Output(0), &y, 0).unwrap();
        plan.execute(0).unwrap();
        let got = read(&y, n * k);
        for row in 0..n {
            for column in 0..k {
                let (got, expected) = (got[column * n + row], expected[row * k + column]);
                assert!(
                    got == expected,
                    "{dtype} [{row}, {column}]: {got} is not {expected}"
                );
            }
        }
        let ran = device.ran("mul_mat");
        assert!(ran.on_mlx > 0 && ran.on_cpu == 0, "{dtype}: {ran:?}");
    }
}

/// A row of ones times `[n, k]` weights.
fn sums(w: &TensorSpec, k: usize) -> Graph {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[1, k])).unwrap();
    let w = g.constant("w", w.clone()).unwrap();
    let y = g.mul_mat(x, w).unwrap();
    g.finish(&[y]).unwrap()
}

#[test]
fn every_scale_and_every_code_of_four_bits_is_the_number_that_the_block_has() {
    let device = open();
    for (dtype, scales) in [(DType::MXFP4, 1), (DType::NVFP4, 4)] {
        let k = dtype.block_len();
        // A block for each scale and code, in which that code is the only number that is not zero, each time elsewhere.
        let each: Vec<(u8, u8)> = (0..=254u8)
            .chain((dtype == DType::MXFP4).then_some(255))
            .flat_map(|scale| (0..16).map(move |code| (scale, code)))
            .collect();
        let mut bytes = Vec::new();
        for (i, &(scale, code)) in each.iter().enumerate() {
            let mut block = vec![0; dtype.block_bytes()];
            let number = i % (k / 2);
            block[scales + number] = if i / k % 2 == 0 { code } else { code << 4 };
            // Eight bytes of numbers have a scale of their own, if there are several.
            block[number / 8 % scales] = scale;
            bytes.extend(block);
        }
        let w = spec(dtype, &[each.len(), k]);
        let mut rows = vec![0f32; each.len() * k];
        dequantize_row(dtype, &bytes, &mut rows);
        let x = f32s(&*device, &vec![1.0; k]);
        let y = f32s(&*device, &vec![0.0; each.len()]);
        let w_buffer = device.import(Rc::new(Owned(bytes))).unwrap();
        bound(&*device, &sums(&w, k), &[&x, &w_buffer], &y)
            .execute(0)
            .unwrap();
        for ((row, got), (scale, code)) in rows.chunks_exact(k).zip(read(&y, each.len())).zip(each)
        {
            let expected: f32 = row.iter().sum();
            assert!(
                got == expected,
                "{dtype}, scale {scale}, code {code}: {got} is not {expected}"
            );
        }
        let ran = device.ran("mul_mat");
        assert!(ran.on_mlx > 0 && ran.on_cpu == 0, "{dtype}: {ran:?}");
    }
}

#[test]
fn a_scale_that_mlx_has_no_number_for_is_refused_by_its_name() {
    let device = open();
    let w = spec(DType::NVFP4, &[2, 64]);
    let mut bytes = blocks(&w, 3);
    bytes[36 + 2] = 0xff;
    let x = f32s(&*device, &[1.0; 64]);
    let y = f32s(&*device, &[0.0; 2]);
    let w_buffer = device.import(Rc::new(Owned(bytes))).unwrap();
    let mut plan = bound(&*device, &sums(&w, 64), &[&x, &w_buffer], &y);
    let refused = plan.execute(0).unwrap_err();
    assert!(matches!(refused, DeviceError::Unsupported { .. }));
    let said = refused.to_string();
    assert!(said.contains("nvfp4") && said.contains("0xff"), "{said}");
    assert_eq!(device.prepared_bytes(), 0);
}

fn bound(device: &dyn Device, graph: &Graph, inputs: &[&Buffer], output: &Buffer) -> Box<dyn Plan> {
    let mut plan = device.plan(graph, &PlanHints::default()).unwrap();
    for (i, buffer) in inputs.iter().enumerate() {
        plan.bind(Slot::Input(i), buffer, 0).unwrap();
    }
    plan.bind(Slot::Output(0), output, 0).unwrap();
    plan
}

#[test]
fn forms_are_made_once_and_stay_as_long_as_their_memory() {
    let device = open();
    let (n, k) = (64, 256);
    let w = spec(DType::Q4K, &[n, k]);
    let graph = product(&w, k);
    let region: Rc<dyn HostRegion> = Rc::new(Owned(blocks(&w, 11)));
    let x = f32s(&*device, &vec![0.25; k * k]);
    let y = f32s(&*device, &vec![0.0; n * k]);
    assert_eq!(device.prepared_bytes(), 0);
    let import = || device.import(Rc::clone(&region)).unwrap();
    let first = import();
    let mut plan = bound(&*device, &graph, &[&x, &first], &y);
    plan.execute(0).unwrap();
    let made = device.prepared_bytes();
    // Four bits a number, and a scale and a bias for 32 of them.
    assert_eq!(made, n * k / 2 + n * k / 32 * 8);
    // Another plan, and another buffer of the same memory, find it.
    let second = import();
    let mut other = bound(&*device, &graph, &[&x, &second], &y);
    other.execute(0).unwrap();
    assert_eq!(device.prepared_bytes(), made);
    // It outlives plans that are released, as sessions release theirs.
    plan.release();
    drop((plan, other, first));
    assert_eq!(device.prepared_bytes(), made);
    let mut again = bound(&*device, &graph, &[&x, &second], &y);
    again.execute(0).unwrap();
    assert_eq!(device.prepared_bytes(), made);
    drop(again);
    // It ends with the last buffer.
    drop(second);
    assert_eq!(device.prepared_bytes(), 0);
    // Memory that somebody may write is read anew each time.
    let writable = device.allocate("w", w.bytes(0).unwrap()).unwrap();
    let mut plan = bound(&*device, &graph, &[&x, &writable], &y);
    plan.execute(0).unwrap();
    assert!(read(&y, n * k).iter().all(|v| *v == 0.0));
    writable.write(0, &blocks(&w, 13)).unwrap();
    plan.execute(0).unwrap();
    assert!(read(&y, n * k).iter().any(|v| *v != 0.0));
    assert_eq!(device.prepared_bytes(), 0);
}

#[test]
fn a_plan_counts_the_copies_of_its_constants() {
    let device = open();
    let dry = PlanHints {
        allocate: false,
        ..PlanHints::default()
    };
    let (n, k) = (256, 512);
    let arena = |dtype| {
        let graph = product(&spec(dtype, &[n, k]), k);
        device.plan(&graph, &dry).unwrap().memory().arena
    };
    // Eight bytes for 32 numbers besides those of four bits; all of four bytes where MLX has no such blocks.
    let (small, large) = (arena(DType::Q4_0), arena(DType::Q6K));
    // One byte for 32 numbers, or for 16.
    let (least, less) = (arena(DType::MXFP4), arena(DType::NVFP4));
    assert_eq!(small - least, n * k / 32 * 7);
    assert_eq!(small - less, n * k / 32 * 6);
    assert!(small >= n * k / 2 + n * k / 4, "{small}");
    assert!(large >= n * k * 4, "{large}");
    assert!(large - small >= n * k * 3, "{small} {large}");
}

#[test]
fn experts_are_read_in_their_form_and_made_once() {
    let device = open();
    let cpu = CpuBackend.open("cpu:0", &[]).unwrap();
    let (experts, n, k, tokens, each) = (4, 32, 256, 5, 2);
    let all = [
        DType::F32,
        DType::Q4_0,
        DType::Q4K,
        DType::Q6K,
        DType::MXFP4,
        DType::NVFP4,
    ];
    for dtype in all {
        let w = spec(dtype, &[experts, n, k]);
        let mut g = GraphBuilder::new(0);
        let wv = g.constant("w", w.clone()).unwrap();
        let x = g.tensor("x", spec(DType::F32, &[tokens, 1, k])).unwrap();
        let ids = g.tensor("ids", spec(DType::I32, &[tokens, each])).unwrap();
        let y = g.mul_mat_id(wv, x, ids).unwrap();
        let graph = g.finish(&[y]).unwrap();
        let bytes: Vec<u8> = match dtype {
            DType::F32 => noise(experts * n * k, 3)
                .flat_map(|v| ((v >> 44) as f32 / 1e6 - 0.5).to_le_bytes())
                .collect(),
            _ => blocks(&w, 17),
        };
        let values: Vec<f32> = noise(tokens * k, 23)
            .map(|v| (v >> 44) as f32 / 1e6 - 0.5)
            .collect();
        let mut results = [Vec::new(), Vec::new()];
        for (device, result) in [&*device as &dyn Device, &*cpu]
            .into_iter()
            .zip(&mut results)
        {
            let w = device.import(Rc::new(Owned(bytes.clone()))).unwrap();
            let x = f32s(device, &values);
            let ids = device.allocate("ids", tokens * each * 4).unwrap();
            ids.write_i32(0, &[0, 3, 2, 2, 1, 0, 3, 1, 2, 0]).unwrap();
            let y = f32s(device, &vec![0.0; tokens * each * n]);
            let mut plan = bound(device, &graph, &[&w, &x, &ids], &y);
            plan.execute(0).unwrap();
            *result = read(&y, tokens * each * n);
        }
        let [ours, theirs] = results;
        let power: f32 = theirs.iter().map(|v| v * v).sum();
        let error: f32 = ours
            .iter()
            .zip(&theirs)
            .map(|(a, b)| (a - b) * (a - b))
            .sum();
        // The CPU backend rounds x to eight bits for weights in blocks.
        let most = if dtype == DType::F32 { 1e-10 } else { 1e-4 };
        assert!(error <= most * power, "{dtype}: {error} of {power}");
    }
    let ran = device.ran("mul_mat_id");
    assert!(ran.on_mlx == all.len() as u64 && ran.on_cpu == 0, "{ran:?}");
}
