//! Addresses that belong together.

use std::{net::IpAddr, str::FromStr};

use serde::{Deserialize, Deserializer, de::Error as _};

/// An address, or all that begin with the same bits: `10.0.0.7`, `10.1.0.0/16`, `fd00::/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u32,
}

/// The bits of an address, the first ones first, and how many there are.
fn bits(address: IpAddr) -> (u128, u32) {
    match address {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    }
}

impl Network {
    /// Whether an address is one of them.
    pub fn has(&self, address: IpAddr) -> bool {
        let ((own, all), (other, its)) = (bits(self.address), bits(address));
        // All of them begin with no bits at all.
        let differ = (own ^ other).checked_shr(128 - self.bits).unwrap_or(0);
        all == its && differ == 0
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address such as 10.0.0.7 or 10.1.0.0/16");
        let (address, given) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let (_, all) = bits(address);
        let bits = match given {
            None => all,
            Some(bits) => bits.parse().map_err(|_| wrong())?,
        };
        // Those who come are known by the short form.
        let mapped = matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
        match bits <= all && !mapped {
            true => Ok(Self { address, bits }),
            false => Err(wrong()),
        }
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_the_addresses_that_begin_as_it_does() {
        let has = |network: &str, address: &str| {
            let network: Network = network.parse().unwrap();
            network.has(address.parse().unwrap())
        };
        for (network, address) in [
            ("10.0.0.7", "10.0.0.7"),
            ("10.1.0.0/16", "10.1.255.3"),
            ("10.1.2.3/16", "10.1.0.0"),
            ("0.0.0.0/0", "203.0.113.9"),
            ("fd00::/8", "fdff::1"),
            ("::/0", "2001:db8::1"),
            ("192.0.2.128/25", "192.0.2.255"),
        ] {
            assert!(has(network, address), "{network} {address}");
        }
        for (network, address) in [
            ("10.0.0.7", "10.0.0.6"),
            ("10.1.0.0/16", "10.2.0.0"),
            ("0.0.0.0/0", "::1"),
            ("::/0", "127.0.0.1"),
            ("fd00::/8", "fe00::1"),
            ("192.0.2.128/25", "192.0.2.127"),
        ] {
            assert!(!has(network, address), "{network} {address}");
        }
        for odd in [
            "",
            "10.0.0",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "a/8",
            "::ffff:10.0.0.1",
        ] {
            assert!(odd.parse::<Network>().is_err(), "{odd}");
        }
    }
}
