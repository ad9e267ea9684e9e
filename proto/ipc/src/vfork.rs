//! A child that has this process's memory until it becomes a program of its own, as by `vfork(2)`.
//!
//! A fork copies the tables of all memory, which was seen to take 3 ms where a scheduler served, and until its child is another
//! program whoever writes to a page waits for a copy of it: answers stood still for 10 ms each time that a worker began.

use std::{io, ptr};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

/// What a child may put on its stack: some system calls with a few arguments each.
const STACK: usize = 64 << 10;

/// Memory for a child's stack, below which nothing can be written.
struct Stack {
    base: *mut libc::c_void,
    guard: usize,
}

impl Stack {
    fn new() -> io::Result<Self> {
        let guard = rustix::param::page_size();
        let flags = MapFlags::PRIVATE | MapFlags::STACK;
        // SAFETY: new memory, wherever there is room for it.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), guard + STACK, ProtFlags::empty(), flags)?
        };
        let stack = Self { base, guard };
        let usable = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the upper part of what was just made, which nobody else knows.
        unsafe { rustix::mm::mprotect(base.byte_add(guard), STACK, usable)? };
        Ok(stack)
    }

    /// Where it begins; it grows towards lower addresses. Aligned for any call: its size is.
    fn top(&self) -> *mut libc::c_void {
        // SAFETY: the end of the same memory.
        unsafe { self.base.byte_add(self.guard + STACK) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: its own memory, which no child has any more.
        let _ = unsafe { rustix::mm::munmap(self.base, self.guard + STACK) };
    }
}

/// Makes a child that calls `child` and exits with what it returns, unless it became another program before. This thread waits
/// until it did either, or was killed. The child's id is returned; who reaps it is the caller.
///
/// # Errors
/// What the system refuses.
///
/// # Safety
/// No signal may have a handler in this thread, and `child` calls nothing but what may be called after a fork: system calls,
/// on numbers and on memory that it was given. It has this thread's, `errno` among it, while all other threads go on.
pub(crate) unsafe fn vfork(child: &mut dyn FnMut() -> libc::c_int) -> io::Result<libc::pid_t> {
    type Call<'a> = &'a mut dyn FnMut() -> libc::c_int;
    extern "C" fn begin(call: *mut libc::c_void) -> libc::c_int {
        // SAFETY: what `vfork` passed, whose frame lives on, for its thread waits for this child.
        let call = unsafe { &mut *call.cast::<Call<'_>>() };
        call()
    }
    let stack = Stack::new()?;
    let mut call: Call<'_> = child;
    // SAFETY: the stack is the child's alone, and lives until the child has memory of its own, or none, for the kernel has this
    // thread wait until then. What it calls is the caller's promise.
    let pid = unsafe {
        libc::clone(
            begin,
            stack.top(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            (&raw mut call).cast(),
        )
    };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has a child do this, and tells its id and how it ended.
    fn run(mut child: impl FnMut() -> libc::c_int) -> (libc::pid_t, libc::c_int) {
        // SAFETY: tests' children make a system call at most, and write to memory that they were given.
        let pid = unsafe { vfork(&mut child) }.unwrap();
        let mut status = 0;
        // SAFETY: our own child, and a place for what is told of it.
        let reaped = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(reaped, pid);
        (pid, status)
    }

    #[test]
    fn the_child_has_this_memory_and_is_a_process_of_its_own() {
        let mut seen = 0;
        let (pid, status) = run(|| {
            // SAFETY: always succeeds.
            seen = unsafe { libc::getpid() };
            7
        });
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7);
        assert_eq!(seen, pid, "it wrote to this process's memory");
        assert_ne!(seen.unsigned_abs(), std::process::id());
    }

    #[test]
    fn whoever_leaves_a_stack_ends_alone() {
        let stack = Stack::new().unwrap();
        let write = |at: *mut libc::c_void| {
            run(|| {
                // SAFETY: the stack is nobody's, and what lies below it ends this child only.
                unsafe { at.cast::<u8>().write_volatile(1) };
                0
            })
        };
        let lowest = stack.top().wrapping_byte_sub(STACK);
        for within in [lowest, stack.top().wrapping_byte_sub(1)] {
            assert_eq!(write(within).1, 0);
        }
        let (_, status) = write(lowest.wrapping_byte_sub(1));
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
    }
}
