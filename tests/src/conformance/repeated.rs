//! Golden cases made large: where a row treats what lies along the outermost axis apart, as rows of a batch, inputs that are
//! repeated along it give results that are repeated.

use hotcell_graph::{
    Graph, GraphBuilder, Shape, TensorSpec, Value,
    op::{Attribute, ValueSpec, find},
};

use super::{Case, CaseInput, Reference, attributes};

/// What says that a case leaves the outermost axis alone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unless {
    /// Nothing: the op always does.
    Never,
    /// `axis` is it.
    Axis,
    /// It is one of `axes`, or they are all.
    Axes,
}

/// Rows, the inputs to repeat, and when that is not possible.
const REPEATED: &[(&[&str], &[usize], Unless)] = &[
    (
        &[
            "rms_norm",
            "layer_norm",
            "l2_norm",
            "group_norm",
            "conv",
            "pool",
            "matmul",
            "mul_mat",
            "rotary_embedding",
            "im2col",
            "col2im",
            "conv_transpose",
            "interpolate",
            "ssm_conv",
            "cholesky",
            "qr",
            "lu",
            "det",
            "svd",
            "eigh",
            "eig",
            "all_gather",
        ],
        &[0],
        Unless::Never,
    ),
    (&["get_rows", "gather_nd", "addmm"], &[1], Unless::Never),
    (&["gated_delta"], &[0, 1, 2, 3, 4, 5], Unless::Never),
    (&["mamba2_scan"], &[0, 1, 3, 4, 6], Unless::Never),
    (&["solve", "solve_triangular"], &[0, 1], Unless::Never),
    (&["draw"], &[0, 1, 2, 3], Unless::Never),
    (&["scaled_dot_product_attention"], &[0, 1, 2], Unless::Never),
    (&["rope"], &[0, 1], Unless::Never),
    (&["mul_mat_id", "mul_mat_id_scaled"], &[1, 2], Unless::Never),
    (&["mul_mat_scaled"], &[0], Unless::Never),
    (&["add_id"], &[0, 2], Unless::Never),
    (
        &[
            "softmax",
            "log_softmax",
            "argmax",
            "argmin",
            "cumsum",
            "cumprod",
            "cummax",
            "cummin",
            "logcumsumexp",
            "fft",
            "roll",
            "sort",
            "argsort",
            "topk",
            "split",
            "repeat",
            "take",
        ],
        &[0],
        Unless::Axis,
    ),
    (&["concat", "take_along_axis"], &[0, 1], Unless::Axis),
    (&["scatter_along_axis"], &[0, 1, 2], Unless::Axis),
    (
        &[
            "reduce_sum",
            "reduce_prod",
            "reduce_max",
            "reduce_min",
            "reduce_all",
            "reduce_any",
            "mean",
            "variance",
            "standard_deviation",
            "logsumexp",
            "flip",
        ],
        &[0],
        Unless::Axes,
    ),
];

/// A case whose rows are there many times.
pub struct Repeated {
    /// The graph.
    pub graph: Graph,
    /// Bytes of its inputs.
    pub inputs: Vec<Vec<u8>>,
    /// How often the case's results are in these.
    pub times: usize,
}

impl Case {
    /// The case with so many elements at least in one of its tensors, if it is one of a row that can be repeated.
    pub fn repeated(&self, least: usize) -> Option<Repeated> {
        let sizes = self.inputs.iter().filter_map(|input| match input {
            CaseInput::Tensor(spec, _) => spec.shape.elements(0),
            CaseInput::Cache { .. } => None,
        });
        let outputs = self.outputs.iter().filter_map(|o| o.0.shape.elements(0));
        let greatest = sizes.chain(outputs).max().unwrap_or(0);
        self.repeat(least.div_ceil(greatest.max(1)).max(2))
    }

    /// The case so many times, if it is one of a row that can be repeated; 0: of nothing, which gives nothing.
    pub fn repeat(&self, times: usize) -> Option<Repeated> {
        let row = find(&self.op)?;
        let of_row = REPEATED.iter().find(|(rows, ..)| rows.contains(&row.name));
        let (_, which, unless) = of_row?;
        let ([node], None, None) = (&self.nodes[..], self.rows, self.fails) else {
            return None;
        };
        if node.op != row.name {
            return None;
        }
        let attributes = attributes(row, &node.attributes, &self.data).ok()?;
        let dims = |spec: &TensorSpec| -> Vec<usize> {
            spec.shape.dims().iter().map(|d| d.at(0)).collect()
        };
        let tensor = |reference: &Reference| match reference {
            Reference::Input(i) => match self.inputs.get(*i)? {
                CaseInput::Tensor(spec, range) => Some((spec, self.bytes(range))),
                CaseInput::Cache { .. } => None,
            },
            _ => None,
        };
        let first = which.first().and_then(|i| tensor(node.inputs.get(*i)?));
        let rank = first?.0.shape.rank() as i64;
        // A single axis is no batch, but for those that take rows by number.
        let is_outermost = |axis: i64| axis == 0 || axis == -rank;
        let mut axes = row.attributes.iter().zip(&attributes);
        let apart = axes.all(|(spec, value)| match (unless, spec.name, value) {
            (Unless::Axis, "axis", Attribute::Int(axis)) => !is_outermost(*axis),
            (Unless::Axes, "axes", Attribute::Ints(axes)) => {
                !axes.is_empty() && !axes.iter().any(|&a| is_outermost(a))
            }
            (Unless::Never, "batch_dims", Attribute::Int(batch)) => *batch == 0,
            _ => true,
        });
        // A vector times a matrix has no rows, and a single row of logits is not one of several.
        let vector = ["matmul", "mul_mat", "addmm", "rotary_embedding", "draw"].contains(&row.name);
        let shared = row.name == "mul_mat" && rank > 2;
        if !apart || vector && rank < 2 || shared {
            return None;
        }

        let mut builder = GraphBuilder::new(0);
        let (mut values, mut inputs) = (Vec::new(), Vec::new());
        for (i, reference) in node.inputs.iter().enumerate() {
            if matches!(reference, Reference::Absent) {
                values.push(Value::Absent);
                continue;
            }
            let (spec, bytes) = tensor(reference)?;
            let mut dims = dims(spec);
            let many = which.contains(&i);
            if many {
                *dims.first_mut()? *= times;
            }
            let spec = TensorSpec::new(spec.dtype, Shape::fixed(&dims).ok()?).ok()?;
            let name = format!("input {i}");
            values.push(match spec.dtype.is_block() {
                true => builder.constant(name, spec).ok()?,
                false => builder.tensor(name, spec).ok()?,
            });
            inputs.push(bytes.repeat(if many { times } else { 1 }));
        }
        let made = builder.apply(row, values, attributes).ok()?;
        // The golden results have to be there one after the other.
        for (value, (spec, _)) in made.iter().zip(&self.outputs) {
            let mut expected = dims(spec);
            *expected.first_mut()? *= times;
            match builder.spec(*value).ok()? {
                ValueSpec::Tensor(got) if dims(&got) == expected => {}
                _ => return None,
            }
        }
        Some(Repeated {
            graph: builder.finish(&made).ok()?,
            inputs,
            times,
        })
    }

    /// Dtypes of its inputs and results.
    pub fn dtypes(&self) -> String {
        let inputs = self.inputs.iter().map(|input| match input {
            CaseInput::Tensor(spec, _) => spec.dtype.name(),
            CaseInput::Cache { spec, .. } => spec.dtype.name(),
        });
        let outputs = self.outputs.iter().map(|(spec, _)| spec.dtype.name());
        inputs
            .chain(["→"])
            .chain(outputs)
            .collect::<Vec<_>>()
            .join(" ")
    }
}
