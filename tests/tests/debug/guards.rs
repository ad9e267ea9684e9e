//! Watchpoints, as tests ask for them.

use hotcell_client::{
    Client,
    control::Messages,
    v1::{self, condition::Kind, guard_event},
};

/// One that looks for these conditions at these nodes, of all layers; at all nodes if none is named.
pub(super) fn at(nodes: &[&str], kinds: &[Kind]) -> v1::GuardRequest {
    v1::GuardRequest {
        nodes: nodes.iter().map(|node| (*node).to_owned()).collect(),
        conditions: kinds
            .iter()
            .map(|kind| v1::Condition { kind: Some(*kind) })
            .collect(),
        ..v1::GuardRequest::default()
    }
}

/// At how many nodes it looks, once it does, and what it tells from then on.
pub(super) async fn armed(
    client: &Client,
    guard: v1::GuardRequest,
) -> (u32, Messages<v1::GuardEvent>) {
    let mut events = client.guard(guard).await.unwrap();
    match events.next().await.unwrap().unwrap().kind {
        Some(guard_event::Kind::Armed(nodes)) => (nodes, events),
        other => panic!("{other:?}"),
    }
}
