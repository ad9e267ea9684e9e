//! Random bits, which the catalogue counts as MLX does; all that is drawn from them decomposes.

use hotcell_graph::op::Call;

use super::{Entry, has_elements, needs, one};
use crate::mlx::array;

pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "random_bits",
    supports: some,
    needs: needs::copies,
    launch: |cx| {
        let key = cx.array(0)?;
        let dims = cx.result_dims(0)?;
        // SAFETY: the list has as many numbers as it says; the key is alive, and two u32 as the row says.
        let made = array::made(|to, stream| unsafe {
            mlx_sys::mlx_random_bits(to, dims.as_ptr(), dims.len(), 4, key.as_ptr(), stream)
        });
        one(cx, made)
    },
}];

fn some(call: &Call<'_>) -> bool {
    has_elements(call)
}
