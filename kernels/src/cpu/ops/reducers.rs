//! What reductions fold with: one small type per meaning and width of element.
//!
//! A reducer says how an element is loaded, how two are folded inside a chunk, and how the chunks' results
//! (wider where that keeps a long sum exact) are joined. Integers and keys give the same result in any
//! order and leave the order to the compiler; sums and products of floats name theirs.

use super::keys::{F32_INFINITY, F64_INFINITY, key16, key32, key64};
use crate::{
    cpu::{
        lanes::{LANES, ask_ahead, bf16_to_f32, dispatch, f16_to_f32, f32_to_bf16, f32_to_f16},
        path::CpuPath,
    },
    reduction::{self, phases},
};

/// Columns of accumulators that a thread holds at once: as many as leave room in the nearest cache, so that
/// rows are read in long pieces.
pub(super) const TILE: usize = 2048;

/// Bytes of a row from which on it is worth asking for what follows, and of a piece of it that this is done for.
const LONG: usize = 1024;

/// Lanes of a row are those of a vector.
const _: () = assert!(LANES == reduction::LANES);

/// One way to reduce.
pub(super) trait Reducer: Copy + Send + Sync + 'static {
    /// An element in memory.
    type In: Copy;
    /// A chunk's result, and what chunks are joined in. Any bits are one.
    type Part: Copy;
    /// A result in memory.
    type Out: Copy;

    /// The result of no chunk.
    fn nothing(self) -> Self::Part;
    /// Joins two chunks, the earlier one first.
    fn join(self, a: Self::Part, b: Self::Part) -> Self::Part;
    /// What is stored.
    fn finish(self, part: Self::Part) -> Self::Out;

    /// Reduces every `n` elements of `x` to one of `out`, at most [`ROW_CHUNK`] at a time.
    fn rows(self, path: CpuPath, x: &[Self::In], n: usize, out: &mut [Self::Part]);

    /// Reduces columns `first..first + out.len()` of a matrix of `k` columns over its rows,
    /// at most [`chunk_rows`]. `out` has at most [`TILE`] elements, and all columns when `k` is narrow.
    fn columns(self, path: CpuPath, x: &[Self::In], k: usize, first: usize, out: &mut [Self::Part]);
}

/// A reducer that folds element by element.
pub(super) trait Fold: Reducer {
    /// What is folded inside a chunk.
    type Acc: Copy;

    /// The result of nothing, inside a chunk.
    fn identity(self) -> Self::Acc;
    /// Reads an element.
    fn load(self, value: Self::In) -> Self::Acc;
    /// Folds two.
    fn fold(self, a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// A chunk's result.
    fn widen(self, acc: Self::Acc) -> Self::Part;

    /// Folds a contiguous row: sixteen lanes, then their tree, unless the order does not matter.
    #[inline(always)]
    fn row(self, row: &[Self::In]) -> Self::Acc {
        lanes_row(self, row)
    }
}

#[inline(always)]
fn lanes_row<R: Fold>(r: R, row: &[R::In]) -> R::Acc {
    if row.len() < LANES {
        return any_order_row(r, row);
    }
    let mut acc = [r.identity(); LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    let long = size_of_val(row) >= LONG;
    for chunk in chunks {
        if long {
            ask_ahead(chunk);
        }
        for i in 0..LANES {
            acc[i] = r.fold(acc[i], r.load(chunk[i]));
        }
    }
    for (a, v) in acc.iter_mut().zip(tail) {
        *a = r.fold(*a, r.load(*v));
    }
    for distance in [8, 4, 2, 1] {
        for i in 0..distance {
            acc[i] = r.fold(acc[i], acc[i + distance]);
        }
    }
    acc[0]
}

#[inline(always)]
fn any_order_row<R: Fold>(r: R, row: &[R::In]) -> R::Acc {
    let mut acc = r.identity();
    let long = size_of_val(row) >= LONG;
    for piece in row.chunks(LONG / size_of::<R::In>()) {
        if long {
            ask_ahead(piece);
        }
        for v in piece {
            acc = r.fold(acc, r.load(*v));
        }
    }
    acc
}

#[inline(always)]
fn rows_body<R: Fold>(r: R, x: &[R::In], n: usize, out: &mut [R::Part]) {
    if n == 0 {
        return out.fill(r.widen(r.identity()));
    }
    for (row, o) in x.chunks_exact(n).zip(out) {
        *o = r.widen(r.row(row));
    }
}

/// Adds rows to accumulators, four at a time in ascending order.
#[inline(always)]
fn add_rows<R: Fold>(r: R, acc: &mut [R::Acc], x: &[R::In], k: usize, first: usize) {
    let w = acc.len();
    let mut four = x.chunks_exact(4 * k);
    for rows in &mut four {
        let row = |i: usize| &rows[i * k + first..][..w];
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        for j in 0..w {
            let s = r.fold(acc[j], r.load(a[j]));
            let s = r.fold(s, r.load(b[j]));
            let s = r.fold(s, r.load(c[j]));
            acc[j] = r.fold(s, r.load(d[j]));
        }
    }
    for row in four.remainder().chunks_exact(k) {
        for (a, v) in acc.iter_mut().zip(&row[first..]) {
            *a = r.fold(*a, r.load(*v));
        }
    }
}

#[inline(always)]
fn columns_body<R: Fold>(r: R, x: &[R::In], k: usize, first: usize, out: &mut [R::Part]) {
    let mut acc = [r.identity(); TILE];
    let phases = phases(k);
    if phases == 1 {
        let acc = &mut acc[..out.len()];
        add_rows(r, acc, x, k, first);
        for (o, a) in out.iter_mut().zip(acc) {
            *o = r.widen(*a);
        }
        return;
    }
    let width = phases * k;
    let acc = &mut acc[..width];
    let whole = x.len() / width * width;
    add_rows(r, acc, &x[..whole], width, 0);
    for (a, v) in acc.iter_mut().zip(&x[whole..]) {
        *a = r.fold(*a, r.load(*v));
    }
    for (c, o) in out.iter_mut().enumerate() {
        *o = r.widen(acc[c]);
        for p in 1..phases {
            *o = r.join(*o, r.widen(acc[p * k + c]));
        }
    }
}

/// Compiles a reducer's loops for every instruction path.
macro_rules! compile {
    ($name:ident) => {
        fn rows(self, path: CpuPath, x: &[Self::In], n: usize, out: &mut [Self::Part]) {
            dispatch! {
                fn run(r: $name, x: &[<$name as Reducer>::In], n: usize, out: &mut [<$name as Reducer>::Part])
                    = rows_body::<$name>;
            }
            run(path, self, x, n, out);
        }

        fn columns(
            self,
            path: CpuPath,
            x: &[Self::In],
            k: usize,
            first: usize,
            out: &mut [Self::Part],
        ) {
            dispatch! {
                fn run(r: $name, x: &[<$name as Reducer>::In], k: usize, first: usize, out: &mut [<$name as Reducer>::Part])
                    = columns_body::<$name>;
            }
            run(path, self, x, k, first, out);
        }
    };
}

/// Reducers whose result does not depend on the order, folded in what is stored.
macro_rules! exact {
    ($($name:ident { $($field:ident: $field_ty:ty),* } $in:ty => $acc:ty as $out:ty,
        $identity:expr, |$s:ident, $v:ident| $load:expr, |$a:ident, $b:ident| $fold:expr, |$f:ident, $p:ident| $finish:expr;)*) => {$(
        #[derive(Clone, Copy)]
        pub(super) struct $name { $(pub $field: $field_ty),* }

        impl Reducer for $name {
            type In = $in;
            type Part = $acc;
            type Out = $out;

            #[inline(always)]
            fn nothing(self) -> $acc { $identity }
            #[inline(always)]
            fn join(self, a: $acc, b: $acc) -> $acc { self.fold(a, b) }
            #[inline(always)]
            fn finish(self, $p: $acc) -> $out { let $f = self; let _ = $f; $finish }

            compile!($name);
        }

        impl Fold for $name {
            type Acc = $acc;

            #[inline(always)]
            fn identity(self) -> $acc { $identity }
            #[inline(always)]
            fn load(self, $v: $in) -> $acc { let $s = self; let _ = $s; $load }
            #[inline(always)]
            fn fold(self, $a: $acc, $b: $acc) -> $acc { $fold }
            #[inline(always)]
            fn widen(self, acc: $acc) -> $acc { acc }
            #[inline(always)]
            fn row(self, row: &[$in]) -> $acc { any_order_row(self, row) }
        }
    )*};
}

exact! {
    // Sums and products wrap; those of signed numbers have the same bits.
    SumBool {} u8 => u32 as u32, 0, |_s, v| (v != 0).into(), |a, b| a.wrapping_add(b), |_s, p| p;
    SumU8 {} u8 => u32 as u32, 0, |_s, v| v.into(), |a, b| a.wrapping_add(b), |_s, p| p;
    SumI8 {} i8 => u32 as u32, 0, |_s, v| v as u32, |a, b| a.wrapping_add(b), |_s, p| p;
    SumU16 {} u16 => u32 as u32, 0, |_s, v| v.into(), |a, b| a.wrapping_add(b), |_s, p| p;
    SumI16 {} i16 => u32 as u32, 0, |_s, v| v as u32, |a, b| a.wrapping_add(b), |_s, p| p;
    Sum32 {} u32 => u32 as u32, 0, |_s, v| v, |a, b| a.wrapping_add(b), |_s, p| p;
    Sum64 {} u64 => u64 as u64, 0, |_s, v| v, |a, b| a.wrapping_add(b), |_s, p| p;
    ProdBool {} u8 => u32 as u32, 1, |_s, v| (v != 0).into(), |a, b| a & b, |_s, p| p;
    ProdU8 {} u8 => u32 as u32, 1, |_s, v| v.into(), |a, b| a.wrapping_mul(b), |_s, p| p;
    ProdI8 {} i8 => u32 as u32, 1, |_s, v| v as u32, |a, b| a.wrapping_mul(b), |_s, p| p;
    ProdU16 {} u16 => u32 as u32, 1, |_s, v| v.into(), |a, b| a.wrapping_mul(b), |_s, p| p;
    ProdI16 {} i16 => u32 as u32, 1, |_s, v| v as u32, |a, b| a.wrapping_mul(b), |_s, p| p;
    Prod32 {} u32 => u32 as u32, 1, |_s, v| v, |a, b| a.wrapping_mul(b), |_s, p| p;
    Prod64 {} u64 => u64 as u64, 1, |_s, v| v, |a, b| a.wrapping_mul(b), |_s, p| p;
    // The largest key. Flipping turns the order over (the smallest number), and unsigned numbers into signed ones.
    Max8 { flip: i8 } i8 => i8 as i8, i8::MIN, |s, v| v ^ s.flip, |a, b| a.max(b), |s, p| p ^ s.flip;
    Max16 { flip: i16 } i16 => i16 as i16, i16::MIN, |s, v| v ^ s.flip, |a, b| a.max(b), |s, p| p ^ s.flip;
    Max32 { flip: i32 } i32 => i32 as i32, i32::MIN, |s, v| v ^ s.flip, |a, b| a.max(b), |s, p| p ^ s.flip;
    Max64 { flip: i64 } i64 => i64 as i64, i64::MIN, |s, v| v ^ s.flip, |a, b| a.max(b), |s, p| p ^ s.flip;
    MaxHalf { flip: i16, infinity: i16, nan: i16 } i16 => i16 as i16, i16::MIN,
        |s, v| key16(v, s.infinity, s.flip), |a, b| a.max(b),
        |s, p| if p == i16::MAX { s.nan } else { key16(p ^ s.flip, i16::MAX, 0) };
    MaxF32 { flip: i32 } i32 => i32 as i32, i32::MIN,
        |s, v| key32(v, F32_INFINITY, s.flip), |a, b| a.max(b),
        |s, p| if p == i32::MAX { f32::NAN.to_bits() as i32 } else { key32(p ^ s.flip, i32::MAX, 0) };
    MaxF64 { flip: i64 } i64 => i64 as i64, i64::MIN,
        |s, v| key64(v, F64_INFINITY, s.flip), |a, b| a.max(b),
        |s, p| if p == i64::MAX { f64::NAN.to_bits() as i64 } else { key64(p ^ s.flip, i64::MAX, 0) };
    // Bits that make a number other than zero; a sign is none of them.
    Any8 { mask: u8 } u8 => u8 as u8, 0, |s, v| v & s.mask, |a, b| a | b, |_s, p| (p != 0).into();
    Any16 { mask: u16 } u16 => u16 as u8, 0, |s, v| v & s.mask, |a, b| a | b, |_s, p| (p != 0).into();
    Any32 { mask: u32 } u32 => u32 as u8, 0, |s, v| v & s.mask, |a, b| a | b, |_s, p| (p != 0).into();
    Any64 { mask: u64 } u64 => u64 as u8, 0, |s, v| v & s.mask, |a, b| a | b, |_s, p| (p != 0).into();
    // Whether there was a zero.
    All8 { mask: u8 } u8 => u8 as u8, 0, |s, v| (v & s.mask == 0).into(), |a, b| a | b, |_s, p| (p == 0).into();
    All16 { mask: u16 } u16 => u16 as u8, 0, |s, v| (v & s.mask == 0).into(), |a, b| a | b, |_s, p| (p == 0).into();
    All32 { mask: u32 } u32 => u32 as u8, 0, |s, v| (v & s.mask == 0).into(), |a, b| a | b, |_s, p| (p == 0).into();
    All64 { mask: u64 } u64 => u64 as u8, 0, |s, v| (v & s.mask == 0).into(), |a, b| a | b, |_s, p| (p == 0).into();
}

/// Sums and products of floats: sixteen lanes inside a chunk, chunks joined in f64.
macro_rules! floats {
    ($($name:ident $in:ty => $acc:ty, $part:ty, $identity:expr, $load:expr, $fold:expr, $widen:expr, $join:expr, $finish:expr;)*) => {$(
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Reducer for $name {
            type In = $in;
            type Part = $part;
            type Out = $in;

            #[inline(always)]
            fn nothing(self) -> $part { self.widen(self.identity()) }
            #[inline(always)]
            fn join(self, a: $part, b: $part) -> $part { $join(a, b) }
            #[inline(always)]
            fn finish(self, part: $part) -> $in { $finish(part) }

            compile!($name);
        }

        impl Fold for $name {
            type Acc = $acc;

            #[inline(always)]
            fn identity(self) -> $acc { $identity }
            #[inline(always)]
            fn load(self, v: $in) -> $acc { $load(v) }
            #[inline(always)]
            fn fold(self, a: $acc, b: $acc) -> $acc { $fold(a, b) }
            #[inline(always)]
            fn widen(self, acc: $acc) -> $part { $widen(acc) }
        }
    )*};
}

fn same<T>(v: T) -> T {
    v
}

/// A complex number.
type C32 = [f32; 2];
/// The same, wider.
type C64 = [f64; 2];

fn widen_complex([re, im]: C32) -> C64 {
    [re.into(), im.into()]
}

fn narrow_complex([re, im]: C64) -> C32 {
    [re as f32, im as f32]
}

floats! {
    SumF16 u16 => f32, f64, 0.0, f16_to_f32, |a, b| a + b, f64::from, |a, b| a + b, |p| f32_to_f16(p as f32);
    SumBf16 u16 => f32, f64, 0.0, bf16_to_f32, |a, b| a + b, f64::from, |a, b| a + b, |p| f32_to_bf16(p as f32);
    SumF32 f32 => f32, f64, 0.0, same, |a, b| a + b, f64::from, |a, b| a + b, |p| p as f32;
    SumF64 f64 => f64, f64, 0.0, same, |a, b| a + b, same, |a, b| a + b, same;
    SumC64 C32 => C32, C64, [0.0; 2], same, |a: C32, b: C32| [a[0] + b[0], a[1] + b[1]], widen_complex,
        |a: C64, b: C64| [a[0] + b[0], a[1] + b[1]], narrow_complex;
    ProdF16 u16 => f32, f64, 1.0, f16_to_f32, |a, b| a * b, f64::from, |a, b| a * b, |p| f32_to_f16(p as f32);
    ProdBf16 u16 => f32, f64, 1.0, bf16_to_f32, |a, b| a * b, f64::from, |a, b| a * b, |p| f32_to_bf16(p as f32);
    ProdF32 f32 => f32, f64, 1.0, same, |a, b| a * b, f64::from, |a, b| a * b, |p| p as f32;
    ProdF64 f64 => f64, f64, 1.0, same, |a, b| a * b, same, |a, b| a * b, same;
    ProdC64 C32 => C32, C64, [1.0, 0.0], same,
        |a: C32, b: C32| [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]], widen_complex,
        |a: C64, b: C64| [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]], narrow_complex;
}
