//! Which of a model's plans a worker's device executes: a black box says it, since a step's number means nothing without it.

/// One of a model's plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlanPart {
    /// From tokens to hidden states.
    Body = 1,
    /// The same, handing out what somebody looks at.
    Looked = 2,
    /// From hidden states to logits.
    Logits = 3,
    /// From hidden states to embeddings.
    States = 4,
    /// From logits to tokens.
    Draws = 5,
    /// From hidden states to logits, handing out what somebody looks at.
    LookedLogits = 6,
}

impl PlanPart {
    /// Each with its stable name.
    pub const ALL: [(PlanPart, &'static str); 6] = [
        (PlanPart::Body, "body"),
        (PlanPart::Looked, "looked"),
        (PlanPart::Logits, "logits"),
        (PlanPart::States, "states"),
        (PlanPart::Draws, "draws"),
        (PlanPart::LookedLogits, "looked_logits"),
    ];

    /// Its stable name.
    pub fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(part, _)| *part == self);
        found.map_or("?", |(_, name)| name)
    }

    /// The one of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(_, its)| *its == name);
        found.map(|(part, _)| *part)
    }

    /// The one of this number.
    pub fn from_word(word: u64) -> Option<Self> {
        let mut all = Self::ALL.iter().map(|(part, _)| *part);
        all.find(|part| *part as u64 == word)
    }
}
