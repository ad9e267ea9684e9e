//! What architectures weave their graphs with: a builder that finds weights and remembers where inputs come from.

use std::ops::Range;

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value};
use hotcell_kernels::communicator::Share;

use super::{config::ModelConfig, run::RunShape};
use crate::{
    format::ModelError,
    weights::{NameScheme, Weights},
};

/// Where the bytes of a graph's input come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A weight, or some rows of it, in place in its file.
    Weight {
        /// Its name.
        name: String,
        /// Which rows; none: all.
        rows: Option<Range<usize>>,
    },
    /// Weights of one dtype, or rows of them, copied together one after another.
    Stack(Vec<Piece>),
    /// A small weight (norm, bias), or some elements of it, converted to f32.
    Vector {
        /// Its name.
        name: String,
        /// Which elements; none: all.
        elements: Option<Range<usize>>,
    },
    /// The same plus one: a norm whose file holds what is over one.
    OneAnd(String),
    /// Scales of rectangles of weights, converted to f32.
    Scales(Vec<Bands>),
    /// The inverse frequencies of the positions.
    Frequencies,
    /// Those of the layers that have others.
    LocalFrequencies,
    /// The KV cache of a layer.
    Cache(usize),
    /// Token ids, one per row.
    Tokens,
    /// Positions in their sequences, one per row.
    Positions,
    /// Which block table a row reads, one per row.
    Sequences,
    /// Where a row's keys and values go in layers of a kind, one per row.
    Slots(usize),
    /// Block tables of all sequences, for layers of a kind.
    Tables(usize),
    /// Hidden states that the process with the layers before these handed on.
    Handed,
    /// Hidden states that the body computed.
    Hidden,
    /// Which of them the head reads, one per row.
    Picks,
}

/// A weight, or some rows of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Its name.
    pub name: String,
    /// Which rows, counted through all dimensions but the last; none: all.
    pub rows: Option<Range<usize>>,
}

impl Piece {
    /// All of a weight.
    pub fn all(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            rows: None,
        }
    }
}

/// Scales of a weight, or of some rows of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bands {
    /// The name of the tensor of scales.
    pub name: String,
    /// How many there are side by side.
    pub across: usize,
    /// Which rows, counted through all dimensions but the last: some of a matrix, or whole ones.
    pub rows: Range<usize>,
    /// How high rectangles are.
    pub heights: Heights,
}

/// How high rectangles are in pieces of matrices: within what is `height` rows of the matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heights {
    /// Rows of a matrix.
    n: usize,
    /// Rows of a rectangle of it.
    height: usize,
    /// Rows of a rectangle of a piece.
    own: usize,
}

/// Weights to multiply with, and their scales if they have any.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    w: Value,
    scales: Option<(Value, [i64; 2])>,
}

/// A graph and where each of its inputs comes from.
#[derive(Debug)]
pub struct Sourced {
    /// The graph.
    pub graph: Graph,
    /// One source per input of the graph.
    pub sources: Vec<Source>,
}

/// Why a model has no graphs.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A tensor is missing or has another shape.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Sizes that the catalogue refuses.
    #[error("the model's sizes do not fit together: {0}")]
    Graph(#[from] GraphError),
}

/// A model that graphs are made of.
#[derive(Clone, Copy)]
pub struct Pattern<'a> {
    /// Its sizes and constants.
    pub config: &'a ModelConfig,
    /// How its tensors are named.
    pub names: NameScheme,
    /// Its tensors.
    pub weights: &'a Weights,
    /// Sizes that it is run with.
    pub shape: &'a RunShape,
}

pub(super) struct Weaver<'a> {
    pub builder: GraphBuilder,
    pub config: &'a ModelConfig,
    pub names: NameScheme,
    pub shape: &'a RunShape,
    pub weights: &'a Weights,
    sources: Vec<Source>,
}

impl<'a> Weaver<'a> {
    pub fn new(pattern: Pattern<'a>, max_rows: usize) -> Self {
        let Pattern {
            config,
            names,
            weights,
            shape,
        } = pattern;
        Self {
            builder: GraphBuilder::new(max_rows),
            config,
            names,
            shape,
            weights,
            sources: vec![],
        }
    }

    pub fn finish(self, output: Value) -> Result<Sourced, BuildError> {
        Ok(Sourced {
            graph: self.builder.finish(&[output])?,
            sources: self.sources,
        })
    }

    /// A weight of this shape, in place.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> Result<Value, BuildError> {
        let dtype = self.weights.expect(name, shape)?.dtype;
        let source = Source::Weight {
            name: name.to_owned(),
            rows: None,
        };
        self.constant(source, name, dtype, shape)
    }

    /// Matrices of this shape to multiply with, in place, or some rows of them.
    pub fn matrix(
        &mut self,
        piece: Piece,
        whole: &[usize],
        shape: &[usize],
    ) -> Result<Matrix, BuildError> {
        let source = Source::Weight {
            name: piece.name.clone(),
            rows: piece.rows.clone(),
        };
        self.scaled(source, &[piece], whole, shape)
    }

    /// Pieces of weights that have one shape and dtype, one after another, which together have another shape.
    pub fn stack(
        &mut self,
        pieces: Vec<Piece>,
        each: &[usize],
        shape: &[usize],
    ) -> Result<Matrix, BuildError> {
        self.scaled(Source::Stack(pieces.clone()), &pieces, each, shape)
    }

    fn scaled(
        &mut self,
        source: Source,
        pieces: &[Piece],
        each: &[usize],
        shape: &[usize],
    ) -> Result<Matrix, BuildError> {
        let (mut like, mut scales) = (None, Vec::new());
        for Piece { name, .. } in pieces {
            let said = self.config.floats8;
            let (weight, of) = self.weights.expect_scaled(name, each, said)?;
            let found = (weight.dtype, of.as_ref().map(|of| [of.height, of.width]));
            let first = *like.get_or_insert(found);
            if found != first {
                let differs = match first.0 == found.0 {
                    true => "is scaled in another way than its likes".to_owned(),
                    false => format!("is {} and its likes are {}", found.0, first.0),
                };
                return Err(BuildError::Model(ModelError::Unsupported {
                    file: "the model's weights".to_owned(),
                    what: format!(
                        "tensor '{name}' {differs}, which is not supported; use a model whose experts are stored alike"
                    ),
                }));
            }
            scales.extend(of.map(|of| of.name));
        }
        let name = pieces.first().map(|piece| piece.name.clone());
        let name = name.unwrap_or_default();
        let (dtype, rectangle) = like.unwrap_or((DType::F32, None));
        let w = self.constant(source, &name, dtype, shape)?;
        let scales = match rectangle {
            None => None,
            Some(rectangle) => Some(self.scales(pieces, scales, rectangle, each, shape)?),
        };
        Ok(Matrix { w, scales })
    }

    /// The scales of pieces of matrices that together have another shape, and their rectangles.
    fn scales(
        &mut self,
        pieces: &[Piece],
        names: Vec<String>,
        [height, width]: [usize; 2],
        each: &[usize],
        shape: &[usize],
    ) -> Result<(Value, [i64; 2]), BuildError> {
        let ([.., n, k], [before @ .., rows, _]) = (each, shape) else {
            return Err(GraphError::NoResult.into());
        };
        let all: usize = each.iter().rev().skip(1).product();
        let ranges: Vec<Range<usize>> = pieces
            .iter()
            .map(|piece| piece.rows.clone().unwrap_or(0..all))
            .collect();
        // Sizes of a configuration are above 0.
        let n = (*n).max(1);
        let of = Heights {
            n,
            height,
            own: height_of_bands(&ranges, height, n, *rows),
        };
        let (height, across) = (of.own, k.div_ceil(width));
        let bands: Vec<Bands> = (ranges.into_iter().zip(names))
            .map(|(rows, name)| Bands {
                name,
                across,
                rows,
                heights: of,
            })
            .collect();
        let name = bands.first().map(|bands| bands.name.clone());
        let shape = [before, &[rows.div_ceil(height), across]].concat();
        let source = Source::Scales(bands);
        let scales = self.constant(source, &name.unwrap_or_default(), DType::F32, &shape)?;
        Ok((scales, [height as i64, width as i64]))
    }

    /// `x @ wᵀ`, `[rows, n]`.
    pub fn product(&mut self, x: Value, matrix: Matrix) -> Result<Value, BuildError> {
        Ok(match matrix.scales {
            None => self.builder.mul_mat(x, matrix.w)?,
            Some((scales, [height, width])) => {
                (self.builder).mul_mat_scaled(x, matrix.w, scales, height, width)?
            }
        })
    }

    /// `x` times the experts that each token uses.
    pub fn product_of_experts(
        &mut self,
        experts: Matrix,
        x: Value,
        ids: Value,
    ) -> Result<Value, BuildError> {
        Ok(match experts.scales {
            None => self.builder.mul_mat_id(experts.w, x, ids)?,
            Some((scales, [height, width])) => {
                (self.builder).mul_mat_id_scaled(experts.w, x, ids, scales, height, width)?
            }
        })
    }

    fn constant(
        &mut self,
        source: Source,
        name: &str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Value, BuildError> {
        let spec = TensorSpec::new(dtype, Shape::fixed(shape)?)?;
        self.sources.push(source);
        Ok(self.builder.constant(name, spec)?)
    }

    fn vector(&mut self, source: Source, name: &str, n: usize) -> Result<Value, BuildError> {
        self.weights.expect(name, &[n])?;
        self.constant(source, name, DType::F32, &[n])
    }

    pub fn input(
        &mut self,
        source: Source,
        name: &str,
        dtype: DType,
        shape: Shape,
    ) -> Result<Value, BuildError> {
        self.sources.push(source);
        Ok(self.builder.tensor(name, TensorSpec::new(dtype, shape)?)?)
    }

    pub fn per_row(&mut self, source: Source, name: &str) -> Result<Value, BuildError> {
        self.input(source, name, DType::I32, Shape::rows(&[])?)
    }

    /// The cache of a layer.
    pub fn cache(&mut self, layer: usize) -> Result<Value, BuildError> {
        self.sources.push(Source::Cache(layer));
        let spec = self.shape.cache(self.config, self.config.kind(layer));
        Ok(self.builder.cache(format!("cache.{layer}"), spec)?)
    }

    /// A number.
    pub fn scalar(&mut self, value: f32) -> Result<Value, BuildError> {
        let bytes = value.to_le_bytes();
        Ok(self.builder.literal(DType::F32, Shape::default(), &bytes)?)
    }

    /// `x @ wᵀ (+ bias)`, `[rows, n]`. Where other members of a communicator compute the model as well, each computes its
    /// part, which is then given to all.
    pub fn linear(
        &mut self,
        x: Value,
        weight: &str,
        bias: Option<&str>,
        n: usize,
        k: usize,
    ) -> Result<Value, BuildError> {
        let share = self.shape.parts.columns();
        let y = self.linear_part(share, x, weight, bias, n, k)?;
        self.gathered(share, y, n)
    }

    /// A member's part of [`Weaver::linear`]: `[rows, share of n]`.
    pub fn linear_part(
        &mut self,
        share: Share,
        x: Value,
        weight: &str,
        bias: Option<&str>,
        n: usize,
        k: usize,
    ) -> Result<Value, BuildError> {
        let (part, own) = (share.of(n), share.divides(n).then(|| share.range(n)));
        let piece = Piece {
            name: weight.to_owned(),
            rows: own.clone(),
        };
        let matrix = self.matrix(piece, &[n, k], &[part, k])?;
        let y = self.product(x, matrix)?;
        let Some(bias) = bias else {
            return Ok(y);
        };
        self.weights.expect(bias, &[n])?;
        let source = Source::Vector {
            name: bias.to_owned(),
            elements: own,
        };
        let b = self.constant(source, bias, DType::F32, &[part])?;
        Ok(self.builder.add(y, b)?)
    }

    /// What all members have of `n` columns, of which `part` is one member's share.
    pub fn gathered(&mut self, share: Share, part: Value, n: usize) -> Result<Value, BuildError> {
        match share.divides(n) {
            true => Ok(self.builder.all_gather(part, share.members as i64)?),
            false => Ok(part),
        }
    }

    /// RMS norm over the last axis, `n` wide.
    pub fn norm(&mut self, x: Value, weight: &str, n: usize) -> Result<Value, BuildError> {
        let source = match self.config.norms_less_one {
            true => Source::OneAnd(weight.to_owned()),
            false => Source::Vector {
                name: weight.to_owned(),
                elements: None,
            },
        };
        let w = self.vector(source, weight, n)?;
        let eps = f64::from(self.config.rms_eps);
        Ok(self.builder.rms_norm(x, Some(w), eps)?)
    }
}

impl Bands {
    /// The bands of scales, one after another, counted as the rows are.
    pub fn each(&self) -> impl Iterator<Item = usize> {
        let Heights { n, height, own } = self.heights;
        let down = n.div_ceil(height);
        let (mut at, end) = (self.rows.start, self.rows.end);
        std::iter::from_fn(move || {
            let (matrix, row) = (at.checked_div(n)?, at.checked_rem(n)?);
            let band = (at < end).then_some(matrix * down + row / height)?;
            at += own.min(n - row);
            Some(band)
        })
    }
}

/// The greatest height of rectangles in pieces whose matrices have so many `rows`, at which each is within one of `height` in the
/// matrices `[n, …]` that they are pieces of.
fn height_of_bands(pieces: &[Range<usize>], height: usize, n: usize, rows: usize) -> usize {
    let joined = pieces.iter().any(|piece| piece.len() < rows);
    if height >= n && !joined {
        return height;
    }
    let mut own = height.min(n);
    for piece in pieces {
        own = gcd(own, piece.start % n);
        // Of several pieces that make a matrix, each begins a rectangle.
        if joined {
            own = gcd(own, piece.len());
        }
    }
    own
}

fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of each row of the pieces, one after another, the band that its scale is in, by the heights in the pieces.
    fn of_rows(pieces: &[Range<usize>], height: usize, n: usize, rows: usize) -> Vec<usize> {
        let own = height_of_bands(pieces, height, n, rows);
        let of = Heights { n, height, own };
        let bands: Vec<usize> = (pieces.iter())
            .flat_map(|rows| {
                let bands = Bands {
                    name: String::new(),
                    across: 1,
                    rows: rows.clone(),
                    heights: of,
                };
                bands.each().collect::<Vec<_>>()
            })
            .collect();
        let down = rows.div_ceil(own);
        let all: usize = pieces.iter().map(|p| p.len()).sum();
        assert_eq!(bands.len(), all / rows * down, "bands of whole matrices");
        (0..all)
            .map(|row| bands[row / rows * down + row % rows / own])
            .collect()
    }

    #[test]
    fn each_row_has_the_scale_that_it_has_in_its_matrix() {
        type Case<'a> = (&'a [(usize, usize)], usize, usize, usize);
        let cases: [Case<'_>; 10] = [
            // A whole matrix, whose last rectangle is cut off; a half of one where rectangles end, and where they do not.
            (&[(0, 300)], 128, 300, 300),
            (&[(128, 256)], 128, 256, 128),
            (&[(1088, 2176)], 128, 2176, 1088),
            (&[(150, 300)], 128, 300, 150),
            // Rectangles of one row, and one for all.
            (&[(7, 14)], 1, 14, 7),
            (&[(7, 14)], 14, 14, 7),
            (&[(7, 14)], 1 << 31, 14, 7),
            (&[(10, 20), (30, 40)], 1 << 31, 40, 20),
            // Three matrices in place.
            (&[(0, 60)], 16, 20, 20),
            // Halves of the gates and projections of two experts: matrices of 40 rows, of which each piece has 10.
            (&[(10, 20), (30, 40), (50, 60), (70, 80)], 16, 40, 20),
        ];
        for (pieces, height, n, rows) in cases {
            let pieces: Vec<Range<usize>> = pieces.iter().map(|(a, b)| *a..*b).collect();
            let down = n.div_ceil(height);
            let expected: Vec<usize> = pieces
                .iter()
                .flat_map(|piece| piece.clone())
                .map(|row| row / n * down + row % n / height)
                .collect();
            let found = of_rows(&pieces, height, n, rows);
            assert_eq!(found, expected, "{pieces:?} by {height} of {n}");
        }
    }
}
