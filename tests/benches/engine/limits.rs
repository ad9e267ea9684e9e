//! What this machine can do at most: read memory, and multiply and add, on all threads at once.

use std::{hint::black_box, sync::Barrier, thread, time::Instant};

/// How often each way is tried; the best counts.
const TRIES: usize = 3;
/// Seconds that the loops that multiply take at least.
const LONG_ENOUGH: f64 = 0.1;

/// Seconds from the beginning of the first of so many threads to the end of the last one.
fn at_once(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let run = |thread: usize| {
        barrier.wait();
        let start = Instant::now();
        work(thread);
        (start, Instant::now())
    };
    let times: Vec<(Instant, Instant)> = thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || run(thread)))
            .collect();
        let joined = all.into_iter().map(|t| t.join().expect("no panic"));
        joined.collect()
    });
    let start = times.iter().map(|t| t.0).min();
    let end = times.iter().map(|t| t.1).max();
    match (start, end) {
        (Some(start), Some(end)) => (end - start).as_secs_f64(),
        _ => f64::NAN,
    }
}

/// A loop: reads bytes in one or four streams, and returns a number that depends on them all.
type Read = fn(&[u8]) -> u64;
/// A loop that multiplies and adds, in so many rounds.
type Multiply = fn(usize) -> u64;

/// The loops of an instruction set.
struct Loops {
    name: &'static str,
    read: [Read; 2],
    /// Products and sums of 8-bit integers, and how many of them a round has.
    integer: (Multiply, f64),
    /// The same of `f32`.
    float: (Multiply, f64),
}

/// Memory to read, and the machine that reads it.
pub struct Machine {
    memory: Vec<u8>,
    threads: usize,
    loops: Loops,
}

impl Machine {
    /// With so many bytes of memory, which should be much more than all caches together.
    pub fn new(bytes: usize) -> Self {
        Self {
            // Not zeros: those would all be one page.
            memory: vec![1; bytes],
            threads: thread::available_parallelism().map_or(1, |n| n.get()),
            loops: loops(),
        }
    }

    /// Threads of all that is measured.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// By which instructions it is measured.
    pub fn instructions(&self) -> &'static str {
        self.loops.name
    }

    /// Bytes per second that all threads read together.
    pub fn read(&self) -> f64 {
        let part = self.memory.len() / self.threads;
        let mut best = 0f64;
        for read in self.loops.read.into_iter().cycle().take(2 * TRIES) {
            let seconds = at_once(self.threads, |thread| {
                black_box(read(black_box(&self.memory[thread * part..][..part])));
            });
            best = best.max((part * self.threads) as f64 / seconds);
        }
        best
    }

    /// Products and sums of 8-bit integers per second that all threads make together.
    pub fn integer(&self) -> f64 {
        self.multiply(self.loops.integer)
    }

    /// Products and sums of `f32` per second that all threads make together.
    pub fn float(&self) -> f64 {
        self.multiply(self.loops.float)
    }

    fn multiply(&self, (multiply, each): (Multiply, f64)) -> f64 {
        let (mut rounds, mut best, mut tries) = (1usize << 12, 0f64, 0);
        while tries < TRIES {
            let seconds = at_once(self.threads, |_| {
                black_box(multiply(black_box(rounds)));
            });
            if seconds < LONG_ENOUGH {
                rounds *= 2;
                continue;
            }
            best = best.max(each * (rounds * self.threads) as f64 / seconds);
            tries += 1;
        }
        best
    }
}

fn loops() -> Loops {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
            return x86::AVX512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return x86::AVX2;
        }
    }
    PORTABLE
}

const PORTABLE: Loops = Loops {
    name: "portable loops, which may be far from what the machine can do",
    read: [portable_read, portable_read],
    integer: (portable_integer, 128.0),
    float: (portable_float, 64.0),
};

fn portable_read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    let sum = |sum: u64, word: &[u8; 8]| sum.wrapping_add(u64::from_ne_bytes(*word));
    words.iter().fold(0, sum)
}

fn portable_integer(rounds: usize) -> u64 {
    let factors: [i8; 64] = black_box([3; 64]);
    let mut sums = [0i32; 64];
    for _ in 0..rounds {
        for (sum, factor) in sums.iter_mut().zip(factors) {
            *sum = sum.wrapping_mul(i32::from(factor)).wrapping_add(1);
        }
    }
    sums.iter().fold(0, |all, sum| all ^ *sum as u64)
}

fn portable_float(rounds: usize) -> u64 {
    let factor = black_box(0.999f32);
    let mut sums = [0f32; 32];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = *sum * factor + 1.0;
        }
    }
    sums.iter()
        .fold(0, |all, sum| all ^ u64::from(sum.to_bits()))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::{arch::x86_64::*, hint::black_box};

    use super::Loops;

    /// Sums in registers; more than an instruction takes, times how many begin per cycle.
    const SUMS: usize = 12;
    /// Sums where the factors have to be in registers too.
    const FEW: usize = 5;

    // SAFETY of the calls: `loops` has seen that the processor has these instructions.
    pub const AVX512: Loops = Loops {
        name: "AVX-512 and VNNI",
        read: [
            // SAFETY: see above.
            |bytes| unsafe { read512::<1>(bytes) },
            // SAFETY: see above.
            |bytes| unsafe { read512::<4>(bytes) },
        ],
        // SAFETY: see above.
        integer: (|rounds| unsafe { integer512(rounds) }, 128.0 * SUMS as f64),
        // SAFETY: see above.
        float: (|rounds| unsafe { float512(rounds) }, 32.0 * SUMS as f64),
    };

    pub const AVX2: Loops = Loops {
        name: "AVX2",
        read: [
            // SAFETY: see above.
            |bytes| unsafe { read256::<1>(bytes) },
            // SAFETY: see above.
            |bytes| unsafe { read256::<4>(bytes) },
        ],
        // SAFETY: see above.
        integer: (|rounds| unsafe { integer256(rounds) }, 64.0 * FEW as f64),
        // SAFETY: see above.
        float: (|rounds| unsafe { float256(rounds) }, 16.0 * SUMS as f64),
    };

    /// Reads in `S` streams side by side, each a part of `bytes`.
    #[target_feature(enable = "avx512f")]
    fn read512<const S: usize>(bytes: &[u8]) -> u64 {
        const STEP: usize = 4 * 64;
        let part = bytes.len() / S / STEP * STEP;
        let mut sums = [[_mm512_setzero_si512(); 4]; S];
        for at in (0..part).step_by(STEP) {
            for (s, sums) in sums.iter_mut().enumerate() {
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: `at + STEP <= part`, and `S` parts lie in `bytes`.
                    let eight = unsafe {
                        _mm512_loadu_si512(bytes.as_ptr().add(s * part + at + 64 * i).cast())
                    };
                    *sum = _mm512_add_epi64(*sum, eight);
                }
            }
        }
        let all = sums.as_flattened().iter();
        _mm512_reduce_add_epi64(all.fold(_mm512_setzero_si512(), |all, sum| {
            _mm512_add_epi64(all, *sum)
        })) as u64
    }

    /// Reads in `S` streams side by side, each a part of `bytes`.
    #[target_feature(enable = "avx2")]
    fn read256<const S: usize>(bytes: &[u8]) -> u64 {
        const STEP: usize = 2 * 32;
        let part = bytes.len() / S / STEP * STEP;
        let mut sums = [[_mm256_setzero_si256(); 2]; S];
        for at in (0..part).step_by(STEP) {
            for (s, sums) in sums.iter_mut().enumerate() {
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: `at + STEP <= part`, and `S` parts lie in `bytes`.
                    let four = unsafe {
                        _mm256_loadu_si256(bytes.as_ptr().add(s * part + at + 32 * i).cast())
                    };
                    *sum = _mm256_add_epi64(*sum, four);
                }
            }
        }
        let all = sums.as_flattened().iter();
        let all = all.fold(_mm256_setzero_si256(), |all, sum| {
            _mm256_add_epi64(all, *sum)
        });
        _mm256_extract_epi64::<0>(all) as u64 ^ _mm256_extract_epi64::<3>(all) as u64
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn integer512(rounds: usize) -> u64 {
        let (a, b) = (
            _mm512_set1_epi8(black_box(3)),
            _mm512_set1_epi8(black_box(5)),
        );
        let mut sums = [_mm512_setzero_si512(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        let all = sums.iter().fold(_mm512_setzero_si512(), |all, sum| {
            _mm512_add_epi32(all, *sum)
        });
        _mm512_reduce_add_epi32(all) as u64
    }

    #[target_feature(enable = "avx512f")]
    fn float512(rounds: usize) -> u64 {
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(1.0));
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        let all = sums
            .iter()
            .fold(_mm512_setzero_ps(), |all, sum| _mm512_add_ps(all, *sum));
        u64::from(_mm512_reduce_add_ps(all).to_bits())
    }

    #[target_feature(enable = "avx2")]
    fn integer256(rounds: usize) -> u64 {
        let ones = _mm256_set1_epi16(black_box(1));
        // Each product is its own, or it would be made once.
        let factors: [__m256i; FEW] = std::array::from_fn(|i| _mm256_set1_epi8(i as i8));
        let mut sums = [_mm256_setzero_si256(); FEW];
        for round in 0..rounds {
            let b = _mm256_set1_epi8(round as i8);
            for (sum, a) in sums.iter_mut().zip(factors) {
                let products = _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones);
                *sum = _mm256_add_epi32(*sum, products);
            }
        }
        let all = sums.iter().fold(_mm256_setzero_si256(), |all, sum| {
            _mm256_add_epi32(all, *sum)
        });
        _mm256_extract_epi64::<0>(all) as u64 ^ _mm256_extract_epi64::<3>(all) as u64
    }

    #[target_feature(enable = "avx2,fma")]
    fn float256(rounds: usize) -> u64 {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(1.0));
        let mut sums = [_mm256_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        let all = sums
            .iter()
            .fold(_mm256_setzero_ps(), |all, sum| _mm256_add_ps(all, *sum));
        u64::from(_mm256_cvtss_f32(all).to_bits())
    }
}
