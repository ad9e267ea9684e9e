//! Every golden case with inputs that change while it is computed: nothing but its results is touched, and once they hold
//! still the results are right.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::rc::Rc;

use hotcell_kernels::cpu::{CpuDevice, path::CpuPath};
use hotcell_tests::conformance::unsteady;

#[test]
fn inputs_that_change_while_they_are_read_touch_nothing_but_results() {
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    unsteady(Rc::new(device)).unwrap();
}
