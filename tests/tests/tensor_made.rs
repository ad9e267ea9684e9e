//! Methods of tensors that are made of others, on a worker: values by hand, and by NumPy where it is said.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_client::{
    Address, Reason,
    tensor::{ConvOptions, DType, Layout, Norm, QuantMode, Session, SessionOptions, Tensor},
};
use hotcell_tests::cluster::Cluster;

async fn session(cluster: &Cluster) -> Session {
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    Session::open(&address, SessionOptions::default())
        .await
        .unwrap()
}

async fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec::<f32>().await.unwrap()
}

async fn near(tensor: &Tensor, expected: &[f32]) {
    let got = floats(tensor).await;
    assert_eq!(got.len(), expected.len(), "{got:?}");
    for (a, b) in got.iter().zip(expected) {
        assert!(
            (a - b).abs() <= 1e-5 * b.abs().max(1.0),
            "{got:?}, not {expected:?}"
        );
    }
}

#[tokio::test]
async fn tensors_are_made_by_place() {
    let cluster = Cluster::ready().await.unwrap();
    let s = session(&cluster).await;
    assert_eq!(
        floats(&s.linspace(1.0, 3.0, 5, DType::F32)).await,
        [1.0, 1.5, 2.0, 2.5, 3.0]
    );
    assert_eq!(floats(&s.linspace(7.0, 9.0, 1, DType::F32)).await, [7.0]);
    let tri = s.tri(2, 3, 1, DType::F32);
    assert_eq!(floats(&tri).await, [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]);
    let eye = s.eye(2, 3, -1, DType::I32);
    assert_eq!(eye.to_vec::<i32>().await.unwrap(), [0, 0, 0, 1, 0, 0]);
    let at = s.tensor(&[2i32, 0], &[2]).unwrap();
    let hot = at.one_hot(3, DType::F32);
    assert_eq!(floats(&hot).await, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
    let a = s.tensor(&[1.0f32, 2.0], &[2]).unwrap();
    let b = s.tensor(&[3.0f32, 4.0, 5.0], &[3]).unwrap();
    let outer = a.outer(&b);
    assert_eq!(floats(&outer).await, [3.0, 4.0, 5.0, 6.0, 8.0, 10.0]);
    assert_eq!(floats(&a.kron(&b)).await, [3.0, 4.0, 5.0, 6.0, 8.0, 10.0]);
    let m = s.tensor(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let kron = m.kron(&s.eye(2, 2, 0, DType::F32));
    let expected = [
        1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 4.0, 0.0, 0.0, 3.0, 0.0, 4.0,
    ];
    assert_eq!(floats(&kron).await, expected);
    assert!(m.kron(&a).check().is_err());
    assert_eq!(floats(&m.trace(0, 0, 1)).await, [5.0]);
    let grid = Tensor::meshgrid(&[a.clone(), b.clone()]);
    assert_eq!(floats(&grid[0]).await, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    assert_eq!(floats(&grid[1]).await, [3.0, 4.0, 5.0, 3.0, 4.0, 5.0]);
    let put = m.put_along_axis(
        &s.tensor(&[1i32, 0], &[2, 1]).unwrap(),
        &s.tensor(&[8.0f32, 9.0], &[2, 1]).unwrap(),
        1,
    );
    assert_eq!(floats(&put).await, [1.0, 8.0, 9.0, 4.0]);
    // 1 · σ(2), 3 · σ(4).
    near(&m.glu(-1), &[0.880_797, 2.946_041_4]).await;
    assert!(b.glu(0).check().is_err());
    // Bits of 1.0 and 2.0.
    let bits = a.view(DType::U32).to_vec::<u32>().await.unwrap();
    assert_eq!(bits, [0x3f80_0000, 0x4000_0000]);
    let product = Tensor::einsum("ij,j->i", &[m.clone(), a.clone()]);
    assert_eq!(floats(&product).await, [5.0, 11.0]);
    let wrong = Tensor::einsum("ij,k->z", &[m.clone(), a.clone()]);
    assert!(wrong.check().is_err());
}

#[tokio::test]
async fn shares_of_what_is_sorted_lie_between_elements() {
    let cluster = Cluster::ready().await.unwrap();
    let s = session(&cluster).await;
    let x = s.tensor(&[4.0f32, 1.0, 3.0, 2.0], &[4]).unwrap();
    assert_eq!(floats(&x.median(0)).await, [2.5]);
    // np.quantile([4, 1, 3, 2], 0.3) = 1.9
    near(&x.quantile(0.3, 0), &[1.9]).await;
    assert_eq!(floats(&x.quantile(0.0, 0)).await, [1.0]);
    assert_eq!(floats(&x.quantile(1.0, -1)).await, [4.0]);
    let odd = s.tensor(&[5i32, 1, 9, 2, 8, 7], &[2, 3]).unwrap();
    assert_eq!(floats(&odd.median(1)).await, [5.0, 7.0]);
    let nan = s.tensor(&[1.0f32, f32::NAN, 2.0], &[3]).unwrap();
    assert!(floats(&nan.median(0)).await[0].is_nan());
    assert!(x.quantile(1.5, 0).check().is_err());
    assert!(x.median(1).check().is_err());
}

#[tokio::test]
async fn results_whose_size_depends_on_values_have_a_bound() {
    let cluster = Cluster::ready().await.unwrap();
    let s = session(&cluster).await;
    let x = s
        .tensor(&[0.0f32, 2.0, 0.0, f32::NAN, -1.0, 0.0], &[2, 3])
        .unwrap();
    let places = x.nonzero(4).await.unwrap();
    assert_eq!(places.shape().unwrap(), [3, 2]);
    let places = places.to_vec::<i64>().await.unwrap();
    assert_eq!(places, [0, 1, 1, 0, 1, 1]);
    let refused = x.nonzero(2).await.unwrap_err();
    assert_eq!(refused.reason(), Reason::InvalidArgument, "{refused}");
    let none = s.zeros(DType::I32, &[2, 2]).nonzero(9).await.unwrap();
    assert_eq!(none.shape().unwrap(), [0, 2]);
    assert!(s.scalar(1.0f32).nonzero(1).await.is_err());
    let keep = s.tensor(&[true, false, true], &[3]).unwrap();
    let kept = x.compress(&keep, 1, 3).await.unwrap();
    assert_eq!(kept.shape().unwrap(), [2, 2]);
    assert_eq!(floats(&kept.narrow(0, 0, 1)).await, [0.0, 0.0]);
    let many = s.tensor(&[3i32, 1, 3, 2, 1], &[5]).unwrap();
    let unique = many.unique(3).await.unwrap();
    assert_eq!(unique.to_vec::<i32>().await.unwrap(), [1, 2, 3]);
    assert!(many.unique(2).await.is_err());
    let nans = s.tensor(&[f32::NAN, 1.0, f32::NAN], &[3]).unwrap();
    let unique = floats(&nans.unique(3).await.unwrap()).await;
    assert!(unique.len() == 2 && unique[0] == 1.0 && unique[1].is_nan());
    let all = s.tensor(&[f32::NAN, f32::NAN], &[2]).unwrap();
    assert_eq!(all.unique(2).await.unwrap().shape().unwrap(), [1]);
}

#[tokio::test]
async fn transforms_go_there_and_back() {
    let cluster = Cluster::ready().await.unwrap();
    let s = session(&cluster).await;
    // np.fft.fft([1, 2, 4, 8, 16]), real and imaginary parts.
    let x = s.tensor(&[1.0f32, 2.0, 4.0, 8.0, 16.0], &[5]).unwrap();
    let y = x.fft(0);
    near(
        &y.real(),
        &[31.0, -3.145_898, -9.854_102, -9.854_102, -3.145_898],
    )
    .await;
    near(
        &y.imaginary(),
        &[0.0, 15.665_932, 4.424_767, -4.424_767, -15.665_932],
    )
    .await;
    near(&y.ifft(0).real(), &[1.0, 2.0, 4.0, 8.0, 16.0]).await;
    near(
        &y.conjugate().imaginary(),
        &[0.0, -15.665_932, -4.424_767, 4.424_767, 15.665_932],
    )
    .await;
    for n in [1, 2, 3, 4, 7, 8] {
        let values: Vec<f32> = (0..2 * n).map(|i| ((i * i) % 7) as f32 - 2.0).collect();
        let x = s.tensor(&values, &[2, n]).unwrap();
        let half = x.rfft(-1);
        assert_eq!(half.shape().unwrap(), [2, n / 2 + 1]);
        near(&half.irfft(n as i64, -1), &values).await;
        near(&x.rfftn(&[]).irfftn(n as i64, &[]), &values).await;
        near(&x.fftn(&[]).ifftn(&[]).real(), &values).await;
        let whole = x.fft(1).narrow(1, 0, n as i64 / 2 + 1);
        near(
            &(whole.imaginary() - half.imaginary()),
            &vec![0.0; 2 * (n / 2 + 1)],
        )
        .await;
    }
    assert!(x.rfft(0).irfft(7, 0).check().is_err());
}

#[tokio::test]
async fn quantised_weights_and_other_layouts_are_what_they_stand_for() {
    let cluster = Cluster::ready().await.unwrap();
    let s = session(&cluster).await;
    let values: Vec<f32> = (0..128)
        .map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0)
        .collect();
    let w = s.tensor(&values, &[2, 64]).unwrap();
    let x = s.tensor(&values[..64], &[1, 64]).unwrap();
    let quantized = w.quantize(32, 8);
    assert_eq!(quantized.mode, QuantMode::Affine { group: 32, bits: 8 });
    let back = floats(&quantized.dequantize(DType::F32)).await;
    for (a, b) in back.iter().zip(&values) {
        assert!((a - b).abs() < 2.0 / 255.0, "{a}, {b}");
    }
    let exact = x.matmul(&quantized.dequantize(DType::F32).transpose(&[]));
    near(&x.quantized_matmul(&quantized, true), &floats(&exact).await).await;
    for (mode, most) in [
        (QuantMode::Mxfp8, 0.07),
        (QuantMode::Mxfp4, 0.3),
        (QuantMode::Nvfp4, 0.2),
        (QuantMode::Affine { group: 32, bits: 8 }, 0.005),
    ] {
        let back = floats(&w.quantize_as(mode).dequantize(DType::F32)).await;
        for (a, b) in back.iter().zip(&values) {
            assert!((a - b).abs() < most, "{mode:?}: {a}, {b}");
        }
    }
    // Channels last and first are the same numbers in another order.
    let image = s.tensor(&values[..24], &[1, 4, 6]).unwrap();
    let weight = s.tensor(&values[24..60], &[6, 3, 2]).unwrap();
    let last = ConvOptions {
        strides: vec![2],
        layout: Layout::ChannelsLast,
        ..Default::default()
    };
    let first = ConvOptions {
        layout: Layout::ChannelsFirst,
        ..last.clone()
    };
    let a = image.conv_transpose(&weight, None, &last, &[]);
    let turned = (image.transpose(&[0, 2, 1]), weight.transpose(&[0, 2, 1]));
    let b = turned.0.conv_transpose(&turned.1, None, &first, &[]);
    assert_eq!(a.shape().unwrap(), [1, 9, 2]);
    near(&a, &floats(&b.transpose(&[0, 2, 1])).await).await;
}

#[tokio::test]
async fn inverses_and_sizes_of_matrices_are_made_of_their_factors() {
    let cluster = Cluster::ready().await.unwrap();
    let s = session(&cluster).await;
    let identity = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0];
    let x = s
        .tensor(&[2.0f32, 1.0, 1.0, 3.0, 0.0, 5.0, -1.0, 4.0], &[2, 2, 2])
        .unwrap();
    near(&x.matmul(&x.inv()), &identity).await;
    near(&x.matmul(&x.pinv(1e-6)), &identity).await;
    // 5 · 2 and 0 · 4 + 5.
    near(&x.det(), &[5.0, 5.0]).await;
    let lower = x.tril(0).narrow(0, 0, 1);
    near(&lower.matmul(&lower.tri_inv(false)), &identity[..4]).await;
    let spd = s.tensor(&[4.0f32, 2.0, 2.0, 3.0], &[2, 2]).unwrap();
    // By np.linalg.inv.
    let inverse = [0.375, -0.25, -0.25, 0.5];
    for upper in [false, true] {
        near(&spd.cholesky(upper).cholesky_inv(upper), &inverse).await;
    }
    // np.linalg.pinv([[1, 2], [2, 4]]): singular, so that there is no inverse.
    let singular = s.tensor(&[1.0f32, 2.0, 2.0, 4.0], &[2, 2]).unwrap();
    near(&singular.pinv(1e-6), &[0.04, 0.08, 0.08, 0.16]).await;
    assert!(floats(&singular.inv()).await.iter().all(|v| v.is_nan()));

    let v = s.tensor(&[3.0f32, -4.0, 0.0], &[3]).unwrap();
    for (norm, size) in [
        (Norm::Length, 5.0),
        (Norm::Order(1.0), 7.0),
        (Norm::Order(2.0), 5.0),
        (Norm::Order(0.0), 2.0),
        (Norm::Order(f64::INFINITY), 4.0),
        (Norm::Order(f64::NEG_INFINITY), 0.0),
    ] {
        near(&v.norm(norm, &[], false), &[size]).await;
    }
    // np.linalg.norm([[2, 1], [1, 3]], 'nuc') and 2, and of the other matrix.
    let nuclear = x.norm(Norm::Nuclear, &[1, 2], false);
    near(&nuclear, &[5.0, 7.211_102_5]).await;
    let spectral = x.norm(Norm::Spectral, &[-2, -1], true);
    assert_eq!(spectral.shape().unwrap(), [2, 1, 1]);
    near(&spectral, &[3.618_034, 6.433_978]).await;
    near(
        &x.norm(Norm::Length, &[1, 2], false),
        &[3.872_983_3, 6.480_741],
    )
    .await;
    assert!(x.norm(Norm::Nuclear, &[], false).check().is_err());
    let (values, vectors) = spd.eigh();
    let back = &(&vectors * &values.expand_dims(&[-2]));
    near(&back.matmul(&vectors.transpose(&[])), &[4.0, 2.0, 2.0, 3.0]).await;
    assert!(spd.cast(DType::F16).eigh().0.check().is_err());
}
