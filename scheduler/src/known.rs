//! Known answers: whether what a worker computes is what was computed before. Pure; time is an argument.
//!
//! The first answer that any worker of a numerics class gives for a model is the record, and every later one must equal
//! it, bit by bit. Which of two that differ is right cannot be told from the answers, so devices vote: the record stands
//! until more devices gave another answer than gave it. A worker that differs from the record is replaced, because most
//! faults go with the process; the second time the supervisor takes its device out. But should a process that
//! differed be followed by one that says the same, while a single process ever gave the record, it is that one's word
//! against theirs: it is replaced as well, and its successor casts the deciding vote before anybody is condemned.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use hotcell_proto::{
    ids::ModelName,
    limits,
    v1::{CheckResponse, WeightsPart},
};

/// A SHA-256.
pub type Hash = [u8; 32];

/// Records kept at most: one for each model and class. Classes are workers' words.
const MAX_RECORDS: usize = 4 * limits::MAX_MODELS;
/// Different answers that are told apart; further ones are wrong and have no vote.
const MAX_ANSWERS: usize = 8;
/// So much longer than a check the pause after it is at least: checks take 0.1 % of the time at most.
pub const SHARE: u32 = 1000;
/// Intervals after which a worker that is never idle is checked beside its requests.
const PATIENCE: u32 = 10;

/// A model in a numerics class.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// The model.
    pub model: ModelName,
    /// The class.
    pub class: String,
}

/// A worker's process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Witness {
    /// The worker's name.
    pub worker: String,
    /// Which of its processes.
    pub epoch: u64,
}

impl Witness {
    /// The worker whose device it runs on: a standby's or a throw-away worker's name is that one's and a suffix.
    fn home(&self) -> &str {
        let name = self.worker.split_once('.');
        name.map_or(self.worker.as_str(), |(home, _)| home)
    }
}

/// What a worker said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Hash of the logits after each step.
    pub steps: Vec<Hash>,
    /// A part of the weights and its hash.
    pub part: Option<(u32, Hash)>,
    /// How many parts there are, if it said so.
    pub parts: u32,
}

impl Answer {
    /// Believes a worker as far as it can be believed.
    ///
    /// # Errors
    /// What is wrong with its words.
    pub fn believe(said: &CheckResponse, steps: u32) -> Result<Self, String> {
        let hash = |bytes: &[u8]| {
            Hash::try_from(bytes).map_err(|_| format!("a hash of {} bytes", bytes.len()))
        };
        if said.answers.is_empty() || said.answers.len() > steps as usize {
            return Err(format!("{} answers to {steps} steps", said.answers.len()));
        }
        let answers = said.answers.iter().map(|bytes| hash(bytes));
        let mut answer = Answer {
            steps: answers.collect::<Result<_, _>>()?,
            ..Answer::default()
        };
        if let Some(WeightsPart {
            index,
            count,
            hash: bytes,
        }) = &said.weights
        {
            if index >= count || *count > limits::MAX_WEIGHTS_PARTS {
                return Err(format!("part {index} of {count}"));
            }
            answer.part = Some((*index, hash(bytes)?));
            answer.parts = *count;
        }
        Ok(answer)
    }
}

/// What an answer shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first of its kind, or equal to the record.
    Right,
    /// Not what was recorded.
    Wrong {
        /// One of those that gave the recorded answer.
        record: Witness,
        /// When this process last gave it; never, if none.
        right_at: Option<Duration>,
        /// Whether it is the weights' bytes that differ.
        weights: bool,
    },
    /// Not what was recorded, but this process is the second that says so and only that one ever said otherwise: let
    /// its successor decide, and judge again then.
    Contested(Witness),
    /// Right, and what these said, the record until now, was not.
    Overturned(Vec<Witness>),
}

/// A device's vote for an answer.
#[derive(Debug)]
struct Voice {
    last: Witness,
    /// Whether more than one of its processes gave it.
    several: bool,
}

/// An answer and the devices that gave it, by the names of their workers.
#[derive(Debug)]
struct Given {
    steps: Vec<Hash>,
    by: BTreeMap<String, Voice>,
}

impl Given {
    fn new(by: &Witness, steps: &[Hash]) -> Self {
        let voice = Voice {
            last: by.clone(),
            several: false,
        };
        Self {
            steps: steps.to_vec(),
            by: BTreeMap::from([(by.home().to_owned(), voice)]),
        }
    }

    /// Counts one more that says the same, and perhaps more of it. Returns whether several processes of its device did.
    fn join(&mut self, by: &Witness, steps: &[Hash]) -> bool {
        if steps.len() > self.steps.len() {
            self.steps = steps.to_vec();
        }
        match self.by.entry(by.home().to_owned()) {
            Entry::Occupied(voice) => {
                let voice = voice.into_mut();
                voice.several |= voice.last != *by;
                voice.last = by.clone();
                voice.several
            }
            Entry::Vacant(new) => {
                new.insert(Voice {
                    last: by.clone(),
                    several: false,
                });
                false
            }
        }
    }

    /// The one process that gave it, if it is another device's.
    fn single_word_against(&self, other: &Witness) -> Option<Witness> {
        let mut voices = self.by.values();
        let single = voices.next().filter(|_| voices.next().is_none());
        let single = single.filter(|voice| !voice.several)?;
        (single.last.home() != other.home()).then(|| single.last.clone())
    }
}

/// What is known about one subject.
#[derive(Debug)]
struct Record {
    record: Given,
    others: Vec<Given>,
    parts: BTreeMap<u32, Hash>,
    /// By home: the last process that was right, and when.
    right: BTreeMap<String, (Witness, Duration)>,
}

impl Record {
    fn new(by: &Witness, answer: &Answer, now: Duration) -> Self {
        Self {
            record: Given::new(by, &answer.steps),
            others: Vec::new(),
            parts: answer.part.into_iter().collect(),
            right: BTreeMap::from([(by.home().to_owned(), (by.clone(), now))]),
        }
    }

    fn judge(&mut self, by: &Witness, answer: &Answer, now: Duration) -> Verdict {
        let weights = answer.part.is_some_and(|(index, hash)| {
            let recorded = self.parts.get(&index);
            recorded.is_some_and(|recorded| *recorded != hash)
        });
        if !weights && agree(&self.record.steps, &answer.steps) {
            self.record.join(by, &answer.steps);
            self.parts.extend(answer.part);
            self.right.insert(by.home().to_owned(), (by.clone(), now));
            return Verdict::Right;
        }
        if !weights {
            let same = |given: &Given| agree(&given.steps, &answer.steps);
            let (at, several) = match self.others.iter().position(same) {
                Some(at) => (at, self.others[at].join(by, &answer.steps)),
                None if self.others.len() >= MAX_ANSWERS => return self.wrong(by, false),
                None => {
                    self.others.push(Given::new(by, &answer.steps));
                    (self.others.len() - 1, false)
                }
            };
            if self.others[at].by.len() > self.record.by.len() {
                std::mem::swap(&mut self.record, &mut self.others[at]);
                // Whose they were is not known.
                self.parts.clear();
                self.right.clear();
                let accused = self.others[at].by.values();
                return Verdict::Overturned(accused.map(|voice| voice.last.clone()).collect());
            }
            if several && let Some(single) = self.record.single_word_against(by) {
                return Verdict::Contested(single);
            }
        }
        self.wrong(by, weights)
    }

    fn wrong(&self, by: &Witness, weights: bool) -> Verdict {
        let mut voices = self.record.by.values();
        let right_at = self.right.get(by.home());
        Verdict::Wrong {
            record: voices.next().map_or_else(|| by.clone(), |v| v.last.clone()),
            right_at: right_at.filter(|(who, _)| who == by).map(|(_, at)| *at),
            weights,
        }
    }
}

fn agree(a: &[Hash], b: &[Hash]) -> bool {
    a.iter().zip(b).all(|(a, b)| a == b)
}

/// When a process was last checked, and how long that took.
#[derive(Clone, Copy, Debug)]
struct Turn {
    epoch: u64,
    at: Duration,
    took: Duration,
    /// The part of the weights that comes next.
    part: u32,
}

/// How often idle workers are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Between two checks of one.
    pub interval: Duration,
    /// So many times as long as a check is the pause after it at least.
    pub share: u32,
}

/// All records.
#[derive(Debug, Default)]
pub struct Book {
    records: BTreeMap<Subject, Record>,
    turns: BTreeMap<(String, ModelName), Turn>,
}

impl Book {
    /// Judges what a process said at `now`.
    pub fn judge(
        &mut self,
        subject: &Subject,
        by: &Witness,
        answer: &Answer,
        now: Duration,
    ) -> Verdict {
        let full = self.records.len() >= MAX_RECORDS;
        let record = match self.records.entry(subject.clone()) {
            Entry::Occupied(record) => record.into_mut(),
            Entry::Vacant(_) if full => return Verdict::Right,
            Entry::Vacant(new) => {
                new.insert(Record::new(by, answer, now));
                return Verdict::Right;
            }
        };
        record.judge(by, answer, now)
    }

    /// Whether anybody's answer is there to hold others to.
    pub fn has(&self, subject: &Subject) -> bool {
        self.records.contains_key(subject)
    }

    /// Whether this process was asked about a model, and answered.
    pub fn asked(&self, by: &Witness, model: &ModelName) -> bool {
        let turn = self.turns.get(&(by.worker.clone(), model.clone()));
        turn.is_some_and(|turn| turn.epoch == by.epoch)
    }

    /// Notes that a process was checked.
    pub fn checked(
        &mut self,
        by: &Witness,
        model: &ModelName,
        answer: &Answer,
        now: Duration,
        took: Duration,
    ) {
        let key = (by.worker.clone(), model.clone());
        let mut part = self.turns.get(&key).map_or(0, |turn| turn.part);
        if let Some((index, _)) = answer.part {
            part = (index + 1).checked_rem(answer.parts).unwrap_or(0);
        }
        let epoch = by.epoch;
        let (at, took) = (now, took);
        self.turns.insert(
            key,
            Turn {
                epoch,
                at,
                took,
                part,
            },
        );
    }

    /// A process goes by another name from now on, and gets to work: an interval later its next check is due.
    pub fn rename(&mut self, from: &Witness, to: &Witness, now: Duration) {
        let held = self.turns.iter();
        let moved: Vec<_> = held
            .filter(|((worker, _), turn)| *worker == from.worker && turn.epoch == from.epoch)
            .map(|((_, model), turn)| (model.clone(), *turn))
            .collect();
        for (model, turn) in moved {
            self.turns.remove(&(from.worker.clone(), model.clone()));
            let turn = Turn {
                epoch: to.epoch,
                at: now,
                ..turn
            };
            self.turns.insert((to.worker.clone(), model), turn);
        }
        for record in self.records.values_mut() {
            let given = std::iter::once(&mut record.record).chain(&mut record.others);
            let voices = given.flat_map(|given| given.by.values_mut().map(|voice| &mut voice.last));
            let right = record.right.values_mut().map(|(who, _)| who);
            for who in voices.chain(right).filter(|who| *who == from) {
                *who = to.clone();
            }
        }
    }

    /// The part of the weights that is to be hashed next.
    pub fn next_part(&self, worker: &str, model: &ModelName) -> u32 {
        let key = (worker.to_owned(), model.clone());
        self.turns.get(&key).map_or(0, |turn| turn.part)
    }

    /// When a process is to be checked again: an interval after the last time, later if that took long, and much later
    /// while it is busy. At once if it never was.
    pub fn due(&self, by: &Witness, model: &ModelName, busy: bool, pace: Pace) -> Duration {
        let key = (by.worker.clone(), model.clone());
        let turn = self.turns.get(&key).filter(|turn| turn.epoch == by.epoch);
        let Some(turn) = turn else {
            return Duration::ZERO;
        };
        let pause = pace.interval.max(turn.took.saturating_mul(pace.share));
        let patience = if busy { PATIENCE } else { 1 };
        turn.at.saturating_add(pause.saturating_mul(patience))
    }

    /// Forgets a model: what is loaded under its name next may be another one.
    pub fn forget(&mut self, model: &ModelName) {
        self.records.retain(|subject, _| subject.model != *model);
        self.turns.retain(|(_, of), _| of != model);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WHOLE: u32 = limits::MAX_CHECK_STEPS;
    const PACE: Pace = Pace {
        interval: Duration::from_secs(60),
        share: SHARE,
    };

    fn subject() -> Subject {
        Subject {
            model: ModelName::new("m").expect("a name"),
            class: "cpu".to_owned(),
        }
    }

    fn by(worker: &str, epoch: u64) -> Witness {
        Witness {
            worker: worker.to_owned(),
            epoch,
        }
    }

    fn says(values: &[u8]) -> Answer {
        Answer {
            steps: values.iter().map(|&v| [v; 32]).collect(),
            ..Answer::default()
        }
    }

    fn part(index: u32, value: u8) -> Answer {
        Answer {
            part: Some((index, [value; 32])),
            parts: 3,
            ..says(&[1, 1])
        }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn is_wrong(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Wrong { .. })
    }

    #[test]
    fn the_first_answer_is_the_record_and_another_one_is_wrong_since_it_was_last_right() {
        let mut book = Book::default();
        let mut judge = |w: &Witness, a: &[u8], s| book.judge(&subject(), w, &says(a), at(s));
        assert_eq!(judge(&by("w0", 1), &[1, 2, 3], 1), Verdict::Right);
        assert_eq!(judge(&by("w0", 1), &[1, 2, 3], 61), Verdict::Right);
        // A brief answer is held against its part of the record.
        assert_eq!(judge(&by("w1", 1), &[1], 62), Verdict::Right);
        let wrong = |right_at| Verdict::Wrong {
            record: by("w0", 1),
            right_at,
            weights: false,
        };
        assert_eq!(judge(&by("w0", 1), &[1, 2, 4], 121), wrong(Some(at(61))));
        assert_eq!(judge(&by("w0", 2), &[4], 122), wrong(None));
    }

    #[test]
    fn of_two_devices_that_differ_the_one_whose_next_process_differs_from_its_last_was_wrong() {
        let mut book = Book::default();
        let mut judge = |w: &Witness, a: &[u8]| book.judge(&subject(), w, &says(a), at(1));
        assert_eq!(judge(&by("w0", 1), &[9, 9]), Verdict::Right);
        assert!(is_wrong(&judge(&by("w1", 1), &[1, 2])));
        // The same process again proves nothing.
        assert!(is_wrong(&judge(&by("w1", 1), &[1, 2])));
        let contested = Verdict::Contested(by("w0", 1));
        assert_eq!(judge(&by("w1", 2), &[1]), contested);
        // Until somebody decides.
        assert_eq!(judge(&by("w1", 2), &[1]), contested);
        let overturned = Verdict::Overturned(vec![by("w0", 1)]);
        assert_eq!(judge(&by("w0", 2), &[1]), overturned);
        assert_eq!(judge(&by("w1", 2), &[1]), Verdict::Right);
        // Of the new record, the longer answer counts.
        assert!(is_wrong(&judge(&by("w0", 2), &[1, 3])));
        assert_eq!(judge(&by("w0", 2), &[1, 2]), Verdict::Right);
    }

    #[test]
    fn of_two_devices_that_each_insist_the_first_one_wins() {
        let mut book = Book::default();
        let mut judge = |w: &Witness, a: u8| book.judge(&subject(), w, &says(&[a]), at(1));
        judge(&by("w0", 1), 1);
        assert!(is_wrong(&judge(&by("w1", 1), 9)));
        assert!(matches!(judge(&by("w1", 2), 9), Verdict::Contested(_)));
        assert_eq!(judge(&by("w0", 2), 1), Verdict::Right);
        assert!(is_wrong(&judge(&by("w1", 2), 9)));
    }

    #[test]
    fn of_three_devices_two_are_right() {
        let mut book = Book::default();
        let mut judge = |w: &Witness, a: u8| book.judge(&subject(), w, &says(&[a]), at(1));
        judge(&by("w0", 1), 9);
        assert!(is_wrong(&judge(&by("w1", 1), 1)));
        let overturned = Verdict::Overturned(vec![by("w0", 1)]);
        assert_eq!(judge(&by("w2", 1), 1), overturned);
        for epoch in 2..4 {
            assert!(is_wrong(&judge(&by("w0", epoch), 9)));
        }
    }

    #[test]
    fn a_device_cannot_overturn_what_it_gave_itself() {
        let mut book = Book::default();
        let mut judge = |w: &Witness, a: u8| book.judge(&subject(), w, &says(&[a]), at(1));
        judge(&by("w0", 1), 1);
        for epoch in 1..4 {
            assert!(is_wrong(&judge(&by("w0", epoch), 9)), "{epoch}");
            assert!(is_wrong(&judge(&by("w0.standby", epoch), 9)), "{epoch}");
        }
        assert_eq!(judge(&by("w0", 9), 1), Verdict::Right);
    }

    #[test]
    fn weights_are_compared_part_by_part_and_the_parts_come_in_turn() {
        let mut book = Book::default();
        let model = subject().model;
        let w0 = by("w0", 1);
        for round in 0..2 {
            for index in 0..3 {
                assert_eq!(book.next_part("w0", &model), index);
                let answer = part(index, index as u8);
                let verdict = book.judge(&subject(), &w0, &answer, at(round));
                assert_eq!(verdict, Verdict::Right);
                book.checked(&w0, &model, &answer, at(round), at(0));
            }
        }
        let verdict = book.judge(&subject(), &w0, &part(1, 9), at(7));
        assert!(matches!(
            verdict,
            Verdict::Wrong { weights: true, right_at: Some(t), .. } if t == at(1)
        ));
    }

    #[test]
    fn checks_are_rarer_when_they_are_long_or_the_worker_is_busy() {
        let mut book = Book::default();
        let (model, w0) = (subject().model, by("w0", 1));
        let due = |book: &Book, busy| book.due(&w0, &model, busy, PACE);
        assert_eq!(due(&book, true), at(0));
        book.checked(&w0, &model, &says(&[1]), at(100), Duration::from_millis(5));
        assert_eq!(due(&book, false), at(160));
        assert_eq!(due(&book, true), at(700));
        book.checked(
            &w0,
            &model,
            &says(&[1]),
            at(100),
            Duration::from_millis(500),
        );
        assert_eq!(due(&book, false), at(600));
        // Another process is due at once.
        assert_eq!(book.due(&by("w0", 2), &model, false, PACE), at(0));
    }

    #[test]
    fn a_standby_that_takes_a_place_keeps_what_it_answered() {
        let mut book = Book::default();
        let model = subject().model;
        let (standby, w0) = (by("w0.standby", 3), by("w0", 7));
        book.judge(&subject(), &standby, &says(&[1]), at(10));
        book.checked(&standby, &model, &says(&[1]), at(10), at(0));
        book.rename(&standby, &w0, at(500));
        assert_eq!(book.due(&w0, &model, false, PACE), at(560));
        let verdict = book.judge(&subject(), &w0, &says(&[2]), at(600));
        let wrong = Verdict::Wrong {
            record: w0,
            right_at: Some(at(10)),
            weights: false,
        };
        assert_eq!(verdict, wrong);
    }

    #[test]
    fn an_unloaded_model_is_forgotten() {
        let mut book = Book::default();
        book.judge(&subject(), &by("w0", 1), &says(&[1]), at(1));
        book.forget(&subject().model);
        let verdict = book.judge(&subject(), &by("w0", 1), &says(&[2]), at(1));
        assert_eq!(verdict, Verdict::Right);
    }

    #[test]
    fn what_a_worker_says_is_believed_within_bounds() {
        let said = |lengths: &[usize], weights: Option<(u32, u32, usize)>| CheckResponse {
            answers: lengths.iter().map(|&n| vec![0; n]).collect(),
            weights: weights.map(|(index, count, n)| WeightsPart {
                index,
                count,
                hash: vec![0; n],
            }),
            changed_file: String::new(),
        };
        for good in [
            said(&[32], None),
            said(&[32; 5], Some((0, 1, 32))),
            said(&[32], Some((1, limits::MAX_WEIGHTS_PARTS, 32))),
        ] {
            assert!(Answer::believe(&good, WHOLE).is_ok(), "{good:?}");
        }
        for bad in [
            said(&[], None),
            said(&[32; 6], None),
            said(&[31], None),
            said(&[32], Some((1, 1, 32))),
            said(&[32], Some((0, 0, 32))),
            said(&[32], Some((0, u32::MAX, 32))),
            said(&[32], Some((0, 1, 33))),
        ] {
            assert!(Answer::believe(&bad, WHOLE).is_err(), "{bad:?}");
        }
    }

    proptest! {
        /// Whoever says what in whatever order: only what more devices said becomes the record, and memory stays bounded.
        #[test]
        fn only_more_devices_overturn_the_record(
            course in proptest::collection::vec((0u8..4, 1u64..6, 0u8..12), 1..100),
        ) {
            let mut book = Book::default();
            let mut homes: BTreeMap<u8, std::collections::BTreeSet<u8>> = BTreeMap::new();
            let mut record = course[0].2;
            for (home, epoch, value) in course {
                let verdict = book.judge(&subject(), &by(&format!("w{home}"), epoch), &says(&[value]), at(1));
                homes.entry(value).or_default().insert(home);
                match verdict {
                    Verdict::Right => prop_assert_eq!(value, record),
                    Verdict::Overturned(accused) => {
                        prop_assert_ne!(value, record);
                        prop_assert!(homes[&value].len() > homes[&record].len());
                        prop_assert_eq!(accused.len(), homes[&record].len());
                        record = value;
                    }
                    Verdict::Contested(single) => {
                        prop_assert_ne!(value, record);
                        prop_assert_ne!(single.worker, format!("w{home}"));
                    }
                    Verdict::Wrong { .. } => prop_assert_ne!(value, record),
                }
            }
            prop_assert!(book.records[&subject()].others.len() <= MAX_ANSWERS);
        }
    }
}
