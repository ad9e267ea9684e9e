//! Who makes a call.

use std::sync::Arc;

use hotcell_proto::error::{Error, Reason};

use super::roles::{Need, Roles};
use crate::traces::Arrival;

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

    /// Whether what belongs to any tenant is the caller's to see.
    pub fn owns_all(&self) -> bool {
        self.tenant.is_none()
    }

    /// Whether what belongs to this tenant is the caller's to see.
    pub fn owns(&self, tenant: &str) -> bool {
        self.tenant.as_deref().is_none_or(|own| own == tenant)
    }
}
