//! Embeddings: a prompt is read, nothing is drawn, and its final states become one vector.

use std::{sync::Arc, time::Instant};

use hotcell_proto::error::Error;
use tokio::sync::oneshot;

use super::{fair::Class, sequence::Place};

/// How states become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The last token's.
    Last,
    /// The mean of all, summed in f64 from the first to the last.
    Mean,
}

/// Where the vector goes.
pub type Reply = oneshot::Sender<Result<Vec<f32>, Error>>;

/// A prompt that is read.
pub struct Reading {
    tokens: Vec<u32>,
    pooling: Pooling,
    normalize: bool,
    class: Class,
    deadline: Option<Instant>,
    sums: Vec<f64>,
    reply: Reply,
    _place: Arc<Place>,
}

impl Reading {
    /// Reads `tokens`, at least one, all in the vocabulary and no more than the context holds. All prompts of a request
    /// have one place in the queue.
    pub fn new(
        tokens: Vec<u32>,
        (pooling, normalize): (Pooling, bool),
        class: Class,
        deadline: Option<Instant>,
        (reply, place): (Reply, Arc<Place>),
    ) -> Self {
        Self {
            tokens,
            pooling,
            normalize,
            class,
            deadline,
            sums: Vec::new(),
            reply,
            _place: place,
        }
    }

    /// The prompt.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whose it is.
    pub fn class(&self) -> &Class {
        &self.class
    }

    /// When it must be over.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether nobody waits for it any more.
    pub fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    /// Whether tokens need not be computed that are in the cache: their states are not.
    pub fn may_skip(&self) -> bool {
        self.pooling == Pooling::Last
    }

    /// Begins, again if it was put back.
    pub fn start(&mut self) {
        self.sums.clear();
    }

    /// Of the positions `from..to`, which are computed next, those whose states it needs.
    pub fn needs(&self, from: usize, to: usize) -> std::ops::Range<usize> {
        match self.pooling {
            Pooling::Mean => from..to,
            Pooling::Last => to.min(from.max(self.tokens.len() - 1))..to,
        }
    }

    /// Takes a state that it needs, in the order of positions.
    pub fn push(&mut self, state: &[f32]) {
        self.sums.resize(state.len(), 0.0);
        for (sum, value) in self.sums.iter_mut().zip(state) {
            *sum += f64::from(*value);
        }
    }

    /// All was read.
    pub fn finish(self) {
        let count = match self.pooling {
            Pooling::Last => 1.0,
            Pooling::Mean => self.tokens.len() as f64,
        };
        let squares: f64 = self.sums.iter().map(|v| (v / count) * (v / count)).sum();
        // A vector of zeroes has no direction and stays one.
        let length = match self.normalize && squares > 0.0 {
            true => squares.sqrt(),
            false => 1.0,
        };
        let values = self.sums.iter().map(|v| (v / count / length) as f32);
        // Who left meanwhile misses it.
        let _ = self.reply.send(Ok(values.collect()));
    }

    /// Ends it with an error.
    pub fn fail(self, error: Error) {
        let _ = self.reply.send(Err(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pooled(pooling: Pooling, normalize: bool, states: &[[f32; 2]]) -> Vec<f32> {
        let (reply, mut answer) = oneshot::channel();
        let class = Class {
            tenant: "".into(),
            priority: 0,
        };
        let place = Arc::new(Place::take(&Arc::default(), 1).unwrap());
        let tokens = vec![0; states.len()];
        let mut reading = Reading::new(tokens, (pooling, normalize), class, None, (reply, place));
        reading.start();
        // In pieces of two.
        for from in (0..states.len()).step_by(2) {
            for i in reading.needs(from, (from + 2).min(states.len())) {
                reading.push(&states[i]);
            }
        }
        reading.finish();
        answer.try_recv().unwrap().unwrap()
    }

    #[test]
    fn states_are_pooled_and_made_as_long_as_asked() {
        let states = [[1.0, 0.0], [2.0, 8.0], [6.0, 4.0]];
        assert_eq!(pooled(Pooling::Last, false, &states), [6.0, 4.0]);
        assert_eq!(pooled(Pooling::Mean, false, &states), [3.0, 4.0]);
        assert_eq!(pooled(Pooling::Mean, true, &states), [0.6, 0.8]);
        assert_eq!(pooled(Pooling::Last, true, &[[0.0, 0.0]]), [0.0, 0.0]);
        assert_eq!(pooled(Pooling::Last, false, &states[..1]), [1.0, 0.0]);
    }
}
