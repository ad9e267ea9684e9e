//! Checked identifiers: a value of these types is known to be within its limits.

use std::fmt;

use crate::{
    error::{Error, Reason},
    limits,
};

/// A model's name as requests use it: 1 to 128 letters, digits, `-`, `_`, `.`, `/` or `:`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelName(String);

/// A layout in which a device likes weights: 1 to 32 letters, digits, `-` or `.`; it begins with none of the two.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Layout(String);

/// A request's id: 1 to 64 letters, digits, `-` or `_`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(String);

/// Counts the processes that served one lease; a handle of an older epoch is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u64);

fn check(
    what: &str,
    text: &str,
    limit: usize,
    extra: &[char],
    reason: Reason,
) -> Result<(), Error> {
    let fits = (1..=limit).contains(&text.len());
    let plain = |c: char| c.is_ascii_alphanumeric() || extra.contains(&c);
    if fits && text.chars().all(plain) {
        return Ok(());
    }
    let shown: String = text.chars().take(40).collect();
    Err(Error::new(
        reason,
        format!(
            "{what} {shown:?} must be 1 to {limit} letters, digits or one of {:?}",
            extra.iter().collect::<String>()
        ),
    ))
}

impl ModelName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for an empty, long or oddly spelt name.
    pub fn new(name: impl Into<String>) -> Result<Self, Error> {
        let name = name.into();
        check(
            "the model name",
            &name,
            limits::MAX_MODEL_NAME,
            &['-', '_', '.', '/', ':'],
            Reason::InvalidArgument,
        )?;
        Ok(Self(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Layout {
    /// Checks a layout's name.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for an empty, long or oddly spelt name.
    pub fn new(name: impl Into<String>) -> Result<Self, Error> {
        let name = name.into();
        let plain = name.trim_start_matches(['-', '.']);
        check(
            "the layout",
            // It is part of a file's name.
            if plain.len() == name.len() { &name } else { "" },
            limits::MAX_LAYOUT,
            &['-', '.'],
            Reason::InvalidArgument,
        )?;
        Ok(Self(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl RequestId {
    /// Checks an id.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for an empty, long or oddly spelt id.
    pub fn new(id: impl Into<String>) -> Result<Self, Error> {
        let id = id.into();
        check(
            "the request id",
            &id,
            limits::MAX_REQUEST_ID,
            &['-', '_'],
            Reason::InvalidArgument,
        )?;
        Ok(Self(id))
    }

    /// A new random id of 128 bits.
    ///
    /// # Errors
    /// [`Reason::Internal`] when the system gives no random bytes.
    pub fn random() -> Result<Self, Error> {
        let mut bytes = [0u8; 16];
        getrandom::fill(&mut bytes)
            .map_err(|e| Error::new(Reason::Internal, format!("no random bytes: {e}")))?;
        Ok(Self(format!("r-{:032x}", u128::from_ne_bytes(bytes))))
    }

    /// The id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_plain() {
        assert!(ModelName::new("llama-3.1/8b:q4_0").is_ok());
        for bad in ["", "a b", "a\n", "ä", &"x".repeat(129)] {
            assert!(ModelName::new(bad).is_err(), "{bad:?}");
        }
        assert!(RequestId::new("../etc").is_err());
        assert!(Layout::new("panel16-1").is_ok());
        for bad in ["", "..", "-a", "a/b", "a_b", &"x".repeat(33)] {
            assert!(Layout::new(bad).is_err(), "{bad:?}");
        }
        let (a, b) = (RequestId::random().unwrap(), RequestId::random().unwrap());
        assert_ne!(a, b);
        assert!(RequestId::new(a.as_str()).is_ok());
    }
}
