//! Draws are those of the worker's sampler: where the sum of weights passes the noise.

use hotcell_kernels::cpu::lanes::exp;

use super::{
    products::activations,
    shim::{Arg, Shim},
};

/// The same generator, written another way than the kernel's: rotations and keys by the round's number.
fn uniform(seed: u64, branch: u32, position: u32) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let keys = [key[0], key[1], 0x1BD1_1BDA ^ key[0] ^ key[1]];
    let (mut a, mut b) = (position.wrapping_add(keys[0]), branch.wrapping_add(keys[1]));
    for (round, by) in [13, 15, 26, 6, 17, 29, 16, 24]
        .into_iter()
        .cycle()
        .take(20)
        .enumerate()
    {
        a = a.wrapping_add(b);
        b = b.rotate_left(by) ^ a;
        if round % 4 == 3 {
            let group = round / 4 + 1;
            a = a.wrapping_add(keys[group % 3]);
            b = b
                .wrapping_add(keys[(group + 1) % 3])
                .wrapping_add(group as u32);
        }
    }
    ((u64::from(b) << 32 | u64::from(a)) >> 11) as f64 / (1u64 << 53) as f64
}

#[test]
fn tokens_are_drawn_where_the_sum_of_weights_passes_the_noise() {
    let Some(shim) = Shim::get() else { return };
    // The first of Random123's known answers.
    assert_eq!(
        uniform(0, 0, 0),
        (0x99ba_4efe_6b20_0159u64 >> 11) as f64 / (1u64 << 53) as f64
    );
    for n in [1, 255, 1003] {
        let rows = 40;
        let mut x = activations(n, 13).repeat(rows);
        x.iter_mut().for_each(|v| *v *= 3.0);
        let mut temperatures = vec![0.7f32; rows];
        temperatures[3] = 0.0;
        x[5 * n + n / 2] = f32::NAN;
        x[6 * n..7 * n].fill(f32::NEG_INFINITY);
        x[7 * n] = f32::NEG_INFINITY;
        let seeds: Vec<u64> = (0..rows as u64).map(|i| i << 33 | 9).collect();
        let branches: Vec<u32> = (0..rows as u32).map(|i| i % 3).collect();
        let positions: Vec<u32> = (0..rows as u32).map(|i| 100 * i).collect();
        let mut out = vec![-9i32; rows];
        let args = [
            (&x).into(),
            (&temperatures).into(),
            (&seeds).into(),
            (&branches).into(),
            (&positions).into(),
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
                let target = uniform(seeds[r], branches[r], positions[r]) * total;
                let mut sum = 0.0;
                x.iter().position(|v| {
                    sum += weight(v);
                    target < sum
                })
            };
            assert_eq!(out[r], expected.map_or(-1, |i| i as i32), "row {r} of {n}");
        }
    }
}
