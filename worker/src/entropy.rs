//! Random bytes of the system.

use hotcell_proto::error::{Error, Reason};

/// So many random bytes.
///
/// # Errors
/// [`Reason::Internal`] when the system gives none.
pub fn bytes<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0u8; N];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(n) if n == N => Ok(bytes),
        _ => Err(Error::new(
            Reason::Internal,
            "the system gives no random numbers",
        )),
    }
}
