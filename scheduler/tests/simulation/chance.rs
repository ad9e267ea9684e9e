//! Random numbers that a seed determines, and nothing else: no clock, no address, no order of a hash table.

use std::time::Duration;

/// SplitMix64. Streams made by [`Chance::of`] are independent of each other and of how much others drew.
#[derive(Clone, Debug)]
pub struct Chance(u64);

pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Chance {
    /// The numbers for one part of one run.
    pub fn of(seed: u64, part: &str) -> Self {
        let part = part
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| mix(h ^ u64::from(b)));
        Self(mix(seed).wrapping_add(part))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// From `from` to `to`, both included.
    pub fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.within(from, to))
    }
}
