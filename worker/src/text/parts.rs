//! What a model's text means: the answer, what was thought before it, and calls of tools.
//!
//! The text is read character by character, and what is said of it depends on the characters alone, not on how they came.
//! What may still turn out to be part of a call is held back, up to a bound; what turns out to be none is the answer's text. The
//! arguments of a call are passed on as they come, as soon as its name is known.

mod family;
mod json;
mod lexer;

use std::collections::HashSet;

use hotcell_proto::{
    limits,
    v1::{OutputPart, ToolCallPart, output_part::Kind},
};

pub use family::{Calls, Family, Mark};
use json::{Scan, Step, is_space};
use lexer::{Lexer, Symbol};

/// Bytes of white space that are held back until it is known what comes after.
const MAX_SPACE: usize = 1024;
/// Bytes of a call that are held back until it is known to be one.
const MAX_HELD: usize = 32 << 10;

/// What an object that may be a call stands in, which says what comes after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    /// Between two marks.
    Tagged,
    /// In nothing; after a mark or at the answer's beginning.
    Bare { marked: bool },
    /// In a list.
    List,
    /// After its name: the object is the arguments.
    Named,
}

/// Where in a text the parser is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only white space so far; after a thought it is nobody's.
    Start { thought: bool },
    /// In a thought, which has said something or not.
    Thinking { fresh: bool },
    /// In the answer.
    Content,
    /// After the mark of a call.
    Head,
    /// Where an object of a list is to begin.
    Item,
    /// In the name of a call.
    Name,
    /// In the id of a call, which nobody wants.
    Id,
    /// Where the arguments of a named call are to begin.
    Body,
    /// In an object that may be a call, all of which is held back.
    Object,
    /// In the arguments of a call; they end where this many objects are open.
    Arguments { until: u32 },
    /// In what comes after the arguments.
    Rest,
    /// After an object of a list.
    Next,
    /// After an object, where its mark is to come.
    Close,
    /// After a call.
    Between,
}

/// What to do with a symbol.
enum Then {
    /// Nothing more.
    Taken,
    /// Look at it again, from another state.
    Again,
}

use Then::{Again, Taken};

/// Reads a text and says what it means.
#[derive(Clone, Debug)]
pub struct Parser {
    /// None where all is the answer.
    calls: Option<Calls>,
    /// The tools that an object at the answer's beginning may call.
    names: HashSet<String>,
    lexer: Lexer,
    symbols: Vec<Symbol>,
    state: State,
    frame: Frame,
    /// What is the answer's (or a thought's) unless a call (or a mark) comes of it.
    pending: String,
    /// Where in it the object begins.
    object: usize,
    /// Where in it the object's arguments are, if its name comes after them.
    inner: Option<(usize, Option<usize>)>,
    /// Whether an object in the object was seen.
    opened: bool,
    name: String,
    scan: Scan,
    /// Calls so far.
    count: u32,
    parts: Vec<OutputPart>,
}

impl Parser {
    /// A parser for a text of a family. Objects at the answer's beginning are calls if they call one of `names`; `thinking`:
    /// the prompt began a thought.
    #[must_use]
    pub fn new(family: &Family, names: HashSet<String>, thinking: bool) -> Self {
        Self {
            calls: Some(family.calls),
            names,
            lexer: family.lexer(),
            state: match thinking {
                true => State::Thinking { fresh: true },
                false => State::Start { thought: false },
            },
            ..Self::literal()
        }
    }

    /// A parser for a text that is the answer, whatever it looks like.
    #[must_use]
    pub fn literal() -> Self {
        Self {
            calls: None,
            names: HashSet::new(),
            lexer: Lexer::default(),
            symbols: Vec::new(),
            state: State::Content,
            frame: Frame::Tagged,
            pending: String::new(),
            object: 0,
            inner: None,
            opened: false,
            name: String::new(),
            scan: Scan::default(),
            count: 0,
            parts: Vec::new(),
        }
    }

    /// Reads more of the text.
    pub fn text(&mut self, text: &str) {
        let mut symbols = std::mem::take(&mut self.symbols);
        for c in text.chars() {
            self.lexer.push(c, &mut symbols);
            for symbol in symbols.drain(..) {
                self.take_in(symbol);
            }
        }
        self.symbols = symbols;
    }

    /// Reads a mark that is a token and not in the text.
    pub fn mark(&mut self, mark: Mark) {
        self.rest_of_marks();
        self.take_in(Symbol::Mark(mark, None));
    }

    /// The text is over: what is held back is the answer's.
    pub fn finish(&mut self) {
        self.rest_of_marks();
        let pending = std::mem::take(&mut self.pending);
        match self.state {
            State::Thinking { .. } => self.reasoning(&pending),
            State::Between => self.content(pending.trim_ascii_start()),
            _ => self.content(&pending),
        }
        self.state = State::Content;
    }

    /// What became known since it was last asked. Pieces of one kind that come one after the other are one.
    pub fn parts(&mut self) -> Vec<OutputPart> {
        std::mem::take(&mut self.parts)
    }

    fn rest_of_marks(&mut self) {
        let mut symbols = std::mem::take(&mut self.symbols);
        self.lexer.finish(&mut symbols);
        for symbol in symbols.drain(..) {
            self.take_in(symbol);
        }
        self.symbols = symbols;
    }

    fn take_in(&mut self, symbol: Symbol) {
        // Each look leads to a state that takes the symbol, after three at most.
        while let Again = match symbol {
            Symbol::Char(c) => self.char(c),
            Symbol::Mark(mark, text) => self.marked(mark, text),
        } {}
    }

    fn marked(&mut self, mark: Mark, text: Option<&'static str>) -> Then {
        match (self.state, mark) {
            (State::Start { .. }, Mark::Think) => {
                self.pending.clear();
                self.state = State::Thinking { fresh: true };
            }
            (State::Thinking { .. }, Mark::ThinkEnd) => {
                self.pending.clear();
                self.state = State::Start { thought: true };
            }
            (State::Start { .. } | State::Content | State::Between, Mark::Call) => {
                self.pending.push_str(text.unwrap_or_default());
                self.state = State::Head;
            }
            (State::Name, Mark::Arguments) | (State::Id, Mark::Arguments) => {
                self.pending.push_str(text.unwrap_or_default());
                self.state = State::Body;
            }
            (State::Name, Mark::Id) => {
                self.pending.push_str(text.unwrap_or_default());
                self.state = State::Id;
            }
            (State::Close, Mark::CallEnd) => self.state = State::Between,
            (State::Between, Mark::CallEnd) => {}
            (State::Close | State::Next, Mark::Call) => {
                self.state = State::Between;
                return Again;
            }
            (State::Arguments { .. } | State::Rest, Mark::Call | Mark::CallEnd)
                if !self.scan.in_string() =>
            {
                self.state = State::Between;
                return Again;
            }
            // A token that means nothing here is no text either.
            (State::Head | State::Item | State::Name | State::Id | State::Body, _)
                if text.is_none() || mark == Mark::Call =>
            {
                return self.no_call();
            }
            _ => {
                for c in text.unwrap_or_default().chars() {
                    self.take_in(Symbol::Char(c));
                }
            }
        }
        Taken
    }

    fn char(&mut self, c: char) -> Then {
        let space = is_space(c);
        match self.state {
            State::Start { thought: true } if space => {}
            State::Start { .. } if c == '{' && self.takes_bare() => {
                self.open(Frame::Bare { marked: false });
            }
            State::Start { thought } => {
                self.pending.push(c);
                if !space || self.pending.len() > MAX_SPACE {
                    let pending = std::mem::take(&mut self.pending);
                    self.content(if thought {
                        pending.trim_ascii_start()
                    } else {
                        &pending
                    });
                    self.state = State::Content;
                }
            }
            State::Thinking { fresh: true } if space => {}
            State::Thinking { .. } => {
                self.pending.push(c);
                self.state = State::Thinking { fresh: false };
                if !space || self.pending.len() > MAX_SPACE {
                    let pending = std::mem::take(&mut self.pending);
                    self.reasoning(&pending);
                }
            }
            State::Content => {
                self.pending.push(c);
                if !space || self.pending.len() > MAX_SPACE {
                    let pending = std::mem::take(&mut self.pending);
                    self.content(&pending);
                }
            }
            State::Head => return self.head(c),
            State::Item => match c {
                '{' => self.open(Frame::List),
                _ if space && self.fits() => self.pending.push(c),
                _ => return self.no_call(),
            },
            State::Name => match c {
                '{' => return self.body(c),
                _ if is_name(c) && self.name.len() < limits::MAX_TOOL_NAME => {
                    self.name.push(c);
                    self.pending.push(c);
                }
                _ => return self.no_call(),
            },
            State::Id => match self.fits() && (is_name(c) || space) {
                true => self.pending.push(c),
                false => return self.no_call(),
            },
            State::Body => return self.body(c),
            State::Object => self.object(c),
            State::Arguments { until } => match self.scan.step(c) {
                Step::Wrong => {
                    self.state = State::Between;
                    return Again;
                }
                step => {
                    self.arguments(c);
                    if step == Step::Closed(until) {
                        match until {
                            0 => self.close(),
                            _ => self.state = State::Rest,
                        }
                    }
                }
            },
            State::Rest => match self.scan.step(c) {
                Step::Wrong => {
                    self.state = State::Between;
                    return Again;
                }
                Step::Closed(0) => self.close(),
                _ => {}
            },
            State::Next => match c {
                ',' => self.state = State::Item,
                ']' => self.state = State::Between,
                _ if space => {}
                _ => {
                    self.state = State::Between;
                    return Again;
                }
            },
            State::Close => {
                if !space {
                    self.state = State::Between;
                    return Again;
                }
            }
            State::Between => match c {
                '{' if self.takes_bare() => self.open(Frame::Bare { marked: true }),
                ';' | ',' if self.takes_bare() && self.fits() => self.pending.push(c),
                _ if space && self.fits() => self.pending.push(c),
                _ => {
                    let pending = std::mem::take(&mut self.pending);
                    self.content(pending.trim_ascii_start());
                    self.state = State::Content;
                    return Again;
                }
            },
        }
        Taken
    }

    /// A character after the mark of a call.
    fn head(&mut self, c: char) -> Then {
        match (self.calls, c) {
            (Some(Calls::Tagged), '{') => self.open(Frame::Tagged),
            (Some(Calls::Python | Calls::Bare), '{') => self.open(Frame::Bare { marked: true }),
            (Some(Calls::List | Calls::Named), '[') => {
                self.pending.push(c);
                self.state = State::Item;
            }
            (Some(Calls::List | Calls::Named), c) if is_name(c) => {
                self.name.clear();
                self.state = State::Name;
                return Again;
            }
            _ if is_space(c) && self.fits() => self.pending.push(c),
            _ => return self.no_call(),
        }
        Taken
    }

    /// A character where a named call's arguments are to begin.
    fn body(&mut self, c: char) -> Then {
        if is_space(c) && self.fits() {
            self.pending.push(c);
            return Taken;
        }
        let name = std::mem::take(&mut self.name);
        if c != '{' || !self.begin(&name) {
            return self.no_call();
        }
        self.frame = Frame::Named;
        self.scan = Scan::default();
        self.scan.step(c);
        self.arguments(c);
        self.state = State::Arguments { until: 0 };
        Taken
    }

    /// An object begins that may be a call.
    fn open(&mut self, frame: Frame) {
        self.object = self.pending.len();
        self.pending.push('{');
        self.scan = Scan::default();
        self.scan.step('{');
        self.inner = None;
        self.opened = false;
        self.frame = frame;
        self.state = State::Object;
    }

    /// A character of an object that may be a call.
    fn object(&mut self, c: char) {
        self.pending.push(c);
        match self.scan.step(c) {
            Step::Wrong => self.give_up(),
            Step::Opened(2) if !self.opened => {
                self.opened = true;
                let head = self.pending.get(self.object..).unwrap_or_default();
                match json::before_arguments(head) {
                    Some(Some(name)) if self.may_call(&name) && self.begin(&name) => {
                        self.arguments(c);
                        self.state = State::Arguments { until: 1 };
                    }
                    Some(None) => self.inner = Some((self.pending.len() - 1, None)),
                    _ => {}
                }
            }
            Step::Closed(1) => {
                if let Some((_, end @ None)) = &mut self.inner {
                    *end = Some(self.pending.len());
                }
            }
            Step::Closed(0) => self.whole(),
            _ if self.pending.len() > MAX_HELD => self.give_up(),
            _ => {}
        }
    }

    /// The object is there, and was not known to be a call before.
    fn whole(&mut self) {
        let object = self.pending.get(self.object..).unwrap_or_default();
        let inner = self
            .inner
            .and_then(|(begin, end)| self.pending.get(begin..end?));
        let bare = matches!(self.frame, Frame::Bare { .. });
        let call = json::whole(object, inner, !bare);
        if let Some((name, arguments)) = call
            && self.may_call(&name)
            && self.begin(&name)
        {
            arguments.chars().for_each(|c| self.arguments(c));
            self.close();
        } else {
            self.give_up();
        }
    }

    /// All that is held back is the answer's.
    fn give_up(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        self.content(&pending);
        self.state = State::Content;
    }

    fn no_call(&mut self) -> Then {
        self.give_up();
        Again
    }

    /// After a call's last bracket.
    fn close(&mut self) {
        self.state = match self.frame {
            Frame::Tagged => State::Close,
            Frame::List => State::Next,
            Frame::Bare { .. } | Frame::Named => State::Between,
        };
    }

    fn fits(&self) -> bool {
        self.pending.len() <= MAX_SPACE
    }

    fn takes_bare(&self) -> bool {
        matches!(self.calls, Some(Calls::Python | Calls::Bare))
    }

    fn may_call(&self, name: &str) -> bool {
        self.frame != Frame::Bare { marked: false } || self.names.contains(name)
    }

    /// Begins a call, unless there are too many or nothing could be called by such a name. What was held back is part of it.
    fn begin(&mut self, name: &str) -> bool {
        let named = !name.is_empty() && name.len() <= limits::MAX_TOOL_NAME;
        if !named
            || name.contains(char::is_control)
            || self.count as usize >= limits::MAX_TOOL_CALLS
        {
            return false;
        }
        self.pending.clear();
        let call = ToolCallPart {
            index: self.count,
            name: name.to_owned(),
            arguments: String::new(),
        };
        self.count += 1;
        self.say(Kind::ToolCall(call));
        true
    }

    fn arguments(&mut self, c: char) {
        let index = self.count.saturating_sub(1);
        if let Some(Kind::ToolCall(call)) = self.last()
            && call.index == index
        {
            call.arguments.push(c);
            return;
        }
        self.say(Kind::ToolCall(ToolCallPart {
            index,
            name: String::new(),
            arguments: c.into(),
        }));
    }

    fn content(&mut self, text: &str) {
        match self.last() {
            _ if text.is_empty() => {}
            Some(Kind::Content(last)) => last.push_str(text),
            _ => self.say(Kind::Content(text.to_owned())),
        }
    }

    fn reasoning(&mut self, text: &str) {
        match self.last() {
            _ if text.is_empty() => {}
            Some(Kind::Reasoning(last)) => last.push_str(text),
            _ => self.say(Kind::Reasoning(text.to_owned())),
        }
    }

    fn last(&mut self) -> Option<&mut Kind> {
        self.parts.last_mut()?.kind.as_mut()
    }

    fn say(&mut self, kind: Kind) {
        self.parts.push(OutputPart { kind: Some(kind) });
    }
}

/// Whether a tool's name (or a call's id) may have this character.
fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

#[cfg(test)]
mod tests;
