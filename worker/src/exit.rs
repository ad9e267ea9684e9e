//! Exit codes of this program. The list is shared with the scheduler, which tells by it what a death means.

pub use hotcell_proto::exit::{WorkerExit as Exit, help};
