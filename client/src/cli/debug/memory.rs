//! `hotcell debug memory`: who holds which bytes of a worker.

use clap::Args;
use hotcell_proto::v1::{CacheStatus, MemoryMap, SessionMemory};
use serde_json::json;

use crate::cli::{
    exit::Failure,
    session::Session,
    table::bytes,
    ui::{Ui, one_line},
};

/// `hotcell debug memory`.
#[derive(Args, Clone, Debug)]
pub struct MemoryFlags {
    /// The worker, where there are several
    pub worker: Option<String>,
    /// Handles to show of each tensor session, the largest first
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub handles: u32,
}

pub(super) async fn memory(
    ui: &mut Ui,
    session: &Session,
    flags: &MemoryFlags,
) -> Result<(), Failure> {
    let worker = flags.worker.as_deref().unwrap_or_default();
    let map = session.client.memory(worker, flags.handles).await?;
    match ui.manner.json {
        true => ui.print_json(&json!(map)),
        false => ui.print_text(&told(&map)),
    }
}

fn line(text: &mut String, depth: usize, size: u64, what: &str) {
    let (indent, size) = ("  ".repeat(depth), bytes(size));
    text.push_str(&format!("{size:>10}  {indent}{}\n", one_line(what)));
}

fn cache(text: &mut String, cache: &CacheStatus) {
    let blocks = |count: fn(&hotcell_proto::v1::CacheLayers) -> u64| {
        let layers = cache.layers.iter();
        let sizes = layers.map(|layers| layers.block_bytes.saturating_mul(count(layers)));
        sizes.fold(0, u64::saturating_add)
    };
    let of = &cache.model;
    let used = blocks(|layers| layers.used_blocks);
    line(text, 1, used, &format!("blocks of {of} that requests have"));
    for request in &cache.requests {
        let name = match request.request_id.as_str() {
            "" => "an embedding",
            id => id,
        };
        let what = format!("request {name}, {} tokens", request.tokens);
        line(text, 2, request.bytes, &what);
    }
    let kept = blocks(|layers| layers.kept_blocks);
    line(
        text,
        1,
        kept,
        &format!("blocks of {of} kept for prompts that begin alike"),
    );
}

fn session(text: &mut String, session: &SessionMemory) {
    let (active, most) = (session.active_bytes, bytes(session.most_bytes));
    let what = format!(
        "session {}: {} tensors, {} plans; {} freed and kept, at most {} at once, {most} allowed",
        session.number,
        session.tensors,
        session.plans,
        bytes(session.kept_bytes),
        bytes(session.peak_bytes),
    );
    line(text, 0, active, &what);
    for handle in &session.handles {
        let what = format!("{} {}", handle.kind, handle.what);
        line(text, 1, handle.bytes, &what);
    }
    if session.further_handles > 0 {
        let further = session.further_handles;
        text.push_str(&format!("{:>10}  {further} further handles\n", "…"));
    }
}

/// The map in lines: bytes, and who holds them.
fn told(map: &MemoryMap) -> String {
    let mut text = format!("worker {}, epoch {}\n", one_line(&map.worker), map.epoch);
    if map.resident_bytes > 0 {
        let what = "of the process in memory, weights that it shares with others among them";
        line(&mut text, 0, map.resident_bytes, what);
    }
    for part in &map.uses {
        let kind = part.kind.replace('_', " ");
        let what = match part.model.as_str() {
            "" => kind,
            model => format!("{kind} of {model}"),
        };
        line(&mut text, 0, part.bytes, &what);
        if part.kind == "cache" {
            let its = |one: &&CacheStatus| one.model == part.model;
            map.caches.iter().filter(its).for_each(|one| {
                cache(&mut text, one);
            });
        }
    }
    map.sessions.iter().for_each(|one| session(&mut text, one));
    if map.further_sessions > 0 {
        let further = map.further_sessions;
        text.push_str(&format!("{:>10}  {further} further sessions\n", "…"));
    }
    text
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{CacheLayers, HeldHandle, MemoryUse, RequestMemory};

    use super::*;

    #[test]
    fn a_map_is_told_by_who_holds_what() {
        let part = |kind: &str, model: &str, bytes| MemoryUse {
            kind: kind.into(),
            model: model.into(),
            bytes,
        };
        let map = MemoryMap {
            worker: "w0\u{1b}".into(),
            uses: vec![part("cache", "kjv", 4096), part("tensors", "", 3 << 20)],
            caches: vec![CacheStatus {
                model: "kjv".into(),
                layers: vec![CacheLayers {
                    block_bytes: 1024,
                    used_blocks: 2,
                    kept_blocks: 1,
                    ..CacheLayers::default()
                }],
                requests: vec![RequestMemory {
                    request_id: "moses".into(),
                    tokens: 7,
                    bytes: 2048,
                    ..RequestMemory::default()
                }],
                ..CacheStatus::default()
            }],
            sessions: vec![SessionMemory {
                number: 3,
                active_bytes: 3 << 20,
                further_handles: 5,
                handles: vec![HeldHandle {
                    kind: "tensor".into(),
                    what: "f32[8]".into(),
                    bytes: 32,
                }],
                ..SessionMemory::default()
            }],
            ..MemoryMap::default()
        };
        let text = told(&map);
        for part in [
            "4.0 KiB  cache of kjv",
            "2.0 KiB    blocks of kjv that requests have",
            "2.0 KiB      request moses, 7 tokens",
            "1.0 KiB    blocks of kjv kept",
            "3.0 MiB  session 3",
            "32 B    tensor f32[8]",
            "5 further handles",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains('\u{1b}'));
    }
}
