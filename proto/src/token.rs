//! Bearer tokens: what a client shows, and the salted hash of it that a scheduler keeps.
//!
//! A token is `NAME.SECRET`, 32 random bytes as 64 hexadecimal digits. What is kept is `sha256:SALT:HASH`, the hash of
//! the salt and the secret's digits. A secret of 256 random bits needs no slow hash: nobody can try them.

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::{
    error::{Error, Reason},
    limits,
    receipt::{Hash, hex},
    session::random_bytes,
};

/// The kind of a kept hash.
const KIND: &str = "sha256";
/// Digits of a secret.
const SECRET: usize = 64;

/// The hash of a token's secret, with its salt.
#[derive(Clone, PartialEq, Eq)]
pub struct Kept {
    salt: [u8; 16],
    hash: Hash,
}

/// A new token, to be shown once, and what is kept of it.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a name that is none, [`Reason::Internal`] when the system gives no random bytes.
pub fn make(name: &str) -> Result<(String, Kept), Error> {
    check_name(name)?;
    let secret = hex(&random_bytes::<32>()?);
    let salt = random_bytes()?;
    let kept = Kept {
        salt,
        hash: hash(&salt, &secret),
    };
    Ok((format!("{name}.{secret}"), kept))
}

/// Name and secret of a token; none if it is not of that form.
pub fn split(token: &str) -> Option<(&str, &str)> {
    if token.len() > limits::MAX_BEARER {
        return None;
    }
    let (name, secret) = token.rsplit_once('.')?;
    let digits = secret.len() == SECRET && secret.bytes().all(|b| b.is_ascii_hexdigit());
    (digits && check_name(name).is_ok()).then_some((name, secret))
}

/// Checks the name of a tenant that a token or a limit is for.
///
/// # Errors
/// [`Reason::InvalidArgument`].
pub fn check_tenant(name: &str) -> Result<(), Error> {
    let most = limits::MAX_TENANT;
    if (1..=most).contains(&name.chars().count()) {
        return Ok(());
    }
    let shown: String = name.chars().take(most).collect();
    let what = format!("tenant {shown:?}: a name has 1 to {most} characters");
    Err(Error::new(Reason::InvalidArgument, what))
}

/// Checks a token's name: letters, digits, - and _.
///
/// # Errors
/// [`Reason::InvalidArgument`].
pub fn check_name(name: &str) -> Result<(), Error> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    match (1..=limits::MAX_TOKEN_NAME).contains(&name.len()) && name.bytes().all(plain) {
        true => Ok(()),
        false => Err(Error::new(
            Reason::InvalidArgument,
            format!(
                "a token's name is 1 to {} letters, digits, - or _",
                limits::MAX_TOKEN_NAME
            ),
        )),
    }
}

fn hash(salt: &[u8], secret: &str) -> Hash {
    let hash = Sha256::new_with_prefix(salt).chain_update(secret.to_ascii_lowercase());
    hash.finalize().into()
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

impl Kept {
    /// Reads what [`fmt::Display`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let (kind, salt, hash) = (parts.next()?, parts.next()?, parts.next()?);
        (kind == KIND && parts.next().is_none()).then_some(())?;
        Some(Self {
            salt: unhex(salt)?,
            hash: unhex(hash)?,
        })
    }

    /// Whether this is the secret's hash. How long it takes says nothing about how much of it is right.
    pub fn fits(&self, secret: &str) -> bool {
        hash(&self.salt, secret).ct_eq(&self.hash).into()
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{KIND}:{}:{}", hex(&self.salt), hex(&self.hash))
    }
}

/// Not even the hash belongs into a log.
impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept(…)")
    }
}

/// Seconds since 1970 of a time such as `2026-12-31T23:59:59Z`, always UTC; none for anything else.
pub fn parse_time(text: &str) -> Option<u64> {
    let shape = |(at, byte): (usize, u8)| match at {
        4 | 7 => byte == b'-',
        10 => byte == b'T',
        13 | 16 => byte == b':',
        19 => byte == b'Z',
        _ => byte.is_ascii_digit(),
    };
    if text.len() != 20 || !text.bytes().enumerate().all(shape) {
        return None;
    }
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let days = (1970..=9999)
        .contains(&year)
        .then(|| days(year, month, day))?;
    // A day that the month does not have is another one when it is written again.
    let known = (1..=12).contains(&month) && date(days) == (year, month, day);
    let valid = known && hour < 24 && minute < 60 && second < 60;
    valid.then(|| days * 86_400 + hour * 3600 + minute * 60 + second)
}

/// A time as [`parse_time`] reads it; the last one that has four digits for its year if it is later.
pub fn write_time(seconds: u64) -> String {
    let seconds = seconds.min(253_402_300_799);
    let (year, month, day) = date(seconds / 86_400);
    let left = seconds % 86_400;
    let (hour, minute) = (left / 3600, left / 60 % 60);
    format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:02}Z",
        left % 60
    )
}

/// Days from 1970-01-01 to a date of the Gregorian calendar from 1970 on. Years begin in March here, so that the leap
/// day is the last one.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = match month > 2 {
        true => (year, month - 3),
        false => (year - 1, month + 9),
    };
    let before = year * 365 + year / 4 - year / 100 + year / 400;
    // 719468 of them before 1970-01-01.
    (before + (153 * month + 2) / 5 + day).saturating_sub(719_469)
}

/// The date so many days after 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let year = era * 400 + year;
    match month < 10 {
        true => (year, month + 3, of_month),
        false => (year + 1, month - 9, of_month),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_a_name_that_is_not_too_long() {
        assert_eq!(check_tenant("é"), Ok(()));
        assert_eq!(check_tenant(&"é".repeat(limits::MAX_TENANT)), Ok(()));
        for bad in [String::new(), "x".repeat(limits::MAX_TENANT + 1)] {
            let error = check_tenant(&bad).unwrap_err();
            assert_eq!(error.reason(), Reason::InvalidArgument, "{error}");
        }
    }

    #[test]
    fn a_token_fits_what_is_kept_of_it_and_no_other_does() {
        let (token, kept) = make("alice").unwrap();
        let (other, _) = make("alice").unwrap();
        let (name, secret) = split(&token).unwrap();
        assert_eq!(name, "alice");
        assert!(kept.fits(secret));
        assert!(!kept.fits(split(&other).unwrap().1));
        let read = Kept::parse(&kept.to_string()).unwrap();
        assert_eq!(read, kept);
        assert!(!kept.to_string().contains(secret) && !format!("{kept:?}").contains(':'));
        // `hashlib.sha256(bytes(16) + b"0" * 64)`.
        let known = "sha256:00000000000000000000000000000000:\
                     7b980a4b4c33337c128d6cf9fd1829ed919c97c76bdf3164a22a0175bb484c4f";
        assert!(Kept::parse(known).unwrap().fits(&"0".repeat(SECRET)));
    }

    #[test]
    fn what_is_no_token_or_hash_is_refused() {
        let secret = "0".repeat(SECRET);
        for text in [
            "",
            ".",
            "a.",
            "a.b",
            &format!(".{secret}"),
            &format!("a b.{secret}"),
            &secret,
        ] {
            assert_eq!(split(text), None, "{text}");
        }
        assert_eq!(split(&format!("{}.{secret}", "x".repeat(200))), None);
        for text in ["", "sha256", "sha256::", "sha256:00:00", "md5:00:00"] {
            assert_eq!(Kept::parse(text), None, "{text}");
        }
        assert!(make("a.b").is_err() && make("").is_err());
    }

    #[test]
    fn times_are_read_as_they_are_written() {
        // `date -u -d … +%s`.
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T12:00:00Z", 951_825_600),
            ("2026-11-21T23:16:41Z", 1_795_303_001),
            ("9999-12-31T23:59:59Z", 253_402_300_799),
        ] {
            assert_eq!(parse_time(text), Some(seconds), "{text}");
            assert_eq!(write_time(seconds), text);
        }
        for text in [
            "",
            "2026-11-21",
            "2026-02-30T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "2026-01-00T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00+",
            "2026-01-01 00:00:00Z",
        ] {
            assert_eq!(parse_time(text), None, "{text}");
        }
        assert!(write_time(u64::MAX).starts_with("9999"));
    }
}
