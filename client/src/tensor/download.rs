//! A download's bytes, from the connection straight to where they are wanted.
//!
//! tonic would gather each message before it shows it, which copies every byte once more than need be. A message of a
//! download is almost nothing but one field of bytes, so these are handed on as they come.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use prost::Message;
use tonic::{Code, Status, body::Body};
use tower::{Service, ServiceExt};

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use crate::connect::Wire;

const PATH: &str = "/hotcell.v1.Tensors/Download";
/// Number of the field `data` of `hotcell.v1.DownloadChunk`.
const DATA: u64 = 1;
/// gRPC's prefix of a message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Bytes of the longest varint.
const VARINT: u32 = 10;

/// Why a download ended early.
pub(super) enum Broken {
    /// The other side, or the connection, says so.
    Status(Status),
    /// The bytes are no download.
    Wrong(Error),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Self::Wrong(error)
    }
}

fn violation(what: impl Into<String>) -> Error {
    Error::new(Reason::ProtocolViolation, what)
}

/// Downloads; `take` gets the bytes, piece by piece and in order.
pub(super) async fn download(
    mut channel: Wire,
    request: tonic::Request<v1::DownloadRequest>,
    mut take: impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Broken> {
    let (metadata, _, message) = request.into_parts();
    let mut framed = vec![0; PREFIX];
    framed.extend(message.encode_to_vec());
    let length = u32::try_from(framed.len() - PREFIX).unwrap_or(u32::MAX);
    framed[1..PREFIX].copy_from_slice(&length.to_be_bytes());
    let mut request = http::Request::new(Body::new(Full::new(Bytes::from(framed))));
    *request.method_mut() = http::Method::POST;
    *request.version_mut() = http::Version::HTTP_2;
    *request.uri_mut() = http::Uri::from_static(PATH);
    *request.headers_mut() = metadata.into_headers();
    let mut header = |key, value| {
        let value = http::HeaderValue::from_static(value);
        request.headers_mut().insert(key, value);
    };
    header(http::header::TE, "trailers");
    header(http::header::CONTENT_TYPE, "application/grpc");
    let broken = |e: tonic::transport::Error| Broken::Status(Status::from_error(Box::new(e)));
    let channel = channel.ready().await.map_err(broken)?;
    let response = channel.call(request).await.map_err(broken)?;
    // A call that fails at once has its status among the headers.
    if let Some(status) = Status::from_header_map(response.headers()) {
        return ended(status);
    }
    if response.status() != http::StatusCode::OK {
        let what = format!("a download was answered with {}", response.status());
        return Err(Broken::Status(Status::unknown(what)));
    }
    let mut body = response.into_body();
    let mut messages = Messages::default();
    while let Some(frame) = body.frame().await {
        let frame = match frame.map_err(Broken::Status)?.into_data() {
            Ok(data) => {
                messages.read(&data, &mut take)?;
                continue;
            }
            Err(frame) => frame,
        };
        if let Some(status) = frame.trailers_ref().and_then(Status::from_header_map) {
            ended(status)?;
            return messages.end().map_err(Broken::Wrong);
        }
    }
    let what = "the download ended without a status";
    Err(Broken::Status(Status::unknown(what)))
}

fn ended(status: Status) -> Result<(), Broken> {
    match status.code() {
        Code::Ok => Ok(()),
        _ => Err(Broken::Status(status)),
    }
}

/// What comes next in a stream of messages.
enum Next {
    /// A message's prefix, of which so many bytes are there.
    Prefix([u8; PREFIX], usize),
    /// A field's number and kind.
    Tag,
    /// The length of a field of bytes.
    Length { wanted: bool },
    /// So many bytes of one.
    Bytes { left: usize, wanted: bool },
    /// A number that nobody wants.
    Number,
}

/// Reads messages of type `hotcell.v1.DownloadChunk` as they come, in pieces of any length.
struct Messages {
    next: Next,
    /// Bytes of this message that are still to come.
    left: usize,
    /// The varint so far, and its bits.
    number: (u64, u32),
}

impl Default for Messages {
    fn default() -> Self {
        Self {
            next: Next::Prefix([0; PREFIX], 0),
            left: 0,
            number: (0, 0),
        }
    }
}

impl Messages {
    fn read(
        &mut self,
        mut piece: &[u8],
        take: &mut impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        while let Some((&first, rest)) = piece.split_first() {
            match &mut self.next {
                Next::Prefix(prefix, have) => {
                    if let Some(byte) = prefix.get_mut(*have) {
                        *byte = first;
                    }
                    *have += 1;
                    piece = rest;
                    if *have == PREFIX {
                        let [compressed, length @ ..] = *prefix;
                        let length = u32::from_be_bytes(length) as usize;
                        if compressed != 0 || length > limits::MAX_MESSAGE_BYTES {
                            let what = format!("a compressed message, or one of {length} bytes");
                            return Err(violation(what));
                        }
                        self.left = length;
                        self.go_on(Next::Tag);
                    }
                }
                Next::Bytes { left, wanted } => {
                    let (now, later) = piece.split_at((*left).min(piece.len()));
                    if *wanted {
                        take(now)?;
                    }
                    piece = later;
                    *left -= now.len();
                    self.left -= now.len();
                    if *left == 0 {
                        self.go_on(Next::Tag);
                    }
                }
                Next::Tag | Next::Length { .. } | Next::Number => {
                    piece = rest;
                    if self.left == 0 {
                        return Err(violation("a message ends within a field"));
                    }
                    self.left -= 1;
                    if let Some(number) = self.digit(first)? {
                        self.number_is(number)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The varint that ends with this byte, if it does.
    fn digit(&mut self, byte: u8) -> Result<Option<u64>, Error> {
        let (number, bits) = self.number;
        if bits >= 7 * VARINT {
            return Err(violation("a number of more than 64 bits"));
        }
        // What does not fit into 64 bits is dropped, as protocol buffers have it.
        let number = number | (u64::from(byte & 0x7f) << bits.min(63));
        self.number = match byte & 0x80 {
            0 => (0, 0),
            _ => (number, bits + 7),
        };
        Ok((byte & 0x80 == 0).then_some(number))
    }

    fn number_is(&mut self, number: u64) -> Result<(), Error> {
        let next = match self.next {
            Next::Tag => match number & 7 {
                0 => Next::Number,
                1 => self.bytes(8, false)?,
                2 => Next::Length {
                    wanted: number >> 3 == DATA,
                },
                5 => self.bytes(4, false)?,
                kind => return Err(violation(format!("a field of kind {kind}"))),
            },
            Next::Length { wanted } => self.bytes(number, wanted)?,
            _ => Next::Tag,
        };
        self.go_on(next);
        Ok(())
    }

    fn bytes(&self, length: u64, wanted: bool) -> Result<Next, Error> {
        let length = usize::try_from(length).ok().filter(|l| *l <= self.left);
        let left = length.ok_or_else(|| violation("a field is longer than its message"))?;
        Ok(Next::Bytes { left, wanted })
    }

    /// The next thing to read, or what follows if there is nothing of it.
    fn go_on(&mut self, next: Next) {
        let next = match next {
            Next::Bytes { left: 0, .. } => Next::Tag,
            next => next,
        };
        self.next = match next {
            Next::Tag if self.left == 0 => Next::Prefix([0; PREFIX], 0),
            next => next,
        };
    }

    /// Whether the stream may end here.
    fn end(&self) -> Result<(), Error> {
        match self.next {
            Next::Prefix(_, 0) => Ok(()),
            _ => Err(violation("the download ended within a message")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message as gRPC frames it.
    fn frame(message: &impl Message) -> Vec<u8> {
        let bytes = message.encode_to_vec();
        let mut framed = vec![0];
        framed.extend((bytes.len() as u32).to_be_bytes());
        framed.extend(bytes);
        framed
    }

    fn read(stream: &[u8], piece: usize) -> Result<Vec<u8>, Error> {
        let (mut messages, mut taken) = (Messages::default(), Vec::new());
        for piece in stream.chunks(piece) {
            let mut take = |bytes: &[u8]| {
                taken.extend_from_slice(bytes);
                Ok(())
            };
            messages.read(piece, &mut take)?;
        }
        messages.end()?;
        Ok(taken)
    }

    #[test]
    fn only_the_data_is_taken_however_the_stream_is_cut() {
        let chunk = |data: Vec<u8>, tensor: bool, sum: usize| v1::DownloadChunk {
            data: data.into(),
            sha256: vec![9; sum],
            tensor: tensor.then(|| v1::TensorInfo {
                bytes: 1 << 40,
                handle: Some(v1::Handle {
                    epoch: u64::MAX,
                    id: vec![7; 16],
                }),
                ..v1::TensorInfo::default()
            }),
        };
        let data: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        let mut stream = frame(&chunk(data[..1].to_vec(), true, 0));
        stream.extend(frame(&chunk(vec![], false, 0)));
        stream.extend(frame(&chunk(data[1..700].to_vec(), false, 0)));
        stream.extend(frame(&chunk(data[700..].to_vec(), false, 32)));
        for piece in [1, 2, 3, 5, 64, 701, 4096] {
            assert_eq!(read(&stream, piece).unwrap(), data, "pieces of {piece}");
        }
        // It may not end before its end.
        for end in 1..stream.len() {
            let cut = read(&stream[..end], 11);
            let whole = cut.as_ref().is_ok_and(|taken| data.starts_with(taken));
            assert!(whole || cut.is_err());
        }
        assert!(read(&stream[..stream.len() - 1], 11).is_err());
    }

    #[test]
    fn fields_of_every_kind_are_passed_over_and_what_is_no_message_is_refused() {
        let stream = |message: &[u8]| {
            let mut framed = vec![0, 0, 0, 0, message.len() as u8];
            framed.extend(message);
            framed
        };
        // Field 9 as a number, as eight bytes, as bytes, as four bytes; then data of two bytes, twice.
        let odd = [
            0x48, 0xff, 0x01, 0x49, 1, 2, 3, 4, 5, 6, 7, 8, 0x4a, 1, 0xaa, 0x4d, 1, 2, 3, 4, 0x0a,
            2, 5, 6, 0x0a, 2, 7, 8,
        ];
        assert_eq!(read(&stream(&odd), 3).unwrap(), [5, 6, 7, 8]);
        for wrong in [
            &[0x0a, 3, 1, 2][..],
            &[0x0a][..],
            &[0x48, 0x80][..],
            &[0x0b, 1][..],
            &[0x49, 1, 2][..],
            &[0xff; 12][..],
        ] {
            assert!(read(&stream(wrong), 4).is_err(), "{wrong:?}");
        }
        assert!(read(&[1, 0, 0, 0, 0], 5).is_err());
        assert!(read(&[0, 0xff, 0, 0, 0], 5).is_err());
        assert_eq!(read(&[0, 0, 0, 0, 0], 2).unwrap(), [0u8; 0]);
    }
}
