//! Compute threads that are woken once per plan execution and meet at spinning barriers inside it.

use std::{
    hint,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread,
    time::{Duration, Instant},
};

use super::apart::{self, Apart};

/// Spins before a waiting thread parks: some tens of microseconds, longer than a kernel's imbalance. It must
/// park then, not yield: others of the job wait for it, and a yield gives a busy neighbour's whole time slice away.
const SPINS: u32 = 4_000;

/// How often a thread of the pool lets others have its processor, at most: between jobs, before it begins one or once it is done
/// with its part.
///
/// Those who pass messages on wake while it computes. A system whose scheduler protects a turn that has just begun (EEVDF)
/// has them wait then, and looks again only when somebody else wakes or its clock ticks, up to 4 ms later.
const GIVES: Duration = Duration::from_micros(500);

/// When a thread last let others have its processor.
struct Gave(Instant);

impl Gave {
    fn now() -> Self {
        Self(Instant::now())
    }

    /// Lets them, if it is time to. Whoever computes there, too, gets a turn by that, so this thread's should be short ones.
    fn again(&mut self) {
        if self.0.elapsed() >= GIVES {
            thread::yield_now();
            *self = Self::now();
        }
    }
}

/// A value on a cache line of its own.
#[repr(align(64))]
struct Line<T>(T);

type Job<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    parts: usize,
    /// How many parts the job has (the lower half), and a number that rises with every job: a thread that sees a new
    /// value runs the job if it has a part in it. One value, so that nobody takes one job's parts for another's.
    generation: Line<AtomicU64>,
    /// The job as a pointer to a `Job<'_>` on the stack of the thread that waits for its end.
    job: AtomicPtr<()>,
    /// Threads that have finished the job.
    finished: Line<AtomicUsize>,
    arrived: Line<AtomicUsize>,
    barrier: Line<AtomicU32>,
    stop: AtomicBool,
    /// Per part: it parks, or is about to.
    asleep: Vec<Line<AtomicBool>>,
    /// Per part: whom to unpark. Locked by those who wake, hence rarely.
    threads: Mutex<Vec<Option<thread::Thread>>>,
    apart: Apart,
}

impl Shared {
    /// Announces a job of so many parts.
    fn begin(&self, parts: usize) {
        // Only the pool's owner does, one job at a time.
        let number = (self.generation.0.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        let generation = (number << 32) | parts as u64;
        self.generation.0.store(generation, Ordering::Release);
    }

    /// Spins, then sleeps, until `ready`. Whoever makes it ready calls [`Shared::wake`] afterwards.
    fn wait(&self, part: usize, ready: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if ready() {
                return;
            }
            hint::spin_loop();
        }
        let asleep = &self.asleep[part].0;
        self.apart.sleeps(part);
        loop {
            asleep.store(true, Ordering::SeqCst);
            // Paired with the fence in `wake`: either we see what was made ready, or we are seen asleep.
            fence(Ordering::SeqCst);
            if ready() {
                asleep.store(false, Ordering::Relaxed);
                return;
            }
            thread::park();
            if ready() {
                // Who woke it knows no more of it: it sleeps until it says otherwise.
                asleep.store(false, Ordering::Relaxed);
                self.apart.woken(part);
                return;
            }
        }
    }

    /// Wakes, as part `me`, those of the first `parts` who sleep. Costs a fence and a load per part when nobody does.
    fn wake(&self, me: usize, parts: usize) {
        fence(Ordering::SeqCst);
        for (part, asleep) in self.asleep.iter().enumerate().take(parts) {
            if asleep.0.load(Ordering::Relaxed) && asleep.0.swap(false, Ordering::SeqCst) {
                self.apart.say(me);
                let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(Some(thread)) = threads.get(part) {
                    thread.unpark();
                }
            }
        }
    }
}

/// The threads. The caller of [`Pool::run`] is part 0, so `parts − 1` threads are started.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
    gave: Gave,
}

/// Lets the parts of a running job meet.
#[derive(Clone, Copy)]
pub struct Barrier<'a> {
    shared: &'a Shared,
    part: usize,
    parts: usize,
}

impl Barrier<'_> {
    /// Waits until every part of the job has come here.
    pub fn wait(&self) {
        let (shared, parts) = (self.shared, self.parts);
        if parts == 1 {
            return;
        }
        let generation = shared.barrier.0.load(Ordering::Acquire);
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == parts {
            shared.arrived.0.store(0, Ordering::Relaxed);
            shared
                .barrier
                .0
                .store(generation.wrapping_add(1), Ordering::Release);
            shared.wake(self.part, parts);
        } else {
            shared.wait(self.part, || {
                shared.barrier.0.load(Ordering::Acquire) != generation
            });
        }
    }
}

impl Pool {
    /// Starts `parts − 1` threads (at least one part).
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(parts: usize) -> std::io::Result<Self> {
        Self::start(parts, |_| Ok(()))
    }

    /// One part per core, each of which stays on it; the caller's thread on the first.
    ///
    /// # Errors
    /// When there is no such core, this process may not use it, or the system gives no thread. The caller's thread may run
    /// where it could before then.
    pub fn pinned(cores: &[u32]) -> std::io::Result<Self> {
        let before = apart::cores()?;
        // A thread may run where the one that starts it may.
        let stay = |part: usize| cores.get(part).map_or(Ok(()), |core| apart::stay_on(*core));
        let pool = Self::start(cores.len(), stay);
        if pool.is_err() {
            apart::allow(&before)?;
        }
        pool
    }

    /// `seat` is called before each thread is started, and for this one, part 0, in the end.
    fn start(parts: usize, seat: impl Fn(usize) -> std::io::Result<()>) -> std::io::Result<Self> {
        let parts = parts.max(1);
        let shared = Arc::new(Shared {
            parts,
            generation: Line(AtomicU64::new(0)),
            job: AtomicPtr::new(std::ptr::null_mut()),
            finished: Line(AtomicUsize::new(0)),
            arrived: Line(AtomicUsize::new(0)),
            barrier: Line(AtomicU32::new(0)),
            stop: AtomicBool::new(false),
            asleep: (0..parts).map(|_| Line(AtomicBool::new(false))).collect(),
            threads: Mutex::new(vec![None; parts]),
            apart: Apart::new(parts),
        });
        let mut pool = Self {
            shared,
            threads: Vec::with_capacity(parts - 1),
            gave: Gave::now(),
        };
        for part in 1..parts {
            let shared = Arc::clone(&pool.shared);
            seat(part)?;
            let thread = thread::Builder::new()
                .name(format!("compute-{part}"))
                .spawn(move || serve(&shared, part))?;
            pool.lock_threads()[part] = Some(thread.thread().clone());
            pool.threads.push(thread);
        }
        seat(0)?;
        Ok(pool)
    }

    fn lock_threads(&self) -> std::sync::MutexGuard<'_, Vec<Option<thread::Thread>>> {
        self.shared
            .threads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.shared.parts
    }

    /// Runs `job(part, barrier)` on every part and returns when all have finished. `&mut`: one job
    /// at a time.
    pub fn run(&mut self, job: impl Fn(usize, Barrier<'_>) + Sync) {
        self.run_on(self.parts(), job);
    }

    /// The same on the first `parts` parts only (one at least, and no more than there are); the other threads sleep on.
    pub fn run_on(&mut self, parts: usize, job: impl Fn(usize, Barrier<'_>) + Sync) {
        // Whoever was told of the last job's results has them before this one begins.
        self.gave.again();
        let shared = &*self.shared;
        let parts = parts.clamp(1, shared.parts);
        let call = |part: usize| {
            job(
                part,
                Barrier {
                    shared,
                    part,
                    parts,
                },
            );
        };
        // A panic of part 0 must not unwind past threads that still use `job`: it ends the process,
        // which is what worker processes are for.
        let guard = AbortOnUnwind;
        if parts == 1 {
            call(0);
            std::mem::forget(guard);
            return;
        }
        let me = thread::current();
        if self.lock_threads()[0].as_ref().map(thread::Thread::id) != Some(me.id()) {
            self.lock_threads()[0] = Some(me);
        }
        let job: Job<'_> = &call;
        shared.finished.0.store(0, Ordering::Relaxed);
        shared
            .job
            .store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        shared.begin(parts);
        shared.wake(0, parts);
        job(0);
        shared.wait(0, || shared.finished.0.load(Ordering::Acquire) == parts - 1);
        std::mem::forget(guard);
    }
}

struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}

fn serve(shared: &Shared, part: usize) {
    let mut seen = 0;
    let mut gave = Gave::now();
    loop {
        shared.wait(part, || shared.generation.0.load(Ordering::Acquire) != seen);
        seen = shared.generation.0.load(Ordering::Acquire);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // A job without it may be over by now: nothing of it may be touched.
        if part >= (seen & u64::from(u32::MAX)) as usize {
            continue;
        }
        let job = shared.job.load(Ordering::Relaxed).cast::<Job<'_>>();
        let guard = AbortOnUnwind;
        // SAFETY: `run_on` stored the address of a live `Job` before it announced the job (Release, seen here by
        // Acquire) and, as this thread has a part in it, does not return before `finished` counts this thread.
        unsafe { (*job)(part) };
        std::mem::forget(guard);
        shared.finished.0.fetch_add(1, Ordering::Release);
        shared.wake(part, 1);
        gave.again();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.begin(self.shared.parts);
        self.shared.wake(0, self.shared.parts);
        for thread in self.threads.drain(..) {
            // A compute thread never panics: a panic aborts the process.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_every_job_and_barriers_hold() {
        for parts in [1, 2, 3] {
            let mut pool = Pool::new(parts).unwrap();
            let counter = AtomicUsize::new(0);
            for round in 1..=200 {
                pool.run(|_, barrier| {
                    counter.fetch_add(1, Ordering::Relaxed);
                    barrier.wait();
                    assert_eq!(counter.load(Ordering::Relaxed), round * parts * 2 - parts);
                    barrier.wait();
                    counter.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(counter.load(Ordering::Relaxed), round * parts * 2);
            }
        }
    }

    #[test]
    fn a_parked_pool_wakes() {
        let mut pool = Pool::new(2).unwrap();
        for _ in 0..3 {
            thread::sleep(std::time::Duration::from_millis(20));
            let ran = AtomicUsize::new(0);
            pool.run(|_, _| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.load(Ordering::Relaxed), 2);
        }
    }

    #[test]
    fn a_job_of_fewer_parts_runs_on_those_alone() {
        let mut pool = Pool::new(3).unwrap();
        for round in 0..300 {
            let parts = [1, 3, 2, 0, 9][round % 5];
            let there = parts.clamp(1, 3);
            let ran = [const { AtomicUsize::new(0) }; 3];
            let counter = AtomicUsize::new(0);
            pool.run_on(parts, |part, barrier| {
                ran[part].fetch_add(1, Ordering::Relaxed);
                counter.fetch_add(1, Ordering::Relaxed);
                barrier.wait();
                assert_eq!(counter.load(Ordering::Relaxed), there);
            });
            let ran = ran.map(AtomicUsize::into_inner);
            assert_eq!(ran, [0, 1, 2].map(|part| usize::from(part < there)));
            if round % 50 == 0 {
                thread::sleep(std::time::Duration::from_millis(5));
            }
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn pinned_parts_stay_on_their_cores() {
        // On a thread of its own, which stays where it is put.
        let test = || {
            let all = apart::cores().unwrap();
            let mine: Vec<u32> = (0..1024).filter(|&c| all.is_set(c as usize)).collect();
            let gone = Pool::pinned(&[mine[0], 5000]).err().unwrap();
            assert!(gone.to_string().starts_with("core 5000: "), "{gone}");
            assert_eq!(apart::cores().unwrap(), all);
            let mut pool = Pool::pinned(&mine).unwrap();
            let found = Mutex::new(vec![Vec::new(); mine.len()]);
            pool.run(|part, barrier| {
                barrier.wait();
                let own = apart::cores().unwrap();
                let own = (0..1024).filter(|&c| own.is_set(c as usize)).collect();
                found.lock().unwrap()[part] = own;
            });
            let found: Vec<u32> = found.into_inner().unwrap().concat();
            assert_eq!(found, mine);
        };
        thread::spawn(test).join().unwrap();
    }
}
