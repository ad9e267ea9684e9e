//! The last words of a process that tried a forbidden system call.

use std::io;

use super::rules;
use crate::exit::Exit;

/// The kernel's `siginfo_t` of a SIGSYS on 64-bit machines (signal(7), `_sigsys`).
#[repr(C)]
struct SysInfo {
    signo: libc::c_int,
    errno: libc::c_int,
    code: libc::c_int,
    _padding: libc::c_int,
    call_addr: *const libc::c_void,
    syscall: libc::c_int,
    arch: libc::c_uint,
}

const _: () = assert!(size_of::<SysInfo>() <= size_of::<libc::siginfo_t>());

/// `si_code` of a SIGSYS that a filter caused.
const SYS_SECCOMP: libc::c_int = 1;

/// Makes SIGSYS write one line to standard error and end the process with [`Exit::ForbiddenSystemCall`].
///
/// # Errors
/// What `sigaction` reports.
pub(super) fn install() -> io::Result<()> {
    // SAFETY: zeroes are a valid `sigaction`; the handler has the signature that SA_SIGINFO asks for, and is
    // async-signal-safe.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_trap;
        action.sa_sigaction = handler as usize;
        // On the alternative stack: the call may have come from the end of the usual one.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigfillset(&mut action.sa_mask);
        libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut())
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_trap(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel's own.
    unsafe { crate::last_words::note(signal, info, context) };
    let mut number = -1;
    if !info.is_null() {
        // SAFETY: the kernel hands a handler with SA_SIGINFO a whole `siginfo_t`, which is larger than `SysInfo`;
        // its union is all zeroes or plain numbers.
        let info = unsafe { &*info.cast::<SysInfo>() };
        if info.code == SYS_SECCOMP {
            number = info.syscall;
        }
    }
    let mut line = Line::new();
    line.push(b"forbidden system call ");
    line.push(rules::name(number.into()).unwrap_or("?").as_bytes());
    line.push(b"(");
    line.push_number(number);
    line.push(b")\n");
    crate::last_words::error(line.text());
    // SAFETY: both calls are async-signal-safe; the pointer and length are of `line`'s own bytes. Nothing is left to
    // do when the write fails.
    unsafe {
        libc::write(2, line.bytes.as_ptr().cast(), line.length);
        libc::_exit(Exit::ForbiddenSystemCall.code());
    }
}

/// A short text without the allocator, cut off at its capacity.
struct Line {
    bytes: [u8; 96],
    length: usize,
}

impl Line {
    fn new() -> Self {
        Line {
            bytes: [0; 96],
            length: 0,
        }
    }

    fn push(&mut self, text: &[u8]) {
        for byte in text {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = *byte;
                self.length += 1;
            }
        }
    }

    /// Without the line's end.
    fn text(&self) -> &str {
        let bytes = self.bytes.get(..self.length).unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default().trim_end()
    }

    fn push_number(&mut self, number: i32) {
        if number < 0 {
            self.push(b"-");
        }
        let mut rest = number.unsigned_abs();
        let mut digits = [0u8; 10];
        let mut count = 0;
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
            count += 1;
            if rest == 0 {
                break;
            }
        }
        self.push(digits.get(digits.len() - count..).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_holds_numbers_and_never_overflows() {
        for number in [0, 7, 41, -1, i32::MAX, i32::MIN] {
            let mut line = Line::new();
            line.push_number(number);
            assert_eq!(line.bytes[..line.length], *number.to_string().as_bytes());
        }
        let mut line = Line::new();
        line.push(&[b'x'; 200]);
        assert_eq!(line.length, 96);
    }
}
