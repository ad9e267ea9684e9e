//! Tokens, as clients call it.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    ids::RequestId,
    limits,
    receipt::fingerprint,
    v1::{
        AttachRequest, CancelStreamRequest, CancelStreamResponse, DetokenizeRequest,
        DetokenizeResponse, EmbedRequest, EmbedResponse, GenerateRequest, TokenizeRequest,
        TokenizeResponse, tokens_server::Tokens,
    },
};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::{Shared, deadline, is_remote, within};
use crate::{
    access::{Caller, Want},
    admission::{
        Permit, check_embed, check_prompt, check_request, prompt_bytes, wanted, wanted_for,
    },
    elsewhere,
    relay::{self, Call},
    stream::{EventStream, Mark},
    streams::Opened,
    text,
    traces::{self, ADMISSION, INPUT_TOKENS, NUMERICS, Span, Value},
};

/// What calls are named in their spans, besides those for tokens.
const TOKENIZE: &str = "tokenize";
const DETOKENIZE: &str = "detokenize";
const EMBEDDINGS: &str = "embeddings";

/// The service.
pub(super) struct Service(pub Shared);

impl Shared {
    /// The stream of a request: a new one, checked and with all filled in that it leaves open, or the one that its id
    /// stands for already.
    ///
    /// # Errors
    /// Why it may not come in.
    pub fn generate(
        &self,
        request: GenerateRequest,
        deadline: Option<Instant>,
        caller: &Caller,
    ) -> Result<EventStream, Error> {
        let mut trace = traces::of_generate(&caller.trace, &request);
        let begun = self.begin(request, deadline, caller, &mut trace);
        if let Err(error) = &begun {
            trace.fail(error.reason().name());
        }
        begun
    }

    /// [`generate`](Self::generate), with the request's span, which goes with a new stream.
    fn begin(
        &self,
        mut request: GenerateRequest,
        deadline: Option<Instant>,
        caller: &Caller,
        trace: &mut Span,
    ) -> Result<EventStream, Error> {
        let mut admission = trace.first_child(&ADMISSION);
        request.tenant = caller.tenant(&request.tenant).to_owned();
        check_request(&request)?;
        let (model, using) = self.fleet.engage(&request.model)?;
        // Under the name that it was asked by, which may mean another model when it is asked again.
        let (id, fingerprint) = match request.request_id.as_str() {
            "" => (RequestId::random()?, None),
            given => (RequestId::new(given)?, Some(fingerprint(&request))),
        };
        request.model = model.as_str().to_owned();
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
        traces::filled_in(trace, &request, &model);
        let streams = self.streams.clone();
        let admit = || {
            let context = self.fleet.bounds(&model).map(|b| b.context);
            // Its stream and its call both have it, until it is accepted.
            let bytes = 2 * prompt_bytes([request.prompt.as_ref()]);
            self.enter(&request.tenant, wanted(&request, context), bytes)
        };
        let opened = streams.open((&id, &request.tenant), fingerprint, begin, admit)?;
        let (stream, permit) = match opened {
            Opened::New(stream, permit) => (stream, permit),
            Opened::Known(stream) => {
                admission.forget();
                caller.trace.take_back(trace);
                return stream.attach(None, streams.reader());
            }
        };
        drop(admission);
        let reader = stream.attach(None, streams.reader());
        stream.asked(request.clone(), deadline, caller.trace.parent());
        let call = Box::new(Call {
            request,
            id,
            model,
            deadline,
            permit,
            past: None,
            using,
            trace: std::mem::take(trace),
        });
        let fleet = Arc::clone(&self.fleet);
        tokio::spawn(relay::run(fleet, call, stream, streams, self.abort.clone()));
        reader
    }

    /// Lets a request of a tenant in, with so many bytes of prompts.
    fn enter(&self, tenant: &str, want: Want, bytes: usize) -> Result<Permit, Error> {
        let permit = self.admission.admit(bytes)?;
        Ok(permit.with(self.access.take(tenant, want)?))
    }

    /// Refuses a remote caller a model that it may not name.
    ///
    /// # Errors
    /// [`Reason::PermissionDenied`], or [`Reason::ModelNotFound`].
    pub fn may_name(&self, model: &str, caller: &Caller) -> Result<(), Error> {
        match caller.remote {
            true => self.fleet.check_remote(&self.fleet.resolve(model)?),
            false => Ok(()),
        }
    }

    /// The tokens of a prompt.
    ///
    /// # Errors
    /// Why there are none.
    pub async fn tokenize(
        &self,
        request: TokenizeRequest,
        deadline: Option<Instant>,
        caller: &Caller,
    ) -> Result<TokenizeResponse, Error> {
        let mut trace = traces::of_text(&caller.trace, TOKENIZE, &request.model);
        let done = self.tokenized(request, deadline, caller, &mut trace).await;
        done.inspect_err(|error| trace.fail(error.reason().name()))
    }

    async fn tokenized(
        &self,
        request: TokenizeRequest,
        deadline: Option<Instant>,
        caller: &Caller,
        trace: &mut Span,
    ) -> Result<TokenizeResponse, Error> {
        check_prompt(request.prompt.as_ref())?;
        self.may_name(&request.model, caller)?;
        let (model, _using) = self.fleet.engage(&request.model)?;
        traces::of_model(trace, TOKENIZE, &model);
        let want = wanted_for([request.prompt.as_ref()]);
        let tenant = caller.tenant("");
        let bytes = prompt_bytes([request.prompt.as_ref()]);
        let _permit = self.enter(tenant, want, bytes)?;
        let prompt = request.prompt.and_then(|p| p.kind);
        let call = text::tokenize(
            &self.fleet,
            (&model, tenant),
            prompt,
            request.without_special,
            (deadline, trace),
        );
        Ok(within(deadline, call).await?.0)
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn detokenize(
        &self,
        request: DetokenizeRequest,
        deadline: Option<Instant>,
        caller: &Caller,
    ) -> Result<DetokenizeResponse, Error> {
        let mut trace = traces::of_text(&caller.trace, DETOKENIZE, &request.model);
        let done = self.detokenized(request, deadline, caller, &mut trace);
        let done = done.await;
        done.inspect_err(|error| trace.fail(error.reason().name()))
    }

    async fn detokenized(
        &self,
        request: DetokenizeRequest,
        deadline: Option<Instant>,
        caller: &Caller,
        trace: &mut Span,
    ) -> Result<DetokenizeResponse, Error> {
        if request.ids.len() > limits::MAX_PROMPT_TOKENS {
            let error = format!(
                "{} token ids are more than the limit of {}",
                request.ids.len(),
                limits::MAX_PROMPT_TOKENS
            );
            return Err(Error::new(Reason::LimitExceeded, error));
        }
        let (model, _using) = self.fleet.engage(&request.model)?;
        traces::of_model(trace, DETOKENIZE, &model);
        let want = Want {
            requests: 1,
            tokens: request.ids.len() as u64,
            ..Want::default()
        };
        let tenant = caller.tenant("");
        let _permit = self.enter(tenant, want, size_of_val(&request.ids[..]))?;
        let call = text::detokenize(
            &self.fleet,
            (&model, tenant),
            request.ids,
            request.with_special,
            (deadline, trace),
        );
        within(deadline, call).await
    }

    /// Vectors for prompts.
    ///
    /// # Errors
    /// Why there are none.
    pub async fn embed(
        &self,
        request: EmbedRequest,
        deadline: Option<Instant>,
        caller: &Caller,
    ) -> Result<EmbedResponse, Error> {
        let mut trace = traces::of_text(&caller.trace, EMBEDDINGS, &request.model);
        let done = self.embedded(request, deadline, caller, &mut trace).await;
        if let Ok(answer) = &done {
            let tokens = answer.embeddings.iter().map(|e| u64::from(e.prompt_tokens));
            trace.set(&INPUT_TOKENS, Value::Whole(tokens.sum()));
            let class = answer.numerics.as_ref();
            trace.set_some(&NUMERICS, class.map(|class| Value::Text(&class.id)));
        }
        done.inspect_err(|error| trace.fail(error.reason().name()))
    }

    async fn embedded(
        &self,
        mut request: EmbedRequest,
        deadline: Option<Instant>,
        caller: &Caller,
        trace: &mut Span,
    ) -> Result<EmbedResponse, Error> {
        request.tenant = caller.tenant(&request.tenant).to_owned();
        check_embed(&request)?;
        let (model, _using) = self.fleet.engage(&request.model)?;
        traces::of_model(trace, EMBEDDINGS, &model);
        let want = wanted_for(request.prompts.iter().map(Some));
        let bytes = prompt_bytes(request.prompts.iter().map(Some));
        let _permit = self.enter(&request.tenant, want, bytes)?;
        let call = text::embed(&self.fleet, &model, request, (deadline, trace));
        within(deadline, call).await
    }

    /// Goes on with a stream whose reader was lost.
    ///
    /// # Errors
    /// Why it cannot be read from there.
    pub fn attach(&self, request: AttachRequest, caller: &Caller) -> Result<EventStream, Error> {
        let id = RequestId::new(request.request_id)?;
        let stream = self.streams.find(&id, caller)?;
        let from = Some((request.next_token, request.text_bytes));
        stream.attach(from, self.streams.reader())
    }
}

impl Service {
    /// Refuses a remote client a model that it may not name.
    fn may_name<T>(&self, request: &Request<T>, model: &str) -> Result<(), Error> {
        if !is_remote(request) {
            return Ok(());
        }
        let fleet = &self.0.fleet;
        fleet.check_remote(&fleet.resolve(model)?)
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
        self.may_name(&request, &request.get_ref().model)?;
        let (metadata, extensions, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        let caller = Caller::of(&extensions);
        // Who gave an id has a way back, also while this waits; who gave none has it from the start or not at all.
        let returns = !request.request_id.is_empty();
        let offered = elsewhere::is_offer(&metadata);
        let tenant = offered.then(|| caller.tenant(&request.tenant).to_owned());
        if tenant.as_ref().is_some_and(|own| *own != request.tenant) {
            return Err(elsewhere::no_handover(&caller).into());
        }
        let stream = self.0.generate(request, deadline, &caller)?;
        let mut answer = Response::new(match returns {
            true => stream,
            false => stream.begun().await?,
        });
        if let Some(tenant) = tenant {
            elsewhere::tell_tenant(answer.metadata_mut(), &tenant);
        }
        Ok(answer)
    }

    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(request.extensions());
        Ok(Response::new(self.0.attach(request.into_inner(), &caller)?))
    }

    async fn cancel(
        &self,
        request: Request<CancelStreamRequest>,
    ) -> Result<Response<CancelStreamResponse>, Status> {
        let caller = Caller::of(request.extensions());
        let id = RequestId::new(request.into_inner().request_id)?;
        self.0.streams.find(&id, &caller)?.cancel();
        Ok(Response::new(CancelStreamResponse {}))
    }

    async fn tokenize(
        &self,
        request: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        self.may_name(&request, &request.get_ref().model)?;
        let (metadata, extensions, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        let caller = Caller::of(&extensions);
        Ok(Response::new(
            self.0.tokenize(request, deadline, &caller).await?,
        ))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        self.may_name(&request, &request.get_ref().model)?;
        let (metadata, extensions, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        let caller = Caller::of(&extensions);
        Ok(Response::new(
            self.0.detokenize(request, deadline, &caller).await?,
        ))
    }

    async fn embed(
        &self,
        request: Request<EmbedRequest>,
    ) -> Result<Response<EmbedResponse>, Status> {
        self.may_name(&request, &request.get_ref().model)?;
        let (metadata, extensions, request) = request.into_parts();
        let deadline = deadline(&metadata)?;
        let caller = Caller::of(&extensions);
        Ok(Response::new(
            self.0.embed(request, deadline, &caller).await?,
        ))
    }
}
