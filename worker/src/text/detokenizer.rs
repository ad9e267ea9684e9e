//! Token ids to text as they come, never splitting a character.
//!
//! Our own instead of the `tokenizers` crate's decoders: a table of bytes by id, so that a token costs a copy and
//! not a walk through decoders over all that came before. The texts are the same, with one exception on purpose:
//! byte-fallback runs that are partly invalid UTF-8 keep their valid characters, as in SentencePiece (the crate
//! replaces the whole run, which cannot be known while streaming).

use std::collections::HashSet;
use std::sync::Arc;

use super::TextError;

/// How a vocabulary's strings stand for bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DecoderKind {
    /// Characters stand for bytes as in GPT-2.
    pub byte_level: bool,
    /// Replaced inside every piece, in order.
    pub replace: Vec<(String, String)>,
    /// `<0x0A>` stands for a byte.
    pub byte_fallback: bool,
    pub lead: Lead,
}

/// What is taken off the beginning of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Lead {
    #[default]
    Nothing,
    /// Up to so many of this byte.
    Strip(u8, usize),
    /// Every space of the first token (the Metaspace decoder).
    FirstToken,
}

/// The bytes of every token.
#[derive(Debug)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Where each token's bytes end; they begin where the previous one's end.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// An invalid byte sequence becomes one U+FFFD per byte (SentencePiece), not per sequence.
    per_byte: bool,
    lead: Lead,
}

impl Pieces {
    pub fn new(tokens: &[Option<String>], special: &HashSet<&str>, kind: DecoderKind) -> Self {
        let table = byte_table();
        let mut pieces = Self {
            bytes: Vec::new(),
            ends: Vec::with_capacity(tokens.len()),
            special: Vec::with_capacity(tokens.len()),
            per_byte: kind.byte_fallback,
            lead: kind.lead,
        };
        for token in tokens {
            let token = token.as_deref().unwrap_or_default();
            let fallback = if kind.byte_fallback {
                fallback_byte(token)
            } else {
                None
            };
            if let Some(byte) = fallback {
                pieces.bytes.push(byte);
            } else if kind.byte_level {
                push_byte_level(token, &table, &mut pieces.bytes);
            } else {
                let mut text = std::borrow::Cow::Borrowed(token);
                for (from, to) in &kind.replace {
                    text = text.replace(from.as_str(), to).into();
                }
                pieces.bytes.extend_from_slice(text.as_bytes());
            }
            // The tokenizer bounds all tokens together by MAX_TOKENIZER_BYTES.
            pieces
                .ends
                .push(u32::try_from(pieces.bytes.len()).unwrap_or(u32::MAX));
            pieces.special.push(special.contains(token));
        }
        pieces
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)? as usize;
        let start = if id == 0 {
            0
        } else {
            *self.ends.get(id - 1)? as usize
        };
        self.bytes.get(start..end)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// `<0x0A>` → 10.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 && hex.is_ascii() {
        u8::from_str_radix(hex, 16).ok()
    } else {
        None
    }
}

/// GPT-2's alphabet: the byte for each of the 256 characters below U+0144 that stand for one.
fn byte_table() -> [Option<u8>; 324] {
    let mut table = [None; 324];
    let mut next = 256;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let index = if printable {
            usize::from(byte)
        } else {
            next += 1;
            next - 1
        };
        table[index] = Some(byte);
    }
    table
}

/// A token with a character outside the alphabet (an added one) stands for itself.
fn push_byte_level(token: &str, table: &[Option<u8>], out: &mut Vec<u8>) {
    let start = out.len();
    for character in token.chars() {
        match table.get(character as usize).copied().flatten() {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// Turns ids into text as they come.
///
/// A piece is held back while its last character is incomplete. For a continuation, [`prime`](Self::prime) it with
/// the prompt: then the continuation's leading space is kept, and a character that the prompt began is completed. A
/// worker that takes over primes with the prompt and pushes the generated ids; the text is the same.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    pieces: Arc<Pieces>,
    skip_special: bool,
    lead: Lead,
    /// The first bytes of a character, at most 3.
    pending: Vec<u8>,
}

impl Detokenizer {
    pub(super) fn new(pieces: Arc<Pieces>, skip_special: bool) -> Self {
        let lead = pieces.lead;
        Self {
            pieces,
            skip_special,
            lead,
            pending: Vec::new(),
        }
    }

    /// What a token stands for by itself, cut to so many bytes: not always whole characters. Nothing for one outside the
    /// vocabulary.
    pub fn piece(&self, id: u32, most: usize) -> &[u8] {
        let piece = self.pieces.get(id).unwrap_or_default();
        piece.get(..most).unwrap_or(piece)
    }

    /// Reads the prompt without giving its text. The whole of it or a tail will do; the tail should contain a few tokens
    /// of text.
    pub fn prime(&mut self, prompt: &[u32]) {
        let mut ignored = String::new();
        for &id in prompt {
            self.push_into(id, &mut ignored);
            ignored.clear();
        }
    }

    /// Reads one token; gives the text that became certain by it, if any. Ids outside the vocabulary (a model's logits
    /// may be padded) stand for nothing.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let mut text = String::new();
        self.push_into(id, &mut text);
        if text.is_empty() { None } else { Some(text) }
    }

    /// As [`push`](Self::push), appending to `text`.
    pub fn push_into(&mut self, id: u32, text: &mut String) {
        let pieces = Arc::clone(&self.pieces);
        let Some(mut bytes) = pieces.get(id) else {
            return;
        };
        if self.skip_special && pieces.is_special(id) {
            return;
        }
        let stripped: Vec<u8>;
        match &mut self.lead {
            Lead::Nothing => {}
            Lead::Strip(byte, left) => {
                while *left > 0 && bytes.first() == Some(byte) {
                    bytes = &bytes[1..];
                    *left -= 1;
                }
                if !bytes.is_empty() {
                    self.lead = Lead::Nothing;
                }
            }
            Lead::FirstToken => {
                stripped = bytes.iter().copied().filter(|&byte| byte != b' ').collect();
                bytes = &stripped;
                self.lead = Lead::Nothing;
            }
        }
        if self.pending.is_empty()
            && let Ok(whole) = std::str::from_utf8(bytes)
        {
            text.push_str(whole);
            return;
        }
        self.pending.extend_from_slice(bytes);
        self.drain(text);
    }

    /// Moves what is certain from `pending` to `text`.
    fn drain(&mut self, text: &mut String) {
        let pending = std::mem::take(&mut self.pending);
        let mut rest = pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(invalid) = error.error_len() else {
                        self.pending.extend_from_slice(after);
                        return;
                    };
                    let count = if self.pieces.per_byte { invalid } else { 1 };
                    text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
                    rest = &after[invalid..];
                }
            }
        }
    }

    /// Gives what is still held back: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let pending = std::mem::take(&mut self.pending);
        let count = if self.pieces.per_byte {
            pending.len()
        } else {
            usize::from(!pending.is_empty())
        };
        std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count).collect()
    }
}

impl DecoderKind {
    /// Reads the `decoder` of a tokenizer.json.
    pub fn from_json(decoder: &serde_json::Value) -> Result<Self, TextError> {
        let mut kind = Self::default();
        let mut fused = false;
        kind.read(decoder, &mut fused, 0)?;
        Ok(kind)
    }

    fn read(
        &mut self,
        decoder: &serde_json::Value,
        fused: &mut bool,
        depth: usize,
    ) -> Result<(), TextError> {
        let name = decoder["type"].as_str().unwrap_or("none");
        let unsupported =
            || TextError::Unsupported(format!("the decoder {}", super::tokenizer::clip(name)));
        let text = |key: &str| {
            decoder[key]
                .as_str()
                .map(str::to_owned)
                .ok_or_else(unsupported)
        };
        match name {
            "Sequence" if depth < 4 => {
                for part in decoder["decoders"]
                    .as_array()
                    .ok_or_else(unsupported)?
                    .iter()
                    .take(32)
                {
                    self.read(part, fused, depth + 1)?;
                }
            }
            "ByteLevel" if !self.byte_fallback && self.replace.is_empty() => self.byte_level = true,
            "ByteFallback" if !self.byte_level && !*fused => self.byte_fallback = true,
            "Fuse" => *fused = true,
            "Replace" if !*fused && !self.byte_level && self.replace.len() < 8 => {
                let from = decoder["pattern"]["String"]
                    .as_str()
                    .filter(|p| !p.is_empty())
                    .ok_or_else(unsupported)?;
                let to = text("content")?;
                super::bounded("a decoder's replacement, in bytes,", to.len(), 64)?;
                self.replace.push((from.to_owned(), to));
            }
            "Strip"
                if *fused && decoder["stop"].as_u64() == Some(0) && self.lead == Lead::Nothing =>
            {
                let content = text("content")?;
                let start = decoder["start"]
                    .as_u64()
                    .and_then(|n| usize::try_from(n).ok())
                    .ok_or_else(unsupported)?;
                match content.as_bytes() {
                    [byte] if byte.is_ascii() => self.lead = Lead::Strip(*byte, start),
                    _ => return Err(unsupported()),
                }
            }
            "Metaspace" if !self.byte_level && depth == 0 => {
                self.replace.push((text("replacement")?, " ".to_owned()));
                // Files of before 2023 have `add_prefix_space` instead.
                let never =
                    decoder["prepend_scheme"] == "never" || decoder["add_prefix_space"] == false;
                self.lead = if never {
                    Lead::Nothing
                } else {
                    Lead::FirstToken
                };
            }
            _ => return Err(unsupported()),
        }
        Ok(())
    }
}
