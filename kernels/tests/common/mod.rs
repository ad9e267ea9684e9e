//! What tests of single ops share: numbers, tensors as bytes, and a plan run on several numbers of threads.

#![allow(dead_code)] // no test file uses all of it

use hotcell_graph::{DType, Dim, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

/// A fixed sequence of numbers.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 24
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// A dense tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// Any bits.
    pub fn random(dtype: DType, dims: &[usize], seed: u64) -> Self {
        let n: usize = dims.iter().product();
        let mut bytes = Numbers::new(seed).bytes(n * dtype.block_bytes());
        if dtype == DType::Bool {
            bytes.iter_mut().for_each(|b| *b &= 1);
        }
        Self {
            dtype,
            dims: dims.to_vec(),
            bytes,
        }
    }

    /// Numbers as the dtype has them.
    pub fn of(dtype: DType, dims: &[usize], values: &[f64]) -> Self {
        assert_eq!(values.len(), dims.iter().product::<usize>());
        let bytes = values.iter().flat_map(|v| encode(dtype, *v)).collect();
        Self {
            dtype,
            dims: dims.to_vec(),
            bytes,
        }
    }

    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// The bytes of an element.
    pub fn at(&self, index: usize) -> &[u8] {
        let n = self.dtype.block_bytes();
        &self.bytes[index * n..][..n]
    }

    /// The elements as numbers (exact up to 2^53; the real part of complex ones).
    pub fn values(&self) -> Vec<f64> {
        (0..self.elements())
            .map(|i| decode(self.dtype, self.at(i)))
            .collect()
    }

    pub fn spec(&self, rows: bool) -> TensorSpec {
        let dims = self.dims.iter().enumerate();
        let dims = dims.map(|(i, n)| match (i, rows) {
            (0, true) => Dim::Rows,
            _ => Dim::Fixed(*n),
        });
        TensorSpec::new(self.dtype, Shape::new(dims).unwrap()).unwrap()
    }

    /// The first `rows` rows.
    pub fn prefix(&self, rows: usize) -> Self {
        let mut dims = self.dims.clone();
        let row = self.bytes.len() / dims[0];
        dims[0] = rows;
        Self {
            dtype: self.dtype,
            dims,
            bytes: self.bytes[..row * rows].to_vec(),
        }
    }
}

pub fn encode(dtype: DType, v: f64) -> Vec<u8> {
    match dtype {
        DType::Bool => vec![u8::from(v != 0.0)],
        DType::U8 => (v as u8).to_ne_bytes().to_vec(),
        DType::U16 => (v as u16).to_ne_bytes().to_vec(),
        DType::U32 => (v as u32).to_ne_bytes().to_vec(),
        DType::U64 => (v as u64).to_ne_bytes().to_vec(),
        DType::I8 => (v as i8).to_ne_bytes().to_vec(),
        DType::I16 => (v as i16).to_ne_bytes().to_vec(),
        DType::I32 => (v as i32).to_ne_bytes().to_vec(),
        DType::I64 => (v as i64).to_ne_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(v).to_ne_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(v).to_ne_bytes().to_vec(),
        DType::F32 => (v as f32).to_ne_bytes().to_vec(),
        DType::F64 => v.to_ne_bytes().to_vec(),
        _ => [(v as f32).to_ne_bytes(), [0; 4]].concat(),
    }
}

pub fn decode(dtype: DType, b: &[u8]) -> f64 {
    let two = || [b[0], b[1]];
    let four = || [b[0], b[1], b[2], b[3]];
    let eight = || b.try_into().unwrap();
    match dtype {
        DType::Bool | DType::U8 => b[0].into(),
        DType::U16 => u16::from_ne_bytes(two()).into(),
        DType::U32 => u32::from_ne_bytes(four()).into(),
        DType::U64 => u64::from_ne_bytes(eight()) as f64,
        DType::I8 => (b[0] as i8).into(),
        DType::I16 => i16::from_ne_bytes(two()).into(),
        DType::I32 => i32::from_ne_bytes(four()).into(),
        DType::I64 => i64::from_ne_bytes(eight()) as f64,
        DType::F16 => half::f16::from_ne_bytes(two()).to_f64(),
        DType::BF16 => half::bf16::from_ne_bytes(two()).to_f64(),
        DType::F32 => f32::from_ne_bytes(four()).into(),
        DType::F64 => f64::from_ne_bytes(eight()),
        _ => f32::from_ne_bytes(four()).into(),
    }
}

/// Numbers in [−1, 1) from a fixed sequence.
pub fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

/// A tensor of this shape.
pub fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

/// A tensor of symbolic rows, each of this shape.
pub fn rows(dims: &[usize]) -> TensorSpec {
    TensorSpec::new(DType::F32, Shape::rows(dims).unwrap()).unwrap()
}

/// A buffer with these bytes.
pub fn buffer(device: &dyn Device, bytes: &[u8]) -> Buffer {
    let buffer = device.allocate("test", bytes.len()).unwrap();
    buffer.write(0, bytes).unwrap();
    buffer
}

/// Runs one op for each of these numbers of rows, on one plan, with 1, 2 and 3 threads that must agree to
/// the bit; gives the results' bytes per number of rows.
pub fn run_rows(
    inputs: &[(&Tensor, bool)],
    max_rows: usize,
    rows: &[usize],
    build: impl Fn(&mut GraphBuilder, &[Value]) -> Result<Vec<Value>, GraphError>,
) -> Result<Vec<Vec<Tensor>>, DeviceError> {
    let mut g = GraphBuilder::new(max_rows);
    let values: Vec<Value> = inputs
        .iter()
        .enumerate()
        .map(|(i, (t, symbolic))| g.tensor(format!("x{i}"), t.spec(*symbolic)).unwrap())
        .collect();
    let results = build(&mut g, &values)?;
    let specs: Vec<TensorSpec> = results
        .iter()
        .map(|v| match g.spec(*v).unwrap() {
            hotcell_graph::op::ValueSpec::Tensor(t) => t.clone(),
            other => panic!("{other}"),
        })
        .collect();
    let graph: Graph = g.finish(&results)?;
    let mut first: Option<Vec<Result<Vec<Tensor>, String>>> = None;
    let mut last = Ok(vec![]);
    for threads in [1, 2, 3] {
        let device = CpuDevice::with_path(threads, CpuPath::detect()).unwrap();
        let mut plan = device.plan(&graph, &PlanHints::default())?;
        for (i, (t, _)) in inputs.iter().enumerate() {
            plan.bind(Slot::Input(i), &buffer(&device, &t.bytes), 0)
                .unwrap();
        }
        let outs: Vec<Buffer> = specs
            .iter()
            .enumerate()
            .map(|(i, s)| {
                let out = device.allocate("out", s.bytes(max_rows).unwrap()).unwrap();
                plan.bind(Slot::Output(i), &out, 0).unwrap();
                out
            })
            .collect();
        let mut all = vec![];
        let mut error = None;
        for &n in rows {
            if let Err(e) = plan.execute(n) {
                all.push(Err(e.to_string()));
                error = Some(e);
                continue;
            }
            let tensors = specs.iter().zip(&outs).map(|(s, out)| {
                let mut bytes = vec![0; s.bytes(n).unwrap()];
                out.read(0, &mut bytes).unwrap();
                Tensor {
                    dtype: s.dtype,
                    dims: s.shape.dims().iter().map(|d| d.at(n)).collect(),
                    bytes,
                }
            });
            all.push(Ok(tensors.collect()));
        }
        match &first {
            Some(first) if error.is_none() => {
                assert!(*first == all, "{threads} threads differ from one")
            }
            Some(first) => assert!(first.iter().any(Result::is_err), "{threads} threads fail"),
            None => first = Some(all.clone()),
        }
        last = match error {
            Some(e) => Err(e),
            None => Ok(all.into_iter().map(Result::unwrap).collect()),
        };
    }
    last
}

/// Runs one op of one result on inputs of fixed shapes.
pub fn run(
    inputs: &[&Tensor],
    build: impl Fn(&mut GraphBuilder, &[Value]) -> Result<Value, GraphError>,
) -> Result<Tensor, DeviceError> {
    let inputs: Vec<(&Tensor, bool)> = inputs.iter().map(|t| (*t, false)).collect();
    let mut all = run_rows(&inputs, 1, &[1], |g, v| Ok(vec![build(g, v)?]))?;
    Ok(all.remove(0).remove(0))
}

/// Every index of a shape in row-major order.
pub fn indices(dims: &[usize]) -> Vec<Vec<usize>> {
    let n: usize = dims.iter().product();
    (0..n)
        .map(|mut flat| {
            let mut index = vec![0; dims.len()];
            for (i, d) in index.iter_mut().zip(dims).rev() {
                *i = flat % d;
                flat /= d;
            }
            index
        })
        .collect()
}

/// The place of an index in a dense tensor.
pub fn flat(dims: &[usize], index: &[usize]) -> usize {
    dims.iter().zip(index).fold(0, |at, (d, i)| at * d + i)
}
