//! Which models may be loaded, and which of them may share a worker: the file that `--models-config` names.
//!
//! Without one every local file is trusted. With one, a model whose files all lie beneath a root is *trusted*: it shares
//! workers, and its files are mapped as they are. Any other is *untrusted*: it has a worker for itself, with limits of
//! its own, and computes from a sealed copy of its files where that fits.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{Inspection, Verdict},
};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use serde::Deserialize;

use crate::{
    config::Span,
    digest::{self, Sha},
    fleet::Allowance,
};

/// Bytes of an untrusted model that are copied into sealed memory unless the file says otherwise.
const SEALED_BYTES: u64 = 4 << 30;

/// The file's keys.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    roots: Vec<PathBuf>,
    hashes: Option<Vec<String>>,
    require_inspection: bool,
    allow_suspicious: bool,
    max_file_bytes: Option<u64>,
    max_model_bytes: Option<u64>,
    untrusted: UntrustedKeys,
    models: BTreeMap<String, PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct UntrustedKeys {
    allow: bool,
    memory: u64,
    threads: usize,
    max_tokens: u32,
    load_timeout: Option<Span>,
    sealed_bytes: u64,
}

impl Default for UntrustedKeys {
    fn default() -> Self {
        let Allowance {
            memory,
            threads,
            tokens,
            ..
        } = Allowance::default();
        Self {
            allow: true,
            memory,
            threads,
            max_tokens: tokens,
            load_timeout: None,
            sealed_bytes: SEALED_BYTES,
        }
    }
}

/// A folder whose files are trusted. Held open, so that it is the same one for as long as the policy holds.
#[derive(Debug)]
struct Root {
    path: PathBuf,
    folder: OwnedFd,
}

/// Which models may be loaded, and how.
#[derive(Debug, Default)]
pub struct ModelPolicy {
    /// Whether there is a file; otherwise everything here is open to everyone.
    given: bool,
    roots: Vec<Root>,
    hashes: Option<BTreeSet<Sha>>,
    /// Whether a model is looked into before it is loaded first.
    pub require_inspection: bool,
    allow_suspicious: bool,
    max_file_bytes: Option<u64>,
    max_model_bytes: Option<u64>,
    refuses_untrusted: bool,
    /// What a worker of an untrusted model may take, and one that looks into a model.
    pub allowance: Allowance,
    /// Bytes of an untrusted model up to which a sealed copy is made of it.
    pub sealed_bytes: u64,
    /// The models that it names.
    pub models: Vec<(ModelName, PathBuf)>,
}

fn not_allowed(what: String) -> Error {
    Error::new(Reason::ModelNotAllowed, what)
}

impl ModelPolicy {
    /// Reads the file.
    ///
    /// # Errors
    /// In one sentence, naming the file and the key.
    pub fn load(path: &Path) -> Result<Self, String> {
        let wrong = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let data = fs::metadata(path).map_err(|e| wrong(&e))?;
        if data.len() > limits::MAX_POLICY_BYTES as u64 {
            return Err(wrong(&"it is too large for a policy of models"));
        }
        let text = fs::read_to_string(path).map_err(|e| wrong(&e))?;
        Self::parse(&text).map_err(|e| wrong(&e))
    }

    /// Reads the file's text, and opens the roots.
    ///
    /// # Errors
    /// In one sentence, naming the key.
    pub fn parse(text: &str) -> Result<Self, String> {
        let keys: Keys = toml::from_str(text).map_err(|e| e.to_string())?;
        let root = |path: PathBuf| {
            let failed = |e: io::Error| format!("roots: {}: {e}", path.display());
            if !path.is_absolute() {
                return Err(format!("roots: {} is not absolute", path.display()));
            }
            let real = fs::canonicalize(&path).map_err(failed)?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let folder = rustix::fs::open(&real, flags, Mode::empty());
            let folder = folder.map_err(|e| failed(e.into()))?;
            Ok(Root { path: real, folder })
        };
        let hash = |text: String| {
            let plain = text.strip_prefix("sha256:").unwrap_or(&text);
            digest::from_hex(plain).ok_or_else(|| {
                let shown: String = text.chars().take(80).collect();
                format!("hashes: {shown:?} is no SHA-256 in hexadecimal")
            })
        };
        let model = |(name, path): (String, PathBuf)| {
            let name = ModelName::new(name).map_err(|e| format!("models: {e}"))?;
            match path.is_absolute() {
                true => Ok((name, path)),
                false => Err(format!("models: the path of {name} is not absolute")),
            }
        };
        let UntrustedKeys {
            allow,
            memory,
            threads,
            max_tokens,
            load_timeout,
            sealed_bytes,
        } = keys.untrusted;
        if threads == 0 || max_tokens == 0 || memory < 64 << 20 {
            return Err(
                "untrusted: threads and max_tokens must be at least 1, and memory 64 MiB"
                    .to_owned(),
            );
        }
        let hashes = keys.hashes.map(|all| all.into_iter().map(hash).collect());
        Ok(Self {
            given: true,
            roots: keys.roots.into_iter().map(root).collect::<Result<_, _>>()?,
            hashes: hashes.transpose()?,
            require_inspection: keys.require_inspection,
            allow_suspicious: keys.allow_suspicious,
            max_file_bytes: keys.max_file_bytes,
            max_model_bytes: keys.max_model_bytes,
            refuses_untrusted: !allow,
            allowance: Allowance {
                memory,
                threads,
                tokens: max_tokens,
                load_time: load_timeout.map_or(Allowance::default().load_time, |s| s.0),
            },
            sealed_bytes,
            models: keys
                .models
                .into_iter()
                .map(model)
                .collect::<Result<_, _>>()?,
        })
    }

    /// Whether there is a policy at all.
    pub fn is_given(&self) -> bool {
        self.given
    }

    /// Whether more has to be known of a model than its files' names and sizes before it is loaded.
    pub fn has_gates(&self) -> bool {
        self.hashes.is_some() || self.require_inspection
    }

    /// Whether a path without links lies beneath a root.
    pub fn covers(&self, real: &Path) -> bool {
        self.roots.iter().any(|root| real.starts_with(&root.path))
    }

    /// Opens the file at a path without links if it lies beneath a root, from there on and without ever leaving it.
    pub fn open(&self, real: &Path, flags: OFlags) -> Option<io::Result<OwnedFd>> {
        let inside = |root: &Root| {
            let rest = real.strip_prefix(&root.path).ok()?;
            let strict =
                ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            let opened = rustix::fs::openat2(&root.folder, rest, flags, Mode::empty(), strict);
            Some(match opened {
                // Kernels before 5.6, and sandboxes that do not know the call: at least the last part is no link.
                Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
                    let flags = flags | OFlags::NOFOLLOW;
                    rustix::fs::openat(CWD, real, flags, Mode::empty()).map_err(Into::into)
                }
                opened => opened.map_err(Into::into),
            })
        };
        self.roots.iter().find_map(inside)
    }

    /// Refuses what is too large, or untrusted where nothing untrusted is allowed.
    ///
    /// # Errors
    /// [`Reason::ModelNotAllowed`].
    pub fn check<'a>(
        &self,
        files: impl Iterator<Item = (&'a str, u64)>,
        is_trusted: bool,
    ) -> Result<(), Error> {
        if self.refuses_untrusted && !is_trusted {
            let what = "the model lies outside of the trusted roots, and the policy allows no untrusted models; \
                        move it beneath one of `roots` or set `untrusted.allow`";
            return Err(not_allowed(what.to_owned()));
        }
        let mut sum = 0u64;
        for (name, bytes) in files {
            if let Some(most) = self.max_file_bytes.filter(|most| bytes > *most) {
                let what =
                    format!("its file {name} has {bytes} bytes, and the policy allows {most}");
                return Err(not_allowed(what).with("file", name));
            }
            sum = sum.saturating_add(bytes);
        }
        match self.max_model_bytes.filter(|most| sum > *most) {
            Some(most) => {
                let what = format!("its files have {sum} bytes, and the policy allows {most}");
                Err(not_allowed(what))
            }
            None => Ok(()),
        }
    }

    /// Refuses files whose digests are not listed, if any are.
    ///
    /// # Errors
    /// [`Reason::ModelNotAllowed`], naming the file and its digest.
    pub fn check_hashes<'a>(
        &self,
        files: impl Iterator<Item = (&'a str, &'a Sha)>,
    ) -> Result<(), Error> {
        let Some(hashes) = &self.hashes else {
            return Ok(());
        };
        for (name, sha) in files {
            if !hashes.contains(sha) {
                let sha = digest::hex(sha);
                let what = format!(
                    "its file {name} has the SHA-256 {sha}, which the policy does not list"
                );
                return Err(not_allowed(what).with("file", name).with("sha256", sha));
            }
        }
        Ok(())
    }

    /// Whether a model may be loaded with this verdict.
    ///
    /// # Errors
    /// Why not: the reason for which it was refused, or [`Reason::ModelNotAllowed`].
    pub fn judge(&self, found: &Inspection) -> Result<(), Error> {
        match found.verdict() {
            Verdict::Fine => Ok(()),
            Verdict::Suspicious if self.allow_suspicious => Ok(()),
            Verdict::Suspicious => {
                let first = found.findings.first();
                let what = first.map_or("", |finding| finding.what.as_str());
                Err(not_allowed(format!(
                    "the inspection found it suspicious: {what}; `hotcell inspect` shows all, `allow_suspicious` lets it in"
                )))
            }
            Verdict::Refused => {
                let reason = Reason::from_name(&found.reason).unwrap_or(Reason::NotAModel);
                Err(Error::new(
                    reason,
                    format!("the inspection refused it: {}", found.problem),
                ))
            }
            Verdict::Died | Verdict::Unspecified => {
                let how = found
                    .death
                    .as_ref()
                    .map_or("", |death| death.reason.as_str());
                Err(not_allowed(format!(
                    "the worker that looked into it died: {how}"
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, time::Duration};

    use hotcell_proto::v1::Finding;

    use super::*;

    const READ: OFlags = OFlags::RDONLY;

    #[test]
    fn a_file_of_each_key_is_read_and_mistakes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().display();
        let sha = "ab".repeat(32);
        let text = format!(
            "roots = [\"{root}\"]\nhashes = [\"sha256:{sha}\"]\nrequire_inspection = true\nallow_suspicious = true\n\
             max_file_bytes = 100\nmax_model_bytes = 150\n[untrusted]\nallow = false\nmemory = 1_000_000_000\nthreads = 2\n\
             max_tokens = 512\nload_timeout = \"5s\"\nsealed_bytes = 7\n[models]\na = \"/m/a\"\n"
        );
        let policy = ModelPolicy::parse(&text).unwrap();
        assert!(policy.is_given() && policy.has_gates() && policy.require_inspection);
        let Allowance {
            memory,
            threads,
            tokens,
            load_time,
        } = policy.allowance;
        assert_eq!((memory, threads, tokens), (1_000_000_000, 2, 512));
        assert_eq!(
            (load_time, policy.sealed_bytes),
            (Duration::from_secs(5), 7)
        );
        assert_eq!(policy.models.len(), 1);
        for (text, word) in [
            ("root = []", "root"),
            ("roots = [\"models\"]", "absolute"),
            ("roots = [\"/nowhere/at/all\"]", "/nowhere/at/all"),
            ("hashes = [\"abc\"]", "abc"),
            ("[models]\n\"a b\" = \"/x\"", "a b"),
            ("[models]\na = \"x\"", "absolute"),
            ("[untrusted]\nthreads = 0", "threads"),
            ("[untrusted]\nload_timeout = \"soon\"", "soon"),
        ] {
            let error = ModelPolicy::parse(text).unwrap_err();
            assert!(error.contains(word), "{word} is not in {error}");
        }
        let none = ModelPolicy::default();
        assert!(!none.is_given() && !none.has_gates());
        assert_eq!(none.check([("a", u64::MAX)].into_iter(), false), Ok(()));
    }

    #[test]
    fn only_what_lies_beneath_a_root_is_opened_from_there() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (root, out) = (
            dir.path().canonicalize().unwrap(),
            other.path().canonicalize().unwrap(),
        );
        fs::create_dir(root.join("m")).unwrap();
        fs::write(root.join("m/a.gguf"), "a").unwrap();
        fs::write(out.join("b.gguf"), "b").unwrap();
        symlink(&out, root.join("out")).unwrap();
        symlink("a.gguf", root.join("m/link.gguf")).unwrap();
        let text = format!("roots = [\"{}\"]", root.display());
        let policy = ModelPolicy::parse(&text).unwrap();
        assert!(policy.covers(&root.join("m/a.gguf")) && !policy.covers(&out.join("b.gguf")));
        assert!(policy.open(&root.join("m/a.gguf"), READ).unwrap().is_ok());
        assert!(policy.open(&out.join("b.gguf"), READ).is_none());
        // Paths are resolved before; one that gained a link meanwhile is not followed, wherever it leads.
        for gained in ["out/b.gguf", "m/link.gguf", "m/../../b.gguf"] {
            assert!(
                policy.open(&root.join(gained), READ).unwrap().is_err(),
                "{gained}"
            );
        }
        // Beside the root, and not beneath it, by its name.
        let beside = PathBuf::from(format!("{}-b/x", root.display()));
        assert!(!policy.covers(&beside) && policy.open(&beside, READ).is_none());
    }

    #[test]
    fn sizes_hashes_and_verdicts_are_gates() {
        let sha = digest::from_hex(&"ab".repeat(32)).unwrap();
        let text = format!(
            "max_file_bytes = 100\nmax_model_bytes = 150\nhashes = [\"{}\"]\n[untrusted]\nallow = false",
            "AB".repeat(32)
        );
        let policy = ModelPolicy::parse(&text).unwrap();
        let sizes = |all: &[u64], trusted| policy.check(all.iter().map(|n| ("f", *n)), trusted);
        assert_eq!(sizes(&[100, 50], true), Ok(()));
        for (all, trusted) in [
            (&[101][..], true),
            (&[80, 80], true),
            (&[u64::MAX, 1], true),
            (&[1], false),
        ] {
            assert_eq!(
                sizes(all, trusted).unwrap_err().reason(),
                Reason::ModelNotAllowed
            );
        }
        assert_eq!(policy.check_hashes([("a", &sha)].into_iter()), Ok(()));
        let error = policy.check_hashes([("a", &sha), ("b", &[0; 32])].into_iter());
        let error = error.unwrap_err();
        assert_eq!(error.get("file"), Some("b"));

        let found = |verdict: Verdict| Inspection {
            verdict: verdict.into(),
            reason: Reason::ModelCorrupt.name().to_owned(),
            findings: vec![Finding::default()],
            ..Inspection::default()
        };
        let reason = |policy: &ModelPolicy, verdict| {
            let judged = policy.judge(&found(verdict));
            judged.map_err(|error| error.reason())
        };
        assert_eq!(reason(&policy, Verdict::Fine), Ok(()));
        assert_eq!(
            reason(&policy, Verdict::Suspicious),
            Err(Reason::ModelNotAllowed)
        );
        assert_eq!(reason(&policy, Verdict::Refused), Err(Reason::ModelCorrupt));
        assert_eq!(reason(&policy, Verdict::Died), Err(Reason::ModelNotAllowed));
        let lenient = ModelPolicy::parse("allow_suspicious = true").unwrap();
        assert_eq!(reason(&lenient, Verdict::Suspicious), Ok(()));
    }
}
