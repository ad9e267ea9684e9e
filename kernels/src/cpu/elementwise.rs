//! The elementwise engine: any number of elementwise ops in one pass over memory.
//!
//! A [`Builder`] collects ops whose results have equally many elements; [`Builder::finish`] makes one kernel of them. It goes
//! through the elements tile by tile and does one instruction after the other on a tile, so that what only
//! these ops need never leaves the cache. Operands repeat along the result by NumPy's rule. Results
//! do not depend on what was fused: each instruction rounds as the op alone would.

mod cast;
mod chain;
mod code;
mod float;
#[cfg(target_arch = "x86_64")]
pub(crate) mod half;
mod int;
mod load;
mod power;
mod program;
mod softplus;

use hotcell_graph::{
    DType, Shape,
    dtype::Kind,
    op::{Attribute, Call, ValueSpec},
};

pub(crate) use self::load::Pattern;
use self::{
    chain::{Arith, Link},
    code::Code,
    program::{Place, Program, Work},
};
use super::{
    path::CpuPath,
    plan::{Launcher, Reg},
};

/// The instruction of an op on operands of one dtype.
fn lookup(op: &str, dtype: DType, path: CpuPath) -> Option<Code> {
    match dtype {
        DType::Bool => int::bools(op, path),
        DType::U8 => int::u8(op, path),
        DType::U16 => int::u16(op, path),
        DType::U32 => int::u32(op, path),
        DType::U64 => int::u64(op, path),
        DType::I8 => int::i8(op, path),
        DType::I16 => int::i16(op, path),
        DType::I32 => int::i32(op, path),
        DType::I64 => int::i64(op, path),
        DType::F16 | DType::BF16 | DType::F32 => float::f32(op, path),
        DType::F64 => float::f64(op, path),
        DType::C64 => float::c64(op, path),
        _ => None,
    }
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Bytes of an element in a register.
fn register_bytes(dtype: DType) -> usize {
    if is_half(dtype) {
        4
    } else {
        dtype.block_bytes()
    }
}

/// Ops whose result, from numbers that f16 or bf16 can hold, it can hold too.
fn is_exact(op: &str) -> bool {
    matches!(
        op,
        "neg"
            | "abs"
            | "sign"
            | "floor"
            | "ceil"
            | "round"
            | "trunc"
            | "maximum"
            | "minimum"
            | "clamp"
    )
}

/// Whether the engine has the call: plain operands of one dtype, and an instruction for it.
pub(crate) fn supports(call: &Call<'_>) -> bool {
    let mut dtypes = call.inputs.iter().map(|input| match input {
        ValueSpec::Tensor(t) if t.dtype.kind() != Kind::Block => Some(t.dtype),
        _ => None,
    });
    let Some(Some(first)) = dtypes.next() else {
        return false;
    };
    match call.op.name {
        "broadcast_to" => true,
        "cast" => call
            .dtype(0)
            .is_ok_and(|to| cast::steps(first, to, CpuPath::Portable).is_some()),
        "where" => match (dtypes.next(), dtypes.next()) {
            (Some(Some(a)), Some(b)) => first == DType::Bool && b == Some(a),
            _ => false,
        },
        // NaN that equals NaN is left to its parts.
        "is_close" if call.attributes.last() == Some(&Attribute::Bool(true)) => false,
        op => dtypes.all(|d| d == Some(first)) && lookup(op, first, CpuPath::Portable).is_some(),
    }
}

/// Elements of a result: a number, times the rows of the execution where its outermost axis is the row dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Extent {
    rows: bool,
    elements: usize,
}

impl Extent {
    /// Of a shape.
    pub fn of(shape: &Shape) -> Self {
        Self {
            rows: shape.is_symbolic(),
            // Graphs have no shapes whose elements overflow.
            elements: shape.elements(1).unwrap_or(0),
        }
    }

    /// Whether it is one element in every execution.
    pub fn is_one(self) -> bool {
        !self.rows && self.elements == 1
    }

    fn at(self, rows: usize) -> usize {
        let rows = if self.rows { rows } else { 1 };
        self.elements.saturating_mul(rows)
    }
}

/// A value of a [`Builder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Id(usize);

/// Where a value comes from.
#[derive(Clone, Copy)]
enum From {
    Operand(usize),
    Immediate(usize),
    Instruction(usize),
}

struct Operand {
    reg: Reg,
    pattern: Pattern,
    bytes: usize,
}

/// What an instruction does to a half type.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Nothing.
    Computes,
    /// Only rounds: whoever narrows its result may as well narrow its argument.
    Rounds,
    /// Only widens what is in memory: whoever narrows its result may as well copy that.
    Widens,
}

struct Instruction {
    code: Code,
    /// What it computes, if it may be a link of a chain.
    arith: Option<Arith>,
    /// What is done to the first operand instead, with the operands after it.
    links: Vec<Link>,
    /// The op between memory of a half type.
    whole: Option<Code>,
    args: Vec<Id>,
    /// Bytes of an element of the result.
    bytes: usize,
    role: Role,
}

struct Store {
    value: Id,
    reg: Reg,
    dtype: DType,
}

/// Collects ops for one kernel.
pub(crate) struct Builder {
    path: CpuPath,
    extent: Extent,
    values: Vec<(From, DType)>,
    operands: Vec<(Operand, Id)>,
    immediates: Vec<Vec<u8>>,
    instructions: Vec<Instruction>,
    stores: Vec<Store>,
}

impl Builder {
    /// For results of this many elements.
    pub fn new(extent: Extent, path: CpuPath) -> Self {
        Self {
            path,
            extent,
            values: vec![],
            operands: vec![],
            immediates: vec![],
            instructions: vec![],
            stores: vec![],
        }
    }

    fn value(&mut self, from: From, dtype: DType) -> Id {
        self.values.push((from, dtype));
        Id(self.values.len() - 1)
    }

    fn instruction(
        &mut self,
        code: Code,
        args: &[Id],
        (dtype, bytes): (DType, usize),
        role: Role,
    ) -> Id {
        self.instructions.push(Instruction {
            code,
            arith: None,
            links: vec![],
            whole: None,
            args: args.to_vec(),
            bytes,
            role,
        });
        self.value(From::Instruction(self.instructions.len() - 1), dtype)
    }

    /// A value in memory that repeats by a pattern. `None` for a block type.
    pub fn operand(&mut self, reg: Reg, dtype: DType, pattern: Pattern) -> Option<Id> {
        let known = self
            .operands
            .iter()
            .find(|(o, _)| o.reg == reg && o.pattern == pattern);
        if let Some((_, id)) = known {
            return Some(*id);
        }
        if dtype.kind() == Kind::Block {
            return None;
        }
        let bytes = dtype.block_bytes();
        let mut id = self.value(From::Operand(self.operands.len()), dtype);
        if let Some(code) = cast::widen(dtype, self.path) {
            id = self.instruction(code, &[id], (dtype, 4), Role::Widens);
        }
        let operand = Operand {
            reg,
            pattern,
            bytes,
        };
        self.operands.push((operand, id));
        Some(id)
    }

    /// One number for every element, by its bytes. `None` for too few bytes or a block type.
    pub fn immediate(&mut self, dtype: DType, bytes: &[u8]) -> Option<Id> {
        if dtype.kind() == Kind::Block {
            return None;
        }
        let bytes = bytes.get(..dtype.block_bytes())?;
        let bytes = match (dtype, bytes) {
            (DType::F16, &[a, b]) => super::lanes::f16_to_f32(u16::from_le_bytes([a, b]))
                .to_ne_bytes()
                .to_vec(),
            (DType::BF16, &[a, b]) => super::lanes::bf16_to_f32(u16::from_le_bytes([a, b]))
                .to_ne_bytes()
                .to_vec(),
            _ => bytes.to_vec(),
        };
        self.immediates.push(bytes);
        Some(self.value(From::Immediate(self.immediates.len() - 1), dtype))
    }

    /// A number for every element, in an f32 register.
    fn number(&mut self, number: f64) -> Option<Id> {
        self.immediate(DType::F32, &(number as f32).to_ne_bytes())
    }

    /// What the op's own instruction does not do: the operands that it has instead.
    fn prepare(&mut self, op: &str, args: &[Id], attributes: &[Attribute]) -> Option<Vec<Id>> {
        let dtype = self.values.get(args.first()?.0)?.1;
        let made = |b: &mut Self, op: &str, args: &[Id]| {
            let code = lookup(op, dtype, b.path)?;
            let bytes = register_bytes(dtype);
            Some(b.instruction(code, args, (dtype, bytes), Role::Computes))
        };
        match (op, args, attributes) {
            ("swiglu_limit", &[gate, up], &[Attribute::Float(alpha), Attribute::Float(limit)]) => {
                let (alpha, limit) = (self.number(alpha)?, self.number(limit)?);
                let gate = made(self, "silu_limit", &[gate, alpha, limit])?;
                Some(vec![gate, up, limit])
            }
            (
                "is_close",
                &[a, b],
                &[
                    Attribute::Float(rtol),
                    Attribute::Float(atol),
                    Attribute::Bool(false),
                ],
            ) => {
                let (rtol, atol) = (self.number(rtol)?, self.number(atol)?);
                let allowed = made(self, "size_times_plus", &[b, rtol, atol])?;
                Some(vec![a, b, allowed])
            }
            ("swiglu_limit" | "is_close", ..) => None,
            _ => Some(args.to_vec()),
        }
    }

    /// An op on values. `None` when there is no instruction for it.
    pub fn apply(
        &mut self,
        op: &str,
        args: &[Id],
        attributes: &[Attribute],
        to: DType,
    ) -> Option<Id> {
        let &first = args.first()?;
        let from = self.values.get(first.0)?.1;
        let mut id = first;
        match op {
            "broadcast_to" => return Some(first),
            "cast" => {
                for (code, dtype) in cast::steps(from, to, self.path)? {
                    let bytes = register_bytes(dtype);
                    id = self.instruction(code, &[id], (dtype, bytes), Role::Computes);
                }
                if from == to {
                    return Some(id);
                }
            }
            "where" => {
                let bytes = register_bytes(to);
                let code = code::select(bytes, self.path)?;
                return Some(self.instruction(code, args, (to, bytes), Role::Computes));
            }
            _ => {
                let code = lookup(op, from, self.path)?;
                let args = self.prepare(op, args, attributes)?;
                id = self.instruction(code, &args, (to, register_bytes(to)), Role::Computes);
                if let Some(made) = self.instructions.last_mut() {
                    made.arith = Arith::of(op, from);
                    if from == to {
                        made.whole = cast::whole(op, from, self.path);
                    }
                }
                if is_exact(op) {
                    return Some(id);
                }
            }
        }
        if let Some(code) = cast::round(to, self.path) {
            id = self.instruction(code, &[id], (to, 4), Role::Rounds);
        } else if let Some(&(from, dtype)) = self.values.get(id.0)
            && dtype != to
        {
            // An f16 that serves as f32 needs no instruction but another name.
            id = self.value(from, to);
        }
        Some(id)
    }

    /// Has a value written to memory.
    pub fn store(&mut self, value: Id, reg: Reg, dtype: DType) {
        self.stores.push(Store { value, reg, dtype });
    }

    /// Adds the kernel to a plan. `None` when there is no instruction that stores a value.
    pub fn finish(mut self, launcher: &mut Launcher) -> Option<()> {
        self.chain();
        // Who is written where: the instruction itself writes the first place its result goes to.
        let mut direct: Vec<Option<usize>> = vec![None; self.instructions.len()];
        let mut used = self.uses();
        for (s, store) in std::mem::take(&mut self.stores).into_iter().enumerate() {
            let bytes = store.dtype.block_bytes();
            let mut value = store.value;
            if let Some(narrow) = cast::narrow(store.dtype, self.path) {
                let mut code = narrow;
                let mut users = 0;
                if let From::Instruction(i) = self.values.get(value.0)?.0
                    && let Some(&before) = self.instructions[i].args.first()
                {
                    match self.instructions[i].role {
                        Role::Rounds if used[i] == 0 => (value, users) = (before, 1),
                        Role::Widens => {
                            value = before;
                            code = cast::copy(bytes, self.path)?;
                        }
                        Role::Rounds | Role::Computes => {}
                    }
                }
                let mut args = vec![value];
                if let Some((whole, from)) = self.whole(value, store.dtype, &used, users) {
                    (code, args) = (whole, from);
                }
                self.instruction(code, &args, (store.dtype, bytes), Role::Computes);
            } else {
                match self.values.get(value.0)?.0 {
                    From::Instruction(i) if direct[i].is_none() => {
                        direct[i] = Some(s);
                        self.stores.push(store);
                        continue;
                    }
                    _ => {
                        let code = cast::copy(bytes, self.path)?;
                        self.instruction(code, &[value], (store.dtype, bytes), Role::Computes);
                    }
                }
            }
            direct.push(Some(s));
            used.push(0);
            self.stores.push(store);
        }
        let program = self.assemble(&direct);
        let (reads, writes) = (program.reads(), program.writes());
        launcher.workspace(program.workspace());
        launcher.step(program, &reads, &writes);
        Some(())
    }

    /// Makes one instruction of several where each is the only one that uses the result of the one before.
    fn chain(&mut self) {
        let mut used = self.uses();
        for store in &self.stores {
            if let From::Instruction(i) = self.values[store.value.0].0 {
                used[i] += 1;
            }
        }
        for j in 0..self.instructions.len() {
            let Some(arith) = self.instructions[j].arith else {
                continue;
            };
            let args = &self.instructions[j].args;
            let made = |id: &Id| match self.values[id.0].0 {
                From::Instruction(i) if used[i] == 1 && self.instructions[i].arith.is_some() => {
                    Some(i)
                }
                _ => None,
            };
            let places = if arith.commutes() { 1 } else { 2 };
            let found = args.iter().take(places).enumerate();
            let Some((place, i)) = found.filter_map(|(p, id)| Some((p, made(id)?))).next() else {
                continue;
            };
            let other = args.get(1 - place).copied();
            let before = &self.instructions[i];
            let (mut links, mut args) = (before.links.clone(), before.args.clone());
            if links.is_empty()
                && let Some(arith) = before.arith
            {
                links.push(Link {
                    arith,
                    first: true,
                    arg: 0,
                });
            }
            links.push(Link {
                arith,
                first: place == 0,
                arg: 0,
            });
            args.extend(other);
            (self.instructions[j].links, self.instructions[j].args) = (links, args);
        }
    }

    /// The instruction that makes a value of a half type straight from memory, and what it reads there. `None` where
    /// there is none, or more than so many users want the value.
    fn whole(
        &self,
        value: Id,
        dtype: DType,
        used: &[usize],
        users: usize,
    ) -> Option<(Code, Vec<Id>)> {
        let made = |id: Id| match self.values.get(id.0)?.0 {
            From::Instruction(i) => Some((i, self.instructions.get(i)?)),
            _ => None,
        };
        let (i, instruction) = made(value)?;
        if used[i] > users {
            return None;
        }
        let args = instruction.args.iter().map(|arg| {
            let (_, by) = made(*arg)?;
            let &memory = by.args.first().filter(|_| by.role == Role::Widens)?;
            (self.values.get(memory.0)?.1 == dtype).then_some(memory)
        });
        Some((instruction.whole?, args.collect::<Option<_>>()?))
    }

    /// How many instructions use each instruction's result.
    fn uses(&self) -> Vec<usize> {
        let mut uses = vec![0; self.instructions.len()];
        for id in self.instructions.iter().flat_map(|i| &i.args) {
            if let From::Instruction(i) = self.values[id.0].0 {
                uses[i] += 1;
            }
        }
        uses
    }

    /// Gives values their places in the table of addresses, sharing tiles by liveness.
    fn assemble(self, direct: &[Option<usize>]) -> Program {
        // What nobody needs is not computed.
        let count = self.instructions.len();
        let mut last = vec![0usize; self.values.len()];
        let mut needed = vec![false; count];
        let mut result: Vec<usize> = vec![0; count];
        for (v, (from, _)) in self.values.iter().enumerate() {
            if let From::Instruction(i) = from {
                result[*i] = v; // any of its names
            }
        }
        let canonical = |id: Id| match self.values[id.0].0 {
            From::Instruction(i) => result[i],
            _ => id.0,
        };
        for i in (0..count).rev() {
            needed[i] = direct[i].is_some() || last[result[i]] != 0;
            if needed[i] {
                for id in &self.instructions[i].args {
                    let v = canonical(*id);
                    last[v] = last[v].max(i + 1);
                }
            }
        }
        // The table: tiles first, then operands, then results.
        let mut tiles: Vec<usize> = Vec::new(); // bytes of an element
        let mut free: Vec<usize> = Vec::new();
        let mut place: Vec<Place> = vec![Place::None; self.values.len()];
        let mut steps: Vec<(Work<Place>, Place)> = Vec::new();
        for (v, (from, _)) in self.values.iter().enumerate() {
            if last[v] != 0 {
                match from {
                    From::Operand(o) => place[v] = Place::Operand(*o),
                    From::Immediate(i) => place[v] = Place::Immediate(*i),
                    From::Instruction(_) => {}
                }
            }
        }
        for (i, instruction) in self.instructions.iter().enumerate() {
            if !needed[i] {
                continue;
            }
            let v = result[i];
            place[v] = match direct[i] {
                Some(s) => Place::Store(s),
                None => {
                    let tile = free.pop().unwrap_or_else(|| {
                        tiles.push(0);
                        tiles.len() - 1
                    });
                    tiles[tile] = tiles[tile].max(instruction.bytes);
                    Place::Tile(tile)
                }
            };
            let mut args = instruction.args.iter().map(|id| place[canonical(*id)]);
            let mut next = || args.next().unwrap_or(Place::None);
            let work = if instruction.links.is_empty() {
                Work::One(instruction.code, [next(), next(), next()])
            } else {
                let start = next();
                let links = instruction.links.iter().map(|link| {
                    let alone = matches!(link.arith, Arith::Abs | Arith::Neg);
                    (*link, if alone { Place::None } else { next() })
                });
                Work::Chain(chain::code(self.path), start, links.collect())
            };
            steps.push((work, place[v]));
            // After the result has its tile: an instruction never writes what it reads.
            let ended: Vec<usize> = instruction.args.iter().map(|id| canonical(*id)).collect();
            for v in ended {
                if let (Place::Tile(tile), true) = (place[v], last[v] == i + 1)
                    && !free.contains(&tile)
                {
                    free.push(tile);
                }
            }
        }
        Program::new(self, tiles, steps)
    }
}
