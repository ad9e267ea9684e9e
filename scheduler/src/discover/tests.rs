//! Of probes and their reports, by shell scripts in the programs' places.

use proptest::prelude::*;

use super::*;

const GOOD: &str = r#"{"protocol":1,"devices":[{"id":"cpu:0","backend":"cpu","description":"a\nb","memory_bytes":8,
    "cores":[0,1,2],"path":"avx512","pci_id":"0000:01\n","integrated":true,"driver":"13.0"}]}"#;

#[test]
fn a_report_becomes_devices() {
    let devices = parse(GOOD.as_bytes()).unwrap().devices;
    assert_eq!(devices[0].id, "cpu:0");
    assert_eq!(devices[0].description, "a b");
    assert_eq!(devices[0].pci_id, "0000:01 ");
    assert_eq!(devices[0].driver, "13.0");
    assert!(devices[0].integrated);
}

#[test]
fn a_host_confines_only_if_the_probe_says_that_nothing_is_missing() {
    let host = |layers: &str| {
        let words = GOOD.strip_suffix('}').unwrap();
        parse(format!("{words},\"confinement\":{layers}}}").as_bytes()).unwrap()
    };
    let layer = |name, state| format!(r#"{{"layer":"{name}","state":"{state}","detail":"why"}}"#);
    let sound = layer("seccomp", "LAYER_STATE_IN_FORCE");
    let spare = layer("user", "LAYER_STATE_NOT_NEEDED");
    assert_eq!(host(&format!("[{sound},{spare}]")).unconfined(), None);
    for state in ["LAYER_STATE_MISSING", "LAYER_STATE_OF_TOMORROW"] {
        let lacks = host(&format!("[{sound},{}]", layer("landlock", state)));
        assert_eq!(lacks.unconfined().unwrap(), "without landlock (why)");
    }
    assert!(host("[]").unconfined().is_some());
    let many = vec![sound; 2 * limits::MAX_LAYERS].join(",");
    assert_eq!(
        host(&format!("[{many}]")).confinement.len(),
        limits::MAX_LAYERS
    );
}

#[test]
fn devices_share_the_cores() {
    let cores = |n| -> Vec<Vec<u32>> {
        let found = parse(GOOD.as_bytes()).unwrap().devices;
        let chosen = choose(found, DeviceChoice::Cpu(n));
        chosen.into_iter().map(|d| d.cores).collect()
    };
    assert_eq!(cores(1), [vec![0, 1, 2]]);
    assert_eq!(cores(2), [vec![0], vec![1, 2]]);
    assert_eq!(cores(4), [vec![0], vec![1], vec![2], vec![0]]);
    let found = parse(GOOD.as_bytes()).unwrap().devices;
    assert_eq!(choose(found.clone(), DeviceChoice::Auto), found);
}

#[test]
fn a_report_that_cannot_be_believed_is_refused() {
    for bad in ["", "{}", "[1]", r#"{"devices":[]}"#, r#"{"protocol":1}"#] {
        assert!(parse(bad.as_bytes()).is_err(), "{bad}");
    }
    for devices in [
        r#"{"id":"../x","backend":"cpu"}"#,
        r#"{"id":"../x:0","backend":"../x"}"#,
        r#"{"id":"cpu","backend":"cpu"}"#,
        r#"{"id":"cpu:","backend":"cpu"}"#,
        r#"{"id":"cpu:0x","backend":"cpu"}"#,
        r#"{"id":"cpu:0","backend":"mlx"}"#,
        r#"{"id":":0","backend":""}"#,
        r#"{"id":"cpu:0","backend":"cpu"},{"id":"cpu:0","backend":"cpu"}"#,
    ] {
        let report =
            |devices| format!(r#"{{"protocol":{PROTOCOL_VERSION},"devices":[{devices}]}}"#);
        assert!(parse(report(devices).as_bytes()).is_err(), "{devices}");
        let sound = report(r#"{"id":"cpu:0","backend":"cpu"}"#);
        assert!(parse(sound.as_bytes()).is_ok());
    }
}

/// Workers of a program.
pub(super) fn worker_of(binary: impl Into<std::path::PathBuf>) -> WorkerConfig {
    WorkerConfig {
        binary: binary.into(),
        kv_cache: Default::default(),
        model_memory: None,
        log: "info",
        require_confinement: false,
        pin: false,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        memory: None,
    }
}

#[test]
fn a_program_of_another_version_is_called_that_whatever_else_it_prints() {
    let error = parse(br#"{"protocol":77,"version":"9.8.7\u001b","devices":"elsewhere"}"#);
    let error = error.unwrap_err();
    assert!(
        error.contains("9.8.7 ") && error.contains("protocol 77"),
        "{error}"
    );
}

#[tokio::test]
async fn a_probe_that_fails_or_hangs_is_a_problem_and_nothing_more() {
    let spawner = Spawner::start().unwrap();
    let problem = async |program: &str, ms| {
        let found = probe(&spawner, &worker_of(program), Duration::from_millis(ms)).await;
        found.devices[0].problem.clone()
    };
    let gone = problem("/no/such/program", 1000).await;
    assert!(gone.contains("program: cannot be started"), "{gone}");
    assert!(problem("/bin/false", 5000).await.contains("exit code 1"));
    assert!(problem("/bin/echo", 5000).await.contains("believed"));
    let dir = tempfile::tempdir().unwrap();
    let hangs = dir.path().join("hangs");
    script(&hangs, "exec sleep 100");
    assert!(
        problem(hangs.to_str().unwrap(), 50)
            .await
            .contains("longer")
    );
}

/// Makes a program of a shell's lines.
fn script(path: &Path, lines: &str) {
    std::fs::write(path, format!("#!/bin/sh\n{lines}\n")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path, mode).unwrap();
}

#[tokio::test]
async fn a_backend_with_a_program_of_its_own_is_looked_for_beside_the_others() {
    let spawner = Spawner::start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let worker = worker_of(dir.path().join("hotcell-worker"));
    let begin = |choice, known: &[Device]| {
        Search::begin(&spawner, &worker, choice, Duration::from_secs(5), known)
    };
    let whole = parse(GOOD.as_bytes()).unwrap().devices;
    let listed = |search: &Search| {
        let mut devices = whole.clone();
        search.list(&mut devices);
        devices
    };
    // Not installed: nothing is missed.
    let mut search = begin(DeviceChoice::Auto, &[]);
    assert_eq!(listed(&search), whole);
    assert!(search.next().await.is_none());
    let apart = worker.apart("mlx");
    let mlx = r#"{"id":"mlx:0","backend":"mlx"}"#;
    let report = |devices: &str| format!(r#"{{"protocol":1,"devices":[{devices}]}}"#);
    script(&apart, &format!("echo '{}'", report(mlx)));
    let mut search = begin(DeviceChoice::Auto, &[]);
    let mut devices = listed(&search);
    assert_eq!(devices[1].id, "mlx:0");
    assert!(devices[1].problem.contains("not said yet"), "{devices:?}");
    let (before, usable) = search.next().await.unwrap().settle(&mut devices);
    assert_eq!((before, usable.as_slice()), (1, &devices[1..]));
    assert_eq!(devices[1].problem, "");
    // Whose program is remembered.
    assert_eq!(worker.program(&devices[0]), worker.binary);
    assert_eq!(worker.program(&devices[1]), apart);
    assert!(search.next().await.is_none());
    // A device that serves is not looked for again, one that does not is.
    assert!(begin(DeviceChoice::Auto, &devices).next().await.is_none());
    devices[1].problem = "broken".to_owned();
    assert!(begin(DeviceChoice::Auto, &devices).next().await.is_some());
    // Who asks for CPU devices gets those.
    assert!(begin(DeviceChoice::Cpu(1), &[]).next().await.is_none());
    // It speaks for no backend but its own.
    let both = report(&format!(r#"{mlx},{{"id":"cpu:7","backend":"cpu"}}"#));
    script(&apart, &format!("echo '{both}'"));
    let found = begin(DeviceChoice::Auto, &[]).next().await.unwrap();
    assert_eq!(found.devices.len(), 1);
    let said = &found.devices[0].problem;
    assert!(
        said.starts_with("hotcell-worker-mlx: it claims cpu:7"),
        "{said}"
    );
}

#[test]
fn a_devices_program_is_one_of_ours_whatever_it_says() {
    let worker = worker_of("/opt/bin/hotcell-worker");
    for program in [
        "",
        "../../tmp/x",
        "/tmp/x",
        "sh",
        "hotcell-worker-mlx/../sh",
    ] {
        let device = broken("mlx", program, "");
        assert_eq!(worker.program(&device), worker.binary, "{program}");
    }
}

proptest! {
    #[test]
    fn no_report_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn clipped_words_are_bounded(word in ".{0,400}") {
        prop_assert!(clip(&word).len() <= limits::MAX_WORD);
    }
}
