//! Whether two captures of one request are the same, and where they first differ.

use hotcell_proto::v1::{self, NodeValues};

use super::{
    likeness::values,
    recording::{Recorded, Recording, are_told},
};
use crate::tensor::Comparison;

/// Where two captures first differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Which token of the answer.
    pub token: u64,
    /// The node.
    pub node: v1::CapturedNode,
    /// How far its rows are apart, if their values are there.
    pub likeness: Option<Comparison>,
    /// What the rows are like: the new one, and the one that it is compared with.
    pub rows: [NodeValues; 2],
}

/// What came of a comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Compared {
    /// Tokens and rows that both have.
    pub tokens: usize,
    /// See `tokens`.
    pub rows: usize,
    /// Rows with equal bits.
    pub same: usize,
    /// The first row that differs, by token and then in the order in which nodes are computed.
    pub first: Option<Difference>,
}

/// Compares what both have, nodes by name and tokens by their place in the answer.
pub fn compare(ours: &Recording, reference: &Recording) -> Compared {
    let mut compared = Compared::default();
    for token in &ours.tokens {
        let other = reference
            .tokens
            .iter()
            .find(|other| other.index == token.index);
        if let Some(other) = other {
            compared.tokens += 1;
            compared.token((ours, token), (reference, other));
        }
    }
    compared
}

impl Compared {
    fn token(&mut self, ours: (&Recording, &Recorded), reference: (&Recording, &Recorded)) {
        for (node, row) in ours.0.head.nodes.iter().zip(&ours.1.nodes) {
            let mut others = reference.0.head.nodes.iter().zip(&reference.1.nodes);
            let Some((_, other)) = others.find(|(other, _)| other.name == node.name) else {
                continue;
            };
            if !are_told(row, other) {
                continue;
            }
            self.rows += 1;
            if row.hash == other.hash {
                self.same += 1;
                continue;
            }
            if self.first.is_some() {
                continue;
            }
            let there = !row.data.is_empty() && row.data.len() == other.data.len();
            let likeness = there.then(|| {
                let (ours, reference) = (values(node, &row.data)?, values(node, &other.data)?);
                Comparison::of(&ours, &reference).ok()
            });
            let likeness = likeness.flatten();
            self.first = Some(Difference {
                token: ours.1.index,
                node: node.clone(),
                likeness,
                rows: [row.clone(), other.clone()],
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::recording::sample as recording, *};

    #[test]
    fn the_first_row_that_differs_is_named() {
        let reference = recording(3);
        let same = compare(&reference, &reference);
        assert_eq!((same.tokens, same.rows, same.same), (3, 6, 6));
        assert_eq!(same.first, None);
        let mut ours = reference.clone();
        for at in [1, 2] {
            ours.tokens[at].nodes[0].hash = vec![9; 32];
            ours.tokens[at].nodes[0].data[..4].copy_from_slice(&1.5f32.to_le_bytes());
            ours.tokens[at].nodes[1].hash = vec![9; 32];
        }
        ours.tokens.remove(0);
        let compared = compare(&ours, &reference);
        assert_eq!((compared.tokens, compared.rows, compared.same), (2, 4, 0));
        let first = compared.first.unwrap();
        assert_eq!(
            (first.token, first.node.name.as_str()),
            (1, "layers.0.add.0")
        );
        let likeness = first.likeness.unwrap();
        assert_eq!((likeness.max_abs, likeness.max_rel), (0.5, 0.5));
        assert!(likeness.cosine < 1.0 && likeness.nmse > 0.0);
    }
}
