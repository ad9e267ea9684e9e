//! What others wait for while somebody looks into their worker.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, Event, GenerateOptions, Prompt, v1};
use hotcell_ipc::background;
use hotcell_tests::{
    bench::{Goal, figure, median, p99},
    cluster::Cluster,
};
use tokio::task::{JoinHandle, JoinSet};

use super::{Looker, STREAMS, wants};

/// Of others' waits: one first token in a hundred is twelve of so many rounds. Where there is a goal there are more of them:
/// between quiet rounds, a p99 of twelve differs by more than the goal.
pub const MANY: usize = 20;
const TIMES: usize = 3;
/// Tokens of an answer where the slowest hundredth counts, and of all of one's answers.
const ANSWER: u32 = 60;
pub const LONG: u32 = 900;
/// The same, and rounds, of a model of a billion parameters, whose tokens take longer.
pub const SHORT: u32 = 120;
pub const FEW: usize = 8;

/// What others wait for while they are served, in milliseconds: for whole answers, for their first token, and between two
/// events of a stream.
#[derive(Default)]
struct Waits {
    answers: Vec<f64>,
    firsts: Vec<f64>,
    gaps: Vec<f64>,
}

impl Waits {
    fn extend(&mut self, more: Self) {
        self.answers.extend(more.answers);
        self.firsts.extend(more.firsts);
        self.gaps.extend(more.gaps);
    }

    fn kinds(&self) -> [(&'static str, &[f64]); 3] {
        [
            ("answer", &self.answers),
            ("first", &self.firsts),
            ("gap", &self.gaps),
        ]
    }
}

/// What four others wait for, who ask one question after another, until they have so many tokens each.
async fn waits(client: &Client, tokens: u32) -> Result<Waits> {
    let mut others = JoinSet::new();
    for other in 0..STREAMS / 2 {
        let client = client.clone();
        others.spawn(async move {
            let mut waits = Waits::default();
            for question in 0..tokens.div_ceil(ANSWER) {
                let options = GenerateOptions {
                    max_tokens: ANSWER,
                    ignore_eos: true,
                    ..GenerateOptions::default()
                };
                let ids = (0..16).map(|i| 300 + 17 * other + 68 * question + i);
                let asked = Instant::now();
                let since = |then: Instant| then.elapsed().as_secs_f64() * 1e3;
                let mut stream = client.generate(Prompt::Ids(ids.collect()), options).await?;
                let mut last = None;
                while let Some(event) = stream.next().await {
                    let Event::Delta(_) = event? else { continue };
                    match last.replace(Instant::now()) {
                        Some(before) => waits.gaps.push(since(before)),
                        None => waits.firsts.push(since(asked)),
                    }
                }
                waits.answers.push(since(asked));
            }
            anyhow::Ok(waits)
        });
    }
    let mut all = Waits::default();
    while let Some(done) = others.join_next().await {
        all.extend(done??);
    }
    Ok(all)
}

/// The request that is looked at: it runs for longer than the others, and until the task is aborted.
async fn debugged(client: &Client, id: &str, tokens: u32) -> Result<JoinHandle<()>> {
    let options = GenerateOptions {
        max_tokens: tokens + 50,
        ignore_eos: true,
        request_id: id.to_owned(),
        ..GenerateOptions::default()
    };
    let mut stream = client
        .generate(Prompt::Ids((500..508).collect()), options)
        .await?;
    stream.next().await.context("no event")??;
    Ok(tokio::spawn(async move {
        while stream.next().await.is_some() {}
    }))
}

/// Ways to look at a worker and at one of its requests, while others are served.
const WAYS: [(&str, &[&str]); 5] = [
    ("_by_watch", &["watch"]),
    ("_by_trace", &["trace"]),
    ("_by_capture", &["capture"]),
    ("_by_replay", &["replay"]),
    (AT_ONCE, &["watch", "trace", "capture", "replay"]),
];
const AT_ONCE: &str = "_at_once";

/// All of them, and some of them together as in `others_by_trace_capture`, if they are asked for so.
fn ways(section: &str) -> Vec<(String, Vec<&'static str>)> {
    let known = WAYS.map(|(name, ways)| (name.to_owned(), ways.to_vec()));
    let single = |name: &str| {
        let all = WAYS.iter().flat_map(|(_, ways)| ways.iter());
        all.copied().find(|way| *way == name)
    };
    let some = std::env::args().filter_map(|argument| {
        let name = argument.strip_prefix(section)?;
        let ways: Option<Vec<_>> = name.strip_prefix("_by_")?.split('_').map(single).collect();
        Some((name.to_owned(), ways.filter(|ways| ways.len() > 1)?))
    });
    known.into_iter().chain(some).collect()
}

/// A capture of the nodes of one layer: with those of all layers a large model's steps have few rows.
const LAYER: &str = "capture_layer";

/// Looks in these ways until its standard input ends: the program of an engineer, who sits elsewhere.
pub async fn look(address: &str, id: &str, ways: &[String]) -> Result<()> {
    let client = Client::connect(&address.parse()?).await?;
    let mut lookers = Vec::new();
    for way in ways {
        let looker = match way.as_str() {
            "watch" => Looker::Watch.begin(client.clone()).await?,
            "trace" => Looker::TraceNodes.begin(client.clone()).await?,
            "capture" | LAYER => {
                let options = v1::CaptureOptions {
                    layers: if way == LAYER { vec![2] } else { Vec::new() },
                    ..v1::CaptureOptions::default()
                };
                let request = v1::CaptureRequest {
                    which: Some(v1::capture_request::Which::RequestId(id.to_owned())),
                    options: Some(options),
                    ..v1::CaptureRequest::default()
                };
                let mut capture = client.capture(request).await?;
                tokio::spawn(async move { while capture.next().await.is_some() {} })
            }
            _ => tokio::spawn(again_and_again(client.clone(), id.to_owned())),
        };
        lookers.push(looker);
    }
    println!("looking");
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await??;
    Ok(())
}

/// Has a request run again as soon as it has been.
async fn again_and_again(client: Client, id: String) {
    loop {
        let request = v1::ReplayRequest {
            which: Some(v1::replay_request::Which::RequestId(id.clone())),
            ..v1::ReplayRequest::default()
        };
        match client.replay(request).await {
            Ok(mut told) => while told.next().await.is_some() {},
            // It has not come yet.
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// The process that looks; dropping it ends it.
struct Engineer(std::process::Child);

impl Engineer {
    fn begin(cluster: &Cluster, id: &str, ways: &[&str]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["look", &format!("unix:{}", cluster.socket.display()), id]);
        command
            .args(ways)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: between fork and exec it opens a file, writes to it and asks for less, by system calls alone.
        unsafe { command.pre_exec(background::give_way) };
        let mut child = command.spawn()?;
        let mut line = String::new();
        let told = child.stdout.take().context("no output")?;
        let engineer = Self(child);
        BufReader::new(told).read_line(&mut line)?;
        ensure!(line == "looking\n", "nobody looks");
        Ok(engineer)
    }
}

impl Drop for Engineer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What others wait for beside one long request, which somebody looks at in these ways.
async fn beside(
    (cluster, client): (&Cluster, &Client),
    tokens: u32,
    id: &str,
    ways: &[&str],
) -> Result<Waits> {
    let engineer = match ways {
        [] => None,
        ways => Some(Engineer::begin(cluster, id, ways)?),
    };
    let request = debugged(client, id, tokens).await?;
    let waits = waits(client, tokens).await?;
    request.abort();
    drop(engineer);
    // What is left of them ends.
    tokio::time::sleep(Duration::from_millis(200)).await;
    Ok(waits)
}

/// How much later others have their tokens. The request runs either way: what counts is that somebody looks at it. Who does
/// is a process that takes only what time is left here, as if it ran on another machine.
pub async fn others(
    cluster: &Cluster,
    client: &Client,
    (model, tokens, rounds): (&str, u32, usize),
) -> Result<()> {
    let all = format!("others{model}");
    for (name, ways) in ways(&all) {
        let (rounds, goal) = match name.as_str() {
            AT_ONCE => (rounds * TIMES, Goal::AtMost(10.0)),
            _ => (rounds, Goal::None),
        };
        if !wants(&all) && !wants(&format!("{all}{name}")) {
            continue;
        }
        let large = |way: &'static str| match (way, model) {
            ("capture", "_1b") => LAYER,
            (way, _) => way,
        };
        let ways: Vec<&str> = ways.into_iter().map(large).collect();
        let ways = ways.as_slice();
        let on = (cluster, client);
        beside(on, tokens, &format!("first{name}"), ways).await?;
        // All rounds together: a p99 of one is that of a few dozen, and half as much again in the next.
        let (mut without, mut with) = (Waits::default(), Waits::default());
        for round in 0..rounds {
            // Each first as often as second.
            for (looks, waits) in match round % 2 {
                0 => [(false, &mut without), (true, &mut with)],
                _ => [(true, &mut with), (false, &mut without)],
            } {
                let ways = if looks { ways } else { &[] };
                let id = format!("request{name}-{round}-{looks}");
                waits.extend(beside(on, tokens, &id, ways).await?);
            }
        }
        for ((kind, without), (_, with)) in without.kinds().into_iter().zip(with.kinds()) {
            let (quiet, looked_at) = (p99(without.to_vec()), p99(with.to_vec()));
            let medians = (median(without.to_vec()), median(with.to_vec()));
            println!(
                "p99 of {} {kind}s{model}{name}: {quiet:.2} ms, {looked_at:.2} ms looked at; medians {:.2}, {:.2}",
                without.len(),
                medians.0,
                medians.1,
            );
            figure(
                &format!("debug_others{model}_{kind}_p99_growth{name}"),
                (looked_at / quiet - 1.0) * 100.0,
                "%",
                goal,
            );
        }
    }
    Ok(())
}
