//! Node tests as they are in the archive: one node, its inputs' tensors and the outputs expected.

use std::{collections::BTreeMap, fs, io::Read};

use anyhow::{Context, Result, bail, ensure};
use hotcell_graph::{DType, Shape, TensorSpec};
use prost::Message;

use super::proto::{Archive, ArchivedCase, ModelProto, NodeProto, TensorProto};
use crate::cluster::repository;

/// A tensor of one of our dtypes, little-endian and row-major as ONNX's `raw_data`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub dims: Vec<usize>,
    /// Elements.
    pub bytes: Vec<u8>,
}

/// Our dtype for one of ONNX's `TensorProto.DataType`.
///
/// # Errors
/// Names the type when we have none.
pub fn dtype(data_type: i32) -> Result<DType> {
    Ok(match data_type {
        1 => DType::F32,
        2 => DType::U8,
        3 => DType::I8,
        4 => DType::U16,
        5 => DType::I16,
        6 => DType::I32,
        7 => DType::I64,
        8 => bail!("strings are no tensors here"),
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        12 => DType::U32,
        13 => DType::U64,
        14 => DType::C64,
        16 => DType::BF16,
        17..=20 | 24 => bail!("there is no dtype of 8-bit floats"),
        21 | 22 => bail!("there is no dtype of 4-bit integers"),
        23 => bail!("there is no dtype of 4-bit floats"),
        25 | 26 => bail!("there is no dtype of 2-bit integers"),
        other => bail!("there is no dtype for ONNX's type {other}"),
    })
}

impl Tensor {
    /// Reads a `TensorProto`, which stores elements raw or in a field by kind.
    ///
    /// # Errors
    /// When the dtype is not one of ours or the length does not fit.
    pub fn read(proto: &TensorProto) -> Result<Self> {
        let dtype = dtype(proto.data_type)?;
        let dims: Vec<usize> = proto
            .dims
            .iter()
            .map(|&d| usize::try_from(d))
            .collect::<Result<_, _>>()?;
        let bytes = match (&proto.raw_data, dtype) {
            (Some(raw), _) => raw.clone(),
            (None, DType::F32 | DType::C64) => le(&proto.float_data, |v| v.to_le_bytes()),
            (None, DType::F64) => le(&proto.double_data, |v| v.to_le_bytes()),
            (None, DType::I64) => le(&proto.int64_data, |v| v.to_le_bytes()),
            (None, DType::U64) => le(&proto.uint64_data, |v| v.to_le_bytes()),
            (None, DType::U32) => le(&proto.uint64_data, |v| (v as u32).to_le_bytes()),
            (None, _) => match dtype.block_bytes() {
                1 => le(&proto.int32_data, |v| [v as u8]),
                2 => le(&proto.int32_data, |v| (v as u16).to_le_bytes()),
                _ => le(&proto.int32_data, |v| v.to_le_bytes()),
            },
        };
        let tensor = Self { dtype, dims, bytes };
        let needed = tensor.elements() * dtype.block_bytes();
        ensure!(
            tensor.bytes.len() == needed,
            "a tensor of {needed} bytes has {}",
            tensor.bytes.len()
        );
        Ok(tensor)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Its spec.
    ///
    /// # Errors
    /// When the shape is past our limits.
    pub fn spec(&self) -> Result<TensorSpec> {
        Ok(TensorSpec::new(self.dtype, Shape::fixed(&self.dims)?)?)
    }

    /// The elements, converted. 64-bit integers past 2⁵³ are rounded.
    ///
    /// # Errors
    /// For complex tensors.
    pub fn numbers(&self) -> Result<Vec<f64>> {
        let f16 = |b: [u8; 2]| half_to_f64(u16::from_le_bytes(b));
        let bf16 = |b: [u8; 2]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16));
        Ok(match self.dtype {
            DType::F16 => self.each(f16),
            DType::BF16 => self.each(bf16),
            DType::F32 => self.each(|b| f64::from(f32::from_le_bytes(b))),
            DType::F64 => self.each(f64::from_le_bytes),
            _ => self.integers()?.into_iter().map(|v| v as f64).collect(),
        })
    }

    /// The elements of an integer or bool tensor.
    ///
    /// # Errors
    /// For other dtypes.
    pub fn integers(&self) -> Result<Vec<i128>> {
        Ok(match self.dtype {
            DType::Bool | DType::U8 => self.each(|b: [u8; 1]| i128::from(b[0])),
            DType::I8 => self.each(|b| i128::from(i8::from_le_bytes(b))),
            DType::U16 => self.each(|b| i128::from(u16::from_le_bytes(b))),
            DType::I16 => self.each(|b| i128::from(i16::from_le_bytes(b))),
            DType::U32 => self.each(|b| i128::from(u32::from_le_bytes(b))),
            DType::I32 => self.each(|b| i128::from(i32::from_le_bytes(b))),
            DType::U64 => self.each(|b| i128::from(u64::from_le_bytes(b))),
            DType::I64 => self.each(|b| i128::from(i64::from_le_bytes(b))),
            other => bail!("{other} elements are no integers"),
        })
    }

    fn each<const N: usize, T>(&self, read: impl Fn([u8; N]) -> T) -> Vec<T> {
        let (chunks, _) = self.bytes.as_chunks::<N>();
        chunks.iter().map(|&b| read(b)).collect()
    }
}

fn le<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| bytes(v)).collect()
}

/// IEEE binary16, written out here so that the expected values do not depend on our own conversions.
fn half_to_f64(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        e => (1024.0 + fraction) * 2f64.powi(e - 25),
    }
}

/// One node test.
#[derive(Debug)]
pub struct Case {
    /// ONNX's name of it, such as `test_abs`.
    pub name: String,
    /// The one node.
    pub node: NodeProto,
    /// The default domain's opset.
    pub opset: i64,
    /// Inputs by name; an error says why it is no tensor of ours.
    pub inputs: BTreeMap<String, Result<Tensor>>,
    /// Names of the graph's outputs, and the tensors expected.
    pub outputs: Vec<(String, Result<Tensor>)>,
}

impl Case {
    /// Reads what an archived case holds.
    ///
    /// # Errors
    /// When the model is no single node, or something cannot be decoded.
    pub fn read(archived: &ArchivedCase) -> Result<Self> {
        let model = ModelProto::decode(archived.model.as_slice())?;
        let graph = model.graph.context("a model without graph")?;
        let [node] = graph.node.as_slice() else {
            bail!("the model has {} nodes", graph.node.len());
        };
        let tensor = |info: &super::proto::ValueInfoProto, bytes: &[u8]| {
            let plain = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            ensure!(plain.is_some(), "sequences and optionals are no tensors");
            Tensor::read(&TensorProto::decode(bytes)?)
        };
        let pair = |(info, bytes): (&super::proto::ValueInfoProto, &Vec<u8>)| {
            (info.name.clone(), tensor(info, bytes))
        };
        let opset = model
            .opset_import
            .iter()
            .filter(|o| o.domain.is_empty())
            .map(|o| o.version)
            .max();
        Ok(Self {
            name: archived.name.clone(),
            node: node.clone(),
            opset: opset.unwrap_or(0),
            inputs: graph.input.iter().zip(&archived.inputs).map(pair).collect(),
            outputs: graph
                .output
                .iter()
                .zip(&archived.outputs)
                .map(pair)
                .collect(),
        })
    }
}

/// All archived cases, in order of their names.
///
/// # Errors
/// When the committed archive cannot be read.
pub fn archive() -> Result<Vec<ArchivedCase>> {
    let path = repository().join("tests/onnx/cases.lzma");
    let packed = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut bytes = Vec::new();
    lzma_rust2::LzmaReader::new_mem_limit(packed.as_slice(), u32::MAX, None)?
        .read_to_end(&mut bytes)?;
    Ok(Archive::decode(bytes.as_slice())?.cases)
}
