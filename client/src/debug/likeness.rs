//! How far two captures of one request are apart, node by node, and which node is the first to be further than its op may
//! be.

use hotcell_graph::{DType, Shape, TensorSpec};
use hotcell_proto::v1::{self, NodeValues};
use prost::Message;

use super::{
    recording::{Recorded, Recording, are_told},
    tolerance::{rounds_others, tolerance},
};
use crate::tensor::{Comparison, HostTensor};

/// How many numbers of a dtype lie between two values: how often none, one, two or three, four to seven, and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ulps {
    /// By the bits of the count.
    pub counts: Vec<u64>,
    /// Pairs of which one is no number.
    pub strange: u64,
}

/// The place of a number among all of its dtype; none for NaN.
fn place(dtype: DType, bytes: &[u8]) -> Option<i64> {
    let (bits, sign, infinity) = match (dtype, bytes) {
        (DType::F32, [a, b, c, d]) => (
            i64::from(u32::from_le_bytes([*a, *b, *c, *d])),
            1i64 << 31,
            0x7f80_0000,
        ),
        (DType::F16, [a, b]) => (i64::from(u16::from_le_bytes([*a, *b])), 1 << 15, 0x7c00),
        (DType::BF16, [a, b]) => (i64::from(u16::from_le_bytes([*a, *b])), 1 << 15, 0x7f80),
        _ => return None,
    };
    let size = bits & (sign - 1);
    let signed = if bits & sign == 0 { size } else { -size };
    (size <= infinity).then_some(signed)
}

impl Ulps {
    fn note(&mut self, dtype: DType, ours: &[u8], reference: &[u8]) {
        let size = dtype.block_bytes();
        for (a, b) in ours.chunks_exact(size).zip(reference.chunks_exact(size)) {
            match (place(dtype, a), place(dtype, b)) {
                (Some(a), Some(b)) => {
                    let bits = (64 - a.abs_diff(b).leading_zeros()) as usize;
                    if self.counts.len() <= bits {
                        self.counts.resize(bits + 1, 0);
                    }
                    if let Some(count) = self.counts.get_mut(bits) {
                        *count += 1;
                    }
                }
                _ => self.strange += u64::from(a != b),
            }
        }
    }

    /// A bucket in words: `0`, `1`, `2-3`, `4-7`.
    pub fn range(bits: usize) -> String {
        let least = 1u64.checked_shl(bits.saturating_sub(1) as u32).unwrap_or(0);
        match bits {
            0 => "0".to_owned(),
            1 => "1".to_owned(),
            _ => format!("{least}-{}", least.saturating_mul(2).saturating_sub(1)),
        }
    }
}

/// One node, over all tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeLikeness {
    /// The node.
    pub node: v1::CapturedNode,
    /// Rows that both have, and those of them with equal bits.
    pub rows: u64,
    /// See `rows`.
    pub same: u64,
    /// The worst of each number; none if no row that differs has its values on both sides.
    pub worst: Option<Comparison>,
    /// Of all values that are there on both sides.
    pub ulps: Ulps,
    /// The normalised mean square error that its op may have.
    pub tolerance: f64,
    /// Rows beyond that, and the token of the first one.
    pub beyond: u64,
    /// See `beyond`.
    pub first: Option<u64>,
    /// Rows that differ and of which nothing tells how far.
    pub unknown: u64,
}

/// Two captures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Likeness {
    /// Tokens that both have and were compared.
    pub tokens: u64,
    /// Each node that both have, in the order in which they are computed.
    pub nodes: Vec<NodeLikeness>,
    /// The first row that is further than its op may be: the token, and the node's number in `nodes`.
    pub first: Option<(u64, usize)>,
    /// The worst normalised mean square error of each token.
    pub by_token: Vec<(u64, f64)>,
    /// The first token that both drew differently: after it they computed different things, which are not compared.
    pub parted: Option<u64>,
}

/// The values of a row that are there.
pub(super) fn values(node: &v1::CapturedNode, data: &[u8]) -> Option<HostTensor> {
    let dtype = DType::from_name(&node.dtype)?;
    let count = data.len().checked_div(dtype.block_bytes())?;
    let spec = TensorSpec::new(dtype, Shape::fixed(&[count]).ok()?).ok()?;
    HostTensor::new(spec, data.to_vec()).ok()
}

impl Recording {
    /// A row of a node as a tensor of its axes, if all its values are there.
    pub fn tensor(&self, node: usize, row: &v1::NodeValues) -> Option<HostTensor> {
        if !self.is_whole(node, row) {
            return None;
        }
        let node = self.head.nodes.get(node)?;
        let dims = node.dims.iter().map(|dim| usize::try_from(*dim).ok());
        let shape = Shape::fixed(&dims.collect::<Option<Vec<_>>>()?).ok()?;
        let spec = TensorSpec::new(DType::from_name(&node.dtype)?, shape).ok()?;
        HostTensor::new(spec, row.data.clone()).ok()
    }
}

/// Whether a node reads weights in blocks, as far as the capture's graph tells. Of the logits, whether any does.
fn reads_blocks(head: &v1::CaptureHead) -> impl Fn(&v1::CapturedNode) -> bool {
    // A stranger's bytes; nothing but names is taken from them.
    let graph = v1::Graph::decode(head.graph.as_slice()).unwrap_or_default();
    let is_block = |input: &v1::GraphInput| match &input.spec {
        Some(v1::graph_input::Spec::Tensor(spec)) => {
            DType::from_name(&spec.dtype).is_some_and(rounds_others)
        }
        _ => false,
    };
    let blocks: Vec<bool> = graph.inputs.iter().map(is_block).collect();
    let nodes = graph.nodes;
    move |node| {
        let Some(at) = node.place else {
            return blocks.contains(&true);
        };
        let found = usize::try_from(at).ok().and_then(|at| nodes.get(at));
        let mut inputs = found.into_iter().flat_map(|node| &node.inputs);
        inputs.any(|value| match value.kind {
            Some(v1::value_ref::Kind::Input(input)) => {
                let at = usize::try_from(input).unwrap_or(usize::MAX);
                blocks.get(at).copied().unwrap_or_default()
            }
            _ => false,
        })
    }
}

/// Compares what both have: nodes by name, tokens by their place in the answer. Each op may be as far off as its
/// [`tolerance`], `times` so much.
pub fn liken(ours: &Recording, reference: &Recording, times: f64) -> Likeness {
    let blocks = reads_blocks(&ours.head);
    let mut pairs = Vec::new();
    let mut likeness = Likeness::default();
    for (at, node) in ours.head.nodes.iter().enumerate() {
        let mut others = reference.head.nodes.iter();
        let Some(other) = others.position(|other| other.name == node.name) else {
            continue;
        };
        // The logits are a product as well, by the head's weight.
        let op = if node.place.is_none() && node.op == "logits" {
            "mul_mat"
        } else {
            &node.op
        };
        let dtype = DType::from_name(&node.dtype).unwrap_or(DType::F32);
        pairs.push((at, other));
        likeness.nodes.push(NodeLikeness {
            node: node.clone(),
            rows: 0,
            same: 0,
            worst: None,
            ulps: Ulps::default(),
            tolerance: times * tolerance(op, dtype, blocks(node)),
            beyond: 0,
            first: None,
            unknown: 0,
        });
    }
    for token in &ours.tokens {
        let mut others = reference.tokens.iter();
        let Some(other) = others.find(|other| other.index == token.index) else {
            continue;
        };
        likeness.tokens += 1;
        likeness.token((token, other), &pairs);
        if let (Some(drawn), Some(there)) = (token.token, other.token)
            && drawn != there
        {
            likeness.parted = Some(token.index);
            break;
        }
    }
    likeness
}

impl Likeness {
    /// Rows that both have.
    pub fn rows(&self) -> u64 {
        self.nodes.iter().map(|node| node.rows).sum()
    }

    /// Rows with equal bits.
    pub fn same(&self) -> u64 {
        self.nodes.iter().map(|node| node.same).sum()
    }

    /// Rows that differ, of which nothing tells how far.
    pub fn unknown(&self) -> u64 {
        self.nodes.iter().map(|node| node.unknown).sum()
    }

    /// The node of the first row that is further than it may be, and that row's token.
    pub fn first_beyond(&self) -> Option<(u64, &NodeLikeness)> {
        let (token, at) = self.first?;
        Some((token, self.nodes.get(at)?))
    }

    fn token(&mut self, (ours, reference): (&Recorded, &Recorded), pairs: &[(usize, usize)]) {
        let mut worst = 0f64;
        for (number, (of, &(at, other))) in self.nodes.iter_mut().zip(pairs).enumerate() {
            let (Some(row), Some(other)) = (ours.nodes.get(at), reference.nodes.get(other)) else {
                continue;
            };
            if !are_told(row, other) {
                continue;
            }
            let nmse = of.row(row, other);
            // NaN is worse than any number.
            let is_beyond = nmse.is_some_and(|nmse| nmse.is_nan() || nmse > of.tolerance);
            worst = match nmse {
                Some(nmse) if nmse.is_nan() => f64::INFINITY,
                Some(nmse) => worst.max(nmse),
                None => worst,
            };
            if is_beyond {
                of.beyond += 1;
                of.first.get_or_insert(ours.index);
                self.first.get_or_insert((ours.index, number));
            }
        }
        self.by_token.push((ours.index, worst));
    }
}

impl NodeLikeness {
    /// Takes a row: its normalised mean square error if that is known, NaN if what is a number here is none there.
    fn row(&mut self, ours: &NodeValues, reference: &NodeValues) -> Option<f64> {
        self.rows += 1;
        let there = !ours.data.is_empty() && ours.data.len() == reference.data.len();
        if there && let Some(dtype) = DType::from_name(&self.node.dtype) {
            self.ulps.note(dtype, &ours.data, &reference.data);
        }
        if ours.hash == reference.hash {
            self.same += 1;
            return Some(0.0);
        }
        let strange = |row: &NodeValues| (row.nan, row.infinite);
        let found = there
            .then(|| {
                let a = values(&self.node, &ours.data)?;
                let b = values(&self.node, &reference.data)?;
                Comparison::of(&a, &b).ok()
            })
            .flatten();
        if let Some(found) = &found {
            self.worst = Some(match self.worst.take() {
                None => found.clone(),
                Some(worst) => Comparison {
                    cosine: worst.cosine.min(found.cosine),
                    max_abs: worst.max_abs.max(found.max_abs),
                    max_rel: worst.max_rel.max(found.max_rel),
                    nmse: worst.nmse.max(found.nmse),
                    mismatched: worst.mismatched + found.mismatched,
                },
            });
        }
        let differs = found.as_ref().is_some_and(|found| found.mismatched > 0);
        if differs || strange(ours) != strange(reference) {
            return Some(f64::NAN);
        }
        if found.is_none() {
            self.unknown += 1;
        }
        found.map(|found| found.nmse)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::recording::sample as recording, *};

    fn set(recording: &mut Recording, token: usize, node: usize, values: &[f32]) {
        let row = &mut recording.tokens[token].nodes[node];
        row.data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        row.hash = vec![9; 32];
        row.nan = values.iter().filter(|v| v.is_nan()).count() as u64;
    }

    #[test]
    fn the_first_row_beyond_its_ops_bound_is_named_and_rounding_is_not() {
        let reference = recording(3);
        let same = liken(&reference, &reference, 1.0);
        assert_eq!((same.tokens, same.rows(), same.same()), (3, 6, 6));
        assert_eq!((same.first, same.parted), (None, None));
        assert_eq!(same.nodes[0].ulps.counts, [12]);
        let mut ours = reference.clone();
        // One ulp is rounding; a thousandth is not; nor is NaN.
        set(&mut ours, 0, 0, &[1.0f32.next_up(), -1.0, 2.5, 0.0]);
        let rounded = liken(&ours, &reference, 1.0);
        assert_eq!((rounded.first, rounded.same()), (None, 5));
        assert_eq!(rounded.nodes[0].ulps.counts, [11, 1]);
        set(&mut ours, 1, 1, &[0.5005]);
        set(&mut ours, 2, 0, &[f32::NAN, -1.0, 2.5, 0.0]);
        let apart = liken(&ours, &reference, 1.0);
        let (token, node) = apart.first_beyond().unwrap();
        assert_eq!((token, node.node.name.as_str()), (1, "logits"));
        assert_eq!((node.beyond, apart.nodes[0].first), (1, Some(2)));
        assert_eq!(apart.nodes[0].worst.as_ref().unwrap().mismatched, 1);
        assert_eq!(apart.nodes[0].ulps.strange, 1);
        assert!(apart.by_token[2].1.is_infinite());
        // Ten times its bound of 1e-7 is the square of a thousandth.
        assert_eq!(liken(&ours, &reference, 11.0).first, Some((2, 0)));
        // Without values it is known that they differ, and that one has NaN.
        for token in &mut ours.tokens {
            token.nodes.iter_mut().for_each(|row| row.data.clear());
        }
        let blind = liken(&ours, &reference, 1.0);
        assert_eq!((blind.first, blind.unknown()), (Some((2, 0)), 2));
    }

    #[test]
    fn what_comes_after_another_token_is_not_compared() {
        let reference = recording(3);
        let mut ours = reference.clone();
        ours.tokens[1].token = Some(8);
        set(&mut ours, 2, 0, &[9.0; 4]);
        let parted = liken(&ours, &reference, 1.0);
        assert_eq!(
            (parted.parted, parted.tokens, parted.first),
            (Some(1), 2, None)
        );
    }

    #[test]
    fn ulps_are_counted_across_zero_and_in_every_dtype() {
        let mut ulps = Ulps::default();
        let bytes = |v: f32| v.to_le_bytes();
        ulps.note(DType::F32, &bytes(-0.0), &bytes(0.0));
        ulps.note(
            DType::F32,
            &bytes(-f32::from_bits(1)),
            &bytes(f32::from_bits(2)),
        );
        ulps.note(DType::F32, &bytes(f32::NAN), &bytes(1.0));
        ulps.note(DType::F32, &bytes(f32::NAN), &bytes(f32::NAN));
        ulps.note(DType::BF16, &[0x80, 0x3f], &[0x84, 0x3f]);
        assert_eq!(
            (ulps.counts.as_slice(), ulps.strange),
            (&[1, 0, 1, 1][..], 1)
        );
        assert_eq!([0, 1, 2, 3].map(Ulps::range), ["0", "1", "2-3", "4-7"]);
        assert!(Ulps::range(64).starts_with("9223372036854775808-"));
    }
}
