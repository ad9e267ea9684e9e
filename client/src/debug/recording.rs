//! A capture put together, and its file: a JSON header with the request and what every row is like, and a safetensors
//! file with the values.
//!
//! `.hotcell`: [`MAGIC`], the header's length (u64, little endian), the header, the safetensors file. Tensors are named
//! `TOKEN/NODE`. A file from elsewhere is a stranger's: lengths are checked before anything is read by them.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    io::{self, BufWriter, Read, Seek, Write},
    path::Path,
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    plan_part::PlanPart,
    v1::{self, captured::Kind},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorInfo};
use serde::{Deserialize, Serialize};

use crate::whole::{self, Readers};

/// How a capture's file begins.
pub const MAGIC: &[u8; 8] = b"HOTCELL\x01";

/// Of the header's layout.
const LAYOUT: u32 = 1;

fn odd(what: impl Into<String>) -> Error {
    Error::new(Reason::ProtocolViolation, what)
}

/// What was computed for one token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recorded {
    /// Which token of the answer.
    pub index: u64,
    /// The position of the row that it was drawn from.
    pub position: u64,
    /// The token, if it was told.
    pub token: Option<u32>,
    /// Whether it is the one that was expected, if one was.
    pub as_expected: Option<bool>,
    /// Tokens left out before it.
    pub missed: u64,
    /// It is a row before the one that the token was drawn from.
    pub of_prefix: bool,
    /// The nodes' rows, in the order of the head's nodes.
    pub nodes: Vec<v1::NodeValues>,
}

/// A whole capture.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// The request and the nodes.
    pub head: v1::CaptureHead,
    /// Token by token.
    pub tokens: Vec<Recorded>,
    /// The rows before those, if they were asked for; no file has them.
    pub prefix: Vec<Recorded>,
    /// How it ended; none if it broke off.
    pub end: Option<v1::CaptureEnd>,
}

/// Puts messages together, and checks them.
#[derive(Debug, Default)]
pub struct Recorder {
    held: Option<v1::CaptureHeld>,
    head: Option<v1::CaptureHead>,
    open: Option<Recorded>,
    end: Option<v1::CaptureEnd>,
    plan: v1::CapturedPlan,
    hits: Vec<v1::GuardHit>,
    seen: Option<v1::BlackBox>,
}

/// Hits that are kept of one capture.
const HITS: usize = 1024;

impl Recorder {
    /// The process that waits for a debugger, or waited, if one was to.
    pub fn held(&self) -> Option<&v1::CaptureHeld> {
        self.held.as_ref()
    }

    /// Where a condition held, if the request was run under watchpoints.
    pub fn hits(&self) -> &[v1::GuardHit] {
        &self.hits
    }

    /// Where the process was at last, if that was asked for.
    pub fn seen(&self) -> Option<&v1::BlackBox> {
        self.seen.as_ref()
    }

    /// The model's node at which a black box says that its process was: known once the plans were told, if the device tells
    /// their steps, and the process executed one of them.
    pub fn node_of(&self, seen: &v1::BlackBox) -> Option<&v1::CapturedNode> {
        let at = usize::try_from(seen.node).ok()?;
        let steps = match PlanPart::from_name(&seen.part)? {
            PlanPart::Body => &self.plan.steps,
            PlanPart::Looked => &self.plan.looked_steps,
            PlanPart::Logits => &self.plan.logits_steps,
            PlanPart::LookedLogits => &self.plan.looked_logits_steps,
            // Those are told to nobody.
            PlanPart::States | PlanPart::Draws => return None,
        };
        let node = steps.get(at)?;
        // A part that was said just before its first step, or by a device that is behind, is another plan's.
        (!node.name.is_empty() && node.op == seen.op).then_some(node)
    }

    /// The head, once it came.
    pub fn head(&self) -> Option<&v1::CaptureHead> {
        self.head.as_ref()
    }

    /// The end, once it came.
    pub fn end(&self) -> Option<&v1::CaptureEnd> {
        self.end.as_ref()
    }

    /// Takes the next message; a token once all of it is there.
    ///
    /// # Errors
    /// [`Reason::ProtocolViolation`] for one that cannot come now, or rows that are none of the nodes'.
    pub fn push(&mut self, told: v1::Captured) -> Result<Option<Recorded>, Error> {
        match (told.kind, &self.head, &self.end) {
            // Told to who asked for it, who heard it from this.
            (Some(Kind::Held(held)), None, None) if self.held.is_none() => {
                self.held = Some(held);
                Ok(None)
            }
            (Some(Kind::Plan(plan)), None, None) => {
                self.plan = plan;
                Ok(None)
            }
            (Some(Kind::Hit(hit)), _, None) => {
                if self.hits.len() < HITS {
                    self.hits.push(hit);
                }
                Ok(None)
            }
            (Some(Kind::Seen(seen)), _, _) => {
                self.seen = Some(seen);
                Ok(None)
            }
            (Some(Kind::Head(head)), None, None) => {
                self.head = Some(head);
                Ok(None)
            }
            (Some(Kind::Token(token)), Some(head), None) => {
                let open = self.open.get_or_insert_with(|| Recorded {
                    index: token.index,
                    position: token.position,
                    token: token.token,
                    as_expected: token.as_expected,
                    missed: token.missed,
                    of_prefix: token.of_prefix,
                    nodes: Vec::new(),
                });
                if (open.index, open.position) != (token.index, token.position) {
                    return Err(odd("a token began before the one before it was told"));
                }
                for row in token.nodes {
                    let due = open.nodes.len();
                    let node = head.nodes.get(due);
                    let node = node.ok_or_else(|| odd("more rows than nodes"))?;
                    check_row(node, due, &row)?;
                    open.nodes.push(row);
                }
                if token.more {
                    return Ok(None);
                }
                if open.nodes.len() != head.nodes.len() {
                    return Err(odd("a token lacks rows"));
                }
                Ok(self.open.take())
            }
            // Without a token there is no head.
            (Some(Kind::End(end)), _, None) if self.open.is_none() => {
                self.end = Some(end);
                Ok(None)
            }
            _ => Err(odd("a message that cannot come now")),
        }
    }
}

/// How safetensors calls a node's dtype, and the bytes of a value.
fn dtype(node: &v1::CapturedNode) -> Result<(Dtype, usize), Error> {
    match node.dtype.as_str() {
        "f32" => Ok((Dtype::F32, 4)),
        "f16" => Ok((Dtype::F16, 2)),
        "bf16" => Ok((Dtype::BF16, 2)),
        other => Err(odd(format!("node {} has the dtype {other:?}", node.name))),
    }
}

/// Values of a node's row.
fn elements(node: &v1::CapturedNode) -> Option<u64> {
    let mut dims = node.dims.iter();
    dims.try_fold(1u64, |product, dim| product.checked_mul(*dim))
}

fn check_row(node: &v1::CapturedNode, due: usize, row: &v1::NodeValues) -> Result<(), Error> {
    let (_, size) = dtype(node)?;
    let most = elements(node).and_then(|n| n.checked_mul(size as u64));
    let fits = most.is_some_and(|most| row.data.len() as u64 <= most);
    // What is withheld has none.
    if row.node as usize != due || ![0, 32].contains(&row.hash.len()) {
        return Err(odd(format!("a row of node {} is out of order", node.name)));
    }
    if !fits || !row.data.len().is_multiple_of(size) {
        return Err(odd(format!("a row of node {} is no row of it", node.name)));
    }
    Ok(())
}

/// Whether two rows can be compared: neither is withheld.
pub(super) fn are_told(one: &v1::NodeValues, other: &v1::NodeValues) -> bool {
    !one.hash.is_empty() && !other.hash.is_empty()
}

impl Recording {
    /// Whether a row's values are all there.
    pub fn is_whole(&self, node: usize, row: &v1::NodeValues) -> bool {
        let node = self.head.nodes.get(node);
        let bytes = node.and_then(|n| elements(n)?.checked_mul(dtype(n).ok()?.1 as u64));
        bytes == Some(row.data.len() as u64)
    }

    /// Writes it into a file that is there once it is whole; returns how many bytes that has.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] naming the file.
    pub fn write(&self, path: &Path) -> Result<u64, Error> {
        self.write_from(path, None)
    }

    /// The same of one whose values are on their way already.
    pub(crate) fn write_with(&self, path: &Path, spool: Spool) -> Result<u64, Error> {
        self.write_from(path, Some(spool))
    }

    fn write_from(&self, path: &Path, spool: Option<Spool>) -> Result<u64, Error> {
        let fill = |file: &mut File| match spool {
            Some(spool) => self.write_to(file, Some(spool)),
            // Rows are small, and many.
            None => {
                let mut file = BufWriter::with_capacity(COPY, file);
                let written = self.write_to(&mut file, None)?;
                file.flush().map(|()| written)
            }
        };
        whole::write(path, Readers::Owner, fill).map_err(|e| unwritable(path, &e))
    }

    /// The rows that have values: each one's token, its node, and how many bytes it has.
    fn parts<'a>(
        &'a self,
        spool: Option<&'a Spool>,
    ) -> Box<dyn Iterator<Item = (u64, usize, u64)> + 'a> {
        match spool {
            Some(spool) => Box::new(spool.parts.iter().copied()),
            None => Box::new(self.tokens.iter().flat_map(|token| {
                let rows = token.nodes.iter().enumerate();
                rows.map(|(node, row)| (token.index, node, row.data.len() as u64))
            })),
        }
    }

    fn write_to(&self, to: &mut impl Write, spool: Option<Spool>) -> io::Result<u64> {
        let header = serde_json::to_vec(&Header::from(self)).map_err(io::Error::from)?;
        let too_large = || io::Error::other("it is larger than this machine counts");
        let (mut tensors, mut end) = (BTreeMap::new(), 0usize);
        for (token, node, bytes) in self.parts(spool.as_ref()).filter(|part| part.2 > 0) {
            let node = self.head.nodes.get(node);
            let node = node.ok_or_else(|| io::Error::other("a row of no node"))?;
            let (dtype, size) = dtype(node).map_err(io::Error::other)?;
            let bytes = usize::try_from(bytes).map_err(|_| too_large())?;
            let count = bytes / size;
            // Only the beginning of a row has no axes.
            let dims: Option<Vec<usize>> = match elements(node) == Some(count as u64) {
                true => node.dims.iter().map(|n| usize::try_from(*n).ok()).collect(),
                false => Some(vec![count]),
            };
            let begin = end;
            end = begin.checked_add(bytes).ok_or_else(too_large)?;
            let info = TensorInfo {
                dtype,
                shape: dims.unwrap_or_else(|| vec![count]),
                data_offsets: (begin, end),
            };
            let name = format!("{token}/{}", node.name);
            if tensors.insert(name, info).is_some() {
                return Err(io::Error::other("two rows have one name"));
            }
        }
        let mut body = serde_json::to_vec(&tensors).map_err(io::Error::from)?;
        // As the format has it, so that values lie where programs like them.
        body.resize(body.len().next_multiple_of(8), b' ');
        to.write_all(MAGIC)?;
        to.write_all(&(header.len() as u64).to_le_bytes())?;
        to.write_all(&header)?;
        to.write_all(&(body.len() as u64).to_le_bytes())?;
        to.write_all(&body)?;
        match spool {
            Some(spool) => spool.pour(to)?,
            None => {
                let mut rows = self.tokens.iter().flat_map(|token| &token.nodes);
                rows.try_for_each(|row| to.write_all(&row.data))?;
            }
        }
        Ok((MAGIC.len() + 8 + header.len() + 8 + body.len() + end) as u64)
    }

    /// Reads a file that may be anybody's.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`], [`Reason::LimitExceeded`], or [`Reason::InvalidArgument`] saying what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let shown = path.display();
        let unreadable = |e: io::Error| {
            let reason = match e.kind() {
                io::ErrorKind::NotFound => Reason::FileNotFound,
                _ => Reason::InvalidArgument,
            };
            Error::new(reason, format!("{shown} cannot be read: {e}"))
        };
        let file = File::open(path).map_err(unreadable)?;
        let most = limits::MAX_CAPTURE_BYTES + 2 * limits::MAX_CAPTURE_HEADER;
        let size = file.metadata().map_err(unreadable)?.len();
        if size > most {
            let what = format!("{shown} is larger than any capture");
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        let mut bytes = Vec::new();
        file.take(most)
            .read_to_end(&mut bytes)
            .map_err(unreadable)?;
        Self::parse(&bytes).map_err(|e| {
            let what = format!(
                "{shown} is no capture that this version can read: {}",
                e.message()
            );
            Error::new(Reason::InvalidArgument, what)
        })
    }

    /// Reads a file's bytes, which may be anybody's.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] saying what is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let wrong = |what: &str| Error::new(Reason::InvalidArgument, what);
        let rest = bytes
            .strip_prefix(MAGIC)
            .ok_or_else(|| wrong("it does not begin like one"))?;
        let (length, rest) = rest
            .split_first_chunk()
            .ok_or_else(|| wrong("it is cut short"))?;
        let length = u64::from_le_bytes(*length);
        if length > limits::MAX_CAPTURE_HEADER {
            return Err(wrong("its header is too long"));
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let (header, body) = rest
            .split_at_checked(length)
            .ok_or_else(|| wrong("it is cut short"))?;
        let header: Header =
            serde_json::from_slice(header).map_err(|e| wrong(&format!("its header: {e}")))?;
        let body =
            SafeTensors::deserialize(body).map_err(|e| wrong(&format!("its values: {e}")))?;
        header.recording(&body).map_err(|e| wrong(e.message()))
    }
}

fn unwritable(path: &Path, error: &io::Error) -> Error {
    let what = format!("{} cannot be written: {error}", path.display());
    Error::new(Reason::InvalidArgument, what)
}

/// Bytes that are copied at once.
const COPY: usize = 1 << 20;

/// A capture's values on their way into its file: they go to the disk as they come, so that memory holds a token's at most.
/// Nobody else sees where.
pub(crate) struct Spool {
    file: BufWriter<File>,
    /// Of each row with values: its token, its node, its bytes.
    parts: Vec<(u64, usize, u64)>,
}

impl Spool {
    /// For the file of this path.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] naming the file.
    pub(crate) fn beside(path: &Path) -> Result<Self, Error> {
        let file = whole::scratch(path).map_err(|e| unwritable(path, &e))?;
        Ok(Self {
            file: BufWriter::with_capacity(COPY, file),
            parts: Vec::new(),
        })
    }

    /// Takes a token's values out of it.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] with the file system's words.
    pub(crate) fn take(&mut self, token: &mut Recorded) -> Result<(), Error> {
        for (node, row) in token.nodes.iter_mut().enumerate() {
            let data = std::mem::take(&mut row.data);
            if !data.is_empty() {
                self.file.write_all(&data).map_err(|e| {
                    let what = format!("values cannot be kept on the disk: {e}");
                    Error::new(Reason::InvalidArgument, what)
                })?;
                self.parts.push((token.index, node, data.len() as u64));
            }
        }
        Ok(())
    }

    /// All of them in their order.
    fn pour(self, to: &mut impl Write) -> io::Result<()> {
        let mut file = self
            .file
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        let bytes: u64 = self.parts.iter().map(|part| part.2).sum();
        match io::copy(&mut file.take(bytes), to)? == bytes {
            true => Ok(()),
            false => Err(io::Error::other(
                "what was kept on the disk is not all there",
            )),
        }
    }
}

/// What the file says before its tensors.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    layout: u32,
    head: v1::CaptureHead,
    tokens: Vec<TokenView>,
    end: Option<v1::CaptureEnd>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenView {
    index: u64,
    position: u64,
    token: Option<u32>,
    as_expected: Option<bool>,
    missed: u64,
    nodes: Vec<RowView>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowView {
    sha256: String,
    nan: u64,
    infinite: u64,
    zero: u64,
    least: f64,
    greatest: f64,
    mean: f64,
    rms: f64,
}

impl From<&Recording> for Header {
    fn from(recording: &Recording) -> Self {
        let row = |row: &v1::NodeValues| RowView {
            sha256: row.hash.iter().map(|b| format!("{b:02x}")).collect(),
            nan: row.nan,
            infinite: row.infinite,
            zero: row.zero,
            least: number(row.least),
            greatest: number(row.greatest),
            mean: number(row.mean),
            rms: number(row.rms),
        };
        let token = |token: &Recorded| TokenView {
            index: token.index,
            position: token.position,
            token: token.token,
            as_expected: token.as_expected,
            missed: token.missed,
            nodes: token.nodes.iter().map(row).collect(),
        };
        Self {
            layout: LAYOUT,
            head: recording.head.clone(),
            tokens: recording.tokens.iter().map(token).collect(),
            end: recording.end.clone(),
        }
    }
}

/// What JSON can say of it: what is no number was counted, and is in none of these.
fn number(value: f64) -> f64 {
    if value.is_finite() { value } else { 0.0 }
}

fn hash(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let digit = |b: u8| char::from(b).to_digit(16);
    let pair = |pair: &[u8]| match pair {
        [a, b] => u8::try_from(digit(*a)? * 16 + digit(*b)?).ok(),
        _ => None,
    };
    digits.chunks(2).map(pair).collect()
}

impl Header {
    fn recording(self, body: &SafeTensors<'_>) -> Result<Recording, Error> {
        if self.layout != LAYOUT {
            return Err(odd(format!("its layout is {}, not {LAYOUT}", self.layout)));
        }
        let names: HashSet<&str> = self.head.nodes.iter().map(|n| n.name.as_str()).collect();
        if names.len() != self.head.nodes.len() {
            return Err(odd("two nodes have one name"));
        }
        let tensors: HashMap<String, _> = body.iter().map(|(n, t)| (n.to_owned(), t)).collect();
        let mut tokens = Vec::with_capacity(self.tokens.len());
        let mut indices = HashSet::new();
        for told in self.tokens {
            if told.nodes.len() != self.head.nodes.len() {
                return Err(odd(format!("token {} lacks rows", told.index)));
            }
            // Tensors are found by it.
            if !indices.insert(told.index) {
                return Err(odd(format!("token {} is told twice", told.index)));
            }
            let mut nodes = Vec::with_capacity(told.nodes.len());
            for (number, (node, row)) in self.head.nodes.iter().zip(told.nodes).enumerate() {
                let tensor = tensors.get(&format!("{}/{}", told.index, node.name));
                let row = v1::NodeValues {
                    node: u32::try_from(number).unwrap_or(u32::MAX),
                    hash: hash(&row.sha256)
                        .ok_or_else(|| odd(format!("a hash of {} is none", node.name)))?,
                    nan: row.nan,
                    infinite: row.infinite,
                    zero: row.zero,
                    least: row.least,
                    greatest: row.greatest,
                    mean: row.mean,
                    rms: row.rms,
                    data: tensor
                        .map(|tensor| tensor.data().to_vec())
                        .unwrap_or_default(),
                };
                check_row(node, number, &row)?;
                if tensor
                    .is_some_and(|tensor| dtype(node).ok().map(|d| d.0) != Some(tensor.dtype()))
                {
                    return Err(odd(format!("{} has another dtype", node.name)));
                }
                nodes.push(row);
            }
            tokens.push(Recorded {
                index: told.index,
                position: told.position,
                token: told.token,
                as_expected: told.as_expected,
                missed: told.missed,
                of_prefix: false,
                nodes,
            });
        }
        Ok(Recording {
            head: self.head,
            tokens,
            end: self.end,
            ..Recording::default()
        })
    }
}

#[cfg(test)]
pub(super) use tests::recording as sample;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A capture of one node and the logits, of so many tokens.
    pub fn recording(tokens: u64) -> Recording {
        let node = |name: &str, dims: &[u64]| v1::CapturedNode {
            name: name.to_owned(),
            dtype: "f32".to_owned(),
            dims: dims.to_vec(),
            ..v1::CapturedNode::default()
        };
        let row = |node: u32, values: &[f32]| v1::NodeValues {
            node,
            hash: vec![node as u8 + 1; 32],
            least: -1.0,
            greatest: 2.5,
            data: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            ..v1::NodeValues::default()
        };
        Recording {
            head: v1::CaptureHead {
                model: "m".into(),
                nodes: vec![node("layers.0.add.0", &[2, 2]), node("logits", &[3])],
                request: Some(v1::GenerateRequest {
                    seed: Some(u64::MAX),
                    prompt: Some(v1::Prompt {
                        kind: Some(v1::prompt::Kind::Ids(v1::TokenIds { ids: vec![1, 2] })),
                    }),
                    sampling: Some(v1::Sampling {
                        temperature: Some(0.7),
                        ..v1::Sampling::default()
                    }),
                    ..v1::GenerateRequest::default()
                }),
                revealed: true,
                ..v1::CaptureHead::default()
            },
            tokens: (0..tokens)
                .map(|index| Recorded {
                    index,
                    position: index + 1,
                    token: Some(7),
                    nodes: vec![row(0, &[1.0, -1.0, 2.5, 0.0]), row(1, &[0.5])],
                    ..Recorded::default()
                })
                .collect(),
            end: Some(v1::CaptureEnd {
                tokens,
                ..v1::CaptureEnd::default()
            }),
            prefix: Vec::new(),
        }
    }

    #[test]
    fn a_file_is_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.hotcell");
        let written = recording(3);
        let bytes = written.write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            1,
            "no part is left"
        );
        let read = Recording::read(&path).unwrap();
        assert_eq!(read, written);
        assert!(read.is_whole(0, &read.tokens[0].nodes[0]));
        assert!(!read.is_whole(1, &read.tokens[0].nodes[1]));
        let nowhere = folder.path().join("no/such/folder");
        assert!(written.write(&nowhere).is_err());
    }

    #[test]
    fn values_that_go_to_the_disk_as_they_come_make_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        let whole = recording(3);
        let written = whole.write(&one).unwrap();
        let mut spool = Spool::beside(&other).unwrap();
        let mut emptied = whole.clone();
        for token in &mut emptied.tokens {
            spool.take(token).unwrap();
            assert!(token.nodes.iter().all(|row| row.data.capacity() == 0));
        }
        assert_eq!(emptied.write_with(&other, spool).unwrap(), written);
        assert_eq!(fs::read(&one).unwrap(), fs::read(&other).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        // What a worker says twice makes no file that nobody can read.
        let mut twice = whole;
        twice.tokens[1].index = 0;
        assert!(twice.write(&one).is_err());
    }

    #[test]
    fn a_strangers_file_is_refused_wherever_it_is_changed_or_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.hotcell");
        recording(1).write(&path).unwrap();
        let good = fs::read(&path).unwrap();
        for cut in (0..good.len()).step_by(7) {
            fs::write(&path, &good[..cut]).unwrap();
            assert!(Recording::read(&path).is_err(), "cut at {cut}");
        }
        let mut long = good.clone();
        long[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        fs::write(&path, &long).unwrap();
        let error = Recording::read(&path).unwrap_err();
        assert!(error.message().contains("too long"), "{error}");
        for at in 0..good.len() {
            let mut changed = good.clone();
            changed[at] ^= 0x11;
            fs::write(&path, &changed).unwrap();
            // Other values are as good as these; nothing else may come of it than an error.
            let _ = Recording::read(&path);
        }
        let text = String::from_utf8_lossy(&good).replace("\"f32\"", "\"i32\"");
        let same_length = text.len() == good.len();
        if same_length {
            fs::write(&path, text.as_bytes()).unwrap();
            assert!(Recording::read(&path).is_err());
        }
        assert!(Recording::read(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_node_is_named_by_the_plan_that_was_executed() {
        let step = |name: &str, op: &str| v1::CapturedNode {
            name: name.to_owned(),
            op: op.to_owned(),
            ..v1::CapturedNode::default()
        };
        let plan = v1::CapturedPlan {
            steps: vec![step("a", "add"), step("b", "mul_mat")],
            logits_steps: vec![step("l", "rms_norm"), step("logits", "mul_mat")],
            looked_steps: vec![step("a", "add"), step("a", "abs"), step("b", "mul_mat")],
            looked_logits_steps: vec![step("logits", "mul_mat"), step("logits", "abs")],
        };
        let mut recorder = Recorder::default();
        let seen = |part: &str, node: u32, op: &str| v1::BlackBox {
            part: part.to_owned(),
            node,
            op: op.to_owned(),
            ..v1::BlackBox::default()
        };
        assert_eq!(recorder.node_of(&seen("body", 1, "mul_mat")), None);
        let told = v1::Captured {
            kind: Some(Kind::Plan(plan)),
        };
        recorder.push(told).unwrap();
        let name = |seen| recorder.node_of(&seen).map(|node| node.name.as_str());
        assert_eq!(name(seen("body", 1, "mul_mat")), Some("b"));
        assert_eq!(name(seen("logits", 1, "mul_mat")), Some("logits"));
        assert_eq!(name(seen("looked", 1, "abs")), Some("a"));
        assert_eq!(name(seen("looked_logits", 1, "abs")), Some("logits"));
        assert_eq!(name(seen("looked", 2, "mul_mat")), Some("b"));
        for nowhere in [
            seen("body", 0, "mul_mat"),
            seen("body", 2, "mul_mat"),
            seen("states", 1, "mul_mat"),
            seen("draws", 1, "draw"),
            seen("", 1, "mul_mat"),
            seen("another", 1, "mul_mat"),
        ] {
            assert_eq!(name(nowhere.clone()), None, "{nowhere:?}");
        }
    }

    #[test]
    fn messages_come_in_their_order() {
        let whole = recording(1);
        let told = |kind| v1::Captured { kind: Some(kind) };
        let head = || told(Kind::Head(whole.head.clone()));
        let token = |nodes: &[v1::NodeValues], more| {
            told(Kind::Token(v1::CapturedToken {
                nodes: nodes.to_vec(),
                more,
                ..v1::CapturedToken::default()
            }))
        };
        let rows = &whole.tokens[0].nodes;
        let mut recorder = Recorder::default();
        assert_eq!(recorder.push(head()).unwrap(), None);
        assert_eq!(recorder.push(token(&rows[..1], true)).unwrap(), None);
        let done = recorder.push(token(&rows[1..], false)).unwrap().unwrap();
        assert_eq!(&done.nodes, rows);
        let end = || told(Kind::End(v1::CaptureEnd::default()));
        recorder.push(end()).unwrap();
        assert!(recorder.end().is_some());
        for wrong in [
            vec![token(rows, false)],
            vec![head(), head()],
            vec![head(), token(&rows[..1], false)],
            vec![head(), token(&rows[1..], false)],
            vec![head(), token(&[rows.as_slice(), rows].concat(), false)],
            vec![head(), token(&rows[..1], true), end()],
            vec![end(), end()],
            vec![v1::Captured { kind: None }],
        ] {
            let mut recorder = Recorder::default();
            let all: Result<Vec<_>, _> = wrong.into_iter().map(|m| recorder.push(m)).collect();
            assert_eq!(all.unwrap_err().reason(), Reason::ProtocolViolation);
        }
    }
}
