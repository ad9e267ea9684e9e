//! `deploy/METRICS.md` and the dashboard for Grafana are what the table of metrics says.
//!
//! `HOTCELL_UPDATE=1` writes them anew.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{fmt::Write, fs};

use hotcell_scheduler::gateway::metrics::{Kind, Row, TABLE};
use hotcell_tests::cluster::repository;
use serde_json::{Value, json};

const HEAD: &str = "# Metrics

Generated from the table of the scheduler's metrics by `HOTCELL_UPDATE=1 cargo test -p hotcell-tests --test metrics_page`; do
not edit.

`hotcell serve --http ADDRESS` serves them under `/metrics`. Those that vLLM (`vllm:`), TGI (`tgi_`), Triton (`nv_`) or
OpenTelemetry's conventions (`gen_ai_`) have a name for are told under that one as well, with the labels that belong to it:
`model_name` and `engine` for vLLM (`finished_reason` for `end`, `num_gpu_blocks` for `blocks`), `model` for TGI, `model` and `version` for Triton (`gpu_uuid`),
`gen_ai_request_model` and `gen_ai_provider_name` for OpenTelemetry; one host is one engine. `deploy/grafana/hotcell.json` is a dashboard of all of them.

| name | also | kind | labels | meaning |
|---|---|---|---|---|
";

fn page() -> String {
    let mut page = HEAD.to_owned();
    for row in TABLE {
        let theirs: Vec<_> = row.also.iter().map(|name| format!("`{name}`")).collect();
        let theirs = match theirs.is_empty() {
            true => "-".to_owned(),
            false => theirs.join(", "),
        };
        let labels: Vec<_> = (row.labels().iter().map(|l| format!("`{l}`"))).collect();
        let labels = labels.join(", ");
        let labels = if labels.is_empty() { "-" } else { &labels };
        let (name, kind) = (row.name, row.kind.name());
        writeln!(
            page,
            "| `{name}` | {theirs} | {kind} | {labels} | {} |",
            row.help
        )
        .unwrap();
    }
    page
}

fn targets(row: &Row) -> Vec<Value> {
    let name = row.name;
    let by = row.labels().join(", ");
    let legend: Vec<_> = row
        .labels()
        .iter()
        .map(|l| format!("{{{{{l}}}}}"))
        .collect();
    let legend = legend.join(" ");
    let target =
        |expr: String, legend: String| json!({"expr": expr, "legendFormat": legend, "refId": "A"});
    match row.kind {
        Kind::Gauge => vec![target(name.to_owned(), legend)],
        Kind::Counter => vec![target(format!("sum by ({by}) (rate({name}[$__rate_interval]))"), legend)],
        Kind::Histogram => [("50", "0.5", "A"), ("99", "0.99", "B")]
            .map(|(percent, quantile, id)| {
                let expr = format!(
                    "histogram_quantile({quantile}, sum by ({by}, le) (rate({name}_bucket[$__rate_interval])))"
                );
                json!({"expr": expr, "legendFormat": format!("p{percent} {legend}"), "refId": id})
            })
            .to_vec(),
    }
}

fn unit(name: &str) -> &'static str {
    match name {
        _ if name.ends_with("_seconds") => "s",
        _ if name.ends_with("_bytes") => "bytes",
        _ if name.ends_with("_ratio") => "percentunit",
        _ => "short",
    }
}

fn dashboard() -> String {
    let source = json!({"type": "prometheus", "uid": "${source}"});
    let panels = TABLE.iter().enumerate().map(|(index, row)| {
        json!({
            "id": index + 1,
            "type": "timeseries",
            "title": row.name,
            "description": row.help,
            "datasource": source,
            "gridPos": {"x": 8 * (index % 3), "y": 8 * (index / 3), "w": 8, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit(row.name), "min": 0}, "overrides": []},
            "targets": targets(row),
        })
    });
    let value = json!({
        "title": "Hotcell",
        "uid": "hotcell",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": panels.collect::<Vec<_>>(),
    });
    serde_json::to_string_pretty(&value).unwrap() + "\n"
}

#[test]
fn the_page_and_the_dashboard_are_what_the_table_says() {
    for (file, text) in [
        ("deploy/METRICS.md", page()),
        ("deploy/grafana/hotcell.json", dashboard()),
    ] {
        let path = repository().join(file);
        if std::env::var_os("HOTCELL_UPDATE").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &text).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == text,
            "{file} is not what the table says; run with HOTCELL_UPDATE=1"
        );
    }
}
