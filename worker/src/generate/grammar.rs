//! Texts that follow a grammar: which tokens may come next.
//!
//! `llguidance` reads JSON schemas, regular expressions and Lark grammars and follows a text byte by byte; a trie of the
//! model's tokens says which of them go on with it. What it spends is bounded in steps, not in time, so that the
//! same tokens are possible wherever a stream goes on. A grammar comes from a stranger: it is read on a thread with a stack of its
//! own, and a panic there is that request's error.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{self, grammar::Kind},
};
use llguidance::{
    Matcher, ParserFactory,
    api::{ParserLimits, TopLevelGrammar},
    toktrie::{
        ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId,
    },
};

use serde_json::{Value, json};

use super::sampler::Allowed;
use crate::text::{Family, Tokenizer};

mod tools;

/// Stack of the thread that reads a grammar. The parsers go no deeper than their own limits (30 levels of Lark, 128 of
/// JSON, 250 of a regular expression), but with large steps.
const STACK: usize = 16 << 20;
/// Steps per millisecond that reading a grammar takes at least, on the slowest machine that matters; `llguidance` speaks of
/// a hundred times as many.
const STEPS: u64 = 500;
/// States of one request's lexer, of about 2 KiB each.
const MAX_STATES: usize = 16 << 10;
/// The longest token that the trie takes, bytes. Longer ones are never chosen.
const MAX_TOKEN: usize = 1000;
/// What may stand between two tokens of JSON: enough to indent by.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";
/// Marks a token that is no text.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::GrammarInvalid, what)
}

/// What a model's requests need to follow grammars; made when the first one asks.
#[derive(Default)]
pub struct Grammars(OnceLock<Result<ParserFactory, Error>>);

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammars")
    }
}

impl Grammars {
    /// Reads a grammar for a model with these tokens and ends, which writes calls of tools as its family does.
    ///
    /// # Errors
    /// [`Reason::GrammarInvalid`], saying what is wrong with it; [`Reason::ModelUnsupported`] for a model that cannot end a text.
    pub fn follow(
        &self,
        wire: &v1::Grammar,
        tokenizer: &Tokenizer,
        end_tokens: &[u32],
        family: &Family,
    ) -> Result<Follower, Error> {
        let make = || factory(tokenizer, end_tokens);
        let factory = self.0.get_or_init(make).as_ref().map_err(Clone::clone)?;
        let work = || -> Result<Matcher, Error> {
            let grammar = read(wire, family)?;
            let mut matcher = Matcher::new(factory.create_parser(grammar));
            match matcher.get_error() {
                Some(error) => Err(refused(&error)),
                // The first mask tells whether any token can begin such a text.
                None => match matcher.compute_mask_or_eos() {
                    Ok(mask) if !mask.is_zero() => Ok(matcher),
                    Ok(_) => Err(invalid("no text of the model's tokens follows the grammar")),
                    Err(error) => Err(refused(&error.to_string())),
                },
            }
        };
        let read = thread::scope(|scope| {
            let thread = thread::Builder::new().name("grammar".to_owned());
            let thread = thread.stack_size(STACK).spawn_scoped(scope, work);
            // A panic of the thread is an error of its join.
            thread.map(|thread| thread.join())
        });
        match read {
            Ok(Ok(read)) => read.map(Follower::new),
            Ok(Err(_)) => Err(invalid("the grammar cannot be read")),
            Err(error) => Err(Error::new(
                Reason::Overloaded,
                format!("no thread to read the grammar on: {error}"),
            )),
        }
    }
}

/// The library's words, cut to what may be passed on.
fn refused(why: &str) -> Error {
    let mut lines = why.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next().unwrap_or_default();
    // Where only what follows says why, that is at its end.
    let line = match lines.next_back().filter(|_| first.ends_with(':')) {
        Some(last) => format!("{first} {}", last.trim()),
        None => first.to_owned(),
    };
    let line: String = line.chars().take(limits::MAX_WORD).collect();
    invalid(format!("the grammar is refused: {line}"))
}

fn read(wire: &v1::Grammar, family: &Family) -> Result<TopLevelGrammar, Error> {
    let bounded = |size: usize| match size {
        size if size > limits::MAX_GRAMMAR_BYTES => {
            let most = limits::MAX_GRAMMAR_BYTES;
            let what = format!("the grammar has {size} bytes, at most {most}");
            Err(invalid(what))
        }
        _ => Ok(()),
    };
    match &wire.kind {
        Some(Kind::JsonSchema(text)) => {
            bounded(text.len())?;
            let schema = serde_json::from_str(text).map_err(|e| refused(&e.to_string()))?;
            Ok(TopLevelGrammar::from_json_schema(spaced(schema)))
        }
        Some(Kind::JsonObject(true)) => {
            let schema = json!({"type": "object"});
            Ok(TopLevelGrammar::from_json_schema(spaced(schema)))
        }
        Some(Kind::Regex(regex)) => {
            bounded(regex.len()).map(|()| TopLevelGrammar::from_regex(regex))
        }
        Some(Kind::Lark(text)) => {
            bounded(text.len()).map(|()| TopLevelGrammar::from_lark(text.to_owned()))
        }
        Some(Kind::ToolCalls(calls)) => {
            let sizes = calls.tools.iter().map(|tool| tool.parameters.len());
            bounded(sizes.fold(0, usize::saturating_add))?;
            tools::lark(calls, family).map(TopLevelGrammar::from_lark)
        }
        Some(Kind::JsonObject(false)) | None => Err(invalid("the grammar is empty; leave it out")),
    }
}

/// A schema with a bound on white space, unless it says itself how much it wants: JSON has none, and a model that has nothing to
/// say would go on for ever.
fn spaced(mut schema: Value) -> Value {
    if let Some(members) = schema.as_object_mut() {
        let own = members.entry("x-guidance");
        own.or_insert_with(|| json!({"whitespace_pattern": WHITE_SPACE}));
    }
    schema
}

fn factory(tokenizer: &Tokenizer, end_tokens: &[u32]) -> Result<ParserFactory, Error> {
    let unsupported = |what: &str| Error::new(Reason::ModelUnsupported, what);
    let size = tokenizer.vocab_size();
    let ends: Vec<TokenId> = end_tokens.iter().copied().filter(|&t| t < size).collect();
    let &[first, ..] = ends.as_slice() else {
        let what =
            "the model names no end token, so that no text of it could end where a grammar does";
        return Err(unsupported(what));
    };
    let word = |id: u32| {
        let piece = tokenizer.id_to_piece(id).unwrap_or_default();
        let mark = tokenizer.is_special(id) || ends.contains(&id);
        match (mark, piece) {
            (_, piece) if piece.len() > MAX_TOKEN => vec![],
            (true, piece) => [&[SPECIAL], piece].concat(),
            // No byte of UTF-8.
            (false, [SPECIAL, ..]) => vec![],
            (false, piece) => piece.to_vec(),
        }
    };
    let build = || {
        let words: Vec<Vec<u8>> = (0..size).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(&ends);
        // Says of itself that it does not tokenise as the model does: every way to spell a text is allowed.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices()).ok()?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: limits::MAX_GRAMMAR_MILLIS * STEPS,
            step_lexer_fuel: limits::MAX_MASK_STEPS,
            step_max_items: limits::MAX_MASK_ITEMS,
            max_items_in_row: limits::MAX_GRAMMAR_WAYS,
            max_grammar_size: limits::MAX_GRAMMAR_SYMBOLS,
            max_lexer_states: MAX_STATES,
            precompute_large_lexemes: true,
            verbose_errors: false,
        };
        Some(factory)
    };
    match catch_unwind(AssertUnwindSafe(build)) {
        Ok(Some(factory)) => Ok(factory),
        Ok(None) | Err(_) => Err(unsupported("the model's vocabulary fits no grammar")),
    }
}

/// Sets of tokens that masks are put together from.
fn slices() -> Vec<String> {
    llguidance::earley::SlicedBiasComputer::general_slices()
}

/// A text as it follows its grammar.
#[derive(Clone)]
pub struct Follower {
    matcher: Matcher,
    mask: SimpleVob,
    /// The mask is that of the text as it is now.
    ready: bool,
    /// What the last mask took.
    cost: Duration,
    wrong: Option<Error>,
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Follower({:?})", self.matcher.stop_reason())
    }
}

impl Follower {
    fn new(matcher: Matcher) -> Self {
        Self {
            matcher,
            mask: SimpleVob::new(),
            ready: false,
            cost: Duration::ZERO,
            wrong: None,
        }
    }

    /// Takes a token that is not an end token.
    pub fn advance(&mut self, token: u32) {
        self.ready = false;
        if self.wrong.is_none()
            && let Err(error) = self.matcher.consume_token(token)
        {
            self.wrong = Some(refused(&error.to_string()));
        }
    }

    /// Whether what it took follows the grammar.
    ///
    /// # Errors
    /// [`Reason::GrammarInvalid`] when it does not, or there is too much to follow.
    pub fn check(&self) -> Result<(), Error> {
        self.wrong.clone().map_or(Ok(()), Err)
    }

    /// What its last mask took.
    pub fn cost(&self) -> Duration {
        self.cost
    }

    /// Computes the next mask, if it is not there.
    pub fn prepare(&mut self) {
        if self.ready || self.wrong.is_some() {
            return;
        }
        let begun = Instant::now();
        match self.matcher.compute_mask_or_eos() {
            Ok(mask) => self.mask = mask,
            Err(error) => self.wrong = Some(refused(&error.to_string())),
        }
        self.ready = true;
        self.cost = begun.elapsed();
    }

    /// Nothing more can be said about its text.
    pub fn give_up(&mut self) {
        self.wrong = Some(invalid("the grammar cannot be followed any further"));
    }

    /// The tokens that may come next; only ends when the text is complete.
    ///
    /// # Errors
    /// As [`Follower::check`].
    pub fn allowed(&mut self) -> Result<Allowed<'_>, Error> {
        self.prepare();
        self.check()?;
        match self.mask.is_zero() {
            true => Err(invalid(
                "no token of the model goes on with the text as the grammar wants it",
            )),
            false => Ok(Allowed(self.mask.as_slice())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_why() {
        let said = |why: &str| refused(why).message().to_owned();
        assert_eq!(said("no rule"), "the grammar is refused: no rule");
        assert_eq!(said("no rule\nat 3"), "the grammar is refused: no rule");
        let regex = "regex parse error:\n    (\n    ^\nerror: unclosed group\n";
        assert_eq!(
            said(regex),
            "the grammar is refused: regex parse error: error: unclosed group"
        );
        assert_eq!(said("alone:"), "the grammar is refused: alone:");
    }
}
