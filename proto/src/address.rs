//! Where a scheduler listens when nobody says otherwise; client and scheduler follow the same rule.

use std::path::{Path, PathBuf};

/// The default Unix socket: `$XDG_RUNTIME_DIR/hotcell/hotcell.sock`, or `/tmp/hotcell-UID/hotcell.sock` where
/// that variable is unset, empty or relative.
pub fn default_socket(runtime_dir: Option<&Path>, uid: u32) -> PathBuf {
    let folder = match runtime_dir.filter(|dir| dir.is_absolute()) {
        Some(dir) => dir.join("hotcell"),
        None => PathBuf::from(format!("/tmp/hotcell-{uid}")),
    };
    folder.join("hotcell.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_directory_wins_where_it_is_usable() {
        let at = |dir: Option<&str>| default_socket(dir.map(Path::new), 7);
        assert_eq!(
            at(Some("/run/user/7")),
            Path::new("/run/user/7/hotcell/hotcell.sock")
        );
        for unusable in [None, Some(""), Some("run")] {
            assert_eq!(at(unusable), Path::new("/tmp/hotcell-7/hotcell.sock"));
        }
    }
}
