//! How fast memory is: STREAM's triad (McCalpin 1995) on all threads.

use std::{hint::black_box, thread};

/// Three arrays.
pub struct Triad {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Triad {
    /// Arrays of so many elements.
    pub fn new(elements: usize) -> Self {
        Self {
            a: vec![0.5; elements],
            b: vec![1.5; elements],
            c: vec![2.5; elements],
        }
    }

    /// Bytes that a run reads and writes.
    pub fn bytes(&self) -> usize {
        3 * size_of_val(&self.a[..])
    }

    /// Seconds of `a = b + 3 c`.
    pub fn run(&mut self) -> f64 {
        let part = self.a.len().div_ceil(crate::threads());
        let (b, c) = (self.b.chunks(part), self.c.chunks(part));
        let parts = self.a.chunks_mut(part).zip(b).zip(c);
        crate::seconds(|| {
            thread::scope(|scope| {
                for ((a, b), c) in parts {
                    scope.spawn(move || {
                        for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
                            *a = b + 3.0 * c;
                        }
                        black_box(a);
                    });
                }
            });
        })
    }
}
