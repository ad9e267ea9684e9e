//! Instruction paths of the CPU kernels, and which of them this processor has.
//!
//! Every kernel gives the same bits on every path, but for [products of BF16 and E4M3 weights](super::matmul) on
//! [`CpuPath::Amx`], so else the path is a matter of speed only. [`CpuPath`] is safe to pass around as a plain value: a path the
//! processor lacks runs as [`CpuPath::Portable`].

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

/// A set of instructions that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CpuPath {
    /// [`CpuPath::Avx512Vnni`], AVX-512 VBMI, and AMX for bytes and BF16, with which products of BF16 and E4M3 weights are summed in
    /// another order.
    Amx,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI (and what [`CpuPath::Avx2`] needs).
    Avx512Vnni,
    /// [`CpuPath::Avx2`] and AVX-VNNI, as of Intel's cores of the 12th generation on: for products of bytes.
    AvxVnni,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// Whatever the compiler's target has; no intrinsics.
    Portable,
}

impl CpuPath {
    /// Every path, fastest first.
    pub const ALL: &'static [CpuPath] = &[
        CpuPath::Amx,
        CpuPath::Avx512Vnni,
        CpuPath::AvxVnni,
        CpuPath::Avx2,
        CpuPath::Portable,
    ];

    /// The fastest path of this processor.
    pub fn detect() -> CpuPath {
        CpuPath::ALL
            .iter()
            .copied()
            .find(|path| path.is_available())
            .unwrap_or(CpuPath::Portable)
    }

    /// The paths this processor has, fastest first. Never empty.
    pub fn available() -> Vec<CpuPath> {
        CpuPath::ALL
            .iter()
            .copied()
            .filter(|path| path.is_available())
            .collect()
    }

    /// Whether this processor has the path. Asks the processor once and remembers.
    #[inline]
    pub fn is_available(self) -> bool {
        let bit = match self {
            CpuPath::Amx => HAS_AMX,
            CpuPath::Avx512Vnni => HAS_AVX512,
            CpuPath::AvxVnni => HAS_AVX_VNNI,
            CpuPath::Avx2 => HAS_AVX2,
            CpuPath::Portable => return true,
        };
        features() & bit != 0
    }

    /// The path whose vector instructions most kernels use: the path itself where the processor has it, but
    /// [`CpuPath::Avx512Vnni`] for [`CpuPath::Amx`] and [`CpuPath::Avx2`] for [`CpuPath::AvxVnni`], else
    /// [`CpuPath::Portable`]. What is returned is the proof that the
    /// instructions exist; `dispatch!` calls it before it jumps.
    #[inline]
    pub fn vectors(self) -> CpuPath {
        match self {
            CpuPath::Amx if self.is_available() => CpuPath::Avx512Vnni,
            CpuPath::AvxVnni if self.is_available() => CpuPath::Avx2,
            _ if self.is_available() => self,
            _ => CpuPath::Portable,
        }
    }

    /// The name used in configuration, on the command line and in the numerics class.
    pub const fn name(self) -> &'static str {
        match self {
            CpuPath::Amx => "amx",
            CpuPath::Avx512Vnni => "avx512",
            CpuPath::AvxVnni => "avx-vnni",
            CpuPath::Avx2 => "avx2",
            CpuPath::Portable => "portable",
        }
    }

    /// The path of this name.
    pub fn from_name(name: &str) -> Option<CpuPath> {
        CpuPath::ALL
            .iter()
            .copied()
            .find(|path| path.name() == name)
    }
}

impl fmt::Display for CpuPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

const ASKED: u8 = 1;
const HAS_AVX2: u8 = 2;
const HAS_AVX512: u8 = 4;
const HAS_AMX: u8 = 8;
const HAS_AVX_VNNI: u8 = 16;
const READS_PAGES: u8 = 32;

static FEATURES: AtomicU8 = AtomicU8::new(0);

#[inline]
fn features() -> u8 {
    let seen = FEATURES.load(Ordering::Relaxed);
    if seen & ASKED != 0 { seen } else { ask() }
}

#[cold]
fn ask() -> u8 {
    let mut seen = ASKED;
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vl")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vnni");
        if avx2 {
            seen |= HAS_AVX2;
            if std::arch::is_x86_feature_detected!("avxvnni") {
                seen |= HAS_AVX_VNNI;
            }
        }
        if avx512 {
            seen |= HAS_AVX512;
            // All processors with tiles have it.
            if std::arch::is_x86_feature_detected!("avx512vbmi") && may_use_tiles() {
                seen |= HAS_AMX;
            }
        }
        if is_intel() && first_cache() >= 48 << 10 {
            seen |= READS_PAGES;
        }
    }
    FEATURES.store(seen, Ordering::Relaxed);
    seen
}

/// Whether memory comes faster where several pages are read side by side: Intel's processors read ahead by themselves within each
/// page of 4 KiB, and requests of one page are fewer than a core can have under way. On a Xeon with AMX four pages give half as
/// much again as one (`BENCHMARKS.md`). What is asked for takes up to 28 KiB of the first-level cache, which older ones lack.
#[inline]
pub(super) fn reads_pages() -> bool {
    features() & READS_PAGES != 0
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn is_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"GenuineIntel"
}

/// Bytes of the first-level cache of data; none where the processor does not say. Intel's manual of the instruction set, CPUID:
/// leaf 4.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn first_cache() -> u32 {
    const LEAF: u32 = 4;
    if std::arch::x86_64::__cpuid(0).eax < LEAF {
        return 0;
    }
    let caches = (0..8).map(|cache| std::arch::x86_64::__cpuid_count(LEAF, cache));
    // Of data only, and of the first level.
    let first = caches
        .into_iter()
        .find(|cache| (cache.eax & 31, cache.eax >> 5 & 7) == (1, 1));
    first.map_or(0, |cache| {
        let ways = (cache.ebx >> 22) + 1;
        let lines = ((cache.ebx >> 12 & 0x3ff) + 1) * ((cache.ebx & 0xfff) + 1);
        ways.saturating_mul(lines)
            .saturating_mul(cache.ecx.saturating_add(1))
    })
}

#[cfg(all(target_arch = "x86_64", miri))]
fn is_intel() -> bool {
    false
}

#[cfg(all(target_arch = "x86_64", miri))]
fn first_cache() -> u32 {
    0
}

/// Whether the processor has AMX for BF16 and this process may use it, which it must ask for: the state of tiles is large.
/// Threads of this process may then, and processes that it forks.
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
fn may_use_tiles() -> bool {
    // Intel's manual of the instruction set, CPUID: leaf 7, EDX.
    const TILES: u32 = 1 << 24;
    const BF16_AND_INT8: u32 = 1 << 22 | 1 << 25;
    const WANTED: u32 = TILES | BF16_AND_INT8;
    // Linux, asm/prctl.h, and the component of the state that tiles' data are.
    const REQUEST_STATE: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    let [most, features] = [
        std::arch::x86_64::__cpuid(0).eax,
        std::arch::x86_64::__cpuid_count(7, 0).edx,
    ];
    if most < 7 || features & WANTED != WANTED {
        return false;
    }
    // SAFETY: it touches no memory of this process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(all(target_os = "linux", not(miri)))))]
fn may_use_tiles() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_portable_is_always_there() {
        for &path in CpuPath::ALL {
            assert_eq!(CpuPath::from_name(path.name()), Some(path));
        }
        assert_eq!(CpuPath::from_name("sse9"), None);
        assert_eq!(CpuPath::available().last(), Some(&CpuPath::Portable));
        assert_eq!(CpuPath::available().first(), Some(&CpuPath::detect()));
    }
}
