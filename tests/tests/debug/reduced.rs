//! layers.2.mul_mat.3 of kjv, at token 3 of an answer on cpu hotcell-worker-fault: it is further from what is expected than 1e-7.
//! Made smaller by `hotcell debug reduce`, which printed this with `--test`.

use hotcell_client::{
    debug::Fault,
    tensor::{DType, HostTensor, Session, Shape, TensorSpec},
};
use hotcell_graph::{GraphBuilder, op};

/// Panics where it fails.
pub async fn node_layers_2_mul_mat_3(session: &Session) {
    let inputs = [
        HostTensor::from_slice(&[0.16558975f32], &[1, 1]).unwrap(),
        HostTensor::new(
            TensorSpec::new(DType::BF16, Shape::fixed(&[1, 1]).unwrap()).unwrap(),
            vec![222, 59],
        )
        .unwrap(),
    ];
    let spec = |at: usize| inputs[at].spec().clone();
    let mut graph = GraphBuilder::new(0);
    let input_0 = graph.tensor("layers.2.reshape.3", spec(0)).unwrap();
    let input_1 = graph
        .constant("model.layers.2.self_attn.o_proj.weight", spec(1))
        .unwrap();
    let node_0 = graph
        .apply(op::find("mul_mat").unwrap(), vec![input_0, input_1], vec![])
        .unwrap();
    let graph = graph.finish(&[node_0[0]]).unwrap();
    let found = session.run(&graph, &inputs).await.unwrap();
    let expected = Some(HostTensor::from_slice(&[0.0011218544f32], &[1, 1]).unwrap());
    let fault = Fault::Differs { nmse: 1e-7 };
    assert!(
        !fault.is_in(&found[0], expected.as_ref()).unwrap(),
        "{found:?}"
    );
}
