//! What `fakecuda.conf` says.

use std::{
    ffi::{CStr, c_int, c_void},
    fs,
    mem::MaybeUninit,
    path::PathBuf,
    sync::OnceLock,
};

/// How a call fails.
#[derive(Clone, Copy, Debug)]
pub enum Failure {
    Result(c_int),
    Abort,
    Hang,
}

/// Which call fails.
#[derive(Debug)]
pub struct Failing {
    pub function: String,
    /// From 1.
    pub nth: u32,
    pub how: Failure,
}

#[derive(Debug)]
pub struct Config {
    pub devices: c_int,
    pub memory: usize,
    pub version: c_int,
    /// Milliseconds that each kernel takes by the device's clock; 0: what it takes.
    pub clock: u32,
    pub failures: Vec<Failing>,
    /// The library of kernels.
    pub kernels: PathBuf,
}

/// The folder that this library is in.
pub fn folder() -> PathBuf {
    let here: *const c_void = (folder as fn() -> PathBuf) as *const c_void;
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is of this library, and there is room for the answer, which names its file.
    let path = unsafe {
        match libc::dladdr(here, found.as_mut_ptr()) {
            0 => return PathBuf::new(),
            _ => CStr::from_ptr(found.assume_init().dli_fname),
        }
    };
    let path = PathBuf::from(path.to_string_lossy().into_owned());
    path.parent().map(PathBuf::from).unwrap_or_default()
}

fn failing(text: &str) -> Option<Failing> {
    let (call, how) = text.split_once('=')?;
    let (function, nth) = call.split_once(':')?;
    Some(Failing {
        function: function.trim().to_owned(),
        nth: nth.trim().parse().ok()?,
        how: match how.trim() {
            "abort" => Failure::Abort,
            "hang" => Failure::Hang,
            number => Failure::Result(number.parse().ok()?),
        },
    })
}

/// Read once, at the first call.
pub fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let folder = folder();
        let mut config = Config {
            devices: 1,
            memory: 1 << 30,
            version: 13_000,
            clock: 0,
            failures: Vec::new(),
            kernels: folder.join("kernels.so"),
        };
        let text = fs::read_to_string(folder.join("fakecuda.conf")).unwrap_or_default();
        for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
            let value = value.trim();
            let number = value.parse().ok();
            let known = match key.trim() {
                "devices" => number.map(|n| config.devices = n),
                "memory" => value.parse().ok().map(|n| config.memory = n),
                "version" => number.map(|n| config.version = n),
                "clock" => value.parse().ok().map(|n| config.clock = n),
                "fail" => failing(value).map(|f| config.failures.push(f)),
                _ => None,
            };
            // A test that means something else than it says is worse than none.
            assert!(known.is_some(), "fakecuda.conf: {key} = {value:?}");
        }
        config
    })
}
