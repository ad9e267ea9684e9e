//! Cases that need not pass: listed with their reasons, and held to it, so that a list can only shrink.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, Result, ensure};

/// What became of cases against the list of those that need not pass.
pub struct Tally {
    /// Those listed that have not run yet.
    waiting: BTreeMap<String, String>,
    passed: usize,
    listed: usize,
    wrong: Vec<String>,
}

impl Tally {
    /// Against the lists in these files, of lines that each say which case, `between`, and why.
    ///
    /// # Errors
    /// When a file cannot be read, a reason is missing, or a case is listed twice.
    pub fn read(files: &[&Path], between: &str) -> Result<Self> {
        let mut waiting = BTreeMap::new();
        for file in files {
            let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
            let plain = |l: &&str| !l.is_empty() && !l.starts_with('#');
            for line in text.lines().filter(plain) {
                let (name, why) = line.split_once(between).unwrap_or((line, ""));
                ensure!(!why.trim().is_empty(), "{name} is listed without a reason");
                let twice = waiting.insert(name.to_owned(), why.to_owned());
                ensure!(twice.is_none(), "{name} is listed twice");
            }
        }
        Ok(Self {
            listed: waiting.len(),
            waiting,
            passed: 0,
            wrong: Vec::new(),
        })
    }

    /// How many are listed.
    pub fn listed(&self) -> usize {
        self.listed
    }

    /// Notes how a case ended.
    pub fn note<T>(&mut self, name: &str, ended: Result<T>) {
        match (ended, self.waiting.remove(name)) {
            (Ok(_), None) => self.passed += 1,
            (Ok(_), Some(_)) => self
                .wrong
                .push(format!("{name}: passes, take it from the list")),
            (Err(error), None) => self.wrong.push(format!("{name}: {error:#}")),
            (Err(_), Some(_)) => {}
        }
    }

    /// Notes that a case was left out: it may be listed or not.
    pub fn pass_over(&mut self, name: &str) {
        self.waiting.remove(name);
    }

    /// How many passed.
    ///
    /// # Errors
    /// Those that failed and are not listed, that are listed and passed, or that are listed and are no case.
    pub fn end(mut self) -> Result<usize> {
        let none = self.waiting.into_keys();
        self.wrong
            .extend(none.map(|name| format!("{name}: listed, but there is no such case")));
        ensure!(
            self.wrong.is_empty(),
            "{} cases, {} passed:\n{}",
            self.wrong.len(),
            self.passed,
            self.wrong.join("\n")
        );
        Ok(self.passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(text: &str) -> Result<Tally> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), text)?;
        Tally::read(&[file.path()], ": ")
    }

    #[test]
    fn a_list_says_why_once() {
        assert_eq!(tally("# all\n\na: x\nb: y\n").unwrap().listed(), 2);
        for wrong in ["a\n", "a: \n", "a: x\na: y\n"] {
            assert!(tally(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn all_that_is_listed_fails_and_all_that_fails_is_listed() {
        let failed = || Err::<(), _>(anyhow::anyhow!("no"));
        let ended = |a: Result<()>, b: Result<()>| {
            let mut tally = tally("a: x\n")?;
            tally.note("a", a);
            tally.note("b", b);
            tally.end()
        };
        assert_eq!(ended(failed(), Ok(())).unwrap(), 1);
        assert!(ended(Ok(()), Ok(())).is_err());
        assert!(ended(failed(), failed()).is_err());
        assert!(tally("a: x\n").unwrap().end().is_err());
    }
}
