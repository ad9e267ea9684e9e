//! `hotcell inspect`: what is in a model that nobody knows, and what a worker that read it came to.

use std::fmt::Write as _;

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    v1::{CrashReport, Inspected, Inspection, Verdict},
};
use serde_json::json;

use crate::local::Bundled;

use super::{
    GlobalFlags,
    exit::Failure,
    flags::ModelRef,
    interrupt::Interrupt,
    json,
    session::Session,
    table::{bytes, count},
    ui::{Ui, one_line},
};

/// Metadata entries that are shown without `--verbose`.
const SOME_ENTRIES: usize = 12;

/// `hotcell inspect`.
#[derive(Args, Clone, Debug)]
pub struct InspectFlags {
    /// A folder or .gguf file as the scheduler sees it, or the name of a configured model
    #[arg(value_name = "PATH-or-NAME")]
    pub model: String,
    /// Start a scheduler of its own even if one runs
    #[arg(long)]
    pub private: bool,
}

pub(crate) async fn inspect(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &InspectFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let model = ModelRef::parse(&flags.model);
    let mut session =
        Session::running_or_private(ui, global, flags.private, &model, bundled).await?;
    let (name, path) = match &model {
        ModelRef::Name(name) => (name.as_str(), String::new()),
        ModelRef::Path(path) => ("", session.path(path)?),
    };
    let bar = ui.progress(&format!("looking into {}", flags.model));
    let found = tokio::select! {
        found = session.client.inspect(name, &path) => found,
        () = interrupt.pressed() => {
            bar.finish_and_clear();
            return Err(Failure::Interrupted);
        }
    };
    bar.finish_and_clear();
    let found = match found {
        Ok(found) => found,
        Err(error) => return Err(session.explain(error).await.into()),
    };
    session.end().await;
    if ui.manner.json {
        let mut view = json!(found);
        view["verdict"] = json!(json::verdict(found.verdict));
        ui.print_json(&view)?;
    } else {
        let text = told(&found, ui.manner.verbose);
        ui.print_text(&text)?;
    }
    judge(&found)
}

/// What the command ends with.
fn judge(found: &Inspection) -> Result<(), Failure> {
    match found.verdict() {
        Verdict::Fine => Ok(()),
        Verdict::Suspicious => {
            let findings = found.findings.len();
            let what = format!("the model is suspicious: {findings} findings, see above");
            Err(Failure::Suspicious(Error::new(
                Reason::ModelNotAllowed,
                what,
            )))
        }
        Verdict::Refused => {
            let reason = Reason::from_name(&found.reason).unwrap_or(Reason::NotAModel);
            Err(Failure::Unusable(Error::new(reason, &found.problem)))
        }
        Verdict::Died | Verdict::Unspecified => {
            let how = found
                .death
                .as_ref()
                .map_or("it is not known how", |d| &d.reason);
            let what = format!("the worker that looked into the model died: {how}");
            Err(Failure::Unusable(Error::new(Reason::WorkerLost, what)))
        }
    }
}

/// All of it in words, a fact on each line.
fn told(found: &Inspection, verbose: bool) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |what: &str, value: String| {
        if !value.is_empty() {
            let _ = writeln!(text, "{what:<10} {}", one_line(&value));
        }
    };
    line("verdict", json::verdict(found.verdict));
    line("source", found.source.clone());
    for file in &found.files {
        let sha = match file.sha256.as_str() {
            "" => String::new(),
            sha => format!(", sha256 {sha}"),
        };
        line("file", format!("{}, {}{sha}", file.name, bytes(file.bytes)));
    }
    if let Some(contents) = &found.contents {
        told_contents(contents, verbose, &mut line);
    }
    if let Some(summary) = &found.summary {
        let what = format!(
            "{} with {} parameters, context {}, {}",
            summary.architecture,
            count(summary.parameters),
            summary.context_length,
            summary.weights_dtype
        );
        line("loaded as", what);
    }
    if found.peak_bytes > 0 {
        line(
            "took",
            format!("{} besides its files", bytes(found.peak_bytes)),
        );
    }
    line("would be", found.trust_domain.clone());
    for finding in &found.findings {
        line("finding", format!("{}: {}", finding.kind, finding.what));
    }
    if found.verdict() == Verdict::Refused {
        line("refused", format!("{}: {}", found.reason, found.problem));
    }
    if let Some(death) = &found.death {
        told_death(death, &mut line);
    }
    if verbose {
        line("confined", found.confinement.clone());
    }
    text
}

fn told_contents(contents: &Inspected, verbose: bool, line: &mut impl FnMut(&str, String)) {
    line("format", contents.format.clone());
    let mut model = contents.architecture.clone();
    if contents.layers > 0 {
        let _ = write!(
            model,
            ", {} layers, {} parameters, context {}, vocabulary {}",
            contents.layers,
            count(contents.parameters),
            contents.context_length,
            contents.vocabulary
        );
    }
    line("model", model);
    if contents.tensor_count > 0 {
        let kinds = contents.tensor_types.iter().map(|kind| {
            let note = if kind.supported {
                ""
            } else {
                ", not supported"
            };
            format!(
                "{} {} ({}{note})",
                kind.count,
                kind.dtype,
                bytes(kind.bytes)
            )
        });
        let kinds: Vec<_> = kinds.collect();
        let (n, size) = (contents.tensor_count, bytes(contents.tensor_bytes));
        line("tensors", format!("{n} of {size}: {}", kinds.join(", ")));
    }
    if contents.tokenizer_tokens > 0 {
        line("tokenizer", format!("{} tokens", contents.tokenizer_tokens));
    }
    if let Some(template) = &contents.template {
        let what = match (template.present, template.renders) {
            (false, _) => "none".to_owned(),
            (true, true) => format!("{}, renders", bytes(template.bytes)),
            (true, false) => format!("{}, fails: {}", bytes(template.bytes), template.problem),
        };
        line("template", what);
    }
    if contents.work_bytes > 0 {
        let (weights, cache, work) = (
            bytes(contents.tensor_bytes),
            bytes(contents.cache_bytes),
            bytes(contents.work_bytes),
        );
        let what = format!("weights {weights}, cache up to {cache}, work {work}");
        line("memory", what);
    }
    let shown = if verbose { usize::MAX } else { SOME_ENTRIES };
    for entry in contents.metadata.iter().take(shown) {
        line(
            "metadata",
            format!("{} ({}) = {}", entry.key, entry.kind, entry.value),
        );
    }
    let left = contents
        .metadata_count
        .saturating_sub(contents.metadata.len().min(shown) as u64);
    if left > 0 {
        line("metadata", format!("and {left} more"));
    }
}

fn told_death(death: &CrashReport, line: &mut impl FnMut(&str, String)) {
    line("died", death.reason.clone());
    if let Some(seen) = &death.blackbox {
        line("doing", seen.doing.clone());
        line("error", seen.error.clone());
    }
    for said in &death.log {
        line("log", said.clone());
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{Finding, MetadataEntry};

    use super::*;
    use crate::cli::exit::Exit;

    fn exit(verdict: Verdict) -> Exit {
        let found = Inspection {
            verdict: verdict.into(),
            reason: "LIMIT_EXCEEDED".to_owned(),
            ..Inspection::default()
        };
        judge(&found).map_or_else(|failure| failure.exit(), |()| Exit::Success)
    }

    #[test]
    fn each_verdict_has_its_exit_code() {
        assert_eq!(exit(Verdict::Fine), Exit::Success);
        assert_eq!(exit(Verdict::Suspicious), Exit::Suspicious);
        assert_eq!(exit(Verdict::Refused), Exit::ModelUnusable);
        assert_eq!(exit(Verdict::Died), Exit::ModelUnusable);
        assert_eq!(exit(Verdict::Unspecified), Exit::ModelUnusable);
    }

    #[test]
    fn a_file_cannot_steer_the_terminal() {
        let entry = |n: usize| MetadataEntry {
            key: format!("key{n}"),
            kind: "string".into(),
            value: "a\u{1b}[2Jb\nc".into(),
            bytes: 6,
        };
        let found = Inspection {
            verdict: Verdict::Suspicious.into(),
            contents: Some(Inspected {
                metadata: (0..20).map(entry).collect(),
                metadata_count: 30,
                ..Inspected::default()
            }),
            findings: vec![Finding {
                kind: "trailing_bytes".into(),
                what: "9000 bytes".into(),
            }],
            ..Inspection::default()
        };
        let text = told(&found, false);
        assert!(text.starts_with("verdict    suspicious\n"), "{text}");
        assert!(
            text.contains("finding    trailing_bytes: 9000 bytes\n"),
            "{text}"
        );
        assert!(text.contains("metadata   and 18 more\n"), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains("b\nc"), "{text}");
        assert!(told(&found, true).contains("metadata   and 10 more\n"));
    }
}
