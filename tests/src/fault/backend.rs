//! The CPU's backend, wrapped: what is executed may go wrong, and what is planned.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
};

use hotcell_graph::{
    Graph,
    op::{Call, ValueSpec},
};
use hotcell_kernels::{
    backend::{
        Backend, Buffer, BufferType, Device, DeviceError, DeviceInfo, DeviceUsage, HostRegion,
        SharedRegion, Stream, Trail,
    },
    cpu::CpuBackend,
    host::Staging,
    plan::{Origin, Plan, PlanHints, PlanMemory, Planner, Prepared, Slot, Unfinished},
};

use super::{CRASH, CRASH_NODE, Fault, LIBRARY, POISON, POISON_INPUT, acts, plant, trespass};

/// Has the CPU's devices under their own names.
pub(super) struct FaultBackend;

impl Backend for FaultBackend {
    fn name(&self) -> &'static str {
        CpuBackend.name()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        CpuBackend.devices()
    }

    fn load(&self, id: &str) -> Result<(), DeviceError> {
        CpuBackend.load(id)
    }

    fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        let inner = CpuBackend.open(id, cores)?;
        // This is the engine's thread: what it starts is confined as it is.
        acts::begin();
        Ok(Rc::new(FaultDevice {
            inner,
            watched: Rc::default(),
            kept: Cell::new(LIBRARY.1),
        }))
    }
}

/// Buffers of the models that faults look at or spoil.
#[derive(Default)]
struct Watched {
    tokens: RefCell<Vec<Buffer>>,
    logits: RefCell<Vec<Buffer>>,
}

impl Watched {
    /// Whether a step's tokens have these, one after the other.
    fn reads(&self, wanted: &[u32], rows: usize) -> bool {
        self.tokens.borrow().iter().any(|buffer| {
            let mut bytes = vec![0; buffer.bytes().min(rows.saturating_mul(4))];
            if buffer.read(0, &mut bytes).is_err() {
                return false;
            }
            let ids: Vec<u32> = bytes
                .chunks_exact(4)
                .filter_map(|b| b.try_into().ok().map(u32::from_ne_bytes))
                .collect();
            ids.windows(wanted.len()).any(|window| window == wanted)
        })
    }

    fn spoil(&self) -> Result<(), DeviceError> {
        for buffer in self.logits.borrow().iter() {
            let mut values = vec![0.0; buffer.bytes() / 4];
            buffer.read_f32(0, &mut values)?;
            let bytes: Vec<u8> = values.iter().flat_map(|v| (-v).to_ne_bytes()).collect();
            buffer.write(0, &bytes)?;
        }
        Ok(())
    }
}

struct FaultDevice {
    inner: Rc<dyn Device>,
    watched: Rc<Watched>,
    /// Bytes that its library keeps.
    kept: Cell<usize>,
}

impl Device for FaultDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn reproducible(&self) -> bool {
        self.inner.reproducible()
    }

    fn buffer_types(&self) -> &'static [BufferType] {
        self.inner.buffer_types()
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<Buffer, DeviceError> {
        let buffer = self.inner.allocate(what, bytes)?;
        match what {
            "token ids" => self.watched.tokens.borrow_mut().push(buffer.clone()),
            "logits" => self.watched.logits.borrow_mut().push(buffer.clone()),
            _ => {}
        }
        Ok(buffer)
    }

    fn import(&self, region: Rc<dyn HostRegion>) -> Result<Buffer, DeviceError> {
        trespass::note_weights(region.bytes());
        self.inner.import(region)
    }

    fn import_shared(&self, region: Rc<dyn SharedRegion>) -> Result<Buffer, DeviceError> {
        self.inner.import_shared(region)
    }

    fn adopt(&self, what: &str, staging: Staging) -> Result<Buffer, DeviceError> {
        self.inner.adopt(what, staging)
    }

    fn ops(&self) -> Vec<&'static str> {
        self.inner.ops()
    }

    fn supports(&self, call: &Call<'_>) -> bool {
        self.inner.supports(call)
    }

    fn plan(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Plan>, DeviceError> {
        if Fault::HangInLoad.taken() {
            acts::hang();
        }
        let planted = plant::plant(graph)?;
        let struck = Struck::of(graph, planted.as_ref());
        let graph = planted.as_ref().map_or(graph, |planted| &planted.graph);
        Ok(self.wrap(struck, self.inner.plan(graph, hints)?))
    }

    fn planner(&self) -> Option<Arc<dyn Planner>> {
        Some(Arc::new(FaultPlanner(self.inner.planner()?)))
    }

    fn finish(
        &self,
        prepared: Box<dyn Prepared>,
        hints: &PlanHints,
    ) -> Result<Box<dyn Plan>, Unfinished> {
        let prepared = prepared.into_any().downcast::<FaultPrepared>();
        let FaultPrepared { inner, struck } = *prepared.map_err(|_| Unfinished::foreign())?;
        match self.inner.finish(inner, hints) {
            Ok(plan) => Ok(self.wrap(struck, plan)),
            Err(Unfinished { error, prepared }) => Err(Unfinished {
                error,
                prepared: prepared
                    .map(|inner| Box::new(FaultPrepared { inner, struck }) as Box<dyn Prepared>),
            }),
        }
    }

    fn stream(&self) -> Box<dyn Stream> {
        self.inner.stream()
    }

    fn usage(&self) -> Option<DeviceUsage> {
        Some(DeviceUsage {
            active: LIBRARY.0,
            peak: LIBRARY.0 + LIBRARY.1,
            cached: self.kept.get(),
        })
    }

    fn trim(&self) {
        self.kept.set(0);
    }

    fn leave(&self, trail: Trail) {
        self.inner.leave(trail);
    }
}

impl FaultDevice {
    fn wrap(&self, struck: Struck, inner: Box<dyn Plan>) -> Box<dyn Plan> {
        Box::new(FaultPlan {
            inner,
            struck,
            weight: [None; 2],
            watched: Rc::clone(&self.watched),
        })
    }
}

/// What of a graph makes its plans crash.
struct Struck {
    is_poison: bool,
    /// The input that is [`CRASH_NODE`], and its bytes.
    weight: Option<(usize, usize)>,
    /// What nodes were called before faults were planted; none: as they are.
    before: Option<BTreeMap<u32, u32>>,
}

impl Struck {
    fn of(graph: &Graph, planted: Option<&plant::Planted>) -> Self {
        let named = |name: &str| graph.inputs().iter().position(|input| input.name == name);
        let bytes = |at: usize| match &graph.inputs().get(at)?.spec {
            ValueSpec::Tensor(spec) => spec.bytes(0),
            _ => None,
        };
        Self {
            // What was cut out of a model has no tokens by which it would be told from others.
            is_poison: named(POISON_INPUT).is_some()
                || (named(CRASH_NODE).is_some() && named("tokens").is_none()),
            weight: named(CRASH_NODE).and_then(|at| Some((at, bytes(at)?))),
            before: planted.map(|planted| planted.before.clone()),
        }
    }
}

struct FaultPlanner(Arc<dyn Planner>);

impl Planner for FaultPlanner {
    fn prepare(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Prepared>, DeviceError> {
        let planted = plant::plant(graph)?;
        let struck = Struck::of(graph, planted.as_ref());
        let graph = planted.as_ref().map_or(graph, |planted| &planted.graph);
        Ok(Box::new(FaultPrepared {
            inner: self.0.prepare(graph, hints)?,
            struck,
        }))
    }
}

struct FaultPrepared {
    inner: Box<dyn Prepared>,
    struck: Struck,
}

impl Prepared for FaultPrepared {
    fn memory(&self) -> PlanMemory {
        self.inner.memory()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

struct FaultPlan {
    inner: Box<dyn Plan>,
    struck: Struck,
    /// Where [`CRASH_NODE`] lies: as it is in the model's file, and packed.
    weight: [Option<(*mut u8, usize)>; 2],
    watched: Rc<Watched>,
}

impl FaultPlan {
    fn before(&self, rows: usize) {
        acts::execute();
        if self.struck.is_poison || self.watched.reads(&POISON, rows) {
            acts::segfault();
        }
        if self.struck.weight.is_some() && self.watched.reads(&CRASH, rows) {
            for (start, bytes) in self.weight.iter().flatten() {
                acts::forbid(*start, *bytes);
            }
        }
    }

    /// Notes where the weight lies that is not to be read.
    fn note(&mut self, slot: Slot, packed: bool, buffer: Option<&Buffer>, offset: usize) {
        let Some((input, bytes)) = self.struck.weight else {
            return;
        };
        if !matches!(slot, Slot::Input(i) if i == input) {
            return;
        }
        let lies = buffer.and_then(|buffer| {
            let host = buffer.host()?;
            let bytes = bytes.min(host.len.checked_sub(offset)?);
            Some((host.start.wrapping_add(offset), bytes))
        });
        self.weight[usize::from(packed)] = lies;
    }

    fn after(&self) -> Result<(), DeviceError> {
        match Fault::WrongNumbers.is_on() {
            true => self.watched.spoil(),
            false => Ok(()),
        }
    }
}

impl Plan for FaultPlan {
    fn bind_for(
        &mut self,
        rows: usize,
        slot: Slot,
        buffer: &Buffer,
        offset: usize,
    ) -> Result<(), DeviceError> {
        self.note(slot, false, Some(buffer), offset);
        self.inner.bind_for(rows, slot, buffer, offset)
    }

    fn bind_packed(
        &mut self,
        slot: Slot,
        buffer: Option<&Buffer>,
        offset: usize,
    ) -> Result<bool, DeviceError> {
        self.note(slot, true, buffer, offset);
        self.inner.bind_packed(slot, buffer, offset)
    }

    fn origins(&self) -> Vec<Option<Origin>> {
        let own = |origin: Origin| match &self.struck.before {
            Some(before) => {
                let before = before.range(..=origin.node).next_back();
                before.map(|(_, &node)| Origin { node, ..origin })
            }
            None => Some(origin),
        };
        let origins = self.inner.origins().into_iter();
        origins.map(|origin| origin.and_then(own)).collect()
    }

    fn stop_when(&mut self, flag: Arc<AtomicBool>) {
        self.inner.stop_when(flag);
    }

    fn release(&mut self) {
        self.inner.release();
    }

    fn memory(&self) -> PlanMemory {
        self.inner.memory()
    }

    fn only_writes(&self, i: usize) -> bool {
        self.inner.only_writes(i)
    }

    fn reads_as_index(&self, i: usize) -> Option<bool> {
        self.inner.reads_as_index(i)
    }

    fn execute(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.before(rows);
        self.inner.execute(rows)?;
        self.after()
    }

    fn execute_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        self.before(rows);
        let next = self.inner.execute_from(rows, from, pause)?;
        self.after()?;
        Ok(next)
    }
}
