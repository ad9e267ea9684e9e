//! Bounds for chat templates, which come with a model and may be hostile.
//!
//! minijinja counts steps ("fuel"), but one step can double a string or walk a list of lists that is exponential as a
//! tree, so steps bound neither memory nor time. Hence every value that a template makes is measured and charged to a
//! budget: [`rewrite`] puts `( … )|__charge` around each expression that can make one (operators, filters, calls,
//! literals of lists and dicts), and what is written out is charged by the formatter. The few filters that
//! multiply sizes in one go are replaced by ones that charge first ([`super::chat_values`]). A step that only looks at a
//! big value makes none, but takes its time: so the clock is looked at wherever there is a charge, and by a `__tick` at
//! the beginning of every body that can run repeatedly, and after what would not be charged otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::TextError;

/// The most operators in one expression: between two charges each may double a string.
const MAX_OPERATORS: usize = 128;

/// How many tokens an expression may chain (`a.b.c`, `a or b or c`, `x|f|g`): minijinja compiles and drops such a chain
/// by recursion, a stack frame or two for each link.
const MAX_CHAIN: usize = 500;

/// The most `elif`s; each is an `if` inside the one before.
const MAX_ELIF: usize = 200;

/// How deep lists and dicts may be inside each other.
const MAX_DEPTH: usize = 48;

/// The longest that a rendering takes. Thousands of messages take milliseconds: this changes no prompt.
const LONGEST: Duration = Duration::from_secs(5);

/// What looks at the clock. Filters, unlike functions, cannot be given another meaning by a template.
const TICKS: [&str; 3] = [
    "{% if 0|__tick %}{% endif %}",
    "{% if 0|__tick %}{% endif -%}",
    "{% if 0|__tick %}{% endif +%}",
];

/// The memory and time budget of one rendering.
#[derive(Clone, Debug)]
pub(super) struct Meter(Arc<Counters>);

#[derive(Debug)]
struct Counters {
    used: AtomicU64,
    limit: u64,
    exceeded: AtomicBool,
    raised: AtomicBool,
    until: Instant,
    late: AtomicBool,
}

impl Meter {
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Counters {
            used: AtomicU64::new(0),
            limit,
            exceeded: AtomicBool::new(false),
            raised: AtomicBool::new(false),
            until: Instant::now() + LONGEST,
            late: AtomicBool::new(false),
        }))
    }

    /// Takes `bytes` from the budget.
    pub fn charge(&self, bytes: u64) -> Result<(), Error> {
        let used = self.0.used.fetch_add(bytes, Ordering::Relaxed);
        if used.saturating_add(bytes) <= self.0.limit {
            return Ok(());
        }
        self.0.exceeded.store(true, Ordering::Relaxed);
        Err(Error::new(
            ErrorKind::InvalidOperation,
            "the template uses too much memory",
        ))
    }

    /// Whether the budget was overdrawn.
    pub fn exceeded(&self) -> bool {
        self.0.exceeded.load(Ordering::Relaxed)
    }

    /// Refuses to go on when there is no time left.
    pub fn tick(&self) -> Result<(), Error> {
        if Instant::now() < self.0.until {
            return Ok(());
        }
        self.0.late.store(true, Ordering::Relaxed);
        Err(Error::new(
            ErrorKind::InvalidOperation,
            "the template takes too long",
        ))
    }

    /// Whether the time was up.
    pub fn late(&self) -> bool {
        self.0.late.load(Ordering::Relaxed)
    }

    /// Notes that the template itself called `raise_exception`.
    pub fn raise(&self) {
        self.0.raised.store(true, Ordering::Relaxed);
    }

    /// Whether the template itself called `raise_exception`.
    pub fn raised(&self) -> bool {
        self.0.raised.load(Ordering::Relaxed)
    }

    /// Charges a value by what printing it would cost: shared parts count as often as they occur.
    pub fn charge_value(&self, value: &Value) -> Result<(), Error> {
        self.tick()?;
        self.walk(value, 0)
    }

    fn walk(&self, value: &Value, depth: usize) -> Result<(), Error> {
        if let Some(text) = value.as_str() {
            return self.charge(16 + text.len() as u64);
        }
        self.charge(16)?;
        let Some(object) = value.as_object() else {
            return Ok(());
        };
        if depth > MAX_DEPTH {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "lists and dicts are nested too deep",
            ));
        }
        if depth > 0 && is_namespace(value) {
            // It could be put into itself, and then walking it would never end.
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "a namespace cannot be part of another value",
            ));
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in object.try_iter().into_iter().flatten() {
                    self.walk(&item, depth + 1)?;
                }
            }
            ValueKind::Map => {
                for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                    self.walk(&key, depth + 1)?;
                    self.walk(&item, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// What [`charge_value`](Self::charge_value) would charge.
    ///
    /// # Errors
    /// When it is more than the whole budget, and where `charge_value` has one.
    pub fn measure(&self, value: &Value) -> Result<u64, Error> {
        let scratch = Self::new(self.0.limit);
        let measured = scratch.charge_value(value);
        if scratch.exceeded() {
            self.0.exceeded.store(true, Ordering::Relaxed);
        }
        measured.map(|()| scratch.0.used.load(Ordering::Relaxed))
    }

    /// The `__charge` filter: the value itself, except that lazy sequences become lists, so that nothing later can
    /// be bigger than what was charged.
    pub fn charged(&self, value: Value) -> Result<Value, Error> {
        if value.kind() != ValueKind::Iterable {
            self.charge_value(&value)?;
            return Ok(value);
        }
        let mut items = Vec::new();
        if let Some(iterator) = value.as_object().and_then(|object| object.try_iter()) {
            for item in iterator {
                self.walk(&item, 1)?;
                items.push(item);
            }
        }
        Ok(Value::from(items))
    }

    /// The `__stored` filter, for what is put into a namespace's attribute.
    pub fn stored(&self, value: Value) -> Result<Value, Error> {
        if is_namespace(&value) {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "a namespace cannot be part of another value",
            ));
        }
        self.charged(value)
    }
}

fn is_namespace(value: &Value) -> bool {
    value
        .as_object()
        .is_some_and(|object| object.type_name().ends_with("Namespace"))
}

/// A template with its charges.
#[derive(Clone, Debug)]
pub(super) struct Rewritten {
    pub source: String,
    /// The longest stretch of plain text inside something that can run repeatedly; it is written without a charge.
    pub repeated_text: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Name,
    Literal,
    Open,
    Close,
    Operator,
}

#[derive(Clone, Copy, Debug)]
struct Token<'a> {
    kind: Kind,
    text: &'a str,
    start: usize,
}

/// An expression up to the operators that bind least tightly: the largest piece that arithmetic can be in.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    start: Option<usize>,
    end: usize,
    makes_values: bool,
    operators: usize,
}

/// The inside of a bracket, or the outside of all.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    run: Run,
    /// Tokens since the last comma, those of the deepest bracket group included, and the most of them.
    chain: usize,
    longest: usize,
}

/// Puts the charges in. Lines stay where they are. What is not understood is left as it is: minijinja will complain.
pub(super) fn rewrite(source: &str) -> Result<Rewritten, TextError> {
    let mut inserts: Vec<(usize, &str)> = Vec::new();
    let mut cuts: Vec<(usize, usize, &str)> = Vec::new();
    let (mut at, mut depth, mut repeated_text, mut elifs) = (0, 0usize, 0, 0);
    while let Some(open) = next_tag(source, at) {
        if depth > 0 {
            repeated_text = repeated_text.max(open - at);
        }
        let inner = open + 2;
        if source[open..].starts_with("{#") {
            at = source[inner..]
                .find("#}")
                .map_or(source.len(), |end| inner + end + 2);
            continue;
        }
        let statement = source[open..].starts_with("{%");
        let (tokens, end) = tokens(source, inner, if statement { "%}" } else { "}}" });
        at = end;
        let keyword = tokens
            .first()
            .filter(|token| statement && token.kind == Kind::Name)
            .map(|token| token.text);
        match keyword {
            Some("raw") => {
                let (text, after) = end_of_raw(source, end);
                repeated_text = repeated_text.max(if depth > 0 { text - end } else { 0 });
                at = after;
                continue;
            }
            // transformers marks the assistant's part with this for training; it changes no text.
            Some("generation") => cuts.push((tokens[0].start, "generation".len(), "if true")),
            Some("endgeneration") => cuts.push((tokens[0].start, "endgeneration".len(), "endif")),
            Some("for" | "macro" | "call" | "filter" | "block") => depth += 1,
            Some("endfor" | "endmacro" | "endcall" | "endfilter" | "endblock" | "endset") => {
                depth = depth.saturating_sub(1);
            }
            Some("elif") => {
                elifs += 1;
                if elifs > MAX_ELIF {
                    return Err(TextError::TemplateLimit {
                        line: line_of(source, open),
                        what: "elif branches",
                    });
                }
            }
            Some("set") if !has_assignment(&tokens) => depth += 1,
            Some(word @ ("include" | "import" | "from" | "extends")) => {
                let message = format!("'{word}' is not available: a chat template is one file");
                return Err(TextError::Template {
                    line: line_of(source, open),
                    message,
                });
            }
            _ => {}
        }
        let ticks = matches!(keyword, Some("for" | "macro" | "call" | "endif" | "set"));
        if ticks && source[..end].ends_with("%}") {
            // The tag before white space says what becomes of it.
            let tick = match source.as_bytes()[end - 3] {
                b'-' => TICKS[1],
                b'+' => TICKS[2],
                _ => TICKS[0],
            };
            inserts.push((end, tick));
        }
        let tokens = if keyword.is_some() {
            &tokens[1..]
        } else {
            &tokens[..]
        };
        charge_runs(source, tokens, keyword, &mut inserts)?;
    }
    if depth > 0 {
        repeated_text = repeated_text.max(source.len() - at);
    }
    Ok(Rewritten {
        source: apply(source, inserts, cuts),
        repeated_text,
    })
}

fn apply<'a>(
    source: &str,
    mut inserts: Vec<(usize, &'a str)>,
    cuts: Vec<(usize, usize, &'a str)>,
) -> String {
    let mut edits: Vec<(usize, usize, &str)> = cuts;
    edits.extend(inserts.drain(..).map(|(at, text)| (at, 0, text)));
    edits.sort_by_key(|edit| edit.0);
    let mut out = String::with_capacity(source.len() * 2);
    let mut at = 0;
    for (start, length, text) in edits {
        out.push_str(&source[at..start]);
        out.push_str(text);
        at = start + length;
    }
    out.push_str(&source[at..]);
    out
}

/// Where the next tag opens.
fn next_tag(source: &str, from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += source[at..].find('{')?;
        if matches!(source.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')) {
            return Some(at);
        }
        at += 1;
    }
}

/// Where the text of a raw block ends, and where the tag after it does.
fn end_of_raw(source: &str, from: usize) -> (usize, usize) {
    let mut at = from;
    while let Some(found) = source[at..].find("{%") {
        let open = at + found;
        let (tokens, end) = tokens(source, open + 2, "%}");
        if tokens.first().is_some_and(|token| token.text == "endraw") {
            return (open, end);
        }
        at = open + 2;
    }
    (source.len(), source.len())
}

/// The tokens of a tag, and where the tag ends.
fn tokens<'a>(source: &'a str, from: usize, close: &str) -> (Vec<Token<'a>>, usize) {
    let bytes = source.as_bytes();
    let (mut tokens, mut at, mut depth) = (Vec::new(), from, 0usize);
    while at < bytes.len() {
        let rest = &source[at..];
        if depth == 0 && rest.starts_with(close) {
            return (tokens, at + 2);
        }
        if depth == 0 && (bytes[at] == b'-' || bytes[at] == b'+') && rest[1..].starts_with(close) {
            return (tokens, at + 3);
        }
        let wordlike = |c: char| c.is_alphanumeric() || c == '_';
        let first = rest.chars().next().unwrap_or(' ');
        let (kind, length) = match first {
            c if c.is_whitespace() => {
                at += c.len_utf8();
                continue;
            }
            '\'' | '"' => (Kind::Literal, string_length(rest)),
            '0'..='9' => (
                Kind::Literal,
                rest.find(|c: char| !wordlike(c)).unwrap_or(rest.len()),
            ),
            c if wordlike(c) => (
                Kind::Name,
                rest.find(|c: char| !wordlike(c)).unwrap_or(rest.len()),
            ),
            '(' | '[' | '{' => (Kind::Open, 1),
            ')' | ']' | '}' => (Kind::Close, 1),
            c => {
                let two = ["==", "!=", "<=", ">=", "**", "//"]
                    .iter()
                    .any(|op| rest.starts_with(op));
                (Kind::Operator, if two { 2 } else { c.len_utf8() })
            }
        };
        match kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.saturating_sub(1),
            // A sign at the tag's very beginning controls white space.
            Kind::Operator if at == from && (first == '-' || first == '+') => {
                at += 1;
                continue;
            }
            _ => {}
        }
        tokens.push(Token {
            kind,
            text: &rest[..length],
            start: at,
        });
        at += length;
    }
    (tokens, source.len())
}

fn string_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == bytes[0] => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

fn has_assignment(tokens: &[Token<'_>]) -> bool {
    let mut depth = 0usize;
    tokens.iter().any(|token| {
        match token.kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && token.text == "="
    })
}

/// Finds the runs of one tag and puts charges around those that make values.
fn charge_runs(
    source: &str,
    tokens: &[Token<'_>],
    keyword: Option<&str>,
    inserts: &mut Vec<(usize, &str)>,
) -> Result<(), TextError> {
    // Outside of brackets, these statements have things that look like expressions and must stay as they are: a
    // macro's head, a loop's targets, a call that has to be one.
    let mut outer = !matches!(
        keyword,
        Some("macro" | "block" | "call" | "filter" | "do" | "for" | "set")
    );
    let attribute = keyword == Some("set")
        && tokens
            .iter()
            .take_while(|token| token.text != "=")
            .any(|token| token.text == ".");
    let mut stack = vec![Level::default()];
    let mut previous = "";
    let mut before_previous = "";
    for token in tokens {
        let top = stack.len() - 1;
        let name = token.kind == Kind::Name && previous != "." && previous != "|";
        let of_test = previous == "is" || (previous == "not" && before_previous == "is");
        let separates = match token.kind {
            Kind::Operator => matches!(
                token.text,
                "," | ":" | "=" | "==" | "!=" | "<" | ">" | "<=" | ">="
            ),
            Kind::Name if name && !of_test => {
                matches!(
                    token.text,
                    "and" | "or" | "not" | "if" | "else" | "in" | "recursive"
                )
            }
            _ => false,
        };
        let end = token.start + token.text.len();
        let level = &mut stack[top];
        level.chain = if token.text == "," {
            0
        } else {
            level.chain + 1
        };
        level.longest = level.longest.max(level.chain);
        if level.chain > MAX_CHAIN {
            let line = line_of(source, token.start);
            return Err(TextError::TemplateLimit {
                line,
                what: "tokens in an expression",
            });
        }
        if separates {
            finish(
                source,
                &mut level.run,
                outer || top > 0,
                attribute && top == 0,
                inserts,
            )?;
            let starts = (keyword == Some("for") && token.text == "in")
                || (keyword == Some("set") && token.text == "=");
            outer |= top == 0 && starts;
        } else if token.kind == Kind::Close {
            if top > 0 {
                finish(source, &mut level.run, true, false, inserts)?;
                let inner = level.longest;
                stack.pop();
                stack[top - 1].chain += inner;
            }
            let run = &mut stack[top.saturating_sub(1)].run;
            run.start.get_or_insert(token.start);
            run.end = end;
        } else {
            let run = &mut level.run;
            // `*args` and `**kwargs`: the operand is the expression.
            let spreads = run.start.is_none() && matches!(token.text, "*" | "**");
            if !spreads {
                run.start.get_or_insert(token.start);
                run.end = end;
            }
            match (token.kind, token.text) {
                (Kind::Open, _) => {
                    run.makes_values = true;
                    stack.push(Level::default());
                }
                (Kind::Operator, "|") => run.makes_values = true,
                (Kind::Operator, "~" | "+" | "*" | "**") if !spreads => {
                    run.makes_values = true;
                    run.operators += 1;
                }
                _ => {}
            }
        }
        before_previous = previous;
        previous = token.text;
    }
    while let Some(mut level) = stack.pop() {
        let inside = !stack.is_empty();
        finish(
            source,
            &mut level.run,
            outer || inside,
            attribute && !inside,
            inserts,
        )?;
    }
    Ok(())
}

fn finish(
    source: &str,
    run: &mut Run,
    wanted: bool,
    stored: bool,
    inserts: &mut Vec<(usize, &str)>,
) -> Result<(), TextError> {
    let Run {
        start,
        end,
        makes_values,
        operators,
    } = std::mem::take(run);
    let Some(start) = start else { return Ok(()) };
    if operators > MAX_OPERATORS {
        return Err(TextError::TemplateLimit {
            line: line_of(source, start),
            what: "operators in an expression",
        });
    }
    if wanted && (makes_values || stored) {
        inserts.push((start, "("));
        inserts.push((end, if stored { ")|__stored" } else { ")|__charge" }));
    }
    Ok(())
}

fn line_of(source: &str, at: usize) -> usize {
    source[..at].matches('\n').count() + 1
}
