//! Alone in its process, since it changes the environment.

use clap::Parser;
use hotcell_scheduler::config::{Cli, Config, Surroundings, parse_file};

#[test]
fn flags_go_over_the_environment_and_the_environment_over_the_file() {
    // SAFETY: the only test of this process, before any other thread reads the environment.
    unsafe {
        std::env::set_var("HOTCELL_RESTART_BUDGET", "7");
        std::env::set_var("HOTCELL_LOG", "debug");
        std::env::set_var("HOTCELL_MODELS", "a=/m/a,b=/m/b");
    }
    let file = "restart_budget = 5\nlog = \"warn\"\ndrain_timeout = 3\nmodels = { c = \"/c\" }\n";
    let around = Surroundings {
        executable: Some("/opt/hotcell-scheduler".into()),
        ..Surroundings::default()
    };
    let cli = Cli::try_parse_from(["hotcell-scheduler", "--restart-budget", "9"]).unwrap();
    let file = parse_file("x.toml".as_ref(), file).unwrap();
    let config = Config::resolve(cli, file, &around).unwrap();
    assert_eq!(config.restart.budget, 9);
    assert_eq!(config.log, "debug");
    assert_eq!(config.timeouts.drain.as_secs(), 3);
    assert_eq!(config.models.len(), 2);
}
