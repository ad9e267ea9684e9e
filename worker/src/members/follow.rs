//! A member that does what its leader does.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io::{self, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    time::{Duration, Instant},
};

use hotcell_ipc::{
    descriptors::{Collector, DescriptorReceiver},
    memory::Mapping,
};
use hotcell_kernels::{
    backend::{Device, DeviceError},
    plan::PlanHints,
};
use hotcell_proto::limits;

use super::{
    birth::{Link, Member},
    wire::{self, Loaded, Told},
};
use crate::{
    last_words::MappedFiles,
    model::run::{Order, RunShape, Runner},
    weights::{ModelFile, ModelSource},
};

/// Between two signs that a load goes on.
const SIGNS: Duration = Duration::from_millis(100);

/// A member's part of a model.
struct Part {
    runner: Runner,
    _mapped: MappedFiles,
}

/// Does what the leader says until it is gone.
///
/// # Errors
/// What keeps it from that: its leader ends with it.
pub fn follow(member: Member, device: &dyn Device) -> io::Result<()> {
    let share = member.share();
    let communicator = member.communicator().map_err(io::Error::other)?;
    device.join(communicator).map_err(io::Error::other)?;
    let Link { mut orders, files } = member.link;
    let files = DescriptorReceiver::new(files)?;
    let mut parts: HashMap<u32, Part> = HashMap::new();
    while let Some(frame) = wire::read(&mut orders)? {
        let Some(told) = wire::told(&frame) else {
            return Err(io::Error::other("the leader says what nobody understands"));
        };
        match told {
            Told::Load {
                model,
                shape,
                names,
            } => {
                let descriptors = collect(&files, model.into())?;
                let shape = RunShape { share, ..shape };
                let says = Signs::new(&orders)?;
                let loaded = match load(device, shape, names, descriptors, &says) {
                    Ok(part) => {
                        parts.insert(model, part);
                        Loaded::Done
                    }
                    Err(why) => Loaded::Failed(why),
                };
                wire::write(&mut orders, &loaded.put())?;
            }
            Told::Unload { model } => drop(parts.remove(&model)),
            told => perform(&mut parts, told).map_err(io::Error::other)?,
        }
    }
    Ok(())
}

/// The descriptors of a model's files.
fn collect(files: &DescriptorReceiver, model: u64) -> io::Result<Vec<OwnedFd>> {
    let mut sets = Collector::new(1, limits::MAX_MODEL_FILES);
    loop {
        let batch = files.recv()?;
        match sets.add(batch).map_err(io::Error::other)? {
            Some((tag, set)) if tag == model => return Ok(set),
            Some(_) => return Err(io::Error::other("the files of another model came")),
            None => {}
        }
    }
}

/// Tells the leader that a load goes on.
struct Signs {
    to: RefCell<UnixStream>,
    last: Cell<Instant>,
}

impl Signs {
    fn new(to: &UnixStream) -> io::Result<Self> {
        Ok(Self {
            to: RefCell::new(to.try_clone()?),
            last: Cell::new(Instant::now()),
        })
    }

    fn progressed(&self) {
        if self.last.get().elapsed() >= SIGNS {
            self.last.set(Instant::now());
            let mut to = self.to.borrow_mut();
            // A leader that is gone is noticed by who reads.
            let _ = wire::write(&mut *to, &Loaded::Progress.put()).and_then(|()| to.flush());
        }
    }
}

fn load(
    device: &dyn Device,
    shape: RunShape,
    names: Vec<String>,
    descriptors: Vec<OwnedFd>,
    says: &Signs,
) -> Result<Part, String> {
    if names.len() != descriptors.len() {
        return Err(format!(
            "{} descriptors came for {} files",
            descriptors.len(),
            names.len()
        ));
    }
    let map = |(name, fd): (String, OwnedFd)| match Mapping::of_file(fd) {
        Ok(mapping) => Ok(ModelFile { name, mapping }),
        Err(error) => Err(format!("{name} cannot be mapped: {error}")),
    };
    let files = names.into_iter().zip(descriptors).map(map);
    let files = files.collect::<Result<Vec<_>, _>>()?;
    let mapped = MappedFiles::note(files.iter().map(|f| f.mapping.bytes().as_ptr_range()));
    let source = ModelSource::open(files).map_err(|error| error.to_string())?;
    let hints = PlanHints::default();
    let runner = Runner::new(device, &source, shape, &hints, &|| says.progressed());
    Ok(Part {
        runner: runner.map_err(|error| error.to_string())?,
        _mapped: mapped,
    })
}

fn perform(parts: &mut HashMap<u32, Part>, told: Told) -> Result<(), DeviceError> {
    let (model, order) = match &told {
        Told::Table {
            model,
            kind,
            sequence,
            first,
            blocks,
        } => {
            let (kind, sequence, first) = (*kind, *sequence, *first);
            let order = Order::Table {
                kind,
                sequence,
                first,
                blocks,
            };
            (model, order)
        }
        Told::Copy {
            model,
            kind,
            from,
            to,
        } => {
            let (kind, from, to) = (*kind, *from, *to);
            (model, Order::Copy { kind, from, to })
        }
        Told::Wipe { model, kind, block } => {
            let (kind, block) = (*kind, *block);
            (model, Order::Wipe { kind, block })
        }
        Told::Step { model, rows, picks } => (model, Order::Step { rows, picks }),
        Told::States { model, rows } => (model, Order::States { rows }),
        Told::Load { .. } | Told::Unload { .. } => return Ok(()),
    };
    let unknown = || DeviceError::Binding(format!("there is no model {model}"));
    let part = parts.get_mut(model).ok_or_else(unknown)?;
    part.runner.perform(&order)
}
