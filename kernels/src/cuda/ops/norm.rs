//! Norms of rows.

use hotcell_graph::{DType, Shape, op::Call};

use super::{Cx, Entry, Kernel, Made, Wanted, wanted::Numbers};
use crate::{
    backend::DeviceError,
    cuda::{
        gpu::{Arguments, Grid},
        join::Following,
    },
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "layer_norm",
        make: layer_norm,
    },
    Entry {
        op: "rms_norm",
        make: rms_norm,
    },
];

/// A norm over the innermost axis, of f32.
#[derive(Clone)]
struct Norm {
    names: Names,
    x: Shape,
    n: u32,
    /// Of the optional inputs: whether they are given.
    given: Vec<bool>,
    eps: f32,
    /// What is made of the result as well.
    numbers: Option<Numbers>,
}

/// The kernels of a norm: of it alone, and of those that make numbers of 8 bits of its result, if there are such.
#[derive(Clone, Copy)]
struct Names {
    alone: &'static str,
    with: Option<[&'static str; 2]>,
}

const LAYER_NORM: Names = Names {
    alone: "layer_norm_f32",
    with: None,
};
const RMS_NORM: Names = Names {
    alone: "rms_norm_f32",
    with: Some(["rms_norm_q8", "rms_norm_q8k"]),
};
const ADD_RMS_NORM: Names = Names {
    alone: "add_rms_norm_f32",
    with: Some(["add_rms_norm_q8", "add_rms_norm_q8k"]),
};

impl Norm {
    fn of(call: &Call<'_>, names: Names) -> Option<Self> {
        let x = call.tensor(0).ok()?;
        let mut given = Vec::new();
        for i in 1..call.inputs.len() {
            let vector = call.optional(i).ok()?;
            if vector.is_some_and(|v| v.dtype != DType::F32) {
                return None;
            }
            given.push(vector.is_some());
        }
        // Kernels count some elements past a row's end.
        const MOST: i32 = i32::MAX - 1024;
        let n = i32::try_from(x.shape.inner()?).ok();
        let n = n.filter(|n| (1..=MOST).contains(n))?;
        (x.dtype == DType::F32).then_some(Self {
            names,
            x: x.shape.clone(),
            n: n.unsigned_abs(),
            given,
            eps: call.float(0).ok()? as f32,
            numbers: None,
        })
    }

    fn name(&self) -> &'static str {
        match (&self.numbers, self.names.with) {
            (Some(numbers), Some([of_32, of_256])) => numbers.blocks.of(of_32, of_256),
            _ => self.names.alone,
        }
    }

    /// The same with what is wanted of its result, where its kernels can.
    fn making(&self, wanted: &Wanted) -> Option<Self> {
        let Wanted::Numbers(numbers) = wanted else {
            return None;
        };
        // Rows that are whole blocks, as all that products have are.
        let fits = numbers.k == self.n as usize && numbers.k.is_multiple_of(numbers.blocks.len());
        self.names.with.filter(|_| fits && self.numbers.is_none())?;
        Some(Self {
            numbers: Some(numbers.clone()),
            ..self.clone()
        })
    }

    /// Launches it, told what comes before the row's length; the numbers go to a result's place.
    fn launch(&self, cx: &Cx<'_>, told: Arguments, place: usize) -> Result<(), DeviceError> {
        let elements = self.x.elements(cx.rows).ok_or_else(overflow)?;
        let rows = elements / self.n as usize;
        let grid = Grid {
            blocks: [u32::try_from(rows).map_err(|_| overflow())?, 1, 1],
            threads: [256, 1, 1],
            shared: 0,
        };
        let mut told = told.int(self.n).int(self.eps.to_bits());
        if let Some(numbers) = &self.numbers {
            told = numbers.told(told, cx.output(place)?, cx.rows)?;
        }
        // SAFETY: the kernel's arguments (norm.cu), of tensors of so many rows; what is made besides has as much memory as it
        // says.
        unsafe { cx.gpu.launch(self.name(), grid, &told) }
    }
}

fn made<K: Kernel + 'static>(norm: Norm, kernel: impl FnOnce(Norm) -> K) -> Made {
    let names = vec![norm.name()];
    (Box::new(kernel(norm)), names)
}

fn layer_norm(call: &Call<'_>) -> Option<Made> {
    Some(made(Norm::of(call, LAYER_NORM)?, Alone))
}

fn rms_norm(call: &Call<'_>) -> Option<Made> {
    Some(made(Norm::of(call, RMS_NORM)?, Alone))
}

/// A norm of its first input.
struct Alone(Norm);

impl Kernel for Alone {
    fn with(&self, wanted: &Wanted) -> Option<Made> {
        Some(made(self.0.making(wanted)?, Alone))
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let mut told = Arguments::default().word(cx.input(0)?);
        for (i, given) in self.0.given.iter().enumerate() {
            told = told.word(if *given { cx.input(i + 1)? } else { 0 });
        }
        self.0.launch(cx, told.word(cx.output(0)?), 1)
    }
}

/// A norm of a sum, which is a result as well.
struct OfSum(Norm);

/// What adds two tensors of one shape and norms the sum.
pub(super) fn added(nodes: &Following<'_>) -> Option<Made> {
    let [add, norm, ..] = &nodes.calls[..] else {
        return None;
    };
    let (a, b) = (add.tensor(0).ok()?, add.tensor(1).ok()?);
    let norm = Norm::of(norm, ADD_RMS_NORM)?;
    let is_one =
        a == b && a.dtype == DType::F32 && nodes.is_result(1, 0, 0) && norm.given == [true];
    is_one.then(|| made(norm, OfSum))
}

impl Kernel for OfSum {
    fn with(&self, wanted: &Wanted) -> Option<Made> {
        Some(made(self.0.making(wanted)?, OfSum))
    }

    /// Of its inputs the first two are added, the third is their sum, and the fourth the norm's.
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let told = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(cx.input(3)?)
            .word(cx.output(0)?)
            .word(cx.output(1)?);
        self.0.launch(cx, told, 2)
    }
}
