//! Files built byte by byte: what is read, and what is refused.

use super::*;
use crate::format::gguf_testing::{Tensor, Value, Writer, model, small};

fn error(writer: Writer) -> GgufError {
    Gguf::parse(&writer.write()).expect_err("must not parse")
}

fn with_tensor(change: impl FnOnce(&mut Tensor)) -> GgufError {
    let mut writer = small();
    change(&mut writer.tensors[1]);
    error(writer)
}

#[test]
fn a_small_file_reads_back() {
    let bytes = small().write();
    let gguf = Gguf::parse(&bytes).expect("valid");
    let metadata = gguf.metadata(&bytes);
    assert_eq!((gguf.version(), gguf.alignment()), (3, 32));
    assert_eq!(metadata.get_str("general.architecture"), Ok(Some("llama")));
    assert_eq!(metadata.get_u32("a.u8"), Ok(Some(7)));
    assert_eq!(metadata.get_u64("a.u64"), Ok(Some(1 << 40)));
    assert_eq!(metadata.get_f32("a.f32"), Ok(Some(0.5)));
    assert_eq!(metadata.get_bool("a.bool"), Ok(Some(true)));
    assert_eq!(metadata.get_u32("absent"), Ok(None));
    let tokens = metadata
        .get_strings("tokenizer.ggml.tokens")
        .expect("strings")
        .expect("present");
    assert_eq!(tokens.len(), 3);
    assert_eq!(
        tokens.map(|t| t.expect("UTF-8")).collect::<Vec<_>>(),
        ["a", "ö", ""]
    );
    let scores = metadata
        .get_floats("tokenizer.ggml.scores")
        .expect("floats")
        .expect("present");
    assert_eq!(scores.collect::<Vec<_>>(), [0.0, -1.5, 2.0]);
    let types = metadata
        .get_ints("tokenizer.ggml.token_type")
        .expect("ints")
        .expect("present");
    assert_eq!(types.len(), 3);
    assert_eq!(types.collect::<Vec<_>>(), [1, 3, -1]);

    let [w, q, x] = gguf.tensors() else {
        panic!("three tensors")
    };
    assert_eq!(
        (w.name.as_str(), &w.dtype, w.shape.as_slice()),
        ("w", &StoredDType::Known(DType::F32), &[2, 3][..])
    );
    assert_eq!(bytes[w.range.clone()], (0..24).collect::<Vec<u8>>());
    assert_eq!(
        (&q.dtype, q.range.len()),
        (&StoredDType::Known(DType::Q8_0), 136)
    );
    assert_eq!(
        (&x.dtype, &bytes[x.range.clone()]),
        (&StoredDType::Other("q8_1".into()), &[2u8; 36][..])
    );
}

#[test]
fn getters_refuse_other_types_and_values_that_do_not_fit() {
    let bytes = small().write();
    let gguf = Gguf::parse(&bytes).expect("valid");
    let metadata = gguf.metadata(&bytes);
    let message = |error: GgufError| error.to_string();
    assert_eq!(
        metadata.get_u32("a.f32").map_err(message),
        Err("metadata key 'a.f32' is of type f32 but should be an integer".into())
    );
    assert_eq!(
        metadata.get_u32("a.i32").map_err(message),
        Err("metadata key 'a.i32' does not fit into u64".into())
    );
    assert_eq!(
        metadata.get_u32("a.u64").map_err(message),
        Err("metadata key 'a.u64' does not fit into u32".into())
    );
    assert!(metadata.get_f32("a.u8").is_err());
    assert!(metadata.get_bool("a.u8").is_err());
    assert!(metadata.get_str("a.u8").is_err());
    assert!(metadata.get_array("a.u8").is_err());
    assert!(metadata.get_strings("tokenizer.ggml.scores").is_err());
    assert!(metadata.get_floats("tokenizer.ggml.token_type").is_err());
    assert!(metadata.get_ints("tokenizer.ggml.tokens").is_err());
}

#[test]
fn a_file_changed_behind_the_index_gives_errors_not_wild_reads() {
    let bytes = small().write();
    let gguf = Gguf::parse(&bytes).expect("valid");
    for shorter in [0, 10, bytes.len() / 2] {
        let metadata = gguf.metadata(&bytes[..shorter]);
        let _ = metadata.get_str("general.architecture");
        let tokens = metadata
            .get_strings("tokenizer.ggml.tokens")
            .expect("strings")
            .expect("present");
        assert!(tokens.last().is_some_and(|last| last.is_err()) || shorter > 100);
    }
    let ones = vec![0xff; bytes.len()];
    let metadata = gguf.metadata(&ones);
    assert!(metadata.get_str("general.architecture").is_err());
    let mut tokens = metadata
        .get_strings("tokenizer.ggml.tokens")
        .expect("strings")
        .expect("present");
    assert!(tokens.next().is_some_and(|token| token.is_err()));
    assert!(tokens.next().is_none());
}

#[test]
fn truncation_at_every_byte_is_an_error() {
    for bytes in [small().write(), model("qwen3").write()] {
        assert!(Gguf::parse(&bytes).is_ok());
        for len in 0..bytes.len() {
            let error = Gguf::parse(&bytes[..len]).expect_err("truncated");
            assert!(
                matches!(
                    error,
                    GgufError::Truncated { .. } | GgufError::PastEnd { .. }
                ),
                "{len}: {error}"
            );
        }
    }
}

#[test]
fn bad_headers_are_named() {
    assert_eq!(
        error(Writer {
            magic: *b"GGJT",
            ..small()
        }),
        GgufError::BadMagic
    );
    for version in [0, 1, 4, u32::MAX] {
        let found = error(Writer { version, ..small() });
        assert_eq!(found, GgufError::UnsupportedVersion { version });
    }
    for version in [2u32, 3] {
        assert!(Gguf::parse(&Writer { version, ..small() }.write()).is_ok());
        let swapped = Writer {
            version: version.swap_bytes(),
            ..small()
        };
        assert_eq!(error(swapped), GgufError::BigEndian);
    }
    for count in [limits::TENSORS + 1, u64::MAX] {
        let what = "tensors";
        let found = error(Writer {
            n_tensors: Some(count),
            ..small()
        });
        assert_eq!(
            found,
            GgufError::TooMany {
                what,
                count,
                limit: limits::TENSORS
            }
        );
        let what = "metadata entries";
        let found = error(Writer {
            n_kv: Some(count),
            ..small()
        });
        assert_eq!(
            found,
            GgufError::TooMany {
                what,
                count,
                limit: limits::GGUF_KEYS
            }
        );
    }
    assert!(
        Gguf::parse(
            &Writer {
                n_tensors: Some(4),
                ..small()
            }
            .write()
        )
        .is_err()
    );
    assert!(
        Gguf::parse(
            &Writer {
                n_kv: Some(10),
                ..small()
            }
            .write()
        )
        .is_err()
    );
    assert!(
        Gguf::parse(&Writer::default().write()).is_ok(),
        "an empty file is well formed"
    );
}

#[test]
fn bad_metadata_is_named() {
    let raw = |kind, bytes: &[u8]| error(small().value("k", Value::Raw(kind, bytes.to_vec())));
    let key = || "'k'".to_owned();
    assert_eq!(
        raw(13, &[0; 8]),
        GgufError::UnknownValueType { key: key(), id: 13 }
    );
    assert_eq!(
        raw(u32::MAX, &[0; 8]),
        GgufError::UnknownValueType {
            key: key(),
            id: u32::MAX
        }
    );
    assert_eq!(raw(7, &[2]), GgufError::BadBool { key: key() });
    assert_eq!(
        raw(8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]),
        GgufError::NotUtf8 {
            what: "the value of metadata key 'k'".into()
        }
    );
    let array = |element: u32, len: u64, rest: &[u8]| {
        let mut bytes = element.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(rest);
        raw(9, &bytes)
    };
    assert_eq!(array(9, 1, &[0; 20]), GgufError::NestedArray { key: key() });
    assert_eq!(
        array(13, 1, &[0; 20]),
        GgufError::UnknownValueType { key: key(), id: 13 }
    );
    assert_eq!(array(7, 2, &[1, 3]), GgufError::BadBool { key: key() });
    assert!(matches!(
        array(10, 1 << 24, &[0; 8]),
        GgufError::Truncated { .. }
    ));
    assert!(matches!(
        array(8, 1 << 24, &[0; 8]),
        GgufError::Truncated { .. } | GgufError::TooLong { .. }
    ));
    assert!(matches!(
        array(0, (1 << 24) + 1, &[]),
        GgufError::TooLong { .. }
    ));
    assert!(matches!(
        array(10, u64::MAX, &[]),
        GgufError::TooLong { .. }
    ));
    for len in [limits::GGUF_STRING_BYTES + 1, u64::MAX] {
        assert!(matches!(
            raw(8, &len.to_le_bytes()),
            GgufError::TooLong { .. }
        ));
    }
    assert!(matches!(
        raw(8, &1000u64.to_le_bytes()),
        GgufError::Truncated { .. } | GgufError::TooLong { .. }
    ));

    assert_eq!(
        error(small().value("", Value::U8(0))),
        GgufError::EmptyKey { index: 9 }
    );
    assert_eq!(
        error(small().value("a.u8", Value::U8(0))),
        GgufError::DuplicateKey {
            key: "'a.u8'".into()
        }
    );
    let long = "k".repeat(65_536);
    assert!(matches!(
        error(small().value(&long, Value::U8(0))),
        GgufError::TooLong { len: 65_536, .. }
    ));
    let mut bytes = Writer::default().write();
    bytes[16] = 1;
    bytes.extend(u64::MAX.to_le_bytes());
    assert!(matches!(
        Gguf::parse(&bytes),
        Err(GgufError::TooLong { len: u64::MAX, .. })
    ));
    bytes.truncate(24);
    bytes.extend([2, 0, 0, 0, 0, 0, 0, 0, 0xc3, 0x28]);
    assert!(matches!(
        Gguf::parse(&bytes),
        Err(GgufError::NotUtf8 { .. })
    ));
}

#[test]
fn strings_of_the_tokenizer_may_be_longer() {
    let text = "x".repeat(limits::GGUF_STRING_BYTES as usize + 1);
    let long = |key: &str| Gguf::parse(&small().value(key, Value::Str(text.clone())).write());
    assert!(long("tokenizer.huggingface.json").is_ok());
    assert!(matches!(
        long("general.name"),
        Err(GgufError::TooLong { .. })
    ));
}

#[test]
fn alignment_must_be_a_sensible_u32() {
    let aligned = |value| error(small().value("general.alignment", value));
    assert_eq!(
        aligned(Value::U64(32)),
        GgufError::AlignmentType { found: "u64" }
    );
    assert_eq!(
        aligned(Value::I32(32)),
        GgufError::AlignmentType { found: "i32" }
    );
    assert_eq!(
        aligned(Value::Str("32".into())),
        GgufError::AlignmentType { found: "string" }
    );
    let limit = limits::GGUF_ALIGNMENT;
    for alignment in [0, 3, 48, 1 << 31, u32::MAX] {
        assert_eq!(
            aligned(Value::U32(alignment)),
            GgufError::BadAlignment { alignment, limit }
        );
    }
    // The tensors were laid out for another alignment.
    assert!(matches!(
        aligned(Value::U32(64)),
        GgufError::UnalignedOffset { .. }
    ));
    for alignment in [1u32, 64, 4096] {
        let writer = Writer {
            alignment: alignment as usize,
            ..small()
        };
        let bytes = writer
            .value("general.alignment", Value::U32(alignment))
            .write();
        let gguf = Gguf::parse(&bytes).expect("valid");
        assert_eq!(
            bytes[gguf.tensors()[0].range.clone()],
            (0..24).collect::<Vec<u8>>()
        );
    }
}

#[test]
fn bad_tensors_are_named() {
    let name = || "'q'".to_owned();
    assert_eq!(
        with_tensor(|t| t.name.clear()),
        GgufError::EmptyTensorName { index: 1 }
    );
    assert!(matches!(
        with_tensor(|t| t.name = "q".repeat(64)),
        GgufError::TooLong { len: 64, .. }
    ));
    assert_eq!(
        with_tensor(|t| t.name = "w".into()),
        GgufError::DuplicateTensor { name: "'w'".into() }
    );
    for dimensions in [5, u32::MAX] {
        let found = with_tensor(|t| t.n_dims = Some(dimensions));
        assert_eq!(
            found,
            GgufError::TooManyDimensions {
                name: name(),
                dimensions,
                limit: 4
            }
        );
    }
    assert_eq!(
        with_tensor(|t| t.dims[0] = -32i64 as u64),
        GgufError::NegativeDimension {
            name: name(),
            dimension: -32
        }
    );
    assert_eq!(
        with_tensor(|t| t.dims[0] = 0),
        GgufError::NoElements { name: name() }
    );
    assert_eq!(
        with_tensor(|t| t.dims[1] = 0),
        GgufError::NoElements { name: name() }
    );
    let overflow = || GgufError::SizeOverflow { name: name() };
    assert_eq!(with_tensor(|t| t.dims = vec![1 << 32, 1 << 32]), overflow());
    assert_eq!(with_tensor(|t| t.dims = vec![1 << 62, 2, 2, 2]), overflow());
    // The product fits, the bytes do not; CVE-2026-33298.
    assert_eq!(
        with_tensor(|t| {
            t.dims = vec![1 << 62];
            t.kind = 0
        }),
        overflow()
    );
    assert_eq!(
        with_tensor(|t| {
            t.dims = vec![1 << 61];
            t.kind = 0
        }),
        overflow()
    );
    for id in [4, 5, 31, 32, 33, 36, 37, 38] {
        assert_eq!(
            with_tensor(|t| t.kind = id),
            GgufError::RemovedType { name: name(), id }
        );
    }
    for id in [42, 1000, u32::MAX] {
        assert_eq!(
            with_tensor(|t| t.kind = id),
            GgufError::UnknownType { name: name(), id }
        );
    }
    assert_eq!(
        with_tensor(|t| t.dims = vec![33, 2]),
        GgufError::PartialBlock {
            name: name(),
            row: 33,
            block: 32,
            dtype: "q8_0"
        }
    );
    // The elements fill whole blocks but the rows do not.
    assert_eq!(
        with_tensor(|t| t.dims = vec![2, 64]),
        GgufError::PartialBlock {
            name: name(),
            row: 2,
            block: 32,
            dtype: "q8_0"
        }
    );
    assert_eq!(
        with_tensor(|t| t.n_dims = Some(0))
            .to_string()
            .split_whitespace()
            .next(),
        Some("tensor"),
        "dimensions then read as a type"
    );
}

#[test]
fn tensors_must_lie_in_the_file_apart_from_each_other() {
    let name = || "'q'".to_owned();
    assert_eq!(
        with_tensor(|t| t.offset = Some(33)),
        GgufError::UnalignedOffset {
            name: name(),
            offset: 33,
            alignment: 32
        }
    );
    for offset in [1 << 20, u64::MAX - 31, 1 << 63, (1 << 63) - 32] {
        assert_eq!(
            with_tensor(|t| t.offset = Some(offset)),
            GgufError::PastEnd {
                name: name(),
                offset,
                size: 136
            }
        );
    }
    assert_eq!(
        with_tensor(|t| t.offset = Some(0)),
        GgufError::Overlap {
            first: "'w'".into(),
            second: name()
        }
    );
    // Bleeding Llama: a size far past the end.
    assert!(matches!(
        with_tensor(|t| t.dims[1] = 1 << 30),
        GgufError::PastEnd { .. }
    ));
    // The data ends one byte early.
    let mut bytes = small().write();
    bytes.pop();
    assert!(matches!(
        Gguf::parse(&bytes),
        Err(GgufError::PastEnd { .. })
    ));
    // Order is free, gaps are too.
    let mut writer = small();
    writer.tensors.swap(0, 2);
    writer.tensors[0].offset = Some(32);
    writer.tensors[2].offset = Some(0);
    writer.tensors[1].offset = Some(96);
    let mut bytes = writer.write();
    bytes.extend([0; 256]);
    assert!(Gguf::parse(&bytes).is_ok());
}

#[test]
fn names_from_the_file_are_escaped_and_cut_in_messages() {
    let key = format!("\x1b[31m{}", "k".repeat(1000));
    let message = error(small().value(&key, Value::Raw(99, vec![]))).to_string();
    assert!(message.len() < 200, "{message}");
    assert!(!message.contains('\x1b'));
}

#[test]
fn errors_are_grouped_by_what_the_user_can_do() {
    let group = |error: GgufError| error.in_file("m.gguf");
    assert!(matches!(
        group(GgufError::BadMagic),
        ModelError::NotAModel { .. }
    ));
    assert!(matches!(
        group(GgufError::BigEndian),
        ModelError::Unsupported { .. }
    ));
    assert!(matches!(
        group(GgufError::UnsupportedVersion { version: 1 }),
        ModelError::Unsupported { .. }
    ));
    let limit = GgufError::TooMany {
        what: "tensors",
        count: 9,
        limit: 8,
    };
    assert!(matches!(group(limit), ModelError::TooLarge { .. }));
    let corrupt = group(GgufError::NoElements { name: "'x'".into() });
    assert_eq!(
        corrupt.to_string(),
        "m.gguf is damaged: tensor 'x' has no elements"
    );
}

#[test]
fn every_type_has_a_block() {
    for id in 0..64 {
        if let Ok((_, name, block, bytes)) = tensor_type("t", id) {
            assert!(block > 0 && bytes > 0, "{name}");
        }
    }
    let known = DType::ALL.iter().filter_map(|dtype| dtype.gguf_id());
    let other = OTHER_TYPES.iter().map(|row| row.0);
    let ids: Vec<u32> = known
        .chain(other)
        .chain(REMOVED_TYPES.iter().copied())
        .collect();
    let unique: BTreeSet<u32> = ids.iter().copied().collect();
    assert!(
        (0..42).all(|id| unique.contains(&id)),
        "every id up to 41 is known, other or removed"
    );
}
