//! `hotcell token`: bearer tokens for the file of a scheduler.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueEnum};
use hotcell_proto::token;
use serde_json::json;

use super::{
    exit::Failure,
    ui::{DIM, Ui},
};

/// `hotcell token`.
#[derive(Args, Clone, Debug)]
pub struct TokenFlags {
    /// What to do.
    #[command(subcommand)]
    pub what: TokenCommand,
}

/// What can be done with tokens.
#[derive(Clone, Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a token, and the lines for the scheduler's file
    New(NewTokenFlags),
}

/// A role, as the scheduler's table knows it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum TokenRole {
    /// Generate tokens, compute with tensors, list what there is.
    Use,
    /// Load and unload models.
    Load,
    /// Crash reports, events, and looking into workers.
    Debug,
    /// All of it, and what operators do.
    Admin,
}

/// `hotcell token new`.
#[derive(Args, Clone, Debug)]
pub struct NewTokenFlags {
    /// Its name: letters, digits, - and _
    pub name: String,
    /// What its owner may do; may be given several times
    #[arg(long, value_enum, value_name = "ROLE", default_value = "use")]
    pub role: Vec<TokenRole>,
    /// Whose limits, shares and cached prompts it has [default: the token's name]
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<String>,
    /// Days until it expires [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=36500))]
    pub days: Option<u64>,
}

pub(crate) fn token(ui: &mut Ui, flags: &TokenFlags) -> Result<(), Failure> {
    let TokenCommand::New(flags) = &flags.what;
    if let Some(tenant) = &flags.tenant {
        token::check_tenant(tenant)?;
    }
    let (token, kept) = token::make(&flags.name)?;
    let roles: Vec<String> = flags
        .role
        .iter()
        .filter_map(|role| Some(role.to_possible_value()?.get_name().to_owned()))
        .collect();
    // What JSON writes of a text, TOML reads as the same.
    let mut lines = format!(
        "[tokens.{}]\nhash = \"{kept}\"\nroles = {}\n",
        flags.name,
        json!(roles)
    );
    if let Some(tenant) = &flags.tenant {
        lines.push_str(&format!("tenant = {}\n", json!(tenant)));
    }
    if let Some(days) = flags.days {
        let at = SystemTime::now() + Duration::from_secs(days * 86_400);
        let at = at.duration_since(UNIX_EPOCH).map_or(0, |s| s.as_secs());
        lines.push_str(&format!("expires = \"{}\"\n", token::write_time(at)));
    }
    if ui.manner.json {
        return ui.print_json(&json!({ "token": token, "lines": lines }));
    }
    ui.note(
        DIM,
        "the token, which is kept nowhere, and the lines for the scheduler's --tokens FILE:",
    );
    ui.print(&format!("{token}\n\n{lines}"))
}
