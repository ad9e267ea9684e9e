//! Mechanical style: who may import whom, how long a file may be, what must not appear.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use cargo_metadata::{DependencyKind, MetadataCommand};
use hotcell_tests::cluster::repository;

/// Longest file, unit tests at its end apart.
const MAX_LINES: usize = 600;

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

fn sources() -> Vec<(String, String)> {
    let root = repository();
    let mut found = Vec::new();
    rust_files(&root, &mut found);
    let relative = |p: &PathBuf| {
        p.strip_prefix(&root)
            .unwrap()
            .to_string_lossy()
            .into_owned()
    };
    found
        .iter()
        .map(|p| (relative(p), fs::read_to_string(p).unwrap()))
        .collect()
}

/// The part before the unit tests.
fn code(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod ").next().unwrap_or(text)
}

fn is_test(path: &str) -> bool {
    path.starts_with("tests/")
        || path.contains("/tests/")
        || path.ends_with("tests.rs")
        || path.ends_with("_testing.rs")
}

#[test]
fn packages_import_only_whom_they_may() {
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("hotcell-proto", &[][..]),
        ("hotcell-gateways", &[]),
        ("hotcell-graph", &["hotcell-proto"]),
        ("hotcell-ipc", &["hotcell-proto"]),
        ("hotcell-kernels", &["hotcell-graph"]),
        (
            "hotcell-worker",
            &[
                "hotcell-kernels",
                "hotcell-graph",
                "hotcell-ipc",
                "hotcell-proto",
            ],
        ),
        (
            "hotcell-worker-cuda",
            &["hotcell-worker", "hotcell-kernels"],
        ),
        (
            "hotcell-scheduler",
            &["hotcell-gateways", "hotcell-ipc", "hotcell-proto"],
        ),
        (
            "hotcell-client",
            &["hotcell-graph", "hotcell-ipc", "hotcell-proto"],
        ),
    ]);
    let metadata = MetadataCommand::new()
        .manifest_path(repository().join("Cargo.toml"))
        .no_deps()
        .exec()
        .unwrap();
    let mut seen = BTreeSet::new();
    for package in metadata.workspace_packages() {
        let Some(may) = allowed.get(package.name.as_str()) else {
            // The driver without a device is a test's, and imports nobody.
            let is_test = matches!(package.name.as_str(), "hotcell-tests" | "hotcell-fakecuda");
            assert!(is_test, "{}", package.name);
            continue;
        };
        seen.insert(package.name.to_string());
        for dependency in package
            .dependencies
            .iter()
            .filter(|d| d.kind != DependencyKind::Development)
        {
            let ours = dependency.name.starts_with("hotcell-");
            assert!(
                !ours || may.contains(&dependency.name.as_str()),
                "{} imports {}",
                package.name,
                dependency.name
            );
        }
    }
    assert_eq!(seen.len(), allowed.len());
}

#[test]
fn the_scheduler_links_no_parser_and_no_backend() {
    let metadata = MetadataCommand::new()
        .manifest_path(repository().join("Cargo.toml"))
        .exec()
        .unwrap();
    let resolve = metadata.resolve.as_ref().unwrap();
    let name = |id: &cargo_metadata::PackageId| metadata[id].name.to_string();
    let start = resolve
        .nodes
        .iter()
        .find(|n| name(&n.id) == "hotcell-scheduler")
        .unwrap();
    let (mut all, mut next) = (BTreeSet::new(), vec![start.id.clone()]);
    while let Some(id) = next.pop() {
        if all.insert(name(&id)) {
            let node = resolve.nodes.iter().find(|n| n.id == id).unwrap();
            let normal = |d: &&cargo_metadata::NodeDep| {
                d.dep_kinds.iter().any(|k| k.kind == DependencyKind::Normal)
            };
            next.extend(node.deps.iter().filter(normal).map(|d| d.pkg.clone()));
        }
    }
    assert!(all.contains("tonic"), "the walk found nothing");
    for never in [
        "hotcell-graph",
        "hotcell-kernels",
        "hotcell-worker",
        "tokenizers",
        "safetensors",
        "minijinja",
        "cudarc",
        "mlx-rs",
    ] {
        assert!(!all.contains(never), "the scheduler links {never}");
    }
}

#[test]
fn files_are_short_and_begin_with_their_purpose() {
    for (path, text) in sources() {
        let lines = code(&text).lines().count();
        assert!(
            is_test(&path) || lines <= MAX_LINES,
            "{path} has {lines} lines; make it two files"
        );
        assert!(
            text.starts_with("//!"),
            "{path} does not say what it is for"
        );
    }
}

#[test]
fn nothing_is_left_undone_or_hidden() {
    // Put together here so that this file does not find itself.
    let banned = [
        ("todo", "!("),
        ("unimplemented", "!("),
        ("#[ign", "ore"),
        ("tokio::pro", "cess"),
        ("unbounded_", "channel"),
        ("dbg", "!("),
    ];
    for (path, text) in sources() {
        let code = text.lines().filter(|l| !l.trim_start().starts_with("//"));
        for line in code {
            for (a, b) in banned {
                // A test may wait for as many events as it likes; it may not be skipped or left undone.
                if is_test(&path) && a == "unbounded_" {
                    continue;
                }
                let word = format!("{a}{b}");
                assert!(!line.contains(&word), "{path}: {line}");
            }
        }
    }
}

#[test]
fn processes_and_system_calls_stay_where_they_belong() {
    for (path, text) in sources() {
        let may = path.starts_with("proto/ipc/")
            || path.starts_with("worker/src/confine")
            || is_test(&path);
        assert!(may || !code(&text).contains("libc::fork"), "{path} forks");
        if path.starts_with("scheduler/src") || path.starts_with("client/src") {
            let unsafe_code = code(&text)
                .lines()
                .any(|l| !l.trim_start().starts_with("//") && l.contains("unsafe "));
            assert!(!unsafe_code, "{path} has unsafe code");
        }
    }
}
