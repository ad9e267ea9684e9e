//! Where a scheduler listens, and connections to it.

mod identity;
mod tls;
mod wire;

use std::{
    error::Error as StdError,
    ffi::OsString,
    fmt, fs, io,
    net::SocketAddr,
    os::{fd::OwnedFd, unix::fs::FileTypeExt},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use hotcell_ipc::transport::{self, Windows};
use hotcell_proto::{
    address,
    error::{CONTINUES_AT, Error, Reason},
    limits,
    v1::{
        control_client::ControlClient, debug_client::DebugClient, graphs_client::GraphsClient,
        tensors_client::TensorsClient, tokens_client::TokensClient,
    },
};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{Code, Status, transport::Endpoint};

pub use identity::{
    CA_VARIABLE, CERT_VARIABLE, Identity, KEY_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE,
    read_token,
};
pub(crate) use wire::Wire;

use tls::Tls;

/// Environment variable that names the scheduler when no address is given.
pub const ADDRESS_VARIABLE: &str = "HOTCELL_ADDRESS";

/// Environment variable that tells a scheduler its socket; names it to clients too when
/// [`ADDRESS_VARIABLE`] says nothing.
pub const SOCKET_VARIABLE: &str = "HOTCELL_SOCKET";

/// Flow control of a client's connections.
///
/// h2 (0.4.16 and later) charges every unread DATA frame of less than 256 bytes with what it lacks of them, and
/// ends the whole connection with GOAWAY once the charges exceed half the connection's window. A token is such a
/// frame, of about 20 bytes. So a stream that nobody reads has to stop early, after 64 KiB or some 3000 tokens,
/// and the connection's window is one that no 200 such streams use up. It is a permission, no memory: what is
/// unread is bounded by the streams' windows.
const WINDOWS: Windows = Windows {
    stream: 64 << 10,
    connection: 1 << 30,
    frame: 64 << 10,
};

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often the other end of a TCP connection is asked whether it is there, and how long it may take to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Metadata key of errors that mean "no scheduler could be reached"; its value is the address.
const UNREACHABLE: &str = "unreachable";

/// Metadata key of errors that mean "the other side does not know this call"; its value is the address.
const UNKNOWN_CALL: &str = "unknown_call";

/// Where a scheduler (or a worker run alone) listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// `host:port`, spoken to in clear text.
    Tcp(String),
    /// `host:port`, spoken to over TLS.
    Tls(String),
}

impl Address {
    /// The socket a scheduler of this user listens on when nothing else is said:
    /// `$XDG_RUNTIME_DIR/hotcell/hotcell.sock`, or `/tmp/hotcell-UID/hotcell.sock`.
    pub fn default_socket() -> Self {
        let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let uid = rustix::process::geteuid().as_raw();
        Self::Unix(address::default_socket(runtime_dir.as_deref(), uid))
    }

    /// What `HOTCELL_ADDRESS` says, else the socket `HOTCELL_SOCKET` names, else [`Address::default_socket`].
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when `HOTCELL_ADDRESS` holds no address.
    pub fn from_environment() -> Result<Self, Error> {
        let address = std::env::var(ADDRESS_VARIABLE).ok();
        Self::from_variables(address.as_deref(), std::env::var_os(SOCKET_VARIABLE))
    }

    fn from_variables(address: Option<&str>, socket: Option<OsString>) -> Result<Self, Error> {
        if let Some(text) = address.filter(|text| !text.is_empty()) {
            return text.parse();
        }
        // An empty path is the only one that cannot be made absolute while there is a working folder.
        let socket = socket.and_then(|path| std::path::absolute(path).ok());
        Ok(socket.map_or_else(Self::default_socket, Self::Unix))
    }

    /// What a scheduler's `--listen`, which takes no names, is to be given for this address.
    pub(crate) fn listen_flag(authority: &str) -> String {
        match authority.rsplit_once(':') {
            Some((host, port)) if host.eq_ignore_ascii_case("localhost") => {
                format!("127.0.0.1:{port}")
            }
            _ => authority.to_owned(),
        }
    }

    /// Whether the other side sees the same files.
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |why: &str| {
            Error::new(
                Reason::InvalidArgument,
                format!(
                    "the address {text:?} {why}; write unix:/path, /path, host:port, http://host:port or https://host:port"
                ),
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            // unix:///path is the URI spelling of unix:/path.
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Self::Unix(PathBuf::from(path)))
            } else {
                Err(wrong("names no absolute path"))
            };
        }
        if text.starts_with('/') {
            return Ok(Self::Unix(PathBuf::from(text)));
        }
        let (authority, kind): (&str, fn(String) -> Self) = match text.strip_prefix("https://") {
            Some(authority) => (authority, Self::Tls),
            None => (text.strip_prefix("http://").unwrap_or(text), Self::Tcp),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let (host, port) = authority
            .rsplit_once(':')
            .ok_or_else(|| wrong("has no port"))?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let plain = |c: char| !c.is_whitespace() && !c.is_control() && !"/?#@[]".contains(c);
        let inner = if bracketed {
            &host[1..host.len() - 1]
        } else {
            host
        };
        if inner.is_empty() || !inner.chars().all(plain) || (!bracketed && inner.contains(':')) {
            return Err(wrong("has no host that can be used"));
        }
        match port.parse::<u16>() {
            Ok(port) if port != 0 => Ok(kind(authority.to_owned())),
            _ => Err(wrong("has no valid port")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(authority) => f.write_str(authority),
            Self::Tls(authority) => write!(f, "https://{authority}"),
        }
    }
}

/// A connection to a scheduler. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Wire,
    /// What error messages call the other side.
    peer: String,
    /// Whether a connection that broke is made again.
    reconnects: bool,
    /// The other hosts at which a stream may go on, and as whom it is asked for there.
    follows: Arc<[(Address, Identity)]>,
}

impl Client {
    /// Connects to the scheduler at `address`, as [`Identity::from_environment`].
    ///
    /// # Errors
    /// One for which [`is_unreachable`] holds when nobody listens there.
    pub async fn connect(address: &Address) -> Result<Self, Error> {
        let identity = of_environment(address)?;
        Self::connect_with(address, &identity, WINDOWS).await
    }

    /// Connects as somebody.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`Reason::InvalidArgument`] or [`Reason::FileNotFound`] for what cannot be shown, or
    /// not there.
    pub async fn connect_as(address: &Address, identity: &Identity) -> Result<Self, Error> {
        Self::connect_with(address, identity, WINDOWS).await
    }

    /// Connects with windows for bulk data.
    pub(crate) async fn connect_for_tensors(
        address: &Address,
        identity: Option<&Identity>,
    ) -> Result<Self, Error> {
        let identity = match identity {
            Some(identity) => identity.clone(),
            None => of_environment(address)?,
        };
        Self::connect_with(address, &identity, Windows::default()).await
    }

    async fn connect_with(
        address: &Address,
        identity: &Identity,
        windows: Windows,
    ) -> Result<Self, Error> {
        let peer = address.to_string();
        let shown = match address {
            // The kernel says who this is.
            Address::Unix(_) => None,
            Address::Tls(_) => identity.header()?,
            Address::Tcp(authority) => {
                let shown = identity.header()?;
                if shown.is_some() && !stays_here(authority) {
                    let what = format!(
                        "the token would go to {authority} in clear text; write https://{authority}, or leave it out"
                    );
                    return Err(Error::new(Reason::InvalidArgument, what));
                }
                shown
            }
        };
        let tls = match address {
            Address::Tls(authority) => Some(Tls::new(authority, identity)?),
            _ => None,
        };
        let connecting = async {
            match address {
                Address::Unix(path) => {
                    let path = path.clone();
                    // Anybody may make a folder of that name in /tmp; prompts are not for everybody.
                    let checked = *address == Address::default_socket();
                    let connector = tower::service_fn(move |_: http::Uri| {
                        let path = path.clone();
                        async move { open(path, checked).await.map(TokioIo::new) }
                    });
                    // The name is never resolved; it becomes the `:authority` of each request.
                    let endpoint = Endpoint::from_static("http://scheduler.invalid");
                    let endpoint = windows.endpoint(endpoint);
                    endpoint.connect_with_connector(connector).await
                }
                Address::Tcp(authority) | Address::Tls(authority) => {
                    let endpoint = Endpoint::from_shared(format!("http://{authority}"))?;
                    // A host that vanished without a word is noticed, so that a stream can come back by another way.
                    let endpoint = windows
                        .endpoint(endpoint)
                        .tcp_nodelay(true)
                        .http2_keep_alive_interval(KEEP_ALIVE)
                        .keep_alive_timeout(KEEP_ALIVE);
                    let Some(tls) = tls else {
                        return endpoint.connect().await;
                    };
                    let connector = tower::service_fn(move |_: http::Uri| {
                        let tls = tls.clone();
                        async move { tls.open().await.map(TokioIo::new) }
                    });
                    endpoint.connect_with_connector(connector).await
                }
            }
        };
        let late = || io::Error::from(io::ErrorKind::TimedOut);
        let channel = tokio::time::timeout(CONNECT_TIMEOUT, connecting)
            .await
            .map_err(|_| unreachable(&peer, &late()))?
            .map_err(|e| unreachable(&peer, &e))?;
        Ok(Self {
            channel: Wire::new(channel, shown),
            peer,
            reconnects: true,
            follows: Arc::default(),
        })
    }

    /// Speaks over one end of a socketpair. The connection cannot be made again once it broke.
    ///
    /// # Errors
    /// One for which [`is_unreachable`] holds when the socket is no stream socket or the other end is gone.
    pub async fn over(socket: OwnedFd) -> Result<Self, Error> {
        Self::over_with(socket, WINDOWS).await
    }

    /// The same with windows for bulk data.
    pub(crate) async fn over_for_tensors(socket: OwnedFd) -> Result<Self, Error> {
        Self::over_with(socket, Windows::default()).await
    }

    async fn over_with(socket: OwnedFd, windows: Windows) -> Result<Self, Error> {
        let peer = "the other end of the socket".to_owned();
        let channel = transport::channel_over(socket, windows)
            .await
            .map_err(|e| unreachable(&peer, &e))?;
        Ok(Self {
            channel: Wire::new(channel, None),
            peer,
            reconnects: false,
            follows: Arc::default(),
        })
    }

    /// Has streams of this client go on at `to`, asked for as `identity` there, once the scheduler says that they do: one
    /// that shuts down gives them to another (`--drain-to`). They follow to no host that was not named so. `to` has to be
    /// spelt as that scheduler's operator spelt it.
    #[must_use]
    pub fn following(mut self, to: Address, identity: Identity) -> Self {
        let known = self.follows.iter().cloned();
        self.follows = known.chain([(to, identity)]).collect();
        self
    }

    /// The host at which a stream goes on that ended with this error, if it is one to follow to.
    pub(crate) fn leads_to(&self, error: &Error) -> Option<&(Address, Identity)> {
        let told: Address = error.get(CONTINUES_AT)?.parse().ok()?;
        self.follows.iter().find(|(known, _)| *known == told)
    }

    /// Another host to which its streams go; from there they may go on to others.
    pub(crate) async fn at(&self, (to, identity): &(Address, Identity)) -> Result<Self, Error> {
        Ok(Self {
            follows: Arc::clone(&self.follows),
            ..Self::connect_with(to, identity, WINDOWS).await?
        })
    }

    /// The raw token calls.
    pub(crate) fn tokens_client(&self) -> TokensClient<Wire> {
        TokensClient::new(self.channel.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The raw tensor calls.
    pub(crate) fn tensors_client(&self) -> TensorsClient<Wire> {
        TensorsClient::new(self.channel.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The raw calls about saved graphs.
    pub(crate) fn graphs_client(&self) -> GraphsClient<Wire> {
        GraphsClient::new(self.channel.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The raw control calls.
    pub(crate) fn control_client(&self) -> ControlClient<Wire> {
        ControlClient::new(self.channel.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The raw calls that look into a worker.
    pub(crate) fn debug_client(&self) -> DebugClient<Wire> {
        DebugClient::new(self.channel.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The connection itself.
    pub(crate) fn channel(&self) -> Wire {
        self.channel.clone()
    }

    /// Whether a connection that broke is made again.
    pub(crate) fn reconnects(&self) -> bool {
        self.reconnects
    }

    /// What errors call the other side.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }
}

/// What the environment says, where it is used at all.
fn of_environment(address: &Address) -> Result<Identity, Error> {
    match address.is_local() {
        true => Ok(Identity::default()),
        false => Identity::from_environment(),
    }
}

/// Whether what is sent to `host:port` does not leave this host.
fn stays_here(authority: &str) -> bool {
    let (host, _) = authority.rsplit_once(':').unwrap_or((authority, ""));
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let address = host.parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|a| a.is_loopback())
}

/// Opens a socket; one that must be ours has to be served by this user or root.
async fn open(path: PathBuf, ours: bool) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path).await?;
    let own = rustix::process::geteuid().as_raw();
    if ours && ![own, 0].contains(&stream.peer_cred()?.uid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(stream)
}

/// Whether `error` means that no scheduler could be reached (or that the connection to it broke), as
/// opposed to one that answered.
pub fn is_unreachable(error: &Error) -> bool {
    error.get(UNREACHABLE).is_some()
}

/// Whether `error` means that the other side does not know the call, as a worker run alone knows none that
/// operate a scheduler.
pub fn is_unknown_call(error: &Error) -> bool {
    error.get(UNKNOWN_CALL).is_some()
}

/// Says of a call that only schedulers know what a worker run alone lacks: "has no list of workers".
pub(crate) fn schedulers_only(error: Error, lacks: &str) -> Error {
    let Some(peer) = error.get(UNKNOWN_CALL) else {
        return error;
    };
    let message = format!("this address is a single worker, which {lacks}; ask a scheduler");
    Error::new(error.reason(), message).with(UNKNOWN_CALL, peer)
}

/// The failure of a scheduler that could not be started; [`is_unreachable`] holds for it.
pub(crate) fn cannot_start(message: String) -> Error {
    Error::new(Reason::NoWorker, message).with(UNREACHABLE, "private scheduler")
}

/// Reads a status of a call to `peer`. One that the transport made up, because the connection broke,
/// says so in words a user can act on.
pub(crate) fn read_status(peer: &str, status: &Status) -> Error {
    if let Some(error) = Error::typed(status) {
        return error;
    }
    let error = Error::from_status(status);
    // Said by a server that has no such service; a call it knows and refuses has a reason of ours.
    if status.code() == Code::Unimplemented && status.message().is_empty() {
        let message = format!(
            "{peer} does not know this call; check that the address is a scheduler's of this version"
        );
        return Error::new(Reason::ProtocolMismatch, message).with(UNKNOWN_CALL, peer);
    }
    // Statuses that came over the wire have no source; those made here from a transport error have.
    let Some(source) = status.source() else {
        return error;
    };
    // A connection that breaks may look like a call cancelled; only the caller's own timer is no fault of the connection.
    let timer = |source: &(dyn StdError + 'static)| source.is::<tonic::TimeoutExpired>();
    let mut cause = Some(source);
    let mut timed = false;
    while let Some(this) = cause {
        timed |= timer(this);
        cause = this.source();
    }
    match error.reason() {
        Reason::DeadlineExceeded => error,
        Reason::Cancelled if timed => error,
        _ => unreachable(peer, source),
    }
}

/// The sentence for a connection that could not be made, or broke.
fn unreachable(peer: &str, cause: &(dyn StdError + 'static)) -> Error {
    let mut kind = None;
    let mut tls = None;
    let mut root = cause;
    let mut next = Some(cause);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            kind = Some(error.kind());
            let inner = error
                .get_ref()
                .and_then(|e| e.downcast_ref::<rustls::Error>());
            tls = inner.map(ToString::to_string).or(tls);
        }
        root = error;
        next = error.source();
    }
    let socket = peer.strip_prefix("unix:").map(Path::new);
    let serve = serve_hint(peer);
    let message = match (kind, socket) {
        _ if let Some(why) = tls => format!(
            "TLS with {peer} failed ({why}); check --tls-ca, and --tls-cert and --tls-key if it asks for them"
        ),
        (Some(io::ErrorKind::NotFound), Some(_)) => {
            format!("no scheduler listens on {peer}; start one with {serve}")
        }
        (Some(io::ErrorKind::ConnectionRefused), Some(path))
            if fs::metadata(path).is_ok_and(|data| !data.file_type().is_socket()) =>
        {
            format!(
                "{peer} is no socket; start a scheduler on another path with --socket, and name it with --address"
            )
        }
        (Some(io::ErrorKind::ConnectionRefused), Some(_)) => format!(
            "no scheduler listens on {peer}, where one left its socket behind; \
             start one with {serve}"
        ),
        (Some(io::ErrorKind::ConnectionRefused), None) => {
            format!("no scheduler listens on {peer}; start one there with {serve}")
        }
        (Some(io::ErrorKind::PermissionDenied), Some(_)) => format!(
            "the socket {peer} belongs to somebody else; \
             name your own with --address, or start one with `hotcell serve`"
        ),
        (Some(io::ErrorKind::TimedOut), _) => {
            format!("nobody answers at {peer}; check the address and that a scheduler runs there")
        }
        (_, None) if !peer.starts_with("https://") && peer.contains(':') => format!(
            "the connection to the scheduler at {peer} failed ({root}); \
             check that it still runs, and write https://{peer} if it speaks TLS"
        ),
        _ => format!(
            "the connection to the scheduler at {peer} failed ({root}); check that it still runs"
        ),
    };
    Error::new(Reason::NoWorker, message).with(UNREACHABLE, peer)
}

/// The command that starts a scheduler which listens at `peer`.
fn serve_hint(peer: &str) -> String {
    if let Some(path) = peer.strip_prefix("unix:") {
        return if peer == Address::default_socket().to_string() {
            "`hotcell serve`".to_owned()
        } else {
            format!("`hotcell serve --socket {path}`")
        };
    }
    let listen = Address::listen_flag(peer.strip_prefix("https://").unwrap_or(peer));
    if listen.parse::<SocketAddr>().is_ok() {
        return format!("`hotcell serve --listen {listen}`");
    }
    // A name may stand for several addresses of that host.
    let port = listen.rsplit_once(':').map_or("4100", |(_, port)| port);
    format!("`hotcell serve --listen IP:{port}`, with that host's own IP address")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_an_address_or_a_socket() {
        let read =
            |address, socket: &str| Address::from_variables(address, Some(socket.into())).unwrap();
        assert_eq!(
            read(Some("host:1"), "/s"),
            Address::Tcp("host:1".to_owned())
        );
        assert_eq!(read(Some(""), "/s"), Address::Unix("/s".into()));
        let here = std::env::current_dir().unwrap().join("s");
        assert_eq!(read(None, "s"), Address::Unix(here));
        assert_eq!(read(None, ""), Address::default_socket());
        let nothing = Address::from_variables(None, None).unwrap();
        assert_eq!(nothing, Address::default_socket());
    }

    #[test]
    fn a_token_goes_to_no_other_host_in_clear_text() {
        for here in ["localhost:1", "127.0.0.1:1", "[::1]:1"] {
            assert!(stays_here(here), "{here}");
        }
        for elsewhere in [
            "gpu-box:1",
            "10.0.0.1:1",
            "[fe80::1]:1",
            "localhost.example:1",
        ] {
            assert!(!stays_here(elsewhere), "{elsewhere}");
        }
    }

    #[test]
    fn the_hint_is_a_command_that_works() {
        for (peer, hint) in [
            ("localhost:4100", "`hotcell serve --listen 127.0.0.1:4100`"),
            ("[::1]:4100", "`hotcell serve --listen [::1]:4100`"),
            ("unix:/x/h.sock", "`hotcell serve --socket /x/h.sock`"),
        ] {
            assert_eq!(serve_hint(peer), hint);
        }
        assert!(serve_hint("gpu-box:4100").contains("--listen IP:4100`"));
        let standard = Address::default_socket().to_string();
        assert_eq!(serve_hint(&standard), "`hotcell serve`");
    }

    #[test]
    fn a_call_nobody_knows_is_told_in_words() {
        let error = read_status("host:1", &Status::unimplemented(""));
        assert!(is_unknown_call(&error) && !is_unreachable(&error));
        assert!(error.message().contains("host:1"), "{error}");
        let typed = Status::from(Error::new(Reason::ModelUnsupported, "no"));
        assert!(!is_unknown_call(&read_status("host:1", &typed)));
    }

    #[test]
    fn addresses_are_read_in_every_spelling() {
        let unix = |p: &str| Address::Unix(PathBuf::from(p));
        let tcp = |a: &str| Address::Tcp(a.to_owned());
        for (text, address) in [
            ("unix:/run/h.sock", unix("/run/h.sock")),
            ("unix:///run/h.sock", unix("/run/h.sock")),
            ("/run/h.sock", unix("/run/h.sock")),
            ("localhost:7070", tcp("localhost:7070")),
            ("http://10.0.0.1:80/", tcp("10.0.0.1:80")),
            ("[::1]:7070", tcp("[::1]:7070")),
            (
                "https://gpu-box:443/",
                Address::Tls("gpu-box:443".to_owned()),
            ),
        ] {
            assert_eq!(text.parse::<Address>().unwrap(), address, "{text}");
            assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_way_out() {
        for text in [
            "",
            "unix:",
            "unix:relative",
            "localhost",
            "localhost:",
            "localhost:0",
            "localhost:99999",
            ":7070",
            "::1:7070",
            "a b:1",
            "https://localhost",
            "http://user@host:1",
            "http://host:1/path",
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert_eq!(error.reason(), Reason::InvalidArgument, "{text}");
            assert!(error.message().contains("unix:/path"), "{error}");
        }
    }
}
