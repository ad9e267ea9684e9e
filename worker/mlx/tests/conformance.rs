//! The op catalogue's conformance cases and ONNX's node tests on MLX, in this process.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    path::{Path, PathBuf},
    rc::Rc,
};

use hotcell_graph::{
    DType,
    op::{Call, ValueSpec, catalogue},
};
use hotcell_kernels::mlx::{MlxBackend, MlxDevice};
use hotcell_tests::{
    conformance::{Case as OpCase, Local, Scope, cases, derived, unsteady, zeros},
    listed::Tally,
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

/// A list of cases that need not pass.
fn list(file: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    tests.join(file)
}

fn local() -> (Local, Rc<MlxDevice>) {
    let device = MlxBackend::open_device("mlx:0", &[]).unwrap();
    let opened = Rc::clone(&device);
    let local = Local::new("mlx", move || Ok(Rc::clone(&opened) as _)).unwrap();
    (local, device)
}

/// Where cases of a row ran.
#[derive(Default)]
struct Where {
    /// Dtypes of its cases' first inputs (of the result, where there is none).
    all: BTreeSet<DType>,
    /// Of those that MLX computed.
    on_mlx: BTreeSet<DType>,
}

impl Where {
    /// Notes a case that passed, of which MLX computed nodes of the row or not.
    fn note(&mut self, case: &OpCase, device: &MlxDevice, on_mlx: bool) -> Result<(), String> {
        let (Ok(graph), None) = (case.graph(), case.fails) else {
            return Ok(());
        };
        let Some(node) = graph.nodes().iter().rfind(|n| n.op.name == case.op) else {
            return Ok(());
        };
        let specs = graph.input_specs(node).unwrap();
        let first = specs.iter().find_map(|spec| match spec {
            ValueSpec::Tensor(t) => Some(t.dtype),
            _ => None,
        });
        let Some(dtype) = first.or_else(|| node.outputs.first().map(|t| t.dtype)) else {
            return Ok(());
        };
        self.all.insert(dtype);
        let native = device.is_native(&Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        });
        match (native, on_mlx) {
            (true, true) => {
                self.on_mlx.insert(dtype);
                Ok(())
            }
            (true, false) => Err(format!(
                "{case}: MLX says that it has it and did not run it"
            )),
            // What it promotes its inputs for may be MLX's.
            (false, _) => Ok(()),
        }
    }

    fn text(&self) -> String {
        let names = self.on_mlx.iter().map(|d| format!("`{d}`"));
        match self.on_mlx == self.all {
            true => "all".to_owned(),
            false => names.collect::<Vec<_>>().join(", "),
        }
    }
}

/// Which rows of the catalogue MLX computed, one to a line, and why it did not compute the others.
fn support(ran: &BTreeMap<String, Where>, wrong: &mut Vec<String>) -> String {
    let why: BTreeMap<_, _> = MlxDevice::elsewhere().iter().copied().collect();
    let mut text = String::new();
    for row in catalogue() {
        let found = ran.get(row.name).filter(|found| !found.on_mlx.is_empty());
        let said = match (found, why.get(row.name)) {
            (Some(found), None) => found.text(),
            (None, Some(why)) => format!("none ({why})"),
            (None, None) if row.decompose.is_some() => "as other ops".to_owned(),
            (Some(_), Some(_)) => {
                wrong.push(format!("{}: runs on MLX and is said not to", row.name));
                continue;
            }
            (None, None) => {
                wrong.push(format!("{}: nobody says why not on MLX", row.name));
                continue;
            }
        };
        writeln!(text, "{}: {said}", row.name).unwrap();
    }
    text
}

#[test]
fn every_case_of_the_catalogue_passes_and_runs_where_it_is_said_to() {
    let (mut local, device) = local();
    let mut tally = Tally::read(&[], "").unwrap();
    let mut ran: BTreeMap<String, Where> = BTreeMap::new();
    let mut wrong = Vec::new();
    for case in cases().unwrap() {
        let before = device.ran(&case.op);
        let ended = case.check(&mut local);
        if ended.is_ok() {
            let on_mlx = device.ran(&case.op).on_mlx > before.on_mlx;
            let row = ran.entry(case.op.clone()).or_default();
            wrong.extend(row.note(&case, &device, on_mlx).err());
        }
        tally.note(&case.to_string(), ended);
    }
    let passed = tally.end().unwrap();
    println!("{passed} passed");
    assert!(passed > 10_000, "{passed} cases");
    // `proto/OPS.md` is made from this.
    let path = list("native.txt");
    let text = support(&ran, &mut wrong);
    if std::env::var_os("HOTCELL_UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = text.lines().zip(committed.lines()).find(|(a, b)| a != b);
    if text != committed {
        wrong.push(format!(
            "{} is not what ran ({differs:?}); write it with HOTCELL_UPDATE=1",
            path.display()
        ));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Not bit by bit: how MLX divides a sum depends on shapes. One of each combination of dtypes.
#[test]
fn derived_classes_give_the_same() {
    let (mut local, _) = local();
    let scope = Scope {
        bits: false,
        every_note: false,
    };
    let plain = DType::ALL.iter().copied().filter(|d| !d.is_block());
    let plain: Vec<DType> = plain.collect();
    derived(&cases().unwrap(), &mut [&mut local], scope, &plain).unwrap();
}

#[test]
fn of_zeros_of_both_signs_the_greatest_is_positive_and_the_least_negative() {
    let (mut local, device) = local();
    zeros(&mut local).unwrap();
    for op in ["reduce_max", "reduce_min"] {
        assert_eq!(device.ran(op).on_cpu, 0, "{op}");
    }
}

#[test]
fn inputs_that_change_while_they_are_read_touch_nothing_but_results() {
    let (_, device) = local();
    unsteady(device).unwrap();
}

#[test]
fn single_op_cases_of_onnx_pass_unless_listed() {
    let (mut local, _) = local();
    // Those that no backend passes stand in the repository's own list, with reasons.
    let every = list("../../../tests/onnx/skipped.txt");
    let own = list("onnx_skipped.txt");
    let mut tally = Tally::read(&[&every, &own], ": ").unwrap();
    let listed = tally.listed();
    for archived in archive().unwrap() {
        let ended = Case::read(&archived).and_then(|case| check(&case, &mut local));
        tally.note(&archived.name, ended);
    }
    let passed = tally.end().unwrap();
    println!("{passed} passed, {listed} listed");
    assert!(passed > 1000, "{passed} cases");
}
