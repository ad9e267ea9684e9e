//! Descriptors that whoever started this program placed at agreed numbers.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use hotcell_proto::ids::ModelName;
use rustix::io::FdFlags;

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
    ///
    /// # Safety
    /// Call it first of all, once: before anything else could have opened descriptors at these numbers.
    pub unsafe fn take(config: &Config) -> Result<Inherited, Failure> {
        let mut taken: Vec<RawFd> = Vec::new();
        let mut take = |fd: RawFd, what: &str| {
            if fd < 3 || taken.contains(&fd) {
                return Err(Failure::new(
                    Exit::Usage,
                    format!("descriptor {fd} for {what}: must be 3 or more, and named once"),
                ));
            }
            taken.push(fd);
            // SAFETY: only asks about the number; an unused one is an error.
            let open = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_setfd(open, FdFlags::CLOEXEC).map_err(|e| {
                Failure::new(
                    Exit::Usage,
                    format!(
                        "descriptor {fd} for {what} was not inherited ({e}); this flag is for the `hotcell` command"
                    ),
                )
            })?;
            // SAFETY: it is open, and by this function's contract nobody else's.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
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
