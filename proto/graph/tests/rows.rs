//! The rules of the rows: what results are of given inputs, and that decompositions keep to them and come to an end.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::HashMap;

use hotcell_graph::{
    DType, Dim, Graph, GraphBuilder, Shape, TensorSpec, Value,
    op::{self, Attribute, ValueSpec},
};

/// `f32[rows, 3]`, as specs are shown; `-` is an absent input.
fn spec(text: &str) -> Option<TensorSpec> {
    if text == "-" {
        return None;
    }
    let (dtype, dims) = text.strip_suffix(']').unwrap().split_once('[').unwrap();
    Some(TensorSpec::new(DType::from_name(dtype).unwrap(), shape(dims)).unwrap())
}

/// `rows, 3`.
fn shape(dims: &str) -> Shape {
    let dims = dims.split(',').map(str::trim).filter(|d| !d.is_empty());
    let dim = |d: &str| match d {
        "rows" => Dim::Rows,
        n => Dim::Fixed(n.parse().unwrap()),
    };
    Shape::new(dims.map(dim)).unwrap()
}

/// `f32[3]; -; i32[]` as inputs of a builder.
fn inputs(g: &mut GraphBuilder, list: &str) -> Vec<Value> {
    let list = list.split(';').map(str::trim).filter(|s| !s.is_empty());
    list.map(|text| match spec(text) {
        Some(spec) => g.tensor("x", spec).unwrap(),
        None => Value::Absent,
    })
    .collect()
}

fn shown(specs: &[TensorSpec]) -> String {
    let specs: Vec<_> = specs.iter().map(ToString::to_string).collect();
    specs.join("; ")
}

/// One decomposition of every node that has one; whether it changed anything. A primitive that casts its inputs
/// decomposes into itself where there is nothing to cast.
fn pass(graph: &Graph) -> (Graph, bool) {
    let mut g = GraphBuilder::new(graph.max_rows());
    let mut values = HashMap::from([(Value::Absent, Value::Absent)]);
    for (i, input) in graph.inputs().iter().enumerate() {
        let ValueSpec::Tensor(t) = &input.spec else {
            panic!("{:?}", input.spec);
        };
        let value = g.tensor("x", t.clone()).unwrap();
        values.insert(Value::Input(i as u32), value);
    }
    let mut changed = false;
    for (i, node) in graph.nodes().iter().enumerate() {
        let inputs: Vec<Value> = node.inputs.iter().map(|v| values[v]).collect();
        let itself = |g: &mut GraphBuilder| {
            g.apply(node.op, inputs.clone(), node.attributes.clone())
                .unwrap()
        };
        let results = match node.op.decompose {
            None => itself(&mut g),
            Some(decompose) => {
                let own = inputs.clone();
                let results = decompose(&mut g, &own, &node.attributes)
                    .unwrap_or_else(|e| panic!("{node:?}: {e}"));
                assert_eq!(results.len(), node.outputs.len(), "{node:?}");
                for (result, spec) in results.iter().zip(&node.outputs) {
                    let result = g.spec(*result).unwrap();
                    assert_eq!(result, ValueSpec::Tensor(spec.clone()), "{node:?}");
                }
                // What the last node of the new graph is, its own result tells.
                changed |= !is_itself(&mut g, &results, node.op.name, &own);
                results
            }
        };
        for (output, result) in results.into_iter().enumerate() {
            let (node, output) = (i as u32, output as u32);
            values.insert(Value::Node { node, output }, result);
        }
    }
    let outputs: Vec<Value> = graph.outputs().iter().map(|v| values[v]).collect();
    (g.finish(&outputs).unwrap(), changed)
}

/// Whether the results are those of one node of this op on these very inputs.
fn is_itself(g: &mut GraphBuilder, results: &[Value], op: &str, inputs: &[Value]) -> bool {
    let (Some(Value::Node { node, .. }), false) = (results.first(), results.is_empty()) else {
        return false;
    };
    let so_far = std::mem::replace(g, GraphBuilder::new(0))
        .finish(&[])
        .unwrap();
    let last = &so_far.nodes()[*node as usize];
    let same = last.op.name == op && last.inputs == inputs;
    // A builder cannot be looked into; build the same again.
    let mut again = GraphBuilder::new(so_far.max_rows());
    for input in so_far.inputs() {
        let ValueSpec::Tensor(t) = &input.spec else {
            panic!("{:?}", input.spec);
        };
        again.tensor("x", t.clone()).unwrap();
    }
    for n in so_far.nodes() {
        again
            .apply(n.op, n.inputs.clone(), n.attributes.clone())
            .unwrap();
    }
    *g = again;
    same
}

/// The results of a row, shown, after taking its decompositions to the end; or its error.
#[track_caller]
fn results(op: &str, list: &str, attributes: &[Attribute]) -> Result<String, String> {
    let row = op::find(op).unwrap_or_else(|| panic!("no {op}"));
    let mut g = GraphBuilder::new(4);
    let values = inputs(&mut g, list);
    let values = g
        .apply(row, values, attributes.to_vec())
        .map_err(|e| e.to_string())?;
    let mut graph = g.finish(&values).unwrap();
    let specs = shown(&graph.nodes()[0].outputs);
    let mut passes = 0;
    loop {
        let (next, changed) = pass(&graph);
        graph = next;
        if !changed {
            return Ok(specs);
        }
        passes += 1;
        assert!(passes < 6, "{op} {list} goes on: {graph:?}");
    }
}

/// An op, its inputs, its attributes, and its results or words of its error.
type Case<'a> = (&'a str, &'a str, Vec<Attribute>, Result<&'a str, &'a str>);

#[track_caller]
fn check(cases: &[Case<'_>]) {
    for (op, list, attributes, want) in cases {
        let got = results(op, list, attributes);
        match (want, &got) {
            (Ok(want), Ok(got)) => assert_eq!(got, want, "{op} {list} {attributes:?}"),
            (Err(words), Err(said)) => {
                assert!(said.contains(words), "{op} {list} {attributes:?}: {said}");
            }
            _ => panic!("{op} {list} {attributes:?}: {got:?}, not {want:?}"),
        }
    }
}

fn ints(list: &[i64]) -> Attribute {
    Attribute::Ints(list.to_vec())
}

fn int(n: i64) -> Attribute {
    Attribute::Int(n)
}

fn name(text: &str) -> Attribute {
    Attribute::Name(text.to_owned())
}

use Attribute::{Bool as B, Bytes, DType as D, Float as F, Shape as S};

#[test]
fn creation() {
    let arange = |n, d| vec![F(0.0), F(1.5), int(n), D(d)];
    let literal = |d, s: &str, n: usize| vec![D(d), S(shape(s)), Bytes(vec![0; n])];
    check(&[
        ("arange", "", arange(5, DType::I8), Ok("i8[5]")),
        ("arange", "", arange(0, DType::BF16), Ok("bf16[0]")),
        ("arange", "", arange(5, DType::Bool), Err("bool")),
        ("arange", "", arange(5, DType::C64), Err("c64")),
        ("arange", "", arange(5, DType::Q4_0), Err("q4_0")),
        ("arange", "", arange(-1, DType::I8), Err("length")),
        (
            "literal",
            "",
            literal(DType::F16, "2, 3", 12),
            Ok("f16[2, 3]"),
        ),
        ("literal", "", literal(DType::C64, "", 8), Ok("c64[]")),
        ("literal", "", literal(DType::U8, "0, 7", 0), Ok("u8[0, 7]")),
        (
            "literal",
            "",
            literal(DType::F16, "2, 3", 11),
            Err("11 bytes"),
        ),
        (
            "literal",
            "",
            literal(DType::U8, "rows", 0),
            Err("row dimension"),
        ),
        ("literal", "", literal(DType::Q4_0, "32", 18), Err("q4_0")),
        (
            "literal",
            "",
            vec![D(DType::Bool), S(shape("1")), Bytes(vec![2])],
            Err("0 or 1"),
        ),
    ]);
}

#[test]
fn one_operand() {
    check(&[
        ("neg", "u8[rows, 2]", vec![], Ok("u8[rows, 2]")),
        ("neg", "bool[2]", vec![], Err("bool")),
        ("abs", "c64[2]", vec![], Ok("f32[2]")),
        ("abs", "f16[2]", vec![], Ok("f16[2]")),
        ("sign", "c64[2]", vec![], Err("c64")),
        ("floor", "i64[]", vec![], Ok("i64[]")),
        ("floor", "q4_0[32]", vec![], Err("q4_0")),
        ("sqrt", "i64[rows]", vec![], Ok("f32[rows]")),
        ("sqrt", "bool[3]", vec![], Ok("f32[3]")),
        ("exp", "bf16[3]", vec![], Ok("bf16[3]")),
        ("exp", "f64[3]", vec![], Ok("f64[3]")),
        ("exp", "c64[3]", vec![], Err("c64")),
        ("reciprocal", "c64[3]", vec![], Ok("c64[3]")),
        ("reciprocal", "u64[3]", vec![], Ok("f32[3]")),
        ("silu", "i8[3]", vec![], Ok("f32[3]")),
        ("logical_not", "f16[3]", vec![], Ok("bool[3]")),
        ("is_nan", "i16[3]", vec![], Ok("bool[3]")),
        ("bitwise_not", "bool[3]", vec![], Ok("bool[3]")),
        ("bitwise_not", "f32[3]", vec![], Err("f32")),
        (
            "cast",
            "q4_0[rows, 32]",
            vec![D(DType::F16)],
            Ok("f16[rows, 32]"),
        ),
        ("cast", "q4_0[32]", vec![D(DType::I32)], Err("float")),
        (
            "cast",
            "bf16[rows, 64]",
            vec![D(DType::Q4_0)],
            Ok("q4_0[rows, 64]"),
        ),
        (
            "cast",
            "f32[3, 33]",
            vec![D(DType::Q8_0)],
            Err("blocks of 32"),
        ),
        ("cast", "f32[]", vec![D(DType::Q8_0)], Err("blocks of 32")),
        (
            "cast",
            "f32[rows]",
            vec![D(DType::Q8_0)],
            Err("blocks of 32"),
        ),
        ("cast", "f32[256]", vec![D(DType::Q4K)], Err("tq1_0")),
        ("cast", "i32[32]", vec![D(DType::Q4_0)], Err("f32 first")),
        ("cast", "q8_0[32]", vec![D(DType::Q4_0)], Err("f32 first")),
        ("cast", "c64[2]", vec![D(DType::Bool)], Ok("bool[2]")),
    ]);
}

#[test]
fn two_operands() {
    check(&[
        ("add", "i8[3, 1]; u8[4]", vec![], Ok("i16[3, 4]")),
        ("add", "bool[3]; bool[3]", vec![], Err("cast")),
        ("add", "bool[3]; u8[]", vec![], Ok("u8[3]")),
        ("add", "f16[rows, 3]; bf16[3]", vec![], Ok("f32[rows, 3]")),
        ("add", "f32[rows, 3]; f32[2, 3]", vec![], Err("broadcast")),
        ("mul", "c64[3]; f64[1]", vec![], Ok("c64[3]")),
        ("pow", "c64[3]; f32[3]", vec![], Err("c64")),
        ("maximum", "bool[3]; bool[3]", vec![], Ok("bool[3]")),
        ("maximum", "q8_0[32]; f32[32]", vec![], Err("q8_0")),
        ("div", "i32[3]; i32[3]", vec![], Ok("f32[3]")),
        ("div", "c64[3]; i32[3]", vec![], Ok("c64[3]")),
        ("atan2", "i32[3]; f16[3]", vec![], Ok("f16[3]")),
        ("logaddexp", "c64[3]; f16[3]", vec![], Err("c64")),
        ("equal", "c64[3]; i8[3]", vec![], Ok("bool[3]")),
        ("less", "c64[3]; i8[3]", vec![], Err("c64")),
        ("less", "u64[rows]; i8[]", vec![], Ok("bool[rows]")),
        ("logical_xor", "f32[3]; i64[2, 1]", vec![], Ok("bool[2, 3]")),
        ("bitwise_or", "bool[3]; u8[3]", vec![], Ok("u8[3]")),
        ("bitwise_or", "u64[3]; i8[3]", vec![], Err("cast")),
        ("left_shift", "u32[3]; u8[3]", vec![], Ok("u32[3]")),
        ("left_shift", "bool[3]; u8[3]", vec![], Err("integers")),
        (
            "where",
            "bool[2, 1]; i32[3]; f16[]",
            vec![],
            Ok("f16[2, 3]"),
        ),
        (
            "where",
            "bool[rows, 1]; c64[3]; bool[]",
            vec![],
            Ok("c64[rows, 3]"),
        ),
        ("where", "u8[2]; i32[2]; i32[2]", vec![], Err("bool")),
    ]);
}

#[test]
fn activations_and_closeness() {
    let close = || vec![F(1e-5), F(1e-8), B(true)];
    check(&[
        ("relu", "i8[rows, 3]", vec![], Ok("i8[rows, 3]")),
        ("relu", "bf16[3]", vec![], Ok("bf16[3]")),
        ("relu", "bool[3]", vec![], Err("bool")),
        ("gelu", "f16[rows]", vec![], Ok("f16[rows]")),
        ("gelu", "i8[3]", vec![], Ok("f32[3]")),
        ("gelu_tanh", "bf16[3]", vec![], Ok("bf16[3]")),
        ("gelu_quick", "f64[3]", vec![], Ok("f64[3]")),
        ("softplus", "bool[3]", vec![], Ok("f32[3]")),
        ("softplus", "c64[3]", vec![], Err("c64")),
        (
            "swiglu",
            "f16[rows, 2]; bf16[rows, 2]",
            vec![],
            Ok("f32[rows, 2]"),
        ),
        ("swiglu", "f16[2]; f16[1]", vec![], Err("equal")),
        ("geglu", "i8[2]; f16[2]", vec![], Ok("f16[2]")),
        (
            "swiglu_limit",
            "f32[2]; f16[2]",
            vec![F(1.702), F(7.0)],
            Ok("f32[2]"),
        ),
        ("clamp", "i8[rows, 3]; f32[3]; -", vec![], Ok("i8[rows, 3]")),
        ("clamp", "f16[3]; -; f64[2, 1]", vec![], Ok("f16[2, 3]")),
        ("clamp", "f16[3]; -; -", vec![], Ok("f16[3]")),
        ("clamp", "f16[3]; c64[]; -", vec![], Err("c64")),
        (
            "is_close",
            "f16[rows, 2]; i32[2]",
            close(),
            Ok("bool[rows, 2]"),
        ),
        ("is_close", "c64[2]; i32[2]", close(), Err("c64")),
        ("all_close", "i32[rows, 2]; f64[2]", close(), Ok("bool[]")),
        ("array_equal", "c64[2]; f64[2]", vec![B(true)], Ok("bool[]")),
        ("array_equal", "u8[2]; u8[3]", vec![B(false)], Ok("bool[]")),
        (
            "array_equal",
            "u8[rows]; u8[rows]",
            vec![B(false)],
            Ok("bool[]"),
        ),
        (
            "array_equal",
            "u8[rows]; u8[3]",
            vec![B(false)],
            Err("row dimension"),
        ),
    ]);
}

#[test]
fn reductions() {
    let over = |axes: &[i64], keep| vec![ints(axes), B(keep)];
    let var = |axes: &[i64], keep, ddof| vec![ints(axes), B(keep), int(ddof)];
    check(&[
        ("reduce_sum", "i8[rows, 3]", over(&[], false), Ok("i32[]")),
        (
            "reduce_sum",
            "u16[rows, 3]",
            over(&[-1], false),
            Ok("u32[rows]"),
        ),
        (
            "reduce_sum",
            "f16[rows, 3]",
            over(&[0], true),
            Ok("f16[1, 3]"),
        ),
        ("reduce_sum", "c64[2, 3]", over(&[0], false), Ok("c64[3]")),
        (
            "reduce_sum",
            "f32[2, 3]",
            over(&[1, -1], false),
            Err("axes"),
        ),
        ("reduce_sum", "f32[2, 3]", over(&[2], false), Err("axes")),
        ("reduce_sum", "f32[]", over(&[], true), Ok("f32[]")),
        (
            "reduce_max",
            "bool[2, 3]",
            over(&[], true),
            Ok("bool[1, 1]"),
        ),
        ("reduce_max", "f32[0, 3]", over(&[0], false), Err("nothing")),
        ("reduce_max", "f32[0, 3]", over(&[1], false), Ok("f32[0]")),
        ("reduce_max", "c64[3]", over(&[], false), Err("c64")),
        ("reduce_any", "f16[2, 3]", over(&[0], false), Ok("bool[3]")),
        (
            "argmax",
            "f16[rows, 3]",
            vec![int(0), B(false)],
            Ok("u32[3]"),
        ),
        (
            "argmin",
            "f16[rows, 3]",
            vec![int(-1), B(true)],
            Ok("u32[rows, 1]"),
        ),
        ("argmax", "f16[3, 0]", vec![int(1), B(true)], Err("nothing")),
        ("argmax", "f16[]", vec![int(0), B(true)], Err("axis")),
        (
            "argmax",
            "u8[1, 4294967296]",
            vec![int(1), B(true)],
            Err("u32"),
        ),
        ("mean", "i64[rows, 3]", over(&[], false), Ok("f32[]")),
        ("mean", "f16[rows, 3]", over(&[0], true), Ok("f16[1, 3]")),
        ("mean", "c64[4, 3]", over(&[0], false), Ok("c64[3]")),
        ("mean", "f32[0]", over(&[0], false), Ok("f32[]")),
        (
            "variance",
            "bf16[rows, 3]",
            var(&[], false, 1),
            Ok("bf16[]"),
        ),
        ("variance", "i8[4, 3]", var(&[1], true, 0), Ok("f32[4, 1]")),
        ("variance", "c64[4, 3]", var(&[1], true, 0), Err("c64")),
        (
            "standard_deviation",
            "f64[rows, 3]",
            var(&[0], false, 7),
            Ok("f64[3]"),
        ),
        (
            "logsumexp",
            "f16[rows, 3]",
            over(&[-1], false),
            Ok("f16[rows]"),
        ),
        ("logsumexp", "i8[rows, 3]", over(&[0], false), Ok("f32[3]")),
        ("logsumexp", "f32[2, 0]", over(&[1], true), Ok("f32[2, 1]")),
        (
            "cumsum",
            "i8[rows, 3]",
            vec![int(0), B(true), B(true)],
            Ok("i8[rows, 3]"),
        ),
        (
            "cumsum",
            "bool[3]",
            vec![int(0), B(true), B(true)],
            Err("bool"),
        ),
        (
            "cumprod",
            "f16[3]",
            vec![int(1), B(true), B(true)],
            Err("axis"),
        ),
    ]);
}

#[test]
fn movement() {
    let to = |s: &str| vec![S(shape(s))];
    let cut = |a: &[i64], b: &[i64], c: &[i64]| vec![ints(a), ints(b), ints(c)];
    let by = |a: &[i64], b: &[i64], m: &str| vec![ints(a), ints(b), name(m)];
    let (first, last) = (i64::MIN, i64::MAX);
    check(&[
        (
            "transpose",
            "f32[2, 3, 4]",
            vec![ints(&[])],
            Ok("f32[4, 3, 2]"),
        ),
        (
            "transpose",
            "f32[2, 3, 4]",
            vec![ints(&[-1, 0, 1])],
            Ok("f32[4, 2, 3]"),
        ),
        (
            "transpose",
            "f32[rows, 3, 4]",
            vec![ints(&[0, 2, 1])],
            Ok("f32[rows, 4, 3]"),
        ),
        (
            "transpose",
            "f32[rows, 3]",
            vec![ints(&[])],
            Err("row dimension"),
        ),
        ("transpose", "f32[2, 3]", vec![ints(&[0, 0])], Err("once")),
        ("transpose", "f32[2, 3]", vec![ints(&[0])], Err("once")),
        ("transpose", "f32[]", vec![ints(&[])], Ok("f32[]")),
        ("broadcast_to", "f32[3]", to("rows, 3"), Ok("f32[rows, 3]")),
        ("broadcast_to", "f32[1, 3]", to("0, 3"), Ok("f32[0, 3]")),
        ("broadcast_to", "f32[2, 3]", to("3"), Err("broadcast")),
        ("broadcast_to", "f32[2]", to("rows"), Err("broadcast")),
        ("slice", "f32[10]", cut(&[-3], &[last], &[2]), Ok("f32[2]")),
        (
            "slice",
            "f32[10]",
            cut(&[last], &[first], &[-3]),
            Ok("f32[4]"),
        ),
        ("slice", "f32[10]", cut(&[7], &[2], &[1]), Ok("f32[0]")),
        (
            "slice",
            "f32[10]",
            cut(&[first], &[last], &[last]),
            Ok("f32[1]"),
        ),
        (
            "slice",
            "f32[10]",
            cut(&[last], &[first], &[first]),
            Ok("f32[1]"),
        ),
        ("slice", "f32[10]", cut(&[0], &[1], &[0]), Err("step")),
        (
            "slice",
            "f32[10]",
            cut(&[0], &[], &[1]),
            Err("each of 1 axes"),
        ),
        (
            "slice",
            "f32[rows, 5]",
            cut(&[0, 1], &[last, 3], &[1, 1]),
            Ok("f32[rows, 2]"),
        ),
        (
            "slice",
            "f32[rows]",
            cut(&[1], &[last], &[1]),
            Err("row dimension"),
        ),
        (
            "pad",
            "i8[2, 3]; i8[]",
            by(&[1, 0], &[0, 2], "constant"),
            Ok("i8[3, 5]"),
        ),
        ("pad", "i8[2]; -", by(&[9], &[9], "reflect"), Ok("i8[20]")),
        (
            "pad",
            "i8[2]; i16[]",
            by(&[0], &[0], "constant"),
            Err("value must be i8[]"),
        ),
        (
            "pad",
            "i8[2]; i8[]",
            by(&[0], &[0], "wrap"),
            Err("constant"),
        ),
        ("pad", "i8[0]; -", by(&[1], &[0], "edge"), Err("constant")),
        ("pad", "i8[0]; -", by(&[1], &[0], "constant"), Ok("i8[1]")),
        (
            "pad",
            "i8[2]; -",
            by(&[1 << 40], &[0], "constant"),
            Err("elements"),
        ),
        (
            "pad",
            "i8[rows, 2]; -",
            by(&[0, 1], &[0, 0], "edge"),
            Ok("i8[rows, 3]"),
        ),
        (
            "pad",
            "i8[rows]; -",
            by(&[1], &[0], "edge"),
            Err("row dimension"),
        ),
        (
            "expand_dims",
            "i8[rows, 2]",
            vec![ints(&[-1, 1])],
            Ok("i8[rows, 1, 2, 1]"),
        ),
        (
            "expand_dims",
            "i8[rows, 2]",
            vec![ints(&[0])],
            Err("row dimension"),
        ),
        ("expand_dims", "i8[2]", vec![ints(&[0, 0])], Err("axes")),
        (
            "expand_dims",
            "i8[1, 1, 1, 1, 1, 1, 1, 1]",
            vec![ints(&[0])],
            Err("axes"),
        ),
        (
            "expand_dims",
            "q4_0[32]",
            vec![ints(&[0])],
            Ok("q4_0[1, 32]"),
        ),
        (
            "expand_dims",
            "q4_0[32]",
            vec![ints(&[-1])],
            Err("multiple"),
        ),
        (
            "squeeze",
            "i8[rows, 1, 2, 1]",
            vec![ints(&[])],
            Ok("i8[rows, 2]"),
        ),
        ("squeeze", "i8[1, 2]", vec![ints(&[0])], Ok("i8[2]")),
        ("squeeze", "i8[1, 2]", vec![ints(&[1])], Err("size 1")),
        ("squeeze", "i8[rows, 2]", vec![ints(&[0])], Err("size 1")),
        (
            "flatten",
            "i8[2, 3, 4]",
            vec![int(0), int(-1)],
            Ok("i8[24]"),
        ),
        (
            "flatten",
            "i8[rows, 3, 4]",
            vec![int(1), int(2)],
            Ok("i8[rows, 12]"),
        ),
        (
            "flatten",
            "i8[rows, 3]",
            vec![int(0), int(0)],
            Ok("i8[rows, 3]"),
        ),
        (
            "flatten",
            "i8[rows, 3]",
            vec![int(0), int(1)],
            Err("row dimension"),
        ),
        ("flatten", "i8[]", vec![int(0), int(-1)], Ok("i8[1]")),
        ("flatten", "i8[2, 3]", vec![int(1), int(0)], Err("before")),
        ("tile", "i8[2, 3]", vec![ints(&[2])], Ok("i8[2, 6]")),
        ("tile", "i8[3]", vec![ints(&[2, 4])], Ok("i8[2, 12]")),
        (
            "tile",
            "i8[rows, 3]",
            vec![ints(&[1, 4])],
            Ok("i8[rows, 12]"),
        ),
        (
            "tile",
            "i8[rows, 3]",
            vec![ints(&[2, 1])],
            Err("row dimension"),
        ),
        (
            "tile",
            "i8[rows]",
            vec![ints(&[1, 1])],
            Err("row dimension"),
        ),
        (
            "tile",
            "i8[2, 2]",
            vec![ints(&[1 << 39, 0])],
            Ok("i8[1099511627776, 0]"),
        ),
        (
            "tile",
            "i8[1048576, 0]",
            vec![ints(&[1, 1 << 40])],
            Ok("i8[1048576, 0]"),
        ),
        ("tile", "i8[2]", vec![ints(&[1 << 40])], Err("elements")),
        ("tile", "i8[2]", vec![ints(&[1; 9])], Err("axes")),
        ("repeat", "i8[2, 3]", vec![int(2), int(0)], Ok("i8[4, 3]")),
        ("repeat", "i8[2, 3]", vec![int(0), int(-1)], Ok("i8[2, 0]")),
        (
            "repeat",
            "i8[rows, 3, 5]",
            vec![int(2), int(1)],
            Ok("i8[rows, 6, 5]"),
        ),
        (
            "repeat",
            "i8[rows, 3]",
            vec![int(2), int(0)],
            Err("row dimension"),
        ),
        (
            "repeat",
            "i8[rows, 3]",
            vec![int(1), int(0)],
            Ok("i8[rows, 3]"),
        ),
        ("flip", "i8[2, 3]", vec![ints(&[])], Ok("i8[2, 3]")),
        ("flip", "i8[rows, 3]", vec![ints(&[1])], Ok("i8[rows, 3]")),
        ("flip", "i8[rows, 3]", vec![ints(&[])], Err("row dimension")),
    ]);
}

#[test]
fn joining() {
    check(&[
        (
            "concat",
            "i8[2, 3]; u8[2, 1]",
            vec![int(-1)],
            Ok("i16[2, 4]"),
        ),
        (
            "concat",
            "i8[rows, 3]; i8[rows, 0]",
            vec![int(1)],
            Ok("i8[rows, 3]"),
        ),
        (
            "concat",
            "i8[rows, 3]; i8[rows, 3]",
            vec![int(0)],
            Err("row dimension"),
        ),
        ("concat", "i8[2, 3]; i8[3]", vec![int(0)], Err("equal")),
        ("concat", "i8[2, 3]; i8[2, 4]", vec![int(0)], Err("equal")),
        ("concat", "i8[]; i8[]", vec![int(0)], Err("axis")),
        (
            "concat",
            "q4_0[1, 32]; q4_0[1, 32]",
            vec![int(0)],
            Err("q4_0"),
        ),
        (
            "stack",
            "i8[2]; f16[2]; i64[2]",
            vec![int(-1)],
            Ok("f16[2, 3]"),
        ),
        ("stack", "i8[]; i8[]", vec![int(0)], Ok("i8[2]")),
        (
            "stack",
            "i8[rows]; i8[rows]",
            vec![int(1)],
            Ok("i8[rows, 2]"),
        ),
        (
            "stack",
            "i8[rows]; i8[rows]",
            vec![int(0)],
            Err("row dimension"),
        ),
        ("stack", "i8[2]; i8[1]", vec![int(0)], Err("equal")),
        (
            "split",
            "i8[rows, 5]",
            vec![ints(&[2, 0, 3]), int(1)],
            Ok("i8[rows, 2]; i8[rows, 0]; i8[rows, 3]"),
        ),
        ("split", "i8[5]", vec![ints(&[2, 2]), int(0)], Err("add up")),
        ("split", "i8[0]", vec![ints(&[]), int(0)], Err("add up")),
        (
            "split",
            "i8[rows]",
            vec![ints(&[2, 2]), int(0)],
            Err("row dimension"),
        ),
    ]);
}

#[test]
fn composites_keep_their_specs_for_every_dtype() {
    let close = || vec![F(0.0), F(0.0), B(true)];
    let of_two = [
        ("swiglu", vec![]),
        ("add", vec![]),
        ("div", vec![]),
        ("logical_and", vec![]),
        ("array_equal", vec![B(true)]),
        ("concat", vec![int(1)]),
    ];
    let mut applied = 0;
    for &a in DType::ALL {
        for (op, attributes) in [
            ("gelu", vec![]),
            ("relu", vec![]),
            ("log1p", vec![]),
            ("mean", vec![ints(&[]), B(false)]),
            ("variance", vec![ints(&[0]), B(true), int(1)]),
            ("logsumexp", vec![ints(&[]), B(true)]),
            ("tile", vec![ints(&[3])]),
        ] {
            let wanted = results(op, &format!("{a}[rows, 256]"), &attributes);
            applied += usize::from(wanted.is_ok());
        }
        for &b in DType::ALL {
            let list = format!("{a}[rows, 256]; {b}[rows, 256]");
            applied += usize::from(results("is_close", &list, &close()).is_ok());
            for (op, attributes) in &of_two {
                applied += usize::from(results(op, &list, attributes).is_ok());
            }
        }
    }
    // Of 14 plain dtypes 13 are real: 7 rows of one operand, and of two 13² or, with c64, 14² pairs (add: not two bools).
    let of_one = 13 + 12 + 13 + 14 + 13 + 13 + 14;
    let of_two = 169 + 169 + 195 + 196 + 169 + 196 + 196;
    assert_eq!(applied, of_one + of_two);
}
