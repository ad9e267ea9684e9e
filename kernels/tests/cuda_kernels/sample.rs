//! Draws are those of the worker's sampler: where the sum of weights passes the noise.

use hotcell_kernels::cpu::{
    draw::{Limits, draw, draw_among, halves, uniform},
    lanes::exp,
    path::CpuPath,
};

use super::{
    products::activations,
    shim::{Arg, Shim},
};

#[test]
fn tokens_are_drawn_where_the_sum_of_weights_passes_the_noise() {
    let Some(shim) = Shim::get() else { return };
    for n in [1, 255, 1003] {
        let rows = 40;
        let mut x = activations(n, 13).repeat(rows);
        x.iter_mut().for_each(|v| *v *= 3.0);
        let mut temperatures = vec![0.7f32; rows];
        temperatures[3] = 0.0;
        x[5 * n + n / 2] = f32::NAN;
        x[6 * n..7 * n].fill(f32::NEG_INFINITY);
        x[7 * n] = f32::NEG_INFINITY;
        temperatures[8] = f32::NAN;
        // Of minus infinity, NaN is made here.
        x[9 * n] = f32::NEG_INFINITY;
        temperatures[9] = f32::INFINITY;
        let noise_of = |row: usize| (row as u64) << 33 | 9;
        let noise: Vec<u32> = (0..rows)
            .flat_map(|i| {
                let [low, high] = halves(noise_of(i));
                [low, high, i as u32 % 3, 100 * i as u32]
            })
            .collect();
        let mut out = vec![-9i32; rows];
        let args = [
            (&x).into(),
            (&temperatures).into(),
            (&noise).into(),
            (&mut out).into(),
            Arg::from(n as i32),
        ];
        shim.launch("draw_f32", [rows, 1, 1], 256, &args).unwrap();
        for (r, x) in x.chunks(n).enumerate() {
            let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let expected = if x.iter().any(|v| v.is_nan()) || most == f32::NEG_INFINITY {
                None
            } else if temperatures[r] == 0.0 {
                x.iter().position(|v| *v == most)
            } else {
                let weight = |v: &f32| f64::from(exp((v - most) / temperatures[r]));
                let total: f64 = x.iter().map(weight).sum();
                let target = uniform(noise_of(r), r as u32 % 3, 100 * r as u32) * total;
                let mut sum = 0.0;
                x.iter().position(|v| {
                    sum += weight(v);
                    target < sum
                })
            };
            let token = |id: Option<usize>| id.map_or(-1, |i| i as i32);
            // Where some weights are NaN, there is no such place.
            if r != 9 {
                assert_eq!(out[r], token(expected), "row {r} of {n}");
            }
            let noise = [0, 1, 2, 3].map(|i| noise[4 * r + i]);
            let drawn = draw(CpuPath::detect(), x, temperatures[r], noise);
            assert_eq!(out[r], token(drawn.map(|i| i as usize)), "row {r} of {n}");
        }
    }
}

#[test]
fn tokens_are_drawn_among_those_that_limits_leave() {
    let Some(shim) = Shim::get() else { return };
    let numbers = [0.0, 1.0, 2.0, 40.0, 255.0, 256.0, 257.0, 1e9, f32::NAN];
    let shares = [1.0, 0.0, 0.3, 0.9, 0.999, f32::NAN];
    let least = [0.0, 0.01, 0.4, 1.0, f32::NAN];
    let mut kinds = vec![];
    for k in numbers {
        for p in shares {
            kinds.extend(least.map(|m| [k, p, m]));
        }
    }
    let (mut drawn, mut none) = (0, 0);
    for n in [1, 7, 256, 257, 1003] {
        let rows = kinds.len();
        let mut x = activations(rows * n, 17);
        // Some rows are sharp, some flat, in some all are equal or few are possible, and there are zeros of both signs.
        for (row, x) in x.chunks_mut(n).enumerate() {
            let scale = [4.0, 1.0, 0.1, 0.0][row % 4];
            x.iter_mut()
                .for_each(|v| *v = (*v * scale * 8.0).round() / 8.0);
            if row % 7 == 0 {
                let rest = x.iter_mut().skip(1).step_by(2);
                rest.for_each(|v| *v = f32::NEG_INFINITY);
            }
        }
        x[n / 2] = f32::NAN;
        let mut temperatures = vec![0.8f32; rows];
        temperatures[5] = 0.0;
        let noise_of = |row: usize| {
            let [low, high] = halves(row as u64 * 0x9e37_79b9 + n as u64);
            [low, high, row as u32 % 3, 100 * row as u32]
        };
        let noise: Vec<u32> = (0..rows).flat_map(noise_of).collect();
        let limits: Vec<f32> = kinds.iter().flatten().copied().collect();
        let mut out = vec![-9i32; rows];
        let args = [
            (&x).into(),
            (&temperatures).into(),
            (&noise).into(),
            (&limits).into(),
            (&mut out).into(),
            Arg::from(n as i32),
        ];
        shim.launch("draw_among_f32", [rows, 1, 1], 256, &args)
            .unwrap();
        for (row, (x, kind)) in x.chunks(n).zip(&kinds).enumerate() {
            let limits = Limits::of(*kind);
            let token = draw_among(
                CpuPath::detect(),
                x,
                temperatures[row],
                noise_of(row),
                limits,
            );
            let expected = token.map_or(-1, |t| t as i32);
            assert_eq!(out[row], expected, "row {row} of {n}: {kind:?}");
            match token {
                Some(_) => drawn += 1,
                None => none += 1,
            }
        }
    }
    assert!(drawn > 1000 && none > 50, "{drawn}, {none}");
}
