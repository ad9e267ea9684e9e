//! The kernels' library, and launches.

use std::{
    collections::HashMap,
    ffi::{CString, c_int, c_uint, c_void},
    path::Path,
    process::Command,
    sync::{Mutex, OnceLock},
};

/// Set where the library is to be one with sanitizers.
pub const SANITIZE: &str = "HOTCELL_SHIM_SANITIZE";

/// The kernels, compiled for this processor.
pub struct Shim {
    library: usize,
    found: Mutex<HashMap<String, (usize, usize)>>,
}

type Launch = unsafe extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint, c_uint) -> c_int;
type Count = unsafe extern "C" fn() -> c_int;

/// Bytes of the largest argument.
const MOST: usize = 344;

/// An argument of a kernel, as its bytes.
#[derive(Clone, Copy)]
pub struct Arg([u8; MOST]);

impl Arg {
    fn of(bytes: &[u8]) -> Self {
        let mut all = [0; MOST];
        all[..bytes.len()].copy_from_slice(bytes);
        Self(all)
    }

    /// A structure of 64-bit numbers, by value.
    pub fn words(words: &[u64]) -> Self {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        Self::of(&bytes)
    }
}

impl From<i32> for Arg {
    fn from(v: i32) -> Self {
        Self::of(&i64::from(v).to_le_bytes())
    }
}
impl From<i64> for Arg {
    fn from(v: i64) -> Self {
        Self::of(&v.to_le_bytes())
    }
}
impl From<f32> for Arg {
    fn from(v: f32) -> Self {
        Self::of(&u64::from(v.to_bits()).to_le_bytes())
    }
}
impl<T> From<&[T]> for Arg {
    fn from(v: &[T]) -> Self {
        Self::of(&(v.as_ptr() as u64).to_le_bytes())
    }
}
impl<T> From<&Vec<T>> for Arg {
    fn from(v: &Vec<T>) -> Self {
        v.as_slice().into()
    }
}
impl<T> From<&mut Vec<T>> for Arg {
    fn from(v: &mut Vec<T>) -> Self {
        Self::of(&(v.as_mut_ptr() as u64).to_le_bytes())
    }
}

/// No pointer.
pub const NULL: Arg = Arg([0; MOST]);

/// What a launch that was refused or went wrong gave.
#[derive(Debug, PartialEq)]
pub struct Failed(pub i32);

impl Shim {
    /// The library, or nothing, and a line that says why, where it cannot be had.
    pub fn get() -> Option<&'static Self> {
        static SHIM: OnceLock<Option<Shim>> = OnceLock::new();
        SHIM.get_or_init(Self::build).as_ref()
    }

    fn build() -> Option<Self> {
        if Command::new("g++").arg("--version").output().is_err() {
            println!("skipped: g++ is not installed");
            return None;
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/shim/build");
        let mut command = Command::new(script);
        let sanitize = std::env::var_os(SANITIZE).is_some();
        let name = if sanitize {
            "kernels-sanitized.so"
        } else {
            "kernels.so"
        };
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        command.arg(&path).env_remove("LD_PRELOAD");
        if sanitize {
            command.args([
                "-O1",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all",
            ]);
        }
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a library of this repository's sources, whose initialisers do nothing.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{path:?} cannot be loaded");
        Some(Self {
            library: library as usize,
            found: Mutex::default(),
        })
    }

    fn symbol(&self, name: &str) -> usize {
        let name = CString::new(name).unwrap();
        // SAFETY: the library is never closed.
        let symbol = unsafe { libc::dlsym(self.library as *mut c_void, name.as_ptr()) };
        assert!(!symbol.is_null(), "no {name:?}");
        symbol as usize
    }

    /// Runs a kernel. Its pointers must lead to as much memory as its file says.
    pub fn launch(
        &self,
        name: &str,
        grid: [usize; 3],
        block: usize,
        args: &[Arg],
    ) -> Result<(), Failed> {
        let mut found = self.found.lock().unwrap();
        let (launch, count) = *found.entry(name.to_owned()).or_insert_with(|| {
            let launch = self.symbol(&format!("fk_{name}"));
            (launch, self.symbol(&format!("fk_{name}_nargs")))
        });
        drop(found);
        // SAFETY: the shim exports these with these signatures.
        let (launch, count) = unsafe {
            (
                std::mem::transmute::<usize, Launch>(launch),
                std::mem::transmute::<usize, Count>(count),
            )
        };
        // SAFETY: it reads nothing.
        let count = unsafe { count() };
        assert_eq!(count as usize, args.len(), "arguments of {name}");
        let mut args = args.to_vec();
        let mut pointers: Vec<*mut c_void> =
            args.iter_mut().map(|a| a.0.as_mut_ptr().cast()).collect();
        let grid = grid.map(|n| c_uint::try_from(n).unwrap());
        let block = [c_uint::try_from(block).unwrap(), 1, 1];
        // SAFETY: each argument has room for more bytes than the kernel reads; what pointers lead to is the caller's business, and AddressSanitizer's.
        match unsafe { launch(pointers.as_mut_ptr(), grid.as_ptr(), block.as_ptr(), 0) } {
            0 => Ok(()),
            code => Err(Failed(code)),
        }
    }
}

/// The first index that a kernel reported, and its bound.
pub fn reported(flag: &[u64]) -> Option<(i64, u64)> {
    (flag[1] != 0).then(|| (flag[0] as i64, flag[1]))
}
