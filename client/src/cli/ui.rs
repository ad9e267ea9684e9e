//! Input and output of a command: where it goes, whether that is a terminal, colours, progress.

use std::{
    io::{self, BufRead, BufReader, IsTerminal, Read, Write},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::exit::Failure;

/// Less important text.
pub(crate) const DIM: Style = Style::new().dimmed();
/// More important text.
pub(crate) const BOLD: Style = Style::new().bold();
const ERROR: Style = AnsiColor::Red.on_default().bold();

/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(100);

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR or TERM=dumb says otherwise.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Color {
    fn on(self, stream: &impl anstream::stream::RawStream) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => anstream::AutoStream::choice(stream) != anstream::ColorChoice::Never,
        }
    }
}

/// How to speak.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// JSON instead of words.
    pub json: bool,
    /// Say more.
    pub verbose: bool,
    /// When to use colours.
    pub color: Color,
}

/// Where a command reads and writes.
pub struct Ui {
    out: Box<dyn Write + Send>,
    err: Box<dyn Write + Send>,
    input: Option<Box<dyn BufRead + Send>>,
    /// Whether standard input is a terminal.
    pub in_terminal: bool,
    /// Whether standard output is a terminal.
    pub out_terminal: bool,
    /// Whether standard error is a terminal.
    pub err_terminal: bool,
    out_color: bool,
    err_color: bool,
    /// How to speak.
    pub manner: Manner,
}

impl std::fmt::Debug for Ui {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ui")
            .field("manner", &self.manner)
            .finish_non_exhaustive()
    }
}

impl Ui {
    /// The process's own standard streams.
    pub fn standard(manner: Manner) -> Self {
        let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
        Self {
            in_terminal: stdin.is_terminal(),
            out_terminal: stdout.is_terminal(),
            err_terminal: stderr.is_terminal(),
            out_color: manner.color.on(&stdout),
            err_color: manner.color.on(&stderr),
            out: Box::new(stdout),
            err: Box::new(stderr),
            input: Some(Box::new(BufReader::new(stdin))),
            manner,
        }
    }

    /// No terminal: reads `input`, and keeps what is written to standard output and standard error.
    pub fn captured(manner: Manner, input: &str) -> (Self, Captured, Captured) {
        let (out, err) = (Captured::default(), Captured::default());
        let color = manner.color == Color::Always;
        let ui = Self {
            in_terminal: false,
            out_terminal: false,
            err_terminal: false,
            out_color: color,
            err_color: color,
            out: Box::new(out.clone()),
            err: Box::new(err.clone()),
            input: Some(Box::new(io::Cursor::new(input.as_bytes().to_vec()))),
            manner,
        };
        (ui, out, err)
    }

    /// Writes to standard output, at once.
    pub(crate) fn print(&mut self, text: &str) -> Result<(), Failure> {
        self.out.write_all(text.as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// Writes raw bytes to standard output.
    pub(crate) fn print_bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.out.write_all(bytes)?;
        Ok(self.out.flush()?)
    }

    /// Writes one JSON document on a line of its own.
    pub(crate) fn print_json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let mut line = serde_json::to_string(value).map_err(io::Error::from)?;
        line.push('\n');
        self.print(&line)
    }

    /// Writes a model's text: as it is, except that a terminal gets no control characters.
    pub(crate) fn print_text(&mut self, text: &str) -> Result<(), Failure> {
        if self.out_terminal {
            self.print(&harmless(text))
        } else {
            self.print(text)
        }
    }

    /// A line on standard error. That it cannot be written is nobody's concern.
    pub(crate) fn note(&mut self, style: Style, text: &str) {
        let line = paint(self.err_color, style, text);
        let _ = writeln!(self.err, "{line}");
    }

    /// `text` styled for standard output.
    pub(crate) fn styled(&self, style: Style, text: &str) -> String {
        paint(self.out_color, style, text)
    }

    /// Tells of a failure: one line on standard error, or with `--json` an object on standard output.
    pub fn report(&mut self, failure: &Failure) {
        let gone = matches!(failure, Failure::Output(e) if e.kind() == io::ErrorKind::BrokenPipe);
        if gone {
            return;
        }
        if self.manner.json && self.print_json(&failure.view()).is_ok() {
            return;
        }
        if matches!(failure, Failure::Interrupted) {
            return;
        }
        let label = paint(self.err_color, ERROR, "error:");
        let _ = writeln!(self.err, "{label} {}", one_line(&failure.message()));
    }

    /// A spinner for `what` on standard error, for [`bar_style`] once there is something to count; invisible where that is no terminal, and where log lines come between.
    pub(crate) fn progress(&self, what: &str) -> ProgressBar {
        let visible = self.err_terminal && !self.manner.json && !self.manner.verbose;
        let target = if visible {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target)
            .with_style(style("{spinner} {msg} {prefix}"))
            .with_message(one_line(what));
        if visible {
            // Shows it at once, and that something goes on while nobody reports.
            bar.enable_steady_tick(TICK);
        }
        bar
    }

    /// All of standard input as text; one line end at its end is not part of it.
    ///
    /// # Errors
    /// [`Reason::LimitExceeded`] and [`Reason::InvalidArgument`] for what cannot be a prompt.
    pub(crate) fn read_all(&mut self) -> Result<String, Failure> {
        let input = self.input.take().into_iter();
        let mut bytes = Vec::new();
        for input in input {
            let most = limits::MAX_PROMPT_BYTES as u64 + 1;
            input
                .take(most)
                .read_to_end(&mut bytes)
                .map_err(unreadable)?;
        }
        if bytes.len() > limits::MAX_PROMPT_BYTES {
            return Err(too_long().into());
        }
        let mut text = String::from_utf8(bytes).map_err(|_| not_text())?;
        trim_line_end(&mut text);
        Ok(text)
    }

    /// The lines of standard input, read by a thread of their own, so that waiting for one can be given up.
    pub(crate) fn lines(&mut self) -> tokio::sync::mpsc::Receiver<Result<String, Error>> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        if let Some(mut input) = self.input.take() {
            // Not one of tokio's blocking threads: the runtime would wait for it at the end.
            std::thread::spawn(move || {
                while let Some(line) = next_line(&mut input).transpose() {
                    let last = line.is_err();
                    if sender.blocking_send(line).is_err() || last {
                        break;
                    }
                }
            });
        }
        receiver
    }
}

fn next_line(input: &mut impl BufRead) -> Result<Option<String>, Error> {
    let mut bytes = Vec::new();
    let mut limited = input.take(limits::MAX_PROMPT_BYTES as u64 + 1);
    limited.read_until(b'\n', &mut bytes).map_err(unreadable)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.len() > limits::MAX_PROMPT_BYTES {
        return Err(too_long());
    }
    let mut line = String::from_utf8(bytes).map_err(|_| not_text())?;
    trim_line_end(&mut line);
    Ok(Some(line))
}

fn trim_line_end(text: &mut String) {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
}

fn unreadable(error: io::Error) -> Error {
    Error::new(
        Reason::InvalidArgument,
        format!("cannot read standard input: {error}"),
    )
}

fn too_long() -> Error {
    Error::new(
        Reason::LimitExceeded,
        format!(
            "the text on standard input is longer than the {} bytes a prompt may have; shorten it",
            limits::MAX_PROMPT_BYTES
        ),
    )
}

fn not_text() -> Error {
    Error::new(
        Reason::InvalidArgument,
        "the text on standard input is not UTF-8; convert it first",
    )
}

fn paint(on: bool, style: Style, text: &str) -> String {
    if on && style != Style::new() {
        format!("{style}{text}{style:#}")
    } else {
        text.to_owned()
    }
}

/// Text that cannot steer a terminal: line ends and tabs stay, other control characters are shown as `�`.
pub(crate) fn harmless(text: &str) -> String {
    let chars = text.chars().filter(|&c| c != '\r');
    let shown = chars.map(|c| match c {
        '\n' | '\t' => c,
        c if c.is_control() => '\u{fffd}',
        c => c,
    });
    shown.collect()
}

/// Text for one line or table cell.
pub(crate) fn one_line(text: &str) -> String {
    harmless(text).replace(['\n', '\t'], " ")
}

/// The look of a bar whose end is known.
pub(crate) fn bar_style() -> ProgressStyle {
    style("{msg} [{bar:24}] {bytes}/{total_bytes} {prefix}").progress_chars("=> ")
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// What a captured command wrote.
#[derive(Clone, Debug, Default)]
pub struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    /// The text so far.
    pub fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_not_steered_by_text() {
        assert_eq!(
            harmless("a\x1b[2Jb\tc\r\nd\u{9b}"),
            "a\u{fffd}[2Jb\tc\nd\u{fffd}"
        );
        assert_eq!(one_line("a\nb"), "a b");
    }

    #[test]
    fn progress_is_for_terminals_only() {
        let (ui, ..) = Ui::captured(Manner::default(), "");
        let bar = ui.progress("loading");
        assert!(bar.is_hidden());
    }

    #[test]
    fn standard_input_loses_one_line_end() {
        for (input, text) in [
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a", "a"),
            ("", ""),
        ] {
            let (mut ui, ..) = Ui::captured(Manner::default(), input);
            assert_eq!(ui.read_all().unwrap(), text, "{input:?}");
        }
    }
}
