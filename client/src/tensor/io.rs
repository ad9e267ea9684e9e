//! Tensors in files: safetensors and npy.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use safetensors::{Dtype, SafeTensors, View, tensor::TensorView};

use hotcell_graph::{DType, Shape, TensorSpec};
use hotcell_proto::error::{Error, Reason};

use super::{
    array::{Tensor, invalid, of_graph},
    host::HostTensor,
};
use crate::whole::{self, Readers};

/// Bytes of an npy header at most. NumPy writes some hundred.
const MAX_NPY_HEADER: usize = 64 << 10;

/// dtype, safetensors' name, NumPy's name.
const NAMES: &[(DType, Dtype, &str)] = &[
    (DType::Bool, Dtype::BOOL, "|b1"),
    (DType::U8, Dtype::U8, "|u1"),
    (DType::I8, Dtype::I8, "|i1"),
    (DType::U16, Dtype::U16, "<u2"),
    (DType::I16, Dtype::I16, "<i2"),
    (DType::U32, Dtype::U32, "<u4"),
    (DType::I32, Dtype::I32, "<i4"),
    (DType::U64, Dtype::U64, "<u8"),
    (DType::I64, Dtype::I64, "<i8"),
    (DType::F16, Dtype::F16, "<f2"),
    (DType::BF16, Dtype::BF16, ""),
    (DType::F32, Dtype::F32, "<f4"),
    (DType::F64, Dtype::F64, "<f8"),
    (DType::C64, Dtype::C64, "<c8"),
    (DType::F8E4M3, Dtype::F8_E4M3, ""),
];

fn cannot_read(path: &Path, error: &std::io::Error) -> Error {
    let reason = match error.kind() {
        std::io::ErrorKind::NotFound => Reason::FileNotFound,
        _ => Reason::InvalidArgument,
    };
    Error::new(
        reason,
        format!("{} cannot be read: {error}", path.display()),
    )
}

fn cannot_write(path: &Path, error: impl std::fmt::Display) -> Error {
    invalid(format!("{} cannot be written: {error}", path.display()))
}

/// A safetensors file.
pub struct TensorFile {
    path: PathBuf,
    bytes: Bytes,
    metadata: HashMap<String, String>,
    tensors: BTreeMap<String, (TensorSpec, std::ops::Range<usize>)>,
}

impl TensorFile {
    /// Reads a file and checks its header.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`], or [`Reason::InvalidArgument`] saying what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let bytes = Bytes::from(fs::read(path).map_err(|e| cannot_read(path, &e))?);
        let wrong = |e: &dyn std::fmt::Display| {
            invalid(format!("{} is no safetensors file: {e}", path.display()))
        };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| wrong(&e))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(&e))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            let dtype = NAMES.iter().find(|(_, theirs, _)| *theirs == view.dtype());
            let Some((dtype, ..)) = dtype else {
                return Err(invalid(format!(
                    "{}: {name} is {:?}, which no tensor of ours can be",
                    path.display(),
                    view.dtype()
                )));
            };
            let shape = Shape::fixed(view.shape()).map_err(|e| of_graph(&e))?;
            let spec = TensorSpec::new(*dtype, shape).map_err(|e| of_graph(&e))?;
            // The view is a part of `bytes`.
            let start = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
            tensors.insert(name.to_owned(), (spec, start..start + view.data().len()));
        }
        let metadata = header.metadata().clone().unwrap_or_default();
        Ok(Self {
            path: path.to_owned(),
            bytes,
            metadata,
            tensors,
        })
    }

    /// Names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn count(&self) -> usize {
        self.tensors.len()
    }

    /// The file's own notes.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// A tensor; `None` when there is none of this name.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when its bytes contradict the header.
    pub fn get(&self, name: &str) -> Result<Option<HostTensor>, Error> {
        let Some((spec, range)) = self.tensors.get(name) else {
            return Ok(None);
        };
        let read = HostTensor::new(spec.clone(), self.bytes.slice(range.clone()));
        let named = |e: Error| invalid(format!("{}: {name}: {}", self.path.display(), e.message()));
        read.map(Some).map_err(named)
    }

    /// Writes tensors, and notes about them, to a file. They are computed if they were not. Whoever reads the file finds all of
    /// it, or what was there before.
    ///
    /// # Errors
    /// As [`Tensor::eval`], or the file cannot be written.
    pub async fn save(
        path: &Path,
        tensors: &[(&str, Tensor)],
        metadata: Option<HashMap<String, String>>,
    ) -> Result<(), Error> {
        let mut fetched = Vec::with_capacity(tensors.len());
        for (name, tensor) in tensors {
            fetched.push((*name, tensor.fetch().await?));
        }
        let views = views(path, fetched.iter().map(|(name, data)| (*name, data)))?;
        write_safetensors(path, views, metadata)
    }

    /// Writes tensors that are at hand, and notes about them, to a file, like [`TensorFile::save`].
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for one of a block type, or if the file cannot be written.
    pub fn write(
        path: &Path,
        tensors: &[(String, HostTensor)],
        metadata: Option<HashMap<String, String>>,
    ) -> Result<(), Error> {
        let all = tensors.iter().map(|(name, data)| (name.as_str(), data));
        write_safetensors(path, views(path, all)?, metadata)
    }
}

/// Tensors as safetensors has them, for this file.
fn views<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a str, &'a HostTensor)>,
) -> Result<Vec<(&'a str, TensorView<'a>)>, Error> {
    let view = |(name, data): (&'a str, &'a HostTensor)| {
        let dtype = NAMES.iter().find(|(ours, ..)| *ours == data.spec().dtype);
        let (_, dtype, _) = dtype.ok_or_else(|| {
            invalid(format!(
                "{name} is {}, which safetensors cannot hold; cast it",
                data.spec().dtype
            ))
        })?;
        let view = TensorView::new(*dtype, data.shape(), data.bytes());
        Ok((name, view.map_err(|e| cannot_write(path, e))?))
    };
    tensors.map(view).collect()
}

fn write_safetensors<V: View>(
    path: &Path,
    views: Vec<(&str, V)>,
    metadata: Option<HashMap<String, String>>,
) -> Result<(), Error> {
    // It writes another file first, which then takes this name.
    safetensors::serialize_to_file(views, metadata, path).map_err(|e| cannot_write(path, e))
}

impl HostTensor {
    /// Reads a NumPy `.npy` file, version 1 to 3, C order, little-endian.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`], or [`Reason::InvalidArgument`] saying what is wrong with it.
    pub fn load_npy(path: &Path) -> Result<Self, Error> {
        let mut file = fs::File::open(path).map_err(|e| cannot_read(path, &e))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .map_err(|e| cannot_read(path, &e))?;
        Self::from_npy(bytes).map_err(|e| invalid(format!("{}: {}", path.display(), e.message())))
    }

    /// Reads the bytes of an `.npy` file.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] saying what is wrong with them.
    pub fn from_npy(bytes: impl Into<Bytes>) -> Result<Self, Error> {
        let bytes: Bytes = bytes.into();
        let short = || invalid("the npy header is cut short");
        if bytes.get(..6) != Some(b"\x93NUMPY") {
            return Err(invalid("this is no npy file"));
        }
        let wide = match bytes.get(6) {
            Some(1) => false,
            Some(2 | 3) => true,
            _ => return Err(invalid("this version of npy is not known; 1 to 3 are")),
        };
        let length = match wide {
            false => bytes
                .get(8..10)
                .map(|b| b.iter().rev().fold(0usize, |n, b| n << 8 | *b as usize)),
            true => bytes
                .get(8..12)
                .map(|b| b.iter().rev().fold(0usize, |n, b| n << 8 | *b as usize)),
        };
        let length = length.ok_or_else(short)?;
        if length > MAX_NPY_HEADER {
            return Err(invalid(format!(
                "the npy header takes {length} bytes, at most {MAX_NPY_HEADER}"
            )));
        }
        let start = if wide { 12 } else { 10 };
        let header = bytes.get(start..start + length).ok_or_else(short)?;
        let header =
            std::str::from_utf8(header).map_err(|_| invalid("the npy header is no text"))?;
        let spec = npy_spec(header)?;
        HostTensor::new(spec, bytes.slice(start + length..))
    }

    /// The bytes of an `.npy` file, version 1.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for a dtype that NumPy lacks.
    pub fn to_npy(&self) -> Result<Vec<u8>, Error> {
        let dtype = self.spec().dtype;
        let name = NAMES
            .iter()
            .find(|(ours, _, name)| *ours == dtype && !name.is_empty());
        let (_, _, name) =
            name.ok_or_else(|| invalid(format!("NumPy has no {dtype}; cast it first")))?;
        let axes: String = self.shape().iter().map(|n| format!("{n}, ")).collect();
        let axes = match self.shape().len() {
            1 => axes.trim_end(),
            _ => axes.trim_end().trim_end_matches(','),
        };
        let mut header =
            format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({axes}), }}");
        // The data begin at a multiple of 64.
        let padding = 63 - (10 + header.len()) % 64;
        header.extend(std::iter::repeat_n(' ', padding));
        header.push('\n');
        let length = u16::try_from(header.len()).map_err(|_| invalid("too many axes for npy"))?;
        let mut out = b"\x93NUMPY\x01\x00".to_vec();
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(self.bytes());
        Ok(out)
    }

    /// Writes an `.npy` file.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for a dtype that NumPy lacks, or the file cannot be written.
    pub fn save_npy(&self, path: &Path) -> Result<(), Error> {
        let bytes = self.to_npy()?;
        whole::write(path, Readers::Usual, |file| file.write_all(&bytes))
            .map_err(|e| cannot_write(path, e))
    }
}

/// The value of a key of the header's Python dictionary, as text.
fn field<'a>(header: &'a str, key: &str) -> Result<&'a str, Error> {
    let quoted = [format!("'{key}':"), format!("\"{key}\":")];
    let at = quoted
        .iter()
        .find_map(|k| header.find(k.as_str()).map(|i| i + k.len()));
    let missing = || invalid(format!("the npy header lacks {key}"));
    Ok(header
        .get(at.ok_or_else(missing)?..)
        .unwrap_or_default()
        .trim_start())
}

fn npy_spec(header: &str) -> Result<TensorSpec, Error> {
    let descr = field(header, "descr")?;
    let quote = descr.chars().next().filter(|c| ['\'', '"'].contains(c));
    let descr = quote.and_then(|q| descr.get(1..)?.split(q).next());
    let descr = descr.ok_or_else(|| invalid("npy arrays of records are not tensors"))?;
    let dtype = NAMES
        .iter()
        .find(|(.., name)| !name.is_empty() && *name == descr);
    let Some((dtype, ..)) = dtype else {
        let shown: String = descr.chars().take(20).collect();
        return Err(invalid(format!(
            "npy dtype {shown:?} is not a tensor's; little-endian plain ones are"
        )));
    };
    if !field(header, "fortran_order")?.starts_with("False") {
        return Err(invalid(
            "the npy array is in Fortran order; save it with np.ascontiguousarray",
        ));
    }
    let shape = field(header, "shape")?;
    let inner = shape.strip_prefix('(').and_then(|s| s.split(')').next());
    let wrong = || invalid("the npy header's shape cannot be read");
    let mut dims = Vec::new();
    for part in inner.ok_or_else(wrong)?.split(',').map(str::trim) {
        if !part.is_empty() {
            dims.push(part.parse::<usize>().map_err(|_| wrong())?);
        }
    }
    let shape = Shape::fixed(&dims).map_err(|e| of_graph(&e))?;
    TensorSpec::new(*dtype, shape).map_err(|e| of_graph(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `np.save` of `np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int16)`, as NumPy 2 writes it.
    fn numpys() -> Vec<u8> {
        let mut bytes =
            b"\x93NUMPY\x01\x00v\x00{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }"
                .to_vec();
        bytes.resize(127, b' ');
        bytes.push(b'\n');
        (1..=6i16).for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
        bytes
    }

    #[test]
    fn npy_is_numpys() {
        let t = HostTensor::from_npy(numpys()).unwrap();
        assert_eq!(t.spec().to_string(), "i16[2, 3]");
        assert_eq!(t.to_vec::<i16>().unwrap(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(t.to_npy().unwrap(), numpys());
        for shape in [&[][..], &[1], &[0, 2]] {
            let values = vec![1.5f64; shape.iter().product()];
            let t = HostTensor::from_slice(&values, shape).unwrap();
            assert_eq!(HostTensor::from_npy(t.to_npy().unwrap()).unwrap(), t);
        }
    }

    /// Elements of a dtype, NaNs with their own bits among them.
    fn sample(dtype: DType, shape: &[usize]) -> HostTensor {
        let spec = TensorSpec::new(dtype, Shape::fixed(shape).unwrap()).unwrap();
        let mut bytes: Vec<u8> = (0..spec.bytes(0).unwrap())
            .map(|i| (i as u8).wrapping_mul(37) ^ 0xf1)
            .collect();
        if dtype == DType::Bool {
            bytes.iter_mut().for_each(|b| *b &= 1);
        }
        HostTensor::new(spec, bytes).unwrap()
    }

    #[tokio::test]
    async fn every_dtype_comes_back_from_files_as_it_was_or_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all.safetensors");
        let shapes: [&[usize]; 4] = [&[], &[0, 3], &[7], &[2, 3, 5]];
        let plain = DType::ALL.iter().copied().filter(|d| !d.is_block());
        let mut all = BTreeMap::new();
        for dtype in plain {
            for (i, shape) in shapes.iter().enumerate() {
                let data = sample(dtype, shape);
                // NumPy has no bfloat16; all others it has.
                match data.to_npy() {
                    Ok(npy) if dtype != DType::BF16 => {
                        assert_eq!(HostTensor::from_npy(npy).unwrap(), data);
                        let path = folder.path().join(format!("{dtype}-{i}.npy"));
                        data.save_npy(&path).unwrap();
                        assert_eq!(HostTensor::load_npy(&path).unwrap(), data);
                    }
                    Err(error) if dtype == DType::BF16 => {
                        assert_eq!(error.reason(), Reason::InvalidArgument);
                        assert!(error.message().contains("bf16"), "{error}");
                    }
                    other => panic!("{dtype}: {other:?}"),
                }
                all.insert(format!("{dtype}/{i}"), data);
            }
        }
        assert_eq!(all.len(), 14 * shapes.len());
        let tensors: Vec<(&str, Tensor)> = all
            .iter()
            .map(|(name, data)| (name.as_str(), Tensor::host(None, data.clone(), false)))
            .collect();
        TensorFile::save(&path, &tensors, None).await.unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert!(file.names().eq(all.keys()));
        for (name, data) in &all {
            assert_eq!(&file.get(name).unwrap().unwrap(), data, "{name}");
        }
        // 8-bit floats, which NumPy does not have.
        let data = sample(DType::F8E4M3, &[2, 3, 5]);
        let error = data.to_npy().unwrap_err();
        assert!(error.message().contains("f8_e4m3"), "{error}");
        let floats = folder.path().join("f8.safetensors");
        let tensors = [("w", Tensor::host(None, data.clone(), false))];
        TensorFile::save(&floats, &tensors, None).await.unwrap();
        let file = TensorFile::open(&floats).unwrap();
        assert_eq!(file.get("w").unwrap().unwrap(), data);
        // Blocks of several numbers are in neither.
        for &dtype in DType::ALL.iter().filter(|d| d.block_len() > 1) {
            let data = sample(dtype, &[2, 256]);
            assert!(data.to_npy().is_err(), "{dtype}");
            let tensors = [("w", Tensor::host(None, data, false))];
            let error = TensorFile::save(&path, &tensors, None).await.unwrap_err();
            assert_eq!(error.reason(), Reason::InvalidArgument);
            assert!(error.message().contains(dtype.name()), "{error}");
        }
        // A save that was refused has not touched what was there.
        assert_eq!(TensorFile::open(&path).unwrap().count(), all.len());
    }

    #[test]
    fn bad_npy_is_refused() {
        let good = numpys();
        for cut in 0..good.len() {
            assert!(HostTensor::from_npy(good[..cut].to_vec()).is_err(), "{cut}");
        }
        let swap = |from: &str, to: &str| {
            let text = String::from_utf8_lossy(&good[10..128]).replace(from, to);
            let mut bytes = good[..10].to_vec();
            bytes.extend_from_slice(text.as_bytes());
            bytes[8] = text.len() as u8;
            bytes.extend_from_slice(&good[128..]);
            HostTensor::from_npy(bytes)
        };
        assert!(swap("", "").is_ok());
        for (from, to) in [
            ("False", "True"),
            ("<i2", ">i2"),
            ("<i2", "|O"),
            ("(2, 3)", "(2, -3)"),
            ("(2, 3)", "(99999999999999999999,)"),
            ("(2, 3)", "(4294967296, 4294967296, 4294967296)"),
            ("'shape'", "'shade'"),
        ] {
            assert!(swap(from, to).is_err(), "{to}");
        }
        // Version 2 announces a header of 4 GiB.
        assert!(HostTensor::from_npy(b"\x93NUMPY\x02\x00\xff\xff\xff\xff".to_vec()).is_err());
    }
}
