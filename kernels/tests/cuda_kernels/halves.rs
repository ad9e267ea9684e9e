//! Products with weights of 16 bits: near the exact ones, and the same bits by every kernel.

use hotcell_graph::DType;

use super::{
    chosen::{Choices, nobody},
    common::{decode, encode},
    products::{NO_FURTHER, activations, at_once, bits},
    shim::{Arg, Shim, reported},
};

const TYPES: [(DType, &str); 2] = [(DType::F16, "f16"), (DType::BF16, "bf16")];

/// Kernels of few rows: eights of these, and what a block has.
const FEW: [(usize, [usize; 3]); 3] = [(1, [8, 16, 256]), (2, [16, 16, 256]), (4, [32, 16, 256])];

fn weights(dtype: DType, n: usize, seed: u64) -> Vec<u8> {
    let numbers = activations(n, seed);
    let encoded = |v: &f32| encode(dtype, f64::from(*v));
    numbers.iter().flat_map(encoded).collect()
}

/// A product `[rows, n]` by the kernel for few rows.
fn few(
    shim: &Shim,
    name: &str,
    (eights, each): (usize, [usize; 3]),
    w: &[u8],
    x: &[f32],
    (n, k, rows): (usize, usize, usize),
) -> Vec<f32> {
    let begin = |w: Arg| vec![w, x.into(), Arg::from(k as i64)];
    let kernel = format!("mul_half_{name}_{eights}");
    let w = [w.to_vec()];
    let mut found = at_once(shim, &kernel, each, &w, &[n], (k, rows), &begin);
    found.remove(0)
}

/// A product `[rows, n]` by tiles.
fn many(
    shim: &Shim,
    name: &str,
    w: &[u8],
    x: &[f32],
    (n, k, rows): (usize, usize, usize),
) -> Vec<f32> {
    // Something between the rows of the result, which stays.
    let stride = n + 1;
    let mut out = vec![-7.0f32; rows * stride];
    let mut bad = vec![0u64; 2];
    let int = |n: usize| Arg::from(n as i32);
    let mut args = vec![
        w.into(),
        x.into(),
        Arg::from(k as i64),
        (&mut out).into(),
        Arg::from(stride as i64),
        int(n),
        int(k),
        int(rows),
        NO_FURTHER,
    ];
    args.extend(nobody(&mut bad));
    let grid = [n.div_ceil(128), rows.div_ceil(64), 1];
    shim.launch(&format!("half_tile_{name}"), grid, 128, &args)
        .unwrap();
    assert_eq!(reported(&bad), None, "{name}");
    assert!(out.chunks(stride).all(|row| row[n] == -7.0), "{name}");
    out.chunks(stride)
        .flat_map(|row| row[..n].to_vec())
        .collect()
}

/// Of each output the exact product, and the sum of its terms' sizes.
fn exact(dtype: DType, w: &[u8], x: &[f32], k: usize) -> Vec<(f64, f64)> {
    let w: Vec<f64> = w.chunks(2).map(|w| decode(dtype, w)).collect();
    let mut all = Vec::new();
    for x in x.chunks(k) {
        for w in w.chunks(k) {
            let terms = w.iter().zip(x).map(|(w, x)| w * f64::from(*x));
            all.push(terms.fold((0.0, 0.0), |(sum, size), term| {
                (sum + term, size + term.abs())
            }));
        }
    }
    all
}

#[test]
fn products_with_halves_are_near_the_exact_ones_and_the_same_by_every_kernel() {
    let Some(shim) = Shim::get() else { return };
    // Odd ones, whole eights, whole chunks; ranges without chunks, and of several, of which some have fewer.
    let sizes = [
        (1, 1, 1),
        (17, 37, 9),
        (65, 136, 66),
        (130, 96, 3),
        (5, 1032, 70),
        (34, 2080, 5),
    ];
    for (dtype, name) in TYPES {
        for (n, k, rows) in sizes {
            let w = weights(dtype, n * k, 4);
            let x = activations(rows * k, 5);
            let found = many(shim, name, &w, &x, (n, k, rows));
            let what = format!("{dtype} [{n}, {k}], {rows} rows");
            for (i, (found, (exact, size))) in found.iter().zip(exact(dtype, &w, &x, k)).enumerate()
            {
                let apart = (f64::from(*found) - exact).abs();
                // Roundings of a chain, of which each is half a unit of what there is so far.
                let steps = (3 * k.div_ceil(32).div_ceil(8) * 4 + 8) as f64;
                assert!(
                    apart <= steps * size * 2f64.powi(-25),
                    "{what}, output {i}: {found}, exactly {exact}"
                );
            }
            for each in FEW {
                let alike = few(shim, name, each, &w, &x, (n, k, rows));
                assert_eq!(bits(&alike), bits(&found), "{what} by {} eights", each.0);
            }
            // Where nothing can be loaded by eights.
            let moved = [&[0, 0], &w[..]].concat();
            let alike = many(shim, name, &moved[2..], &x, (n, k, rows));
            assert_eq!(bits(&alike), bits(&found), "{what}, moved");
            let numbers = [&[0.0], &x[..]].concat();
            let alike = many(shim, name, &w, &numbers[1..], (n, k, rows));
            assert_eq!(bits(&alike), bits(&found), "{what}, numbers moved");
            // Each row by itself.
            for row in [0, rows / 2, rows - 1] {
                let alone = few(shim, name, FEW[0], &w, &x[row * k..][..k], (n, k, 1));
                assert_eq!(
                    bits(&alone),
                    bits(&found[row * n..][..n]),
                    "{what}, row {row} alone"
                );
            }
        }
    }
}

/// No bit of an activation is lost, nor of a weight.
#[test]
fn single_products_with_halves_are_rounded_once() {
    let Some(shim) = Shim::get() else { return };
    let (n, k, rows) = (40, 32, 8);
    for (dtype, name) in TYPES {
        let mut w = vec![0u8; n * k * 2];
        let mut x = vec![0.0f32; rows * k];
        let of_w = activations(n, 11);
        let of_x: Vec<f32> = activations(rows, 12).iter().map(|x| x / 3.0).collect();
        for (o, v) in of_w.iter().enumerate() {
            // Each at a place of its own, of which there are as many as of instructions' places.
            for at in 0..k {
                w[(o * k + at) * 2..][..2].copy_from_slice(&encode(dtype, f64::from(*v)));
            }
        }
        for (r, v) in of_x.iter().enumerate() {
            x[r * k + (r * 5 + 3) % k] = *v;
        }
        for found in [
            few(shim, name, FEW[0], &w, &x, (n, k, rows)),
            many(shim, name, &w, &x, (n, k, rows)),
        ] {
            for (i, found) in found.iter().enumerate() {
                let w = decode(dtype, &w[i % n * k * 2..][..2]);
                let product = w * f64::from(of_x[i / n]);
                // Three or six parts' products, added one after the other.
                let apart = (f64::from(*found) - product).abs();
                assert!(
                    apart <= 3.0 * product.abs() * 2f64.powi(-24),
                    "{dtype} {i}: {found}, {product}"
                );
            }
        }
    }
}

#[test]
fn what_is_no_number_stays_in_its_row() {
    let Some(shim) = Shim::get() else { return };
    let (n, k, rows) = (20, 70, 6);
    for (dtype, name) in TYPES {
        let w = weights(dtype, n * k, 7);
        let mut x = activations(rows * k, 8);
        let good = many(shim, name, &w, &x, (n, k, rows));
        x[k + 3] = f32::INFINITY;
        x[3 * k + 69] = f32::NEG_INFINITY;
        // Its upper half alone would be an infinity.
        x[4 * k + 40] = f32::from_bits(0x7f80_0001);
        for found in [
            few(shim, name, FEW[0], &w, &x, (n, k, rows)),
            many(shim, name, &w, &x, (n, k, rows)),
        ] {
            for (i, found) in found.iter().enumerate() {
                let weight = |at: usize| decode(dtype, &w[(i % n * k + at) * 2..][..2]) as f32;
                let nan = f32::from_bits(0x7fc0_0000);
                let expected = match i / n {
                    // A second part of the weight may be zero.
                    1 | 3 if dtype == DType::F16 && !found.is_infinite() => nan,
                    1 => f32::INFINITY * weight(3),
                    3 => f32::NEG_INFINITY * weight(69),
                    4 => nan,
                    _ => good[i],
                };
                assert_eq!(found.to_bits(), expected.to_bits(), "{dtype} {i}");
            }
        }
    }
}

#[test]
fn several_matrices_of_halves_in_a_launch_give_what_each_gives() {
    let Some(shim) = Shim::get() else { return };
    let (k, rows) = (40, 3);
    let x = activations(rows * k, 21);
    for sizes in [&[9, 17, 3][..], &[16, 1], &[64, 16, 130]] {
        for (dtype, name) in TYPES {
            let seeded = |(i, n): (usize, &usize)| weights(dtype, n * k, i as u64 + 3);
            let w: Vec<Vec<u8>> = sizes.iter().enumerate().map(seeded).collect();
            let begin = |w: Arg| vec![w, (&x).into(), Arg::from(k as i64)];
            for (eights, each) in FEW {
                let kernel = format!("mul_half_{name}_{eights}");
                let found = at_once(shim, &kernel, each, &w, sizes, (k, rows), &begin);
                for ((w, n), found) in w.iter().zip(sizes).zip(found) {
                    let expected = many(shim, name, w, &x, (*n, k, rows));
                    assert_eq!(bits(&found), bits(&expected), "{dtype} {n} of {sizes:?}");
                }
            }
        }
    }
}

#[test]
fn each_row_is_multiplied_by_its_expert_of_halves() {
    let Some(shim) = Shim::get() else { return };
    let (n, k) = (18, 40);
    for (dtype, name) in TYPES {
        let vec = format!("mul_half_{name}_1");
        let tile = format!("half_tile_{name}");
        // Rows together, a block's outputs and threads, and tokens.
        for (kernel, together, outputs, threads, tokens) in [
            (&vec, None, 16, 256, 4),
            (&vec, Some(8), 16, 256, 4),
            (&tile, Some(64), 128, 128, 90),
        ] {
            for shared in [true, false] {
                let choices = Choices::of_three(tokens, shared);
                let w = weights(dtype, choices.experts * n * k, 6);
                let each = w.len() / choices.experts;
                let x = activations(choices.rows() * k, 7);
                let begin = [(&w).into(), (&x).into(), Arg::from(k as i64)];
                let taken = choices.taken(shim, together);
                let by = (kernel.as_str(), outputs, threads);
                let out = taken.products(shim, by, &begin, [n, k], None);
                for row in 0..choices.ids.len() {
                    let x = &x[choices.from(row) * k..][..k];
                    let expected = choices.expert(row).map_or(vec![0.0; n], |expert| {
                        let w = &w[expert * each..][..each];
                        few(shim, name, FEW[0], w, x, (n, k, 1))
                    });
                    let found = &out[row * n..][..n];
                    assert_eq!(bits(found), bits(&expected), "{kernel}, row {row}");
                }
            }
        }
    }
}
