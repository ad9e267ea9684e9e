//! Backends by name: a session on a device of a kind, or on a worker that has a model.

use std::collections::BTreeMap;

use hotcell_graph::TensorSpec;
use hotcell_proto::{
    error::{Error, Reason},
    v1,
};

use super::{
    array::{Tensor, invalid},
    compile::Compiled,
    recover::Recovery,
    session::{Session, SessionOptions},
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

/// Whether attention may run fused, without its matrix of scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlashAttention {
    /// Where the device can.
    #[default]
    Auto,
    /// It must.
    On,
    /// It must not.
    Off,
}

/// What a backend is opened with.
#[derive(Clone, Debug)]
pub struct BackendParams {
    /// Where the scheduler, or a worker alone, listens.
    pub address: Address,
    /// Bytes the session may hold; 0: the worker's quota.
    pub memory_limit: u64,
    /// Compute threads that the session's graphs may use, of those that the worker has; 0: all. No result depends on it.
    pub threads: u32,
    /// `false`: a dry run. Nothing is computed; [`Backend::reserve`] and [`Backend::memory`] say what it would take.
    pub allocate: bool,
    /// Where the model's layers go.
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
    /// Inputs, results and intermediate values of the greatest graph reserved so far.
    pub graph: u64,
}

impl DeviceMemory {
    /// All together.
    pub fn total(&self) -> u64 {
        self.input_weights + self.weights.values().sum::<u64>() + self.graph
    }
}

/// An open backend.
pub struct Backend {
    session: Session,
    about: v1::DescribeResponse,
    model: Option<String>,
    weights: Vec<(String, TensorSpec)>,
    placement: Placement,
    graph: u64,
}

impl Backend {
    /// Opens a backend by the name of its kind (`cpu`, `cuda`, `mlx`), of a device (`cpu:0`) or of a loaded model.
    ///
    /// # Errors
    /// [`Reason::NoWorker`] when there is neither, naming what there is; [`Reason::OpUnsupported`] when fused attention must
    /// be and is not there.
    pub async fn open(name: &str, params: BackendParams) -> Result<Self, Error> {
        let client = Client::connect(&params.address).await?;
        let mut options = SessionOptions {
            name: name.chars().take(64).collect(),
            max_bytes: params.memory_limit,
            threads: params.threads,
            dry_run: !params.allocate,
            recovery: params.recovery,
            ..Default::default()
        };
        let mut model = None;
        // A worker alone has no lists; it says what it is once the session is open.
        if let (Ok(devices), Ok(models)) = (client.devices().await, client.models().await) {
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
        let fused = about
            .ops
            .iter()
            .any(|op| op == "scaled_dot_product_attention");
        match params.flash_attention {
            FlashAttention::On if !fused => {
                let what = format!(
                    "device {} has no fused attention; choose auto or off",
                    about.device
                );
                return Err(Error::new(Reason::OpUnsupported, what));
            }
            FlashAttention::Off if fused => {
                let what = format!(
                    "attention of device {} is always fused; choose auto or on",
                    about.device
                );
                return Err(Error::new(Reason::OpUnsupported, what));
            }
            _ => {}
        }
        let weights = match &model {
            Some(model) => session.weights(model).await?,
            None => vec![],
        };
        Ok(Self {
            session,
            about,
            model,
            weights,
            placement: params.placement,
            graph: 0,
        })
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
        self.graph = self
            .graph
            .max(memory.arena + memory.inputs + memory.outputs);
        Ok(memory)
    }

    /// What the model and the greatest reserved graph take, by device.
    pub fn memory(&self) -> Vec<DeviceMemory> {
        let sizes: Vec<(&str, u64)> = self
            .weights
            .iter()
            .map(|(name, spec)| (name.as_str(), spec.bytes(0).unwrap_or(0) as u64))
            .collect();
        let mut devices = place(&sizes, &self.placement, &self.about.device);
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

/// Embeddings stay with the CPU, the output goes with the last layer.
fn place(
    weights: &[(&str, u64)],
    placement: &Placement,
    own: &str,
) -> BTreeMap<String, DeviceMemory> {
    const CPU: &str = "cpu:0";
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
        let at = |placement: Placement| place(&weights, &placement, "cuda:0");
        let whole = at(Placement::Whole);
        assert_eq!(whole["cuda:0"].total(), 131);
        // The output and one layer.
        let two = at(Placement::Count(2));
        assert_eq!(two["cuda:0"].weights, BTreeMap::from([(1, 20), (2, 1)]));
        assert_eq!(
            (two["cpu:0"].input_weights, two["cpu:0"].total()),
            (100, 110)
        );
        let none = at(Placement::Count(0));
        assert!(!none.contains_key("cuda:0"));
        let list = at(Placement::List(vec![("cuda:1".to_owned(), vec![0, 2])]));
        assert_eq!(list["cuda:1"].weights, BTreeMap::from([(0, 10), (2, 1)]));
        assert_eq!(list["cpu:0"].weights, BTreeMap::from([(1, 20)]));
    }
}
