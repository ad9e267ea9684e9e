//! Which cache blocks are free.

/// The free blocks of one model's cache.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<i32>,
    total: usize,
}

impl BlockPool {
    /// All of `total` blocks are free.
    pub fn new(total: usize) -> Self {
        // Handed out from the end: lowest first.
        let free = (0..i32::try_from(total).unwrap_or(i32::MAX))
            .rev()
            .collect();
        Self { free, total }
    }

    /// Takes `count` blocks, or none.
    pub fn take(&mut self, count: usize) -> Option<Vec<i32>> {
        let left = self.free.len().checked_sub(count)?;
        let mut taken = self.free.split_off(left);
        taken.reverse();
        Some(taken)
    }

    /// Gives blocks back.
    pub fn give(&mut self, blocks: Vec<i32>) {
        self.free.extend(blocks.into_iter().rev());
        debug_assert!(self.free.len() <= self.total);
    }

    /// Blocks that nobody has.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_taken_whole_or_not_at_all_and_come_back() {
        let mut pool = BlockPool::new(4);
        let a = pool.take(3).unwrap();
        assert_eq!(a, [0, 1, 2]);
        assert_eq!(pool.take(2), None);
        assert_eq!(pool.take(1).unwrap(), [3]);
        pool.give(a);
        assert_eq!(pool.free(), 3);
    }
}
