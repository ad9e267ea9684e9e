"""Cases of products: batches of one that stand for many in every dtype, results without axes, and truly large ones.

The large ones' inputs are no files: the graph makes them, as NumPy does here, out of integers that are counted, mixed and cut to
few bits, so that the floats made of them are exact. Of their results some elements are kept, in steps that are coprime to the
blocks of kernels.
"""

import numpy as np

from blocks import block
from common import FLOATS, INTS, NUMPY, Book, T, rng, sample
from quantised import numbers

DTYPES = FLOATS + ["c64"]


def broadcast(book):
    """A batch of matrices with one, each way, and both at once."""
    for d in DTYPES:
        f = lambda i, s: sample(rng("broadcast", d, i), d, s)
        for s, t in (([2, 3, 4], [4, 5]), ([3, 4], [2, 4, 5]), ([2, 1, 3, 4], [5, 4, 3]), ([1, 3, 4], [6, 4, 1])):
            a, b = f(s, s), f((t, 2), t)
            book.one("matmul", f"batch of {s} {t} {d}", [a, b], T(d, np.matmul(a.up, b.up)))
            for c in ([], [t[-1]], [3, 1]):
                c = f((s, t, c), c)
                out = 2.0 * c.up - 0.5 * np.matmul(a.up, b.up)
                book.one("addmm", f"batch of {s} {t} and {c.shape} {d}", [c, a, b], T(d, out), alpha=-0.5, beta=2.0)
            equation = "...ij,...jk->...ik"
            book.one("einsum", f"batch of {s} {t} {d}", [a, b], T(d, np.einsum(equation, a.up, b.up)), equation=equation.encode())


def integers(book):
    """Integers and bool are einsum's alone."""
    for d in INTS + ["bool"]:
        b = sample(rng("broadcast", d), "f32" if d == "bool" else d, [2, 4, 5])
        a = sample(rng("broadcast", d, 2), d, [3, 4])
        wide = np.float64 if d == "bool" else NUMPY[d]
        out = np.einsum("...ij,...jk->...ik", a.a.astype(wide), b.a.astype(wide))
        book.one("einsum", f"batch of [3, 4] [2, 4, 5] {d}", [a, b], T(b.dtype, out), equation=b"...ij,...jk->...ik")
    b = sample(rng("scalar", "bool"), "f32", [4])
    book.one("einsum", "scalar bool", [a, b], T("f32", np.einsum("ij,j->", a.a.astype(np.float64), b.up)), equation=b"ij,j->")


def scalars(book):
    """Results without axes, of the dtypes of which the other files have none."""
    for d in DTYPES:
        a, b = (sample(rng("scalar", d, i), d, [5]) for i in range(2))
        book.one("matmul", f"scalar {d}", [a, b], T(d, a.up @ b.up))
    for d in FLOATS:
        book.one("to_fp8", f"scalar {d}", [T(d, -1.5)], T("u8", 60 + 128))
    for op, f in (("argmax", np.argmax), ("argmin", np.argmin)):
        x = T("bool", [False, True, False, True, True])
        book.one(op, "scalar bool", [x], T("u32", f(x.a)), axis=0, keep_dims=False)


class Made:
    """The nodes of a graph that makes its own inputs, and what NumPy makes likewise."""

    def __init__(self, stored):
        self.stored, self.nodes = stored, []

    def node(self, op, inputs, **attributes):
        self.nodes.append((op, inputs, attributes))
        return [len(self.nodes) - 1, 0]

    def number(self, dtype, value):
        return self.node("literal", [], dtype=dtype, shape=[], data=T(dtype, value).bytes())

    def words(self, seed, shape):
        """u32 of which no bits repeat: multiplied, folded, multiplied."""
        n = int(np.prod(shape))
        words = np.arange(seed, seed + n, dtype=np.uint32)
        at = self.node("arange", [], start=seed, step=1, length=n, dtype="u32")
        for factor, by in ((0x9E3779B1, 15), (0x85EBCA77, 13)):
            words = words * np.uint32(factor)
            words = words ^ (words >> np.uint32(by))
            at = self.node("mul", [at, self.number("u32", factor)])
            at = self.node("bitwise_xor", [at, self.node("right_shift", [at, self.number("u32", by)])])
        return self.node("reshape", [at], shape=shape), words.reshape(shape)

    def halves(self, seed, shape, dtype="f32", scale=2.0**-7):
        """Floats between -1 and 1, in steps of `scale`."""
        at, words = self.words(seed, shape)
        at = self.node("right_shift", [at, self.number("u32", 24)])
        at = self.node("cast", [at], dtype=dtype)
        at = self.node("sub", [at, self.number(dtype, 128.0)])
        at = self.node("mul", [at, self.number(dtype, scale)])
        return at, T(dtype, ((words >> np.uint32(24)).astype(np.float64) - 128.0) * scale)

    def close(self, book, op, note, result, out, steps):
        """Ends it with the op's result, of which every so many elements are kept."""
        cut = self.node("slice", [result], starts=[s // 2 for s in steps], stops=out.shape, steps=steps)
        kept = out.a[tuple(slice(s // 2, None, s) for s in steps)]
        book.graph(op, note, self.stored, self.nodes, [cut], [T(out.dtype, kept)])


def large(book):
    for d in ("f32", "f16", "bf16"):
        # Products of numbers of 7 bits: their sums are exact in f32, whichever way it adds.
        m = Made([])
        (a, x), (b, y) = m.halves(1, [7, 65, 256], d), m.halves(1 << 20, [9, 256, 130], d)
        lhs, rhs = rng("gmm large").integers(-7, 7, 24), rng("gmm large", 2).integers(-9, 9, 24)
        m.stored = [T("i32", lhs), T("i32", rhs)]
        out = T(d, np.matmul(x.up[lhs], y.up[rhs]))
        m.close(book, "gather_mm", f"large {d}", m.node("gather_mm", [a, b, 0, 1], sorted=False), out, [3, 7, 11])

    n, k = 521, 1024
    for mode, group, bits, d in (("affine", 64, 4, "f32"), ("affine", 32, 8, "bf16"), ("mxfp4", 32, 4, "f32"), ("nvfp4", 16, 4, "f16")):
        m = Made([])
        (x, a), (w, packed) = m.halves(3, [130, k], d), m.words(1 << 22, [n, k * bits // 32])
        if mode == "affine":
            (s, scales), (b, biases) = m.halves(1 << 23, [n, k // group], d, 2.0**-12), m.halves(1 << 24, [n, k // group], d)
            scales, biases = scales.up, biases.up
        else:
            # Bytes around those of 1, of either kind of float.
            one = {"mxfp4": 127, "nvfp4": 56}[mode]
            s, words = m.words(1 << 23, [n, k // group])
            s = m.node("bitwise_and", [s, m.number("u32", 7)])
            s = m.node("cast", [m.node("add", [s, m.number("u32", one - 4)])], dtype="u8")
            b, biases, scales = None, None, ((words & np.uint32(7)) + np.uint32(one - 4)).astype(np.int64)
        values = numbers(packed, scales, biases, mode, group, bits)
        out = T(d, a.up @ values.T)
        at = m.node("quantized_matmul", [x, w, s, b], transpose=True, mode=mode, group=group, bits=bits)
        m.close(book, "quantized_matmul", f"large {mode} {bits} {d}", at, out, [7, 11])

    # Blocks have to be stored: few rows of them, with many of the other side.
    for d, rows in (("q4_0", 101), ("q4_k", 97), ("q8_0", 48)):
        w, values = block(rng("mul_mat large", d), d, rows, 1024)
        sizes = T("f32", 2.0 ** rng("mul_mat large").integers(-3, 3, 1024))
        m = Made([sizes, w])
        x, a = m.halves(5, [515, 1024])
        out = T("f32", (a.up * sizes.up) @ values.T)
        m.close(book, "mul_mat", f"large {d}", m.node("mul_mat", [m.node("mul", [x, 0]), 1]), out, [7, 5])


def fill(books):
    books["products"] = Book("products")
    for part in (broadcast, integers, scalars):
        part(books["products"])
    large(books["products"])
