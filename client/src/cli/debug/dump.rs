//! `hotcell debug dump`: the values of a capture's rows as text.

use std::path::PathBuf;

use clap::Args;
use hotcell_graph::{DType, Shape, TensorSpec};
use hotcell_proto::{
    error::{Error, Reason},
    v1::{CapturedNode, NodeValues},
};
use serde_json::json;

use super::told::{named, row_view};
use crate::{
    cli::{
        exit::Failure,
        ui::{Ui, one_line},
    },
    debug::Recording,
    tensor::{DumpOptions, HostTensor},
};

/// How values are written.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "How values are written")]
pub struct DumpStyle {
    /// Rows of up to so many values are written whole
    #[arg(long, value_name = "N", default_value_t = DumpOptions::default().threshold)]
    pub items: usize,
    /// Of longer ones, so many at each end of an axis
    #[arg(long, value_name = "N", default_value_t = DumpOptions::default().edge_items)]
    pub edge_items: usize,
    /// Digits after the point
    #[arg(long, value_name = "N", default_value_t = DumpOptions::default().precision)]
    pub precision: usize,
}

/// Digits that an f64 has at most.
const MAX_PRECISION: usize = 17;

impl DumpStyle {
    fn options(self) -> DumpOptions {
        DumpOptions {
            precision: self.precision.min(MAX_PRECISION),
            threshold: self.items,
            edge_items: self.edge_items,
        }
    }
}

/// `hotcell debug dump`.
#[derive(Args, Clone, Debug)]
pub struct DumpFlags {
    /// A file that `hotcell debug capture --values` or `hotcell debug replay --values -o` wrote
    pub file: PathBuf,
    /// The token of the answer [default: all]
    #[arg(short, long, value_name = "TOKEN")]
    pub token: Option<u64>,
    /// Nodes whose name, op or weight is this or contains it; may be given several times [default: all]
    #[arg(long = "node", value_name = "TEXT")]
    pub nodes: Vec<String>,
    /// How values are written.
    #[command(flatten)]
    pub style: DumpStyle,
}

/// The values of a row as text; none if they are not there.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a row that is none of the node's.
pub(super) fn text(
    node: &CapturedNode,
    row: &NodeValues,
    style: DumpStyle,
) -> Result<Option<String>, Error> {
    let odd = || {
        let what = format!("the row of {} is none of its dtype and shape", node.name);
        Error::new(Reason::InvalidArgument, what)
    };
    let dtype = DType::from_name(&node.dtype).ok_or_else(odd)?;
    let count = row.data.len() / dtype.block_bytes();
    let whole = node
        .dims
        .iter()
        .try_fold(1u64, |n, dim| n.checked_mul(*dim));
    if row.data.is_empty() && whole != Some(0) {
        return Ok(None);
    }
    // Of a row that was cut short the axes are not known.
    let dims: Vec<usize> = match whole == Some(count as u64) {
        true => (node.dims.iter())
            .map(|dim| usize::try_from(*dim).map_err(|_| odd()))
            .collect::<Result<_, _>>()?,
        false => vec![count],
    };
    let shape = Shape::fixed(&dims).map_err(|_| odd())?;
    let spec = TensorSpec::new(dtype, shape).map_err(|_| odd())?;
    let values = HostTensor::new(spec, row.data.clone())?;
    Ok(Some(values.dump(style.options())?))
}

pub(super) fn dump(ui: &mut Ui, flags: &DumpFlags) -> Result<(), Failure> {
    let recording = Recording::read(&flags.file)?;
    let is_meant = |node: &CapturedNode| {
        let names = [&node.name, &node.op, &node.weight];
        let has = |part: &String| names.iter().any(|name| name.contains(part.as_str()));
        flags.nodes.is_empty() || flags.nodes.iter().any(has)
    };
    let mut shown = 0;
    let tokens = recording.tokens.iter();
    for token in tokens.filter(|t| flags.token.is_none_or(|wanted| t.index == wanted)) {
        for (node, row) in recording.head.nodes.iter().zip(&token.nodes) {
            if !is_meant(node) {
                continue;
            }
            let Some(values) = text(node, row, flags.style)? else {
                continue;
            };
            shown += 1;
            if ui.manner.json {
                let mut view = row_view(node, row);
                view["token"] = json!(token.index);
                view["values"] = json!(values);
                ui.print_json(&view)?;
                continue;
            }
            let dims: Vec<String> = node.dims.iter().map(u64::to_string).collect();
            let head = format!(
                "token {}, {}: {}[{}]",
                token.index,
                named(node),
                node.dtype,
                dims.join(", ")
            );
            ui.print_text(&format!("{}\n{values}\n", one_line(&head)))?;
        }
    }
    if shown > 0 {
        return Ok(());
    }
    let what = "the capture has no values of such nodes and tokens; capture with --values all, and see its nodes with `hotcell debug replay --show`";
    Err(Error::new(Reason::InvalidArgument, what).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_axes_unless_they_were_cut_short() {
        let node = CapturedNode {
            name: "layers.0.rope.0".into(),
            dtype: "f32".into(),
            dims: vec![2, 2],
            ..CapturedNode::default()
        };
        let style = DumpStyle {
            items: 1000,
            edge_items: 3,
            precision: 1,
        };
        let row = |values: &[f32]| NodeValues {
            data: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            ..NodeValues::default()
        };
        let dumped = |values: &[f32], style| text(&node, &row(values), style).unwrap();
        let whole = dumped(&[1.0, -2.0, 3.0, 4.0], style);
        assert_eq!(whole.unwrap(), "[[ 1.0, -2.0],\n [ 3.0,  4.0]]");
        assert_eq!(dumped(&[1.0, -2.0], style).unwrap(), "[ 1.0, -2.0]");
        assert_eq!(dumped(&[], style), None);
        let edges = DumpStyle {
            items: 2,
            edge_items: 1,
            ..style
        };
        assert_eq!(
            dumped(&[1.0, 2.0, 3.0], edges).unwrap(),
            "[ 1.0, ...,  3.0]"
        );
        let strange = CapturedNode {
            dtype: "rubbish".into(),
            ..node.clone()
        };
        assert!(text(&strange, &row(&[1.0]), style).is_err());
    }
}
