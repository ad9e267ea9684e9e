//! `hotcell debug rerun`: what is left of a capture, computed again.

use std::path::PathBuf;

use clap::Args;
use hotcell_proto::error::{Error, Reason};
use serde_json::json;

use super::{lab::dies, view};
use crate::{
    cli::{
        GlobalFlags,
        debug::{
            compare::invalid,
            sides::{Side, SideFlags},
        },
        exit::Failure,
        interrupt::Interrupt,
        ui::{Ui, one_line},
    },
    debug::{Fault, Reduced},
    local::Bundled,
    tensor::Comparison,
};

/// `hotcell debug rerun`.
#[derive(Args, Clone, Debug)]
pub struct RerunFlags {
    /// A file that `hotcell debug reduce` wrote
    pub file: PathBuf,
    /// Where it is computed.
    #[command(flatten)]
    pub sides: SideFlags,
    /// Print it as a Rust test instead
    #[arg(long)]
    pub test: bool,
}

pub(in crate::cli::debug) async fn rerun(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &RerunFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let reduced = Reduced::read(&flags.file)?;
    if flags.test {
        return ui.print_text(&reduced.test()?);
    }
    if flags.sides.count() > 1 {
        return Err(Failure::Usage("it is computed on one side".to_owned()));
    }
    if reduced.fault == Fault::Dies && !flags.sides.is_private(0) {
        let what = "a worker died over it: give it a scheduler of its own, with --program, --model-path or --kv-cache";
        return Err(Failure::Usage(what.to_owned()));
    }
    let computed = async {
        let side = Side::prepare(ui, global, (&flags.sides, 0), None, bundled).await?;
        if reduced.fault == Fault::Dies {
            return Ok::<_, Failure>((dies(side, &reduced.case).await?, None));
        }
        let session = side.tensors().await?;
        let results = session.run(&reduced.case.graph, &reduced.case.inputs).await;
        drop(session);
        side.end().await;
        let found = results?.into_iter().next();
        let found = found.ok_or_else(|| invalid("nothing came of it"))?;
        let expected = reduced.expected.as_ref();
        let apart = expected.map(|expected| Comparison::of(&found, expected));
        Ok((reduced.fault.is_in(&found, expected)?, apart.transpose()?))
    };
    let (fails, apart) = tokio::select! {
        done = computed => done?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    };
    if ui.manner.json {
        let mut view = view(&reduced);
        view["fails"] = json!(fails);
        view["nmse"] = json!(apart.as_ref().map(|apart| apart.nmse));
        ui.print_json(&view)?;
    }
    let far = apart.map_or_else(String::new, |apart| {
        format!(
            " (NMSE {:.3e}, by {:.3e} at most)",
            apart.nmse, apart.max_abs
        )
    });
    let (what, how) = (reduced.words(), reduced.fault.words());
    if fails {
        let text = format!("it still fails: {what} {how}{far}");
        let error = Error::new(Reason::ChecksumMismatch, one_line(&text));
        return Err(Failure::Differs(error.with("node", &reduced.origin.node)));
    }
    match ui.manner.json {
        true => Ok(()),
        false => {
            let text = format!("it does not fail here: {what}{far}");
            ui.print(&format!("{}\n", one_line(&text)))
        }
    }
}
