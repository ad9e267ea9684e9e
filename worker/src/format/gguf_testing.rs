//! A writer of GGUF files for tests: makes valid files and, on request, invalid ones. Depends on nothing, so
//! that integration tests can include it by path.
#![allow(dead_code, reason = "each test program uses a part of it")]

/// A metadata value.
#[derive(Clone, Debug)]
pub enum Value {
    U8(u8),
    I32(i32),
    U32(u32),
    U64(u64),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    /// Type id and raw bytes, whatever they are.
    Raw(u32, Vec<u8>),
}

/// A tensor description. `dims` is in the order of the file, innermost first.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub n_dims: Option<u32>,
    pub kind: u32,
    pub data: Vec<u8>,
    /// Instead of the place where the data is written.
    pub offset: Option<u64>,
}

/// A file to be. Fields are public: a test changes one and writes.
#[derive(Clone, Debug)]
pub struct Writer {
    pub magic: [u8; 4],
    pub version: u32,
    pub n_tensors: Option<u64>,
    pub n_kv: Option<u64>,
    pub values: Vec<(String, Value)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
}

impl Default for Writer {
    fn default() -> Writer {
        let (values, tensors) = (Vec::new(), Vec::new());
        Writer {
            magic: *b"GGUF",
            version: 3,
            n_tensors: None,
            n_kv: None,
            values,
            tensors,
            alignment: 32,
        }
    }
}

/// A string as the format writes it.
pub fn string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}

fn array(element: u32, len: usize, items: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut out = element.to_le_bytes().to_vec();
    out.extend((len as u64).to_le_bytes());
    items.for_each(|item| out.extend(item));
    out
}

impl Value {
    fn encode(&self) -> (u32, Vec<u8>) {
        match self {
            Value::U8(v) => (0, vec![*v]),
            Value::U32(v) => (4, v.to_le_bytes().to_vec()),
            Value::I32(v) => (5, v.to_le_bytes().to_vec()),
            Value::F32(v) => (6, v.to_le_bytes().to_vec()),
            Value::Bool(v) => (7, vec![u8::from(*v)]),
            Value::Str(v) => (8, string(v)),
            Value::U64(v) => (10, v.to_le_bytes().to_vec()),
            Value::Strs(v) => (9, array(8, v.len(), v.iter().map(|s| string(s)))),
            Value::F32s(v) => (
                9,
                array(6, v.len(), v.iter().map(|x| x.to_le_bytes().to_vec())),
            ),
            Value::I32s(v) => (
                9,
                array(5, v.len(), v.iter().map(|x| x.to_le_bytes().to_vec())),
            ),
            Value::Raw(kind, bytes) => (*kind, bytes.clone()),
        }
    }
}

impl Writer {
    /// With one more metadata entry.
    pub fn value(mut self, key: &str, value: Value) -> Writer {
        self.values.push((key.to_owned(), value));
        self
    }

    /// With one more tensor of this type id; `dims` innermost first.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, data: Vec<u8>) -> Writer {
        let (name, dims) = (name.to_owned(), dims.to_vec());
        self.tensors.push(Tensor {
            name,
            dims,
            n_dims: None,
            kind,
            data,
            offset: None,
        });
        self
    }

    /// With one more F32 tensor of zeros.
    pub fn zeros(self, name: &str, dims: &[u64]) -> Writer {
        let len = dims.iter().product::<u64>() as usize * 4;
        self.tensor(name, dims, 0, vec![0; len])
    }

    /// The file. It ends with the last tensor's last byte.
    pub fn write(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(
            self.n_tensors
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        out.extend(self.n_kv.unwrap_or(self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            let (kind, bytes) = value.encode();
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend(string(&tensor.name));
            out.extend(
                tensor
                    .n_dims
                    .unwrap_or(tensor.dims.len() as u32)
                    .to_le_bytes(),
            );
            tensor
                .dims
                .iter()
                .for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        if !self.tensors.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
        }
        out.extend(data);
        out
    }
}

/// A small valid file with every kind of value and three tensor types.
pub fn small() -> Writer {
    Writer::default()
        .value("general.architecture", Value::Str("llama".into()))
        .value("a.u8", Value::U8(7))
        .value("a.i32", Value::I32(-5))
        .value("a.u64", Value::U64(1 << 40))
        .value("a.f32", Value::F32(0.5))
        .value("a.bool", Value::Bool(true))
        .value(
            "tokenizer.ggml.tokens",
            Value::Strs(vec!["a".into(), "ö".into(), String::new()]),
        )
        .value("tokenizer.ggml.scores", Value::F32s(vec![0.0, -1.5, 2.0]))
        .value("tokenizer.ggml.token_type", Value::I32s(vec![1, 3, -1]))
        .tensor("w", &[3, 2], 0, (0..24).collect())
        .tensor("q", &[64, 2], 8, vec![1; 136])
        .tensor("x", &[32], 9, vec![2; 36])
}

/// A complete little model of this GGUF architecture: 2 layers, hidden 8, 2 heads, 1 key-value head, 5 tokens.
pub fn model(arch: &str) -> Writer {
    let key = |name: &str| format!("{arch}.{name}");
    let tokens = ["<s>", "</s>", "a", "b", "c"].map(str::to_owned).to_vec();
    let mut writer = Writer::default()
        .value("general.architecture", Value::Str(arch.into()))
        .value(&key("block_count"), Value::U32(2))
        .value(&key("embedding_length"), Value::U32(8))
        .value(&key("feed_forward_length"), Value::U32(16))
        .value(&key("context_length"), Value::U32(64))
        .value(&key("attention.head_count"), Value::U32(2))
        .value(&key("attention.head_count_kv"), Value::U32(1))
        .value(&key("attention.layer_norm_rms_epsilon"), Value::F32(1e-5))
        .value(&key("rope.freq_base"), Value::F32(10_000.0))
        .value("tokenizer.ggml.tokens", Value::Strs(tokens))
        .value("tokenizer.ggml.bos_token_id", Value::U32(0))
        .value("tokenizer.ggml.eos_token_id", Value::U32(1))
        .zeros("token_embd.weight", &[8, 5])
        .zeros("output_norm.weight", &[8]);
    for layer in 0..2 {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        writer = writer
            .zeros(&name("attn_norm"), &[8])
            .zeros(&name("attn_q"), &[8, 8])
            .zeros(&name("attn_k"), &[8, 4])
            .zeros(&name("attn_v"), &[8, 4])
            .zeros(&name("attn_output"), &[8, 8])
            .zeros(&name("ffn_norm"), &[8])
            .zeros(&name("ffn_gate"), &[8, 16])
            .zeros(&name("ffn_up"), &[8, 16])
            .zeros(&name("ffn_down"), &[16, 8]);
    }
    writer
}
