//! The ops as methods and operators. Shapes, dtypes and semantics are the catalogue's (see the page of ops).

use hotcell_graph::{
    DType,
    op::{self, Attribute},
};

use super::{
    array::{Tensor, apply, invalid},
    session::Session,
};

/// Where the channels are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// `[N, C, …]`, weights `[O, C/groups, …]` (PyTorch, ONNX, ggml).
    #[default]
    ChannelsFirst,
    /// `[N, …, C]`, weights `[O, …, C/groups]` (MLX).
    ChannelsLast,
}

impl Layout {
    pub(super) fn name(self) -> &'static str {
        match self {
            Layout::ChannelsFirst => "channels_first",
            Layout::ChannelsLast => "channels_last",
        }
    }
}

/// How a window moves. One number per spatial axis; an empty list means 1 (0 for padding) on every axis.
#[derive(Clone, Debug, Default)]
pub struct ConvOptions {
    /// Steps of the window.
    pub strides: Vec<i64>,
    /// Padding before.
    pub low: Vec<i64>,
    /// Padding after; empty: as before.
    pub high: Vec<i64>,
    /// Distance of the window's elements.
    pub dilations: Vec<i64>,
    /// Groups of channels; 0 means 1.
    pub groups: i64,
    /// Where the channels are.
    pub layout: Layout,
}

/// What pooling makes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// The greatest element.
    Max,
    /// The mean, padding counted.
    Average,
    /// The mean of the elements that are not padding.
    AverageValid,
}

/// How scattered elements combine with what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Replaced; the last one wins.
    Set,
    /// Added.
    Add,
    /// Multiplied.
    Mul,
    /// The greater.
    Max,
    /// The smaller.
    Min,
}

impl Reduce {
    pub(super) fn name(self) -> &'static str {
        match self {
            Reduce::Set => "set",
            Reduce::Add => "add",
            Reduce::Mul => "mul",
            Reduce::Max => "max",
            Reduce::Min => "min",
        }
    }
}

/// What a running sum or product takes in. The default: all up to each element, and itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// Without the element itself.
    pub exclusive: bool,
    /// From the end: all after each element.
    pub reverse: bool,
}

impl Scan {
    fn attributes(self, axis: i64) -> Vec<Attribute> {
        vec![
            Attribute::Int(axis),
            Attribute::Bool(self.exclusive),
            Attribute::Bool(self.reverse),
        ]
    }
}

/// How near numbers are that count as close.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Near {
    /// Of the second number's size.
    pub relative: f64,
    /// Besides that.
    pub absolute: f64,
    /// Whether NaN is close to NaN.
    pub equal_nan: bool,
}

impl Default for Near {
    /// NumPy's.
    fn default() -> Self {
        Self {
            relative: 1e-5,
            absolute: 1e-8,
            equal_nan: false,
        }
    }
}

impl Near {
    fn attributes(self) -> Vec<Attribute> {
        vec![
            Attribute::Float(self.relative),
            Attribute::Float(self.absolute),
            Attribute::Bool(self.equal_nan),
        ]
    }
}

pub(super) fn one(name: &str, inputs: &[Option<&Tensor>], attributes: Vec<Attribute>) -> Tensor {
    let first = Tensor::apply(name, inputs, attributes).into_iter().next();
    // `apply` gives at least one result.
    first.unwrap_or_else(|| Tensor::wrong(None, invalid(format!("{name} has no result"))))
}

/// `start, start + step, …`, `length` of them.
pub(super) fn arange(
    session: &Session,
    start: f64,
    step: f64,
    length: i64,
    dtype: DType,
) -> Tensor {
    let attributes = vec![
        Attribute::Float(start),
        Attribute::Float(step),
        Attribute::Int(length),
        Attribute::DType(dtype),
    ];
    alone(session, "arange", &[], attributes)
}

/// An op whose inputs may not say which session it belongs to.
fn alone(
    session: &Session,
    name: &str,
    inputs: &[Option<&Tensor>],
    attributes: Vec<Attribute>,
) -> Tensor {
    let made = match op::find(name) {
        Some(row) => apply(row, inputs, attributes, Some(session)),
        None => vec![],
    };
    let missing = || {
        Tensor::wrong(
            Some(session.clone()),
            invalid(format!("there is no op named {name:?}")),
        )
    };
    made.into_iter().next().unwrap_or_else(missing)
}

pub(super) fn ints(values: &[i64]) -> Attribute {
    Attribute::Ints(values.to_vec())
}

pub(super) fn name(value: &str) -> Attribute {
    Attribute::Name(value.to_owned())
}

macro_rules! unary {
    ($($(#[doc = $doc:literal])+ $name:ident;)*) => {
        impl Tensor {$(
            $(#[doc = $doc])+
            pub fn $name(&self) -> Tensor {
                one(stringify!($name), &[Some(self)], vec![])
            }
        )*}
    };
}

unary! {
    /// `-x`.
    neg;
    /// `|x|`.
    abs;
    /// −1, 0 or 1.
    sign;
    /// `x²`.
    square;
    /// The greatest integer not above.
    floor;
    /// The smallest integer not below.
    ceil;
    /// The nearest integer, half to even.
    round;
    /// The integer part.
    trunc;
    /// `√x`.
    sqrt;
    /// `1/√x`.
    rsqrt;
    /// `1/x`.
    reciprocal;
    /// `eˣ`.
    exp;
    /// `eˣ − 1`.
    expm1;
    /// Natural logarithm.
    log;
    /// `ln(1 + x)`.
    log1p;
    /// Logarithm to base 2.
    log2;
    /// Sine.
    sin;
    /// Cosine.
    cos;
    /// Tangent.
    tan;
    /// Arc sine.
    asin;
    /// Arc cosine.
    acos;
    /// Arc tangent.
    atan;
    /// Hyperbolic sine.
    sinh;
    /// Hyperbolic cosine.
    cosh;
    /// Hyperbolic tangent.
    tanh;
    /// Inverse hyperbolic sine.
    asinh;
    /// Inverse hyperbolic cosine.
    acosh;
    /// Inverse hyperbolic tangent.
    atanh;
    /// Error function.
    erf;
    /// Inverse error function.
    erfinv;
    /// `1 / (1 + e⁻ˣ)`.
    sigmoid;
    /// `x·σ(x)`.
    silu;
    /// `max(x, 0)`.
    relu;
    /// GELU by the error function.
    gelu;
    /// GELU by its tanh approximation.
    gelu_tanh;
    /// GELU as `x·σ(1.702 x)`.
    gelu_quick;
    /// `ln(1 + eˣ)`.
    softplus;
    /// Whether zero.
    logical_not;
    /// All bits inverted.
    bitwise_not;
    /// Whether not a number.
    is_nan;
    /// Whether infinite.
    is_inf;
    /// Whether neither infinite nor not a number.
    is_finite;
}

macro_rules! binary {
    ($($(#[doc = $doc:literal])+ $name:ident;)*) => {
        impl Tensor {$(
            $(#[doc = $doc])+
            pub fn $name(&self, other: &Tensor) -> Tensor {
                one(stringify!($name), &[Some(self), Some(other)], vec![])
            }
        )*}
    };
}

binary! {
    /// The greater of two; NaN wins.
    maximum;
    /// The smaller of two; NaN wins.
    minimum;
    /// The quotient rounded down; an integer by 0 gives 0.
    floor_divide;
    /// The remainder, with the divisor's sign.
    remainder;
    /// `selfᵒᵗʰᵉʳ`.
    pow;
    /// The angle of the point (other, self).
    atan2;
    /// `ln(eᵃ + eᵇ)`.
    logaddexp;
    /// Elementwise `==`.
    equal;
    /// Elementwise `!=`.
    not_equal;
    /// Elementwise `<`.
    less;
    /// Elementwise `<=`.
    less_equal;
    /// Elementwise `>`.
    greater;
    /// Elementwise `>=`.
    greater_equal;
    /// Whether both are nonzero.
    logical_and;
    /// Whether one is nonzero.
    logical_or;
    /// Whether exactly one is nonzero.
    logical_xor;
    /// Bits shifted left.
    left_shift;
    /// Bits shifted right; the sign fills.
    right_shift;
    /// `silu(self) · other`.
    swiglu;
    /// `gelu_tanh(self) · other`.
    geglu;
    /// `self @ other`: NumPy's matmul.
    matmul;
    /// `self @ otherᵀ`, where `other` may be quantised; f32.
    mul_mat;
}

macro_rules! reductions {
    ($($(#[doc = $doc:literal])+ $method:ident $name:literal;)*) => {
        impl Tensor {$(
            $(#[doc = $doc])+ /// No axes: over all.
            pub fn $method(&self, axes: &[i64], keep_dims: bool) -> Tensor {
                one($name, &[Some(self)], vec![ints(axes), Attribute::Bool(keep_dims)])
            }
        )*}
    };
}

reductions! {
    /// The sum.
    sum "reduce_sum";
    /// The product.
    prod "reduce_prod";
    /// The greatest element; NaN wins.
    max "reduce_max";
    /// The smallest element; NaN wins.
    min "reduce_min";
    /// Whether all are nonzero.
    all "reduce_all";
    /// Whether one is nonzero.
    any "reduce_any";
    /// The mean.
    mean "mean";
    /// `ln Σ eˣ`.
    logsumexp "logsumexp";
}

impl Tensor {
    /// Each element as another dtype; floats to integers truncate and saturate. Floats also become block types
    /// ([`DType::is_encoded`]) where the last axis is whole blocks, and these become floats.
    pub fn cast(&self, dtype: DType) -> Tensor {
        one("cast", &[Some(self)], vec![Attribute::DType(dtype)])
    }

    /// `self` where `condition` holds, else `other`.
    pub fn where_(&self, condition: &Tensor, other: &Tensor) -> Tensor {
        one("where", &[Some(condition), Some(self), Some(other)], vec![])
    }

    /// No less than `low`, no more than `high`.
    pub fn clamp(&self, low: Option<&Tensor>, high: Option<&Tensor>) -> Tensor {
        one("clamp", &[Some(self), low, high], vec![])
    }

    /// In ascending order along an axis, or descending; NaN counts as greatest.
    pub fn sort(&self, axis: i64, descending: bool) -> Tensor {
        one(
            "sort",
            &[Some(self)],
            vec![Attribute::Int(axis), Attribute::Bool(descending)],
        )
    }

    /// Where the elements in order are (u32).
    pub fn argsort(&self, axis: i64, descending: bool) -> Tensor {
        one(
            "argsort",
            &[Some(self)],
            vec![Attribute::Int(axis), Attribute::Bool(descending)],
        )
    }

    /// The `k` greatest (or smallest) elements in order, and where they are (u32).
    pub fn topk(&self, k: i64, axis: i64, largest: bool) -> (Tensor, Tensor) {
        let attributes = vec![
            Attribute::Int(k),
            Attribute::Int(axis),
            Attribute::Bool(largest),
        ];
        let mut made = Tensor::apply("topk", &[Some(self)], attributes).into_iter();
        match (made.next(), made.next()) {
            (Some(values), Some(indices)) => (values, indices),
            (Some(wrong), None) => (wrong.clone(), wrong),
            (None, _) => {
                let wrong = Tensor::wrong(None, invalid("topk has no result"));
                (wrong.clone(), wrong)
            }
        }
    }

    /// Where the greatest element is (u32); the first of equals.
    pub fn argmax(&self, axis: i64, keep_dims: bool) -> Tensor {
        one(
            "argmax",
            &[Some(self)],
            vec![Attribute::Int(axis), Attribute::Bool(keep_dims)],
        )
    }

    /// Where the smallest element is (u32); the first of equals.
    pub fn argmin(&self, axis: i64, keep_dims: bool) -> Tensor {
        one(
            "argmin",
            &[Some(self)],
            vec![Attribute::Int(axis), Attribute::Bool(keep_dims)],
        )
    }

    /// The variance with `ddof` degrees of freedom less.
    pub fn variance(&self, axes: &[i64], keep_dims: bool, ddof: i64) -> Tensor {
        let attributes = vec![ints(axes), Attribute::Bool(keep_dims), Attribute::Int(ddof)];
        one("variance", &[Some(self)], attributes)
    }

    /// The square root of [`Tensor::variance`].
    pub fn standard_deviation(&self, axes: &[i64], keep_dims: bool, ddof: i64) -> Tensor {
        let attributes = vec![ints(axes), Attribute::Bool(keep_dims), Attribute::Int(ddof)];
        one("standard_deviation", &[Some(self)], attributes)
    }

    /// The running sum along an axis; integers wrap.
    pub fn cumsum(&self, axis: i64, scan: Scan) -> Tensor {
        one("cumsum", &[Some(self)], scan.attributes(axis))
    }

    /// The running product along an axis; integers wrap.
    pub fn cumprod(&self, axis: i64, scan: Scan) -> Tensor {
        one("cumprod", &[Some(self)], scan.attributes(axis))
    }

    /// Where `|self − other| ≤ absolute + relative · |other|`, or both are the same infinity (bool; NumPy's `isclose`).
    pub fn is_close(&self, other: &Tensor, near: Near) -> Tensor {
        one("is_close", &[Some(self), Some(other)], near.attributes())
    }

    /// Whether [`Tensor::is_close`] everywhere (bool scalar).
    pub fn all_close(&self, other: &Tensor, near: Near) -> Tensor {
        one("all_close", &[Some(self), Some(other)], near.attributes())
    }

    /// Whether shapes and elements are equal (bool scalar), NaN to NaN if `equal_nan`.
    pub fn array_equal(&self, other: &Tensor, equal_nan: bool) -> Tensor {
        let attributes = vec![Attribute::Bool(equal_nan)];
        one("array_equal", &[Some(self), Some(other)], attributes)
    }

    /// `beta·self + alpha·(a @ b)`.
    pub fn addmm(&self, a: &Tensor, b: &Tensor, alpha: f64, beta: f64) -> Tensor {
        let attributes = vec![Attribute::Float(alpha), Attribute::Float(beta)];
        one("addmm", &[Some(self), Some(a), Some(b)], attributes)
    }

    /// `eˣ / Σ eˣ` along an axis.
    pub fn softmax(&self, axis: i64) -> Tensor {
        one("softmax", &[Some(self)], vec![Attribute::Int(axis)])
    }

    /// `ln softmax` along an axis.
    pub fn log_softmax(&self, axis: i64) -> Tensor {
        one("log_softmax", &[Some(self)], vec![Attribute::Int(axis)])
    }

    /// Cross-correlation with `weight` over 1 to 3 spatial axes.
    pub fn conv(&self, weight: &Tensor, bias: Option<&Tensor>, options: &ConvOptions) -> Tensor {
        let axes = self.rank().unwrap_or(3).saturating_sub(2);
        let mut attributes = window(options, axes);
        attributes.push(Attribute::Int(options.groups.max(1)));
        attributes.push(name(options.layout.name()));
        one("conv", &[Some(self), Some(weight), bias], attributes)
    }

    /// Pooling over windows of 1 to 3 spatial axes; `options.groups` means nothing here.
    pub fn pool(&self, kind: PoolKind, size: &[i64], options: &ConvOptions) -> Tensor {
        let kind = match kind {
            PoolKind::Max => "max",
            PoolKind::Average => "average",
            PoolKind::AverageValid => "average_valid",
        };
        let mut attributes = vec![name(kind), ints(size)];
        attributes.extend(window(options, size.len()));
        attributes.push(name(options.layout.name()));
        one("pool", &[Some(self)], attributes)
    }
}

pub(super) fn window(options: &ConvOptions, axes: usize) -> Vec<Attribute> {
    let or = |values: &[i64], default: i64| match values.is_empty() {
        true => Attribute::Ints(vec![default; axes]),
        false => ints(values),
    };
    let high = match options.high.is_empty() {
        true => &options.low,
        false => &options.high,
    };
    vec![
        or(&options.strides, 1),
        or(&options.low, 0),
        or(high, 0),
        or(&options.dilations, 1),
    ]
}
