//! `generate --receipt` and `verify`: an answer in a file, and whether it comes again.

use std::{fs, io, io::Write as _, path::Path};

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    receipt::{self, Output, hex},
    v1::{self, FinishReason},
};
use serde::{Deserialize, Serialize};

use crate::tokens::{Event, GenerateOptions, Grammar, Prompt};

use super::{GlobalFlags, exit::Failure, interrupt::Interrupt, json, session::Session, ui::Ui};

/// Of this file's layout.
const LAYOUT: u32 = 1;

/// Bytes of one receipt's file; the largest prompt and answer fit.
const MAX_FILE: u64 = 256 << 20;

/// `hotcell verify`.
#[derive(Args, Clone, Debug)]
pub struct VerifyFlags {
    /// A file that `hotcell generate --receipt` wrote
    #[arg(value_name = "FILE")]
    pub file: String,
}

/// All that it takes to run a request again, its answer, and what the answer says about itself.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    layout: u32,
    model: String,
    request: Asked,
    answer: Answer,
    receipt: Stamp,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    prompt_ids: Vec<u32>,
    sampling: Sampling,
    max_tokens: u32,
    stop: Vec<String>,
    stop_tokens: Vec<u32>,
    ignore_eos: bool,
    seed: u64,
    branch: u32,
    /// Not in the file without one, as before there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    grammar: Option<Shape>,
}

/// What the text had to be.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Shape {
    JsonSchema(String),
    Regex(String),
    Lark(String),
    JsonObject(bool),
    ToolCalls(Vec<ToolView>),
    ToolCall(Vec<ToolView>),
}

/// A tool that could be called.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ToolView {
    name: String,
    description: String,
    parameters: String,
}

impl From<&Grammar> for Shape {
    fn from(grammar: &Grammar) -> Self {
        match grammar {
            Grammar::JsonSchema(text) => Self::JsonSchema(text.clone()),
            Grammar::Regex(text) => Self::Regex(text.clone()),
            Grammar::Lark(text) => Self::Lark(text.clone()),
            Grammar::JsonObject(any) => Self::JsonObject(*any),
            Grammar::ToolCalls(calls) => {
                let view = |tool: &v1::Tool| ToolView {
                    name: tool.name.clone(),
                    description: tool.description.clone(),
                    parameters: tool.parameters.clone(),
                };
                let tools = calls.tools.iter().map(view).collect();
                match calls.single {
                    true => Self::ToolCall(tools),
                    false => Self::ToolCalls(tools),
                }
            }
        }
    }
}

impl From<&Shape> for Grammar {
    fn from(shape: &Shape) -> Self {
        match shape {
            Shape::JsonSchema(text) => Self::JsonSchema(text.clone()),
            Shape::Regex(text) => Self::Regex(text.clone()),
            Shape::Lark(text) => Self::Lark(text.clone()),
            Shape::JsonObject(any) => Self::JsonObject(*any),
            Shape::ToolCalls(tools) | Shape::ToolCall(tools) => {
                let tool = |view: &ToolView| v1::Tool {
                    name: view.name.clone(),
                    description: view.description.clone(),
                    parameters: view.parameters.clone(),
                };
                let tools = tools.iter().map(tool).collect();
                let single = matches!(shape, Shape::ToolCall(_));
                Self::ToolCalls(v1::ToolCalls { tools, single })
            }
        }
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sampling {
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Vec<(u32, f32)>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    token_ids: Vec<u32>,
    text: String,
    reason: String,
    matched_stop: String,
}

/// A receipt as files and `--json` show it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stamp {
    numerics_class: String,
    reproducible: bool,
    model_hash: String,
    seed: u64,
    request_hash: String,
    output_hash: String,
    /// Empty if part of the text was said elsewhere.
    text_hash: String,
    deaths_survived: u32,
    continued_across: bool,
    hotcell_version: String,
}

impl From<&v1::Receipt> for Stamp {
    fn from(receipt: &v1::Receipt) -> Self {
        let class = receipt.numerics.clone().unwrap_or_default();
        Self {
            numerics_class: class.id,
            reproducible: class.reproducible,
            model_hash: class.model_hash,
            seed: receipt.seed,
            request_hash: hex(&receipt.request_hash),
            output_hash: hex(&receipt.output_hash),
            text_hash: hex(&receipt.text_hash),
            deaths_survived: receipt.deaths_survived,
            continued_across: receipt.continued_across,
            hotcell_version: receipt.version.clone(),
        }
    }
}

impl Asked {
    fn new(options: &GenerateOptions, accepted: &v1::Accepted) -> Self {
        let s = &options.sampling;
        let biases = s.logit_bias.iter().map(|b| (b.token, b.bias));
        Self {
            prompt_ids: accepted.prompt_ids.clone(),
            sampling: Sampling {
                temperature: s.temperature,
                top_k: s.top_k,
                top_p: s.top_p,
                min_p: s.min_p,
                repetition_penalty: s.repetition_penalty,
                presence_penalty: s.presence_penalty,
                frequency_penalty: s.frequency_penalty,
                logit_bias: biases.collect(),
            },
            max_tokens: options.max_tokens,
            stop: options.stop.clone(),
            stop_tokens: options.stop_tokens.clone(),
            ignore_eos: options.ignore_eos,
            seed: accepted.seed,
            branch: options.branch,
            grammar: options.grammar.as_ref().map(Shape::from),
        }
    }

    fn options(&self, model: &str) -> GenerateOptions {
        let s = &self.sampling;
        let bias = |&(token, bias): &(u32, f32)| v1::LogitBias { token, bias };
        GenerateOptions {
            model: model.to_owned(),
            sampling: v1::Sampling {
                temperature: s.temperature,
                top_k: s.top_k,
                top_p: s.top_p,
                min_p: s.min_p,
                repetition_penalty: s.repetition_penalty,
                presence_penalty: s.presence_penalty,
                frequency_penalty: s.frequency_penalty,
                logit_bias: s.logit_bias.iter().map(bias).collect(),
            },
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            stop_tokens: self.stop_tokens.clone(),
            ignore_eos: self.ignore_eos,
            seed: Some(self.seed),
            branch: self.branch,
            grammar: self.grammar.as_ref().map(Grammar::from),
            ..GenerateOptions::default()
        }
    }

    fn hash(&self) -> String {
        let options = self.options("");
        let request = v1::GenerateRequest {
            sampling: Some(options.sampling),
            max_tokens: options.max_tokens,
            stop: options.stop,
            stop_tokens: options.stop_tokens,
            ignore_eos: options.ignore_eos,
            branch: options.branch,
            grammar: options.grammar.map(|kind| v1::Grammar { kind: Some(kind) }),
            ..v1::GenerateRequest::default()
        };
        hex(&receipt::request_hash(
            &self.prompt_ids,
            self.seed,
            &request,
        ))
    }
}

impl Record {
    /// Reads a file, and whether it still is what was written.
    fn read(path: &str) -> Result<Self, Error> {
        let cannot = |e: io::Error| {
            let what = format!("cannot read the receipt {path}: {e}");
            Error::new(Reason::FileNotFound, what)
        };
        if fs::metadata(path).map_err(cannot)?.len() > MAX_FILE {
            let what = format!("{path} is larger than any receipt");
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        let text = fs::read_to_string(path).map_err(cannot)?;
        let record: Self = serde_json::from_str(&text).map_err(|e| {
            let what = format!("{path} is no receipt that this version can read: {e}");
            Error::new(Reason::InvalidArgument, what)
        })?;
        match record.changed() {
            None => Ok(record),
            Some(what) => Err(Error::new(
                Reason::InvalidArgument,
                format!(
                    "{path} is not as it was written: its {what} is not the one that its receipt is about"
                ),
            )),
        }
    }

    fn changed(&self) -> Option<&'static str> {
        let (answer, stamp) = (&self.answer, &self.receipt);
        let reason = format!("FINISH_REASON_{}", answer.reason.to_ascii_uppercase());
        let reason = FinishReason::from_str_name(&reason).unwrap_or_default();
        let mut output = Output::new(&[], 0);
        output.push(&answer.token_ids, &answer.text);
        let (ids, text) = output.finish(reason, &answer.matched_stop);
        let text = text.map(|text| hex(&text));
        if self.layout != LAYOUT {
            Some("layout")
        } else if self.request.hash() != stamp.request_hash || self.request.seed != stamp.seed {
            Some("request")
        } else if hex(&ids) != stamp.output_hash {
            Some("list of tokens")
        } else if !stamp.text_hash.is_empty() && text.as_ref() != Some(&stamp.text_hash) {
            Some("text")
        } else {
            None
        }
    }
}

/// A file for a receipt, opened before the request is sent: what cannot be written is told at once. One that was not there before, and into
/// which nothing came, does not stay.
pub(crate) struct Destination {
    file: fs::File,
    path: String,
    is_new: bool,
}

impl Drop for Destination {
    fn drop(&mut self) {
        if self.is_new {
            // Nobody is told: what went wrong was said already.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Destination {
    pub(crate) fn open(path: &str) -> Result<Self, Failure> {
        let mut options = fs::OpenOptions::new();
        let (opened, is_new) = match options.write(true).create_new(true).open(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                // Or a link to what is not there.
                let mut there = fs::OpenOptions::new();
                let there = there.write(true).create(true).truncate(false);
                (there.open(path), false)
            }
            opened => (opened, true),
        };
        Ok(Self {
            file: opened.map_err(|e| named(path, &e))?,
            path: path.to_owned(),
            is_new,
        })
    }

    /// Writes what is needed to run a finished request again.
    pub(crate) fn write(
        mut self,
        options: &GenerateOptions,
        accepted: &v1::Accepted,
        (token_ids, text): (&[u32], &str),
        finished: &v1::Finished,
    ) -> Result<(), Failure> {
        let Some(receipt) = &finished.receipt else {
            let what = "this server gives no receipts; it is of an older version";
            return Err(Error::new(Reason::ProtocolMismatch, what).into());
        };
        let record = Record {
            layout: LAYOUT,
            model: accepted.model.clone(),
            request: Asked::new(options, accepted),
            answer: Answer {
                token_ids: token_ids.to_vec(),
                text: text.to_owned(),
                reason: json::finish_reason(finished.reason),
                matched_stop: finished.matched_stop.clone(),
            },
            receipt: receipt.into(),
        };
        let mut text = serde_json::to_string(&record).map_err(io::Error::from)?;
        text.push('\n');
        let written = self.file.set_len(0);
        let written = written.and_then(|()| self.file.write_all(text.as_bytes()));
        written.map_err(|e| named(&self.path, &e))?;
        self.is_new = false;
        Ok(())
    }
}

fn named(path: &str, error: &io::Error) -> Failure {
    let path = Path::new(path).display();
    Failure::Output(io::Error::new(error.kind(), format!("{path}: {error}")))
}

/// What `verify` prints with `--json` if all is equal.
#[derive(Serialize)]
struct Equal<'a> {
    equal: bool,
    tokens: usize,
    numerics_class: &'a str,
}

pub(crate) async fn verify(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &VerifyFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let record = Record::read(&flags.file)?;
    let session = Session::running(global).await?;
    let stream = session.client.generate(
        Prompt::Ids(record.request.prompt_ids.clone()),
        record.request.options(&record.model),
    );
    let compared = async {
        let mut stream = stream.await?;
        let compared = compare(&record, &mut stream).await;
        stream.cancel().await;
        compared
    };
    tokio::select! {
        compared = compared => compared?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    }
    let tokens = record.answer.token_ids.len();
    let class = &record.receipt.numerics_class;
    if ui.manner.json {
        return ui.print_json(&Equal {
            equal: true,
            tokens,
            numerics_class: class,
        });
    }
    ui.print(&format!("equal: {tokens} tokens, in {class}\n"))
}

fn differs(what: String) -> Error {
    // The code is that of `Failure::Differs`; the reason is never shown.
    Error::new(Reason::ChecksumMismatch, what)
}

/// Compares while tokens come, and stops at the first that differs.
async fn compare(record: &Record, stream: &mut crate::Generation) -> Result<(), Failure> {
    let (answer, stamp) = (&record.answer, &record.receipt);
    let expected = &answer.token_ids;
    let caution = match stamp.reproducible {
        true => "",
        false => "; its numerics class is not reproducible, so that this proves nothing",
    };
    let at = |index: usize, got: Option<u32>| {
        let wanted = expected.get(index);
        let show = |id: Option<&u32>| id.map_or_else(|| "the end".to_owned(), u32::to_string);
        Failure::Differs(
            differs(format!(
                "token {index} differs: the receipt has {}, now it is {}{caution}",
                show(wanted),
                show(got.as_ref())
            ))
            .with("index", index)
            .with("expected", show(wanted))
            .with("got", show(got.as_ref())),
        )
    };
    if stamp.continued_across {
        return Err(Failure::Differs(differs(
            "part of it was computed in another numerics class; no one class gives it again"
                .to_owned(),
        )));
    }
    let (mut count, mut text) = (0, String::new());
    while let Some(event) = stream.next().await {
        match event? {
            Event::Accepted(accepted) => {
                let class = accepted.numerics.unwrap_or_default().id;
                if class != stamp.numerics_class {
                    return Err(Failure::Differs(
                        differs(format!(
                            "it cannot be verified here: the numerics class is {class}, the receipt's {}",
                            stamp.numerics_class
                        ))
                        .with("expected", &stamp.numerics_class)
                        .with("got", class),
                    ));
                }
            }
            Event::Delta(delta) => {
                for id in delta.token_ids {
                    if expected.get(count) != Some(&id) {
                        return Err(at(count, Some(id)));
                    }
                    count += 1;
                }
                text.push_str(&delta.text);
            }
            Event::Finished(finished) => {
                if count < expected.len() {
                    return Err(at(count, None));
                }
                let reason = json::finish_reason(finished.reason);
                let same_end =
                    reason == answer.reason && finished.matched_stop == answer.matched_stop;
                let what = match (same_end, text == answer.text) {
                    (true, true) => return Ok(()),
                    (false, _) => "ends for another reason",
                    (true, false) => "has another text",
                };
                return Err(Failure::Differs(differs(format!(
                    "the same {count} tokens come again, but the answer {what}"
                ))));
            }
        }
    }
    Err(differs("the stream ended early".to_owned()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let request = Asked {
            prompt_ids: vec![0, 5],
            sampling: Sampling {
                temperature: Some(0.1),
                top_k: None,
                top_p: Some(0.95),
                min_p: None,
                repetition_penalty: Some(1.1),
                presence_penalty: None,
                frequency_penalty: None,
                logit_bias: vec![(3, -1.5)],
            },
            max_tokens: 4,
            stop: vec!["\u{1F980}".into()],
            stop_tokens: vec![2],
            ignore_eos: true,
            seed: u64::MAX,
            branch: 1,
            grammar: Some(Shape::Regex("[ab]+".into())),
        };
        let mut output = Output::new(&[], 0);
        output.push(&[7, 8], "ab");
        let hashes = output.finish(FinishReason::StopString, "\u{1F980}");
        let class = v1::NumericsClass {
            id: "cpu/test".into(),
            reproducible: true,
            model_hash: "00ff".into(),
        };
        let stamp = receipt::receipt(Some(class), u64::MAX, [0; 32], hashes);
        Record {
            layout: LAYOUT,
            model: "kjv".into(),
            receipt: Stamp {
                request_hash: request.hash(),
                ..Stamp::from(&stamp)
            },
            request,
            answer: Answer {
                token_ids: vec![7, 8],
                text: "ab".into(),
                reason: "stop_string".into(),
                matched_stop: "\u{1F980}".into(),
            },
        }
    }

    #[test]
    fn a_record_survives_its_file_to_the_bit() {
        let text = serde_json::to_string(&record()).unwrap();
        let again: Record = serde_json::from_str(&text).unwrap();
        assert_eq!(again, record());
        assert_eq!(again.changed(), None);
    }

    #[test]
    fn whatever_is_changed_in_a_file_is_found() {
        let changed = |change: fn(&mut Record)| {
            let mut record = record();
            change(&mut record);
            record.changed()
        };
        assert_eq!(changed(|r| r.request.prompt_ids[0] = 1), Some("request"));
        assert_eq!(changed(|r| r.request.seed = 1), Some("request"));
        assert_eq!(
            changed(|r| r.request.sampling.temperature = None),
            Some("request")
        );
        assert_eq!(
            changed(|r| r.answer.token_ids[1] = 9),
            Some("list of tokens")
        );
        assert_eq!(
            changed(|r| r.answer.reason = "nonsense".into()),
            Some("list of tokens")
        );
        assert_eq!(changed(|r| r.answer.text.push('c')), Some("text"));
        assert_eq!(changed(|r| r.layout = 2), Some("layout"));
    }
}
