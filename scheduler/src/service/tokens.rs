//! Tokens, as clients call it.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    ids::RequestId,
    limits,
    receipt::fingerprint,
    v1::{
        AttachRequest, CancelStreamRequest, CancelStreamResponse, DetokenizeRequest,
        DetokenizeResponse, GenerateRequest, TokenizeRequest, TokenizeResponse,
        tokens_server::Tokens,
    },
};
use tonic::{Request, Response, Status};

use super::{Shared, deadline, within};
use crate::{
    admission::{check_prompt, check_request},
    relay::{self, Call},
    stream::{EventStream, Mark},
    streams::Opened,
    text,
};

/// The service.
pub(super) struct Service(pub Shared);

impl Service {
    /// The stream of a request: a new one, checked and with all filled in that it leaves open, or the one that its id
    /// stands for already.
    fn open(&self, request: Request<GenerateRequest>) -> Result<EventStream, Error> {
        let (metadata, _, mut request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        check_request(&request)?;
        let model = self.0.fleet.resolve(&request.model)?;
        request.model = model.as_str().to_owned();
        let (id, fingerprint) = match request.request_id.as_str() {
            "" => (RequestId::random()?, None),
            given => (RequestId::new(given)?, Some(fingerprint(&request))),
        };
        let resumed = request.resume.clone().unwrap_or_default();
        let begin = Mark {
            tokens: resumed.generated_ids.len() as u64,
            text: resumed.text_bytes_emitted,
        };
        if request.seed.is_none() {
            let seed = getrandom::u64().map_err(|e| {
                Error::new(Reason::Internal, format!("no random bytes for a seed: {e}"))
            })?;
            request.seed = Some(seed);
        }
        request.request_id = id.as_str().to_owned();
        let streams = self.0.streams.clone();
        let admit = || self.0.admission.admit();
        let (stream, permit) = match streams.open(&id, fingerprint, begin, admit)? {
            Opened::New(stream, permit) => (stream, permit),
            Opened::Known(stream) => return stream.attach(None, streams.reader()),
        };
        let reader = stream.attach(None, streams.reader());
        let call = Call {
            request,
            id,
            model,
            deadline,
            permit,
        };
        let fleet = Arc::clone(&self.0.fleet);
        tokio::spawn(relay::run(
            fleet,
            call,
            stream,
            streams,
            self.0.abort.clone(),
        ));
        reader
    }
}

#[tonic::async_trait]
impl Tokens for Service {
    type GenerateStream = EventStream;
    type AttachStream = EventStream;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<EventStream>, Status> {
        Ok(Response::new(self.open(request)?))
    }

    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let request = request.into_inner();
        let streams = &self.0.streams;
        let stream = streams.find(&RequestId::new(request.request_id)?)?;
        let from = Some((request.next_token, request.text_bytes));
        Ok(Response::new(stream.attach(from, streams.reader())?))
    }

    async fn cancel(
        &self,
        request: Request<CancelStreamRequest>,
    ) -> Result<Response<CancelStreamResponse>, Status> {
        let id = RequestId::new(request.into_inner().request_id)?;
        self.0.streams.find(&id)?.cancel();
        Ok(Response::new(CancelStreamResponse {}))
    }

    async fn tokenize(
        &self,
        request: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        check_prompt(request.prompt.as_ref())?;
        let fleet = &self.0.fleet;
        let model = fleet.resolve(&request.model)?;
        let _permit = self.0.admission.admit()?;
        let prompt = request.prompt.and_then(|p| p.kind);
        let call = text::tokenize(fleet, &model, prompt, request.without_special, deadline);
        Ok(Response::new(within(deadline, call).await?))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        if request.ids.len() > limits::MAX_PROMPT_TOKENS {
            let error = format!(
                "{} token ids are more than the limit of {}",
                request.ids.len(),
                limits::MAX_PROMPT_TOKENS
            );
            return Err(Error::new(Reason::LimitExceeded, error).into());
        }
        let fleet = &self.0.fleet;
        let model = fleet.resolve(&request.model)?;
        let _permit = self.0.admission.admit()?;
        let call = text::detokenize(fleet, &model, request.ids, request.with_special, deadline);
        Ok(Response::new(within(deadline, call).await?))
    }
}
