//! What Hugging Face's chat templates find besides Jinja itself: `tojson`, `strftime_now`, Python's string methods; and the
//! filters that could blow up memory in one call, with a charge before.

use std::sync::Arc;

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::chat_guard::Meter;

/// Puts filters and functions into the environment.
pub(super) fn install(environment: &mut Environment<'_>, meter: &Meter, now: i64) {
    let m = meter.clone();
    environment.add_filter("__charge", move |value: Value| m.charged(value));
    let m = meter.clone();
    environment.add_filter("__stored", move |value: Value| m.stored(value));
    let m = meter.clone();
    environment.add_filter("__tick", move |value: Value| m.tick().map(|()| value));
    let m = meter.clone();
    environment.set_formatter(move |out, state, value| {
        m.charge_value(value)?;
        minijinja::escape_formatter(out, state, value)
    });
    let m = meter.clone();
    environment.add_function(
        "raise_exception",
        move |message: String| -> Result<Value, Error> {
            m.raise();
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    environment.add_function("strftime_now", move |format: &str| strftime(format, now));
    let m = meter.clone();
    environment.add_filter(
        "tojson",
        move |value: &Value, indent: Option<Value>, options: Kwargs| {
            let text = tojson(&m, value, indent, &options)?;
            Ok::<_, Error>(Value::from(text))
        },
    );
    growing_filters(environment, meter);
    let m = meter.clone();
    environment.set_unknown_method_callback(move |state, value, method, args| {
        before_method(&m, value, method, args)?;
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    // They show the engine's insides, and without a bound.
    environment.remove_global("debug");
    environment.remove_filter("pprint");
}

fn growing_filters(environment: &mut Environment<'_>, meter: &Meter) {
    let m = meter.clone();
    environment.add_filter(
        "replace",
        move |text: String, from: String, to: String, count: Option<usize>| {
            charge_replace(&m, &text, &from, &to)?;
            Ok::<_, Error>(match count {
                Some(count) => text.replacen(&from, &to, count),
                None => text.replace(&from, &to),
            })
        },
    );
    let m = meter.clone();
    environment.add_filter(
        "join",
        move |state: &mut State,
              value: Value,
              joiner: Option<String>,
              attribute: Option<String>,
              rest: Kwargs| {
            let joiner = joiner
                .or(rest.get::<Option<String>>("d")?)
                .unwrap_or_default();
            let attribute = attribute.or(rest.get::<Option<String>>("attribute")?);
            rest.assert_all_used()?;
            let value = match attribute {
                Some(attribute) => {
                    let by =
                        Value::from(Kwargs::from_iter([("attribute", Value::from(attribute))]));
                    m.charged(state.apply_filter("map", &[value, by])?)?
                }
                None => value,
            };
            join(&m, &joiner, &value)
        },
    );
    let m = meter.clone();
    environment.add_filter(
        "indent",
        move |text: String, args: Rest<Value>, named: Kwargs| {
            let argument = |index: usize, name: &str| match args.get(index) {
                Some(value) => Ok(Some(value.clone())),
                None => named.get::<Option<Value>>(name),
            };
            let width = match argument(0, "width")? {
                None => 4,
                Some(width) => width.as_usize().ok_or_else(|| {
                    Error::new(
                        ErrorKind::InvalidOperation,
                        "indent's width must be a number",
                    )
                })?,
            };
            let flag = |value: Option<Value>| value.is_some_and(|value| value.is_true());
            let (first, blank) = (flag(argument(1, "first")?), flag(argument(2, "blank")?));
            m.charge((width as u64).saturating_mul(text.matches('\n').count() as u64 + 2))?;
            Ok::<_, Error>(indent(&text, width, first, blank))
        },
    );
    let m = meter.clone();
    environment.add_filter(
        "batch",
        move |state: &mut State, value: Value, count: usize, fill: Option<Value>| {
            m.charge((count as u64).saturating_mul(16))?;
            minijinja::filters::batch(state, value, count, fill)
        },
    );
    let m = meter.clone();
    environment.add_filter(
        "slice",
        move |state: &mut State, value: Value, count: usize, fill: Option<Value>| {
            m.charge((count as u64).saturating_mul(64))?;
            minijinja::filters::slice(state, value, count, fill)
        },
    );
    let m = meter.clone();
    environment.add_filter(
        "split",
        move |value: &Value, separator: Option<Arc<str>>, most: Option<i64>| {
            charge_pieces(&m, value, separator.as_deref())?;
            minijinja::filters::split(value, separator, most)
        },
    );
    let m = meter.clone();
    environment.add_filter("lines", move |value: &Value| {
        charge_pieces(&m, value, Some("\n"))?;
        minijinja::filters::lines(value)
    });
    let m = meter.clone();
    environment.add_filter("list", move |state: &State, value: Value| {
        charge_pieces(&m, &value, Some(""))?;
        minijinja::filters::list(state, value)
    });
    environment.add_filter(
        "sum",
        |state: &State,
         values: Value,
         attribute: Option<&str>,
         start: Option<Value>,
         named: Kwargs| {
            // From anything else each sum so far would be copied for the next one.
            let first = start.clone().or(named.get::<Option<Value>>("start")?);
            if first.is_some_and(|first| !first.is_number()) {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "sum's start must be a number",
                ));
            }
            minijinja::filters::sum(state, values, attribute, start, named)
        },
    );
    let m = meter.clone();
    environment.add_filter("format", move |text: String, args: Rest<Value>| {
        charge_format(&m, &text, '%', &args)?;
        minijinja::formatting::format(minijinja::formatting::FormatStyle::Printf, &text, &args)
    });
}

fn charge_replace(meter: &Meter, text: &str, from: &str, to: &str) -> Result<(), Error> {
    let most = if from.is_empty() {
        text.len() + 1
    } else {
        text.len() / from.len()
    };
    // Counting is cheap; only where it matters.
    let times = if to.len() > from.len() && !from.is_empty() {
        text.matches(from).count()
    } else {
        most
    };
    meter.charge(
        (times as u64)
            .saturating_mul(to.len() as u64)
            .saturating_add(text.len() as u64),
    )
}

/// Charges what a list of a text's pieces takes besides them: a piece may be a single byte, or none. `None` for white space.
fn charge_pieces(meter: &Meter, value: &Value, separator: Option<&str>) -> Result<(), Error> {
    let Some(text) = value.as_str() else {
        return Ok(());
    };
    let pieces = match separator {
        Some(separator) => text.matches(separator).count() + 1,
        None => text.split_whitespace().count(),
    };
    meter.charge((pieces as u64).saturating_mul(size_of::<Value>() as u64))
}

fn join(meter: &Meter, joiner: &str, value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    for (index, item) in value.try_iter()?.enumerate() {
        meter.charge(joiner.len() as u64)?;
        meter.charge_value(&item)?;
        if index > 0 {
            text.push_str(joiner);
        }
        text.push_str(&item.to_string());
    }
    Ok(text)
}

/// Jinja's `indent`: not the first line, not blank ones, unless asked for.
fn indent(text: &str, width: usize, first: bool, blank: bool) -> String {
    let padding = " ".repeat(width);
    let mut out = String::new();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if (index > 0 || first) && (blank || !line.is_empty()) {
            out.push_str(&padding);
        }
        out.push_str(line);
    }
    out
}

/// Bytes that a number takes at most when it is written with the usual precision, digits in groups.
const NUMBER_BYTES: u64 = 512;

/// Charges the most that a format can write: any number of fields may name the same argument, the largest.
fn charge_format(meter: &Meter, format: &str, field: char, args: &[Value]) -> Result<(), Error> {
    let widest = check_format(format)?;
    let mut largest = 0;
    for arg in args {
        largest = meter.measure(arg)?.max(largest);
    }
    let one = largest + NUMBER_BYTES + widest * char::MAX.len_utf8() as u64;
    meter.charge((format.matches(field).count() as u64).saturating_mul(one))
}

/// The greatest number in a format, such as a width. One of more than three digits would be a string out of nothing.
fn check_format(format: &str) -> Result<u64, Error> {
    let (mut number, mut greatest) = (0, 0);
    for byte in format.bytes() {
        number = match byte {
            b'0'..=b'9' => number * 10 + u64::from(byte - b'0'),
            _ => 0,
        };
        greatest = number.max(greatest);
        if greatest > 999 {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "a format with a number over 999",
            ));
        }
    }
    if format.contains('*') {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "a format with a width given as '*'",
        ));
    }
    Ok(greatest)
}

fn before_method(meter: &Meter, value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    let Some(text) = value.as_str() else {
        return Ok(());
    };
    match method {
        "replace" => {
            let text_of = |index: usize| {
                args.get(index)
                    .and_then(|arg: &Value| arg.as_str())
                    .unwrap_or_default()
            };
            charge_replace(meter, text, text_of(0), text_of(1))
        }
        "join" => {
            let Some(items) = args.first() else {
                return Ok(());
            };
            let count = items.len().unwrap_or(0) as u64;
            meter.charge(count.saturating_mul(text.len() as u64))?;
            meter.charge_value(items)
        }
        "format" => charge_format(meter, text, '{', args),
        "split" => charge_pieces(meter, value, args.first().and_then(|arg| arg.as_str())),
        "splitlines" => charge_pieces(meter, value, Some("\n")),
        _ => Ok(()),
    }
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`.
fn tojson(
    meter: &Meter,
    value: &Value,
    indent: Option<Value>,
    options: &Kwargs,
) -> Result<String, Error> {
    let indent = indent
        .or(options.get::<Option<Value>>("indent")?)
        .filter(|indent| !indent.is_none());
    let indent = match indent {
        None => None,
        Some(indent) => match indent.as_usize() {
            Some(width) if width <= 16 => Some(width),
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson's indent must be from 0 to 16",
                ));
            }
        },
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    let sort = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let (item, colon) = match separators.as_deref() {
        Some([item, colon]) => (item.as_str(), colon.as_str()),
        _ => (if indent.is_some() { "," } else { ", " }, ": "),
    };
    meter.charge(16u64.saturating_mul(item.len() as u64 + colon.len() as u64))?;
    let mut writer = Json {
        out: String::new(),
        meter,
        indent,
        item,
        colon,
        ascii,
        sort,
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Json<'a> {
    out: String,
    meter: &'a Meter,
    indent: Option<usize>,
    item: &'a str,
    colon: &'a str,
    ascii: bool,
    sort: bool,
}

impl Json<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > 64 {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: nested too deep",
            ));
        }
        self.meter
            .charge(16 + self.item.len() as u64 + self.indent.unwrap_or(0) as u64 * depth as u64)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', items.len(), depth, |writer, index| {
                    writer.value(&items[index], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.list('{', '}', keys.len(), depth, |writer, index| {
                    let key = &keys[index];
                    match key.as_str() {
                        Some(text) => writer.string(text)?,
                        None => writer.string(&key.to_string())?,
                    }
                    writer.out.push_str(writer.colon);
                    writer.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            other => {
                let message = format!("tojson: {other} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        count: usize,
        depth: usize,
        mut each: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for index in 0..count {
            if index > 0 {
                self.out.push_str(self.item);
            }
            self.line(depth + 1);
            each(self, index)?;
        }
        if count > 0 {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(width) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.meter.charge(2 * text.len() as u64)?;
        let json = serde_json::Value::from(text).to_string();
        if !self.ascii {
            self.out.push_str(&json);
            return Ok(());
        }
        for character in json.chars() {
            if character.is_ascii() {
                self.out.push(character);
            } else {
                let mut units = [0; 2];
                for unit in character.encode_utf16(&mut units) {
                    self.out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
        Ok(())
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// Python's `strftime` in the C locale and UTC, for `now` in seconds since 1970.
fn strftime(format: &str, now: i64) -> Result<String, Error> {
    let (days, seconds) = (now.div_euclid(86_400), now.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[(month - 1) as usize % 12];
    let day_name = DAYS[days.rem_euclid(7) as usize % 7];
    let twelve = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut code = characters.next();
        let plain = code == Some('-');
        if plain {
            code = characters.next();
        }
        let number = |value: i64, width: usize| {
            if plain {
                value.to_string()
            } else {
                format!("{value:0width$}")
            }
        };
        out.push_str(&match code {
            Some('Y') => number(year, 4),
            Some('y') => number(year.rem_euclid(100), 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') => format!("{day:2}"),
            Some('j') => number(days - days_of(year, 1, 1) + 1, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(twelve, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('F') => format!("{year:04}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".into(),
            Some('z') => "+0000".into(),
            Some('%') => "%".into(),
            other => {
                let message = format!(
                    "strftime_now: unknown code %{}",
                    other.map(String::from).unwrap_or_default()
                );
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        });
    }
    Ok(out)
}

/// Year, month and day of a number of days since 1970 (Howard Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day_of_year - (153 * shifted_month + 2) / 5 + 1)
}

/// The inverse of [`civil`].
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let shifted_month = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(
            strftime("%d %b %Y", 1_795_244_889).expect("known codes"),
            "21 Nov 2026"
        );
        assert_eq!(
            strftime("%A %-d %B, %I:%M %p, day %j", 951_782_400).expect("known codes"),
            "Tuesday 29 February, 12:00 AM, day 060"
        );
        assert_eq!(
            strftime("%F %T %a", -1).expect("known codes"),
            "1969-12-31 23:59:59 Wed"
        );
        assert!(strftime("%Q", 0).is_err());
        for days in (-800_000..800_000).step_by(97) {
            let (year, month, day) = civil(days);
            assert_eq!(days_of(year, month, day), days);
        }
    }
}
