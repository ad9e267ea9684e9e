//! The next request that meets a condition is captured by the command, whatever the condition is.

use hotcell_client::{
    Client, GenerateOptions, Prompt,
    debug::Recording,
    v1::{self, condition::Kind},
};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, copy_kjv},
    fault::{WRONG_NODE, WRONG_TOKEN},
};

use super::{
    capturing::{capturing, result},
    guards::at,
    holding::{fill, fill_row, hit},
    kjv_cluster, long,
};

/// A token whose row of the embedding is zeros.
const ZEROED: u32 = 999;

/// Asks for a token after this prompt; that may fail of what is looked for.
async fn ask(client: &Client, id: &str, prompt: &[u32]) {
    let options = GenerateOptions {
        max_tokens: 1,
        deadline: Some(SOON),
        ..long(id)
    };
    if let Ok(stream) = client.generate(Prompt::Ids(prompt.to_vec()), options).await {
        let _ = stream.complete().await;
    }
}

/// What a capture of the request that meets `condition` at these nodes says, and its file's node and row of this weight or
/// op, once requests of these prompts have come, of which the last one meets it. It is of one token, from the prompt on.
async fn captured(
    cluster: &Cluster,
    (condition, at): (&str, &str),
    requests: &[(&str, &[u32])],
) -> (String, v1::CapturedNode, v1::NodeValues) {
    let file = cluster.folder.path().join("met.hotcell");
    let arguments = ["--when", condition, "--at", at, "-n", "1", "--reveal"];
    let mut capture = capturing(cluster, &arguments, &file, "looking at").await;
    let client = cluster.client().await.unwrap();
    for (id, prompt) in requests {
        ask(&client, id, prompt).await;
    }
    assert!(capture.wait().unwrap().success(), "{}", capture.log());
    let said = result(&file);
    let (id, prompt) = requests.last().unwrap();
    let hit = said.lines().next().unwrap();
    assert!(hit.starts_with(&format!("{condition} at ")), "{said}");
    assert!(
        hit.contains(&format!(" in {id} of kjv, token 0, ")),
        "{said}"
    );
    assert!(said.contains("met.hotcell: 1 tokens of "), "{said}");

    let met = Recording::read(&file).unwrap();
    let asked = met.head.request.as_ref().unwrap().prompt.clone().unwrap();
    let ids = prompt.to_vec();
    let ids = v1::prompt::Kind::Ids(v1::TokenIds { ids });
    assert_eq!(asked.kind, Some(ids));
    assert_eq!(met.tokens.len(), 1);
    let rows = met.head.nodes.iter().zip(&met.tokens[0].nodes);
    let mut named = rows.filter(|(node, _)| [&node.weight, &node.op].contains(&&at.to_owned()));
    // The condition's node is the one that the hit names.
    let (node, row) = named
        .find(|(node, _)| hit.contains(&node.name))
        .unwrap_or_else(|| panic!("{said}"));
    std::fs::remove_file(&file).unwrap();
    (hit.to_owned(), node.clone(), row.clone())
}

fn values(node: &v1::CapturedNode) -> u64 {
    node.dims.iter().product()
}

#[tokio::test(flavor = "multi_thread")]
async fn zeros_and_infinities_are_captured_where_they_come() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("kjv");
    copy_kjv(&model).unwrap();
    let file = model.join("model.safetensors");
    fill_row(&file, "model.embed_tokens.weight", ZEROED as usize, 0.0);
    let norm = "model.layers.3.input_layernorm.weight";
    fill(&file, norm, f32::INFINITY);
    let cluster = Cluster::with_model("kjv", &model, &["--devices", "cpu:1"]).await;
    let cluster = cluster.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();

    let requests: [(&str, &[u32]); 2] = [("passed", &[0, 312, 17]), ("zeroed", &[0, 313, ZEROED])];
    let (said, node, row) = captured(&cluster, ("zero", "get_rows"), &requests).await;
    assert!(said.contains("position 2: peak 0, rms 0"), "{said}");
    assert_eq!(
        (node.name.as_str(), row.zero),
        ("get_rows.0", values(&node))
    );

    // All requests meet that.
    let requests: [(&str, &[u32]); 1] = [("infinite", &[0, 314, 18])];
    let (said, node, row) = captured(&cluster, ("inf", norm), &requests).await;
    assert!(said.contains("inf at layers.3.rms_norm."), "{said}");
    assert!(said.contains("position 0: peak inf"), "{said}");
    assert_eq!((row.infinite, row.nan), (values(&node), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kernel_a_thousandth_off_is_captured_by_the_root_of_its_mean_square() {
    let faulty = super::fault_cluster().await;
    let client = faulty.client().await.unwrap();
    // What a worker that computes rightly has there.
    let right = {
        let healthy = kjv_cluster(&["--devices", "cpu:1"]).await;
        let client = healthy.client().await.unwrap();
        rms(&client, WRONG_TOKEN).await
    };
    // One whose number is less, so that a range that has both ends just above the right one of the other.
    let (mut other, mut less) = (WRONG_TOKEN, right);
    while less >= right {
        other += 9;
        less = rms(&client, other).await;
    }
    let condition = format!("rms={:?},{:?}", less * 0.9995, right * 1.0005);
    let requests: [(&str, &[u32]); 2] = [("passed", &[other]), ("struck", &[WRONG_TOKEN])];
    let (said, node, row) = captured(&faulty, (&condition, WRONG_NODE), &requests).await;
    assert!(said.contains("layers.2.mul_mat."), "{said}");
    assert_eq!(node.layer, Some(2));
    let off = row.rms / f64::from(right) - 1.0;
    assert!((9e-4..1.1e-3).contains(&off), "{off}");
}

/// The root of the mean square of what the node that reads [`WRONG_NODE`] gives for a prompt of this one token.
async fn rms(client: &Client, token: u32) -> f32 {
    let any = at(&[WRONG_NODE], &[Kind::Above(0.0)]);
    hit(client, any, &[token]).await.unwrap().rms
}
