//! SHA-256 of models' files, by reading them: nothing is understood, and nobody waits who has something better to do.

use std::{
    fs::File,
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::Arc,
};

use sha2::{Digest, Sha256};
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use crate::vault::OpenModel;

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;

/// A digest.
pub type Sha = [u8; 32];

/// A digest in hexadecimal.
pub fn hex(sha: &Sha) -> String {
    sha.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A digest from 64 hexadecimal digits.
pub fn from_hex(text: &str) -> Option<Sha> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut sha = Sha::default();
    for (byte, pair) in sha.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(sha)
}

/// The digest of `len` bytes of a file, unless it is told to stop.
fn of_file(fd: BorrowedFd<'_>, len: u64, stop: &CancellationToken) -> io::Result<Sha> {
    let file = File::from(fd.try_clone_to_owned()?);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        if stop.is_cancelled() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let want = usize::try_from(len - at).map_or(CHUNK, |left| left.min(CHUNK));
        let Some(part) = buffer.get_mut(..want) else {
            break;
        };
        // Not by the descriptor's own offset, which others share.
        file.read_exact_at(part, at)?;
        hash.update(&*part);
        at += want as u64;
    }
    Ok(hash.finalize().into())
}

/// The digests of a model's files, in their order, computed on a thread where nobody is served. It ends when this is
/// dropped.
///
/// # Errors
/// What reading reports; `UnexpectedEof` for a file that was shortened.
pub async fn of_model(files: &Arc<OpenModel>) -> io::Result<Vec<Sha>> {
    let stop = CancellationToken::new();
    let _stops = stop.clone().drop_guard();
    let files = Arc::clone(files);
    let all = move || {
        let each = files.each();
        each.map(|(_, len, fd)| of_file(fd, len, &stop)).collect()
    };
    spawn_blocking(all).await.map_err(io::Error::other)?
}

/// One digest of several: of the names and digests of a model's files.
pub fn of_all<'a>(files: impl Iterator<Item = (&'a str, &'a Sha)>) -> Sha {
    let mut hash = Sha256::new();
    for (name, sha) in files {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update(sha);
    }
    hash.finalize().into()
}

/// Copies `len` bytes of a file to memory that is then sealed.
///
/// # Errors
/// What reading or sealing reports; `UnexpectedEof` for a file that was shortened.
pub fn sealed_copy(fd: BorrowedFd<'_>, len: u64) -> io::Result<OwnedFd> {
    let file = File::from(fd.try_clone_to_owned()?);
    let memory = hotcell_ipc::memory::unsealed_memory("hotcell-model", len)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        let want = usize::try_from(len - at).map_or(CHUNK, |left| left.min(CHUNK));
        let Some(part) = buffer.get_mut(..want) else {
            break;
        };
        file.read_exact_at(part, at)?;
        memory.write_all_at(part, at)?;
        at += want as u64;
    }
    hotcell_ipc::memory::seal(&memory)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_file_has_the_digest_that_everybody_computes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"abc").unwrap();
        let open = File::open(file.path()).unwrap();
        let never = CancellationToken::new();
        let sha = of_file(open.as_fd(), 3, &never).unwrap();
        // FIPS 180-2, appendix B.1.
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&sha), known);
        assert_eq!(from_hex(known), Some(sha));
        assert_eq!(from_hex(&known.to_uppercase()), Some(sha));
        for wrong in [
            "",
            "ba78",
            &known.replace('b', "x"),
            &format!("+{}", &known[1..]),
        ] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
        let shorter = of_file(open.as_fd(), 4, &never).unwrap_err();
        assert_eq!(shorter.kind(), io::ErrorKind::UnexpectedEof);
        let copy = sealed_copy(open.as_fd(), 3).unwrap();
        assert_eq!(of_file(copy.as_fd(), 3, &never).unwrap(), sha);
        assert!(hotcell_ipc::memory::is_immutable(&copy).unwrap());
        assert!(sealed_copy(open.as_fd(), 4).is_err());
        never.cancel();
        assert!(of_file(open.as_fd(), 3, &never).is_err());
    }

    #[test]
    fn names_are_part_of_the_digest_of_all() {
        let (a, b) = ([1; 32], [2; 32]);
        let one = of_all([("a", &a), ("b", &b)].into_iter());
        assert_ne!(one, of_all([("b", &a), ("a", &b)].into_iter()));
        assert_eq!(one, of_all([("a", &a), ("b", &b)].into_iter()));
    }
}
