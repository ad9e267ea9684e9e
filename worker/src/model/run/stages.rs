//! A model whose layers are divided among processes, each of which hands on what its layers give: the pipeline of Y. Huang
//! and others 2018, "GPipe", without training.
//!
//! The leader has the first layers, and is handed what the last ones give; it alone draws tokens. While one part of a long
//! step is in the next process, the leader computes its next part. Which rows go together changes no bit.

use std::{collections::VecDeque, sync::Arc};

use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    communicator::{Communicator, HANDED, Share},
};

use super::{Order, Row, RunShape, Runner};

/// Rows that are computed at a time of a step that has several times as many: as few as keep multiplications busy, since every
/// stage reads its weights once for each.
const PIECE: usize = 32;

/// This process's place among the stages.
pub(super) struct Stage {
    communicator: Arc<Communicator>,
    place: Share,
    /// Hidden states on their way: the leader's layers give these, the others' read them.
    pub handed: Buffer,
    bytes: Vec<u8>,
}

impl Stage {
    /// The place of a process that has its part of a model's layers. `None`: it has all of them.
    pub fn of(
        device: &dyn Device,
        shape: &RunShape,
        hidden: usize,
    ) -> Result<Option<Self>, DeviceError> {
        let place = shape.parts.stage();
        if place.members == 1 {
            return Ok(None);
        }
        let communicator = device.communicator();
        let communicator = communicator.filter(|c| c.share() == place).ok_or_else(|| {
            DeviceError::Binding("there is nobody to hand hidden states on to".to_owned())
        })?;
        let bytes = shape.max_rows * hidden * size_of::<f32>();
        Ok(Some(Self {
            communicator,
            place,
            handed: device.allocate("hidden states on their way", bytes)?,
            bytes: Vec::new(),
        }))
    }

    pub fn leads(&self) -> bool {
        self.place.rank == 0
    }

    /// Hands on so many bytes at the beginning of a buffer.
    fn hand_on(&mut self, from: &Buffer, bytes: usize) -> Result<(), DeviceError> {
        self.bytes.resize(bytes, 0);
        from.read(0, &mut self.bytes)?;
        self.communicator.hand_on(&self.bytes)
    }

    /// Takes as many as are handed here to a place in a buffer.
    fn take(&mut self, into: &Buffer, at: usize, bytes: usize) -> Result<(), DeviceError> {
        self.bytes.resize(bytes, 0);
        self.communicator.take(&mut self.bytes)?;
        into.write(at, &self.bytes)
    }
}

impl Runner {
    /// Bytes of the hidden states of so many rows.
    fn bytes_of_rows(&self, rows: usize) -> usize {
        rows * self.hidden * size_of::<f32>()
    }

    /// What this process's layers do with these rows, which all have the others do too.
    pub(super) fn stage_here(&mut self, rows: &[Row]) -> Result<(), DeviceError> {
        let bytes = self.bytes_of_rows(rows.len());
        if let Some(stage) = &mut self.stage
            && !stage.leads()
        {
            let handed = stage.handed.clone();
            stage.take(&handed, 0, bytes)?;
        }
        self.body_here(rows)?;
        self.stream.synchronize()?;
        match &mut self.stage {
            Some(stage) => stage.hand_on(&self.hidden_states, bytes),
            None => Ok(()),
        }
    }

    /// A step of which this process leads the stages.
    pub(super) fn step_in_stages(
        &mut self,
        rows: &[Row],
        picks: &[usize],
    ) -> Result<(), DeviceError> {
        // Who looks at a step looks at all of its rows.
        let piece = match !self.tapping && rows.len() >= 2 * PIECE {
            true => PIECE,
            false => rows.len().max(1),
        };
        let mut away = Away::default();
        for (first, piece) in rows.chunks(piece).enumerate().map(|(i, p)| (i * piece, p)) {
            let bytes = self.bytes_of_rows(piece.len());
            // What comes back must find room, or the last stage would wait for this one, which waits for the next.
            while away.bytes > 0 && away.bytes + bytes > HANDED {
                self.take_back(&mut away)?;
            }
            let order = Order::Step {
                rows: piece,
                picks: &[],
                looked: self.tapping,
            };
            self.together(&order, |own| own.stage_here(piece))?;
            away.bytes += bytes;
            away.pieces.push_back((self.bytes_of_rows(first), bytes));
        }
        while !away.pieces.is_empty() {
            self.take_back(&mut away)?;
        }
        self.hear_sizes(rows.len())?;
        self.head_here(picks)
    }

    /// Takes what the last stage gave of the piece that has been away for longest.
    fn take_back(&mut self, away: &mut Away) -> Result<(), DeviceError> {
        let Some((at, bytes)) = away.pieces.pop_front() else {
            return Ok(());
        };
        away.bytes -= bytes;
        let taken = match &mut self.stage {
            Some(stage) => stage.take(&self.results, at, bytes),
            None => Ok(()),
        };
        self.done(taken)
    }
}

/// What other stages are at.
#[derive(Default)]
struct Away {
    /// Where each piece goes in the hidden states of the step, and how many bytes it has.
    pieces: VecDeque<(usize, usize)>,
    /// All of them together.
    bytes: usize,
}
