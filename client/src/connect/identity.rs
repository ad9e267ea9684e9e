//! What a client shows a scheduler, and what it asks to be shown.

use std::{
    fmt,
    io::Read as _,
    path::{Path, PathBuf},
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use http::HeaderValue;

/// Environment variable that holds a bearer token.
pub const TOKEN_VARIABLE: &str = "HOTCELL_TOKEN";
/// Environment variable that names a file with one.
pub const TOKEN_FILE_VARIABLE: &str = "HOTCELL_TOKEN_FILE";
/// Environment variable that names the authority of schedulers' certificates, in PEM.
pub const CA_VARIABLE: &str = "HOTCELL_CA";
/// Environment variable that names the client's certificate, in PEM.
pub const CERT_VARIABLE: &str = "HOTCELL_CLIENT_CERT";
/// Environment variable that names its key, in PEM.
pub const KEY_VARIABLE: &str = "HOTCELL_CLIENT_KEY";

/// What a client shows, and whom it believes. None of it is used on a Unix socket.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// The authority of the scheduler's certificate, in PEM; none: those that this host believes.
    pub ca: Option<PathBuf>,
    /// The client's certificate, in PEM, for a scheduler that asks for one.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
    /// A bearer token.
    pub token: Option<String>,
}

impl Identity {
    /// What the environment says: `HOTCELL_TOKEN` or `HOTCELL_TOKEN_FILE`, `HOTCELL_CA`, `HOTCELL_CLIENT_CERT` and
    /// `HOTCELL_CLIENT_KEY`.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`] or [`Reason::InvalidArgument`] for a token's file.
    pub fn from_environment() -> Result<Self, Error> {
        let token = match std::env::var(TOKEN_VARIABLE) {
            Ok(token) if !token.is_empty() => Some(token),
            _ => named(TOKEN_FILE_VARIABLE)
                .map(|file| read_token(&file))
                .transpose()?,
        };
        Ok(Self {
            token,
            ..Self::paths_of_environment()
        })
    }

    /// The same without a token.
    pub(crate) fn paths_of_environment() -> Self {
        Self {
            ca: named(CA_VARIABLE),
            cert: named(CERT_VARIABLE),
            key: named(KEY_VARIABLE),
            token: None,
        }
    }

    /// The header that shows the token, if there is one.
    pub(crate) fn header(&self) -> Result<Option<HeaderValue>, Error> {
        let header = |token: &String| {
            let value = HeaderValue::try_from(format!("Bearer {}", token.trim()));
            let fits = token.len() <= limits::MAX_BEARER + 2;
            let mut value = value.ok().filter(|_| fits).ok_or_else(|| {
                Error::new(
                    Reason::InvalidArgument,
                    "what should be a token is none; `hotcell token new` makes them",
                )
            })?;
            value.set_sensitive(true);
            Ok(value)
        };
        self.token.as_ref().map(header).transpose()
    }
}

/// The path that a variable holds.
fn named(variable: &str) -> Option<PathBuf> {
    let value = std::env::var_os(variable).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

/// Reads a token from a file.
///
/// # Errors
/// [`Reason::FileNotFound`].
pub fn read_token(path: &Path) -> Result<String, Error> {
    let read = || {
        let mut text = String::new();
        // One that is longer is refused by its length.
        let most = limits::MAX_BEARER as u64 + 3;
        std::fs::File::open(path)?
            .take(most)
            .read_to_string(&mut text)?;
        Ok::<_, std::io::Error>(text.trim().to_owned())
    };
    read().map_err(|e| {
        let what = format!("cannot read the token's file {}: {e}", path.display());
        Error::new(Reason::FileNotFound, what)
    })
}

/// Without the token, which belongs into no log.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("ca", &self.ca)
            .field("cert", &self.cert)
            .field("key", &self.key)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .finish()
    }
}
