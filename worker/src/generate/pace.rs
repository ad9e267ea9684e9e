//! What steps cost here: a fixed part and a part for each row, as measured. It decides how much is done at once, never
//! what comes out.

use std::time::Duration;

/// Share of what is remembered that one more step replaces.
const LATEST: f64 = 0.05;
/// What a guess costs of a token until something is known.
const COST: f32 = 0.25;

/// A line through the times of past steps by their rows, the latest ones counting most (weighted least squares).
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    weight: f64,
    rows: f64,
    seconds: f64,
    rows_rows: f64,
    rows_seconds: f64,
    /// Told once and for all, not measured: seconds of a step without rows, and of a row.
    fixed: Option<(f64, f64)>,
}

impl Pace {
    /// One that is not measured: a step takes so long, and so much longer for each row.
    pub fn fixed(step: Duration, row: Duration) -> Self {
        Self {
            fixed: Some((step.as_secs_f64(), row.as_secs_f64())),
            ..Self::default()
        }
    }

    /// A step of so many rows took so long.
    pub fn note(&mut self, rows: usize, took: Duration) {
        let (x, y) = (rows as f64, took.as_secs_f64());
        for (sum, one) in [
            (&mut self.weight, 1.0),
            (&mut self.rows, x),
            (&mut self.seconds, y),
            (&mut self.rows_rows, x * x),
            (&mut self.rows_seconds, x * y),
        ] {
            *sum += LATEST * (one - *sum);
        }
    }

    /// Seconds of a step without rows, and of a row. None until steps of different sizes were seen.
    fn line(&self) -> Option<(f64, f64)> {
        if self.fixed.is_some() {
            return self.fixed;
        }
        if self.weight <= 0.0 {
            return None;
        }
        let (x, y) = (self.rows / self.weight, self.seconds / self.weight);
        let spread = self.rows_rows / self.weight - x * x;
        // Less than a row's difference on average is noise.
        if spread < 1.0 {
            return None;
        }
        let per_row = ((self.rows_seconds / self.weight - x * y) / spread).max(0.0);
        Some(((y - per_row * x).max(0.0), per_row))
    }

    /// Rows that fit into a step beside those of so many that draw, so that it takes no longer than `patience`, or twice
    /// what it takes without them. None if that is not known.
    pub fn rows_beside(&self, draws: usize, patience: Duration) -> Option<usize> {
        let (fixed, per_row) = self.line()?;
        let without = fixed + per_row * draws as f64;
        let left = (patience.as_secs_f64() - without).max(without);
        Some((left / per_row.max(1e-9)) as usize)
    }

    /// What the row of a guess costs of what a token costs otherwise, in a step with so many rows.
    pub fn guess_cost(&self, rows: usize) -> f32 {
        let Some((fixed, per_row)) = self.line() else {
            return COST;
        };
        let others = per_row * rows.max(1) as f64;
        // Never nothing: there is more to a row than was measured.
        ((others / (fixed + others).max(1e-9)) as f32).max(0.05)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    #[test]
    fn a_line_is_found_through_steps_of_different_sizes() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows_beside(1, micros(1000)), None);
        for rows in (1..100).cycle().take(1000) {
            pace.note(rows, micros(500 + 10 * rows as u64));
        }
        // 2000 µs, less 500 and less 100 for those that draw.
        let rows = pace.rows_beside(10, micros(2000)).unwrap();
        assert!((137..=143).contains(&rows), "{rows}");
        // Too little time: as long again as the others take.
        let rows = pace.rows_beside(10, micros(100)).unwrap();
        assert!((57..=63).contains(&rows), "{rows}");
        // One row: 10 of 510 µs, and never below the least; fifty rows: 500 of 1000 µs.
        assert!((pace.guess_cost(1) - 0.05).abs() < 1e-6);
        assert!((pace.guess_cost(50) - 0.5).abs() < 0.05);
    }

    #[test]
    fn steps_of_one_size_say_nothing() {
        let mut pace = Pace::default();
        for _ in 0..100 {
            pace.note(1, micros(500));
        }
        assert_eq!(pace.rows_beside(1, micros(1500)), None);
        assert_eq!(pace.guess_cost(1), COST);
    }

    #[test]
    fn steps_that_got_slower_are_noticed() {
        let mut pace = Pace::default();
        for slow in [1, 10] {
            for rows in (1..100).cycle().take(1000) {
                pace.note(rows, micros(slow * (500 + 10 * rows as u64)));
            }
        }
        let rows = pace.rows_beside(0, micros(15_000)).unwrap();
        assert!((95..=105).contains(&rows), "{rows}");
    }
}
