//! Hostile GGUF files: headers, metadata entries and descriptions of tensors that lie, and files that end early.

use std::sync::OnceLock;

use hotcell_graph::DType;

use super::{
    Case, Class,
    Expect::{self, Either, Harmless, Odd, Refused},
};
pub use crate::synthetic::gguf::testing::{Tensor, Value, Writer, string};
use crate::synthetic::{
    Measures,
    gguf::{Weights, small},
};

const TINY: Measures = Measures {
    hidden: 32,
    layers: 1,
    heads: 2,
    kv_heads: 1,
    inner: 64,
    vocab: 320,
    context: 128,
    tied: true,
};

/// A valid model.
///
/// # Panics
/// Never: its measures are valid.
pub fn valid() -> Writer {
    static MADE: OnceLock<Writer> = OnceLock::new();
    let make = || small("tiny", &TINY, Weights::Pure(DType::F32)).expect("valid measures");
    MADE.get_or_init(make).clone()
}

/// The value of a key, which is added if it is not there.
pub fn set(writer: &mut Writer, key: &str, value: Value) {
    match writer.values.iter_mut().find(|(known, _)| known == key) {
        Some((_, old)) => *old = value,
        None => writer.values.push((key.to_owned(), value)),
    }
}

/// A valid file with one thing changed.
fn changed(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&mut Writer) + Send + Sync + 'static,
) -> Case {
    Case::gguf(Class::Gguf, name, expect, move || {
        let mut writer = valid();
        change(&mut writer);
        writer.write()
    })
}

/// A valid file with other bytes somewhere.
fn bytes(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&mut Vec<u8>) + Send + Sync + 'static,
) -> Case {
    Case::gguf(Class::Gguf, name, expect, move || {
        let mut bytes = valid().write();
        change(&mut bytes);
        bytes
    })
}

fn array(element: u32, count: u64, rest: &[u8]) -> Value {
    let head = [&element.to_le_bytes()[..], &count.to_le_bytes(), rest].concat();
    Value::Raw(9, head)
}

/// A file of a header and entries that are given as bytes.
fn entries(count: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend(bytes);
    out
}

fn headers() -> Vec<Case> {
    let mut all = vec![
        changed("the magic is that of big-endian files", Refused, |w| {
            w.magic = *b"FUGG"
        }),
        changed("the magic is that of the format before", Refused, |w| {
            w.magic = *b"ggjt"
        }),
        changed("the magic is in small letters", Refused, |w| {
            w.magic = *b"gguf"
        }),
        bytes("it is a program", Refused, |b| {
            b.splice(0..4, *b"\x7fELF");
        }),
        bytes("it is all zeros", Refused, |b| b.fill(0)),
        bytes("it is all ones", Refused, |b| b.fill(0xff)),
        bytes("it is empty", Refused, Vec::clear),
    ];
    for version in [0, 1, 4, 3u32.swap_bytes(), u32::MAX] {
        all.push(changed(format!("version {version}"), Refused, move |w| {
            w.version = version;
        }));
    }
    for (word, delta) in [("one more", 1), ("one less", u64::MAX)] {
        let name = |what: &str| format!("it claims {word} {what} than there are");
        let less = if delta == 1 {
            Refused
        } else {
            Either("the last one is not read")
        };
        all.push(changed(name("tensors"), less, move |w| {
            w.n_tensors = Some((w.tensors.len() as u64).wrapping_add(delta));
        }));
        all.push(changed(name("entries"), Refused, move |w| {
            w.n_kv = Some((w.values.len() as u64).wrapping_add(delta));
        }));
    }
    for count in [
        0,
        65_536,
        65_537,
        1 << 31,
        1 << 32,
        1 << 58,
        1 << 63,
        u64::MAX,
    ] {
        all.push(changed(
            format!("it claims {count} tensors"),
            Refused,
            move |w| {
                w.n_tensors = Some(count);
            },
        ));
        all.push(changed(
            format!("it claims {count} entries"),
            Refused,
            move |w| {
                w.n_kv = Some(count);
            },
        ));
    }
    all.push(Case::gguf(
        Class::Gguf,
        "65536 entries and no model",
        Refused,
        || {
            let entry = |n: u32| {
                let mut out = string(&format!("k{n}"));
                out.extend([0, 0, 0, 0, 1]);
                out
            };
            entries(65_536, &(0..65_536).flat_map(entry).collect::<Vec<u8>>())
        },
    ));
    all
}

fn metadata() -> Vec<Case> {
    let mut all = Vec::new();
    for length in [0, 65_536, 1 << 20, 1 << 32, 1 << 63, u64::MAX - 7, u64::MAX] {
        all.push(bytes(
            format!("the first key claims {length} bytes"),
            Refused,
            move |b| {
                b.splice(24..32, length.to_le_bytes());
            },
        ));
    }
    all.push(bytes("the first key is not UTF-8", Refused, |b| {
        b[32..40].fill(0xff)
    }));
    all.push(changed(
        "a key holds a zero and escapes",
        Harmless("nobody reads it"),
        |w| {
            set(w, "general.\0\x1b[2J\u{202e}", Value::U32(1));
        },
    ));
    all.push(changed("a key of 65536 bytes", Refused, |w| {
        set(w, &"k".repeat(65_536), Value::U32(1));
    }));
    for key in [
        "general.architecture",
        "llama.block_count",
        "tokenizer.ggml.tokens",
    ] {
        all.push(changed(format!("{key} occurs twice"), Refused, move |w| {
            let twice = w.values.iter().find(|(known, _)| known == key).cloned();
            w.values.extend(twice);
        }));
    }
    for kind in [13, 14, 255, 1 << 31, u32::MAX] {
        all.push(changed(
            format!("a value of type {kind}"),
            Refused,
            move |w| {
                set(w, "x", Value::Raw(kind, vec![0; 64]));
            },
        ));
        all.push(changed(
            format!("an array of type {kind}"),
            Refused,
            move |w| {
                set(w, "x", array(kind, 1, &[0; 64]));
            },
        ));
    }
    for (count, what) in [
        (1 << 24 | 1, "a little more than may be"),
        (1 << 32, "2^32"),
        (1 << 61, "2^61"),
        (u64::MAX, "2^64 - 1"),
    ] {
        for (element, of) in [(0, "bytes"), (6, "floats"), (8, "strings"), (12, "doubles")] {
            all.push(changed(
                format!("an array of {what} {of}"),
                Refused,
                move |w| {
                    set(w, "x", array(element, count, &[]));
                },
            ));
        }
    }
    all.extend([
        changed("an array of arrays", Refused, |w| {
            set(w, "x", array(9, 1, &[0; 64]));
        }),
        Case::gguf(
            Class::Gguf,
            "arrays inside arrays, 100000 deep",
            Refused,
            || {
                let deep: Vec<u8> = (0..100_000)
                    .flat_map(|_| [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat())
                    .collect();
                entries(
                    1,
                    &[string("x"), 9u32.to_le_bytes().to_vec(), deep].concat(),
                )
            },
        ),
        changed("a truth value of 2", Refused, |w| {
            set(w, "x", Value::Raw(7, vec![2]))
        }),
        changed(
            "an array of truth values of 255",
            Either("nobody reads it"),
            |w| {
                set(w, "x", array(7, 4, &[255; 4]));
            },
        ),
        changed("a string of 2^64 - 1 bytes", Refused, |w| {
            set(w, "x", Value::Raw(8, u64::MAX.to_le_bytes().to_vec()));
        }),
        changed("a string a little longer than may be", Refused, |w| {
            set(w, "x", Value::Str("x".repeat((1 << 20) + 1)));
        }),
        changed(
            "a string that is not UTF-8",
            Either("nobody reads it"),
            |w| {
                let bytes = [&4u64.to_le_bytes()[..], &[0xff; 4]].concat();
                set(w, "x", Value::Raw(8, bytes));
            },
        ),
        changed("the architecture is not UTF-8", Refused, |w| {
            let bytes = [&5u64.to_le_bytes()[..], b"llam\xff"].concat();
            set(w, "general.architecture", Value::Raw(8, bytes));
        }),
        changed(
            "the name steers a terminal",
            Odd("control_characters"),
            |w| {
                set(
                    w,
                    "general.name",
                    Value::Str("\x1b]0;gotcha\x07\x1b[2J".to_owned()),
                );
            },
        ),
        changed(
            "16 MiB of metadata that nobody reads",
            Odd("unknown_key"),
            |w| {
                for n in 0..16 {
                    set(w, &format!("x.{n}"), Value::Str("x".repeat(1 << 20)));
                }
            },
        ),
        changed(
            "a megabyte of bytes in a key that nobody reads",
            Odd("unknown_key"),
            |w| {
                set(w, "payload", array(0, 1 << 20, &vec![0x90; 1 << 20]));
            },
        ),
        changed(
            "16 million strings of no bytes",
            Either("within the bounds of an array"),
            |w| {
                set(w, "x", array(8, 1 << 22, &vec![0; 8 << 22]));
            },
        ),
    ]);
    for (value, what) in [
        (Value::U32(0), "0"),
        (Value::U32(3), "3"),
        (Value::U32(33), "33"),
        (Value::U32(1 << 21), "2^21"),
        (Value::U32(u32::MAX), "2^32 - 1"),
        (Value::U64(32), "a u64"),
        (Value::I32(32), "an i32"),
        (Value::F32(32.0), "a float"),
        (Value::Str("32".to_owned()), "a text"),
    ] {
        all.push(changed(
            format!("the alignment is {what}"),
            Refused,
            move |w| {
                set(w, "general.alignment", value.clone());
            },
        ));
    }
    all.push(changed("the alignment is 1", Odd("odd_alignment"), |w| {
        set(w, "general.alignment", Value::U32(1));
        w.alignment = 1;
    }));
    all.push(changed(
        "the alignment is 1 and all is crooked",
        Odd("odd_alignment"),
        |w| {
            set(w, "general.alignment", Value::U32(1));
            w.alignment = 1;
            set(w, "general.name", Value::Str("abc".to_owned()));
        },
    ));
    all.push(changed(
        "the alignment is 2^20",
        Odd("odd_alignment"),
        |w| {
            set(w, "general.alignment", Value::U32(1 << 20));
            w.alignment = 1 << 20;
        },
    ));
    all
}

fn tensor(name: &str, dims: &[u64], kind: u32, data: Vec<u8>) -> Tensor {
    Tensor {
        name: name.to_owned(),
        dims: dims.to_vec(),
        n_dims: None,
        kind,
        data,
        offset: None,
    }
}

/// A valid file whose first tensor is described otherwise.
fn first(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&mut Tensor) + Send + Sync + 'static,
) -> Case {
    changed(name, expect, move |w| change(&mut w.tensors[0]))
}

/// A valid file with one more tensor, which no model needs.
fn one_more(
    name: impl Into<String>,
    expect: Expect,
    make: impl Fn() -> Tensor + Send + Sync + 'static,
) -> Case {
    changed(name, expect, move |w| w.tensors.push(make()))
}

fn tensors() -> Vec<Case> {
    let mut all = vec![
        first("a tensor without a name", Refused, |t| t.name.clear()),
        first("a tensor's name of 64 bytes", Refused, |t| {
            t.name = "n".repeat(64)
        }),
        first("a tensor's name of a megabyte", Refused, |t| {
            t.name = "n".repeat(1 << 20)
        }),
        changed("two tensors of one name", Refused, |w| {
            let again = w.tensors[0].clone();
            w.tensors.push(again);
        }),
        one_more(
            "a tensor's name holds escapes",
            Harmless("nobody reads it"),
            || tensor("\x1b[2J\0../../x", &[32], 0, vec![0; 128]),
        ),
    ];
    for (count, what) in [
        (0, "no"),
        (5, "5"),
        (1 << 20, "2^20"),
        (u32::MAX, "2^32 - 1"),
    ] {
        all.push(first(
            format!("a tensor of {what} dimensions"),
            Refused,
            move |t| {
                t.n_dims = Some(count);
            },
        ));
    }
    for (dims, what) in [
        (&[0][..], "0"),
        (&[0, 320], "0 x 320"),
        (&[32, 0], "32 x 0"),
        (&[u64::MAX], "-1"),
        (&[1 << 63, 2], "2^63 x 2"),
        (&[32, 1 << 63], "32 x 2^63"),
        (&[1 << 32, 1 << 32], "2^32 x 2^32"),
        (&[1 << 62], "2^62"),
        (
            &[(1 << 62) + 8],
            "2^62 + 8, of which 32 bytes are left when they wrap",
        ),
        (&[1 << 16, 1 << 16, 1 << 16, 1 << 16], "2^16 four times"),
        (&[1 << 40, 1 << 20], "an exabyte in a file of kilobytes"),
        (&[i64::MAX as u64], "2^63 - 1"),
        (&[320, 32], "its transpose"),
        (&[32, 321], "one row more"),
        (&[32, 319], "one row less"),
        (&[32 * 320], "one dimension"),
        (&[32, 1, 320], "three dimensions"),
    ] {
        let dims = dims.to_vec();
        all.push(first(
            format!("the embedding's shape is {what}"),
            Refused,
            move |t| {
                t.dims.clone_from(&dims);
            },
        ));
    }
    for kind in [4, 5, 31, 32, 33, 36, 37, 38] {
        all.push(first(
            format!("the embedding is of the removed type {kind}"),
            Refused,
            move |t| {
                t.kind = kind;
            },
        ));
    }
    for kind in [42, 100, 1 << 31, u32::MAX] {
        all.push(first(
            format!("the embedding is of the unknown type {kind}"),
            Refused,
            move |t| {
                t.kind = kind;
            },
        ));
    }
    for (kind, what) in [
        (10, "q2_k"),
        (16, "iq2_xxs"),
        (24, "i8"),
        (26, "i32"),
        (27, "i64"),
        (28, "f64"),
        (9, "q8_1"),
    ] {
        all.push(first(
            format!("the embedding is of type {what}"),
            Refused,
            move |t| {
                t.kind = kind;
            },
        ));
        all.push(changed(
            format!("a norm is of type {what}"),
            Refused,
            move |w| {
                w.tensors[1].kind = kind;
            },
        ));
    }
    all.push(one_more("rows of 31 in blocks of 32", Refused, || {
        tensor("x", &[31, 2], 8, vec![0; 68])
    }));
    all.push(one_more(
        "a row of one element in blocks of 256",
        Refused,
        || tensor("x", &[1], 12, vec![0; 144]),
    ));
    for (offset, what) in [
        (1, "1"),
        (16, "half the alignment"),
        (1 << 20, "past the end"),
        (1 << 40, "2^40"),
        (1 << 63, "2^63"),
        (u64::MAX, "2^64 - 1"),
        (u64::MAX - 31, "2^64 - 32, which wraps to the last tensor"),
        (0u64.wrapping_sub(4096), "-4096, before the data"),
    ] {
        all.push(changed(
            format!("the last tensor is at {what}"),
            Refused,
            move |w| {
                if let Some(last) = w.tensors.last_mut() {
                    last.offset = Some(offset);
                }
            },
        ));
    }
    all.extend([
        changed("all tensors are at one place", Refused, |w| {
            w.tensors.iter_mut().for_each(|t| t.offset = Some(0));
        }),
        changed("two tensors overlap by one block", Refused, |w| {
            let before: usize = w.tensors[0].data.len();
            w.tensors[1].offset = Some(before as u64 - 32);
        }),
        changed(
            "tensors in another order than their data",
            Either("nobody asks for an order"),
            |w| {
                let mut at = 0;
                for tensor in w.tensors.iter_mut().rev() {
                    tensor.offset = Some(at as u64);
                    at += tensor.data.len().next_multiple_of(32);
                }
            },
        ),
        one_more(
            "a gap of a megabyte between tensors",
            Odd("hidden_bytes"),
            || {
                let mut hidden = tensor("x", &[32], 0, vec![0; (1 << 20) + 128]);
                hidden.offset = Some(0);
                hidden.name = "gap".to_owned();
                // Its data is written where tensors go on; its description begins where that ends.
                hidden.offset = Some(valid_data() + (1 << 20));
                hidden
            },
        ),
        bytes(
            "a megabyte after the last tensor",
            Odd("trailing_bytes"),
            |b| {
                b.extend(vec![0x90; 1 << 20]);
            },
        ),
        bytes(
            "another file after the last tensor",
            Odd("trailing_bytes"),
            |b| {
                let again = b.clone();
                b.extend(again);
            },
        ),
        bytes("the last byte is missing", Refused, |b| {
            b.pop();
        }),
        changed(
            "the weights are NaN",
            Either("numbers are nobody's danger"),
            |w| {
                w.tensors[0].data = f32::NAN.to_le_bytes().repeat(32 * 320);
            },
        ),
        changed(
            "the weights are infinite",
            Either("numbers are nobody's danger"),
            |w| {
                for tensor in &mut w.tensors {
                    tensor.data = f32::INFINITY.to_le_bytes().repeat(tensor.data.len() / 4);
                }
            },
        ),
        changed(
            "the weights are the largest numbers",
            Either("numbers are nobody's danger"),
            |w| {
                for tensor in &mut w.tensors {
                    tensor.data = f32::MAX.to_le_bytes().repeat(tensor.data.len() / 4);
                }
            },
        ),
        changed(
            "the weights are denormal",
            Either("numbers are nobody's danger"),
            |w| {
                for tensor in &mut w.tensors {
                    tensor.data = 1u32.to_le_bytes().repeat(tensor.data.len() / 4);
                }
            },
        ),
        changed(
            "a second layer that the metadata does not know",
            Either("nobody reads it"),
            |w| {
                let more: Vec<Tensor> = w
                    .tensors
                    .iter()
                    .cloned()
                    .filter_map(|mut t| {
                        t.name = t
                            .name
                            .strip_prefix("blk.0.")
                            .map(|rest| format!("blk.1.{rest}"))?;
                        Some(t)
                    })
                    .collect();
                w.tensors.extend(more);
            },
        ),
        Case::gguf(Class::Gguf, "65536 tensors of one element", Refused, || {
            let mut w = valid();
            w.tensors = (0..65_536)
                .map(|n| tensor(&format!("t{n}"), &[1], 0, vec![0; 4]))
                .collect();
            w.write()
        }),
        Case::gguf(
            Class::Gguf,
            "65000 tensors that no model needs",
            Either("within the bounds of a file"),
            || {
                let mut w = valid();
                w.tensors
                    .extend((0..65_000).map(|n| tensor(&format!("t{n}"), &[1], 0, vec![0; 4])));
                w.write()
            },
        ),
    ]);
    for at in 0..valid().tensors.len() {
        let name = valid().tensors[at].name.clone();
        all.push(changed(
            format!("the tensor {name} is missing"),
            Refused,
            move |w| {
                w.tensors.remove(at);
            },
        ));
    }
    all
}

/// Bytes of the data of a valid model.
fn valid_data() -> u64 {
    let padded = |t: &Tensor| t.data.len().next_multiple_of(32) as u64;
    valid().tensors.iter().map(padded).sum()
}

/// The places where one part of the file ends and the next begins.
fn boundaries() -> Vec<(String, usize)> {
    let whole = valid();
    let mut ends = vec![
        ("its magic".to_owned(), 4),
        ("its version".to_owned(), 8),
        ("its number of tensors".to_owned(), 16),
        ("its header".to_owned(), 24),
    ];
    let header = |values: usize, tensors: usize| {
        let mut part = whole.clone();
        part.values.truncate(values);
        part.tensors.truncate(tensors);
        part.tensors.iter_mut().for_each(|t| t.data.clear());
        // Descriptions are followed by padding; one less than a multiple shows where they end.
        part.alignment = 1;
        part.write().len()
    };
    for (at, (key, _)) in whole.values.iter().enumerate() {
        let (start, end) = (header(at, 0), header(at + 1, 0));
        ends.push((format!("the length of the key {key}"), start + 5));
        ends.push((format!("the key {key}"), start + 8 + key.len()));
        if at + 1 < whole.values.len() {
            ends.push((format!("the entry {key}"), end));
        }
        ends.push((format!("the value of {key}, but for a byte"), end - 1));
    }
    for (at, tensor) in whole.tensors.iter().enumerate() {
        let end = header(whole.values.len(), at + 1);
        ends.push((format!("the type of the tensor {}", tensor.name), end - 8));
        ends.push((format!("the description of {}", tensor.name), end));
    }
    let data = whole.write().len() - valid_data() as usize;
    let mut at = data;
    ends.push(("the padding before the data".to_owned(), data));
    for tensor in &whole.tensors {
        ends.push((
            format!("half of the data of {}", tensor.name),
            at + tensor.data.len() / 2,
        ));
        at += tensor.data.len().next_multiple_of(32);
    }
    ends
}

/// GGUF files of all these kinds.
pub fn cases() -> Vec<Case> {
    let cut = |(what, at): (String, usize)| {
        Case::gguf(
            Class::GgufCut,
            format!("it ends after {what}"),
            Refused,
            move || {
                let mut bytes = valid().write();
                bytes.truncate(at);
                bytes
            },
        )
    };
    let cuts = boundaries().into_iter().map(cut);
    let parts = [headers(), metadata(), tensors()];
    parts.into_iter().flatten().chain(cuts).collect()
}
