//! What a sequence's text means, as it comes; and on a stream that resumed, what of it was not said yet.

use std::collections::VecDeque;

use hotcell_proto::v1::OutputPart;

use crate::text::{Family, Mark, Parser, StopStrings};

/// Follows a sequence's text beside what is sent of it.
///
/// It reads the text that is given, as [`StopStrings`] lets it through, and the marks among the special tokens, which are in no text.
#[derive(Debug)]
pub struct Meaning {
    family: Family,
    parser: Parser,
    stops: StopStrings,
    /// Bytes of text that the detokeniser gave.
    seen: u64,
    /// Bytes that the parser read.
    given: u64,
    /// Of these, bytes whose meaning was said elsewhere.
    skip: u64,
    /// Whether tokens come that were drawn elsewhere.
    replaying: bool,
    /// Marks after so many bytes of text, which the parser has not read.
    marks: VecDeque<(u64, Mark)>,
    parts: Vec<OutputPart>,
    over: bool,
}

impl Meaning {
    /// Of a text that ends before one of `stops`; the first `skip` bytes of it were said elsewhere.
    pub fn new(family: Family, parser: Parser, stops: StopStrings, skip: u64) -> Self {
        Self {
            family,
            parser,
            stops,
            seen: 0,
            given: 0,
            skip,
            replaying: true,
            marks: VecDeque::new(),
            parts: Vec::new(),
            over: false,
        }
    }

    /// All tokens that were drawn elsewhere are taken.
    pub fn resumed(&mut self) {
        self.replaying = false;
    }

    /// Takes a token and its text.
    pub fn push(&mut self, token: u32, piece: &str) {
        if self.over {
            return;
        }
        if let Some(mark) = self.family.special(token) {
            // Text may be held back that comes before it.
            self.marks.push_back((self.seen, mark));
        }
        self.seen += piece.len() as u64;
        self.read(piece);
        self.marks_up_to(self.given);
    }

    /// The text ends with this; whatever is held back is said.
    pub fn finish(&mut self, rest: &str) {
        if self.over {
            return;
        }
        self.read(rest);
        if !self.over {
            let held = self.stops.finish();
            self.text(&held);
            self.end();
        }
    }

    /// What was not said yet.
    pub fn take(&mut self) -> Vec<OutputPart> {
        std::mem::take(&mut self.parts)
    }

    fn read(&mut self, piece: &str) {
        let outcome = self.stops.push(piece);
        self.text(&outcome.text);
        if outcome.stopped.is_some() {
            self.end();
        }
    }

    fn end(&mut self) {
        self.marks_up_to(self.given);
        self.parser.finish();
        self.keep();
        self.over = true;
    }

    /// Gives text to the parser, with the marks in it, and in two if only part of it was said elsewhere.
    fn text(&mut self, text: &str) {
        let mut rest = text;
        while !rest.is_empty() {
            self.marks_up_to(self.given);
            let mark = self
                .marks
                .front()
                .map_or(u64::MAX, |(at, _)| at - self.given);
            let skip = match self.skip.saturating_sub(self.given) {
                0 => u64::MAX,
                left => left,
            };
            let most = usize::try_from(mark.min(skip)).unwrap_or(usize::MAX);
            // Neither is inside a character, unless a stranger said where he is.
            let (now, later) = rest.split_at(rest.ceil_char_boundary(most.min(rest.len())));
            self.parser.text(now);
            self.given += now.len() as u64;
            self.keep();
            rest = later;
        }
    }

    fn marks_up_to(&mut self, given: u64) {
        while let Some((_, mark)) = self.marks.pop_front_if(|(at, _)| *at <= given) {
            self.parser.mark(mark);
            self.keep();
        }
    }

    /// Keeps what was not said elsewhere.
    fn keep(&mut self) {
        let parts = self.parser.parts();
        let said = match self.replaying {
            true => self.given <= self.skip,
            false => self.given < self.skip,
        };
        if said {
            return;
        }
        for part in parts {
            merge(&mut self.parts, part);
        }
    }
}

/// Adds a part, to the one before if it goes on with that.
fn merge(parts: &mut Vec<OutputPart>, part: OutputPart) {
    use hotcell_proto::v1::output_part::Kind;
    let last = parts.last_mut().and_then(|last| last.kind.as_mut());
    match (last, &part.kind) {
        (Some(Kind::Content(last)), Some(Kind::Content(more)))
        | (Some(Kind::Reasoning(last)), Some(Kind::Reasoning(more))) => last.push_str(more),
        (Some(Kind::ToolCall(last)), Some(Kind::ToolCall(more)))
            if last.index == more.index && more.name.is_empty() =>
        {
            last.arguments.push_str(&more.arguments);
        }
        _ => parts.push(part),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::text::Calls;

    fn meaning(stops: &[&str], skip: u64) -> Meaning {
        let family = Family::plain(Calls::Tagged, true);
        let parser = Parser::new(&family, HashSet::new(), false);
        let stops = stops.iter().map(|s| (*s).to_owned()).collect();
        Meaning::new(family, parser, StopStrings::new(stops).unwrap(), skip)
    }

    const PIECES: [&str; 9] = [
        "<think>",
        "a \n",
        "</think>",
        "é",
        "<tool_call>",
        "{\"name\": \"f\", \"arguments\": {\"a\": 1",
        "}}",
        "</tool_call>",
        "END",
    ];

    proptest! {
        /// Whatever was said before a death is not said again, and the rest is.
        #[test]
        fn a_death_at_any_token_loses_nothing_and_repeats_nothing(
            words in proptest::collection::vec(0..PIECES.len(), 0..24), death in 0usize..24,
        ) {
            let pieces: Vec<&str> = words.iter().map(|&w| PIECES[w]).collect();
            let death = death.min(pieces.len());
            let stops = ["END</"];
            let mut calm = meaning(&stops, 0);
            calm.resumed();
            let (mut said, mut sent) = (Vec::new(), 0);
            let mut text = StopStrings::new(vec![stops[0].to_owned()]).unwrap();
            for (n, piece) in pieces.iter().enumerate() {
                calm.push(0, piece);
                if n < death {
                    sent += text.push(piece).text.len() as u64;
                    said.extend(calm.take());
                }
            }
            calm.finish("");
            let mut whole = said.clone();
            whole.extend(calm.take());

            let mut second = meaning(&stops, sent);
            for (n, piece) in pieces.iter().enumerate() {
                if n == death {
                    second.resumed();
                }
                second.push(0, piece);
            }
            if death < pieces.len() {
                second.finish("");
                said.extend(second.take());
            } else {
                second.resumed();
                second.finish("");
                said.extend(second.take());
            }
            let joined = |parts: Vec<OutputPart>| {
                let mut joined = Vec::new();
                parts.into_iter().for_each(|part| merge(&mut joined, part));
                joined
            };
            prop_assert_eq!(joined(said), joined(whole));
        }
    }
}
