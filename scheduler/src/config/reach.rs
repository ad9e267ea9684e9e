//! Who may reach a scheduler and whom it reaches, as far as settings have to fit each other.

use std::{net::SocketAddr, path::PathBuf};

use super::usage;
use crate::{
    access::{AccessConfig, TlsDoor, TlsFiles},
    elsewhere::{Address, DrainTo},
    exit::Failure,
};

/// The files of TLS: certificate and key, or neither.
pub(super) fn tls_files(
    (cert, key, client_ca): (Option<PathBuf>, Option<PathBuf>, Option<PathBuf>),
    doors: Option<Vec<TlsDoor>>,
) -> Result<Option<TlsFiles>, Failure> {
    match (cert, key) {
        (Some(cert), Some(key)) => Ok(Some(TlsFiles {
            cert,
            key,
            client_ca,
            doors: doors.unwrap_or_else(|| TlsDoor::ALL.to_vec()),
        })),
        (None, None) if client_ca.is_none() && doors.is_none() => Ok(None),
        _ => Err(usage(
            "TLS needs a certificate and its key: give both --tls-cert FILE and --tls-key FILE",
        )),
    }
}

/// Beyond this host nobody is let in who did not show who they are, and nothing goes in clear text.
pub(super) fn check_reach(
    flag: &str,
    (listen, door): (Option<SocketAddr>, TlsDoor),
    access: &AccessConfig,
) -> Result<(), Failure> {
    let shows = access
        .tls
        .as_ref()
        .is_some_and(|tls| tls.client_ca.is_some());
    if let (Some(address), None, true, None) = (listen, access.tls_of(door), shows, &access.tokens)
    {
        return Err(usage(format!(
            "{flag} {address} is a door without TLS, where nobody can show the certificate that --tls-client-ca asks for; give --tokens FILE, or leave out --tls-doors"
        )));
    }
    let Some(address) = listen.filter(|address| !address.ip().is_loopback()) else {
        return Ok(());
    };
    let Some(tls) = access.tls_of(door) else {
        return Err(usage(format!(
            "{flag} {address} would let other hosts in without TLS; give --tls-cert FILE --tls-key FILE, or listen on 127.0.0.1:{}",
            address.port()
        )));
    };
    if access.tokens.is_none() && tls.client_ca.is_none() {
        return Err(usage(format!(
            "{flag} {address} would let everybody in; give --tokens FILE (see `hotcell token new`) or --tls-client-ca FILE"
        )));
    }
    Ok(())
}

/// Where streams go after SIGTERM; its token goes nowhere in clear text.
pub(super) fn drain_to(
    address: Option<Address>,
    token: Option<PathBuf>,
    ca: Option<PathBuf>,
) -> Result<Option<DrainTo>, Failure> {
    let Some(address) = address else {
        return match token.or(ca) {
            None => Ok(None),
            Some(_) => Err(usage(
                "drain_to_token_file and drain_to_ca are about another Hotcell; say where it is with --drain-to ADDRESS",
            )),
        };
    };
    if token.is_some() && address.is_exposed() {
        return Err(usage(format!(
            "drain_to: the token would go to {address} in clear text; write https, or leave it out"
        )));
    }
    if ca.is_some() && !matches!(address, Address::Tls(_)) {
        return Err(usage(format!(
            "drain_to_ca: there is no TLS with {address}; write https, or leave it out"
        )));
    }
    Ok(Some(DrainTo { address, token, ca }))
}
