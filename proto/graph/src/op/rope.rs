//! Rotary positions in the forms that models use, composed of other ops.

use std::f64::consts::PI;

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, inside, integers, join, shaped},
        ops,
        rules::{Specs, Values, cast_to, row_error, scalar, size, spec_of},
    },
    shape::{Dim, Shape},
};

/// How pairs and positions are chosen.
const FORM: &[&str] = &["norm", "neox", "mrope", "vision", "imrope"];

/// The most pairs of the forms with sections, whose choice is a literal of two bytes per pair.
const MAX_SECTION_PAIRS: usize = hotcell_proto::limits::MAX_LITERAL_BYTES / 2;

ops! {
    /// Rotary position embedding of `x` `[…, t, d]` at `positions`, which broadcast to `[…, t]`: pair `i` of the first
    /// `dims` elements (0: all) turns by `position · scale · f[i]`, computed in f64; the others stay. Pairs are
    /// `(2i, 2i+1)` in the form `norm`, else `(i, i + dims/2)`.
    ///
    /// With `base` above 0, `f[i] = base^(−2i/dims)`, over `freqs[i]` where `freqs` (`[dims/2]`) are given and
    /// `factors_divide` says so; with `base` 0, `f[i] = 1 / freqs[i]`. Cosine and sine are multiplied by
    /// `attention_factor`. With `extrapolation` above 0 this is YaRN (Peng et al. 2023) as ggml's `rope_yarn`: pairs
    /// that turn more than `beta_fast` times in `original_context` are not scaled, those that turn fewer than
    /// `beta_slow` times are, and `attention_factor` grows by `1 + 0.1·ln(1/scale)`.
    ///
    /// `mrope`, `vision` and `imrope` have `positions` `[4, t]` (time, height, width, other) and four `sections`, how
    /// many pairs each row of positions turns: ggml's multimodal RoPE, in runs or, `imrope`, taking turns. In
    /// `vision`, `dims` is half of `d`, pairs are `(i, i + dims)` and `f` starts anew in each section. They turn 2048
    /// pairs at most.
    rotary_embedding(x, positions, freqs = optional; form: Name(FORM), dims: Int(0, 1 << 20), base: Float(0.0, 1e30), scale: Float(-1e30, 1e30), factors_divide: Bool, original_context: Int(0, 1 << 31), extrapolation: Float(0.0, 1.0), attention_factor: Float(0.0, 1e6), beta_fast: Float(0.0, 1e6), beta_slow: Float(0.0, 1e6), sections: Ints(0, 1 << 20)) -> one
    { shapes: "x", dtypes: "x, freqs float; positions integers → x", effect: Effect::None, infer: rotary_spec, decompose: Some(rotary_of_parts) }
}

/// The attributes of a call that fits.
struct Turns {
    form: String,
    /// Pairs that turn.
    pairs: usize,
    /// ggml's `n_dims`: the divisor in the exponent of the base.
    dims: usize,
    base: f64,
    scale: f64,
    factors_divide: bool,
    context: f64,
    extrapolation: f64,
    attention_factor: f64,
    beta_fast: f64,
    beta_slow: f64,
    sections: Vec<usize>,
}

impl Turns {
    fn of(call: &Call<'_>) -> Result<Self, GraphError> {
        let x = float(call, 0)?;
        let form = call.name(0)?;
        let d = match x.shape.dims() {
            [.., Dim::Fixed(d)] if (2..=7).contains(&x.shape.rank()) => *d,
            _ => {
                return Err(call.error(format_args!(
                    "x must be […, t, d] of at most 7 axes, not {}",
                    x.shape
                )));
            }
        };
        let given = size(call, call.int(1)?)?;
        let (dims, pairs) = match (form, given) {
            ("vision", 0) => (d / 2, d / 2),
            ("vision", n) => (n, n),
            (_, 0) => (d, d / 2),
            (_, n) => (n, n / 2),
        };
        let whole = match form {
            "vision" => pairs > 0 && pairs.checked_mul(2) == Some(d),
            _ => pairs > 0 && pairs <= d / 2 && dims.is_multiple_of(2),
        };
        if !whole {
            return Err(call.error(format_args!(
                "dims is {given}, which are no pairs of {d} elements"
            )));
        }
        let sections = call.ints(10)?.iter().map(|&n| size(call, n));
        let turns = Self {
            form: form.to_owned(),
            pairs,
            dims,
            base: call.float(2)?,
            scale: call.float(3)?,
            factors_divide: call.bool(4)?,
            context: call.int(5)? as f64,
            extrapolation: call.float(6)?,
            attention_factor: call.float(7)?,
            beta_fast: call.float(8)?,
            beta_slow: call.float(9)?,
            sections: sections.collect::<Result<_, _>>()?,
        };
        turns.check(call)?;
        Ok(turns)
    }

    fn sectioned(&self) -> bool {
        matches!(self.form.as_str(), "mrope" | "vision" | "imrope")
    }

    fn check(&self, call: &Call<'_>) -> Result<(), GraphError> {
        let freqs = call.optional(2)?.is_some();
        let refused = match (self.base > 0.0, freqs, self.factors_divide) {
            (true, true, false) => Some("takes base or freqs, not both, unless factors_divide"),
            (false, false, _) => Some("needs a base above 0 or freqs"),
            (true, false, true) => Some("needs freqs for factors_divide"),
            _ => None,
        };
        if let Some(why) = refused {
            return Err(call.error(why));
        }
        // Logarithms of these are divided by.
        let bends = self.base > 0.0 && self.base != 1.0 && self.scale > 0.0;
        let bends = bends && self.context > 0.0 && self.beta_fast > 0.0 && self.beta_slow > 0.0;
        if self.extrapolation > 0.0 && !bends {
            return Err(call.error(
                "extrapolation needs base, scale, original_context, beta_fast and beta_slow above 0",
            ));
        }
        let sum: usize = self.sections.iter().sum();
        let sections = match self.sectioned() {
            true => self.sections.len() == 4 && sum > 0,
            false => self.sections.is_empty(),
        };
        if !sections {
            return Err(call.error(format_args!(
                "{} takes {} sections, not {:?}",
                self.form,
                if self.sectioned() { "four" } else { "no" },
                self.sections.get(..8).unwrap_or(&self.sections)
            )));
        }
        if self.sectioned() && self.pairs > MAX_SECTION_PAIRS {
            return Err(call.error(format_args!(
                "{} turns {MAX_SECTION_PAIRS} pairs at most, not {}",
                self.form, self.pairs
            )));
        }
        Ok(())
    }

    /// Row of the positions and place within the section for each pair, as ggml's `ggml_mrope_cache_init`.
    fn choices(&self) -> Vec<(u16, u16)> {
        let section = |i: usize| self.sections.get(i).copied().unwrap_or(0);
        let starts = [
            0,
            section(0),
            section(0) + section(1),
            section(0) + section(1) + section(2),
        ];
        let period = (starts[3] + section(3)).max(1);
        let mut choices = Vec::with_capacity(self.pairs);
        for pair in 0..self.pairs {
            let sector = pair % period;
            let run = starts.iter().rposition(|s| sector >= *s).unwrap_or(0);
            let row = match (self.form.as_str(), sector % 3) {
                ("imrope", n) if sector < 3 * section(n) => n,
                ("imrope", _) => 3,
                _ => run,
            };
            let place = match self.form.as_str() {
                "vision" => sector - starts[run],
                _ => pair,
            };
            choices.push((row as u16, place as u16));
        }
        choices
    }

    /// The first and last pair between which YaRN goes over from not scaled to scaled.
    fn ramp(&self) -> (f64, f64) {
        let dims = self.dims as f64;
        let pair =
            |turns: f64| dims * (self.context / (turns * 2.0 * PI)).ln() / (2.0 * self.base.ln());
        let (low, high) = (pair(self.beta_fast).floor(), pair(self.beta_slow).ceil());
        (low.max(0.0), high.min(dims - 1.0))
    }
}

fn rotary_spec(call: &Call<'_>) -> Specs {
    let turns = Turns::of(call)?;
    let (x, positions) = (call.tensor(0)?, integers(call, 1)?);
    if let Some(freqs) = call.optional(2)? {
        float(call, 2)?;
        if freqs.shape.dims() != [Dim::Fixed(turns.pairs)] {
            return Err(call.error(format_args!(
                "freqs must be [{}], not {}",
                turns.pairs, freqs.shape
            )));
        }
    }
    let rows = x.shape.dims().split_last().map_or(&[][..], |(_, r)| r);
    if turns.sectioned() {
        if rows == [Dim::Rows] {
            return Err(row_error(call, "the second axis of positions"));
        }
        if rows
            .last()
            .map(|t| [Dim::Fixed(4), *t])
            .as_ref()
            .map(|d| &d[..])
            != Some(positions.shape.dims())
        {
            return Err(call.error(format_args!(
                "positions must be [4, t], not {}",
                positions.shape
            )));
        }
    } else {
        let wanted = Shape::new(rows.iter().copied())?;
        let both = wanted
            .broadcast(&positions.shape)
            .map_err(|e| call.error(e))?;
        if both != wanted {
            return Err(call.error(format_args!(
                "positions {} must broadcast to {wanted}",
                positions.shape
            )));
        }
    }
    Ok(vec![x.clone()])
}

/// A vector of u16 numbers as f64.
fn numbers(graph: &mut GraphBuilder, values: &[u16]) -> Result<Value, GraphError> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let literal = graph.literal(DType::U16, Shape::fixed(&[values.len()])?, &bytes)?;
    graph.cast(literal, DType::F64)
}

/// Positions in f64, `[…, t, 1]` or, one for each pair, `[t, pairs]`.
fn places(graph: &mut GraphBuilder, positions: Value, turns: &Turns) -> Result<Value, GraphError> {
    let shape = spec_of(graph, positions)?.shape;
    let positions = cast_to(graph, positions, DType::F64)?;
    if !turns.sectioned() {
        return shaped(graph, positions, join(shape.dims(), &[Dim::Fixed(1)]));
    }
    let rows: Vec<u8> = turns.choices().iter().map(|(row, _)| *row as u8).collect();
    let rows = graph.literal(DType::U8, Shape::fixed(&[rows.len()])?, &rows)?;
    let each = graph.take(positions, rows, 0)?;
    graph.transpose(each, &[1, 0])
}

/// `base^(−2i/dims)` with what `freqs` change, f64 `[pairs]`.
fn frequencies(
    graph: &mut GraphBuilder,
    freqs: Option<Value>,
    turns: &Turns,
) -> Result<Value, GraphError> {
    let freqs = match freqs {
        Some(freqs) => Some(cast_to(graph, freqs, DType::F64)?),
        None => None,
    };
    if turns.base == 0.0 {
        return graph.reciprocal(freqs.ok_or(GraphError::NoResult)?);
    }
    let place = match turns.form.as_str() {
        "vision" => {
            let places: Vec<u16> = turns.choices().iter().map(|(_, place)| *place).collect();
            numbers(graph, &places)?
        }
        _ => graph.arange(0.0, 1.0, turns.pairs as i64, DType::F64)?,
    };
    let rate = scalar(
        graph,
        -2.0 * turns.base.ln() / turns.dims as f64,
        DType::F64,
    )?;
    let exponent = graph.mul(place, rate)?;
    let f = graph.exp(exponent)?;
    match freqs {
        Some(freqs) => graph.div(f, freqs),
        None => Ok(f),
    }
}

/// How much of each pair's angle is scaled, times the scale, and what is not: `scale·(1 − mix) + mix`, `[pairs]` or a
/// scalar.
fn scales(graph: &mut GraphBuilder, turns: &Turns) -> Result<Value, GraphError> {
    let scale = scalar(graph, turns.scale, DType::F64)?;
    if turns.extrapolation == 0.0 {
        return Ok(scale);
    }
    let (low, high) = turns.ramp();
    let pair = graph.arange(0.0, 1.0, turns.pairs as i64, DType::F64)?;
    let low_value = scalar(graph, low, DType::F64)?;
    let distance = graph.sub(pair, low_value)?;
    let width = scalar(graph, (high - low).max(0.001), DType::F64)?;
    let ramp = graph.div(distance, width)?;
    let (zero, unit) = (
        scalar(graph, 0.0, DType::F64)?,
        scalar(graph, 1.0, DType::F64)?,
    );
    let ramp = graph.maximum(ramp, zero)?;
    let ramp = graph.minimum(ramp, unit)?;
    let rest = graph.sub(unit, ramp)?;
    let share = scalar(graph, turns.extrapolation, DType::F64)?;
    let mix = graph.mul(rest, share)?;
    // scale + mix·(1 − scale)
    let gain = scalar(graph, 1.0 - turns.scale, DType::F64)?;
    let gained = graph.mul(mix, gain)?;
    graph.add(scale, gained)
}

/// Elements `start..stop` by `step` of the last axis.
fn part(
    graph: &mut GraphBuilder,
    x: Value,
    start: usize,
    stop: usize,
    step: i64,
) -> Result<Value, GraphError> {
    let rank = spec_of(graph, x)?.shape.rank();
    let (mut starts, mut stops) = (vec![0; rank], vec![i64::MAX; rank]);
    let mut steps = vec![1; rank];
    if let (Some(a), Some(b), Some(c)) = (starts.last_mut(), stops.last_mut(), steps.last_mut()) {
        (*a, *b, *c) = (start as i64, stop as i64, step);
    }
    graph.slice(x, &starts, &stops, &steps)
}

fn rotary_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&rotary_embedding, graph, inputs, attributes)?;
    let call = parts.call();
    let turns = Turns::of(&call)?;
    let x = call.tensor(0)?;
    let &[value, positions, freqs] = inputs else {
        return Err(GraphError::NoResult);
    };
    let freqs = (freqs != Value::Absent).then_some(freqs);
    let work = inside(x.dtype);

    let places = places(graph, positions, &turns)?;
    let f = frequencies(graph, freqs, &turns)?;
    let scales = scales(graph, &turns)?;
    let f = graph.mul(f, scales)?;
    let angle = graph.mul(places, f)?;
    let (cos, sin) = (graph.cos(angle)?, graph.sin(angle)?);
    let mut factor = turns.attention_factor;
    if turns.extrapolation > 0.0 {
        factor *= 1.0 + 0.1 * (1.0 / turns.scale).ln();
    }
    let factor = scalar(graph, factor, DType::F64)?;
    let (cos, sin) = (graph.mul(cos, factor)?, graph.mul(sin, factor)?);
    let (cos, sin) = (cast_to(graph, cos, work)?, cast_to(graph, sin, work)?);

    let y = cast_to(graph, value, work)?;
    let (n, turned) = (turns.pairs, 2 * turns.pairs);
    let (a, b) = match turns.form.as_str() {
        "norm" => (part(graph, y, 0, turned, 2)?, part(graph, y, 1, turned, 2)?),
        _ => (part(graph, y, 0, n, 1)?, part(graph, y, n, turned, 1)?),
    };
    let (a_cos, b_sin) = (graph.mul(a, cos)?, graph.mul(b, sin)?);
    let (a_sin, b_cos) = (graph.mul(a, sin)?, graph.mul(b, cos)?);
    let (a, b) = (graph.sub(a_cos, b_sin)?, graph.add(a_sin, b_cos)?);
    let rows = x.shape.dims().split_last().map_or(&[][..], |(_, r)| r);
    let mut whole = match turns.form.as_str() {
        "norm" => {
            let pairs = graph.stack(&[a, b], -1)?;
            shaped(graph, pairs, join(rows, &[turned.into()]))?
        }
        _ => graph.concat(&[a, b], -1)?,
    };
    let d = x.shape.inner().unwrap_or(turned);
    if d > turned {
        let tail = part(graph, y, turned, d, 1)?;
        whole = graph.concat(&[whole, tail], -1)?;
    }
    Ok(vec![cast_to(graph, whole, x.dtype)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, ints, name, number, spec, table, yes};

    /// Attributes of a plain form, to be changed.
    struct With {
        form: &'static str,
        dims: i64,
        base: f64,
        scale: f64,
        divide: bool,
        extrapolation: f64,
        sections: &'static [i64],
    }

    const PLAIN: With = With {
        form: "neox",
        dims: 0,
        base: 10000.0,
        scale: 1.0,
        divide: false,
        extrapolation: 0.0,
        sections: &[],
    };

    impl With {
        fn list(&self) -> Vec<Attribute> {
            vec![
                name(self.form),
                int(self.dims),
                number(self.base),
                number(self.scale),
                yes(self.divide),
                int(4096),
                number(self.extrapolation),
                number(1.0),
                number(32.0),
                number(1.0),
                ints(self.sections),
            ]
        }
    }

    fn sectioned(form: &'static str) -> With {
        With {
            form,
            sections: &[1, 2, 1, 0],
            ..PLAIN
        }
    }

    #[test]
    fn inputs_and_attributes_must_fit_each_other() {
        let plain = PLAIN.list();
        let dims = |dims| With { dims, ..PLAIN }.list();
        let no_base = With { base: 0.0, ..PLAIN }.list();
        let divide = With {
            divide: true,
            ..PLAIN
        }
        .list();
        let mrope = sectioned("mrope").list();
        table(
            &rotary_embedding,
            &[
                (
                    &["f16[2, 3, 5, 8]", "i64[5]", "-"],
                    &plain,
                    "f16[2, 3, 5, 8]",
                ),
                (
                    &["f16[2, 3, 5, 8]", "i64[2, 1, 5]", "-"],
                    &plain,
                    "f16[2, 3, 5, 8]",
                ),
                (&["f32[rows, 8]", "i32[rows]", "-"], &plain, "f32[rows, 8]"),
                (
                    &["f32[rows, 4, 8]", "i32[rows, 1]", "-"],
                    &plain,
                    "f32[rows, 4, 8]",
                ),
                (&["f16[3, 5, 8]", "i64[4]", "-"], &plain, "!broadcast"),
                (&["f16[5, 8]", "i64[2, 5]", "-"], &plain, "!must broadcast"),
                (&["f16[5, 8]", "f32[5]", "-"], &plain, "!integer"),
                (&["i32[5, 8]", "i32[5]", "-"], &plain, "!float"),
                (&["f32[8]", "i32[]", "-"], &plain, "!at most 7"),
                (
                    &["f32[1, 1, 1, 1, 1, 1, 1, 8]", "i32[]", "-"],
                    &plain,
                    "!at most 7",
                ),
                (&["f32[5, 7]", "i32[5]", "-"], &plain, "!no pairs of 7"),
                (&["f32[5, 7]", "i32[5]", "-"], &dims(6), "f32[5, 7]"),
                (&["f32[5, 8]", "i32[5]", "-"], &dims(10), "!no pairs of 8"),
                (&["f32[5, 8]", "i32[5]", "-"], &dims(1), "!no pairs of 8"),
                (&["f32[5, 0]", "i32[5]", "-"], &plain, "!no pairs of 0"),
                (&["f32[5, 8]", "i32[5]", "f32[4]"], &plain, "!not both"),
                (&["f32[5, 8]", "i32[5]", "f32[4]"], &divide, "f32[5, 8]"),
                (&["f32[5, 8]", "i32[5]", "-"], &divide, "!needs freqs"),
                (&["f32[5, 8]", "i32[5]", "f32[4]"], &no_base, "f32[5, 8]"),
                (&["f32[5, 8]", "i32[5]", "-"], &no_base, "!needs a base"),
                (
                    &["f32[5, 8]", "i32[5]", "f32[3]"],
                    &no_base,
                    "!freqs must be [4]",
                ),
                (&["f32[5, 8]", "i32[5]", "i32[4]"], &no_base, "!float"),
                (&["f32[5, 8]", "i32[4, 5]", "-"], &mrope, "f32[5, 8]"),
                (&["f32[2, 5, 8]", "i32[5]", "-"], &mrope, "![4, t]"),
                (
                    &["f32[rows, 8]", "i32[4, 5]", "-"],
                    &mrope,
                    "!row dimension",
                ),
                (
                    &["f32[rows, 5, 8]", "i32[4, 5]", "-"],
                    &mrope,
                    "f32[rows, 5, 8]",
                ),
                (
                    &["f32[5, 8]", "i32[4, 5]", "-"],
                    &With {
                        sections: &[],
                        ..sectioned("mrope")
                    }
                    .list(),
                    "!four sections",
                ),
                (
                    &["f32[5, 8]", "i32[4, 5]", "-"],
                    &With {
                        sections: &[0; 4],
                        ..sectioned("mrope")
                    }
                    .list(),
                    "!four sections",
                ),
                (
                    &["f32[5, 8]", "i32[5]", "-"],
                    &With {
                        sections: &[4, 0, 0, 0],
                        ..PLAIN
                    }
                    .list(),
                    "!no sections",
                ),
                (&["f32[5, 8192]", "i32[4, 5]", "-"], &mrope, "!2048 pairs"),
                (
                    &["f32[5, 8]", "i32[4, 5]", "-"],
                    &With {
                        dims: 2,
                        ..sectioned("vision")
                    }
                    .list(),
                    "!no pairs of 8",
                ),
                (
                    &["f32[5, 8]", "i32[5]", "f32[4]"],
                    &With {
                        base: 0.0,
                        extrapolation: 1.0,
                        ..PLAIN
                    }
                    .list(),
                    "!extrapolation needs",
                ),
                (
                    &["f32[5, 8]", "i32[5]", "-"],
                    &With {
                        scale: 0.0,
                        extrapolation: 1.0,
                        ..PLAIN
                    }
                    .list(),
                    "!extrapolation needs",
                ),
            ],
        );
    }

    #[test]
    fn the_decomposition_has_the_spec_of_the_row() {
        for dtype in ["f16", "bf16", "f32", "f64"] {
            for form in ["norm", "neox"] {
                for (dims, positions) in [
                    ("[rows, 8]", "i32[rows]"),
                    ("[2, 3, 5, 9]", "u8[5]"),
                    ("[rows, 4, 8]", "i64[rows, 1]"),
                    ("[2, 0, 8]", "i32[0]"),
                ] {
                    let x = format!("{dtype}{dims}");
                    let with = With {
                        form,
                        dims: 6,
                        ..PLAIN
                    };
                    decomposes(&rotary_embedding, &[&x, positions, "-"], &with.list());
                    let with = With {
                        dims: 8,
                        extrapolation: 0.5,
                        scale: 0.25,
                        ..with
                    };
                    decomposes(&rotary_embedding, &[&x, positions, "-"], &with.list());
                    let with = With {
                        divide: true,
                        ..with
                    };
                    decomposes(&rotary_embedding, &[&x, positions, "f16[4]"], &with.list());
                    let with = With {
                        base: 0.0,
                        extrapolation: 0.0,
                        ..with
                    };
                    decomposes(&rotary_embedding, &[&x, positions, "f64[4]"], &with.list());
                }
            }
            for form in ["mrope", "vision", "imrope"] {
                for dims in ["[5, 8]", "[rows, 2, 5, 8]"] {
                    let x = format!("{dtype}{dims}");
                    decomposes(
                        &rotary_embedding,
                        &[&x, "i32[4, 5]", "-"],
                        &sectioned(form).list(),
                    );
                }
            }
        }
    }

    /// The choices of ggml's loop, followed by hand for eight pairs.
    #[test]
    fn sections_choose_positions_as_ggml_does() {
        let turns = |form: &str, sections: [usize; 4]| {
            let rows = Turns {
                form: form.to_owned(),
                pairs: 8,
                dims: 16,
                base: 10000.0,
                scale: 1.0,
                factors_divide: false,
                context: 0.0,
                extrapolation: 0.0,
                attention_factor: 1.0,
                beta_fast: 0.0,
                beta_slow: 0.0,
                sections: sections.to_vec(),
            };
            let (rows, places): (Vec<u16>, Vec<u16>) = rows.choices().into_iter().unzip();
            (rows, places)
        };
        let each = (0..8).collect::<Vec<u16>>();
        assert_eq!(
            turns("mrope", [2, 3, 3, 0]),
            (vec![0, 0, 1, 1, 1, 2, 2, 2], each.clone())
        );
        // Sectors start anew after the sum of the sections.
        assert_eq!(
            turns("mrope", [1, 1, 1, 2]),
            (vec![0, 1, 2, 3, 3, 0, 1, 2], each.clone())
        );
        assert_eq!(
            turns("mrope", [2, 0, 6, 0]),
            (vec![0, 0, 2, 2, 2, 2, 2, 2], each.clone())
        );
        assert_eq!(
            turns("imrope", [4, 2, 2, 0]),
            (vec![0, 1, 2, 0, 1, 2, 0, 3], each)
        );
        assert_eq!(
            turns("vision", [4, 4, 0, 0]),
            (vec![0, 0, 0, 0, 1, 1, 1, 1], vec![0, 1, 2, 3, 0, 1, 2, 3])
        );
    }

    /// ggml's `rope_yarn_corr_dims` for 128 dims, 4096 tokens, base 10000, betas 32 and 1, computed in Python.
    #[test]
    fn yarn_goes_over_where_ggml_does() {
        let list = With {
            dims: 128,
            scale: 0.25,
            extrapolation: 1.0,
            ..PLAIN
        }
        .list();
        let mut graph = GraphBuilder::new(0);
        let x = graph.tensor("x", spec("f32[5, 128]")).unwrap();
        let p = graph.tensor("p", spec("i32[5]")).unwrap();
        let inputs = [x, p, Value::Absent];
        let parts = Parts::of(&rotary_embedding, &graph, &inputs, &list).unwrap();
        let turns = Turns::of(&parts.call()).unwrap();
        assert_eq!(turns.ramp(), (20.0, 46.0));
    }
}
