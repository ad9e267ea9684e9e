//! A case's decisions.

/// A stream of numbers that a seed decides (SplitMix64, Steele et al. 2014).
#[derive(Clone, Debug)]
pub struct Choices(u64);

impl Choices {
    /// The decisions of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 for 0.
    pub fn below(&mut self, n: usize) -> usize {
        match n {
            0 => 0,
            n => (self.number() % n as u64) as usize,
        }
    }

    /// Yes, once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of these.
    ///
    /// # Panics
    /// When there are none.
    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

/// The seed of case `index` of a run.
pub fn case_seed(run: u64, index: u64) -> u64 {
    Choices::new(run ^ index.wrapping_mul(0xd134_2543_de82_ef95)).number()
}
