//! Types of single settings: each is parsed by one rule, whether it comes from a flag, a variable or the file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    os::fd::RawFd,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use hotcell_proto::{ids::ModelName, limits, v1::Serving};
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::{access::Roles, fleet::checked_serving};

/// A length of time: `250ms`, `10s`, `2m` or a number of seconds; more than zero, a day at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &text[digits.len()..] {
            "ms" => 0.001,
            "" | "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => f64::NAN,
        };
        let seconds = digits.parse::<f64>().unwrap_or(f64::NAN) * unit;
        if !(seconds > 0.0 && seconds <= 86_400.0) {
            return Err(format!(
                "{text:?} is not a time such as 250ms, 10s or 2m (more than 0, a day at most)"
            ));
        }
        Ok(Span(Duration::from_secs_f64(seconds)))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        number_or_text(from)?.parse().map_err(D::Error::custom)
    }
}

/// How many processes compute a model together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members(pub usize);

impl FromStr for Members {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let most = limits::MAX_MEMBERS;
        match text.parse() {
            Ok(count) if (1..=most).contains(&count) => Ok(Members(count)),
            _ => Err(format!("{text:?} is not a number from 1 to {most}")),
        }
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        number_or_text(from)?.parse().map_err(D::Error::custom)
    }
}

/// A time or share in the config file: a number, or text as in a flag.
fn number_or_text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Number(f64),
        Text(String),
    }
    Ok(match Form::deserialize(from)? {
        Form::Number(number) => number.to_string(),
        Form::Text(text) => text,
    })
}

/// A length of time between two things, or `0` or `never`: not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every(pub Option<Duration>);

impl FromStr for Every {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" | "never" => Ok(Every(None)),
            _ => text.parse().map(|Span(time)| Every(Some(time))),
        }
    }
}

impl<'de> Deserialize<'de> for Every {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        number_or_text(from)?.parse().map_err(D::Error::custom)
    }
}

/// A part of a whole, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(pub f64);

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(Share(share)),
            _ => Err(format!("{text:?} is not a share from 0 to 1")),
        }
    }
}

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        number_or_text(from)?.parse().map_err(D::Error::custom)
    }
}

/// Where a collector of traces listens: `http://HOST:PORT`, or `https://HOST:PORT` for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorAddress(pub http::Uri);

impl FromStr for CollectorAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let uri = text.parse::<http::Uri>().ok();
        let plain = |uri: &http::Uri| {
            let host = uri.host().is_some_and(|host| !host.is_empty());
            matches!(uri.scheme_str(), Some("http" | "https"))
                && host
                && uri.path() == "/"
                && uri.query().is_none()
        };
        uri.filter(plain).map(Self).ok_or_else(|| {
            format!("{text:?} is not the address of a collector that speaks OTLP over gRPC, such as http://127.0.0.1:4317 or https://collector:4317")
        })
    }
}

impl<'de> Deserialize<'de> for CollectorAddress {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Which devices get workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Those the probe finds.
    #[default]
    Auto,
    /// So many CPU devices, which share the cores.
    Cpu(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let count = match text {
            "auto" => return Ok(DeviceChoice::Auto),
            "cpu" => Some(1),
            _ => text.strip_prefix("cpu:").and_then(|n| n.parse().ok()),
        };
        match count {
            Some(n) if (1..=limits::MAX_DEVICES).contains(&n) => Ok(DeviceChoice::Cpu(n)),
            _ => Err(format!(
                "{text:?} is not a choice of devices: auto, or cpu:N with N from 1 to {}",
                limits::MAX_DEVICES
            )),
        }
    }
}

impl<'de> Deserialize<'de> for DeviceChoice {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Dtype of a worker's KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvCache {
    /// Half precision.
    #[default]
    F16,
    /// Single precision.
    F32,
    /// Brain float.
    Bf16,
    /// Bytes in blocks of 32 with a scale.
    #[value(name = "q8_0")]
    #[serde(rename = "q8_0")]
    Q8,
}

impl fmt::Display for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvCache::F16 => "f16",
            KvCache::F32 => "f32",
            KvCache::Bf16 => "bf16",
            KvCache::Q8 => "q8_0",
        })
    }
}

/// Users by number, each with its roles: `1000,1001:use+load`, in the file too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedUsers(pub Vec<(u32, Roles)>);

impl FromStr for AllowedUsers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let user = |part: &str| {
            let (uid, roles) = part.split_once(':').unwrap_or((part, "use"));
            let uid = uid.parse().map_err(|_| {
                format!("{uid:?} is not a user's number; write UID or UID:ROLE+ROLE, for example 1000:use+load")
            })?;
            Ok::<_, String>((uid, roles.parse()?))
        };
        text.split(',')
            .map(user)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl<'de> Deserialize<'de> for AllowedUsers {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Models by name: `NAME=PATH,NAME=PATH` or a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedModels(pub Vec<ConfiguredModel>);

/// A model that is known from the start.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfiguredModel {
    /// The name that requests use.
    pub name: ModelName,
    /// A folder or a `.gguf` file.
    pub path: PathBuf,
    /// How it is served.
    pub serving: Serving,
    /// Whether it is loaded with its first request.
    pub on_request: bool,
}

impl ConfiguredModel {
    /// One that is served as any other.
    pub fn plain(name: ModelName, path: PathBuf) -> Self {
        Self {
            name,
            path,
            serving: Serving::default(),
            on_request: false,
        }
    }

    /// Whether nothing is said of it but where it is.
    pub fn is_plain(&self) -> bool {
        self.serving == Serving::default() && !self.on_request
    }
}

/// What the file may say of a model besides its path.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ServedKeys {
    path: String,
    replicas: Replicas,
    keep_alive: Option<Span>,
    pinned: bool,
    aliases: Vec<String>,
    max_running: u32,
    max_context: u32,
    on_request: bool,
}

/// On how many devices a model is: a number, or all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replicas(pub u32);

impl FromStr for Replicas {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse::<u32>().ok().filter(|n| *n > 0);
        match (text, number) {
            ("all", _) => Ok(Self(0)),
            (_, Some(n)) => Ok(Self(n)),
            _ => Err(format!("{text:?} is neither all nor a number of devices")),
        }
    }
}

impl<'de> Deserialize<'de> for Replicas {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Said {
            Number(u32),
            Word(String),
        }
        let word = match Said::deserialize(from)? {
            Said::Number(n) => n.to_string(),
            Said::Word(word) => word,
        };
        word.parse().map_err(D::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Named {
    Path(String),
    Served(ServedKeys),
}

impl NamedModels {
    fn checked(all: impl Iterator<Item = (String, Named)>) -> Result<Self, String> {
        let mut models: BTreeMap<ModelName, ConfiguredModel> = BTreeMap::new();
        let mut names = BTreeSet::new();
        for (name, said) in all {
            let keys = match said {
                Named::Path(path) => ServedKeys {
                    path,
                    ..ServedKeys::default()
                },
                Named::Served(keys) => keys,
            };
            let name = ModelName::new(name).map_err(|e| e.to_string())?;
            if keys.path.is_empty() {
                return Err(format!("model {name} has no path"));
            }
            let keep_alive = keys.keep_alive.map(|s| s.0.as_millis());
            let serving = Serving {
                replicas: keys.replicas.0,
                keep_alive_ms: keep_alive.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
                pinned: keys.pinned,
                aliases: keys.aliases,
                max_running: keys.max_running,
                max_context: keys.max_context,
            };
            if serving.pinned && keys.on_request {
                return Err(format!(
                    "model {name} is pinned, so it is in memory from the start, and not loaded on_request"
                ));
            }
            let aliases = checked_serving(&serving).map_err(|e| format!("model {name}: {e}"))?;
            for name in aliases.into_iter().chain([name.clone()]) {
                if !names.insert(name.clone()) {
                    return Err(format!("the name {name} is given twice"));
                }
            }
            let model = ConfiguredModel {
                name: name.clone(),
                path: PathBuf::from(keys.path),
                serving,
                on_request: keys.on_request,
            };
            models.insert(name, model);
        }
        if models.len() > limits::MAX_MODELS {
            return Err(format!("more than {} models", limits::MAX_MODELS));
        }
        Ok(Self(models.into_values().collect()))
    }
}

impl FromStr for NamedModels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pairs: Option<Vec<_>> = text
            .split(',')
            .map(|pair| pair.split_once('='))
            .map(|pair| pair.map(|(n, p)| (n.trim().to_owned(), Named::Path(p.to_owned()))))
            .collect();
        let pairs = pairs.ok_or_else(|| format!("{text:?} is not NAME=PATH[,NAME=PATH…]"))?;
        Self::checked(pairs.into_iter())
    }
}

impl<'de> Deserialize<'de> for NamedModels {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let table = BTreeMap::<String, Named>::deserialize(from)?;
        Self::checked(table.into_iter()).map_err(D::Error::custom)
    }
}

/// A model whose files were inherited: `NAME:FILE=FD,FILE=FD…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundledFiles {
    /// The model's name.
    pub name: ModelName,
    /// File names and the numbers of their descriptors.
    pub files: Vec<(String, RawFd)>,
}

impl FromStr for BundledFiles {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not NAME:FILE=FD[,FILE=FD…]");
        // A model's name may contain colons, a file's name here may not.
        let (name, list) = text.rsplit_once(':').ok_or_else(wrong)?;
        let name = ModelName::new(name).map_err(|e| e.to_string())?;
        let mut files: Vec<(String, RawFd)> = Vec::new();
        for pair in list.split(',') {
            let (file, fd) = pair.split_once('=').ok_or_else(wrong)?;
            let fd: RawFd = fd.parse().map_err(|_| wrong())?;
            let plain = !file.is_empty() && !file.contains('/') && file != "." && file != "..";
            if !plain || fd < 3 || files.iter().any(|(f, n)| f == file || *n == fd) {
                return Err(format!(
                    "{text:?}: {pair:?} needs a plain file name and a descriptor from 3 up, each named once"
                ));
            }
            files.push((file.to_owned(), fd));
        }
        if files.len() > limits::MAX_MODEL_FILES {
            return Err(format!(
                "model {name} has more than {} files",
                limits::MAX_MODEL_FILES
            ));
        }
        Ok(Self { name, files })
    }
}

/// The level a worker logs at, given the scheduler's filter: its first bare level, else info.
pub(super) fn plain_level(filter: &str) -> &'static str {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    filter
        .split(',')
        .find_map(|part| {
            let part = part.trim().to_ascii_lowercase();
            LEVELS.into_iter().find(|level| *level == part)
        })
        .unwrap_or("info")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_unit() {
        let read = |t: &str| t.parse::<Span>().map(|s| s.0.as_millis());
        assert_eq!(read("250ms"), Ok(250));
        assert_eq!(read("1.5s"), Ok(1500));
        assert_eq!(read("2m"), Ok(120_000));
        assert_eq!(read("7"), Ok(7000));
        for bad in ["", "0", "-1s", "10d", "s", "nan", "1e300s", "25h", "1ä"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_never_done_is_zero_or_said_in_words() {
        let read = |t: &str| t.parse::<Every>().map(|e| e.0.map(|t| t.as_millis()));
        assert_eq!(read("0"), Ok(None));
        assert_eq!(read("never"), Ok(None));
        assert_eq!(read("250ms"), Ok(Some(250)));
        for bad in ["", "-1", "soon", "0s"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bundled_files_are_checked() {
        let read = |t: &str| t.parse::<BundledFiles>();
        let good = read("org/m:v1:config.json=3,model.safetensors=4").unwrap();
        assert_eq!(good.name.as_str(), "org/m:v1");
        assert_eq!(good.files[1], ("model.safetensors".to_owned(), 4));
        for bad in [
            "m",
            "m:",
            "m:a",
            "m:a=2",
            "m:a=3,b=3",
            "m:../a=3",
            ":a=3",
            "m:a=-1",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn devices_are_counted_within_the_limit() {
        assert_eq!("cpu:2".parse(), Ok(DeviceChoice::Cpu(2)));
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert!("cpu:0".parse::<DeviceChoice>().is_err());
        assert!("cpu:65".parse::<DeviceChoice>().is_err());
    }

    #[test]
    fn a_filter_has_a_plain_level() {
        assert_eq!(plain_level("hotcell_ipc=trace,DEBUG"), "debug");
        assert_eq!(plain_level("h2=warn"), "info");
    }
}
