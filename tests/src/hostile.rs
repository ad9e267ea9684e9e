//! Model files whose authors are enemies: a corpus that code makes, and what may come of each of them.
//!
//! Every case changes one thing of a small valid model, and says which verdicts are right for it.

mod config;
mod files;
mod folder;
mod gguf;
mod parameters;
pub mod run;
mod safetensors;
mod templates;
mod tokenizer;
mod vocabulary;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use hotcell_client::{Reason, v1};
use v1::Verdict;

use folder::Folder;
pub(crate) use gguf::valid as tiny;

/// What is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// A GGUF file's header, metadata and descriptions of tensors.
    Gguf,
    /// A GGUF file cut short.
    GgufCut,
    /// What GGUF metadata says about the model.
    GgufParameters,
    /// What GGUF metadata says about text.
    GgufVocabulary,
    /// A safetensors file.
    Safetensors,
    /// The index of shards, and their names.
    Shards,
    /// `config.json` and `generation_config.json`.
    Config,
    /// `tokenizer.json`.
    Tokenizer,
    /// `tokenizer_config.json`.
    TokenizerConfig,
    /// The chat template.
    Template,
    /// What is no file, or not the one it was.
    Files,
}

/// Which verdicts are right.
#[derive(Clone, Copy, Debug)]
pub enum Expect {
    /// It is refused.
    Refused,
    /// It can be used, and this kind of finding is told.
    Odd(&'static str),
    /// It can be used, for this reason.
    Harmless(&'static str),
    /// It may be used or refused, for this reason.
    Either(&'static str),
    /// Its worker may die too, for this reason.
    Contained(&'static str),
}

type Make = Box<dyn Fn(&Path) -> Result<PathBuf> + Send + Sync>;
type Spoil = Box<dyn Fn(&Path) + Send + Sync>;

/// A hostile model.
pub struct Case {
    /// What is attacked.
    pub class: Class,
    /// What is hostile about it.
    pub name: String,
    /// What may come of it.
    pub expect: Expect,
    make: Make,
    /// What is done to it again and again while it is looked into.
    meanwhile: Option<Spoil>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.class, self.name)
    }
}

impl Case {
    fn new(
        class: Class,
        name: impl Into<String>,
        expect: Expect,
        make: impl Fn(&Path) -> Result<PathBuf> + Send + Sync + 'static,
    ) -> Self {
        Self {
            class,
            name: name.into(),
            expect,
            make: Box::new(make),
            meanwhile: None,
        }
    }

    /// A GGUF file of these bytes.
    fn gguf(
        class: Class,
        name: impl Into<String>,
        expect: Expect,
        bytes: impl Fn() -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        Self::new(class, name, expect, move |place| {
            let path = place.join("model.gguf");
            fs::write(&path, bytes())?;
            Ok(path)
        })
    }

    /// A valid folder, changed.
    fn folder(
        class: Class,
        name: impl Into<String>,
        expect: Expect,
        change: impl Fn(&mut Folder) + Send + Sync + 'static,
    ) -> Self {
        Self::new(class, name, expect, move |place| {
            let mut folder = Folder::valid()?;
            change(&mut folder);
            folder.write(place)
        })
    }

    /// With something done to it while it is looked into.
    fn meanwhile(mut self, spoil: impl Fn(&Path) + Send + Sync + 'static) -> Self {
        self.meanwhile = Some(Box::new(spoil));
        self
    }

    /// Makes it in an empty folder, and says where it is.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn make(&self, place: &Path) -> Result<PathBuf> {
        (self.make)(place)
    }

    /// Why a verdict is wrong, if it is.
    ///
    /// # Errors
    /// In one sentence.
    pub fn judge(&self, found: &v1::Inspection) -> Result<(), String> {
        let verdict = found.verdict();
        let usable = matches!(verdict, Verdict::Fine | Verdict::Suspicious);
        let right = match self.expect {
            Expect::Refused => verdict == Verdict::Refused,
            Expect::Odd(kind) => {
                verdict == Verdict::Suspicious && found.findings.iter().any(|f| f.kind == kind)
            }
            Expect::Harmless(_) => usable,
            Expect::Either(_) => usable || verdict == Verdict::Refused,
            Expect::Contained(_) => verdict != Verdict::Unspecified,
        };
        if !right {
            return Err(format!("{verdict:?} is no answer to {:?}", self.expect));
        }
        let words = [&found.problem, &found.reason];
        let findings = found.findings.iter().map(|finding| &finding.what);
        for word in words.into_iter().chain(findings) {
            if word.chars().any(char::is_control) {
                return Err(format!("{word:?} holds control characters"));
            }
        }
        if verdict == Verdict::Refused {
            match Reason::from_name(&found.reason) {
                None => return Err(format!("{:?} is no reason", found.reason)),
                Some(Reason::Internal) => return Err("something in us failed over it".to_owned()),
                Some(_) if found.problem.is_empty() => return Err("it is not said why".to_owned()),
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// All of them, in an order that does not change.
pub fn corpus() -> Vec<Case> {
    let mut all = Vec::new();
    for part in [
        gguf::cases,
        parameters::cases,
        vocabulary::cases,
        safetensors::cases,
        config::cases,
        tokenizer::cases,
        templates::cases,
        files::cases,
    ] {
        all.extend(part());
    }
    all
}

/// So many of each class, spread over it.
pub fn sample(each: usize) -> Vec<Case> {
    let all = corpus();
    let of = |class: Class| all.iter().filter(|case| case.class == class).count();
    let counts: Vec<usize> = all.iter().map(|case| of(case.class)).collect();
    let mut seen = std::collections::BTreeMap::new();
    let mut chosen = Vec::new();
    for (case, count) in all.into_iter().zip(counts) {
        let at: &mut usize = seen.entry(case.class).or_default();
        // The first of each of `each` equal stretches.
        let stretch = |at: usize| at * each.min(count) / count.max(1);
        if *at == 0 || stretch(*at) != stretch(*at - 1) {
            chosen.push(case);
        }
        *at += 1;
    }
    chosen
}
