//! Settings of logs and traces, as they are. They are the operator's, not a client's.

use std::collections::HashMap;

use hotcell_gateways::inference::{
    LogSettingsResponse, TraceSettingResponse, log_settings_response, trace_setting_response,
};
use hotcell_proto::error::{Error, Reason};
use log_settings_response::setting_value::ParameterChoice;

/// Refuses to change anything.
///
/// # Errors
/// [`Reason::Unimplemented`] if there is something to change.
pub(super) fn unchanged(settings: usize) -> Result<(), Error> {
    match settings {
        0 => Ok(()),
        _ => Err(Error::new(
            Reason::Unimplemented,
            "logs and traces are set up where the scheduler is started, with --log",
        )),
    }
}

/// Nothing is traced by this protocol's means.
pub(super) fn traces() -> TraceSettingResponse {
    let off = trace_setting_response::SettingValue {
        value: vec!["OFF".to_owned()],
    };
    TraceSettingResponse {
        settings: HashMap::from([("trace_level".to_owned(), off)]),
    }
}

/// What is logged.
pub(super) fn logs() -> LogSettingsResponse {
    let verbose = u32::from(tracing::enabled!(tracing::Level::DEBUG))
        + u32::from(tracing::enabled!(tracing::Level::TRACE));
    let all = [
        (
            "log_info",
            ParameterChoice::BoolParam(tracing::enabled!(tracing::Level::INFO)),
        ),
        (
            "log_warning",
            ParameterChoice::BoolParam(tracing::enabled!(tracing::Level::WARN)),
        ),
        (
            "log_error",
            ParameterChoice::BoolParam(tracing::enabled!(tracing::Level::ERROR)),
        ),
        ("log_verbose_level", ParameterChoice::Uint32Param(verbose)),
    ];
    let settings = all.into_iter().map(|(name, value)| {
        let value = log_settings_response::SettingValue {
            parameter_choice: Some(value),
        };
        (name.to_owned(), value)
    });
    LogSettingsResponse {
        settings: settings.collect(),
    }
}
