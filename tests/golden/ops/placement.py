"""Cases of rows that are made of others: by place, images, contractions; and of bits, running extremes and sums of powers.

Images are computed element by element as PyTorch's and ONNX's pages define them, in float64; the rest is NumPy's.
"""

import itertools

import numpy as np

from common import FLOATS, INTS, MIN, NUMPY, PLAIN, REALS, Book, T, corners, floating, promote_all, rng, sample


def checked(book, op, note, inputs, out, check="exact", rows=None, views=True, **attributes):
    """A case, and the same of views."""
    book.one(op, note, inputs, out, check, rows=rows, **attributes)
    if views and rows is None:
        book.views(op, f"views {note}", inputs, out, check, **attributes)


def triangles(book):
    for op, f in (("tril", np.tril), ("triu", np.triu)):
        for d in PLAIN:
            x = sample(rng(op, d), d, [3, 5])
            for k in (0, 1, -2):
                checked(book, op, f"{d} {k}", [x], T(d, f(x.a, k)), views=d in ("f32", "u8"), k=k)
        for s, k in (([2, 3, 4, 5], 1), ([4, 3], -9), ([4, 3], 9), ([0, 3], 0), ([2, 3, 0], 0), ([31, 17], 3), ([1, 1], 0)):
            x = sample(rng(op, s), "f32", s)
            checked(book, op, f"{s} {k}", [x], T("f32", f(x.a, k)), views=0 not in s, k=k)
        x = T("f32", [[np.nan, np.nan], [np.inf, 1.0]])
        checked(book, op, "NaN", [x], T("f32", f(x.a)), k=0)
        x = sample(rng(op, "rows"), "f32", [5, 3, 4])
        checked(book, op, "rows", [x], T("f32", f(x.a)), rows=[0], k=0)
        book.one(op, "one axis", [sample(rng(op), "f32", [4])], None, fails="verify", k=0)
        book.one(op, "the row dimension", [sample(rng(op), "f32", [5, 4])], None, fails="verify", rows=[0], k=0)


def diagonals(book):
    def diag(a, k):
        n = a.shape[-1] + abs(k)
        out = np.zeros(a.shape[:-1] + (n, n), a.dtype)
        for i in range(a.shape[-1]):
            out[..., i + max(-k, 0), i + max(k, 0)] = a[..., i]
        return out

    for d in PLAIN:
        x = sample(rng("diag", d), d, [2, 5])
        for k in (0, 2, -1):
            checked(book, "diag", f"{d} {k}", [x], T(d, diag(x.a, k)), views=d in ("f32", "u8"), k=k)
        x = sample(rng("diagonal", d), d, [3, 5, 4])
        for k, a, b in ((0, 0, 1), (1, -1, 1), (-2, 1, 2)):
            out = T(d, np.diagonal(x.a, k, a, b))
            checked(book, "diagonal", f"{d} {k} {a} {b}", [x], out, views=d in ("f32", "u8"), offset=k, axis1=a, axis2=b)
    for s in ([5], [1], [0], [29]):
        x = sample(rng("diag", s), "f32", s)
        checked(book, "diag", f"{s}", [x], T("f32", diag(x.a, 0)), views=s != [0], k=0)
    x = sample(rng("diag", "rows"), "f32", [5, 3])
    checked(book, "diag", "rows", [x], T("f32", diag(x.a, 1)), rows=[0], k=1)
    book.one("diag", "scalar", [T("f32", 1.0)], None, fails="verify", k=0)
    book.one("diag", "too far", [x], None, fails="verify", k=2**40)
    for s, k in (([4, 3], 3), ([4, 3], -4), ([4, 3], 2), ([0, 3], 0), ([31, 307], 5), ([1, 1], 0)):
        x = sample(rng("diagonal", s, k), "f32", s)
        out = T("f32", np.diagonal(x.a, k))
        checked(book, "diagonal", f"{s} {k}", [x], out, views=0 not in s, offset=k, axis1=0, axis2=1)
    x = sample(rng("diagonal", "rows"), "f32", [5, 3, 4])
    checked(book, "diagonal", "rows", [x], T("f32", np.diagonal(x.a, 0, 1, 2)), rows=[0], offset=0, axis1=1, axis2=2)
    book.one("diagonal", "of the rows", [x], None, fails="verify", rows=[0], offset=0, axis1=0, axis2=2)
    book.one("diagonal", "one axis twice", [x], None, fails="verify", offset=0, axis1=1, axis2=-2)


def moved(book):
    for d in PLAIN:
        x = sample(rng("roll", d), d, [3, 5])
        for s, a in ((1, 0), (-2, 1), (7, -1)):
            checked(book, "roll", f"{d} {s} {a}", [x], T(d, np.roll(x.a, s, a)), views=d in ("f32", "u8"), shift=s, axis=a)
    for shape, s, a in (([7], 0, 0), ([0, 3], 2, 0), ([17, 31], -11, 0), ([1], 5, 0)):
        x = sample(rng("roll", shape), "f32", shape)
        checked(book, "roll", f"{shape}", [x], T("f32", np.roll(x.a, s, a)), views=0 not in shape, shift=s, axis=a)
    x = sample(rng("roll", "rows"), "f32", [5, 4])
    checked(book, "roll", "rows", [x], T("f32", np.roll(x.a, 1, 1)), rows=[0], shift=1, axis=1)
    book.one("roll", "the rows", [x], None, fails="verify", rows=[0], shift=1, axis=0)

    def strided(note, x, shape, strides, offset, views=True):
        flat = x.a.reshape(-1)
        at = np.full(shape, offset, np.int64)
        for axis, s in enumerate(strides):
            at = at + (np.arange(shape[axis]) * s).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        out = T(x.dtype, flat[at] if at.size else np.zeros(shape))
        checked(book, "as_strided", note, [x], out, views=views, shape=list(shape), strides=list(strides), offset=offset)

    for d in PLAIN:
        x = sample(rng("as_strided", d), d, [4, 6])
        strided(f"{d} windows", x, [4, 3, 4], [6, 1, 1], 0, views=d in ("f32", "u8"))
        strided(f"{d} backwards", x, [3, 5], [-6, 1], 18, views=d == "f32")
    x = sample(rng("as_strided"), "f32", [24])
    strided("scalar", x, [], [], 7)
    strided("one over and over", x, [3, 2], [0, 0], 23)
    strided("nothing", x, [0, 3], [1000, 1], 5)
    strided("nothing of nothing", T("f32", np.zeros([0])), [2, 0], [1, 1], 0, views=False)
    strided("large", sample(rng("as_strided", "large"), "f32", [400]), [197, 7], [2, -1], 6)
    for note, s, t, o in (("past the end", [25], [1], 0), ("before", [3], [-1], 1), ("offset", [1], [1], 24), ("wraps", [3, 3], [2**40, -(2**40)], 0)):
        book.one("as_strided", note, [x], None, fails="verify", shape=s, strides=t, offset=o)
    book.one("as_strided", "a stride too few", [x], None, fails="verify", shape=[2, 2], strides=[1], offset=0)


def updates(book):
    def update(note, x, u, starts, stops, steps, views=True):
        out = x.a.copy()
        out[tuple(slice(a, None if b == MIN else b, c) for a, b, c in zip(starts, stops, steps))] = u.a
        checked(book, "slice_update", note, [x, u], T(x.dtype, out), views=views, starts=starts, stops=stops, steps=steps)

    for d in PLAIN:
        x = sample(rng("update", d), d, [4, 7])
        update(f"{d} steps", x, sample(rng("update", d, 1), d, [2, 3]), [1, 0], [3, 6], [1, 2], views=d in ("f32", "u8"))
        update(f"{d} backwards", x, sample(rng("update", d, 2), d, [2, 7]), [-1, -1], [-3, MIN], [-1, -1], views=d == "f32")
        update(f"{d} broadcast", x, sample(rng("update", d, 3), d, [3]), [0, 2], [4, 5], [1, 1], views=d == "f32")
    x = sample(rng("update"), "f32", [4, 7])
    update("scalar update", x, T("f32", 9.0), [0, 3], [4, 4], [1, 1])
    update("nothing", x, sample(rng("u"), "f32", [0, 7]), [2, 0], [2, 7], [1, 1], views=False)
    update("of nothing", T("f32", np.zeros([0, 3])), T("f32", np.zeros([0, 3])), [0, 0], [0, 3], [1, 1], views=False)
    update("large", sample(rng("u"), "f32", [31, 17]), sample(rng("u", 1), "f32", [11, 17]), [0, 0], [31, 17], [3, 1])
    update("three axes", sample(rng("u"), "f32", [3, 4, 5]), sample(rng("u", 1), "f32", [2, 1, 5]), [1, 0, 0], [3, 4, 5], [1, 2, 1])
    more = {"starts": [0, 0], "stops": [2, 2], "steps": [1, 1]}
    book.one("slice_update", "of another shape", [x, sample(rng("u"), "f32", [3, 2])], None, fails="verify", **more)
    book.one("slice_update", "of another dtype", [x, T("f16", 1.0)], None, fails="verify", **more)
    book.one("slice_update", "a step of 0", [x, T("f32", 1.0)], None, fails="verify", **(more | {"steps": [1, 0]}))

    def place(x, starts):
        return [int(s) + (n if s < 0 else 0) for s, n in zip(np.atleast_1d(starts.a), x.shape)]

    def dynamic(note, x, starts, sizes, views=True):
        at = place(x, starts)
        out = x.a[tuple(slice(a, a + n) for a, n in zip(at, sizes))]
        assert list(out.shape) == list(sizes)
        checked(book, "slice_dynamic", note, [x, starts], T(x.dtype, out), views=views, sizes=list(sizes))

    def put(note, x, u, starts, views=True):
        out = x.a.copy()
        out[tuple(slice(a, a + n) for a, n in zip(place(x, starts), u.shape))] = u.a
        checked(book, "slice_update_dynamic", note, [x, u, starts], T(x.dtype, out), views=views)

    for d in PLAIN:
        x = sample(rng("dynamic", d), d, [4, 7])
        dynamic(f"{d}", x, T("i32", [1, -5]), [2, 3], views=d in ("f32", "u8"))
        put(f"{d}", x, sample(rng("dynamic", d, 1), d, [3, 5]), T("i32", [-4, 2]), views=d in ("f32", "u8"))
    x, u = sample(rng("dynamic"), "f32", [4, 7]), sample(rng("dynamic", 1), "f32", [2, 3])
    for d in INTS:
        dynamic(f"starts {d}", x, T(d, [2, 3]), [2, 3])
        put(f"starts {d}", x, u, T(d, [1, 4]))
    dynamic("all", x, T("u8", [0, 0]), [4, 7])
    dynamic("nothing", x, T("i64", [4, 7]), [0, 0], views=False)
    dynamic("scalar", T("f32", 5.0), T("i32", np.zeros([0])), [], views=False)
    dynamic("large", sample(rng("dynamic"), "f32", [40, 31]), T("i32", [3, -31]), [33, 31])
    put("nothing", x, T("f32", np.zeros([0, 3])), T("i32", [2, 2]), views=False)
    put("of nothing", T("f32", np.zeros([0, 3])), T("f32", np.zeros([0, 2])), T("i32", [0, 1]), views=False)
    put("large", sample(rng("dynamic"), "f32", [40, 31]), sample(rng("dynamic", 2), "f32", [33, 29]), T("i64", [-33, 2]))
    put("one axis", sample(rng("dynamic"), "f32", [9]), sample(rng("dynamic", 2), "f32", [4]), T("u8", [5]))
    for d, bad in (("i32", [3, 0]), ("i32", [0, -8]), ("i64", [MIN, 0]), ("i64", [0, 2**62]), ("u64", [0, 2**63 + 5]), ("u8", [0, 255]), ("i32", [-5, 0])):
        starts = T(d, np.array(bad, dtype=NUMPY[d]))
        book.one("slice_dynamic", f"outside {bad}", [x, starts], None, fails="run", sizes=[2, 3])
        book.one("slice_update_dynamic", f"outside {bad}", [x, u, starts], None, fails="run")
    book.one("slice_dynamic", "larger than x", [x, T("i32", [0, 0])], None, fails="verify", sizes=[5, 1])
    book.one("slice_dynamic", "a start too few", [x, T("i32", [0])], None, fails="verify", sizes=[1, 1])
    book.one("slice_dynamic", "float starts", [x, T("f32", [0, 0])], None, fails="verify", sizes=[1, 1])
    book.one("slice_update_dynamic", "larger than x", [x, T("f32", np.zeros([1, 8])), T("i32", [0, 0])], None, fails="verify")
    book.one("slice_update_dynamic", "of another dtype", [x, T("f64", np.zeros([1, 1])), T("i32", [0, 0])], None, fails="verify")


def bits(book):
    def view(note, x, to, rows=None, views=True):
        raw = np.frombuffer(x.bytes(), np.uint8)
        width = {"bool": 1, "bf16": 2}.get(to) or np.dtype(NUMPY[to]).itemsize
        own = {"bool": 1, "bf16": 2}.get(x.dtype) or np.dtype(NUMPY[x.dtype]).itemsize
        shape = list(x.shape)
        if own != width:
            shape[-1] = shape[-1] * own // width
        if to == "bf16":
            a = (np.frombuffer(raw.tobytes(), np.uint16).astype(np.uint32) << 16).view(np.float32)
            out = T("f32", a.reshape(shape))
            out.dtype = "bf16"
        else:
            out = T(to, np.frombuffer(raw.tobytes(), NUMPY[to]).reshape(shape))
        checked(book, "bitcast", note, [x], out, rows=rows, views=views, dtype=to)

    for d in PLAIN:
        for to in PLAIN[1:]:
            x = T(d, np.resize(corners(d), [3, 8])) if d in INTS else sample(rng("bitcast", d), d, [3, 8])
            view(f"{d} as {to}", x, to, views=d in ("f32", "u8") and to in ("f32", "u8", "f64"))
    x = sample(rng("bitcast"), "f32", [])
    view("scalar", x, "u32", views=False)
    view("NaN", T("f32", [np.nan, -np.inf, -0.0]), "i32")
    view("empty", T("f32", np.zeros([0, 2])), "f64", views=False)
    view("large", sample(rng("bitcast", "large"), "f32", [37, 22]), "u64")
    view("rows", sample(rng("bitcast", "rows"), "f32", [5, 4]), "u16", rows=[0])
    view("rows alone", sample(rng("bitcast", "rows"), "f32", [5]), "u32", rows=[0])
    book.one("bitcast", "half an element", [sample(rng("b"), "f32", [3])], None, fails="verify", dtype="f64")
    book.one("bitcast", "a wider scalar", [x], None, fails="verify", dtype="u64")
    book.one("bitcast", "wider rows", [sample(rng("b"), "f32", [5])], None, fails="verify", rows=[0], dtype="u8")
    book.one("bitcast", "as bool", [sample(rng("b"), "u8", [4])], None, fails="verify", dtype="bool")


def running(book):
    with np.errstate(all="ignore"):
        for op in ("cummax", "cummin", "logcumsumexp"):
            f = {"cummax": np.maximum, "cummin": np.minimum, "logcumsumexp": np.logaddexp}[op]

            def add(note, x, axis, reverse, rows=None, views=False):
                a = x.up if x.dtype in FLOATS or op != "logcumsumexp" else x.a.astype(np.float64)
                a = np.flip(a, axis) if reverse else a
                out = f.accumulate(a, axis=axis) if a.size else a
                out = np.flip(out, axis) if reverse else out
                dtype = floating(x.dtype) if op == "logcumsumexp" else x.dtype
                check = "each" if op == "logcumsumexp" else "exact"
                checked(book, op, f"{note} {axis} {reverse}", [x], T(dtype, out), check, rows=rows, views=views, axis=axis, reverse=reverse)

            for d in REALS:
                # No difference that is near 0, where rounding would be all there is.
                x = sample(rng(op, d), d, [3, 4, 7], *((1, 6) if op == "logcumsumexp" else (-4, 4)))
                for axis, r in ((0, False), (1, True), (-1, False), (2, True)):
                    add(d, x, axis, r, views=d in ("f32", "i8"))
                if d in INTS and op != "logcumsumexp":
                    add(f"corners {d}", T(d, corners(d)), 0, False)
            for r in (False, True):
                add("one axis", sample(rng("one"), "f32", [17], 1, 6), 0, r, views=True)
                add("empty", T("f32", np.zeros([0, 3])), 0, r)
                add("NaN", T("f32", [3, 2, np.nan, 4, 9]), 0, r)
                add("one", T("f32", [[3], [2]]), 1, r, views=True)
                add("infinities", T("f32", [-np.inf, -np.inf, 2, -np.inf, np.inf, 1]), 0, r)
            add("large", sample(rng("large"), "f16", [3, 1501], 1, 6), 1, False)
            add("large", sample(rng("large"), "bf16", [1501, 3], 1, 6), 0, True)
            add("far apart", T("f64", [-700.0, 3.0, -650.0, 900.0, -3.5]), 0, False)
            add("rows", sample(rng("r"), "f32", [5, 6], 1, 6), 1, False, rows=[0])
            book.one(op, "scalar", [T("f32", 1.0)], None, fails="verify", axis=0, reverse=False)
            book.one(op, "along the rows", [sample(rng("r"), "f32", [5, 6])], None, fails="verify", rows=[0], axis=0, reverse=False)
            book.one(op, "bool", [T("bool", [True])], None, fails="verify", axis=0, reverse=False)


def contract(book):
    def add(note, equation, *tensors, views=False):
        dtype = promote_all(tensors)
        up = [t.to(dtype).up for t in tensors]
        if dtype in INTS:
            out = np.einsum(equation, *[a.astype(np.int64) if dtype != "u64" else a for a in up], optimize=False)
            with np.errstate(all="ignore"):
                out = np.asarray(out).astype(NUMPY[dtype])
        else:
            out = np.einsum(equation, *up, optimize=False)
        checked(book, "einsum", note, list(tensors), T(dtype, out), None if dtype not in INTS else "exact", views=views, equation=equation.encode())

    for d in REALS + ["c64"]:
        a, b = sample(rng("einsum", d), d, [3, 4]), sample(rng("einsum", d, 1), d, [4, 5])
        add(f"{d} product", "ij,jk->ik", a, b, views=d in ("f32", "i16"))
        add(f"{d} transposed", "ij->ji", a, views=d == "f32")
        add(f"{d} sum", "ij->", a)
        add(f"{d} batch", "bij,bkj->bik", sample(rng("einsum", d, 2), d, [2, 3, 4]), sample(rng("einsum", d, 3), d, [2, 5, 4]), views=d == "f32")
    f = lambda i, s, d="f32": sample(rng("einsum", "f", i), d, s)
    for i, (equation, shapes) in enumerate([
        ("ij,jk", [[3, 4], [4, 5]]), ("ii->i", [[4, 4]]), ("ii", [[4, 4]]), ("iji->j", [[3, 5, 3]]), ("i,j->ij", [[3], [5]]), ("i,i", [[7], [7]]),
        ("i,i->i", [[7], [7]]), ("...ij,...jk->...ik", [[2, 1, 3, 4], [6, 4, 5]]), ("b...,...->b...", [[2, 3, 4], [3, 4]]), ("ij,jk,kl->il", [[3, 4], [4, 5], [5, 2]]),
        ("ij,kj,ljm->ikm", [[3, 4], [5, 4], [2, 4, 3]]), (" i j , j -> i ", [[3, 4], [4]]), ("i...->...", [[3, 4, 5]]), ("bhqd,bhkd->bhqk", [[2, 2, 3, 5], [2, 2, 4, 5]]),
        (",->", [[], []]), ("i,->i", [[3], []]), ("ij,ij->ij", [[3, 1], [3, 4]]), ("a,b,c,d->dcba", [[2], [3], [2], [3]]), ("ab,bc->c", [[3, 4], [4, 5]]), ("iij,jk->k", [[3, 3, 2], [2, 4]]),
        ("ij,jk->ik", [[0, 4], [4, 5]]), ("ij,jk->ik", [[3, 0], [0, 5]]), ("ij,jk->ik", [[21, 17], [17, 19]]), ("BA,A->B", [[3, 4], [4]]),
    ]):  # fmt: skip
        tensors = [f((i, j), s) for j, s in enumerate(shapes)]
        add(f"{i} {equation}", equation, *tensors, views=not any(0 in s for s in shapes))
    add("mixed", "ij,jk->ik", f(1, [3, 4], "f16"), f(2, [4, 5], "bf16"))
    add("mixed integers", "ij,jk->ik", sample(rng("e"), "i8", [3, 4]), sample(rng("e", 1), "u8", [4, 5]))
    add("bool beside f32", "ij,j->i", sample(rng("e"), "bool", [3, 5]), f(3, [5]))
    for note, equation, shapes in [
        ("a letter too many", "ijk->i", [[3, 4]]), ("a letter too few", "i->i", [[3, 4]]), ("sizes differ", "ij,jk->ik", [[3, 4], [5, 2]]), ("unknown in the result", "ij->k", [[3, 4]]),
        ("twice in the result", "ij->ii", [[3, 4]]), ("tensors too many", "ij->i", [[3, 4], [4]]), ("other signs", "i+j", [[3, 4]]), ("dots twice", "......->", [[3, 4]]), ("arrows", "i->j->k", [[3]]),
        ("nine axes", "abcde,fghi->a", [[1] * 5, [1] * 4]),
    ]:  # fmt: skip
        book.one("einsum", note, [f((note, j), s) for j, s in enumerate(shapes)], None, fails="verify", equation=equation.encode())
    book.one("einsum", "bool", [T("bool", [True])], None, fails="verify", equation=b"i->i")
    book.one("einsum", "rows", [f(9, [5, 3])], None, fails="verify", rows=[0], equation=b"ij->j")
    x = f(10, [4, 4])
    book.graph("einsum", "one tensor twice", [x], [("einsum", [0, 0], {"equation": b"ij,jk->ik"})], [[0, 0]], [T("f32", x.up @ x.up)])


def taps(window, places, strides, dilations):
    """Every element of the window at every place: their indices, and where they stand on the padded image."""
    for k in np.ndindex(*window):
        for p in np.ndindex(*places):
            yield k, p, tuple(p[i] * strides[i] + k[i] * dilations[i] for i in range(len(window)))


def columns(book):
    settings = [
        # sizes, window, strides, low, high, dilations
        ([9], [3], [1], [0], [0], [1]), ([7], [2], [2], [1], [2], [3]), ([5, 6], [2, 3], [1, 1], [0, 0], [0, 0], [1, 1]),
        ([5, 4], [3, 2], [2, 1], [1, 0], [1, 2], [1, 2]), ([3, 4, 3], [2, 2, 1], [1, 2, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]), ([1], [1], [1], [0], [0], [1]),
    ]  # fmt: skip
    for i, (sizes, window, strides, low, high, dilations) in enumerate(settings):
        places = [(n + a + b - d * (w - 1) - 1) // s + 1 for n, a, b, d, w, s in zip(sizes, low, high, dilations, window, strides)]
        attributes = {"window": window, "strides": strides, "low": low, "high": high, "dilations": dilations}
        k, count = int(np.prod(window)), int(np.prod(places))
        flat = lambda index, shape: int(np.ravel_multi_index(index, shape))
        for d in PLAIN if i in (0, 3) else ["f32"]:
            x = sample(rng("im2col", d, i), d, [2, 3] + sizes)
            padded = np.pad(x.a, [(0, 0), (0, 0)] + list(zip(low, high)))
            out = np.zeros([2, 3, k, count], padded.dtype)
            for tap, place, at in taps(window, places, strides, dilations):
                out[:, :, flat(tap, window), flat(place, places)] = padded[(slice(None), slice(None)) + at]
            checked(book, "im2col", f"{i} {d}", [x], T(d, out.reshape(2, 3 * k, count)), views=d in ("f32", "u8"), **attributes)
        for d in FLOATS:
            x = sample(rng("col2im", d, i), d, [2, 3 * k, count])
            a = x.up.reshape(2, 3, k, count)
            full = np.zeros([2, 3] + [n + p + q for n, p, q in zip(sizes, low, high)])
            for tap, place, at in taps(window, places, strides, dilations):
                full[(slice(None), slice(None)) + at] += a[:, :, flat(tap, window), flat(place, places)]
            out = full[(slice(None), slice(None)) + tuple(slice(p, p + n) for n, p in zip(sizes, low))]
            checked(book, "col2im", f"{i} {d}", [x], T(d, out), None, views=d == "f32", sizes=sizes, **attributes)
    one = {"window": [2], "strides": [1], "low": [0], "high": [0], "dilations": [1]}
    for op, s, more, want in (("im2col", [0, 2, 5], {}, [0, 4, 4]), ("col2im", [0, 4, 4], {"sizes": [5]}, [0, 2, 5])):
        book.one(op, "empty", [T("f32", np.zeros(s))], T("f32", np.zeros(want)), "exact", **one, **more)
    x = sample(rng("im2col", "rows"), "f32", [5, 2, 4])
    out = np.stack([x.a[:, :, 0:3], x.a[:, :, 1:4]], 2).reshape(5, 4, 3)
    checked(book, "im2col", "rows", [x], T("f32", out), rows=[0], **one)
    checked(book, "col2im", "rows", [T("f32", out)], T("f32", x.a * [1, 2, 2, 1]), "exact", rows=[0], sizes=[4], **one)
    x = sample(rng("im2col", "large"), "f32", [1, 3, 97])
    out = np.stack([x.a[:, :, 0:96], x.a[:, :, 1:97]], 2).reshape(1, 6, 96)
    checked(book, "im2col", "large", [x], T("f32", out), **one)
    count = np.array([1] + [2] * 95 + [1])
    checked(book, "col2im", "large", [T("f32", out)], T("f32", x.up * count), "exact", sizes=[97], **one)
    book.one("im2col", "no place", [T("f32", np.zeros([1, 1, 1]))], None, fails="verify", **one)
    book.one("im2col", "two axes", [T("f32", np.zeros([3, 4]))], None, fails="verify", **one)
    book.one("col2im", "other columns", [T("f32", np.zeros([1, 3, 4]))], None, fails="verify", sizes=[5], **one)
    book.one("col2im", "integers", [T("i32", np.zeros([1, 4, 4]))], None, fails="verify", sizes=[5], **one)


def transposed(book):
    def compute(x, w, b, strides, low, high, more, dilations, groups):
        n, c, *spatial = x.shape
        outs, window = w.shape[1], w.shape[2:]
        axes = range(len(spatial))
        full = [(spatial[i] - 1) * strides[i] + dilations[i] * (window[i] - 1) + 1 + more[i] for i in axes]
        out = np.zeros([n, outs * groups] + full)
        each = c // groups
        for ci in range(c):
            g = ci // each
            for k, p, at in taps(window, spatial, strides, dilations):
                out[(slice(None), slice(g * outs, (g + 1) * outs)) + at] += x[(slice(None), ci) + p][:, None] * w[(ci, slice(None)) + k]
        out = out[(slice(None), slice(None)) + tuple(slice(low[i], full[i] - high[i]) for i in axes)]
        return out if b is None else out + b.reshape([1, -1] + [1] * len(spatial))

    def add(note, x, w, b, strides, low, high, more, dilations, groups, rows=None, views=False):
        dtype = promote_all([t for t in (x, w, b) if t is not None])
        up = lambda t: None if t is None else t.to(dtype).up
        out = T(dtype, compute(up(x), up(w), up(b), strides, low, high, more, dilations, groups))
        attributes = {"strides": strides, "low": low, "high": high, "more": more, "dilations": dilations, "groups": groups}
        checked(book, "conv_transpose", note, [x, w, b], out, None, rows=rows, views=views, **attributes)

    settings = [
        ([2, 3, 5], [3, 4, 3], [1], [0], [0], [0], [1], 1), ([2, 4, 5], [4, 3, 3], [2], [1], [2], [1], [2], 2), ([1, 3, 4, 3], [3, 2, 3, 2], [2, 3], [1, 0], [0, 1], [1, 0], [1, 2], 1),
        ([1, 2, 2, 3, 2], [2, 2, 2, 2, 1], [1, 2, 2], [0, 1, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1], 2), ([1, 1, 1], [1, 1, 1], [1], [0], [0], [0], [1], 1), ([0, 2, 3], [2, 2, 2], [1], [0], [0], [0], [1], 1),
        ([1, 2, 3], [2, 3, 2], [3], [0], [0], [4], [1], 1), ([1, 2, 6], [2, 3, 5], [1], [4], [4], [0], [1], 1),
    ]  # fmt: skip
    for i, (s, t, *rest) in enumerate(settings):
        for d in FLOATS:
            x, w, b = sample(rng("convt", d, i), d, s), sample(rng("convt", d, i, 1), d, t), sample(rng("convt", d, i, 2), d, [t[1] * rest[-1]])
            add(f"{i} {d}", x, w, None, *rest, views=d == "f32" and s[0] > 0)
            if d == "f16" or i == 1:
                add(f"bias {i} {d}", x, w, b, *rest, views=d == "f32")
    one = ([1], [0], [0], [0], [1], 1)
    x, w, b = sample(rng("convt"), "f16", [1, 2, 6]), sample(rng("convt", 1), "bf16", [2, 3, 3]), sample(rng("convt", 2), "f32", [3])
    add("mixed", x, w, b, *one)
    add("rows", sample(rng("convt"), "f32", [5, 2, 6]), sample(rng("convt", 1), "f32", [2, 3, 3]), None, *one, rows=[0])
    add("large", sample(rng("convt"), "f32", [1, 3, 11, 13]), sample(rng("convt", 1), "f32", [3, 5, 3, 3]), None, [2, 2], [1, 1], [1, 1], [1, 1], [1, 1], 1)
    names = ["strides", "low", "high", "more", "dilations", "groups"]
    x, w = T("f32", np.zeros([1, 2, 3])), T("f32", np.zeros([2, 3, 2]))
    book.one("conv_transpose", "nothing left", [x, w, None], None, fails="verify", **dict(zip(names, ([1], [2], [2], [0], [1], 1))))
    book.one("conv_transpose", "channels differ", [x, T("f32", np.zeros([3, 3, 2])), None], None, fails="verify", **dict(zip(names, one)))
    book.one("conv_transpose", "integers", [x.to("i32"), w.to("i32"), None], None, fails="verify", **dict(zip(names, one)))
    book.one("conv_transpose", "groups", [x, w, None], None, fails="verify", **dict(zip(names, one[:-1] + (3,))))


def resampled(book):
    def keys(d):
        a, d = -0.75, abs(d)
        if d <= 1:
            return ((a + 2) * d - (a + 3)) * d * d + 1
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a if d < 2 else 0.0

    def weights(old, new, mode, corners):
        m = np.zeros([new, old])
        for i in range(new):
            if mode == "nearest":
                m[i, i * old // new] = 1
                continue
            if corners:
                at = i * (old - 1) / (new - 1) if new > 1 else 0.0
            else:
                at = (i + 0.5) * old / new - 0.5
            if mode == "linear":
                at = max(at, 0.0)
            first = int(np.floor(at))
            for j in (0, 1) if mode == "linear" else (-1, 0, 1, 2):
                w = 1 - abs(at - first - j) if mode == "linear" else keys(at - first - j)
                m[i, min(max(first + j, 0), old - 1)] += w
        return m

    def add(note, x, sizes, mode, corners, rows=None, views=False):
        out = x.a if mode == "nearest" else x.up
        for axis, n in enumerate(sizes):
            old = out.shape[2 + axis]
            if mode == "nearest":
                out = np.take(out, [i * old // n for i in range(n)], 2 + axis)
            elif old != n:
                out = np.moveaxis(np.tensordot(weights(old, n, mode, corners), out, (1, 2 + axis)), 0, 2 + axis)
        check = "exact" if mode == "nearest" else None
        checked(book, "interpolate", f"{note} {mode} {corners}", [x], T(x.dtype, out), check, rows=rows, views=views, sizes=sizes, mode=mode, align_corners=corners)

    for i, (s, sizes) in enumerate([([2, 3, 5], [9]), ([1, 2, 4, 6], [7, 3]), ([1, 2, 3, 2, 4], [5, 2, 3]), ([2, 1, 6], [1]), ([1, 1, 1], [4]), ([0, 2, 3], [5]), ([2, 3, 5], [5])]):
        for mode, corners in (("nearest", False), ("linear", False), ("linear", True), ("cubic", False), ("cubic", True)):
            for d in FLOATS if i < 2 else ["f32"]:
                add(f"{i} {d}", sample(rng("interpolate", i, d), d, s), sizes, mode, corners, views=d == "f32" and s[0] > 0)
    for d in PLAIN:
        add(f"{d}", sample(rng("interpolate", d), d, [2, 3, 5]), [8], "nearest", False)
        add(f"smaller {d}", sample(rng("interpolate", d), d, [1, 2, 7, 9]), [3, 4], "nearest", False)
    for mode in ("nearest", "linear", "cubic"):
        add("rows", sample(rng("interpolate", "rows"), "f32", [5, 2, 4]), [6], mode, False, rows=[0])
        add("large", sample(rng("interpolate", "large"), "f32", [1, 3, 13, 11]), [29, 24], mode, False)
    more = {"mode": "linear", "align_corners": False}
    book.one("interpolate", "of nothing", [T("f32", np.zeros([1, 1, 0]))], None, fails="verify", sizes=[2], **more)
    book.one("interpolate", "integers", [T("i32", np.zeros([1, 1, 2]))], None, fails="verify", sizes=[2], **more)
    book.one("interpolate", "sizes of another rank", [T("f32", np.zeros([1, 1, 2]))], None, fails="verify", sizes=[2, 2], **more)


def causal(book):
    def add(note, x, w, rows=None, views=False):
        dtype = promote_all([x, w])
        a, b = x.to(dtype).up, w.to(dtype).up
        k = b.shape[1]
        t = a.shape[2] - k + 1
        out = sum(a[:, :, j : j + t] * b[:, j, None] for j in range(k))
        checked(book, "ssm_conv", note, [x, w], T(dtype, np.transpose(out, [0, 2, 1])), None, rows=rows, views=views)

    for d in FLOATS:
        add(f"{d}", sample(rng("ssm", d), d, [2, 5, 9]), sample(rng("ssm", d, 1), d, [5, 4]), views=True)
        add(f"one token {d}", sample(rng("ssm", d), d, [1, 3, 4]), sample(rng("ssm", d, 1), d, [3, 4]))
    add("mixed", sample(rng("ssm"), "f16", [2, 5, 9]), sample(rng("ssm", 1), "bf16", [5, 3]))
    add("empty", T("f32", np.zeros([0, 2, 5])), T("f32", np.zeros([2, 3])))
    add("rows", sample(rng("ssm"), "f32", [5, 3, 6]), sample(rng("ssm", 1), "f32", [3, 4]), rows=[0])
    add("large", sample(rng("ssm"), "f32", [1, 17, 31]), sample(rng("ssm", 1), "f32", [17, 4]), views=True)
    book.one("ssm_conv", "channels differ", [T("f32", np.zeros([1, 2, 5])), T("f32", np.zeros([3, 2]))], None, fails="verify")
    book.one("ssm_conv", "too short", [T("f32", np.zeros([1, 2, 2])), T("f32", np.zeros([2, 3]))], None, fails="verify")


def fourier(book):
    def add(note, x, axis, inverse, views=True):
        f = np.fft.ifft if inverse else np.fft.fft
        checked(book, "fft", note, [x], T("c64", f(x.up, axis=axis)), None, views=views, axis=axis, inverse=inverse)

    for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 30, 64, 97):
        x = sample(rng("fft", n), "c64", [2, n])
        add(f"{n}", x, 1, False)
        add(f"{n} back", x, -1, True)
    x = sample(rng("fft", "middle"), "c64", [3, 10, 5])
    for axis in (0, 1, 2):
        add(f"axis {axis}", x, axis, False)
        add(f"axis {axis} back", x, axis, True)
    add("vector", sample(rng("fft", 1), "c64", [301]), 0, False)
    add("large", sample(rng("fft", 2), "c64", [1, 1009]), 1, True)
    add("of nothing", T("c64", np.zeros([0, 4])), 1, False, views=False)
    book.one("fft", "rows", [sample(rng("fft", 3), "c64", [5, 6])], T("c64", np.fft.fft(sample(rng("fft", 3), "c64", [5, 6]).up)), rows=[0], axis=1, inverse=False)
    book.one("fft", "along the rows", [x], None, fails="verify", rows=[0], axis=0, inverse=False)
    book.one("fft", "of no element", [T("c64", np.zeros([3, 0]))], None, fails="verify", axis=1, inverse=False)
    book.one("fft", "real", [T("f32", np.zeros([3]))], None, fails="verify", axis=0, inverse=False)
    book.one("fft", "scalar", [T("c64", 1j)], None, fails="verify", axis=0, inverse=False)


def fill(books):
    for name, parts in (
        ("place", (triangles, diagonals, moved, updates, bits, running)),
        ("contract", (contract,)),
        ("image", (columns, transposed, resampled, causal)),
        ("fourier", (fourier,)),
    ):
        books[name] = Book(name)
        for part in parts:
            part(books[name])
