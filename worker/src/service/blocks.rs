//! Telling the scheduler which blocks a model's cache keeps.

use std::{collections::HashSet, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use tokio::{sync::mpsc, time::sleep};
use tonic::Status;

use crate::{
    engine::Engine,
    generate::ledger::{Change, Changes, Kept},
};

/// How long changes are gathered before they are told, and how long where they have to be looked for.
const GATHER: Duration = Duration::from_millis(10);
const LOOK: Duration = Duration::from_millis(250);

fn told(kept: &Kept) -> v1::CachedBlock {
    v1::CachedBlock {
        hash: kept.hash,
        parent: kept.parent,
        tokens: kept.tokens.to_vec(),
        tenant: kept.tenant.to_string(),
    }
}

/// Changes as messages, each of which says first what was removed. A removal goes before what was stored earlier, unless
/// it is of that, so that few messages say much.
struct Messages {
    changes: std::vec::IntoIter<Change>,
    left: Option<Change>,
    reset: bool,
    block_tokens: u32,
}

impl Messages {
    fn new(changes: Changes, block_tokens: u32) -> Self {
        Self {
            changes: changes.list.into_iter(),
            left: None,
            reset: changes.reset,
            block_tokens,
        }
    }
}

impl Iterator for Messages {
    type Item = v1::BlocksChanged;

    fn next(&mut self) -> Option<v1::BlocksChanged> {
        let mut message = v1::BlocksChanged {
            reset: std::mem::take(&mut self.reset),
            block_tokens: self.block_tokens,
            ..v1::BlocksChanged::default()
        };
        let mut stored = HashSet::new();
        while message.stored.len() + message.removed.len() < limits::MAX_BLOCKS_TOLD {
            match self.left.take().or_else(|| self.changes.next()) {
                Some(Change::Removed(hash)) if stored.contains(&hash) => {
                    self.left = Some(Change::Removed(hash));
                    break;
                }
                Some(Change::Removed(hash)) => message.removed.push(hash),
                Some(Change::Stored(kept)) => {
                    stored.insert(kept.hash);
                    message.stored.push(told(&kept));
                }
                None => break,
            }
        }
        let is_empty = message.removed.is_empty() && message.stored.is_empty();
        (message.reset || !is_empty).then_some(message)
    }
}

/// What changed, however long the engine's queue is full: meanwhile changes wait in the cache's own ledger, which tells
/// all anew if there are too many of them, and its watcher stays the same.
async fn patiently<T, F: Future<Output = Result<T, Error>>>(
    mut ask: impl FnMut() -> F,
) -> Result<T, Error> {
    let mut pause = GATHER;
    loop {
        match ask().await {
            Err(error) if error.reason() == Reason::Overloaded => {
                sleep(pause).await;
                pause = (2 * pause).min(LOOK);
            }
            asked => return asked,
        }
    }
}

/// Tells a watcher what is there and what changes, until it leaves, the model is gone or another one watches it.
pub(super) async fn watch(
    engine: Engine,
    model: String,
    block_tokens: u32,
    to: mpsc::Sender<Result<v1::BlocksChanged, Status>>,
) {
    let telling = async {
        let watcher = Arc::new(());
        let mut begins = true;
        loop {
            let ask = || engine.blocks(model.clone(), &watcher, begins);
            let Some(changes) = patiently(ask).await? else {
                break;
            };
            begins = false;
            let pause = if changes.looked { LOOK } else { GATHER };
            for message in Messages::new(changes, block_tokens) {
                if to.send(Ok(message)).await.is_err() {
                    return Ok(());
                }
            }
            sleep(pause).await;
        }
        Ok::<(), Error>(())
    };
    let ended = tokio::select! {
        ended = telling => ended,
        () = to.closed() => return,
    };
    if let Err(error) = ended {
        // To a watcher that left this goes nowhere.
        let _ = to.send(Err(error.into())).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[tokio::test]
    async fn a_full_queue_ends_no_watch_and_is_not_asked_all_the_time() {
        let began = std::time::Instant::now();
        let mut asked = 0;
        let full = |reason| Err::<u32, _>(Error::new(reason, "full"));
        let got = patiently(|| {
            asked += 1;
            ready(match asked < 6 {
                true => full(Reason::Overloaded),
                false => Ok(7),
            })
        });
        assert_eq!(got.await.unwrap(), 7);
        // Five pauses, each twice the one before.
        assert!(
            began.elapsed() >= 31 * GATHER - GATHER,
            "{:?}",
            began.elapsed()
        );
        let ended = patiently(|| ready(full(Reason::WorkerLost))).await;
        assert_eq!(ended.unwrap_err().reason(), Reason::WorkerLost);
    }

    fn stored(hash: u64) -> Change {
        Change::Stored(Arc::new(Kept {
            hash,
            parent: None,
            depth: 0,
            tokens: Box::new([1]),
            tenant: "t".into(),
        }))
    }

    fn messages(reset: bool, list: Vec<Change>) -> Vec<(bool, Vec<u64>, Vec<u64>)> {
        let looked = false;
        let changes = Changes {
            reset,
            list,
            looked,
        };
        let said = Messages::new(changes, 16);
        let hashes = |m: &v1::BlocksChanged| m.stored.iter().map(|b| b.hash).collect();
        said.map(|m| (m.reset, m.removed.clone(), hashes(&m)))
            .collect()
    }

    #[test]
    fn messages_say_first_what_was_removed_and_end_at_their_bound() {
        use Change::Removed;
        assert_eq!(messages(false, vec![]), []);
        assert_eq!(messages(true, vec![]), [(true, vec![], vec![])]);
        let list = vec![stored(1), Removed(9), stored(2), Removed(1), stored(1)];
        assert_eq!(
            messages(false, list),
            [(false, vec![9], vec![1, 2]), (false, vec![1], vec![1]),]
        );
        let most = limits::MAX_BLOCKS_TOLD;
        let many = messages(true, (0..most as u64 + 1).map(stored).collect());
        assert_eq!(many.len(), 2);
        assert_eq!((many[0].0, many[0].2.len()), (true, most));
        assert_eq!(many[1], (false, vec![], vec![most as u64]));
    }
}
