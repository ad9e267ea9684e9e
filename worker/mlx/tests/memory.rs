//! What plans leave behind in MLX's memory. By itself, because MLX counts for the whole process.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::Backend,
    mlx::MlxBackend,
    plan::{PlanHints, Slot},
};

const WIDTH: usize = 16 << 10;

#[test]
fn a_plan_leaves_nothing_behind() {
    let device = MlxBackend.open("mlx:0", &[]).unwrap();
    let mut g = GraphBuilder::new(0);
    let spec = TensorSpec::new(DType::F32, Shape::fixed(&[WIDTH]).unwrap()).unwrap();
    let mut x = g.tensor("x", spec).unwrap();
    for _ in 0..100 {
        x = g.sin(x).unwrap();
    }
    let graph = g.finish(&[x]).unwrap();
    let run = || {
        let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
        let input = device.allocate("input", WIDTH * 4).unwrap();
        let output = device.allocate("output", WIDTH * 4).unwrap();
        plan.bind(Slot::Input(0), &input, 0).unwrap();
        plan.bind(Slot::Output(0), &output, 0).unwrap();
        plan.execute(0).unwrap();
    };
    run();
    device.trim();
    let before = device.usage().unwrap();
    for _ in 0..20 {
        run();
    }
    device.trim();
    let after = device.usage().unwrap();
    assert_eq!(after.active, before.active);
    assert_eq!(after.cached, 0);
    assert!(after.peak >= WIDTH * 4);
}
