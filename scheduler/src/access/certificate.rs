//! The name in a client's certificate. It is read only after its signature was found to be the authority's.

use std::sync::Arc;

use hotcell_proto::limits;
use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

// X.690, section 8; tags of the universal class.
const OBJECT_IDENTIFIER: u8 = 0x06;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
/// id-at-commonName, 2.5.4.3.
const COMMON_NAME: [u8; 3] = [0x55, 4, 3];

/// What a certificate calls its owner: its subject's common name, else the first URI among its other names, else the first
/// host name. None if it has none of these, or one that is no tenant's name.
pub fn name_of(certificate: &CertificateDer<'_>) -> Option<Arc<str>> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    let name = match common_name(certificate.subject()) {
        // One that cannot be read is not passed over for another.
        Some(name) => std::str::from_utf8(name).ok()?,
        None => certificate
            .valid_uri_names()
            .next()
            .or_else(|| certificate.valid_dns_names().next())?,
    };
    let fits = (1..=limits::MAX_TENANT).contains(&name.chars().count());
    let plain = !name.chars().any(char::is_control);
    (fits && plain).then(|| name.into())
}

/// The bytes of the first common name of a subject (RFC 5280, section 4.1.2.4); empty for one in an encoding that is not to be
/// used any more.
fn common_name(mut subject: &[u8]) -> Option<&[u8]> {
    while let Some((SET, mut set, rest)) = element(subject) {
        subject = rest;
        while let Some((SEQUENCE, pair, rest)) = element(set) {
            set = rest;
            let Some((OBJECT_IDENTIFIER, kind, value)) = element(pair) else {
                continue;
            };
            if kind == COMMON_NAME {
                return match element(value) {
                    Some((UTF8_STRING | PRINTABLE_STRING, name, _)) => Some(name),
                    _ => Some(&[]),
                };
            }
        }
    }
    None
}

/// The first element of some DER: its tag, its content, and what comes after it. Lengths of three bytes and more are larger
/// than any certificate's.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (length, rest) = match rest {
        [short @ ..=0x7f, rest @ ..] => (usize::from(*short), rest),
        [0x81, length, rest @ ..] => (usize::from(*length), rest),
        [0x82, high, low, rest @ ..] => (usize::from(u16::from_be_bytes([*high, *low])), rest),
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrap(tag: u8, content: &[u8]) -> Vec<u8> {
        let mut all = vec![tag];
        match content.len() {
            short @ ..128 => all.push(short as u8),
            long => all.extend([0x82, (long >> 8) as u8, long as u8]),
        }
        all.extend(content);
        all
    }

    fn part(kind: &[u8], tag: u8, value: &[u8]) -> Vec<u8> {
        let pair = [wrap(OBJECT_IDENTIFIER, kind), wrap(tag, value)].concat();
        wrap(SET, &wrap(SEQUENCE, &pair))
    }

    #[test]
    fn a_common_name_is_found_behind_other_parts_of_a_subject() {
        let country = part(&[0x55, 4, 6], PRINTABLE_STRING, b"CH");
        let long = "x".repeat(300);
        for name in ["alice", "", &long] {
            let own = part(&COMMON_NAME, UTF8_STRING, name.as_bytes());
            let subject = [&country[..], &own, &part(&COMMON_NAME, UTF8_STRING, b"bob")].concat();
            assert_eq!(common_name(&subject), Some(name.as_bytes()));
            // Cut anywhere, it is another name or none, and never a part of one.
            for cut in 0..country.len() + own.len() {
                assert_eq!(common_name(&subject[..cut]), None, "{cut}");
            }
        }
        assert_eq!(common_name(&country), None);
        let wide = part(&COMMON_NAME, 0x1e, b"\0a");
        assert_eq!(common_name(&wide), Some(&[][..]));
    }

    #[test]
    fn bytes_that_are_no_certificate_have_no_name() {
        for bytes in [&[][..], b"0", &[0x30; 64], &[0xff; 4096]] {
            assert_eq!(name_of(&CertificateDer::from(bytes)), None);
        }
    }
}
