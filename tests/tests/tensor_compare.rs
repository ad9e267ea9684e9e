//! Comparing with a file and printing: what is said of each way in which tensors disagree, and the numbers that are shown.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use hotcell_client::{
    Address, Error, Reason,
    tensor::{
        Comparisons, DType, DumpOptions, HostTensor, Session, SessionOptions, Shape, Tensor,
        TensorFile, TensorSpec, Thresholds,
    },
};
use hotcell_tests::cluster::Cluster;

async fn session() -> (Cluster, Session) {
    let cluster = Cluster::ready().await.unwrap();
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    let options = SessionOptions::default();
    let session = Session::open(&address, options).await.unwrap();
    (cluster, session)
}

/// Compares one tensor, in both modes: what is said must be the same, but for the tensor's name in front.
async fn compare(
    file: &Path,
    limits: &Thresholds,
    name: &str,
    tensor: &Tensor,
) -> Result<(), Error> {
    let one = [(name, tensor.clone())];
    let aborting = Tensor::compare_with(&one, file, limits, true).await;
    let telling = Tensor::compare_with(&one, file, limits, false)
        .await
        .unwrap();
    assert_eq!(telling.by_name.len(), 1);
    assert_eq!(telling.by_name[0].0, name);
    let own = telling.by_name[0].1.clone().and_then(|c| c.check(limits));
    match (own, telling.check(limits), aborting) {
        (Ok(()), Ok(()), Ok(all)) => {
            assert_eq!(all.by_name, telling.by_name);
            Ok(())
        }
        (Err(own), Err(of_all), Err(aborted)) => {
            assert_eq!(of_all.message(), format!("{name}: {}", own.message()));
            assert_eq!(of_all.message(), aborted.message());
            assert_eq!(own.reason(), of_all.reason());
            assert_eq!(own.reason(), aborted.reason());
            Err(aborted)
        }
        other => panic!("{name}: the modes differ: {other:?}"),
    }
}

async fn refused(
    file: &Path,
    limits: &Thresholds,
    name: &str,
    tensor: &Tensor,
    reason: Reason,
    what: &str,
) {
    let error = compare(file, limits, name, tensor).await.unwrap_err();
    assert_eq!(error.reason(), reason, "{error:?}");
    assert_eq!(error.message(), format!("{name}: {what}"));
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

/// The reference that the tests compare with.
async fn reference(folder: &Path, session: &Session) -> PathBuf {
    let file = folder.join("reference.safetensors");
    let plain = |values: &[f32]| session.tensor(values, &[values.len()]).unwrap();
    let tensors = [
        ("plain", plain(&[1.0, 2.0, 3.0, 5.0])),
        ("half", plain(&[1.0, 2.0, 3.0, 5.0]).cast(DType::BF16)),
        ("whole", plain(&[1.0, 2.0, 3.0, 5.0]).cast(DType::I64)),
        ("nan", plain(&[1.0, NAN, 3.0, 5.0])),
        ("infinite", plain(&[1.0, INF, 3.0, 5.0])),
        ("zeros", plain(&[0.0; 4])),
    ];
    TensorFile::save(&file, &tensors, None).await.unwrap();
    file
}

#[tokio::test]
async fn what_disagrees_with_a_file_is_named_and_measured_in_both_modes() {
    let (_cluster, session) = session().await;
    let folder = tempfile::tempdir().unwrap();
    let file = reference(folder.path(), &session).await;
    let of = |values: &[f32]| session.tensor(values, &[values.len()]).unwrap();
    let same = of(&[1.0, 2.0, 3.0, 5.0]);
    let default = Thresholds::default();
    let exact = Thresholds {
        cosine: 1.0 - 1e-12,
        max_abs: 0.0,
        max_rel: 0.0,
        nmse: 0.0,
    };
    compare(&file, &exact, "plain", &same).await.unwrap();
    // Numbers count, not what they are kept in: 1, 2, 3 and 5 are the same in all of these.
    for name in ["half", "whole"] {
        compare(&file, &exact, name, &same).await.unwrap();
        compare(&file, &exact, name, &same.cast(DType::F16))
            .await
            .unwrap();
        compare(&file, &exact, "plain", &same.cast(DType::U8))
            .await
            .unwrap();
    }

    // One number is 4 where the file has 5: the cosine is 34 / √(30 · 39), which the usual thresholds let pass.
    let near = of(&[1.0, 2.0, 3.0, 4.0]);
    for (name, tensor) in [("plain", near.clone()), ("half", near.cast(DType::F64))] {
        compare(&file, &default, name, &tensor).await.unwrap();
        let one = [(name, tensor.clone())];
        let told = Tensor::compare_with(&one, &file, &default, false)
            .await
            .unwrap();
        let measured = told.by_name[0].1.clone().unwrap();
        assert!((measured.cosine - 34.0 / (30.0f64 * 39.0).sqrt()).abs() < 1e-12);
        assert_eq!((measured.max_abs, measured.max_rel), (1.0, 0.2));
        assert_eq!((measured.nmse, measured.mismatched), (1.0 / 39.0, 0));
        let far = |change: fn(&mut Thresholds)| {
            let mut limits = default;
            change(&mut limits);
            limits
        };
        for (limits, what) in [
            (
                far(|t| t.cosine = 0.995),
                format!(
                    "the cosine is {}, at least 0.995 is wanted",
                    measured.cosine
                ),
            ),
            (
                far(|t| t.max_abs = 0.5),
                "the greatest difference is 1, at most 0.5 is wanted".to_owned(),
            ),
            (
                far(|t| t.max_rel = 0.1),
                "the greatest relative difference is 0.2, at most 0.1 is wanted".to_owned(),
            ),
            (
                far(|t| t.nmse = 0.02),
                format!(
                    "the normalised square error is {}, at most 0.02 is wanted",
                    1.0 / 39.0
                ),
            ),
        ] {
            refused(&file, &limits, name, &tensor, Reason::NumericsFailed, &what).await;
        }
    }
    // The other way round, and nothing like it.
    let what = "the cosine is -1, at least 0.99 is wanted";
    refused(
        &file,
        &default,
        "half",
        &-&same,
        Reason::NumericsFailed,
        what,
    )
    .await;
    let what = "the cosine is 0, at least 0.99 is wanted";
    refused(
        &file,
        &default,
        "zeros",
        &same,
        Reason::NumericsFailed,
        what,
    )
    .await;

    // What is not a number, or too great for one, on one side only fails whatever is allowed; on both it is the same.
    let loose = Thresholds {
        cosine: -1.0,
        ..default
    };
    let (nan, infinite) = (of(&[1.0, NAN, 3.0, 5.0]), of(&[1.0, INF, 3.0, 5.0]));
    compare(&file, &exact, "nan", &nan).await.unwrap();
    compare(&file, &exact, "nan", &nan.cast(DType::F16))
        .await
        .unwrap();
    compare(&file, &exact, "infinite", &infinite).await.unwrap();
    let minus = of(&[1.0, -INF, 3.0, 5.0]);
    for (name, ours, count) in [
        ("nan", &same, 1),
        ("plain", &nan, 1),
        ("whole", &nan, 1),
        ("infinite", &nan, 1),
        ("nan", &infinite, 1),
        ("infinite", &same, 1),
        ("infinite", &minus, 1),
        // A NaN elsewhere is two: one that is missing and one that is too many.
        ("nan", &of(&[NAN, 2.0, 3.0, 5.0]), 2),
        ("plain", &of(&[NAN; 4]), 4),
    ] {
        let what = format!("{count} elements are NaN or infinite on one side only");
        refused(&file, &loose, name, ours, Reason::NumericsFailed, &what).await;
    }

    // What cannot be compared.
    let what = "the shape is [2, 2], the reference's [4]";
    let square = same.reshape(&[2, 2]);
    refused(
        &file,
        &loose,
        "plain",
        &square,
        Reason::InvalidArgument,
        what,
    )
    .await;
    let what = "the shape is [3], the reference's [4]";
    let short = of(&[1.0, 2.0, 3.0]);
    refused(&file, &loose, "half", &short, Reason::InvalidArgument, what).await;
    let what = "the file has no tensor \"Plain\"";
    refused(&file, &loose, "Plain", &same, Reason::InvalidArgument, what).await;
    let what = "q8_0 elements are packed; cast the tensor to f32 first";
    let spec = TensorSpec::new(DType::Q8_0, Shape::fixed(&[4, 32]).unwrap()).unwrap();
    let zeros = vec![0; spec.bytes(0).unwrap()];
    let packed = session.host(HostTensor::new(spec, zeros).unwrap());
    let file_of_32 = folder.path().join("wide.safetensors");
    let wide = [("wide", session.zeros(DType::F32, &[4, 32]))];
    TensorFile::save(&file_of_32, &wide, None).await.unwrap();
    refused(
        &file_of_32,
        &loose,
        "wide",
        &packed,
        Reason::InvalidArgument,
        what,
    )
    .await;
    compare(&file_of_32, &exact, "wide", &packed.cast(DType::F32))
        .await
        .unwrap();
    // What cannot be computed says why.
    let at = session.tensor(&[7i64], &[1]).unwrap();
    let error = compare(&file, &loose, "plain", &same.take(&at, 0)).await;
    assert_eq!(error.unwrap_err().reason(), Reason::IndexOutOfRange);
    // No file at all is an error of both modes.
    for abort in [true, false] {
        let none = folder.path().join("none");
        let all = Tensor::compare_with(&wide, &none, &loose, abort).await;
        let error = all.unwrap_err();
        assert_eq!(error.reason(), Reason::FileNotFound, "{error:?}");
        assert!(error.message().contains("none.safetensors"), "{error:?}");
    }
}

#[tokio::test]
async fn of_many_tensors_the_first_that_disagrees_ends_it_or_all_are_told() {
    let (_cluster, session) = session().await;
    let folder = tempfile::tempdir().unwrap();
    let file = reference(folder.path(), &session).await;
    let of = |values: &[f32]| session.tensor(values, &[values.len()]).unwrap();
    let same = of(&[1.0, 2.0, 3.0, 5.0]);
    let limits = Thresholds::default();
    // Not in the order of their names.
    let tensors = [
        ("whole", same.reshape(&[4, 1])),
        ("plain", -&same),
        ("missing", same.clone()),
        ("half", same.clone()),
    ];
    let all = Tensor::compare_with(&tensors, &file, &limits, false)
        .await
        .unwrap();
    let said = |all: &Comparisons| -> Vec<(String, Option<Reason>)> {
        let each = all.by_name.iter().map(|(name, compared)| {
            let checked = compared.clone().and_then(|c| c.check(&limits));
            (name.clone(), checked.err().map(|e| e.reason()))
        });
        each.collect()
    };
    assert_eq!(
        said(&all),
        [
            ("half".to_owned(), None),
            ("missing".to_owned(), Some(Reason::InvalidArgument)),
            ("plain".to_owned(), Some(Reason::NumericsFailed)),
            ("whole".to_owned(), Some(Reason::InvalidArgument)),
        ]
    );
    let first = all.check(&limits).unwrap_err();
    assert_eq!(
        first.message(),
        "missing: the file has no tensor \"missing\""
    );
    let aborted = Tensor::compare_with(&tensors, &file, &limits, true).await;
    assert_eq!(aborted.unwrap_err().message(), first.message());
    // Those after it are not computed.
    let never = &same + 2.0;
    let ended = [("missing", same.clone()), ("plain", never.clone())];
    for abort in [true, false] {
        let all = Tensor::compare_with(&ended, &file, &limits, abort).await;
        assert_eq!(all.is_err(), abort);
        assert_eq!(never.is_evaluated(), !abort);
    }
}

/// All digits that any of these numbers has, which are dyadic fractions.
const EXACT: DumpOptions = DumpOptions {
    precision: 24,
    threshold: 1000,
    edge_items: 3,
};

/// A row as it should be printed.
fn row(values: &[f64], digits: usize) -> String {
    let one = |v: &f64| match v.is_sign_negative() {
        true => format!("{v:.digits$}"),
        false => format!(" {v:.digits$}"),
    };
    let all: Vec<String> = values.iter().map(one).collect();
    format!("[{}]", all.join(", "))
}

#[tokio::test]
async fn halves_are_printed_as_the_numbers_that_they_are() {
    let (_cluster, session) = session().await;
    let values = [0.1f32, -2.5, 65504.0, 1.0 / 3.0, -0.0, 6.0e-8, 3.0e38];
    let x = session.tensor(&values, &[values.len()]).unwrap();
    let text = x.cast(DType::F16).dump(EXACT).await.unwrap();
    let halves = values.map(|v| f16::from_f32(v).to_f64());
    assert_eq!(text, row(&halves, 24));
    // By hand: 0.1 is 1638.4 / 2¹⁴, and the last is too great.
    assert!(
        text.starts_with("[ 0.099975585937500000000000, -2.5"),
        "{text}"
    );
    assert!(text.ends_with("inf]"), "{text}");
    let text = x.cast(DType::BF16).dump(EXACT).await.unwrap();
    assert_eq!(text, row(&values.map(|v| bf16::from_f32(v).to_f64()), 24));
    assert!(
        text.starts_with("[ 0.100097656250000000000000, -2.5"),
        "{text}"
    );
    // On the worker or in this process, it is the same text.
    for dtype in [DType::F16, DType::BF16] {
        let cast = x.cast(dtype);
        let here = cast.fetch().await.unwrap().dump(EXACT).unwrap();
        assert_eq!(cast.dump(EXACT).await.unwrap(), here);
        let wide = cast.cast(DType::F64).dump(EXACT).await.unwrap();
        assert_eq!(wide, here);
    }
    let text = x.cast(DType::BF16).dump(DumpOptions::default()).await;
    assert!(
        text.unwrap()
            .starts_with("[ 0.1001, -2.5000,  65536.0000, ")
    );
}

#[tokio::test]
async fn packed_numbers_are_printed_as_what_they_stand_for() {
    let (_cluster, session) = session().await;
    let scales = [0.5f32, -0.037].map(f16::from_f32);
    // A block of q8_0 is a scale and 32 bytes; of q4_0 a scale and 16 bytes, whose low halves are the first 16 numbers and
    // whose high halves the others, each less 8.
    let wide = |i: usize| (i as i32 * 37 % 256 - 128) as i8;
    let narrow = |i: usize| (i * 7 % 16) as u8;
    let (mut q8, mut q4) = (Vec::new(), Vec::new());
    let (mut of_q8, mut of_q4) = (Vec::new(), Vec::new());
    for (b, scale) in scales.iter().enumerate() {
        q8.extend(scale.to_le_bytes());
        q8.extend((0..32).map(|i| wide(b * 5 + i) as u8));
        of_q8.extend((0..32).map(|i| scale.to_f64() * f64::from(wide(b * 5 + i))));
        q4.extend(scale.to_le_bytes());
        q4.extend((0..16).map(|i| narrow(b + i) | narrow(b + i + 16) << 4));
        of_q4.extend((0..32).map(|i| scale.to_f64() * (f64::from(narrow(b + i)) - 8.0)));
    }
    for (dtype, bytes, numbers) in [(DType::Q8_0, q8, of_q8), (DType::Q4_0, q4, of_q4)] {
        let spec = TensorSpec::new(dtype, Shape::fixed(&[2, 32]).unwrap()).unwrap();
        let host = HostTensor::new(spec, bytes).unwrap();
        let there = session.upload(&host).await.unwrap();
        let expected = format!(
            "[{},\n {}]",
            row(&numbers[..32], 24),
            row(&numbers[32..], 24)
        );
        assert_eq!(there.dump(EXACT).await.unwrap(), expected, "{dtype}");
        // Not sent yet, and unpacked before.
        let local = session.host(host.clone());
        assert_eq!(local.dump(EXACT).await.unwrap(), expected, "{dtype}");
        let cast = there.cast(DType::F32).fetch().await.unwrap();
        assert_eq!(cast.dump(EXACT).unwrap(), expected, "{dtype}");
        let error = host.dump(EXACT).unwrap_err();
        assert_eq!(error.reason(), Reason::InvalidArgument, "{error:?}");
        let say = format!("{dtype} elements are packed");
        assert!(error.message().starts_with(&say), "{error:?}");
        // The tensor is as it was.
        assert_eq!(there.fetch().await.unwrap(), host);
    }
}
