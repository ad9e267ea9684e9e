"""Cases of linear algebra: NumPy's and SciPy's in float64, with the catalogue's signs and orders."""

import numpy as np
import scipy.linalg

from common import Book, T, rng, sample

DTYPES = ("f32", "f64")
CHECK = None


def symmetric(r, dtype, shape):
    a = sample(r, dtype, shape, -1, 1).up
    return a + np.swapaxes(a, -1, -2)


def positive(r, dtype, shape):
    a = sample(r, dtype, shape, -1, 1).up
    return a @ np.swapaxes(a, -1, -2) + np.eye(shape[-1])


def each(f, x):
    """What `f` gives of every matrix of a batch."""
    flat = x.reshape((-1,) + x.shape[-2:])
    parts = [f(m) for m in flat]
    return [np.stack([p[i] for p in parts]).reshape(x.shape[:-2] + parts[0][i].shape) for i in range(len(parts[0]))]


def turned(column):
    """The factor that makes the element furthest from 0 positive."""
    v = column[np.argmax(np.abs(column))]
    return np.conj(v) / np.abs(v)


def qr(a):
    q, r = np.linalg.qr(a)
    s = np.where(np.diag(r) < 0, -1.0, 1.0)
    return q * s, r * s[:, None]


def lu(a):
    p, l, u = scipy.linalg.lu(a, p_indices=True)
    where = np.empty(len(p), np.uint32)
    where[p] = np.arange(len(p))  # SciPy says where each row went
    assert np.allclose(a[where], l @ u)
    return where, l, u


def svd(a):
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    signs = np.array([turned(u[:, i]) for i in range(u.shape[1])])
    return u * signs, s, vt * signs[:, None]


def eigh(a):
    w, v = np.linalg.eigh(a)
    return w, v * np.array([turned(v[:, i]) for i in range(v.shape[1])])


def eig(a):
    w, v = np.linalg.eig(a)
    w, v = w.astype(complex), v.astype(complex)
    order = sorted(range(len(w)), key=lambda i: (w[i].real, w[i].imag))
    v = np.stack([v[:, i] * turned(v[:, i]) / np.linalg.norm(v[:, i]) for i in order], axis=1)
    return w[order], v


def factors(book):
    def add(op, note, x, f, dtypes=None, views=True, rows=None, **attributes):
        outs = each(f, x.up)
        dtypes = dtypes or [x.dtype] * len(outs)
        outs = [T(d, o) for d, o in zip(dtypes, outs)]
        book.one(op, note, [x], outs, CHECK, rows=rows, **attributes)
        if views:
            book.views(op, f"views {note}", [x], outs, CHECK, **attributes)

    two = lambda d: {"eig": ["c64", "c64"], "lu": ["u32", d, d]}
    for op, f, make, wide in (
        ("cholesky", lambda a: [np.linalg.cholesky(a)], positive, False),
        ("qr", qr, None, True),
        ("lu", lu, None, True),
        ("det", lambda a: [np.array(np.linalg.det(a))], None, False),
        ("svd", svd, None, True),
        ("eigh", eigh, symmetric, False),
        ("eig", eig, None, False),
    ):
        attributes = {"upper": False} if op == "cholesky" else {}

        def matrix(note, d, shape):
            r = rng(op, note, d)
            return T(d, make(r, d, shape)) if make else sample(r, d, shape, -1, 1)

        for d in DTYPES:
            dtypes = two(d).get(op)
            for shape in ([3, 3], [1, 1], [2, 3, 3], [2, 1, 5, 5], [24, 24]) + (([3, 5], [7, 4], [2, 2, 6], [9, 1]) if wide else ()):
                add(op, f"{d} {shape}", matrix(shape, d, shape), f, dtypes, views=shape != [24, 24], **attributes)
            shapes = [o.shape for o in f(np.eye(3))]
            none = [T(n, np.zeros((0,) + s)) for n, s in zip(dtypes or [d] * len(shapes), shapes)]
            book.one(op, f"{d} of nothing", [T(d, np.zeros([0, 3, 3]))], none, CHECK, **attributes)
            x = matrix("rows", d, [5, 3, 3])
            add(op, f"{d} rows", x, f, dtypes, views=False, rows=[0], **attributes)
            # Next to a matrix that has a result one that has none.
            for what in (np.nan, np.inf):
                a = x.a.copy()[:2]
                a[1, 2, 0] = what
                whole = each(f, x.up[:1])
                outs = []
                for name, o in zip(dtypes or [d] * len(whole), whole):
                    none = np.arange(3).reshape(o.shape) if name == "u32" else np.full(o.shape, np.nan + 1j * np.nan if name == "c64" else np.nan)
                    outs.append(T(name, np.concatenate([o, none])))
                book.one(op, f"{d} {what}", [T(d, a)], outs, CHECK, **attributes)
        book.one(op, "a vector", [sample(rng(op), "f32", [3])], None, fails="verify", **attributes)
        book.one(op, "of halves", [sample(rng(op), "f16", [3, 3])], None, fails="verify", **attributes)
        book.one(op, "of no row", [T("f32", np.zeros([0, 0]))], None, fails="verify", **attributes)
        book.one(op, "the rows", [sample(rng(op), "f32", [3, 3])], None, fails="verify", rows=[0], **attributes)
    for op in ("cholesky", "det", "eigh", "eig"):
        attributes = {"upper": False} if op == "cholesky" else {}
        book.one(op, "not square", [sample(rng(op), "f32", [3, 4])], None, fails="verify", **attributes)

    for d in DTYPES:
        x = positive(rng("upper", d), d, [4, 4])
        add("cholesky", f"{d} upper", T(d, x), lambda a: [np.linalg.cholesky(a).T], upper=True)
        ragged = T(d, np.tril(x) + np.triu(sample(rng("ragged"), d, [4, 4]).up, 1))
        low = np.tril(ragged.up) + np.tril(ragged.up, -1).T
        book.one("cholesky", f"{d} of the lower triangle", [ragged], T(d, np.linalg.cholesky(low)), CHECK, upper=False)
        book.one("eigh", f"{d} of the lower triangle", [ragged], [T(d, o) for o in eigh(low)], CHECK)
        book.one("cholesky", f"{d} not definite", [T(d, -np.eye(3))], T(d, np.full([3, 3], np.nan)), CHECK, upper=False)
        book.one("det", f"{d} singular", [T(d, [[1.0, 2.0], [2.0, 4.0]])], T(d, 0.0), CHECK)
        # Rows that have to change places, and a column of zeros.
        add("lu", f"{d} of zeros", T(d, [[0.0, 1.0, 2.0], [0.0, 4.0, 1.0], [0.0, 2.0, 5.0]]), lu, ["u32", d, d])
        add("lu", f"{d} of turns", T(d, np.roll(np.eye(5) * np.arange(1, 6), 2, 0)), lu, ["u32", d, d])
        # Of what belongs to a singular value of 0 the sign is anybody's.
        x = T(d, np.diag([3.0, 0.0, 2.0]))
        nodes = [("svd", [0], {}), ("abs", [[0, 1]], {})]
        book.graph("svd", f"{d} singular", [x], nodes, [[1, 0]], [T(d, [3.0, 2.0, 0.0])], CHECK)
        add("eig", f"{d} a turn", T(d, [[0.0, -1.0], [1.0, 0.0]]), lambda a: (np.array([-1j, 1j]), np.array([[1, 1], [1j, -1j]]) / np.sqrt(2)), ["c64", "c64"])


def solutions(book):
    for op in ("solve", "solve_triangular"):
        for upper in (False, True) if op == "solve_triangular" else (None,):
            attributes = {} if upper is None else {"upper": upper}
            name = "" if upper is None else f" upper {upper}"

            def f(a, b):
                if upper is not None:
                    a = np.triu(a) if upper else np.tril(a)
                return np.linalg.solve(a, b)

            for da, db in (("f32", "f32"), ("f64", "f64"), ("f32", "f64"), ("f64", "f32")):
                for sa, sb in (([3, 3], [3, 2]), ([1, 1], [1, 1]), ([2, 3, 3], [2, 3, 1]), ([5, 5], [4, 5, 3]), ([2, 1, 3, 3], [3, 3, 2]), ([20, 20], [20, 31])):
                    r = rng(op, da, db, sa)
                    a = T(da, sample(r, da, sa, -1, 1).up + 4 * np.eye(sa[-1]))
                    b = sample(r, db, sb, -1, 1)
                    out = T("f64" if "f64" in (da, db) else "f32", f(a.up, b.up))
                    book.one(op, f"{da} {db} {sa} {sb}{name}", [a, b], out, CHECK, **attributes)
                    if sa[-1] < 20:
                        book.views(op, f"views {da} {db} {sa} {sb}{name}", [a, b], [out], CHECK, **attributes)
            a, b = T("f32", [[[1.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 1.0]]]), T("f32", np.ones([2, 2, 1]))
            book.one(op, f"singular{name}", [a, b], T("f32", [[[np.nan], [np.nan]], [[0.5], [1.0]]]), CHECK, **attributes)
            for k, what in (("a", np.nan), ("b", np.inf)):
                x = {"a": T("f32", [[2.0, 0.0], [0.0, 1.0]]), "b": T("f32", np.ones([2, 1]))}
                x[k].a[1, 0] = what
                book.one(op, f"{what} in {k}{name}", [x["a"], x["b"]], T("f32", np.full([2, 1], np.nan)), CHECK, **attributes)
            none = [T("f32", np.zeros([0, 3, 3])), T("f32", np.zeros([0, 3, 2]))]
            book.one(op, f"of nothing{name}", none, none[1], CHECK, **attributes)
            r = rng(op, "rows")
            a, b = T("f32", sample(r, "f32", [3, 3], -1, 1).up + 4 * np.eye(3)), sample(r, "f32", [5, 3, 2])
            book.one(op, f"rows{name}", [a, b], T("f32", f(a.up, b.up)), CHECK, rows=[1], **attributes)
            book.one(op, f"other rows{name}", [a, T("f32", np.zeros([4, 1]))], None, fails="verify", **attributes)
            book.one(op, f"other batch{name}", [T("f32", np.zeros([2, 3, 3])), T("f32", np.zeros([4, 3, 1]))], None, fails="verify", **attributes)


def fill(books):
    book = books["linear"] = Book("linear")
    factors(book)
    solutions(book)
