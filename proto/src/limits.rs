//! Every limit on what crosses a process boundary, in one place.
//!
//! Going past one is a typed error ([`crate::error::Reason::LimitExceeded`] or the reason named
//! beside it), never an allocation that depends on what a stranger sent.

use std::time::Duration;

/// One gRPC message, bytes. Bulk data goes in chunks below this.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Body of one HTTP request, bytes.
pub const MAX_HTTP_BODY_BYTES: usize = 16 << 20;
/// Line and headers of one HTTP request, bytes.
pub const MAX_HTTP_HEAD_BYTES: usize = 64 << 10;
/// Header lines of one HTTP request.
pub const MAX_HTTP_HEADERS: usize = 100;
/// Seconds that a client may take to send the head of an HTTP request.
pub const MAX_HTTP_HEAD_SECONDS: u64 = 10;
/// Seconds that a connection of HTTP may wait for its client's next request: more than proxies keep theirs by default.
pub const MAX_HTTP_IDLE_SECONDS: u64 = 75;
const _: () = assert!(MAX_HTTP_IDLE_SECONDS > MAX_HTTP_HEAD_SECONDS);
/// Seconds that a client may take to send the next piece of an HTTP request's body.
pub const MAX_HTTP_BODY_SECONDS: u64 = 30;
/// Connections of one door at once.
pub const MAX_CONNECTIONS: usize = 1024;
/// Calls of one connection of gRPC at once.
pub const MAX_CALLS: u32 = 1024;
/// The same of a remote one: whoever it is may have all connections, and each call that begins takes memory.
pub const MAX_REMOTE_CALLS: u32 = 256;
/// Calls of one connection of HTTP/2 at the doors of HTTP.
pub const MAX_HTTP_CALLS: u32 = 256;
/// Calls of one remote address that are not answered yet.
pub const MAX_CALLS_FROM_ADDRESS: usize = 1024;
/// Calls of one remote connection that were cancelled before they were looked at: as many as it may have at once.
pub const MAX_REMOTE_RESETS: usize = MAX_REMOTE_CALLS as usize;
/// Mistakes of one remote connection in its streams, each answered with a reset, before it has to leave.
pub const MAX_REMOTE_MISTAKES: usize = 64;
/// When a client that was turned away for now may come again.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Elements of a tensor that may be written as JSON; more come as bytes.
pub const MAX_JSON_ELEMENTS: usize = 1 << 16;
/// Tokenizers that a scheduler sends at once; others wait.
pub const MAX_TOKENIZERS_SENT: usize = 4;
/// Who may hear of the caches of a scheduler's workers at once: each is told all that there is at first.
pub const MAX_CACHE_READERS: usize = 16;
/// Those of one tenant.
pub const MAX_CACHE_READERS_OF_TENANT: usize = 4;
/// Tenants whose changes of caches are kept; of more, those that nobody reads are forgotten.
pub const MAX_CACHE_LOGS: usize = 64;
/// Continuations of one prompt that one HTTP request may ask for.
pub const MAX_CHOICES: u32 = 64;
/// Tensors that go into one inference, and that are asked for.
pub const MAX_INFER_TENSORS: usize = 64;
/// Parameters of one inference or one of its tensors.
pub const MAX_INFER_PARAMETERS: usize = 64;
/// Inferences of one stream of them that are not answered to their end.
pub const MAX_INFERS_IN_FLIGHT: usize = 64;
/// Pieces of shared memory that clients of a scheduler have registered.
pub const MAX_REGIONS: usize = 256;
/// Bytes of one tensor that a worker computes in a client's memory in place: smaller ones are copied, which takes less than
/// what a mapping costs others.
pub const IN_PLACE_BYTES: std::ops::RangeInclusive<u64> = (256 << 10)..=(256 << 20);
/// What the first byte of such a tensor lies at a multiple of.
pub const IN_PLACE_ALIGNMENT: u64 = 64;
/// Places in clients' memory that one plan has its worker keep mapped.
pub const MAX_IN_PLACE_MAPPINGS: usize = 16;
/// Their bytes.
pub const MAX_IN_PLACE_BYTES: u64 = 1 << 30;
const _: () = assert!(*IN_PLACE_BYTES.end() <= MAX_IN_PLACE_BYTES);
/// Places in clients' memory that one worker has mapped.
pub const MAX_CLIENT_MAPPINGS: usize = 512;
/// Those that one session has.
pub const MAX_SESSION_CLIENT_MAPPINGS: usize = 32;
const _: () = assert!(MAX_IN_PLACE_MAPPINGS <= MAX_SESSION_CLIENT_MAPPINGS);
/// Mappings of shared memory that one session has beside those.
pub const MAX_SESSION_MAPPINGS: usize = 64;
/// Bytes of such a piece's name, and of the key under which the host knows it.
pub const MAX_REGION_NAME: usize = 128;
/// One prompt: text, or a rendered chat, bytes.
pub const MAX_PROMPT_BYTES: usize = 4 << 20;
/// Token ids in one prompt or one detokenise call.
pub const MAX_PROMPT_TOKENS: usize = 1 << 20;
/// Messages of one chat.
pub const MAX_CHAT_MESSAGES: usize = 4096;
/// Tools of one chat or grammar.
pub const MAX_TOOLS: usize = 128;
/// Characters of a tool's name.
pub const MAX_TOOL_NAME: usize = 64;
/// Calls of tools in one message of a chat.
pub const MAX_TOOL_CALLS: usize = 128;
/// Stop strings of one request.
pub const MAX_STOP_STRINGS: usize = 16;
/// Bytes of one stop string.
pub const MAX_STOP_BYTES: usize = 256;
/// Stop tokens of one request.
pub const MAX_STOP_TOKENS: usize = 256;
/// Logit biases of one request.
pub const MAX_LOGIT_BIASES: usize = 1024;
/// Bytes of text that one token can stand for.
pub const MAX_TOKEN_TEXT: usize = 1024;
/// Alternatives reported for one token.
pub const MAX_TOP_LOGPROBS: u32 = 20;
/// Characters of a model's name.
pub const MAX_MODEL_NAME: usize = 128;
/// Characters of a request id.
pub const MAX_REQUEST_ID: usize = 64;
/// Characters of a tenant's name.
pub const MAX_TENANT: usize = 64;
/// Bytes of a bearer token.
pub const MAX_BEARER: usize = 192;
/// Characters of a bearer token's name.
pub const MAX_TOKEN_NAME: usize = 64;
/// Bytes of a file of tokens, certificates or a key.
pub const MAX_ACCESS_FILE: u64 = 4 << 20;
/// Tokens, and tenants with limits of their own, of one scheduler.
pub const MAX_TOKENS: usize = 4096;
/// Priorities of requests are 0 to this.
pub const MAX_PRIORITY: u32 = 7;
/// Prompts of one call for embeddings.
pub const MAX_EMBED_PROMPTS: usize = 64;
/// Prompts of one HTTP request for embeddings, of which several calls are made: OpenAI's.
pub const MAX_EMBED_INPUTS: usize = 2048;
/// Files of one model.
pub const MAX_MODEL_FILES: usize = 1024;
/// Descriptors of one model's weights in the memory of a device.
pub const MAX_KEPT_PIECES: usize = 1024;
/// Extensions of the files that make a model's folder; no other file of it is opened.
pub const MODEL_EXTENSIONS: &[&str] = &["json", "safetensors", "gguf", "model", "jinja", "txt"];
/// Models a scheduler knows.
pub const MAX_MODELS: usize = 256;
/// Further names of one model.
pub const MAX_ALIASES: usize = 16;
/// Devices, hence trusted workers, of one scheduler.
pub const MAX_DEVICES: usize = 64;
/// Bytes a probe may print.
pub const MAX_PROBE_BYTES: usize = 1 << 20;
/// Requests a worker holds, running and waiting together.
pub const MAX_WORKER_REQUESTS: usize = 256;
/// Requests a scheduler relays at once.
pub const MAX_SCHEDULER_REQUESTS: usize = 4096;
/// Bytes of prompts that a scheduler holds of the requests that it relays, of those with more than [`SMALL_PROMPT_BYTES`].
pub const MAX_PROMPTS_BYTES: usize = 256 << 20;
/// Bytes of a prompt up to which it is not counted.
pub const SMALL_PROMPT_BYTES: usize = 64 << 10;
/// Events of one stream that wait in a worker for a slow reader before its sequence pauses.
pub const STREAM_BUFFER: usize = 64;
/// Bytes that a scheduler holds of one stream until its client reads them; past that they wait in the worker.
pub const MAX_JOURNAL_BYTES: usize = 4 << 20;
/// Bytes that a scheduler holds of all streams; past that each one may hold [`JOURNAL_SHARE`] only.
pub const MAX_JOURNALS_BYTES: usize = 256 << 20;
/// Bytes that each stream may hold in a scheduler, however much the others do.
pub const JOURNAL_SHARE: usize = 64 << 10;
/// Finished streams that a scheduler keeps for clients that come back.
pub const MAX_KEPT_STREAMS: usize = 4096;
/// Streams that a scheduler knows: running ones, kept ones, and finished ones that nobody has read to their end.
pub const MAX_STREAMS: usize = MAX_SCHEDULER_REQUESTS + MAX_KEPT_STREAMS;
/// Bytes of text in one event of a stream.
pub const MAX_DELTA_BYTES: usize = 64 << 10;
/// Token ids in one event of a stream.
pub const MAX_DELTA_TOKENS: usize = 1024;
/// Characters of one string in a worker's words about itself, a device or a model.
pub const MAX_WORD: usize = 512;
/// Layers that a worker tells of its confinement.
pub const MAX_LAYERS: usize = 32;
/// Threads of one worker, besides as many as it has cores, where its user's threads can be counted apart.
pub const MAX_WORKER_THREADS: u64 = 1024;
/// Vocabulary of one model.
pub const MAX_VOCABULARY: u32 = 1 << 24;
/// Events that wait for one watcher before it is told that it missed some.
pub const WATCH_BUFFER: usize = 256;
/// Steps of a recorded plan from one at which its device notes where it is to the next: some for each layer of a model, and a
/// sixteenth of the launches.
pub const STEPS_PER_CRUMB: u32 = 16;
/// Bytes of one grammar, schema or regular expression that a request's text has to follow.
pub const MAX_GRAMMAR_BYTES: usize = 64 << 10;
/// Milliseconds that a worker spends on reading one grammar.
pub const MAX_GRAMMAR_MILLIS: u64 = 2000;
/// Steps of the lexer that a worker spends on what may come next in a text that follows a grammar; some 15 ms.
pub const MAX_MASK_STEPS: u64 = 200_000;
/// Items of the parser that it spends on the same; some 3 ms.
pub const MAX_MASK_ITEMS: usize = 50_000;
/// Ways to go on at one place of such a text, as items of the parser.
pub const MAX_GRAMMAR_WAYS: usize = 2_000;
/// Symbols of one grammar once it is read; what its bytes can say may be many times as long.
pub const MAX_GRAMMAR_SYMBOLS: usize = 200_000;
/// Nodes of one graph.
pub const MAX_GRAPH_NODES: usize = 1 << 16;
/// Devices that one graph is split over.
pub const MAX_SPLIT_DEVICES: usize = 16;
/// Inputs of one graph.
pub const MAX_GRAPH_INPUTS: usize = 1 << 16;
/// One graph on the wire, bytes. Decoding may take a hundred times as much.
pub const MAX_GRAPH_BYTES: usize = 2 << 20;
/// Bytes of one chunk of a tensor on its way.
pub const TENSOR_CHUNK: usize = 1 << 20;
/// Bytes of inputs or results inside one execute call; larger tensors are uploaded and downloaded.
pub const MAX_INLINE_BYTES: usize = 8 << 20;
/// Graphs that a scheduler keeps.
pub const MAX_SAVED_GRAPHS: usize = 64;
/// Bytes of one saved graph with its constants.
pub const MAX_SAVED_GRAPH_BYTES: usize = 256 << 20;
/// Bytes of all saved graphs.
pub const MAX_SAVED_GRAPHS_BYTES: usize = 1 << 30;
/// Changes of a cache's blocks that wait for who watches them; of more, it is told to begin anew.
pub const MAX_BLOCK_CHANGES: usize = 1 << 14;
/// Blocks in one message about them.
pub const MAX_BLOCKS_TOLD: usize = 256;
/// Bytes of all files of one tokenizer.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Spans of traces that wait to be sent; more are dropped and counted.
pub const MAX_SPANS: usize = 8192;
/// Sessions of one worker.
pub const MAX_SESSIONS: usize = 64;
/// Tensors and caches of one session.
pub const MAX_SESSION_TENSORS: usize = 1 << 16;
/// Plans of one session.
pub const MAX_SESSION_PLANS: usize = 1024;
/// Streams of one session.
pub const MAX_SESSION_STREAMS: usize = 64;
/// Calls of one session that wait or run.
pub const MAX_SESSION_CALLS: usize = 1024;
/// Handles in one call.
pub const MAX_CALL_HANDLES: usize = 1 << 16;
/// Fences one call waits for.
pub const MAX_CALL_FENCES: usize = 64;
/// Characters of a session's name.
pub const MAX_SESSION_NAME: usize = 64;
/// Tags of descriptors from here on are random and name memory that a client shares; those below are the scheduler's own.
pub const FIRST_SHARED_TAG: u64 = 1 << 63;
/// Bytes of one piece of memory that a client shares with a worker.
pub const MAX_SHARED_BYTES: u64 = 64 << 30;
/// Times one call of a tensor session is done again because its worker died, unless its client says otherwise.
pub const TENSOR_RECOVERIES: u32 = 3;
/// Bytes that a client holds so that a session's tensors can be made again, unless it says otherwise.
pub const RECIPE_BYTES: usize = 1 << 30;
/// Calls of which each needs the result of the one before, in what a client does to make one tensor again.
pub const MAX_RECIPE_DEPTH: u32 = 1 << 14;
/// Calls that a client remembers so that a session's tensors can be made again.
pub const MAX_RECIPE_CALLS: usize = 1 << 16;
/// Members of one communicator: processes that compute one model together.
pub const MAX_MEMBERS: usize = 16;
/// Inputs of one op.
pub const MAX_OP_INPUTS: usize = 256;
/// Integers of one attribute.
pub const MAX_ATTRIBUTE_INTS: usize = 256;
/// Bytes of one literal tensor inside a graph; larger ones are uploaded.
pub const MAX_LITERAL_BYTES: usize = 4096;
/// Axes of one tensor.
pub const MAX_RANK: usize = 8;
/// Elements of one tensor.
pub const MAX_ELEMENTS: u64 = 1 << 40;
/// Times one stream may be continued on another worker.
pub const MAX_CONTINUATIONS: u32 = 8;
/// Throw-away workers at once, each of which runs one suspected request alone.
pub const MAX_SOLO_WORKERS: usize = 4;
/// Workers at once that look into models.
pub const MAX_INSPECTIONS: usize = 2;
/// Metadata entries of a model that an inspection tells.
pub const MAX_INSPECTED_ENTRIES: usize = 256;
/// Bytes of the beginning of each one's value.
pub const MAX_INSPECTED_VALUE: usize = 200;
/// Odd things that an inspection tells.
pub const MAX_FINDINGS: usize = 64;
/// Untrusted models that are loaded at once, each on a worker of its own.
pub const MAX_GUESTS: usize = 8;
/// Bytes of the file that says which models may be loaded.
pub const MAX_POLICY_BYTES: usize = 16 << 20;
/// Verdicts on models that a scheduler remembers.
pub const KEPT_VERDICTS: usize = 1024;
/// Bytes of one line of the audit log.
pub const MAX_AUDIT_LINE: usize = 4096;
/// Bytes of the audit log after which another file is begun.
pub const MAX_AUDIT_BYTES: u64 = 16 << 20;
/// Earlier files of the audit log that are kept.
pub const KEPT_AUDIT_FILES: u32 = 4;
/// Lines that wait to be written into the audit log; what comes meanwhile is counted instead.
pub const AUDIT_BUFFER: usize = 1024;
/// Characters of the name of a layout in which weights are packed.
pub const MAX_LAYOUT: usize = 32;
/// Bytes of one piece of packed weights, on its way from the worker that packs to the scheduler.
pub const PACK_PIECE: usize = 8 << 20;
/// Times that packing a model may fail before it is left as it is.
pub const PACK_ATTEMPTS: u32 = 3;
/// Steps of the fixed computation whose result a worker is held to.
pub const MAX_CHECK_STEPS: u32 = 5;
/// Bytes of one part of a model's weights as they are hashed, one part at a time.
pub const WEIGHTS_PART: usize = 4 << 20;
/// Parts of a model's weights: 4 TiB.
pub const MAX_WEIGHTS_PARTS: u32 = 1 << 20;
/// Bytes of one line of a worker's log; longer ones are cut.
pub const MAX_LOG_LINE: usize = 4096;
/// Lines of a worker's log that are kept for its obituary.
pub const KEPT_LOG_LINES: usize = 64;
/// Crash reports that a scheduler keeps in memory.
pub const KEPT_CRASHES: usize = 64;
/// Crash reports that it keeps as files.
pub const KEPT_CRASH_FILES: usize = 256;
/// Bytes of the arguments and the environment of a program that takes a scheduler's place.
pub const MAX_TAKEOVER_REQUEST: usize = 4 << 20;
/// Bytes of the state that a scheduler leaves to the program that takes its place.
pub const MAX_TAKEOVER_STATE: usize = 1 << 30;
/// Milliseconds that a sample of what a worker does covers.
pub const WATCH_INTERVALS: std::ops::RangeInclusive<u32> = 50..=60_000;
/// Those that it covers unless its watcher says otherwise.
pub const WATCH_INTERVAL: u32 = 1000;
/// Steps of a worker that are noted while somebody watches it, until they are told.
pub const MAX_WATCHED_STEPS: usize = 1 << 14;
/// Milliseconds of one trace.
pub const MAX_TRACE_MILLIS: u32 = 60_000;
/// Milliseconds that a trace takes of which neither that was said nor after how many steps it ends.
pub const TRACE_MILLIS: u32 = 1000;
/// Deaths, starts and continuations that one trace tells.
pub const MAX_TRACED_EVENTS: usize = 4096;
/// Nodes that a worker notes while it is traced, until they are told.
pub const MAX_TRACED_NODES: usize = 1 << 17;
/// Nodes and copies that are told in a second's trace, about: those of whole steps, and of others none.
pub const TRACED_NODES_PER_SECOND: u64 = 10_000;
/// Places in plans that one sample tells of.
pub const MAX_WATCHED_NODES: usize = 32;
/// Tensor sessions that one sample tells of.
pub const MAX_TOLD_SESSIONS: usize = 32;
/// Handles that are told of one of them.
pub const MAX_TOLD_HANDLES: usize = 256;
/// Milliseconds that a throw-away worker waits for a debugger.
pub const MAX_HOLD_MILLIS: u32 = 3_600_000;
/// Bytes of nodes' values that a worker keeps of a step while somebody looks at them.
pub const MAX_TAP_BYTES: usize = 256 << 20;
/// Patterns of nodes' names in one call, and bytes of each.
pub const MAX_NODE_PATTERNS: usize = 64;
/// See [`MAX_NODE_PATTERNS`].
pub const MAX_NODE_PATTERN: usize = 256;
/// Layers named in one call.
pub const MAX_NAMED_LAYERS: usize = 1024;
/// Conditions of one watchpoint.
pub const MAX_CONDITIONS: usize = 8;
/// Bytes of nodes' values in one capture, unless its caller says otherwise, and at most.
pub const CAPTURE_BYTES: u64 = 256 << 20;
/// See [`CAPTURE_BYTES`].
pub const MAX_CAPTURE_BYTES: u64 = 4 << 30;
/// Tokens of one capture at most.
pub const MAX_CAPTURED_TOKENS: u64 = 1 << 20;
/// Rows of nodes in one capture at most, each of which is told in its file's header.
pub const MAX_CAPTURED_ROWS: u64 = 1 << 18;
/// Bytes that a row takes there at most.
pub const CAPTURED_ROW_BYTES: u64 = 512;
/// Bytes of tokens that were looked at and wait to be told, while a worker serves others.
pub const CAPTURE_WAITING: usize = 64 << 20;
/// How many these are, however small or large they are.
pub const CAPTURE_BUFFERS: std::ops::RangeInclusive<usize> = 4..=1024;
/// Hits of a watchpoint that wait to be told.
pub const HIT_BUFFER: usize = 64;
/// Bytes of the header of a capture's file.
pub const MAX_CAPTURE_HEADER: u64 = 256 << 20;
/// Throw-away workers at once that run requests again.
pub const MAX_REPLAYS: usize = 2;
/// Calls that look into one worker at once.
pub const MAX_DEBUGGERS: usize = 16;
/// Connections of one worker for its control at once: the scheduler's, and those of who takes its place.
pub const MAX_CONTROLS: usize = 4;

// The calls of one connection alone fill no scheduler, and those from far have no more than those from here.
const _: () = assert!(MAX_CALLS as usize <= MAX_SCHEDULER_REQUESTS);
// What is not counted is no more than what is, and one prompt of the greatest size, as ids of four bytes too, is let in.
const _: () = assert!(MAX_SCHEDULER_REQUESTS * SMALL_PROMPT_BYTES <= MAX_PROMPTS_BYTES);
const _: () = assert!(2 * MAX_PROMPT_BYTES <= MAX_PROMPTS_BYTES);
const _: () = assert!(2 * MAX_PROMPT_TOKENS * 4 <= MAX_PROMPTS_BYTES);
const _: () = assert!(MAX_REMOTE_CALLS <= MAX_CALLS && MAX_HTTP_CALLS <= MAX_CALLS);
const _: () = assert!(MAX_REMOTE_CALLS as usize <= MAX_CALLS_FROM_ADDRESS);
// Less than a second would be told as none.
const _: () = assert!(RETRY_AFTER.as_secs() > 0 && RETRY_AFTER.subsec_nanos() == 0);
// At some 20 characters each they must fit into one body.
const _: () = assert!(MAX_JSON_ELEMENTS * 20 <= MAX_HTTP_BODY_BYTES);
// Who hears of them has a log that is kept.
const _: () = assert!(MAX_CACHE_READERS <= MAX_CACHE_LOGS);
const _: () = assert!(MAX_CACHE_READERS_OF_TENANT < MAX_CACHE_READERS);
// The other half is for the nodes, their graph and the tokens.
const _: () = assert!(MAX_CAPTURED_ROWS * CAPTURED_ROW_BYTES <= MAX_CAPTURE_HEADER / 2);
// A name, a point, and 64 digits.
const _: () = assert!(MAX_TOKEN_NAME + 65 <= MAX_BEARER);
// What all streams may hold together, running and finished ones.
const _: () = assert!(MAX_JOURNALS_BYTES + MAX_STREAMS * JOURNAL_SHARE <= 1 << 30);
// What is held takes less on its way than in memory.
const _: () = assert!(MAX_JOURNALS_BYTES + MAX_STREAMS * JOURNAL_SHARE <= MAX_TAKEOVER_STATE);
const _: () =
    assert!(JOURNAL_SHARE <= MAX_JOURNAL_BYTES && MAX_JOURNAL_BYTES <= MAX_JOURNALS_BYTES);
// A prompt of the greatest size must fit into one message, as text and as ids (≤ 5 bytes each).
const _: () = assert!(MAX_PROMPT_BYTES * 2 < MAX_MESSAGE_BYTES);
const _: () = assert!(MAX_PROMPT_TOKENS * 5 < MAX_MESSAGE_BYTES);
// A chunk, and the results of one call, must fit into one message with room for what is around them.
const _: () = assert!(TENSOR_CHUNK * 2 <= MAX_MESSAGE_BYTES);
const _: () = assert!(MAX_INLINE_BYTES * 2 <= MAX_MESSAGE_BYTES);
const _: () = assert!(MAX_GRAPH_BYTES <= MAX_MESSAGE_BYTES);
