//! Prompts that are read: once for those that begin alike, and into embeddings; through scheduler and worker.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_client::{Client, Completion, EmbedOptions, GenerateOptions, Prompt, Reason};
use hotcell_proto::limits;
use hotcell_tests::cluster::{Cluster, all_have, kjv};

const PROMPT: &str = "And it came to pass in those days, that there went out a decree from Caesar \
                      Augustus, that all the world should be taxed.";

async fn cluster() -> Cluster {
    let arguments = ["--model-memory", "20000000"];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments).await;
    let cluster = cluster.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

async fn say(client: &Client, tenant: &str, branch: u32, speculation: bool) -> Completion {
    let options = GenerateOptions {
        tenant: tenant.to_owned(),
        branch,
        seed: Some(4),
        max_tokens: 30,
        ignore_eos: true,
        no_speculation: !speculation,
        sampling: hotcell_client::v1::Sampling {
            temperature: Some(0.7),
            ..Default::default()
        },
        ..GenerateOptions::default()
    };
    let stream = client.generate(PROMPT, options).await.unwrap();
    stream.complete().await.unwrap()
}

fn cached(completion: &Completion) -> u32 {
    completion.finished.usage.unwrap().cached_tokens
}

#[tokio::test]
async fn what_was_read_before_is_not_read_again_by_the_same_tenant_and_workers_show_it() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let first = say(&client, "", 0, true).await;
    let prompt = first.finished.usage.unwrap().prompt_tokens;
    assert!(prompt > 16);
    assert_eq!(cached(&first), 0);
    for (tenant, least, speculation) in [("", 16, false), ("other", 0, true), ("other", 16, true)] {
        let again = say(&client, tenant, 0, speculation).await;
        assert_eq!(again.token_ids, first.token_ids);
        assert!(cached(&again) >= least && cached(&again) < prompt);
        assert!(least > 0 || cached(&again) == 0);
    }
    for branch in 1..5 {
        let other = say(&client, "", branch, true).await;
        assert!(cached(&other) >= 16);
        assert_ne!(other.token_ids, first.token_ids);
    }

    let idle = |workers: &[hotcell_client::v1::WorkerInfo]| {
        let caches = workers.iter().flat_map(|w| &w.caches);
        caches.clone().count() == 1 && caches.clone().all(|c| c.running == 0)
    };
    let workers = cluster.workers(idle).await.unwrap();
    let cache = &workers[0].caches[0];
    assert_eq!((&*cache.model, cache.used_blocks), ("kjv", 0));
    assert!(cache.kept_blocks > 0 && cache.cached_tokens >= 6 * 16);
    assert!(cache.bytes > 0 && cache.bytes < 20_000_000);
    assert_eq!(cache.prompt_tokens, 8 * u64::from(prompt));
}

#[tokio::test]
async fn embeddings_come_in_order_and_depend_on_their_own_text_only() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let embed = async |texts: &[&str], mean: bool| {
        let prompts: Vec<Prompt> = texts.iter().map(|text| Prompt::from(*text)).collect();
        let options = EmbedOptions {
            mean,
            ..EmbedOptions::default()
        };
        client.embed(prompts, options).await
    };
    for mean in [false, true] {
        let texts = [PROMPT, "And God said", "Let there be light"];
        let together = embed(&texts, mean).await.unwrap();
        assert_eq!(together.model, "kjv");
        assert!(together.numerics.unwrap().reproducible);
        for (text, embedding) in texts.iter().zip(&together.embeddings) {
            let squares: f32 = embedding.values.iter().map(|v| v * v).sum();
            assert!((squares - 1.0).abs() < 1e-5, "{squares}");
            let alone = embed(&[text], mean).await.unwrap();
            assert_eq!(alone.embeddings, std::slice::from_ref(embedding));
        }
        assert_ne!(together.embeddings[0], together.embeddings[1]);
    }
    assert!(embed(&[], false).await.unwrap().embeddings.is_empty());
    let many = vec!["a"; 1000];
    for (texts, reason) in [
        (&many[..], Reason::LimitExceeded),
        (&[&*PROMPT.repeat(100)], Reason::PromptTooLong),
    ] {
        assert_eq!(embed(texts, true).await.unwrap_err().reason(), reason);
    }
    let none = vec![Prompt::Ids(vec![])];
    let refused = client.embed(none, EmbedOptions::default()).await;
    assert_eq!(refused.unwrap_err().reason(), Reason::InvalidArgument);
}

#[tokio::test]
async fn many_requests_of_many_prompts_are_read_one_after_another() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let texts: Vec<String> = (0..limits::MAX_EMBED_PROMPTS)
        .map(|i| format!("{i} and God said"))
        .collect();
    let prompts = || texts.iter().map(|text| Prompt::from(text.as_str()));
    let options = EmbedOptions::default;
    let right = client.embed(prompts(), options()).await.unwrap().embeddings;
    // Together more prompts than a worker has places for.
    let calls = 2 * limits::MAX_WORKER_REQUESTS / texts.len();
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..calls {
        let (client, prompts) = (client.clone(), prompts().collect::<Vec<_>>());
        all.spawn(async move { client.embed(prompts, EmbedOptions::default()).await });
    }
    for answer in all.join_all().await {
        assert!(answer.unwrap().embeddings == right);
    }
    // The command takes more lines than a request has.
    let lines: Vec<&str> = texts
        .iter()
        .chain(&texts[..3])
        .map(String::as_str)
        .collect();
    let said = cluster.hotcell(&[&["embed"], &lines[..]].concat()).unwrap();
    assert!(said.status.success(), "{said:?}");
    let said = String::from_utf8(said.stdout).unwrap();
    let said: Vec<&str> = said.lines().collect();
    assert_eq!(said.len(), lines.len());
    assert_eq!(said[..3], said[texts.len()..]);
}
