//! A batch of a tiny model in this process, and requests of all kinds.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, atomic::AtomicBool},
};

use hotcell_client::v1::{self, generate_event};
use hotcell_graph::DType;
use hotcell_ipc::blackbox::Writer;
use hotcell_kernels::{
    cpu::{CpuDevice, path::CpuPath},
    plan::PlanHints,
};
use hotcell_tests::{cluster::golden, model::open};
use hotcell_worker::{
    generate::{
        batch::Batch,
        embed::{Pooling, Reading},
        fair::Class,
        grammar::Grammars,
        sampler::SamplingParams,
        sequence::{Event, Outlet, Place, Request, Sequence},
        task::Task,
    },
    model::{
        run::{RunShape, Runner},
        text::ModelText,
    },
};
use tokio::sync::{mpsc, oneshot};

/// What a batch is made with.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub model: &'static str,
    pub blocks: usize,
    /// Of layers with a window, in a model that has others too.
    pub window_blocks: usize,
    pub rows: usize,
    pub sequences: usize,
    pub context: usize,
    pub cache: DType,
    pub threads: u32,
}

pub const SIZE: Size = Size {
    model: "llama2",
    blocks: 64,
    window_blocks: 64,
    rows: 128,
    sequences: 64,
    context: 128,
    cache: DType::F16,
    threads: 2,
};

pub struct Bench {
    pub batch: Batch,
    text: ModelText,
    grammars: Arc<Grammars>,
    ends: Vec<u32>,
    context: usize,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    pub max_tokens: usize,
    pub stop: Vec<String>,
    pub tenant: &'static str,
    pub priority: u32,
    pub speculate: bool,
    /// A regular expression that its text follows.
    pub regex: Option<&'static str>,
    /// Events that its reader has room for.
    pub room: usize,
}

/// A prompt of so many tokens.
pub fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 7 + seed * 13) % 250).collect()
}

/// The words of a request like most.
pub fn ask(seed: u32) -> Ask {
    Ask {
        prompt: prompt(seed, 20 + seed),
        sampling: SamplingParams {
            temperature: 0.8,
            seed: u64::from(seed),
            ..SamplingParams::default()
        },
        max_tokens: 60,
        stop: vec![],
        tenant: "",
        priority: 0,
        speculate: true,
        regex: None,
        room: 200,
    }
}

/// Greedy, sampled, penalised, with log probabilities, with stop strings, urgent, without guesses, with grammars.
pub fn all_kinds() -> Vec<Ask> {
    let warm = |seed: u32| ask(seed).sampling;
    vec![
        Ask {
            sampling: SamplingParams::default(),
            ..ask(0)
        },
        Ask {
            sampling: SamplingParams {
                top_k: 20,
                top_p: 0.9,
                min_p: 0.01,
                top_logprobs: 5,
                ..warm(1)
            },
            priority: 3,
            ..ask(1)
        },
        Ask {
            sampling: SamplingParams {
                repetition_penalty: 1.3,
                presence_penalty: 0.4,
                frequency_penalty: 0.2,
                top_logprobs: 3,
                ..warm(2)
            },
            tenant: "other",
            ..ask(2)
        },
        Ask {
            sampling: SamplingParams {
                logit_bias: vec![(5, 3.0), (9, -100.0)],
                branch: 4,
                logprobs: true,
                ..warm(3)
            },
            speculate: false,
            ..ask(3)
        },
        Ask {
            stop: vec!["e".into(), "zz".into()],
            tenant: "other",
            priority: 7,
            ..ask(4)
        },
        // Goes round and round, so that guesses are right.
        Ask {
            prompt: prompt(5, 6).repeat(6),
            sampling: SamplingParams {
                top_logprobs: 2,
                ..SamplingParams::default()
            },
            max_tokens: 50,
            ..ask(5)
        },
        Ask {
            regex: Some("([a-z]{2,5} ){200,}"),
            ..ask(6)
        },
        // Most of it may be guessed: nothing else is allowed.
        Ask {
            regex: Some("(round and ){200,}"),
            tenant: "other",
            ..ask(7)
        },
    ]
}

/// What a model's requests need to follow grammars: it takes a while to make, and is the same for all.
fn grammars_of(model: &'static str) -> Arc<Grammars> {
    static ALL: Mutex<BTreeMap<&str, Arc<Grammars>>> = Mutex::new(BTreeMap::new());
    let mut all = ALL.lock().unwrap();
    Arc::clone(all.entry(model).or_default())
}

impl Bench {
    pub fn new(size: Size) -> Self {
        let source = open(&golden(size.model)).unwrap();
        let shape = RunShape {
            context: size.context,
            blocks: size.blocks,
            window_blocks: size.window_blocks,
            max_rows: size.rows,
            max_sequences: size.sequences,
            ..RunShape::for_model(&source.config, size.cache)
        };
        let device = CpuDevice::with_path(size.threads, CpuPath::detect()).unwrap();
        let runner = Runner::new(&device, &source, shape, &PlanHints::default(), &|| {}).unwrap();
        let text = ModelText::open(&source).unwrap();
        Self {
            batch: Batch::new(runner, [3; 32], Writer::private([].into_iter())),
            text,
            grammars: grammars_of(size.model),
            ends: source.config.eos.clone(),
            context: shape.context,
        }
    }

    /// Of the usual size, with so many blocks.
    pub fn with_blocks(blocks: usize) -> Self {
        Self::new(Size { blocks, ..SIZE })
    }

    pub fn push(&mut self, ask: &Ask) -> Reader {
        let (events, events_of) = mpsc::channel(ask.room);
        let follow = |regex: &str| {
            let kind = Some(v1::grammar::Kind::Regex(regex.to_owned()));
            let (grammar, tokenizer) = (v1::Grammar { kind }, &self.text.tokenizer);
            let family = &self.text.family;
            self.grammars
                .follow(&grammar, tokenizer, &self.ends, family)
        };
        let request = Request {
            hash: [0; 32],
            id: "r".to_owned(),
            prompt: ask.prompt.clone(),
            generated: vec![],
            text_bytes_emitted: 0,
            sampling: ask.sampling.clone(),
            max_tokens: Some(ask.max_tokens),
            stop: ask.stop.clone(),
            end_tokens: HashSet::new(),
            deadline: None,
            class: class(ask.tenant, ask.priority),
            speculate: ask.speculate,
            grammar: ask.regex.map(|regex| follow(regex).unwrap()),
            parser: None,
            asked: Box::default(),
        };
        let outlet = Outlet {
            events,
            paused: Arc::new(AtomicBool::new(false)),
            place: Place::take(&Arc::default(), 99).unwrap(),
        };
        let numerics = v1::NumericsClass::default();
        let made = Sequence::new(
            request,
            &self.text.tokenizer,
            self.context,
            numerics,
            outlet,
        );
        let (sequence, end) = made.unwrap();
        assert!(end.is_none());
        self.batch.push(Task::Generate(Box::new(sequence)));
        Reader {
            events: events_of,
            said: Said::default(),
        }
    }

    pub fn embed(
        &mut self,
        tokens: &[u32],
        pooling: Pooling,
    ) -> oneshot::Receiver<Result<Vec<f32>, hotcell_proto::error::Error>> {
        let (reply, answer) = oneshot::channel();
        let place = Arc::new(Place::take(&Arc::default(), 99).unwrap());
        let how = (pooling, false);
        let reading = Reading::new(tokens.to_vec(), how, class("", 0), None, (reply, place));
        self.batch.push(Task::Embed(Box::new(reading)));
        answer
    }

    /// Steps to the end; returns how many.
    pub fn run(&mut self) -> usize {
        let mut steps = 0;
        while self.batch.step() {
            steps += 1;
            assert!(steps < 20_000, "no progress");
        }
        steps
    }

    /// One request from its beginning to its end.
    pub fn say(&mut self, ask: &Ask) -> Said {
        let mut reader = self.push(ask);
        self.run();
        reader.read();
        assert!(reader.said.finished.is_some(), "{ask:?}");
        reader.said
    }

    /// What has become of the cache's blocks.
    pub fn status(&self) -> v1::CacheStatus {
        self.batch.status("m")
    }
}

pub fn class(tenant: &str, priority: u32) -> Class {
    Class {
        tenant: tenant.into(),
        priority,
    }
}

/// Tokens, text, log probabilities, and the end with what matched.
type Same<'a> = (&'a [u32], &'a str, &'a [(u32, u32)], Option<(i32, &'a str)>);

/// What a stream has said.
#[derive(Clone, Debug, Default)]
pub struct Said {
    pub tokens: Vec<u32>,
    pub text: String,
    /// Token, bits of its log probability, and so on for the best.
    pub logprobs: Vec<(u32, u32)>,
    pub finished: Option<v1::Finished>,
    pub error: Option<String>,
}

impl Said {
    /// All that must not change.
    pub fn same(&self) -> Same<'_> {
        let end = self.finished.as_ref();
        let end = end.map(|end| (end.reason, end.matched_stop.as_str()));
        (&self.tokens, &self.text, &self.logprobs, end)
    }

    pub fn cached(&self) -> u32 {
        let finished = self.finished.as_ref().unwrap();
        finished.usage.unwrap().cached_tokens
    }
}

pub struct Reader {
    events: mpsc::Receiver<Event>,
    pub said: Said,
}

impl Reader {
    /// Reads what there is.
    pub fn read(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            let event = match event {
                Ok(event) => event.event,
                Err(status) => {
                    self.said.error = Some(status.message().to_owned());
                    return;
                }
            };
            match event {
                Some(generate_event::Event::Delta(delta)) => {
                    self.said.tokens.extend(delta.token_ids);
                    self.said.text.push_str(&delta.text);
                    for of in delta.logprobs {
                        self.said.logprobs.push((of.token, of.logprob.to_bits()));
                        let top = of.top.iter().map(|c| (c.token, c.logprob.to_bits()));
                        self.said.logprobs.extend(top);
                    }
                }
                Some(generate_event::Event::Finished(finished)) => {
                    self.said.finished = Some(finished);
                }
                _ => {}
            }
        }
    }
}

/// What each request says when it is alone in a batch that has room, reads its prompt at once and guesses nothing.
pub fn alone(size: Size, asks: &[Ask]) -> Vec<Said> {
    let roomy = Size {
        blocks: 256,
        window_blocks: 256,
        rows: 128,
        sequences: 64,
        ..size
    };
    let of = |ask: &Ask| {
        Bench::new(roomy).say(&Ask {
            speculate: false,
            ..ask.clone()
        })
    };
    asks.iter().map(of).collect()
}

/// Runs them all together; each must say what it says alone.
pub fn together(bench: &mut Bench, asks: &[Ask], expected: &[Said], what: &str) {
    let mut readers: Vec<Reader> = asks.iter().map(|ask| bench.push(ask)).collect();
    bench.run();
    assert!(bench.batch.is_empty());
    for (i, (reader, expected)) in readers.iter_mut().zip(expected).enumerate() {
        reader.read();
        assert_eq!(reader.said.same(), expected.same(), "{what}: request {i}");
    }
    assert_eq!(bench.status().used_blocks, 0, "{what}");
}
