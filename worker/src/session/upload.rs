//! An unfinished upload: memory that the connection's thread fills, and that outlives a broken connection.

use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

use hotcell_kernels::host::Staging;
use hotcell_proto::error::{Error, Reason};
use sha2::{Digest, Sha256};

use super::{account::Charge, invalid};

/// Bytes hashed between two looks whether anybody waits for them.
const HASH_PIECE: usize = 1 << 20;

/// Bytes on their way. The session and the call that fills them share it.
pub struct Upload {
    total: usize,
    inner: Mutex<Inner>,
}

struct Inner {
    /// `None` once it is complete.
    memory: Option<(Staging, Charge)>,
    /// Bytes from the start without gaps.
    uploaded: usize,
    /// Which call fills it: the latest.
    call: u64,
    /// Of the bytes from the start, so many, that came in order while a checksum was promised.
    running: Option<(Sha256, usize)>,
}

impl Upload {
    /// Nothing has come yet.
    pub fn new(staging: Staging, charge: Charge) -> Self {
        Self {
            total: staging.bytes().len(),
            inner: Mutex::new(Inner {
                memory: Some((staging, charge)),
                uploaded: 0,
                call: 0,
                running: None,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it is held.
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Bytes in all.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Bytes that have come, from the start without gaps.
    pub fn uploaded(&self) -> usize {
        self.lock().uploaded
    }

    /// Begins a call that fills it from `offset`; an earlier call that still does is cut off.
    /// `checksum`: one is promised.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when that would leave a gap.
    pub fn begin(&self, offset: usize, checksum: bool) -> Result<u64, Error> {
        let mut inner = self.lock();
        if offset > inner.uploaded {
            let what = format!(
                "the upload cannot resume at {offset}, {} bytes have come",
                inner.uploaded
            );
            return Err(invalid(what).with("uploaded", inner.uploaded));
        }
        inner.running = match (checksum, offset, inner.running.take()) {
            (true, 0, _) => Some((Sha256::new(), 0)),
            (true, _, Some((hash, to))) if to == offset => Some((hash, to)),
            _ => None,
        };
        inner.call += 1;
        Ok(inner.call)
    }

    /// Writes a chunk.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when it does not fit, [`Reason::Cancelled`] when another call took over.
    pub fn write(&self, call: u64, offset: usize, data: &[u8]) -> Result<(), Error> {
        let mut inner = self.lock();
        check_call(&inner, call)?;
        let end = offset.checked_add(data.len());
        let end = end.filter(|&end| end <= self.total && offset <= inner.uploaded);
        let (Some(end), Some((staging, _))) = (end, inner.memory.as_mut()) else {
            let what = format!(
                "{} bytes at {offset} do not fit a tensor of {}",
                data.len(),
                self.total
            );
            return Err(invalid(what));
        };
        if let Some(place) = staging.bytes_mut().get_mut(offset..end) {
            place.copy_from_slice(data);
        }
        inner.uploaded = inner.uploaded.max(end);
        if let Some((hash, to)) = &mut inner.running {
            if *to == offset {
                hash.update(data);
                *to = end;
            } else {
                inner.running = None;
            }
        }
        Ok(())
    }

    /// Compares what has come with its promised SHA-256, where it was hashed as it came. Returns whether it was.
    ///
    /// # Errors
    /// As [`Upload::verify`].
    pub fn verify_at_once(&self, call: u64, expected: &[u8]) -> Result<bool, Error> {
        let mut inner = self.lock();
        check_call(&inner, call)?;
        match inner.running.take() {
            Some((hash, to)) if to == self.total => {
                inner.compare(&hash.finalize(), expected).map(|()| true)
            }
            _ => Ok(false),
        }
    }

    /// Compares what has come with its promised SHA-256; if it differs, the upload has to begin again.
    ///
    /// # Errors
    /// [`Reason::ChecksumMismatch`], and [`Reason::Cancelled`] once `stop` is set.
    pub fn verify(&self, call: u64, expected: &[u8], stop: &AtomicBool) -> Result<(), Error> {
        // Taken out while it is read: whoever asks for the lock meanwhile must not wait so long.
        let taken = {
            let mut inner = self.lock();
            check_call(&inner, call)?;
            inner.memory.take()
        };
        let Some((staging, charge)) = taken else {
            return Ok(());
        };
        let found = sha256(staging.bytes(), stop);
        let mut inner = self.lock();
        inner.memory = Some((staging, charge));
        inner.compare(&found?, expected)
    }

    /// Takes the memory if it is complete.
    ///
    /// # Errors
    /// [`Reason::Cancelled`] when another call took over.
    pub fn take(&self, call: u64) -> Result<Option<(Staging, Charge)>, Error> {
        let mut inner = self.lock();
        check_call(&inner, call)?;
        match inner.uploaded == self.total {
            true => Ok(inner.memory.take()),
            false => Ok(None),
        }
    }
}

impl Inner {
    fn compare(&mut self, found: &[u8], expected: &[u8]) -> Result<(), Error> {
        if found == expected {
            return Ok(());
        }
        self.uploaded = 0;
        let what = "the uploaded bytes have another SHA-256 than was promised; upload them again";
        Err(Error::new(Reason::ChecksumMismatch, what))
    }
}

fn check_call(inner: &Inner, call: u64) -> Result<(), Error> {
    match inner.call == call {
        true => Ok(()),
        false => Err(Error::new(
            Reason::Cancelled,
            "another call resumed this upload",
        )),
    }
}

/// SHA-256 of some bytes, until `stop` is set.
///
/// # Errors
/// [`Reason::Cancelled`] then.
pub fn sha256(bytes: &[u8], stop: &AtomicBool) -> Result<[u8; 32], Error> {
    let mut hash = Sha256::new();
    for piece in bytes.chunks(HASH_PIECE) {
        if stop.load(Ordering::Acquire) {
            return Err(Error::new(Reason::Cancelled, "the call was cancelled"));
        }
        hash.update(piece);
    }
    Ok(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::account::Account;

    #[test]
    fn a_resumed_upload_has_no_gaps_and_one_writer() {
        let staging = Staging::new("a test", 4).unwrap();
        let charge = Account::new(4, None).charge("a test", 4).unwrap();
        let upload = Upload::new(staging, charge);
        let first = upload.begin(0, true).unwrap();
        upload.write(first, 0, &[1, 2]).unwrap();
        assert!(upload.write(first, 3, &[9]).is_err(), "a gap");
        assert!(upload.write(first, 2, &[0; 3]).is_err(), "too much");
        assert!(upload.write(first, usize::MAX, &[0; 3]).is_err());
        assert!(upload.begin(3, true).is_err());
        let second = upload.begin(2, true).unwrap();
        let refused = upload.write(first, 2, &[3]).unwrap_err();
        assert_eq!(refused.reason(), Reason::Cancelled);
        assert!(upload.take(second).unwrap().is_none());
        upload.write(second, 2, &[3, 4]).unwrap();
        // python3 -c 'import hashlib; print(hashlib.sha256(bytes([1,2,3,4])).hexdigest())'
        let sum = "9f64a747e1b97f131fabb6b447296c9b6f0201e79fb3c5356e6c77e89b6a806a";
        let sum: Vec<u8> = (0..32)
            .map(|i| u8::from_str_radix(&sum[2 * i..2 * i + 2], 16).unwrap())
            .collect();
        let stop = AtomicBool::new(false);
        upload.verify(second, &sum, &stop).unwrap();
        assert!(upload.verify_at_once(second, &sum).unwrap(), "in order");
        assert!(!upload.verify_at_once(second, &sum).unwrap(), "once");
        stop.store(true, Ordering::Release);
        let stopped = upload.verify(second, &sum, &stop).unwrap_err();
        assert_eq!(stopped.reason(), Reason::Cancelled);
        let (staging, _) = upload.take(second).unwrap().unwrap();
        assert_eq!(staging.bytes(), [1, 2, 3, 4]);
    }
}
