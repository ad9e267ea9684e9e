//! Which worker gets a request: a function of values.

use hotcell_proto::limits;

use crate::prefixes::Prints;

/// A ready worker that has the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// The worker's name.
    pub worker: &'a str,
    /// Its numerics class for this model.
    pub class: &'a str,
    /// Tokens it still has to compute.
    pub outstanding: u64,
    /// Requests it holds.
    pub running: u32,
    /// Tokens of the request's prompt that it probably need not compute, because it read them lately.
    pub known: u64,
    /// It makes no progress, though it should.
    pub stalled: bool,
    /// It is to have no requests that begin, and those that go on only where no other may have them.
    pub drained: bool,
}

/// What a request asks of its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish<'a> {
    /// Only a worker of this class, if the stream has begun.
    pub class: Option<&'a str>,
    /// Rather not this worker, under which the stream just broke.
    pub avoid: Option<&'a str>,
    /// Whose it is; nobody's counts as nobody's, and waits for no turn.
    pub tenant: Option<&'a str>,
    /// The beginnings of its prompt, if it is worth looking for who knows them.
    pub prints: Option<&'a Prints>,
}

impl Wish<'_> {
    /// Whether it is of a request that had a worker.
    pub fn goes_on(&self) -> bool {
        self.class.is_some() || self.avoid.is_some()
    }
}

/// Why no candidate fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// None is ready, or none of the class.
    NoneReady,
    /// All that fit hold as many requests as they may.
    AllFull,
}

/// Whether a worker that holds so many requests takes no more.
pub fn is_full(running: u32) -> bool {
    running as usize >= limits::MAX_WORKER_REQUESTS
}

/// The candidate with the least tokens to compute with this request, of which it may know the beginning; among equals the
/// first by name. One that stands still only where all do.
///
/// # Errors
/// [`NoPlace`] when none fits.
pub fn choose<'c, 'a>(
    candidates: &'c [Candidate<'a>],
    wish: Wish<'_>,
) -> Result<&'c Candidate<'a>, NoPlace> {
    let fits = |c: &&Candidate<'_>| {
        wish.class.is_none_or(|class| class == c.class) && (wish.goes_on() || !c.drained)
    };
    let full = |c: &Candidate<'_>| is_full(c.running);
    candidates
        .iter()
        .filter(fits)
        .filter(|c| !full(c))
        .min_by_key(|c| {
            // What the request adds is the same everywhere, but for what is known.
            let work = i128::from(c.outstanding) - i128::from(c.known);
            let avoided = wish.avoid == Some(c.worker);
            (c.drained, c.stalled, avoided, work, c.worker)
        })
        .ok_or(if candidates.iter().any(|c| fits(&c)) {
            NoPlace::AllFull
        } else {
            NoPlace::NoneReady
        })
}

/// A device that may have a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home<'a> {
    /// The device.
    pub device: &'a str,
    /// Whether it may serve, now or soon.
    pub hopeful: bool,
    /// Whether it has the model already.
    pub has: bool,
    /// Bytes that other models take there.
    pub taken: u64,
}

/// The devices that are to have a model, so many if there are: those that have it, then those with the least taken.
pub fn homes<'a>(all: &[Home<'a>], replicas: usize) -> Vec<&'a str> {
    let mut all: Vec<_> = all.iter().filter(|home| home.hopeful).collect();
    all.sort_by_key(|home| (!home.has, home.taken, home.device));
    all.iter().take(replicas).map(|home| home.device).collect()
}

/// Tokens a request may still cost: its prompt, what it generated (which a new worker reads like a prompt),
/// and what it may still generate within the model's context.
pub fn estimate(prompt: usize, generated: usize, max_tokens: u32, context: u32) -> Estimate {
    let read = (prompt as u64).saturating_add(generated as u64);
    let room = u64::from(context).saturating_sub(read);
    let asked = match max_tokens {
        0 => room,
        n => u64::from(n).saturating_sub(generated as u64),
    };
    Estimate {
        prefill: read,
        decode: asked.min(room),
    }
}

/// What a request may cost a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Tokens to read before the first new one.
    pub prefill: u64,
    /// Tokens to generate at most.
    pub decode: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(
        worker: &'static str,
        class: &'static str,
        outstanding: u64,
    ) -> Candidate<'static> {
        Candidate {
            worker,
            class,
            outstanding,
            running: 0,
            known: 0,
            stalled: false,
            drained: false,
        }
    }

    #[test]
    fn one_that_stands_still_is_asked_only_where_all_do() {
        let still = |worker| Candidate {
            stalled: true,
            ..candidate(worker, "a", 0)
        };
        let all = [still("w0"), candidate("w1", "a", 900)];
        assert_eq!(choose(&all, Wish::default()).unwrap().worker, "w1");
        let all = [still("w0"), still("w1")];
        assert_eq!(choose(&all, Wish::default()).unwrap().worker, "w0");
    }

    #[test]
    fn one_that_is_drained_gets_only_what_goes_on_and_can_nowhere_else() {
        let drained = |worker| Candidate {
            drained: true,
            ..candidate(worker, "a", 0)
        };
        let all = [drained("w0"), candidate("w1", "a", 900)];
        let on = Wish {
            class: Some("a"),
            avoid: Some("w1"),
            ..Wish::default()
        };
        for wish in [Wish::default(), on] {
            assert_eq!(choose(&all, wish).unwrap().worker, "w1");
        }
        let all = [drained("w0")];
        assert_eq!(choose(&all, Wish::default()), Err(NoPlace::NoneReady));
        assert_eq!(choose(&all, on).unwrap().worker, "w0");
    }

    #[test]
    fn the_least_busy_wins_and_names_break_ties() {
        let all = [
            candidate("w2", "a", 5),
            candidate("w1", "a", 5),
            candidate("w0", "b", 9),
        ];
        let chosen = |wish| choose(&all, wish).map(|c| c.worker);
        assert_eq!(chosen(Wish::default()), Ok("w1"));
        let class = Some("b");
        let wish = Wish {
            class,
            ..Wish::default()
        };
        assert_eq!(chosen(wish), Ok("w0"));
        assert_eq!(
            chosen(Wish {
                avoid: Some("w1"),
                ..Wish::default()
            }),
            Ok("w2")
        );
        // Better the one that just died, respawned, than none.
        assert_eq!(
            chosen(Wish {
                class,
                avoid: Some("w0"),
                ..Wish::default()
            }),
            Ok("w0")
        );
        assert_eq!(
            chosen(Wish {
                class: Some("c"),
                ..Wish::default()
            }),
            Err(NoPlace::NoneReady)
        );
    }

    #[test]
    fn a_known_beginning_is_worth_as_many_tokens_as_it_has() {
        let mut all = [candidate("w0", "a", 100), candidate("w1", "a", 500)];
        all[1].known = 399;
        assert_eq!(choose(&all, Wish::default()).map(|c| c.worker), Ok("w0"));
        all[1].known = 401;
        assert_eq!(choose(&all, Wish::default()).map(|c| c.worker), Ok("w1"));
        all[1].known = u64::MAX;
        all[1].outstanding = u64::MAX;
        assert_eq!(choose(&all, Wish::default()).map(|c| c.worker), Ok("w1"));
    }

    #[test]
    fn full_workers_are_passed_over() {
        let mut all = [candidate("w0", "a", 0), candidate("w1", "a", 100)];
        all[0].running = limits::MAX_WORKER_REQUESTS as u32;
        assert_eq!(choose(&all, Wish::default()).map(|c| c.worker), Ok("w1"));
        all[1].running = u32::MAX;
        assert_eq!(choose(&all, Wish::default()), Err(NoPlace::AllFull));
    }

    #[test]
    fn a_model_stays_where_it_is_and_moves_only_from_what_is_lost() {
        let home = |device, has, taken| Home {
            device,
            hopeful: true,
            has,
            taken,
        };
        let mut all = [
            home("a", false, 5),
            home("b", true, 9),
            home("c", false, 1),
            home("d", false, 5),
        ];
        assert_eq!(homes(&all, 1), ["b"]);
        assert_eq!(homes(&all, 3), ["b", "c", "a"]);
        all[1].hopeful = false;
        assert_eq!(homes(&all, 2), ["c", "a"]);
        assert_eq!(homes(&all, 9), ["c", "a", "d"]);
    }

    proptest! {
        #[test]
        fn no_estimate_goes_past_the_context(
            prompt in 0usize..1 << 20, generated in 0usize..1 << 20, max in any::<u32>(), context in any::<u32>(),
        ) {
            let e = estimate(prompt, generated, max, context);
            prop_assert!(e.decode == 0 || e.prefill + e.decode <= u64::from(context));
            prop_assert!(max == 0 || e.decode <= u64::from(max));
        }
    }
}
