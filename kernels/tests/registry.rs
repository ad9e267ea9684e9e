//! Backends by name.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::rc::Rc;

use hotcell_kernels::{
    backend::{Backend, Device, DeviceError, DeviceInfo},
    cpu::CpuBackend,
    registry::{BACKENDS, DuplicateBackend, Registry},
};

/// A backend of another name.
struct Other;

impl Backend for Other {
    fn name(&self) -> &'static str {
        "other"
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        vec![]
    }

    fn open(&self, id: &str, _: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        Err(DeviceError::NoDevice(id.to_owned()))
    }
}

#[test]
fn a_name_is_one_backend_s() {
    let two = Registry::of(&[&CpuBackend, &Other]).unwrap();
    assert_eq!(format!("{two:?}"), r#"["cpu", "other"]"#);
    let refused = Registry::of(&[&CpuBackend, &Other, &CpuBackend]).unwrap_err();
    assert_eq!(refused, DuplicateBackend("cpu"));
    assert!(refused.to_string().contains("\"cpu\""), "{refused}");
    // What this build has is a registry.
    assert!(Registry::of(BACKENDS).is_ok());
    for (id, known) in [("cpu:0", true), ("other:0", false), ("tpu:0", false)] {
        assert_eq!(two.open(id, &[0]).is_ok(), known, "{id}");
    }
}
