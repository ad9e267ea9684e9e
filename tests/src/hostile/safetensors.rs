//! Hostile safetensors files, indexes of shards, and names of shards.

use serde_json::{Value, json};

use super::{
    Case, Class,
    Expect::{self, Either, Harmless, Odd, Refused},
    folder::{Folder, INDEX, Safetensors},
};

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";

fn changed(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&mut Safetensors) + Send + Sync + 'static,
) -> Case {
    Case::folder(Class::Safetensors, name, expect, move |folder| {
        folder.tensors(&change)
    })
}

fn bytes(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&mut Vec<u8>) + Send + Sync + 'static,
) -> Case {
    Case::folder(Class::Safetensors, name, expect, move |folder| {
        change(folder.0.entry("model.safetensors".to_owned()).or_default());
    })
}

/// With another header text.
fn header(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(String) -> Vec<u8> + Send + Sync + 'static,
) -> Case {
    changed(name, expect, move |file| {
        let text = String::from_utf8_lossy(&file.header()).into_owned();
        file.header = Some(change(text));
    })
}

/// With one field of the embedding's description changed.
fn field(name: impl Into<String>, key: &'static str, value: Value) -> Case {
    changed(name, Refused, move |file| {
        file.about(EMBEDDING)[key] = value.clone()
    })
}

fn lengths() -> Vec<Case> {
    let mut all = vec![
        bytes("it is empty", Refused, Vec::clear),
        bytes("its last byte is missing", Refused, |b| {
            b.pop();
        }),
        bytes("a byte too many", Refused, |b| b.push(0)),
        bytes("a zip file follows", Refused, |b| {
            b.extend(*b"PK\x03\x04and so on")
        }),
        bytes("it is a pickle", Refused, |b| {
            b.splice(0..8, *b"\x80\x04cos\nsy");
        }),
        bytes("it is a GGUF file", Refused, |b| {
            b.splice(0..4, *b"GGUF");
        }),
    ];
    for length in [1, 7, 8, 9] {
        all.push(bytes(
            format!("it ends after {length} bytes"),
            Refused,
            move |b| b.truncate(length),
        ));
    }
    for (length, what) in [
        (0, "0"),
        (1, "1"),
        (2, "2"),
        (16 << 20, "16 MiB"),
        ((16 << 20) + 1, "more than 16 MiB"),
        (100_000_001, "more than 100 MB"),
        (1 << 32, "4 GiB"),
        (1 << 63, "2^63"),
        (u64::MAX - 7, "2^64 - 8, which wraps to nothing"),
        (u64::MAX, "2^64 - 1"),
    ] {
        all.push(changed(
            format!("the header's length is {what}"),
            Refused,
            move |f| f.length = Some(length),
        ));
    }
    all.push(bytes("the header is cut in the middle", Refused, |b| {
        b.truncate(500)
    }));
    all.push(bytes("the data is cut in the middle", Refused, |b| {
        b.truncate(b.len() / 2)
    }));
    all
}

fn headers() -> Vec<Case> {
    let many = |n: usize| {
        (0..n)
            .map(|i| format!("\"t{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"))
            .collect::<Vec<_>>()
            .join(",")
    };
    let with = |text: String, more: &str| text.replacen('{', &format!("{{{more},"), 1).into_bytes();
    vec![
        header("the header is nothing", Refused, |_| Vec::new()),
        header("the header is {}", Refused, |_| b"{}".to_vec()),
        header("the header is a list", Refused, |_| b"[]".to_vec()),
        header("the header is null", Refused, |_| b"null".to_vec()),
        header("the header is no JSON", Refused, |t| {
            t.replace(':', ";").into_bytes()
        }),
        header("the header is not UTF-8", Refused, |t| {
            t.replace("model.norm", "\u{1}odel.norm")
                .into_bytes()
                .iter()
                .map(|&b| if b == 1 { 0xff } else { b })
                .collect()
        }),
        header("the header has a lone surrogate", Refused, |t| {
            t.replace("model.norm", "\\ud800").into_bytes()
        }),
        header("the header has a byte-order mark", Refused, |t| {
            [b"\xef\xbb\xbf", t.as_bytes()].concat()
        }),
        header(
            "blanks follow the header",
            Harmless("writers pad with them"),
            |t| format!("{t}{}", " ".repeat(4096)).into_bytes(),
        ),
        header(
            "blanks precede the header",
            Either("the reference reader takes it"),
            |t| format!("{}{t}", " ".repeat(4096)).into_bytes(),
        ),
        header(
            "16 MiB of blanks precede the header",
            Either("the reference reader takes it"),
            |t| format!("{}{t}", " ".repeat((16 << 20) - t.len())).into_bytes(),
        ),
        header("more follows the header's end", Refused, |t| {
            format!("{t}{{}}").into_bytes()
        }),
        header("zeros follow the header's end", Refused, |t| {
            format!("{t}\0\0\0\0").into_bytes()
        }),
        header("lists 100000 deep", Refused, |t| {
            t.replacen("[", &"[".repeat(100_000), 1).into_bytes()
        }),
        header("objects 100000 deep", Refused, |_| {
            "{\"a\":".repeat(100_000).into_bytes()
        }),
        header(
            "lists 100000 deep in what nobody reads",
            Refused,
            move |t| with(t, &format!("\"__metadata__\":{}", "[".repeat(100_000))),
        ),
        header("metadata that is a list", Refused, move |t| {
            with(t, "\"__metadata__\":[]")
        }),
        header("metadata with numbers", Refused, move |t| {
            with(t, "\"__metadata__\":{\"a\":1}")
        }),
        header(
            "metadata of 15 MiB",
            Either("within the bound on the header"),
            move |t| {
                with(
                    t,
                    &format!("\"__metadata__\":{{\"a\":\"{}\"}}", "x".repeat(15 << 20)),
                )
            },
        ),
        header(
            "a million metadata entries",
            Either("within the bound on the header"),
            move |t| {
                let many: Vec<String> = (0..1_000_000).map(|n| format!("\"{n}\":\"\"")).collect();
                with(t, &format!("\"__metadata__\":{{{}}}", many.join(",")))
            },
        ),
        header("a tensor is there twice", Refused, |t| {
            let again = "\"model.norm.weight\":{\"dtype\":\"F32\",\"shape\":[64],\"data_offsets\":[0,256]},";
            t.replacen('{', &format!("{{{again}"), 1).into_bytes()
        }),
        header("65536 tensors of nothing", Refused, move |t| {
            with(t, &many(65_536))
        }),
        header("100000 tensors of nothing", Refused, move |t| {
            with(t, &many(100_000))
        }),
        header(
            "40000 tensors of nothing",
            Either("within the bound on tensors"),
            move |t| with(t, &many(40_000)),
        ),
        header(
            "a tensor's name of 8 MiB",
            Either("nobody reads it"),
            move |t| {
                with(
                    t,
                    &format!(
                        "\"{}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                        "n".repeat(8 << 20)
                    ),
                )
            },
        ),
        header(
            "a tensor's name that steers a terminal",
            Either("nobody reads it"),
            move |t| {
                with(
                    t,
                    "\"\\u001b[2J\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                )
            },
        ),
        header("a number of a million digits", Refused, |t| {
            t.replacen(
                "\"data_offsets\":[",
                &format!("\"data_offsets\":[{}", "9".repeat(1 << 20)),
                1,
            )
            .into_bytes()
        }),
        header(
            "an escape of a million characters",
            Either("it is a name"),
            move |t| {
                with(
                    t,
                    &format!(
                        "\"{}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                        "\\u0041".repeat(1 << 20)
                    ),
                )
            },
        ),
    ]
}

fn fields() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [
        "",
        "f32",
        "F16",
        "BF16",
        "F64",
        "I64",
        "I8",
        "BOOL",
        "F8_E4M3",
        "F8_E5M2",
        "F4",
        "C64",
        "pickle",
        "__import__",
    ] {
        all.push(field(
            format!("the embedding's dtype is {dtype:?}"),
            "dtype",
            json!(dtype),
        ));
    }
    all.extend([
        field("the dtype is a number", "dtype", json!(1)),
        field("the dtype is an object", "dtype", json!({"F32": {}})),
        field(
            "the dtype has a megabyte",
            "dtype",
            json!("F".repeat(1 << 20)),
        ),
        field(
            "a field that the format does not know",
            "strides",
            json!([1, 1]),
        ),
        field("the shape is missing a dimension", "shape", json!([288])),
        field(
            "the shape has one more dimension",
            "shape",
            json!([288, 64, 1]),
        ),
        field("the shape is transposed", "shape", json!([64, 288])),
        field("the shape is empty", "shape", json!([])),
        field("the shape is 0", "shape", json!([0, 64])),
        field("the shape is negative", "shape", json!([-288, 64])),
        field("the shape is a fraction", "shape", json!([288.5, 64])),
        field("the shape is a float", "shape", json!([288.0, 64.0])),
        field("the shape is a text", "shape", json!("288x64")),
        field("the shape holds texts", "shape", json!(["288", "64"])),
        field(
            "the shape's product wraps",
            "shape",
            json!([1u64 << 32, 1u64 << 32]),
        ),
        field(
            "the shape's product wraps to the right size",
            "shape",
            json!([(1u64 << 58) + 288, 64]),
        ),
        field("the shape's bytes wrap", "shape", json!([1u64 << 62])),
        field("the shape is 2^64 - 1", "shape", json!([u64::MAX])),
        field(
            "the shape has 9 dimensions",
            "shape",
            json!([288, 64, 1, 1, 1, 1, 1, 1, 1]),
        ),
        field(
            "the shape has 100000 dimensions",
            "shape",
            json!(vec![1; 100_000]),
        ),
        field("its place is reversed", "data_offsets", json!([73_728, 0])),
        field("its place is negative", "data_offsets", json!([-4, 73_724])),
        field(
            "its place is past the end",
            "data_offsets",
            json!([1u64 << 40, (1u64 << 40) + 73_728]),
        ),
        field(
            "its place ends at 2^64 - 1",
            "data_offsets",
            json!([0, u64::MAX]),
        ),
        field(
            "its place begins at 2^64 - 4",
            "data_offsets",
            json!([u64::MAX - 3, 73_724]),
        ),
        field("its place has one number", "data_offsets", json!([0])),
        field(
            "its place has three numbers",
            "data_offsets",
            json!([0, 73_728, 0]),
        ),
        field("its place is a text", "data_offsets", json!("0-73728")),
        field(
            "its place has floats",
            "data_offsets",
            json!([0.0, 73728.0]),
        ),
    ]);
    for key in ["dtype", "shape", "data_offsets"] {
        all.push(changed(
            format!("the embedding has no {key}"),
            Refused,
            move |file| {
                if let Some(about) = file.about(EMBEDDING).as_object_mut() {
                    about.remove(key);
                }
            },
        ));
    }
    all
}

fn places() -> Vec<Case> {
    let shift = |file: &mut Safetensors, by: i64| {
        for end in 0..2 {
            let at = file.about(NORM)["data_offsets"][end].as_i64().unwrap_or(0);
            file.about(NORM)["data_offsets"][end] = json!(at + by);
        }
    };
    let fill = |value: f32| {
        move |file: &mut Safetensors| {
            let count = file.data.len() / 4;
            file.data = value.to_le_bytes().repeat(count);
        }
    };
    vec![
        changed("two tensors overlap", Refused, move |f| shift(f, -4)),
        changed("a gap between tensors", Refused, move |f| shift(f, 4)),
        changed("all tensors are at one place", Refused, |f| {
            for (_, about) in &mut f.tensors {
                let length = about["data_offsets"][1].as_u64().unwrap_or(0)
                    - about["data_offsets"][0].as_u64().unwrap_or(0);
                about["data_offsets"] = json!([0, length]);
            }
        }),
        changed(
            "entries in another order than their data",
            Either("JSON objects have no order"),
            |f| f.tensors.reverse(),
        ),
        changed("bytes that belong to no tensor", Refused, |f| {
            f.data.extend([7; 4096])
        }),
        changed("the embedding is missing", Refused, |f| {
            f.tensors.retain(|(name, _)| name != EMBEDDING)
        }),
        changed("all tensors are missing", Refused, |f| {
            f.tensors.clear();
            f.data.clear();
        }),
        changed("a tensor has another's name", Refused, |f| {
            f.tensors[3].0 = NORM.to_owned()
        }),
        changed("a tensor has no name", Refused, |f| f.tensors[3].0.clear()),
        changed(
            "all is one byte off its alignment",
            Odd("odd_alignment"),
            |f| {
                f.header = Some([f.header(), b" ".to_vec()].concat());
                while f.header().len() % 2 == 0 {
                    f.header = Some([f.header(), b" ".to_vec()].concat());
                }
            },
        ),
        changed("half a byte comes first", Refused, |f| {
            f.tensors.insert(
                0,
                (
                    "x".to_owned(),
                    json!({"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}),
                ),
            );
        }),
        changed(
            "the weights are NaN",
            Either("numbers are nobody's danger"),
            fill(f32::NAN),
        ),
        changed(
            "the weights are infinite",
            Either("numbers are nobody's danger"),
            fill(f32::INFINITY),
        ),
        changed(
            "the weights are the largest numbers",
            Either("numbers are nobody's danger"),
            fill(f32::MAX),
        ),
        changed(
            "the weights are 0",
            Either("numbers are nobody's danger"),
            fill(0.0),
        ),
    ]
}

fn shards() -> Vec<Case> {
    let index = |name: &'static str, expect: Expect, change: fn(&mut Value)| {
        Case::new(Class::Shards, name, expect, move |place| {
            let mut folder = Folder::sharded()?;
            folder.edit(INDEX, change);
            folder.write(place)
        })
    };
    let raw = |name: &'static str, expect: Expect, make: fn() -> Vec<u8>| {
        Case::new(Class::Shards, name, expect, move |place| {
            let mut folder = Folder::sharded()?;
            folder.put(INDEX, make());
            folder.write(place)
        })
    };
    let files = |name: &'static str, expect: Expect, change: fn(&mut Folder)| {
        Case::new(Class::Shards, name, expect, move |place| {
            let mut folder = Folder::sharded()?;
            change(&mut folder);
            folder.write(place)
        })
    };
    let to = |name: &'static str, target: &'static str| {
        Case::new(Class::Shards, name, Refused, move |place| {
            let mut folder = Folder::sharded()?;
            folder.edit(INDEX, |index| index["weight_map"][NORM] = json!(target));
            folder.write(place)
        })
    };
    vec![
        to(
            "the index names a file that is not there",
            "model-00009-of-00009.safetensors",
        ),
        to("the index names /etc/passwd", "/etc/passwd"),
        to(
            "the index climbs out of the folder",
            "../../../../etc/passwd",
        ),
        to(
            "the index climbs out and comes back",
            "../model/model-00001-of-00003.safetensors",
        ),
        to("the index names this folder", "."),
        to("the index names itself", INDEX),
        to("the index names config.json", "config.json"),
        to("the index names nothing", ""),
        to("the index names a device", "/dev/zero"),
        to(
            "the index names an address",
            "https://example.org/model.safetensors",
        ),
        to(
            "the index names a file with a zero in it",
            "model-00001-of-00003.safetensors\0.txt",
        ),
        to("the index steers a terminal", "\x1b[2J\x1b]0;gotcha\x07"),
        to(
            "the index puts a tensor into another shard",
            "model-00001-of-00003.safetensors",
        ),
        index("the index has no map", Refused, |v| {
            v.as_object_mut().map(|o| o.remove("weight_map"));
        }),
        index("the index's map is a list", Refused, |v| {
            v["weight_map"] = json!([])
        }),
        index("the index's map is empty", Refused, |v| {
            v["weight_map"] = json!({})
        }),
        index("the index names a number", Refused, |v| {
            v["weight_map"][NORM] = json!(3)
        }),
        index("the index names a list", Refused, |v| {
            v["weight_map"][NORM] = json!(["model-00003-of-00003.safetensors"])
        }),
        index("the index knows a tensor that is nowhere", Refused, |v| {
            v["weight_map"]["ghost"] = json!("model-00003-of-00003.safetensors")
        }),
        index(
            "the index does not know a tensor that is there",
            Either("files count, not what is said about them"),
            |v| {
                v["weight_map"].as_object_mut().map(|o| o.remove(NORM));
            },
        ),
        index(
            "the index lies about sizes",
            Harmless("nobody believes them"),
            |v| v["metadata"]["total_size"] = json!(u64::MAX),
        ),
        index(
            "the index's sizes are negative texts",
            Harmless("nobody reads them"),
            |v| v["metadata"]["total_size"] = json!("-1"),
        ),
        index("the index names 5000 shards", Refused, |v| {
            (0..5000)
                .for_each(|n| v["weight_map"][format!("t{n}")] = json!(format!("{n}.safetensors")))
        }),
        index("the index knows 100000 tensors", Refused, |v| {
            (0..100_000).for_each(|n| {
                v["weight_map"][format!("t{n}")] = json!("model-00003-of-00003.safetensors")
            })
        }),
        raw("the index is empty", Refused, Vec::new),
        raw("the index is no JSON", Refused, || b"{".to_vec()),
        raw("the index is not UTF-8", Refused, || {
            b"{\"weight_map\":{\"\xff\":\"a\"}}".to_vec()
        }),
        raw("the index is 100000 deep", Refused, || {
            "[".repeat(100_000).into_bytes()
        }),
        raw(
            "the index is 100000 deep in what nobody reads",
            Refused,
            || format!("{{\"x\":{}", "[".repeat(100_000)).into_bytes(),
        ),
        raw("the index has more than 16 MiB", Refused, || {
            format!("{{\"weight_map\":{{}}}}{}", " ".repeat(16 << 20)).into_bytes()
        }),
        raw("the index has 16 MiB of names", Refused, || {
            let many: Vec<String> = (0..500_000)
                .map(|n| format!("\"{n:012}\":\"{n}\""))
                .collect();
            format!("{{\"weight_map\":{{{}}}}}", many.join(",")).into_bytes()
        }),
        raw("the index says everything twice", Refused, || {
            let text = String::from_utf8_lossy(
                &Folder::sharded()
                    .map(|f| f.0[INDEX].clone())
                    .unwrap_or_default(),
            )
            .into_owned();
            text.replacen(
                "\"weight_map\": {",
                "\"weight_map\": {\"model.norm.weight\": \"model-00003-of-00003.safetensors\",",
                1,
            )
            .into_bytes()
        }),
        files("a shard is missing", Refused, |f| {
            f.0.remove("model-00002-of-00003.safetensors");
        }),
        files("a shard is another's copy", Refused, |f| {
            let first = f.0["model-00001-of-00003.safetensors"].clone();
            f.put("model-00002-of-00003.safetensors", first);
        }),
        files("a shard is empty", Refused, |f| {
            f.put("model-00002-of-00003.safetensors", Vec::new())
        }),
        files("there is no index, and a shard is missing", Refused, |f| {
            f.0.remove(INDEX);
            f.0.remove("model-00002-of-00003.safetensors");
        }),
        files("there is no index, and shards of two sets", Refused, |f| {
            f.0.remove(INDEX);
            f.put("model-00001-of-00002.safetensors", Vec::new());
        }),
        files("there is no index, and a shard of 99999", Refused, |f| {
            f.0.remove(INDEX);
            for name in f.shards() {
                f.0.remove(&name);
            }
            f.put("model-00001-of-99999.safetensors", Vec::new());
        }),
        files("there is no index, and a shard of none", Refused, |f| {
            f.0.remove(INDEX);
            for name in f.shards() {
                f.0.remove(&name);
            }
            f.put("model-00001-of-00000.safetensors", Vec::new());
        }),
        files("shards that nobody names", Odd("unread_file"), |f| {
            f.put("model-00004-of-00003.safetensors", vec![0; 4096])
        }),
        files("a GGUF file among the shards", Refused, |f| {
            f.put("a.gguf", b"GGUF".to_vec())
        }),
        files("two GGUF files among the shards", Odd("unread_file"), |f| {
            f.put("a.gguf", b"GGUF".to_vec());
            f.put("b.gguf", b"GGUF".to_vec());
        }),
    ]
}

/// Folders of all these kinds.
pub fn cases() -> Vec<Case> {
    let parts = [lengths(), headers(), fields(), places(), shards()];
    parts.into_iter().flatten().collect()
}
