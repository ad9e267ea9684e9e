//! The op catalogue's conformance cases and ONNX's node tests on MLX, in this process.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    rc::Rc,
};

use hotcell_graph::{
    DType,
    op::{Call, ValueSpec, catalogue},
};
use hotcell_kernels::mlx::{MlxBackend, MlxDevice};
use hotcell_tests::{
    conformance::{Case as OpCase, Local, cases},
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

/// Where cases are listed that need not pass: what it is, `between`, and why; one to a line.
fn listed(file: &str, between: &str) -> BTreeMap<String, String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'));
    let pairs = lines.map(|l| l.split_once(between).unwrap());
    pairs
        .map(|(what, why)| (what.to_owned(), why.to_owned()))
        .collect()
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

/// Whether all that failed is listed and all that is listed failed.
fn settle(failed: BTreeMap<String, String>, listed: BTreeMap<String, String>, passed: usize) {
    let mut wrong: Vec<String> = Vec::new();
    for (what, why) in &failed {
        if !listed.contains_key(what) {
            wrong.push(format!("{what}: {why}"));
        }
    }
    for what in listed.keys().filter(|what| !failed.contains_key(*what)) {
        wrong.push(format!("{what}: is listed and passes, or is no case"));
    }
    println!("{passed} passed, {} listed", listed.len());
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn every_case_of_the_catalogue_passes_unless_listed_and_runs_where_it_is_said_to() {
    let (mut local, device) = local();
    let (mut passed, mut failed) = (0, BTreeMap::new());
    let mut ran: BTreeMap<String, Where> = BTreeMap::new();
    let mut wrong = Vec::new();
    for case in cases().unwrap() {
        let before = device.ran(&case.op);
        match case.check(&mut local) {
            Ok(_) => {
                passed += 1;
                let on_mlx = device.ran(&case.op).on_mlx > before.on_mlx;
                let row = ran.entry(case.op.clone()).or_default();
                wrong.extend(row.note(&case, &device, on_mlx).err());
            }
            Err(error) => {
                failed.insert(case.to_string(), format!("{error:#}"));
            }
        }
    }
    assert!(passed > 1000, "{passed} cases");
    settle(failed, listed("skipped.txt", " :: "), passed);
    // `proto/OPS.md` is made from this.
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/native.txt");
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

#[test]
fn single_op_cases_of_onnx_pass_unless_listed() {
    let (mut local, _) = local();
    // Those that no backend passes stand in the repository's own list, with reasons.
    let mut elsewhere = listed("../../../tests/onnx/skipped.txt", ": ");
    elsewhere.extend(listed("onnx_skipped.txt", ": "));
    let (mut passed, mut failed) = (0, BTreeMap::new());
    for archived in archive().unwrap() {
        let result = Case::read(&archived).and_then(|case| check(&case, &mut local));
        match result {
            Ok(()) => passed += 1,
            Err(error) => {
                failed.insert(archived.name.clone(), format!("{error:#}"));
            }
        }
    }
    assert!(passed > 1000, "{passed} cases");
    settle(failed, elsewhere, passed);
}
