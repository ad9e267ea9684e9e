//! TLS of the TCP door: version 1.3, by rustls.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio_rustls::TlsAcceptor;

use super::tokens::read_file;

/// HTTP/2, which is all that is spoken at the door for gRPC.
const HTTP2: &[u8] = b"h2";
/// What is spoken at the door for HTTP besides.
const HTTP1: &[u8] = b"http/1.1";

/// Where certificates and key are, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The scheduler's certificate, and those between it and its authority.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority whose certificates clients have to show; none: they need none.
    pub client_ca: Option<PathBuf>,
    /// The doors that speak TLS.
    pub doors: Vec<TlsDoor>,
}

/// A door that can speak TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsDoor {
    /// That of `--listen`.
    Grpc,
    /// That of `--http`.
    Http,
}

impl TlsDoor {
    /// All of them.
    pub const ALL: &'static [TlsDoor] = &[TlsDoor::Grpc, TlsDoor::Http];
}

impl TlsFiles {
    /// All of them.
    pub fn paths(&self) -> Vec<PathBuf> {
        let own = [self.cert.clone(), self.key.clone()];
        own.into_iter().chain(self.client_ca.clone()).collect()
    }
}

/// The TLS of a door, which may change while it is open.
#[derive(Debug)]
pub struct Tls {
    /// Where it comes from.
    pub files: TlsFiles,
    config: RwLock<Both>,
}

/// The same for doors of both kinds.
#[derive(Debug)]
struct Both {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = read_file(path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let read = read.map_err(|e| format!("{}: {e}", path.display()))?;
    match read.is_empty() {
        true => Err(format!("{} holds no certificate in PEM", path.display())),
        false => Ok(read),
    }
}

fn config(files: &TlsFiles) -> Result<Both, String> {
    let provider: Arc<CryptoProvider> = ring::default_provider().into();
    let chain = certificates(&files.cert)?;
    let key = PrivateKeyDer::from_pem_slice(&read_file(&files.key)?)
        .map_err(|e| format!("{} holds no key in PEM: {e}", files.key.display()))?;
    let begin = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| e.to_string())?;
    let begin = match &files.client_ca {
        None => begin.with_no_client_auth(),
        Some(path) => {
            let wrong = |e: String| format!("{}: {e}", path.display());
            let mut roots = RootCertStore::empty();
            for root in certificates(path)? {
                roots.add(root).map_err(|e| wrong(e.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider)
                .build()
                .map_err(|e| wrong(e.to_string()))?;
            begin.with_client_cert_verifier(verifier)
        }
    };
    let wrong = |e| {
        let (cert, key) = (files.cert.display(), files.key.display());
        format!("the certificate {cert} and the key {key} cannot be used: {e}")
    };
    let mut config = begin.with_single_cert(chain, key).map_err(wrong)?;
    config.alpn_protocols = vec![HTTP2.to_vec()];
    let mut http = config.clone();
    http.alpn_protocols.push(HTTP1.to_vec());
    Ok(Both {
        grpc: Arc::new(config),
        http: Arc::new(http),
    })
}

/// Where hosts keep the authorities that they believe.
const BELIEVED: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
];

/// TLS to another scheduler, whose certificate is of this authority; none: one that this host believes.
///
/// # Errors
/// Words that name the file that is wrong.
pub fn believing(ca: Option<&Path>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            for root in certificates(path)? {
                let wrong = |e| format!("{}: {e}", path.display());
                roots.add(root).map_err(wrong)?;
            }
        }
        None => {
            let path = BELIEVED.iter().map(Path::new).find(|path| path.is_file());
            let path = path.ok_or("this host has no list of authorities; name one")?;
            // Some of the many may be of a kind that is not known here.
            roots.add_parsable_certificates(certificates(path)?);
        }
    }
    let mut config = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![HTTP2.to_vec()];
    Ok(config)
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Words that name the one that is wrong.
    pub fn read(files: TlsFiles) -> Result<Self, String> {
        let config = RwLock::new(config(&files)?);
        Ok(Self { files, config })
    }

    /// Reads them again, for connections that come from now on.
    ///
    /// # Errors
    /// As [`read`](Self::read); nothing has changed then.
    pub fn reread(&self) -> Result<(), String> {
        let new = config(&self.files)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// What greets the next connection, at the door for HTTP or at that for gRPC.
    pub fn acceptor(&self, http: bool) -> TlsAcceptor {
        let config = self.config.read().unwrap_or_else(PoisonError::into_inner);
        TlsAcceptor::from(Arc::clone(if http { &config.http } else { &config.grpc }))
    }
}
