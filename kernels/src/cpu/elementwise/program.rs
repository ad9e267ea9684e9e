//! The kernel that a [`Builder`] makes: loads, instructions and stores, tile by tile.

use super::{
    Builder, Extent, Operand,
    chain::{Chain, Link},
    code::Code,
    load::{self, Pattern},
};
use crate::cpu::{
    lanes::ask_ahead,
    ops::{split_if_worth, stays},
    plan::{Kernel, Reg, Run},
};

/// Elements below which one thread does it all.
const WORTH: usize = 4096;

/// Parts of the work start at multiples of this.
const GRAIN: usize = 64;

/// Bytes that a tile of all that a kernel touches takes, small enough to stay in the first cache.
const TILE_BYTES: usize = 32 << 10;

/// Elements of a tile, fewest and most.
const TILES: (usize, usize) = (128, 2048);

/// Elements of a tile where memory takes longer than the few instructions do: it brings the next ones while they compute, if
/// neither is long at it.
const STREAMED: usize = 256;

/// Elements of a part from which on its operands are not in a cache.
const FAR: usize = 1 << 19;

/// Instructions up to which memory takes longer.
const FEW: usize = 3;

/// Where an instruction finds or leaves a value.
#[derive(Clone, Copy)]
pub(super) enum Place {
    None,
    Tile(usize),
    Operand(usize),
    Immediate(usize),
    Store(usize),
}

struct Load {
    operand: Operand,
    /// Entry of the table.
    entry: usize,
    /// Where in the workspace what cannot be read in place is put.
    tile: usize,
}

/// What is done to a tile.
pub(super) enum Work<Arg> {
    One(Code, [Arg; 3]),
    /// Where it starts, and its links, each with its other operand.
    Chain(Chain, Arg, Vec<(Link, Arg)>),
}

enum Step {
    One(Code, [usize; 3]),
    Chain(Chain, usize, Vec<Link>),
}

/// A kernel: loads, instructions, stores, over a table of addresses at the start of the workspace.
pub(super) struct Program {
    extent: Extent,
    /// Elements of a tile; `None`: everything is read and written in place, so there are no tiles.
    tile: Option<usize>,
    entries: usize,
    /// Entry and offset in the workspace.
    tiles: Vec<(usize, usize)>,
    immediates: Vec<(Vec<u8>, usize, usize)>,
    loads: Vec<Load>,
    /// Each with the entry of its result.
    steps: Vec<(Step, usize)>,
    /// Place and bytes of an element, from `first_store` in the table.
    stores: Vec<(Reg, usize)>,
    first_store: usize,
    workspace: usize,
}

impl Program {
    /// Places that it reads.
    pub fn reads(&self) -> Vec<Reg> {
        self.loads.iter().map(|l| l.operand.reg).collect()
    }

    /// Places that it writes.
    pub fn writes(&self) -> Vec<Reg> {
        self.stores.iter().map(|(reg, _)| *reg).collect()
    }

    /// Bytes that each part uses while it runs.
    pub fn workspace(&self) -> usize {
        self.workspace
    }

    /// Of what a builder collected: bytes of an element of each tile, and the instructions.
    pub fn new(builder: Builder, tiles: Vec<usize>, steps: Vec<(Work<Place>, Place)>) -> Self {
        let Builder {
            extent,
            operands,
            immediates,
            stores,
            ..
        } = builder;
        let operands: Vec<Operand> = operands.into_iter().map(|(o, _)| o).collect();
        let (first_operand, first_immediate) = (tiles.len(), tiles.len() + operands.len());
        let first_store = first_immediate + immediates.len();
        let entries = first_store + stores.len();
        let entry = |place: Place| match place {
            // Never read: an instruction reads as many arguments as it was given.
            Place::None => 0,
            Place::Tile(t) => t,
            Place::Operand(o) => first_operand + o,
            Place::Immediate(i) => first_immediate + i,
            Place::Store(s) => first_store + s,
        };
        let loaded = |o: &Operand| {
            if o.pattern == Pattern::Full {
                0
            } else {
                o.bytes
            }
        };
        let per_element: usize = tiles.iter().sum::<usize>()
            + operands.iter().map(loaded).sum::<usize>()
            + immediates.iter().map(Vec::len).sum::<usize>();
        let in_place = operands.iter().map(|o| o.bytes - loaded(o)).sum::<usize>()
            + stores.iter().map(|s| s.dtype.block_bytes()).sum::<usize>();
        let tile = (per_element != 0).then(|| {
            let most = (TILE_BYTES / (per_element + in_place)).max(1);
            (1usize << most.ilog2()).clamp(TILES.0, TILES.1)
        });
        let elements = tile.unwrap_or(0);
        let mut workspace = entries * size_of::<*mut u8>();
        let mut room = |bytes: usize| {
            // A line more, so that tiles do not all start at the same place of a page.
            let at = workspace.next_multiple_of(64) + 64;
            workspace = at + bytes;
            at
        };
        let tiles = tiles
            .iter()
            .enumerate()
            .map(|(t, bytes)| (t, room(bytes * elements)))
            .collect();
        let immediates = immediates
            .into_iter()
            .enumerate()
            .map(|(i, bytes)| {
                let at = room(bytes.len() * elements);
                (bytes, first_immediate + i, at)
            })
            .collect();
        let loads = operands
            .into_iter()
            .enumerate()
            .map(|(o, mut operand)| {
                let length = match operand.pattern {
                    Pattern::Full => 0,
                    // A period that does not fit a tile is read in place, or copied where it wraps.
                    Pattern::Periodic(n) if n > elements => {
                        operand.pattern = Pattern::Strided(vec![(0, 0), (n, 1)]);
                        elements
                    }
                    Pattern::Periodic(n) => elements + n,
                    _ => elements,
                };
                Load {
                    tile: room(length * operand.bytes),
                    operand,
                    entry: first_operand + o,
                }
            })
            .collect();
        let steps = steps
            .into_iter()
            .map(|(work, out)| {
                let step = match work {
                    Work::One(code, args) => Step::One(code, args.map(entry)),
                    Work::Chain(code, start, links) => {
                        let link = |(link, arg)| Link {
                            arg: entry(arg),
                            ..link
                        };
                        Step::Chain(code, entry(start), links.into_iter().map(link).collect())
                    }
                };
                (step, entry(out))
            })
            .collect();
        Self {
            extent,
            tile,
            entries,
            tiles,
            immediates,
            loads,
            steps,
            stores: stores
                .iter()
                .map(|s| (s.reg, s.dtype.block_bytes()))
                .collect(),
            first_store,
            workspace,
        }
    }
}

/// Fills `n` elements of `bytes` bytes with the first of `from`.
unsafe fn splat(to: *mut u8, from: *const u8, bytes: usize, n: usize) {
    unsafe fn typed<T: Copy>(to: *mut u8, from: *const u8, n: usize) {
        // SAFETY: the caller's promise; `from` may lie anywhere.
        unsafe {
            let value = from.cast::<T>().read_unaligned();
            std::slice::from_raw_parts_mut(to.cast::<T>(), n).fill(value);
        }
    }
    // SAFETY: the caller's promise; the types have no invalid values.
    unsafe {
        match bytes {
            1 => typed::<u8>(to, from, n),
            2 => typed::<u16>(to, from, n),
            4 => typed::<u32>(to, from, n),
            _ => typed::<u64>(to, from, n),
        }
    }
}

/// [`load::strided`] by the bytes of an element; the address to read the tile at.
unsafe fn strided(
    base: *const u8,
    axes: &[(usize, usize)],
    at: usize,
    (tile, bytes): (*mut u8, usize),
    n: usize,
) -> *const u8 {
    unsafe fn typed<T: Copy>(
        base: *const u8,
        axes: &[(usize, usize)],
        at: usize,
        tile: *mut u8,
        n: usize,
    ) -> *const u8 {
        // SAFETY: the caller's promise.
        let found = unsafe { load::strided::<T>(base.cast(), axes, at, tile.cast(), n) };
        found.map_or(tile.cast_const(), <*const T>::cast)
    }
    // SAFETY: the caller's promise.
    unsafe {
        match bytes {
            1 => typed::<u8>(base, axes, at, tile, n),
            2 => typed::<u16>(base, axes, at, tile, n),
            4 => typed::<u32>(base, axes, at, tile, n),
            // Two f32 are aligned like one.
            _ => typed::<[u32; 2]>(base, axes, at, tile, n),
        }
    }
}

impl Kernel for Program {
    fn only_writes(&self) -> bool {
        let stored = self.first_store..self.entries;
        !self.steps.iter().any(|(step, _)| match step {
            Step::One(_, args) => args.iter().any(|arg| stored.contains(arg)),
            Step::Chain(_, start, links) => {
                stored.contains(start) || links.iter().any(|link| stored.contains(&link.arg))
            }
        })
    }

    fn is_alone(&self, rows: usize) -> bool {
        stays(self.extent.at(rows), GRAIN, WORTH)
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let range = split_if_worth(self.extent.at(run.rows), GRAIN, WORTH, part, parts);
        if range.is_empty() {
            return;
        }
        let mut tile = self.tile.unwrap_or(range.len()).min(range.len());
        let streams = self.tile.is_some() && self.steps.len() <= FEW && range.len() >= FAR;
        if streams {
            tile = tile.min(STREAMED);
        }
        let workspace = run.workspace(part);
        // SAFETY: the workspace has room for the table and all tiles (`Program::new`) and is this part's own;
        // operands and results have the sizes their specs say, and parts write ranges of their own.
        unsafe {
            let table = std::slice::from_raw_parts_mut(workspace.cast::<*mut u8>(), self.entries);
            for &(entry, offset) in &self.tiles {
                table[entry] = workspace.add(offset);
            }
            for (bytes, entry, offset) in &self.immediates {
                table[*entry] = workspace.add(*offset);
                splat(table[*entry], bytes.as_ptr(), bytes.len(), tile);
            }
            for load in &self.loads {
                let room = workspace.add(load.tile);
                let base = run.pointer(load.operand.reg);
                let bytes = load.operand.bytes;
                table[load.entry] = room;
                match load.operand.pattern {
                    Pattern::Scalar => splat(room, base, bytes, tile),
                    Pattern::Periodic(n) => {
                        let mut done = 0;
                        while done < tile + n {
                            let length = n.min(tile + n - done);
                            let to = room.add(done * bytes);
                            std::ptr::copy_nonoverlapping(base, to, length * bytes);
                            done += length;
                        }
                    }
                    Pattern::Full | Pattern::Strided(_) => {}
                }
            }
            let mut at = range.start;
            while at < range.end {
                let n = tile.min(range.end - at);
                for load in &self.loads {
                    let (bytes, base) = (load.operand.bytes, run.pointer(load.operand.reg));
                    let room = workspace.add(load.tile);
                    match &load.operand.pattern {
                        Pattern::Full => {
                            table[load.entry] = base.add(at * bytes);
                            if streams {
                                ask_ahead(std::slice::from_raw_parts(
                                    base.add(at * bytes),
                                    n * bytes,
                                ));
                            }
                        }
                        Pattern::Scalar => {}
                        Pattern::Periodic(period) => {
                            table[load.entry] = room.add(at % period * bytes);
                        }
                        Pattern::Strided(axes) => {
                            table[load.entry] =
                                strided(base, axes, at, (room, bytes), n).cast_mut();
                        }
                    }
                }
                for (i, (reg, bytes)) in self.stores.iter().enumerate() {
                    table[self.first_store + i] = run.pointer(*reg).add(at * bytes);
                }
                for (step, out) in &self.steps {
                    match step {
                        Step::One(code, args) => {
                            code(table[*out], args.map(|a| table[a].cast_const()), n);
                        }
                        Step::Chain(code, start, links) => {
                            let (out, start) = (table[*out].cast(), table[*start].cast_const());
                            code(out, start.cast(), links, table, n);
                        }
                    }
                }
                at += n;
            }
        }
    }
}
