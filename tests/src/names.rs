//! The names of three other systems (`tests/names.txt`), and what `docs/coming-from.md` says of each.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};

use crate::cluster::repository;

/// A name and the list that it stands in.
pub type Listed = (String, String);

/// What is listed and what is said.
pub struct Names {
    /// Every name of the lists.
    pub listed: BTreeSet<Listed>,
    /// Every name that a table has, with the line that it stands in.
    pub said: Vec<(Listed, String)>,
    /// Names of ours that the tables say, as `Tensor::relu`.
    pub ours: BTreeSet<String>,
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

impl Names {
    /// Reads both files.
    ///
    /// # Errors
    /// When one is missing or malformed.
    pub fn read() -> Result<Self> {
        let read = |path: &str| {
            std::fs::read_to_string(repository().join(path)).with_context(|| path.to_owned())
        };
        let (mut listed, mut list) = (BTreeSet::new(), None);
        for line in read("tests/names.txt")?.lines() {
            match line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                Some(name) => list = Some(name.to_owned()),
                None if line.starts_with('#') => {}
                None => {
                    for name in line.split_whitespace() {
                        let list = list.clone().context("a name before the first list")?;
                        let once = listed.insert((list.clone(), name.to_owned()));
                        ensure!(once, "{name} is in {list} twice");
                    }
                }
            }
        }
        let mut names = Self {
            listed,
            said: vec![],
            ours: BTreeSet::new(),
        };
        let mut table = None;
        for line in read("docs/coming-from.md")?.lines() {
            if let Some(heading) = line.strip_prefix("## ") {
                let list = heading
                    .rsplit_once('(')
                    .and_then(|(_, l)| l.strip_suffix(')'));
                table = list.map(str::to_owned);
            }
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let (Some(list), ["", theirs, ours, difference, ""]) = (&table, cells.as_slice())
            else {
                ensure!(
                    table.is_none() || !line.starts_with('|'),
                    "not three cells: {line}"
                );
                continue;
            };
            if theirs.contains("---") || *difference == "Difference" {
                continue;
            }
            ensure!(
                !ours.is_empty() && !difference.is_empty(),
                "an empty cell: {line}"
            );
            for name in quoted(theirs) {
                names
                    .said
                    .push(((list.clone(), name.to_owned()), line.to_owned()));
            }
            names.ours.extend(quoted(ours).map(str::to_owned));
        }
        Ok(names)
    }

    /// Names without a counterpart: those that no table has, and those whose line says that it is missing.
    pub fn missing(&self) -> Vec<String> {
        let there = self
            .said
            .iter()
            .filter(|(_, line)| !line.contains("| missing |"));
        let said: BTreeSet<&Listed> = there.map(|(name, _)| name).collect();
        let missing = self.listed.iter().filter(|name| !said.contains(name));
        missing
            .map(|(list, name)| format!("{name} ({list})"))
            .collect()
    }
}
