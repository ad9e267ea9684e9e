//! How a leader tells the others what to do: frames of a length and as many bytes, of little-endian numbers.

use std::{
    io::{self, Read, Write},
    ops::Range,
    time::{Duration, Instant},
};

use hotcell_graph::DType;
use hotcell_proto::error::Reason;

use crate::{
    debug::observer::NodeNote,
    model::run::{KINDS, Order, Parts, Row, RunShape, Seen, Wanted},
};

/// Bytes of a frame at most: a table of a million positions and more.
const MAX_FRAME: usize = 16 << 20;

/// What a member is told, as it reads it.
#[derive(Debug, PartialEq)]
pub(super) enum Told {
    /// Of the memory of each member's device so many descriptors have come. None: parts go through the host's memory.
    Doors {
        each: usize,
    },
    /// All have written to all of these.
    Met,
    /// A model's files have come under its number. Their names.
    Load {
        model: u32,
        shape: RunShape,
        names: Vec<String>,
        /// Whether its weights are to outlive it in its device's memory.
        keeps: bool,
        /// What is there; the descriptors come after those of the files.
        kept: Option<KeptTold>,
    },
    /// Of so many packed copies of its files the descriptors have come under its number. Which weights are in which.
    Packed {
        model: u32,
        copies: usize,
        weights: Vec<(String, usize)>,
    },
    /// It is not needed any more.
    Unload {
        model: u32,
    },
    /// Its runner has to do something.
    Table {
        model: u32,
        kind: usize,
        sequence: usize,
        first: usize,
        blocks: Vec<u32>,
    },
    Copy {
        model: u32,
        kind: usize,
        from: u32,
        to: u32,
    },
    Wipe {
        model: u32,
        kind: usize,
        block: u32,
    },
    Step {
        model: u32,
        rows: Vec<Row>,
        picks: Vec<usize>,
        looked: bool,
        followed: bool,
    },
    States {
        model: u32,
        rows: Vec<usize>,
    },
    /// It is to be ready to hand this out, and to say whether it is.
    Prepare {
        model: u32,
        wanted: Wanted,
    },
    Tap {
        model: u32,
        take: bool,
    },
    /// What it saw of the last step is asked for.
    Seen {
        model: u32,
        what: Seen,
    },
    /// What it noted of steps that were followed is asked for.
    Noted {
        model: u32,
    },
}

/// Weights in the memory of a device, whose descriptors go another way.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct KeptTold {
    pub layout: String,
    pub bytes: u64,
    pub checksum: u64,
    pub pieces: usize,
}

/// What of a model outlives a member.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Left {
    pub found: bool,
    pub damaged: bool,
    pub bytes: u64,
    /// What its leader does not hold yet.
    pub kept: Option<KeptTold>,
}

/// What becomes of a load, or of anything else that is answered.
#[derive(Debug, PartialEq)]
pub(super) enum Loaded {
    /// It goes on.
    Progress,
    /// The model is ready.
    Done(Left),
    /// It is not, and why.
    Failed(Reason, String),
}

#[derive(Default)]
struct Put(Vec<u8>);

impl Put {
    fn kind(kind: u8, model: u32) -> Self {
        let mut put = Self(vec![kind]);
        put.number(model as usize);
        put
    }

    fn number(&mut self, n: usize) {
        self.0.extend((n as u64).to_le_bytes());
    }

    fn numbers(&mut self, all: impl ExactSizeIterator<Item = usize>) {
        self.number(all.len());
        all.for_each(|n| self.number(n));
    }

    fn text(&mut self, text: &str) {
        self.number(text.len());
        self.0.extend(text.as_bytes());
    }

    fn long(&mut self, n: u64) {
        self.0.extend(n.to_le_bytes());
    }

    fn kept(&mut self, kept: Option<&KeptTold>) {
        self.number(usize::from(kept.is_some()));
        if let Some(kept) = kept {
            self.text(&kept.layout);
            self.long(kept.bytes);
            self.long(kept.checksum);
            self.number(kept.pieces);
        }
    }
}

struct Take<'a>(&'a [u8]);

impl<'a> Take<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (here, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(here)
    }

    fn long(&mut self) -> Option<u64> {
        let bytes = self.bytes(8)?.try_into().ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    fn number(&mut self) -> Option<usize> {
        usize::try_from(self.long()?).ok()
    }

    fn flag(&mut self) -> Option<bool> {
        match self.number()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn kept(&mut self) -> Option<Option<KeptTold>> {
        if !self.flag()? {
            return Some(None);
        }
        Some(Some(KeptTold {
            layout: self.text()?,
            bytes: self.long()?,
            checksum: self.long()?,
            pieces: self.number()?,
        }))
    }

    fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    /// As many as are told, which there are bytes for.
    fn many<T>(&mut self, one: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let n = self.number().filter(|n| *n <= self.0.len())?;
        (0..n).map(|_| one(self)).collect()
    }

    fn text(&mut self) -> Option<String> {
        let n = self.number()?;
        String::from_utf8(self.bytes(n)?.to_vec()).ok()
    }
}

/// Has a member load a model.
pub(super) fn load(
    model: u32,
    shape: &RunShape,
    names: &[&str],
    keeps: bool,
    kept: Option<&KeptTold>,
) -> Vec<u8> {
    let mut put = Put::kind(0, model);
    for n in [
        shape.max_rows,
        shape.max_sequences,
        shape.context,
        shape.block_len,
        shape.blocks,
        shape.window_blocks,
    ] {
        put.number(n);
    }
    put.text(shape.cache_dtype.name());
    put.number(names.len());
    names.iter().for_each(|name| put.text(name));
    put.number(usize::from(keeps));
    put.kept(kept);
    put.0
}

/// Has a member reach for the memory of the others' devices.
pub(super) fn doors(each: usize) -> Vec<u8> {
    let mut put = Put::kind(8, 0);
    put.number(each);
    put.0
}

/// Has a member see that what all wrote has come.
pub(super) fn met() -> Vec<u8> {
    Put::kind(9, 0).0
}

/// Has a member compute from packed weights, each in one of so many copies of files.
pub(super) fn packed(model: u32, copies: usize, weights: &[(&str, usize)]) -> Vec<u8> {
    let mut put = Put::kind(7, model);
    put.number(copies);
    put.number(weights.len());
    for (name, copy) in weights {
        put.text(name);
        put.number(*copy);
    }
    put.0
}

/// Has a member be ready to hand out what is wanted of a model.
pub(super) fn prepare(model: u32, wanted: &Wanted) -> Vec<u8> {
    let mut put = Put::kind(10, model);
    put.numbers(wanted.whole.iter().copied());
    put.numbers(wanted.sizes.iter().copied());
    put.0
}

/// Asks a member what it saw of a model's last step.
pub(super) fn seen(model: u32, what: &Seen) -> Vec<u8> {
    match what {
        Seen::Sizes { rows } => {
            let mut put = Put::kind(11, model);
            put.number(*rows);
            put.0
        }
        Seen::Rows {
            number,
            rows: Range { start, end },
        } => {
            let mut put = Put::kind(12, model);
            [*number, *start, *end]
                .into_iter()
                .for_each(|n| put.number(n));
            put.0
        }
    }
}

/// Asks a member what it noted of a model's steps.
pub(super) fn noted(model: u32) -> Vec<u8> {
    Put::kind(14, model).0
}

/// What it noted, in nanoseconds since a moment that all members know.
pub(super) fn notes(notes: &[NodeNote], since: Instant) -> Vec<u8> {
    let mut put = Put::default();
    put.number(notes.len());
    for note in notes {
        let begun = note.begun.saturating_duration_since(since);
        for time in [begun, note.took] {
            put.long(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        }
        put.long(note.node);
    }
    put.0
}

/// What a member noted, as its leader reads it. `None`: it says nothing that there is.
pub(super) fn noted_by(member: u16, frame: &[u8], since: Instant) -> Option<Vec<NodeNote>> {
    let mut take = Take(frame);
    let notes = take.many(|take| {
        Some(NodeNote {
            begun: since.checked_add(Duration::from_nanos(take.long()?))?,
            took: Duration::from_nanos(take.long()?),
            node: take.long()?,
            // Its plans are its own.
            part: None,
            member,
        })
    })?;
    take.0.is_empty().then_some(notes)
}

/// Has a member forget a model.
pub(super) fn unload(model: u32) -> Vec<u8> {
    Put::kind(1, model).0
}

/// Has a member do something with a model.
pub(super) fn order(model: u32, order: &Order<'_>) -> Vec<u8> {
    match *order {
        Order::Table {
            kind,
            sequence,
            first,
            blocks,
        } => {
            let mut put = Put::kind(2, model);
            [kind, sequence, first]
                .into_iter()
                .for_each(|n| put.number(n));
            put.numbers(blocks.iter().map(|n| *n as usize));
            put.0
        }
        Order::Copy { kind, from, to } => {
            let mut put = Put::kind(3, model);
            [kind, from as usize, to as usize]
                .into_iter()
                .for_each(|n| put.number(n));
            put.0
        }
        Order::Wipe { kind, block } => {
            let mut put = Put::kind(4, model);
            [kind, block as usize]
                .into_iter()
                .for_each(|n| put.number(n));
            put.0
        }
        Order::Step {
            rows,
            picks,
            looked,
            followed,
        } => {
            let mut put = Put::kind(5, model);
            put.number(rows.len());
            for row in rows {
                [row.token as usize, row.position, row.sequence]
                    .into_iter()
                    .for_each(|n| put.number(n));
                row.slots.into_iter().for_each(|n| put.number(n));
            }
            put.numbers(picks.iter().copied());
            put.number(usize::from(looked));
            put.number(usize::from(followed));
            put.0
        }
        Order::Tap { take } => {
            let mut put = Put::kind(13, model);
            put.number(usize::from(take));
            put.0
        }
        Order::States { rows } => {
            let mut put = Put::kind(6, model);
            put.numbers(rows.iter().copied());
            put.0
        }
    }
}

fn row(take: &mut Take<'_>) -> Option<Row> {
    let (token, position, sequence) = (take.small()?, take.number()?, take.number()?);
    let mut slots = [0; KINDS];
    for slot in &mut slots {
        *slot = take.number()?;
    }
    Some(Row {
        token,
        position,
        sequence,
        slots,
    })
}

/// Reads what a member is told. `None`: it says nothing that there is.
pub(super) fn told(frame: &[u8]) -> Option<Told> {
    let (&kind, rest) = frame.split_first()?;
    let mut take = Take(rest);
    let model = take.small()?;
    let told = match kind {
        0 => {
            let mut sizes = [0; 6];
            for size in &mut sizes {
                *size = take.number()?;
            }
            let [
                max_rows,
                max_sequences,
                context,
                block_len,
                blocks,
                window_blocks,
            ] = sizes;
            Told::Load {
                model,
                shape: RunShape {
                    max_rows,
                    max_sequences,
                    context,
                    block_len,
                    blocks,
                    window_blocks,
                    cache_dtype: DType::from_name(&take.text()?)?,
                    parts: Parts::default(),
                },
                names: take.many(Take::text)?,
                keeps: take.flag()?,
                kept: take.kept()?,
            }
        }
        1 => Told::Unload { model },
        2 => Told::Table {
            model,
            kind: take.number()?,
            sequence: take.number()?,
            first: take.number()?,
            blocks: take.many(Take::small)?,
        },
        3 => Told::Copy {
            model,
            kind: take.number()?,
            from: take.small()?,
            to: take.small()?,
        },
        4 => Told::Wipe {
            model,
            kind: take.number()?,
            block: take.small()?,
        },
        5 => Told::Step {
            model,
            rows: take.many(row)?,
            picks: take.many(Take::number)?,
            looked: take.flag()?,
            followed: take.flag()?,
        },
        6 => Told::States {
            model,
            rows: take.many(Take::number)?,
        },
        7 => Told::Packed {
            model,
            copies: take.number()?,
            weights: take.many(|take| Some((take.text()?, take.number()?)))?,
        },
        8 => Told::Doors {
            each: take.number()?,
        },
        9 => Told::Met,
        10 => {
            let whole = take.many(Take::number)?.into_iter().collect();
            let sizes = take.many(Take::number)?.into_iter().collect();
            let wanted = Wanted { whole, sizes };
            Told::Prepare { model, wanted }
        }
        11 => {
            let rows = take.number()?;
            let what = Seen::Sizes { rows };
            Told::Seen { model, what }
        }
        12 => {
            let number = take.number()?;
            let rows = take.number()?..take.number()?;
            let what = Seen::Rows { number, rows };
            Told::Seen { model, what }
        }
        13 => Told::Tap {
            model,
            take: take.flag()?,
        },
        14 => Told::Noted { model },
        _ => return None,
    };
    take.0.is_empty().then_some(told)
}

impl Loaded {
    pub fn put(&self) -> Vec<u8> {
        match self {
            Self::Progress => vec![0],
            Self::Done(left) => {
                let mut put = Put(vec![1]);
                put.number(usize::from(left.found));
                put.number(usize::from(left.damaged));
                put.long(left.bytes);
                put.kept(left.kept.as_ref());
                put.0
            }
            Self::Failed(reason, why) => {
                [&[2], reason.name().as_bytes(), b"\n", why.as_bytes()].concat()
            }
        }
    }

    pub fn take(frame: &[u8]) -> Option<Self> {
        match frame.split_first()? {
            (0, []) => Some(Self::Progress),
            (1, rest) => {
                let mut take = Take(rest);
                let left = Left {
                    found: take.flag()?,
                    damaged: take.flag()?,
                    bytes: take.long()?,
                    kept: take.kept()?,
                };
                take.0.is_empty().then_some(Self::Done(left))
            }
            (2, said) => {
                let said = String::from_utf8_lossy(said);
                let (reason, why) = said.split_once('\n')?;
                let reason = Reason::from_name(reason)?;
                Some(Self::Failed(reason, why.to_owned()))
            }
            _ => None,
        }
    }
}

/// A frame of [`MAX_FRAME`] bytes at most as it goes over the wire.
pub(super) fn framed(frame: &[u8]) -> Vec<u8> {
    let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
    [&len.to_le_bytes(), frame].concat()
}

/// Writes a frame.
///
/// # Errors
/// `InvalidInput` when it is too long; what writing reports.
pub(super) fn write(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    if frame.len() > MAX_FRAME {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // In one write, or whoever reads wakes twice.
    to.write_all(&framed(frame))
}

/// Reads a frame. `None`: the other side is gone.
///
/// # Errors
/// `InvalidData` when it is too long; what reading reports.
pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 4];
    match from.read_exact(&mut len) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_FRAME {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut frame = vec![0; len];
    from.read_exact(&mut frame)?;
    Ok(Some(frame))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> RunShape {
        RunShape {
            max_rows: 128,
            max_sequences: 64,
            context: 1 << 20,
            block_len: 16,
            blocks: 7,
            window_blocks: 3,
            cache_dtype: DType::Q8_0,
            parts: Parts::default(),
        }
    }

    fn kept() -> KeptTold {
        KeptTold {
            layout: "of it".to_owned(),
            bytes: u64::MAX,
            checksum: 1 << 63,
            pieces: 3,
        }
    }

    #[test]
    fn what_is_told_arrives() {
        let row = Row {
            token: u32::MAX,
            position: 5,
            sequence: 1,
            slots: [1 << 40, 2],
        };
        let wanted = Wanted {
            whole: [3, 1 << 40].into(),
            sizes: [2].into(),
        };
        let rows = Seen::Rows {
            number: 7,
            rows: 3..5,
        };
        let cases = [
            (
                load(
                    3,
                    &shape(),
                    &["config.json", "m.safetensors"],
                    true,
                    Some(&kept()),
                ),
                Told::Load {
                    model: 3,
                    shape: shape(),
                    names: vec!["config.json".to_owned(), "m.safetensors".to_owned()],
                    keeps: true,
                    kept: Some(kept()),
                },
            ),
            (doors(3), Told::Doors { each: 3 }),
            (met(), Told::Met),
            (unload(9), Told::Unload { model: 9 }),
            (
                packed(4, 2, &[("a", 0), ("b", 1)]),
                Told::Packed {
                    model: 4,
                    copies: 2,
                    weights: vec![("a".to_owned(), 0), ("b".to_owned(), 1)],
                },
            ),
            (
                order(
                    1,
                    &Order::Table {
                        kind: 1,
                        sequence: 2,
                        first: 3,
                        blocks: &[4, u32::MAX],
                    },
                ),
                Told::Table {
                    model: 1,
                    kind: 1,
                    sequence: 2,
                    first: 3,
                    blocks: vec![4, u32::MAX],
                },
            ),
            (
                order(
                    1,
                    &Order::Copy {
                        kind: 0,
                        from: 7,
                        to: 8,
                    },
                ),
                Told::Copy {
                    model: 1,
                    kind: 0,
                    from: 7,
                    to: 8,
                },
            ),
            (
                order(1, &Order::Wipe { kind: 1, block: 6 }),
                Told::Wipe {
                    model: 1,
                    kind: 1,
                    block: 6,
                },
            ),
            (
                order(
                    2,
                    &Order::Step {
                        rows: &[row, row],
                        picks: &[1],
                        looked: true,
                        followed: false,
                    },
                ),
                Told::Step {
                    model: 2,
                    rows: vec![row, row],
                    picks: vec![1],
                    looked: true,
                    followed: false,
                },
            ),
            (
                prepare(5, &wanted),
                Told::Prepare {
                    model: 5,
                    wanted: wanted.clone(),
                },
            ),
            (
                order(5, &Order::Tap { take: true }),
                Told::Tap {
                    model: 5,
                    take: true,
                },
            ),
            (
                seen(5, &Seen::Sizes { rows: 9 }),
                Told::Seen {
                    model: 5,
                    what: Seen::Sizes { rows: 9 },
                },
            ),
            (
                seen(5, &rows),
                Told::Seen {
                    model: 5,
                    what: rows.clone(),
                },
            ),
            (noted(5), Told::Noted { model: 5 }),
            (
                order(2, &Order::States { rows: &[0, 1] }),
                Told::States {
                    model: 2,
                    rows: vec![0, 1],
                },
            ),
        ];
        for (frame, expected) in cases {
            let mut wire = Vec::new();
            write(&mut wire, &frame).unwrap();
            let read = read(&mut wire.as_slice()).unwrap().unwrap();
            assert_eq!(told(&read), Some(expected));
            // Cut anywhere, or with something behind it, it is nothing.
            for end in 0..read.len() {
                assert_eq!(told(&read[..end]), None, "{end}");
            }
            assert_eq!(told(&[read.as_slice(), &[0]].concat()), None);
        }
        for loaded in [
            Loaded::Progress,
            Loaded::Done(Left::default()),
            Loaded::Done(Left {
                found: true,
                damaged: true,
                bytes: u64::MAX,
                kept: Some(kept()),
            }),
            Loaded::Failed(Reason::OutOfMemory, "no memory\nat all".to_owned()),
        ] {
            assert_eq!(Loaded::take(&loaded.put()), Some(loaded));
        }
    }

    #[test]
    fn notes_arrive_with_their_times() {
        let since = Instant::now();
        let note = |nanos, node| NodeNote {
            begun: since + Duration::from_nanos(nanos),
            took: Duration::from_nanos(nanos + 1),
            node,
            part: None,
            member: 0,
        };
        let frame = notes(&[note(0, 1 << 63), note(1 << 40, 7)], since);
        let read = noted_by(3, &frame, since).unwrap();
        let told = read.iter().map(|n| (n.begun, n.took, n.node, n.member));
        let expected = [note(0, 1 << 63), note(1 << 40, 7)];
        let expected = expected.map(|n| (n.begun, n.took, n.node, 3));
        assert_eq!(told.collect::<Vec<_>>(), expected);
        for end in 0..frame.len() {
            assert!(noted_by(3, &frame[..end], since).is_none(), "{end}");
        }
        assert!(noted_by(3, &[&frame[..], &[0]].concat(), since).is_none());
        assert!(noted_by(3, &notes(&[], since), since).unwrap().is_empty());
    }

    #[test]
    fn numbers_that_nothing_backs_take_no_memory() {
        let mut put = Put::kind(5, 1);
        put.number(usize::MAX);
        assert_eq!(told(&put.0), None);
        let long = (MAX_FRAME as u32 + 1).to_le_bytes();
        let error = read(&mut long.as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(read(&mut [].as_slice()).unwrap(), None);
    }
}
