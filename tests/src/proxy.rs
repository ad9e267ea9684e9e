//! A Unix socket in front of another one, whose connections break when told to.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream, unix::OwnedReadHalf},
    sync::watch,
    task::JoinHandle,
};

/// The proxy. Dropping it closes all.
pub struct Proxy {
    /// Where it listens.
    pub socket: PathBuf,
    state: Arc<State>,
    task: JoinHandle<()>,
}

struct State {
    to: PathBuf,
    cuts: watch::Sender<()>,
    /// Bytes that connections may bring from behind before they break, one after the other and around.
    allowances: Mutex<VecDeque<u64>>,
    /// The same of bytes that it brings there.
    forth: AtomicU64,
    /// Which byte of the next connection is changed, in either direction; taken by it.
    spoiled: AtomicU64,
    connections: AtomicUsize,
}

impl Proxy {
    /// Listens in `folder` for connections to `to`.
    ///
    /// # Errors
    /// When it cannot listen.
    pub fn start(folder: &Path, to: &Path) -> Result<Self> {
        let socket = folder.join("proxy.sock");
        let listener = UnixListener::bind(&socket)?;
        let state = Arc::new(State {
            to: to.to_owned(),
            cuts: watch::Sender::new(()),
            allowances: Mutex::new(VecDeque::from([u64::MAX])),
            forth: AtomicU64::new(u64::MAX),
            spoiled: AtomicU64::new(u64::MAX),
            connections: AtomicUsize::new(0),
        });
        let serving = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                serving.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(carry(client, Arc::clone(&serving)));
            }
        });
        Ok(Self {
            socket,
            state,
            task,
        })
    }

    /// Breaks all connections that there are now.
    pub fn cut(&self) {
        self.state.cuts.send_replace(());
    }

    /// Breaks each connection once it brought so many bytes, wherever in a message that is.
    pub fn allow(&self, bytes: u64) {
        self.allow_in_turn([bytes]);
    }

    /// The same with what one connection brings after the other, and again from the first.
    pub fn allow_in_turn<const N: usize>(&self, bytes: [u64; N]) {
        *self.state.allowances() = VecDeque::from(bytes);
    }

    /// The same for bytes on their way there.
    pub fn allow_forth(&self, bytes: u64) {
        self.state.forth.store(bytes, Ordering::SeqCst);
    }

    /// Changes one bit of the byte at this place of what the next connection brings, in either direction.
    pub fn spoil_next(&self, at: u64) {
        self.state.spoiled.store(at, Ordering::SeqCst);
    }

    /// Whether the byte that was to be changed has been given to a connection.
    pub fn has_spoiled(&self) -> bool {
        self.state.spoiled.load(Ordering::SeqCst) == u64::MAX
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
}

impl State {
    fn allowances(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.allowances
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// What the next connection may bring.
    fn next(&self) -> u64 {
        let mut all = self.allowances();
        let next = all.pop_front().unwrap_or(u64::MAX);
        all.push_back(next);
        next
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.cut();
    }
}

async fn carry(client: UnixStream, state: Arc<State>) {
    let mut cuts = state.cuts.subscribe();
    let Ok(server) = UnixStream::connect(&state.to).await else {
        return;
    };
    let (from_client, mut to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    let back = state.next();
    let forth = state.forth.load(Ordering::SeqCst);
    let spoiled = state.spoiled.swap(u64::MAX, Ordering::SeqCst);
    // Both sides are dropped with the first that ends.
    tokio::select! {
        _ = cuts.changed() => {}
        () = copy(from_client, &mut to_server, forth, spoiled) => {}
        () = copy(from_server, &mut to_client, back, spoiled) => {}
    }
}

async fn copy(
    mut from: OwnedReadHalf,
    to: &mut (impl AsyncWriteExt + Unpin),
    mut allowance: u64,
    spoiled: u64,
) {
    let mut at = 0;
    let mut buffer = vec![0; 16 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let place = spoiled
            .checked_sub(at)
            .and_then(|p| usize::try_from(p).ok());
        if let Some(byte) = place.and_then(|p| buffer[..read].get_mut(p)) {
            *byte ^= 0x10;
        }
        at += read as u64;
        let part = read.min(usize::try_from(allowance).unwrap_or(usize::MAX));
        if to.write_all(&buffer[..part]).await.is_err() || part < read {
            return;
        }
        allowance -= part as u64;
    }
}
