//! Files that are there once they are whole, or not at all.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
};

use rustix::fs::{AtFlags, CWD, OFlags, linkat};

/// Who else may read a file.
#[derive(Clone, Copy)]
pub(crate) enum Readers {
    /// Nobody: prompts may be in it.
    Owner,
    /// Whoever this process lets read its files.
    Usual,
}

impl Readers {
    fn mode(self) -> u32 {
        match self {
            Readers::Owner => 0o600,
            Readers::Usual => 0o666,
        }
    }
}

/// A file for what is on its way into the one of `path`, on the same disk as far as there are files without a name there.
///
/// # Errors
/// Those of the file system.
pub(crate) fn scratch(path: &Path) -> io::Result<File> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if let Some(file) = unnamed_beside(&path, Readers::Owner) {
        return Ok(file);
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.values", std::process::id()));
    let mut options = File::options();
    let options = options.read(true).write(true).create_new(true);
    let file = options.mode(Readers::Owner.mode()).open(Path::new(&name))?;
    // It lives for as long as somebody has it open.
    fs::remove_file(Path::new(&name))?;
    Ok(file)
}

/// A file in the folder of `path` that has no name; none where there are none such.
fn unnamed_beside(path: &Path, readers: Readers) -> Option<File> {
    let folder = match path.parent()? {
        empty if empty.as_os_str().is_empty() => Path::new("."),
        folder => folder,
    };
    let flags = i32::try_from(OFlags::TMPFILE.bits()).ok()?;
    let mut options = File::options();
    let options = options
        .read(true)
        .write(true)
        .custom_flags(flags)
        .mode(readers.mode());
    options.open(folder).ok()
}

/// Has a file written and gives it the name of `path` once it is whole, in place of one that has that. Until then it has
/// none, so that nothing is left of it if this process dies; where the file system has no such files, it is written
/// beside `path`. Returns what `fill` does. What is no file, a pipe or a terminal, is written to as it is.
///
/// # Errors
/// Those of `fill` and of the file system. Nothing is left then.
pub(crate) fn write<T>(
    path: &Path,
    readers: Readers,
    fill: impl FnOnce(&mut File) -> io::Result<T>,
) -> io::Result<T> {
    if fs::metadata(path).is_ok_and(|there| !there.is_file() && !there.is_dir()) {
        return fill(&mut File::options().write(true).open(path)?);
    }
    // A link stays one: what it leads to is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = Path::new(&name);
    let write = || {
        let unnamed = unnamed_beside(&path, readers);
        let mut file = match &unnamed {
            Some(file) => file.try_clone()?,
            None => {
                let mut options = File::options();
                let options = options.write(true).create_new(true);
                options.mode(readers.mode()).open(part)?
            }
        };
        let filled = fill(&mut file)?;
        file.sync_all()?;
        if unnamed.is_some() {
            let own = format!("/proc/self/fd/{}", file.as_raw_fd());
            // A link never takes another file's place; a new name does.
            linkat(CWD, own, CWD, part, AtFlags::SYMLINK_FOLLOW)?;
        }
        fs::rename(part, &path)?;
        Ok(filled)
    };
    write().inspect_err(|_| {
        // It may not be there.
        let _ = fs::remove_file(part);
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_has_no_name_before_it_is_whole_and_takes_the_place_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let names = || fs::read_dir(folder.path()).unwrap().count();
        for text in ["one", "other"] {
            let before = names();
            let filled = write(&path, Readers::Owner, |file| {
                file.write_all(text.as_bytes())?;
                // Where there are files without a name.
                assert!(unnamed_beside(&path, Readers::Owner).is_none() || names() == before);
                Ok(text.len())
            });
            assert_eq!(filled.unwrap(), text.len());
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(names(), 1);
        }
        let failed = write(&path, Readers::Usual, |_| {
            Err::<(), _>(io::Error::other("no"))
        });
        assert!(failed.is_err());
        assert_eq!(
            (fs::read_to_string(&path).unwrap().as_str(), names()),
            ("other", 1)
        );
    }

    #[test]
    fn a_link_stays_one_and_what_is_no_file_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write(&link, Readers::Usual, |file| file.write_all(b"new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        let nothing = Path::new("/dev/null");
        write(nothing, Readers::Usual, |file| file.write_all(b"new")).unwrap();
        assert!(!fs::metadata(nothing).unwrap().is_file());
    }
}
