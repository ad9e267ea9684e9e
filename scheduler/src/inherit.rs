//! Descriptors that whoever started this program placed at agreed numbers.

use std::os::fd::{OwnedFd, RawFd};

use hotcell_proto::ids::ModelName;

use crate::{
    config::Config,
    exit::{Exit, Failure},
};

/// A bundled model's files, with their names.
pub type BundledModel = (ModelName, Vec<(String, OwnedFd)>);

/// What was inherited.
#[derive(Debug, Default)]
pub struct Inherited {
    /// The one connection of a private scheduler.
    pub private: Option<OwnedFd>,
    /// Bundled models.
    pub bundled: Vec<BundledModel>,
}

impl Inherited {
    /// Takes the descriptors that the config names, and keeps workers from inheriting them.
    ///
    /// # Errors
    /// [`Exit::Usage`] for a number that is not open or named twice.
    pub fn take(config: &Config) -> Result<Inherited, Failure> {
        let take = |fd: RawFd, what: &str| {
            hotcell_ipc::inherit::take(fd).map_err(|e| {
                Failure::new(
                    Exit::Usage,
                    format!("{what}: {e}; this flag is for the `hotcell` command"),
                )
            })
        };
        let private = config
            .private_fd
            .map(|fd| take(fd, "the private connection"))
            .transpose()?;
        let mut bundled = Vec::new();
        for model in &config.bundled {
            let mut files = Vec::new();
            for (file, fd) in &model.files {
                let what = format!("{}'s {file}", model.name);
                files.push((file.clone(), take(*fd, &what)?));
            }
            bundled.push((model.name.clone(), files));
        }
        Ok(Inherited { private, bundled })
    }
}
