//! Roles, and the one table of which calls need which.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, de::Error as _};

/// What somebody may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Role {
    /// Generate tokens, compute with tensors, see what there is.
    Use = 1,
    /// Load and unload models.
    Load = 2,
    /// All, also what only operators do.
    Admin = 4,
    /// See what others do, and what became of it: crash reports, events, and what goes on inside a worker.
    Debug = 8,
}

impl Role {
    /// Every role, with what it allows.
    pub const ALL: &'static [(Role, &'static str, &'static str)] = &[
        (Role::Use, "use", "generate, compute, list"),
        (Role::Load, "load", "load and unload models"),
        (
            Role::Debug,
            "debug",
            "crash reports, events, looking into workers",
        ),
        (Role::Admin, "admin", "all of it, and what operators do"),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        let row = Role::ALL.iter().find(|(role, ..)| *role == self);
        row.map_or("", |(_, name, _)| name)
    }
}

/// Several roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    /// All of them.
    pub const ALL: Roles = Roles(0xf);
    /// Of clients who show a certificate, where nothing else is said.
    pub const USE: Roles = Roles(Role::Use as u8);
    /// Of clients over TCP on this host where no tokens are asked for.
    pub const TOKENLESS: Roles = Roles(Role::Use as u8 | Role::Load as u8 | Role::Debug as u8);

    /// Whether this one is among them; an admin has every one.
    pub fn has(self, role: Role) -> bool {
        self.0 & (role as u8 | Role::Admin as u8) != 0
    }
}

impl FromIterator<Role> for Roles {
    fn from_iter<I: IntoIterator<Item = Role>>(roles: I) -> Self {
        Roles(roles.into_iter().fold(0, |all, role| all | role as u8))
    }
}

impl FromStr for Roles {
    type Err = String;

    /// `use` or `use+load`.
    fn from_str(text: &str) -> Result<Self, String> {
        let role = |name: &str| {
            let row = Role::ALL.iter().find(|(_, known, _)| *known == name);
            let row = row.ok_or_else(|| format!("{name:?} is no role: use, load, debug, admin"));
            row.map(|(role, ..)| *role)
        };
        text.split('+').map(role).collect()
    }
}

impl<'de> Deserialize<'de> for Roles {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let roles = Vec::<Role>::deserialize(from)?;
        match roles.is_empty() {
            true => Err(D::Error::custom("no role: use, load, debug, admin")),
            false => Ok(roles.into_iter().collect()),
        }
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Role::ALL
            .iter()
            .filter(|(role, ..)| self.0 & *role as u8 != 0);
        let names: Vec<_> = names.map(|(_, name, _)| *name).collect();
        f.write_str(&names.join("+"))
    }
}

/// What a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing: whoever is let in at all.
    Nobody,
    /// A role.
    Role(Role),
}

impl Need {
    /// Whether it is that of calls which look into what others do.
    pub(super) fn looks(self) -> bool {
        self == DEBUG
    }
}

const USE: Need = Need::Role(Role::Use);
const LOAD: Need = Need::Role(Role::Load);
const ADMIN: Need = Need::Role(Role::Admin);
const DEBUG: Need = Need::Role(Role::Debug);

/// Every call that a scheduler serves, as its path on the wire, and what it needs.
pub const TABLE: &[(&str, Need)] = &[
    ("/hotcell.v1.Tokens/Generate", USE),
    ("/hotcell.v1.Tokens/Attach", USE),
    ("/hotcell.v1.Tokens/Cancel", USE),
    ("/hotcell.v1.Tokens/Tokenize", USE),
    ("/hotcell.v1.Tokens/Detokenize", USE),
    ("/hotcell.v1.Tokens/Embed", USE),
    ("/hotcell.v1.Tensors/Execute", USE),
    ("/hotcell.v1.Tensors/ExecuteMany", USE),
    ("/hotcell.v1.Tensors/Upload", USE),
    ("/hotcell.v1.Tensors/Download", USE),
    ("/hotcell.v1.Tensors/Create", USE),
    ("/hotcell.v1.Tensors/Free", USE),
    ("/hotcell.v1.Tensors/Compile", USE),
    ("/hotcell.v1.Tensors/Synchronize", USE),
    ("/hotcell.v1.Tensors/Cancel", USE),
    ("/hotcell.v1.Tensors/List", USE),
    ("/hotcell.v1.Tensors/Memory", USE),
    ("/hotcell.v1.Tensors/ListWeights", USE),
    ("/hotcell.v1.Tensors/GetWeight", USE),
    ("/hotcell.v1.Tensors/ImportShared", USE),
    ("/hotcell.v1.Tensors/Describe", USE),
    ("/hotcell.v1.Tensors/OpenSession", USE),
    ("/hotcell.v1.Graphs/Save", USE),
    ("/hotcell.v1.Graphs/List", USE),
    ("/hotcell.v1.Graphs/Forget", USE),
    ("/hotcell.v1.Graphs/Clear", ADMIN),
    ("/hotcell.v1.Control/ListDevices", USE),
    ("/hotcell.v1.Control/ListWorkers", USE),
    ("/hotcell.v1.Control/ListModels", USE),
    ("/hotcell.v1.Control/LoadModel", LOAD),
    ("/hotcell.v1.Control/UnloadModel", LOAD),
    ("/hotcell.v1.Control/InspectModel", LOAD),
    ("/hotcell.v1.Control/ListCrashes", DEBUG),
    ("/hotcell.v1.Control/GetCrash", DEBUG),
    ("/hotcell.v1.Control/WatchEvents", DEBUG),
    ("/hotcell.v1.Debug/Watch", DEBUG),
    ("/hotcell.v1.Debug/Capture", DEBUG),
    ("/hotcell.v1.Debug/Replay", DEBUG),
    ("/hotcell.v1.Debug/Guard", DEBUG),
    ("/hotcell.v1.Debug/Trace", DEBUG),
    ("/hotcell.v1.Debug/Memory", DEBUG),
    ("/hotcell.v1.Control/ReleaseWorker", ADMIN),
    ("/hotcell.v1.Control/RestartWorker", ADMIN),
    ("/hotcell.v1.Control/DrainWorker", ADMIN),
    ("/vllm.grpc.engine.VllmEngine/Generate", USE),
    ("/vllm.grpc.engine.VllmEngine/Embed", USE),
    ("/vllm.grpc.engine.VllmEngine/Abort", USE),
    ("/vllm.grpc.engine.VllmEngine/GetModelInfo", USE),
    ("/vllm.grpc.engine.VllmEngine/GetServerInfo", USE),
    ("/vllm.grpc.engine.VllmEngine/GetLoads", USE),
    ("/vllm.grpc.engine.VllmEngine/GetTokenizer", USE),
    ("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", USE),
    ("/vllm.grpc.engine.VllmEngine/FlushCache", USE),
    ("/vllm.grpc.engine.VllmEngine/StartProfile", USE),
    ("/vllm.grpc.engine.VllmEngine/StopProfile", USE),
    ("/v1/models", USE),
    ("/v1/models/*", USE),
    ("/v1/completions", USE),
    ("/v1/chat/completions", USE),
    ("/v1/embeddings", USE),
    ("/v1/responses", USE),
    ("/v1/messages", USE),
    ("/v1/messages/count_tokens", USE),
    ("/api/*", USE),
    ("/", Need::Nobody),
    ("/inference.GRPCInferenceService/ServerLive", Need::Nobody),
    ("/inference.GRPCInferenceService/ServerReady", Need::Nobody),
    ("/inference.GRPCInferenceService/ModelReady", USE),
    ("/inference.GRPCInferenceService/ServerMetadata", USE),
    ("/inference.GRPCInferenceService/ModelMetadata", USE),
    ("/inference.GRPCInferenceService/ModelInfer", USE),
    ("/inference.GRPCInferenceService/ModelStreamInfer", USE),
    ("/inference.GRPCInferenceService/ModelConfig", USE),
    ("/inference.GRPCInferenceService/ModelStatistics", USE),
    ("/inference.GRPCInferenceService/RepositoryIndex", USE),
    ("/inference.GRPCInferenceService/RepositoryModelLoad", LOAD),
    (
        "/inference.GRPCInferenceService/RepositoryModelUnload",
        LOAD,
    ),
    (
        "/inference.GRPCInferenceService/SystemSharedMemoryStatus",
        USE,
    ),
    (
        "/inference.GRPCInferenceService/SystemSharedMemoryRegister",
        USE,
    ),
    (
        "/inference.GRPCInferenceService/SystemSharedMemoryUnregister",
        USE,
    ),
    (
        "/inference.GRPCInferenceService/CudaSharedMemoryStatus",
        USE,
    ),
    (
        "/inference.GRPCInferenceService/CudaSharedMemoryRegister",
        USE,
    ),
    (
        "/inference.GRPCInferenceService/CudaSharedMemoryUnregister",
        USE,
    ),
    ("/inference.GRPCInferenceService/TraceSetting", USE),
    ("/inference.GRPCInferenceService/LogSettings", USE),
    ("/v2", USE),
    ("/v2/models/*", USE),
    ("/v2/repository/index", USE),
    ("/v2/repository/models/*", LOAD),
    ("/v2/systemsharedmemory/*", USE),
    ("/v2/cudasharedmemory/*", USE),
    ("/v2/health/live", Need::Nobody),
    ("/v2/health/ready", Need::Nobody),
    // Probes of whoever runs the host have no token.
    ("/healthz", Need::Nobody),
    ("/metrics", USE),
    // The page itself is everybody's; what it shows is not.
    ("/live", Need::Nobody),
    ("/live/page.css", Need::Nobody),
    ("/live/page.js", Need::Nobody),
    ("/live/*", DEBUG),
    ("/readyz", Need::Nobody),
    ("/vllm.grpc.engine.VllmEngine/HealthCheck", Need::Nobody),
    ("/grpc.health.v1.Health/Check", Need::Nobody),
    ("/grpc.health.v1.Health/Watch", Need::Nobody),
    ("/grpc.health.v1.Health/List", Need::Nobody),
    (
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        USE,
    ),
    (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        USE,
    ),
];

/// What the call of this path needs. One that is in no row is nobody's but an admin's; a row that ends in `/*` is for all
/// that begins like it and has no row of its own.
pub fn need(path: &str) -> Need {
    row(path).unwrap_or(ADMIN)
}

/// What the row for this path says, if there is one.
pub fn row(path: &str) -> Option<Need> {
    let within = |known: &str| {
        let folder = known.strip_suffix('*');
        folder.is_some_and(|folder| path.starts_with(folder))
    };
    let own = TABLE.iter().find(|(known, _)| *known == path);
    let row = own.or_else(|| TABLE.iter().find(|(known, _)| within(known)));
    row.map(|(_, need)| *need)
}

/// Roles and their calls, for `--help`.
pub fn help() -> String {
    let mut text = String::from("Roles of callers, and the calls that need them:\n");
    let mut line = |name: &str, what: &str, need: Need| {
        let rows = TABLE.iter().filter(|(_, of)| *of == need);
        let mut services: Vec<(&str, Vec<&str>)> = Vec::new();
        for (path, _) in rows {
            let (service, method) = path[1..].split_once('/').unwrap_or((path, ""));
            let service = service.strip_prefix("hotcell.v1.").unwrap_or(service);
            match services.iter_mut().find(|(known, _)| *known == service) {
                Some((_, methods)) => methods.push(method),
                None => services.push((service, vec![method])),
            }
        }
        let services: Vec<_> = services
            .iter()
            .map(|(service, methods)| format!("{service} {}", methods.join(", ")))
            .collect();
        text.push_str(&format!("  {name:<6} {what}: {}\n", services.join("; ")));
    };
    for (role, name, what) in Role::ALL {
        line(name, what, Need::Role(*role));
    }
    line("none", "whoever is let in", Need::Nobody);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_has_every_role_and_nobody_else_has_a_role_that_was_not_given() {
        let some: Roles = "use+debug".parse().unwrap();
        assert!(some.has(Role::Use) && some.has(Role::Debug));
        assert!(!some.has(Role::Load) && !some.has(Role::Admin));
        let admin: Roles = "admin".parse().unwrap();
        assert!(Role::ALL.iter().all(|(role, ..)| admin.has(*role)));
        assert!(!Roles::TOKENLESS.has(Role::Admin));
        assert!("".parse::<Roles>().is_err() && "use+root".parse::<Roles>().is_err());
        assert_eq!("load+use".parse::<Roles>().unwrap().to_string(), "use+load");
    }

    #[test]
    fn a_call_in_no_row_is_an_admins() {
        assert_eq!(need("/hotcell.v1.Control/Explode"), ADMIN);
        assert_eq!(need("/hotcell.v1.Tokens/Generate"), USE);
        assert_eq!(need(""), ADMIN);
        let help = help();
        assert!(help.contains("Control ReleaseWorker"), "{help}");
    }
}
