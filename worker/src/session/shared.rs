//! Memory that another process shares with this one.

use hotcell_ipc::memory::SharedMapping;
use hotcell_kernels::backend::SharedRegion;

/// A mapping of it.
pub struct Region(pub SharedMapping);

// SAFETY: the mapping stays where it is, readable and writable, until it is dropped, and its length is sealed;
// nobody makes references into it.
unsafe impl SharedRegion for Region {
    fn span(&self) -> (*mut u8, usize) {
        (self.0.start(), self.0.len())
    }
}
