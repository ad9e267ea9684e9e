//! The loops of running sums, products and extremes.
//!
//! A row is scanned without waiting for one element after the other: four steps make of every element the
//! result of the sixteen that end with it, and sixteen chains, one per lane, run over those. So an element's
//! order depends on its place in the row (inside a chunk of fixed length) and on nothing else. Columns go
//! from element to element, side by side. [`groups`](super::groups) does the same to rows in AVX-512's registers.

#[cfg(target_arch = "x86_64")]
use super::groups;
use super::reducers::{self, Fold as _, Reducer as _};
use crate::cpu::{
    lanes::{
        LANES, ask_for, ask_to_write, bf16_to_f32, dispatch, f16_to_f32, f32_to_bf16, f32_to_f16,
    },
    path::CpuPath,
};

/// Elements of a row between two steps of the same kind: their buffers stay in the nearest cache.
const BLOCK: usize = 256;

/// Elements of a row that are scanned by themselves, before what came before is folded in: threads share long rows.
pub(super) const CHUNK: usize = 16 << 10;

/// Columns that run together at most.
pub(super) const TILE: usize = 2048;

/// Which way, and with or without the element itself.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    pub reverse: bool,
    pub exclusive: bool,
}

/// What a chunk hands on. Of two NaNs a processor returns the first, and which one that is the compiler decides anew wherever
/// it has a product or a sum; so every NaN that is handed on is the same one, however many threads share the row.
pub(super) trait Settled {
    fn settled(self) -> Self;
}

macro_rules! settled {
    ($($integer:ty)*; $($float:ty)*) => {
        $(impl Settled for $integer {
            #[inline(always)]
            fn settled(self) -> Self {
                self
            }
        })*
        $(impl Settled for $float {
            #[inline(always)]
            fn settled(self) -> Self {
                if self.is_nan() { Self::NAN } else { self }
            }
        })*
    };
}
settled!(u8 u16 u32 u64 i8 i16 i32 i64; f32 f64);

/// One way to run over elements.
pub(super) trait Scan: Copy + Send + Sync + 'static {
    /// An element in memory.
    type Of: Copy;
    /// A running value.
    type Acc: Copy + Send + Sync + Settled;
    /// Whether parts of a row may be folded by themselves: not where they could leave the range that the
    /// whole stays in.
    const PARTS: bool;

    fn identity(self) -> Self::Acc;
    fn load(self, value: Self::Of) -> Self::Acc;
    fn fold(self, a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn store(self, acc: Self::Acc) -> Self::Of;

    /// Scans rows of `n` elements, or one chunk of a row after `before`. Returns the [`total`](Self::total) of the last.
    fn rows(
        self,
        path: CpuPath,
        x: &[Self::Of],
        n: usize,
        mode: Mode,
        before: Self::Acc,
        out: &mut [Self::Of],
    ) -> Self::Acc;

    /// What all of a chunk fold to.
    fn total(self, path: CpuPath, x: &[Self::Of], mode: Mode) -> Self::Acc;

    /// Scans `width` columns, at most [`TILE`], of a matrix of `k` columns and `n` rows.
    ///
    /// # Safety
    /// The columns may be read at `x` and written at `out`, and nobody else touches what is written.
    #[allow(clippy::too_many_arguments)]
    unsafe fn columns(
        self,
        path: CpuPath,
        x: *const Self::Of,
        out: *mut Self::Of,
        n: usize,
        k: usize,
        width: usize,
        mode: Mode,
    );
}

/// Every element folded with the one before it, and that with the same of two before. Buffers begin with the last of
/// the block before.
#[inline(always)]
fn four<S: Scan>(s: S, from: &[S::Acc], to: &mut [S::Acc]) {
    let n = to.len() - LANES;
    let at = |d: usize| &from[LANES - d..][..n];
    let (a, b, c, d) = (at(3), at(2), at(1), at(0));
    for ((((o, a), b), c), d) in to[LANES..].iter_mut().zip(a).zip(b).zip(c).zip(d) {
        *o = s.fold(s.fold(*a, *b), s.fold(*c, *d));
    }
}

/// What a block is folded in: its elements and what four of them fold to, each with the last of the block before in
/// front, and the running values with the one before in front.
struct Buffers<S: Scan> {
    steps: [[S::Acc; LANES + BLOCK]; 2],
    done: [S::Of; 1 + BLOCK],
}

impl<S: Scan> Buffers<S> {
    #[inline(always)]
    fn new(s: S) -> Self {
        Self {
            steps: [[s.identity(); LANES + BLOCK]; 2],
            done: [s.store(s.identity()); 1 + BLOCK],
        }
    }
}

/// Hands a row's running values on, block by block: the one before the block, then those of the block.
#[inline(always)]
fn blocks<S: Scan>(
    s: S,
    buffers: &mut Buffers<S>,
    x: &[S::Of],
    mode: Mode,
    before: S::Acc,
    mut put: impl FnMut(usize, &[S::Of]),
) -> S::Acc {
    let Buffers { steps, done } = buffers;
    for step in &mut *steps {
        step[..LANES].fill(s.identity());
    }
    done[0] = s.store(before);
    let mut acc = [s.identity(); LANES];
    let n = x.len();
    for start in (0..n).step_by(BLOCK) {
        let len = BLOCK.min(n - start);
        let whole = len.next_multiple_of(LANES);
        let [a, b] = &mut *steps;
        let to = &mut a[LANES..];
        if mode.reverse {
            let x = &x[n - start - len..n - start];
            for (o, v) in to.iter_mut().zip(x.iter().rev()) {
                *o = s.load(*v);
            }
        } else {
            for (o, v) in to.iter_mut().zip(&x[start..start + len]) {
                *o = s.load(*v);
            }
        }
        to[len..whole].fill(s.identity());
        four(s, a, &mut b[..LANES + whole]);
        let at = |d: usize| b[LANES - d..LANES - d + whole].as_chunks::<LANES>().0;
        let (early, late) = (at(12).iter().zip(at(8)), at(4).iter().zip(at(0)));
        let (out, _) = done[1..1 + whole].as_chunks_mut::<LANES>();
        for ((out, early), late) in out.iter_mut().zip(early).zip(late) {
            for l in 0..LANES {
                let early = s.fold(early.0[l], early.1[l]);
                let sixteen = s.fold(early, s.fold(late.0[l], late.1[l]));
                acc[l] = s.fold(acc[l], sixteen);
                out[l] = s.store(s.fold(before, acc[l]));
            }
        }
        put(start, &done[..=len]);
        done[0] = done[len];
        if start + len < n {
            for step in &mut *steps {
                step.copy_within(whole..whole + LANES, 0);
            }
        }
    }
    match n {
        0 => s.identity(),
        n => acc[(n - 1) % LANES],
    }
}

#[inline(always)]
fn rows_body<S: Scan>(
    s: S,
    x: &[S::Of],
    n: usize,
    mode: Mode,
    before: S::Acc,
    out: &mut [S::Of],
) -> S::Acc {
    let mut total = s.identity();
    let mut buffers = Buffers::new(s);
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        if !S::PARTS {
            total = one_by_one(s, x, mode, out);
            continue;
        }
        total = blocks(s, &mut buffers, x, mode, before, |start, done| {
            let len = done.len() - 1;
            let from = if mode.exclusive {
                &done[..len]
            } else {
                &done[1..]
            };
            if mode.reverse {
                let to = &mut out[n - start - len..n - start];
                for (o, v) in to.iter_mut().zip(from.iter().rev()) {
                    *o = *v;
                }
            } else {
                out[start..start + len].copy_from_slice(from);
            }
        });
    }
    total
}

#[inline(always)]
fn one_by_one<S: Scan>(s: S, x: &[S::Of], mode: Mode, out: &mut [S::Of]) -> S::Acc {
    let mut acc = s.identity();
    for i in 0..x.len().min(out.len()) {
        let i = if mode.reverse { x.len() - 1 - i } else { i };
        let next = s.fold(acc, s.load(x[i]));
        out[i] = s.store(if mode.exclusive { acc } else { next });
        acc = next;
    }
    acc
}

#[inline(always)]
fn total_body<S: Scan>(s: S, x: &[S::Of], mode: Mode) -> S::Acc {
    blocks(s, &mut Buffers::new(s), x, mode, s.identity(), |_, _| {})
}

/// Runs over one more row.
#[inline(always)]
fn one_row<S: Scan>(s: S, exclusive: bool, acc: &mut [S::Acc], x: &[S::Of], out: &mut [S::Of]) {
    for ((a, v), o) in acc.iter_mut().zip(x).zip(out) {
        let next = s.fold(*a, s.load(*v));
        *o = s.store(if exclusive { *a } else { next });
        *a = next;
    }
}

/// Runs over two more rows.
#[inline(always)]
fn two_rows<S: Scan>(
    s: S,
    exclusive: bool,
    acc: &mut [S::Acc],
    (x, y): (&[S::Of], &[S::Of]),
    out: &mut [S::Of],
    next: &mut [S::Of],
) {
    let n = acc.len();
    let (x, y, out, next) = (&x[..n], &y[..n], &mut out[..n], &mut next[..n]);
    for j in 0..n {
        let a = acc[j];
        let b = s.fold(a, s.load(x[j]));
        let c = s.fold(b, s.load(y[j]));
        out[j] = s.store(if exclusive { a } else { b });
        next[j] = s.store(if exclusive { b } else { c });
        acc[j] = c;
    }
}

/// Elements of two rows between which memory is asked for the next ones.
const PIECE: usize = 128;

/// Asks for the lines of so many elements.
#[inline(always)]
fn ask_lines<T>(at: *const T, elements: usize, ask: impl Fn(*const T)) {
    for first in (0..elements).step_by(64 / size_of::<T>()) {
        ask(at.wrapping_add(first));
    }
}

#[inline(always)]
unsafe fn columns_body<S: Scan>(
    s: S,
    x: *const S::Of,
    out: *mut S::Of,
    n: usize,
    k: usize,
    width: usize,
    mode: Mode,
) {
    let mut acc = [s.identity(); TILE];
    let acc = &mut acc[..width];
    let (x0, out0) = (x, out.cast_const());
    let place = |i: usize| k * if mode.reverse { n - 1 - i } else { i };
    // SAFETY: the caller's promise for every row and these columns; two rows do not overlap.
    let read = |i: usize| unsafe { std::slice::from_raw_parts(x.add(place(i)), width) };
    // SAFETY: as above.
    let write = |i: usize| unsafe { std::slice::from_raw_parts_mut(out.add(place(i)), width) };
    let mut i = 0;
    while i + 2 <= n {
        let (x, y, out, next) = (read(i), read(i + 1), write(i), write(i + 1));
        for first in (0..width).step_by(PIECE) {
            let piece = first..width.min(first + PIECE);
            // Rows are too far apart for the processor to find the next ones by itself.
            for row in [i + 2, i + 3] {
                let at = place(row.min(n - 1)).wrapping_add(first);
                ask_lines(x0.wrapping_add(at), piece.len(), ask_for);
                ask_lines(out0.wrapping_add(at), piece.len(), ask_to_write);
            }
            let acc = &mut acc[piece.clone()];
            let from = (&x[piece.clone()], &y[piece.clone()]);
            let (out, next) = (&mut out[piece.clone()], &mut next[piece]);
            // The flag is a constant in either loop.
            match mode.exclusive {
                true => two_rows(s, true, acc, from, out, next),
                false => two_rows(s, false, acc, from, out, next),
            }
        }
        i += 2;
    }
    if i < n {
        one_row(s, mode.exclusive, acc, read(i), write(i));
    }
}

/// Compiles a scan's loops for every instruction path, with rows in groups of registers where there is a `$wide`.
macro_rules! compile {
    ($name:ident $of:ty => $acc:ty $(, $wide:ty)?) => {
        fn rows(self, path: CpuPath, x: &[$of], n: usize, mode: Mode, before: $acc, out: &mut [$of]) -> $acc {
            dispatch! {
                fn run(s: $name, x: &[$of], n: usize, mode: Mode, before: $acc, out: &mut [$of]) -> $acc
                    = rows_body::<$name>;
            }
            $(#[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
                fn wide(s: $name, x: &[$of], n: usize, mode: Mode, before: $acc, out: &mut [$of]) -> $acc {
                    // SAFETY: the processor has the path.
                    unsafe { groups::rows::<$name, $wide>(s, x, n, mode, before, out) }
                }
                if path.vectors() == CpuPath::Avx512Vnni {
                    // SAFETY: as above.
                    return unsafe { wide(self, x, n, mode, before, out) };
                }
            })?
            run(path, self, x, n, mode, before, out)
        }

        fn total(self, path: CpuPath, x: &[$of], mode: Mode) -> $acc {
            dispatch! {
                fn run(s: $name, x: &[$of], mode: Mode) -> $acc = total_body::<$name>;
            }
            $(#[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
                fn wide(s: $name, x: &[$of], mode: Mode) -> $acc {
                    // SAFETY: the processor has the path.
                    unsafe { groups::chunk::<$name, $wide>(s, x, mode, s.identity(), None) }
                }
                if path.vectors() == CpuPath::Avx512Vnni {
                    // SAFETY: as above.
                    return unsafe { wide(self, x, mode) };
                }
            })?
            run(path, self, x, mode)
        }

        unsafe fn columns(self, path: CpuPath, x: *const $of, out: *mut $of, n: usize, k: usize, width: usize, mode: Mode) {
            dispatch! {
                unsafe fn run(s: $name, x: *const $of, out: *mut $of, n: usize, k: usize, width: usize, mode: Mode)
                    = columns_body::<$name>;
            }
            // SAFETY: the caller's promise.
            unsafe { run(path, self, x, out, n, k, width, mode) }
        }
    };
}

macro_rules! scans {
    ($($name:ident $of:ty => $acc:ty, $parts:literal, $identity:expr, $load:expr, $fold:expr, $store:expr $(, $wide:ty)?;)*) => {$(
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Scan for $name {
            type Of = $of;
            type Acc = $acc;
            const PARTS: bool = $parts;

            #[inline(always)]
            fn identity(self) -> $acc { $identity }
            #[inline(always)]
            fn load(self, v: $of) -> $acc { $load(v) }
            #[inline(always)]
            fn fold(self, a: $acc, b: $acc) -> $acc { $fold(a, b) }
            #[inline(always)]
            fn store(self, acc: $acc) -> $of { $store(acc) }

            compile!($name $of => $acc $(, $wide)?);
        }
    )*};
}

/// Greatest (or least) elements so far, as keys that order like the numbers: which are folded first is all the same.
macro_rules! extremes {
    ($($name:ident $reducer:ident $of:ty $(, $wide:ty)?;)*) => {$(
        #[derive(Clone, Copy)]
        pub(super) struct $name(pub(super) reducers::$reducer);

        impl Scan for $name {
            type Of = $of;
            type Acc = $of;
            const PARTS: bool = true;

            #[inline(always)]
            fn identity(self) -> $of { self.0.identity() }
            #[inline(always)]
            fn load(self, v: $of) -> $of { self.0.load(v) }
            #[inline(always)]
            fn fold(self, a: $of, b: $of) -> $of { self.0.fold(a, b) }
            #[inline(always)]
            fn store(self, acc: $of) -> $of { self.0.finish(acc) }

            compile!($name $of => $of $(, $wide)?);
        }
    )*};
}

extremes! {
    Extreme8 Max8 i8;
    Extreme16 Max16 i16;
    Extreme32 Max32 i32, groups::Keys;
    Extreme64 Max64 i64;
    ExtremeHalf MaxHalf i16;
    ExtremeF32 MaxF32 i32, groups::Keys;
    ExtremeF64 MaxF64 i64;
}

fn same<T>(v: T) -> T {
    v
}

fn to_half(v: f64) -> u16 {
    f32_to_f16(v as f32)
}

fn to_brain(v: f64) -> u16 {
    f32_to_bf16(v as f32)
}

// Products of f32 and narrower run in f64: a stretch of a row may leave the range that its products from the
// start stay in.
scans! {
    Sum8 u8 => u8, true, 0, same, u8::wrapping_add, same;
    Sum16 u16 => u16, true, 0, same, u16::wrapping_add, same;
    Sum32 u32 => u32, true, 0, same, u32::wrapping_add, same;
    Sum64 u64 => u64, true, 0, same, u64::wrapping_add, same;
    SumF16 u16 => f32, true, 0.0, f16_to_f32, |a, b| a + b, f32_to_f16, groups::Sums<groups::F16>;
    SumBf16 u16 => f32, true, 0.0, bf16_to_f32, |a, b| a + b, f32_to_bf16, groups::Sums<groups::Bf16>;
    SumF32 f32 => f32, true, 0.0, same, |a, b| a + b, same, groups::Sums<groups::Same>;
    SumF64 f64 => f64, true, 0.0, same, |a, b| a + b, same;
    Prod8 u8 => u8, true, 1, same, u8::wrapping_mul, same;
    Prod16 u16 => u16, true, 1, same, u16::wrapping_mul, same;
    Prod32 u32 => u32, true, 1, same, u32::wrapping_mul, same;
    Prod64 u64 => u64, true, 1, same, u64::wrapping_mul, same;
    ProdF16 u16 => f64, true, 1.0, |v| f64::from(f16_to_f32(v)), |a, b| a * b, to_half, groups::Products<groups::F16>;
    ProdBf16 u16 => f64, true, 1.0, |v| f64::from(bf16_to_f32(v)), |a, b| a * b, to_brain, groups::Products<groups::Bf16>;
    ProdF32 f32 => f64, true, 1.0, f64::from, |a, b| a * b, |p| p as f32, groups::Products<groups::Same>;
    ProdF64 f64 => f64, false, 1.0, same, |a, b| a * b, same;
}
