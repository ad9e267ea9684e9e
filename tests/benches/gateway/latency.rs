//! What each door adds to the time until a request's first token, and to each token after it, over Hotcell's own protocol.
//!
//! The same prompt is asked for the same tokens, by turns through the door and through Hotcell's own; what counts is the
//! median of the differences between two that followed each other. That they were the same tokens is checked.

use anyhow::{Result, ensure};
use hotcell_tests::bench::{Goal, median};

use crate::{
    Bench, House,
    doors::{Door, Doors, Drawn, Form, Told},
};

/// Tokens of an answer.
const TOKENS: u32 = 256;
/// Pairs of answers that are compared.
const PAIRS: usize = 31;
/// Seeds that are tried until answers have as many tokens: not every protocol has a way to say that the model's own end
/// is none.
const SEEDS: u32 = 256;
/// What streams over HTTP may cost.
const MOST: Goal = Goal::AtMost(100.0);

/// A door, the protocol's own way to draw the same tokens, and what it may cost.
struct Row {
    name: &'static str,
    door: Door,
    form: Form,
    /// Whether it can say a seed.
    seeded: bool,
    goal: Goal,
}

const ROWS: [Row; 8] = [
    Row {
        name: "openai_stream",
        door: Door::OpenAi,
        form: Form::Chat,
        seeded: true,
        goal: MOST,
    },
    Row {
        name: "openai_completions_stream",
        door: Door::OpenAiCompletions,
        form: Form::Text,
        seeded: true,
        goal: MOST,
    },
    Row {
        name: "openai_responses_stream",
        door: Door::OpenAiResponses,
        form: Form::Chat,
        seeded: false,
        goal: MOST,
    },
    Row {
        name: "ollama_stream",
        door: Door::Ollama,
        form: Form::Chat,
        seeded: true,
        goal: MOST,
    },
    Row {
        name: "anthropic_stream",
        door: Door::Anthropic,
        form: Form::Chat,
        seeded: false,
        goal: MOST,
    },
    Row {
        name: "oip_stream",
        door: Door::Oip,
        form: Form::Text,
        seeded: true,
        goal: Goal::None,
    },
    Row {
        name: "oip_rest_stream",
        door: Door::OipRest,
        form: Form::Text,
        seeded: true,
        goal: MOST,
    },
    Row {
        name: "vllm_stream",
        door: Door::Vllm,
        form: Form::Ids,
        seeded: true,
        goal: Goal::None,
    },
];

/// A way to draw that makes answers of as many tokens as are asked for, of a text and of a chat.
async fn seed(doors: &mut Doors) -> Result<Drawn> {
    for seed in 1..=SEEDS {
        let drawn = Drawn::Seeded(seed);
        let mut long = true;
        for form in [Form::Text, Form::Chat] {
            let told = doors.ask(Door::Native(form), drawn, TOKENS, &[]).await?;
            long &= told.tokens == Some(TOKENS.into());
        }
        if long {
            return Ok(drawn);
        }
    }
    anyhow::bail!("no seed makes {TOKENS} tokens")
}

/// Both said the same.
fn same(row: &Row, own: &Told, other: &Told) -> Result<()> {
    let name = row.name;
    for told in [own, other] {
        let tokens = told.tokens.unwrap_or(TOKENS.into());
        ensure!(tokens == u64::from(TOKENS), "{name}: {tokens} tokens");
    }
    match row.door {
        Door::Vllm => ensure!(own.ids == other.ids, "{name}: other tokens"),
        _ => ensure!(
            own.text == other.text,
            "{name}: {:?} is not {:?}",
            other.text,
            own.text
        ),
    }
    Ok(())
}

async fn row(bench: &Bench, doors: &mut Doors, row: &Row, drawn: Drawn) -> Result<()> {
    let drawn = if row.seeded { drawn } else { Drawn::Greedy };
    let own = Door::Native(row.form);
    let prompt = doors.ask(Door::Native(Form::Text), drawn, 1, &[]).await?;
    let ids = prompt.prompt_ids;
    let pairs = if bench.quick { 3 } else { PAIRS };
    let (mut first, mut each) = (Vec::new(), Vec::new());
    let (mut own_first, mut own_each) = (Vec::new(), Vec::new());
    let mut pieces = (0, 0);
    // The first pair is there to warm up.
    for pair in 0..=pairs {
        // Neither always follows the other.
        let order = match pair % 2 {
            0 => [own, row.door],
            _ => [row.door, own],
        };
        let [a, b] = order;
        let a = doors.ask(a, drawn, TOKENS, &ids).await?;
        let b = doors.ask(b, drawn, TOKENS, &ids).await?;
        let (own, other) = if pair % 2 == 0 { (a, b) } else { (b, a) };
        same(row, &own, &other)?;
        if pair == 0 {
            continue;
        }
        pieces = (own.pieces(), other.pieces());
        first.push(other.until_first()? - own.until_first()?);
        each.push(other.per_token(TOKENS)? - own.per_token(TOKENS)?);
        own_first.push(own.until_first()?);
        own_each.push(own.per_token(TOKENS)?);
    }
    println!(
        "{}: {TOKENS} tokens in {} pieces, by Hotcell's own in {}; there the first comes after {:.0} us, and each after {:.0} us",
        row.name,
        pieces.1,
        pieces.0,
        median(own_first),
        median(own_each),
    );
    let name = |what: &str| format!("{}_added_{what}", row.name);
    bench.figure(&name("first_token"), median(first), "us", Goal::None);
    bench.figure(&name("per_token"), median(each), "us", row.goal);
    Ok(())
}

/// What a prompt's vector costs over OpenAI's protocol, as a whole.
async fn embeddings(bench: &Bench, doors: &mut Doors) -> Result<()> {
    let pairs = if bench.quick { 3 } else { PAIRS * 8 };
    let (mut added, mut own_all) = (Vec::new(), Vec::new());
    for pair in 0..=pairs {
        let first = doors.embed(pair % 2 == 0).await?;
        let second = doors.embed(pair % 2 != 0).await?;
        let (own, other) = match pair % 2 {
            0 => (second, first),
            _ => (first, second),
        };
        ensure!(own.0 == other.0, "embeddings: other vectors");
        if pair > 0 {
            added.push(other.1 - own.1);
            own_all.push(own.1);
        }
    }
    println!(
        "openai_embeddings: by Hotcell's own it takes {:.0} us",
        median(own_all)
    );
    let name = "openai_embeddings_added_request";
    bench.figure(name, median(added), "us", Goal::None);
    Ok(())
}

pub async fn run(bench: &Bench) -> Result<()> {
    let house = House::start().await?;
    let mut doors = Doors::connect(&house).await?;
    let drawn = seed(&mut doors).await?;
    for one in &ROWS {
        row(bench, &mut doors, one, drawn).await?;
    }
    embeddings(bench, &mut doors).await
}
