//! What a captured token is told by: messages of bounded size, with each row's statistics, hash, and values within a budget.

use std::time::{Duration, Instant};

use hotcell_graph::DType;
use hotcell_proto::v1;

use super::row::statistics;
use crate::generate::batch::Look;

/// Bytes of nodes in one message, about.
const PIECE: usize = 1 << 20;

/// What is computed of values at a stretch beside those who serve: a few times what a call to the system takes.
const STRETCH: Duration = Duration::from_micros(30);

/// What is told of a token.
#[derive(Default)]
pub(super) struct Told {
    pub pieces: Vec<v1::CapturedToken>,
    /// Bytes of values in them, and how many rows' values were left out, and their bytes.
    pub bytes: u64,
    /// See `bytes`.
    pub left_out: u64,
    /// See `bytes`.
    pub left_out_bytes: u64,
}

/// Row by row what was computed in a step.
pub(super) fn all_pieces(
    token: v1::CapturedToken,
    look: Look,
    kinds: &[(DType, bool)],
    values: usize,
    mut left: u64,
) -> Told {
    let drawn = usize::from(!look.logits.is_empty());
    let first = (look.position + 1).saturating_sub((look.before + drawn) as u64);
    let (mut all, mut gave_way) = (Told::default(), Instant::now());
    let mut take = |token: v1::CapturedToken, rows: &mut dyn Iterator<Item = &[u8]>| {
        let told = pieces(token, rows, kinds, values, (left, &mut gave_way));
        left = left.saturating_sub(told.bytes);
        all.bytes += told.bytes;
        all.left_out += told.left_out;
        all.left_out_bytes += told.left_out_bytes;
        all.pieces.extend(told.pieces);
    };
    for at in 0..look.before {
        let row = |rows: &'_ [u8]| {
            let size = rows.len() / look.before;
            at * size..(at + 1) * size
        };
        let own = |rows| <[u8]>::get(rows, row(rows)).unwrap_or_default();
        // Nobody made logits of it.
        let mut rows = look.rows_before.iter().map(own).chain([&[][..]]);
        let token = v1::CapturedToken {
            position: first + at as u64,
            of_prefix: true,
            token: None,
            as_expected: None,
            missed: 0,
            ..token.clone()
        };
        take(token, &mut rows);
    }
    if drawn > 0 {
        let logits: Vec<u8> = look.logits.iter().flat_map(|v| v.to_le_bytes()).collect();
        take(token, &mut look.rows.iter().chain([&*logits]));
    }
    all
}

/// The messages of a row of each node, of these dtypes, and whether they are to be withheld.
fn pieces(
    token: v1::CapturedToken,
    rows: &mut dyn Iterator<Item = &[u8]>,
    kinds: &[(DType, bool)],
    values: usize,
    (mut left, gave_way): (u64, &mut Instant),
) -> Told {
    let mut told = Told::default();
    let mut piece = v1::CapturedToken {
        more: true,
        ..token.clone()
    };
    let mut size = 0;
    for (number, (row, (dtype, withheld))) in rows.zip(kinds).enumerate() {
        let mut node = statistics(row, *dtype);
        let wanted = match withheld {
            true => {
                node = v1::NodeValues {
                    nan: node.nan,
                    infinite: node.infinite,
                    ..v1::NodeValues::default()
                };
                0
            }
            false => values.saturating_mul(dtype.block_bytes()).min(row.len()),
        };
        node.node = u32::try_from(number).unwrap_or(u32::MAX);
        let bytes = wanted as u64;
        if bytes <= left {
            left -= bytes;
            told.bytes += bytes;
            node.data = row[..wanted].to_vec();
        } else {
            told.left_out += 1;
            told.left_out_bytes += bytes;
        }
        size += wanted + 128;
        piece.nodes.push(node);
        // Who serves need not wait until this is done.
        if gave_way.elapsed() >= STRETCH {
            std::thread::yield_now();
            *gave_way = Instant::now();
        }
        if size >= PIECE {
            let next = v1::CapturedToken {
                more: true,
                missed: 0,
                ..token.clone()
            };
            told.pieces.push(std::mem::replace(&mut piece, next));
            size = 0;
        }
    }
    piece.more = false;
    told.pieces.push(piece);
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::batch::Rows;

    fn row(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn a_row_that_tells_its_token_is_withheld_but_for_what_is_wrong_with_it() {
        let rows = vec![row(&[1.0, f32::NAN]), row(&[1.0, 2.0])];
        let kinds = [(DType::F32, true), (DType::F32, false), (DType::F32, false)];
        let token = v1::CapturedToken::default();
        let told = all_pieces(token, look(&rows), &kinds, usize::MAX, u64::MAX);
        let [hidden, shown, _] = told.pieces[0].nodes.as_slice() else {
            panic!("{} rows", told.pieces[0].nodes.len());
        };
        let wrong = v1::NodeValues {
            nan: 1,
            ..v1::NodeValues::default()
        };
        assert_eq!(*hidden, wrong);
        assert!(shown.hash.len() == 32 && shown.data.len() == 8);
        assert_eq!(told.left_out, 0);
    }

    fn rows(nodes: &[Vec<u8>]) -> Rows {
        let mut rows = Rows::default();
        for node in nodes {
            let append = |to: &mut Vec<u8>| {
                to.extend_from_slice(node);
                Ok::<_, ()>(())
            };
            rows.push(append).unwrap();
        }
        rows
    }

    fn look(nodes: &[Vec<u8>]) -> Look {
        Look {
            request: None,
            index: 3,
            position: 9,
            token: Some(1),
            rows: rows(nodes),
            logits: vec![1.0, 2.0],
            before: 0,
            rows_before: Rows::default(),
            missed: 5,
        }
    }

    #[test]
    fn values_end_with_the_budget_and_what_is_left_out_is_counted() {
        let rows = vec![row(&[1.0; 8]), row(&[2.0; 8])];
        let dtypes = [(DType::F32, false); 3];
        let token = v1::CapturedToken {
            index: 3,
            missed: 5,
            ..v1::CapturedToken::default()
        };
        let told = all_pieces(token.clone(), look(&rows), &dtypes, usize::MAX, 40);
        assert_eq!(
            (told.bytes, told.left_out, told.left_out_bytes),
            (40, 1, 32)
        );
        let [piece] = told.pieces.as_slice() else {
            panic!("{} pieces", told.pieces.len());
        };
        let lengths: Vec<usize> = piece.nodes.iter().map(|n| n.data.len()).collect();
        assert_eq!(lengths, [32, 0, 8]);
        assert!(!piece.more && piece.missed == 5);
        let told = all_pieces(token.clone(), look(&rows), &dtypes, 2, u64::MAX);
        let lengths = told.pieces[0].nodes.iter().map(|n| n.data.len());
        assert_eq!(lengths.collect::<Vec<_>>(), [8, 8, 8]);
        assert_eq!(told.left_out, 0);
        let large = vec![vec![0; PIECE]; 3];
        let told = all_pieces(
            token,
            look(&large),
            &[(DType::F32, false); 4],
            usize::MAX,
            u64::MAX,
        );
        let more: Vec<_> = told.pieces.iter().map(|p| (p.more, p.missed)).collect();
        assert_eq!(more, [(true, 5), (true, 0), (true, 0), (false, 0)]);
    }

    #[test]
    fn rows_before_the_tokens_own_are_told_each_at_its_place() {
        let token = v1::CapturedToken {
            index: 3,
            position: 9,
            token: Some(1),
            missed: 5,
            ..v1::CapturedToken::default()
        };
        let step = |drawn: bool| Look {
            before: 2,
            rows_before: rows(&[row(&[1.0, 2.0, 3.0, 4.0])]),
            logits: vec![1.0; 2 * usize::from(drawn)],
            ..look(&[row(&[5.0, 6.0])])
        };
        let kinds = [(DType::F32, false); 2];
        for (drawn, places) in [(true, &[7, 8, 9][..]), (false, &[8, 9])] {
            let told = all_pieces(token.clone(), step(drawn), &kinds, usize::MAX, u64::MAX);
            let positions: Vec<u64> = told.pieces.iter().map(|p| p.position).collect();
            assert_eq!(positions, places);
            for (at, piece) in told.pieces.iter().enumerate() {
                assert_eq!((piece.of_prefix, piece.more), (at < 2, false));
                assert_eq!(piece.token, Some(1).filter(|_| at == 2));
                assert_eq!(piece.nodes.len(), 2);
                let first = 1.0 + 2.0 * at as f32;
                assert_eq!(piece.nodes[0].data, row(&[first, first + 1.0]));
                assert_eq!(piece.nodes[1].data.len(), if at == 2 { 8 } else { 0 });
            }
        }
    }
}
