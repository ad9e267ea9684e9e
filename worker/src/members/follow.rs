//! A member that does what its leader does.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::atomic::AtomicU64,
    time::{Duration, Instant},
};

use hotcell_ipc::{
    descriptors::{Collector, DescriptorReceiver, DescriptorSender},
    memory::Mapping,
};
use hotcell_kernels::{
    backend::{Device, DeviceError},
    plan::PlanHints,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};

use rustix::{
    io::Errno,
    net::{SendFlags, send},
};

use super::{
    birth::{Link, Member, is_over},
    doors,
    wire::{self, KeptTold, Left, Loaded, Told},
};
use crate::{
    debug::observer::NodeNote,
    error::{of_device, of_model, of_run},
    exit::Exit,
    last_words::MappedFiles,
    model::run::{Division, Keeping, Keeps, Order, RunShape, Runner},
    packing::Places,
    weights::{ModelFile, ModelSource, Weight, Weights},
};

/// Between two signs that a load goes on.
const SIGNS: Duration = Duration::from_millis(100);

/// A member's part of a model.
struct Part {
    runner: Runner,
    weights: Weights,
    /// What its plans did in steps that were followed.
    notes: Vec<NodeNote>,
    _mapped: MappedFiles,
    /// Of the packed copies that it computes from.
    _copies: Option<MappedFiles>,
}

/// Does what the leader says until it is gone. Where its device is, the device writes at `node`.
///
/// # Errors
/// What keeps it from that: its leader ends with it.
pub fn follow(member: Member, device: &dyn Device, node: &'static AtomicU64) -> io::Result<()> {
    let (parts_here, since) = (member.parts(), member.since);
    let communicator = member.communicator().map_err(io::Error::other)?;
    device.join(communicator).map_err(io::Error::other)?;
    let Link {
        mut orders,
        files,
        door,
    } = member.link;
    let files = DescriptorReceiver::new(files)?;
    let leaves = DescriptorSender::new(door)?;
    if parts_here.division == Division::Columns {
        doors::show(device, &leaves, &mut orders)?;
    }
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
                keeps,
                kept,
            } => {
                let shape = RunShape {
                    parts: parts_here,
                    ..shape
                };
                let says = Signs::new(&orders)?;
                let loaded = collect(&files, model.into()).map_err(|error| internal(&error));
                let keeping = keeps.then_some(kept);
                let loaded = loaded.and_then(|fds| load(device, shape, names, keeping, fds, &says));
                let loaded = match loaded {
                    Ok((part, keeps)) => {
                        parts.insert(model, part);
                        Loaded::Done(Left::sent(keeps, &leaves, model))
                    }
                    Err(error) => Loaded::Failed(error.reason(), error.message().to_owned()),
                };
                wire::write(&mut orders, &loaded.put())?;
            }
            Told::Doors { each } => {
                let opened = doors::open(device, &files, parts_here.share.members, each);
                wire::write(&mut orders, &opened.put())?;
            }
            Told::Met => wire::write(&mut orders, &doors::met(device).put())?,
            Told::Unload { model } => drop(parts.remove(&model)),
            Told::Packed {
                model,
                copies,
                weights,
            } => {
                let descriptors = match copies {
                    0 => Vec::new(),
                    _ => collect(&files, model.into())?,
                };
                let part = parts.get_mut(&model);
                let part = part.ok_or_else(|| io::Error::other(unknown(model)))?;
                // From the others it computes the same bits.
                if let Err(error) = take_packed(device, part, &weights, descriptors) {
                    tracing::warn!(%error, "packed weights are not used");
                }
            }
            Told::Prepare { model, wanted } => {
                let part = parts.get_mut(&model);
                let part = part.ok_or_else(|| io::Error::other(unknown(model)))?;
                let tapped = match part.runner.prepare_tap(device, &wanted) {
                    Ok(()) => Loaded::Done(Left::default()),
                    Err(error) => {
                        let error = of_device(&error);
                        Loaded::Failed(error.reason(), error.message().to_owned())
                    }
                };
                wire::write(&mut orders, &tapped.put())?;
            }
            Told::Seen { model, what } => {
                let part = parts.get(&model);
                let part = part.ok_or_else(|| io::Error::other(unknown(model)))?;
                let saw = part.runner.saw(&what).map_err(io::Error::other)?;
                wire::write(&mut orders, &saw)?;
            }
            Told::Noted { model } => {
                let part = parts.get_mut(&model);
                let part = part.ok_or_else(|| io::Error::other(unknown(model)))?;
                let notes = std::mem::take(&mut part.notes);
                wire::write(&mut orders, &wire::notes(&notes, since))?;
            }
            told => match perform(&mut parts, told, node) {
                // Its end is the leader's to tell of.
                Err(_) if is_over(&orders) => return Ok(()),
                done => done.map_err(io::Error::other)?,
            },
        }
    }
    Ok(())
}

/// The descriptors of a model's files, and of what there is beside them.
pub(super) fn collect(files: &DescriptorReceiver, model: u64) -> io::Result<Vec<OwnedFd>> {
    let most = limits::MAX_MODEL_FILES + limits::MAX_KEPT_PIECES;
    let mut sets = Collector::new(1, most);
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
    to: UnixStream,
    last: Cell<Instant>,
}

impl Signs {
    fn new(to: &UnixStream) -> io::Result<Self> {
        Ok(Self {
            to: to.try_clone()?,
            last: Cell::new(Instant::now()),
        })
    }

    fn progressed(&self) {
        if self.last.get().elapsed() >= SIGNS {
            self.last.set(Instant::now());
            // A leader that still loads its own part reads none of them, and those that it has not read are enough.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.to, &wire::framed(&Loaded::Progress.put()), flags) {
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                // Nobody is there to load it for.
                Err(_) => std::process::exit(Exit::Ok.code()),
            }
        }
    }
}

fn load(
    device: &dyn Device,
    shape: RunShape,
    names: Vec<String>,
    keeping: Option<Option<KeptTold>>,
    mut descriptors: Vec<OwnedFd>,
    says: &Signs,
) -> Result<(Part, Keeps), Error> {
    let kept = keeping.as_ref().and_then(Option::as_ref);
    let pieces = descriptors.split_off(names.len().min(descriptors.len()));
    if names.len() != descriptors.len() || kept.map_or(0, |kept| kept.pieces) != pieces.len() {
        let what = format!(
            "{} descriptors came for {} files",
            descriptors.len() + pieces.len(),
            names.len()
        );
        return Err(Error::new(Reason::ProtocolViolation, what));
    }
    let map = |(name, fd): (String, OwnedFd)| match Mapping::of_file(fd) {
        Ok(mapping) => Ok(ModelFile { name, mapping }),
        Err(error) => Err(Error::new(
            Reason::NotAModel,
            format!("{name} cannot be mapped: {error}"),
        )),
    };
    let files = names.into_iter().zip(descriptors).map(map);
    let files = files.collect::<Result<Vec<_>, _>>()?;
    let mapped = MappedFiles::note(files.iter().map(|f| f.mapping.bytes().as_ptr_range()));
    let source = ModelSource::open(files).map_err(|error| of_model(&error))?;
    let hints = PlanHints::default();
    let keeping = match keeping {
        None => Keeping::Nothing,
        Some(kept) => Keeping::Weights(kept.map(|kept| kept.with(pieces)).into_iter().collect()),
    };
    let progressed = || says.progressed();
    let made = Runner::keeping(device, &source, shape, &hints, &progressed, keeping);
    let (runner, keeps) = made.map_err(|error| of_run(&error))?;
    let part = Part {
        runner,
        weights: source.weights,
        notes: Vec::new(),
        _mapped: mapped,
        _copies: None,
    };
    Ok((part, keeps))
}

/// Computes from the packed copies in which these weights are.
fn take_packed(
    device: &dyn Device,
    part: &mut Part,
    places: &[(String, usize)],
    descriptors: Vec<OwnedFd>,
) -> io::Result<()> {
    let copies = descriptors.into_iter().map(Mapping::of_file);
    let copies = copies.collect::<io::Result<Vec<_>>>()?;
    let mapped = MappedFiles::note(copies.iter().map(|copy| copy.bytes().as_ptr_range()));
    let mut packed = BTreeMap::new();
    let in_copies = Places::of(&part.weights);
    for (name, copy) in places {
        let weight = part.weights.get(name).map_err(io::Error::other)?;
        let copy = copies.get(*copy);
        let copy = copy.filter(|copy| copy.len() == weight.mapping.len());
        let copy = copy.ok_or_else(|| io::Error::other(format!("no packed copy of {name}")))?;
        let weight = Weight {
            mapping: copy.clone(),
            range: in_copies.range(weight),
            ..weight.clone()
        };
        packed.insert(name.clone(), weight);
    }
    let used = part.runner.use_packed(device, &packed);
    used.map_err(io::Error::other)?;
    part._copies = Some(mapped);
    Ok(())
}

fn internal(error: &io::Error) -> Error {
    Error::new(Reason::Internal, error.to_string())
}

fn unknown(model: u32) -> DeviceError {
    DeviceError::Binding(format!("there is no model {model}"))
}

fn perform(
    parts: &mut HashMap<u32, Part>,
    told: Told,
    node: &'static AtomicU64,
) -> Result<(), DeviceError> {
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
        Told::Step {
            model,
            rows,
            picks,
            looked,
            followed,
        } => {
            let (looked, followed) = (*looked, *followed);
            let order = Order::Step {
                rows,
                picks,
                looked,
                followed,
            };
            (model, order)
        }
        Told::Tap { model, take } => (model, Order::Tap { take: *take }),
        Told::States { model, rows } => (model, Order::States { rows }),
        Told::Doors { .. }
        | Told::Met
        | Told::Load { .. }
        | Told::Packed { .. }
        | Told::Prepare { .. }
        | Told::Noted { .. }
        | Told::Seen { .. }
        | Told::Unload { .. } => {
            return Ok(());
        }
    };
    let part = parts.get_mut(model).ok_or_else(|| unknown(*model))?;
    let followed = matches!(told, Told::Step { followed: true, .. });
    if followed {
        part.runner.follow(node);
    }
    let done = part.runner.perform(&order);
    if followed {
        let room = limits::MAX_TRACED_NODES.saturating_sub(part.notes.len());
        let noted = part.runner.followed().unwrap_or_default();
        part.notes.extend(noted.into_iter().take(room));
    }
    done
}
