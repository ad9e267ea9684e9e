//! A mask computed on the other thread is the one that would have been computed here.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::path::PathBuf;

use hotcell_proto::v1::{self, grammar::Kind};
use hotcell_worker::{
    generate::{
        grammar::{Follower, Grammars},
        masks::Masks,
    },
    text::{Calls, Family, Tokenizer},
};

fn tokenizer() -> Tokenizer {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden/tokenizers/gpt2.tokenizer.json");
    Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap()
}

fn follower(tokenizer: &Tokenizer, regex: &str) -> Follower {
    let grammar = v1::Grammar {
        kind: Some(Kind::Regex(regex.to_owned())),
    };
    let end = tokenizer.vocab_size() - 1;
    let grammars = Grammars::default();
    let family = Family::plain(Calls::Bare, false);
    let read = grammars.follow(&grammar, tokenizer, &[end], &family);
    read.unwrap()
}

fn mask(follower: &mut Follower) -> Option<Vec<u32>> {
    follower.allowed().ok().map(|allowed| allowed.0.to_vec())
}

#[test]
fn followers_come_back_with_the_masks_that_they_would_have_computed_themselves() {
    let tokenizer = tokenizer();
    let mut here: Vec<Follower> = ["[a-f]{1,9}", "(yes|no) [0-9]+", "x*"]
        .iter()
        .map(|regex| follower(&tokenizer, regex))
        .collect();
    let mut masks = Masks::default();
    assert!(masks.back().is_none(), "nobody is away");
    for step in 0..6 {
        for (key, follower) in (0..).zip(&here) {
            assert!(masks.lend(key, follower.clone(), 3).is_none());
        }
        let mut seen = vec![];
        while let Some((key, mut there)) = masks.back() {
            seen.push(key);
            let (there, here) = (mask(&mut there), mask(&mut here[key as usize]));
            assert_eq!(there, here, "{key} at {step}");
        }
        assert_eq!(seen, [0, 1, 2]);
        for follower in &mut here {
            // The first token that is allowed; at an end, a token that is not, which both refuse alike.
            let mask = mask(follower).unwrap_or_default();
            let token = (0..tokenizer.vocab_size()).find(|t| {
                mask.get(*t as usize / 32)
                    .is_some_and(|w| w >> (t % 32) & 1 == 1)
            });
            follower.advance(token.unwrap_or(0));
        }
    }
}

#[test]
fn a_mask_is_computed_anew_after_a_token() {
    let tokenizer = tokenizer();
    let mut follower = follower(&tokenizer, "ab");
    follower.prepare();
    let before = mask(&mut follower).unwrap();
    let a = *tokenizer.encode("a", false).unwrap().first().unwrap();
    follower.advance(a);
    let after = mask(&mut follower).unwrap();
    assert_ne!(before, after);
    follower.give_up();
    assert!(follower.allowed().is_err());
}
