//! Backends by name: a session on a device of a kind, or on a worker that has a model.

use std::collections::BTreeMap;

use hotcell_graph::{CacheSpec, TensorSpec};
use hotcell_proto::{
    error::{Error, Reason},
    v1,
};

use super::{
    array::{Tensor, invalid},
    cache::Cache,
    compile::{Compiled, together},
    recover::Recovery,
    session::{Session, SessionOptions},
    spread::Spread,
    step::Step,
};
use crate::connect::{Address, Client};

/// Which layers of a model go to which device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// All to the backend's device.
    #[default]
    Whole,
    /// The last so many layers, the output counted as one, to the backend's device; the rest to the CPU. The device of a model
    /// that is loaded on several is then the first that is not where the rest goes.
    Count(usize),
    /// Layers by device id; layer number `block_count` is the output. Unlisted ones go to the CPU.
    List(Vec<(String, Vec<usize>)>),
}

/// Whether `scaled_dot_product_attention` may run fused, without its matrix of scores. Both ways sum in orders of their own:
/// [`Session::numerics`] says which it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlashAttention {
    /// Where the device can.
    #[default]
    Auto,
    /// It must: a device that has none refuses the session, and a graph with an attention that it has none for.
    On,
    /// It must not: it is computed as the ops that it is made of.
    Off,
}

impl FlashAttention {
    pub(super) fn to_wire(self) -> v1::FusedAttention {
        match self {
            FlashAttention::Auto => v1::FusedAttention::Auto,
            FlashAttention::On => v1::FusedAttention::On,
            FlashAttention::Off => v1::FusedAttention::Off,
        }
    }
}

/// What a backend is opened with.
#[derive(Clone, Debug)]
pub struct BackendParams {
    /// Where the scheduler, or a worker alone, listens.
    pub address: Address,
    /// Bytes the session may hold; 0: the worker's quota. What is more is refused with [`Reason::QuotaExceeded`], as what is
    /// more than the next two.
    pub memory_limit: u64,
    /// Tensors and caches the session may hold; 0: the worker's quota.
    pub max_tensors: u32,
    /// Plans the session may hold; 0: the worker's quota.
    pub max_plans: u32,
    /// Compute threads that the session's graphs may use, of those that the worker has; 0: all. No result depends on it.
    pub threads: u32,
    /// `false`: a dry run. Nothing is computed; [`Backend::reserve`] and [`Backend::memory`] say what it would take.
    pub allocate: bool,
    /// Where the model's layers go: which device's session [`Backend::get`] and [`Backend::cache`] use, what
    /// [`Backend::memory`] counts by device. The sessions are a [`Spread`]: a graph is split where what it reads lies. The
    /// model has to be loaded on each device that is led to.
    pub placement: Placement,
    /// From how many elements on that an op reads besides, a weight placed on the CPU is sent to the first other device that has
    /// the op; none: never. See [`Spread::set_offload`].
    pub offload: Option<usize>,
    /// Whether attention may run fused.
    pub flash_attention: FlashAttention,
    /// Go on after the worker died; see [`Recovery`].
    pub recovery: Option<Recovery>,
}

impl BackendParams {
    /// The defaults, at an address.
    pub fn at(address: Address) -> Self {
        Self {
            address,
            memory_limit: 0,
            max_tensors: 0,
            max_plans: 0,
            threads: 0,
            allocate: true,
            placement: Placement::default(),
            offload: None,
            flash_attention: FlashAttention::default(),
            recovery: None,
        }
    }
}

/// Memory on one device, bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Device id, for example `cpu:0`.
    pub device: String,
    /// Weights of no layer: embeddings and the like.
    pub input_weights: u64,
    /// Weights by layer; number `block_count` is the output.
    pub weights: BTreeMap<usize, u64>,
    /// Caches by layer.
    pub caches: BTreeMap<usize, u64>,
    /// Inputs, results and intermediate values of the greatest graph reserved so far.
    pub graph: u64,
}

impl DeviceMemory {
    /// All together.
    pub fn total(&self) -> u64 {
        let sum =
            |all: &BTreeMap<usize, u64>| all.values().fold(0, |a: u64, b| a.saturating_add(*b));
        [sum(&self.weights), sum(&self.caches), self.graph]
            .into_iter()
            .fold(self.input_weights, u64::saturating_add)
    }
}

/// An open backend.
pub struct Backend {
    session: Session,
    /// On the further devices that the placement leads to.
    others: Vec<(String, Session)>,
    about: v1::DescribeResponse,
    model: Option<String>,
    weights: Vec<(String, TensorSpec)>,
    placement: Placement,
    /// Bytes of caches by layer.
    caches: BTreeMap<usize, u64>,
    /// Of the greatest graphs reserved so far, by device.
    graphs: BTreeMap<String, u64>,
}

impl Backend {
    /// Opens a backend by the name of its kind (`cpu`, `cuda`, `mlx`), of a device (`cpu:0`) or of a loaded model.
    ///
    /// # Errors
    /// [`Reason::NoWorker`] when there is neither, or when layers are placed on a device that is not there or cannot be used,
    /// naming what there is; [`Reason::OpUnsupported`] when fused attention must be and is not there.
    pub async fn open(name: &str, params: BackendParams) -> Result<Self, Error> {
        let client = Client::connect(&params.address).await?;
        let mut options = SessionOptions {
            name: name.chars().take(64).collect(),
            max_bytes: params.memory_limit,
            max_tensors: params.max_tensors,
            max_plans: params.max_plans,
            flash_attention: params.flash_attention,
            threads: params.threads,
            dry_run: !params.allocate,
            recovery: params.recovery,
            ..Default::default()
        };
        let mut model = None;
        let mut there = None;
        // A worker alone has no lists; it says what it is once the session is open.
        if let (Ok(devices), Ok(models)) = (client.devices().await, client.models().await) {
            let known = devices.iter().map(|d| {
                let leader = devices.iter().find(|other| other.members.contains(&d.id));
                let led = leader.map(|leader| format!("it computes with {}", leader.id));
                (d.id.clone(), led.unwrap_or_else(|| d.problem.clone()))
            });
            there = Some(known.collect::<Vec<_>>());
            let device = devices.iter().find(|d| d.id == name || d.backend == name);
            let known = models.iter().find(|m| m.name == name);
            match (device, known) {
                (Some(device), _) => options.device = Some(device.id.clone()),
                (None, Some(known)) => {
                    model = Some(name.to_owned());
                    options.worker = worker_for(&params.placement, known, &client).await?;
                    if options.worker.is_none() {
                        let what = format!("model {name} is not loaded; load it first");
                        return Err(Error::new(Reason::ModelNotFound, what).with("model", name));
                    }
                }
                (None, None) => {
                    let mut there: Vec<&str> = devices.iter().map(|d| d.backend.as_str()).collect();
                    there.extend(models.iter().map(|m| m.name.as_str()));
                    there.dedup();
                    let what = format!(
                        "unsupported backend {name:?}: there is no such backend, device or model; there are {}",
                        there.join(", ")
                    );
                    return Err(Error::new(Reason::NoWorker, what));
                }
            }
        }
        let further = options.clone();
        let session = Session::open(&params.address, options).await?;
        let about = session.describe().await?;
        if model.is_none() && about.models.iter().any(|m| m == name) {
            model = Some(name.to_owned());
        } else if model.is_none() && about.backend != name && about.device != name {
            let what = format!(
                "unsupported backend {name:?}: this worker is {} on {}",
                about.backend, about.device
            );
            return Err(Error::new(Reason::NoWorker, what));
        }
        let weights = match &model {
            Some(model) => session.weights(model).await?,
            None => vec![],
        };
        let mut opened = Self {
            session,
            others: vec![],
            model,
            weights,
            placement: params.placement,
            caches: BTreeMap::new(),
            graphs: BTreeMap::new(),
            about,
        };
        let there = there.unwrap_or_else(|| vec![(opened.about.device.clone(), String::new())]);
        let devices = opened.can_be_placed(&there)?;
        opened
            .go_to(&devices, &params.address, &further, params.offload)
            .await?;
        Ok(opened)
    }

    /// Opens sessions on the further devices, which then compute together. The CPU, which has everything, comes last.
    async fn go_to(
        &mut self,
        devices: &[String],
        address: &Address,
        options: &SessionOptions,
        offload: Option<usize>,
    ) -> Result<(), Error> {
        let own = self.about.device.clone();
        let mut sessions = vec![(own.clone(), self.session.clone())];
        for device in devices.iter().filter(|device| **device != own) {
            let options = SessionOptions {
                worker: None,
                device: Some(device.clone()),
                ..options.clone()
            };
            let session = Session::open(address, options).await?;
            if let Some(model) = &self.model
                && !session.describe().await?.models.contains(model)
            {
                let what = format!(
                    "layers are placed on {device}, where model {model} is not loaded; load it with as many replicas as it has devices"
                );
                return Err(Error::new(Reason::ModelNotFound, what).with("model", model));
            }
            self.others.push((device.clone(), session.clone()));
            sessions.push((device.clone(), session));
        }
        if sessions.len() > 1 {
            sessions.sort_by_key(|(device, _)| device.as_str() == CPU);
            Spread::of(sessions).await?.set_offload(offload);
        }
        Ok(())
    }

    /// The session on a device that the placement leads to.
    fn on(&self, device: &str) -> &Session {
        let found = self.others.iter().find(|(known, _)| known == device);
        found.map_or(&self.session, |(_, session)| session)
    }

    fn homes(&self) -> Homes<'_> {
        let names = self.weights.iter().map(|(name, _)| name.as_str());
        Homes::of(names, &self.placement, &self.about.device)
    }

    /// The devices that the placement leads to, if they are all among these, without a problem.
    fn can_be_placed(&self, there: &[(String, String)]) -> Result<Vec<String>, Error> {
        let named = match &self.placement {
            Placement::List(list) => list.iter().map(|(device, _)| device.clone()).collect(),
            Placement::Whole | Placement::Count(_) => vec![],
        };
        let led_to = place(
            &self.sizes(),
            &BTreeMap::new(),
            &self.placement,
            &self.about.device,
        );
        let mut all: Vec<String> = named.into_iter().chain(led_to.into_keys()).collect();
        all.sort_unstable();
        all.dedup();
        for device in &all {
            let why = match there.iter().find(|(id, _)| id == device) {
                Some((_, problem)) if problem.is_empty() => continue,
                Some((_, problem)) => format!("cannot be used: {problem}"),
                None => "is not there".to_owned(),
            };
            let usable = there.iter().filter(|(_, problem)| problem.is_empty());
            let usable: Vec<&str> = usable.map(|(id, _)| id.as_str()).collect();
            let what = format!(
                "layers are placed on device {device:?}, which {why}; there are {} (layers that the placement does not name go to {CPU})",
                usable.join(", ")
            );
            return Err(Error::new(Reason::NoWorker, what).with("device", device));
        }
        Ok(all)
    }

    fn sizes(&self) -> Vec<(&str, u64)> {
        let size = |spec: &TensorSpec| spec.bytes(0).unwrap_or(0) as u64;
        let sizes = self.weights.iter();
        sizes
            .map(|(name, spec)| (name.as_str(), size(spec)))
            .collect()
    }

    /// A cache of zeros for a layer, on that layer's device, counted as that layer's from now on.
    ///
    /// # Errors
    /// As [`Session::cache`].
    pub async fn cache(&mut self, layer: usize, spec: CacheSpec) -> Result<Cache, Error> {
        let device = self.homes().layer(layer);
        let cache = self.on(device).cache(spec).await?;
        let sum = self.caches.entry(layer).or_default();
        *sum = sum.saturating_add(spec.bytes().unwrap_or(0) as u64);
        Ok(cache)
    }

    /// Its session, on its own device.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// What its device can do.
    pub fn describe(&self) -> &v1::DescribeResponse {
        &self.about
    }

    /// A weight of the model it was opened with, in the session of the device where it is placed.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when it was opened without one, [`Reason::HandleNotFound`] when there is no such weight.
    pub async fn get(&self, name: &str) -> Result<Tensor, Error> {
        let without = || {
            invalid("the backend was opened by its kind; open it by a model's name to get weights")
        };
        let model = self.model.as_deref().ok_or_else(without)?;
        let device = self.homes().weight(name);
        self.on(device).weight(model, name).await
    }

    /// Names, dtypes and shapes of the model's weights.
    pub fn weights(&self) -> &[(String, TensorSpec)] {
        &self.weights
    }

    /// Plans a worst case without running it, and remembers what it takes.
    ///
    /// # Errors
    /// [`Reason::OutOfMemory`] or [`Reason::QuotaExceeded`] when intermediate values, inputs (but not a model's weights) and
    /// results are more than the worker or the session may hold; the metadata say how much was attempted: `arena`,
    /// `constants`, `inputs`, `outputs`, `bytes` in all, and the `limit`.
    pub async fn reserve(
        &mut self,
        function: &Compiled,
        arguments: &[Tensor],
    ) -> Result<v1::PlanMemory, Error> {
        let each = function.reserve_each(arguments).await?;
        Ok(self.reserved(&each))
    }

    /// The same for a step, which is not run. Its caches are those of [`Backend::cache`], and not counted again.
    ///
    /// # Errors
    /// As [`Backend::reserve`], and what is wrong with the step.
    pub async fn reserve_step(
        &mut self,
        step: Step,
        results: &[Tensor],
    ) -> Result<v1::PlanMemory, Error> {
        let each = step.reserve_each(results).await?;
        Ok(self.reserved(&each))
    }

    /// Books what a graph takes in each session as its device's, and gives the sum.
    fn reserved(&mut self, each: &[(Session, v1::PlanMemory)]) -> v1::PlanMemory {
        let mut graphs: BTreeMap<String, u64> = BTreeMap::new();
        for (session, memory) in each {
            let mut others = self.others.iter();
            let found = others.find(|(_, other)| other.is_same(session));
            let device = found.map_or(&self.about.device, |(device, _)| device);
            let sum = graphs.entry(device.clone()).or_default();
            *sum = sum.saturating_add(taken(memory));
        }
        for (device, bytes) in graphs {
            let most = self.graphs.entry(device).or_default();
            *most = bytes.max(*most);
        }
        together(each)
    }

    /// What the model, the caches and the greatest reserved graph take, by device.
    pub fn memory(&self) -> Vec<DeviceMemory> {
        let own = &self.about.device;
        let mut devices = place(&self.sizes(), &self.caches, &self.placement, own);
        devices.entry(own.clone()).or_default();
        for (device, bytes) in &self.graphs {
            devices.entry(device.clone()).or_default().graph = *bytes;
        }
        let named = |(device, memory)| DeviceMemory { device, ..memory };
        devices.into_iter().map(named).collect()
    }
}

/// The worker of those that have a model that a backend is on: the first, or the first beside the CPU, to which what is not counted goes.
async fn worker_for(
    placement: &Placement,
    model: &v1::ModelInfo,
    client: &Client,
) -> Result<Option<String>, Error> {
    let mut beside = None;
    if let (Placement::Count(_), [_, _, ..]) = (placement, &model.workers[..]) {
        let workers = client.workers().await?;
        let is_cpu = |id: &String| {
            let lease = workers.iter().find(|w| w.id == *id);
            let lease = lease.and_then(|w| w.lease.as_ref());
            lease.is_none_or(|lease| lease.device == CPU)
        };
        beside = model.workers.iter().find(|id| !is_cpu(id));
    }
    Ok(beside.or(model.workers.first()).cloned())
}

/// What a plan takes besides weights.
fn taken(memory: &v1::PlanMemory) -> u64 {
    let parts = [memory.inputs, memory.outputs];
    parts.into_iter().fold(memory.arena, u64::saturating_add)
}

/// The layer of a weight: the first number between dots in its name.
fn layer_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

/// Where layers go that no other device is named for.
const CPU: &str = "cpu:0";

/// Where layers go: embeddings stay with the CPU, the output goes with the last layer, a cache with its layer.
struct Homes<'a> {
    placement: &'a Placement,
    own: &'a str,
    layers: usize,
}

impl<'a> Homes<'a> {
    fn of<'n>(
        names: impl Iterator<Item = &'n str>,
        placement: &'a Placement,
        own: &'a str,
    ) -> Self {
        let last = names.filter_map(layer_of).max();
        Self {
            placement,
            own,
            layers: last.map_or(0, |l| l + 1),
        }
    }

    fn layer(&self, layer: usize) -> &'a str {
        match self.placement {
            Placement::Whole => self.own,
            Placement::Count(count) if layer.saturating_add(*count) > self.layers => self.own,
            Placement::Count(_) => CPU,
            Placement::List(list) => {
                let found = list.iter().find(|(_, layers)| layers.contains(&layer));
                found.map_or(CPU, |(device, _)| device.as_str())
            }
        }
    }

    fn weight(&self, name: &str) -> &'a str {
        match layer_of(name) {
            Some(layer) => self.layer(layer),
            None if is_embedding(name) && *self.placement != Placement::Whole => CPU,
            None => self.layer(self.layers),
        }
    }
}

fn is_embedding(name: &str) -> bool {
    name.contains("embed") || name.contains("embd")
}

fn place(
    weights: &[(&str, u64)],
    caches: &BTreeMap<usize, u64>,
    placement: &Placement,
    own: &str,
) -> BTreeMap<String, DeviceMemory> {
    let homes = Homes::of(weights.iter().map(|(name, _)| *name), placement, own);
    let mut devices: BTreeMap<String, DeviceMemory> = BTreeMap::new();
    for &(name, bytes) in weights {
        let memory = devices.entry(homes.weight(name).to_owned()).or_default();
        match layer_of(name) {
            None if is_embedding(name) => memory.input_weights += bytes,
            layer => {
                let layer = layer.unwrap_or(homes.layers);
                *memory.weights.entry(layer).or_default() += bytes;
            }
        }
    }
    for (&layer, &bytes) in caches {
        let memory = devices.entry(homes.layer(layer).to_owned()).or_default();
        memory.caches.insert(layer, bytes);
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_go_where_they_are_placed() {
        let weights = [
            ("model.embed_tokens.weight", 100),
            ("model.layers.0.mlp.weight", 10),
            ("model.layers.1.mlp.weight", 20),
            ("model.norm.weight", 1),
        ];
        let caches = BTreeMap::from([(0, 7), (1, 9)]);
        let at = |placement: Placement| place(&weights, &caches, &placement, "cuda:0");
        let whole = at(Placement::Whole);
        assert_eq!(whole["cuda:0"].total(), 147);
        assert_eq!(whole["cuda:0"].caches, caches);
        // The output and one layer.
        let two = at(Placement::Count(2));
        assert_eq!(two["cuda:0"].weights, BTreeMap::from([(1, 20), (2, 1)]));
        assert_eq!(two["cuda:0"].caches, BTreeMap::from([(1, 9)]));
        assert_eq!(
            (two["cpu:0"].input_weights, two["cpu:0"].total()),
            (100, 117)
        );
        let none = at(Placement::Count(0));
        assert!(!none.contains_key("cuda:0"));
        let list = at(Placement::List(vec![("cuda:1".to_owned(), vec![0, 2])]));
        assert_eq!(list["cuda:1"].weights, BTreeMap::from([(0, 10), (2, 1)]));
        assert_eq!(list["cpu:0"].weights, BTreeMap::from([(1, 20)]));
    }
}
