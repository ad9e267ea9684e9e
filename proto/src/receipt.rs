//! Receipts: hashes of a request and of its output, so that the one can be run again and the other be checked.
//!
//! Numbers are little-endian, counts and lengths 64 bits wide, floats their bits; an optional value is a byte that says
//! whether it is there, and then the value. All hashes are SHA-256.

use prost::Message;
use sha2::{Digest, Sha256};

use crate::v1::{FinishReason, GenerateRequest, NumericsClass, Receipt, Sampling, grammar::Kind};

/// A SHA-256.
pub type Hash = [u8; 32];

/// Tells one request from another, whatever its id. Only equal bytes are the same request: a seed or default left
/// open differs from the same one filled in.
pub fn fingerprint(request: &GenerateRequest) -> Hash {
    let nameless = GenerateRequest {
        request_id: String::new(),
        ..request.clone()
    };
    Sha256::digest(nameless.encode_to_vec()).into()
}

struct Encoder(Sha256);

impl Encoder {
    fn new(what: &str) -> Self {
        Self(Sha256::new().chain_update(what))
    }

    fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    fn ids(&mut self, ids: &[u32]) {
        self.number(ids.len() as u64);
        for id in ids {
            self.0.update(id.to_le_bytes());
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    fn option(&mut self, bits: Option<u32>) {
        self.0.update([u8::from(bits.is_some())]);
        if let Some(bits) = bits {
            self.0.update(bits.to_le_bytes());
        }
    }

    fn float(&mut self, value: Option<f32>) {
        self.option(value.map(f32::to_bits));
    }
}

/// Of all in a request that determines its output besides the model. What was generated elsewhere before is output.
pub fn request_hash(prompt_ids: &[u32], seed: u64, request: &GenerateRequest) -> Hash {
    let mut to = Encoder::new("hotcell request 1\n");
    to.ids(prompt_ids);
    to.number(seed);
    to.number(u64::from(request.branch));
    to.number(u64::from(request.max_tokens));
    to.number(u64::from(request.ignore_eos));
    to.ids(&request.stop_tokens);
    to.number(request.stop.len() as u64);
    for stop in &request.stop {
        to.bytes(stop.as_bytes());
    }
    // All fields by name, so that a new one is not forgotten here.
    let Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
    } = request.sampling.clone().unwrap_or_default();
    to.float(temperature);
    to.option(top_k);
    for value in [
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
    ] {
        to.float(value);
    }
    to.number(logit_bias.len() as u64);
    for bias in &logit_bias {
        to.number(u64::from(bias.token));
        to.float(Some(bias.bias));
    }
    // Nothing without a grammar: such requests hash as they did before there were any.
    let grammar = request.grammar.as_ref().and_then(|g| g.kind.as_ref());
    if let Some((kind, texts)) = grammar.map(|kind| match kind {
        Kind::JsonSchema(text) => (1, vec![text.as_str()]),
        Kind::Regex(text) => (2, vec![text.as_str()]),
        Kind::Lark(text) => (3, vec![text.as_str()]),
        Kind::JsonObject(yes) => (4, vec![if *yes { "true" } else { "" }]),
        Kind::ToolCalls(calls) => {
            let tools = calls.tools.iter();
            let texts = tools.flat_map(|tool| [tool.name.as_str(), tool.parameters.as_str()]);
            (if calls.single { 6 } else { 5 }, texts.collect())
        }
    }) {
        to.number(kind);
        for text in texts {
            to.bytes(text.as_bytes());
        }
    }
    to.0.finalize().into()
}

/// Hashes an output while it comes.
#[derive(Clone, Debug)]
pub struct Output {
    ids: Sha256,
    count: u64,
    text: Option<Sha256>,
}

impl Output {
    /// Of a stream whose first tokens, and so many bytes of text, were said elsewhere.
    pub fn new(ids: &[u32], text_bytes: u64) -> Self {
        let mut output = Self {
            ids: Sha256::new(),
            count: 0,
            text: (text_bytes == 0).then(Sha256::new),
        };
        output.push(ids, "");
        output
    }

    /// Takes what was said next.
    pub fn push(&mut self, ids: &[u32], text: &str) {
        for id in ids {
            self.ids.update(id.to_le_bytes());
        }
        self.count += ids.len() as u64;
        if let Some(hash) = &mut self.text {
            hash.update(text);
        }
    }

    /// The hash of ids and end, and that of the text if all of it passed by.
    pub fn finish(self, reason: FinishReason, matched_stop: &str) -> (Hash, Option<Hash>) {
        let mut to = Encoder::new("hotcell output 1\n");
        to.number(self.count);
        to.0.update(self.ids.finalize());
        to.number(reason as u64);
        to.bytes(matched_stop.as_bytes());
        let text = self.text.map(|text| text.finalize().into());
        (to.0.finalize().into(), text)
    }
}

/// A receipt without deaths, in one class, by this version.
pub fn receipt(
    numerics: Option<NumericsClass>,
    seed: u64,
    request: Hash,
    (output, text): (Hash, Option<Hash>),
) -> Receipt {
    Receipt {
        numerics,
        seed,
        request_hash: request.to_vec(),
        output_hash: output.to_vec(),
        text_hash: text.map(Vec::from).unwrap_or_default(),
        deaths_survived: 0,
        continued_across: false,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// A hash as people read it: lower-case hexadecimal digits.
pub fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{Grammar, LogitBias, Tool, ToolCalls};

    fn grammar(kind: Kind) -> Option<Grammar> {
        Some(Grammar { kind: Some(kind) })
    }

    fn calls(name: &str, parameters: &str) -> Kind {
        let tool = Tool {
            name: name.into(),
            parameters: parameters.into(),
            ..Tool::default()
        };
        Kind::ToolCalls(ToolCalls {
            tools: vec![tool],
            single: false,
        })
    }

    fn request() -> GenerateRequest {
        GenerateRequest {
            sampling: Some(Sampling {
                temperature: Some(0.5),
                logit_bias: vec![LogitBias {
                    token: 3,
                    bias: 1.0,
                }],
                ..Sampling::default()
            }),
            max_tokens: 4,
            stop: vec!["ab".into()],
            ..GenerateRequest::default()
        }
    }

    #[test]
    fn whatever_determines_the_output_is_in_the_hash_and_nothing_else() {
        let of = |change: &dyn Fn(&mut GenerateRequest)| {
            let mut request = request();
            change(&mut request);
            request_hash(&[1, 2], 7, &request)
        };
        let plain = of(&|_| {});
        for change in [
            &(|r: &mut GenerateRequest| r.branch = 1) as &dyn Fn(&mut GenerateRequest),
            &|r| r.max_tokens = 5,
            &|r| r.ignore_eos = true,
            &|r| r.stop_tokens = vec![1],
            &|r| r.stop = vec!["a".into(), "b".into()],
            &|r| r.sampling = None,
            &|r| r.sampling.as_mut().unwrap().top_k = Some(0),
            &|r| r.sampling.as_mut().unwrap().top_p = Some(0.5),
            &|r| r.sampling.as_mut().unwrap().min_p = Some(0.5),
            &|r| r.sampling.as_mut().unwrap().logit_bias[0].bias = 2.0,
            &|r| r.grammar = grammar(Kind::Regex("a".into())),
        ] {
            assert_ne!(of(change), plain);
        }
        let kinds = [
            Kind::Regex("a".into()),
            Kind::Lark("a".into()),
            Kind::JsonSchema("a".into()),
            Kind::JsonSchema("b".into()),
            Kind::JsonObject(true),
            calls("a", "{}"),
            calls("b", "{}"),
            calls("a", "{ }"),
        ];
        let hashes = kinds.map(|kind| of(&|r| r.grammar = grammar(kind.clone())));
        for (i, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..i].contains(hash));
        }
        assert_ne!(request_hash(&[1], 7, &request()), plain);
        assert_ne!(request_hash(&[1, 2], 8, &request()), plain);
        for change in [
            &(|r: &mut GenerateRequest| r.request_id = "x".into()) as &dyn Fn(&mut GenerateRequest),
            &|r| r.model = "x".into(),
            &|r| r.logprobs = true,
        ] {
            assert_eq!(of(change), plain);
        }
    }

    #[test]
    fn a_request_is_the_same_under_any_id_only() {
        let named = |id: &str, max_tokens| GenerateRequest {
            request_id: id.into(),
            max_tokens,
            ..request()
        };
        assert_eq!(fingerprint(&named("a", 1)), fingerprint(&named("b", 1)));
        assert_ne!(fingerprint(&named("a", 1)), fingerprint(&named("a", 2)));
    }

    #[test]
    fn an_output_has_one_hash_however_it_came() {
        let whole = {
            let mut output = Output::new(&[], 0);
            output.push(&[1, 2, 3], "abc");
            output.finish(FinishReason::StopString, "x")
        };
        let mut pieces = Output::new(&[], 0);
        pieces.push(&[1], "a");
        pieces.push(&[], "bc");
        pieces.push(&[2, 3], "");
        assert_eq!(pieces.finish(FinishReason::StopString, "x"), whole);
        let mut resumed = Output::new(&[1, 2], 2);
        resumed.push(&[3], "c");
        let (ids, text) = resumed.finish(FinishReason::StopString, "x");
        assert_eq!((ids, text), (whole.0, None));
        // `printf abc | sha256sum`.
        assert_eq!(
            hex(&whole.1.unwrap()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        let other = |reason, stop| Output::new(&[1, 2, 3], 0).finish(reason, stop).0;
        assert_ne!(other(FinishReason::StopString, ""), whole.0);
        assert_ne!(other(FinishReason::EndToken, "x"), whole.0);
    }
}
