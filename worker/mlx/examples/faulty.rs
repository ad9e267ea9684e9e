//! The worker linked with MLX, which ends on command in the ways that MLX ends processes: for `tests/system.rs`.
//!
//! Whoever knows its process id orders an end by a real-time signal, counted from the first.

use std::{io, process::ExitCode, ptr};

use clap::Parser;
use hotcell_kernels::mlx::MlxBackend;
use hotcell_worker::{config::Cli, program};
use mlx_sys::{mlx_array, mlx_array_new, mlx_array_new_float32, mlx_set_error_handler};

unsafe extern "C" {
    /// `std::terminate`, which an exception that nobody catches ends in.
    #[link_name = "_ZSt9terminatev"]
    fn terminate() -> !;
}

/// More than any machine has.
const HUGE: [i32; 2] = [1 << 30, 1 << 20];

/// An array of ones of this shape, evaluated.
fn ones(shape: &[i32]) {
    // SAFETY: the list has as many numbers as it says; what MLX does of it is what this program is for.
    unsafe {
        let stream = mlx_sys::mlx_default_cpu_stream_new();
        let mut all: mlx_array = mlx_array_new();
        let one = mlx_array_new_float32(1.0);
        let dtype = mlx_sys::mlx_dtype__MLX_FLOAT32;
        mlx_sys::mlx_full(&mut all, shape.as_ptr(), shape.len(), one, dtype, stream);
        let mut sum = mlx_array_new();
        mlx_sys::mlx_add(&mut sum, all, all, stream);
        mlx_sys::mlx_array_eval(sum);
    }
}

extern "C" fn end(signal: libc::c_int) {
    match signal - libc::SIGRTMIN() {
        // SAFETY: ends the process.
        0 => unsafe { terminate() },
        1 => {
            // SAFETY: puts MLX's own handler back, which ends the process at the first failure: a shape below 0.
            unsafe { mlx_set_error_handler(None, ptr::null_mut(), None) };
            ones(&[-1]);
        }
        _ => ones(&HUGE),
    }
}

fn main() -> ExitCode {
    for order in 0..3 {
        // SAFETY: zeroes are a valid `sigaction`, and the handler has the signature that it asks for. What it does is
        // allowed in no handler; the process is meant to end of it.
        let done = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int) = end;
            action.sa_sigaction = handler as usize;
            libc::sigaction(libc::SIGRTMIN() + order, &action, ptr::null_mut())
        };
        if done != 0 {
            eprintln!("error: no faults here: {}", io::Error::last_os_error());
            return ExitCode::FAILURE;
        }
    }
    program::run(Cli::parse(), &[&MlxBackend]).into()
}
