//! Changes of valid bytes, with the form they have in mind.

use serde_json::{Map, Value, json};

use super::{
    choices::Choices,
    spoil,
    targets::{Form, Target},
};

/// Bytes of a case at most.
const MOST: usize = 1 << 20;

/// The bytes of a case: some seed of the target, changed.
pub fn changed(target: &Target, seeds: &[Vec<u8>], seed: u64) -> Vec<u8> {
    let mut choices = Choices::new(seed);
    let mut bytes = match seeds {
        [] => Vec::new(),
        some => choices.pick(some),
    };
    // Now and then as it is: what is right must stay so.
    if choices.once_in(64) {
        return bytes;
    }
    for _ in 0..1 + choices.below(6) {
        match target.form {
            Form::Json if !choices.once_in(5) => json_of(&mut bytes, &mut choices),
            Form::Text(words) if !choices.once_in(5) => word(&mut bytes, words, &mut choices),
            _ => any(&mut bytes, seeds, &mut choices),
        }
    }
    bytes.truncate(MOST);
    bytes
}

const NUMBERS: [u64; 18] = [
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    64,
    255,
    256,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffe0,
    u64::MAX,
];

fn any(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], choices: &mut Choices) {
    let at = choices.below(bytes.len() + 1);
    match choices.below(8) {
        0 => bytes.truncate(at),
        // A number over what is there.
        1 | 2 => {
            let width = choices.pick(&[1, 2, 4, 4, 8, 8]);
            let number = choices.pick(&NUMBERS).to_le_bytes();
            if let Some(place) = bytes.get_mut(at..at + width) {
                place.copy_from_slice(&number[..width]);
            }
        }
        // One a little larger or smaller.
        3 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = byte.wrapping_add(choices.pick(&[1, 2, 0xff, 0xfe, 0x10, 0xf0]));
            }
        }
        // A part of another.
        4 if !seeds.is_empty() => {
            let other = choices.pick(seeds);
            let from = choices.below(other.len() + 1);
            let end = (from + choices.below(256)).min(other.len());
            let to = (at + choices.below(64)).min(bytes.len());
            bytes.splice(at..to, other[from..end].iter().copied());
        }
        // A part many times.
        5 => {
            let end = (at + 1 + choices.below(16)).min(bytes.len());
            let part = bytes[at.min(end)..end].to_vec();
            let times = choices.pick(&[2, 10, 100, 1000]);
            bytes.splice(at..at, part.repeat(times));
        }
        _ => spoil::bytes(bytes, choices),
    }
}

fn word(bytes: &mut Vec<u8>, words: &[&str], choices: &mut Choices) {
    let mut at = choices.below(bytes.len() + 1);
    if let Ok(text) = std::str::from_utf8(bytes) {
        while !text.is_char_boundary(at) {
            at -= 1;
        }
    }
    let end = match choices.below(3) {
        0 => (at + choices.below(12)).min(bytes.len()),
        _ => at,
    };
    let times = choices.pick(&[1, 1, 1, 1, 2, 5, 60, 600]);
    let word = choices.pick(words).repeat(times);
    bytes.splice(at..end, word.into_bytes());
}

fn json_of(bytes: &mut Vec<u8>, choices: &mut Choices) {
    let Ok(mut value) = serde_json::from_slice::<Value>(bytes) else {
        return spoil::bytes(bytes, choices);
    };
    let count = nodes(&value);
    let mut left = choices.below(count);
    if let Some(node) = nth(&mut value, &mut left) {
        replace(node, choices);
    }
    *bytes = value.to_string().into_bytes();
}

fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(nodes).sum(),
        Value::Object(map) => map.values().map(nodes).sum::<usize>(),
        _ => 0,
    }
}

/// The node with so many before it.
fn nth<'a>(value: &'a mut Value, left: &mut usize) -> Option<&'a mut Value> {
    if *left == 0 {
        return Some(value);
    }
    *left -= 1;
    match value {
        Value::Array(list) => list.iter_mut().find_map(|inner| nth(inner, left)),
        Value::Object(map) => map.values_mut().find_map(|inner| nth(inner, left)),
        _ => None,
    }
}

fn replace(node: &mut Value, choices: &mut Choices) {
    match (choices.below(6), &mut *node) {
        (0, Value::Object(map)) => {
            let keys: Vec<String> = map.keys().cloned().collect();
            if let [_, ..] = keys.as_slice() {
                map.remove(&choices.pick(&keys));
            }
        }
        (1, Value::Object(map)) => other_key(map, choices),
        (0 | 1, Value::Array(list)) if !list.is_empty() => {
            let at = choices.below(list.len());
            let again = list[at].clone();
            match choices.below(3) {
                0 => {
                    list.remove(at);
                }
                1 => list.insert(at, again),
                _ => list.extend(std::iter::repeat_n(again, choices.pick(&[10, 1000]))),
            }
        }
        (2, Value::String(text)) => {
            let more = choices.pick(&[
                "",
                "a",
                "\0",
                "\u{202e}",
                "+",
                "*",
                "(",
                "\\",
                "[^",
                "{9,}",
                "\u{10ffff}",
                "é",
            ]);
            let times = choices.pick(&[1, 1, 2, 50, 5000]);
            match choices.below(3) {
                0 => *text = more.repeat(times),
                1 => text.push_str(&more.repeat(times)),
                _ => text.insert_str(0, more),
            }
        }
        (2, Value::Number(number)) => {
            let old = number.as_i64().unwrap_or(0);
            *node = json!(old.wrapping_add(choices.pick(&[1, -1, 2, 64, -64])));
        }
        (3, _) => {
            *node = (0..choices.pick(&[1, 5, 100])).fold(node.take(), |inner, _| json!([inner]))
        }
        _ => *node = odd(choices),
    }
}

fn other_key(map: &mut Map<String, Value>, choices: &mut Choices) {
    let keys: Vec<String> = map.keys().cloned().collect();
    if keys.is_empty() {
        return;
    }
    let (from, to) = (choices.pick(&keys), choices.pick(&keys));
    if let Some(value) = map.get(&from).cloned() {
        let name = match choices.below(3) {
            0 => to,
            1 => format!("{to}x"),
            _ => String::new(),
        };
        map.insert(name, value);
    }
}

fn odd(choices: &mut Choices) -> Value {
    match choices.below(12) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!([]),
        3 => json!({}),
        4 => json!(""),
        5 => json!(-1),
        6 => json!(0),
        7 => json!(choices.pick(&NUMBERS)),
        8 => json!(choices.pick(&[1e308, -1e308, 1e-320, 0.5, -0.0])),
        9 => json!("a".repeat(choices.pick(&[1, 300, 10_000]))),
        10 => {
            json!({"type": "Sequence", "normalizers": [], "pretokenizers": [], "processors": [], "decoders": []})
        }
        _ => json!({"content": "a", "id": 0, "type": "Split", "pattern": {"Regex": "(a+)+$"}}),
    }
}
