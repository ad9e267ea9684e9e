//! Writing keys and values into a cache.

use hotcell_graph::{
    CacheSpec, DType, Dim,
    op::{Call, ValueSpec},
};

use super::{
    super::{split, unsupported},
    element::{Bf16, Element, F16, F32, Q8},
    once, with_element,
};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::LANES,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

struct CacheWrite<E> {
    cache: Reg,
    keys: Reg,
    values: Reg,
    slots: Reg,
    spec: CacheSpec,
    count: Dim,
    element: std::marker::PhantomData<E>,
}

/// Numbers that are worth sharing out.
const WORTH: usize = 4096;

impl<E: Element> Kernel for CacheWrite<E> {
    fn is_alone(&self, rows: usize) -> bool {
        let width = self.spec.kv_heads * self.spec.head_dim;
        self.count.at(rows).saturating_mul(width) < WORTH
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let CacheSpec {
            block_len,
            kv_heads,
            head_dim: d,
            ..
        } = self.spec;
        let (count, width) = (self.count.at(run.rows), kv_heads * d);
        // Rows in order and their columns shared: where two rows name one slot, the last wins whatever the parts.
        let columns = match (self.is_alone(run.rows), part) {
            (true, 0) => 0..width,
            (true, _) => return,
            (false, _) => split(width, LANES.max(E::LEN), part, parts),
        };
        let heads = columns.start / d..columns.end.div_ceil(d);
        let half = E::bytes(self.spec.slots() * width);
        // SAFETY: sizes as the specs say.
        let (keys, values, slots) = unsafe {
            (
                run.slice::<f32>(self.keys, count * width),
                run.slice::<f32>(self.values, count * width),
                run.slice::<i32>(self.slots, count),
            )
        };
        for (row, slot) in slots.iter().enumerate() {
            let slot = once(slot);
            if slot == -1 {
                continue;
            }
            let Some(slot) = usize::try_from(slot)
                .ok()
                .filter(|s| *s < self.spec.slots())
            else {
                if part == 0 {
                    run.index_out_of_range("cache_write", slot.into(), self.spec.slots());
                }
                continue;
            };
            let (block, place) = (slot / block_len, slot % block_len);
            for head in heads.clone() {
                // The part's columns of this head, whole elements.
                let from = columns.start.max(head * d);
                let n = columns.end.min((head + 1) * d).saturating_sub(from);
                let at = ((block * kv_heads + head) * block_len + place) * d + (from - head * d);
                let (at, bytes) = (E::bytes(at), E::bytes(n));
                for (source, base) in [(keys, 0), (values, half)] {
                    // SAFETY: slot < slots and from + n is inside the head, so `at + bytes ≤ half` and
                    // `half + at + bytes` is the cache's size at most; no other part has these columns.
                    let target =
                        unsafe { run.slice_mut::<u8>(self.cache, base + at..base + at + bytes) };
                    E::store(run.path, &source[row * width + from..][..n], target);
                }
            }
        }
    }
}

/// Adds the step of a `cache_write`.
pub(super) fn cache_write(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    _: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(ValueSpec::Tensor(t)), &[cache, keys, values, slots]) = (call.inputs.get(1), ins)
    else {
        return Err(unsupported(call));
    };
    let (spec, count) = (*call.cache(0)?, t.shape.dims()[0]);
    with_element!(call, spec.dtype, E => launcher.step(
        CacheWrite::<E> {
            cache,
            keys,
            values,
            slots,
            spec,
            count,
            element: std::marker::PhantomData,
        },
        &[keys, values, slots],
        &[cache],
    ));
    Ok(())
}
