//! Loading a model from its files' descriptors, and from packed copies of them if there are any.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hotcell_ipc::{descriptors::DescriptorSender, memory::Mapping};
use hotcell_kernels::vault::Kept;
use hotcell_proto::{
    error::{Error, Reason},
    v1,
};
use tokio::sync::mpsc;

use super::{Host, Loaded, locked};
use crate::{
    engine::Ready,
    error::of_model,
    generate::grammar::Grammars,
    inspect,
    last_words::MappedFiles,
    model::{
        run::{GIVES_WAY, Keeping, Keeps, give_way},
        text::ModelText,
    },
    packing::{Copies, Places, Wanted, is_packable},
    weights::{ModelFile, ModelSource},
};

/// Bytes between two progress reports of a load, and time: of what is in memory every report would cost more than its pages.
const PROGRESS_BYTES: usize = 32 << 20;
const PROGRESS_TIME: Duration = Duration::from_millis(50);
/// Page size assumed when touching pages; touching more often than needed is harmless.
const PAGE: usize = 4096;
/// Bytes around a page that Linux maps with it, as far as they are in memory (`fault_around_bytes`); where it is told to map fewer,
/// computing waits for the rest, which is in memory.
const MAPPED_AT_ONCE: usize = 64 << 10;
/// Bytes that a thread touches before it looks what that took; and what it takes at most where all of them were in memory.
const TOUCHED_AT_ONCE: usize = 8 << 20;
const AT_HAND: Duration = Duration::from_millis(2);
/// Before an engine whose queue is full is asked again.
const AGAIN: Duration = Duration::from_millis(10);
/// Threads that touch pages at most.
const TOUCHERS: usize = 4;

/// What there is beside a model's files.
#[derive(Default)]
struct Beside {
    copies: Copies,
    keeping: Keeping,
    /// Where descriptors go of what is kept.
    keeper: Option<OwnedFd>,
}

fn internal(e: tokio::task::JoinError) -> Error {
    Error::new(Reason::Internal, format!("the load failed: {e}"))
}

impl Host {
    /// Loads a model whose descriptors come under the request's tag, in the order in which it names what they are of.
    ///
    /// # Errors
    /// When they do not come, or are no model that this worker can run.
    pub async fn load_by_descriptor(
        &self,
        request: v1::LoadRequest,
        progress: mpsc::Sender<v1::LoadProgress>,
    ) -> Result<Arc<Loaded>, Error> {
        let v1::LoadRequest {
            model: name,
            tag,
            files,
            packed,
            kept,
            keeps,
        } = request;
        let mut descriptors = self.descriptors(tag).await?;
        let came = descriptors.len();
        let told = told_of(kept);
        let pieces = (told.iter())
            .map(|kept| kept.pieces as usize)
            .fold(0, usize::saturating_add);
        let due = files.len().saturating_add(pieces) + usize::from(keeps);
        if came < due {
            let what = format!("{came} descriptors came where at least {due} are due");
            return Err(Error::new(Reason::ProtocolViolation, what));
        }
        let last = descriptors.split_off(came - usize::from(keeps));
        let mut pieces = descriptors
            .split_off(descriptors.len() - pieces)
            .into_iter();
        let copies = Copies::map(
            packed.unwrap_or_default(),
            descriptors.split_off(files.len()),
        )?;
        let files = files
            .into_iter()
            .zip(descriptors)
            .map(|(file, fd)| map_file(file.name, fd))
            .collect::<Result<Vec<_>, _>>()?;
        let kept = told.into_iter().map(|told| Kept {
            pieces: pieces.by_ref().take(told.pieces as usize).collect(),
            layout: told.layout,
            bytes: told.bytes,
            checksum: told.checksum,
        });
        let kept: Vec<Kept> = kept.collect();
        let beside = Beside {
            copies,
            keeping: match keeps || !kept.is_empty() {
                true => Keeping::Weights(kept),
                false => Keeping::Nothing,
            },
            keeper: last.into_iter().next(),
        };
        self.load_with(name, files, beside, progress).await
    }

    /// Says what is in the files whose descriptors come under `tag`, in the order of `files`. Loads nothing.
    ///
    /// # Errors
    /// When they do not come. That they are no model is part of the answer.
    pub async fn inspect(
        &self,
        tag: u64,
        files: Vec<v1::FileHandle>,
    ) -> Result<v1::Inspected, Error> {
        let descriptors = self.descriptors(tag).await?;
        if descriptors.len() != files.len() {
            let (came, due) = (descriptors.len(), files.len());
            let what = format!("{came} descriptors came for {due} files");
            return Err(Error::new(Reason::ProtocolViolation, what));
        }
        let look = move || {
            let files = files.into_iter().zip(descriptors);
            let files = files
                .map(|(file, fd)| map_file(file.name, fd))
                .collect::<Result<Vec<_>, _>>();
            match files {
                Ok(files) => {
                    let ranges = files.iter().map(|f| f.mapping.bytes().as_ptr_range());
                    let mapped = MappedFiles::note(ranges);
                    let (report, source) = inspect::read(&files);
                    (report, source.map(|source| (source, mapped)))
                }
                Err(error) => (refused(v1::Inspected::default(), &error), None),
            }
        };
        let (mut report, model) = tokio::task::spawn_blocking(look).await.map_err(internal)?;
        let Some((source, _mapped)) = model else {
            return Ok(report);
        };
        match self.0.engine.measure(source).await {
            Ok(sizes) => {
                (report.cache_bytes, report.work_bytes) = (sizes.cache, sizes.work);
                Ok(report)
            }
            Err(error) => Ok(refused(report, &error)),
        }
    }

    /// Loads a model from mapped files.
    ///
    /// # Errors
    /// When they are no model that this worker can run.
    pub async fn load(
        &self,
        name: String,
        files: Vec<ModelFile>,
        progress: mpsc::Sender<v1::LoadProgress>,
    ) -> Result<Arc<Loaded>, Error> {
        self.load_with(name, files, Beside::default(), progress)
            .await
    }

    /// The same, with what there is beside the files as far as that is of use.
    async fn load_with(
        &self,
        name: String,
        files: Vec<ModelFile>,
        beside: Beside,
        progress: mpsc::Sender<v1::LoadProgress>,
    ) -> Result<Arc<Loaded>, Error> {
        let Beside {
            copies,
            keeping,
            keeper,
        } = beside;
        if locked(&self.0.models).contains_key(&name) {
            let what = format!("model {name} is loaded already; unload it first");
            return Err(Error::new(Reason::ModelExists, what).with("model", name));
        }
        let mapped = MappedFiles::note(files.iter().map(|f| f.mapping.bytes().as_ptr_range()));
        let handed = files.clone();
        let open = move || ModelSource::open(handed).map_err(|e| of_model(&e));
        let opened = tokio::task::spawn_blocking(open).await.map_err(internal)?;
        let source = opened?;
        let (handed, offered, opened) = (files.clone(), copies.clone(), source.clone());
        // What is on the device need not be read.
        let is_there = matches!(&keeping, Keeping::Weights(kept) if !kept.is_empty());
        let enough = Arc::new(AtomicBool::new(is_there));
        let stop = Arc::clone(&enough);
        let read = move || -> Result<(ModelText, String), Error> {
            let touching = || touch(&opened, &handed, &offered, &progress, &stop);
            let (text, fingerprint) = thread::scope(|scope| {
                let helper = thread::Builder::new().name("touch".to_owned());
                let beside = helper.spawn_scoped(scope, touching).is_ok();
                let text = ModelText::open(&opened);
                // A model that cannot be used is not waited for.
                stop.fetch_or(text.is_err(), Ordering::Relaxed);
                let fingerprint = opened.fingerprint();
                if !beside {
                    touching();
                }
                (text, fingerprint)
            });
            Ok((text?, format!("{fingerprint:032x}")))
        };
        let weights = source.weights.clone();
        let (vocab, end_tokens) = (source.config.vocab as u32, source.config.eos.clone());
        let opened = source.clone();
        let called = name.clone();
        let load = async {
            let (engine, files) = (&self.0.engine, files.clone());
            let loaded = engine.load(called, source, files, keeping).await;
            enough.fetch_or(loaded.is_err(), Ordering::Relaxed);
            loaded
        };
        tokio::pin!(load);
        // The device makes ready beside that, unless others' steps would wait for the disk with it.
        let alone = locked(&self.0.models).is_empty();
        let read = tokio::task::spawn_blocking(read);
        let (read, ready) = match alone {
            true => {
                let (read, ready) = tokio::join!(read, &mut load);
                (read, Some(ready))
            }
            false => (read.await, None),
        };
        let (text, fingerprint) = match read.map_err(internal).flatten() {
            Ok(read) => read,
            Err(error) => {
                if let Some(Ok(_)) = ready {
                    self.take_back(&name).await;
                }
                return Err(error);
            }
        };
        let ready = match ready {
            Some(ready) => ready,
            None => load.await,
        };
        let Ready {
            shape,
            packable,
            keeps:
                Keeps {
                    kept,
                    found,
                    damaged,
                    bytes,
                },
        } = ready?;
        let summary = summary(&opened, &text, &fingerprint);
        let kept = match keeper.filter(|_| !kept.is_empty()) {
            Some(keeper) => leave(kept, keeper).await?,
            None => None,
        };
        let opened = self.0.engine.opened();
        let loaded = Arc::new(Loaded {
            text,
            context: shape.context,
            vocab,
            end_tokens,
            grammars: Grammars::default(),
            numerics: v1::NumericsClass {
                id: format!(
                    "{}/w:{fingerprint}/kv:{}",
                    opened.numerics,
                    self.0.engine.cache_dtype()
                ),
                reproducible: opened.reproducible,
                model_hash: fingerprint,
            },
            summary: v1::ModelSummary {
                context_length: shape.context as u32,
                ..summary
            },
            cache_tokens: (shape.blocks * shape.block_len) as u64,
            block_tokens: shape.block_len as u32,
            packing: Wanted::new(&files, &weights, &packable),
            packed: Mutex::default(),
            kept_bytes: if found || kept.is_some() { bytes } else { 0 },
            kept,
            found,
            damaged,
            gone: AtomicBool::new(false),
            weights,
            name: name.clone(),
            _mapped: mapped,
        });
        if !copies.is_empty()
            && let Err(error) = self.take_copies(&loaded, copies).await
        {
            tracing::warn!(model = name, %error, "packed weights are not used");
        }
        locked(&self.0.models).insert(name, Arc::clone(&loaded));
        Ok(loaded)
    }

    /// Has the engine forget a model that comes to nothing.
    async fn take_back(&self, name: &str) {
        while let Err(error) = self.0.engine.unload(name.to_owned()).await {
            if error.reason() != Reason::Overloaded {
                return;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Computes a model from packed copies from its next step on.
    ///
    /// # Errors
    /// [`Reason::ModelChanged`] when they are no such copies; what the engine says.
    pub(super) async fn take_copies(
        &self,
        model: &Arc<Loaded>,
        copies: Copies,
    ) -> Result<(), Error> {
        let (held, blackbox) = (Arc::clone(model), self.0.engine.blackbox());
        // Nobody packs meanwhile, or that one is named.
        let one = Arc::clone(&self.0.packing).try_acquire_owned().ok();
        let look = move || {
            let _says = one.as_ref().map(|_| blackbox.packs());
            let ranges = copies.all().map(|copy| copy.bytes().as_ptr_range());
            let mapped = MappedFiles::note(ranges);
            let weights = held.packing.packed(&copies)?;
            // So that the next step does not wait for the disk.
            weights
                .values()
                .for_each(|weight| touch_pages(weight.bytes()));
            Ok((weights, copies, mapped))
        };
        let looked = tokio::task::spawn_blocking(look).await.map_err(internal)?;
        let (weights, copies, mapped) = looked?;
        self.0
            .engine
            .use_packed(model.name.clone(), weights)
            .await?;
        *locked(&model.packed) = Some((copies, mapped));
        let held = Arc::clone(model);
        tokio::task::spawn_blocking(move || held.packing.forget())
            .await
            .map_err(internal)
    }
}

/// What was told of all members' memory, by their ranks.
fn told_of(kept: Option<v1::KeptWeights>) -> Vec<v1::KeptWeights> {
    let Some(mut first) = kept else {
        return Vec::new();
    };
    let members = std::mem::take(&mut first.members);
    std::iter::once(first).chain(members).collect()
}

/// Has the scheduler hold the descriptors of what is in the device's memory. What it is to be told of that; nothing if it
/// does not take them.
async fn leave(kept: Vec<Kept>, keeper: OwnedFd) -> Result<Option<v1::KeptWeights>, Error> {
    let mut told = kept.iter().map(|kept| v1::KeptWeights {
        layout: kept.layout.clone(),
        bytes: kept.bytes,
        checksum: kept.checksum,
        pieces: kept.pieces.len() as u32,
        members: vec![],
    });
    let told = told.next().map(|first| v1::KeptWeights {
        members: told.collect(),
        ..first
    });
    let send = move || {
        let pieces = kept.iter().flat_map(|kept| &kept.pieces);
        let pieces: Vec<_> = pieces.map(AsFd::as_fd).collect();
        DescriptorSender::new(keeper)?.send(0, &pieces)
    };
    match tokio::task::spawn_blocking(send).await.map_err(internal)? {
        Ok(()) => Ok(told),
        Err(error) => {
            tracing::warn!(%error, "weights end with this process");
            Ok(None)
        }
    }
}

/// Maps a model's file.
///
/// # Errors
/// [`Reason::NotAModel`] when it cannot be mapped.
pub fn map_file(name: String, fd: OwnedFd) -> Result<ModelFile, Error> {
    match Mapping::of_file(fd) {
        Ok(mapping) => Ok(ModelFile { name, mapping }),
        Err(error) => Err(Error::new(
            Reason::NotAModel,
            format!("{name} cannot be mapped: {error}"),
        )),
    }
}

/// A report on files that are no model that this worker can run.
fn refused(report: v1::Inspected, error: &Error) -> v1::Inspected {
    v1::Inspected {
        reason: error.reason().name().to_owned(),
        problem: error.message().to_owned(),
        ..report
    }
}

fn touch_every(step: usize, bytes: &[u8]) {
    let sum = bytes.iter().step_by(step).fold(0u8, |a, b| a ^ b);
    std::hint::black_box(sum);
}

/// Has pages mapped, and read from the disk before that where they are not in memory.
fn touch_pages(bytes: &[u8]) {
    for chunk in bytes.chunks(TOUCHED_AT_ONCE) {
        let begun = Instant::now();
        touch_every(MAPPED_AT_ONCE, chunk);
        if begun.elapsed() > AT_HAND {
            touch_every(PAGE, chunk);
        }
    }
}

/// Touches the pages of the weights, or of their packed copies, so that the first request does not wait for the disk,
/// and reports; until it is `enough`.
fn touch(
    source: &ModelSource,
    files: &[ModelFile],
    copies: &Copies,
    progress: &mpsc::Sender<v1::LoadProgress>,
    enough: &AtomicBool,
) {
    let copy_of = |mapping: &Mapping| {
        let index = files.iter().position(|file| file.mapping.is(mapping))?;
        let copy = copies.of(u32::try_from(index).ok()?)?;
        (copy.len() == mapping.len()).then_some(copy)
    };
    let mut all: Vec<&[u8]> = Vec::new();
    for file in source.weights.files() {
        if copy_of(&file.mapping).is_none() {
            all.push(file.mapping.bytes());
        }
    }
    let places = Places::of(&source.weights);
    for (_, weight) in source.weights.iter() {
        let Some(copy) = copy_of(&weight.mapping) else {
            continue;
        };
        let bytes = match is_packable(weight) {
            true => copy.bytes().get(places.range(weight)),
            false => Some(weight.bytes()),
        };
        all.extend(bytes);
    }
    let total: usize = all.iter().map(|bytes| bytes.len()).sum();
    let report = |done: usize| {
        let event = v1::LoadProgress {
            bytes_done: done as u64,
            bytes_total: total as u64,
            stage: "mapping".to_owned(),
            loaded: None,
        };
        // A reader that is behind misses a report, nothing else.
        let _ = progress.try_send(event);
    };
    if enough.load(Ordering::Relaxed) {
        // From now on it is the engine that makes progress.
        return report(total);
    }
    report(0);
    let chunks: Vec<&[u8]> = (all.into_iter())
        .flat_map(|bytes| bytes.chunks(TOUCHED_AT_ONCE))
        .collect();
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let reported = Mutex::new((0, Instant::now()));
    let some = || {
        while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            if enough.load(Ordering::Relaxed) {
                return;
            }
            touch_pages(chunk);
            give_way();
            let before = done.fetch_add(chunk.len(), Ordering::Relaxed);
            let now = before + chunk.len();
            let (bytes, at) = &mut *locked(&reported);
            if before / PROGRESS_BYTES < now / PROGRESS_BYTES
                && *bytes < now
                && at.elapsed() >= PROGRESS_TIME
            {
                (*bytes, *at) = (now, Instant::now());
                report(now);
            }
        }
    };
    thread::scope(|scope| {
        let threads = match GIVES_WAY.load(Ordering::Relaxed) {
            true => 1,
            false => thread::available_parallelism().map_or(1, |n| n.get()),
        };
        for _ in 1..threads.min(TOUCHERS) {
            let helper = thread::Builder::new().name("touch".to_owned());
            // Without it there is one fewer.
            let _ = helper.spawn_scoped(scope, some);
        }
        some();
    });
    // Whatever order the others came in. Where it was enough, it is the engine that makes progress.
    match enough.load(Ordering::Relaxed) {
        true => report(total),
        false => report(done.into_inner()),
    }
}

fn summary(source: &ModelSource, text: &ModelText, fingerprint: &str) -> v1::ModelSummary {
    let mut bytes_by_dtype: HashMap<&str, usize> = HashMap::new();
    for (_, weight) in source.weights.iter() {
        *bytes_by_dtype.entry(weight.dtype.name()).or_default() += weight.range.len();
    }
    let most = bytes_by_dtype
        .into_iter()
        .max_by_key(|&(name, bytes)| (bytes, name));
    v1::ModelSummary {
        architecture: format!("{:?}", source.config.architecture).to_lowercase(),
        parameters: source
            .weights
            .iter()
            .map(|(_, w)| w.elements() as u64)
            .sum(),
        context_length: source.config.context as u32,
        vocabulary: source.config.vocab as u32,
        weights_dtype: most.map_or_else(String::new, |(name, _)| name.to_owned()),
        model_hash: fingerprint.to_owned(),
        has_chat_template: text.has_chat_template(),
        end_tokens: source.config.eos.clone(),
        embedding_length: source.config.hidden as u32,
        thinks: text.thinks(),
    }
}
