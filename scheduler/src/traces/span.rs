//! Spans while they last, and a call's place in its client's trace.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http::HeaderMap;
use opentelemetry_proto::tonic::{
    common::v1::{AnyValue, ArrayValue, KeyValue, any_value},
    trace::v1 as otlp,
};
use tonic::Request;

use super::{
    Attribute, ERROR, EventRow, Kind, Place, REQUEST, SpanRow, State, TraceContext, Traces,
    context::{SpanId, TRACEPARENT},
    export::Exporter,
};

/// OTLP's flags of a span: it is known whether its parent is in another process, and it is.
const KNOWN: u32 = 0x100;
const REMOTE: u32 = 0x200;

/// What an attribute tells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Text.
    Text(&'a str),
    /// A whole number; told as text if it is too large for OTLP.
    Whole(u64),
    /// A number.
    Number(f32),
    /// Whether.
    Flag(bool),
    /// A list with this one text.
    One(&'a str),
}

impl From<Value<'_>> for AnyValue {
    fn from(value: Value<'_>) -> Self {
        use any_value::Value as Wire;
        let value = match value {
            Value::Text(text) => Wire::StringValue(text.to_owned()),
            Value::Whole(number) => match i64::try_from(number) {
                Ok(number) => Wire::IntValue(number),
                Err(_) => Wire::StringValue(number.to_string()),
            },
            // By its digits: 0.8 shall not become 0.800000011920929.
            Value::Number(number) => {
                Wire::DoubleValue(number.to_string().parse().unwrap_or(number.into()))
            }
            Value::Flag(flag) => Wire::BoolValue(flag),
            Value::One(text) => Wire::ArrayValue(ArrayValue {
                values: vec![Value::Text(text).into()],
            }),
        };
        AnyValue { value: Some(value) }
    }
}

fn key_value(attribute: &Attribute, value: Value<'_>) -> KeyValue {
    KeyValue {
        key: attribute.name.to_owned(),
        value: Some(value.into()),
        ..KeyValue::default()
    }
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |s| u64::try_from(s.as_nanos()).unwrap_or(u64::MAX))
}

fn wire_kind(kind: Kind) -> i32 {
    let kind = match kind {
        Kind::Server => otlp::span::SpanKind::Server,
        Kind::Client => otlp::span::SpanKind::Client,
        Kind::Internal => otlp::span::SpanKind::Internal,
    };
    kind.into()
}

/// One that is recorded.
#[derive(Debug)]
struct Live {
    out: Arc<Exporter>,
    span: otlp::Span,
    row: &'static SpanRow,
}

impl Live {
    fn new(
        out: &Arc<Exporter>,
        row: &'static SpanRow,
        (context, parent): (TraceContext, Option<SpanId>),
        (state, begun): (&str, u64),
    ) -> Box<Self> {
        let span = otlp::Span {
            trace_id: context.trace().to_vec(),
            span_id: context.span.to_vec(),
            parent_span_id: parent.map(|id| id.to_vec()).unwrap_or_default(),
            trace_state: state.to_owned(),
            flags: u32::from(context.flags()) | KNOWN,
            name: row.name.to_owned(),
            kind: wire_kind(row.kind),
            start_time_unix_nano: begun,
            ..otlp::Span::default()
        };
        let out = Arc::clone(out);
        Box::new(Self { out, span, row })
    }
}

/// A span that lasts until it is dropped. The default one, and any of a request that is not sampled, is recorded nowhere and
/// costs nothing.
#[derive(Debug, Default)]
pub struct Span {
    context: Option<TraceContext>,
    state: State,
    live: Option<Box<Live>>,
}

impl Span {
    /// One that is recorded elsewhere, to be carried on.
    pub fn passing(place: Place) -> Span {
        let Place { context, state } = place;
        let live = None;
        Span {
            context,
            state,
            live,
        }
    }

    /// One within this one, from now on.
    pub fn child(&self, row: &'static SpanRow) -> Span {
        self.child_from(row, None)
    }

    /// One within this one, since this one's beginning.
    pub fn first_child(&self, row: &'static SpanRow) -> Span {
        let begun = self
            .live
            .as_ref()
            .map(|live| live.span.start_time_unix_nano);
        self.child_from(row, begun)
    }

    fn child_from(&self, row: &'static SpanRow, begun: Option<u64>) -> Span {
        let recorded = self.live.as_ref().zip(self.context);
        let made = recorded.and_then(|(live, own)| {
            let context = own.next()?;
            let begun = begun.unwrap_or_else(now);
            let state = self.state.as_str();
            let live = Live::new(&live.out, row, (context, Some(own.span)), (state, begun));
            Some(Span {
                context: Some(context),
                state: self.state.clone(),
                live: Some(live),
            })
        });
        made.unwrap_or_else(|| Span::passing(self.place()))
    }

    /// Spans within this one, one after the other from its beginning, that took so long and are over now. None goes on for
    /// longer than this one has lasted.
    pub fn past(&self, parts: impl IntoIterator<Item = (&'static SpanRow, Duration)>) {
        let Some(live) = &self.live else { return };
        let (mut at, end) = (live.span.start_time_unix_nano, now());
        for (row, took) in parts {
            let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            let until = at.saturating_add(took).min(end.max(at));
            let mut part = self.child_from(row, Some(at));
            if let Some(live) = &mut part.live {
                live.span.end_time_unix_nano = until;
            }
            at = until;
        }
    }

    /// Where it is in its trace: its own context, or its client's if it is not recorded here.
    pub fn place(&self) -> Place {
        Place {
            context: self.context,
            state: self.state.clone(),
        }
    }

    /// The id of its trace as 32 hexadecimal digits; empty if there is none.
    pub fn trace_id(&self) -> String {
        self.context
            .map_or_else(String::new, |context| context.trace_id())
    }

    /// Whether what it is told gets anywhere.
    pub fn is_recorded(&self) -> bool {
        self.live.is_some()
    }

    /// Names it.
    pub fn name(&mut self, name: impl FnOnce() -> String) {
        if let Some(live) = &mut self.live {
            live.span.name = name();
        }
    }

    /// Tells something of it.
    pub fn set(&mut self, attribute: &Attribute, value: Value<'_>) {
        if let Some(live) = &mut self.live {
            debug_assert!(live.row.attributes.contains(attribute), "{attribute:?}");
            live.span.attributes.push(key_value(attribute, value));
        }
    }

    /// Tells something of it that need not be known.
    pub fn set_some<'a>(&mut self, attribute: &Attribute, value: Option<Value<'a>>) {
        if let Some(value) = value {
            self.set(attribute, value);
        }
    }

    /// Something happened just now.
    pub fn event<const N: usize>(&mut self, row: &EventRow, values: [(&Attribute, Value<'_>); N]) {
        if let Some(live) = &mut self.live {
            debug_assert!(values.iter().all(|(a, _)| row.attributes.contains(a)));
            live.span.events.push(otlp::span::Event {
                time_unix_nano: now(),
                name: row.name.to_owned(),
                attributes: values.map(|(a, value)| key_value(a, value)).into(),
                ..otlp::span::Event::default()
            });
        }
    }

    /// It ends as an error of this kind.
    pub fn fail(&mut self, kind: &str) {
        self.set(&ERROR, Value::Text(kind));
        if let Some(live) = &mut self.live {
            let code = otlp::status::StatusCode::Error.into();
            let message = String::new();
            live.span.status = Some(otlp::Status { message, code });
        }
    }

    /// It was none: nobody hears of it.
    pub fn forget(&mut self) {
        self.live = None;
    }

    /// Has a call carry it.
    pub fn carry<T>(&self, request: &mut Request<T>) {
        if self.context.is_none() {
            return;
        }
        let mut headers = std::mem::take(request.metadata_mut()).into_headers();
        self.place().carry(&mut headers);
        *request.metadata_mut() = tonic::metadata::MetadataMap::from_headers(headers);
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(mut live) = self.live.take() {
            if live.span.end_time_unix_nano == 0 {
                // A clock that was set back makes it no shorter than nothing.
                live.span.end_time_unix_nano = now().max(live.span.start_time_unix_nano);
            }
            live.out.take(live.span);
        }
    }
}

/// What goes with a call at a door where traces are made.
#[derive(Debug)]
struct Own {
    out: Arc<Exporter>,
    /// Of the call's first request.
    context: TraceContext,
    at: u64,
    /// Whether there is such a request.
    taken: AtomicBool,
}

/// A call's place in its client's trace; goes with its caller.
#[derive(Clone, Debug, Default)]
pub struct Arrival {
    client: Place,
    own: Option<Arc<Own>>,
}

impl PartialEq for Arrival {
    fn eq(&self, other: &Self) -> bool {
        let own = |of: &Self| of.own.as_ref().map(Arc::as_ptr);
        self.client == other.client && own(self) == own(other)
    }
}

impl Eq for Arrival {}

impl Traces {
    /// A call with these headers comes in.
    pub fn arrive(&self, headers: &HeaderMap) -> Arrival {
        self.resume(Place::of(headers))
    }

    /// A request of the program before this one goes on, in this trace.
    pub fn resume(&self, client: Place) -> Arrival {
        let own = self.exporter().and_then(|out| {
            let context = match client.context {
                Some(client) => client.next()?,
                None => TraceContext::begin(out.rate)?,
            };
            Some(Arc::new(Own {
                out: Arc::clone(out),
                context,
                at: now(),
                taken: AtomicBool::new(false),
            }))
        });
        Arrival { client, own }
    }
}

impl Arrival {
    /// The span of a request that the call makes.
    pub fn begin(&self) -> Span {
        let Some(own) = &self.own else {
            return Span::passing(self.client.clone());
        };
        let first = !own.taken.swap(true, Ordering::Relaxed);
        let made = match first {
            true => Some(own.context),
            false => own.context.next(),
        };
        let Some(context) = made else {
            return Span::default();
        };
        let recorded = context.is_sampled().then(|| {
            let (parent, begun) = match first {
                true => (self.client.context.map(|client| client.span), own.at),
                false => (Some(own.context.span), now()),
            };
            let state = self.client.state.as_str();
            let mut live = Live::new(&own.out, &REQUEST, (context, parent), (state, begun));
            match first {
                true if parent.is_some() => live.span.flags |= REMOTE,
                true => {}
                false => live.span.kind = wire_kind(Kind::Internal),
            }
            live
        });
        Span {
            context: Some(context),
            state: self.client.state.clone(),
            live: recorded,
        }
    }

    /// There was no such request after all, but one that has a span already: nobody hears of it.
    pub fn take_back(&self, span: &mut Span) {
        span.live = None;
        let own = self.own.as_ref();
        if let Some(own) = own.filter(|own| span.context == Some(own.context)) {
            own.taken.store(false, Ordering::Relaxed);
        }
    }

    /// The parent that a program after this one has to name so that the trace goes on there: the client's span, or the
    /// request's own where the trace began.
    pub fn parent(&self) -> Place {
        let own = || self.own.as_ref().map(|own| own.context);
        Place {
            context: self.client.context.or_else(own),
            state: self.client.state.clone(),
        }
    }

    /// Tells the client where its request is in the trace, if the call made one.
    pub fn answer(&self, headers: &mut HeaderMap) {
        let taken = |own: &&Arc<Own>| own.taken.load(Ordering::Relaxed);
        let value = self.own.as_ref().filter(taken);
        if let Some(value) = value.and_then(|own| own.context.header()) {
            headers.insert(TRACEPARENT, value);
        }
    }
}
