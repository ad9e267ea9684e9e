"""Cases of shape, join, index and sort rows."""

import itertools

import numpy as np

from common import FLOATS, INTS, MAX, MIN, NUMPY, PLAIN, REALS, Book, T, corners, promote_all, rng, sample

SOME = ["bool", "u8", "i16", "f16", "bf16", "f32", "i64", "f64", "c64"]  # every size of element


def shape(book):
    def same(op, note, x, out, rows=None, views=False, **attributes):
        book.one(op, note, [x], out, "exact", rows=rows, **attributes)
        if views:
            book.views(op, f"views {note}", [x], out, "exact", **attributes)

    for d in SOME:
        x = sample(rng("reshape", d), d, [3, 4, 5])
        for to in ([60], [5, 12], [1, 3, 1, 20], [5, 4, 3]):
            same("reshape", f"{d} to {to}", x, T(d, x.a.reshape(to)), views=to == [5, 12], shape=to)
        for axes in ([], [0, 1, 2], [2, 0, 1], [1, 0, 2], [0, 2, 1], [-1, -3, -2]):
            same("transpose", f"{d} {axes}", x, T(d, np.transpose(x.a, axes or None)), views=d in ("f32", "u8"), axes=axes)
        x = sample(rng("broadcast_to", d), d, [3, 1])
        for to in ([3, 4], [2, 3, 5], [3, 1], [3, 0]):
            same("broadcast_to", f"{d} to {to}", x, T(d, np.broadcast_to(x.a, to)), views=True, shape=to)
        same("broadcast_to", f"scalar {d}", sample(rng(d), d, []), T(d, np.full([2, 3], sample(rng(d), d, []).a)), shape=[2, 3])
    x = sample(rng("reshape"), "f32", [])
    same("reshape", "scalar", x, T("f32", x.a.reshape(1, 1)), shape=[1, 1])
    x = sample(rng("reshape", "large"), "u8", [99, 33], 0, 255)
    same("reshape", "large", x, T("u8", x.a.reshape(11, 9, 33)), views=True, shape=[11, 9, 33])
    x = sample(rng("reshape", "rows"), "f32", [5, 6])
    same("reshape", "odd", T("f32", x.a[:5, :3]), T("f32", x.a[:5, :3].reshape(3, 5)), views=True, shape=[3, 5])
    same("reshape", "to scalar", T("f32", [[5.0]]), T("f32", 5.0), shape=[])
    x = sample(rng("reshape"), "f32", [0, 3])
    same("reshape", "empty", x, T("f32", np.zeros([2, 0])), shape=[2, 0])
    book.one("reshape", "other count", [x], None, fails="verify", shape=[1])
    # An element that stands for the whole graph: an input given back under another shape.
    for name, s, axes in (
        ("scalar", [], []), ("vector", [7], [0]), ("empty", [0, 3, 2], [2, 0, 1]), ("four axes", [2, 3, 4, 5], [0, 2, 1, 3]),
        ("four axes reversed", [2, 3, 4, 5], []), ("eight axes", [2, 1, 2, 3, 1, 2, 1, 2], [7, 5, 3, 1, 0, 2, 4, 6]), ("large", [130, 67], [1, 0]),
        ("inner kept", [5, 6, 33], [1, 0, 2]),
    ):  # fmt: skip
        d = "u8" if name == "large" else "f32"
        x = sample(rng("transpose", name), d, s)
        same("transpose", name, x, T(d, np.transpose(x.a, axes or None)), axes=axes)
    x = sample(rng("transpose"), "f32", [5, 3, 4])
    same("transpose", "rows stay", x, T("f32", np.transpose(x.a, [0, 2, 1])), rows=[0], axes=[0, 2, 1])
    book.one("transpose", "rows move", [x], None, fails="verify", rows=[0], axes=[1, 0, 2])
    book.one("transpose", "an axis twice", [x], None, fails="verify", axes=[0, 0, 1])
    book.one("transpose", "too few axes", [x], None, fails="verify", axes=[0, 1])
    x = sample(rng("bt"), "f32", [2, 1, 4, 1])
    same("broadcast_to", "middle axes", x, T("f32", np.broadcast_to(x.a, [2, 3, 4, 5])), views=True, shape=[2, 3, 4, 5])
    x = sample(rng("bt", 2), "u8", [131, 1])
    same("broadcast_to", "large", x, T("u8", np.broadcast_to(x.a, [131, 101])), shape=[131, 101])
    book.one("broadcast_to", "does not fit", [x], None, fails="verify", shape=[130, 2])
    slices(book)
    pads(book)
    rest(book)
    blocks_moved(book)


def blocks_moved(book):
    """Blocks stay whole: the axes before the last one take another form."""
    from blocks import TYPES, block

    for d in TYPES:
        t, _ = block(rng("blocks moved", d), d, 6, 256)
        of = lambda shape: T(d, None, shape, t.raw)
        for op, before, after, attributes in (
            ("reshape", [6, 256], [2, 3, 256], {"shape": [2, 3, 256]}),
            ("expand_dims", [6, 256], [1, 6, 256], {"axes": [0]}),
            ("squeeze", [1, 6, 256], [6, 256], {"axes": [0]}),
            ("flatten", [2, 3, 256], [6, 256], {"start": 0, "end": 1}),
        ):
            book.one(op, d, [of(before)], of(after), "exact", **attributes)


def slices(book):
    x = sample(rng("slice"), "f32", [6, 7, 5])
    for starts, stops, steps in (
        ([0, 0, 0], [6, 7, 5], [1, 1, 1]),
        ([1, 2, 0], [5, 6, 4], [1, 1, 1]),
        ([0, 0, 0], [MAX, MAX, MAX], [2, 3, 1]),
        ([-2, -5, -100], [MAX, -1, 100], [1, 2, 2]),
        ([-1, 5, 4], [MIN, 1, MIN], [-1, -2, -1]),
        ([100, 6, 0], [MIN, -100, 5], [-3, -1, 1]),
        ([3, 0, 0], [3, 7, 5], [1, 1, 1]),
        ([4, 0, 0], [2, 7, 5], [1, 1, 1]),
        ([0, 0, 0], [6, 7, 5], [100, 1, 100]),
        ([MAX, 0, MIN], [MIN, MAX, MAX], [MIN, MAX, MAX]),
        ([2, -7, -1], [-7, 7, -6], [-1, 1, -1]),
    ):
        at = tuple(
            slice(a, None if c < 0 and b == MIN else b, c) for a, b, c in zip(starts, stops, steps)
        )
        out = T("f32", x.a[at])
        attributes = {"starts": starts, "stops": stops, "steps": steps}
        book.one("slice", f"{starts} {stops} {steps}", [x], out, "exact", **attributes)
        book.views("slice", f"views {starts} {stops} {steps}", [x], out, "exact", **attributes)
    for d in SOME:
        x = sample(rng("slice", d), d, [5, 9])
        out = T(d, x.a[1::2, ::-2])
        book.one("slice", d, [x], out, "exact", starts=[1, -1], stops=[MAX, MIN], steps=[2, -2])
    x = sample(rng("slice", 1), "f32", [5, 9])
    out = T("f32", x.a[:, 2:8:3])
    book.one("slice", "rows stay", [x], out, "exact", rows=[0], starts=[0, 2], stops=[MAX, 8], steps=[1, 3])
    book.one("slice", "rows are cut", [x], None, fails="verify", rows=[0], starts=[1, 2], stops=[MAX, 8], steps=[1, 3])
    book.one("slice", "step of 0", [x], None, fails="verify", starts=[0, 0], stops=[5, 9], steps=[1, 0])
    book.one("slice", "too few axes", [x], None, fails="verify", starts=[0], stops=[5], steps=[1])
    x = sample(rng("slice"), "f32", [])
    book.one("slice", "scalar", [x], x, "exact", starts=[], stops=[], steps=[])
    x = sample(rng("slice"), "f32", [0, 3])
    book.one("slice", "empty", [x], T("f32", x.a[:, 1:]), "exact", starts=[0, 1], stops=[MAX, MAX], steps=[1, 1])
    x = sample(rng("slice", "large"), "u8", [201, 103], 0, 255)
    book.one("slice", "large", [x], T("u8", x.a[1:-1:2, ::-1]), "exact", starts=[1, -1], stops=[-1, MIN], steps=[2, -1])


def pads(book):
    def add(note, x, low, high, mode, value=None, **more):
        kind = {"constant_values": value.a} if mode == "constant" and value is not None else {}
        out = T(x.dtype, np.pad(x.a, list(zip(low, high)), mode=mode, **kind) if low else x.a)
        inputs = [x] if value is None else [x, value]
        attributes = {"low": low, "high": high, "mode": mode}
        book.one("pad", note, [x, value], out, "exact", **attributes, **more)
        if not more:
            book.views("pad", f"views {note}", inputs + ([None] if value is None else []), out, "exact", **attributes)

    for mode in ("constant", "edge", "reflect", "wrap"):
        x = sample(rng("pad", mode), "f32", [3, 4, 5])
        add(f"{mode} odd", x, [1, 0, 2], [0, 3, 1], mode)
        add(f"{mode} none", x, [0, 0, 0], [0, 0, 0], mode)
        add(f"{mode} far", x, [7, 9, 11], [8, 0, 13], mode)
        add(f"{mode} rows", x, [0, 1, 2], [0, 2, 1], mode, rows=[0])
        book.one("pad", f"{mode} rows padded", [x], None, fails="verify", rows=[0], low=[1, 0, 0], high=[0, 0, 0], mode=mode)
        x = sample(rng("pad", mode), "i32", [1, 2])
        add(f"{mode} short axes", x, [3, 4], [2, 5], mode)
        for d in SOME:
            x = sample(rng("pad", d), d, [2, 3])
            add(f"{mode} {d}", x, [1, 2], [1, 1], mode)
            if mode == "constant":
                add(f"value {d}", x, [1, 2], [1, 1], mode, sample(rng("value", d), d, []))
        x = sample(rng("pad", mode), "f32", [])
        add(f"{mode} scalar", x, [], [], mode)
    x = T("f32", np.zeros([0, 2]))
    add("empty", x, [1, 0], [2, 1], "constant", T("f32", np.nan))
    add("empty rest", x, [0, 0], [0, 1], "edge")
    add("large", sample(rng("pad", "large"), "u8", [100, 91], 0, 255), [7, 3], [13, 30], "reflect")
    for mode in ("edge", "reflect", "wrap"):
        book.one("pad", f"{mode} of nothing", [x, None], None, fails="either", low=[1, 0], high=[0, 0], mode=mode)
    book.one("pad", "value of another dtype", [x, T("i32", 1)], None, fails="verify", low=[1, 0], high=[0, 0], mode="constant")
    book.one("pad", "value with axes", [x, T("f32", [1.0])], None, fails="verify", low=[1, 0], high=[0, 0], mode="constant")


def rest(book):
    def add(op, note, x, out, rows=None, views=True, **attributes):
        book.one(op, note, [x], T(x.dtype, out), "exact", rows=rows, **attributes)
        if views and rows is None:
            book.views(op, f"views {note}", [x], T(x.dtype, out), "exact", **attributes)

    for d in SOME:
        x = sample(rng("rest", d), d, [3, 4, 5])
        for axes in ([0], [-1], [1, 3], [0, -1], [4, 0, 2]):
            add("expand_dims", f"{d} {axes}", x, np.expand_dims(x.a, tuple(axes)), views=d == "f32", axes=axes)
        y = sample(rng("squeeze", d), d, [1, 3, 1, 4, 1])
        for axes in ([], [0], [-1], [2, 4], [0, -3]):
            add("squeeze", f"{d} {axes}", y, np.squeeze(y.a, tuple(axes) if axes else None), views=d == "f32", axes=axes)
        for start, end in ((0, -1), (1, 2), (0, 1), (1, 1), (-2, -1)):
            s, e = start % 3, end % 3
            flat = x.a.reshape(list(x.a.shape[:s]) + [-1] + list(x.a.shape[e + 1 :]))
            add("flatten", f"{d} {start} {end}", x, flat, views=d == "f32", start=start, end=end)
        for repeats in ([2, 1, 3], [1, 1, 1], [2, 0, 1]):
            add("tile", f"{d} {repeats}", x, np.tile(x.a, repeats), views=d == "f32", repeats=repeats)
        for repeats, axis in ((2, 0), (3, -1), (1, 1), (0, 1), (2, -2)):
            add("repeat", f"{d} {repeats} {axis}", x, np.repeat(x.a, repeats, axis), views=d == "f32", repeats=repeats, axis=axis)
        for axes in ([], [0], [-1], [0, 2], [1]):
            add("flip", f"{d} {axes}", x, np.flip(x.a, tuple(axes) if axes else None), views=d == "f32", axes=axes)
    s, e = sample(rng("s"), "f32", []), sample(rng("e"), "f32", [0, 3])
    for name, x in (("scalar", s), ("empty", e)):
        n = len(x.shape)
        add("expand_dims", name, x, np.expand_dims(x.a, 0), axes=[0])
        add("squeeze", name, x, x.a, axes=[])
        add("tile", name, x, np.tile(x.a, [2] * n) if n else x.a, repeats=[2] * n)
        add("flip", name, x, np.flip(x.a), axes=[])
        if n:
            add("flatten", name, x, x.a.reshape(-1), start=0, end=-1)
            add("repeat", name, x, np.repeat(x.a, 2, 0), repeats=2, axis=0)
    add("flatten", "scalar", s, s.a.reshape(1), start=0, end=-1)
    x = sample(rng("rows"), "f32", [5, 2, 3])
    add("expand_dims", "rows", x, np.expand_dims(x.a, 2), rows=[0], axes=[2])
    add("flatten", "rows", x, x.a.reshape(5, 6), rows=[0], start=1, end=2)
    add("tile", "rows", x, np.tile(x.a, [1, 2, 2]), rows=[0], repeats=[1, 2, 2])
    add("repeat", "rows", x, np.repeat(x.a, 2, 1), rows=[0], repeats=2, axis=1)
    add("flip", "rows", x, np.flip(x.a, (1, 2)), rows=[0], axes=[1, 2])
    y = sample(rng("rows"), "f32", [5, 1, 3])
    add("squeeze", "rows", y, np.squeeze(y.a, 1), rows=[0], axes=[1])
    for op, attributes in (
        ("expand_dims", {"axes": [0]}),
        ("flatten", {"start": 0, "end": 1}),
        ("tile", {"repeats": [2, 1, 1]}),
        ("repeat", {"repeats": 2, "axis": 0}),
        ("flip", {"axes": [0]}),
    ):
        book.one(op, "rows move", [x], None, fails="verify", rows=[0], **attributes)
    big = sample(rng("big"), "u8", [101, 67], 0, 255)
    add("flip", "large", big, np.flip(big.a), views=False, axes=[])
    add("tile", "large", big, np.tile(big.a, [2, 1]), views=False, repeats=[2, 1])
    add("repeat", "large", big, np.repeat(big.a, 2, 1), views=False, repeats=2, axis=1)
    add("expand_dims", "large", big, big.a[:, None], axes=[1])
    add("squeeze", "large", T("u8", big.a[:, None]), big.a, axes=[])
    add("flatten", "large", big, big.a.reshape(-1), start=0, end=-1)
    book.one("squeeze", "an axis that is not 1", [x], None, fails="verify", axes=[0])
    book.one("expand_dims", "an axis twice", [x], None, fails="verify", axes=[0, 0])
    book.one("flip", "no such axis", [x], None, fails="verify", axes=[3])


def join(book):
    def concat(note, tensors, axis, rows=None, op="concat", views=False):
        dtype = promote_all(tensors)
        f = np.concatenate if op == "concat" else np.stack
        out = T(dtype, f([t.to(dtype).a for t in tensors], axis=axis))
        book.one(op, note, tensors, out, "exact", rows=rows, axis=axis)
        if views:
            book.views(op, f"views {note}", tensors, out, "exact", axis=axis)

    for d in SOME:
        parts = [sample(rng("join", d, i), d, [2, n, 3]) for i, n in enumerate((3, 0, 1, 5))]
        concat(f"{d}", parts, 1, views=True)
        concat(f"{d} negative axis", parts, -2)
        same = [sample(rng("stack", d, i), d, [2, 3]) for i in range(3)]
        for axis in (0, 1, 2, -1, -3):
            concat(f"{d} {axis}", same, axis, op="stack", views=axis == 1)
        concat(f"{d} first axis", same, 0, views=True)
        concat(f"{d} last axis", same, -1, views=True)
    for d, e in (("u8", "i8"), ("f16", "bf16"), ("i32", "f16"), ("bool", "f32"), ("f64", "f32"), ("c64", "f32"), ("u64", "i8")):
        parts = [sample(rng(d, 1), d, [2, 3]), sample(rng(e, 2), e, [2, 3])]
        concat(f"{d} and {e}", parts, 0)
        concat(f"{d} and {e}", parts, 0, op="stack")
    x = sample(rng("join"), "f32", [2, 3])
    concat("one", [x], 0)
    concat("one", [x], 0, op="stack")
    concat("the same twice", [x, x], 1)
    many = [sample(rng("many", i), "f32", [1, 2]) for i in range(50)]
    concat("many", many, 0)
    concat("many", many, 1, op="stack")
    concat("scalars", [sample(rng(i), "f32", []) for i in range(3)], 0, op="stack")
    empty = sample(rng(), "f32", [0, 3])
    concat("empty", [empty, empty], 1)
    concat("empty", [empty, empty], 0, op="stack")
    concat("rows", [sample(rng("r", 1), "f32", [5, 2]), sample(rng("r", 2), "f32", [5, 3])], 1, rows=[0, 1])
    concat("rows", [sample(rng("r", 1), "f32", [5, 2]), sample(rng("r", 2), "f32", [5, 2])], 1, rows=[0, 1], op="stack")
    concat("large", [sample(rng("large", i), "u8", [91, n], 0, 255) for i, n in enumerate((33, 70))], 1)
    concat("large", [sample(rng("large", i), "u8", [91, 50], 0, 255) for i in range(2)], 1, op="stack")
    book.one("concat", "other axes differ", [x, T("f32", np.zeros([3, 3]))], None, fails="verify", axis=1)
    book.one("concat", "rows joined", [x, x], None, fails="verify", rows=[0, 1], axis=0)
    book.one("stack", "shapes differ", [x, T("f32", np.zeros([3, 3]))], None, fails="verify", axis=0)

    def split(note, x, sizes, axis, rows=None, views=False):
        parts = np.split(x.a, np.cumsum(sizes)[:-1], axis=axis)
        out = [T(x.dtype, p) for p in parts]
        book.one("split", note, [x], out, "exact", rows=rows, sizes=sizes, axis=axis)
        if views:
            book.views("split", f"views {note}", [x], out, "exact", sizes=sizes, axis=axis)

    for d in SOME:
        x = sample(rng("split", d), d, [4, 6, 3])
        split(f"{d} middle", x, [1, 3, 2], 1, views=True)
        split(f"{d} first", x, [2, 2], 0)
        split(f"{d} last", x, [1, 0, 2], -1)
        split(f"{d} whole", x, [6], 1)
    split("rows", x, [2, 4], 1, rows=[0])
    split("empty", sample(rng(), "f32", [0, 3]), [1, 2], 1)
    split("empty axis", sample(rng(), "f32", [0, 3]), [0, 0], 0)
    split("large", sample(rng("large"), "u8", [101, 90], 0, 255), [33, 57], 1)
    book.one("split", "sizes that do not sum up", [x], None, fails="verify", sizes=[1, 2], axis=1)
    book.one("split", "rows cut", [x], None, fails="verify", rows=[0], sizes=[1, 3], axis=0)


def alone(book):
    """Gathering from the members of a communicator of one."""
    for d in PLAIN:
        x = sample(rng("all_gather", d), d, [3, 5])
        book.one("all_gather", d, [x], x, "exact", members=1)
        book.views("all_gather", f"views {d}", [x], x, "exact", members=1)
    for note, shape, rows in (("rows", [5, 4], [0]), ("vector", [7], None), ("empty", [0, 3], None), ("of no width", [3, 0], None), ("large", [61, 91], None)):
        x = sample(rng("all_gather", note), "f32", shape)
        book.one("all_gather", note, [x], x, "exact", rows=rows, members=1)
    book.one("all_gather", "a scalar", [sample(rng("s"), "f32", [])], None, fails="verify", members=1)
    book.one("all_gather", "the row dimension", [sample(rng("r"), "f32", [4])], None, fails="verify", rows=[0], members=1)


def indices_of(r, dtype, n, shape):
    low = 0 if dtype[0] == "u" else -n
    return T(dtype, r.integers(low, n, shape))


def index(book):
    from blocks import TYPES, block

    for d in ("f32", "f16", "bf16"):
        table = sample(rng("rows", d), d, [9, 7])
        at = T("i32", [0, 8, 3, 3, 1])
        out = T("f32", table.up[at.a])
        book.one("get_rows", d, [table, at], out, "exact")
        book.views("get_rows", f"views {d}", [table, at], out, "exact")
        book.one("get_rows", f"rows {d}", [table, at], out, "exact", rows=[1])
    for d in TYPES:
        t, values = block(rng("get_rows", d), d, 5, 512)
        at = T("i32", [4, 0, 2])
        book.one("get_rows", d, [t, at], T("f32", values[at.a]), "exact")
        book.one("take", d, [t, T("i64", [[4], [-5]])], T("f32", values[[[4], [0]]]), "exact", axis=0)
    none = T("i32", np.zeros([0]))
    book.one("get_rows", "empty", [table, none], T("f32", np.zeros([0, 7])), "exact")
    table = sample(rng("rows", "large"), "f32", [301, 5])
    at = T("i32", rng("at").integers(0, 301, 1000))
    book.one("get_rows", "large", [table, at], T("f32", table.a[at.a]), "exact")
    for bad in (-1, 301):
        book.one("get_rows", f"index {bad}", [table, T("i32", [0, bad])], None, fails="run")
    take(book)
    gather(book)
    scatter(book)

    def add_id(note, da, db, di, t, u, n, rows=None):
        a, b = sample(rng("add_id", note), da, [t, u, n]), sample(rng("add_id", note, 2), db, [6, n])
        ids = indices_of(rng("add_id", note, 3), di, 6, [t, u])
        out = T(promote_all([a, b]), a.up + b.up[ids.a.astype(np.int64)])
        book.one("add_id", note, [a, b, ids], out, rows=rows)
        if rows is None:
            book.views("add_id", f"views {note}", [a, b, ids], out)

    for d in FLOATS:
        add_id(f"odd {d}", d, d, "i32", 3, 2, 7)
    for d in INTS:
        add_id(f"{d} ids", "f32", "f32", d, 3, 2, 7)
        add_id(f"odd {d}", d, d, "i32", 3, 2, 7)
    add_id("odd c64", "c64", "c64", "i32", 3, 2, 7)
    add_id("bool beside f32", "bool", "f32", "i32", 3, 2, 7)
    add_id("f32 beside bool", "f32", "bool", "i32", 3, 2, 7)
    add_id("empty", "f32", "f32", "i32", 0, 2, 7)
    add_id("large", "f32", "f32", "i32", 19, 3, 61)
    add_id("rows", "f32", "f32", "i32", 5, 2, 7, rows=[0, 2])
    a, b = T("f32", np.zeros([1, 1, 2])), T("f32", np.zeros([6, 2]))
    book.one("add_id", "id outside", [a, b, T("i32", [[6]])], None, fails="run")


def take(book):
    def add(note, x, at, axis, rows=None, views=False):
        out = T(x.dtype, np.take(x.a, at.a.astype(np.int64), axis=axis))
        book.one("take", note, [x, at], out, "exact", rows=rows, axis=axis)
        if views:
            book.views("take", f"views {note}", [x, at], out, "exact", axis=axis)

    for d in PLAIN:
        x = sample(rng("take", d), d, [4, 5, 3])
        for axis in (0, 1, -1):
            n = x.shape[axis]
            add(f"{d} {axis}", x, indices_of(rng(d, axis), "i32", n, [2, 3]), axis, views=d in ("f32", "u8"))
    x = sample(rng("take"), "f32", [4, 5, 3])
    for d in INTS:
        add(f"indices {d}", x, indices_of(rng(d), d, 5, [6]), 1)
    add("scalar index", x, T("i32", -1), 1)
    add("no index", x, T("i32", np.zeros([0])), 1)
    add("no index, two axes", x, T("i32", np.zeros([2, 0])), 0)
    add("one axis", sample(rng("one"), "f32", [7]), T("i32", [[6, -7], [0, 3]]), 0)
    add("one axis, scalar index", sample(rng("one"), "f32", [7]), T("u8", 6), 0)
    add("large", sample(rng("large"), "f16", [61, 11]), indices_of(rng("large"), "i32", 61, [700]), 0)
    add("large inner", sample(rng("large"), "f16", [31, 61]), indices_of(rng("large"), "i32", 61, [200]), 1)
    add("rows by", x, indices_of(rng("r"), "i32", 4, [6]), 0, rows=[1])
    add("rows of", x, indices_of(rng("r"), "i32", 5, [6]), 1, rows=[0])
    empty = T("f32", np.zeros([0, 3]))
    add("nothing out of nothing", empty, T("i32", np.zeros([0])), 0)
    add("columns of nothing", empty, T("i32", [2, -3]), 1)
    book.one("take", "something out of nothing", [empty, T("i32", [0])], None, fails="either", axis=0)
    for d, bad in (("i32", 5), ("i32", -6), ("i64", 2**40), ("i64", MIN), ("u64", 2**63), ("u8", 255), ("i8", -128)):
        book.one("take", f"index {bad}", [x, T(d, np.array([0, bad], dtype=NUMPY[d]))], None, fails="run", axis=1)
    book.one("take", "float indices", [x, T("f32", [0.0])], None, fails="verify", axis=0)

    def along(note, x, at, axis, rows=None, views=False):
        out = T(x.dtype, np.take_along_axis(x.a, at.a.astype(np.int64), axis))
        book.one("take_along_axis", note, [x, at], out, "exact", rows=rows, axis=axis)
        if views:
            book.views("take_along_axis", f"views {note}", [x, at], out, "exact", axis=axis)

    for d in PLAIN:
        x = sample(rng("along", d), d, [4, 5, 3])
        for axis in (0, 1, -1):
            s = list(x.shape)
            s[axis] = 6
            along(f"{d} {axis}", x, indices_of(rng(d, axis), "i32", x.shape[axis], s), axis, views=d in ("f32", "u8"))
    x = sample(rng("along"), "f32", [4, 5, 3])
    for d in INTS:
        along(f"indices {d}", x, indices_of(rng(d), d, 5, [4, 2, 3]), 1)
    along("none", x, T("i32", np.zeros([4, 0, 3])), 1)
    along("one axis", sample(rng("one"), "f32", [7]), T("i32", [6, -7, 0, 3]), 0)
    along("rows", x, indices_of(rng("r"), "i32", 5, [4, 2, 3]), 1, rows=[0, 1])
    along("large", sample(rng("large"), "f16", [41, 50]), indices_of(rng("large"), "u8", 50, [41, 110]), 1)
    book.one("take_along_axis", "other axes differ", [x, T("i32", np.zeros([1, 2, 3]))], None, fails="verify", axis=1)
    book.one("take_along_axis", "ranks differ", [x, T("i32", np.zeros([5]))], None, fails="verify", axis=1)
    bad = T("i32", np.full([4, 1, 3], 5))
    book.one("take_along_axis", "index outside", [x, bad], None, fails="run", axis=1)
    book.one("take_along_axis", "negative index outside", [x, T("i32", np.full([4, 1, 3], -6))], None, fails="run", axis=1)


def gather_nd(x, at, batch):
    """ONNX GatherND, element by element."""
    depth = at.shape[-1]
    out = np.zeros(at.shape[:-1] + x.shape[batch + depth :], dtype=x.dtype)
    for place in np.ndindex(*at.shape[:-1]):
        out[place] = x[place[:batch] + tuple(int(i) for i in at[place])]
    return out


def index_tuples(r, dtype, sizes, shape):
    """Random index tuples, the last axis running over `sizes`."""
    parts = [indices_of(r, dtype, n, shape).a for n in sizes]
    return T(dtype, np.stack(parts, -1) if parts else np.zeros(list(shape) + [0]))


def gather(book):
    def add(note, x, at, batch, rows=None, views=False):
        out = T(x.dtype, gather_nd(x.a, at.a, batch))
        book.one("gather_nd", note, [x, at], out, "exact", rows=rows, batch_dims=batch)
        if views:
            book.views("gather_nd", f"views {note}", [x, at], out, "exact", batch_dims=batch)

    for d in PLAIN:
        x = sample(rng("gather", d), d, [4, 5, 3])
        add(f"{d} depth 1", x, index_tuples(rng(d, 1), "i64", [4], [2, 3]), 0)
        add(f"{d} depth 2", x, index_tuples(rng(d, 2), "i64", [4, 5], [6]), 0, views=d in ("f32", "u8"))
        add(f"{d} depth 3", x, index_tuples(rng(d, 3), "i32", [4, 5, 3], [2, 2]), 0)
        add(f"{d} batch", x, index_tuples(rng(d, 4), "i64", [5], [4, 6]), 1, views=d == "f32")
        add(f"{d} batch of two", x, index_tuples(rng(d, 5), "i64", [3], [4, 5]), 2)
        add(f"{d} one", x, index_tuples(rng(d, 6), "i64", [4, 5, 3], []), 0)
    x = sample(rng("gather"), "f32", [4, 5, 3])
    for d in INTS:
        add(f"indices {d}", x, index_tuples(rng(d), d, [4, 5], [6]), 0)
    add("none", x, T("i64", np.zeros([0, 2])), 0)
    add("rows", x, index_tuples(rng("r"), "i32", [4, 5], [6]), 0, rows=[1])
    add("large", sample(rng("large"), "f16", [61, 31]), index_tuples(rng("large"), "u8", [61, 31], [1500]), 0)
    book.one("gather_nd", "outside", [x, T("i64", [[0, 5]])], None, fails="run", batch_dims=0)
    book.one("gather_nd", "outside below", [x, T("i64", [[-5, 0]])], None, fails="run", batch_dims=0)
    book.one("gather_nd", "too deep", [x, T("i64", np.zeros([2, 4]))], None, fails="verify", batch_dims=0)
    book.one("gather_nd", "batches differ", [x, T("i64", np.zeros([2, 1]))], None, fails="verify", batch_dims=1)


def apply(kind, old, new):
    with np.errstate(all="ignore"):
        if kind == "set":
            return new
        if old.dtype == bool:
            return {"max": old | new, "min": old & new}[kind]
        if kind == "add":
            return old + new
        if kind == "mul":
            return old * new
        if np.isnan(old) or np.isnan(new):
            return old + new
        # Of equal ones, zeros of both signs, the second: as maximum and minimum.
        keep = old > new if kind == "max" else old < new
        return old if keep else new


def scatter(book):
    def wide(x):
        return (x.a.astype(np.complex128) if x.dtype == "c64" else x.up).copy()

    def add(note, x, at, updates, axis, kind, rows=None, views=False, check=None):
        out, u = wide(x), wide(updates)
        for place in np.ndindex(*at.a.shape):
            to = list(place)
            to[axis] = int(at.a[place])
            out[tuple(to)] = apply(kind, out[tuple(to)], u[place])
        result = T(x.dtype, out)
        book.one("scatter_along_axis", note, [x, at, updates], result, check, rows=rows, axis=axis, reduce=kind)
        if views:
            book.views("scatter_along_axis", f"views {note}", [x, at, updates], result, check, axis=axis, reduce=kind)

    def nd(note, x, at, updates, kind, rows=None, views=False, check=None):
        out, u = wide(x), wide(updates)
        for place in np.ndindex(*at.a.shape[:-1]):
            to = tuple(int(i) for i in at.a[place])
            if np.ndim(out[to]) == 0:
                out[to] = apply(kind, out[to], u[place])
            else:
                for inner in np.ndindex(*out[to].shape):
                    out[to][inner] = apply(kind, out[to][inner], u[place][inner])
        result = T(x.dtype, out)
        book.one("scatter_nd", note, [x, at, updates], result, check, rows=rows, reduce=kind)
        if views:
            book.views("scatter_nd", f"views {note}", [x, at, updates], result, check, reduce=kind)

    for d in REALS + ["bool"]:
        for kind in ("set", "add", "mul", "max", "min") if d != "bool" else ("set", "max", "min"):
            # Half floats: few duplicates and small whole numbers, so that the order of rounding does not matter.
            make = lambda *a: T(d, np.rint(sample(*a).up)) if d in ("f16", "bf16") else sample(*a)
            exact = "exact" if kind in ("set", "max", "min") or d in INTS else None
            x = make(rng("scatter", d), d, [4, 5, 3])
            at, u = indices_of(rng(d), "i32", 5, [4, 6, 3]), make(rng(d, 2), d, [4, 6, 3])
            add(f"{kind} {d}", x, at, u, 1, kind, views=d == "f32", check=exact)
            at, u = indices_of(rng(d), "i64", 4, [2, 3, 2]), make(rng(d, 3), d, [2, 3, 2])
            add(f"{kind} {d} smaller", x, at, u, -3, kind, check=exact)
            at, u = index_tuples(rng(d), "i64", [4, 5], [7]), make(rng(d, 4), d, [7, 3])
            nd(f"{kind} {d}", x, at, u, kind, views=d == "f32", check=exact)
            at, u = index_tuples(rng(d), "i32", [4, 5, 3], [2, 3]), make(rng(d, 5), d, [2, 3])
            nd(f"{kind} {d} elements", x, at, u, kind, check=exact)
            at, u = index_tuples(rng(d), "u8", [4], [3]), make(rng(d, 6), d, [3, 5, 3])
            nd(f"{kind} {d} planes", x, at, u, kind, check=exact)
    x, u = sample(rng("sc"), "f32", [4, 5, 3]), sample(rng("sc", 2), "f32", [4, 6, 3])
    for d in INTS:
        add(f"indices {d}", x, indices_of(rng(d), d, 5, [4, 6, 3]), u, 1, "set", check="exact")
        nd(f"indices {d}", x, index_tuples(rng(d), d, [4, 5], [7]), sample(rng(d), "f32", [7, 3]), "set", check="exact")
    nan = T("f32", [1.0, np.nan, 3.0, 4.0])
    for kind in ("max", "min"):
        add(f"{kind} NaN", nan, T("i32", [0, 1, 2]), T("f32", [np.nan, 2.0, 5.0]), 0, kind, check="exact")
        nd(f"{kind} NaN", nan, T("i32", [[0], [1], [2]]), T("f32", [np.nan, 2.0, 5.0]), kind, check="exact")
    add("last wins", T("f32", np.zeros(3)), T("i32", [1, 1, 1, -2]), T("f32", [1, 2, 3, 4]), 0, "set", check="exact")
    nd("last wins", T("f32", np.zeros(3)), T("i32", [[1], [1], [1], [-2]]), T("f32", [1, 2, 3, 4]), "set", check="exact")
    add("none", x, T("i32", np.zeros([4, 0, 3])), T("f32", np.zeros([4, 0, 3])), 1, "add", check="exact")
    nd("none", x, T("i32", np.zeros([0, 2])), T("f32", np.zeros([0, 3])), "add", check="exact")
    add("rows", x, indices_of(rng("r"), "i32", 5, [4, 6, 3]), u, 1, "add", rows=[0, 1, 2])
    nd("rows", x, index_tuples(rng("r"), "i32", [4, 5], [7]), sample(rng("r"), "f32", [7, 3]), "add", rows=[1, 2])
    n = 1999
    add("large", sample(rng("l"), "f32", [101]), indices_of(rng("l"), "i32", 101, [n]), sample(rng("l", 2), "f32", [n]), 0, "add")
    nd("large", sample(rng("l"), "f32", [11, 9]), index_tuples(rng("l"), "u8", [11, 9], [n]), sample(rng("l", 2), "f32", [n]), "add")
    for op, at in (("scatter_along_axis", [5]), ("scatter_nd", [[5]])):
        extra = {"axis": 0} if op == "scatter_along_axis" else {}
        y = T("f32", np.zeros(5))
        book.one(op, "outside", [y, T("i32", at), T("f32", [1.0])], None, fails="run", reduce="set", **extra)
        book.one(op, "outside below", [y, T("i64", -np.array(at) - 1), T("f32", [1.0])], None, fails="run", reduce="add", **extra)
        book.one(op, "updates of another shape", [y, T("i32", np.zeros_like(at)), T("f32", [[1.0, 2.0]])], None, fails="verify", reduce="set", **extra)


def order(x, descending):
    """Stable order of one row; NaN counts as the greatest."""
    key = lambda i: (bool(np.isnan(x[i])), 0 if np.isnan(x[i]) else x[i])
    if not descending:
        return sorted(range(len(x)), key=key)
    # Stable: equal ones keep their order, so greater ones go first without reversing.
    n = len(x)
    return sorted(sorted(range(n)), key=lambda i: (not np.isnan(x[i]), 0 if np.isnan(x[i]) else -(int(x[i]) if x.dtype.kind in "iub" else float(x[i]))))


def sort(book):
    def orders(x, axis, descending):
        moved = np.moveaxis(x.a, axis, -1)
        rows = [order(row, descending) for row in moved.reshape(-1, moved.shape[-1])] if moved.size else []
        at = np.array(rows, dtype=np.int64).reshape(moved.shape)
        return np.moveaxis(at, -1, axis)

    def add(note, x, axis, rows=None, views=False):
        for descending in (False, True):
            at = orders(x, axis, descending)
            values, places = T(x.dtype, np.take_along_axis(x.a, at, axis)), T("u32", at)
            for op, out in (("sort", values), ("argsort", places)):
                book.one(op, f"{note} {descending}", [x], out, "exact", rows=rows, axis=axis, descending=descending)
                if views:
                    book.views(op, f"views {note} {descending}", [x], out, "exact", axis=axis, descending=descending)
            n = x.shape[axis]
            for k in sorted({0, 1, min(3, n), n}):
                if k in (0, 1, n) and note not in ("ties", "odd f32"):
                    continue
                first = np.take(at, range(k), axis)
                out = [T(x.dtype, np.take_along_axis(x.a, first, axis)), T("u32", first)]
                book.one("topk", f"{note} {k} {descending}", [x], out, "exact", rows=rows, k=k, axis=axis, largest=descending)
                if views:
                    book.views("topk", f"views {note} {k} {descending}", [x], out, "exact", k=k, axis=axis, largest=descending)

    for d in REALS + ["bool"]:
        # Zeros of both signs are equal and keep their order: sort tells them apart by their bits.
        x = T(d, np.resize(rng("sort", d).permutation(corners(d)), [2, 15]))
        add(f"corners {d}", x, -1)
        add(f"odd {d}", sample(rng("sort", d, 2), d, [3, 7, 5]), 1, views=d == "f32")
    x = sample(rng("sort"), "i8", [4, 33], -3, 3)
    add("ties", x, 1)
    add("first axis", x, 0)
    add("one axis", sample(rng("sort"), "f32", [17]), 0)
    add("one element", sample(rng("sort"), "f32", [1]), 0)
    add("empty", T("f32", np.zeros([0])), 0)
    add("empty rows", T("f32", np.zeros([0, 3])), 1)
    add("rows", sample(rng("sort"), "f16", [5, 9]), 1, rows=[0])
    add("large", sample(rng("sort"), "f16", [3, 1999]), 1)
    add("large with ties", sample(rng("sort"), "u8", [5003], 0, 200), 0)
    for op, attributes in (("sort", {"descending": False}), ("argsort", {"descending": False}), ("topk", {"k": 1, "largest": True})):
        book.one(op, "c64", [T("c64", [1j])], None, fails="verify", axis=0, **attributes)
    book.one("topk", "k too large", [x], None, fails="verify", axis=1, k=34, largest=True)


def fill(books):
    for name, f in (("shape", shape), ("join", join), ("join", alone), ("index", index), ("sort", sort)):
        book = books.setdefault(name, Book(name))
        f(book)
