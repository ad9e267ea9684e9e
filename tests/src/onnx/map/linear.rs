//! Matrix products.

use anyhow::{Context, Result, bail};
use hotcell_graph::{DType, Value, op::Attribute};

use super::Mapper;

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "MatMul" => m.binary("matmul", m.x(0)?, m.x(1)?)?,
        "Gemm" => gemm(m)?,
        "MatMulInteger" => {
            let (a, b) = (m.x(0)?, m.x(1)?);
            let (a, b) = (less_zero(m, a, 2)?, less_zero(m, b, 3)?);
            // Sums of products of 8-bit integers are exact in f64.
            m.cast(m.binary("matmul", a, b)?, DType::I32)?
        }
        "Einsum" => {
            let equation = m.text("equation", "").as_bytes().to_vec();
            m.one("einsum", &m.all_inputs()?, vec![Attribute::Bytes(equation)])?
        }
        "Det" => determinant(m)?,
        "AffineGrid" => affine_grid(m)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

/// Where an affine map has the elements of an image, in coordinates from −1 to 1, the innermost axis' first.
fn affine_grid(m: &Mapper<'_>) -> Result<Value> {
    let theta = m.x(0)?;
    let size = m.given_ints(1)?.context("no size")?;
    let corners = m.int("align_corners", 0) != 0;
    let image: Vec<usize> = size.iter().skip(2).map(|&n| n as usize).collect();
    let count: usize = image.iter().product();
    let place = |i: usize, n: usize| match corners {
        true => 2.0 * i as f64 / (n as f64 - 1.0) - 1.0,
        false => (2.0 * i as f64 + 1.0) / n as f64 - 1.0,
    };
    let mut places = Vec::new();
    for element in 0..count {
        let mut rest = element;
        for &n in image.iter().rev() {
            places.push(place(rest % n, n) as f32);
            rest /= n;
        }
        places.push(1.0);
    }
    let places = m.f32s(&[count, image.len() + 1], &places)?;
    let places = m.cast(places, m.dtype(theta)?)?;
    let grid = m.binary("matmul", places, m.transpose(theta, &[0, 2, 1])?)?;
    let mut dims = vec![m.dims(theta)?[0]];
    dims.extend(&image);
    dims.push(image.len());
    m.reshape(grid, &dims)
}

/// Of matrices of 2 by 2.
fn determinant(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let dims = m.dims(x)?;
    let (outer, square) = dims.split_at(dims.len().saturating_sub(2));
    if square != [2, 2] {
        bail!("there is no op for determinants");
    }
    let element = |row: i64, column: i64| {
        let row = m.slice(x, outer.len(), row, row + 1, 1)?;
        let element = m.slice(row, outer.len() + 1, column, column + 1, 1)?;
        m.reshape(element, outer)
    };
    let down = m.mul(element(0, 0)?, element(1, 1)?)?;
    m.sub(down, m.mul(element(0, 1)?, element(1, 0)?)?)
}

/// A quantised tensor less its zero point, as f64.
fn less_zero(m: &Mapper<'_>, x: Value, zero: usize) -> Result<Value> {
    let x = m.cast(x, DType::F64)?;
    match m.optional(zero)? {
        Some(zero) => m.sub(x, m.cast(zero, DType::F64)?),
        None => Ok(x),
    }
}

fn gemm(m: &Mapper<'_>) -> Result<Value> {
    let turned = |i: usize, name: &str| {
        let x = m.x(i)?;
        if m.int(name, 0) != 0 {
            return m.transpose(x, &[1, 0]);
        }
        Ok(x)
    };
    let (a, b) = (turned(0, "transA")?, turned(1, "transB")?);
    let (alpha, beta) = (m.float("alpha", 1.0), m.float("beta", 1.0));
    match m.optional(2)? {
        Some(c) => {
            let attributes = vec![Attribute::Float(alpha), Attribute::Float(beta)];
            m.one("addmm", &[c, a, b], attributes)
        }
        None => m.scale(m.binary("matmul", a, b)?, alpha),
    }
}
