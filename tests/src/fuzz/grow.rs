//! Valid graphs, grown row by row from the catalogue.

use hotcell_graph::{
    DType, Dim, Graph, GraphBuilder, Shape, TensorSpec, Value,
    op::{self, Attribute, AttributeKind, InputMode, OpRow, ValueSpec},
};

use super::{
    choices::Choices,
    templates::{Template, template},
};

/// Times a row is tried before another one is.
const TRIES: usize = 6;
const DTYPES: [DType; 9] = [
    DType::F32,
    DType::F32,
    DType::I32,
    DType::Bool,
    DType::BF16,
    DType::F16,
    DType::U8,
    DType::I64,
    DType::C64,
];

/// A valid graph of some nodes.
pub fn graph(choices: &mut Choices) -> Graph {
    let max_rows = choices.pick(&[0, 0, 8, 1, 200]);
    let nodes = choices.pick(&[1, 1, 2, 3, 5, 9, 40]);
    let mut growing = Growing {
        choices,
        builder: GraphBuilder::new(max_rows),
        values: vec![],
        symbolic: max_rows > 0,
    };
    let rows: Vec<&'static OpRow> = op::catalogue().collect();
    for _ in 0..nodes {
        let row = growing.choices.pick(&rows);
        growing.apply(row);
    }
    let Growing {
        choices,
        builder,
        values,
        ..
    } = growing;
    let mut outputs: Vec<Value> = values.iter().rev().take(1).map(|(v, _)| *v).collect();
    for _ in 0..choices.below(3) {
        if !values.is_empty() {
            outputs.push(choices.pick(&values).0);
        }
    }
    match builder.finish(&outputs) {
        Ok(graph) => graph,
        Err(error) => panic!("a graph cannot return its own tensors: {error}"),
    }
}

struct Growing<'a> {
    choices: &'a mut Choices,
    builder: GraphBuilder,
    /// Tensors so far.
    values: Vec<(Value, TensorSpec)>,
    symbolic: bool,
}

impl Growing<'_> {
    /// Applies a row to operands that it takes, if they are found soon.
    fn apply(&mut self, row: &'static OpRow) {
        for _ in 0..TRIES {
            let call = match template(row.name, self.symbolic, self.choices) {
                Some(call) => call,
                None => self.guess(row),
            };
            if row.check(&call.inputs, &call.attributes).is_err() {
                continue;
            }
            let inputs: Option<Vec<Value>> =
                call.inputs.into_iter().map(|s| self.operand(s)).collect();
            if let Some(inputs) = inputs
                && let Ok(results) = self.builder.apply(row, inputs, call.attributes)
            {
                for value in results {
                    if let Ok(ValueSpec::Tensor(spec)) = self.builder.spec(value) {
                        self.values.push((value, spec));
                    }
                }
                return;
            }
        }
    }

    /// An earlier tensor of this spec, or a new input.
    fn operand(&mut self, spec: ValueSpec) -> Option<Value> {
        let spec = match spec {
            ValueSpec::Tensor(spec) => spec,
            ValueSpec::Cache(spec) => return self.builder.cache("cache", spec).ok(),
            ValueSpec::Absent => return Some(Value::Absent),
        };
        let known: Vec<Value> = self
            .values
            .iter()
            .filter(|(_, s)| *s == spec)
            .map(|(v, _)| *v)
            .collect();
        if !known.is_empty() && !self.choices.once_in(4) {
            return Some(self.choices.pick(&known));
        }
        let constant = !spec.shape.is_symbolic() && self.choices.once_in(3);
        let made = match constant {
            true => self.builder.constant("w", spec.clone()),
            false => self.builder.tensor("x", spec.clone()),
        };
        let value = made.ok()?;
        self.values.push((value, spec));
        Some(value)
    }

    /// Operands and attributes that may suit a row.
    fn guess(&mut self, row: &'static OpRow) -> Template {
        let mut inputs: Vec<ValueSpec> = Vec::new();
        let mut first: Option<TensorSpec> = None;
        for input in row.inputs {
            let times = match input.mode {
                InputMode::One => 1,
                InputMode::Optional => self.choices.below(2),
                InputMode::Many => 1 + self.choices.below(4),
            };
            if times == 0 {
                inputs.push(ValueSpec::Absent);
            }
            for _ in 0..times {
                let spec = match &first {
                    Some(first) => self.like(first),
                    None => self.any(),
                };
                first.get_or_insert(spec.clone());
                inputs.push(ValueSpec::Tensor(spec));
            }
        }
        if row.name == "where" {
            // Its first input alone is bool.
            if let [ValueSpec::Tensor(condition), ..] = inputs.as_mut_slice() {
                condition.dtype = DType::Bool;
            }
        }
        let rank = first.map_or(1, |t| t.shape.rank());
        let attributes = row
            .attributes
            .iter()
            .map(|a| self.attribute(a.name, a.kind, rank))
            .collect();
        Template { inputs, attributes }
    }

    /// An earlier tensor's spec, or a small one.
    fn any(&mut self) -> TensorSpec {
        if !self.values.is_empty() && !self.choices.once_in(3) {
            return self.choices.pick(&self.values).1;
        }
        let rank = self.choices.pick(&[2, 1, 3, 0, 4, 8]);
        let mut dims: Vec<Dim> = (0..rank)
            .map(|_| self.choices.pick(&[2, 3, 1, 4, 16, 0]).into())
            .collect();
        if let (Some(first), true) = (dims.first_mut(), self.symbolic && self.choices.once_in(2)) {
            *first = Dim::Rows;
        }
        // Sometimes long enough for several threads and tiles.
        if self.choices.once_in(8)
            && let Some(last @ Dim::Fixed(_)) = dims.last_mut()
        {
            *last = Dim::Fixed(3001);
        }
        let dtype = match self.choices.once_in(6) {
            true => self.choices.pick(DType::ALL),
            false => self.choices.pick(&DTYPES),
        };
        let spec = |dtype, dims: Vec<Dim>| {
            Shape::new(dims).and_then(|shape| TensorSpec::new(dtype, shape))
        };
        let fallback = || TensorSpec {
            dtype: DType::F32,
            shape: Shape::default(),
        };
        spec(dtype, dims)
            .or_else(|_| spec(dtype, vec![(2 * dtype.block_len()).into()]))
            .unwrap_or_else(|_| fallback())
    }

    /// A spec that goes with another one: equal, or one that broadcasts to it.
    fn like(&mut self, first: &TensorSpec) -> TensorSpec {
        let mut dims = first.shape.dims().to_vec();
        if self.choices.once_in(3) {
            let cut = self.choices.below(dims.len() + 1);
            dims.drain(..cut);
            for d in &mut dims {
                if self.choices.once_in(3) {
                    *d = Dim::Fixed(1);
                }
            }
        }
        let dtype = match self.choices.once_in(5) {
            true => self.choices.pick(&DTYPES),
            false => first.dtype,
        };
        let made = Shape::new(dims).and_then(|shape| TensorSpec::new(dtype, shape));
        made.unwrap_or_else(|_| first.clone())
    }

    fn attribute(&mut self, name: &str, kind: AttributeKind, rank: usize) -> Attribute {
        let choices = &mut *self.choices;
        match kind {
            AttributeKind::Int(lo, hi) => {
                let near = choices.pick(&[0, 0, 1, -1, 2, 3]);
                Attribute::Int(near.clamp(lo, hi))
            }
            AttributeKind::Float(lo, hi) => Attribute::Float(
                choices
                    .pick(&[0.0, 1.0, 0.5, 1e-5, -1.0, lo, hi])
                    .clamp(lo, hi),
            ),
            AttributeKind::Bool => Attribute::Bool(choices.once_in(2)),
            AttributeKind::DType => Attribute::DType(choices.pick(&DTYPES)),
            AttributeKind::Name(names) => Attribute::Name(choices.pick(names).to_owned()),
            AttributeKind::Bytes(most) => {
                Attribute::Bytes(vec![0; choices.below(most.min(16) + 1)])
            }
            AttributeKind::Shape => Attribute::Shape(self.any().shape),
            AttributeKind::Ints(lo, hi) => {
                let values = match name {
                    "axes" => axes(rank, choices),
                    _ => (0..rank)
                        .map(|_| choices.pick(&[1, 0, 2, 3]).clamp(lo, hi))
                        .collect(),
                };
                Attribute::Ints(values)
            }
        }
    }
}

/// Axes of a tensor, each once: some, or all in another order.
fn axes(rank: usize, choices: &mut Choices) -> Vec<i64> {
    let mut all: Vec<i64> = (0..rank as i64).collect();
    for i in (1..all.len()).rev() {
        all.swap(i, choices.below(i + 1));
    }
    if choices.once_in(2) {
        all.truncate(choices.below(rank + 1));
    }
    all.iter()
        .map(|&a| {
            if choices.once_in(3) {
                a - rank as i64
            } else {
                a
            }
        })
        .collect()
}
