//! What is no file, or not the one it was: links, devices, pipes, holes, and files that change while they are read.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, symlink},
        net::UnixListener,
    },
    path::Path,
};

use anyhow::Result;
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{
    Case, Class,
    Expect::{self, Either, Harmless, Refused},
    folder::{Folder, INDEX},
    gguf::valid,
};

fn pipe(path: &Path) -> Result<()> {
    Ok(mknodat(
        CWD,
        path,
        FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )?)
}

/// A valid folder in which something is done that takes more than bytes.
fn folder(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&Path) -> Result<()> + Send + Sync + 'static,
) -> Case {
    Case::new(Class::Files, name, expect, move |place| {
        let path = Folder::valid()?.write(place)?;
        change(&path)?;
        Ok(path)
    })
}

/// With a file replaced by a link.
fn linked(file: &'static str, target: &'static str) -> Case {
    folder(
        format!("{file} is a link to {target}"),
        Refused,
        move |path| {
            fs::remove_file(path.join(file))?;
            Ok(symlink(target, path.join(file))?)
        },
    )
}

/// A path that is no model's.
fn path(
    name: &str,
    expect: Expect,
    make: impl Fn(&Path) -> Result<()> + Send + Sync + 'static,
) -> Case {
    Case::new(Class::Files, name, expect, move |place| {
        let path = place.join("model.gguf");
        make(&path)?;
        Ok(path)
    })
}

fn links() -> Vec<Case> {
    let mut all = Vec::new();
    for target in [
        "/etc/passwd",
        "/etc/shadow",
        "/proc/self/mem",
        "/proc/self/environ",
        "/proc/self/fd/0",
        "/proc/1/root/etc/passwd",
        "/dev/zero",
        "/dev/random",
        "/dev/tty",
        "/dev/stdin",
        "/sys/kernel/notes",
        "../../../../../../../../etc/passwd",
        "..",
        "/",
    ] {
        all.push(linked("tokenizer.json", target));
    }
    for file in [
        "model.safetensors",
        "config.json",
        "chat_template.jinja",
        "tokenizer_config.json",
    ] {
        all.push(linked(file, "/etc/passwd"));
    }
    all.extend([
        linked("tokenizer.json", "tokenizer.json"),
        linked("tokenizer.json", "nowhere"),
        folder("two links that lead to each other", Refused, |p| {
            fs::remove_file(p.join("tokenizer.json"))?;
            symlink("b.json", p.join("tokenizer.json"))?;
            Ok(symlink("tokenizer.json", p.join("b.json"))?)
        }),
        folder("a chain of 50 links", Refused, |p| {
            fs::rename(p.join("tokenizer.json"), p.join("0.json"))?;
            for n in 0..50 {
                symlink(format!("{n}.json"), p.join(format!("{}.json", n + 1)))?;
            }
            Ok(symlink("50.json", p.join("tokenizer.json"))?)
        }),
        folder(
            "a link inside the folder",
            Harmless("it stays inside"),
            |p| {
                fs::create_dir(p.join("blobs"))?;
                fs::rename(p.join("tokenizer.json"), p.join("blobs/1"))?;
                Ok(symlink("blobs/1", p.join("tokenizer.json"))?)
            },
        ),
        folder(
            "a link out and back in",
            Either("where it ends counts"),
            |p| {
                fs::rename(p.join("tokenizer.json"), p.join("t.txt"))?;
                let name = p.file_name().unwrap_or_default().to_owned();
                let target = Path::new("..").join(name).join("t.txt");
                Ok(symlink(target, p.join("tokenizer.json"))?)
            },
        ),
        folder(
            "a folder that links to its parent",
            Harmless("folders inside are not read"),
            |p| Ok(symlink("..", p.join("up"))?),
        ),
        folder(
            "a folder that links to its parent, named as a file",
            Either("it is no file"),
            |p| Ok(symlink("..", p.join("up.json"))?),
        ),
        Case::new(Class::Files, "the model is a link to /", Refused, |place| {
            symlink("/", place.join("model"))?;
            Ok(place.join("model"))
        }),
        path("the model is a link to /dev/zero", Refused, |p| {
            Ok(symlink("/dev/zero", p)?)
        }),
        path("the model is a link to /proc/self/exe", Refused, |p| {
            Ok(symlink("/proc/self/exe", p)?)
        }),
    ]);
    all
}

fn kinds() -> Vec<Case> {
    let mut all = Vec::new();
    for file in ["tokenizer.json", "model.safetensors", "config.json"] {
        all.push(folder(format!("{file} is a pipe"), Refused, move |p| {
            fs::remove_file(p.join(file))?;
            pipe(&p.join(file))
        }));
        all.push(folder(format!("{file} is a folder"), Refused, move |p| {
            fs::remove_file(p.join(file))?;
            Ok(fs::create_dir(p.join(file))?)
        }));
        all.push(folder(format!("{file} is a socket"), Refused, move |p| {
            fs::remove_file(p.join(file))?;
            // A socket's path may have 108 bytes.
            let short = tempfile::Builder::new().prefix("s").tempdir()?;
            UnixListener::bind(short.path().join("s"))?;
            Ok(fs::rename(short.path().join("s"), p.join(file))?)
        }));
    }
    all.extend([
        folder("a pipe that nobody needs", Either("it is no file"), |p| {
            pipe(&p.join("more.json"))
        }),
        path("the model is a pipe", Refused, pipe),
        path("the model is a folder named as a file", Refused, |p| {
            Ok(fs::create_dir(p)?)
        }),
        path("the model is empty", Refused, |p| Ok(fs::write(p, b"")?)),
        path("the model is a hole of 8 TiB", Refused, |p| {
            Ok(File::create(p)?.set_len(8 << 40)?)
        }),
        path(
            "a valid file with a hole of 512 MiB behind it",
            Either("the hole is told"),
            |p| {
                fs::write(p, valid().write())?;
                Ok(OpenOptions::new().write(true).open(p)?.set_len(512 << 20)?)
            },
        ),
        folder("a hole of 8 GiB for a tokenizer", Refused, |p| {
            Ok(OpenOptions::new()
                .write(true)
                .open(p.join("tokenizer.json"))?
                .set_len(8 << 30)?)
        }),
        folder("a hole of 8 GiB for a configuration", Refused, |p| {
            Ok(OpenOptions::new()
                .write(true)
                .open(p.join("config.json"))?
                .set_len(8 << 30)?)
        }),
        folder("a hole of 8 GiB for a template", Refused, |p| {
            Ok(OpenOptions::new()
                .write(true)
                .open(p.join("chat_template.jinja"))?
                .set_len(8 << 30)?)
        }),
        folder("a hole of 8 GiB for tensors", Refused, |p| {
            Ok(OpenOptions::new()
                .write(true)
                .open(p.join("model.safetensors"))?
                .set_len(8 << 30)?)
        }),
        folder("2000 files", Refused, |p| {
            (0..2000).try_for_each(|n| Ok(fs::write(p.join(format!("{n}.json")), b"{}")?))
        }),
        folder("1000 files", Either("within the bound on files"), |p| {
            (0..1000).try_for_each(|n| Ok(fs::write(p.join(format!("{n}.json")), b"{}")?))
        }),
        folder(
            "20000 files that are none of a model",
            Harmless("only some names are a model's"),
            |p| (0..20_000).try_for_each(|n| Ok(fs::write(p.join(format!("{n}.exe")), b"")?)),
        ),
        folder(
            "names that are not UTF-8",
            Harmless("no file of a model has one"),
            |p| {
                Ok(fs::write(
                    p.join(std::ffi::OsStr::from_bytes(b"\xff\xfe.json")),
                    b"{}",
                )?)
            },
        ),
        folder(
            "names that steer a terminal",
            Either("names are quoted"),
            |p| Ok(fs::write(p.join("\x1b[2J\n.json"), b"{}")?),
        ),
        folder(
            "a pickle beside the tensors",
            Harmless("it is not opened"),
            |p| {
                Ok(fs::write(
                    p.join("pytorch_model.bin"),
                    b"\x80\x04cos\nsystem\n",
                )?)
            },
        ),
        folder(
            "code beside the tensors",
            Harmless("it is not opened"),
            |p| Ok(fs::write(p.join("modeling_evil.py"), b"import os")?),
        ),
        Case::new(Class::Files, "an empty folder", Refused, |place| {
            fs::create_dir(place.join("model"))?;
            Ok(place.join("model"))
        }),
        Case::new(
            Class::Files,
            "a folder whose name steers a terminal",
            Either("names are quoted"),
            |place| {
                let path = Folder::valid()?.write(place)?;
                let named = place.join("\x1b[2Jmodel\nINFO a lie");
                fs::rename(path, &named)?;
                Ok(named)
            },
        ),
        Case::new(
            Class::Files,
            "a device",
            Refused,
            |_| Ok("/dev/zero".into()),
        ),
        Case::new(
            Class::Files,
            "the memory of whoever opens it",
            Refused,
            |_| Ok("/proc/self/mem".into()),
        ),
        Case::new(Class::Files, "the root folder", Refused, |_| Ok("/".into())),
        Case::new(Class::Files, "the processes", Refused, |_| {
            Ok("/proc".into())
        }),
        Case::new(Class::Files, "the devices", Refused, |_| Ok("/dev".into())),
        Case::new(
            Class::Files,
            "configuration that names this folder's neighbour",
            Refused,
            |place| {
                let folder = Folder::sharded()?;
                fs::write(
                    place.join("secret.safetensors"),
                    &folder.0["model-00003-of-00003.safetensors"],
                )?;
                let mut folder = folder;
                folder.edit(INDEX, |index| {
                    index["weight_map"]["model.norm.weight"] = "../secret.safetensors".into()
                });
                folder.write(place)
            },
        ),
    ]);
    all
}

/// The tensors' file and its whole length.
fn tensors(path: &Path) -> Option<(File, u64)> {
    let name = if path.is_dir() {
        path.join("model.safetensors")
    } else {
        path.to_owned()
    };
    let file = OpenOptions::new().read(true).write(true).open(name).ok()?;
    let length = file.metadata().ok()?.len();
    Some((file, length))
}

fn changing() -> Vec<Case> {
    let changed = Expect::Contained("it may change before, while or after it is read");
    let both = |name: &str, spoil: fn(&Path)| {
        let folder = Case::folder(
            Class::Files,
            format!("tensors that {name}"),
            changed,
            |_| (),
        );
        let file = Case::gguf(
            Class::Files,
            format!("a GGUF file that {name}"),
            changed,
            || valid().write(),
        );
        [folder.meanwhile(spoil), file.meanwhile(spoil)]
    };
    let mut all = Vec::new();
    all.extend(both("shrink and grow", |path| {
        if let Some((file, length)) = tensors(path) {
            let _ = file.set_len(4096);
            let _ = file.set_len(length);
        }
    }));
    all.extend(both("shrink to nothing", |path| {
        if let Some((file, _)) = tensors(path) {
            let _ = file.set_len(0);
        }
    }));
    all.extend(both("shrink byte by byte", |path| {
        if let Some((file, length)) = tensors(path) {
            let _ = file.set_len(length.saturating_sub(1));
        }
    }));
    all.extend(both("grow", |path| {
        if let Some((file, length)) = tensors(path) {
            let _ = file.set_len((length + 4096).min(1 << 30));
        }
    }));
    all.extend(both("change their header", |path| {
        if let Some((file, _)) = tensors(path) {
            let _ = file.write_all_at(&[0xff; 64], 8);
        }
    }));
    all.extend(both("become others", |path| {
        let name = if path.is_dir() {
            path.join("model.safetensors")
        } else {
            path.to_owned()
        };
        let _ = fs::write(name.with_extension("new"), b"GGUF")
            .and_then(|()| fs::rename(name.with_extension("new"), &name));
    }));
    all.extend(both("are removed", |path| {
        let name = if path.is_dir() {
            path.join("model.safetensors")
        } else {
            path.to_owned()
        };
        let _ = fs::remove_file(name);
    }));
    all.push(
        Case::folder(Class::Files, "a tokenizer that shrinks", changed, |_| ()).meanwhile(|path| {
            if let Ok(file) = OpenOptions::new()
                .write(true)
                .open(path.join("tokenizer.json"))
            {
                let _ = file.set_len(0);
            }
        }),
    );
    all.push(
        Case::folder(
            Class::Files,
            "a tokenizer that becomes a link to /etc/passwd",
            changed,
            |_| (),
        )
        .meanwhile(|path| {
            let _ = fs::remove_file(path.join("tokenizer.json"));
            let _ = symlink("/etc/passwd", path.join("tokenizer.json"));
        }),
    );
    all
}

/// Paths of all these kinds.
pub fn cases() -> Vec<Case> {
    let parts = [links(), kinds(), changing()];
    parts.into_iter().flatten().collect()
}
