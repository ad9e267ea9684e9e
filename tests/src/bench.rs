//! What every benchmark prints at its end.

use std::fmt;

/// What a figure is compared with.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
    /// Nothing yet: it is recorded so that a later change can be compared.
    None,
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::AtLeast(x) => write!(f, " goal>={x}"),
            Goal::AtMost(x) => write!(f, " goal<={x}"),
            Goal::None => Ok(()),
        }
    }
}

/// Prints one figure of this run.
pub fn figure(name: &str, value: f64, unit: &str, goal: Goal) {
    println!("FIGURE {name}={value:.3} {unit}{goal}");
}

/// The median; NaN of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The smallest that at least 99 of 100 do not exceed; NaN of nothing.
pub fn p99(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * 99).div_ceil(100);
    values
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or(f64::NAN)
}
