//! TLS to a scheduler: version 1.3, by rustls.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::identity::Identity;

/// Where hosts keep the authorities that they believe.
const BELIEVED: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
];

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let fail = |why: String| {
        let what = format!("cannot use {}: {why}", path.display());
        Error::new(Reason::FileNotFound, what)
    };
    let size = std::fs::metadata(path).map_err(|e| fail(e.to_string()))?;
    if size.len() > limits::MAX_ACCESS_FILE {
        return Err(fail(format!("it has {} bytes", size.len())));
    }
    std::fs::read(path).map_err(|e| fail(e.to_string()))
}

fn wrong(path: &Path, why: impl std::fmt::Display) -> Error {
    let what = format!("cannot use {}: {why}", path.display());
    Error::new(Reason::InvalidArgument, what)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let bytes = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|e| wrong(path, e))?;
    match found.is_empty() {
        true => Err(wrong(path, "it holds no certificate in PEM")),
        false => Ok(found),
    }
}

fn roots(ca: Option<&PathBuf>) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|e| wrong(path, e))?;
            }
        }
        None => {
            let path = BELIEVED.iter().map(Path::new).find(|path| path.is_file());
            let path = path.ok_or_else(|| {
                Error::new(
                    Reason::InvalidArgument,
                    "this host has no list of authorities; name the scheduler's with --tls-ca FILE",
                )
            })?;
            // Some of the many may be of a kind that is not known here.
            roots.add_parsable_certificates(certificates(path)?);
        }
    }
    Ok(roots)
}

/// Makes connections to one `host:port`.
#[derive(Clone)]
pub(super) struct Tls {
    authority: String,
    name: ServerName<'static>,
    connector: TlsConnector,
}

impl Tls {
    /// To `authority`, as `identity`.
    pub fn new(authority: &str, identity: &Identity) -> Result<Self, Error> {
        let (host, _) = authority.rsplit_once(':').unwrap_or((authority, ""));
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(|e| {
            let what = format!("{host:?} is no name that a certificate could have: {e}");
            Error::new(Reason::InvalidArgument, what)
        })?;
        let internal = |e: rustls::Error| Error::new(Reason::Internal, e.to_string());
        let begin = ClientConfig::builder_with_provider(ring::default_provider().into())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(internal)?
            .with_root_certificates(roots(identity.ca.as_ref())?);
        let mut config = match (&identity.cert, &identity.key) {
            (Some(cert), Some(key)) => {
                let found = PrivateKeyDer::from_pem_slice(&read(key)?);
                let found =
                    found.map_err(|e| wrong(key, format!("it holds no key in PEM: {e}")))?;
                let with = begin.with_client_auth_cert(certificates(cert)?, found);
                with.map_err(|e| wrong(cert, e))?
            }
            (None, None) => begin.with_no_client_auth(),
            _ => {
                let what = "a client's certificate and its key go together: --tls-cert FILE --tls-key FILE";
                return Err(Error::new(Reason::InvalidArgument, what));
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self {
            authority: authority.to_owned(),
            name,
            connector: TlsConnector::from(Arc::new(config)),
        })
    }

    /// A new connection.
    pub async fn open(self) -> io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(&self.authority).await?;
        stream.set_nodelay(true)?;
        self.connector.connect(self.name, stream).await
    }
}
