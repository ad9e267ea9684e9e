//! Members, here threads, whose devices give each other their parts.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use super::shim::{Arg, Shim};

/// As `gather.cu` has it.
const HEADER: usize = 4096;
const MOST: usize = 16;

/// Bytes of a slot here.
const SLOT: usize = 8192;

/// What member `rank` gives at a place of a meeting.
fn byte(meeting: usize, rank: usize, at: usize) -> u8 {
    (meeting * 31 + rank * 97 + at * 7 + at / 256) as u8
}

/// Where rows of this width begin at a place of their memory that nobody promises to be aligned.
struct Rows {
    width: usize,
    bytes: usize,
    skew: usize,
}

/// Ends the process where its thread fails: the others would wait for it for ever.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::exit(101);
        }
    }
}

#[test]
fn each_member_has_what_all_gave_row_by_row() {
    let Some(shim) = Shim::get() else { return };
    let sizes = [
        (16, 16 * 20, 0),
        (4, 4 * 33, 0),
        (48, 48 * 300, 0),
        (48, 48 * 7, 4),
        (3, 3 * 1001, 0),
        (5, 5, 1),
        (SLOT + 16, 3 * (SLOT + 16), 0),
        (1, 2 * SLOT + 1, 0),
    ];
    let sizes = sizes.map(|(width, bytes, skew)| Rows { width, bytes, skew });
    for members in [1, 2, 3] {
        // Words that threads share as devices would.
        let words = (HEADER + 2 * members * SLOT) / 8 + 2;
        let area = || (0..words).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let areas: Vec<Vec<AtomicU64>> = (0..members).map(|_| area()).collect();
        let mut at = [0; MOST];
        for (at, area) in at.iter_mut().zip(&areas) {
            *at = (area.as_ptr() as u64).next_multiple_of(16);
        }
        let at = Arg::words(&at);
        thread::scope(|scope| {
            for rank in 0..members {
                let sizes = &sizes;
                scope.spawn(move || {
                    let _ends_all = EndsAll;
                    for (meeting, rows) in sizes.iter().cycle().take(20).enumerate() {
                        one(shim, at, (rank, members), meeting, rows);
                    }
                });
            }
        });
        let met = areas[0][members * 128 / 8 + usize::from(areas[0].as_ptr().align_offset(16) > 0)]
            .load(Ordering::Relaxed);
        assert!(met >= 20, "{met} meetings");
    }
}

/// A gather, in as many meetings as there are slots of it.
fn one(shim: &Shim, areas: Arg, (rank, members): (usize, usize), meeting: usize, rows: &Rows) {
    let &Rows { width, bytes, skew } = rows;
    // Of words of 16 bytes, so that what is not skewed is aligned.
    let mut mine = vec![0u128; (bytes + skew).div_ceil(16)];
    let mut all = vec![0u128; (bytes * members + skew).div_ceil(16) + 1];
    let start = mine.as_mut_ptr().cast::<u8>().wrapping_add(skew);
    for i in 0..bytes {
        // SAFETY: within `mine`.
        unsafe { start.add(i).write(byte(meeting, rank, i)) };
    }
    let place = |at: *const u8| Arg::from(at as i64);
    let out = all.as_mut_ptr().cast::<u8>().wrapping_add(skew);
    let counts = [Arg::from(members as i32), Arg::from(rank as i32)];
    for first in (0..bytes).step_by(SLOT) {
        let n = SLOT.min(bytes - first);
        let [all_of_them, this] = counts;
        let give = [
            areas,
            place(start.wrapping_add(first)),
            Arg::from(n as i64),
            Arg::from(SLOT as i64),
            all_of_them,
            this,
        ];
        shim.launch("give_part", [3, members, 1], 64, &give)
            .unwrap();
        let take = [
            areas,
            place(out),
            Arg::from(first as i64),
            Arg::from(n as i64),
            Arg::from(width as i64),
            Arg::from(SLOT as i64),
            all_of_them,
            this,
        ];
        shim.launch("take_parts", [4, 1, 1], 64, &take).unwrap();
    }
    for (i, at) in (0..bytes * members).map(|i| (i, out.wrapping_add(i))) {
        // SAFETY: within `all`.
        let found = unsafe { at.read() };
        let (row, column) = (i / width / members, i % width);
        let of = i / width % members;
        assert_eq!(found, byte(meeting, of, row * width + column), "byte {i}");
    }
}
