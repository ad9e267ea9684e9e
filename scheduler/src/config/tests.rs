//! What becomes of settings out of flags, environment and files.

use clap::CommandFactory;

use super::*;

fn around() -> Surroundings {
    Surroundings {
        runtime_dir: Some("/run/user/1".into()),
        uid: 1,
        executable: Some("/opt/hotcell-scheduler".into()),
        ..Surroundings::default()
    }
}

fn resolve(flags: &[&str], file: &str) -> Result<Config, Failure> {
    let cli = Cli::try_parse_from([&["hotcell-scheduler"], flags].concat())
        .map_err(|e| usage(e.to_string()))?;
    Config::resolve(cli, parse_file(Path::new("x.toml"), file)?, &around())
}

#[test]
fn every_key_has_a_flag_and_a_variable_of_its_name() {
    let command = Cli::command();
    for (key, env) in Settings::KEYS {
        assert_eq!(*env, format!("HOTCELL_{}", key.to_uppercase()));
        let flag = key.replace('_', "-");
        assert!(
            command.get_arguments().any(|a| a.get_long() == Some(&flag)),
            "{flag}"
        );
    }
    command.debug_assert();
}

#[test]
fn flags_go_over_the_file_and_the_file_over_defaults() {
    let file = "restart_budget = 3\nprobe_timeout = \"250ms\"\nstart_timeout = 2\n[models]\na = \"/m/a\"\n";
    let config = resolve(&["--restart-budget", "4"], file).unwrap();
    assert_eq!(config.restart.budget, 4);
    assert_eq!(config.timeouts.probe, Duration::from_millis(250));
    assert_eq!(config.restart.start_timeout, Duration::from_secs(2));
    assert_eq!(config.timeouts.drain, Duration::from_secs(30));
    assert_eq!(
        config.socket.unwrap(),
        Path::new("/run/user/1/hotcell/hotcell.sock")
    );
    assert_eq!(config.worker.binary, Path::new("/opt/hotcell-worker"));
    assert_eq!(config.models.len(), 1);
    let config = resolve(&["--models", "b=/m/b,c=/m/c"], file).unwrap();
    let names: Vec<_> = config.models.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(names, ["b", "c"]);
}

#[test]
fn unknown_keys_and_senseless_values_are_errors_that_name_them() {
    for (file, word) in [
        ("sokcet = \"/x\"", "sokcet"),
        ("restart_budget = 0", "restart_budget"),
        ("probe_timeout = \"soon\"", "soon"),
        ("devices = \"gpu:two\"", "gpu:two"),
        ("kv_cache = \"f8\"", "f8"),
        ("[models]\n\"a b\" = \"/x\"", "a b"),
        ("tensor_parallel = 0", "from 1"),
        ("tensor_parallel = 2\npipeline_parallel = 2", "choose one"),
        ("drain_to = \"gpu-box\"", "gpu-box"),
        ("drain_to_token_file = \"/t\"", "--drain-to"),
        (
            "drain_to = \"http://box:1\"\ndrain_to_token_file = \"/t\"",
            "clear text",
        ),
        (
            "drain_to = \"http://box:1\"\ndrain_to_ca = \"/c\"",
            "no TLS",
        ),
    ] {
        let failure = resolve(&[], file).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message.contains(word), "{}", failure.message);
    }
}

#[test]
fn other_hosts_come_in_by_tls_and_only_if_they_show_who_they_are() {
    let tls = ["--tls-cert", "c", "--tls-key", "k"];
    let with = |address: &'static str, more: &[&'static str]| {
        resolve(&[&["--listen", address], more].concat(), "")
    };
    for address in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
        for (more, word) in [
            (&[][..], "--tls-cert"),
            (&["--tokens", "t"], "--tls-cert"),
            (&tls, "--tokens"),
            (&["--tls-cert", "c"], "--tls-key"),
        ] {
            let failure = with(address, more).unwrap_err();
            assert_eq!(failure.exit, Exit::Usage);
            assert!(failure.message.contains(word), "{}", failure.message);
        }
        for more in [["--tokens", "t"], ["--tls-client-ca", "a"]] {
            with(address, &[&tls[..], &more].concat()).unwrap();
        }
    }
    for address in ["127.0.0.1:1", "[::1]:1"] {
        with(address, &[]).unwrap();
        with(address, &tls).unwrap();
    }
    let alone = with("127.0.0.1:1", &["--tls-client-ca", "a"]).unwrap_err();
    assert!(alone.message.contains("--tls-cert"), "{}", alone.message);
}

#[test]
fn other_users_have_the_roles_they_are_given() {
    let config = resolve(&["--allow-uid", "1000,1001:use+load"], "").unwrap();
    let roles: Vec<_> = config
        .access
        .users
        .iter()
        .map(|(u, r)| (*u, r.to_string()))
        .collect();
    assert_eq!(
        roles,
        [(1000, "use".to_owned()), (1001, "use+load".to_owned())]
    );
    for wrong in ["me", "1:root", "1:"] {
        assert!(resolve(&["--allow-uid", wrong], "").is_err(), "{wrong}");
    }
}

#[test]
fn traces_go_to_whom_a_setting_names_and_else_to_whom_all_programs_tell() {
    let with = |flags: &[&str], collector: Option<&str>| {
        let cli = Cli::try_parse_from([&["hotcell-scheduler"], flags].concat()).unwrap();
        let around = Surroundings {
            collector: collector.map(str::to_owned),
            ..around()
        };
        let config = Config::resolve(cli, Settings::default(), &around)?;
        let told = |c: Collector| (c.endpoint.to_string(), c.sample);
        Ok::<_, Failure>(config.traces.map(told))
    };
    let others = Some("http://collector:4317");
    assert_eq!(with(&[], None).unwrap(), None);
    let (endpoint, sample) = with(&[], others).unwrap().unwrap();
    assert_eq!((&endpoint[..], sample), ("http://collector:4317/", 1.0));
    let flags = ["--otlp-endpoint=http://[::1]:9", "--otlp-sample=0.25"];
    let (endpoint, sample) = with(&flags, others).unwrap().unwrap();
    assert_eq!((&endpoint[..], sample), ("http://[::1]:9/", 0.25));
    let secret = with(&["--otlp-endpoint=https://collector:4317"], None);
    assert_eq!(secret.unwrap().unwrap().0, "https://collector:4317/");
    let flags = ["--otlp-endpoint=http://a:1", "--otlp-ca=/ca.pem"];
    let failure = with(&flags, None).unwrap_err();
    assert!(failure.message.contains("otlp_ca"), "{}", failure.message);
    let failure = with(&[], Some("ftp://collector")).unwrap_err();
    let word = "OTEL_EXPORTER_OTLP_ENDPOINT";
    assert!(failure.message.contains(word), "{}", failure.message);
    // What is about the host is not about a private one.
    assert_eq!(with(&["--private-fd=3"], others).unwrap(), None);
    let file = "otlp_endpoint = \"http://a:1\"\notlp_sample = 1\n";
    assert!(resolve(&[], file).unwrap().traces.is_some());
    for wrong in ["otlp_sample = 1.5", "otlp_endpoint = \"a:1\""] {
        assert!(resolve(&[], wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_private_scheduler_has_no_doors_and_no_models_of_the_host() {
    let file = "listen = \"127.0.0.1:1\"\ndefault_model = \"a\"\nmodels = { a = \"/m/a\" }\n";
    let config = resolve(&["--private-fd", "3"], file).unwrap();
    assert_eq!((config.socket, config.listen), (None, None));
    assert_eq!((config.models.len(), config.default_model), (0, None));
}
