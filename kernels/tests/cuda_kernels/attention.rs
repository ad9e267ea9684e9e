//! Rotary positions, writing the cache and attention over it have the bits of the CPU backend's.

use hotcell_graph::{CacheSpec, DType, GraphBuilder, Shape, TensorSpec, Value};
use hotcell_kernels::{
    backend::{Buffer, Device},
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

use super::{
    products::activations,
    shim::{Arg, NULL, Shim, reported},
};

#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    d: usize,
    block_len: usize,
    window: usize,
    soft_cap: f32,
    interleaved: bool,
    /// Tokens of two sequences.
    lengths: [usize; 2],
}

/// Sequence and position of each row that looks at the cache.
const LOOKS: [(i32, i32); 6] = [(0, 0), (0, 63), (0, 64), (1, 2), (0, 511), (0, 519)];

struct Data {
    spec: CacheSpec,
    blocks_each: usize,
    frequencies: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    slots: Vec<i32>,
    places: Vec<i32>,
    queries: Vec<f32>,
    tables: Vec<i32>,
    sequences: Vec<i32>,
    positions: Vec<i32>,
    /// One score per head, or none.
    sinks: Vec<f32>,
}

/// The cache's bytes, the attention both ways, and what was reported.
type Found = (Vec<u8>, [Vec<f32>; 2], Option<(i64, u64)>);

const SCALE: f32 = 0.3;

const PLAIN: Case = Case {
    dtype: DType::F32,
    name: "f32",
    heads: 4,
    kv_heads: 2,
    d: 16,
    block_len: 16,
    window: 0,
    soft_cap: 0.0,
    interleaved: false,
    lengths: [520, 5],
};

impl Case {
    fn data(&self) -> Data {
        let blocks_each = self.lengths.iter().max().unwrap().div_ceil(self.block_len);
        let spec = CacheSpec {
            dtype: self.dtype,
            blocks: 2 * blocks_each + 1,
            block_len: self.block_len,
            kv_heads: self.kv_heads,
            head_dim: self.d,
        };
        // Blocks in an order that is not theirs.
        let tables: Vec<i32> = (0..2 * blocks_each)
            .map(|b| (2 * blocks_each - b) as i32)
            .collect();
        let (mut slots, mut places) = (vec![], vec![]);
        for (s, length) in self.lengths.into_iter().enumerate() {
            for t in 0..length {
                let block = tables[s * blocks_each + t / self.block_len];
                slots.push(block * self.block_len as i32 + (t % self.block_len) as i32);
                places.push(t as i32);
            }
        }
        // One row is written nowhere, and one is written over by the last.
        slots.extend([-1, slots[0]]);
        places.extend([7, 0]);
        let width = slots.len() * self.kv_heads * self.d;
        let looks: Vec<(i32, i32)> = LOOKS
            .into_iter()
            .filter(|(s, p)| (*p as usize) < self.lengths[*s as usize])
            .collect();
        Data {
            spec,
            blocks_each,
            frequencies: (0..self.d / 2).map(|i| 0.7f32.powi(i as i32)).collect(),
            keys: activations(width, 1),
            values: activations(width, 2),
            slots,
            places,
            queries: activations(looks.len() * self.heads * self.d, 3),
            tables,
            sequences: looks.iter().map(|l| l.0).collect(),
            positions: looks.iter().map(|l| l.1).collect(),
            sinks: vec![],
        }
    }

    /// The cache's bytes and the attention by the CPU backend.
    fn on_the_cpu(&self, data: &Data) -> (Vec<u8>, Vec<f32>) {
        let (rows, looks, half) = (data.slots.len(), data.positions.len(), self.d / 2);
        let mut g = GraphBuilder::new(1);
        let mut input = |name: &str, dtype, dims: &[usize]| -> Value {
            let shape = Shape::fixed(dims).unwrap();
            g.tensor(name, TensorSpec::new(dtype, shape).unwrap())
                .unwrap()
        };
        let (f32s, i32s) = (DType::F32, DType::I32);
        let keys = input("keys", f32s, &[rows, self.kv_heads, self.d]);
        let values = input("values", f32s, &[rows, self.kv_heads, self.d]);
        let slots = input("slots", i32s, &[rows]);
        let places = input("places", i32s, &[rows]);
        let frequencies = input("frequencies", f32s, &[half]);
        let queries = input("queries", f32s, &[looks, self.heads, self.d]);
        let tables = input("tables", i32s, &[2, data.blocks_each]);
        let sequences = input("sequences", i32s, &[looks]);
        let positions = input("positions", i32s, &[looks]);
        let cache = g.cache("cache", data.spec).unwrap();
        let keys = g.rope(keys, places, frequencies, self.interleaved).unwrap();
        g.cache_write(cache, keys, values, slots).unwrap();
        let queries = g
            .rope(queries, positions, frequencies, self.interleaved)
            .unwrap();
        let (window, soft_cap) = (self.window as i64, f64::from(self.soft_cap));
        let y = g
            .paged_attention(
                queries,
                cache,
                tables,
                sequences,
                positions,
                f64::from(SCALE),
                window,
                soft_cap,
            )
            .unwrap();
        let graph = g.finish(&[y]).unwrap();

        let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
        let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
        let floats = |v: &[f32]| v.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>();
        let ints = |v: &[i32]| v.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>();
        let inputs = [
            floats(&data.keys),
            floats(&data.values),
            ints(&data.slots),
            ints(&data.places),
            floats(&data.frequencies),
            floats(&data.queries),
            ints(&data.tables),
            ints(&data.sequences),
            ints(&data.positions),
            vec![0; data.spec.bytes().unwrap()],
        ];
        let mut last = None;
        for (i, bytes) in inputs.iter().enumerate() {
            let buffer: Buffer = device.allocate("test", bytes.len()).unwrap();
            buffer.write(0, bytes).unwrap();
            plan.bind(Slot::Input(i), &buffer, 0).unwrap();
            last = Some(buffer);
        }
        let out = device.allocate("out", data.queries.len() * 4).unwrap();
        plan.bind(Slot::Output(0), &out, 0).unwrap();
        plan.execute(1).unwrap();
        let (mut cache, mut y) = (inputs[9].clone(), vec![0.0; data.queries.len()]);
        last.unwrap().read(0, &mut cache).unwrap();
        out.read_f32(0, &mut y).unwrap();
        (cache, y)
    }

    /// Keys and values as one launch writes them that turns queries of the same rows as well.
    fn at_once(&self, shim: &Shim, data: &Data, expected: &[u8]) {
        let (rows, half) = (data.slots.len(), self.d / 2);
        let queries = activations(rows * self.heads * self.d, 4);
        let int = |n: usize| Arg::from(n as i32);
        let mut table = vec![0.0f32; rows * self.d];
        let args = [
            (&data.places).into(),
            (&data.frequencies).into(),
            (&mut table).into(),
            int(rows),
            int(half),
        ];
        let grid = [(rows * half).div_ceil(128), 1, 1];
        shim.launch("rope_table", grid, 128, &args).unwrap();
        let interleaved = Arg::from(i32::from(self.interleaved));
        let [mut alone, mut turned] = [(); 2].map(|()| vec![0.0f32; queries.len()]);
        let args = [
            (&queries).into(),
            (&table).into(),
            (&mut alone).into(),
            int(rows),
            int(self.heads),
            int(half),
            interleaved,
        ];
        let of_queries = (rows * self.heads * half).div_ceil(128);
        shim.launch("rope_f32", [of_queries, 1, 1], 128, &args)
            .unwrap();
        let mut bad = vec![0u64; 2];
        let mut cache = vec![0u8; data.spec.bytes().unwrap()];
        let args = [
            (&queries).into(),
            (&mut turned).into(),
            int(self.heads),
            int(of_queries),
            (&data.keys).into(),
            (&data.values).into(),
            (&table).into(),
            (&mut cache).into(),
            (&data.slots).into(),
            int(rows),
            int(self.kv_heads),
            int(self.d),
            int(data.spec.blocks),
            int(self.block_len),
            interleaved,
            (&mut bad).into(),
        ];
        let tasks = rows * self.kv_heads * self.d.div_ceil(32) * 2;
        let kernel = format!("rope_write_{}", self.name);
        let grid = [of_queries + tasks.div_ceil(4), 1, 1];
        shim.launch(&kernel, grid, 128, &args).unwrap();
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&turned), bits(&alone), "{}", self.name);
        assert!(cache == expected, "{}", self.name);
    }

    /// The same by the kernels, the attention both ways.
    fn by_kernels(&self, shim: &Shim, data: &Data) -> Found {
        let (rows, looks, half) = (data.slots.len(), data.positions.len(), self.d / 2);
        let int = |n: usize| Arg::from(n as i32);
        let table = |positions: &[i32]| {
            let n = positions.len();
            let mut table = vec![0.0f32; n * self.d];
            let args = [
                positions.into(),
                (&data.frequencies).into(),
                (&mut table).into(),
                int(n),
                int(half),
            ];
            shim.launch("rope_table", [(n * half).div_ceil(128), 1, 1], 128, &args)
                .unwrap();
            table
        };
        let interleaved = Arg::from(i32::from(self.interleaved));
        let mut bad = vec![0u64; 2];
        let mut cache = vec![0u8; data.spec.bytes().unwrap()];
        let turned = table(&data.places);
        let (blocks, block_len) = (int(data.spec.blocks), int(self.block_len));
        let args = [
            (&data.keys).into(),
            (&data.values).into(),
            (&turned).into(),
            (&mut cache).into(),
            (&data.slots).into(),
            int(rows),
            int(self.kv_heads),
            int(self.d),
            blocks,
            block_len,
            interleaved,
            (&mut bad).into(),
        ];
        let tasks = rows * self.kv_heads * self.d.div_ceil(32) * 2;
        let kernel = format!("cache_write_{}", self.name);
        shim.launch(&kernel, [tasks.div_ceil(4), 1, 1], 128, &args)
            .unwrap();

        let turned = table(&data.positions);
        let mut queries = vec![0.0f32; data.queries.len()];
        let args = [
            (&data.queries).into(),
            (&turned).into(),
            (&mut queries).into(),
            int(looks),
            int(self.heads),
            int(half),
            interleaved,
        ];
        let grid = [(looks * self.heads * half).div_ceil(128), 1, 1];
        shim.launch("rope_f32", grid, 128, &args).unwrap();
        self.at_once(shim, data, &cache);

        let sinks = match data.sinks.is_empty() {
            true => NULL,
            false => (&data.sinks).into(),
        };
        let spans = (data.blocks_each * self.block_len).div_ceil(512);
        let mut records = vec![0.0f32; looks * self.heads * spans * (2 + self.d)];
        let mut outs = [vec![9.0f32; queries.len()], vec![9.0f32; queries.len()]];
        let room = if self.d <= 128 { 128 } else { 256 };
        let chunks = (self.heads / self.kv_heads).div_ceil(8) * self.kv_heads;
        for (way, depth) in [("whole", 1), ("spans", spans)] {
            let args = [
                (&queries).into(),
                (&cache).into(),
                (&data.tables).into(),
                (&data.sequences).into(),
                (&data.positions).into(),
                sinks,
                (&mut outs[0]).into(),
                (&mut records).into(),
                int(self.heads),
                int(self.kv_heads),
                int(self.d),
                blocks,
                block_len,
                2.into(),
                int(data.blocks_each),
                SCALE.into(),
                int(self.window),
                self.soft_cap.into(),
                int(spans),
                (&mut bad).into(),
            ];
            let kernel = format!("attention_{way}_{}_{room}", self.name);
            shim.launch(&kernel, [looks, chunks, depth], 256, &args)
                .unwrap();
        }
        let args = [
            (&records).into(),
            (&data.sequences).into(),
            (&data.positions).into(),
            sinks,
            (&mut outs[1]).into(),
            int(self.heads),
            int(self.d),
            blocks,
            block_len,
            2.into(),
            int(data.blocks_each),
            int(self.window),
            int(spans),
        ];
        shim.launch("attention_add", [looks, self.heads, 1], 128, &args)
            .unwrap();
        (cache, outs, reported(&bad))
    }
}

#[test]
fn attention_over_what_was_written_has_the_bits_of_the_cpus() {
    let Some(shim) = Shim::get() else { return };
    let plain = PLAIN;
    let (f16, bf16, q8) = (DType::F16, DType::BF16, DType::Q8_0);
    let cases = [
        plain,
        Case {
            dtype: f16,
            name: "f16",
            soft_cap: 2.0,
            interleaved: true,
            ..plain
        },
        Case {
            dtype: bf16,
            name: "bf16",
            window: 100,
            kv_heads: 4,
            block_len: 7,
            ..plain
        },
        Case {
            dtype: q8,
            name: "q8_0",
            d: 64,
            kv_heads: 1,
            heads: 3,
            ..plain
        },
        Case {
            dtype: bf16,
            name: "bf16",
            d: 136,
            kv_heads: 1,
            heads: 10,
            lengths: [70, 5],
            ..plain
        },
        Case {
            dtype: q8,
            name: "q8_0",
            d: 256,
            kv_heads: 1,
            heads: 1,
            lengths: [66, 3],
            soft_cap: 1.0,
            ..plain
        },
    ];
    for case in cases {
        let data = case.data();
        let (cache, expected) = case.on_the_cpu(&data);
        let (found, [whole, spans], bad) = case.by_kernels(shim, &data);
        assert_eq!(bad, None, "{case:?}");
        assert!(cache == found, "the cache of {case:?}");
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&whole), bits(&expected), "whole, {case:?}");
        assert_eq!(bits(&spans), bits(&expected), "spans, {case:?}");
    }
}

#[test]
fn a_sink_takes_its_share_and_has_no_value() {
    let Some(shim) = Shim::get() else { return };
    let case = PLAIN;
    let mut data = case.data();
    let mut with = |sink: f32| {
        data.sinks = vec![sink; case.heads];
        let (_, [whole, spans], bad) = case.by_kernels(shim, &data);
        assert_eq!((&whole, bad), (&spans, None));
        whole
    };
    let (none, some, all) = (with(f32::NEG_INFINITY), with(1.0), with(1e30));
    assert!(none == case.on_the_cpu(&case.data()).1 && all.iter().all(|v| *v == 0.0));
    // Of a head, all numbers shrink alike: by Σ / (Σ + e).
    for (some, none) in some.chunks(case.d).zip(none.chunks(case.d)) {
        let share = some[0] / none[0];
        assert!(share > 0.0 && share < 1.0, "{share}");
        let alike = some
            .iter()
            .zip(none)
            .all(|(s, n)| (s - n * share).abs() < 1e-5);
        assert!(alike, "{some:?} {none:?}");
    }
}

#[test]
fn wrong_sequences_positions_blocks_and_slots_are_reported() {
    let Some(shim) = Shim::get() else { return };
    let case = Case {
        lengths: [70, 5],
        ..PLAIN
    };
    let slots = case.data().spec.slots() as u64;
    let blocks = case.data().spec.blocks as u64;
    let tokens = (case.data().blocks_each * case.block_len) as u64;
    type Spoil = fn(&mut Data);
    let spoils: [(Spoil, (i64, u64)); 5] = [
        (|d| d.sequences[1] = 2, (2, 2)),
        (|d| d.positions[1] = -5, (-5, tokens)),
        (|d| d.positions[1] = 1 << 30, (1 << 30, tokens)),
        (|d| d.tables[0] = 1 << 20, (1 << 20, blocks)),
        (|d| d.slots[3] = i32::MAX, (i32::MAX.into(), slots)),
    ];
    for (i, (spoil, expected)) in spoils.into_iter().enumerate() {
        let mut data = case.data();
        spoil(&mut data);
        let (_, [whole, spans], bad) = case.by_kernels(shim, &data);
        assert_eq!(bad, Some(expected));
        let row = case.heads * case.d;
        assert!(i >= 3 || whole[row..2 * row].iter().all(|v| *v == 0.0));
        assert!(whole == spans, "{i}");
    }
}
