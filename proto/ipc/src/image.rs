//! Becoming another program: same process id, same children, and the descriptors that are named.

use std::{
    ffi::{CString, OsString},
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::Path,
};

use crate::spawn::c_string;

/// A program, by its open file, and what it begins with.
#[derive(Debug)]
pub struct Image {
    /// The executable. It need not have a name any more.
    pub program: OwnedFd,
    /// Arguments, the program's name first.
    pub args: Vec<OsString>,
    /// The whole environment, as `NAME=value`.
    pub env: Vec<OsString>,
    /// Its working folder.
    pub directory: OwnedFd,
    /// Descriptors that it finds at the same numbers, standard streams apart. Who holds them keeps them open meanwhile.
    pub keep: Vec<RawFd>,
}

/// The error of the last system call, if `result` says that it failed.
fn check(result: impl Into<i64>) -> io::Result<()> {
    match result.into() {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn strings(list: &[OsString]) -> io::Result<(Vec<CString>, Vec<*const libc::c_char>)> {
    let strings: Vec<CString> = list
        .iter()
        .map(|text| c_string(text))
        .collect::<io::Result<_>>()?;
    let pointers = strings.iter().map(|string| string.as_ptr());
    let pointers = pointers.chain([std::ptr::null()]).collect();
    Ok((strings, pointers))
}

fn set_inherited(fd: RawFd, inherited: bool) -> io::Result<()> {
    let flags = if inherited { 0 } else { libc::FD_CLOEXEC };
    // SAFETY: plain numbers; one that is not open is an error.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, flags) })
}

impl Image {
    /// Becomes the program. Returns only on failure, and then nothing has changed.
    pub(crate) fn execute(self) -> io::Error {
        match self.try_execute() {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    fn try_execute(&self) -> io::Result<std::convert::Infallible> {
        // Everything that can fail by itself comes first.
        let (_args, argv) = strings(&self.args)?;
        let (_env, envp) = strings(&self.env)?;
        let here = rustix::fs::open(
            Path::new("."),
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?;
        let marked = self.keep.iter().try_for_each(|fd| set_inherited(*fd, true));
        let done = marked
            .and_then(|()| Ok(rustix::process::fchdir(&self.directory)?))
            .and_then(|()| {
                // SAFETY: ends this image, or fails. The pointers are into strings that live until then, and both lists
                // end with null.
                check(unsafe {
                    libc::syscall(
                        libc::SYS_execveat,
                        self.program.as_raw_fd(),
                        c"".as_ptr(),
                        argv.as_ptr(),
                        envp.as_ptr(),
                        libc::AT_EMPTY_PATH,
                    )
                })
            });
        for fd in &self.keep {
            // One that is not open was never marked.
            let _ = set_inherited(*fd, false);
        }
        let _ = rustix::process::fchdir(&here);
        done.and(Err(io::ErrorKind::Other.into()))
    }
}

/// Names this process as `ps` shows it. One that was executed by its open file goes by the file's number.
///
/// # Errors
/// `InvalidInput` for a name with a NUL; what `prctl` reports.
pub fn set_name(name: &str) -> io::Result<()> {
    let name = c_string(name.as_ref())?;
    Ok(rustix::thread::set_name(&name)?)
}
