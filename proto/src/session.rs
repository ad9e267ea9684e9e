//! Names of tensor sessions and of what they hold, as they travel.

use std::fmt;

use tonic::metadata::MetadataMap;

use crate::{
    error::{Error, Reason},
    ids::Epoch,
    v1,
};

/// Metadata key that names a call's session.
pub const SESSION_KEY: &str = "hotcell-session";
/// Metadata key by which OpenSession names a worker.
pub const WORKER_KEY: &str = "hotcell-worker";
/// Metadata key by which OpenSession names a device.
pub const DEVICE_KEY: &str = "hotcell-device";

/// Characters of a worker's id inside a session's name.
const MAX_WORKER: usize = 32;

/// A session's name: `WORKER.EPOCH.SECRET`. A relay routes by the first two; whoever knows the whole may use the session.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId {
    worker: String,
    epoch: Epoch,
    secret: u128,
}

impl SessionId {
    /// A new name with a random secret.
    ///
    /// # Errors
    /// [`Reason::Internal`] when the system gives no random bytes, [`Reason::InvalidArgument`] for an odd worker id.
    pub fn random(worker: &str, epoch: Epoch) -> Result<Self, Error> {
        check_worker(worker)?;
        let secret = u128::from_ne_bytes(random_bytes()?);
        Ok(Self {
            worker: worker.to_owned(),
            epoch,
            secret,
        })
    }

    /// Reads a name.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for anything that [`SessionId::fmt`] would not write.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let wrong = || {
            let what = format!("{SESSION_KEY} is not a session's name; OpenSession gives one");
            Error::new(Reason::InvalidArgument, what)
        };
        // From the end: a worker's id has dots of its own where it serves aside of another.
        let mut parts = text.rsplitn(3, '.');
        let (Some(secret), Some(epoch), Some(worker)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(wrong());
        };
        check_worker(worker)?;
        let digits = |s: &str| (1..=20).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_digit());
        let hex = |s: &str| s.len() == 32 && s.bytes().all(|b| b.is_ascii_hexdigit());
        if !digits(epoch) || !hex(secret) {
            return Err(wrong());
        }
        Ok(Self {
            worker: worker.to_owned(),
            epoch: Epoch(epoch.parse().map_err(|_| wrong())?),
            secret: u128::from_str_radix(secret, 16).map_err(|_| wrong())?,
        })
    }

    /// The name in a call's metadata.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there is none or it is malformed.
    pub fn of(metadata: &MetadataMap) -> Result<Self, Error> {
        let value = metadata.get(SESSION_KEY).and_then(|v| v.to_str().ok());
        let missing = || {
            let what = format!("the call names no session; put OpenSession's into {SESSION_KEY}");
            Error::new(Reason::InvalidArgument, what)
        };
        Self::parse(value.ok_or_else(missing)?)
    }

    /// Id of the worker.
    pub fn worker(&self) -> &str {
        &self.worker
    }

    /// Epoch of the worker.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{:032x}", self.worker, self.epoch, self.secret)
    }
}

/// Without the secret, which belongs into no log.
impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.…", self.worker, self.epoch)
    }
}

fn check_worker(worker: &str) -> Result<(), Error> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    match (1..=MAX_WORKER).contains(&worker.len()) && worker.bytes().all(plain) {
        true => Ok(()),
        false => Err(Error::new(
            Reason::InvalidArgument,
            "a worker's id is 1 to 32 letters, digits, -, _ or .",
        )),
    }
}

pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0u8; N];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => {
            let what = format!("the system gives no random bytes: {error}");
            Err(Error::new(Reason::Internal, what))
        }
    }
}

/// The id of a tensor, cache or plan inside its session: 128 random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandleId([u8; 16]);

impl HandleId {
    /// A new random id.
    ///
    /// # Errors
    /// [`Reason::Internal`] when the system gives no random bytes.
    pub fn random() -> Result<Self, Error> {
        random_bytes().map(Self)
    }

    /// An id that arrived.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] unless it is 16 bytes, not all zero.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, Error> {
        match <[u8; 16]>::try_from(bytes) {
            Ok(id) if id != [0; 16] => Ok(Self(id)),
            _ => Err(Error::new(
                Reason::InvalidArgument,
                "an id is 16 random bytes",
            )),
        }
    }

    /// Its bytes.
    pub fn to_wire(self) -> Vec<u8> {
        self.0.to_vec()
    }

    /// The handle of this id.
    pub fn handle(self, epoch: Epoch) -> v1::Handle {
        v1::Handle {
            epoch: epoch.0,
            id: self.to_wire(),
        }
    }

    /// Checks a handle that arrived against the process's epoch.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when it is absent or malformed, [`Reason::HandleStale`] when it is of another epoch.
    pub fn of(handle: Option<&v1::Handle>, epoch: Epoch) -> Result<Self, Error> {
        let missing = || Error::new(Reason::InvalidArgument, "a handle is missing");
        let handle = handle.ok_or_else(missing)?;
        let id = Self::from_wire(&handle.id)?;
        if handle.epoch != epoch.0 {
            let what = format!(
                "the handle is of epoch {}, the worker of epoch {epoch}; what it named is gone, open a new session",
                handle.epoch
            );
            return Err(Error::new(Reason::HandleStale, what));
        }
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_nothing_else_is_read() {
        let aside = SessionId::random("w0.solo12", Epoch(1)).unwrap();
        assert_eq!(SessionId::parse(&aside.to_string()).unwrap(), aside);
        let id = SessionId::random("w0", Epoch(7)).unwrap();
        assert_eq!(SessionId::parse(&id.to_string()).unwrap(), id);
        assert!(!format!("{id:?}").contains(&id.to_string()[5..]));
        let secret = "0".repeat(32);
        for bad in [
            "",
            "w0",
            "w0.1",
            "w0.1.00",
            &format!("w0.-1.{secret}"),
            &format!("w0.+1.{secret}"),
            &format!("w0.99999999999999999999.{secret}"),
            &format!("w 0.1.{secret}"),
            &format!("w0.1.{secret}0"),
            &format!("w0.1.+{}", &secret[1..]),
        ] {
            assert!(SessionId::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn handles_of_other_epochs_are_stale() {
        let id = HandleId::random().unwrap();
        let handle = id.handle(Epoch(3));
        assert_eq!(HandleId::of(Some(&handle), Epoch(3)).unwrap(), id);
        let reason = |e: Error| e.reason();
        assert_eq!(
            HandleId::of(Some(&handle), Epoch(4)).map_err(reason),
            Err(Reason::HandleStale)
        );
        assert_eq!(
            HandleId::of(None, Epoch(4)).map_err(reason),
            Err(Reason::InvalidArgument)
        );
        for bad in [vec![], vec![1; 15], vec![1; 17], vec![0; 16]] {
            assert!(HandleId::from_wire(&bad).is_err());
        }
    }
}
