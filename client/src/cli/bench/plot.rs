//! The rows of a bench as a picture: tokens per second, and times to the first token, over streams at once.

use std::{
    error::Error,
    fs::File,
    io::{self, Write},
    path::Path,
};

use plotters::prelude::*;

use crate::{
    cli::exit::Failure,
    load::Outcome,
    whole::{self, Readers},
};

/// Size in pixels.
const SIZE: (u32, u32) = (900, 700);

/// Lines of a panel: one per length of prompt and answer.
type Lines = Vec<(String, Vec<(f64, f64)>)>;

/// Draws into a file.
///
/// # Errors
/// What writing reports.
pub(super) fn draw(file: &Path, outcomes: &[Outcome]) -> Result<(), Failure> {
    let mut text = String::new();
    picture(&mut text, outcomes).map_err(|e| Failure::Output(io::Error::other(e.to_string())))?;
    let write = |file: &mut File| file.write_all(text.as_bytes());
    whole::write(file, Readers::Usual, write).map_err(|error| {
        let words = format!("{} cannot be written: {error}", file.display());
        Failure::Output(io::Error::new(error.kind(), words))
    })
}

fn picture(text: &mut String, outcomes: &[Outcome]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(text, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let (above, below) = area.split_vertically(SIZE.1 / 2);
    let tokens = lines(outcomes, |o| o.tokens_per_second);
    panel(&above, "generated tokens per second", tokens)?;
    let first = lines(outcomes, |o| o.first_token_ms.p50);
    panel(&below, "time to the first token, median, ms", first)?;
    area.present()?;
    Ok(())
}

fn lines(outcomes: &[Outcome], value: impl Fn(&Outcome) -> f64) -> Lines {
    let mut lines: Lines = Vec::new();
    for o in outcomes {
        let name = format!("{} + {} tokens", o.prompt_tokens, o.max_tokens);
        let point = (o.streams as f64, value(o));
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    for (_, points) in &mut lines {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines
}

fn panel<D: DrawingBackend>(
    area: &DrawingArea<D, plotters::coord::Shift>,
    title: &str,
    lines: Lines,
) -> Result<(), Box<dyn Error>>
where
    D::ErrorType: 'static,
{
    let points = || lines.iter().flat_map(|(_, points)| points);
    let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(0.0, f64::max);
    let (right, top) = (most(|p| p.0).max(1.0) * 1.05, most(|p| p.1).max(1e-3) * 1.1);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("streams at once").draw()?;
    for (k, (name, points)) in lines.into_iter().enumerate() {
        let color = Palette99::pick(k).to_rgba();
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(2),
            ))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
        chart.draw_series(
            points
                .into_iter()
                .map(|p| Circle::new(p, 3, color.filled())),
        )?;
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}
