//! `embed`: texts in, vectors out.

use clap::Args;
use hotcell_proto::{limits, v1};
use serde_json::json;

use super::{GlobalFlags, exit::Failure, session::Session, ui::Ui};
use crate::{text::EmbedOptions, tokens::Prompt};

/// `hotcell embed`.
#[derive(Args, Clone, Debug)]
pub struct EmbedFlags {
    /// The texts; each line of standard input is one if there are none
    pub texts: Vec<String>,
    /// Name of a loaded model [default: the scheduler's default]
    #[arg(
        short,
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub model: String,
    /// The mean of all tokens' states instead of the last token's, which has seen all of the text
    #[arg(long)]
    pub mean: bool,
    /// Leave the vectors as long as they are instead of making their length 1
    #[arg(long)]
    pub unnormalized: bool,
}

pub(crate) async fn embed(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &EmbedFlags,
) -> Result<(), Failure> {
    let texts = match flags.texts.as_slice() {
        [] if ui.in_terminal => {
            let what = "there is no text; give one in quotes, or pipe lines in";
            return Err(Failure::Usage(what.to_owned()));
        }
        [] => ui.read_all()?.lines().map(str::to_owned).collect(),
        texts => texts.to_vec(),
    };
    let options = EmbedOptions {
        model: flags.model.clone(),
        mean: flags.mean,
        unnormalized: flags.unnormalized,
        ..EmbedOptions::default()
    };
    if texts.is_empty() {
        let what = "there is no text on standard input";
        return Err(Failure::Usage(what.to_owned()));
    }
    let session = Session::running(global).await?;
    let mut answer = v1::EmbedResponse::default();
    // As many at a time as one request may have.
    for texts in texts.chunks(limits::MAX_EMBED_PROMPTS) {
        let prompts = texts.iter().cloned().map(Prompt::Text);
        let part = session.client.embed(prompts, options.clone()).await?;
        answer.model = part.model;
        answer.embeddings.extend(part.embeddings);
    }
    if ui.manner.json {
        let of =
            |e: &v1::Embedding| json!({ "values": e.values, "prompt_tokens": e.prompt_tokens });
        let embeddings: Vec<_> = answer.embeddings.iter().map(of).collect();
        return ui.print_json(&json!({ "model": answer.model, "embeddings": embeddings }));
    }
    for embedding in &answer.embeddings {
        let values: Vec<String> = embedding.values.iter().map(f32::to_string).collect();
        ui.print(&format!("{}\n", values.join(" ")))?;
    }
    Ok(())
}
