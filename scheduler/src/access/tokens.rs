//! The file of tokens and tenants.
//!
//! ```toml
//! [tokens.alice]
//! hash = "sha256:SALT:HASH"          # as `hotcell token new` writes it
//! roles = ["use", "load"]
//! tenant = "acme"                    # the token's name, if it is left out
//! expires = "2027-01-01T00:00:00Z"   # never, if it is left out
//!
//! [[certificate]]                    # whom an authority of --tls-client-ca vouches for, without a token
//! name = "spiffe://acme/batch"       # what the certificate calls its owner
//! roles = ["use", "load"]            # use, if it is left out
//! tenant = "acme"                    # the name, if it is left out
//!
//! [tenants.acme]
//! weight = 3                         # its share of places on full workers, beside others' 1; 1 to 100
//! requests = 16
//! tokens = 200000
//! tensor_bytes = 4294967296
//! sessions = 4
//!
//! [default]                          # tenants without a table of their own
//! requests = 4
//! ```

use std::{
    collections::BTreeMap,
    io::Read,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    token::{self, Kept},
};
use serde::Deserialize;

use super::{
    caller::Caller,
    quota::Limits,
    roles::{Role, Roles},
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tokens: BTreeMap<String, Row>,
    #[serde(default)]
    certificate: Vec<Certificate>,
    #[serde(default)]
    tenants: BTreeMap<String, Limits>,
    #[serde(default)]
    default: Limits,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Certificate {
    name: String,
    roles: Option<Roles>,
    tenant: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    hash: String,
    roles: Roles,
    tenant: Option<String>,
    expires: Option<String>,
}

#[derive(Debug)]
struct Token {
    kept: Kept,
    caller: Caller,
    /// Seconds since 1970.
    expires: Option<u64>,
}

/// Tokens and tenants, as a file has them.
#[derive(Debug)]
pub struct Tokens {
    by_name: BTreeMap<String, Token>,
    /// By the name that the certificate has.
    certificates: BTreeMap<String, Caller>,
    tenants: BTreeMap<String, Limits>,
    default: Limits,
    /// Compared with what nobody has the name of, so that a guess takes the same time.
    nobody: Kept,
}

/// Somebody from another host.
fn caller(name: String, roles: Roles, tenant: String) -> Caller {
    match roles.has(Role::Admin) {
        true => Caller::trusted(name, roles, true),
        false => Caller::of_tenant(name, roles, true, tenant.into()),
    }
}

/// What somebody is called who shows a certificate of this name.
pub(super) fn known_by(certificate: &str) -> String {
    format!("certificate {certificate:?}")
}

/// Reads a file of at most [`limits::MAX_ACCESS_FILE`] bytes.
///
/// # Errors
/// Words that name it.
pub fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path)?;
        file.take(limits::MAX_ACCESS_FILE + 1)
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    match bytes.len() as u64 > limits::MAX_ACCESS_FILE {
        true => Err(format!(
            "{} has more than {} bytes",
            path.display(),
            limits::MAX_ACCESS_FILE
        )),
        false => Ok(bytes),
    }
}

impl Tokens {
    /// Reads a file.
    ///
    /// # Errors
    /// Words that name it and what is wrong.
    pub fn read(path: &Path) -> Result<Self, String> {
        let named = |why: String| format!("the tokens file {}: {why}", path.display());
        let bytes = read_file(path)?;
        let text = String::from_utf8(bytes).map_err(|e| named(e.to_string()))?;
        Self::parse(&text).map_err(named)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
        let counts = [
            file.tokens.len(),
            file.certificate.len(),
            file.tenants.len(),
        ];
        if counts.iter().any(|&count| count > limits::MAX_TOKENS) {
            return Err(format!(
                "more than {} tokens, certificates or tenants",
                limits::MAX_TOKENS
            ));
        }
        for (tenant, limits) in file.tenants.iter().map(|(n, l)| (n.as_str(), l)) {
            limits
                .check()
                .map_err(|why| format!("tenant {tenant}: {why}"))?;
        }
        file.default
            .check()
            .map_err(|why| format!("default: {why}"))?;
        let tenant_fits =
            |tenant: &str| token::check_tenant(tenant).map_err(|error| error.message().to_owned());
        file.tenants.keys().try_for_each(|t| tenant_fits(t))?;
        let mut by_name = BTreeMap::new();
        for (name, row) in file.tokens {
            let wrong = |why: &str| format!("token {name}: {why}");
            token::check_name(&name).map_err(|e| wrong(e.message()))?;
            let kept = Kept::parse(&row.hash);
            let kept = kept.ok_or_else(|| {
                wrong("its hash is not of the form sha256:SALT:HASH; `hotcell token new` makes one")
            })?;
            let time = |text: &String| {
                let time = token::parse_time(text);
                time.ok_or_else(|| wrong("expires is not a time such as 2027-01-01T00:00:00Z"))
            };
            let expires = row.expires.as_ref().map(time).transpose()?;
            let tenant = row.tenant.unwrap_or_else(|| name.clone());
            tenant_fits(&tenant).map_err(|why| wrong(&why))?;
            let caller = caller(format!("token {name}"), row.roles, tenant);
            by_name.insert(
                name,
                Token {
                    kept,
                    caller,
                    expires,
                },
            );
        }
        let mut certificates = BTreeMap::new();
        for Certificate {
            name,
            roles,
            tenant,
        } in file.certificate
        {
            let wrong = |why: &str| format!("certificate {name:?}: {why}");
            let tenant = tenant.unwrap_or_else(|| name.clone());
            tenant_fits(&tenant).map_err(|why| wrong(&why))?;
            let roles = roles.unwrap_or(Roles::USE);
            let caller = caller(known_by(&name), roles, tenant);
            if certificates.insert(name.clone(), caller).is_some() {
                return Err(wrong("it has two tables"));
            }
        }
        let (_, nobody) = token::make("nobody").map_err(|e| e.to_string())?;
        Ok(Self {
            by_name,
            certificates,
            tenants: file.tenants,
            default: file.default,
            nobody,
        })
    }

    /// Whose token this is.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`]. What is wrong with a token that is none is not said.
    pub fn find(&self, token: Option<&str>, now: SystemTime) -> Result<Caller, Error> {
        let refused = |why: &str| Err(Error::new(Reason::Unauthenticated, why));
        let Some(token) = token else {
            return refused(
                "this scheduler asks for a token; put one into HOTCELL_TOKEN, or name its file with --token-file",
            );
        };
        const WRONG: &str = "the token is not known here; ask the scheduler's operator for one";
        let Some((name, secret)) = token::split(token) else {
            return refused(WRONG);
        };
        let known = self.by_name.get(name);
        let kept = known.map_or(&self.nobody, |token| &token.kept);
        let (true, Some(token)) = (kept.fits(secret), known) else {
            return refused(WRONG);
        };
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |s| s.as_secs());
        if token.expires.is_some_and(|at| at <= now) {
            return refused("the token has expired; ask the scheduler's operator for another one");
        }
        Ok(token.caller.clone())
    }

    /// Who shows a certificate of this name, if the file says so.
    pub fn certified(&self, name: &str) -> Option<Caller> {
        self.certificates.get(name).cloned()
    }

    /// Limits of a tenant.
    pub fn limits(&self, tenant: &str) -> Limits {
        self.tenants.get(tenant).copied().unwrap_or(self.default)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.by_name.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_token_says_who_somebody_is_until_it_expires() {
        let (alice, kept) = token::make("alice").unwrap();
        let (root, kept_root) = token::make("root").unwrap();
        let text = format!(
            "[tokens.alice]\nhash = \"{kept}\"\nroles = [\"use\"]\ntenant = \"acme\"\nexpires = \"1970-01-02T00:00:00Z\"\n\
             [tokens.root]\nhash = \"{kept_root}\"\nroles = [\"admin\"]\n\
             [tenants.acme]\nrequests = 2\n[default]\nsessions = 1\n"
        );
        let tokens = Tokens::parse(&text).unwrap();
        assert_eq!(tokens.count(), 2);
        let caller = tokens.find(Some(&alice), at(86_399)).unwrap();
        assert_eq!(
            (&*caller.name, caller.tenant("other")),
            ("token alice", "acme")
        );
        assert!(caller.remote && !caller.owns("other") && caller.owns("acme"));
        let admin = tokens.find(Some(&root), at(0)).unwrap();
        assert_eq!(admin.tenant("other"), "other");
        assert_eq!(tokens.limits("acme").requests, Some(2));
        assert_eq!(tokens.limits("acme").sessions, None);
        assert_eq!(tokens.limits("else").sessions, Some(1));
        let secret = token::split(&alice).unwrap().1;
        for wrong in [
            None,
            Some(String::new()),
            Some(format!("bob.{secret}")),
            Some(format!("root.{secret}")),
            Some(format!("alice.{}", "0".repeat(64))),
        ] {
            let error = tokens.find(wrong.as_deref(), at(0)).unwrap_err();
            assert_eq!(error.reason(), Reason::Unauthenticated);
        }
        let late = tokens.find(Some(&alice), at(86_400)).unwrap_err();
        assert!(late.message().contains("expired"), "{late}");
    }

    #[test]
    fn a_certificate_says_who_somebody_is_if_the_file_does() {
        let text = "[[certificate]]\nname = \"plain\"\n\
             [[certificate]]\nname = \"spiffe://acme/batch\"\nroles = [\"use\", \"load\"]\ntenant = \"acme\"\n\
             [tenants.acme]\nweight = 100\n";
        let tokens = Tokens::parse(text).unwrap();
        let plain = tokens.certified("plain").unwrap();
        assert_eq!((plain.roles, plain.tenant("x")), (Roles::USE, "plain"));
        let batch = tokens.certified("spiffe://acme/batch").unwrap();
        assert_eq!(&*batch.name, "certificate \"spiffe://acme/batch\"");
        assert!(batch.roles.has(Role::Load) && batch.remote);
        assert_eq!(batch.tenant("x"), "acme");
        assert!(tokens.certified("acme").is_none());
        assert_eq!(tokens.limits("acme").weight(), 100);
        assert_eq!(tokens.limits("plain").weight(), 1);
    }

    #[test]
    fn a_file_that_makes_no_sense_is_refused_with_its_fault() {
        let hash = format!("hash = \"sha256:{}:{}\"\n", "0".repeat(32), "0".repeat(64));
        for (text, word) in [
            ("[tokens.a]\nroles = [\"use\"]\n".to_owned(), "hash"),
            (format!("[tokens.a]\n{hash}roles = []\n"), "no role"),
            (format!("[tokens.a]\n{hash}roles = [\"root\"]\n"), "root"),
            (
                format!("[tokens.\"a b\"]\n{hash}roles = [\"use\"]\n"),
                "letters",
            ),
            (
                format!("[tokens.a]\n{hash}roles = [\"use\"]\nexpires = \"soon\"\n"),
                "expires",
            ),
            (
                format!("[tokens.a]\n{hash}roles = [\"use\"]\ntenant = \"\"\n"),
                "tenant",
            ),
            (
                "[tokens.a]\nhash = \"secret\"\nroles = [\"use\"]\n".to_owned(),
                "sha256",
            ),
            ("[tenants.a]\nrequest = 1\n".to_owned(), "request"),
            ("[token.a]\n".to_owned(), "token"),
            ("[[certificate]]\nroles = [\"use\"]\n".to_owned(), "name"),
            ("[[certificate]]\nname = \"\"\n".to_owned(), "tenant"),
            (
                "[[certificate]]\nname = \"a\"\n[[certificate]]\nname = \"a\"\n".to_owned(),
                "two",
            ),
            ("[tenants.a]\nweight = 0\n".to_owned(), "weight"),
            ("[tenants.a]\nweight = 101\n".to_owned(), "weight"),
            ("[default]\nweight = -1\n".to_owned(), "weight"),
        ] {
            let why = Tokens::parse(&text).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
        Tokens::parse("").unwrap();
    }
}
