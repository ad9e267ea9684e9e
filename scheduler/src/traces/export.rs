//! Sends spans to a collector over OTLP (gRPC). A collector that is slow, away or wrong costs spans, which are counted, and
//! nothing else.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_proto::limits;
use http::uri::Scheme;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, trace_service_client::TraceServiceClient},
    common::v1::{AnyValue, InstrumentationScope, KeyValue},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans, Span},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

use super::Value;
use crate::dial;

/// Spans of one message.
const BATCH: usize = 512;
/// How long spans are gathered for one message.
const GATHER: Duration = Duration::from_millis(500);
/// How long the collector may take to be connected to, and to take a message.
const CONNECT: Duration = Duration::from_secs(2);
const TAKE: Duration = Duration::from_secs(5);
/// Until a message is sent once more over a new connection, if the one that served so far broke.
const AGAIN: Duration = Duration::from_millis(100);
/// Those who wait for everything to be sent.
const MAX_FLUSHES: usize = 4;

const _: () = assert!(limits::MAX_SPANS > BATCH);

/// Where spans go.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    /// Its address, `http://HOST:PORT` or `https://HOST:PORT`.
    pub endpoint: http::Uri,
    /// Authority of its certificate, in PEM; none: those that this host believes.
    pub ca: Option<PathBuf>,
    /// Share of the traces that begin here that are recorded, 0 to 1. Whoever calls as part of a trace has decided already.
    pub sample: f64,
}

/// What became of spans.
#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl Counts {
    fn sent(&self, spans: u64) {
        self.sent.fetch_add(spans, Ordering::Relaxed);
    }

    fn dropped(&self, spans: u64) {
        self.dropped.fetch_add(spans, Ordering::Relaxed);
    }
}

/// Takes spans, and has them sent.
#[derive(Debug)]
pub(super) struct Exporter {
    to: mpsc::Sender<Span>,
    flushes: mpsc::Sender<oneshot::Sender<()>>,
    counts: Arc<Counts>,
    /// Share of new traces that are sampled.
    pub(super) rate: f64,
}

impl Exporter {
    /// Takes one that is over; never waits.
    pub(super) fn take(&self, span: Span) {
        if self.to.try_send(span).is_err() {
            self.counts.dropped(1);
        }
    }
}

/// Whether and where traces are made. Clones are the same. The default makes none.
#[derive(Clone, Debug, Default)]
pub struct Traces(Option<Arc<Exporter>>);

impl Traces {
    /// Sends to this collector, from a task of this runtime that lives as long as what this returns.
    ///
    /// # Errors
    /// Words, if the address is none that can be connected to, or an authority of certificates cannot be read.
    pub fn to(collector: &Collector) -> Result<Self, String> {
        let channel = channel(collector)?;
        let (to, from) = mpsc::channel(limits::MAX_SPANS - BATCH);
        let (flushes, asked) = mpsc::channel(MAX_FLUSHES);
        let counts = Arc::<Counts>::default();
        let sending = Sending {
            client: TraceServiceClient::new(channel),
            endpoint: collector.endpoint.to_string(),
            resource: resource(),
            counts: Arc::clone(&counts),
            works: None,
        };
        tokio::spawn(sending.run(from, asked));
        Ok(Self(Some(Arc::new(Exporter {
            to,
            flushes,
            counts,
            rate: collector.sample,
        }))))
    }

    pub(super) fn exporter(&self) -> Option<&Arc<Exporter>> {
        self.0.as_ref()
    }

    fn count(&self, of: impl Fn(&Counts) -> &AtomicU64) -> u64 {
        let count = |exporter: &Arc<Exporter>| of(&exporter.counts).load(Ordering::Relaxed);
        self.0.as_ref().map_or(0, count)
    }

    /// Spans that the collector took.
    pub fn sent(&self) -> u64 {
        self.count(|counts| &counts.sent)
    }

    /// Spans that were dropped, because the collector did not take them or too many waited.
    pub fn dropped(&self) -> u64 {
        self.count(|counts| &counts.dropped)
    }

    /// Has everything sent that is over, and returns when that was tried, or after `patience`.
    pub async fn flush(&self, patience: Duration) {
        let Some(exporter) = &self.0 else { return };
        let flushed = async {
            let (done, told) = oneshot::channel();
            if exporter.flushes.send(done).await.is_ok() {
                let _ = told.await;
            }
        };
        if timeout(patience, flushed).await.is_err() {
            tracing::debug!("the collector of traces did not take the last spans in time");
        }
    }
}

/// A channel that connects when it is first used.
fn channel(collector: &Collector) -> Result<Channel, String> {
    let uri = &collector.endpoint;
    let no_host = || format!("{uri} names no host");
    let authority = uri.authority().ok_or_else(no_host)?;
    let is_tls = uri.scheme() == Some(&Scheme::HTTPS);
    // TLS is spoken by the connector; tonic itself is built without.
    let endpoint = Endpoint::from_shared(format!("http://{authority}"))
        .map_err(|e| e.to_string())?
        .origin(uri.clone())
        .connect_timeout(CONNECT)
        .timeout(TAKE);
    if !is_tls {
        return Ok(endpoint.connect_lazy());
    }
    let authority = match authority.port() {
        Some(_) => authority.clone(),
        None => format!("{authority}:443").parse().map_err(|_| no_host())?,
    };
    let tls = dial::Tls::to(&authority, collector.ca.as_deref())?;
    Ok(
        endpoint.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
            let tls = tls.clone();
            async move { tls.open().await.map(TokioIo::new) }
        })),
    )
}

/// Who tells it all.
fn resource() -> Resource {
    let key_value = |key: &str, value: &str| KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue::from(Value::Text(value))),
        ..KeyValue::default()
    };
    let mut attributes = vec![
        key_value("service.name", "hotcell"),
        key_value("service.version", env!("CARGO_PKG_VERSION")),
    ];
    if let Ok(host) = rustix::system::uname().nodename().to_str() {
        attributes.push(key_value("host.name", host));
    }
    Resource {
        attributes,
        ..Resource::default()
    }
}

/// The task that sends.
struct Sending {
    client: TraceServiceClient<Channel>,
    endpoint: String,
    resource: Resource,
    counts: Arc<Counts>,
    /// Whether the collector took the last message, if there was one.
    works: Option<bool>,
}

impl Sending {
    async fn run(
        mut self,
        mut from: mpsc::Receiver<Span>,
        mut flushes: mpsc::Receiver<oneshot::Sender<()>>,
    ) {
        let mut batch = Vec::new();
        loop {
            let asked = tokio::select! {
                biased;
                got = from.recv_many(&mut batch, BATCH) => match got {
                    0 => return,
                    _ => None,
                },
                asked = flushes.recv() => asked,
            };
            let asked = match asked {
                Some(asked) => Some(asked),
                None => {
                    let more = async {
                        loop {
                            let room = BATCH.saturating_sub(batch.len());
                            if room == 0 || from.recv_many(&mut batch, room).await == 0 {
                                return;
                            }
                        }
                    };
                    tokio::select! {
                        biased;
                        asked = flushes.recv() => asked,
                        _ = timeout(GATHER, more) => None,
                    }
                }
            };
            if asked.is_some() {
                while let Ok(span) = from.try_recv() {
                    batch.push(span);
                    if batch.len() >= BATCH {
                        self.send(&mut batch).await;
                    }
                }
            }
            self.send(&mut batch).await;
            if let Some(done) = asked {
                // Whoever asked may wait no more.
                let _ = done.send(());
            }
        }
    }

    fn message(&self, spans: Vec<Span>) -> ExportTraceServiceRequest {
        let scope = InstrumentationScope {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let scope_spans = vec![ScopeSpans {
            scope: Some(scope),
            spans,
            schema_url: String::new(),
        }];
        ExportTraceServiceRequest {
            resource_spans: vec![ResourceSpans {
                resource: Some(self.resource.clone()),
                scope_spans,
                schema_url: String::new(),
            }],
        }
    }

    /// How many spans the collector refused.
    async fn export(&mut self, message: ExportTraceServiceRequest) -> Result<u64, Status> {
        let call = self.client.export(message);
        let late = |_| Status::deadline_exceeded("it did not answer in time");
        let answer = timeout(TAKE, call).await.map_err(late)??;
        let refused = answer.into_inner().partial_success;
        Ok(refused.map_or(0, |r| u64::try_from(r.rejected_spans).unwrap_or(0)))
    }

    /// Sends all of these, or drops them.
    async fn send(&mut self, batch: &mut Vec<Span>) {
        if batch.is_empty() {
            return;
        }
        let count = batch.len() as u64;
        let message = self.message(std::mem::take(batch));
        let mut sent = self.export(message.clone()).await;
        let broke = |status: &Status| status.code() == Code::Unavailable;
        // A connection that was idle may be gone without anybody having said so.
        if self.works == Some(true) && sent.as_ref().is_err_and(broke) {
            sleep(AGAIN).await;
            sent = self.export(message).await;
        }
        let endpoint = &self.endpoint;
        match &sent {
            Ok(refused) => {
                let refused = (*refused).min(count);
                self.counts.sent(count - refused);
                self.counts.dropped(refused);
                if self.works == Some(false) {
                    tracing::info!(%endpoint, "the collector takes traces again");
                }
            }
            Err(status) => {
                self.counts.dropped(count);
                // Said once, until it works again.
                if self.works != Some(false) {
                    tracing::warn!(
                        %endpoint,
                        code = ?status.code(),
                        why = %crate::discover::clip(status.message()),
                        "the collector does not take traces; they are dropped and counted"
                    );
                }
            }
        }
        self.works = Some(sent.is_ok());
    }
}
