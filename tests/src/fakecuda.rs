//! The CUDA driver of `tests/fakecuda` in a folder of its own, for this process or for those that it starts.

use std::{
    ffi::CString,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::cluster::{binaries, build, repository};

/// Files that memory is in which other processes can map, and bytes of each (`tests/fakecuda/src/pieces.rs`).
const MEMORY_FILES: usize = 128;
const MEMORY_BYTES: u64 = (1 << 30) + 4096;

/// A folder with `libcuda.so` and the library that manages its devices, and what they are told to do.
pub struct FakeDriver {
    folder: TempDir,
}

impl FakeDriver {
    /// A driver that does as `conf` says (see `tests/fakecuda/src/lib.rs`).
    ///
    /// # Errors
    /// When it cannot be built or copied.
    pub fn new(conf: &str) -> Result<Self> {
        let built = build(&["hotcell-fakecuda"], "--lib")?;
        // A worker that root starts is another user by the time it opens the driver.
        let readable = Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().permissions(readable).tempdir()?;
        for name in ["libcuda.so", "libnvidia-ml.so.1"] {
            fs::copy(built.join("libfakecuda.so"), folder.path().join(name))?;
        }
        fs::write(folder.path().join("fakecuda.conf"), conf)?;
        for number in 0..MEMORY_FILES {
            let name = format!("fakecuda-memory-{number}");
            let file = fs::File::create(folder.path().join(name))?;
            // Nothing of it is there until it is written.
            file.set_len(MEMORY_BYTES)?;
            file.set_permissions(Permissions::from_mode(0o666))?;
        }
        Ok(Self { folder })
    }

    /// Has it run the device's kernels, made by the host's compiler. Says whether: not without that.
    ///
    /// # Errors
    /// When they do not compile.
    pub fn with_kernels(self) -> Result<(Self, bool)> {
        static MADE: OnceLock<Result<Option<PathBuf>, String>> = OnceLock::new();
        let made = MADE.get_or_init(|| kernels().map_err(|e| format!("{e:#}")));
        let made = made.clone().map_err(anyhow::Error::msg)?;
        if let Some(made) = &made {
            fs::copy(made, self.folder.path().join("kernels.so"))?;
        }
        Ok((self, made.is_some()))
    }

    /// A program in its folder that is CUDA's worker with this driver, by this name.
    ///
    /// # Errors
    /// When it cannot be built or written.
    pub fn worker(&self, name: &str) -> Result<PathBuf> {
        let worker = worker()?;
        let path = self.folder.path().join(name);
        let lines = format!(
            "#!/bin/sh\nLD_LIBRARY_PATH={0} LD_PRELOAD={0}/libcuda.so FAKECUDA_FILES=12 exec {1} \"$@\"\n",
            self.folder.path().display(),
            worker.display()
        );
        fs::write(&path, lines)?;
        fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// Has a device have a fault of this code, which its management library tells of.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn fault(&self, device: u32, code: u64) -> Result<()> {
        let (whole, part) = ("fakecuda.fault", "fakecuda.fault.part");
        fs::write(self.folder.path().join(part), format!("{device} {code}"))?;
        Ok(fs::rename(
            self.folder.path().join(part),
            self.folder.path().join(whole),
        )?)
    }

    /// Where it is: a process whose `LD_LIBRARY_PATH` has this folder finds it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Makes it this process's driver, for good. Must come before anybody looks for one.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn enter(self) -> Result<PathBuf> {
        // The process has it open until it ends.
        let folder = self.folder.keep();
        let path = folder.join("libcuda.so");
        let name = CString::new(path.to_str().context("a folder without a name")?)?;
        // SAFETY: our own library, whose initialisers do nothing.
        let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        ensure!(!opened.is_null(), "{} cannot be opened", path.display());
        Ok(folder)
    }
}

/// CUDA's worker, for this machine's own driver.
///
/// # Errors
/// When it cannot be built.
pub fn worker() -> Result<PathBuf> {
    if std::env::var_os("HOTCELL_TEST_BINARIES").is_none() {
        build(&["hotcell-worker-cuda"], "--bins")?;
    }
    Ok(binaries()?.join("hotcell-worker-cuda"))
}

/// The kernels as the host's compiler makes them; nothing where there is none.
fn kernels() -> Result<Option<PathBuf>> {
    let made = build(&["hotcell-fakecuda"], "--lib")?.join("cuda-kernels/kernels.so");
    let build = repository().join("kernels/cuda/shim/build");
    // Tests of several programs at once make one and the same, each in a file of its own until it is whole.
    let output = Command::new(build).arg(&made).output()?;
    match output.status.code() {
        Some(0) => Ok(Some(made)),
        Some(4) => {
            eprintln!("no g++ here: the CPU computes what CUDA's kernels would");
            Ok(None)
        }
        _ => bail!("{}", String::from_utf8_lossy(&output.stderr)),
    }
}
