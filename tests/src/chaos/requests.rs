//! The requests of a chaotic run, and what each says if nobody disturbs it.

use anyhow::{Context, Result};
use hotcell_client::{Client, Error, GenerateOptions, Generation, Prompt, v1};

use super::DEADLINE;

/// A request and its undisturbed answer.
pub(super) struct Request {
    pub name: String,
    prompt: Prompt,
    options: GenerateOptions,
    /// Token ids.
    pub ids: Vec<u32>,
    /// Why it ends.
    pub reason: i32,
}

/// An answer.
pub(super) struct Answer {
    pub ids: Vec<u32>,
    pub reason: i32,
    pub text: String,
}

async fn run(client: &Client, prompt: &Prompt, options: &GenerateOptions) -> Result<Answer> {
    let stream = client.generate(prompt.clone(), options.clone()).await?;
    let complete = stream.complete().await?;
    Ok(Answer {
        ids: complete.token_ids,
        reason: complete.finished.reason,
        text: complete.text,
    })
}

impl Request {
    /// Starts it.
    pub async fn begin(&self, client: &Client) -> Result<Generation, Error> {
        client
            .generate(self.prompt.clone(), self.options.clone())
            .await
    }

    /// Runs it to its end.
    pub async fn run(&self, client: &Client) -> Result<Answer> {
        run(client, &self.prompt, &self.options).await
    }
}

/// Greedy, sampled, with penalties, with log probabilities, with stop strings, with long prompts; each with several
/// prompts and lengths.
pub(super) async fn catalogue(client: &Client) -> Result<Vec<Request>> {
    let prompts = ["In the beginning", "And God said", "The LORD is my", "Now"];
    let mut requests = Vec::new();
    for (index, prompt) in (0u32..).zip(prompts) {
        let text = Prompt::from(prompt);
        let greedy = GenerateOptions {
            max_tokens: 48 + 32 * index,
            ignore_eos: true,
            deadline: Some(DEADLINE),
            ..GenerateOptions::default()
        };
        let sampled = GenerateOptions {
            sampling: v1::Sampling {
                temperature: Some(0.9),
                top_p: Some(0.95),
                ..v1::Sampling::default()
            },
            seed: Some(u64::from(index)),
            branch: index % 2,
            ..greedy.clone()
        };
        let penalties = GenerateOptions {
            sampling: v1::Sampling {
                repetition_penalty: Some(1.2),
                presence_penalty: Some(0.3),
                frequency_penalty: Some(0.4),
                ..sampled.sampling.clone()
            },
            ..sampled.clone()
        };
        let logprobs = GenerateOptions {
            logprobs: true,
            top_logprobs: 3,
            ..sampled.clone()
        };
        let calm = run(client, &text, &sampled).await?;
        // From its last third, so that it ends early, in the middle of a token perhaps.
        let from = calm
            .text
            .char_indices()
            .nth(calm.text.chars().count() * 2 / 3);
        let from = from.context("no text")?.0;
        let stop: String = calm
            .text
            .get(from..)
            .unwrap_or_default()
            .chars()
            .take(6)
            .collect();
        let stops = GenerateOptions {
            stop: vec![stop],
            ..sampled.clone()
        };
        // More than two chunks of 128.
        let long = (0..300).map(|i| 300 + (i * 7 + index) % 300).collect();
        for (kind, prompt, options) in [
            ("greedy", text.clone(), greedy),
            ("sampled", text.clone(), sampled.clone()),
            ("penalties", text.clone(), penalties),
            ("logprobs", text.clone(), logprobs),
            ("stop", text, stops),
            ("long", Prompt::Ids(long), sampled),
        ] {
            let Answer { ids, reason, .. } = run(client, &prompt, &options).await?;
            requests.push(Request {
                name: format!("{kind} {index}"),
                prompt,
                options,
                ids,
                reason,
            });
        }
    }
    Ok(requests)
}
