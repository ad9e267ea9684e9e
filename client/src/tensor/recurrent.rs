//! Recurrences over time with a state of fixed size.

use super::array::{Tensor, invalid};

impl Tensor {
    /// The gated delta rule: this is `q` `[b, t, hk, dk]`, `k` like it, `v` `[b, t, hv, dv]`, `gate` and `beta` `[b, t, hv]`, and the state
    /// before `[b, hv, dv, dk]` (0 if not given). Gives `[b, t, hv, dv]` and the state after.
    pub fn gated_delta(
        &self,
        k: &Tensor,
        v: &Tensor,
        gate: &Tensor,
        beta: &Tensor,
        state: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let inputs = [Some(self), Some(k), Some(v), Some(gate), Some(beta), state];
        scanned("gated_delta", &inputs)
    }

    /// Mamba-2's recurrence: this is `x` `[n, t, h, p]`, `dt` `[n, t, h]`, `a` `[h]`, `b` and `c` `[n, t, g, s]`, `d` `[h]`, and the state before
    /// `[n, h, p, s]` (0 if not given). Gives `[n, t, h, p]` and the state after.
    pub fn mamba2_scan(
        &self,
        dt: &Tensor,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        d: Option<&Tensor>,
        state: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let inputs = [Some(self), Some(dt), Some(a), Some(b), Some(c), d, state];
        scanned("mamba2_scan", &inputs)
    }
}

fn scanned(op: &str, inputs: &[Option<&Tensor>]) -> (Tensor, Tensor) {
    let mut made = Tensor::apply(op, inputs, vec![]).into_iter();
    let none = || Tensor::wrong(None, invalid(format!("{op} has no result")));
    let first = made.next().unwrap_or_else(none);
    let second = made.next().unwrap_or_else(|| first.clone());
    (first, second)
}
