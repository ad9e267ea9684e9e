//! What subscribers are told of blocks: numbered batches for each tenant, of which the last are held, and all that is there
//! for those who come anew or fell behind.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use hotcell_gateways::smg::{
    KvBlock, KvBlocksRemoved, KvBlocksStored, KvCacheCleared, KvCacheEvent, KvEventBatch,
    kv_cache_event::Data,
};
use hotcell_proto::limits;

use super::blocks::{Block, Change};

/// Batches that are held.
const HELD: usize = 256;
/// Blocks of one batch.
const BATCH: usize = limits::MAX_BLOCKS_TOLD;

/// One tenant's batches.
#[derive(Debug)]
pub(super) struct Log {
    /// The number of the last one; those that are held end with it.
    last: u64,
    held: VecDeque<Arc<KvEventBatch>>,
    events: u64,
    /// How many read it.
    pub(super) readers: usize,
}

/// Where a reader is, and what it is told before it goes on there.
#[derive(Debug)]
pub(super) struct Place {
    /// The number of the next batch.
    next: u64,
    /// All that was there, if it has to be told that.
    whole: Option<Whole>,
}

/// All that was there when a batch was the last.
#[derive(Debug)]
struct Whole {
    batches: VecDeque<KvEventBatch>,
}

/// A number above all that a log before this one had, in this process or another: they grow by the millisecond.
fn base() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let millis = since.map_or(1, |since| u64::try_from(since.as_millis()).unwrap_or(1));
    millis << 10
}

fn event(event_id: u64, data: Data) -> KvCacheEvent {
    let data = Some(data);
    KvCacheEvent { event_id, data }
}

fn cleared() -> Data {
    Data::Cleared(KvCacheCleared::default())
}

fn described(block: &Block) -> KvBlock {
    KvBlock {
        block_hash: block.hash,
        token_ids: block.tokens.to_vec(),
        block_size: i32::try_from(block.tokens.len()).unwrap_or(i32::MAX),
        ..KvBlock::default()
    }
}

/// Changes in the protocol's words: blocks that follow each other are one event.
fn told(changes: &[Change]) -> Vec<Data> {
    let mut all: Vec<Data> = Vec::new();
    let mut last = None;
    for change in changes {
        match (change, all.last_mut()) {
            (Change::Stored(block), Some(Data::Stored(run)))
                if block.parent.is_some() && block.parent == last =>
            {
                run.blocks.push(described(block));
            }
            (Change::Stored(block), _) => all.push(Data::Stored(KvBlocksStored {
                blocks: vec![described(block)],
                parent_block_hash: block.parent,
                ..KvBlocksStored::default()
            })),
            (Change::Removed(block), Some(Data::Removed(run))) => run.block_hashes.push(block.hash),
            (Change::Removed(block), _) => all.push(Data::Removed(KvBlocksRemoved {
                block_hashes: vec![block.hash],
                ..KvBlocksRemoved::default()
            })),
        }
        last = match change {
            Change::Stored(block) => Some(block.hash),
            Change::Removed(_) => None,
        };
    }
    all
}

/// Blocks in the order in which those that follow each other stand together.
fn in_runs(blocks: Vec<Arc<Block>>) -> Vec<Change> {
    let mut after: HashMap<i64, Vec<Arc<Block>>> = HashMap::new();
    let known: HashSet<i64> = blocks.iter().map(|block| block.hash).collect();
    let mut stack = Vec::new();
    for block in blocks.into_iter().rev() {
        match block.parent.filter(|parent| known.contains(parent)) {
            Some(parent) => after.entry(parent).or_default().push(block),
            None => stack.push(block),
        }
    }
    let mut changes = Vec::new();
    while let Some(block) = stack.pop() {
        stack.extend(after.remove(&block.hash).unwrap_or_default());
        changes.push(Change::Stored(block));
    }
    changes
}

impl Log {
    pub(super) fn new() -> Self {
        Self {
            last: base(),
            held: VecDeque::new(),
            events: 0,
            readers: 0,
        }
    }

    fn add(&mut self, timestamp: f64, data: Vec<Data>) {
        self.last += 1;
        let events = data.into_iter().map(|data| {
            self.events += 1;
            event(self.events, data)
        });
        let batch = KvEventBatch {
            sequence_number: self.last,
            timestamp,
            events: events.collect(),
            ..KvEventBatch::default()
        };
        if self.held.len() >= HELD {
            self.held.pop_front();
        }
        self.held.push_back(Arc::new(batch));
    }

    /// This changed, of this tenant's blocks.
    pub(super) fn changed(&mut self, timestamp: f64, changes: &[Change]) {
        for changes in changes.chunks(BATCH) {
            self.add(timestamp, told(changes));
        }
    }

    /// Nothing is there any more.
    pub(super) fn cleared(&mut self, timestamp: f64) {
        self.add(timestamp, vec![cleared()]);
    }

    /// The number of the first one that is held, or of the next if none is.
    fn first(&self) -> u64 {
        let held = u64::try_from(self.held.len()).unwrap_or(u64::MAX);
        self.last.saturating_sub(held).saturating_add(1)
    }

    /// A reader that wants the batches from this number on, or begins: with 0. `all` is what there is now.
    pub(super) fn place(
        &self,
        from: u64,
        timestamp: f64,
        all: impl FnOnce() -> Vec<Arc<Block>>,
    ) -> Place {
        let next = self.last.saturating_add(1);
        if (self.first()..=next).contains(&from) {
            let whole = None;
            return Place { next: from, whole };
        }
        let blocks = in_runs(all());
        // Who begins where nothing is has nothing to forget.
        if from == 0 && blocks.is_empty() {
            return Place { next, whole: None };
        }
        let mut batches: VecDeque<Vec<Data>> = blocks.chunks(BATCH).map(told).collect();
        match batches.front_mut() {
            Some(first) => first.insert(0, cleared()),
            None => batches.push_back(vec![cleared()]),
        }
        // Their numbers end with the last batch's, so that the next one follows.
        let count = u64::try_from(batches.len()).unwrap_or(u64::MAX);
        let before = self.last.saturating_sub(count);
        let batches = batches
            .into_iter()
            .zip(1..)
            .map(|(data, number)| KvEventBatch {
                sequence_number: before.saturating_add(number),
                timestamp,
                events: data.into_iter().map(|data| event(0, data)).collect(),
                ..KvEventBatch::default()
            });
        let whole = Whole {
            batches: batches.collect(),
        };
        Place {
            next,
            whole: Some(whole),
        }
    }

    /// The next batch for a reader, if there is one. Who fell behind what is held is told all that is there.
    pub(super) fn next(
        &self,
        place: &mut Place,
        timestamp: f64,
        all: impl FnOnce() -> Vec<Arc<Block>>,
    ) -> Option<KvEventBatch> {
        if let Some(whole) = &mut place.whole {
            if let Some(batch) = whole.batches.pop_front() {
                return Some(batch);
            }
            place.whole = None;
        }
        if place.next > self.last {
            return None;
        }
        if let Some(at) = place.next.checked_sub(self.first()) {
            let batch = usize::try_from(at).ok().and_then(|at| self.held.get(at))?;
            place.next += 1;
            return Some(KvEventBatch::clone(batch));
        }
        // Not 0: it has something to forget.
        *place = self.place(1, timestamp, all);
        place.whole.as_mut()?.batches.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn block(hash: i64, parent: Option<i64>) -> Arc<Block> {
        Arc::new(Block {
            hash,
            parent,
            depth: parent.map_or(0, |_| 1),
            tokens: Box::new([hash as u32]),
            tenant: "t".into(),
        })
    }

    fn stored(hash: i64, parent: Option<i64>) -> Change {
        Change::Stored(block(hash, parent))
    }

    /// A reader's own copy of what is there.
    #[derive(Default)]
    struct Copy {
        blocks: BTreeMap<i64, Option<i64>>,
        last: u64,
        batches: usize,
    }

    impl Copy {
        fn read(&mut self, log: &Log, place: &mut Place, all: &[Arc<Block>]) {
            while let Some(batch) = log.next(place, 0.0, || all.to_vec()) {
                let starts = matches!(batch.events[0].data, Some(Data::Cleared(_)));
                assert!(starts || self.last == 0 || batch.sequence_number == self.last + 1);
                (self.last, self.batches) = (batch.sequence_number, self.batches + 1);
                for event in batch.events {
                    match event.data.unwrap() {
                        Data::Cleared(_) => self.blocks.clear(),
                        Data::Removed(removed) => {
                            for hash in removed.block_hashes {
                                assert!(self.blocks.remove(&hash).is_some(), "twice");
                            }
                        }
                        Data::Stored(run) => {
                            let mut parent = run.parent_block_hash;
                            assert!(parent.is_none_or(|p| self.blocks.contains_key(&p)));
                            for block in run.blocks {
                                assert_eq!(block.token_ids.len() as i32, block.block_size);
                                let before = self.blocks.insert(block.block_hash, parent);
                                assert_eq!(before, None, "twice");
                                parent = Some(block.block_hash);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn who_reads_on_is_told_each_change_once() {
        let mut log = Log::new();
        let mut place = log.place(0, 0.0, Vec::new);
        let mut copy = Copy::default();
        copy.read(&log, &mut place, &[]);
        assert_eq!(copy.last, 0);
        let chain = [stored(1, None), stored(2, Some(1)), stored(3, Some(1))];
        log.changed(0.0, &chain);
        // One event for those that follow each other.
        assert_eq!(log.held[0].events.len(), 2);
        log.changed(0.0, &[Change::Removed(block(2, Some(1)))]);
        copy.read(&log, &mut place, &[]);
        assert_eq!(copy.blocks, [(1, None), (3, Some(1))].into());
        assert_eq!((copy.last, copy.batches), (log.last, 2));
        log.cleared(0.0);
        copy.read(&log, &mut place, &[]);
        assert!(copy.blocks.is_empty());
    }

    #[test]
    fn who_comes_back_goes_on_where_it_was_while_that_is_held() {
        let mut log = Log::new();
        log.changed(0.0, &[stored(1, None)]);
        log.changed(0.0, &[stored(2, None)]);
        let mut place = log.place(log.last, 0.0, || panic!("it is held"));
        let mut copy = Copy::default();
        copy.read(&log, &mut place, &[]);
        assert_eq!(copy.blocks, [(2, None)].into());
        let mut place = log.place(log.last + 1, 0.0, || panic!("nothing came since"));
        assert_eq!(log.next(&mut place, 0.0, Vec::new), None);
    }

    #[test]
    fn who_begins_or_fell_behind_is_told_all_that_is_there() {
        let mut log = Log::new();
        let mut slow = log.place(0, 0.0, Vec::new);
        let mut all = Vec::new();
        for hash in 0..2 * HELD as i64 {
            let parent = (hash % 4 != 0).then_some(hash - 1);
            let new = block(hash, parent);
            log.changed(0.0, &[Change::Stored(Arc::clone(&new))]);
            all.push(new);
        }
        all.sort_by_key(|block| block.hash % 4);
        let expected: BTreeMap<i64, Option<i64>> =
            all.iter().map(|block| (block.hash, block.parent)).collect();
        for from in [0, 1, log.first() - 1, log.last + 2, u64::MAX] {
            let mut place = log.place(from, 0.0, || all.clone());
            let mut copy = Copy::default();
            copy.read(&log, &mut place, &all);
            assert_eq!((&copy.blocks, copy.last), (&expected, log.last), "{from}");
            assert_eq!(copy.batches, 2, "512 blocks");
        }
        let mut copy = Copy::default();
        copy.read(&log, &mut slow, &all);
        assert_eq!((&copy.blocks, copy.last), (&expected, log.last));
        // And goes on behind it.
        log.changed(0.0, &[stored(9999, None)]);
        copy.read(&log, &mut slow, &all);
        assert!(copy.blocks.contains_key(&9999));
        // Who knew something forgets it, though nothing is there.
        let mut place = log.place(1, 0.0, Vec::new);
        let told = log.next(&mut place, 0.0, Vec::new).unwrap();
        assert_eq!(told.events.len(), 1);
        assert_eq!(told.sequence_number, log.last);
    }

    #[test]
    fn a_new_logs_numbers_are_above_those_of_the_one_before() {
        let mut log = Log::new();
        for _ in 0..500 {
            log.cleared(0.0);
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(Log::new().last > log.last);
    }
}
