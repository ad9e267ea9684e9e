//! What a plan's kernels have made besides the values of the graph, once for all that want the same of the same.

use super::{
    ops::Wanted,
    plan::{DeviceNode, Side, Step, Work, padded},
};
use crate::{backend::DeviceError, memory::Lifetime};

/// What was made, of which values, and the number it has among them.
struct Made {
    wanted: Wanted,
    of: Vec<Option<usize>>,
    value: usize,
}

/// All of it in a plan.
pub(super) struct Also<'a> {
    on: &'a Side,
    fuse: bool,
    max_rows: usize,
    made: Vec<Made>,
}

impl<'a> Also<'a> {
    pub fn new(on: &'a Side, fuse: bool, max_rows: usize) -> Self {
        Self {
            on,
            fuse,
            max_rows,
            made: Vec::new(),
        }
    }

    /// The number of what the next step's kernel wants, which lives until then at least. Where nobody has made it, the step before does,
    /// whose result it is made of, if it can, or a step of its own.
    ///
    /// # Errors
    /// When it has more bytes than there can be.
    pub fn value(
        &mut self,
        wanted: Wanted,
        of: Vec<Option<usize>>,
        step: impl FnOnce(Work) -> Step,
        steps: &mut Vec<Step>,
        lives: &mut Vec<Option<Lifetime>>,
    ) -> Result<usize, DeviceError> {
        let value = lives.len();
        let made = (self.made.iter()).find(|made| made.of == of && made.wanted == wanted);
        let made = made.map(|made| made.value);
        let own = step(Work::Device(DeviceNode {
            kernel: wanted.kernel(),
            inputs: of.clone(),
            outputs: vec![value],
            scratch: None,
        }));
        let at = own.at;
        if let Some(made) = made {
            if let Some(Some(life)) = lives.get_mut(made) {
                life.last = at;
            }
            return Ok(made);
        }
        let bytes = padded(wanted.bytes(self.max_rows))?;
        let before = match steps.last_mut() {
            Some(step) if self.fuse => self.makes(step, &wanted, &of, value),
            _ => None,
        };
        if before.is_none() {
            steps.push(own);
        }
        lives.push(Some(Lifetime {
            bytes,
            first: before.unwrap_or(at),
            last: at,
        }));
        self.made.push(Made { wanted, of, value });
        Ok(value)
    }

    /// Has a step make it of its last result, if its kernel can; the nodes it is of.
    fn makes(
        &self,
        step: &mut Step,
        wanted: &Wanted,
        of: &[Option<usize>],
        value: usize,
    ) -> Option<usize> {
        let (Work::Device(node), [Some(of)]) = (&mut step.work, of) else {
            return None;
        };
        let (kernel, names) = node.kernel.with(wanted)?;
        let there = names.iter().all(|name| self.on.gpu.has(name));
        if !there || node.outputs.last() != Some(of) {
            return None;
        }
        node.kernel = kernel;
        node.outputs.push(value);
        Some(step.at)
    }
}
