//! Computing from weights in the form that a device likes best.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    rc::Rc,
};

use hotcell_graph::Value;
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    communicator::Share,
    cpu::pack::PANEL,
    plan::Slot,
};

use super::{Part, Parts, RunShape, Runner, WeightRegion, pattern};
use crate::{
    model::{
        graph::body,
        weave::{BuildError, Source},
    },
    weights::{ModelSource, Weight},
};

/// An input that has another form from which the same bits come faster.
pub(super) struct Packable {
    pub graph: Part,
    pub slot: Slot,
    pub weight: String,
    /// Which of its rows, if not all.
    pub rows: Option<Range<usize>>,
}

/// Whether rows of a packed matrix are a packed matrix.
pub(super) fn is_whole_panels(rows: &Range<usize>) -> bool {
    rows.start.is_multiple_of(PANEL) && rows.len().is_multiple_of(PANEL)
}

/// Weights of the layers of other stages which plans like this one's would rather have packed: those that they multiply with.
pub(super) fn packable_elsewhere(
    source: &ModelSource,
    shape: &RunShape,
) -> Result<BTreeSet<String>, BuildError> {
    let mut all = BTreeSet::new();
    let Share {
        rank: own, members, ..
    } = shape.parts.stage();
    for rank in (0..members).filter(|rank| *rank != own) {
        let share = Share { rank, members };
        let parts = Parts {
            share,
            ..shape.parts
        };
        let shape = RunShape { parts, ..*shape };
        let body = body(pattern(source, &shape))?;
        for node in body.graph.nodes() {
            let weight = match (node.op.name, node.inputs.as_slice()) {
                ("mul_mat" | "mul_mat_scaled", &[_, Value::Input(i), ..])
                | ("mul_mat_id" | "mul_mat_id_scaled", &[Value::Input(i), ..]) => {
                    body.sources.get(i as usize)
                }
                _ => None,
            };
            if let Some(Source::Weight { name, rows: None }) = weight {
                all.insert(name.clone());
            }
        }
    }
    Ok(all)
}

impl Runner {
    /// The weights that the plans would rather have packed, those of other stages too.
    pub fn packable(&self) -> BTreeSet<String> {
        let own = self.packable.iter().map(|p| &p.weight);
        own.chain(&self.packable_elsewhere).cloned().collect()
    }

    /// Computes from these packed weights from now on, with the same bits; from the others as they are in the model.
    ///
    /// # Errors
    /// When one does not fit. All are computed from as they are in the model then.
    pub fn use_packed(
        &mut self,
        device: &dyn Device,
        weights: &BTreeMap<String, Weight>,
    ) -> Result<(), DeviceError> {
        let bound = self.bind_packed(|name, rows| {
            let weight = weights.get(name);
            // A packed matrix has its rows, sixteen by sixteen, where they are in the file.
            let weight = match rows {
                None => weight.cloned(),
                Some(rows) => weight.and_then(|weight| weight.rows(rows.clone())),
            };
            let import = |weight| device.import(Rc::new(WeightRegion(weight)));
            weight.map(import).transpose()
        });
        if bound.is_err() {
            self.bind_packed(|_, _| Ok(None))?;
        } else if let Some(others) = &self.others {
            others.use_packed(weights);
        }
        bound
    }

    fn bind_packed(
        &mut self,
        buffer: impl Fn(&str, Option<&Range<usize>>) -> Result<Option<Buffer>, DeviceError>,
    ) -> Result<(), DeviceError> {
        self.packed.clear();
        for input in &self.packable {
            let buffer = buffer(&input.weight, input.rows.as_ref())?;
            let plan = match input.graph {
                Part::Body => &mut self.body,
                Part::Head => &mut self.head,
                Part::Ending => &mut self.ending,
            };
            plan.bind_packed(input.slot, buffer.as_ref(), 0)?;
            let looked = match (input.graph, &mut self.tap) {
                (Part::Body, Some(tap)) => Some(&mut tap.body),
                (Part::Head, Some(tap)) => tap.head.as_mut(),
                _ => None,
            };
            if let Some(looked) = looked {
                looked.plan.bind_packed(input.slot, buffer.as_ref(), 0)?;
            }
            let packed = buffer.map(|buffer| (input.graph, input.slot, buffer));
            self.packed.extend(packed);
        }
        Ok(())
    }
}
