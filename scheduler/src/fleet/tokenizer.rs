//! A model's tokenizer as a worker that has it writes it down, for models whose files have none that others can read.

use std::{collections::BTreeMap, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{ReadTokenizerRequest, TokenizerPiece},
};
use tokio::time::timeout;

use super::{Fleet, words};

/// How long the worker may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// The files that it writes.
const FILES: [&str; 3] = ["config.json", "tokenizer.json", "tokenizer_config.json"];

/// Files by name.
type Files = BTreeMap<&'static str, Vec<u8>>;

/// What came so far: a stranger's words.
#[derive(Debug, Default)]
struct Reading {
    whole: Files,
    /// The one whose pieces come.
    open: Option<(&'static str, Vec<u8>)>,
    bytes: u64,
}

fn wrong(what: &str) -> Error {
    let what = format!("the worker's tokenizer makes no sense: {what}");
    Error::new(Reason::ProtocolViolation, what)
}

impl Reading {
    fn take(&mut self, piece: TokenizerPiece) -> Result<(), Error> {
        let name = FILES.into_iter().find(|name| *name == piece.name);
        let name = name.ok_or_else(|| wrong("a file that is none"))?;
        if self.whole.contains_key(name) {
            return Err(wrong("a file twice"));
        }
        self.bytes = self.bytes.saturating_add(piece.data.len() as u64);
        if self.bytes > limits::MAX_TOKENIZER_BYTES {
            let most = limits::MAX_TOKENIZER_BYTES >> 20;
            let what = format!("the model's tokenizer has more than {most} MiB");
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        let (open, mut data) = self.open.take().unwrap_or((name, Vec::new()));
        if open != name {
            return Err(wrong("a file that has no end"));
        }
        if piece.data.is_empty() {
            self.whole.insert(name, data);
        } else {
            data.extend(piece.data);
            self.open = Some((name, data));
        }
        Ok(())
    }

    fn end(self) -> Result<Files, Error> {
        match self.open {
            None if self.whole.contains_key("tokenizer.json") => Ok(self.whole),
            _ => Err(wrong("not all of it came")),
        }
    }
}

impl Fleet {
    /// A model's tokenizer as files of the names in which others keep one: tokenizer.json at least.
    ///
    /// # Errors
    /// What the worker says; [`Reason::WorkerLost`] if there is none or it does not end, [`Reason::ProtocolViolation`],
    /// [`Reason::LimitExceeded`].
    pub async fn read_tokenizer(&self, model: &ModelName) -> Result<Files, Error> {
        let lost = |why: &str| Error::new(Reason::WorkerLost, format!("{why}; try again"));
        let holders = self.holders(model).into_iter();
        let mut holders = holders.map(|(link, _)| link);
        let none = || lost("no worker has the model that could write its tokenizer");
        let link = holders.next().ok_or_else(none)?;
        let reading = async {
            let request = ReadTokenizerRequest {
                model: model.as_str().to_owned(),
            };
            let pieces = link.control().read_tokenizer(request).await;
            let mut pieces = pieces.map_err(|s| words(&s))?.into_inner();
            let mut reading = Reading::default();
            while let Some(piece) = pieces.message().await.map_err(|s| words(&s))? {
                reading.take(piece)?;
            }
            reading.end()
        };
        let read = timeout(PATIENCE, reading).await;
        read.unwrap_or_else(|_| Err(lost("the worker did not write the tokenizer in time")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[(&str, &str)]) -> Result<Files, Error> {
        let mut reading = Reading::default();
        for (name, data) in pieces {
            reading.take(TokenizerPiece {
                name: (*name).to_owned(),
                data: data.as_bytes().to_vec(),
            })?;
        }
        reading.end()
    }

    #[test]
    fn files_come_in_pieces_and_what_else_comes_is_refused() {
        let whole = [
            ("config.json", "{}"),
            ("config.json", ""),
            ("tokenizer.json", "{\"a\""),
            ("tokenizer.json", ":1}"),
            ("tokenizer.json", ""),
        ];
        let files = read(&whole).unwrap();
        assert_eq!(files["tokenizer.json"], b"{\"a\":1}");
        let twice = [whole.as_slice(), &[("config.json", "x")]].concat();
        for (pieces, why) in [
            (&whole[..2], "not all"),
            (&whole[..4], "not all"),
            (&[whole[0], whole[2]][..], "no end"),
            (&[("../x", "a")][..], "none"),
            (&twice, "twice"),
        ] {
            let error = read(pieces).unwrap_err();
            assert_eq!(error.reason(), Reason::ProtocolViolation);
            assert!(error.message().contains(why), "{error}");
        }
    }

    #[test]
    fn no_more_is_taken_than_a_tokenizer_may_have() {
        let mut reading = Reading {
            bytes: limits::MAX_TOKENIZER_BYTES,
            ..Reading::default()
        };
        let error = reading.take(TokenizerPiece {
            name: "tokenizer.json".into(),
            data: vec![0],
        });
        assert_eq!(error.unwrap_err().reason(), Reason::LimitExceeded);
    }
}
