//! A byte-level BPE vocabulary of any size, made up of random words: it encodes any text, and decodes to any.

use std::collections::HashSet;

use crate::chance::Chance;

/// Characters of a token at most.
const LONGEST: usize = 10;
/// What JSON is written with, so that a text that has to be JSON has the choices that a real vocabulary gives.
const PUNCTUATION: &[(&str, &str)] = &[
    ("{", "\""),
    ("\"", ":"),
    ("\"", ","),
    ("\"", "}"),
    ("[", "\""),
    ("\"", "]"),
    ("}", ","),
    ("}", "]"),
    ("Ġ", "\""),
    ("Ġ", "{"),
    ("Ġ", "["),
    ("Ġ", "Ġ"),
    ("ĠĠ", "ĠĠ"),
    ("Ċ", "ĠĠ"),
    ("0", "."),
    ("e", "+"),
    ("e", "-"),
];

/// Tokens and how they come about.
pub struct Vocabulary {
    /// By id.
    pub tokens: Vec<String>,
    /// GGUF's kind of each: 3 is control, 1 is ordinary.
    pub kinds: Vec<i32>,
    /// "left right", in the order in which they are tried.
    pub merges: Vec<String>,
    /// Begins a text.
    pub begin: u32,
    /// Ends one.
    pub end: u32,
}

/// The character that stands for a byte (`bytes_to_unicode` in GPT-2's encoder.py).
fn character(byte: u8) -> char {
    let itself = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !itself(*b)).count() as u32;
    char::from_u32(256 + before).unwrap_or('\u{100}')
}

impl Vocabulary {
    /// One of so many tokens; at least 258, which are two special ones and the bytes.
    pub fn new(size: usize) -> Self {
        let mut tokens = vec!["<s>".to_owned(), "</s>".to_owned()];
        tokens.extend((0..=255).map(|byte| character(byte).to_string()));
        let mut known: HashSet<String> = tokens.iter().cloned().collect();
        let mut merges = Vec::new();
        let mut join = |tokens: &mut Vec<String>, left: &str, right: &str| {
            let whole = format!("{left}{right}");
            let fits = tokens.len() < size && whole.chars().count() <= LONGEST;
            if fits && known.insert(whole.clone()) {
                merges.push(format!("{left} {right}"));
                tokens.push(whole);
            }
        };
        for (left, right) in PUNCTUATION {
            join(&mut tokens, left, right);
        }
        for ten in 0..10 {
            for one in 0..10 {
                join(&mut tokens, &ten.to_string(), &one.to_string());
            }
        }
        // Words: a piece of one, and one more; the space before it belongs to it, and comes first.
        let first_word = tokens.len();
        for letter in 'a'..='z' {
            join(&mut tokens, "Ġ", &letter.to_string());
        }
        let letters: Vec<String> = ('a'..='z').map(String::from).collect();
        let mut chance = Chance::new(0);
        while tokens.len() < size {
            let words = tokens.len() - first_word;
            let mut piece = || match chance.below(words + letters.len()) {
                at if at < letters.len() => letters[at].clone(),
                at => tokens[first_word + at - letters.len()].clone(),
            };
            let (left, right) = (piece(), piece());
            if !right.starts_with('Ġ') {
                join(&mut tokens, &left, &right);
            }
        }
        let kinds = (0..tokens.len()).map(|id| if id < 2 { 3 } else { 1 });
        Self {
            kinds: kinds.collect(),
            tokens,
            merges,
            begin: 0,
            end: 1,
        }
    }
}
