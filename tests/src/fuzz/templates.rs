//! Operands for rows whose own go together in ways that nobody guesses.

use hotcell_graph::{
    CacheSpec, DType, Dim, Shape, TensorSpec,
    op::{Attribute, ValueSpec},
};

mod placed;

use super::choices::Choices;

/// Inputs and attributes that mostly fit a row.
pub struct Template {
    pub inputs: Vec<ValueSpec>,
    pub attributes: Vec<Attribute>,
}

const SIZES: [usize; 7] = [1, 2, 3, 4, 8, 17, 0];
const FLOATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];
const INDICES: [DType; 4] = [DType::I32, DType::U32, DType::I64, DType::U8];
const WEIGHTS: [DType; 14] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q8_0,
    DType::Q5_1,
    DType::Q4K,
    DType::Q6K,
    DType::MXFP4,
    DType::NVFP4,
    DType::Q3K,
    DType::IQ4NL,
    DType::IQ1M,
    DType::F8E4M3,
];

fn tensor(dtype: DType, dims: &[Dim]) -> ValueSpec {
    let made = Shape::new(dims.iter().copied()).and_then(|s| TensorSpec::new(dtype, s));
    made.map_or(ValueSpec::Absent, ValueSpec::Tensor)
}

fn fixed(dtype: DType, dims: &[usize]) -> ValueSpec {
    tensor(
        dtype,
        &dims.iter().map(|&n| Dim::Fixed(n)).collect::<Vec<_>>(),
    )
}

fn shape(dims: &[usize]) -> Attribute {
    Attribute::Shape(Shape::fixed(dims).unwrap_or_default())
}

fn int(v: usize) -> Attribute {
    Attribute::Int(v as i64)
}

fn ints(values: &[usize]) -> Attribute {
    Attribute::Ints(values.iter().map(|&v| v as i64).collect())
}

fn name(v: &str) -> Attribute {
    Attribute::Name(v.to_owned())
}

fn float(v: f64) -> Attribute {
    Attribute::Float(v)
}

/// Everything a template is made of.
struct Maker<'a> {
    choices: &'a mut Choices,
    /// The graph has rows.
    symbolic: bool,
}

impl Maker<'_> {
    fn size(&mut self) -> usize {
        self.choices.pick(&SIZES)
    }

    fn some(&mut self) -> usize {
        self.size().max(1)
    }

    fn rows(&mut self) -> Dim {
        match self.symbolic && self.choices.once_in(2) {
            true => Dim::Rows,
            false => Dim::Fixed(self.size()),
        }
    }

    fn sizes(&mut self, rank: usize) -> Vec<usize> {
        (0..rank).map(|_| self.size()).collect()
    }

    fn any_float(&mut self) -> DType {
        self.choices.pick(&FLOATS)
    }

    fn index(&mut self) -> DType {
        self.choices.pick(&INDICES)
    }

    fn yes(&mut self) -> Attribute {
        Attribute::Bool(self.choices.once_in(2))
    }

    fn optional(&mut self, spec: ValueSpec) -> ValueSpec {
        match self.choices.once_in(2) {
            true => ValueSpec::Absent,
            false => spec,
        }
    }

    fn layout(&mut self) -> &'static str {
        self.choices.pick(&["channels_first", "channels_last"])
    }

    fn reduce(&mut self) -> Attribute {
        name(self.choices.pick(&["set", "add", "mul", "max", "min"]))
    }

    /// Strides, padding before and after, dilations.
    fn window(&mut self, axes: usize) -> Vec<Attribute> {
        let [strides, low, high, dilations] =
            [[1, 1, 2], [0, 1, 2], [0, 1, 3], [1, 1, 2]].map(|from| {
                (0..axes)
                    .map(|_| self.choices.pick(&from))
                    .collect::<Vec<_>>()
            });
        vec![ints(&strides), ints(&low), ints(&high), ints(&dilations)]
    }

    fn weight(&mut self) -> (DType, usize) {
        let dtype = self.choices.pick(&WEIGHTS);
        (dtype, dtype.block_len() * self.choices.pick(&[1, 1, 2, 3]))
    }

    fn matrices(&mut self) -> (Vec<ValueSpec>, Vec<usize>) {
        let (m, k, n, batch) = (self.size(), self.size(), self.size(), self.size());
        let dtype = self.any_float();
        match self.choices.below(3) {
            0 => (
                vec![fixed(dtype, &[m, k]), fixed(dtype, &[k, n])],
                vec![m, n],
            ),
            1 => (
                vec![fixed(dtype, &[batch, m, k]), fixed(dtype, &[k, n])],
                vec![batch, m, n],
            ),
            _ => (
                vec![fixed(dtype, &[batch, m, k]), fixed(dtype, &[batch, k, n])],
                vec![batch, m, n],
            ),
        }
    }

    fn conv(&mut self) -> Template {
        let axes = 1 + self.choices.below(3);
        let groups = self.choices.pick(&[1, 1, 2, 3]);
        let (n, c, o) = (
            self.size(),
            self.choices.pick(&[1, 2]),
            groups * self.choices.pick(&[1, 2]),
        );
        let space: Vec<usize> = (0..axes)
            .map(|_| self.choices.pick(&[5, 3, 8, 1, 0]))
            .collect();
        let kernel: Vec<usize> = (0..axes)
            .map(|_| self.choices.pick(&[3, 1, 2, 0]))
            .collect();
        let (layout, dtype) = (self.layout(), self.any_float());
        let arranged = |first: usize, channels: usize, space: &[usize]| match layout {
            "channels_first" => [&[first, channels], space].concat(),
            _ => [&[first], space, &[channels]].concat(),
        };
        let bias = fixed(dtype, &[o]);
        let inputs = vec![
            fixed(dtype, &arranged(n, c * groups, &space)),
            fixed(dtype, &arranged(o, c, &kernel)),
            self.optional(bias),
        ];
        let mut attributes = self.window(axes);
        attributes.extend([int(groups), name(layout)]);
        Template { inputs, attributes }
    }

    fn pool(&mut self) -> Template {
        let axes = 1 + self.choices.below(3);
        let dtype = self.choices.pick(&[DType::F32, DType::BF16, DType::I32]);
        let kind = match dtype {
            DType::I32 => "max",
            _ => self.choices.pick(&["max", "average", "average_valid"]),
        };
        let mut dims = self.sizes(2);
        dims.extend((0..axes).map(|_| self.choices.pick(&[5, 3, 8, 1])));
        let window: Vec<usize> = (0..axes).map(|_| self.choices.pick(&[2, 1, 3])).collect();
        let mut attributes = vec![name(kind), ints(&window)];
        attributes.extend(self.window(axes));
        attributes.push(name(self.layout()));
        Template {
            inputs: vec![fixed(dtype, &dims)],
            attributes,
        }
    }

    fn attention(&mut self) -> Template {
        let dtype = self.any_float();
        let (b, kv, t, s) = (
            self.some(),
            self.choices.pick(&[1, 2]),
            self.size(),
            self.size(),
        );
        let (heads, d, dv) = (kv * self.choices.pick(&[1, 2, 3]), self.some(), self.some());
        let mask = self.choices.pick(&[DType::Bool, dtype]);
        let masks = [
            fixed(mask, &[t, s]),
            fixed(mask, &[b, 1, t, s]),
            fixed(mask, &[heads, 1, s]),
        ];
        let (mask, sinks) = (self.choices.pick(&masks), fixed(dtype, &[heads]));
        let inputs = vec![
            fixed(dtype, &[b, heads, t, d]),
            fixed(dtype, &[b, kv, s, d]),
            fixed(dtype, &[b, kv, s, dv]),
            self.optional(mask),
            self.optional(sinks),
        ];
        let attributes = vec![
            float(self.choices.pick(&[0.125, 1.0, 0.0])),
            self.yes(),
            int(self.choices.pick(&[0, 0, 1, 2])),
            float(self.choices.pick(&[0.0, 0.0, 30.0])),
        ];
        Template { inputs, attributes }
    }

    fn rotary(&mut self) -> Template {
        let (dtype, t, half) = (self.any_float(), self.size(), self.choices.pick(&[4, 1, 8]));
        let form = self
            .choices
            .pick(&["norm", "neox", "neox", "mrope", "vision", "imrope"]);
        let several = ["mrope", "vision", "imrope"].contains(&form);
        let positions = if several { vec![4, t] } else { vec![t] };
        let index = self.index();
        let freqs = fixed(dtype, &[half]);
        let inputs = vec![
            fixed(dtype, &[2, t, 2 * half]),
            fixed(index, &positions),
            self.optional(freqs),
        ];
        let sections = if several {
            vec![half.div_ceil(2), half / 2, 0, 0]
        } else {
            vec![]
        };
        let attributes = vec![
            name(form),
            int(self.choices.pick(&[0, 2 * half, half])),
            float(self.choices.pick(&[1e4, 0.0])),
            float(self.choices.pick(&[1.0, 0.25])),
            self.yes(),
            int(self.choices.pick(&[0, 4096])),
            float(self.choices.pick(&[0.0, 1.0])),
            float(1.0),
            float(32.0),
            float(1.0),
            ints(&sections),
        ];
        Template { inputs, attributes }
    }

    fn paged(&mut self, row: &str) -> Template {
        let (m, kv, d) = (
            self.rows(),
            self.choices.pick(&[1, 2]),
            self.choices.pick(&[2, 64]),
        );
        let cache = ValueSpec::Cache(CacheSpec {
            dtype: self.choices.pick(&FLOATS[..3]),
            blocks: self.choices.pick(&[4, 1]),
            block_len: self.choices.pick(&[16, 1]),
            kv_heads: kv,
            head_dim: d,
        });
        let per_row = tensor(DType::I32, &[m]);
        let heads = |h: usize| tensor(DType::F32, &[m, h.into(), d.into()]);
        if row == "cache_write" {
            let inputs = vec![cache, heads(kv), heads(kv), per_row];
            return Template {
                inputs,
                attributes: vec![],
            };
        }
        let tables = fixed(DType::I32, &[self.size(), self.size()]);
        let queries = heads(kv * self.choices.pick(&[1, 2]));
        let window = int(self.choices.pick(&[0, 1, i32::MAX as usize]));
        let cap = self.choices.pick(&[0.0, 30.0]);
        Template {
            inputs: vec![queries, cache, tables, per_row.clone(), per_row],
            attributes: vec![float(0.125), window, float(cap)],
        }
    }

    fn indexing(&mut self, row: &str) -> Template {
        let (dtype, index) = (
            self.choices.pick(&[DType::F32, DType::I16, DType::BF16]),
            self.index(),
        );
        let (a, b, n) = (self.some(), self.some(), self.size());
        let axis = self.choices.below(2);
        let (inputs, attributes) = match row {
            "take" => (
                vec![fixed(dtype, &[a, b]), fixed(index, &[n, 2])],
                vec![int(axis)],
            ),
            "take_along_axis" => {
                let dims = if axis == 0 { [n, b] } else { [a, n] };
                (
                    vec![fixed(dtype, &[a, b]), fixed(index, &dims)],
                    vec![int(axis)],
                )
            }
            "gather_nd" => {
                let depth = 1 + self.choices.below(2);
                (
                    vec![fixed(dtype, &[a, b, 2]), fixed(index, &[n, depth])],
                    vec![int(0)],
                )
            }
            "scatter_along_axis" => {
                let dims = [self.choices.below(a + 1), self.choices.below(b + 1)];
                let inputs = vec![
                    fixed(dtype, &[a, b]),
                    fixed(index, &dims),
                    fixed(dtype, &dims),
                ];
                (inputs, vec![int(axis), self.reduce()])
            }
            "scatter_nd" => {
                let inputs = vec![
                    fixed(dtype, &[a, b]),
                    fixed(index, &[n, 1]),
                    fixed(dtype, &[n, b]),
                ];
                (inputs, vec![self.reduce()])
            }
            "add_id" => {
                let inputs = vec![
                    fixed(dtype, &[a, b, 3]),
                    fixed(dtype, &[4, 3]),
                    fixed(index, &[a, b]),
                ];
                (inputs, vec![])
            }
            _ => {
                let ((weight, k), m) = (self.weight(), self.rows());
                (
                    vec![fixed(weight, &[a, k]), tensor(DType::I32, &[m])],
                    vec![],
                )
            }
        };
        Template { inputs, attributes }
    }

    fn products(&mut self, row: &str) -> Template {
        let (inputs, attributes) = match row {
            "matmul" => (self.matrices().0, vec![]),
            "addmm" => {
                let (mut inputs, dims) = self.matrices();
                inputs.insert(0, fixed(DType::F32, &dims));
                (inputs, vec![float(0.5), float(2.0)])
            }
            "gather_mm" => {
                let (m, k, n, count, index) = (
                    self.size(),
                    self.size(),
                    self.size(),
                    self.size(),
                    self.index(),
                );
                let ids = fixed(index, &[count]);
                let inputs = vec![
                    fixed(DType::F32, &[3, m, k]),
                    fixed(DType::F32, &[3, k, n]),
                    self.optional(ids.clone()),
                    self.optional(ids),
                ];
                (inputs, vec![self.yes()])
            }
            "mul_mat_id" => {
                let ((dtype, k), index) = (self.weight(), self.index());
                let (t, n) = (self.size(), self.size());
                let u = self.choices.pick(&[1, 2]);
                let each = self.choices.pick(&[1, u]);
                let inputs = vec![
                    fixed(dtype, &[4, n, k]),
                    fixed(DType::F32, &[t, each, k]),
                    fixed(index, &[t, u]),
                ];
                (inputs, vec![])
            }
            _ => {
                let ((dtype, k), m, n) = (self.weight(), self.rows(), self.size());
                let x = tensor(DType::F32, &[m, k.into()]);
                (vec![x, fixed(dtype, &[n, k])], vec![])
            }
        };
        Template { inputs, attributes }
    }

    fn made(&mut self, row: &str) -> Template {
        let dtype = self.choices.pick(&[
            DType::F32,
            DType::I32,
            DType::U8,
            DType::BF16,
            DType::Bool,
            DType::F64,
        ]);
        let (inputs, attributes) = match row {
            "literal" => {
                let rank = self.choices.below(3);
                let dims = self.sizes(rank);
                let bytes = dims.iter().product::<usize>() * dtype.block_bytes();
                (
                    vec![],
                    vec![
                        Attribute::DType(dtype),
                        shape(&dims),
                        Attribute::Bytes(vec![1; bytes]),
                    ],
                )
            }
            "arange" => {
                let length = int(self.size());
                (
                    vec![],
                    vec![float(1.5), float(-0.25), length, Attribute::DType(dtype)],
                )
            }
            "reshape" => {
                let (m, a, b) = (self.rows(), self.size(), self.size());
                let to = Shape::new([m, (a * b).into()]).unwrap_or_default();
                (
                    vec![tensor(dtype, &[m, a.into(), b.into()])],
                    vec![Attribute::Shape(to)],
                )
            }
            "broadcast_to" => {
                let (a, b) = (self.size(), self.size());
                (vec![fixed(dtype, &[b, 1])], vec![shape(&[a, b, 3])])
            }
            "split" => {
                let (a, b) = (self.size(), self.size());
                (vec![fixed(dtype, &[a + b, 2])], vec![ints(&[a, b]), int(0)])
            }
            "slice" => {
                let dims = [self.some(), self.size()];
                let pick = |choices: &mut Choices, from: &[i64]| {
                    Attribute::Ints((0..2).map(|_| choices.pick(from)).collect())
                };
                let attributes = vec![
                    pick(self.choices, &[0, 1, -1, -2, i64::MAX]),
                    pick(self.choices, &[i64::MAX, 2, -1, 0, i64::MIN]),
                    pick(self.choices, &[1, 1, 2, -1, -3]),
                ];
                (vec![fixed(dtype, &dims)], attributes)
            }
            "pad" => {
                let dims = [self.some(), self.some()];
                let value = fixed(dtype, &[]);
                let inputs = vec![fixed(dtype, &dims), self.optional(value)];
                let (low, high) = (self.sizes(2), self.sizes(2));
                let mode = self.choices.pick(&["constant", "edge", "reflect", "wrap"]);
                (inputs, vec![ints(&low), ints(&high), name(mode)])
            }
            "topk" => {
                let n = self.some();
                let k = int(self.choices.below(n + 1));
                (vec![fixed(dtype, &[3, n])], vec![k, int(1), self.yes()])
            }
            "group_norm" => {
                let (groups, each) = (self.choices.pick(&[1, 2]), self.choices.pick(&[1, 3]));
                let float_dtype = self.any_float();
                let parameter = fixed(float_dtype, &[groups * each]);
                let x = fixed(float_dtype, &[2, groups * each, self.size()]);
                let inputs = vec![
                    x,
                    self.optional(parameter.clone()),
                    self.optional(parameter),
                ];
                (inputs, vec![int(groups), float(1e-5)])
            }
            "draw" => {
                let (m, n) = (self.rows(), self.some());
                let inputs = vec![
                    tensor(DType::F32, &[m, n.into()]),
                    tensor(DType::F32, &[m]),
                    tensor(DType::U32, &[m, 4.into()]),
                    self.optional(tensor(DType::F32, &[m, 3.into()])),
                ];
                (inputs, vec![])
            }
            "random_categorical" => {
                let logits = fixed(DType::F32, &[2, self.some()]);
                (
                    vec![logits, fixed(DType::U32, &[2])],
                    vec![int(1), int(self.some())],
                )
            }
            _ => {
                // rms_norm, layer_norm, swiglu and others of one innermost axis
                let (m, n, x) = (self.rows(), self.some(), self.any_float());
                let parameter = fixed(x, &[n]);
                let mut inputs = vec![tensor(x, &[m, n.into()]), self.optional(parameter.clone())];
                if row == "layer_norm" {
                    inputs.push(self.optional(parameter));
                }
                (inputs, vec![float(1e-5)])
            }
        };
        Template { inputs, attributes }
    }

    fn random(&mut self, row: &str) -> Template {
        let rank = self.choices.below(3);
        let dims = shape(&self.sizes(rank));
        let attributes = match row {
            "random_split" => vec![int(self.some())],
            "random_bits" => vec![dims],
            "random_bernoulli" => vec![dims, float(0.5)],
            _ => vec![dims, float(-1.0), float(1.0)],
        };
        Template {
            inputs: vec![fixed(DType::U32, &[2])],
            attributes,
        }
    }
}

/// A template of a row, where it needs one.
pub fn template(row: &str, symbolic: bool, choices: &mut Choices) -> Option<Template> {
    let mut maker = Maker { choices, symbolic };
    Some(match row {
        "conv" => maker.conv(),
        "pool" => maker.pool(),
        "scaled_dot_product_attention" => maker.attention(),
        "rotary_embedding" => maker.rotary(),
        "cache_write" | "paged_attention" => maker.paged(row),
        "rope" => {
            let (m, d) = (maker.rows(), maker.choices.pick(&[2, 8]));
            let inputs = vec![
                tensor(DType::F32, &[m, 3.into(), d.into()]),
                tensor(DType::I32, &[m]),
                fixed(DType::F32, &[d / 2]),
            ];
            Template {
                inputs,
                attributes: vec![maker.yes()],
            }
        }
        "take" | "take_along_axis" | "gather_nd" | "scatter_along_axis" | "scatter_nd"
        | "add_id" | "get_rows" => maker.indexing(row),
        "matmul" | "addmm" | "gather_mm" | "mul_mat_id" | "mul_mat" => maker.products(row),
        "random_split" | "random_bits" | "random_bernoulli" | "random_uniform"
        | "random_normal" => maker.random(row),
        "literal" | "arange" | "reshape" | "broadcast_to" | "split" | "slice" | "pad" | "topk"
        | "group_norm" | "random_categorical" | "draw" | "rms_norm" | "layer_norm" => {
            maker.made(row)
        }
        _ => return placed::template(row, &mut maker),
    })
}
