//! Classes of cases that are made of the golden ones, run by whatever runs graphs: in other shapes, many times, of views, of
//! other dtypes, among others, op by op.

use std::collections::{BTreeMap, BTreeSet};

use hotcell_graph::{DType, Graph, op::find};

use super::{
    Case, Check, Eager, Executor, Form, Outcome, difference, elementwise::Flat, moves, tolerance,
};

/// Elements from which on a kernel's work is divided in many ways.
const MANY: usize = 20_000;

/// What is run, and how near the results have to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// The same bits (any NaN for a NaN), as a reproducible device promises; else what the case itself asks for.
    pub bits: bool,
    /// Every note of every combination of dtypes; else one of each combination.
    pub every_note: bool,
}

impl Scope {
    /// All there is, bit by bit.
    pub const ALL: Scope = Scope {
        bits: true,
        every_note: true,
    };
}

/// What came of a class.
#[derive(Default)]
pub struct Classed {
    /// Rows that had such a case, by the case's first dtype.
    pub seen: BTreeSet<(&'static str, DType)>,
    /// How many graphs were run.
    pub ran: usize,
    /// What differed.
    pub wrong: Vec<String>,
}

impl Classed {
    /// Rows that had such a case.
    pub fn rows(&self) -> BTreeSet<&'static str> {
        self.seen.iter().map(|(row, _)| *row).collect()
    }

    /// How many graphs were run.
    ///
    /// # Errors
    /// What differed, or that nothing was run.
    pub fn all_right(&self) -> Result<usize, String> {
        match (self.ran, self.wrong.len()) {
            (0, _) => Err("nothing was run".to_owned()),
            (ran, 0) => Ok(ran),
            (ran, wrong) => {
                let some: Vec<&String> = self.wrong.iter().take(50).collect();
                Err(format!("{wrong} differ, in {ran} graphs: {some:#?}"))
            }
        }
    }

    fn note(&mut self, case: &Case) {
        if let (Some(row), Some(dtype)) = (find(&case.op), case.first_dtype()) {
            self.seen.insert((row.name, dtype));
        }
    }

    /// Runs a graph and compares each of its outputs with what it has to be.
    fn run(
        &mut self,
        (executor, what): (&mut dyn Executor, &str),
        (graph, inputs): (&Graph, &[&[u8]]),
        expected: &[(DType, Vec<u8>)],
        limits: impl Fn(DType) -> (Check, f64),
    ) {
        self.ran += 1;
        let on = executor.name();
        let compared = executor.run(graph, 0, inputs).map_err(|e| e.to_string());
        let compared = compared.and_then(|outcome| {
            if outcome.outputs.len() != expected.len() {
                return Err(format!("{} results", outcome.outputs.len()));
            }
            for (got, (dtype, expected)) in outcome.outputs.iter().zip(expected) {
                let (check, limit) = limits(*dtype);
                difference(*dtype, check, limit, got, expected)?;
            }
            Ok(())
        });
        if let Err(error) = compared {
            self.wrong.push(format!("{what} on {on}: {error}"));
        }
    }
}

impl Case {
    fn limits(&self, scope: Scope) -> impl Fn(DType) -> (Check, f64) + use<'_> {
        let blocks = self.has_blocks();
        move |dtype| match scope.bits {
            true => (Check::Exact, 0.0),
            false => (self.check, tolerance(&self.op, dtype, blocks)),
        }
    }
}

/// Cases of which one of each kind is taken.
fn first_of_each(
    cases: &[Case],
    kind: impl Fn(&Case) -> Option<String>,
) -> impl Iterator<Item = &Case> {
    let mut seen = BTreeSet::new();
    cases.iter().filter(move |case| {
        let row = find(&case.op).map(|row| row.name);
        kind(case).is_some_and(|kind| seen.insert((row, kind)))
    })
}

/// The case's own results on the first executor. What is wrong with these themselves is another test's.
fn small(case: &Case, executors: &mut [&mut dyn Executor]) -> Option<Outcome> {
    case.check(*executors.first_mut()?).ok().flatten()
}

fn combination(case: &Case, flat: &Flat, scope: Scope) -> String {
    let note = if scope.every_note { &case.note } else { "" };
    format!("{:?} {:?} {note}", flat.dtypes(), flat.result)
}

/// All classes, by what they are; `dtypes`: those that elements are moved as.
///
/// # Errors
/// What differed in a class, or that nothing was run of it.
pub fn derived(
    cases: &[Case],
    executors: &mut [&mut dyn Executor],
    scope: Scope,
    dtypes: &[DType],
) -> Result<(), String> {
    for (class, classed) in [
        ("in other shapes", forms(cases, executors, scope)),
        ("many times", repeated(cases, executors, scope)),
        ("of other dtypes", moved(cases, executors, dtypes)),
        ("of views", turned(cases, executors, scope)),
        ("of nothing", empty(cases, executors)),
        ("among others", fused(cases, executors, scope)),
        ("op by op", eager(cases, executors, scope)),
    ] {
        let ran = classed.all_right().map_err(|e| format!("{class}: {e}"))?;
        println!("{class}: {ran} graphs");
    }
    Ok(())
}

/// Elementwise rows give an element the same in every shape: of nothing, of one, odd, large, of views.
pub fn forms(cases: &[Case], executors: &mut [&mut dyn Executor], scope: Scope) -> Classed {
    let mut classed = Classed::default();
    let kind = |case: &Case| Some(combination(case, &case.flat()?, scope));
    for case in first_of_each(cases, kind) {
        let (Some(flat), Some(small)) = (case.flat(), small(case, executors)) else {
            continue;
        };
        classed.note(case);
        let width = flat.result.block_bytes();
        for form in Form::ALL {
            let what = format!("{case} {form:?}");
            let formed = match flat.form(form) {
                Ok(formed) => formed,
                Err(error) => {
                    classed.wrong.push(format!("{what}: {error:#}"));
                    continue;
                }
            };
            let elements = formed.elements.iter();
            let elements: Vec<&[u8]> = elements
                .filter_map(|at| small.outputs[0].get(at * width..(at + 1) * width))
                .collect();
            let expected = [(flat.result, elements.concat())];
            let inputs: Vec<&[u8]> = formed.inputs.iter().map(Vec::as_slice).collect();
            for executor in executors.iter_mut() {
                let limits = case.limits(scope);
                let graph = (&formed.graph, &inputs[..]);
                classed.run((&mut **executor, &what), graph, &expected, limits);
            }
        }
    }
    classed
}

/// What is repeated many times along the outermost axis gives its results as many times.
pub fn repeated(cases: &[Case], executors: &mut [&mut dyn Executor], scope: Scope) -> Classed {
    let mut classed = Classed::default();
    let kind = |case: &Case| case.repeated(MANY).map(|_| case.dtypes());
    for case in first_of_each(cases, kind) {
        let (Some(many), Some(small)) = (case.repeated(MANY), small(case, executors)) else {
            continue;
        };
        classed.note(case);
        let what = format!("{case}, {} times", many.times);
        let outputs = case.result_dtypes().into_iter().zip(&small.outputs);
        let expected: Vec<_> = outputs
            .map(|(dtype, bytes)| (dtype, bytes.repeat(many.times)))
            .collect();
        let inputs: Vec<&[u8]> = many.inputs.iter().map(Vec::as_slice).collect();
        for executor in executors.iter_mut() {
            let graph = (&many.graph, &inputs[..]);
            let limits = case.limits(scope);
            classed.run((&mut **executor, &what), graph, &expected, limits);
        }
    }
    classed
}

/// Rows that move elements move those of every dtype alike.
pub fn moved(cases: &[Case], executors: &mut [&mut dyn Executor], dtypes: &[DType]) -> Classed {
    let mut classed = Classed::default();
    for case in cases {
        let counted = match case.numbered(DType::U64) {
            Ok(Some(counted)) => counted,
            Ok(None) => continue,
            Err(error) => {
                classed.wrong.push(format!("{case}: {error:#}"));
                continue;
            }
        };
        for executor in executors.iter_mut() {
            // Where elements go is what the golden case says, and nothing else for another dtype.
            let places = match executor.run(&counted.graph, 0, &counted.inputs()) {
                Ok(outcome) => outcome.outputs,
                Err(error) => {
                    classed.wrong.push(format!("{case} of u64: {error}"));
                    continue;
                }
            };
            if let Err(error) = case.moves_so(&places) {
                classed.wrong.push(format!("{case}: {error:#}"));
                continue;
            }
            classed.note(case);
            for &dtype in dtypes {
                let other = case.numbered(dtype).ok().flatten();
                let expected = case.placed(&places, dtype).ok();
                let (Some(other), Some(expected)) = (other, expected) else {
                    classed.wrong.push(format!("{case} of {dtype}: refused"));
                    continue;
                };
                // The bits themselves: moving changes no NaN.
                classed.ran += 1;
                match executor.run(&other.graph, 0, &other.inputs()) {
                    Ok(outcome) if outcome.outputs == expected => {}
                    Ok(_) => {
                        let what = format!("{case} of {dtype}: elsewhere than of u64");
                        classed.wrong.push(what);
                    }
                    Err(error) => classed.wrong.push(format!("{case} of {dtype}: {error}")),
                }
            }
        }
    }
    classed
}

/// Rows that do not go element by element give the same of inputs that lie in memory the other way round.
pub fn turned(cases: &[Case], executors: &mut [&mut dyn Executor], scope: Scope) -> Classed {
    let mut classed = Classed::default();
    let note = |case: &Case| {
        if scope.every_note {
            case.note.clone()
        } else {
            case.dtypes()
        }
    };
    let kind = |case: &Case| {
        let row = find(&case.op)?;
        let apart = moves(row) || super::elementwise().any(|r| r.name == row.name);
        (!apart && case.fails.is_none()).then(|| note(case))
    };
    for case in first_of_each(cases, kind) {
        let derived = match case.turned() {
            Ok(Some(derived)) => derived,
            Ok(None) => continue,
            Err(error) => {
                classed.wrong.push(format!("{case} of views: {error:#}"));
                continue;
            }
        };
        let Some(small) = small(case, executors) else {
            continue;
        };
        classed.note(case);
        let what = format!("{case} of views");
        let expected: Vec<_> = case
            .result_dtypes()
            .into_iter()
            .zip(small.outputs)
            .collect();
        for executor in executors.iter_mut() {
            let graph = (&derived.graph, &derived.inputs()[..]);
            let limits = case.limits(scope);
            classed.run((&mut **executor, &what), graph, &expected, limits);
        }
    }
    classed
}

/// Of nothing they give nothing.
pub fn empty(cases: &[Case], executors: &mut [&mut dyn Executor]) -> Classed {
    let mut classed = Classed::default();
    let kind = |case: &Case| case.repeat(0).map(|_| case.dtypes());
    for case in first_of_each(cases, kind) {
        let Some(nothing) = case.repeat(0) else {
            continue;
        };
        classed.note(case);
        let what = format!("{case} of nothing");
        let expected: Vec<_> = case
            .result_dtypes()
            .into_iter()
            .map(|d| (d, vec![]))
            .collect();
        let inputs: Vec<&[u8]> = nothing.inputs.iter().map(Vec::as_slice).collect();
        for executor in executors.iter_mut() {
            let graph = (&nothing.graph, &inputs[..]);
            let exact = |_| (Check::Exact, 0.0);
            classed.run((&mut **executor, &what), graph, &expected, exact);
        }
    }
    classed
}

/// Elementwise rows give the same whether or not they are fused with what is before and behind them.
pub fn fused(cases: &[Case], executors: &mut [&mut dyn Executor], scope: Scope) -> Classed {
    let mut classed = Classed::default();
    let kind = |case: &Case| Some(combination(case, &case.flat()?, scope));
    for case in first_of_each(cases, kind) {
        let (Some(flat), Some(small)) = (case.flat(), small(case, executors)) else {
            continue;
        };
        let formed = match flat.among() {
            Ok(formed) => formed,
            Err(error) => {
                classed
                    .wrong
                    .push(format!("{case} among others: {error:#}"));
                continue;
            }
        };
        classed.note(case);
        let result = small.outputs[0].clone();
        let expected = [(flat.result, result.clone()), (flat.result, result)];
        let inputs: Vec<&[u8]> = formed.inputs.iter().map(Vec::as_slice).collect();
        for executor in executors.iter_mut() {
            for fused in [true, false] {
                let what = format!("{case} among others (fused: {fused})");
                executor.set_fused(fused);
                let graph = (&formed.graph, &inputs[..]);
                let limits = case.limits(scope);
                classed.run((&mut **executor, &what), graph, &expected, limits);
            }
            executor.set_fused(true);
        }
    }
    classed
}

/// A graph gives what its ops give one by one.
pub fn eager(cases: &[Case], executors: &mut [&mut dyn Executor], scope: Scope) -> Classed {
    let mut classed = Classed::default();
    let mut seen: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for case in cases {
        let Ok(graph) = case.graph() else { continue };
        if graph.nodes().len() < 2 || case.fails.is_some() {
            continue;
        }
        let ops = graph.nodes().iter().map(|n| n.op.name);
        let kind = format!("{:?} {}", ops.collect::<Vec<_>>(), case.dtypes());
        if !scope.every_note && !seen.entry(&case.op).or_default().insert(kind) {
            continue;
        }
        let Some(whole) = small(case, executors) else {
            continue;
        };
        classed.note(case);
        for executor in executors.iter_mut() {
            classed.ran += 1;
            let on = executor.name();
            let wrong = match case.check(&mut Eager(&mut **executor)) {
                Ok(Some(apart)) if !scope.bits || case.same(&whole, &apart) => continue,
                Ok(_) => "other bits".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            classed
                .wrong
                .push(format!("{case} op by op on {on}: {wrong}"));
        }
    }
    classed
}
