//! Watchpoints: a node that gives what must not be is named, the request that meets it may be ended, and nobody else
//! notices.

use std::{
    fs::File,
    path::PathBuf,
    time::{Duration, Instant},
};

use hotcell_client::{
    Client, GenerateOptions, Prompt, Reason,
    debug::Recording,
    v1::{self, condition::Kind, guard_event},
};
use hotcell_tests::{
    cluster::{Cluster, Process, SOON},
    fault::{NAN_NODE, NAN_TOKEN},
};

use super::{
    guards::{armed, at},
    long,
};

fn options(id: &str, tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        deadline: Some(SOON),
        ..long(id)
    }
}

#[tokio::test]
async fn a_nan_in_one_node_ends_its_request_and_no_other() {
    let cluster = super::fault_cluster().await;
    let client = cluster.client().await.unwrap();
    let undisturbed = client
        .generate("In the beginning", options("", 200))
        .await
        .unwrap();
    let expected = undisturbed.complete().await.unwrap().token_ids;

    let mut guard = at(&[], &[Kind::Infinite(true), Kind::Nan(true)]);
    guard.end = true;
    let (nodes, mut events) = armed(&client, guard).await;
    assert!(nodes > 50, "{nodes}");
    let other = client
        .generate("In the beginning", options("other", 200))
        .await
        .unwrap();
    let other = tokio::spawn(other.complete());
    let prompt = Prompt::Ids(vec![0, 312, NAN_TOKEN, 17]);
    let struck = client.generate(prompt, options("struck", 8)).await;
    let error = match struck {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.reason(), Reason::NumericsFailed);
    assert!(error.message().contains("layers.1.mul_mat."), "{error}");
    assert_eq!(other.await.unwrap().unwrap().token_ids, expected);

    let hit = tokio::time::timeout(SOON, events.next())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let Some(guard_event::Kind::Hit(hit)) = hit.kind else {
        panic!("{hit:?}");
    };
    let node = hit.node.unwrap();
    assert_eq!((hit.request_id.as_str(), hit.condition), ("struck", 1));
    assert_eq!((node.weight.as_str(), node.layer), (NAN_NODE, Some(1)));
    assert_eq!((hit.position, hit.token), (2, 0));
    assert!(hit.peak.is_nan() && hit.ended && hit.further > 0);
    assert_eq!(hit.worker, "w0");

    // Without who looks, all is as it was: what must not be is nobody's concern.
    drop(events);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let again = client
        .generate("In the beginning", options("again", 200))
        .await
        .unwrap();
    assert_eq!(again.complete().await.unwrap().token_ids, expected);
}

#[tokio::test]
async fn conditions_are_checked_and_hold_where_they_should() {
    let cluster = super::kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    for odd in [
        at(&[], &[]),
        at(&[], &[Kind::Above(f32::NAN)]),
        at(&[], &[Kind::Nan(false)]),
        at(&["nothing-like-it"], &[Kind::Nan(true)]),
        v1::GuardRequest {
            model: "nobody".into(),
            ..at(&[], &[Kind::Nan(true)])
        },
    ] {
        assert!(client.guard(odd.clone()).await.is_err(), "{odd:?}");
    }
    // Logits of attention are no zeros; every RMS norm's result has a root mean square near its weights'.
    let kinds = [Kind::Zero(true), Kind::Above(1e30), Kind::Above(0.0)];
    let everywhere = v1::GuardRequest {
        layers: vec![2],
        ..at(&["add"], &kinds)
    };
    let (_, mut events) = armed(&client, everywhere).await;
    let stream = client
        .generate("In the beginning", options("seen", 5))
        .await
        .unwrap();
    stream.complete().await.unwrap();
    let hit = tokio::time::timeout(SOON, events.next())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let Some(guard_event::Kind::Hit(hit)) = hit.kind else {
        panic!("{hit:?}");
    };
    assert_eq!((hit.condition, hit.ended), (2, false));
    assert_eq!(hit.node.unwrap().name, "layers.2.add.0");
    assert!(hit.peak > 0.0 && hit.rms > 0.0 && hit.rms <= hit.peak);
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_rows_that_tell_their_token_are_told_if_revealed() {
    let cluster = super::kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    for (node, reveal, is_told) in [
        ("get_rows.0", false, false),
        ("get_rows.0", true, true),
        ("layers.0.mul_mat.0", false, false),
        // What attention made of all tokens before.
        ("layers.1.mul_mat.0", false, true),
        ("logits", false, true),
    ] {
        let guard = v1::GuardRequest {
            reveal,
            ..at(&[node], &[Kind::Above(0.0)])
        };
        let (_, mut events) = armed(&client, guard).await;
        let id = format!("{}-{reveal}", node.replace('.', "_"));
        let stream = client.generate("In the beginning", options(&id, 2)).await;
        stream.unwrap().complete().await.unwrap();
        let hit = tokio::time::timeout(SOON, events.next()).await.unwrap();
        let Some(guard_event::Kind::Hit(hit)) = hit.unwrap().unwrap().kind else {
            panic!("no hit at {node}");
        };
        assert_eq!(hit.withheld, !is_told, "{hit:?}");
        assert_eq!(
            (hit.peak > 0.0, hit.rms > 0.0),
            (is_told, is_told),
            "{hit:?}"
        );
    }
}

/// What is told of a request's answer at one node: each token's place with the bits of its row's greatest value.
async fn told(
    client: &Client,
    above: f32,
    speculation: bool,
    id: &str,
) -> (Vec<(u64, u32)>, Vec<u32>) {
    let guard = at(&["layers.2.add.0"], &[Kind::Above(above)]);
    let (_, mut events) = armed(client, guard).await;
    let options = GenerateOptions {
        no_speculation: !speculation,
        ..options(id, 400)
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    let tokens = stream.complete().await.unwrap().token_ids;
    let mut all = Vec::new();
    // The last ones may still be on their way.
    while let Ok(event) = tokio::time::timeout(Duration::from_secs(1), events.next()).await {
        if let Some(guard_event::Kind::Hit(hit)) = event.unwrap().unwrap().kind {
            assert_eq!((hit.request_id.as_str(), hit.missed), (id, 0));
            all.push((hit.token, hit.peak.to_bits()));
        }
    }
    // Of a prompt that was read before, fewer rows are computed.
    all.retain(|(token, _)| *token > 0);
    (all, tokens)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_guessed_right_is_looked_at_too() {
    let cluster = super::kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let guessed = async || -> (u64, u64) {
        let workers = client.workers().await.unwrap();
        let caches = workers.iter().flat_map(|w| &w.caches);
        let counts = caches.map(|c| (c.guessed_tokens, c.guessed_right));
        counts.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    };
    // Everywhere: all rows, and so nothing that was guessed is of use.
    let (all, tokens) = told(&client, 0.0, false, "all").await;
    assert_eq!(all.len(), tokens.len() - 1);
    let (again, same) = told(&client, 0.0, true, "again").await;
    assert!(again == all && same == tokens);
    let (wasted, right) = guessed().await;
    assert_eq!(right, 0);
    // It is noticed that this does not pay.
    assert!((1..100).contains(&wasted), "{wasted} of {}", tokens.len());
    // At some of them.
    let mut peaks: Vec<f32> = all.iter().map(|(_, peak)| f32::from_bits(*peak)).collect();
    peaks.sort_by(f32::total_cmp);
    let above = peaks[peaks.len() * 9 / 10];
    let (some, same) = told(&client, above, true, "some").await;
    assert_eq!(same, tokens);
    let expected = all.iter().filter(|(_, peak)| f32::from_bits(*peak) > above);
    assert!(some.iter().eq(expected), "{} of {}", some.len(), all.len());
    assert!(!some.is_empty() && guessed().await.1 > 0);
    // Where several look, each at rows of its own, what is given up is given up once.
    let mut others = Vec::new();
    for share in [5, 7, 9] {
        let above = [Kind::Above(peaks[peaks.len() * share / 10])];
        others.push(armed(&client, at(&["layers.2.add.0"], &above)).await);
    }
    let (too, same) = told(&client, above, true, "several").await;
    assert!(too == some && same == tokens);
    let (wasted, _) = guessed().await;
    assert!(wasted < 2 * tokens.len() as u64, "{wasted}");
}

/// `hotcell debug guard` with these arguments, once it looks, and where it writes what it finds.
pub(super) async fn armed_by_command(cluster: &Cluster, arguments: &[&str]) -> (Process, PathBuf) {
    let found = cluster.folder.path().join("found");
    let mut command = hotcell_tests::cluster::hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "debug", "guard"]);
    command
        .args(arguments)
        .stdout(File::create(&found).unwrap());
    let guard = Process::start(&mut command).unwrap();
    let begun = Instant::now();
    while !guard.log().contains("looking at") {
        assert!(begun.elapsed() < SOON, "{}", guard.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (guard, found)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_ended_for_a_nan_is_captured_where_it_came() {
    let cluster = super::fault_cluster().await;
    let client = cluster.client().await.unwrap();
    let file = cluster.folder.path().join("nan.hotcell");
    let what = ["--nan", "--end", "--capture", file.to_str().unwrap()];
    let (mut guard, found) = armed_by_command(&cluster, &what).await;
    let prompt = Prompt::Ids(vec![0, 312, 17, NAN_TOKEN]);
    let error = match client.generate(prompt, options("struck", 8)).await {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.reason(), Reason::NumericsFailed);
    assert!(guard.wait().unwrap().success(), "{}", guard.log());
    let said = std::fs::read_to_string(found).unwrap();
    assert!(said.contains("nan at layers.1.mul_mat."), "{said}");
    assert!(said.contains("the request was ended"), "{said}");
    let caught = Recording::read(&file).unwrap();
    let rows = caught.tokens.iter().flat_map(|token| &token.nodes);
    let mut all = caught.head.nodes.iter().zip(rows);
    let (node, row) = all.find(|(_, row)| row.nan > 0).unwrap();
    assert_eq!((node.weight.as_str(), row.nan), (NAN_NODE, 256));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_computed_at_a_hit_is_captured() {
    let cluster = super::kjv_cluster(&["--devices", "cpu:1"]).await;
    let file = cluster.folder.path().join("hit.hotcell");
    let path = file.to_str().unwrap();
    let node = ["--node", "layers.2.add.0"];
    let what = [
        &["--above", "0"],
        &node[..],
        &["--reveal", "--capture", path],
    ]
    .concat();
    let (mut guard, _) = armed_by_command(&cluster, &what).await;
    assert!(guard.log().contains("looking at 1 nodes"));
    let client = cluster.client().await.unwrap();
    let stream = client
        .generate("In the beginning", options("caught", 60))
        .await
        .unwrap();
    let said = stream.complete().await.unwrap().token_ids;
    assert!(guard.wait().unwrap().success(), "{}", guard.log());
    let caught = Recording::read(&file).unwrap();
    assert_eq!((caught.tokens.len(), caught.head.revealed), (1, true));
    assert_eq!(caught.tokens[0].token, Some(said[0]));
    let looked = caught.head.nodes.iter().zip(&caught.tokens[0].nodes);
    assert!(looked.clone().count() > 50);
    let mut named = looked.filter(|(node, _)| node.name == "layers.2.add.0");
    assert!(
        named
            .next()
            .is_some_and(|(_, row)| !row.data.is_empty() && row.rms > 0.0)
    );
}
