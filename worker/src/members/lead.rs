//! The leader: what its runners do, all members do.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use hotcell_ipc::{
    child::ExitStatus,
    descriptors::{DescriptorReceiver, DescriptorSender},
    fork::Forked,
    memory::Mapping,
};
use hotcell_kernels::{
    backend::{Device, DeviceError},
    communicator::Communicator,
};
use hotcell_proto::error::{Error, Reason};
use rustix::event::{PollFd, PollFlags, poll};

use super::{
    birth::Leads,
    doors,
    kept::{self, Given, Made},
    wire::{self, KeptTold, Loaded},
};
use crate::{
    debug::observer::NodeNote,
    model::run::{Division, Keeping, Keeps, Order, Others, Parts, RunShape, Seen, Wanted},
    weights::{ModelFile, Weight},
};

/// How long a member may take to take a model's files.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long one whose connection is gone may take to be gone itself, also where others have the processors.
const ENDING: Duration = Duration::from_secs(1);

/// The end of this process, which members bring.
struct End {
    children: Vec<Forked>,
    /// Taken by the first who brings it, and never given back.
    first: Mutex<()>,
    lost: fn(&str, Option<ExitStatus>),
}

impl End {
    /// Ends this process, for this reason, and with how the member ended that did so first, if one did.
    fn come(&self, why: &str) {
        let _first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let ended = |(rank, child): (usize, &Forked)| Some((rank, child.ended()?));
        loop {
            let others = (1..).zip(&self.children);
            if let Some((rank, how)) = others.into_iter().find_map(ended) {
                let members = self.children.len() + 1;
                let what = format!("member {rank} of {members} is gone");
                return (self.lost)(&what, Some(how));
            }
            if begun.elapsed() > ENDING {
                return (self.lost)(why, None);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The other members, on the thread that computes.
pub struct Members {
    links: Vec<To>,
    parts: Parts,
    next: Cell<u32>,
    since: Instant,
    end: Arc<End>,
}

pub(super) struct To {
    pub orders: RefCell<UnixStream>,
    pub files: DescriptorSender,
    pub door: DescriptorReceiver,
    /// Answers to the question what it noted that are on their way, and those that came before something else was read.
    owed: Cell<usize>,
    came: RefCell<Vec<Vec<u8>>>,
}

impl To {
    /// Reads what it was asked last. `None`: it is gone.
    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        self.collect()?;
        wire::read(&mut *self.orders.borrow_mut())
    }

    /// Reads what it noted, which it was asked before anything else that it has not answered.
    fn collect(&self) -> io::Result<()> {
        while let Some(left) = self.owed.get().checked_sub(1) {
            let frame = wire::read(&mut *self.orders.borrow_mut())?;
            let frame = frame.ok_or(io::ErrorKind::UnexpectedEof)?;
            self.owed.set(left);
            self.came.borrow_mut().push(frame);
        }
        Ok(())
    }
}

/// A model of which they have their parts.
struct Led {
    members: Rc<Members>,
    model: u32,
}

impl Members {
    /// Those that were made, and the leader's end of what they share. When one of them ends, `lost` is called with
    /// what there is to say and how that one ended, as far as the system tells, and ends this process.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn new(
        leads: Leads,
        lost: fn(&str, Option<ExitStatus>),
    ) -> io::Result<(Self, Communicator)> {
        let communicator = leads.communicator().map_err(io::Error::other)?;
        let parts = leads.parts();
        let mut links = Vec::new();
        let mut watched = Vec::new();
        let mut children = Vec::new();
        for (child, link) in leads.others {
            children.push(child);
            watched.push(link.orders.try_clone()?);
            links.push(To {
                orders: RefCell::new(link.orders),
                files: DescriptorSender::new(link.files)?.with_timeout(PATIENCE),
                door: DescriptorReceiver::new(link.door)?,
                owed: Cell::new(0),
                came: RefCell::default(),
            });
        }
        let end = Arc::new(End {
            children,
            first: Mutex::new(()),
            lost,
        });
        let comes = Arc::clone(&end);
        // Who computes hears of it by itself; one that waits for requests would not.
        thread::Builder::new()
            .name("members".to_owned())
            .spawn(move || {
                let mut ends: Vec<_> = (watched.iter())
                    .map(|link| PollFd::new(link, PollFlags::empty()))
                    .collect();
                while !matches!(poll(&mut ends, None), Ok(1..)) {}
                let which = ends.iter().position(|end| !end.revents().is_empty());
                comes.come(&format!(
                    "member {} of {} is gone",
                    which.map_or(0, |at| at + 1),
                    parts.share.members
                ));
            })?;
        let members = Self {
            links,
            parts,
            next: Cell::new(0),
            since: leads.since,
            end,
        };
        Ok((members, communicator))
    }

    /// Has all of them give each other their parts from device to device, where the devices reach each other's memory. To be
    /// done before the first load.
    ///
    /// # Errors
    /// When one of them is gone, or what it says makes no sense.
    pub fn meet(&self, device: &dyn Device) -> Result<(), DeviceError> {
        if self.parts.division != Division::Columns {
            return Ok(());
        }
        let met = doors::meet(device, &self.links);
        met.map_err(|error| DeviceError::Binding(format!("members do not meet: {error}")))
    }

    /// The leader's part of every model.
    pub fn parts(&self) -> Parts {
        self.parts
    }

    fn tell(&self, to: &To, frame: &[u8]) {
        if let Err(error) = wire::write(&mut *to.orders.borrow_mut(), frame) {
            self.end
                .come(&format!("a member cannot be told what to do: {error}"));
        }
    }

    fn tell_all(&self, frame: &[u8]) {
        self.links.iter().for_each(|to| self.tell(to, frame));
    }

    /// How many there are besides the leader.
    pub fn others(&self) -> usize {
        self.links.len()
    }

    /// The leader's own part of what devices keep, and what all have of it.
    pub fn divide(&self, keeping: Keeping) -> (Keeping, Given) {
        kept::divide(keeping, self.links.len() + 1)
    }

    /// Has all of them load their parts of a model of these files, to be run with these sizes, from what devices keep as far as
    /// that is given. They do so while this process loads its own; [`Loading::finish`] waits for them.
    pub fn load(self: &Rc<Self>, shape: &RunShape, files: &[ModelFile], given: Given) -> Loading {
        let model = self.next.get();
        self.next.set(model.wrapping_add(1));
        let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
        let descriptors: Vec<_> = files.iter().map(|file| file.mapping.descriptor()).collect();
        for (rank, to) in (1..).zip(&self.links) {
            let kept = given.all.get(rank);
            let told = kept.map(KeptTold::of);
            let frame = wire::load(model, shape, &names, given.keeps, told.as_ref());
            self.tell(to, &frame);
            let pieces = kept.iter().flat_map(|kept| &kept.pieces);
            let mut descriptors = descriptors.clone();
            descriptors.extend(pieces.map(AsFd::as_fd));
            self.hand(to, model, &descriptors);
        }
        let led = Led {
            members: Rc::clone(self),
            model,
        };
        Loading(led, given)
    }

    fn hand(&self, to: &To, model: u32, descriptors: &[BorrowedFd<'_>]) {
        if let Err(error) = to.files.send(model.into(), descriptors) {
            self.end
                .come(&format!("a member does not take a model's files: {error}"));
        }
    }
}

/// A load that is going on, which is to be finished.
#[must_use]
pub struct Loading(Led, Given);

impl Loading {
    /// Waits for all of them. Who tells them what to do from then on, and what their devices keep. `progressed` is called
    /// meanwhile.
    ///
    /// # Errors
    /// What keeps one of them from loading its part.
    pub fn finish(self, progressed: &dyn Fn()) -> Result<(Box<dyn Others>, Made), Error> {
        let Self(led, given) = self;
        let mut failed = None;
        let mut others = Vec::new();
        for (rank, to) in (1..).zip(&led.members.links) {
            match answer(to, led.model, progressed) {
                Ok(keeps) => others.push(keeps),
                Err((reason, why)) => {
                    let what = format!("member {rank} cannot load its part: {why}");
                    failed = Some(Error::new(reason, what));
                }
            }
        }
        let given = given.all;
        match failed {
            None => Ok((Box::new(led), Made { given, others })),
            Some(error) => Err(error),
        }
    }
}

/// What a member says in the end.
fn answer(from: &To, model: u32, progressed: &dyn Fn()) -> Result<Keeps, (Reason, String)> {
    let broken = |why: String| (Reason::Internal, why);
    loop {
        let frame = from.read();
        let frame = frame.map_err(|error| broken(error.to_string()))?;
        match frame.as_deref().map(Loaded::take) {
            Some(Some(Loaded::Progress)) => progressed(),
            Some(Some(Loaded::Done(left))) => {
                return left.received(&from.door, model).map_err(broken);
            }
            Some(Some(Loaded::Failed(reason, why))) => return Err((reason, why)),
            Some(None) => return Err(broken("it says what nobody understands".to_owned())),
            None => return Err(broken("it is gone".to_owned())),
        }
    }
}

impl Others for Led {
    fn order(&self, order: &Order<'_>) {
        self.members.tell_all(&wire::order(self.model, order));
    }

    fn use_packed(&self, weights: &BTreeMap<String, Weight>) {
        let mut copies: Vec<&Mapping> = Vec::new();
        let mut places = Vec::with_capacity(weights.len());
        for (name, weight) in weights {
            let there = copies.iter().position(|copy| copy.is(&weight.mapping));
            let at = there.unwrap_or(copies.len());
            if there.is_none() {
                copies.push(&weight.mapping);
            }
            places.push((name.as_str(), at));
        }
        let frame = wire::packed(self.model, copies.len(), &places);
        let descriptors: Vec<_> = copies.iter().map(|copy| copy.descriptor()).collect();
        for to in &self.members.links {
            self.members.tell(to, &frame);
            if !descriptors.is_empty() {
                self.members.hand(to, self.model, &descriptors);
            }
        }
    }

    fn prepare_tap(&self, wanted: &Wanted) -> Result<(), DeviceError> {
        self.members.tell_all(&wire::prepare(self.model, wanted));
        let mut failed = None;
        // All of them answer.
        for (rank, to) in (1..).zip(&self.members.links) {
            if let Err((_, why)) = answer(to, self.model, &|| ()) {
                failed = Some(DeviceError::Binding(format!(
                    "member {rank} cannot look at so much: {why}"
                )));
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn seen(&self, rank: usize, what: &Seen) -> Result<Vec<u8>, DeviceError> {
        let gone = || DeviceError::Binding(format!("member {rank} does not tell what it saw"));
        let links = &self.members.links;
        let to = rank.checked_sub(1).and_then(|at| links.get(at));
        let to = to.ok_or_else(gone)?;
        self.members.tell(to, &wire::seen(self.model, what));
        let frame = to.read();
        frame.ok().flatten().ok_or_else(gone)
    }

    fn ask_notes(&self) {
        self.members.tell_all(&wire::noted(self.model));
        for to in &self.members.links {
            to.owed.set(to.owed.get() + 1);
        }
    }

    fn notes(&self) -> Result<Vec<NodeNote>, DeviceError> {
        let (members, mut all) = (&self.members, Vec::new());
        for (rank, to) in (1..).zip(&members.links) {
            let missing =
                || DeviceError::Binding(format!("member {rank} does not tell what it noted"));
            to.collect().map_err(|_| missing())?;
            for frame in to.came.take() {
                all.extend(wire::noted_by(rank, &frame, members.since).ok_or_else(missing)?);
            }
        }
        Ok(all)
    }

    fn failed(&self, error: &DeviceError) {
        self.members
            .end
            .come(&format!("a step that other members are at failed: {error}"));
    }
}

impl Drop for Led {
    fn drop(&mut self) {
        self.members.tell_all(&wire::unload(self.model));
    }
}
