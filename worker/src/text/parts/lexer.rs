//! Marks and characters of a text that comes piece by piece.

use super::Mark;

/// One character, or a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symbol {
    Char(char),
    /// A mark with its characters, or one that is a token of its own and has none.
    Mark(Mark, Option<&'static str>),
}

/// Finds marks, holding back what may be the beginning of one.
#[derive(Clone, Debug, Default)]
pub(super) struct Lexer {
    /// None is the beginning of another.
    marks: Vec<(&'static str, Mark)>,
    /// The beginning of a mark.
    held: String,
}

impl Lexer {
    pub fn new(marks: Vec<(&'static str, Mark)>) -> Self {
        Self {
            marks,
            held: String::new(),
        }
    }

    /// Takes a character, gives what became certain by it.
    pub fn push(&mut self, c: char, out: &mut Vec<Symbol>) {
        self.held.push(c);
        while let Some(first) = self.held.chars().next() {
            let begun = |(text, _): &&(&'static str, Mark)| text.starts_with(&self.held);
            match self.marks.iter().find(begun) {
                Some(&(text, mark)) if text.len() == self.held.len() => {
                    self.held.clear();
                    out.push(Symbol::Mark(mark, Some(text)));
                }
                Some(_) => return,
                None => {
                    self.held.remove(0);
                    out.push(Symbol::Char(first));
                }
            }
        }
    }

    /// Gives what is held back.
    pub fn finish(&mut self, out: &mut Vec<Symbol>) {
        out.extend(self.held.drain(..).map(Symbol::Char));
    }
}
