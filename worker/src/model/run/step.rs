//! A step: a model's body for all rows, and its head for those of which a token is drawn.

use std::sync::atomic::Ordering;

use hotcell_kernels::backend::DeviceError;
use hotcell_proto::plan_part::PlanPart;

use super::{GIVES_WAY, Order, Row, RowBuffers, Runner, follow::give_way, tap::Tap, tell};

impl Runner {
    /// Computes `rows` and the logits of those that `picks` names. No other step has begun and not ended.
    ///
    /// # Errors
    /// When there are too many of them, or an index is out of range.
    pub fn step(&mut self, rows: &[Row], picks: &[usize]) -> Result<(), DeviceError> {
        match &self.stage {
            Some(stage) if !stage.leads() => self.stage_here(rows),
            _ => self.begin(rows, picks).and_then(|()| self.finish()),
        }
    }

    /// Begins such a step. As many as there are [lanes](Runner::lanes) may have begun, of sequences of their own.
    ///
    /// # Errors
    /// As for [`Runner::step`].
    pub fn begin(&mut self, rows: &[Row], picks: &[usize]) -> Result<(), DeviceError> {
        match &self.stage {
            Some(_) => self.begin_in_stages(rows)?,
            None => {
                let looked = self.tapping;
                let order = Order::Step {
                    rows,
                    picks,
                    looked,
                    followed: self.follower.is_some(),
                };
                self.together(&order, |own| own.body_here(rows))?;
            }
        }
        self.begun.push_back(picks.to_vec());
        Ok(())
    }

    /// Ends the step that began first, whose logits are there then.
    ///
    /// # Errors
    /// As for [`Runner::step`].
    pub fn finish(&mut self) -> Result<(), DeviceError> {
        let picks = self.begun.pop_front();
        let picks = picks.ok_or_else(|| DeviceError::Binding("no step has begun".to_owned()))?;
        self.end_in_stages()?;
        let done = self.head_here(&picks);
        match &self.stage {
            // Nobody else is at it.
            Some(_) => done,
            None => self.done(done),
        }
    }

    /// This process's part of the body.
    pub(super) fn body_here(&mut self, rows: &[Row]) -> Result<(), DeviceError> {
        let RowBuffers {
            tokens,
            positions,
            sequences,
            kinds,
            ..
        } = &self.rows;
        let scratch = &mut self.scratch;
        let begun = self.copies.begin();
        Self::fill(scratch, tokens, rows.iter().map(|r| r.token as usize))?;
        Self::fill(scratch, positions, rows.iter().map(|r| r.position))?;
        Self::fill(scratch, sequences, rows.iter().map(|r| r.sequence))?;
        for (kind, of) in kinds.iter().enumerate() {
            Self::fill(scratch, &of.slots, rows.iter().map(|r| r.slots[kind]))?;
        }
        // Token, position and sequence of each row, and a slot by kind of layers.
        let numbers = rows.len() * (3 + kinds.len());
        self.copies.end(begun, "rows", numbers * size_of::<i32>());
        match &self.tap {
            Some(_) if self.tapping => self.execute(PlanPart::Looked, rows.len()),
            _ => self.execute(PlanPart::Body, rows.len()),
        }
    }

    /// The logits of these rows, what is drawn of them, and the end of the step.
    pub(super) fn head_here(&mut self, picks: &[usize]) -> Result<(), DeviceError> {
        if !picks.is_empty() {
            let rows = picks.iter().copied();
            let begun = self.copies.begin();
            Self::fill(&mut self.scratch, &self.rows.picks, rows)?;
            self.copies
                .end(begun, "picks", picks.len() * size_of::<i32>());
            let part = match &self.tap {
                Some(tap) if self.tapping && tap.head.is_some() => PlanPart::LookedLogits,
                _ => PlanPart::Logits,
            };
            self.execute(part, picks.len())?;
        }
        let draws_any = match &mut self.draws {
            Some(draws) => draws.prepare(picks.len())?,
            None => false,
        };
        if draws_any {
            self.execute(PlanPart::Draws, picks.len())?;
        }
        self.stream.synchronize()?;
        match &mut self.draws {
            Some(draws) if draws_any => draws.finish(),
            _ => Ok(()),
        }
    }

    /// Executes one of the plans of a step.
    pub(super) fn execute(&mut self, part: PlanPart, rows: usize) -> Result<(), DeviceError> {
        let plan = match (part, &mut self.tap) {
            (PlanPart::Looked, Some(tap)) => &mut tap.body.plan,
            (
                PlanPart::LookedLogits,
                Some(Tap {
                    head: Some(tap), ..
                }),
            ) => &mut tap.plan,
            (PlanPart::Logits | PlanPart::LookedLogits, _) => &mut self.head,
            (PlanPart::Draws, _) => match &mut self.draws {
                Some(draws) => &mut draws.plan,
                None => return Ok(()),
            },
            _ => &mut self.body,
        };
        let plan = plan.as_mut();
        tell(self.tells, part);
        match &self.follower {
            Some(follower) => follower.execute(part, plan, rows),
            None if GIVES_WAY.load(Ordering::Relaxed) => {
                plan.execute_from(rows, 0, &give_way).map(|_| ())
            }
            None => self.stream.execute(plan, rows),
        }
    }
}
