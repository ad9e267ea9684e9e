//! Every row of the catalogue has a method that makes its node.

use std::collections::BTreeMap;

use hotcell_graph::op::catalogue;

use super::{
    AttentionOptions, ConvOptions, DType, Element, HostTensor, Near, PoolKind, QuantMode, Reduce,
    Resample, RotaryOptions, Scan, Tensor, array::State,
};

/// Rows without a method of [`Tensor`], and why.
const WITHOUT: &[(&str, &str)] = &[
    ("all_gather", "of processes that compute one model together"),
    (
        "literal",
        "numbers in an expression become one; `Session::scalar`",
    ),
    ("arange", "it reads no tensor: `Session::arange`"),
    ("cache_write", "it changes a cache: `Step::write`"),
    ("paged_attention", "it reads a cache: `Step::attend`"),
];

fn host<T: Element + Default>(shape: &[usize]) -> Tensor {
    let values = vec![T::default(); shape.iter().product()];
    Tensor::host(None, HostTensor::from_slice(&values, shape).unwrap(), false)
}

macro_rules! of {
    ($x:expr; $($method:ident),* $(,)?) => { vec![$((stringify!($method), $x.$method())),*] };
    ($x:expr, $y:expr; $($method:ident),* $(,)?) => { vec![$((stringify!($method), $x.$method($y))),*] };
}

/// A row's name, and what the method makes that should have it.
fn made() -> Vec<(&'static str, Tensor)> {
    let (x, y) = (host::<f32>(&[2, 2]), host::<f32>(&[2, 2]));
    let (i, j) = (host::<i32>(&[2, 2]), host::<i32>(&[2, 2]));
    let (at, one) = (host::<i32>(&[2]), host::<f32>(&[]));
    let (key, b) = (host::<u32>(&[2]), host::<bool>(&[2, 2]));
    let cube = host::<f32>(&[1, 2, 3]);
    let (image, kernel) = (host::<f32>(&[1, 1, 4]), host::<f32>(&[1, 1, 2]));
    let heads = host::<f32>(&[1, 2, 3, 4]);
    let experts = host::<f32>(&[2, 2, 3]);
    let (scan, near) = (Scan::default(), Near::default());
    let options = ConvOptions::default();
    let two = vec![x.clone(), y.clone()];
    let mut all = of![x; neg, abs, sign, square, floor, ceil, round, trunc, reciprocal, sqrt, rsqrt, exp, expm1, log, log1p,
        log2, sin, cos, tan, asin, acos, atan, sinh, cosh, tanh, asinh, acosh, atanh, erf, erfinv, sigmoid, silu, logical_not,
        is_nan, is_inf, is_finite, relu, gelu, gelu_tanh, gelu_quick, softplus];
    all.extend(of![x, &y; maximum, minimum, floor_divide, remainder, pow, atan2, logaddexp, equal, not_equal, less,
        less_equal, greater, greater_equal, logical_and, logical_or, logical_xor, swiglu, geglu, matmul, mul_mat]);
    all.extend(of![i, &j; left_shift, right_shift]);
    all.extend([
        ("bitwise_not", i.bitwise_not()),
        ("cast", x.cast(DType::F16)),
        ("add", &x + &y),
        ("sub", &x - &y),
        ("mul", &x * &y),
        ("div", &x / &y),
        ("remainder", &x % &y),
        ("bitwise_and", &i & &j),
        ("bitwise_or", &i | &j),
        ("bitwise_xor", &i ^ &j),
        ("where", x.where_(&b, &y)),
        ("swiglu_limit", x.swiglu_limit(&y, 1.702, 7.0)),
        ("clamp", x.clamp(Some(&one), None)),
        ("is_close", x.is_close(&y, near)),
        ("all_close", x.all_close(&y, near)),
        ("array_equal", x.array_equal(&y, true)),
        ("reduce_sum", x.sum(&[], false)),
        ("reduce_prod", x.prod(&[], false)),
        ("reduce_max", x.max(&[], false)),
        ("reduce_min", x.min(&[], false)),
        ("reduce_all", x.all(&[], false)),
        ("reduce_any", x.any(&[], false)),
        ("argmax", x.argmax(0, false)),
        ("argmin", x.argmin(0, false)),
        ("mean", x.mean(&[], false)),
        ("variance", x.variance(&[], false, 1)),
        ("standard_deviation", x.standard_deviation(&[], false, 1)),
        ("logsumexp", x.logsumexp(&[], false)),
        ("cumsum", x.cumsum(0, scan)),
        ("cumprod", x.cumprod(0, scan)),
        ("cummax", x.cummax(0, false)),
        ("cummin", x.cummin(0, true)),
        ("logcumsumexp", x.logcumsumexp(0, false)),
        ("bitcast", x.view(DType::I32)),
        ("tril", x.tril(0)),
        ("triu", x.triu(1)),
        ("diag", x.diag(-1)),
        ("diagonal", x.diagonal(0, 0, 1)),
        ("roll", x.roll(1, 0)),
        ("as_strided", x.as_strided(&[3], &[1], 1)),
        (
            "slice_update",
            x.slice_update(&one, (&[0, 0], &[1, 2], &[1, 1])),
        ),
        ("slice_dynamic", x.slice_dynamic(&at, &[1, 2])),
        ("slice_update_dynamic", x.slice_update_dynamic(&y, &at)),
        ("einsum", Tensor::einsum("ij,jk->ik", &two)),
        ("im2col", image.im2col(&[2], &options)),
        (
            "col2im",
            host::<f32>(&[1, 2, 3]).col2im(&[4], &[2], &options),
        ),
        (
            "conv_transpose",
            image.conv_transpose(&kernel, None, &options, &[]),
        ),
        (
            "interpolate",
            image.interpolate(&[7], Resample::Linear, false),
        ),
        ("fft", x.fft(0)),
        ("gated_delta", {
            let (keys, one) = (host::<f32>(&[1, 3, 2, 4]), host::<f32>(&[1, 3, 2]));
            keys.gated_delta(&keys, &keys, &one, &one, None).0
        }),
        ("mamba2_scan", {
            let (all, dt) = (host::<f32>(&[1, 3, 2, 4]), host::<f32>(&[1, 3, 2]));
            let a = host::<f32>(&[2]);
            all.mamba2_scan(&dt, &a, &all, &all, Some(&a), None).0
        }),
        ("cholesky", x.cholesky(false)),
        ("qr", x.qr().0),
        ("lu", x.lu().0),
        ("det", x.det()),
        ("solve", x.solve(&y)),
        ("solve_triangular", x.solve_triangular(&y, true)),
        ("svd", x.svd().0),
        ("eigh", x.eigh().0),
        ("eig", x.eig().1),
        (
            "quantize_float",
            host::<f32>(&[2, 64]).quantize_as(QuantMode::Nvfp4).packed,
        ),
        ("quantize", host::<f32>(&[2, 64]).quantize(32, 4).packed),
        (
            "dequantize",
            host::<f32>(&[2, 64]).quantize(32, 4).dequantize(DType::F32),
        ),
        (
            "quantized_matmul",
            host::<f32>(&[2, 64]).quantized_matmul(&host::<f32>(&[3, 64]).quantize(32, 4), true),
        ),
        (
            "gather_qmm",
            host::<f32>(&[1, 2, 64]).gather_qmm(
                &host::<f32>(&[2, 3, 64]).quantize(32, 4),
                None,
                Some(&at),
                true,
            ),
        ),
        ("to_fp8", x.to_fp8()),
        ("from_fp8", host::<u8>(&[2]).from_fp8(DType::F32)),
        (
            "ssm_conv",
            host::<f32>(&[1, 2, 4]).ssm_conv(&host::<f32>(&[2, 3])),
        ),
    ]);
    all.extend([
        ("reshape", x.reshape(&[4])),
        ("transpose", x.transpose(&[])),
        ("broadcast_to", x.broadcast_to(&[3, 2, 2])),
        ("slice", x.narrow(0, 0, 1)),
        ("pad", x.pad(&[1, 0], &[0, 1], None)),
        ("expand_dims", x.expand_dims(&[0])),
        ("squeeze", cube.squeeze(&[0])),
        ("flatten", x.flatten(0, -1)),
        ("tile", x.tile(&[2, 1])),
        ("repeat", x.repeat(2, 0)),
        ("flip", x.flip(&[0])),
        ("concat", Tensor::concat(&two, 0)),
        ("stack", Tensor::stack(&two, 0)),
        ("split", x.split(&[1, 1], 0).swap_remove(1)),
        ("get_rows", x.get_rows(&at)),
        ("take", x.take(&at, 0)),
        ("take_along_axis", x.take_along_axis(&i, 0)),
        ("gather_nd", x.gather_nd(&i, 0)),
        (
            "scatter_along_axis",
            x.scatter_along_axis(&i, &y, 0, Reduce::Add),
        ),
        (
            "scatter_nd",
            x.scatter_nd(&host::<i32>(&[2, 1]), &y, Reduce::Set),
        ),
        (
            "add_id",
            host::<f32>(&[2, 2, 3]).add_id(&host::<f32>(&[2, 3]), &i),
        ),
        ("sort", x.sort(0, false)),
        ("argsort", x.argsort(0, true)),
        ("topk", x.topk(1, 0, true).1),
        (
            "mul_mat_id",
            experts.mul_mat_id(&host::<f32>(&[2, 1, 3]), &i),
        ),
        (
            "mul_mat_scaled",
            x.mul_mat_scaled(&host::<f32>(&[3, 2]), &host::<f32>(&[2, 1]), [2, 2]),
        ),
        (
            "mul_mat_id_scaled",
            experts.mul_mat_id_scaled(
                &host::<f32>(&[2, 1, 3]),
                &i,
                &host::<f32>(&[2, 1, 2]),
                [2, 2],
            ),
        ),
        ("addmm", x.addmm(&x, &y, 1.0, 1.0)),
        ("gather_mm", x.gather_mm(&y, None, None)),
        ("conv", image.conv(&kernel, None, &ConvOptions::default())),
        (
            "pool",
            image.pool(PoolKind::Max, &[2], &ConvOptions::default()),
        ),
    ]);
    all.extend([
        ("random_bits", key.random_bits(&[3])),
        ("random_split", key.random_split(2)),
        ("random_uniform", key.random_uniform(&[3], 0.0, 1.0)),
        ("random_normal", key.random_normal(&[3], 0.0, 1.0)),
        ("random_bernoulli", key.random_bernoulli(&[3], 0.5)),
        ("random_categorical", x.random_categorical(&key, -1, 2)),
        (
            "draw",
            x.draw(&host::<f32>(&[2]), &host::<u32>(&[2, 4]), None),
        ),
        ("rms_norm", x.rms_norm(None, 1e-5)),
        ("layer_norm", x.layer_norm(None, None, 1e-5)),
        ("l2_norm", x.l2_norm(1e-5)),
        ("softmax", x.softmax(-1)),
        ("log_softmax", x.log_softmax(-1)),
        ("group_norm", cube.group_norm(2, None, None, 1e-5)),
        (
            "rotary_embedding",
            heads.rotary_embedding(&host::<i32>(&[3]), &RotaryOptions::default()),
        ),
        (
            "rope",
            heads
                .reshape(&[2, 3, 4])
                .rope(&at, &host::<f32>(&[2]), false),
        ),
        (
            "scaled_dot_product_attention",
            heads.attention(&heads, &heads, &AttentionOptions::default()),
        ),
    ]);
    all
}

#[test]
fn every_row_of_the_catalogue_has_a_method_or_a_reason() {
    let mut missing: BTreeMap<&str, &str> = catalogue().map(|row| (row.name, row.doc)).collect();
    for (name, tensor) in made() {
        tensor.check().unwrap_or_else(|e| panic!("{name}: {e}"));
        let State::Lazy { node, .. } = tensor.state() else {
            panic!("{name} makes no node");
        };
        assert_eq!(node.row.name, name);
        missing.remove(name);
    }
    for (name, why) in WITHOUT {
        assert!(!why.is_empty());
        assert!(missing.remove(name).is_some(), "{name} has a method");
    }
    assert!(missing.is_empty(), "without a method: {:?}", missing.keys());
}

#[test]
fn options_are_what_their_ops_get() {
    let x = host::<f32>(&[1, 2, 3, 4]);
    let attributes = |tensor: Tensor| match tensor.state() {
        State::Lazy { node, .. } => {
            let names = node.row.attributes.iter().map(|a| a.name);
            let shown = node.attributes.iter().map(|a| format!("{a:?}"));
            let pairs: BTreeMap<&str, String> = names.zip(shown).collect();
            (pairs, node.inputs.iter().map(Option::is_some).collect())
        }
        _ => panic!("no node"),
    };
    let options = AttentionOptions {
        scale: 0.5,
        causal: true,
        window: 2,
        soft_cap: 30.0,
        mask: None,
        sinks: Some(host::<f32>(&[2])),
    };
    let (got, inputs): (_, Vec<bool>) = attributes(x.attention(&x, &x, &options));
    assert_eq!(inputs, [true, true, true, false, true]);
    assert_eq!(got["window"], "Int(2)");
    assert_eq!(got["soft_cap"], "Float(30.0)");
    assert_eq!(
        (&*got["scale"], &*got["causal"]),
        ("Float(0.5)", "Bool(true)")
    );
    let scan = Scan {
        exclusive: false,
        reverse: true,
    };
    let (got, _): (_, Vec<bool>) = attributes(x.cumsum(1, scan));
    assert_eq!(got["axis"], "Int(1)");
    assert_eq!(
        (&*got["exclusive"], &*got["reverse"]),
        ("Bool(false)", "Bool(true)")
    );
    let near = Near {
        relative: 0.5,
        absolute: 0.25,
        equal_nan: true,
    };
    let (got, _): (_, Vec<bool>) = attributes(x.is_close(&x, near));
    assert_eq!(
        (&*got["rtol"], &*got["atol"]),
        ("Float(0.5)", "Float(0.25)")
    );
    assert_eq!(got["equal_nan"], "Bool(true)");
    let options = RotaryOptions {
        dims: 2,
        base: 500.0,
        scale: 0.5,
        beta_fast: 3.0,
        beta_slow: 2.0,
        ..RotaryOptions::default()
    };
    let positions = host::<i32>(&[3]);
    let (got, _): (_, Vec<bool>) = attributes(x.rotary_embedding(&positions, &options));
    for (key, value) in [
        ("form", "Name(\"neox\")"),
        ("dims", "Int(2)"),
        ("base", "Float(500.0)"),
        ("scale", "Float(0.5)"),
        ("attention_factor", "Float(1.0)"),
        ("beta_fast", "Float(3.0)"),
        ("beta_slow", "Float(2.0)"),
    ] {
        assert_eq!(got[key], value, "{key}");
    }
}
