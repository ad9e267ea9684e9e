//! Making a model ready on the engine's device.

use hotcell_kernels::plan::PlanHints;
use hotcell_proto::error::Error;

use super::{Loop, Ready};
use crate::{
    entropy,
    error::of_run,
    generate::batch::Batch,
    members::Given,
    model::run::{Keeping, RunError, RunShape, Runner, give_way},
    weights::{ModelFile, ModelSource},
};

impl Loop {
    /// Sizes that a model is run with here.
    pub(super) fn shape(&self, source: &ModelSource) -> Result<RunShape, RunError> {
        let dtype = self.cache_dtype;
        let parts = self.members.as_ref().map(|members| members.parts());
        let parts = parts.unwrap_or_default();
        let mut shape = match self.model_memory {
            None => RunShape {
                parts,
                ..RunShape::for_model(&source.config, dtype)
            },
            Some(bytes) => RunShape::within(self.device.as_ref(), source, dtype, bytes, parts)?,
        };
        if let Some(most) = self.max_context {
            shape.context = shape.context.min(most.max(1) as usize);
        }
        Ok(shape)
    }

    pub(super) fn load(
        &mut self,
        name: String,
        source: &ModelSource,
        files: &[ModelFile],
        keeping: Keeping,
    ) -> Result<Ready, Error> {
        let device = self.device.as_ref();
        let shape = self.shape(source).map_err(|e| of_run(&e))?;
        let progressed = || {
            self.blackbox.progressed();
            give_way();
        };
        let members = self.members.as_ref();
        let (keeping, theirs) = match members {
            Some(members) => members.divide(keeping),
            None => (keeping, Given::default()),
        };
        let loading = members.map(|members| members.load(&shape, files, theirs));
        let hints = PlanHints::default();
        let runner = Runner::keeping(device, source, shape, &hints, &progressed, keeping);
        // Also for a load that failed here: theirs goes on until it is over.
        let others = loading.map(|loading| loading.finish(&progressed));
        let (mut runner, mut keeps) = runner.map_err(|e| of_run(&e))?;
        if let Some((others, theirs)) = others.transpose()? {
            runner.lead(others);
            keeps = theirs.with(keeps);
        }
        tracing::info!(
            model = name,
            cache_bytes = runner.cache_bytes(),
            cache_tokens = shape.blocks * shape.block_len,
            context = shape.context,
            weights_found = keeps.found,
            "memory of a model"
        );
        let config = &source.config;
        let columns = shape.parts.columns();
        if columns.members > 1 && shape.share_of_heads(config).members == 1 {
            tracing::warn!(
                model = name,
                heads = config.heads,
                key_heads = config.kv_heads,
                members = columns.members,
                "its heads cannot be shared out: every member computes all of them, and holds all of the cache"
            );
        }
        let packable = runner.packable();
        let mut batch = Batch::new(runner, entropy::bytes()?, self.blackbox);
        batch.tell(&self.observer);
        self.models.insert(name, batch);
        Ok(Ready {
            shape,
            packable,
            keeps,
        })
    }
}
