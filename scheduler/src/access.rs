//! Who may speak to the scheduler, and what they may ask for.
//!
//! Whoever connects to the Unix socket is known by the kernel's word about the process at the other end; whoever
//! connects over TCP by the bearer token that each call carries, and by a certificate if those are asked for. From that
//! comes a [`Caller`] with its roles and its tenant, which goes with each call as an extension of its request.

mod caller;
mod certificate;
mod follow;
mod guard;
mod network;
mod quota;
mod roles;
mod seat;
mod standing;
mod tls;
mod tokens;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
};

use hotcell_proto::error::{Error, Reason};
use tokio_util::task::AbortOnDropHandle;

pub use caller::Caller;
pub use certificate::name_of;
pub use guard::{Guard, Guarded, bearer};
pub use network::Network;
pub use quota::{Held, Limits, Tenants, Want};
pub use roles::{Need, Role, Roles, TABLE, help, need, row};
pub use seat::{Begun, Came, Mark, Origin, Outcome, Room, Seat, Seats, came_by};
pub use tls::{Tls, TlsDoor, TlsFiles, believing};
pub use tokens::{Tokens, read_file};

use crate::exit::{Exit, Failure};

/// What the settings say about access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// The file of tokens and tenants.
    pub tokens: Option<PathBuf>,
    /// Certificate, key and authority of the TCP door.
    pub tls: Option<TlsFiles>,
    /// Users that may use the Unix socket besides this one and root.
    pub users: Vec<(u32, Roles)>,
    /// Addresses of proxies that keep their own clients apart.
    pub proxies: Vec<Network>,
}

impl AccessConfig {
    /// The files of this door's TLS, if it has any.
    pub fn tls_of(&self, door: TlsDoor) -> Option<&TlsFiles> {
        self.tls.as_ref().filter(|tls| tls.doors.contains(&door))
    }
}

/// A door, as far as it tells who comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrance {
    /// The Unix socket.
    Unix,
    /// TCP, with TLS or without.
    Tcp,
    /// The connection that whoever started this process gave it.
    Private,
}

/// Decides who comes in, and counts what tenants have.
#[derive(Debug, Default)]
pub struct Access {
    tokens: RwLock<Option<Arc<Tokens>>>,
    tls: Option<Arc<Tls>>,
    tls_doors: Vec<TlsDoor>,
    proxies: Arc<[Network]>,
    users: HashMap<u32, Roles>,
    /// What each tenant has at the moment.
    pub tenants: Tenants,
}

/// Keeps what was read from files as those are, while it lives.
#[derive(Debug)]
pub struct Following {
    _tasks: Vec<AbortOnDropHandle<()>>,
}

fn unusable(why: String) -> Failure {
    Failure::new(Exit::Usage, why)
}

impl Access {
    /// Reads the files that the settings name.
    ///
    /// # Errors
    /// [`Exit::Usage`], naming the file.
    pub fn load(config: &AccessConfig) -> Result<Self, Failure> {
        let tokens = config.tokens.as_deref().map(Tokens::read);
        let tls = config.tls.clone().map(Tls::read);
        Ok(Self {
            tokens: RwLock::new(tokens.transpose().map_err(unusable)?.map(Arc::new)),
            tls: tls.transpose().map_err(unusable)?.map(Arc::new),
            tls_doors: config
                .tls
                .as_ref()
                .map_or_else(Vec::new, |tls| tls.doors.clone()),
            proxies: config.proxies.clone().into(),
            users: config.users.iter().copied().collect(),
            tenants: Tenants::default(),
        })
    }

    /// Looks after the files from now on: one that changes is read again; one that makes no sense changes nothing.
    pub fn follow(self: &Arc<Self>, config: &AccessConfig) -> Following {
        let mut tasks = Vec::new();
        if let Some(path) = config.tokens.clone() {
            let access = Arc::clone(self);
            let again = {
                let path = path.clone();
                move || {
                    let tokens = Tokens::read(&path)?;
                    *access
                        .tokens
                        .write()
                        .unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(tokens));
                    Ok(())
                }
            };
            tasks.push(follow::follow("tokens", vec![path], again));
        }
        if let Some(tls) = self.tls.clone() {
            let paths = tls.files.paths();
            tasks.push(follow::follow("certificates", paths, move || tls.reread()));
        }
        Following {
            _tasks: tasks.into_iter().map(AbortOnDropHandle::new).collect(),
        }
    }

    /// This door's TLS, if it has any.
    pub fn tls(&self, door: TlsDoor) -> Option<Arc<Tls>> {
        self.tls.clone().filter(|_| self.tls_doors.contains(&door))
    }

    /// Where proxies are that are trusted to keep their clients apart.
    pub fn proxies(&self) -> Arc<[Network]> {
        Arc::clone(&self.proxies)
    }

    fn tokens(&self) -> Option<Arc<Tokens>> {
        let tokens = self.tokens.read();
        tokens.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Who makes a call over TCP: whoever its token names, else whoever the connection's certificate does. The token is asked
    /// for only if somebody may have one.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`].
    pub fn over_tcp<'a>(
        &self,
        mark: Option<&Mark>,
        token: impl FnOnce() -> Result<Option<&'a str>, Error>,
    ) -> Result<Caller, Error> {
        let certificate = mark.and_then(Mark::certificate);
        let Some(tokens) = self.tokens() else {
            return match certificate {
                // Only this host can be the caller's.
                None => Ok(Caller::trusted("a client over TCP", Roles::TOKENLESS, true)),
                Some(None) => Err(Error::new(
                    Reason::Unauthenticated,
                    "the certificate has no name that a tenant could have: a common name, a URI or a host name of 1 to 64 characters",
                )),
                Some(Some(name)) => {
                    let known_as = tokens::known_by(name);
                    let tenant = Arc::clone(name);
                    Ok(Caller::of_tenant(known_as, Roles::USE, true, tenant))
                }
            };
        };
        let token = token()?;
        if token.is_none()
            && let Some(Some(name)) = certificate
            && let Some(caller) = tokens.certified(name)
        {
            return Ok(caller);
        }
        tokens.find(token, std::time::SystemTime::now())
    }

    /// Whether callers over TCP show tokens.
    pub fn asks_for_tokens(&self) -> bool {
        self.tokens().is_some()
    }

    /// Whether a caller over TCP that was let in is known by a name, and so has its tenant's limits.
    pub fn knows_by_name(&self, mark: &Mark) -> bool {
        self.asks_for_tokens() || mark.certificate().is_some()
    }

    /// Roles of a user that connects to the Unix socket; none if it has none here.
    pub fn user(&self, uid: u32) -> Option<Roles> {
        let own = rustix::process::geteuid().as_raw();
        match uid == own || uid == 0 {
            true => Some(Roles::ALL),
            false => self.users.get(&uid).copied(),
        }
    }

    /// Limits of a tenant.
    pub fn limits(&self, tenant: &str) -> Limits {
        self.tokens()
            .map_or_else(Limits::default, |t| t.limits(tenant))
    }

    /// Takes from what a tenant may have at once.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`](hotcell_proto::error::Reason::QuotaExceeded).
    pub fn take(&self, tenant: &str, want: Want) -> Result<Held, Error> {
        self.tenants.take(tenant, &self.limits(tenant), want)
    }
}
