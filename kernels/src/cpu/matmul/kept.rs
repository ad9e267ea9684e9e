//! What a path makes of activations, kept from one piece of a product to the next.

#![cfg_attr(
    not(all(target_arch = "x86_64", target_os = "linux")),
    allow(dead_code, reason = "AMX alone makes something of activations")
)]

use std::cell::Cell;
use std::marker::PhantomData;

/// Says which activations a thread's memory has, for as long as it multiplies nothing else. They are borrowed, so that they
/// stay what they were.
#[derive(Default)]
pub struct Kept<'a> {
    pub(super) brought: Brought,
    /// Of this thread, whose numbers are no other one's.
    activations: PhantomData<(&'a [u8], *const ())>,
}

/// Some rows of activations that were brought into a room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Brought {
    /// Which time it was that this thread brought any, from 1 on.
    time: u64,
    first: usize,
    /// From one row to the next.
    stride: usize,
    rows: usize,
    k: usize,
}

thread_local! {
    static TIMES: Cell<u64> = const { Cell::new(0) };
}

/// When what is in a room was brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Time(u64);

impl Brought {
    /// Whether rows of `k` from address `first` on, `stride` apart, have to be brought into the room that was last filled at
    /// `latest`. If so they are taken for brought from now on.
    pub fn renew(
        &mut self,
        latest: &mut Time,
        (first, stride): (*const u8, usize),
        rows: usize,
        k: usize,
    ) -> bool {
        let wanted = Self {
            time: latest.0,
            first: first.addr(),
            stride,
            rows,
            k,
        };
        if *self == wanted && self.time > 0 {
            return false;
        }
        // Of two rooms that a thread has none is taken for the other one.
        let time = TIMES.get() + 1;
        TIMES.set(time);
        *latest = Time(time);
        *self = Self { time, ..wanted };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_brought_last_is_there() {
        let (mut one, mut other) = (Kept::default().brought, Kept::default().brought);
        let (mut room, mut second) = (Time::default(), Time::default());
        let at = |address: usize| (std::ptr::without_provenance::<u8>(address), 64);
        assert!(one.renew(&mut room, at(64), 16, 32));
        assert!(!one.renew(&mut room, at(64), 16, 32));
        // Another room, whose memory is its own.
        assert!(one.renew(&mut second, at(64), 16, 32));
        assert!(one.renew(&mut room, at(64), 16, 32));
        // Other activations.
        assert!(one.renew(&mut room, at(128), 16, 32));
        assert!(one.renew(&mut room, at(128), 17, 32));
        assert!(one.renew(&mut room, at(128), 17, 64));
        assert!(!one.renew(&mut room, at(128), 17, 64));
        assert!(one.renew(&mut room, (at(128).0, 128), 17, 64));
        assert!(one.renew(&mut room, at(128), 17, 64));
        // Somebody else's between.
        assert!(other.renew(&mut room, at(128), 17, 64));
        assert!(one.renew(&mut room, at(128), 17, 64));
        assert!(other.renew(&mut room, at(128), 17, 64));
        // Nothing was brought yet.
        let mut nothing = Brought {
            first: 64,
            stride: 64,
            rows: 16,
            k: 32,
            ..Brought::default()
        };
        assert!(nothing.renew(&mut Time::default(), at(64), 16, 32));
    }
}
