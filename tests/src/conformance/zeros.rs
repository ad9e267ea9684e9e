//! Zeros of both signs compare equal, so no golden case holds a device to either.

use anyhow::{Result, ensure};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};

use super::Executor;

/// Whether the order of zeros is that of their signs, whatever the place of each, the length of the row and what else is below
/// or above them.
///
/// # Errors
/// Which is wrong.
pub fn zeros(executor: &mut dyn Executor) -> Result<()> {
    let floats = [
        (DType::F16, 2, 0x3c00u64),
        (DType::BF16, 2, 0x3f80),
        (DType::F32, 4, 0x3f80_0000),
        (DType::F64, 8, 0x3ff0_0000_0000_0000),
    ];
    for (dtype, width, one) in floats {
        let sign = 1u64 << (8 * width - 1);
        let bytes = |bits: u64| bits.to_le_bytes()[..width].to_vec();
        let zero = |negative: bool| bytes(if negative { sign } else { 0 });
        // One zero is of the other sign, at each place in turn, or none is.
        for len in [1, 2, 3, 17, 64, 1000] {
            let places = [0, 1, len / 2, len - 1, len];
            for odd in places.into_iter().filter(|at| *at <= len) {
                for positive in [false, true] {
                    let negative: Vec<bool> = (0..len).map(|i| (i == odd) == positive).collect();
                    let all = negative.iter().all(|n| *n);
                    let any = negative.iter().any(|n| *n);
                    let row: Vec<u8> = negative.iter().flat_map(|n| zero(*n)).collect();
                    // Beside −1 the greatest is still a zero, beside 1 the least.
                    let below = [row.clone(), bytes(one | sign)].concat();
                    let above = [row.clone(), bytes(one)].concat();
                    for (row, expected) in [
                        (row, [zero(all), zero(any)]),
                        (below, [zero(all), bytes(one | sign)]),
                        (above, [bytes(one), zero(any)]),
                    ] {
                        let len = row.len() / width;
                        // Along the last axis, and, as columns, along the first.
                        for (dims, axis) in [([1, len], 1), ([len, 1], 0)] {
                            let mut g = GraphBuilder::new(0);
                            let x = g.tensor("x", TensorSpec::new(dtype, Shape::fixed(&dims)?)?)?;
                            let most = g.reduce_max(x, &[axis], false)?;
                            let least = g.reduce_min(x, &[axis], false)?;
                            let graph = g.finish(&[most, least])?;
                            let got = executor.run(&graph, 0, &[&row]);
                            let got = got.map_err(|e| anyhow::anyhow!("{e}"))?.outputs;
                            ensure!(
                                got == expected,
                                "{dtype} {dims:?} {odd} {positive} on {}: {got:x?}, not {expected:x?}",
                                executor.name()
                            );
                        }
                    }
                }
            }
        }
    }
    Ok(())
}
