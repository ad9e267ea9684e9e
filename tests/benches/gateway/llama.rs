//! llama.cpp's own server with the bundled model on as many threads, if there is one.

use std::{
    net::SocketAddr,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hotcell_tests::{
    bundled::write_gguf,
    cluster::{Process, SOON, free_address, private_folder},
};
use tempfile::TempDir;

use crate::{http::Connection, rps::CLIENTS};

/// Positions for each of the clients.
const CONTEXT: usize = 256;

/// A running server.
pub struct Llama {
    pub address: SocketAddr,
    _server: Process,
    _folder: TempDir,
}

impl Llama {
    /// The one that `HOTCELL_LLAMA_SERVER` names, once it is ready.
    pub async fn from_environment() -> Result<Option<Self>> {
        let Some(program) = std::env::var_os("HOTCELL_LLAMA_SERVER") else {
            return Ok(None);
        };
        let folder = private_folder()?;
        let model = folder.path().join("kjv.gguf");
        write_gguf(&model)?;
        let address = free_address()?;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let mut command = Command::new(program);
        command.arg("-m").arg(&model).args([
            "--host",
            &address.ip().to_string(),
            "--port",
            &address.port().to_string(),
            "-np",
            &CLIENTS.to_string(),
            "-c",
            &(CLIENTS * CONTEXT).to_string(),
            "-t",
            &threads.to_string(),
        ]);
        let server = Process::start(command.stdout(Stdio::null()))?;
        let start = Instant::now();
        while !is_ready(address).await {
            ensure!(start.elapsed() < SOON, "no server:\n{}", server.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(Some(Self {
            address,
            _server: server,
            _folder: folder,
        }))
    }
}

async fn is_ready(address: SocketAddr) -> bool {
    match Connection::new(address).await {
        Ok(mut connection) => connection.get("/health").await.is_ok(),
        Err(_) => false,
    }
}
