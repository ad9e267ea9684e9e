//! Hostile model files before a real scheduler: some of each class here, all of them in the benchmark.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::{BTreeMap, BTreeSet};

use hotcell_tests::hostile::{
    corpus,
    run::{Host, Summary},
    sample,
};

#[test]
fn there_are_many_and_each_is_another() {
    let all = corpus();
    let names: BTreeSet<String> = all.iter().map(ToString::to_string).collect();
    assert_eq!(names.len(), all.len(), "two cases have one name");
    assert!(all.len() >= 300, "{}", all.len());
    let mut classes = BTreeMap::new();
    for case in &all {
        *classes.entry(case.class).or_insert(0) += 1;
    }
    assert_eq!(classes.len(), 11, "{classes:?}");
    assert!(classes.values().all(|&count| count >= 20), "{classes:?}");
    let some = sample(7);
    let classes: BTreeSet<_> = some.iter().map(|case| case.class).collect();
    assert_eq!((some.len(), classes.len()), (77, 11));
}

#[tokio::test]
async fn hostile_files_are_refused_or_contained_and_nobody_else_notices() {
    let host = Host::start().await.unwrap();
    let mut summary = Summary::default();
    for case in sample(7) {
        let told = host.look(&case).await.unwrap();
        println!("{told}");
        summary.add(&told);
    }
    host.ends_well().await.unwrap();
    assert!(summary.wrong.is_empty(), "{:#?}", summary.wrong);
}
