//! What comes from strangers: graphs that are grown, broken, decoded, planned and run, and bytes for every other way in. One
//! number decides all of a case, so that it can be run again.

mod calls;
mod captures;
mod change;
mod choices;
mod grow;
mod run;
mod seeds;
mod spoil;
pub mod targets;
mod templates;

use hotcell_graph::{Graph, wire};
use hotcell_proto::v1;
use prost::Message;

pub use change::changed;
pub use choices::{Choices, case_seed};
pub use run::Runner;

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The bytes are no message.
    Unreadable,
    /// The message is no graph.
    Unverified,
    /// A graph that the device or the bound on memory refuses.
    Refused,
    /// It ran into a typed error, such as an index out of range.
    Failed,
    /// It ran to its end.
    Ran,
}

/// The valid graph that the case of a seed begins with.
pub fn grown(seed: u64) -> Graph {
    grow::graph(&mut Choices::new(seed))
}

/// A grown graph and bytes for its inputs, at its greatest number of rows; none if its tensors have more than `most`
/// elements together.
pub fn program(seed: u64, most: u128) -> Option<(Graph, Vec<Vec<u8>>)> {
    let mut choices = Choices::new(seed);
    let graph = grow::graph(&mut choices);
    if run::elements(&graph) > most {
        return None;
    }
    let inputs = run::operands(&graph, &mut choices);
    Some((graph, inputs))
}

/// Runs the graph that the case of a seed begins with, as it is.
///
/// # Panics
/// As [`case`].
pub fn run_grown(runner: &Runner, seed: u64) -> Outcome {
    let mut choices = Choices::new(seed);
    let graph = grow::graph(&mut choices);
    runner.run(&graph, &mut choices)
}

/// Runs the case of a seed.
///
/// # Panics
/// When the case finds something: a grown graph that is refused as it is, one that decoding accepts but cannot encode, or
/// results that depend on the number of threads or on fusion. What else goes wrong panics where it does.
pub fn case(runner: &Runner, seed: u64) -> Outcome {
    let mut choices = Choices::new(seed);
    let grown = wire::encode(&grow::graph(&mut choices));
    let mut bytes = grown.encode_to_vec();
    let spoilt = match choices.below(4) {
        0 | 1 => false,
        2 => {
            bytes = spoil::message(grown, &mut choices).encode_to_vec();
            true
        }
        _ => {
            spoil::bytes(&mut bytes, &mut choices);
            true
        }
    };
    let message = match v1::Graph::decode(&*bytes) {
        Ok(message) => message,
        Err(_) if spoilt => return Outcome::Unreadable,
        Err(error) => panic!("what was encoded cannot be decoded: {error}"),
    };
    let graph = match wire::decode(&message) {
        Ok(graph) => graph,
        Err(_) if spoilt => return Outcome::Unverified,
        Err(error) => panic!("a valid graph is refused as it is: {error}"),
    };
    // Unknown fields are dropped and orders are put right once; from then on nothing changes.
    let again = wire::encode(&graph);
    match wire::decode(&again) {
        Ok(second) => assert!(wire::encode(&second) == again, "encoding is not stable"),
        Err(error) => panic!("what was decoded is refused when it is encoded again: {error}"),
    }
    runner.run(&graph, &mut choices)
}
