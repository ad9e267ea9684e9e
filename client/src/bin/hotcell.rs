//! The `hotcell` command. Everything but the bundled model's bytes is in the library.

#[path = "../bundled.rs"]
mod bundled;

fn main() -> std::process::ExitCode {
    hotcell_client::cli::main(bundled::KJV)
}
