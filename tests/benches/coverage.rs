//! What of three other systems, and of ONNX, has a home here.
//!
//! `cargo bench -p hotcell-tests --bench coverage`

use std::rc::Rc;

use anyhow::Result;
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
};
use hotcell_tests::{
    bench::{Goal, figure},
    conformance::Local,
    names::Names,
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

/// Ops whose cases do not count: recurrent cells, and results whose shape depends on values.
const OUTSIDE: &[&str] = &["LSTM", "GRU", "RNN", "NonZero", "Unique", "Compress"];

/// Cases that pass, and those that count.
fn onnx() -> Result<(usize, usize)> {
    let open = || Ok(Rc::new(CpuDevice::with_path(2, CpuPath::detect())?) as Rc<dyn Device>);
    let mut executor = Local::new("cpu", open)?;
    let (mut passed, mut counted) = (0, 0);
    for archived in archive()? {
        let case = Case::read(&archived);
        let op = case.as_ref().map(|case| case.node.op_type.clone());
        if op.is_ok_and(|op| OUTSIDE.contains(&op.as_str())) {
            continue;
        }
        counted += 1;
        if case.and_then(|case| check(&case, &mut executor)).is_ok() {
            passed += 1;
        }
    }
    Ok((passed, counted))
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; the same is tested by `tests/onnx.rs` and `tests/names.rs`.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    let (passed, counted) = onnx()?;
    println!("{passed} of {counted} cases pass");
    figure("onnx_passed", passed as f64, "cases", Goal::AtLeast(900.0));
    let names = Names::read()?;
    let (all, missing) = (names.listed.len(), names.missing());
    for name in &missing {
        println!("without a counterpart: {name}");
    }
    let covered = (all - missing.len()) as f64 / all as f64;
    figure("names_covered", covered, "of all", Goal::AtLeast(1.0));
    Ok(())
}
