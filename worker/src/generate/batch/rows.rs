//! Rows of nodes' values: one buffer for all that is seen of a token, used again once it was read.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// Buffers that are kept at most, and how large each may be.
const KEPT: usize = 8;
const KEPT_BYTES: usize = 1 << 20;

/// Values, and where each node's end.
type Parts = (Vec<u8>, Vec<usize>);

/// Buffers of rows that were read.
///
/// The engine makes rows and somebody else drops them. Of a buffer for each node the allocator gives memory back to the system
/// and takes it again some twenty times in a step of a small model (glibc grows and trims a thread's arena by `mprotect`).
#[derive(Clone, Default)]
pub struct Spares(Arc<Mutex<Vec<Parts>>>);

impl Spares {
    /// Those that are kept, unless somebody else looks: the engine waits for nobody who gives way.
    fn kept(&self) -> Option<MutexGuard<'_, Vec<Parts>>> {
        match self.0.try_lock() {
            Ok(kept) => Some(kept),
            Err(TryLockError::Poisoned(kept)) => Some(kept.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Rows of no node yet, with room for values of so many bytes.
    pub fn rows(&self, bytes: usize) -> Rows {
        let spare = self.kept().and_then(|mut kept| kept.pop());
        let (mut values, ends) = spare.unwrap_or_default();
        values.reserve_exact(bytes);
        Rows {
            values,
            ends,
            spares: self.clone(),
        }
    }
}

/// Rows of some nodes' values, a node after the other.
#[derive(Default)]
pub struct Rows {
    values: Vec<u8>,
    ends: Vec<usize>,
    spares: Spares,
}

impl Rows {
    /// Adds a node, whose rows are what is appended.
    ///
    /// # Errors
    /// Those of `append`; what it appended before is part of the next node then.
    pub fn push<E>(&mut self, append: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<(), E> {
        append(&mut self.values)?;
        self.ends.push(self.values.len());
        Ok(())
    }

    /// Each node's.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let nodes = starts.zip(&self.ends);
        nodes.map(|(start, &end)| self.values.get(start..end).unwrap_or_default())
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        let (mut values, mut ends) = (
            std::mem::take(&mut self.values),
            std::mem::take(&mut self.ends),
        );
        if values.capacity() == 0 || values.capacity() > KEPT_BYTES {
            return;
        }
        values.clear();
        ends.clear();
        if let Some(mut spares) = self.spares.kept()
            && spares.len() < KEPT
        {
            spares.push((values, ends));
        }
    }
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.iter().map(<[u8]>::len))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(rows: &mut Rows, nodes: &[&[u8]]) {
        for node in nodes {
            let append = |to: &mut Vec<u8>| {
                to.extend_from_slice(node);
                Ok::<_, ()>(())
            };
            rows.push(append).unwrap();
        }
    }

    #[test]
    fn nodes_have_their_own_rows_whatever_was_in_the_buffer_before() {
        let spares = Spares::default();
        let nodes: [&[u8]; 4] = [b"abc", b"", b"d", b""];
        let mut first = spares.rows(4);
        assert_eq!(first.values.capacity(), 4);
        with(&mut first, &nodes);
        assert_eq!(first.iter().collect::<Vec<_>>(), nodes);
        let buffer = first.values.as_ptr();
        drop(first);
        let mut second = spares.rows(0);
        assert_eq!(second.iter().count(), 0);
        with(&mut second, &[b"xy"]);
        assert_eq!(second.iter().collect::<Vec<_>>(), [b"xy"]);
        assert_eq!(second.values.as_ptr(), buffer, "it was used again");
    }

    #[test]
    fn few_buffers_are_kept_and_no_large_ones() {
        let spares = Spares::default();
        let mut large = spares.rows(0);
        with(&mut large, &[&vec![7; KEPT_BYTES + 1]]);
        drop(large);
        let all: Vec<Rows> = (0..KEPT + 3)
            .map(|_| {
                let mut rows = spares.rows(0);
                with(&mut rows, &[b"a"]);
                rows
            })
            .collect();
        drop(all);
        assert_eq!(spares.0.lock().unwrap().len(), KEPT);
        // Rows of nothing have none to keep.
        spares.0.lock().unwrap().clear();
        drop(spares.rows(0));
        assert_eq!(spares.0.lock().unwrap().len(), 0);
    }
}
