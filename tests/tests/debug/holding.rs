//! Each kind of watchpoint fires where it should, and a kernel that is only a little wrong is found by one.

use hotcell_client::{
    Client, GenerateOptions, Prompt,
    v1::{self, condition::Kind, guard_event},
};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, copy_kjv},
    fault::{WRONG_NODE, WRONG_TOKEN},
};

use super::{
    guarding::armed_by_command,
    guards::{armed, at},
    kjv_cluster, long,
};

/// The first hit of a request that is a prompt of these tokens, if there is one.
pub(super) async fn hit(
    client: &Client,
    guard: v1::GuardRequest,
    prompt: &[u32],
) -> Option<v1::GuardHit> {
    let (_, mut events) = armed(client, guard).await;
    let options = GenerateOptions {
        max_tokens: 1,
        deadline: Some(SOON),
        ..long("")
    };
    // It may fail of what is looked for.
    if let Ok(stream) = client.generate(Prompt::Ids(prompt.to_vec()), options).await {
        let _ = stream.complete().await;
    }
    let wait = std::time::Duration::from_secs(1);
    let event = tokio::time::timeout(wait, events.next()).await.ok()?;
    match event.unwrap().unwrap().kind.unwrap() {
        guard_event::Kind::Hit(hit) => Some(hit),
        other => panic!("{other:?}"),
    }
}

fn outside(least: f32, most: f32) -> Kind {
    Kind::RmsOutside(v1::Range { least, most })
}

/// Has all values of a weight be this one.
pub(super) fn fill(file: &std::path::Path, weight: &str, value: f32) {
    fill_in(file, weight, value, |_| 0..usize::MAX);
}

/// Has all values of a row of a matrix be this one.
pub(super) fn fill_row(file: &std::path::Path, weight: &str, row: usize, value: f32) {
    fill_in(file, weight, value, |shape| {
        row * shape[1]..(row + 1) * shape[1]
    });
}

/// Has values of a weight be this one: those at places that its shape tells.
fn fill_in(
    file: &std::path::Path,
    weight: &str,
    value: f32,
    places: impl Fn(&[usize]) -> std::ops::Range<usize>,
) {
    let mut bytes = std::fs::read(file).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let info = metadata.info(weight).unwrap();
    let value = value.to_le_bytes();
    let value = match info.dtype {
        safetensors::Dtype::F32 => &value[..],
        // Its upper half.
        safetensors::Dtype::BF16 => &value[2..],
        other => panic!("{other:?}"),
    };
    let (begin, end) = info.data_offsets;
    let data = &mut bytes[8 + header + begin..8 + header + end];
    let places = places(&info.shape);
    let all = data.chunks_exact_mut(value.len());
    for place in all.skip(places.start).take(places.len()) {
        place.copy_from_slice(value);
    }
    std::fs::write(file, bytes).unwrap();
}

#[tokio::test]
async fn zeros_and_infinities_are_told_where_a_files_weights_make_them() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("kjv");
    copy_kjv(&model).unwrap();
    let file = model.join("model.safetensors");
    fill(&file, "model.layers.1.input_layernorm.weight", 0.0);
    fill(
        &file,
        "model.layers.3.input_layernorm.weight",
        f32::INFINITY,
    );
    let cluster = Cluster::with_model("kjv", &model, &["--devices", "cpu:1"])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let prompt = [0, 312, 17];
    // Another one, of which nothing is cached.
    let others = [0, 313, 18];
    let zero = v1::GuardRequest {
        layers: vec![1],
        ..at(&["*"], &[Kind::Nan(true), Kind::Zero(true)])
    };
    let zero = hit(&client, zero, &prompt).await.unwrap();
    let node = zero.node.unwrap();
    assert_eq!((zero.condition, zero.peak, zero.rms), (1, 0.0, 0.0));
    assert_eq!((node.op.as_str(), node.layer), ("rms_norm", Some(1)));
    let infinite = v1::GuardRequest {
        layers: vec![3],
        ..at(&["*"], &[Kind::Nan(true), Kind::Infinite(true)])
    };
    let infinite = hit(&client, infinite, &others).await.unwrap();
    let node = infinite.node.unwrap();
    assert_eq!((infinite.condition, infinite.peak), (1, f32::INFINITY));
    assert_eq!((node.op.as_str(), node.layer), ("rms_norm", Some(3)));

    // And so by the command.
    let ways: [(&[&str], &str, u32); 3] = [
        (&["--zero"], "zero at layers.1.rms_norm.", 1),
        (&["--inf"], "inf at layers.3.rms_norm.", 3),
        (
            &["--rms-outside", "1,9"],
            "rms outside [1, 9] at layers.1.rms_norm.",
            1,
        ),
    ];
    for (i, (condition, said, layer)) in ways.into_iter().enumerate() {
        let layer = layer.to_string();
        let what = [
            condition,
            &["--node", "rms_norm", "--layer", &layer, "-n", "1"],
        ]
        .concat();
        let (mut guard, found) = armed_by_command(&cluster, &what).await;
        let options = GenerateOptions {
            max_tokens: 1,
            deadline: Some(SOON),
            ..long("")
        };
        let prompt = Prompt::Ids(vec![0, 320 + i as u32]);
        if let Ok(stream) = client.generate(prompt, options).await {
            let _ = stream.complete().await;
        }
        assert!(guard.wait().unwrap().success(), "{}", guard.log());
        let found = std::fs::read_to_string(found).unwrap();
        assert!(found.contains(said), "{said}: {found}");
    }
}

#[tokio::test]
async fn a_kernel_a_thousandth_off_is_found_by_the_root_of_its_mean_square() {
    let healthy = kjv_cluster(&["--devices", "cpu:1"]).await;
    let faulty = super::fault_cluster().await;
    let (right, wrong) = (
        healthy.client().await.unwrap(),
        faulty.client().await.unwrap(),
    );
    let of = |kinds: &[Kind]| at(&[WRONG_NODE], kinds);
    // A row of one token, so that the one that is told is the one that is meant.
    let prompt = [WRONG_TOKEN];
    let known = hit(&right, of(&[Kind::Above(0.0)]), &prompt).await.unwrap();
    let range = outside(known.rms * 0.9995, known.rms * 1.0005);
    let none = hit(&right, of(&[range]), &prompt).await;
    assert!(none.is_none(), "{none:?}");
    let found = hit(&wrong, of(&[range]), &prompt).await.unwrap();
    assert_eq!(found.node.unwrap().weight, WRONG_NODE);
    let off = found.rms / known.rms - 1.0;
    assert!((9e-4..1.1e-3).contains(&off), "{off}");
    // Of a token that it computes rightly it says nothing.
    let other = [WRONG_TOKEN + 9];
    let known = hit(&right, of(&[Kind::Above(0.0)]), &other).await.unwrap();
    let range = outside(known.rms * 0.9995, known.rms * 1.0005);
    let none = hit(&wrong, of(&[range]), &other).await;
    assert!(none.is_none(), "{none:?}");
}
