//! Who holds which bytes of a worker: what is told is what is there.

use hotcell_client::{
    Address,
    tensor::{Session, SessionOptions},
};
use serde_json::Value;

use super::{hotcell, kjv_cluster, long};

#[tokio::test(flavor = "multi_thread")]
async fn a_map_names_models_requests_sessions_and_handles() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    let session = Session::open(&address, SessionOptions::default())
        .await
        .unwrap();
    let values = vec![1f32; 3 << 18];
    let one = session.tensor(&values, &[3, 1 << 18]).unwrap();
    let held = &one + &one;
    held.eval().await.unwrap();
    let mut stream = client
        .generate("In the beginning", long("holds"))
        .await
        .unwrap();
    stream.next().await.unwrap().unwrap();
    let said = hotcell(&cluster, &["--json", "debug", "memory", "w0"]);
    let map: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&map["worker"], &map["epoch"]), (&"w0".into(), &1.into()));
    let number = |value: &Value| value.as_u64().unwrap();
    let uses = map["uses"].as_array().unwrap();
    let part = |kind: &str| {
        let found = uses.iter().find(|part| part["kind"] == kind);
        number(&found.unwrap_or_else(|| panic!("{kind} in {said}"))["bytes"])
    };
    let files = client.models().await.unwrap()[0].file_bytes;
    assert!(part("weights") > 0 && part("weights") <= files, "{said}");
    assert!(part("cache") > 0 && part("plans") > 0);
    assert!(number(&map["resident_bytes"]) > 3 << 20);
    let requests = map["caches"][0]["requests"].as_array().unwrap();
    assert_eq!(requests[0]["request_id"], "holds");
    assert!(number(&requests[0]["bytes"]) <= part("cache"));
    let sessions = map["sessions"].as_array().unwrap();
    assert_eq!(sessions.len(), 1, "{said}");
    assert!(number(&sessions[0]["active_bytes"]) >= 3 << 20);
    assert_eq!(number(&sessions[0]["active_bytes"]), part("tensors"));
    let handle = &sessions[0]["handles"][0];
    assert_eq!(number(&handle["bytes"]), 3 << 20, "{said}");
    assert_eq!(handle["kind"], "tensor");
    assert!(handle["what"].as_str().unwrap().contains("f32"), "{said}");

    let text = hotcell(&cluster, &["debug", "memory"]);
    for part in ["weights of kjv", "request holds", "3.0 MiB    tensor f32"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    drop(held);
    stream.cancel().await;
    let refused = cluster
        .hotcell(&["debug", "memory", "--handles", "257"])
        .unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && said.contains("at most 256"),
        "{said}"
    );
}
