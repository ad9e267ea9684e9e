//! W3C's trace context: the headers `traceparent` and `tracestate`.

use std::{fmt, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue};

/// The header that names a trace and a span of it.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The header in which tracing systems carry what is theirs.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Bytes of a `tracestate`, and members of it, that are passed on; longer ones are dropped, as the standard allows.
const MAX_STATE_BYTES: usize = 512;
const MAX_STATE_MEMBERS: usize = 32;
/// Stands for bytes that are no text, and for all that is with them: no member of a state.
const UNREADABLE: &str = "-";

/// Flag: whoever called records this trace.
const SAMPLED: u8 = 1;
/// Flag: the trace's id was drawn at random.
const RANDOM: u8 = 2;

/// A span's id.
pub type SpanId = [u8; 8];

/// A span of a trace, as one process tells another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    trace: [u8; 16],
    /// The span.
    pub span: SpanId,
    flags: u8,
}

/// So many bytes, from lowercase hexadecimal digits.
fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut all = [0; N];
    for (to, [high, low]) in all.iter_mut().zip(pairs) {
        *to = digit(*high)? << 4 | digit(*low)?;
    }
    Some(all)
}

/// A random id, which is never all zeros; none if there are no random bytes.
fn random<const N: usize>() -> Option<[u8; N]> {
    let mut id = [0; N];
    getrandom::fill(&mut id).ok()?;
    (id != [0; N]).then_some(id)
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl TraceContext {
    /// Reads a `traceparent`. None for one that is malformed: whoever gets such a one begins a trace anew.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(5, '-');
        let [version] = bytes(parts.next()?)?;
        let trace = bytes(parts.next()?)?;
        let span = bytes(parts.next()?)?;
        let [flags] = bytes(parts.next()?)?;
        // A later version may say more behind; this one has nothing there.
        let fits = match version {
            0 => parts.next().is_none(),
            u8::MAX => false,
            _ => true,
        };
        (fits && trace != [0; 16] && span != [0; 8]).then_some(Self {
            trace,
            span,
            flags: flags & (SAMPLED | RANDOM),
        })
    }

    /// That of a call with these headers.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut all = headers.get_all(TRACEPARENT).iter();
        let one = all.next()?.to_str().ok()?;
        // Two of them are as good as none.
        all.next().is_none().then(|| Self::parse(one))?
    }

    /// The first span of a new trace, of which `rate` (0 to 1) are sampled. None if there are no random bytes.
    pub fn begin(rate: f64) -> Option<Self> {
        let trace: [u8; 16] = random()?;
        // As OpenTelemetry compares: the last 56 bits with a threshold.
        let drawn = u128::from_be_bytes(trace) & ((1 << 56) - 1);
        let threshold = ((1.0 - rate) * (1u64 << 56) as f64) as u128;
        let sampled = if drawn >= threshold { SAMPLED } else { 0 };
        Some(Self {
            trace,
            span: random()?,
            flags: RANDOM | sampled,
        })
    }

    /// Another span of the same trace. None if there are no random bytes.
    pub fn next(self) -> Option<Self> {
        let span = random()?;
        Some(Self { span, ..self })
    }

    /// Whether it is recorded.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The trace's id.
    pub fn trace(&self) -> [u8; 16] {
        self.trace
    }

    /// The trace's id as 32 hexadecimal digits.
    pub fn trace_id(&self) -> String {
        Hex(&self.trace).to_string()
    }

    /// The flags as W3C numbers them.
    pub fn flags(self) -> u8 {
        self.flags
    }

    /// The header's value.
    pub fn header(&self) -> Option<HeaderValue> {
        HeaderValue::try_from(self.to_string()).ok()
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span) = (Hex(&self.trace), Hex(&self.span));
        write!(f, "00-{trace}-{span}-{:02x}", self.flags)
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a call's `tracestate` says; empty if it says nothing, or nothing that can be passed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State(Option<Arc<str>>);

/// Where something is in its client's trace: with it goes what tracing systems say of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The span; none where there is no trace.
    pub context: Option<TraceContext>,
    /// What they say.
    pub state: State,
}

impl Place {
    /// That of a call with these headers.
    pub fn of(headers: &HeaderMap) -> Self {
        let context = TraceContext::of(headers);
        // It means nothing without a parent.
        let state = context.map_or_else(State::default, |_| State::of(headers));
        Self { context, state }
    }

    /// As another program wrote it down.
    pub fn parse(traceparent: &str, tracestate: &str) -> Self {
        let context = TraceContext::parse(traceparent);
        let state = context.map_or_else(State::default, |_| State::read([tracestate]));
        Self { context, state }
    }

    /// The `traceparent`; empty if there is none.
    pub fn parent(&self) -> String {
        self.context.map_or_else(String::new, |c| c.to_string())
    }

    /// Has a call with these headers carry it.
    pub fn carry(&self, headers: &mut HeaderMap) {
        let Some(parent) = self.context.and_then(|context| context.header()) else {
            return;
        };
        headers.insert(TRACEPARENT, parent);
        if !self.state.as_str().is_empty()
            && let Ok(state) = HeaderValue::from_str(self.state.as_str())
        {
            headers.insert(TRACESTATE, state);
        }
    }
}

impl State {
    /// The header's value; empty if there is none.
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }

    /// That of a call with these headers.
    pub fn of(headers: &HeaderMap) -> Self {
        let values = headers.get_all(TRACESTATE).iter();
        Self::read(values.map(|value| value.to_str().unwrap_or(UNREADABLE)))
    }

    /// That of a call on which it is given in so many parts.
    fn read<'a>(values: impl IntoIterator<Item = &'a str>) -> Self {
        let mut all = String::new();
        for value in values {
            if all.len() + value.len() >= MAX_STATE_BYTES {
                return Self::default();
            }
            if !all.is_empty() {
                all.push(',');
            }
            all.push_str(value);
        }
        let members = || all.split(',').map(str::trim).filter(|m| !m.is_empty());
        let fits = members().count() <= MAX_STATE_MEMBERS && members().all(|m| m.contains('='));
        Self((fits && !all.is_empty()).then(|| all.into()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_parent_is_read_and_written_as_the_standard_says() {
        let context = TraceContext::parse(PARENT).unwrap();
        assert!(context.is_sampled());
        assert_eq!(context.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(context.to_string(), PARENT);
        let next = context.next().unwrap();
        assert_eq!(next.trace(), context.trace());
        assert_ne!(next.span, context.span);
        let later = PARENT.replacen("00", "cc", 1) + "-what-comes";
        assert_eq!(TraceContext::parse(&later), Some(context));
        let not = PARENT.replace("-01", "-00");
        assert!(!TraceContext::parse(&not).unwrap().is_sampled());
    }

    #[test]
    fn what_is_malformed_is_no_parent() {
        for bad in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e47360-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902bä-01",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
        let mut twice = HeaderMap::new();
        twice.append(TRACEPARENT, HeaderValue::from_static(PARENT));
        assert!(TraceContext::of(&twice).is_some());
        twice.append(TRACEPARENT, HeaderValue::from_static(PARENT));
        assert_eq!(TraceContext::of(&twice), None);
    }

    #[test]
    fn a_state_is_passed_on_if_it_is_one_and_short() {
        let of = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(TRACESTATE, HeaderValue::from_str(value).unwrap());
            }
            State::of(&headers).as_str().to_owned()
        };
        assert_eq!(of(&["a=1, b=2", "c@d=3"]), "a=1, b=2,c@d=3");
        assert_eq!(of(&["a"]), "");
        assert_eq!(of(&[&format!("a={}", "x".repeat(600))]), "");
        assert_eq!(of(&[&"a=1,".repeat(33)]), "");
        assert_eq!(of(&[]), "");
        let mut odd = HeaderMap::new();
        odd.append(TRACESTATE, HeaderValue::from_static("a=1"));
        odd.append(TRACESTATE, HeaderValue::from_bytes(b"b=\xff").unwrap());
        assert_eq!(State::of(&odd), State::default());
    }

    #[test]
    fn a_place_is_carried_and_written_down_with_its_state() {
        let place = Place::parse(PARENT, "a=1,b=2");
        let mut headers = HeaderMap::new();
        place.carry(&mut headers);
        assert_eq!(headers["tracestate"], "a=1,b=2");
        assert_eq!(Place::of(&headers), place);
        assert_eq!(Place::parse(&place.parent(), place.state.as_str()), place);
        // Without a parent a state means nothing.
        headers.remove(TRACEPARENT);
        assert_eq!(Place::of(&headers), Place::default());
        assert_eq!(Place::parse("", "a=1"), Place::default());
    }

    #[test]
    fn as_many_traces_are_sampled_as_was_said() {
        let sampled = |rate| {
            let all = (0..4000).filter_map(|_| TraceContext::begin(rate));
            all.filter(|context| context.is_sampled()).count()
        };
        assert_eq!(sampled(1.0), 4000);
        assert_eq!(sampled(0.0), 0);
        // Seven standard deviations to each side.
        assert!((1000 - 192..=1000 + 192).contains(&sampled(0.25)));
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_harm(text in ".{0,80}") {
            if let Some(context) = TraceContext::parse(&text) {
                prop_assert_eq!(TraceContext::parse(&context.to_string()), Some(context));
            }
        }
    }
}
