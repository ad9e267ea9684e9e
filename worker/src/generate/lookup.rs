//! Guessing what comes next: what followed the last time the same tokens came, in prompt and output ("prompt lookup").
//!
//! A guess costs a row of a step and saves a step if it is right. Whether a token is drawn at all, and which, does not
//! depend on it: its position's own noise draws it, and the guess only counts where it is equal. So guessing is a
//! matter of speed, and each sequence guesses only while that pays.

/// Tokens guessed at once at most.
pub const MOST: usize = 6;
/// How many last tokens must have come before; the longer ones are looked for first.
const ALIKE: std::ops::RangeInclusive<usize> = 2..=3;
/// How far back to look: reading more would cost as much as it saves.
const REACH: usize = 4096;

/// What followed the latest earlier place where the last tokens are the same, and so on round and round; `most` tokens,
/// or none.
pub fn guess(tokens: &[u32], most: usize) -> Vec<u32> {
    let reach = &tokens[tokens.len().saturating_sub(REACH)..];
    for alike in ALIKE.rev() {
        let Some(start) = reach.len().checked_sub(alike) else {
            continue;
        };
        let last = &reach[start..];
        let found = (0..start).rev().find(|&at| &reach[at..at + alike] == last);
        if let Some(at) = found {
            let follows = &reach[at + alike..];
            return follows.iter().cycle().take(most).copied().collect();
        }
    }
    Vec::new()
}

/// Whether guessing pays for one sequence, as measured.
#[derive(Clone, Copy, Debug)]
pub struct Pays {
    /// Share of the guessed tokens that were right, lately.
    right: f32,
    /// Tokens to draw without guessing.
    rest: usize,
    /// How many to draw without guessing when it has not paid again.
    patience: usize,
}

/// Weight of the latest guess in what is remembered.
const LATEST: f32 = 0.25;
/// Tokens drawn without guessing after it did not pay, at first and at most.
const REST: usize = 16;
const LONGEST_REST: usize = 512;

impl Default for Pays {
    fn default() -> Self {
        Self {
            right: 0.7,
            rest: 0,
            patience: REST,
        }
    }
}

impl Pays {
    /// How many tokens to guess now, where the row of a guess costs this share of what a token costs otherwise.
    pub fn most(&self, cost: f32) -> usize {
        if self.rest > 0 {
            return 0;
        }
        // Guess i is of use only if all before it are right; it pays while that is likelier than what it costs.
        let mut likely = self.right;
        let mut most = 0;
        while most < MOST && likely > cost {
            most += 1;
            likely *= self.right;
        }
        most
    }

    /// Of `guessed` tokens, the first `right` were right; `drawn` tokens were drawn, at this cost of a guess.
    pub fn note(&mut self, guessed: usize, right: usize, drawn: usize, cost: f32) {
        if guessed == 0 {
            if self.rest > 0 {
                self.rest = self.rest.saturating_sub(drawn);
                if self.rest == 0 {
                    // Another try, of one token.
                    self.right = self.right.max((cost * 1.3).min(0.9));
                }
            }
            return;
        }
        // Those after the first wrong one say nothing.
        let judged = (right + 1).min(guessed);
        let share = right as f32 / judged as f32;
        self.right += LATEST * (share - self.right);
        if self.right <= cost {
            self.rest = self.patience;
            self.patience = (2 * self.patience).min(LONGEST_REST);
        } else if right == guessed {
            self.patience = REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_place_with_the_longest_likeness_tells_what_follows() {
        assert_eq!(guess(&[1, 2, 3, 9, 8, 1, 2, 3], 4), [9, 8, 1, 2]);
        assert_eq!(guess(&[1, 2, 3, 9, 8, 1, 2, 3], 1), [9]);
        // The later of two places.
        assert_eq!(guess(&[1, 2, 5, 1, 2, 6, 1, 2], 1), [6]);
        // Three tokens alike go before two.
        assert_eq!(guess(&[0, 1, 2, 7, 4, 1, 2, 6, 0, 1, 2], 1), [7]);
        // What goes round goes on so.
        assert_eq!(guess(&[5, 5, 5, 5], 3), [5, 5, 5]);
        assert_eq!(guess(&[7, 1, 2, 1, 2, 1], 5), [2, 1, 2, 1, 2]);
        assert!(guess(&[1, 2, 3, 4], 4).is_empty());
        for few in [&[][..], &[1], &[1, 1]] {
            assert!(guess(few, 4).is_empty());
        }
    }

    #[test]
    fn a_long_text_is_searched_near_its_end_only() {
        let mut tokens = vec![1, 2, 3, 4];
        tokens.extend(std::iter::repeat_n(9, REACH - 3));
        tokens.extend([1, 2, 3]);
        assert!(guess(&tokens, 4).is_empty());
    }

    #[test]
    fn guessing_stops_where_it_does_not_pay_and_is_tried_again() {
        const COST: f32 = 0.25;
        let mut pays = Pays::default();
        assert!(pays.most(COST) > 1);
        // Where a guess costs as much as a token it never pays.
        assert_eq!(pays.most(1.0), 0);
        let mut wrong = 0;
        while pays.most(COST) > 0 {
            pays.note(pays.most(COST), 0, 1, COST);
            wrong += 1;
            assert!(wrong < 10);
        }
        for _ in 0..REST {
            assert_eq!(pays.most(COST), 0);
            pays.note(0, 0, 1, COST);
        }
        assert_eq!(pays.most(COST), 1);
        // Again wrong: it rests longer.
        while pays.most(COST) > 0 {
            pays.note(1, 0, 1, COST);
        }
        for _ in 0..2 * REST {
            assert_eq!(pays.most(COST), 0);
            pays.note(0, 0, 1, COST);
        }
        // Now it is right, and guesses more and more.
        for _ in 0..20 {
            let most = pays.most(COST);
            assert!(most > 0);
            pays.note(most, most, most + 1, COST);
        }
        assert_eq!(pays.most(COST), MOST);
    }
}
