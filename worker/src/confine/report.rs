//! What is in force of a confinement, layer by layer, as the confined process found it.

use std::fmt;

use hotcell_proto::v1::{ConfinementLayer, LayerState};

/// Why a layer of the confinement is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Lack(String);

impl Lack {
    pub(super) fn new(why: impl Into<String>) -> Self {
        Lack(why.into())
    }
}

impl From<rustix::io::Errno> for Lack {
    fn from(error: rustix::io::Errno) -> Self {
        Lack(error.to_string())
    }
}

impl From<std::io::Error> for Lack {
    fn from(error: std::io::Error) -> Self {
        Lack(error.to_string())
    }
}

/// How a layer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The kernel enforces it; this of it, if there is more to say than its name.
    InForce(String),
    /// The kernel lacks or refuses it.
    Missing(Lack),
    /// There is nothing for it to do here, and why.
    NotNeeded(String),
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its name, for example landlock.
    pub name: &'static str,
    /// How it stands.
    pub standing: Standing,
}

impl Layer {
    pub(super) fn new(name: &'static str, done: Result<String, Lack>) -> Self {
        let standing = match done {
            Ok(detail) => Standing::InForce(detail),
            Err(lack) => Standing::Missing(lack),
        };
        Layer { name, standing }
    }

    pub(super) fn not_needed(name: &'static str, why: &str) -> Self {
        Layer {
            name,
            standing: Standing::NotNeeded(why.to_owned()),
        }
    }

    /// Whether the kernel enforces it.
    pub fn is_in_force(&self) -> bool {
        matches!(self.standing, Standing::InForce(_))
    }
}

/// What is in force. It displays as one line for the log, without the layers that are not needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Report {
    /// The layers, in the order in which they were put on.
    pub layers: Vec<Layer>,
}

impl Report {
    /// Whether no layer is missing.
    pub fn is_complete(&self) -> bool {
        self.lacks().next().is_none()
    }

    /// The layers that are missing, and why.
    pub fn lacks(&self) -> impl Iterator<Item = (&'static str, &Lack)> {
        self.layers.iter().filter_map(|l| match &l.standing {
            Standing::Missing(lack) => Some((l.name, lack)),
            Standing::InForce(_) | Standing::NotNeeded(_) => None,
        })
    }

    /// Whether the layer of this name is in force.
    pub fn has(&self, name: &str) -> bool {
        let mut layers = self.layers.iter();
        layers.any(|l| l.name == name && l.is_in_force())
    }

    /// For the scheduler, and for people.
    pub fn wire(&self) -> Vec<ConfinementLayer> {
        let layer = |l: &Layer| {
            let (state, detail) = match &l.standing {
                Standing::InForce(detail) => (LayerState::InForce, detail.clone()),
                Standing::Missing(lack) => (LayerState::Missing, lack.to_string()),
                Standing::NotNeeded(why) => (LayerState::NotNeeded, why.clone()),
            };
            ConfinementLayer {
                layer: l.name.to_owned(),
                state: state.into(),
                detail,
            }
        };
        self.layers.iter().map(layer).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for layer in &self.layers {
            let name = layer.name;
            match &layer.standing {
                Standing::InForce(detail) if detail.is_empty() => write!(f, "{between}{name}")?,
                Standing::InForce(detail) => write!(f, "{between}{name} ({detail})")?,
                Standing::Missing(lack) => write!(f, "{between}without {name} ({lack})")?,
                Standing::NotNeeded(_) => continue,
            }
            between = ", ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_as_one_line_and_goes_out_layer_by_layer() {
        let mut report = Report {
            layers: vec![
                Layer::new("no-new-privs", Ok(String::new())),
                Layer::not_needed("user", "it was not started by root"),
                Layer::new("landlock", Ok("ABI 7".into())),
            ],
        };
        assert!(report.is_complete() && report.has("landlock") && !report.has("user"));
        assert_eq!(report.to_string(), "no-new-privs, landlock (ABI 7)");
        report.layers[2] = Layer::new("landlock", Err(Lack::new("the kernel lacks it")));
        assert!(!report.is_complete() && !report.has("landlock"));
        assert_eq!(
            report.to_string(),
            "no-new-privs, without landlock (the kernel lacks it)"
        );
        let states: Vec<_> = report.wire().iter().map(|l| l.state()).collect();
        assert_eq!(
            states,
            [
                LayerState::InForce,
                LayerState::NotNeeded,
                LayerState::Missing
            ]
        );
    }
}
