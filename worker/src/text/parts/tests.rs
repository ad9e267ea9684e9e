//! Texts of each family, whole, cut anywhere, broken off, and made of anything.

use proptest::prelude::*;

use super::*;

/// All of a text's content, thoughts and calls, each put together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Whole {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
}

impl Whole {
    fn add(&mut self, parts: Vec<OutputPart>) {
        for part in parts {
            match part.kind {
                Some(Kind::Content(text)) => self.content.push_str(&text),
                Some(Kind::Reasoning(text)) => self.reasoning.push_str(&text),
                Some(Kind::ToolCall(call)) => {
                    let index = call.index as usize;
                    if !call.name.is_empty() {
                        assert_eq!(index, self.calls.len());
                        self.calls.push((call.name, String::new()));
                    }
                    assert_eq!(index + 1, self.calls.len());
                    self.calls[index].1.push_str(&call.arguments);
                }
                None => panic!("an empty part"),
            }
        }
    }
}

fn parser(calls: Calls, thinks: bool) -> Parser {
    let names = ["f", "get_weather"].map(str::to_owned).into();
    Parser::new(&Family::plain(calls, thinks), names, false)
}

fn read(mut parser: Parser, pieces: &[&str]) -> Whole {
    let mut whole = Whole::default();
    for piece in pieces {
        parser.text(piece);
        whole.add(parser.parts());
    }
    parser.finish();
    whole.add(parser.parts());
    whole
}

fn whole(content: &str, reasoning: &str, calls: &[(&str, &str)]) -> Whole {
    let owned = |&(name, arguments): &(&str, &str)| (name.to_owned(), arguments.to_owned());
    Whole {
        content: content.into(),
        reasoning: reasoning.into(),
        calls: calls.iter().map(owned).collect(),
    }
}

const ALL: [Calls; 5] = [
    Calls::Tagged,
    Calls::Python,
    Calls::List,
    Calls::Named,
    Calls::Bare,
];

#[test]
fn each_family_writes_its_calls() {
    let two = [("f", r#"{"a": [1, "}"]}"#), ("get_weather", "{}")];
    for (calls, text, content) in [
        (
            Calls::Tagged,
            "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {}}\n</tool_call>",
            "Let me see.",
        ),
        (
            Calls::Tagged,
            "<tool_call>{\"arguments\": {\"a\": [1, \"}\"]}, \"name\": \"f\"}</tool_call> <tool_call>{\"name\": \"get_weather\"}</tool_call>\nThat is all.",
            "That is all.",
        ),
        (
            Calls::Python,
            "{\"name\": \"f\", \"parameters\": {\"a\": [1, \"}\"]}}; {\"type\": \"function\", \"name\": \"get_weather\", \"parameters\": {}}",
            "",
        ),
        (
            Calls::Python,
            "I call.<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": [1, \"}\"]}}\n{\"name\": \"get_weather\", \"parameters\": {}}",
            "I call.",
        ),
        (
            Calls::List,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}, \"id\": \"123456789\"}, {\"name\": \"get_weather\", \"arguments\": {}}]",
            "",
        ),
        (
            Calls::Named,
            "Yes [TOOL_CALLS]f[CALL_ID]abc123[ARGS]{\"a\": [1, \"}\"]}[TOOL_CALLS]get_weather[ARGS]{}",
            "Yes",
        ),
        (
            Calls::Bare,
            "\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n{\"name\": \"get_weather\", \"arguments\": {}}",
            "",
        ),
    ] {
        let found = read(parser(calls, false), &[text]);
        assert_eq!(found, whole(content, "", &two), "{calls:?}: {text}");
    }
}

#[test]
fn what_is_no_call_is_the_answer() {
    for calls in ALL {
        for text in [
            "",
            "  Hello, {world}!\n",
            "<tool_call>",
            "a <tool_call> b",
            "<tool_call>\n{\"name\": 1, \"arguments\": {}}\n</tool_call>",
            "<tool_call>{\"name\": \"f\", \"argum",
            "[TOOL_CALLS] is a mark",
            "[TOOL_CALLS][1]",
            "<|python_tag|>print(1)",
            // Names nobody asked for, and answers in JSON.
            "{\"name\": \"Eve\", \"parameters\": {\"a\": 1}}",
            "{\"name\": \"f\", \"age\": {\"a\": 1}}",
            "{\"a\": {}}",
            "</tool_call> </think> [ARGS]",
        ] {
            assert_eq!(
                read(parser(calls, true), &[text]),
                whole(text, "", &[]),
                "{calls:?}"
            );
        }
    }
    let json = "{\"name\": \"f\", \"parameters\": {}}";
    assert_eq!(read(Parser::literal(), &[json]), whole(json, "", &[]));
}

#[test]
fn thoughts_come_before_the_answer_and_may_be_begun_by_the_prompt() {
    let text = "\n<think>\nWell, <tool_call> is \"one\".\n\n</think>\n\nYes.\n";
    let thought = "Well, <tool_call> is \"one\".";
    assert_eq!(
        read(parser(Calls::Tagged, true), &[text]),
        whole("Yes.\n", thought, &[])
    );
    assert_eq!(read(parser(Calls::Tagged, false), &[text]).reasoning, "");
    let opened = Parser::new(&Family::plain(Calls::Bare, true), HashSet::new(), true);
    assert_eq!(
        read(opened.clone(), &["\nA\n</think>B"]),
        whole("B", "A", &[])
    );
    assert_eq!(read(opened, &["A </thin"]), whole("", "A </thin", &[]));
    let called =
        "<think>t</think>\n<tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 1}}</tool_call>";
    assert_eq!(
        read(parser(Calls::Tagged, true), &[called]),
        whole("", "t", &[("g", "{\"x\": 1}")])
    );
}

#[test]
fn arguments_are_passed_on_as_they_come_and_broken_off_where_they_are_broken() {
    let mut parser = parser(Calls::Tagged, false);
    parser.text("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a");
    let mut seen = Whole::default();
    seen.add(parser.parts());
    assert_eq!(seen, whole("", "", &[("f", "{\"a")]));
    parser.text("\": <b");
    seen.add(parser.parts());
    parser.finish();
    seen.add(parser.parts());
    assert_eq!(seen, whole("<b", "", &[("f", "{\"a\": ")]));
}

#[test]
fn marks_that_are_tokens_are_marks_and_no_text() {
    let mut parser = parser(Calls::List, false);
    parser.text("Now ");
    parser.mark(Mark::Call);
    parser.text("[{\"name\": \"f\", \"arguments\": {}}]");
    parser.finish();
    let mut seen = Whole::default();
    seen.add(parser.parts());
    assert_eq!(seen, whole("Now", "", &[("f", "{}")]));

    let mut parser = self::parser(Calls::List, false);
    parser.text("Now ");
    parser.mark(Mark::Call);
    parser.text("nothing.");
    parser.finish();
    let mut seen = Whole::default();
    seen.add(parser.parts());
    assert_eq!(seen, whole("Now nothing.", "", &[]));
}

#[test]
fn what_is_held_back_is_bounded() {
    for (calls, begin) in [
        (Calls::Tagged, "<tool_call>"),
        (Calls::Tagged, "<tool_call>{\"a\": \""),
        (Calls::List, "[TOOL_CALLS]["),
        (Calls::Named, "[TOOL_CALLS]f[CALL_ID]"),
        (Calls::Named, "[TOOL_CALLS]f[ARGS]"),
        (Calls::Bare, "{\"arguments\": {\"a\": \""),
        (Calls::Bare, "<think>"),
        (Calls::Bare, ""),
    ] {
        let mut parser = parser(calls, true);
        parser.text(begin);
        for _ in 0..1000 {
            parser.text(&" ".repeat(100));
            assert!(
                parser.pending.len() <= MAX_HELD + MAX_SPACE,
                "{calls:?} {begin}"
            );
        }
        let text = begin.to_owned() + &" ".repeat(100_000);
        let found = read(self::parser(calls, true), &[&text]);
        // A thought's first white space is nobody's.
        if !begin.contains("think") {
            assert_eq!(found, whole(&text, "", &[]));
        }
    }
    // No more calls than there may be.
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let found = read(
        parser(Calls::Tagged, false),
        &[&call.repeat(limits::MAX_TOOL_CALLS + 1)],
    );
    assert_eq!(found.calls.len(), limits::MAX_TOOL_CALLS);
    assert_eq!(found.content, call);
}

/// Pieces that texts are made of.
const WORDS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "\\",
    ",",
    ";",
    ": ",
    "\n",
    " ",
    "é",
    "f",
    "get_weather",
    "{\"name\": \"f\", ",
    "\"arguments\": {",
    "\"parameters\": {\"x\": \"y\"}}",
    "\"name\": \"f\"}",
    "{\"name\": \"f\", \"arguments\": {\"a\": {\"b\": []}}}",
    "null",
    "words",
    "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
    "[TOOL_CALLS][{\"name\": \"f\", ",
    "[TOOL_CALLS]f[ARGS]{",
    "\"arguments\": \"{}\"}",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_cut_does_not_matter_and_nothing_is_lost(
        words in proptest::collection::vec(0..WORDS.len(), 0..16),
        cuts in proptest::collection::vec(0usize..300, 0..12),
        family in 0..ALL.len(), thinks: bool, opened: bool,
    ) {
        let text: String = words.iter().map(|&w| WORDS[w]).collect();
        let mut edges: Vec<usize> = cuts.iter().map(|&c| text.ceil_char_boundary(c)).collect();
        edges.extend([0, text.len()]);
        edges.sort_unstable();
        let pieces: Vec<&str> = edges.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        let names = HashSet::from(["f".to_owned()]);
        let parser = Parser::new(&Family::plain(ALL[family], thinks), names, opened);
        let whole = read(parser.clone(), &[&text]);
        prop_assert_eq!(&read(parser.clone(), &pieces), &whole);
        let characters: Vec<&str> = text.split("").collect();
        prop_assert_eq!(&read(parser.clone(), &characters), &whole);
        let thought = opened || thinks && text.trim_start().starts_with("<think>");
        if whole.calls.is_empty() && !thought {
            // Whatever looked like the beginning of a call.
            prop_assert_eq!(whole.content.as_str(), text.as_str());
        }
        // Never more than there was, which the scheduler counts on.
        let calls = whole.calls.iter().map(|(n, a)| n.len() + a.len()).sum::<usize>();
        prop_assert!(whole.content.len() + whole.reasoning.len() + calls <= text.len());
    }
}
