//! What `hotcell top` writes, byte for byte: nothing that makes a screen flicker.

use std::time::{Duration, Instant};

use hotcell_tests::cluster::{Cluster, SOON, all_have, kjv};

use super::{
    screen::{COLUMNS, ROWS, Terminal, parser},
    top::{streams, top_every},
};

/// Begins and ends what a terminal shows at once.
const BEGIN: &[u8] = b"\x1b[?2026h";
const END: &[u8] = b"\x1b[?2026l";
/// The alternate screen is entered, and the cursor hidden.
const TAKEN: &[u8] = b"\x1b[?1049h\x1b[?25l";
/// The alternate screen is left, and the cursor shown.
const GIVEN: &[u8] = b"\x1b[?1049l\x1b[?25h";

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|part| part == what)
}

/// The frames, without what begins and ends them, and what is outside of frames. One that has not ended is left out.
fn frames(mut raw: &[u8]) -> (Vec<&[u8]>, Vec<u8>) {
    let (mut frames, mut outside) = (Vec::new(), Vec::new());
    while let Some(begin) = find(raw, BEGIN) {
        outside.extend(&raw[..begin]);
        let frame = &raw[begin + BEGIN.len()..];
        let Some(end) = find(frame, END) else {
            return (frames, outside);
        };
        frames.push(&frame[..end]);
        raw = &frame[end + END.len()..];
    }
    outside.extend(raw);
    (frames, outside)
}

/// Nothing is cleared or scrolled, no screen changed, no cursor shown: text, styles, and where they go.
fn assert_calm(frame: &[u8]) {
    let mut rest = frame;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != 0x1b {
            assert!(
                byte >= b' ',
                "{byte:#x} in {:?}",
                String::from_utf8_lossy(frame)
            );
            continue;
        }
        let end = rest.iter().skip(1).position(|b| (0x40..=0x7e).contains(b));
        let (sequence, after) = rest.split_at(end.map_or(rest.len(), |end| end + 2));
        rest = after;
        let calm = sequence.starts_with(b"[")
            && (matches!(sequence.last(), Some(b'H' | b'm')) || sequence == b"[?25l");
        assert!(calm, "ESC {}", String::from_utf8_lossy(sequence));
    }
}

/// Writes frames to a screen, and looks at it after each.
fn assert_shown(frames: &[&[u8]]) {
    let mut screen = parser(ROWS, COLUMNS);
    for (number, frame) in frames.iter().enumerate() {
        screen.process(frame);
        let text = screen.screen().contents();
        let lines: Vec<&str> = text.lines().collect();
        let (first, last) = (lines.first(), lines.get(usize::from(ROWS) - 1));
        let whole = first.is_some_and(|l| l.starts_with("unix:"))
            && last.is_some_and(|l| l.contains("q quit") || l.contains("any other key goes back"));
        assert!(whole, "frame {number}:\n{text}");
    }
}

/// Nothing is written for a moment any more.
async fn quiet(top: &Terminal) {
    let start = Instant::now();
    let mut before = 0;
    while before != top.raw().len() {
        assert!(start.elapsed() < SOON, "{}", top.text());
        before = top.raw().len();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// What was written, once there are so many frames.
async fn more_frames(top: &Terminal, most: usize) -> Vec<u8> {
    let start = Instant::now();
    loop {
        let raw = top.raw();
        let count = frames(&raw).0.len();
        if count >= most {
            return raw;
        }
        assert!(start.elapsed() < SOON, "{count} frames of {most}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_busy_screen_never_flickers_and_an_idle_one_is_left_alone() {
    let cluster = Cluster::with_model("kjv", &kjv(), &["--devices", "cpu:1"])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let mut tasks = streams(&cluster, &["adam", "eve", "cain"]).await;
    let mut top = top_every(&cluster, "100ms");
    top.until("requests", |t| t.line("adam").contains(&"drawing".into()))
        .await;
    let begun = frames(&top.raw()).0.len();
    let raw = more_frames(&top, begun + 20).await;
    let (all, outside) = frames(&raw);
    let seen = &all[begun..];
    // A frame may have just begun.
    assert!(outside.starts_with(TAKEN) && outside.len() <= TAKEN.len() + BEGIN.len());
    all.iter().for_each(|frame| assert_calm(frame));
    // Numbers and curves change, and the rest is not written again: a screen has 5200 cells.
    let bytes: usize = seen.iter().map(|frame| frame.len()).sum();
    let most = usize::from(ROWS) * usize::from(COLUMNS) / 5;
    assert!(bytes / seen.len() < most, "{bytes} in {}", seen.len());
    // Nor is it cleared for another page.
    for (key, shown) in [
        ("s", "SINCE"),
        ("v", "HEALTH"),
        ("x", "Events"),
        ("?", "PUT BACK"),
    ] {
        top.press(key);
        top.until(key, |t| t.text().contains(shown)).await;
    }
    assert!(tasks.try_join_next().is_none());
    tasks.shutdown().await;
    // Help does not change: the time does, at the top, and other numbers in that line.
    top.until("no requests", |t| {
        t.text().contains(" 0 requests, 0 tokens/s")
    })
    .await;
    let begun = frames(&top.raw()).0.len();
    let raw = more_frames(&top, begun + 6).await;
    let idle = &frames(&raw).0[begun..];
    for frame in idle {
        let text = String::from_utf8_lossy(frame);
        assert!(frame.len() < 100, "{} bytes: {text:?}", frame.len());
    }
    top.press("xq");
    assert!(top.end().await.success());
    let raw = top.raw();
    let (all, outside) = frames(&raw);
    all.iter().for_each(|frame| assert_calm(frame));
    assert_shown(&all);
    // The terminal is taken once and given back once; a cursor that is shown may be shown again.
    let given = outside.strip_prefix(TAKEN).unwrap();
    let given = given.strip_prefix(GIVEN).unwrap();
    assert!(
        matches!(given, b"" | b"\x1b[?25h"),
        "{:?}",
        String::from_utf8_lossy(given)
    );
}

#[tokio::test]
async fn nothing_new_is_not_drawn() {
    let cluster = Cluster::with_model("kjv", &kjv(), &["--devices", "cpu:1"])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let mut top = top_every(&cluster, "30s");
    top.until("a worker", |t| !t.line("w0").is_empty()).await;
    quiet(&top).await;
    let before = top.raw();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(top.raw().len(), before.len());
    top.press("q");
    assert!(top.end().await.success());
}
