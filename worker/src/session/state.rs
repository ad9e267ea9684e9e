//! One session: its handles and what may be done with them.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    rc::{Rc, Weak},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hotcell_graph::{TensorSpec, op::ValueSpec};
use hotcell_kernels::backend::Buffer;
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits,
    session::HandleId,
    v1::{self, FusedAttention},
};

use super::{
    invalid,
    memory::{Home, Hub, Pool, Storage},
    plan::PlanEntry,
    quota,
    shared::Mappings,
    tensor::Tensor,
    upload::Upload,
    value::{State, Value, cache_in_use},
    work::{Streams, Waiting},
};
use crate::{error::of_plan, model::run::WeightRegion, weights::Weight};

/// What a session may have.
#[derive(Clone, Copy, Debug)]
pub struct Quotas {
    /// Bytes of tensors, caches and plans, freed ones that are kept among them.
    pub bytes: u64,
    /// Tensors and caches.
    pub tensors: usize,
    /// Plans.
    pub plans: usize,
    /// Tensors get no memory.
    pub dry_run: bool,
    /// Compute threads.
    pub threads: usize,
    /// Whether attention may be one kernel.
    pub attention: FusedAttention,
}

impl Quotas {
    /// What is asked for, within the worker's `limit` of bytes and its compute threads; by default half of the bytes, so
    /// that no session takes all by accident.
    pub fn of(request: &v1::OpenSessionRequest, limit: u64, threads: usize) -> Self {
        let within = |asked: u64, most: u64| if asked == 0 { most } else { asked.min(most) };
        let count = |asked: u32, most: usize| within(asked.into(), most as u64) as usize;
        Self {
            bytes: match request.max_bytes {
                0 if request.dry_run => limit,
                0 => limit / 2,
                asked => asked.min(limit),
            },
            tensors: count(request.max_tensors, limits::MAX_SESSION_TENSORS),
            plans: count(request.max_plans, limits::MAX_SESSION_PLANS),
            dry_run: request.dry_run,
            threads: count(request.threads, threads),
            // A name that this release does not know is read as the first, as everywhere.
            attention: request.fused_attention(),
        }
    }
}

/// A session.
pub struct Session {
    /// Epoch of its handles.
    pub epoch: Epoch,
    /// Set when its lease is over.
    pub over: Arc<AtomicBool>,
    pub(super) quotas: Quotas,
    pub(super) pool: Rc<Pool>,
    pub(super) tensors: HashMap<HandleId, Tensor>,
    pub(super) plans: HashMap<HandleId, Rc<PlanEntry>>,
    pub(super) streams: Streams,
    pub(super) waiting: Vec<Waiting>,
    pub(super) mappings: Mappings,
    weights: HashMap<(String, String), Weak<Value>>,
}

pub(super) fn not_found() -> Error {
    let what = "the session holds nothing under this handle: it was freed or never made";
    Error::new(Reason::HandleNotFound, what)
}

impl Session {
    /// A session without anything.
    pub fn new(hub: &Rc<Hub>, epoch: Epoch, quotas: Quotas, over: Arc<AtomicBool>) -> Self {
        Self {
            epoch,
            over,
            quotas,
            pool: Pool::new(hub, quotas.bytes, quotas.dry_run),
            tensors: HashMap::new(),
            plans: HashMap::new(),
            streams: Streams::default(),
            waiting: Vec::new(),
            mappings: Mappings::default(),
            weights: HashMap::new(),
        }
    }

    /// Whether nobody holds its lease.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    pub(super) fn tensor(&self, id: HandleId) -> Result<&Tensor, Error> {
        self.tensors
            .get(&id)
            .ok_or_else(|| match self.plans.contains_key(&id) {
                true => invalid("the handle is a plan's, not a tensor's"),
                false => not_found(),
            })
    }

    pub(super) fn plan(&self, id: HandleId) -> Result<&Rc<PlanEntry>, Error> {
        self.plans
            .get(&id)
            .ok_or_else(|| match self.tensors.contains_key(&id) {
                true => invalid("the handle is a tensor's, not a plan's"),
                false => not_found(),
            })
    }

    /// An id that nothing has: the one given, or a new one.
    pub(super) fn fresh(&self, id: Option<HandleId>) -> Result<HandleId, Error> {
        let id = match id {
            Some(id) => id,
            None => HandleId::random()?,
        };
        if self.tensors.contains_key(&id) || self.plans.contains_key(&id) {
            return Err(invalid(
                "the id is in use in this session; choose 16 random bytes",
            ));
        }
        Ok(id)
    }

    pub(super) fn room_for(&self, tensors: usize) -> Result<(), Error> {
        match self.tensors.len().saturating_add(tensors) > self.quotas.tensors {
            true => Err(quota("tensors", self.quotas.tensors)),
            false => Ok(()),
        }
    }

    pub(super) fn insert(&mut self, id: HandleId, tensor: Tensor) -> v1::TensorInfo {
        let info = tensor.info(id, self.epoch);
        self.tensors.insert(id, tensor);
        info
    }

    /// Makes a tensor of zeros, or a cache.
    ///
    /// # Errors
    /// When the id is taken, or quotas or memory are short.
    pub fn create(
        &mut self,
        id: Option<HandleId>,
        spec: ValueSpec,
        bytes: usize,
    ) -> Result<v1::TensorInfo, Error> {
        let id = self.fresh(id)?;
        self.room_for(1)?;
        let storage = self.pool.zeroed("the tensor", bytes)?;
        let tensor = Tensor {
            spec,
            bytes,
            value: Value::new(State::Ready(storage)),
            weight: None,
            shared: None,
        };
        Ok(self.insert(id, tensor))
    }

    /// Makes a tensor that an upload will fill.
    ///
    /// # Errors
    /// As [`Session::create`].
    pub fn begin_upload(
        &mut self,
        id: Option<HandleId>,
        spec: TensorSpec,
        bytes: usize,
    ) -> Result<(HandleId, Arc<Upload>), Error> {
        let id = self.fresh(id)?;
        self.room_for(1)?;
        let (staging, charge) = self.pool.stage("the tensor", bytes)?;
        let upload = Arc::new(Upload::new(staging, charge));
        let tensor = Tensor {
            spec: ValueSpec::Tensor(spec),
            bytes,
            value: Value::new(State::Uploading(Arc::clone(&upload))),
            weight: None,
            shared: None,
        };
        self.insert(id, tensor);
        Ok((id, upload))
    }

    /// The unfinished upload of a tensor; `None` for one that is finished.
    ///
    /// # Errors
    /// When there is no such tensor, or it is one that cannot be written.
    pub fn upload_of(&self, id: HandleId) -> Result<Option<Arc<Upload>>, Error> {
        let tensor = self.tensor(id)?;
        if tensor.weight.is_some() {
            return Err(invalid("weights cannot be uploaded to"));
        }
        match &*tensor.value.state() {
            State::Uploading(upload) => Ok(Some(Arc::clone(upload))),
            _ => Ok(None),
        }
    }

    /// Takes the bytes of an upload if it is complete. Returns how the tensor is then.
    ///
    /// # Errors
    /// When the tensor was freed meanwhile, or another call took the upload over.
    pub fn end_upload(
        &mut self,
        id: HandleId,
        upload: &Arc<Upload>,
        call: u64,
    ) -> Result<v1::TensorInfo, Error> {
        let tensor = self.tensor(id)?;
        if !matches!(&*tensor.value.state(), State::Uploading(u) if Arc::ptr_eq(u, upload)) {
            return Err(not_found());
        }
        if let Some((staging, charge)) = upload.take(call)? {
            let state = match self.pool.adopt("the tensor", staging, charge) {
                Ok(storage) => State::Ready(storage),
                Err(error) => State::Failed(error),
            };
            tensor.value.settle(state);
        }
        Ok(tensor.info(id, self.epoch))
    }

    /// Overwrites part of a finished tensor. Work that is queued already still sees the old bytes.
    ///
    /// # Errors
    /// When it is not finished, the bytes do not fit, or there is no memory for a copy.
    pub fn overwrite(&mut self, id: HandleId, offset: u64, data: &[u8]) -> Result<(), Error> {
        let tensor = self.tensor(id)?;
        let offset = usize::try_from(offset).ok();
        let end = offset.and_then(|o| o.checked_add(data.len()));
        let (Some(offset), Some(_)) = (offset, end.filter(|&e| e <= tensor.bytes)) else {
            let what = format!(
                "{} bytes do not fit there into a tensor of {}",
                data.len(),
                tensor.bytes
            );
            return Err(invalid(what));
        };
        // The only holder is the handle: nothing queued sees the value.
        let alone = Rc::strong_count(&tensor.value) == 1;
        if matches!(tensor.spec, ValueSpec::Cache(_)) && !alone {
            return Err(cache_in_use());
        }
        let copy = tensor.value.with(|storage| match storage.home() {
            Home::Weight(_) => Err(invalid("weights cannot be overwritten")),
            Home::Shared(_) => storage.write(offset, data).map(|()| None),
            Home::Own { .. } if alone && storage.is_free_to_write() => {
                storage.write(offset, data).map(|()| None)
            }
            Home::Own { .. } => {
                let copy = storage.copy(&self.pool)?;
                copy.write(offset, data)?;
                Ok(Some(copy))
            }
        })?;
        if let (Some(copy), Some(tensor)) = (copy, self.tensors.get_mut(&id)) {
            tensor.value = Value::new(State::Ready(copy));
        }
        Ok(())
    }

    /// How a tensor is.
    ///
    /// # Errors
    /// When there is none.
    pub fn info(&self, id: HandleId) -> Result<v1::TensorInfo, Error> {
        Ok(self.tensor(id)?.info(id, self.epoch))
    }

    /// Frees tensors and plans.
    ///
    /// # Errors
    /// [`Reason::HandleNotFound`] when some are not there (`missing`: how many); the others are freed.
    pub fn free(&mut self, ids: &[HandleId]) -> Result<(), Error> {
        let distinct: HashSet<_> = ids.iter().collect();
        let mut missing = 0usize;
        for id in distinct {
            let tensor = self.tensors.remove(id);
            missing += usize::from(tensor.is_none() && self.plans.remove(id).is_none());
        }
        match missing {
            0 => Ok(()),
            missing => Err(not_found().with("missing", missing)),
        }
    }

    /// What it holds.
    pub fn list(&self) -> v1::ListResponse {
        let epoch = self.epoch;
        let tensors: BTreeMap<_, _> = self.tensors.iter().collect();
        let plans: BTreeMap<_, _> = self.plans.iter().collect();
        v1::ListResponse {
            tensors: tensors.iter().map(|(id, t)| t.info(**id, epoch)).collect(),
            plans: plans
                .iter()
                .map(|(id, p)| v1::PlanInfo {
                    handle: Some(id.handle(epoch)),
                    memory: Some(p.memory),
                    executions: p.executions.get(),
                })
                .collect(),
        }
    }

    /// Counters and limits, before they are changed as asked.
    pub fn memory(&mut self, request: &v1::MemoryRequest) -> v1::MemoryResponse {
        let account = self.pool.account();
        let usage = account.usage();
        let response = v1::MemoryResponse {
            active: usage.active,
            peak: usage.peak,
            cache: usage.cached,
            memory_limit: usage.limit,
            cache_limit: self.pool.cache_limit(),
            tensors: self.tensors.len() as u32,
            plans: self.plans.len() as u32,
        };
        if let Some(limit) = request.memory_limit {
            account.set_limit(limit.min(self.quotas.bytes));
        }
        if let Some(limit) = request.cache_limit {
            self.pool.set_cache_limit(limit.min(self.quotas.bytes));
        }
        if request.reset_peak {
            account.reset_peak();
        }
        if request.clear_cache {
            self.pool.clear();
            self.pool.device().trim();
        }
        response
    }

    /// Makes a handle on a model's weight.
    ///
    /// # Errors
    /// When there are too many tensors, or a misplaced weight must be copied and there is no memory.
    pub fn weight(
        &mut self,
        model: String,
        name: String,
        spec: TensorSpec,
        weight: Weight,
    ) -> Result<v1::TensorInfo, Error> {
        self.room_for(1)?;
        let id = self.fresh(None)?;
        let key = (model, name);
        let known = self.weights.get(&key).and_then(Weak::upgrade);
        let value = match known {
            Some(value) => value,
            None => {
                let storage = self.import(weight)?;
                let value = Value::new(State::Ready(storage));
                self.weights.retain(|_, v| v.strong_count() > 0);
                self.weights.insert(key.clone(), Rc::downgrade(&value));
                value
            }
        };
        let tensor = Tensor {
            bytes: spec.bytes(0).unwrap_or(0),
            spec: ValueSpec::Tensor(spec),
            value,
            weight: Some(Rc::new(key)),
            shared: None,
        };
        Ok(self.insert(id, tensor))
    }

    fn import(&self, weight: Weight) -> Result<Storage, Error> {
        let place = weight.bytes().as_ptr() as usize;
        let device = self.pool.device();
        // As aligned as any element is.
        if place.is_multiple_of(8) {
            let buffer = device.import(Rc::new(WeightRegion(weight.clone())));
            let buffer: Buffer = buffer.map_err(|e| of_plan(&e))?;
            return Ok(Storage::weight(buffer, weight));
        }
        let bytes = weight.bytes();
        let (mut staging, charge) = self.pool.stage("a misplaced weight's copy", bytes.len())?;
        staging.bytes_mut().copy_from_slice(bytes);
        self.pool
            .adopt("a misplaced weight's copy", staging, charge)
    }
}
