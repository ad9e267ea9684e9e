//! What paths mean. Models' names may have slashes and come percent-encoded.

/// What is asked of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OfModel {
    pub name: String,
    pub version: String,
    /// One of [`ACTIONS`], or empty.
    pub action: &'static str,
}

const ACTIONS: [&str; 6] = [
    "ready",
    "config",
    "stats",
    "infer",
    "generate",
    "generate_stream",
];

/// A path's part without its percent signs; none if they stand for no text.
fn decoded(part: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_first_chunk::<2>()?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let byte = digit(digits[0])? * 16 + digit(digits[1])?;
        bytes.push(u8::try_from(byte).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

/// Reads `/v2/models/NAME[/versions/VERSION][/ACTION]`, and `/v2/models/stats`.
pub(super) fn model(path: &str) -> Option<OfModel> {
    let rest = path.strip_prefix("/v2/models/")?;
    let known = |last: &str| ACTIONS.into_iter().find(|action| *action == last);
    let split = rest.rsplit_once('/');
    let (named, action) = match split.and_then(|(named, last)| Some((named, known(last)?))) {
        Some(split) => split,
        None if rest == "stats" => ("", "stats"),
        None => (rest, ""),
    };
    let (name, version) = match named.rsplit_once("/versions/") {
        Some((name, version)) if !version.contains('/') => (name, version),
        _ => (named, ""),
    };
    Some(OfModel {
        name: decoded(name)?,
        version: decoded(version)?,
        action,
    })
}

/// Reads `[region/NAME/]ACTION`, already decoded. Without a name, all regions are meant.
pub(super) fn region(rest: &str) -> (&str, &str) {
    let named = rest.strip_prefix("region/");
    named
        .and_then(|named| named.rsplit_once('/'))
        .unwrap_or(("", rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_versions_and_actions_are_told_apart() {
        let of = |path: &str| model(path).map(|m| (m.name, m.version, m.action));
        let is = |name: &str, version: &str, action: &'static str| {
            Some((name.to_owned(), version.to_owned(), action))
        };
        assert_eq!(of("/v2/models/kjv"), is("kjv", "", ""));
        assert_eq!(of("/v2/models/kjv/infer"), is("kjv", "", "infer"));
        assert_eq!(
            of("/v2/models/a/b/versions/1/ready"),
            is("a/b", "1", "ready")
        );
        assert_eq!(of("/v2/models/a%2Fb/versions/1"), is("a/b", "1", ""));
        assert_eq!(of("/v2/models/infer"), is("infer", "", ""));
        assert_eq!(of("/v2/models/stats"), is("", "", "stats"));
        for bad in [
            "/v2/models/%",
            "/v2/models/%f",
            "/v2/models/%zz",
            "/v2/models/%ff",
            "/v1/models/a",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn regions_are_named_or_all() {
        assert_eq!(region("status"), ("", "status"));
        assert_eq!(region("region/a/b/register"), ("a/b", "register"));
        assert_eq!(region("region/a"), ("", "region/a"));
    }
}
