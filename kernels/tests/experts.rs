//! Products with chosen experts have the bits of a product with each expert alone.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Device, DeviceError},
    cpu::{CpuDevice, dequant::is_weight_dtype, matmul::mul_mat, path::CpuPath},
    plan::{PlanHints, Slot},
};

use common::{f32_bytes, numbers};

/// Random bytes, with every f16 exponent that could be infinite cleared; numbers for f32.
fn weights(dtype: DType, rows: usize, k: usize) -> Vec<u8> {
    if dtype == DType::F32 {
        return f32_bytes(&numbers(rows * k, 3));
    }
    let bytes = dtype.row_bytes(k).unwrap() * rows;
    let byte = |v: &f32| (v * 127.0) as i8 as u8 & 0xbb;
    numbers(bytes, 5).iter().map(byte).collect()
}

/// A product of up to `tokens` symbolic rows with `used` experts each.
struct Case {
    dtype: DType,
    experts: usize,
    n: usize,
    k: usize,
    tokens: usize,
    used: usize,
    /// Whether a token has one row for all its experts.
    shared: bool,
}

impl Case {
    fn run(
        &self,
        threads: u32,
        path: CpuPath,
        w: &[u8],
        x: &[f32],
        (ids_dtype, ids): (DType, &[u8]),
        rows: usize,
    ) -> Result<Vec<u8>, DeviceError> {
        let device = CpuDevice::with_path(threads, path)?;
        let mut g = GraphBuilder::new(self.tokens);
        let experts = Shape::fixed(&[self.experts, self.n, self.k]).unwrap();
        let per_token = if self.shared { 1 } else { self.used };
        let specs = [
            TensorSpec::new(self.dtype, experts).unwrap(),
            TensorSpec::new(DType::F32, Shape::rows(&[per_token, self.k]).unwrap()).unwrap(),
            TensorSpec::new(ids_dtype, Shape::rows(&[self.used]).unwrap()).unwrap(),
        ];
        let [w_spec, x_spec, ids_spec] = specs;
        let wv = g.constant("w", w_spec).unwrap();
        let xv = g.tensor("x", x_spec).unwrap();
        let iv = g.tensor("ids", ids_spec).unwrap();
        let y = g.mul_mat_id(wv, xv, iv).unwrap();
        let graph = g.finish(&[y]).unwrap();
        let mut plan = device.plan(&graph, &PlanHints::default())?;
        for (i, bytes) in [w, &f32_bytes(x), ids].into_iter().enumerate() {
            let buffer = device.allocate("input", bytes.len())?;
            buffer.write(0, bytes)?;
            plan.bind(Slot::Input(i), &buffer, 0)?;
        }
        let row = self.used * self.n * 4;
        let out = device.allocate("out", self.tokens * row)?;
        plan.bind(Slot::Output(0), &out, 0)?;
        plan.execute(rows)?;
        let mut bytes = vec![0; rows * row];
        out.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

fn i32_bytes(ids: &[i32]) -> Vec<u8> {
    ids.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

#[test]
fn each_choice_has_the_bits_of_its_expert_alone() {
    for dtype in DType::ALL.iter().copied().filter(|d| is_weight_dtype(*d)) {
        for shared in [true, false] {
            let k = if dtype.block_len() > 1 {
                2 * dtype.block_len()
            } else {
                45
            };
            let case = Case {
                dtype,
                experts: 5,
                n: 50,
                k,
                tokens: 40,
                used: 3,
                shared,
            };
            let w = weights(dtype, case.experts * case.n, k);
            let per_token = if shared { 1 } else { case.used };
            let x = numbers(case.tokens * per_token * k, 1);
            // Expert 3 is never chosen, expert 0 more often than is gathered at once; some count from the end.
            let ids: Vec<i32> = (0..case.tokens * case.used)
                .map(|i| [0, 1, 0, 2, 0, -1, 0, 4][i * 7 % 8])
                .collect();
            let one = w.len() / case.experts;
            let expected_on = |path| {
                let mut expected = Vec::new();
                for (i, &id) in ids.iter().enumerate() {
                    let expert = id.rem_euclid(5) as usize;
                    let row = if shared { i / case.used } else { i };
                    let w = &w[expert * one..][..one];
                    let x = &x[row * k..][..k];
                    expected.extend(f32_bytes(&mul_mat(path, dtype, w, case.n, x, 1, k)));
                }
                expected
            };
            for (threads, path) in [
                (1, CpuPath::detect()),
                (3, CpuPath::detect()),
                (2, CpuPath::Portable),
            ] {
                let expected = expected_on(path);
                for rows in [0, 1, 7, 40] {
                    let ids = (DType::I32, &i32_bytes(&ids)[..]);
                    let ours = case.run(threads, path, &w, &x, ids, rows).unwrap();
                    assert!(
                        ours == expected[..rows * case.used * case.n * 4],
                        "{dtype}, {rows} rows, {threads} threads, {path}"
                    );
                }
            }
        }
    }
}

#[test]
fn any_integers_are_ids_and_those_outside_are_errors() {
    let case = Case {
        dtype: DType::F32,
        experts: 4,
        n: 3,
        k: 2,
        tokens: 1,
        used: 2,
        shared: true,
    };
    let w = weights(DType::F32, 12, 2);
    let x = numbers(2, 1);
    let run = |dtype, ids: &[u8]| case.run(2, CpuPath::detect(), &w, &x, (dtype, ids), 1);
    let expected = run(DType::I32, &i32_bytes(&[3, 1])).unwrap();
    assert_eq!(run(DType::U8, &[3, 1]).unwrap(), expected);
    let wide: Vec<u8> = [-1i64, 1].iter().flat_map(|v| v.to_ne_bytes()).collect();
    assert_eq!(run(DType::I64, &wide).unwrap(), expected);
    for bad in [4, -5, i32::MIN, i32::MAX] {
        let error = run(DType::I32, &i32_bytes(&[0, bad])).unwrap_err();
        assert!(
            matches!(
                error,
                DeviceError::IndexOutOfRange {
                    op: "mul_mat_id",
                    bound: 4,
                    ..
                }
            ),
            "{error}"
        );
    }
    let huge: Vec<u8> = [0, u64::MAX].iter().flat_map(|v| v.to_ne_bytes()).collect();
    assert!(run(DType::U64, &huge).is_err());
}

#[test]
fn only_the_experts_that_are_chosen_take_time() {
    // Experts times choices are so many that a look at each pair would take minutes.
    let case = Case {
        dtype: DType::F32,
        experts: 1 << 20,
        n: 1,
        k: 1,
        tokens: 1 << 14,
        used: 1,
        shared: true,
    };
    let w: Vec<f32> = (0..case.experts).map(|i| i as f32).collect();
    let x = vec![2.0; case.tokens];
    let id = |t: usize| t * 12_345 % case.experts;
    let ids: Vec<i32> = (0..case.tokens).map(|t| id(t) as i32).collect();
    let expected: Vec<f32> = (0..case.tokens).map(|t| 2.0 * id(t) as f32).collect();
    let begin = std::time::Instant::now();
    let ids = (DType::I32, &i32_bytes(&ids)[..]);
    let ours = case.run(2, CpuPath::detect(), &f32_bytes(&w), &x, ids, case.tokens);
    assert_eq!(ours.unwrap(), f32_bytes(&expected));
    assert!(begin.elapsed().as_secs() < 20);
}
