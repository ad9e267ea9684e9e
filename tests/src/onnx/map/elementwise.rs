//! Elementwise ops, activations and casts.

use anyhow::{Context, Result, bail};
use hotcell_graph::{DType, Value, dtype::Kind, op::Attribute};

use super::{Mapper, dtype_attribute};

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "Abs" | "Acos" | "Acosh" | "Asin" | "Asinh" | "Atan" | "Atanh" | "Ceil" | "Cos"
        | "Cosh" | "Erf" | "Exp" | "Floor" | "Log" | "Neg" | "Reciprocal" | "Round" | "Sigmoid"
        | "Sign" | "Sin" | "Sinh" | "Sqrt" | "Tan" | "Tanh" | "Relu" | "Softplus" => {
            m.unary(&op.to_lowercase(), m.x(0)?)?
        }
        "Identity" => m.x(0)?,
        "Not" => m.unary("logical_not", m.x(0)?)?,
        "BitwiseNot" => m.unary("bitwise_not", m.x(0)?)?,
        "IsNaN" => m.unary("is_nan", m.x(0)?)?,
        "IsInf" => is_inf(m)?,
        "Add" | "Sub" | "Mul" | "Equal" | "Greater" | "Less" => {
            m.binary(&op.to_lowercase(), m.x(0)?, m.x(1)?)?
        }
        "And" | "Or" | "Xor" => {
            m.binary(&format!("logical_{}", op.to_lowercase()), m.x(0)?, m.x(1)?)?
        }
        "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" => {
            let name = op.replace("Bitwise", "bitwise_").to_lowercase();
            m.binary(&name, m.x(0)?, m.x(1)?)?
        }
        "GreaterOrEqual" => m.binary("greater_equal", m.x(0)?, m.x(1)?)?,
        "LessOrEqual" => m.binary("less_equal", m.x(0)?, m.x(1)?)?,
        "BitShift" => match m.text("direction", "") {
            "LEFT" => m.binary("left_shift", m.x(0)?, m.x(1)?)?,
            _ => m.binary("right_shift", m.x(0)?, m.x(1)?)?,
        },
        "Div" => divide(m)?,
        "Mod" => modulo(m)?,
        "Pow" => m.cast(m.binary("pow", m.x(0)?, m.x(1)?)?, m.wanted(0)?)?,
        "Max" => fold(m, "maximum")?,
        "Min" => fold(m, "minimum")?,
        "Sum" => fold(m, "add")?,
        "Mean" => {
            let sum = fold(m, "add")?;
            m.scale(sum, 1.0 / m.inputs() as f64)?
        }
        "Where" => m.select(m.x(0)?, m.x(1)?, m.x(2)?)?,
        "Cast" => m.cast(m.x(0)?, dtype_attribute(m, "to", 0)?)?,
        "CastLike" => {
            let like = m.given(1)?.context("CastLike without an example")?;
            m.cast(m.x(0)?, like.dtype)?
        }
        "BitCast" => bit_cast(m)?,
        _ => return activation(m, op),
    };
    Ok(Some(vec![value]))
}

fn activation(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let alpha = |default| m.float("alpha", default);
    let value = match op {
        "Gelu" => {
            let tanh = m.text("approximate", "none") == "tanh";
            m.unary(if tanh { "gelu_tanh" } else { "gelu" }, m.x(0)?)?
        }
        "Swish" => {
            let x = m.x(0)?;
            m.mul(x, m.unary("sigmoid", m.scale(x, alpha(1.0))?)?)?
        }
        "Mish" => {
            let x = m.x(0)?;
            m.mul(x, m.unary("tanh", m.unary("softplus", x)?)?)?
        }
        "LeakyRelu" => {
            let x = m.x(0)?;
            negative(m, x, m.scale(x, alpha(0.01))?, x)?
        }
        "PRelu" => {
            let x = m.x(0)?;
            negative(m, x, m.mul(x, m.x(1)?)?, x)?
        }
        "Elu" => {
            let x = m.x(0)?;
            negative(m, x, m.scale(m.unary("expm1", x)?, alpha(1.0))?, x)?
        }
        "Selu" => {
            let x = m.x(0)?;
            let low = m.scale(m.unary("expm1", x)?, alpha(1.673_263_2))?;
            m.scale(negative(m, x, low, x)?, m.float("gamma", 1.050_701))?
        }
        "Celu" => {
            let x = m.x(0)?;
            let a = alpha(1.0);
            let low = m.scale(m.unary("expm1", m.scale(x, 1.0 / a)?)?, a)?;
            negative(m, x, low, x)?
        }
        "HardSigmoid" => hard_sigmoid(m, alpha(0.2), m.float("beta", 0.5))?,
        "HardSwish" => m.mul(m.x(0)?, hard_sigmoid(m, 1.0 / 6.0, 0.5)?)?,
        "Softsign" => {
            let x = m.x(0)?;
            m.div(x, m.shift(m.unary("abs", x)?, 1.0)?)?
        }
        "Clip" => {
            let bound = |i| Ok::<_, anyhow::Error>(m.optional(i)?.unwrap_or(Value::Absent));
            m.one("clamp", &[m.x(0)?, bound(1)?, bound(2)?], vec![])?
        }
        "ThresholdedRelu" => {
            let x = m.x(0)?;
            let above = m.binary("greater", x, m.like(alpha(1.0), x)?)?;
            m.select(above, x, m.like(0.0, x)?)?
        }
        "Shrink" => {
            let x = m.x(0)?;
            let (bias, lambda) = (m.float("bias", 0.0), m.float("lambd", 0.5));
            let below = m.binary("less", x, m.like(-lambda, x)?)?;
            let above = m.binary("greater", x, m.like(lambda, x)?)?;
            let high = m.select(above, m.shift(x, -bias)?, m.like(0.0, x)?)?;
            m.select(below, m.shift(x, bias)?, high)?
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

/// `below` where x < 0, else `other`.
fn negative(m: &Mapper<'_>, x: Value, below: Value, other: Value) -> Result<Value> {
    let condition = m.binary("less", x, m.like(0.0, x)?)?;
    m.select(condition, below, other)
}

fn hard_sigmoid(m: &Mapper<'_>, alpha: f64, beta: f64) -> Result<Value> {
    m.clamp(m.shift(m.scale(m.x(0)?, alpha)?, beta)?, 0.0, 1.0)
}

fn fold(m: &Mapper<'_>, name: &str) -> Result<Value> {
    let mut value = m.x(0)?;
    for i in 1..m.inputs() {
        value = m.binary(name, value, m.x(i)?)?;
    }
    Ok(value)
}

fn is_inf(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let (up, down) = (
        m.int("detect_positive", 1) != 0,
        m.int("detect_negative", 1) != 0,
    );
    let infinite = m.unary("is_inf", x)?;
    let sign = match (up, down) {
        (true, true) => return Ok(infinite),
        (true, false) => "greater",
        (false, true) => "less",
        (false, false) => bail!("an IsInf that detects nothing"),
    };
    m.binary("logical_and", infinite, m.binary(sign, x, m.like(0.0, x)?)?)
}

/// Floats divide; integers divide toward zero, where ours floors.
fn divide(m: &Mapper<'_>) -> Result<Value> {
    let (a, b) = (m.x(0)?, m.x(1)?);
    match m.dtype(a)?.kind() {
        Kind::Unsigned => m.binary("floor_divide", a, b),
        Kind::Signed => {
            let zero = m.like(0.0, a)?;
            let floor = m.binary("floor_divide", a, b)?;
            let rest = m.binary("not_equal", m.binary("remainder", a, b)?, zero)?;
            let signs = m.binary(
                "not_equal",
                m.binary("less", a, zero)?,
                m.binary("less", b, zero)?,
            )?;
            let more = m.cast(m.binary("logical_and", rest, signs)?, m.dtype(a)?)?;
            m.add(floor, more)
        }
        _ => m.div(a, b),
    }
}

/// Python's remainder, or with `fmod` C's, which has the dividend's sign.
fn modulo(m: &Mapper<'_>) -> Result<Value> {
    let (a, b) = (m.x(0)?, m.x(1)?);
    if m.int("fmod", 0) == 0 {
        return m.binary("remainder", a, b);
    }
    let size = m.binary("remainder", m.unary("abs", a)?, m.unary("abs", b)?)?;
    m.mul(size, m.unary("sign", a)?)
}

/// The bits of one dtype read as another's.
fn bit_cast(m: &Mapper<'_>) -> Result<Value> {
    let to = dtype_attribute(m, "to", 0)?;
    if to == DType::Bool {
        // Bits of bytes that are 0 and 1.
        return m.cast(m.x(0)?, to);
    }
    m.one("bitcast", &[m.x(0)?], vec![Attribute::DType(to)])
}
