//! A child's output as lines that are safe to print and bounded in memory, whatever the child writes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Bounds of one child's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLimits {
    /// Bytes of a line that are kept; the rest is dropped and a `…` put in its place.
    pub line_bytes: usize,
    /// Lines that are remembered, the newest ones.
    pub lines: usize,
    /// Lines handed to the callback in a second. More are remembered and counted, not handed on: a child must
    /// not flood its owner's log.
    pub lines_per_second: u32,
}

impl Default for LogLimits {
    fn default() -> Self {
        LogLimits {
            line_bytes: 1024,
            lines: 256,
            lines_per_second: 100,
        }
    }
}

/// The last lines of a child's output. Clones share them; they stay readable after the child's end.
#[derive(Clone, Debug)]
pub struct BoundedLog {
    limits: LogLimits,
    ring: Arc<Mutex<Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    lines: VecDeque<String>,
    total: u64,
    withheld: u64,
}

impl BoundedLog {
    /// An empty log.
    pub fn new(limits: LogLimits) -> Self {
        BoundedLog {
            limits,
            ring: Arc::default(),
        }
    }

    /// Starts a task of the current tokio runtime that drains `output` (see [`drain`](Self::drain)).
    ///
    /// # Errors
    /// `NotConnected` outside a tokio runtime.
    pub fn start(
        output: OwnedFd,
        limits: LogLimits,
        on_line: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<(BoundedLog, JoinHandle<io::Result<()>>)> {
        let runtime = tokio::runtime::Handle::try_current()
            .map_err(|error| io::Error::new(io::ErrorKind::NotConnected, error))?;
        let log = BoundedLog::new(limits);
        let drained = log.clone();
        let task = runtime.spawn(async move { drained.drain(output, on_line).await });
        Ok((log, task))
    }

    /// Reads `output` (a pipe or socket) until its last writer closes it, as fast as it comes, so that the child
    /// never hangs in `write` for long. Each line goes into the ring, and to `on_line` within the rate.
    ///
    /// If the child handed its output on to a process of its own, that one keeps this going: abort the task.
    ///
    /// # Errors
    /// What `fcntl`, epoll or `read` report.
    pub async fn drain(&self, output: OwnedFd, mut on_line: impl FnMut(&str)) -> io::Result<()> {
        // The flag belongs to the open file: the reading end, which is ours alone. The child's end stays as is.
        rustix::io::ioctl_fionbio(&output, true)?;
        let output = crate::socket::readiness(Arc::new(output))?;
        let mut splitter = Splitter::new(self.limits.line_bytes);
        let mut rate = Rate::new(self.limits.lines_per_second);
        let mut chunk = vec![0; 16 << 10];
        loop {
            let mut ready = output.readable().await?;
            let read = ready.try_io(|output| {
                rustix::io::retry_on_intr(|| rustix::io::read(output, &mut chunk[..]))
                    .map_err(io::Error::from)
            });
            match read {
                Ok(Ok(0)) => break,
                Ok(Ok(read)) => {
                    splitter.push(&chunk[..read], |line| {
                        self.add(line, &mut rate, &mut on_line)
                    });
                    // A child that floods is always ready: let others run.
                    tokio::task::yield_now().await;
                }
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
        splitter.finish(|line| self.add(line, &mut rate, &mut on_line));
        Ok(())
    }

    /// Remembers these lines as if they had come.
    pub fn remember(&self, lines: impl IntoIterator<Item = String>) {
        let mut ring = self.ring();
        ring.lines.extend(lines);
        while ring.lines.len() > self.limits.lines {
            ring.lines.pop_front();
        }
    }

    /// The lines remembered, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.ring().lines.iter().cloned().collect()
    }

    /// How many lines came in all.
    pub fn total(&self) -> u64 {
        self.ring().total
    }

    /// How many of them were not handed to the callback, for coming too fast.
    pub fn withheld(&self) -> u64 {
        self.ring().withheld
    }

    fn ring(&self) -> std::sync::MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, line: String, rate: &mut Rate, on_line: &mut impl FnMut(&str)) {
        // Not under the lock: a callback may look at the log.
        let allowed = rate.allow(Instant::now());
        if allowed {
            on_line(&line);
        }
        let mut ring = self.ring();
        ring.total += 1;
        ring.withheld += u64::from(!allowed);
        if self.limits.lines == 0 {
            return;
        }
        while ring.lines.len() >= self.limits.lines {
            ring.lines.pop_front();
        }
        ring.lines.push_back(line);
    }
}

/// So many in each second.
struct Rate {
    most: u32,
    left: u32,
    since: Option<Instant>,
}

impl Rate {
    fn new(most: u32) -> Self {
        Rate {
            most,
            left: 0,
            since: None,
        }
    }

    fn allow(&mut self, now: Instant) -> bool {
        let fresh = self
            .since
            .is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1));
        if fresh {
            self.since = Some(now);
            self.left = self.most;
        }
        let allowed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        allowed
    }
}

/// Where in an escape sequence (ECMA-48) the bytes are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Escape {
    None,
    /// After ESC, or its intermediate bytes.
    Begun,
    /// `ESC [` parameters, until a byte from `@` to `~`.
    Control,
    /// `ESC ]` and its like: text until BEL or `ESC \`.
    Text,
}

/// Splits bytes into lines without escape sequences and control characters, holding at most one line's limit.
struct Splitter {
    limit: usize,
    line: Vec<u8>,
    cut: bool,
    escape: Escape,
}

impl Splitter {
    fn new(limit: usize) -> Self {
        Splitter {
            limit,
            line: Vec::new(),
            cut: false,
            escape: Escape::None,
        }
    }

    fn push(&mut self, bytes: &[u8], mut on_line: impl FnMut(String)) {
        for &byte in bytes {
            // Ends an unfinished escape sequence too: it must not swallow the rest of the log.
            if byte == b'\n' {
                on_line(self.take());
                continue;
            }
            self.escape = match (self.escape, byte) {
                (_, 0x1b) => Escape::Begun,
                (Escape::None, _) => {
                    self.keep(byte);
                    Escape::None
                }
                (Escape::Begun, b'[') => Escape::Control,
                (Escape::Begun, b']' | b'P' | b'X' | b'^' | b'_') => Escape::Text,
                (Escape::Begun, 0x20..=0x2f) => Escape::Begun,
                (Escape::Begun, _) => Escape::None,
                (Escape::Control, 0x40..=0x7e) => Escape::None,
                (Escape::Text, 0x07) => Escape::None,
                (state, _) => state,
            };
        }
    }

    /// Hands out what came after the last line's end.
    fn finish(&mut self, on_line: impl FnOnce(String)) {
        if !self.line.is_empty() || self.cut {
            on_line(self.take());
        }
    }

    fn keep(&mut self, byte: u8) {
        let byte = if byte == b'\t' { b' ' } else { byte };
        if byte < 0x20 || byte == 0x7f {
            return;
        }
        if self.line.len() < self.limit {
            self.line.push(byte);
        } else {
            self.cut = true;
        }
    }

    fn take(&mut self) -> String {
        if self.cut {
            // Do not show half a character as a broken one.
            if let Err(error) = std::str::from_utf8(&self.line)
                && error.error_len().is_none()
            {
                self.line.truncate(error.valid_up_to());
            }
        }
        let mut line: String = String::from_utf8_lossy(&self.line)
            .chars()
            .filter(|&c| !c.is_control() && !reorders(c))
            .collect();
        if self.cut {
            line.push('…');
        }
        self.line.clear();
        self.cut = false;
        self.escape = Escape::None;
        line
    }
}

/// Characters that make a terminal show a line in another order than it has.
fn reorders(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(limit: usize, chunks: &[&[u8]]) -> Vec<String> {
        let mut splitter = Splitter::new(limit);
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(chunk, |line| lines.push(line));
        }
        splitter.finish(|line| lines.push(line));
        lines
    }

    #[test]
    fn lines_are_whole_across_chunks_and_the_last_needs_no_end() {
        assert_eq!(
            split(100, &[b"on", b"e\r\ntwo\n\nla", b"st"]),
            ["one", "two", "", "last"]
        );
        assert!(split(100, &[b""]).is_empty());
    }

    #[test]
    fn escapes_and_control_characters_are_stripped() {
        let colour = b"\x1b[1;31mred\x1b[0m and\x1b]0;title\x07 plain\x1b(B\x08\x00\ttab";
        assert_eq!(split(100, &[colour]), ["red and plain tab"]);
        let osc = b"a\x1b]8;;http://x\x1b\\b\xc2\x9bc\xe2\x80\xaed";
        assert_eq!(split(100, &[osc]), ["abcd"]);
        let bytewise: Vec<&[u8]> = colour.chunks(1).collect();
        assert_eq!(split(100, &bytewise), ["red and plain tab"]);
    }

    #[test]
    fn an_unfinished_escape_ends_with_its_line() {
        assert_eq!(
            split(100, &[b"a\x1b]0;never", b" ends\nnext"]),
            ["a", "next"]
        );
    }

    #[test]
    fn long_lines_are_cut_at_a_character() {
        assert_eq!(split(4, &[b"abcdefgh\nij\n"]), ["abcd…", "ij"]);
        // Two bytes each: the limit falls into the third.
        assert_eq!(split(5, &["äöüß".as_bytes()]), ["äö…"]);
        assert_eq!(split(4, &[b"abcd\n"]), ["abcd"]);
    }

    #[test]
    fn bytes_that_are_no_text_are_shown_as_such() {
        assert_eq!(split(100, &[b"a\xff\xfeb"]), ["a\u{fffd}\u{fffd}b"]);
    }

    #[test]
    fn the_rate_holds_back_and_recovers() {
        let mut rate = Rate::new(2);
        let now = Instant::now();
        let allowed = [0, 10, 20, 999, 1000, 1001, 1002]
            .map(|ms| rate.allow(now + Duration::from_millis(ms)));
        assert_eq!(allowed, [true, true, false, false, true, true, false]);
    }
}
