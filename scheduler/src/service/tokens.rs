//! Tokens, as clients call it.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    ids::RequestId,
    limits,
    v1::{
        DetokenizeRequest, DetokenizeResponse, GenerateRequest, TokenizeRequest, TokenizeResponse,
        tokens_server::Tokens,
    },
};
use tonic::{Request, Response, Status};

use super::{Shared, deadline, within};
use crate::{
    admission::{check_prompt, check_request},
    relay::{self, Call, EventStream},
    text,
};

/// The service.
pub(super) struct Service(pub Shared);

impl Service {
    /// Checks a request, fills in what it leaves open and lets it in.
    fn admit(&self, request: Request<GenerateRequest>) -> Result<Call, Error> {
        let (metadata, _, mut request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        check_request(&request)?;
        let model = self.0.fleet.resolve(&request.model)?;
        let id = match request.request_id.as_str() {
            "" => RequestId::random()?,
            given => RequestId::new(given)?,
        };
        let permit = self.0.admission.admit(Some(&id))?;
        if request.seed.is_none() {
            let seed = getrandom::u64().map_err(|e| {
                Error::new(Reason::Internal, format!("no random bytes for a seed: {e}"))
            })?;
            request.seed = Some(seed);
        }
        request.request_id = id.as_str().to_owned();
        request.model = model.as_str().to_owned();
        Ok(Call {
            request,
            model,
            deadline,
            permit,
        })
    }
}

#[tonic::async_trait]
impl Tokens for Service {
    type GenerateStream = EventStream;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let call = self.admit(request)?;
        let (outlet, stream) = relay::outlet(self.0.streams.token())?;
        let fleet = Arc::clone(&self.0.fleet);
        tokio::spawn(relay::run(fleet, call, outlet, self.0.abort.clone()));
        Ok(Response::new(stream))
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
        let _permit = self.0.admission.admit(None)?;
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
        let _permit = self.0.admission.admit(None)?;
        let call = text::detokenize(fleet, &model, request.ids, request.with_special, deadline);
        Ok(Response::new(within(deadline, call).await?))
    }
}
