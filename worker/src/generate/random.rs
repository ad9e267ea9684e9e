//! Noise by counter: the same (seed, branch, position) always draws the same number.
//!
//! Nothing here has state, so a worker that takes over a stream in the middle draws exactly what the dead one
//! would have drawn, and a batch's neighbours cannot change a draw. The generator is Threefry-2x32 with 20 rounds
//! (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the Random123 library).

/// The rotation distances of Threefry-2x32, from Random123's `threefry.h`.
const ROTATIONS: [u32; 8] = [13, 15, 26, 6, 17, 29, 16, 24];

/// Threefish's key schedule parity constant, 32-bit form (`SKEIN_KS_PARITY32`).
const PARITY: u32 = 0x1BD1_1BDA;

/// One block of Threefry-2x32 with 20 rounds: encrypts `counter` under `key`.
#[must_use]
pub fn threefry2x32(key: [u32; 2], counter: [u32; 2]) -> [u32; 2] {
    let schedule = [key[0], key[1], PARITY ^ key[0] ^ key[1]];
    let mut x0 = counter[0].wrapping_add(schedule[0]);
    let mut x1 = counter[1].wrapping_add(schedule[1]);
    for group in 0..5u32 {
        for round in 0..4 {
            x0 = x0.wrapping_add(x1);
            x1 = x1.rotate_left(ROTATIONS[(group as usize % 2) * 4 + round]) ^ x0;
        }
        let next = group as usize + 1;
        x0 = x0.wrapping_add(schedule[next % 3]);
        x1 = x1
            .wrapping_add(schedule[(next + 1) % 3])
            .wrapping_add(group + 1);
    }
    [x0, x1]
}

/// A uniform number in `[0, 1)` with 53 random bits, for one position of one branch of one request.
///
/// `position` is absolute: the index in the sequence (prompt included) of the token being drawn. `branch` tells
/// apart the answers of a request that asked for several.
#[must_use]
pub fn uniform(seed: u64, branch: u32, position: u32) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let [low, high] = threefry2x32(key, [position, branch]);
    let bits = (u64::from(high) << 32) | u64::from(low);
    // 53 bits fill a double's mantissa exactly, so the largest result is 1 - 2^-53, never 1.
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        // From Random123's kat_vectors: "threefry2x32 20 <counter> <key> <result>".
        assert_eq!(threefry2x32([0, 0], [0, 0]), [0x6b20_0159, 0x99ba_4efe]);
        assert_eq!(threefry2x32([!0, !0], [!0, !0]), [0x1cb9_96fc, 0xbb00_2be7]);
        assert_eq!(
            threefry2x32([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3]),
            [0xc492_3a9c, 0x483d_f7a0]
        );
    }

    #[test]
    fn uniform_stays_in_the_half_open_interval_and_fills_it() {
        let mut buckets = [0u32; 16];
        for position in 0..16_000 {
            let draw = uniform(0x0123_4567_89ab_cdef, 3, position);
            assert!((0.0..1.0).contains(&draw));
            buckets[(draw * 16.0) as usize] += 1;
        }
        // Chi-square with 15 degrees of freedom: 37.7 is the 0.1 % point.
        let chi: f64 = buckets
            .iter()
            .map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0)
            .sum();
        assert!(chi < 37.7, "chi-square {chi}");
    }

    #[test]
    fn every_coordinate_changes_the_draw() {
        let base = uniform(7, 0, 0);
        for other in [
            uniform(8, 0, 0),
            uniform(7, 1, 0),
            uniform(7, 0, 1),
            uniform(7 | 1 << 32, 0, 0),
        ] {
            assert_ne!(base.to_bits(), other.to_bits());
        }
    }
}
