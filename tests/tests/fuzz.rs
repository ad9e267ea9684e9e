//! What strangers may send or have written: short runs of `fuzz`.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use hotcell_graph::{op, wire};
use hotcell_proto::v1;
use hotcell_tests::{
    cluster::repository,
    fuzz::{Outcome, Runner, case_seed, grown, run_grown, targets::TARGETS},
};
use prost::Message;

#[test]
fn every_row_is_grown() {
    let mut missing: BTreeSet<&str> = op::catalogue().map(|row| row.name).collect();
    for index in 0..20_000 {
        for node in grown(case_seed(1, index)).nodes() {
            missing.remove(node.op.name);
        }
        if missing.is_empty() {
            return;
        }
    }
    panic!("no graph has {missing:?}; write a template");
}

/// Graphs in which each row has to run through.
const RUNS: usize = 3;

#[test]
fn every_row_gives_the_same_bits_fused_and_apart() {
    let runner = Runner::new().unwrap();
    let mut missing: BTreeMap<&str, usize> = op::catalogue().map(|row| (row.name, RUNS)).collect();
    for index in 0..20_000 {
        let seed = case_seed(2, index);
        let graph = grown(seed);
        let rows: BTreeSet<&str> = graph.nodes().iter().map(|node| node.op.name).collect();
        // It panics where they differ.
        if rows.iter().any(|row| missing.contains_key(row))
            && run_grown(&runner, seed) == Outcome::Ran
        {
            for row in rows {
                if let Some(left) = missing.get_mut(row) {
                    *left -= 1;
                }
            }
            missing.retain(|_, left| *left > 0);
        }
        if missing.is_empty() {
            return;
        }
    }
    panic!("these run too rarely: {missing:?}");
}

#[test]
fn no_graph_panics_hangs_or_takes_memory_without_bound() {
    let mut fuzz = Command::new(env!("CARGO_BIN_EXE_fuzz"));
    let output = fuzz.args(["graphs", "10", "2026"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    // It must reach the kernels, and the refusals on the way.
    for (what, least) in [
        ("unreadable", 1),
        ("unverified", 5),
        ("refused", 1),
        ("ran", 50),
    ] {
        let at = said
            .split(", ")
            .find_map(|part| part.trim().strip_prefix(what));
        let count: u64 = at.unwrap().trim().parse().unwrap();
        assert!(count >= least, "{what}: {said}");
    }
}

#[test]
fn no_bytes_panic_hang_or_take_memory_without_bound() {
    for target in TARGETS {
        let mut fuzz = Command::new(env!("CARGO_BIN_EXE_fuzz"));
        let output = fuzz.args([target.name, "2", "2026"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}: {said}", target.name);
    }
}

#[test]
fn the_graphs_that_others_send_are_run() {
    let target = hotcell_tests::fuzz::targets::named("graph").unwrap();
    let runner = Runner::new().unwrap();
    let mut ran = BTreeSet::new();
    for seed in (target.seeds)() {
        let graph = v1::Graph::decode(&*seed).unwrap();
        let graph = wire::decode(&graph).unwrap();
        if runner.run_foreign(&graph, &seed) == Outcome::Ran {
            ran.extend(graph.nodes().iter().map(|node| node.op.name));
        }
    }
    // By the goldens' cases every row comes to its kernels, but those whose cases are large.
    let all = op::catalogue().count();
    assert!(ran.len() * 10 > all * 9, "{} of {all} rows", ran.len());
}

#[test]
fn seeds_are_accepted_and_committed_ones_are_these() {
    let folder = repository().join("tests/fuzz/corpus");
    for target in TARGETS {
        let seeds = (target.seeds)();
        let accepted = seeds.iter().filter(|seed| (target.run)(seed)).count();
        assert!(accepted > 0, "{} refuses all its seeds", target.name);
        for (n, seed) in seeds.iter().enumerate() {
            let path = folder.join(target.name).join(format!("seed-{n:02}"));
            let committed = fs::read(&path).unwrap();
            assert!(
                committed == *seed,
                "{} is another; run `fuzz --corpus tests/fuzz/corpus`",
                path.display()
            );
        }
        // Findings lie beside the seeds.
        for file in fs::read_dir(folder.join(target.name)).unwrap() {
            (target.run)(&fs::read(file.unwrap().path()).unwrap());
        }
    }
}
