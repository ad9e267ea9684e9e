//! Einstein summation.

use hotcell_proto::limits;

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value, brief},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, shaped},
        ops,
        rules::{Specs, Values, cast_to, one, plain, promoted, reshape_to, spec_of},
    },
    shape::{Dim, Shape},
};

ops! {
    /// Einstein summation (NumPy's `einsum`): `equation` names each tensor's axes by letters, as `ij,jk->ik` does; a letter that
    /// the result lacks is summed over, one that stands twice in a tensor takes its diagonal, and `...` stands for axes
    /// that broadcast from the last on. Without `->` the result has those and the letters that stand once, sorted. Tensors are
    /// joined from the first on; there may be 8 different axes in all. Sums of f16 and bf16 are f32 and rounded once; integers wrap.
    einsum(tensors = many; equation: Bytes(256)) -> one { shapes: "as the equation says", dtypes: "integers, floats, c64 → promote(tensors)", effect: Effect::None, infer: einsum_spec, decompose: Some(einsum_of_parts) }
}

/// What stands for an axis: a letter, or a digit for one of `...`, 0 for the last.
type Label = u8;

/// The axes of each tensor and of the result.
struct Equation {
    tensors: Vec<Vec<Label>>,
    result: Vec<Label>,
    /// Every label and its size.
    sizes: Vec<(Label, usize)>,
}

impl Equation {
    /// # Errors
    /// When the equation cannot be read or does not go with the tensors.
    fn read(call: &Call<'_>) -> Result<Self, GraphError> {
        let text: Vec<u8> = (call.bytes(0)?.iter().copied())
            .filter(|c| !c.is_ascii_whitespace())
            .collect();
        let known = |c: &u8| c.is_ascii_alphabetic() || b".,->".contains(c);
        if !text.iter().all(known) {
            return Err(call.error("the equation has letters, commas, ... and -> only"));
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        let (left, right) = match text.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (text.as_str(), None),
        };
        let terms: Vec<&str> = left.split(',').collect();
        if terms.len() != call.inputs.len() {
            return Err(call.error(format_args!(
                "the equation is of {} tensors, not of {}",
                terms.len(),
                call.inputs.len()
            )));
        }
        let mut read = Self {
            tensors: vec![],
            result: vec![],
            sizes: vec![],
        };
        for (i, term) in terms.iter().enumerate() {
            let t = plain(call, i)?;
            let labels = labels(call, term, t.shape.rank())?;
            for (&label, dim) in labels.iter().zip(t.shape.dims()) {
                let Dim::Fixed(n) = *dim else {
                    return Err(call.error("no tensor can have the row dimension"));
                };
                read.size(call, label, n)?;
            }
            read.tensors.push(labels);
        }
        if read.sizes.len() > limits::MAX_RANK {
            return Err(call.error(format_args!(
                "there are {} different axes, more than {}",
                read.sizes.len(),
                limits::MAX_RANK
            )));
        }
        let mut dots: Vec<Label> = read.sizes.iter().map(|s| s.0).collect();
        dots.retain(u8::is_ascii_digit);
        dots.sort_unstable_by(|a, b| b.cmp(a));
        read.result = match right {
            Some(right) => {
                let letters = right.replace("...", "").len();
                let count = if right.contains("...") { dots.len() } else { 0 };
                labels(call, right, letters + count)?
            }
            None => {
                let all: Vec<Label> = read.tensors.concat();
                let once = |l: &Label| all.iter().filter(|o| *o == l).count() == 1;
                let mut letters: Vec<Label> = (all.iter().copied())
                    .filter(|l| l.is_ascii_alphabetic() && once(l))
                    .collect();
                letters.sort_unstable();
                dots.into_iter().chain(letters).collect()
            }
        };
        for (i, label) in read.result.iter().enumerate() {
            if read.result[..i].contains(label) || read.of(*label).is_none() {
                let shown = char::from(*label);
                return Err(call.error(format_args!(
                    "{shown} must stand once in the result and in some tensor"
                )));
            }
        }
        Ok(read)
    }

    /// Notes the size of an axis; 1 goes with any.
    fn size(&mut self, call: &Call<'_>, label: Label, n: usize) -> Result<(), GraphError> {
        match self.sizes.iter_mut().find(|s| s.0 == label) {
            None => self.sizes.push((label, n)),
            Some((_, known)) if *known == n || n == 1 => {}
            Some((_, known)) if *known == 1 => *known = n,
            Some((_, known)) => {
                let shown = char::from(label);
                return Err(call.error(format_args!("{shown} is of size {known} and of size {n}")));
            }
        }
        Ok(())
    }

    fn of(&self, label: Label) -> Option<usize> {
        let found = self.sizes.iter().find(|s| s.0 == label);
        found.map(|s| s.1)
    }

    fn dims(&self, labels: &[Label]) -> Vec<Dim> {
        let sizes = labels.iter().map(|l| self.of(*l).unwrap_or(1));
        sizes.map(Dim::Fixed).collect()
    }

    /// Whether tensor `i` or a later one, or the result, has an axis.
    fn needed(&self, label: Label, from: usize) -> bool {
        let later = self.tensors.get(from..).unwrap_or_default();
        self.result.contains(&label) || later.iter().any(|t| t.contains(&label))
    }

    /// The axes that are left of what is joined of the tensors before `next`, which it need not be summed over.
    fn left(&self, labels: &[Label], next: usize) -> Vec<Label> {
        let left = labels.iter().copied();
        left.filter(|l| self.needed(*l, next)).collect()
    }
}

/// The labels of a term for a tensor of `rank` axes.
fn labels(call: &Call<'_>, term: &str, rank: usize) -> Result<Vec<Label>, GraphError> {
    let fits = || {
        call.error(format_args!(
            "{:?} does not name the axes of a tensor of {rank}",
            brief(term, 40)
        ))
    };
    let (before, after) = match term.split_once("...") {
        Some((before, after)) => (before, Some(after)),
        None => (term, None),
    };
    let letters = |text: &str| text.bytes().all(|c| c.is_ascii_alphabetic());
    if !letters(before) || !after.is_none_or(letters) {
        return Err(fits());
    }
    let named = before.len() + after.map_or(0, str::len);
    let dots = rank.checked_sub(named).ok_or_else(fits)?;
    if (after.is_none() && dots > 0) || dots > limits::MAX_RANK {
        return Err(fits());
    }
    let digits = (0..dots as u8).rev().map(|i| b'0' + i);
    let after = after.unwrap_or_default().bytes();
    Ok(before.bytes().chain(digits).chain(after).collect())
}

/// Each label once.
fn distinct(labels: &[Label]) -> Vec<Label> {
    let mut seen = Vec::new();
    for label in labels {
        if !seen.contains(label) {
            seen.push(*label);
        }
    }
    seen
}

fn einsum_spec(call: &Call<'_>) -> Specs {
    let equation = Equation::read(call)?;
    let dtype = promoted(call, 0)?;
    if dtype == DType::Bool {
        return Err(call.error("all tensors are bool; cast one first"));
    }
    // Nothing on the way may be larger than a tensor can be.
    let fits = |labels: &[Label]| {
        let shape = Shape::new(equation.dims(labels));
        shape.map_err(|e| call.error(e))
    };
    let mut joined: Vec<Label> = vec![];
    for (i, tensor) in equation.tensors.iter().enumerate() {
        joined = distinct(&[&joined[..], tensor].concat());
        if dtype.is_integer() {
            fits(&joined)?;
        }
        joined = equation.left(&joined, i + 1);
        fits(&joined)?;
    }
    one(call, dtype, equation.dims(&equation.result))
}

/// A value and its axes.
struct Term {
    value: Value,
    labels: Vec<Label>,
}

impl Term {
    /// In this order, which names each of its axes.
    fn ordered(self, graph: &mut GraphBuilder, to: &[Label]) -> Result<Value, GraphError> {
        let place = |l: &Label| self.labels.iter().position(|o| o == l);
        let order: Vec<i64> = to.iter().filter_map(place).map(|i| i as i64).collect();
        if order.iter().enumerate().all(|(i, at)| i as i64 == *at) {
            return Ok(self.value);
        }
        graph.transpose(self.value, &order)
    }

    /// Summed over what is not kept.
    fn summed(
        mut self,
        graph: &mut GraphBuilder,
        kept: impl Fn(Label) -> bool,
    ) -> Result<Self, GraphError> {
        let gone = |(_, l): &(usize, &Label)| !kept(**l);
        let axes = self.labels.iter().enumerate().filter(gone);
        let axes: Vec<i64> = axes.map(|(i, _)| i as i64).collect();
        if !axes.is_empty() {
            let dtype = spec_of(graph, self.value)?.dtype;
            let sum = graph.reduce_sum(self.value, &axes, false)?;
            // Of narrow integers the sum is wider, and wraps here.
            self.value = cast_to(graph, sum, dtype)?;
            self.labels.retain(|l| kept(*l));
        }
        Ok(self)
    }
}

/// A tensor with each of its labels once, and none for an axis of 1 that stands for more.
fn term(
    graph: &mut GraphBuilder,
    equation: &Equation,
    value: Value,
    labels: &[Label],
) -> Result<Term, GraphError> {
    let mut term = Term {
        value,
        labels: labels.to_vec(),
    };
    let dims = spec_of(graph, value)?.shape.dims().to_vec();
    let stretched =
        |i: usize, l: Label| dims.get(i) == Some(&Dim::Fixed(1)) && equation.of(l) != Some(1);
    let narrow: Vec<usize> = (0..dims.len())
        .filter(|&i| stretched(i, labels[i]))
        .collect();
    if !narrow.is_empty() {
        let axes: Vec<i64> = narrow.iter().map(|&i| i as i64).collect();
        term.value = graph.squeeze(term.value, &axes)?;
        let left = (0..dims.len()).filter(|i| !narrow.contains(i));
        term.labels = left.map(|i| labels[i]).collect();
    }
    while let Some((a, b)) = twice(&term.labels) {
        let label = term.labels[a];
        term.value = graph.diagonal(term.value, 0, a as i64, b as i64)?;
        term.labels.remove(b);
        term.labels.remove(a);
        term.labels.push(label);
    }
    Ok(term)
}

/// Where a label stands for the first and the second time.
fn twice(labels: &[Label]) -> Option<(usize, usize)> {
    labels.iter().enumerate().find_map(|(b, label)| {
        let a = labels[..b].iter().position(|o| o == label)?;
        Some((a, b))
    })
}

/// Two terms as one, without the axes that nobody needs.
fn joined(
    graph: &mut GraphBuilder,
    equation: &Equation,
    a: Term,
    b: Term,
    next: usize,
) -> Result<Term, GraphError> {
    let needed = |l: Label| equation.needed(l, next);
    let a = {
        let other = b.labels.clone();
        a.summed(graph, |l| needed(l) || other.contains(&l))?
    };
    let b = {
        let other = a.labels.clone();
        b.summed(graph, |l| needed(l) || other.contains(&l))?
    };
    let both = |l: &&Label| b.labels.contains(l);
    let (shared, own): (Vec<&Label>, Vec<&Label>) = a.labels.iter().partition(both);
    let batch: Vec<Label> = shared
        .iter()
        .filter(|l| needed(***l))
        .map(|l| **l)
        .collect();
    let inner: Vec<Label> = shared
        .iter()
        .filter(|l| !needed(***l))
        .map(|l| **l)
        .collect();
    let own: Vec<Label> = own.into_iter().copied().collect();
    let others: Vec<Label> = (b.labels.iter().copied())
        .filter(|l| !a.labels.contains(l))
        .collect();
    let dtype = spec_of(graph, a.value)?.dtype;
    let labels = [&batch[..], &own, &others].concat();
    let count = |labels: &[Label]| {
        let sizes = labels.iter().map(|l| equation.of(*l).unwrap_or(1));
        Dim::Fixed(sizes.product())
    };
    let a = a.ordered(graph, &[&batch[..], &own, &inner].concat())?;
    if dtype.kind() == Kind::Float || dtype.kind() == Kind::Complex {
        let b = b.ordered(graph, &[&batch[..], &inner, &others].concat())?;
        let a = shaped(graph, a, [count(&batch), count(&own), count(&inner)])?;
        let b = shaped(graph, b, [count(&batch), count(&inner), count(&others)])?;
        let product = graph.matmul(a, b)?;
        let value = shaped(graph, product, equation.dims(&labels))?;
        return Ok(Term { value, labels });
    }
    // Integers have no matrix products: all of it, then its sums.
    let b = b.ordered(graph, &[&batch[..], &others, &inner].concat())?;
    let ones = |n: usize| std::iter::repeat_n(Dim::Fixed(1), n);
    let wide = |before: &[Label], gap: usize, after: &[Label]| -> Vec<Dim> {
        let (before, after) = (equation.dims(before), equation.dims(after));
        before.into_iter().chain(ones(gap)).chain(after).collect()
    };
    let left = [&batch[..], &own].concat();
    let a = shaped(graph, a, wide(&left, others.len(), &inner))?;
    let right = [&others[..], &inner].concat();
    let b = shaped(graph, b, wide(&batch, own.len(), &right))?;
    let value = graph.mul(a, b)?;
    let all = [&labels[..], &inner].concat();
    Term { value, labels: all }.summed(graph, |l| labels.contains(&l))
}

fn einsum_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&einsum, graph, inputs, attributes)?;
    let call = parts.call();
    let equation = Equation::read(&call)?;
    let dtype = promoted(&call, 0)?;
    let mut terms = inputs.iter().zip(&equation.tensors);
    let (&first, labels) = terms.next().ok_or(GraphError::NoResult)?;
    let first = cast_to(graph, first, dtype.working())?;
    let mut sum = term(graph, &equation, first, labels)?;
    for (i, (&next, labels)) in terms.enumerate() {
        let next = cast_to(graph, next, dtype.working())?;
        let next = term(graph, &equation, next, labels)?;
        sum = joined(graph, &equation, sum, next, i + 2)?;
    }
    let sum = sum.summed(graph, |l| equation.result.contains(&l))?;
    let labels = sum.labels.clone();
    let order: Vec<Label> = (equation.result.iter().copied())
        .filter(|l| labels.contains(l))
        .collect();
    let value = sum.ordered(graph, &order)?;
    // An axis that only tensors with 1 there have is 1; each other one is there.
    let shape = Shape::new(equation.dims(&equation.result))?;
    let value = cast_to(graph, value, dtype)?;
    // A node of its own, where nothing had to be done.
    if inputs.contains(&value) {
        return Ok(vec![graph.reshape(value, shape)?]);
    }
    Ok(vec![reshape_to(graph, value, shape)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, table};

    fn of(equation: &str) -> [Attribute; 1] {
        [Attribute::Bytes(equation.as_bytes().to_vec())]
    }

    #[test]
    fn parts_have_the_specs_of_the_equation() {
        for (equation, inputs) in [
            ("ij,jk->ik", &["f16[3, 4]", "bf16[4, 5]"][..]),
            ("ii", &["i8[3, 3]"]),
            ("ij,ij->", &["u8[3, 4]", "i8[3, 4]"]),
            ("...i,i->...", &["c64[2, 1, 3]", "f32[3]"]),
            ("a,b,ab->ba", &["f32[2]", "f64[0]", "f32[2, 1]"]),
            ("->", &["f32[]"]),
        ] {
            decomposes(&einsum, inputs, &of(equation));
        }
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        table(
            &einsum,
            &[
                (&["f32[3, 4]"], &of("ij->ji"), "f32[4, 3]"),
                (&["f32[3, 4]"], &of("i->i"), "!does not name the axes"),
                (&["f32[3, 4]"], &of("ij,jk->"), "!of 2 tensors"),
                (&["f32[3, 4]"], &of("ii->i"), "!of size 3 and of size 4"),
                (&["f32[3, 4]"], &of("ij->k"), "!stand once"),
                (&["f32[3, 4]"], &of("i1->i"), "!letters"),
                (&["f32[rows, 4]"], &of("ij->j"), "!row dimension"),
            ],
        );
    }
}
