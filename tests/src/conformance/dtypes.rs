//! Which dtypes the catalogue's rows take, found out by asking them, and of which there are cases.

use std::collections::{BTreeMap, BTreeSet};

use hotcell_graph::{
    CacheSpec, DType, Shape, TensorSpec,
    op::{Attribute, InputMode, OpRow, ValueSpec, find},
    shape::Dim,
};

use super::Case;

/// Elements of the innermost axis that whole blocks of every type fill.
const BLOCK: usize = 256;

/// Where a row has a dtype: an input, or an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(pub &'static str);

/// Dtypes by row and place.
pub type Dtypes = BTreeMap<(&'static str, Place), BTreeSet<&'static str>>;

/// A call that a row accepts, as a case makes it.
struct Accepted {
    row: &'static OpRow,
    inputs: Vec<ValueSpec>,
    attributes: Vec<Attribute>,
}

fn dtype_of(spec: &ValueSpec) -> Option<DType> {
    match spec {
        ValueSpec::Tensor(t) => Some(t.dtype),
        ValueSpec::Cache(c) => Some(c.dtype),
        ValueSpec::Absent => None,
    }
}

/// The spec with another dtype. `wide`: as much longer along the innermost axis as whole blocks need.
fn with_dtype(spec: &ValueSpec, dtype: DType, wide: bool) -> Option<ValueSpec> {
    Some(match spec {
        ValueSpec::Absent => ValueSpec::Absent,
        ValueSpec::Cache(_) if wide => return None,
        ValueSpec::Cache(c) => {
            let cache = CacheSpec { dtype, ..*c };
            // No graph has another one.
            cache.bytes()?;
            ValueSpec::Cache(cache)
        }
        ValueSpec::Tensor(t) => {
            let mut dims = t.shape.dims().to_vec();
            if let (true, Some(Dim::Fixed(inner))) = (wide, dims.last_mut()) {
                *inner *= BLOCK;
            }
            let shape = Shape::new(dims).ok()?;
            ValueSpec::Tensor(TensorSpec::new(dtype, shape).ok()?)
        }
    })
}

/// The place of input `i`: one of many is the last.
fn place(row: &OpRow, i: usize) -> Option<Place> {
    row.input(i).map(|input| Place(input.name))
}

impl Accepted {
    /// What a case asks of its row, unless it is refused.
    fn of(case: &Case) -> Option<Self> {
        let row = find(&case.op)?;
        if case.fails.is_some() {
            return None;
        }
        let graph = case.graph().ok()?;
        let node = graph.nodes().iter().rfind(|n| n.op.name == row.name)?;
        Some(Self {
            row,
            inputs: graph.input_specs(node).ok()?,
            attributes: node.attributes.clone(),
        })
    }

    /// By what its row's rule can tell it from others: not by sizes.
    fn kind(&self) -> String {
        let inputs = self.inputs.iter().map(|spec| match spec {
            ValueSpec::Tensor(t) => format!("{}/{}", t.dtype, t.shape.rank()),
            ValueSpec::Cache(c) => format!("cache {}", c.dtype),
            ValueSpec::Absent => "-".to_owned(),
        });
        let inputs: Vec<String> = inputs.collect();
        let attributes = self.attributes.iter().map(|a| match a {
            Attribute::Ints(_) | Attribute::Shape(_) | Attribute::Bytes(_) => String::new(),
            other => format!("{other:?}"),
        });
        let attributes: Vec<String> = attributes.collect();
        format!("{} {inputs:?} {attributes:?}", self.row.name)
    }

    /// Dtypes that it has.
    fn has(&self, into: &mut Dtypes) {
        for (i, spec) in self.inputs.iter().enumerate() {
            if let (Some(dtype), Some(place)) = (dtype_of(spec), place(self.row, i)) {
                let seen = into.entry((self.row.name, place)).or_default();
                seen.insert(dtype.name());
            }
        }
        for (spec, value) in self.row.attributes.iter().zip(&self.attributes) {
            if let Attribute::DType(dtype) = value {
                let seen = into.entry((self.row.name, Place(spec.name))).or_default();
                seen.insert(dtype.name());
            }
        }
    }

    fn accepts(&self, inputs: &[ValueSpec], attributes: &[Attribute]) -> bool {
        self.row.check(inputs, attributes).is_ok()
    }

    /// Whether the row takes `dtype` as input `i`: alone, with all that are as this one is, or with all.
    fn takes(&self, i: usize, dtype: DType) -> bool {
        let Some(own) = self.inputs.get(i).and_then(dtype_of) else {
            return false;
        };
        // One of many is like the others of them.
        let many = self.row.input(i).map(|s| s.mode) == Some(InputMode::Many);
        let inputs = || self.inputs.iter().enumerate();
        let beside = |j: usize| many && place(self.row, j) == place(self.row, i);
        let ways: [Vec<bool>; 3] = [
            inputs().map(|(j, _)| j == i || beside(j)).collect(),
            inputs()
                .map(|(_, spec)| dtype_of(spec) == Some(own))
                .collect(),
            inputs().map(|_| true).collect(),
        ];
        let wides: &[bool] = if dtype.is_block() {
            &[false, true]
        } else {
            &[false]
        };
        ways.iter().any(|chosen| {
            wides.iter().any(|&wide| {
                let replaced = self.inputs.iter().zip(chosen).map(|(spec, chosen)| {
                    if *chosen {
                        with_dtype(spec, dtype, wide)
                    } else {
                        Some(spec.clone())
                    }
                });
                let replaced: Option<Vec<_>> = replaced.collect();
                replaced.is_some_and(|inputs| self.accepts(&inputs, &self.attributes))
            })
        })
    }

    /// Dtypes that its row takes where it has one, as the rule says.
    fn may_have(&self, into: &mut Dtypes) {
        for &dtype in DType::ALL {
            for i in 0..self.inputs.len() {
                let Some(place) = place(self.row, i) else {
                    continue;
                };
                let known = into.entry((self.row.name, place)).or_default();
                if !known.contains(dtype.name()) && self.takes(i, dtype) {
                    known.insert(dtype.name());
                }
            }
            for (at, spec) in self.row.attributes.iter().enumerate() {
                let mut attributes = self.attributes.clone();
                let Some(value @ Attribute::DType(_)) = attributes.get_mut(at) else {
                    continue;
                };
                *value = Attribute::DType(dtype);
                if self.accepts(&self.inputs, &attributes) {
                    let known = into.entry((self.row.name, Place(spec.name))).or_default();
                    known.insert(dtype.name());
                }
            }
        }
    }
}

/// For every row and every place of a dtype in it, the dtypes that its rule takes there, and those of which there are cases.
/// The rule is asked with the calls that the cases make, each with one dtype in the place of another.
pub fn dtypes(cases: &[Case]) -> (Dtypes, Dtypes) {
    let (mut taken, mut seen, mut asked) = (Dtypes::new(), Dtypes::new(), BTreeSet::new());
    for accepted in cases.iter().filter_map(Accepted::of) {
        accepted.has(&mut seen);
        if asked.insert(accepted.kind()) {
            accepted.may_have(&mut taken);
        }
    }
    (taken, seen)
}
