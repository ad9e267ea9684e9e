//! A caller's deadline as gRPC carries it: the `grpc-timeout` header.
//!
//! tonic's own timeout covers the response future, not the stream, so each side reads the header, owns
//! the timer and forwards what remains.

use std::time::{Duration, Instant};

use tonic::{codegen::http::HeaderMap, metadata::MetadataMap};

use crate::error::{Error, Reason};

/// Name of the header.
pub const HEADER: &str = "grpc-timeout";

/// More than anyone waits; keeps the clock's arithmetic in range.
const MOST: Duration = Duration::from_secs(30 * 86_400);

/// Reads the header's value: up to 8 digits and a unit.
///
/// # Errors
/// [`Reason::InvalidArgument`] for anything else.
pub fn parse(value: &str) -> Result<Duration, Error> {
    let wrong = || {
        let shown: String = value.chars().take(20).collect();
        Error::new(
            Reason::InvalidArgument,
            format!("grpc-timeout {shown:?} is not up to 8 digits and one of H, M, S, m, u, n"),
        )
    };
    let unit = value.chars().next_back().ok_or_else(wrong)?;
    let digits = value
        .get(..value.len() - unit.len_utf8())
        .unwrap_or_default();
    let plain = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    let count: u64 = digits.parse().ok().filter(|_| plain).ok_or_else(wrong)?;
    Ok(match unit {
        'H' => Duration::from_secs(count * 3600),
        'M' => Duration::from_secs(count * 60),
        'S' => Duration::from_secs(count),
        'm' => Duration::from_millis(count),
        'u' => Duration::from_micros(count),
        'n' => Duration::from_nanos(count),
        _ => return Err(wrong()),
    })
}

/// When the call that came with this metadata must be over; `None` without a deadline.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a malformed header.
pub fn of(metadata: &MetadataMap) -> Result<Option<Instant>, Error> {
    of_headers(metadata.as_ref())
}

/// As [`of`], for a call that was not taken apart yet.
///
/// # Errors
/// As [`of`].
pub fn of_headers(headers: &HeaderMap) -> Result<Option<Instant>, Error> {
    let Some(value) = headers.get(HEADER) else {
        return Ok(None);
    };
    let timeout = parse(value.to_str().unwrap_or("?"))?;
    Ok(Instant::now().checked_add(timeout.min(MOST)))
}

/// What a call says that has passed its deadline.
pub fn passed() -> Error {
    Error::new(
        Reason::DeadlineExceeded,
        "the deadline passed before there was an answer; allow more time",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_nonsense_is_refused() {
        assert_eq!(parse("3S").ok(), Some(Duration::from_secs(3)));
        assert_eq!(parse("250m").ok(), Some(Duration::from_millis(250)));
        assert_eq!(
            parse("99999999H").ok(),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        for bad in ["", "S", "1", "-1S", "1 S", "123456789S", "1x", "1é"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
