//! Methods that draw numbers. A key (`u32[2]`, see [`Session::random_key`](super::Session::random_key)) decides all of them.

use hotcell_graph::{Shape, op::Attribute};

use super::{
    array::{Tensor, of_graph},
    ops::one,
};

impl Tensor {
    /// Random bits (u32) of a shape; `self` is the key.
    pub fn random_bits(&self, shape: &[usize]) -> Tensor {
        self.random("random_bits", shape, vec![])
    }

    /// Uniform numbers in `[low, high)`; `self` is the key.
    pub fn random_uniform(&self, shape: &[usize], low: f64, high: f64) -> Tensor {
        self.random(
            "random_uniform",
            shape,
            vec![Attribute::Float(low), Attribute::Float(high)],
        )
    }

    /// Normal numbers; `self` is the key.
    pub fn random_normal(&self, shape: &[usize], mean: f64, deviation: f64) -> Tensor {
        self.random(
            "random_normal",
            shape,
            vec![Attribute::Float(mean), Attribute::Float(deviation)],
        )
    }

    /// `count` keys of a key, `[count, 2]`.
    pub fn random_split(&self, count: i64) -> Tensor {
        one("random_split", &[Some(self)], vec![Attribute::Int(count)])
    }

    /// True with probability `p`, else false, of a shape; `self` is the key.
    pub fn random_bernoulli(&self, shape: &[usize], p: f64) -> Tensor {
        self.random("random_bernoulli", shape, vec![Attribute::Float(p)])
    }

    /// `count` draws (u32, a new last axis) from the distributions whose unnormalised logarithms lie along an axis of
    /// `self`, which goes; `key` is the key.
    pub fn random_categorical(&self, key: &Tensor, axis: i64, count: i64) -> Tensor {
        let attributes = vec![Attribute::Int(axis), Attribute::Int(count)];
        one("random_categorical", &[Some(self), Some(key)], attributes)
    }

    /// A token (i32) of each row of logits (f32, `self`) by its temperature (f32, a number for each row; 0: the largest) and its
    /// noise (u32, four for each row: a seed's lower and upper half, a branch, a position), as the sampler of models draws it;
    /// -1 where the logits are broken. With `limits` (f32, three for each row: top-k, 0 for all; top-p, 1 for all; min-p, 0 for all)
    /// among the tokens that these leave; -1 as well where more than 256 may be left, unless all are.
    pub fn draw(&self, temperature: &Tensor, noise: &Tensor, limits: Option<&Tensor>) -> Tensor {
        one(
            "draw",
            &[Some(self), Some(temperature), Some(noise), limits],
            vec![],
        )
    }

    fn random(&self, op: &str, shape: &[usize], more: Vec<Attribute>) -> Tensor {
        match Shape::fixed(shape) {
            Ok(shape) => {
                let attributes = std::iter::once(Attribute::Shape(shape))
                    .chain(more)
                    .collect();
                one(op, &[Some(self)], attributes)
            }
            Err(error) => Tensor::wrong(self.0.session.clone(), of_graph(&error)),
        }
    }
}
