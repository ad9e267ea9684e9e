//! How `deploy/mlx-linux/setup` ends where the wheel cannot be had, or is another one than was pinned.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
};

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The set-up with a folder in the index's place, and a cache of its own or the user's.
fn setup(index: Option<&Path>) -> Command {
    let mut command = Command::new(here().join("../../deploy/mlx-linux/setup"));
    command.stdin(Stdio::null());
    if let Some(index) = index {
        command
            .env("XDG_CACHE_HOME", index)
            .env("PIP_NO_INDEX", "1")
            .env("PIP_FIND_LINKS", index);
    }
    command
}

/// Its code, and what it said.
fn end(output: &Output) -> (Option<i32>, String) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

fn config() -> PathBuf {
    here().join(".cargo/linux.toml")
}

/// What would be left of a failure: whatever lies in the cache.
fn kept(index: &Path) -> Vec<String> {
    let inside = fs::read_dir(index.join("hotcell/mlx-linux")).unwrap();
    let names = inside.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != ".lock").collect()
}

#[test]
fn a_wheel_that_cannot_be_had_is_a_reason_to_do_without() {
    let index = tempfile::tempdir().unwrap();
    let before = fs::read(config()).unwrap();
    let (code, said) = end(&setup(Some(index.path())).output().unwrap());
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("cannot be had"), "{said}");
    assert_eq!(kept(index.path()), Vec::<String>::new());
    assert_eq!(fs::read(config()).unwrap(), before);
}

#[test]
fn a_wheel_that_is_not_the_pinned_one_is_refused_and_no_reason_to_do_without() {
    let index = tempfile::tempdir().unwrap();
    // A sound wheel of that name and version, by somebody else.
    let make = r#"
import sys, zipfile
name = "mlx_cpu-0.32.2"
with zipfile.ZipFile(f"{sys.argv[1]}/{name}-py3-none-any.whl", "w") as wheel:
    wheel.writestr("mlx/lib/libmlx.so", b"not MLX")
    about = f"{name}.dist-info"
    wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: mlx-cpu\nVersion: 0.32.2\n")
    wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{about}/RECORD", "")
"#;
    let made = Command::new("python3")
        .args(["-c", make])
        .arg(index.path())
        .status()
        .unwrap();
    assert!(made.success());
    let before = fs::read(config()).unwrap();
    let (code, said) = end(&setup(Some(index.path())).output().unwrap());
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("does not name"), "{said}");
    assert_eq!(kept(index.path()), Vec::<String>::new());
    assert_eq!(fs::read(config()).unwrap(), before);
}

#[test]
fn it_changes_nothing_the_second_time_also_not_four_at_once() {
    let before = fs::metadata(config()).unwrap().modified().unwrap();
    let all: Vec<_> = (0..4)
        .map(|_| thread::spawn(|| setup(None).output().unwrap()))
        .collect();
    for one in all {
        let (code, said) = end(&one.join().unwrap());
        assert_eq!(code, Some(0), "{said}");
    }
    let after = fs::metadata(config()).unwrap().modified().unwrap();
    assert_eq!(before, after);
}
