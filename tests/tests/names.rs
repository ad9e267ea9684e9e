//! `docs/coming-from.md`: no name of the lists lacks a line, and every name of ours that it says exists.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{collections::BTreeSet, path::Path};

use hotcell_client::{
    Address, Client, Reason,
    tensor::{
        AttentionOptions, Backend, BackendParams, Compiled, ConvOptions, DType, DeviceMemory,
        DumpOptions, Event, FlashAttention, HostTensor, Norm, Placement, Quantized, RotaryOptions,
        Session, SessionOptions, SharedTensor, Spread, Step, Stream, Tensor, TensorFile,
        TensorSpec, Thresholds,
    },
};
use hotcell_tests::names::Names;

/// Names that have no counterpart yet. Only ever fewer.
const WITHOUT: usize = 0;

/// Types and methods, which the compiler has to find, by the names that a page calls them.
macro_rules! exist {
    (types: $($type:ident)*; $($of:ident: $($method:ident)*;)*) => {{
        $(let _ = size_of::<$type>();)*
        $($(let _ = $of::$method;)*)*
        let types: &[&str] = &[$(stringify!($type)),*];
        let methods: &[&str] = &[$($(concat!(stringify!($of), "::", stringify!($method))),*),*];
        [types, methods].concat()
    }};
}

/// Those whose parameters the compiler has to be told.
fn generic() -> Vec<&'static str> {
    let _ = Tensor::to_vec::<f32>;
    let _ = Tensor::item::<f32>;
    let _ = Session::tensor::<f32>;
    let _ = Session::full::<f32>;
    let _ = Session::scalar::<f32>;
    let _ = |s: &Session| s.compile(<[Tensor]>::to_vec);
    let _ = |s: &Session| s.compile_shapeless(<[Tensor]>::to_vec);
    let _ = |path: &Path| HostTensor::load_npy(path).is_ok();
    let _ = |spec: TensorSpec| HostTensor::new(spec, vec![0u8]).is_ok();
    let _ = async |t: &Tensor| t.write(0, vec![0u8]).await.is_ok();
    let _ = Reason::OutOfMemory;
    vec![
        "Tensor::to_vec",
        "Tensor::item",
        "Session::tensor",
        "Session::full",
        "Session::scalar",
        "Session::compile",
        "Session::compile_shapeless",
        "HostTensor::load_npy",
        "HostTensor::new",
        "Tensor::write",
        "Reason::OutOfMemory",
    ]
}

fn existing() -> BTreeSet<String> {
    let mut known = exist! {
        types: AttentionOptions BackendParams ConvOptions DType DumpOptions FlashAttention Norm Placement Reason RotaryOptions SessionOptions SharedTensor Step Thresholds;
        Address: from_environment;
        Backend: describe get memory open reserve weights;
        Client: devices inspect load load_progress trace_worker unload workers;
        Compiled: call call_eval reserve;
        DType: block_bytes name;
        DeviceMemory: total;
        Event: synchronize;
        Quantized: dequantize;
        Session: arange async_eval cache clear_cache empty eval host keep linspace list memory name numerics ones open pipeline random_key reset_peak_memory set_cache_limit set_memory_limit shared stream synchronize tri upload zeros;
        Spread: open set_offload;
        Stream: record synchronize wait;
        Tensor: abs add_id addmm all_close argmax argsort array_equal as_strided attention bitwise_not broadcast_to cast check cholesky cholesky_inv clamp compare_with concat conv conv_transpose cos cummax cummin cumprod cumsum diag diagonal dtype dump eig eigh einsum equal erf erfinv eval exp expand_dims fetch fetch_into fetch_range fft fftn flatten floor floor_divide from_fp8 gated_delta gather_mm gather_qmm geglu gelu gelu_quick gelu_tanh get_rows glu greater greater_equal ifft ifftn im2col interpolate inv irfft irfftn is_close kron l2_norm layer_norm left_shift less less_equal log log1p logaddexp logcumsumexp logical_and logsumexp lu mamba2_scan matmul max maximum mean median meshgrid min minimum mul_mat mul_mat_id narrow nbytes neg norm outer pad pinv pool pow put_along_axis qr quantile quantize quantize_as quantized_matmul random_bernoulli random_bits random_categorical random_normal random_split random_uniform rank relu repeat reshape rfft rfftn right_shift rms_norm roll rotary_embedding rsqrt scatter_along_axis scatter_nd shape sigmoid silu sin size slice slice_dynamic slice_update slice_update_dynamic softmax softplus solve solve_triangular sort split sqrt square squeeze ssm_conv stack standard_deviation sum svd swiglu swiglu_limit take take_along_axis tanh tile to_fp8 topk trace transpose tri_inv tril triu variance view where_;
        TensorFile: count get metadata open save;
    };
    known.extend(generic());
    known.into_iter().map(str::to_owned).collect()
}

#[test]
fn every_name_of_the_lists_has_one_line_and_every_line_such_names() {
    let names = Names::read().unwrap();
    let said: BTreeSet<_> = names.said.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(said.len(), names.said.len(), "a name has two lines");
    let unsaid: Vec<_> = names.listed.difference(&said).collect();
    assert!(unsaid.is_empty(), "no line of {unsaid:?}");
    let strangers: Vec<_> = said.difference(&names.listed).collect();
    assert!(strangers.is_empty(), "in no list: {strangers:?}");
    assert!(names.listed.len() > 500, "{}", names.listed.len());
}

#[test]
fn every_name_of_ours_exists() {
    let (names, known) = (Names::read().unwrap(), existing());
    let unknown: Vec<_> = names.ours.difference(&known).collect();
    assert!(
        unknown.is_empty(),
        "written nowhere in this test: {unknown:?}"
    );
    let unused: Vec<_> = known.difference(&names.ours).collect();
    assert!(unused.is_empty(), "no line says {unused:?}");
}

#[test]
fn names_without_a_counterpart_are_only_ever_fewer() {
    let missing = Names::read().unwrap().missing();
    assert_eq!(missing.len(), WITHOUT, "{missing:?}");
}
