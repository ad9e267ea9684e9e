"""Cases of reduce, matmul, norm and conv rows."""

import itertools

import numpy as np
import torch
from scipy import special

from common import FLOATS, INTS, NUMPY, PLAIN, REALS, Book, T, corners, floating, promote_all, rng, sample

AXES = [([], False), ([], True), ([0], False), ([-1], False), ([1], True), ([0, 2], False), ([-2, 0], True), ([0, 1, 2], False)]


def summed(dtype):
    return {"bool": "i32", "i8": "i32", "i16": "i32", "u8": "u32", "u16": "u32"}.get(dtype, dtype)


def reductions(op):
    """dtype of the result and the function, for one dtype."""

    def f(x, axes, keep):
        axes = tuple(axes) if axes else None
        a = x.up
        if op in ("reduce_sum", "reduce_prod"):
            to = summed(x.dtype)
            a = a.astype(NUMPY[to]) if to in INTS else a
            g = np.sum if op == "reduce_sum" else np.prod
            return T(to, g(a, axis=axes, keepdims=keep, **({"dtype": NUMPY[to]} if to in INTS else {})))
        if op in ("reduce_all", "reduce_any"):
            g = np.all if op == "reduce_all" else np.any
            return T("bool", g(x.a != 0, axis=axes, keepdims=keep))
        if op in ("reduce_max", "reduce_min"):
            return T(x.dtype, (np.max if op == "reduce_max" else np.min)(a, axis=axes, keepdims=keep))
        if x.dtype == "c64":
            return T("c64", np.mean(a, axis=axes, keepdims=keep))
        to = floating(x.dtype)
        a = x.to(to).up
        if op == "mean":
            return T(to, np.mean(a, axis=axes, keepdims=keep))
        if op == "logsumexp":
            return T(to, special.logsumexp(a, axis=axes, keepdims=keep) if a.size else np.sum(a, axis=axes, keepdims=keep) - np.inf)
        raise KeyError(op)

    return f


def reduce(book):
    with np.errstate(all="ignore"):
        import warnings

        warnings.simplefilter("ignore")
        for op in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_all", "reduce_any", "mean", "logsumexp"):
            f = reductions(op)
            limits = (0.5, 1.5) if op == "reduce_prod" else (-4, 4)
            floats_only = op in ("mean", "logsumexp")

            def add(note, x, axes, keep, rows=None, views=False):
                out = f(x, axes, keep)
                check = "exact" if op in ("reduce_max", "reduce_min", "reduce_all", "reduce_any") or out.dtype in INTS else None
                if out.dtype in FLOATS and check is None and note.startswith("corner"):
                    check = "each"
                book.one(op, f"{note} {axes}", [x], out, check, rows=rows, axes=axes, keep_dims=keep)
                if views:
                    book.views(op, f"views {note} {axes}", [x], out, check, axes=axes, keep_dims=keep)

            bools = op in ("reduce_sum", "reduce_prod", "reduce_all", "reduce_any", "mean")
            for d in REALS + (["bool"] if bools else []) + (["c64"] if op in ("reduce_sum", "reduce_prod", "mean") else []):
                x = sample(rng(d, limits[0]), d, [3, 4, 5], *limits)
                if op in ("reduce_all", "reduce_any"):
                    x = T(d, x.a * (rng(op, d, 2).random([3, 4, 5]) < (0.2 if op == "reduce_any" else 2.0)) if d != "bool" else x.a)
                for axes, keep in AXES:
                    add(d, x, axes, keep, views=d in ("f32", "i8") and axes in ([0], [-1], [-2, 0], []))
                if d in INTS and not floats_only and op not in ("reduce_all", "reduce_any"):
                    add(f"corners {d}", T(d, np.resize(corners(d), [4, 9])), [1], False)
                if d in ("f16", "bf16"):
                    x = sample(rng(d, "long"), d, [3, 2001], *((0.999, 1.001) if op == "reduce_prod" else (0, 1)))
                    add(f"long {d}", x, [-1], False)
            x = T("f32", [[1, np.nan, 3], [4, 5, np.inf], [-np.inf, 7, 8], [0, -0.0, 1]])
            add("corner NaN", x, [1], False)
            add("corner NaN", x, [0], False)
            add("scalar", sample(rng("s"), "f32", []), [], False)
            add("one axis", sample(rng("o"), "f32", [17], *limits), [0], True)
            add("rows", sample(rng("r"), "f32", [5, 6], *limits), [1], False, rows=[0])
            add("over rows", sample(rng("r"), "f32", [5, 6], *limits), [0], False, rows=[0])
            add("over rows kept", sample(rng("r"), "f32", [5, 6], *limits), [0], True, rows=[0])
            add("all with rows", sample(rng("r"), "f32", [5, 6], *limits), [], False, rows=[0])
            near = (0.99, 1.01) if op == "reduce_prod" else limits
            for axes in ([], [0], [1]):
                add("large", sample(rng("large"), "f16", [91, 67], *near), axes, False)
            add("middle", sample(rng("m"), "f32", [2, 33, 4, 9], *near), [1, 2], False)
            for shape, axes in (([0], []), ([0, 3], [0]), ([0, 3], [1]), ([2, 0, 3], [1]), ([2, 0, 3], [2])):
                x = T("f32", np.zeros(shape))
                some = any(shape[a] == 0 for a in (axes or range(len(shape))))
                if some and op in ("reduce_max", "reduce_min"):
                    book.one(op, f"empty {shape} {axes}", [x], None, fails="either", axes=axes, keep_dims=False)
                elif not (some and op == "logsumexp"):
                    add(f"empty {shape}", x, axes, False)
            x = T("f32", np.zeros([2, 3]))
            book.one(op, "no such axis", [x], None, fails="verify", axes=[2], keep_dims=False)
            book.one(op, "an axis twice", [x], None, fails="verify", axes=[0, -2], keep_dims=False)
            if op in ("reduce_max", "reduce_min", "logsumexp", "reduce_all"):
                book.one(op, "c64", [T("c64", [1j])], None, fails="verify", axes=[], keep_dims=False)
        big = T("f32", [1000.0, 1000.0, 999.0])
        book.one("logsumexp", "far from zero", [big], T("f32", special.logsumexp(big.up)), "each", axes=[], keep_dims=False)
        minus = T("f32", [[-np.inf, -np.inf], [-np.inf, 1.0]])
        book.one("logsumexp", "of infinities", [minus], T("f32", [-np.inf, 1.0]), "each", axes=[1], keep_dims=False)
        for op in ("reduce_max", "reduce_min", "logsumexp"):
            x = sample(rng(op, "flags"), "bool", [3, 5, 7])
            for axes, keep in (([], False), ([1], True), ([-1], False), ([0, 2], False)):
                out = reductions(op)(x, axes, keep)
                book.one(op, f"bool {axes}", [x], out, "exact" if op != "logsumexp" else None, axes=axes, keep_dims=keep)
        spread(book)
        arg(book)
        cumulative(book)


def spread(book):
    for op in ("variance", "standard_deviation"):

        def add(note, x, axes, keep, ddof, rows=None, views=False):
            to = floating(x.dtype)
            g = np.var if op == "variance" else np.std
            out = T(to, g(x.to(to).up, axis=tuple(axes) if axes else None, ddof=ddof, keepdims=keep))
            attributes = {"axes": axes, "keep_dims": keep, "ddof": ddof}
            book.one(op, f"{note} {axes} {ddof}", [x], out, rows=rows, **attributes)
            if views:
                book.views(op, f"views {note} {axes} {ddof}", [x], out, **attributes)

        for d in FLOATS + ["i32", "u8"]:
            x = sample(rng(op, d), d, [3, 4, 5])
            for (axes, keep), ddof in zip(AXES, (0, 1, 0, 1, 2, 1, 0, 0)):
                add(d, x, axes, keep, ddof, views=d == "f32")
        for d in INTS + ["bool"]:
            if d not in ("i32", "u8"):
                x = sample(rng(op, d), d, [3, 5, 7])
                for axes, keep, ddof in (([], False, 0), ([1], True, 1), ([-1], False, 0)):
                    add(d, x, axes, keep, ddof)
        add("far from zero", T("f32", 10000 + rng(op).standard_normal([3, 50])), [1], False, 0)
        add("constant", T("f32", np.full([2, 4], 3.0)), [1], False, 0)
        add("one element", T("f32", [[5.0]]), [1], False, 0)
        add("one element, one degree", T("f32", [[5.0]]), [1], False, 1)
        add("scalar", T("f32", 5.0), [], False, 0)
        add("empty", T("f32", np.zeros([0, 3])), [0], False, 0)
        add("empty result", T("f32", np.zeros([0, 3])), [1], False, 0)
        add("rows", sample(rng("r"), "f32", [5, 6]), [1], True, 1, rows=[0])
        add("NaN", T("f32", [[1, np.nan], [1, 2]]), [1], False, 0)
        add("large", sample(rng("large"), "f16", [91, 67]), [0, 1], False, 1)


def arg(book):
    for op in ("argmax", "argmin"):
        g = np.argmax if op == "argmax" else np.argmin

        def add(note, x, axis, keep, rows=None, views=False):
            out = T("u32", g(x.a, axis=axis, keepdims=keep))
            book.one(op, f"{note} {axis} {keep}", [x], out, rows=rows, axis=axis, keep_dims=keep)
            if views:
                book.views(op, f"views {note} {axis} {keep}", [x], out, axis=axis, keep_dims=keep)

        for d in REALS:
            for axis, keep in ((0, False), (1, True), (-1, False)):
                add(d, sample(rng(op, d), d, [3, 4, 5]), axis, keep, views=d in ("f32", "u8"))
            add(f"corners {d}", T(d, np.resize(corners(d), [5, 7])), 1, False)
            add(f"corners {d}", T(d, [v for v in corners(d) if not np.isnan(v)]), 0, False)
        for axis, keep in ((0, False), (1, True), (-1, False)):
            add("bool", sample(rng(op, "bool"), "bool", [3, 5, 7]), axis, keep)
        add("ties", T("i32", [[3, 3, 1, 1], [2, 5, 5, 2], [0, 0, 0, 0]]), 1, False)
        add("zeros", T("f32", [[0.0, -0.0], [-0.0, 0.0]]), 1, False)
        add("first NaN", T("f32", [[1, np.nan, np.nan, np.inf], [np.inf, 1, -np.inf, np.nan]]), 1, False)
        add("one axis", sample(rng("a"), "f32", [17]), 0, True)
        add("empty result", T("f32", np.zeros([0, 3])), 1, False)
        add("rows", sample(rng("r"), "f32", [5, 6]), 1, False, rows=[0])
        add("over rows", sample(rng("r"), "f32", [5, 6]), 0, False, rows=[0])
        add("large", sample(rng("large"), "f16", [40, 301]), 1, False)
        add("large", sample(rng("large"), "f16", [9001]), 0, False)
        book.one(op, "empty", [T("f32", np.zeros([0, 3]))], None, fails="either", axis=0, keep_dims=False)
        book.one(op, "c64", [T("c64", [1j])], None, fails="verify", axis=0, keep_dims=False)
        book.one(op, "no such axis", [T("f32", [1.0])], None, fails="verify", axis=1, keep_dims=False)


def cumulative(book):
    for op in ("cumsum", "cumprod"):

        def add(note, x, axis, exclusive, reverse, rows=None, views=False):
            a = x.up if x.dtype not in INTS else x.a
            a = np.flip(a, axis) if reverse else a
            g = np.cumsum if op == "cumsum" else np.cumprod
            c = g(a, axis=axis, dtype=a.dtype)
            if exclusive:
                first = np.full_like(np.take(c, [0], axis) if c.shape[axis] else c, op == "cumprod")
                c = np.concatenate([first, np.delete(c, -1, axis)], axis) if c.shape[axis] else c
            c = np.flip(c, axis) if reverse else c
            check = "exact" if x.dtype in INTS else None
            attributes = {"axis": axis, "exclusive": exclusive, "reverse": reverse}
            book.one(op, f"{note} {axis} {exclusive} {reverse}", [x], T(x.dtype, c), check, rows=rows, **attributes)
            if views:
                book.views(op, f"views {note} {axis} {exclusive} {reverse}", [x], T(x.dtype, c), check, **attributes)

        limits = (0.5, 1.5) if op == "cumprod" else (-4, 4)
        for d in REALS:
            for axis, (e, r) in zip((0, 1, -1, -2), itertools.product((False, True), repeat=2)):
                add(d, sample(rng(op, d), d, [3, 4, 5], *limits), axis, e, r, views=d in ("f32", "i8"))
            if d in INTS:
                add(f"corners {d}", T(d, corners(d)), 0, False, False)
        for e, r in itertools.product((False, True), repeat=2):
            add("one axis", sample(rng("one"), "f32", [17], *limits), 0, e, r)
            add("empty", T("f32", np.zeros([0, 3])), 0, e, r)
            add("NaN", T("f32", [1, 2, np.nan, 4]), 0, e, r)
        add("large", sample(rng("large"), "f16", [3, 1501], *((0.999, 1.001) if op == "cumprod" else (0, 1))), 1, False, False)
        add("large", sample(rng("large"), "bf16", [1501, 3], *((0.999, 1.001) if op == "cumprod" else (0, 1))), 0, False, True)
        add("rows", sample(rng("r"), "f32", [5, 6], *limits), 1, False, False, rows=[0])
        book.one(op, "scalar", [T("f32", 1.0)], None, fails="verify", axis=0, exclusive=False, reverse=False)


def matmul(book):
    from blocks import TYPES, block

    def product(a, b):
        dtype = promote_all([a, b])
        return T(dtype, np.matmul(a.to(dtype).up, b.to(dtype).up))

    shapes = [
        ([3, 4], [4, 5]), ([1, 1], [1, 1]), ([7, 13], [13, 11]), ([4], [4]), ([4], [4, 5]), ([3, 4], [4]), ([2, 3, 4], [4]), ([4], [2, 4, 5]),
        ([2, 3, 4], [2, 4, 5]), ([2, 3, 4], [4, 5]), ([3, 4], [2, 4, 5]), ([2, 1, 3, 4], [5, 4, 2]), ([1, 3, 4], [6, 4, 2]), ([3, 1, 2, 3], [1, 2, 3, 4]),
        ([3, 0], [0, 5]), ([0, 4], [4, 5]), ([3, 4], [4, 0]), ([0, 3, 4], [0, 4, 5]), ([2, 3, 0], [2, 0, 2]), ([0], [0]), ([17, 1], [1, 19]), ([1, 33], [33, 1]),
    ]  # fmt: skip
    for s, t in shapes:
        for d in FLOATS + ["c64"] if len(s) + len(t) in (4, 6) else ["f32"]:
            a, b = sample(rng("mm", d, s), d, s), sample(rng("mm", d, t, 2), d, t)
            book.one("matmul", f"{s} {t} {d}", [a, b], product(a, b))
            if d in ("f32", "f16"):
                book.views("matmul", f"views {s} {t} {d}", [a, b], product(a, b))
    for d, e in (("f16", "bf16"), ("f16", "f32"), ("f32", "f64"), ("bf16", "f64"), ("f32", "c64"), ("f64", "c64")):
        for d, e in ((d, e), (e, d)):
            a, b = sample(rng("mm", d), d, [3, 4]), sample(rng("mm", e, 2), e, [4, 5])
            book.one("matmul", f"{d} with {e}", [a, b], product(a, b))
    for d, e in (("i32", "f16"), ("f32", "u8"), ("bool", "f32")):
        a, b = sample(rng("mm", d), d, [3, 4]), sample(rng("mm", e, 2), e, [4, 5])
        book.one("matmul", f"{d} with {e}", [a, b], None, fails="verify")
    for d in FLOATS:
        a, b = sample(rng("mm", d), d, [37, 129]), sample(rng("mm", d, 2), d, [129, 41])
        book.one("matmul", f"large {d}", [a, b], product(a, b))
        book.one("matmul", f"rows {d}", [a, b], product(a, b), rows=[0])
    a, b = sample(rng("mm"), "f32", [5, 3, 4]), sample(rng("mm", 2), "f32", [5, 4, 2])
    book.one("matmul", "batch of rows", [a, b], product(a, b), rows=[0, 1])
    book.one("matmul", "batch of rows with one", [a, T("f32", b.a[:1])], product(a, T("f32", b.a[:1])), rows=[0])
    a = T("f32", [[np.nan, 1.0], [np.inf, 0.0], [1.0, 2.0]])
    b = T("f32", [[0.0, 1.0], [1.0, -1.0]])
    with np.errstate(all="ignore"):
        book.one("matmul", "NaN and infinity", [a, b], product(a, b))
    for s, t in (([3, 4], [5, 4]), ([2, 3, 4], [3, 4, 5]), ([], [4]), ([3, 4], [])):
        book.one("matmul", f"refused {s} {t}", [T("f32", np.zeros(s)), T("f32", np.zeros(t))], None, fails="verify")
    book.one("matmul", "integers", [T("i32", np.zeros([2, 2]))] * 2, None, fails="verify")
    add_mm(book)
    mul_mat(book)

    def expert(note, experts, values, x, ids, rows=None):
        t, u = ids.shape
        out = np.zeros([t, u, values.shape[1]])
        for i, j in np.ndindex(t, u):
            out[i, j] = values[int(ids.a[i, j])] @ x.up[i, j % x.shape[1]]
        book.one("mul_mat_id", note, [experts, x, ids], T("f32", out), rows=rows)
        if rows is None and experts.raw is None and t:
            book.views("mul_mat_id", f"views {note}", [experts, x, ids], T("f32", out))

    for d in FLOATS:
        e = sample(rng("id", d), d, [4, 5, 12], -1, 1)
        for u in (1, 2):
            x = sample(rng("id", d, u), "f32", [6, u, 12])
            ids = sample(rng("id", u), "i32", [6, 2], 0, 4)
            expert(f"{d} of {u}", e, e.up, x, ids)
            expert(f"rows {d} of {u}", e, e.up, x, ids, rows=[1, 2])
    for d, (_, length, _) in TYPES.items():
        flat, values = block(rng("id", d), d, 3 * 5, 2 * length)
        e = T(d, None, [3, 5, 2 * length], flat.raw)
        x, ids = sample(rng("id", d), "f32", [4, 1, 2 * length]), sample(rng("id"), "i64", [4, 2], 0, 3)
        expert(d, e, values.reshape(3, 5, -1), x, ids)
    e, x = sample(rng("id"), "f32", [4, 5, 12]), sample(rng("id", 2), "f32", [0, 1, 12])
    odd, x = sample(rng("id", "odd"), "f32", [3, 5, 7]), sample(rng("id", "odd", 2), "f32", [3, 1, 7])
    expert("odd", odd, odd.up, x, sample(rng("id", "odd"), "i32", [3, 3], 0, 3))
    e, x = sample(rng("id"), "f32", [4, 5, 12]), sample(rng("id", 2), "f32", [0, 1, 12])
    expert("empty", e, e.up, x, T("i32", np.zeros([0, 2])))
    x = sample(rng("id", 2), "f32", [45, 2, 12])
    expert("large", e, e.up, x, sample(rng("id", 3), "u8", [45, 2], 0, 4))
    for d in INTS:
        expert(f"ids {d}", odd, odd.up, sample(rng("id", "ids", d), "f32", [3, 1, 7]), sample(rng("id", d), d, [3, 3], 0, 3))
    book.one("mul_mat_id", "expert outside", [e, x, T("i32", np.full([45, 2], 4))], None, fails="run")
    gather_mm(book)


def add_mm(book):
    def add(note, c, a, b, alpha, beta, rows=None, views=False):
        dtype = promote_all([c, a, b])
        out = beta * c.to(dtype).up + alpha * np.matmul(a.to(dtype).up, b.to(dtype).up)
        book.one("addmm", note, [c, a, b], T(dtype, out), rows=rows, alpha=alpha, beta=beta)
        if views:
            book.views("addmm", f"views {note}", [c, a, b], T(dtype, out), alpha=alpha, beta=beta)

    for d in FLOATS:
        for alpha, beta in ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0), (1.0, 0.0)):
            a, b, c = (sample(rng("addmm", d, i), d, s) for i, s in enumerate(([3, 4], [4, 5], [3, 5])))
            add(f"{d} {alpha} {beta}", c, a, b, alpha, beta, views=d == "f32")
    a, b, c = (sample(rng("addmm", "c64", i), "c64", s) for i, s in enumerate(([3, 4], [4, 5], [3, 5])))
    for alpha, beta in ((1.0, 1.0), (0.5, -2.0)):
        add(f"c64 {alpha} {beta}", c, a, b, alpha, beta, views=True)
    real = sample(rng("addmm", "beside c64"), "f32", [4, 5])
    add("c64 beside f32", c, a, real, 1.0, 1.0)
    for s in ([], [5], [3, 1], [1, 5], [1]):
        c = sample(rng("addmm", s), "f32", s)
        a, b = sample(rng("a"), "f32", [3, 4]), sample(rng("b"), "f32", [4, 5])
        add(f"broadcast {s}", c, a, b, 2.0, 3.0)
    add("batch", c, sample(rng("a"), "f32", [2, 3, 4]), sample(rng("b"), "f32", [2, 4, 5]), 2.0, 3.0)
    add("mixed", T("f16", c.a), sample(rng("a"), "bf16", [3, 4]), sample(rng("b"), "f32", [4, 5]), 2.0, 3.0)
    add("nothing to sum", c, T("f32", np.zeros([3, 0])), T("f32", np.zeros([0, 5])), 2.0, 3.0)
    add("empty", c, T("f32", np.zeros([0, 4])), T("f32", np.zeros([4, 5])), 2.0, 3.0)
    add("rows", sample(rng("c"), "f32", [5]), sample(rng("a"), "f32", [6, 4]), sample(rng("b"), "f32", [4, 5]), 2.0, 3.0, rows=[1])
    add("large", sample(rng("c"), "f32", [41]), sample(rng("a"), "f32", [37, 66]), sample(rng("b"), "f32", [66, 41]), 1.0, 1.0)


def mul_mat(book):
    from blocks import TYPES, block

    def add(note, x, w, values, rows=None, views=False):
        a = x.up
        if values.ndim > 2:
            # The batch axes of w divide those of x: consecutive ones share (grouped-query attention).
            lead = [1] * (a.ndim - values.ndim) + list(values.shape[:-2])
            values = values.reshape(lead + list(values.shape[-2:]))
            for axis, (m, n) in enumerate(zip(a.shape[:-2], lead)):
                values = np.repeat(values, m // n if n else 1, axis)
        out = T("f32", np.matmul(a, np.swapaxes(values, -1, -2)))
        book.one("mul_mat", note, [x, w], out, rows=rows)
        if views:
            book.views("mul_mat", f"views {note}", [x, w], out)

    for d in FLOATS:
        for e in FLOATS:
            x, w = sample(rng("mul", d), d, [5, 12]), sample(rng("mul", e, 2), e, [7, 12])
            add(f"{d} by {e}", x, w, w.up, views=d == "f32")
        w = sample(rng("mul", d, 3), d, [7, 12])
        for s in ([2, 3, 12], [2, 1, 3, 12], [1, 12]):
            x = sample(rng("mul", s), "f32", s)
            add(f"{s} by {d}", x, w, w.up)
        for s, t in (([2, 3, 12], [2, 7, 12]), ([4, 3, 12], [2, 7, 12]), ([2, 6, 3, 12], [2, 2, 7, 12]), ([2, 6, 3, 12], [1, 3, 7, 12])):
            x, w = sample(rng("mul", s), "f32", s), sample(rng("mul", d, t), d, t)
            add(f"{s} by {t} {d}", x, w, w.up)
    for d, (_, length, _) in TYPES.items():
        w, values = block(rng("mul", d), d, 7, 2 * length)
        x = sample(rng("mul", d, "x"), "f32", [5, 2 * length])
        add(d, x, w, values)
        add(f"rows {d}", x, w, values, rows=[0])
        for e in ("f16", "f64"):
            add(f"{e} by {d}", x.to(e), w, values)
        add(f"batch by {d}", T("f32", x.a.reshape(5, 1, -1)), w, values)
    w = sample(rng("mul"), "f32", [7, 12])
    add("rows", sample(rng("mul"), "f32", [5, 12]), w, w.up, rows=[0])
    add("rows of batches", sample(rng("mul"), "f32", [5, 3, 12]), w, w.up, rows=[0])
    add("empty", T("f32", np.zeros([0, 12])), w, w.up)
    add("nothing to sum", T("f32", np.zeros([2, 0])), T("f32", np.zeros([3, 0])), np.zeros([3, 0]))
    x, w = sample(rng("mul"), "f32", [19, 131]), sample(rng("mul", 2), "f16", [67, 131])
    add("large", x, w, w.up)
    book.one("mul_mat", "inner axes differ", [x, T("f32", np.zeros([2, 3]))], None, fails="verify")
    book.one("mul_mat", "integers", [x, T("i32", np.zeros([2, 131]))], None, fails="verify")


def gather_mm(book):
    def add(note, a, b, lhs, rhs, views=False):
        dtype = promote_all([a, b])
        x, y = a.to(dtype).up, b.to(dtype).up
        every = lambda m: np.arange(int(np.prod(m.shape[:-2]))).reshape(m.shape[:-2])
        i = every(x) if lhs is None else lhs.a.astype(np.int64)
        j = every(y) if rhs is None else rhs.a.astype(np.int64)
        i, j = np.broadcast_arrays(i, j)
        flat = lambda m: m.reshape((-1,) + m.shape[-2:])
        out = T(dtype, np.matmul(flat(x)[i], flat(y)[j]))
        for hint in (False, True) if note == "both" else (False,):
            book.one("gather_mm", f"{note} {dtype}", [a, b, lhs, rhs], out, sorted=hint)
        if views:
            book.views("gather_mm", f"views {note}", [a, b, lhs, rhs], out, sorted=False)

    for d in FLOATS:
        a, b = sample(rng("gmm", d), d, [3, 2, 4]), sample(rng("gmm", d, 2), d, [5, 4, 6])
        add("both", a, b, T("u32", [0, 2, 2, 1]), T("u32", [4, 0, 3, 3]), views=d == "f32")
        add("right", T(d, a.a), b, None, T("i32", [4, 0, -2]))
        add("left", a, b, T("i64", [2, 0, 1, 1, 0]), None)
        add("neither", a, T(d, b.a[:3]), None, None)
        add("two axes", a, b, T("i32", [[0], [2]]), T("i32", [[1, 2, 3]]))
    a, b = sample(rng("gmm", "c64"), "c64", [3, 2, 4]), sample(rng("gmm", "c64", 2), "c64", [5, 4, 6])
    add("both", a, b, T("u32", [0, 2, 2, 1]), T("u32", [4, 0, 3, 3]), views=True)
    a, b = sample(rng("gmm", "ids"), "f32", [3, 2, 4]), sample(rng("gmm", "ids", 2), "f32", [5, 4, 6])
    for d in INTS:
        add(f"indices {d}", a, b, T(d, [0, 2, 2, 1]), T(d, [4, 0, 3, 3]))
    a, b = sample(rng("gmm"), "f32", [2, 3, 2, 4]), sample(rng("gmm", 2), "f16", [2, 2, 4, 6])
    add("flattened batches", a, b, T("i32", [5, 0, 3]), T("i32", [3, 0, 2]))
    add("none", a, b, T("i32", np.zeros([0])), T("i32", np.zeros([0])))
    a, b = sample(rng("gmm"), "f32", [21, 1, 16]), sample(rng("gmm", 2), "f32", [5, 16, 33])
    add("large", a, b, None, sample(rng("gmm"), "u32", [21], 0, 5))
    book.one("gather_mm", "outside", [a, b, None, T("u32", np.full([21], 5))], None, fails="run", sorted=False)


def norm(book):
    def inner(x):
        return x.up

    def rms(x, w, eps):
        y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
        return y if w is None else y * w

    def layer(x, w, b, eps):
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        y = y if w is None else y * w
        return y if b is None else y + b

    def group(x, w, b, groups, eps):
        t = lambda v: None if v is None else torch.from_numpy(v)
        return torch.nn.functional.group_norm(torch.from_numpy(x), groups, t(w), t(b), eps).numpy()

    def add(op, note, inputs, f, rows=None, views=True, check=None, **attributes):
        x = inputs[0]
        out = T(x.dtype, f(*[None if t is None else t.up for t in inputs]))
        book.one(op, note, inputs, out, check, rows=rows, **attributes)
        if views and rows is None and len(inputs) == sum(t is not None for t in inputs):
            book.views(op, f"views {note}", inputs, out, check, **attributes)

    shapes = {"odd": [3, 5, 7], "one row": [17], "long": [2, 131], "one column": [4, 1], "empty": [0, 5]}
    for d in FLOATS:
        for name, s in shapes.items():
            x = sample(rng("norm", d, name), d, s)
            w, b = sample(rng("norm", d, 1), d, s[-1:]), sample(rng("norm", d, 2), d, s[-1:])
            for eps in (1e-5, 0.1):
                add("rms_norm", f"{name} {d}", [x, w], lambda x, w: rms(x, w, eps), eps=eps)
                add("rms_norm", f"no weight {name} {d}", [x, None], lambda x, w: rms(x, w, eps), eps=eps)
                add("layer_norm", f"{name} {d}", [x, w, b], lambda x, w, b: layer(x, w, b, eps), eps=eps)
                add("layer_norm", f"no weight {name} {d}", [x, None, None], lambda x, w, b: layer(x, w, b, eps), eps=eps)
            add("layer_norm", f"no bias {name} {d}", [x, w, None], lambda x, w, b: layer(x, w, b, 1e-3), eps=1e-3)
            l2 = lambda x: x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 0.5)
            add("l2_norm", f"{name} {d}", [x], l2, eps=0.5)
            for axis in {-1, 0, len(s) - 1, -len(s)}:
                if s[axis]:
                    add("softmax", f"{name} {d} {axis}", [x], lambda x: special.softmax(x, axis), axis=axis)
                    add("log_softmax", f"{name} {d} {axis}", [x], lambda x: special.log_softmax(x, axis), axis=axis)
        tiny = T(d, [[0.0, 0.0], [1e-4, -1e-4]])
        add("l2_norm", f"below eps {d}", [tiny], lambda x: x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 0.01), eps=0.01)
        for s, groups in (([2, 6, 5], 3), ([2, 6], 2), ([1, 4, 3, 3], 1), ([3, 4, 2], 4), ([1, 8, 2, 3, 2], 2)):
            x = sample(rng("group", d, s), d, s)
            w, b = sample(rng("group", d, 1), d, s[1:2]), sample(rng("group", d, 2), d, s[1:2])
            for inputs in ([x, w, b], [x, None, None], [x, w, None], [x, None, b]):
                f = lambda x, w, b: group(x, w, b, groups, 1e-4)
                if s == [3, 4, 2] or len(s) > 2:
                    add("group_norm", f"{s} {groups} {d}", inputs, f, groups=groups, eps=1e-4)
        big = T(d, [[100.0, 99.0, 50.0], [-100.0, -100.0, -100.0], [10000.0, 0.0, -10000.0]])
        add("softmax", f"far from zero {d}", [big], lambda x: special.softmax(x, -1), axis=-1)
        add("log_softmax", f"far from zero {d}", [big], lambda x: special.log_softmax(x, -1), axis=-1)
        masked = T(d, [[0.0, -np.inf, 1.0], [-np.inf, -np.inf, -np.inf], [1.0, np.nan, 2.0]])
        with np.errstate(all="ignore"):
            add("softmax", f"masked {d}", [masked], lambda x: special.softmax(x, -1), axis=-1)
            add("log_softmax", f"masked {d}", [masked], lambda x: x - special.logsumexp(x, -1, keepdims=True), axis=-1)
    x = sample(rng("norm"), "f32", [5, 8], -3, 3)
    w, b = sample(rng("norm", 1), "f32", [8]), sample(rng("norm", 2), "f32", [8])
    add("rms_norm", "rows", [x, w], lambda x, w: rms(x, w, 1e-5), rows=[0], eps=1e-5)
    add("rms_norm", "half weight", [x, w.to("f16")], lambda x, w: rms(x, w, 1e-5), eps=1e-5)
    add("layer_norm", "rows", [x, w, b], lambda x, w, b: layer(x, w, b, 1e-5), rows=[0], eps=1e-5)
    add("l2_norm", "rows", [x], lambda x: x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-6), rows=[0], eps=1e-6)
    add("softmax", "rows", [x], lambda x: special.softmax(x, -1), rows=[0], axis=-1)
    add("log_softmax", "rows", [x], lambda x: special.log_softmax(x, -1), rows=[0], axis=1)
    x = T("f32", 1e4 + rng("far").standard_normal([3, 64]))
    add("layer_norm", "far from zero", [x, None, None], lambda x, w, b: layer(x, w, b, 1e-5), eps=1e-5)
    x = sample(rng("large"), "f16", [23, 301], -3, 3)
    add("softmax", "large", [x], lambda x: special.softmax(x, -1), axis=-1)
    add("log_softmax", "large", [x], lambda x: special.log_softmax(x, 0), axis=0)
    add("rms_norm", "large", [x, None], lambda x, w: rms(x, w, 1e-5), eps=1e-5)
    add("layer_norm", "large", [x, None, None], lambda x, w, b: layer(x, w, b, 1e-5), eps=1e-5)
    add("l2_norm", "large", [x], lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True)), eps=1e-6)
    x = sample(rng("large"), "f16", [2, 16, 101], -3, 3)
    add("group_norm", "large", [x, None, None], lambda x, w, b: group(x, w, b, 4, 1e-5), groups=4, eps=1e-5)
    x = sample(rng("group", "odd"), "f32", [3, 5, 3])
    add("group_norm", "odd", [x, None, None], lambda x, w, b: group(x, w, b, 5, 1e-5), groups=5, eps=1e-5)
    add("group_norm", "empty", [T("f32", np.zeros([0, 4, 3])), None, None], lambda x, w, b: x, groups=2, eps=1e-5)
    x = sample(rng("group", "rows"), "f32", [5, 6, 2])
    add("group_norm", "rows", [x, None, None], lambda x, w, b: group(x, w, b, 3, 1e-5), rows=[0], groups=3, eps=1e-5)
    for n in (0, 2):
        add("softmax", f"scalar rows {n}", [T("f32", np.zeros([2, n]))], lambda x: special.softmax(x, 0), axis=0)
    for d in INTS + ["bool"]:
        t = sample(rng("softmax", d), d, [3, 5, 7])
        for axis in (-1, 0, 1):
            whole = t.to("f32").up
            book.one("softmax", f"odd {d} {axis}", [t], T("f32", special.softmax(whole, axis)), axis=axis)
            book.one("log_softmax", f"odd {d} {axis}", [t], T("f32", special.log_softmax(whole, axis)), axis=axis)
    book.one("rms_norm", "weight of another length", [x, T("f32", np.zeros(3))], None, fails="verify", eps=1e-5)
    book.one("group_norm", "groups that do not divide", [x, None, None], None, fails="verify", groups=4, eps=1e-5)
    book.one("softmax", "no such axis", [x], None, fails="verify", axis=3)


def conv(book):
    def torch_conv(x, w, b, strides, low, high, dilations, groups):
        n = len(strides)
        flat = [p for i in reversed(range(n)) for p in (low[i], high[i])]
        t = torch.nn.functional.pad(torch.from_numpy(x), flat)
        f = [torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d][n - 1]
        bias = None if b is None else torch.from_numpy(b)
        return f(t, torch.from_numpy(w), bias, stride=strides, dilation=dilations, groups=groups).numpy()

    def add(note, x, w, b, strides, low, high, dilations, groups, rows=None, views=False):
        tensors = [t for t in (x, w, b) if t is not None]
        dtype = promote_all(tensors)
        up = lambda t: None if t is None else np.ascontiguousarray(t.to(dtype).up)
        out = torch_conv(up(x), up(w), up(b), strides, low, high, dilations, groups)
        attributes = {"strides": strides, "low": low, "high": high, "dilations": dilations, "groups": groups}
        last = lambda a: np.moveaxis(a, 1, -1)
        for layout in ("channels_first", "channels_last"):
            move = last if layout == "channels_last" else lambda a: a
            inputs = [T(x.dtype, move(x.a)), T(w.dtype, move(w.a)), b]
            result = T(dtype, move(out))
            book.one("conv", f"{note} {layout}", inputs, result, rows=rows, layout=layout, **attributes)
            if views:
                book.views("conv", f"views {note} {layout}", inputs, result, layout=layout, **attributes)

    settings = [
        # x, w, strides, low, high, dilations, groups
        ([2, 3, 9], [4, 3, 3], [1], [0], [0], [1], 1),
        ([2, 3, 9], [4, 3, 3], [2], [1], [2], [1], 1),
        ([1, 4, 11], [4, 2, 3], [1], [2], [2], [2], 2),
        ([1, 4, 11], [8, 1, 4], [3], [0], [5], [3], 4),
        ([2, 3, 7, 6], [4, 3, 3, 2], [1, 1], [0, 0], [0, 0], [1, 1], 1),
        ([2, 3, 7, 6], [4, 3, 3, 2], [2, 1], [1, 0], [0, 3], [1, 2], 1),
        ([1, 4, 5, 5], [6, 2, 1, 1], [1, 1], [0, 0], [0, 0], [1, 1], 2),
        ([1, 3, 8, 5], [3, 1, 3, 3], [1, 2], [1, 1], [1, 1], [2, 1], 3),
        ([1, 2, 4, 5, 3], [3, 2, 2, 2, 2], [1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], 1),
        ([2, 2, 4, 5, 3], [4, 1, 3, 2, 1], [2, 1, 2], [1, 0, 2], [0, 2, 1], [1, 2, 1], 2),
        ([1, 2, 3], [2, 2, 3], [1], [0], [0], [1], 1),
        ([1, 1, 1], [1, 1, 1], [1], [0], [0], [1], 1),
        ([0, 2, 5], [3, 2, 3], [1], [0], [0], [1], 1),
    ]
    for i, (s, t, *rest) in enumerate(settings):
        for d in FLOATS:
            x, w, b = sample(rng("conv", d, i), d, s), sample(rng("conv", d, i, 1), d, t), sample(rng("conv", d, i, 2), d, t[:1])
            add(f"{s} {t} {d}", x, w, None, *rest, views=d == "f32" and s[0] > 0)
            if d in ("f32", "f16") or i == 0:
                add(f"bias {s} {t} {d}", x, w, b, *rest)
    x, w, b = sample(rng("conv"), "f16", [1, 2, 6]), sample(rng("conv", 1), "bf16", [3, 2, 3]), sample(rng("conv", 2), "f32", [3])
    add("mixed", x, w, b, [1], [0], [0], [1], 1)
    add("mixed without bias", x, w, None, [1], [0], [0], [1], 1)
    x, w = sample(rng("conv"), "f32", [5, 2, 6]), sample(rng("conv", 1), "f32", [3, 2, 3])
    add("rows", x, w, None, [1], [1], [1], [1], 1, rows=[0])
    x, w = sample(rng("conv"), "f16", [1, 8, 21, 19]), sample(rng("conv", 1), "f16", [9, 8, 3, 3])
    add("large", x, w, None, [1, 1], [1, 1], [1, 1], [1, 1], 1)
    more = {"strides": [1], "low": [0], "high": [0], "dilations": [1], "layout": "channels_first"}
    x, w = T("f32", np.zeros([1, 4, 6])), T("f32", np.zeros([4, 2, 3]))
    book.one("conv", "groups that do not fit", [x, w, None], None, fails="verify", groups=1, **more)
    book.one("conv", "integers", [x.to("i32"), w.to("i32"), None], None, fails="verify", groups=2, **more)
    book.one("conv", "two strides for one axis", [x, w, None], None, fails="verify", groups=2, **(more | {"strides": [1, 1]}))
    pool(book)


def pool(book):
    def compute(x, kind, window, strides, low, high, dilations):
        n, a = len(window), x.a if x.dtype in INTS else x.up
        least = np.iinfo(NUMPY[x.dtype]).min if x.dtype in INTS else -np.inf
        pad = [(0, 0), (0, 0)] + list(zip(low, high))
        full = np.pad(a, pad, constant_values=least if kind == "max" else 0)
        count = np.pad(np.ones(a.shape), pad)
        reach = [(w - 1) * d + 1 for w, d in zip(window, dilations)]
        size = [(full.shape[2 + i] - reach[i]) // strides[i] + 1 for i in range(n)]
        out = np.zeros(list(a.shape[:2]) + size, dtype=a.dtype)
        for place in np.ndindex(*size):
            at = (slice(None), slice(None)) + tuple(
                slice(p * s, p * s + r, d) for p, s, r, d in zip(place, strides, reach, dilations)
            )
            axes = tuple(range(2, 2 + n))
            if kind == "max":
                v = full[at].max(axes)
            elif kind == "average":
                v = full[at].sum(axes) / np.prod(window)
            else:
                v = full[at].sum(axes) / count[at].sum(axes)
            out[(slice(None), slice(None)) + place] = v
        return out

    def add(note, x, kind, window, strides, low, high, dilations, rows=None, views=False):
        out = compute(x, kind, window, strides, low, high, dilations)
        attributes = {"kind": kind, "window": window, "strides": strides, "low": low, "high": high, "dilations": dilations}
        for layout in ("channels_first", "channels_last"):
            move = (lambda a: np.moveaxis(a, 1, -1)) if layout == "channels_last" else lambda a: a
            t, result = T(x.dtype, move(x.a)), T(x.dtype, move(out))
            check = "exact" if kind == "max" else None
            book.one("pool", f"{note} {kind} {layout}", [t], result, check, rows=rows, layout=layout, **attributes)
            if views:
                book.views("pool", f"views {note} {kind} {layout}", [t], result, check, layout=layout, **attributes)

    settings = [
        ([2, 3, 9], [3], [1], [0], [0], [1]),
        ([2, 3, 9], [3], [2], [1], [2], [1]),
        ([1, 2, 11], [3], [2], [2], [0], [2]),
        ([2, 3, 7, 6], [2, 2], [2, 2], [0, 0], [0, 0], [1, 1]),
        ([1, 2, 7, 6], [3, 2], [1, 2], [1, 0], [2, 1], [2, 1]),
        ([1, 2, 4, 5, 3], [2, 2, 2], [1, 2, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]),
        ([1, 1, 1], [1], [1], [0], [0], [1]),
        ([0, 2, 5], [3], [1], [0], [0], [1]),
    ]
    for i, (s, *rest) in enumerate(settings):
        for kind in ("max", "average", "average_valid"):
            for d in FLOATS + (["i32", "u8", "i8"] if kind == "max" else []):
                x = sample(rng("pool", d, i), d, s, -9, -1 if d in FLOATS else 9)
                add(f"{s} {d}", x, kind, *rest, views=d == "f32" and s[0] > 0)
    for d in INTS:
        if d not in ("i32", "u8", "i8"):
            for i, (s, *rest) in enumerate(settings[:5]):
                add(f"{s} {d}", sample(rng("pool", d, i), d, s, -9, 9), "max", *rest)
    x = sample(rng("pool"), "f32", [5, 2, 6])
    for kind in ("max", "average", "average_valid"):
        add("rows", x, kind, [2], [2], [1], [1], [1], rows=[0])
        add("NaN", T("f32", [[[1, np.nan, 3, 4, np.inf, 6]]]), kind, [2], [1], [0], [0], [1])
    add("large", sample(rng("large"), "f16", [1, 9, 31, 29]), "max", [3, 3], [2, 2], [1, 1], [1, 1], [1, 1])
    more = {"window": [2], "strides": [1], "low": [0], "high": [0], "dilations": [1], "layout": "channels_first"}
    book.one("pool", "average of integers", [x.to("i32")], None, fails="verify", kind="average", **more)


def fill(books):
    for name, f in (("reduce", reduce), ("matmul", matmul), ("norm", norm), ("conv", conv)):
        books[name] = Book(name)
        f(books[name])
