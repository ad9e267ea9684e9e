//! Operands for rows that are made of others: windows by place, images, contractions, weights with scales.

use hotcell_graph::{
    DType,
    op::{Attribute, ValueSpec},
};

use super::{Maker, Template, fixed, int, ints, name, shape, tensor};

pub(super) fn template(row: &str, maker: &mut Maker<'_>) -> Option<Template> {
    Some(match row {
        "as_strided" | "slice_update" | "slice_dynamic" | "slice_update_dynamic" => {
            place(row, maker)
        }
        "diagonal" => {
            let dims = maker.sizes(3);
            let attributes = vec![
                Attribute::Int(maker.choices.pick(&[0, 1, -1, 5])),
                int(maker.choices.below(2)),
                int(2),
            ];
            Template {
                inputs: vec![fixed(DType::F32, &dims)],
                attributes,
            }
        }
        "fft" => Template {
            inputs: vec![fixed(DType::C64, &[maker.size(), maker.size()])],
            attributes: vec![int(maker.choices.below(2)), maker.yes()],
        },
        "cholesky" | "qr" | "lu" | "det" | "solve" | "solve_triangular" | "svd" | "eigh"
        | "eig" => linear(row, maker),
        "gated_delta" | "mamba2_scan" => recurrent(row, maker),
        "einsum" => einsum(maker),
        "quantize" | "dequantize" | "quantized_matmul" | "gather_qmm" => quantised(row, maker),
        "mul_mat_scaled" | "mul_mat_id_scaled" => scaled(row, maker),
        "quantize_float" => Template {
            inputs: vec![fixed(maker.any_float(), &[maker.size(), 64])],
            attributes: vec![name(maker.choices.pick(&["mxfp4", "mxfp8", "nvfp4"]))],
        },
        "from_fp8" => Template {
            inputs: vec![fixed(DType::U8, &[maker.size()])],
            attributes: vec![Attribute::DType(maker.any_float())],
        },
        "im2col" | "col2im" | "interpolate" | "conv_transpose" | "ssm_conv" => image(row, maker),
        _ => return None,
    })
}

fn scaled(row: &str, maker: &mut Maker<'_>) -> Template {
    let dtypes = [
        DType::F8E4M3,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::NVFP4,
    ];
    let dtype = maker.choices.pick(&dtypes);
    let (n, mut k, index) = (maker.size(), maker.size(), maker.index());
    let height = maker.choices.pick(&[1, 2, 16, 1 << 31]);
    let mut width = maker.choices.pick(&[1, 3, 32, 1 << 31]);
    // Blocks have scales of whole rows.
    if dtype == DType::NVFP4 {
        (k, width) = (dtype.block_len() * maker.choices.pick(&[1, 2]), 1 << 31);
    }
    let (down, across) = (n.div_ceil(height), k.div_ceil(width));
    let inputs = match row {
        "mul_mat_scaled" => {
            let x = tensor(DType::F32, &[maker.rows(), k.into()]);
            let scales = fixed(DType::F32, &[down, across]);
            vec![x, fixed(dtype, &[n, k]), scales]
        }
        _ => {
            let (t, u) = (maker.size(), maker.choices.pick(&[1, 2]));
            let each = maker.choices.pick(&[1, u]);
            vec![
                fixed(dtype, &[4, n, k]),
                fixed(DType::F32, &[t, each, k]),
                fixed(index, &[t, u]),
                fixed(DType::F32, &[4, down, across]),
            ]
        }
    };
    Template {
        inputs,
        attributes: vec![int(height), int(width)],
    }
}

fn place(row: &str, maker: &mut Maker<'_>) -> Template {
    let dtype = maker
        .choices
        .pick(&[DType::F32, DType::U8, DType::C64, DType::BF16]);
    let (a, b) = (maker.some(), maker.some());
    let x = fixed(dtype, &[a, b]);
    let (m, n) = (maker.choices.below(a + 1), maker.choices.below(b + 1));
    let starts = fixed(maker.index(), &[2]);
    match row {
        "as_strided" => {
            let strides = vec![
                Attribute::Ints(vec![1, maker.choices.pick(&[0, 1, -1])]),
                int(maker.choices.pick(&[0, 1, 2])),
            ];
            let dims = shape(&[maker.choices.pick(&[1, 2, 0]), 2]);
            Template {
                inputs: vec![x],
                attributes: [vec![dims], strides].concat(),
            }
        }
        "slice_update" => Template {
            inputs: vec![x, fixed(dtype, &[m, n])],
            attributes: vec![ints(&[a - m, 0]), ints(&[a, n]), ints(&[1, 1])],
        },
        "slice_dynamic" => Template {
            inputs: vec![x, starts],
            attributes: vec![ints(&[m, n])],
        },
        _ => Template {
            inputs: vec![x, fixed(dtype, &[m, n]), starts],
            attributes: vec![],
        },
    }
}

fn linear(row: &str, maker: &mut Maker<'_>) -> Template {
    let dtype = maker.choices.pick(&[DType::F32, DType::F64]);
    let (batch, n) = (maker.size(), maker.some());
    let m = match row {
        "qr" | "lu" | "svd" => maker.some(),
        _ => n,
    };
    let mut inputs = vec![fixed(dtype, &[batch, m, n])];
    if row.starts_with("solve") {
        inputs.push(fixed(maker.choices.pick(&[DType::F32, dtype]), &[n, 2]));
    }
    let flag = matches!(row, "cholesky" | "solve_triangular");
    Template {
        inputs,
        attributes: flag.then(|| maker.yes()).into_iter().collect(),
    }
}

fn recurrent(row: &str, maker: &mut Maker<'_>) -> Template {
    let dtype = maker.any_float();
    let (b, t, k, v) = (maker.size(), maker.size(), maker.size(), maker.size());
    let groups = maker.choices.pick(&[1, 2]);
    let heads = groups * maker.choices.pick(&[1, 3]);
    let of = |dims: &[usize]| fixed(dtype, dims);
    let (small, large) = (of(&[b, t, groups, k]), of(&[b, t, heads, v]));
    let one = of(&[b, t, heads]);
    let state = maker.optional(of(&[b, heads, v, k]));
    let inputs = match row {
        "gated_delta" => vec![small.clone(), small, large, one.clone(), one, state],
        _ => {
            let d = maker.optional(of(&[heads]));
            vec![large, one, of(&[heads]), small.clone(), small, d, state]
        }
    };
    Template {
        inputs,
        attributes: vec![],
    }
}

fn einsum(maker: &mut Maker<'_>) -> Template {
    let dtype = maker.choices.pick(&[DType::F32, DType::I8, DType::F16]);
    let (i, j, k) = (maker.size(), maker.size(), maker.size());
    let (equation, inputs): (&str, Vec<ValueSpec>) = match maker.choices.below(5) {
        0 => (
            "ij,jk->ik",
            vec![fixed(dtype, &[i, j]), fixed(dtype, &[j, k])],
        ),
        1 => ("ii->i", vec![fixed(dtype, &[i, i])]),
        2 => (
            "...i,i->...",
            vec![fixed(dtype, &[j, k, i]), fixed(DType::F32, &[i])],
        ),
        3 => (
            "i,j,k",
            vec![fixed(dtype, &[i]), fixed(dtype, &[j]), fixed(dtype, &[k])],
        ),
        _ => ("ij->ji", vec![fixed(dtype, &[i, j])]),
    };
    Template {
        inputs,
        attributes: vec![Attribute::Bytes(equation.as_bytes().to_vec())],
    }
}

fn quantised(row: &str, maker: &mut Maker<'_>) -> Template {
    let (n, k) = (maker.some(), 64 * maker.choices.pick(&[1, 2]));
    let (mode, group, bits) = maker.choices.pick(&[
        ("affine", 32, 3),
        ("affine", 64, 4),
        ("affine", 64, 8),
        ("mxfp4", 32, 4),
        ("mxfp8", 32, 8),
        ("nvfp4", 16, 4),
    ]);
    let (x, b) = (maker.any_float(), maker.choices.pick(&[1, 2]));
    if row == "quantize" {
        return Template {
            inputs: vec![fixed(x, &[n, k])],
            attributes: vec![int(group.max(32)), int(bits)],
        };
    }
    let scales = if mode == "affine" { x } else { DType::U8 };
    let of = |dtype: DType, last: usize| fixed(dtype, &[b, n, last]);
    let biases = match mode {
        "affine" => of(scales, k / group),
        _ => ValueSpec::Absent,
    };
    let weights = vec![of(DType::U32, k * bits / 32), of(scales, k / group), biases];
    let format = vec![name(mode), int(group), int(bits)];
    if row == "dequantize" {
        return Template {
            inputs: weights,
            attributes: [format, vec![Attribute::DType(maker.any_float())]].concat(),
        };
    }
    let mut inputs = vec![fixed(x, &[b, 3, k])];
    inputs.extend(weights);
    if row == "gather_qmm" {
        let ids = fixed(maker.index(), &[2]);
        inputs.extend([maker.optional(ids.clone()), maker.optional(ids)]);
    }
    Template {
        inputs,
        attributes: [vec![Attribute::Bool(true)], format].concat(),
    }
}

fn image(row: &str, maker: &mut Maker<'_>) -> Template {
    let (n, c, dtype) = (maker.size(), maker.some(), maker.any_float());
    let axes = 1 + maker.choices.below(2);
    let some = |maker: &mut Maker<'_>, from: &[usize]| -> Vec<usize> {
        (0..axes).map(|_| maker.choices.pick(from)).collect()
    };
    let space = some(maker, &[5, 3, 8, 1]);
    let x = fixed(dtype, &[&[n, c], &space[..]].concat());
    match row {
        "interpolate" => {
            let sizes = ints(&some(maker, &[4, 1, 9]));
            let mode = maker.choices.pick(&["nearest", "linear", "cubic"]);
            Template {
                inputs: vec![x],
                attributes: vec![sizes, name(mode), maker.yes()],
            }
        }
        "im2col" => {
            let mut attributes = vec![ints(&some(maker, &[2, 1]))];
            attributes.extend(maker.window(axes));
            Template {
                inputs: vec![x],
                attributes,
            }
        }
        "col2im" => {
            let window = some(maker, &[2, 1]);
            let places = space.iter().zip(&window).map(|(s, w)| (s + 1) - w.min(s));
            let column = c * window.iter().product::<usize>();
            let plain = |v: usize| ints(&vec![v; axes]);
            Template {
                inputs: vec![fixed(dtype, &[n, column, places.product()])],
                attributes: vec![
                    ints(&space),
                    ints(&window),
                    plain(1),
                    plain(0),
                    plain(0),
                    plain(1),
                ],
            }
        }
        "ssm_conv" => {
            let (k, t) = (maker.choices.pick(&[4, 1, 2]), maker.choices.pick(&[1, 5]));
            Template {
                inputs: vec![
                    fixed(dtype, &[n, c, k - 1 + t]),
                    fixed(maker.any_float(), &[c, k]),
                ],
                attributes: vec![],
            }
        }
        _ => {
            let groups = maker.choices.pick(&[1, 1, c]);
            let (o, window) = (maker.choices.pick(&[1, 2]), some(maker, &[3, 1, 2]));
            let bias = fixed(dtype, &[o * groups]);
            let w = fixed(dtype, &[&[c, o], &window[..]].concat());
            let lists = [[1, 1, 2], [0, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 2]]
                .map(|from| ints(&some(maker, &from)));
            let mut attributes = lists.to_vec();
            attributes.push(int(groups));
            Template {
                inputs: vec![x, w, maker.optional(bias)],
                attributes,
            }
        }
    }
}
