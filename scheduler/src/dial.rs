//! Connections to other hosts, in clear text or over TLS.

use std::{io, path::Path, sync::Arc};

use http::uri::Authority;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::access;

/// Its host without brackets, as names and addresses are written elsewhere.
pub(crate) fn host(authority: &Authority) -> &str {
    authority
        .host()
        .trim_start_matches('[')
        .trim_end_matches(']')
}

/// Connects to `host:port` in clear text.
///
/// # Errors
/// When nobody is there.
pub(crate) async fn tcp(authority: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A `host:port` that is spoken to over TLS.
#[derive(Clone)]
pub(crate) struct Tls {
    authority: String,
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl Tls {
    /// One whose certificate is of the authority in this file, in PEM; none: of one that this host believes.
    ///
    /// # Errors
    /// Words that name what is wrong.
    pub(crate) fn to(authority: &Authority, ca: Option<&Path>) -> Result<Self, String> {
        let name = ServerName::try_from(host(authority).to_owned())
            .map_err(|e| format!("{authority} cannot have a certificate: {e}"))?;
        let config = access::believing(ca)?;
        Ok(Self {
            authority: authority.to_string(),
            connector: TlsConnector::from(Arc::new(config)),
            name,
        })
    }

    /// Connects, and agrees on keys.
    ///
    /// # Errors
    /// When nobody is there, or nobody who is believed.
    pub(crate) async fn open(&self) -> io::Result<TlsStream<TcpStream>> {
        let stream = tcp(&self.authority).await?;
        self.connector.connect(self.name.clone(), stream).await
    }
}
