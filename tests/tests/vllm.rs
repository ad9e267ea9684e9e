//! The door that the router SMG drives engines of vLLM by: the tokens are Hotcell's own, whatever dies meanwhile.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use hotcell_client::{Completion, GenerateOptions, Prompt, v1};
use hotcell_gateways::{
    smg::{
        FlushCacheRequest, GetTokenizerRequest, KvEventBatch, SubscribeKvEventsRequest,
        kv_cache_event::Data,
    },
    vllm::{
        AbortRequest, ChoiceConstraint, EmbedRequest, GenerateComplete, GenerateRequest,
        GenerateStreamChunk, GetLoadsRequest, GetModelInfoRequest, GetServerInfoRequest,
        HealthCheckRequest, SamplingParams, TokenizedInput, generate_complete::MatchedStop,
        generate_request::Input, generate_response::Response, sampling_params::Constraint,
        vllm_engine_client::VllmEngineClient,
    },
};
use hotcell_scheduler::access::TABLE;
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, free_address, golden, hotcell, kjv, signal_pid},
    options::{drawn, greedy},
};
use hotcell_worker::text::{Tokenizer, TokenizerConfig};
use prost::Message;
use rustix::process::Signal;
use sha2::{Digest, Sha256};
use tokio::time::timeout;
use tonic::{Code, Streaming, transport::Channel};

const PROMPT: &str = "In the beginning";

type Engine = VllmEngineClient<Channel>;

/// A host with the bundled model, and its door.
async fn host(devices: &str) -> (Cluster, Engine) {
    let address = free_address().unwrap().to_string();
    let arguments = ["--listen", &address, "--devices", devices];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    let engine = VllmEngineClient::new(channel.connect().await.unwrap());
    (cluster, engine)
}

/// What Hotcell's own client gets.
async fn own(cluster: &Cluster, options: GenerateOptions) -> Completion {
    let client = cluster.client().await.unwrap();
    let stream = client.generate(PROMPT, options).await.unwrap();
    stream.complete().await.unwrap()
}

/// [`greedy`] in the engine's words.
fn params(tokens: u32) -> SamplingParams {
    SamplingParams {
        temperature: Some(0.0),
        max_tokens: Some(tokens),
        ignore_eos: true,
        ..SamplingParams::default()
    }
}

fn request(id: &str, prompt: &[u32], stream: bool, params: SamplingParams) -> GenerateRequest {
    let input = TokenizedInput {
        original_text: PROMPT.into(),
        input_ids: prompt.to_vec(),
    };
    GenerateRequest {
        request_id: id.into(),
        input: Some(Input::Tokenized(input)),
        sampling_params: Some(params),
        stream,
        ..GenerateRequest::default()
    }
}

/// What came of one request, by branch.
#[derive(Debug, Default)]
struct Told {
    chunks: BTreeMap<u32, Vec<GenerateStreamChunk>>,
    complete: BTreeMap<u32, GenerateComplete>,
}

impl Told {
    fn ids(&self, index: u32) -> Vec<u32> {
        let chunks = self.chunks.get(&index).into_iter().flatten();
        chunks.flat_map(|c| c.token_ids.clone()).collect()
    }
}

async fn read(
    stream: &mut Streaming<hotcell_gateways::vllm::GenerateResponse>,
) -> Result<Told, tonic::Status> {
    let mut told = Told::default();
    while let Some(message) = timeout(4 * SOON, stream.message()).await.unwrap()? {
        match message.response.unwrap() {
            Response::Chunk(chunk) => {
                assert!(!told.complete.contains_key(&chunk.index), "after its end");
                told.chunks.entry(chunk.index).or_default().push(chunk);
            }
            Response::Complete(complete) => {
                let before = told.complete.insert(complete.index, complete);
                assert!(before.is_none(), "complete twice");
            }
        }
    }
    Ok(told)
}

async fn ask(engine: &Engine, request: GenerateRequest) -> Result<Told, tonic::Status> {
    let mut engine = engine.clone();
    let mut stream = engine.generate(request).await?.into_inner();
    read(&mut stream).await
}

async fn code(engine: &Engine, request: GenerateRequest) -> Code {
    ask(engine, request).await.unwrap_err().code()
}

#[tokio::test]
async fn streams_and_whole_answers_have_the_tokens_of_hotcells_own() {
    let (cluster, engine) = host("cpu:1").await;
    let expected = own(&cluster, greedy(24)).await;
    let prompt = &expected.accepted.prompt_ids;

    let told = ask(&engine, request("a", prompt, true, params(24)))
        .await
        .unwrap();
    assert_eq!(told.ids(0), expected.token_ids);
    let end = &told.complete[&0];
    assert_eq!(
        (end.finish_reason.as_str(), &end.matched_stop),
        ("length", &None)
    );
    assert_eq!(
        (end.prompt_tokens, end.completion_tokens),
        (prompt.len() as u32, 24)
    );
    let counts: Vec<u32> = told.chunks[&0]
        .iter()
        .map(|c| c.completion_tokens)
        .collect();
    assert!(counts.is_sorted() && counts.last() == Some(&24));

    let logprobs = SamplingParams {
        logprobs: Some(2),
        ..params(24)
    };
    let told = ask(&engine, request("b", prompt, false, logprobs))
        .await
        .unwrap();
    assert!(told.chunks.is_empty());
    let end = &told.complete[&0];
    assert_eq!(end.output_ids, expected.token_ids);
    let odds = end.output_logprobs.as_ref().unwrap();
    assert_eq!(odds.token_ids, expected.token_ids);
    assert!(odds.top_logprobs.iter().all(|top| top.token_ids.len() == 2));
    assert_eq!(odds.top_logprobs[0].token_ids[0], expected.token_ids[0]);
    assert_eq!(odds.top_logprobs[0].values[0], odds.token_logprobs[0]);

    // Text is tokenised by a worker; without max_tokens there is what fits.
    let text = GenerateRequest {
        input: Some(Input::Text(PROMPT.into())),
        ..request(
            "",
            &[],
            true,
            SamplingParams {
                max_tokens: None,
                ..params(0)
            },
        )
    };
    let told = ask(&engine, text).await.unwrap();
    assert_eq!(told.ids(0)[..24], expected.token_ids);
    let end = &told.complete[&0];
    assert_eq!(end.prompt_tokens + end.completion_tokens, 1024);
    assert_eq!(end.finish_reason, "length");
}

#[tokio::test]
async fn branches_are_interleaved_by_index_and_each_is_complete() {
    let (cluster, engine) = host("cpu:1").await;
    let mut expected = Vec::new();
    for branch in 0..3 {
        expected.push(
            own(
                &cluster,
                GenerateOptions {
                    branch,
                    ..drawn(16, 7)
                },
            )
            .await,
        );
    }
    let prompt = &expected[0].accepted.prompt_ids;
    let three = SamplingParams {
        temperature: Some(0.9),
        top_p: 0.95,
        seed: Some(7),
        n: 3,
        ..params(16)
    };
    let told = ask(&engine, request("n", prompt, true, three.clone()))
        .await
        .unwrap();
    let whole = ask(&engine, request("n", prompt, false, three))
        .await
        .unwrap();
    for (index, expected) in (0..3).zip(&expected) {
        assert_eq!(told.ids(index), expected.token_ids);
        assert_eq!(told.complete[&index].completion_tokens, 16);
        assert_eq!(whole.complete[&index].output_ids, expected.token_ids);
    }
    assert_ne!(told.ids(0), told.ids(1));
}

#[tokio::test]
async fn texts_end_at_stop_strings_and_tokens_and_follow_constraints() {
    let (cluster, engine) = host("cpu:1").await;
    let all = own(&cluster, greedy(40)).await;
    let prompt = &all.accepted.prompt_ids;
    let at = all.text.char_indices().nth(30).unwrap().0;
    let stop: String = all.text[at..].chars().take(6).collect();
    let expected = own(
        &cluster,
        GenerateOptions {
            stop: vec![stop.clone()],
            ..greedy(40)
        },
    )
    .await;
    let stops = SamplingParams {
        stop: vec![stop.clone()],
        ..params(40)
    };
    let told = ask(&engine, request("s", prompt, true, stops))
        .await
        .unwrap();
    assert_eq!(told.ids(0), expected.token_ids);
    assert!(told.ids(0).len() < 40);
    let end = &told.complete[&0];
    assert_eq!(end.finish_reason, "stop");
    assert_eq!(end.matched_stop, Some(MatchedStop::MatchedStopStr(stop)));

    let token = all.token_ids[9];
    let stops = SamplingParams {
        stop_token_ids: vec![token],
        ..params(40)
    };
    let told = ask(&engine, request("t", prompt, true, stops))
        .await
        .unwrap();
    let end = &told.complete[&0];
    assert_eq!(end.matched_stop, Some(MatchedStop::MatchedTokenId(token)));
    assert_eq!(told.ids(0).last(), Some(&token));

    let client = cluster.client().await.unwrap();
    let choices = vec!["Adam.".to_owned(), "Eve".to_owned()];
    let nested = "root ::= \"(\" inner \")\"\ninner ::= name | \"[\" inner \"]\"\nname ::= \"Adam\" | \"A\" [b-d]* \"e\"";
    let repeated = "root ::= word{2,3} end?\nword ::= \"a\" \"b\" | \"abc\"\nend ::= [.!]";
    let nothing = "root ::= space \"x\" space\nspace ::= [ \\n]?";
    for (constraint, fits) in [
        (
            Constraint::Choice(ChoiceConstraint { choices }),
            (|text| text == "Adam." || text == "Eve") as fn(&str) -> bool,
        ),
        (Constraint::Regex("[0-9]{3}".into()), |text| {
            text.len() == 3 && text.parse::<u32>().is_ok()
        }),
        (
            Constraint::JsonSchema(r#"{"enum": ["a b"]}"#.into()),
            |text| text == "\"a b\"",
        ),
        (Constraint::Grammar(nested.into()), |text| {
            let inner = text.strip_prefix('(').and_then(|t| t.strip_suffix(')'));
            inner.is_some_and(|t| t.contains('A') && !t.contains('('))
        }),
        (Constraint::Grammar(repeated.into()), |text| {
            let words = text
                .trim_end_matches(['.', '!'])
                .replace("abc", "w")
                .replace("ab", "w");
            words == "ww" || words == "www"
        }),
        (Constraint::Grammar(nothing.into()), |text| {
            text.trim() == "x"
        }),
    ] {
        let what = format!("{constraint:?}");
        for seed in 0..4 {
            let params = SamplingParams {
                temperature: Some(1.0),
                seed: Some(seed),
                ignore_eos: false,
                constraint: Some(constraint.clone()),
                ..params(200)
            };
            let told = ask(&engine, request("c", prompt, false, params))
                .await
                .unwrap();
            let end = &told.complete[&0];
            assert_eq!(end.finish_reason, "stop", "{what}");
            let ids = end.output_ids.clone();
            let text = client.detokenize("kjv", ids, false).await.unwrap();
            assert!(fits(&text), "{what}: {text:?}");
        }
    }
    let lark = SamplingParams {
        constraint: Some(Constraint::Grammar("root ::= missing".into())),
        ..params(4)
    };
    assert_eq!(
        code(&engine, request("e", prompt, true, lark)).await,
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn an_abort_and_a_reset_end_what_runs() {
    let (cluster, engine) = host("cpu:1").await;
    let expected = own(&cluster, greedy(8)).await;
    let prompt = &expected.accepted.prompt_ids;
    let running = |n: u32| move |w: &[v1::WorkerInfo]| w.iter().all(|w| w.running_requests == n);
    let mut client = engine.clone();

    let long = request("gateway-1", prompt, true, params(900));
    let mut stream = client.generate(long.clone()).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    cluster.workers(running(1)).await.unwrap();
    let abort = |ids: &[&str]| AbortRequest {
        request_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
    };
    client.abort(abort(&["another"])).await.unwrap();
    stream.message().await.unwrap().unwrap();
    client
        .abort(abort(&["gateway-1", "unknown"]))
        .await
        .unwrap();
    let told = timeout(SOON, read(&mut stream)).await.unwrap().unwrap();
    let end = &told.complete[&0];
    assert_eq!(end.finish_reason, "abort");
    assert!(end.completion_tokens < 900);
    cluster.workers(running(0)).await.unwrap();

    // A whole answer, of which nothing came yet.
    let whole = GenerateRequest {
        stream: false,
        ..long.clone()
    };
    let asking = tokio::spawn({
        let engine = engine.clone();
        async move { ask(&engine, whole).await }
    });
    cluster.workers(running(1)).await.unwrap();
    client.abort(abort(&["gateway-1"])).await.unwrap();
    let told = timeout(SOON, asking).await.unwrap().unwrap().unwrap();
    let end = &told.complete[&0];
    assert_eq!(end.finish_reason, "abort");
    assert_eq!(end.output_ids.len() as u32, end.completion_tokens);
    cluster.workers(running(0)).await.unwrap();

    let mut stream = client.generate(long).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    cluster.workers(running(1)).await.unwrap();
    drop(stream);
    cluster.workers(running(0)).await.unwrap();
}

#[tokio::test]
async fn a_worker_killed_in_the_middle_changes_nothing() {
    let (cluster, engine) = host("cpu:2").await;
    let expected = own(&cluster, greedy(200)).await;
    let prompt = &expected.accepted.prompt_ids;
    let calm = ask(&engine, request("calm", prompt, true, params(200)))
        .await
        .unwrap();
    assert_eq!(calm.ids(0), expected.token_ids);

    let mut client = engine.clone();
    let asked = request("r", prompt, true, params(200));
    let mut stream = client.generate(asked).await.unwrap().into_inner();
    let Some(Response::Chunk(first)) = stream.message().await.unwrap().unwrap().response else {
        panic!("no chunk")
    };
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    let worker = workers.iter().find(|w| w.running_requests > 0).unwrap();
    signal_pid(worker.pid, Signal::KILL).unwrap();
    let rest = read(&mut stream).await.unwrap();
    let mut ids = first.token_ids;
    ids.extend(rest.ids(0));
    assert_eq!(ids, expected.token_ids);
    let (end, calm_end) = (&rest.complete[&0], &calm.complete[&0]);
    assert_eq!(end.finish_reason, calm_end.finish_reason);
    assert_eq!(end.completion_tokens, calm_end.completion_tokens);
    let deaths = |w: &[v1::WorkerInfo]| w.iter().map(|w| w.deaths).sum::<u32>() == 1;
    cluster.workers(deaths).await.unwrap();
}

#[tokio::test]
async fn errors_have_the_codes_that_gateways_act_on() {
    let (cluster, engine) = host("cpu:1").await;
    let prompt = &[1, 2, 3][..];
    let with = |params| request("e", prompt, true, params);
    for (params, what) in [
        (
            SamplingParams {
                temperature: Some(-1.0),
                ..params(4)
            },
            "temperature",
        ),
        (
            SamplingParams {
                min_tokens: 2,
                ..params(4)
            },
            "min_tokens",
        ),
        (
            SamplingParams {
                n: 1000,
                ..params(4)
            },
            "n",
        ),
        (
            SamplingParams {
                logprobs: Some(1000),
                ..params(4)
            },
            "logprobs",
        ),
    ] {
        // Before an answer begins, so that a gateway sees it as the call's own status.
        let status = engine.clone().generate(with(params)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{what}: {status:?}");
    }
    let long = request("e", &[5; 2000], true, params(4));
    assert_eq!(code(&engine, long).await, Code::InvalidArgument);
    let unknown = request("e", &[u32::MAX], true, params(4));
    assert_eq!(code(&engine, unknown).await, Code::InvalidArgument);
    let none = GenerateRequest {
        input: None,
        ..with(params(4))
    };
    assert_eq!(code(&engine, none).await, Code::InvalidArgument);
    let mut late = tonic::Request::new(with(params(900)));
    late.set_timeout(Duration::from_millis(80));
    let ended = async {
        let mut stream = engine.clone().generate(late).await?.into_inner();
        read(&mut stream).await
    };
    let code = ended.await.unwrap_err().code();
    assert!(
        matches!(code, Code::DeadlineExceeded | Code::Cancelled),
        "{code:?}"
    );

    // What is not done is said so; what is no call of any service as well, by which gateways find out what this is.
    let flushed = engine
        .clone()
        .flush_cache(FlushCacheRequest::default())
        .await;
    assert_eq!(flushed.unwrap_err().code(), Code::Unimplemented);

    cluster.client().await.unwrap().unload("kjv").await.unwrap();
    let gone = engine.clone().generate(with(params(4))).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    let health = engine.clone().health_check(HealthCheckRequest {}).await;
    let health = health.unwrap().into_inner();
    assert!(
        !health.healthy && health.message == "no model is ready",
        "{health:?}"
    );
}

/// The files of an archive that is stored, by its directory.
fn unzip(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let short = |at: usize| u16::from_le_bytes(archive[at..at + 2].try_into().unwrap()) as usize;
    let long = |at: usize| u32::from_le_bytes(archive[at..at + 4].try_into().unwrap()) as usize;
    let end = archive.len() - 22;
    assert_eq!(&archive[end..end + 4], b"PK\x05\x06");
    let mut at = long(end + 16);
    let mut files = BTreeMap::new();
    for _ in 0..short(end + 10) {
        assert_eq!(&archive[at..at + 4], b"PK\x01\x02");
        let (bytes, name, local) = (long(at + 24), short(at + 28), long(at + 42));
        let name_at = at + 46;
        assert_eq!(&archive[local..local + 4], b"PK\x03\x04");
        assert_eq!(archive[local + 14..local + 30], archive[at + 16..at + 32]);
        let from = local + 30 + short(local + 26) + short(local + 28);
        let file = archive[from..from + bytes].to_vec();
        let name = String::from_utf8(archive[name_at..name_at + name].to_vec()).unwrap();
        files.insert(name.clone(), file);
        at += 46 + name.len();
    }
    assert_eq!(at, end);
    files
}

/// The files of the tokenizer that a gateway is sent.
async fn tokenizer(engine: &Engine) -> BTreeMap<String, Vec<u8>> {
    let chunks = engine.clone().get_tokenizer(GetTokenizerRequest {}).await;
    let mut chunks = chunks.unwrap().into_inner();
    let (mut archive, mut sha) = (Vec::new(), String::new());
    while let Some(chunk) = chunks.message().await.unwrap() {
        assert!(sha.is_empty() && chunk.data.len() <= 64 << 10);
        archive.extend(chunk.data);
        sha = chunk.sha256;
    }
    let digest: String = Sha256::digest(&archive)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    assert_eq!(sha, digest);
    unzip(&archive)
}

#[tokio::test]
async fn a_model_whose_tokenizer_is_in_a_file_of_its_own_kind_has_one_for_gateways() {
    for name in ["llama3-q8_0", "gemma3-f32"] {
        let address = free_address().unwrap().to_string();
        let arguments = ["--listen", &address, "--devices", "cpu:1"];
        let path = golden(&format!("gguf/{name}.gguf"));
        let cluster = Cluster::with_model("tiny", &path, &arguments)
            .await
            .unwrap();
        cluster.workers(all_have("tiny")).await.unwrap();
        let channel = Channel::from_shared(format!("http://{address}")).unwrap();
        let engine = VllmEngineClient::new(channel.connect().await.unwrap());
        let files = tokenizer(&engine).await;
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["config.json", "tokenizer.json", "tokenizer_config.json"]
        );
        let json = |name: &str| serde_json::from_slice::<serde_json::Value>(&files[name]).unwrap();
        let settings = json("tokenizer_config.json");
        assert!(settings["chat_template"].as_str().unwrap().contains("{%"));
        let mut written = Tokenizer::from_json(&files["tokenizer.json"]).unwrap();
        let named = TokenizerConfig::from_json(&files["tokenizer_config.json"]);
        written.set_named(&named.unwrap()).unwrap();
        assert!(written.bos().is_some(), "{settings}");
        let client = cluster.client().await.unwrap();
        for text in [
            PROMPT,
            "",
            "  two  spaces\n\tand\r\n 12345 lines",
            "naïve café, 東京, Ελλάδα, 🙂🏳️‍🌈",
            &format!("{} it said{}", written.bos_text(), written.eos_text()),
        ] {
            let prompt = Prompt::Text(text.to_owned());
            let prepared = client.tokenize("tiny", prompt, false).await.unwrap();
            assert_eq!(
                written.encode(text, true).unwrap(),
                prepared.ids,
                "{name} {text:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_gateway_learns_what_there_is_and_gets_the_tokenizer() {
    let (cluster, mut engine) = host("cpu:1").await;
    let health = engine
        .health_check(HealthCheckRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(health.healthy, "{health:?}");
    let about = engine
        .get_model_info(GetModelInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (about.served_model_name.as_str(), about.vocab_size),
        ("kjv", 4096)
    );
    assert_eq!(
        (about.max_context_length, about.is_generation),
        (1024, true)
    );
    assert_eq!(about.eos_token_ids, [1]);
    assert!(
        !about.tokenizer_path.is_empty() && !std::path::Path::new(&about.tokenizer_path).exists()
    );
    let server = engine
        .get_server_info(GetServerInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!((server.active_requests, server.is_paused), (0, false));
    assert_eq!(server.data_parallel_size, 1);
    assert_eq!(
        (server.block_size, server.model_dtype.as_str()),
        (16, "bf16")
    );

    let files = tokenizer(&engine).await;
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        assert_eq!(
            files[name],
            std::fs::read(kjv().join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(
        !files.contains_key("model.safetensors"),
        "{:?}",
        files.keys()
    );

    let ids = own(&cluster, greedy(1)).await.accepted.prompt_ids;
    let embedded = engine.embed(EmbedRequest {
        request_id: "v".into(),
        tokenized: Some(TokenizedInput {
            input_ids: ids.clone(),
            ..TokenizedInput::default()
        }),
    });
    let embedded = embedded.await.unwrap().into_inner();
    let client = cluster.client().await.unwrap();
    let options = hotcell_client::EmbedOptions::default();
    let expected = client
        .embed(vec![Prompt::Ids(ids.clone())], options)
        .await
        .unwrap();
    assert_eq!(embedded.embedding, expected.embeddings[0].values);
    assert_eq!(embedded.embedding_dim as usize, embedded.embedding.len());
    assert_eq!(embedded.prompt_tokens as usize, ids.len());
}

#[tokio::test]
async fn the_load_is_told_unasked_and_when_asked() {
    let (cluster, mut engine) = host("cpu:2").await;
    let ids = own(&cluster, greedy(1)).await.accepted.prompt_ids;
    let loads = engine.subscribe_kv_events(SubscribeKvEventsRequest::default());
    let mut loads = loads.await.unwrap().into_inner();
    let first = timeout(SOON, loads.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let load = first.load.unwrap();
    assert!(load.load_only && first.events.is_empty() && first.sequence_number == 0);
    assert_eq!((load.running_requests, load.waiting_requests), (0, 0));
    assert_eq!(load.max_running_requests, 512);
    assert!(load.max_total_num_tokens.unwrap() > 0);
    // It is told again though nothing changes.
    let second = timeout(SOON, loads.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(second.load.unwrap().sample > load.sample);

    // As many as last longer than two looks, however fast the machine is.
    let mut streams = Vec::new();
    for n in 0..32 {
        let mut client = engine.clone();
        let request = request(&format!("l{n}"), &ids, true, params(900));
        let mut stream = client.generate(request).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        streams.push(stream);
    }
    let busy = async {
        loop {
            // Others say which blocks there are.
            let Some(load) = loads.message().await.unwrap().unwrap().load else {
                continue;
            };
            if load.running_requests > 0 && load.gen_throughput > 0.0 {
                return load;
            }
        }
    };
    let busy = timeout(SOON, busy).await.unwrap();
    assert!(busy.token_usage > 0.0 && busy.engine_silence_ms.is_some());
    let asked = engine
        .clone()
        .get_loads(GetLoadsRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!((asked.dp_rank_count, asked.loads.len()), (1, 1));
    assert!(asked.loads[0].num_running_reqs > 0);
    drop(streams);
}

/// What a gateway knows of the blocks that a host keeps.
#[derive(Default)]
struct Heard {
    /// By hash: that of the block before it, and its tokens.
    blocks: BTreeMap<i64, (Option<i64>, Vec<u32>)>,
    /// The number of the last batch.
    last: u64,
    removed: usize,
}

impl Heard {
    fn take(&mut self, batch: KvEventBatch) {
        if let Some(load) = &batch.load {
            assert!(load.load_only && batch.events.is_empty());
            assert_eq!(batch.sequence_number, self.last);
            return;
        }
        let begins = matches!(batch.events[0].data, Some(Data::Cleared(_)));
        assert!(begins || self.last == 0 || batch.sequence_number == self.last + 1);
        self.last = batch.sequence_number;
        for event in batch.events {
            match event.data.unwrap() {
                Data::Cleared(_) => self.blocks.clear(),
                Data::Removed(removed) => {
                    for hash in removed.block_hashes {
                        self.removed += 1;
                        assert!(self.blocks.remove(&hash).is_some(), "removed twice");
                    }
                }
                Data::Stored(stored) => {
                    let mut parent = stored.parent_block_hash;
                    for block in stored.blocks {
                        assert_eq!(block.block_size as usize, block.token_ids.len());
                        let of = (parent, block.token_ids);
                        let before = self.blocks.insert(block.block_hash, of);
                        assert_eq!(before, None, "stored twice");
                        parent = Some(block.block_hash);
                    }
                }
            }
        }
    }

    /// How many of these tokens are in blocks, from the first on.
    fn known(&self, ids: &[u32]) -> usize {
        let (mut at, mut parent) = (0, None);
        while let Some((hash, (_, tokens))) = self
            .blocks
            .iter()
            .find(|(_, (p, tokens))| *p == parent && ids[at..].starts_with(tokens))
        {
            (at, parent) = (at + tokens.len(), Some(*hash));
        }
        at
    }

    async fn until(
        &mut self,
        events: &mut Streaming<KvEventBatch>,
        enough: impl Fn(&Self) -> bool,
    ) {
        let hearing = async {
            while !enough(self) {
                self.take(events.message().await.unwrap().unwrap());
            }
        };
        timeout(SOON, hearing).await.unwrap();
    }
}

async fn subscribe(engine: &Engine, from: u64) -> Streaming<KvEventBatch> {
    let request = SubscribeKvEventsRequest {
        start_sequence_number: from,
        ..SubscribeKvEventsRequest::default()
    };
    let events = engine.clone().subscribe_kv_events(request).await;
    events.unwrap().into_inner()
}

/// Tokens of a prompt that begins like no other one with another number.
fn ids(number: u32, count: u32) -> Vec<u32> {
    (0..count)
        .map(|i| 10 + (number * 997 + i * 7) % 4000)
        .collect()
}

#[tokio::test]
async fn a_tenant_has_so_many_subscriptions_until_it_gives_one_back() {
    let (_cluster, engine) = host("cpu:1").await;
    let mut events = Vec::new();
    for _ in 0..4 {
        events.push(subscribe(&engine, 0).await);
    }
    let one_more = || async {
        let request = SubscribeKvEventsRequest::default();
        engine.clone().subscribe_kv_events(request).await
    };
    let refused = one_more().await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let told = refused.metadata().get("retry-after").unwrap();
    assert!(told.to_str().unwrap().parse::<u32>().unwrap() > 0);
    events.pop();
    let begun = async {
        while one_more().await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, begun).await.unwrap();
}

#[tokio::test]
async fn a_gateway_hears_which_blocks_are_kept_and_when_they_are_gone() {
    let (cluster, engine) = host("cpu:1").await;
    let mut events = subscribe(&engine, 0).await;
    let mut heard = Heard::default();
    let prompt = ids(1, 100);
    let told = ask(&engine, request("k", &prompt, true, params(4))).await;
    let all = [prompt.clone(), told.unwrap().ids(0)].concat();
    heard
        .until(&mut events, |h| {
            h.known(&all) > 0 && h.known(&all) + 16 >= 100
        })
        .await;
    let size = heard.blocks.values().next().unwrap().1.len();
    assert_eq!(heard.known(&all), 103 / size * size, "whole blocks");

    // Who comes later is told all that is there, who comes back what came since.
    let mut later = subscribe(&engine, 0).await;
    let mut copy = Heard::default();
    copy.until(&mut later, |copy| copy.last == heard.last).await;
    assert_eq!(copy.blocks, heard.blocks);
    let other = ids(2, 40);
    ask(&engine, request("l", &other, true, params(1)))
        .await
        .unwrap();
    let before = heard.last;
    heard.until(&mut events, |h| h.known(&other) > 0).await;
    let mut back = subscribe(&engine, before + 1).await;
    let first = loop {
        let batch = back.message().await.unwrap().unwrap();
        if batch.load.is_none() {
            break batch;
        }
    };
    assert_eq!(first.sequence_number, before + 1);
    copy.take(first);
    copy.until(&mut back, |copy| copy.last == heard.last).await;
    assert_eq!(copy.blocks, heard.blocks);

    // A worker that dies takes what it had with it; the one after it has what it reads.
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    signal_pid(workers[0].pid, Signal::KILL).unwrap();
    heard.until(&mut events, |h| h.blocks.is_empty()).await;
    ask(&engine, request("m", &prompt, true, params(1)))
        .await
        .unwrap();
    heard
        .until(&mut events, |h| h.known(&prompt) >= 100 - size)
        .await;
    cluster.client().await.unwrap().unload("kjv").await.unwrap();
    heard.until(&mut events, |h| h.blocks.is_empty()).await;
}

#[tokio::test]
async fn blocks_that_make_room_are_heard_of() {
    let address = free_address().unwrap().to_string();
    let small = [
        "--listen",
        &address,
        "--devices",
        "cpu:1",
        "--model-memory",
        "4000000",
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &small).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    let engine = VllmEngineClient::new(channel.connect().await.unwrap());
    let mut events = subscribe(&engine, 0).await;
    let mut heard = Heard::default();
    let first = ids(0, 200);
    for number in 0..40 {
        let prompt = ids(number, 200);
        ask(&engine, request("r", &prompt, false, params(1)))
            .await
            .unwrap();
        heard
            .until(&mut events, |h| h.known(&prompt) >= 200 - 64)
            .await;
        // Ends of prompts go before their beginnings.
        if heard.removed > 0 && heard.known(&first) == 0 {
            break;
        }
    }
    assert!(heard.removed > 0 && heard.known(&first) == 0);
}

#[tokio::test]
async fn blocks_of_a_model_with_windows_are_heard_of_where_they_are_of_use() {
    let address = free_address().unwrap().to_string();
    let arguments = ["--listen", &address, "--devices", "cpu:1"];
    let path = golden("gguf/gemma3-f32.gguf");
    let cluster = Cluster::with_model("tiny", &path, &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("tiny")).await.unwrap();
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    let engine = VllmEngineClient::new(channel.connect().await.unwrap());
    let mut events = subscribe(&engine, 0).await;
    let prompt = Prompt::Text(PROMPT.repeat(8));
    let client = cluster.client().await.unwrap();
    let ids = client.tokenize("tiny", prompt, false).await.unwrap().ids;
    let first = request("w", &ids, false, params(1));
    ask(&engine, first.clone()).await.unwrap();
    let mut heard = Heard::default();
    heard.until(&mut events, |h| h.known(&ids) > 0).await;
    // Asked again, at least what was told is not computed again, but for the last token.
    let again = ask(&engine, first).await.unwrap();
    let cached = again.complete[&0].cached_tokens as usize;
    assert!(cached + 1 >= heard.known(&ids), "{cached}");
}

#[tokio::test]
async fn nobody_hears_of_another_tenants_prompts() {
    let files = tempfile::TempDir::new().unwrap();
    let (mut tokens, mut lines) = (Vec::new(), String::new());
    for name in ["alice", "bob"] {
        let mut command = hotcell(files.path()).unwrap();
        let output = command.args(["--json", "token", "new", name]).output();
        let output = output.unwrap().stdout;
        let made: serde_json::Value = serde_json::from_slice(&output).unwrap();
        let part = |part: &str| made[part].as_str().unwrap().to_owned();
        tokens.push(format!("Bearer {}", part("token")));
        lines += &part("lines");
    }
    let path = files.path().join("tokens.toml");
    std::fs::write(&path, lines).unwrap();
    let address = free_address().unwrap().to_string();
    let path = path.to_str().unwrap();
    let arguments = ["--listen", &address, "--devices", "cpu:1", "--tokens", path];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    let engine: Engine = VllmEngineClient::new(channel.connect().await.unwrap());
    fn by<T>(token: &str, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert("authorization", token.parse().unwrap());
        request
    }
    // The same prompt of both, so that what they share would show.
    let prompt = ids(3, 64);
    let mut all = Vec::new();
    for token in &tokens {
        let request = by(token, SubscribeKvEventsRequest::default());
        let events = engine.clone().subscribe_kv_events(request).await;
        all.push((events.unwrap().into_inner(), Heard::default()));
    }
    for (at, token) in tokens.iter().enumerate() {
        let request = by(token, request("a", &prompt, true, params(1)));
        let stream = engine.clone().generate(request).await;
        read(&mut stream.unwrap().into_inner()).await.unwrap();
        let (events, heard) = &mut all[at];
        heard.until(events, |h| h.known(&prompt) >= 48).await;
    }
    let hashes = |heard: &Heard| heard.blocks.keys().copied().collect::<BTreeSet<i64>>();
    let [(_, alice), (bobs, bob)] = &mut all[..] else {
        panic!()
    };
    assert!(hashes(alice).is_disjoint(&hashes(bob)));
    let own = |heard: &Heard| {
        heard
            .blocks
            .values()
            .all(|(_, t)| t.iter().all(|t| prompt.contains(t)))
    };
    assert!(own(alice) && own(bob));
    // Of one more of alice's, bob hears nothing before his own next one.
    let more = ids(9, 64);
    let before = bob.blocks.len();
    for (token, prompt) in [(&tokens[0], &more), (&tokens[1], &ids(5, 32))] {
        let request = by(token, request("b", prompt, true, params(1)));
        let stream = engine.clone().generate(request).await;
        read(&mut stream.unwrap().into_inner()).await.unwrap();
    }
    bob.until(bobs, |h| h.known(&ids(5, 32)) > 0).await;
    assert_eq!(bob.known(&more), 0);
    assert!(bob.blocks.len() <= before + 2);
}

#[test]
fn every_call_of_the_service_has_a_row() {
    let all = prost_types::FileDescriptorSet::decode(hotcell_gateways::DESCRIPTORS).unwrap();
    let files = all
        .file
        .iter()
        .filter(|f| f.package() == "vllm.grpc.engine");
    let services = files.flat_map(|file| &file.service);
    let methods = services.flat_map(|s| s.method.iter().map(|m| m.name().to_owned()));
    let calls: BTreeSet<_> = methods
        .map(|m| format!("/vllm.grpc.engine.VllmEngine/{m}"))
        .collect();
    assert_eq!(calls.len(), 12);
    let rows: Vec<_> = TABLE.iter().map(|(path, _)| (*path).to_owned()).collect();
    assert!(calls.iter().all(|call| rows.contains(call)), "{calls:?}");
}
