//! Another program takes this one's place, in the same process: an upgrade that ends no stream and no worker.
//!
//! `hotcell-scheduler --takeover` asks the running scheduler over its socket for descriptors ([`ask`]). That one sees
//! whether the program can be run and understands what it would be left, has each worker open connections for it, writes
//! down what it knows into sealed memory, and executes the program ([`give`]). The program finds the memory by a number
//! in its environment, believes it as far as a stranger, and goes on from there ([`left`]). Listening sockets stay
//! open all the while. Connections of clients break; clients come back to their streams by themselves.
//!
//! Nothing is undone if the program cannot be executed, for nothing was changed by then.

mod ask;
mod give;
mod left;

use hotcell_ipc::takeover::state_descriptor;

pub use ask::asked;
pub use give::{OwnDoor, Takeover, held};
pub use left::{Asker, Door, Left};

/// Version of the state. Raised when a field's meaning changes, or one is added that cannot be done without.
pub const STATE_VERSION: u32 = 1;

/// Whether this program was executed by a scheduler whose place it takes.
fn is_heir() -> bool {
    state_descriptor().is_some()
}

/// What a program says that can take a scheduler's place.
fn creed() -> String {
    format!(
        "hotcell-scheduler takes over state {STATE_VERSION} protocol {}",
        hotcell_proto::PROTOCOL_VERSION
    )
}
