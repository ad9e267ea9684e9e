//! What steps cost here: a fixed part, a part for each row, and one for each token that a row attends to, as measured. It
//! decides how much is done at once, never what comes out.

use std::time::Duration;

/// Share of what is remembered that one more step replaces.
const LATEST: f64 = 0.05;
/// What a guess costs of a token until something is known.
const COST: f32 = 0.25;
/// How much of the spread of attended tokens must be its own, and not that of rows, to know what each costs.
const APART: f64 = 0.05;

/// What a step's time depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Rows that it computes.
    pub rows: usize,
    /// Tokens that its rows attend to, all together.
    pub attended: usize,
}

/// Seconds of a step without rows, of a row, and of a token that a row attends to.
#[derive(Clone, Copy, Debug)]
struct Cost {
    step: f64,
    row: f64,
    token: f64,
}

impl Cost {
    fn of(&self, load: Load) -> f64 {
        self.step + self.row * load.rows as f64 + self.token * load.attended as f64
    }
}

/// A plane through the times of past steps by what they computed, the latest ones counting most (weighted least squares).
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    weight: f64,
    rows: f64,
    attended: f64,
    seconds: f64,
    rows_rows: f64,
    rows_attended: f64,
    rows_seconds: f64,
    attended_attended: f64,
    attended_seconds: f64,
    /// What rows and tokens cost, as of the last time that steps differed.
    slopes: Option<(f64, f64)>,
    /// Told once and for all, not measured.
    fixed: Option<Cost>,
}

impl Pace {
    /// One that is not measured: a step takes so long, and so much longer for each row.
    pub fn fixed(step: Duration, row: Duration) -> Self {
        Self {
            fixed: Some(Cost {
                step: step.as_secs_f64(),
                row: row.as_secs_f64(),
                token: 0.0,
            }),
            ..Self::default()
        }
    }

    /// A step took so long.
    pub fn note(&mut self, load: Load, took: Duration) {
        let (x, y, t) = (load.rows as f64, load.attended as f64, took.as_secs_f64());
        for (sum, one) in [
            (&mut self.weight, 1.0),
            (&mut self.rows, x),
            (&mut self.attended, y),
            (&mut self.seconds, t),
            (&mut self.rows_rows, x * x),
            (&mut self.rows_attended, x * y),
            (&mut self.rows_seconds, x * t),
            (&mut self.attended_attended, y * y),
            (&mut self.attended_seconds, y * t),
        ] {
            *sum += LATEST * (one - *sum);
        }
        self.slopes = self.fit().or(self.slopes);
    }

    /// None until steps of different sizes were seen.
    fn cost(&self) -> Option<Cost> {
        if self.fixed.is_some() {
            return self.fixed;
        }
        let (row, token) = self.slopes?;
        let varies = row * self.rows + token * self.attended;
        // Slopes of other steps may be too steep for these.
        let share = match varies > self.seconds {
            true => self.seconds / varies,
            false => 1.0,
        };
        Some(Cost {
            step: ((self.seconds - varies) / self.weight).max(0.0),
            row: row * share,
            token: token * share,
        })
    }

    /// What a row costs, and a token that it attends to. None where steps do not differ enough to tell.
    fn fit(&self) -> Option<(f64, f64)> {
        let mean = |sum: f64| sum / self.weight;
        let (x, y, t) = (mean(self.rows), mean(self.attended), mean(self.seconds));
        let xx = mean(self.rows_rows) - x * x;
        let xy = mean(self.rows_attended) - x * y;
        let yy = mean(self.attended_attended) - y * y;
        let xt = mean(self.rows_seconds) - x * t;
        let yt = mean(self.attended_seconds) - y * t;
        // Less than a row's difference on average is noise.
        if xx.is_nan() || xx < 1.0 {
            return None;
        }
        let apart = xx * yy - xy * xy;
        let (row, token) = ((xt * yy - yt * xy) / apart, (yt * xx - xt * xy) / apart);
        // Nothing makes a step faster, and a row costs something.
        if apart > APART * xx * yy && row > 0.0 && token >= 0.0 {
            return Some((row, token));
        }
        // Together they say what a row costs if a token costs what it did.
        let token = self.slopes.map_or(0.0, |(_, token)| token);
        let row = (xt - token * xy) / xx;
        (row > 0.0).then_some((row, token))
    }

    /// What a step takes. None if that is not known.
    pub fn step(&self, load: Load) -> Option<Duration> {
        Duration::try_from_secs_f64(self.cost()?.of(load)).ok()
    }

    /// Rows, of which each attends to so many tokens, that fit into a step beside those that draw, so that it takes no longer
    /// than `patience`, or twice what it takes without them. None if that is not known.
    pub fn rows_beside(&self, draws: Load, attended: usize, patience: Duration) -> Option<usize> {
        let cost = self.cost()?;
        let without = cost.of(draws);
        let left = (patience.as_secs_f64() - without).max(without);
        let each = cost.row + cost.token * attended as f64;
        Some((left / each.max(1e-9)) as usize)
    }

    /// What the row of a guess costs of what a token costs otherwise, in a step like this.
    pub fn guess_cost(&self, load: Load) -> f32 {
        // Of steps that are alike nothing is known; and where that makes guesses, they differ.
        let known = self.fixed.is_some() || self.fit().is_some();
        let Some(cost) = self.cost().filter(|_| known) else {
            return COST;
        };
        let whole = cost.of(load);
        // Never nothing: there is more to a row than was measured.
        (((whole - cost.step) / whole.max(1e-9)) as f32).max(0.05)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    fn rows(rows: usize) -> Load {
        Load { rows, attended: 0 }
    }

    #[test]
    fn a_line_is_found_through_steps_of_different_sizes() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows_beside(rows(1), 0, micros(1000)), None);
        for n in (1..100).cycle().take(1000) {
            pace.note(rows(n), micros(500 + 10 * n as u64));
        }
        // 2000 µs, less 500 and less 100 for those that draw.
        let beside = pace.rows_beside(rows(10), 0, micros(2000)).unwrap();
        assert!((137..=143).contains(&beside), "{beside}");
        // Too little time: as long again as the others take.
        let beside = pace.rows_beside(rows(10), 0, micros(100)).unwrap();
        assert!((57..=63).contains(&beside), "{beside}");
        let took = pace.step(rows(50)).unwrap();
        assert!((micros(990)..=micros(1010)).contains(&took), "{took:?}");
        // One row: 10 of 510 µs, and never below the least; fifty rows: 500 of 1000 µs.
        assert!((pace.guess_cost(rows(1)) - 0.05).abs() < 1e-6);
        assert!((pace.guess_cost(rows(50)) - 0.5).abs() < 0.05);
    }

    #[test]
    fn steps_of_one_size_say_nothing() {
        let mut pace = Pace::default();
        for _ in 0..100 {
            pace.note(rows(1), micros(500));
        }
        assert_eq!(pace.rows_beside(rows(1), 0, micros(1500)), None);
        assert_eq!(pace.step(rows(1)), None);
        assert_eq!(pace.guess_cost(rows(1)), COST);
    }

    #[test]
    fn steps_that_got_slower_are_noticed() {
        let mut pace = Pace::default();
        for slow in [1, 10] {
            for n in (1..100).cycle().take(1000) {
                pace.note(rows(n), micros(slow * (500 + 10 * n as u64)));
            }
        }
        let beside = pace.rows_beside(rows(0), 0, micros(15_000)).unwrap();
        assert!((95..=105).contains(&beside), "{beside}");
    }

    #[test]
    fn what_rows_attend_to_counts_by_itself() {
        let mut pace = Pace::default();
        // 500 µs, 10 for each row, and one for a hundred tokens that it attends to.
        let took = |load: Load| micros(500 + 10 * load.rows as u64 + load.attended as u64 / 100);
        for n in 0..1000 {
            let load = match n % 2 {
                0 => Load {
                    rows: 16,
                    attended: 128,
                },
                _ => Load {
                    rows: 20 + n % 7,
                    attended: 3000 * (20 + n % 7),
                },
            };
            pace.note(load, took(load));
        }
        let short = pace
            .step(Load {
                rows: 16,
                attended: 128,
            })
            .unwrap();
        assert!((micros(650)..=micros(670)).contains(&short), "{short:?}");
        let beside = |attended| pace.rows_beside(rows(0), attended, micros(1500));
        assert!(
            (24..=26).contains(&beside(3000).unwrap()),
            "{:?}",
            beside(3000)
        );
        assert!((95..=105).contains(&beside(0).unwrap()), "{:?}", beside(0));
        // Steps that are all alike say nothing new of it.
        for _ in 0..1000 {
            let load = Load {
                rows: 16,
                attended: 128,
            };
            pace.note(load, took(load));
        }
        let short = pace
            .step(Load {
                rows: 16,
                attended: 128,
            })
            .unwrap();
        assert!((micros(650)..=micros(670)).contains(&short), "{short:?}");
        assert!((95..=105).contains(&pace.rows_beside(rows(0), 0, micros(1500)).unwrap()));
        assert_eq!(pace.guess_cost(rows(1)), COST);
        // Nor are they longer than they are seen to be.
        for _ in 0..1000 {
            pace.note(rows(100), micros(700));
        }
        let long = pace.step(rows(100)).unwrap();
        assert!((micros(690)..=micros(710)).contains(&long), "{long:?}");
        assert!(pace.step(rows(200)).unwrap() <= micros(1400));
        // Where all attend alike, it is part of what a row takes.
        let mut pace = Pace::default();
        for n in (1..100).cycle().take(1000) {
            let load = Load {
                rows: n,
                attended: 3000 * n,
            };
            pace.note(load, took(load));
        }
        let beside = pace.rows_beside(rows(0), 3000, micros(1500)).unwrap();
        assert!((24..=26).contains(&beside), "{beside}");
    }
}
