//! Where places lie in the arena, and which steps all parts must meet before.

use std::{collections::BTreeMap, ops::Range};

use super::launch::{Home, Pending, Place, Reg};
use crate::memory::{self, Layout, Lifetime};

/// Steps without a meeting after which an execution that may pause has one all the same.
const LONGEST_SLICE: usize = 16;

/// When all parts meet before a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meet {
    /// Never.
    No,
    /// In executions that may pause.
    ToPause,
    /// Always: the step touches what an earlier one wrote or reads.
    Always,
}

/// Before which steps the parts need not meet in executions of so many rows, although they must in general: where part 0 alone
/// does all that comes between the meeting before and the one after. What `is_alone` says of each step, and when the parts
/// meet before it.
pub(super) fn omitted(steps: impl Iterator<Item = (Meet, bool)>) -> Vec<bool> {
    let steps: Vec<_> = steps.collect();
    let starts = |at: &usize| *at == 0 || matches!(steps.get(*at), None | Some((Meet::Always, _)));
    let all_alone = |range: &[(Meet, bool)]| range.iter().all(|(_, alone)| *alone);
    let mut omitted = vec![false; steps.len()];
    let (mut start, mut before) = (0, false);
    while start < steps.len() {
        let end = (start + 1..=steps.len()).find(starts);
        let end = end.unwrap_or(steps.len());
        let alone = all_alone(&steps[start..end]);
        omitted[start] = before && alone;
        (start, before) = (end, alone);
    }
    omitted
}

/// The arena of a plan.
pub(super) struct Arena {
    /// Per place, where it lies; `None` outside of the arena.
    pub ranges: Vec<Option<Range<usize>>>,
    pub layout: Layout,
    /// Bytes if no place were shared in time.
    pub unshared: usize,
}

/// Lays the arena out by what the steps touch. `None` when sizes overflow.
pub(super) fn arena(places: &[Place], steps: &[Pending]) -> Option<Arena> {
    let mut lifetimes: Vec<Option<Lifetime>> = vec![None; places.len()];
    for (s, step) in steps.iter().enumerate() {
        for reg in step.reads.iter().chain(&step.writes) {
            let life = lifetimes[reg.index()].get_or_insert(Lifetime {
                bytes: places[reg.index()].bytes,
                first: s,
                last: s,
            });
            life.last = s;
        }
    }
    let regs: Vec<usize> = (0..places.len())
        .filter(|&r| places[r].home == Home::Arena && lifetimes[r].is_some())
        .collect();
    let values: Vec<Lifetime> = regs.iter().filter_map(|&r| lifetimes[r]).collect();
    let layout = memory::layout(&values)?;
    let unshared = values.iter().try_fold(0usize, |n, v| {
        n.checked_add(v.bytes.checked_next_multiple_of(memory::ALIGNMENT)?)
    })?;
    let mut ranges: Vec<Option<Range<usize>>> = vec![None; places.len()];
    for (&r, &offset) in regs.iter().zip(&layout.offsets) {
        ranges[r] = Some(offset..offset + places[r].bytes);
    }
    Some(Arena {
        ranges,
        layout,
        unshared,
    })
}

/// What was touched since the last meeting: places outside the arena by name, inside by address.
#[derive(Default)]
struct Touched {
    /// Per place outside the arena, the meeting after which it was touched last, plus one.
    outside: Vec<usize>,
    /// Disjoint ranges of the arena, start to end.
    inside: BTreeMap<usize, usize>,
}

impl Touched {
    fn meets(&self, reg: Reg, range: Option<&Range<usize>>, now: usize) -> bool {
        match range {
            None => self.outside[reg.index()] == now + 1,
            Some(r) if r.is_empty() => false,
            Some(r) => self
                .inside
                .range(..r.end)
                .next_back()
                .is_some_and(|(_, end)| *end > r.start),
        }
    }

    fn add(&mut self, reg: Reg, range: Option<&Range<usize>>, now: usize) {
        let Some(r) = range else {
            self.outside[reg.index()] = now + 1;
            return;
        };
        let (mut start, mut end) = (r.start, r.end);
        // What it overlaps becomes one with it.
        while let Some((&s, &e)) = self
            .inside
            .range(..end)
            .next_back()
            .filter(|(_, e)| **e > start)
        {
            start = start.min(s);
            end = end.max(e);
            self.inside.remove(&s);
        }
        if start < end {
            self.inside.insert(start, end);
        }
    }
}

/// When the parts meet before each step.
pub(super) fn meetings(arena: &Arena, steps: &[Pending]) -> Vec<Meet> {
    let places = arena.ranges.len();
    let touched = || Touched {
        outside: vec![0; places],
        inside: BTreeMap::new(),
    };
    let (mut read, mut written) = (touched(), touched());
    let (mut now, mut since) = (0, 0);
    let mut meets = Vec::with_capacity(steps.len());
    for (s, step) in steps.iter().enumerate() {
        let range = |reg: &Reg| arena.ranges[reg.index()].as_ref();
        let barrier = step.reads.iter().any(|r| written.meets(*r, range(r), now))
            || step
                .writes
                .iter()
                .any(|w| written.meets(*w, range(w), now) || read.meets(*w, range(w), now));
        if barrier {
            now += 1;
            read.inside.clear();
            written.inside.clear();
        }
        for r in &step.reads {
            read.add(*r, range(r), now);
        }
        for w in &step.writes {
            written.add(*w, range(w), now);
        }
        let pause = s - since >= LONGEST_SLICE;
        let meet = match (barrier, pause) {
            (true, _) => Meet::Always,
            (false, true) => Meet::ToPause,
            (false, false) => Meet::No,
        };
        if meet != Meet::No {
            since = s;
        }
        meets.push(meet);
    }
    meets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_alone_before_and_after_need_not_meet() {
        use Meet::{Always, No, ToPause};
        let omits = |steps: &[(Meet, bool)]| {
            let omitted = omitted(steps.iter().copied());
            let places = omitted.iter().enumerate().filter(|(_, omit)| **omit);
            places.map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!(omits(&[]), [0; 0]);
        // The second and the third; what is shared meets those before and after.
        let steps = [
            (No, true),
            (Always, true),
            (Always, true),
            (Always, false),
            (Always, true),
        ];
        assert_eq!(omits(&steps), [1, 2]);
        // One of several that do not meet each other is shared: it may need what comes before its group, or give what
        // comes after.
        let steps = [
            (No, true),
            (Always, true),
            (No, false),
            (Always, true),
            (ToPause, true),
            (Always, true),
        ];
        assert_eq!(omits(&steps), [5]);
        assert_eq!(omits(&[(No, false), (No, true), (Always, true)]), [0; 0]);
    }
}
