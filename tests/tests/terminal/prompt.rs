//! `hotcell debug WORKER`: completion, Ctrl-C and Ctrl-D, and that it leaves the terminal as it was.

use std::os::unix::process::ExitStatusExt;

use hotcell_tests::cluster::{Cluster, all_have, hotcell, kjv};
use rustix::process::Signal;

use super::screen::Terminal;

/// The last line that is not empty.
fn last(terminal: &Terminal) -> String {
    let text = terminal.text();
    let mut lines = text.lines().rev().map(str::trim_end);
    lines
        .find(|line| !line.is_empty())
        .unwrap_or_default()
        .to_owned()
}

#[tokio::test]
async fn commands_are_completed_and_ctrl_c_ends_what_runs_but_not_the_prompt() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "debug", "w0"]);
    let mut prompt = Terminal::start(command);
    let waits = |t: &Terminal| last(t) == "w0>";
    prompt.until("a prompt", waits).await;
    assert!(prompt.text().contains("help lists the commands"));
    // A command, a flag, and the rest by hand.
    prompt.press("wat\t--ev\t");
    prompt
        .until("both completed", |t| last(t) == "w0> watch --every")
        .await;
    prompt.press("100ms\r");
    prompt
        .until("lines", |t| t.text().matches("  idle  ").count() > 4)
        .await;
    prompt.press("\u{3}");
    prompt.until("the prompt again", waits).await;
    // One that waits for what never comes ends, too.
    prompt.press("capture --next -o never.hotcell\r");
    prompt
        .until("that it waits", |t| {
            t.text().contains("waiting for the request")
        })
        .await;
    prompt.press("\u{3}");
    prompt.until("the prompt again", waits).await;
    // While something is typed, Ctrl-C throws that away.
    prompt.press("quit");
    prompt
        .until("what is typed", |t| last(t) == "w0> quit")
        .await;
    prompt.press("\u{3}");
    prompt.until("the prompt again", waits).await;
    prompt.press("nonsense\r");
    prompt
        .until("that it is none", |t| {
            t.text().contains("unrecognized subcommand 'nonsense'")
        })
        .await;
    prompt.until("the prompt again", waits).await;
    prompt.press("\u{4}");
    assert!(prompt.end().await.success());
}

#[tokio::test]
async fn it_ends_with_its_terminal() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let starts = [Terminal::start, Terminal::start_detached];
    let starts = starts.into_iter().zip([true, false]);
    // While it waits for a line, and while it shows something.
    for (start, controls, typed) in
        starts.flat_map(|(start, controls)| ["", "watch\r"].map(|typed| (start, controls, typed)))
    {
        let mut command = hotcell(cluster.folder.path()).unwrap();
        let address = format!("unix:{}", cluster.socket.display());
        command.args(["--address", &address, "debug", "w0"]);
        let mut prompt = start(command);
        prompt.until("a prompt", |t| last(t) == "w0>").await;
        prompt.press(typed);
        if !typed.is_empty() {
            prompt
                .until("lines", |t| t.text().contains("  idle  "))
                .await;
        }
        let status = prompt.close().await;
        // 0: its input is at its end. 1: the terminal can no longer be read from or written to. A panic gives 101.
        let ended = matches!(status.code(), Some(0 | 1));
        // It does not handle SIGHUP, which comes of a controlling terminal and may be sooner than that.
        let hung_up = controls && status.signal() == Some(Signal::HUP.as_raw());
        assert!(
            ended || hung_up,
            "controls: {controls}, {typed:?}: {status}"
        );
    }
}
