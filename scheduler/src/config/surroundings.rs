//! What the settings' defaults depend on.

use std::path::PathBuf;

use super::{CollectorAddress, Share, usage};
use crate::{exit::Failure, traces::Collector};

/// What of the surroundings the defaults depend on.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// `$XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// `$XDG_CONFIG_HOME`, or `$HOME/.config`.
    pub config_home: Option<PathBuf>,
    /// Hotcell's own part of `$XDG_CACHE_HOME` or `$HOME/.cache`, or what the service manager made for it.
    pub cache: Option<PathBuf>,
    /// Effective user id.
    pub uid: u32,
    /// This program's own path.
    pub executable: Option<PathBuf>,
    /// `$OTEL_EXPORTER_OTLP_ENDPOINT`, unless `$OTEL_EXPORTER_OTLP_PROTOCOL` is another one than gRPC.
    pub collector: Option<String>,
}

impl Surroundings {
    /// Those of this process.
    pub fn here() -> Self {
        let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
        Self {
            runtime_dir: path("XDG_RUNTIME_DIR"),
            config_home: path("XDG_CONFIG_HOME")
                .filter(|p| p.is_absolute())
                .or_else(|| path("HOME").map(|home| home.join(".config"))),
            cache: path("CACHE_DIRECTORY")
                .filter(|p| p.is_absolute())
                .or_else(|| {
                    let home = path("XDG_CACHE_HOME").filter(|p| p.is_absolute());
                    let home = home.or_else(|| path("HOME").map(|home| home.join(".cache")));
                    home.map(|home| home.join("hotcell"))
                }),
            uid: rustix::process::geteuid().as_raw(),
            executable: std::env::current_exe().ok(),
            collector: {
                let text = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
                let protocol = text("OTEL_EXPORTER_OTLP_PROTOCOL");
                text("OTEL_EXPORTER_OTLP_ENDPOINT")
                    .filter(|_| protocol.is_none_or(|protocol| protocol == "grpc"))
            },
        }
    }

    /// Who gets traces: whom a setting names, else whom the environment names to all programs.
    pub(super) fn traces(
        &self,
        (named, ca): (Option<CollectorAddress>, Option<PathBuf>),
        sample: Option<Share>,
    ) -> Result<Option<Collector>, Failure> {
        let named = match (named, &self.collector) {
            (None, Some(others)) => Some(others.parse().map_err(|error| {
                usage(format!(
                    "OTEL_EXPORTER_OTLP_ENDPOINT: {error}; --otlp-endpoint names another one"
                ))
            })?),
            (named, _) => named,
        };
        let is_tls = |named: &CollectorAddress| named.0.scheme_str() == Some("https");
        if ca.is_some() && !named.as_ref().is_some_and(is_tls) {
            let what = "otlp_ca is for a collector over TLS; write its address with https://";
            return Err(usage(what.to_owned()));
        }
        Ok(named.map(|CollectorAddress(endpoint)| Collector {
            endpoint,
            ca,
            sample: sample.map_or(1.0, |share| share.0),
        }))
    }
}
