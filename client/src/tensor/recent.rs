//! A bounded map that forgets what was not used for longest.

use std::{collections::HashMap, hash::Hash};

/// At most so many values by their keys.
pub(super) struct Recent<K, V> {
    most: usize,
    by_key: HashMap<K, (V, u64)>,
    clock: u64,
}

impl<K: Clone + Eq + Hash, V: Clone> Recent<K, V> {
    pub fn new(most: usize) -> Self {
        Self {
            most,
            by_key: HashMap::new(),
            clock: 0,
        }
    }

    /// The value of a key, which is thereby used.
    pub fn get(&mut self, key: &K) -> Option<V> {
        self.clock += 1;
        let (value, used) = self.by_key.get_mut(key)?;
        *used = self.clock;
        Some(value.clone())
    }

    /// Keeps a value. What has to go for it comes back, so that it need not be dropped under a lock.
    #[must_use = "drop it where that may take its time"]
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.clock += 1;
        let replaced = self.by_key.insert(key, (value, self.clock));
        if replaced.is_some() || self.by_key.len() <= self.most {
            return replaced.map(|(value, _)| value);
        }
        let oldest = self.by_key.iter().min_by_key(|(_, (_, used))| *used);
        let oldest = oldest.map(|(key, _)| key.clone())?;
        self.by_key.remove(&oldest).map(|(value, _)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        let mut recent = Recent::new(2);
        assert_eq!(recent.insert("a", 1), None);
        assert_eq!(recent.insert("b", 2), None);
        assert_eq!(recent.get(&"a"), Some(1));
        assert_eq!(recent.insert("c", 3), Some(2));
        assert_eq!((recent.get(&"b"), recent.get(&"a")), (None, Some(1)));
        assert_eq!(recent.insert("a", 4), Some(1));
        assert_eq!((recent.get(&"c"), recent.get(&"a")), (Some(3), Some(4)));
    }
}
