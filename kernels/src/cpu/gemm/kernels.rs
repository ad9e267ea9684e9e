//! The inner loops compiled for each instruction path.

use super::block::{self, Block, PackColumns, PackRows, Round, Sweep};
use super::vector::{Element, Load};
use crate::cpu::path::CpuPath;

/// The loops of one dtype on one path that the processor has. Every call has the contract of [`block`].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Kernels<T: Element> {
    /// Rows and columns of a tile.
    pub tile: (usize, usize),
    pub pack_rows: unsafe fn(&PackRows<T>),
    pub pack_columns: unsafe fn(&PackColumns<T>),
    pub block: unsafe fn(&Block<T::Sum>),
    pub sweep: unsafe fn(&Sweep<T>),
    pub round: unsafe fn(&Round<T>),
}

/// The rows of every path's tile divide this, so that ranges of rows which start at multiples leave no edges.
pub(in crate::cpu) const TILE_ROWS: usize = 12;
/// The same for columns.
pub(in crate::cpu) const TILE_COLUMNS: usize = 32;

macro_rules! path {
    ($name:ident, $(#[$feature:meta])? [$a:literal, $b:literal, $c:literal], $p:literal) => {
        mod $name {
            use super::*;

            // SAFETY for every function here: the caller's promise, which includes that the processor has
            // the instructions.
            $(#[$feature])?
            unsafe fn pack_rows<V: Load<T, Lane = T::Sum>, T: Element>(job: &PackRows<T>) {
                // SAFETY: see above.
                unsafe { block::pack_rows::<V, T>(job) }
            }
            $(#[$feature])?
            unsafe fn pack_columns<V: Load<T, Lane = T::Sum>, T: Element>(job: &PackColumns<T>) {
                // SAFETY: see above.
                unsafe { block::pack_columns::<V, T>(job) }
            }
            $(#[$feature])?
            unsafe fn block<V: Load<T, Lane = T::Sum>, T: Element>(job: &Block<T::Sum>) {
                // SAFETY: see above.
                unsafe { block::block::<V, $a, $b, $c, $p>(job) }
            }
            $(#[$feature])?
            unsafe fn sweep<V: Load<T, Lane = T::Sum>, T: Element>(job: &Sweep<T>) {
                // SAFETY: see above.
                unsafe { block::sweep::<V, T>(job) }
            }
            $(#[$feature])?
            unsafe fn round<T: Element>(job: &Round<T>) {
                // SAFETY: see above.
                unsafe { block::round::<T>(job) }
            }

            pub(super) fn kernels<V: Load<T, Lane = T::Sum>, T: Element>() -> Kernels<T> {
                Kernels {
                    tile: ($c, $p * V::LANES),
                    pack_rows: pack_rows::<V, T>,
                    pack_columns: pack_columns::<V, T>,
                    block: block::<V, T>,
                    sweep: sweep::<V, T>,
                    round: round::<T>,
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
path!(
    avx512,
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    [4, 8, 12],
    2
);
#[cfg(target_arch = "x86_64")]
path!(
    avx2,
    #[target_feature(enable = "avx2,fma,f16c")]
    [2, 4, 6],
    2
);
path!(portable, [2, 4, 6], 1);

impl<T: Element> Kernels<T> {
    /// The kernels of a path, of the portable one where the processor lacks it.
    pub fn of(path: CpuPath) -> Self {
        match path.vectors() {
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx512Vnni => avx512::kernels::<T::Avx512, T>(),
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx2 => avx2::kernels::<T::Avx2, T>(),
            _ => portable::kernels::<T::Portable, T>(),
        }
    }
}
