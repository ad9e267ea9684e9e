//! Graphs from strangers: what the builder accepts survives the wire unchanged, and nothing that a message can hold
//! makes decoding panic, accept what does not fit or allocate more than a small multiple of what is there.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use hotcell_graph::{
    CacheSpec, DType, Dim, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value,
    dtype::Kind,
    op::{self, Attribute, AttributeKind, Call, Effect, InputMode, OpRow, ValueSpec},
    wire,
};
use hotcell_proto::{
    limits,
    v1::{self, attribute, dim, graph_input, value_ref},
};
use proptest::prelude::*;
use prost::Message;

/// Counts what the present thread holds, and the most it held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Allocations while a thread ends are nobody's business.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps this trait's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps this trait's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `work` held at once.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let done = work();
    (done, (PEAK.get() - before) as usize)
}

/// Bytes held at most, while decoding, for each byte of the message. The worst is a tensor of eight axes split into many:
/// each size, a byte, becomes a shape of 128 bytes and what points to it, in a vector that moves into one twice as
/// large. A message of empty inputs comes next: two bytes each become a `GraphInput` of 88, in such a vector.
const HELD_PER_BYTE: usize = 288;

/// Decodes and verifies bytes. Whatever is accepted is sound, and memory stays within bounds.
#[track_caller]
fn read(bytes: &[u8]) -> Option<Graph> {
    let (read, held) = peak(|| {
        let wire = v1::Graph::decode(bytes).ok()?;
        Some(wire::decode(&wire))
    });
    assert!(
        held <= 4096 + HELD_PER_BYTE * bytes.len(),
        "{held} bytes for a message of {}",
        bytes.len()
    );
    checked(read?)
}

/// Decodes a message. Whatever is accepted is sound.
#[track_caller]
fn decoded(wire: &v1::Graph) -> Option<Graph> {
    checked(wire::decode(wire))
}

#[track_caller]
fn checked(read: Result<Graph, GraphError>) -> Option<Graph> {
    match read {
        Ok(graph) => {
            sound(&graph);
            Some(graph)
        }
        Err(error) => {
            let words = error.to_string();
            assert!(words.len() <= 1024, "{} bytes of words", words.len());
            None
        }
    }
}

/// What whoever holds a graph relies on, looked up again in its rows.
#[track_caller]
fn sound(graph: &Graph) {
    let tensor = |t: &TensorSpec| {
        let dims = t.shape.dims();
        assert!(dims.len() <= limits::MAX_RANK);
        assert!(dims.iter().skip(1).all(|d| *d != Dim::Rows));
        // Every product of axes is small, and so is every stride, even where another axis is 0.
        let product = |least: usize, rows: usize| {
            dims.iter()
                .map(|d| d.at(rows).max(least) as u128)
                .try_fold(1u128, u128::checked_mul)
                .unwrap()
        };
        let most = u128::from(limits::MAX_ELEMENTS);
        assert!(product(1, 1) <= most && product(0, graph.max_rows()) <= most);
        assert!(t.bytes(graph.max_rows()).is_some());
        if t.dtype.kind() == Kind::Block {
            let Some(Dim::Fixed(inner)) = dims.last() else {
                panic!("{t} has no blocks");
            };
            assert_eq!(inner % t.dtype.block_len(), 0);
        }
    };
    assert!(graph.inputs().len() <= limits::MAX_GRAPH_INPUTS);
    assert!(graph.nodes().len() <= limits::MAX_GRAPH_NODES);
    assert!(graph.outputs().len() <= limits::MAX_GRAPH_NODES);
    for input in graph.inputs() {
        match &input.spec {
            ValueSpec::Tensor(t) => {
                tensor(t);
                assert!(!t.shape.is_symbolic() || (graph.max_rows() > 0 && !input.constant));
            }
            ValueSpec::Absent => panic!("an absent input"),
            ValueSpec::Cache(c) => {
                let sizes = [c.blocks, c.block_len, c.kv_heads, c.head_dim];
                let entries = sizes
                    .iter()
                    .map(|n| *n as u128)
                    .try_fold(1u128, u128::checked_mul)
                    .unwrap();
                assert!((1..=u128::from(limits::MAX_ELEMENTS)).contains(&entries));
                assert!(c.bytes().is_some() && !input.constant);
            }
        }
    }
    for (i, node) in graph.nodes().iter().enumerate() {
        for value in &node.inputs {
            match *value {
                Value::Absent => {}
                Value::Input(at) => assert!((at as usize) < graph.inputs().len()),
                Value::Node { node, output } => {
                    assert!((node as usize) < i, "node {i} reads node {node}");
                    assert!((output as usize) < graph.nodes()[node as usize].outputs.len());
                }
            }
        }
        let (fewest, most) = node.op.arity();
        assert!((fewest..=most).contains(&node.inputs.len()));
        assert_eq!(node.attributes.len(), node.op.attributes.len());
        for (spec, value) in node.op.attributes.iter().zip(&node.attributes) {
            assert!(spec.kind.admits(value));
        }
        let specs = graph.input_specs(node).unwrap();
        for (at, spec) in specs.iter().enumerate() {
            let effect = matches!(node.op.effect, Effect::Reads(e) | Effect::Writes(e) if e == at);
            assert_eq!(matches!(spec, ValueSpec::Cache(_)), effect);
        }
        let call = Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        };
        assert_eq!((node.op.infer)(&call).unwrap(), node.outputs);
        node.outputs.iter().for_each(tensor);
    }
    for &value in graph.outputs() {
        assert!(matches!(graph.spec(value), Ok(ValueSpec::Tensor(_))));
    }
}

/// Encoding, decoding and encoding again changes nothing, as messages and as bytes.
#[track_caller]
fn survives(graph: &Graph) {
    let wire = wire::encode(graph);
    let again = wire::decode(&wire).unwrap();
    assert_eq!(wire::encode(&again), wire);
    assert_eq!(again.max_rows(), graph.max_rows());
    assert_eq!(again.inputs(), graph.inputs());
    assert_eq!(again.outputs(), graph.outputs());
    assert_eq!(again.nodes().len(), graph.nodes().len());
    for (a, b) in again.nodes().iter().zip(graph.nodes()) {
        assert!(std::ptr::eq(a.op, b.op));
        assert_eq!(
            (&a.inputs, &a.attributes, &a.outputs),
            (&b.inputs, &b.attributes, &b.outputs)
        );
    }
    let bytes = wire.encode_to_vec();
    assert_eq!(v1::Graph::decode(&*bytes).unwrap(), wire);
    assert_eq!(wire::encode(&read(&bytes).unwrap()), wire);
}

/// A case's decisions, one after another; the first of everything once they run out.
struct Choices<'a>(std::slice::Iter<'a, u32>);

impl Choices<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.0.next().map_or(0, |c| *c as usize % n)
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

fn choices() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 0..160)
}

const INNER: [usize; 5] = [64, 256, 1, 3, 0];
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn spec(dtype: DType, dims: &[Dim]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::new(dims.iter().copied()).unwrap()).unwrap()
}

/// A graph in the making, every step of which is valid.
struct Sketch<'a> {
    choices: Choices<'a>,
    builder: GraphBuilder,
    values: Vec<Value>,
    symbolic: bool,
}

impl Sketch<'_> {
    /// A number of rows: the symbolic one where there is one, or a fixed one.
    fn rows(&mut self) -> Dim {
        match self.choices.below(3) {
            0 | 1 if self.symbolic => Dim::Rows,
            _ => self.choices.pick(&[2, 1, 7, 0]).into(),
        }
    }

    fn input(&mut self, spec: TensorSpec) -> Value {
        let name = self.choices.pick(&["x", "", "blk.0.ä", "\u{0}\"\n"]);
        let value = if !spec.shape.is_symbolic() && self.choices.below(2) == 0 {
            self.builder.constant(name, spec)
        } else {
            self.builder.tensor(name, spec)
        };
        self.values.push(value.unwrap());
        *self.values.last().unwrap()
    }

    /// An earlier tensor that `fits`, or a new input of this spec.
    fn known(&mut self, otherwise: TensorSpec, fits: impl Fn(&TensorSpec) -> bool) -> Value {
        let mut known = self.values.clone();
        known.retain(|&v| fits(&self.tensor_of(v)));
        if known.is_empty() || self.choices.below(5) == 4 {
            return self.input(otherwise);
        }
        self.choices.pick(&known)
    }

    fn exactly(&mut self, dtype: DType, dims: &[Dim]) -> Value {
        let wanted = spec(dtype, dims);
        self.known(wanted.clone(), |t| *t == wanted)
    }

    fn any_f32(&mut self) -> Value {
        let rank = self.choices.below(limits::MAX_RANK + 1);
        let mut dims: Vec<Dim> = (0..rank)
            .map(|_| self.choices.pick(&[3, 1, 2, 0]).into())
            .collect();
        if let Some(first) = dims.first_mut() {
            *first = self.rows();
        }
        self.known(spec(DType::F32, &dims), |t| t.dtype == DType::F32)
    }

    fn tensor_of(&self, value: Value) -> TensorSpec {
        match self.builder.spec(value).unwrap() {
            ValueSpec::Tensor(t) => t,
            other => panic!("{other} is no tensor"),
        }
    }

    /// f32 `[m, heads, d]`, with at least one head of at least two elements.
    fn heads(&mut self) -> (Value, Dim, usize, usize) {
        let dims = [
            self.rows(),
            self.choices.pick(&[4, 1, 6]).into(),
            self.choices.pick(&[64, 2]).into(),
        ];
        let x = self.known(spec(DType::F32, &dims), |t| {
            t.dtype == DType::F32
                && matches!(*t.shape.dims(), [_, Dim::Fixed(h), Dim::Fixed(d)] if h > 0 && d > 0 && d % 2 == 0)
        });
        match *self.tensor_of(x).shape.dims() {
            [m, Dim::Fixed(h), Dim::Fixed(d)] => (x, m, h, d),
            ref other => panic!("{other:?}"),
        }
    }

    fn cache(&mut self, kv_heads: usize, head_dim: usize) -> Value {
        let fits = |dtype: &DType| dtype.row_bytes(head_dim).is_some();
        let dtypes: Vec<DType> = CacheSpec::DTYPES.into_iter().filter(fits).collect();
        let spec = CacheSpec {
            dtype: self.choices.pick(&dtypes),
            blocks: self.choices.pick(&[4, 1]),
            block_len: self.choices.pick(&[16, 1]),
            kv_heads,
            head_dim,
        };
        self.builder.cache("cache", spec).unwrap()
    }

    /// A shape that broadcasts to this one.
    fn narrower(&mut self, shape: &Shape) -> Vec<Dim> {
        let drop = self.choices.below(shape.rank() + 1);
        let mut dims = shape.dims()[drop..].to_vec();
        for d in &mut dims {
            if self.choices.below(3) == 2 {
                *d = Dim::Fixed(1);
            }
        }
        dims
    }

    /// Another shape of as many elements that keeps whole blocks.
    fn reshaped(&mut self, shape: &Shape) -> Vec<Dim> {
        let mut dims = shape.dims().to_vec();
        let outer = usize::from(shape.is_symbolic());
        match self.choices.below(3) {
            1 if dims.len() < limits::MAX_RANK => dims.insert(outer, Dim::Fixed(1)),
            2 if dims.len() > outer => {
                let rest = dims[outer..].iter().map(|d| d.at(1)).product::<usize>();
                dims.truncate(outer);
                dims.push(rest.into());
            }
            _ => {}
        }
        dims
    }

    /// Applies a row to inputs that suit it.
    fn apply(&mut self, row: &'static OpRow) {
        let (inputs, attributes) = match row.name {
            "add" | "mul" => {
                let a = self.any_f32();
                let dims = self.tensor_of(a).shape;
                let dims = self.narrower(&dims);
                let b = self.exactly(DType::F32, &dims);
                (self.choices.pick(&[vec![a, b], vec![b, a]]), vec![])
            }
            "silu" => (vec![self.any_f32()], vec![]),
            "swiglu" => {
                let a = self.any_f32();
                let dims = self.tensor_of(a).shape;
                (vec![a, self.exactly(DType::F32, dims.dims())], vec![])
            }
            "rms_norm" => {
                let dims = [self.rows(), Dim::Fixed(64)];
                let x = self.known(spec(DType::F32, &dims), |t| {
                    let inner = t.shape.inner().is_some_and(|n| n > 0);
                    t.dtype == DType::F32 && t.shape.rank() > 0 && inner
                });
                let n = self.tensor_of(x).shape.inner().unwrap();
                let eps = self.choices.pick(&[1e-5, 0.0, -0.0, 1.0, 5e-324]);
                let inputs = vec![x, self.exactly(DType::F32, &[n.into()])];
                (inputs, vec![Attribute::Float(eps)])
            }
            "mul_mat" => {
                let dims = [self.rows(), self.choices.pick(&INNER).into()];
                let x = self.known(spec(DType::F32, &dims), |t| {
                    t.dtype == DType::F32 && matches!(*t.shape.dims(), [_, Dim::Fixed(_)])
                });
                let k = self.tensor_of(x).shape.inner().unwrap();
                let dtype = self.weight_dtype(k);
                let n = self.choices.pick(&INNER);
                (vec![x, self.exactly(dtype, &[n.into(), k.into()])], vec![])
            }
            "get_rows" => {
                let k = self.choices.pick(&INNER);
                let dtype = self.weight_dtype(k);
                let (n, m) = (self.choices.pick(&INNER), self.rows());
                let table = self.exactly(dtype, &[n.into(), k.into()]);
                (vec![table, self.exactly(DType::I32, &[m])], vec![])
            }
            "reshape" => {
                let dtype = self.choices.pick(DType::ALL);
                let dims = [self.rows(), (3 * dtype.block_len()).into()];
                let x = self.known(spec(dtype, &dims), |_| true);
                let dims = self.tensor_of(x).shape;
                let shape = Shape::new(self.reshaped(&dims)).unwrap();
                (vec![x], vec![Attribute::Shape(shape)])
            }
            "rope" => {
                let (x, m, _, d) = self.heads();
                let positions = self.exactly(DType::I32, &[m]);
                let inputs = vec![x, positions, self.exactly(DType::F32, &[(d / 2).into()])];
                (inputs, vec![Attribute::Bool(self.choices.below(2) == 1)])
            }
            "cache_write" => {
                let (keys, m, h, d) = self.heads();
                let values = self.exactly(DType::F32, &[m, h.into(), d.into()]);
                let inputs = vec![
                    self.cache(h, d),
                    keys,
                    values,
                    self.exactly(DType::I32, &[m]),
                ];
                (inputs, vec![])
            }
            "paged_attention" => {
                let (queries, m, h, d) = self.heads();
                let kv_heads = if h % 2 == 0 { h / 2 } else { 1 };
                let tables = [
                    self.choices.pick(&[2, 0]).into(),
                    self.choices.pick(&[8, 0]).into(),
                ];
                let inputs = vec![
                    queries,
                    self.cache(kv_heads, d),
                    self.exactly(DType::I32, &tables),
                    self.exactly(DType::I32, &[m]),
                    self.exactly(DType::I32, &[m]),
                ];
                let scale = self.choices.pick(&[0.125, 0.0, 1e3]);
                let window = self.choices.pick(&[0, 1, i64::from(i32::MAX)]);
                let cap = self.choices.pick(&[0.0, 30.0, 1e6]);
                (
                    inputs,
                    vec![
                        Attribute::Float(scale),
                        Attribute::Int(window),
                        Attribute::Float(cap),
                    ],
                )
            }
            _ => {
                let _ = self.guess(row);
                return;
            }
        };
        let results = self.builder.apply(row, inputs, attributes).unwrap();
        self.values.extend(results);
    }

    /// Tries a row on inputs and attributes that may suit it. Says whether they did.
    fn guess(&mut self, row: &'static OpRow) -> bool {
        let mut inputs: Vec<Value> = Vec::new();
        let mut first = None;
        let mut hints = hints(row.name).iter();
        for input in row.inputs {
            let times = match input.mode {
                InputMode::One => 1,
                InputMode::Optional => self.choices.below(2),
                InputMode::Many => 1 + self.choices.below(3),
            };
            if times == 0 {
                inputs.push(Value::Absent);
            }
            for _ in 0..times {
                let like = match hints.next() {
                    Some((dtype, dims)) if self.choices.below(4) > 0 => {
                        let dims: Vec<Dim> = dims.iter().map(|n| Dim::Fixed(*n)).collect();
                        spec(*dtype, &dims)
                    }
                    _ => self.alike(&first),
                };
                let value = self.known(like.clone(), |t| *t == like);
                first.get_or_insert(like);
                inputs.push(value);
            }
        }
        // Lists that go together are mostly as long as each other.
        let length = self.choices.pick(&[1, 2, 3, 0, 256]);
        let attributes = row.attributes.iter();
        let attributes = attributes.map(|a| self.within(a.kind, length)).collect();
        match self.builder.apply(row, inputs, attributes) {
            Ok(results) => {
                self.values.extend(results);
                true
            }
            Err(error) => {
                assert!(error.to_string().len() <= 1024, "{error}");
                false
            }
        }
    }

    /// A small spec, often one that goes with the first operand's.
    fn alike(&mut self, first: &Option<TensorSpec>) -> TensorSpec {
        if let (Some(first), 1..) = (first, self.choices.below(5)) {
            let dims = match self.choices.below(4) {
                0 => self.narrower(&first.shape),
                1 => first.shape.dims().iter().rev().copied().collect(),
                _ => first.shape.dims().to_vec(),
            };
            let dtypes = [first.dtype, first.dtype, DType::I32, DType::F32, DType::U32];
            let dtype = self.choices.pick(&dtypes);
            let like = Shape::new(dims).and_then(|shape| TensorSpec::new(dtype, shape));
            return like.unwrap_or_else(|_| first.clone());
        }
        let dtypes = [DType::F32, DType::I32, DType::Bool, DType::U32];
        let dtype = match self.choices.below(6) {
            5 => self.choices.pick(DType::ALL),
            _ => self.choices.pick(&dtypes),
        };
        let rank = self.choices.below(5);
        let mut dims: Vec<Dim> = (0..rank)
            .map(|_| self.choices.pick(&[2, 1, 3, 0]).into())
            .collect();
        if let Some(first) = dims.first_mut() {
            *first = self.rows();
        }
        let like = Shape::new(dims).and_then(|shape| TensorSpec::new(dtype, shape));
        like.unwrap_or_else(|_| spec(dtype, &[(2 * dtype.block_len()).into()]))
    }

    /// A value in the range of an attribute, mostly a small one.
    fn within(&mut self, kind: AttributeKind, length: usize) -> Attribute {
        let choices = &mut self.choices;
        match kind {
            AttributeKind::Int(lo, hi) => {
                Attribute::Int(choices.pick(&[0, 1, -1, 2, lo, hi]).clamp(lo, hi))
            }
            AttributeKind::Float(lo, hi) => {
                Attribute::Float(choices.pick(&[0.0, 1.0, 0.5, lo, hi]).clamp(lo, hi))
            }
            AttributeKind::Bool => Attribute::Bool(choices.below(2) == 1),
            AttributeKind::DType => {
                let plain = [DType::F32, DType::I32, DType::F16];
                Attribute::DType(match choices.below(2) {
                    0 => choices.pick(&plain),
                    _ => choices.pick(DType::ALL),
                })
            }
            AttributeKind::Name(names) => Attribute::Name(choices.pick(names).to_owned()),
            AttributeKind::Bytes(max) => {
                let lengths = [0, 1, 4, 8, 24, max];
                Attribute::Bytes(vec![0; choices.pick(&lengths).min(max)])
            }
            AttributeKind::Ints(lo, hi) => {
                let length = choices.pick(&[length, length, length, 0, 1]);
                let one = |_| choices.pick(&[0, 1, -1, 2, 1, lo, hi]).clamp(lo, hi);
                Attribute::Ints((0..length).map(one).collect())
            }
            AttributeKind::Shape => {
                let like = self.alike(&None);
                Attribute::Shape(like.shape)
            }
        }
    }

    /// A dtype that weights of this innermost axis can have.
    fn weight_dtype(&mut self, k: usize) -> DType {
        let mut fit = FLOATS.to_vec();
        fit.extend(DType::ALL.iter().filter(|d| d.is_block()));
        fit.retain(|d| d.row_bytes(k).is_some());
        self.choices.pick(&fit)
    }
}

/// Operands for rows whose own go together in ways that nobody guesses.
fn hints(op: &str) -> &'static [(DType, &'static [usize])] {
    match op {
        "add_id" => &[
            (DType::F32, &[2, 1, 3]),
            (DType::F32, &[4, 3]),
            (DType::I32, &[2, 1]),
        ],
        "mul_mat_id" => &[
            (DType::Q8_0, &[4, 5, 32]),
            (DType::F32, &[2, 1, 32]),
            (DType::I32, &[2, 3]),
        ],
        "mul_mat_scaled" => &[
            (DType::F32, &[2, 5]),
            (DType::F8E4M3, &[3, 5]),
            (DType::F32, &[1, 1]),
        ],
        "mul_mat_id_scaled" => &[
            (DType::F8E4M3, &[4, 3, 5]),
            (DType::F32, &[2, 1, 5]),
            (DType::I32, &[2, 3]),
            (DType::F32, &[4, 1, 1]),
        ],
        "slice_update" => &[(DType::F32, &[3]), (DType::F32, &[1])],
        "slice_dynamic" => &[(DType::F32, &[3]), (DType::I32, &[1])],
        "slice_update_dynamic" => &[(DType::F32, &[3]), (DType::F32, &[2]), (DType::I32, &[1])],
        "im2col" | "interpolate" => &[(DType::F32, &[2, 3, 9])],
        "col2im" => &[(DType::F32, &[2, 3, 1])],
        "conv_transpose" => &[
            (DType::F32, &[2, 3, 4]),
            (DType::F32, &[3, 2, 2]),
            (DType::F32, &[2]),
        ],
        "ssm_conv" => &[(DType::F32, &[2, 3, 4]), (DType::F32, &[3, 2])],
        "fft" => &[(DType::C64, &[3, 2])],
        "cholesky" | "det" | "eigh" | "eig" => &[(DType::F32, &[2, 2])],
        "draw" => &[
            (DType::F32, &[2, 3]),
            (DType::F32, &[2]),
            (DType::U32, &[2, 4]),
            (DType::F32, &[2, 3]),
        ],
        "gated_delta" => &[
            (DType::F32, &[1, 3, 2, 2]),
            (DType::F32, &[1, 3, 2, 2]),
            (DType::F32, &[1, 3, 2, 4]),
            (DType::F32, &[1, 3, 2]),
            (DType::F32, &[1, 3, 2]),
            (DType::F32, &[1, 2, 4, 2]),
        ],
        "mamba2_scan" => &[
            (DType::F32, &[1, 3, 2, 4]),
            (DType::F32, &[1, 3, 2]),
            (DType::F32, &[2]),
            (DType::F32, &[1, 3, 1, 2]),
            (DType::F32, &[1, 3, 1, 2]),
            (DType::F32, &[2]),
            (DType::F32, &[1, 2, 4, 2]),
        ],
        "solve" | "solve_triangular" => &[(DType::F32, &[2, 2]), (DType::F32, &[2, 3])],
        "from_fp8" => &[(DType::U8, &[3])],
        "quantize" | "quantize_float" => &[(DType::F32, &[2, 128])],
        "dequantize" => &[
            (DType::U32, &[2, 8]),
            (DType::F32, &[2, 1]),
            (DType::F32, &[2, 1]),
        ],
        "quantized_matmul" | "gather_qmm" => &[
            (DType::F32, &[1, 3, 128]),
            (DType::U32, &[1, 2, 8]),
            (DType::F32, &[1, 2, 1]),
            (DType::F32, &[1, 2, 1]),
            (DType::I32, &[2]),
            (DType::I32, &[2]),
        ],
        "conv" => &[
            (DType::F32, &[2, 3, 9]),
            (DType::F32, &[5, 3, 2]),
            (DType::F32, &[5]),
        ],
        "rotary_embedding" => &[
            (DType::F32, &[2, 4]),
            (DType::I32, &[2]),
            (DType::F32, &[2]),
        ],
        _ => &[],
    }
}

/// A valid graph of up to this many nodes.
fn graph(choices: &[u32], nodes: usize) -> Graph {
    let mut choices = Choices(choices.iter());
    let max_rows = choices.pick(&[8, 1, 0, 4096]);
    let rows: Vec<_> = op::catalogue().collect();
    let of_layer: Vec<_> = rows.iter().filter(|r| LAYER.contains(&r.name)).collect();
    let mut sketch = Sketch {
        choices,
        builder: GraphBuilder::new(max_rows),
        values: vec![],
        symbolic: max_rows > 0,
    };
    for i in 0..nodes {
        let row = if nodes > LAYER.len() {
            of_layer[i % LAYER.len()]
        } else {
            sketch.choices.pick(&rows)
        };
        sketch.apply(row);
    }
    let Sketch {
        mut choices,
        builder,
        values,
        ..
    } = sketch;
    let outputs: Vec<Value> = match values.is_empty() {
        true => vec![],
        false => (0..choices.below(4))
            .map(|_| choices.pick(&values))
            .collect(),
    };
    builder.finish(&outputs).unwrap()
}

/// The ops of a layer of a model. A graph of more nodes than these has each of them.
const LAYER: [&str; 11] = [
    "add",
    "mul",
    "silu",
    "swiglu",
    "rms_norm",
    "mul_mat",
    "get_rows",
    "reshape",
    "rope",
    "cache_write",
    "paged_attention",
];

const EVERY_OP: usize = LAYER.len() + 1;

fn fixed(n: u64) -> v1::Dim {
    v1::Dim {
        kind: Some(dim::Kind::Fixed(n)),
    }
}

fn rows(yes: bool) -> v1::Dim {
    v1::Dim {
        kind: Some(dim::Kind::Rows(yes)),
    }
}

fn tensor(dtype: &str, dims: &[v1::Dim]) -> v1::GraphInput {
    v1::GraphInput {
        name: "x".to_owned(),
        spec: Some(graph_input::Spec::Tensor(v1::TensorSpec {
            dtype: dtype.to_owned(),
            dims: dims.to_vec(),
        })),
        constant: false,
    }
}

fn input(at: u32) -> v1::ValueRef {
    v1::ValueRef {
        kind: Some(value_ref::Kind::Input(at)),
    }
}

fn result(node: u32, output: u32) -> v1::ValueRef {
    v1::ValueRef {
        kind: Some(value_ref::Kind::Node(v1::NodeOutput { node, output })),
    }
}

fn node(op: &str, inputs: &[v1::ValueRef], attributes: &[v1::Attribute]) -> v1::Node {
    v1::Node {
        op: op.to_owned(),
        inputs: inputs.to_vec(),
        attributes: attributes.to_vec(),
    }
}

fn attribute(name: &str, value: attribute::Value) -> v1::Attribute {
    v1::Attribute {
        name: name.to_owned(),
        value: Some(value),
    }
}

fn shape(dims: &[v1::Dim]) -> attribute::Value {
    attribute::Value::Shape(v1::Shape {
        dims: dims.to_vec(),
    })
}

/// Each value that no reference of node `at` may have; a result of an op without result is among them.
fn wrong_values(wire: &v1::Graph, at: usize) -> Vec<v1::ValueRef> {
    let at = at as u32;
    let mut wrong = vec![
        v1::ValueRef::default(),
        input(wire.inputs.len() as u32),
        input(u32::MAX),
        result(at, 0),
        result(at + 1, 0),
        result(u32::MAX, 0),
        result(u32::MAX, u32::MAX),
    ];
    for (i, earlier) in (0..at).zip(&wire.nodes) {
        let results = match op::find(&earlier.op) {
            Some(row) if row.name == "cache_write" => 0,
            Some(row) if LAYER.contains(&row.name) => 1,
            _ => limits::MAX_ATTRIBUTE_INTS as u32,
        };
        wrong.push(result(i, results));
    }
    wrong
}

const WRONG_DTYPES: [&str; 10] = [
    "", "F32", "f32 ", "float", "q4_2", "q4_3", "q4_0_4_4", "q8_1", "12", "q4_k\0",
];

/// Axes that no shape may have, the first of them after others that are good.
fn wrong_dims(good: &[v1::Dim], choices: &mut Choices<'_>) -> Vec<v1::Dim> {
    let mut dims = good.to_vec();
    match choices.below(4) {
        0 => dims.resize(choices.pick(&[9, 10, 1000]), fixed(1)),
        1 => {
            dims.truncate(7);
            dims.insert(choices.below(dims.len() + 1), fixed(0));
            dims.push(rows(true));
        }
        _ => {
            let axis = choices.pick(&[
                v1::Dim::default(),
                rows(false),
                fixed(u64::MAX),
                fixed(1 << 63),
                fixed(limits::MAX_ELEMENTS + 1),
            ]);
            dims.truncate(7);
            dims.insert(choices.below(dims.len() + 1), axis);
        }
    }
    dims
}

fn dims_of(input: &mut v1::GraphInput) -> Option<&mut Vec<v1::Dim>> {
    match &mut input.spec {
        Some(graph_input::Spec::Tensor(t)) => Some(&mut t.dims),
        _ => None,
    }
}

/// Breaks one thing of a valid graph, so that it must be refused; the place is chosen. `None`: there is none.
type Break = fn(&mut v1::Graph, &mut Choices<'_>) -> Option<()>;

fn some<T>(list: &mut [T], choices: &mut Choices<'_>) -> Option<usize> {
    (!list.is_empty()).then(|| choices.below(list.len()))
}

const BREAKS: &[(&str, Break)] = &[
    ("op", |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        let long = "add".repeat(5000);
        wire.nodes[at].op = choices
            .pick(&["", "ADD", "add ", "custom", "é", &long])
            .to_owned();
        Some(())
    }),
    ("reference", |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        let wrong = wrong_values(wire, at);
        let place = some(&mut wire.nodes[at].inputs, choices)?;
        wire.nodes[at].inputs[place] = choices.pick(&wrong);
        Some(())
    }),
    ("output", |wire, choices| {
        let mut wrong = wrong_values(wire, wire.nodes.len());
        for (i, input_) in wire.inputs.iter().enumerate() {
            if matches!(input_.spec, Some(graph_input::Spec::Cache(_))) {
                wrong.push(input(i as u32));
            }
        }
        let at = choices.below(wire.outputs.len() + 1);
        wire.outputs.insert(at, choices.pick(&wrong));
        Some(())
    }),
    ("arity", |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        let inputs = &mut wire.nodes[at].inputs;
        match choices.below(3) {
            0 => inputs.clear(),
            1 => drop(inputs.pop()?),
            _ => inputs.push(*inputs.last()?),
        }
        let (fewest, most) = op::find(&wire.nodes[at].op)?.arity();
        let given = wire.nodes[at].inputs.len();
        (!(fewest..=most).contains(&given)).then_some(())
    }),
    ("dtype", |wire, choices| {
        let at = some(&mut wire.inputs, choices)?;
        let wrong = choices.pick(&WRONG_DTYPES).to_owned();
        match wire.inputs[at].spec.as_mut()? {
            graph_input::Spec::Tensor(t) => t.dtype = wrong,
            graph_input::Spec::Cache(c) => {
                c.dtype = choices.pick(&[&wrong, "i32", "q4_0"]).to_owned()
            }
        }
        Some(())
    }),
    ("dims", |wire, choices| {
        let at = some(&mut wire.inputs, choices)?;
        let dims = dims_of(&mut wire.inputs[at])?;
        *dims = wrong_dims(dims, choices);
        Some(())
    }),
    ("spec", |wire, choices| {
        let at = some(&mut wire.inputs, choices)?;
        wire.inputs[at].spec = None;
        Some(())
    }),
    ("cache", |wire, choices| {
        let mut caches = wire.inputs.iter_mut();
        let cache = caches.find(|i| matches!(i.spec, Some(graph_input::Spec::Cache(_))))?;
        let Some(graph_input::Spec::Cache(c)) = &mut cache.spec else {
            return None;
        };
        let size = choices.pick(&[0, u64::MAX, 1 << 63, limits::MAX_ELEMENTS + 1]);
        match choices.below(5) {
            0 => c.blocks = size,
            1 => c.block_len = size,
            2 => c.kv_heads = size,
            3 => c.head_dim = size,
            _ => cache.constant = true,
        }
        Some(())
    }),
    ("attribute", |wire, choices| {
        let mut nodes = wire.nodes.iter_mut().filter(|n| !n.attributes.is_empty());
        let nth = choices.below(3);
        let attributes = &mut nodes.nth(nth)?.attributes;
        let at = choices.below(attributes.len());
        let all = attributes.len();
        let one = &mut attributes[at];
        match choices.below(6) {
            0 => drop(attributes.remove(at)),
            1 => attributes.push(attributes[at].clone()),
            2 => one.value = None,
            3 => one.name.push(' '),
            // One is there twice and another not at all.
            4 if all > 1 => attributes[at] = attributes[(at + 1) % all].clone(),
            _ => {
                use attribute::Value as V;
                one.value = Some(match one.value.as_ref()? {
                    V::Ints(_) | V::Choice(_) | V::Bytes(_) => choices.pick(&[
                        V::Ints(v1::Ints {
                            values: vec![i64::MIN; 300],
                        }),
                        V::Choice("x".repeat(100)),
                        V::Bytes(vec![0; limits::MAX_LITERAL_BYTES + 1]),
                        V::Int(0),
                    ]),
                    V::Int(_) => choices.pick(&[V::Int(i64::MIN), V::Int(i64::MAX), V::Float(0.0)]),
                    V::Float(_) => choices.pick(&[
                        V::Float(f64::NAN),
                        V::Float(f64::INFINITY),
                        V::Float(f64::MAX),
                        V::Float(f64::MIN),
                        V::Int(0),
                        V::Dtype("f32".to_owned()),
                    ]),
                    V::Bool(_) => choices.pick(&[V::Int(1), shape(&[]), V::Dtype(String::new())]),
                    V::Shape(s) => {
                        let wrong = shape(&wrong_dims(&s.dims, choices));
                        choices.pick(&[wrong, V::Bool(true)])
                    }
                    V::Dtype(_) => V::Dtype(choices.pick(&WRONG_DTYPES).to_owned()),
                });
            }
        }
        Some(())
    }),
    ("stray attribute", |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        let stray = attribute("K", attribute::Value::Int(1 << 62));
        let stray = choices.pick(&[v1::Attribute::default(), stray]);
        wire.nodes[at].attributes.push(stray);
        Some(())
    }),
    ("max_rows", |wire, choices| {
        wire.max_rows = choices.pick(&[u64::MAX, 1 << 63, limits::MAX_ELEMENTS + 1]);
        Some(())
    }),
];

/// Changes that may or may not leave a valid graph.
const CHANGES: &[Break] = &[
    |wire, choices| {
        wire.max_rows = choices.pick(&[0, 1, 3, 1 << 20, limits::MAX_ELEMENTS]);
        Some(())
    },
    |wire, choices| {
        let (a, b) = (
            some(&mut wire.nodes, choices)?,
            some(&mut wire.nodes, choices)?,
        );
        wire.nodes.swap(a, b);
        Some(())
    },
    |wire, choices| {
        let (a, b) = (
            some(&mut wire.inputs, choices)?,
            some(&mut wire.inputs, choices)?,
        );
        wire.inputs.swap(a, b);
        Some(())
    },
    |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        let row = choices.pick(&op::catalogue().collect::<Vec<_>>());
        wire.nodes[at].op = row.name.to_owned();
        Some(())
    },
    |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        let place = some(&mut wire.nodes[at].inputs, choices)?;
        let (inputs, nodes) = (wire.inputs.len() as u32, at as u32);
        let value = choices.below((inputs + nodes) as usize + 1) as u32;
        wire.nodes[at].inputs[place] = match value.checked_sub(inputs) {
            None => input(value),
            Some(n) => result(n, 0),
        };
        Some(())
    },
    |wire, choices| {
        let at = some(&mut wire.inputs, choices)?;
        let dims = dims_of(&mut wire.inputs[at])?;
        let place = some(dims, choices)?;
        dims[place] = choices.pick(&[
            fixed(0),
            fixed(1),
            fixed(64),
            fixed(1 << 20),
            fixed(1 << 40),
            rows(true),
        ]);
        Some(())
    },
    |wire, choices| {
        let at = some(&mut wire.inputs, choices)?;
        if let Some(graph_input::Spec::Tensor(t)) = &mut wire.inputs[at].spec {
            t.dtype = choices.pick(DType::ALL).name().to_owned();
        }
        wire.inputs[at].constant ^= choices.below(2) == 1;
        Some(())
    },
    |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        drop(wire.nodes.remove(at));
        Some(())
    },
    |wire, choices| {
        let at = some(&mut wire.nodes, choices)?;
        let copy = wire.nodes[at].clone();
        wire.nodes.push(copy);
        Some(())
    },
];

fn any_dtype() -> impl Strategy<Value = String> {
    let names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
    prop_oneof![
        30 => Just("f32".to_owned()),
        8 => Just("i32".to_owned()),
        6 => prop::sample::select(names).prop_map(str::to_owned),
        1 => prop::sample::select(&WRONG_DTYPES[..]).prop_map(str::to_owned),
    ]
}

/// Mostly shapes that can be.
fn any_dims() -> impl Strategy<Value = Vec<v1::Dim>> {
    let small = || prop::sample::select(&[1u64, 2, 64][..]).prop_map(fixed);
    let sizes = &[0, 1, 32, 256, 1 << 20, 1 << 40, 1 << 63, u64::MAX][..];
    let any = prop_oneof![
        8 => prop::sample::select(sizes).prop_map(fixed),
        2 => Just(rows(true)),
        1 => prop::sample::select(vec![rows(false), v1::Dim::default()]),
    ];
    let first = prop_oneof![small(), Just(rows(true))];
    let good = (first, prop::collection::vec(small(), 0..3));
    let good = good.prop_map(|(first, rest)| std::iter::once(first).chain(rest).collect());
    prop_oneof![20 => good, 1 => prop::collection::vec(any, 0..12)]
}

fn any_value() -> impl Strategy<Value = v1::ValueRef> {
    prop_oneof![
        16 => (0u32..3).prop_map(input),
        8 => (0u32..3).prop_map(|n| result(n, 0)),
        1 => any::<u32>().prop_map(input),
        1 => any::<(u32, u32)>().prop_map(|(n, o)| result(n, o)),
        1 => Just(v1::ValueRef::default()),
    ]
}

fn any_attribute_value() -> impl Strategy<Value = attribute::Value> {
    let ints = prop_oneof![any::<i64>(), -2..100i64];
    let floats = prop_oneof![
        any::<f64>(),
        0.0..1.0,
        Just(f64::NAN),
        Just(f64::NEG_INFINITY)
    ];
    prop_oneof![
        ints.prop_map(attribute::Value::Int),
        floats.prop_map(attribute::Value::Float),
        any::<bool>().prop_map(attribute::Value::Bool),
        any_dims().prop_map(|d| shape(&d)),
        any_dtype().prop_map(attribute::Value::Dtype),
        prop::collection::vec(prop_oneof![any::<i64>(), -3..4i64], 0..9)
            .prop_map(|values| attribute::Value::Ints(v1::Ints { values })),
        prop::sample::select(&["constant", "wrap", "set", "neox", ""][..])
            .prop_map(|name| attribute::Value::Choice(name.to_owned())),
        prop::collection::vec(0..2u8, 0..70).prop_map(attribute::Value::Bytes),
    ]
}

/// A value of an attribute's type out of its range, if the type has one, or in it: whatever `any_attribute_value` has of it.
fn of_kind(kind: AttributeKind, values: &[attribute::Value]) -> attribute::Value {
    use attribute::Value as V;
    let fits = |v: &&V| {
        matches!(
            (kind, v),
            (AttributeKind::Int(..), V::Int(_))
                | (AttributeKind::Float(..), V::Float(_))
                | (AttributeKind::Bool, V::Bool(_))
                | (AttributeKind::Shape, V::Shape(_))
                | (AttributeKind::DType, V::Dtype(_))
                | (AttributeKind::Ints(..), V::Ints(_))
                | (AttributeKind::Name(_), V::Choice(_))
                | (AttributeKind::Bytes(_), V::Bytes(_))
        )
    };
    values.iter().find(fits).cloned().unwrap_or(V::Float(0.5))
}

fn any_input() -> impl Strategy<Value = v1::GraphInput> {
    let size = prop::sample::select(&[1, 2, 16, 64, 1, 2, 16, 0, 1 << 40, u64::MAX][..]);
    let cache = (
        any_dtype(),
        [size.clone(), size.clone(), size.clone(), size],
    );
    let cache = cache.prop_map(
        |(dtype, [blocks, block_len, kv_heads, head_dim])| v1::CacheSpec {
            dtype,
            blocks,
            block_len,
            kv_heads,
            head_dim,
        },
    );
    let tensor = (any_dtype(), any_dims()).prop_map(|(dtype, dims)| v1::TensorSpec { dtype, dims });
    let spec = prop_oneof![
        30 => tensor.prop_map(|t| Some(graph_input::Spec::Tensor(t))),
        4 => cache.prop_map(|c| Some(graph_input::Spec::Cache(c))),
        1 => Just(None),
    ];
    (".{0,6}", spec, prop::bool::weighted(0.05)).prop_map(|(name, spec, constant)| v1::GraphInput {
        name,
        spec,
        constant,
    })
}

/// Mostly the inputs and attributes that the op's row asks for, by number and name.
fn any_node() -> impl Strategy<Value = v1::Node> {
    let names: Vec<_> = op::catalogue()
        .map(|r| r.name)
        .chain(["", "custom"])
        .collect();
    let op = prop::sample::select(names);
    let values = prop::collection::vec(any_value(), 0..7);
    let attributes = prop::collection::vec(any_attribute_value(), 0..16);
    (op, values, attributes, 0..10u8).prop_map(|(op, mut inputs, mut values, slip)| {
        let mut names = vec!["eps", "eps", "window", ""];
        if let (Some(row), 1..) = (op::find(op), slip) {
            inputs.resize(row.inputs.len(), input(0));
            let kinds = row.attributes.iter().enumerate();
            values = kinds
                .map(|(i, a)| of_kind(a.kind, values.get(i..).unwrap_or_default()))
                .collect();
            names = row.attributes.iter().map(|a| a.name).collect();
        }
        let attributes = names.into_iter().zip(values).map(|(n, v)| attribute(n, v));
        v1::Node {
            op: op.to_owned(),
            inputs,
            attributes: attributes.collect(),
        }
    })
}

fn any_wire() -> impl Strategy<Value = v1::Graph> {
    let max_rows = prop_oneof![20 => 1..5u64, 1 => Just(0), 1 => any::<u64>(), 1 => Just(limits::MAX_ELEMENTS)];
    let inputs = prop::collection::vec(any_input(), 1..6);
    let nodes = prop::collection::vec(any_node(), 0..8);
    let outputs = prop::collection::vec(any_value(), 0..2);
    (max_rows, inputs, nodes, outputs).prop_map(|(max_rows, inputs, nodes, outputs)| v1::Graph {
        max_rows,
        inputs,
        nodes,
        outputs,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_valid_graph_survives_the_wire(seed in choices(), nodes in 0..EVERY_OP + 8) {
        let graph = graph(&seed, nodes);
        sound(&graph);
        survives(&graph);
    }

    #[test]
    fn a_graph_with_one_broken_thing_is_refused(
        seed in choices(), place in choices(), which in prop::sample::select(BREAKS), nodes in 1..EVERY_OP + 4,
    ) {
        let mut wire = wire::encode(&graph(&seed, nodes));
        let (what, apply) = which;
        if apply(&mut wire, &mut Choices(place.iter())).is_some() {
            prop_assert!(decoded(&wire).is_none(), "{} in {:?}", what, wire);
            prop_assert!(read(&wire.encode_to_vec()).is_none());
        }
    }

    #[test]
    fn what_is_left_of_a_changed_graph_is_sound(
        seed in choices(), place in choices(), nodes in 1..EVERY_OP + 4,
        which in prop::collection::vec(0..CHANGES.len() * 8, 1..6),
    ) {
        let mut wire = wire::encode(&graph(&seed, nodes));
        let mut choices = Choices(place.iter());
        for which in which {
            // Now and then something that must be refused, whatever else happens.
            let change = match which.checked_sub(CHANGES.len() * 7) {
                None => CHANGES[which % CHANGES.len()],
                Some(b) => BREAKS[b % BREAKS.len()].1,
            };
            let _ = change(&mut wire, &mut choices);
        }
        if let Some(graph) = decoded(&wire) {
            survives(&graph);
        }
    }

    #[test]
    fn an_arbitrary_graph_is_read_safely(wire in any_wire()) {
        if let Some(graph) = decoded(&wire) {
            prop_assert_eq!(wire::encode(&graph).inputs, wire.inputs);
            survives(&graph);
        }
    }

    #[test]
    fn arbitrary_bytes_are_read_safely(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = read(&bytes);
        // The same as what a graph holds, so that more of it is looked at.
        for field in [2u8, 3, 4] {
            let mut framed = vec![field << 3 | 2];
            prost::encode_length_delimiter(bytes.len(), &mut framed).unwrap();
            framed.extend(&bytes);
            let _ = read(&framed);
        }
    }

    #[test]
    fn flipped_and_cut_bytes_are_read_safely(
        seed in choices(), nodes in 0..EVERY_OP + 4,
        flips in prop::collection::vec((any::<usize>(), 0..8u32), 0..6), len in prop::option::of(any::<usize>()),
    ) {
        let mut bytes = wire::encode(&graph(&seed, nodes)).encode_to_vec();
        for (at, bit) in flips {
            if !bytes.is_empty() {
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
            }
        }
        if let Some(len) = len {
            bytes.truncate(len % (bytes.len() + 1));
        }
        if let Some(graph) = read(&bytes) {
            survives(&graph);
        }
    }
}

/// A graph with every op: one layer of a model, the way a worker builds it.
fn layer() -> v1::Graph {
    let mut g = GraphBuilder::new(8);
    let per_row = |g: &mut GraphBuilder, name| g.tensor(name, spec(DType::I32, &[Dim::Rows]));
    let weight = |g: &mut GraphBuilder, dtype, n: usize| {
        g.constant("w", spec(dtype, &[n.into(), Dim::Fixed(64)]))
            .unwrap()
    };
    let tokens = per_row(&mut g, "tokens").unwrap();
    let positions = per_row(&mut g, "positions").unwrap();
    let table = weight(&mut g, DType::Q4_0, 100);
    let projection = weight(&mut g, DType::Q8_0, 64);
    let norm = g
        .constant("norm", spec(DType::F32, &[Dim::Fixed(64)]))
        .unwrap();
    let turns = g
        .constant("turns", spec(DType::F32, &[Dim::Fixed(16)]))
        .unwrap();
    let tables = g
        .tensor("tables", spec(DType::I32, &[Dim::Fixed(2), Dim::Fixed(4)]))
        .unwrap();
    let cache = CacheSpec {
        dtype: DType::F16,
        blocks: 8,
        block_len: 16,
        kv_heads: 2,
        head_dim: 32,
    };
    let cache = g.cache("cache", cache).unwrap();
    let x = g.get_rows(table, tokens).unwrap();
    let y = g.rms_norm(x, Some(norm), 1e-5).unwrap();
    let y = g.mul_mat(y, projection).unwrap();
    let y = g.reshape(y, Shape::rows(&[2, 32]).unwrap()).unwrap();
    let y = g.rope(y, positions, turns, false).unwrap();
    g.cache_write(cache, y, y, positions).unwrap();
    let y = g
        .paged_attention(y, cache, tables, positions, positions, 0.125, 0, 0.0)
        .unwrap();
    let y = g.reshape(y, Shape::rows(&[64]).unwrap()).unwrap();
    let gate = g.silu(y).unwrap();
    let y = g.swiglu(gate, y).unwrap();
    let y = g.mul(y, norm).unwrap();
    let y = g.add(x, y).unwrap();
    wire::encode(&g.finish(&[y]).unwrap())
}

/// The first node of this op.
fn of<'a>(wire: &'a mut v1::Graph, op: &str) -> &'a mut v1::Node {
    wire.nodes.iter_mut().find(|n| n.op == op).unwrap()
}

/// What decoding `layer()` says after this change.
#[track_caller]
fn refused(change: impl FnOnce(&mut v1::Graph)) -> String {
    let mut wire = layer();
    change(&mut wire);
    assert!(decoded(&wire).is_none());
    assert!(read(&wire.encode_to_vec()).is_none());
    wire::decode(&wire).unwrap_err().to_string()
}

fn cache_of(wire: &mut v1::Graph) -> &mut v1::CacheSpec {
    let specs = wire.inputs.iter_mut().filter_map(|i| i.spec.as_mut());
    let mut caches = specs.filter_map(|s| match s {
        graph_input::Spec::Cache(c) => Some(c),
        graph_input::Spec::Tensor(_) => None,
    });
    caches.next().unwrap()
}

/// A graph of one op on these inputs.
fn applied(op: &str, inputs: &[v1::GraphInput], attributes: &[v1::Attribute]) -> v1::Graph {
    let values: Vec<_> = (0..inputs.len() as u32).map(input).collect();
    v1::Graph {
        max_rows: 8,
        inputs: inputs.to_vec(),
        nodes: vec![node(op, &values, attributes)],
        outputs: vec![result(0, 0)],
    }
}

/// A chain of `silu`s, each of the one before.
fn chain(nodes: usize) -> v1::Graph {
    let links = (0..nodes as u32).map(|i| match i.checked_sub(1) {
        None => node("silu", &[input(0)], &[]),
        Some(before) => node("silu", &[result(before, 0)], &[]),
    });
    v1::Graph {
        max_rows: 0,
        inputs: vec![tensor("f32", &[fixed(4)])],
        nodes: links.collect(),
        outputs: vec![result(nodes as u32 - 1, 0)],
    }
}

#[test]
fn a_layer_with_every_op_survives_the_wire() {
    let wire = layer();
    for op in LAYER {
        assert!(wire.nodes.iter().any(|n| n.op == op), "{op}");
    }
    survives(&decoded(&wire).unwrap());
}

#[test]
fn every_row_survives_the_wire_and_whatever_it_is_applied_to() {
    let mut unfit = vec![];
    let mut random = 1u64;
    for row in op::catalogue().filter(|r| !LAYER.contains(&r.name)) {
        let mut fitted = 0;
        for _ in 0..3000 {
            let seed: Vec<u32> = (0..40)
                .map(|_| {
                    // Knuth's generator of 64 bits, the upper half.
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (random >> 33) as u32
                })
                .collect();
            let mut sketch = Sketch {
                choices: Choices(seed.iter()),
                builder: GraphBuilder::new(4),
                values: vec![],
                symbolic: true,
            };
            if sketch.guess(row) {
                fitted += 1;
                let graph = sketch.builder.finish(&[]).unwrap();
                sound(&graph);
                survives(&graph);
            }
            if fitted == 20 {
                break;
            }
        }
        if fitted == 0 {
            unfit.push(row.name);
        }
    }
    assert!(
        unfit.is_empty(),
        "nothing fitted {unfit:?}; they need hints"
    );
}

#[test]
fn a_tensor_split_into_many_holds_little() {
    let dims = [fixed(1); 7].into_iter().chain([fixed(0)]);
    let x = tensor("f32", &dims.collect::<Vec<_>>());
    let sizes = attribute::Value::Ints(v1::Ints {
        values: vec![0; limits::MAX_ATTRIBUTE_INTS],
    });
    let attributes = [
        attribute("sizes", sizes),
        attribute("axis", attribute::Value::Int(-1)),
    ];
    let mut wire = applied("split", &[x], &attributes);
    wire.nodes = vec![wire.nodes[0].clone(); 100];
    let graph = read(&wire.encode_to_vec()).unwrap();
    assert_eq!(graph.nodes()[99].outputs.len(), limits::MAX_ATTRIBUTE_INTS);
}

#[test]
fn attributes_come_in_any_order() {
    let mut wire = layer();
    of(&mut wire, "paged_attention").attributes.reverse();
    assert_eq!(wire::encode(&decoded(&wire).unwrap()), layer());
}

// Case 2 of the list of other people's holes.
#[test]
fn an_unknown_dtype_is_refused() {
    for wrong in WRONG_DTYPES {
        assert!(decoded(&applied("silu", &[tensor(wrong, &[fixed(256)])], &[])).is_none());
        let said = refused(|w| cache_of(w).dtype = wrong.to_owned());
        assert!(said.contains("unknown dtype"), "{said}");
    }
    for known in DType::ALL.iter().filter(|d| !CacheSpec::DTYPES.contains(d)) {
        let said = refused(|w| cache_of(w).dtype = known.name().to_owned());
        assert!(said.contains("cache"), "{said}");
    }
}

// Case 4.
#[test]
fn every_empty_message_is_refused_but_the_empty_graph() {
    let empty = decoded(&v1::Graph::default()).unwrap();
    assert!(empty.inputs().is_empty() && empty.nodes().is_empty() && empty.outputs().is_empty());
    refused(|w| w.inputs.push(v1::GraphInput::default()));
    refused(|w| w.nodes.push(v1::Node::default()));
    refused(|w| w.outputs.push(v1::ValueRef::default()));
    refused(|w| w.inputs[0].spec = Some(graph_input::Spec::Tensor(v1::TensorSpec::default())));
    refused(|w| *cache_of(w) = v1::CacheSpec::default());
    refused(|w| dims_of(&mut w.inputs[0]).unwrap()[0] = v1::Dim::default());
    refused(|w| dims_of(&mut w.inputs[0]).unwrap()[0] = rows(false));
    refused(|w| of(w, "add").inputs[1] = v1::ValueRef::default());
    refused(|w| of(w, "rms_norm").attributes[0] = v1::Attribute::default());
    refused(|w| of(w, "rope").attributes[0].value = None);
    // A shape without axes is a scalar's, and these are no scalars.
    refused(|w| of(w, "reshape").attributes[0].value = Some(shape(&[])));
}

#[test]
fn long_names_do_not_make_long_messages() {
    let long = "\u{1}".repeat(1 << 20);
    for (what, change) in [
        (
            "op",
            (|w, n| w.nodes[0].op = n) as fn(&mut v1::Graph, String),
        ),
        ("dtype", |w, n| cache_of(w).dtype = n),
        ("attribute", |w, n| of(w, "rope").attributes[0].name = n),
        ("input without spec", |w, n| {
            w.inputs[0].name = n;
            w.inputs[0].spec = None;
        }),
        ("input too large", |w, n| {
            w.inputs[0].name = n;
            w.max_rows = 1;
            w.inputs[0].spec = tensor("f32", &[rows(true), fixed(u64::MAX)]).spec;
        }),
        ("rows in a constant", |w, n| {
            w.inputs[0].name = n;
            w.inputs[0].constant = true;
        }),
        ("cache too large", |w, n| {
            cache_of(w).blocks = 1 << 50;
            w.inputs.iter_mut().for_each(|i| i.name.clone_from(&n));
        }),
        ("empty cache", |w, n| {
            cache_of(w).block_len = 0;
            w.inputs.iter_mut().for_each(|i| i.name.clone_from(&n));
        }),
        ("constant cache", |w, n| {
            for i in &mut w.inputs {
                i.name.clone_from(&n);
                i.constant = matches!(i.spec, Some(graph_input::Spec::Cache(_)));
            }
        }),
    ] {
        let said = refused(|w| change(w, long.clone()));
        assert!(said.len() < 400, "{what}: {} bytes", said.len());
    }
}

// Case 6.
#[test]
fn a_node_without_storage_or_inputs_is_refused() {
    for op in LAYER {
        let mut bare = layer();
        of(&mut bare, op).inputs.clear();
        assert!(decoded(&bare).is_none(), "{op} without inputs");
        let mut bare = layer();
        bare.inputs.iter_mut().for_each(|i| i.spec = None);
        assert!(decoded(&bare).is_none());
    }
    // An op without result has no storage to read.
    let write = layer()
        .nodes
        .iter()
        .position(|n| n.op == "cache_write")
        .unwrap() as u32;
    refused(|w| of(w, "silu").inputs[0] = result(write, 0));
    refused(|w| w.outputs.push(result(write, 0)));
}

// Case 7.
#[test]
fn blocks_have_a_length_and_are_whole() {
    let changes: [fn(&mut v1::CacheSpec); 4] = [
        |c| c.block_len = 0,
        |c| c.blocks = 0,
        |c| c.kv_heads = 0,
        |c| c.head_dim = 0,
    ];
    for change in changes {
        refused(|w| change(cache_of(w)));
        // Alone, too: no op looks at it.
        let mut wire = layer();
        change(cache_of(&mut wire));
        (wire.nodes, wire.outputs) = (vec![], vec![]);
        assert!(decoded(&wire).is_none());
    }
    for dims in [vec![], vec![rows(true)]] {
        let x = tensor("f8_e4m3", &dims);
        let to = [attribute("dtype", attribute::Value::Dtype("f32".into()))];
        assert!(decoded(&applied("cast", &[x], &to)).is_none(), "{dims:?}");
    }
    // Of a block of one number there is no part.
    for dtype in DType::ALL.iter().filter(|d| d.block_len() > 1) {
        let len = dtype.block_len() as u64;
        let part = [
            vec![fixed(len + 1)],
            vec![fixed(len), fixed(1)],
            vec![],
            vec![rows(true)],
        ];
        for dims in part {
            let indices = tensor("i32", &[fixed(1)]);
            let wire = applied("get_rows", &[tensor(dtype.name(), &dims), indices], &[]);
            assert!(decoded(&wire).is_none(), "{dtype} {dims:?}");
        }
        // A reshape cannot cut blocks either.
        let x = tensor(dtype.name(), &[fixed(2), fixed(len)]);
        let to = |dims: &[v1::Dim]| [attribute("shape", shape(dims))];
        assert!(
            decoded(&applied(
                "reshape",
                std::slice::from_ref(&x),
                &to(&[fixed(len), fixed(2)])
            ))
            .is_none()
        );
        assert!(decoded(&applied("reshape", &[x], &to(&[fixed(2 * len)]))).is_some());
    }
}

// Case 8.
#[test]
fn an_unknown_op_and_oversized_attributes_are_refused() {
    for op in [
        "",
        "custom",
        "map_custom1",
        "SILU",
        "silu ",
        "silu\0",
        "attention::rope",
    ] {
        let said = refused(|w| w.nodes[0].op = op.to_owned());
        assert!(said.contains("no op named"), "{said}");
    }
    let blob = attribute("params", attribute::Value::Dtype("\0".repeat(1 << 20)));
    refused(|w| of(w, "silu").attributes.push(blob.clone()));
    refused(|w| of(w, "rope").attributes = vec![blob; 2]);
    let many = vec![attribute("eps", attribute::Value::Float(1e-5)); 100_000];
    refused(|w| of(w, "rms_norm").attributes = many);
    let axes = vec![fixed(1); 1_000_000];
    refused(|w| of(w, "reshape").attributes[0].value = Some(shape(&axes)));
    refused(|w| of(w, "add").inputs = vec![input(0); 100_000]);
}

// Case 9.
#[test]
fn only_inputs_and_earlier_results_can_be_named() {
    let whole = layer();
    for at in 0..whole.nodes.len() {
        for wrong in wrong_values(&whole, at) {
            for place in 0..whole.nodes[at].inputs.len() {
                refused(|w| w.nodes[at].inputs[place] = wrong);
            }
        }
    }
    for wrong in wrong_values(&whole, whole.nodes.len()) {
        refused(|w| w.outputs.push(wrong));
    }
    let cache = whole.inputs.iter().position(|i| i.name == "cache").unwrap() as u32;
    refused(|w| w.outputs.push(input(cache)));
    refused(|w| of(w, "silu").inputs[0] = input(cache));
    refused(|w| of(w, "paged_attention").inputs[1] = result(0, 0));
    // The same twice is no harm: as operands and as outputs.
    let mut twice = applied("add", &[tensor("f32", &[fixed(2)])], &[]);
    twice.nodes[0].inputs.push(input(0));
    twice.outputs = vec![result(0, 0), result(0, 0), input(0)];
    survives(&decoded(&twice).unwrap());
}

// Case 11.
#[test]
fn shapes_are_computed_again() {
    let (f, i) = (
        tensor("f32", &[rows(true), fixed(64)]),
        tensor("i32", &[rows(true)]),
    );
    let of_shape = |dtype, dims: &[v1::Dim]| tensor(dtype, dims);
    let weight = of_shape("q4_0", &[fixed(10), fixed(64)]);
    let scalar = of_shape("i32", &[]);
    for (op, inputs) in [
        ("get_rows", vec![weight.clone(), f.clone()]),
        ("get_rows", vec![weight.clone(), scalar.clone()]),
        (
            "get_rows",
            vec![weight.clone(), of_shape("i64", &[rows(true)])],
        ),
        ("get_rows", vec![of_shape("f32", &[fixed(640)]), i.clone()]),
        (
            "get_rows",
            vec![of_shape("i32", &[fixed(10), fixed(64)]), i.clone()],
        ),
        (
            "mul_mat",
            vec![f.clone(), of_shape("q4_0", &[fixed(10), fixed(32)])],
        ),
        (
            "mul_mat",
            vec![f.clone(), of_shape("i64", &[fixed(10), fixed(64)])],
        ),
        (
            "mul_mat",
            vec![of_shape("i8", &[rows(true), fixed(64)]), weight.clone()],
        ),
        ("mul_mat", vec![f.clone(), f.clone()]),
        ("mul_mat", vec![weight.clone(), f.clone()]),
        (
            "add",
            vec![f.clone(), of_shape("f32", &[fixed(2), fixed(64)])],
        ),
        ("add", vec![f.clone(), of_shape("f32", &[fixed(65)])]),
        ("add", vec![f.clone(), weight.clone()]),
        ("swiglu", vec![f.clone(), of_shape("f32", &[fixed(64)])]),
        ("silu", vec![weight.clone()]),
    ] {
        assert!(
            decoded(&applied(op, &inputs, &[])).is_none(),
            "{op} {inputs:?}"
        );
    }
    // Whoever reads a result gets what the rule says, not what was meant.
    let mut wire = applied("get_rows", &[weight.clone(), i], &[]);
    wire.nodes
        .push(node("mul_mat", &[result(0, 0), input(0)], &[]));
    let graph = decoded(&wire).unwrap();
    let specs: Vec<_> = graph
        .nodes()
        .iter()
        .map(|n| n.outputs[0].to_string())
        .collect();
    assert_eq!(specs, ["f32[rows, 64]", "f32[rows, 10]"]);
    // After a reshape that the reader did not expect.
    refused(|w| {
        of(w, "reshape").attributes[0].value = Some(shape(&[rows(true), fixed(32), fixed(2)]))
    });
    refused(|w| {
        of(w, "reshape").attributes[0].value = Some(shape(&[fixed(8), fixed(2), fixed(32)]))
    });
    // Caches and their readers must agree.
    refused(|w| cache_of(w).kv_heads = 3);
    refused(|w| cache_of(w).head_dim = 31);
}

// Case 11, for the ops where one operand's size is how far another one is read or written.
#[test]
fn one_operand_that_does_not_fit_is_refused() {
    use attribute::Value::{Bool, Float, Int};
    let f = |dims: &[u64]| tensor("f32", &dims.iter().map(|&n| fixed(n)).collect::<Vec<_>>());
    let i = |dims: &[u64]| tensor("i32", &dims.iter().map(|&n| fixed(n)).collect::<Vec<_>>());
    let cache = |kv_heads, head_dim| v1::GraphInput {
        spec: Some(graph_input::Spec::Cache(v1::CacheSpec {
            dtype: "bf16".to_owned(),
            blocks: 4,
            block_len: 16,
            kv_heads,
            head_dim,
        })),
        ..v1::GraphInput::default()
    };
    let any = [
        tensor("f64", &[fixed(3)]),
        i(&[3]),
        f(&[3]),
        f(&[]),
        i(&[3, 1, 1]),
        tensor("i32", &[rows(true)]),
    ];
    let eps = attribute("eps", Float(1e-5));
    let turned = attribute("interleaved", Bool(true));
    let read = [
        attribute("scale", Float(1.0)),
        attribute("window", Int(0)),
        attribute("soft_cap", Float(0.0)),
    ];
    for (op, attributes, good, wrong) in [
        (
            "rms_norm",
            vec![eps],
            vec![f(&[5, 8]), f(&[8])],
            vec![
                (0, f(&[])),
                (0, f(&[8, 5])),
                (0, f(&[5, 0])),
                (1, f(&[7])),
                (1, f(&[9])),
                (1, f(&[8, 1])),
            ],
        ),
        (
            "rope",
            vec![turned],
            vec![f(&[5, 4, 8]), i(&[5]), f(&[4])],
            vec![
                (0, f(&[5, 4, 7])),
                (0, f(&[5, 4, 9])),
                (0, f(&[6, 4, 8])),
                (0, f(&[5, 32])),
                (0, f(&[5, 0, 8])),
                (1, i(&[4])),
                (1, i(&[6])),
                (1, f(&[5])),
                (2, f(&[8])),
                (2, f(&[3])),
            ],
        ),
        (
            "cache_write",
            vec![],
            vec![cache(2, 8), f(&[5, 2, 8]), f(&[5, 2, 8]), i(&[5])],
            vec![
                (0, cache(1, 8)),
                (0, cache(3, 8)),
                (0, cache(8, 2)),
                (0, f(&[4, 2, 16, 8])),
                (1, f(&[6, 2, 8])),
                (1, f(&[5, 1, 8])),
                (2, f(&[4, 2, 8])),
                (2, f(&[5, 2, 7])),
                (2, f(&[5, 2, 8, 1])),
                (3, i(&[4])),
                (3, i(&[6])),
                (3, tensor("i64", &[fixed(5)])),
            ],
        ),
        (
            "paged_attention",
            read.to_vec(),
            vec![f(&[5, 4, 8]), cache(2, 8), i(&[3, 6]), i(&[5]), i(&[5])],
            vec![
                (0, f(&[6, 4, 8])),
                (0, f(&[5, 3, 8])),
                (0, f(&[5, 1, 8])),
                (0, f(&[5, 4, 4])),
                (1, cache(3, 8)),
                (1, cache(8, 8)),
                (1, cache(2, 4)),
                (1, cache(2, 16)),
                (2, i(&[18])),
                (2, f(&[3, 6])),
                (2, tensor("i32", &[rows(true), fixed(6)])),
                (3, i(&[4])),
                (3, i(&[6])),
                (4, i(&[4])),
                (4, i(&[6])),
                (4, f(&[5])),
            ],
        ),
    ] {
        let outputs = usize::from(op != "cache_write");
        let whole = |inputs: &[v1::GraphInput]| {
            let mut wire = applied(op, inputs, &attributes);
            wire.outputs.truncate(outputs);
            decoded(&wire)
        };
        survives(&whole(&good).unwrap());
        let anywhere =
            (0..good.len()).flat_map(|place| any.iter().map(move |x| (place, x.clone())));
        for (place, operand) in wrong.into_iter().chain(anywhere) {
            let mut inputs = good.clone();
            inputs[place] = operand;
            assert!(
                whole(&inputs).is_none(),
                "{op}: {:?} at {place}",
                inputs[place]
            );
        }
    }
}

// Case 12.
#[test]
fn an_attribute_cannot_drive_a_size() {
    use attribute::Value::{Float, Int};
    for wrong in [-1, i64::MIN, i64::from(i32::MAX) + 1, i64::MAX] {
        let said = refused(|w| of(w, "paged_attention").attributes[1].value = Some(Int(wrong)));
        assert!(said.contains("window"), "{said}");
    }
    for wrong in [
        f64::NAN,
        -f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -1e-300,
        1e3 + 1e-9,
        f64::MAX,
    ] {
        refused(|w| of(w, "paged_attention").attributes[0].value = Some(Float(wrong)));
        if !(0.0..=1e6).contains(&wrong) {
            refused(|w| of(w, "paged_attention").attributes[2].value = Some(Float(wrong)));
        }
        refused(|w| of(w, "rms_norm").attributes[0].value = Some(Float(wrong)));
    }
    for dims in [
        vec![fixed(u64::MAX)],
        vec![fixed(u64::MAX), fixed(2)],
        vec![fixed(1 << 32), fixed(1 << 32)],
        vec![rows(true), fixed(65)],
        vec![rows(true), fixed(1 << 40)],
        vec![rows(true), fixed(0), fixed(1 << 62)],
        vec![rows(true), fixed(0)],
        vec![fixed(0)],
        vec![fixed(1); 9],
        vec![fixed(64), rows(true)],
    ] {
        refused(|w| of(w, "reshape").attributes[0].value = Some(shape(&dims)));
    }
    for wrong in [
        Int(1),
        Float(1.0),
        shape(&[]),
        attribute::Value::Dtype("f32".to_owned()),
    ] {
        refused(|w| of(w, "rope").attributes[0].value = Some(wrong));
    }
}

// Case 13: there are no strides to send, and an axis of 0 or 1 cannot hide the size of another.
#[test]
fn an_axis_of_nothing_does_not_excuse_the_others() {
    let much = limits::MAX_ELEMENTS;
    for dims in [
        vec![fixed(0), fixed(u64::MAX)],
        vec![fixed(u64::MAX), fixed(0)],
        vec![fixed(0), fixed(1 << 32), fixed(1 << 32)],
        vec![fixed(much), fixed(1), fixed(2)],
        vec![rows(true), fixed(0), fixed(much + 1)],
    ] {
        assert!(
            decoded(&applied("silu", &[tensor("f32", &dims)], &[])).is_none(),
            "{dims:?}"
        );
    }
    assert!(
        decoded(&applied(
            "silu",
            &[tensor("f32", &[fixed(0), fixed(much)])],
            &[]
        ))
        .is_some()
    );
    // Nothing times nothing can be much.
    let (m, n) = (fixed(1 << 21), fixed(1 << 21));
    let [x, w] = [tensor("f32", &[m, fixed(0)]), tensor("f32", &[n, fixed(0)])];
    assert!(decoded(&applied("mul_mat", &[x, w], &[])).is_none());
    let (row, column) = (
        tensor("f32", &[fixed(1 << 21)]),
        tensor("f32", &[fixed(1 << 21), fixed(1)]),
    );
    assert!(decoded(&applied("add", &[row, column], &[])).is_none());
}

#[test]
fn as_many_rows_as_allowed_count_towards_the_size() {
    let half = limits::MAX_ELEMENTS / 2;
    let mut wire = applied("silu", &[tensor("f32", &[rows(true), fixed(2)])], &[]);
    wire.max_rows = half;
    assert!(decoded(&wire).is_some());
    wire.max_rows = half + 1;
    assert!(decoded(&wire).is_none());
    for max_rows in [0, limits::MAX_ELEMENTS + 1, u64::MAX] {
        wire.max_rows = max_rows;
        assert!(decoded(&wire).is_none());
    }
    // A result can have more than its operands.
    let [x, w] = [
        tensor("f32", &[rows(true), fixed(1)]),
        tensor("f32", &[fixed(3), fixed(1)]),
    ];
    let mut wire = applied("mul_mat", &[x, w], &[]);
    wire.max_rows = half;
    assert!(decoded(&wire).is_none());
}

#[test]
fn caches_that_overflow_or_never_change_are_refused() {
    let changes: [fn(&mut v1::CacheSpec, u64); 4] = [
        |c, n| c.blocks = n,
        |c, n| c.block_len = n,
        |c, n| c.kv_heads = n,
        |c, n| c.head_dim = n,
    ];
    for change in changes {
        for size in [u64::MAX, 1 << 63, 1 << 62, limits::MAX_ELEMENTS + 1] {
            let mut wire = layer();
            change(cache_of(&mut wire), size);
            (wire.nodes, wire.outputs) = (vec![], vec![]);
            assert!(decoded(&wire).is_none());
        }
    }
    let said = refused(|w| {
        let cache = w.inputs.iter_mut().find(|i| i.name == "cache").unwrap();
        cache.constant = true;
    });
    assert!(said.contains("cache"), "{said}");
}

// Case 14.
#[test]
fn a_chain_of_a_million_nodes_meets_the_limit() {
    let most = limits::MAX_GRAPH_NODES;
    assert_eq!(decoded(&chain(most)).unwrap().nodes().len(), most);
    for nodes in [most + 1, 100_000, 1_000_000] {
        let wire = chain(nodes);
        let (refused, held) = peak(|| wire::decode(&wire).unwrap_err());
        assert!(matches!(refused, GraphError::Limit(_)), "{refused}");
        assert!(held < 32 << 20, "{held} bytes for a graph that is refused");
    }
}

#[test]
fn more_inputs_or_outputs_than_allowed_meet_the_limit() {
    let mut wire = chain(1);
    wire.inputs = vec![wire.inputs[0].clone(); limits::MAX_GRAPH_INPUTS + 1];
    assert!(matches!(wire::decode(&wire), Err(GraphError::Limit(_))));
    wire.inputs.pop();
    assert!(decoded(&wire).is_some());
    wire.outputs = vec![wire.outputs[0]; limits::MAX_GRAPH_NODES + 1];
    assert!(matches!(wire::decode(&wire), Err(GraphError::Limit(_))));
    wire.outputs.pop();
    assert!(decoded(&wire).is_some());
}

#[test]
fn a_cycle_cannot_be_written() {
    // Of a ring of any length, some node names itself or a later one.
    for length in [1, 2, 3, 1000] {
        for start in [0, length / 2, length - 1] {
            let mut ring = chain(length);
            ring.nodes[0].inputs[0] = result(length as u32 - 1, 0);
            ring.nodes.rotate_left(start);
            for n in &mut ring.nodes {
                if let Some(value_ref::Kind::Node(n)) = &mut n.inputs[0].kind {
                    n.node = (n.node + (length - start) as u32) % length as u32;
                }
            }
            let refused = wire::decode(&ring).unwrap_err();
            assert!(matches!(refused, GraphError::UnknownValue(_)), "{refused}");
        }
    }
}

#[test]
fn bytes_that_stand_for_much_hold_little() {
    let part = 16 << 10;
    let repeated = |unit: &[u8]| unit.repeat(part / unit.len());
    let framed = |field: u8, inner: &[u8]| {
        let mut bytes = vec![field << 3 | 2];
        prost::encode_length_delimiter(inner.len(), &mut bytes).unwrap();
        bytes.extend(inner);
        bytes
    };
    // One more than a power of two, where a vector has just moved into twice the room.
    for inputs in [4097, 65_537] {
        let empty_inputs = [2 << 3 | 2, 0].repeat(inputs);
        assert!(read(&empty_inputs).is_none());
        assert!(read(&framed(3, &[3 << 3 | 2, 0].repeat(inputs))).is_none());
    }
    // Empty nodes, nodes of one empty attribute, of one empty value, empty outputs.
    for unit in [&[26, 0][..], &[26, 2, 26, 0], &[26, 2, 18, 0], &[34, 0]] {
        assert!(read(&repeated(unit)).is_none());
    }
    // One node of empty values, or of empty attributes; one tensor of empty axes.
    assert!(read(&framed(3, &repeated(&[18, 0]))).is_none());
    assert!(read(&framed(3, &repeated(&[26, 0]))).is_none());
    assert!(read(&framed(2, &framed(2, &repeated(&[18, 0])))).is_none());
    // A length that nothing follows, and 16 EiB.
    assert!(read(&[18, 0xff, 0xff, 0xff, 0xff, 0x0f]).is_none());
    assert!(read(&[26, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).is_none());
    // Groups in groups, which no field of a graph is.
    assert!(read(&[0x7b].repeat(1_000_000)).is_none());
}
