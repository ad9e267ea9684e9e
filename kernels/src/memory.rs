//! Where intermediate values live: liveness, and one arena whose places are shared in time.

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

/// Places values so that no two that live at the same step overlap: largest first, each at the
/// lowest offset that is free over its whole life. `None` when sizes overflow.
pub fn layout(values: &[Lifetime]) -> Option<Layout> {
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
            let layout = layout(&values).unwrap();
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

    #[test]
    fn places_are_shared_in_time() {
        let chain: Vec<Lifetime> = (0..10)
            .map(|i| Lifetime {
                bytes: 1000,
                first: i,
                last: i + 1,
            })
            .collect();
        assert_eq!(layout(&chain).unwrap().total, 2048);
        assert_eq!(
            layout(&[Lifetime {
                bytes: usize::MAX,
                first: 0,
                last: 0
            }]),
            None
        );
    }
}
