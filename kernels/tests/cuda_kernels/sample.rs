//! Draws are those of the worker's sampler: where the sum of weights passes the noise.

use hotcell_kernels::cpu::{
    draw::{draw, halves, uniform},
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
