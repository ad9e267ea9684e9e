//! A collector of OpenTelemetry's traces that keeps what it hears. The tests of the whole system have it, too.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
    trace::v1::Span,
};
use tonic::{Request, Response, Status, transport::Server};

/// The collector. Clones hear the same.
#[derive(Clone, Default)]
pub struct Heard(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Heard {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of in request.into_inner().resource_spans {
            let resource = of.resource.unwrap().attributes;
            let service = resource.iter().find(|a| a.key == "service.name").unwrap();
            let name = service.value.clone().unwrap().value.unwrap();
            assert_eq!(name, Value::StringValue("hotcell".to_owned()));
            let spans = of.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans().extend(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Heard {
    /// Serves it. Where it listens.
    pub async fn listen(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        address
    }

    /// What it heard so far.
    pub fn spans(&self) -> MutexGuard<'_, Vec<Span>> {
        self.0.lock().unwrap()
    }
}

/// An id in hexadecimal digits.
pub fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}
