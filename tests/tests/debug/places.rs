//! Where a crash that is run again is, while it runs: each place that is seen, what held before it, and where it died.

use hotcell_tests::{
    cluster::{Cluster, all_have, hotcell as command},
    fault::{CRASH, CRASH_NODE, NAN_NODE, NAN_TOKEN},
    synthetic::{self, Measures},
};
use serde_json::Value;

use super::{
    comparing::FAULTY,
    crashing::{killed, lines, packed},
    hotcell,
    screen::Terminal,
};

/// A model whose steps take so long that a process is seen in most of them.
const SLOW: Measures = Measures {
    hidden: 512,
    layers: 5,
    heads: 8,
    kv_heads: 8,
    inner: 1408,
    vocab: 4096,
    context: 1024,
    tied: true,
};

/// Rows of a step at most, if one prompt is read alone.
const STEP: usize = 128;

/// Tokens of no meaning to anybody.
fn words(count: usize) -> Vec<u32> {
    (0..count as u32).map(|n| 1000 + n * 7 % 2000).collect()
}

/// A prompt that is read in several steps, in the last of which the worker dies.
fn in_steps() -> Vec<u32> {
    [&words(6 * STEP)[..], &CRASH, &[17]].concat()
}

/// The nodes one of which is computed when the memory of [`CRASH_NODE`] is read: one of several threads may be in the node
/// already while the black box still names the one before it.
const DEATHS: [&str; 2] = ["layers.3.mul_mat.6", "layers.3.swiglu.0"];
/// What is computed between them where somebody looks at their values, and is no node of the model's: a norm of the first one's.
const MEASURE: &str = "square";

async fn cluster() -> Cluster {
    assert!(CRASH_NODE.contains("layers.3.mlp.down_proj"));
    let cluster = Cluster::start(&["--worker-binary", FAULTY, "--devices", "cpu:1"]).await;
    let cluster = cluster.unwrap();
    // Where it is as long as workers open it again.
    let model = cluster.folder.path().join("slow");
    std::fs::create_dir(&model).unwrap();
    synthetic::write(&model, &SLOW).unwrap();
    let client = cluster.client().await.unwrap();
    let path = model.to_str().unwrap();
    client.load("slow", path).await.unwrap();
    cluster.workers(all_have("slow")).await.unwrap();
    packed(&client).await;
    cluster
}

#[tokio::test]
async fn a_crash_that_is_run_again_tells_where_it_is_and_at_last_where_it_died() {
    let cluster = cluster().await;
    let crash = killed(&cluster, "slow", ("strikes", &in_steps())).await;
    let replay = ["--json", "crashes", "replay", &crash.id, "--hurry"];
    let said = hotcell(&cluster, &replay);
    let all = lines(&said);
    let (outcome, places) = all.split_last().unwrap();
    assert_eq!(outcome["outcome"], "died", "{said}");
    let name = outcome["node"].as_str().unwrap();
    assert!(DEATHS.contains(&name), "{said}");
    let death = &outcome["crash"]["blackbox"];
    let of = |place: &Value, name: &str| place[name].as_u64().unwrap();
    for place in places {
        assert_eq!(place["request_id"], "strikes", "{place}");
        assert!(of(place, "steps") <= of(death, "steps"), "{place}");
        assert!(!place["op"].as_str().unwrap().is_empty(), "{place}");
        assert!(place["step"].is_u64() && place["part"].is_string());
        // A node is named with what else is known of it.
        if let Some(layer) = place["layer"].as_u64() {
            let name = place["node"].as_str().unwrap();
            assert!(name.starts_with(&format!("layers.{layer}.")), "{place}");
        }
    }
    // A black box says no more than where it is now: this was seen before the step in which it died began.
    let before = |place: &&Value| {
        let in_layer = place["part"] == "body" && place["layer"].is_u64();
        in_layer && of(place, "steps") < of(death, "steps")
    };
    assert!(places.iter().any(|place| before(&place)), "{said}");
    let last = places.last().unwrap();
    for (place, seen) in [
        ("steps", "steps"),
        ("part", "part"),
        ("step", "node"),
        ("op", "op"),
    ] {
        assert_eq!(last[place], death[seen], "{said}");
    }
    assert_eq!((&last["node"], &last["layer"]), (&name.into(), &3.into()));
    // None is told twice in a row.
    assert!(places.windows(2).all(|two| two[0] != two[1]), "{said}");
}

#[tokio::test]
async fn who_sits_before_a_terminal_sees_where_a_crash_is_that_is_run_again() {
    let cluster = cluster().await;
    let crash = killed(&cluster, "slow", ("strikes", &in_steps())).await;
    let mut replay = command(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    replay.args(["--address", &address, "crashes", "replay", &crash.id]);
    replay.arg("--hurry");
    let mut terminal = Terminal::start(replay);
    terminal
        .until("what came of it", |terminal| {
            terminal.text().contains("report w0.replay")
        })
        .await;
    assert!(terminal.end().await.success());
    // Each time that the line was drawn, which may be gone by the time that somebody looks.
    let drawn = String::from_utf8_lossy(&terminal.raw()).into_owned();
    let mut drawn = drawn.split("step ").zip(drawn.split("step ").skip(1));
    let is_place = |(batch, plan): (&str, &str)| {
        let named = plan.contains(" of a plan, ") && plan.contains(", layers.");
        batch.ends_with(" of its batch at ") && named
    };
    assert!(drawn.any(is_place), "{}", terminal.text());
    let text = terminal.text();
    let last = text
        .lines()
        .find(|line| line.starts_with("request strikes: "));
    let last = last.unwrap_or_else(|| panic!("{text}"));
    for words in ["died the same way: killed by SIGSEGV", " of a plan, "] {
        assert!(last.contains(words), "{text}");
    }
    assert!(DEATHS.iter().any(|name| last.contains(name)), "{text}");
    // The line that changed is gone.
    assert!(!text.contains(" of its batch"), "{text}");
}

#[tokio::test]
async fn what_held_in_the_step_before_the_one_it_died_in_is_told() {
    const NAN: usize = 2 * STEP - 1;
    let cluster = cluster().await;
    // The last row of a step: those after it in the same one would meet it, too, and what it leaves in the cache has all that
    // follow meet it.
    let mut prompt = words(3 * STEP - CRASH.len());
    prompt[NAN] = NAN_TOKEN;
    prompt.extend(CRASH);
    prompt.push(17);
    let crash = killed(&cluster, "slow", ("strikes", &prompt)).await;
    let replay = ["crashes", "replay", &crash.id, "--hurry", "--guard", "nan"];

    let said = hotcell(&cluster, &[&["--json"], &replay[..]].concat());
    let all = lines(&said);
    let (outcome, told) = all.split_last().unwrap();
    assert_eq!(outcome["outcome"], "died", "{said}");
    let death = &outcome["crash"]["blackbox"];
    assert_eq!(death["signal"]["name"], "SIGSEGV", "{said}");
    match outcome["node"].as_str() {
        Some(name) => assert!(DEATHS.contains(&name), "{said}"),
        None => assert_eq!(death["op"], MEASURE, "{said}"),
    }
    let hits = told.iter().filter(|line| line["condition"].is_string());
    let hits: Vec<&Value> = hits.collect();
    // One: there was no step between that one and the one in which it died.
    let [hit] = hits[..] else {
        panic!("{hits:?}: {said}");
    };
    assert_eq!(hit["condition"], "nan", "{hit}");
    assert_eq!(hit["request_id"], "strikes", "{hit}");
    assert_eq!(hit["weight"], NAN_NODE, "{hit}");
    assert_eq!(hit["position"], NAN, "{hit}");
    assert_eq!((&hit["token"], &hit["missed"]), (&0.into(), &0.into()));

    let node = hit["node"].as_str().unwrap();
    let said = hotcell(&cluster, &replay);
    let lines: Vec<&str> = said.lines().collect();
    let [hit, death] = lines[..] else {
        panic!("{said}");
    };
    let words = format!("nan at {node} ({NAN_NODE}) in strikes of slow, token 0, position {NAN}: ");
    assert!(hit.starts_with(&words), "{said}");
    assert!(death.contains("killed by SIGSEGV"), "{said}");
    let mut places = DEATHS.iter().chain(&[MEASURE]);
    assert!(places.any(|place| death.contains(place)), "{said}");
}

/// The step in which it dies begins with what kills it.
#[tokio::test]
async fn what_held_just_before_it_died_is_told_every_time() {
    const NAN: usize = 2 * STEP - 1;
    let cluster = cluster().await;
    let mut prompt = words(2 * STEP);
    prompt[NAN] = NAN_TOKEN;
    prompt.extend(CRASH);
    prompt.push(17);
    let crash = killed(&cluster, "slow", ("strikes", &prompt)).await;
    let replay = ["crashes", "replay", &crash.id, "--hurry", "--guard", "nan"];
    for time in 0..6 {
        let said = hotcell(&cluster, &[&["--json"], &replay[..]].concat());
        let all = lines(&said);
        assert_eq!(all.last().unwrap()["outcome"], "died", "{time}: {said}");
        let hits = all.iter().filter(|line| line["condition"].is_string());
        let hits: Vec<&Value> = hits.map(|hit| &hit["position"]).collect();
        assert_eq!(hits, [&Value::from(NAN)], "{time}: {said}");
    }
}
