//! A program that is several processes, which compute models together.

use hotcell_ipc::{blackbox::Writer, child::ExitStatus};
use hotcell_kernels::registry::Registry;

use super::{accept, allowed_cores, confined, fail, prepare, record};
use crate::{
    config::Common,
    confine,
    engine::{self, EngineConfig},
    exit::Exit,
    last_words,
    members::{self, Member, Side},
    model::run::Division,
};

/// A member of this worker's communicator is lost, perhaps by this end: those outside see it as the worker's own.
pub(super) fn member_lost(why: &str, how: Option<ExitStatus>) {
    let how_it_ended = how.map_or_else(String::new, |how| format!(" ({how})"));
    let what = format!("{why}{how_it_ended}");
    // One that gave up has printed why, which is the line that a death's reason ends with.
    if !matches!(how, Some(ExitStatus::Code(code)) if code != Exit::Ok.code()) {
        eprintln!("error: {what}");
    }
    // It may have left last words of its own, which say more.
    last_words::error_unless_said(&what);
    let code = match how {
        Some(ExitStatus::Code(code)) if code != Exit::Ok.code() => code,
        Some(ExitStatus::Signal { signal, .. }) => {
            last_words::die_of(signal);
            Exit::DeviceError.code()
        }
        _ => Exit::DeviceError.code(),
    };
    // SAFETY: ends the process at once, whatever its other threads are at.
    unsafe { libc::_exit(code) }
}

/// Makes the processes that compute models together with this one, if there are to be any, each with its share of the
/// cores. Which of them this is; `None`: there is no other.
pub(super) fn divided(common: &mut Common) -> Result<Option<Side>, Exit> {
    let (members, division) = match (common.tensor_parallel, common.pipeline_parallel) {
        (1, 1) => return Ok(None),
        (1, members) => (members, Division::Layers),
        (members, 1) => (members, Division::Columns),
        _ => {
            let what =
                "--tensor-parallel and --pipeline-parallel cannot both be more than 1; choose one";
            return Err(fail(Exit::Usage, what));
        }
    };
    let cores = match common.cores.is_empty() {
        true => allowed_cores(),
        false => common.cores.clone(),
    };
    let side = members::fork(members, division).map_err(|error| {
        let what = format_args!("the members of its communicator cannot be made: {error}");
        fail(Exit::Internal, what)
    })?;
    let rank = match &side {
        Side::Leader(leads) => leads.parts().share.rank,
        Side::Member(member) => member.parts().share.rank,
    };
    common.device = device_of(&common.device, rank);
    let each = (cores.len() / members).max(1);
    let first = rank * each % cores.len().max(1);
    common.cores = cores.into_iter().skip(first).take(each).collect();
    Ok(Some(side))
}

/// The device of a member: all have the processor, and of other kinds of devices each its own, one after another.
fn device_of(first: &str, rank: usize) -> String {
    let numbered = first
        .split_once(':')
        .and_then(|(backend, number)| Some((backend, number.parse::<usize>().ok()?)));
    match numbered {
        Some((backend, number)) if backend != "cpu" => {
            format!("{backend}:{}", number.saturating_add(rank))
        }
        _ => first.to_owned(),
    }
}

/// Computes its part of what another process leads, until that is gone. Its last words are those of the whole.
pub(super) fn be_member(
    member: Member,
    common: &Common,
    registry: Registry,
    mode: confine::Mode,
    blackbox: Writer,
) -> Exit {
    let share = member.parts().share;
    let prepared = prepare(common, registry, Writer::private(engine::names()));
    record(blackbox);
    let report = match confined(mode, &prepared.engine) {
        Ok(report) => report,
        Err(exit) => return exit,
    };
    if let Err(exit) = accept(&prepared, &report) {
        return exit;
    }
    let EngineConfig {
        registry,
        device,
        cores,
        pins,
        ..
    } = prepared.engine;
    let device = match registry.open(&device, &cores) {
        Ok(device) => device,
        Err(error) => return fail(Exit::NoDevice, error),
    };
    // Which node the worker is at is its leader's to say: here it is only of use to who traces all of them.
    let own = Writer::private(engine::names());
    let (alone, node) = own.trail();
    let progress = match member.parts().division {
        // The leader waits for whole stages, and is no worker that hangs while these compute.
        Division::Layers => blackbox.trail().0,
        Division::Columns => alone,
    };
    device.leave(engine::trail(progress, node));
    if pins && let Err(error) = device.pin() {
        tracing::warn!(%error, "compute threads go where the system has them");
    }
    // Also where what computes hears of nothing: it may not be there to be killed by.
    let watched = std::thread::Builder::new().name("leader".to_owned());
    let gone = member.gone().and_then(|gone| {
        watched.spawn(move || {
            gone();
            // SAFETY: ends the process at once, whatever its other threads are at.
            unsafe { libc::_exit(Exit::Ok.code()) }
        })
    });
    if let Err(error) = gone {
        return fail(
            Exit::Internal,
            format_args!("the leader cannot be watched: {error}"),
        );
    }
    match members::follow(member, device.as_ref(), node) {
        Ok(()) => Exit::Ok,
        Err(error) => fail(
            Exit::DeviceError,
            format_args!("member {} of {}: {error}", share.rank, share.members),
        ),
    }
}
