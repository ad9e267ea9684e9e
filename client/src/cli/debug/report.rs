//! A comparison as one HTML file: nothing in it runs, and nothing of it lies elsewhere.

use std::fmt::Write as _;

use super::told::named;
use crate::debug::{Bisected, Likeness, NodeLikeness, Ulps};

/// Where plots lie, and how large they are.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 220.0;
/// What is drawn for equal bits: no logarithm is of 0.
const FLOOR: f64 = 1e-18;

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1a1c20;--page:#fff;--dim:#565b66;--line:#c9ccd3;--one:#1b5fb8;--bad:#a8161c}\
@media(prefers-color-scheme:dark){:root{--text:#e7e9ee;--page:#14161a;--dim:#a9afbb;--line:#3a3f49;--one:#7db4ff;--bad:#ff8a8a}}\
body{background:var(--page);color:var(--text);font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:1.5rem auto;padding:0 1rem}\
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
th,td{text-align:left;padding:.2rem .6rem .2rem 0;border-bottom:1px solid var(--line)}th{color:var(--dim)}\
svg{width:100%;height:auto;border:1px solid var(--line)}figcaption{color:var(--dim)}\
.bad{color:var(--bad);font-weight:600}rect,circle{fill:var(--one)}.beyond{fill:var(--bad)}\
line{stroke:var(--bad);stroke-width:1}text{fill:var(--dim);font-size:12px}";

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// The height of an error on a scale of decades from [`FLOOR`] to 1.
fn height(value: f64) -> f64 {
    let decades = -FLOOR.log10();
    let value = if value.is_finite() {
        value.clamp(FLOOR, 1.0)
    } else {
        1.0
    };
    let share = 1.0 + value.log10() / decades;
    HEIGHT - 20.0 - share * (HEIGHT - 40.0)
}

/// A point for each value: its words, its error, its bound, and whether it is beyond that.
fn points(title: &str, all: &[(String, f64, Option<f64>, bool)]) -> String {
    let mut svg = format!(
        "<figure><svg role=\"img\" aria-label=\"{title}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\">"
    );
    let step = (WIDTH - 80.0) / (all.len().max(1) as f64);
    for decade in [0, -6, -12, -18] {
        let y = height(10f64.powi(decade));
        let _ = write!(svg, "<text x=\"4\" y=\"{:.0}\">1e{decade}</text>", y + 4.0);
    }
    for (number, (name, error, bound, beyond)) in all.iter().enumerate() {
        let x = 60.0 + step * (number as f64 + 0.5);
        if let Some(bound) = bound {
            let y = height(*bound);
            let (from, to) = (x - step / 2.0, x + step / 2.0);
            let _ = write!(
                svg,
                "<line x1=\"{from:.1}\" y1=\"{y:.1}\" x2=\"{to:.1}\" y2=\"{y:.1}\"/>"
            );
        }
        let (y, kind) = (height(*error), if *beyond { "beyond" } else { "" });
        let _ = write!(
            svg,
            "<circle class=\"{kind}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"><title>{}: {error:.3e}</title></circle>",
            escaped(name)
        );
    }
    let _ = write!(svg, "</svg><figcaption>{title}</figcaption></figure>");
    svg
}

/// A bar for each bucket.
fn bars(title: &str, all: &[(String, u64)]) -> String {
    let mut svg = format!(
        "<figure><svg role=\"img\" aria-label=\"{title}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\">"
    );
    let most = all
        .iter()
        .map(|(_, count)| *count)
        .max()
        .unwrap_or(0)
        .max(1);
    let step = (WIDTH - 20.0) / (all.len().max(1) as f64);
    for (number, (name, count)) in all.iter().enumerate() {
        // By the logarithm: one value in a million is to be seen.
        let share = (*count as f64 + 1.0).ln() / (most as f64 + 1.0).ln();
        let (x, tall) = (10.0 + step * number as f64, share * (HEIGHT - 50.0));
        let _ = write!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{tall:.1}\"><title>{}: {count}</title></rect><text x=\"{x:.1}\" y=\"{:.0}\">{}</text>",
            HEIGHT - 24.0 - tall,
            (step - 4.0).max(1.0),
            escaped(name),
            HEIGHT - 8.0,
            escaped(name)
        );
    }
    let _ = write!(svg, "</svg><figcaption>{title}</figcaption></figure>");
    svg
}

fn row(node: &NodeLikeness) -> String {
    let cell = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |v| format!("{v:.3e}"));
    let worst = node.worst.as_ref();
    let kind = if node.beyond > 0 {
        " class=\"bad\""
    } else {
        ""
    };
    format!(
        "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.0e}</td><td{kind}>{}</td></tr>",
        escaped(&named(&node.node)),
        node.rows,
        node.same,
        worst.map_or_else(|| "–".to_owned(), |w| format!("{:.9}", w.cosine)),
        cell(worst.map(|w| w.max_abs)),
        cell(worst.map(|w| w.max_rel)),
        cell(worst.map(|w| w.nmse)),
        node.tolerance,
        node.beyond,
    )
}

/// The whole file.
pub(super) fn page(
    labels: &[String; 2],
    bisected: Option<&Bisected>,
    likeness: &Likeness,
) -> String {
    let [one, two] = labels.each_ref().map(|label| escaped(label));
    let verdict = match likeness.first_beyond() {
        Some((token, node)) => format!(
            "<p class=\"bad\">Token {token}, node {} is the first beyond its bound.</p>",
            escaped(&named(&node.node))
        ),
        None if likeness.same() == likeness.rows() => "<p>Every bit is the same.</p>".to_owned(),
        None if likeness.unknown() > 0 => {
            "<p class=\"bad\">Rows differ, and nothing tells how far.</p>".to_owned()
        }
        None => "<p>Every row is within its bound.</p>".to_owned(),
    };
    let found = match bisected {
        Some(Bisected {
            first: Some(first),
            looks,
        }) => {
            format!("<p>By {looks} looks, token {first} is the first that differs.</p>")
        }
        _ => String::new(),
    };
    let nodes = likeness.nodes.iter().map(|node| {
        let error = node.worst.as_ref().map_or(0.0, |worst| worst.nmse);
        (
            named(&node.node),
            error,
            Some(node.tolerance),
            node.beyond > 0,
        )
    });
    let nodes: Vec<_> = nodes.collect();
    let tokens = likeness.by_token.iter();
    let tokens: Vec<_> = tokens
        .map(|(token, worst)| (format!("token {token}"), *worst, None, worst.is_infinite()))
        .collect();
    let mut ulps = Ulps::default();
    for node in &likeness.nodes {
        for (bits, count) in node.ulps.counts.iter().enumerate() {
            if ulps.counts.len() <= bits {
                ulps.counts.resize(bits + 1, 0);
            }
            if let Some(all) = ulps.counts.get_mut(bits) {
                *all += count;
            }
        }
        ulps.strange += node.ulps.strange;
    }
    let mut bucketed: Vec<_> = ulps
        .counts
        .iter()
        .enumerate()
        .map(|(bits, count)| (Ulps::range(bits), *count))
        .collect();
    if ulps.strange > 0 {
        bucketed.push(("no number".to_owned(), ulps.strange));
    }
    let rows: String = likeness.nodes.iter().map(row).collect();
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta http-equiv=\"content-security-policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>{one} and {two}</title><style>{STYLE}</style>\
         <h1>{one}, compared with {two}</h1>{found}{verdict}\
         <p>{} rows of {} tokens; {} have the same bits.</p>{}{}{}\
         <table><thead><tr><th scope=\"col\">Node</th><th scope=\"col\">Rows</th><th scope=\"col\">Same</th><th scope=\"col\">Cosine</th>\
         <th scope=\"col\">Max abs</th><th scope=\"col\">Max rel</th><th scope=\"col\">NMSE</th><th scope=\"col\">Bound</th><th scope=\"col\">Beyond</th></tr></thead>\
         <tbody>{rows}</tbody></table></html>\n",
        likeness.rows(),
        likeness.tokens,
        likeness.same(),
        points(
            "Worst normalised mean square error of each node, in the order of computing; lines are the ops' bounds",
            &nodes
        ),
        points("Worst normalised mean square error of each token", &tokens),
        bars(
            "Values by how many numbers of their dtype lie between the two sides",
            &bucketed
        ),
    )
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1;

    use super::*;
    use crate::debug::{Recorded, Recording, liken};

    #[test]
    fn a_report_runs_nothing_and_names_the_node() {
        let recording = |value: f32| Recording {
            head: v1::CaptureHead {
                nodes: vec![v1::CapturedNode {
                    name: "<script>alert(1)</script>".into(),
                    op: "add".into(),
                    dtype: "f32".into(),
                    dims: vec![1],
                    place: Some(0),
                    ..v1::CapturedNode::default()
                }],
                ..v1::CaptureHead::default()
            },
            tokens: vec![Recorded {
                nodes: vec![v1::NodeValues {
                    hash: value.to_le_bytes().to_vec(),
                    data: value.to_le_bytes().to_vec(),
                    ..v1::NodeValues::default()
                }],
                ..Recorded::default()
            }],
            ..Recording::default()
        };
        let likeness = liken(&recording(1.5), &recording(1.0), 1.0);
        let labels = ["a & b".to_owned(), "\u{1b}c".to_owned()];
        let text = page(&labels, None, &likeness);
        assert!(
            text.contains("&lt;script&gt;") && !text.contains("<script"),
            "{text}"
        );
        assert!(text.contains("a &amp; b") && !text.contains('\u{1b}'));
        assert!(text.contains("first beyond its bound") && text.contains("class=\"beyond\""));
        assert!(!text.contains("http://") && !text.contains("https://"));
        let same = page(&labels, None, &liken(&recording(1.0), &recording(1.0), 1.0));
        assert!(same.contains("Every bit is the same"));
    }
}
