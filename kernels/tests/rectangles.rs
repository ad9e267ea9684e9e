//! Products with weights that have scales: the bits of products with activations that were multiplied with these before.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use half::{bf16, f16};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::Device,
    cpu::{
        CpuDevice,
        matmul::{mul_mat, pack},
        path::CpuPath,
    },
    lower::without,
    plan::{Plan, PlanHints, Slot},
};

use common::{buffer, f32_bytes, numbers, rows, spec};

fn weights(dtype: DType, n: usize) -> Vec<u8> {
    let numbers = numbers(n, 7);
    let numbers = numbers.iter();
    match dtype {
        DType::F32 => numbers.flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => numbers
            .flat_map(|v| f16::from_f32(*v).to_le_bytes())
            .collect(),
        DType::BF16 => numbers
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect(),
        // All codes but the NaNs.
        _ => numbers
            .map(|v| (v * 126.0) as i8 as u8)
            .map(|code| if code & 0x7f == 0x7f { 0 } else { code })
            .collect(),
    }
}

/// One row's products by the letter: each output by itself.
fn expected(
    path: CpuPath,
    dtype: DType,
    w: &[u8],
    x: &[f32],
    scales: &[f32],
    [rows, columns]: [usize; 2],
) -> Vec<f32> {
    let k = x.len();
    let across = k.div_ceil(columns);
    let of_row = |(n, w): (usize, &[u8])| {
        let of_band = &scales[n / rows * across..][..across];
        if let &[scale] = of_band {
            return mul_mat(path, dtype, w, 1, x, 1, k)[0] * scale;
        }
        let scaled: Vec<f32> = (0..k).map(|i| x[i] * of_band[i / columns]).collect();
        mul_mat(path, dtype, w, 1, &scaled, 1, k)[0]
    };
    let rows = w.chunks(dtype.row_bytes(k).unwrap());
    rows.enumerate().map(of_row).collect()
}

const DTYPES: [DType; 4] = [DType::F8E4M3, DType::BF16, DType::F16, DType::F32];

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// Runs a plan of what was bound and compares each number of rows with the beginning of what is expected.
fn compare(
    plan: &mut dyn Plan,
    device: &CpuDevice,
    width: usize,
    expected: &[f32],
    counts: &[usize],
    what: &str,
) {
    let out = device.allocate("out", expected.len() * 4).unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    for &m in counts {
        device.stream().execute(plan, m).unwrap();
        let mut y = vec![0.0; m * width];
        out.read_f32(0, &mut y).unwrap();
        assert_eq!(bits(&y), bits(&expected[..m * width]), "{what}, {m} rows");
    }
}

#[test]
fn activations_take_the_scales_on() {
    // More than take them on at a time.
    const MAX_ROWS: usize = 110;
    for dtype in DTYPES {
        for (n, k, by) in [
            (83usize, 77usize, [16, 32]),
            (83, 77, [5, 7]),
            (300, 128, [128, 128]),
            (300, 128, [100, 128]),
            (300, 128, [48, 64]),
            (300, 128, [40, 64]),
            (40, 192, [1, 192]),
            (40, 192, [1 << 31, 64]),
            (33, 64, [1 << 31, 1 << 31]),
            (48, 64, [16, 64]),
        ] {
            let [rows_of, columns] = by;
            let across = k.div_ceil(columns);
            let w = weights(dtype, n * k);
            let x = numbers(MAX_ROWS * k, 1);
            let scales = numbers(n.div_ceil(rows_of) * across, 3);
            let mut g = GraphBuilder::new(MAX_ROWS);
            let xv = g.tensor("x", rows(&[k])).unwrap();
            let wv = g.constant("w", spec(dtype, &[n, k])).unwrap();
            let of_scales = spec(DType::F32, &[n.div_ceil(rows_of), across]);
            let sv = g.constant("s", of_scales).unwrap();
            let y = g
                .mul_mat_scaled(xv, wv, sv, rows_of as i64, columns as i64)
                .unwrap();
            let graph = g.finish(&[y]).unwrap();
            for path in CpuPath::available() {
                let expected: Vec<f32> = x
                    .chunks(k)
                    .flat_map(|x| expected(path, dtype, &w, x, &scales, by))
                    .collect();
                for threads in [1, 3] {
                    let device = CpuDevice::with_path(threads, path).unwrap();
                    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
                    let x = buffer(&device, &f32_bytes(&x));
                    plan.bind(Slot::Input(0), &x, 0).unwrap();
                    // One byte in, so that weights are not aligned.
                    let shifted: Vec<u8> = std::iter::once(0).chain(w.iter().copied()).collect();
                    let shifted = buffer(&device, &shifted);
                    plan.bind(Slot::Input(1), &shifted, 1).unwrap();
                    let scales = buffer(&device, &f32_bytes(&scales));
                    plan.bind(Slot::Input(2), &scales, 0).unwrap();
                    let what = format!("{dtype} [{n}, {k}] by {by:?} on {path}, {threads} threads");
                    let counts = [0, 1, 2, 7, 31, 97, 110];
                    compare(plan.as_mut(), &device, n, &expected, &counts, &what);
                    if !pack::packs(dtype, n, k) {
                        continue;
                    }
                    let mut packed = vec![0; w.len()];
                    pack::pack(dtype, k, &w, &mut packed);
                    let packed = buffer(&device, &packed);
                    // Where a panel is of one rectangle, or activations take nothing on.
                    let fits = columns >= k || rows_of >= n || rows_of % 16 == 0;
                    let found = plan.bind_packed(Slot::Input(1), Some(&packed), 0).unwrap();
                    assert_eq!(found, fits, "{what}");
                    compare(plan.as_mut(), &device, n, &expected, &counts, &what);
                }
            }
        }
    }
}

#[test]
fn experts_have_their_own_scales() {
    const TOKENS: usize = 40;
    let (experts, n, k, used, by) = (5usize, 52usize, 64usize, 3, [24, 40]);
    let (down, across) = (n.div_ceil(by[0]), k.div_ceil(by[1]));
    for dtype in DTYPES {
        let w = weights(dtype, experts * n * k);
        let x = numbers(TOKENS * k, 1);
        let scales = numbers(experts * down * across, 3);
        // Expert 3 is never chosen, expert 0 more often than is gathered at once; some count from the end.
        let ids: Vec<i32> = (0..TOKENS * used)
            .map(|i| [0, 1, 0, 2, 0, -1, 0, 4][i * 7 % 8])
            .collect();
        let mut g = GraphBuilder::new(TOKENS);
        let wv = g.constant("w", spec(dtype, &[experts, n, k])).unwrap();
        let xv = g.tensor("x", rows(&[1, k])).unwrap();
        let ids_spec = TensorSpec::new(DType::I32, Shape::rows(&[used]).unwrap()).unwrap();
        let iv = g.tensor("ids", ids_spec).unwrap();
        let sv = g
            .constant("s", spec(DType::F32, &[experts, down, across]))
            .unwrap();
        let y = g
            .mul_mat_id_scaled(wv, xv, iv, sv, by[0] as i64, by[1] as i64)
            .unwrap();
        let graph = g.finish(&[y]).unwrap();
        for path in CpuPath::available() {
            let expected: Vec<f32> = (ids.iter().enumerate())
                .flat_map(|(i, id)| {
                    let expert = id.rem_euclid(experts as i32) as usize;
                    let w = &w[expert * w.len() / experts..][..w.len() / experts];
                    let scales = &scales[expert * down * across..][..down * across];
                    let x = &x[i / used * k..][..k];
                    self::expected(path, dtype, w, x, scales, by)
                })
                .collect();
            for threads in [1, 3] {
                let device = CpuDevice::with_path(threads, path).unwrap();
                let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
                let ids: Vec<u8> = ids.iter().flat_map(|v| v.to_ne_bytes()).collect();
                let all = [w.clone(), f32_bytes(&x), ids, f32_bytes(&scales)];
                for (i, bytes) in all.iter().enumerate() {
                    let bytes = buffer(&device, bytes);
                    plan.bind(Slot::Input(i), &bytes, 0).unwrap();
                }
                let what = format!("{dtype} on {path}, {threads} threads");
                let counts = [0, 1, 13, TOKENS];
                compare(plan.as_mut(), &device, used * n, &expected, &counts, &what);
            }
        }
    }
}

/// What devices without these kernels compute: the weights times their scales.
#[test]
fn the_parts_are_near() {
    let (n, k, by) = (83, 77, [16, 32]);
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let w = weights(DType::F8E4M3, n * k);
    let (x, scales) = (numbers(3 * k, 1), numbers(6 * 3, 3));
    let mut g = GraphBuilder::new(3);
    let xv = g.tensor("x", rows(&[k])).unwrap();
    let wv = g.constant("w", spec(DType::F8E4M3, &[n, k])).unwrap();
    let sv = g.constant("s", spec(DType::F32, &[6, 3])).unwrap();
    let y = g
        .mul_mat_scaled(xv, wv, sv, by[0] as i64, by[1] as i64)
        .unwrap();
    let graph = g.finish(&[y]).unwrap();
    let parts = without(&graph, "mul_mat_scaled").unwrap();
    let run = |graph| {
        let mut plan = device.plan(graph, &PlanHints::default()).unwrap();
        for (i, bytes) in [f32_bytes(&x), w.clone(), f32_bytes(&scales)]
            .iter()
            .enumerate()
        {
            plan.bind(Slot::Input(i), &buffer(&device, bytes), 0)
                .unwrap();
        }
        let out = device.allocate("out", 3 * n * 4).unwrap();
        plan.bind(Slot::Output(0), &out, 0).unwrap();
        plan.execute(3).unwrap();
        let mut y = vec![0.0; 3 * n];
        out.read_f32(0, &mut y).unwrap();
        y
    };
    let (whole, parts) = (run(&graph), run(&parts));
    let largest = whole.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    assert!(largest > 1.0);
    for (a, b) in whole.iter().zip(&parts) {
        assert!((a - b).abs() <= 1e-5 * largest, "{a} and {b}");
    }
}
