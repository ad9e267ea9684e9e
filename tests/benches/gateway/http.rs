//! As little of HTTP/1.1 as it takes to see each piece of an answer when it comes.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};

/// A connection that is kept from request to request.
pub struct Connection {
    stream: BufReader<TcpStream>,
    host: SocketAddr,
    line: String,
    /// The server said that it closes it.
    closing: bool,
}

/// How the end of a body is known.
#[derive(Clone, Copy, Debug)]
pub enum Body {
    /// It comes in pieces, after the last of which an empty one comes.
    Pieces,
    /// It has so many bytes.
    Sized(usize),
}

impl Connection {
    pub async fn new(host: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(host).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
            host,
            line: String::new(),
            closing: false,
        })
    }

    async fn line(&mut self) -> Result<&str> {
        self.line.clear();
        let read = self.stream.read_line(&mut self.line).await?;
        ensure!(read > 0, "the connection was closed");
        Ok(self.line.trim_end())
    }

    async fn send(&mut self, head: &str, body: &[u8]) -> Result<Body> {
        if self.closing {
            *self = Self::new(self.host).await?;
        }
        let host = self.host;
        let length = body.len();
        let head = format!(
            "{head} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        // In one write, as clients do.
        let request = [head.as_bytes(), body].concat();
        self.stream.get_mut().write_all(&request).await?;
        let status = self.line().await?.to_owned();
        let mut kind = Body::Sized(0);
        loop {
            let line = self.line().await?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').context("a header without a colon")?;
            match (name, value.trim()) {
                ("transfer-encoding", "chunked") => kind = Body::Pieces,
                ("connection", "close") => self.closing = true,
                ("content-length", length) => kind = Body::Sized(length.parse()?),
                _ => {}
            }
        }
        if status.split(' ').nth(1) != Some("200") {
            let said = self.rest(kind).await?;
            bail!("{status}: {}", String::from_utf8_lossy(&said));
        }
        Ok(kind)
    }

    /// Posts JSON; the answer's head has come when this returns.
    pub async fn post(&mut self, path: &str, body: &Value) -> Result<Body> {
        let body = serde_json::to_vec(body)?;
        self.send(&format!("POST {path}"), &body).await
    }

    /// Gets a page.
    pub async fn get(&mut self, path: &str) -> Result<String> {
        let kind = self.send(&format!("GET {path}"), b"").await?;
        Ok(String::from_utf8(self.rest(kind).await?)?)
    }

    /// The next piece of a body that comes in pieces, into `piece`; false once there is none.
    pub async fn piece(&mut self, piece: &mut Vec<u8>) -> Result<bool> {
        let size = usize::from_str_radix(self.line().await?, 16)?;
        piece.resize(size, 0);
        self.stream.read_exact(piece).await?;
        ensure!(self.line().await?.is_empty(), "a piece is longer than said");
        Ok(size > 0)
    }

    /// All of a body.
    pub async fn rest(&mut self, kind: Body) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        match kind {
            Body::Sized(length) => {
                all.resize(length, 0);
                self.stream.read_exact(&mut all).await?;
            }
            Body::Pieces => {
                let mut piece = Vec::new();
                while self.piece(&mut piece).await? {
                    all.extend_from_slice(&piece);
                }
            }
        }
        Ok(all)
    }
}
