//! A model whose layers are divided among processes, each of which hands on what its layers give: the pipeline of Y. Huang
//! and others 2018, "GPipe", without training.
//!
//! The leader has the first layers, and is handed what the last ones give; it alone draws tokens. While one part of a long
//! step is in the next process, the leader computes its next part, and while a step of some sequences is there, it may begin
//! one of others: as many as there are stages are on their way. Which rows go together changes no bit.

use std::{collections::VecDeque, mem, sync::Arc};

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
    /// Of who leads: the steps that have begun, the oldest one first.
    flights: VecDeque<Flight>,
    /// Bytes of all of them that others have.
    away: usize,
}

/// A step that other stages are at.
#[derive(Default)]
struct Flight {
    /// Bytes of each of its parts that others have, the oldest one first.
    away: VecDeque<usize>,
    /// What the last stage gave of those that came back.
    back: Vec<u8>,
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
            flights: VecDeque::new(),
            away: 0,
        }))
    }

    /// How many stages there are.
    pub fn members(&self) -> usize {
        self.place.members
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

    /// Takes as many as are handed here to the beginning of a buffer.
    fn take(&mut self, into: &Buffer, bytes: usize) -> Result<(), DeviceError> {
        self.bytes.resize(bytes, 0);
        self.communicator.take(&mut self.bytes)?;
        into.write(0, &self.bytes)
    }

    /// Takes what the last stage gave of the part that has been away for longest. False: there is none.
    fn take_back(&mut self) -> Result<bool, DeviceError> {
        let mut flights = self.flights.iter_mut();
        let Some(flight) = flights.find(|flight| !flight.away.is_empty()) else {
            return Ok(false);
        };
        let bytes = flight.away.pop_front().unwrap_or(0);
        self.away -= bytes;
        let before = flight.back.len();
        flight.back.resize(before + bytes, 0);
        self.communicator.take(&mut flight.back[before..])?;
        Ok(true)
    }

    /// Forgets the steps that have begun: what comes of them is taken out of the way of others'.
    fn forget(&mut self) {
        while let Ok(true) = self.take_back() {}
        self.flights.clear();
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.forget();
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
            stage.take(&handed, bytes)?;
        }
        self.body_here(rows)?;
        self.stream.synchronize()?;
        let Some(stage) = &mut self.stage else {
            return Ok(());
        };
        let begun = self.copies.begin();
        stage.hand_on(&self.hidden_states, bytes)?;
        self.copies.end(begun, "handed states", bytes);
        Ok(())
    }

    /// Begins a step of which this process leads the stages.
    pub(super) fn begin_in_stages(&mut self, rows: &[Row]) -> Result<(), DeviceError> {
        // Who looks at a step looks at all of its rows.
        let piece = match !self.tapping && rows.len() >= 2 * PIECE {
            true => PIECE,
            false => rows.len().max(1),
        };
        if let Some(stage) = &mut self.stage {
            stage.flights.push_back(Flight::default());
        }
        for piece in rows.chunks(piece) {
            let bytes = self.bytes_of_rows(piece.len());
            self.make_way(bytes)?;
            let order = Order::Step {
                rows: piece,
                picks: &[],
                looked: self.tapping,
                followed: self.follower.is_some(),
            };
            self.together(&order, |own| own.stage_here(piece))?;
            if let Some(stage) = &mut self.stage
                && let Some(flight) = stage.flights.back_mut()
            {
                stage.away += bytes;
                flight.away.push_back(bytes);
            }
        }
        Ok(())
    }

    /// Before so many bytes are handed on: what comes back must find room, or the last stage would wait for this one, which
    /// waits for the next.
    fn make_way(&mut self, bytes: usize) -> Result<(), DeviceError> {
        let Some(stage) = &mut self.stage else {
            return Ok(());
        };
        let mut taken = Ok(true);
        while matches!(taken, Ok(true)) && stage.away > 0 && stage.away + bytes > HANDED {
            taken = stage.take_back();
        }
        self.done(taken).map(|_| ())
    }

    /// Waits for the other stages to end the step that began first, and puts what they gave where the head reads it.
    pub(super) fn end_in_stages(&mut self) -> Result<(), DeviceError> {
        let Some(stage) = &mut self.stage else {
            return Ok(());
        };
        let mut taken = Ok(true);
        while matches!(taken, Ok(true))
            && (stage.flights.front()).is_some_and(|flight| !flight.away.is_empty())
        {
            taken = stage.take_back();
        }
        let flight = stage.flights.pop_front().unwrap_or_default();
        self.done(taken)?;
        let begun = self.copies.begin();
        self.results.write(0, &flight.back)?;
        self.copies.end(begun, "taken states", flight.back.len());
        let row = self.bytes_of_rows(1).max(1);
        self.hear_sizes(flight.back.len() / row)
    }

    /// How many steps may have begun at a time: as many as keep all stages busy.
    pub fn lanes(&self) -> usize {
        self.stage.as_ref().map_or(1, Stage::members)
    }

    /// Forgets the steps that have begun and did not end.
    pub fn forget_steps(&mut self) {
        mem::take(&mut self.begun);
        if let Some(stage) = &mut self.stage {
            stage.forget();
        }
    }
}
