//! Grammars in EBNF as engines of vLLM read it (llama.cpp's dialect: `root ::= "a" rule*`), written in Lark.
//!
//! Rules that lead to none that calls itself become one pattern: a lexer that has to choose between tokens would take the
//! longest, and refuse texts that the grammar allows. What is not of this dialect is refused by its words.

use std::{collections::HashMap, fmt::Write as _};

use hotcell_proto::error::{Error, Reason};

/// Parentheses inside of each other; a worker reads no more.
const MAX_DEPTH: usize = 28;
/// Rules of one grammar: they are looked through for each other.
const MAX_RULES: usize = 1000;

fn invalid(what: impl Into<String>) -> Error {
    let what = format!("grammar: {}", what.into());
    Error::new(Reason::GrammarInvalid, what).with("field", "grammar")
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    /// `::=`
    Is,
    Text(String),
    /// A set of characters, as a regular expression.
    Class(String),
    /// `*`, `+`, `?` or `{m,n}`.
    Repeat(String),
    Or,
    Open,
    Close,
}

/// A grammar in Lark: the text itself unless it is EBNF.
///
/// # Errors
/// [`Reason::GrammarInvalid`], naming what cannot be read.
pub(super) fn to_lark(text: &str) -> Result<String, Error> {
    if !text.contains("::=") {
        return Ok(text.to_owned());
    }
    let rules = rules(&tokens(text)?)?;
    let numbers: HashMap<&str, usize> = rules
        .iter()
        .map(|(name, _)| name.as_str())
        .zip(0..)
        .collect();
    let root = *numbers
        .get("root")
        .ok_or_else(|| invalid("there is no rule named root"))?;
    let mut uses = Vec::with_capacity(rules.len());
    for (_, body) in &rules {
        let names = body.iter().filter_map(|token| match token {
            Token::Name(name) => Some(name),
            _ => None,
        });
        let used = names.map(|name| {
            let number = numbers.get(name.as_str()).copied();
            number.ok_or_else(|| invalid(format!("there is no rule named {name}")))
        });
        uses.push(used.collect::<Result<Vec<_>, _>>()?);
    }
    let patterns = ends(&uses);
    let name = |number: usize| match patterns.get(number) {
        Some(true) => format!("T{number}"),
        _ => format!("r{number}"),
    };
    let mut lark = format!("start: {}\n", name(root));
    for (number, (_, body)) in rules.iter().enumerate() {
        lark.push_str(&name(number));
        lark.push(':');
        for token in body {
            lark.push(' ');
            match token {
                Token::Name(used) => {
                    lark.push_str(&name(numbers.get(used.as_str()).copied().unwrap_or(root)))
                }
                Token::Text(text) => lark.push_str(&quoted(text)),
                Token::Class(class) => lark.push_str(class),
                Token::Repeat(how) => {
                    // Belongs to what is before it.
                    lark.pop();
                    lark.push_str(how);
                }
                Token::Or => lark.push('|'),
                Token::Open => lark.push('('),
                Token::Close => lark.push(')'),
                Token::Is => {}
            }
        }
        lark.push('\n');
    }
    Ok(lark)
}

/// Which rules lead to no rule that calls itself, by any way.
fn ends(uses: &[Vec<usize>]) -> Vec<bool> {
    let mut ends = vec![false; uses.len()];
    // Each round finds those whose every use is known to end; there are at most as many rounds as rules.
    loop {
        let more: Vec<usize> = (0..uses.len())
            .filter(|&rule| {
                let known = |used: &usize| ends.get(*used).copied().unwrap_or(false);
                !known(&rule) && uses.get(rule).is_some_and(|used| used.iter().all(known))
            })
            .collect();
        if more.is_empty() {
            return ends;
        }
        for rule in more {
            if let Some(end) = ends.get_mut(rule) {
                *end = true;
            }
        }
    }
}

fn quoted(text: &str) -> String {
    // A string always serialises.
    serde_json::to_string(text).unwrap_or_default()
}

/// The rules, in their order. Their shape is checked: alternatives of sequences, with nothing left open.
fn rules(tokens: &[Token]) -> Result<Vec<(String, Vec<Token>)>, Error> {
    let mut rules: Vec<(String, Vec<Token>)> = Vec::new();
    let mut at = tokens.iter().peekable();
    while let Some(token) = at.next() {
        match (token, at.peek()) {
            (Token::Name(name), Some(Token::Is)) => {
                at.next();
                if rules.iter().any(|(known, _)| known == name) {
                    return Err(invalid(format!("there are two rules named {name}")));
                }
                if rules.len() >= MAX_RULES {
                    return Err(invalid(format!("there are more than {MAX_RULES} rules")));
                }
                rules.push((name.clone(), Vec::new()));
            }
            (Token::Is, _) => return Err(invalid("a ::= has no name before it")),
            (token, _) => match rules.last_mut() {
                Some((_, body)) => body.push(token.clone()),
                None => return Err(invalid("it begins with something else than a rule")),
            },
        }
    }
    rules
        .iter()
        .try_for_each(|(name, body)| check(name, body))?;
    Ok(rules)
}

fn check(name: &str, body: &[Token]) -> Result<(), Error> {
    let odd = |what: &str| Err(invalid(format!("the rule {name} {what}")));
    let mut depth = 0usize;
    // Whether there is something that can be repeated, or be an alternative.
    let mut whole = false;
    for token in body {
        match token {
            Token::Open => depth += 1,
            Token::Close if depth == 0 => return odd("closes what it did not open"),
            Token::Close => depth -= 1,
            _ => {}
        }
        if depth > MAX_DEPTH {
            return odd("has too many parentheses inside of each other");
        }
        let value = !matches!(token, Token::Open | Token::Or);
        if !whole && matches!(token, Token::Or | Token::Close | Token::Repeat(_)) {
            return odd("has nothing where a text is expected; write \"\" for an empty one");
        }
        whole = value;
    }
    match (depth, whole) {
        (0, true) => Ok(()),
        (0, false) => odd("ends with nothing; write \"\" for an empty text"),
        _ => odd("does not close what it opened"),
    }
}

type Characters<'a> = std::iter::Peekable<std::str::Chars<'a>>;

fn tokens(text: &str) -> Result<Vec<Token>, Error> {
    let mut tokens = Vec::new();
    let mut rest = text.chars().peekable();
    let in_name = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    while let Some(first) = rest.next() {
        tokens.push(match first {
            c if c.is_whitespace() => continue,
            '#' => {
                rest.by_ref().find(|&c| c == '\n');
                continue;
            }
            ':' if rest.next() == Some(':') && rest.next() == Some('=') => Token::Is,
            '"' => Token::Text(string(&mut rest)?),
            '[' => Token::Class(class(&mut rest)?),
            '.' => Token::Class(r"/[\u{0}-\u{10FFFF}]/".to_owned()),
            '*' | '+' | '?' => Token::Repeat(first.to_string()),
            '{' => Token::Repeat(range(&mut rest)?),
            '|' => Token::Or,
            '(' => Token::Open,
            ')' => Token::Close,
            c if c.is_ascii_alphabetic() || c == '_' => {
                let mut name = c.to_string();
                while let Some(c) = rest.next_if(in_name) {
                    name.push(c);
                }
                Token::Name(name)
            }
            c => return Err(invalid(format!("{c:?} means nothing here"))),
        });
    }
    Ok(tokens)
}

/// The rest of a string, after its first quotation mark.
fn string(rest: &mut Characters<'_>) -> Result<String, Error> {
    let mut text = String::new();
    loop {
        match rest.next() {
            Some('"') => return Ok(text),
            Some('\\') => text.push(escaped(rest)?),
            Some(c) => text.push(c),
            None => return Err(invalid("a string is not closed")),
        }
    }
}

/// What an escape means, after its backslash.
fn escaped(rest: &mut Characters<'_>) -> Result<char, Error> {
    let digits = match rest.next() {
        Some('n') => return Ok('\n'),
        Some('r') => return Ok('\r'),
        Some('t') => return Ok('\t'),
        Some('x') => 2,
        Some('u') => 4,
        Some('U') => 8,
        Some(c) if c.is_ascii_punctuation() => return Ok(c),
        other => {
            let what = other.map_or_else(String::new, String::from);
            return Err(invalid(format!("the escape \\{what} is not known")));
        }
    };
    let mut code = String::with_capacity(digits);
    for _ in 0..digits {
        let digit = rest.next_if(char::is_ascii_hexdigit);
        code.push(digit.ok_or_else(|| invalid("an escape has too few digits"))?);
    }
    let code = u32::from_str_radix(&code, 16).ok().and_then(char::from_u32);
    code.ok_or_else(|| invalid("an escape is no character"))
}

/// The rest of a set of characters, after its bracket, as a regular expression of Lark.
fn class(rest: &mut Characters<'_>) -> Result<String, Error> {
    let open = || invalid("a set of characters is not closed");
    let one = |rest: &mut Characters<'_>| match rest.next() {
        Some('\\') => escaped(rest),
        Some(c) => Ok(c),
        None => Err(open()),
    };
    let mut regex = String::from("/[");
    if rest.next_if_eq(&'^').is_some() {
        regex.push('^');
    }
    let mut count = 0;
    while rest.next_if_eq(&']').is_none() {
        let from = one(rest)?;
        let mut to = from;
        // A minus before the end is itself.
        let mut ahead = rest.clone();
        if ahead.next() == Some('-') && !matches!(ahead.next(), Some(']') | None) {
            rest.next();
            to = one(rest)?;
        }
        if from > to {
            return Err(invalid(format!("the range {from:?} to {to:?} is empty")));
        }
        // Writing into a string cannot fail.
        let _ = write!(
            regex,
            r"\u{{{:X}}}-\u{{{:X}}}",
            u32::from(from),
            u32::from(to)
        );
        count += 1;
    }
    if count == 0 {
        return Err(invalid("a set of characters is empty"));
    }
    regex.push_str("]/");
    Ok(regex)
}

/// The rest of a count of repetitions, after its brace.
fn range(rest: &mut Characters<'_>) -> Result<String, Error> {
    let mut text = String::from("{");
    loop {
        match rest.next() {
            Some('}') => break,
            Some(c) if c.is_ascii_digit() || c == ',' => text.push(c),
            Some(' ') => {}
            _ => return Err(invalid("a count of repetitions is {m}, {m,} or {m,n}")),
        }
    }
    let bounds = text.trim_start_matches('{').split(',');
    let bounds: Vec<&str> = bounds.collect();
    let number = |text: &str| text.parse::<u16>().is_ok();
    let fine = match bounds[..] {
        [least] => number(least),
        [least, most] => (number(least) || least.is_empty()) && (number(most) || most.is_empty()),
        _ => false,
    };
    if !fine {
        return Err(invalid("a count of repetitions is {m}, {m,} or {m,n}"));
    }
    text.push('}');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        let error = to_lark(text).unwrap_err();
        assert_eq!(error.reason(), Reason::GrammarInvalid);
        error.message().to_owned()
    }

    #[test]
    fn lark_is_left_as_it_is() {
        let lark = "start: \"a\" | /b+/";
        assert_eq!(to_lark(lark).unwrap(), lark);
    }

    #[test]
    fn rules_that_end_are_one_pattern() {
        let lark = to_lark(
            "root ::= name (\" and \" name){1,3} \".\" # names\nname ::= \"Adam\"\n  | [A-Z] [a-z-]*",
        );
        assert_eq!(
            lark.unwrap(),
            "start: T0\n\
             T0: T1 ( \" and \" T1 ){1,3} \".\"\n\
             T1: \"Adam\" | /[\\u{41}-\\u{5A}]/ /[\\u{61}-\\u{7A}\\u{2D}-\\u{2D}]/*\n"
        );
    }

    #[test]
    fn rules_that_call_themselves_stay_rules() {
        let lark = to_lark("root ::= \"(\" root \")\" | leaf\nleaf ::= \"x\\n\\u0041\\\"\"");
        assert_eq!(
            lark.unwrap(),
            "start: r0\nr0: \"(\" r0 \")\" | T1\nT1: \"x\\nA\\\"\"\n"
        );
    }

    #[test]
    fn what_is_not_of_the_dialect_is_refused_by_its_words() {
        for (text, words) in [
            ("root ::= missing", "no rule named missing"),
            ("top ::= \"a\"", "no rule named root"),
            ("root ::= \"a\"\nroot ::= \"b\"", "two rules named root"),
            ("root ::= (\"a\"", "does not close"),
            ("root ::= \"a\")", "closes what it did not open"),
            ("root ::= | \"a\"", "nothing where a text is expected"),
            ("root ::= *", "nothing where a text is expected"),
            ("root ::= \"a\" |", "ends with nothing"),
            ("root ::=", "ends with nothing"),
            ("root ::= \"a", "not closed"),
            ("root ::= [a-", "not closed"),
            ("root ::= []", "empty"),
            ("root ::= [z-a]", "is empty"),
            ("root ::= \"\\q\"", "not known"),
            ("root ::= \"a\"{x}", "a count of repetitions"),
            ("root ::= \"a\"{99999}", "a count of repetitions"),
            ("root ::= <tag>", "'<' means nothing"),
            ("\"a\" root ::= \"a\"", "begins with something else"),
            ("::= \"a\"", "has no name"),
        ] {
            let said = refused(text);
            assert!(said.contains(words), "{text}: {said}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(99), ")".repeat(99));
        assert!(refused(&deep).contains("parentheses"));
        let rule = |number| format!("r{number} ::= \"a\"\n");
        let many: String = (0..=MAX_RULES).map(rule).collect();
        assert!(refused(&many).contains("more than"));
    }
}
