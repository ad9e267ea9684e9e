//! Every elementwise op and reduction at 64 MiB per operand, as a fraction of what memory can do.

use anyhow::{Context, Result};
use hotcell_graph::{
    DType, GraphBuilder, Shape, TensorSpec,
    op::{
        self, Attribute, AttributeKind, InputMode, OpRow, ValueSpec, activation, binary, reduce,
        unary,
    },
};
use hotcell_kernels::cpu::{CpuDevice, path::CpuPath};
use hotcell_tests::bench::{Goal, figure, median};

use crate::{Bound, memory::Triad, typical};

/// Bytes of an operand.
const BYTES: usize = 64 << 20;
const ROUNDS: usize = 5;
/// Times the whole list is gone through: what else runs on the machine, or beside it on the same silicon, comes in spells
/// that a case's own rounds lie within.
const PASSES: usize = 5;
/// Elements of the innermost axis.
const INNER: usize = 4096;

/// An op, the dtype of its operands, and the axis it works along (none: all).
struct Case {
    row: &'static OpRow,
    dtype: DType,
    axis: Option<i64>,
}

impl Case {
    fn label(&self) -> String {
        let axis = match (is_reduction(self.row), self.axis) {
            (false, _) => String::new(),
            (true, None) => " of all".to_owned(),
            (true, Some(axis)) => format!(" along {axis}"),
        };
        format!("{} {}{axis}", self.row.name, self.dtype)
    }

    fn inputs(&self) -> Result<Vec<ValueSpec>> {
        let full = [BYTES / self.dtype.block_bytes() / INNER, INNER];
        let input = |(i, input): (usize, &op::InputSpec)| {
            // Limits of a clamp are numbers; the condition of a choice is bool.
            let dims: &[usize] = match input.mode {
                InputMode::Optional => &[],
                _ => &full,
            };
            let dtype = match (self.row.name, i) {
                ("where", 0) => DType::Bool,
                _ => self.dtype,
            };
            let spec = TensorSpec::new(dtype, Shape::fixed(dims)?)?;
            Ok(ValueSpec::Tensor(spec))
        };
        self.row.inputs.iter().enumerate().map(input).collect()
    }

    fn attributes(&self) -> Vec<Attribute> {
        let cast = match self.dtype {
            DType::F32 => DType::BF16,
            _ => DType::F32,
        };
        let attribute = |a: &op::AttributeSpec| match a.kind {
            AttributeKind::Int(..) if a.name == "axis" => Attribute::Int(self.axis.unwrap_or(-1)),
            AttributeKind::Int(lo, hi) => Attribute::Int(0i64.clamp(lo, hi)),
            AttributeKind::Float(lo, hi) => Attribute::Float(1.0f64.clamp(lo, hi)),
            AttributeKind::Bool => Attribute::Bool(false),
            AttributeKind::Ints(..) => Attribute::Ints(self.axis.into_iter().collect()),
            AttributeKind::DType => Attribute::DType(cast),
            AttributeKind::Name(names) => Attribute::Name(names.concat()),
            AttributeKind::Shape => Attribute::Shape(Shape::default()),
            AttributeKind::Bytes(_) => Attribute::Bytes(vec![]),
        };
        self.row.attributes.iter().map(attribute).collect()
    }

    fn fits(&self) -> bool {
        let inputs = self.inputs();
        inputs.is_ok_and(|inputs| self.row.check(&inputs, &self.attributes()).is_ok())
    }
}

fn is_reduction(row: &'static OpRow) -> bool {
    reduce::ROWS.iter().any(|r| r.name == row.name)
}

/// Every row in f32 (i32 where it takes no floats), and some in narrower dtypes.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let rows = [unary::ROWS, binary::ROWS, activation::ROWS, reduce::ROWS];
    for row in rows.into_iter().flatten().copied() {
        let axes: &[Option<i64>] = match is_reduction(row) {
            false => &[None],
            true if row.attributes.iter().any(|a| a.name == "axis") => &[Some(-1), Some(0)],
            true => &[None, Some(-1), Some(0)],
        };
        for &axis in axes {
            let of = |dtype| Case { row, dtype, axis };
            let mut fit = [DType::F32, DType::I32].into_iter().map(of);
            cases.extend(fit.find(Case::fits));
        }
    }
    let some = [
        "add",
        "mul",
        "maximum",
        "exp",
        "silu",
        "cast",
        "reduce_sum",
        "reduce_max",
    ];
    for row in some.into_iter().filter_map(op::find) {
        let dtypes = [DType::BF16, DType::F16, DType::I32, DType::I8];
        let of = |dtype| Case {
            row,
            dtype,
            axis: None,
        };
        cases.extend(dtypes.into_iter().map(of).filter(Case::fits));
    }
    cases
}

/// Small numbers of a dtype, within what every op takes well. For products, numbers around 1: such small ones soon
/// multiply to what is below the normal numbers, and an Intel processor takes a hundred cycles for each of those.
fn numbers(dtype: DType, count: usize, around_one: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.block_bytes());
    for i in 0..count {
        let small = (i * 7 % 31) as u8;
        let real = match around_one {
            true => f32::from(small) / 150.0 + 0.9,
            false => f32::from(small) / 40.0 + 0.1,
        };
        match dtype {
            DType::F32 => bytes.extend(real.to_ne_bytes()),
            DType::BF16 => bytes.extend(half::bf16::from_f32(real).to_ne_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f32(real).to_ne_bytes()),
            DType::Bool => bytes.push(small % 2),
            _ => {
                let mut integer = [0; 8];
                integer[0] = small % 20 + 1;
                bytes.extend(&integer[..dtype.block_bytes()]);
            }
        }
    }
    bytes
}

/// Prints the figures.
pub fn measure() -> Result<()> {
    let device = CpuDevice::with_path(crate::threads() as u32, CpuPath::detect())?;
    let mut triad = Triad::new(BYTES / 4);
    triad.run();
    let mut cases = cases();
    let only: Vec<String> = std::env::args()
        .filter_map(|a| Some(a.strip_prefix("--op=")?.to_owned()))
        .collect();
    if !only.is_empty() {
        cases.retain(|case| only.iter().any(|name| name == case.row.name));
    }
    let mut measured: Vec<[Vec<f64>; 2]> = cases.iter().map(|_| Default::default()).collect();
    let (mut bandwidths, mut refused) = (Vec::new(), 0);
    for pass in 0..PASSES {
        for (case, [fractions, times]) in cases.iter().zip(&mut measured) {
            match one(&device, case, &mut triad) {
                Ok((fraction, time, bandwidth)) => {
                    fractions.push(fraction);
                    times.push(time);
                    bandwidths.push(bandwidth);
                }
                Err(error) if pass == 0 => {
                    println!("{} cannot be measured: {error:#}", case.label());
                    refused += 1;
                }
                Err(_) => {}
            }
        }
    }
    let medians = cases.iter().zip(measured);
    let medians = medians.filter(|(_, [fractions, _])| !fractions.is_empty());
    let mut fractions: Vec<(f64, f64, String)> = medians
        .map(|(case, [fractions, times])| (median(fractions), median(times), case.label()))
        .collect();
    fractions.sort_by(|a, b| a.0.total_cmp(&b.0));
    println!(
        "triad: {:.1} GB/s; {} cases, the worst:",
        median(bandwidths) / 1e9,
        fractions.len()
    );
    let worst = fractions.first().context("nothing was measured")?.0;
    let shown = match std::env::args().any(|a| a == "--every") {
        true => fractions.len(),
        false => 5,
    };
    for (fraction, time, label) in fractions.iter().take(shown) {
        println!("  {fraction:.3} {:8.2} ms  {label}", time * 1e3);
    }
    let all = fractions.into_iter().map(|f| f.0).collect();
    let unit = "of memory bandwidth";
    figure(
        "ops_unmeasured",
        f64::from(refused),
        "ops",
        Goal::AtMost(0.0),
    );
    figure("ops_worst", worst, unit, Goal::AtLeast(0.7));
    figure("ops_median", median(all), unit, Goal::None);
    Ok(())
}

/// Fraction of the bandwidth that triads in between had, median seconds, and that bandwidth.
fn one(device: &CpuDevice, case: &Case, triad: &mut Triad) -> Result<(f64, f64, f64)> {
    let mut graph = GraphBuilder::new(0);
    let (mut values, mut bytes) = (Vec::new(), 0);
    for spec in case.inputs()? {
        let ValueSpec::Tensor(spec) = spec else {
            continue;
        };
        bytes += spec.bytes(0).context("too large")?;
        values.push(graph.tensor("x", spec)?);
    }
    let outputs = graph.apply(case.row, values, case.attributes())?;
    let graph = graph.finish(&outputs)?;
    let mut bound = Bound::new(device, &graph)?;
    for (buffer, input) in bound.inputs.iter().zip(graph.inputs()) {
        if let ValueSpec::Tensor(t) = &input.spec {
            let count = t.shape.elements(0).context("too large")?;
            let around_one = matches!(case.row.name, "reduce_prod" | "cumprod");
            buffer.write(0, &numbers(t.dtype, count, around_one))?;
        }
    }
    bytes += bound.outputs.iter().map(|b| b.bytes()).sum::<usize>();
    let (mut times, mut triads) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        // Each is timed after itself: an op that only reads would else pay for the lines that a triad has written and
        // left in the caches.
        bound.run()?;
        times.push(bound.run()?);
        triad.run();
        triads.push(triad.run());
    }
    let (time, bandwidth) = (typical(times), triad.bytes() as f64 / typical(triads));
    Ok((bytes as f64 / time / bandwidth, time, bandwidth))
}
