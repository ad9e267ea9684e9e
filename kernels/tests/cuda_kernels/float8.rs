//! Products with weights of e4m3, with scales and without: near the exact ones, and the same bits by every kernel.

use hotcell_graph::DType;
use hotcell_kernels::cpu::dequant::dequantize_row;

use super::{
    chosen::{Choices, nobody},
    products::{activations, bits},
    shim::{Arg, Shim, reported},
};

/// Kernels of few rows: eights of these, and their rows and outputs.
const FEW: [(usize, [usize; 2]); 3] = [(1, [8, 16]), (2, [16, 16]), (4, [32, 16])];
const TILE: (usize, [usize; 2]) = (0, [64, 128]);

/// Bytes, but those that are no numbers.
fn weights(n: usize, seed: u64) -> Vec<u8> {
    let numbers = activations(n, seed).into_iter();
    numbers
        .map(|v| v.to_bits().to_le_bytes())
        .map(|[a, b, c, _]| a ^ b ^ c)
        .map(|code| if code & 0x7f == 0x7f { 0 } else { code })
        .collect()
}

fn decoded(w: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; w.len()];
    dequantize_row(DType::F8E4M3, w, &mut values);
    values
}

/// Rectangles of weights and how many of them there are.
#[derive(Clone, Copy)]
struct Rectangles {
    height: usize,
    width: usize,
    across: usize,
    down: usize,
}

impl Rectangles {
    fn of([height, width]: [usize; 2], [n, k]: [usize; 2]) -> Self {
        Self {
            height,
            width,
            across: k.div_ceil(width),
            down: n.div_ceil(height),
        }
    }

    fn scales(&self, seed: u64) -> Vec<f32> {
        activations(self.across * self.down, seed)
    }
}

/// `Scales` of the kernels.
fn words(values: &[&[f32]], of: Option<Rectangles>) -> [u64; 5] {
    let mut words = [0; 5];
    for (word, values) in words.iter_mut().zip(values) {
        *word = values.as_ptr() as u64;
    }
    if let Some(of) = of {
        words[3] = of.height as u64 | (of.width.div_ceil(32) as u64) << 32;
        words[4] = of.across as u64 | ((of.across * of.down) as u64) << 32;
    }
    words
}

/// Products of matrices of one launch, each `[rows, n]`, by the kernel for few rows or by tiles.
fn product(
    shim: &Shim,
    (eights, [together, outputs]): (usize, [usize; 2]),
    w: &[(&[u8], usize)],
    x: &[f32],
    (k, rows): (usize, usize),
    scales: &[u64; 5],
) -> Vec<Vec<f32>> {
    let mut out: Vec<Vec<f32>> = w.iter().map(|(_, n)| vec![-7.0; n * rows]).collect();
    let mut further = [0; 6];
    for i in 1..w.len() {
        further[i - 1] = w[i].0.as_ptr() as u64;
        further[2 + i - 1] = out[i].as_mut_ptr() as u64;
        further[4 + i - 1] = w[i].1 as u64;
    }
    let mut bad = vec![0u64; 2];
    let int = |n: usize| Arg::from(n as i32);
    let mut args = vec![
        w[0].0.into(),
        x.into(),
        Arg::from(k as i64),
        (&mut out[0]).into(),
        Arg::from(w[0].1 as i64),
        int(w[0].1),
        int(k),
        int(rows),
        Arg::words(&further),
    ];
    let (kernel, threads) = match eights {
        0 => ("float8_tile".to_owned(), 128),
        eights => (format!("mul_float8_{eights}"), 256),
    };
    args.extend(nobody(&mut bad));
    args.push(Arg::words(scales));
    let blocks = w.iter().map(|(_, n)| n.div_ceil(outputs)).sum();
    let grid = [blocks, rows.div_ceil(together), 1];
    shim.launch(&kernel, grid, threads, &args).unwrap();
    assert_eq!(reported(&bad), None);
    out
}

/// Of each output the exact product, and the sum of its terms' sizes.
fn exact(
    w: &[f32],
    x: &[f32],
    k: usize,
    scales: &[f32],
    of: Option<Rectangles>,
) -> Vec<(f64, f64)> {
    let mut all = Vec::new();
    for x in x.chunks(k) {
        for (n, w) in w.chunks(k).enumerate() {
            let scale = |i: usize| match of {
                None => 1.0,
                Some(of) => scales[n / of.height * of.across + i / of.width],
            };
            let terms = w.iter().zip(x).enumerate().map(|(i, (w, x))| {
                let w = f64::from(*w);
                match of {
                    Some(of) if of.across == 1 => w * f64::from(*x) * f64::from(scale(0)),
                    // Rounded before.
                    _ => w * f64::from(x * scale(i)),
                }
            });
            all.push(terms.fold((0.0, 0.0), |(sum, size), term| {
                (sum + term, size + term.abs())
            }));
        }
    }
    all
}

#[test]
fn products_with_floats_of_8_bits_are_near_the_exact_ones_and_the_same_by_every_kernel() {
    let Some(shim) = Shim::get() else { return };
    // Sizes, and rectangles; tiles take their scales only where these are as high as tiles.
    let cases = [
        ((1, 1, 1), None),
        ((17, 37, 9), None),
        ((65, 136, 66), None),
        ((17, 37, 9), Some([1, 37])),
        ((65, 136, 66), Some([5, 136])),
        ((130, 96, 3), Some([64, 32])),
        ((130, 200, 67), Some([128, 64])),
        ((70, 2080, 5), Some([16, 128])),
        ((34, 1032, 40), Some([34, 96])),
        ((80, 300, 9), Some([32, 288])),
    ];
    for ((n, k, rows), by) in cases {
        let w = weights(n * k, 4);
        let x = activations(rows * k, 5);
        let of = by.map(|by| Rectangles::of(by, [n, k]));
        let values = of.map_or_else(Vec::new, |of| of.scales(6));
        let scales = match of {
            None => words(&[], None),
            Some(_) => words(&[&values], of),
        };
        let one = |each, w: &[u8], x: &[f32], rows| {
            product(shim, each, &[(w, n)], x, (k, rows), &scales).remove(0)
        };
        let found = one(FEW[0], &w, &x, rows);
        let what = format!("[{n}, {k}] by {by:?}, {rows} rows");
        let expected = exact(&decoded(&w), &x, k, &values, of);
        for (i, (found, (exact, size))) in found.iter().zip(expected).enumerate() {
            let apart = (f64::from(*found) - exact).abs();
            let steps = (3 * k.div_ceil(32).div_ceil(8) * 2 + 10) as f64;
            assert!(
                apart <= steps * size * 2f64.powi(-25),
                "{what}, output {i}: {found}, exactly {exact}"
            );
        }
        let tall = of.is_none_or(|of| of.across == 1 || of.height % 64 == 0 || of.height >= n);
        for each in FEW.into_iter().chain(tall.then_some(TILE)) {
            let alike = one(each, &w, &x, rows);
            assert_eq!(bits(&alike), bits(&found), "{what} by {} eights", each.0);
            // Where nothing can be loaded by eights.
            let moved = [&[0], &w[..]].concat();
            let alike = one(each, &moved[1..], &x, rows);
            assert_eq!(bits(&alike), bits(&found), "{what}, moved");
        }
        for row in [0, rows / 2, rows - 1] {
            let alone = one(FEW[0], &w, &x[row * k..][..k], 1);
            let of_row = &found[row * n..][..n];
            assert_eq!(bits(&alone), bits(of_row), "{what}, row {row} alone");
        }
    }
}

/// Each code by itself, the smallest ones and those of a NaN too.
#[test]
fn every_code_of_8_bits_is_its_number() {
    let Some(shim) = Shim::get() else { return };
    let w: Vec<u8> = (0..=255).collect();
    let scales = words(&[], None);
    for each in FEW.into_iter().chain([TILE]) {
        let found = product(shim, each, &[(&w, 256)], &[1.0], (1, 1), &scales).remove(0);
        for (code, (found, expected)) in found.iter().zip(decoded(&w)).enumerate() {
            let equal = *found == expected || found.is_nan() && expected.is_nan();
            assert!(equal, "{code}: {found}, not {expected}");
        }
    }
}

#[test]
fn several_scaled_matrices_in_a_launch_give_what_each_gives() {
    let Some(shim) = Shim::get() else { return };
    let (k, rows) = (128, 3);
    let x = activations(rows * k, 21);
    for (sizes, by) in [
        (&[64, 192, 70][..], [64, 64]),
        (&[128, 5], [128, 32]),
        (&[9, 17, 3], [1, 128]),
    ] {
        let kinds: Vec<Rectangles> = (sizes.iter())
            .map(|n| Rectangles::of(by, [*n, k]))
            .collect();
        let w: Vec<Vec<u8>> = (sizes.iter().zip(3..))
            .map(|(n, seed)| weights(n * k, seed))
            .collect();
        let values: Vec<Vec<f32>> = (kinds.iter().zip(9..))
            .map(|(of, seed)| of.scales(seed))
            .collect();
        let all: Vec<(&[u8], usize)> = (w.iter().zip(sizes)).map(|(w, n)| (&w[..], *n)).collect();
        let slices: Vec<&[f32]> = values.iter().map(|v| &v[..]).collect();
        for each in FEW.into_iter().chain([TILE]) {
            let scales = words(&slices, Some(kinds[0]));
            let found = product(shim, each, &all, &x, (k, rows), &scales);
            for (i, found) in found.iter().enumerate() {
                let scales = words(&slices[i..=i], Some(kinds[i]));
                let alone = product(shim, each, &all[i..=i], &x, (k, rows), &scales);
                assert_eq!(bits(found), bits(&alone[0]), "matrix {i} of {sizes:?}");
            }
        }
    }
}

#[test]
fn each_row_is_multiplied_by_its_expert_with_its_scales() {
    let Some(shim) = Shim::get() else { return };
    for (by, n, k) in [([16, 32], 18, 96), ([1, 96], 18, 96), ([64, 32], 130, 72)] {
        let of = Rectangles::of(by, [n, k]);
        // Rows together, a block's outputs and threads, and tokens.
        for (kernel, together, outputs, threads, tokens) in [
            ("mul_float8_1", None, 16, 256, 4),
            ("mul_float8_1", Some(8), 16, 256, 4),
            ("float8_tile", Some(64), 128, 128, 90),
        ] {
            // Tiles' warps are within one rectangle's height, or take scales at the end.
            if together == Some(64) && by[0] == 16 {
                continue;
            }
            for shared in [true, false] {
                let choices = Choices::of_three(tokens, shared);
                let experts = choices.experts;
                let w = weights(experts * n * k, 6);
                let each = of.across * of.down;
                let values = activations(experts * each, 8);
                let x = activations(choices.rows() * k, 7);
                let begin = [(&w).into(), (&x).into(), Arg::from(k as i64)];
                let taken = choices.taken(shim, together);
                let scales = Arg::words(&words(&[&values], Some(of)));
                let by = (kernel, outputs, threads);
                let out = taken.products(shim, by, &begin, [n, k], Some(scales));
                for row in 0..choices.ids.len() {
                    let x = &x[choices.from(row) * k..][..k];
                    let expected = choices.expert(row).map_or(vec![0.0; n], |expert| {
                        let w = &w[expert * n * k..][..n * k];
                        let scales = words(&[&values[expert * each..]], Some(of));
                        product(shim, FEW[0], &[(w, n)], x, (k, 1), &scales).remove(0)
                    });
                    let found = &out[row * n..][..n];
                    assert_eq!(
                        bits(found),
                        bits(&expected),
                        "{kernel} by {by:?}, row {row}"
                    );
                }
            }
        }
    }
}
