//! Known answers: a short fixed input, computed beside whatever else runs, whose logits' bits say whether device and
//! weights still are what they were.
//!
//! The input depends on the model's sizes only, and nothing that a row computes depends on other rows, so that the
//! answer is the same whenever it is asked for. It lies in cache blocks of its own and goes through the same plans as
//! requests do: two chunks of a prompt, then single rows. The first chunk is as small as reads every weight in little more
//! time than one row would: it is all that a worker computes before it serves, or soon after.

use hotcell_kernels::backend::DeviceError;
use hotcell_proto::{error::Error, limits};
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

use super::cache::Chain;
use crate::model::run::{Row, RunShape, Runner};

/// Tokens of the chunks that are computed first; a context that is shorter cuts them.
const PROMPT: [usize; 2] = [4, 20];

/// What came out of one step.
pub type Hash = [u8; 32];

/// Where the answer goes.
pub type Reply = oneshot::Sender<Result<Vec<Hash>, Error>>;

/// How many rows each step computes, for a context of so many positions: the prompt first, and then one at a time.
fn steps(context: usize, wanted: u32) -> Vec<usize> {
    let all = (limits::MAX_CHECK_STEPS as usize).min(context).max(1);
    let mut steps = vec![1; all];
    let mut room = context.saturating_sub(all);
    for (step, rows) in steps.iter_mut().zip(PROMPT) {
        let more = (rows - 1).min(room);
        *step += more;
        room -= more;
    }
    steps.truncate((wanted as usize).max(1));
    steps
}

/// A check that is being computed.
pub struct Check {
    /// Rows of the steps to come, the last one first.
    steps: Vec<usize>,
    computed: usize,
    table: usize,
    chain: Chain,
    answers: Vec<Hash>,
    reply: Reply,
}

impl Check {
    /// Tokens that a check of so many steps computes.
    pub fn tokens(shape: &RunShape, wanted: u32) -> usize {
        steps(shape.context, wanted).iter().sum()
    }

    /// One of so many steps, in this chain's blocks behind this table, which are set already.
    pub fn new(shape: &RunShape, wanted: u32, table: usize, chain: Chain, reply: Reply) -> Self {
        let mut steps = steps(shape.context, wanted);
        steps.reverse();
        Self {
            answers: Vec::with_capacity(steps.len()),
            steps,
            computed: 0,
            table,
            chain,
            reply,
        }
    }

    /// Whether nobody waits for the answer any more.
    pub fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    /// Computes the next step. `logits` is for one row of them. Returns whether it was the last one.
    ///
    /// # Errors
    /// The device's.
    pub fn step(&mut self, runner: &mut Runner, logits: &mut [f32]) -> Result<bool, DeviceError> {
        let Some(count) = self.steps.pop() else {
            return Ok(true);
        };
        let block_len = runner.shape().block_len;
        let vocabulary = runner.vocab().max(1) as u64;
        let rows: Vec<Row> = (self.computed..self.computed + count)
            .map(|position| {
                let slot = |kind| {
                    let block = self.chain.blocks(kind).get(position / block_len);
                    block.map_or(0, |&b| b as usize * block_len + position % block_len)
                };
                Row {
                    token: token(position as u64, vocabulary),
                    position,
                    sequence: self.table,
                    slots: std::array::from_fn(slot),
                }
            })
            .collect();
        runner.step(&rows, &[rows.len().saturating_sub(1)])?;
        runner.logits(0, logits)?;
        let mut hash = Sha256::new();
        for logit in logits.iter() {
            hash.update(logit.to_bits().to_le_bytes());
        }
        self.answers.push(hash.finalize().into());
        self.computed += count;
        Ok(self.steps.is_empty())
    }

    /// Says what came out, or why nothing did, and gives back the table and the blocks.
    pub fn end(self, failure: Option<Error>) -> (usize, Chain) {
        let answer = match failure {
            Some(error) => Err(error),
            None => Ok(self.answers),
        };
        // Who left meanwhile misses it.
        let _ = self.reply.send(answer);
        (self.table, self.chain)
    }
}

/// The token at a position: spread over the vocabulary by a multiplicative hash (Knuth).
fn token(position: u64, vocabulary: u64) -> u32 {
    u32::try_from((position + 1).wrapping_mul(2_654_435_761) % vocabulary).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_fit_every_context_and_a_brief_check_begins_like_a_whole_one() {
        for context in 0..64 {
            let whole = steps(context, limits::MAX_CHECK_STEPS);
            assert!(whole.iter().sum::<usize>() <= context.max(1), "{context}");
            assert!(whole.iter().all(|&rows| rows > 0));
            assert_eq!(steps(context, 1), whole[..1]);
            assert_eq!(steps(context, u32::MAX), whole);
        }
        assert_eq!(steps(1000, limits::MAX_CHECK_STEPS), [4, 20, 1, 1, 1]);
    }

    #[test]
    fn tokens_are_in_the_vocabulary() {
        for vocabulary in [1, 2, 300, 151_936] {
            assert!((0..64).all(|p| u64::from(token(p, vocabulary)) < vocabulary));
        }
    }
}
