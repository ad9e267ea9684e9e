//! Elementwise ops that follow one another and have results of one shape: one launch, in which what is between them stays in registers.

use hotcell_graph::{DType, Shape, Value, op::Call};

use super::{
    Cx, Kernel, Made,
    elementwise::number_in_group,
    layout::{Layout, broadcast, dims_at, grid},
};
use crate::{
    backend::DeviceError,
    cuda::{gpu::Arguments, join::Following},
    part::overflow,
};

/// Operands from outside, and ops, at most (`INPUTS` and `MOST` in `generic_group.cu`).
const INPUTS: usize = 4;
const MOST: usize = 8;

/// An op: its number, and its operands, of which the numbers from [`INPUTS`] on are results of the ops before it.
struct Op {
    number: u64,
    operands: [usize; 2],
    /// Whether its result is read by others.
    is_stored: bool,
}

struct Group {
    name: &'static str,
    ops: Vec<Op>,
    /// Operands from outside: which of the step's inputs, and their shapes.
    inputs: Vec<(usize, Shape)>,
    result: Shape,
}

/// As many of the nodes as can be one launch, and how many; at least two.
pub(super) fn group(nodes: &Following<'_>) -> Option<(usize, Made)> {
    let (dtype, result) = result_of(nodes.calls.first()?)?;
    let name = match dtype {
        DType::F32 => "group_f32",
        DType::F16 => "group_f16",
        DType::BF16 => "group_bf16",
        _ => return None,
    };
    let (mut ops, mut values): (Vec<Op>, Vec<Value>) = (Vec::new(), Vec::new());
    let (mut inputs, mut before) = (Vec::new(), 0);
    for (n, call) in nodes.calls.iter().enumerate().take(MOST) {
        let fits = result_of(call).is_some_and(|of| of == (dtype, result.clone()));
        let Some(number) = number_in_group(call).filter(|_| fits) else {
            break;
        };
        let mut operands = [0; 2];
        let (values_then, inputs_then) = (values.len(), inputs.len());
        for (i, operand) in operands.iter_mut().enumerate().take(call.inputs.len()) {
            if let Some(of) = (0..n).find(|of| nodes.is_result(n, i, *of)) {
                *operand = INPUTS + of;
                continue;
            }
            let value = nodes.input(n, i)?;
            *operand = match values.iter().position(|v| *v == value) {
                Some(at) => at,
                None => {
                    values.push(value);
                    inputs.push((before + i, call.tensor(i).ok()?.shape.clone()));
                    values.len() - 1
                }
            };
        }
        if call.inputs.len() == 1 {
            operands[1] = operands[0];
        }
        if values.len() > INPUTS {
            values.truncate(values_then);
            inputs.truncate(inputs_then);
            break;
        }
        before += call.inputs.len();
        ops.push(Op {
            number,
            operands,
            is_stored: true,
        });
    }
    let count = ops.len();
    for (n, op) in ops.iter_mut().enumerate() {
        op.is_stored = !nodes.is_within(n, count);
    }
    let kernel = Group {
        name,
        ops,
        inputs,
        result,
    };
    (count > 1).then(|| -> (usize, Made) { (count, (Box::new(kernel), vec![name])) })
}

/// Dtype and shape of an op's one result.
fn result_of(call: &Call<'_>) -> Option<(DType, Shape)> {
    let results = (call.op.infer)(call).ok()?;
    match &results[..] {
        [result] => Some((result.dtype, result.shape.clone())),
        _ => None,
    }
}

impl Group {
    /// The program as the kernel takes it.
    fn words(&self, cx: &Cx<'_>) -> Result<Vec<u64>, DeviceError> {
        let mut words = vec![0; 1 + 4 * MOST];
        words[0] = self.ops.len() as u64;
        for (n, op) in self.ops.iter().enumerate().take(MOST) {
            let [a, b] = op.operands.map(|operand| operand as u64);
            let out = if op.is_stored { cx.output(n)? } else { 0 };
            for (part, word) in [op.number, a, b, out].into_iter().enumerate() {
                words[1 + part * MOST + n] = word;
            }
        }
        Ok(words)
    }
}

impl Kernel for Group {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let dims = dims_at(&self.result, cx.rows);
        let strides = |(_, shape): &(usize, Shape)| broadcast(&dims_at(shape, cx.rows), &dims);
        let mut strides: Vec<Vec<i64>> = self.inputs.iter().map(strides).collect();
        let addresses = self.inputs.iter().map(|(i, _)| cx.input(*i));
        let mut addresses = addresses.collect::<Result<Vec<u64>, _>>()?;
        // What is not there is the first one's first element, which nobody uses.
        let first = *addresses.first().ok_or_else(overflow)?;
        addresses.resize(INPUTS, first);
        strides.resize(INPUTS, vec![0; dims.len()]);
        let layout = Layout::new(&dims, &strides).ok_or_else(overflow)?;
        let arguments = Arguments::default()
            .block(&self.words(cx)?)
            .block(&addresses)
            .block(&layout.words());
        let grid = grid(layout.elements());
        // SAFETY: the kernel's arguments (generic_group.cu), of tensors of these shapes.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::elementwise::FUNCTIONS_FROM, *};

    #[test]
    fn the_kernel_has_the_same_limits() {
        let source = include_str!("../generic_group.cu");
        let line = format!(
            "constexpr int INPUTS = {INPUTS}, MOST = {MOST}, FUNCTIONS = {FUNCTIONS_FROM};"
        );
        assert!(source.contains(&line), "{line}");
    }
}
