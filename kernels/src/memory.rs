//! Where intermediate values live: liveness, and one arena whose places are shared in time.

use std::collections::{BTreeMap, BTreeSet};

/// Alignment of every value in an arena, bytes: a cache line, and a full vector register.
pub const ALIGNMENT: usize = 64;

/// A value's size and the steps between which it must keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Bytes.
    pub bytes: usize,
    /// Step that writes it first.
    pub first: usize,
    /// Step that uses it last; never before `first`.
    pub last: usize,
}

/// Offsets for values in one arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// One offset per value, in the order given.
    pub offsets: Vec<usize>,
    /// Size of the arena, bytes.
    pub total: usize,
}

/// Values beyond which [`layout`] goes by time instead of by size.
const MOST_BY_SIZE: usize = 1024;

/// Places values so that no two that live at the same step overlap. `None` when sizes overflow.
pub fn layout(values: &[Lifetime]) -> Option<Layout> {
    match values.len() > MOST_BY_SIZE {
        true => layout_by_time(values),
        false => layout_by_size(values),
    }
}

/// In the order of their lives, each in the smallest hole it fits, at the end if there is none: near linear,
/// and no much larger than by size.
fn layout_by_time(values: &[Lifetime]) -> Option<Layout> {
    let mut layout = Layout {
        offsets: vec![0; values.len()],
        total: 0,
    };
    let mut starts: Vec<usize> = (0..values.len()).collect();
    let mut ends = starts.clone();
    starts.sort_by_key(|&i| (values[i].first, std::cmp::Reverse(values[i].bytes), i));
    ends.sort_by_key(|&i| (values[i].last, i));
    let mut ends = ends.into_iter().peekable();
    let mut holes = Holes::default();
    let mut top = 0usize;
    for i in starts {
        while let Some(done) = ends.next_if(|&e| values[e].last < values[i].first) {
            let size = values[done].bytes.checked_next_multiple_of(ALIGNMENT)?;
            holes.give(layout.offsets[done], size);
        }
        let size = values[i].bytes.checked_next_multiple_of(ALIGNMENT)?;
        layout.offsets[i] = match holes.take(size) {
            Some(offset) => offset,
            None => {
                // The hole at the end, if there is one, need only be made larger.
                let offset = holes.take_last(top).unwrap_or(top);
                top = offset.checked_add(size)?;
                offset
            }
        };
        layout.total = layout.total.max(top);
    }
    Some(layout)
}

/// Free ranges of an arena, by place and by size; neighbours are one.
#[derive(Default)]
struct Holes {
    by_start: BTreeMap<usize, usize>,
    by_size: BTreeSet<(usize, usize)>,
}

impl Holes {
    fn remove(&mut self, start: usize, size: usize) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
    }

    fn insert(&mut self, start: usize, size: usize) {
        self.by_start.insert(start, size);
        self.by_size.insert((size, start));
    }

    fn give(&mut self, mut start: usize, mut size: usize) {
        if size == 0 {
            return;
        }
        if let Some((&s, &n)) = self.by_start.range(..start).next_back()
            && s + n == start
        {
            self.remove(s, n);
            (start, size) = (s, n + size);
        }
        if let Some(&n) = self.by_start.get(&(start + size)) {
            self.remove(start + size, n);
            size += n;
        }
        self.insert(start, size);
    }

    fn take(&mut self, size: usize) -> Option<usize> {
        if size == 0 {
            return Some(0);
        }
        let &(n, start) = self.by_size.range((size, 0)..).next()?;
        self.remove(start, n);
        if n > size {
            self.insert(start + size, n - size);
        }
        Some(start)
    }

    /// Takes the hole that ends at `top`.
    fn take_last(&mut self, top: usize) -> Option<usize> {
        let (&start, &n) = self.by_start.last_key_value()?;
        (start + n == top).then(|| {
            self.remove(start, n);
            start
        })
    }
}

/// Largest first, each at the lowest offset that is free over its whole life.
fn layout_by_size(values: &[Lifetime]) -> Option<Layout> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(values[i].bytes), i));
    let mut placed: Vec<(usize, usize, usize)> = Vec::new(); // offset, end, value
    let mut layout = Layout {
        offsets: vec![0; values.len()],
        total: 0,
    };
    for i in order {
        let value = values[i];
        let size = value.bytes.checked_next_multiple_of(ALIGNMENT)?;
        let mut offset = 0usize;
        // `placed` is sorted by offset, so one sweep finds the first gap.
        for &(start, end, other) in &placed {
            let lives = values[other].first <= value.last && value.first <= values[other].last;
            if lives && start < offset.checked_add(size)? && offset < end {
                offset = end;
            }
        }
        let end = offset.checked_add(size)?;
        layout.offsets[i] = offset;
        layout.total = layout.total.max(end);
        let at = placed.partition_point(|&(start, ..)| start <= offset);
        placed.insert(at, (offset, end, i));
    }
    Some(layout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn values_that_live_together_never_overlap(
            raw in prop::collection::vec((0usize..5000, 0usize..30, 0usize..6), 0..60)
        ) {
            let values: Vec<Lifetime> = raw.iter()
                .map(|&(bytes, first, len)| Lifetime { bytes, first, last: first + len }).collect();
            for layout in [layout_by_size(&values).unwrap(), layout_by_time(&values).unwrap()] {
            for (i, a) in values.iter().enumerate() {
                prop_assert_eq!(layout.offsets[i] % ALIGNMENT, 0);
                prop_assert!(layout.offsets[i] + a.bytes <= layout.total);
                for (j, b) in values.iter().enumerate().skip(i + 1) {
                    let together = a.first <= b.last && b.first <= a.last;
                    let apart = layout.offsets[i] + a.bytes <= layout.offsets[j]
                        || layout.offsets[j] + b.bytes <= layout.offsets[i];
                    prop_assert!(!together || apart || a.bytes == 0 || b.bytes == 0, "{i} {j}");
                }
            }
            }
        }
    }

    #[test]
    fn places_are_shared_in_time() {
        let chain: Vec<Lifetime> = (0..10)
            .map(|i| Lifetime {
                bytes: 1000,
                first: i,
                last: i + 1,
            })
            .collect();
        let huge = [Lifetime {
            bytes: usize::MAX,
            first: 0,
            last: 0,
        }];
        for layout in [layout_by_size, layout_by_time] {
            assert_eq!(layout(&chain).unwrap().total, 2048);
            assert_eq!(layout(&huge), None);
        }
    }
}
