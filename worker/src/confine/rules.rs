//! The one list of system calls and their answers. The filters and the names in reports are made from it.
//!
//! A call that is not in the list gets `ENOSYS`: libraries take that for an old kernel and fall back. So does
//! `clone3`, whose flags a filter cannot see; `clone`, whose flags it can, is what libraries fall back to. So does
//! `io_uring_setup`, which libraries probe.

use super::Mode;

/// What a system call gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// It is performed.
    Allow,
    /// It fails with this error, and whoever tried goes on.
    Errno(i32),
    /// The process reports its name and ends: nothing in a sound worker tries it.
    Trap,
}

/// When a rule's answer holds. Otherwise the call is performed. Arguments count from 0; all but pointers are
/// compared in their low 32 bits, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub(super) enum When {
    /// For all arguments.
    Always,
    /// In this mode.
    In(Mode),
    /// Unless the argument is one of these.
    Not(u8, &'static [u32]),
    /// If the argument is one of these.
    Is(u8, &'static [u32]),
    /// If the argument has one of these bits.
    Bit(u8, &'static [u32]),
    /// Unless the argument has this bit.
    NoBit(u8, u32),
    /// Unless the argument is the null pointer.
    NotNull(u8),
    /// Unless the argument is this process's id, or zero where that means the same.
    NotSelf(u8, Zero),
    /// If the first argument named is the value, unless the second one named is in the list.
    IsBut(u8, u32, u8, &'static [u32]),
}

/// What zero means in place of a process id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Zero {
    /// The calling process or thread.
    Own,
    /// Something else, such as a whole process group.
    Other,
}

/// A system call: its number here and libc's name of the constant.
pub(super) type Call = (libc::c_long, &'static str);

/// System calls with a common answer.
pub(super) struct Rule {
    pub(super) calls: &'static [Call],
    pub(super) answer: Answer,
    pub(super) when: When,
    /// The workers that it is for.
    pub(super) of: Workers,
}

/// Workers told apart by their device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workers {
    All,
    /// Those whose device is reached by files and `ioctl`.
    WithDevices,
    WithoutDevices,
}

impl Workers {
    pub(super) fn include(self, has_devices: bool) -> bool {
        match self {
            Self::All => true,
            Self::WithDevices => has_devices,
            Self::WithoutDevices => !has_devices,
        }
    }
}

macro_rules! calls {
    ($($name:ident)*) => { &[$((libc::$name, stringify!($name))),*] };
}

const fn rule(answer: Answer, when: When, calls: &'static [Call]) -> Rule {
    Rule {
        calls,
        answer,
        when,
        of: Workers::All,
    }
}

/// A rule that does not hold where a device is reached by files and `ioctl`.
const fn but_devices(rule: Rule) -> Rule {
    Rule {
        of: Workers::WithoutDevices,
        ..rule
    }
}

/// A rule that holds there alone.
const fn for_devices(rule: Rule) -> Rule {
    Rule {
        of: Workers::WithDevices,
        ..rule
    }
}

const ACCESS: Answer = Answer::Errno(libc::EACCES);
const PERM: Answer = Answer::Errno(libc::EPERM);

const EXEC: &[u32] = &[libc::PROT_EXEC as u32];
const EMPTY_PATH: u32 = libc::AT_EMPTY_PATH as u32;
const SOCKET: u32 = libc::SOL_SOCKET as u32;
const TCP: u32 = libc::IPPROTO_TCP as u32;
const STREAM: u32 = libc::SOCK_STREAM as u32;
const NONBLOCK: u32 = libc::SOCK_NONBLOCK as u32;
const CLOEXEC: u32 = libc::SOCK_CLOEXEC as u32;

/// The rules. A call may have several; of those that hold, the most severe answer is given.
pub(super) static RULES: &[Rule] = &[
    // What a server over inherited sockets, with compute threads and mapped weights, is made of.
    rule(
        Answer::Allow,
        When::Always,
        calls![
            // Descriptors it has.
            SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev
            SYS_close SYS_dup SYS_fstat SYS_lseek SYS_fadvise64 SYS_eventfd2
            SYS_recvfrom SYS_recvmsg SYS_shutdown SYS_getsockopt SYS_getsockname SYS_getpeername
            SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_ppoll
            // Memory.
            SYS_munmap SYS_mremap SYS_madvise SYS_brk
            // Threads and signals of its own.
            SYS_futex SYS_set_robust_list SYS_rseq SYS_membarrier SYS_set_tid_address
            SYS_sched_yield SYS_sched_getaffinity SYS_getcpu SYS_exit SYS_exit_group SYS_restart_syscall
            SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_sigaltstack
            // How members ended that it leads.
            SYS_wait4
            // Who, when, how much.
            SYS_getpid SYS_gettid SYS_getppid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid
            SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday
            SYS_getrandom SYS_getrlimit SYS_getrusage SYS_sysinfo SYS_times SYS_uname
        ],
    ),
    #[cfg(target_arch = "x86_64")]
    rule(
        Answer::Allow,
        When::Always,
        calls![SYS_epoll_wait SYS_poll SYS_time],
    ),
    // Anything that takes a path. Innocents try: glibc's `free` (overcommit_memory), a panic (maps, the program),
    // `available_parallelism` (cgroups), a time zone.
    rule(
        ACCESS,
        When::Always,
        calls![
            SYS_openat2 SYS_faccessat SYS_faccessat2 SYS_readlinkat SYS_getcwd SYS_statfs SYS_truncate
            SYS_chdir SYS_fchdir SYS_mkdirat SYS_mknodat SYS_unlinkat SYS_renameat SYS_renameat2 SYS_linkat SYS_symlinkat
            SYS_fchmodat SYS_fchownat SYS_utimensat SYS_getxattr SYS_lgetxattr SYS_setxattr SYS_lsetxattr
            SYS_listxattr SYS_llistxattr SYS_removexattr SYS_lremovexattr SYS_inotify_add_watch
        ],
    ),
    but_devices(rule(ACCESS, When::Always, calls![SYS_openat])),
    #[cfg(target_arch = "x86_64")]
    but_devices(rule(ACCESS, When::Always, calls![SYS_open])),
    #[cfg(target_arch = "x86_64")]
    rule(
        ACCESS,
        When::Always,
        calls![
            SYS_creat SYS_readlink SYS_mkdir SYS_rmdir SYS_mknod SYS_unlink
            SYS_rename SYS_link SYS_symlink SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_futimesat
        ],
    ),
    #[cfg(target_arch = "x86_64")]
    but_devices(rule(
        ACCESS,
        When::Always,
        calls![SYS_stat SYS_lstat SYS_access],
    )),
    // How `fstat` is done on an open file. A path that is given nevertheless is followed: neither a filter nor
    // landlock stops an exploit from learning that a file exists and how long it is.
    rule(ACCESS, When::NoBit(2, EMPTY_PATH), calls![SYS_statx]),
    but_devices(rule(
        ACCESS,
        When::NoBit(3, EMPTY_PATH),
        calls![SYS_newfstatat],
    )),
    // A driver has one for each of its threads.
    but_devices(rule(
        Answer::Errno(libc::ENOSYS),
        When::Always,
        calls![SYS_pipe2],
    )),
    // What the scheduler shares with a worker is of a fixed size.
    rule(
        PERM,
        When::Always,
        calls![SYS_ftruncate SYS_fallocate SYS_fchmod SYS_fchown SYS_fsetxattr],
    ),
    rule(
        PERM,
        When::NotSelf(0, Zero::Own),
        calls![SYS_sched_setaffinity SYS_sched_getattr SYS_sched_setattr],
    ),
    // Less urgent than others only: there is no capability for the opposite.
    rule(
        PERM,
        When::Not(0, &[libc::PRIO_PROCESS]),
        calls![SYS_setpriority],
    ),
    rule(PERM, When::NotSelf(1, Zero::Own), calls![SYS_setpriority]),
    // Repeating NO_NEW_PRIVS is part of adding a filter. The parent-death signal is set before, and stays.
    rule(
        PERM,
        When::Not(
            0,
            &[
                libc::PR_SET_NAME as u32,
                libc::PR_GET_NAME as u32,
                libc::PR_SET_VMA as u32,
                libc::PR_SET_NO_NEW_PRIVS as u32,
                libc::PR_GET_NO_NEW_PRIVS as u32,
                libc::PR_GET_DUMPABLE as u32,
                libc::PR_GET_PDEATHSIG as u32,
                libc::PR_GET_SECCOMP as u32,
            ],
        ),
        calls![SYS_prctl],
    ),
    rule(
        Answer::Errno(libc::EINVAL),
        When::Not(
            1,
            &[
                libc::F_DUPFD as u32,
                libc::F_DUPFD_CLOEXEC as u32,
                libc::F_GETFD as u32,
                libc::F_SETFD as u32,
                libc::F_GETFL as u32,
                libc::F_SETFL as u32,
                libc::F_GET_SEALS as u32,
            ],
        ),
        calls![SYS_fcntl],
    ),
    but_devices(rule(
        Answer::Errno(libc::ENOTTY),
        When::Not(
            1,
            &[
                libc::FIONBIO as u32,
                libc::FIONREAD as u32,
                libc::FIOCLEX as u32,
            ],
        ),
        calls![SYS_ioctl],
    )),
    rule(
        Answer::Errno(libc::ENOPROTOOPT),
        When::Not(1, &[SOCKET, TCP]),
        calls![SYS_setsockopt],
    ),
    rule(
        Answer::Errno(libc::ENOPROTOOPT),
        When::IsBut(
            1,
            SOCKET,
            2,
            &[
                libc::SO_SNDBUF as u32,
                libc::SO_RCVBUF as u32,
                libc::SO_KEEPALIVE as u32,
                libc::SO_LINGER as u32,
            ],
        ),
        calls![SYS_setsockopt],
    ),
    rule(
        Answer::Errno(libc::ENOPROTOOPT),
        When::IsBut(
            1,
            TCP,
            2,
            &[
                libc::TCP_NODELAY as u32,
                libc::TCP_KEEPIDLE as u32,
                libc::TCP_KEEPINTVL as u32,
                libc::TCP_KEEPCNT as u32,
                libc::TCP_USER_TIMEOUT as u32,
                libc::TCP_QUICKACK as u32,
            ],
        ),
        calls![SYS_setsockopt],
    ),
    // Conversations it was not given.
    rule(
        Answer::Trap,
        When::Always,
        calls![SYS_socket SYS_bind SYS_connect SYS_listen SYS_accept],
    ),
    rule(Answer::Trap, When::In(Mode::Inherited), calls![SYS_accept4]),
    // An address in a message means something to datagrams, which are not here, and to TCP's fast open, by which a
    // socket that lost its peer would connect to another.
    rule(Answer::Trap, When::NotNull(4), calls![SYS_sendto]),
    rule(
        Answer::Trap,
        When::Bit(2, &[libc::MSG_FASTOPEN as u32]),
        calls![SYS_sendmsg],
    ),
    // A connected pair of streams reaches nobody. tokio with its `signal` feature makes one for each process.
    rule(
        Answer::Trap,
        When::Not(0, &[libc::AF_UNIX as u32]),
        calls![SYS_socketpair],
    ),
    rule(
        Answer::Trap,
        When::Not(
            1,
            &[
                STREAM,
                STREAM | NONBLOCK,
                STREAM | CLOEXEC,
                STREAM | NONBLOCK | CLOEXEC,
            ],
        ),
        calls![SYS_socketpair],
    ),
    // Programs and processes; threads are made by the same call. A driver that misses a device's file has a program make it, if it can:
    // the C library starts it by `clone`.
    rule(Answer::Trap, When::Always, calls![SYS_execve SYS_execveat]),
    #[cfg(target_arch = "x86_64")]
    rule(Answer::Trap, When::Always, calls![SYS_fork SYS_vfork]),
    but_devices(rule(
        Answer::Trap,
        When::NoBit(0, libc::CLONE_THREAD as u32),
        calls![SYS_clone],
    )),
    for_devices(rule(
        PERM,
        When::NoBit(0, libc::CLONE_THREAD as u32),
        calls![SYS_clone],
    )),
    rule(
        Answer::Trap,
        When::Bit(
            0,
            &[
                libc::CLONE_NEWNS as u32,
                libc::CLONE_NEWCGROUP as u32,
                libc::CLONE_NEWUTS as u32,
                libc::CLONE_NEWIPC as u32,
                libc::CLONE_NEWUSER as u32,
                libc::CLONE_NEWPID as u32,
                libc::CLONE_NEWNET as u32,
            ],
        ),
        calls![SYS_clone],
    ),
    // Code that did not come from a file of the program.
    rule(
        Answer::Trap,
        When::Bit(2, EXEC),
        calls![SYS_mmap SYS_mprotect],
    ),
    rule(
        Answer::Trap,
        When::Always,
        calls![SYS_memfd_create SYS_personality],
    ),
    #[cfg(target_arch = "x86_64")]
    rule(
        Answer::Trap,
        When::Always,
        calls![SYS_modify_ldt SYS_iopl SYS_ioperm],
    ),
    // Other processes: the scheduler and other workers have the same user id.
    rule(
        Answer::Trap,
        When::NotSelf(0, Zero::Other),
        calls![SYS_kill SYS_tgkill],
    ),
    rule(
        Answer::Trap,
        When::NotSelf(0, Zero::Own),
        calls![SYS_prlimit64],
    ),
    rule(
        Answer::Trap,
        When::Always,
        calls![
            SYS_tkill SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev
            SYS_process_madvise SYS_pidfd_open SYS_pidfd_getfd SYS_pidfd_send_signal SYS_kcmp SYS_move_pages SYS_migrate_pages
            SYS_setsid SYS_setpgid
            SYS_shmget SYS_shmat SYS_shmctl SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl SYS_semget SYS_semop SYS_semctl
            SYS_mq_open SYS_mq_unlink
        ],
    ),
    // Signals to others by way of a descriptor's owner, and input to a terminal.
    rule(
        Answer::Trap,
        When::Is(1, &[libc::F_SETOWN as u32, F_SETOWN_EX, F_SETSIG]),
        calls![SYS_fcntl],
    ),
    rule(
        Answer::Trap,
        When::Is(1, &[FIOSETOWN, SIOCSPGRP, libc::TIOCSTI as u32]),
        calls![SYS_ioctl],
    ),
    // The kernel's broad sides, and what only an administrator does.
    rule(
        Answer::Trap,
        When::Always,
        calls![
            SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_add_key SYS_request_key SYS_keyctl
            SYS_fanotify_init SYS_fanotify_mark SYS_name_to_handle_at SYS_open_by_handle_at
            SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_setns SYS_unshare SYS_open_tree SYS_move_mount
            SYS_fsopen SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_quotactl SYS_swapon SYS_swapoff SYS_acct
            SYS_setuid SYS_setgid SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_setfsuid SYS_setfsgid
            SYS_setgroups SYS_capset
            SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_reboot SYS_vhangup SYS_syslog
            SYS_sethostname SYS_setdomainname SYS_settimeofday SYS_clock_settime SYS_adjtimex SYS_clock_adjtime
        ],
    ),
];

// Not in the libc crate; asm-generic/fcntl.h and asm-generic/sockios.h, which both architectures use.
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
const FIOSETOWN: u32 = 0x8901;
const SIOCSPGRP: u32 = 0x8902;

/// A call's name without libc's prefix, if a rule mentions it. Neither allocates nor panics.
pub(super) fn name(number: libc::c_long) -> Option<&'static str> {
    RULES
        .iter()
        .flat_map(|rule| rule.calls)
        .find(|(other, _)| *other == number)
        .map(|(_, name)| short(name))
}

pub(super) fn short(name: &'static str) -> &'static str {
    name.strip_prefix("SYS_").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_has_an_unconditional_answer_beside_another() {
        let all = || {
            RULES
                .iter()
                .flat_map(|rule| rule.calls.iter().map(move |call| (call, rule)))
        };
        for ((number, name), rule) in all() {
            if matches!(rule.when, When::Always | When::In(_)) {
                let times = all().filter(|((other, _), _)| other == number).count();
                assert_eq!(times, 1, "{name}");
            }
        }
    }

    #[test]
    fn calls_have_their_plain_names() {
        assert_eq!(name(libc::SYS_socket), Some("socket"));
        assert_eq!(name(libc::SYS_clone3), None);
    }
}
