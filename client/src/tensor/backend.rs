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
    compile::Compiled,
    recover::Recovery,
    session::{Session, SessionOptions},
    step::Step,
};
use crate::connect::{Address, Client};

/// Which layers of a model go to which device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// All to the backend's device.
    #[default]
    Whole,
    /// The last so many layers, the output counted as one, to the backend's device; the rest to the CPU.
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
    /// Where the model's layers would go: what [`Backend::memory`] counts by device. Graphs are computed on the backend's own
    /// device whatever it says.
    pub placement: Placement,
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
    about: v1::DescribeResponse,
    model: Option<String>,
    weights: Vec<(String, TensorSpec)>,
    placement: Placement,
    /// Bytes of caches by layer.
    caches: BTreeMap<usize, u64>,
    graph: u64,
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
            let known = devices.iter().map(|d| (d.id.clone(), d.problem.clone()));
            there = Some(known.collect::<Vec<_>>());
            let device = devices.iter().find(|d| d.id == name || d.backend == name);
            let known = models.iter().find(|m| m.name == name);
            match (device, known) {
                (Some(device), _) => options.device = Some(device.id.clone()),
                (None, Some(known)) => {
                    model = Some(name.to_owned());
                    options.worker = known.workers.first().cloned();
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
        let opened = Self {
            session,
            model,
            weights,
            placement: params.placement,
            caches: BTreeMap::new(),
            graph: 0,
            about,
        };
        let there = there.unwrap_or_else(|| vec![(opened.about.device.clone(), String::new())]);
        opened.can_be_placed(&there)?;
        Ok(opened)
    }

    /// Whether all devices that the placement leads to are among these, without a problem.
    fn can_be_placed(&self, there: &[(String, String)]) -> Result<(), Error> {
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
        for device in named.into_iter().chain(led_to.into_keys()) {
            let why = match there.iter().find(|(id, _)| *id == device) {
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
        Ok(())
    }

    fn sizes(&self) -> Vec<(&str, u64)> {
        let size = |spec: &TensorSpec| spec.bytes(0).unwrap_or(0) as u64;
        let sizes = self.weights.iter();
        sizes
            .map(|(name, spec)| (name.as_str(), size(spec)))
            .collect()
    }

    /// A cache of zeros for a layer, counted as that layer's from now on.
    ///
    /// # Errors
    /// As [`Session::cache`].
    pub async fn cache(&mut self, layer: usize, spec: CacheSpec) -> Result<Cache, Error> {
        let cache = self.session.cache(spec).await?;
        let sum = self.caches.entry(layer).or_default();
        *sum = sum.saturating_add(spec.bytes().unwrap_or(0) as u64);
        Ok(cache)
    }

    /// Its session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// What its device can do.
    pub fn describe(&self) -> &v1::DescribeResponse {
        &self.about
    }

    /// A weight of the model it was opened with.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when it was opened without one, [`Reason::HandleNotFound`] when there is no such weight.
    pub async fn get(&self, name: &str) -> Result<Tensor, Error> {
        let without = || {
            invalid("the backend was opened by its kind; open it by a model's name to get weights")
        };
        let model = self.model.as_deref().ok_or_else(without)?;
        self.session.weight(model, name).await
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
        let memory = function.reserve(arguments).await?;
        self.reserved(&memory);
        Ok(memory)
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
        let memory = step.reserve(results).await?;
        self.reserved(&memory);
        Ok(memory)
    }

    fn reserved(&mut self, memory: &v1::PlanMemory) {
        let parts = [memory.inputs, memory.outputs];
        let taken = parts.into_iter().fold(memory.arena, u64::saturating_add);
        self.graph = self.graph.max(taken);
    }

    /// What the model, the caches and the greatest reserved graph take, by device.
    pub fn memory(&self) -> Vec<DeviceMemory> {
        let own = &self.about.device;
        let mut devices = place(&self.sizes(), &self.caches, &self.placement, own);
        let own = devices.entry(self.about.device.clone()).or_default();
        own.graph = self.graph;
        let named = |(device, memory)| DeviceMemory { device, ..memory };
        devices.into_iter().map(named).collect()
    }
}

/// The layer of a weight: the first number between dots in its name.
fn layer_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

/// Where layers go that no other device is named for.
const CPU: &str = "cpu:0";

/// Embeddings stay with the CPU, the output goes with the last layer, a cache with its layer.
fn place(
    weights: &[(&str, u64)],
    caches: &BTreeMap<usize, u64>,
    placement: &Placement,
    own: &str,
) -> BTreeMap<String, DeviceMemory> {
    let layers = weights
        .iter()
        .filter_map(|(name, _)| layer_of(name))
        .max()
        .map_or(0, |l| l + 1);
    let device = |layer: usize| match placement {
        Placement::Whole => own,
        Placement::Count(count) if layer + count > layers => own,
        Placement::Count(_) => CPU,
        Placement::List(list) => {
            let found = list.iter().find(|(_, layers)| layers.contains(&layer));
            found.map_or(CPU, |(device, _)| device.as_str())
        }
    };
    let mut devices: BTreeMap<String, DeviceMemory> = BTreeMap::new();
    for &(name, bytes) in weights {
        let embedding = name.contains("embed") || name.contains("embd");
        let layer = layer_of(name);
        let at = match (layer, embedding) {
            (Some(layer), _) => device(layer),
            (None, true) if *placement != Placement::Whole => CPU,
            (None, _) => device(layers),
        };
        let memory = devices.entry(at.to_owned()).or_default();
        match (layer, embedding) {
            (None, true) => memory.input_weights += bytes,
            (layer, _) => *memory.weights.entry(layer.unwrap_or(layers)).or_default() += bytes,
        }
    }
    for (&layer, &bytes) in caches {
        let memory = devices.entry(device(layer).to_owned()).or_default();
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
