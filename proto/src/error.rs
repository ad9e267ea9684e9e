//! The one list of errors that cross a process boundary, and how each becomes a gRPC status.
//!
//! A status carries `google.rpc.ErrorInfo` with the reason's name, domain `hotcell` and metadata, so
//! that a client branches on the reason and never on words.

use std::{collections::HashMap, fmt};

use tonic::{
    Code, Status,
    metadata::{MetadataMap, MetadataValue},
};
use tonic_types::{ErrorDetails, StatusExt};

use crate::limits::RETRY_AFTER;

/// The `ErrorInfo` domain of every reason.
pub const DOMAIN: &str = "hotcell";

/// Metadata key of errors about a stream that goes on at another host; its value is that host's address.
pub const CONTINUES_AT: &str = "continues_at";

/// Under what a client that may come again is told when: a header over HTTP, metadata over gRPC; in seconds.
pub const RETRY_AFTER_KEY: &str = "retry-after";

macro_rules! reasons {
    ($($(#[doc = $doc:literal])* $variant:ident $name:literal $code:ident;)*) => {
        /// Why a call failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason { $($(#[doc = $doc])* $variant,)* }

        impl Reason {
            /// Every reason.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant,)*];

            /// The stable name on the wire.
            pub const fn name(self) -> &'static str { match self { $(Reason::$variant => $name,)* } }

            /// The gRPC code it travels under.
            pub const fn code(self) -> Code { match self { $(Reason::$variant => Code::$code,)* } }
        }
    };
}

reasons! {
    /// A field's value is malformed or out of range.
    InvalidArgument "INVALID_ARGUMENT" InvalidArgument;
    /// A sampling parameter is out of range.
    InvalidSampling "INVALID_SAMPLING" InvalidArgument;
    /// The grammar, schema or regular expression that the text should follow cannot be read, or is too much to follow.
    GrammarInvalid "GRAMMAR_INVALID" InvalidArgument;
    /// Something is larger or more than the limits allow.
    LimitExceeded "LIMIT_EXCEEDED" InvalidArgument;
    /// A graph, shape, dtype or attribute is not valid, or a value does not fit the plan.
    GraphInvalid "GRAPH_INVALID" InvalidArgument;
    /// An index tensor points outside of what it indexes.
    IndexOutOfRange "INDEX_OUT_OF_RANGE" InvalidArgument;
    /// Neither the device nor a decomposition can do an op for these inputs.
    OpUnsupported "OP_UNSUPPORTED" InvalidArgument;
    /// No tensor, cache or plan of this handle: freed, of another session, or never made.
    HandleNotFound "HANDLE_NOT_FOUND" NotFound;
    /// The handle belongs to an earlier process of the worker.
    HandleStale "HANDLE_STALE" FailedPrecondition;
    /// The tensor has no value: its upload is unfinished, or the work that should have written it failed.
    TensorNotReady "TENSOR_NOT_READY" FailedPrecondition;
    /// The worker that held the tensor died, and what made it cannot be done again.
    TensorLost "TENSOR_LOST" DataLoss;
    /// No session of this name: it ended, or was never opened.
    SessionNotFound "SESSION_NOT_FOUND" NotFound;
    /// No memory is registered under this name.
    RegionNotFound "REGION_NOT_FOUND" NotFound;
    /// Memory that a client shares is no longer what it registered: it was replaced, or is shorter.
    RegionChanged "REGION_CHANGED" FailedPrecondition;
    /// More bytes, tensors, plans or queued calls than the session may hold, or more at once than the tenant may have.
    QuotaExceeded "QUOTA_EXCEEDED" ResourceExhausted;
    /// The bytes that arrived are not the bytes that were promised.
    ChecksumMismatch "CHECKSUM_MISMATCH" DataLoss;
    /// The prompt leaves no room in the model's context.
    PromptTooLong "PROMPT_TOO_LONG" InvalidArgument;
    /// The chat template refused or failed.
    TemplateFailed "TEMPLATE_FAILED" InvalidArgument;
    /// No crash report of that id: it was never made, or is too old to be kept.
    CrashNotFound "CRASH_NOT_FOUND" NotFound;
    /// No model of that name is loaded or configured.
    ModelNotFound "MODEL_NOT_FOUND" NotFound;
    /// The path does not exist or cannot be read.
    FileNotFound "FILE_NOT_FOUND" NotFound;
    /// A model of that name is loaded from somewhere else.
    ModelExists "MODEL_EXISTS" AlreadyExists;
    /// The folder or file is not a model: something it needs is missing.
    NotAModel "NOT_A_MODEL" FailedPrecondition;
    /// The architecture, tensor type, tokenizer or a feature of it is not supported.
    ModelUnsupported "MODEL_UNSUPPORTED" FailedPrecondition;
    /// The model's bytes contradict themselves.
    ModelCorrupt "MODEL_CORRUPT" FailedPrecondition;
    /// The scheduler's policy for models does not allow it.
    ModelNotAllowed "MODEL_NOT_ALLOWED" PermissionDenied;
    /// The model's file changed after it was handed out.
    ModelChanged "MODEL_CHANGED" FailedPrecondition;
    /// The model does not fit into memory.
    OutOfMemory "OUT_OF_MEMORY" ResourceExhausted;
    /// The request id is that of another request.
    RequestExists "REQUEST_EXISTS" AlreadyExists;
    /// No stream of this request id: it ended too long ago, or never was.
    RequestNotFound "REQUEST_NOT_FOUND" NotFound;
    /// Another call with the same request id reads the stream now.
    TakenOver "TAKEN_OVER" Aborted;
    /// What was to be read again is held no more.
    TokensForgotten "TOKENS_FORGOTTEN" OutOfRange;
    /// Too many requests are waiting.
    Overloaded "OVERLOADED" ResourceExhausted;
    /// The worker died and the request could not be continued.
    WorkerLost "WORKER_LOST" Unavailable;
    /// The request killed every worker it ran on, the last one with nobody else there; sent again it would do so again.
    // Not UNAVAILABLE or ABORTED, which clients' retry policies take for an invitation.
    RequestPoisoned "REQUEST_POISONED" Internal;
    /// Workers died of this saved graph while nothing else ran there; it is refused until it is saved anew or cleared.
    GraphPoisoned "GRAPH_POISONED" FailedPrecondition;
    /// No worker can serve this now.
    NoWorker "NO_WORKER" Unavailable;
    /// The process is shutting down.
    Draining "DRAINING" Unavailable;
    /// Scheduler and worker speak different protocol versions.
    ProtocolMismatch "PROTOCOL_MISMATCH" FailedPrecondition;
    /// The worker said something that breaks the protocol.
    ProtocolViolation "PROTOCOL_VIOLATION" Internal;
    /// The caller's deadline passed.
    DeadlineExceeded "DEADLINE_EXCEEDED" DeadlineExceeded;
    /// The caller went away.
    Cancelled "CANCELLED" Cancelled;
    /// The caller did not show who it is: no token, or one that is wrong, has expired or was taken back.
    Unauthenticated "UNAUTHENTICATED" Unauthenticated;
    /// The caller is known and may not do this.
    PermissionDenied "PERMISSION_DENIED" PermissionDenied;
    /// The model computed no finite probability: its weights or the device are broken.
    NumericsFailed "NUMERICS_FAILED" DataLoss;
    /// Part of a protocol of others that is not served here.
    Unimplemented "UNIMPLEMENTED" Unimplemented;
    /// A fault of Hotcell itself.
    Internal "INTERNAL" Internal;
}

impl Reason {
    /// Seconds after which the same call may go through, where it may: what is full now, or served by nobody now.
    pub const fn retry_after(self) -> Option<u32> {
        match self.code() {
            Code::ResourceExhausted | Code::Unavailable => Some(RETRY_AFTER.as_secs() as u32),
            _ => None,
        }
    }

    /// The reason of this wire name.
    pub fn from_name(name: &str) -> Option<Reason> {
        Reason::ALL.iter().copied().find(|r| r.name() == name)
    }
}

/// A typed failure: a reason, one sentence that names the thing and the way out, and metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    reason: Reason,
    message: String,
    metadata: Vec<(String, String)>,
}

impl Error {
    /// A failure for `reason`.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            metadata: Vec::new(),
        }
    }

    /// Adds a metadata entry.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: impl fmt::Display) -> Self {
        self.metadata.push((key.into(), value.to_string()));
        self
    }

    /// Why.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// One sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The value of a metadata entry.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.metadata
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
    }

    /// The metadata's entries.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &str)> {
        self.metadata.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// Reads a status that carries a reason of ours: somebody's words, where a broken connection has none.
    pub fn typed(status: &Status) -> Option<Self> {
        let info = status.get_details_error_info()?;
        let known = info.domain == DOMAIN && Reason::from_name(&info.reason).is_some();
        known.then(|| Self::from_status(status))
    }

    /// Reads a status. One that carries no reason of ours keeps its message and gets the reason that
    /// fits its code best.
    pub fn from_status(status: &Status) -> Self {
        let info = status
            .get_details_error_info()
            .filter(|i| i.domain == DOMAIN);
        let typed = info.as_ref().and_then(|i| Reason::from_name(&i.reason));
        let reason = typed.unwrap_or(match status.code() {
            Code::InvalidArgument | Code::OutOfRange => Reason::InvalidArgument,
            Code::NotFound => Reason::ModelNotFound,
            Code::Unavailable => Reason::NoWorker,
            Code::DeadlineExceeded => Reason::DeadlineExceeded,
            Code::Cancelled => Reason::Cancelled,
            Code::ResourceExhausted => Reason::Overloaded,
            Code::Unauthenticated => Reason::Unauthenticated,
            Code::PermissionDenied => Reason::PermissionDenied,
            _ => Reason::Internal,
        });
        let mut metadata: Vec<_> = info
            .map(|i| i.metadata.into_iter().collect())
            .unwrap_or_default();
        metadata.sort();
        Self {
            reason,
            message: status.message().to_owned(),
            metadata,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<Error> for Status {
    fn from(error: Error) -> Status {
        let metadata: HashMap<String, String> = error.metadata.into_iter().collect();
        let mut details = ErrorDetails::with_error_info(error.reason.name(), DOMAIN, metadata);
        let mut beside = MetadataMap::new();
        if let Some(seconds) = error.reason.retry_after() {
            details.set_retry_info(Some(RETRY_AFTER));
            beside.insert(RETRY_AFTER_KEY, MetadataValue::from(seconds));
        }
        let code = error.reason.code();
        Status::with_error_details_and_metadata(code, error.message, details, beside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_the_wire() {
        for &reason in Reason::ALL {
            let error = Error::new(reason, "what and the way out").with("model", "kjv");
            let status = Status::from(error.clone());
            assert_eq!(status.code(), reason.code());
            assert_eq!(Error::from_status(&status), error);
        }
    }

    #[test]
    fn who_may_come_again_is_told_when() {
        for &reason in Reason::ALL {
            let status = Status::from(Error::new(reason, "what and the way out"));
            let told = status.metadata().get(RETRY_AFTER_KEY);
            let told = told.map(|value| value.to_str().unwrap().parse().unwrap());
            assert_eq!(told, reason.retry_after(), "{reason:?}");
            let delay = status.get_details_retry_info().and_then(|r| r.retry_delay);
            assert_eq!(delay, told.map(|_| RETRY_AFTER), "{reason:?}");
            assert!(told.is_none_or(|seconds| seconds > 0));
        }
        assert!(Reason::Overloaded.retry_after().is_some());
        assert_eq!(Reason::InvalidArgument.retry_after(), None);
    }

    #[test]
    fn a_strange_status_gets_the_nearest_reason() {
        let status = Status::unavailable("connection refused");
        assert_eq!(Error::typed(&status), None);
        assert_eq!(Error::from_status(&status).reason(), Reason::NoWorker);
    }
}
