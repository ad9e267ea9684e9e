//! What ran where: of each row of the catalogue, nodes that MLX computed and nodes that the CPU backend's kernels did.

use std::{cell::Cell, rc::Rc};

use hotcell_graph::{
    Graph,
    op::{catalogue, number},
};

/// Nodes of one op that were executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// By MLX.
    pub on_mlx: u64,
    /// By the CPU backend's kernels.
    pub on_cpu: u64,
}

/// Counts for a device. Counting a node takes no lookup: a unit knows its nodes' places in the catalogue.
#[derive(Clone)]
pub(super) struct Tally(Rc<[Cell<Ran>]>);

/// Places in the catalogue of a unit's nodes.
pub(super) type Places = Box<[u16]>;

pub(super) fn places(graph: &Graph, range: std::ops::Range<usize>) -> Places {
    let nodes = graph.nodes().get(range).unwrap_or_default();
    nodes.iter().filter_map(|n| number(n.op.name)).collect()
}

impl Tally {
    pub fn new() -> Self {
        Self(catalogue().map(|_| Cell::default()).collect())
    }

    /// A unit was executed.
    pub fn add(&self, places: &Places, on_mlx: bool) {
        for cell in places.iter().filter_map(|at| self.0.get(usize::from(*at))) {
            let mut ran = cell.get();
            let count = match on_mlx {
                true => &mut ran.on_mlx,
                false => &mut ran.on_cpu,
            };
            *count = count.wrapping_add(1);
            cell.set(ran);
        }
    }

    /// What ran of an op.
    pub fn of(&self, op: &str) -> Ran {
        let at = number(op).map(usize::from);
        at.and_then(|at| self.0.get(at))
            .map_or(Ran::default(), Cell::get)
    }
}
