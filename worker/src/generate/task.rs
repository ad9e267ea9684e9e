//! What a batch computes for: a stream of tokens, or a prompt's embedding.

use std::time::{Duration, Instant};

use hotcell_proto::error::Error;

use super::{blocks::Key, embed::Reading, fair::Class, lookup::Pays, sequence::Sequence};

/// What is asked for.
pub enum Task {
    /// A stream.
    Generate(Box<Sequence>),
    /// An embedding.
    Embed(Box<Reading>),
}

impl Task {
    /// Tokens known so far, prompt first.
    pub fn tokens(&self) -> &[u32] {
        match self {
            Self::Generate(sequence) => sequence.tokens(),
            Self::Embed(reading) => reading.tokens(),
        }
    }

    /// The request's id; embeddings have none.
    pub fn id(&self) -> &str {
        match self {
            Self::Generate(sequence) => sequence.id(),
            Self::Embed(_) => "",
        }
    }

    /// Tokens of its prompt.
    pub fn prompt_len(&self) -> usize {
        match self {
            Self::Generate(sequence) => sequence.prompt_len(),
            Self::Embed(reading) => reading.tokens().len(),
        }
    }

    /// How long it has been in this worker; nobody knows of an embedding.
    pub fn age(&self, now: Instant) -> Duration {
        match self {
            Self::Generate(sequence) => sequence.age(now),
            Self::Embed(_) => Duration::ZERO,
        }
    }

    /// Whose it is.
    pub fn class(&self) -> &Class {
        match self {
            Self::Generate(sequence) => sequence.class(),
            Self::Embed(reading) => reading.class(),
        }
    }

    /// When it must be over.
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Generate(sequence) => sequence.deadline(),
            Self::Embed(reading) => reading.deadline(),
        }
    }

    /// Whether nobody waits for it any more.
    pub fn is_abandoned(&self) -> bool {
        match self {
            Self::Generate(sequence) => sequence.is_abandoned(),
            Self::Embed(reading) => reading.is_abandoned(),
        }
    }

    /// Whether its reader has room for what a step gives.
    pub fn has_room(&self) -> bool {
        match self {
            Self::Generate(sequence) => sequence.has_room(),
            Self::Embed(_) => true,
        }
    }

    /// Whether tokens need not be computed that are in the cache.
    pub fn may_skip(&self) -> bool {
        match self {
            Self::Generate(_) => true,
            Self::Embed(reading) => reading.may_skip(),
        }
    }

    /// It takes part in steps from now on; so many of its tokens are in the cache.
    pub fn start(&mut self, cached: usize, now: Instant) {
        match self {
            Self::Generate(sequence) => sequence.start(cached, now),
            Self::Embed(reading) => reading.start(),
        }
    }

    /// Ends it with an error.
    pub fn fail(self, error: Error) {
        match self {
            Self::Generate(sequence) => sequence.fail(error),
            Self::Embed(reading) => reading.fail(error),
        }
    }
}

/// A task in a batch, whether it waits or runs.
pub struct Member {
    /// Names it, and orders by arrival.
    pub id: u64,
    /// What is asked for.
    pub task: Task,
    /// The root of its tenant's keys.
    pub root: Key,
    /// Keys of its tokens' first blocks, as far as it was looked for them while it waits.
    pub keys: Vec<Key>,
    /// How often it made room for others.
    pub preempted: u32,
    /// Whether guessing pays for it.
    pub pays: Pays,
    /// It waits for another one that computes its first tokens: until that one has so many.
    pub behind: Option<(u64, usize)>,
}
