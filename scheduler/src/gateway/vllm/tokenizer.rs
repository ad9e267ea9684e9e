//! A model's tokenizer for gateways that tokenise themselves: a zip archive of its files' bytes, as they are, or as a worker
//! writes them for a model that keeps its tokenizer in a file of its own kind.
//!
//! Nothing of them is read but their bytes. The archive is stored, not compressed, and has no times in it, so that it is
//! the same for the same files; each file is read once for its checksum and once to be sent, so that little is held.

use std::{
    fs::File,
    io,
    os::{fd::BorrowedFd, unix::fs::FileExt},
    sync::Arc,
};

use hotcell_gateways::smg::GetTokenizerChunk;
use hotcell_ipc::memory::sealed_memory;
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
};
use sha2::{Digest, Sha256};
use tokio::{sync::mpsc::Sender, task::spawn_blocking};
use tonic::Status;

use crate::{
    digest,
    fleet::Fleet,
    vault::{self, OpenModel},
};

/// Bytes of one piece: gateways take messages of 4 MiB, and others' engines send as many.
const PIECE: usize = 64 << 10;
/// Files that say how to tokenise and how chats are written.
const FILES: &[&str] = &[
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// One file of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    /// Which of the model's files.
    index: usize,
    bytes: u32,
    crc: u32,
    /// Where it begins in the archive.
    offset: u32,
}

/// An archive to be sent.
#[derive(Debug)]
pub(super) struct Archive {
    files: Arc<OpenModel>,
    entries: Vec<Entry>,
}

fn belongs(name: &str) -> bool {
    FILES.contains(&name) || name.ends_with(".jinja")
}

fn is_tokenizer(name: &str) -> bool {
    name.starts_with("tokenizer.")
}

/// The files of a model's tokenizer: its own, or those that a worker that has it writes.
///
/// # Errors
/// Of a model that is not there, and as [`Fleet::read_tokenizer`].
pub(super) async fn files(fleet: &Arc<Fleet>, model: &ModelName) -> Result<Arc<OpenModel>, Error> {
    let own = fleet.files(model)?;
    if own.each().any(|(name, ..)| is_tokenizer(name)) {
        return Ok(own);
    }
    let (_, _using) = fleet.awake(model.as_str()).await?;
    let written = fleet.read_tokenizer(model).await?;
    // Copying may take a while.
    let made = spawn_blocking(move || {
        let file =
            |(name, bytes): (&str, Vec<u8>)| Ok((name.to_owned(), sealed_memory(name, &bytes)?));
        written
            .into_iter()
            .map(file)
            .collect::<io::Result<Vec<_>>>()
    });
    let made = made.await.unwrap_or_else(|e| Err(io::Error::other(e)));
    let made = made.map_err(|e| {
        let what = format!("no memory for the tokenizer of model {model}: {e}");
        Error::new(Reason::Internal, what)
    })?;
    vault::adopt(model, made).map(Arc::new)
}

/// A file's bytes from `at` on, at most `most`.
fn read(fd: BorrowedFd<'_>, at: u64, most: usize) -> io::Result<Vec<u8>> {
    let file = File::from(fd.try_clone_to_owned()?);
    let mut bytes = vec![0; most];
    // Not by the descriptor's own offset, which others share.
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

/// The next piece of what is left.
fn piece(left: u64) -> usize {
    usize::try_from(left).map_or(PIECE, |left| left.min(PIECE))
}

fn checksum(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<u32> {
    let mut crc = crc32fast::Hasher::new();
    let mut at = 0;
    while at < bytes {
        let part = read(fd, at, piece(bytes - at))?;
        crc.update(&part);
        at += part.len() as u64;
    }
    Ok(crc.finalize())
}

fn unreadable(model: &ModelName, error: &io::Error) -> Error {
    let what = format!("a file of model {model} cannot be read: {error}");
    Error::new(Reason::FileNotFound, what).with("model", model)
}

impl Archive {
    /// Of a model's files.
    ///
    /// # Errors
    /// [`Reason::ModelUnsupported`] if no file of it is a tokenizer's, [`Reason::ModelChanged`], [`Reason::LimitExceeded`],
    /// [`Reason::FileNotFound`].
    pub(super) async fn of(model: &ModelName, files: Arc<OpenModel>) -> Result<Self, Error> {
        files.check()?;
        let held = Arc::clone(&files);
        let entries = spawn_blocking(move || entries(&held)).await;
        let entries = entries.unwrap_or_else(|e| Err(io::Error::other(e)));
        let entries = entries.map_err(|error| match error.kind() {
            io::ErrorKind::FileTooLarge => {
                let what = format!(
                    "the tokenizer of model {model} has more than {} MiB",
                    limits::MAX_TOKENIZER_BYTES >> 20
                );
                Error::new(Reason::LimitExceeded, what).with("model", model)
            }
            _ => unreadable(model, &error),
        })?;
        if !entries.iter().any(|e| is_tokenizer(&e.name)) {
            let what = format!(
                "model {model} has no tokenizer.json; give the gateway one by its --tokenizer-path"
            );
            return Err(Error::new(Reason::ModelUnsupported, what).with("model", model));
        }
        Ok(Self { files, entries })
    }

    /// Sends it, piece by piece; the last one carries the digest of all. Ends when nobody wants more of it.
    pub(super) async fn send(self, to: Sender<Result<GetTokenizerChunk, Status>>) {
        let mut out = Out {
            to,
            piece: Vec::with_capacity(PIECE),
            sha: Sha256::new(),
        };
        // An error means that the client left, or was told.
        let _ = self.write(&mut out).await;
    }

    async fn write(&self, out: &mut Out) -> Result<(), Gone> {
        for entry in &self.entries {
            out.put(&local_header(entry)).await?;
            let bytes = u64::from(entry.bytes);
            let mut at = 0;
            while at < bytes {
                let (files, index) = (Arc::clone(&self.files), entry.index);
                let part = spawn_blocking(move || {
                    let (_, _, fd) = files.each().nth(index).ok_or(io::ErrorKind::NotFound)?;
                    read(fd, at, piece(bytes - at))
                });
                let part = part.await.unwrap_or_else(|e| Err(io::Error::other(e)));
                let part = match part {
                    Ok(part) => part,
                    Err(error) => {
                        let what = format!("the file {} cannot be read: {error}", entry.name);
                        let error = Error::new(Reason::ModelChanged, what);
                        return out.fail(error.into()).await;
                    }
                };
                at += part.len() as u64;
                out.put(&part).await?;
            }
        }
        out.put(&directory(&self.entries)).await?;
        out.end().await
    }
}

/// The client went away, or was told that there is no more.
struct Gone;

/// Cuts an archive into pieces.
struct Out {
    to: Sender<Result<GetTokenizerChunk, Status>>,
    piece: Vec<u8>,
    sha: Sha256,
}

impl Out {
    async fn put(&mut self, mut bytes: &[u8]) -> Result<(), Gone> {
        self.sha.update(bytes);
        while !bytes.is_empty() {
            let room = PIECE.saturating_sub(self.piece.len());
            // The last piece goes with the digest.
            if room == 0 {
                let data = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
                self.say(data, String::new()).await?;
                continue;
            }
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.piece.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), Gone> {
        let data = std::mem::take(&mut self.piece);
        let sha = digest::hex(&std::mem::take(&mut self.sha).finalize().into());
        self.say(data, sha).await
    }

    async fn say(&self, data: Vec<u8>, sha256: String) -> Result<(), Gone> {
        let chunk = GetTokenizerChunk { data, sha256 };
        self.to.send(Ok(chunk)).await.map_err(|_| Gone)
    }

    async fn fail(&self, status: Status) -> Result<(), Gone> {
        let _ = self.to.send(Err(status)).await;
        Err(Gone)
    }
}

/// The files of the archive, with their checksums and places.
fn entries(files: &OpenModel) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut all = 0u64;
    let mut offset = 0u32;
    for (index, (name, bytes, fd)) in files.each().enumerate() {
        if !belongs(name) {
            continue;
        }
        all = all.saturating_add(bytes);
        let bytes = u32::try_from(bytes)
            .ok()
            .filter(|_| all <= limits::MAX_TOKENIZER_BYTES);
        let bytes = bytes.ok_or(io::ErrorKind::FileTooLarge)?;
        let entry = Entry {
            name: name.to_owned(),
            index,
            bytes,
            crc: checksum(fd, u64::from(bytes))?,
            offset,
        };
        // Far below the format's 4 GiB: a model has 1024 files at most, with names of 255 bytes.
        let header = u32::try_from(local_header(&entry).len()).unwrap_or(u32::MAX);
        offset = offset.saturating_add(header).saturating_add(bytes);
        entries.push(entry);
    }
    Ok(entries)
}

/// The first of January 1980, the format's beginning of time.
const DAY: u16 = 0x21;
/// The version that is needed to read it, 2.0, and that names are UTF-8.
const VERSION: u16 = 20;
const UTF8: u16 = 1 << 11;

/// What stands about a file before its bytes and in the directory alike.
fn described(entry: &Entry) -> Vec<u8> {
    let name = u16::try_from(entry.name.len()).unwrap_or(u16::MAX);
    let mut bytes = Vec::new();
    // Version, flags, stored, time, day.
    for word in [VERSION, UTF8, 0, 0, DAY] {
        bytes.extend(word.to_le_bytes());
    }
    // Checksum, size here and there.
    for long in [entry.crc, entry.bytes, entry.bytes] {
        bytes.extend(long.to_le_bytes());
    }
    // Lengths of the name and of what else there is.
    for word in [name, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

fn local_header(entry: &Entry) -> Vec<u8> {
    let mut bytes = b"PK\x03\x04".to_vec();
    bytes.extend(described(entry));
    bytes.extend(entry.name.as_bytes());
    bytes
}

/// What stands after all files.
fn directory(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in entries {
        bytes.extend(b"PK\x01\x02");
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(described(entry));
        // No comment, first disk, no attributes (2 + 2 + 2 + 4 bytes).
        bytes.extend([0; 10]);
        bytes.extend(entry.offset.to_le_bytes());
        bytes.extend(entry.name.as_bytes());
    }
    let begin = entries.last().map_or(0, |last| {
        let header = u32::try_from(local_header(last).len()).unwrap_or(u32::MAX);
        last.offset
            .saturating_add(header)
            .saturating_add(last.bytes)
    });
    let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let count = u16::try_from(entries.len()).unwrap_or(u16::MAX);
    bytes.extend(b"PK\x05\x06");
    // One disk; all files on it.
    for word in [0, 0, count, count] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(size.to_le_bytes());
    bytes.extend(begin.to_le_bytes());
    // No comment.
    bytes.extend([0; 2]);
    bytes
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    fn model(files: &[(&str, &[u8])]) -> (ModelName, Arc<OpenModel>) {
        let name = ModelName::new("m").unwrap();
        let file = |(name, bytes): &(&str, &[u8])| {
            ((*name).to_owned(), sealed_memory(name, bytes).unwrap())
        };
        let files = files.iter().map(file).collect();
        let model = vault::adopt(&name, files).unwrap();
        (name, Arc::new(model))
    }

    #[tokio::test]
    async fn an_archive_is_in_small_pieces_and_the_last_has_the_digest_of_all() {
        let long: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let (name, files) = model(&[
            ("model.safetensors", b"weights"),
            ("tokenizer.json", &long),
            ("chat.jinja", b"{{ x }}"),
        ]);
        let archive = Archive::of(&name, files).await.unwrap();
        let (to, mut from) = mpsc::channel(1);
        tokio::spawn(archive.send(to));
        let (mut all, mut sha) = (Vec::new(), String::new());
        while let Some(chunk) = from.recv().await {
            let chunk = chunk.unwrap();
            assert!(sha.is_empty() && chunk.data.len() <= PIECE);
            all.extend(chunk.data);
            sha = chunk.sha256;
        }
        assert_eq!(sha, digest::hex(&Sha256::digest(&all).into()));
        // Both files are there, in the order of their names, and no weights.
        assert!(all.starts_with(b"PK\x03\x04"));
        let at = |what: &[u8]| all.windows(what.len()).position(|w| w == what);
        assert!(at(b"chat.jinja").unwrap() < at(b"tokenizer.json").unwrap());
        assert!(at(&long).is_some() && at(b"weights").is_none());
        // The end says where the directory begins.
        let end = &all[all.len() - 22..];
        let begin = u32::from_le_bytes(end[16..20].try_into().unwrap()) as usize;
        assert_eq!(&all[begin..begin + 4], b"PK\x01\x02");
        assert_eq!(&end[8..12], [2, 0, 2, 0]);
    }

    #[tokio::test]
    async fn a_model_without_a_tokenizers_files_says_so() {
        let (name, files) = model(&[("m.gguf", b"GGUF"), ("config.json", b"{}")]);
        let error = Archive::of(&name, files).await.unwrap_err();
        assert_eq!(error.reason(), Reason::ModelUnsupported);
        assert!(error.message().contains("--tokenizer-path"), "{error}");
    }
}
