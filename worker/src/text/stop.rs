//! Stop strings over text that arrives in pieces.

use hotcell_proto::limits::{MAX_STOP_BYTES, MAX_STOP_STRINGS};

use super::{TextError, bounded};

/// What a piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that may go to the client now.
    pub text: String,
    /// The index of the stop string that was found. All text before it has been given, none after.
    pub stopped: Option<usize>,
}

/// Finds the first of several stop strings, holding back what may be the beginning of one.
///
/// Which one is first does not depend on how the text was cut: the one that is complete first, and of those that are
/// complete at the same byte the longest. To go on elsewhere, make a new one, [`skip`](Self::skip) what
/// [`emitted_bytes`](Self::emitted_bytes) said, and push all the text again from the beginning.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    /// Bytes given so far, those that were skipped included.
    emitted: u64,
    skip: u64,
    stopped: bool,
}

impl StopStrings {
    /// Checks the stop strings of a request. None at all is fine.
    ///
    /// # Errors
    /// An empty one, too many, or one that is too long.
    pub fn new(stops: Vec<String>) -> Result<Self, TextError> {
        bounded("the list of stop strings", stops.len(), MAX_STOP_STRINGS)?;
        for stop in &stops {
            bounded("a stop string, in bytes,", stop.len(), MAX_STOP_BYTES)?;
            if stop.is_empty() {
                return Err(TextError::Stop("an empty one would stop everything".into()));
            }
        }
        Ok(Self {
            stops,
            ..Self::default()
        })
    }

    /// The first `bytes` bytes that would be given are not: someone has them already.
    pub fn skip(&mut self, bytes: u64) {
        self.skip = bytes;
    }

    /// How many bytes of text were given (and skipped) so far.
    #[must_use]
    pub fn emitted_bytes(&self) -> u64 {
        self.emitted
    }

    /// Reads a piece of text. After a stop string was found, every further piece is ignored.
    pub fn push(&mut self, piece: &str) -> StopOutcome {
        if self.stopped {
            return StopOutcome::default();
        }
        self.held.push_str(piece);
        let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        if let Some((_, start, index)) = found.min() {
            self.stopped = true;
            self.held.truncate(start);
            return StopOutcome {
                text: self.give(start),
                stopped: Some(index),
            };
        }
        let keep = self
            .stops
            .iter()
            .map(|stop| partial(&self.held, stop))
            .max()
            .unwrap_or(0);
        StopOutcome {
            text: self.give(self.held.len() - keep),
            stopped: None,
        }
    }

    /// The text is at its end: gives what was held back.
    pub fn finish(&mut self) -> String {
        self.give(self.held.len())
    }

    /// Takes `bytes` off the front of what is held.
    fn give(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        let mut text = std::mem::replace(&mut self.held, rest);
        self.emitted += text.len() as u64;
        let skip = usize::try_from(self.skip)
            .unwrap_or(usize::MAX)
            .min(text.len());
        self.skip -= skip as u64;
        // Inside a character only if the caller's number is not one that `emitted_bytes` gave.
        let skip = text.ceil_char_boundary(skip);
        text.drain(..skip);
        text
    }
}

/// The length of the longest proper beginning of `stop` with which `text` ends. Both begin at a character, so the cut
/// never splits one.
fn partial(text: &str, stop: &str) -> usize {
    let longest = (stop.len() - 1).min(text.len());
    let fits = |&length: &usize| text.as_bytes().ends_with(&stop.as_bytes()[..length]);
    (1..=longest).rev().find(fits).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher =
            StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect()).expect("valid");
        let mut text = String::new();
        for piece in pieces {
            let outcome = matcher.push(piece);
            text.push_str(&outcome.text);
            if outcome.stopped.is_some() {
                return (text, outcome.stopped);
            }
        }
        text.push_str(&matcher.finish());
        assert_eq!(matcher.emitted_bytes(), text.len() as u64);
        (text, None)
    }

    #[test]
    fn cuts_before_the_stop_string_however_it_arrives() {
        assert_eq!(run(&["\n\n"], &["one\n", "\ntwo"]), ("one".into(), Some(0)));
        assert_eq!(
            run(&["END"], &["the E", "N", "D."]),
            ("the ".into(), Some(0))
        );
        assert_eq!(
            run(&["END"], &["the E", "N", "d"]),
            ("the ENd".into(), None)
        );
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), Some(0)));
        assert_eq!(
            run(&["終わり"], &["始め、終わ", "る、終わ", "り"]),
            ("始め、終わる、".into(), Some(0))
        );
        assert_eq!(run(&[], &["x", "y"]), ("xy".into(), None));
    }

    #[test]
    fn the_first_complete_one_wins_and_of_equals_the_longest() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), ("xa".into(), Some(1)));
        assert_eq!(run(&["bc", "abc"], &["xabc"]), ("x".into(), Some(1)));
    }

    #[test]
    fn holds_back_no_more_than_it_must() {
        let mut matcher = StopStrings::new(vec!["</s>".into()]).expect("valid");
        assert_eq!(matcher.push("a < b").text, "a < b");
        assert_eq!(matcher.push("c <").text, "c ");
        assert_eq!(matcher.push("/").text, "");
        assert_eq!(matcher.push("t").text, "</t");
    }

    #[test]
    fn bad_lists_are_refused() {
        assert!(StopStrings::new(vec![String::new()]).is_err());
        assert!(StopStrings::new(vec!["x".into(); 17]).is_err());
        assert!(StopStrings::new(vec!["x".repeat(1025)]).is_err());
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter_and_a_continuation_gives_the_rest(
            text in "[abé]{0,40}", cuts in proptest::collection::vec(0usize..40, 0..8),
            stops in proptest::collection::vec("[abé]{1,4}", 0..4), death in 0usize..8,
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut edges: Vec<usize> = cuts.iter().map(|&c| text.ceil_char_boundary(c)).collect();
            edges.extend([0, text.len()]);
            edges.sort_unstable();
            let pieces: Vec<&str> = edges.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let whole = run(&stops, &[&text]);
            prop_assert_eq!(&run(&stops, &pieces), &whole);

            let owned: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
            let mut first = StopStrings::new(owned.clone()).expect("valid");
            let mut given: String = pieces.iter().take(death).map(|p| first.push(p).text).collect();
            let mut second = StopStrings::new(owned).expect("valid");
            second.skip(first.emitted_bytes());
            given.push_str(&second.push(&text).text);
            given.push_str(&second.finish());
            prop_assert_eq!(given, whole.0);
        }
    }
}
