//! Lists for people: columns, sizes, times.

use anstyle::Style;

use super::{
    exit::Failure,
    ui::{BOLD, Ui, one_line},
};

/// Rows under a heading. Columns are as wide as their widest cell; the last one is not padded.
pub(crate) struct Table {
    heading: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(heading: &[&'static str]) -> Self {
        Self {
            heading: heading.to_vec(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let shown = cells.into_iter().map(|cell| match one_line(&cell) {
            cell if cell.is_empty() => "-".to_owned(),
            cell => cell,
        });
        let shown: Vec<String> = shown.collect();
        debug_assert_eq!(shown.len(), self.heading.len());
        self.rows.push(shown);
    }

    pub(crate) fn print(&self, ui: &mut Ui, nothing: &str) -> Result<(), Failure> {
        if self.rows.is_empty() {
            return ui.print(&format!("{nothing}\n"));
        }
        let widths: Vec<usize> = (0..self.heading.len())
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                let widest = cells.map(|cell| cell.chars().count()).max();
                widest.unwrap_or(0).max(self.heading[column].len())
            })
            .collect();
        let mut text = String::new();
        let line = |cells: &[&str]| {
            let cells = cells.iter().zip(&widths);
            let cells: Vec<String> = cells
                .map(|(cell, &width)| format!("{cell:width$}"))
                .collect();
            cells.join("  ").trim_end().to_owned()
        };
        text.push_str(&ui.styled(BOLD, &line(&self.heading)));
        text.push('\n');
        for row in &self.rows {
            let cells: Vec<&str> = row.iter().map(String::as_str).collect();
            text.push_str(&ui.styled(Style::new(), &line(&cells)));
            text.push('\n');
        }
        ui.print(&text)
    }
}

/// A size, for example `9.0 MiB`.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut size = n as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1023.95 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", UNITS[unit])
}

/// A count, for example `1.1B`.
pub(crate) fn count(n: u64) -> String {
    match n {
        0 => String::new(),
        1..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1}K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        _ => format!("{:.1}B", n as f64 / 1e9),
    }
}

/// A time span, for example `3m 20s`.
pub(crate) fn span(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms}ms"),
        1..60 => format!("{s}s"),
        60..3600 => format!("{}m {}s", s / 60, s % 60),
        3600..86400 => format!("{}h {}m", s / 3600, s / 60 % 60),
        _ => format!("{}d {}h", s / 86400, s / 3600 % 24),
    }
}

/// A time of day in UTC, for example `14:03:59.120`, of milliseconds since the epoch.
pub(crate) fn time_of_day(ms: u64) -> String {
    let s = ms / 1000 % 86400;
    format!(
        "{:02}:{:02}:{:02}.{:03}",
        s / 3600,
        s / 60 % 60,
        s % 60,
        ms % 1000
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_counts_and_spans_are_short() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(9 << 20), "9.0 MiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
        assert_eq!(count(4_726_016), "4.7M");
        assert_eq!(span(200_000), "3m 20s");
        assert_eq!(time_of_day(86_400_000 + 3_723_004), "01:02:03.004");
    }
}
