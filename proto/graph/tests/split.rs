//! Where nodes go, and in which order their effects stay.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_graph::{
    CacheSpec, DType, Graph, GraphBuilder, Shape, TensorSpec, Value,
    graph::Node,
    split::{Placed, assign, cut},
};
use hotcell_proto::limits;

fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

fn anything(_: usize, _: &Node) -> bool {
    true
}

fn placed<'a>(devices: usize, inputs: &'a [Option<usize>]) -> Placed<'a> {
    Placed {
        devices,
        inputs,
        computes: &anything,
        weights: &|input| input > 0,
        offload: None,
    }
}

/// Two layers of a model: x · w0, silu, · w1, silu.
fn two_layers() -> Graph {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[4, 64])).unwrap();
    let w0 = g.constant("w0", spec(DType::F32, &[64, 64])).unwrap();
    let w1 = g.constant("w1", spec(DType::F32, &[64, 64])).unwrap();
    let h = g.matmul(x, w0).unwrap();
    let h = g.silu(h).unwrap();
    let y = g.matmul(h, w1).unwrap();
    let y = g.silu(y).unwrap();
    g.finish(&[y]).unwrap()
}

#[test]
fn layers_go_to_their_weights_and_what_is_between_goes_along() {
    let g = two_layers();
    let inputs = [None, Some(0), Some(1)];
    let on = assign(&g, &placed(2, &inputs)).unwrap();
    assert_eq!(on, [0, 0, 1, 1]);
    let parts = cut(&g, &on).unwrap();
    assert_eq!(parts.len(), 2);
    let h = Value::Node { node: 1, output: 0 };
    assert_eq!(
        (&parts[0].kept[..], &parts[0].sent[..]),
        (&[][..], &[(h, 1)][..])
    );
    assert_eq!(parts[1].inputs, [h, Value::Input(2)]);
    // The weight is as constant as it was.
    assert_eq!(
        parts[1]
            .graph
            .inputs()
            .iter()
            .map(|i| i.constant)
            .collect::<Vec<_>>(),
        [false, true]
    );
    // A weight of the last device is worth a journey from so many numbers on.
    let offload = |least| Placed {
        offload: Some(least),
        ..placed(2, &inputs)
    };
    assert_eq!(assign(&g, &offload(4 * 64)).unwrap(), [0; 4]);
    assert_eq!(assign(&g, &offload(4 * 64 + 1)).unwrap(), [0, 0, 1, 1]);
}

#[test]
fn what_a_device_cannot_compute_goes_elsewhere_and_what_none_can_is_refused() {
    let g = two_layers();
    let inputs = [None, Some(0), Some(0)];
    let no_silu = |device: usize, node: &Node| device == 1 || node.op.name != "silu";
    let able = Placed {
        computes: &no_silu,
        ..placed(2, &inputs)
    };
    assert_eq!(assign(&g, &able).unwrap(), [0, 1, 0, 1]);
    let none = |_: usize, node: &Node| node.op.name != "silu";
    let unable = Placed {
        computes: &none,
        ..placed(2, &inputs)
    };
    let error = assign(&g, &unable).unwrap_err().to_string();
    assert_eq!(error, "silu: no device computes it");
    for devices in [0, limits::MAX_SPLIT_DEVICES + 1] {
        assert!(assign(&g, &placed(devices, &[None; 3])).is_err());
    }
    assert!(assign(&g, &placed(2, &[None; 2])).is_err());
    assert!(assign(&g, &placed(2, &[Some(2), None, None])).is_err());
    assert!(cut(&g, &[0; 3]).is_err());
}

#[test]
fn effects_stay_with_their_cache_and_in_their_order() {
    let mut g = GraphBuilder::new(0);
    let cache = CacheSpec {
        blocks: 2,
        block_len: 4,
        kv_heads: 1,
        head_dim: 8,
        dtype: DType::F32,
    };
    let mut outputs = vec![];
    let caches = [g.cache("a", cache).unwrap(), g.cache("b", cache).unwrap()];
    let kv = g.tensor("kv", spec(DType::F32, &[2, 1, 8])).unwrap();
    let slots = g.tensor("slots", spec(DType::I32, &[2])).unwrap();
    let tables = g.tensor("tables", spec(DType::I32, &[1, 1])).unwrap();
    for cache in [caches[0], caches[1], caches[0], caches[1]] {
        g.cache_write(cache, kv, kv, slots).unwrap();
        let y = g.paged_attention(kv, cache, tables, slots, slots, 1.0, 0, 0.0);
        outputs.push(y.unwrap());
    }
    let g = g.finish(&outputs).unwrap();
    let inputs = [Some(1), Some(0), None, None, None];
    let on = assign(&g, &placed(2, &inputs)).unwrap();
    assert_eq!(on, [1, 1, 0, 0, 1, 1, 0, 0]);
    let parts = cut(&g, &on).unwrap();
    // Nothing of one reads anything of the other: each device's nodes are one part, writes and reads taking turns as they did.
    assert_eq!(parts.iter().map(|p| p.device).collect::<Vec<_>>(), [1, 0]);
    for part in &parts {
        let names: Vec<_> = part.graph.nodes().iter().map(|n| n.op.name).collect();
        assert_eq!(
            names,
            [
                "cache_write",
                "paged_attention",
                "cache_write",
                "paged_attention"
            ]
        );
    }
    let error = assign(&g, &placed(2, &[None; 5])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cache_write: its cache lies on no device"
    );
    let elsewhere = |device: usize, _: &Node| device == 0;
    let unable = Placed {
        computes: &elsewhere,
        ..placed(2, &inputs)
    };
    let error = assign(&g, &unable).unwrap_err().to_string();
    assert!(
        error.contains("device 1, which does not compute it"),
        "{error}"
    );
}
