//! Looking into models: a throw-away worker reads, loads and computes one, within bounds, and serves nobody.

use std::{io, path::PathBuf, pin::pin, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{
        ChatTemplateReport, Device, Finding, InspectRequest, Inspected, InspectedFile, Inspection,
        MetadataEntry, TensorType, Verdict,
    },
};
use tokio::time::{Instant, timeout};

use super::{
    Fleet, Link, LoadFailure, Order, Role,
    aside::Aside,
    autopsy, is_broken,
    loading::{Beside, failure},
    slot::{INSPECTION, TRUSTED, UNTRUSTED},
    words,
};
use crate::{
    audit::{Entry, Who},
    death::{Death, DeathKind, Ended, cause, classify},
    digest,
    discover::clip,
    known::Answer,
    vault::{OpenModel, Source},
};

/// How long the end of a process may take to show after the conversation with it broke.
const POST_MORTEM: Duration = Duration::from_millis(500);

/// How long the files of a model that cannot be used are hashed after that is known.
const HASHING: Duration = Duration::from_secs(1);

/// The name that the model has in its throw-away worker.
const NAME: &str = "inspected";

/// A worker's report, within bounds.
fn believe(said: Inspected) -> Inspected {
    let some = limits::MAX_FINDINGS;
    Inspected {
        format: clip(&said.format),
        architecture: clip(&said.architecture),
        metadata: said
            .metadata
            .into_iter()
            .take(limits::MAX_INSPECTED_ENTRIES)
            .map(|entry| MetadataEntry {
                key: clip(&entry.key),
                kind: clip(&entry.kind),
                value: clip(&entry.value),
                bytes: entry.bytes,
            })
            .collect(),
        tensor_types: said
            .tensor_types
            .into_iter()
            .take(some)
            .map(|kind| TensorType {
                dtype: clip(&kind.dtype),
                ..kind
            })
            .collect(),
        template: said.template.map(|template| ChatTemplateReport {
            problem: clip(&template.problem),
            ..template
        }),
        findings: said
            .findings
            .into_iter()
            .take(some)
            .map(|finding| Finding {
                kind: clip(&finding.kind),
                what: clip(&finding.what),
            })
            .collect(),
        reason: clip(&said.reason),
        problem: clip(&said.problem),
        ..said
    }
}

/// Notes why it is refused.
fn refuse(found: &mut Inspection, reason: &str, problem: &str) {
    found.verdict = Verdict::Refused.into();
    reason.clone_into(&mut found.reason);
    problem.clone_into(&mut found.problem);
}

fn refuse_for(found: &mut Inspection, error: &Error) {
    refuse(found, error.reason().name(), error.message());
}

/// In which trust domain a model would be loaded.
fn domain(files: &OpenModel) -> &'static str {
    match files.alone() {
        Some(_) => UNTRUSTED,
        None => TRUSTED,
    }
}

impl Link {
    /// Has the worker read a model's files.
    ///
    /// # Errors
    /// [`LoadFailure`].
    pub(super) async fn inspect(
        &self,
        files: &OpenModel,
        patience: Duration,
    ) -> Result<Inspected, LoadFailure> {
        let request = InspectRequest {
            tag: self.send_files(files, std::iter::empty()).await?,
            files: files.handles(),
        };
        let mut control = self.control();
        match timeout(patience, control.inspect(request)).await {
            Ok(Ok(answer)) => Ok(believe(answer.into_inner())),
            Ok(Err(status)) => Err(failure(status)),
            Err(_) => {
                let why = format!("it had not read the files after {patience:?}");
                Err(LoadFailure::Broken(DeathKind::Deadline, why))
            }
        }
    }
}

impl Fleet {
    /// Looks into the model at a path, or into a known one.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`], [`Reason::ModelNotFound`], and what [`inspect`](Self::inspect) says. That it is no model is
    /// a verdict.
    pub async fn inspect_named(
        self: &Arc<Self>,
        name: Option<ModelName>,
        path: Option<PathBuf>,
        who: &Who,
    ) -> Result<Inspection, Error> {
        let (source, held) = match (path, name) {
            (Some(path), _) => (Source::Path(path), None),
            (None, Some(name)) => {
                let table = self.table();
                let model = table.key(&name).and_then(|key| table.models.get(key));
                let model = model.ok_or_else(|| table.unknown(&name))?;
                (model.source.clone(), model.files.clone())
            }
            (None, None) => {
                let why = "name a configured model, or give a path";
                return Err(Error::new(Reason::InvalidArgument, why));
            }
        };
        let files = match (&source, held) {
            (Source::Path(path), _) => self.open(path.clone()).await.map(Arc::new),
            (Source::Bundled, Some(files)) => Ok(files),
            (Source::Bundled, None) => Err(Error::new(
                Reason::ModelNotFound,
                "it has no bytes any more",
            )),
        };
        match files {
            Ok(files) => self.inspect(&source, &files, who).await,
            Err(error) if error.reason() == Reason::FileNotFound => Err(error),
            Err(error) => {
                let mut found = Inspection {
                    source: source.to_string(),
                    trust_domain: TRUSTED.to_owned(),
                    ..Inspection::default()
                };
                refuse_for(&mut found, &error);
                self.audit_verdict(&found, who);
                Ok(found)
            }
        }
    }

    /// Looks into an open model.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] when too many looks wait, and [`Reason::NoWorker`] when no worker can be started for it.
    pub async fn inspect(
        self: &Arc<Self>,
        source: &Source,
        files: &Arc<OpenModel>,
        who: &Who,
    ) -> Result<Inspection, Error> {
        let (_place, number) = self.gate.place(&self.timeouts).await?;
        let began = Instant::now();
        let mut found = Inspection {
            verdict: Verdict::Fine.into(),
            source: source.to_string(),
            trust_domain: domain(files).to_owned(),
            ..Inspection::default()
        };
        let mut hashing = pin!(digest::of_model(files));
        let mut hashes = None;
        let looked = {
            let mut look = pin!(self.look(&mut found, files, number));
            tokio::select! {
                looked = &mut look => looked,
                done = &mut hashing => {
                    hashes = Some(done);
                    look.await
                }
            }
        };
        looked?;
        let hashes = match hashes {
            Some(done) => done,
            // A file may claim any size; a model that cannot be used is not worth reading to its end.
            None => {
                let usable = found.verdict() == Verdict::Fine;
                let left = self.gate.policy.allowance.load_time;
                let left = left.saturating_sub(began.elapsed());
                let patience = if usable { left } else { left.min(HASHING) };
                let late = |_| Err(io::ErrorKind::TimedOut.into());
                timeout(patience, hashing).await.unwrap_or_else(late)
            }
        };
        let hashes = hashes.unwrap_or_default();
        let named = files.handles().into_iter().enumerate();
        found.files = named
            .map(|(at, file)| InspectedFile {
                name: clip(&file.name),
                bytes: file.bytes,
                sha256: hashes.get(at).map(digest::hex).unwrap_or_default(),
            })
            .collect();
        // What was read may be two states of it.
        if let (Err(error), true) = (files.check(), found.verdict() != Verdict::Died) {
            refuse_for(&mut found, &error);
        }
        if found.verdict() == Verdict::Fine && !found.findings.is_empty() {
            found.verdict = Verdict::Suspicious.into();
        }
        found.duration_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.audit_verdict(&found, who);
        Ok(found)
    }

    fn audit_verdict(&self, found: &Inspection, who: &Who) {
        let findings = found.findings.iter().map(|finding| finding.kind.as_str());
        let death = found.death.as_ref().map(|death| death.reason.clone());
        let detail = match found.problem.as_str() {
            "" => death.unwrap_or_else(|| findings.collect::<Vec<_>>().join(", ")),
            problem => problem.to_owned(),
        };
        self.gate.audit.note(Entry {
            event: "inspect",
            who: Some(who),
            source: found.source.clone(),
            trust_domain: &found.trust_domain,
            outcome: match found.verdict() {
                Verdict::Fine => "fine",
                Verdict::Suspicious => "suspicious",
                Verdict::Refused => "refused",
                Verdict::Died | Verdict::Unspecified => "died",
            },
            reason: &found.reason,
            detail,
            sha256: match found.files.as_slice() {
                [only] => only.sha256.clone(),
                _ => String::new(),
            },
            ..Entry::default()
        });
    }

    /// The worker whose device a throw-away worker takes.
    fn inspection_device(&self) -> Result<(String, Device), Error> {
        let table = self.table();
        let usable = table.workers.iter().filter(|(_, slot)| slot.hopeful);
        let idle = usable.min_by_key(|(id, slot)| (slot.outstanding(), id.as_str()));
        let found = idle.map(|(id, slot)| (id.clone(), slot.device.clone()));
        found.ok_or_else(|| {
            let why = "there is no device to look into a model on; `hotcell ps` shows why";
            Error::new(Reason::NoWorker, why)
        })
    }

    /// Has a throw-away worker read, load and compute a model.
    async fn look(
        &self,
        found: &mut Inspection,
        files: &Arc<OpenModel>,
        number: u64,
    ) -> Result<(), Error> {
        let (home, device) = self.inspection_device()?;
        let id = format!("{home}.inspect{number}");
        let allowance = self.gate.policy.allowance;
        let order = Order {
            worker: &id,
            epoch: 1,
            device: &device,
            allowance: Some(allowance),
            role: Role::Serves,
        };
        let aside = match self.begin_aside(order, INSPECTION).await {
            Ok(aside) => aside,
            Err(death) => {
                self.mourn_aside(&id, 1, &death, &Ended::default(), None);
                let why = format!("no worker came up to look into the model: {death}");
                return Err(Error::new(Reason::NoWorker, why));
            }
        };
        let Aside {
            listed,
            mut process,
            link,
        } = aside;
        found.confinement = listed.edit(|slot| slot.confinement.clone());
        let work = async {
            let late = format!("it was not done after {:?}", allowance.load_time);
            let talk = self.talk(&link, found, files);
            let done = timeout(allowance.load_time, talk).await;
            done.unwrap_or_else(|_| Err(Death::new(DeathKind::Deadline, late)))
        };
        let ended = tokio::select! {
            biased;
            ended = process.wait() => Some((classify(&ended), ended)),
            done = work => match done {
                Ok(()) => None,
                Err(broke) => {
                    let ended = match timeout(POST_MORTEM, process.wait()).await {
                        Ok(ended) => ended,
                        Err(_) => {
                            if broke.kind.stands_still() {
                                autopsy::point_out(process.as_ref()).await;
                            }
                            process.kill();
                            process.wait().await
                        }
                    };
                    Some((cause(&broke, classify(&ended)), ended))
                }
            },
        };
        let seen = process.blackbox().and_then(|b| b.snapshot().ok());
        found.peak_bytes = seen.map_or(0, |seen| seen.peak);
        let Some((death, ended)) = ended else {
            process.kill();
            let _ = timeout(self.policy.stop_timeout, process.wait()).await;
            return Ok(());
        };
        self.mourn_aside(&id, 1, &death, &ended, Some(process.as_ref()));
        found.verdict = Verdict::Died.into();
        found.death = self.crashes.get(&format!("{id}.1")).ok();
        Ok(())
    }

    /// The conversation. What the worker says goes into `found`.
    ///
    /// # Errors
    /// The worker's end, as it shows from here.
    async fn talk(
        &self,
        link: &Link,
        found: &mut Inspection,
        files: &Arc<OpenModel>,
    ) -> Result<(), Death> {
        let patience = self.policy.start_timeout;
        let died = |kind, why: String| Err(Death::new(kind, why));
        match link.inspect(files, patience).await {
            Ok(mut contents) => {
                found.findings = std::mem::take(&mut contents.findings);
                let reason = std::mem::take(&mut contents.reason);
                let problem = std::mem::take(&mut contents.problem);
                found.contents = Some(contents);
                if !reason.is_empty() {
                    refuse(found, &reason, &problem);
                    return Ok(());
                }
            }
            Err(LoadFailure::Refused(error)) => {
                refuse_for(found, &error);
                return Ok(());
            }
            Err(LoadFailure::Broken(kind, why)) => return died(kind, why),
        }
        let Ok(name) = ModelName::new(NAME) else {
            return Ok(());
        };
        match link
            .load(&name, files, Beside::default(), patience, |_| {})
            .await
        {
            Ok((loaded, _)) => found.summary = loaded.summary,
            Err(LoadFailure::Refused(error)) => {
                refuse_for(found, &error);
                return Ok(());
            }
            Err(LoadFailure::Broken(kind, why)) => {
                return died(kind, format!("while loading it: {why}"));
            }
        }
        let mut signs = link.signs(patience);
        match signs.wait(link.check(&name, 1, None)).await {
            Some(Ok(said)) => match Answer::believe(&said, 1) {
                Ok(_) => Ok(()),
                Err(lie) => died(DeathKind::Protocol, format!("it said {lie}")),
            },
            Some(Err(status)) if is_broken(&status) => {
                died(DeathKind::Protocol, "while computing a token".to_owned())
            }
            Some(Err(status)) => {
                refuse_for(found, &words(&status));
                Ok(())
            }
            None => died(DeathKind::Deadline, format!("no token for {patience:?}")),
        }
    }
}
