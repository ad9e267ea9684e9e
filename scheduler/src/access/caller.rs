//! Who makes a call.

use std::sync::Arc;

use hotcell_proto::error::{Error, Reason};
use tonic::transport::server::{TcpConnectInfo, UdsConnectInfo};

use super::roles::{Need, Roles};
use crate::{
    audit::{Audit, Entry, Who},
    discover::clip,
    traces::Arrival,
};

/// Who makes a call: goes with its request as an extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// For words and logs: `uid 1000`, `token alice`.
    pub name: Arc<str>,
    /// What it may do.
    pub roles: Roles,
    /// Whether it comes over TCP, perhaps from another host.
    pub remote: bool,
    /// The tenant that all it does is for; none if it may say for whom.
    tenant: Option<Arc<str>>,
    /// The trace that the call is part of.
    pub trace: Arrival,
}

impl Caller {
    /// Somebody who may say for which tenant a request is.
    pub fn trusted(name: impl Into<Arc<str>>, roles: Roles, remote: bool) -> Self {
        Self {
            name: name.into(),
            roles,
            remote,
            tenant: None,
            trace: Arrival::default(),
        }
    }

    /// Somebody who belongs to one tenant.
    pub fn of_tenant(
        name: impl Into<Arc<str>>,
        roles: Roles,
        remote: bool,
        tenant: Arc<str>,
    ) -> Self {
        Self {
            name: name.into(),
            roles,
            remote,
            tenant: Some(tenant),
            trace: Arrival::default(),
        }
    }

    /// This process itself, or whoever is as trusted.
    pub fn own() -> Self {
        Self::trusted("this process", Roles::ALL, false)
    }

    /// Who makes this call. The doors name everybody; without a name it is this process itself.
    pub fn of(extensions: &http::Extensions) -> Self {
        let caller = extensions.get::<Caller>();
        caller.cloned().unwrap_or_else(Self::own)
    }

    /// Who this is for the audit log, as far as the connection tells, whose extensions these are.
    pub fn who(&self, extensions: &http::Extensions) -> Who {
        let local = extensions.get::<UdsConnectInfo>();
        let peer = local.and_then(|local| local.peer_cred);
        let tcp = extensions.get::<TcpConnectInfo>();
        Who {
            name: self.name.to_string(),
            uid: peer.map(|peer| peer.uid()),
            pid: peer.and_then(|peer| peer.pid()),
            address: (tcp.and_then(TcpConnectInfo::remote_addr)).map(|address| address.to_string()),
            configuration: false,
        }
    }

    /// The tenant that a request is for: the caller's own, or the one it says.
    pub fn tenant<'a>(&'a self, said: &'a str) -> &'a str {
        self.tenant.as_deref().unwrap_or(said)
    }

    /// Refuses a call that needs a role which the caller lacks.
    ///
    /// # Errors
    /// [`Reason::PermissionDenied`], naming the role.
    pub fn check(&self, need: Need, call: &str) -> Result<(), Error> {
        match need {
            Need::Role(role) if !self.roles.has(role) => {
                let what = format!(
                    "{} has the role {}, and {call} needs the role {}",
                    self.name,
                    self.roles,
                    role.name()
                );
                Err(Error::new(Reason::PermissionDenied, what).with("role", role.name()))
            }
            Need::Role(_) | Need::Nobody => Ok(()),
        }
    }

    /// [`check`](Self::check), and the audit log has it if somebody may not look into what others do. Those whom nobody knows
    /// are not in there: they would fill it.
    ///
    /// # Errors
    /// The same.
    pub fn check_noting(
        &self,
        (need, call): (Need, &str),
        extensions: &http::Extensions,
        audit: &Audit,
    ) -> Result<(), Error> {
        self.check(need, call).inspect_err(|error| {
            if need.looks() {
                note_refused(call, &self.who(extensions), error, audit);
            }
        })
    }

    /// Whether what belongs to any tenant is the caller's to see.
    pub fn owns_all(&self) -> bool {
        self.tenant.is_none()
    }

    /// Whether what belongs to this tenant is the caller's to see.
    pub fn owns(&self, tenant: &str) -> bool {
        self.tenant.as_deref().is_none_or(|own| own == tenant)
    }
}

/// Has the audit log have it that a call was refused which looks into what others do. That one was let in is said there by
/// whoever serves it.
pub(super) fn note_refused(call: &str, who: &Who, error: &Error, audit: &Audit) {
    audit.note(Entry {
        event: "debug",
        who: Some(who),
        outcome: "refused",
        reason: error.reason().name(),
        detail: clip(&format!("{call}: {}", error.message())),
        ..Entry::default()
    });
}
