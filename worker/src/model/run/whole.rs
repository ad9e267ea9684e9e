//! What of a model can be looked at, as one process would compute and name it, and which of the processes that compute it
//! together has each part.

use hotcell_graph::{
    Graph, GraphBuilder, GraphError, TensorSpec, Value, op::ValueSpec, shape::Dim,
};
use hotcell_kernels::communicator::Share;

use super::{Parts, RunShape};
use crate::model::{
    graph::{body, head},
    points::{GATHER, Graphs, Point, points},
    weave::{BuildError, Pattern},
};

/// The op that takes apart what was computed at once. Members have their part of each of the things.
const SPLIT: &str = "split";

/// Where a node is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Which of the processes that have the layers.
    pub stage: usize,
    /// What it is in the graph of that one's body, or its head.
    pub value: Value,
    /// How many things side by side it is, of each of which one member has a part: the halves of what is split later.
    pub halves: usize,
}

/// A model as one process would compute it.
pub(super) struct Whole {
    /// Its body.
    pub graph: Graph,
    /// Its head.
    pub head: Graph,
    /// What can be looked at: in the body, and then in the head.
    points: Vec<Point>,
    /// How many of them are in the body.
    of_body: usize,
    /// Where each of them is computed.
    places: Vec<Place>,
}

/// A graph's nodes without those that one process has no need of: where each is, and its op.
fn own(graph: &Graph) -> impl Iterator<Item = (u32, &'static str)> {
    let all = graph.nodes().iter().enumerate();
    let own = all.filter(|(_, node)| node.op.name != GATHER);
    own.map(|(at, node)| (at as u32, node.op.name))
}

impl Whole {
    /// The whole of what has this part.
    ///
    /// # Errors
    /// When the parts do not make up a model.
    pub fn of(
        pattern: Pattern<'_>,
        own_body: &Graph,
        own_head: &Graph,
    ) -> Result<Self, BuildError> {
        let parts = pattern.shape.parts;
        let of = |parts: Parts| RunShape {
            parts,
            ..*pattern.shape
        };
        let (graph, head) = match parts.share.members {
            1 => (own_body.clone(), own_head.clone()),
            _ => {
                let shape = &of(Parts::default());
                let pattern = Pattern { shape, ..pattern };
                (body(pattern)?.graph, head(pattern)?.graph)
            }
        };
        let Share { rank, members } = parts.stage();
        let mut nodes = Vec::with_capacity(graph.nodes().len());
        for stage in 0..members {
            let other;
            let part = match stage == rank {
                true => own_body,
                false => {
                    let mut parts = parts;
                    parts.share.rank = stage;
                    let shape = &of(parts);
                    other = body(Pattern { shape, ..pattern })?.graph;
                    &other
                }
            };
            nodes.extend(own(part).map(|(at, op)| (stage, at, op)));
        }
        // Who has the first layers makes logits, and where several have parts of each node, each of them a part.
        let of_head: Vec<_> = own(own_head).map(|(at, op)| (0, at, op)).collect();
        let made_of = |graph: &Graph, nodes: &[(usize, u32, &str)]| {
            let ops = graph.nodes().iter().map(|node| node.op.name);
            ops.eq(nodes.iter().map(|(.., op)| *op))
        };
        if !made_of(&graph, &nodes) || !made_of(&head, &of_head) {
            return Err(BuildError::Graph(GraphError::Op {
                op: GATHER,
                what: "the parts of this model do not make up a whole".to_owned(),
            }));
        }
        let halves = |graph: &Graph, value: Value| {
            let mut splits = graph.nodes().iter().filter(|node| node.op.name == SPLIT);
            let split = splits.find(|node| node.inputs.first() == Some(&value));
            split.map_or(1, |node| node.outputs.len())
        };
        let place = |graph: &Graph, nodes: &[(usize, u32, &str)], point: &Point| match point.value {
            Value::Node { node, output } => {
                let &(stage, node, _) = nodes.get(node as usize)?;
                Some(Place {
                    stage,
                    value: Value::Node { node, output },
                    halves: halves(graph, point.value),
                })
            }
            _ => None,
        };
        let mut points_of_all = points(&graph, Graphs::Body);
        let of_body = points_of_all.len();
        points_of_all.extend(points(&head, Graphs::Head));
        let places = points_of_all.iter().enumerate().map(|(number, point)| {
            let (graph, nodes) = match number < of_body {
                true => (&graph, &nodes),
                false => (&head, &of_head),
            };
            place(graph, nodes, point)
        });
        let places = places.collect::<Option<_>>();
        Ok(Self {
            places: places.ok_or(GraphError::NoResult)?,
            graph,
            head,
            points: points_of_all,
            of_body,
        })
    }

    /// What can be looked at, in the order in which it is computed.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Those of them that are in the body, which are the first.
    pub fn points_of_body(&self) -> &[Point] {
        self.points.get(..self.of_body).unwrap_or_default()
    }

    /// Which graph a point is in, by its number.
    pub fn graph_of(&self, number: usize) -> Graphs {
        match number < self.of_body {
            true => Graphs::Body,
            false => Graphs::Head,
        }
    }

    /// A point by its number, and where it is computed.
    pub fn point(&self, number: usize) -> Option<(&Point, Place)> {
        self.points
            .get(number)
            .zip(self.places.get(number).copied())
    }
}

/// All of a value of which a graph may have a part: the columns, heads, or experts' columns that are one member's.
pub(super) fn gathered(
    builder: &mut GraphBuilder,
    place: Place,
    whole: &TensorSpec,
) -> Result<Value, GraphError> {
    let Place { value, halves, .. } = place;
    let ValueSpec::Tensor(part) = builder.spec(value)? else {
        return Ok(value);
    };
    let (here, all) = (part.shape.dims().to_vec(), whole.shape.dims());
    let differs = here.iter().zip(all).position(|(here, all)| here != all);
    let Some(axis) = differs else {
        return Ok(value);
    };
    let size = |dims: &[Dim]| dims.iter().map(|dim| dim.at(1)).product::<usize>();
    let (part, whole_size) = (size(&here[axis..]), size(&all[axis..]));
    // What a member has of this axis is one stretch of it and all that is within, and they come in the members' order.
    let mut flat = here;
    flat.truncate(axis);
    flat.extend([halves, part / halves.max(1)].map(Dim::Fixed));
    let flat = hotcell_graph::Shape::new(flat)?;
    let flat = builder.reshape(value, flat)?;
    let members = whole_size.checked_div(part).unwrap_or(0);
    let all = builder.all_gather(flat, members as i64)?;
    builder.reshape(all, whole.shape.clone())
}
