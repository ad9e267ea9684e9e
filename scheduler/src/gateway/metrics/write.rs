//! Metrics as text.

use std::{collections::BTreeMap, fmt::Write};

use hotcell_proto::v1::WorkerInfo;

use super::{ADAPTERS, Dialect, Model, Read, Row, STATES, Seen, is_success, whole_blocks};
use crate::meters::Histogram;

/// A label's value as the format wants it.
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// Labels in braces.
fn braced(labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let all = labels
        .iter()
        .map(|(k, v)| format!("{k}=\"{}\"", escaped(v)));
    format!("{{{}}}", all.collect::<Vec<_>>().join(","))
}

/// A model's labels under one of a row's names.
fn model_labels<'a>(name: &str, model: &'a str) -> Vec<(&'static str, &'a str)> {
    let (label, always) = Dialect::of(name).model();
    let mut labels = vec![(label, model)];
    labels.extend(always);
    if name == "nv_trt_llm_kv_cache_block_metrics" {
        labels.push(("kv_cache_block_type", "fraction"));
    }
    labels
}

/// Writes a histogram in its unit, of which each is so many of the name's.
pub(super) fn histogram(
    to: &mut String,
    name: &str,
    labels: &[(&str, &str)],
    (values, each): (&Histogram, f64),
) {
    let (counts, sum) = values.read();
    let sum = sum * each;
    let ends = values.bounds.iter().map(|end| (end * each).to_string());
    for (count, end) in counts.iter().zip(ends.chain(["+Inf".to_owned()])) {
        let mut labels = labels.to_vec();
        labels.push(("le", &end));
        // Writing into a string cannot fail.
        let _ = writeln!(to, "{name}_bucket{} {count}", braced(&labels));
    }
    let labels = braced(labels);
    let all = counts.last().copied().unwrap_or(0);
    let _ = writeln!(to, "{name}_sum{labels} {sum}\n{name}_count{labels} {all}");
}

/// Writes a row under one of its names.
pub(super) fn row(
    to: &mut String,
    row: &Row,
    name: &str,
    seen: &Seen,
    models: &[(String, Model<'_>)],
) {
    let dialect = Dialect::of(name);
    let _ = writeln!(to, "# HELP {name} {}", row.help);
    let _ = writeln!(to, "# TYPE {name} {}", row.kind.name());
    let mut told = |labels: &[(&str, &str)], value: f64| {
        let _ = writeln!(to, "{name}{} {value}", braced(labels));
    };
    match &row.read {
        Read::Host(value) => told(&[], value(seen)),
        Read::Model(value) => {
            for (model, values) in models {
                told(&model_labels(name, model), value(values));
            }
        }
        Read::Times(of) => {
            for (model, values) in models {
                histogram(
                    to,
                    name,
                    &model_labels(name, model),
                    (of(values.meter), 1.0),
                );
            }
        }
        Read::Millis(of) => {
            for (model, values) in models {
                histogram(
                    to,
                    name,
                    &model_labels(name, model),
                    (of(values.meter), 1e3),
                );
            }
        }
        Read::Ends => {
            let label = match dialect {
                Dialect::Vllm => "finished_reason",
                _ => "end",
            };
            for (model, values) in models {
                for (end, count) in values.meter.ended() {
                    if dialect == Dialect::Vllm && !is_success(end) {
                        continue;
                    }
                    let mut labels = model_labels(name, model);
                    labels.push((label, end));
                    told(&labels, count as f64);
                }
            }
        }
        Read::States => {
            for (model, values) in models {
                for (state, word) in STATES {
                    let mut labels = model_labels(name, model);
                    labels.push(("state", word));
                    told(&labels, f64::from(u8::from(values.info.state() == *state)));
                }
            }
        }
        Read::Cache => {
            for (model, values) in models {
                let size = values.caches.first().map_or(0, |c| c.block_tokens);
                let (size, blocks) = (size.to_string(), values.sum(whole_blocks).to_string());
                let many = match dialect {
                    Dialect::Vllm => "num_gpu_blocks",
                    _ => "blocks",
                };
                let mut labels = model_labels(name, model);
                labels.extend([("block_size", &size[..]), (many, &blocks)]);
                told(&labels, 1.0);
            }
        }
        Read::Adapters => {
            for (model, _) in models {
                let mut labels = model_labels(name, model);
                labels.extend(ADAPTERS.iter().zip(["0", "", ""]).map(|(k, v)| (*k, v)));
                told(&labels, 0.0);
            }
        }
        Read::Worker(value) => {
            for worker in &seen.workers {
                told(&worker_labels(worker), value(worker));
            }
        }
        Read::Device(value) => {
            for device in &seen.devices {
                if let Some(value) = value(&device.gauge) {
                    told(&device.labels(name), value);
                }
            }
        }
        Read::Faults => {
            for device in &seen.devices {
                for (code, count) in &device.faults {
                    let code = code.to_string();
                    let mut labels = device.labels(name);
                    labels.push(("code", &code));
                    told(&labels, *count as f64);
                }
            }
        }
        Read::Memory => {
            for worker in &seen.workers {
                let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
                for part in &worker.memory {
                    let sum = kinds.entry(&part.kind).or_default();
                    *sum = sum.saturating_add(part.bytes);
                }
                for (kind, bytes) in kinds {
                    let mut labels = worker_labels(worker).to_vec();
                    labels.push(("kind", kind));
                    told(&labels, bytes as f64);
                }
            }
        }
    }
}

fn worker_labels(worker: &WorkerInfo) -> [(&str, &str); 2] {
    let device = worker.lease.as_ref().map_or("", |l| l.device.as_str());
    [("worker", &worker.id), ("device", device)]
}
