//! The other Hotcell that streams go to when this one drains: where it is, and connections to it.

use std::{
    fmt, io,
    path::PathBuf,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    receipt::hex,
    v1::{CancelStreamRequest, DetokenizeRequest, tokens_client::TokensClient},
};
use http::uri::Authority;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Deserializer, de::Error as _};
use tokio::{net::UnixStream, sync::Semaphore, time::timeout};
use tonic::{
    Request,
    metadata::{Ascii, MetadataMap, MetadataValue},
    transport::{Channel, Endpoint},
};

use crate::{
    access::{self, Caller, Role},
    dial::{self, host, tcp},
    fleet::{TOKENS_WINDOWS, is_broken},
};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);
/// How often a TCP connection's other end is asked whether it is there, and how long it may take to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long it may take the other Hotcell to hear that a stream is not wanted.
const CANCEL: Duration = Duration::from_secs(1);
/// How long it may take to answer, if one of its streams is silent.
const ANSWER: Duration = Duration::from_secs(2);
/// Streams that are offered at once; the others go on meanwhile.
const OFFERS: usize = 64;
/// Streams of one connection: some below the calls that a scheduler allows one from another host, and no more than
/// [`TOKENS_WINDOWS`] are made for.
const STREAMS_OF_LINE: usize = 200;
const _: () = assert!(STREAMS_OF_LINE <= limits::MAX_WORKER_REQUESTS);
/// Connections at most: as many as all streams of a scheduler need.
const LINES: usize = limits::MAX_SCHEDULER_REQUESTS.div_ceil(STREAMS_OF_LINE);

/// Metadata of a call that offers a stream of a host that drains.
const OFFER: &str = "hotcell-handover";
/// Metadata of its answer: the tenant that the stream runs for there, whose name may have any letters, in hexadecimal.
const TENANT: &str = "hotcell-tenant";

/// Whether a call offers a stream of a host that drains, which is to be told for whom it runs here.
pub(crate) fn is_offer(asked: &MetadataMap) -> bool {
    asked.contains_key(OFFER)
}

/// The error of an offer by somebody for whom it would be another tenant's stream here.
pub(crate) fn no_handover(caller: &Caller) -> Error {
    let what = format!(
        "{} has the role {} and may hand over the streams of its own tenant only; those of all tenants take the role admin",
        caller.name, caller.roles
    );
    Error::new(Reason::PermissionDenied, what).with("role", Role::Admin.name())
}

/// Tells that host for whom it runs here.
pub(crate) fn tell_tenant(answer: &mut MetadataMap, tenant: &str) {
    // Hexadecimal digits always fit.
    if let Ok(tenant) = hex(tenant.as_bytes()).parse() {
        answer.insert(TENANT, tenant);
    }
}

/// Where a Hotcell listens: `unix:/path`, `http://host:port` or `https://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// `host:port`, spoken to in clear text.
    Tcp(Authority),
    /// `host:port`, spoken to over TLS.
    Tls(Authority),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!(
                "the address {text:?} {why}; write unix:/path, http://host:port or https://host:port"
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            // unix:///path is the URI spelling of unix:/path.
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path.starts_with('/') {
                true => Ok(Self::Unix(path.into())),
                false => Err(wrong("names no absolute path")),
            };
        }
        let (authority, kind): (&str, fn(Authority) -> Self) = match text.split_once("://") {
            Some(("https", authority)) => (authority, Self::Tls),
            Some(("http", authority)) => (authority, Self::Tcp),
            _ => return Err(wrong("is of no kind that is known")),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let authority: Authority = authority
            .parse()
            .map_err(|_| wrong("has no host that can be used"))?;
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(wrong("has no host that can be used"));
        }
        match authority.port_u16() {
            None | Some(0) => Err(wrong("has no valid port")),
            Some(_) => Ok(kind(authority)),
        }
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(authority) => write!(f, "http://{authority}"),
            Self::Tls(authority) => write!(f, "https://{authority}"),
        }
    }
}

impl Address {
    /// Whether what is sent there in clear text can be read beyond this host.
    pub fn is_exposed(&self) -> bool {
        let Self::Tcp(authority) = self else {
            return false;
        };
        let address = host(authority).parse::<std::net::IpAddr>();
        let here = host(authority).eq_ignore_ascii_case("localhost");
        !here && !address.is_ok_and(|address| address.is_loopback())
    }
}

/// The other Hotcell, as the settings tell of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainTo {
    /// Where it listens.
    pub address: Address,
    /// File of the bearer token that it asks for, of the role admin there.
    pub token: Option<PathBuf>,
    /// Authority of its certificate, in PEM; none: those that this host believes.
    pub ca: Option<PathBuf>,
}

impl DrainTo {
    /// Reads the files. Nothing is connected before the first stream goes there.
    ///
    /// # Errors
    /// Words that name the file that is wrong.
    pub fn open(&self) -> Result<Elsewhere, String> {
        let shown = self.token.as_ref().map(|path| {
            let wrong = || format!("{} holds no token", path.display());
            let bytes = access::read_file(path)?;
            let text = std::str::from_utf8(&bytes).map_err(|_| wrong())?.trim();
            let fits = (1..=limits::MAX_BEARER).contains(&text.len());
            let value: Option<MetadataValue<Ascii>> = format!("Bearer {text}").parse().ok();
            let mut value = value.filter(|_| fits).ok_or_else(wrong)?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        });
        let tls = match &self.address {
            Address::Tls(authority) => Some(dial::Tls::to(authority, self.ca.as_deref())?),
            Address::Unix(_) | Address::Tcp(_) => None,
        };
        Ok(Elsewhere {
            address: self.address.clone(),
            tls,
            shown: shown.transpose()?,
            lines: Mutex::default(),
            offers: Arc::new(Semaphore::new(OFFERS)),
            taken: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        })
    }
}

/// A connection, and one of these for each stream on it.
type Line = (Channel, Arc<()>);

/// The other Hotcell while this one drains.
pub struct Elsewhere {
    address: Address,
    tls: Option<dial::Tls>,
    shown: Option<MetadataValue<Ascii>>,
    lines: Mutex<Vec<Line>>,
    /// A permit for each stream that is being offered.
    pub(crate) offers: Arc<Semaphore>,
    taken: AtomicU64,
    refused: AtomicU64,
    /// Whether it was said that it takes streams for another tenant's.
    warned: AtomicBool,
}

impl fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Elsewhere({})", self.address)
    }
}

impl fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl Elsewhere {
    /// A channel that connects when it is first used, and again when its connection broke.
    fn channel(&self) -> Channel {
        // The name is never resolved; it becomes the `:authority` of each request.
        let endpoint = TOKENS_WINDOWS
            .endpoint(Endpoint::from_static("http://scheduler.invalid"))
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        match &self.address {
            Address::Unix(path) => {
                let path = path.clone();
                endpoint.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
                    let path = path.clone();
                    async move { UnixStream::connect(path).await.map(TokioIo::new) }
                }))
            }
            Address::Tcp(authority) => {
                let authority = authority.to_string();
                endpoint.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
                    let authority = authority.clone();
                    async move { tcp(&authority).await.map(TokioIo::new) }
                }))
            }
            Address::Tls(_) => {
                let tls = self.tls.clone();
                endpoint.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
                    let tls = tls.clone();
                    async move {
                        let missing = || io::Error::from(io::ErrorKind::InvalidInput);
                        let stream = tls.ok_or_else(missing)?.open().await?;
                        Ok::<_, io::Error>(TokioIo::new(stream))
                    }
                }))
            }
        }
    }

    /// A connection with room for one more stream, which has it for as long as it holds what comes with it.
    pub(crate) fn line(&self) -> (TokensClient<Channel>, Arc<()>) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let free = |line: &&Line| Arc::strong_count(&line.1) <= STREAMS_OF_LINE;
        let (channel, seat) = match lines.iter().find(free) {
            Some(line) => line.clone(),
            // More streams than a scheduler has are never there: the last one is as good as any.
            None if lines.len() >= LINES => match lines.last() {
                Some(line) => line.clone(),
                None => (self.channel(), Arc::default()),
            },
            None => {
                let line: Line = (self.channel(), Arc::default());
                lines.push(line.clone());
                line
            }
        };
        let client = TokensClient::new(channel)
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES);
        (client, seat)
    }

    /// Shows who asks.
    pub(crate) fn sign<T>(&self, mut request: Request<T>) -> Request<T> {
        if let Some(shown) = &self.shown {
            let metadata = request.metadata_mut();
            metadata.insert("authorization", shown.clone());
        }
        request
    }

    /// The same for a stream that it is to take over.
    pub(crate) fn offering<T>(&self, request: Request<T>) -> Request<T> {
        let mut request = self.sign(request);
        let metadata = request.metadata_mut();
        metadata.insert(OFFER, MetadataValue::from_static("1"));
        request
    }

    /// Whether it answered an offer by running the stream for its own tenant.
    pub(crate) fn took_for(&self, answer: &MetadataMap, tenant: &str) -> bool {
        let told = answer.get(TENANT).map(MetadataValue::as_bytes);
        let same = told == Some(hex(tenant.as_bytes()).as_bytes());
        if !same {
            self.warn_of_tenants();
        }
        same
    }

    /// Says, once, that it takes no streams of all tenants.
    pub(crate) fn warn_of_tenants(&self) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                to = %self,
                "streams stay here that would run for another tenant there: the token at the other host has to be one \
                 that may speak for all tenants, of the role admin"
            );
        }
    }

    /// Whether it answers any call.
    pub(crate) async fn answers(&self) -> bool {
        let (mut client, _seat) = self.line();
        let request = self.sign(Request::new(DetokenizeRequest::default()));
        match timeout(ANSWER, client.detokenize(request)).await {
            Ok(Err(status)) => !is_broken(&status),
            Ok(Ok(_)) => true,
            Err(_) => false,
        }
    }

    /// Tells it that a stream is not wanted there. One that does not hear it ends for want of a reader.
    pub(crate) async fn cancel(&self, request_id: String) {
        let (mut client, _seat) = self.line();
        let request = self.sign(Request::new(CancelStreamRequest { request_id }));
        if !matches!(timeout(CANCEL, client.cancel(request)).await, Ok(Ok(_))) {
            tracing::debug!(to = %self, "a stream that is not wanted there may go on for a while");
        }
    }

    /// It took a stream over.
    pub(crate) fn count_taken(&self) {
        self.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// It did not take one over, or gave one back.
    pub(crate) fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Streams that it took over.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Times that it did not take one over, or could not go on with one.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for (text, exposed) in [
            ("unix:/run/h.sock", false),
            ("http://127.0.0.1:4100", false),
            ("http://[::1]:4100", false),
            ("http://localhost:4100", false),
            ("http://gpu-box:4100", true),
            ("https://gpu-box:4100", false),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(address.is_exposed(), exposed, "{text}");
        }
        assert_eq!(
            "unix:///run/h.sock".parse(),
            Ok(Address::Unix("/run/h.sock".into()))
        );
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_way_out() {
        for text in [
            "",
            "gpu-box:4100",
            "ftp://gpu-box:4100",
            "unix:relative",
            "http://gpu-box",
            "http://gpu-box:0",
            "http://:4100",
            "http://user@gpu-box:4100",
            "https://gpu-box:4100/path",
            "https://gpu-box:99999",
        ] {
            let why = text.parse::<Address>().unwrap_err();
            assert!(why.contains("unix:/path"), "{text}: {why}");
        }
    }

    fn to(address: &str, token: Option<PathBuf>) -> Result<Elsewhere, String> {
        let address = address.parse().unwrap();
        let ca = None;
        DrainTo { address, token, ca }.open()
    }

    #[test]
    fn a_token_is_read_and_shown_to_nobody_else() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, "name.secret\n").unwrap();
        let there = to("unix:/x", Some(file.clone())).unwrap();
        let signed = there.sign(Request::new(()));
        let shown = signed.metadata().get("authorization").unwrap();
        assert_eq!(shown.to_str().unwrap(), "Bearer name.secret");
        assert!(!format!("{there:?} {:?}", signed.metadata()).contains("secret"));
        for wrong in ["", "a\nb", &"x".repeat(limits::MAX_BEARER + 1)] {
            std::fs::write(&file, wrong).unwrap();
            let why = to("unix:/x", Some(file.clone())).unwrap_err();
            assert!(why.contains("holds no token"), "{why}");
        }
        assert!(to("unix:/x", Some(dir.path().join("none"))).is_err());
    }

    #[test]
    fn an_answer_says_for_whom_the_stream_runs() {
        let there = to("unix:/x", None).unwrap();
        let offered = there.offering(Request::new(()));
        assert!(is_offer(offered.metadata()));
        assert!(!is_offer(there.sign(Request::new(())).metadata()));
        for tenant in ["", "alice", "Zoë 50%\n"] {
            let mut answer = MetadataMap::new();
            assert!(!there.took_for(&answer, tenant));
            tell_tenant(&mut answer, tenant);
            assert!(there.took_for(&answer, tenant), "{tenant}");
            assert!(!there.took_for(&answer, "bob"));
        }
    }

    #[tokio::test]
    async fn a_connection_has_no_more_streams_than_the_other_side_allows() {
        let there = to("unix:/x", None).unwrap();
        let first: Vec<_> = (0..STREAMS_OF_LINE).map(|_| there.line()).collect();
        let lines = || there.lines.lock().unwrap().len();
        assert_eq!(lines(), 1);
        let _one_more = there.line();
        assert_eq!(lines(), 2);
        drop(first);
        let _again = there.line();
        assert_eq!(lines(), 2);
    }
}
